"""Quantization: what is refused, what a quantization may be, who sees a call, and the peers' formulas."""

import math
import operator
from dataclasses import fields, replace

import pytest
import torch

from fusednorm import (
    Quantization,
    fused_add_rms_norm_quant,
    quantizations,
    quantize,
    relu2_quant,
    rms_norm,
    rms_norm_quant,
    silu_and_mul,
    silu_and_mul_quant,
)
from fusednorm.calls import fast_path
from fusednorm.calls.quantization import E8M0
from fusednorm.conformance.cases import BF16, F16, F32, Case, operands
from fusednorm.conformance.test_quantized import ALL, PRESETS
from fusednorm.reference import quantizer

from fast_calls import fast_calls

E4M3, E5M2, I8, U8, I32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32
UP = "up_to_power_of_two"
TOKEN, STATIC, BLOCK = quantizations.VLLM_INT8_TOKEN_CPU, quantizations.VLLM_FP8_STATIC, ALL["columns"]
AZP = quantizations.VLLM_INT8_STATIC_AZP_CPU
X, RESIDUAL, WEIGHT = operands(Case(6, 128).of(F32))
ONE, POINT = torch.ones(1), torch.ones(1, dtype=torch.int32)


def same(found, wanted):
    pairs = [[t.flatten().clone().view(U8) for t in pair] for pair in zip(found, wanted, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)


# What is refused


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize(X[0, 0], TOKEN), ValueError, r"y must be \[..., N\] with N of at least 1"),
        (lambda: quantize(X[:, :100], BLOCK), ValueError, "groups of 64 elements, which do not divide rows of 100"),
        (lambda: quantize(X, TOKEN, scale=ONE), TypeError, "scale is given, and dtype=int8 .* has none to be given"),
        (
            lambda: quantize(X, STATIC, scale=torch.ones(6, 7)),
            ValueError,
            r"one element, or a size for each dimension of y that divides it, \[6, 128\], got shape \[6, 7\]",
        ),
        (lambda: quantize(X, STATIC, scale=torch.ones(6)), ValueError, r"divides it, \[6, 128\], got shape \[6\]"),
        (
            lambda: quantize(X, STATIC, scale=torch.ones(0, 1)),
            ValueError,
            r"divides it, \[6, 128\], got shape \[0, 1\]",
        ),
        (
            lambda: quantize(X, STATIC, scale=-torch.eye(6, 128)),
            ValueError,
            "and finite, got -1.0; it is the quantization step",
        ),
        (
            lambda: quantize(
                X, replace(STATIC, dtype=I8, zero_point="after"), scale=torch.ones(6, 1), zero_point=torch.ones(1).int()
            ),
            ValueError,
            "scale must have one element, got shape",
        ),
        (lambda: quantize(X, STATIC), TypeError, "scale must be a torch.Tensor for per='tensor', got NoneType"),
        (lambda: quantize(X, STATIC, scale=ONE * 0), ValueError, "scale must be greater than 0 and finite, got 0.0"),
        (lambda: quantize(X, STATIC, scale=-ONE), ValueError, "scale must be greater than 0 and finite, got -1.0"),
        (lambda: quantize(X, STATIC, scale=ONE * math.nan), ValueError, "scale must be greater than 0 .* got nan"),
        (lambda: quantize(X, STATIC, scale=ONE * math.inf), ValueError, "scale must be greater than 0 .* got inf"),
        (lambda: quantize(X, AZP, scale=ONE), TypeError, "zero_point must be a torch.Tensor"),
        (lambda: quantize(X, STATIC, scale=ONE, zero_point=POINT), TypeError, "zero_point is given, and"),
        (lambda: quantize(X, AZP, scale=ONE, zero_point=POINT << 30), ValueError, "zero_point must lie between"),
        (lambda: quantize(X, STATIC, scale=ONE, scale_out=ONE), TypeError, "scale_out or zero_point_out is given"),
        (lambda: quantize(X, TOKEN, zero_point_out=POINT.expand(6, 1)), TypeError, "computes no zero points"),
        (lambda: quantize(X, BLOCK, scale_out=torch.empty(6, 1)), ValueError, r"scale_out must have shape \[6, 2\]"),
        (
            lambda: quantize(a := torch.ones(3, 8), Quantization(E4M3, per=1), scale_out=a),
            ValueError,
            "scale_out shares memory with y",
        ),
        (
            lambda: rms_norm_quant(X, quantization=BLOCK, normed_out=X.view(6, 128).T.contiguous().T.half()),
            TypeError,
            "normed_out must be float32, got float16",
        ),
        (
            lambda: silu_and_mul_quant(X[:, :127], quantization=TOKEN),
            ValueError,
            r"gate must be \[..., 2 \* N\] where up is not given, got shape \[6, 127\]",
        ),
        (lambda: silu_and_mul_quant(X, quantization=replace(TOKEN, per=48)), ValueError, "do not divide rows of 64"),
    ],
)
def test_what_is_refused_is_named_and_nothing_is_written(call, error, words):
    kept = [tensor.clone() for tensor in (X, RESIDUAL)]
    with pytest.raises(error, match=words):
        call()
    assert same((X, RESIDUAL), kept)


