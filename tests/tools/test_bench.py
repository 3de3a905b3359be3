"""``python -m fusednorm bench``: that its arithmetic is right, and that it notices what it says it looks for."""

import json

import pytest
import torch
from rich.console import Console
from torch.overrides import TorchFunctionMode

import fusednorm
from fusednorm.engine import requested
from fusednorm.operations.listed import every
from fusednorm.tools import cli
from fusednorm.tools.cli import OPS, UnusableError
from fusednorm.tools.console import console
from fusednorm.tools.measure import bench as benchmark
from fusednorm.tools.measure import cells, clock, peers, tables
from fusednorm.tools.measure.workloads import GRADIENTS, OPERATIONS, every_measured

HIDDEN, ROWS = 128, 80
THERE = ("bench", "--threads", "1")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Times are of no interest here."""
    monkeypatch.setattr(clock, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(clock, "ROUNDS", 2)
    monkeypatch.setattr(benchmark.Bench, "copy_bandwidth", lambda self: 1e9)


def cell(op, rows=ROWS, dtype="float32"):
    return cells.Cell(op, dtype, rows, HIDDEN, 1)


def peer(monkeypatch, call, **flags):
    """Makes a call of x, the residual, the weight and eps the only peer."""
    made_up = peers.Implementation(
        "made up", "1.0", "sum", lambda weight, eps: lambda x, r: call(x, r, weight, eps), **flags
    )
    monkeypatch.setitem(peers.PEERS, "made up", lambda device: [made_up])
    return benchmark.Bench(CPU, None, ["made up"])


def formula(x, residual, weight, eps):
    total = x + residual
    return torch.nn.functional.rms_norm(total, weight.shape, weight, eps), total


# Times


class Stopwatch(clock.Clock):
    """Every run takes a millisecond."""

    def __init__(self, has_graphs):
        super().__init__(CPU)
        self.has_graphs = has_graphs
        self.captures = []

    def seconds(self, run):
        run()
        return 1e-3

    def captured(self, call, operands):
        self.captures.append(len(operands))
        return lambda: [call(*given) for given in operands]


@pytest.mark.parametrize(("turn_seconds", "calls"), [(0.0, 3), (0.0205, 20), (9.0, 1000)])
def test_a_figure_is_that_of_one_call(monkeypatch, turn_seconds, calls):
    monkeypatch.setattr(clock, "TURN_SECONDS", turn_seconds)
    bench = benchmark.Bench(CPU, None, [])
    bench.clock = Stopwatch(has_graphs=False)
    found = bench.measure(cell("add_norm"))
    assert found.keys() == {"fusednorm in place", "fusednorm out=", "fusednorm", "copy"}
    assert {(times["eager"], times["graph"]) for times in found.values()} == {(1e-3 / calls * 1e6, None)}


@pytest.mark.parametrize(("sets", "captured"), [(1, 8), (3, 9), (20, 20)])
def test_a_graph_has_a_call_with_each_set(monkeypatch, sets, captured):
    bench = benchmark.Bench(CPU, None, [])
    bench.clock = Stopwatch(has_graphs=True)
    monkeypatch.setattr(bench.clock, "sets", lambda nbytes: sets)
    found = bench.measure(cell("norm"))
    assert set(bench.clock.captures) == {captured}
    assert {times["graph"] for times in found.values()} == {1e-3 / captured * 1e6}


@pytest.mark.parametrize("threads", [1, 2])
def test_other_programs_do_not_lengthen_the_time_of_one_thread(monkeypatch, threads):
    """Of several threads it is the time that has passed."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(clock.time, "thread_time", iter([1.0, 2.0]).__next__)
    monkeypatch.setattr(clock.time, "perf_counter", iter([1.0, 9.0]).__next__)
    assert clock.Clock(CPU).seconds(int) == {1: 1.0, 2: 8.0}[threads]


def test_large_operands_take_turns():
    sets = clock.Clock(CPU).sets
    assert sets(clock.HOT_BYTES) == 1
    assert sets(clock.HOT_BYTES + 1) == clock.COLD_BYTES // (clock.HOT_BYTES + 1)
    assert sets(clock.COLD_BYTES) == 2


