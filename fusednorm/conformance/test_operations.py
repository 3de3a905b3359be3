"""Every operation has the oracle's bits, with all flags, dtypes and kinds of data, and the bits of its steps."""

import math
from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F16,
    F32,
    F64,
    NAMES,
    OPERATIONS,
    Case,
    bytes_of,
    check_call,
    covering,
    dtype_name,
    incoming_of,
    of_oracle,
    operands,
    recorded,
    weights_of,
)
from fusednorm.conformance.test_quantized import PRESETS, scales_given
from fusednorm.operations.composition import Composition
from fusednorm.operations.front_door import PUBLIC
from fusednorm.operations.norm_operation import Norm

pytestmark = pytest.mark.promise("same bits")

#: Rows of heads, in two dimensions, and heads of q and of k.
ROWS, Q, K = (2, 3), 3, 2

#: The library's declared operations, each with the flags of its samples.
DECLARED = {
    name: declared.declaration.samples
    for name, one in OPERATIONS.items()
    if getattr(fusednorm, name, None) is one.function and (declared := PUBLIC.get(one.function)) and not one.dtypes
    if not isinstance(declared, Composition | Norm)
}

NORM = {"round_norm": (True, False), "weight_offset": (0.0, 1.0)}
SUM = {"round_sum": (True, False)}
BETWEEN = {"between": (None, F32)}
#: Heads of the weight and of the bias: 0 for a row of all heads, None for no operand.
HEADS = {"weight_heads": (0, 3, None), "bias_heads": (0, 3, None), "hidden": (128, 1029)}
SIZES = {"hidden": (33, 128, 1029)}
#: The flags of each operation, and what its operands are: any two values meet in a call.
AXES = {
    "rms_norm": NORM | HEADS,
    "fused_add_rms_norm": NORM | SUM | HEADS | {"x_scale": (1.0, 0.22)},
    "layer_norm": NORM | HEADS,
    "fused_add_layer_norm": NORM | SUM | HEADS,
    "rms_norm_add": NORM | BETWEEN | SIZES,
    "rms_norm_add_rms_norm": NORM | SUM | BETWEEN | SIZES | {"next_eps": (None, 1e-3)},
    "rms_norm_gated": NORM
    | BETWEEN
    | {
        "norm_before_gate": (True, False),
        "activation": ACTIVATIONS,
        "group_size": (None, 32, 96),
        "hidden": (96, 1056),
    },
    "qk_norm_rope": NORM
    | BETWEEN
    | dict.fromkeys(("norm", "interleaved", "round_products"), (True, False))
    | {"pairs_of": ((64, 32), (128, 64), (80, 16), (80, 40), (7, 2), (7, 3), (96, None), (2, 1))},
}
#: The dtypes of its operands beside the first, and of its results.
SUMS = {"residual": (BF16, F32), "residual_dtype": (None, F16)}
WEIGHTS = {"weight": (None, F16, F32)}
OUT = {"out_dtype": (None, F32)}
MIXED = {
    "fused_add_rms_norm": SUMS | WEIGHTS | OUT | {"weight_heads": (0, 3), "bias_heads": (0, 3), "x_scale": (0.5,)},
    "fused_add_layer_norm": SUMS | WEIGHTS | OUT | {"weight_heads": (0, 3), "bias_heads": (0, 3)},
    "rms_norm_add": SUMS | WEIGHTS,
    "rms_norm_add_rms_norm": SUMS | WEIGHTS | OUT,
    "rms_norm_gated": {"residual": (BF16, F32), "norm_before_gate": (True, False), "group_size": (None, 15)}
    | {"round_norm": (True, False)}
    | WEIGHTS,
    "qk_norm_rope": {"table": DTYPES, "round_products": (True, False), "pairs_of": ((24, 12),)},
}


