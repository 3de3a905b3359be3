"""Faults that the tests must notice, in a file for each part of the library. ``mutations.py`` makes them.

``== FILE`` begins the faults of a file, in the root folder. A backend's name may follow it, and the name of a file of
the kit. Each fault begins with ``#``, the promise that it breaks and its description; then the text that stands once in
the file (-), and the text in its place (+): all lines of it, or a part of one line.
"""

from pathlib import Path
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


PROMISES = {"SAME": "same bits on every backend", "FUSED": "fused equals unfused", "ROW": "a row is a row"}


def mutants_of(path):
    """The mutants that a file describes."""
    for section in f"\n{path.read_text(encoding='utf-8')}".split("\n== ")[1:]:
        place, *entries = section.rstrip("\n").split("\n# ")
        file, backend, kit = [*place.split(), "", ""][:3]
        for entry in entries:
            title, *lines = entry.split("\n")
            promise, _, fault = title.partition(": ")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            yield Mutant(PROMISES[promise], fault, file, old, new, backend, kit)


MUTANTS = tuple(mutant for path in sorted(Path(__file__).parent.glob("*.diff")) for mutant in mutants_of(path))
