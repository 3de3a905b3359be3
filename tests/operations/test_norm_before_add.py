"""A norm before the addition: what is refused, who sees the call, and which path it takes."""

from types import SimpleNamespace

import pytest
import torch
from every_operation import same
from other_backend import registered

import fusednorm
from fusednorm import rms_norm_add, rms_norm_add_rms_norm, rms_norm_add_rms_norm_
from fusednorm.calls.call import Before, Flags, operation_of
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.engine import choose
from fusednorm.reference import norm as reference

X, RESIDUAL, WEIGHT = operands(Case(4, 64).of(F32))


def test_what_is_refused_is_named():
    with pytest.raises(TypeError, match="between is float32 while x is float64"):
        rms_norm_add_rms_norm(X.double(), RESIDUAL, between=F32)
    with pytest.raises(TypeError, match="residual_out must have the residual's dtype float32"):
        rms_norm_add(X, RESIDUAL, residual_out=X.half())


def test_a_sum_that_is_a_weight_too():
    """Of one row, which would be written before it is read. The fast path leaves such calls to Python."""
    for _ in range(2):  # the first call opens the fast path
        x, row = X.clone(), X[1].clone()
        rms_norm_add_rms_norm(X, RESIDUAL, WEIGHT, WEIGHT)
        with pytest.raises(ValueError, match="residual shares memory with next_weight"):
            rms_norm_add_rms_norm_(x[0], row, None, row)
        assert same((x, row), (X, X[1]))


def operation(followed=True, residual_dtype=None, between=None):
    flags = Flags(residual_dtype=residual_dtype)
    return operation_of(X, RESIDUAL, None, flags, before=Before(WEIGHT, 1e-6, between, followed))


def test_an_operation_has_the_name_of_its_function():
    assert operation().name == "rms_norm_add_rms_norm"
    assert operation(False).name == "rms_norm_add"
    assert operation().features == ("norm_before_add",)
    assert operation(residual_dtype=F16).features == ("residual_dtype", "norm_before_add")
    assert str(operation(False, between=F32)) == (
        "x float32, weight float32, between float32, residual float32, hidden size 64, on cpu"
    )
    assert operation(between=F32) == operation()  # the same kernel


def test_one_kernel_or_several():
    with fusednorm.use_backend("reference"):
        assert not choose.choose(operation()).composed
    with fusednorm.use_backend("cpu"):
        assert not choose.choose(operation()).composed
        for followed, words in (
            (True, "the first norm apart, and then in four kernels, of which one rounds the sum to float16"),
            (False, "in two kernels, the first norm and then torch's addition"),
        ):
            assert choose.choose(operation(followed, F16)).plan.startswith(words)


@pytest.mark.parametrize("features", [(), ("residual_dtype",), ("norm_before_add", "residual_dtype")], ids=str)
def test_a_backend_of_others(monkeypatch, features):
    """It is given the operations that it knows, and the bits are the same."""
    taken = registered(monkeypatch, features)
    parts = ["rms_norm", "fused_add_rms_norm"]
    for stored, calls in ((None, 1), (F64, 1), (BF16, 2)):
        x, residual = X.double(), RESIDUAL
        arguments = (x, residual, WEIGHT, WEIGHT)
        with fusednorm.use_backend("reference"):
            wanted = rms_norm_add_rms_norm(*arguments, residual_dtype=stored)
            total = rms_norm_add(x, residual, WEIGHT, residual_dtype=stored)
        with fusednorm.use_backend("other"):
            taken.clear()
            assert same(rms_norm_add_rms_norm(*arguments, residual_dtype=stored), wanted)
            known = calls if "residual_dtype" not in features else 1
            names = [operation.name for operation in taken]
            assert names == (["rms_norm_add_rms_norm"] if len(features) == 2 else [parts[0], *known * parts[1:]])
            taken.clear()
            assert torch.equal(rms_norm_add(x, residual, WEIGHT, residual_dtype=stored), total)
            names = [operation.name for operation in taken]
            assert names == (["rms_norm_add"] if len(features) == 2 else parts[:1])


def test_all_parts_are_chosen_before_anything_is_written(monkeypatch):
    """A backend that takes the first norm and not the addition is passed over."""
    monkeypatch.setattr(choose, "_registered", {})
    monkeypatch.setattr(choose, "_selected", {})
    taken = []
    other = SimpleNamespace(DEVICES=("cpu",), unavailable=list, plan=lambda _: "other")
    other.unsuitable = lambda operation: [] if operation.residual is None else ["no additions"]
    other.forward, other.backward = taken.append, reference.backward
    fusednorm.register_backend("other", other)
    out = X.clone()
    refused = pytest.raises(fusednorm.BackendError, match=r"no norm_before_add\n.*no additions")
    with fusednorm.use_backend("other"), refused:
        rms_norm_add_rms_norm(X, RESIDUAL, WEIGHT, out=out)
    assert taken == []
    assert torch.equal(out, X)


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


def test_gradients_of_a_sum_are_rounded_once():
    """float64 to float16; 1 + 2^-11 + 2^-40 is 1 where it is rounded to float32 first."""
    x, residual = X.double().requires_grad_(), RESIDUAL.half().requires_grad_()
    total = rms_norm_add(x, residual, residual_dtype=F64)
    incoming = torch.full_like(total, 1 + 2**-11 + 2**-40)
    assert torch.autograd.grad(total, residual, incoming)[0].eq(1 + 2**-10).all()
