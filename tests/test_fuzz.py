"""Short runs of the fuzzers, with another seed each time; the programs print how to repeat what they find."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(sys.platform == "win32", reason="operands lie between pages guarded by mprotect")
def test_twenty_seconds():
    command = [sys.executable, "-P", HERE / "fuzz.py", "--minutes", "0.33"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)  # the seed, and the inputs tried
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("calls returned", "calls refused", "gradients returned"):
        assert int(re.search(rf"(\d+) {kind}", done.stdout)[1]) > 0, kind


def test_fifteen_thousand_calls_of_operators():
    """About a minute: operands of every wrong kind, as torch.ops.fusednorm may be given them."""
    seed = str(random.SystemRandom().randrange(2**31))
    command = [sys.executable, "-P", "-W", "ignore", HERE / "fuzz_operators.py", "--calls", "15000", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    raised, returned = map(int, re.search(r"15000 calls: (\d+) raised, (\d+) returned", done.stdout).groups())
    assert min(raised, returned) > 1000
