"""Public functions of declared operations: checks, overrides, listeners, gradients, outputs, and twins in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import Flags
from fusednorm.calls.checks import check_apart, check_flags, check_operands, check_output, refuse_grad
from fusednorm.calls.must_be_seen import Listener
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.operator import Operator, as_new

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Of a public function.
Results = TypeVar("Results")


class Operation(Operator):
    """A declared operation that public functions call; see :class:`fusednorm.torch_ops.operator.Operator`."""

    #: As :attr:`fusednorm.operations.listed.Listed.steps`; none: a call of its own, or torch's operations compute it.
    steps = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        #: Its public functions, by name. The name of one that works in place ends in an underscore.
        self.functions: dict[str, Callable[..., Any]] = {}

    def of_parts(self, *arguments: Any) -> tuple[Tensor, ...] | None:
        """The results for DTensors whose rows lie in parts, where ranks have a way to leave them there."""
        return None

    def public(self, function: _Function) -> _Function:
        """Adds a function that users call, with operands, flags and outputs of the declared names."""
        self.functions[function.__name__] = function
        PUBLIC[function] = self
        return function

    @exact
    def __call__(self, name: str, **arguments: Any) -> Results:  # type: ignore[type-var]
        """The results of the public function of that name, one or a tuple as it says; see the function for errors.

        ``arguments``: all operands, the flags that the function has, and the outputs that it takes.
        """
        declaration = self.declaration
        operands = {operand.name: arguments[operand.name] for operand in declaration.operands}
        given = {result.name: arguments.get(result.name) for result in declaration.returned}
        every = (*operands.values(), *given.values())
        listener = must_be_seen.listener(*every)
        if listener is Listener.OVERRIDE:
            return cast(Results, must_be_seen.handed_over(self.functions[name], every, arguments))
        in_place = name.endswith("_")
        if in_place:
            given = {result.name: operands[result.overwrites or ""] for result in declaration.returned}
        outputs = tuple(t for t in given.values() if t is not None)
        tensors, seen = tuple(operands.values()), listener is Listener.DISPATCHER
        flags = tuple(arguments.get(flag, default) for flag, default in declaration.defaults.items())
        if listener is Listener.TRANSFORM:
            flags = declaration.rounded(tensors, flags)
        elif not is_dynamo_compiling():
            flags = declaration.checked(tensors, flags, in_memory=not seen)
        records = is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if outputs:
            self._check_outputs(given, operands, flags, in_place, apart=listener is None)
            if records or (is_grad_enabled() and any(t.requires_grad for t in outputs)):
                refuse_grad(name)
        if seen:
            found = None if is_dynamo_compiling() else self.of_parts(*tensors, *flags)
            found = self.dispatched(*tensors, *flags) if found is None else found
        elif records or listener is Listener.TRANSFORM:
            found = cast(Any, self.recorded).apply(*tensors, *flags)
        else:
            found = self.run(*tensors, *flags)
            found = found if outputs else as_new(found, tensors)  # outputs take copies
        found = found if isinstance(found, tuple) else (found,)
        results = tuple(dtensor_bridge.written(t, new) for t, new in zip(given.values(), found, strict=False))
        return cast(Results, results[0] if len(results) == 1 else results)

    def _check_outputs(
        self,
        given: Mapping[str, Tensor | None],
        operands: Mapping[str, Tensor | None],
        flags: tuple[Any, ...],
        in_place: bool,
        apart: bool,
    ) -> None:
        """That outputs have the shapes and dtypes of results, and, in memory, share none with others."""
        declaration, called = self.declaration, {}
        rows_name, rows = next(iter(operands.items()))
        for result in declaration.returned:
            tensor = given[result.name]
            name = (result.overwrites or "") if in_place else result.name
            shape = declaration.shape(result.role, [*operands.values()])
            dtype = declaration.dtype(result, [*operands.values()], flags)
            check_output(name, tensor, list(shape), dtype, cast(Tensor, rows), rows_name)
            called[name] = tensor
        if apart:
            own = {result.name: (result.overwrites,) for result in declaration.returned if result.overwrites}
            check_apart(called, operands, None if in_place else own)


def dtype_of(out: Tensor | None, out_dtype: torch.dtype | None, rows: Tensor, name: str) -> torch.dtype | None:
    """``out_dtype``, or the dtype of the output that the caller gave for these rows, which is checked."""
    if out is None:
        return out_dtype
    check_operands(rows, None, None, out, None, in_memory=False, x_name=name)
    check_flags(Flags(out_dtype=out_dtype), rows, None, out, None, x_name=name)
    return out.dtype


#: The declared operation of each public function that calls one.
PUBLIC: dict[Any, Operation] = {}
