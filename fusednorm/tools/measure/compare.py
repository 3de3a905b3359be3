"""The errors and the constancy of each implementation on this machine: ``python -m fusednorm compare``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fusednorm.calls.bits import count_differing
from fusednorm.reference.norm import rounded
from fusednorm.tools import doctor
from fusednorm.tools.cli import DTYPES, INTERRUPTED, UnusableError
from fusednorm.tools.console import measured_on
from fusednorm.tools.measure.peers import COMPILED, EAGER, EPS, PEERS, Implementation, implementations, in_a_line
from fusednorm.tools.measure.workloads import OPERATIONS, as_tuple

#: The batches' numbers of rows: all small ones, and those around powers of two, where kernels change their plans.
BATCHES = (*range(1, 41), *(2**power + by for power in range(6, 11) for by in (-1, 0, 1)))
ROWS = BATCHES[-1]
#: The largest batch is computed this many times.
RUNS = 5
#: The batches that are computed with each number of threads.
THREADED = (1, 16, ROWS)

#: The upper edges of the histogram's classes of errors, in ulp; the last class has no upper edge.
EDGES = (0, 1, 2, 4, 8)
CLASSES = ("0", "1", "2", "3-4", "5-8", "over 8")


@dataclass
class Finding:
    """The results of one implementation in one dtype."""

    name: str
    version: str
    rounds: str
    dtype: str
    #: The reason if there are no figures; else empty.
    error: str = ""
    max_ulp: int = 0
    mean_ulp: float = 0.0
    #: The number of elements in each of :data:`CLASSES`.
    histogram: dict[str, int] = field(default_factory=dict)
    #: The number of later runs that differ from the first.
    differing_runs: int = 0
    #: The batches in which some row differs from that row alone.
    differing_batches: list[int] = field(default_factory=list)
    #: The numbers of threads with which some batch differs from one thread's; None on a device without threads.
    differing_threads: list[int] | None = None

    @property
    def constant(self) -> bool:
        """Whether the bits of a row depended on the row alone."""
        return not (self.error or self.differing_runs or self.differing_batches or self.differing_threads)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """The distance of a and b in floating-point numbers of their dtype, as int64; +0 and -0 are the same number.

    Both have the same shape and dtype (a floating-point one, or a quantizer's), and no NaN.
    """
    if not a.dtype.is_floating_point:
        return (a.to(torch.int64) - b.to(torch.int64)).abs()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]

    def ordinal(tensor: Tensor) -> Tensor:
        whole = tensor.contiguous().view(bits).to(torch.int64)
        return torch.where(whole < 0, -(whole & torch.iinfo(bits).max), whole)

    return (ordinal(a) - ordinal(b)).abs()


def exact(x: Tensor, residual: Tensor, weight: Tensor, eps: float, op: str = "add_norm") -> Tensor:
    """The first output of an operation in float64, as torch computes it, rounded to its dtype once, at the end.

    The errors of float64 are about 2^-52 of y. So where y is that near the middle between two numbers of float32 (about
    one element in 10^8), the result may be one ulp from the nearest number.
    """
    operation = OPERATIONS[op]
    inputs = [operand.double() for operand in (x, residual)[: len(operation.inputs)]]
    y = as_tuple(operation.in_torch(weight.double(), eps)(*inputs))[0]
    return y if operation.quantization else rounded(y, x.dtype)


def operands(dtype: torch.dtype, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, a residual of twice its deviation, both normal, [ROWS, hidden_size], and a weight, normal around 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, hidden_size, generator=generator)
    residual = 2 * torch.randn(ROWS, hidden_size, generator=generator)
    weight = 1 + 0.2 * torch.randn(hidden_size, generator=generator)
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def threads() -> list[int]:
    """One, two, and as many threads as torch chooses."""
    return sorted({1, 2, torch.get_num_threads()})


@torch.no_grad()
def measure(
    implementation: Implementation, x: Tensor, residual: Tensor, weight: Tensor, wanted: Tensor, *, op: str = "add_norm"
) -> Finding:
    """Measures one implementation of an operation in one dtype. An error that it raises is part of the finding.

    x, residual and wanted (see :func:`exact`) are [ROWS, N], the weight is [N]. The implementation has the operation.
    """
    found = Finding(*implementation[:3], dtype=str(x.dtype)[6:])
    if op != "add_norm" and implementation.name != COMPILED:
        found.rounds = "each step" if implementation.name == EAGER else OPERATIONS[op].rounds
    before = torch.get_num_threads()
    try:
        call = implementation.pure(weight, EPS, op)
        y = call(x, residual)
        if y.shape != wanted.shape or y.dtype != wanted.dtype:
            raise ValueError(f"returned {y.dtype} {list(y.shape)}, expected {wanted.dtype} {list(wanted.shape)}")
        if not y.float().isfinite().all():
            raise ValueError("returned NaN or infinity for ordinary operands")
        apart = ulps(y, wanted)
        found.max_ulp, found.mean_ulp = int(apart.max()), apart.double().mean().item()
        counts = torch.bucketize(apart, torch.tensor(EDGES, device=x.device)).flatten().bincount(minlength=len(CLASSES))
        found.histogram = dict(zip(CLASSES, counts.tolist(), strict=True))
        found.differing_runs = sum(count_differing(call(x, residual), y) > 0 for _ in range(RUNS - 1))
        alone = torch.cat([call(x[row : row + 1], residual[row : row + 1]) for row in range(ROWS)])
        found.differing_batches = [m for m in BATCHES if count_differing(call(x[:m], residual[:m]), alone[:m])]
        if x.device.type == "cpu":
            found.differing_threads = _threaded(implementation, x, residual, weight, op)
    except Exception as error:  # another library's code may raise anything, which is then its result
        found.error = in_a_line(error)
    finally:
        torch.set_num_threads(before)
    return found


def _threaded(implementation: Implementation, x: Tensor, residual: Tensor, weight: Tensor, op: str) -> list[int]:
    """The numbers of threads that return other bits than one thread."""

    def outputs(count: int) -> list[Tensor]:
        torch.set_num_threads(count)
        call = implementation.pure(weight, EPS, op)
        return [call(x[:m], residual[:m]) for m in THREADED]

    one, *others = threads()
    alone = outputs(one)
    return [count for count in others if any(map(count_differing, outputs(count), alone))]


def report(
    names: Iterable[str] = tuple(PEERS),
    dtypes: Iterable[str] = DTYPES,
    hidden_size: int = 4096,
    device: torch.device | str = "cpu",
    op: str = "add_norm",
    *,
    starting: Callable[[str], object] = str,
) -> dict[str, Any]:
    """Measures the implementations of an operation. Returns plain data, except for a list of :class:`Finding`.

    After ``KeyboardInterrupt`` "interrupted" is true, and the results so far are returned. ``starting`` is called with
    the name of each next measurement.
    """
    where = torch.device(device)
    given = {}
    for dtype in dtypes:
        on_cpu = operands(getattr(torch, dtype), hidden_size)
        given[dtype] = [tensor.to(where) for tensor in (*on_cpu, exact(*on_cpu, EPS, op))]
    findings: dict[str, list[Finding]] = {dtype: [] for dtype in given}
    missing: dict[str, str] = {}
    interrupted = False
    try:
        for implementation in implementations(names, where, missing, op):
            for dtype in given:
                starting(f"{implementation.name}, {dtype}")
                findings[dtype].append(measure(implementation, *given[dtype], op=op))
    except KeyboardInterrupt:
        interrupted = True
    return {
        **doctor.facts(where),
        "op": op,
        "rows": ROWS,
        "hidden_size": hidden_size,
        "eps": EPS,
        "runs": RUNS,
        "batches": BATCHES,
        "threads": threads() if where.type == "cpu" else None,
        "missing": missing,
        "interrupted": interrupted,
        "findings": list(itertools.chain(*findings.values())),
    }


def _sameness(differing: int, of: int) -> str:
    return f"[red]{differing} of {of}[/]" if differing else "[green]same[/]"


def show(found: dict[str, Any], console: Console, wide: bool = False) -> None:
    """Prints what :func:`report` returned, in 80 columns; wide: and the number of elements with each error, in 140."""
    if wide:
        console.width = max(console.width, 140)
    counts = found["threads"] or []
    console.print(
        f"[bold]{found['op']}, {found['rows']} rows of {found['hidden_size']} elements[/], eps {found['eps']:g}, "
        f"on {measured_on(found)}"
    )
    words = Table.grid(padding=(0, 2))
    words.add_row("rounds", "the intermediate results that are rounded")
    words.add_row("max, mean", "error in ulp of y's dtype, against float64 that is rounded once")
    if wide:
        words.add_row(", ".join(CLASSES), "the number of elements with such an error; 0 is the nearest number")
    else:
        words.add_row("nearest", "elements without an error: y is the nearest number")
    words.add_row("runs", f"of {found['runs']} equal calls: the number that return other bits than the first")
    words.add_row(
        "batches", f"of {len(found['batches'])} sizes, 1 to {found['rows']} rows: those that change a row's bits"
    )
    if counts:
        words.add_row("threads", f"of {', '.join(map(str, counts))}: the number that return other bits than one thread")
    console.print(words)
    for dtype, group in itertools.groupby(found["findings"], key=lambda finding: finding.dtype):
        table = Table(title=dtype, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        for title in ("implementation", "rounds"):
            table.add_column(title, overflow="fold")
        for title in ("max", "mean", *(CLASSES if wide else ("nearest",))):
            table.add_column(title, justify="right", no_wrap=True)
        for title in ("runs", "batches", "threads"):
            table.add_column(title, no_wrap=True)
        for finding in group:
            if finding.error:
                table.add_row(finding.name, finding.rounds, "[red]failed[/]")
                continue
            changes = finding.differing_threads
            elements = found["rows"] * found["hidden_size"]
            hundredths = 10_000 * finding.histogram[CLASSES[0]] // elements  # of a percent; 100% means all
            table.add_row(
                finding.name,
                finding.rounds,
                str(finding.max_ulp),
                f"{finding.mean_ulp:.5f}",
                *(map(str, finding.histogram.values()) if wide else [f"{hundredths / 100:.2f}%"]),
                _sameness(finding.differing_runs, found["runs"] - 1),
                _sameness(len(finding.differing_batches), len(found["batches"])),
                "-" if changes is None else _sameness(len(changes), len(counts) - 1),
            )
        console.print(table)
    facts = Table.grid(padding=(0, 2))
    for finding in found["findings"]:
        if finding.error:
            facts.add_row(f"{finding.name}, {finding.dtype}", f"[red]failed[/]: {escape(finding.error)}")
    for name, reason in found["missing"].items():
        facts.add_row(name, f"[yellow]not measured[/]: {escape(reason)}")
    for name, version in {finding.name: finding.version for finding in found["findings"]}.items():
        facts.add_row(name, escape(version))
    console.print(facts)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compares, prints, writes. Returns 1 if fusednorm itself failed, or if its bits changed."""
    asked = (arguments.peers, arguments.dtypes or DTYPES, arguments.hidden_size, arguments.device, arguments.op)
    with console.status("") as status:
        found = report(*asked, starting=status.update)
    if not found["findings"] and not found["interrupted"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found["missing"].items())
        raise UnusableError(f"nothing was measured: none of the peers that --peers names is here: {reasons}")
    show(found, console, arguments.wide)
    if arguments.json_file:
        written = json.dumps(found, indent=1, default=dataclasses.asdict)
        Path(arguments.json_file).write_text(written, encoding="utf-8")
    if any(finding.name == "fusednorm" and not finding.constant for finding in found["findings"]):
        return 1
    if found["interrupted"]:
        console.print("interrupted: `compare --peers NAME` measures fewer implementations")
        return INTERRUPTED
    return 0
