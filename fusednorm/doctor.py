"""What this machine has, and whether it keeps the contract: ``python -m fusednorm [check]``."""

from __future__ import annotations

import io
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import fusednorm
from fusednorm import environment, registry

#: Hidden sizes of Qwen2-0.5B, Llama-3.2-1B, Llama-3-8B, Llama-2-13B and Llama-3-70B.
HIDDEN_SIZES = (896, 2048, 4096, 5120, 8192)
ROWS = (1, 16, 512)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: A case is repeated for about so many seconds, and the median call is reported.
SECONDS_PER_CASE = 0.02


def _processor() -> str:
    """The processor's name as the system gives it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    """The version that is installed; None if the package is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    """The devices of this machine that torch can use, the CPU first."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        assert current is not None
        devices += [torch.device(current.type, i) for i in range(torch.accelerator.device_count())]
    return devices


def device_name(device: torch.device) -> str:
    """A GPU's name, or "cpu"."""
    name: str = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return name


def measured_on(found: dict[str, Any]) -> str:
    """The GPU, or the processor, that figures are of: findings that have "processor" and "device"."""
    name: str = found["processor"] if found["device"] == "cpu" else found["device"]
    return name


def of_threads(count: int | None) -> str:
    """What follows a name: ", 2 threads"; nothing where there are none."""
    return "" if count is None else f", {count} thread{'s' * (count > 1)}"


def _choice(device: torch.device) -> dict[str, Any]:
    """What a bfloat16 call on the device takes."""
    operand = torch.empty(1, 4096, dtype=torch.bfloat16, device=device)
    try:
        explanation = fusednorm.explain(operand, operand, operand[0])
    except fusednorm.BackendError as error:
        return {"device": str(device), "error": str(error)}
    return {
        "device": str(device),
        "backend": explanation.backend,
        "plan": explanation.plan,
        "passed_over": explanation.passed_over,
    }


def report() -> dict[str, Any]:
    """The findings, as plain data; ``python -m fusednorm --json`` prints them.

    A variable with an unusable value is a finding too: its error stands where the backend would.
    """
    findings: dict[str, Any] = {
        "fusednorm": fusednorm.__version__,
        "spec": fusednorm.SPEC_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cffi": _version("cffi"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FUSEDNORM_")},
    }
    try:
        findings["backends"] = [vars(info) for info in fusednorm.backends()]
        findings["devices"] = [_choice(device) for device in _devices()]
        from fusednorm.backends import cpu, cuda

        findings["cache"] = cuda.cache()
        if not cpu.unavailable():
            findings["instruction_sets"] = list(cpu.variants())
            findings["instruction_set"] = cpu.variant()
            findings["openmp"] = cpu.openmp() or None
    except fusednorm.BackendError as error:
        findings["error"] = str(error)
    return findings


def show(console: Console) -> int:
    """Prints the findings for a person. Returns the exit status: 1 if calls would raise."""
    found = report()
    console.print(f"[bold]fusednorm {found['fusednorm']}[/], specification {found['spec']}", highlight=False)
    facts = Table.grid(padding=(0, 2))
    for name in ("python", "torch", "triton", "cffi", "system", "processor", "threads"):
        facts.add_row(name, "not installed" if found[name] is None else escape(str(found[name])))
    if "instruction_set" in found:
        sets = [f"{name} (in use)" if name == found["instruction_set"] else name for name in found["instruction_sets"]]
        facts.add_row("instruction sets", ", ".join(sets))
        facts.add_row("OpenMP", found["openmp"] or "none found: calls run on one thread")
    if "cache" in found:
        kernels = "{problem}" if found["cache"]["problem"] else "{kernels} compiled ones in {folder}"
        facts.add_row("CUDA kernels", escape(kernels.format(**found["cache"])))
    for name, value in found["environment"].items():
        facts.add_row(
            name, escape(value) + ("" if name in environment.VARIABLES else " [yellow](nothing reads this variable)[/]")
        )
    console.print(facts, highlight=False)

    if "backends" in found:
        table = Table("backend", "devices", "state", title="Backends", title_justify="left")
        for info in found["backends"]:
            state = "[green]available[/]"
            if not info["available"]:
                state = "[yellow]not available[/]: " + escape("; ".join(info["reasons"]))
            table.add_row(info["name"], ", ".join(info["devices"]), state)
        console.print(table, highlight=False)
    failed = "error" in found
    for choice in found.get("devices", ()):
        if "error" in choice:
            failed = True
            console.print(f"[red]{choice['device']}: {escape(choice['error'])}[/]", highlight=False)
        else:
            console.print(
                f"{choice['device']} takes [bold]{choice['backend']}[/]: {escape(choice['plan'])}", highlight=False
            )
    if "error" in found:
        console.print(f"[red]{escape(found['error'])}[/]", highlight=False)
    if not failed:
        console.print("`python -m fusednorm check` compares every backend with the reference.", highlight=False)
    return int(failed)


