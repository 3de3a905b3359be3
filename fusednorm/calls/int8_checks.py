"""Rows and matrices of int8, and their scales: what they must be for products (docs/spec.md, section 16)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.c_enums import Limit
from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.calls.checks import check_dense, check_device, check_memory, refuse_type

_LONGEST = Limit.INT8_LONGEST.value  # torch's symbolic sizes are compared with plain numbers only

#: The dtypes of operands, and what makes one.
_DTYPES: Mapping[str, tuple[tuple[torch.dtype, ...], str]] = {
    "q": ((torch.int8,), "fusednorm.quantize makes it, with a quantization of int8"),
    "scale": ((torch.float32,), "pass the scale that fusednorm.quantize returns"),
    "weight": ((torch.int8,), "fusednorm.Int8Linear.from_linear makes it of a torch.nn.Linear"),
    "weight_scale": ((torch.float32,), "convert it, for instance weight_scale.float()"),
    "bias": (NARROW_FLOATS, "convert it, for instance bias.float()"),
    "zero_point": ((torch.int32,), "pass the zero point that fusednorm.quantize returns"),
}


def check_int8_linear(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Mapping[str, Any]:
    """Checks all of a call but its output; returns the flags."""
    q = operands["q"]
    for name, (dtypes, cure) in _DTYPES.items():
        tensor = operands[name]
        if tensor is None and name in ("bias", "zero_point"):
            continue
        if not isinstance(tensor, Tensor):
            refuse_type(name, tensor)
        check_dense(name, tensor)
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype)[6:] for dtype in dtypes)
            raise TypeError(f"{name} must be {expected}, got {str(tensor.dtype)[6:]}; {cure}")
        check_device(name, tensor, q, "q")
        _check_shape(name, tensor, operands)
        if in_memory:
            check_memory(name, tensor)
    out_dtype = flags["out_dtype"]
    if out_dtype is not None and out_dtype not in NARROW_FLOATS:
        raise TypeError(
            f"out_dtype must be float16, bfloat16 or float32, got {str(out_dtype).removeprefix('torch.')}; leave it "
            "out for float32"
        )
    return flags


def _check_shape(name: str, tensor: Tensor, operands: Mapping[str, Any]) -> None:
    q, shape = operands["q"], list(tensor.shape)
    match name:
        case "q":
            if not shape or not 0 < shape[-1] <= _LONGEST:
                raise ValueError(
                    f"q must be [..., K] with K of 1 to {_LONGEST}, so that int32 holds each sum, got shape {shape}"
                    + ("; add up products of parts of K" if shape and shape[-1] else "")
                )
        case "weight":
            if len(shape) != 2 or shape[1] != q.shape[-1]:
                turned = len(shape) == 2 and shape[0] == q.shape[-1]
                raise ValueError(
                    f"weight must be [N, {q.shape[-1]}] for q of {list(q.shape)}, got shape {shape}; pass "
                    f"{'weight.t()' if turned else 'a row as long as those of q for each element of a result'}"
                )
        case "scale" | "zero_point":
            wanted = [*q.shape[:-1], 1]
            if shape != wanted:
                raise ValueError(
                    f"{name} must have shape {wanted}, a number for each row of q, got {shape}; pass "
                    f"{name}.unsqueeze(-1), or one for all rows as {name}.expand({wanted})"
                )
        case _:
            wanted = [operands["weight"].shape[0]]
            if shape != wanted:
                raise ValueError(f"{name} must have shape {wanted}, a number for each row of weight, got {shape}")
