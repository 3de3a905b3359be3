"""Runs a quantizer without torch's dispatcher, alone or in one call with the norm before it, if the backend has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.call import Flags, Forward, Quantize, Step, operation_of
from fusednorm.calls.checks import check_flags
from fusednorm.calls.memory import ABSENT, in_levels, packed
from fusednorm.calls.quantization import Quantization, groups_of, is_given
from fusednorm.engine import execute


class Quantizing(NamedTuple):
    """A quantizer with the caller's operands and memory for results; None where there is none."""

    quantization: Quantization
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    out: Tensor | None = None
    scale_out: Tensor | None = None
    zero_point_out: Tensor | None = None
    #: Of a norm before the quantizer: its rows, and the sum.
    normed_out: Tensor | None = None
    residual_out: Tensor | None = None

    def memory(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The numbers, the scales and the zero points for rows of [..., N]: as given, or new memory."""
        q, scale, zero_point = self.quantization, self.scale_out, self.zero_point_out
        out = execute.new_like(like, q.dtype) if self.out is None else self.out
        if is_given(q):
            return out, cast(Tensor, self.scale), self.zero_point
        groups = groups_of(q, like.shape)
        if zero_point is None and q.computes_zero_point:
            zero_point = laid_out(groups, torch.int32, like, q)
        return out, laid_out(groups, torch.float32, like, q) if scale is None else scale, zero_point


class Norm(NamedTuple):
    """The arguments of a norm before the quantizer, but x; ``flags.out_dtype`` is the dtype that passes between."""

    residual: Tensor | None
    weight: Tensor | None
    flags: Flags


def laid_out(shape: Sequence[int], dtype: torch.dtype, like: Tensor, quantization: Quantization) -> Tensor:
    """Memory for scales or zero points, [..., groups], as the layout asks for it."""
    if quantization.layout == "row":
        return like.new_empty(*shape, dtype=dtype)
    rows = math.prod(shape[:-1])
    padded = -(-rows // 4) * 4 if quantization.layout == "column_padded" else rows
    return torch.zeros((shape[-1], padded), dtype=dtype, device=like.device)[:, :rows].mT.reshape(shape)


_NO_NORM = Norm(None, None, Flags())


def forward(x: Tensor, quantizing: Quantizing, norm: Norm | None = None) -> tuple[Tensor, ...] | None:
    """The results of the public functions, for checked operands: of the rows of x, or of a norm of them.

    None if several calls must serve them: the backend has no such call, or operands lie otherwise than it can write.
    """
    quantization, normed_out, residual_out = quantizing.quantization, quantizing.normed_out, quantizing.residual_out
    residual, weight, flags = norm or _NO_NORM
    if norm is None:
        normed_out = residual_out = None
    else:
        flags = check_flags(flags, x, residual, None, residual_out)
    operation = operation_of(x, residual, weight, flags)
    backend = execute.whole_of(operation, Step("quantize", quantization))
    if backend is None:
        return None
    given = (quantizing.out, quantizing.scale_out, quantizing.zero_point_out, normed_out, residual_out)
    out, scale, zero_point = quantizing.memory(x)
    if residual is not None and residual_out is None:
        residual_out = execute.new_like(residual, operation.residual_out)
    of_groups = (None, None) if is_given(quantization) else (_rows(scale), _rows(zero_point))
    written = (out, normed_out, residual_out, *of_groups)
    layout = in_levels(written, (x, residual))
    if layout is None:
        return None
    inner, strides, (x_rows, residual_rows) = layout
    of_out, of_normed, of_total, of_scale, of_zero_point, of_x, of_residual = strides
    # Before the write, so that an interrupt cannot leave a write that autograd does not know of.
    for tensor in given:
        if tensor is not None:
            increment_version(tensor)
    results = [t for t in (out, scale, None if is_given(quantization) else zero_point, residual_out) if t is not None]
    y, y_strides, before, size = x_rows, of_x, None, operation.hidden_size
    rows = x.numel() // size
    if norm is not None:
        assert x_rows is not None
        y, y_strides, weight = None, ABSENT, None if weight is None else packed(weight)
        numbers = (rows, inner, (of_x, of_residual, of_normed, of_total), flags.eps, flags.weight_offset)
        before = Forward(x_rows, residual_rows, weight, normed_out, residual_out, None, operation, *numbers)
    if is_given(quantization):
        scale, zero_point = packed(scale), None if zero_point is None else packed(zero_point)
    scale_strides, zero_point_strides = (*of_scale, _group_stride(scale)), (*of_zero_point, _group_stride(zero_point))
    if rows:
        beside = (zero_point, zero_point_strides, size, rows, inner)
        backend.forward(Quantize(y, y_strides, before, quantization, out, of_out, scale, scale_strides, *beside))
    return tuple(results)


def _rows(of_groups: Tensor | None) -> Tensor | None:
    """Scales or zero points, [..., groups], as an operand whose rows tell where those of a row begin."""
    return of_groups if of_groups is None or of_groups.is_contiguous() else of_groups[..., :1]


def _group_stride(of_groups: Tensor | None) -> int:
    """Elements from one group's scale or zero point to that of the row's next group; 0 for one of all rows."""
    return 0 if of_groups is None or not of_groups.dim() else of_groups.stride(-1)
