"""Faults that the tests must notice: a file of them for each part of the library. ``mutations.py`` makes them."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A promise, and a replacement in one file that breaks it."""

    promise: str
    fault: str
    file: str
    old: str
    new: str
    #: The one backend that the tests then run on; empty: all of this machine, and tests without a backend.
    backend: str = ""
    #: The one file of the kit that the tests of a backend are in; empty: several.
    kit: str = ""


SAME, FUSED, ROW = "same bits on every backend", "fused equals unfused", "a row is a row"
