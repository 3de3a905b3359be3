"""``fusednorm``, or ``python -m fusednorm``: the commands of ``tools/cli.py``."""

import sys

from fusednorm.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
