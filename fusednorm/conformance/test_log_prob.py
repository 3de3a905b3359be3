"""Log-probabilities have the oracle's bits, and each is one element of the whole row's."""

import pytest
import torch

import fusednorm
from fusednorm.calls.call import Step
from fusednorm.conformance.cases import (
    BF16,
    DATA,
    DTYPES,
    F32,
    F64,
    Case,
    check_call,
    covering,
    dtype_name,
    operands,
)
from fusednorm.engine import run_log_prob
from fusednorm.engine.run import backend_of, gradient
from fusednorm.engine.run_log_prob import Selecting
from fusednorm.reference import log_prob as reference
from fusednorm.reference.norm import SEGMENT, halved, treesum

pytestmark = pytest.mark.promise("same bits")

#: Rows of one number, of a part of a segment, of whole segments, and of several with a part of one.
SIZES = (1, 7, 1000, 1024, 2049, 5000)
SELECTING = ("selected_log_prob", "selected_log_prob_and_entropy")
AXES = {
    "softcap": (None, 2.5),
    "temperature": (None, F32, "rows"),
    "ignore_index": (None, 2),
    "ids": (torch.int32, torch.int64),
    "several": (0, 1, 3),
    "hidden": (7, 2049),
    "data": ("normal", "masked", *DATA),
}


def logits_of(case):
    """Rows with numbers as a model has them; "masked": many are -inf, and all of one row."""
    masked = case.data == "masked"
    rows = operands(Case(case.rows, case.hidden, case.x, data="normal" if masked else case.data))[0] * 3
    if masked:
        rows[:, ::3] = -torch.inf
        rows[1] = -torch.inf
    return rows


