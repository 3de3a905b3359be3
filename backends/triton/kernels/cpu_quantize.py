"""Triton's kernel for CPUs that quantizes rows, which it may normalise before (docs/spec.md, section 9).

A program takes one row, group by group: it reads a group once for its scale, and once more, from the cache, for its
numbers. A group may have any length, so one compiled kernel serves all. ``cpu_norm.py`` says how rows are
taken. All arithmetic but a norm's is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.cpu_norm import (
    AFTER,
    AGAIN,
    BEFORE,
    BY_RECIPROCAL,
    E4M3,
    E5M2,
    GIVEN,
    KEEP,
    MULTIPLIER,
    NORMALISES,
    OF_HEADS,
    PLUS_128,
    POWER_OF_TWO,
    RATIO,
    RECIPROCAL,
    STORES,
    TWO_LEVELS,
    after_norm,
    again,
    got,
    put,
    rstd_and_mean,
)
from fusednorm.backends.triton.kernels.numbers import narrowed, quotient, row_of_heads, rows_at, widened
from fusednorm.backends.triton.kernels.scales import (
    applied,
    at_least,
    at_most,
    ends,
    factor_of,
    in_order,
    numbers_of,
    scale_of,
    zero_point_of,
)


@triton.jit
def passed(row, more, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The elements that the quantizer takes, as float32."""
    if NORMALISES & FLAGS:
        of_norm, out_row = more
        y = after_norm(row, of_norm, at, left, FLAGS, A, SIZE)
        if STORES & FLAGS:
            put(out_row, at, left, narrowed(y, out_row.dtype.element_ty), SIZE)
    else:
        y = widened(got(row[0], at, left, SIZE), A)
    return y.to(tl.float32)


@triton.jit
def keys_of(y, FLAGS: tl.constexpr):
    """Whole numbers in the order of the elements, or of their magnitudes where there is no zero point to compute."""
    bits = y.to(tl.int32, bitcast=True)
    if (AFTER | BEFORE) & FLAGS:
        return in_order(bits)
    else:
        return bits & 0x7FFFFFFF


