"""Draws the figures that ``fusednorm bench`` or ``compare`` wrote with ``--json``. Needs matplotlib.

python benchmarks/plot.py FIGURES.json PICTURE.svg
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
    from matplotlib import pyplot, ticker
except ModuleNotFoundError as error:
    sys.exit(f"pictures need {error.name}: pip install matplotlib")

from fusednorm.tools.console import measured_on, of_threads
from fusednorm.tools.measure.tables import microseconds

#: Contenders whose names begin so have warm colours, peers have cool ones.
OURS = "fusednorm"


def plot(found: dict[str, Any], path: str) -> None:
    """Draws for each operation bytes per second by bytes of a call, and the time of a call of one row.

    Of :attr:`.cells.Results.found`, which has at least one cell, only the largest number of threads is drawn. The
    suffix of the path is .png, .svg or another of matplotlib's formats.
    """
    threads = max((cell["threads"] or 0 for cell in found["cells"]), default=0)
    cells = [cell for cell in found["cells"] if (cell["threads"] or 0) == threads]
    ops = list(dict.fromkeys(cell["op"] for cell in cells))
    dtypes = list(dict.fromkeys(cell["dtype"] for cell in cells))
    names = list(dict.fromkeys(name for cell in cells for name in cell["contenders"] if name != "copy"))
    styles = _styles(names)
    figure, panels = pyplot.subplots(
        len(ops),
        len(dtypes) + 1,
        figsize=(4.2 * len(dtypes) + 4.6, 0.9 + 3.6 * len(ops)),
        squeeze=False,
        layout="constrained",
    )
    for op, row in zip(ops, panels, strict=True):
        for dtype, panel in zip(dtypes, row, strict=False):
            _draw_roofline(panel, [c for c in cells if (c["op"], c["dtype"]) == (op, dtype)], styles)
            panel.set_title(f"{op}, {dtype}")
        row[0].set_ylabel("GB/s")
        _draw_overhead(row[-1], [c for c in cells if c["op"] == op and c["rows"] == 1], styles)
    handles: dict[str, Any] = {}
    for panel in panels[:, :-1].flat:
        lines, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles)))
    machine = found["machine"]
    name = f"{measured_on(machine)}{of_threads(threads or None)}"
    figure.suptitle(f"{name}, torch {machine['torch']}; higher is better on the left, shorter on the right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_errors(found: dict[str, Any], path: str) -> None:
    """Draws the histograms of :func:`.compare.report`, which has at least one finding, and whether bits change."""
    by_dtype = {
        dtype: list(group) for dtype, group in itertools.groupby(found["findings"], key=lambda one: one["dtype"])
    }
    first = next(iter(by_dtype.values()))
    names = [f"{finding['name']} ({finding['rounds']})" for finding in first]
    classes = next(finding["histogram"] for finding in found["findings"] if not finding["error"])
    colours = pyplot.get_cmap("viridis_r")([place / (len(classes) - 1) for place in range(len(classes))])
    figure, panels = pyplot.subplots(
        1,
        2 * len(by_dtype),
        figsize=(3.2 + 4.2 * len(by_dtype), 1.8 + 0.36 * len(names)),
        width_ratios=[3.2, 1] * len(by_dtype),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for (dtype, findings), errors, changes in zip(by_dtype.items(), panels[0, ::2], panels[0, 1::2], strict=True):
        left = [0.0] * len(findings)
        for label, colour in zip(classes, colours, strict=True):
            shares = [
                0.0 if finding["error"] else 100 * finding["histogram"][label] / sum(finding["histogram"].values())
                for finding in findings
            ]
            errors.barh(range(len(names)), shares, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        errors.set(title=f"{dtype}: error in ulp", xlabel="elements, %", xlim=(0, 100))
        for at, finding in enumerate(findings):
            if finding["error"]:
                errors.text(50, at, "failed", ha="center", va="center", color="firebrick")
                continue
            threads_differ = finding["differing_threads"]
            answers = (finding["differing_runs"], finding["differing_batches"], threads_differ)
            for column, differing in enumerate(answers):
                text, colour = ("–", "black") if differing is None else ("no", "red") if differing else ("yes", "green")
                changes.text(column, at, text, ha="center", va="center", color=colour, weight="bold", size="small")
        changes.set(title="same bits?", xlim=(-0.6, 2.6), xticks=range(3))
        changes.set_xticklabels(("runs", "batches", "threads"), rotation=45, ha="right", rotation_mode="anchor")
        changes.tick_params(length=0)
    panels[0, 0].set_yticks(range(len(names)), names)
    panels[0, 0].invert_yaxis()
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, [f"{label} ulp" for label in labels], loc="outside lower center", ncols=len(classes))
    figure.suptitle(
        f"{found['rows']} rows of {found['hidden_size']} elements on {measured_on(found)}; "
        "in parentheses the intermediate results that are rounded",
        size="medium",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each contender."""
    mine = [name for name in names if name.startswith(OURS)]
    peers = [name for name in names if name not in mine]
    warm = ("firebrick", "orangered", "orange")
    cool = ("tab:blue", "tab:green", "tab:purple", "tab:cyan", "tab:gray", "tab:brown", "tab:olive", "tab:pink")
    styles = {name: {"color": warm[i % len(warm)], "linewidth": 2.2} for i, name in enumerate(mine)}
    styles |= {name: {"color": cool[i % len(cool)], "linewidth": 1.2} for i, name in enumerate(peers)}
    for marker, style in zip("osD^vPX*<>h8pd", styles.values(), strict=False):
        style |= {"marker": marker, "markersize": 4.5}
    return styles