def test_bytes():
    operands = {op: cell(op, rows=2, dtype="bfloat16").nbytes / (2 * HIDDEN * 2) for op in OPS}
    assert operands == {
        "add_norm": 4,
        "norm": 2,
        "layer_norm": 2,
        "add_layer_norm": 4,
        "norm_add": 3,
        "norm_add_norm": 4,
        "add_norm_int8": 3.5,
        "add_norm_fp8": 3.5,
        "add_norm_fp8_block": 3.5,
        "qk_norm_rope": 4,
        "backward": 4,
        "gate": 3,
        "silu_and_mul": 3,
        "norm_gated": 3,
        "norm_add_norm_backward": 6,
        "silu_and_mul_backward": 5,
        "norm_gated_backward": 5,
        "qk_norm_rope_backward": 6,
    }


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_copy_writes_half_of_the_operands(count):
    operands = torch.arange(count * 4.0 * HIDDEN).view(count, 4, HIDDEN)
    before = operands.clone()
    clock.copy(*clock.halves(operands))
    assert (operands != before).sum() == operands.numel() // 2


def test_share_is_beside_the_copy():
    times = {"copy": {"eager": 6.0, "graph": None}, "ours": {"eager": 8.0, "graph": None}, "theirs": {"error": "no"}}
    row = {"rows": 2, "contenders": times}
    assert tables.share(row, "ours") == 0.75
    assert tables.share(row, "theirs") is None
    assert tables.share({**row, "rows": 1}, "ours") is None
    times = {"copy": {"eager": 6.0, "graph": 2.0}, "ours": {"eager": 8.0, "graph": 4.0}}
    assert tables.share({"rows": 2, "contenders": times}, "ours") == 0.5


def test_ratio_is_beside_the_same_way_of_calling():
    """On a GPU within a graph; of several backends beside the first."""
    times = {
        "fusednorm cuda in place": {"eager": 1.0, "graph": 2.0},
        "fusednorm cuda": {"eager": 5.0, "graph": 4.0},
        "fusednorm triton": {"eager": 50.0, "graph": 40.0},
        "theirs in place": {"eager": 9.0, "graph": 3.0},
        "theirs": {"eager": 9.0, "graph": 10.0},
        "broken": {"error": "no"},
    }
    row = {"contenders": times}
    assert [tables.ratio(row, name) for name in ("theirs in place", "theirs", "broken")] == [1.5, 2.5, None]
    for figures in times.values():
        figures["graph"] = None
    assert [tables.ratio(row, name) for name in ("theirs in place", "theirs")] == [9.0, 1.8]


# Bits


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", cli.DTYPES)
def test_fusednorm_has_the_bits_that_it_is_compared_with(op, dtype):
    found = benchmark.Bench(CPU, ["cpu", "reference"], []).measure(cell(op, dtype=dtype))
    quantizes = op in OPERATIONS and OPERATIONS[op].quantization
    gates = op in ("gate", "silu_and_mul")
    alone = op == "norm_gated" or op in GRADIENTS
    ways = [""] if alone else ["", " out="] if quantizes or gates else ["", " in place", " out="]
    assert {name for name in found if name.startswith("fusednorm")} == {
        f"fusednorm {backend}{way}" for backend in ("cpu", "reference") for way in ways
    }
    assert {times["differing"] for name, times in found.items() if name != "copy"} == {0.0}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("at", [0, -1])
def test_one_wrong_bit_ends_it(monkeypatch, op, at):
    """In the first row or in the last, of the last of the contenders."""
    mine = benchmark.ours

    def with_one_wrong(*arguments):
        *ways, last = mine(*arguments)

        def call(x, *others):
            outputs = last.call(x, *others)
            alone = isinstance(outputs, torch.Tensor)
            y = outputs if alone else outputs[0]
            if y.dtype.itemsize == 1:
                y.view(torch.uint8)[at, 5] ^= 1
                return outputs
            step = torch.zeros_like(y)
            step[at, 5] = 2**-16
            wrong = y * (1 + step) if op in GRADIENTS or not alone else y + step
            return wrong if alone else (wrong, *outputs[1:])

        yield from ways
        yield last._replace(call=call)

    monkeypatch.setattr(benchmark, "ours", with_one_wrong)
    with pytest.raises(benchmark.WrongBitsError, match=f"{op} float32 {ROWS}x{HIDDEN}.*fusednorm does not have"):
        benchmark.Bench(CPU, None, []).measure(cell(op))