# The fast path


@pytest.mark.skipif(not fast_path.OPEN, reason="no fast path: compiled, with torch 2.10 or newer")
def test_the_fast_path_takes_what_is_usual_and_nothing_else():
    """Results equal those of the reference; what is refused leaves every output as it was."""
    take, gap = fast_calls("cpu"), torch.zeros(6, 256, dtype=I8)

    def run(q, x=X, residual=None, residual_out=None, between=None, norm=True, **more):
        operands = {"x": x, "residual": residual, "weight": WEIGHT if norm else None, "residual_out": residual_out}
        return take("quantizer", **operands, **more, eps=1e-6, packed=q.packed, between=between, normalises=norm)

    half, sums = X.bfloat16(), RESIDUAL.clone()
    y, total, point = rms_norm(X, WEIGHT), X + RESIDUAL, quantizations.VLLM_INT8_TOKEN_AZP_CPU
    normed, own = torch.zeros_like(X), X.clone()
    usual = {
        "rows": (run(TOKEN, norm=False), quantizer.quantized(X, TOKEN)),
        "norm": (run(TOKEN), quantizer.quantized(y, TOKEN)),
        "fused": (run(TOKEN, residual=RESIDUAL), quantizer.quantized(rms_norm(total, WEIGHT), TOKEN)),
        "in place": (run(TOKEN, residual=sums, residual_out=sums), quantizer.quantized(rms_norm(total, WEIGHT), TOKEN)),
        "scale": (run(STATIC, scale=ONE), (*quantizer.quantized(y, STATIC, ONE), ONE)),
        "unrounded": (
            run(TOKEN, half, between=F32),
            quantizer.quantized(rms_norm(half, WEIGHT, out_dtype=F32), TOKEN),
        ),
        "gaps": (run(TOKEN, out=gap[:, :128], scale_out=torch.ones(6, 2)[:, :1]), quantizer.quantized(y, TOKEN)),
        "groups": (run(BLOCK, scale_out=torch.ones(6, 2)), quantizer.quantized(y, BLOCK)),
        "float64": (run(TOKEN, X.double(), norm=False), quantizer.quantized(X, TOKEN)),
        "zero points": (run(point), quantizer.quantized(y, point)),
        "zero points in gaps": (
            run(point, residual=RESIDUAL, zero_point_out=torch.ones(6, 2, dtype=I32)[:, 1:]),
            quantizer.quantized(rms_norm(total, WEIGHT), point),
        ),
        "a zero point": (run(AZP, scale=ONE, zero_point=POINT), (quantizer.quantized(y, AZP, ONE, POINT)[0], ONE)),
        "normed": (run(TOKEN, normed_out=normed), quantizer.quantized(y, TOKEN)),
        "normed in place": (run(TOKEN, own, normed_out=own), quantizer.quantized(y, TOKEN)),
    }
    for name, (found, wanted) in usual.items():
        assert found is not None, name
        assert same(found[:2], wanted[:2]), name
    assert same(usual["fused"][0][2:], [total])
    assert same([normed, own, usual["zero points"][0][2]], [y, y, quantizer.quantized(y, point)[2]])
    assert same(usual["zero points in gaps"][0][2:], (quantizer.quantized(rms_norm(total, WEIGHT), point)[2], total))
    assert usual["in place"][0][2] is sums
    assert same([sums], [total])
    assert (gap._version, sums._version, normed._version, own._version) == (1, 1, 1, 1)

    grad, column = X.clone().requires_grad_(), replace(TOKEN, per=100)
    kept = gap.clone(), sums.clone()
    other, over, scaled = torch.zeros(6, 128, dtype=I8), torch.ones(6, 1), torch.ones(6, 128)
    unusual = {
        "a zero point too many": lambda: run(TOKEN, zero_point=POINT, out=other),
        "no zero point": lambda: run(AZP, scale=ONE, out=other),
        "a zero point of another type": lambda: run(AZP, scale=ONE, zero_point=POINT.long(), out=other),
        "a zero point that is too large": lambda: run(AZP, scale=ONE, zero_point=POINT << 30, out=other),
        "zero points that nothing computes": lambda: run(TOKEN, zero_point_out=POINT.expand(6, 1), out=other),
        "zero points over scales": lambda: run(point, scale_out=over, zero_point_out=over.view(I32), out=other),
        "normed rows of another type": lambda: run(TOKEN, normed_out=half, out=other),
        "normed rows that are float between": lambda: run(TOKEN, half, between=F32, normed_out=half, out=other),
        "normed rows over the scale": lambda: run(STATIC, scale=scaled[0, :1], normed_out=scaled, out=other.view(E4M3)),
        "groups that do not fit": lambda: run(column, out=other),
        "no scale": lambda: run(STATIC, out=other.view(E4M3)),
        "a scale too many": lambda: run(TOKEN, scale=ONE, out=other),
        "scale of 0": lambda: run(STATIC, scale=ONE * 0, out=other.view(E4M3)),
        "scale of infinity": lambda: run(STATIC, scale=ONE * math.inf, out=other.view(E4M3)),
        "scale of another type": lambda: run(STATIC, scale=ONE.double(), out=other.view(E4M3)),
        "two scales": lambda: run(STATIC, scale=torch.ones(2), out=other.view(E4M3)),
        "a scale and its copy": lambda: run(STATIC, scale=ONE, scale_out=torch.ones(1), out=other.view(E4M3)),
        "gradient": lambda: run(TOKEN, grad, out=other),
        "float rows between of float64": lambda: run(TOKEN, X.double(), between=F32, out=other),
        "out of another type": lambda: run(TOKEN, out=other.view(U8)),
        "out of another shape": lambda: run(TOKEN, out=torch.zeros(6, 64, dtype=I8)),
        "out that overlaps itself": lambda: run(TOKEN, out=other[:1].expand(6, 128)),
        "out that overlaps x": lambda: run(TOKEN, out=X.view(I8)[:, :128]),
        "out that overlaps the sum": lambda: run(
            TOKEN, residual=sums, residual_out=sums, out=sums.view(I8)[:, 128:256]
        ),
        "out that overlaps the scales": lambda: run(TOKEN, out=gap[:, :128], scale_out=gap.view(F32)[:, :1]),
        "out that overlaps the scale": lambda: run(STATIC, scale=gap.view(F32)[0, :1], out=gap[:, :128].view(E4M3)),
        "scales that overlap x": lambda: run(TOKEN, scale_out=X[:, :1], out=other),
        "scales of another type": lambda: run(TOKEN, scale_out=torch.ones(6, 1).double(), out=other),
        "scales of other groups": lambda: run(BLOCK, scale_out=torch.ones(6, 1), out=other),
        "scales of other rows": lambda: run(TOKEN, scale_out=torch.ones(1, 1), out=other),
        "scales that overlap each other": lambda: run(TOKEN, scale_out=torch.ones(1, 1).expand(6, 1), out=other),
    }
    for name, call in unusual.items():
        x = X.clone()
        assert call() is None, name
        assert same((gap, sums, X), (*kept, x)), name
        assert not other.any(), name


