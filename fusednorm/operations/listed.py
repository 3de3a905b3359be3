"""All operations as data, for what has a line for each: explain, prewarm, contract, check and bench.

Each is listed by its declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusednorm.declare.declaration import Result, Role
from fusednorm.operations.front_door import PUBLIC, Operation
from fusednorm.operations.l2 import l2_norm


class Listed(NamedTuple):
    """An operation, and a call of it."""

    function: Callable[..., Any]
    #: The twin that works in place.
    in_place: Callable[..., Any] | None
    #: By the names of the function's arguments. Where there are tables, rows are heads of :func:`head_size` elements.
    operands: Mapping[str, Role]
    #: With the operands that the twin overwrites.
    results: tuple[Result, ...]
    #: The plain operations in their order, with commas between; none where it has a call of its own, or none.
    steps: str
    #: Further arguments of a call that :mod:`fusednorm.tools.check` makes; a role stands for an operand.
    sample: Mapping[str, Any] = {}
    differentiable: bool = True
    #: Whether the specification has the bits of its gradients.
    exact_gradients: bool = True
    #: The only dtypes that operands may have, by their names.
    dtypes: Mapping[str, torch.dtype] = {}

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    @property
    def of_keys(self) -> bool:
        """Whether its rows meet keys, of which there may be any number."""
        return Role.KEYS in self.operands.values()

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function."""
        return inspect.signature(self.function).parameters

    @property
    def defaults(self) -> dict[str, Any]:
        """The flags of a call that gives none."""
        return {name: one.default for name, one in self.parameters.items() if name not in self.operands}

    @property
    def needed(self) -> dict[str, Any]:
        """The flags of the sample without which the function cannot be called."""
        empty = inspect.Parameter.empty
        return {name: value for name, value in self.sample.items() if self.defaults[name] is empty}

    def tensors(self, x: Tensor, other: Tensor, weight: Tensor | None) -> dict[str, Tensor | None]:
        """Operands by name, of rows [M, N], of others, which are also a matrix, and of a weight [N] or None."""
        roles = [*self.operands.values()]
        if self.of_keys:
            return self._of_heads(x, other)
        made: dict[str, Tensor | None] = {}
        for place, (name, role) in enumerate(self.operands.items()):
            first, later = _tensors(role, Role.TABLE in roles, x, other, weight)
            made[name] = later if role in roles[:place] else first
            if self.dtypes:
                made[name] = _of_dtype(cast(Tensor, made[name]), self.dtypes.get(name))
        return made

    def _of_heads(self, x: Tensor, other: Tensor) -> dict[str, Tensor | None]:
        """Queries of rows x, which lie one after the other, and keys and values of the others; in one page if any."""
        size = head_size(x.shape[-1])
        q, k = (t.reshape(-1, t.shape[-1] // size, size) for t in (x, other.to(x.dtype)))
        count, keys = len(q), k.transpose(0, 1).unsqueeze(0)
        if "pages" not in self.operands:
            q = q.transpose(0, 1).unsqueeze(0)
        pages = {"pages": [[0]], "starts": [0, count], "lengths": [count]}
        made = {"q": q, "k": keys, "v": keys.flip(2)}
        made |= {name: torch.tensor(numbers, device=x.device) for name, numbers in pages.items()}
        return {name: made.get(name) for name in self.operands}

    def of_sample(self, x: Tensor, other: Tensor, weight: Tensor) -> dict[str, Any]:
        """The arguments of the sample's call."""
        more = {
            name: _tensors(value, False, x, other, weight)[0] if isinstance(value, Role) else value
            for name, value in self.sample.items()
        }
        return self.tensors(x, other, weight) | more


def _of_dtype(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Numbers near those of t; whole ones of up to 127; None: of at most 32 bits."""
    if dtype is None:
        return t.detach().float() if t.dtype is torch.float64 else t.detach()
    if dtype.is_floating_point:
        return t.detach().to(dtype)
    return t.detach().float().nan_to_num().mul(40).clamp(-127, 127).to(dtype)


def head_size(hidden_size: int) -> int:
    """The length of heads in rows of that length: 128, or the whole row where that does not divide it."""
    return 128 if hidden_size % 128 == 0 else hidden_size


def _tensors(role: Role, heads: bool, x: Tensor, other: Tensor, weight: Tensor | None) -> Sequence[Tensor | None]:
    """The first operand with this role, and each later one; ``heads``: where rows are heads."""
    size = head_size(x.shape[-1])
    match role:
        case Role.ROWS | Role.SAMPLES:
            return [t.view(len(x), -1, size) for t in (x, x.flip(0))] if heads else (x, other)
        case Role.WEIGHT:
            return (weight[:size], weight[-size:]) if heads and weight is not None else (weight, weight)
        case Role.MATRIX:
            return other, other.flip(0)
        case Role.NUMBERS | Role.COLUMNS:
            return (other[:, 0],) * 2
        case Role.SCALES:
            return (other.detach()[:, :1].abs() + 1,) * 2
        case Role.SETTINGS:
            return (other.detach()[:, 0].abs().nan_to_num(posinf=0.0) + 1,) * 2
        case Role.IDS | Role.CHOSEN:
            return (torch.arange(len(x), device=x.device) % x.shape[-1],) * 2
    return other.detach()[:, :size].chunk(2, -1)


#: No operation of its own: it calls another one.
_L2_NORM = Listed(l2_norm, None, {"x": Role.ROWS}, (Result(),), "norm")

#: The roles of operands that are listed with another one: each has as many heads as the first.
_LISTED = {Role.HEADS: Role.ROWS}


def _declared(name: str, function: Callable[..., Any], operation: Operation) -> Listed:
    declaration = operation.declaration
    taken = inspect.signature(function).parameters
    sample = {flag: value for flag, value in declaration.samples[-1].items() if flag in taken}
    others = [one for one in declaration.operands if not one.listed and one.role is Role.WEIGHT]
    return Listed(
        function,
        operation.functions.get(f"{name}_"),
        {one.name: _LISTED.get(one.role, one.role) for one in declaration.operands if one.listed},
        declaration.returned,
        operation.steps,
        sample | {one.name: one.role for one in others},
        operation.differentiable,
        declaration.exact_gradients,
        {one.name: one.dtype for one in declaration.operands if one.dtype is not None},
    )


def every() -> dict[str, Listed]:
    """The operations, by the names of the functions that return new tensors."""
    new = [(function.__name__, function, operation) for function, operation in PUBLIC.items()]
    declared = [_declared(*one) for one in new if not one[0].endswith("_")]
    return {listed.name: listed for listed in (*declared, _L2_NORM)}


def of_function(function: Any) -> Listed:
    """The operation of a function, or of its twin in place.

    Raises:
        TypeError: no operation has this function.
    """
    operations = every().values()
    for listed in operations:
        if function is not None and function in (listed.function, listed.in_place):
            return listed
    functions = [f.__name__ for one in operations for f in (one.function, one.in_place) if f is not None]
    known = ", ".join(sorted(functions))
    raise TypeError(f"function must be one of {known}, got {getattr(function, '__name__', function)!r}")
