"""The operations as torch knows them: ``torch.ops.fusednorm``.

Only tracing (``torch.compile``, ``torch.export``) and tensors without memory of their own (fake ones, ``vmap``, wrapper
subclasses) use them; a plain call does not, because torch's dispatcher would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import Flags, RMSNorm, operation_of
from fusednorm.calls.checks import (
    check_dtype,
    check_flags,
    check_given,
    check_gradients,
    check_operands,
    check_quantization,
)
from fusednorm.calls.quantization import Quantization, computed_by, groups_of
from fusednorm.engine import run
from fusednorm.engine.choose import request, request_of_backward, use_backend
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import registered
from fusednorm.torch_ops.dtensor_bridge import on_rows
from fusednorm.torch_ops.gradients import gradients, keep, new_rstd, normalise
from fusednorm.torch_ops.registered import register


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Any, Tensor]:
    return normalise(x, residual, weight, Flags(*flags))


def _into(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, residual_out: Tensor | None, *flags: Any
) -> None:
    _check_pair(residual, residual_out)
    asked = Flags(*flags)
    if residual is not None and residual_out is not None and residual_out.dtype != residual.dtype:
        asked = asked._replace(residual_dtype=residual_out.dtype)
    run.fast_path_first(x, residual, weight, asked, out, residual_out)


def _check_pair(residual: Tensor | None, residual_out: Tensor | None) -> None:
    if (residual is None) != (residual_out is None):
        raise ValueError("residual and residual_out go together: pass both, or None for both")


class _OfGradients(NamedTuple):
    """The arguments of the operator of gradients."""

    dy: Tensor
    d_residual_out: Tensor | None
    h: Tensor
    rstd: Tensor
    weight: Tensor | None
    weight_offset: float
    x_dtype: torch.dtype
    residual_dtype: torch.dtype | None
    round_sum: bool
    round_norm: bool
    needs: list[bool]
    out_dtype: torch.dtype | None = None
    residual_out_dtype: torch.dtype | None = None


def _of_gradients(arguments: tuple[Any, ...], in_memory: bool) -> _OfGradients:
    """The arguments, which are checked."""
    of = _OfGradients(*arguments)
    dtypes = (of.x_dtype, of.residual_dtype, of.out_dtype, of.residual_out_dtype)
    check_gradients(of.dy, of.d_residual_out, of.h, of.rstd, of.weight, dtypes, of.needs, in_memory=in_memory)
    return of


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    of = _of_gradients(arguments, in_memory=True)
    h, weight = of.h, of.weight
    operation = RMSNorm(
        *(h.device, of.x_dtype, of.residual_dtype, None if weight is None else weight.dtype),
        *(of.out_dtype or of.x_dtype, h.shape[-1], of.round_sum, of.round_norm),
        None if of.residual_dtype is None else of.residual_out_dtype or of.residual_dtype,
    )
    requested = request_of_backward()
    with nullcontext() if requested == request() else use_backend(requested):
        backend = run.backend_of(operation)
    found = run.backward(backend, operation, of.dy, of.d_residual_out, h, of.rstd, weight, of.weight_offset, of.needs)
    dx, dresidual, dweight = (h.new_empty(0) if gradient is None else gradient for gradient in found[:3])
    return dx, dresidual.clone() if dresidual is dx else dresidual, dweight


def _add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    check_operands(x, residual, None, None, None, in_memory=False)
    check_dtype("dtype", dtype, x)
    return reference.added(x, residual, dtype).contiguous()


def _scale(x: Tensor, factor: float) -> Tensor:
    check_operands(x, None, None, None, None, in_memory=False)
    return reference.scaled(x, factor).contiguous()


def _quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    numbers, *computed = quantizer.quantized(y, quantization, scale, zero_point)
    nothing = [y.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.int32)]
    return numbers, *computed, *nothing[len(computed) :]


def _check_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> Quantization:
    check_operands(y, None, None, None, None, in_memory=False, x_name="y")
    quantization = Quantization.parse(text)
    check_quantization(quantization, y)
    check_given(quantization, scale, zero_point, y, "y", in_memory=False)
    return quantization


# The fake ones check as the real ones do: torch calls them too where one operand of several is a meta tensor.


def _fake_normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *flags: Any
) -> tuple[Tensor, Any, Tensor]:
    check_operands(x, residual, weight, None, None, in_memory=False)
    operation = operation_of(x, residual, weight, check_flags(Flags(*flags), x, residual, None, None))
    y, total = (
        None if like is None else torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        for like, dtype in zip((x, residual), (operation.out, operation.residual_out), strict=True)
    )
    assert y is not None
    return y, total, new_rstd(x)


def _fake_into(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, residual_out: Tensor | None, *_: Any
) -> None:
    _check_pair(residual, residual_out)
    check_operands(x, residual, weight, out, residual_out, in_memory=False)


def _fake_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    computed, groups = len(computed_by(quantization)), groups_of(quantization, y.shape)
    shapes = [y.shape, *[groups] * computed, *[[0]] * (2 - computed)]
    dtypes = (quantization.dtype, torch.float32, torch.int32)
    return tuple(y.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _fake_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    of = _of_gradients(arguments, in_memory=False)
    h, weight, (need_x, need_residual, need_weight) = of.h, of.weight, of.needs
    return (
        h.new_empty(h.shape, dtype=of.x_dtype) if need_x else h.new_empty(0),
        h.new_empty(h.shape, dtype=of.residual_dtype) if need_residual and of.residual_dtype else h.new_empty(0),
        torch.empty_like(weight) if need_weight and weight is not None else h.new_empty(0),
    )


def _gradients_of_sum(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
    def formula(d_total: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        return tuple(reference.rounded(d_total, dtype) if need else None for dtype, need in needed)

    return *on_rows(formula, (d_total,), joined=0), None


def _keep_sum(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


def _gradients_of_scale(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return torch.ops.fusednorm.scale(dy, ctx.factor), None


def _keep_scale(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


def _register_norm(name: str, schema: str, in_place_schema: str, has_residual: bool) -> None:
    """Makes a norm's operator, and that in place. Without a residual, they have no place for it, nor for the sum."""

    def complete(given: Sequence[Any]) -> Any:
        return given if has_residual else (given[0], None, *given[1:])

    def asked(found: Sequence[Any]) -> Any:
        return found if has_residual else (found[0], *found[2:])

    def new(function: Callable[..., Any]) -> Callable[..., Any]:
        def results(*arguments: Any) -> Any:
            return asked(function(*complete(arguments)))

        return results

    def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any) -> Any:
            x, residual, weight, *numbers = complete(arguments)
            return function(x, residual, weight, x, residual, *numbers)

        return written

    def keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, residual, weight, *flags = complete(inputs)
        _, total, rstd = outputs = complete(output)
        keep(ctx, x, residual, weight, Flags(*flags), outputs)
        # The sum has no gradient where neither x nor the residual needs any.
        ctx.mark_non_differentiable(*(rstd,) if total is None or any(ctx.needs_input_grad[:2]) else (total, rstd))

    def gradients_of_norm(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, d_total, _ = complete(incoming)
        needs = [bool(need) for need in complete(ctx.needs_input_grad)[:3]]
        found = asked(gradients(ctx, dy, d_total, needs)[:3])
        return *found, *[None] * (len(ctx.needs_input_grad) - len(found))

    register(name, schema, new(_normalise), new(_fake_normalise), (gradients_of_norm, keep_norm))
    register(f"{name}_", in_place_schema, in_place(_into), in_place(_fake_into))


_FLAGS = "Scalar eps, float weight_offset, bool round_sum, bool round_norm"

_register_norm(
    "fused_add_rms_norm",
    f"(Tensor x, Tensor residual, Tensor? weight, {_FLAGS}, ScalarType? out_dtype=None, ScalarType? "
    "residual_dtype=None) -> (Tensor, Tensor, Tensor)",
    f"(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, {_FLAGS}) -> ()",
    has_residual=True,
)
_register_norm(
    "rms_norm",
    f"(Tensor x, Tensor? weight, {_FLAGS}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    f"(Tensor(a!) x, Tensor? weight, {_FLAGS}) -> ()",
    has_residual=False,
)
register(
    "into",
    f"(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!)? residual_out, {_FLAGS}) -> ()",
    _into,
    _fake_into,
)
register(
    "backward",
    "(Tensor dy, Tensor? d_residual_out, Tensor h, Tensor rstd, Tensor? weight, float weight_offset, "
    "ScalarType x_dtype, ScalarType? residual_dtype, bool round_sum, bool round_norm, bool[] needs, "
    "ScalarType? out_dtype=None, ScalarType? residual_out_dtype=None) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
# Out of torch's operations, so that they are their own fakes.
register("add", "(Tensor x, Tensor residual, ScalarType dtype) -> Tensor", _add, _add, (_gradients_of_sum, _keep_sum))
register("scale", "(Tensor x, float factor) -> Tensor", _scale, _scale, (_gradients_of_scale, _keep_scale))
register(
    "quantize",
    "(Tensor y, str quantization, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)

#: The schemas of fusednorm's own operators, by name; of those that are in no exported program see ``inference.py``.
SCHEMAS = {name: schema for name, schema in registered.SCHEMAS.items() if not name.endswith("_inference")}
