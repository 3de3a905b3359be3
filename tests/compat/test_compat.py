"""Adapters with peers' signatures, at the flags that the specification names.

They return the bits of fusednorm's own functions at these flags and, with these flags and no others, the values of the
peers' formulas. `tox -e vllm` compares them with the peers themselves.
"""

import copy
import functools
import inspect
import re

import pytest
import torch

import fusednorm
from fusednorm import fused_add_layer_norm, fused_add_rms_norm, layer_norm, rms_norm
from fusednorm.compat import fla, flag_gems, flashinfer, functional, liger, quack, sgl_kernel, vllm
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, dtype_name, operands

from compat_bounds import agree, disagree, fp8, layer_norm_bound, same, same_bytes, torchs_tests

EPS = 1e-5

dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)


def of(dtype, rows=6, hidden=136, seed=0):
    """x, residual, weight."""
    return operands(Case(rows=rows, hidden=hidden, seed=seed).of(dtype))


@dtypes
@pytest.mark.parametrize("with_weight", [True, False], ids=["weight", "no weight"])
def test_vllm(dtype, with_weight):
    x, residual, weight = of(dtype)
    weight = weight if with_weight else None
    out = torch.full_like(x, torch.nan)
    assert vllm.rms_norm(out, x, weight, EPS) is None
    same(out, rms_norm(x, weight, EPS, round_norm=True))
    y, total = fused_add_rms_norm(x, residual, weight, EPS, round_norm=True)
    assert vllm.fused_add_rms_norm(x, residual, weight, EPS) is None
    same(x, y)
    same(residual, total)


@dtypes
@pytest.mark.parametrize("shape", [(4, 136), (4, 3, 136), (4, 4, 136), (4, 2, 3, 136), (4, 0, 136)], ids=str)
def test_vllm_weight_of_two_dimensions(dtype, shape):
    """Row i is that of ``input[i]``, and not that of a head; in place and where rows lie apart, too."""
    x, _, weight = of(dtype, rows=24)
    x, weight = x[: torch.Size(shape[:-1]).numel()].view(shape), weight * torch.arange(1.0, 5)[:, None].to(dtype)
    expected = torch.stack([rms_norm(x[i], weight[i], EPS, round_norm=True) for i in range(4)])
    apart = torch.stack((x, x), -2)[..., 0, :]
    for input, out in ((x, torch.full_like(x, torch.nan)), (apart, torch.full_like(x, torch.nan)), (x, x)):
        assert vllm.rms_norm(out, input, weight, EPS) is None
        same(out, expected)


def int8(v):
    return v.round().clamp(-128, 127).to(torch.int8)


def dynamic(y, dtype, limit=None):
    """vLLM's kernels that normalise and quantize: the scale, [..., 1], and the numbers."""
    amax = y.float().abs().amax(-1, keepdim=True)
    amax = amax if limit is None else amax.clamp(max=limit)
    if dtype == torch.int8:
        scale = (amax / 127.0).clamp(min=2.0**-23)
        return scale, int8(y.float() * (1 / scale))
    scale = (amax / 448.0).clamp(min=1 / (448.0 * 512.0))
    return scale, fp8(y.float() / scale)


@dtypes
def test_vllm_static(dtype):
    x, residual, weight = of(dtype)
    scale, found = torch.tensor([0.0123]), torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    assert vllm.rms_norm_static_fp8_quant(found, x, weight, scale, EPS) is None
    y = torch.empty_like(x)
    vllm.rms_norm(y, x, weight, EPS)
    same_bytes(found, fp8(y.float() * (1 / scale)))
    total = residual.clone()
    assert vllm.fused_add_rms_norm_static_fp8_quant(found, x, total, weight, scale, EPS) is None
    vllm.fused_add_rms_norm(x, residual, weight, EPS)
    same_bytes(found, fp8(x.float() * (1 / scale)))
    same(total, residual)


@dtypes
@pytest.mark.parametrize("limit", [1.25, 0.0, -0.3], ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=dtype_name)
def test_vllm_dynamic(dtype, kind, limit):
    """vLLM's own tests pass the mean of x as the limit, which may be below 0."""
    x, residual, weight = of(dtype, hidden=128)
    x, residual = x.view(2, 3, 128), residual.view(2, 3, 128)
    limit = None if kind == torch.int8 else torch.tensor(limit)
    for added in (None, residual):
        y, total = (
            (rms_norm(x, weight, EPS, round_norm=True), None)
            if added is None
            else fused_add_rms_norm(x, added, weight, EPS, round_sum=False, round_norm=True)
        )
        given = None if added is None else added.clone()
        values, scale = vllm.rms_norm_dynamic_per_token_quant(x, weight, EPS, kind, limit, given)
        wanted_scale, wanted = dynamic(y, kind, limit)
        same(scale, wanted_scale.view(6, 1))
        same_bytes(values, wanted)
        for transposed, alignment, stride in ((False, 0, (2, 1)), (True, 0, (1, 6)), (True, 4, (1, 8))):
            given = None if added is None else added.clone()
            values, scale = vllm.rms_norm_per_block_quant(
                *(x, weight, EPS, kind, [1, 64], limit, given, transposed, alignment)
            )
            wanted_scale, wanted = dynamic(y.unflatten(-1, (2, 64)), kind, limit)
            same(scale, wanted_scale.view(6, 2))
            assert scale.stride() == stride
            same_bytes(values, wanted.flatten(-2))
            assert total is None or torch.equal(given, total)