# What a quantization may be


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": torch.int16}, ValueError, "dtype must be one of torch.int8"),
        ({"per": 0}, ValueError, "per must be 'tensor', 'row' or the elements of a group"),
        ({"per": True}, ValueError, "per must be"),
        ({"per": "column"}, ValueError, "per must be"),
        ({"zero_point": 1}, ValueError, "zero_point must be one of None, 128, after, before, got 1"),
        ({"zero_point": 128}, ValueError, "zero_point=128 goes with uint8"),
        ({"dtype": E4M3, "zero_point": "after"}, ValueError, "zero_point goes with int8 and uint8"),
        ({"scale_by": "ratio"}, ValueError, "scale_by must be one of divide, reciprocal"),
        ({"apply": "multiply"}, ValueError, "apply must be one of divide, reciprocal, ratio"),
        ({"apply": "ratio", "per": "tensor"}, ValueError, "apply='ratio' has no scale to be given"),
        ({"apply": "ratio", "zero_point": "after"}, ValueError, "apply='ratio' has no scale to be given"),
        ({"apply": "ratio", "scale_floor": 0.1}, ValueError, "apply='ratio' does not use the scale"),
        ({"round_scale": "down"}, ValueError, "round_scale must be one of None, up_to_power_of_two, got 'down'"),
        (
            {"round_scale": UP, "apply": "ratio"},
            ValueError,
            "does not use the scale: leave out round_scale",
        ),
        (
            {"round_scale": UP, "per": "tensor"},
            ValueError,
            "round_scale is for scales that are computed",
        ),
        ({"scale_dtype": I8}, ValueError, "scale_dtype must be one of None, torch.int32"),
        ({"scale_dtype": I32}, ValueError, "scale_dtype is for powers of two: use round_scale='up_to_power_of_two'"),
        ({"returns": "multiplier"}, ValueError, "returns='multiplier' goes with apply='ratio'"),
        ({"per": "tensor", "layout": "column"}, ValueError, "layout is for scales of groups and rows"),
        ({"zero_point": "before", "amax_floor": 1.0}, ValueError, "amax_floor and amax_limit do not go with"),
        ({"amax_floor": -1.0}, ValueError, "amax_floor must not be negative, got -1.0"),
        ({"amax_limit": "1"}, TypeError, "amax_limit must be a number, got '1'"),
        ({"scale_floor": math.nan}, TypeError, "scale_floor must be a number, got nan"),
        ({"qmax": 128}, ValueError, "qmin and qmax must lie around 0, within -128 and 127, got -128 and 128"),
        ({"qmin": 1}, ValueError, "qmin and qmax must lie around 0"),
        ({"qmax": 0}, ValueError, "qmin and qmax must lie around 0"),
        ({"qmax": 1.5}, ValueError, "qmin and qmax must be numbers of int8, got -128 and 1.5"),
        ({"dtype": E4M3, "qmax": 100}, ValueError, "qmin and qmax must be numbers of float8_e4m3fn, got -100 and 100"),
        ({"dtype": E4M3, "qmin": -1.5 * 2.0**-9}, ValueError, "must be numbers of float8_e4m3fn"),
        ({"dtype": E5M2, "qmax": 9.0}, ValueError, "must be numbers of float8_e5m2, got -9 and 9"),
        ({"dtype": E4M3, "qmin": 0}, ValueError, "qmin of float8_e4m3fn must be less than 0, got 0"),
    ],
)
def test_fields(changes, error, words):
    with pytest.raises(error, match=words):
        Quantization(**{"dtype": I8, **changes})


