"""Calls that go through torch's dispatcher, because a mode, a tracer or a tensor must see them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from fusednorm.calls import checks, must_be_seen
from fusednorm.torch_ops.registered import ARGUMENTS


class OfDTensors(NamedTuple):
    """Functions for DTensors: those of ``sharding.py`` and ``parts_of_logits.py``."""

    on_rows: Callable[..., tuple[Tensor | None, ...]]
    of_parts_of_logits: Callable[..., tuple[Tensor, ...] | None]
    parts_of_groups: Callable[..., Tensor]


_loaders: list[Callable[[], OfDTensors]] = []

#: Gives the function that imports them, when the first DTensor is met: those modules import this one.
load_by = _loaders.append


def _for_dtensors() -> OfDTensors:
    return _loaders[-1]()


def operations(*operands: Tensor | None) -> Any:
    """``torch.ops.fusednorm``. If an operand is a DTensor, torch knows by then how to shard the operations."""
    if any(map(_is_dtensor, operands)):
        _for_dtensors()
    return torch.ops.fusednorm


def in_one_operator(name: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of the operator that is all of a public function of this name, or of its twin; outputs are left out.

    See ``operations/inference.py``.
    """
    operator = f"{name.rstrip('_')}_inference"
    found = getattr(torch.ops.fusednorm, operator)(**{key: arguments[key] for key in ARGUMENTS[operator].split()})
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _is_dtensor(operand: object) -> bool:
    if operand is None or type(operand) in (Tensor, Parameter):  # asked first: a compiler reads sys.modules for 30 ms
        return False
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(operand, tensor.DTensor)


def on_rows(
    formula: Callable[..., tuple[Tensor | None, ...]],
    operands: Sequence[Tensor | None],
    whole: Sequence[int] = (),
    sums: Mapping[int, int] | None = None,
    joined: int = 1,
) -> tuple[Tensor | None, ...]:
    """``formula(*operands)``, a formula out of torch's operations.

    Of DTensors each rank computes it for its own rows. torch would convert summands whose sum is pending, and add parts
    of a row in another order; and torch 2.13 does not shift the bits of a DTensor.

    Args:
        formula: returns tensors with rows, or the ranks' shares of a sum; None where there is none.
        operands: with rows, [..., N]; None where there is none.
        whole: the places of operands that each rank has whole, such as a weight.
        sums: the places of results that have not the first operand's shape, each with the operand whose shape it has:
            shares of a sum over rows where each rank has that whole.
        joined: so many dimensions at the end of rows are joined on a rank: a row, or all heads, or nothing.
    """
    if not all(map(_is_dtensor, [t for t in operands if t is not None])):  # torch refuses a mix in its own words
        return formula(*operands)
    return _for_dtensors().on_rows(formula, cast(Any, operands), whole, sums or {}, joined)


def of_parts_of_logits(
    operator: Any, operands: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[Tensor, ...] | None:
    """The results of a declared operation with log-probabilities, of DTensors whose rows lie in parts.

    None for other tensors, and where it moves fewer bytes to join the rows.
    """
    if not all(map(_is_dtensor, [t for t in operands.values() if t is not None])):
        return None
    return _for_dtensors().of_parts_of_logits(operator, operands, flags)


def parts_of_groups(rows: Tensor, groups: int) -> Tensor:
    """[..., N] of so many groups of elements; of a DTensor each rank has whole groups."""
    if not _is_dtensor(rows):
        return rows
    return _for_dtensors().parts_of_groups(cast(Any, rows), groups)


def as_placed(like: Tensor, tensor: Tensor) -> Tensor:
    """A DTensor as another one is placed; torch copies only some to others that lie elsewhere."""
    if _is_dtensor(like) and _is_dtensor(tensor):
        return cast(Any, tensor).redistribute(placements=cast(Any, like).placements)  # type: ignore[no-any-return]
    return tensor


def written(given: Tensor | None, new: Tensor) -> Tensor:
    """A new result; or the tensor that the caller gave for it, which takes a copy. A DTensor stays where it lies."""
    if given is None or given is new:
        return new
    return given.copy_(as_placed(given, new))


def check_kept(incoming: Sequence[Tensor | None], kept: Sequence[Tensor | None]) -> None:
    """:func:`fusednorm.calls.checks.check_kept`, of operands that lie in memory."""
    if must_be_seen.in_memory(*incoming, *kept):
        checks.check_kept(incoming, kept)
