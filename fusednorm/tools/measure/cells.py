"""Times operations, one shape after another, beside peers and a copy of the same bytes."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import fusednorm
from fusednorm.tools import doctor
from fusednorm.tools.measure.peers import COMPILED, Implementation, MissingError, implementations, in_a_line
from fusednorm.tools.measure.workloads import GRADIENTS, OPERATIONS, Measured, as_tuple

CPU_SHAPES = (
    *("1x896", "1x2048", "1x4096", "1x8192", "1x16384", "8x4096", "32x4096", "128x4096", "512x4096", "2048x4096"),
    *("4096x8192", "65536x64", "8192x128", "64x65536"),
)
GPU_SHAPES = tuple(
    f"{rows}x{size}"
    for size in (128, 896, 2048, 4096, 5120, 7168, 8192, 16384, 65536)
    for rows in (1, 16, 64, 512, 4096, 16384, 65536)
)
EPS = 1e-6

#: The suffix of the names of contenders that work in place.
IN_PLACE = " in place"

#: From this spread on the figures of a shape are not to be trusted.
DISTURBED = 1.5

#: All contenders take this many turns; a figure is the median. A turn is many calls, for about TURN_SECONDS.
ROUNDS = 9
TURN_SECONDS = 0.002
#: On a CPU, operands of more than HOT_BYTES come in sets that together exceed every cache, as in a model.
HOT_BYTES, COLD_BYTES = 16 << 20, 512 << 20
#: On a GPU the sets exceed its cache TIMES_GPU_CACHE times; there are at most MOST_SETS.
TIMES_GPU_CACHE, MOST_SETS = 4, 256
#: The least number of calls in a CUDA graph; it has one with each set if there are more sets.
LEAST_IN_GRAPH = 8
#: The most sets of a backward pass, because each holds a graph of autograd.
MOST_GRAPHS = 16
#: About the seconds of a cell for each contender, and the seconds that torch.compile compiles for a cell.
SECONDS, COMPILING = 0.5, 5.0
#: Bits are compared in this many rows at either end; gradients of this many rows are compared.
EDGE_ROWS, GRADIENT_ROWS = 32, 512


class WrongBitsError(Exception):
    """fusednorm's bits were not the specification's, so its speed does not matter."""


class Contender(NamedTuple):
    """One kind of call of one implementation."""

    name: str
    #: Takes the inputs and the tensors for the outputs, or the first `takes` of these.
    call: Callable[..., Any]
    takes: int
    in_place: bool = False
    gradients: bool = True
    #: The backend of fusednorm to request.
    backend: str | None = None

    def requested(self) -> ExitStack:
        """A context that requests its backend, if it has one."""
        stack = ExitStack()
        if self.backend is not None:
            stack.enter_context(fusednorm.use_backend(self.backend))
        return stack


class Run(NamedTuple):
    """A timed call, and the sets of operands that take turns."""

    contender: Contender
    call: Callable[..., Any]
    operands: list[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The measurement of one row of a table."""

    op: str
    dtype: str
    rows: int
    hidden_size: int
    #: torch's number of threads, on a CPU.
    threads: int | None

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.rows}x{self.hidden_size}{doctor.of_threads(self.threads)}"

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
        return OPERATIONS[self.forward_op]

    @property
    def possible(self) -> bool:
        """Whether rows consist of whole groups, if they are quantized in groups."""
        quantization = self.measured.quantization
        return quantization is None or self.hidden_size % quantization.group(self.hidden_size) == 0

    @property
    def nbytes(self) -> int:
        """The bytes of the large operands that a call reads and writes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        elements = self.rows * self.hidden_size
        return (
            elements * itemsize * GRADIENTS[self.op][1] if self.backward else self.measured.nbytes(elements, itemsize)
        )


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_graphs = device.type == "cuda"
        if device.type != "cpu":
            properties = torch.get_device_module(device).get_device_properties(device)
            self.cache_bytes = getattr(properties, "L2_cache_size", 0) or 64 << 20

    def synchronise(self) -> None:
        """Waits until the device has finished."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The time until the work is finished."""
        self.synchronise()
        begin = time.perf_counter()
        run()
        self.synchronise()
        return time.perf_counter() - begin

    def sets(self, nbytes: int) -> int:
        """The number of sets of operands that take turns, each of this many bytes."""
        if self.device.type == "cpu":
            return 1 if nbytes <= HOT_BYTES else max(2, COLD_BYTES // nbytes)
        return max(1, min(MOST_SETS, -(-TIMES_GPU_CACHE * self.cache_bytes // nbytes)))

    def captured(self, call: Callable[..., Any], operands: list[tuple[Any, ...]]) -> Callable[[], object]:
        """Captures one call with each set of operands in a CUDA graph."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call(*operands[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for given in operands:
                call(*given)
        return graph.replay


def halves(operands: Iterable[Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Pairs of parts of contiguous operands: of the first half of all bytes, and where in the second half it goes."""
    flat = [operand.flatten().view(torch.uint8) for operand in operands]
    half = sum(map(len, flat)) // 2
    begins = list(itertools.accumulate(map(len, flat), initial=0))
    borders = sorted({begin % half for begin in begins[:-1]} | {0, half})

    def part(begin: int, end: int) -> Tensor:
        of = bisect.bisect_right(begins, begin) - 1
        return flat[of][begin - begins[of] : end - begins[of]]

    return tuple((part(a, b), part(half + a, half + b)) for a, b in itertools.pairwise(borders))


def copy(*pairs: tuple[Tensor, Tensor]) -> None:
    """Moves as many bytes as a call."""
    for source, target in pairs:
        target.copy_(source)


def ours(cell: Cell, weight: Tensor, backends: Sequence[str]) -> Iterator[Contender]:
    """fusednorm in each kind of call."""
    inputs, calls = cell.measured.inputs, cell.measured.calls(weight, EPS)
    for backend in backends:
        name = "fusednorm" if len(backends) == 1 else f"fusednorm {backend}"
        if not cell.backward:
            if calls.in_place is not None:
                yield Contender(name + IN_PLACE, calls.in_place, inputs, in_place=True, backend=backend)
            if calls.out is not None:
                yield Contender(f"{name} out=", calls.out, inputs + cell.measured.returned, backend=backend)
        yield Contender(name, calls.new, inputs, backend=backend)


def theirs(cell: Cell, weight: Tensor, implementations: Iterable[Implementation]) -> Iterator[Contender]:
    """The peers that have the operation."""
    for peer in implementations:
        build = peer.of(cell.forward_op)
        if build is not None and (peer.gradients or not cell.backward):
            in_place = peer.in_place and bool(cell.measured.written)
            name = peer.name + IN_PLACE if in_place else peer.name
            yield Contender(name, build(weight, EPS), cell.measured.inputs, in_place, peer.gradients)


def _edges(tensor: Tensor) -> Tensor:
    """Selects the rows whose bits are compared."""
    return tensor if len(tensor) <= 2 * EDGE_ROWS else torch.cat((tensor[:EDGE_ROWS], tensor[-EDGE_ROWS:]))


def _share(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The share of elements with other bits."""
    pairs = [(a.detach().cpu(), b) for a, b in zip(got, wanted, strict=True)]
    return sum(doctor.count_differing(a, b) for a, b in pairs) / sum(b.numel() for _, b in pairs)


def _first_rows(operands: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Selects the rows whose gradients are compared."""
    return tuple(t[:GRADIENT_ROWS] for t in operands)


def _outputs(contender: Contender, operands: tuple[Tensor, ...], written: Sequence[int]) -> list[Tensor]:
    """The compared rows of the outputs. A call in place writes them to the operands at these places."""
    given = [t.clone() for t in operands[: contender.takes]]
    with contender.requested():
        result = contender.call(*given)
    return [_edges(t) for t in ([given[at] for at in written] if contender.in_place else as_tuple(result))]


def _gradients(outputs: Any, leaves: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of x, the residual or the gate, and the weight if there is one, from those of the outputs."""
    return torch.autograd.grad(outputs, leaves, given, retain_graph=True)


def _differentiated(contender: Contender, operands: tuple[Tensor, ...], weight: Tensor) -> tuple[Any, ...]:
    """Calls forward; returns the arguments of :func:`_gradients`."""
    x, residual, *given = operands
    leaves = (x.detach().requires_grad_(), residual.detach().requires_grad_(), *[weight] * weight.requires_grad)
    with contender.requested():
        outputs = as_tuple(contender.call(*leaves[:2]))
    return outputs, leaves, tuple(given[: len(outputs)])


class Bench:
    """Measures cells on one device, with the available peers.

    Args:
        device: as torch names it.
        backends: fusednorm's backends to time; None means the one that calls take.
        peers: keys of :data:`fusednorm.tools.measure.peers.PEERS`.
    """

    def __init__(self, device: torch.device, backends: Iterable[str] | None, peers: Iterable[str]) -> None:
        self.clock = Clock(device)
        self.device = device
        operand = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
        chosen = fusednorm.explain(operand, operand, operand[0]).backend
        self.backends = tuple(backends or (chosen,))
        self.peers: list[Implementation] = []
        self.missing: dict[str, str] = {}
        for name in peers:
            try:
                self.peers += implementations(name, device)
            except MissingError as reason:
                self.missing[name] = str(reason)
        import torch._functorch.config as functorch  # here: no other command needs it

        # A benchmark differentiates a graph more than once, and compiles for every shape.
        functorch.donated_buffer = False

    def machine(self) -> dict[str, Any]:
        """The facts that runs must have in common to share a file."""
        found = doctor.report()
        names = ("fusednorm", "spec", "python", "torch", "triton", "system", "processor", "instruction_set")
        where = doctor.device_name(self.device)
        peers = {peer.name: peer.version for peer in self.peers}
        return {**{n: found.get(n) for n in names}, "device": where, "backends": list(self.backends), "peers": peers}

    def minutes(self, count: int) -> float:
        """About how long this many cells take."""
        contenders = 4 + len(self.peers)
        compiled = any(peer.name == COMPILED for peer in self.peers)
        return count * (SECONDS * contenders + COMPILING * compiled) / 60

    def copy_bandwidth(self) -> float:
        """The bytes per second that a copy of a gibibyte (on a CPU a quarter of that) reads and writes."""
        source = torch.zeros((1 << 28) >> (2 if self.device.type == "cpu" else 0), device=self.device)
        target = torch.empty_like(source)
        seconds = [self.clock.seconds(lambda: target.copy_(source)) for _ in range(10)]
        return 2 * source.nbytes / statistics.median(seconds[1:])

    def _operands(self, cell: Cell) -> list[tuple[Tensor, ...]]:
        """Sets of the inputs, and of tensors for the outputs or as many gradients as a call reads and writes."""
        dtype = getattr(torch, cell.dtype)
        count = self.clock.sets(cell.nbytes)
        if cell.backward:
            count = min(count, MOST_GRAPHS)
        generator = torch.Generator().manual_seed(0)
        first = [
            torch.randn(cell.rows, cell.hidden_size, generator=generator).to(dtype).to(self.device)
            for _ in range(GRADIENTS[cell.op][1] if cell.backward else cell.measured.inputs)
        ]
        if not cell.backward:
            first += cell.measured.empty_outputs(first[0])
        return [tuple(t.clone() for t in first) for _ in range(count)]

    def _expected(self, cell: Cell, operands: tuple[Tensor, ...], weight: Tensor) -> list[Tensor]:
        """The reference's results, on the CPU."""
        on_cpu = [t.cpu() for t in operands]
        leaf = weight.detach().cpu()
        operation = cell.measured
        with fusednorm.use_backend("reference"):
            if not cell.backward:
                edges = [_edges(t) for t in on_cpu[: operation.inputs]]
                return list(as_tuple(operation.calls(leaf, EPS).new(*edges)))
            leaf.requires_grad_(operation.weighted)
            contender = Contender("reference", operation.calls(leaf, EPS).new, operation.inputs)
            return list(_gradients(*_differentiated(contender, _first_rows(on_cpu), leaf)))

    def measure(self, cell: Cell, starting: Callable[[str], object] = str) -> dict[str, dict[str, Any]]:
        """Contender -> "eager" and, on a GPU, "graph": microseconds of a call from Python, and within a CUDA graph.

        Also "differing": the share of elements with other bits than the reference's. A contender that fails has only an
        "error". ``starting`` is called with a description of each step.

        Raises:
            WrongBitsError: fusednorm's bits are not the reference's.
        """
        backward = cell.backward
        sets = self._operands(cell)
        weight = torch.linspace(0.5, 1.5, cell.hidden_size).to(getattr(torch, cell.dtype)).to(self.device)
        wanted = self._expected(cell, sets[0], weight)
        weight.requires_grad_(backward and cell.measured.weighted)
        found: dict[str, dict[str, Any]] = {}
        runs: list[Run] = []
        with torch.set_grad_enabled(backward):
            for contender in (*ours(cell, weight, self.backends), *theirs(cell, weight, self.peers)):
                starting(f"{contender.name} {'compiles' if contender.name == COMPILED else 'is compared'}")
                try:
                    if backward:
                        got: Iterable[Tensor] = _gradients(*_differentiated(contender, _first_rows(sets[0]), weight))
                        run = Run(contender, _gradients, [_differentiated(contender, given, weight) for given in sets])
                    else:
                        got = _outputs(contender, sets[0], cell.measured.written)
                        run = Run(contender, contender.call, [given[: contender.takes] for given in sets])
                except Exception as error:  # a peer's code may raise anything, which is then its result
                    if contender.backend is not None:
                        raise
                    found[contender.name] = {"error": in_a_line(error)}
                    continue
                differing = _share(got, wanted)
                if contender.backend is not None and differing:
                    raise WrongBitsError(
                        f"{cell}: {contender.name} does not have the reference's bits; nothing was timed"
                    )
                found[contender.name] = {"differing": differing}
                runs.append(run)
            runs.append(Run(Contender("copy", copy, len(sets[0])), copy, [halves(given) for given in sets]))
            starting("all are timed")
            for run, times in zip(runs, self._timed(runs), strict=True):
                found.setdefault(run.contender.name, {}).update(times)
        return found

    def _timed(self, runs: list[Run]) -> list[dict[str, float | None]]:
        """The medians over the rounds, of eager calls and of calls within a graph; and the spread of the eager ones."""
        counts, replays = [], []
        for contender, call, operands in runs:
            with contender.requested():
                call(*operands[0])
                once = self.clock.seconds(functools.partial(call, *operands[-1]))
                counts.append(max(3, min(1000, int(TURN_SECONDS / once))))
                if self.clock.has_graphs:
                    replays.append(self.clock.captured(call, operands * -(-LEAST_IN_GRAPH // len(operands))))
        eager: list[list[float]] = [[] for _ in runs]
        graph: list[list[float]] = [[] for _ in replays]
        for _ in range(ROUNDS):
            for at, (contender, call, operands) in enumerate(runs):
                given = list(itertools.islice(itertools.cycle(operands), counts[at]))
                with contender.requested():
                    # The first call meets the caches and the allocator as another contender left them.
                    call(*operands[0])
                    eager[at].append(self.clock.seconds(functools.partial(_turn, call, given)) / len(given) * 1e6)
                if replays:
                    captured = len(operands) * -(-LEAST_IN_GRAPH // len(operands))
                    replays[at]()
                    graph[at].append(self.clock.seconds(replays[at]) / captured * 1e6)
        graphs = map(statistics.median, graph) if graph else [None] * len(runs)
        return [
            {"eager": statistics.median(values), "graph": in_graph, "spread": spread(values)}
            for values, in_graph in zip(eager, graphs, strict=True)
        ]


def spread(values: list[float]) -> float:
    """The third quartile over the first: half of all rounds lie as far apart, or further."""
    low, _, high = statistics.quantiles(values, n=4)
    return high / low


def _turn(call: Callable[..., Any], given: list[tuple[Any, ...]]) -> None:
    for operands in given:
        call(*operands)


class Results:
    """The cells of one or several runs, written to a file one by one.

    Args:
        machine: the facts that all of them have in common, see :meth:`Bench.machine`.
        path: a JSON file's; None means that nothing is written.

    Raises:
        ValueError: the file has figures of another machine, other versions or other contenders.
    """

    def __init__(self, machine: dict[str, Any], path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.found: dict[str, Any] = {"machine": machine, "copy_bandwidth": None, "cells": []}
        if self.path is not None and self.path.exists():
            self.found = load(self.path)
            if changed := [name for name in machine if self.found["machine"].get(name) != machine[name]]:
                name = changed[0]
                raise ValueError(
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
        ValueError: the file has other contents.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json {path} is no JSON: {error}; name another file, or remove this one") from None
    if not isinstance(found, dict) or not {"machine", "copy_bandwidth", "cells"} <= found.keys():
        raise ValueError(f"--json {path} was not written by `python -m fusednorm bench`: name another file")
    return found


def figure(times: dict[str, Any]) -> str:
    """Microseconds of a call and, on a GPU, of a call within a graph, with about three digits."""
    if "error" in times:
        return "failed"
    values = [value for value in (times["eager"], times["graph"]) if value is not None]
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def share(cell: dict[str, Any], name: str) -> float | None:
    """The speed over that of a copy of as many bytes; None for one row, because the call takes most of its time."""
    times = cell["contenders"][name]
    if cell["rows"] == 1 or "error" in times:
        return None
    clock = "eager" if times["graph"] is None else "graph"
    ratio: float = cell["contenders"]["copy"][clock] / times[clock]
    return ratio


def base(cell: dict[str, Any], name: str) -> str:
    """fusednorm's contender with which a peer is compared: of the first backend, in place if the peer is."""
    first: str = next(contender for contender in cell["contenders"] if contender.startswith("fusednorm"))
    plain = first.removesuffix(IN_PLACE)
    return plain + IN_PLACE if name.endswith(IN_PLACE) else plain


def ratio(cell: dict[str, Any], name: str) -> float | None:
    """A peer's time over fusednorm's, on a GPU within a graph; None if it failed."""
    times, ours = cell["contenders"][name], cell["contenders"][base(cell, name)]
    if "error" in times:
        return None
    clock = "eager" if times["graph"] is None else "graph"
    quotient: float = times[clock] / ours[clock]
    return quotient


def show(found: dict[str, Any], console: Console, wide: bool = False) -> None:
    """Prints the figures, in a table for each operation, dtype and number of threads.

    Args:
        found: :attr:`Results.found`.
        console: receives them, in 80 columns for up to six contenders.
        wide: print microseconds of every contender and its share of a copy's speed, as Markdown.
    """
    if wide:
        console.width = max(console.width, 150)
    machine = found["machine"]
    bandwidth = f"; a large copy moves {found['copy_bandwidth'] / 1e9:.1f} GB/s" if found["copy_bandwidth"] else ""
    on_gpu = machine["device"] != "cpu"
    unit = "a call / within a CUDA graph" if on_gpu else "a call"
    console.print(f"{doctor.measured_on(machine)}, torch {machine['torch']}{bandwidth}", highlight=False)
    if wide:
        console.print(f"microseconds of {unit} (share of the speed of a copy of as many bytes)", highlight=False)
    else:
        console.print(f"fusednorm, copy (of as many bytes): microseconds of {unit}", highlight=False)
        console.print("others: how many times as long as fusednorm they take", highlight=False)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in found["cells"]:
        groups.setdefault((cell["op"], cell["dtype"], cell["threads"]), []).append(cell)
    for (op, dtype, threads), cells in groups.items():
        console.print(f"\n[bold]{op}, {dtype}{doctor.of_threads(threads)}[/]", highlight=False)
        names = list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))
        if wide:
            console.print()
            doctor.print_markdown(_wide(cells, names), console)
        else:
            console.print(_ratios(cells, names), highlight=False)
    _show_facts(found, console)


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
            facts.add_row(name, f"has other bits than fusednorm in up to {part:.2%} of the elements of a shape")
    console.print()
    console.print(facts, highlight=False)
