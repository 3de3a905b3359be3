"""Every backend, in every mode, returns the reference's bits: the first promise of docs/spec.md."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusednorm
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F16,
    F32,
    F64,
    PAYLOAD,
    Case,
    Guarded,
    call,
    covering,
    dtype_name,
    expected,
    operands,
)

pytestmark = pytest.mark.promise("same bits")

SIZES = (
    *(1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 111, 127, 128, 129, 192, 255, 256, 257),
    *(500, 511, 513, 576, 768, 769, 896, 1000, 1023, 1024, 1025, 1027, 1029, 1128, 1536, 2047, 2048, 2560, 2880, 3000),
    *(3072, 3584, 4095, 4096, 4097, 5120, 5125, 5137, 5376, 6144, 7168, 8192, 8193, 12288, 16384, 18432, 32768),
    *(pytest.param(hidden, marks=pytest.mark.large) for hidden in (40999, 65536, 131072, 262144)),
)


def check(case, mode, agree):
    """Compares new outputs, `out=`, and calls in place with the reference, all in guarded memory."""
    x, residual, weight = operands(case)
    wanted = {name: t for name, t in zip(("y", "total"), expected(case, mode.backend), strict=True) if t is not None}
    for (name, t), got in zip(wanted.items(), call(case, x, residual, weight), strict=False):
        agree(got, t, f"{case}, new {name}", case, name)

    def compare(memory, about):
        agree([one.tensor for one in memory], wanted.values(), f"{case}, {about}")
        for one in memory:
            one.check()

    memory = [Guarded(case.rows, case.hidden, t.dtype) for t in wanted.values()]
    call(case, x, residual, weight, **dict(zip(("out", "residual_out"), (one.tensor for one in memory), strict=False)))
    compare(memory, "given memory")
    if case.out is not None or case.residual_out is not None:
        return
    memory = [Guarded(case.rows, case.hidden, t.dtype).filled(t) for t in (x, residual) if t is not None]
    rows = [one.tensor for one in memory]
    if residual is None:
        fusednorm.rms_norm_(*rows, weight, case.eps, **case.flags)
    else:
        fusednorm.fused_add_rms_norm_(*rows, weight, case.eps, round_sum=case.round_sum, **case.flags)
    compare(memory, "in place")


@pytest.mark.parametrize("hidden", [980, 1500])
@pytest.mark.left_out("triton_cpu", but=["980"])
def test_order_of_additions(mode, agree, hidden):
    """One large element among ones, at many places: another order of additions loses other ones."""
    x = torch.ones(64, hidden)
    places = torch.arange(64) * 997 % hidden
    x[torch.arange(64), places] = 4096.0
    with fusednorm.use_backend("reference"):
        expected = fusednorm.rms_norm(x, eps=0.0)
    agree(fusednorm.rms_norm(x, eps=0.0), expected, "y")


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.left_out(
    "triton",
    but=[*map(str, (1, 8, 33, 64, 128, 768, 1024, 1025, 1029, 2048, 4097, 5120, 7168, 18432, 40999, 262144))],
)
@pytest.mark.left_out("cuda", but=[*map(str, (1, 33, 64, 1025, 1029, 2048, 4097, 7168, 18432, 40999, 262144))])
@pytest.mark.left_out("triton_ptx", but=["1", "1029", "18432"])
@pytest.mark.left_out("triton_cpu", but=["1", "8", "33", "64", "128", "768"])
def test_sizes(mode, agree, hidden):
    # The cpu backend processes four rows and more together.
    counts = (1,) if hidden > 16384 else (3, 5) if hidden < 1024 else (5,)
    for rows, dtype, with_residual in covering(counts, DTYPES, (True, False), turn=hidden):
        check(Case(rows=rows, hidden=hidden).of(dtype, residual=dtype if with_residual else None), mode, agree)


@pytest.mark.parametrize("rows", [1, 2, 7, 19, 64, 83, 128, 255, 257, 513])
@pytest.mark.parametrize("hidden", [64, 128, 896])
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", of=["896-257", "896-513"])
def test_rows(mode, agree, rows, hidden):
    for dtype in (BF16, F16, F32):
        check(Case(rows=rows, hidden=hidden).of(dtype), mode, agree)


@pytest.mark.left_out
def test_rows_of_another_type(mode, agree):
    """The cpu backend keeps several short rows as floats until it has all of their sums."""
    for hidden in (64, 896, 1024, 2000):
        check(Case(19, hidden, BF16, None, BF16, F32), mode, agree)
        check(Case(19, hidden, F16, BF16, F32, F32, round_sum=False), mode, agree)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out
def test_rows_of_one_type(mode, agree, dtype):
    """The cpu backend overlaps the passes of such rows, and computes the last levels of eight short rows together."""
    for rows, hidden, residual in (
        *((5, 1024, dtype), (5, 2077, dtype), (5, 2077, None)),
        *((11, 64, None), (11, 128, dtype), (11, 256, dtype), (11, 300, None), (6, 1000, dtype)),
    ):
        for weight, offset, norm in ((None, 0.0, True), (dtype, 0.0, True), (dtype, 1.0, False), (F32, 1.0, True)):
            check(Case(rows, hidden, dtype, residual, weight, None, 1e-6, offset, round_norm=norm), mode, agree)


BEYOND = (
    Case(130, 8192).of(F32),
    Case(2060, 1024).of(F32, residual=None),
    Case(2060, 1024).of(BF16),
    Case(2060, 1030).of(F16),
    Case(1400, 1024).of(BF16, residual=F32),
    Case(1400, 1050).of(F32, residual=F16),
)


@pytest.mark.large
@pytest.mark.parametrize("case", BEYOND, ids=str)
@pytest.mark.left_out
def test_rows_beyond_the_cache(mode, agree, case):
    """The operands exceed the caches, so the cpu backend reads memory in another order."""
    check(case, mode, agree)


@pytest.mark.parametrize("residual", [None, *DTYPES], ids=dtype_name)
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_ptx")
@pytest.mark.left_out("triton", but=["bfloat16-float32", "float32-float16", "float64-bfloat16"])
@pytest.mark.left_out("triton_cpu", but=["bfloat16-float32", "float32-float16"])
@pytest.mark.left_out("cuda", but=["bfloat16-float32"])
def test_dtypes(mode, agree, x, residual):
    """Every mix of dtypes, and with each of them the four roundings; sizes with a whole segment and without."""
    if residual == F64 and x != F64:
        pytest.skip("float64 operands go with a float64 x only")
    dtypes = [dtype for dtype in (None, *DTYPES) if dtype != F64 or x == F64]
    flags = [(1091, 0.0, True, True), (45, 1.0, True, False), (1024, 1.0, False, True), (200, 0.0, False, False)]
    turn = sum(dtypes.index(dtype) for dtype in (x, residual))
    for weight, out, (hidden, offset, round_sum, round_norm) in covering(dtypes, dtypes, flags, turn=turn):
        check(Case(2, hidden, x, residual, weight, out, 1e-5, offset, round_sum, round_norm), mode, agree)


@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_ptx")
@pytest.mark.left_out("cuda", "triton_cpu", but=["bfloat16"])
def test_dtypes_of_sums(mode, agree, x):
    """A sum of another dtype than the residual's: a backend may take several kernels for it."""
    pairs = itertools.permutations(DTYPES if x == F64 else (BF16, F16, F32), 2)
    roundings = itertools.cycle(itertools.product((True, False), (True, False)))
    for (residual, stored), (round_sum, round_norm) in zip(pairs, roundings, strict=False):
        case = Case(3, 1091, x, residual, x, None, 1e-5, 1.0, round_sum, round_norm, "ties", residual_out=stored)
        check(case, mode, agree)
        check(replace(case, hidden=45, round_sum=not round_sum), mode, agree)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu", but=["bfloat16-nan row", "float16-ties", "float32-subnormal"])
