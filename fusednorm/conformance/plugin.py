"""The plug-in of pytest that runs the kit: backends and their variants, comparisons of bits, and the certificate.

``pytest --pyargs fusednorm.conformance`` loads it when it collects, which is too late for options: with ``-p
fusednorm.conformance.plugin`` there are some. (A plug-in that every run of pytest loads could take none called
``--backend``, and would import torch for each.)
"""

import functools
import json
import os
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fusednorm
from fusednorm.backends import NAMES
from fusednorm.calls import process
from fusednorm.conformance import cases
from fusednorm.conformance.cases import DTYPES, bits, differing, dtype_name, reproducer
from fusednorm.engine import choose

#: The compute capability of the GPU that the CPU stands in for, in the repository's tests of a GPU backend.
EMULATED = int(os.environ.get("FUSEDNORM_EMULATED_SM", "0"))

#: The promises of the kit, in the certificate's words. Tests carry one of them: @pytest.mark.promise("same bits").
PROMISES = ("same bits", "golden vectors", "fused equals unfused", "a row is a row", "same gradients")

#: The meaning of the mark of that name, which fusednorm's own tests heed where kernels take too long. The kit does not.
LEFT_OUT = (
    "not run in fusednorm's own checks where the CPU executes the PTX of `cuda` or of Triton (triton_ptx), or where "
    "Triton's interpreter runs its backends (triton, triton_cpu); all if none is named. Of parameters, those that are "
    "named run all the same (but), or are alone left out (of)"
)


def pytest_addoption(parser):
    group = parser.getgroup("fusednorm")
    group.addoption("--backend", help="backends to test, with commas between; default: FUSEDNORM_BACKEND, or all")
    group.addoption("--everything", action="store_true", help="make every call of each product, which may take hours")
    group.addoption("--certificate", type=Path, metavar="FILE", help="write the certificate as JSON")
    group.addoption("--modes", help="fail unless backends and variants are exactly these, with commas between")


def pytest_configure(config):
    config.addinivalue_line("markers", "promise(name): which promise of the specification a test is about")
    config.addinivalue_line("markers", f"left_out(*where, but, of): {LEFT_OUT}")
    config.addinivalue_line("markers", "large: takes gigabytes of memory or of address space, or millions of elements")
    cases.EVERYTHING = config.getoption("--everything", False)
    config.pluginmanager.register(Certificate(config), "fusednorm certificate")
    # Where a processor is emulated, a kernel that is not found must not go unnoticed.
    expected, found = config.getoption("--modes", None), ",".join(map(str, modes(config)))
    if expected not in (None, found):
        raise pytest.UsageError(f"--modes asks for {expected}, and this machine has {found}")


def wanted(config):
    """The backends that were asked for; none where all are to be tested."""
    asked = config.getoption("--backend", None) or os.environ.get("FUSEDNORM_BACKEND", "")
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return [choose.known_as(name) or name for name in names]


def interpreted():
    """Whether Triton's interpreter is on."""
    from fusednorm.backends.triton import host as triton_host

    return triton_host.INTERPRETED and not triton_host.missing()


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
        return self.backend.startswith("triton") and interpreted()

    @property
    def device(self):
        """The device of the backend's operands: the CPU if it takes those, else the first of its devices here."""
        devices = choose.load(self.backend).DEVICES
        if {"cpu", "any"} & set(devices):
            return "cpu"
        return next(device for device in devices if torch.get_device_module(device).is_available())

    @property
    def flushes_with_caller(self):
        """Whether its arithmetic is torch's or NumPy's, which follow ``torch.set_flush_denormal``."""
        return self.interpreted or getattr(choose.load(self.backend), "FLUSHES_WITH_CALLER", False)

    @property
    def emulated(self):
        """Whether the CPU stands in for a GPU."""
        return self.backend in ("cuda", "triton") and EMULATED > 0

    @property
    def on_gpu(self):
        """Whether its kernels are those of a GPU, be it emulated, or Triton's interpreter in its place."""
        return self.device != "cpu" or self.backend in ("cuda", "triton")

    @contextmanager
    def active(self):
        with ExitStack() as stack:
            stack.enter_context(fusednorm.use_backend(self.backend))
            stack.enter_context(process.waiting_for_kernels())
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            if self.variant is not None:
                stack.enter_context(choose.load(self.backend).use_variant(self.variant))
            yield


@functools.cache
def modes(config):
    """All modes of the available backends; of those that were asked for, if any were."""
    available = {info.name: info for info in fusednorm.backends()}
    asked = wanted(config)
    for name in asked:
        if name not in available:
            raise pytest.UsageError(f"there is no backend {name!r}; there are {', '.join(available)}")
        if not available[name].available:  # a test run that skips what it was started for would be green for nothing
            raise pytest.UsageError(f"backend {name} cannot be used here: {'; '.join(available[name].reasons)}")
    found = []
    for name in asked or [name for name, info in available.items() if info.available]:
        variants = getattr(choose.load(name), "variants", lambda: (None,))()
        found += [Mode(name, variant) for variant in variants]
    return found


def pytest_generate_tests(metafunc):
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", modes(metafunc.config), ids=str, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A backend that is not fusednorm's own may refuse calls: what it does not take, it need not get right."""
    try:
        return (yield)
    except fusednorm.BackendError as error:
        mode = getattr(item, "callspec", None) and item.callspec.params.get("mode")
        if mode is None or mode.backend in NAMES:
            raise
        pytest.skip(f"refused: {str(error).splitlines()[:2][-1].strip()}")


