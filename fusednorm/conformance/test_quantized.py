"""Quantized rows: bytes, scales and zero points, alone and after a norm."""

import math
from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.calls.quantization import E8M0
from fusednorm.conformance import oracle_gated, oracle_quantized
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F16,
    F32,
    F64,
    Case,
    bytes_of,
    covering,
    dtype_name,
    operands,
)

pytestmark = pytest.mark.promise("same bits")

E4M3, E5M2, I8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8

PRESETS = {name: value for name, value in vars(quantizations).items() if isinstance(value, Quantization)}

#: Every value of every field, in quantizations that no preset is.
OTHERS = {
    "e5m2 rows": Quantization(E5M2),
    "e5m2 groups": Quantization(E5M2, per=32, scale_by="reciprocal", apply="reciprocal"),
    "uint8": Quantization(U8, zero_point="after"),
    "uint8 before": Quantization(U8, per=64, zero_point="before", scale_by="reciprocal", scale_floor=1e-3),
    "symmetric int8": Quantization(I8, per=32, qmin=-127, qmax=127, scale_by="reciprocal"),
    "limited": Quantization(E4M3, amax_limit=1.5, qmax=240.0),
    "groups of 3": Quantization(I8, per=3, apply="ratio", amax_floor=0.25, floor_dtype="input"),
    "single elements": Quantization(E4M3, per=1),
    "columns": Quantization(E4M3, per=64, layout="column"),
    "padded columns": Quantization(I8, layout="column_padded", zero_point="after", apply="reciprocal"),
    "a floor above the limit": Quantization(I8, amax_floor=4.0, amax_limit=1.5),
    "powers of two": Quantization(E4M3, per=128, amax_floor=1e-10, round_scale="up_to_power_of_two"),
    "powers of two of zero points": Quantization(
        U8, zero_point="after", scale_by="reciprocal", apply="reciprocal", round_scale="up_to_power_of_two"
    ),
    "powers of two of e5m2 rows": Quantization(E5M2, apply="reciprocal", round_scale="up_to_power_of_two"),
    "bytes of ue8m0": Quantization(
        E5M2, per=32, layout="column_padded", round_scale="up_to_power_of_two", scale_dtype=E8M0
    ),
    "words of ue8m0": Quantization(
        U8, per=128, zero_point="before", round_scale="up_to_power_of_two", scale_dtype=torch.int32
    ),
    "fewer negative numbers": Quantization(E4M3, qmin=-60.0, qmax=240.0),
}
ALL = {**PRESETS, **OTHERS}


def scales_given(quantization):
    """The scale and the zero point that a call needs."""
    if quantization.per != "tensor":
        return {}
    scale = {"scale": torch.tensor([0.0371])}
    return {**scale, "zero_point": torch.tensor([-7], dtype=torch.int32)} if quantization.zero_point else scale


def compare(agree, found, wanted, quantization, about):
    """``found``: numbers, scales, and zero points if there are any; ``wanted``: the oracle's."""
    values, scale, *zero_point = found
    assert values.dtype == quantization.dtype
    assert scale.dtype == (quantization.scale_dtype or F32)
    stored, scales, points = (None if array is None else torch.from_numpy(array) for array in wanted)
    agree(bytes_of((values, scale)), (stored, scales), about)
    assert len(zero_point) == quantization.computes_zero_point * (quantization.per != "tensor")
    for tensor in zero_point:
        assert tensor.dtype == torch.int32
        agree(tensor.long(), points, f"{about}: zero point")


def check_alone(agree, y, quantization, about="", **more):
    """Compares the rows that a quantizer makes of y with the oracle's; returns them with what is beside them."""
    found = fusednorm.quantize(y, quantization, **more)
    compare(agree, found, oracle_quantized.quantized(y, quantization, **more), quantization, f"{quantization} {about}")
    return found


def check_after_norm(agree, tensors, quantization, about, normed=None, eps=1e-6, **flags):
    """The same after a norm: of x, the residual or None, and the weight or None. ``normed`` receives the rows."""
    x, residual, weight = tensors
    *wanted, rows, total = oracle_quantized.fused_add_rms_norm_quant(x, residual, weight, eps, quantization, **flags)
    if residual is None:
        found = fusednorm.rms_norm_quant(x, weight, eps, quantization=quantization, normed_out=normed, **flags)
    else:
        *found, found_total = fusednorm.fused_add_rms_norm_quant(
            x, residual, weight, eps, quantization=quantization, normed_out=normed, **flags
        )
        agree(found_total, torch.from_numpy(total).to(residual), f"{quantization} {about}: sum")
    compare(agree, found, wanted, quantization, f"{quantization} {about}")
    if normed is not None:
        agree(normed, torch.from_numpy(rows).to(x), f"{quantization} {about}: rows")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton", but=["VLLM_INT8_TOKEN_CPU", "VLLM_FP8_BLOCK_FUSED"])
