"""Log-probabilities: the logarithm's constants and errors, torch's results within the bound, masks, and refusals."""

import math
import re
from pathlib import Path

import logarithm
import mpmath  # sympy's, which torch asks for
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import log_softmax, logsumexp, selected_log_prob, selected_log_prob_and_entropy
from fusednorm.calls import fast_path, function_constants
from fusednorm.calls.c_enums import DeclaredOf
from fusednorm.conformance import oracle_log_prob
from fusednorm.conformance.cases import DTYPES
from fusednorm.reference import log_prob as reference

from fast_calls import close_fast_path, fast_calls

ROOT = Path(__file__).parents[2]
WIDE = (torch.float32, torch.float64)
LOGITS = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
IDS = torch.tensor([[0, 3, 3], [8, 0, 1], [2, 2, 2], [5, 3, 7]])
TEMPERATURE = torch.tensor([0.5, 1.0, 1.7, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("name", logarithm.TYPES)
def test_constants_are_those_of_the_script(name):
    """In the reference and in the specification; the oracle's too, though it has a text of its own."""
    wanted = logarithm.constants(*logarithm.TYPES[name])["logarithm"]
    assert function_constants.LOGARITHMS[getattr(torch, name)].coefficients == wanted
    written = re.findall(r"-?\b0x[0-9a-f.]+p[-+]\d+", (ROOT / "docs" / "spec.md").read_text())
    assert {*wanted} <= {*map(float.fromhex, written)}


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_logarithm_is_within_its_bound(dtype):
    """2.6 u, and of float32 one ulp, in which the oracle agrees; ``tests/every_float32.py`` takes all numbers."""
    generator = torch.Generator().manual_seed(1)
    near = 1 + torch.rand(2000, dtype=dtype, generator=generator)
    x = torch.cat((near, torch.exp2(torch.rand(2000, dtype=dtype, generator=generator) * 31)))
    root = torch.tensor(2.0, dtype=dtype).sqrt()
    edges = [torch.nextafter(root, torch.zeros_like(root)), root, torch.nextafter(root, 2 * root), 4 * root]
    x = torch.cat((x, torch.stack(edges), torch.tensor([1, 2, 3, 2.0**31, 1.406655192375183], dtype=dtype)))
    found = reference.logarithm(x)
    assert torch.from_numpy(oracle_log_prob.logarithm(x.numpy())).equal(found)
    half = torch.finfo(dtype).eps / 2
    with mpmath.workdps(40):
        exact = [mpmath.log(mpmath.mpf(number)) for number in x.tolist()]
        errors = [abs(mpmath.mpf(y) - e) / e for y, e in zip(found.tolist(), exact, strict=True) if e]
    assert max(errors) <= 2.6 * half
    assert found[x == 1].tolist() == [0.0]
    assert reference.logarithm(torch.tensor([math.nan], dtype=dtype)).isnan().all()


def bound(logits, exact, ids):
    """The greatest error that docs/spec.md, section 11, allows: of log(s), [rows], and of log-probabilities."""
    size, u = logits.shape[-1], torch.finfo(logits.dtype).eps / 2
    depth = min(10, (size - 1).bit_length()) + ((size - 1) // 1024).bit_length()
    below = exact - exact.amax(-1, keepdim=True)
    log_s = torch.logsumexp(below, -1)
    of_sum = (math.log(size) + 1.8 + depth + 2.6 * log_s) * u * 1.001
    chosen = below.gather(-1, ids)
    return of_sum, of_sum.unsqueeze(-1) + (chosen.abs() + (chosen - log_s.unsqueeze(-1)).abs()) * u * 1.001


@pytest.mark.parametrize("size", [1, 9, 1000, 1024, 5000, 40_000])
def test_results_are_torchs_within_the_bound(size):
    generator = torch.Generator().manual_seed(size)
    for factor in (0.1, 3.0, 20.0):
        logits = torch.randn(6, size, generator=generator) * factor
        ids, exact = torch.randint(size, (6, 4), generator=generator), logits.double()
        of_sum, of_ids = bound(logits, exact, ids)
        lp, entropy = selected_log_prob_and_entropy(logits, ids)
        whole = torch.log_softmax(exact, -1)
        assert ((lp - whole.gather(-1, ids)).abs() <= of_ids).all()
        lse = torch.logsumexp(exact, -1)
        assert ((logsumexp(logits) - lse).abs() <= of_sum + lse.abs() * torch.finfo(torch.float32).eps / 2).all()
        torch.testing.assert_close(entropy.double(), -(whole.exp() * whole).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_torch(dtype):
    """Of float64 nearly all digits; of others what rounding leaves."""
    logits = LOGITS.to(dtype)
    leaves = [logits.clone().requires_grad_(), logits.double().requires_grad_()]
    d, dh = torch.linspace(-1, 2, 12).view(4, 3), torch.linspace(2, -1, 4)
    outputs = selected_log_prob_and_entropy(leaves[0], IDS, temperature=0.7)
    whole = torch.log_softmax(leaves[1] / 0.7, -1)
    wanted = (whole.gather(-1, IDS), -(whole.exp() * whole).sum(-1))
    found = torch.autograd.grad(outputs, leaves[0], (d.to(outputs[0]), dh.to(outputs[1])))[0]
    exact = torch.autograd.grad(wanted, leaves[1], (d.double(), dh.double()))[0]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=8 * eps, atol=8 * eps)


def cases():
    """Functions of float64 logits."""
    yield "log_softmax", log_softmax
    yield "logsumexp", logsumexp
    yield "several", lambda x: selected_log_prob(x, IDS, softcap=3.0, temperature=TEMPERATURE, ignore_index=3)
    yield "entropy", lambda x: selected_log_prob_and_entropy(x, IDS[:, 0], temperature=0.6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", dict(cases()))
def test_derivatives(name):
    function, x = dict(cases())[name], LOGITS.clone().requires_grad_()
    assert gradcheck(function, (x,), check_forward_ad=True)
    assert gradgradcheck(function, (x,))


def test_masked_logits():
    """0 * -inf does not appear: not in the entropy, and not in gradients."""
    for dtype in WIDE:
        logits = LOGITS.to(dtype, copy=True)
        logits[:, 3:6] = -torch.inf
        ids = torch.tensor([0, 1, 2, 8])
        kept = torch.cat((logits[:, :3], logits[:, 6:]), -1).requires_grad_()
        leaf = logits.clone().requires_grad_()
        lp, entropy = selected_log_prob_and_entropy(leaf, ids)
        wanted = selected_log_prob_and_entropy(kept, torch.where(ids > 5, ids - 3, ids))
        torch.testing.assert_close((lp, entropy), wanted)
        (dx,) = torch.autograd.grad((lp.sum(), entropy.sum()), leaf)
        (of_kept,) = torch.autograd.grad((wanted[0].sum(), wanted[1].sum()), kept)
        torch.testing.assert_close(torch.cat((dx[:, :3], dx[:, 6:]), -1), of_kept)
        assert not dx[:, 3:6].any()
        outputs = selected_log_prob_and_entropy(leaf, ids)
        (dx,) = torch.autograd.grad([t.sum() for t in outputs], leaf, create_graph=True)
        assert torch.autograd.grad(dx.square().sum(), leaf)[0].isfinite().all()


def test_ignored_rows_are_not_looked_at():
    """Whatever their logits are: 0 passes back, where 0 * NaN would be NaN."""
    logits = LOGITS.float()
    logits[1], logits[2, 0], ids = torch.nan, torch.inf, torch.tensor([4, -100, -100, 2])
    leaf = logits.requires_grad_()
    lp, entropy = selected_log_prob_and_entropy(leaf, ids, ignore_index=-100)
    (dx,) = torch.autograd.grad((lp, entropy), leaf, (torch.ones(4), torch.tensor([1.0, torch.nan, torch.inf, 1])))
    assert lp[1:3].tolist() == entropy[1:3].tolist() == [0, 0]
    assert not dx[1:3].any()
    assert dx[::3].isfinite().all()
    assert dx[0].any()
    lp, entropy = selected_log_prob_and_entropy(leaf, ids[:, None][:, :0])  # as rows all of whose ids are ignored
    (dx,) = torch.autograd.grad((lp, entropy), leaf, (torch.ones(4, 0), torch.ones(4)))
    assert (lp.shape, entropy.tolist(), bool(dx.any())) == ((4, 0), [0] * 4, False)


def test_what_is_refused_is_named():
    logits = LOGITS.float()
    for ids, more in ((torch.tensor([0, 1, 9, 2]), {}), (torch.tensor([0, -1, 2, 2]), {"ignore_index": -100})):
        with pytest.raises(IndexError, match=r"ids must be from 0 to 8, .*got (9|-1); pass ignore_index"):
            selected_log_prob(logits, ids, **more)
    for temperature in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature must be finite and greater than 0"):
            selected_log_prob(logits, IDS, temperature=temperature)
    for ids in (IDS[:3], IDS.unsqueeze(-1), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"ids must have shape \[4\], .*, or \[\.\.\., K\] for K of them"):
            selected_log_prob(logits, ids)
    with pytest.raises(TypeError, match="temperature is float64 while logits is float32"):
        selected_log_prob(logits, IDS, temperature=TEMPERATURE)
    log_softmax(logits)  # opens the fast path, which leaves the dtype of a recorded result to Python
    for dtype, why in (
        (torch.float64, "is float64 while logits is float32"),
        (torch.int32, "must be torch.float16, .*got torch.int32"),
    ):
        with pytest.raises(TypeError, match=f"out_dtype {why}"):
            log_softmax(logits.requires_grad_(), out_dtype=dtype)


PLAIN, HALF, DOUBLE = LOGITS.float(), LOGITS.bfloat16(), LOGITS.clone()
#: Calls that the fast path takes.
USUAL = {
    "rows": (log_softmax, PLAIN, {}),
    "one row": (log_softmax, PLAIN[0], {}),
    "another dtype": (log_softmax, HALF, {"out_dtype": torch.float32}),
    "an output": (log_softmax, HALF, {"out": torch.empty(4, 12)[:, 3:]}),
    "sums": (logsumexp, DOUBLE, {}),
    "sums of three dimensions": (logsumexp, HALF.view(2, 2, 9), {}),
    "an id": (selected_log_prob, HALF, {"ids": IDS.flatten()[:4]}),
    "short ids": (selected_log_prob, DOUBLE, {"ids": IDS.int()}),
    "columns": (selected_log_prob, torch.cat((PLAIN, PLAIN), -1)[:, 3:12], {"ids": IDS}),
    "ignored ids": (selected_log_prob, HALF, {"ids": IDS - 100 * (IDS == 3), "ignore_index": -97, "softcap": 30}),
    "an entropy": (
        selected_log_prob_and_entropy,
        PLAIN,
        {"ids": IDS, "temperature": 0.7, "softcap": 2.5, "ignore_index": 3},
    ),
    "temperatures": (
        selected_log_prob_and_entropy,
        HALF,
        {"ids": IDS.flatten()[:4], "temperature": TEMPERATURE.half()},
    ),
}


def same(found, wanted):
    both = zip(*(t if isinstance(t, tuple) else (t,) for t in (found, wanted)), strict=True)
    return all(a.equal(b) and a.dtype == b.dtype and a.is_contiguous() == b.is_contiguous() for a, b in both)


def gradients_of(results):
    """Incoming gradients, each with a value of its own, and all of one value, as those of a sum."""
    numbers = [torch.full((), 0.3, dtype=t.dtype).expand_as(t) for t in results]
    return [t.detach() + 1 for t in results], numbers


@pytest.mark.skipif(not fast_path.OPEN, reason="no fast path: compiled, with torch 2.10 or newer")
@pytest.mark.parametrize("name", USUAL)
def test_the_fast_path_has_the_bits_of_python(monkeypatch, name):
    """Also of the operators: that of results returns what gradients take too, as tensors of their own."""
    function, logits, others = USUAL[name]
    number = DeclaredOf[function.__name__.removesuffix("_log_prob").replace("_log_prob", "").upper()]
    operator = getattr(torch.ops.fusednorm, function.__name__).default
    given = {"logits": logits, **others}
    declared = {name: value for name, value in given.items() if name != "out"}
    if "ids" in given:
        temperature = given.get("temperature")
        declared["temperature"] = torch.full((4,), temperature) if isinstance(temperature, float) else temperature

    take, count = fast_calls("cpu"), 1 + (function is selected_log_prob_and_entropy)
    by_c = take("log_prob", **given, operation=number.value, kept=False)
    results = take("log_prob", **declared, operation=number.value, kept=True)
    assert len({t.data_ptr() for t in results}) == len(results)
    kept = dict(zip(("m", "s", "entropy"), results[count:], strict=False))
    incoming = [dict(zip(("d", "d_entropy"), ds, strict=False)) for ds in gradients_of(results[:count])]
    flags = {name: value for name, value in declared.items() if name != "out_dtype"}
    of_c = {**flags, **kept, "needs": [True], "operation": number.value}
    if function is log_softmax:
        incoming[1]["d"] = incoming[1]["d"].contiguous()  # rows
    gradients = [take("log_prob_backward", **of_c, **ds) for ds in incoming]
    backward = getattr(torch.ops.fusednorm, f"{function.__name__}_backward").default
    if "ids" in given:
        flags = {"softcap": None, "ignore_index": None, **flags}

    def calls():
        yield function(**given)
        yield operator(**declared)
        yield from (backward(**ds, **flags, **kept, needs=[True]) for ds in incoming)
        if "out" not in given:
            leaf = logits.clone().requires_grad_()
            found = function(**{**given, "logits": leaf})
            found = found if isinstance(found, tuple) else (found,)
            yield torch.autograd.grad(found, leaf, gradients_of(found)[0])

    found = [*calls()]
    close_fast_path(monkeypatch)
    wanted = [*calls()]
    assert all(map(same, found, wanted))
    assert all(map(same, (by_c, results, *gradients), wanted))


@pytest.mark.skipif(not fast_path.OPEN, reason="no fast path: compiled, with torch 2.10 or newer")
def test_what_the_fast_path_leaves_to_python():
    """It is left untouched."""
    out, shared, take = torch.full((4, 9), 7.0), torch.ones(5, 9), fast_calls("cpu")

    def run(logits=PLAIN, ids=IDS, operation=DeclaredOf.SELECTED, **others):
        return take("log_prob", logits=logits, ids=ids, operation=operation.value, kept=False, **others)

    def rows(logits=PLAIN, out=out, **others):
        return run(logits, operation=DeclaredOf.LOG_SOFTMAX, out=out, **others)

    def gradient(**others):
        operands = {"logits": PLAIN, "ids": IDS, "d": PLAIN[:, :3], "m": PLAIN[0, :4], "s": PLAIN[1, :4]}
        more = {"d_entropy": PLAIN[2, :4], "entropy": PLAIN[3, :4], "needs": [True]}
        given = {"operation": DeclaredOf.SELECTED_AND_ENTROPY.value, **operands, **more, **others}
        return take("log_prob_backward", **{**given, "d": given["d"].contiguous()})

    assert None not in (run(), gradient())
    unusual = {
        "no gradient": lambda: gradient(needs=[False]),
        "gradients of other operands": lambda: gradient(needs=[True, True]),
        "gradients of other ids": lambda: gradient(d=PLAIN[:, :2]),
        "wide gradients": lambda: gradient(d=DOUBLE[:, :3]),
        "a wide gradient of the entropy": lambda: gradient(d_entropy=DOUBLE[0, :4]),
        "no gradient of the entropy": lambda: gradient(d_entropy=None),
        "gradients with gaps": lambda: gradient(d_entropy=PLAIN[:, 0]),
        "narrow sums": lambda: gradient(s=HALF[0, :4]),
        "one sum": lambda: gradient(s=PLAIN[0, :1].expand(4)),
        "sums of other rows": lambda: gradient(m=PLAIN[0, :3]),
        "sums in rows": lambda: gradient(m=PLAIN[:, :1].contiguous()),
        "an entropy that is not kept": lambda: gradient(entropy=None),
        "gradients of rows of other lengths": lambda: gradient(operation=DeclaredOf.LOG_SOFTMAX.value, d=PLAIN[:, :8]),
        "wide gradients of rows": lambda: gradient(operation=DeclaredOf.LOG_SOFTMAX.value, d=DOUBLE),
        "a gradient's gradient": lambda: gradient(d_entropy=PLAIN[0, :4].clone().requires_grad_()),
        "no rows": lambda: run(PLAIN[:0], IDS[:0]),
        "no ids": lambda: run(ids=IDS[:, :0]),
        "a number": lambda: run(torch.tensor(1.0), torch.tensor(0)),
        "whole numbers": lambda: run(IDS),
        "rows in two levels": lambda: run(torch.ones(3, 4, 9)[:2, :3], IDS[0].expand(2, 3)),
        "ids of other rows": lambda: run(ids=IDS[:3]),
        "ids of other dimensions": lambda: run(ids=IDS.unsqueeze(-1)),
        "ids with gaps": lambda: run(ids=IDS[:, ::2]),
        "ids of another type": lambda: run(ids=IDS.short()),
        "ids that are no integers": lambda: run(ids=IDS.float()),
        "an id behind the last": lambda: run(ids=IDS + 1),
        "an id before the first": lambda: run(ids=IDS - 1),
        "one that is not the one to be ignored": lambda: run(ids=IDS - 2, ignore_index=-1),
        "an ignored id that no int64 holds": lambda: run(ignore_index=2**63),
        "an ignored id of another type": lambda: run(ignore_index=1.0),
        "no softcap": lambda: run(softcap=0.0),
        "an infinite softcap": lambda: run(softcap=math.inf),
        "a softcap that no float32 holds": lambda: run(softcap=1e39),
        "a softcap of another type": lambda: run(softcap="2"),
        "no temperature": lambda: run(temperature=0.0),
        "a temperature that is no number": lambda: run(temperature=math.nan),
        "a temperature that no float32 holds": lambda: run(temperature=1e-46),
        "a wide temperature": lambda: run(temperature=TEMPERATURE),
        "temperatures of ids": lambda: run(temperature=TEMPERATURE.float().unsqueeze(-1)),
        "a temperature of another type": lambda: run(temperature=True),
        "a gradient": lambda: run(PLAIN.clone().requires_grad_()),
        "a gradient of a temperature": lambda: run(temperature=TEMPERATURE.float().requires_grad_()),
        "a gradient of the output": lambda: rows(out=torch.ones(4, 9, requires_grad=True)),
        "an output and its dtype": lambda: rows(out_dtype=torch.float32),
        "an output of other rows": lambda: rows(out=out[:3]),
        "an output of whole numbers": lambda: rows(out=torch.empty(4, 9, dtype=torch.int32)),
        "a wide output": lambda: rows(out=torch.empty(4, 9, dtype=torch.float64)),
        "an output in the rows before": lambda: rows(shared[1:], shared[:4]),
        "an output of one row": lambda: rows(out=out[:1].expand(4, 9)),
        "an output's rows of columns": lambda: rows(out=torch.empty(9, 4).t()),
    }
    for name, call in unusual.items():
        assert call() is None, name
        assert out.eq(7).all(), name
        assert out._version == shared._version == 0, name
    with FlopCounterMode(display=False):
        assert run() is gradient() is None
    assert fast_calls("cuda")("log_prob", logits=PLAIN, operation=DeclaredOf.LOGSUMEXP.value, kept=False) is None
    kept = PLAIN.clone()
    assert rows(kept, kept).equal(log_softmax(PLAIN))
    assert kept._version == 1


def test_no_second_tensor_of_all_rows(monkeypatch):
    """Rows are taken in blocks, whose results are those of all rows together."""
    with fusednorm.use_backend("reference"):
        whole = selected_log_prob_and_entropy(LOGITS, IDS)
        monkeypatch.setattr(reference, "BLOCK", 10)
        seen, sum_of = [], reference.treesum

        def treesum(rows):
            seen.append(len(rows))
            return sum_of(rows)

        monkeypatch.setattr(reference, "treesum", treesum)
        for found, wanted in zip(selected_log_prob_and_entropy(LOGITS, IDS), whole, strict=True):
            assert found.equal(wanted)
    assert seen == [1] * 8


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [40_000, 40_960])
def test_a_row_that_is_divided_has_the_same_bits(dtype, size):
    """By 1 to 3 threads: the greatest number, or one that is not finite, in each part of a row."""
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, place in enumerate((0, 13_000, 27_000, size - 1)):
        logits[row, place] = 50.0
        logits[row + 4, place] = (math.nan, math.inf, -math.inf, -math.nan)[row]
    logits[3, : size - 1000] = -math.inf
    ids, before = torch.tensor([27_000]), torch.get_num_threads()
    softened = {"temperature": 0.7, "softcap": 30.0}

    def results(row, count):
        torch.set_num_threads(count)
        x = row.clone().requires_grad_()
        outputs = [log_softmax(x), logsumexp(x), *selected_log_prob_and_entropy(x, ids, **softened)]
        found = [*outputs, log_softmax(row), *selected_log_prob_and_entropy(row, ids)]
        return found + [torch.autograd.grad(y, x, torch.full_like(y, 0.3), retain_graph=True)[0] for y in outputs]

    try:
        for row in logits[:, None]:
            wanted = results(row, 1)
            for count in (2, 3):
                for found, one in zip(results(row, count), wanted, strict=True):
                    assert torch.equal(found.nan_to_num(7.0), one.nan_to_num(7.0))
                    assert torch.equal(found.isnan(), one.isnan())
    finally:
        torch.set_num_threads(before)


def test_without_a_fast_path(monkeypatch):
    """Names of arguments are taken there too, and nothing is done."""
    monkeypatch.setattr(fast_path, "OPEN", False)
    assert fast_path.Entry("log_prob", "logits").open()(logits=torch.ones(1)) is None


@pytest.mark.parametrize("dtype", [*WIDE, torch.float16, torch.bfloat16], ids=str)
def test_temperatures_of_a_tensor(dtype):
    """One for all rows, or one for each, also subnormal; what is not greater than 0 and finite is refused."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, ids = torch.randn(4, 8, dtype=wide), torch.arange(4)
    one, each = torch.tensor(2.0, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)
    smallest = torch.full((4,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
    wanted = selected_log_prob(logits, ids, temperature=2.0)
    for rows in (logits, logits.repeat_interleave(2, -1)[:, ::2]):
        assert selected_log_prob(rows, ids, temperature=one).equal(wanted)
        assert selected_log_prob(rows, ids, temperature=each).equal(wanted)
        expected = selected_log_prob(rows, ids, temperature=smallest)
        torch.set_flush_denormal(True)
        try:
            assert selected_log_prob(rows, ids, temperature=smallest).nan_to_num().equal(expected.nan_to_num())
        finally:
            torch.set_flush_denormal(False)
        for unfit in (0.0, -0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match=r"^temperature must be finite and greater than 0, got"):
                selected_log_prob(rows, ids, temperature=each.clone().index_fill_(0, torch.tensor(2), unfit))