def of_rows(function, case, weight_heads=0, bias_heads=None):
    """Operands of an operation on rows; the second ones are the case's residual."""
    rows = operands(case)[:2]
    if "bias" in NAMES[function][0]:
        heads = weight_heads or bias_heads or 3
        rows = [None if t is None else t.unflatten(0, (-1, heads)) for t in rows]
    weights = {
        "weight": weights_of(case, weight_heads, 10),
        "next_weight": weights_of(replace(case, weight=case.weight and case.residual), 0, 2),
        "bias": weights_of(case, bias_heads, 20),
    }
    of_names = iter(rows)
    return {name: weights[name] if name in weights else next(of_names) for name in NAMES[function][0]}


def of_heads(case, size, pairs, table, norm=True):
    """Operands of an operation on heads: q and k are views into one tensor, behind which v lies, which follows."""
    qkv = operands(replace(case, rows=6 * (Q + K + 1), hidden=size))[0].view(*ROWS, Q + K + 1, size)
    weights = [weights_of(replace(case, hidden=size), 0, seed) if norm else None for seed in (1, 2)]
    tables = (None, None) if pairs is None else operands(Case(6, pairs, table, table, seed=3))[:2]
    tables = [t if t is None else t.view(*ROWS, pairs) for t in tables]
    return dict(
        zip(NAMES["qk_norm_rope"][0], (qkv[..., :Q, :], qkv[..., Q:-1, :], *weights, *tables), strict=True)
    ), qkv


def check(agree, function, case, **how):
    """Compares a call with the oracle; ``how``: flags, and what operands of the case are."""
    hidden, pairs_of, table = how.pop("hidden", case.hidden), how.pop("pairs_of", (64, 32)), how.pop("table", case.x)
    heads = {name: how.pop(name) for name in ("weight_heads", "bias_heads") if name in how}
    dtypes = {name: how.pop(name) for name in ("out_dtype", "residual_dtype") if name in how}
    case, about = replace(case, hidden=hidden), f"{case}, {heads}, {pairs_of}, tables of {dtype_name(table)}"
    if function != "qk_norm_rope":
        check_call(agree, function, of_rows(function, case, **heads), about, dtypes, **how)
        return
    given, qkv = of_heads(case, *pairs_of, table, how.get("norm", True))
    v = qkv[..., -1, :].clone()
    check_call(agree, function, given, about, **how)
    agree(qkv[..., -1, :], v, f"{about}, v")


GATED = ("rms_norm_gated-bfloat16", "rms_norm_gated-float64")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("function", AXES)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", but=["rms_norm_gated-bfloat16", "layer_norm-bfloat16", "fused_add_layer_norm-float64"])
@pytest.mark.left_out("triton_ptx", but=["rms_norm_gated-bfloat16"])
@pytest.mark.left_out(
    "triton",
    but=[*GATED, *(f"{name}-bfloat16" for name in ("qk_norm_rope", "rms_norm", "fused_add_rms_norm", "layer_norm"))],
)
def test_flags(mode, agree, function, dtype):
    """Every rounding and order, with weights and biases of all heads and of each, groups, and parts of heads."""
    axes = AXES[function] | ({"between": (None,)} if dtype == F64 and "between" in AXES[function] else {})
    for values in covering(*axes.values(), turn=DTYPES.index(dtype)):
        how = dict(zip(axes, values, strict=True))
        if not how.get("norm_before_gate", True):
            how["between"] = None
        if how.get("pairs_of", (0, 0))[1] is None:
            how["norm"] = True
        check(agree, function, Case(6).of(dtype), **how)


@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("function", MIXED)
@pytest.mark.left_out("cuda", "triton_cpu")
@pytest.mark.left_out("triton_ptx", but=["fused_add_rms_norm-bfloat16"])
@pytest.mark.left_out("triton", but=["fused_add_rms_norm-*", "qk_norm_rope-bfloat16"])
def test_mixed_dtypes(mode, agree, function, x):
    axes = MIXED[function]
    for values in covering(*axes.values(), turn=DTYPES.index(x)):
        how = dict(zip(axes, values, strict=True))
        of_operands = {name: how.pop(name) for name in ("residual", "weight") if name in how}
        check(agree, function, Case(6, 45).of(x, **of_operands), **how)


