"""The example of reinforcement learning, in one step."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "rl_promise.py"


def test_one_contract_and_each_sides_own(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    command = [sys.executable, "-P", SCRIPT, "--steps", "1", "--json", tmp_path / "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| mean difference in step | 1 |" in done.stdout
    one, own = json.loads((tmp_path / "json").read_text()).values()
    for step in one:
        assert len(set(step["digests"])) == 1
        same = "norms", "rotations", "gates", "matrix products", "log-probabilities of the same logits", "norm"
        for kind in same:
            assert step["steps"][f"{kind}: rows"] > 0
            assert step["steps"][f"{kind}: differ"] == 0
        assert step["logprobs_mean_difference"] < 0.1  # else it is another model
    for step in own:
        assert len(set(step["digests"])) == 2
        for kind in ("norms", "rotations", "log-probabilities of the same logits", "norm"):
            assert step["steps"][f"{kind}: differ"] > 0
        assert step["steps"]["gates: differ"] == 0
