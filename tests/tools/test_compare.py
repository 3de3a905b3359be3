"""``python -m fusednorm compare``: that its figures are right, and that it notices what it says it looks for."""

import dataclasses
import io
import itertools
import json
import math

import pytest
import torch
from rich.console import Console

from fusednorm.conformance.cases import BF16, F16, F32, F64
from fusednorm.tools import cli
from fusednorm.tools.measure import compare, peers, workloads

HIDDEN = 64
ROWS, BATCHES = compare.ROWS, compare.BATCHES


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """What these tests measure in their own process need not be large."""
    monkeypatch.setattr(compare, "BATCHES", (*range(1, 9), 63, 64, 65))
    monkeypatch.setattr(compare, "ROWS", 65)
    monkeypatch.setattr(compare, "THREADED", (1, 65))


def formula(x, residual, weight, eps):
    return torch.nn.functional.rms_norm(x + residual, weight.shape, weight, eps)


def implementation(call, name="made up"):
    return peers.Implementation(name, "1.0", "sum", lambda weight, eps: lambda x, r: (call(x, r, weight, eps), None))


def measured(monkeypatch, *calls, dtypes=("float32",), names=()):
    """The findings on made-up implementations, and on others."""
    made_up = [implementation(call) for call in calls]
    monkeypatch.setitem(compare.PEERS, "made up", lambda device: made_up)
    return compare.report([*names, "made up"], dtypes, HIDDEN)


def finding(monkeypatch, call):
    (only,) = measured(monkeypatch, call)["findings"]
    return only


def shown(found):
    text = io.StringIO()
    compare.show(found, Console(file=text, width=140))
    return text.getvalue()


# Figures


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        (BF16, 1.0, 1.0, 0),
        (BF16, 1.0, 1 + 2**-7, 1),
        (BF16, 1.0, 1 - 2**-8, 1),  # below a power of two numbers are twice as dense
        (BF16, 1 - 2**-8, 1 + 2**-7, 2),
        (F16, 2.0, 2 - 2**-10, 1),
        (F16, -2.0, -2 + 3 * 2**-10, 3),
        (F32, 1.0, 2.0, 2**23),
        (F32, 0.0, -0.0, 0),
        (F32, 2**-149, -(2**-149), 2),
        (F16, 65504.0, math.inf, 1),
        (F64, 1.0, 1 + 2**-52, 1),
    ],
)
def test_ulps(dtype, a, b, apart):
    a, b = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
    assert compare.ulps(a, b).tolist() == compare.ulps(b, a).tolist() == [apart]


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 8), (F16, 11), (F32, 24)])
def test_exact_is_rounded_once(dtype, bits):
    """In 16 bits the sums 1 + 2^-12 and 3 + 2^-7 would be rounded."""
    x, residual = torch.tensor([[1.0, 3, 1, 1]], dtype=dtype), torch.tensor([[2.0**-12, 2**-7, 0, 0]], dtype=dtype)
    weight = torch.tensor([1.0, 1.25, 0.75, 3], dtype=dtype)
    total = [1 + 2**-12, 3 + 2**-7, 1, 1]
    root = math.sqrt(math.fsum(h * h for h in total) / 4 + 1e-6)
    values = [h / root * g for h, g in zip(total, weight.tolist(), strict=True)]
    steps = [2.0 ** (math.frexp(value)[1] - bits) for value in values]
    y = compare.exact(x, residual, weight, 1e-6)
    assert y.dtype == dtype
    assert y[0].tolist() == [round(value / step) * step for value, step in zip(values, steps, strict=True)]


def test_histogram(monkeypatch):
    steps = [0, 1, 2, 3, 4, 5, 8, 9]

    def off(x, residual, weight, eps):
        y = compare.exact(x, residual, weight, eps)
        y.view(torch.int32)[:, : len(steps)] += torch.tensor(steps, dtype=torch.int32)
        return y

    found = finding(monkeypatch, off)
    rows = compare.ROWS
    counts = [(HIDDEN - len(steps) + 1) * rows, rows, rows, 2 * rows, 2 * rows, rows]
    assert found.histogram == dict(zip(compare.CLASSES, counts, strict=True))
    assert found.max_ulp == 9
    assert found.mean_ulp == sum(steps) / HIDDEN