@pytest.mark.parametrize("data", ["nan row", "inf row", "zeros", "subnormal", "overflowing", "ties"])
@pytest.mark.parametrize(
    "function", ["rms_norm_add", "rms_norm_add_rms_norm", "rms_norm_gated", "qk_norm_rope", "fused_add_layer_norm"]
)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", but=["rms_norm_gated-*"])
@pytest.mark.left_out("triton", but=["rms_norm_gated-*", "qk_norm_rope-*"])
@pytest.mark.left_out("triton_ptx", but=["qk_norm_rope-nan row", "rms_norm_gated-ties"])
def test_data(mode, agree, function, data):
    for dtype in (BF16, F16, F32):
        case = Case(3, 100, data=data).of(dtype)
        if function == "rms_norm_gated":
            for first in (True, False):
                check(agree, function, case, hidden=64, group_size=32, norm_before_gate=first)
        else:
            check(
                agree, function, case, **({} if "add" in function else {"table": F32, "round_products": dtype == F16})
            )


@pytest.mark.parametrize("y_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.left_out("triton_ptx", "triton_cpu")
@pytest.mark.left_out(
    "cuda",
    but=["silu-bfloat16", "gelu_tanh-float16", "gelu-float32", "silu-float64"],
)
def test_gates(mode, agree, activation, y_dtype):
    """Gates of every size, with numbers near the ends of each dtype's range among them."""
    axes = (DTYPES, (None, *DTYPES), ("normal", *DATA), (1, 33, 1030), (1.0, 30.0, 800.0))
    for z_dtype, out, data, hidden, factor in covering(*axes, turn=DTYPES.index(y_dtype)):
        if y_dtype == F64 or F64 not in (z_dtype, out):
            y, z, _ = operands(Case(4, hidden, y_dtype, z_dtype, data=data))
            check_call(agree, "gate", {"y": y, "z": z * factor}, data, {"out_dtype": out}, activation=activation)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=dtype_name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton_ptx", but=["*-bfloat16"])
def test_every_16_bit_gate(mode, agree, activation, dtype):
    """The 65,536 numbers: the function's value in float32, as it is rounded, and its derivative."""
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype).view(64, 1024)
    for between in (F32, dtype):
        given = {"y": torch.ones(z.shape, dtype=between), "z": z.to(torch.get_default_device())}
        found = recorded("gate", given, [given["y"]], activation=activation)
        wanted = of_oracle("gate", given, [given["y"]], activation=activation)
        about = f"{activation} of {dtype_name(dtype)}, in {dtype_name(between)}"
        agree((found["out"], found["d_z"]), (wanted["out"], wanted["d_z"]), about)


@pytest.mark.left_out("triton_cpu")
def test_many_elements(mode, agree):
    """More than one thread's share, in rows that are no multiple of a tile."""
    y, z, _ = operands(Case(35, 2000).of(BF16))
    check_call(agree, "gate", {"y": y, "z": z}, "many")


