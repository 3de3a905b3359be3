"""Gradients: what the forward pass keeps for the backward pass, and nothing more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusednorm.backends.reference import accumulator
from fusednorm.ops import run


class FusedAddRMSNorm(torch.autograd.Function):
    """(x, residual, weight, eps, weight_offset, round_sum, round_norm) -> (y, residual_out)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        round_sum: bool,
        round_norm: bool,
    ) -> tuple[Tensor, Tensor]:
        rstd = x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))
        y, total, ctx.backend = run(x, residual, weight, eps, weight_offset, round_sum, round_norm, None, None, rstd)
        assert total is not None
        # The row that was normalised is the sum that is returned, or, unrounded, takes both terms to make again.
        unrounded = not round_sum and residual.dtype != accumulator(x.dtype)
        ctx.save_for_backward(rstd, weight, *((x, residual) if unrounded else (total,)))
        ctx.weight_offset, ctx.dtypes = weight_offset, (x.dtype, residual.dtype)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
        rstd, weight, *terms = ctx.saved_tensors
        h = terms[0]
        if len(terms) == 2:
            h = h.to(rstd.dtype) + terms[1].to(rstd.dtype)
        gradients = ctx.backend.backward(
            dy, d_total, h, rstd, weight, ctx.weight_offset, *ctx.dtypes, tuple(ctx.needs_input_grad[:3])
        )
        return (*gradients, None, None, None, None)


class RMSNorm(torch.autograd.Function):
    """(x, weight, eps, weight_offset, round_norm) -> y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_norm: bool
    ) -> Tensor:
        rstd = x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))
        y, _, ctx.backend = run(x, None, weight, eps, weight_offset, True, round_norm, None, None, rstd)
        ctx.save_for_backward(x, rstd, weight)
        ctx.weight_offset = weight_offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], False, ctx.needs_input_grad[1])
        dx, _, dw = ctx.backend.backward(dy, None, x, rstd, weight, ctx.weight_offset, x.dtype, None, needs)
        return dx, dw, None, None, None
