"""``flashinfer.norm``, ``activation`` and ``rope``, which round only stored results, as FlashInfer's kernels do.

``enable_pdl`` and ``backend`` do nothing: fusednorm's backend chooses how a kernel is launched. A call that
allocates its result has a gradient here, unlike FlashInfer's.

``out``, [..., N], is written and returned; without it the result is a new tensor. A call that adds a residual writes
the sum to it, and the normalised rows to the input or to ``out``. The input of a gate holds the gate and what it
multiplies, [..., 2 * N]; the exponential is fusednorm's (docs/spec.md, section 10).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.calls.checks import refuse_type, replaced
from fusednorm.compat import cos_and_sin, heads, rotate_in_place, unrounded
from fusednorm.operations import gate, norm, quantize
from fusednorm.operations.rotate import qk_norm_rope
from fusednorm.quantizations import VLLM_FP8_STATIC, Quantization


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """RMS-normalises the last dimension: :func:`fusednorm.rms_norm`."""
    return norm.rms_norm(input, weight, eps, out=out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Adds and normalises in place: :func:`fusednorm.fused_add_rms_norm_` with ``round_sum=False``."""
    norm.fused_add_rms_norm_(input, residual, weight, eps, round_sum=False)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """:func:`rmsnorm` with ``1 + weight``, added in float32."""
    return norm.rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """:func:`fused_add_rmsnorm` with ``1 + weight``, added in float32."""
    norm.fused_add_rms_norm_(input, residual, weight, eps, weight_offset=1.0, round_sum=False)


def rmsnorm_quant(
    out: Tensor, input: Tensor, weight: Tensor, scale: float | Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """RMS-normalises, and quantizes the unrounded rows to ``out``: :func:`fusednorm.rms_norm_quant`.

    ``out`` is float8_e4m3fn or float8_e5m2; rows are multiplied by 1 / scale, a number, or float32 with one element.
    """
    quantize.rms_norm_quant(
        *(input, weight, eps), quantization=_to(out), scale=_as_tensor(scale, input), between=unrounded(input), out=out
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
    """:func:`rmsnorm_quant` of ``input + residual``, unrounded, by :func:`fusednorm.fused_add_rms_norm_quant`."""
    quantize.fused_add_rms_norm_quant(
        *(input, residual, weight, eps),
        quantization=_to(out),
        scale=_as_tensor(scale, input),
        between=unrounded(input),
        round_sum=False,
        out=out,
        residual_out=residual,
    )


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """``silu(gate) * up``, rounded once: :func:`fusednorm.silu_and_mul` with ``between=torch.float32``."""
    return gate.silu_and_mul(input, between=unrounded(input), out=out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """:func:`silu_and_mul` with GELU in its tanh form: :func:`fusednorm.gelu_tanh_and_mul`."""
    return gate.gelu_tanh_and_mul(input, between=unrounded(input), out=out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """:func:`silu_and_mul` with GELU as z * Phi(z): :func:`fusednorm.gelu_and_mul`."""
    return gate.gelu_and_mul(input, between=unrounded(input), out=out)


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotates the heads of the query and the key, [rows, H * D], by [rows] positions: :func:`fusednorm.qk_norm_rope`.

    A row of ``cos_sin_cache``, [P, 2 * K], holds the cosines and the sines of a position. With ``is_neox`` pairs lie as
    halves, else side by side.
    """
    if not isinstance(positions, Tensor):
        refuse_type("positions", positions)
    q, k = heads("query", query, head_size, positions), heads("key", key, head_size, positions)
    cos, sin = cos_and_sin(cos_sin_cache)
    q, k = qk_norm_rope(q, k, cos=cos, sin=sin, norm=False, positions=positions, interleaved=not is_neox)
    return q.view(query.shape), k.view(key.shape)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    backend: str = "auto",
) -> None:
    """:func:`apply_rope_with_cos_sin_cache` in place, by :func:`fusednorm.qk_norm_rope_`."""
    rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox)


def _to(out: Tensor) -> Quantization:
    if not isinstance(out, Tensor):
        refuse_type("out", out, "allocate it with torch.empty_like(input, dtype=torch.float8_e4m3fn)")
    return replaced(VLLM_FP8_STATIC, {"dtype": "the dtype of out"}, dtype=out.dtype)


def _as_tensor(scale: float | Tensor, x: Tensor) -> Tensor:
    return scale if isinstance(scale, Tensor) else torch.tensor([scale], dtype=torch.float32, device=x.device)
