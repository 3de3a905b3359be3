"""Gradients have the specification's bits, on every backend."""

from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm.conformance import oracle
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F16,
    F32,
    F64,
    PAYLOAD,
    Case,
    call,
    covering,
    differentiable,
    dtype_name,
    expected_gradients,
    gradients,
    incoming,
    operands,
)

pytestmark = pytest.mark.promise("same gradients")


@pytest.mark.parametrize("residual", [None, BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", but=["bfloat16-float32", "float32-float16", "float64-bfloat16"])
@pytest.mark.left_out("cuda", "triton_ptx")
def test_gradients(mode, agree, x, residual):
    """Against the oracle, for every rounding and mix of dtypes, also of outputs, through either output and both."""
    if residual == F64 and x != F64:
        pytest.skip("float64 operands go with a float64 x only")
    dtypes = [None, *DTYPES] if x == F64 else [None, BF16, F16, F32]
    shapes, turn = ((1, 5), (1, 1100), (3, 5), (3, 1100), (600, 5)), DTYPES.index(x) + DTYPES.index(residual or x)
    axes = shapes, dtypes, dtypes, dtypes if residual else [None], (0.0, 1.0), (True, False), (True, False)
    for (rows, hidden), weight, out, stored, offset, round_sum, round_norm in covering(*axes, turn=turn):
        flags = {"weight_offset": offset, "round_sum": round_sum, "round_norm": round_norm, "residual_out": stored}
        case = Case(rows, hidden, x, residual, weight, out, **flags)
        check(case, agree)
        if residual is not None:
            leaves, (dy, d_total) = differentiable(case), incoming(case)
            only_y = gradients(case, dy, None, leaves)
            agree(only_y, expected_gradients(case, leaves, dy, None), f"{case}, through y only")
            (only_sum,) = torch.autograd.grad(call(case, *leaves)[1], leaves[0], d_total)
            agree(only_sum, oracle.round_to(d_total.cpu().double().numpy(), x), f"{case}, through the sum only")


def check(case, agree):
    """Compares all gradients of the case."""
    leaves = differentiable(case)
    dy, d_total = incoming(case)
    wanted = expected_gradients(case, leaves, dy, d_total)
    for index, got in enumerate(gradients(case, dy, d_total, leaves)):
        agree(got, wanted[index], f"{case}, gradient {index}", case, index)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out("triton_cpu", but=["bfloat16-nan row", "float16-ties", "float32-subnormal"])
@pytest.mark.left_out("triton_ptx", but=["bfloat16-*", "float32-subnormal"])
def test_data(mode, agree, dtype, data):
    """Subnormal and infinite values and NaN; rows of zeros with an eps of 0, whose rstd is infinite."""
    for hidden in (5, 100, 1100):
        for eps in (1e-6, 0.0):
            check(Case(hidden=hidden, data=data, eps=eps).of(dtype), agree)
    check(Case(hidden=100, data=data, weight_offset=PAYLOAD).of(dtype), agree)


@pytest.mark.parametrize(("x", "residual"), [(BF16, F16), (F16, BF16)], ids=dtype_name)
@pytest.mark.parametrize(("hidden", "weight"), [(200, None), (2500, F16)], ids=["200", "2500"])
def test_sums_of_numbers_beyond_float16(mode, agree, x, residual, hidden, weight):
    """Where the gradient of the normalised row is greater than all of float16, that of the sum brings it back."""
    case = Case(4, hidden, x, residual, weight)
    leaves = differentiable(case)
    with torch.no_grad():
        for row in leaves[:2]:
            row.mul_(1e-3)
    dy, d_total = incoming(case)
    dy, d_total = (dy.sign() * (120 + 8 * dy.abs())).to(x), (dy.sign() * -60000.0).to(residual)
    wanted = expected_gradients(case, leaves, dy, d_total)
    assert any((rows.abs() > 1e4).any() and rows.isfinite().all() for rows in wanted[:2])
    agree(gradients(case, dy, d_total, leaves), wanted, f"{case}, gradients")


#: Numbers of rows around every border of the sum over rows; blocks of three rows, the last of two, which keep sums from
#: row to row; rows that exceed the registers of a block of threads.
SHAPES = [(rows, 12) for rows in (1, 255, 256, 257, 1000, 4097)]
SHAPES += [(515, 1100), (515, 3072), (515, 9000), (2, 18_432), (2, 40_999)]


@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", of=["*-515-9000"])
@pytest.mark.left_out("triton_ptx", of=["float32-*", "float64-515-*", "float64-1000-12", "float64-25*", "float64-2-*"])
@pytest.mark.left_out("cuda", of=["float*-515-9000", "bfloat16-515-3072", "float64-515-3072"])
def test_shapes(mode, agree, dtype, rows, hidden):
    check(Case(rows, hidden, weight_offset=0.5).of(dtype), agree)


@pytest.mark.left_out("triton", "triton_cpu")
def test_a_hundred_thousand_rows(mode, agree):
    check(Case(rows=100_000, hidden=3).of(BF16), agree)


@pytest.mark.large
@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 4096), (F16, 480), (F32, 1040), (F32, 64)], ids=str)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_large_gradients_are_those_of_the_rows(mode, dtype, hidden):
    """On x86 gradients of 4 MiB and more bypass the cache, in whole vectors and in tails."""
    rows = (4 << 20) // (hidden * dtype.itemsize) + 5
    case = Case(rows=rows, hidden=hidden).of(dtype)
    x, residual, weight = (t.requires_grad_() for t in operands(case))
    dy, d_total, _ = operands(replace(case, seed=1))

    def gradients_of(part):
        outputs = fusednorm.fused_add_rms_norm(x[part], residual[part], weight)
        dx, dweight = torch.autograd.grad(outputs, (x, weight), (dy[part], d_total[part]))
        return dx[part], dweight

    whole, dweight = gradients_of(slice(None))
    for begin in range(0, rows, rows // 3):
        part = slice(begin, begin + rows // 3)
        assert torch.equal(gradients_of(part)[0], whole[part])
    with fusednorm.use_backend("reference"):
        assert torch.equal(gradients_of(slice(None))[1], dweight)


@pytest.mark.left_out("triton_cpu")
def test_accuracy_in_bfloat16(mode):
    """Compares with the formulas in float64, within the sum of the specification's roundings."""
    case = Case(rows=64, hidden=2048).of(BF16)
    leaves = differentiable(case)
    dy, d_total, _ = operands(replace(case, seed=1))
    dx, _, dweight = (t.double() for t in gradients(case, dy, d_total, leaves))
    with torch.no_grad():
        x, residual, g = (t.double() for t in leaves)
        h, dy, d_total = (x + residual).bfloat16().double(), dy.double(), d_total.double()
        rstd = (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        xhat, wdy = h * rstd, dy * g
        d = (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)) * rstd + d_total
        share = dy * xhat
    # A rounding to bfloat16 is 2^-8 of the result. In float32 each is 2^-24 of a term: a sum of 2048 by halving has 11
    # on each path; a mean, a square root, a reciprocal and the products have 10 more, of the largest terms.
    terms = (wdy.abs() + xhat.abs() * (wdy * xhat).abs().mean(-1, keepdim=True)) * rstd + d_total.abs()
    assert ((dx - d).abs() <= 2**-8 * d.abs() * (1 + 2**-8) + 40 * 2**-24 * terms).all()
    # 64 rows: 6 additions on each path.
    weight_error = 2**-8 * share.sum(0).abs() * (1 + 2**-8) + 40 * 2**-24 * share.abs().sum(0)
    assert ((dweight - share.sum(0)).abs() <= weight_error).all()