@pytest.mark.parametrize("function", ["silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("gate", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", but=["bfloat16-*", "float64-gelu_and_mul"])
@pytest.mark.left_out("triton_ptx", but=["bfloat16-silu_and_mul", "float64-gelu_and_mul"])
def test_and_mul(mode, agree, gate, function):
    """Two tensors, and one that holds both; each with what passes between rounded or not."""
    for up, between, hidden, data in covering(DTYPES, (None, F32), (16, 1100), ("normal", "overflowing", "nan row")):
        if (between is not None) if gate == F64 else (up == F64):
            continue
        g, u, _ = operands(Case(5, hidden, gate, up, data=data))
        found = check_call(agree, function, {"gate": g * 5, "up": u}, data, between=between)
        if up == gate:
            both = torch.cat((g * 5, u), -1).requires_grad_()
            out = getattr(fusednorm, function)(both, between=between)
            (dboth,) = torch.autograd.grad(out, both, incoming_of(function, {"gate": g}))
            agree((out, dboth), (found["out"], torch.cat((found["d_gate"], found["d_up"]), -1)), "one tensor")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_ptx", "triton_cpu", but=["bfloat16"])
@pytest.mark.left_out("cuda", but=["bfloat16", "float64"])
def test_gates_in_steps(mode, agree, dtype):
    """Limits that numbers hit, or miss by one ulp, and the other steps; in one tensor, in turns too."""
    axes = ((None, 2.0, 7.3), (1.0, 1.702), (0.0, 1.0), ("before", "after"), (False, True), (33, 1030), DTYPES)
    for limit, alpha, up_offset, clamp, round_steps, hidden, up in covering(*axes):
        if up == F64 != dtype:
            continue
        steps = {"alpha": alpha, "up_offset": up_offset, "clamp": clamp, "round_steps": round_steps, "limit": limit}
        g, u, _ = operands(Case(4, hidden, dtype, up, data="nan row" if round_steps else "normal"))
        g, u = g * 4, u * 4
        for rows in (g, u):
            most = torch.tensor(limit or 1.0, dtype=rows.dtype)
            beyond = torch.nextafter(most, torch.tensor(math.inf, dtype=rows.dtype))
            rows[0, :8] = torch.stack(
                (most, -most, beyond, -beyond, 0 * most, -0 * most, math.inf * most, -math.inf * most)
            )
        u[0, 8] = math.nan
        found = check_call(agree, "silu_and_mul", {"gate": g, "up": u}, "in steps", **steps)
        if up == dtype:
            turns = torch.stack((g, u), -1).flatten(-2).requires_grad_()
            out = fusednorm.silu_and_mul(turns, interleaved=True, **steps)
            (dboth,) = torch.autograd.grad(out, turns, incoming_of("silu_and_mul", {"gate": g}))
            wanted = torch.stack((found["d_gate"], found["d_up"]), -1).flatten(-2)
            agree((out, dboth), (found["out"], wanted), f"in turns, {steps}")


#: Numbers that change nothing once they are rounded, of which some are infinite then, and numbers just beside them.
BESIDE = {
    "rms_norm": ({"weight_offset": 1e-60}, {"weight_offset": 2.0**-24}),
    "fused_add_rms_norm": ({"x_scale": 1 + 1e-12, "weight_offset": 1e-60}, {"x_scale": 1 + 2.0**-23}),
    "layer_norm": ({"weight_offset": -1e-60},),
    "rms_norm_gated": ({"weight_offset": 1e-60}, {"weight_offset": 1e39}),
    "qk_norm_rope": ({"weight_offset": 1e-60},),
    "silu_and_mul": (
        {"alpha": 1 + 1e-12, "up_offset": 1e-60, "limit": 1e39, "round_steps": True},
        {"alpha": 1 + 2.0**-23, "up_offset": 2.0**-24, "limit": 3.4028234e38, "round_steps": True},
    ),
    "softcap": ({"cap": 1 + 1e-12},),
    "selected_log_prob": ({"softcap": 30 + 1e-12},),
}


@pytest.mark.parametrize("function", BESIDE)
@pytest.mark.left_out("triton_cpu", but=["silu_and_mul", "rms_norm_gated"])
@pytest.mark.left_out("triton_ptx", but=["rms_norm_gated"])
def test_numbers_beside_those_that_change_nothing(mode, agree, function):
    case = Case(4, 96, BF16, BF16, BF16, data="nan row")
    x, other, weight = operands(case)
    x[0, :2], weight[:2] = torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])
    for flags in BESIDE[function]:
        if function == "qk_norm_rope":
            given, _ = of_heads(case, 64, 32, BF16)
        else:
            given = OPERATIONS[function].tensors(x, other, weight)
            given = {name: given.get(name) for name in NAMES[function][0]}
        check_call(agree, function, given, "beside", **flags)