def ids_of(rows, hidden, several, dtype, ignored):
    """Ids of rows, of which some are ignored, and all of one row."""
    generator = torch.Generator().manual_seed(hidden)
    shape = (rows, several) if several else (rows,)
    ids = torch.randint(hidden, shape, generator=generator, device="cpu").to(dtype)
    if ignored is not None:
        ids[0] = ignored
        if several > 1:
            ids[1, 0] = ignored  # the others of its row count
    elif several > 1:
        ids[1] = ids[1, 0]  # the same id twice
    return ids.to(torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("cuda", but=["log_softmax-bfloat16", "logsumexp-float64"])
@pytest.mark.left_out("triton_ptx", but=["log_softmax-bfloat16"])
def test_whole_rows(mode, agree, function, dtype):
    outs = (None, F32, BF16) if function == "log_softmax" else (None,)
    for hidden, data, out_dtype in covering(SIZES, AXES["data"], outs):
        logits = logits_of(Case(3, hidden, dtype, data=data))
        dtypes = {"out_dtype": out_dtype} if function == "log_softmax" else None
        check_call(agree, function, {"logits": logits}, f"{dtype_name(dtype)}, {hidden}, {data}", dtypes)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("function", SELECTING)
@pytest.mark.left_out("triton_cpu", "triton_ptx")
@pytest.mark.left_out("cuda", but=["selected_log_prob_and_entropy-float32"])
def test_ids(mode, agree, function, dtype):
    """Ids of every kind, some that are ignored, with a cap and temperatures."""
    for softcap, temperature, ignored, kind, several, hidden, data in covering(
        *AXES.values(), turn=DTYPES.index(dtype)
    ):
        logits = logits_of(Case(4, hidden, dtype, data=data))
        given = {"logits": logits, "ids": ids_of(4, hidden, several, kind, ignored), "temperature": None}
        if temperature is not None:
            like = dtype if temperature == "rows" else F32
            given["temperature"] = (operands(Case(4, 1, F32))[0][:, 0].abs() + 0.5).to(like)
        about = f"{dtype_name(dtype)}, {kind}, {several}, {hidden}, {data}, {temperature}"
        check_call(agree, function, given, about, softcap=softcap, ignore_index=ignored)


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu", "triton_ptx")
@pytest.mark.left_out("cuda", "triton", but=["bfloat16"])
def test_an_element_of_the_whole_row(mode, agree, dtype):
    """A selected log-probability is gathered; softcap and temperature are operations before."""
    wide = torch.promote_types(dtype, F32)
    for hidden in SIZES:
        logits, ids = logits_of(Case(5, hidden, dtype)), ids_of(5, hidden, 3, torch.int64, None)
        whole = fusednorm.log_softmax(logits, out_dtype=wide)
        lp, entropy = fusednorm.selected_log_prob_and_entropy(logits, ids)
        agree([lp], [whole.gather(-1, ids)], f"gathered, {hidden}")
        agree([fusednorm.selected_log_prob(logits, ids[:, 1])], [lp[:, 1]], f"one id, {hidden}")
        alone = [fusednorm.selected_log_prob_and_entropy(logits[k : k + 1], ids[k : k + 1]) for k in range(5)]
        agree([torch.cat(parts) for parts in zip(*alone, strict=True)], [lp, entropy], f"rows alone, {hidden}")
        divided = fusednorm.softcap(logits, 2.5).to(wide) / torch.full((), 0.7, dtype=wide)
        found = fusednorm.selected_log_prob(logits, ids, softcap=2.5, temperature=0.7)
        agree([found], [fusednorm.selected_log_prob(divided, ids)], f"operations before, {hidden}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu", "triton_ptx")
def test_parts_of_rows(mode, agree, dtype):
    """With the numbers of whole rows, of a backend that has parts: their sums of segments, and their gradients."""
    begin, end, size = 2048, 4500, 5000
    for softcap, ignored, kind, several, data in covering(
        *(AXES[name] for name in ("softcap", "ignore_index", "ids", "several", "data")), turn=DTYPES.index(dtype)
    ):
        about = f"{softcap}, {ignored}, {kind}, {several}, {data}"
        logits, ids = logits_of(Case(4, size, dtype, data=data)), ids_of(4, size, several, kind, ignored)
        temperature = operands(Case(4, 1, F32))[0][:, 0].abs() + 0.5
        selecting = Selecting(ids, temperature, softcap, ignored)
        *_, h, m, s = reference.selected(logits, *selecting, entropy=True)
        part = logits[:, begin:end]
        found = run_log_prob.sums_of_segments(part, selecting, m, entropy=True)
        if found is None:
            return
        below, e = reference.exponentials(reference.arguments(part, temperature, softcap)[0], m)
        terms = [
            torch.nn.functional.pad(t, (0, -part.shape[1] % SEGMENT)) for t in (e, reference.entropy_terms(below, e))
        ]
        agree(found, [halved(t.view(4, -1, SEGMENT)) for t in terms], f"sums, {about}")
        d, d_entropy, d_rows = torch.arange(ids.numel(), dtype=dtype).reshape(ids.shape) - 3, s.cos(), logits.cos()
        wanted = reference.selected_gradient(d, d_entropy, logits, *selecting[:2], m, s, h, *selecting[2:])
        place = begin, size
        given = {**selecting.operands(part), "m": m, "s": s, "entropy": h}
        of_results = {"d": d, "d_entropy": d_entropy}
        found = gradient(
            backend_of(part, Step("log_prob_parts")),
            "selected",
            of_results,
            given,
            ("logits",),
            selecting.flags(),
            place,
        )
        agree([found], [wanted[:, begin:end]], f"gradient, {about}")
        total = treesum(d_rows.to(m.dtype))
        [wanted] = reference.log_softmax_gradient(d_rows, logits, m, s, [True])
        of_results = {"d": d_rows[:, begin:end], "d_entropy": total}
        given = {**Selecting().operands(part), "m": m, "s": s, "entropy": None}
        backend = backend_of(part, Step("log_prob_parts"))
        found = gradient(backend, "log_softmax", of_results, given, ("logits", "d"), {}, place)
        agree([found], [wanted[:, begin:end]], f"log_softmax, {about}")


@pytest.mark.left_out("triton_cpu")
def test_infinities_are_those_of_torch(mode, agree):
    """Masked logits are -inf; a row of them, one with a NaN and one with an infinity have torch's results."""
    for dtype in (F32, F64):
        logits = torch.tensor([[0, -torch.inf, 1], [-torch.inf] * 3, [0, torch.nan, 1], [0, torch.inf, 1]], dtype=dtype)
        agree([fusednorm.logsumexp(logits)[1:]], [torch.logsumexp(logits, -1)[1:]], "logsumexp")
        agree([fusednorm.log_softmax(logits)[1:]], [torch.log_softmax(logits, -1)[1:]], "log_softmax")
        lp, entropy = fusednorm.selected_log_prob_and_entropy(logits[:1], torch.tensor([[0, 1, 2]]))
        assert lp[0, 1] == -torch.inf
        assert entropy.isfinite().all()
