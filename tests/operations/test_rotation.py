"""Rotation of heads: what is refused, who sees a call, derivatives, and the formulas of other libraries."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusednorm import qk_norm_rope, rms_norm, rotate
from fusednorm.calls import fast_path
from fusednorm.conformance.cases import BF16, F32, Case, operands

from fast_calls import fast_calls

QKV = operands(Case(12 * 8, 16).of(BF16))[0].view(3, 4, 8, 16)
Q, K = QKV[:, :, :4], QKV[:, :, 4:6]
WEIGHT = operands(Case(1, 16).of(BF16))[2]
ANGLES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
COS, SIN = ANGLES.cos(), ANGLES.sin()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rotate(Q[0, 0, 0], COS, SIN), ValueError, r"x must be \[..., H, D\], rows of heads, got shape \[16\]"),
        (lambda: rotate(Q, COS, None), TypeError, "sin must be a torch.Tensor, got NoneType; cos and sin go together"),
        (
            lambda: rotate(Q, COS.repeat(1, 2), SIN.repeat(1, 2)),
            ValueError,
            r"cos must have 1 to 8 columns, .* \[4, 16\]",
        ),
        (lambda: rotate(Q, torch.tensor(1.0), torch.tensor(1.0)), ValueError, r"1 to 8 columns, .* got shape \[\]"),
        (lambda: rotate(Q, COS[:3], SIN[:3]), ValueError, r"cos must have rows of shape \[3, 4\], .* got \[3\]"),
        (lambda: rotate(Q, COS.expand(1, 3, 4, 8), SIN.expand(1, 3, 4, 8)), ValueError, r"got \[1, 3, 4\]"),
        (lambda: rotate(Q, COS.clone().requires_grad_(), SIN), RuntimeError, "cos requires grad, and tables have no"),
        (
            lambda: rotate(Q, COS.view(1, 4, 8), SIN.view(1, 4, 8), positions=torch.zeros(4).long()),
            ValueError,
            r"cos must be \[P, K\], a row for each position, got shape \[1, 4, 8\]",
        ),
        (
            lambda: rotate(Q, COS, SIN, positions=torch.arange(1, 5)),
            ValueError,
            "positions must be 0 to 3, .* got 1 to 4",
        ),
        (lambda: rotate(Q, COS, SIN, positions=-torch.ones(4).int()), ValueError, "got -1 to -1"),
        (
            lambda: rotate(Q.clone().requires_grad_(), COS, SIN, positions=torch.arange(1, 5)),
            ValueError,
            "positions must be 0 to 3, .* got 1 to 4",
        ),
        (
            lambda: qk_norm_rope(Q, K[:2]),
            ValueError,
            r"k must have q's shape \[3, 4, 4, 16\] but for the number of heads",
        ),
        (
            lambda: qk_norm_rope(Q, K, WEIGHT, norm=False),
            TypeError,
            "q_weight is given, and with norm=False there is no norm",
        ),
        (lambda: qk_norm_rope(Q, K, norm=False), TypeError, "so there is nothing to do"),
        (lambda: qk_norm_rope(Q, K, positions=torch.arange(4)), TypeError, "positions are given without tables"),
        (lambda: qk_norm_rope(Q, K, sin=SIN), TypeError, "cos must be a torch.Tensor, got NoneType; cos and sin go"),
        (
            lambda: rotate(Q[..., :1], COS[:, :1], SIN[:, :1]),
            ValueError,
            r"x must have heads of at least 2 numbers, .* got shape \[3, 4, 4, 1\]",
        ),
        (lambda: rotate(Q, None, None), TypeError, "cos and sin go together: pass both$"),
    ],
)
def test_what_is_refused_is_named(call, error, words):
    kept = QKV.clone()
    with pytest.raises(error, match=words):
        call()
    assert QKV.equal(kept)


@pytest.mark.parametrize(
    ("k_is_q", "q_out", "k_out"),
    [
        (False, "k", None),
        (False, None, "q"),
        (False, "q", None),
        (False, None, "k"),
        (False, "k", "q"),
        (True, "q", None),
        (True, None, "q"),
    ],
)
def test_outputs_that_are_operands(k_is_q, q_out, k_out):
    """An output may be any operand; also where one tensor is both q and k."""
    q, weight = torch.randn(40, 16, 128), torch.randn(16, 128)
    given = {"q": q, "k": q if k_is_q else torch.randn(40, 16, 128)}
    wanted = [t.clone() for t in qk_norm_rope(*given.values(), weight, None)]
    found = qk_norm_rope(*given.values(), weight, None, q_out=given.get(q_out), k_out=given.get(k_out))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("rows", [(0,), (2, 0), (2, 0, 0), (0, 3, 0), (2, 0, 3, 0)])
def test_no_rows(rows):
    """Whatever the strides of the tables say."""
    x, table = torch.empty(*rows, 2, 4), torch.empty(*rows, 1)
    for cos in (table, torch.empty(1, *rows[1:], 1), torch.empty(1)):
        assert rotate(x, cos, cos).shape == x.shape
        assert [y.shape for y in qk_norm_rope(x, x, cos=cos, sin=cos)] == [x.shape, x.shape]


def test_an_output_that_is_the_weight():
    q, k, weight = torch.randn(16, 128), torch.randn(16, 128), torch.randn(16, 128)
    wanted = [t.clone() for t in qk_norm_rope(q, k, weight, None)]
    assert all(map(torch.equal, qk_norm_rope(q, k, weight, None, q_out=weight), wanted))


def test_the_fast_path_takes_what_is_usual_and_nothing_else():
    """Where torch has DLPack's exchange API. What it does not take, it leaves untouched."""
    if not fast_path.OPEN:
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        return
    take = fast_calls("cpu")
    q, k = torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    cos, sin, weight = torch.ones(3, 8), torch.ones(3, 8), torch.ones(16)
    positions, grad = torch.tensor([2, 0, 1]), torch.ones(3, 4, 16, requires_grad=True)

    def run(
        q=q,
        k=k,
        weights=(weight, None),
        tables=(cos, sin),
        positions=None,
        out=(None, None),
        numbers=(1e-6, 0.0),
        **flags,
    ):
        heads = {"q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "q_out": out[0], "k_out": out[1]}
        rotation = {"cos": tables[0], "sin": tables[1], "positions": positions}
        norm = {"norm": True, "eps": numbers[0], "weight_offset": numbers[1]}
        return take("rotation", **heads, **rotation, **(norm | flags))

    qkv, batches = torch.ones(3, 8, 16), torch.ones(2, 5, 8, 16)[:, :3]
    apart, shared = [batches[:, :, :4], batches[:, :, 4:6]], [batches[:, :, :4], batches[:, :, 3:5]]
    first, second = torch.ones(2, 4, 3, 16).transpose(1, 2), torch.ones(2, 2, 3, 16).transpose(1, 2)
    usual = {
        "plain": run(),
        "views": run(qkv[:, :4], qkv[:, 4:6]),
        "views in place": run(qkv[:, :4], qkv[:, 4:6], out=(qkv[:, :4], qkv[:, 4:6])),
        "views of batches in place": run(*apart, out=apart),
        "heads before rows, in place": run(first, second, out=(first, second)),
        "q alone": run(k=None),
        "no norm": run(weights=(None, None), norm=False),
        "no rotation": run(tables=(None, None)),
        "positions": run(positions=positions),
        "short positions": run(positions=positions.int()),
        "one position": run(positions=torch.tensor(1)),
        "one row of tables": run(tables=(cos[0], sin[:1])),
        "heads of the weight": run(weights=(torch.ones(4, 16), None)),
        "tables of other types": run(tables=(cos.double(), sin.bfloat16())),
        "part of the heads": run(tables=(cos[:, :5], sin[:, :5])),
        "two levels": run(qkv.expand(2, 3, 8, 16)[:, :, :4], torch.ones(2, 3, 2, 16), tables=(cos, sin)),
        "gaps": run(torch.ones(3, 4, 20)[..., 2:18]),
    }
    with torch.no_grad():
        usual["no_grad"] = run(grad)
    refused = [name for name, found in usual.items() if found is None and name != "one row of tables"]
    assert refused == []
    assert usual["one row of tables"] is None  # cosines and sines of two shapes: Python reports it
    assert usual["q alone"][1] is None
    with torch.no_grad():
        assert all(map(torch.equal, run(between=F32, round_products=True), run()))  # float32 is not rounded
    out = torch.full((3, 4, 16), 7.0)
    unusual = {
        "no rows": lambda: run(q[:0], k[:0]),
        "rows in three levels": lambda: run(
            torch.ones(2, 3, 4, 5, 16)[:, :2, :3, :4], torch.ones(2, 2, 3, 2, 16), tables=(cos[0], sin[0])
        ),
        "views in place that share a head": lambda: run(*shared, out=shared),
        "k's place that shares a head with q": lambda: run(*shared, out=(None, shared[1])),
        "q's place for k": lambda: run(*apart, out=(apart[0], apart[0][:, :, 2:])),
        "a weight for a missing k": lambda: run(k=None, weights=(None, weight), out=(out, None)),
        "a weight without a norm": lambda: run(norm=False, out=(out, None)),
        "a weight of other heads": lambda: run(weights=(torch.ones(2, 16), None), out=(out, None)),
        "nothing to do": lambda: run(weights=(None, None), tables=(None, None), norm=False, out=(out, None)),
        "one table": lambda: run(tables=(cos, None), out=(out, None)),
        "tables that are too wide": lambda: run(tables=(torch.ones(3, 9),) * 2, out=(out, None)),
        "tables of other rows": lambda: run(tables=(cos[:2], sin[:2]), out=(out, None)),
        "tables of a row too many": lambda: run(tables=(cos[None, None], sin[None, None]), out=(out, None)),
        "tables of unequal widths": lambda: run(tables=(cos, sin[:, :4]), out=(out, None)),
        "a gradient of a table": lambda: run(tables=(cos.clone().requires_grad_(), sin), out=(out, None)),
        "positions beyond the table": lambda: run(positions=positions + 1, out=(out, None)),
        "positions before the table": lambda: run(positions=positions - 1, out=(out, None)),
        "positions without tables": lambda: run(tables=(None, None), positions=positions, out=(out, None)),
        "positions in a table of three dimensions": lambda: run(
            tables=(cos[None], sin[None]), positions=positions, out=(out, None)
        ),
        "float64 to float32": lambda: run(q.double(), k.double(), between=F32),
        "eps of another type": lambda: run(numbers=(1, 0.0), out=(out, None)),
        "a flag of another type": lambda: run(interleaved=1, out=(out, None)),
        "rstd of other heads": lambda: run(out=(out, None), q_rstd=torch.ones(3, 2), k_rstd=torch.ones(3, 2)),
        "heads of an output with themselves": lambda: run(out=(out[:, :1].expand(3, 4, 16), None)),
    }
    for name, call in unusual.items():
        assert call() is None, name
        assert out.eq(7).all(), name
        assert out._version == 0, name
    with FlopCounterMode(display=False):
        assert run() is None
    assert fast_calls("cuda")("rotation", q=q, k=k, norm=True) is None
    kept = q.clone()
    run(kept, None, weights=(None, None), out=(kept, None))
    assert kept._version == 1


def test_recorded_calls_are_checked_on_the_fast_path_too():
    """Earlier calls have opened it."""
    x, positions = Q.clone().requires_grad_(), torch.arange(4)
    for _ in range(2):
        rotate(x, COS, SIN)
        rotate(x, COS, SIN, positions=positions)
    for given in (x, Q):
        with pytest.raises(RuntimeError, match="cos requires grad, and tables have no gradient"):
            rotate(given, COS.clone().requires_grad_(), SIN)
    with pytest.raises(ValueError, match=r"positions must be 0 to 3, .* got 1 to 4"):
        rotate(x, COS, SIN, positions=positions + 1)


def test_a_gradient_is_the_rotation_back():
    """With cosines and sines of angles of 90 degrees no rounding is left."""
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    quarter, half = (torch.zeros(4, 8), torch.ones(4, 8)), (-torch.ones(4, 8), torch.zeros(4, 8))
    assert rotate(rotate(x, *quarter), *quarter).equal(rotate(x, *half))
    y = rotate(x, *quarter)
    assert torch.autograd.grad(y, x, y)[0].equal(x)


def test_positions_of_a_fixed_shape_beside_rows_of_any():
    """The compiler's number of rows is no constant, and equals that of the positions all the same."""

    def call(q, cos, sin):
        return rotate(q, cos, sin, positions=torch.arange(3))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(Q[:, 0], COS, SIN), call(Q[:, 0], COS, SIN))


