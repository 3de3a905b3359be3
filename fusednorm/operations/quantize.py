"""Quantization, alone and after a norm: compositions (docs/spec.md, section 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import Flags, NormCall
from fusednorm.calls.checks import (
    check_affine,
    check_apart,
    check_between,
    check_given,
    check_operands,
    check_output,
    check_quantization,
    refuse_grad,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import AND_MUL, Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.calls.quantization import Quantization, computed_by, groups_of, is_given, scales_of
from fusednorm.engine import execute
from fusednorm.engine.execute import Quantizing
from fusednorm.engine.run import as_new
from fusednorm.operations.functions import relu2
from fusednorm.operations.gate import STEPS, checked_operands, silu_and_mul_checked
from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import dtensor_bridge

_quantize = Entry("quantizer", "x packed scale zero_point out scale_out zero_point_out").open()
_and_mul = Entry("gate", f"x z between {STEPS}", constants={"order": AND_MUL, "activation": "silu"}).open()
#: Of each norm. The last arguments may be left out.
_norm_quant = Entry(
    "quantizer",
    "x weight eps packed scale zero_point between weight_offset round_norm out scale_out zero_point_out normed_out "
    "residual round_sum residual_out residual_dtype bias center",
    constants={"normalises": True},
).open()


def quantize(
    y: Tensor,
    quantization: Quantization,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantizes rows to 8 bits: docs/spec.md, section 9.

    Args:
        y: [..., N], float16, bfloat16, float32 or float64, any strides. float64 is rounded to float32 first.
        quantization: how; :mod:`fusednorm.quantizations` has presets. Its groups must divide N.
        scale: float32, greater than 0, for ``per="tensor"``; else None. One element; or one for each block of y, as
            [rows, 1] for rows, [1, N] for columns, [rows, N / 128] or [rows / 128, N / 128]: as many dimensions as y
            has, and each size divides y's. On a GPU its value is not looked at, because that would wait for the GPU.
        zero_point: int32, one element, between -2^30 and 2^30, for ``per="tensor"`` with ``zero_point`` "after" or
            "before"; else None. Its value too is not looked at on a GPU.
        out: [..., N] of the quantization's dtype, to write the numbers to.
        scale_out: float32 or the quantization's ``scale_dtype``, to write the scales to; shaped as they are. On a CPU
            torch 2.13 does not compile programs that write to memory of float8_e8m0fnu.
        zero_point_out: int32, to write the zero points to; shaped as they are.

    Returns:
        The numbers, [..., N], and their scales: float32 [..., 1] for rows, [..., N / group] for groups, and ``scale``
        itself for ``per="tensor"``. If zero points are computed, a third tensor has them: int32, shaped as the scales.
        With ``scale_dtype`` scales have that dtype; of int32 each number has the scales of four groups, and there are
        [..., N / group / 4, rounded up].

    Raises:
        TypeError: an operand is no tensor, has another dtype, or is missing.
        ValueError: shapes, devices, groups, memory or the value of ``scale`` do not fit.
        RuntimeError: y requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _quantize(
            y, quantization.packed, scale, zero_point, out, scale_out, zero_point_out
        )
        if result is not None:
            return result
    call = _Call(quantize, {"y": y}, Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out))
    if call.listener is Listener.OVERRIDE:
        return call.handed_over()
    check_operands(y, None, None, None, None, in_memory=call.in_memory, x_name="y")
    call.check(y)
    found = call.in_one_operator()
    return call.of_rows(y) if found is None else found


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMS-normalises rows and quantizes them: the same bits as ``quantize(rms_norm(x, weight, eps), quantization)``.

    The arguments are those of :func:`fusednorm.rms_norm` and of :func:`quantize`, and two more. ``between``: the dtype
    to which the normalised rows are rounded before they are quantized: x's if None, or ``torch.float32``, which leaves
    rows of a 16-bit x unrounded. ``normed_out``, [..., N] of x's dtype, receives the normalised rows too, rounded to
    that dtype.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm, between)
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out, normed_out)
    return _of_norm(NormCall(rms_norm_quant, x, None, weight, flags), quantizing)


def fused_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Adds the residual, RMS-normalises the sum and quantizes it.

    The same bits as ``y, total = fused_add_rms_norm(x, residual, weight, eps)``, then ``quantize(y, quantization)``.

    The arguments are those of :func:`fusednorm.fused_add_rms_norm` and of :func:`rms_norm_quant`.

    Returns:
        What :func:`quantize` returns, and the sum.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.fused_add_rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if residual is None:
        refuse_type("residual", residual)
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, residual, round_sum, residual_out, residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, round_sum, round_norm, between, residual_dtype)
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out, normed_out, residual_out)
    return _of_norm(NormCall(fused_add_rms_norm_quant, x, residual, weight, flags), quantizing)


def layer_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Layer-normalises and quantizes: the same bits as ``quantize(layer_norm(x, weight, bias, eps), quantization)``.

    The arguments are those of :func:`fusednorm.layer_norm` and of :func:`rms_norm_quant`.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.layer_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, None, True, None, None, bias, True,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm, between, center=True)
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out, normed_out)
    return _of_norm(NormCall(layer_norm_quant, x, None, weight, flags, bias=bias), quantizing)


def fused_add_layer_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Adds the residual, layer-normalises the sum and quantizes it.

    The same bits as ``y, total = fused_add_layer_norm(x, residual, weight, bias, eps)``, then ``quantize(y, ...)``.

    The arguments are those of :func:`fusednorm.fused_add_layer_norm` and of :func:`rms_norm_quant`.

    Returns:
        What :func:`quantize` returns, and the sum.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.fused_add_layer_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if residual is None:
        refuse_type("residual", residual)
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, residual, round_sum, residual_out, residual_dtype, bias, True,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, round_sum, round_norm, between, residual_dtype, center=True)
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out, normed_out, residual_out)
    return _of_norm(NormCall(fused_add_layer_norm_quant, x, residual, weight, flags, bias=bias), quantizing)


def silu_and_mul_quant(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    interleaved: bool = False,
    round_steps: bool = False,
) -> tuple[Tensor, ...]:
    """``silu(gate) * up``, quantized: the same bits as ``quantize(silu_and_mul(gate, up), quantization)``.

    The arguments are those of :func:`fusednorm.silu_and_mul` and of :func:`quantize`. ``between`` is also the dtype to
    which the product is rounded before it is quantized: ``torch.float32`` leaves both of a 16-bit gate unrounded.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.silu_and_mul`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    new = between is None and out is None and scale_out is None and zero_point_out is None
    rows: Tensor | None = None
    if new and _may_be_fast(quantization, None):
        rows = _and_mul(gate, up, None, limit, alpha, up_offset, clamp, interleaved, round_steps)
        result: tuple[Tensor, ...] | None = None
        if rows is not None:
            result = _quantize(rows, quantization.packed, scale, zero_point)
        if result is not None:
            return result
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out)
    steps: dict[str, Any] = {"limit": limit, "alpha": alpha, "up_offset": up_offset, "clamp": clamp}
    steps |= {"interleaved": interleaved, "round_steps": round_steps}
    call = _Call(silu_and_mul_quant, {"gate": gate, "up": up}, quantizing, between=between, **steps)
    if call.listener is Listener.OVERRIDE:
        return call.handed_over()
    operands = checked_operands(gate, up, between, **steps)
    z, y = operands.z, operands.y
    check_operands(z, y, None, None, None, in_memory=call.in_memory, x_name="gate", residual_name="up")
    call.check(z)
    if (found := call.in_one_operator()) is not None:
        return found
    if rows is None:
        rows = silu_and_mul_checked(operands, between, call.in_memory)
    return call.of_rows(rows)


def relu2_quant(
    z: Tensor,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``relu2(z)``, quantized: the same bits as ``quantize(relu2(z, out_dtype=between), quantization)``.

    The arguments are those of :func:`fusednorm.relu2` and of :func:`quantize`. ``between``: ``torch.float32`` leaves a
    16-bit function's values unrounded before they are quantized.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.relu2`.
        RuntimeError: z requires grad while gradients are recorded: what is quantized has none.
    """
    quantizing = Quantizing(quantization, scale, zero_point, out, scale_out, zero_point_out)
    call = _Call(relu2_quant, {"z": z}, quantizing, between=between)
    if call.listener is Listener.OVERRIDE:
        return call.handed_over()
    check_operands(z, None, None, None, None, in_memory=call.in_memory, x_name="z")
    check_between(between, z, "z")
    call.check(z)
    if (found := call.in_one_operator()) is not None:
        return found
    return call.of_rows(relu2(z, out_dtype=between))


def _may_be_fast(quantization: Quantization, scale_out: Tensor | None) -> bool:
    """Whether the fast path may know such a call."""
    if is_dynamo_compiling() or type(quantization) is not Quantization:
        return False
    return quantization.scale_dtype is None and (quantization.layout == "row" or scale_out is not None)


#: The inputs that outputs may be. Scales of groups of one element are not among them: they are written before the
#: numbers, which are then read again.
_OWN = {"normed_out": ("x", "residual"), "residual_out": ("x", "residual")}
_OUTPUTS = ("out", "scale_out", "zero_point_out", *_OWN)


class _Call:
    """A call beyond the fast path.

    Args:
        function: the public function.
        inputs: its operands, by name, the rows first.
        quantizing: its quantizer.
        norm: the norm before the quantizer.
        flags: its other arguments, but those of a norm.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: dict[str, Any],
        quantizing: Quantizing,
        norm: NormCall | None = None,
        **flags: Any,
    ) -> None:
        self.function, self.inputs, self.quantizing, self.norm, self.flags = function, inputs, quantizing, norm, flags
        self.operands = (*inputs.values(), *quantizing[1:])
        self.listener = must_be_seen.listener(*self.operands)
        self.in_memory = self.listener is None

    def arguments(self, **of_quantizer: Any) -> dict[str, Any]:
        """By name; other names are there too."""
        of_norm = {} if self.norm is None else {**self.norm.arguments(), "between": self.norm.flags.out_dtype}
        return {**of_norm, **self.inputs, **self.flags, **of_quantizer}

    def handed_over(self) -> tuple[Tensor, ...]:
        """The results of whatever overrides the function."""
        return must_be_seen.handed_over(self.function, self.operands, self.arguments(**self.quantizing._asdict()))

    @exact
    def check(self, x: Tensor) -> None:
        """All that must fit before anything is written, but the inputs, which do; x has their rows."""
        x_name = next(iter(self.inputs))
        if is_grad_enabled() and requires_grad(*self.inputs.values()):
            raise RuntimeError(
                f"{self.function.__name__}(): one of the arguments requires grad, and 8-bit numbers have no gradients; "
                f"call it under torch.no_grad(), pass tensors without gradients, such as {x_name}.detach(), or train "
                "without the quantization"
            )
        quantization, scale, zero_point, *outputs = self.quantizing
        if is_grad_enabled() and requires_grad(*outputs):
            refuse_grad(self.function.__name__)
        check_quantization(quantization, x)
        check_given(quantization, scale, zero_point, x, x_name, self.in_memory)
        given = {name: t for name, t in zip(_OUTPUTS, outputs, strict=True) if t is not None}
        if not given:
            return
        rows, scales, groups = list(x.shape), [1], [1]
        if not is_given(quantization):
            scales, groups = scales_of(quantization, x.shape), groups_of(quantization, x.shape)
        wanted = {"out": (rows, quantization.dtype), "scale_out": (scales, quantization.scale_dtype or torch.float32)}
        wanted |= {"zero_point_out": (groups, torch.int32), "normed_out": (rows, x.dtype)}
        for name, (shape, dtype) in wanted.items():
            check_output(name, given.get(name), shape, dtype, x, x_name)
        if is_given(quantization) and ("scale_out" in given or "zero_point_out" in given):
            raise TypeError(
                "scale_out or zero_point_out is given, and scale is too; leave out what would be a copy of it"
            )
        if "zero_point_out" in given and not quantization.computes_zero_point:
            raise TypeError(f"zero_point_out is given, and {quantization} computes no zero points; leave it out")
        if self.in_memory or must_be_seen.in_memory(x, scale, zero_point, *outputs):  # a tangent may be of the weight
            check_apart(given, {**self.inputs, "scale": scale, "zero_point": zero_point}, _OWN)

    def in_one_operator(self) -> tuple[Tensor, ...] | None:
        """The results of the operator that is all of the function: ``inference.py``; None where others are called."""
        if self.in_memory or not must_be_seen.in_one_operator(*self.operands):
            return None
        quantization, scale, zero_point, *_, normed_out, _ = self.quantizing
        if normed_out is not None:
            return None
        given = self.arguments(quantization=str(quantization), scale=scale, zero_point=zero_point)
        found = dtensor_bridge.in_one_operator(self.function.__name__, given)
        return self._written(*found)

    @exact
    def of_rows(self, y: Tensor) -> tuple[Tensor, ...]:
        """The results for the rows that are quantized."""
        quantization, scale, zero_point, out, scale_out, zero_point_out, normed_out, _ = self.quantizing
        if normed_out is not None:
            dtensor_bridge.written(normed_out, reference.rounded(y, normed_out.dtype))
        if self.in_memory:
            found: tuple[Tensor, ...] | None = None
            if _may_be_fast(quantization, scale_out):
                found = _quantize(y, quantization.packed, scale, zero_point, out, scale_out, zero_point_out)
            if found is None:
                found = execute.quantize(y, self.quantizing)
            if found is not None:
                return found
        if self.listener is Listener.DISPATCHER:
            quantize_rows = dtensor_bridge.operations(y, scale, zero_point).quantize
            numbers, *of_groups = quantize_rows(y, str(quantization), scale, zero_point)
            return self._written(numbers, *of_groups[: len(computed_by(quantization))], laid_out=False)
        new = as_new(quantizer.quantized(y, quantization, scale, zero_point), (y,))
        return self._written(*new, laid_out=False)

    def _written(self, numbers: Tensor, *others: Tensor, laid_out: bool = True) -> tuple[Tensor, ...]:
        """The results, in the caller's memory where that is given.

        Args:
            numbers: [..., N].
            others: scales and zero points that are computed; behind them may be the sum.
            laid_out: whether scales and zero points lie as the quantization's layout asks for.
        """
        quantization, scale, _, out, scale_out, zero_point_out, _, residual_out = self.quantizing
        results = [dtensor_bridge.written(out, numbers), *([cast(Tensor, scale)] if is_given(quantization) else [])]
        memory = [*(scale_out, zero_point_out)[: len(computed_by(quantization))], residual_out]
        for given, new in zip(memory, others, strict=False):
            new = new if laid_out or given is not None else _laid_out(new, quantization)
            results.append(dtensor_bridge.written(given, new))
        return tuple(results)


