"""Normalises and rotates heads without torch's dispatcher, by the backend of such rows, if it can rotate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.call import Around, Flags, Heads, HeadsNorm, Rotate, Step, Strides, operation_of
from fusednorm.calls.memory import ABSENT, packed, two_levels
from fusednorm.engine import run
from fusednorm.engine.choose import Chosen, fast_paths, request
from fusednorm.reference import rotation


class Head(NamedTuple):
    """Heads of q or of k, and what goes with them."""

    #: [..., H, D].
    x: Tensor
    #: [D], [H, D] or None.
    weight: Tensor | None = None
    #: [..., H, D], which receives the results; None: new memory.
    out: Tensor | None = None
    #: [..., H] of the accumulator type, contiguous, which receives ``1 / sqrt(mean(x^2) + eps)``; or None.
    rstd: Tensor | None = None


class Turn(NamedTuple):
    """How heads are rotated."""

    #: [..., K], of a shape that expands to the rows of heads; or [P, K], with positions. None: nothing is rotated.
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor | None
    interleaved: bool
    #: The dtype that products are rounded to before two are added, or None.
    products: torch.dtype | None


def rotator_of(
    heads: Sequence[Head],
    norm: HeadsNorm | None,
    between: torch.dtype | None,
    others: Sequence[torch.dtype | None] = (),
) -> Chosen | None:
    """The backend that normalises and rotates all these heads in one call; None if there is none.

    ``others``: the dtypes of products and of results, where they are not those of x.
    """
    found = []
    for x, weight, *_ in heads:
        flags, around = Flags(), None
        if norm is not None:
            flags = Flags(norm.eps, norm.weight_offset, True, norm.round_norm, between)
            around = Around(None, 1.0)
        dtypes = (x.dtype, *(dtype for dtype in others if dtype is not None))
        found.append(run.whole_of(operation_of(x, None, weight, flags, around=around), Step("rotate", None, dtypes)))
    same_kind = all(backend is found[0] for backend in found) and len({head.x.dtype for head in heads}) == 1
    return found[0] if same_kind else None


def forward(
    heads: Sequence[Head],
    norm: HeadsNorm | None,
    between: torch.dtype | None,
    turn: Turn,
    dtype: torch.dtype | None = None,
    backend: Chosen | None = None,
) -> list[Tensor] | None:
    """The results for checked operands; None, with nothing done, if no backend can rotate them.

    ``between``: the dtype that normalised heads are rounded to before they are rotated, and ``dtype``: that of new
    results; x's if None. ``backend``: None: that of :func:`rotator_of`.
    """
    backend = backend or rotator_of(heads, norm, between, (turn.products, dtype))
    if backend is None:
        return None
    first, operands = heads[0].x, [*(head.x for head in heads), *(head.weight for head in heads), *turn[:3]]
    rows = first.shape[:-2]
    found = [
        out
        if out is not None and _can_be_written(out, [t for i, t in enumerate(operands) if t is not None and i != at])
        else torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
        for at, (x, _, out, _) in enumerate(heads)
    ]
    inputs = [_dense(head.x) for head in heads]
    tables = [t if t is None else _dense(t) for t in (turn.cos, turn.sin)]
    in_rows = [*found, *inputs]
    if turn.positions is not None:
        as_is = turn.positions.resolve_neg()
        turn = turn._replace(positions=as_is)
        in_rows.append(as_is.expand(rows))
    elif tables[0] is not None and tables[1] is not None:
        tables = [t if t is None else t.expand(*rows, t.shape[-1]) for t in tables]
        in_rows += [t for t in tables if t is not None]
    levels = two_levels(rows, [t.stride()[: len(rows)] for t in in_rows])
    if levels is None:  # what is only read can be copied, and what is written can be written afterwards
        in_memory = [t if t is None or turn.positions is not None else t.contiguous() for t in tables]
        positions = None if turn.positions is None else turn.positions.expand(rows).contiguous()
        turn = turn._replace(cos=in_memory[0], sin=in_memory[1], positions=positions)
        alone = [Head(packed(x), weight, None, rstd) for x, weight, _, rstd in heads]
        done = forward(alone, norm, between, turn, dtype, backend)
        assert done is not None
        found = done
    else:
        for out, head in zip(found, heads, strict=True):
            if out is head.out:
                increment_version(out)
        if any(t.numel() for t in found):
            backend.forward(_call(heads, inputs, found, tables, norm, between or first.dtype, turn, *levels))
    return [
        new if head.out is None or head.out is new else head.out.copy_(new)
        for new, head in zip(found, heads, strict=True)
    ]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor if the numbers of its last dimension are adjacent, else a copy."""
    adjacent = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if adjacent and not tensor.is_neg() else packed(tensor)


def _can_be_written(out: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a kernel can write to an output that shares no memory with operands, or all of it with one of them."""
    return _dense(out) is out and all(t.data_ptr() != out.data_ptr() for t in others)


def _call(
    heads: Sequence[Head],
    inputs: Sequence[Tensor],
    found: Sequence[Tensor],
    tables: Sequence[Tensor | None],
    norm: HeadsNorm | None,
    between: torch.dtype,
    turn: Turn,
    inner: int,
    strides: Sequence[Strides],
) -> Rotate:
    """The call; ``strides`` has those of the results, of the inputs, and of the positions or of both tables."""
    sets = []
    for at, (x, out) in enumerate(zip(inputs, found, strict=True)):
        weight = heads[at].weight
        if weight is not None:  # a weight with one row is that of all heads
            weight = packed(weight if weight.dim() == 1 or len(weight) > 1 else weight[0])
        x_strides, out_strides = strides[len(found) + at], strides[at]
        if x.numel():
            sets.append(
                Heads(
                    *(x, out, weight, (*x_strides, x.stride(-2)), (*out_strides, out.stride(-2))),
                    heads[at].rstd,
                )
            )
    of_rows = strides[2 * len(found) :] or [ABSENT, ABSENT]
    of_tables, of_positions = (of_rows[0], of_rows[-1]), ABSENT
    if turn.positions is not None:
        first, second = ((0, 0 if t is None else t.stride(0)) for t in tables)
        of_tables, of_positions = (first, second), of_rows[0]
    return Rotate(
        heads=tuple(sets),
        norm=norm,
        between=between,
        products=turn.products,
        interleaved=turn.interleaved,
        cos=tables[0],
        sin=tables[1],
        table_strides=of_tables,
        positions=turn.positions,
        position_strides=of_positions,
        size=inputs[0].shape[-1],
        rows=inputs[0].shape[:-2].numel(),
        inner=inner,
    )


def rotate_on_fast_path(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, products: torch.dtype | None, dtype: torch.dtype
) -> Tensor | None:
    """:func:`rotate`, if the fast path takes the call."""
    take = fast_paths.get(request())
    if take is None or dtype is not x.dtype or products not in (None, dtype):
        return None
    absent = (None,) * 3
    result = take(x, *absent, cos, sin, *absent, 0.0, 0.0, False, interleaved, products is not None, False, False)
    return None if result is None else result[0]


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, products: torch.dtype | None, dtype: torch.dtype
) -> Tensor:
    """Rotated heads, in new memory; see :func:`fusednorm.torch_ops.steps.rotate`."""
    result = rotate_on_fast_path(x, cos, sin, interleaved, products, dtype)
    if result is not None:
        return result
    found = forward([Head(x)], None, None, Turn(cos, sin, None, interleaved, products), dtype)
    return rotation.rotated(x, cos, sin, interleaved, products, dtype) if found is None else found[0]
