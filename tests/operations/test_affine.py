"""A bias, weights of heads and a scaled x: what is refused, who sees the call, and which path it takes."""

import pytest
import torch
from every_operation import same
from other_backend import registered

import fusednorm
from fusednorm import fused_add_rms_norm, rms_norm
from fusednorm.backends import cpu
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.engine import fast_path
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
    assert not fast_path.backward(cpu, y, None, y, rstd, HEADS[:2], dx, None, dw, db, 0.0)
    assert not fast_path.backward(cpu, y, None, y, rstd, HEADS, dx, None, dw, db[:2], 0.0)
    assert all(t.eq(7).all() for t in (dx, dw, db))
    assert fast_path.backward(cpu, y, None, y, rstd, HEADS, dx, None, dw, db, 0.0)
    assert not any(t.eq(7).all() for t in (dx, dw, db))
