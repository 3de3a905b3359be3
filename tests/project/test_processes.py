"""Programs in processes that are forked end as those do for which Python was started."""

import os
import signal
import subprocess

import pytest
from processes import printed_by, python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")


@pytest.mark.parametrize(
    ("code", "status", "stdout", "stderr"),
    [
        ("import sys; print(sys.argv, __name__, 'torch' in sys.modules)", 0, "['-c', 'a'] __main__ True\n", ""),
        ("import os; print(os.environ['FUSEDNORM_BACKEND'], end='')", 0, "reference", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("import atexit; atexit.register(print, 'end')", 0, "end\n", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "", ""),
        ("import threading, time; threading.Timer(0.1, print, ['late']).start()", 0, "late\n", ""),
    ],
)
def test_a_forked_program(code, status, stdout, stderr):
    done = python("-c", code, "a", env=os.environ | {"FUSEDNORM_BACKEND": "reference"})
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


def test_an_error_is_printed():
    done = python("-c", "import fusednorm; fusednorm.no_such_name")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'fusednorm' has no attribute 'no_such_name'"


def test_a_file_and_a_module(tmp_path):
    (tmp_path / "here.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")
    assert python(tmp_path / "here.py", 1).stdout.startswith("__main__ ['1'] ")
    found = python("-m", "here", "b", env=os.environ | {"PYTHONPATH": str(tmp_path)}).stdout
    assert found == f"__main__ ['b'] {tmp_path}\n"


def test_what_torch_reads_takes_a_fresh_process():
    code = "import sys; print('torch' in sys.modules, sys.flags.safe_path)"
    assert printed_by(code) == "True True\n"
    assert printed_by(code, OMP_NUM_THREADS="7") == printed_by(code, fresh=True) == "False True\n"
    assert python("-W", "error", "-c", code).stdout == "False True\n"


def test_a_program_that_hangs_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        python("-c", "import time; time.sleep(60)", timeout=0.5)


def test_a_program_that_is_killed_does_not_hang():
    done = python("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
