"""Heads of q and k, normalised and rotated, have the bits of plain operations one after the other, on every backend."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, Case, covering, dtype_name, operands
from fusednorm.reference import rotation


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", but=["bfloat16", "float64"])
def test_operator(mode, agree, dtype):
    """Of any dtypes, which no public function combines."""
    x, cos, sin = operands(Case(6, 40).of(dtype))[0].view(3, 2, 40), *operands(Case(3, 17, seed=3).of(F32))[:2]
    axes, turn = ((True, False), (None, *DTYPES), DTYPES), DTYPES.index(dtype)
    for interleaved, rounded_to, out in covering(*axes, turn=turn):
        found = torch.ops.fusednorm.rotate(x, cos, sin, interleaved, rounded_to, out)
        wanted = rotation.rotated(x, cos, sin, interleaved, rounded_to, out)
        agree(found, wanted, f"{interleaved}, {rounded_to}, {out}")


@pytest.mark.promise("same bits")
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


@pytest.mark.promise("same bits")
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


@pytest.mark.promise("same bits")
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


def lying(tensor):
    """The same values in other memory: with gaps, other orders of dimensions, steps, and a sign that is not applied."""
    gaps = torch.zeros([size + 1 for size in tensor.shape], dtype=tensor.dtype)
    inside = gaps[tuple(slice(size) for size in tensor.shape)]
    inside.copy_(tensor)
    yield inside
    yield tensor.transpose(0, -2).contiguous().transpose(0, -2)
    yield tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.stack((tensor, tensor), -1)[..., 0]
    if tensor.dtype in (F32, F64):
        yield torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("cuda", "triton_ptx", "triton", of=["float16"])
def test_memory(mode, agree, dtype):
    """Heads, tables and positions may lie anywhere, and a row of them may be for several."""
    rows, size, pairs = (2, 2, 3), 16, 6
    q, _, weights = operands(Case(12 * 3, size).of(dtype))
    q, k = q.view(*rows, 3, size), operands(Case(12 * 2, size, seed=1).of(dtype))[0].view(*rows, 2, size)
    cos, sin, _ = operands(Case(12, pairs, seed=3).of(F32))
    tables = cos.view(*rows, pairs), sin.view(*rows, pairs)
    wanted = fusednorm.qk_norm_rope(q, k, weights, weights, *tables)

    def gradients(q, k):
        leaves = [t.detach().requires_grad_() for t in (q, k, weights)]
        outputs = fusednorm.qk_norm_rope(*leaves, leaves[2], *tables)
        return torch.autograd.grad(outputs, leaves, wanted)

    wanted_gradients = gradients(q, k)
    for place, others in enumerate(zip(lying(q), lying(k), lying(tables[0]), lying(tables[1]), strict=False)):
        heads = list(others[:2])
        agree(fusednorm.qk_norm_rope(*heads, weights, weights, *others[2:]), wanted, f"memory {place}")
        agree(gradients(*heads), wanted_gradients, f"memory {place}, gradients")
        fusednorm.qk_norm_rope_(*heads, weights, weights, *tables)
        agree(heads, wanted, f"memory {place}, in place")
    for shape in ((3,), (2, 1, 3), (1,), ()):
        few = [t[tuple(slice(n) for n in (1,) * (3 - len(shape)) + shape)].reshape(*shape, pairs) for t in tables]
        several = [t.expand(*rows, pairs).contiguous() for t in few]
        wanted = fusednorm.rotate(q, *several)
        agree(fusednorm.rotate(q, *few), wanted, f"tables of {shape}")
        positions = torch.arange(12, dtype=torch.int32)[: torch.Size(shape).numel()].view(shape)
        flat = [t.reshape(-1, pairs) for t in few]
        agree(fusednorm.rotate(q, *flat, positions=positions), wanted, f"positions of {shape}")
        by_column = [t.T.contiguous().T for t in flat]
        agree(fusednorm.rotate(q, *by_column, positions=positions.long()), wanted, f"positions of {shape}, by column")


@pytest.mark.promise("a row is a row")
def test_outputs_in_the_place_of_other_operands(mode, agree):
    """q's results where k was, and k's where q was."""
    q, k, weight = operands(Case(24, 64).of(BF16))
    q, k, (cos, sin, _) = q.view(6, 4, 64), k.view(6, 4, 64), operands(Case(6, 32, seed=3).of(F32))
    wanted = fusednorm.qk_norm_rope(q, k, weight, weight, cos, sin)
    found = fusednorm.qk_norm_rope(q, k, weight, weight, cos, sin, q_out=k, k_out=q)
    agree(found, wanted, "heads of q and k")


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
def test_rows_and_heads_alone(mode, agree, threads, dtype):
    """Many rows on several threads, and weights of heads, have the bits of each row and of each head alone."""
    rows, size = 90, 128
    q, k = (operands(Case(rows * n, size, seed=n).of(dtype))[0].view(rows, n, size) for n in (2, 1))
    weights = operands(Case(2, size, seed=5).of(dtype))[0], operands(Case(1, size, seed=6).of(dtype))[2]
    tables = [t.view(rows, 64) for t in operands(Case(rows, 64, seed=3).of(BF16))[:2]]
    between = None if dtype == F64 else F32
    threads(3)
    whole = fusednorm.qk_norm_rope(q, k, *weights, *tables, between=between)
    for row in (0, 31, 60, 89):
        taken = [t[row : row + 1] for t in tables]
        for head in (0, 1):
            alone = fusednorm.qk_norm_rope(
                *(q[row : row + 1, head : head + 1], k[row : row + 1], weights[0][head], weights[1], *taken),
                between=between,
            )
            agree(whole[0][row : row + 1, head : head + 1], alone[0], f"row {row}, head {head} of q")
            agree(whole[1][row : row + 1], alone[1], f"row {row} of k")
