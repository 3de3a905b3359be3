"""How values become 8-bit numbers and scales: :class:`Quantization`, and presets, each named after its owner.

A preset names the quantizer only. ``fusednorm.compat`` also sets the flags of the norm before it; docs/rounding.md has
a row for each function. The formulas are in docs/spec.md, section 9.
"""

import torch

from fusednorm.calls.quantization import E8M0
from fusednorm.calls.quantization import Quantization as Quantization

#: vLLM's `scaled_int8_quant` of a token on a GPU, and the same with zero points.
VLLM_INT8_TOKEN_UNFUSED = Quantization(torch.int8, apply="ratio")
VLLM_INT8_TOKEN_AZP_UNFUSED = Quantization(torch.int8, zero_point="after", apply="reciprocal")
#: vLLM's `rms_norm_dynamic_per_token_quant` to int8.
VLLM_INT8_TOKEN_FUSED = Quantization(torch.int8, apply="reciprocal", scale_floor=2.0**-23)
#: vLLM's `scaled_int8_quant` on a CPU.
VLLM_INT8_TOKEN_CPU = Quantization(torch.int8, apply="reciprocal")
VLLM_INT8_TOKEN_AZP_CPU = Quantization(torch.int8, zero_point="before", apply="reciprocal")
#: vLLM's `scaled_int8_quant` with a given scale.
VLLM_INT8_STATIC = Quantization(torch.int8, per="tensor")
VLLM_INT8_STATIC_CPU = Quantization(torch.int8, per="tensor", apply="reciprocal")
VLLM_INT8_STATIC_AZP = Quantization(torch.int8, per="tensor", zero_point="after", apply="reciprocal")
VLLM_INT8_STATIC_AZP_CPU = Quantization(torch.int8, per="tensor", zero_point="before", apply="reciprocal")
#: vLLM's `rms_norm_static_fp8_quant`, and `static_scaled_fp8_quant`.
VLLM_FP8_STATIC = Quantization(torch.float8_e4m3fn, per="tensor", apply="reciprocal")
#: vLLM's `rms_norm_dynamic_per_token_quant` to fp8, and `dynamic_per_token_scaled_fp8_quant`.
VLLM_FP8_TOKEN = Quantization(torch.float8_e4m3fn, scale_floor=1 / (448 * 512))
#: vLLM's `rms_norm_per_block_quant`, and `per_token_group_fp8_quant`.
VLLM_FP8_BLOCK_FUSED = Quantization(torch.float8_e4m3fn, per=128, scale_floor=1 / (448 * 512))
VLLM_FP8_BLOCK_UNFUSED = Quantization(torch.float8_e4m3fn, per=128, amax_floor=1e-10)
#: DeepGEMM's `per_token_cast_to_fp8` with float32 scales.
DEEPGEMM_FP8_BLOCK = Quantization(torch.float8_e4m3fn, per=128, apply="reciprocal", amax_floor=1e-4)
#: SGLang's `sgl_per_token_group_quant_8bit`, groups of 128.
SGLANG_FP8_BLOCK = Quantization(torch.float8_e4m3fn, per=128, scale_by="reciprocal", apply="ratio", amax_floor=1e-10)
#: SGLang's `per_token_quant_int8_cpu`, with AVX-512.
SGLANG_INT8_TOKEN_CPU = Quantization(torch.uint8, zero_point=128, apply="ratio", amax_floor=1e-7)
#: TensorRT-LLM's `invokePerTokenQuantization` to fp8.
TENSORRT_LLM_FP8_TOKEN = Quantization(torch.float8_e4m3fn, apply="ratio", amax_floor=1e-6, floor_dtype="input")
#: torchao's float8 with row-wise scales, which returns multipliers.
TORCHAO_FP8_ROW = Quantization(torch.float8_e4m3fn, apply="ratio", amax_floor=1e-12, returns="multiplier")
#: vLLM's `scaled_fp8_quant` of rows that are taken as one row: a tensor with one scale.
VLLM_FP8_TENSOR = Quantization(torch.float8_e4m3fn, apply="reciprocal")
#: SGLang's `sgl_per_token_quant_fp8`, and `sgl_per_tensor_quant_fp8` of rows that are taken as one row.
SGLANG_FP8_TOKEN = Quantization(torch.float8_e4m3fn, apply="reciprocal")
#: vLLM's `per_token_group_fp8_quant` with `use_ue8m0=True`.
VLLM_FP8_BLOCK_UE8M0 = Quantization(
    torch.float8_e4m3fn, per=128, amax_floor=1e-10, scale_floor=1e-10, round_scale="up_to_power_of_two"
)
#: DeepGEMM's `per_token_cast_to_fp8` with `use_ue8m0=True`.
DEEPGEMM_FP8_BLOCK_UE8M0 = Quantization(
    torch.float8_e4m3fn, per=128, apply="reciprocal", amax_floor=1e-4, round_scale="up_to_power_of_two"
)
#: SGLang's `sgl_per_token_group_quant_8bit` with `scale_ue8m0=True`, groups of 128.
SGLANG_FP8_BLOCK_UE8M0 = Quantization(
    torch.float8_e4m3fn, per=128, scale_by="reciprocal", amax_floor=1e-10, round_scale="up_to_power_of_two"
)
#: DeepGEMM's `per_token_cast_to_fp8` with `use_ue8m0=True`, and `get_mn_major_tma_aligned_packed_ue8m0_tensor` of its
#: scales, for DeepSeek-V3.2 and V4 on Blackwell.
DEEPGEMM_FP8_BLOCK_PACKED = Quantization(
    torch.float8_e4m3fn,
    per=128,
    apply="reciprocal",
    amax_floor=1e-4,
    layout="column_padded",
    round_scale="up_to_power_of_two",
    scale_dtype=torch.int32,
)
#: `act_quant` of DeepSeek-V4's own inference code, with scales of float8_e8m0fnu.
DEEPSEEK_V4_FP8_BLOCK = Quantization(
    torch.float8_e4m3fn,
    per=128,
    scale_by="reciprocal",
    amax_floor=1e-4,
    round_scale="up_to_power_of_two",
    scale_dtype=E8M0,
)
