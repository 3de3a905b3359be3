"""Times calls on a device, and moves bytes to compare with."""

from __future__ import annotations

import bisect
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusednorm

#: All contenders take this many turns; a figure is the median. A turn is many calls, for about TURN_SECONDS.
ROUNDS = 9
TURN_SECONDS = 0.002
#: On a CPU, operands of more than HOT_BYTES come in sets that together exceed every cache, as in a model.
HOT_BYTES, COLD_BYTES = 16 << 20, 512 << 20
#: On a GPU the sets exceed its cache TIMES_GPU_CACHE times; there are at most MOST_SETS.
TIMES_GPU_CACHE, MOST_SETS = 4, 256
#: The least number of calls in a CUDA graph; it has one with each set if there are more sets.
LEAST_IN_GRAPH = 8


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

    def requested(self) -> AbstractContextManager[object]:
        """A context that requests its backend, if it has one."""
        return nullcontext() if self.backend is None else fusednorm.use_backend(self.backend)


class Run(NamedTuple):
    """A timed call, and the sets of operands that take turns."""

    contender: Contender
    call: Callable[..., Any]
    operands: list[tuple[Any, ...]]


class Clock:
    """Times calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_graphs = device.type == "cuda"

    def synchronise(self) -> None:
        """Waits until the device has finished."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The time until the work is finished; of one thread its time on the processor, without that of others."""
        now = time.thread_time if self.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self.synchronise()
        begin = now()
        run()
        self.synchronise()
        return now() - begin

    def sets(self, nbytes: int) -> int:
        """The number of sets of operands that take turns, each of this many bytes."""
        if self.device.type == "cpu":
            return 1 if nbytes <= HOT_BYTES else max(2, COLD_BYTES // nbytes)
        properties = torch.get_device_module(self.device).get_device_properties(self.device)
        cache_bytes = getattr(properties, "L2_cache_size", 0) or 64 << 20
        return max(1, min(MOST_SETS, -(-TIMES_GPU_CACHE * cache_bytes // nbytes)))

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

    def timed(self, runs: list[Run]) -> list[dict[str, float | None]]:
        """The medians over the rounds, of eager calls and of calls within a graph; and the spread of the eager ones."""
        counts, replays = [], []
        for contender, call, operands in runs:
            with contender.requested():
                call(*operands[0])
                once = self.seconds(functools.partial(call, *operands[-1]))
                counts.append(max(3, min(1000, int(TURN_SECONDS / once))))
                if self.has_graphs:
                    replays.append(self.captured(call, operands * -(-LEAST_IN_GRAPH // len(operands))))
        eager: list[list[float]] = [[] for _ in runs]
        graph: list[list[float]] = [[] for _ in replays]
        for _ in range(ROUNDS):
            for at, (contender, call, operands) in enumerate(runs):
                given = list(itertools.islice(itertools.cycle(operands), counts[at]))
                with contender.requested():
                    # The first call meets the caches and the allocator as another contender left them.
                    call(*operands[0])
                    eager[at].append(self.seconds(functools.partial(_turn, call, given)) / len(given) * 1e6)
                if replays:
                    captured = len(operands) * -(-LEAST_IN_GRAPH // len(operands))
                    replays[at]()
                    graph[at].append(self.seconds(replays[at]) / captured * 1e6)
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
