"""Times operations beside peers and a copy of the same bytes: ``python -m fusednorm bench``."""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import fusednorm
from fusednorm.calls.bits import count_differing
from fusednorm.declare.declaration import Role
from fusednorm.tools import doctor
from fusednorm.tools.cli import DTYPES, INTERRUPTED, UnusableError, shape
from fusednorm.tools.console import progress
from fusednorm.tools.measure import tables
from fusednorm.tools.measure.cells import CPU_SHAPES, GPU_SHAPES, IN_PLACE, Cell, Results
from fusednorm.tools.measure.clock import Clock, Contender, Run, copy, halves
from fusednorm.tools.measure.peers import COMPILED, EPS, Implementation, implementations, in_a_line
from fusednorm.tools.measure.workloads import GRADIENTS, as_tuple, every_measured

#: The most sets of a backward pass, because each holds a graph of autograd.
MOST_GRAPHS = 16

#: About the seconds of a cell for each contender, and the seconds that torch.compile compiles for a cell.
SECONDS, COMPILING = 0.5, 5.0

#: Bits are compared in this many rows at either end; gradients of this many rows are compared.
EDGE_ROWS, GRADIENT_ROWS = 32, 512

#: A contender rounds to the dtype of its operands so many times, at most, on the way to an element.
ROUNDINGS = 8


class WrongBitsError(Exception):
    """fusednorm's bits were not the specification's, so its speed does not matter."""


def ours(cell: Cell, weight: Tensor, backends: Sequence[str]) -> Iterator[Contender]:
    """fusednorm in each kind of call."""
    inputs, calls = len(cell.measured.inputs), cell.measured.calls(weight, EPS)
    for backend in backends:
        name = "fusednorm" if len(backends) == 1 else f"fusednorm {backend}"
        if not cell.backward:
            if calls.in_place is not None:
                yield Contender(name + IN_PLACE, calls.in_place, inputs, in_place=True, backend=backend)
            if calls.out is not None:
                yield Contender(f"{name} out=", calls.out, inputs + len(cell.measured.listed.results), backend=backend)
        yield Contender(name, calls.new, inputs, backend=backend)


def theirs(cell: Cell, weight: Tensor, implementations: Iterable[Implementation]) -> Iterator[Contender]:
    """The peers that have the operation."""
    for peer in implementations:
        build = peer.of(cell.forward_op)
        if build is not None and (peer.gradients or not cell.backward):
            in_place = peer.in_place and bool(cell.measured.written)
            name = peer.name + IN_PLACE if in_place else peer.name
            yield Contender(name, build(weight, EPS), len(cell.measured.inputs), in_place, peer.gradients)


def _edges(tensor: Tensor) -> Tensor:
    """Selects the rows whose bits are compared."""
    return tensor if len(tensor) <= 2 * EDGE_ROWS else torch.cat((tensor[:EDGE_ROWS], tensor[-EDGE_ROWS:]))


