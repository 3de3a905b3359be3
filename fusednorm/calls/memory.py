"""How rows lie in memory: the strides from row to row, and which operands share memory; and new memory for results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import Forward, Strides

try:
    _extension: Any = import_module("fusednorm._fast_path")
except ImportError:  # the cpu backend says why
    _extension = None

#: The strides of an operand that is absent.
ABSENT: Strides = (0, 0)


def new(shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A new contiguous tensor, which is to be written."""
    return _to_be_written(torch.empty(shape, dtype=dtype, device=device))


def new_like(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new contiguous tensor of the same shape, which is to be written."""
    if dtype is like.dtype and like.is_contiguous():
        return _to_be_written(torch.empty_like(like))  # which takes half as long as with arguments
    return _to_be_written(torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format))


def _to_be_written(tensor: Tensor) -> Tensor:
    """The tensor; of a large one on a CPU the first writes find huge pages, where Linux has them."""
    if type(tensor) is Tensor and tensor.is_cpu and _extension and tensor.nbytes >= _extension.NEW_BYTES:
        _extension.expect_writes(tensor.data_ptr(), tensor.nbytes)
    return tensor


class Rows(NamedTuple):
    """The rows of an operand: ``outer`` times ``inner`` of them, with their strides in elements."""

    outer: int
    inner: int
    outer_stride: int
    stride: int


def rows_of(tensor: Tensor) -> Rows | None:
    """The rows of a [..., N] tensor in one level or two, each row contiguous; None if they lie otherwise.

    Heads of a view into a tensor of q, k and v lie in two levels: one stride leads from token to token, and another
    from head to head.
    """
    contiguous = tensor.is_contiguous()  # as a tensor without rows is, whatever its strides
    if not contiguous and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        return None
    if tensor.is_neg():  # its memory holds the negatives
        return None
    *sizes, hidden = tensor.shape
    if contiguous:
        return Rows(1, tensor.numel() // hidden, 0, hidden)
    # As two_levels of one operand, which takes longer: this is a part of every call on views.
    inner, stride, outer, outer_stride = 1, hidden, 1, 0
    for size, step in zip(reversed(sizes), tensor.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if outer > 1:
            if step != outer * outer_stride:
                return None  # a third level
            outer *= size
        elif inner == 1:
            inner, stride = size, step
        elif step == inner * stride:
            inner *= size
        else:
            outer, outer_stride = size, step
    return Rows(outer, inner, outer_stride, stride)


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether kernels can read the rows of a tensor, because they lie in one level or two."""
    return (tensor.is_contiguous() and not tensor.is_neg()) or rows_of(tensor) is not None


def two_levels(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[int, list[Strides]] | None:
    """Rows of these sizes in two levels that hold for all operands: rows of the inner one, and the strides of each.

    None if one of the operands lies otherwise. ``strides``: those of each operand, as many as there are sizes.
    """
    if 0 in sizes:  # strides of no rows say nothing
        return 1, [(0, 0) for _ in strides]
    if len(sizes) == 1 and sizes[0] > 1:  # the usual case
        return sizes[0], [(0, step) for (step,) in strides]
    inner, outer = 1, 1
    steps = outer_steps = [0] * len(strides)
    for size, *here in zip(sizes[::-1], *(of_operand[::-1] for of_operand in strides), strict=True):
        if size == 1:
            continue
        if outer > 1:
            if here != [outer * step for step in outer_steps]:
                return None  # a third level
            outer *= size
        elif inner == 1:
            inner, steps = size, here
        elif here == [inner * step for step in steps]:
            inner *= size
        else:
            outer, outer_steps = size, here
    return inner, list(zip(outer_steps, steps, strict=True))


def all_in_memory(tensor: Tensor) -> bool:
    """Whether memory holds all elements of a tensor that has a storage, as those of tracers and sparse ones have not.

    A storage may have been freed or made shorter (FSDP does so between passes), and that of a ZeroTensor is empty.
    """
    elements = tensor.numel()
    if elements == 0 or not torch._C._has_storage(tensor):
        return True
    if not tensor.is_contiguous():
        elements = _extent(zip(tensor.stride(), tensor.shape, strict=True), 1)
    fits = (tensor.storage_offset() + elements) * tensor.itemsize <= tensor.untyped_storage().nbytes()
    return (fits and tensor.data_ptr() != 0) or tensor.is_meta


def packed(tensor: Tensor) -> Tensor:
    """The tensor if it is contiguous, else a copy that is."""
    return tensor.resolve_neg().contiguous() if tensor.is_neg() else tensor.contiguous()


class Layout(NamedTuple):
    """The rows of several operands, in levels that are the same for all."""

    #: Rows of the inner level.
    inner: int
    #: Of each operand; :data:`ABSENT` where it is None.
    strides: list[Strides]
    #: The operands that are only read.
    read: list[Any]


def in_levels(written: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> Layout | None:
    """How rows lie: of what is written, and then of what is only read, copied where its rows lie in other levels.

    None if rows that are written lie so that a kernel cannot write them.
    """
    found: list[Any] = [*written, *read]
    strides, apart, levels = [ABSENT] * len(found), [], None
    for place, tensor in enumerate(found):
        if tensor is None:
            continue
        if not tensor.is_contiguous() or tensor.is_neg():
            rows = rows_of(tensor)
            if rows is not None:
                apart.append((place, rows))
                if levels is None or rows.outer > 1 == levels.outer:
                    levels = rows
                continue
            if place < len(written):
                return None
            found[place] = tensor = packed(tensor)
        strides[place] = (0, tensor.shape[-1])
        last = tensor
    if levels is None:  # the usual case
        return Layout(last.numel() // last.shape[-1], strides, found[len(written) :])
    inner = levels.inner
    if levels.outer > 1:
        strides = [(inner * stride, stride) for _, stride in strides]
    for place, rows in apart:
        if rows.inner == inner:
            strides[place] = (rows.outer_stride, rows.stride)
        elif rows.outer == 1:
            strides[place] = (inner * rows.stride, rows.stride)
        elif place < len(written):
            return None
        else:
            found[place] = packed(found[place])
            size = found[place].shape[-1]
            strides[place] = (inner * size, size)
    return Layout(inner, strides, found[len(written) :])


@contextmanager
def in_one_level(call: Forward) -> Iterator[Forward]:
    """A call whose rows are all one stride apart, for a backend that takes no others.

    Operands whose rows lie in two levels are copied, and outputs are copied back when the block ends.
    """
    if call.inner == call.rows:
        yield call
        return
    names = ("x", "residual", "weight", "out", "residual_out")
    given = {name: tensor for name in names if (tensor := getattr(call, name)) is not None}
    copies = {name: tensor.contiguous() for name, tensor in given.items()}
    yield call._replace(**copies, inner=call.rows, strides=((0, call.hidden_size),) * 4)
    for name in ("out", "residual_out"):
        if name in given and copies[name] is not given[name]:
            given[name].copy_(copies[name])


class Memory(NamedTuple):
    """The memory of a tensor with at least one element: runs of adjacent elements, of equal length."""

    begin: int
    end: int
    #: Strides and sizes of the dimensions that lead from run to run, in bytes, the smallest stride first.
    levels: tuple[tuple[int, int], ...]
    #: The bytes of a run.
    run: int

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
        """The memory of a tensor."""
        begin, run = tensor.data_ptr(), tensor.itemsize
        if tensor.is_contiguous():
            return cls(begin, begin + tensor.numel() * run, (), tensor.numel() * run)
        levels: list[tuple[int, int]] = []
        dimensions = sorted(
            (s * tensor.itemsize, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
        )
        for stride, size in dimensions:
            if stride == run and not levels:
                run *= size
            else:
                levels.append((stride, size))
        return cls(begin, begin + _extent(levels, run), tuple(levels), run)

    def overlaps_itself(self) -> bool:
        """Whether two elements share memory."""
        before = [_extent(self.levels[:level], self.run) for level in range(len(self.levels))]
        if all(stride >= extent for (stride, _), extent in zip(self.levels, before, strict=True)):
            return False  # each level lies within the gaps of the next one: no need to look at every run
        return bool((self.runs().diff() < self.run).any())

    def runs(self) -> Tensor:
        """The addresses of the runs, in ascending order."""
        addresses = torch.tensor([self.begin])
        for stride, size in self.levels:
            addresses = (addresses.unsqueeze(-1) + torch.arange(size) * stride).flatten()
        return addresses.sort().values


def _extent(levels: Iterable[tuple[int, int]], run: int) -> int:
    """The bytes, or elements, from the first one of a run to behind the last one; strides and sizes lead to others."""
    return run + sum((size - 1) * stride for stride, size in levels)


def _apart(
    of_a: tuple[tuple[int, int], ...], of_b: tuple[tuple[int, int], ...], runs: tuple[int, int], distance: int
) -> bool:
    """Whether such levels surely share no byte, where one memory begins so far before the other."""
    if distance >= _extent(of_a, runs[0]) or -distance >= _extent(of_b, runs[1]):
        return True
    if not of_a or not of_b or of_a[-1][0] != of_b[-1][0]:
        return False
    step, a, b = of_a[-1][0], of_a[:-1], of_b[:-1]  # as columns of one matrix, which repeat after so many bytes
    if max(_extent(a, runs[0]), _extent(b, runs[1])) > step:
        return False
    return all(_apart(a, b, runs, place) for place in (distance % step, distance % step - step))


def share_memory(a: Memory, b: Memory) -> bool:
    """Whether any element of one tensor lies in the memory of another.

    Exact also for rows that interleave, such as two slices of the columns of one matrix.
    """
    if _apart(a.levels, b.levels, (a.run, b.run), b.begin - a.begin):
        return False  # no need to look at every run
    runs, others = a.runs(), b.runs()
    # Of the runs of `a` that begin before one of b ends, the last one reaches furthest.
    last = torch.searchsorted(runs, others + b.run) - 1
    return bool(((last >= 0) & (runs[last.clamp(min=0)] + a.run > others)).any())


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory."""
    return not tensor.is_contiguous() and Memory.of(tensor).overlaps_itself()
