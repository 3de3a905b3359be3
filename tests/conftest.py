"""The matrix: every backend that can be used here, in every mode, taken from the registry."""

import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fusednorm
from fusednorm import registry

sys.path.insert(0, str(Path(__file__).parent))  # oracle, cases: helpers beside the tests

from cases import differing


@dataclass(frozen=True)
class Mode:
    """A backend, and one of its variants where it has any (for `cpu`, an instruction set)."""

    backend: str
    variant: str | None = None

    def __str__(self):
        return self.backend if self.variant is None else f"{self.backend}-{self.variant}"

    @contextmanager
    def active(self):
        with ExitStack() as stack:
            stack.enter_context(fusednorm.use_backend(self.backend))
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
    parser.addoption("--modes", help="fail unless the matrix has exactly these modes, with commas between")


def pytest_configure(config):
    """Where a processor is emulated, a kernel that is not found must not go unnoticed."""
    expected, found = config.getoption("--modes"), ",".join(map(str, modes()))
    if expected not in (None, found):
        raise pytest.UsageError(f"--modes asks for {expected}, and this machine has {found}")


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
