"""``python -m fusednorm``: the doctor. ``check``: the proof. ``conformance``: the proof of one backend, at length.

``compare``: other implementations beside it.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

from fusednorm import compare, doctor
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
    beside.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        metavar="NAME",
        help=f"only these; by default all: {', '.join(PEERS)}",
    )
    beside.add_argument(
        "--dtypes",
        nargs="+",
        choices=compare.DTYPES,
        default=compare.DTYPES,
        metavar="DTYPE",
        help=f"only these; by default all: {', '.join(compare.DTYPES)}",
    )
    beside.add_argument("--hidden-size", type=int, default=4096, metavar="N", help="elements of a row (default 4096)")
    beside.add_argument("--device", default="cpu", help="where to compute, as torch names it (default cpu)")
    beside.add_argument("--json", dest="json_file", metavar="FILE", help="write everything that was found")
    beside.add_argument("--plot", metavar="FILE", help="draw it, to FILE.png or FILE.svg; needs fusednorm[plot]")
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
    if arguments.command == "check":
        return doctor.check(doctor.console())
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return int("error" in findings or any("error" in choice for choice in findings.get("devices", ())))
    return doctor.show(doctor.console())


def comparison(arguments: argparse.Namespace) -> int:
    """Compares, prints, writes; 1 if fusednorm itself failed, or if its bits changed."""
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'fusednorm[plot]'", file=sys.stderr)
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
