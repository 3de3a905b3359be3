"""The formula of a function of tensors, element by element: its operations are applied to symbols.

A symbol is a number that stands for an expression: equal symbols are equal bits, whatever the tensors hold, and ``-s``
is the negative of ``s``. Operations that move elements move their symbols; operations on single elements make a symbol
of each expression; all others make new symbols, which are equal to no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusednorm.transformers.reads import LeftAloneError

aten = torch.ops.aten

_ADDITIONS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
_DOES_NOT_REPEAT = torch.Tag.nondeterministic_seeded
_SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default}
_MOVES = {
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten._unsafe_view.default,
    aten.neg.default,
} | _SCATTERS


class Symbols(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the operations on tensors within its context. See the head of the file."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[Any, int] = {}
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # by id; with the tensor, so that no other gets its id

    def of(self, x: Tensor) -> Tensor:
        """The symbols of a tensor's elements; new ones if the tensor comes from elsewhere."""
        if id(x) not in self._of:
            first = len(self._numbers) + 1
            self._numbers |= dict.fromkeys([("new", number) for number in range(first, first + x.numel())])
            self.set(x, torch.arange(first, first + x.numel()).reshape(x.shape))
        return self._of[id(x)][1]

    def set(self, x: Tensor, symbols: Tensor) -> None:
        """Lets a tensor's elements be these symbols."""
        self._of[id(x)] = x, symbols

    def product(self, a: Tensor, b: Tensor, rounded_to: torch.dtype) -> Tensor:
        """The symbols of products; 16 bits are rounded from float32, in which torch computes them."""
        computed = torch.promote_types(rounded_to, torch.float32)

        def one(a: int, b: int) -> int:
            return (1 if (a < 0) == (b < 0) else -1) * self._number("mul", computed, *sorted((abs(a), abs(b))))

        return self.converted(self._apply(one, a, b), computed, rounded_to)

    def sum(self, a: Tensor, b: Tensor, rounded_to: torch.dtype) -> Tensor:
        """The symbols of sums; 16 bits are rounded from float32, as those of products."""
        computed = torch.promote_types(rounded_to, torch.float32)
        found = self._apply(lambda a, b: self._number("add", computed, *sorted((a, b))), a, b)
        return self.converted(found, computed, rounded_to)

    def converted(self, symbols: Tensor, before: torch.dtype, after: torch.dtype) -> Tensor:
        """The symbols of numbers of one dtype that are converted to another one."""
        if before.is_floating_point and torch.promote_types(before, after) == after:
            return symbols  # exact
        return self._apply(lambda s, _: (-1 if s < 0 else 1) * self._number(before, after, abs(s)), symbols, symbols)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, on its tensors and on their symbols."""
        kwargs = kwargs or {}
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            raise LeftAloneError("its rotation cannot be followed: its way depends on the numbers in a tensor")
        if func._schema.is_mutable:
            raise LeftAloneError(f"its rotation cannot be followed: it writes to a tensor: {func}")
        result = func(*args, **kwargs)
        if func.is_view or func in _MOVES:
            self._move(func, args, kwargs, result)
        elif isinstance(result, Tensor):
            symbols = self._pointwise(func, args, kwargs, result)
            if symbols is not None:
                self.set(result, symbols)
        return result

    def _move(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Sets the symbols of moved elements."""
        moved = func(*torch.utils._pytree.tree_map_only(Tensor, self.of, args), **kwargs)
        dtypes = {x.dtype for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)}
        several = isinstance(result, list | tuple)
        for one, symbols in zip(result if several else [result], moved if several else [moved], strict=True):
            if {one.dtype} == dtypes and one.shape == symbols.shape:
                self.set(one, symbols)

    def _pointwise(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Tensor | None:
        """The symbols of an operation on single elements; None for another operation."""
        if func is aten._to_copy.default:
            return self.converted(self.of(args[0]), args[0].dtype, result.dtype)
        both = len(args) == 2 and not kwargs and all(isinstance(x, Tensor) and x.is_floating_point() for x in args)
        if both and func is aten.mul.Tensor:
            return self.product(self.of(args[0]), self.of(args[1]), result.dtype)
        if both and func in _ADDITIONS:
            a, b = map(self.of, args)
            return self.sum(a, _ADDITIONS[func] * b, result.dtype)
        if torch.Tag.pointwise not in func.tags or _DOES_NOT_REPEAT in func.tags:
            return None
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(isinstance(x, Tensor) for x in torch.utils._pytree.tree_leaves(kwargs)) or not tensors:
            return None
        name = str(func), result.dtype, *(x.dtype if isinstance(x, Tensor) else str(x) for x in args), str(kwargs)
        columns = [x.flatten().tolist() for x in _broadcast(*map(self.of, tensors))]
        found = [self._number(name, *symbols) for symbols in zip(*columns, strict=True)]
        return torch.tensor(found, dtype=torch.int64).reshape(result.shape)

    def _apply(self, function: Callable[[int, int], int], a: Tensor, b: Tensor) -> Tensor:
        a, b = _broadcast(a, b)
        found = [function(*pair) for pair in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)]
        return torch.tensor(found, dtype=torch.int64).reshape(a.shape)

    def _number(self, *expression: Any) -> int:
        return self._numbers.setdefault(expression, len(self._numbers) + 1)


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