@pytest.mark.left_out("triton_ptx", but=["VLLM_FP8_BLOCK_FUSED"])
def test_every_quantization(mode, agree, name):
    """All kinds of data and dtypes."""
    quantization = ALL[name]
    for dtype, data, hidden in covering(DTYPES, ("normal", *DATA), (384, 1152), turn=list(ALL).index(name)):
        y, *_ = operands(Case(6, hidden, data=data).of(dtype))
        check_alone(agree, y, quantization, f"{dtype_name(dtype)} {data} {hidden}", **scales_given(quantization))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.left_out("cuda", "triton", but=["VLLM_INT8_TOKEN_CPU", "VLLM_FP8_BLOCK_FUSED"])
@pytest.mark.left_out("triton_ptx", but=["VLLM_FP8_BLOCK_FUSED"])
@pytest.mark.left_out("triton_cpu", but=["VLLM_INT8_TOKEN_CPU"])
def test_after_a_norm(mode, agree, name):
    quantization = ALL[name]
    axes = (DTYPES, (BF16, F32, None), (F32, BF16, None), (None, F32), (True, False), (True, False), (0.0, 1.0))
    for x, residual, weight, between, round_sum, round_norm, offset in covering(*axes, turn=list(ALL).index(name)):
        if between is not None and x == F64:
            continue
        case = Case(5, 384, x, residual, weight, data="outliers")
        tensors = operands(case)
        flags = {"round_norm": round_norm, "weight_offset": offset, "between": between, **scales_given(quantization)}
        if residual is not None:
            flags["round_sum"] = round_sum
        else:
            tensors = (tensors[0], None, tensors[2])
        check_after_norm(agree, tensors, quantization, f"{case}, {flags}", torch.empty_like(tensors[0]), **flags)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton_ptx", "triton", but=["VLLM_INT8_TOKEN_CPU", "VLLM_FP8_BLOCK_FUSED"])
def test_after_a_gate(mode, agree, name):
    """Two tensors, and one that holds both; with and without the roundings between."""
    quantization = ALL[name]
    axes = (DTYPES, (BF16, F32), (None, F32), ("normal", "nan row", "zeros"))
    for dtype, up_dtype, between, data in covering(*axes, turn=list(ALL).index(name)):
        if between is not None and dtype == F64:
            continue
        gate, up, _ = operands(Case(4, 384, dtype, up_dtype, data=data))
        gate = gate * 3
        passed = None if between or dtype in (F32, F64) else dtype
        (product,) = oracle_gated.gated(up, gate, "silu", passed, between or dtype)
        wanted = oracle_quantized.quantized(product, quantization, **scales_given(quantization))
        flags = {"quantization": quantization, "between": between, **scales_given(quantization)}
        about = f"{quantization}, {dtype}, {up_dtype}, {between}, {data}"
        compare(agree, fusednorm.silu_and_mul_quant(gate, up, **flags), wanted, quantization, about)
        if up_dtype == dtype:
            both = torch.cat((gate, up), -1)
            compare(agree, fusednorm.silu_and_mul_quant(both, **flags), wanted, quantization, f"one tensor, {about}")


@pytest.mark.parametrize("hidden", [1, 40, 128, 2056, 18_432, 262_144])
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", of=["1", "262144"])
@pytest.mark.left_out("triton_ptx", but=["2056"])
@pytest.mark.left_out("cuda", but=["40", "2056"])
def test_sizes_of_rows(mode, agree, hidden):
    """From one element to rows that no kernel keeps in registers, with scales of all of it and of groups of it.

    Alone, elements have one sign: what lies beyond a row's end is then no extreme of the row.
    """
    short, long = math.gcd(hidden, 32), math.gcd(hidden, 1024)
    for dtype, quantization in (
        (BF16, Quantization(E4M3)),
        (F32, Quantization(I8, zero_point="after", apply="reciprocal")),
        (F64, Quantization(U8, zero_point=128, apply="ratio", amax_floor=1e-7)),
        (F16, Quantization(E4M3, per=long, scale_floor=1e-3)),
        (BF16, Quantization(U8, per=short, zero_point="before")),
        (BF16, Quantization(E5M2, per="tensor", apply="reciprocal")),
    ):
        tensors = operands(Case(3, hidden).of(dtype))
        check_alone(agree, tensors[0].abs(), quantization, "alone", **scales_given(quantization))
        check_after_norm(agree, tensors, quantization, "after a norm", **scales_given(quantization))


