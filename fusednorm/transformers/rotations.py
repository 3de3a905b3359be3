"""Recognises the rotation of q and k by position, and the tables for it, by their computation.

Each function is called with small tensors, and its operations are followed on symbols (``symbols.py``). If every
element of its results is that of :func:`fusednorm.rotate` for some flags, the result is these flags; otherwise the
reason why not.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, dtype
from torch.compiler import is_dynamo_compiling

from fusednorm.operations.rotate import qk_norm_rope, qk_norm_rope_on_fast_path
from fusednorm.transformers.norms import Form
from fusednorm.transformers.reads import LeftAloneError, Reads, in_a_line
from fusednorm.transformers.replacing import replaced
from fusednorm.transformers.symbols import Symbols

_A = torch.float32  # the accumulator type
_PAIRS = [(x, tables) for x in (_A, torch.bfloat16, torch.float16) for tables in dict.fromkeys((x, _A))]
_ANGLES = 2  # of a row of the tables, in the calls below


@dataclass(frozen=True)
class Rotation:
    """A function of q, k, cos and sin, as a call of :func:`fusednorm.rotate` for q and k.

    ``heads`` is the dimension of q and k that counts heads: 1 of four, or -2. With ``to_halves`` pairs that lie side by
    side come out as halves.
    """

    heads: int
    interleaved: bool
    to_halves: bool
    round_products: bool

    def of(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Form | None = None,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        tables: Tables | None = None,
    ) -> Any:
        """Rotated q and k, [batch, tokens, heads, D], with pairs as halves already, as the function returns them.

        With ``norm`` they are normalised first. None if ``tables``, whose cos and sin are given, do not fit both.
        """
        interleaved, products = self.interleaved and not self.to_halves, self.round_products
        eps, offset, rounded = (0.0, 0.0, False) if norm is None else (norm.eps, norm.weight_offset, norm.round_norm)
        both: tuple[Tensor, Tensor] | None = None
        if not is_dynamo_compiling():  # C, which compares shapes, is asked before they are
            both = qk_norm_rope_on_fast_path(
                q, k, q_weight, k_weight, cos, sin, eps, norm is not None, None, interleaved, products, None, offset,
                rounded,
            )  # fmt: skip
        if both is None:
            if tables is not None and not tables.fit(q, k):
                return None
            both = qk_norm_rope(
                q, k, q_weight, k_weight, cos, sin, eps, norm=norm is not None, interleaved=interleaved,
                round_products=products, weight_offset=offset, round_norm=rounded,
            )  # fmt: skip
        q, k = both
        return (q.transpose(1, 2), k.transpose(1, 2)) if self.heads == 1 else (q, k)


#: By the dtypes of q and k and of the tables; the columns of the tables, a key of ``_TABLES``; whether all numbers of a
#: head are rotated; and the dimensions of q and k, of which three are tokens, heads and numbers.
Rotations = dict[tuple[dtype, dtype, str, bool, int], Rotation]
#: Dimensions of q and k, and the one of them that counts heads.
_HEADS = ((4, 1), (4, -2), (3, -2))


def rotations(function: Callable[..., Any], arguments: dict[str, Any]) -> Rotations:
    """The rotations that a function of q, k, cos and sin, and of further arguments, is.

    Raises:
        LeftAloneError: it is none.
    """
    if not callable(function) or replaced(function):
        raise LeftAloneError("something else has replaced its rotation")
    found: Rotations = {}
    shapes = list(itertools.product(_TABLES, (True, False), _HEADS))
    reasons: list[LeftAloneError] = []
    for pair in _PAIRS:
        for columns, whole, (dims, heads) in shapes:
            try:
                found[*pair, columns, whole, dims] = _rotation(function, arguments, *pair, columns, whole, dims, heads)
            except LeftAloneError as error:
                reasons.append(error)
        shapes = [shape for shape in shapes if (_A, _A, *shape[:2], shape[2][0]) in found]
        if not shapes:
            raise reasons[0]  # that of the usual case
    return found


def _rotation(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    x_dtype: dtype,
    tables_dtype: dtype,
    columns: str,
    whole: bool,
    dims: int,
    heads: int,
) -> Rotation:
    size = 2 * _ANGLES + (0 if whole else 2)
    batch = (2,) * (dims - 3)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), Symbols() as symbols:
        q, k = (torch.ones(*batch, *((n, 5) if heads == 1 else (5, n)), size, dtype=x_dtype) for n in (3, 1))
        angles = [symbols.of(torch.ones(*batch, 5, _ANGLES)) for _ in ("cos", "sin")]
        numbers = [_TABLES[columns].from_angles(table) for table in angles]
        cos, sin = (torch.ones(table.shape, dtype=tables_dtype) for table in numbers)
        symbols.set(cos, numbers[0])
        symbols.set(sin, numbers[1])
        try:
            results = function(q, k, cos, sin, **arguments)
        except LeftAloneError:
            raise
        except Exception as error:  # the model's code may raise anything for tensors that it does not expect
            raise LeftAloneError(f"its rotation cannot be traced: {in_a_line(error)}") from error
        if not (isinstance(results, tuple) and len(results) == 2 and all(isinstance(y, Tensor) for y in results)):
            raise LeftAloneError("its rotation does not return q and k")
        for x, y in zip((q, k), results, strict=True):
            if (y.dtype, y.shape) != (x.dtype, x.shape):
                raise LeftAloneError(f"its rotation of {_described(x)} returns {_described(y)}")
    for flags in ((False, False), (True, False), (True, True)):
        for round_products in (False, True):
            rotation = Rotation(heads, *flags, round_products)
            if all(
                torch.equal(symbols.of(y), _expected(symbols, rotation, symbols.of(x), angles, x_dtype))
                for x, y in zip((q, k), results, strict=True)
            ):
                return rotation
    raise LeftAloneError("its rotation computes something else")


def _described(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]} {list(x.shape)}"


def _expected(symbols: Symbols, rotation: Rotation, x: Tensor, angles: list[Tensor], x_dtype: dtype) -> Tensor:
    """The symbols of a rotated x: the formula of docs/spec.md, section 8."""
    cos, sin = (table.unsqueeze(rotation.heads) for table in angles)
    turned, rest = x[..., : 2 * _ANGLES], x[..., 2 * _ANGLES :]
    pairs = turned.reshape(*turned.shape[:-1], *((_ANGLES, 2) if rotation.interleaved else (2, _ANGLES)))
    first, second = pairs.unbind(-1 if rotation.interleaved else -2)
    products = x_dtype if rotation.round_products else _A

    def one(a: Tensor, b: Tensor, sign: int) -> Tensor:
        return symbols.sum(symbols.product(a, cos, products), sign * symbols.product(b, sin, products), x_dtype)

    both = one(first, second, -1), one(second, first, 1)
    side_by_side = rotation.interleaved and not rotation.to_halves
    y = torch.stack(both, -1).flatten(-2) if side_by_side else torch.cat(both, -1)
    return torch.cat([y, rest], -1)


class Tables(tuple[Tensor, Tensor]):
    """cos and sin, [batch, tokens, columns] or [tokens, columns], of a module with :func:`tables_of`."""

    #: The columns: the angles once, twice as two halves, or twice side by side.
    columns = "once"

    size: int  # the numbers of a head that they rotate
    batch: int  # the rows of tokens; 1 holds for any number
    tokens: int
    dims: int
    dtype: dtype
    _angles: tuple[Tensor, Tensor]
    _written: list[int] | None

    def __new__(cls, tables: Iterable[Tensor]) -> Tables:
        self = tuple.__new__(cls, tables)
        cos, sin = self
        self._angles, self._written = (cls.to_angles(cos), cls.to_angles(sin)), writes(self)
        *batch, self.tokens, angles = self._angles[0].shape
        self.batch = batch[0] if batch else 1
        self.size, self.dtype, self.dims = 2 * angles, cos.dtype, cos.dim()
        return self

    def angles(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin without the half of the columns that repeats the other half, as they are now.

        None if it does not repeat it any more, after a write. A compiler shows no writes, so there all are of whole
        tables.
        """
        if is_dynamo_compiling():
            cos, sin = self
            return self.to_angles(cos), self.to_angles(sin)
        written = writes(self)
        if written != self._written or written is None:
            cos, sin = self
            if not (self.repeat(cos) and self.repeat(sin)):
                return None
            self._angles, self._written = (self.to_angles(cos), self.to_angles(sin)), written
        return self._angles

    def fit(self, q: Tensor, k: Tensor) -> bool:
        """Whether these are of the tokens of q and k, [batch, tokens, heads, D] or [tokens, heads, D]."""
        of_q, of_k = q.shape, k.shape
        if len(of_q) != len(of_k) or q.dtype != k.dtype:
            return False
        return of_q[-3] == of_k[-3] == self.tokens and (len(of_q) == 3 or self.batch in (1, of_q[0]))

    @staticmethod
    def to_angles(table: Tensor) -> Tensor:
        """The columns without repetition."""
        return table

    @staticmethod
    def from_angles(angles: Tensor) -> Tensor:
        """A table with all columns, of those without repetition."""
        return angles

    @classmethod
    def repeat(cls, table: Tensor) -> bool:
        """Whether the columns of a table are such columns."""
        return cls is Tables or torch.equal(cls.from_angles(cls.to_angles(table)), table)


