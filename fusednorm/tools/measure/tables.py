"""Prints the figures of ``bench``."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusednorm.tools.console import measured_on, of_threads, print_markdown
from fusednorm.tools.measure.cells import IN_PLACE, Cell
from fusednorm.tools.measure.peers import COMPILED, EAGER
from fusednorm.tools.measure.workloads import GRADIENTS, every_measured

#: From this spread on the figures of a shape are not to be trusted.
DISTURBED = 1.5


def figure(times: dict[str, Any]) -> str:
    """Microseconds of a call and, on a GPU, of a call within a graph, with about three digits."""
    if "error" in times:
        return "failed"
    values = [value for value in (times["eager"], times["graph"]) if value is not None]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def microseconds(times: dict[str, Any]) -> float:
    """Microseconds of a call; on a GPU within a graph."""
    found: float = times["eager"] if times["graph"] is None else times["graph"]
    return found


def in_a_line(cell: Cell, contenders: dict[str, dict[str, Any]]) -> str:
    """The figures of a cell, as they are measured."""
    times = ", ".join(f"{name} {figure(found)}" for name, found in contenders.items())
    return f"{cell}: {times} us"


def share(cell: dict[str, Any], name: str) -> float | None:
    """The speed over that of a copy of as many bytes; None for one row, because the call takes most of its time."""
    times = cell["contenders"][name]
    if cell["rows"] == 1 or "error" in times:
        return None
    return microseconds(cell["contenders"]["copy"]) / microseconds(times)


def base(cell: dict[str, Any], name: str) -> str:
    """fusednorm's contender with which a peer is compared: of the first backend, in place if the peer is."""
    first: str = next(contender for contender in cell["contenders"] if contender.startswith("fusednorm"))
    plain = first.removesuffix(IN_PLACE)
    return plain + IN_PLACE if name.endswith(IN_PLACE) else plain


def ratio(cell: dict[str, Any], name: str) -> float | None:
    """A peer's time over fusednorm's, on a GPU within a graph; None if it failed."""
    times, ours = cell["contenders"][name], cell["contenders"][base(cell, name)]
    return None if "error" in times else microseconds(times) / microseconds(ours)


def show(found: dict[str, Any], console: Console, wide: bool = False, by_operation: bool = False) -> None:
    """Prints :attr:`Results.found`, in a table for each operation, dtype and number of threads.

    It takes 80 columns for up to six contenders. wide: microseconds of every contender and its share of a copy's speed,
    as Markdown. by_operation: in place of all these a table for each peer, with a line for each operation, as Markdown.
    """
    if wide or by_operation:
        console.width = max(console.width, 200 if by_operation else 150)
    machine = found["machine"]
    bandwidth = f"; a large copy moves {found['copy_bandwidth'] / 1e9:.1f} GB/s" if found["copy_bandwidth"] else ""
    on_gpu = machine["device"] != "cpu"
    unit = "a call / within a CUDA graph" if on_gpu else "a call"
    console.print(f"{measured_on(machine)}, torch {machine['torch']}{bandwidth}")
    if by_operation:
        console.print(f"how many times as long as fusednorm others take for {unit}")
        _by_operation(found["cells"], console)
        _show_facts(found, console)
        return
    if wide:
        console.print(f"microseconds of {unit} (share of the speed of a copy of as many bytes)")
    else:
        console.print(f"fusednorm, copy (of as many bytes): microseconds of {unit}")
        console.print("others: how many times as long as fusednorm they take")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in found["cells"]:
        groups.setdefault((cell["op"], cell["dtype"], cell["threads"]), []).append(cell)
    for (op, dtype, threads), cells in groups.items():
        console.print(f"\n[bold]{op}, {dtype}{of_threads(threads)}[/]")
        names = list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))
        if wide:
            console.print()
            print_markdown(_wide(cells, names), console)
        else:
            console.print(_ratios(cells, names))
    _show_facts(found, console)


