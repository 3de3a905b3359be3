"""LayerNorm and modulation beside torch's formulas; the kit compares them with the oracle."""

import itertools

import pytest
import torch

import fusednorm
from fusednorm import fused_add_layer_norm, layer_norm, layer_norm_quant, modulate
from fusednorm.quantizations import VLLM_INT8_TOKEN_CPU
from fusednorm.reference import modulation

from fast_calls import close_fast_path

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
X, RESIDUAL = torch.randn(2, 5, 7, 96, generator=torch.Generator().manual_seed(0))
WEIGHT, BIAS = torch.randn(2, 96, generator=torch.Generator().manual_seed(1))
torchs = torch.nn.functional.layer_norm


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("mean", [0.0, 3.0, -300.0])
@pytest.mark.parametrize(("size", "depth"), [(96, 7), (1024, 10), (1100, 11)])
def test_the_error_is_within_the_bound(mean, size, depth):
    """Of docs/spec.md, section 12; both roundings of the affine step are added."""
    u = 2.0**-24
    rows, weight, bias = torch.randn(72, size, generator=torch.Generator().manual_seed(0)).split((70, 1, 1))
    x = rows + mean
    exact = x.double() - x.double().mean(-1, keepdim=True)
    rstd = (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    n, shift = exact * rstd, (depth + 1) * u * x.double().abs().mean(-1, keepdim=True) * rstd
    of_n = shift + ((depth + 13) / 2 * u + shift**2 / 2) * n.abs()
    wanted = n * weight.double() + bias.double()
    bound = of_n * weight.double().abs() + u * (n * weight.double()).abs() + u * wanted.abs()
    assert ((layer_norm(x, weight[0], bias[0]) - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_roundings_are_torchs(dtype):
    """torch too rounds 16 bits once, so that only rows whose float32 lies at a tie differ."""
    x, residual, weight, bias = (t.to(dtype) for t in (X, RESIDUAL, WEIGHT, BIAS))
    wanted = torchs(x + residual, (96,), weight, bias)
    y, total = fused_add_layer_norm(x, residual, weight, bias)
    assert same(total, x + residual)
    assert (y != wanted).float().mean() < 0.01
    assert same(y, layer_norm(total, weight, bias))


def test_constant_rows():
    """Those of 16 bits are exactly the bias; of float32 the difference from a rounded mean is noise."""
    for dtype in (BF16, F16):
        rows = torch.full((3, 1000), 1001.0 if dtype == F16 else 1e6, dtype=dtype)
        bias = torch.arange(1000).to(dtype)
        assert same(layer_norm(rows, None, bias), bias.expand(3, 1000))
    noise = layer_norm(torch.full((1, 1000), 1e6 + 0.3)).abs().max()
    assert 0 < noise <= 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_alone(value):
    x = X.clone()
    x[1, 2, 3] = value
    found = layer_norm(x, WEIGHT, BIAS)
    assert found[1, 2].isnan().all()
    found[1, 2] = layer_norm(X, WEIGHT, BIAS)[1, 2]
    assert same(found, layer_norm(X, WEIGHT, BIAS))


def test_steps_in_sequence():
    y = layer_norm(X.to(BF16), WEIGHT, BIAS)
    numbers, scale = layer_norm_quant(X.to(BF16), WEIGHT, BIAS, quantization=VLLM_INT8_TOKEN_CPU)
    wanted = fusednorm.quantize(y, VLLM_INT8_TOKEN_CPU)
    assert same(numbers, wanted[0])
    assert same(scale, wanted[1])


def test_modules_are_torchs():
    for arguments in ({}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3}):
        ours, theirs = fusednorm.LayerNorm((7, 96), **arguments), torch.nn.LayerNorm((7, 96), **arguments)
        for t in theirs.parameters():
            torch.nn.init.normal_(t)
        ours.load_state_dict(theirs.state_dict())
        assert isinstance(ours, torch.nn.LayerNorm)
        assert repr(ours) == repr(theirs)
        torch.testing.assert_close(ours(X), theirs(X), rtol=1e-5, atol=1e-5)  # the bound of the rows above is 5e-6
    both = fusednorm.AddLayerNorm(96, weight_offset=1.0, round_sum=False)
    assert repr(both).endswith("weight_offset=1.0, round_sum=False)")
    y, total = both(X, RESIDUAL)
    assert same(y, layer_norm(X + RESIDUAL))
    assert same(total, X + RESIDUAL)
    assert both(X)[1] is X
    both.register_forward_pre_hook(lambda module, inputs: inputs[:1])
    with pytest.raises(RuntimeError, match="a forward pre-hook of AddLayerNorm was given 2 inputs and returned 1"):
        both(X, RESIDUAL)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_modulation_in_steps_is_torchs(dtype):
    """As diffusion transformers write it: each operation rounded to the rows' dtype."""
    y, scale, shift = (t.to(dtype) for t in (X, RESIDUAL[:, :1], RESIDUAL[:, 1:2]))
    wanted = y * (1 + scale) + shift
    assert same(modulate(y, scale, shift, round_steps=True), wanted)
    assert same(modulate(y, scale[:, 0], shift.expand_as(y), round_steps=True), wanted)
    once = (y.double() * (1 + scale.double()) + shift.double()).to(dtype)
    assert (modulate(y, scale, shift) != once).float().mean() <= (0.001 if dtype in (BF16, F16) else 1)


def test_gradients_of_a_sample_are_sums_over_its_rows():
    y, scale, shift = (t.to(BF16).requires_grad_() for t in (X, RESIDUAL[:, 0], RESIDUAL[:, 1]))
    d = RESIDUAL.to(BF16)
    found = torch.autograd.grad(modulate(y, scale, shift), (y, scale, shift), d)
    rows = [t.to(F32) for t in d.unbind(1)]
    halved = [rows[0] + rows[4], rows[1] + rows[5], rows[2] + rows[6], rows[3]]
    assert same(found[2], ((halved[0] + halved[2]) + (halved[1] + halved[3])).to(BF16))
    assert found[1].shape == scale.shape
    inputs = [t.detach().double()[:2, :2].requires_grad_() for t in (X, RESIDUAL)]
    per_sample = RESIDUAL[:2, 3].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: modulate(t[0], t[2], t[1]), (*inputs, per_sample))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_samples_of_several_lengths(dtype, fast, monkeypatch):
    """Rows, samples, and one sample of all rows, also side by side: the formula's bits, in both passes."""
    modulate(*torch.ones(3, 1, 1))
    if not fast:
        close_fast_path(monkeypatch)
    generator = torch.Generator().manual_seed(5)
    for shape in ((3, 300, 2, 70), (2, 1, 5, 33), (1, 1, 1, 64)):
        first, *_, size = shape
        # As they are passed, and as the formula takes them: without dimensions of one element for rows of a sample.
        of = [(shape, shape), ((first, 1, 1, size), (first, size)), ((*shape[:2], size),) * 2, ((size,),) * 2]
        for (of_scale, scale_of), (of_shift, shift_of) in itertools.product(of, of):
            y, d = torch.randn(2, *shape, generator=generator).to(dtype)
            scale, shift = (torch.randn(one, generator=generator).to(dtype) for one in (of_scale, of_shift))
            leaves = [t.clone().requires_grad_() for t in (y, scale, shift)]
            given = y, scale.reshape(scale_of), shift.reshape(shift_of)
            found = modulate(*leaves)
            assert torch.equal(found, modulation.modulated(*given, False, None)[0])
            assert torch.equal(modulate(y, scale, shift), found)
            wanted = modulation.modulated_gradients(d, *given, False, [True] * 3)
            for a, b in zip(torch.autograd.grad(found, leaves, d), wanted, strict=True):
                assert torch.equal(a, b.reshape(a.shape))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: modulate(X, RESIDUAL[:, :2], RESIDUAL),
            ValueError,
            r"scale must have the shape of y \[5, 7, 96\], or",
        ),
        (  # as the caller has it, and not without the dimension of one row
            lambda: modulate(X, RESIDUAL[:3, :1], RESIDUAL),
            ValueError,
            r"scale must have the shape of y \[5, 7, 96\], or \[5, 96\] for all rows of a sample, got \[3, 1, 96\]",
        ),
        (lambda: modulate(X, RESIDUAL, RESIDUAL[..., :5]), ValueError, "shift must have the shape of y"),
        (lambda: modulate(X, RESIDUAL.double(), RESIDUAL), TypeError, "scale is float64 while y is float32"),
        (lambda: modulate(X, 1.0, RESIDUAL), TypeError, "scale must be a torch.Tensor"),
        (lambda: layer_norm(X, WEIGHT, BIAS[:4]), ValueError, r"bias must have shape \[96\]"),
        (lambda: layer_norm(X, WEIGHT, BIAS, "no"), TypeError, "eps must be a number"),
        (lambda: fused_add_layer_norm(X, None, WEIGHT), TypeError, "residual must be a torch.Tensor"),
        (lambda: fused_add_layer_norm(X, RESIDUAL[:2], WEIGHT), ValueError, "residual must have"),
    ],
)
def test_bad_operands(call, error, words):
    with pytest.raises(error, match=words):
        call()
