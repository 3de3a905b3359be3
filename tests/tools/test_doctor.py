"""``python -m fusednorm``: what it finds, and that its proof can fail."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import printed_by, python
from rich.console import Console

import fusednorm
from fusednorm.__main__ import main
from fusednorm.backends import reference
from fusednorm.calls import fast_path
from fusednorm.engine import choose, requested
from fusednorm.operations.listed import every
from fusednorm.tools import check, cli, commands, doctor
from fusednorm.tools.measure import bench, clock, compare, peers, workloads


def printed(command, **console):
    text = io.StringIO()
    status = command(Console(file=text, width=140, **console))
    return status, text.getvalue()


def register(monkeypatch, name, **functions):
    """Adds the reference with other functions as a backend."""
    monkeypatch.setattr(choose, "_registered", {name: SimpleNamespace(**{**vars(reference), **functions})})
    monkeypatch.setattr(choose, "_selected", {})


@pytest.fixture
def one_shape(monkeypatch):
    """The check at a single shape and dtype, and without waiting for good times."""
    monkeypatch.setattr(check, "HIDDEN_SIZES", (896,))
    monkeypatch.setattr(check, "ROWS", (16,))
    monkeypatch.setattr(check, "DTYPES", {"bfloat16": (torch.bfloat16, torch.bfloat16)})
    monkeypatch.setattr(check, "TIMED", (16, 896))
    monkeypatch.setattr(clock, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(check, "every", dict)


def test_report_as_json(run, called, capsys):
    """Also of a variable that nothing reads, which is no fault."""
    done = run("--json", FUSEDNORM_BACKEND="reference", FUSEDNORM_BACKND="cuda")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["fusednorm"] == fusednorm.__version__
    assert found["torch"] == torch.__version__
    assert found["environment"] == {"FUSEDNORM_BACKEND": "reference", "FUSEDNORM_BACKND": "cuda"}
    assert [b["name"] for b in found["backends"]] == [info.name for info in fusednorm.backends()]
    assert found["devices"][0]["backend"] == "reference"
    assert found["instruction_set"] == found["instruction_sets"][-1]
    assert found["remarks"] == {"FUSEDNORM_BACKND": "nothing reads this variable; did you mean FUSEDNORM_BACKEND?"}
    for arguments in (["doctor", "--json"], ["--json", "doctor"]):
        assert called(*arguments) == 0
        assert json.loads(capsys.readouterr().out).keys() == found.keys()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_api", None, "torch .* is older than 2.10"),
        ("COMPILED", False, "its C extension was not built"),
        ("must_be_seen", SimpleNamespace(MISSING=["_is_profiler_enabled"]), "torch .* lacks _is_profiler_enabled"),
        ("OPEN", False, "torch .* lacks a function in C[+][+]"),
    ],
)
def test_a_closed_fast_path_is_a_finding(monkeypatch, name, value, reason):
    status, text = printed(doctor.show)
    assert re.search(r"fast path +open\n", re.sub(" +\n", "\n", text))
    monkeypatch.setattr(fast_path, "OPEN", False)
    monkeypatch.setattr(fast_path, name, value)
    assert printed(doctor.show)[0] == status
    assert re.search(f"fast path +closed, calls are slower: {reason}", printed(doctor.show)[1])


def test_report_for_a_person(run, called, capsys):
    done = run(FUSEDNORM_BACKND="cuda")
    assert done.returncode == 0
    assert "cuda (nothing reads this variable; did you mean FUSEDNORM_BACKEND?)" in done.stdout
    assert called("doctor") == 0
    assert capsys.readouterr().out.splitlines()[0] == done.stdout.splitlines()[0]
    for part in ("specification 1", torch.__version__, "available", "CPU tensors go to backend cpu: C kernels for"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout  # no colours in a pipe


@pytest.mark.parametrize("value", ["huggingface", "huggingface,gpu", "gpu", "off", " "])
def test_settings_of_the_plugin_of_vllm(monkeypatch, value):
    monkeypatch.setenv("FUSEDNORM_VLLM", value)
    assert "FUSEDNORM_VLLM" not in doctor.report()["remarks"]


#: Settings that nothing can do, by variable, and what is said of them.
UNUSABLE = [
    {
        "FUSEDNORM_BACKEND": ("nonsense", "'nonsense', which does not exist"),
        "FUSEDNORM_CPU_ISA": ("sse9", "FUSEDNORM_CPU_ISA is 'sse9', which is no instruction set"),
        "FUSEDNORM_PREWARM": ("yes", "FUSEDNORM_PREWARM is 'yes'; it must be background, wait"),
        "FUSEDNORM_VLLM": ("foo", "it must be one of vllm, default, huggingface, off; vLLM is left as it was"),
    },
    {
        "FUSEDNORM_BACKEND": ("cuda", "it runs on cuda tensors, and these are on cpu"),
        "FUSEDNORM_CPU_ISA": ("[red]", "FUSEDNORM_CPU_ISA is '[red]'"),
    },
]


@pytest.mark.parametrize("settings", UNUSABLE)
def test_unusable_settings_are_findings(run, settings):
    """Beside all the others: no variable costs the list of backends."""
    done = run(**{variable: value for variable, (value, _) in settings.items()})
    assert done.returncode == 1
    text = " ".join(re.sub("[│┃]", " ", done.stdout).split())
    for value, message in settings.values():
        assert message in text
        assert value in text
    assert all(info.name in done.stdout for info in fusednorm.backends())
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "found", "status"),
    [
        ("devices", [{"device": "cpu", "error": "the name does not exist"}], 1),
        ("backends", [{"reasons": ["FUSEDNORM_CPU_ISA is 'sse9', which is no instruction set"]}], 1),
        ("backends", [{"reasons": ["torch finds no NVIDIA GPU"]}], 0),
        ("remarks", {"FUSEDNORM_VLLM": "it must be one of vllm, default, huggingface, off"}, 1),
        ("remarks", {"FUSEDNORM_BACKND": "nothing reads this variable"}, 0),
    ],
)
def test_what_cannot_be_used_is_a_fault(name, found, status):
    """Each by itself; a variable that nothing reads is none."""
    assert doctor.status({"devices": [], "backends": [], "remarks": {}, name: found}) == status


def test_check(one_shape):
    """A line for each backend and dtype, the preferred one last; or for each case."""
    status, text = printed(check.check)
    assert status == 0
    subjects = check.subjects()
    assert [s.backend for s in subjects] == ["reference"] + ["cpu"] * (len(subjects) - 1)
    assert [s.variant for s in subjects][1:] == list(choose.load("cpu").variants())
    assert text.count("1 exact") == len(check.PROMISES) * len(subjects)
    assert f"all {len(subjects)} cases are exact" in text
    assert max(map(len, text.splitlines())) <= 80
    status, text = printed(lambda console: check.check(console, ["reference"], every_case=True))
    assert status == 0
    assert text.count("exact") == 2
    assert re.search(r"\d us\b", text)
    assert "cpu" not in text


def test_check_has_a_line_for_each_backend_and_dtype(monkeypatch):
    """Mixed dtypes too; gradients of the smaller shapes only."""
    monkeypatch.setattr(check, "HIDDEN_SIZES", (64, 96))
    monkeypatch.setattr(check, "ROWS", (1, 7))
    monkeypatch.setattr(check, "MOST_WITH_GRADIENTS", 7 * 64)
    monkeypatch.setattr(clock, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(check, "every", dict)
    status, text = printed(check.check)
    assert status == 0
    lines = [line for line in text.splitlines() if "4 exact" in line]
    assert len(lines) == len(check.DTYPES) * len(check.subjects())
    assert sum("mixed" in line for line in lines) == len(check.subjects())
    assert all((line.count("4 exact"), line.count("3 exact")) == (3, 1) for line in lines)


def test_check_shows_progress_on_a_terminal_only(one_shape):
    assert "%" in printed(check.check, force_terminal=True)[1]
    assert "%" not in printed(check.check)[1]


def test_an_interrupted_check_prints_what_there_is(one_shape, monkeypatch):
    measure, seen = check._result, []

    def interrupted(subject, *rest):
        if seen:
            raise KeyboardInterrupt
        seen.append(subject)
        return measure(subject, *rest)

    monkeypatch.setattr(check, "_result", interrupted)
    status, text = printed(check.check)
    assert status == 130
    assert text.count("1 exact") == len(check.PROMISES)
    assert f"interrupted after 1 of {len(check.subjects())} cases; `check --backend NAME` takes less time" in text
    assert "all" not in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("promise", "is_wrong"),
    [
        ("forward", lambda residual, rows: True),
        ("fused", lambda residual, rows: residual is not None),
        ("row", lambda residual, rows: rows > 1),
        ("gradients", lambda residual, rows: False),
    ],
)
def test_check_finds_one_wrong_bit(one_shape, monkeypatch, promise, is_wrong):
    """Each promise in a column of its own."""

    def forward(call):
        reference.forward(call)
        call.out.view(torch.int16)[-1, -1] ^= is_wrong(call.residual, call.rows)

    def backward(call):
        reference.backward(call)
        if promise == "gradients":
            call.dx.view(torch.int16)[-1, -1] ^= 1

    register(monkeypatch, "off_by_one_bit", forward=forward, backward=backward)
    status, text = printed(check.check)
    assert status == 1
    (line,) = (line for line in text.splitlines() if "off_by_one_bit" in line)
    verdicts = dict(zip(check.PROMISES, re.findall(r"1 exact|1 of 1 differ", line), strict=True))
    assert verdicts[promise] == "1 of 1 differ"
    assert (verdicts["gradients"] == "1 exact") == (verdicts["forward"] != "1 exact")
    assert f"1 of {len(check.subjects())} cases have other bits" in text
    status, text = printed(lambda console: check.check(console, ["off_by_one_bit"], every_case=True))
    assert status == 1
    assert re.search(rf"\b{promise}: \d+ differ", text)


def test_check_proves_every_operation(monkeypatch):
    """All that are listed; a backend for each line."""
    monkeypatch.setattr(check, "results", lambda *_: iter(()))
    monkeypatch.setattr(check, "OPERATIONS_SHAPE", (3, 256))
    status, text = printed(check.check)
    assert status == 0
    count, subjects = len(every()), check.subjects()
    assert text.count(f"{count} exact") == len(check.DTYPES) * len(subjects)
    assert f"all {count * len(check.DTYPES) * len(subjects)} cases are exact" in text


@pytest.mark.parametrize("where", ["outputs", "gradients"])
def test_check_finds_one_wrong_bit_of_an_operation(one_shape, monkeypatch, where):
    def wrong(y, z, activation):
        x, y = y, fusednorm.gate(y, z, activation=activation)
        if requested.request() == "cpu":
            with torch.no_grad():
                y.view(torch.int16)[-1, -1] ^= where == "outputs"
            if y.requires_grad and where == "gradients":
                x.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), 7.0))
        return y

    two = {"gate": every()["gate"]._replace(function=wrong), "rms_norm_add": every()["rms_norm_add"]}
    monkeypatch.setattr(check, "every", lambda: two)
    monkeypatch.setattr(check, "OPERATIONS_SHAPE", (3, 128))
    status, text = printed(lambda console: check.check(console, ["reference", "cpu"]))
    assert status == 1
    variants = choose.load("cpu").variants()
    for variant in variants:
        assert f"cpu {variant}, bfloat16: gate: " in text
    assert text.count("1 of 2 differ") == len(variants)
    assert text.count("gate: ") == len(variants)


def test_a_backend_that_refuses_a_dtype_is_not_blamed(one_shape, monkeypatch):
    register(monkeypatch, "picky", unsuitable=lambda operation: ["it computes in float32 only"])
    status, text = printed(check.check)
    assert status == 0
    (line,) = (line for line in text.splitlines() if "picky" in line)
    assert re.sub("[│┃]", " ", line).split() == ["picky", "bfloat16", *["-"] * len(check.PROMISES)]


# The commands' own manners


def test_version(called, capsys):
    assert called("--version") == 0
    assert capsys.readouterr().out == f"fusednorm {fusednorm.__version__}, specification {fusednorm.SPEC_VERSION}\n"


def test_the_console_script_is_the_same_command():
    (script,) = metadata.entry_points(group="console_scripts", name="fusednorm")
    assert script.load() is main


NOWHERE = "cannot be written: No such file or directory"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doktor"], "invalid choice: 'doktor'"),
        (["--json", "check"], "--json goes after the command: check --json FILE"),
        (["check", "--backend", "foo"], "the option names the backend 'foo', which does not exist; the names are cpu,"),
        (["check", "--backend", "cpu,foo"], "names the backend 'foo', which does not exist"),
        (["bench", "--backends", "foo"], "names the backend 'foo', which does not exist"),
        (["bench", "--device", "npu:0"], "device npu:0 is not here: torch"),
        (["compare", "--device", "npu"], "device npu is not here: torch"),
        (["compare", "--device", "cpu:1"], "device cpu:1 is not here: torch"),
        (["bench", "--device", "gpu"], "device gpu is not here: torch"),
        (["bench", "--threads", "-3"], "'-3' is no whole number of at least 1"),
        (["bench", "--threads", "0"], "'0' is no whole number of at least 1"),
        (["bench", "--minutes", "0"], "'0' is no number of minutes, such as 5 or 0.5"),
        (["bench", "--minutes", "nan"], "'nan' is no number of minutes"),
        (["bench", "--minutes", "long"], "'long' is no number of minutes"),
        (["compare", "--hidden-size", "0"], "'0' is no whole number of at least 1"),
        (["compare", "--json", "/nonexistent/x.json"], f"'/nonexistent/x.json' {NOWHERE}"),
        (["bench", "--json", "/"], "'/' cannot be written: Is a directory"),
        (["bench", "--unknown"], "unrecognized arguments: --unknown"),
        (["bench", "--shapes", "4096"], "'4096' is no shape: rows x hidden size, such as 1x4096"),
        (["bench", "--shapes", "0x64"], "'0x64' is no shape"),
        (["bench", "--peers", "nobody"], "invalid choice: 'nobody'"),
        (["bench", "--ops", "nothing"], "invalid choice: 'nothing' (choose from 'add_norm', "),
        (["compare", "--peers", "nobody"], "invalid choice: 'nobody'"),
        pytest.param(["bench", "--device", "cuda"], "device cuda is not here: torch", marks=NO_GPU),
        pytest.param(["compare", "--device", "cuda"], "device cuda is not here: torch", marks=NO_GPU),
        pytest.param(["bench", "--backends", "cuda"], "backend cuda cannot be used here: torch", marks=NO_GPU),
        pytest.param(["check", "--backend", "cuda"], "backend cuda cannot be used here: torch", marks=NO_GPU),
    ],
)
def test_commands_refuse_in_a_sentence(called, monkeypatch, capsys, arguments, message):
    """Before anything is measured."""
    monkeypatch.setattr(bench, "Bench", None)
    monkeypatch.setattr(compare, "report", None)
    assert called(*arguments) == 2
    assert message in capsys.readouterr().err


def test_files_are_tried_and_left_alone(monkeypatch, tmp_path):
    file = tmp_path / "found.json"
    assert cli.writable(str(file)) == str(file)
    assert not file.exists()
    file.write_text("mine")
    cli.writable(str(file))
    assert file.read_text() == "mine"


def test_an_order_that_cannot_be_kept_is_a_sentence(run):
    done = run("bench", "--peers", "--shapes", "1x64", FUSEDNORM_BACKEND="nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("python -m fusednorm bench: FUSEDNORM_BACKEND names the backend 'nonsense'")


def test_an_interrupt_ends_with_130(called, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.doctor, "report", interrupted)
    assert called("doctor", "--json") == 130
    assert capsys.readouterr().err == "interrupted: there is nothing to show yet\n"


def test_an_interrupted_kit_ends_by_itself(called, monkeypatch):
    """pytest gets the interrupt too, prints its summary, and is waited for."""
    waits = [KeyboardInterrupt, KeyboardInterrupt, 2]

    class Running:
        def __init__(self, command):
            assert command[-2:] == ["-k", "golden"]

        __enter__, __exit__ = (lambda self: self), (lambda self, *_: None)

        def wait(self):
            if isinstance(now := waits.pop(0), int):
                return now
            raise now

    monkeypatch.setattr(commands.subprocess, "Popen", Running)
    assert called("conformance", "--backend", "cpu", "-k", "golden") == 130
    assert waits == []


@pytest.mark.skipif(os.name == "nt", reason="takes pipes of POSIX")
@pytest.mark.parametrize("arguments", [["--json"], ["doctor"]])
def test_a_reader_that_leaves_is_no_fault(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "fusednorm", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["bench", "--help"], ["bnch"], ["bench", "--no-such"]]
)
def test_questions_about_the_commands_need_no_torch(arguments):
    """Its import takes seconds."""
    found = python("-X", "importtime", "-m", "fusednorm", *arguments)
    assert re.search(r"\| +torch$", found.stderr, re.M) is None
    assert found.returncode == (0 if arguments[-1] in ("--help", "--version") else 2), found.stderr
    assert "fusednorm" in found.stdout or "error: " in found.stderr


def test_a_program_that_imports_fusednorm_keeps_its_arguments():
    assert printed_by("import fusednorm, sys; print(sys.argv[1:])", "--help") == "['--help']\n"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_prewarm_times_no_compiler_where_there_is_none(called, capsys, backend):
    assert called("prewarm", "--backend", backend, "--dtypes", "float32", "--hidden-sizes", "64", "128") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{backend}: float32, rows of {size}: has nothing to compile" for size in (64, 128)
    ]


def test_names_on_the_command_line_are_those_that_are_measured():
    assert tuple(workloads.OPERATIONS) == cli.OPERATIONS
    assert (*workloads.OPERATIONS, *workloads.GRADIENTS) == cli.OPS
    assert tuple(peers.PEERS) == cli.PEERS


def test_a_report_has_results_and_nothing_of_the_user(tmp_path, monkeypatch, called):
    monkeypatch.setattr(check, "HIDDEN_SIZES", (896,))
    assert called("check", "--backend", "cpu", "--report", tmp_path / "report.json") == 0
    text = (tmp_path / "report.json").read_text()
    found = json.loads(text)
    assert {case["backend"] for case in found["cases"]} == {"cpu"}
    assert all(count == 0 for case in found["cases"] for count in case["differing"].values())
    assert {"torch", "processor", "system", "fusednorm"} <= set(found)
    assert "release" not in found
    for private in (socket.gethostname(), str(Path.home()), str(tmp_path), os.getcwd()):
        assert private not in text


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, called, capsys):
    assert called("check", "--report", tmp_path / "none" / "file") == 2
    assert "--report" in capsys.readouterr().err
