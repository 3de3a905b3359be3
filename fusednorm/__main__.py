"""``fusednorm``, or ``python -m fusednorm``: ``tools/cli.py`` reads the command and ``tools/commands.py`` runs it."""

import sys

from fusednorm.tools import commands
from fusednorm.tools.cli import parsed


def main() -> int:
    """Reads the command line and runs the command; returns the exit status."""
    parser, arguments, others = parsed(commands.operations())
    return commands.run(parser, arguments, others)


if __name__ == "__main__":
    sys.exit(main())
