"""Draws the pictures of README.md and docs/ from the CSV files beside it and docs/rl.md; prints figures of README.

``python docs/images/draw.py`` writes the files anew. A test compares the files with the tables.

Each picture is 420 units wide, so that its text can be read on a phone, and two fit side by side on GitHub.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from html import escape
from operator import itemgetter
from pathlib import Path
from statistics import median

DOCS = Path(__file__).parents[1]
WIDTH = 420
#: Of README's pictures, which stand side by side.
HEIGHT = 315
RED, ORANGE, BLUE, GREEN, PURPLE, GREY = "#c0392b", "#f39c12", "#1f77b4", "#2a9d4a", "#7e57c2", "#8a8f98"

#: Where norms.csv was measured, as docs/performance.md says.
MACHINE = "AMD Zen 4"
#: The columns of the table of docs/performance.md, and the bars of README's first picture.
DTYPES = {"16 bits": ("bfloat16", "float16"), "float32": ("float32",)}


def measured() -> list[dict[str, str]]:
    """The rows of norms.csv: microseconds of a call of one shape."""
    with (DOCS / "images" / "norms.csv").open() as file:
        return list(csv.DictReader(file))


def ratios(dtypes: Iterable[str]) -> dict[str, list[float]]:
    """How many times as long others take for the same call: one number for each shape, dtype and number of threads."""
    pairs = {
        "torch eager": ("new", "eager"),
        "torch.compile": ("new", "compiled"),
        "vLLM's operator, in place": ("in place", "vLLM"),
    }
    rows = [row for row in measured() if row["dtype"] in dtypes]
    return {name: [float(row[theirs]) / float(row[ours]) for row in rows] for name, (ours, theirs) in pairs.items()}


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def summary(found: list[float]) -> str:
    """Median, least and most."""
    return f"{_short(median(found))} ({_short(min(found))} to {_short(max(found))})"


def medians() -> dict[str, str]:
    """The numbers of README's first picture in 16 bits, as README says them, by the implementation."""
    return {name.split(",")[0]: _short(median(found)) for name, found in ratios(DTYPES["16 bits"]).items()}


def figures() -> list[str]:
    """The table of docs/performance.md: median, least and most."""
    columns = [ratios(dtypes) for dtypes in DTYPES.values()]
    lines = [f"| {MACHINE} | {' | '.join(DTYPES)} |", "|---" * (1 + len(columns)) + "|"]
    return lines + [f"| {name} | {' | '.join(summary(one[name]) for one in columns)} |" for name in columns[0]]


#: The lines of README's table of all operations, by their names in that of docs/performance.md.
GROUPS = {
    "RMS norms, with additions or without": ("norm", "add_norm", "norm_add", "norm_add_norm"),
    "quantized rows": (
        *("add_norm_int8", "add_norm_fp8", "add_norm_fp8_block", "quantize", "rms_norm_quant", "layer_norm_quant"),
        *("fused_add_layer_norm_quant", "silu_and_mul_quant", "relu2_quant"),
    ),
    "rotations, with norms or without": ("rotate", "qk_norm_rope"),
    "gates of SiLU, with norms or without": ("gate", "silu_and_mul", "norm_gated"),
    "`gelu_tanh_and_mul`, `relu2`, `softcap`": ("gelu_tanh_and_mul", "relu2", "softcap"),
    "`logsumexp`, log-probabilities of ids": ("logsumexp", "selected_log_prob", "selected_log_prob_and_entropy"),
    "LayerNorms, `l2_norm`": ("layer_norm", "add_layer_norm", "l2_norm"),
    "`log_softmax`": ("log_softmax",),
    "`gelu`, `gelu_and_mul`": ("gelu", "gelu_and_mul"),
    "`modulate`": ("modulate",),
    "products: `linear`": ("linear",),
}


def by_group() -> list[str]:
    """README's table: the least and the most of each group, by dtype, of 1, 32 and 512 rows."""
    table = lines("performance.md", "torch eager, 1 thread")
    kinds = [head.split(",")[0] for head in table.pop("torch eager, 1 thread")]
    assert sorted(table) == sorted(name for names in GROUPS.values() for name in names)
    dtypes = list(dict.fromkeys(kinds))
    rows = [f"| How many times as long torch takes | {' | '.join(dtypes)} |", "|---" * (1 + len(dtypes)) + "|"]
    for words, names in GROUPS.items():
        cells = []
        for dtype in dtypes:
            found = [
                float(cell.rstrip("x"))
                for name in names
                for cell, kind in zip(table[name], kinds, strict=True)
                if kind == dtype
            ]
            cells.append(f"{min(found):.1f} to {max(found):.1f}")
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return rows