@pytest.mark.parametrize("function", DECLARED)
@pytest.mark.left_out("cuda", but=["gelu", "relu2"])
@pytest.mark.left_out("triton_cpu", "triton_ptx", but=["relu2"])
def test_declared(mode, agree, function):
    """With the flags of all samples; whole tiles too."""
    samples, has_dtype = DECLARED[function], "out_dtype" in OPERATIONS[function].defaults
    results = (None, *DTYPES) if has_dtype else (None,)
    axes = (DTYPES, results, ("normal", *DATA), (1, 33, 512, 1030), (1.0, 3.0, 60.0), range(len(samples)))
    for dtype, out, data, hidden, factor, sample in covering(*axes):
        if dtype == F64 or out != F64:
            x, other, weight = operands(Case(4, hidden, data=data).of(dtype))
            given = OPERATIONS[function].tensors(x * factor, other * factor, weight)
            dtypes = {"out_dtype": out} if has_dtype else {}
            check_call(agree, function, given, f"{data}, {hidden}", dtypes, **samples[sample])


@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
def test_many_and_long_rows_of_heads(mode, agree):
    """Blocks of rows whose last one is shorter, in sums of gradients of heads; rows that a GPU reads twice."""
    heads = {"weight_heads": 3, "bias_heads": 3}
    check(agree, "fused_add_rms_norm", Case(3 * 515, 24).of(BF16), **heads)
    for round_sum in (True, False):
        check(agree, "fused_add_rms_norm", Case(3, 20_000).of(BF16), x_scale=0.22, round_sum=round_sum, **heads)


@pytest.mark.left_out("triton_ptx")
def test_layer_norms_without_a_bias(mode, agree):
    """A kernel of the backend may then have the weight's gradient too."""
    for case in (Case(6, 130).of(BF16), Case(3, 3, F32, F16, F32)):
        check(agree, "layer_norm" if case.x == BF16 else "fused_add_layer_norm", case)


