"""Products have the oracle's bits, and each depends on one row and one column alone, wherever these lie."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F16,
    F32,
    F64,
    Case,
    Guarded,
    check_call,
    covering,
    dtype_name,
    of_oracle,
    operands,
)
from fusednorm.reference import norm as reference

pytestmark = pytest.mark.promise("same bits")

#: Exponents of the least and of the greatest numbers; of float16 (-10, 6) in their place.
SPREADS = {
    "spread": (-30, 30),
    "underflowing": (-75, -62),  # float32 does not hold the products
    "beyond": (58, 65),  # they overflow it, and so do sums
}
AXES = {
    # Rows, columns, and elements of both.
    "shape": ((1, 1, 1), (1, 33, 130), (2, 3, 15), (2, 8, 16), (7, 1, 40), (7, 33, 17), (19, 3, 130), (19, 8, 33)),
    "weight": DTYPES,
    "bias": (None, F16, F32, F64),
    "out": (None, *DTYPES),
    "data": ("normal", *SPREADS, "subnormal", "overflowing", "nan row", "inf row", "zeros", "ties"),
}


def numbers(rows, size, dtype, data, seed=0):
    """[rows, size], of which the exponents may be spread."""
    found = operands(Case(rows, size, dtype, data="normal" if data in SPREADS else data, seed=seed))[0]
    if data not in SPREADS:
        return found
    least, greatest = (-10, 6) if dtype == F16 else SPREADS[data]
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(least, greatest + 1, (rows, size), generator=generator, device="cpu")
    return reference.rounded(found.double() * 2.0 ** exponents.to(found.device), dtype)


def tensors(x, weight, bias, rows, columns, size, data="normal"):
    """Operands by name, of these dtypes; of the bias None for none."""
    return {
        "x": numbers(rows, size, x, data),
        "weight": numbers(columns, size, weight, data, seed=1),
        "bias": None if bias is None else numbers(columns, 1, bias, data if data in DATA else "normal", seed=2)[:, 0],
    }


@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_any_call(mode, agree, x):
    """Every dtype of each operand, numbers at the ends of its range, and rows of no whole number of sums."""
    for shape, *dtypes, data in covering(*AXES.values(), turn=DTYPES.index(x)):
        weight, bias, out = (F32 if dtype == F64 != x else dtype for dtype in dtypes)
        given = tensors(x, weight, bias, *shape, data)
        about = f"{dtype_name(x)}, {dtype_name(weight)}, {dtype_name(bias)}, {shape}, {data}"
        check_call(agree, "linear", given, about, {"out_dtype": out})


@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_long_rows(mode, agree, x):
    for weight, rows, columns, size in ((x, 3, 5, 4100), (BF16, 2, 33, 300), (F32, 70, 3, 257)):
        check_call(agree, "linear", tensors(x, weight, weight, rows, columns, size), f"{dtype_name(x)}, {size}")


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_rows_and_columns_do_not_depend_on_others(mode, agree, x):
    """Each alone, and in batches of many sizes."""
    for weight, rows, columns, size in ((x, 35, 37, 40), (BF16, 35, 66, 17), (F32, 35, 35, 100)):
        given = tensors(x, weight, weight, rows, columns, size)
        whole = fusednorm.linear(**given)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33):
            for begin in (0, 1, 35 - count):
                part = slice(begin, begin + count)
                found = fusednorm.linear(given["x"][part], given["weight"], given["bias"])
                agree(found, whole[part], f"{count} rows from {begin}")
                found = fusednorm.linear(given["x"][:5], given["weight"][part], given["bias"][part])
                agree(found, whole[:5, part], f"{count} columns from {begin}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_layouts(mode, agree, dtype):
    """Operands in any strides, and results in rows apart, between bytes that nobody writes."""
    for columns, size in ((3, 17), (19, 40), (33, 64)):
        given = tensors(dtype, dtype, dtype, 6, columns, size)
        wanted = of_oracle("linear", given, ())["out"]
        x, weight, bias = given.values()
        of_x = {
            "contiguous": x,
            "apart": Guarded(6, size, dtype, size + 3, 5, misaligned=1).filled(x).tensor,
            "two levels": torch.cat((x, x), -1).view(3, 2, 2, size)[:, :, 0],
            "three levels": torch.stack((x, x)).view(2, 3, 2, size).transpose(1, 2)[0].transpose(0, 1),
            "columns": x.t().contiguous().t(),
            "negatives": torch._neg_view(-x),
        }
        of_weight = {
            "contiguous": weight,
            "columns": weight.t().contiguous().t(),
            "apart": Guarded(columns, size, dtype, size + 5, 3, misaligned=1).filled(weight).tensor,
            "one row": weight[:1].expand(columns, size),
            "negatives": torch._neg_view(-weight),
        }
        for (x_lies, rows), (weight_lies, matrix) in covering([*of_x.items()], [*of_weight.items()]):
            expected = wanted
            if weight_lies == "one row":
                expected = of_oracle("linear", {"x": x, "weight": matrix, "bias": bias}, ())["out"]
            about = f"{x_lies}, {weight_lies}, {columns}, {size}"
            found = fusednorm.linear(rows, matrix, torch.stack((bias, bias), -1)[:, 0])
            agree(found.reshape(6, columns), expected, about)
            for gap, offset, misaligned in ((0, 64, 0), (3, 5, 0), (1, 3, 1)):
                memory = Guarded(6, columns, dtype, columns + gap, offset, misaligned)
                out = memory.tensor.view(*rows.shape[:-1], columns)
                assert fusednorm.linear(rows, matrix, bias, out=out) is out
                agree(memory.tensor, expected, f"{about}, out in rows {gap} apart")
                memory.check()


@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_elements_of_zero_change_nothing(mode, agree):
    """So a kernel may work on whole vectors, and ranks may pad their parts."""
    for dtype in DTYPES:
        given = tensors(dtype, dtype, None, 5, 9, 37)
        more = {name: t if t is None else torch.nn.functional.pad(t, (0, 30)) for name, t in given.items()}
        agree(fusednorm.linear(**more), fusednorm.linear(**given), dtype_name(dtype))


@pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
def test_nothing_to_compute(mode, agree):
    for dtype in DTYPES:
        x, weight, bias = tensors(dtype, dtype, dtype, 4, 5, 7).values()
        assert fusednorm.linear(x[:0], weight, bias).shape == (0, 5)
        assert fusednorm.linear(x, weight[:0], bias[:0]).shape == (4, 0)
        agree(fusednorm.linear(x[0], weight, bias), fusednorm.linear(x[:1], weight, bias)[0], "one row of no batch")
