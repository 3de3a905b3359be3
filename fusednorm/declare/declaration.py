"""An operation as data: operands with their roles, flags, results and the formula.

All that operations share is made from it: the operator of torch, gradients, checks, sharding, twins in place, tests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import (
    check_affine,
    check_dense,
    check_device,
    check_dtype,
    check_flag,
    check_floats,
    check_memory,
    check_operands,
    check_samples,
    refuse_type,
)
from fusednorm.calls.scalars import number, whole


class Role(Enum):
    """The shape of an operand or a result, where the first operand is [..., N]; and how ranks share it."""

    #: [..., N].
    ROWS = "rows"
    #: [N], or [H, N] for rows of [..., H, N]: the same for all rows. Its gradient is a sum over rows.
    WEIGHT = "weight"
    #: [..., N], or without dimensions before the last one: the same for all rows of a sample. Its gradient is then a
    #: sum over the rows of each.
    SAMPLES = "samples"
    #: [...]: a number for each row.
    NUMBERS = "numbers"
    #: [...], int32 or int64: for each row the place of one of its elements. It has no gradient.
    IDS = "ids"
    #: [...] or [..., K], int32 or int64: for each row the places of one or of K of its elements. It has no gradient.
    CHOSEN = "chosen"
    #: The shape of the operand before: a number for each of these places.
    OF_CHOSEN = "of chosen"
    #: [...]: a number for each row, which has no gradient.
    SETTINGS = "settings"
    #: [..., K], where the first operand is [..., H, N]: numbers for each row of heads. It has no gradient, and the
    #: operation's own check says what else it must be.
    TABLE = "table"


#: The roles of operands that have no gradient.
CONSTANT = (Role.IDS, Role.CHOSEN, Role.SETTINGS, Role.TABLE)


class Operand(NamedTuple):
    """A tensor that an operation reads."""

    name: str
    role: Role = Role.ROWS
    optional: bool = False


class Result(NamedTuple):
    """A tensor that an operation makes."""

    #: The argument that takes memory for it.
    name: str = "out"
    role: Role = Role.ROWS
    #: The flag that says its dtype; without one, or where that is None, it is that of the operand ``like``.
    dtype: str | None = None
    #: None: the first operand.
    like: str | None = None
    #: The operand that the twin in place overwrites with it.
    overwrites: str | None = None
    #: Whether it is kept for the gradients, and not returned. It has the accumulator type.
    kept: bool = False
    #: Whether it has the accumulator type.
    wide: bool = False


@dataclass(frozen=True, eq=False)
class Declaration:
    """An operation; CONTRIBUTING has an example."""

    name: str
    operands: tuple[Operand, ...]
    #: The specification, in torch's operations: (*operands, *flags) -> a tuple with a tensor for each result.
    formula: Callable[..., tuple[Tensor, ...]]
    results: tuple[Result, ...] = (Result(),)
    #: Default values by name. The default ``torch.dtype`` stands for a dtype that must be given, None for one that may
    #: be; the types ``float`` and ``int`` stand for a number or None, which is the default.
    flags: Mapping[str, Any] = field(default_factory=dict)
    #: (incoming gradients, *operands, *kept, flags, needs) -> a gradient or None for each operand but ids, in torch's
    #: operations, linear in the incoming gradients. Its parameters have the names of the gradients' operator; it has
    #: the flags that it needs. A parameter ``*others`` after the incoming gradients stands for all the rest, where it
    #: needs each flag but dtypes of results. None: the operation has no gradients.
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None
    #: In place of a gradient, where the result is linear in the first operand and the others have no gradient: (the
    #: first operand's dtype, *others, *flags) -> others and flags, with which the operation takes the incoming gradient
    #: back. Either may then be float64 alone.
    transposed: Callable[..., tuple[Any, ...]] | None = None
    #: (operands, flags, tangents of operands or None) -> those of the results that are returned, in torch's operations.
    #: None: the gradient is transposed, which takes about twice as long.
    tangent: Callable[..., tuple[Tensor, ...]] | None = None
    #: So many dimensions at the end stay on one rank: a row, or all heads, or nothing.
    joined: int = 1
    #: Whether an operand of rows that is float64 decides that all is computed in float64; else the first operand does.
    any_decides: bool = False
    #: (*operands, flags by name) -> None, or numbers by name in place of those given: raises where flags do not fit.
    #: The operator of gradients has not all of them.
    check: Callable[..., Mapping[str, Any] | None] | None = None
    #: (operands, flags, in_memory) -> flags: all checks, in place of those by roles, in words of the operation's own.
    checks: Callable[..., tuple[Any, ...]] | None = None
    #: Flags of calls that tests make, on operands of each role.
    samples: Sequence[Mapping[str, Any]] = ({},)
    #: Flags that are refused, each with the error and words of its text.
    refused: Sequence[tuple[Mapping[str, Any], type[Exception], str]] = ()

    @functools.cached_property
    def returned(self) -> tuple[Result, ...]:
        """The results that callers see; the others follow them."""
        return tuple(result for result in self.results if not result.kept)

    @functools.cached_property
    def kept(self) -> tuple[Result, ...]:
        """The results that only gradients take."""
        return tuple(result for result in self.results if result.kept)

    @functools.cached_property
    def places(self) -> list[int]:
        """The places of the operands that have gradients."""
        return [place for place, operand in enumerate(self.operands) if operand.role not in CONSTANT]

    @property
    def with_gradient(self) -> tuple[Operand, ...]:
        """The operands that have gradients."""
        return tuple(self.operands[place] for place in self.places)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of flags that are not given."""
        return {flag: None if value in (float, int) else value for flag, value in self.flags.items()}

    @property
    def schema(self) -> str:
        """The schema of the operator."""
        flags = list(map(self._in_schema, self.flags))
        values = [*self.defaults.values()]
        # Those that came after one that must be given.
        later = len(values) - values[::-1].index(torch.dtype) if torch.dtype in values else len(values)
        for place, default in reversed([*enumerate(values)]):
            if place < later and default is not None:
                break
            flags[place] += f'="{default}"' if isinstance(default, str) else f"={default}"
        return f"({', '.join((*self._operands_in_schema, *flags))}) -> {_tensors(len(self.results))}"

    @property
    def backward_schema(self) -> str:
        """The schema of the gradients' operator."""
        incoming = [f"Tensor {name}" for name in self.incoming]
        kept = [f"Tensor {result.name}" for result in self.kept]
        flags = map(self._in_schema, self.gradient_flags)
        arguments = (*incoming, *self._operands_in_schema, *kept, *flags, "bool[] needs")
        return f"({', '.join(arguments)}) -> {_tensors(len(self.with_gradient))}"

    @functools.cached_property
    def _of_gradient(self) -> list[str]:
        """The parameters of the gradient but needs."""
        assert self.gradient is not None
        *named, last = inspect.signature(self.gradient).parameters.values()
        names = [parameter.name for parameter in named]
        if last.kind is last.VAR_POSITIONAL:
            names += [operand.name for operand in self.operands] + [result.name for result in self.kept]
            names += [flag for flag in self.flags if flag not in {result.dtype for result in self.results}]
        return names

    @property
    def backward_tensors(self) -> list[str]:
        """The names of the tensors that the gradients' operator takes, in order."""
        return self._of_gradient[: len(self.results) + len(self.operands)]

    @property
    def incoming(self) -> list[str]:
        """The names of incoming gradients."""
        return self._of_gradient[: len(self.returned)]

    @functools.cached_property
    def gradient_flags(self) -> list[str]:
        """The names of the flags that the gradient takes."""
        return self._of_gradient[len(self.results) + len(self.operands) :]

    @property
    def _operands_in_schema(self) -> list[str]:
        return [f"Tensor{'?' if operand.optional else ''} {operand.name}" for operand in self.operands]

    def _in_schema(self, flag: str) -> str:
        types = {float: "float", int: "int", bool: "bool", str: "str", type(None): "ScalarType?", type: "ScalarType"}
        default = self.flags[flag]
        if default in (float, int):
            return f"{types[default]}? {flag}"
        # A compiler makes a constant of a float, and the eps of l2_norm follows the hidden size.
        return f"{'Scalar' if flag == 'eps' else types[type(default)]} {flag}"

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """The role of each tensor of both operators, by name."""
        roles = {operand.name: operand.role for operand in self.operands}
        roles |= {result.name: result.role for result in self.kept}
        if self.gradient is not None:
            roles |= {name: result.role for name, result in zip(self.incoming, self.returned, strict=True)}
        return roles

    def decider(self, operands: Sequence[Tensor | None]) -> tuple[str, Any]:
        """The operand, and its name, whose dtype decides the accumulator type."""
        named = zip(self.operands, operands, strict=True)
        rows = [(operand.name, tensor) for operand, tensor in named if operand.role is Role.ROWS]
        wide = (one for one in rows if isinstance(one[1], Tensor) and one[1].dtype == torch.float64)
        return next(wide, rows[-1]) if self.any_decides else rows[0]

    def joined_of(self, operands: Sequence[Any]) -> int:
        """Dimensions that stay on one rank for these operands, or their specs: also heads, where each has a weight.

        And all rows of a sample.
        """
        places = enumerate(self.operands)
        weights = [operands[place] for place, operand in places if operand.role is Role.WEIGHT]
        of_samples = [t for t, operand in zip(operands, self.operands, strict=True) if operand.role is Role.SAMPLES]
        samples: list[int] = [operands[0].ndim + 1 - t.ndim for t in of_samples if t is not None]
        return max(self.joined, 2 * any(w is not None and w.ndim == 2 for w in weights), *samples)

    def shape(self, role: Role, operands: Sequence[Any]) -> torch.Size:
        """The shape of what has this role, beside these operands; of a weight that of one for all rows."""
        rows: torch.Size = operands[0].shape
        if role is Role.OF_CHOSEN:
            roles = [operand.role for operand in self.operands]
            rows = operands[roles.index(Role.CHOSEN)].shape
        if role in (Role.ROWS, Role.OF_CHOSEN):
            return rows
        return rows[-1:] if role is Role.WEIGHT else rows[:-1]

    def dtype(self, result: Result, operands: Sequence[Any], flags: Sequence[Any]) -> torch.dtype:
        """The dtype of a result."""
        place = 0 if result.like is None else [operand.name for operand in self.operands].index(result.like)
        of_like: torch.dtype = operands[place].dtype
        if result.kept or result.wide:
            return accumulator(of_like)
        asked = None if result.dtype is None else self.named(flags)[result.dtype]
        return of_like if asked is None else asked

    def checked(self, operands: Sequence[Tensor | None], flags: Sequence[Any], *, in_memory: bool) -> tuple[Any, ...]:
        """Checks operands and flags; returns the flags, numbers rounded to the accumulator type.

        Raises:
            TypeError, ValueError: the operand or the flag, its value, what was expected, and the cure.
        """
        if self.checks is not None:
            return self.checks(operands, flags, in_memory)
        names = [operand.name for operand in self.operands]
        self.check_tensors(dict(zip(names, operands, strict=True)), in_memory)
        return self.checked_flags(operands, self.named(flags))

    def rounded(self, operands: Sequence[Tensor | None], flags: Sequence[Any]) -> tuple[Any, ...]:
        """The flags, numbers rounded to the accumulator type, for operands that a transform keeps from checks."""
        wide = accumulator(self.decider(operands)[1].dtype)
        numbers = {flag for flag, default in self.flags.items() if type(default) is float or default is float}
        return tuple(
            number(name, flag, wide) if name in numbers and flag is not None else flag
            for name, flag in zip(self.flags, flags, strict=True)
        )

    def named(self, flags: Sequence[Any]) -> dict[str, Any]:
        """All flags by name. torch leaves out the last ones that an operator's schema has defaults for."""
        return {**self.defaults, **dict(zip(self.flags, flags, strict=False))}

    def check_tensors(self, tensors: Mapping[str, Tensor | None], in_memory: bool) -> None:
        """Checks operands, and what goes with them to the gradients' operator, by name."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                check_dense(name, tensor)  # others have no shape that could be asked for
        operands = [tensors[operand.name] for operand in self.operands]
        rows_name, rows = self.decider(operands)
        roles, kept = self.roles, [result.name for result in self.kept]
        optional = {operand.name for operand in self.operands if operand.optional}
        for name in sorted(tensors, key=rows_name.__ne__):  # the one that decides comes first
            tensor = tensors[name]
            if isinstance(tensor, Tensor):
                shape = self.shape(roles[name], operands)
                check_role(name, roles[name], tensor, list(shape), rows, rows_name, in_memory)
                wide = accumulator(rows.dtype)
                if name in kept and tensor.dtype != wide:
                    raise TypeError(
                        f"{name} must be {str(wide)[6:]} for {rows_name} of {str(rows.dtype)[6:]}, got "
                        f"{str(tensor.dtype)[6:]}; pass the result of the forward pass as it is"
                    )
            elif tensor is not None or name not in optional:
                refuse_type(name, tensor)

    def checked_flags(self, operands: Sequence[Tensor | None], flags: Mapping[str, Any]) -> tuple[Any, ...]:
        """Checks flags, or those that a gradient takes; returns them, numbers rounded to the accumulator type."""
        name, rows = self.decider(operands)
        wide, found = accumulator(rows.dtype), flags
        if self.check is not None:
            found = {**flags, **(self.check(*operands, **flags) or {})}
        if self.transposed is not None:
            rows = None
        return tuple(_checked_flag(flag, self.flags[flag], value, rows, name, wide) for flag, value in found.items())


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def check_role(
    name: str, role: Role, tensor: Tensor, shape: list[int], rows: Any, rows_name: str, in_memory: bool
) -> None:
    """That an operand has its role beside the operand that decides, and the shape of that role."""
    if tensor is rows and name == rows_name:
        check_operands(tensor, None, None, None, None, in_memory=in_memory, x_name=name)
    elif role is Role.ROWS:
        check_operands(rows, tensor, None, None, None, in_memory=in_memory, x_name=rows_name, residual_name=name)
    elif role is Role.WEIGHT:
        check_affine(rows, tensor, None, in_memory=in_memory, x_name=rows_name, weight_name=name)
    elif role is Role.SAMPLES:
        check_samples(name, tensor, rows, rows_name, in_memory=in_memory)
    elif role is not Role.TABLE:
        if role not in (Role.IDS, Role.CHOSEN):
            check_floats(name, tensor, rows, rows_name)
        else:
            check_device(name, tensor, rows, rows_name)
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be int32 or int64, got {str(tensor.dtype)[6:]}; convert it")
        several = role is Role.CHOSEN and tensor.dim() == len(shape) + 1
        if list(tensor.shape[:-1] if several else tensor.shape) != shape:
            whose = "each of the ids" if role is Role.OF_CHOSEN else f"each row of {rows_name}"
            more = ", or [..., K] for K of them" if role is Role.CHOSEN else ""
            raise ValueError(
                f"{name} must have shape {shape}, a number for {whose}{more}, got {list(tensor.shape)}; pass one for "
                f"{whose.removesuffix(f' of {rows_name}')}"
            )
        if in_memory:
            check_memory(name, tensor)


def _checked_flag(name: str, default: Any, value: Any, rows: Any, rows_name: str, wide: torch.dtype) -> Any:
    """A flag of its default's type, numbers rounded to ``wide``."""
    if type(default) is float or default is float:
        return None if value is None and default is float else number(name, value, wide)
    if type(default) is bool:
        check_flag(name, value)
    elif default is None or default is torch.dtype:
        if value is not None or default is not None:
            check_dtype(name, value, rows, rows_name, "" if default is not None else "leave it out for the default")
    elif default is int:
        return None if value is None else whole(name, value)
    elif not isinstance(value, type(default)) and not isinstance(value, torch.SymInt):
        kind = type(default).__name__
        raise TypeError(f"{name} must be {kind}, got {value!r}; leave it out for {default!r}")
    return value
