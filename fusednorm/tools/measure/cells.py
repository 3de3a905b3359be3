"""The measurements of ``bench``, and the file of their figures."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusednorm.tools.cli import UnusableError
from fusednorm.tools.console import of_threads
from fusednorm.tools.measure.workloads import GRADIENTS, Measured, every_measured

#: The suffix of the names of contenders that work in place.
IN_PLACE = " in place"

CPU_SHAPES = (
    *("1x896", "1x2048", "1x4096", "1x8192", "1x16384", "8x4096", "32x4096", "128x4096", "512x4096", "2048x4096"),
    *("4096x8192", "65536x64", "8192x128", "64x65536"),
)

GPU_SHAPES = tuple(
    f"{rows}x{size}"
    for size in (128, 896, 2048, 4096, 5120, 7168, 8192, 16384, 65536)
    for rows in (1, 16, 64, 512, 4096, 16384, 65536)
)


@dataclass(frozen=True)
class Cell:
    """The measurement of one row of a table."""

    op: str
    dtype: str
    rows: int
    hidden_size: int
    #: torch's number of threads, on a CPU.
    threads: int | None

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.rows}x{self.hidden_size}{of_threads(self.threads)}"

    @property
    def backward(self) -> bool:
        """Whether gradients are timed."""
        return self.op in GRADIENTS

    @property
    def forward_op(self) -> str:
        """The operation, or that whose gradients are timed."""
        return GRADIENTS[self.op][0] if self.backward else self.op

    @property
    def measured(self) -> Measured:
        """The operation, or that whose gradients are timed."""
        return every_measured()[self.forward_op]

    @property
    def possible(self) -> bool:
        """Whether rows consist of whole groups, if they are quantized in groups."""
        quantization = self.measured.quantization
        return quantization is None or self.hidden_size % quantization.group(self.hidden_size) == 0

    @property
    def nbytes(self) -> int:
        """The bytes of the large operands that a call reads and writes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        if self.backward:
            return self.rows * self.hidden_size * itemsize * GRADIENTS[self.op][1]
        return self.measured.nbytes(self.rows, self.hidden_size, itemsize)


class Results:
    """The cells of runs on one machine (see :meth:`.bench.Bench.machine`), written to a JSON file if its path is given.

    Raises:
        UnusableError: the file has figures of another machine, other versions or other contenders.
    """

    def __init__(self, machine: dict[str, Any], path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.found: dict[str, Any] = {"machine": machine, "copy_bandwidth": None, "cells": []}
        if self.path is not None and self.path.exists():
            self.found = load(self.path)
            if changed := [name for name in machine if self.found["machine"].get(name) != machine[name]]:
                name = changed[0]
                raise UnusableError(
                    f"--json {path} has figures of {name} {self.found['machine'].get(name)!r}, and here it is "
                    f"{machine[name]!r}: name another file, or remove this one"
                )

    def __contains__(self, cell: Cell) -> bool:
        return any(dataclasses.asdict(cell).items() <= other.items() for other in self.found["cells"])

    def add(self, cell: Cell, contenders: dict[str, dict[str, Any]]) -> None:
        """Adds the figures of one cell."""
        self.found["cells"].append({**dataclasses.asdict(cell), "bytes": cell.nbytes, "contenders": contenders})
        self.write()

    def write(self) -> None:
        """Writes a new file, which then replaces the old one, so an interrupted run leaves a whole file."""
        if self.path is not None:
            beside = self.path.with_name(self.path.name + ".new")
            beside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
            os.replace(beside, self.path)


def load(path: Path) -> dict[str, Any]:
    """Reads a file that ``--json`` wrote.

    Raises:
        UnusableError: the file has other contents.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnusableError(f"--json {path} is no JSON: {error}; name another file, or remove this one") from None
    if not isinstance(found, dict) or not {"machine", "copy_bandwidth", "cells"} <= found.keys():
        raise UnusableError(f"--json {path} was not written by `python -m fusednorm bench`: name another file")
    return found
