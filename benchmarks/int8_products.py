"""fusednorm.int8_linear beside torch's products and beside copying the weight, on a CPU.

    python -P benchmarks/int8_products.py [--threads 2] [--isa avx2]

Calls take turns, and a figure is the median of ratios of neighbours: how many times as long the other takes. Those of
torch are `torch._int_mm` with the scales multiplied after it, of more than 16 rows, and `torch.nn.functional.linear` in
bfloat16. Before a shape is timed, its results are compared with whole numbers.
"""

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

import fusednorm
from fusednorm.backends import cpu

#: Rows, elements of each, and columns.
SHAPES = [(1, 4096, 4096), (1, 1024, 3072), (1, 640, 65_536), (4, 4096, 4096), (32, 4096, 4096), (512, 1024, 3072)]


def contenders(rows: int, size: int, columns: int) -> dict:
    """Calls by name; ours first."""
    generator = torch.Generator().manual_seed(0)
    q, weight = (torch.randint(-128, 128, (n, size), generator=generator).to(torch.int8) for n in (rows, columns))
    scale, weight_scale = (torch.rand(shape, generator=generator) for shape in ((rows, 1), columns))
    x, wide = torch.randn(rows, size, generator=generator).bfloat16(), weight.bfloat16()
    other = torch.empty_like(weight)
    exact = (q.double() @ weight.double().t()).float() * weight_scale * scale
    calls = {
        "ours": lambda: fusednorm.int8_linear(q, scale, weight, weight_scale, out_dtype=torch.bfloat16),
        "copy of the weight": lambda: other.copy_(weight),
        "linear, bfloat16": lambda: torch.nn.functional.linear(x, wide),
    }
    if rows > 16:
        calls["_int_mm, scaled"] = lambda: (torch._int_mm(q, weight.t()) * weight_scale * scale).bfloat16()
    assert torch.equal(calls["ours"](), exact.bfloat16()), (rows, size, columns)
    return calls


def ratios(calls: dict, seconds: float = 1.0) -> dict[str, float]:
    """The medians of how many times as long each takes as ours before it, and ours in ms."""
    ours, *others = calls
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[ours]) < 7:
        for name in others:
            pair = []
            for call in (calls[ours], calls[name]):
                begin = time.perf_counter()
                call()
                pair.append(time.perf_counter() - begin)
            found[ours].append(pair[0] * 1e3)
            found[name].append(pair[1] / pair[0])
    return {name: statistics.median(one) for name, one in found.items()}


def main() -> None:
    """Prints a line for each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=cpu.variants())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = ("copy of the weight", "linear, bfloat16", "_int_mm, scaled")
    print(f"| Rows, elements, columns | ours, ms | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
    with cpu.use_variant(options.isa) if options.isa else nullcontext():
        for shape in SHAPES:
            found = ratios(contenders(*shape))
            cells = (f"{found[name]:.2f}" if name in found else "" for name in names)
            print(f"| {' x '.join(map(str, shape))} | {found['ours']:.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
