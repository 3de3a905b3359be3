"""A backend that no test of ours has run on such a platform proves itself: docs/backends.md, Self-check.

The first call of each kind is made twice with rows that are generated here, once by the backend and once by the
specification's formulas on the CPU. Where their bits differ, the caller's call goes elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fusednorm.backends.kernel_keys import kind_of
from fusednorm.calls import process
from fusednorm.calls.bits import count_differing
from fusednorm.calls.call import AnyCall, Call, Quantize
from fusednorm.calls.process import BackendError
from fusednorm.engine import by_formula
from fusednorm.engine.requested import request

if TYPE_CHECKING:
    from fusednorm.engine.backend import Backend

#: Calls of more elements are checked by their first rows, columns or queries.
MOST = 1 << 22

#: So many products of a query and a key, or of rows and columns, are computed by the formula at most.
_MOST_PRODUCTS = 1 << 26

#: Every row of results is made of many rows, of which one with a NaN would hide all others.
_MIXED = ("attention", "paged_attention")

#: Rows are of so many sorts; fewer rows are generated again, until each sort was there.
_SORTS = 9

#: By the backend's name: the kinds of calls that were compared, each with whether the bits were the reference's.
compared: dict[str, dict[tuple[Any, ...], bool]] = {}

#: The command for a user who was warned.
REPORT = "python -m fusednorm check --report FILE"


def _nothing(call: AnyCall) -> None:
    """Checks nothing: for a backend whose fast path makes no call that the backend has not made."""


class SelfChecked:
    """A backend whose first call of each kind is compared with the formulas."""

    def __init__(self, name: str, backend: Backend, refuse: Callable[[str, AnyCall], None]) -> None:
        self._name, self._backend, self._refuse = name, backend, refuse
        self._compared = compared.setdefault(name, {})
        self.fast_path = getattr(backend, "fast_path", None)

    def forward(self, call: AnyCall) -> None:
        """Writes the results, the backend's or, if it has others than the reference, those of the formulas."""
        self._run(self._backend.forward, call)

    def backward(self, call: AnyCall) -> None:
        """Writes the gradients, in the same way."""
        self._run(self._backend.backward, call)

    def _run(self, function: Callable[[Any], None], call: AnyCall) -> None:
        note: Callable[[AnyCall], None] = getattr(self._backend, "note_checked", _nothing)
        if process.waiting():  # the caller compares, or measures
            note(call)
            function(call)
            return
        key = (kind_of(call), *(tensor.numel().bit_length() for tensor in tensors_of(call).values()))
        right = self._compared.get(key)
        if right is None and by_formula.has(call) and _may_be_generated(call):
            differing = self._differing(function, call)
            right = self._compared[key] = not differing
            if not right:
                self._refuse(self._name, call)
                self._warn(call, differing)
        if right is False:
            if request():
                raise BackendError(
                    f"the backend {self._name!r}, which was requested, returns other bits than the reference here; "
                    f"`{REPORT}` writes what to report, and another backend has the reference's bits"
                )
            by_formula.run(call)
            return
        if right:
            note(call)
        function(call)

    def _differing(self, function: Callable[[Any], None], call: AnyCall) -> list[str]:
        """The names of tensors that the backend left with other bits than the formulas did."""
        sorts = [None, *range(0, _SORTS, min(max(call.rows, 1), _SORTS))]
        if isinstance(call, Call) and call.name in _MIXED:
            sorts = [None]
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for sort in sorts:
                found, wanted = generated(call, sort)
                function(found)
                by_formula.run(wanted)
                names = zip(tensors_of(found).items(), tensors_of(wanted).values(), strict=True)
                differing = [name for (name, a), b in names if count_differing(a.cpu(), b)]
                if differing:
                    return differing
        return []

    def _warn(self, call: AnyCall, differing: list[str]) -> None:
        kind = kind_of(call)
        warnings.warn(
            f"the backend {self._name!r} has other bits than the reference here, in {', '.join(differing)} of "
            f"{kind.name}, hidden size {kind.hidden_size}: such calls go to the next backend. `{REPORT}` writes what "
            "to report; FUSEDNORM_SELF_CHECK=off would leave the wrong bits",
            RuntimeWarning,
            stacklevel=2,
        )


def _may_be_generated(call: AnyCall) -> bool:
    """Whether another call may be made: not while a graph is captured, and not for tensors without memory."""
    tensors = [*tensors_of(call).values()]
    if any(t.is_meta for t in tensors) or not call.rows:
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def tensors_of(call: AnyCall) -> dict[str, Tensor]:
    """The tensors of a call that there are, by name; those of a norm before a quantizer too."""
    found = {}
    if isinstance(call, Quantize) and call.norm is not None:
        found = {f"norm.{name}": t for name, t in tensors_of(call.norm).items()}
    given = call.tensors if isinstance(call, Call) else call._asdict()
    return found | {name: t for name, t in given.items() if isinstance(t, Tensor)}