# What other libraries compute


def turned_by_halves(x, cos, sin):
    """Hugging Face's ``apply_rotary_pos_emb``, of tables with the angles twice."""
    cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


def test_hugging_face():
    """Qwen 3: ``weight * normalised.to(dtype)``, and tables in the model's dtype: three roundings of each number."""
    cos, sin = COS.bfloat16(), SIN.bfloat16()
    found = qk_norm_rope(Q, K, WEIGHT, WEIGHT, cos, sin, round_norm=True, round_products=True)
    for heads, got in zip((Q, K), found, strict=True):
        assert got.equal(turned_by_halves(rms_norm(heads, round_norm=True) * WEIGHT, cos, sin))


def test_qwen_vl():
    """Qwen 2-VL has three positions for each row, and chooses sections of tables with the angles twice."""
    angles = torch.randn(3, 3, 4, 8, generator=torch.Generator().manual_seed(1))  # axes, batch, rows, pairs
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def of_axes(table):
        return torch.cat([part[axis] for axis, part in enumerate(table.split((2, 3, 3), -1))], -1)

    def chosen(table):
        parts = torch.cat((table, table), -1).split((2, 3, 3) * 2, -1)
        return torch.cat([part[place % 3] for place, part in enumerate(parts)], -1).unsqueeze(-2)

    found = qk_norm_rope(Q, K, cos=of_axes(cos), sin=of_axes(sin), norm=False, round_products=True)
    for heads, got in zip((Q, K), found, strict=True):
        turned = torch.cat((-heads[..., 8:], heads[..., :8]), -1)
        assert got.equal(heads * chosen(cos) + turned * chosen(sin))


