"""The matrix: every backend that can be used here, in every mode, taken from the registry."""

import os
import re
import subprocess
import sys
import types
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


def interpret_where_there_is_no_driver():
    """Tests of a Triton backend run in Triton's interpreter, on the CPU's memory, unless its device is here."""
    wanted = os.environ.get("FUSEDNORM_BACKEND")
    if wanted in ("triton", "triton_cpu") and "TRITON_INTERPRET" not in os.environ:
        code = "from triton.runtime.driver import driver; print(driver.active.get_current_target().backend)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        if not found or (found == "cpu") != (wanted == "triton_cpu"):
            os.environ["TRITON_INTERPRET"] = "1"


interpret_where_there_is_no_driver()  # now: Triton and fusednorm look when they are imported

import fusednorm
from fusednorm import quick, registry
from fusednorm.backends import cuda, triton_host

sys.path.insert(0, str(Path(__file__).parent))  # oracle, cases: helpers beside the tests

import cases
from cases import differing

#: The compute capability of the GPU that tests/emulation/cuda stands in for.
EMULATED = int(os.environ.get("FUSEDNORM_EMULATED_SM", "0"))
if EMULATED:
    from cuda_emulation import bindings

    bindings.install(cuda, quick, torch, EMULATED)
    cases.BETWEEN_ELEMENTS = False


def quicken_the_interpreter():
    """Has Triton's interpreter patch its language once per launch and module, and not at every call within a kernel.

    Most of its time goes there. Triton 3.9's way of doing it is assumed: with another the tests are merely slow.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        scope = types.SimpleNamespace(restore=lambda: None) if id(function.__globals__) in patched else patch(function)
        patched.add(id(function.__globals__))
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


if triton_host.INTERPRETED and not triton_host.missing():
    quicken_the_interpreter()


@dataclass(frozen=True)
class Mode:
    """A backend, and one of its variants where it has any (for `cpu`, an instruction set)."""

    backend: str
    variant: str | None = None

    def __str__(self):
        return self.backend if self.variant is None else f"{self.backend}-{self.variant}"

    @property
    def interpreted(self):
        """Whether Triton's interpreter runs it."""
        return triton_host.INTERPRETED and self.backend.startswith("triton")

    @property
    def device(self):
        """Where the backend's operands are: the CPU if it takes those, else the first of its devices that is here."""
        devices = registry.load(self.backend).DEVICES
        if {"cpu", "any"} & set(devices):
            return "cpu"
        return next(device for device in devices if torch.get_device_module(device).is_available())

    @property
    def emulated(self):
        """Whether the CPU stands in for a GPU."""
        return self.backend == "cuda" and EMULATED > 0

    @property
    def on_gpu(self):
        """Whether its kernels run on a GPU, be it emulated."""
        return self.device != "cpu" or self.emulated

    @contextmanager
    def active(self):
        with ExitStack() as stack:
            stack.enter_context(fusednorm.use_backend(self.backend))
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            if self.variant is not None:
                stack.enter_context(registry.load(self.backend).use_variant(self.variant))
            yield


def modes():
    """All modes of the available backends; of those that FUSEDNORM_BACKEND names, if it is set."""
    available = {info.name: info for info in fusednorm.backends()}
    wanted = [name.strip() for name in os.environ.get("FUSEDNORM_BACKEND", "").split(",") if name.strip()]
    for name in wanted:
        if not available[name].available:  # a test run that skips what it was started for would be green for nothing
            raise pytest.UsageError(f"FUSEDNORM_BACKEND asks for {available[name]}")
    found = []
    for name in wanted or [name for name, info in available.items() if info.available]:
        variants = getattr(registry.load(name), "variants", lambda: (None,))()
        found += [Mode(name, variant) for variant in variants]
    return found


COMPARISONS = Counter()


@pytest.fixture(params=modes(), ids=str)
def mode(request):
    """One mode, in force while the test runs."""
    with request.param.active():
        yield request.param


@pytest.fixture
def agree(mode):
    """Asserts that two tensors have the same bits (NaN is NaN, +0 is -0), and counts it for the summary."""

    def agree(actual, expected, what):
        COMPARISONS[str(mode)] += 1
        actual = actual.cpu()
        assert actual.dtype == expected.dtype, what
        assert actual.shape == expected.shape, what
        if torch.equal(actual, expected):
            return
        differ = differing(actual, expected)
        if differ.any():
            at = differ.nonzero()[0].tolist()
            pytest.fail(
                f"{what}: {int(differ.sum())} of {differ.numel()} differ, the first at {at}: "
                f"{actual[tuple(at)].item()!r} instead of {expected[tuple(at)].item()!r}",
                pytrace=False,
            )

    return agree


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="leave out nothing, however long it takes")
    parser.addoption("--modes", help="fail unless the matrix has exactly these modes, with commas between")


def pytest_configure(config):
    """Where a processor is emulated, a kernel that is not found must not go unnoticed."""
    expected, found = config.getoption("--modes"), ",".join(map(str, modes()))
    if expected not in (None, found):
        raise pytest.UsageError(f"--modes asks for {expected}, and this machine has {found}")


#: What would take too long where a whole test run is for one backend that has no device here: in Triton's interpreter
#: too many rows, or too long ones; of the emulated GPU too many kernels, each of which takes a third of a second to
#: compile. `--everything` leaves out nothing. First what all three leave out: most mixes of dtypes, and most sizes.
MOST = (
    r"test_(dtypes|gradients|fused_equals_unfused)\[\w+-(?!bfloat16-float32|float32-float16|float64-bfloat16)|"
    r"test_mixed_dtypes\[\w+-(?!bfloat16-float32|float32-none|float16-bfloat16)|"
    r"test_sizes\[\w+-(?!(1|8|33|64|128|768|1024|1025|1029|2048|4097|5120|7168|18432|40999|262144)\])|"
    r"number_of_threads|"
)
LEFT_OUT = {
    "cuda": MOST + r"test_rows_beyond_the_cache",
    "triton": MOST + r"test_a_hundred|test_large_gradients|several_long_rows.*-9000",
    "triton_cpu": MOST
    + r"test_one_rule|test_rows|-\d{4,}\]|test_gradients|test_a_hundred|test_layouts|test_row_counts|"
    r"test_every_rounding|-(large|tiny|outliers|zeros)\]|test_large_gradients|formula|test_any_call",
}


def pytest_collection_modifyitems(config, items):
    left_out = LEFT_OUT.get(os.environ.get("FUSEDNORM_BACKEND")) if triton_host.INTERPRETED or EMULATED else None
    if left_out and not config.getoption("--everything"):
        chosen = [item for item in items if not re.search(left_out, item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_report_header():
    return "fusednorm: modes " + ", ".join(map(str, modes()))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # this is a worker of pytest-xdist
        session.config.workeroutput["comparisons"] = dict(COMPARISONS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    COMPARISONS.update(getattr(node, "workeroutput", {}).get("comparisons", {}))


def pytest_terminal_summary(terminalreporter):
    for name, count in sorted(COMPARISONS.items()):
        terminalreporter.write_line(f"{name}: {count} comparisons, bit for bit")
