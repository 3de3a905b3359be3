"""Rotation of heads by position, alone and after a norm of each head: compositions (docs/spec.md, section 8)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, HeadsNorm
from fusednorm.calls.checks import (
    check_affine,
    check_apart,
    check_between,
    check_flag,
    check_flags,
    check_output,
    refuse_grad,
    refuse_type,
)
from fusednorm.calls.rotation_checks import check_heads, check_tables, rows_for
from fusednorm.engine import run_rotated
from fusednorm.engine.choose import fast_paths, request
from fusednorm.engine.run_rotated import Head, Turn
from fusednorm.operations.autograd_rotated import NormalisedAndRotated, RotationFlags, composed, rotator_with_gradients
from fusednorm.torch_ops import dtensor_bridge, steps


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
        take = fast_paths.get(request())
        if take is not None:
            result = take(
                *(x, None, None, None, cos, sin, positions, out, None),
                *(0.0, 0.0, False, interleaved, round_products, False, False),
            )
            if result is not None:
                return result[0]
    operands = (x, cos, sin, positions, out)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(rotate, operands, locals())
    in_memory = must_be_seen.in_memory(*operands)
    check_heads("x", x, in_memory)
    check_flag("interleaved", interleaved)
    check_flag("round_products", round_products)
    rounded_to = x.dtype if round_products else None
    check_tables(cos, sin, positions, x, in_memory=in_memory)
    inputs = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    _check_outputs("rotate", {"out": (out, "x")}, inputs, in_memory)
    if in_memory and not (is_grad_enabled() and x.requires_grad):
        turn = Turn(cos, sin, positions, interleaved, rounded_to)
        found = run_rotated.forward([Head(x, None, out)], None, None, turn)
        if found is not None:
            return found[0]
    if must_be_seen.in_one_operator(*operands):
        found = torch.ops.fusednorm.rotate_inference(x, cos, sin, positions, interleaved, round_products)
        return dtensor_bridge.written(out, found)
    tables = rows_for(cos, positions, x), rows_for(sin, positions, x)
    return dtensor_bridge.written(out, steps.rotate(x, *tables, interleaved, rounded_to, x.dtype))


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
    if not is_dynamo_compiling() and (between is None or between is torch.float32):
        take = fast_paths.get(request())
        if take is not None:
            result = take(
                *(q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out, eps, weight_offset, norm, interleaved),
                *(round_products, between is not None, round_norm),
            )
            if result is not None:
                return result
    operands = (q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(qk_norm_rope, operands, locals())
    flags = {"norm": norm, "interleaved": interleaved, "round_products": round_products}
    for name, flag in flags.items():
        check_flag(name, flag)
    in_memory = must_be_seen.in_memory(*operands)
    _check_heads_and_tables(q, k, q_weight, k_weight, cos, sin, positions, norm, in_memory)
    for name, heads in (("q", q), ("k", k)):
        check_between(between, heads, name)
    names = ("q", "k", "q_weight", "k_weight", "cos", "sin", "positions")
    in_place = q_out is q and k_out is k
    _check_outputs(
        "qk_norm_rope_" if in_place else "qk_norm_rope",
        {"q" if in_place else "q_out": (q_out, "q"), "k" if in_place else "k_out": (k_out, "k")},
        dict(zip(names, operands[:7], strict=True)),
        in_memory,
    )
    of_norm = None
    if norm:
        asked = check_flags(Flags(eps, weight_offset, True, round_norm), q, None, None, None)
        of_norm = HeadsNorm(asked.eps, asked.weight_offset, asked.round_norm)
    passed = None if of_norm is None or cos is None else between
    how = RotationFlags(of_norm, passed, interleaved, round_products)
    inputs = operands[:7]
    if in_memory:
        if not (is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)):
            sets = Head(q, q_weight, q_out), Head(k, k_weight, k_out)
            found = run_rotated.forward(sets, how.norm, how.between, how.turn(q, cos, sin, positions))
            if found is not None:
                return found[0], found[1]
        elif rotate := rotator_with_gradients(inputs, how):
            found = NormalisedAndRotated.apply(*inputs, how, rotate)  # type: ignore[no-untyped-call]
            return cast("tuple[Tensor, Tensor]", found)
    if must_be_seen.in_one_operator(*operands):
        numbers = (norm, positions, interleaved, round_products, between, weight_offset, round_norm)
        results = torch.ops.fusednorm.qk_norm_rope_inference(*operands[:6], eps, *numbers)
    else:
        results = composed(*inputs, how)
    return dtensor_bridge.written(q_out, results[0]), dtensor_bridge.written(k_out, results[1])


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

    Args:
        q: [..., Hq, D]; must not share memory with k.
        k: [..., Hk, D].
        q_weight: see :func:`qk_norm_rope`, as for the rest.
        k_weight: see :func:`qk_norm_rope`.
        cos: see :func:`qk_norm_rope`.
        sin: see :func:`qk_norm_rope`.
        eps: see :func:`qk_norm_rope`.
        norm: see :func:`qk_norm_rope`.
        positions: see :func:`qk_norm_rope`.
        interleaved: see :func:`qk_norm_rope`.
        round_products: see :func:`qk_norm_rope`.
        between: see :func:`qk_norm_rope`.
        weight_offset: see :func:`qk_norm_rope`.
        round_norm: see :func:`qk_norm_rope`.

    Returns:
        ``q`` and ``k``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`qk_norm_rope`.
    """
    if k is None:
        refuse_type("k", k)
    if not is_dynamo_compiling() and (between is None or between is torch.float32):
        take = fast_paths.get(request())
        if take is not None:
            result = take(
                *(q, k, q_weight, k_weight, cos, sin, positions, q, k, eps, weight_offset, norm, interleaved),
                *(round_products, between is not None, round_norm),
            )
            if result is not None:
                return result
    operands = (q, k, q_weight, k_weight, cos, sin, positions)
    if not is_dynamo_compiling() and must_be_seen.override(*operands):
        return must_be_seen.handed_over(qk_norm_rope_, operands, locals())
    return qk_norm_rope(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        norm=norm,
        positions=positions,
        interleaved=interleaved,
        round_products=round_products,
        between=between,
        weight_offset=weight_offset,
        round_norm=round_norm,
        q_out=q,
        k_out=k,
    )