@pytest.mark.parametrize("of_all", [False, True])
def test_vllm_products_of_int8(of_all):
    """With scales and zero points of each row and column, or of all."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((2, 3, 40), (5, 40)))
    count, columns = ((1, 1), 1) if of_all else ((6, 1), (1, 5))
    scale_a, scale_b = (torch.rand(shape, generator=generator) for shape in (count, columns))
    azp = torch.randint(-128, 128, count, generator=generator).int()
    bias = torch.randn(5, generator=generator).bfloat16()
    found = vllm.cutlass_scaled_mm(a, b.t(), scale_a, scale_b, torch.bfloat16, bias)
    scale, zeros = (t.reshape(-1, 1).expand(6, 1).reshape(2, 3, 1) for t in (scale_a, azp))
    weight_scale = scale_b.reshape(-1).expand(5)
    same(found, fusednorm.int8_linear(a, scale, b, weight_scale, bias, out_dtype=torch.bfloat16))
    sums = b.sum(-1, dtype=torch.int32)
    found = vllm.cutlass_scaled_mm_azp(a, b.t(), scale_a, scale_b, torch.float16, sums, azp)
    same(found, fusednorm.int8_linear(a, scale, b, weight_scale, zero_point=zeros, out_dtype=torch.float16))
    with pytest.raises(ValueError, match="azp must be given, got None"):
        vllm.cutlass_scaled_mm_azp(a, b.t(), scale_a, scale_b, torch.float16, sums)


@dtypes
def test_vllm_int8(dtype):
    x, *_ = of(dtype)
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127.0
    values, found, azp = vllm.scaled_int8_quant(x.view(2, 3, -1))
    same(values.view(6, -1), int8(wide * (1 / scale)))
    same(found, scale)
    assert azp is None
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scale = (high - low) / 255.0
    point = (-128.0 - low / scale).round()
    values, found, azp = vllm.scaled_int8_quant(x, symmetric=False)
    same(values, int8(wide * (1 / scale) + point))
    same(found, scale)
    same(azp, point.int())
    one, zero = torch.tensor([0.037]), torch.tensor([5], dtype=torch.int32)
    values, found, azp = vllm.scaled_int8_quant(x, one)
    same(values, int8(wide * (1 / one)))
    assert found is one
    assert azp is None
    values, found, azp = vllm.scaled_int8_quant(x, one, zero, symmetric=False)
    same(values, int8(wide * (1 / one) + 5))
    assert azp is zero


@dtypes
def test_vllm_fp8(dtype):
    x, *_ = of(dtype)
    wide, one = x.float(), torch.tensor([0.0123])
    scale = wide.abs().amax(-1, keepdim=True) / 448.0
    values, found = vllm.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    same_bytes(values, fp8(wide / scale))
    same(found, scale)
    limit = wide.abs().max() / 2
    values, found = vllm.scaled_fp8_quant(x, None, 9, limit, True)
    same(found[:6], (scale * 448).clamp(max=limit) / 448)
    same_bytes(values[:6], fp8(wide / found[:6]))
    assert (values.shape, found.shape) == ((9, x.shape[1]), (9, 1))
    values, found = vllm.scaled_fp8_quant(x, scale_ub=torch.tensor(-1.0), use_per_token_if_dynamic=True)
    same(found, torch.full_like(found, 1 / (448.0 * 512.0)))
    same_bytes(values, fp8(wide / found))
    values, found = vllm.scaled_fp8_quant(x)
    same(found, scale.max().view(1))
    same_bytes(values, fp8(wide * (1 / found)))
    output = torch.empty_like(values)
    values, found = vllm.scaled_fp8_quant(x, one, output=output, group_shape=(-1, -1))
    assert values is output
    assert found is one
    same_bytes(values, fp8(wide * (1 / one)))
    with pytest.raises(ValueError, match=r"scale must have shape \[6, 2\] for group_shape=\(1, 128\)"):
        vllm.scaled_fp8_quant(x, one, group_shape=(1, 128))
    with pytest.raises(ValueError, match=r"group_shape is \(1, 128\), and no scale is given"):
        vllm.scaled_fp8_quant(x, group_shape=(1, 128))
    with pytest.raises(ValueError, match="may be of rows or of columns; pass group_shape"):
        vllm.scaled_fp8_quant(x, torch.ones(6))
    with pytest.raises(ValueError, match="num_token_padding does not go with output"):
        vllm.scaled_fp8_quant(x, one, 9, output=output)


@dtypes
def test_sgl_kernel_fp8(dtype):
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[2] = 0
    wide, values = x.float(), torch.empty(6, 256, dtype=torch.float8_e4m3fn)
    scale = wide.abs().amax(-1) / 448.0
    for found in (torch.empty(6), torch.empty(6, 1)):
        sgl_kernel.sgl_per_token_quant_fp8(x, values, found)
        same(found.view(6), scale)
        same_bytes(values, fp8((wide * (1 / scale[:, None])).nan_to_num(0)))
    found = torch.zeros(1)
    sgl_kernel.sgl_per_tensor_quant_fp8(x, values, found, False)
    same(found, scale.max().view(1))
    same_bytes(values, fp8(wide * (1 / found)))
    found = 2 * found
    for static in (True, False):  # a scale that was there and is greater stays
        kept = found.clone()
        sgl_kernel.sgl_per_tensor_quant_fp8(x, values, found, static)
        same(found, kept)
        same_bytes(values, fp8(wide * (1 / found)))
    found = torch.zeros(1)
    sgl_kernel.sgl_per_tensor_quant_fp8(x[2:3], values[2:3], found, False)
    assert not found.any()
    assert not values[2].view(torch.uint8).any()
    groups = wide.view(6, 2, 128)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=torch.tensor(1e-10))
    found = torch.empty(2, 6).T
    sgl_kernel.sgl_per_token_group_quant_8bit(x, values, found, 128, 1e-10, -448.0, 448.0)
    same(found, (amax * (1 / torch.tensor(448.0))).squeeze(-1))
    same_bytes(values, fp8((groups * (448 / amax)).view(6, 256)))
    with pytest.raises(ValueError, match="does not support enable_v2=False; call sgl_kernel's own"):
        sgl_kernel.sgl_per_token_group_quant_8bit(x, values, found, 128, 1e-10, -448.0, 448.0, enable_v2=False)


@dtypes
@pytest.mark.parametrize(
    ("group_shape", "shape"),
    [((1, -1), [6]), ((-1, 1), [256]), ((1, -1), [6, 1]), ((-1, 1), [1, 256]), ((1, 128), [6, 2]), ((3, 64), [2, 4])],
)
def test_vllm_fp8_of_blocks(dtype, group_shape, shape):
    """vLLM's kernel for given scales: a multiplication by the reciprocal of the element's scale."""
    x = torch.randn(6, 256).to(dtype)
    scale = torch.rand(shape) + 0.01
    rows, columns = (whole if size == -1 else size for size, whole in zip(group_shape, x.shape, strict=True))
    spread = scale.view(6 // rows, 256 // columns).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values, found = vllm.scaled_fp8_quant(x, scale, group_shape=group_shape)
    assert found is scale
    same_bytes(values, fp8(x.float() * (1 / spread)))
    if len(shape) == 2:
        same_bytes(vllm.scaled_fp8_quant(x, scale)[0], values)


@dtypes
def test_sglang_powers_of_two(dtype):
    """SGLang's and DeepGEMM's rounding of a scale: by its exponent and its mantissa."""
    x = torch.randn(6, 256).to(dtype)
    groups = x.float().view(6, 2, 128)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=torch.tensor(1e-10))
    exponent = (amax * (1 / torch.tensor(448.0))).frexp()
    powers = torch.ldexp(torch.ones_like(amax), exponent.exponent - (exponent.mantissa == 0.5).int())
    values, found = torch.empty(6, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 6).T
    sgl_kernel.sgl_per_token_group_quant_8bit(x, values, found, 128, 1e-10, -448.0, 448.0, True)
    same(found, powers.squeeze(-1))
    same_bytes(values, fp8((groups / powers).view(6, 256)))
    again, words = torch.empty_like(values), torch.full((1, 8), -1, dtype=torch.int32)[:, :6].T
    sgl_kernel.sgl_per_token_group_quant_8bit(x, again, words, 128, 1e-10, -448.0, 448.0, True)
    same_bytes(again, values)
    assert torch.equal(words, in_words(powers.squeeze(-1)))
    with pytest.raises(TypeError, match="scale_out must be float32, got int32"):
        sgl_kernel.sgl_per_token_group_quant_8bit(x, again, words, 128, 1e-10, -448.0, 448.0)


def in_words(powers):
    """vLLM's test of its packed scales: the exponent of group g is byte g % 4 of word g // 4, the lowest first."""
    exponents = powers.contiguous().view(torch.int32) >> 23
    wanted = torch.zeros(len(powers), -(-powers.shape[1] // 4), dtype=torch.int32)
    for group, exponent in enumerate(exponents.unbind(-1)):
        wanted[:, group // 4] |= exponent << (group % 4 * 8)
    return wanted


@dtypes
@pytest.mark.parametrize("hidden", [384, 512, 640, 768])
def test_vllm_fp8_of_groups(dtype, hidden):
    """vLLM's kernel of groups: float32 scales, powers of two, and these in the words that DeepGEMM takes."""
    x = torch.randn(6, hidden, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[1] = 0
    groups = x.float().view(6, -1, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=torch.tensor(1e-10)) / 448.0
    values, found = torch.empty(6, hidden, dtype=torch.float8_e4m3fn), torch.empty(hidden // 128, 6).T
    vllm.per_token_group_fp8_quant(x, values, found, 128, 1e-10, -448.0, 448.0, False, True, False)
    same(found, scale.squeeze(-1))
    same_bytes(values, fp8((groups / scale).view(6, hidden)))
    powers = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=torch.tensor(1e-10)))))
    vllm.per_token_group_fp8_quant(x, values, found, 128, 1e-10, -448.0, 448.0, True)
    same(found, powers.squeeze(-1))
    same_bytes(values, fp8((groups / powers).view(6, hidden)))
    again, words = torch.empty_like(values), torch.full((-(-hidden // 512), 8), 0x7F7F7F7F, dtype=torch.int32)
    vllm.per_token_group_fp8_quant_packed(x, again, words[:, :6].T, 128, 1e-10, -448.0, 448.0)
    same_bytes(again, values)
    assert torch.equal(words[:, :6].T, in_words(powers.squeeze(-1)))
    assert words[0, 1] & 0xFF == 0x5E  # vLLM's test of a row of zeros
    with pytest.raises(TypeError, match="scale_out must be int32, got float32"):
        vllm.per_token_group_fp8_quant_packed(x, again, found, 128, 1e-10, -448.0, 448.0)


@dtypes
@pytest.mark.parametrize("gated", [False, True], ids=["rows", "gated"])
def test_sglangs_packed_scales(dtype, gated):
    """A byte for the exponent of each group, as the kernel stores them: by columns, and 0 behind the last group."""
    x = torch.randn(6, 6 * 32 * (1 + gated)).to(dtype)
    x[3] *= 50 if gated else 1000  # exponents from 128 on
    values, scales = torch.empty(2, 6, 6 * 32, dtype=torch.float8_e4m3fn), torch.empty(6, 6)
    packed = torch.full((2, 8), -1, dtype=torch.int32).T[:6]
    for out, scale in zip(values, (scales, packed), strict=True):
        flags = {"scale_ue8m0": True, "fuse_silu_and_mul": gated}
        sgl_kernel.sgl_per_token_group_quant_8bit(x, out, scale, 32, 1e-10, -448.0, 448.0, **flags)
    same_bytes(*values)
    assert (packed < 0).any()
    exponents = packed.contiguous().view(torch.uint8).view(6, 8)
    same(exponents[:, :6].int(), scales.frexp().exponent + 126)
    assert not exponents[:, 6:].any()


@dtypes
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=dtype_name)
def test_flashinfer_quantized(dtype, kind):
    x, residual, weight = of(dtype)
    found, most = torch.empty(x.shape, dtype=kind), torch.finfo(kind).max
    for scale in (0.0123, torch.tensor([0.0123])):
        assert flashinfer.rmsnorm_quant(found, x, weight, scale, EPS) is None
        y = rms_norm(x, weight, EPS, out_dtype=F32)
        inverse = 1 / torch.as_tensor(scale)
        same_bytes(found, (y * inverse).clamp(-most, most).to(kind))
        total = residual.clone()
        assert flashinfer.fused_add_rmsnorm_quant(found, x, total, weight, scale, EPS) is None
        y, wanted = fused_add_rms_norm(x, residual, weight, EPS, round_sum=False, out_dtype=F32)
        same_bytes(found, (y * inverse).clamp(-most, most).to(kind))
        same(total, wanted)


@dtypes
@pytest.mark.parametrize("peer", [flashinfer, sgl_kernel], ids=["flashinfer", "sgl_kernel"])
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["plain", "gemma"])
def test_flashinfer_and_sgl_kernel(dtype, peer, offset):
    x, residual, weight = of(dtype)
    plain, fused = (
        (peer.gemma_rmsnorm, peer.gemma_fused_add_rmsnorm) if offset else (peer.rmsnorm, peer.fused_add_rmsnorm)
    )
    expected = rms_norm(x, weight, EPS, weight_offset=offset)
    same(plain(x, weight, EPS), expected)
    same(plain(x, weight), rms_norm(x, weight, 1e-6, weight_offset=offset))
    out = torch.full_like(x, torch.nan)
    assert plain(x, weight, EPS, out, True) is out
    same(out, expected)
    assert plain(x.view(2, 3, -1), weight, EPS, enable_pdl=False).shape == (2, 3, 136)
    for arguments, eps in (((EPS, True), EPS), ((), 1e-6)):
        a, b = x.clone(), residual.clone()
        y, total = fused_add_rms_norm(x, residual, weight, eps, weight_offset=offset, round_sum=False)
        assert fused(a, b, weight, *arguments) is None
        same(a, y)
        same(b, total)


@dtypes
@pytest.mark.parametrize(
    ("casting_mode", "round_norm"),
    [("llama", True), (0, True), ("gemma", False), (1, False)],
    ids=lambda value: str(value),
)
def test_liger(dtype, casting_mode, round_norm):
    """Functions, apply and modules: values and gradients."""
    x, residual, weight = (tensor.requires_grad_() for tensor in of(dtype))
    dy, d_total, _ = of(dtype, seed=1)
    flags = {"weight_offset": 0.5, "round_norm": round_norm}
    plain, fused = (
        liger.LigerRMSNorm(136, EPS, 0.5, casting_mode),
        liger.LigerFusedAddRMSNorm(136, EPS, 0.5, casting_mode),
    )
    for module in (plain, fused):
        module.to(dtype).load_state_dict({"weight": weight.detach()})

    def results(parameter, inputs, function, *arguments, **flags):
        """Outputs and gradients."""
        outputs = function(*inputs, *arguments, **flags)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        given = (dy, d_total)[: len(outputs)]
        before = [tensor.clone() for tensor in given]
        gradients = torch.autograd.grad(outputs, (*inputs, parameter), given)
        assert all(map(torch.equal, given, before)), "in_place may not matter"
        return (*outputs, *gradients)

    arguments = (EPS, 0.5, casting_mode)
    for inputs, function, ours, apply, module in (
        ((x,), rms_norm, liger.liger_rms_norm, liger.LigerRMSNormFunction.apply, plain),
        (
            *((x, residual), fused_add_rms_norm, liger.liger_fused_add_rms_norm),
            *(liger.LigerFusedAddRMSNormFunction.apply, fused),
        ),
    ):
        expected = results(weight, inputs, function, weight, EPS, **flags)
        for found in (
            results(weight, inputs, ours, weight, *arguments, False),
            results(weight, inputs, apply, weight, *arguments, True),
            results(module.weight, inputs, module),
        ):
            for actual, wanted in zip(found, expected, strict=True):
                same(actual, wanted)


def test_liger_defaults_and_modules():
    x, residual, weight = of(BF16)
    same(liger.liger_rms_norm(x, weight, EPS), rms_norm(x, weight, EPS, round_norm=True))
    same(liger.LigerRMSNormFunction.apply(x, None, EPS), rms_norm(x, None, EPS))
    for actual, wanted in zip(
        liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS),
        fused_add_rms_norm(x, residual, weight, EPS, round_norm=True),
        strict=True,
    ):
        same(actual, wanted)
    plain, bare = liger.LigerRMSNorm(136), liger.LigerRMSNorm(136, elementwise_affine=False)
    assert (plain.weight == 1).all()
    assert (liger.LigerFusedAddRMSNorm(136, init_fn="zeros").weight == 0).all()
    assert list(plain.state_dict()) == list(liger.LigerFusedAddRMSNorm(136).state_dict()) == ["weight"]
    assert not list(bare.parameters())
    same(bare(x), rms_norm(x, None, 1e-6))
    same(copy.deepcopy(plain).bfloat16()(x), rms_norm(x, torch.ones(136).bfloat16(), 1e-6, round_norm=True))
    assert repr(bare) == "LigerRMSNorm(None, eps=1e-06, offset=0.0, casting_mode='llama')"
    fused = liger.LigerFusedAddRMSNorm(136, 1e-5, 1.0, "gemma", "zeros")
    assert repr(fused) == "LigerFusedAddRMSNorm((136,), eps=1e-05, offset=1.0, casting_mode='gemma')"


@dtypes
@pytest.mark.parametrize("shape", [(136,), [8, 17]], ids=str)
def test_flag_gems(dtype, shape):
    x, residual, weight = (
        tensor.view(*tensor.shape[:-1], *shape).requires_grad_(tensor.dim() > 1) for tensor in of(dtype)
    )
    flat = [tensor.detach().reshape(*tensor.shape[: -len(shape)], -1) for tensor in (x, residual, weight)]
    y = flag_gems.rms_norm(x, shape, weight, EPS)
    same(y.detach().view(6, 136), rms_norm(flat[0], flat[2], EPS, round_norm=True))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    again = flat[0].clone().requires_grad_()
    y = rms_norm(again, flat[2], EPS, round_norm=True)
    same(dx.view(6, 136), torch.autograd.grad(y, again, torch.ones_like(y))[0])
    same(flag_gems.rms_norm(x, shape, weight), flag_gems.rms_norm(x, shape, weight, 1e-5))

    for arguments in ((EPS,), ()):  # whose default is 1e-5, too
        a, b = x.detach().clone(), residual.detach().clone()
        y, total = fused_add_rms_norm(*flat, EPS, round_sum=False)
        found = flag_gems.fused_add_rms_norm(a, b, shape, weight, *arguments)
        assert found[0] is a
        assert found[1] is b
        same(a.view(6, 136), y)
        same(b.view(6, 136), total)


@dtypes
@pytest.mark.parametrize("shape", [(136,), [8, 17]], ids=str)
def test_functional(dtype, shape):
    x, _, weight = (tensor.view(*tensor.shape[:-1], *shape).requires_grad_() for tensor in of(dtype))
    flat_x, flat_weight = x.detach().view(6, 136), weight.detach().view(136)
    for given, flat in ((weight, flat_weight), (None, None)):
        for eps, number in ((None, 2.0**-23), (EPS, EPS)):
            y = functional.rms_norm(x, shape, given, eps)
            assert y.shape == x.shape
            same(y.detach().view(6, 136), rms_norm(flat_x, flat, number))
    same(functional.rms_norm(x, shape), functional.rms_norm(x, shape, None, 2.0**-23))
    wide = flat_x.double()
    same(functional.rms_norm(wide, (136,)), rms_norm(wide, None, 2.0**-52))
    gradients = torch.autograd.grad(functional.rms_norm(x, shape, weight, EPS), (x, weight), torch.ones_like(x))
    leaves = flat_x.clone().requires_grad_(), flat_weight.clone().requires_grad_()
    expected = torch.autograd.grad(rms_norm(*leaves, EPS), leaves, torch.ones_like(flat_x))
    for actual, wanted in zip(gradients, expected, strict=True):
        same(actual.reshape(wanted.shape), wanted)


@dtypes
@pytest.mark.parametrize("shape", [(136,), [8, 17]], ids=str)
def test_functional_layer_norm(dtype, shape):
    x, bias, weight = (tensor.view(*tensor.shape[:-1], *shape) for tensor in of(dtype))
    given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias[0])]
    leaves = [
        tensor.detach().reshape(size).requires_grad_() for tensor, size in zip(given, ((6, 136), 136, 136), strict=True)
    ]
    y, expected = functional.layer_norm(given[0], shape, *given[1:], 1e-3), layer_norm(*leaves, 1e-3)
    assert y.shape == x.shape
    same(y.view(6, 136), expected)
    gradients = [torch.autograd.grad(t, of, torch.ones_like(t)) for t, of in ((y, given), (expected, leaves))]
    for actual, wanted in zip(*gradients, strict=True):
        same(actual.reshape(wanted.shape), wanted)
    same(functional.layer_norm(x, shape).view(6, 136), layer_norm(leaves[0]))
    same(functional.layer_norm(x, shape, None, given[2]).view(6, 136), layer_norm(leaves[0], None, leaves[2]))


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=dtype_name)
def test_torchs_samples_of_layer_norm(dtype):
    """Operands of torch's own tests, in the dtypes that they are made for."""
    samples = list(torchs_tests("layer_norm").sample_inputs("cpu", dtype, requires_grad=False))
    assert samples
    for sample in samples:
        shape, *of_row = sample.args
        weight, bias = (t if t is None else t.flatten() for t in [*of_row, None, None][:2])
        y = functional.layer_norm(sample.input, shape, *of_row, **sample.kwargs)
        expected = torch.nn.functional.layer_norm(sample.input, shape, *of_row, **sample.kwargs)
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        if y.numel():
            rows, eps = sample.input.flatten(-len(shape)), sample.kwargs.get("eps", 1e-5)
            apart = (y.double() - expected.double()).abs().view(rows.shape)
            assert (apart <= layer_norm_bound(rows, weight, bias, eps, y.view(rows.shape))).all()


