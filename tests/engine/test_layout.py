"""Rows in one level of strides or in two: heads of views into a tensor of q, k and v."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.backends import cpu
from fusednorm.calls.memory import (
    ABSENT,
    Memory,
    Rows,
    in_levels,
    overlaps_itself,
    packed,
    rows_of,
    share_memory,
    two_levels,
)
from fusednorm.reference import norm as reference

BACKENDS = [*(["cpu"] if not cpu.unavailable() else []), "reference"]
HEADS = 3

whole = torch.arange(4000, dtype=torch.float32)
counts, strides = st.integers(1, 4), st.integers(0, 40)


def addresses(begin, rows, hidden_size, item):
    """The bytes of the rows."""
    return {
        (begin + i * rows.outer_stride + j * rows.stride) * item + byte
        for i in range(rows.outer)
        for j in range(rows.inner)
        for byte in range(hidden_size * item)
    }


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_share_memory_is_exact(data):
    """Against a set of bytes, for operands of two sizes of elements."""
    hidden_size = data.draw(st.integers(1, 6))
    operands = []
    for item, dtype in ((4, torch.float32), data.draw(st.sampled_from([(4, torch.float32), (2, torch.float16)]))):
        if not operands or data.draw(st.booleans()):  # else the same strides: columns of one matrix
            outer, inner = data.draw(counts), data.draw(counts)
            rows = Rows(outer, inner, data.draw(strides) if outer > 1 else 0, data.draw(strides))
        begin = data.draw(st.integers(0, 60))
        strides_of = (rows.outer_stride, rows.stride, 1)
        memory = Memory.of(whole.view(dtype).as_strided((rows.outer, rows.inner, hidden_size), strides_of, begin))
        operands.append((memory, addresses(begin, rows, hidden_size, item)))
    (a, of_a), (b, of_b) = operands
    assert share_memory(a, b) == share_memory(b, a) == bool(of_a & of_b), operands


def test_columns_of_one_matrix_are_told_apart_without_looking_at_rows(monkeypatch):
    """q and k of one tensor, and columns of a matrix: thousands of rows cost no more than two."""
    monkeypatch.setattr(Memory, "runs", lambda self: pytest.fail("looked at every row"))
    qkv = torch.empty(10, 3 * 4, 8)
    q, k, _ = map(Memory.of, qkv.split(4, dim=1))
    assert not share_memory(q, k)
    matrix = torch.empty(10, 24)
    left, right = map(Memory.of, (matrix[:, :8], matrix[:, 8:16]))
    assert not share_memory(right, left)
    batches = torch.zeros(3, 7, 6, 8)[:, :5]
    q, k = (Memory.of(batches[:, :, heads]) for heads in (slice(4), slice(4, 6)))
    assert not share_memory(q, k)


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_rows_of_is_exact(data):
    """Against the address of every element, for views of up to four dimensions."""
    shape = data.draw(st.lists(counts, min_size=1, max_size=4))
    last = data.draw(st.sampled_from([1, 1, 1, 2]))
    steps = [data.draw(st.sampled_from([0, 1, 4, 5, 8, 12, 16, 24, 48])) for _ in shape[1:]]
    view = whole.as_strided(shape, (*steps, last))
    rows, hidden_size = rows_of(view), view.shape[-1]
    if rows is None:
        contiguous = last == 1 or hidden_size == 1
        assert not contiguous or len([size for size in shape[:-1] if size > 1]) > 2
        return
    found = [
        [i * rows.outer_stride + j * rows.stride + k for k in range(hidden_size)]
        for i in range(rows.outer)
        for j in range(rows.inner)
    ]
    assert found == view.reshape(-1, hidden_size).int().tolist()
    every = [element for row in found for element in row]
    assert overlaps_itself(view) == (len(set(every)) < len(every))


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_two_levels_are_exact(data):
    """Against the first element of every row, for two operands whose rows have up to four dimensions."""
    sizes = data.draw(st.lists(counts, max_size=4))
    steps = [[data.draw(st.sampled_from([0, 1, 2, 4, 8, 12, 16])) for _ in sizes] for _ in range(2)]
    levels = two_levels(sizes, steps)
    if levels is None:
        assert len([size for size in sizes if size > 1]) > 2
        return
    inner, strides_of_both = levels
    for of_operand, (outer_stride, stride) in zip(steps, strides_of_both, strict=True):
        begins = whole.as_strided(sizes, of_operand).flatten().int().tolist()
        assert begins == [i // inner * outer_stride + i % inner * stride for i in range(len(begins))]


def test_levels_that_are_one_are_found_as_one():
    """Also where a dimension between them has one element, and where a size of 1 has any stride."""
    for view, rows in {
        torch.empty(2, 3, 8): (1, 6, 0, 8),
        torch.empty(2, 3, 16)[..., :8]: (1, 6, 0, 16),
        torch.empty(2, 1, 3, 16)[..., :8]: (1, 6, 0, 16),
        torch.empty(5, 4, 8)[:, :3]: (5, 3, 32, 8),
        torch.empty(5, 4, 8)[:, :1]: (1, 5, 0, 32),
        torch.empty(0, 16)[:, ::2]: (1, 0, 0, 8),
        torch.empty(5, 4, 8)[:1, :3]: (1, 3, 0, 8),
        torch.empty(8): (1, 1, 0, 8),
    }.items():
        assert rows_of(view) == rows
    assert rows_of(torch.empty(2, 3, 4, 8)[:, :2, :3]) is None  # three levels
    assert rows_of(torch.empty(8, 3).t()) is None


def test_operands_share_the_inner_level_of_the_first_in_two():
    one, two, other = torch.zeros(12, 16)[:, :8], torch.zeros(4, 5, 8)[:, :3], torch.zeros(3, 5, 8)[:, :4]
    assert in_levels((one, None), (torch.zeros(12, 8),))[:2] == (12, [(0, 16), ABSENT, (0, 8)])
    inner, strides, (of_two, none, copy) = in_levels((one,), (two, None, other))
    assert (inner, strides) == (3, [(48, 16), (40, 8), ABSENT, (24, 8)])
    assert (of_two is two, none, copy.is_contiguous(), other.is_contiguous()) == (True, None, True, False)
    assert in_levels((two, other), ()) is None
    assert in_levels((), (torch.zeros(8, 12).t(), two)).strides == [(24, 8), (40, 8)]


def views(seed=0):
    """q, k and v of one tensor, [tokens, heads, N], and its memory."""
    qkv = torch.randn(5, 3 * HEADS, 40, generator=torch.Generator().manual_seed(seed))
    return *qkv.split(HEADS, dim=1), qkv


def bits(x, residual, weight):
    """Those of the reference, of contiguous operands."""
    y, total, _ = reference.outputs(
        packed(x), packed(residual), weight, 1e-6, 0.0, True, False, torch.float32, torch.float32
    )
    return y, total


@pytest.mark.parametrize("name", BACKENDS)
def test_views_of_qkv(name):
    """In place and with new outputs, q and k beside each other, in the reference's bits; v is left alone."""
    weight = torch.rand(40)
    with fusednorm.use_backend(name):
        q, k, v, qkv = views()
        before = qkv.clone()
        y, total = bits(q, k, weight)
        for out, residual_out in ((None, None), (torch.empty(5, HEADS, 40), None), (v.clone(), torch.empty_like(q))):
            found = fused_add_rms_norm(q, k, weight, out=out, residual_out=residual_out)
            assert torch.equal(found[0], y)
            assert torch.equal(found[1], total)
        assert torch.equal(qkv, before)
        found = fused_add_rms_norm(q, packed(k), weight, out=v)  # an output in two levels, a residual in one
        assert torch.equal(v, y)
        assert torch.equal(found[1], total)
        assert torch.equal(qkv[:, : 2 * HEADS], before[:, : 2 * HEADS])

        q, k, v, qkv = views()
        found = fused_add_rms_norm_(q, k, weight)
        assert found[0] is q
        assert found[1] is k
        assert torch.equal(qkv, torch.cat([y, total, before[:, 2 * HEADS :]], dim=1))
        for t in (q, k):
            rms_norm_(t, weight)
        assert torch.equal(q, rms_norm(y, weight))
        assert torch.equal(k, rms_norm(total, weight))


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_in_other_orders(name):
    """Heads before tokens, in place: rows in two levels that no copy has."""
    weight = torch.rand(40)
    with fusednorm.use_backend(name):
        q, k, _, _ = views()
        x, residual = q.transpose(0, 1), k.transpose(0, 1)
        y, total = bits(x, residual, weight)
        assert all(map(torch.equal, fused_add_rms_norm(x, residual, weight), (y, total)))
        assert all(map(torch.equal, fused_add_rms_norm_(x, residual, weight), (y, total)))


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_views(name):
    """Of operands, and incoming ones, whose rows lie in two levels."""
    weight = torch.rand(40, requires_grad=True)
    q, k, v, _ = views()
    x, residual = q.requires_grad_(), k.requires_grad_()
    with fusednorm.use_backend(name):
        outputs = fused_add_rms_norm(x, residual, weight)
        found = torch.autograd.grad(outputs, (x, residual, weight), (v, q.detach()))
        outputs = fused_add_rms_norm(*(packed(t) for t in (x, residual)), weight)
        wanted = torch.autograd.grad(outputs, (x, residual, weight), (packed(v), packed(q.detach())))
    assert all(map(torch.equal, found, wanted))


