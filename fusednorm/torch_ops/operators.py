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

from fusednorm.calls.call import Flags, RMSNorm, accumulator
from fusednorm.calls.checks import (
    check_dtype,
    check_flags,
    check_given,
    check_gradients,
    check_operands,
    check_quantization,
)
from fusednorm.calls.declared import Declaration, Operand, Result, Role
from fusednorm.calls.quantization import Quantization, computed_by, groups_of, scales_of
from fusednorm.engine import execute
from fusednorm.engine.choose import request, request_of_backward, use_backend
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import steps as _steps  # noqa: F401 - declares them
from fusednorm.torch_ops.declared import Operator
from fusednorm.torch_ops.dtensor_bridge import on_rows
from fusednorm.torch_ops.gradients import gradients, keep, keep_backend, new_rstd
from fusednorm.torch_ops.registered import register


def _into(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, residual_out: Tensor | None, *flags: Any
) -> None:
    _check_pair(residual, residual_out)
    asked = Flags(*flags)
    if residual is not None and residual_out is not None and residual_out.dtype != residual.dtype:
        asked = asked._replace(residual_dtype=residual_out.dtype)
    execute.fast_path_first(x, residual, weight, asked, out, residual_out)


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
        backend = execute.backend_of(operation)
    found = execute.backward(
        backend, operation, of.dy, of.d_residual_out, h, of.rstd, weight, of.weight_offset, of.needs
    )
    dx, dresidual, dweight = (h.new_empty(0) if gradient is None else gradient for gradient in found[:3])
    return dx, dresidual.clone() if dresidual is dx else dresidual, dweight


def _add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    check_operands(x, residual, None, None, None, in_memory=False)
    check_dtype("dtype", dtype, x)
    return reference.added(x, residual, dtype).contiguous()


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


def _fake_into(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, residual_out: Tensor | None, *_: Any
) -> None:
    _check_pair(residual, residual_out)
    check_operands(x, residual, weight, out, residual_out, in_memory=False)


def _fake_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    computed = len(computed_by(quantization))
    of_groups = [scales_of(quantization, y.shape), groups_of(quantization, y.shape)]
    shapes = [y.shape, *of_groups[:computed], *[[0]] * (2 - computed)]
    dtypes = (quantization.dtype, quantization.scale_dtype or torch.float32, torch.int32)
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


