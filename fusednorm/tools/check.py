"""Whether every backend of this machine keeps the promises, bit for bit: ``python -m fusednorm check``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import fusednorm
from fusednorm.calls import process
from fusednorm.calls.bits import count_differing
from fusednorm.calls.devices import devices
from fusednorm.engine import choose
from fusednorm.operations.listed import Listed, every
from fusednorm.tools import doctor
from fusednorm.tools.console import progress
from fusednorm.tools.measure.clock import Clock, Contender, Run
from fusednorm.tools.measure.workloads import as_tuple

#: Hidden sizes of Qwen2-0.5B, Llama-3.2-1B, Llama-3-8B, Llama-2-13B and Llama-3-70B.
HIDDEN_SIZES = (896, 2048, 4096, 5120, 8192)
ROWS = (1, 16, 512)
#: The dtypes of x, and of the residual and the weight, by what the table calls them.
DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}
#: The operation that is compared at all shapes; it has gradients of x, the residual and the weight.
FUSED = every()["fused_add_rms_norm"]
#: The number of rows of a batch that are computed alone too.
ALONE = 5
#: Gradients are compared in batches of at most this many elements, because the reference takes long for them.
MOST_WITH_GRADIENTS = 1 << 19

#: The shape, rows and hidden size, whose time the short table shows.
TIMED = (1, 4096)
#: The comparisons of fused_add_rms_norm: the column of each in the table, and a sentence.
PROMISES = {
    "forward": "both outputs have the reference's bits",
    "fused": "both outputs have the bits of an addition and then an rms_norm",
    "row": "a row in a batch has the bits of the same row alone",
    "gradients": "the gradients of the smaller shapes have the reference's bits",
}


#: The rows and the hidden size at which all operations are compared.
OPERATIONS_SHAPE = (16, 4096)


class Subject(NamedTuple):
    """A backend on a device, with one of its variants if it has variants."""

    backend: str
    variant: str | None
    device: torch.device

    def __str__(self) -> str:
        name = self.backend if self.variant is None else f"{self.backend} {self.variant}"
        return name if self.device.type == "cpu" else f"{name} on {self.device}"


class Result(NamedTuple):
    """The result of one subject with one shape and one dtype."""

    subject: Subject
    dtype: str
    rows: int
    hidden_size: int
    #: The number of elements with other bits, for each of :data:`PROMISES` that was compared, or of an operation, by
    #: its name; empty if the backend refuses such calls.
    differing: dict[str, int]
    #: The time of a call with ``out=`` and ``residual_out=``; None if it was not timed.
    seconds: float | None = None


def subjects(backends: Iterable[str] | None = None) -> list[Subject]:
    """The subjects of this machine: each backend, on each of its devices, in each variant.

    The preferred backends come last, because a terminal shows the end of the table.
    """
    found = []
    infos = [info for info in fusednorm.backends() if info.available and (backends is None or info.name in backends)]
    for device in devices():
        for info in reversed(infos):
            if device.type in info.devices or "any" in info.devices:
                for variant in getattr(choose.load(info.name), "variants", lambda: (None,))():
                    found.append(Subject(info.name, variant, device))
    return found


def _forward(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    """Both outputs of the reference on the CPU, five rows at a time.

    The batches are small because the reference is checked too: its result must not depend on the batch.
    """
    batches = [slice(begin, begin + 5) for begin in range(0, len(x), 5)]
    parts = [fusednorm.fused_add_rms_norm(x[batch], residual[batch], weight) for batch in batches]
    return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]


def _outputs_and_gradients(listed: Listed, operands: Iterable[Tensor]) -> list[Tensor]:
    """The outputs of an operation; if it has gradients, outputs again where they are recorded, and exact gradients."""
    alone = as_tuple(listed.function(**listed.of_sample(*operands)))
    if not listed.differentiable:
        return [*alone]
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = as_tuple(listed.function(**listed.of_sample(*leaves)))
    if not listed.exact_gradients:
        return [*alone, *outputs]
    # Numbers that do not depend on an output: if it is wrong, gradients may still be right.
    incoming = [torch.linspace(-1, 1, output.numel()).view(output.shape).to(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, leaves, incoming, allow_unused=True)
    return [*alone, *outputs, *(gradient for gradient in gradients if gradient is not None)]


def _differing(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> int:
    return sum(count_differing(a.cpu(), e.cpu()) for a, e in zip(actual, expected, strict=True))


@contextmanager
def _on(subject: Subject) -> Iterator[None]:
    """Has the subject compute all calls."""
    with ExitStack() as stack:
        stack.enter_context(fusednorm.use_backend(subject.backend))
        stack.enter_context(process.waiting_for_kernels())
        if subject.variant is not None:
            backend: Any = choose.load(subject.backend)
            stack.enter_context(backend.use_variant(subject.variant))
        yield


def _result(subject: Subject, dtype: str, operands: list[Tensor], wanted: dict[str, Any], timed: bool) -> Result:
    """Runs one case on one subject. The operands, and the reference's results ``wanted``, are on the CPU."""
    x, residual, weight = (t.to(subject.device) for t in operands)
    y, total = torch.empty_like(x), torch.empty_like(residual)
    rows, hidden_size = x.shape

    def call() -> object:
        return fusednorm.fused_add_rms_norm(x, residual, weight, out=y, residual_out=total)

    seconds = None
    with _on(subject):
        try:
            call()
        except fusednorm.BackendError:  # another package's backend need not support every dtype
            return Result(subject, dtype, rows, hidden_size, {})
        sums = x + residual
        unfused = fusednorm.rms_norm(sums, weight, out=torch.empty_like(x))
        differing = {
            "forward": _differing((y, total), wanted["forward"]),
            "fused": _differing((y, total), (unfused, sums)),
            "row": 0,
        }
        if wanted["gradients"] is not None:
            found = _outputs_and_gradients(FUSED, (x, residual, weight))
            differing["gradients"] = _differing(found[-3:], wanted["gradients"])
        for row in {part * (len(x) - 1) // (ALONE - 1) for part in range(ALONE)}:
            one = slice(row, row + 1)
            alone = fusednorm.fused_add_rms_norm(x[one], residual[one], weight)
            differing["row"] += _differing(alone, (y[one], total[one]))
        if timed:
            clock = Clock(subject.device)
            clock.has_graphs = False
            microseconds = clock.timed([Run(Contender("out=", call, 0), call, [()])])[0]["eager"]
            seconds = (microseconds or 0.0) / 1e6
    return Result(subject, dtype, rows, hidden_size, differing, seconds)


def results(which: list[Subject], time_all: bool) -> Iterator[Result]:
    """Runs the check, case by case."""
    generator = torch.Generator().manual_seed(0)
    for dtype, hidden_size, rows in itertools.product(DTYPES, HIDDEN_SIZES, ROWS):
        operands = _operands(dtype, rows, hidden_size, generator)
        with fusednorm.use_backend("reference"):
            small = rows * hidden_size <= MOST_WITH_GRADIENTS
            gradients = _outputs_and_gradients(FUSED, operands)[-3:] if small else None
            wanted = {"forward": _forward(*operands), "gradients": gradients}
        for subject in which:
            yield _result(subject, dtype, operands, wanted, time_all or (rows, hidden_size) == TIMED)


def operations(which: list[Subject]) -> Iterator[Result]:
    """Runs the check of all operations."""
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        operands = _operands(dtype, *OPERATIONS_SHAPE, generator)
        for name, listed in every().items():
            with fusednorm.use_backend("reference"):
                wanted = _outputs_and_gradients(listed, operands)
            for subject in which:
                there = [t.to(subject.device) for t in operands]
                differing = {}
                with suppress(fusednorm.BackendError), _on(subject):  # see above
                    differing[name] = _differing(_outputs_and_gradients(listed, there), wanted)
                yield Result(subject, dtype, *OPERATIONS_SHAPE, differing)


def _operands(dtype: str, rows: int, hidden_size: int, generator: torch.Generator) -> list[Tensor]:
    """x, another tensor and a weight, on the CPU."""
    of_x, of_others = DTYPES[dtype]
    kinds = (((rows, hidden_size), of_x), ((rows, hidden_size), of_others), ((hidden_size,), of_others))
    return [torch.randn(shape, generator=generator).to(kind) for shape, kind in kinds]


def check(
    console: Console, backends: Iterable[str] | None = None, every_case: bool = False, report: str | None = None
) -> int:
    """Compares backends, by default all, with the reference, and prints a table.

    ``every_case``: with a line for each shape, in place of one for each backend and dtype. ``report``: a file for all
    results, as JSON, with the platform and its versions.

    Returns:
        The exit status: 1 on any difference, else 130 if the user interrupted the check.
    """
    which = subjects(backends)
    total = len(which) * len(DTYPES) * (len(HIDDEN_SIZES) * len(ROWS) + len(every()))
    done: list[Result] = []
    compared: list[Result] = []
    interrupted = False
    with progress(console) as bar:
        task = bar.add_task("checking", total=total)
        try:
            for found, kept in ((results(which, every_case), done), (operations(which), compared)):
                for result in found:
                    bar.update(task, advance=1, description=str(result.subject))
                    kept.append(result)
        except KeyboardInterrupt:
            interrupted = True
    done.sort(key=lambda result: which.index(result.subject))
    console.print(
        f"fused_add_rms_norm, {len(HIDDEN_SIZES) * len(ROWS)} shapes: {_listed(ROWS)} rows of\n"
        f"{_listed(HIDDEN_SIZES)} elements. mixed: x is bfloat16, the residual\nand the weight are float32."
    )
    for title, meaning in PROMISES.items():
        console.print(f"  {title:9}  {meaning}")
    console.print(_cases(done) if every_case else _summary(done))
    if compared:
        rows, hidden_size = OPERATIONS_SHAPE
        about = f"All operations, with their gradients, at {rows} rows of {hidden_size} elements:"
        console.print(about, ", ".join(every()), sep="\n", width=80)
        console.print(_operations(compared))
    taken = [any(result.differing.values()) for result in (*done, *compared) if result.differing]
    failures = sum(taken)
    for result in compared:
        for operation, count in result.differing.items():
            if count:
                name = escape(f"{result.subject}, {result.dtype}: {operation}")
                console.print(f"[red]{name}: {count} differ[/]")
    if failures:
        console.print(f"[red]{failures} of {len(taken)} cases have other bits[/]")
    elif not interrupted:
        console.print(f"[green]all {len(taken)} cases are exact[/]")
    if report is not None:
        _write(report, [*done, *compared], interrupted)
        console.print(f"{escape(report)} has the results: they say nothing of you, nor this machine's name")
    if interrupted:
        after = len(done) + len(compared)
        console.print(f"interrupted after {after} of {total} cases; `check --backend NAME` takes less time")
    return 1 if failures else 130 if interrupted else 0


def _write(path: str, results: Iterable[Result], interrupted: bool) -> None:
    """Writes a file with the platform and what differed there."""
    cases = [
        {
            "backend": one.subject.backend,
            "variant": one.subject.variant,
            "device": one.subject.device.type,
            "dtype": one.dtype,
            "rows": one.rows,
            "hidden_size": one.hidden_size,
            "differing": one.differing,
        }
        for one in results
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**doctor.platform_facts(), "interrupted": interrupted, "cases": cases}, file, indent=1)


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _verdict(good: int, of: int) -> str:
    return "-" if not of else f"[green]{good} exact[/]" if good == of else f"[red]{of - good} of {of} differ[/]"


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f} us"


