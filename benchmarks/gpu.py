"""How fast fusednorm is on this GPU, beside its peers and the speed of a copy.

    python -P benchmarks/gpu.py [--rows 1,4096] [--sizes 4096,5120] [--dtype bfloat16] [--passes forward,backward]
                                [--backends cuda,triton] [--minutes 9] [--json results.json]
    python -P benchmarks/gpu.py --table results.json       (prints a saved run as tables)
    TRITON_INTERPRET=1 python -P benchmarks/gpu.py --dry-run       (without a GPU: small, and the times mean nothing)

First fusednorm's bits are compared with the reference's. Then all contenders of one shape take turns, round after
round; a figure is the median over the rounds, in microseconds:

    eager   a call from Python, many after another, new outputs as the contender makes them
    graph   the same call replayed from a CUDA graph: the kernels alone. Each repetition within the graph has operands
            of its own, together at least four times the L2 cache, or 256 sets of them.

In brackets the share of the bandwidth of `torch.Tensor.copy_` on a gibibyte, measured first: two reads and two writes
per element forward; backward three reads (dy, the gradient of the sum, h) and one write. Peers that are not installed
are left out: Liger (`liger-kernel`), FlashInfer (`flashinfer-python`), quack (`quack-kernels`), vLLM (`vllm`). They
round otherwise; FlashInfer and vLLM work in place. Cells that do not fit the memory, or the minutes, are left out and
said so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

import fusednorm

ROWS = "1,16,64,512,4096,16384,65536"
SIZES = "128,896,2048,4096,5120,7168,8192,16384,65536"
EPS = 1e-6
ROUNDS = 7

Way = Callable[[Tensor, Tensor, Tensor], Any]


def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two of torch's operations."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def peers() -> dict[str, Way]:
    """What of the peers is installed."""
    found: dict[str, Way] = {}

    def look(name: str, module: str, way: Callable[[Any], Way]) -> None:
        try:
            found[name] = way(importlib.import_module(module))
        except ImportError as error:
            print(f"  without {name}: {error}")

    look("Liger", "liger_kernel.ops.fused_add_rms_norm", lambda module: lambda x, residual, weight: (
        module.LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)))  # fmt: skip
    look("FlashInfer", "flashinfer", lambda module: lambda x, residual, weight: (
        module.fused_add_rmsnorm(x, residual, weight, EPS) or (x, residual)))  # fmt: skip
    look("quack", "quack", lambda module: lambda x, residual, weight: (
        module.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)))  # fmt: skip
    look("vLLM", "vllm._custom_ops", lambda module: lambda x, residual, weight: (
        module.fused_add_rms_norm(x, residual, weight, EPS) or (x, residual)))  # fmt: skip
    return found


def ours(backend: str) -> Way:
    """fusednorm, new outputs."""

    def way(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with fusednorm.use_backend(backend):
            return fusednorm.fused_add_rms_norm(x, residual, weight, EPS)

    return way


def in_place(backend: str) -> Way:
    """fusednorm in place."""

    def way(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with fusednorm.use_backend(backend):
            return fusednorm.fused_add_rms_norm_(x, residual, weight, EPS)

    return way


class Machine:
    """Times calls on a device; on a CPU only so that the script can be tried there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_gpu = device != "cpu"
        self.l2 = torch.cuda.get_device_properties(0).L2_cache_size if self.on_gpu else 1 << 20

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, calls: Callable[[], None]) -> float:
        """Of work that has been queued and done."""
        self.synchronise()
        begin = time.perf_counter()
        calls()
        self.synchronise()
        return time.perf_counter() - begin

    def copy_bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        a = torch.zeros(1 << (28 if self.on_gpu else 18), dtype=torch.int32, device=self.device)
        b = torch.empty_like(a)
        b.copy_(a)
        return statistics.median(2 * a.nbytes / self.seconds(lambda: b.copy_(a)) for _ in range(20))

    def capture(self, call: Callable[[int], Any], repetitions: int) -> Callable[[], None]:
        """The calls 0, 1, ... as one graph."""
        if not self.on_gpu:
            return lambda: [call(i) for i in range(repetitions)] and None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(0)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(repetitions):
                call(i)
        return graph.replay


