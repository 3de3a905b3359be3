"""``flashinfer.norm``, rounding as FlashInfer's CUDA and CuTe DSL kernels do: only what is stored.

``enable_pdl`` is accepted and does nothing: whether a kernel begins before the one before it has ended is the backend's
choice. A call that allocates its result has a gradient here, which FlashInfer's has not.
"""

from __future__ import annotations

from torch import Tensor

from fusednorm import ops


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """RMS-normalises the last dimension: :func:`fusednorm.rms_norm`.

    Args:
        input: [..., N].
        weight: [N].
        eps: added to the mean of squares.
        out: [..., N] to write to, or None for a new tensor.
        enable_pdl: does nothing.

    Returns:
        ``out``, or the new tensor.

    Raises:
        TypeError, ValueError, RuntimeError, BackendError: see :func:`fusednorm.rms_norm`.
    """
    return ops.rms_norm(input, weight, eps, out=out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """In place, :func:`fusednorm.fused_add_rms_norm_` with ``round_sum=False``.

    Args:
        input: [..., N], receives the normalised rows.
        residual: [..., N], receives the sum.
        weight: [N].
        eps: added to the mean of squares.
        enable_pdl: does nothing.

    Raises:
        RuntimeError: an operand requires grad while gradients are recorded, which FlashInfer's ignores.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm_`.
    """
    ops.fused_add_rms_norm_(input, residual, weight, eps, round_sum=False)


def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """:func:`rmsnorm` with ``1 + weight``, added in float32.

    Args:
        input: see :func:`rmsnorm`, as for the rest.
        weight: see there.
        eps: see there.
        out: see there.
        enable_pdl: see there.
    """
    return ops.rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """:func:`fused_add_rmsnorm` with ``1 + weight``, added in float32.

    Args:
        input: see :func:`fused_add_rmsnorm`, as for the rest.
        residual: see there.
        weight: see there.
        eps: see there.
        enable_pdl: see there.
    """
    ops.fused_add_rms_norm_(input, residual, weight, eps, weight_offset=1.0, round_sum=False)
