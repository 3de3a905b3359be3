"""The operations as torch knows them: ``torch.ops.fusednorm``.

Only tracing (``torch.compile``, ``torch.export``) and tensors without memory of their own (fake ones, ``vmap``, wrapper
subclasses) go this way; a plain call does not, because torch's dispatcher would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.autograd import gradients, keep
from fusednorm.backends import reference
from fusednorm.ops import run
from fusednorm.registry import Signature, select

_FLAGS = "float eps, float weight_offset, bool round_sum, bool round_norm"

SCHEMAS = {
    "fused_add_rms_norm": f"(Tensor x, Tensor residual, Tensor? weight, {_FLAGS}) -> (Tensor, Tensor, Tensor)",
    "rms_norm": f"(Tensor x, Tensor? weight, {_FLAGS}) -> (Tensor, Tensor)",
    "fused_add_rms_norm_": f"(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, {_FLAGS}) -> ()",
    "rms_norm_": f"(Tensor(a!) x, Tensor? weight, {_FLAGS}) -> ()",
    "backward": "(Tensor dy, Tensor? d_residual_out, Tensor h, Tensor rstd, Tensor? weight, float weight_offset, "
    "ScalarType x_dtype, ScalarType? residual_dtype, bool round_sum, bool round_norm, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"fusednorm::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _rstd_for(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=reference.accumulator(x.dtype))


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, ...]:
    rstd = _rstd_for(x)
    return *run(x, residual, weight, *flags, None, None, rstd)[:2], rstd


def _rms_norm(x: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Tensor]:
    rstd = _rstd_for(x)
    return run(x, None, weight, *flags, None, None, rstd)[0], rstd


def _fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any) -> None:
    run(x, residual, weight, *flags, x, residual)


def _rms_norm_(x: Tensor, weight: Tensor | None, *flags: Any) -> None:
    run(x, None, weight, *flags, x, None)


def _backward(
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    round_sum: bool,
    round_norm: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    weight_dtype = None if weight is None else weight.dtype
    signature = Signature(h.device, x_dtype, residual_dtype, weight_dtype, x_dtype, h.shape[-1], round_sum, round_norm)
    dx_needed, dresidual_needed, dweight_needed = needs
    wanted = (dx_needed, dresidual_needed, dweight_needed)
    found = select(signature).backward(
        dy,
        d_residual_out,
        h,
        rstd,
        weight,
        weight_offset,
        x_dtype,
        residual_dtype,
        wanted,
    )
    dx, dresidual, dweight = (h.new_empty(0) if gradient is None else gradient for gradient in found)
    return dx, dresidual.clone() if dresidual is dx else dresidual, dweight


for _name, _function in {
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm_": _fused_add_rms_norm_,
    "rms_norm_": _rms_norm_,
    "backward": _backward,
}.items():
    torch.library.impl(f"fusednorm::{_name}", "CompositeExplicitAutograd")(_function)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fusednorm::fused_add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(residual), _rstd_for(x)


@torch.library.register_fake("fusednorm::rms_norm")
def _(x: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _rstd_for(x)


@torch.library.register_fake("fusednorm::fused_add_rms_norm_")
def _(x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any) -> None:
    return None


@torch.library.register_fake("fusednorm::rms_norm_")
def _(x: Tensor, weight: Tensor | None, *flags: Any) -> None:
    return None


@torch.library.register_fake("fusednorm::backward")
def _(
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    round_sum: bool,
    round_norm: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_residual, need_weight = needs
    nothing = h.new_empty(0)
    return (
        h.new_empty(h.shape, dtype=x_dtype) if need_x else nothing,
        h.new_empty(h.shape, dtype=residual_dtype) if need_residual and residual_dtype is not None else nothing.clone(),
        torch.empty_like(weight) if need_weight and weight is not None else nothing.clone(),
    )


def _backward_op(ctx: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
        *others, needs = arguments
        found = torch.ops.fusednorm.backward(*others, ctx.round_sum, ctx.round_norm, list(needs))
        return tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))

    return backward


def _keep_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    keep(ctx, *inputs, *output[1:])


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *others = inputs
    keep(ctx, x, None, *others, None, output[1])


def _backward_of_fused(ctx: Any, dy: Tensor | None, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return *gradients(ctx, dy, d_total, ctx.needs_input_grad[:3], _backward_op(ctx)), None, None, None, None


def _backward_of_norm(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx, _, dweight = gradients(ctx, dy, None, (need_x, False, need_weight), _backward_op(ctx))
    return dx, dweight, None, None, None, None


torch.library.register_autograd("fusednorm::fused_add_rms_norm", _backward_of_fused, setup_context=_keep_fused)
torch.library.register_autograd("fusednorm::rms_norm", _backward_of_norm, setup_context=_keep_norm)