def test_text():
    """Equal text, equal quantization, and the other way round."""
    for quantization in ALL.values():
        assert Quantization.parse(str(quantization)) == quantization
    assert len(set(map(str, ALL.values()))) == len(set(ALL.values()))
    assert str(Quantization(I8, per=128, amax_floor=1e-10)) == "dtype=int8 per=128 amax_floor=1e-10"
    for text in ("", "int8", "dtype=int9", "dtype=int8 per=row", "dtype=int8 size=3", "dtype=int8  per=128"):
        with pytest.raises(ValueError, match=r"quantization must be the text of a fusednorm\.Quantization"):
            Quantization.parse(text)


def test_every_field_changes_results():
    """None is ignored."""
    torch.manual_seed(0)
    y = (torch.randn(8, 128) * torch.rand(8, 1) * 3e-3).half()
    y[2] = 0
    y[3, :3] = torch.tensor([-3.0, 0.5, 252.0])  # a scale of 1, an odd zero point, and a tie
    y[4, :2] = torch.tensor([889.0, 45.5])  # a scale of 7, and a tie that the reciprocal of 7 misses
    changes = {
        "dtype": (Quantization(I8), Quantization(E5M2)),
        "per": (Quantization(I8), Quantization(I8, per=64)),
        "zero_point": (Quantization(I8, zero_point="after"), Quantization(I8, zero_point="before")),
        "scale_by": (Quantization(E4M3), Quantization(E4M3, scale_by="reciprocal")),
        "apply": (Quantization(I8), Quantization(I8, apply="reciprocal")),
        "amax_floor": (Quantization(I8), Quantization(I8, amax_floor=1e-2)),
        "amax_limit": (Quantization(I8), Quantization(I8, amax_limit=1e-3)),
        "scale_floor": (Quantization(I8), Quantization(I8, scale_floor=1e-4)),
        "floor_dtype": (Quantization(I8, amax_floor=1e-2), Quantization(I8, amax_floor=1e-2, floor_dtype="input")),
        "returns": (Quantization(I8, apply="ratio"), Quantization(I8, apply="ratio", returns="multiplier")),
        "qmin": (Quantization(I8), Quantization(I8, qmin=-100)),
        "qmax": (Quantization(I8), Quantization(I8, qmax=100)),
        "round_scale": (Quantization(I8), Quantization(I8, round_scale=UP)),
        "scale_dtype": (Quantization(I8, round_scale=UP), Quantization(I8, round_scale=UP, scale_dtype=I32)),
    }
    assert changes.keys() == {field.name for field in fields(Quantization)} - {"layout"}
    for name, (one, other) in changes.items():
        found, others = quantize(y, one), quantize(y, other)
        assert found[0].dtype != others[0].dtype or not same(found, others), name


