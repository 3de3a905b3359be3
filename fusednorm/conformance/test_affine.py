"""A bias, weights and biases of heads, and a scaled x have the bits of plain operations, on every backend."""

from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm.conformance import oracle
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, check_call, covering, dtype_name, operands

#: Heads of the weight and of the bias: None for a row of all heads, 0 for no operand.
HEADS = (None, 3)


def check(case, agree, weight_heads, bias_heads, x_scale=1.0):
    """Compares outputs and all gradients with the oracle's, and calls with given outputs and in place with both."""
    x, residual = (None if t is None else t.unflatten(0, (-1, 3)) for t in operands(case)[:2])
    weight, bias = (
        None if heads == 0 else torch.stack([operands(replace(case, seed=seed + k))[2] for k in range(heads or 1)])
        for heads, seed in ((weight_heads, 10), (bias_heads, 20))
    )
    weight, bias = (t if t is None or len(t) > 1 else t[0] for t in (weight, bias))
    dtypes = {"x": case.out or case.x, "residual": case.residual_out or case.residual}
    d_out, d_total, _ = operands(replace(case, seed=1, data="normal", **dtypes))
    incoming = [t.unflatten(0, (-1, 3)) for t in ((d_out, d_total) if residual is not None else (d_out,))]
    flags = {"weight_offset": case.weight_offset, "round_norm": case.round_norm}
    asked = {"out_dtype": case.out}
    function, given = "rms_norm", (x, weight, bias)
    if residual is not None:
        function, given = "fused_add_rms_norm", (x, residual, weight, bias)
        flags |= {"round_sum": case.round_sum, "x_scale": x_scale}
        asked |= {"residual_dtype": case.residual_out}
    about = f"{case}, heads of the weight {weight_heads}, of the bias {bias_heads}, x_scale {x_scale}"
    wanted = oracle.affine((x, residual, weight, bias), incoming, case.eps, **flags, **asked)
    check_call(agree, function, given, incoming, wanted, about, asked, eps=case.eps, **flags)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
@pytest.mark.left_out("triton", but=["bfloat16"])
def test_bias_and_heads(mode, agree, dtype):
    """Every rounding, with a row for all heads, a row for each, and none."""
    axes = ((True, False), (True, False), (0.0, 1.0), (*HEADS, 0), (*HEADS, 0), (1.0, 0.22), (128, 1029))
    for round_sum, round_norm, offset, weight_heads, bias_heads, x_scale, hidden in covering(
        *axes, turn=DTYPES.index(dtype)
    ):
        flags = {"round_sum": round_sum, "round_norm": round_norm, "weight_offset": offset}
        case = replace(Case(6, hidden).of(dtype), **flags)
        check(case, agree, weight_heads, bias_heads, x_scale)
        check(replace(case, residual=None), agree, weight_heads, bias_heads)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("x", [BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_cpu")
@pytest.mark.left_out("triton_ptx", but=["bfloat16"])
def test_mixed_dtypes(mode, agree, x):
    axes = ((BF16, F32), (F16, F32), (None, F32), (None, F16), HEADS)
    for residual, weight, out, stored, heads in covering(*axes):
        check(Case(6, 45, x, residual, weight, out, residual_out=stored), agree, heads, heads, 0.5)


@pytest.mark.promise("same bits")
@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
def test_many_rows(mode, agree):
    """Blocks of rows whose last one is shorter, in the sums of the gradients of heads."""
    check(Case(3 * 515, 24).of(BF16), agree, 3, 3)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("round_sum", [True, False])
@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
def test_long_rows(mode, agree, round_sum):
    """Rows that a GPU reads twice."""
    check(replace(Case(3, 20_000).of(BF16), round_sum=round_sum), agree, 3, 3, 0.22)


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out(but=["bfloat16"])
def test_each_head_is_a_norm_of_its_own(mode, agree, dtype):
    x, residual, weight = operands(Case(6, 128).of(dtype))
    heads = torch.stack((weight, weight * 2, weight * 3))
    y, total = fusednorm.fused_add_rms_norm(x.view(2, 3, 128), residual.view(2, 3, 128), heads)
    for k in range(3):
        wanted = fusednorm.fused_add_rms_norm(x[k::3], residual[k::3], heads[k])
        agree(y[:, k], wanted[0], f"head {k}")
        agree(total[:, k], wanted[1], f"the sum of head {k}")


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("hidden", [128, 1500])
@pytest.mark.left_out
def test_heads_do_not_depend_on_the_number_of_threads(mode, agree, threads, hidden):
    """A thread's first row belongs to any head: short rows, and rows that overlap."""
    x, residual, weight = operands(Case(3 * 101, hidden).of(BF16))
    heads = torch.stack((weight, weight * 2, weight * 3))
    x, residual = x.view(101, 3, hidden), residual.view(101, 3, hidden)
    threads(1)
    wanted, _ = fusednorm.fused_add_rms_norm(x, residual, heads, bias=heads)
    for count in (2, 3):
        threads(count)
        found, _ = fusednorm.fused_add_rms_norm(x, residual, heads, bias=heads)
        agree(found, wanted, f"{count} threads")


@pytest.mark.promise("fused equals unfused")
def test_each_step_is_an_operation_of_its_own(mode, agree):
    """A bias is added to the rounded row where there is no weight, and x is rounded after it was multiplied."""
    x, residual, weight = operands(Case(6, 130).of(BF16))
    wanted = (fusednorm.rms_norm(x).float() + weight.float()).to(BF16)
    agree(fusednorm.rms_norm(x, bias=weight, round_norm=True), wanted, "a bias")
    y, total = fusednorm.fused_add_rms_norm(x, residual, weight, x_scale=0.22)
    wanted = fusednorm.fused_add_rms_norm((x.float() * 0.22).to(BF16), residual, weight)
    agree(y, wanted[0], "a scaled x")
    agree(total, wanted[1], "the sum with a scaled x")