def test_levels_that_overlap_are_refused():
    """In place; where they are only read, each row is a row."""
    x = torch.arange(60.0).as_strided((3, 4, 8), (8, 4, 1))
    before = x.clone()
    with pytest.raises(ValueError, match=r"x is written in place, .* at most two levels of strides without overlap"):
        rms_norm_(x)
    q, _, _, qkv = views()
    with pytest.raises(ValueError, match="residual shares memory with x"):
        fused_add_rms_norm_(q, qkv[:, 1 : 1 + HEADS])
    assert torch.equal(x, before)
    assert torch.equal(rms_norm(x), rms_norm(before))


def test_three_levels_are_refused_in_place_and_copied_otherwise():
    x = torch.rand(2, 5, 4, 8)[:, :3, :2]
    assert rows_of(x) is None
    before = x.clone()
    with pytest.raises(ValueError, match="x is written in place"):
        rms_norm_(x)
    with pytest.raises(ValueError, match="out is written in place"):
        rms_norm(before, out=x)
    assert torch.equal(x, before)
    assert torch.equal(rms_norm(x), rms_norm(before))


def test_outputs_in_levels_that_differ_are_refused():
    """Inputs can be copied; outputs cannot, and one pass writes both."""
    x = torch.rand(2, 2, 3, 8)
    out, residual_out = torch.zeros(2, 2, 4, 8)[:, :, :3], torch.zeros(2, 3, 3, 8)[:, :2]
    assert (rows_of(out), rows_of(residual_out)) == ((4, 3, 32, 8), (2, 6, 72, 8))
    with pytest.raises(ValueError, match=r"residual_out is written in place, .* the same two levels of strides as out"):
        fused_add_rms_norm(x, x, out=out, residual_out=residual_out)
    assert not out.any()
    y, total = fused_add_rms_norm(x, out, residual_out=residual_out)  # an input in other levels is copied
    assert all(map(torch.equal, (y, total), (rms_norm(x), x)))