def _by_operation(cells: list[dict[str, Any]], console: Console) -> None:
    """The ratios of each peer on each number of threads, by operation, and by dtype and shape."""
    found: dict[tuple[str, int | None], dict[tuple[str, str], str]] = {}
    for cell in cells:
        column = f"{cell['dtype']}, {cell['rows']} x {cell['hidden_size']}"
        for name in cell["contenders"]:
            if not name.startswith("fusednorm") and name != "copy":
                found.setdefault((name, cell["threads"]), {})[cell["op"], column] = _compared(cell, name)
    for (name, threads), of_peer in found.items():
        columns = list(dict.fromkeys(column for _, column in of_peer))
        table = Table(box=box.MARKDOWN)
        table.add_column(escape(f"{name}{of_threads(threads)}"), no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for op in dict.fromkeys(op for op, _ in of_peer):
            table.add_row(op, *(of_peer.get((op, column), "-") for column in columns))
        console.print()
        print_markdown(table, console)


def _ratios(cells: list[dict[str, Any]], names: list[str]) -> Table:
    """Times of fusednorm and of a copy, the others' ratios, and the medians of these."""
    mine = [name for name in names if name.startswith("fusednorm") or name == "copy"]
    peers = [name for name in names if name not in mine]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("rows x N", justify="right", vertical="bottom", no_wrap=True)
    for name in (*mine, *peers):
        words = name.replace(".", ". ").split()  # also splits torch.compile
        table.add_column(escape("\n".join(words)), justify="right", vertical="bottom")
    for cell in cells:
        ratios = [_compared(cell, name) for name in peers]
        times = [figure(cell["contenders"][name]) if name in cell["contenders"] else "-" for name in mine]
        table.add_row(f"{cell['rows']}x{cell['hidden_size']}", *times, *ratios)
    if len(cells) > 1 and peers:
        found = {n: [r for cell in cells if n in cell["contenders"] and (r := ratio(cell, n))] for n in peers}
        medians = [f"{statistics.median(found[name]):.1f}x" if found[name] else "-" for name in peers]
        table.add_row("median", *[""] * len(mine), *medians)
    return table


def _compared(cell: dict[str, Any], name: str) -> str:
    quotient = ratio(cell, name) if name in cell["contenders"] else None
    missing = "failed" if name in cell["contenders"] else "-"
    return missing if quotient is None else f"{quotient:.1f}x"


def _wide(cells: list[dict[str, Any]], names: list[str]) -> Table:
    """The microseconds of all contenders."""
    table = Table(box=box.MARKDOWN)
    table.add_column("rows x N", no_wrap=True)
    for name in names:
        table.add_column(escape(name), justify="right")
    for cell in cells:
        table.add_row(f"{cell['rows']} x {cell['hidden_size']}", *(_entry(cell, name) for name in names))
    return table


def _entry(cell: dict[str, Any], name: str) -> str:
    if name not in cell["contenders"]:
        return "-"
    part = share(cell, name)
    return figure(cell["contenders"][name]) + (f" ({part:.0%})" if part is not None and name != "copy" else "")


def _show_facts(found: dict[str, Any], console: Console) -> None:
    """Prints failures, versions, and differing bits of the contenders."""
    facts = Table.grid(padding=(0, 2))
    disturbed = {
        f"{cell['rows']}x{cell['hidden_size']}": times["spread"]
        for cell in found["cells"]
        for times in cell["contenders"].values()
        if times.get("spread", 1.0) > DISTURBED
    }
    if disturbed:
        worst = max(disturbed.values())
        shapes = ", ".join(disturbed)
        remark = f"rounds differ up to {worst:.1f} times at {shapes}: something else ran; measure again without it"
        facts.add_row("[yellow]disturbed[/]", remark)
    most: dict[str, float] = {}
    for cell in found["cells"]:
        for name, times in cell["contenders"].items():
            if "error" in times:
                facts.add_row(name, f"[red]failed[/] at {cell['rows']}x{cell['hidden_size']}: {escape(times['error'])}")
            most[name] = max(most.get(name, 0.0), times.get("differing", 0.0))
    for name, version in found["machine"]["peers"].items():
        facts.add_row(name, escape(version))
    for name, part in most.items():
        if part:
            share = "less than 0.01%" if part < 1e-4 else f"up to {part:.2%}"
            facts.add_row(name, f"has other bits than fusednorm in {share} of the elements of a shape")
    console.print()
    console.print(facts)
    if EAGER in most or COMPILED in most:
        for op in dict.fromkeys(cell["op"] for cell in found["cells"]):
            if text := every_measured()[GRADIENTS[op][0] if op in GRADIENTS else op].text:
                console.print(f"{op} in torch: {text}", markup=False, soft_wrap=True)
