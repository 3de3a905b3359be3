"""Adapters of other libraries' gates: each has the bits of its formula in plain torch, where the formula is IEEE's.

exp, a mean in an order of its own and rsqrt are not. So the formulas take fusednorm's exponential, divide by a root in
two operations, and are given rows whose squares add up exactly in every order.
"""

import copy

import pytest
import torch

from fusednorm import rms_norm_gated
from fusednorm.compat import fla, flashinfer, liger, mamba_ssm, sgl_kernel, transformers, vllm
from fusednorm.conformance.cases import BF16, F16, F32, F64, dtype_name
from fusednorm.reference import activations

from compat_bounds import fp8, same, same_bytes

E4M3, I8 = torch.float8_e4m3fn, torch.int8
ROWS, N, GROUP, EPS = 64, 96, 24, 1e-5

dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape, seed=0):
    """Numbers from -8 to 8, of which up to 2^17 have exact sums of squares in float32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def silu(z):
    return activations.activated(z.float(), "silu")


def scaled_silu(z):
    """z * sigmoid(1.702 * z), as docs/spec.md has it: by one division."""
    return activations.Product.apply(z, z * 1.702)[0]


def sigmoid(z):
    return activations.activated(z.float(), "sigmoid")


def normed(h, eps=EPS):
    """The rows of h in float32, whose squares add up exactly, divided by the roots of their means."""
    mean = h.square().sum(-1, keepdim=True) / torch.tensor(float(h.shape[-1]))
    return h * (1 / (mean + eps).double().sqrt().float())  # torch's root of float32 may be off by one bit


def in_groups(h, eps=EPS):
    return normed(h.unflatten(-1, (-1, GROUP)), eps).flatten(-2)


def of(dtype, first=True):
    """x, the gate, and a weight. Where the gate comes first, silu(z) is z itself: 0, 128 or 256."""
    z = random(ROWS, N, seed=1) if first else 128 * whole(ROWS, N, seed=1).remainder(3)
    return whole(ROWS, N).to(dtype), z.to(dtype), (1 + random(N, seed=2) / 8).to(dtype)


def loaded(module, weight):
    module.load_state_dict({"weight": weight}, assign=True)
    return module


# mamba_ssm


def of_mamba_ssm(x, weight, bias, z, group, norm_before_gate):
    """``rms_norm_ref``."""
    h = x.float() if z is None or norm_before_gate else x.float() * silu(z)
    y = (normed(h) if group is None else in_groups(h)) * weight.float()
    y = y if bias is None else y + bias.float()
    return (y * silu(z) if z is not None and norm_before_gate else y).to(x.dtype)


@dtypes
@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
def test_mamba_ssm(dtype, group, norm_before_gate, with_bias, with_gate):
    x, z, weight = of(dtype, norm_before_gate)
    bias, z = random(N, seed=3).to(dtype) if with_bias else None, z if with_gate else None
    flags = {"group_size": group, "norm_before_gate": norm_before_gate}
    found = mamba_ssm.rmsnorm_fn(x.view(2, -1, N), weight, bias, z if z is None else z.view(2, -1, N), EPS, **flags)
    same(found.view(ROWS, N), of_mamba_ssm(x, weight, bias, z, group, norm_before_gate))
    if not with_bias:
        module = loaded(mamba_ssm.RMSNorm(N, EPS, group, norm_before_gate, dtype=dtype), weight)
        same(module(x, z), found.view(ROWS, N))
    # A LayerNorm of rows whose means, also of groups and times a gate, are exact: it subtracts 3.
    half = whole(ROWS, N // GROUP, GROUP // 2, seed=4)
    x, z = torch.cat((half, -half), -1).flatten(1).to(dtype), z if z is None else z[:, :1].expand(ROWS, N)
    found = mamba_ssm.layernorm_fn(x + 3, weight, bias, z, EPS, **flags)
    same(found, of_mamba_ssm(x, weight, bias, z, group, norm_before_gate))


# FLA


@dtypes
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fla(dtype, activation, with_residual, with_bias):
    x, g, weight = of(dtype)
    x, residual = 2 * x, whole(ROWS, N, seed=4) / 32 if with_residual else None  # whose sum bfloat16 rounds
    bias = random(N, seed=3) if with_bias else None
    total = x.float() if residual is None else x.float() + residual.to(dtype).float()
    y = normed(total) * weight.float()
    y = y if bias is None else y + bias
    wanted = (y * (sigmoid if activation == "sigmoid" else silu)(g)).to(dtype)
    residual = None if residual is None else residual.to(dtype)
    found, stream = fla.rms_norm_gated(x, g, weight, bias, activation, residual, True, True, EPS)
    same(found, wanted)
    same(stream, total.to(dtype) if with_residual else total)
    same(fla.rms_norm_gated(x, g, weight, bias, activation, residual, eps=EPS), wanted)
    assert with_residual or fla.rms_norm_gated(x, g, weight, bias, activation, prenorm=True)[1] is x
    if with_bias:
        return
    module = loaded(fla.FusedRMSNormGated(N, eps=EPS, activation=activation, dtype=dtype), weight)
    same(module(x, g, residual), wanted)
    same(module(x, g, residual, True)[1], total.to(dtype))


def test_flas_order_of_products():
    """FLA multiplies by the gate, and then by its sigmoid: the last bit of float32, hence few numbers of 16 bits."""
    x, g, weight = of(BF16)
    y = normed(x.float()) * weight.float()
    found, theirs = fla.rms_norm_gated(x, g, weight, None, eps=EPS), (y * g.float() * sigmoid(g)).to(BF16)
    steps = (found.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.001
    assert (y * silu(g) != y * g.float() * sigmoid(g)).any()


# transformers


def of_qwen3_next(x, z, weight):
    return (weight * normed(x.float()).to(x.dtype) * silu(z)).to(x.dtype)


def of_mamba_2(x, z, weight, norm=normed):
    return weight * norm(x.float() if z is None else x.float() * silu(z)).to(x.dtype)


@dtypes
@pytest.mark.parametrize("weight_dtype", [None, F32], ids=dtype_name)
def test_transformers(dtype, weight_dtype):
    """Also with a weight of a wider dtype, as there is under autocast."""
    x, z, weight = of(dtype)
    weight = weight.to(weight_dtype or dtype)
    module = loaded(transformers.Qwen3NextRMSNormGated(N, EPS, activation="silu"), weight)
    same(module(x, z), of_qwen3_next(x, z, weight))
    same(module(x, z.float()), of_qwen3_next(x, z.float(), weight))
    x, z, weight = of(dtype, False)
    weight = weight.to(weight_dtype or dtype)
    for module, norm in (
        (transformers.MambaRMSNormGated(N, EPS), normed),
        (transformers.Zamba2RMSNormGated(N, GROUP, EPS), in_groups),
    ):
        module = loaded(module, weight)
        same(module(x, z), of_mamba_2(x, z, weight, norm))
        same(module(x), of_mamba_2(x, None, weight, norm))


# The multiplication of an MLP


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_and_mul(dtype, activation):
    """vLLM rounds the function, and the product; SGLang the product alone."""
    both = random(ROWS, 2 * N).to(dtype)
    gate, up = both.chunk(2, -1)
    a, out = activations.activated(gate.float(), activation), torch.empty(ROWS, N, dtype=dtype)
    assert getattr(vllm, f"{activation}_and_mul")(out, both) is None
    same(out, a.to(dtype) * up)
    for library in (sgl_kernel, flashinfer):
        ours = getattr(library, f"{activation}_and_mul")
        same(ours(both), (a * up.float()).to(dtype))
        assert ours(both, out) is out
        same(out, (a * up.float()).to(dtype))


@dtypes
def test_ligers_and_flas_gates(dtype):
    """Liger rounds the function and the product, FLA the product alone."""
    z, up = random(ROWS, 2 * N).to(dtype).chunk(2, -1)
    gelu = activations.activated(z.float(), "gelu_tanh").to(dtype) * up
    for function, wanted in ((liger.liger_swiglu, silu(z).to(dtype) * up), (liger.liger_geglu, gelu)):
        same(function(z, up), wanted)
    same(liger.LigerSiLUMulFunction.apply(z, up), silu(z).to(dtype) * up)
    same(liger.LigerGELUMulFunction.apply(z, up), gelu)
    same(fla.swiglu(z, up), (silu(z) * up.float()).to(dtype))


@dtypes
def test_vllms_gates_with_limits(dtype):
    """One function is rounded before the product, and the other is not."""
    both, out = (8 * random(ROWS, 2 * N)).to(dtype), torch.empty(ROWS, N, dtype=dtype)
    z, up = (half.float() for half in both.chunk(2, -1))
    limited = up.clamp(-7.0, 7.0)
    assert vllm.silu_and_mul_with_clamp(out, both, 7.0) is None
    same(out, (silu(z.clamp(max=7.0)).to(dtype).float() * limited).to(dtype))
    vllm.silu_and_mul_with_clamp(out, both, 7.0, 1.702, 1.0)
    same(out, (scaled_silu(z.clamp(max=7.0)).to(dtype).float() * (limited + 1)).to(dtype))
    even, odd = both[..., ::2].float(), both[..., 1::2].float()
    assert vllm.swigluoai_and_mul(out, both) is None
    same(out, (scaled_silu(even.clamp(max=7.0)) * (odd.clamp(-7.0, 7.0) + 1)).to(dtype))
    assert vllm.relu_squared(out, up.to(dtype)) is None
    same(out, up.relu().square().to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=dtype_name)
def test_quantized(dtype):
    both = random(ROWS, 512).to(dtype)
    both[:8] /= 1024  # whose scales are floors
    gate, up = both.chunk(2, -1)
    scale, found = torch.tensor([0.0123]), torch.empty(ROWS, 256, dtype=E4M3)
    assert vllm.silu_and_mul_quant(found, both, scale) is None
    twice = silu(gate).to(dtype) * up
    same_bytes(found, fp8(twice.float() * (1 / scale)))

    groups = (silu(gate) * up.float()).unflatten(-1, (4, 64))
    amax = groups.abs().amax(-1, keepdim=True)
    for kind, most, floor in ((E4M3, 448.0, 1 / (448.0 * 512.0)), (I8, 127.0, 2.0**-23)):
        wanted_scale = (amax / most).clamp(min=floor)
        wanted = (groups / wanted_scale).flatten(-2)
        for transposed in (False, True):
            values, scales = vllm.silu_and_mul_per_block_quant(both, 64, kind, None, transposed)
            same(scales, wanted_scale.squeeze(-1))
            assert scales.stride() == ((1, ROWS) if transposed else (4, 1))
            same_bytes(values, fp8(wanted) if kind == E4M3 else wanted.round().to(I8))
    with pytest.raises(ValueError, match="scale_ub limits the scale in vLLM's kernel"):
        vllm.silu_and_mul_per_block_quant(both, 64, E4M3, scale)

    groups, scales = twice.float().unflatten(-1, (2, 128)), torch.empty(ROWS, 2)
    sgl_kernel.sgl_per_token_group_quant_8bit(both, found, scales, 128, 1e-10, -448.0, 448.0, fuse_silu_and_mul=True)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=torch.tensor(1e-10))
    same(scales, (amax * (1 / torch.tensor(448.0))).squeeze(-1))
    same_bytes(found, fp8(groups * (torch.tensor(448.0) / amax)).flatten(-2))


# Modules


def test_modules():
    """Initial weights, states, copies, what they print, and float64."""
    modules = {
        mamba_ssm.RMSNorm(N): "RMSNorm()",
        fla.FusedRMSNormGated(N): f"FusedRMSNormGated({N}, eps=1e-05, activation=swish)",
        transformers.Qwen3NextRMSNormGated(N): f"Qwen3NextRMSNormGated({N}, eps=1e-06)",
        transformers.MambaRMSNormGated(N): f"MambaRMSNormGated({N}, group_size={N}, eps=1e-06)",
        transformers.Zamba2RMSNormGated(N, GROUP): f"Zamba2RMSNormGated({N}, group_size={GROUP}, eps=1e-06)",
    }
    x, z = random(2, N).double(), random(2, N, seed=1).double()
    for module, text in modules.items():
        assert repr(module) == text
        assert list(module.state_dict()) == ["weight"]
        assert (module.weight == 1).all()
        assert copy.deepcopy(module).double()(x, z).dtype == F64
    bare = fla.FusedRMSNormGated(N, False, activation="sigmoid")
    assert repr(bare) == f"FusedRMSNormGated({N}, elementwise_affine=False, eps=1e-05, activation=sigmoid)"
    assert not list(bare.parameters())
    same(bare(x, z), rms_norm_gated(x, z, None, 1e-5, activation="sigmoid"))
    with pytest.raises(ValueError, match="activation must be 'swish', 'silu' or 'sigmoid', got 'relu'"):
        fla.FusedRMSNormGated(N, activation="relu")
    for call in (mamba_ssm.rmsnorm_fn, fla.rms_norm_gated):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got NoneType"):
            call(None, None, None, None)


def test_gradients_and_compilation():
    """The gradients are those of ``rms_norm_gated`` with each module's flags. One module is compiled."""
    flags = {
        mamba_ssm.RMSNorm(N, 1e-6): {"between": F32},
        fla.FusedRMSNormGated(N, eps=1e-6): {"between": F32},
        transformers.Qwen3NextRMSNormGated(N): {"round_norm": True},
        transformers.Zamba2RMSNormGated(N, GROUP): {
            "round_norm": True,
            "norm_before_gate": False,
            "group_size": GROUP,
        },
    }
    for module, asked in flags.items():
        module.to(BF16)
        found = []
        leaves = [random(4, N, seed=seed).to(BF16).requires_grad_() for seed in range(2)]
        for call in (module, lambda x, z, asked=asked, w=module.weight: rms_norm_gated(x, z, w, **asked)):
            out = call(*leaves)
            found.append([out, *torch.autograd.grad(out.sum(), (*leaves, module.weight))])
        for one, wanted in zip(*found, strict=True):
            same(one, wanted)
    same(torch.compile(module, fullgraph=True, backend="aot_eager")(*leaves), found[0][0])
    torch._dynamo.reset()