@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
def test_many_and_long_rows_of_layer_norms(mode, agree):
    """The same, without heads too, and rows whose gradients a GPU computes with the blocks' sums."""
    for rows, hidden, offset in ((3 * 515, 24, -1.0), (3, 4100, 0.0), (6, 1029, -0.5)):
        check(agree, "layer_norm", Case(rows, hidden).of(BF16), weight_offset=offset, bias_heads=0)
    for round_sum, weight_heads in ((True, 0), (False, 3)):
        case = Case(3, 20_000).of(BF16)
        check(agree, "fused_add_layer_norm", case, round_sum=round_sum, weight_heads=weight_heads, bias_heads=0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton_cpu")
@pytest.mark.left_out("triton", but=["bfloat16"])
def test_long_rows_of_two_norms(mode, agree, dtype):
    """Several rows of whole segments, and with a part of one: a backend may work on more than one row at once."""
    for rows, hidden, data in ((4, 1024, "normal"), (5, 3091, "ties"), (6, 2050, "nan row"), (7, 1040, "subnormal")):
        for between in (None, F32):
            flags = {"round_norm": rows % 2 == 0, "weight_offset": rows % 3 / 2, "between": between}
            for function in ("rms_norm_add", "rms_norm_add_rms_norm"):
                check(agree, function, Case(rows, hidden, data=data).of(dtype), **flags)


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton", but=["norm first"])
@pytest.mark.left_out("triton_ptx")
def test_many_gated_rows(mode, agree, first):
    """Blocks of rows whose last one is shorter: short rows, groups, and rows that a CPU gates one by one."""
    for rows, hidden, group, x, z, weight in (
        (515, 24, None, BF16, BF16, BF16),
        (1030, 24, 8, F16, F16, F16),
        (300, 48, None, F32, F32, F32),
        (259, 96, 32, BF16, F32, F32),
        (257, 2049, None, BF16, BF16, BF16),
        (40, 1056, 528, BF16, BF16, BF16),
    ):
        flags = {"group_size": group, "norm_before_gate": first, "round_norm": True}
        check(agree, "rms_norm_gated", Case(rows, hidden, x, z, weight), **flags)


# Each operation as its steps, one after the other: results, what they must be, and words for both.


def steps_of_heads(dtype):
    """Each head is a norm of its own."""
    x, residual, weight = operands(Case(6, 128).of(dtype))
    heads = torch.stack((weight, weight * 2, weight * 3))
    y, total = fusednorm.fused_add_rms_norm(x.view(2, 3, 128), residual.view(2, 3, 128), heads)
    for k in range(3):
        yield (y[:, k], total[:, k]), fusednorm.fused_add_rms_norm(x[k::3], residual[k::3], heads[k]), f"head {k}"


def steps_around_a_norm(dtype):
    """A bias is added to the rounded row where there is no weight, and x is rounded after it was multiplied."""
    wide = torch.promote_types(dtype, F32)
    x, residual, weight = operands(Case(6, 130).of(dtype))
    wanted = (fusednorm.rms_norm(x).to(wide) + weight.to(wide)).to(dtype)
    yield [fusednorm.rms_norm(x, bias=weight, round_norm=True)], [wanted], "a bias"
    wanted = fusednorm.fused_add_rms_norm((x.to(wide) * 0.22).to(dtype), residual, weight)
    yield fusednorm.fused_add_rms_norm(x, residual, weight, x_scale=0.22), wanted, "a scaled x"


def steps_of_two_norms(dtype):
    """A norm, an addition of torch's own, and a norm."""
    for hidden in SIZES["hidden"]:
        x, residual, weight = operands(Case(3, hidden).of(dtype))
        sums = fusednorm.rms_norm(x, weight, 1e-3) + residual
        found = fusednorm.rms_norm_add_rms_norm(x, residual, weight, weight, 1e-3, next_eps=1e-6)
        yield found, (fusednorm.rms_norm(sums, weight, 1e-6), sums), f"rows and sums of {hidden}"
        yield [fusednorm.rms_norm_add(x, residual, weight, 1e-3)], [sums], f"the sum alone of {hidden}"


def steps_of_gates(dtype):
    """``silu_and_mul`` is silu, rounded, and a multiplication."""
    g, u, _ = operands(Case(6, 300).of(dtype))
    silu, wide = fusednorm.gate(torch.ones_like(g), g), torch.promote_types(dtype, F32)
    yield [fusednorm.silu_and_mul(g, u)], [silu * u], "rounded between"
    unrounded = (fusednorm.gate(torch.ones_like(g), g, out_dtype=wide) * u.to(wide)).to(dtype)
    yield [fusednorm.gate(u, g)], [unrounded], "gate"
    if dtype != F64:
        yield [fusednorm.silu_and_mul(g, u, between=F32)], [unrounded], "not rounded between"


def steps_of_gated_norms(dtype):
    x, z, weight = operands(Case(3, 100).of(dtype))
    wanted = fusednorm.gate(fusednorm.rms_norm(x, weight), z)
    yield [fusednorm.rms_norm_gated(x, z, weight)], [wanted], "the norm first"
    product = fusednorm.gate(x, z, out_dtype=torch.promote_types(dtype, F32))
    wanted = fusednorm.rms_norm(product, weight, out_dtype=dtype)
    yield [fusednorm.rms_norm_gated(x, z, weight, norm_before_gate=False)], [wanted], "the gate first"


def steps_of_rotations(dtype):
    """A norm of each head, and torch's own operations as models write them."""
    q, _, weight = operands(Case(24, 64).of(dtype))
    q, (cos, sin, _) = q.view(6, 4, 64), operands(Case(6, 32, seed=3).of(dtype))
    rows = fusednorm.rms_norm(q, weight, round_norm=True)
    twice = [torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin)]
    turned = rows * twice[0] + torch.cat((-rows[..., 32:], rows[..., :32]), -1) * twice[1]
    found = fusednorm.qk_norm_rope(q, q[:, :1], weight, weight, cos, sin, round_norm=True, round_products=True)
    yield found, (turned, turned[:, :1]), "heads of q and k"
    yield [fusednorm.rotate(rows, cos, sin, round_products=True)], [turned], "the rotation alone"
    weights = torch.stack([weight * (k + 1) for k in range(4)])
    found, _ = fusednorm.qk_norm_rope(q, q, weights, weight, cos, sin)
    for k in range(4):
        alone, _ = fusednorm.qk_norm_rope(q[:, k : k + 1], q, weights[k], weight, cos, sin)
        yield [found[:, k : k + 1]], [alone], f"a weight for head {k}"


