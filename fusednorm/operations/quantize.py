"""Quantization, alone and after a norm: compositions (docs/spec.md, section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, Step, operation_of
from fusednorm.calls.checks import (
    check_apart,
    check_between,
    check_operands,
    check_output,
    check_quantization,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import NO_NORM, FastPath
from fusednorm.calls.quantization import Quantization
from fusednorm.engine import run, run_quantized
from fusednorm.engine.choose import fast_paths, request
from fusednorm.engine.run_quantized import Results
from fusednorm.operations.gate import gate as gated
from fusednorm.operations.gate import halves, silu_and_mul
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import dtensor_bridge


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
        scale: float32, one element, greater than 0, for ``per="tensor"``; else None. On a GPU its value is not looked
            at, because that would wait for the GPU.
        zero_point: int32, one element, between -2^30 and 2^30, for ``per="tensor"`` with ``zero_point`` "after" or
            "before"; else None. Its value too is not looked at on a GPU.
        out: [..., N] of the quantization's dtype, to write the numbers to.
        scale_out: float32, to write the scales to; shaped as they are.
        zero_point_out: int32, to write the zero points to; shaped as the scales.

    Returns:
        The numbers, [..., N], and their scales: float32 [..., 1] for rows, [..., N / group] for groups, and ``scale``
        itself for ``per="tensor"``. If zero points are computed, a third tensor has them: int32, shaped as the scales.

    Raises:
        TypeError: an operand is no tensor, has another dtype, or is missing.
        ValueError: shapes, devices, groups, memory or the value of ``scale`` do not fit.
        RuntimeError: y requires grad while gradients are recorded: what is quantized has none.
    """
    if (take := _taken_by(quantization, zero_point, zero_point_out, None, None, scale_out)) is not None:
        result = take(y, *NO_NORM, quantization.packed, False, False, scale, out, scale_out)
        if result is not None:
            return result
    operands = (y, scale, zero_point, out, scale_out, zero_point_out)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(quantize, operands, locals())
    check_operands(y, None, None, None, None, in_memory=must_be_seen.in_memory(y), x_name="y")
    outputs = Outputs(out, scale_out, zero_point_out)
    _check("quantize", y, quantization, scale, zero_point, outputs, {"y": y})
    if must_be_seen.in_one_operator(*operands):
        found = torch.ops.fusednorm.quantize_inference(y, str(quantization), scale, zero_point)
        return _written(found, quantization, scale, outputs)
    return _quantized(y, quantization, scale, zero_point, outputs)


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

    Args:
        x: [..., N]; see :func:`fusednorm.rms_norm`.
        weight: [N] or None; see :func:`fusednorm.rms_norm`.
        eps: added to the mean of squares, unitless.
        quantization: see :func:`quantize`.
        scale: see :func:`quantize`.
        zero_point: see :func:`quantize`.
        between: the dtype to which the normalised rows are rounded before they are quantized: x's if None, or
            ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: added to the weight; see :func:`fusednorm.rms_norm`, as for ``round_norm``.
        round_norm: see :func:`fusednorm.rms_norm`.
        out: see :func:`quantize`.
        scale_out: see :func:`quantize`.
        zero_point_out: see :func:`quantize`.
        normed_out: [..., N] of x's dtype, receives the normalised rows too, rounded to that dtype.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if (take := _taken_by(quantization, zero_point, zero_point_out, normed_out, between, scale_out)) is not None:
        result = take(
            *(x, None, weight, None, None, eps, weight_offset, True, round_norm, None, True, None, 1.0),
            *(quantization.packed, between is not None, True, scale, out, scale_out),
        )
        if result is not None:
            return result
    operands = (x, weight, scale, zero_point, out, scale_out, zero_point_out, normed_out)
    flags: dict[str, Any] = {"weight_offset": weight_offset, "round_norm": round_norm}
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(rms_norm_quant, operands, locals())
    check_operands(x, None, weight, None, None, in_memory=must_be_seen.in_memory(x, weight))
    check_between(between, x)
    outputs = Outputs(out, scale_out, zero_point_out, normed_out)
    _check("rms_norm_quant", x, quantization, scale, zero_point, outputs, {"x": x, "weight": weight})
    if normed_out is None and must_be_seen.in_one_operator(*operands):
        numbers = (scale, zero_point, between, weight_offset, round_norm)
        found = torch.ops.fusednorm.rms_norm_quant_inference(x, weight, eps, str(quantization), *numbers)
        return _written(found, quantization, scale, outputs)
    if not _in_two_calls(outputs, between, x, weight, scale, zero_point):
        results = _results(x, quantization, scale, zero_point, outputs)
        asked = Flags(eps, weight_offset, True, round_norm, between)
        y, _ = run.forward(x, None, weight, asked, normed_out, then=results)
        return _returned(results) if results.done else _quantized(y, quantization, scale, zero_point, outputs)
    y = rms_norm(x, weight, eps, out_dtype=between, **flags)
    return _quantized(y, quantization, scale, zero_point, outputs)


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

    Args:
        x: [..., N]; see :func:`fusednorm.fused_add_rms_norm`.
        residual: [..., N]; see :func:`fusednorm.fused_add_rms_norm`.
        weight: [N] or None; see :func:`fusednorm.fused_add_rms_norm`.
        eps: added to the mean of squares, unitless.
        quantization: see :func:`quantize`.
        scale: see :func:`quantize`.
        zero_point: see :func:`quantize`.
        between: see :func:`rms_norm_quant`.
        weight_offset: see :func:`fusednorm.fused_add_rms_norm`, as for the next two.
        round_sum: normalise the sum as rounded to the residual's dtype.
        round_norm: see :func:`fusednorm.fused_add_rms_norm`.
        out: see :func:`quantize`.
        scale_out: see :func:`quantize`.
        zero_point_out: see :func:`quantize`.
        normed_out: see :func:`rms_norm_quant`.
        residual_out: [..., N] to write the sum to. May be x or the residual itself.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        What :func:`quantize` returns, and the sum.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.fused_add_rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if residual is None:
        refuse_type("residual", residual)
    if residual_dtype is None:
        take = _taken_by(quantization, zero_point, zero_point_out, normed_out, between, scale_out)
        if take is not None:
            result = take(
                *(x, residual, weight, None, residual_out, eps, weight_offset, round_sum, round_norm),
                *(None, True, None, 1.0, quantization.packed, between is not None, True, scale, out, scale_out),
            )
            if result is not None:
                return result
    operands = (x, residual, weight, scale, zero_point, out, scale_out, zero_point_out, normed_out, residual_out)
    flags: dict[str, Any] = {
        "weight_offset": weight_offset,
        "round_sum": round_sum,
        "round_norm": round_norm,
        "residual_out": residual_out,
        "residual_dtype": residual_dtype,
    }
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(fused_add_rms_norm_quant, operands, locals())
    in_memory = must_be_seen.in_memory(x, residual, weight, residual_out)
    check_operands(x, residual, weight, None, residual_out, in_memory=in_memory)
    check_between(between, x)
    outputs = Outputs(out, scale_out, zero_point_out, normed_out, residual_out)
    inputs = {"x": x, "residual": residual, "weight": weight}
    _check("fused_add_rms_norm_quant", x, quantization, scale, zero_point, outputs, inputs)
    if normed_out is None and must_be_seen.in_one_operator(*operands):
        numbers = (scale, zero_point, between, weight_offset, round_sum, round_norm, residual_dtype)
        operator = torch.ops.fusednorm.fused_add_rms_norm_quant_inference
        return _written(operator(x, residual, weight, eps, str(quantization), *numbers), quantization, scale, outputs)
    if not _in_two_calls(outputs, between, x, residual, weight, scale, zero_point):
        results = _results(x, quantization, scale, zero_point, outputs)
        asked = Flags(eps, weight_offset, round_sum, round_norm, between, residual_dtype)
        y, total = run.forward(x, residual, weight, asked, normed_out, residual_out, then=results)
        found = _returned(results) if results.done else _quantized(y, quantization, scale, zero_point, outputs)
        return *found, total
    y, total = fused_add_rms_norm(x, residual, weight, eps, out_dtype=between, **flags)
    return *_quantized(y, quantization, scale, zero_point, outputs), total


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
) -> tuple[Tensor, ...]:
    """``silu(gate) * up``, quantized: the same bits as ``quantize(silu_and_mul(gate, up), quantization)``.

    Args:
        gate: [..., N], or without ``up`` [..., 2 * N]; see :func:`fusednorm.silu_and_mul`.
        up: [..., N] or None; see :func:`fusednorm.silu_and_mul`.
        quantization: see :func:`quantize`.
        scale: see :func:`quantize`.
        zero_point: see :func:`quantize`.
        between: the dtype to which ``silu(gate)`` is rounded before the multiplication, and the product before it is
            quantized: gate's if None, or ``torch.float32``, which leaves both of a 16-bit gate unrounded.
        out: see :func:`quantize`.
        scale_out: see :func:`quantize`.
        zero_point_out: see :func:`quantize`.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.silu_and_mul`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    operands = (gate, up, scale, zero_point, out, scale_out, zero_point_out)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(silu_and_mul_quant, operands, locals())
    z, y = halves(gate) if up is None else (gate, up)
    check_operands(z, y, None, None, None, in_memory=must_be_seen.in_memory(z, y), x_name="gate", residual_name="up")
    check_between(between, z, "gate")
    outputs = Outputs(out, scale_out, zero_point_out)
    _check("silu_and_mul_quant", z, quantization, scale, zero_point, outputs, {"gate": gate, "up": up})
    if must_be_seen.in_one_operator(*operands):
        numbers = (scale, zero_point, between)
        found = torch.ops.fusednorm.silu_and_mul_quant_inference(gate, up, str(quantization), *numbers)
        return _written(found, quantization, scale, outputs)
    product = silu_and_mul(z, y) if between is None else gated(y, z, out_dtype=between)
    return _quantized(product, quantization, scale, zero_point, outputs)


def _written(
    found: Sequence[Tensor], quantization: Quantization, scale: Tensor | None, outputs: Outputs
) -> tuple[Tensor, ...]:
    """The results of a function, of those of its operator, which returns no scale or zero point that is given."""
    values, *others = found
    given = [outputs.scale_out] if quantization.per != "tensor" else []
    given += [outputs.zero_point_out] if quantization.computes_zero_point else []
    results = [dtensor_bridge.written(*one) for one in zip((*given, outputs.residual_out), others, strict=False)]
    values = dtensor_bridge.written(outputs.out, values)
    return (values, cast(Tensor, scale), *results) if quantization.per == "tensor" else (values, *results)


def _taken_by(
    quantization: Quantization,
    zero_point: Tensor | None,
    zero_point_out: Tensor | None,
    normed_out: Tensor | None,
    between: torch.dtype | None,
    scale_out: Tensor | None,
) -> FastPath | None:
    """The fast path, if there is one that knows such a call."""
    if is_dynamo_compiling():
        return None
    take = fast_paths.get(request())
    if take is None or zero_point is not None or zero_point_out is not None or normed_out is not None:
        return None
    if type(quantization) is not Quantization or (quantization.layout != "row" and scale_out is None):
        return None
    return take if between is None or between is torch.float32 else None


def _in_two_calls(outputs: Outputs, between: torch.dtype | None, *operands: Tensor | None) -> bool:
    """Whether the norm and the quantizer are called one after the other, because torch must see both.

    Also where ``normed_out`` wants other rows than the quantizer.
    """
    if between is not None and outputs.normed_out is not None:
        return True
    return must_be_seen.seen(*operands, *outputs) or must_be_seen.transform(*operands, *outputs)


#: The inputs that outputs may be. Scales of groups of one element are not among them: they are written before the
#: numbers, which are then read again.
_OWN = {"normed_out": ("x", "residual"), "residual_out": ("x", "residual")}


class Outputs(NamedTuple):
    """Where the caller wants results; None: new memory."""

    out: Tensor | None = None
    scale_out: Tensor | None = None
    zero_point_out: Tensor | None = None
    normed_out: Tensor | None = None
    residual_out: Tensor | None = None


def _check(
    name: str,
    x: Tensor,
    quantization: Quantization,
    scale: Tensor | None,
    zero_point: Tensor | None,
    outputs: Outputs,
    inputs: dict[str, Tensor | None],
) -> None:
    """All that must fit before anything is written. The inputs are those of the function, by name, the rows first."""
    x_name = next(iter(inputs))
    if is_grad_enabled() and requires_grad(x, None, None, *inputs.values()):
        raise RuntimeError(
            f"{name}(): one of the arguments requires grad, and 8-bit numbers have no gradients; call it under "
            f"torch.no_grad(), pass tensors without gradients, such as {x_name}.detach(), or train without the "
            "quantization"
        )
    in_memory = must_be_seen.in_memory(x, scale, zero_point, *outputs)
    check_quantization(quantization, x, scale, zero_point, in_memory, x_name=x_name)
    groups = [*x.shape[:-1], x.shape[-1] // quantization.group(x.shape[-1])]
    shape = [1] if quantization.per == "tensor" else groups
    check_output("out", outputs.out, list(x.shape), quantization.dtype, x, x_name)
    check_output("scale_out", outputs.scale_out, shape, torch.float32, x, x_name)
    check_output("zero_point_out", outputs.zero_point_out, shape, torch.int32, x, x_name)
    check_output("normed_out", outputs.normed_out, list(x.shape), x.dtype, x, x_name)
    if quantization.per == "tensor" and (outputs.scale_out is not None or outputs.zero_point_out is not None):
        raise TypeError("scale_out or zero_point_out is given, and scale is too; leave out what would be a copy of it")
    if outputs.zero_point_out is not None and not quantization.computes_zero_point:
        raise TypeError(f"zero_point_out is given, and {quantization} computes no zero points; leave it out")
    if in_memory:
        check_apart(outputs._asdict(), {**inputs, "scale": scale, "zero_point": zero_point}, _OWN)


def _quantized(
    y: Tensor, quantization: Quantization, scale: Tensor | None, zero_point: Tensor | None, outputs: Outputs
) -> tuple[Tensor, ...]:
    """The results for checked operands, in the caller's memory where that is given."""
    if outputs.normed_out is not None and outputs.normed_out is not y:
        dtensor_bridge.written(outputs.normed_out, reference.rounded(y, outputs.normed_out.dtype))
    if must_be_seen.seen(y, scale, zero_point, *outputs):
        found = dtensor_bridge.operations(y, scale, zero_point).quantize(y, str(quantization), scale, zero_point)
        return _copied(found, quantization, scale, outputs)
    results = _results(y, quantization, scale, zero_point, outputs)
    if not must_be_seen.transform(y, scale, zero_point):
        backend = run.whole_of(operation_of(y, None, None, Flags()), Step("quantize", quantization))
        if run_quantized.quantize(y, results, backend):
            return _returned(results)
    return _copied(quantizer.quantized(y, quantization, scale, zero_point), quantization, scale, outputs)


