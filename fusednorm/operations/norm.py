"""The public functions: they check, allocate, choose a backend and call it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import fast_path, must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import Flags, NormCall, accumulator
from fusednorm.calls.checks import (
    NAMES,
    check_affine,
    check_flags,
    check_operands,
    refuse_grad,
    refuse_nested,
    refuse_type,
    requires_grad,
    rounded_flags,
)
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.scalars import number
from fusednorm.engine import run_norms
from fusednorm.operations.front_door import Results
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import Normalise
from fusednorm.torch_ops.operator import Operator
from fusednorm.torch_ops.operators import FUSED_ADD_LAYER_NORM, FUSED_ADD_RMS_NORM, LAYER_NORM, RMS_NORM


def record_sum(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    bias: Tensor | None,
    x_scale: float,
    weight_offset: float,
    round_sum: bool,
    round_norm: bool,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    *,
    center: bool = False,
) -> Any:
    """The results of :func:`fused_add_rms_norm` for plain operands that C has read, where gradients are recorded.

    None where more is asked.
    """
    new = out is residual_out is None and out_dtype is residual_dtype is None
    if not new or x_scale != 1.0 or must_be_seen.transforms_active():
        return None
    flags = Flags(eps, weight_offset, round_sum, round_norm, center=center)
    return Normalise.apply(x, residual, weight, bias, flags)  # type: ignore[no-untyped-call]


def record(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    bias: Tensor | None,
    weight_offset: float,
    round_norm: bool,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    center: bool = False,
) -> Any:
    """The same of :func:`rms_norm`."""
    found = record_sum(
        x, None, weight, eps, bias, 1.0, weight_offset, True, round_norm, out, None, out_dtype, center=center
    )
    return found if found is None else found[0]


rms_norm_on_fast_path = Entry("norm", "x weight eps bias weight_offset round_norm out out_dtype", returned=0).of(
    "rms_norm", record
)
fused_add_rms_norm_on_fast_path = Entry(
    "norm",
    "x residual weight eps bias x_scale weight_offset round_sum round_norm out residual_out out_dtype residual_dtype",
).of("fused_add_rms_norm", record_sum)


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
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = fused_add_rms_norm_on_fast_path(
            x, residual, weight, eps, bias, x_scale, weight_offset, round_sum, round_norm, out, residual_out, out_dtype,
            residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype)
    return beyond_fast_path(NormCall(fused_add_rms_norm, x, residual, weight, flags, out, residual_out, bias, x_scale))


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

    With its arguments, but outputs. Each row of both is contiguous, and rows of both lie in the same levels of strides,
    two at most (as heads of a tensor of q, k and v). x and the residual share no memory.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = fused_add_rms_norm_on_fast_path(
            x, residual, weight, eps, bias, x_scale, weight_offset, round_sum, round_norm, x, residual
        )
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, round_sum, round_norm)
    return beyond_fast_path(NormCall(fused_add_rms_norm_, x, residual, weight, flags, x, residual, bias, x_scale))


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

    The arguments are those of :func:`fused_add_rms_norm`, with x of [..., N]. ``out`` may be x itself.

    Returns:
        The normalised rows, in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_on_fast_path(x, weight, eps, bias, weight_offset, round_norm, out, out_dtype)
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm, out_dtype)
    return beyond_fast_path(NormCall(rms_norm, x, None, weight, flags, out, None, bias))


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

    With its arguments, but outputs. Each row is contiguous, and rows lie in at most two levels of strides (as heads of
    a tensor of q, k and v).

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_on_fast_path(x, weight, eps, bias, weight_offset, round_norm, x)
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm)
    return beyond_fast_path(NormCall(rms_norm_, x, None, weight, flags, x, None, bias))


def norm_within(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float,
    round_sum: bool = True,
    round_norm: bool,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None = None,
) -> Any:
    """A norm as a part of a composition: the rows, and with a residual the sum."""
    if not is_dynamo_compiling():
        if residual is None:
            found = rms_norm_on_fast_path(x, weight, eps, None, weight_offset, round_norm, None, out_dtype)
        else:
            found = fused_add_rms_norm_on_fast_path(
                x, residual, weight, eps, None, 1.0, weight_offset, round_sum, round_norm, None, None, out_dtype,
                residual_dtype,
            )  # fmt: skip
        if found is not None:
            return found
    flags = Flags(eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype)
    function = rms_norm if residual is None else fused_add_rms_norm
    return beyond_fast_path(NormCall(function, x, residual, weight, flags, inner=True))


@exact
def beyond_fast_path(call: NormCall) -> Results:  # type: ignore[type-var]
    """The results of the function.

    One call of a backend. Where gradients are recorded or a part of torch must see the call, a norm alone is a function
    of autograd or an operator, and all else plain operations, one after the other: docs/spec.md, section 8.
    """
    function, x, residual, weight, flags, out, residual_out, bias, x_scale, inner = call
    operands = (x, residual, weight, out, residual_out, bias)
    compiling = is_dynamo_compiling()
    # Whether nobody listens and no gradients are recorded.
    direct = not compiling and must_be_seen.plain(*operands) and fast_path.is_direct(*operands)
    if not (inner or compiling or direct) and must_be_seen.override(*operands):
        return cast(Results, must_be_seen.handed_over(function, operands, call.arguments()))
    new = out is None and residual_out is None
    alone = x_scale == 1.0 and (flags.center or (bias is None and getattr(weight, "ndim", 1) != 2))
    records = not direct and is_grad_enabled() and requires_grad(*operands)
    if records and not new:
        refuse_grad(function.__name__)
    transformed = not (compiling or direct) and must_be_seen.transform(*operands)
    in_memory = direct or not (compiling or transformed or must_be_seen.below(*operands))
    if in_memory and not records:
        of_heads = getattr(weight, "ndim", 1) == 2
        y, total = run_norms.norm(x, residual, weight, flags, out, residual_out, None, bias, x_scale, of_heads)
    elif in_memory and type(x_scale) is float and x_scale == 1.0:
        y, total = Normalise.apply(x, residual, weight, bias, flags)  # type: ignore[no-untyped-call]
    elif alone and transformed:
        y, total = _transformed(call)
    else:
        if not alone:
            call = _checked(call, compiling or transformed, in_memory)
        if (new or not alone) and must_be_seen.in_one_operator(*operands):
            y, total = _in_one_operator(call)
        else:
            y, total = _dispatched(call, compiling) if alone else _composed(call)
    return cast(Results, y if total is None else (y, total))


def _checked(call: NormCall, traced: bool, in_memory: bool) -> NormCall:
    """A call that plain operations will serve, and which know operands by other names; its numbers are floats.

    ``traced``: whether a compiler or a transform shows operands as the plain operations can check them alone.
    """
    _, x, residual, weight, flags, out, residual_out, bias, x_scale, _ = call
    if not traced:
        check_operands(x, residual, None, out, residual_out, in_memory=in_memory)
        check_affine(x, weight, bias, in_memory=in_memory)
    flags = check_flags(flags, x, residual, out, residual_out)
    return call._replace(flags=flags, x_scale=number("x_scale", x_scale, accumulator(x.dtype)))


def _in_one_operator(call: NormCall) -> tuple[Any, Any]:
    """Both outputs by the operator that is all of the public function: ``inference.py``."""
    arguments = call.arguments()
    if call.out is not None and call.out.dtype != call.x.dtype:
        arguments["out_dtype"] = call.out.dtype
    found = dtensor_bridge.in_one_operator(call.function.__name__, arguments)
    y: Any = dtensor_bridge.written(call.out, found[0])
    return y, None if call.residual is None else dtensor_bridge.written(call.residual_out, found[-1])


def _composed(call: NormCall) -> tuple[Any, Any]:
    """Both outputs by plain operations, one after the other; those that are given take a copy at the end."""
    _, x, residual, weight, flags, out, residual_out, bias, x_scale, _ = call
    if x_scale != 1.0:
        scaled = call._replace(x=steps.SCALE.with_gradients(x=x, factor=x_scale), x_scale=1.0, inner=True)
        return beyond_fast_path(scaled)
    function, wide = rms_norm if residual is None else fused_add_rms_norm, accumulator(x.dtype)
    alone = Flags(flags.eps, 0.0, flags.round_sum, False, wide, flags.residual_dtype)
    found: Any = beyond_fast_path(NormCall(function, x, residual, None, alone, inner=True))
    rows, total = (found, cast(Any, None)) if residual is None else found
    y: Tensor = steps.AFFINE.with_gradients(
        n=rows,
        weight=weight,
        bias=bias,
        weight_offset=flags.weight_offset,
        rounded_to=x.dtype if flags.round_norm else None,
        out_dtype=flags.out_dtype or (x.dtype if out is None else out.dtype),
    )
    return dtensor_bridge.written(out, y), dtensor_bridge.written(residual_out, total)


def _transformed(call: NormCall) -> tuple[Tensor, Any]:
    """Both outputs of a norm alone under ``torch.func`` or forward-mode differentiation; given ones take a copy."""
    operator, operands, flags = _operator_of(call._replace(flags=rounded_flags(call.flags, call.x)))
    record: Any = operator.record
    if "torch._dynamo" in sys.modules:  # else it would try to compile what it finds below a call that it left alone
        record = torch.compiler.disable(record)  # type: ignore[no-untyped-call]
    y, *others = record(operands, flags)
    total: Any = None if call.residual is None else others[0]
    for name, given, new in (("out", call.out, y), ("residual_out", call.residual_out, total)):
        if given is not None and given.dtype != new.dtype:
            raise NotImplementedError(
                f"{name} must have the dtype {str(new.dtype)[6:]} under torch.func and forward-mode differentiation, "
                f"got {str(given.dtype)[6:]}; call the function without {name} and convert what it returns"
            )
    return dtensor_bridge.written(call.out, y), dtensor_bridge.written(call.residual_out, total)


def _operator_of(call: NormCall) -> tuple[Operator, dict[str, Any], dict[str, Any]]:
    """The operator of a norm alone, its operands and its flags."""
    center = call.flags.center
    if call.residual is None:
        operator = LAYER_NORM if center else RMS_NORM
    else:
        operator = FUSED_ADD_LAYER_NORM if center else FUSED_ADD_RMS_NORM
    operands = {name: getattr(call, name) for name in operator.plan.operands}
    return operator, operands, {flag: getattr(call.flags, flag) for flag in operator.declaration.flags}


def _dispatched(call: NormCall, compiling: bool) -> tuple[Tensor, Any]:
    """Both outputs of a norm alone, through torch's dispatcher."""
    function, x, residual, weight, flags, out, residual_out, bias, *_ = call
    for called, tensor in zip((*NAMES, "bias"), (x, residual, weight, out, residual_out, bias), strict=True):
        if not compiling and isinstance(tensor, Tensor) and tensor.is_nested:
            refuse_nested(called)  # it would override our operation, and not know it
    if out is None and residual_out is None:
        operator, operands, asked = _operator_of(call)
        y, *others = operator.dispatched(operands, asked)
        return y, None if residual is None else others[0]
    check_flags(flags, x, residual, out, residual_out)
    if out is None and residual_out is not None:
        dtype = flags.out_dtype or x.dtype
        out = torch.empty_like(residual_out, dtype=dtype, memory_format=torch.contiguous_format)
    assert out is not None
    if residual is not None and residual_out is None:
        dtype = flags.residual_dtype or residual.dtype
        residual_out = torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
    ops = dtensor_bridge.operations(x, residual, weight, out, residual_out)
    numbers = (flags.eps, flags.weight_offset, flags.round_sum, flags.round_norm)
    if function.__name__.endswith("_"):
        given = [x, *[residual] * (residual is not None), weight, *[bias] * flags.center]
        getattr(ops, function.__name__)(*given, *numbers)
    else:
        of_center = (True, bias) if flags.center else ()
        ops.into(x, residual, weight, out, residual_out, *numbers, *of_center)
    return out, residual_out