def tensors(machine: Machine, rows: int, size: int, dtype: torch.dtype, sets: int, count: int) -> list[list[Tensor]]:
    """Sets of operands, of which the first two are rows."""
    generator = torch.Generator(device=machine.device).manual_seed(0)
    shape = (rows, size)
    return [
        [
            torch.randn(shape, generator=generator, dtype=torch.float32, device=machine.device).to(dtype)
            for _ in range(count)
        ]
        for _ in range(sets)
    ]


def check(machine: Machine, backend: str, size: int, dtype: torch.dtype) -> None:
    """Outputs and gradients of a few rows against the reference on the CPU."""
    (operands,) = tensors(machine, 5, size, dtype, 1, 4)
    weight = operands.pop()[0]
    results = []
    for name, device in ((backend, machine.device), ("reference", "cpu")):
        leaves = [t.detach().to(device).requires_grad_() for t in (operands[0], operands[1], weight)]
        with fusednorm.use_backend(name):
            y, total = fusednorm.fused_add_rms_norm(*leaves, EPS)
            gradients = torch.autograd.grad((y, total), leaves, (operands[2].to(device), operands[0].to(device)))
        results.append([t.detach().cpu() for t in (y, total, *gradients)])
    for got, expected in zip(*results, strict=True):
        if not torch.equal(got, expected):
            sys.exit(f"{backend}, rows of {size} in {dtype}: the bits are not the reference's; nothing was timed")


def measure(machine: Machine, contenders: dict[str, Callable[[int], Any]], sets: int) -> dict[str, dict[str, float]]:
    """Medians of eager and graph times, in microseconds."""
    repetitions = max(sets, 8 if machine.on_gpu else 1)
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
    for name, call in contenders.items():
        try:
            call(0)
            graph = machine.capture(lambda i, call=call: call(i % sets), repetitions)
        except torch.cuda.OutOfMemoryError:
            print(f"    {name}: does not fit the memory")
            continue
        ways[name] = (lambda call=call: [call(i % sets) for i in range(repetitions)] and None, graph)
    times: dict[str, dict[str, list[float]]] = {name: {"eager": [], "graph": []} for name in ways}
    for _ in range(ROUNDS):
        for name, (calls, graph) in ways.items():
            times[name]["eager"].append(machine.seconds(calls) / repetitions * 1e6)
            times[name]["graph"].append(machine.seconds(graph) / repetitions * 1e6)
    return {name: {way: statistics.median(values) for way, values in both.items()} for name, both in times.items()}


