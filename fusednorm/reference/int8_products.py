"""Products of rows and a matrix of int8 in plain torch operations: docs/spec.md, section 16."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.reference.norm import rounded

#: So many products of a row and a column are added up at once.
_AT_ONCE = 2**22


def int8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    zero_point: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """The scaled sums for q of [..., K], a weight of [N, K], and scales of [..., 1] and [N]."""
    return (scaled(_sums(q, weight), scale, weight, weight_scale, bias, zero_point, out_dtype or torch.float32),)


def scaled(
    sums: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The result for sums of products, [..., N], of whole numbers."""
    if zero_point is not None:
        sums = sums - zero_point.to(torch.int64) * weight.to(torch.int64).sum(-1)
    y = sums.to(torch.float32) * weight_scale * scale
    if bias is not None:
        y = y + bias.to(torch.float32)
    return rounded(y, out_dtype)


def _sums(q: Tensor, weight: Tensor) -> Tensor:
    """int64 sums of products, [..., N]. float64 holds each sum of up to 2^39 products, so in any order it is exact."""
    rows, columns = q.reshape(-1, q.shape[-1]).to(torch.float64), len(weight)
    at_once = max(_AT_ONCE // max(q.shape[-1], 1), 1)
    parts = (
        [rows @ part.to(torch.float64).transpose(0, 1) for part in weight.chunk(-(-columns // at_once))]
        if columns
        else []
    )
    found = torch.cat(parts, -1) if parts else rows.new_empty(len(rows), 0)
    return found.to(torch.int64).reshape(*q.shape[:-1], columns)
