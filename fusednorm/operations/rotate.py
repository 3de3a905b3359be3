"""Rotation of heads by position, alone and after a norm of each head: compositions (docs/spec.md, section 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import Flags, operation_of
from fusednorm.calls.checks import (
    check_affine,
    check_apart,
    check_between,
    check_flag,
    check_flags,
    check_kept,
    check_output,
    refuse_grad,
    refuse_type,
    requires_grad,
    usual,
)
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.calls.rotation_checks import check_heads, check_tables, rows_for
from fusednorm.engine import execute
from fusednorm.engine.execute import Head, Rotation, Tables
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd

_rotate = Entry("rotation", "q cos sin positions interleaved round_products q_out", returned=0).of("rotate")
qk_norm_rope_on_fast_path = Entry(
    "rotation",
    "q k q_weight k_weight cos sin eps norm positions interleaved round_products between weight_offset round_norm "
    "q_out k_out",
).of("qk_norm_rope")


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates pairs of numbers of each head by angles, as rotary position embedding does: docs/spec.md, section 8.

    A pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``. The K angles of a row of heads rotate the first 2K
    numbers of each head; the others stay as they are.

    Args:
        x: [..., H, D], rows of H heads, float16, bfloat16, float32 or float64, any strides.
        cos: [..., K], any of these dtypes: a row for each row of heads, or a shape that expands to that; with
            ``positions`` [P, K]. 2K is at most D. It has no gradient.
        sin: as cos.
        positions: int32 or int64, [...], which row of the tables each row of heads takes. On a GPU its values are not
            looked at.
        interleaved: pairs lie side by side; else the second numbers of all pairs follow the first ones, as halves.
        round_products: round each product to x's dtype before two are added.
        out: [..., H, D] of x's dtype to write to. May be x itself.

    Returns:
        The rotated heads, in x's dtype; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of another dtype.
        ValueError: shapes, devices, positions or memory do not fit.
        RuntimeError: ``out`` is given and x requires grad, or a table requires grad.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _rotate(x, cos, sin, positions, interleaved, round_products, out)
        if result is not None:
            return result
    operands = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    flags = {"interleaved": interleaved, "round_products": round_products}
    rotated: Tensor = _run(rotate, operands, {"out": out}, flags)
    return rotated


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: bool = True,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises each head of q and k and rotates it, as Qwen3, Gemma 3 and others do before attention.

    The same bits as ``rotate(rms_norm(q, q_weight, eps), cos, sin)``, and the same for k: docs/spec.md, section 8.
    q and k may be views into one tensor that also holds v.

    Args:
        q: [..., Hq, D], rows of heads, float16, bfloat16, float32 or float64, any strides.
        k: [..., Hk, D]; q's rows, of another number of heads or the same.
        q_weight: [D] or [Hq, D]; None multiplies by nothing.
        k_weight: [D] or [Hk, D]; None multiplies by nothing.
        cos: see :func:`rotate`; None with ``sin``: no rotation.
        sin: see :func:`rotate`.
        eps: added to the mean of squares, unitless.
        norm: whether heads are normalised; without a norm, weights are None.
        positions: see :func:`rotate`, as for the next two.
        interleaved: pairs lie side by side.
        round_products: round products to the dtype of what is rotated.
        between: the dtype to which normalised heads are rounded before they are rotated: q's and k's own if None, or
            ``torch.float32``, which leaves heads of 16 bits unrounded.
        weight_offset: see :func:`fusednorm.rms_norm`, as for ``round_norm``.
        round_norm: round what is normalised to its dtype before it meets the weight.
        q_out: [..., Hq, D] of q's dtype to write to. May be q itself.
        k_out: [..., Hk, D] of k's dtype to write to. May be k itself.

    Returns:
        q and k, in their dtypes; ``q_out`` and ``k_out`` if given.

    Raises:
        TypeError, ValueError, BackendError: see :func:`rotate` and :func:`fusednorm.rms_norm`.
        RuntimeError: an output is given and an operand requires grad, or a table requires grad.
    """
    if k is None:
        refuse_type("k", k)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = qk_norm_rope_on_fast_path(
            q, k, q_weight, k_weight, cos, sin, eps, norm, positions, interleaved, round_products, between,
            weight_offset, round_norm, q_out, k_out,
        )  # fmt: skip
        if result is not None:
            return result
    tables = {"cos": cos, "sin": sin, "positions": positions}
    operands = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, **tables}
    flags: dict[str, Any] = {"norm": norm, "interleaved": interleaved, "round_products": round_products}
    flags |= {"between": between, "eps": eps, "weight_offset": weight_offset, "round_norm": round_norm}
    new_q, new_k = _run(qk_norm_rope, operands, {"q_out": q_out, "k_out": k_out}, flags)
    return new_q, new_k


