"""``python -m fusednorm``: the doctor. ``python -m fusednorm check``: the proof."""

import argparse
import json
import sys

from fusednorm import doctor


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusednorm", description="What fusednorm finds on this machine.")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("check", help="compare every backend with the reference, bit for bit, at LLM shapes")
    arguments = parser.parse_args()
    if arguments.command == "check":
        return doctor.check(doctor.console())
    if arguments.json:
        findings = doctor.report()
        print(json.dumps(findings, indent=2))
        return int("error" in findings or any("error" in choice for choice in findings.get("devices", ())))
    return doctor.show(doctor.console())


if __name__ == "__main__":
    sys.exit(main())
