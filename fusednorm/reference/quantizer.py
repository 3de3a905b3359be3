"""Quantization to 8 bits in plain torch operations: docs/spec.md, section 9. Every backend must return these bits.

All arithmetic is in float32. A float64 value is rounded to float32 first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusednorm.calls.quantization import FLOAT8, MOST
from fusednorm.reference.norm import at_least, constant, divided, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fusednorm.calls.quantization import Quantization


def quantized(
    y: Tensor, quantization: Quantization, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The numbers, [..., N], and the scales and zero points that are computed, [..., groups].

    Args:
        y: [..., N], float16, bfloat16, float32 or float64.
        quantization: how; its groups divide N.
        scale: float32 for ``per="tensor"``, else None: one number, or as many in each dimension as divide y's.
        zero_point: one int32 number for ``per="tensor"`` with ``zero_point`` "after" or "before", else None.
    """
    group = quantization.group(y.shape[-1])
    if scale is not None and scale.numel() != 1:
        group = y.shape[-1] // scale.shape[-1]
    v = y.to(torch.float32).reshape(*y.shape[:-1], y.shape[-1] // group, group)
    qmin, qmax = quantization.range
    zero = multiplier = None
    if scale is not None:
        s = of_groups(scale, v.shape[:-1])
        if zero_point is not None:
            zero = zero_point.reshape(()).expand(v.shape[:-1])
    elif quantization.computes_zero_point:
        low, high = v.amin(-1), v.amax(-1)  # a NaN wins
        s = _scale(high - low, quantization, qmax - qmin)
        shift = (constant(qmin, s) - low / s).round()
        zero = torch.where((s == 0) | shift.isnan(), 0.0, shift.clamp(-MOST, MOST)).to(torch.int32)
    else:
        amax = greatest_magnitude(v)
        floor = constant(quantization.amax_floor, amax)
        if quantization.floor_dtype == "input":
            floor = floor.to(y.dtype).to(torch.float32)
        amax = within(amax, floor, constant(quantization.amax_limit, amax))
        s = _scale(amax, quantization, qmax)
        multiplier = constant(qmax, amax) / amax
    if quantization.apply == "divide":
        v = v / s.unsqueeze(-1)
    else:
        factor = multiplier if quantization.apply == "ratio" and multiplier is not None else torch.ones_like(s) / s
        v = v * factor.unsqueeze(-1)
    v = torch.where((s == 0).unsqueeze(-1), 0.0, v)
    found = _stored(v, quantization, None if zero is None else zero.unsqueeze(-1)).reshape(y.shape)
    returned = multiplier if quantization.returns == "multiplier" and multiplier is not None else s
    if scale is not None:
        return (found,)
    returned = in_dtype(returned, quantization.scale_dtype)
    return (found, returned) if zero is None else (found, returned, zero)


def of_groups(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Given scales, each repeated for the groups of its block: of this shape, [..., groups]."""
    if scale.numel() == 1:
        return scale.reshape(()).expand(shape)
    for dim, groups in enumerate(shape):
        scale = scale.repeat_interleave(groups // max(scale.shape[dim], 1), dim)
    return scale


def greatest_magnitude(v: Tensor) -> Tensor:
    """The greatest absolute value of the last dimension, by its bits as an integer: a NaN is the greatest."""
    return v.abs().contiguous().view(torch.int32).amax(-1).view(torch.float32)


def _scale(span: Tensor, quantization: Quantization, steps: float) -> Tensor:
    """A span of values divided into steps."""
    scale = divided(span, steps)
    if quantization.scale_by == "reciprocal":
        one = torch.ones_like(span)
        scale = span * (one / constant(steps, one))
    scale = at_least(scale, constant(quantization.scale_floor, scale))
    return scale if quantization.round_scale is None else up_to_power_of_two(scale)


def up_to_power_of_two(scale: Tensor) -> Tensor:
    """Scales, float32 and not negative, rounded up to 2^-127, 2^-126, ... 2^127; a NaN stays."""
    bits = scale.contiguous().view(torch.int32)
    code = ((bits >> 23) + (bits & 0x7FFFFF != 0)).clamp(max=254)
    # Code 0 is 2^-127: a subnormal number, whose bits are not the code's.
    rounded = torch.where(code == 0, 0x400000, code << 23).to(torch.int32).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)


def in_dtype(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Scales, float32 [..., groups], which are powers of two unless the dtype is None, as ``scale_dtype`` has them."""
    if dtype is None:
        return scale
    scale = scale.clone(memory_format=torch.contiguous_format)  # also without rows, whose columns may have no stride
    code = (scale.view(torch.int32) >> 23).to(torch.uint8)  # without the sign, which a NaN may have
    if dtype == torch.int32 and code.shape[-1] % 4:
        code = torch.nn.functional.pad(code, (0, -code.shape[-1] % 4))
    return code.view(dtype)


def _stored(v: Tensor, quantization: Quantization, zero: Tensor | None) -> Tensor:
    """The numbers stored for quotients, [..., groups, group]; ``zero``: a zero point for each group, or None."""
    qmin, qmax = quantization.range
    if quantization.dtype.is_floating_point:
        return to_float8(within(v, qmin, qmax), quantization.dtype)
    if zero is not None and quantization.zero_point == "after":
        v = within(v.round(), -MOST, MOST)
        # In whole numbers of 64 bits: neither a float32 nor an int32 holds every sum.
        v = (torch.where(v.isnan(), 0.0, v).to(torch.int64) + zero).clamp(int(qmin), int(qmax))
        return v.to(quantization.dtype)
    if zero is not None:
        v = v + zero.to(torch.float32)
    v = within(v, qmin, qmax).round()
    v = torch.where(v.isnan(), 0.0, v)
    if quantization.zero_point == 128:
        v = v + 128.0
    return v.to(quantization.dtype)


def to_float8(v: Tensor, dtype: torch.dtype) -> Tensor:
    """v, float32 and within the dtype's range, rounded to nearest even in integers; a NaN becomes 0x7F."""
    mantissa, least_exponent = FLOAT8[dtype]
    dropped = 23 - mantissa
    magnitude = v.abs()
    bits = magnitude.contiguous().view(torch.int32)
    # Rounds the bits that are dropped; a carry into the exponent is right.
    normal = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
    normal = normal - ((127 + least_exponent - 1) << mantissa)
    # Below the least normal number codes are a constant step apart: adding a number with that step rounds to it.
    step = torch.full_like(magnitude, 2.0 ** (least_exponent - mantissa + 23))
    subnormal = (magnitude + step).view(torch.int32) - step.view(torch.int32)
    code = torch.where(magnitude < 2.0**least_exponent, subnormal, normal)
    code = torch.where(v.isnan(), 0x7F, code | ((v.view(torch.int32) >> 24) & 0x80))
    return code.to(torch.uint8).view(dtype)