def _summary(done: list[Result]) -> Table:
    """A line for each backend and dtype."""
    table = Table("backend", "dtype", *PROMISES, f"{TIMED[0]} x {TIMED[1]}", padding=(0, 1, 0, 0))
    table.columns[-1].justify = "right"
    for (subject, dtype), group in itertools.groupby(done, key=lambda result: result[:2]):
        cases = list(group)
        taken = [result.differing for result in cases if result.differing]
        counts = [[d[promise] for d in taken if promise in d] for promise in PROMISES]
        verdicts = [_verdict(count.count(0), len(count)) for count in counts]
        seconds = next((r.seconds for r in cases if (r.rows, r.hidden_size) == TIMED), None)
        table.add_row(escape(str(subject)), dtype, *verdicts, _microseconds(seconds))
    return table


def _operations(done: list[Result]) -> Table:
    """A line for each backend, with a column for each dtype."""
    table = Table("backend", *DTYPES, padding=(0, 1, 0, 0))
    for subject in dict.fromkeys(one.subject for one in done):
        taken = [(one.dtype, count) for one in done if one.subject == subject for count in one.differing.values()]
        counts = [[count for of, count in taken if of == dtype] for dtype in DTYPES]
        table.add_row(escape(str(subject)), *(_verdict(count.count(0), len(count)) for count in counts))
    return table


def _cases(done: list[Result]) -> Table:
    """A line for each case."""
    table = Table("backend", "dtype", "rows", "size", "bits", "time", padding=(0, 1, 0, 0))
    for column in (2, 3, 5):
        table.columns[column].justify = "right"
    for result in done:
        wrong = [f"{promise}: {count} differ" for promise, count in result.differing.items() if count]
        bits = f"[red]{', '.join(wrong)}[/]" if wrong else "[green]exact[/]" if result.differing else "-"
        shape = str(result.rows), str(result.hidden_size)
        table.add_row(escape(str(result.subject)), result.dtype, *shape, bits, _microseconds(result.seconds))
    return table