@dtypes
def test_layer_norms_of_peers(dtype):
    """The bits of fusednorm's, and the values of the formulas in FLA's and quack's tests: torch's norm of float32."""
    x, residual, weight = of(dtype, 128, 256)
    bias = of(dtype, seed=1, hidden=256)[2]
    wide = [t.float() for t in (x, residual, weight, bias)]

    def within(y, rows, bias):
        expected = torch.nn.functional.layer_norm(rows, (256,), wide[2], bias, EPS)
        bound = layer_norm_bound(rows, weight, bias, EPS, y) + torch.finfo(dtype).eps * y.double().abs()
        assert ((y.double() - expected.double()).abs() <= bound).all()

    expected = layer_norm(x, weight, bias, EPS)
    for y in (
        liger.liger_layer_norm(x, weight, bias, EPS),
        liger.LigerLayerNormFunction.apply(x, weight, bias, EPS),
        quack.layernorm_fwd(x, weight, bias, EPS),
        fla.layer_norm(x, weight, bias),
        fla.layer_norm(x, weight, bias, eps=EPS, prenorm=True)[0],
    ):
        same(y, expected)
    within(expected, wide[0], wide[3])
    same(quack.layernorm_fwd(x, weight), layer_norm(x, weight, None, 1e-6))
    y, total = fla.layer_norm(x, weight, None, residual, EPS, True)
    same(y, fused_add_layer_norm(x, residual, weight, None, EPS, round_sum=False)[0])
    same(total, x + residual)
    within(y, wide[0] + wide[1], None)
    same(
        fla.layer_norm(x, weight, bias, residual, 1e-6, is_rms_norm=True),
        fused_add_rms_norm(x, residual, weight, bias=bias, round_sum=False)[0],
    )
    same(fla.layer_norm(x, weight, bias, prenorm=True, residual_in_fp32=True)[1], wide[0])