def forward(machine: Machine, ways: dict[str, Way], rows: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """All contenders at one shape."""
    sets = number_of_sets(machine, rows * size * dtype.itemsize * 4)
    operands = tensors(machine, rows, size, dtype, sets, 2)
    weight = torch.ones(size, dtype=dtype, device=machine.device)
    with torch.no_grad():
        calls = {name: (lambda i, way=way: way(*operands[i], weight)) for name, way in ways.items()}
        return measure(machine, calls, sets)


def backward(machine: Machine, ways: dict[str, Way], rows: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Gradients of x, the residual and the weight from those of both outputs."""
    sets = number_of_sets(machine, rows * size * dtype.itemsize * 4, most=16)
    operands = tensors(machine, rows, size, dtype, sets, 4)
    weight = torch.ones(size, dtype=dtype, device=machine.device, requires_grad=True)
    calls: dict[str, Callable[[int], Any]] = {}
    for name, way in ways.items():
        graphs = []
        try:
            for x, residual, *given in operands:
                leaves = (x.detach().requires_grad_(), residual.detach().requires_grad_(), weight)
                graphs.append((way(*leaves), leaves, given))
        except (RuntimeError, NotImplementedError) as error:
            print(f"    {name} has no gradient: {str(error).splitlines()[0]}")
            continue
        calls[name] = lambda i, graphs=graphs: torch.autograd.grad(*graphs[i], retain_graph=True)
    return measure(machine, calls, sets)


def number_of_sets(machine: Machine, size: int, most: int = 256) -> int:
    """So many that together they exceed the cache four times."""
    return max(1, min(most if machine.on_gpu else 1, -(-4 * machine.l2 // size)))


def row_of_table(key: str, cell: dict[str, Any], traffic: int, bandwidth: float) -> str:
    """One shape, as a line."""
    parts = []
    for name, times in cell.items():
        share = traffic / (times["graph"] * 1e-6) / bandwidth
        parts.append(f"{name} {times['eager']:.1f} / {times['graph']:.1f} ({share:.0%})")
    return f"{key:24} " + "  ".join(parts)


def show(results: dict[str, Any]) -> None:
    """Every cell: eager / graph microseconds, and the share of the copy's bandwidth."""
    print(f"{results['device']}, torch {results['torch']}; a copy: {results['copy'] / 1e9:.0f} GB/s")
    for key, cell in results["cells"].items():
        _, rows, size = key.split()[:3]
        traffic = int(rows) * int(size) * results["itemsize"] * 4
        print(row_of_table(key, cell, traffic, results["copy"]))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--backends", help="those of fusednorm to measure; all that this GPU has, if left out")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further shape after so many")
    parser.add_argument("--json")
    parser.add_argument("--table")
    parser.add_argument("--dry-run", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        with open(chosen.table) as file:
            show(json.load(file))
        return
    if not chosen.dry_run and not torch.cuda.is_available():
        sys.exit("there is no GPU here; --dry-run with TRITON_INTERPRET=1 tries the script without one")
    began = time.monotonic()
    machine = Machine("cpu" if chosen.dry_run else "cuda")
    dtype = getattr(torch, chosen.dtype)
    rows = [1, 3] if chosen.dry_run else [int(n) for n in chosen.rows.split(",")]
    sizes = [128, 5120] if chosen.dry_run else [int(n) for n in chosen.sizes.split(",")]
    gpu = [b.name for b in fusednorm.backends() if b.available and b.name in ("cuda", "triton")]
    backends = chosen.backends.split(",") if chosen.backends else gpu
    ways: dict[str, Way] = {}
    for backend in backends:
        ways |= {backend: ours(backend), f"{backend} in place": in_place(backend)}
    ways |= {"eager": eager, "compiled": torch.compile(eager, dynamic=None), **peers()}
    torch._dynamo.config.cache_size_limit = 256
    torch._functorch.config.donated_buffer = False  # gradients are taken more than once
    for size in sizes:
        for backend in backends:
            check(machine, backend, size, dtype)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if machine.on_gpu else "a dry run",
        "torch": torch.__version__,
        "dtype": chosen.dtype,
        "itemsize": dtype.itemsize,
        "copy": machine.copy_bandwidth(),
        "cells": {},
    }
    print(f"bits are the reference's; {results['device']} copies at {results['copy'] / 1e9:.0f} GB/s", flush=True)
    measures = {"forward": forward, "backward": backward}
    for name in chosen.passes.split(","):
        taken = ways if name == "forward" else {way: f for way, f in ways.items() if "in place" not in way}
        for size in sizes:
            for row_count in rows:
                key = f"{name} {row_count} {size}"
                if time.monotonic() - began > chosen.minutes * 60:
                    print(f"{key}: left out, the minutes are over")
                    continue
                try:
                    cell = measures[name](machine, taken, row_count, size, dtype)
                except torch.cuda.OutOfMemoryError:
                    print(f"{key}: does not fit the memory")
                    continue
                results["cells"][key] = cell
                print(row_of_table(key, cell, row_count * size * dtype.itemsize * 4, results["copy"]), flush=True)
                if chosen.json:
                    with open(chosen.json, "w") as file:
                        json.dump(results, file, indent=1)
                gc.collect()
                if machine.on_gpu:
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
