"""Products of rows and a matrix in plain torch operations: docs/spec.md, section 13."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusednorm.calls.call import accumulator
from fusednorm.reference.norm import halved, rounded, widened

#: The sums of a row and a column: sum j takes the elements whose place modulo their number is j.
SUMS = 16

#: So many sums are computed at once; in float64 they take 4 MiB.
_AT_ONCE = 2**19

_NARROW = (torch.float16, torch.bfloat16)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor]:
    """``x @ weight.T + bias`` for x of [..., K], a weight of [N, K] and a bias of [N]."""
    wide, rows = accumulator(x.dtype), x.reshape(-1, x.shape[-1])
    columns = len(weight)
    at_once = max(_AT_ONCE // SUMS // max(columns, 1), 1)
    y = torch.cat([_sums(part, weight, wide) for part in rows.chunk(-(-len(rows) // at_once) or 1)])
    if bias is not None:
        y = y + bias.to(wide)
    return (rounded(y, out_dtype or x.dtype).reshape(*x.shape[:-1], columns),)


def _sums(rows: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """The sums of products of few rows, [m, K], and all columns, [m, N]."""
    at_once = max(_AT_ONCE // SUMS // max(len(rows), 1), 1)
    return torch.cat([_tree(rows, part, wide) for part in weight.chunk(-(-len(weight) // at_once) or 1)], -1)


def _tree(rows: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """[m, K] and [n, K] -> [m, n], all at once."""
    fused = rows.dtype in _NARROW and weight.dtype in _NARROW
    # A product of two 16-bit numbers has at most 22 bits. It is exact in float64, where its sum with a float32 number
    # s is rounded once; a second rounding to float32 then gives the bits of one, that of a fused multiply-add. For the
    # sum is not exact only where one of both is below 2^-28 of the other: s then is further from each middle between
    # two float32 numbers than the rest, and so is a product that is normal in float32. One that is not is below
    # 2^-126, and the sum with any s that is not 0 is exact, unless the product is below 2^-30 of s.
    exact = torch.float64 if fused and rows.device.type != "mps" else wide
    total = torch.zeros((), dtype=wide, device=rows.device)
    for k in range(0, rows.shape[-1], SUMS):
        a, b = rows[:, k : k + SUMS], weight[:, k : k + SUMS]
        if a.shape[-1] < SUMS:
            a, b = (pad(t, (0, SUMS - t.shape[-1])) for t in (a, b))
        total = (total + a.to(exact).unsqueeze(-2) * b.to(exact)).to(wide)
    return halved(total)


def linear_gradients(
    d: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, the weight and the bias, as far as they are needed; else None. The products are torch's."""
    operands = [t for t in (d, x, weight, bias) if t is not None]
    one = d.dtype if all(t.dtype == d.dtype for t in operands) else accumulator(x.dtype)
    wide, count = widened(d, one), math.prod(x.shape[:-1])
    rows, rows_of_x = wide.reshape(count, len(weight)), widened(x, one).reshape(count, x.shape[-1])
    return (
        rounded(wide @ widened(weight, one), x.dtype) if needs[0] else None,
        rounded(rows.transpose(0, 1) @ rows_of_x, weight.dtype) if needs[1] else None,
        rounded(rows.sum(0), bias.dtype) if bias is not None and needs[2] else None,
    )


def linear_tangent(operands: Mapping[str, Any], flags: Mapping[str, Any], tangents: Mapping[str, Any]) -> tuple[Tensor]:
    """The tangent of the result; the products are torch's."""
    x, weight, bias = operands["x"], operands["weight"], operands["bias"]
    wide = accumulator(x.dtype)
    of_x, of_weight, of_bias = (tangents.get(name) for name in ("x", "weight", "bias"))
    total = torch.zeros((), dtype=wide, device=x.device)
    if of_x is not None:
        total = total + widened(of_x, wide) @ widened(weight, wide).transpose(0, 1)
    if of_weight is not None:
        total = total + widened(x, wide) @ widened(of_weight, wide).transpose(0, 1)
    if bias is not None and of_bias is not None:
        total = total + widened(of_bias, wide)
    shape = (*x.shape[:-1], len(weight))
    return (rounded(total.expand(shape), flags["out_dtype"] or x.dtype),)