def _results(
    x: Tensor, quantization: Quantization, scale: Tensor | None, zero_point: Tensor | None, outputs: Outputs
) -> Results:
    """Where the results of a quantizer go."""
    given = quantization.per == "tensor"
    return Results(
        *(x.shape, x.device, quantization, outputs.out),
        scale if given else outputs.scale_out,
        zero_point if given else outputs.zero_point_out,
    )


def _returned(results: Results) -> tuple[Tensor, ...]:
    """The results of the public functions."""
    if results.quantization.per != "tensor" and results.zero_point is not None:
        return results.out, results.scale, results.zero_point
    return results.out, results.scale


def _copied(
    found: tuple[Tensor, Tensor, Tensor | None],
    quantization: Quantization,
    scale: Tensor | None,
    outputs: Outputs,
) -> tuple[Tensor, ...]:
    """New results, copied to the caller's memory where that is given, and scales laid out."""
    values, new_scale, new_zero_point = found
    values = dtensor_bridge.written(outputs.out, values)
    if quantization.per == "tensor":
        return values, cast(Tensor, scale)
    laid = [_laid_out(new_scale, quantization, outputs.scale_out)]
    if quantization.computes_zero_point:
        laid.append(_laid_out(cast(Tensor, new_zero_point), quantization, outputs.zero_point_out))
    return values, *laid


def _laid_out(of_groups: Tensor, quantization: Quantization, given: Tensor | None) -> Tensor:
    """Scales or zero points, [..., groups], in the caller's memory, or where the layout asks for them.

    A transform of ``torch.func`` lays its batches out itself.
    """
    if given is not None or quantization.layout == "row" or must_be_seen.transformed(of_groups):
        return dtensor_bridge.written(given, of_groups)

    def formula(found: Tensor) -> tuple[Tensor]:
        return (run_quantized.laid_out(tuple(found.shape), found.dtype, found.device, quantization).copy_(found),)

    return cast(Tensor, dtensor_bridge.on_rows(formula, (of_groups,))[0])
