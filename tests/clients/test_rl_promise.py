"""The example of reinforcement learning, in a few steps."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "rl_promise.py"


def test_rows_and_norms(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    command = [sys.executable, "-P", SCRIPT, "--steps", "2", "--json", tmp_path / "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| mean difference in step | 1 | 2 |" in done.stdout
    ours, torchs = json.loads((tmp_path / "json").read_text()).values()
    for step in ours:
        for norm in step["norms"]:
            assert norm["rows"] > 0
            assert norm["rows_differ"] == norm["elements_differ"] == 0
            assert norm["seen_by_both_outputs_equal"] == norm["seen_by_both"] > 0
        # The first norm's rows are embeddings.
        assert step["norms"][0]["seen_by_both"] == step["norms"][0]["rows"]
        assert step["logprobs_mean_difference"] < 0.1  # else it is another model
    assert all(norm["elements_differ"] > 0 for step in torchs for norm in step["norms"])
