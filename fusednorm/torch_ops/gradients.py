"""Gradients: what the forward pass keeps for the backward pass, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Around, Flags, RMSNorm, Step, accumulator, operation_of
from fusednorm.calls.checks import check_flags
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.engine import run
from fusednorm.engine.choose import Chosen
from fusednorm.engine.run import backend_of
from fusednorm.reference import norm as reference
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.dtensor_bridge import new_outputs, on_rows


class Rstd(torch.autograd.Function):
    """(h, eps) -> 1 / sqrt(mean(h^2) + eps), with derivatives; only for derivatives of gradients."""

    @staticmethod
    def forward(h: Tensor, eps: float) -> Tensor:
        """``h`` is [..., N] of the accumulator type; the result is [...]."""
        return reference.rstd_of(h, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps both."""
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, d_rstd: Tensor) -> tuple[Tensor, None]:
        """``-rstd^3 * h / N``, out of operations that can be differentiated again."""
        h, rstd = ctx.saved_tensors
        return (d_rstd * -(rstd**3) / h.shape[-1]).unsqueeze(-1) * h, None

    @staticmethod
    def jvp(ctx: Any, h_tangent: Tensor, _: None) -> Tensor:
        """``-rstd^3 * mean(h * h_tangent)``."""
        with outer_levels():
            h, rstd = primals(ctx)
            return -(rstd**3) * (h * h_tangent).mean(-1)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], h: Tensor, eps: float) -> tuple[Tensor, int]:
        """A batch of rows is rows."""
        return Rstd.apply(h.movedim(in_dims[0], 0), eps), 0  # type: ignore[no-untyped-call]


def new_rstd(x: Tensor) -> Tensor:
    """[...] of the accumulator type for x of [..., N], to be filled by the forward pass."""
    return x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))


def normalise(x: Tensor, residual: Tensor | None, weight: Tensor | None, flags: Flags) -> tuple[Tensor, Any, Tensor]:
    """New rows, their sum (None without a residual), and rstd for the backward pass."""
    rstd = new_rstd(x)
    return *run.fast_path_first(x, residual, weight, flags, rstd=rstd), rstd


def keep(
    ctx: Any,
    operation: RMSNorm,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    outputs: tuple[Tensor, Tensor | None, Tensor],
) -> None:
    """Keeps the row that was normalised: the sum that is returned, or, unrounded, both terms to make it again."""
    _, total, rstd = outputs
    unrounded = total is not None and not flags.round_sum and total.dtype != rstd.dtype
    ctx.save_for_backward(rstd, weight, *((x, residual) if unrounded else (x,) if total is None else (total,)))
    ctx.set_materialize_grads(False)
    ctx.flags, ctx.operation = flags, operation


def mark_constant(ctx: Any, total: Tensor | None, rstd: Tensor) -> None:
    """Marks the outputs without gradients: rstd, and the sum where neither x nor the residual needs any."""
    ctx.mark_non_differentiable(*(rstd,) if total is None or any(ctx.needs_input_grad[:2]) else (total, rstd))


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


def gradients(
    ctx: Any, dy: Tensor | None, d_total: Tensor | None, needs: tuple[bool, bool, bool], backend: Chosen | None
) -> tuple[Tensor | None, ...]:
    """The specification's formulas: by the backend, or through torch's dispatcher if a mode or a tensor must see them.

    Without a backend always through the dispatcher. The reference computes gradients that are differentiated again.
    """
    rstd, weight, *terms = ctx.saved_tensors
    operation, flags = ctx.operation, ctx.flags
    if dy is None and d_total is None:
        return None, None, None
    h = _normalised(terms, rstd.dtype)
    if dy is None:
        dy = torch.zeros_like(h, dtype=operation.out)
    # rstd, which is kept without derivatives, is made again with them.
    if must_be_seen.differentiated_again():
        dtensor_bridge.check_kept((dy, d_total), (h, rstd, weight))

        def formula(dy: Tensor, d_total: Tensor | None, h: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
            again = Rstd.apply(h.to(rstd.dtype), flags.eps)  # type: ignore[no-untyped-call]
            operands = (dy, d_total, h, again, weight, flags.weight_offset)
            return reference.gradients(*operands, operation.x, operation.residual, needs)

        return on_rows(formula, (dy, d_total, h), (weight,))
    operands = (dy, d_total, h, rstd, weight, flags.weight_offset)
    if backend is not None and not must_be_seen.below(dy, d_total, h, rstd, weight):
        return run.backward(backend, operation, *operands, needs)[:3]
    found = torch.ops.fusednorm.backward(
        *(*operands, operation.x, operation.residual, flags.round_sum, flags.round_norm, list(needs)),
        *(operation.out, operation.residual_out),
    )
    return tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))


def _remember(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None, Tensor]) -> None:
    """Keeps what the backward pass needs, and the backend that it takes: the one in force now."""
    x, residual, weight, *flags = inputs
    operation = operation_of(x, residual, weight, Flags(*flags))
    keep(ctx, operation, x, residual, weight, Flags(*flags), outputs)
    ctx.backend = backend_of(operation)


