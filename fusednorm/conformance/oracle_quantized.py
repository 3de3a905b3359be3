"""A second implementation of quantization, in NumPy, written from docs/spec.md alone, to check the reference.

It shares no code or method with that file: it looks 8-bit floating-point numbers up in a list of all of them.
"""

import functools

import numpy as np
import torch

from fusednorm.conformance.oracle import _rounded, forward, to_numpy
from fusednorm.conformance.oracle_gated import activated, gated

ONE = np.float32(1)


def numbers(dtype):
    """All finite numbers of an 8-bit floating-point dtype that are not negative, by their codes."""
    bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    found = []
    for code in range(0x7F if bits == 3 else 0x7C):
        exponent, mantissa = code >> bits, code % (1 << bits)
        value = mantissa / (1 << bits) + (exponent > 0)
        found.append(value * 2.0 ** (max(exponent, 1) - bias))
    return np.array(found)


def float8(values, dtype):
    """The codes of values within the range, rounded to nearest, ties to even codes."""
    table = numbers(dtype)
    magnitude = np.abs(values.astype(np.float64))
    below = np.searchsorted(table, np.nan_to_num(magnitude), side="right") - 1
    above = np.minimum(below + 1, len(table) - 1)
    low, high = magnitude - table[below], table[above] - magnitude
    up = (high < low) | ((high == low) & (below % 2 == 1))
    code = np.where(up, above, below)
    code = np.where(np.signbit(values), code + 0x80, code)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def _between(values, low, high):
    """NumPy's minimum and maximum keep a NaN."""
    return np.maximum(np.minimum(values, np.float32(high)), np.float32(low))


def power_of_two(scales):
    """The least of 2^-126, ... 2^127 that is not below the scale, found by comparison; 2^-127 of 0, a NaN of a NaN."""
    powers = 2.0 ** np.arange(-126, 128)
    place = np.searchsorted(powers, scales.astype(np.float64), side="left")
    found = np.where(scales == 0, 2.0**-127, powers[np.minimum(place, len(powers) - 1)])
    return np.where(np.isnan(scales), np.nan, found).astype(np.float32)


def codes(scales, dtype):
    """Powers of two, [..., groups], by their places in a list of all of them: bytes, or four of them in an int32."""
    powers = 2.0 ** np.arange(-127, 128)
    found = np.where(np.isnan(scales), 255, np.searchsorted(powers, scales.astype(np.float64))).astype(np.uint8)
    if dtype != torch.int32:
        return found
    *rows, groups = found.shape
    whole = np.zeros((*rows, (groups + 3) // 4 * 4), np.uint8)
    whole[..., :groups] = found
    return whole.view("<i4")


@np.errstate(all="ignore")
def quantized(y, quantization, scale=None, zero_point=None):
    """The bytes, [..., N], the scales or their codes, or the given one, and the zero points, [..., groups], or None."""
    q = quantization
    group = q.group(y.shape[-1])
    blocks = None
    if scale is not None and scale.numel() != 1:  # each element's own scale, by its place
        places = [np.arange(whole) * size // whole for whole, size in zip(y.shape, scale.shape, strict=True)]
        blocks, group = to_numpy(scale)[np.ix_(*places)].reshape(-1), 1
    v = to_numpy(y).astype(np.float32).reshape(-1, group)
    qmin, qmax = (np.float32(number) for number in q.range)
    points = np.zeros(len(v), np.int64)
    factor = None
    if scale is not None:
        s = blocks if blocks is not None else np.full(len(v), to_numpy(scale).item(), np.float32)
        if zero_point is not None:
            points[:] = to_numpy(zero_point).item()
    else:
        if q.computes_zero_point:
            span, steps = v.max(-1) - v.min(-1), qmax - qmin
        else:
            span, steps = np.abs(v).max(-1), qmax
            floor = np.float32(q.amax_floor)
            if q.floor_dtype == "input":
                floor = to_numpy(torch.tensor(q.amax_floor).to(y.dtype)).astype(np.float32)
            span = np.minimum(np.maximum(span, floor), np.float32(q.amax_limit))
        s = span / steps if q.scale_by == "divide" else span * (ONE / steps)
        s = np.maximum(s, np.float32(q.scale_floor))
        if q.round_scale == "up_to_power_of_two":
            s = power_of_two(s)
        factor = qmax / span
        if q.computes_zero_point:
            exact = np.rint(qmin - v.min(-1) / s)
            exact = np.where((s == 0) | np.isnan(exact), 0, np.clip(exact, -(2.0**30), 2.0**30))
            points = exact.astype(np.int64)
    if q.apply == "divide":
        v = v / s[:, None]
    elif q.apply == "reciprocal":
        v = v * (ONE / s)[:, None]
    else:
        v = v * factor[:, None]
    v = np.where((s == 0)[:, None], np.float32(0), v)
    if q.dtype.is_floating_point:
        stored = float8(_between(v, qmin, qmax), q.dtype)
    else:
        if q.zero_point == "after":
            whole = np.nan_to_num(_between(np.rint(v), -(2.0**30), 2.0**30)).astype(np.int64)
            whole = np.clip(whole + points[:, None], int(qmin), int(qmax))
        else:
            shifted = v + points[:, None].astype(np.float32) if q.zero_point == "before" else v
            whole = np.nan_to_num(np.rint(_between(shifted, qmin, qmax))).astype(np.int64)
        stored = (whole + (128 if q.zero_point == 128 else 0)).astype(np.uint8 if q.dtype == torch.uint8 else np.int8)
    stored = stored.view(np.uint8).reshape(y.shape)
    if scale is not None:
        return stored, to_numpy(scale), None
    shape = (*y.shape[:-1], -1)
    returned = (factor if q.returns == "multiplier" else s).reshape(shape)
    if q.scale_dtype is not None:
        returned = codes(returned, q.scale_dtype)
    return stored, returned, points.reshape(shape) if q.computes_zero_point else None


def fused_add_rms_norm_quant(
    x, residual, weight, eps=1e-6, quantization=None, between=None, scale=None, zero_point=None, **flags
):
    """The bytes, the scales, the zero points, the rows in x's dtype, and the sum or None."""
    y, total, _, _ = forward(x, residual, weight, eps, **flags, out_dtype=between or x.dtype)
    found = quantized(_rounded(y, between or x.dtype), quantization, scale, zero_point)
    return *found, to_numpy(_rounded(y, x.dtype)), total


rms_norm_quant = functools.partial(fused_add_rms_norm_quant, residual=None)
fused_add_layer_norm_quant, layer_norm_quant = (
    functools.partial(of_norm, center=True, eps=1e-5) for of_norm in (fused_add_rms_norm_quant, rms_norm_quant)
)


def quantize(y, quantization, scale=None, zero_point=None):
    """The bytes, the scales and the zero points of the public function."""
    return quantized(y, quantization, scale, zero_point)


def silu_and_mul_quant(gate, up, quantization, between=None, scale=None, zero_point=None):
    """The same of this one."""
    (product,) = gated(up, gate, "silu", between or gate.dtype, between or gate.dtype)
    return quantized(product, quantization, scale, zero_point)


@np.errstate(all="ignore")
def relu2_quant(z, quantization, between=None, scale=None, zero_point=None):
    """The same of this one."""
    f, _ = activated(to_numpy(z).astype(np.float64 if z.dtype == torch.float64 else np.float32), "relu2")
    return quantized(_rounded(f, between or z.dtype), quantization, scale, zero_point)
