"""The public functions: they check, allocate, choose a backend and call it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Around, Flags, accumulator, operation_of
from fusednorm.calls.checks import (
    NAMES,
    check_affine,
    check_flags,
    check_operands,
    check_written,
    number,
    refuse_grad,
    refuse_nested,
    refuse_type,
    requires_grad,
)
from fusednorm.engine import run
from fusednorm.engine.choose import fast_paths, request
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import Normalise, NormaliseAffine, Transformed


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the residual, then RMS-normalises: the same bits as ``s = x + residual; rms_norm(s, weight, eps)``.

    Sums are taken in float32 (float64 for a float64 ``x``), each operation rounded once, in the order that
    ``docs/spec.md`` fixes: every backend returns the same bits, and a row's bits depend on that row alone.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N], or [H, N] for an x of [..., H, N] (a row for each head), any of these dtypes; None multiplies by
            nothing.
        eps: added to the mean of squares, unitless.
        bias: [N] or [H, N], added to the row after the weight, before the row is rounded; None adds nothing.
        x_scale: multiplies x before the addition, rounded to x's dtype, as Granite and MiniCPM do.
        weight_offset: added to the weight; 1.0 gives Gemma's ``1 + weight``.
        round_sum: normalise the sum as rounded to the residual's dtype (as an unfused add does), not as it was before.
        round_norm: round the normalised row to x's dtype before it meets the weight (as Hugging Face's Llama does).
        out: [..., N] to write the normalised rows to, in its own dtype. May be x or residual itself.
        residual_out: [..., N] of the residual's dtype or ``residual_dtype``, to write the sum to. May be x or residual
            itself.
        out_dtype: the dtype of the normalised rows; x's if None. With gradients, unlike ``out``.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        The normalised rows, in x's dtype or ``out_dtype`` (``out`` if given), and the sum, in the residual's or
        ``residual_dtype`` (``residual_out`` if given).

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``out`` or ``residual_out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    compiling = is_dynamo_compiling()
    if not compiling:
        take = fast_paths.get(request())
        if take is not None and out_dtype is None and residual_dtype is None:
            result = take(
                x,
                residual,
                weight,
                out,
                residual_out,
                eps,
                weight_offset,
                round_sum,
                round_norm,
                None,
                True,
                bias,
                x_scale,
            )
            if result is not None:
                return result
        operands = (x, residual, weight, bias, out, residual_out)
        if must_be_seen.override(*operands):
            return must_be_seen.handed_over(fused_add_rms_norm, operands, locals())
    flags = Flags(eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype)
    if bias is not None or x_scale != 1.0 or _of_heads(weight):
        return _composed("fused_add_rms_norm", compiling, x, residual, weight, bias, x_scale, out, residual_out, flags)
    return beyond_fast_path("fused_add_rms_norm", compiling, x, residual, weight, out, residual_out, flags)


def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`fused_add_rms_norm` in place: the normalised rows land in ``x``, the sum in ``residual``.

    Args:
        x: [..., N]; each row contiguous, in at most two levels of strides (as heads of a tensor of q, k and v).
        residual: [..., N]; its rows lie in the same levels of strides; must not share memory with x.
        weight: see :func:`fused_add_rms_norm`.
        eps: see :func:`fused_add_rms_norm`.
        bias: see :func:`fused_add_rms_norm`.
        x_scale: see :func:`fused_add_rms_norm`.
        weight_offset: see :func:`fused_add_rms_norm`.
        round_sum: see :func:`fused_add_rms_norm`.
        round_norm: see :func:`fused_add_rms_norm`.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    compiling = is_dynamo_compiling()
    if not compiling:
        take = fast_paths.get(request())
        if take is not None:
            result = take(
                x, residual, weight, x, residual, eps, weight_offset, round_sum, round_norm, None, True, bias, x_scale
            )
            if result is not None:
                return result
        operands = (x, residual, weight, bias)
        if must_be_seen.override(*operands):
            return must_be_seen.handed_over(fused_add_rms_norm_, operands, locals())
    flags = Flags(eps, weight_offset, round_sum, round_norm)
    if bias is not None or x_scale != 1.0 or _of_heads(weight):
        return _composed("fused_add_rms_norm_", compiling, x, residual, weight, bias, x_scale, x, residual, flags)
    return beyond_fast_path("fused_add_rms_norm_", compiling, x, residual, weight, x, residual, flags)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS-normalises the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: [..., N]; see :func:`fused_add_rms_norm`.
        weight: [N], [H, N] or None; see :func:`fused_add_rms_norm`.
        eps: see :func:`fused_add_rms_norm`.
        bias: [N], [H, N] or None; see :func:`fused_add_rms_norm`.
        weight_offset: see :func:`fused_add_rms_norm`.
        round_norm: see :func:`fused_add_rms_norm`.
        out: [..., N] to write to, in its own dtype. May be x itself.
        out_dtype: see :func:`fused_add_rms_norm`.

    Returns:
        The normalised rows, in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    compiling = is_dynamo_compiling()
    if not compiling:
        take = fast_paths.get(request())
        if take is not None and out_dtype is None:
            result = take(x, None, weight, out, None, eps, weight_offset, True, round_norm, None, True, bias, 1.0)
            if result is not None:
                return result[0]
        if must_be_seen.override(x, weight, bias, out):
            return must_be_seen.handed_over(rms_norm, (x, weight, bias, out), locals())
    flags = Flags(eps, weight_offset, True, round_norm, out_dtype)
    if bias is not None or _of_heads(weight):
        return _composed("rms_norm", compiling, x, None, weight, bias, 1.0, out, None, flags)[0]
    return beyond_fast_path("rms_norm", compiling, x, None, weight, out, None, flags)[0]


def rms_norm_(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> Tensor:
    """:func:`rms_norm` in place: the normalised rows land in ``x``.

    Args:
        x: [..., N]; each row contiguous, in at most two levels of strides (as heads of a tensor of q, k and v).
        weight: see :func:`rms_norm`, as for the rest.
        eps: see :func:`fused_add_rms_norm`.
        bias: see :func:`rms_norm`.
        weight_offset: see :func:`fused_add_rms_norm`.
        round_norm: see :func:`fused_add_rms_norm`.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    compiling = is_dynamo_compiling()
    if not compiling:
        take = fast_paths.get(request())
        if take is not None:
            result = take(x, None, weight, x, None, eps, weight_offset, True, round_norm, None, True, bias, 1.0)
            if result is not None:
                return result[0]
        if must_be_seen.override(x, weight, bias):
            return must_be_seen.handed_over(rms_norm_, (x, weight, bias), locals())
    flags = Flags(eps, weight_offset, True, round_norm)
    if bias is not None or _of_heads(weight):
        return _composed("rms_norm_", compiling, x, None, weight, bias, 1.0, x, None, flags)[0]
    return beyond_fast_path("rms_norm_", compiling, x, None, weight, x, None, flags)[0]


