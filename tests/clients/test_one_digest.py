"""The example that prints one digest of a model's logits: it is the same on any processor."""

import subprocess
import sys
from pathlib import Path

import pytest

from fusednorm.backends import cpu

pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "one_digest.py"

#: Of products and attention by fusednorm, and with int8; an emulated AArch64 has them too (docs/real_model.md).
LINEAR, INT8 = "4cf401cb759e", "44956306c185"


def test_each_way_and_processor_has_the_digest():
    """Whole, in chunks, token by token and in a padded batch, by the plainest and the best instruction set."""
    some = {cpu.variants()[0], cpu.variants()[-1]}
    command = [sys.executable, "-P", SCRIPT, "--tokens", "4", "--threads", "2", "--isa", *some]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| all", *(f"| {one}" for one in some)))]
    assert len(lines) == len(some) + 1
    assert all(line.endswith(f" | {LINEAR} | {INT8} |") for line in lines), done.stdout
