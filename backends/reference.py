"""The backend of the specification itself, ``fusednorm.reference``: slow, on any device that torch knows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from fusednorm.reference.norm import *  # noqa: F403 - here were the formulas before they had a folder
from fusednorm.reference.norm import backward as backward
from fusednorm.reference.norm import forward as forward

if TYPE_CHECKING:
    from fusednorm.calls.call import Operation

#: The reference is not tied to a device.
DEVICES = ("any",)

KNOWS = frozenset(("residual_dtype", "norm_before_add", "affine", "x_scale", "center"))

try:
    #: As all of torch's arithmetic on a CPU, unless the C library sets it (``calls/arithmetic.py``).
    FLUSHES_WITH_CALLER = find_spec("fusednorm._cpu") is None
except ImportError:  # the cpu backend says why
    FLUSHES_WITH_CALLER = True


def unavailable() -> list[str]:
    """Why this machine cannot use the backend: never."""
    return []


def unsuitable(operation: Operation) -> list[str]:
    """Why the backend cannot take a call: never."""
    return []


def plan(operation: Operation) -> str:
    """How a call will run, in words."""
    exact = operation.device.type != "mps"
    return "plain torch operations" + ("" if exact else "; not exact here, because the device has no float64")
