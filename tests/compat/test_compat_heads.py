"""Adapters of other libraries' rotations and norms of heads: each has the bits of its formula in plain torch.

Every step of a rotation is IEEE's. Of norms the sum and the root are not, so these formulas take heads whose squares
add up exactly, and divide by a root in two operations.
"""

import itertools
import re

import pytest
import torch

import fusednorm
from fusednorm import l2_norm, qk_norm_rope, rms_norm
from fusednorm.compat import fla, flashinfer, mamba_ssm, sgl_kernel, vllm
from fusednorm.conformance.cases import BF16, F16, F32, F64, dtype_name

from compat_bounds import same

ROWS, HEADS, KEYS, SIZE, PAIRS, PLACES, EPS = 7, 4, 2, 64, 24, 50, 1e-5

dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
neox = pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "pairs"])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(x, cos, sin, is_neox):
    """Heads of [..., H, D] by tables of [..., K], in float32, rounded once."""
    cos, sin, wide = cos.float()[..., None, :], sin.float()[..., None, :], x.float()
    pairs = cos.shape[-1]
    if is_neox:
        a, b = wide[..., :pairs], wide[..., pairs : 2 * pairs]
        both = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = wide[..., : 2 * pairs : 2], wide[..., 1 : 2 * pairs : 2]
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((both, wide[..., 2 * pairs :]), -1).to(x.dtype)


def of(dtype, *rows):
    """q, k, a cache of cosines and sines, and positions."""
    q, k = random(*rows, HEADS, SIZE).to(dtype), random(*rows, KEYS, SIZE, seed=1).to(dtype)
    return q, k, random(PLACES, 2 * PAIRS, seed=2), torch.randint(PLACES, rows)


@dtypes
@neox
@pytest.mark.parametrize("rows", [(ROWS,), (3, ROWS)], ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("cache_dtype", [F32, None], ids=dtype_name)
def test_vllms_rotation(dtype, is_neox, rows, flat, cache_dtype):
    """Also from a dimension on, back again, and without a key."""
    q, k, cache, positions = of(dtype, *rows)
    cache = cache.to(cache_dtype or dtype)
    cos, sin = cache[positions].chunk(2, -1)
    for first, inverse, with_key in itertools.product((0, 10), (False, True), (True, False)):
        given = [x.flatten(-2).clone() if flat else x.clone() for x in (q, k)]
        key = given[1] if with_key else None
        assert vllm.rotary_embedding(positions, given[0], key, SIZE, cache, is_neox, first, inverse) is None
        for x, found in zip((q, k), given, strict=False):
            new = rotated(x[..., first:], cos, -sin if inverse else sin, is_neox)
            wanted = torch.cat((x[..., :first], new), -1)
            same(found.view(x.shape), wanted if x is q or with_key else x)


@dtypes
@neox
def test_flashinfers_and_sglangs_rotation(dtype, is_neox):
    q, k, cache, positions = of(dtype, ROWS)
    cos, sin = cache[positions].chunk(2, -1)
    wanted = [rotated(x, cos, sin, is_neox).flatten(1) for x in (q, k)]
    new = flashinfer.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), SIZE, cache, is_neox)
    for x, y in zip(new, wanted, strict=True):
        same(x, y)
    for peer in (flashinfer, sgl_kernel):
        given = q.flatten(1).clone(), k.flatten(1).clone()
        assert peer.apply_rope_with_cos_sin_cache_inplace(positions.int(), *given, SIZE, cache, is_neox) is None
        for x, y in zip(given, wanted, strict=True):
            same(x, y)


@dtypes
@neox
def test_vllms_fused_norm_and_rotation(dtype, is_neox):
    """v stays, and nothing is rounded before the rotation. Weights are powers of two: vLLM has another order."""
    integers = torch.randint(-8, 9, (ROWS, HEADS + 2 * KEYS, SIZE), generator=torch.Generator().manual_seed(0))
    qkv, (_, _, cache, positions) = integers.to(dtype), of(dtype, ROWS)
    weights = [torch.exp2(torch.randint(-2, 3, (SIZE,)).float()).to(dtype) for _ in range(2)]
    cos, sin = cache[positions].chunk(2, -1)
    found = qkv.flatten(1).clone()
    heads = HEADS, KEYS, KEYS, SIZE
    assert vllm.fused_qk_norm_rope(found, *heads, EPS, *weights, cache, is_neox, positions) is None
    wide = qkv.float()
    n = wide * (1 / (wide.square().mean(-1, keepdim=True) + EPS).double().sqrt().float())
    q, k, _ = n.split([HEADS, KEYS, KEYS], 1)
    new = [rotated(x * w.float(), cos, sin, is_neox).to(dtype) for x, w in zip((q, k), weights, strict=True)]
    same(found.view(qkv.shape), torch.cat((*new, qkv[:, HEADS + KEYS :]), 1))