def beyond_fast_path(
    name: str,
    compiling: bool,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs of the public function of that name, through whatever part of torch must see the call.

    ``compiling`` says whether ``torch.compile`` traces the call.
    """
    new = out is None and residual_out is None
    if not new and is_grad_enabled() and requires_grad(x, residual, weight, out, residual_out):
        refuse_grad(name)
    if not compiling and must_be_seen.transform(x, residual, weight, out, residual_out):
        return _transformed(x, residual, weight, out, residual_out, flags)
    if new and must_be_seen.in_one_operator(x, residual, weight):
        return _for_inference(x, residual, weight, None, 1.0, flags)
    if compiling or _heard_below(x, residual, weight, out, residual_out):
        return _dispatched(name, x, residual, weight, out, residual_out, flags)
    if new and is_grad_enabled() and requires_grad(x, residual, weight):
        y, total, _ = Normalise.apply(x, residual, weight, *flags)  # type: ignore[no-untyped-call]
        return y, total
    return run.forward(x, residual, weight, flags, out, residual_out)


def _for_inference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, x_scale: float, flags: Flags
) -> tuple[Tensor, Any]:
    """Both outputs by the operator that is all of the public function: ``inference.py``."""
    eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype = flags
    if residual is None:
        norm = torch.ops.fusednorm.rms_norm_inference
        return norm(x, weight, eps, bias, weight_offset, round_norm, out_dtype), None
    numbers = (x_scale, weight_offset, round_sum, round_norm, out_dtype, residual_dtype)
    return cast(
        tuple[Tensor, Any], torch.ops.fusednorm.fused_add_rms_norm_inference(x, residual, weight, eps, bias, *numbers)
    )


def _of_heads(weight: Tensor | None) -> bool:
    """Whether a weight has a row for each head."""
    return getattr(weight, "ndim", 1) == 2


def _composed(
    name: str,
    compiling: bool,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x_scale: float,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs of the public function of that name: docs/spec.md, section 8.

    One call of a backend; or, where gradients are wanted or a part of torch must see the call, plain operations.
    """
    written = {"out": out, "residual_out": residual_out}
    given = {key: tensor for key, tensor in written.items() if tensor is not None}
    others = (weight, bias, *given.values())
    records = is_grad_enabled() and requires_grad(x, residual, *others)
    if given and records:
        refuse_grad(name)
    transformed = not compiling and must_be_seen.transform(x, residual, *others)
    in_memory = not (compiling or transformed or must_be_seen.below(x, residual, *others))
    if in_memory and not records:
        return run.forward(x, residual, weight, flags, out, residual_out, around=Around(bias, x_scale))
    if in_memory and type(x_scale) is float and x_scale == 1.0:
        found = NormaliseAffine.apply(x, residual, weight, bias, *flags)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Any], found)
    if not (compiling or transformed):
        check_operands(x, residual, None, out, residual_out, in_memory=in_memory)
        check_affine(x, weight, bias, in_memory=in_memory)
    flags = check_flags(flags, x, residual, out, residual_out)
    factor = number("x_scale", x_scale)
    if must_be_seen.in_one_operator(x, residual, *others):
        if out is not None and out.dtype != x.dtype:
            flags = flags._replace(out_dtype=out.dtype)
        y, total = _for_inference(x, residual, weight, bias, factor, flags)
        return dtensor_bridge.written(out, y), dtensor_bridge.written(residual_out, total)
    if given and not (compiling or transformed or _heard_below(x, residual, None, out, residual_out)):
        check_written(x, residual, out, residual_out)
    if factor != 1.0:
        x = steps.scale(x, factor)
    if bias is None and not _of_heads(weight):
        return beyond_fast_path(name.rstrip("_"), compiling, x, residual, weight, out, residual_out, flags)
    if in_memory:
        found = NormaliseAffine.apply(x, residual, weight, bias, *flags)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor, Any], found)
    out_dtype = flags.out_dtype or (x.dtype if out is None else out.dtype)
    rounded_to, offset = x.dtype if flags.round_norm else None, flags.weight_offset
    flags = Flags(flags.eps, 0.0, flags.round_sum, False, accumulator(x.dtype), flags.residual_dtype)
    rows, total = beyond_fast_path(name.rstrip("_"), compiling, x, residual, None, None, None, flags)
    y = steps.affine(rows, weight, bias, offset, rounded_to, out_dtype)
    return dtensor_bridge.written(out, y), dtensor_bridge.written(residual_out, total)