def test_layouts():
    """The strides of scales, and what lies between them."""
    y = X.view(2, 3, 128)
    rows = quantize(y, replace(BLOCK, layout="row"))[1]
    columns = quantize(y, BLOCK)[1]
    padded = quantize(y, replace(BLOCK, layout="column_padded"))[1]
    assert (rows.stride(), columns.stride(), padded.stride()) == ((6, 2, 1), (3, 1, 6), (3, 1, 8))
    assert torch.equal(rows, columns)
    assert torch.equal(rows, padded)
    whole = padded.as_strided((2, 8), (8, 1))
    assert not whole[:, 6:].any()


CODED = {dtype: replace(ALL["powers of two"], per=32, scale_dtype=dtype) for dtype in (I32, E8M0) if dtype is not None}
ROWS = torch.cat((X, X * 1e-3, X * 0, X * math.nan, X / 0), -1)[:, : 6 * 32 + 384].contiguous()


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_scales_of_every_layout_and_in_given_memory(dtype):
    """Codes are those of float32 scales; columns have whole 16 bytes, and words a zero for each group that lacks."""
    for layout, padded in (("row", 0), ("column", 6), ("column_padded", 8 if dtype == I32 else 16)):
        coded = replace(CODED[dtype], layout=layout)
        numbers, scale = quantize(ROWS, coded)
        wanted, powers = quantize(ROWS, replace(coded, scale_dtype=None))
        codes = torch.where(powers.isnan(), 255, powers.log2() + 127).to(U8)
        width = codes.shape[1]
        if dtype == I32:
            codes = torch.nn.functional.pad(codes, (0, -width % 4))
        assert scale.dtype == dtype
        assert scale.stride() == ((1, padded) if padded else (scale.shape[1], 1))
        assert same((numbers, scale.contiguous()), (wanted, codes.contiguous()))
        given = torch.zeros(scale.shape[1], 6, dtype=dtype).T
        found = quantize(ROWS, coded, scale_out=given)
        assert found[1] is given
        assert same(found, (numbers, scale))
        whole = scale.as_strided((scale.shape[1], padded), (padded, 1)).clone()
        assert not whole[:, 6:].view(U8).any()


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_scales_of_every_function(dtype):
    """After a norm, with the sum, a gate and relu2; zero points have a number for each group."""
    coded = CODED[dtype]
    points = replace(coded, dtype=U8, amax_floor=0.0, zero_point="after")
    calls = {
        "quantize": lambda q: quantize(X, q),
        "norm": lambda q: rms_norm_quant(X, WEIGHT, quantization=q),
        "sum": lambda q: fused_add_rms_norm_quant(X, RESIDUAL, WEIGHT, quantization=q),
        "gate": lambda q: silu_and_mul_quant(X, RESIDUAL, quantization=q),
        "relu2": lambda q: relu2_quant(X, quantization=q),
    }
    for name, call in calls.items():
        for q in (coded, points):
            (numbers, scale, *others), (wanted, powers, *rest) = call(q), call(replace(q, scale_dtype=None))
            assert same((numbers, scale, *others), (wanted, quantizer.in_dtype(powers, dtype), *rest)), name


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_scales_in_memory_that_does_not_fit(dtype):
    groups = ROWS.shape[1] // 32
    width = -(-groups // 4) if dtype == I32 else groups
    for given, error, words in (
        (torch.zeros(6, groups), TypeError, f"scale_out must be {str(dtype)[6:]}, got float32"),
        (torch.zeros(6, width + 1, dtype=dtype), ValueError, rf"scale_out must have shape \[6, {width}\]"),
    ):
        with pytest.raises(error, match=words):
            quantize(ROWS, CODED[dtype], scale_out=given)


# Who sees a call


@pytest.mark.parametrize("dtype", CODED, ids=str)
@pytest.mark.parametrize("layout", ["row", "column_padded"])
def test_codes_are_compiled_exported_and_batched(dtype, layout):
    coded = replace(CODED[dtype], layout=layout)
    wanted = quantize(ROWS, coded)

    class Program(torch.nn.Module):
        def forward(self, y):
            return quantize(y, coded)

    for program in (
        torch.compile(Program(), fullgraph=True, backend="aot_eager"),
        torch.export.export(Program(), (ROWS,)).module(),
    ):
        found = program(ROWS)
        assert same(found, wanted)
        assert found[1].stride() == wanted[1].stride()
    for dim in (0, 2):
        batched = torch.vmap(lambda y: quantize(y, coded), in_dims=dim, out_dims=dim)
        found = batched(ROWS.expand(2, -1, -1).movedim(0, dim))
        for one in zip(*(t.movedim(dim, 0) for t in found), strict=True):
            assert same(one, wanted)
    numbers, scale, nothing = torch.ops.fusednorm.quantize(ROWS, str(coded), None, None)
    assert same((numbers, scale), wanted)
    assert nothing.shape == (0,)


def test_padded_columns_are_compiled_and_exported():
    """For one number of rows, because it decides how many there are between the columns."""
    for program in (
        torch.compile(Padded(), fullgraph=True, backend="aot_eager"),
        torch.export.export(Padded(), (X,)).module(),
    ):
        found, wanted = program(X), Padded()(X)
        assert same(found, wanted)
        assert found[1].stride() == wanted[1].stride()


class Padded(torch.nn.Module):
    """A program whose scales lie in padded columns."""

    def forward(self, x):
        return rms_norm_quant(x, quantization=ALL["padded columns"])


def test_a_wrong_text_is_refused():
    with pytest.raises(ValueError, match="quantization must be the text"):
        torch.ops.fusednorm.quantize(X, "int8", None, None)


def test_empty():
    words = replace(ALL["powers of two"], per=32, layout="column_padded", scale_dtype=I32)
    for quantization, width in ((TOKEN, 1), (BLOCK, 2), (ALL["padded columns"], 1), (words, 1)):
        values, scale, *_ = quantize(X[:0], quantization)
        assert (values.shape, scale.shape) == ((0, 128), (0, width))
        *found, _ = fused_add_rms_norm_quant(X[:0], RESIDUAL[:0], WEIGHT, quantization=quantization)
        assert same(found[:2], (values, scale))


def test_outputs_lie_in_any_way():
    """Rows that no kernel writes are written by copies."""
    out, normed = torch.zeros(128, 6, dtype=I8).T, torch.zeros(128, 6).T
    found = rms_norm_quant(X, WEIGHT, quantization=TOKEN, out=out, normed_out=normed)
    assert found[0] is out
    assert same(found, rms_norm_quant(X, WEIGHT, quantization=TOKEN))
    assert torch.equal(normed, rms_norm(X, WEIGHT))


def test_between_leaves_out_both_roundings():
    gate, up = X.bfloat16() * 3, RESIDUAL.bfloat16()
    once = quantize(silu_and_mul(gate.float(), up.float()), TOKEN)
    assert same(silu_and_mul_quant(gate, up, quantization=TOKEN, between=F32), once)
    assert not same(silu_and_mul_quant(gate, up, quantization=TOKEN), once)


# The peers' formulas, in plain torch, written from their sources (docs/rounding.md names them)


def token_fused(y, dtype, qmax, floor):
    scale = (y.float().abs().amax(-1, keepdim=True) / qmax).clamp(min=floor)
    return scale, (y.float() * (1 / scale) if dtype == I8 else y.float() / scale)


def ratio(y, qmax, floor=0.0):
    amax = y.float().abs().amax(-1, keepdim=True).clamp(min=floor)
    return amax / qmax, y.float() * torch.where(amax == 0, 0.0, torch.full_like(amax, qmax) / amax)


def asymmetric(y, before):
    low, high = y.float().amin(-1, keepdim=True), y.float().amax(-1, keepdim=True)
    scale = (high - low) / torch.full_like(high, 255.0)
    point = (-128.0 - low / scale).round()
    v = y.float() * (1 / scale)
    return scale, point, (v + point).round() if before else v.round() + point


def blocks(y, function):
    return [t.flatten(-2) for t in function(y.unflatten(-1, (-1, 128)))]


FORMULAS = {
    "VLLM_INT8_TOKEN_UNFUSED": lambda y: ratio(y, 127.0),
    "VLLM_INT8_TOKEN_FUSED": lambda y: token_fused(y, I8, 127.0, 2.0**-23),
    "VLLM_INT8_TOKEN_CPU": lambda y: token_fused(y, I8, 127.0, 0.0),
    "VLLM_FP8_TOKEN": lambda y: token_fused(y, E4M3, 448.0, 1 / (448.0 * 512.0)),
    "VLLM_FP8_BLOCK_FUSED": lambda y: blocks(y, lambda v: token_fused(v, E4M3, 448.0, 1 / (448.0 * 512.0))),
    "VLLM_FP8_BLOCK_UNFUSED": lambda y: blocks(
        y,
        lambda v: operator.itemgetter(0, 1)(
            dividing(v, v.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0)
        ),
    ),
    "DEEPGEMM_FP8_BLOCK": lambda y: blocks(
        y, lambda v: inverting(v, v.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0)
    ),
    "VLLM_FP8_BLOCK_UE8M0": lambda y: blocks(
        y,
        lambda v: dividing(
            v, ue8m0((v.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0).clamp(min=1e-10))
        ),
    ),
    "DEEPGEMM_FP8_BLOCK_UE8M0": lambda y: blocks(
        y, lambda v: inverting(v, ue8m0(v.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0))
    ),
    "SGLANG_FP8_BLOCK_UE8M0": lambda y: blocks(
        y,
        lambda v: dividing(
            v, ue8m0(v.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / torch.tensor(448.0)))
        ),
    ),
    "DEEPGEMM_FP8_BLOCK_PACKED": lambda y: packed(*FORMULAS["DEEPGEMM_FP8_BLOCK_UE8M0"](y)),
    "DEEPSEEK_V4_FP8_BLOCK": lambda y: in_e8m0(
        *blocks(
            y,
            lambda v: dividing(
                v, ue8m0(v.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1 / torch.tensor(448.0)))
            ),
        )
    ),
    "VLLM_FP8_TENSOR": lambda y: inverting(y, y.float().abs().amax(-1, keepdim=True) / 448.0),
    "SGLANG_FP8_TOKEN": lambda y: inverting(y, y.float().abs().amax(-1, keepdim=True) / 448.0),
    "SGLANG_FP8_BLOCK": lambda y: blocks(y, sglang),
    "SGLANG_INT8_TOKEN_CPU": lambda y: ratio(y, 127.0, 1e-7),
    "TENSORRT_LLM_FP8_TOKEN": lambda y: ratio(y, 448.0, float(torch.tensor(1e-6).to(y.dtype))),
    "TORCHAO_FP8_ROW": lambda y: torchao(y),
}