@exact
def _of_norm(norm: NormCall, quantizing: Quantizing) -> tuple[Tensor, ...]:
    """The results of a norm, whose ``out_dtype`` is that of the rows between, and with a residual the sum."""
    x, residual, weight, bias, flags = norm.x, norm.residual, norm.weight, norm.bias, norm.flags
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    call = _Call(norm.function, inputs, quantizing, norm)
    if call.listener is Listener.OVERRIDE:
        return call.handed_over()
    center, between, residual_out = flags.center, flags.out_dtype, quantizing.residual_out
    check_operands(x, residual, None if center else weight, None, residual_out, in_memory=call.in_memory)
    if center:
        check_affine(x, weight, bias, in_memory=call.in_memory)
    check_between(between, x)
    call.check(x)
    found = call.in_one_operator()
    if found is None and call.in_memory and (between is None or quantizing.normed_out is None):
        found = execute.quantize(x, quantizing, norm)
    if found is not None:
        return found
    given: dict[str, Any] = {"weight": weight, "bias": bias, "out_dtype": between, "eps": flags.eps}
    given |= {"weight_offset": flags.weight_offset, "round_norm": flags.round_norm}
    if residual is None:
        return call.of_rows((layer_norm if center else rms_norm)(x, **given))
    given |= {"round_sum": flags.round_sum, "residual_dtype": flags.residual_dtype, "residual_out": residual_out}
    y, total = (fused_add_layer_norm if center else fused_add_rms_norm)(x, residual, **given)
    return *call.of_rows(y), total


def _laid_out(of_groups: Tensor, quantization: Quantization) -> Tensor:
    """Scales or zero points, [..., groups], where the layout asks for them.

    A transform of ``torch.func`` lays its batches out itself.
    """
    if quantization.layout == "row" or (not is_dynamo_compiling() and must_be_seen.transform(of_groups)):
        return of_groups

    def formula(found: Tensor) -> tuple[Tensor]:
        return (execute.laid_out(found.shape, found.dtype, found, quantization).copy_(found),)

    return cast(Tensor, dtensor_bridge.on_rows(formula, (of_groups,))[0])