@dtypes
@pytest.mark.parametrize("heads", [False, True], ids=["rows", "heads"])
def test_quack(dtype, heads):
    """Values and gradients, with and without each operand, and both shapes of weights."""
    x, residual, weight = (tensor.requires_grad_() for tensor in of(dtype))
    bias = of(F32, seed=1)[2].requires_grad_()
    if heads:
        x, residual = (t.detach().view(3, 2, 136).requires_grad_() for t in (x, residual))
        weight, bias = (torch.stack((t, t + 1)).detach().requires_grad_() for t in (weight, bias))
    options = {"weight_offset": 1.0, "out_dtype": F32}
    for given in (None, residual):
        for b in (None, bias):
            leaves = [t for t in (x, weight, b, given) if t is not None]
            if given is None:
                wanted = rms_norm(x, weight, 1e-6, bias=b, **options), x
                found = quack.rmsnorm(x, weight, b, None, F32, prenorm=True, weight_offset=1.0)
                assert found[1] is x
                wanted, found = wanted[:1], found[:1]
            else:
                options["residual_dtype"] = F16
                wanted = fused_add_rms_norm(x, given, weight, 1e-6, bias=b, round_sum=False, **options)
                found = quack.rmsnorm(x, weight, b, given, F32, F16, 1e-6, True, 1.0)
                same(quack.rmsnorm(x, weight, b, given, weight_offset=1.0, out_dtype=F32), wanted[0])
            gradients = [
                torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs])
                for outputs in (found, wanted)
            ]
            for actual, expected in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
                same(actual, expected)
            options.pop("residual_dtype", None)


