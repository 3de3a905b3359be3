"""A short run of the fuzzer, with another seed each time; the program prints how to repeat what it finds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz.py"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="operands lie between pages guarded by mprotect")


def test_twenty_seconds():
    done = subprocess.run([sys.executable, "-P", FUZZ, "--minutes", "0.33"], capture_output=True, text=True)
    print(done.stdout)  # the seed, and the inputs tried
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("calls returned", "calls refused", "gradients returned"):
        assert int(re.search(rf"(\d+) {kind}", done.stdout)[1]) > 0, kind
