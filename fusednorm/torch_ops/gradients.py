"""Gradients: what the forward pass keeps for the backward pass, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import fast_path, must_be_seen
from fusednorm.calls.call import Flags, RMSNorm, Step, accumulator, operation_of
from fusednorm.calls.checks import check_kept
from fusednorm.calls.scalars import number
from fusednorm.engine import run_norms
from fusednorm.engine.choose import Chosen
from fusednorm.reference import norm as reference
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.dtensor_bridge import on_rows


def new_rstd(x: Tensor) -> Tensor:
    """[...] of the accumulator type for x of [..., N], to be filled by the forward pass."""
    return x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))


def keep(
    ctx: Any,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    flags: Flags,
    total: Tensor | None,
    rstd: Tensor,
) -> None:
    """Keeps the row that was normalised: the sum that is returned, or, unrounded, both terms to make it again."""
    unrounded = total is not None and not flags.round_sum and total.dtype != rstd.dtype
    terms = (x, residual) if unrounded else (x,) if total is None else (total,)
    ctx.save_for_backward(rstd, weight, bias, *terms)
    ctx.set_materialize_grads(False)
    ctx.around = bias is not None or getattr(weight, "ndim", 1) == 2
    ctx.eps, ctx.weight_offset = (
        number("eps", flags.eps, rstd.dtype),
        number("weight_offset", flags.weight_offset, rstd.dtype),
    )
    ctx.operation = operation_of(x, residual, weight, flags, bias=bias)


def composed_again(
    composed: Callable[..., tuple[Tensor, ...]],
    operands: Sequence[Tensor | None],
    incoming: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of a composition that is made again, so that they may be differentiated; None where not needed.

    ``composed`` takes the operands and returns as many outputs as there are incoming gradients.
    """
    with torch.enable_grad():
        # Views, because a tensor may be two operands, each of which has a gradient of its own.
        apart = [t if t is None else t.view_as(t) for t in operands]
        outputs = composed(*apart)
    of = [(output, d) for output, d in zip(outputs, incoming, strict=True) if d is not None]
    wanted: list[Any] = [t for t, need in zip(apart, needs, strict=True) if need]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in of],
            wanted,
            [d for _, d in of],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if need else None for need in needs]


def _normalised(terms: Sequence[Tensor], accumulator: torch.dtype) -> Tensor:
    """The row that was normalised, of what :func:`keep` kept: a row, or two terms that are added, unrounded."""
    if len(terms) == 1:
        return terms[0]
    dtensor_bridge.check_kept((), terms)
    (h,) = on_rows(lambda x, residual: (x.to(accumulator) + residual.to(accumulator),), terms)
    return cast(Tensor, h)