@pytest.mark.left_out("triton_ptx", but=["bfloat16-*", "float32-subnormal"])
def test_data(mode, agree, dtype, data):
    others = ((dtype, dtype), (F32 if dtype != F64 else F64, dtype), (None, None))
    turn = DATA.index(data) + DTYPES.index(dtype)
    for hidden, (residual, weight), *flags in covering((77, 128, 1200), others, *[(True, False)] * 2, turn=turn):
        check(Case(7, hidden, dtype, residual, weight, None, 1e-6, 0.0, *flags, data), mode, agree)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
def test_every_value(mode, agree, dtype):
    """Every finite 16-bit value plus four others each, in rows of 1024: some processors add float16 as it is."""
    bits = torch.arange(1 << 16)

    def finite(bits):
        values = bits.to(torch.int16).view(dtype).view(64, 1024)
        return torch.where(values.isfinite(), values, 0)

    x = finite(bits)
    for step, begin in ((1, 0), (-1, 7), (4099, 1), (28657, 40_000)):  # odd steps: every value once
        residual = finite((bits * step + begin) % (1 << 16))
        sums = (x.float() + residual.float()).to(dtype)
        y, total = fusednorm.fused_add_rms_norm(x, residual)
        agree(total, sums, f"step {step}: the sum")
        agree(y, fusednorm.rms_norm(sums), f"step {step}: y")