class Subject(NamedTuple):
    """A backend on a device, and one of its variants if it has any."""

    backend: str
    variant: str | None
    device: torch.device

    def __str__(self) -> str:
        return self.backend if self.variant is None else f"{self.backend} {self.variant}"


class Result(NamedTuple):
    """One line of the check."""

    subject: Subject
    dtype: torch.dtype
    rows: int
    hidden_size: int
    differing: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """x and the residual read, the sum and the result written, the weight read once."""
        elements = 4 * self.rows * self.hidden_size + self.hidden_size
        return elements * self.dtype.itemsize / self.seconds / 1e9


def subjects() -> list[Subject]:
    """Everything that the check compares on this machine: each backend, on each device it takes, in each variant."""
    found = []
    for device in _devices():
        for info in fusednorm.backends():
            if info.available and (device.type in info.devices or "any" in info.devices):
                for variant in getattr(registry.load(info.name), "variants", lambda: (None,))():
                    found.append(Subject(info.name, variant, device))
    return found


def _expected(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    """y and the sum by the reference on the CPU, five rows at a time.

    In small batches, because the reference is checked too: its own answer must not depend on them.
    """
    with fusednorm.use_backend("reference"):
        batches = [slice(begin, begin + 5) for begin in range(0, len(x), 5)]
        parts = [fusednorm.fused_add_rms_norm(x[batch], residual[batch], weight) for batch in batches]
    return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, warmed up by the one that was checked."""
    times: list[float] = []
    stop = time.perf_counter() + SECONDS_PER_CASE
    while len(times) < 3 or (time.perf_counter() < stop and len(times) < 1000):
        begin = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def count_differing(actual: Tensor, expected: Tensor) -> int:
    """How many elements differ in bits; NaN equals NaN, and +0 equals -0."""
    return int((~((actual == expected) | (actual.isnan() & expected.isnan()))).sum())


def _result(subject: Subject, operands: list[Tensor], expected: list[Tensor]) -> Result:
    """Runs one case on one subject; the operands are on the CPU."""
    x, residual, weight = (t.to(subject.device) for t in operands)
    outputs = y, total = torch.empty_like(x), torch.empty_like(x)

    def call() -> object:
        return fusednorm.fused_add_rms_norm(x, residual, weight, out=y, residual_out=total)

    with ExitStack() as stack:
        stack.enter_context(fusednorm.use_backend(subject.backend))
        if subject.variant is not None:
            backend: Any = registry.load(subject.backend)
            stack.enter_context(backend.use_variant(subject.variant))
        call()
        differing = sum(count_differing(actual.cpu(), wanted) for actual, wanted in zip(outputs, expected, strict=True))
        seconds = _median_seconds(call, subject.device)
    return Result(subject, x.dtype, x.shape[0], x.shape[1], differing, seconds)


def results(which: list[Subject]) -> Iterator[Result]:
    """Runs the check, case by case."""
    generator = torch.Generator().manual_seed(0)
    for dtype, hidden_size, rows in itertools.product(DTYPES, HIDDEN_SIZES, ROWS):
        shapes = ((rows, hidden_size), (rows, hidden_size), (hidden_size,))
        operands = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        expected = _expected(*operands)
        for subject in which:
            yield _result(subject, operands, expected)


def check(console: Console) -> int:
    """Compares every backend with the reference and prints a table. Returns the exit status: 1 on any difference."""
    which = subjects()
    table = Table("backend", "device", "dtype", "rows", "hidden size", "bits", "time", "GB/s")
    for column in (3, 4, 6, 7):
        table.columns[column].justify = "right"
    done = []
    with progress(console) as bar:
        task = bar.add_task("checking", total=len(which) * len(DTYPES) * len(HIDDEN_SIZES) * len(ROWS))
        for result in results(which):
            bar.update(task, advance=1, description=str(result.subject))
            done.append(result)
    for result in sorted(done, key=lambda r: which.index(r.subject)):
        table.add_row(
            str(result.subject),
            str(result.subject.device),
            str(result.dtype)[6:],
            str(result.rows),
            str(result.hidden_size),
            "[green]exact[/]" if not result.differing else f"[red]{result.differing} differ[/]",
            f"{result.seconds * 1e6:.1f} us",
            f"{result.gigabytes_per_second:.2f}",
        )
    console.print(table, highlight=False)
    failures = sum(result.differing > 0 for result in done)
    if failures:
        console.print(f"[red]{failures} of {len(done)} cases differ from the reference[/]", highlight=False)
    else:
        console.print(f"[green]all {len(done)} cases are exact[/]", highlight=False)
    return int(failures > 0)


def progress(console: Console) -> Progress:
    """A bar with the time that is left, gone when all is done; nothing where the output is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def console() -> Console:
    """Where the doctor prints: as wide as its tables where the output is no terminal that wraps.

    What the output's encoding lacks is printed by its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console() if sys.stdout.isatty() else Console(width=150)
