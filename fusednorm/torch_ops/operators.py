"""The operations as torch knows them: ``torch.ops.fusednorm``.

Only tracing (``torch.compile``, ``torch.export``) and tensors without memory of their own (fake ones, ``vmap``, wrapper
subclasses) use them; a plain call does not, because torch's dispatcher would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import Flags, NormGradients, accumulator, operation_of
from fusednorm.calls.checks import (
    check_affine,
    check_dtype,
    check_flags,
    check_given,
    check_gradients,
    check_needs,
    check_operands,
    check_quantization,
)
from fusednorm.calls.quantization import Quantization, computed_by, groups_of, scales_of
from fusednorm.calls.scalars import number
from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.engine import run_norms
from fusednorm.engine.choose import request_of_backward, with_request
from fusednorm.engine.run import as_new
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import dtensors as _dtensors  # noqa: F401 - finds what DTensors need
from fusednorm.torch_ops import steps as _steps  # noqa: F401 - declares them
from fusednorm.torch_ops.dtensor_bridge import on_rows
from fusednorm.torch_ops.gradients import backend_of, by_backend, gradients, keep, new_rstd
from fusednorm.torch_ops.operator import Operator
from fusednorm.torch_ops.registered import register


def _into(
    in_memory: bool,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
    eps: float,
    weight_offset: float,
    round_sum: bool,
    round_norm: bool,
    center: bool = False,
    bias: Tensor | None = None,
) -> None:
    """A norm in the caller's memory, or only its checks, where operands have none."""
    if (residual is None) != (residual_out is None):
        raise ValueError("residual and residual_out go together: pass both, or None for both")
    if not in_memory:
        check_operands(x, residual, None if center else weight, out, residual_out, in_memory=False)
        if center:
            check_affine(x, weight, bias, in_memory=False)
        return
    asked = Flags(eps, weight_offset, round_sum, round_norm, center=center)
    if residual is not None and residual_out is not None and residual_out.dtype != residual.dtype:
        asked = asked._replace(residual_dtype=residual_out.dtype)
    of_heads = center and getattr(weight, "ndim", 1) == 2
    run_norms.fast_path_first(x, residual, weight, asked, out, residual_out, bias=bias, of_heads=of_heads)


class _Gradients:
    """The operator of gradients of one kind of norm, real and fake."""

    def __init__(self, center: bool) -> None:
        self._center = center
        tensors = "Tensor dy, Tensor? d_residual_out, Tensor h, Tensor rstd, Tensor? weight, "
        register(
            "layer_norm_backward" if center else "backward",
            f"({tensors}{'Tensor? bias, ' * center}float weight_offset, ScalarType x_dtype, "
            "ScalarType? residual_dtype, bool round_sum, bool round_norm, bool[] needs, ScalarType? out_dtype=None, "
            f"ScalarType? residual_out_dtype=None) -> (Tensor, Tensor, Tensor{', Tensor' * center})",
            self._real,
            self._fake,
        )

    def _checked(self, in_memory: bool, given: tuple[Any, ...]) -> NormGradients:
        dy, d_total, h, rstd, weight, *rest = given
        bias = rest.pop(0) if self._center else None
        weight_offset, x_dtype, residual_dtype, round_sum, round_norm, needs, *outputs = rest
        out_dtype, residual_out_dtype = (*outputs, None, None)[:2]
        needed = needs
        if self._center:
            check_needs(needs, ("x", "residual", "weight", "bias"))
            needed = needs[:3]
        dtypes = (x_dtype, residual_dtype, out_dtype, residual_out_dtype)
        check_gradients(dy, d_total, h, rstd, None if self._center else weight, dtypes, needed, in_memory=in_memory)
        if self._center:
            check_affine(h, weight, bias, in_memory=in_memory, x_name="h")
        weight_offset = number("weight_offset", weight_offset, accumulator(x_dtype))
        flags = Flags(0.0, weight_offset, round_sum, round_norm, center=self._center)
        operation = operation_of(h, None, weight, flags, bias=bias)._replace(
            x=x_dtype,
            residual=residual_dtype,
            out=out_dtype or x_dtype,
            residual_out=None if residual_dtype is None else residual_out_dtype or residual_dtype,
        )
        return NormGradients(operation, dy, d_total, h, rstd, weight, bias, weight_offset, needs)

    def _real(self, *arguments: Any) -> tuple[Tensor, ...]:
        of = self._checked(True, arguments)
        with with_request(request_of_backward()):
            chosen = backend_of(of.operation, of.weight, of.bias)
        found = by_backend(chosen, of)
        dx, dresidual, *others = (of.h.new_empty(0) if gradient is None else gradient for gradient in found)
        return (dx, dresidual.clone() if dresidual is dx else dresidual, *others)[: 3 + self._center]

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        of = self._checked(False, arguments)
        h, dtypes = of.h, (of.operation.x, of.operation.residual)
        rows = [None if dtype is None else h.new_empty(h.shape, dtype=dtype) for dtype in dtypes]
        weights = [None if t is None else t.new_empty(t.shape) for t in (of.weight, of.bias)]
        pairs = zip((*rows, *weights), of.needs, strict=False)
        return tuple(h.new_empty(0) if t is None or not need else t for t, need in pairs)