def dividing(v, scale):
    return scale, v.float() / scale


def ue8m0(scale):
    """The owners' formula, of normal numbers."""
    mantissa, exponent = scale.frexp()
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def packed(scale, v):
    """DeepGEMM's `pack_ue8m0_to_int`, of scales whose number divides by 4."""
    return (scale.view(I32) >> 23).to(U8).view(I32), v


def in_e8m0(scale, v):
    return scale.to(E8M0 or F32), v


def inverting(v, scale):
    return scale, v.float() * (1 / scale)


def sglang(v):
    amax = v.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return amax * (torch.tensor(1.0) / 448.0), v.float() * (torch.tensor(448.0) / amax)


def torchao(v):
    """The scale in float64, then rounded to float32."""
    amax = v.abs().amax(-1, keepdim=True).double()
    scale = (448.0 / amax.clamp(min=1e-12)).float()
    return scale, v.float() * scale


def stored(v, dtype):
    if dtype == U8:
        return v.round().to(torch.int32).add(128).to(U8)
    return v.clamp(-448, 448).to(E4M3) if dtype == E4M3 else v.round().clamp(-128, 127).to(I8)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_presets_are_the_formulas_of_their_owners(name, dtype):
    torch.manual_seed(3)
    y = torch.randn(64, 512).to(dtype) * torch.logspace(-3, 2, 64).unsqueeze(-1).to(dtype)
    y[5, :128] = 0
    quantization = PRESETS[name]
    values, scale = quantize(y, quantization)
    wanted_scale, wanted = FORMULAS[name](y)
    assert (scale.dtype, scale.shape) == (wanted_scale.dtype, wanted_scale.shape)
    assert same((values, scale), (stored(wanted, quantization.dtype), wanted_scale))


