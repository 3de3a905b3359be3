"""The equal elements of one step of two runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The equal elements of one step, or of the same step in several layers.

    Attributes:
        name: of the step; ``*`` stands for the numbers of the layers.
        elements: the number of elements that were compared.
        equal: those whose bits are equal: NaN equals NaN, and +0 equals -0.
        alone: those that are equal where both models compute the step from the first one's inputs; None in files.
        reason: why the step could not be compared; empty if it was.
    """

    name: str
    elements: int = 0
    equal: int = 0
    alone: int | None = None
    reason: str = ""
