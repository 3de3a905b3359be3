"""A bias, weights of heads and a scaled x: what is refused, who sees the call, and which path it takes."""

import itertools

import pytest
import torch
from other_backend import registered
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.backends import cpu
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.engine import choose, fast_path
from fusednorm.engine.substitutes import Composition
from fusednorm.operations import norm

X, RESIDUAL, WEIGHT = (t.view(2, 3, 64) if t.dim() > 1 else t for t in operands(Case(6, 64).of(F32)))
HEADS = torch.stack((WEIGHT, WEIGHT + 1, WEIGHT + 2))


def same(a, b):
    return all(map(torch.equal, a, b))


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


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_operators_have_one_weight_for_all_heads(name):
    """Weights of heads are a composition, which has operators of its own."""
    operator, flags = getattr(torch.ops.fusednorm, name), (1e-6, 0.0, True, False)
    rows = (X,) if name == "rms_norm" else (X, RESIDUAL)
    for _ in range(2):
        operator(*rows, WEIGHT, *flags)  # opens the fast path
        with pytest.raises(ValueError, match=r"weight must have shape \[64\]"):
            operator(*rows, HEADS, *flags)


def separately(x, residual, weight, bias, x_scale, flags):
    """The same call where autograd records it, which the fast path does not take."""
    leaf = x.detach().clone().requires_grad_()
    if residual is None:
        return (rms_norm(leaf, weight, bias=bias, **flags).detach(),)
    found = fused_add_rms_norm(leaf, residual, weight, bias=bias, x_scale=x_scale, **flags)
    return tuple(output.detach() for output in found)


@pytest.mark.skipif(not cpu.fast_path, reason="takes the fast path to the C library")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64), (1, 3, 128), (5, 3, 100), (700, 3, 64), (1, 2, 4096), (9, 2, 4096), (3, 5, 1029), (2, 1, 40000)],
)
def test_c_takes_the_usual_calls(monkeypatch, threads, shape):
    before = torch.get_num_threads()
    for dtype, (weighted, biased), flags in itertools.product(
        (BF16, F16, F32, F64),
        (("heads", "heads"), ("row", "row"), ("heads", None), (None, "row"), ("heads", "row"), ("row", None)),
        ({}, {"weight_offset": 1.0, "round_norm": True}),
    ):
        tokens, heads, hidden = shape
        x, residual, _ = operands(Case(tokens * heads, hidden).of(dtype))
        rows = torch.stack([operands(Case(1, hidden, seed=k).of(dtype))[2] for k in range(2 * heads)])
        of = {"heads": slice(heads), "row": 0}
        weight = None if weighted is None else rows[of[weighted]]
        bias = None if biased is None else rows.flip(0)[of[biased]]
        x, residual = x.view(shape), residual.view(shape)
        for r, x_scale in ((None, 1.0), (residual, 1.0), (residual, 0.22)):
            wanted = separately(x, r, weight, bias, x_scale, flags)
            with monkeypatch.context() as patch, fusednorm.use_backend("cpu"):
                rms_norm(x)  # opens the fast path
                patch.setattr(norm, "beyond_fast_path", None)
                torch.set_num_threads(threads)
                if r is None:
                    assert torch.equal(rms_norm(x, weight, bias=bias, **flags), wanted[0])
                    assert torch.equal(rms_norm_(x.clone(), weight, bias=bias, **flags), wanted[0])
                else:
                    options = {"bias": bias, "x_scale": x_scale, **flags}
                    assert same(fused_add_rms_norm(x, r, weight, **options), wanted)
                    assert same(fused_add_rms_norm_(x.clone(), r.clone(), weight, **options), wanted)
                torch.set_num_threads(before)


def test_calls_beyond_the_fast_path(monkeypatch):
    """Rows in two levels, and results of another dtype: a call of a backend, which plain operations do not serve."""
    memory = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (BF16, F64):
        x, residual = (memory.to(dtype)[:, begin : begin + 3] for begin in (0, 6))
        for weight, bias, x_scale in (
            (HEADS, WEIGHT, 1.0),
            (None, HEADS, 0.22),
            (WEIGHT, None, 3.0),
            (HEADS, None, 1.0),
        ):
            flags = {"round_norm": True, "weight_offset": 0.5, "out_dtype": F32}
            wanted = separately(x, residual, weight, bias, x_scale, flags)
            alone = separately(x, None, weight, bias, 1.0, flags) if x_scale == 1.0 else None
            with monkeypatch.context() as patch:
                patch.setattr(norm, "_composed", None)
                assert same(fused_add_rms_norm(x, residual, weight, bias=bias, x_scale=x_scale, **flags), wanted)
                if alone is not None:
                    assert torch.equal(rms_norm(x, weight, bias=bias, **flags), *alone)


