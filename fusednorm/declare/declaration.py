"""An operation as data: operands with their roles, results, flags, the formula and its gradient.

``plan.py`` makes the functions out of it that every call goes through.
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
    #: [..., 1]: a number for each row, which has no gradient, as quantizers return them.
    SCALES = "scales"
    #: [..., H, N], rows of heads as the first operand is, of another number of heads or the same.
    HEADS = "heads"
    #: [..., K], where the first operand is [..., H, N]: numbers for each row of heads. It has no gradient, and the
    #: operation's own check says what else it must be.
    TABLE = "table"
    #: [...], or a shape that expands to that, int32 or int64: which row of tables each row of heads takes.
    POSITIONS = "positions"
    #: [M, N], where M is the length of rows of results that have the role PRODUCTS: the same for all rows.
    MATRIX = "matrix"
    #: [M]: a number for each row of the matrix, the same for all rows. Its gradient is a sum over rows.
    COLUMNS = "columns"
    #: [..., M]: of a result, a number for each row of the matrix.
    PRODUCTS = "products"
    #: Keys that rows meet, of a shape that the operation's own checks say.
    KEYS = "keys"
    #: [..., M], the values of the keys, where M is the length of rows of results that have the role WEIGHED.
    VALUES = "values"
    #: A number for each head of the rows.
    OF_HEADS = "of heads"
    #: Which keys rows meet, and where those lie, of shapes that the operation's own checks say. It has no gradient.
    WHICH = "which"
    #: [..., M]: of a result, a sum of values for each row.
    WEIGHED = "weighed"


#: The roles of operands that all rows take whole, and whose gradients are sums over rows.
WHOLE = (Role.WEIGHT, Role.MATRIX, Role.COLUMNS)

#: The roles of what has rows, of one length or another.
WITH_ROWS = (Role.ROWS, Role.HEADS, Role.PRODUCTS, Role.WEIGHED)

#: The roles of operands that have no gradient.
CONSTANT = (Role.IDS, Role.CHOSEN, Role.SETTINGS, Role.SCALES, Role.TABLE, Role.POSITIONS, Role.WHICH)


class Operand(NamedTuple):
    """A tensor that an operation reads."""

    name: str
    role: Role = Role.ROWS
    optional: bool = False
    #: The only one that it may have, if there is one.
    dtype: torch.dtype | None = None
    #: Whether tests and measurements of all operations pass it.
    listed: bool = True


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
    #: Other operands that the memory given for it may be; None: any, because a result that a kernel cannot write there
    #: is copied.
    may_be: tuple[str, ...] | None = ()
    #: Whether it is kept for the gradients, and not returned. It has the accumulator type.
    kept: bool = False
    #: Whether it has the accumulator type.
    wide: bool = False
    #: The result that it is a copy of, where kernels write only that.
    copy_of: str | None = None
    #: The operands on which it depends, where these are not all: it has no gradient where none of them needs one.
    of: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """The names by which backends know an operation that they have in one call."""

    #: Of calls.
    name: str
    #: In ``KNOWS``; "_backward" is added for the gradient.
    feature: str
    #: The flags that every such backend knows. It is asked about each other one that is not at its usual value.
    known: tuple[str, ...] = ()
    #: An operation with all operands and results that this one has: one kernel has both, and calls name all.
    like: Declaration | None = None
    #: The function that makes the call where its tensors do not lie in levels of rows that are the same for all. It
    #: takes the arguments of :func:`fusednorm.engine.run.forward`.
    run: Callable[..., tuple[Tensor, ...]] | None = None


_OF_THE_NAME = Kernel("", "")


@dataclass(frozen=True, eq=False)
class Declaration:
    """An operation; CONTRIBUTING has an example. All functions take operands and flags by their names."""

    name: str
    operands: tuple[Operand, ...]
    #: The specification, in torch's operations: (operands and flags) -> a tuple with a tensor for each result.
    formula: Callable[..., tuple[Tensor, ...]]
    results: tuple[Result, ...] = (Result(),)
    #: Default values by name. The default ``torch.dtype`` stands for a dtype that must be given, None for one that may
    #: be; the types ``float`` and ``int`` stand for a number or None, which is the default.
    flags: Mapping[str, Any] = field(default_factory=dict)
    #: Operands at the end and flags at the end that its operator has not. Other operators serve calls with them.
    not_of_operator: tuple[str, ...] = ()
    #: (incoming gradients, operands, kept results, flags, needs) -> a gradient or None for each operand that may have
    #: one, in torch's operations, linear in the incoming gradients. Its first parameters name the incoming gradients of
    #: the results that are returned; it has the flags that it needs. None: the operation has no gradients.
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None
    #: Whether the specification has the bits of the gradients.
    exact_gradients: bool = True
    #: In place of a gradient, where the result is linear in the first operand and the others have no gradient: (the
    #: first operand's dtype, the other operands, the flags) -> others and flags, with which the operation takes the
    #: incoming gradient back. Either may then be float64 alone.
    transposed: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    #: (operands, flags, tangents of operands or None) -> those of the results that are returned, in torch's operations.
    #: None: the gradient is transposed, which takes about twice as long.
    tangent: Callable[..., tuple[Tensor, ...]] | None = None
    #: So many dimensions at the end stay on one rank: a row, or all heads, or nothing.
    joined: int = 1
    #: Whether an operand of rows that is float64 decides that all is computed in float64; else the first operand does.
    any_decides: bool = False
    #: (operands and flags) -> None, or numbers by name in place of those given: raises where flags do not fit. The
    #: operator of gradients has not all of them.
    check: Callable[..., Mapping[str, Any] | None] | None = None
    #: (operands and flags) -> None: raises where values in memory do not fit, before the results are computed.
    check_values: Callable[..., None] | None = None
    #: (operands, flags, in_memory) -> flags: all checks, in place of those by roles, in words of the operation's own.
    checks: Callable[..., Mapping[str, Any]] | None = None
    #: None: no backend is asked, torch's operations compute it. By default the operation's name is that of calls, and
    #: in ``KNOWS``.
    kernel: Kernel | None = _OF_THE_NAME
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
    def with_gradient(self) -> tuple[Operand, ...]:
        """The operands that have gradients."""
        return tuple(operand for operand in self.operands if operand.role not in CONSTANT)

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The values of flags that are not given."""
        return {flag: None if value in (float, int) else value for flag, value in self.flags.items()}

    @functools.cached_property
    def _of_gradient(self) -> list[str]:
        """The parameters of the gradient but needs."""
        assert self.gradient is not None
        return [*inspect.signature(self.gradient).parameters][:-1]

    @functools.cached_property
    def incoming(self) -> list[str]:
        """The names of incoming gradients."""
        return self._of_gradient[: len(self.returned)]

    @functools.cached_property
    def backward_tensors(self) -> list[str]:
        """The names of the tensors that the gradients' operator takes, in order."""
        return [*self.incoming, *[one.name for one in self.operands], *[one.name for one in self.kept]]

    @functools.cached_property
    def gradient_flags(self) -> list[str]:
        """The names of the flags that the gradient takes, in the order of the flags."""
        return [flag for flag in self.flags if flag in self._of_gradient]

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """The role of each tensor of both operators, by name."""
        roles = {operand.name: operand.role for operand in self.operands}
        roles |= {result.name: result.role for result in self.kept}
        if self.gradient is not None:
            roles |= {name: result.role for name, result in zip(self.incoming, self.returned, strict=True)}
        return roles
