"""fusednorm.attention beside torch's scaled_dot_product_attention and beside copying keys and values, on a CPU.

    python -P benchmarks/attention.py [--threads 2] [--isa avx2] [--dtype float16]

Calls take turns, and a figure is the median of ratios of neighbours. One query decodes, a prompt is causal. Before a
shape is timed, its results are compared with attention in float64.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import fusednorm
from fusednorm.backends import cpu

#: Heads of queries, heads of keys, their size, queries and keys.
ONE_QUERY = [(16, 8, 128, 1, keys) for keys in (64, 128, 1024, 4096)]
ONE_QUERY += [(32, 8, 128, 1, 4096), (32, 8, 64, 1, 4096), (4, 1, 256, 1, 4096)]
PROMPTS = [(16, 8, 128, queries, queries) for queries in (512, 2048)]


def ours(q, k, v):
    """Of fusednorm."""
    return fusednorm.attention(q, k, v)


def of_torch(q, k, v):
    """Of torch, as a user calls it."""
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def copied(k, v, to):
    """Reads keys and values once, and writes them."""
    to[0].copy_(k)
    to[1].copy_(v)


def seconds(call, repeats):
    """Of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measured(calls, turns):
    """The median time of each call, and that of its ratios to the first one's."""
    repeats = [max(1, int(0.02 / max(seconds(call, 1), 1e-6))) for call in calls]
    times = [[seconds(*each) for each in zip(calls, repeats, strict=True)] for _ in range(turns)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians, [statistics.median(turn[0] / turn[i] for turn in times) for i in range(len(calls))]


def compare(q, k, v):
    """Raises AssertionError where a result is off by more than a rounding to its dtype, and a little for sums."""
    exact = of_torch(q.double(), k.double(), v.double())
    # Weights are positive and sum to 1: sums of float32 are off by less than 1e-5 of the largest value.
    error = (ours(q, k, v).double() - exact).abs().max().item()
    assert error <= (torch.finfo(q.dtype).eps / 2 + 1e-5) * v.abs().max().item(), error


def main():
    """Prints a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=cpu.variants(), help="an instruction set; torch keeps its own")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{'heads':>8}{'size':>6}{'queries':>9}{'keys':>6}{'ms':>9}{'torch':>9}{'of torch':>10}{'of a copy':>11}")
    with cpu.use_variant(arguments.isa) if arguments.isa else nullcontext():
        for heads, kv_heads, size, queries, keys in ONE_QUERY + PROMPTS:
            q = torch.randn(1, heads, queries, size).to(getattr(torch, arguments.dtype))
            k, v = (torch.randn(1, kv_heads, keys, size).to(q.dtype) for _ in range(2))
            compare(q, k, v)
            copies = torch.empty_like(k), torch.empty_like(v)
            calls = partial(ours, q, k, v), partial(of_torch, q, k, v), partial(copied, k, v, copies)
            times, ratios = measured(calls, arguments.turns)
            name = f"{heads}/{kv_heads}"
            print(
                f"{name:>8}{size:6}{queries:9}{keys:6}{1e3 * times[0]:9.3f}{1e3 * times[1]:9.3f}{ratios[1]:10.2f}"
                f"{ratios[2]:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
