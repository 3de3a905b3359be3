"""A norm before the addition has the bits of plain operations one after the other, on every backend."""

from dataclasses import replace

import pytest

import fusednorm
from fusednorm.conformance import golden, oracle
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, check_call, covering, dtype_name, operands

SMALL = (33, 128, 1029)


def check(case, agree, between=None, next_eps=None):
    """Compares outputs and all gradients with the oracle's, and calls with given outputs and in place with both."""
    next_weight = operands(replace(case, seed=2, weight=case.weight and case.residual))[2]
    d_out, d_total, _ = operands(
        replace(case, seed=1, data="normal", x=case.out or case.x, residual=case.residual_out or case.residual)
    )
    flags = {"between": between, "weight_offset": case.weight_offset, "round_norm": case.round_norm}
    of_both = {"round_sum": case.round_sum, "next_eps": case.eps if next_eps is None else next_eps}
    dtypes = {"out_dtype": case.out, "residual_dtype": case.residual_out}
    for function, last, incoming, more, asked in (
        ("rms_norm_add", (), (d_total,), {}, {"residual_dtype": case.residual_out}),
        ("rms_norm_add_rms_norm", (next_weight,), (d_out, d_total), of_both, dtypes),
    ):
        given = (*operands(case), *last)
        wanted = getattr(oracle, function)(given, incoming, case.eps, **flags, **more, **asked)
        about = f"{function}, {case}, {between}, {next_eps}"
        check_call(agree, function, given, incoming, wanted, about, asked, eps=case.eps, **flags, **more)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out
def test_flags(mode, agree, dtype):
    """Every rounding, with the default between the operations and with float32."""
    between = (None,) if dtype == F64 else (None, F32)
    axes = (between, (True, False), (True, False), (0.0, 1.0), (None, 1e-3), SMALL)
    for passed, round_sum, round_norm, offset, next_eps, hidden in covering(*axes, turn=DTYPES.index(dtype)):
        flags = {"round_sum": round_sum, "round_norm": round_norm, "weight_offset": offset}
        check(replace(Case(hidden=hidden).of(dtype), **flags), agree, passed, next_eps)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("x", [BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.left_out
def test_mixed_dtypes(mode, agree, x):
    for residual, weight, out, stored in covering((BF16, F32), (None, F16, F32), (None, F32), (None, F16)):
        check(Case(4, 45, x, residual, weight, out, residual_out=stored), agree)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("data", ["nan row", "inf row", "zeros", "subnormal", "overflowing", "ties"])
@pytest.mark.left_out
def test_data(mode, agree, data):
    for dtype in (BF16, F16, F32):
        check(Case(hidden=100, data=data).of(dtype), agree)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out("triton_ptx")
@pytest.mark.left_out("cuda", "triton", "triton_cpu", but=["bfloat16"])
def test_long_rows(mode, agree, dtype):
    """Several rows of whole segments, and with a part of one: a backend may work on more than one row at once."""
    for rows, hidden, data in ((4, 1024, "normal"), (5, 3091, "ties"), (6, 2050, "nan row"), (7, 1040, "subnormal")):
        for between in (None, F32):
            case = Case(rows, hidden, data=data, round_norm=rows % 2 == 0, weight_offset=rows % 3 / 2)
            check(case.of(dtype), agree, between)


@pytest.mark.large
@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out
def test_rows_beyond_the_cache(mode, agree, dtype):
    """The operands exceed the caches; new outputs, outputs in place, and each in the other one's place."""
    for hidden, between in ((1024, None), (1024, F32), (3104, None), (1031, F32)):
        x, residual, weight = operands(Case((9 << 20) // (2 * dtype.itemsize * hidden), hidden).of(dtype))
        sums = fusednorm.rms_norm(x, weight, 1e-5, out_dtype=between)
        y, total = fusednorm.fused_add_rms_norm(sums, residual, weight, 1e-6, out_dtype=dtype)
        arguments, flags = (weight, weight, 1e-5), {"next_eps": 1e-6, "between": between}
        outputs = fusednorm.rms_norm_add_rms_norm(x, residual, *arguments, **flags)
        swapped = {"out": residual.clone(), "residual_out": x.clone()}
        given = fusednorm.rms_norm_add_rms_norm(swapped["residual_out"], swapped["out"], *arguments, **flags, **swapped)
        in_place = fusednorm.rms_norm_add_rms_norm_(x, residual, *arguments, **flags)
        for found in (outputs, given, in_place):
            agree(found, (y, total), f"rows and sums of {hidden}, {between}")


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out(but=["bfloat16"])
def test_separate_calls(mode, agree, dtype):
    """A norm, an addition of torch's own, and a norm."""
    for hidden in SMALL:
        x, residual, weight = operands(Case(hidden=hidden).of(dtype))
        y, total = fusednorm.rms_norm_add_rms_norm(x, residual, weight, weight, 1e-5, next_eps=1e-6)
        sums = fusednorm.rms_norm(x, weight, 1e-5) + residual
        agree(total, sums, f"the sum of {hidden}")
        agree(fusednorm.rms_norm_add(x, residual, weight, 1e-5), sums, f"the sum alone of {hidden}")
        agree(y, fusednorm.rms_norm(sums, weight, 1e-6), f"rows of {hidden}")


VECTORS = golden.read(golden.COMPOSITIONS)


@pytest.mark.promise("golden vectors")
@pytest.mark.parametrize("index", range(len(VECTORS)))
@pytest.mark.left_out(but=["0", "3", "6", "9", "20", "23", "30"])
def test_golden_vectors(mode, agree, index):
    golden.compare(VECTORS[index], agree)