def test_what_differs_of_a_peer_is_counted(monkeypatch):
    def some_wrong(x, residual, weight, eps):
        y, total = formula(x, residual, weight, eps)
        y[:2, :8] *= 1 + 2**-20
        y[40, :8] *= 1 + 2**-20  # between the rows that are compared
        return y, total

    wrong = peer(monkeypatch, some_wrong).measure(cell("add_norm"))["made up"]["differing"]
    right = peer(monkeypatch, formula).measure(cell("add_norm"))["made up"]["differing"]
    compared = 2 * 2 * benchmark.EDGE_ROWS * HIDDEN
    with torch.no_grad():
        x, residual = benchmark.Bench(CPU, None, [])._inputs(cell("add_norm"))
        weight = torch.linspace(0.5, 1.5, HIDDEN)
        got = torch.stack(formula(x, residual, weight, benchmark.EPS))
        wanted = torch.stack(fusednorm.fused_add_rms_norm(x, residual, weight, benchmark.EPS))
        unequal = (got != wanted)[:, [*range(benchmark.EDGE_ROWS), *range(-benchmark.EDGE_ROWS, 0)]]
    assert right == unequal.sum().item() / compared
    unequal[0, :2, :8] = True
    assert wrong == unequal.sum().item() / compared


def test_a_peer_in_place_works_on_copies_of_what_is_compared(monkeypatch):
    def in_place(x, residual, weight, eps):
        y, total = formula(x, residual, weight, eps)
        x.copy_(y)
        residual.copy_(total)

    found = peer(monkeypatch, in_place, in_place=True).measure(cell("add_norm"))
    assert (
        found["made up in place"]["differing"]
        == peer(monkeypatch, formula).measure(cell("add_norm"))["made up"]["differing"]
    )


def test_a_peer_that_fails_is_shown_and_the_others_are_measured(monkeypatch, capsys):
    def failing(x, residual, weight, eps):
        raise NotImplementedError("[red] no kernel\nfor this")

    bench = peer(monkeypatch, failing, gradients=True)
    results = cells.Results(bench.machine(), None)
    for op in ("add_norm", "backward"):
        results.add(cell(op), bench.measure(cell(op)))
        assert results.found["cells"][-1]["contenders"]["made up"] == {
            "error": "NotImplementedError: [red] no kernel for this"
        }
    tables.show(results.found, console())
    # A line before it may make the column of names wider.
    shown = " ".join(capsys.readouterr().out.split())
    assert "made up failed at 80x128: NotImplementedError: [red] no kernel for this" in shown


@pytest.mark.parametrize("op", ["add_norm", "backward"])
@pytest.mark.parametrize("dtype", cli.DTYPES)
def test_what_computes_something_else_is_not_timed(monkeypatch, op, dtype):
    """One element in a thousand, of either result, backward too."""

    def of_other_rows(x, residual, weight, eps):
        y, total = formula(x, residual, weight, eps)
        return y, torch.where(torch.arange(HIDDEN) == 7, total + 1, total)

    found = peer(monkeypatch, of_other_rows, gradients=True).measure(cell(op, dtype=dtype))["made up"]
    assert found["error"].startswith("result 2 is off by 1")
    assert "error" not in peer(monkeypatch, formula, gradients=True).measure(cell(op, dtype=dtype))["made up"]


