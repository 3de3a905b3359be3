"""A norm before the addition, with another norm after it or none: compositions (docs/spec.md, section 8)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.call import Before, Flags, NormCall
from fusednorm.calls.checks import refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.operations.norm import beyond_fast_path

rms_norm_add_on_fast_path = Entry(
    "two_norms",
    "x residual weight eps between weight_offset round_norm residual_out residual_dtype",
    returned=1,
    constants={"next_norm": False},
).of("rms_norm_add")
rms_norm_add_rms_norm_on_fast_path = Entry(
    "two_norms",
    "x residual weight next_weight eps next_eps between weight_offset round_sum round_norm "
    "out residual_out out_dtype residual_dtype",
).of("rms_norm_add_rms_norm")


def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    next_eps: float | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises x, adds the residual, and RMS-normalises the sum, as Gemma 2, Gemma 3 and GLM-4 do.

    The same bits as ``fused_add_rms_norm(rms_norm(x, weight, eps), residual, next_weight, next_eps)``: docs/spec.md,
    section 8.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N], of the norm before the addition; None multiplies by nothing.
        next_weight: [N], of the norm after it; None multiplies by nothing.
        eps: of the norm before the addition: added to the mean of squares, unitless.
        next_eps: of the norm after it; None: ``eps``.
        between: the dtype to which the first norm's rows are rounded before the addition: x's if None, or
            ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: added to both weights; see :func:`fusednorm.fused_add_rms_norm`, also for the rest.
        round_sum: normalise the sum as rounded to the residual's dtype.
        round_norm: round what each norm normalises to the dtype of its input before it meets the weight.
        out: [..., N] to write the normalised sum to. May be x or residual itself.
        residual_out: [..., N] to write the sum to. May be x or residual itself.
        out_dtype: the dtype of the normalised sum; x's if None.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        The normalised sum and the sum, each in its dtype, or ``out`` and ``residual_out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``out`` or ``residual_out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = rms_norm_add_rms_norm_on_fast_path(
            x, residual, weight, next_weight, eps, next_eps, between, weight_offset, round_sum, round_norm, out,
            residual_out, out_dtype, residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    flags = Flags(
        eps if next_eps is None else next_eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype
    )
    before = Before(weight, eps, between, True)
    return beyond_fast_path(
        NormCall(rms_norm_add_rms_norm, x, residual, next_weight, flags, out, residual_out, before=before)
    )


def rms_norm_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    next_eps: float | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_add_rms_norm` in place: the normalised sum lands in ``x``, the sum in ``residual``.

    With its arguments, but outputs; rows lie as for :func:`fusednorm.fused_add_rms_norm_`.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = rms_norm_add_rms_norm_on_fast_path(
            x, residual, weight, next_weight, eps, next_eps, between, weight_offset, round_sum, round_norm, x, residual
        )
        if result is not None:
            return result
    flags = Flags(eps if next_eps is None else next_eps, weight_offset, round_sum, round_norm)
    before = Before(weight, eps, between, True)
    return beyond_fast_path(
        NormCall(rms_norm_add_rms_norm_, x, residual, next_weight, flags, x, residual, before=before)
    )


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS-normalises x and adds the residual, as OLMo 2 does: the same bits as ``rms_norm(x, weight, eps) + residual``.

    docs/spec.md, section 8.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N]; None multiplies by nothing.
        eps: added to the mean of squares, unitless.
        between: the dtype to which the normalised rows are rounded before the addition: x's if None, or
            ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: see :func:`fusednorm.rms_norm`, as for ``round_norm``.
        round_norm: see :func:`fusednorm.rms_norm`.
        residual_out: [..., N] to write the sum to. May be x or residual itself.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        The sum, in the residual's dtype or ``residual_dtype``; ``residual_out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``residual_out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_add_on_fast_path(
            x, residual, weight, eps, between, weight_offset, round_norm, residual_out, residual_dtype
        )
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm, residual_dtype=residual_dtype)
    before = Before(weight, eps, between, False)
    return beyond_fast_path(NormCall(rms_norm_add, x, residual, None, flags, None, residual_out, before=before))


def rms_norm_add_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> Tensor:
    """:func:`rms_norm_add` in place: the sum lands in ``residual``; x is left as it is.

    With its arguments, but outputs. Each row of the residual is contiguous, and its rows lie in at most two levels of
    strides.

    Returns:
        ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_add`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_add_on_fast_path(
            x, residual, weight, eps, between, weight_offset, round_norm, residual
        )
        if result is not None:
            return result
    flags = Flags(eps, weight_offset, True, round_norm)
    before = Before(weight, eps, between, False)
    return beyond_fast_path(NormCall(rms_norm_add_, x, residual, None, flags, None, residual, before=before))
