"""A bias, weights of heads and a scaled x: what is refused, who sees the call, and which path it takes."""

import itertools

import pytest
import torch
from every_operation import same
from other_backend import registered

import fusednorm
from fusednorm import fused_add_rms_norm, rms_norm
from fusednorm.backends import cpu
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.engine import open_fast_path
from fusednorm.engine.substitutes import Composition

X, RESIDUAL, WEIGHT = (t.view(2, 3, 64) if t.dim() > 1 else t for t in operands(Case(6, 64).of(F32)))
HEADS = torch.stack((WEIGHT, WEIGHT + 1, WEIGHT + 2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rms_norm(X, HEADS[:2]), ValueError, r"weight has two dimensions.* last two \[3, 64\], got \[2, 64\]"),
        (lambda: rms_norm(X[0, 0], HEADS), ValueError, r"weight has two dimensions.* last two \[64\], got \[3, 64\]"),
        (
            lambda: rms_norm(X, bias=HEADS.mT),
            ValueError,
            r"bias has two dimensions.* last two \[3, 64\], got \[64, 3\]",
        ),
    ],
)
def test_what_is_refused_is_named(call, error, words):
    kept = X.clone()
    for _ in range(2):  # the first call opens the fast path
        with pytest.raises(error, match=words):
            call()
        assert torch.equal(X, kept)
        rms_norm(X)


def test_outputs_that_share_memory_with_rows_of_heads_or_a_bias():
    """The last row alone too. The fast path leaves such calls to Python, which refuses them."""
    memory = torch.cat((HEADS, X.view(6, 64)))
    for name in ("weight", "bias"):
        wanted = rms_norm(X[:1], **{name: HEADS})
        for begin in (0, 2, 3):
            kept, out = memory.clone(), memory[begin : begin + 3].view(1, 3, 64)
            for _ in range(2):
                if begin == 3:
                    assert torch.equal(rms_norm(X[:1], **{name: memory[:3]}, out=out), wanted)
                    continue
                with pytest.raises(ValueError, match=f"out shares memory with {name}"):
                    rms_norm(X[:1], **{name: memory[:3]}, out=out)
                assert torch.equal(memory, kept)


@pytest.mark.parametrize("features", [(), ("affine",), ("x_scale",), ("residual_dtype", "affine", "x_scale")], ids=str)
def test_a_backend_of_others(monkeypatch, features):
    """It is given what is around the norm if it knows all of that; else the norm alone. The bits are the same."""
    taken = registered(monkeypatch, features)
    x, residual = X.to(BF16).mT.contiguous().mT, RESIDUAL.to(F16)
    for given, asked in (
        ({"bias": WEIGHT}, ("affine",)),
        ({"weight": HEADS, "bias": HEADS}, ("affine",)),
        ({"weight": WEIGHT, "x_scale": 0.22}, ("x_scale",)),
        ({"weight": HEADS, "x_scale": 0.22}, ("affine", "x_scale")),
        ({"bias": HEADS, "x_scale": 3.0, "residual_dtype": BF16}, ("residual_dtype", "affine", "x_scale")),
    ):
        flags = {"round_norm": True, "weight_offset": 0.5, "out_dtype": F32, **given}
        with fusednorm.use_backend("reference"):
            wanted = fused_add_rms_norm(x, residual, **flags)
        with fusednorm.use_backend("other"):
            taken.clear()
            assert same(fused_add_rms_norm(x, residual, **flags), wanted)
            assert ([operation.features for operation in taken] == [asked]) == (set(asked) <= set(features))
            assert all(set(operation.features) <= set(features) for operation in taken)