class Halves(Tables):
    """Tables whose second half of columns repeats the first one."""

    columns = "halves"

    @staticmethod
    def to_angles(table: Tensor) -> Tensor:
        return table[..., : table.shape[-1] // 2]

    @staticmethod
    def from_angles(angles: Tensor) -> Tensor:
        return torch.cat([angles, angles], -1)


class Pairs(Tables):
    """Tables each of whose columns stands twice, side by side."""

    columns = "pairs"

    @staticmethod
    def to_angles(table: Tensor) -> Tensor:
        return table[..., ::2].contiguous()

    @staticmethod
    def from_angles(angles: Tensor) -> Tensor:
        return angles.repeat_interleave(2, -1)


def writes(tables: Iterable[Tensor]) -> list[int] | None:
    """The number of writes to each table; None where torch counts none."""
    uncounted = is_dynamo_compiling() or any(table.is_inference() for table in tables)
    return None if uncounted else [table._version for table in tables]


#: By the columns.
_TABLES: dict[str, type[Tables]] = {kind.columns: kind for kind in (Halves, Pairs, Tables)}


def _rebuilt(parts: Iterable[Any], kind: type[Tables]) -> Any:
    parts = tuple(parts)
    return kind(parts) if all(isinstance(part, Tensor) for part in parts) else parts


for _kind in _TABLES.values():  # lets FSDP and others, which change each tensor of a tuple, do the same here
    torch.utils._pytree.register_pytree_node(_kind, lambda tables: (list(tables), type(tables)), _rebuilt)


def tables_of(module: torch.nn.Module, reads: Reads) -> type[Tables] | None:
    """The outputs of a module's forward pass; None if it does not take hidden states and positions and return tables.

    Its names for kinds of layers, if it takes one after the positions, are those that it has in ``layer_types``.
    ``reads`` gets the attributes with which it does so.
    """
    forward = inspect.unwrap(type(module).forward)
    parameters = list(inspect.signature(forward).parameters.values())
    required = [parameter for parameter in parameters[3:] if parameter.default is parameter.empty]
    if (
        len(parameters) < 3
        or len(required) > 1
        or any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in required)
    ):
        return None
    layers: list[tuple[str, ...]] = [(name,) for name in getattr(module, "layer_types", ())] if required else [()]

    def kinds(*positions: int) -> set[type[Tables] | None]:
        return {_tables(reads.copy_of(module), module, forward, of_layer, positions) for of_layer in layers}

    found = kinds(2, 3)
    if found == {None}:
        found = kinds(5, 2)  # the two coordinates of each part of images
    else:
        found |= kinds(3, 2, 3) - {None}  # in text, height and width
    return found.pop() if len(found) == 1 else None


def _tables(
    bare: torch.nn.Module,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    of_layer: tuple[str, ...],
    of_positions: tuple[int, ...],
) -> type[Tables] | None:
    for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
        own: dict[str, Any] = bare._buffers if name in bare._buffers else bare._parameters
        own[name] = torch.ones(tensor.shape, dtype=tensor.dtype)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), Symbols() as symbols:
        x, positions = torch.ones(2, 3, 4), torch.ones(of_positions, dtype=torch.int64)
        try:
            found = torch.func.functionalize(lambda: forward(bare, x, positions, *of_layer))()
        except Exception:  # the code of a module that is for something else may raise anything
            return None
        if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(table, Tensor) for table in found)):
            return None
        cos, sin = found
        of_rows = positions.shape[:1] if positions.shape == (5, 2) else positions.shape[-2:]
        if cos.shape[:-1] != of_rows or (cos.shape, cos.dtype) != (sin.shape, sin.dtype):
            return None
        numbers = [symbols.of(table) for table in found]
    even = cos.shape[-1] % 2 == 0
    for kind in _TABLES.values():
        if (even or kind is Tables) and all(map(kind.repeat, numbers)):
            return kind
    return None
