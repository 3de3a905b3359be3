"""Public functions of declared operations: checks, overrides, listeners, gradients, outputs, and twins in place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import fast_path, must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import NARROW_FLOATS, Flags
from fusednorm.calls.checks import (
    check_apart,
    check_flags,
    check_floats,
    check_operands,
    check_output,
    refuse_grad,
    requires_grad,
)
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.declare.declaration import WITH_ROWS, Role
from fusednorm.declare.written import sorted_arguments, sorted_positions
from fusednorm.engine import run as engine
from fusednorm.operations.inference import add_operator
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.operator import Operator

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Of a public function.
Results = TypeVar("Results")


@dataclass(slots=True)
class Asked:
    """A call of a public function."""

    operands: dict[str, Any]
    flags: Mapping[str, Any]
    #: The memory that the caller gave for results, by their names.
    outputs: dict[str, Any]
    listener: Listener | None
    #: Whether that is memory of operands.
    in_place: bool

    @property
    def in_memory(self) -> bool:
        """Whether nobody listens, so that addresses and contents can be checked."""
        return self.listener is None


class Operation(Operator):
    """A declared operation that public functions call; see :class:`fusednorm.torch_ops.operator.Operator`."""

    #: As :attr:`fusednorm.operations.listed.Listed.steps`; none: a call of its own, or torch's operations compute it.
    steps = ""
    #: Whether a compiled graph without gradients has an operator of the public function: see ``inference.py``.
    has_one_operator = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        #: Its public functions, by name. The name of one that works in place ends in an underscore.
        self.functions: dict[str, Callable[..., Any]] = {}
        self._defaults = self.declaration.defaults
        #: Takers of their arguments, by their names.
        self._sorted: dict[str, Callable[..., Any]] = {}
        self._alone = len(self.declaration.returned) == 1
        #: Whether public functions take operands in other shapes, too.
        self.fits = type(self).fitted is not Operation.fitted
        self._returned = tuple((result.name, result.overwrites or "") for result in self.declaration.returned)
        self._of_dtypes = [
            (result.name, result.dtype, result.role is Role.ROWS)
            for result in self.declaration.returned
            if result.dtype
        ]
        #: The operands that each output may be; None: any.
        self._own: dict[str, tuple[str, ...]] | None = {}
        for result in self.declaration.returned:
            if result.may_be is None or self._own is None:
                self._own = None
            else:
                self._own[result.name] = (*((result.overwrites,) if result.overwrites else ()), *result.may_be)
        self._of_rows = [result.name for result in self.declaration.returned if result.role in WITH_ROWS]

    def of_parts(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """The results for DTensors whose rows lie in parts, where ranks have a way to leave them there."""
        return None

    def public(self, function: _Function) -> _Function:
        """Adds a function that users call, with operands, flags and outputs of the declared names."""
        name = function.__name__
        if self.has_one_operator and name[-1] != "_":
            add_operator(function)
        outputs = {result: overwrites if name[-1] == "_" else None for result, overwrites in self._returned}
        self._sorted[name] = sorted_arguments(self._called, name, self.plan.operands, self._defaults, outputs)
        self.functions[name] = function
        PUBLIC[function] = self
        return function

    def fitted(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands in the declared shapes, where public functions take others as well."""
        return operands

    def open(self, entry: Entry, names: str = "") -> Callable[..., Any]:
        """The fast path of a public function, which has these arguments; None: those that the entry has names for."""
        if self.has_one_operator:
            fast_path.ENTRIES[self.declaration.name] = entry
        taken = (names or entry.names).split()

        @functools.cache
        def sort() -> Callable[..., Any]:  # at the first such call
            outputs = [result for result, _ in self._returned]
            return sorted_positions(self._recorded_by_c, taken, self.plan.operands, self._defaults, outputs)

        return entry.open(recorded=lambda *arguments, **named: sort()(*arguments, **named))

    def _recorded_by_c(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> Any:
        """The results of a call that C has read, and of which only autograd must know; or None."""
        if must_be_seen.transforms_active():
            return None
        if self.fits:
            operands = self.fitted(operands)
        return self.record_new(operands, self.flags_of_recorded(operands, flags))

    def flags_of_recorded(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> MappingProxyType[str, Any]:
        """The flags, numbers rounded; C has checked all but dtypes of results."""
        if flags != self._defaults or self.plan.has_numbers:
            named = dict(zip(self.plan.operands, operands, strict=True))
            asked = [flag for _, flag, _ in self._of_dtypes if flags[flag] is not None]
            flags = (self.plan.check_flags if asked else self.plan.rounded)(named, flags)
        return MappingProxyType(flags)

    def record_new(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> Any:
        """The results of the public function, for plain operands that C has read, where gradients are recorded."""
        found = self.record_plain(operands, flags)
        if type(found) is not tuple:
            return found
        return found[0] if self._alone else found[: len(self._returned)]

    def __call__(self, name: str, **arguments: Any) -> Results:  # type: ignore[type-var]
        """The results of the public function of that name, one or a tuple as it says; see the function for errors.

        ``arguments``: all operands, the flags that the function has, and the outputs that it takes.
        """
        return self._sorted[name](**arguments)  # type: ignore[no-any-return]

    @exact
    def _called(self, name: str, operands: dict[str, Any], flags: dict[str, Any], outputs: dict[str, Any]) -> Any:
        if self.fits:
            operands = dict(zip(operands, self.fitted([*operands.values()]), strict=True))
        tensors = (*operands.values(), *outputs.values())
        if not is_dynamo_compiling() and fast_path.is_direct(*tensors):  # the usual case, which C tells soonest
            return self.results(self.direct(operands, flags, outputs, name[-1] == "_"), outputs)
        asked = Asked(operands, flags, outputs, None, name[-1] == "_")
        asked.listener = listener = must_be_seen.listener(*tensors)
        if listener is Listener.OVERRIDE:
            given = {**operands, **flags, **dict.fromkeys([one for one, _ in self._returned]), **outputs}
            return must_be_seen.handed_over(self.functions[name], tensors, given)
        asked.flags = self.checked(asked)
        records = self.differentiable and is_grad_enabled() and requires_grad(*operands.values())
        if outputs and (records or (is_grad_enabled() and requires_grad(*outputs.values()))):
            refuse_grad(name)
        if listener is None and not records:
            found = self.compute(asked)
        elif listener is Listener.DISPATCHER or not self.differentiable:  # then no transform has anything to do
            of_parts = None if is_dynamo_compiling() else self.of_parts(operands, asked.flags)
            found = self.into(asked) if of_parts is None else of_parts
        else:
            record: Any = self.record
            if listener is not None and "torch._dynamo" in sys.modules:
                record = torch.compiler.disable(record)  # type: ignore[no-untyped-call]  # else it compiles what is below
            found = record(operands, asked.flags)
            found = found if isinstance(found, tuple) else (found,)
        return self.results(found, outputs)

    def direct(
        self, operands: dict[str, Any], flags: Mapping[str, Any], outputs: dict[str, Any], in_place: bool
    ) -> tuple[Tensor, ...]:
        """The results that are returned, where nobody listens, and nothing has been checked."""
        asked = Asked(operands, flags, outputs, None, in_place)
        asked.flags = self.checked(asked)
        return self.compute(asked)

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded, after all checks, but those of operands that the operator makes."""
        flags = {**asked.flags, **self._dtypes_of_outputs(asked)} if asked.outputs else asked.flags
        if asked.listener is Listener.TRANSFORM:
            flags = self.plan.rounded(asked.operands, flags)
        elif not is_dynamo_compiling():
            flags = self.plan.check(asked.operands, flags, asked.in_memory)
        if asked.outputs:
            self._check_outputs(asked, flags)
        return flags

    def compute(self, asked: Asked) -> tuple[Tensor, ...]:
        """The results that are returned, for checked operands in memory: in outputs, if kernels can write there."""
        outputs = asked.outputs
        if outputs:
            outputs = {name: outputs[name] for name in self._of_rows if name in outputs}
        return engine.forward(self.plan, asked.operands, asked.flags, outputs, keep=False)

    def into(self, asked: Asked) -> tuple[Tensor, ...]:
        """The results through torch's dispatcher; new ones, where it has no way to write in the memory given."""
        return self.dispatched(asked.operands, asked.flags)

    def results(self, found: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Any:
        """Results as the public function returns them, in the memory that the caller gave."""
        if outputs:
            of_names = zip(self._returned, found, strict=False)
            found = tuple([dtensor_bridge.written(outputs.get(result), new) for (result, _), new in of_names])
        return found[0] if self._alone else found[: len(self._returned)]

    def _dtypes_of_outputs(self, asked: Asked) -> dict[str, Any]:
        """The flags that say the dtypes of the memory that the caller gave for results."""
        found: dict[str, Any] = {}
        for result, flag, like_rows in self._of_dtypes if not asked.in_place else ():
            out, dtype = asked.outputs.get(result), asked.flags[flag]
            if self.declaration.checks is None:
                rows = asked.operands[self.plan.rows]
                found[flag] = dtype_of(out, dtype, rows, self.plan.rows, like_rows)
            elif dtype is None and getattr(out, "dtype", None) in NARROW_FLOATS:  # no other one fits
                found[flag] = cast(Tensor, out).dtype
        return found

    def _check_outputs(self, asked: Asked, flags: Mapping[str, Any]) -> None:
        """Checks that outputs have the shapes and dtypes of results, and, in memory, share none with others."""
        called, results = {}, self.plan.results(asked.operands, flags)
        returned = zip(self.declaration.returned, self._returned, results, strict=False)
        for result, (name, overwrites), (_, shape, dtype) in returned:
            called_name, like = overwrites if asked.in_place else name, self.plan.rows
            if result.like is not None and result.role in (Role.ROWS, Role.HEADS):
                like = result.like
            check_output(called_name, asked.outputs.get(name), list(shape), dtype, asked.operands[like], like)
            called[called_name] = asked.outputs.get(name)
        if asked.in_memory:
            check_apart(called, asked.operands, None if asked.in_place else self._own)


def dtype_of(
    out: Tensor | None, out_dtype: torch.dtype | None, rows: Tensor, name: str, like_rows: bool = True
) -> torch.dtype | None:
    """``out_dtype``, or the dtype of the output that the caller gave for these rows, which is checked.

    ``like_rows``: whether it must have their shape.
    """
    if out is None:
        return out_dtype
    check_operands(rows, None, None, out if like_rows else None, None, in_memory=False, x_name=name)
    if not like_rows:
        check_floats("out", out, rows, name, "allocate it with torch.empty, or leave it out")
    check_flags(Flags(out_dtype=out_dtype), rows, None, out, None, x_name=name)
    return out.dtype


#: The declared operation of each public function that calls one.
PUBLIC: dict[Any, Operation] = {}
