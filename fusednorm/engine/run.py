"""Declared operations by a backend that has them in one call, else by their formulas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from fusednorm.calls.call import DeclaredCall, Flags, Step, Strides, operation_of, unusual
from fusednorm.calls.checks import check_kept
from fusednorm.calls.memory import in_levels, new, new_like, packed
from fusednorm.declare.declaration import Declaration, Role
from fusednorm.engine.choose import Chosen
from fusednorm.engine.execute import new_gradients, whole_of


class Kernel:
    """Calls of a declared operation, and of its gradient.

    Args:
        declaration: the operation.
        name: the operation's in calls; by default the declared one.
        step: the name in ``KNOWS`` of backends that have it; by default the declared one.
        known: the flags that such a backend knows; it is asked about others that are not at their usual values.
    """

    def __init__(self, declaration: Declaration, name: str = "", step: str = "", known: Sequence[str] = ()) -> None:
        self.declaration, self.name, self.step = declaration, name or declaration.name, step or declaration.name
        self._known = known
        self._operands = [operand.name for operand in declaration.operands]
        roles = {result.name: result.role for result in declaration.results}
        of_rows = (Role.ROWS, Role.SAMPLES)
        self._of_rows = [name for name, role in {**declaration.roles, **roles}.items() if role in of_rows]
        self._of_samples = [operand.name for operand in declaration.operands if operand.role is Role.SAMPLES]
        self._of_dtypes = {result.dtype for result in declaration.results}

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The results, as the formula returns them."""
        declaration, rows, count = self.declaration, arguments[0], len(self._operands)
        operands, flags = arguments[:count], arguments[count:]
        numbers = self._numbers(declaration.named(flags))
        backend = backend_of(rows, self.step, *self._unusual(numbers))
        if backend is None:
            return declaration.formula(*arguments)
        results = {
            result.name: new(
                declaration.shape(result.role, operands), declaration.dtype(result, operands, flags), rows.device
            )
            for result in declaration.results
        }
        named = self._with_rows(dict(zip(self._operands, operands, strict=True)), rows)
        make(backend, self.name, named, results, self._of_rows, numbers)
        return tuple(results.values())

    def run_gradient(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """The gradients, as the declared one returns them; where several operands have some, in one call."""
        declaration, needs = self.declaration, arguments[-1]
        if not any(needs):
            return (None,) * len(needs)
        tensors = dict(zip(declaration.backward_tensors, arguments, strict=False))
        incoming = {name: tensors.pop(name) for name in declaration.incoming}
        flags = dict(zip(declaration.gradient_flags, arguments[-1 - len(declaration.gradient_flags) :], strict=False))
        numbers = self._numbers(flags)
        backend = backend_of(tensors[self._operands[0]], f"{self.step}_backward", *self._unusual(numbers))
        if len(needs) > 1:
            several = self._gradients(backend, incoming, tensors, numbers, needs)
            return cast(Any, declaration.gradient)(*arguments) if several is None else several
        found = gradient(backend, self.name, incoming, tensors, self._of_rows, numbers)
        return cast(Any, declaration.gradient)(*arguments) if found is None else (found,)

    def _unusual(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        return unusual(flags, self.declaration.defaults, self._known)

    def _gradients(
        self,
        backend: Chosen | None,
        incoming: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        flags: Mapping[str, Any],
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of operands, each with the name of its operand behind a "d"; None: no backend has them."""
        if backend is None:
            return None
        with_gradient = [operand.name for operand in self.declaration.with_gradient]
        x = others[with_gradient[0]]
        check_kept([*incoming.values()], [*others.values()])
        found = new_gradients([others[name] for name in with_gradient], needs)
        if not x.numel():
            return tuple(t if t is None else t.zero_() for t in found)
        written = dict(zip([f"d{name}" for name in with_gradient], found, strict=True))
        read, of_rows = {**self._with_rows(others, x), **incoming}, {*self._of_rows, f"d{with_gradient[0]}"}
        # Each row of the gradient of what has samples is the sum over so many rows.
        sums = {f"d{name}": (x.numel() // others[name].numel(), x.shape[-1]) for name in self._of_samples}
        make(backend, self.name, read, written, of_rows, flags, True, strides=sums)
        return found

    def _with_rows(self, tensors: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """The operands, where those of samples have the shape of the rows, which then share memory."""
        found = dict(tensors)
        for name in self._of_samples:
            t = found[name]
            if t.shape != x.shape:
                found[name] = t.reshape(*t.shape[:-1], *[1] * (x.dim() - t.dim()), t.shape[-1]).expand(x.shape)
        return found

    def _numbers(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The flags but those that are dtypes of results."""
        return {name: value for name, value in flags.items() if name not in self._of_dtypes}


def backend_of(rows: Tensor, step: str, *unusual: str) -> Chosen | None:
    """The backend for such rows, if it has such a call, with the flags that are not at their usual values."""
    return whole_of(operation_of(rows, None, None, Flags()), Step(step).with_flags(*unusual))


def make(
    backend: Chosen,
    name: str,
    read: Mapping[str, Tensor | None],
    written: Mapping[str, Tensor | None],
    of_rows: Collection[str],
    flags: Mapping[str, Any],
    backward: bool = False,
    part: tuple[int, int] = (0, 0),
    strides: Mapping[str, Strides] = MappingProxyType({}),
) -> None:
    """Has a backend make a call; see :class:`DeclaredCall`. ``of_rows``: the names of tensors that have rows.

    ``strides``: those of other results, which have no rows of their own.
    """
    x = cast(Tensor, next(iter(read.values())))
    size, rows = x.shape[-1], x.shape[:-1].numel()
    if not rows:
        return
    those = [name for name, tensor in read.items() if tensor is not None and name in of_rows]
    layout: Any = in_levels((), [read[name] for name in those])
    tensors = {name: t if t is None or name in those else packed(t) for name, t in read.items()}
    new = dict.fromkeys((name for name in written if name in of_rows), (layout.inner * size, size))
    call = DeclaredCall(
        name=name,
        backward=backward,
        tensors={**tensors, **dict(zip(those, layout.read, strict=True)), **written},
        strides={**dict(zip(those, layout.strides, strict=True)), **new, **strides},
        flags=flags,
        hidden_size=size,
        rows=rows,
        inner=layout.inner,
        part=part,
    )
    (backend.backward if backward else backend.forward)(call)


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
    x = cast(Tensor, next(iter(others.values())))
    if backend is None:
        return None
    check_kept([*incoming.values()], [*others.values()])
    out = new_like(x, x.dtype)
    if any(d is not None and not d.numel() for d in incoming.values()):
        return out.zero_()
    make(backend, name, {**others, **incoming}, {"out": out}, {*of_rows, "out"}, flags, True, part)
    return out