def test_torch_is_near_and_fusednorm_nearest_where_nothing_is_rounded_on_the_way():
    found = {(f.name, f.rounds): f for f in compare.report(["fusednorm", "eager"], ["bfloat16"], HIDDEN)["findings"]}
    # docs/spec.md, section 4: at most 0.5003 ulp of bfloat16, so at most one number away from the nearest.
    assert found["fusednorm", "nothing"].max_ulp <= 1
    assert found["fusednorm", "nothing"].mean_ulp < found["fusednorm", "norm"].mean_ulp
    assert found["fusednorm", "nothing"].mean_ulp < found["torch eager", "sum"].mean_ulp


def test_other_operations():
    """What rounds at the same places is as near; peers without the operation are named."""
    found = compare.report(["fusednorm", "eager", "onnxruntime"], ["bfloat16"], HIDDEN, op="norm_add_norm")
    assert [(f.name, f.rounds, f.error) for f in found["findings"]] == [
        ("fusednorm", "first norm, sum", ""),
        ("torch eager", "each step", ""),
    ]
    ours, torchs = found["findings"]
    assert 0 < ours.mean_ulp < 1.1 * torchs.mean_ulp < 1.21 * ours.mean_ulp
    assert ours.constant
    assert found["missing"].keys() == {"onnxruntime"}


@pytest.mark.parametrize("op", workloads.OPERATIONS)
def test_exact_is_what_fusednorm_gives_in_float64(op):
    torch.manual_seed(1)
    x, residual, weight = torch.randn(5, 128), torch.randn(5, 128), torch.rand(128)
    operation = workloads.OPERATIONS[op]
    inputs = [operand.double() for operand in (x, residual)[: len(operation.inputs)]]
    y = workloads.as_tuple(operation.calls(weight.double(), 1e-6).new(*inputs))[0]
    wanted = compare.exact(x, residual, weight, 1e-6, op)
    assert (wanted.double() - y.double()).abs().max() < 1e-6


# What changes bits


def batch_dependent(x, residual, weight, eps):
    y = formula(x, residual, weight, eps)
    return y * (1 + 2**-20) if len(x) >= 64 else y


def random(x, residual, weight, eps):
    y = formula(x, residual, weight, eps)
    return y + 1e-3 * torch.rand_like(y)


def thread_dependent(x, residual, weight, eps):
    return formula(x, residual, weight, eps) * (1 + 2**-20 * torch.get_num_threads())


def failing(x, residual, weight, eps):
    raise NotImplementedError("[red] no kernel\nfor this")


def once_wrong():
    calls = itertools.count()
    return lambda *operands: formula(*operands) * (1 + 2**-20 * (next(calls) == 2))