def qk_norm_rope_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: bool = True,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`qk_norm_rope` in place: the results land in ``q`` and ``k``.

    With its arguments, but outputs. q and k share no memory.

    Returns:
        ``q`` and ``k``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`qk_norm_rope`.
    """
    if k is None:
        refuse_type("k", k)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = qk_norm_rope_on_fast_path(
            q, k, q_weight, k_weight, cos, sin, eps, norm, positions, interleaved, round_products, between,
            weight_offset, round_norm, q, k,
        )  # fmt: skip
        if result is not None:
            return result
    tables = {"cos": cos, "sin": sin, "positions": positions}
    operands = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, **tables}
    flags: dict[str, Any] = {"norm": norm, "interleaved": interleaved, "round_products": round_products}
    flags |= {"between": between, "eps": eps, "weight_offset": weight_offset, "round_norm": round_norm}
    new_q, new_k = _run(qk_norm_rope_, operands, {"q_out": q, "k_out": k}, flags)
    return new_q, new_k


@exact
def _run(
    function: Callable[..., Any], operands: dict[str, Any], outputs: dict[str, Tensor | None], flags: dict[str, Any]
) -> Any:
    """The rotated heads of x, or of q and k, of a public function; ``flags`` are its arguments that are no operands."""
    every = (*operands.values(), *outputs.values())
    listener = must_be_seen.listener(*every)
    if listener is Listener.OVERRIDE:
        return must_be_seen.handed_over(function, every, {**operands, **outputs, **flags})
    in_memory, name = listener is None, function.__name__.rstrip("_")
    for flag in ("norm", "interleaved", "round_products"):
        if flag in flags:
            check_flag(flag, flags[flag])
    of_norm, between = flags.get("norm", False), flags.get("between")
    names = ["x"] if name == "rotate" else ["q", "k"]
    _check_operands(names, operands, of_norm, in_memory)
    heads = [
        Head(operands[x], operands.get(f"{x}_weight"), out) for x, out in zip(names, outputs.values(), strict=True)
    ]
    if between is not None:
        for x in names:
            check_between(between, operands[x], x)
    records = is_grad_enabled() and requires_grad(*every)
    _check_outputs(name, heads, operands, records, in_memory)
    norm, tables = None, (operands["cos"], operands["sin"], operands["positions"])
    passed = between if of_norm and tables[0] is not None else None
    if of_norm:
        asked = Flags(flags["eps"], flags["weight_offset"], True, flags["round_norm"], passed)
        norm = check_flags(asked, heads[0].x, None, None, None)
    products = (passed or heads[0].x.dtype) if flags["round_products"] else None
    how = Rotation(flags["interleaved"], products, None, norm)
    found: Sequence[Tensor] | None = None
    if in_memory:
        found = (recorded if records else execute.rotate)(heads, tables, how)
    if found is None and must_be_seen.in_one_operator(*every):
        found = dtensor_bridge.in_one_operator(name, {**operands, **flags})
    elif found is None:
        found = composed(heads, tables, how)
    results = [dtensor_bridge.written(head.out, new) for head, new in zip(heads, found, strict=True)]
    return results[0] if name == "rotate" else results


def _check_operands(names: list[str], operands: dict[str, Any], norm: bool, in_memory: bool) -> None:
    """That heads of these names, their weights and the tables fit each other."""
    unusual = []  # whose weight is to be looked at by itself
    for name in names:
        x, weight = operands[name], operands.get(f"{name}_weight")
        if not in_memory or not usual((x, None, weight, None, None)) or x.dim() < 2:
            check_heads(name, x, in_memory)
            unusual.append(name)
    x, y = operands[names[0]], operands[names[-1]]
    if x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"k must have q's shape {list(x.shape)} but for the number of heads, got {list(y.shape)}; pass both as "
            "[..., H, D]"
        )
    for name in names:
        weight = operands.get(f"{name}_weight")
        if weight is not None and not norm:
            raise TypeError(f"{name}_weight is given, and norm=False leaves out what it belongs to; pass None")
        if name in unusual:
            check_affine(operands[name], weight, None, in_memory=in_memory, x_name=name, weight_name=f"{name}_weight")
    cos, sin, positions = operands["cos"], operands["sin"], operands["positions"]
    if cos is not None or sin is not None or len(names) == 1:
        check_tables(cos, sin, positions, x, in_memory=in_memory, x_name=names[0])
    elif positions is not None:
        raise TypeError("positions are given without tables; pass cos and sin, or leave out positions")
    elif not norm:
        raise TypeError("norm is False and cos and sin are None, so there is nothing to do; leave out only one of both")


def _check_outputs(name: str, heads: list[Head], operands: dict[str, Any], records: bool, in_memory: bool) -> None:
    """That outputs look like their heads and lie apart from what they are not, and that no gradients are recorded."""
    first, last = heads[0], heads[-1]
    if first.out is None and last.out is None:
        return
    in_place = name != "rotate" and first.out is first.x and last.out is last.x
    names = ["q", "k"] if in_place else ["out"] if name == "rotate" else ["q_out", "k_out"]
    for output, like_name, (x, _, out, _) in zip(names, operands, heads, strict=False):
        if not in_memory or out is not x:
            check_output(output, out, list(x.shape), x.dtype, x, like_name)
    if records:
        refuse_grad(f"{name}_" if in_place else name)
    if in_memory:
        check_apart(dict(zip(names, [head.out for head in heads], strict=True)), operands)


def composed(heads: Sequence[Head], tables: Tables, how: Rotation) -> Sequence[Tensor]:
    """New results by plain operations one after the other: docs/spec.md, section 8."""
    cos, sin, positions = tables
    x, found = heads[0].x, []
    # Rows of the tables are the same for q and k.
    rows = None if cos is None or sin is None else (rows_for(cos, positions, x), rows_for(sin, positions, x))
    for x, weight, *_ in heads:
        y = x
        if how.norm is not None:
            norm = how.norm
            flags = {"weight_offset": norm.weight_offset, "round_norm": norm.round_norm, "out_dtype": norm.out_dtype}
            y = rms_norm(x, weight, norm.eps, **cast(Any, flags))
        if rows is not None:
            products = None if how.products is None else y.dtype
            y = steps.ROTATE.with_gradients(
                x=y, cos=rows[0], sin=rows[1], interleaved=how.interleaved, rounded_to=products, dtype=x.dtype
            )
        found.append(y)
    return found


def recorded(heads: Sequence[Head], tables: Tables, how: Rotation) -> Sequence[Tensor] | None:
    """New q and k with gradients, if a backend takes both in one call."""
    weights = [head.weight for head in heads]
    if how.norm is None or tables[0] is None or any(weight is not None and weight.dim() == 2 for weight in weights):
        return None
    backend = execute.rotator_of(heads, how)
    if backend is None:
        return None
    inputs = (*(head.x for head in heads), *weights, *tables)
    return cast("tuple[Tensor, Tensor]", NormalisedAndRotated.apply(*inputs, how, backend))  # type: ignore[no-untyped-call]


class NormalisedAndRotated(torch.autograd.Function):
    """(q, k, q_weight, k_weight, cos, sin, positions, a rotation, a backend) -> q and k, in one call of the backend."""

    @staticmethod
    @exact
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """See :func:`composed`."""
        q, k, q_weight, k_weight, *tables, ctx.how, ctx.rotates = inputs
        heads = Head(q, q_weight, None, new_rstd(q)), Head(k, k_weight, None, new_rstd(k))
        found = execute.rotate(heads, cast(Tables, tables), ctx.how, ctx.rotates)
        assert found is not None
        ctx.save_for_backward(*inputs[:-2], *(head.rstd for head in heads))
        ctx.set_materialize_grads(False)
        ctx.operations = [operation_of(x, None, weight, ctx.how.norm) for x, weight, *_ in heads]
        ctx.backend = execute.backend_of(ctx.operations[0])
        needs = ctx.needs_input_grad
        ctx.mark_non_differentiable(*(found[set_] for set_ in (0, 1) if not (needs[set_] or needs[2 + set_])))
        return found[0], found[1]

    @staticmethod
    @exact
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        """The transpose of the rotation, then the gradients of the norms."""
        *operands, cos, sin, positions, q_rstd, k_rstd = ctx.saved_tensors
        needs, how = ctx.needs_input_grad[:4], ctx.how
        here = [set_ for set_ in (0, 1) if incoming[set_] is not None and (needs[set_] or needs[2 + set_])]
        found: list[Tensor | None] = [None] * 9
        given = [d for d in (incoming[set_] for set_ in here) if d is not None]
        if not given:
            return tuple(found)
        if must_be_seen.differentiated_again() or must_be_seen.below(*given, *operands, cos, sin, positions):
            dtensor_bridge.check_kept(given, (*operands, cos, sin, positions))

            def rotated(q: Tensor, k: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
                heads = [Head(x, weight) for x, weight in zip((q, k), weights, strict=True)]
                return tuple(composed(heads, (cos, sin, positions), how))

            wanted = [d if set_ in here else None for set_, d in enumerate(incoming)]
            found[:4] = composed_again(rotated, operands, wanted, needs)
            return tuple(found)
        check_kept(given, (cos, sin, positions))
        tables, turn = (cos, -sin, positions), how._replace(norm=None, dtype=how.norm.out_dtype)
        turned = execute.rotate_on_fast_path(given, tables, turn)
        if turned is None:
            turned = execute.rotate([Head(d) for d in given], tables, turn, ctx.rotates)
        for set_, d in zip(here, turned, strict=False):  # the fast path's are always two
            found[set_], _, found[2 + set_], _ = execute.backward(
                *(ctx.backend, ctx.operations[set_], d, None, operands[set_], (q_rstd, k_rstd)[set_]),
                *(operands[2 + set_], how.norm.weight_offset, (needs[set_], False, needs[2 + set_])),
            )
        return tuple(found)
