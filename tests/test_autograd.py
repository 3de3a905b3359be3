"""Gradients are the specification's, whatever backend went forward."""

import itertools

import pytest
import torch

import fusednorm

import oracle
from cases import BF16, DTYPES, F16, F32, F64, Case, differing, dtype_name, operands


def bits(tensor):
    return tensor.detach().double().numpy()


def same(actual, expected, what):
    assert not differing(actual.detach().double(), torch.from_numpy(expected)).any(), what


@pytest.mark.parametrize("residual", [None, BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
def test_gradients(mode, x, residual):
    """dx, dresidual and dweight against the oracle, for every rounding, through either output and both."""
    if residual == F64 and x != F64:
        pytest.skip("float64 operands go with a float64 x only")
    for hidden, rows, round_sum, round_norm in itertools.product((5, 1100), (1, 3, 600), (True, False), (True, False)):
        if rows == 600 and hidden == 1100:
            continue
        case = Case(rows=rows, hidden=hidden, x=x, residual=residual, weight=x)
        gx, gresidual, weight = operands(case)
        dy, d_total, _ = operands(Case(rows=rows, hidden=hidden, x=x, residual=residual, weight=x, seed=1))
        leaves = [t.requires_grad_() for t in (gx, gresidual, weight) if t is not None]
        if residual is None:
            y = fusednorm.rms_norm(gx, weight, weight_offset=1.0, round_norm=round_norm)
            gradients = torch.autograd.grad(y, leaves, dy)
        else:
            y, total = fusednorm.fused_add_rms_norm(
                gx, gresidual, weight, weight_offset=1.0, round_sum=round_sum, round_norm=round_norm
            )
            gradients = torch.autograd.grad((y, total), leaves, (dy, d_total), retain_graph=True)
        with torch.no_grad():
            _, _, rstd, h = oracle.forward(gx, gresidual, weight, 1e-6, 1.0, round_sum, round_norm)
            if residual is None:
                d_total = None
            expected = oracle.backward(dy, d_total, h, rstd, weight, 1.0, x, residual)
        for actual, wanted in zip(gradients, (e for e in expected if e is not None), strict=True):
            same(actual, wanted, case)
        if residual is not None:
            only_y = torch.autograd.grad(y, leaves, dy, retain_graph=True)
            with torch.no_grad():
                for actual, wanted in zip(
                    only_y, oracle.backward(dy, None, h, rstd, weight, 1.0, x, residual), strict=True
                ):
                    same(actual, wanted, f"{case}, through y only")
            (only_sum,) = torch.autograd.grad(total, gx, d_total)
            same(only_sum, oracle.round_to(bits(d_total), x), f"{case}, through the sum only")


def test_only_needed_gradients_are_computed(mode):
    x, residual, weight = operands(Case().of(F32))
    weight.requires_grad_()
    y, _total = fusednorm.fused_add_rms_norm(x, residual, weight)
    assert y.requires_grad
    y.sum().backward()
    assert x.grad is None
    assert residual.grad is None
    assert weight.grad is not None


def test_the_formula_is_the_derivative(mode):
    """In float64, against numerical differentiation."""
    x, residual, weight = (t.requires_grad_() for t in operands(Case(rows=2, hidden=5).of(F64)))
    assert torch.autograd.gradcheck(
        lambda *a: fusednorm.fused_add_rms_norm(*a, 1e-3, weight_offset=0.5), (x, residual, weight)
    )
    assert torch.autograd.gradcheck(lambda *a: fusednorm.rms_norm(*a, 1e-3), (x, weight))
