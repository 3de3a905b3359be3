"""Times torch.nn.functional.rms_norm by torch's own code and by fusednorm's, in turns: docs/torch.md has its tables.

    python -P benchmarks/torch_rms_norm.py

One thread, unless `--threads` says otherwise. Prints the least time of each over all turns, in us, and their ratio. The
last column is the ratio that torch's multiplication of x by the weight, alone, would have: less than a norm can do.
"""

import argparse
import itertools
import timeit

import torch
from torch.nn.functional import rms_norm

import fusednorm

WIDTH = 4096
#: Rows, sets of operands that take turns, calls of a turn, and turns.
CASES = ((1, 1, 200, 60), (32, 1, 20, 60), (8192, 4, 2, 8))


def forward(x, weight, _):
    """The norm."""
    rms_norm(x, (WIDTH,), weight, 1e-6)


def with_gradients(x, weight, dy):
    """The norm and its gradients."""
    torch.autograd.grad(rms_norm(x, (WIDTH,), weight, 1e-6), (x, weight), dy)


def multiplied(x, weight, _):
    """The norm's last step."""
    return x * weight


def measured(call, rows, dtype, sets, calls, turns, *, gradients):
    """The least time of a call by torch and by fusednorm, and of the norm's last step by torch, in us."""

    def operands(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_(gradients)

    weight, dy = operands(WIDTH), torch.randn(rows, WIDTH).to(dtype)
    xs = itertools.cycle([operands(rows, WIDTH) for _ in range(sets)])

    def turn(call=call):
        return timeit.timeit(lambda: call(next(xs), weight, dy), number=calls) / calls * 1e6

    times = []
    for _ in range(turns):
        its = turn()
        with fusednorm.accelerate_torch():
            times.append((its, turn(), turn(multiplied)))
    return map(min, zip(*times, strict=True))


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(
        "| Rows of 4096 | Dtype | torch, us | fusednorm, us | Ratio | Both ways, ratio | `x * weight`, ratio |\n"
        + "|---" * 7
        + "|"
    )
    for (rows, *turns), dtype in itertools.product(CASES, (torch.bfloat16, torch.float32)):
        its, ours, last_step = measured(forward, rows, dtype, *turns, gradients=False)
        its_both, ours_both, _ = measured(with_gradients, rows, dtype, *turns, gradients=True)
        figures = f"{its:.1f} | {ours:.1f} | {its / ours:.1f} | {its_both / ours_both:.1f} | {its / last_step:.1f}"
        print(f"| {rows} | {str(dtype)[6:]} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