def _heard_below(*operands: Tensor | None) -> bool:
    """Whether the call must go through torch's dispatcher. The operands are those of :data:`NAMES`."""
    if must_be_seen.plain(*operands):
        return must_be_seen.listening()
    for name, tensor in zip(NAMES, operands, strict=True):
        if must_be_seen.overrides_operations(tensor) and cast(Tensor, tensor).is_nested:
            refuse_nested(name)  # it would override our operation, and not know it
    return must_be_seen.below(*operands)


def _transformed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs under ``torch.func`` or forward-mode differentiation; those that are given take a copy."""
    apply: Any = Transformed.apply
    if "torch._dynamo" in sys.modules:  # else it would try to compile what it finds below a call that it left alone
        apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
    y, total, _ = apply(x, residual, weight, *flags)
    for name, given, new in (("out", out, y), ("residual_out", residual_out, total)):
        if given is not None and given.dtype != new.dtype:
            raise NotImplementedError(
                f"{name} must have the dtype {str(new.dtype)[6:]} under torch.func and forward-mode differentiation, "
                f"got {str(given.dtype)[6:]}; call the function without {name} and convert what it returns"
            )
    return dtensor_bridge.written(out, y), dtensor_bridge.written(residual_out, total)


def _dispatched(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs of the public function of that name, through torch's dispatcher."""
    if out is None and residual_out is None:
        return dtensor_bridge.new_outputs(x, residual, weight, flags)[:2]
    operation = operation_of(x, residual, weight, check_flags(flags, x, residual, out, residual_out), out)
    if out is None and residual_out is not None:
        out = torch.empty_like(residual_out, dtype=operation.out, memory_format=torch.contiguous_format)
    assert out is not None
    if residual is not None and residual_out is None:
        residual_out = torch.empty_like(out, dtype=operation.residual_out, memory_format=torch.contiguous_format)
    dtensor_bridge.write(name, x, residual, weight, out, residual_out, flags)
    return out, residual_out
