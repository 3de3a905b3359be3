"""``python -m fusednorm``: the doctor. ``check``: the proof. ``conformance``: the proof of one backend, at length.

``compare``: other implementations beside it. ``bench``: how fast they all are.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import torch

from fusednorm import compare, doctor
from fusednorm.bench import cells, plots, train
from fusednorm.bench.cells import WrongBitsError
from fusednorm.peers import PEERS


def command_line() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(prog="python -m fusednorm", description="What fusednorm finds on this machine.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("check", help="compare every backend with the reference, bit for bit, at LLM shapes")
    kit = commands.add_parser(
        "conformance",
        help="hold one backend, of fusednorm or of others, against the specification, and print a certificate",
        epilog="Everything else goes to pytest: -n 2, -k gradients, --certificate FILE, --everything.",
    )
    kit.add_argument("--backend", required=True, help="its name, as in FUSEDNORM_BACKEND")
    beside = commands.add_parser(
        "compare",
        help="measure the errors of every implementation on this machine in ulp, and whether its bits stay the same",
        epilog="The exit status is 1 if fusednorm itself fails or returns other bits; peers do not count.",
    )
    _which(beside, PEERS, PEERS, compare.DTYPES)
    beside.add_argument("--hidden-size", type=int, default=4096, metavar="N", help="elements of a row (default 4096)")
    speed = commands.add_parser(
        "bench",
        help="time fusednorm beside a copy and every implementation on this machine, after its bits were compared",
        epilog="With --json a run that was interrupted goes on where it stopped: give the same command again.",
    )
    others_timed = [name for name in PEERS if name != "fusednorm"]
    _which(speed, others_timed, [name for name in others_timed if name not in cells.SLOW_PEERS], cells.DTYPES)
    speed.add_argument("--backends", nargs="+", metavar="NAME", help="of fusednorm; by default what a call takes")
    speed.add_argument(
        "--ops",
        nargs="+",
        choices=cells.OPS,
        default=("add_norm", "backward"),
        metavar="OP",
        help=f"of {', '.join(cells.OPS)}",
    )
    speed.add_argument("--shapes", nargs="+", type=_shape, metavar="MxN", help="rows x hidden size, such as 1x4096")
    speed.add_argument("--threads", type=int, metavar="N", help="of torch, on a CPU; by default as many as it takes")
    speed.add_argument(
        "--minutes", type=float, help="begin no further shape after so many; how long --train times steps (default 1)"
    )
    speed.add_argument("--train", action="store_true", help="train a small mixture of experts with each norm instead")
    speed.add_argument("--size", choices=train.SIZES, help="of that model, in parameters (default 60M, on a CPU 4M)")
    return parser


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = command_line()
    arguments, others = parser.parse_known_args()
    if arguments.command == "conformance":
        return conformance(arguments.backend, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.command == "compare":
        if arguments.hidden_size < 1:
            parser.error(f"--hidden-size is {arguments.hidden_size}, it must be at least 1")
        return comparison(arguments)
    if arguments.command == "bench":
        return training(arguments) if arguments.train else bench(arguments)
    if arguments.command == "check":
        return doctor.check(doctor.console())
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return int("error" in findings or any("error" in choice for choice in findings.get("devices", ())))
    return doctor.show(doctor.console())


def _which(
    parser: argparse.ArgumentParser, peers: Iterable[str], by_default: Iterable[str], dtypes: Sequence[str]
) -> None:
    """The options that compare and bench have in common."""
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(peers),
        default=list(by_default),
        metavar="NAME",
        help=f"of {', '.join(peers)}; by default {'all' if by_default is peers else ', '.join(by_default)}",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=dtypes,
        default=dtypes,
        metavar="DTYPE",
        help=f"only these; by default all: {', '.join(dtypes)}",
    )
    parser.add_argument(
        "--device", type=torch.device, default="cpu", help="where to compute, as torch names it (default cpu)"
    )
    parser.add_argument("--json", dest="json_file", metavar="FILE", help="write everything that was found")
    parser.add_argument("--plot", metavar="FILE", help="draw it, to FILE.png or FILE.svg; needs fusednorm[plot]")


def _shape(text: str) -> tuple[int, int]:
    """Rows and hidden size, of "1x4096"."""
    rows, _, hidden_size = text.partition("x")
    if not (rows.isdecimal() and hidden_size.isdecimal() and int(rows) and int(hidden_size)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: rows x hidden size, such as 1x4096")
    return int(rows), int(hidden_size)


def _can_plot(path: str | None) -> bool:
    """Whether there is nothing to draw, or something to draw it with; else says so."""
    if path and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'fusednorm[plot]'", file=sys.stderr)
        return False
    return True


def comparison(arguments: argparse.Namespace) -> int:
    """Compares, prints, writes; 1 if fusednorm itself failed, or if its bits changed."""
    if not _can_plot(arguments.plot):
        return 2
    console = doctor.console()
    with console.status("") as status:
        found = compare.report(
            arguments.peers, arguments.dtypes, arguments.hidden_size, arguments.device, starting=status.update
        )
    compare.show(found, console)
    if arguments.json_file:
        with open(arguments.json_file, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, default=dataclasses.asdict)
    if not found["findings"]:
        print("nothing was measured: none of the peers that --peers names is here", file=sys.stderr)
        return 2
    if arguments.plot:
        compare.plot(found, arguments.plot)
    return int(any(finding.name == "fusednorm" and not finding.constant for finding in found["findings"]))


def bench(arguments: argparse.Namespace) -> int:
    """Times, prints, writes; 1 if fusednorm's bits were not the reference's: then nothing is timed any more."""
    on_cpu = arguments.device.type == "cpu"
    if not _can_plot(arguments.plot):
        return 2
    if arguments.threads and on_cpu:
        torch.set_num_threads(arguments.threads)
    console = doctor.console()
    measurement = cells.Bench(arguments.device, arguments.backends, arguments.peers)
    try:
        results = cells.Results(measurement.machine(), arguments.json_file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    threads = torch.get_num_threads() if on_cpu else None
    shapes = arguments.shapes or [_shape(text) for text in (cells.CPU_SHAPES if on_cpu else cells.GPU_SHAPES)]
    wanted = [
        cells.Cell(op, dtype, rows, hidden_size, threads)
        for op, dtype, (rows, hidden_size) in itertools.product(arguments.ops, arguments.dtypes, shapes)
    ]
    todo = [cell for cell in wanted if cell not in results]
    if len(todo) < len(wanted):
        console.print(f"{len(wanted) - len(todo)} of {len(wanted)} were measured before", highlight=False)
    stop = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    left_out = 0
    with doctor.progress(console) as progress:
        task = progress.add_task("a large copy", total=len(todo))
        results.found["copy_bandwidth"] = results.found["copy_bandwidth"] or measurement.copy_bandwidth()
        for cell in todo:
            if time.monotonic() > stop:
                left_out += 1
                continue
            progress.update(task, description=str(cell))
            try:
                results.add(cell, measurement.measure(cell))
            except WrongBitsError as error:
                print(error, file=sys.stderr)
                return 1
            except torch.OutOfMemoryError:
                progress.console.print(f"{cell}: does not fit the memory", highlight=False)
            progress.advance(task)
    if not results.found["cells"]:
        print("nothing was measured", file=sys.stderr)
        return 2
    cells.show(results.found, console)
    for name, reason in measurement.missing.items():
        console.print(f"{name}: not measured: {reason}", highlight=False, markup=False)
    if left_out:
        again = "the same command goes on" if arguments.json_file else "with --json FILE the next run would go on"
        console.print(f"{left_out} of {len(wanted)} were left out: the minutes are over; {again}", highlight=False)
    if arguments.plot:
        plots.plot(results.found, arguments.plot)
    return 0


def training(arguments: argparse.Namespace) -> int:
    """Trains, prints, writes; 1 if two runs with fusednorm had other losses."""
    if arguments.plot:
        print("--train draws nothing: leave out --plot", file=sys.stderr)
        return 2
    on_cpu = arguments.device.type == "cpu"
    if arguments.threads and on_cpu:
        torch.set_num_threads(arguments.threads)
    console = doctor.console()
    with doctor.progress(console) as progress:
        task = progress.add_task("training", total=1.0)
        try:
            found = train.train(
                train.SIZES[arguments.size or ("4M" if on_cpu else "60M")],
                arguments.device,
                arguments.minutes or 1.0,
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
    """Runs the kit in a process of its own: Triton's interpreter must be chosen before anything imports Triton."""
    if missing := [name for name in ("hypothesis", "numpy", "pytest") if importlib.util.find_spec(name) is None]:
        print(f"the kit needs {', '.join(missing)}: pip install 'fusednorm[conformance]'", file=sys.stderr)
        return 2
    options = ["-p", "fusednorm.conformance.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "-q", "-rs"]
    kit = ["--pyargs", "fusednorm.conformance", "--backend", backend]
    return subprocess.call([sys.executable, "-P", "-m", "pytest", *options, *kit, *others])


if __name__ == "__main__":
    sys.exit(main())
