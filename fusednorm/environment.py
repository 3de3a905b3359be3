"""The environment variables that fusednorm reads, and those that only look like one.

Imported before torch, which announces when it is imported that NumPy is not installed: nothing here needs NumPy.
"""

from __future__ import annotations

import os
import warnings

# It stays: `catch_warnings` would also undo the filters that torch and NumPy set when they are imported.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

PREFIX = "FUSEDNORM_"

#: What users set.
VARIABLES = ("FUSEDNORM_BACKEND", "FUSEDNORM_CACHE_DIR", "FUSEDNORM_CPU_ISA", "FUSEDNORM_PREWARM", "FUSEDNORM_VLLM")

#: What the tests of the repository set.
OF_TESTS = ("FUSEDNORM_DEBIAN_MIRROR", "FUSEDNORM_EMULATED_SM")


def unread() -> dict[str, str]:
    """The variables that are set and begin like ours, but are none: each with what to do about it."""
    names = [name for name in sorted(os.environ) if name.startswith(PREFIX)]
    return {name: _cure(name) for name in names if name not in (*VARIABLES, *OF_TESTS)}


def _cure(name: str) -> str:
    import difflib  # now: hardly anybody needs it

    ours = {variable.removeprefix(PREFIX): variable for variable in VARIABLES}
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), ours, n=1)
    return f"did you mean {ours[near[0]]}?" if near else f"those that it reads are {', '.join(VARIABLES)}"


def warn_of_unread() -> None:
    """Warns of each, when fusednorm is imported."""
    for name, cure in unread().items():
        warnings.warn(f"fusednorm reads no environment variable {name}; {cure}", RuntimeWarning, stacklevel=3)
