"""Heads of q and k, normalised and rotated, have the bits of plain operations one after the other, on every backend."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, covering, dtype_name, operands
from fusednorm.reference import rotation

pytestmark = pytest.mark.promise("same bits")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", but=["bfloat16", "float64"])
@pytest.mark.left_out("triton_ptx", but=["bfloat16"])
def test_operator(mode, agree, dtype):
    """Of any dtypes, which no public function combines; and of odd heads, whose last number is left as it is."""
    x, cos, sin = operands(Case(6, 40).of(dtype))[0].view(3, 2, 40), *operands(Case(3, 19, seed=3).of(F32))[:2]
    axes, turn = ((True, False), (None, *DTYPES), DTYPES), DTYPES.index(dtype)
    for interleaved, rounded_to, out in covering(*axes, turn=turn):
        found = torch.ops.fusednorm.rotate(x, cos, sin, interleaved, rounded_to, out)
        wanted = rotation.rotated(x, cos, sin, interleaved, rounded_to, out)
        agree(found, wanted, f"{interleaved}, {rounded_to}, {out}")
    for interleaved in (True, False):
        found = fusednorm.rotate(x[..., :39], cos, sin, interleaved=interleaved)
        agree(found, rotation.rotated(x[..., :39], cos, sin, interleaved, None, dtype), f"odd heads, {interleaved}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_nans_of_tables(mode, agree, dtype):
    """All bits of such a NaN are set: rounding to bfloat16 in integers would carry it into -0."""
    x = operands(Case(6, 40).of(dtype))[0].view(3, 2, 40)
    for table, whole in ((F16, torch.int16), (F32, torch.int32), (F64, torch.int64)):
        if table == F64 and dtype != F64:
            continue
        cos, sin = (t.clone() for t in operands(Case(3, 20, seed=3).of(table))[:2])
        for t, row in ((cos, 0), (sin, 1)):
            t.view(whole)[row, 2:5] = torch.iinfo(whole).max
        for interleaved in (True, False):
            found = fusednorm.rotate(x, cos, sin, interleaved=interleaved)
            agree(found, rotation.rotated(x, cos, sin, interleaved, None, dtype), f"{table} tables, {interleaved}")


@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (80, 40), (96, 20)])
def test_order_of_additions(mode, agree, size, pairs):
    """So many heads of float32 that another order of additions gives some of them another sum, and another rstd."""
    q = operands(Case(4 * 32, size).of(F32))[0].view(4, 32, size)
    cos, sin, _ = operands(Case(4, pairs, seed=3).of(F32))
    for interleaved in (True, False):
        with fusednorm.use_backend("reference"):
            wanted = fusednorm.qk_norm_rope(q, q[:, :1], None, None, cos, sin, interleaved=interleaved)
        found = fusednorm.qk_norm_rope(q, q[:, :1], None, None, cos, sin, interleaved=interleaved)
        agree(found, wanted, f"{size}, {pairs}, {interleaved}")


def test_products_of_numbers_beyond_float16(mode, agree):
    """Angles that float16 has not, in bfloat16, and products that it has."""
    x, _, _ = operands(Case(6, 40).of(F32))
    heads, (cos, sin, _) = (x / 256).half().view(3, 2, 40), operands(Case(3, 20, seed=3).of(F32))
    for scale in (2.0**20, 2.0**-20):
        tables = (cos * scale).bfloat16(), (sin * scale).bfloat16()
        for interleaved in (True, False):
            found = fusednorm.rotate(heads / scale**0.5, *tables, interleaved=interleaved, round_products=True)
            wanted = rotation.rotated(heads / scale**0.5, *tables, interleaved, F16, F16)
            agree(found, wanted, f"tables of {scale}, {interleaved}")


@pytest.mark.promise("a row is a row")
def test_positions_take_rows_of_the_tables(mode, agree):
    q, _, weight = operands(Case(24, 64).of(BF16))
    q, (cos, sin, _) = q.view(6, 4, 64), operands(Case(9, 32, seed=3).of(F32))
    positions = torch.tensor([8, 0, 3, 3, 1, 7])
    found, _ = fusednorm.qk_norm_rope(q, q, weight, weight, cos, sin, positions=positions)
    for row, position in enumerate(positions.tolist()):
        alone = fusednorm.qk_norm_rope(q[row], q[row], weight, weight, cos[position], sin[position])
        agree(found[row], alone[1], f"row {row}")


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("shape", [(3,), (2, 1, 3), (1,), ()], ids=str)
def test_a_row_of_tables_may_be_for_several(mode, agree, shape):
    """And positions may be whole numbers of either type, of tables whose columns are adjacent too."""
    q = operands(Case(12 * 3, 16).of(BF16))[0].view(2, 2, 3, 3, 16)
    flat = operands(Case(torch.Size(shape).numel(), 6, seed=3).of(F32))[:2]
    few = [t.view(*shape, 6) for t in flat]
    wanted = fusednorm.rotate(q, *(t.expand(2, 2, 3, 6).contiguous() for t in few))
    agree(fusednorm.rotate(q, *few), wanted, "tables")
    positions = torch.arange(len(flat[0]), dtype=torch.int32).view(shape)
    agree(fusednorm.rotate(q, *flat, positions=positions), wanted, "positions")
    by_column = [t.T.contiguous().T for t in flat]
    agree(fusednorm.rotate(q, *by_column, positions=positions.long()), wanted, "positions, by column")
