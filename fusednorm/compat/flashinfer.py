"""``flashinfer.norm``, with the rounding of FlashInfer's CUDA and CuTe DSL kernels, which round only stored results.

``enable_pdl`` does nothing: the backend chooses whether a kernel starts before the previous one ends. A call that
allocates its result has a gradient here, unlike FlashInfer's.
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
        RuntimeError: an operand requires grad while gradients are recorded, which FlashInfer ignores.
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
        input: as in :func:`rmsnorm`, like the other arguments.
        weight: as there.
        eps: as there.
        out: as there.
        enable_pdl: as there.
    """
    return ops.rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """:func:`fused_add_rmsnorm` with ``1 + weight``, added in float32.

    Args:
        input: as in :func:`fused_add_rmsnorm`, like the other arguments.
        residual: as there.
        weight: as there.
        eps: as there.
        enable_pdl: as there.
    """
    ops.fused_add_rms_norm_(input, residual, weight, eps, weight_offset=1.0, round_sum=False)
