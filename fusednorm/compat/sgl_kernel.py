"""SGLang's ``sgl_kernel``. Its norms on NVIDIA GPUs are FlashInfer's, with the same signatures.

``silu_and_mul``, ``gelu_tanh_and_mul`` and ``gelu_and_mul`` round once, as its kernels do; the exponential is
fusednorm's (docs/spec.md, section 10). Their input holds the gate and what it multiplies, [..., 2 * N].
``fused_qk_norm_rope`` is missing: its kernel computes the cosines itself.

The functions that quantize have the formulas of its CUDA kernels: they take [rows, N], and write numbers to
``output_q``, float8_e4m3fn of the same shape, and float32 scales to ``output_s``. Rows of zeros have scale 0 and
numbers 0; its kernel for few rows gives them 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.calls.checks import check_group_size, replaced
from fusednorm.compat import rotate_in_place, unrounded
from fusednorm.compat.flashinfer import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from fusednorm.operations import gate
from fusednorm.operations.quantize import quantize, silu_and_mul_quant
from fusednorm.quantizations import SGLANG_FP8_BLOCK, SGLANG_FP8_BLOCK_UE8M0, SGLANG_FP8_TOKEN, VLLM_FP8_STATIC

__all__ = [
    "apply_rope_with_cos_sin_cache_inplace",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
    "sgl_per_tensor_quant_fp8",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_token_quant_fp8",
    "silu_and_mul",
]


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, rounded once: :func:`fusednorm.silu_and_mul` with ``between=torch.float32``."""
    return gate.silu_and_mul(input, between=unrounded(input), out=out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """:func:`silu_and_mul` with ``gelu(gate)``: :func:`fusednorm.gelu_tanh_and_mul`."""
    return gate.gelu_tanh_and_mul(input, between=unrounded(input), out=out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """:func:`silu_and_mul` with ``gelu(gate)`` as z * Phi(z): :func:`fusednorm.gelu_and_mul`."""
    return gate.gelu_and_mul(input, between=unrounded(input), out=out)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: object | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """FlashInfer's function: :func:`fusednorm.compat.flashinfer.apply_rope_with_cos_sin_cache_inplace`.

    Raises:
        ValueError: ``fused_set_kv_buffer_arg`` is given.
    """
    if fused_set_kv_buffer_arg is not None:
        raise ValueError(
            "fused_set_kv_buffer_arg writes to a cache of keys and values, which fusednorm does not; write to it after "
            "the call"
        )
    rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox)


def sgl_per_token_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor) -> None:
    """Quantizes each row with a scale of its own, to [rows, 1] or [rows]: :func:`fusednorm.quantize`."""
    quantize(
        input, SGLANG_FP8_TOKEN, out=output_q, scale_out=output_s.unsqueeze(-1) if output_s.dim() == 1 else output_s
    )


def sgl_per_tensor_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor, is_static: bool) -> None:
    """Quantizes a contiguous tensor with one scale: :func:`fusednorm.quantize`.

    The scale is given where it ``is_static``. A computed one is no less than what was there, so callers write 0 first.
    """
    if not is_static:
        greatest = input.detach().abs().amax().float() / 448.0
        output_s.copy_(torch.maximum(output_s, greatest.expand_as(output_s)))
        if not output_s.any():  # no number to divide by: all are 0
            output_q.copy_(input)
            return
    quantize(input, VLLM_FP8_STATIC, scale=output_s, out=output_q)


def sgl_per_token_group_quant_8bit(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:
    """Quantizes groups of rows, with scales of [rows, N / group_size], any strides: :func:`fusednorm.quantize`.

    The formula is that of version 2 of the kernel, which SGLang takes for groups of 16, 32, 64 and 128; ``eps`` is the
    least amax. With ``scale_ue8m0`` scales are rounded up to powers of two, and an ``output_s`` of int32, [rows, N /
    group_size / 4, rounded up], takes those of four groups in each number. With ``fuse_silu_and_mul`` it quantizes
    ``silu(gate) * up`` of an input of [rows, 2 * N], of which each of both is rounded to the input's dtype:
    :func:`fusednorm.silu_and_mul_quant`.

    Raises:
        ValueError: ``masked_m``, or version 1 of the kernel are asked for.
    """
    given = {
        "masked_m": masked_m is not None,
        "enable_v2=False": enable_v2 is False,
        f"output_q of {str(output_q.dtype)[6:]}": output_q.dtype != torch.float8_e4m3fn,
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"sgl_per_token_group_quant_8bit does not support {name}; call sgl_kernel's own for it")
    check_group_size(group_size, output_q.shape[-1], "pass a divisor, or pad the rows")
    names = {"amax_floor": "eps", "qmin": "fp8_min", "qmax": "fp8_max"}
    preset = SGLANG_FP8_BLOCK_UE8M0 if scale_ue8m0 else SGLANG_FP8_BLOCK
    scale_dtype = torch.int32 if scale_ue8m0 and output_s.dtype == torch.int32 else None
    changes = {"per": group_size, "amax_floor": eps, "qmin": fp8_min, "qmax": fp8_max, "scale_dtype": scale_dtype}
    quantization = replaced(preset, names, **changes)
    if fuse_silu_and_mul:
        silu_and_mul_quant(input, quantization=quantization, out=output_q, scale_out=output_s)
    else:
        quantize(input, quantization, out=output_q, scale_out=output_s)
