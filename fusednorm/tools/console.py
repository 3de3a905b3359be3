"""The console of the commands, and the words that several of them print."""

from __future__ import annotations

import io
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table


def measured_on(found: dict[str, Any]) -> str:
    """The name of the measured GPU or processor; ``found`` has "processor" and "device"."""
    name: str = found["processor"] if found["device"] == "cpu" else found["device"]
    return name


def of_threads(count: int | None) -> str:
    """A suffix such as ", 2 threads"; empty without a number of threads."""
    return "" if count is None else f", {count} thread{'s' * (count > 1)}"


def progress(console: Console) -> Progress:
    """A bar with the remaining time, which disappears at the end. Without a terminal it is not shown."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def console() -> Console:
    """The console of all commands. If the output is no terminal, its lines are wide enough for the tables.

    Characters that the output's encoding lacks are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def print_markdown(table: Table, console: Console) -> None:
    """Prints a table in Markdown, without its upper and lower edge, which would be blank lines."""
    with console.capture() as printed:
        console.print(table)
    console.out("\n".join(line for line in printed.get().splitlines() if line.strip()))