@pytest.mark.parametrize(("x", "residual"), [(BF16, F16), (F16, BF16)], ids=dtype_name)
def test_sums_of_numbers_beyond_float16(mode, agree, x, residual):
    """A bfloat16 number that is greater than all of float16, and a float16 number that brings the sum back."""
    signs, numbers = operands(Case(4, 200).of(F32))[:2]
    numbers = {BF16: signs.sign() * (66 + numbers.abs().mul(9).int() % 56) * 1024, F16: signs.sign() * -60000.0}
    given = [numbers[dtype].to(dtype) for dtype in (x, residual)]
    with fusednorm.use_backend("reference"):
        wanted = fusednorm.fused_add_rms_norm(*given)
    assert wanted[1].isfinite().all()
    agree(fusednorm.fused_add_rms_norm(*given), wanted, f"{dtype_name(x)} and {dtype_name(residual)}")


NUMBERS = [("eps", eps) for eps in (0.0, 1e-12, 1e-6, 1e-5, 1e-1, PAYLOAD)]
NUMBERS += [("weight_offset", offset) for offset in (1.0, -0.3, 1e-3, PAYLOAD)]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("name", "number"), NUMBERS)
@pytest.mark.left_out("triton_cpu", but=["eps-nan-bfloat16", "weight_offset--0.3-float64"])
def test_numbers(mode, agree, name, number, dtype):
    """Of few rows, and of so many that they may share a widened weight."""
    for shape, data in itertools.product(((3, 130), (3, 1100), (40, 100)), ("normal", "zeros", "subnormal")):
        check(Case(*shape, **{name: number}, data=data).of(dtype), mode, agree)