@pytest.fixture
def mode(request):
    """One mode, in force while the test runs."""
    cases.BETWEEN_ELEMENTS = not request.param.on_gpu
    cases.VALUES_ALONE = request.param.emulated or request.param.interpreted
    with request.param.active():
        yield request.param


@pytest.fixture
def agree(mode, request):
    """Asserts that two tensors have the same bits (NaN is NaN, +0 is -0), and counts it for the certificate.

    Several tensors are compared one by one. An array is the oracle's, of numbers that the tensor's dtype has.
    Where a Case is given, a failure prints a script that shows it: ``output`` as in :func:`cases.reproducer`.
    """
    counts = Counter()

    def agree(actual, expected, what, case=None, output=None):
        if not isinstance(actual, torch.Tensor):
            for at, pair in enumerate(zip(actual, expected, strict=True)):
                agree(*pair, f"{what}, {at}")
            return
        expected = expected if isinstance(expected, torch.Tensor) else torch.from_numpy(expected).to(actual.dtype)
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        assert actual.dtype == expected.dtype, what
        assert actual.shape == expected.shape, what
        counts[dtype_name(actual.dtype)] += 1
        if torch.equal(actual, expected):
            return
        differ = differing(actual, expected)
        if differ.any():
            at = tuple(differ.nonzero()[0].tolist())
            message = (
                f"{what}: {int(differ.sum())} of {differ.numel()} differ, the first at {list(at)}: "
                f"{actual[at].item()!r} ({bits(actual[at])}) instead of {expected[at].item()!r} ({bits(expected[at])})"
            )
            script = "" if case is None else reproducer(case, str(mode), output, at)
            failure = {"dtype": dtype_name(actual.dtype), "message": f"{mode}: {message}", "script": script}
            request.node.user_properties.append(("difference", failure))
            pytest.fail(f"{message}\n\n{script}" if script else message, pytrace=False)

    yield agree
    request.node.user_properties.append(("comparisons", [str(mode), dict(counts)]))


@pytest.fixture
def threads():
    """Sets torch's number of threads, for the test only."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    for item in items:
        if marker := item.get_closest_marker("promise"):
            item.user_properties.append(("promise", marker.args[0]))


def pytest_report_header(config):
    return "fusednorm: " + ", ".join(map(str, modes(config)))


class Certificate:
    """The promises that the tests of a run have shown, for which dtypes."""

    def __init__(self, config):
        self.config = config
        self.comparisons, self.differences, self.failed, self.by_mode = Counter(), Counter(), Counter(), Counter()
        self.skipped, self.first = 0, None

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        promise = properties.get("promise")
        self.skipped += report.skipped and promise is not None
        if report.failed and promise is not None:
            self.failed[promise] += 1
        if report.when == "call" and "difference" in properties:
            self.differences[promise, properties["difference"]["dtype"]] += 1
            self.first = self.first or properties["difference"]
        if report.when == "teardown" and "comparisons" in properties:
            mode, counts = properties["comparisons"]
            for dtype, count in counts.items():
                self.comparisons[promise, dtype] += count
                self.by_mode[mode] += count

    def verdict(self, promise, dtype):
        """The verdict of one promise for one dtype."""
        if self.differences[promise, dtype]:
            return "FAILS"
        return "holds" if self.comparisons[promise, dtype] else "-"

    def as_dict(self):
        """For ``--certificate``."""
        dtypes = list(map(dtype_name, DTYPES))
        return {
            "backends": [str(mode) for mode in modes(self.config)],
            "interpreted": interpreted(),
            "spec_version": fusednorm.SPEC_VERSION,
            "fusednorm": fusednorm.__version__,
            "torch": torch.__version__,
            "promises": {
                promise: {
                    **{dtype: self.verdict(promise, dtype) for dtype in dtypes},
                    "comparisons": sum(self.comparisons[promise, dtype] for dtype in dtypes),
                    "failed_tests": self.failed[promise],
                }
                for promise in PROMISES
            },
            "skipped_tests": self.skipped,
            "first_difference": self.first,
        }

    def pytest_terminal_summary(self, terminalreporter):
        found = self.as_dict()
        if path := self.config.getoption("--certificate", None):
            path.write_text(json.dumps(found, indent=1) + "\n")
        if self.by_mode:
            self._show(found, terminalreporter)

    def _show(self, found, terminal):
        how = ", in Triton's interpreter" if found["interpreted"] else ", emulated" if EMULATED else ""
        terminal.section(f"fusednorm: specification {found['spec_version']}, {', '.join(found['backends'])}{how}")
        columns = [dtype_name(dtype) for dtype in DTYPES]
        terminal.write_line(f"{'':20}" + "".join(f"{column:>9}" for column in columns) + f"{'comparisons':>12}")
        for promise, row in found["promises"].items():
            verdicts = "".join(f"{row[column]:>9}" for column in columns)
            failed = f" {row['failed_tests']} failed" if row["failed_tests"] else ""
            terminal.write_line(f"{promise:20}{verdicts}{row['comparisons']:>12}{failed}")
        for mode, count in sorted(self.by_mode.items()):
            terminal.write_line(f"{mode}: {count} comparisons, bit for bit")
        tested = [promise for promise, row in found["promises"].items() if row["comparisons"]]
        if len(tested) < len(PROMISES):
            terminal.write_line(f"partial: {len(tested)} of {len(PROMISES)} promises tested: {', '.join(tested)}")
        if self.skipped:
            terminal.write_line(f"{self.skipped} tests were skipped: their reasons are below")
        if self.first:
            terminal.write_line("")
            terminal.write_line(f"The first difference: {self.first['message']}")
            terminal.write_line(self.first["script"])