def test_quack_module():
    module = quack.QuackRMSNorm(136).to(BF16)
    x, _, weight = of(BF16)
    module.load_state_dict({"weight": weight})
    same(module(x), rms_norm(x, weight, 1e-6))
    assert repr(module) == "QuackRMSNorm((136,), eps=1e-06, elementwise_affine=True)"
    same(quack.rmsnorm(x, residual_dtype=F32, prenorm=True)[1], x.float())


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_functional_has_torchs_signature(name):
    ours, theirs = (inspect.signature(getattr(of, name)).parameters for of in (functional, torch.nn.functional))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


class Limit(torch.Tensor):
    """A number on a GPU."""

    is_cuda = True


def test_the_limit_of_a_scale_while_a_cuda_graph_is_captured(monkeypatch):
    call = functools.partial(vllm.rms_norm_dynamic_per_token_quant, X, W, EPS, FP8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call(torch.ones(1).as_subclass(Limit))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"cannot be read while a CUDA graph is captured; pass scale_ub.cpu\(\)"):
        call(torch.ones(1).as_subclass(Limit))


X = torch.arange(24.0).reshape(2, 3, 4)
W = torch.ones(4)
CROSSED = torch.zeros(2, 4, 3).mT
I8, FP8 = torch.int8, torch.float8_e4m3fn
INT8_OUT, FP8_OUT, SCALES = torch.empty(2, 3, 4, dtype=I8), torch.empty(2, 3, 4, dtype=FP8), torch.ones(2, 3, 1)


