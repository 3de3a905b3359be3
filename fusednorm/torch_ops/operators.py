"""The operations as torch knows them: ``torch.ops.fusednorm``.

Only tracing (``torch.compile``, ``torch.export``) and tensors without memory of their own (fake ones, ``vmap``, wrapper
subclasses) use them; a plain call does not, because torch's dispatcher would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import Flags, RMSNorm, accumulator, operation_of
from fusednorm.calls.checks import (
    check_affine,
    check_given,
    check_gradients,
    check_needs,
    check_operands,
    check_quantization,
)
from fusednorm.calls.quantization import Quantization, computed_by, groups_of, scales_of
from fusednorm.calls.scalars import number
from fusednorm.engine import run_norms
from fusednorm.engine.requested import request_of_backward, with_request
from fusednorm.engine.run import as_new
from fusednorm.reference import quantizer
from fusednorm.torch_ops import dtensors as _dtensors  # noqa: F401 - finds what DTensors need
from fusednorm.torch_ops import steps as _steps  # noqa: F401 - declares them
from fusednorm.torch_ops.gradients import backend_of, by_backend
from fusednorm.torch_ops.registered import register


def into(
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


class _Asked(NamedTuple):
    """The gradients of a norm that are wanted, and what they are computed from, in whatever levels that lies."""

    operation: RMSNorm
    #: As in :class:`fusednorm.call.Backward`.
    dy: Tensor
    d_residual_out: Tensor | None
    h: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    weight_offset: float
    #: Whether those of x, the residual, the weight and the bias are.
    needs: Sequence[bool]


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

    def _checked(self, in_memory: bool, given: tuple[Any, ...]) -> _Asked:
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
        return _Asked(operation, dy, d_total, h, rstd, weight, bias, weight_offset, needs)

    def _real(self, *arguments: Any) -> tuple[Tensor, ...]:
        of = self._checked(True, arguments)
        with with_request(request_of_backward()):
            chosen = backend_of(of.operation, of.weight, of.bias)
        found = by_backend(chosen, *of)
        dx, dresidual, *others = (of.h.new_empty(0) if gradient is None else gradient for gradient in found)
        return (dx, dresidual.clone() if dresidual is dx else dresidual, *others)[: 3 + self._center]

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        of = self._checked(False, arguments)
        h, dtypes = of.h, (of.operation.x, of.operation.residual)
        rows = [None if dtype is None else h.new_empty(h.shape, dtype=dtype) for dtype in dtypes]
        weights = [None if t is None else t.new_empty(t.shape) for t in (of.weight, of.bias)]
        pairs = zip((*rows, *weights), of.needs, strict=False)
        return tuple(h.new_empty(0) if t is None or not need else t for t, need in pairs)


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


#: In schemas.
NUMBERS_OF_NORMS = "Scalar eps, float weight_offset, bool round_sum, bool round_norm"

_Gradients(center=False)
_Gradients(center=True)
register(
    "into",
    f"(Tensor x, Tensor? residual, Tensor? weight, Tensor(a!) out, Tensor(b!)? residual_out, {NUMBERS_OF_NORMS}, "
    "bool center=False, Tensor? bias=None) -> ()",
    partial(into, True),
    partial(into, False),
)
register(
    "quantize",
    "(Tensor y, str quantization, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _fake_quantize,
)