@pytest.mark.parametrize("before", [False, True])
def test_presets_with_zero_points_are_the_formulas_of_their_owners(before):
    torch.manual_seed(3)
    y = torch.randn(64, 512).bfloat16() + torch.linspace(-3, 9, 64).unsqueeze(-1).bfloat16()
    quantization = PRESETS["VLLM_INT8_TOKEN_AZP_CPU" if before else "VLLM_INT8_TOKEN_AZP_UNFUSED"]
    values, scale, point = quantize(y, quantization)
    wanted_scale, wanted_point, wanted = asymmetric(y, before)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(point.float(), wanted_point)
    assert torch.equal(values, wanted.clamp(-128, 127).to(I8))


def test_presets_with_a_given_scale_are_the_formulas_of_their_owners():
    y, scale, point = X.bfloat16() * 3, torch.tensor([0.0123]), torch.tensor([11], dtype=torch.int32)
    inverse = y.float() * (1 / scale)
    wanted = {
        "VLLM_FP8_STATIC": inverse.clamp(-448, 448).to(E4M3),
        "VLLM_INT8_STATIC": (y.float() / scale).round().clamp(-128, 127).to(I8),
        "VLLM_INT8_STATIC_CPU": inverse.round().clamp(-128, 127).to(I8),
        "VLLM_INT8_STATIC_AZP": (inverse.round() + point).clamp(-128, 127).to(I8),
        "VLLM_INT8_STATIC_AZP_CPU": (inverse + point).round().clamp(-128, 127).to(I8),
    }
    assert set(PRESETS) == {*wanted, *FORMULAS, "VLLM_INT8_TOKEN_AZP_CPU", "VLLM_INT8_TOKEN_AZP_UNFUSED"}
    for name, values in wanted.items():
        more = {"zero_point": point} if PRESETS[name].zero_point else {}
        found, returned = quantize(y, PRESETS[name], scale=scale, **more)
        assert returned is scale
        assert same((found,), (values,)), name


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_float8_is_torchs(dtype):
    """Of values within the range, but for the code of a NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), generator=torch.Generator().manual_seed(0))
    v = bits.to(torch.int32).view(F32)
    most = torch.finfo(dtype).max
    v = v[v.abs() <= most]
    assert same((quantizer.to_float8(v, dtype),), (v.to(dtype),))
    assert quantizer.to_float8(torch.tensor([math.nan, -math.nan]), dtype).view(U8).tolist() == [0x7F, 0x7F]


def test_float64_is_rounded_to_float32_first():
    y = X.double() * (1 + 1e-9)
    assert same(quantize(y, TOKEN), quantize(y.float(), TOKEN))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_outputs_stay_apart_beside_a_tangent():
    """Also where only the weight has a tangent, so that a listener must see the call."""
    one = torch.empty_like(X)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(WEIGHT, torch.ones_like(WEIGHT))
        with pytest.raises(ValueError, match="residual_out shares memory with normed_out"):
            fused_add_rms_norm_quant(X, X.clone(), weight, quantization=TOKEN, normed_out=one, residual_out=one)