def lines(page: str, first: str) -> dict[str, list[str]]:
    """The table of a page in docs/ whose head begins with ``first``: its lines by their first cell, the head too."""
    part = (DOCS / page).read_text().split(f"\n| {first} |", 1)[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in f"{first} |{part}".splitlines()]
    return {line[0]: line[1:] for line in cells if not line[0].startswith("-")}


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    anchor: str = "start",
    colour: str = "#24292f",
    bold: bool = False,
) -> str:
    """A line of text; y is its base."""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"' + ' font-weight="600"' * bold
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words, quote=False)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}"/>'


def svg(height: float, label: str, *parts: str) -> str:
    """The whole picture, on white, for dark pages too."""
    size = f'width="{WIDTH}" height="{height:g}"'
    font = 'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height:g}" role="img" {font}>'
    return "\n".join(
        (head, f"<title>{escape(label)}</title>", f'<rect {size} rx="6" fill="#fff"/>', *parts, "</svg>\n")
    )


def speed() -> str:
    """README's bars: how many times as long others take, and of which shapes the least and the most."""
    left, unit = 14, 36.0
    parts = [
        text(left, 26, "Time of one call, beside fusednorm's", size=16, bold=True),
        text(left, 45, f"{MACHINE}, median of all shapes (least to most)", colour="#57606a"),
    ]
    at = 58.0
    for place, (words, colour) in enumerate(zip(DTYPES, (RED, ORANGE), strict=True)):
        parts += [bar(left + 100 * place, at, 11, 11, colour), text(left + 16 + 100 * place, at + 10, words, size=12)]
    at = 96.0
    columns = [ratios(dtypes) for dtypes in DTYPES.values()]
    for name in columns[0]:
        parts.append(text(left, at, name))
        for found, colour in zip(columns, (RED, ORANGE), strict=True):
            width, words = median(found[name]) * unit, summary(found[name])
            parts += [bar(left, at + 6, width, 15, colour), text(left + width + 6, at + 18, words, bold=True)]
            at += 17
        at += 28
    parts.append(text(left, at, "fusednorm"))
    parts += [bar(left, at + 6, unit, 15, GREY), text(left + unit + 6, at + 18, "1", bold=True)]
    return svg(HEIGHT, "Bars: how many times as long as fusednorm others take for one call", *parts)


def promise() -> str:
    """README's bars: how many tokens have a log-probability with the same bits in an engine and in a trainer."""
    left, unit = 14, 2.6
    found = lines("rl.md", "Equal log-probabilities")
    shown = {"without fusednorm": GREY, "all but attention": GREY, "all": RED}
    parts = [
        text(left, 26, "The same log-probability, bit for bit?", size=16, bold=True),
        text(left, 45, f"{found['Equal log-probabilities'][0]} on a CPU: vLLM samples, and", colour="#57606a"),
        text(left, 62, "a trainer computes its tokens again, in batches.", colour="#57606a"),
        text(left, 92, "Tokens that are equal, by what is fusednorm's:"),
    ]
    at = 120.0
    for name, colour in shown.items():
        percent = float(found[name][0].split("%")[0])
        words = {"all": "all", "without fusednorm": "nothing"}.get(name, name)
        parts.append(text(left, at, words))
        parts += [bar(left, at + 8, max(percent * unit, 2), 26, colour)]
        parts += [text(left + percent * unit + 10, at + 29, f"{percent:.0f}%", size=22, bold=True, colour=colour)]
        at += 66
    return svg(HEIGHT, "Bars: tokens with equal log-probabilities, 100% with fusednorm on both sides", *parts)