def _fastest(cells: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Pairs of bytes of a call and gigabytes per second; of shapes with equal bytes the fastest."""
    best: dict[int, float] = {}
    for cell in cells:
        times = cell["contenders"].get(name, {"error": ""})
        if "error" not in times:
            best[cell["bytes"]] = max(best.get(cell["bytes"], 0.0), cell["bytes"] / microseconds(times) / 1e3)
    return sorted(best.items())


def _draw_roofline(panel: Any, cells: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    """Draws speeds below that of a copy, because the operation does little more than move bytes."""
    roof = _fastest(cells, "copy")
    panel.fill_between(*zip(*roof, strict=True), color="0.9", label="a copy of as many bytes")
    for name, style in styles.items():
        if points := _fastest(cells, name):
            panel.plot(*zip(*points, strict=True), label=name, **style)
    panel.set(xscale="log", yscale="log", xlabel="read and written by a call")
    if roof[-1][0] < 20 * roof[0][0]:  # too narrow for marks at powers of ten
        panel.set_xticks([nbytes for nbytes, _ in roof])
    panel.xaxis.set_major_formatter(ticker.EngFormatter("B", places=0))
    panel.xaxis.set_minor_formatter(ticker.NullFormatter())
    panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
    panel.grid(which="major", color="0.8", linewidth=0.5)


def _draw_overhead(panel: Any, cells: list[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    """Draws the time of the narrowest call of one row, in the first dtype."""
    if not cells:
        panel.axis("off")
        return
    cell = min(cells, key=lambda cell: cell["hidden_size"])
    times = {n: t for n, t in cell["contenders"].items() if n in styles and "error" not in t}
    names = list(times)[::-1]
    values = [times[name]["eager"] for name in names]
    bars = panel.barh(names, values, color=[styles[name]["color"] for name in names])
    panel.bar_label(bars, [f"{value:.1f}" for value in values], padding=3)
    panel.set(title=f"one row of {cell['hidden_size']}, {cell['dtype']}: a call", xlabel="microseconds")
    panel.set_xlim(0, 1.25 * max(values))


def main() -> None:
    """Reads the command line and does it."""
    _, figures, picture = sys.argv
    matplotlib.use("Agg")  # without a screen
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: small files that can be searched
    found = json.loads(Path(figures).read_text(encoding="utf-8"))
    (plot if "cells" in found else plot_errors)(found, picture)


if __name__ == "__main__":
    main()