def _formula(x: Tensor, residual: Tensor | None, weight: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    flags = Flags(*arguments)
    numbers = (flags.eps, flags.weight_offset, flags.round_sum, flags.round_norm)
    dtypes = (flags.out_dtype or x.dtype, None if residual is None else flags.residual_dtype or residual.dtype)
    return reference.outputs(x, residual, weight, *numbers, *dtypes, reference.differentiable_rstd)


def _tangent(operands: Sequence[Any], flags: Sequence[Any], tangents: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Tangents of y and of the sum, whose bits nothing promises; roundings are passed straight through."""
    (x, residual, weight), asked = operands, Flags(*flags)
    wide = accumulator(x.dtype)
    h = x.to(wide)
    total_dtype = wide
    if residual is not None:
        total_dtype = asked.residual_dtype or residual.dtype
        h = h + residual.to(wide)
        h = h.to(total_dtype).to(wide) if asked.round_sum else h
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + asked.eps)
    xhat = h * rstd
    of_h = sum((t.to(wide) for t in tangents[:2] if t is not None), start=torch.zeros_like(h))
    of_y = rstd * (of_h - xhat * (xhat * of_h).mean(-1, keepdim=True))
    if weight is not None:
        of_y = of_y * (weight.to(wide) + asked.weight_offset)
    if tangents[2] is not None:
        of_y = of_y + xhat * tangents[2].to(wide)
    return of_y.to(asked.out_dtype or x.dtype), of_h.to(total_dtype)


def _tangent_alone(operands: Sequence[Any], flags: Sequence[Any], tangents: Sequence[Any]) -> tuple[Tensor]:
    x, weight, of_x, of_weight = *operands, *tangents[:2]
    return _tangent((x, None, weight), flags, (of_x, None, of_weight))[:1]


def _check(operands: Sequence[Any], flags: Sequence[Any], in_memory: bool) -> tuple[Any, ...]:
    x, residual, weight = operands
    check_operands(x, residual, weight, None, None, in_memory=in_memory)
    return check_flags(Flags(*flags), x, residual, None, None)


class Norm(Operator):
    """A norm, and its operator in place. Without a residual, they have no place for it, nor for the sum.

    It keeps the row that was normalised, and not its operands; ``backward`` has the gradients of both norms.
    """

    differentiable = True

    def __init__(self, declaration: Declaration, in_place_schema: str) -> None:
        self._has_residual = len(declaration.returned) == 2
        super().__init__(declaration, self._run)
        register(f"{declaration.name}_", in_place_schema, self._in_place(_into), self._in_place(_fake_into))

    def _complete(self, given: Sequence[Any]) -> Sequence[Any]:
        return given if self._has_residual else (given[0], None, *given[1:])

    def _run(self, *arguments: Any) -> Any:
        x, residual, weight, *flags = self._complete(arguments)
        rstd = new_rstd(x)
        y, total = execute.fast_path_first(x, residual, weight, Flags(*flags), rstd=rstd)
        return (y, total, rstd) if self._has_residual else (y, rstd)

    def _forward(self, *arguments: Any) -> Any:
        return self._run(*arguments)  # which checks, where the fast path does not

    def _in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any) -> Any:
            x, residual, weight, *numbers = self._complete(arguments)
            return function(x, residual, weight, x, residual, *numbers)

        return written

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any, through_dispatcher: bool = True) -> None:
        """Keeps the row and rstd; outside of the dispatcher also the backend in force."""
        x, residual, weight, *flags = self._complete(inputs)
        y, total, rstd = self._complete(output)
        keep(ctx, x, residual, weight, Flags(*flags), (y, total, rstd))
        # The sum has no gradient where neither x nor the residual needs any. Elsewhere it may have a tangent, of which
        # this context does not know.
        without = total is not None and through_dispatcher and not any(ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(*(total, rstd) if without else (rstd,))
        if not through_dispatcher:
            keep_backend(ctx, weight)

    def gradients(self, ctx: Any, incoming: Sequence[Any], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each argument."""
        dy, d_total, _ = self._complete(incoming)
        needs = [bool(need) for need in self._complete(ctx.needs_input_grad)[:3]]
        found = gradients(ctx, dy, d_total, needs, None if through_dispatcher else ctx.backend)[:3]
        found = found if self._has_residual else found[::2]
        return *found, *[None] * (len(ctx.needs_input_grad) - len(found))


_FLAGS = "Scalar eps, float weight_offset, bool round_sum, bool round_norm"
_WEIGHT, _RSTD = Operand("weight", Role.WEIGHT, True), Result("rstd", Role.NUMBERS, kept=True)
_OUT, _NUMBERS = Result(dtype="out_dtype"), {name: Flags._field_defaults[name] for name in Flags._fields[:5]}

RMS_NORM = Norm(
    Declaration(
        "rms_norm",
        operands=(Operand("x"), _WEIGHT),
        results=(_OUT, _RSTD),
        flags=_NUMBERS,
        formula=lambda x, *rest: _formula(x, None, *rest)[::2],
        tangent=_tangent_alone,
        checks=lambda operands, flags, in_memory: _check((operands[0], None, operands[1]), flags, in_memory),
    ),
    f"(Tensor(a!) x, Tensor? weight, {_FLAGS}) -> ()",
)
FUSED_ADD_RMS_NORM = Norm(
    Declaration(
        "fused_add_rms_norm",
        operands=(Operand("x"), Operand("residual"), _WEIGHT),
        results=(_OUT, Result("residual_out", dtype="residual_dtype", like="residual"), _RSTD),
        flags=Flags._field_defaults,
        formula=_formula,
        tangent=_tangent,
        checks=_check,
    ),
    f"(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, {_FLAGS}) -> ()",
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
# Out of torch's operations, so that it is its own fake.
register("add", "(Tensor x, Tensor residual, ScalarType dtype) -> Tensor", _add, _add, (_gradients_of_sum, _keep_sum))
register(
    "quantize",
    "(Tensor y, str quantization, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)
