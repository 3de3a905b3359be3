"""``vllm._custom_ops``, with the rounding of vLLM's CUDA kernels up to v0.19 and since PR 42379.

From v0.20 to that PR the kernels did not round before the multiplication by the weight. vLLM's CPU kernels round
differently: the plain one rounds only the result; the fused one takes the mean of squares from the unrounded sum and
the result from the rounded sum. No flags reproduce the latter (``round_norm=False`` comes close).

``silu_and_mul``, ``silu_and_mul_with_clamp``, ``swigluoai_and_mul``, ``gelu_and_mul``, ``gelu_tanh_and_mul``,
``relu_squared``, ``silu_and_mul_quant``, ``per_token_group_fp8_quant`` and ``per_token_group_fp8_quant_packed`` are
operations of vLLM's library, which it calls as ``torch.ops._C.silu_and_mul`` and so on. The exponential is fusednorm's
(docs/spec.md, section 10). Limits are rounded to the input's dtype, as vLLM's are but for ``swigluoai_and_mul``: 7.0 is
the same in all.

The functions that quantize have the quantizers of vLLM's CUDA kernels. For tensors on a CPU ``scaled_int8_quant`` has
that of vLLM's CPU kernels. A scale of 0 makes all numbers 0 here (docs/spec.md, section 9). They write to ``result``,
float8_e4m3fn, or return the numbers, float8_e4m3fn or int8 as ``quant_dtype`` says, and their scales, float32; a scale
that is given, and ``scale_ub``, have one element. A residual receives the sum. Gates take [..., 2 * N], the gate and
what it multiplies.

``compute_logprobs`` is the method of ``vllm.v1.sample.sampler.Sampler``.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.checks import check_group_size, check_one_row, refuse_type, replaced
from fusednorm.compat import cos_and_sin, rotate_in_place, unrounded
from fusednorm.operations import functions, gate, int8_linear, log_prob, norm, quantize
from fusednorm.operations.rotate import qk_norm_rope_
from fusednorm.quantizations import (
    VLLM_FP8_BLOCK_FUSED,
    VLLM_FP8_BLOCK_UE8M0,
    VLLM_FP8_BLOCK_UNFUSED,
    VLLM_FP8_STATIC,
    VLLM_FP8_TENSOR,
    VLLM_FP8_TOKEN,
    VLLM_INT8_STATIC,
    VLLM_INT8_STATIC_AZP,
    VLLM_INT8_STATIC_AZP_CPU,
    VLLM_INT8_STATIC_CPU,
    VLLM_INT8_TOKEN_AZP_CPU,
    VLLM_INT8_TOKEN_AZP_UNFUSED,
    VLLM_INT8_TOKEN_CPU,
    VLLM_INT8_TOKEN_FUSED,
    VLLM_INT8_TOKEN_UNFUSED,
    Quantization,
)

#: The names that the functions here have for the fields of a quantization.
_NAMES = {"dtype": "quant_dtype", "amax_limit": "scale_ub"}

#: The same, of the quantizers of groups alone.
_GROUP_NAMES = {"amax_floor": "eps", "qmin": "fp8_min", "qmax": "fp8_max"}

_DIVISOR = "pass a divisor, or pad the rows"

#: Quantizers of int8: whether a scale is given, whether there are no zero points, whether for a CPU.
_INT8 = {
    (True, True, False): VLLM_INT8_STATIC,
    (True, True, True): VLLM_INT8_STATIC_CPU,
    (True, False, False): VLLM_INT8_STATIC_AZP,
    (True, False, True): VLLM_INT8_STATIC_AZP_CPU,
    (False, True, False): VLLM_INT8_TOKEN_UNFUSED,
    (False, True, True): VLLM_INT8_TOKEN_CPU,
    (False, False, False): VLLM_INT8_TOKEN_AZP_UNFUSED,
    (False, False, True): VLLM_INT8_TOKEN_AZP_CPU,
}


def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """RMS-normalises ``input`` into ``out``: :func:`fusednorm.rms_norm` with ``round_norm=True``.

    A weight of [G, N] has a row for each ``input[i]`` of an input of [G, ..., N].
    """
    if getattr(weight, "ndim", 1) == 2 and isinstance(input, Tensor) and input.dim() > 1:
        assert weight is not None
        hidden_size = input.shape[-1]
        if weight.shape != (len(input), hidden_size):
            raise ValueError(
                "weight has two dimensions, a row for each input[i], so it must have shape "
                f"{[len(input), hidden_size]}, got {list(weight.shape)}; pass [{hidden_size}] for one row for all"
            )
        if isinstance(out, Tensor) and out.shape == input.shape:
            out, input = out.movedim(0, -2), input.movedim(0, -2)
    norm.rms_norm(input, weight, epsilon, round_norm=True, out=out)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Adds and normalises in place: :func:`fusednorm.fused_add_rms_norm_` with ``round_norm=True``."""
    check_one_row("weight", weight)
    norm.fused_add_rms_norm_(input, residual, weight, epsilon, round_norm=True)