def test_sums_with_zero_points_are_exact(mode, agree):
    """The greatest sum is 2^30 + 2^30, which an int32 does not hold; by hand, and for both signs of given ones."""
    y = torch.tensor([[math.inf, 1.0, -math.inf], [-math.inf, -1.0, 0.0], [3e38, 0.0, -3e38]])
    for dtype, by_hand in ((I8, [127, 127, 0]), (U8, [255, 255, 0])):
        for point in ("after", "before"):
            powers = Quantization(dtype, zero_point=point, round_scale="up_to_power_of_two")
            numbers, *_ = check_alone(agree, y, powers, "infinities")
            if point == "after":
                agree(numbers[0].int(), torch.tensor(by_hand, dtype=torch.int32), f"{powers}: by hand")
            for given in (2**30 - 1, 1 - 2**30):
                scale, zero_point = torch.tensor([1e-30]), torch.tensor([given], dtype=torch.int32)
                static = Quantization(dtype, per="tensor", zero_point=point)
                check_alone(agree, y, static, f"given {given}", scale=scale, zero_point=zero_point)


@pytest.mark.left_out("triton_cpu")
def test_scales_are_rounded_up_to_powers_of_two(mode, agree):
    """By hand, at every limit: a scale is the element's magnitude."""
    least, one, most = 2.0**-126, 1 + 2.0**-23, 2.0**127
    rounded = {
        0.0: least / 2,
        2.0**-149: least,
        least / 2: least,
        least: least,
        least * one: 2 * least,
        1.0: 1.0,
        one: 2.0,
        -3.0: 4.0,
        most / 2 * one: most,
        most: most,
        most * one: most,
        math.inf: most,
        float(torch.finfo(F32).max): most,
        math.nan: math.nan,
    }
    y = torch.tensor([list(rounded)])
    for dtype, apply in ((I8, "divide"), (I8, "reciprocal"), (E4M3, "divide"), (E4M3, "reciprocal")):
        powers = Quantization(dtype, per=1, apply=apply, qmin=-1, qmax=1, round_scale="up_to_power_of_two")
        _, scale = check_alone(agree, y, powers, "limits")
        agree(scale, torch.tensor([list(rounded.values())]), f"{powers}")
    codes = torch.tensor([[0, 1, 1, 1, 2, 127, 128, 129, 254, 254, 254, 254, 254, 255]], dtype=U8)
    wanted = {E8M0: codes, torch.int32: torch.nn.functional.pad(codes, (0, 2)).view(torch.int32)}
    for scale_dtype, expected in wanted.items():
        coded = replace(powers, scale_dtype=scale_dtype)
        _, scale = check_alone(agree, y, coded, "codes")
        if scale_dtype is not None:
            agree(*bytes_of((scale, expected)), f"{coded}")


@pytest.mark.left_out("triton_cpu")
@pytest.mark.parametrize("shape", [(6, 1), (1, 384), (6, 3), (2, 3), (6, 384), (2, 1)])
def test_given_scales_of_blocks(mode, agree, shape):
    """Rows, columns, groups, blocks, elements, and blocks of whole rows; alone, after a norm, and after a gate."""
    scale = 2.0 ** torch.linspace(-9, 3, math.prod(shape)).reshape(shape) * 1.1
    for dtype, name in ((BF16, "VLLM_FP8_STATIC"), (F64, "VLLM_INT8_STATIC"), (F32, "VLLM_INT8_STATIC_CPU")):
        quantization = PRESETS[name]
        y, residual, weight = operands(Case(6, 384, data="outliers").of(dtype))
        check_alone(agree, y, quantization, f"{shape}", scale=scale)
        check_after_norm(agree, (y, None, weight), quantization, f"{shape}", scale=scale)
        check_after_norm(agree, (y, residual, weight), quantization, f"{shape}", scale=scale)
        wanted = oracle_quantized.silu_and_mul_quant(y, residual, quantization, scale=scale)
        found = fusednorm.silu_and_mul_quant(y, residual, quantization=quantization, scale=scale)
        compare(agree, found, wanted, quantization, f"{shape} after a gate")


