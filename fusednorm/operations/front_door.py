"""Public functions of declared operations: checks, overrides, listeners, gradients, outputs, and twins in place."""

from __future__ import annotations

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
from fusednorm.engine import run as engine
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        #: Its public functions, by name. The name of one that works in place ends in an underscore.
        self.functions: dict[str, Callable[..., Any]] = {}
        self._defaults = self.declaration.defaults
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
        self.functions[function.__name__] = function
        PUBLIC[function] = self
        return function

    @property
    def fits(self) -> bool:
        """Whether public functions take operands in other shapes, too."""
        return type(self).fitted is not Operation.fitted

    def fitted(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands in the declared shapes, where public functions take others as well."""
        return operands

    def open(self, entry: Entry, names: str = "") -> Callable[..., Any]:
        """The fast path of a public function, which has these arguments; None: those that the entry has names for."""
        taken, operands_of, defaults = (names or entry.names).split(), self.plan.operands, self._defaults
        outputs, dtypes = [result for result, _ in self._returned], [flag for _, flag, _ in self._of_dtypes]
        count, alone = len(operands_of), len(outputs) == 1
        # The usual arguments after the operands, if they are all in the usual places; and usual flags.
        others = [defaults.get(name) for name in taken[count:]] if (*taken[:count],) == operands_of else None
        usual, numbers = MappingProxyType(defaults), self.plan.has_numbers

        def flags_of(given: Mapping[str, Any], operands: Sequence[Any]) -> MappingProxyType[str, Any]:
            flags: Mapping[str, Any] = {flag: given.get(flag, default) for flag, default in self._defaults.items()}
            asked = [flag for flag in dtypes if flags[flag] is not None]  # C has not looked at them yet
            named = dict(zip(operands_of, operands, strict=True))
            return MappingProxyType({**(self.plan.check_flags if asked else self.plan.rounded)(named, flags)})

        def record(*arguments: Any, **named: Any) -> Any:
            """The results for plain operands that C has read, where gradients are recorded; or None."""
            if must_be_seen.transforms_active():
                return None
            if not (named or numbers or others is None) and _are(arguments[count:], others):
                operands, flags = self.fitted(arguments[:count]), usual
            else:
                given = named or dict(zip(taken, arguments, strict=False))
                for output in outputs:
                    if given.get(output) is not None:
                        return None
                operands = self.fitted([given.get(operand) for operand in operands_of])
                flags = flags_of(given, operands)
            found = self.record_plain(operands, flags)
            return found if not isinstance(found, tuple) else found[0] if alone else found[: len(outputs)]

        return entry.open(recorded=record)

    @exact
    def __call__(self, name: str, **arguments: Any) -> Results:  # type: ignore[type-var]
        """The results of the public function of that name, one or a tuple as it says; see the function for errors.

        ``arguments``: all operands, the flags that the function has, and the outputs that it takes.
        """
        in_place = name.endswith("_")
        outputs: dict[str, Any] = {}
        operands = {operand: arguments.pop(operand) for operand in self.plan.operands}
        for result, overwrites in self._returned:
            output = operands[overwrites] if in_place else arguments.pop(result, None)
            if output is not None:
                outputs[result] = output
        if self.fits:
            operands = dict(zip(operands, self.fitted([*operands.values()]), strict=True))
        tensors = (*operands.values(), *outputs.values())
        listener, records = None, False
        if is_dynamo_compiling() or not fast_path.is_direct(*tensors):  # C tells it sooner
            listener = must_be_seen.listener(*tensors)
            if listener is Listener.OVERRIDE:
                given = {**operands, **arguments, **dict.fromkeys([one for one, _ in self._returned]), **outputs}
                return cast(Results, must_be_seen.handed_over(self.functions[name], tensors, given))
        asked = Asked(operands, {**self._defaults, **arguments}, outputs, listener, in_place)  # in the declared order
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
            found = self.record(operands, asked.flags)
            found = found if isinstance(found, tuple) else (found,)
        return self.results(found, outputs)  # type: ignore[no-any-return]

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
        count = len(self._returned)
        return found[0] if count == 1 else found[:count]

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
        """That outputs have the shapes and dtypes of results, and, in memory, share none with others."""
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


def _are(arguments: Sequence[Any], usual: Sequence[Any]) -> bool:
    """Whether all arguments have their usual values; those at the end may be left out."""
    for given, value in zip(arguments, usual, strict=False):  # noqa: SIM110  (all() takes twice as long)
        if given is not value:
            return False
    return True


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
