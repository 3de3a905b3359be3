"""``rms_norm_add_rms_norm`` has the bits of a norm, an addition and a norm, on every backend."""

import json
from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm.conformance import golden, oracle
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, covering, dtype_name, operands

SMALL = (33, 128, 1029)


def check(case, agree, between=None, next_eps=None):
    """Compares outputs and all gradients with the oracle's, and calls with `out=` and in place with both."""
    x, residual, weight = operands(case)
    _, _, next_weight = operands(replace(case, seed=2, weight=case.weight and case.residual))
    dtypes = {"x": case.out or case.x, "residual": case.residual_out or case.residual}
    incoming = operands(replace(case, seed=1, data="normal", **dtypes))[:2]
    leaves = [x, residual, weight, next_weight]
    flags = {**case.flags, "round_sum": case.round_sum, "next_eps": next_eps, "between": between}
    dtypes = {"out_dtype": case.out, "residual_dtype": case.residual_out}
    used = (case.eps, case.eps if next_eps is None else next_eps, between, case.weight_offset, case.round_sum)
    wanted = oracle.two_norms(leaves, incoming, *used, case.round_norm, case.out, case.residual_out)

    present = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
    outputs = fusednorm.rms_norm_add_rms_norm(*leaves, case.eps, **flags, **dtypes)
    found = [*outputs, *torch.autograd.grad(outputs, present, incoming)]
    wanted = [array for array, leaf in zip(wanted, [x, x, *leaves], strict=True) if leaf is not None]
    for got, array in zip(found, wanted, strict=True):
        agree(got, torch.from_numpy(array).to(got.dtype), f"{case}, {between}, {next_eps}")

    x, residual, weight, next_weight = (None if leaf is None else leaf.detach() for leaf in leaves)
    out, total = (torch.empty_like(output) for output in outputs)
    given = {"out": out, "residual_out": total, "residual_dtype": case.residual_out}
    fusednorm.rms_norm_add_rms_norm(x, residual, weight, next_weight, case.eps, **flags, **given)
    agree(out, outputs[0], f"{case}, out=")
    agree(total, outputs[1], f"{case}, residual_out=")
    if case.out is None and case.residual_out is None:
        fusednorm.rms_norm_add_rms_norm_(x, residual, weight, next_weight, case.eps, **flags)
        agree(x, outputs[0], f"{case}, in place")
        agree(residual, outputs[1], f"{case}, the sum in place")


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_flags(mode, agree, dtype):
    """Every rounding, with the default between the operations and with float32."""
    between = (None,) if dtype == F64 else (None, F32)
    axes = (between, (True, False), (True, False), (0.0, 1.0), (None, 1e-3), SMALL)
    for passed, round_sum, round_norm, offset, next_eps, hidden in covering(*axes, turn=DTYPES.index(dtype)):
        flags = {"round_sum": round_sum, "round_norm": round_norm, "weight_offset": offset}
        check(replace(Case(hidden=hidden).of(dtype), **flags), agree, passed, next_eps)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("x", [BF16, F16, F32, F64], ids=dtype_name)
def test_mixed_dtypes(mode, agree, x):
    for residual, weight, out, stored in covering((BF16, F32), (None, F16, F32), (None, F32), (None, F16)):
        check(Case(4, 45, x, residual, weight, out, residual_out=stored), agree)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("data", ["nan row", "inf row", "zeros", "subnormal", "overflowing", "ties"])
def test_data(mode, agree, data):
    for dtype in (BF16, F16, F32):
        check(Case(hidden=100, data=data).of(dtype), agree)


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_separate_calls(mode, agree, dtype):
    """A norm, an addition of torch's own, and a norm."""
    for hidden in SMALL:
        x, residual, weight = operands(Case(hidden=hidden).of(dtype))
        y, total = fusednorm.rms_norm_add_rms_norm(x, residual, weight, weight, 1e-5, next_eps=1e-6)
        sums = fusednorm.rms_norm(x, weight, 1e-5) + residual
        agree(total, sums, f"the sum of {hidden}")
        agree(y, fusednorm.rms_norm(sums, weight, 1e-6), f"rows of {hidden}")


VECTORS = json.loads(golden.TWO_NORMS.read_text())


@pytest.mark.promise("golden vectors")
@pytest.mark.parametrize("index", range(len(VECTORS)))
def test_golden_vectors(mode, agree, index):
    """Outputs and gradients of every backend, from stored inputs."""
    for name, tensor in golden.results_of_two_norms(VECTORS[index]).items():
        agree(tensor.detach(), golden.decoded(VECTORS[index]["expected"][name]), f"vector {index}, {name}")
