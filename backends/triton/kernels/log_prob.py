"""Log-probabilities in Triton, on GPUs and CPUs: docs/spec.md, section 11.

A program takes a row, and reads it two or three times, tile by tile (``tiles.py``); nothing of its length is kept but
the sums of its segments. On a CPU a tile is a segment, and what follows the last whole one is read and written in
pieces, as ``cpu_norm.py`` does it. ``PROCESSOR`` is None on a GPU, and on a CPU the key of compiled code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.cpu_norm import got, put
from fusednorm.backends.triton.kernels.gates import (
    LN2_HIGH_F32,
    LN2_HIGH_F64,
    LN2_LOW_F32,
    LN2_LOW_F64,
    between,
    constant,
    exponential,
    no_less,
    no_more,
    polynomial,
    power,
)
from fusednorm.backends.triton.kernels.numbers import narrowed, quotient, rows_at, widened
from fusednorm.backends.triton.kernels.tiles import columns_of_tile, total_of, with_sums
from fusednorm.calls.function_constants import LOGARITHMS, TANGENTS

ROOT_F32, ROOT_F64 = (tl.constexpr(LOGARITHMS[dtype].root) for dtype in (torch.float32, torch.float64))
LOGARITHM_F32, LOGARITHM_F64 = (
    tl.constexpr(LOGARITHMS[dtype].coefficients) for dtype in (torch.float32, torch.float64)
)
TANGENT_F32, TANGENT_F64 = (tl.constexpr(TANGENTS[dtype].tangent) for dtype in (torch.float32, torch.float64))


@triton.jit
def exp(t, A: tl.constexpr):
    """The exponential."""
    t = no_more(no_less(t, -760.0 if A == tl.float64 else -110.0, A), 710.0 if A == tl.float64 else 89.0, A)
    p, exponent = exponential(t, A)
    half = exponent >> 1
    return p * power(half, A) * power(exponent - half, A)


@triton.jit
def log(x, A: tl.constexpr):
    """The logarithm of numbers from 1 to 2^31; NaN for a NaN."""
    if A == tl.float64:
        beyond = x.to(tl.int64, bitcast=True) - ROOT_F64
        k = (beyond >> 52).to(A)
        f = ((beyond & 0xFFFFFFFFFFFFF) + ROOT_F64).to(A, bitcast=True) - constant(x, 1.0, A)
    else:
        beyond = x.to(tl.int32, bitcast=True) - ROOT_F32
        k = (beyond >> 23).to(A)
        f = ((beyond & 0x7FFFFF) + ROOT_F32).to(A, bitcast=True) - constant(x, 1.0, A)
    s = quotient(f, f + constant(x, 2.0, A), A)
    half = f * f * constant(x, 0.5, A)
    z = s * s
    c = polynomial(z, z * z, LOGARITHM_F32, LOGARITHM_F64, A)
    high = k * constant(x, LN2_HIGH_F64 if A == tl.float64 else LN2_HIGH_F32, A)
    low = k * constant(x, LN2_LOW_F64 if A == tl.float64 else LN2_LOW_F32, A)
    # x - x is 0, or NaN for a NaN.
    return high + (f - (half - ((half + c * z) * s + low))) + (x - x)


@triton.jit
def tanh(x, A: tl.constexpr):
    """The hyperbolic tangent."""
    a = tl.abs(x)
    t = a * a
    c = polynomial(t, t * t, TANGENT_F32, TANGENT_F64, A)
    one = constant(x, 1.0, A)
    e = exp(no_more(a, 20.0 if A == tl.float64 else 10.0, A) * constant(x, 2.0, A), A)
    high = one - quotient(constant(x, 2.0, A), e + one, A)
    value = tl.where(a < constant(x, 0.75, A), c * t * a + a, high)
    return tl.where(x < constant(x, 0.0, A), constant(x, 0.0, A) - value, value)


@triton.jit
def tile_at(row, at, left, column, PROCESSOR: tl.constexpr):
    """The numbers of a tile as they are stored; of the last one ``left`` are there, else ``left`` is None."""
    if left is None:
        return tl.load(row + at + column)
    elif PROCESSOR is None:
        return tl.load(row + at + column, mask=column < left, other=0)
    else:
        return tl.reshape(got(row, at, left, column.shape[1]), (1, column.shape[1]))


@triton.jit
def store_tile(value, row, at, left, column, PROCESSOR: tl.constexpr):
    """Stores a tile where :func:`tile_at` finds it, rounded to the type of the row."""
    value = narrowed(value, row.dtype.element_ty)
    if left is None:
        tl.store(row + at + column, value)
    elif PROCESSOR is None:
        tl.store(row + at + column, value, mask=column < left)
    else:
        put(row, at, left, tl.reshape(value, (column.shape[1],)), column.shape[1])


@triton.jit
def within(value, column, left, outside: tl.constexpr, A: tl.constexpr):
    """The numbers of a tile, and another one where none are there."""
    return value if left is None else tl.where(column < left, value, constant(value, outside, A))


@triton.jit
def number_at(numbers, place, A: tl.constexpr):
    """One number of an operand that has one for each row, or each id: [1, 1], as ``A``."""
    return tl.reshape(widened(tl.load(numbers + place + tl.arange(0, 1)), A), (1, 1))


@triton.jit
def store_number(value, numbers, place):
    """Stores such a number."""
    tl.store(numbers + place + tl.arange(0, 1), narrowed(tl.reshape(value, (1,)), numbers.dtype.element_ty))


@triton.jit
def capped(x, softcap, A: tl.constexpr):
    """``softcap * tanh(x / softcap)``, and its derivative."""
    cap = tl.full(x.shape, softcap, A)
    t, one = tanh(quotient(x, cap, A), A), constant(x, 1.0, A)
    return cap * t, (one - t) * (one + t)


@triton.jit
def arguments(stored, softcap, temperature, TYPE: tl.constexpr, A: tl.constexpr):
    """Stored logits as the softmax takes them, and the derivative of the softcap.

    ``softcap``, ``temperature``: None where there is none.
    """
    t = widened(stored, A)
    slope = t
    if softcap is not None:
        t, slope = capped(t, softcap, A)
        t = between(t, TYPE, A)
    if temperature is not None:
        t = quotient(t, tl.broadcast_to(temperature, t.shape), A)
    return t, slope


@triton.jit
def greatest(most, A: tl.constexpr):
    """The greatest number of a tile, [1, 1]; NaN if one is NaN."""
    nan = most != most
    number = tl.full((1, 1), tl.max(tl.where(nan, constant(most, float("-inf"), A), most)), A)
    return tl.where(tl.max(nan.to(tl.int32)) > 0, constant(number, float("nan"), A), number)


@triton.jit
def id_at(ids, place, size, ignore_index, ignores):
    """An id; whether there is such an element, and whether the id is not to be ignored."""
    chosen = tl.load(ids + place).to(tl.int64)
    return chosen, (chosen >= 0) & (chosen < size), (chosen != ignore_index) | (ignores == 0)


@triton.jit
def log_prob(
    logits,
    ids,
    temperature,
    out,
    result,
    m,
    s,
    entropy,
    d,
    d_result,
    d_entropy,
    logits_stride,
    out_stride,
    d_stride,
    inner,
    logits_jump,
    out_jump,
    d_jump,
    hidden_size,
    count,
    ignore_index,
    ignores,
    softcap,
    A: tl.constexpr,
    OPERATION: tl.constexpr,
    CAPPED: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """The greatest number and the sum of exponentials of a row, and the results of the operation.

    ``out`` receives the row of log_softmax, ``result`` a number for the row, or for each of its ``count`` ids. ``d``
    and what belongs to it are the gradient's: C gives both kernels the same arguments.
    """
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    TYPE: tl.constexpr = logits.dtype.element_ty
    ENTROPY: tl.constexpr = OPERATION == "selected_and_entropy"
    row = tl.program_id(0).to(tl.int64)
    x_row = rows_at(logits, row, logits_stride, logits_jump, inner)
    cap = softcap if CAPPED else None
    divisor = number_at(temperature, row, A) if DIVIDES else None
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    size = hidden_size.to(tl.int32)
    left = size % TILE
    whole = size - left
    most = tl.full(column.shape, float("-inf"), A)
    for last in tl.static_range(2):  # whole tiles, and then a part of one
        for at in range(whole if last else 0, size if last else whole, TILE):
            there = left if last else None
            t, _ = arguments(tile_at(x_row, at, there, column, PROCESSOR), cap, divisor, TYPE, A)
            t = within(t, column, there, float("-inf"), A)
            most = tl.maximum(most, t, propagate_nan=tl.PropagateNan.ALL)
    row_m = greatest(most, A)
    index = tl.arange(0, TILES)[:, None]
    sums, sums_of_z = tl.zeros((TILES, SEGMENTS), A), tl.zeros((TILES, SEGMENTS), A)
    for last in tl.static_range(2):
        for at in range(whole if last else 0, size if last else whole, TILE):
            there = left if last else None
            t, _ = arguments(tile_at(x_row, at, there, column, PROCESSOR), cap, divisor, TYPE, A)
            below = t - row_m
            e = within(exp(below, A), column, there, 0.0, A)
            sums = with_sums(sums, index == at // TILE, e, VECTOR)
            if ENTROPY:
                z = tl.where(e == 0, constant(e, 0.0, A), e * below)
                sums_of_z = with_sums(sums_of_z, index == at // TILE, z, VECTOR)
    row_s = tl.reshape(total_of(sums), (1, 1))
    log_s = log(row_s, A)
    store_number(row_m, m, row)
    store_number(row_s, s, row)
    if OPERATION == "log_softmax":
        out_row = rows_at(out, row, out_stride, out_jump, inner)
        for last in tl.static_range(2):
            for at in range(whole if last else 0, size if last else whole, TILE):
                there = left if last else None
                t, _ = arguments(tile_at(x_row, at, there, column, PROCESSOR), cap, divisor, TYPE, A)
                store_tile((t - row_m) - log_s, out_row, at, there, column, PROCESSOR)
    elif OPERATION == "logsumexp":
        store_number(tl.where(tl.abs(row_m) == float("inf"), row_m, row_m + log_s), result, row)
    else:
        zero = constant(row_m, 0.0, A)
        some = tl.zeros((1, 1), tl.int32)
        for k in range(count):
            chosen, exists, counted = id_at(ids, row * count + k, size, ignore_index, ignores)
            stored = tl.load(x_row + tl.where(exists, chosen, 0) + tl.arange(0, 1))
            t, _ = arguments(tl.reshape(stored, (1, 1)), cap, divisor, TYPE, A)
            found = tl.where(exists, (t - row_m) - log_s, constant(row_m, float("nan"), A))
            store_number(tl.where(counted, found, zero), result, row * count + k)
            some = some | counted.to(tl.int32)
        if ENTROPY:
            of_z = tl.reshape(total_of(sums_of_z), (1, 1))
            store_number(tl.where(some > 0, log_s - quotient(of_z, row_s, A), zero), entropy, row)


@triton.jit
def d_at(d_result, place, exists, counted, A: tl.constexpr):
    """The gradient of the log-probability of an id, [1, 1]."""
    d = tl.where(exists, number_at(d_result, place, A), tl.full((1, 1), float("nan"), A))
    return tl.where(counted, d, tl.full((1, 1), 0, A))


@triton.jit
def log_prob_backward(
    logits,
    ids,
    temperature,
    out,
    result,
    m,
    s,
    entropy,
    d,
    d_result,
    d_entropy,
    logits_stride,
    out_stride,
    d_stride,
    inner,
    logits_jump,
    out_jump,
    d_jump,
    hidden_size,
    count,
    ignore_index,
    ignores,
    softcap,
    A: tl.constexpr,
    OPERATION: tl.constexpr,
    CAPPED: tl.constexpr,
    DIVIDES: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """The gradient of a row of logits, in ``out``; ``d`` and ``d_result`` are those of ``out`` and ``result`` above.

    OPERATION is "selected" too where there is no gradient of the entropy.
    """
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    TYPE: tl.constexpr = logits.dtype.element_ty
    SELECTS: tl.constexpr = OPERATION == "selected" or OPERATION == "selected_and_entropy"
    ENTROPY: tl.constexpr = OPERATION == "selected_and_entropy"
    row = tl.program_id(0).to(tl.int64)
    x_row = rows_at(logits, row, logits_stride, logits_jump, inner)
    out_row = rows_at(out, row, out_stride, out_jump, inner)
    cap = softcap if CAPPED else None
    divisor = number_at(temperature, row, A) if DIVIDES else None
    row_m, row_s = number_at(m, row, A), number_at(s, row, A)
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    size = hidden_size.to(tl.int32)
    left = size % TILE
    whole = size - left
    total, some = tl.zeros((1, 1), A), tl.zeros((1, 1), tl.int32)
    if SELECTS:
        for k in range(count):
            _, exists, counted = id_at(ids, row * count + k, size, ignore_index, ignores)
            total = total + d_at(d_result, row * count + k, exists, counted, A)
            some = some | counted.to(tl.int32)
    elif OPERATION == "log_softmax":
        d_row = rows_at(d, row, d_stride, d_jump, inner)
        sums = tl.zeros((TILES, SEGMENTS), A)
        for last in tl.static_range(2):
            for at in range(whole if last else 0, size if last else whole, TILE):
                incoming = widened(tile_at(d_row, at, left if last else None, column, PROCESSOR), A)
                sums = with_sums(sums, tl.arange(0, TILES)[:, None] == at // TILE, incoming, VECTOR)
        total = tl.reshape(total_of(sums), (1, 1))
    else:
        total = number_at(d_result, row, A)
    if ENTROPY:
        log_s, h, dh = log(row_s, A), number_at(entropy, row, A), number_at(d_entropy, row, A)
    zero, one = tl.zeros(column.shape, A), tl.full(column.shape, 1, A)
    for last in tl.static_range(2):
        for at in range(whole if last else 0, size if last else whole, TILE):
            there = left if last else None
            t, slope = arguments(tile_at(x_row, at, there, column, PROCESSOR), cap, divisor, TYPE, A)
            below = t - row_m
            p = quotient(exp(below, A), tl.broadcast_to(row_s, t.shape), A)
            if OPERATION == "log_softmax":
                dt = widened(tile_at(d_row, at, there, column, PROCESSOR), A) - p * total
            elif OPERATION == "logsumexp":
                dt = total * p
            else:
                dt = total * (zero - p)
                for k in range(count):
                    chosen, _, _ = id_at(ids, row * count + k, size, ignore_index, ignores)
                    if (chosen >= at) & (chosen < at + TILE):
                        own, others = tl.zeros((1, 1), A), tl.zeros((1, 1), A)
                        for j in range(count):
                            other, exists, counted = id_at(ids, row * count + j, size, ignore_index, ignores)
                            of_other = d_at(d_result, row * count + j, exists, counted, A)
                            own = own + tl.where(other == chosen, of_other, 0)
                            others = others + tl.where(other == chosen, 0, of_other)
                        here = column == (chosen - at).to(tl.int32)
                        dt = tl.where(here, own * (one - p) + others * (zero - p), dt)
            if ENTROPY:
                surprise = (below - log_s) + h
                dt = dt - tl.where(p == 0, zero, dh * (p * surprise))
            if DIVIDES:
                dt = quotient(dt, tl.broadcast_to(divisor, dt.shape), A)
            if CAPPED:
                dt = between(dt, TYPE, A) * slope
            if SELECTS:
                dt = tl.where(some > 0, dt, zero)
            store_tile(dt, out_row, at, there, column, PROCESSOR)