class Normalise(torch.autograd.Function):
    """(x, residual or None, weight or None, *flags) -> (y, residual_out, rstd).

    Without a residual, residual_out is None. rstd has no gradient: it is an output because ``torch.func`` lets only
    inputs and outputs be kept.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """See :func:`fusednorm.fused_add_rms_norm` and :func:`fusednorm.rms_norm`."""
        x, residual, weight, *flags = inputs
        outputs = normalise(x, residual, weight, Flags(*flags))
        _remember(ctx, inputs, outputs)
        mark_constant(ctx, *outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """See :func:`gradients`."""
        return *gradients(ctx, dy, d_total, ctx.needs_input_grad[:3], ctx.backend), *[None] * len(Flags._fields)


_GRADIENTS_OF_ALL = Step("affine_backward")


def _norm_alone(operation: RMSNorm) -> RMSNorm:
    """The norm before a weight and a bias, whose rows have the accumulator type."""
    return operation._replace(weight=None, out=operation.accumulator, round_norm=False, around=None)


class NormaliseAffine(torch.autograd.Function):
    """(x, residual or None, weight, bias, *flags) -> (y, residual_out or None): docs/spec.md, section 8.

    The normalised rows, of the accumulator type, are not kept: ``h * rstd`` makes the same bits again. A backend that
    has the gradients of all that makes one call of each pass.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """See :func:`fusednorm.reference.norm.affine`."""
        x, residual, weight, bias, *rest = inputs
        flags = Flags(*rest)
        rstd, around = new_rstd(x) if isinstance(x, Tensor) else None, Around(bias, 1.0)
        found = run.on_fast_path(x, residual, weight, flags, rstd=rstd, bias=bias)
        if found is None:
            found = run.forward(x, residual, weight, flags, rstd=rstd, around=around)
            flags = check_flags(flags, x, residual, None, None)
        operation = operation_of(x, residual, weight, flags, around=around)
        of_one_shape = weight is None or bias is None or weight.shape == bias.shape
        ctx.backend = run.whole_of(operation, _GRADIENTS_OF_ALL) if of_one_shape else None
        ctx.in_one_call = ctx.backend is not None
        of_norm = Flags(flags.eps, 0.0, flags.round_sum, False, operation.accumulator, flags.residual_dtype)
        y, total = found
        assert rstd is not None
        keep(ctx, operation, x, residual, None, of_norm, (y, total, rstd))
        ctx.backend = ctx.backend or backend_of(_norm_alone(operation))
        ctx.weight_offset = flags.weight_offset
        ctx.save_for_backward(*ctx.to_save, weight, bias)
        if residual is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        """See :func:`fusednorm.reference.norm.affine_gradients`, and :func:`gradients`."""
        *kept, weight, bias = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        of_norm = SimpleNamespace(saved_tensors=kept, operation=_norm_alone(ctx.operation), flags=ctx.flags)
        dx = dresidual = dn = dweight = dbias = None
        if dy is not None:
            rstd, _, *terms = kept
            h = _normalised(terms, rstd.dtype)
            others = (dy, d_total, h, rstd, weight, bias)
            if ctx.in_one_call and not (must_be_seen.differentiated_again() or must_be_seen.below(*others)):
                needs = ctx.needs_input_grad[:4]
                found = run.backward(ctx.backend, ctx.operation, *others[:-1], ctx.weight_offset, needs, bias)
                return *found, *[None] * len(Flags._fields)
            dtensor_bridge.check_kept((dy, d_total), others[2:])
            h = h.to(rstd.dtype)
            if must_be_seen.differentiated_again():
                rstd = Rstd.apply(h, ctx.flags.eps)  # type: ignore[no-untyped-call]
            needs = (need_x or need_residual, need_weight, need_bias)
            n = h * rstd.unsqueeze(-1)
            dn, dweight, dbias = reference.affine_gradients(dy, n, weight, bias, ctx.weight_offset, needs)
        if need_x or need_residual:
            dx, dresidual, _ = gradients(of_norm, dn, d_total, (need_x, need_residual, False), ctx.backend)
        return dx, dresidual, dweight, dbias, *[None] * len(Flags._fields)


class Transformed(Normalise):
    """The same for ``torch.func`` and forward mode, which want the context apart: it takes 15 us longer."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """See :class:`Normalise`."""
        x, residual, weight, *flags = inputs
        run_it = new_outputs if must_be_seen.below(x, residual, weight) else normalise
        return run_it(x, residual, weight, Flags(*flags))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor]) -> None:
        """See :func:`keep`."""
        _remember(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])  # the sum may have a tangent, of which this context does not know
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def jvp(
        ctx: Any, x_tangent: Tensor | None, residual_tangent: Tensor | None, weight_tangent: Tensor | None, *_: None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Tangents of both outputs, out of torch's operations, which can be differentiated again.

        The specification does not promise their bits. Roundings are passed straight through.
        """
        with outer_levels():
            x, residual, weight = primals(ctx)
            operation, flags = ctx.operation, ctx.flags
            dtype = operation.accumulator
            h = x.to(dtype)
            if residual is not None:
                h = h + residual.to(dtype)
                h = h.to(operation.residual_out).to(dtype) if flags.round_sum else h
            rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + flags.eps)
            xhat = h * rstd
            tangents = [t.to(dtype) for t in (x_tangent, residual_tangent) if t is not None]
            h_tangent = sum(tangents, start=torch.zeros_like(h))
            y_tangent = rstd * (h_tangent - xhat * (xhat * h_tangent).mean(-1, keepdim=True))
            if weight is not None:
                y_tangent = y_tangent * (weight.to(dtype) + flags.weight_offset)
            if weight_tangent is not None:
                y_tangent = y_tangent + xhat * weight_tangent.to(dtype)
            total_tangent = None if residual is None else h_tangent.to(operation.residual_out)
            return y_tangent.to(operation.out), total_tangent, None

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
        outputs = Transformed.apply(x, residual, weight, *rest)  # type: ignore[no-untyped-call]
        return outputs, (0, None if residual is None else 0, 0)