def of_groups(out=None, size=4, eps=1e-10, least=-448.0, greatest=448.0):
    out = FP8_OUT if out is None else out
    sgl_kernel.sgl_per_token_group_quant_8bit(X, out, SCALES, size, eps, least, greatest)


def with_grad(tensor):
    return tensor.clone().requires_grad_()


ERRORS = {
    ValueError: [
        (lambda: vllm.rms_norm(X, X, W[:3], EPS), "weight must have shape [4]"),
        (lambda: vllm.rms_norm(X[:1], X, W, EPS), "out must have x's shape"),
        (lambda: vllm.rms_norm(X[:1], X, W.expand(2, 4), EPS), "out must have x's shape"),
        (lambda: vllm.rms_norm(X, X + 1, W.expand(3, 4), EPS), "so it must have shape [2, 4], got [3, 4]"),
        (lambda: vllm.rms_norm(X, X + 1, W.expand(2, 3, 4), EPS), "weight must have shape [4]"),
        (lambda: vllm.fused_add_rms_norm(X, X + 1, W.expand(3, 4), EPS), "one dimension, [N], got shape [3, 4]"),
        (lambda: vllm.fused_add_rms_norm(X, X, W, EPS), "shares memory"),
        (lambda: vllm.rms_norm_per_block_quant(X, W, EPS, I8, [1, 4], tma_alignment=8), "must be 0 or 4, got 8"),
        (lambda: vllm.rms_norm_per_block_quant(X, W, EPS, BF16, [1, 2]), "quant_dtype must be one of"),
        (lambda: vllm.rms_norm_per_block_quant(X, W, EPS, FP8, [1, 0]), "group_size must be an int that"),
        (lambda: vllm.rms_norm_per_block_quant(X, W, EPS, FP8, [1, 3]), "group_size must be an int that"),
        (lambda: vllm.rms_norm_dynamic_per_token_quant(X, W, EPS, BF16), "quant_dtype must be one of"),
        (lambda: vllm.rms_norm_dynamic_per_token_quant(X, W, EPS, FP8, W), "scale_ub must have one elem"),
        (lambda: vllm.rms_norm_dynamic_per_token_quant(X, W.expand(3, 4), EPS, I8), "weight must"),
        (lambda: vllm.silu_and_mul_per_block_quant(X, 0, FP8), "group_size must be an int that divides the 2"),
        (lambda: vllm.silu_and_mul_per_block_quant(X, 2, BF16), "quant_dtype must be one of"),
        (lambda: of_groups(INT8_OUT, least=-128.0, greatest=127.0), "does not support output_q of int8"),
        (lambda: of_groups(least=-449.0), "fp8_min and fp8_max must lie around 0"),
        (lambda: of_groups(eps=-1.0), "eps must not be negative, got -1.0"),
        (lambda: vllm.per_token_group_fp8_quant_packed(X, FP8_OUT, SCALES, 3, 0.0, -1.0, 1.0), "group_size must be an"),
        (lambda: vllm.per_token_group_fp8_quant_packed(X, FP8_OUT, SCALES, 4, -1.0, -1.0, 1.0), "eps must not be neg"),
        (lambda: of_groups(size=3), "group_size must be an int that divides the 4 elements"),
        (lambda: flashinfer.rmsnorm_quant(X + 1, X, W, 1.0), "the dtype of out must be one of torch.int8"),
        (lambda: flashinfer.rmsnorm(X, W, out=X.mT), "out must have x's shape"),
        (lambda: flashinfer.fused_add_rmsnorm(X.mT, X.mT + 1, W[:3]), "x is written in place"),
        (lambda: liger.liger_rms_norm(X, W.expand(3, 4), EPS), "W must have one dimension"),
        (lambda: liger.liger_fused_add_rms_norm(X, X, W.expand(3, 4), EPS), "W must have one dimension"),
        (lambda: liger.liger_rms_norm(X, W, EPS, 0.0, "none"), "'none' takes the mean of squares in X's"),
        (lambda: liger.liger_rms_norm(X, W, EPS, 0.0, -1), "-1 takes the mean of squares in X's dtype"),
        (lambda: liger.liger_fused_add_rms_norm(X, X, W, EPS, 0.0, "none"), "pass 'llama' or 'gemma'"),
        (lambda: liger.liger_rms_norm(X, W, EPS, 0.0, "mistral"), "(0 or 1), got 'mistral'"),
        (lambda: liger.LigerRMSNorm(4, casting_mode="none"), "'none' takes"),
        (lambda: liger.LigerFusedAddRMSNorm(4, casting_mode="none"), "'none' takes"),
        (lambda: liger.LigerRMSNorm(4, init_fn="one"), "init_fn must be 'ones' or 'zeros', got 'one'"),
        (lambda: liger.liger_layer_norm(X, W.expand(3, 4), W, EPS), "W must have one dimension"),
        (lambda: quack.layernorm_fwd(X, W, return_mean=True), "torch.var_mean(x, -1, correction=0)"),
        (lambda: flag_gems.rms_norm(X, (4,), W.expand(3, 4)), "weight must have the normalized_shape [4]"),
        (lambda: flag_gems.fused_add_rms_norm(X, X + 1, (4,), W.expand(3, 4)), "must have the normalized_shape [4]"),
        (lambda: flag_gems.rms_norm(X, (3,), W), "x must end in the dimensions [3]"),
        (lambda: flag_gems.fused_add_rms_norm(X, X[:, :, :3], (4,), W), "residual must end in"),
        (lambda: flag_gems.fused_add_rms_norm(CROSSED, X, (3, 4), W.expand(3, 4)), "x is written in place and norm"),
        (lambda: flag_gems.fused_add_rms_norm(X + 1, CROSSED, (3, 4), W.expand(3, 4)), "residual is written in place"),
    ],
    TypeError: [
        (lambda: vllm.rms_norm_dynamic_per_token_quant(X, W, EPS, FP8, 0.5), "scale_ub must be a torch.Ten"),
        (lambda: vllm.scaled_fp8_quant(X[0], None, None, W[:1] * torch.nan, True), "scale_ub must be a number, got n"),
        (lambda: flashinfer.rmsnorm_quant(None, X, W, 1.0), "out must be a torch.Tensor, got NoneType"),
        (lambda: fla.layer_norm(None, W, W), "x must be a torch.Tensor, got NoneType"),
        (lambda: functional.rms_norm(X.to(torch.complex64), (4,)), "call torch.nn.functional.rms_norm"),
        (lambda: functional.layer_norm(X.to(torch.complex64), (4,)), "call torch.nn.functional.layer_norm"),
        (lambda: functional.rms_norm(X, 4), "normalized_shape must be a list or tuple of ints, got 4"),
        (lambda: functional.rms_norm(X, (3, 4), 1.0), "weight must be a torch.Tensor, got float"),
        (lambda: functional.rms_norm(X, (3, 4), 1), "weight must be a torch.Tensor, got int; torch.as"),
        (lambda: functional.rms_norm([1.0], (1,)), "input must be a torch.Tensor, got list"),
    ],
    RuntimeError: [
        (lambda: vllm.fused_add_rms_norm(X, X + 1, with_grad(W), EPS), "torch.no_grad()"),
        (lambda: flashinfer.rmsnorm(X, with_grad(W), out=X), "out=... arguments"),
        (lambda: functional.rms_norm(X, (4,), W.expand(3, 4)), "the normalized_shape [4], got shape [3, 4]"),
        (lambda: functional.rms_norm(X, (4,), W[:3]), "weight must have shape [4]"),
        (lambda: functional.rms_norm(X, (4,), W.to("meta")), "weight is on meta and x on cpu"),
        (lambda: functional.rms_norm(X, (3,)), "input must end in the dimensions [3]"),
        (lambda: functional.rms_norm(X, (2, 4)), "input must end in the dimensions [2, 4]"),
        (lambda: functional.layer_norm(X, (3, 4), torch.ones(3, 4), W), "bias must have the normalized_shape [3, 4]"),
        (lambda: functional.layer_norm(X, (4,), W, W[:3]), "bias must have shape [4]"),
        (lambda: functional.rms_norm(X, ()), "at least one dimension"),
        (lambda: functional.rms_norm(X, (3, 4), torch.ones(12)), "weight must have the normalized_shape"),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *each) for error, calls in ERRORS.items() for each in calls]
)
def test_errors(error, call, message):
    before = X.clone()
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert torch.equal(X, before)