# FLA


@dtypes
@neox
def test_flas_rotation(dtype, is_neox):
    """With offsets for all and for each sequence, also before the tables, and with sequences one after the other."""
    x, _, cache, _ = of(dtype, 3, ROWS)
    cos, sin = cache.to(dtype).chunk(2, -1)
    none = torch.zeros(1, PAIRS, dtype=dtype)
    longer = [torch.cat((none.expand(5, -1), t, none.expand(20, -1))) for t in (cos, sin)]
    offsets = torch.tensor([0, -4, PLACES - 2])
    rows = torch.arange(ROWS)
    for given, positions in ((0, rows), (9, rows + 9), (offsets, rows + offsets[:, None])):
        tables = [t[positions + 5] for t in longer]
        wanted = rotated(x, *tables, is_neox)
        same(fla.rotary_embedding(x, cos, sin, not is_neox, False, given), wanted)
        copy = x.clone()
        assert fla.rotary_embedding(copy, cos, sin, not is_neox, True, given) is copy
        same(copy, wanted)
    packed, ends = x.view(1, 3 * ROWS, HEADS, SIZE), torch.tensor([0, 4, 5, 3 * ROWS])
    positions = torch.cat((torch.arange(4), torch.arange(1), torch.arange(3 * ROWS - 5)))
    for given, more in ((3, 3), (offsets, offsets.repeat_interleave(ends.diff()))):
        tables = [t[positions + more + 5] for t in longer]
        found = fla.rotary_embedding(packed, cos, sin, not is_neox, seqlen_offsets=given, cu_seqlens=ends)
        same(found, rotated(packed, *tables, is_neox))


@dtypes
@neox
def test_flas_module(dtype, is_neox):
    """The tables are as long as is needed, and in q's dtype."""
    module = fla.RotaryEmbedding(2 * PAIRS, 500.0, interleaved=not is_neox)
    q, k, *_ = of(dtype, 3, ROWS)
    frequencies = 1 / 500.0 ** (torch.arange(0, 2 * PAIRS, 2).float() / (2 * PAIRS))
    angles = torch.outer(torch.arange(40.0), frequencies)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    offsets, ends = torch.tensor([0, 5, 11]), torch.tensor([0, 4, 5, ROWS])
    for arguments in ({}, {"seqlen_offset": 4}, {"seqlen_offset": offsets}, {"seqlen_offset": 2, "max_seqlen": 30}):
        shifted = arguments.get("seqlen_offset", 0)
        for found, x in zip(module(q, k, **arguments), (q, k), strict=True):
            same(found, fla.rotary_embedding(x, cos, sin, not is_neox, seqlen_offsets=shifted))
    for found, x in zip(module(q[:1], k[:1], offsets, ends), (q, k), strict=True):
        same(found, fla.rotary_embedding(x[:1], cos, sin, not is_neox, seqlen_offsets=offsets, cu_seqlens=ends))
    assert not module.state_dict()
    (step,) = fusednorm.contract(module).steps
    assert (step.operation, step.flags) == ("rotate", {} if is_neox else {"interleaved": True})
    assert repr(module) == f"RotaryEmbedding(dim=48, base=500.0, interleaved={not is_neox}, pos_idx_in_fp32=True)"
    of_bfloat16 = fla.RotaryEmbedding(2 * PAIRS, 500.0, interleaved=not is_neox).to(BF16)
    same(of_bfloat16(q, k)[0], fla.rotary_embedding(q, cos, sin, not is_neox))
    rounded = fla.RotaryEmbedding(2 * PAIRS, pos_idx_in_fp32=False).to(BF16)
    one = q[:, :1], k[:, :1]
    same(rounded(*one, 999)[0], rounded(*one, 1000)[0])  # bfloat16 has no 999