def test_flashinfer():
    """The norm is rounded to bfloat16; the rotation is float32's, with interleaved pairs or halves, rounded once."""
    rows = rms_norm(Q, WEIGHT).float()
    found, _ = qk_norm_rope(Q, K, WEIGHT, WEIGHT, COS, SIN)
    assert found.equal(turned_by_halves(rows, COS, SIN).bfloat16())
    found, _ = qk_norm_rope(Q, K, WEIGHT, WEIGHT, COS, SIN, interleaved=True)
    a, b = rows[..., 0::2], rows[..., 1::2]
    cos, sin = COS.unsqueeze(-2), SIN.unsqueeze(-2)
    assert found.equal(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).bfloat16())


def test_sglang_on_a_cpu():
    """A partial rotation by positions, with a table of the model's dtype that has cosines and sines side by side.

    Its kernel rounds a head once after the norm, and rotated numbers once.
    """
    cache = torch.cat((COS[:, :6], SIN[:, :6]), -1).bfloat16()
    q, k, positions = Q[0], K[0], torch.tensor([3, 0, 0, 2])
    found = qk_norm_rope(q, k, WEIGHT, WEIGHT, cache[:, :6], cache[:, 6:], positions=positions)
    for heads, got in zip((q, k), found, strict=True):
        rows = rms_norm(heads, WEIGHT).float()
        cos, sin = (t[positions].float().unsqueeze(1) for t in (cache[:, :6], cache[:, 6:]))
        x, y = rows[..., :6], rows[..., 6:12]
        wanted = torch.cat((x * cos - y * sin, y * cos + x * sin, rows[..., 12:]), -1)
        assert got.equal(wanted.bfloat16())


def test_vllm():
    """Its kernel for q and k rounds once, at the end, and multiplies a number by ``rstd * weight``.

    That product is another one: few numbers of bfloat16 differ, each by one unit in the last place.
    """
    q = operands(Case(4096, 16).of(BF16))[0].view(256, 16, 16)
    cos, sin = COS.repeat(64, 1), SIN.repeat(64, 1)
    wide = q.float()
    rstd = 1 / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = turned_by_halves(wide * (rstd * WEIGHT.float()), cos, sin).bfloat16()
    found, _ = qk_norm_rope(q, q, WEIGHT, WEIGHT, cos, sin, between=F32)
    steps = (found.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert 0 < (steps > 0).float().mean() < 0.01
    near = (found - wanted).abs() <= 2**-7 * wanted.abs() + 2**-20
    assert near.all()
