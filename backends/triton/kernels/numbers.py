"""Shared by the Triton kernels for GPUs and those for CPUs: conversions, roundings, a root, and where rows begin.

Up to Triton 3.6 a function that returns None says ``return``, not ``return None``, and its result may not stand in a
tuple, as on the right of ``a, b = f(), g()``. A string from a constant's attribute needs a name of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(value, A: tl.constexpr):
    """Stored values as ``A``. A 16-bit integer holds the bits of a bfloat16."""
    if value.dtype == tl.uint16:
        value = (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(A)


@triton.jit
def rounded_to_odd(value):
    """Float64 as float32, the last bit set where anything was lost: then rounding once more to 16 bits rounds once."""
    nearest = value.to(tl.float32)
    back = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(back) > tl.abs(value), bits - 1, bits)
    bits = tl.where(back == value, bits, bits | 1)
    return tl.where(value != value, nearest, bits.to(tl.float32, bitcast=True))


@triton.jit
def narrowed(value, TYPE: tl.constexpr):
    """Values as they are stored, rounded to nearest even once.

    To bfloat16 in integers where a pointer to 16-bit integers asks for it: Triton's own conversion truncates in its
    interpreter and on some CPUs.
    """
    if value.dtype == tl.float64 and TYPE.primitive_bitwidth == 16:
        value = rounded_to_odd(value)
    if TYPE == tl.uint16:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(value != value, 0x7FC0, nearest)
    return value.to(TYPE)


@triton.jit
def halved_first(value, LEFT: tl.constexpr):
    """Sums the first dimension of [n, m], like :func:`halved`, until LEFT rows of it are left: [LEFT, m]."""
    for _ in tl.static_range(20):
        if value.shape[0] > LEFT:
            halves = tl.reshape(value, (2, value.shape[0] // 2, value.shape[1]))
            first, second = tl.split(tl.permute(halves, (1, 2, 0)))
            value = first + second
    return value


@triton.jit
def halved(value):
    """Sums the last dimension of [k, n], n a power of two, by ``v = v[:n/2] + v[n/2:]`` until one is left: [k]."""
    for _ in tl.static_range(20):
        if value.shape[1] > 1:
            value = tl.sum(tl.reshape(value, (value.shape[0], 2, value.shape[1] // 2)), axis=1)
    return tl.reshape(value, (value.shape[0],))


@triton.jit
def quotient(a, b, A: tl.constexpr):
    """``a / b``, correctly rounded; Triton's ``/`` is so only in float64."""
    if A == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def mean_of(sums, hidden_size, A: tl.constexpr):
    """Sums of rows, divided by their length."""
    return quotient(sums, tl.full(sums.shape, hidden_size, A), A)


@triton.jit
def rstd_of(sums_of_squares, hidden_size, eps, A: tl.constexpr):
    """``1 / sqrt(mean(h^2) + eps)``."""
    mean = mean_of(sums_of_squares, hidden_size, A) + tl.full(sums_of_squares.shape, eps, A)
    root = tl.sqrt(mean) if A == tl.float64 else tl.sqrt_rn(mean)
    return quotient(tl.full(mean.shape, 1, A), root, A)


@triton.jit
def scaled(x, x_scale, X_TYPE: tl.constexpr, A: tl.constexpr):
    """x times a number, rounded to x's type."""
    return widened(narrowed(x * tl.full(x.shape, x_scale, A), X_TYPE), A)


@triton.jit
def gain(g, weight_offset, OFFSET: tl.constexpr, A: tl.constexpr):
    """The weight plus its offset."""
    if OFFSET:
        g = g + tl.full(g.shape, weight_offset, A)
    return g


@triton.jit
def normalised(h, rstd, g, b, X_TYPE: tl.constexpr, ROUND_NORM: tl.constexpr, A: tl.constexpr):
    """``h * rstd``, rounded to x's type if asked to, times the gain and plus the stored bias, if there are any."""
    n = h * rstd
    if ROUND_NORM:
        n = widened(narrowed(n, X_TYPE), A)
    if g is not None:
        n = n * g
    if b is not None:
        n = n + widened(b, A)
    return n


@triton.jit
def rows_at(operand, row, stride, jump, inner):
    """Where rows of an operand begin; None if it is absent.

    Rows in two levels go a jump further after every ``inner`` rows, which is None where they lie in one level.
    """
    if operand is None:
        return
    elif inner is None:
        return operand + row * stride
    else:
        return operand + (row * stride + row // inner * jump)


@triton.jit
def row_of_heads(operand, row, stride, heads):
    """Where a weight or a bias begins for a row of the call; None if it is absent.

    Row ``i`` takes row ``i % heads``; ``heads`` is None where one row is for all.
    """
    if operand is None:
        return
    elif heads is None:
        return operand
    else:
        return operand + row % heads * stride
