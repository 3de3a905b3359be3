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
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import fusednorm
from fusednorm import compare, devices, difference, doctor, proof, registry
from fusednorm.bench import cells, plots, train
from fusednorm.bench.cells import WrongBitsError
from fusednorm.measured import OPERATIONS, OPS
from fusednorm.peers import PEERS

#: Exit statuses: the user interrupted the command; its arguments cannot be used, or nothing was measured.
INTERRUPTED, UNUSABLE = 130, 2

#: The measurements of `bench --quick`.
QUICK = {"dtypes": ("bfloat16",), "ops": ("add_norm",), "shapes": ("1x4096", "32x4096", "2048x4096")}


class UnusableError(Exception):
    """The command cannot do what its arguments say; the user reads the message."""


def command_line() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        # Not "__main__.py".
        prog="fusednorm" if Path(sys.argv[0]).stem == "fusednorm" else "python -m fusednorm",
        description="Shows and tests fusednorm on this machine. Without a command it runs doctor.",
    )
    version = f"fusednorm {fusednorm.__version__}, specification {fusednorm.SPEC_VERSION}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--json", action="store_true", help="doctor: print the findings as JSON")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")

    def command(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=more)

    findings = command("doctor", "show the backends of this machine, and which of them calls take")
    findings.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the findings as JSON")
    proved = command(
        "check",
        "compare every backend with the reference, bit for bit, at LLM shapes",
        "It takes under a minute, on a GPU longer while kernels are compiled. The exit status is 1 if any bit differs.",
    )
    proved.add_argument(
        "--backend", type=_backends, metavar="NAME", help="check only this backend, or several with commas between"
    )
    proved.add_argument("--all", action="store_true", help="print a line for each shape, with its time")
    ahead = command(
        "prewarm",
        "compile the kernels of later calls, for instance into the cache folder of a container image",
        "The kernels are stored in FUSEDNORM_CACHE_DIR for cuda, in TRITON_CACHE_DIR for Triton's backends.",
    )
    ahead.add_argument(
        "--backend", type=_backends, metavar="NAME", help="compile for this backend (default: the one that calls take)"
    )
    ahead.add_argument(
        "--hidden-sizes", nargs="+", type=_count, default=[4096], metavar="N", help="elements of a row (default: 4096)"
    )
    ahead.add_argument(
        "--dtypes",
        nargs="+",
        choices=compare.DTYPES,
        default=list(compare.DTYPES),
        metavar="DTYPE",
        help=f"dtypes of x, the residual and the weight: {', '.join(compare.DTYPES)} (default: all)",
    )
    ahead.add_argument("--device", type=_device, default="cpu", help="the tensors' device (default: cpu)")
    ahead.add_argument("--training", action="store_true", help="compile for gradients too")
    ahead.add_argument(
        "--norm-before-add", action="store_true", help="compile rms_norm_add and rms_norm_add_rms_norm too"
    )
    kit = command(
        "conformance",
        "test one backend, of fusednorm or of another package, against the specification, and print a certificate",
        "pytest gets all other arguments: -n 2, -k gradients, --certificate FILE, --everything.",
    )
    kit.add_argument("--backend", required=True, metavar="NAME", help="the backend's name, as in FUSEDNORM_BACKEND")
    beside = command(
        "compare",
        "measure the errors of every implementation on this machine in ulp, and whether its bits stay the same",
        "The exit status is 1 if fusednorm itself fails or its bits change; other implementations do not matter.",
    )
    _common(beside, PEERS, PEERS, compare.DTYPES)
    beside.add_argument(
        "--hidden-size", type=_count, default=4096, metavar="N", help="elements of a row (default 4096)"
    )
    beside.add_argument(
        "--op",
        choices=OPERATIONS,
        default="add_norm",
        metavar="OP",
        help=f"measure this operation: {', '.join(OPERATIONS)} (default: add_norm)",
    )
    speed = command(
        "bench",
        "compare fusednorm's bits, then time fusednorm, a copy, and every other implementation on this machine",
        "With --json FILE the same command continues an interrupted run.",
    )
    others_timed = [name for name in PEERS if name != "fusednorm"]
    _common(speed, others_timed, [name for name in others_timed if name not in cells.SLOW_PEERS], cells.DTYPES)
    speed.add_argument("--quick", action="store_true", help="three shapes in bfloat16, forward only: about a minute")
    speed.add_argument(
        "--backends",
        nargs="+",
        type=_backends,
        metavar="NAME",
        help="time these backends of fusednorm (default: the one that a call takes)",
    )
    speed.add_argument(
        "--ops",
        nargs="+",
        choices=OPS,
        metavar="OP",
        help=f"time these operations: {', '.join(OPS)} (default: add_norm and backward)",
    )
    speed.add_argument("--shapes", nargs="+", type=_shape, metavar="MxN", help="rows x hidden size, such as 1x4096")
    speed.add_argument(
        "--threads", type=_count, metavar="N", help="torch's number of threads, on a CPU (default: as torch chooses)"
    )
    speed.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="start no further shape after M minutes; with --train: time steps for M minutes (default 1)",
    )
    speed.add_argument("--train", action="store_true", help="time training a mixture of experts with each norm")
    speed.add_argument(
        "--size", choices=train.SIZES, help="number of parameters of the model of --train (default 60M, on a CPU 4M)"
    )
    runs = command(
        "difference",
        "compare two runs of a model step by step: the share of equal bits",
        "The exit status is 1 if any bit differs.",
    )
    difference.add_options(runs)
    return parser


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = command_line()
    arguments, others = parser.parse_known_args()
    if others and arguments.command != "conformance":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.json and arguments.command not in (None, "doctor"):
        parser.error(f"--json goes after the command: {arguments.command} --json FILE")
    try:
        status = _run(arguments, others)
        sys.stdout.flush()
    except (UnusableError, difference.UnreadableError, registry.BackendError) as error:
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
        with registry.waiting_for_kernels():
            if arguments.command == "compare":
                return comparison(arguments)
            return training(arguments) if arguments.train else bench(arguments)
    if arguments.command == "difference":
        return difference.run(arguments, doctor.console())
    if arguments.command == "check":
        return proof.check(doctor.console(), arguments.backend, arguments.all)
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return doctor.status(findings)
    return doctor.show(doctor.console())


