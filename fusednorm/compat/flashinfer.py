"""``flashinfer.norm``, with the rounding of FlashInfer's CUDA and CuTe DSL kernels, which round only stored results.

``enable_pdl`` does nothing: the backend chooses whether a kernel starts before the previous one ends. A call that
allocates its result has a gradient here, unlike FlashInfer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.calls.checks import refuse_type, replaced
from fusednorm.operations import norm, quantize
from fusednorm.quantizations import VLLM_FP8_STATIC, Quantization


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
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
    """
    return norm.rms_norm(input, weight, eps, out=out)


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
    """
    norm.fused_add_rms_norm_(input, residual, weight, eps, round_sum=False)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """:func:`rmsnorm`, of the same arguments, with ``1 + weight``, added in float32."""
    return norm.rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """:func:`fused_add_rmsnorm`, of the same arguments, with ``1 + weight``, added in float32."""
    norm.fused_add_rms_norm_(input, residual, weight, eps, weight_offset=1.0, round_sum=False)


def rmsnorm_quant(
    out: Tensor, input: Tensor, weight: Tensor, scale: float | Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """RMS-normalises, and quantizes the unrounded rows: :func:`fusednorm.rms_norm_quant` with ``between=float32``.

    Args:
        out: [..., N], float8_e4m3fn or float8_e5m2, written.
        input: [..., N].
        weight: [N].
        scale: a number, or float32 with one element; rows are multiplied by 1 / scale.
        eps: added to the mean of squares.
        enable_pdl: does nothing.
    """
    quantize.rms_norm_quant(
        *(input, weight, eps), quantization=_to(out), scale=_as_tensor(scale, input), between=_unrounded(input), out=out
    )


def fused_add_rmsnorm_quant(
    out: Tensor,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: float | Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """:func:`rmsnorm_quant` of ``input + residual``, by :func:`fusednorm.fused_add_rms_norm_quant`.

    The arguments are the same; ``residual``, [..., N], receives the sum, which is normalised unrounded.
    """
    quantize.fused_add_rms_norm_quant(
        *(input, residual, weight, eps),
        quantization=_to(out),
        scale=_as_tensor(scale, input),
        between=_unrounded(input),
        round_sum=False,
        out=out,
        residual_out=residual,
    )


def _to(out: Tensor) -> Quantization:
    if not isinstance(out, Tensor):
        refuse_type("out", out, "allocate it with torch.empty_like(input, dtype=torch.float8_e4m3fn)")
    return replaced(VLLM_FP8_STATIC, {"dtype": "the dtype of out"}, dtype=out.dtype)


def _as_tensor(scale: float | Tensor, x: Tensor) -> Tensor:
    return scale if isinstance(scale, Tensor) else torch.tensor([scale], dtype=torch.float32, device=x.device)


def _unrounded(x: Tensor) -> torch.dtype | None:
    """The dtype that passes to the quantizer: float32, and float64 for rows of it."""
    return None if x.dtype == torch.float64 else torch.float32
