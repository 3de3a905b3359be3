"""Short runs of the fuzzers, with another seed each time; the programs print how to repeat what they find."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from public_api import operators

HERE = Path(__file__).parents[1]


@pytest.mark.skipif(sys.platform == "win32", reason="operands lie between pages guarded by mprotect")
def test_two_seconds():
    command = [sys.executable, "-P", HERE / "fuzz.py", "--minutes", "0.034"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)  # the seed, and the inputs tried
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("calls returned", "calls refused", "gradients returned"):
        assert int(re.search(rf"(\d+) {kind}", done.stdout)[1]) > 0, kind


def test_two_thousand_calls_of_operators():
    """Operands of every wrong kind, as torch.ops.fusednorm may be given them; each operator takes some calls only."""
    seed = str(random.SystemRandom().randrange(2**31))
    command = [sys.executable, "-P", "-W", "ignore", HERE / "fuzz_operators.py", "--calls", "2000", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    raised, returned = map(int, re.search(r"2000 calls: (\d+) raised, (\d+) returned", done.stdout).groups())
    assert min(raised, returned) > 120
    of_each = re.findall(r"^(\w+): (\d+) raised, (\d+) returned$", done.stdout, flags=re.M)
    assert {name for name, *counts in of_each if "0" not in counts} == set(operators())