def rms_norm_static_fp8_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    """RMS-normalises ``input`` and quantizes it into ``result``: :func:`fusednorm.rms_norm_quant`."""
    quantize.rms_norm_quant(
        input, weight, epsilon, quantization=VLLM_FP8_STATIC, scale=scale, round_norm=True, out=result
    )


def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    """:func:`rms_norm_static_fp8_quant` of ``input + residual``: :func:`fusednorm.fused_add_rms_norm_quant`."""
    quantize.fused_add_rms_norm_quant(
        *(input, residual, weight, epsilon),
        quantization=VLLM_FP8_STATIC,
        scale=scale,
        round_norm=True,
        out=result,
        residual_out=residual,
    )


def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the residual if there is one, RMS-normalises, and quantizes each row with a scale of its own, [rows, 1].

    ``scale_ub``, for float8 only, is the greatest magnitude that decides a scale; below 0 as 0. Its value is read, so
    while a CUDA graph is captured it must be on the CPU.
    """
    quantization = _limited(VLLM_INT8_TOKEN_FUSED if quant_dtype == torch.int8 else VLLM_FP8_TOKEN, scale_ub)
    return _dynamic(input, weight, epsilon, replaced(quantization, _NAMES, dtype=quant_dtype), residual)


def rms_norm_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: list[int],
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_dynamic_per_token_quant` with a scale for each group of a row, [rows, groups].

    ``group_size`` is [1, the elements of a group]. ``is_scale_transposed`` says whether the scales lie by columns; with
    a ``tma_alignment`` of 4, and not 0, each column has room for a multiple of 4 rows.
    """
    quantization = _limited(VLLM_INT8_TOKEN_FUSED if quant_dtype == torch.int8 else VLLM_FP8_BLOCK_FUSED, scale_ub)
    if tma_alignment not in (0, 4):
        raise ValueError(f"tma_alignment must be 0 or 4, got {tma_alignment!r}; vLLM has no other")
    layout = "row" if not is_scale_transposed else "column_padded" if tma_alignment else "column"
    check_group_size(group_size[1], input.shape[-1], _DIVISOR)
    quantization = replaced(quantization, _NAMES, dtype=quant_dtype, per=group_size[1], layout=layout)
    return _dynamic(input, weight, epsilon, quantization, residual)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates the heads of the query and the key in place, rounded once: :func:`fusednorm.qk_norm_rope_`.

    They are [..., H * D] or [..., H, D] with positions of [...]; a row of ``cos_sin_cache``, [P, 2 * K], holds the
    cosines and the sines of a position. With ``is_neox`` pairs lie as halves, else side by side. The first
    ``rope_dim_offset`` numbers of a head stay as they are; ``inverse`` rotates back.
    """
    rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse)


def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """RMS-normalises and rotates the heads of q and k in place, rounded once: :func:`fusednorm.qk_norm_rope_`.

    ``qkv`` is [..., heads * head_dim]; of the cache see :func:`rotary_embedding`. vLLM multiplies rstd by the weight
    first: the last bit of float32 may differ. ``forced_token_heads_per_warp`` does nothing.
    """
    if not isinstance(qkv, Tensor):
        refuse_type("qkv", qkv)
    heads = [num_heads_q, num_heads_k, num_heads_v]
    if qkv.shape[-1:] != (sum(heads) * head_dim,):
        raise ValueError(
            f"qkv must have rows of {sum(heads)} heads of {head_dim}, {sum(heads) * head_dim} elements, got shape "
            f"{list(qkv.shape)}"
        )
    q, k, _ = torch.split(torch.unflatten(qkv, -1, (-1, head_dim)), heads, -2)
    cos, sin = cos_and_sin(cos_sin_cache)
    how: dict[str, Any] = {"positions": position_ids, "interleaved": not is_neox, "between": unrounded(qkv)}
    qk_norm_rope_(q, k, q_weight, k_weight, cos, sin, eps, **how)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """``silu(gate) * up`` into ``out``, each of both rounded: :func:`fusednorm.silu_and_mul`."""
    gate.silu_and_mul(input, out=out)


def silu_and_mul_with_clamp(out: Tensor, input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> None:
    """:func:`silu_and_mul` of a limited gate, ``gate * sigmoid(alpha * gate)``, rounded, times ``up + beta``."""
    gate.silu_and_mul(input, limit=limit, alpha=alpha, up_offset=beta, out=out)


def swigluoai_and_mul(out: Tensor, input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    """gpt-oss's gate into ``out``, rounded once; even elements of the input are the gate.

    vLLM multiplies ``up + 1`` by the gate before it divides: the last bit of float32 may differ.
    """
    once = unrounded(input)
    gate.silu_and_mul(input, between=once, out=out, limit=limit, alpha=alpha, up_offset=1.0, interleaved=True)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """:func:`silu_and_mul` with ``gelu(gate)`` as z * Phi(z): :func:`fusednorm.gelu_and_mul`."""
    gate.gelu_and_mul(input, out=out)


def relu_squared(out: Tensor, input: Tensor) -> None:
    """The square of a positive number, else 0, into ``out``: :func:`fusednorm.relu2`."""
    functions.relu2(input, out=out)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """:func:`silu_and_mul` with ``gelu(gate)``: :func:`fusednorm.gelu_tanh_and_mul`."""
    gate.gelu_tanh_and_mul(input, out=out)


def silu_and_mul_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """:func:`silu_and_mul`, quantized into ``result``: :func:`fusednorm.silu_and_mul_quant`."""
    quantize.silu_and_mul_quant(input, quantization=VLLM_FP8_STATIC, scale=scale, out=result)


def silu_and_mul_per_block_quant(
    input: Tensor,
    group_size: int,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    is_scale_transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up``, of which nothing is rounded, quantized with a scale for each group of a row, [rows, groups].

    Raises:
        ValueError: ``scale_ub`` is given: vLLM's kernel limits the scale by it, and fusednorm amax.
    """
    if scale_ub is not None:
        raise ValueError("scale_ub limits the scale in vLLM's kernel, which no quantization does; leave it out")
    check_group_size(group_size, input.shape[-1] // 2, _DIVISOR)
    layout = "column" if is_scale_transposed else "row"
    quantization = replaced(VLLM_FP8_BLOCK_FUSED, _NAMES, dtype=quant_dtype, per=group_size, layout=layout)
    if quant_dtype == torch.int8:
        quantization = replaced(quantization, _NAMES, scale_floor=2.0**-23)
    values, scale = quantize.silu_and_mul_quant(input, quantization=quantization, between=unrounded(input))
    return values, scale


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes to float8, into ``output`` or a new tensor: :func:`fusednorm.quantize`.

    The scale is returned as it is given, for all elements or for blocks of ``group_shape`` [rows, columns], of which
    -1 is all: (1, -1) are rows, (-1, 1) columns; a scale of two dimensions tells its blocks itself. Or the scale is
    computed: [1] for all rows, or, ``use_per_token_if_dynamic``, [rows,
    1] for rows, with ``scale_ub`` as :func:`rms_norm_dynamic_per_token_quant` takes it. The results have
    ``num_token_padding`` rows at least; those beyond ``input`` are uninitialised.

    Raises:
        ValueError: ``scale`` does not have the shape that ``group_shape`` asks for, or none is given beside it.
    """
    if group_shape is not None and scale is None and tuple(group_shape) != (-1, -1):
        raise ValueError(
            f"group_shape is {tuple(group_shape)}, and no scale is given; leave it out, or pass the scales"
        )
    rows = input.shape[0]  # len() is a constant for torch.export
    if output is None:
        output = input.new_empty((max(num_token_padding or 0, rows), *input.shape[1:]), dtype=torch.float8_e4m3fn)
    elif num_token_padding is not None:
        raise ValueError("num_token_padding does not go with output; leave one of them out")
    if scale is not None:
        of_blocks = _of_blocks(scale, input, group_shape)
        quantize.quantize(input, VLLM_FP8_STATIC, scale=of_blocks, out=output[:rows])
    elif use_per_token_if_dynamic:
        scale = input.new_empty((output.shape[0], 1), dtype=torch.float32)
        quantize.quantize(input, _limited(VLLM_FP8_TOKEN, scale_ub), out=output[:rows], scale_out=scale[:rows])
    else:
        values, scale = quantize.quantize(input.reshape(-1), VLLM_FP8_TENSOR)
        output[:rows].copy_(values.view(input.shape))
    return output, scale


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantizes rows to int8: :func:`fusednorm.quantize`.

    Without a scale each row has a scale of its own, [rows, 1]. Unless ``symmetric``, there are zero points, int32:
    ``azp``, one element, beside a given scale, or computed like the scales.
    """
    quantization = _INT8[scale is not None, symmetric, input.device.type == "cpu"]
    if scale is not None:
        values, _ = quantize.quantize(input, quantization, scale=scale, zero_point=None if symmetric else azp)
        return values, scale, azp
    values, scales, *zero_points = quantize.quantize(input, quantization)
    return values, scales.reshape(-1, 1), zero_points[0].reshape(-1, 1) if zero_points else None


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Multiplies rows [..., K] of int8 by b, [K, N]: :func:`fusednorm.int8_linear`, of a whole row and column.

    ``scale_a`` has one number for each row or one for all, ``scale_b`` one for each column or for all. The sum is
    multiplied by ``scale_b``, then by ``scale_a``, and the bias is added; vLLM's kernels have several orders.
    """
    return _scaled(a, b, scale_a, scale_b, out_dtype, bias, None)


def cutlass_scaled_mm_azp(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    azp_adj: Tensor,
    azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """:func:`cutlass_scaled_mm` with zero points, int32, one for each row or one for all.

    ``azp_adj``, the sums of columns, is not read: they are added up again. Where it holds one zero point of all rows,
    and ``azp`` is None, vLLM subtracts it; here ``azp`` must be given.

    Raises:
        ValueError: ``azp`` is None.
    """
    if azp is None:
        raise ValueError(
            "azp must be given, got None: the zero point cannot be told from azp_adj; pass it, one element for all rows"
        )
    return _scaled(a, b, scale_a, scale_b, out_dtype, bias, azp)


def _scaled(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    azp: Tensor | None,
) -> Tensor:
    rows = (*a.shape[:-1], 1)
    scale, zero_point = (
        None if t is None else t.expand(rows) if t.numel() == 1 else t.reshape(rows) for t in (scale_a, azp)
    )
    weight_scale = scale_b.reshape(-1).expand(b.shape[1])
    return int8_linear.int8_linear(
        a, cast(Tensor, scale), b.t(), weight_scale, bias, zero_point=zero_point, out_dtype=out_dtype
    )


def per_token_group_fp8_quant(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
    dummy_is_scale_transposed: bool = False,
    dummy_is_tma_aligned: bool = False,
) -> None:
    """Quantizes groups of rows, with scales of [rows, N / group_size], any strides: :func:`fusednorm.quantize`.

    ``eps`` is the least amax. With ``scale_ue8m0`` scales are rounded up to powers of two. The last two arguments do
    nothing, as in vLLM, which reads them in the strides of ``output_s``.
    """
    preset = VLLM_FP8_BLOCK_UE8M0 if scale_ue8m0 else VLLM_FP8_BLOCK_UNFUSED
    quantization = _of_groups(preset, input, group_size, eps, fp8_min, fp8_max)
    quantize.quantize(input, quantization, out=output_q, scale_out=output_s)


def per_token_group_fp8_quant_packed(
    input: Tensor,
    output_q: Tensor,
    output_s_packed: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
) -> None:
    """Quantizes groups with scales that are powers of two, four in each int32, as DeepGEMM takes them.

    ``output_s_packed`` is [rows, N / group_size / 4, rounded up], any strides.
    """
    quantization = _of_groups(VLLM_FP8_BLOCK_UE8M0, input, group_size, eps, fp8_min, fp8_max, torch.int32)
    quantize.quantize(input, quantization, out=output_q, scale_out=output_s_packed)


def compute_logprobs(logits: Tensor) -> Tensor:
    """The log-probabilities of all tokens, float32: :func:`fusednorm.log_softmax`."""
    return log_prob.log_softmax(logits, out_dtype=torch.float32)


def _of_groups(
    preset: Quantization,
    input: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_dtype: torch.dtype | None = None,
) -> Quantization:
    """The preset, of such groups."""
    check_group_size(group_size, input.shape[-1], _DIVISOR)
    changes = {"per": group_size, "amax_floor": eps, "qmin": fp8_min, "qmax": fp8_max, "scale_dtype": scale_dtype}
    return replaced(preset, _GROUP_NAMES, **changes)


def _of_blocks(scale: Tensor, input: Tensor, group_shape: tuple[int, int] | None) -> Tensor:
    """Given scales with a size for each of both dimensions. ``group_shape``: the rows and columns of a block."""
    if not isinstance(scale, Tensor):
        return scale
    if group_shape is None:
        if scale.dim() == 1 and scale.numel() != 1:
            raise ValueError(
                f"scale has shape {list(scale.shape)}, which may be of rows or of columns; pass group_shape, (1, -1) "
                "or (-1, 1)"
            )
        return scale
    whole, sizes = input.shape[-2:], group_shape
    blocks = [1 if size == -1 else -(-n // size) if size > 0 else 0 for n, size in zip(whole, sizes, strict=True)]
    if list(scale.shape) != blocks and not (scale.dim() < 2 and 1 in blocks and scale.numel() == math.prod(blocks)):
        raise ValueError(
            f"scale must have shape {blocks} for group_shape={tuple(group_shape)} and an input of {list(whole)}, got "
            f"{list(scale.shape)}"
        )
    return scale.reshape(blocks)


def _limited(quantization: Quantization, scale_ub: Tensor | None) -> Quantization:
    """A quantization with the greatest amax. vLLM takes the lesser of both, then no scale below the floor.

    A limit below 0 does as 0.
    """
    if scale_ub is None:
        return quantization
    if not isinstance(scale_ub, Tensor):
        refuse_type("scale_ub", scale_ub)
    if scale_ub.numel() != 1:
        raise ValueError(f"scale_ub must have one element, got shape {list(scale_ub.shape)}; pass a limit for all rows")
    if scale_ub.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "scale_ub is on a GPU, and its value cannot be read while a CUDA graph is captured; pass scale_ub.cpu() of "
            "before the capture"
        )
    return replaced(quantization, _NAMES, amax_limit=max(scale_ub.item(), 0.0))


def _dynamic(
    input: Tensor, weight: Tensor, epsilon: float, quantization: Quantization, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The numbers, and the scales of all rows in two dimensions. The sum is not rounded before it is normalised."""
    rows = input.reshape(-1, input.shape[-1])
    if residual is None:
        values, scale = quantize.rms_norm_quant(rows, weight, epsilon, quantization=quantization, round_norm=True)
        return values.view(input.shape), scale
    total = residual.view(rows.shape)
    values, scale, _ = quantize.fused_add_rms_norm_quant(
        *(rows, total, weight, epsilon), quantization=quantization, round_sum=False, round_norm=True, residual_out=total
    )
    return values.view(input.shape), scale
