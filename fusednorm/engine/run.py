"""Runs a declared operation, or its gradient: by a backend that has it in one call, else by its formula."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import Tensor

from fusednorm.calls.call import Call, KindOfCall, Step, Strides
from fusednorm.calls.checks import check_kept
from fusednorm.calls.memory import in_levels, new, new_like, packed
from fusednorm.declare.declaration import Role
from fusednorm.declare.plan import Flags, Operands, Plan
from fusednorm.engine.choose import Chosen
from fusednorm.engine.run_norms import chosen_for, launch, new_gradients

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def forward(
    plan: Plan, operands: Operands, flags: Flags, outputs: Mapping[str, Tensor] = _NOTHING, keep: bool = True
) -> tuple[Tensor, ...]:
    """The results of checked operands in memory, as the formula returns them.

    ``outputs``: memory that the caller gave for results, by name. A result is in it if a kernel can write it; else it
    is a new tensor. ``keep``: whether results are wanted that only gradients take; else they may be left out.
    """
    declaration = plan.declaration
    if declaration.check_values is not None:
        declaration.check_values(**operands, **flags)
    rows: Any = operands[plan.rows]
    if plan.kernel is not None and plan.kernel.run is not None:
        return plan.kernel.run(plan, operands, flags, outputs, keep)
    backend = backend_of(rows, plan.step_of(flags)) if plan.kernel else None
    if backend is None or plan.kernel is None:
        return as_new(declaration.formula(**operands, **flags), operands.values())
    keep_all = keep or getattr(backend, "fast_path", None) != "cpu"  # kernels for GPUs and Triton's write all
    results = _new_results(plan, operands, flags, outputs, keep_all)
    read, written = {**plan.read, **operands}, {**plan.results_of_calls, **results}
    fresh = plan.results_with_rows if not outputs else [name for name in plan.results_with_rows if name not in outputs]
    laid = _laid_beside_shared(plan, read, written, plan.operands_with_rows, fresh, (*outputs,))
    if laid is None:  # a kernel cannot write where the caller wants it
        return forward(plan, operands, flags, keep=keep)
    size = rows.shape[-1]
    call = Call(
        plan.kernel.name,
        False,
        laid.tensors,
        laid.strides,
        plan.of_calls(flags),
        size,
        rows.numel() // size if plan.matrix is None or cast(Tensor, operands[plan.matrix]).numel() else 0,
        laid.inner,
    )
    launch(backend, call, (*outputs.values(),))
    for result in declaration.results if plan.copied else ():
        if result.copy_of:
            copied = results[result.copy_of]
            results[result.name] = copied.clone() if keep else copied
    return tuple([results[result.name] for result in (declaration.results if keep else declaration.returned)])


def _new_results(
    plan: Plan, operands: Operands, flags: Flags, outputs: Mapping[str, Tensor], keep: bool
) -> dict[str, Tensor]:
    """Memory for the results that a kernel writes: the caller's, or new."""
    rows, results = cast(Tensor, operands[plan.rows]), {}
    for name, like_rows, shape, dtype in plan.written if keep else plan.written_for_callers:
        given = outputs.get(name)
        if given is not None:
            results[name] = given
        elif like_rows:
            results[name] = new_like(rows, dtype(operands, flags))
        else:
            results[name] = new(shape(operands), dtype(operands, flags), rows.device)
    return results