#: By function, the functions of torch that the contender "torch eager" calls: the whole of the text that is timed.
QUANTIZED = "promote_types to reshape abs amax div clamp {} clamp to flatten squeeze"
INT8, FLOAT8 = QUANTIZED.format("__rdiv__ mul round"), QUANTIZED.format("div")
IN_TORCH = {
    "rms_norm": "rms_norm",
    "fused_add_rms_norm": "add rms_norm",
    "rms_norm_add": "rms_norm add",
    "rms_norm_add_rms_norm": "rms_norm add rms_norm",
    "l2_norm": "normalize",
    "layer_norm": "layer_norm",
    "fused_add_layer_norm": "add layer_norm",
    "gate": "silu mul",
    "silu_and_mul": "silu mul",
    "gelu_tanh_and_mul": "gelu mul",
    "gelu_and_mul": "gelu mul",
    "rms_norm_gated": "rms_norm silu mul",
    "rotate": "view chunk mul neg cat mul add view",
    "qk_norm_rope": " ".join(["view rms_norm chunk mul neg cat mul add view"] * 2),
    "quantize": INT8,
    "rms_norm_quant": f"rms_norm {FLOAT8}",
    "fused_add_rms_norm_quant": f"add rms_norm {INT8}",
    "layer_norm_quant": f"layer_norm {FLOAT8}",
    "fused_add_layer_norm_quant": f"add layer_norm {INT8}",
    "silu_and_mul_quant": f"silu mul {FLOAT8}",
    "relu2_quant": f"relu square {FLOAT8}",
    "gelu": "gelu",
    "relu2": "relu square",
    "softcap": "div tanh mul",
    "linear": "linear",
    "log_softmax": "log_softmax",
    "logsumexp": "logsumexp",
    "selected_log_prob": "log_softmax unsqueeze gather squeeze",
    "selected_log_prob_and_entropy": "log_softmax unsqueeze gather squeeze exp mul sum neg",
    "modulate": "add mul add",
}


