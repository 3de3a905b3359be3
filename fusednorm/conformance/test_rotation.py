"""Heads of q and k, normalised and rotated, have the bits of plain operations one after the other, on every backend."""

import pytest
import torch

import fusednorm
from fusednorm.conformance import oracle
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, covering, dtype_name, operands

#: Rows of heads, in two dimensions, and heads of q and of k.
ROWS, Q, K = (2, 3), 3, 2


def check(agree, dtype, table, size, pairs, data="normal", **flags):
    """Compares outputs and gradients with the oracle's, and calls with given outputs and in place with both.

    q and k are views into one tensor, behind which v lies.
    """
    norm = flags.get("norm", True)
    qkv = operands(Case(6 * (Q + K + 1), size, data=data).of(dtype))[0].view(*ROWS, Q + K + 1, size)
    heads = qkv[..., :Q, :], qkv[..., Q : Q + K, :]
    weights = [operands(Case(1, size, seed=seed).of(dtype))[2] if norm else None for seed in (1, 2)]
    cos, sin, _ = (None, None, None) if pairs is None else operands(Case(6, pairs, seed=3).of(table))
    tables = [None if t is None else t.view(*ROWS, pairs) for t in (cos, sin)]
    incoming = [operands(Case(6 * n, size, seed=4 + n).of(dtype))[0].view(*ROWS, n, size) for n in (Q, K)]
    about = f"{dtype_name(dtype)} heads of {size}, {pairs} pairs, {dtype_name(table)} tables, {data}, {flags}"
    wanted = oracle.qk_norm_rope([*heads, *weights, *tables], incoming, 1e-6, **flags)

    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (*heads, *weights)]
    outputs = fusednorm.qk_norm_rope(*leaves, *tables, **flags)
    found = [*outputs, *torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], incoming)]
    for got, array in zip(found, [array for array in wanted if array is not None], strict=True):
        agree(got, torch.from_numpy(array).to(got.dtype), about)

    outputs, v = [output.detach() for output in outputs], qkv[..., Q + K :, :].clone()
    given = [torch.empty_like(output) for output in outputs]
    fusednorm.qk_norm_rope(*heads, *weights, *tables, **flags, q_out=given[0], k_out=given[1])
    fusednorm.qk_norm_rope_(*heads, *weights, *tables, **flags)
    for output, out, in_place in zip(outputs, given, heads, strict=True):
        agree(out, output, f"{about}, given outputs")
        agree(in_place, output, f"{about}, in place")
    agree(qkv[..., Q + K :, :], v, f"{about}, v")


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_flags(mode, agree, dtype):
    """Every rounding, both orders of pairs, and rotations of whole heads, of parts and of none."""
    between = (None,) if dtype == F64 else (None, F32)
    sizes = ((64, 32), (128, 64), (80, 16), (7, 2), (96, None), (2, 1))
    axes = ((True, False), (True, False), between, (True, False), (0.0, 1.0), (True, False), sizes)
    for interleaved, products, passed, round_norm, offset, norm, (size, pairs) in covering(
        *axes, turn=DTYPES.index(dtype)
    ):
        flags = {"interleaved": interleaved, "round_products": products, "between": passed}
        flags |= {"round_norm": round_norm, "weight_offset": offset, "norm": norm or pairs is None}
        check(agree, dtype, dtype, size, pairs, **flags)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_tables_of_other_dtypes(mode, agree, dtype):
    for table in (BF16, F16, F32, F64):
        for flags in ({}, {"round_products": True}):
            check(agree, dtype, table, 24, 12, **flags)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("data", ["nan row", "inf row", "zeros", "subnormal", "overflowing", "ties"])
def test_data(mode, agree, data):
    for dtype in (BF16, F16, F32):
        check(agree, dtype, F32, 64, 32, data, round_products=dtype == F16)


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_separate_calls(mode, agree, dtype):
    """A norm of each head, and torch's own operations as models write them."""
    q, _, weight = operands(Case(24, 64).of(dtype))
    q, (cos, sin, _) = q.view(6, 4, 64), operands(Case(6, 32, seed=3).of(dtype))
    rows = fusednorm.rms_norm(q, weight, round_norm=True)
    twice = [torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin)]
    turned = rows * twice[0] + torch.cat((-rows[..., 32:], rows[..., :32]), -1) * twice[1]
    found = fusednorm.qk_norm_rope(q, q[:, :1], weight, weight, cos, sin, round_norm=True, round_products=True)
    agree(found[0], turned, "heads of q")
    agree(found[1], turned[:, :1], "heads of k")
    agree(fusednorm.rotate(rows, cos, sin, round_products=True), turned, "the rotation alone")


@pytest.mark.promise("a row is a row")
def test_positions_take_rows_of_the_tables(mode, agree):
    q, _, weight = operands(Case(24, 64).of(BF16))
    q, (cos, sin, _) = q.view(6, 4, 64), operands(Case(9, 32, seed=3).of(F32))
    positions = torch.tensor([8, 0, 3, 3, 1, 7])
    found, _ = fusednorm.qk_norm_rope(q, q, weight, weight, cos, sin, positions=positions)
    for row, position in enumerate(positions.tolist()):
        alone = fusednorm.qk_norm_rope(q[row], q[row], weight, weight, cos[position], sin[position])
        agree(found[row], alone[1], f"row {row}")