def with_tensors(call: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The call with others in their place."""
    own = {name: t for name, t in tensors.items() if "." not in name}
    if isinstance(call, Call):
        return call._replace(tensors={**call.tensors, **own})
    if isinstance(call, Quantize) and call.norm is not None:
        of_norm = {name.removeprefix("norm."): t for name, t in tensors.items() if "." in name}
        call = call._replace(norm=with_tensors(call.norm, of_norm))
    return call._replace(**own)


def generated(call: AnyCall, sort: int | None = None) -> tuple[AnyCall, AnyCall]:
    """A call's kind with generated numbers, at most :data:`MOST`, on its device and once more on the CPU.

    Its tensors lie as the caller's do, and share memory as they do. ``sort``: of the first row; None: all are alike.
    """
    call = _cut(call)
    given, generator = tensors_of(call), torch.Generator().manual_seed(sort or 0)
    device = next(iter(given.values())).device
    made, memory = _like(given, torch.device("cpu"))
    for name, t in made.items():
        _fill(name.removeprefix("norm."), t, given[name], sort, generator)
    wanted = _on(with_tensors(call, made), torch.device("cpu"))
    for name, t in by_formula.kept_of(wanted).items():
        tensors_of(wanted)[name].copy_(t)
    there, memory_there = _like(given, device)
    for to, of in zip(memory_there, memory, strict=True):
        to.copy_(of)
    return with_tensors(call, there), wanted


def _on(call: Any, device: torch.device) -> Any:
    """The call, whose operation names the device."""
    if isinstance(call, Quantize) and call.norm is not None:
        return call._replace(norm=_on(call.norm, device))
    return call._replace(operation=call.operation._replace(device=device)) if hasattr(call, "operation") else call


def _like(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], list[Tensor]]:
    """New tensors, and the bytes of their memory: at such addresses, modulo 64, and sharing memory where these do."""
    begins = {name: t.data_ptr() for name, t in tensors.items()}
    ends = {name: begins[name] + _extent(t) * t.itemsize for name, t in tensors.items()}
    parts: list[tuple[int, int]] = []
    for begin, end in sorted((begins[name], ends[name]) for name in tensors):
        if parts and begin < parts[-1][1]:
            parts[-1] = (parts[-1][0], max(parts[-1][1], end))
        else:
            parts.append((begin, end))
    found, memories = {}, []
    for begin, end in parts:
        size = end - begin + 128
        # On a CPU an operand may begin between two elements, where no view of bytes could.
        buffer = bytearray(size) if device.type == "cpu" else None
        memory = torch.zeros(size, dtype=torch.uint8, device=device) if buffer is None else _of(buffer, torch.uint8)
        first = -memory.data_ptr() % 64 + begin % 64
        memories.append(memory[first : first + end - begin])
        for name, t in tensors.items():
            if begin <= begins[name] and ends[name] <= end and name not in found:
                offset = first + begins[name] - begin
                if buffer is not None:
                    found[name] = _of(buffer, t.dtype, offset).as_strided(t.shape, t.stride())
                else:
                    whole = memory[: size // 16 * 16].view(t.dtype)
                    found[name] = whole.as_strided(t.shape, t.stride(), offset // t.itemsize)
    return {name: found[name] for name in tensors}, memories


def _of(buffer: bytearray, dtype: torch.dtype, offset: int = 0) -> Tensor:
    count = (len(buffer) - offset) // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)


def _extent(t: Tensor) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


#: Operands that are greater than 0.
_POSITIVE = frozenset(("scale", "weight_scale", "temperature", "s"))


def _fill(name: str, t: Tensor, given: Tensor, sort: int | None, generator: torch.Generator) -> None:
    """Fills a tensor with numbers that meet every case of a kernel.

    Places, masks and lengths are the caller's: others would lead outside of the operands. Some ids are there twice.
    """
    if not t.numel():
        return
    for dim in range(t.dim()):  # rows that share memory are one
        if t.stride(dim) == 0:
            t, given = t.narrow(dim, 0, 1), given.narrow(dim, 0, 1)
    if t.dtype in (torch.int8, torch.uint8):
        t.copy_(torch.randint(-128, 128, t.shape, generator=generator))
    elif not t.dtype.is_floating_point:
        t.copy_(given)
        if name == "ids" and t.dim() > 1 and t.shape[-1] > 1:
            t[::2, ..., -1] = t[::2, ..., 0]
    elif t.dtype.itemsize == 1:
        t.view(torch.uint8).zero_()
    else:
        # Normal numbers again and again: a prime number of them, so that rows differ.
        some = torch.randn(min(t.numel(), 65_521), generator=generator, dtype=torch.float64)
        numbers = some.repeat(-(-t.numel() // some.numel()))[: t.numel()].view(t.shape)
        if name in _POSITIVE:
            numbers = numbers.abs() / 8 + 0.125
        elif sort is not None and t.dim() > 1:
            _of_sorts(numbers, sort, t.dtype)
        t.copy_(numbers)


def _of_sorts(numbers: Tensor, sort: int, dtype: torch.dtype) -> None:
    """Makes rows of normal numbers larger, subnormal, zeros or ties, or puts a NaN or infinities in them."""
    info, rows = torch.finfo(dtype), numbers.view(-1, numbers.shape[-1])

    def of(number: int) -> Tensor:
        return rows[(number - sort) % _SORTS :: _SORTS]

    of(1).mul_(info.max**0.5)
    of(2).mul_(info.tiny)
    of(3)[:, numbers.shape[-1] // 3] = torch.nan
    of(4)[:, numbers.shape[-1] // 2] = torch.inf
    of(4)[:, 0] = -torch.inf
    of(5).mul_(0.0)  # of either sign
    of(6).mul_(256).round_().mul_((1 + info.eps / 2) / 256)
    of(7).mul_(40)  # exponentials of such numbers are subnormal, or end
    of(8)[:, -1] = -torch.inf  # as masked logits


#: Operands that have no rows, though they may have as many parts as there are rows.
_WHOLE = ("weight", "bias", "first_weight", "dweight", "dbias", "q_weight", "k_weight", "weight_scale")


def _cut(call: Any) -> Any:
    """The call's first rows, so that no tensor has more elements than :data:`MOST`; of products the first columns."""
    if isinstance(call, Call) and call.name == "attention":
        return _last_queries(call)
    products = isinstance(call, Call) and call.name in ("linear", "int8_linear")
    if products:
        call = _first_columns(call)
    for dim in range(8):
        tensors = tensors_of(call)
        with_rows = [t for name, t in tensors.items() if name.removeprefix("norm.") not in _WHOLE]
        rows_of = max(with_rows, key=lambda t: (t.dim(), t.numel()))
        size = max(t.numel() for t in tensors.values())
        excess = size / MOST
        if products:
            excess = max(excess, call.rows * call.weight.numel() / _MOST_PRODUCTS)
        if excess <= 1 or dim >= rows_of.dim() - 1:
            break
        before = rows_of.shape[dim]
        after = max(int(before / excess), 1)
        whole = {*_WHOLE, *(("cos", "sin") if "positions" in tensors else ())}

        def has_rows(name: str, t: Tensor, dim: int = dim, before: int = before, whole: Any = whole) -> bool:
            return name.removeprefix("norm.") not in whole and t.dim() > dim and t.shape[dim] == before

        cut = {name: t.narrow(dim, 0, after) for name, t in tensors.items() if has_rows(name, t)}
        call = _with_rows(with_tensors(call, cut), call.rows // before * after)
    return call


def _with_rows(call: Any, rows: int) -> Any:
    """The call, which has so many rows now."""
    if isinstance(call, Quantize) and call.norm is not None:
        call = call._replace(norm=_with_rows(call.norm, rows))
    return call._replace(rows=rows, inner=rows if call.inner == call.rows or rows <= call.inner else call.inner)


def _first_columns(call: Call) -> Call:
    columns = max((MOST >> 2) // call.hidden_size, 1)
    if columns >= call.weight.shape[0]:
        return call
    of_columns = {
        name: t[:columns] for name, t in tensors_of(call).items() if name in ("weight", "weight_scale", "bias")
    }
    found: Call = with_tensors(call, {**of_columns, "out": call.out[..., :columns]})
    return found


def _last_queries(call: Call) -> Call:
    """The last queries of the first sequence."""
    tensors = tensors_of(call)
    sequences, heads, queries, size = call.q.shape
    products = heads * call.k.shape[2] * size
    last = max(min(queries, _MOST_PRODUCTS // max(products, 1)), 1)
    cut = {}
    for name, t in tensors.items():
        if t.dim() == 4:
            part = t[:1] if t.shape[0] == sequences else t
            of_queries = name in ("q", "out") or (name == "mask" and t.shape[2] == queries)
            cut[name] = part[:, :, queries - last :] if of_queries else part
    found: Call = _with_rows(with_tensors(call, cut), heads * last)
    return found
