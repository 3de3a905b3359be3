"""No kernel reads or writes a byte beyond an operand: there are pages without rights, which would end the process."""

import signal
import sys
from pathlib import Path

import processes
import pytest

from fusednorm.backends import cpu

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="memory is protected through POSIX's mprotect")


def python(*arguments):
    return processes.python(*arguments, cwd=HERE)


@pytest.mark.parametrize("isa", cpu.variants())
def test_every_operand_between_guard_pages(isa):
    """Every third of the calls that the program knows; ``tox -e sanitizers`` makes them all."""
    command = ("guard_pages.py", "--isa", isa, "--every", "3")
    done = python(*command)
    if done.returncode:
        culprit = python(*command, "--verbose")
        pytest.fail(f"status {done.returncode} at {culprit.stdout.splitlines()[-1:]}\n{culprit.stderr}", pytrace=False)
    assert int(done.stdout.split()[0]) > 20_000


@pytest.mark.parametrize("name", ["x", "out", "rstd", "h", "dx", "dweight"])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("isa", cpu.variants())
def test_one_element_beyond_is_noticed(isa, at_end, name):
    """What the test above relies on: an operand that is one element off ends the process."""
    call = "backward" if name in ("h", "dx", "dweight") else "forward"
    types = {"forward": ["bfloat16"] * 4, "backward": ["bfloat16"] * 5 + ["none"]}[call]
    between = {"forward": "0, 0.0, False", "backward": "0.0"}[call]
    code = f"""if True:
    import sys
    sys.path.insert(0, ".")
    import guard_pages
    extension = guard_pages.load()
    extension.lib.fn_use_isa(guard_pages.isas(extension.lib, extension.ffi.string)[{isa!r}])
    calls = guard_pages.Calls(extension, guard_pages.Guarded, 1 << 16)
    make = lambda: calls.{call}({types}, *{[True] if call == "backward" else []}, 3, 45, 0, {between}, {at_end})
    make()
    print("whole", flush=True)
    place = calls.memory[{name!r}].place
    size = {4 if name == "rstd" else 2}
    calls.memory[{name!r}].place = lambda *where: place(*where) + (size if {at_end} else -size)
    make()
    """
    done = python("-c", code)
    assert done.stdout == "whole\n", done.stderr
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
