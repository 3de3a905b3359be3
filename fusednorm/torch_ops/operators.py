"""The operations as torch knows them: ``torch.ops.fusednorm``.

Only tracing (``torch.compile``, ``torch.export``) and tensors without memory of their own (fake ones, ``vmap``, wrapper
subclasses) use them; a plain call does not, because torch's dispatcher would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

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
from fusednorm.torch_ops.gradients import gradients, keep, mark_constant, new_rstd, normalise
from fusednorm.torch_ops.registered import register

_FLAGS = "Scalar eps, float weight_offset, bool round_sum, bool round_norm"
_DTYPES = "ScalarType? out_dtype=None, ScalarType? residual_dtype=None"

_SCHEMAS = {
    "fused_add_rms_norm": f"(Tensor x, Tensor residual, Tensor? weight, {_FLAGS}, {_DTYPES}) "
    "-> (Tensor, Tensor, Tensor)",
    "rms_norm": f"(Tensor x, Tensor? weight, {_FLAGS}, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    "fused_add_rms_norm_": f"(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, {_FLAGS}) -> ()",
    "rms_norm_": f"(Tensor(a!) x, Tensor? weight, {_FLAGS}) -> ()",
    "into": f"(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!)? residual_out, {_FLAGS}) -> ()",
    "add": "(Tensor x, Tensor residual, ScalarType dtype) -> Tensor",
    "scale": "(Tensor x, float factor) -> Tensor",
    "quantize": "(Tensor y, str quantization, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor, Tensor)",
    "backward": "(Tensor dy, Tensor? d_residual_out, Tensor h, Tensor rstd, Tensor? weight, float weight_offset, "
    "ScalarType x_dtype, ScalarType? residual_dtype, bool round_sum, bool round_norm, bool[] needs, "
    "ScalarType? out_dtype=None, ScalarType? residual_out_dtype=None) -> (Tensor, Tensor, Tensor)",
}


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return normalise(x, residual, weight, Flags(*flags))


def _rms_norm(x: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Tensor]:
    y, _, rstd = normalise(x, None, weight, Flags(*flags))
    return y, rstd


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


def _fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any) -> None:
    _into(x, residual, weight, x, residual, *flags)


def _rms_norm_(x: Tensor, weight: Tensor | None, *flags: Any) -> None:
    _into(x, None, weight, x, None, *flags)


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
    out_dtype: torch.dtype | None = None,
    residual_out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (x_dtype, residual_dtype, out_dtype, residual_out_dtype)
    check_gradients(dy, d_residual_out, h, rstd, weight, dtypes, needs)
    weight_dtype = None if weight is None else weight.dtype
    operands_dtypes = (x_dtype, residual_dtype, weight_dtype, out_dtype or x_dtype)
    residual_out_dtype = None if residual_dtype is None else residual_out_dtype or residual_dtype
    operation = RMSNorm(h.device, *operands_dtypes, h.shape[-1], round_sum, round_norm, residual_out_dtype)
    requested = request_of_backward()
    with nullcontext() if requested == request() else use_backend(requested):
        backend = run.backend_of(operation)
    need_x, need_residual, need_weight = needs
    operands = (dy, d_residual_out, h, rstd, weight, weight_offset)
    found = run.backward(backend, operation, *operands, (need_x, need_residual, need_weight))
    dx, dresidual, dweight = (h.new_empty(0) if gradient is None else gradient for gradient in found[:3])
    return dx, dresidual.clone() if dresidual is dx else dresidual, dweight


def _add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    _check_add(x, residual, dtype)
    return reference.added(x, residual, dtype).contiguous()


def _check_add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> None:
    check_operands(x, residual, None, None, None, in_memory=False)
    check_dtype("dtype", dtype, x)


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
    x: Tensor, residual: Tensor | None, weight: Tensor | None, flags: Flags
) -> tuple[Tensor, Any, Tensor]:
    check_operands(x, residual, weight, None, None, in_memory=False)
    operation = operation_of(x, residual, weight, check_flags(flags, x, residual, None, None))
    y, total = (
        None if like is None else torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        for like, dtype in zip((x, residual), (operation.out, operation.residual_out), strict=True)
    )
    assert y is not None
    return y, total, new_rstd(x)


def _fake_fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, *flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_normalise(x, residual, weight, Flags(*flags))


def _fake_rms_norm(x: Tensor, weight: Tensor | None, *flags: Any) -> tuple[Tensor, Tensor]:
    y, _, rstd = _fake_normalise(x, None, weight, Flags(*flags))
    return y, rstd


def _fake_into(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, residual_out: Tensor | None, *_: Any
) -> None:
    _check_pair(residual, residual_out)
    check_operands(x, residual, weight, out, residual_out, in_memory=False)


def _fake_fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor | None, *_: Any) -> None:
    _fake_into(x, residual, weight, x, residual)


def _fake_rms_norm_(x: Tensor, weight: Tensor | None, *_: Any) -> None:
    _fake_into(x, None, weight, x, None)


def _fake_add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    _check_add(x, residual, dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_scale(x: Tensor, factor: float) -> Tensor:
    check_operands(x, None, None, None, None, in_memory=False)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    computed, groups = len(computed_by(quantization)), groups_of(quantization, y.shape)
    shapes = [y.shape, *[groups] * computed, *[[0]] * (2 - computed)]
    dtypes = (quantization.dtype, torch.float32, torch.int32)
    return tuple(y.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _fake_backward(
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
    out_dtype: torch.dtype | None = None,
    residual_out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (x_dtype, residual_dtype, out_dtype, residual_out_dtype)
    check_gradients(dy, d_residual_out, h, rstd, weight, dtypes, needs, in_memory=False)
    need_x, need_residual, need_weight = needs
    return (
        h.new_empty(h.shape, dtype=x_dtype) if need_x else h.new_empty(0),
        h.new_empty(h.shape, dtype=residual_dtype) if need_residual and residual_dtype else h.new_empty(0),
        torch.empty_like(weight) if need_weight and weight is not None else h.new_empty(0),
    )


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fused_add_rms_norm": (_fused_add_rms_norm, _fake_fused_add_rms_norm),
    "rms_norm": (_rms_norm, _fake_rms_norm),
    "fused_add_rms_norm_": (_fused_add_rms_norm_, _fake_fused_add_rms_norm_),
    "rms_norm_": (_rms_norm_, _fake_rms_norm_),
    "into": (_into, _fake_into),
    "add": (_add, _fake_add),
    "scale": (_scale, _fake_scale),
    "quantize": (_quantize, _fake_quantize),
    "backward": (_backward, _fake_backward),
}


def _gradients_of_fused(ctx: Any, dy: Tensor | None, d_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return *gradients(ctx, dy, d_total, ctx.needs_input_grad[:3], None), *[None] * len(Flags._fields)


def _gradients_of_norm(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx, _none, dweight = gradients(ctx, dy, None, (need_x, False, need_weight), None)
    return dx, dweight, *[None] * (len(Flags._fields) - 1)


def _keep_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, *flags = inputs
    asked = Flags(*flags)
    keep(ctx, operation_of(x, residual, weight, asked), x, residual, weight, asked, output)
    mark_constant(ctx, *output[1:])


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *flags = inputs
    asked = Flags(*flags)
    keep(ctx, operation_of(x, None, weight, asked), x, None, weight, asked, (output[0], None, output[1]))


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


#: Backward pass, and what is kept for it, of the operations that have one.
_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fused_add_rms_norm": (_gradients_of_fused, _keep_fused),
    "rms_norm": (_gradients_of_norm, _keep_norm),
    "add": (_gradients_of_sum, _keep_sum),
    "scale": (_gradients_of_scale, _keep_scale),
}


for _name, (_function, _fake) in _FUNCTIONS.items():
    register(_name, _SCHEMAS[_name], _function, _fake, _GRADIENTS.get(_name))

#: The schemas of fusednorm's own operators, by name; of those that are in no exported program see ``inference.py``.
SCHEMAS = {name: schema for name, schema in registered.SCHEMAS.items() if not name.endswith("_inference")}
