"""The flags of a call that are not at their usual values, which its backend must know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def unusual(flags: Mapping[str, Any], usual: Mapping[str, Any], known: Collection[str] = ()) -> tuple[str, ...]:
    """The names of flags that are not at their usual values, but those that are known."""
    return tuple([name for name in flags if name not in known and flags[name] != usual.get(name, flags[name])])
