"""LayerNorm: norms whose rows first lose their mean. See :mod:`fusednorm.operations.norm_operation`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.checks import refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.operations.norm_operation import Norm

_CENTERED = {"center": True}
_LAYER_NORM = Norm("layer_norm", added=False, center=True)
layer_norm_on_fast_path = _LAYER_NORM.open(
    Entry("norm", "x weight bias eps weight_offset round_norm out out_dtype", returned=0, constants=_CENTERED)
)
_FUSED_ADD_LAYER_NORM = Norm("fused_add_layer_norm", added=True, center=True)
fused_add_layer_norm_on_fast_path = _FUSED_ADD_LAYER_NORM.open(
    Entry(
        "norm",
        "x residual weight bias eps weight_offset round_sum round_norm out residual_out out_dtype residual_dtype",
        constants=_CENTERED,
    )
)


@_FUSED_ADD_LAYER_NORM.public
def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the residual, then layer-normalises: the bits of ``s = x + residual; layer_norm(s, weight, bias, eps)``.

    The arguments are those of :func:`fusednorm.fused_add_rms_norm`; ``eps`` is added to the variance, in units of x
    squared.

    Returns:
        The normalised rows, in x's dtype or ``out_dtype`` (``out`` if given), and the sum, in the residual's or
        ``residual_dtype`` (``residual_out`` if given).

    Raises:
        RuntimeError: ``out`` or ``residual_out`` is given and an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = fused_add_layer_norm_on_fast_path(
            x, residual, weight, bias, eps, weight_offset, round_sum, round_norm, out, residual_out, out_dtype,
            residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    return _FUSED_ADD_LAYER_NORM(
        "fused_add_layer_norm", x=x, residual=residual, weight=weight, bias=bias, eps=eps,
        weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm, out=out, residual_out=residual_out,
        out_dtype=out_dtype, residual_dtype=residual_dtype,
    )  # fmt: skip


@_FUSED_ADD_LAYER_NORM.public
def fused_add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`fused_add_layer_norm` in place: the normalised rows land in ``x``, the sum in ``residual``.

    With its arguments, but outputs, and the memory of :func:`fusednorm.fused_add_rms_norm_`.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = fused_add_layer_norm_on_fast_path(
            x, residual, weight, bias, eps, weight_offset, round_sum, round_norm, x, residual
        )
        if result is not None:
            return result
    return _FUSED_ADD_LAYER_NORM(
        "fused_add_layer_norm_", x=x, residual=residual, weight=weight, bias=bias, eps=eps,
        weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm,
    )  # fmt: skip


@_LAYER_NORM.public
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer-normalises the last dimension: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    The variance is the mean of the squares of ``x - mean(x)``, in two passes over a row. Section 12 of ``docs/spec.md``
    also says which rows of little variance are rounding noise, beside a small ``eps``.

    The arguments are those of :func:`fusednorm.rms_norm`; ``eps`` is added to the variance, in units of x squared.

    Returns:
        The normalised rows, in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = layer_norm_on_fast_path(x, weight, bias, eps, weight_offset, round_norm, out, out_dtype)
        if result is not None:
            return result
    return _LAYER_NORM(
        "layer_norm", x=x, weight=weight, bias=bias, eps=eps, weight_offset=weight_offset, round_norm=round_norm,
        out=out, out_dtype=out_dtype,
    )  # fmt: skip


@_LAYER_NORM.public
def layer_norm_(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> Tensor:
    """:func:`layer_norm` in place, as :func:`fusednorm.rms_norm_` is: the normalised rows land in ``x``.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = layer_norm_on_fast_path(x, weight, bias, eps, weight_offset, round_norm, x)
        if result is not None:
            return result
    return _LAYER_NORM(
        "layer_norm_", x=x, weight=weight, bias=bias, eps=eps, weight_offset=weight_offset, round_norm=round_norm
    )
