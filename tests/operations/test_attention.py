"""Attention: a row depends on its visible keys alone; keys that are not visible take no part; gradients; refusals."""

import math

import pytest
import torch

import fusednorm
from fusednorm.reference import attention as reference

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def heads(keys, dtype=BF16, batch=1, queries=None, seed=0, size=16, values=8):
    """q, k and v of 4 and 2 heads."""
    normal = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, queries or keys, size), (batch, 2, keys, size), (batch, 2, keys, values)
    return [torch.randn(shape, generator=normal).to(dtype) for shape in shapes]


FLAGS = {"none": {}, "all": {"window": 37, "softcap": 2.0, "scale": 0.3}, "not causal": {"causal": False}}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_query_has_its_bits_wherever_it_is(flags):
    """Among others, alone, in a batch, behind padding, and with keys in pages in any order."""
    dtype, flags = F32 if flags == "all" else BF16, FLAGS[flags]
    normal = torch.Generator().manual_seed(1)
    q, k, v = heads(150, dtype)
    sinks = torch.randn(4, generator=normal)
    given = {**flags, "sinks": sinks}
    whole = fusednorm.attention(q, k, v, **given)
    if flags.get("causal", True):
        for begin, end in ((0, 1), (1, 128), (128, 131), (149, 150)):  # as a prompt in chunks, or decoded
            found = fusednorm.attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], **given)
            assert found.equal(whole[:, :, begin:end]), (begin, end)
    part = torch.tensor([5, 130, 149])
    mask = torch.ones(150, 150, dtype=torch.bool)
    if flags.get("causal", True):
        mask = mask.tril()
    if "window" in flags:
        mask &= mask.triu(1 - flags["window"])
    more = {name: value for name, value in given.items() if name != "window"} | {"causal": False}
    assert fusednorm.attention(q[:, :, part], k, v, mask=mask[part], **more).equal(whole[:, :, part])
    # A padded batch: keys of the second sample follow 70 others, which are NaN.
    padded = [torch.nn.functional.pad(t, (0, 0, 70, 0), value=torch.nan) for t in (q, k, v)]
    other = heads(220, dtype, seed=2)
    both = [torch.cat(pair) for pair in zip(other, padded, strict=True)]
    visible = torch.ones(2, 1, 1, 220, dtype=torch.bool)
    visible[1, ..., :70] = False
    found = fusednorm.attention(*both, mask=visible, **given)
    assert found[1:, :, 70:].equal(whole)
    assert not found[1, :, :70].any() or not flags.get("causal", True)  # no visible key: zeros
    # Pages of 16 in any order, for the last 40 queries and the first 10 of two sequences.
    order = torch.randperm(12, generator=normal)
    cache = torch.full((12, 2, 16, 24), torch.nan, dtype=dtype)
    for page, begin in zip(order, range(0, 150, 16), strict=False):
        cache[page, :, : min(150 - begin, 16)] = torch.cat((k, v), -1)[0, :, begin : begin + 16]
    pages = torch.stack((order[:10], order[:10])).int()
    rows = torch.cat((q[0, :, -40:], q[0, :, :10]), 1).transpose(0, 1)
    starts, lengths = torch.tensor([0, 40, 50]), torch.tensor([150, 10])
    found = fusednorm.paged_attention(rows, *cache.split((16, 8), -1), pages, starts, lengths, **given)
    assert found[:40].transpose(0, 1).equal(whole[0, :, -40:])
    first = fusednorm.attention(q[:, :, :10], k[:, :, :10], v[:, :, :10], **given)
    assert found[40:].transpose(0, 1).equal(first[0])


def test_rows_of_no_sequence_are_zeros():
    q, k, v = (t[0] for t in heads(8, F32))
    given = (k[None], v[None], torch.tensor([[0]]), torch.tensor([1, 3]), torch.tensor([8]))
    out = torch.full((8, 4, 8), torch.nan)
    assert fusednorm.paged_attention(q.transpose(0, 1), *given, out=out) is out
    assert not out[[0, 3, 4, 5, 6, 7]].any()
    assert out[1:3].all()


def test_no_visible_key_gives_zeros_with_a_sink_too():
    q, k, v = heads(4, F32)
    for mask, keys in ((torch.zeros(1, dtype=torch.bool), 4), (None, 0)):
        found = fusednorm.attention(q, k[:, :, :keys], v[:, :, :keys], mask=mask, sinks=torch.ones(4))
        assert found.shape == (1, 4, 4, 8)
        assert not found.any()


def test_nan_and_infinity_take_part_where_they_are_visible():
    q, k, v = heads(6, F32)
    k[0, 0, 3], v[0, 1, 2, 0] = torch.nan, torch.inf
    found = fusednorm.attention(q, k, v)
    assert found[0, :2, 3:].isnan().all()  # of the two heads that share these keys
    assert found[0, :2, :3].isfinite().all()
    assert found[0, 2:, 2:, 0].isinf().all()
    assert found[0, 2:, :2].isfinite().all()
    # The exponential of a key far below the greatest is 0, and 0 times infinity is NaN.
    k[0, 1], q[0, 2:] = 0, 100
    k[0, 1, 5] = 100
    assert fusednorm.attention(q, k, v)[0, 2:, 5, 0].isnan().all()