def test_several_dimensions_that_are_not_contiguous():
    """What is only read is copied where it has to be."""
    x, weight = torch.rand(4, 3, 5).transpose(0, 1), torch.rand(5, 4).T
    expected = rms_norm(x.reshape(3, 20), weight.reshape(20), EPS)
    same(functional.rms_norm(x, (4, 5), weight, EPS).view(3, 20), expected)


# What the peers compute, in plain torch: every peer's own order of roundings, written out.


def mean_square(h):
    return h.square().mean(-1, keepdim=True)


def vllm_cuda(x, residual, weight, eps):
    total = x + residual
    h = total.float()
    return (h * torch.rsqrt(mean_square(h) + eps)).to(x.dtype) * weight, total


def flashinfer_cuda(x, residual, weight, eps, weight_bias=0.0):
    h = x.float() + residual.float()
    return (h * torch.rsqrt(mean_square(h) + eps) * (weight_bias + weight.float())).to(x.dtype), h.to(x.dtype)


def flag_gems_fused(x, residual, weight, eps):
    h = x.float() + residual.float()
    reciprocal = 1 / (h * h / h.shape[-1]).sum(-1, keepdim=True).add(eps).sqrt()
    return (h * reciprocal * weight.float()).to(x.dtype), h.to(x.dtype)