@pytest.mark.skipif(not cpu.fast_path, reason="takes the fast path to the C library")
def test_large_outputs(monkeypatch):
    """Outputs that bypass the caches, and rows that leave a weight and a bias as float no room in them."""
    for dtype, rows, hidden in ((BF16, 1030, 4096), (F32, 1030, 4096), (BF16, 9, 2100), (F16, 9, 9000)):
        x, residual, weight = operands(Case(rows, hidden).of(dtype))
        wanted = separately(x, residual, weight, weight, 0.5, {})
        monkeypatch.setattr(norm, "beyond_fast_path", None)
        assert same(fused_add_rms_norm(x, residual, weight, bias=weight, x_scale=0.5), wanted)
        monkeypatch.undo()


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
        rows = flags.pop("weight", None), flags.pop("bias", None), flags.pop("x_scale", 1.0)
        wanted = separately(x, residual, *rows, flags)
        options = dict(zip(("weight", "bias", "x_scale"), rows, strict=True)) | flags
        with fusednorm.use_backend("reference"):
            assert same(fused_add_rms_norm(x, residual, **options), wanted)
        with fusednorm.use_backend("other"):
            taken.clear()
            assert same(fused_add_rms_norm(x, residual, **options), wanted)
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


@pytest.mark.parametrize("round_sum", [True, False])
def test_what_is_kept_for_gradients(round_sum):
    """What the norm alone keeps, the weight and the bias, and no rows of float32."""
    x, residual, heads = X.bfloat16().requires_grad_(), RESIDUAL.bfloat16(), HEADS.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.shape)) or t, lambda t: t):
        y, total = fused_add_rms_norm(x, residual, heads, bias=HEADS, x_scale=0.5, round_sum=round_sum)
    numbers = [(F32, torch.Size()), (F32, X.shape[:-1])]  # the factor, and rstd
    rows = [(BF16, X.shape)] * (1 if round_sum else 2)
    assert sorted(saved, key=str) == sorted([*numbers, (F32, HEADS.shape), (F32, HEADS.shape), *rows], key=str)
    # A gradient of the sum alone, and none of the rows.
    assert torch.autograd.grad(y.sum() + total.sum(), heads, retain_graph=True)[0].shape == HEADS.shape
    (dx,) = torch.autograd.grad(total.sum(), x)
    assert dx.eq(0.5).all()


def test_rows_in_two_levels_in_place():
    """Heads of a tensor of q, k and v."""
    qkv = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(0))
    kept = qkv.clone()
    wanted = rms_norm(kept[:, 3:6], HEADS, bias=WEIGHT)
    assert rms_norm_(qkv[:, 3:6], HEADS, bias=WEIGHT).data_ptr() == qkv[:, 3:6].data_ptr()
    assert torch.equal(qkv[:, 3:6], wanted)
    assert torch.equal(qkv[:, :3], kept[:, :3])
    assert torch.equal(qkv[:, 6:], kept[:, 6:])


def test_no_weight_multiplies_by_nothing():
    """With an out dtype too: the rows that a composition begins with."""
    x = X.to(F16)
    assert torch.equal(rms_norm(x, bias=torch.full((64,), -0.0)), rms_norm(x))
    assert rms_norm(x, None, out_dtype=F32).dtype == F32
    assert torch.equal(rms_norm(x, None, out_dtype=F32).to(F16), rms_norm(x))
    assert fusednorm.rms_norm(X.double(), bias=WEIGHT).dtype == F64


@pytest.mark.skipif(bool(cpu.unavailable()), reason="needs the C library")
@pytest.mark.parametrize("round_sum", [True, False])
def test_gradients_in_one_call_of_c(monkeypatch, round_sum):
    """Of rows of any kind, by the fast path and by Python, with threads; a mode sees operators."""
    generator = torch.Generator().manual_seed(3)
    memory = torch.randn(4, 300, 3, 600, generator=generator).bfloat16()
    x, residual, d, d_total = (t[:, :, 40:552] for t in memory)
    weight, bias = memory[0, 0, :, :512], memory[1, 0, :, :512].contiguous()
    for rows, threads in itertools.product((300, 5), (1, 3)):
        for w, b in ((weight, bias), (weight, None), (None, bias), (weight[0], bias[0]), (weight[:1], None)):
            shape = (rows, 1 if w is not None and len(w) == 1 else 3, 512)
            given = [t[:rows, : shape[1]] for t in (x, residual)]
            leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (*given, w, b)]
            wanted_of = [leaf for leaf in leaves if leaf is not None]
            incoming = [t[:rows, : shape[1]] for t in (d, d_total)]
            before = torch.get_num_threads()
            torch.set_num_threads(threads)

            def outputs(leaves=leaves):
                return fused_add_rms_norm(*leaves[:3], bias=leaves[3], round_sum=round_sum, weight_offset=0.5)

            with monkeypatch.context() as patch:
                patch.setattr(cpu, "KNOWS", cpu.KNOWS - {"affine_backward"})
                patch.setattr(choose, "_selected", {})
                wanted = torch.autograd.grad(outputs(), wanted_of, incoming)
            with fusednorm.use_backend("cpu"), monkeypatch.context() as patch:
                found, calls = [], outputs()
                for again in (False, True):
                    found.append(torch.autograd.grad(calls, wanted_of, incoming, retain_graph=True, create_graph=again))
                with FlopCounterMode(display=False):
                    found.append(torch.autograd.grad(calls, wanted_of, incoming, retain_graph=True))
                patch.setattr(fast_path, "backward", lambda *_: False)
                found.append(torch.autograd.grad(calls, wanted_of, incoming))
            torch.set_num_threads(before)
            for way, got in enumerate(found):
                assert all(map(torch.equal, got, wanted)), (way, shape)


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