def steps_of_quantizers(dtype):
    """A norm or a gate, and a quantizer."""
    x, residual, weight = operands(Case(7, 512).of(dtype))
    axes = PRESETS.values(), (None, F32)[: 1 + (dtype != F64)], (True, False)
    for quantization, between, normalises in covering(*map(tuple, axes)):
        more, about = {"quantization": quantization, **scales_given(quantization)}, f"{quantization}, {between}"
        if normalises:
            y, total = fusednorm.fused_add_rms_norm(x, residual, weight, out_dtype=between)
            found = fusednorm.fused_add_rms_norm_quant(x, residual, weight, between=between, **more)
            yield bytes_of(found), bytes_of((*fusednorm.quantize(y, **more), total)), f"a norm, {about}"
        else:
            product = fusednorm.gate(x, residual, out_dtype=F32) if between else fusednorm.silu_and_mul(residual, x)
            found = fusednorm.silu_and_mul_quant(residual, x, between=between, **more)
            yield bytes_of(found), bytes_of(fusednorm.quantize(product, **more)), f"a gate, {about}"


STEPS = (
    *(steps_of_heads, steps_around_a_norm, steps_of_two_norms, steps_of_gates),
    *(steps_of_gated_norms, steps_of_rotations, steps_of_quantizers),
)


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.left_out(but=["*-bfloat16"])
@pytest.mark.left_out("triton_cpu", of=["steps_of_quantizers-*"])
@pytest.mark.left_out("triton_ptx")
def test_separate_calls(mode, agree, steps, dtype):
    for found, wanted, about in steps(dtype):
        agree(found, wanted, f"{about}, {dtype_name(dtype)}")


@pytest.mark.large
@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out
def test_two_norms_of_rows_beyond_the_cache(mode, agree, dtype):
    """The operands exceed the caches; new outputs, outputs in place, and each in the other one's place."""
    for hidden, between in ((1024, None), (1024, F32), (3104, None), (1031, F32)):
        x, residual, weight = operands(Case((9 << 20) // (2 * dtype.itemsize * hidden), hidden).of(dtype))
        sums = fusednorm.rms_norm(x, weight, 1e-3, out_dtype=between)
        y, total = fusednorm.fused_add_rms_norm(sums, residual, weight, 1e-6, out_dtype=dtype)
        arguments, flags = (weight, weight, 1e-3), {"next_eps": 1e-6, "between": between}
        outputs = fusednorm.rms_norm_add_rms_norm(x, residual, *arguments, **flags)
        swapped = {"out": residual.clone(), "residual_out": x.clone()}
        given = fusednorm.rms_norm_add_rms_norm(swapped["residual_out"], swapped["out"], *arguments, **flags, **swapped)
        in_place = fusednorm.rms_norm_add_rms_norm_(x, residual, *arguments, **flags)
        for found in (outputs, given, in_place):
            agree(found, (y, total), f"rows and sums of {hidden}, {between}")
