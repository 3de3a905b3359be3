"""RMS norms. How their calls are made is in :mod:`fusednorm.operations.norm_operation`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.checks import refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.operations.norm_operation import Norm

_RMS_NORM = Norm("rms_norm", added=False, center=False)
rms_norm_on_fast_path = _RMS_NORM.open(
    Entry("norm", "x weight eps bias weight_offset round_norm out out_dtype", returned=0)
)
_FUSED_ADD_RMS_NORM = Norm("fused_add_rms_norm", added=True, center=False)
fused_add_rms_norm_on_fast_path = _FUSED_ADD_RMS_NORM.open(
    Entry(
        "norm",
        "x residual weight eps bias x_scale weight_offset round_sum round_norm out residual_out out_dtype "
        "residual_dtype",
    )
)


@_FUSED_ADD_RMS_NORM.public
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
    return _FUSED_ADD_RMS_NORM(
        "fused_add_rms_norm", x=x, residual=residual, weight=weight, bias=bias, eps=eps, x_scale=x_scale,
        weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm, out=out, residual_out=residual_out,
        out_dtype=out_dtype, residual_dtype=residual_dtype,
    )  # fmt: skip


@_FUSED_ADD_RMS_NORM.public
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
    return _FUSED_ADD_RMS_NORM(
        "fused_add_rms_norm_", x=x, residual=residual, weight=weight, bias=bias, eps=eps, x_scale=x_scale,
        weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm,
    )  # fmt: skip


@_RMS_NORM.public
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
    return _RMS_NORM(
        "rms_norm", x=x, weight=weight, bias=bias, eps=eps, weight_offset=weight_offset, round_norm=round_norm,
        out=out, out_dtype=out_dtype,
    )  # fmt: skip


@_RMS_NORM.public
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
    return _RMS_NORM(
        "rms_norm_", x=x, weight=weight, bias=bias, eps=eps, weight_offset=weight_offset, round_norm=round_norm
    )
