"""``python -m fusednorm``: the doctor. ``check``: the proof. ``conformance``: the proof of one backend, at length."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

from fusednorm import doctor


def main() -> int:
    """Reads the command line; returns the exit status."""
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
    arguments, others = parser.parse_known_args()
    if arguments.command == "conformance":
        return conformance(arguments.backend, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if arguments.command == "check":
        return doctor.check(doctor.console())
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return int("error" in findings or any("error" in choice for choice in findings.get("devices", ())))
    return doctor.show(doctor.console())


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
