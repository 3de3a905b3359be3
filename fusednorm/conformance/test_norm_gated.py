"""A norm with a gate has the bits of the plain operations one after the other, on every backend."""

import pytest
import torch

import fusednorm
from fusednorm.conformance import oracle_gated
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, covering, dtype_name, operands, recorded


def check(agree, case, group_size=None, **flags):
    """Compares the rows and all gradients with the oracle's, and the call in place with the call."""
    x, z, weight = operands(case)
    d = operands(Case(case.rows, case.hidden, seed=1).of(case.x))[0]
    flags = {"group_size": group_size, **flags, **case.flags}
    wanted = oracle_gated.rms_norm_gated(x, z, weight, d, **flags)
    found = recorded("rms_norm_gated", (x, z, weight), [d], **flags)
    agree(found.values(), [tensor for tensor in wanted if tensor is not None], f"{case}, {flags}")
    agree(fusednorm.rms_norm_gated_(x, z, weight, **flags), found["out"], f"{case}, {flags}, in place")


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton_ptx", "triton", but=["bfloat16", "float64"])
def test_flags(mode, agree, dtype):
    """Every order and rounding, whole rows and groups."""
    between = (None,) if dtype == F64 else (None, F32)
    activations = ("silu", "sigmoid", "gelu_tanh")
    axes = ((True, False), activations, (True, False), between, (0.0, 1.0), (None, 32, 96), (96, 1056))
    for first, activation, round_norm, passed, offset, group, hidden in covering(*axes, turn=DTYPES.index(dtype)):
        case = Case(5, hidden, round_norm=round_norm, weight_offset=offset).of(dtype)
        flags = {"norm_before_gate": first, "activation": activation, "between": passed if first else None}
        check(agree, case, group, **flags)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("x", [BF16, F16, F32, F64], ids=dtype_name)
@pytest.mark.left_out
def test_mixed_dtypes(mode, agree, x):
    for z, weight, first, group in covering((BF16, F32), (None, F16, F32), (True, False), (None, 15)):
        check(agree, Case(4, 45, x, z, weight, round_norm=not first), group, norm_before_gate=first)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("data", ["nan row", "inf row", "zeros", "subnormal", "overflowing"])
@pytest.mark.left_out("triton_cpu")
def test_data(mode, agree, data):
    for dtype in (BF16, F16, F32):
        for first in (True, False):
            check(agree, Case(hidden=64, data=data).of(dtype), 32, norm_before_gate=first)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", "triton_ptx", "triton", but=["norm first"])
def test_many_rows(mode, agree, first):
    """Blocks of rows whose last one is shorter: short rows, groups, and rows that a CPU gates one by one."""
    for rows, hidden, group, x, z, weight in (
        (515, 24, None, BF16, BF16, BF16),
        (1030, 24, 8, F16, F16, F16),
        (300, 48, None, F32, F32, F32),
        (259, 96, 32, BF16, F32, F32),
        (257, 2049, None, BF16, BF16, BF16),
        (40, 1056, 528, BF16, BF16, BF16),
    ):
        check(agree, Case(rows, hidden, x, z, weight, round_norm=True), group, norm_before_gate=first)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
def test_each_operand_alone(mode, agree, first):
    """The gradient of one operand or two has the bits that it has beside the others."""
    for dtype, group in ((BF16, None), (BF16, 48), (F64, None)):
        x, z, weight = operands(Case(7, 96).of(dtype))
        d = operands(Case(1, 96, seed=1).of(dtype))[0].expand(7, 96)
        flags = {"norm_before_gate": first, "group_size": group}
        all_of_them = oracle_gated.rms_norm_gated(x, z, weight, d, **flags)[1:]
        for wanted in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, z, weight))]
            out = fusednorm.rms_norm_gated(*leaves, **flags)
            found = torch.autograd.grad(out, [leaves[i] for i in wanted], d)
            for i, got in zip(wanted, found, strict=True):
                agree(got, all_of_them[i], f"gradient {i} of {wanted}, {dtype_name(dtype)}, groups of {group}")


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out(but=["bfloat16"])
def test_separate_calls(mode, agree, dtype):
    x, z, weight = operands(Case(hidden=100).of(dtype))
    agree(
        fusednorm.rms_norm_gated(x, z, weight),
        fusednorm.gate(fusednorm.rms_norm(x, weight), z),
        f"the norm first, {dtype_name(dtype)}",
    )
    wide = F64 if dtype == F64 else F32
    product = fusednorm.gate(x, z, out_dtype=wide)
    agree(
        fusednorm.rms_norm_gated(x, z, weight, norm_before_gate=False),
        fusednorm.rms_norm(product, weight, out_dtype=dtype),
        f"the gate first, {dtype_name(dtype)}",
    )
