"""Products of int8 have the oracle's bits: their sums are whole numbers, which have no order."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, covering, dtype_name, of_oracle

pytestmark = pytest.mark.promise("same bits")

AXES = {
    # Rows, columns, and elements of both.
    "shape": ((1, 1, 1), (1, 5, 130), (2, 4, 15), (3, 8, 64), (4, 7, 63), (5, 49, 65), (7, 3, 16), (66, 2, 17)),
    "bias": (None, BF16, F16, F32),
    "zero point": (None, "small", "large"),
    "out": (None, BF16, F16, F32),
    "data": ("any", "least", "alternating", "special scales"),
}


def numbers(data, rows, size, seed):
    """[rows, size] of int8."""
    if data == "least":
        return torch.full((rows, size), -128, dtype=torch.int8)
    if data == "alternating":
        return (127 - 255 * (torch.arange(rows * size) % 2)).view(rows, size).to(torch.int8)
    return torch.randint(-128, 128, (rows, size), generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def tensors(shape, bias=None, zero_point=None, data="any"):
    """Operands by name."""
    rows, columns, size = shape
    generator = torch.Generator().manual_seed(size)
    scale, of_weight, of_bias = (torch.randn(n, generator=generator) for n in ((rows, 1), columns, columns))
    if data == "special scales":
        special = torch.tensor([torch.inf, torch.nan, -0.0, 1e38, 1e-45])
        scale = special[torch.arange(rows) % 5].unsqueeze(-1)
    zeros = None
    if zero_point is not None:
        most = 128 if zero_point == "small" else 2**30
        zeros = torch.randint(-most, most + 1, (rows, 1), generator=generator).int()
        zeros[0] = 0
    device = torch.get_default_device()
    made = {"q": numbers(data, rows, size, 0), "scale": scale, "weight": numbers(data, columns, size, 1)}
    made |= {"weight_scale": of_weight, "bias": None if bias is None else of_bias.to(bias), "zero_point": zeros}
    return {name: t if t is None else t.to(device) for name, t in made.items()}


def check(agree, given, about, out_dtype=None):
    expected = of_oracle("int8_linear", given, (), out_dtype=out_dtype)["out"]
    found = fusednorm.int8_linear(**given, out_dtype=out_dtype)
    agree(found, expected, about)
    out = torch.zeros_like(found.t().contiguous()).t()
    assert fusednorm.int8_linear(**given, out=out) is out
    agree(out, found, f"{about}, given an output")


@pytest.mark.parametrize("turn", range(len(DTYPES)))
@pytest.mark.left_out("triton_ptx", of=["2", "3"])
def test_any_int8_call(mode, agree, turn):
    for shape, bias, zero_point, out, data in covering(*AXES.values(), turn=turn):
        given = tensors(shape, bias, zero_point, data)
        about = f"{shape}, {bias and dtype_name(bias)}, {zero_point}, {out and dtype_name(out)}, {data}"
        check(agree, given, about, out)


@pytest.mark.left_out("triton_ptx")
def test_long_int8_rows(mode, agree):
    """Of the least numbers, whose sums are the greatest that int32 holds."""
    for data, size in (("any", 4100), ("least", 131_071), ("alternating", 131_071)):
        check(agree, tensors((2, 5, size), zero_point="large", data=data), f"{data}, {size}")


@pytest.mark.promise("a row is a row")
def test_int8_rows_elsewhere(mode, agree):
    """Rows alone, of several dimensions, between others, and a weight between others."""
    given = tensors((12, 33, 70), F32, "small")
    whole = fusednorm.int8_linear(**given)
    rows = {name: given[name] for name in ("q", "scale", "zero_point")}
    for first, end in ((0, 1), (5, 7), (3, 12)):
        part = given | {name: t[first:end] for name, t in rows.items()}
        agree(fusednorm.int8_linear(**part), whole[first:end], f"rows {first} to {end}")
    levels = given | {name: t.unflatten(0, (3, 4)).transpose(0, 1) for name, t in rows.items()}
    agree(fusednorm.int8_linear(**levels), whole.unflatten(0, (3, 4)).transpose(0, 1), "rows in two levels")
    apart = {name: torch.cat((given[name], given[name]), -1)[:, :70] for name in ("q", "weight")}
    agree(fusednorm.int8_linear(**given | apart), whole, "rows apart")
    turned = {name: given[name].t().contiguous().t() for name in ("q", "weight")}
    agree(fusednorm.int8_linear(**given | turned), whole, "columns")
    one = given | {"scale": given["scale"][:1].expand(12, 1)}
    agree(fusednorm.int8_linear(**one)[0], whole[0], "one scale for all")


def test_rows_that_were_quantized(mode, agree):
    """The products of what `quantize` returns are near those of the rows."""
    x, weight = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (5, 9))
    x, weight = (t.to(torch.get_default_device()) for t in (x, weight))
    of_weight, weight_scale = fusednorm.quantize(weight, quantization=fusednorm.quantizations.VLLM_INT8_TOKEN_CPU)
    for quantization in ("VLLM_INT8_TOKEN_CPU", "VLLM_INT8_TOKEN_AZP_CPU"):
        q, scale, *zeros = fusednorm.quantize(x, quantization=getattr(fusednorm.quantizations, quantization))
        zero_point = zeros[0] if zeros else None
        y = fusednorm.int8_linear(q, scale, of_weight, weight_scale, zero_point=zero_point)
        # Elements below 4 are off by half a step of at most 8/255 each, so 256 products by less than this.
        assert (y - x @ weight.t()).abs().max() < 256 * 2 * 4 * 4 / 255
