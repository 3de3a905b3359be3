"""The plain operations beside the norm, out of which compositions are made: docs/spec.md, section 8.

Each goes through torch's dispatcher if a tracer, a mode or a tensor must see it: a compiler that saw torch's own
operations would leave out roundings between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import checks, must_be_seen
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.engine import run_rotated
from fusednorm.reference import norm as reference
from fusednorm.reference import rotation
from fusednorm.torch_ops import dtensor_bridge


def seen(*operands: Tensor | None) -> bool:
    """Whether the dispatcher must see a call. Transforms of ``torch.func`` see the functions of autograd instead."""
    return is_dynamo_compiling() or (must_be_seen.below(*operands) and not must_be_seen.transform(*operands))


def transformed(*operands: Tensor | None) -> bool:
    """Whether a transform of ``torch.func`` is active, which shows each operand without its batch and its memory."""
    return not is_dynamo_compiling() and must_be_seen.transform(*operands)


def in_memory(*operands: Tensor | None) -> bool:
    """Whether the operands lie in memory, so that their addresses and contents can be checked."""
    return not (seen(*operands) or transformed(*operands))


def check_kept(incoming: Sequence[Tensor | None], kept: Sequence[Tensor | None]) -> None:
    """:func:`fusednorm.calls.checks.check_kept`, of operands that lie in memory."""
    if in_memory(*incoming, *kept):
        checks.check_kept(incoming, kept)


def add(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """x + residual, [..., N], rounded once to a dtype; see :func:`fusednorm.reference.norm.added`."""
    if seen(x, residual):
        return cast(Tensor, dtensor_bridge.operations(x, residual).add(x, residual, dtype))
    return reference.added(x, residual, dtype)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor, [..., N], rounded to x's dtype; see :func:`fusednorm.reference.norm.scaled`."""
    if seen(x):
        return cast(Tensor, dtensor_bridge.operations(x).scale(x, factor))
    return reference.scaled(x, factor)


def affine(
    n: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    rounded_to: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """n * gain + bias, [..., N], rounded once to a dtype; see :func:`fusednorm.reference.norm.affine`."""
    operands = (n, weight, bias)
    arguments = (*operands, weight_offset, rounded_to, out_dtype)
    if seen(*operands):
        return cast(Tensor, dtensor_bridge.operations(*operands).affine(*arguments))
    return cast(Tensor, Affine.apply(*arguments))  # type: ignore[no-untyped-call]


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounded_to: torch.dtype | None, dtype: torch.dtype
) -> Tensor:
    """Rotated heads, [..., H, D], rounded once to a dtype; see :func:`fusednorm.reference.rotation.rotated`."""
    arguments = (x, cos, sin, interleaved, rounded_to, dtype)
    if seen(x, cos, sin):
        return cast(Tensor, dtensor_bridge.operations(x, cos, sin).rotate(*arguments))
    return cast(Tensor, Rotate.apply(*arguments))  # type: ignore[no-untyped-call]


def written(given: Tensor | None, new: Tensor) -> Tensor:
    """A new result; or the tensor that the caller gave for it, which takes a copy. A DTensor stays where it lies."""
    if given is None or given is new:
        return new
    return given.copy_(dtensor_bridge.as_placed(given, new))


class Rotate(torch.autograd.Function):
    """:func:`rotate` with the specification's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """See :func:`rotate`."""
        x, cos, sin, *_ = arguments
        rotated = rotation.rotated if transformed(x, cos, sin) else run_rotated.rotate
        return rotated(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the tables."""
        x, cos, sin, *ctx.how = inputs
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The transpose: back by the same angles."""
        cos, sin = ctx.saved_tensors
        check_kept((dy,), (cos, sin))
        interleaved, rounded_to, _ = ctx.how
        return rotate(dy, cos, -sin, interleaved, rounded_to, ctx.x_dtype), *[None] * 5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """The rotation of the tangent."""
        return rotate(tangent, *ctx.saved_tensors, *ctx.how)


class Affine(torch.autograd.Function):
    """:func:`affine` with the specification's gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """See :func:`affine`."""
        return reference.affine(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the operands."""
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.weight_offset = inputs[3]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """See :func:`fusednorm.reference.norm.affine_gradients`."""
        n, weight, bias = ctx.saved_tensors
        check_kept((dy,), ctx.saved_tensors)
        needs = ctx.needs_input_grad[:3]
        return *reference.affine_gradients(dy, n, weight, bias, ctx.weight_offset, needs), None, None, None

    @staticmethod
    def jvp(ctx: Any, n_tangent: Any, weight_tangent: Any, bias_tangent: Any, *_: None) -> Tensor:
        """The tangent; roundings are passed straight through."""
        with outer_levels():
            n, weight, _bias = primals(ctx)
            gain = reference.gain(weight, ctx.weight_offset, n.dtype)
            tangent = torch.zeros_like(n) if n_tangent is None else n_tangent if gain is None else n_tangent * gain
            if weight_tangent is not None:
                tangent = tangent + n * weight_tangent.to(n.dtype)
            return tangent if bias_tangent is None else tangent + bias_tangent.to(n.dtype)