@pytest.mark.parametrize("how", ["after", "before"])
def test_computed_zero_points(mode, agree, how):
    """Halves, in rows whose scale is 1; scales so small that zero points are limited; scales of 0."""
    rows = [[low, low + 255.0, 7.5, 0.5] for low in (-127.5, -126.5, -125.5)]
    rows += [[sign * 3.0, sign * (3.0 + 2.0**-22), sign * 3.0, sign * 3.0] for sign in (1, -1)]
    rows += [[number] * 4 for number in (0.0, 5.0, -5.0)]
    y = torch.tensor(rows)
    for dtype in (U8, I8):
        check_alone(agree, y, Quantization(dtype, zero_point=how))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, I8], ids=dtype_name)
def test_every_boundary_of_rounding(mode, agree, dtype):
    """Numbers, the middles between them, and the float32 numbers beside both, at a scale of 1.

    The scale is given, and it is that of rows whose greatest magnitude is the format's: then nothing need be cut.
    """
    table = torch.arange(128.0).double() if dtype == I8 else torch.from_numpy(oracle_quantized.numbers(dtype))
    middles = (table[1:] + table[:-1]) / 2
    points = torch.cat((table, middles)).float()
    near = [points, points.nextafter(points * 2 + 1), points.nextafter(points * 0 - 1)]
    y = torch.cat((*near, *(-p for p in near)))
    within = y[y.abs() <= table[-1]]
    scale = torch.ones(1)
    for rows, quantization, more in (
        (y, Quantization(dtype, per="tensor"), {"scale": scale}),
        (within, Quantization(dtype), {}),
        (within.bfloat16(), Quantization(dtype), {}),
    ):
        found = check_alone(agree, rows.unsqueeze(0).to(torch.get_default_device()), quantization, **more)
        assert found[1].item() == 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2, I8, U8], ids=dtype_name)
def test_numbers_of_every_size(mode, agree, dtype):
    """Far beyond the range too, and infinities and NaN of either sign, at a scale of 1; also with narrower limits."""
    powers = (2.0 ** torch.arange(-149, 128, dtype=F64, device="cpu")).float()
    points = torch.cat((powers, 1.5 * powers, torch.tensor([0.0, math.inf, math.nan], device="cpu")))
    y = torch.cat((points, -points)).unsqueeze(0).to(torch.get_default_device())
    for quantization in (Quantization(dtype, per="tensor"), Quantization(dtype, per="tensor", qmax=96)):
        check_alone(agree, y, quantization, scale=torch.ones(1))


@pytest.mark.parametrize("apply", ["divide", "reciprocal", "ratio"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, I8], ids=dtype_name)
def test_the_smallest_scales(mode, agree, dtype, apply):
    """Of groups of the least numbers: scales that are 0 or subnormal, and factors that are infinite."""
    amax = (2.0 ** torch.arange(-149, -100, dtype=F64, device="cpu")).float()
    y = torch.stack((amax, -amax, amax / 2, amax * 0), -1).to(torch.get_default_device())
    numbers, scale = check_alone(agree, y, Quantization(dtype, apply=apply))
    assert not numbers.float()[(scale == 0).flatten()].any()
    assert (scale == 0).any()


@pytest.mark.parametrize("how", ["after", "before"])
def test_given_zero_points_are_whole_numbers(mode, agree, how):
    """A float32 does not hold each of them; they meet numbers of which the sum is small."""
    quantization, scale = Quantization(I8, per="tensor", zero_point=how), torch.ones(1)
    for point in (-7, 2**24 + 1, -(2**24) - 3, 2**30 - 1, 1 - 2**30):
        y = torch.tensor([[-point + 5.0, -point - 90.0, 0.0, math.inf, -math.inf, math.nan, -1e9, 1e9]])
        check_alone(agree, y, quantization, scale=scale, zero_point=torch.tensor([point], dtype=torch.int32))


def test_nothing_behind_a_group_counts(mode, agree):
    """Elements of one sign, with zero points; and a row whose rstd is infinite, which would make NaN of zeros."""
    y = operands(Case(2, 70).of(F32))[0].abs() + 1
    for sign, per in ((1, "row"), (-1, "row"), (1, 10), (-1, 10)):
        check_alone(agree, sign * y, Quantization(I8, per=per, zero_point="after"), f"{sign}")
    infinite, quantization = torch.full((1, 70), math.inf), Quantization(I8)
    found = fusednorm.rms_norm_quant(torch.full((1, 70), 1e-30), eps=0.0, quantization=quantization)
    compare(agree, found, oracle_quantized.quantized(infinite, quantization), quantization, "infinite")