def _add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    check_operands(x, residual, None, None, None, in_memory=False)
    check_dtype("dtype", dtype, x)
    return reference.added(x, residual, dtype).contiguous()


def _quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    numbers, *computed = as_new(quantizer.quantized(y, quantization, scale, zero_point), (y,))
    nothing = [y.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.int32)]
    return numbers, *computed, *nothing[len(computed) :]


def _check_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> Quantization:
    check_operands(y, None, None, None, None, in_memory=False, x_name="y")
    quantization = Quantization.parse(text)
    check_quantization(quantization, y)
    check_given(quantization, scale, zero_point, y, "y", in_memory=False)
    return quantization


# Fake ones check as the real ones do: torch calls them too where one operand of several is a meta tensor.


def _fake_quantize(y: Tensor, text: str, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, ...]:
    quantization = _check_quantize(y, text, scale, zero_point)
    computed = len(computed_by(quantization))
    of_groups = [scales_of(quantization, y.shape), groups_of(quantization, y.shape)]
    shapes = [y.shape, *of_groups[:computed], *[[0]] * (2 - computed)]
    dtypes = (quantization.dtype, quantization.scale_dtype or torch.float32, torch.int32)
    return tuple(y.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _gradients_of_sum(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
    def formula(d_total: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        return tuple(reference.rounded(d_total, dtype) if need else None for dtype, need in needed)

    return *on_rows(formula, (d_total,), joined=0), None


def _keep_sum(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


_WEIGHT, _BIAS = Operand("weight", Role.WEIGHT, True), Operand("bias", Role.WEIGHT, True)
_OUT, _RSTD = Result(dtype="out_dtype"), Result("rstd", Role.NUMBERS, kept=True)
_TOTAL = Result("residual_out", dtype="residual_dtype", like="residual")


class Norm(Operator):
    """A norm, and its operator in place. An RMS norm has no bias; without a residual, a norm has no sum either.

    It keeps the row that was normalised, and not its operands; ``_Gradients`` has the gradients of both norms.
    """

    differentiable = True

    def __init__(self, name: str, *, added: bool, center: bool) -> None:
        self._added, self._center = added, center
        rows = (Operand("x"), Operand("residual"))[: 1 + added]
        names = ("eps", "weight_offset", "round_sum", "round_norm", "out_dtype", *["residual_dtype"] * added)
        declaration = Declaration(
            name,
            operands=(*rows, _WEIGHT, _BIAS) if center else (*rows, _WEIGHT),
            results=(_OUT, _TOTAL, _RSTD) if added else (_OUT, _RSTD),
            flags={flag: Flags._field_defaults[flag] for flag in names},
            formula=self._formula,
            tangent=self._tangent,
            checks=self._check,
            kernel=None,
        )
        super().__init__(declaration, self._computed)
        in_place = ", ".join(["Tensor(a!) x", "Tensor(b!) residual"][: 1 + added])
        rest = f"Tensor? weight, {'Tensor? bias, ' * center}{_FLAGS}"
        register(f"{name}_", f"({in_place}, {rest}) -> ()", self._in_place(True), self._in_place(False))

    def _results(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """y, the sum and rstd; None where there is no sum."""
        return tuple(given) if self._added else (given[0], None, *given[1:])

    def _returned(self, y: Any, total: Any, *others: Any) -> tuple[Any, ...]:
        return (y, total, *others) if self._added else (y, *others)

    def _flags(self, given: Mapping[str, Any]) -> Flags:
        return Flags(**given, center=self._center)

    def _formula(self, x: Tensor, residual: Any = None, weight: Any = None, bias: Any = None, **given: Any) -> Any:
        flags = self._flags(given)
        total_dtype = None if residual is None else flags.residual_dtype or residual.dtype
        found = reference.outputs_of(x, residual, weight, bias, flags, flags.out_dtype or x.dtype, total_dtype)
        return self._returned(*found)

    def _tangent(
        self, operands: Mapping[str, Any], flags: Mapping[str, Any], tangents: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """Tangents of y and of the sum, whose bits nothing promises; roundings are passed straight through."""
        x, residual, weight = operands["x"], operands.get("residual"), operands["weight"]
        of_weight, of_bias = tangents["weight"], tangents.get("bias")
        asked, wide = self._flags(flags), accumulator(x.dtype)
        h, total_dtype = x.to(wide), wide
        if residual is not None:
            total_dtype = asked.residual_dtype or residual.dtype
            h = h + residual.to(wide)
            h = h.to(total_dtype).to(wide) if asked.round_sum else h
        of_terms = (tangents["x"], tangents.get("residual"))
        of_h = of_total = sum((t.to(wide) for t in of_terms if t is not None), start=torch.zeros_like(h))
        if asked.center:
            h, of_h = h - h.mean(-1, keepdim=True), of_h - of_h.mean(-1, keepdim=True)
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + asked.eps)
        xhat = h * rstd
        of_y = rstd * (of_h - xhat * (xhat * of_h).mean(-1, keepdim=True))
        if weight is not None:
            of_y = of_y * (weight.to(wide) + asked.weight_offset)
        if of_weight is not None:
            of_y = of_y + xhat * of_weight.to(wide)
        if of_bias is not None:
            of_y = of_y + of_bias.to(wide)
        return self._returned(of_y.to(asked.out_dtype or x.dtype), of_total.to(total_dtype))

    def _check(self, operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> dict[str, Any]:
        x, residual, weight = operands["x"], operands.get("residual"), operands["weight"]
        check_operands(x, residual, None if self._center else weight, None, None, in_memory=in_memory)
        if self._center:
            check_affine(x, weight, operands["bias"], in_memory=in_memory)
        found = check_flags(self._flags(flags), x, residual, None, None)
        return {name: getattr(found, name) for name in self.declaration.flags}

    def _computed(self, operands: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        x, weight = operands["x"], operands["weight"]
        rstd, flags = new_rstd(x), self._flags(given)
        found = run_norms.fast_path_first(
            x,
            operands.get("residual"),
            weight,
            flags,
            rstd=rstd,
            bias=operands.get("bias"),
            of_heads=self._center and getattr(weight, "ndim", 1) == 2,
        )
        return self._returned(*found, rstd)

    def _forward(self, *arguments: Any) -> Any:
        return self._computed(*self.plan.bound(arguments))  # which checks, where the fast path does not

    def _in_place(self, in_memory: bool) -> Callable[..., None]:
        def written(*arguments: Any) -> None:
            operands, flags = self.plan.bound(arguments)
            x, residual = operands["x"], operands.get("residual")
            _into(
                in_memory,
                x,
                residual,
                operands["weight"],
                x,
                residual,
                **{name: flags[name] for name in ("eps", "weight_offset", "round_sum", "round_norm")},
                center=self._center,
                bias=operands.get("bias"),
            )

        return written

    def keep(
        self,
        ctx: Any,
        operands: Mapping[str, Any],
        flags: Mapping[str, Any],
        results: Sequence[Any],
        through_dispatcher: bool = True,
    ) -> None:
        """Keeps the row and rstd; outside of the dispatcher also the backend in force."""
        x, residual, weight, bias = operands["x"], *[operands.get(name) for name in _OPERANDS[1:]]
        y, total, rstd = self._results(results)
        asked = self._flags(flags)
        keep(ctx, x, residual, weight, asked, (y, total, rstd), bias)
        ctx.flags = flags
        # The sum has no gradient where neither x nor the residual needs any. Elsewhere it may have a tangent, of which
        # this context does not know.
        without = total is not None and through_dispatcher and not any(ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(*(total, rstd) if without else (rstd,))
        if not through_dispatcher:
            ctx.backend = backend_of(ctx.operation, weight, bias)

    def gradients(self, ctx: Any, incoming: Sequence[Any], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each operand."""
        dy, d_total, _ = self._results(incoming)
        needed = dict(zip(self.plan.operands, ctx.needs_input_grad, strict=False))
        needs = [bool(needed.get(name)) for name in _OPERANDS]
        found = gradients(ctx, dy, d_total, needs, None if through_dispatcher else ctx.backend)
        named = dict(zip(_OPERANDS, found, strict=True))
        return tuple(named[name] for name in self.plan.operands)


#: All operands of a norm.
_OPERANDS = ("x", "residual", "weight", "bias")
_FLAGS = "Scalar eps, float weight_offset, bool round_sum, bool round_norm"

RMS_NORM = Norm("rms_norm", added=False, center=False)
FUSED_ADD_RMS_NORM = Norm("fused_add_rms_norm", added=True, center=False)
LAYER_NORM = Norm("layer_norm", added=False, center=True)
FUSED_ADD_LAYER_NORM = Norm("fused_add_layer_norm", added=True, center=True)
_Gradients(center=False)
_Gradients(center=True)
register(
    "into",
    f"(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!)? residual_out, {_FLAGS}, "
    "bool center=False, Tensor? bias=None) -> ()",
    partial(_into, True),
    partial(_into, False),
)
# Out of torch's operations, so that it is its own fake.
register("add", "(Tensor x, Tensor residual, ScalarType dtype) -> Tensor", _add, _add, (_gradients_of_sum, _keep_sum))
register(
    "quantize",
    "(Tensor y, str quantization, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)
