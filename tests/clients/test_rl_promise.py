"""The example that counts equal log-probabilities of an engine and a trainer, with fusednorm and without."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "rl_promise.py"


def test_log_probabilities_are_equal(tmp_path, monkeypatch, eagerly):
    """Of each token of prompts and of answers, alone and in batches, with gradients; and of none without fusednorm."""
    for name, value in eagerly.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-P", SCRIPT, "--only", "all", "without fusednorm", "--json", tmp_path / "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 100.0%, 0.0e+00 | " in done.stdout
    found = json.loads((tmp_path / "json").read_text())
    assert len(set(found["all"]["digests"])) == 1
    for kind, ways in ((kind, found[kind]["ways"]) for kind in found):
        assert len(ways) == 5
        for way in ways.values():
            assert way["tokens"] > 300
            assert way["equal"] == way["tokens"] if kind == "all" else way["equal"] < way["tokens"] / 2
            assert way["mean"] < 0.1  # else it is another model
