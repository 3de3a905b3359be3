"""Shared by quantizers in Triton, on GPUs and CPUs: scales, zero points and numbers (docs/spec.md, section 9).

All arithmetic is in float32. ``SCALE_BY`` and ``APPLY`` are those of a ``Quantization``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.numbers import quotient


@triton.jit
def in_order(bits):
    """The bits of floats as whole numbers in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def at_least(value, floor):
    """The greater one; a NaN stays."""
    floor = tl.full(value.shape, floor, tl.float32)
    return tl.where(value < floor, floor, value)


@triton.jit
def at_most(value, limit):
    """The smaller one; a NaN stays."""
    limit = tl.full(value.shape, limit, tl.float32)
    return tl.where(value > limit, limit, value)


@triton.jit
def whole_of(value):
    """The nearest whole number, within 2^30; 0 of a NaN.

    Adding and subtracting 2^23 with its sign rounds a number below 2^23; from there on all are whole.
    """
    value = tl.where(value != value, 0.0, value)
    value = at_most(at_least(value, -1073741824.0), 1073741824.0)
    shift = tl.where(value < 0, -8388608.0, 8388608.0)
    rounded = tl.where(tl.abs(value) < 8388608.0, (value + shift) - shift, value)
    return rounded.to(tl.int32)


@triton.jit
def whole_within(v, least, most):
    """The nearest whole number, cut to a range that has 0; 0 of a NaN.

    Adding 1.5 * 2^23 rounds to a whole number. The bits of sums, taken as signed numbers, have the order of the sums,
    but among negative ones, which are all cut. They are cut before anything is subtracted, which could overflow.
    """
    SHIFT: tl.constexpr = 0x4B400000
    total = (v + tl.full(v.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)
    whole = tl.minimum(tl.maximum(total, least + SHIFT), most + SHIFT) - SHIFT
    return tl.where(v != v, 0, whole)


@triton.jit
def float8_of(v, qmin, qmax, MANTISSA: tl.constexpr, LEAST_EXPONENT: tl.constexpr):
    """The code of a number, cut to the range and rounded to nearest even; a NaN is 0x7F.

    Adding 2^20 steps of the format (of e4m3: its 3 bits and those 20 fill a float) rounds a magnitude to whole steps,
    which then stand in the last bits. The step is that of the exponent, and from the least exponent on that of
    subnormals.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    LOWEST: tl.constexpr = (127 + LEAST_EXPONENT) << 23
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    limit = tl.where(bits < 0, tl.full(v.shape, 0, tl.float32) - qmin, tl.full(v.shape, qmax, tl.float32))
    within = tl.minimum(magnitude, limit.to(tl.int32, bitcast=True))
    exponent = tl.maximum(within & 0x7F800000, LOWEST)
    shifted = exponent + (DROPPED << 23)
    total = within.to(tl.float32, bitcast=True) + shifted.to(tl.float32, bitcast=True)
    code = total.to(tl.int32, bitcast=True) - shifted + ((exponent - LOWEST) >> DROPPED)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def numbers_of(v, zero, qmin, qmax, NUMBER: tl.constexpr, ZERO_POINT: tl.constexpr):
    """Quotients, with their zero points, as they are stored."""
    if ZERO_POINT == "before":
        v = v + zero.to(tl.float32)
    if NUMBER == "e4m3":
        return float8_of(v, qmin, qmax, 3, -6).to(tl.uint8)
    elif NUMBER == "e5m2":
        return float8_of(v, qmin, qmax, 2, -14).to(tl.uint8)
    else:
        least, most = tl.full(v.shape, qmin, tl.float32).to(tl.int32), tl.full(v.shape, qmax, tl.float32).to(tl.int32)
        if ZERO_POINT == "after":
            # Cut before anything is added, which could overflow: 2^30 + 2^30.
            whole = tl.minimum(tl.maximum(whole_of(v), least - zero), most - zero) + zero
        else:
            whole = whole_within(v, least, most)
        if ZERO_POINT == "plus_128":
            whole = whole + 128
        return (whole & 0xFF).to(tl.uint8)


@triton.jit
def ends(high, low):
    """The greatest and the least value of groups; both are NaN if one is: a NaN of either sign is at one end."""
    both = low + high
    strange = (low != low) | (high != high)
    return tl.where(strange, both, high), tl.where(strange, both, low)


@triton.jit
def up_to_power_of_two(scale):
    """Scales rounded up to 2^-127, 2^-126, ... 2^127, of which the first is subnormal; a NaN stays."""
    up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    power = tl.where(up == 0, 0x400000, tl.minimum(up, 0x7F000000)).to(tl.float32, bitcast=True)
    return tl.where(scale != scale, scale, power)


@triton.jit
def scale_of(span, steps, scale_floor, SCALE_BY: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """A span of values divided into steps."""
    if SCALE_BY == "reciprocal":
        s = span * quotient(tl.full(span.shape, 1.0, tl.float32), steps, tl.float32)
    else:
        s = quotient(span, steps, tl.float32)
    s = at_least(s, scale_floor)
    return up_to_power_of_two(s) if POWER_OF_TWO else s


@triton.jit
def zero_point_of(low, s, qmin):
    """The number that the least value, and so zero, is moved by."""
    zero = tl.full(s.shape, qmin, tl.float32) - quotient(low, s, tl.float32)
    return tl.where(s == 0, 0, whole_of(zero))


@triton.jit
def factor_of(s, multiplier, APPLY: tl.constexpr):
    """The number that values are divided by, or multiplied with."""
    if APPLY == "divide":
        return s
    elif APPLY == "ratio":
        return multiplier
    else:
        return quotient(tl.full(s.shape, 1.0, tl.float32), s, tl.float32)


@triton.jit
def applied(v, s, factor, APPLY: tl.constexpr):
    """Values after their scale."""
    v = quotient(v, tl.broadcast_to(factor, v.shape), tl.float32) if APPLY == "divide" else v * factor
    return tl.where(s == 0, 0.0, v)