@pytest.mark.parametrize(
    ("call", "runs", "batches", "threads"),
    [
        (formula, 0, [], []),
        (batch_dependent, 0, [64, 65], []),
        (once_wrong(), 1, [], []),
        (thread_dependent, 0, [], [2]),
        (random, compare.RUNS - 1, None, None),
    ],
)
def test_what_changes_bits_is_found(monkeypatch, call, runs, batches, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = finding(monkeypatch, call)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert found.constant == (call is formula)
    assert found.differing_runs == runs
    if batches is not None:
        assert (found.differing_batches, found.differing_threads) == (batches, threads)


def test_what_changes_bits_is_shown(monkeypatch):
    text = shown(measured(monkeypatch, batch_dependent, formula))
    dependent, constant = (line for line in text.splitlines() if "made up" in line and "same" in line)
    assert f"2 of {len(compare.BATCHES)}" in dependent
    assert (dependent.count("same"), constant.count("same")) == (2, 3)


def test_failures_are_shown(monkeypatch):
    found = measured(
        monkeypatch,
        failing,
        lambda x, residual, weight, eps: (x + residual).double(),
        lambda x, residual, weight, eps: (x + residual) / 0,
    )
    shape = [compare.ROWS, HIDDEN]
    assert [f.error for f in found["findings"]] == [
        "NotImplementedError: [red] no kernel for this",
        f"ValueError: returned torch.float64 {shape}, expected torch.float32 {shape}",
        "ValueError: returned NaN or infinity for ordinary operands",
    ]
    assert not any(f.constant for f in found["findings"])
    for f in found["findings"]:
        assert f.error.split()[1] in shown(found)


def test_what_cannot_be_found_or_imported_is_shown(monkeypatch):
    def broken(device):
        raise OSError("libnowhere.so: cannot open")

    monkeypatch.setitem(compare.PEERS, "broken", broken)
    monkeypatch.setitem(compare.PEERS, "absent", lambda device: peers._imported("no_such_module", "no-such-package"))
    found = compare.report(["broken", "absent"], ["float32"], HIDDEN)
    assert found["findings"] == []
    assert found["missing"] == {
        "broken": "OSError: libnowhere.so: cannot open",
        "absent": "not installed: pip install no-such-package",
    }
    assert all(reason in shown(found) for reason in found["missing"].values())


# The command


def test_command(run, tmp_path):
    file = tmp_path / "found.json"
    done = run("compare", "--peers", "fusednorm", "eager", "liger", "--hidden-size", str(HIDDEN), "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert f"{ROWS} rows of {HIDDEN} elements" in done.stdout
    assert torch.__version__ in done.stdout
    assert "\x1b" not in done.stdout
    found = json.loads(file.read_text())
    assert found["batches"] == list(BATCHES)
    assert found["threads"] == compare.threads()
    assert found["missing"].keys() == {"liger"}
    rows = [(f["dtype"], f["name"], f["rounds"]) for f in found["findings"]]
    four = [("fusednorm", rounds) for rounds in ("sum", "sum, norm", "nothing", "norm")]
    assert rows == [(dtype, *which) for dtype, which in itertools.product(cli.DTYPES, [*four, ("torch eager", "sum")])]
    for f in found["findings"]:
        assert f.keys() == {field.name for field in dataclasses.fields(compare.Finding)}
        assert f["error"] == ""
        assert sum(f["histogram"].values()) == ROWS * HIDDEN
        if f["name"] == "fusednorm":
            assert (f["differing_runs"], f["differing_batches"], f["differing_threads"]) == (0, [], [])


def test_no_peer_is_no_success(called, capsys):
    assert called("compare", "--peers", "liger", "--hidden-size", HIDDEN) == 2
    reason = "nothing was measured: none of the peers that --peers names is here: liger: its Triton"
    assert reason in capsys.readouterr().err


def test_status_is_that_of_fusednorm_alone(called, monkeypatch):
    command = ["compare", "--hidden-size", HIDDEN, "--dtypes", "float32", "--peers"]
    monkeypatch.setitem(compare.PEERS, "ours", lambda device: [implementation(batch_dependent, "fusednorm")])
    monkeypatch.setitem(compare.PEERS, "theirs", lambda device: [implementation(batch_dependent)])
    monkeypatch.setattr(cli, "PEERS", ("ours", "theirs"))
    assert called(*command, "ours") == 1
    assert called(*command, "theirs") == 0


def test_an_interrupted_comparison_shows_what_there_is(called, monkeypatch, capsys):
    def interrupted(device):
        raise KeyboardInterrupt

    monkeypatch.setitem(compare.PEERS, "second", interrupted)
    monkeypatch.setattr(cli, "PEERS", tuple(compare.PEERS))
    assert called("compare", "--hidden-size", HIDDEN, "--dtypes", "float32", "--peers", "eager", "second") == 130
    text = capsys.readouterr().out
    assert "torch eager" in text
    assert text.endswith("interrupted: `compare --peers NAME` measures fewer implementations\n")


@pytest.mark.parametrize(("wide", "width"), [(False, 80), (True, 140)])
def test_tables_fit(monkeypatch, wide, width):
    """All figures, whole, where every peer is here and nothing goes well."""
    finding = compare.Finding("ONNX Runtime skip-norm", "1.31.1", "as compiled", "bfloat16", "", 1234, 14.96268)
    finding.histogram = dict.fromkeys(compare.CLASSES, 1234567) | {compare.CLASSES[0]: compare.ROWS * HIDDEN}
    finding.differing_runs, finding.differing_batches, finding.differing_threads = 4, list(compare.BATCHES), [2, 64]
    found = {**measured(monkeypatch), "findings": [finding], "threads": [1, 2, 64]}
    text = io.StringIO()
    compare.show(found, Console(file=text, width=80), wide)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    (line,) = (line for line in lines if "14.96268" in line)
    batches = len(compare.BATCHES)
    expected = [str(compare.ROWS * HIDDEN), *["1234567"] * (len(compare.CLASSES) - 1)] if wide else ["100.00%"]
    assert line.split()[4:] == [
        "compiled",
        "1234",
        "14.96268",
        *expected,
        *f"4 of 4 {batches} of {batches} 2 of 2".split(),
    ]
    assert max(map(len, lines)) <= width