def _share(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The share of elements with other bits."""
    pairs = [(a.detach().cpu(), b) for a, b in zip(got, wanted, strict=True)]
    return sum(count_differing(a, b) for a, b in pairs) / sum(b.numel() for _, b in pairs)


def _outputs(contender: Contender, operands: tuple[Tensor, ...], written: Sequence[int]) -> list[Tensor]:
    """The compared rows of the outputs. A call in place writes them to the operands at these places."""
    given = [t.clone() for t in operands[: contender.takes]]
    with contender.requested():
        result = contender.call(*given)
    return [_edges(t) for t in ([given[at] for at in written] if contender.in_place else as_tuple(result))]


def _something_else(got: Iterable[Tensor], exact: Iterable[Tensor], cell: Cell) -> str | None:
    """Says by how much outputs are off, if that is more than roundings explain.

    A sum of N numbers in float32 has an error of at most N units of 2^-24, and each rounding to a dtype one of half an
    eps. All are taken of the largest number. Of 8-bit numbers the last rounding may go to either side: a whole eps.
    """
    roundings = ROUNDINGS * torch.finfo(getattr(torch, cell.dtype)).eps / 2
    roundings += cell.hidden_size * torch.finfo(torch.float32).eps / 2
    for number, (one, right) in enumerate(zip(got, exact, strict=True), 1):
        kind = one.dtype
        last = (
            0.0 if kind.itemsize > 1 else torch.finfo(kind).eps if kind.is_floating_point else 1 / torch.iinfo(kind).max
        )
        one, right = one.detach().cpu().double().view(right.shape), right.double()
        off, largest = (one - right).abs().max().item(), right.abs().max().item()
        if not off <= (roundings + last) * largest:
            return (
                f"result {number} is off by {off:.3g}, where the largest is {largest:.3g}: it computes something else"
            )
    return None


def _gradients(outputs: Any, leaves: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of x, the residual or the gate, and the weight if there is one, from those of the outputs."""
    return torch.autograd.grad(outputs, leaves, given, retain_graph=True)


def _differentiated(
    contender: Contender, operands: Iterable[Tensor], weight: Tensor, rows: int | None = None
) -> tuple[Any, ...]:
    """Calls forward with so many rows, or with all; returns the arguments of :func:`_gradients`."""
    x, residual, *given = (t[:rows] for t in operands)
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
        self.missing: dict[str, str] = {}
        self.peers = list(implementations(peers, device, self.missing))
        import torch._functorch.config as functorch  # here: no other command needs it

        # A benchmark differentiates a graph more than once, and compiles for every shape.
        functorch.donated_buffer = False

    def machine(self) -> dict[str, Any]:
        """The facts that runs must have in common to share a file."""
        peers = {peer.name: peer.version for peer in self.peers}
        more = {"backends": list(self.backends), "peers": peers}
        return doctor.facts(self.device, "triton", "instruction_set") | more

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

    def _inputs(self, cell: Cell) -> list[Tensor]:
        """The inputs; of gradients, as many tensors as a call reads and writes."""
        generator = torch.Generator().manual_seed(0)

        def of_role(role: Role) -> Tensor:
            if role in (Role.IDS, Role.CHOSEN):
                return torch.randint(cell.hidden_size, (cell.rows,), generator=generator)
            shapes = {Role.ROWS: (cell.rows, cell.hidden_size), Role.SAMPLES: (1, cell.hidden_size)}
            return torch.randn(shapes.get(role, (cell.rows,)), generator=generator).to(getattr(torch, cell.dtype))

        gradients = [Role.ROWS] * GRADIENTS[cell.op][1] if cell.backward else ()
        return [of_role(role).to(self.device) for role in gradients or cell.measured.inputs.values()]

    def _sets(self, cell: Cell, inputs: list[Tensor], wanted: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Sets of the inputs, and of tensors for the outputs, such as those that are wanted of some rows."""
        count = self.clock.sets(cell.nbytes)
        if cell.backward:
            return [tuple(t.clone() for t in inputs) for _ in range(min(count, MOST_GRAPHS))]
        outputs = [torch.empty(cell.rows, *t.shape[1:], dtype=t.dtype, device=self.device) for t in wanted]
        return [tuple(t.clone() for t in (*inputs, *outputs)) for _ in range(count)]

    def _expected(self, cell: Cell, operands: list[Tensor], weight: Tensor) -> list[Tensor]:
        """The reference's results, on the CPU."""
        if not cell.backward:
            return self._reference(cell, [t.cpu() for t in operands], weight.cpu())
        leaf = weight.detach().cpu().requires_grad_(cell.measured.weighted)
        contender = Contender("reference", cell.measured.calls(leaf, EPS).new, len(cell.measured.inputs))
        with fusednorm.use_backend("reference"):
            return list(_gradients(*_differentiated(contender, [t.cpu() for t in operands], leaf, GRADIENT_ROWS)))

    def _exact(self, cell: Cell, operands: list[Tensor], weight: Tensor) -> list[Tensor]:
        """The outputs in float64, on the CPU."""
        in_float64 = [t.cpu().double() if t.is_floating_point() else t.cpu() for t in operands]
        return self._reference(cell, in_float64, weight.cpu().double())

    @torch.no_grad()
    def _reference(self, cell: Cell, operands: list[Tensor], weight: Tensor) -> list[Tensor]:
        """The reference's outputs of the compared rows."""
        given = map(_edges, operands[: len(cell.measured.inputs)])
        with fusednorm.use_backend("reference"):
            return list(as_tuple(cell.measured.calls(weight, EPS).new(*given)))

    def measure(self, cell: Cell, starting: Callable[[str], object] = str) -> dict[str, dict[str, Any]]:
        """Contender -> "eager" and, on a GPU, "graph": microseconds of a call from Python, and within a CUDA graph.

        Also "differing": the share of elements with other bits than the reference's. A contender that fails, or that
        computes something else, has only an "error". ``starting`` is called with a description of each step.

        Raises:
            WrongBitsError: fusednorm's bits are not the reference's.
        """
        backward = cell.backward
        inputs = self._inputs(cell)
        weight = torch.linspace(0.5, 1.5, cell.hidden_size).to(getattr(torch, cell.dtype)).to(self.device)
        wanted, exact = self._expected(cell, inputs, weight), self._exact(cell, inputs, weight)
        sets = self._sets(cell, inputs, wanted)
        weight.requires_grad_(backward and cell.measured.weighted)
        found: dict[str, dict[str, Any]] = {}
        runs: list[Run] = []
        with torch.set_grad_enabled(backward):
            for contender in (*ours(cell, weight, self.backends), *theirs(cell, weight, self.peers)):
                starting(f"{contender.name} {'compiles' if contender.name == COMPILED else 'is compared'}")
                try:
                    outputs = _outputs(contender, sets[0], cell.measured.written)
                    if contender.backend is None and (wrong := _something_else(outputs, exact, cell)):
                        found[contender.name] = {"error": wrong}
                        continue
                    if backward:
                        got: Iterable[Tensor] = _gradients(*_differentiated(contender, sets[0], weight, GRADIENT_ROWS))
                        run = Run(contender, _gradients, [_differentiated(contender, given, weight) for given in sets])
                    else:
                        got = outputs
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
            # A copy writes to what it moves, and ids must stay places of elements.
            moved = [[t.clone() if t.dtype == torch.int64 else t for t in given] for given in sets]
            runs.append(Run(Contender("copy", copy, len(sets[0])), copy, list(map(halves, moved))))
            starting("all are timed")
            for run, times in zip(runs, self.clock.timed(runs), strict=True):
                found.setdefault(run.contender.name, {}).update(times)
        return found


#: The measurements of `bench --quick`.
QUICK = {"dtypes": ("bfloat16",), "ops": ("add_norm",), "shapes": ("1x4096", "32x4096", "2048x4096")}
#: Those of `bench --by-operation`.
BY_OPERATION = {
    "dtypes": ("bfloat16", "float32"),
    "ops": tuple(every_measured()),
    "shapes": ("1x4096", "32x4096", "512x4096"),
}


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Times, prints, writes; returns the exit status.

    Raises:
        WrongBitsError: fusednorm's bits were not the reference's; there are no further times.
        UnusableError: the file has other figures, or nothing was measured.
    """
    on_cpu = arguments.device.type == "cpu"
    by_default: dict[str, Sequence[str]] = {"dtypes": DTYPES, "ops": ("add_norm", "backward")}
    by_default["shapes"] = CPU_SHAPES if on_cpu else GPU_SHAPES
    by_default |= QUICK if arguments.quick else BY_OPERATION if arguments.by_operation else {}
    measurement = Bench(arguments.device, arguments.backends, arguments.peers)
    results = Results(measurement.machine(), arguments.json_file)
    threads = torch.get_num_threads() if on_cpu else None
    wanted = [
        Cell(op, dtype, rows, hidden_size, threads)
        for op, dtype, (rows, hidden_size) in itertools.product(
            arguments.ops or by_default["ops"],
            arguments.dtypes or by_default["dtypes"],
            arguments.shapes or map(shape, by_default["shapes"]),
        )
    ]
    say = functools.partial(console.print, markup=False)
    for cell in wanted:
        if not cell.possible:
            say(f"{cell}: not measured: its rows do not consist of whole groups")
    wanted = [cell for cell in wanted if cell.possible]
    todo = [cell for cell in wanted if cell not in results]
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} were measured before")
    if todo:
        at_most = f", at most {arguments.minutes:g}" if arguments.minutes else ""
        minutes = max(1, round(measurement.minutes(len(todo))))
        say(f"{len(todo)} to measure: about {minutes} minute{'s' * (minutes > 1)}{at_most}")
    stop = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    measured = 0
    interrupted = False
    with progress(console) as bar:
        task = bar.add_task("a large copy", total=len(todo))
        try:
            results.found["copy_bandwidth"] = results.found["copy_bandwidth"] or measurement.copy_bandwidth()
            for cell in itertools.takewhile(lambda _: time.monotonic() <= stop, todo):

                def starting(doing: str, cell: Cell = cell) -> None:
                    bar.update(task, description=f"{cell}: {doing}")

                try:
                    times = measurement.measure(cell, starting)
                    results.add(cell, times)
                    if not console.is_terminal:  # then no bar says how far it is, and a run that is killed, nothing
                        say(tables.in_a_line(cell, times), soft_wrap=True)
                except torch.OutOfMemoryError:
                    bar.console.print(f"{cell}: does not fit the memory")
                measured += 1
                bar.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    if results.found["cells"]:
        tables.show(results.found, console, arguments.wide, arguments.by_operation)
    elif not interrupted:
        raise UnusableError("nothing was measured: no shape fitted the memory or the minutes")
    for name, reason in measurement.missing.items():
        say(f"{name}: not measured: {reason}")
    if measured < len(todo):
        why = "interrupted" if interrupted else "the minutes are over"
        again = "the same command continues" if arguments.json_file else "with --json FILE the next run would continue"
        say(f"{why}: {len(todo) - measured} of {len(wanted)} were left out; {again}")
    return INTERRUPTED if interrupted else 0
