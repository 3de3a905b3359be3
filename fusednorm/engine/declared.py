"""Declared operations by a backend that has them in one call, else by their formulas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from fusednorm.calls.call import DeclaredCall, Flags, Step, operation_of, unusual
from fusednorm.calls.checks import check_kept
from fusednorm.calls.declared import Declaration, Role
from fusednorm.calls.memory import in_levels, new, new_like, packed
from fusednorm.engine.choose import Chosen
from fusednorm.engine.execute import whole_of


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
        self._of_rows = [name for name, role in {**declaration.roles, **roles}.items() if role is Role.ROWS]
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
        named = dict(zip(self._operands, operands, strict=True))
        make(backend, self.name, named, results, self._of_rows, numbers)
        return tuple(results.values())

    def run_gradient(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """The gradient, as the declared one returns it, of an operation in which one operand has a gradient."""
        declaration, (needed,) = self.declaration, arguments[-1]
        if not needed:
            return (None,)
        tensors = dict(zip(declaration.backward_tensors, arguments, strict=False))
        incoming = {name: tensors.pop(name) for name in declaration.incoming}
        flags = dict(zip(declaration.gradient_flags, arguments[-1 - len(declaration.gradient_flags) :], strict=False))
        numbers = self._numbers(flags)
        backend = backend_of(arguments[0], f"{self.step}_backward", *self._unusual(numbers))
        found = gradient(backend, self.name, incoming, tensors, self._of_rows, numbers)
        return cast(Any, declaration.gradient)(*arguments) if found is None else (found,)

    def _unusual(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        return unusual(flags, self.declaration.defaults, self._known)

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
    written: Mapping[str, Tensor],
    of_rows: Collection[str],
    flags: Mapping[str, Any],
    backward: bool = False,
    part: tuple[int, int] = (0, 0),
) -> None:
    """Has a backend make a call; see :class:`DeclaredCall`. ``of_rows``: the names of tensors that have rows."""
    x = cast(Tensor, next(iter(read.values())))
    size, rows = x.shape[-1], x.shape[:-1].numel()
    if not rows:
        return
    those = [name for name, tensor in read.items() if tensor is not None and name in of_rows]
    layout: Any = in_levels((), [read[name] for name in those])
    tensors = {name: t if t is None or name in those else packed(t) for name, t in read.items()}
    strides = dict.fromkeys((name for name in written if name in of_rows), (layout.inner * size, size))
    call = DeclaredCall(
        name=name,
        backward=backward,
        tensors={**tensors, **dict(zip(those, layout.read, strict=True)), **written},
        strides={**dict(zip(those, layout.strides, strict=True)), **strides},
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