def _check_heads_and_tables(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    norm: bool,
    in_memory: bool,
) -> None:
    """That q and k, their weights and the tables fit each other."""
    for name, heads in (("q", q), ("k", k)):
        check_heads(name, heads, in_memory)
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"k must have q's shape {list(q.shape)} but for the number of heads, got {list(k.shape)}; pass both as "
            "[..., H, D]"
        )
    for name, heads, weight in (("q", q, q_weight), ("k", k, k_weight)):
        if weight is not None and not norm:
            raise TypeError(f"{name}_weight is given, and norm=False leaves out what it belongs to; pass None")
        check_affine(heads, weight, None, in_memory=in_memory, x_name=name, weight_name=f"{name}_weight")
    if cos is not None or sin is not None:
        check_tables(cos, sin, positions, q, in_memory=in_memory, x_name="q")
    elif positions is not None:
        raise TypeError("positions are given without tables; pass cos and sin, or leave out positions")
    elif not norm:
        raise TypeError("norm is False and cos and sin are None, so there is nothing to do; leave out only one of both")


def _check_outputs(
    name: str,
    outputs: dict[str, tuple[Tensor | None, str]],
    inputs: dict[str, Tensor | None],
    in_memory: bool,
) -> None:
    """Outputs of the function of that name: for each the tensor or None, and the input that it must look like."""
    given = {output: tensor for output, (tensor, _) in outputs.items() if tensor is not None}
    if not given:
        return
    for output, (tensor, like_name) in outputs.items():
        like = cast(Tensor, inputs[like_name])
        check_output(output, tensor, list(like.shape), like.dtype, like, like_name)
    operands = (*given.values(), *inputs.values())
    if is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in operands):
        refuse_grad(name)
    if in_memory:
        check_apart(given, inputs)
