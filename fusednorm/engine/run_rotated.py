"""Normalises and rotates heads without torch's dispatcher, by the backend of such rows, if it can rotate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.call import Flags, Heads, HeadsNorm, Rotate, Step, operation_of
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.memory import packed, two_levels
from fusednorm.engine import execute
from fusednorm.engine.choose import Chosen

_heads = Entry("rotation", "q k cos sin positions interleaved round_products").open()

#: Cosines and sines, [..., K] of a shape that expands to the rows of heads, and None; or both [P, K], and positions.
#: Without cosines nothing is rotated.
Tables: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


class Head(NamedTuple):
    """Heads of q or of k, and what goes with them."""

    #: [..., H, D].
    x: Tensor
    #: [D], [H, D] or None.
    weight: Tensor | None = None
    #: [..., H, D], which receives the results if a kernel can write there; None: new memory.
    out: Tensor | None = None
    #: [..., H] of the accumulator type, contiguous, which receives ``1 / sqrt(mean(x^2) + eps)``; or None.
    rstd: Tensor | None = None


class Rotation(NamedTuple):
    """How heads are normalised and rotated: all arguments that are no operands. They have been checked."""

    interleaved: bool
    #: The dtype that products are rounded to before two are added, or None.
    products: torch.dtype | None
    #: Of new results; None: that of x.
    dtype: torch.dtype | None = None
    #: Of the norm of each head before, whose ``out_dtype`` is that of what is rotated; None: there is no norm.
    norm: Flags | None = None


def rotator_of(heads: Sequence[Head], how: Rotation) -> Chosen | None:
    """The backend that normalises and rotates all these heads in one call; None if there is none."""
    operations = [operation_of(head.x, None, head.weight, how.norm or Flags()) for head in heads]
    first, last = operations[0], operations[-1]
    if last.x != first.x:
        return None
    step = Step("rotate", None, tuple([dtype for dtype in (first.x, how.products, how.dtype) if dtype is not None]))
    backend = execute.whole_of(first, step)
    return backend if last == first or execute.whole_of(last, step) is backend else None


def forward(
    heads: Sequence[Head], tables: Tables, how: Rotation, backend: Chosen | None = None
) -> Sequence[Tensor] | None:
    """The results for checked operands, new ones where they are not in ``out``.

    None, with nothing done, if no backend can rotate them. ``backend``: None: that of :func:`rotator_of`.
    """
    backend = backend or rotator_of(heads, how)
    if backend is None:
        return None
    (cos, sin, positions), rows = tables, heads[0].x.shape[:-2]
    inputs, weights = [head.x for head in heads], [head.weight for head in heads]
    read = [t.data_ptr() for t in (*inputs, *weights, *tables) if t is not None]
    found: list[Tensor] = []
    for x, _, out, _ in heads:
        # A kernel can write where no operand begins but the heads that it replaces.
        if out is None or _dense(out) is not out or read.count(out.data_ptr()) > (out.data_ptr() == x.data_ptr()):
            out = execute.new_like(x, how.dtype or x.dtype)
        found.append(out)
    inputs = [_dense(x) for x in inputs]
    in_rows = [t.stride()[:-2] for t in (*inputs, *found)]
    of_tables = [(0,) * len(rows)] * 3
    if cos is not None and sin is not None:
        cos, sin = _dense(cos), _dense(sin)
        if positions is not None:
            positions = positions.resolve_neg().expand(rows)
            of_tables[2] = positions.stride()
        else:
            cos, sin = cos.expand(*rows, cos.shape[-1]), sin.expand(*rows, sin.shape[-1])
            of_tables[:2] = cos.stride()[:-1], sin.stride()[:-1]
    levels = two_levels(rows, (*of_tables, *in_rows))
    if levels is None:  # what is only read can be copied, and what is written can be written afterwards
        alone = [Head(packed(x), weight, None, rstd) for x, weight, _, rstd in heads]
        if positions is not None:
            positions = positions.contiguous()
        elif cos is not None and sin is not None:
            cos, sin = cos.contiguous(), sin.contiguous()
        return forward(alone, (cos, sin, positions), how, backend)
    inner, (of_cos, of_sin, of_positions, *of_heads) = levels
    if positions is not None and cos is not None and sin is not None:
        of_cos, of_sin = (0, cos.stride(0)), (0, sin.stride(0))
    increment_version([new for new, head in zip(found, heads, strict=True) if new is head.out])
    sets = []
    for at, (x, out, weight) in enumerate(zip(inputs, found, weights, strict=True)):
        of_x, of_out = of_heads[at], of_heads[at + len(heads)]
        if x.numel():
            strides = (*of_x, x.stride(-2)), (*of_out, out.stride(-2))
            sets.append(Heads(x, out, execute.of_all_heads(weight), *strides, heads[at].rstd))
    if sets:
        norm, x = how.norm, inputs[0]
        call = Rotate(
            heads=tuple(sets),
            norm=None if norm is None else HeadsNorm(norm.eps, norm.weight_offset, norm.round_norm),
            between=(norm and norm.out_dtype) or x.dtype,
            products=how.products,
            interleaved=how.interleaved,
            cos=cos,
            sin=sin,
            table_strides=(of_cos, of_sin),
            positions=positions,
            position_strides=of_positions,
            size=x.shape[-1],
            rows=rows.numel(),
            inner=inner,
        )
        backend.forward(call)
    return found


def _dense(tensor: Tensor) -> Tensor:
    """The tensor if the numbers of its last dimension are adjacent, else a copy."""
    adjacent = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if adjacent and not tensor.is_neg() else packed(tensor)


def on_fast_path(heads: Sequence[Tensor], tables: Tables, how: Rotation) -> Any:
    """Rotated heads in new memory, without a norm, if the fast path takes the call; a tuple for q and for k."""
    dtype = heads[0].dtype
    if how.dtype not in (None, dtype) or how.products not in (None, dtype):
        return None
    q, k = (*heads, None)[:2]
    return _heads(q, k, *tables, how.interleaved, how.products is not None)
