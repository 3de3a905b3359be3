"""The functions that calls of a declared operation go through, made once, when it is declared.

Within the library operands and flags go by their names. Torch has positions: :meth:`Plan.bound` and
:meth:`Plan.arguments` lead from one to the other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fusednorm.calls.call import FLOATS, Step, accumulator
from fusednorm.calls.checks import (
    are_dense,
    check_affine,
    check_dense,
    check_device,
    check_dtype,
    check_flag,
    check_floats,
    check_incoming,
    check_memory,
    check_needs,
    check_operands,
    check_products,
    check_samples,
    refuse_type,
)
from fusednorm.calls.features import unusual
from fusednorm.calls.scalars import number, whole
from fusednorm.declare.declaration import WITH_ROWS, Declaration, Result, Role

#: By the names of a declaration, in its order.
Operands: TypeAlias = Mapping[str, Tensor | None]
Flags: TypeAlias = Mapping[str, Any]

#: The roles of operands of which several rows take one.
SHARED = (Role.WEIGHT, Role.SAMPLES, Role.TABLE)

#: The types of flags in a schema, by the types of their defaults.
_TYPES = {float: "float", int: "int", bool: "bool", str: "str", type(None): "ScalarType?", type: "ScalarType"}


class New(NamedTuple):
    """A result that is to be made."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


class Made(NamedTuple):
    """How a result is made."""

    name: str
    #: Whether it has the shape of the rows.
    like_rows: bool
    #: (operands) -> its shape.
    shape: Callable[[Mapping[str, Any]], torch.Size]
    #: (operands, flags) -> its dtype.
    dtype: Callable[[Mapping[str, Any], Flags], torch.dtype]


#: A plan for each name of calls: that of the first operation which has it.
OF_CALLS: dict[str, Plan] = {}


