"""How fast the gradients of fused_add_rms_norm are on this CPU, beside torch's autograd of eager and compiled code.

    python -P benchmarks/cpu_backward.py [--threads 1,2] [--dtypes bfloat16,float16,float32] [--shapes 512x4096]

First fusednorm's gradients must be the reference's, bit for bit. Then the contenders take turns, in blocks of calls of
which the first is not counted: it meets the caches and the allocator as another contender left them. A figure is the
median of all others, in microseconds per `torch.autograd.grad` of both outputs with respect to x, the residual and the
weight; compare within one row.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time

import torch

import fusednorm

ROUNDS, CALLS = 5, 4


def eager(x, residual, weight):
    """What torch users write."""
    total = x + residual
    return torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-6), total


def operands(rows, hidden_size, dtype):
    """x, residual and weight, which require gradients, and the gradients that come in."""
    generator = torch.Generator().manual_seed(0)
    x, residual, dy, d_total = (torch.randn(rows, hidden_size, generator=generator).to(dtype) for _ in range(4))
    weight = torch.rand(hidden_size, generator=generator).to(dtype)
    return [t.requires_grad_() for t in (x, residual, weight)], (dy, d_total)


def measure(rows, hidden_size, dtype):
    """Contender -> microseconds."""
    leaves, incoming = operands(rows, hidden_size, dtype)
    contenders = {
        "fusednorm": fusednorm.fused_add_rms_norm,
        "eager": eager,
        "compiled": torch.compile(eager, dynamic=False),
    }

    def gradients(outputs):
        return torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)

    with fusednorm.use_backend("reference"):
        expected = gradients(fusednorm.fused_add_rms_norm(*leaves))
    outputs = {name: function(*leaves) for name, function in contenders.items()}
    for name, got, wanted in zip(("x", "residual", "weight"), gradients(outputs["fusednorm"]), expected, strict=True):
        if not torch.equal(got, wanted):
            sys.exit(f"the gradient of {name} at {rows}x{hidden_size}, {dtype}, is not the reference's")
    times = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name in contenders:
            for call in range(CALLS + 1):
                begin = time.perf_counter()
                gradients(outputs[name])
                if call:
                    times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def main():
    """Starts a process for each number of threads, because OpenMP and torch keep what they start with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--shapes", default="512x4096,2048x4096")
    arguments = parser.parse_args()
    if "," in arguments.threads:
        for threads in arguments.threads.split(","):
            command = [sys.executable, "-P", *sys.argv, "--threads", threads]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": threads}, check=True)
        return
    torch.set_num_threads(int(arguments.threads))
    for dtype, shape in itertools.product(arguments.dtypes.split(","), arguments.shapes.split(",")):
        us = measure(*map(int, shape.split("x")), getattr(torch, dtype))
        ratios = ", ".join(f"{name} {us[name]:.0f} ({us[name] / us['fusednorm']:.1f}x)" for name in us)
        print(f"{arguments.threads} x {dtype:8} {shape:>10}  {ratios}", flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