@pytest.mark.parametrize("keys", [1, 3, 200])
def test_gradients_are_those_of_torch(keys):
    """Of its attention in float64. Ours differ by roundings of float32, of which there are fewer than 64 in a row."""
    leaves = [t.double().requires_grad_() for t in heads(keys, F32, batch=2)]
    wide = [t.repeat_interleave(4 // t.shape[1], 1) for t in leaves]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    d = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad(wanted, leaves, d.double())
    ours = [t.detach().float().requires_grad_() for t in leaves]
    found = torch.autograd.grad(fusednorm.attention(*ours), ours, d)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=64 * 2.0**-23, atol=64 * 2.0**-23 * float(b.abs().max()))


def test_gradients_in_parts(monkeypatch):
    """Of rows and groups in many parts, as long rows have them: the same derivatives."""
    leaves = [t.requires_grad_() for t in heads(9, F64, batch=2)]
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(4)) > 0.3
    for at_once in (1, 50, 300):
        monkeypatch.setattr(reference, "AT_ONCE", at_once)
        function = lambda q, k, v: fusednorm.attention(q, k, v, mask=mask, softcap=3.0)  # noqa: E731
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_what_is_not_visible_has_no_part_in_gradients():
    """A row without keys, and keys that no row sees, have zeros, whatever they hold."""
    q, k, v = heads(5, F32)
    q[:, :, 1], k[:, :, 3], v[:, :, 3] = torch.nan, torch.nan, torch.inf
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1], mask[:, 3] = False, False
    leaves = [t.requires_grad_() for t in (q, k, v, torch.randn(4))]
    found = torch.autograd.grad(fusednorm.attention(*leaves[:3], sinks=leaves[3], mask=mask).sum(), leaves)
    assert all(t.isfinite().all() for t in found)
    assert not found[0][:, :, 1].any()
    assert not found[1][:, :, 3].any()
    assert not found[2][:, :, 3].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pages_are_compiled():
    """A call is one operator, in one graph."""
    q, k, v = heads(8)
    given = (torch.tensor([[0]]), torch.tensor([0, 3]), torch.tensor([8]))
    graphs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "fusednorm." in str(node.target)])
        return aot_eager(graph, inputs)

    function = torch.compile(lambda *t: fusednorm.paged_attention(*t, window=3), backend=backend, fullgraph=True)
    for rows in (3, 5):
        t = q[0, :, :rows].transpose(0, 1), k, v, *given
        assert function(*t).equal(fusednorm.paged_attention(*t, window=3))
    assert [len(operators) for operators in graphs] == [1] * len(graphs) != []


def test_places_that_do_not_fit_are_named():
    q, k, v = heads(8, F32)
    rows = q[0].transpose(0, 1)
    given = {"pages": torch.tensor([[0, 0]]), "starts": torch.tensor([0, 8]), "lengths": torch.tensor([8])}
    for name, wrong, said in (
        ("pages", [[1, 0]], "pages must be 0 to 0"),
        ("pages", [[-1, 0]], "pages must be 0 to 0"),
        ("starts", [4, 3], "starts must not descend"),
        ("starts", [0, 9], "starts must not descend and lie between 0 and 8"),
        ("lengths", [17], "lengths must be 0 to 16"),
        ("lengths", [-1], "lengths must be 0 to 16"),
    ):
        with pytest.raises(ValueError, match=said):
            fusednorm.paged_attention(rows, k, v, **given | {name: torch.tensor(wrong)})
    fusednorm.paged_attention(rows, k, v, **given | {"pages": torch.tensor([[0, 7]])})  # which holds no key


def test_too_many_keys_for_torchs_operations_are_refused(monkeypatch):
    monkeypatch.setattr(reference, "MOST_KEYS", 4)
    with pytest.raises(ValueError, match="k has 5 keys, and torch's operations would take more than 5 GiB"):
        fusednorm.attention(*heads(5, F64))


@pytest.mark.parametrize("keys", [3, 120, 500])
def test_results_are_within_the_bound(keys):
    """Of section 15, beside float64, with n, D and Dv of the call; T and P are those of each query."""
    q, k, v = heads(keys, F32, queries=2, size=40)
    found = fusednorm.attention(q, k, v, causal=False)
    q, k, v = (t.double() for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    t = q @ k.transpose(-1, -2) * 40**-0.5
    most = (q.abs() @ k.abs().transpose(-1, -2) * 40**-0.5).amax(-1, keepdim=True)
    p, furthest = t.softmax(-1), (t.amax(-1) - t.amin(-1)).unsqueeze(-1)
    levels, chain = math.ceil(math.log2(keys)), min(keys, 128) + math.ceil(keys / 128)
    of_score = (math.ceil(math.log2(40)) + 2) * most
    bound = (2 * of_score + 2 * (furthest + 1.8) + levels + 1 + chain + 1) * 2.0**-24 * (p @ v.abs())
    error = (found.double() - p @ v).abs()
    assert (error <= bound + 2.0**-24 * (p @ v).abs()).all()
    assert error.any()


def test_pages_have_no_gradients():
    q, k, v = heads(8, F32)
    given = (torch.tensor([[0]]), torch.tensor([0, 8]), torch.tensor([8]))
    with pytest.raises(RuntimeError, match=r"paged_attention\(\): .*requires grad, and pages of a cache have no"):
        fusednorm.paged_attention(q[0].transpose(0, 1).requires_grad_(), k, v, *given)