def _common(
    parser: argparse.ArgumentParser, peers: Iterable[str], by_default: Iterable[str], dtypes: Sequence[str]
) -> None:
    """Adds the options that compare and bench share."""
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(peers),
        default=list(by_default),
        metavar="NAME",
        help="measure these implementations: none or some of "
        f"{', '.join(peers)} (default: {'all' if by_default is peers else ', '.join(by_default)})",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=dtypes,
        metavar="DTYPE",
        help=f"measure only these dtypes: {', '.join(dtypes)} (default: all)",
    )
    parser.add_argument(
        "--device", type=_device, default="cpu", help="compute on this device, as torch names it (default: cpu)"
    )
    parser.add_argument("--wide", action="store_true", help="print every figure, in tables of up to 150 columns")
    parser.add_argument("--json", dest="json_file", type=_file, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw them to FILE.png, FILE.svg or FILE.pdf")


def _shape(text: str) -> tuple[int, int]:
    """Rows and hidden size, from "1x4096"."""
    rows, _, hidden_size = text.partition("x")
    if not (rows.isdecimal() and hidden_size.isdecimal() and int(rows) and int(hidden_size)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: rows x hidden size, such as 1x4096")
    return int(rows), int(hidden_size)


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes, such as 5 or 0.5")
    return minutes


def _device(text: str) -> torch.device:
    try:
        return devices.present(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _backends(text: str) -> list[str]:
    """Reads names of backends, which this machine must be able to use."""
    try:
        names = registry.parse(text, "the option")
    except registry.BackendError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    infos = {info.name: info for info in fusednorm.backends()}
    for name in names:
        if not infos[name].available:
            reasons = "; ".join(infos[name].reasons)
            raise argparse.ArgumentTypeError(f"backend {name} cannot be used here: {reasons}")
    return names


def _file(text: str) -> str:
    """Checks that a file can be written, without changing it."""
    path = Path(text)
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return text


def _picture(text: str) -> str:
    """Checks that a picture can be drawn to a file."""
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("it needs matplotlib: pip install matplotlib, or '.[plot]' in the checkout")
    return _file(text)


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
            with registry.waiting_for_kernels():
                backend = fusednorm.explain(row, row, row[0]).backend
            say(f"{backend}: {dtype}, rows of {hidden_size}: {seconds:.2f} s")
    return 0


def comparison(arguments: argparse.Namespace) -> int:
    """Compares, prints, writes. Returns 1 if fusednorm itself failed, or if its bits changed."""
    console = doctor.console()
    with console.status("") as status:
        found = compare.report(
            arguments.peers,
            arguments.dtypes or compare.DTYPES,
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
    backends = None if arguments.backends is None else list(itertools.chain(*arguments.backends))
    _set_threads(arguments)
    _runs_on(backends or (), arguments.device)
    by_default = {
        "dtypes": cells.DTYPES,
        "ops": ("add_norm", "backward"),
        "shapes": cells.CPU_SHAPES if on_cpu else cells.GPU_SHAPES,
    }
    by_default |= QUICK if arguments.quick else {}
    shapes = arguments.shapes or map(_shape, by_default["shapes"])
    console = doctor.console()
    measurement = cells.Bench(arguments.device, backends, arguments.peers)
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