def flag_gems_plain(x, residual, weight, eps):
    h = x.float()
    reciprocal = 1 / ((h * h).sum(-1, keepdim=True) / h.shape[-1] + eps).sqrt()
    return (h * reciprocal).to(x.dtype) * weight, None


def liger_triton(x, residual, weight, eps, offset, mode):
    total = x + residual
    h = total.float()
    n = h * torch.rsqrt(mean_square(h) + eps)
    if mode == "llama":
        n = n.to(x.dtype).float()
    return (n * (offset + weight.float())).to(x.dtype), total


def torchs(x, residual, weight, eps):
    return torch.nn.functional.rms_norm(x + residual, [256], weight, eps), x + residual


def in_place(function):
    def call(x, residual, weight, eps):
        x, residual = x.clone(), residual.clone()
        function(x, residual, weight, eps)
        return x, residual

    return call


def vllm_plain(x, weight, eps):
    out = torch.empty_like(x)
    vllm.rms_norm(out, x, weight, eps)
    return out


def of_liger(mode, offset):
    """Its two adapters, and its formula."""
    return (
        lambda *given: liger.liger_fused_add_rms_norm(*given, offset, mode),
        lambda *given: liger.liger_rms_norm(*given, offset, mode),
        lambda *given: liger_triton(*given, offset, mode),
    )


def gemma_cuda(*given):
    return flashinfer_cuda(*given, weight_bias=1.0)


#: The adapters with and without a residual, the peer's formula, and the flags, by which the table in the documentation
#: names the rounding. Without a residual a row of zeros takes its place in the formulas, and there is no sum to round.
PEERS = {
    "vLLM": (in_place(vllm.fused_add_rms_norm), vllm_plain, vllm_cuda, (True, True, 0.0)),
    "FlashInfer": (
        *(in_place(flashinfer.fused_add_rmsnorm), flashinfer.rmsnorm, flashinfer_cuda),
        (False, False, 0.0),
    ),
    "FlashInfer Gemma": (
        *(in_place(flashinfer.gemma_fused_add_rmsnorm), flashinfer.gemma_rmsnorm, gemma_cuda),
        (False, False, 1.0),
    ),
    "FlagGems": (
        in_place(lambda x, residual, weight, eps: flag_gems.fused_add_rms_norm(x, residual, [256], weight, eps)),
        *(None, flag_gems_fused, (False, False, 0.0)),
    ),
    "FlagGems, plain": (
        None,
        lambda x, w, eps: flag_gems.rms_norm(x, [256], w, eps),
        flag_gems_plain,
        (True, True, 0.0),
    ),
    "Liger llama": (*of_liger("llama", 0.5), (True, True, 0.5)),
    "Liger gemma": (*of_liger("gemma", 1.0), (True, False, 1.0)),
    "torch, x + r": (
        lambda x, residual, weight, eps: (functional.rms_norm(x + residual, [256], weight, eps), x + residual),
        lambda x, weight, eps: functional.rms_norm(x, [256], weight, eps),
        *(torchs, (True, False, 0.0)),
    ),
}


@dtypes
@pytest.mark.parametrize("peer", [peer for peer, (fused, *_) in PEERS.items() if fused])
def test_fused_formulas(peer, dtype):
    adapter, _, formula, (round_sum, round_norm, offset) = PEERS[peer]
    x, residual, weight = of(dtype, 128, 256)
    y, total = adapter(x, residual, weight, EPS)
    wanted, wanted_total = formula(x, residual, weight, EPS)
    same(total, wanted_total)
    differing = agree(peer, y, wanted, round_norm)
    if dtype == F32:
        disagree(peer, fused_add_rms_norm(x, residual, weight, EPS, weight_offset=offset + 0.5)[0], wanted, differing)
        return
    for wrong in ((s, n) for s in (True, False) for n in (True, False) if (s, n) != (round_sum, round_norm)):
        flags = {"round_sum": wrong[0], "round_norm": wrong[1], "weight_offset": offset}
        disagree(f"{peer}, {flags}", fused_add_rms_norm(x, residual, weight, EPS, **flags)[0], wanted, differing)


@dtypes
@pytest.mark.parametrize("peer", [peer for peer, (_, plain, *_) in PEERS.items() if plain])
def test_plain_formulas(peer, dtype):
    _, adapter, formula, (_, round_norm, offset) = PEERS[peer]
    x, _, weight = of(dtype, 128, 256)
    wanted, _ = formula(x, torch.zeros_like(x), weight, EPS)
    differing = agree(peer, adapter(x, weight, EPS), wanted, round_norm)
    wrong = {"round_norm": not round_norm, "weight_offset": offset if dtype != F32 else offset + 0.5}
    disagree(f"{peer}, {wrong}", rms_norm(x, weight, EPS, **wrong), wanted, differing)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.parametrize("weight_dtype", [BF16, F16, F32, None], ids=dtype_name)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_torchs_dtypes(dtype, weight_dtype):
    """Any mix, and torch's epsilon where none is given: where it matters, and a wrong one shows."""
    x, _, weight = operands(Case(rows=64, hidden=256, x=dtype, weight=weight_dtype, data="tiny"))
    x = x / 8
    wanted = torch.nn.functional.rms_norm(x, [256], weight)
    differing = agree("torch", functional.rms_norm(x, [256], weight), wanted, False)
    other = fusednorm.rms_norm(x, weight, 2.0**-22 if dtype != F64 else 2.0**-51)
    disagree("torch, another epsilon", other, wanted, differing)
