"""Measures this machine and prints its row of the table in cpu/run/tuning.c, with what each number gains.

    OMP_NUM_THREADS=1 python -P benchmarks/tune.py [--columns overlap block ...]

Every number is tried while all others stay as they are: the library's row is a copy that may be changed, and changes no
bit. Calls with each number take turns; one replaces the row's only if it takes 2 % less time. Run it more than once.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch

import fusednorm
from fusednorm import _cpu
from fusednorm.backends import cpu
from fusednorm.tools.measure.clock import Clock, Contender, Run

ROW = _cpu.lib.fn_tuning()
ALWAYS, NEVER = 2**63 - 1, 0
#: A number must gain so much to replace the one in use.
LEAST_GAIN = 0.98
#: Bytes of inputs that the first caches hold, and that none holds.
IN_CACHE, FROM_MEMORY = 2**19, 2**26


def rows_of(nbytes, size, dtype, count):
    """So many operands that have so many bytes together."""
    rows = max(4, nbytes // (size * dtype.itemsize * count))
    return [torch.randn(rows, size).to(dtype) for _ in range(count)]


def add_norm(nbytes, size, dtype, in_place):
    """A fused addition, and its operands: new outputs are given."""
    x, residual, out, residual_out = rows_of(2 * nbytes, size, dtype, 4)
    weight = torch.ones(size, dtype=dtype)
    if in_place:
        return functools.partial(fusednorm.fused_add_rms_norm_, x, residual, weight)
    return functools.partial(fusednorm.fused_add_rms_norm, x, residual, weight, out=out, residual_out=residual_out)


def two_norms(nbytes, size, dtype):
    """A norm, an addition and a norm."""
    x, residual = rows_of(nbytes, size, dtype, 2)
    weight = torch.ones(size, dtype=dtype)
    return functools.partial(fusednorm.rms_norm_add_rms_norm, x, residual, weight, weight)


def biased(nbytes, size, dtype):
    """A norm with a bias."""
    (x,) = rows_of(nbytes, size, dtype, 1)
    weight = torch.ones(size, dtype=dtype)
    return functools.partial(fusednorm.rms_norm, x, weight, bias=weight)


def gated(nbytes, gradients):
    """A norm and a gate, or its gradients."""
    x, gate = rows_of(nbytes, 4096, torch.bfloat16, 2)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    if not gradients:
        return functools.partial(fusednorm.rms_norm_gated, x, gate, weight)
    y = fusednorm.rms_norm_gated(x.requires_grad_(), gate.requires_grad_(), weight)
    return functools.partial(torch.autograd.grad, y, (x, gate), torch.ones_like(y), retain_graph=True)


def heads():
    """Heads that are normalised and rotated in place."""
    q, k = (torch.randn(256, count, 128, dtype=torch.bfloat16) for count in (32, 8))
    weight, table = torch.ones(128, dtype=torch.bfloat16), torch.ones(256, 64, dtype=torch.bfloat16)
    return functools.partial(fusednorm.qk_norm_rope_, q, k, weight, weight, table, table)


def times(number, values, call):
    """The time of a call with each value of a number."""

    def with_value(value):
        number[0] = value
        return call()

    runs = [Run(Contender(str(value), call, 0), functools.partial(with_value, value), [()]) for value in values]
    before = number[0]
    found = [figures["eager"] for figures in Clock(torch.device("cpu")).timed(runs)]
    number[0] = before
    return dict(zip(values, found, strict=True))


def longest(calls, number):
    """The largest limit up to which it is no loss that rows are within one; `calls` has a call for each limit."""
    limit, gains = NEVER, []
    for value, call in calls.items():
        found = times(number, (NEVER, ALWAYS), call)
        gains.append(f"{value}: {found[ALWAYS] / found[NEVER]:.2f}")
        if found[ALWAYS] > found[NEVER] / LEAST_GAIN:
            break
        limit = value
    return (ALWAYS if limit == max(calls) else limit), "time within the limit, " + ", ".join(gains)


def fastest(call, number):
    """The best of the number in use, and of a quarter to four times of it."""
    now = number[0]
    found = times(number, [now * factor // 4 for factor in (1, 2, 4, 8, 16)], call)
    best = min(found, key=found.get)
    return (
        best if found[best] < LEAST_GAIN * found[now] else now
    ), f"{found[best] / found[now]:.2f} of the time at {best}"


def measurements():
    """The place of each number in the row, and its measurement."""
    sizes = [2**k for k in range(10, 15)]
    for column, dtype in (("overlap_f16", torch.float16), ("overlap", torch.bfloat16)):
        yield (column,), functools.partial(longest, {4 * n: add_norm(IN_CACHE, n, dtype, in_place=True) for n in sizes})
    for column, unit in (("overlap_beyond", 4), ("overlap_sum_beyond", 1)):
        for new in (0, 1):
            calls = {unit * n: add_norm(FROM_MEMORY, n, torch.bfloat16, in_place=not new) for n in sizes}
            yield (column, new), functools.partial(longest, calls)
    for column, dtype in (("two_norms", torch.bfloat16), ("two_norms_f32", torch.float32)):
        for place, nbytes in enumerate((IN_CACHE, FROM_MEMORY)):
            yield (column, place), functools.partial(longest, {n: two_norms(nbytes, n, dtype) for n in sizes})
    yield ("widened",), functools.partial(longest, {n: biased(IN_CACHE, n, torch.bfloat16) for n in sizes})
    for column, call in (("block", gated(2**23, False)), ("block_of_heads", heads()), ("chunk", gated(2**22, True))):
        yield (column,), functools.partial(fastest, call)


def main():
    """Prints the row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--columns", nargs="*", help="measure these alone")
    columns = parser.parse_args().columns
    torch.set_num_threads(1)
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        print("// cache of level", *((index / name).read_text().strip() for name in ("level", "type", "size")))
    print(f"// {cpu.variant()}; the row in use is {_cpu.ffi.string(ROW.name).decode()!r}")
    for (column, *place), measure in measurements():
        if not columns or column in columns:
            value, gain = measure(_cpu.ffi.addressof(ROW, column, *place))
            number = {ALWAYS: "FN_ALWAYS", NEVER: "FN_NEVER"}.get(value, value)
            print(f".{column}{''.join(f'[{k}]' for k in place)} = {number}, // {gain}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
