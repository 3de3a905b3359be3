"""Short runs of the fuzzers, with another seed each time; the programs print how to repeat what they find."""

import random
import re
import sys
from pathlib import Path

import pytest
from processes import python
from public_api import operators

HERE = Path(__file__).parents[1]


@pytest.mark.skipif(sys.platform == "win32", reason="operands lie between pages guarded by mprotect")
def test_two_seconds():
    done = python(HERE / "fuzz.py", "--minutes", "0.034")
    print(done.stdout)  # the seed, and the inputs tried
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("calls returned", "calls refused", "gradients returned"):
        assert int(re.search(rf"(\d+) {kind}", done.stdout)[1]) > 0, kind


def test_two_thousand_calls_of_operators():
    """Operands of every wrong kind, as torch.ops.fusednorm may be given them; each operator takes some calls only."""
    seed = str(random.SystemRandom().randrange(2**31))
    done = python("-W", "ignore", HERE / "fuzz_operators.py", "--calls", "2000", "--seed", seed)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    raised, returned = map(int, re.search(r"2000 calls: (\d+) raised, (\d+) returned", done.stdout).groups())
    assert min(raised, returned) > 120
    of_each = re.findall(r"^(\w+): (\d+) raised, (\d+) returned$", done.stdout, flags=re.M)
    assert {name for name, *counts in of_each if "0" not in counts} == set(operators())