class Called(TorchFunctionMode):
    """The names of torch's functions that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, given=(), named=None):
        self.names += [function.__name__] * (function.__name__ != "__get__")  # of an attribute, such as a shape
        return function(*given, **named or {})


def test_torch_eager_is_what_a_user_of_torch_writes():
    """Of every operation of the library; and it computes the same."""
    bench = benchmark.Bench(CPU, None, ["eager"])
    called = {}
    for op, measured in reversed(every_measured().items()):  # the first of several quantizations comes last
        if not hasattr(fusednorm, measured.listed.name):  # a toy that other tests have declared
            continue
        of_op = cells.Cell(op, "bfloat16", 3, HIDDEN, 1)
        call = bench.peers[0].of(op)(torch.ones(HIDDEN).bfloat16(), benchmark.EPS)
        inputs = bench._inputs(of_op)
        with Called() as mode:
            call(*inputs)
        called[measured.listed.name] = " ".join(mode.names)
        assert "error" not in bench.measure(of_op)["torch eager"]
    assert called == IN_TORCH
    others = {name for name, one in every().items() if not hasattr(fusednorm, name) or one.of_keys or one.dtypes}
    assert called.keys() == every().keys() - others


def test_by_operation(made_up_times, called, capsys):
    """A line for each operation, in a table for each peer."""
    assert called("bench", "--peers", "--by-operation", "--threads", "1") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    shapes = [f"{dtype}, {rows} x 4096" for dtype in ("bfloat16", "float32") for rows in (1, 32, 512)]
    for name, ratio in (("torch.compile", "2.0x"), ("torch eager", "6.0x"), ("ONNX Runtime skip-norm", "failed")):
        at = lines.index(f"| {name}, 1 thread | {' | '.join(shapes)} |")
        wanted = [f"| {op} {f'| {ratio} ' * 6}|" for op in benchmark.BY_OPERATION["ops"]]
        assert lines[at + 2 : at + 2 + len(wanted)] == wanted


def test_only_what_has_gradients_goes_backward(monkeypatch):
    assert "made up" not in peer(monkeypatch, formula).measure(cell("backward"))
    assert "made up" in peer(monkeypatch, formula, gradients=True).measure(cell("backward"))


def test_each_contender_is_timed_with_its_backend():
    seen = set()

    def calling(name):
        return lambda: seen.add((name, requested.request()))

    names = ("cpu", "reference")
    clock.Clock(CPU).timed([clock.Run(clock.Contender(n, None, 0, backend=n), calling(n), [()]) for n in names])
    assert seen == {(name, name) for name in names}


# The command


def test_command(run, tmp_path):
    file = tmp_path / "found.json"
    arguments = ["--peers", "eager", "liger", "--dtypes", "float32", "--json", str(file)]
    done = run(*THERE, *arguments, "--shapes", "1x128", "1x64", "--ops", *OPS)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "liger: not measured: its Triton kernels need a GPU" in done.stdout
    found = json.loads(file.read_text())
    assert [(c["op"], c["rows"], c["hidden_size"], c["threads"]) for c in found["cells"]] == [
        (op, 1, size, 1) for op in OPS for size in (128, 64) if (op, size) != ("add_norm_fp8_block", 64)
    ]
    assert "add_norm_fp8_block float32 1x64, 1 thread: not measured: its rows do not consist" in done.stdout
    for c in found["cells"]:
        assert {"fusednorm", "torch eager", "copy"} <= c["contenders"].keys()
        assert all(times["eager"] > 0 and times["graph"] is None for times in c["contenders"].values())
        assert f"{c['op']}, float32, 1 thread\n" in done.stdout

    done = run(*THERE, *arguments, "--shapes", "1x64", "3x64", "--ops", "norm")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 were measured before" in done.stdout
    more = json.loads(file.read_text())
    assert more["cells"][: len(found["cells"])] == found["cells"]
    assert [(c["op"], c["rows"]) for c in more["cells"][len(found["cells"]) :]] == [("norm", 3)]

    done = run(*THERE, "--peers", "--dtypes", "float32", "--json", str(file), "--shapes", "1x64")
    assert done.returncode == 2
    assert f"--json {file} has figures of peers {{'torch eager':" in done.stderr
    assert json.loads(file.read_text()) == more


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is no JSON"), ("[]", "was not written by"), ('{"a": 1}', "was not written by")]
)
def test_other_files_are_left_alone(tmp_path, content, message):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(UnusableError, match=f"--json {file} {message}"):
        cells.Results({}, str(file))
    assert file.read_text() == content


def test_no_cell_is_no_success(called, capsys):
    assert called("bench", "--minutes", "1e-9", "--shapes", "1x64") == 2
    assert "bench: nothing was measured: no shape fitted" in capsys.readouterr().err


def test_status_is_1_where_bits_are_wrong(called, monkeypatch, capsys):
    def wrong(*_):
        raise benchmark.WrongBitsError("add_norm: other bits")

    monkeypatch.setattr(benchmark.Bench, "measure", wrong)
    assert called("bench", "--peers", "--shapes", "1x64") == 1
    assert capsys.readouterr().err == "add_norm: other bits\n"


@pytest.fixture
def made_up_times(monkeypatch):
    """Contenders whose calls take these microseconds, or fail."""
    times = {
        "fusednorm in place": 2.0,
        "fusednorm out=": 3.0,
        "fusednorm": 4.0,
        "torch eager": 24.0,
        "torch.compile": 8.0,
        "vLLM operator in place": 5.0,
        "ONNX Runtime skip-norm": None,
        "copy": 3.5,
    }

    def measure(self, cell, starting):
        starting("in a test")
        return {
            name: {"error": "no"} if us is None else {"differing": 0.0, "eager": us * cell.rows, "graph": None}
            for name, us in times.items()
        }

    monkeypatch.setattr(benchmark.Bench, "measure", measure)


def test_ratios(made_up_times, called, capsys):
    """In place beside in place, new outputs beside new outputs; the median over shapes; within 80 columns."""
    assert called("bench", "--peers", "--quick") == 0
    text = capsys.readouterr().out
    assert "3 to measure: about 1 minute\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1x4096", "2.0", "3.0", "4.0", "3.5", "6.0x", "2.0x", "2.5x", "failed"] in lines
    assert ["32x4096", "64.0", "96.0", "128", "112", "6.0x", "2.0x", "2.5x", "failed"] in lines
    assert ["median", "6.0x", "2.0x", "2.5x", "-"] in lines
    assert "how many times as long as fusednorm they take" in text
    tables = [line for line in text.splitlines() if line.strip().startswith(("1x", "32x", "─"))]
    assert max(map(len, tables)) <= 80
    assert "vLLM" in text
    assert "float32" not in text
    assert "backward" not in text


def test_each_cell_is_a_line_as_it_is_measured(made_up_times, called, capsys, monkeypatch):
    """Where no bar shows: a run that is killed leaves what it measured."""
    monkeypatch.setattr(tables, "show", lambda *_: pytest.fail("the lines come first"))
    with pytest.raises(pytest.fail.Exception):
        called("bench", "--peers", "--quick")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("add_norm bfloat16 1x4096")]
    assert [line.partition(": ")[2].startswith("fusednorm in place 2.0, ") for line in lines] == [True]
    assert lines[0].endswith(" us")


def test_a_disturbed_machine_is_named(capsys):
    quiet, disturbed = ([1.0] * 8 + [50.0]), ([1.0] * 5 + [2.0] * 4)
    assert clock.spread(quiet) == 1.0
    assert clock.spread(disturbed) == 2.0
    machine = {"device": "cpu", "processor": "a processor", "torch": "2", "peers": {}}
    for values, said in ((quiet, False), (disturbed, True)):
        times = {"differing": 0.0, "eager": 1.0, "graph": None, "spread": clock.spread(values)}
        one = {"op": "add_norm", "dtype": "bfloat16", "threads": 1, "rows": 8, "hidden_size": 64}
        one["contenders"] = {"fusednorm": times, "copy": times}
        found = {"machine": machine, "copy_bandwidth": None, "cells": [one]}
        tables.show(found, Console(width=140))
        assert ("disturbed  rounds differ up to 2.0 times at 8x64" in capsys.readouterr().out) == said


@pytest.mark.parametrize(("part", "said"), [(0.5, "up to 50.00%"), (1e-6, "less than 0.01%"), (0.0, None)])
def test_few_differing_elements_are_not_none(part, said, capsys):
    times = {"differing": part, "eager": 1.0, "graph": None}
    one = {"op": "add_norm", "dtype": "bfloat16", "threads": 1, "rows": 8, "hidden_size": 64}
    one["contenders"] = {"fusednorm": times | {"differing": 0.0}, "a peer": times, "copy": times | {"differing": 0.0}}
    machine = {"device": "cpu", "processor": "a processor", "torch": "2", "peers": {}}
    tables.show({"machine": machine, "copy_bandwidth": None, "cells": [one]}, console())
    shown = " ".join(capsys.readouterr().out.split())
    assert ("has other bits" in shown) == (said is not None)
    assert said is None or f"a peer has other bits than fusednorm in {said} of the elements" in shown


def test_wide_tables_have_all_figures(made_up_times, called, capsys):
    options = ["--wide", "--shapes", "2x4096", "--dtypes", "float32", "--ops", "norm"]
    assert called("bench", "--peers", *options) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if "2 x 4096" in line)
    figures = ["4.0 (175%)", "6.0 (117%)", "8.0 (88%)", "48.0 (15%)", "16.0 (44%)", "10.0 (70%)", "failed", "7.0"]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["2 x 4096", *figures]
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| rows x N"))
    assert (lines[at - 1], lines[at + 1][:2]) == ("", "|-")


@pytest.mark.parametrize("file", [False, True])
def test_an_interrupted_run_shows_what_there_is(called, monkeypatch, capsys, tmp_path, file):
    cell_times = {name: {"differing": 0.0, "eager": 1.0, "graph": None} for name in ("fusednorm", "copy")}
    left = [cell_times]

    def measure(self, cell, starting):
        if not left:
            raise KeyboardInterrupt
        return left.pop()

    monkeypatch.setattr(benchmark.Bench, "measure", measure)
    options = ["--json", str(tmp_path / "found.json")] if file else []
    assert called("bench", "--peers", "--quick", *options) == 130
    text = capsys.readouterr().out
    assert "1x4096" in text
    again = "the same command continues" if file else "with --json FILE the next run would continue"
    assert text.endswith(f"interrupted: 2 of 3 were left out; {again}\n")


def test_what_takes_long_is_said(monkeypatch):
    """Who is prepared, and that torch.compile compiles."""
    bench = peer(monkeypatch, formula)
    bench.peers = [bench.peers[0]._replace(name=peers.COMPILED)]
    said = []
    bench.measure(cell("norm"), said.append)
    bench.measure(cell("add_norm"), said.append)
    assert "torch.compile compiles" in said
    assert "fusednorm out= is compared" in said
    assert said[-1] == "all are timed"
    assert bench.minutes(12) > benchmark.Bench(CPU, None, []).minutes(12) > 0
