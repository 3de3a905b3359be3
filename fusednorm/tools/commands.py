"""Runs the commands that ``cli.py`` reads."""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable

import torch
from rich.console import Console

import fusednorm
from fusednorm.calls import devices, process
from fusednorm.engine import choose
from fusednorm.tools import check, console, doctor
from fusednorm.tools.agree import difference
from fusednorm.tools.cli import DTYPES, INTERRUPTED, OPS, UNUSABLE, UnusableError
from fusednorm.tools.measure import bench, compare, workloads
from fusednorm.tools.measure.bench import WrongBitsError

#: The backends whose calls compile no kernel.
COMPILED_BEFORE = ("cpu", "reference")


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, others: list[str]) -> int:
    """Runs a command; returns the exit status. ``others``: the arguments for pytest."""
    try:
        _resolve(arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        status = _run(arguments, others)
        sys.stdout.flush()
    except (UnusableError, process.BackendError) as error:
        print(f"{parser.prog} {arguments.command or 'doctor'}: {error}", file=sys.stderr)
        return UNUSABLE
    except WrongBitsError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the command has no results yet
        print("interrupted: there is nothing to show yet", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(arguments: argparse.Namespace, others: list[str]) -> int:
    screen = console.console()
    match arguments.command:
        case "conformance":
            return conformance(arguments.backend, others)
        case "prewarm":
            return prewarm(arguments, screen)
        case "difference":
            return difference.run(arguments, screen)
        case "check":
            if arguments.report is not None:
                _can_be_written(arguments.report)
            return check.check(screen, arguments.backend, arguments.all, arguments.report)
        case "compare":
            with process.waiting_for_kernels():
                return compare.run(arguments, screen)
        case "bench":
            if arguments.threads is not None:
                if arguments.device.type != "cpu":
                    raise UnusableError(f"--threads is for CPUs: leave it out with --device {arguments.device}")
                torch.set_num_threads(arguments.threads)
            with process.waiting_for_kernels():
                _runs_on(arguments.backends or (), arguments.device)
                return bench.run(arguments, screen)
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return doctor.status(findings)
    return doctor.show(screen)


def operations() -> list[str]:
    """The names of all that ``bench`` times; those that the command line shows come first."""
    return list(dict.fromkeys((*OPS, *workloads.every_measured())))


def _resolve(arguments: argparse.Namespace) -> None:
    """Has names of a device and of backends read, of which the parser knows nothing."""
    if hasattr(arguments, "device"):
        arguments.device = devices.present(arguments.device)
    if arguments.command in ("check", "prewarm") and arguments.backend is not None:
        arguments.backend = _backends(arguments.backend)
    if arguments.command == "bench" and arguments.backends is not None:
        arguments.backends = list(itertools.chain(*map(_backends, arguments.backends)))


def _backends(text: str) -> list[str]:
    """Reads names of backends, which this machine must be able to use."""
    try:
        names = choose.parse(text, "the option")
    except process.BackendError as error:
        raise ValueError(str(error)) from None
    infos = {info.name: info for info in fusednorm.backends()}
    for name in names:
        if not infos[name].available:
            reasons = "; ".join(infos[name].reasons)
            raise ValueError(f"backend {name} cannot be used here: {reasons}")
    return names


def _can_be_written(path: str) -> None:
    """Raises if a file cannot be written, before minutes go by."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UnusableError(f"--report {path} cannot be written ({error.strerror}): name another file") from None


def _runs_on(names: Iterable[str], device: torch.device) -> None:
    """Raises if a backend does not run on the device."""
    for name in names:
        runs_on = choose.load(name).DEVICES
        if not {device.type, "any"} & set(runs_on):
            raise UnusableError(f"backend {name} runs on {' and '.join(runs_on)}, not on --device {device}")


def prewarm(arguments: argparse.Namespace, screen: Console) -> int:
    """Compiles ahead, and prints the time of each kind of call."""
    names = arguments.backend
    _runs_on(names or (), arguments.device)
    with fusednorm.use_backend(names) if names else contextlib.nullcontext():
        for dtype, hidden_size in itertools.product(arguments.dtypes or DTYPES, arguments.hidden_sizes):
            kind = getattr(torch, dtype)
            begin = time.perf_counter()
            more = {"training": arguments.training, "norm_before_add": arguments.norm_before_add}
            fusednorm.prewarm(hidden_size, kind, arguments.device, **more)
            seconds = time.perf_counter() - begin
            row = torch.empty(1, hidden_size, dtype=kind, device=arguments.device)
            with process.waiting_for_kernels():
                backend = fusednorm.explain(row, row, row[0]).backend
            took = "has nothing to compile" if backend in COMPILED_BEFORE else f"{seconds:.2f} s"
            screen.print(f"{backend}: {dtype}, rows of {hidden_size}: {took}", markup=False)
    return 0


def conformance(backend: str, others: list[str]) -> int:
    """Runs the kit in its own process, because Triton's interpreter must be chosen before Triton is imported."""
    if missing := [name for name in ("hypothesis", "numpy", "pytest") if importlib.util.find_spec(name) is None]:
        raise UnusableError(
            f"the kit needs {', '.join(missing)}: pip install {' '.join(missing)}, or '.[conformance]' in the checkout"
        )
    options = ["-p", "fusednorm.conformance.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "-q", "-rs"]
    kit = ["--pyargs", "fusednorm.conformance", "--backend", backend]
    interrupted = False
    with subprocess.Popen([sys.executable, "-P", "-m", "pytest", *options, *kit, *others]) as running:
        while True:
            try:
                status = running.wait()
            except KeyboardInterrupt:  # pytest was interrupted too: it prints its summary and ends
                interrupted = True
            else:
                return INTERRUPTED if interrupted else status