def test_compositions_in_words():
    operation = fusednorm.explain(X, RESIDUAL, HEADS, bias=WEIGHT, residual_dtype=F16).operation
    scaled = operation._replace(around=operation.around._replace(scaled=True))
    parts = Composition.parts(scaled, lambda part: not part.features)
    assert Composition.in_words(scaled, parts) == (
        "torch scales x, and torch's operations multiply by the weight and add the bias, and the norm runs in four "
        "kernels, of which one rounds the sum to float16"
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_of_no_heads(backend):
    x, weight, bias = (torch.ones(*shape, 8, requires_grad=True) for shape in ((4, 0), (0,), (0,)))
    with fusednorm.use_backend(backend):
        y = fusednorm.rms_norm(x, weight, bias=bias)
        gradients = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert [gradient.shape for gradient in gradients] == [x.shape, weight.shape, bias.shape]


def test_no_weight_multiplies_by_nothing():
    """With an out dtype too: the rows that a composition begins with."""
    x = X.to(F16)
    assert torch.equal(rms_norm(x, bias=torch.full((64,), -0.0)), rms_norm(x))
    assert rms_norm(x, None, out_dtype=F32).dtype == F32
    assert torch.equal(rms_norm(x, None, out_dtype=F32).to(F16), rms_norm(x))
    assert fusednorm.rms_norm(X.double(), bias=WEIGHT).dtype == F64


@pytest.mark.skipif(not cpu.fast_path, reason="takes the fast path to the C library")
def test_gradients_of_heads_take_the_fast_path():
    """What does not fit is refused."""
    y, dx, dw, db = X.bfloat16(), torch.full_like(X, 7).bfloat16(), torch.full((3, 64), 7.0), torch.full((3, 64), 7.0)
    rstd = torch.ones(2, 3)
    assert not open_fast_path.backward(cpu, y, None, y, rstd, HEADS[:2], dx, None, dw, db, 0.0)
    assert not open_fast_path.backward(cpu, y, None, y, rstd, HEADS, dx, None, dw, db[:2], 0.0)
    assert all(t.eq(7).all() for t in (dx, dw, db))
    assert open_fast_path.backward(cpu, y, None, y, rstd, HEADS, dx, None, dw, db, 0.0)
    assert not any(t.eq(7).all() for t in (dx, dw, db))


def _odd(size, dtype):
    """Numbers, zeros of both signs, infinities, and NaN whose payloads have bits that bfloat16 has not."""
    bits = torch.randn(size, generator=torch.Generator().manual_seed(3)).view(torch.int32)
    bits[::7], bits[3::11] = 0x7F80_0001, 0x7FFF_FFFA
    numbers = bits.view(F32)
    numbers[1::5], numbers[2::13], numbers[5::17] = -0.0, 0.0, float("inf")
    return numbers.to(dtype)


def _same_bits(a, b):
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("size", [100, 1024, 1500, 5000])
@pytest.mark.parametrize("rows", [3, 9])
def test_rows_of_bfloat16_with_parameters_of_float32(size, rows):
    """As in training: all variants have the portable kernels' bits, also where rows are read in another order."""
    x, residual, dy = torch.randn(3, rows, size, generator=torch.Generator().manual_seed(4)).to(BF16)
    regular = torch.randn(size, generator=torch.Generator().manual_seed(5))

    def results(weight, bias, offset):
        leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
        after = [] if bias is None else [bias.clone().requires_grad_()]
        found = [fusednorm.layer_norm(*leaves, *after), rms_norm(*leaves, bias=(*after, None)[0], weight_offset=offset)]
        gradients = [torch.autograd.grad(y, leaves + after, dy) for y in found]
        found += fused_add_rms_norm(x, residual, weight, bias=bias, weight_offset=offset)
        found += fusednorm.fused_add_layer_norm(x, residual, weight, bias, round_norm=True)
        if bias is None:
            found += fusednorm.rms_norm_add_rms_norm(x, residual, weight, regular, weight_offset=offset)
            found += [fusednorm.rms_norm_gated(x, residual, weight)]
        return [*found, *(t for of_one in gradients for t in of_one)]

    of_weights = (regular, _odd(size, F32), _odd(size, BF16))
    of_biases = (None, regular.flip(0), _odd(size, F32), _odd(size, BF16))
    with fusednorm.use_backend("cpu"):
        for weight, bias, offset in itertools.product(of_weights, of_biases, (0.0, 1.0)):
            with cpu.use_variant(cpu.variants()[0]):
                wanted = results(weight, bias, offset)
            for variant in cpu.variants()[1:]:
                with cpu.use_variant(variant):
                    assert all(map(_same_bits, results(weight, bias, offset), wanted)), (variant, weight.dtype)
