"""What a backend must know of a call: the flags that are not at their usual values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def unusual(flags: Mapping[str, Any], usual: Mapping[str, Any], known: Collection[str] = ()) -> tuple[str, ...]:
    """The names of flags that are not at their usual values, but those that are known."""
    return tuple([name for name in flags if name not in known and flags[name] != usual.get(name, flags[name])])
