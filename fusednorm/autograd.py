"""Gradients: what the forward pass keeps for the backward pass, and nothing more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.ops import run
from fusednorm.registry import Signature, select


class Rstd(torch.autograd.Function):
    """(h, eps) -> 1 / sqrt(mean(h^2) + eps), with a derivative; only for derivatives of gradients."""

    @staticmethod
    def forward(h: Tensor, eps: float) -> Tensor:
        """``h`` is [..., N] of the accumulator type; the result is [...]."""
        return reference.reciprocal_root(h, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps both."""
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, d_rstd: Tensor) -> tuple[Tensor, None]:
        """``-rstd^3 * h / N``, out of operations that can be differentiated again."""
        h, rstd = ctx.saved_tensors
        return (d_rstd * -(rstd**3) / h.shape[-1]).unsqueeze(-1) * h, None


class AddRMSNorm(torch.autograd.Function):
    """(x, residual or None, weight or None, eps, weight_offset, round_sum, round_norm) -> (y, residual_out, rstd).

    Without a residual, residual_out is None. rstd has no gradient: it is an output because ``torch.func`` lets only
    inputs and outputs be kept.
    """

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        round_sum: bool,
        round_norm: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See :func:`fusednorm.fused_add_rms_norm` and :func:`fusednorm.rms_norm`."""
        rstd = x.new_empty(x.shape[:-1], dtype=reference.accumulator(x.dtype))
        y, total, _ = run(x, residual, weight, eps, weight_offset, round_sum, round_norm, None, None, rstd)
        return y, total, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor]) -> None:
        """Keeps the row that was normalised: the sum that is returned, or, unrounded, both terms to make it again."""
        x, residual, weight, ctx.eps, ctx.weight_offset, round_sum, round_norm = inputs
        _, total, rstd = output
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        unrounded = residual is not None and not round_sum and residual.dtype != rstd.dtype
        ctx.save_for_backward(rstd, weight, *((x, residual) if unrounded else (x,) if residual is None else (total,)))
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        weight_dtype = None if weight is None else weight.dtype
        ctx.backend = select(
            Signature(x.device, *ctx.dtypes, weight_dtype, x.dtype, x.shape[-1], bool(round_sum), bool(round_norm))
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """The specification's formulas: by the backend's kernels, or by the reference where they are differentiated."""
        rstd, weight, *terms = ctx.saved_tensors
        h = terms[0]
        if len(terms) == 2:
            h = h.to(rstd.dtype) + terms[1].to(rstd.dtype)
        if dy is None and d_total is None:
            return (None,) * 7
        if dy is None:
            dy = torch.zeros(h.shape, dtype=ctx.dtypes[0], device=h.device)
        backward = ctx.backend.backward
        if torch.is_grad_enabled():  # create_graph=True
            backward, rstd = reference.backward, Rstd.apply(h.to(rstd.dtype), ctx.eps)  # type: ignore[no-untyped-call]
        needs = tuple(ctx.needs_input_grad[:3])
        gradients = backward(dy, d_total, h, rstd, weight, ctx.weight_offset, *ctx.dtypes, needs)
        return (*gradients, None, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        """A batch of calls is one call with one dimension more, as long as all share a weight."""
        x, residual, weight, *rest = inputs
        if in_dims[2] is not None:
            raise NotImplementedError(
                "fusednorm cannot take a batch of weights under vmap: one call has one weight; map over x and the "
                "residual only, with in_dims of None for the weight, or write a loop"
            )
        x, residual = (
            tensor
            if tensor is None
            else tensor.movedim(dim, 0)
            if dim is not None
            else tensor.expand(info.batch_size, *tensor.shape)
            for tensor, dim in zip((x, residual), in_dims[:2], strict=True)
        )
        outputs = AddRMSNorm.apply(x, residual, weight, *rest)  # type: ignore[no-untyped-call]
        return outputs, (0, None if residual is None else 0, 0)