#: Of one operand: stride beyond the row, offset, misalignment in bytes.
LAYOUTS = ((0, 64, 0), (7, 1, 0), (513, 65, 0), (24, 0, 1), (1, 5, 3), (64, 63, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton_ptx", but=["bfloat16"])
def test_layouts(mode, agree, dtype):
    """x, the residual and both outputs lie alike, or each in another way."""
    axes = (1, 16, 31, 77, 128, 1050), (dtype, F64 if dtype == F64 else F32), range(len(LAYOUTS)), (0, 1, 2, 5)
    for hidden, residual_dtype, first, step in covering(*axes, turn=DTYPES.index(dtype)):
        case = Case(rows=5, hidden=hidden).of(dtype, residual=residual_dtype)
        x, residual, weight = operands(case)
        y, total = expected(case, mode.backend)
        memory = []
        for place, like in enumerate((x, residual, y, total)):
            gap, offset, misaligned = LAYOUTS[(first + place * step) % len(LAYOUTS)]
            memory.append(Guarded(5, hidden, like.dtype, hidden + gap, offset, misaligned))
        gx, gresidual, gout, gtotal = (m.tensor for m in memory)
        gx.copy_(x)
        gresidual.copy_(residual)
        about = f"{case}, {first}, {step}"
        call(case, gx, gresidual, weight, out=gout, residual_out=gtotal)
        agree((gout, gtotal), (y, total), about)
        agree((gx, gresidual), (x, residual), f"{about}, operands afterwards")
        fusednorm.fused_add_rms_norm_(gx, gresidual, weight)
        agree((gx, gresidual), (y, total), f"{about}, in place")
        for m in memory:
            m.check()


def test_shapes(mode, agree):
    """Two to four dimensions, views of one tensor as attention makes them, and no rows at all."""
    case = Case(rows=24, hidden=64).of(BF16)
    x, residual, weight = operands(case)
    y, total = expected(case, mode.backend)
    for shape in ((24, 64), (4, 6, 64), (2, 3, 4, 64), (1, 24, 1, 64)):
        found = fusednorm.fused_add_rms_norm(x.view(shape), residual.view(shape), weight)
        agree(found, (y.view(shape), total.view(shape)), shape)
    qkv = torch.stack((x, residual, x)).movedim(0, 1).contiguous()
    found = fusednorm.fused_add_rms_norm_(*qkv.unbind(1)[:2], weight)
    agree(found, (y, total), "in place in interleaved rows")
    agree(qkv[:, 2], x, "their neighbour")
    for shape in ((0, 64), (3, 0, 64)):
        none = torch.empty(shape, dtype=BF16)
        got, got_total = fusednorm.fused_add_rms_norm(none, none, weight)
        assert got.shape == got_total.shape == shape


@pytest.mark.left_out("triton_ptx")
def test_outputs_may_be_inputs(mode, agree):
    """Each output in the memory of either input, in rows with and without a whole segment."""
    for dtype, hidden in itertools.product(DTYPES, (45, 1100)):
        case = Case(hidden=hidden).of(dtype)
        weight = operands(case)[2]
        y, total = expected(case, mode.backend)
        for out, total_out in (("x", "residual"), ("residual", "x"), ("x", None), ("residual", None), (None, "x")):
            x, residual, _ = operands(case)
            memory = {"x": x, "residual": residual, None: None}
            given = {"out": memory[out], "residual_out": memory[total_out]}
            found = fusednorm.fused_add_rms_norm(x, residual, weight, **given)
            agree(found, (y, total), f"{case}, out is {out}, residual_out is {total_out}")
        x, _, _ = operands(case)
        twice = expected(replace(case, residual=None), mode.backend)[0]
        agree(fusednorm.rms_norm(x, weight, out=x), twice, "rms_norm with out is x")


@pytest.mark.left_out("triton_cpu")
def test_every_rounding_to_the_residuals_type(mode, agree):
    """The sum with zero rounds x: float32 values near every boundary of the narrower types, NaN and infinity too."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (F16, BF16):
        exact = halves.view(dtype).float().view(torch.int32)
        half_unit = {F16: 1 << 12, BF16: 1 << 15}[dtype]
        near = torch.stack([exact + k for k in (0, 1, half_unit - 1, half_unit, half_unit + 1, 2 * half_unit - 1)])
        x = near.view(F32).reshape(-1, 1024)
        random = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=torch.Generator().manual_seed(1))
        for values in (x, random.to(torch.int32).view(F32)):
            zeros = torch.zeros_like(values, dtype=dtype)
            _, total = fusednorm.fused_add_rms_norm(values, zeros, None)
            agree(total, values.to(dtype), f"float32 to {dtype}")
        wide = near.view(F32).double().reshape(-1, 1024) * (1 + 2.0**-40)
        _, total = fusednorm.fused_add_rms_norm(wide, torch.zeros_like(wide, dtype=dtype), None)
        reference = torch.empty_like(total)
        with fusednorm.use_backend("reference"):
            fusednorm.fused_add_rms_norm(wide, torch.zeros_like(reference), None, residual_out=reference)
        agree(total, reference, f"float64 to {dtype}")


@given(data=st.data())
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.left_out
def test_any_call(mode, agree, data):
    """Shapes, strides, offsets, dtypes and flags that hypothesis chooses."""
    draw = data.draw
    narrow = st.sampled_from((BF16, F16, F32))
    x = draw(st.sampled_from(DTYPES), "x")
    other = st.sampled_from(DTYPES) if x == F64 else narrow
    case = Case(
        rows=draw(st.integers(1, 9), "rows"),
        hidden=draw(st.one_of(st.integers(1, 200), st.integers(900, 3100)), "hidden"),
        x=x,
        residual=draw(other, "residual"),
        weight=draw(st.none() | other, "weight"),
        out=draw(other, "out"),
        eps=draw(st.sampled_from((0.0, 1e-6, 1e-5, 1e-2)), "eps"),
        weight_offset=draw(st.sampled_from((0.0, 1.0)), "weight_offset"),
        round_sum=draw(st.booleans(), "round_sum"),
        round_norm=draw(st.booleans(), "round_norm"),
        data=draw(st.sampled_from(("normal", *DATA)), "data"),
        seed=draw(st.integers(0, 1000), "seed"),
    )
    given_x, given_residual, weight = operands(case)
    y, total = expected(case, mode.backend)
    memory = []
    for like, filled in ((given_x, True), (given_residual, True), (y, False), (total, False)):
        gap, offset, misaligned = draw(st.tuples(st.integers(0, 70), st.integers(0, 40), st.integers(0, 3)))
        guarded = Guarded(case.rows, case.hidden, like.dtype, case.hidden + gap, offset, misaligned)
        memory.append(guarded.filled(like if filled else None))
    got_x, got_residual, got, got_total = (m.tensor for m in memory)
    call(case, got_x, got_residual, weight, out=got, residual_out=got_total)
    agree((got, got_total), (y, total), case)
    for m in memory:
        m.check()
