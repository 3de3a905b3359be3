"""The environment variables that fusednorm reads, and variables with similar names.

This module is imported before torch, to silence torch's warning that NumPy is not installed: fusednorm does not need
NumPy.
"""

from __future__ import annotations

import os
import warnings

# The filter stays, because `catch_warnings` would also undo the filters that torch and NumPy set at their import.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

PREFIX = "FUSEDNORM_"

#: Variables for users.
VARIABLES = (
    *("FUSEDNORM_BACKEND", "FUSEDNORM_CACHE_DIR", "FUSEDNORM_CPU_ISA"),
    *("FUSEDNORM_PREWARM", "FUSEDNORM_SELF_CHECK", "FUSEDNORM_SGLANG", "FUSEDNORM_VLLM"),
)

#: Variables of the repository's tests.
OF_TESTS = ("FUSEDNORM_DEBIAN_MIRROR", "FUSEDNORM_EMULATED_SM")


def unread() -> dict[str, str]:
    """The variables that begin with FUSEDNORM_ and are not read, each with a cure."""
    names = [name for name in sorted(os.environ) if name.startswith(PREFIX)]
    return {name: _cure(name) for name in names if name not in (*VARIABLES, *OF_TESTS)}


def _cure(name: str) -> str:
    import difflib  # here, because it is rarely needed

    ours = {variable.removeprefix(PREFIX): variable for variable in VARIABLES}
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), ours, n=1)
    return f"did you mean {ours[near[0]]}?" if near else f"those that it reads are {', '.join(VARIABLES)}"


def warn_of_unread() -> None:
    """Warns of each such variable, at the import of fusednorm."""
    for name, cure in unread().items():
        warnings.warn(f"fusednorm reads no environment variable {name}; {cure}", RuntimeWarning, stacklevel=3)