@triton.jit
def greatest(keys):
    """The greatest of [n], n a power of two: [1]."""
    for _ in tl.static_range(20):
        if keys.shape[0] > 1:
            keys = tl.max(tl.reshape(keys, (2, keys.shape[0] // 2)), axis=0)
    return keys


@triton.jit
def extremes(row, more, begin, length, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The greatest key of a group's elements, and of their keys with all bits inverted, [1] each.

    The second one counts only where zero points are computed.
    """
    LEAST: tl.constexpr = -2147483648 if (AFTER | BEFORE) & FLAGS else 0
    high, low = tl.full((SIZE,), LEAST, tl.int32), tl.full((SIZE,), LEAST, tl.int32)
    left = length % SIZE
    for at in range(begin, begin + length - left, SIZE):
        keys = keys_of(passed(row, more, at, None, FLAGS, A, SIZE), FLAGS)
        high = tl.maximum(high, keys)
        if (AFTER | BEFORE) & FLAGS:
            low = tl.maximum(low, ~keys)
    if left > 0:
        keys = keys_of(passed(row, more, begin + length - left, left, FLAGS, A, SIZE), FLAGS)
        there = tl.arange(0, SIZE) < left
        high = tl.maximum(high, tl.where(there, keys, LEAST))
        if (AFTER | BEFORE) & FLAGS:
            low = tl.maximum(low, tl.where(there, ~keys, LEAST))
    return greatest(high), greatest(low)


@triton.jit
def write_numbers(row, more, group, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """Writes the numbers of these elements of a group."""
    NUMBER: tl.constexpr = "e4m3" if E4M3 & FLAGS else ("e5m2" if E5M2 & FLAGS else "whole")
    POINT: tl.constexpr = "after" if AFTER & FLAGS else ("before" if BEFORE & FLAGS else "none")
    ZERO_POINT: tl.constexpr = "plus_128" if PLUS_128 & FLAGS else POINT
    APPLY: tl.constexpr = "divide" if ((RECIPROCAL | RATIO) & FLAGS) == 0 else "multiply"
    numbers_row, s, factor, zero, qmin, qmax = group
    v = applied(passed(row, more, at, left, FLAGS, A, SIZE), s, factor, APPLY)
    put(numbers_row, at, left, numbers_of(v, zero, qmin, qmax, NUMBER, ZERO_POINT), SIZE)


@triton.jit
def quantize_row(
    row,
    more,
    to,
    limits,
    hidden_size,
    length,
    FLAGS: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the scales and the numbers of a row. LAST: the flags with which its elements are read the last time."""
    COMPUTED: tl.constexpr = ((AFTER | BEFORE) & FLAGS) != 0
    SCALE_BY: tl.constexpr = "reciprocal" if BY_RECIPROCAL & FLAGS else "divide"
    UP_TO: tl.constexpr = (POWER_OF_TWO & FLAGS) != 0
    APPLY: tl.constexpr = "ratio" if RATIO & FLAGS else ("reciprocal" if RECIPROCAL & FLAGS else "divide")
    numbers_row, scale_row, scale_step, zero_point_row, zero_point_step = to
    qmin, qmax, amax_floor, amax_limit, scale_floor = limits
    one = tl.arange(0, 1)
    for number in range(hidden_size // length):
        begin = number * length
        zero = tl.zeros((1,), tl.int32)
        multiplier = tl.zeros((1,), tl.float32)
        if GIVEN & FLAGS:
            s = tl.load(scale_row + one)
            if COMPUTED:
                zero = tl.load(zero_point_row + one)
        else:
            greatest_key, inverted = extremes(row, more, begin, length, FLAGS, A, SIZE)
            steps = tl.full((1,), qmax, tl.float32)
            if COMPUTED:
                high = in_order(greatest_key).to(tl.float32, bitcast=True)
                high, low = ends(high, in_order(~inverted).to(tl.float32, bitcast=True))
                s = scale_of(high - low, steps - qmin, scale_floor, SCALE_BY, UP_TO)
                zero = zero_point_of(low, s, qmin)
                tl.store(zero_point_row + number * zero_point_step + one, zero)
            else:
                amax = at_most(at_least(greatest_key.to(tl.float32, bitcast=True), amax_floor), amax_limit)
                s = scale_of(amax, steps, scale_floor, SCALE_BY, UP_TO)
                multiplier = quotient(steps, amax, tl.float32)
            tl.store(scale_row + number * scale_step + one, multiplier if MULTIPLIER & FLAGS else s)
        group = (numbers_row, s, factor_of(s, multiplier, APPLY), zero, qmin, qmax)
        left = length % SIZE
        for at in range(begin, begin + length - left, SIZE):
            write_numbers(row, more, group, at, None, LAST, A, SIZE)
        if left > 0:
            write_numbers(row, more, group, begin + length - left, left, LAST, A, SIZE)


@triton.jit
def quantize(
    x,
    residual,
    weight,
    out,
    residual_out,
    bias,
    numbers,
    scale,
    zero_point,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    numbers_stride,
    scale_stride,
    scale_group_stride,
    zero_point_stride,
    zero_point_group_stride,
    inner,
    x_jump,
    residual_jump,
    out_jump,
    residual_out_jump,
    numbers_jump,
    scale_jump,
    zero_point_jump,
    hidden_size,
    group,
    weight_stride,
    bias_stride,
    heads,
    eps,
    weight_offset,
    x_scale,
    qmin,
    qmax,
    amax_floor,
    amax_limit,
    scale_floor,
    A: tl.constexpr,
    FLAGS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """Quantizes a row; ``group`` elements of it share a scale.

    With KEEP the sums are found in residual_out once they were added up, else they are stored when they are read the
    last time: residual_out may be x or the residual.
    """
    number = tl.program_id(0).to(tl.int64)
    levels = inner if TWO_LEVELS & FLAGS else None
    x_row = rows_at(x, number, x_stride, x_jump, levels)
    residual_row = rows_at(residual, number, residual_stride, residual_jump, levels)
    total_row = rows_at(residual_out, number, residual_out_stride, residual_out_jump, levels)
    out_row = rows_at(out, number, out_stride, out_jump, levels)
    row = (x_row, residual_row, total_row, x_scale, x_row, tl.zeros((1,), A))
    row_rstd = tl.zeros((1,), A)
    if NORMALISES & FLAGS:
        row_rstd, mean = rstd_and_mean(row, hidden_size, eps, FLAGS, A, SEGMENTS, TILE)
        row = again(row, mean, FLAGS)
    number_of_heads = heads if OF_HEADS & FLAGS else None
    weight_row = row_of_heads(weight, number, weight_stride, number_of_heads)
    bias_row = row_of_heads(bias, number, bias_stride, number_of_heads)
    more = ((x, row_rstd, weight_row, weight_offset, bias_row), out_row)
    numbers_row = rows_at(numbers, number, numbers_stride, numbers_jump, levels)
    scale_row = rows_at(scale, number, scale_stride, scale_jump, levels)
    zero_point_row = rows_at(zero_point, number, zero_point_stride, zero_point_jump, levels)
    to = (numbers_row, scale_row, scale_group_stride, zero_point_row, zero_point_group_stride)
    limits = (qmin, qmax, amax_floor, amax_limit, scale_floor)
    SIZE: tl.constexpr = TILE // 4
    if KEEP & FLAGS:
        quantize_row(row, more, to, limits, hidden_size, group, ~STORES & AGAIN & FLAGS, AGAIN & FLAGS, A, SIZE)
    else:
        quantize_row(row, more, to, limits, hidden_size, group, ~STORES & FLAGS, KEEP | FLAGS, A, SIZE)
