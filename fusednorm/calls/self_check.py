"""Whether a backend proves itself at its first use: on platforms where no test of ours has run (docs/install.md)."""

from __future__ import annotations

import os
import platform
import sys

#: The values of ``FUSEDNORM_SELF_CHECK``; without one, platforms decide.
FIRST, OFF = "first", "off"

SETTING = os.environ.get("FUSEDNORM_SELF_CHECK", "").strip().lower()

_ON_TESTED_PROCESSORS = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def wanted(backend: str) -> bool:
    """Whether the first use of each of a backend's kernels is compared with the reference."""
    if backend == "reference" or SETTING == OFF:
        return False
    return SETTING == FIRST or not (_ON_TESTED_PROCESSORS and backend in ("cpu", "triton_cpu"))