def _log_axis(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """A function from values to positions."""
    return lambda value: begin + (end - begin) * math.log(value / low) / math.log(high / low)


def performance() -> str:
    """Gigabytes per second by bytes of a call, with two threads."""
    styles = {
        "in place": ("fusednorm, in place", RED, 3),
        "new": ("fusednorm, new outputs", ORANGE, 3),
        "vLLM": ("vLLM, in place", PURPLE, 1.5),
        "compiled": ("torch.compile", GREEN, 1.5),
        "eager": ("torch eager", BLUE, 1.5),
        "copy": ("a copy of as many bytes", GREY, 1.5),
    }
    parts = [text(14, 26, "Gigabytes per second, by bytes of a call", size=16, bold=True)]
    parts.append(text(14, 45, f"{MACHINE}, 2 threads; both scales are logarithmic", colour="#57606a"))
    for index, (name, colour, width) in enumerate(styles.values()):
        x, y = (14, 216)[index % 2], 66 + 18 * (index // 2)
        dash = ' stroke-dasharray="4 3"' if colour == GREY else ""
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="{width}"{dash}/>')
        parts.append(text(x + 24, y, name, size=12))
    top, height = 168.0, 170.0
    rows = [row for row in measured() if row["threads"] == "2"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        size = 4 if dtype == "float32" else 2
        numbers = [(4 * size * int(row["rows"]) * int(row["N"]), row) for row in rows if row["dtype"] == dtype]
        points = sorted(numbers, key=itemgetter(0))
        across = _log_axis(6e3, 8e8, 52, WIDTH - 14)
        up = _log_axis(0.1, 300, top + height, top)
        parts.append(text(14, top - 10, dtype, bold=True))
        for value in (0.1, 1, 10, 100):
            parts.append(f'<path d="M52 {up(value):.1f}H{WIDTH - 14}" stroke="#d0d7de"/>')
            parts.append(text(46, up(value) + 4, f"{value:g}", size=12, anchor="end"))
        for value, words in ((1e4, "10 kB"), (1e6, "1 MB"), (1e8, "100 MB")):
            parts.append(f'<path d="M{across(value):.1f} {top}v{height}" stroke="#d0d7de"/>')
            parts.append(text(across(value), top + height + 17, words, size=12, anchor="middle"))
        for column, (_, colour, width) in reversed(styles.items()):
            line = [f"{across(n):.1f} {up(n / float(row[column]) / 1e3):.1f}" for n, row in points if row[column]]
            dash = ' stroke-dasharray="4 3"' if colour == GREY else ""
            if line:
                parts.append(
                    f'<path d="M{"L".join(line)}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
                )
        top += height + 62
    return svg(top - 30, "Lines: gigabytes per second of fusednorm and others, for three dtypes", *parts)


#: The classes of errors in errors.csv, in ulp, and how each is drawn.
CLASSES = dict(
    zip(
        ("0", "1", "2", "3-4", "5-8", "over 8"),
        ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154"),
        strict=True,
    )
)


#: The meaning of each entry of the column "rounds", in the order in which the picture shows it.
ROUNDS = {
    "sum": "rounds the sum",
    "as compiled": "rounds as compiled",
    "sum, for y": "rounds the sum in y only",
    "sum, norm": "rounds the sum and the norm",
    "norm": "rounds the norm",
    "nothing": "rounds nothing",
}


def compare() -> str:
    """Shares of elements by their error, and whose bits change with the batch."""
    with (DOCS / "images" / "errors.csv").open() as file:
        measured = list(csv.DictReader(file))
    parts = [text(14, 26, "Errors in ulp, share of elements", size=16, bold=True)]
    parts.append(text(14, 45, "1025 rows of 4096 elements on an AMD Zen 4", colour="#57606a"))
    for index, (name, colour) in enumerate(CLASSES.items()):
        parts += [bar(14 + 66 * index, 57, 11, 11, colour), text(29 + 66 * index, 67, name, size=12)]
    at = 96.0
    for dtype in ("bfloat16", "float32"):
        rows = [row for row in measured if row["dtype"] == dtype]
        parts.append(text(14, at, dtype, bold=True))
        at += 22
        drawn = set()
        for row in sorted(rows, key=lambda row: list(ROUNDS).index(row["rounds"])):
            name, rounds, batches = row["implementation"], row["rounds"], row["batches"]
            counts = tuple(int(row[errors]) for errors in CLASSES)
            if (name, counts) in drawn:  # in float32 the flags change nothing
                continue
            drawn.add((name, counts))
            parts.append(text(14, at, f"{name}, {ROUNDS[rounds]}" if dtype == "bfloat16" else name, size=12))
            if batches != "same":
                words = f"bits change in {batches} batches"
                parts.append(text(WIDTH - 14, at, words, size=12, anchor="end", colour=RED))
            x = 14.0
            for count, colour in zip(counts, CLASSES.values(), strict=True):
                width = (WIDTH - 28) * count / sum(counts)
                if width > 0.05:
                    parts.append(bar(round(x, 1), at + 5, width, 10, colour))
                x += width
            at += 34
        at += 10
    return svg(at - 18, "Stacked bars: the share of elements with each error, of fusednorm and others", *parts)


PICTURES = {
    "speed.svg": speed,
    "promise.svg": promise,
    "performance.svg": performance,
    "compare.svg": compare,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())
    print(*figures(), "", *by_group(), sep="\n")