def test_gradients_of_flas_module():
    """The tables were made under inference mode."""
    module = fla.RotaryEmbedding(2 * PAIRS)
    q, k, *_ = of(F32, 2, ROWS)
    with torch.inference_mode():
        module(q, k)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    found = torch.autograd.grad(module(*leaves), leaves, (q, k))
    cos, sin = module._tables
    wanted = qk_norm_rope(q, k, cos=cos[:ROWS], sin=-sin[:ROWS], norm=False)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


@dtypes
@pytest.mark.parametrize("size", [64, 256])
def test_flas_l2norm(dtype, size):
    """For these lengths the rows are multiplied by the length's reciprocal alone."""
    x = torch.randint(-8, 9, (ROWS, size), generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = x.float()
    wanted = wide * (1 / (wide.square().sum(-1, keepdim=True) + EPS).double().sqrt().float())
    same(fla.l2norm(x, EPS), wanted.to(dtype))
    same(fla.l2norm(x, EPS, F32), wanted)
    same(fla.l2norm(x), l2_norm(x, 1e-6))


# mamba_ssm


@dtypes
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_mamba_ssms_norm(dtype, with_residual, with_bias):
    x = torch.randint(-8, 9, (ROWS, SIZE), generator=torch.Generator().manual_seed(0)).to(dtype)
    residual = torch.randint(-8, 9, (ROWS, SIZE), generator=torch.Generator().manual_seed(1)) / 32
    residual = residual.to(dtype) if with_residual else None
    weight, bias = random(SIZE).to(dtype), random(SIZE, seed=1).to(dtype) if with_bias else None
    total = x.float() if residual is None else x.float() + residual.float()
    centered = total - total.mean(-1, keepdim=True)
    functions = (mamba_ssm.rms_norm_fn, {}, total), (mamba_ssm.layer_norm_fn, {"is_rms_norm": True}, total)
    for function, more, row in (*functions, (mamba_ssm.layer_norm_fn, {}, centered)):
        wanted = row * (1 / (row.square().mean(-1, keepdim=True) + EPS).double().sqrt().float()) * weight.float()
        wanted = (wanted if bias is None else wanted + bias.float()).to(dtype)
        same(function(x, weight, bias, residual, eps=EPS, **more), wanted)
        y, kept = function(x, weight, bias, residual, eps=EPS, prenorm=True, **more)
        same(y, wanted)
        same(kept, total.to(dtype))
        y, kept = function(x, weight, bias, residual, eps=EPS, prenorm=True, residual_in_fp32=True, **more)
        same(kept, total.to(dtype) if with_residual else total)
    found = mamba_ssm.layernorm_fn(x, weight, bias, x, EPS, 16, False, True)
    same(found, mamba_ssm.rmsnorm_fn(x, weight, bias, x, EPS, 16, False))
    same(mamba_ssm.rms_norm_fn(x.double(), weight, bias, residual_in_fp32=True, prenorm=True)[1], x.double())
    same(mamba_ssm.rms_norm_fn(x, weight, None), rms_norm(x, weight, 1e-6))


# Errors

Q, K, CACHE, AT = random(2, 3, 8), random(2, 1, 8), random(9, 8), torch.arange(2)
COS, SIN = CACHE.chunk(2, -1)
HALVES = fla.RotaryEmbedding(8)


def fused(qkv=None, heads=(1, 1, 1, 8)):
    vllm.fused_qk_norm_rope(Q.flatten(1) if qkv is None else qkv, *heads, EPS, *[torch.ones(8)] * 2, CACHE, True, AT)


def along(offsets=0, ends=None):
    fla.rotary_embedding(Q[None], COS, SIN, seqlen_offsets=offsets, cu_seqlens=ends)


ERRORS = {
    ValueError: [
        (lambda: vllm.rotary_embedding(AT, Q, K, 4, CACHE, True), "query must have rows of heads of 4, got shape"),
        (lambda: vllm.rotary_embedding(AT, Q, K[0], 8, CACHE, True), "k must have q's shape"),
        (lambda: vllm.rotary_embedding(AT, Q, K.flatten(1)[:, :7], 8, CACHE, True), "key must have rows of heads of 8"),
        (lambda: vllm.rotary_embedding(AT + 8, Q, K, 8, CACHE, True), "positions must be 0 to 8"),
        (lambda: vllm.rotary_embedding(AT, Q, K, 8, CACHE, True, 2), "cos must have 1 to 3 columns"),
        (lambda: vllm.rotary_embedding(AT, Q, K, 0, CACHE, True), "query must have rows of heads of 0"),
        (lambda: fused(heads=(1, 1, 2, 8)), "qkv must have rows of 4 heads of 8, 32 elements, got shape [2, 24]"),
        (lambda: sgl_kernel.apply_rope_with_cos_sin_cache_inplace(AT, Q, K, 8, CACHE, True, ()), "a cache of keys and"),
        (lambda: along(-1), "seqlen_offsets must be 0 to 7 for 2 rows and tables of 9, got -1; pass longer tables"),
        (lambda: along(8), "seqlen_offsets must be 0 to 7 for 2 rows and tables of 9, got 8"),
        (lambda: along(0, torch.tensor([0, 3])), "cu_seqlens must end with x's 2 rows, got 3"),
        (lambda: fla.RotaryEmbedding(7), "dim must be even, got 7"),
        (lambda: fla.RotaryEmbedding(8, scale_base=512.0), "scale_base is not supported; leave it out, or"),
        (lambda: mamba_ssm.layer_norm_fn(Q, torch.ones(8), None, weight1=Q), "weight1 is not supported; leave it out"),
        (lambda: mamba_ssm.rms_norm_fn(Q, torch.ones(8), None, x1=Q), "x1 is not supported; leave it out"),
        (lambda: mamba_ssm.rms_norm_fn(Q, torch.ones(8), None, dropout_p=0.1), "dropout_p is not supported"),
        (
            lambda: mamba_ssm.rms_norm_fn(Q, torch.ones(8), None, return_dropout_mask=True),
            "return_dropout_mask is not supported",
        ),
    ],
    TypeError: [
        (lambda: vllm.rotary_embedding(None, Q, K, 8, CACHE, True), "positions must be a torch.Tensor, got NoneType"),
        (lambda: vllm.rotary_embedding(AT, None, K, 8, CACHE, True), "query must be a torch.Tensor, got NoneType"),
        (lambda: vllm.rotary_embedding(AT, Q, K, 8, None, True), "cos_sin_cache must be a torch.Tensor, got NoneType"),
        (lambda: vllm.rotary_embedding(AT.float(), Q, K, 8, CACHE, True), "positions must be int32 or int64"),
        (lambda: flashinfer.apply_rope_with_cos_sin_cache(0, Q, K, 8, CACHE), "positions must be a torch.Tensor"),
        (lambda: flashinfer.apply_rope_with_cos_sin_cache(AT, Q, None, 8, CACHE), "key must be a torch.Tensor"),
        (lambda: fused([1.0]), "qkv must be a torch.Tensor, got list"),
        (lambda: fla.rotary_embedding(None, COS, SIN), "x must be a torch.Tensor, got NoneType"),
        (lambda: mamba_ssm.rms_norm_fn(None, torch.ones(8), None), "x must be a torch.Tensor, got NoneType"),
    ],
    RuntimeError: [
        (lambda: vllm.rotary_embedding(AT, Q.clone().requires_grad_(), K, 8, CACHE, True), "torch.no_grad()"),
        (lambda: vllm.rotary_embedding(AT, Q.clone().requires_grad_(), None, 8, CACHE, True), "out=... arguments"),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *each) for error, calls in ERRORS.items() for each in calls]
)
def test_errors(error, call, message):
    before = Q.clone()
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert torch.equal(Q, before)


def test_wide_heads():
    """What peers refuse: float64."""
    q, k, cache, positions = of(F64, ROWS)
    cos, sin = cache[positions].chunk(2, -1)
    wanted = qk_norm_rope(q, k, cos=cos, sin=sin, norm=False)
    vllm.rotary_embedding(positions, q, k, SIZE, cache, True)
    same(q, wanted[0])
    same(k, wanted[1])