class Plan:
    """A declaration, compiled."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.operands = tuple(operand.name for operand in declaration.operands)
        #: The operands and the flags that the operator has.
        self.operands_of_operator = tuple(one for one in self.operands if one not in declaration.not_of_operator)
        self.flags_of_operator = tuple(flag for flag in declaration.flags if flag not in declaration.not_of_operator)
        self.optional = {operand.name for operand in declaration.operands if operand.optional}
        #: The first operand, whose rows they are.
        self.rows = self.operands[0]
        of_rows = tuple(operand.name for operand in declaration.operands if operand.role is Role.ROWS)
        self._deciding = of_rows if declaration.any_decides else of_rows[:1]
        #: The operand whose rows make the columns of results, and those that have a number for each.
        self.matrix, *_ = (*[one.name for one in declaration.operands if one.role is Role.MATRIX], None)
        self._of_columns = tuple(one.name for one in declaration.operands if one.role is Role.COLUMNS)
        #: The operand whose rows are as long as those of results that are sums of them.
        self.values, *_ = (*[one.name for one in declaration.operands if one.role is Role.VALUES], None)
        self._checks = {flag: _check_of(flag, default) for flag, default in declaration.flags.items()}
        if declaration.transposed is not None:  # of any rows
            self._checks = {flag: _without_rows(check) for flag, check in self._checks.items()}
        #: Whether there are flags that are rounded, or that have no default.
        self.has_numbers = any(_is_number(value) or value is torch.dtype for value in declaration.flags.values())
        self._usual = None if self.has_numbers else tuple(declaration.defaults.items())
        self._numbers = [flag for flag, default in declaration.flags.items() if _is_number(default)]
        self._results = tuple(
            Made(one.name, one.role is Role.ROWS, self._shape_of(one.role, one.like), self._dtype_of(one))
            for one in declaration.results
        )
        self.places = [self.operands.index(operand.name) for operand in declaration.with_gradient]
        self.with_gradient = tuple(operand.name for operand in declaration.with_gradient)
        gradient = declaration.gradient is not None
        self.gradient_flags = tuple(declaration.gradient_flags) if gradient else ()
        #: The names of the arguments of the gradients' operator, but needs.
        self.of_backward = (*declaration.backward_tensors, *self.gradient_flags) if gradient else ()
        # What goes into calls of backends.
        self.kernel = None
        if (kernel := declaration.kernel) is not None:
            name, feature = kernel.name or declaration.name, kernel.feature or declaration.name
            self.kernel = kernel._replace(name=name, feature=feature)
            OF_CALLS.setdefault(name, self)
            self._steps = Step(feature), Step(f"{feature}_backward")
        self._dtypes = {result.dtype for result in declaration.results if result.dtype is not None}
        known = {*self._dtypes, *(kernel.known if kernel else ())}
        self._asked = [(flag, value) for flag, value in declaration.defaults.items() if flag not in known]
        roles = {**declaration.roles, **{result.name: result.role for result in declaration.results}}
        #: The operands of which several rows take one, with their roles.
        self.shared = {one.name: one.role for one in declaration.operands if one.role in SHARED}
        self.shares_samples = {*self.shared.values()} == {Role.SAMPLES}
        self.of_rows = tuple(name for name, role in roles.items() if role in WITH_ROWS)
        self.operands_with_rows = tuple(name for name in self.operands if name in self.of_rows)
        self.results_with_rows = tuple(one.name for one in declaration.results if one.role in WITH_ROWS)
        # The names of all tensors of calls, in their order.
        like = (kernel and kernel.like) or declaration
        self.read = dict.fromkeys([one.name for one in like.operands])
        self.read_again = dict.fromkeys([*self.read, *[one.name for one in like.kept]])
        self.incoming = dict.fromkeys(like.incoming if like.gradient is not None else ())
        self.results_of_calls = dict.fromkeys([one.name for one in like.results])
        #: The results that others are copies of.
        self.copied = {result.copy_of for result in declaration.results if result.copy_of}
        #: The results that kernels write; and those of them that are not for gradients alone.
        pairs = [*zip(declaration.results, self._results, strict=True)]
        self.written = tuple(made for one, made in pairs if not one.copy_of)
        self.written_for_callers = tuple(
            made for one, made in pairs if not one.copy_of and (not one.kept or one.name in self.copied)
        )
        #: The names of gradients, and of those that have rows.
        self.gradients = tuple(f"d{name}" for name in self.with_gradient)
        self.gradients_with_rows = tuple(f"d{name}" for name in self.with_gradient if roles[name] is Role.ROWS)

    @functools.cached_property
    def _fits(self) -> tuple[tuple[str, Callable[[torch.Size, torch.Size], bool], tuple[torch.dtype, ...]], ...]:
        """Whether each operand fits the rows in the usual form; see :data:`_FITS`."""
        return tuple([(operand.name, *_FITS[operand.role]) for operand in self.declaration.operands])

    def step_of(self, flags: Flags, backward: bool = False) -> Step:
        """The operation, or its gradient, with everything that a backend must know."""
        step = self._steps[backward]
        for flag, usual in self._asked:
            if flags.get(flag, usual) != usual:  # a gradient has not all of them
                return step.with_flags(*unusual(flags, dict(self._asked)))
        return step

    def of_calls(self, flags: Flags) -> Flags:
        """The flags but those that are dtypes of results."""
        return {flag: value for flag, value in flags.items() if flag not in self._dtypes} if self._dtypes else flags

    # Between positions and names.

    def bound(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The operands and the flags of an operator's arguments. Torch leaves out the last ones that are defaults."""
        names, count = self.operands_of_operator, len(self.operands_of_operator)
        operands = {**dict.fromkeys(self.operands), **dict(zip(names, arguments, strict=False))}
        given = dict(zip(self.flags_of_operator, arguments[count:], strict=False))
        return operands, {**self.declaration.defaults, **given}

    def arguments(self, operands: Mapping[str, Any], flags: Flags) -> list[Any]:
        """The operands and the flags in an operator's order."""
        return [
            *[operands[name] for name in self.operands_of_operator],
            *[flags[name] for name in self.flags_of_operator],
        ]

    def bound_backward(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], list[bool]]:
        """The tensors and the flags of the gradients' operator, all by name, and which gradients it is asked for."""
        *given, needs = arguments
        return dict(zip(self.of_backward, given, strict=True)), needs

    # The text that torch knows an operator by.

    @property
    def schema(self) -> str:
        """The schema of the operator."""
        declaration = self.declaration
        flags = list(map(self._in_schema, self.flags_of_operator))
        values = [declaration.defaults[flag] for flag in self.flags_of_operator]
        # Those that came after one that must be given.
        later = len(values) - values[::-1].index(torch.dtype) if torch.dtype in values else len(values)
        for place, default in reversed([*enumerate(values)]):
            if place < later and default is not None:
                break
            flags[place] += f'="{default}"' if isinstance(default, str) else f"={default}"
        return f"({', '.join((*self._operands_in_schema, *flags))}) -> {_tensors(len(declaration.results))}"

    @property
    def backward_schema(self) -> str:
        """The schema of the gradients' operator."""
        declaration = self.declaration
        tensors = [f"Tensor {name}" for name in declaration.incoming]
        tensors += [*self._operands_in_schema, *[f"Tensor {result.name}" for result in declaration.kept]]
        arguments = (*tensors, *map(self._in_schema, self.gradient_flags), "bool[] needs")
        return f"({', '.join(arguments)}) -> {_tensors(len(self.with_gradient))}"

    @property
    def _operands_in_schema(self) -> list[str]:
        return [f"Tensor{'?' if name in self.optional else ''} {name}" for name in self.operands_of_operator]

    def _in_schema(self, flag: str) -> str:
        default = self.declaration.flags[flag]
        if default in (float, int):
            return f"{_TYPES[default]}? {flag}"
        # A compiler makes a constant of a float, and the eps of l2_norm follows the hidden size.
        return f"{'Scalar' if flag == 'eps' else _TYPES[type(default)]} {flag}"

    # Shapes and dtypes.

    def decider(self, operands: Operands) -> tuple[str, Any]:
        """The operand, with its name, whose dtype decides the accumulator type."""
        if len(self._deciding) == 1:
            return self.rows, operands[self.rows]
        for name in self._deciding:
            tensor = operands[name]
            if isinstance(tensor, Tensor) and tensor.dtype is torch.float64:
                return name, tensor
        return self._deciding[-1], operands[self._deciding[-1]]

    def joined_of(self, operands: Mapping[str, Any]) -> int:
        """Dimensions that stay on one rank for these operands, or their specs: also heads, where each has a weight.

        And all rows of a sample.
        """
        joined, rows = self.declaration.joined, operands[self.rows]
        for name, role, *_ in self.declaration.operands:
            given = operands.get(name)
            if given is not None and role is Role.WEIGHT and given.ndim == 2:
                joined = max(joined, 2)
            elif given is not None and role is Role.SAMPLES:
                joined = max(joined, rows.ndim + 1 - given.ndim)
        return joined

    def shape(self, role: Role, operands: Mapping[str, Any]) -> torch.Size:
        """The shape of what has this role, beside these operands; of a weight or a matrix that of one of its rows."""
        return self._shape_of(role)(operands)

    def _shape_of(self, role: Role, like: str | None = None) -> Callable[[Mapping[str, Any]], torch.Size]:
        first = like or self.rows
        if role is Role.OF_CHOSEN:
            (chosen,) = (operand.name for operand in self.declaration.operands if operand.role is Role.CHOSEN)
            return lambda operands: operands[chosen].shape
        if role in (Role.ROWS, Role.HEADS):
            return lambda operands: operands[first].shape
        if role in (Role.WEIGHT, Role.MATRIX):
            return lambda operands: operands[first].shape[-1:]
        matrix = self.matrix
        if role is Role.COLUMNS:
            return lambda operands: operands[matrix].shape[:1]
        if role is Role.PRODUCTS:
            return lambda operands: operands[first].shape[:-1] + operands[matrix].shape[:1]
        if role is Role.SCALES:
            return lambda operands: torch.Size((*operands[first].shape[:-1], 1))
        values = self.values
        if role is Role.WEIGHED:
            return lambda operands: operands[first].shape[:-1] + operands[values].shape[-1:]
        return lambda operands: operands[first].shape[:-1]

    def _dtype_of(self, result: Result) -> Callable[[Mapping[str, Any], Flags], torch.dtype]:
        like, asked = result.like or self.rows, result.dtype
        if result.kept or result.wide:
            return lambda operands, flags: accumulator(operands[like].dtype)
        if asked is None:
            return lambda operands, flags: operands[like].dtype
        return lambda operands, flags: flags[asked] or operands[like].dtype

    def results(self, operands: Mapping[str, Any], flags: Flags) -> list[New]:
        """The results that these operands have."""
        return [New(name, shape(operands), dtype(operands, flags)) for name, _, shape, dtype in self._results]

    # Checks.

    def check(self, operands: Operands, flags: Flags, in_memory: bool) -> Flags:
        """Checks operands and flags; returns the flags, numbers rounded to the accumulator type.

        Raises:
            TypeError, ValueError: the operand or the flag, its value, what was expected, and the cure.
        """
        if self.declaration.checks is not None:
            return self.declaration.checks(operands, flags, in_memory)
        if not self._are_usual(operands, in_memory):
            self.check_tensors(operands, operands, in_memory)
        return self.check_flags(operands, flags)

    def check_backward(
        self, given: Mapping[str, Any], needs: list[bool], in_memory: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Checks the tensors and the flags of the gradients' operator; returns its operands, and all by name."""
        operands = {name: given[name] for name in self.operands}
        check_needs(needs, self.with_gradient)
        if self.declaration.checks is not None:
            flags = self.declaration.checks(operands, {flag: given[flag] for flag in self.gradient_flags}, in_memory)
            for name, (_, shape, _) in zip(self.declaration.incoming, self.results(operands, flags), strict=False):
                check_incoming(name, given[name], list(shape), operands[self.rows], self.rows, in_memory=in_memory)
            return operands, {**given, **flags}
        tensors = {name: given[name] for name in (*self.operands, *self.declaration.backward_tensors)}
        self.check_tensors(operands, tensors, in_memory)
        flags = self.check_flags(operands, {flag: given[flag] for flag in self.gradient_flags})
        return operands, {**given, **flags}

    def _are_usual(self, operands: Operands, in_memory: bool) -> bool:
        """Whether all of them fit, as they nearly always do; then nothing else has to be looked at."""
        rows: Any = operands[self.rows]
        if rows is None or not are_dense((*operands.values(),), in_memory):
            return False
        decides = rows if len(self._deciding) == 1 else self.decider(operands)[1]
        shape, wide, device = rows.shape, decides.dtype is torch.float64, rows.device
        for name, fits, dtypes in self._fits:
            tensor = operands[name]
            if tensor is None:
                if name not in self.optional:
                    return False
                continue
            dtype = tensor.dtype
            if dtype not in dtypes or (dtype is torch.float64 and not wide) or tensor.device != device:
                return False
            if not fits(tensor.shape, shape):
                return False
        for name in self._of_columns:
            tensor, matrix = operands[name], cast(Tensor, operands[self.matrix])
            if tensor is not None and tensor.shape[0] != matrix.shape[0]:
                return False
        return len(shape) > 0 and shape[-1] > 0

    def check_tensors(self, operands: Operands, tensors: Mapping[str, Any], in_memory: bool) -> None:
        """Checks operands, and what goes with them to the gradients' operator, in ``tensors`` by name."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                check_dense(name, tensor)  # others have no shape that could be asked for
        roles, kept = self.declaration.roles, {result.name for result in self.declaration.kept}
        rows_name, rows = self.decider(operands)
        for name in sorted(tensors, key=rows_name.__ne__):  # the one that decides comes first
            tensor = tensors[name]
            if isinstance(tensor, Tensor):
                shape = list(self.shape(roles[name], operands))
                check_role(name, roles[name], tensor, shape, rows, rows_name, in_memory, self.matrix)
                wide = accumulator(rows.dtype)
                if name in kept and tensor.dtype != wide:
                    raise TypeError(
                        f"{name} must be {str(wide)[6:]} for {rows_name} of {str(rows.dtype)[6:]}, got "
                        f"{str(tensor.dtype)[6:]}; pass the result of the forward pass as it is"
                    )
            elif tensor is not None or name not in self.optional:
                of_products = roles[name] in (Role.MATRIX, Role.COLUMNS, Role.PRODUCTS)
                refuse_type(name, tensor, "torch.as_tensor makes one" if of_products else None)

    def check_flags(self, operands: Operands, flags: Flags) -> Flags:
        """Checks flags, all or those that a gradient takes; returns them, numbers rounded to the accumulator type."""
        if self.declaration.check is not None:
            flags = {**flags, **(self.declaration.check(**operands, **flags) or {})}
        if self._usual is not None and _are(flags, self._usual):
            return flags
        name, rows = self.decider(operands)
        wide, checks = accumulator(rows.dtype), self._checks
        return {flag: checks[flag](value, rows, name, wide) for flag, value in flags.items()}

    def rounded(self, operands: Operands, flags: Flags) -> Flags:
        """The flags, numbers rounded to the accumulator type, for operands that a transform keeps from checks."""
        if not self._numbers:
            return flags
        wide = accumulator(self.decider(operands)[1].dtype)
        return {
            **flags,
            **{name: number(name, flags[name], wide) for name in self._numbers if flags[name] is not None},
        }


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _is_number(default: object) -> bool:
    return type(default) is float or default is float


def _are(flags: Flags, usual: tuple[tuple[str, Any], ...]) -> bool:
    """Whether all flags that there are have their usual values, which need no check."""
    for flag, value in usual:  # noqa: SIM110  (all() takes twice as long)
        if flags.get(flag, value) is not value:
            return False
    return True


def _fits_samples(shape: torch.Size, rows: torch.Size) -> bool:
    if len(shape) == len(rows):
        return shape == rows
    return 0 < len(shape) < len(rows) and shape[-1] == rows[-1] and shape[:-1] == rows[: len(shape) - 1]


_INTEGERS = (torch.int32, torch.int64)
#: Whether an operand of each role fits rows, in the usual form: (its shape, the shape of the rows), and its dtypes.
_FITS: dict[Role, tuple[Callable[[torch.Size, torch.Size], bool], tuple[torch.dtype, ...]]] = {
    Role.ROWS: (operator.eq, FLOATS),
    Role.WEIGHT: (lambda shape, rows: shape == rows[-1:], FLOATS),
    Role.SAMPLES: (_fits_samples, FLOATS),
    Role.NUMBERS: (lambda shape, rows: shape == rows[:-1], FLOATS),
    Role.SETTINGS: (lambda shape, rows: shape == rows[:-1], FLOATS),
    Role.IDS: (lambda shape, rows: shape == rows[:-1], _INTEGERS),
    Role.CHOSEN: (lambda shape, rows: shape == rows[:-1], _INTEGERS),
    Role.TABLE: (lambda shape, rows: True, FLOATS),
    Role.MATRIX: (lambda shape, rows: len(shape) == 2 and shape[1:] == rows[-1:], FLOATS),
    Role.COLUMNS: (lambda shape, rows: len(shape) == 1, FLOATS),
}


def check_role(
    name: str,
    role: Role,
    tensor: Tensor,
    shape: list[int],
    rows: Any,
    rows_name: str,
    in_memory: bool,
    matrix: str | None = None,
) -> None:
    """Checks an operand's role beside the operand that decides, and beside the matrix; and the role's shape."""
    if tensor is rows and name == rows_name:
        check_operands(tensor, None, None, None, None, in_memory=in_memory, x_name=name)
    elif role is Role.ROWS:
        check_operands(rows, tensor, None, None, None, in_memory=in_memory, x_name=rows_name, residual_name=name)
    elif role is Role.WEIGHT:
        check_affine(rows, tensor, None, in_memory=in_memory, x_name=rows_name, weight_name=name)
    elif role is Role.SAMPLES:
        check_samples(name, tensor, rows, rows_name, in_memory=in_memory)
    elif role in (Role.MATRIX, Role.COLUMNS, Role.PRODUCTS):
        of_rows = {Role.COLUMNS: matrix, Role.PRODUCTS: f"{rows_name} and of {matrix}"}.get(role)
        check_products(name, tensor, shape, of_rows, rows, rows_name, in_memory=in_memory)
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


#: (value, the rows that decide, their name, the accumulator type) -> the value that is taken.
_Check: TypeAlias = Callable[[Any, Any, str, torch.dtype], Any]


def _check_of(flag: str, default: Any) -> _Check:
    """The check of a flag by its default."""

    def of_number(value: Any, rows: Any, name: str, wide: torch.dtype) -> Any:
        return None if value is None and default is float else number(flag, value, wide)

    def of_bool(value: Any, rows: Any, name: str, wide: torch.dtype) -> Any:
        check_flag(flag, value)
        return value

    def of_dtype(value: Any, rows: Any, name: str, wide: torch.dtype) -> Any:
        if value is not None or default is not None:
            check_dtype(flag, value, rows, name, "leave it out for the default" if default is None else "")
        return value

    def of_int(value: Any, rows: Any, name: str, wide: torch.dtype) -> Any:
        return None if value is None else whole(flag, value)

    def of_type(value: Any, rows: Any, name: str, wide: torch.dtype) -> Any:
        if not isinstance(value, type(default)) and not isinstance(value, torch.SymInt):
            kind = type(default).__name__
            raise TypeError(f"{flag} must be {kind}, got {value!r}; leave it out for {default!r}")
        return value

    if _is_number(default):
        return of_number
    if type(default) is bool:
        return of_bool
    if default is None or default is torch.dtype:
        return of_dtype
    return of_int if default is int else of_type


def _without_rows(check: _Check) -> _Check:
    return lambda value, rows, name, wide: check(value, None, name, wide)
