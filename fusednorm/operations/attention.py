"""Attention: sums of values, weighed by how queries meet keys, in one order everywhere (docs/spec.md, section 15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.attention_checks import check_attention, check_paged_attention, check_pages
from fusednorm.calls.checks import requires_grad
from fusednorm.calls.fast_path import Entry
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.engine import run_attention as engine
from fusednorm.operations.front_door import Operation
from fusednorm.reference import attention as reference

#: As C takes a call without an output, of the operator too.
_TAKEN = "q k v sinks mask scale causal window softcap"
_HEADS = (Operand("q"), Operand("k", Role.KEYS), Operand("v", Role.VALUES))
_SINKS = Operand("sinks", Role.OF_HEADS, optional=True)
_FLAGS = {"scale": float, "causal": True, "window": int, "softcap": float}
#: Flags of calls that tests make.
_SAMPLES: tuple[dict[str, Any], ...] = ({}, {"scale": 0.3, "window": 3, "softcap": 2.0}, {"causal": False})
_REFUSED = (
    ({"window": 0}, ValueError, "window must be at least 1"),
    ({"window": 1.5}, TypeError, "window must be int or None"),
    ({"softcap": 0.0}, ValueError, "softcap must be finite and greater than 0"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    ({"causal": 1}, TypeError, "causal must be True or False"),
)

_ATTENTION = Operation(
    Declaration(
        "attention",
        operands=(*_HEADS, _SINKS, Operand("mask", Role.WHICH, optional=True)),
        results=(Result(role=Role.WEIGHED),),
        flags=_FLAGS,
        formula=reference.attention,
        gradient=reference.attention_gradients,
        exact_gradients=False,
        joined=4,
        checks=check_attention,
        kernel=Kernel("attention", "attention", known=(*_FLAGS,), run=engine.forward),
        samples=_SAMPLES,
        refused=_REFUSED,
    ),
    fast=Entry("attention", _TAKEN).open(),
)
_on_fast_path = _ATTENTION.open(Entry("attention", f"{_TAKEN} out"))
_PAGED = Operation(
    Declaration(
        "paged_attention",
        operands=(*_HEADS, *[Operand(name, Role.WHICH) for name in ("pages", "starts", "lengths")], _SINKS),
        results=(Result(role=Role.WEIGHED),),
        flags=_FLAGS,
        formula=reference.paged_attention,
        joined=3,
        checks=check_paged_attention,
        check_values=check_pages,
        kernel=Kernel("paged_attention", "paged_attention", known=(*_FLAGS,), run=engine.forward),
        samples=_SAMPLES,
        refused=_REFUSED,
    )
)


@_ATTENTION.public
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``softmax(q @ k.T * scale) @ v`` over the keys that each query sees, added up in one order.

    The bits of a query's result depend on it and on the keys and values that it sees, in their order, and on nothing
    else: not on other queries, the batch, padding, or whether keys lie in one tensor or in pages. Scores and sums are
    in float32 (float64 for float64), whose order ``docs/spec.md`` states in section 15.

    Query i has the place p = L - Q + i among the keys. A key that it does not see takes no part, NaN or not. A query
    that sees none has zeros.

    The gradients are torch's products. The specification says nothing of their bits.

    Args:
        q: [B, Hq, Q, D], float16, bfloat16, float32 or float64, any strides; D is at least 1.
        k: [B, Hkv, L, D] of q's dtype, any strides. Hkv divides Hq: a head of k serves Hq / Hkv heads of q.
        v: [B, Hkv, L, Dv] of q's dtype, any strides.
        scale: what products are multiplied by; ``D**-0.5`` if None.
        causal: whether a query sees only keys up to its place.
        window: at least 1: a query sees only keys after p - window, and before p + window. None: no such limit.
        softcap: greater than 0: the scaled products go through ``softcap * tanh(t / softcap)``. None: they do not.
        sinks: [Hq], a floating dtype: for each head one more score without a value, neither scaled nor capped.
        mask: bool, of a shape that expands to [B, Hq, Q, L]: a query sees only keys where it is True.
        out: [B, Hq, Q, Dv] of q's dtype to write to. It shares no memory with an operand.

    Returns:
        [B, Hq, Q, Dv] in q's dtype; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices, numbers or memory do not fit.
    """
    if not is_dynamo_compiling():
        found: Tensor | None = _on_fast_path(q, k, v, sinks, mask, scale, causal, window, softcap, out)
        if found is not None:
            return found
    operands = {"q": q, "k": k, "v": v, "sinks": sinks, "mask": mask}
    flags = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    return _ATTENTION("attention", **operands, **flags, out=out)


@_PAGED.public
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`attention` of S sequences at once, whose keys and values lie in pages, as the caches of engines do.

    Each sequence has the bits of :func:`attention` of it alone. The queries of sequence s are
    ``q[starts[s]:starts[s + 1]]``, the last of its ``lengths[s]`` keys belong to them, and its key j is row ``j % N``
    of page ``pages[s, j // N]``. Other rows of q have zeros.

    There are no gradients, because a cache is no part of a graph.

    Args:
        q: [T, Hq, D], float16, bfloat16, float32 or float64, any strides; D is at least 1.
        k: [P, Hkv, N, D] of q's dtype, any strides: pages of N keys. Hkv divides Hq.
        v: [P, Hkv, N, Dv] of q's dtype, any strides. Of a cache of [P, Hkv, N, 2 * D], both are views.
        pages: int32 or int64, [S, M]. Elements that hold no key of the sequence may be anything.
        starts: int32 or int64, [S + 1], not descending.
        lengths: int32 or int64, [S]. On a GPU, values of these three are not looked at.
        scale: see :func:`attention`, as for the next four.
        causal: whether a query sees only keys up to its place.
        window: how far a query sees.
        softcap: the bound of scaled products.
        sinks: [Hq], a floating dtype.
        out: [T, Hq, Dv] of q's dtype to write to. It shares no memory with an operand.

    Returns:
        [T, Hq, Dv] in q's dtype; ``out`` if given.

    Raises:
        RuntimeError: an operand requires grad, while gradients are recorded.
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices, numbers, pages or memory do not fit.
    """
    if torch.is_grad_enabled() and requires_grad(q, k, v, sinks):
        raise RuntimeError(
            "paged_attention(): one of the arguments requires grad, and pages of a cache have no gradients; wrap the "
            "call in torch.no_grad(), or call attention with the keys of each sequence"
        )
    operands = {"q": q, "k": k, "v": v, "pages": pages, "starts": starts, "lengths": lengths, "sinks": sinks}
    flags = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    return _PAGED("paged_attention", **operands, **flags, out=out)