def backward(plan: Plan, given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients, as the declared function returns them.

    Args:
        plan: the operation's.
        given: its arguments but needs, by name.
        needs: whether each operand that may have a gradient needs it.
    """
    declaration = plan.declaration
    if not any(needs):
        return (None,) * len(needs)
    incoming = [given[name] for name in declaration.incoming]
    operands = [given[name] for name in plan.operands]
    x = given[plan.rows]
    flags = {flag: given[flag] for flag in plan.gradient_flags}
    backend = backend_of(x, plan.step_of(flags, backward=True)) if plan.kernel else None
    if backend is None or plan.kernel is None:
        return cast(Any, declaration.gradient)(**given, needs=needs)  # type: ignore[no-any-return]
    check_kept(incoming, [*operands, *[given[result.name] for result in declaration.kept]])
    found = new_gradients([given[name] for name in plan.with_gradient], needs)
    if not x.numel():
        return tuple(t if t is None else t.zero_() for t in found)
    written = dict(zip(plan.gradients, found, strict=True))
    tensors = {name: given[name] for name in declaration.backward_tensors}
    read = {name: tensors.get(name) for name in (*plan.read_again, *plan.incoming)}
    rows = [name for name in plan.of_rows if read.get(name) is not None]
    laid = cast(Any, _laid_beside_shared(plan, read, written, rows, plan.gradients_with_rows))
    sums = {}
    for name, role in plan.shared.items():
        t = given[name]
        if t is not None and role is not Role.TABLE:  # of heads, each of which has a weight, rows lie apart
            of_heads = role is Role.WEIGHT and t.dim() > 1
            sums[f"d{name}"] = (x.numel() // t.numel(), t.shape[0] if of_heads else 1)
    size = x.shape[-1]
    call = Call(
        name=plan.kernel.name,
        backward=True,
        tensors=laid.tensors,
        strides=laid.strides,
        flags=plan.of_calls(flags),
        hidden_size=size,
        rows=x.numel() // size,
        inner=laid.inner,
        sums=sums,
    )
    launch(backend, call)
    return found


def backend_of(rows: Tensor, step: Step) -> Chosen | None:
    """The backend of calls of such rows; None: the formula serves them."""
    return chosen_for(KindOfCall(rows.device, rows.dtype, rows.shape[-1], step))


def _laid_beside_shared(
    plan: Plan,
    read: Mapping[str, Any],
    written: Operands,
    rows: Sequence[str],
    fresh: Sequence[str],
    given: Sequence[str] = (),
) -> Laid | None:
    """:func:`laid_out`, where weights, tables and what samples have got a row for each row, which share memory."""
    shared = [name for name in plan.shared if read[name] is not None]
    x = read[plan.rows]
    shape = x.shape
    if [read[name].shape for name in shared] == [shape] * len(shared):
        return laid_out(read, written, (*rows, *shared), fresh, given)
    if plan.shares_samples:
        laid = _beside_samples(read, written, x, shared, rows, fresh, given)
        if laid is not None:
            return laid
    expanded = dict(read)
    for name in shared:
        t, role = read[name], plan.shared[name]
        if role is Role.TABLE:
            t = t.unsqueeze(-2)
        elif role is Role.SAMPLES:
            for _ in range(x.dim() - t.dim()):
                t = t.unsqueeze(-2)
        expanded[name] = t.expand(*shape[:-1], t.shape[-1])
    return laid_out(expanded, written, (*rows, *shared), fresh, given)


def _beside_samples(
    read: Mapping[str, Any],
    written: Operands,
    x: Tensor,
    shared: Sequence[str],
    rows: Sequence[str],
    fresh: Sequence[str],
    given: Sequence[str],
) -> Laid | None:
    """The usual case: rows lie in one level, and the rows of a sample, equally many for all, are the inner one of two.

    None in any other.
    """
    elements = {read[name].numel() for name in shared}
    if len(elements) > 1 or 0 in elements or (per_sample := x.numel() // elements.pop()) == 1:
        return None
    laid = laid_out(read, written, rows, fresh, given)
    size = x.shape[-1]
    if laid is None or laid.inner != x.numel() // size:
        return None
    strides = {name: (per_sample * step, step) for name, (_, step) in laid.strides.items()}
    strides.update(dict.fromkeys(shared, (size, 0)))  # laid_out has packed them
    return Laid(laid.tensors, strides, per_sample)


class Laid(NamedTuple):
    """The tensors of a call, of which those with rows lie in levels of strides that are the same for all."""

    tensors: dict[str, Tensor | None]
    strides: dict[str, Strides]
    inner: int


def laid_out(
    read: Mapping[str, Tensor | None],
    written: Mapping[str, Tensor | None],
    rows: Sequence[str],
    fresh: Sequence[str] = (),
    given: Sequence[str] = (),
) -> Laid | None:
    """The tensors of a call as kernels take them; None if they cannot write the rows.

    Args:
        read: what the call reads, by name.
        written: what it writes.
        rows: the names of what it reads that has rows. Rows that lie otherwise are copied.
        fresh: the names of new results that have rows.
        given: the names of results whose memory the caller gave.
    """
    layout = in_levels([written[name] for name in given], [read[name] for name in rows])
    if layout is None:
        return None
    inner, levels, copies = layout
    tensors = {**read, **written}
    strides = dict(zip((*given, *rows), levels, strict=True))
    for name, tensor in zip(rows, copies, strict=True):
        tensors[name] = tensor
    if len(rows) < len(read):
        for name, tensor in read.items():
            if tensor is not None and name not in strides:
                tensors[name] = packed(tensor)
    for name in fresh:
        result = written[name]
        if result is not None:
            size = result.shape[-1]
            strides[name] = (inner * size, size)
    return Laid(tensors, strides, inner)


def make(
    backend: Chosen,
    name: str,
    read: Mapping[str, Tensor | None],
    written: Mapping[str, Tensor | None],
    of_rows: Collection[str],
    flags: Mapping[str, Any],
    backward: bool = False,
    part: tuple[int, int] = (0, 0),
) -> None:
    """Has a backend make a call, all of whose results are new.

    Args:
        backend: the backend.
        name: the operation's, in calls.
        read: see :func:`laid_out`; the rows first.
        written: the same.
        of_rows: the same.
        flags: those of the call.
        backward: whether it is the gradient.
        part: as in :class:`fusednorm.call.Call`.
    """
    x = cast(Tensor, next(iter(read.values())))
    rows = [of for of, tensor in read.items() if tensor is not None and of in of_rows]
    laid = cast(Any, laid_out(read, written, rows, [of for of in written if of in of_rows]))
    call = Call(
        name=name,
        backward=backward,
        tensors=laid.tensors,
        strides=laid.strides,
        flags=flags,
        hidden_size=x.shape[-1],
        rows=x.shape[:-1].numel(),
        inner=laid.inner,
        part=part,
    )
    launch(backend, call)


def gradient(
    backend: Chosen | None,
    name: str,
    incoming: Mapping[str, Tensor | None],
    others: Mapping[str, Tensor | None],
    of_rows: Collection[str],
    flags: Mapping[str, Any],
    part: tuple[int, int] = (0, 0),
) -> Tensor | None:
    """The gradient of the first of the others, which the forward pass took or returned; None: no backend has it."""
    first = next(iter(others))
    x = cast(Tensor, others[first])
    if backend is None:
        return None
    check_kept([*incoming.values()], [*others.values()])
    out = new_like(x, x.dtype)
    if any(d is not None and not d.numel() for d in incoming.values()):
        return out.zero_()
    make(backend, name, {**others, **incoming}, {f"d{first}": out}, {*of_rows, f"d{first}"}, flags, True, part)
    return out


def as_new(found: Sequence[Tensor], operands: Collection[Any]) -> tuple[Tensor, ...]:
    """Contiguous results, none of which is an operand, another result or a view, to which torch refuses some writes."""
    before = [id(t) for t in operands]
    new = []
    for tensor in found:
        result = tensor.contiguous()
        new.append(result.clone() if id(result) in before or result._is_view() else result)
        before.append(id(new[-1]))
    return tuple(new)
