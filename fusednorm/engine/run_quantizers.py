"""Runs quantizers, of rows or of a norm of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.call import Flags as NormFlags
from fusednorm.calls.call import Forward, Quantize, Step, Strides, operation_of
from fusednorm.calls.checks import check_flags
from fusednorm.calls.memory import ABSENT, in_levels, new_like, packed
from fusednorm.calls.quantization import Quantization, groups_of, is_given
from fusednorm.declare.plan import Operands
from fusednorm.engine.run_norms import launch, of_all_heads, whole_of
from fusednorm.reference import quantizer


def quantized(
    x: Tensor,
    quantization: Quantization,
    operands: Operands,
    outputs: Mapping[str, Tensor],
    norm: NormFlags | None = None,
) -> tuple[Tensor, ...] | None:
    """The results of the public functions, for checked operands: of the rows of x, or of a norm of them.

    None if several calls must serve them: the backend has no such call, or operands lie otherwise than it can write.

    Args:
        x: the rows.
        quantization: how.
        operands: the given scale and zero point, and those of the norm, by name.
        outputs: memory that the caller gave, by the names of the function's outputs.
        norm: the flags of the norm.
    """
    if quantization.scale_dtype is not None:
        others = {name: t for name, t in outputs.items() if name != "scale_out"}
        found = quantized(x, quantization.in_float32, operands, others, norm)
        return found and _with_scales(found, quantization, outputs.get("scale_out"))
    of_all, given = is_given(quantization), [*outputs.values()]
    scale, zero_point = cast(Any, operands["scale"]), operands["zero_point"]
    out, scale_out, zero_point_out = map(outputs.get, ("out", "scale_out", "zero_point_out"))
    residual = weight = bias = normed_out = residual_out = None
    flags = NormFlags()
    if norm is not None:
        residual, weight, bias = map(operands.get, ("residual", "weight", "bias"))
        normed_out, residual_out = outputs.get("normed_out"), outputs.get("residual_out")
        flags = check_flags(norm, x, residual, None, residual_out)
    operation = operation_of(x, residual, weight, flags, bias=bias)
    backend = whole_of(operation, Step("quantize", quantization))
    if backend is None or (of_all and scale.numel() != 1):  # kernels take one scale
        return None
    scale_rows = zero_point_rows = None
    if not of_all:
        groups = groups_of(quantization, x.shape)
        scale = laid_out(groups, torch.float32, x, quantization) if scale_out is None else scale_out
        zero_point = zero_point_out
        if zero_point is None and quantization.computes_zero_point:
            zero_point = laid_out(groups, torch.int32, x, quantization)
        scale_rows, zero_point_rows = _rows_of_groups(scale), _rows_of_groups(zero_point)
    layout = in_levels((out, normed_out, residual_out, scale_rows, zero_point_rows), (x, residual))
    if layout is None:
        return None
    inner, (of_out, of_normed, of_total, of_scale, of_zero_point, of_x, of_residual), (x, residual) = layout
    size, rows = operation.hidden_size, x.numel() // operation.hidden_size
    new: Strides = (inner * size, size)
    if out is None:
        out, of_out = new_like(x, quantization.dtype), new
    if residual_out is None and residual is not None:
        residual_out, of_total = new_like(residual, operation.residual_out), new
    results = [out, scale]
    if zero_point is not None and not of_all:
        results.append(zero_point)
    if residual_out is not None:
        results.append(residual_out)
    before = None
    if norm is not None:
        numbers = (rows, inner, (of_x, of_residual, of_normed, of_total), flags.eps, flags.weight_offset)
        before = Forward(x, residual, of_all_heads(weight), normed_out, residual_out, None, operation, *numbers)
        if bias is not None:
            before = before._replace(bias=of_all_heads(bias))
    if of_all:
        scale, zero_point = packed(scale), None if zero_point is None else packed(zero_point)
    call = Quantize(
        x if norm is None else None,
        of_x if norm is None else ABSENT,
        before,
        quantization,
        out,
        of_out,
        scale,
        (*of_scale, _group_stride(scale)),
        zero_point,
        (*of_zero_point, _group_stride(zero_point)),
        size,
        rows,
        inner,
    )
    launch(backend, call, given)
    return tuple(results)


def _with_scales(found: tuple[Tensor, ...], quantization: Quantization, scale: Tensor | None) -> tuple[Tensor, ...]:
    """Results with float32 scales, and the quantization's scales in their place."""
    numbers, computed, *others = found
    computed = quantizer.in_dtype(computed, quantization.scale_dtype)
    if scale is None:
        scale = laid_out(computed.shape, computed.dtype, computed, quantization)
    return numbers, scale.copy_(computed), *others


def laid_out(shape: Sequence[int], dtype: torch.dtype, like: Tensor, quantization: Quantization) -> Tensor:
    """Memory for scales or zero points, [..., groups], as the layout asks for it."""
    if quantization.layout == "row":
        return like.new_empty(shape, dtype=dtype)
    rows = math.prod(shape[:-1])
    whole = 16 // dtype.itemsize
    padded = -(-rows // whole) * whole if quantization.layout == "column_padded" else rows
    return torch.zeros((shape[-1], padded), dtype=dtype, device=like.device)[:, :rows].mT.reshape(shape)


def _rows_of_groups(of_groups: Tensor | None) -> Tensor | None:
    """Scales or zero points, [..., groups], as an operand whose rows tell where those of a row begin."""
    return of_groups if of_groups is None or of_groups.is_contiguous() else of_groups[..., :1]


def _group_stride(of_groups: Tensor | None) -> int:
    """Elements from one group's scale or zero point to that of the row's next group; 0 for one of all rows."""
    return 0 if of_groups is None or not of_groups.dim() else of_groups.stride(-1)
