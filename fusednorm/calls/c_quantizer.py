"""Packs a quantization as C takes it: the fields of ``struct fn_quantizer`` that no operand decides."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from fusednorm.calls.c_enums import ByteKind, QuantizerFlag
from fusednorm.calls.c_kinds import KINDS
from fusednorm.calls.scalars import in_float32

_QUANTIZATION = struct.Struct("=3q5d")
_BYTE_KINDS = {
    torch.int8: ByteKind.I8,
    torch.uint8: ByteKind.U8,
    torch.float8_e4m3fn: ByteKind.E4M3,
    torch.float8_e5m2: ByteKind.E5M2,
}
_QUANTIZER_FLAGS: dict[QuantizerFlag, Callable[[Any], bool]] = {
    QuantizerFlag.GIVEN_SCALE: lambda q: q.per == "tensor",
    QuantizerFlag.SCALE_BY_RECIPROCAL: lambda q: q.scale_by == "reciprocal",
    QuantizerFlag.APPLY_RECIPROCAL: lambda q: q.apply == "reciprocal",
    QuantizerFlag.APPLY_RATIO: lambda q: q.apply == "ratio",
    QuantizerFlag.RETURNS_MULTIPLIER: lambda q: q.returns == "multiplier",
    QuantizerFlag.ZERO_POINT_128: lambda q: q.zero_point == 128,
    QuantizerFlag.ZERO_POINT_AFTER: lambda q: q.zero_point == "after",
    QuantizerFlag.ZERO_POINT_BEFORE: lambda q: q.zero_point == "before",
    QuantizerFlag.SCALE_UP_TO_POWER_OF_TWO: lambda q: q.round_scale is not None,
}


def pack_quantization(quantization: Any, dtype: torch.dtype) -> bytes:
    """A :class:`fusednorm.Quantization`, for rows of this dtype."""
    flags = sum(flag for flag, has in _QUANTIZER_FLAGS.items() if has(quantization))
    floor = in_float32(quantization.amax_floor)
    if quantization.floor_dtype == "input":
        floor = torch.tensor(floor, dtype=torch.float32).to(dtype).item()
    group = quantization.per if isinstance(quantization.per, int) else 0
    limits = (*quantization.range, floor, in_float32(quantization.amax_limit), in_float32(quantization.scale_floor))
    return _QUANTIZATION.pack(_BYTE_KINDS[quantization.dtype], flags, group, *limits)


def limits(quantization: Any, dtype: torch.dtype) -> tuple[float, float, float, float, float]:
    """qmin, qmax, the floor and the limit of amax, and the floor of scales, for rows of this dtype."""
    _, _, _, qmin, qmax, *rest = _QUANTIZATION.unpack(quantization.packed[KINDS[dtype]])
    return (qmin, qmax, *rest)
