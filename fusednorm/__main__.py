"""The commands: ``fusednorm``, or ``python -m fusednorm``.

``doctor`` shows the backends of this machine. ``check`` compares them with the reference, ``conformance`` tests one
thoroughly. ``compare`` measures the errors of all implementations, ``bench`` their time. ``prewarm`` compiles ahead.
``difference`` compares two runs of a model.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable

import torch

import fusednorm
from fusednorm.calls import devices, process
from fusednorm.engine import registry
from fusednorm.tools import check, cli, doctor
from fusednorm.tools.agree import difference
from fusednorm.tools.measure import cells, compare, plots, train
from fusednorm.tools.measure.cells import WrongBitsError

#: Exit statuses: the user interrupted the command; its arguments cannot be used, or nothing was measured.
INTERRUPTED, UNUSABLE = 130, 2

#: The measurements of `bench --quick`.
QUICK = {"dtypes": ("bfloat16",), "ops": ("add_norm",), "shapes": ("1x4096", "32x4096", "2048x4096")}


class UnusableError(Exception):
    """The command cannot do what its arguments say; the user reads the message."""


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser, arguments, others = cli.parsed()
    try:
        _resolve(arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        status = _run(arguments, others)
        sys.stdout.flush()
    except (UnusableError, difference.UnreadableError, process.BackendError) as error:
        message = f"{parser.prog} {arguments.command or 'doctor'}: {error}"
        print(message, file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:  # the command has no results yet
        print("interrupted: there is nothing to show yet", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(arguments: argparse.Namespace, others: list[str]) -> int:
    if arguments.command == "conformance":
        return conformance(arguments.backend, others)
    if arguments.command == "prewarm":
        return prewarm(arguments)
    if arguments.command in ("compare", "bench"):
        with process.waiting_for_kernels():
            if arguments.command == "compare":
                return comparison(arguments)
            return training(arguments) if arguments.train else bench(arguments)
    if arguments.command == "difference":
        return difference.run(arguments, doctor.console())
    if arguments.command == "check":
        return check.check(doctor.console(), arguments.backend, arguments.all)
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return doctor.status(findings)
    return doctor.show(doctor.console())


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
        names = registry.parse(text, "the option")
    except process.BackendError as error:
        raise ValueError(str(error)) from None
    infos = {info.name: info for info in fusednorm.backends()}
    for name in names:
        if not infos[name].available:
            reasons = "; ".join(infos[name].reasons)
            raise ValueError(f"backend {name} cannot be used here: {reasons}")
    return names


def prewarm(arguments: argparse.Namespace) -> int:
    """Compiles ahead, and prints the time of each kernel."""
    names = arguments.backend
    _runs_on(names or (), arguments.device)
    say = functools.partial(doctor.console().print, highlight=False, markup=False)
    with fusednorm.use_backend(names) if names else contextlib.nullcontext():
        for dtype, hidden_size in itertools.product(arguments.dtypes, arguments.hidden_sizes):
            kind = getattr(torch, dtype)
            begin = time.perf_counter()
            more = {"training": arguments.training, "norm_before_add": arguments.norm_before_add}
            fusednorm.prewarm(hidden_size, kind, arguments.device, **more)
            seconds = time.perf_counter() - begin
            row = torch.empty(1, hidden_size, dtype=kind, device=arguments.device)
            with process.waiting_for_kernels():
                backend = fusednorm.explain(row, row, row[0]).backend
            say(f"{backend}: {dtype}, rows of {hidden_size}: {seconds:.2f} s")
    return 0


def comparison(arguments: argparse.Namespace) -> int:
    """Compares, prints, writes. Returns 1 if fusednorm itself failed, or if its bits changed."""
    console = doctor.console()
    with console.status("") as status:
        found = compare.report(
            arguments.peers,
            arguments.dtypes or cli.DTYPES,
            arguments.hidden_size,
            arguments.device,
            arguments.op,
            starting=status.update,
        )
    if not found["findings"] and not found["interrupted"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found["missing"].items())
        raise UnusableError(f"nothing was measured: none of the peers that --peers names is here: {reasons}")
    compare.show(found, console, arguments.wide)
    if arguments.json_file:
        with open(arguments.json_file, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, default=dataclasses.asdict)
    if arguments.plot and found["findings"]:
        compare.plot(found, arguments.plot)
    if any(finding.name == "fusednorm" and not finding.constant for finding in found["findings"]):
        return 1
    if found["interrupted"]:
        console.print("interrupted: `compare --peers NAME` measures fewer implementations", highlight=False)
        return INTERRUPTED
    return 0


def _set_threads(arguments: argparse.Namespace) -> None:
    if arguments.threads is not None:
        if arguments.device.type != "cpu":
            raise UnusableError(f"--threads is for CPUs: leave it out with --device {arguments.device}")
        torch.set_num_threads(arguments.threads)


def _runs_on(names: Iterable[str], device: torch.device) -> None:
    """Raises if a backend does not run on the device."""
    for name in names:
        runs_on = registry.load(name).DEVICES
        if not {device.type, "any"} & set(runs_on):
            raise UnusableError(f"backend {name} runs on {' and '.join(runs_on)}, not on --device {device}")


def bench(arguments: argparse.Namespace) -> int:
    """Times, prints, writes. Returns 1, without further times, if fusednorm's bits were not the reference's."""
    on_cpu = arguments.device.type == "cpu"
    _set_threads(arguments)
    _runs_on(arguments.backends or (), arguments.device)
    by_default = {
        "dtypes": cli.DTYPES,
        "ops": ("add_norm", "backward"),
        "shapes": cells.CPU_SHAPES if on_cpu else cells.GPU_SHAPES,
    }
    by_default |= QUICK if arguments.quick else {}
    shapes = arguments.shapes or map(cli.shape, by_default["shapes"])
    console = doctor.console()
    measurement = cells.Bench(arguments.device, arguments.backends, arguments.peers)
    try:
        results = cells.Results(measurement.machine(), arguments.json_file)
    except ValueError as error:
        raise UnusableError(str(error)) from None
    threads = torch.get_num_threads() if on_cpu else None
    wanted = [
        cells.Cell(op, dtype, rows, hidden_size, threads)
        for op, dtype, (rows, hidden_size) in itertools.product(
            arguments.ops or by_default["ops"], arguments.dtypes or by_default["dtypes"], shapes
        )
    ]
    say = functools.partial(console.print, highlight=False, markup=False)
    for cell in wanted:
        if not cell.possible:
            say(f"{cell}: not measured: its rows do not consist of whole groups")
    wanted = [cell for cell in wanted if cell.possible]
    todo = [cell for cell in wanted if cell not in results]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} were measured before")
    if todo:
        at_most = f", at most {arguments.minutes:g}" if arguments.minutes else ""
        minutes = max(1, round(measurement.minutes(len(todo))))
        say(f"{len(todo)} to measure: about {minutes} minute{'s' * (minutes > 1)}{at_most}")
    stop = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    measured = 0
    interrupted = False
    with doctor.progress(console) as progress:
        task = progress.add_task("a large copy", total=len(todo))
        try:
            results.found["copy_bandwidth"] = results.found["copy_bandwidth"] or measurement.copy_bandwidth()
            for cell in todo:
                if time.monotonic() > stop:
                    break

                def starting(doing: str, cell: cells.Cell = cell) -> None:
                    progress.update(task, description=f"{cell}: {doing}")

                try:
                    results.add(cell, measurement.measure(cell, starting))
                except WrongBitsError as error:
                    print(error, file=sys.stderr)
                    return 1
                except torch.OutOfMemoryError:
                    progress.console.print(f"{cell}: does not fit the memory", highlight=False)
                measured += 1
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    if results.found["cells"]:
        cells.show(results.found, console, arguments.wide)
    elif not interrupted:
        raise UnusableError("nothing was measured: no shape fitted the memory or the minutes")
    for name, reason in measurement.missing.items():
        say(f"{name}: not measured: {reason}")
    if measured < len(todo):
        why = "interrupted" if interrupted else "the minutes are over"
        again = "the same command continues" if arguments.json_file else "with --json FILE the next run would continue"
        say(f"{why}: {len(todo) - measured} of {len(wanted)} were left out; {again}")
    if arguments.plot and results.found["cells"]:
        plots.plot(results.found, arguments.plot)
    return INTERRUPTED if interrupted else 0


def training(arguments: argparse.Namespace) -> int:
    """Trains, prints, writes. Returns 1 if two runs with fusednorm had other losses."""
    if arguments.plot:
        raise UnusableError("--train draws nothing: leave out --plot")
    _set_threads(arguments)
    on_cpu = arguments.device.type == "cpu"
    minutes = arguments.minutes or 1.0
    console = doctor.console()
    console.print(f"steps are timed for {minutes:g} minutes, after a few untimed ones", highlight=False)
    with doctor.progress(console) as progress:
        task = progress.add_task("training", total=1.0)
        try:
            found = train.train(
                train.SIZES[arguments.size or ("4M" if on_cpu else "60M")],
                arguments.device,
                minutes,
                trained=lambda over: progress.update(task, completed=over),
            )
        except WrongBitsError as error:
            print(error, file=sys.stderr)
            return 1
    train.show(found, console)
    if arguments.json_file:
        with open(arguments.json_file, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
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


if __name__ == "__main__":
    sys.exit(main())
