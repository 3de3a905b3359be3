"""``python -m fusednorm``: what it finds, and that its proof can fail."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import fusednorm
from fusednorm import doctor, registry
from fusednorm.backends import reference


def run(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_")}
    command = [sys.executable, "-P", "-m", "fusednorm", *arguments]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True)


def printed(command, **console):
    text = io.StringIO()
    status = command(Console(file=text, width=140, **console))
    return status, text.getvalue()


@pytest.fixture
def one_shape(monkeypatch):
    """The check at a single shape and dtype, and without waiting for good times."""
    monkeypatch.setattr(doctor, "HIDDEN_SIZES", (896,))
    monkeypatch.setattr(doctor, "ROWS", (16,))
    monkeypatch.setattr(doctor, "DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(doctor, "SECONDS_PER_CASE", 0)


def test_report_as_json():
    done = run("--json", FUSEDNORM_BACKEND="reference")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["fusednorm"] == fusednorm.__version__
    assert found["torch"] == torch.__version__
    assert found["environment"] == {"FUSEDNORM_BACKEND": "reference"}
    assert [b["name"] for b in found["backends"]] == [info.name for info in fusednorm.backends()]
    assert found["devices"][0]["backend"] == "reference"
    assert found["instruction_set"] == found["instruction_sets"][-1]


def test_report_for_a_person():
    done = run()
    assert done.returncode == 0
    for part in ("specification 1", torch.__version__, "available", "cuda", "cpu takes cpu: C kernels for"):
        assert part in done.stdout
    assert "\x1b" not in done.stdout  # no colours in a pipe


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FUSEDNORM_BACKEND", "nonsense", "'nonsense', which does not exist"),
        ("FUSEDNORM_BACKEND", "cuda", "it runs on cuda tensors, and these are on cpu"),
        ("FUSEDNORM_CPU_ISA", "sse9", "FUSEDNORM_CPU_ISA is 'sse9'"),
        ("FUSEDNORM_CPU_ISA", "[red]", "FUSEDNORM_CPU_ISA is '[red]'"),
    ],
)
def test_unusable_settings_are_findings(variable, value, message):
    for arguments in ((), ("--json",)):
        done = run(*arguments, **{variable: value})
        assert done.returncode == 1
        assert message in done.stdout
        assert value in done.stdout
        assert done.stderr == ""


def test_check(one_shape):
    status, text = printed(doctor.check)
    assert status == 0
    subjects = doctor.subjects()
    assert [s.backend for s in subjects] == ["cpu"] * (len(subjects) - 1) + ["reference"]
    assert text.count("exact") == len(subjects) + 1
    assert f"all {len(subjects)} cases are exact" in text
    assert "GB/s" in text


def test_check_shows_progress_on_a_terminal_only(one_shape):
    assert "━━" in printed(doctor.check, force_terminal=True)[1].replace("┏", "").split("backend")[0]
    assert "━━" not in printed(doctor.check)[1].splitlines()[0].strip("┏┓━┳")


def test_check_finds_one_wrong_bit(one_shape, monkeypatch):
    class OffByOneBit:
        DEVICES = ("cpu",)
        backward = staticmethod(reference.backward)

        def unavailable(self):
            return []

        def unsuitable(self, signature):
            return []

        def plan(self, signature):
            return "wrong"

        def forward(self, x, residual, weight, out, *rest):
            reference.forward(x, residual, weight, out, *rest)
            out.view(torch.int16)[-1, -1] ^= 1

    monkeypatch.setattr(registry, "_registered", {"off_by_one_bit": OffByOneBit()})
    monkeypatch.setattr(registry, "_chosen", {})
    status, text = printed(doctor.check)
    assert status == 1
    (line,) = (line for line in text.splitlines() if "off_by_one_bit" in line)
    assert "1 differ" in line
    assert f"1 of {len(doctor.subjects())} cases differ" in text