def by_backend(
    chosen: tuple[Chosen, bool],
    operation: RMSNorm,
    dy: Tensor,
    d_total: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, the residual, the weight and the bias, None where not needed.

    Args:
        chosen: what :func:`backend_of` returns.
        operation: that of the forward pass.
        dy: as in :class:`fusednorm.call.Backward`, but in whatever levels it lies; so are those that follow.
        d_total: the gradient of residual_out, or None.
        h: the rows that were normalised.
        rstd: theirs.
        weight: the operand.
        bias: the operand.
        weight_offset: rounded.
        needs: whether the gradient of each of the four is wanted.
    """
    backend, in_one_call = chosen
    if in_one_call:
        return run_norms.backward(backend, operation, dy, d_total, h, rstd, weight, weight_offset, needs, bias)
    of_rows = needs[0] or needs[1]
    check_kept((dy, d_total), (h, rstd, weight, bias))
    n = reference.normalised(h, rstd, operation.center)
    dn, *of_weights = reference.affine_gradients(dy, n, weight, bias, weight_offset, (of_rows, needs[2], needs[3]))
    if dn is None:
        return None, None, *of_weights
    alone = (*needs[:2], False)
    found = run_norms.backward(backend, _norm_alone(operation), dn, d_total, h, rstd, None, 0.0, alone)
    return *found[:2], *of_weights


def gradients(
    ctx: Any,
    dy: Tensor | None,
    d_total: Tensor | None,
    needs: Sequence[bool],
    chosen: tuple[Chosen, bool] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, the residual, the weight and the bias, None where not needed: the specification's formulas.

    By the backend, or through torch's dispatcher if a mode or a tensor must see them, and always without a backend. The
    reference computes gradients that are differentiated again, and those of a bias and of rows of heads where the
    backend has those of a norm alone. The normalised rows are not kept: h and rstd make the same bits again.
    """
    rstd, weight, bias, *terms = ctx.saved_tensors
    if dy is None and d_total is None:
        return None, None, None, None
    h, operation, weight_offset = _normalised(terms, rstd.dtype), ctx.operation, ctx.weight_offset
    again = must_be_seen.differentiated_again()
    if dy is None:
        dy = torch.zeros_like(h, dtype=operation.out)
    operands = (dy, d_total, h, rstd, weight, bias)
    below = again or not (fast_path.is_direct(*operands) or not must_be_seen.below(*operands))  # C tells it sooner
    if chosen is not None and not below:
        return by_backend(chosen, operation, dy, d_total, h, rstd, weight, bias, weight_offset, needs)
    dtypes = (operation.x, operation.residual)
    if operation.center and not again:
        found = torch.ops.fusednorm.layer_norm_backward(
            *(dy, d_total, h, rstd, weight, bias, weight_offset, *dtypes),
            *(operation.round_sum, operation.round_norm, list(needs), operation.out, operation.residual_out),
        )
        return tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))
    center = operation.center
    dtensor_bridge.check_kept((dy, d_total), (h, rstd, weight, bias))

    def again_with_rstd(h: Tensor) -> Tensor:
        """rstd, which is kept without derivatives, with them."""
        h = h.to(rstd.dtype)
        return reference.rstd_of(reference.centered(h) if center else h, ctx.eps)

    dweight = dbias = None
    if ctx.around:
        of_rows = needs[0] or needs[1]
        n = reference.normalised(h, again_with_rstd(h) if again else rstd, center)
        of_all = (dy, n, weight, bias, weight_offset, (of_rows, needs[2], needs[3]))
        dy, dweight, dbias = reference.affine_gradients(*of_all)
        if dy is None:
            return None, None, dweight, dbias
        operation, weight, weight_offset, needs = _norm_alone(operation), None, 0.0, (*needs[:2], False)
    asked = (needs[0], needs[1], needs[2])
    if again:

        def formula(dy: Tensor, d_total: Tensor | None, h: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
            given = (dy, d_total, h, again_with_rstd(h), weight, weight_offset)
            return reference.gradients(*given, *dtypes, asked, center)

        found = on_rows(formula, (dy, d_total, h, weight), whole=[3], sums={2: 3})
    else:
        found = torch.ops.fusednorm.backward(
            *(dy, d_total, h, rstd, weight, weight_offset, *dtypes),
            *(operation.round_sum, operation.round_norm, list(asked), operation.out, operation.residual_out),
        )
        found = tuple(gradient if need else None for gradient, need in zip(found, asked, strict=True))
    return found[0], found[1], found[2] if dweight is None else dweight, dbias


def _norm_alone(operation: RMSNorm) -> RMSNorm:
    """The norm before a weight and a bias, whose rows have the accumulator type."""
    return operation._replace(weight=None, out=operation.accumulator, round_norm=False, around=None)


def backend_of(operation: RMSNorm, weight: Tensor | None, bias: Tensor | None) -> tuple[Chosen, bool]:
    """The backend for gradients, and whether it has those of the weight and the bias in the same call."""
    if bias is None and getattr(weight, "ndim", 1) != 2:
        return run_norms.backend_of(operation), True
    of_one_shape = weight is None or bias is None or weight.shape == bias.shape
    whole = run_norms.whole_of(operation, Step("affine_backward")) if of_one_shape else None
    return whole or run_norms.backend_of(_norm_alone(operation)), whole is not None
