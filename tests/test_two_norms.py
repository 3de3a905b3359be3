"""``rms_norm_add_rms_norm``: what it refuses, and who sees it."""

import pytest
import torch
from torch.func import vmap
from torch.overrides import TorchFunctionMode

import fusednorm
from fusednorm import rms_norm_add_rms_norm, rms_norm_add_rms_norm_
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands

X, RESIDUAL, WEIGHT = operands(Case(4, 64).of(F32))
LEAF = X.clone().requires_grad_()


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((X, None), {}, TypeError, "residual must be a torch.Tensor, got NoneType; without a residual, call rms_norm"),
        ((X, RESIDUAL, WEIGHT[:5]), {}, ValueError, r"weight must have shape \[64\]"),
        ((X, RESIDUAL, WEIGHT, WEIGHT[:5]), {}, ValueError, r"next_weight must have shape \[64\]"),
        ((X, RESIDUAL, WEIGHT, WEIGHT.double()), {}, TypeError, "next_weight is float64 while x is float32"),
        ((X, RESIDUAL, WEIGHT, 3), {}, TypeError, "next_weight must be a torch.Tensor, got int"),
        ((X, RESIDUAL[:2]), {}, ValueError, "residual must have x's shape"),
        ((X, RESIDUAL), {"eps": "1"}, TypeError, "eps must be a number"),
        ((X, RESIDUAL), {"next_eps": "1"}, TypeError, "next_eps must be a number"),
        ((X, RESIDUAL), {"between": BF16}, TypeError, "between must be None or torch.float32, got torch.bfloat16"),
        ((X.double(), RESIDUAL), {"between": F32}, TypeError, "between is float32 while x is float64"),
        ((X, RESIDUAL), {"out": X[:2]}, ValueError, "out must have x's shape"),
        ((LEAF, RESIDUAL), {"out": X}, RuntimeError, r"rms_norm_add_rms_norm\(\): functions with out="),
    ],
)
def test_what_is_refused_is_named(arguments, options, error, words):
    kept = X.clone()
    with pytest.raises(error, match=words):
        rms_norm_add_rms_norm(*arguments, **options)
    assert torch.equal(X, kept)


def test_in_place_refuses_what_requires_grad():
    with pytest.raises(RuntimeError, match=r"rms_norm_add_rms_norm_\(\): .* call rms_norm_add_rms_norm, or wrap"):
        rms_norm_add_rms_norm_(LEAF, RESIDUAL)
    x, residual = X.clone(), RESIDUAL.clone()
    found = rms_norm_add_rms_norm_(x, residual, WEIGHT)
    assert found[0] is x
    assert found[1] is residual


def test_the_default_dtype_is_that_of_x():
    x, residual, weight = operands(Case(4, 64).of(F16))
    for between in (None, F32):
        y, total = rms_norm_add_rms_norm(x, residual.float(), weight, between=between)
        assert (y.dtype, total.dtype) == (F16, F32)
    rows = fusednorm.rms_norm(x, weight, out_dtype=F32)
    assert same(
        rms_norm_add_rms_norm(x, residual, weight, between=F32),
        fusednorm.fused_add_rms_norm(rows, residual, out_dtype=F16),
    )


def test_gradients_are_derivatives():
    leaves = [t.requires_grad_() for t in (*operands(Case(3, 5).of(F64)), operands(Case(3, 5, seed=1).of(F64))[2])]
    assert torch.autograd.gradcheck(rms_norm_add_rms_norm, leaves)
    assert torch.autograd.gradgradcheck(rms_norm_add_rms_norm, leaves)


def test_compiled_in_one_graph():
    def call(x, residual, weight):
        return rms_norm_add_rms_norm(x, residual, weight, weight, 1e-5, next_eps=1e-6, between=F32, weight_offset=1.0)

    x, residual, weight = operands(Case(4, 64).of(BF16))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(compiled(x, residual, weight), call(x, residual, weight))
    leaves, more = ([t.clone().requires_grad_() for t in (x, residual, weight)] for _ in range(2))
    found, wanted = compiled(*leaves), call(*more)
    assert same(torch.autograd.grad(found, leaves, wanted), torch.autograd.grad(wanted, more, wanted))


def test_a_function_mode_sees_one_call():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        rms_norm_add_rms_norm(X, RESIDUAL, WEIGHT, WEIGHT)
    assert seen == [rms_norm_add_rms_norm]


def test_a_batch_of_calls_is_one_call():
    batched = vmap(lambda x, residual: rms_norm_add_rms_norm(x, residual, WEIGHT, WEIGHT))
    assert same(batched(X, RESIDUAL), rms_norm_add_rms_norm(X, RESIDUAL, WEIGHT, WEIGHT))
