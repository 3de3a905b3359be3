"""A norm of rows or of groups of them, and a gate before or after it: compositions (docs/spec.md, section 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import (
    check_activation,
    check_apart,
    check_between,
    check_flag,
    check_operands,
    refuse_grad,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.calls.scalars import number
from fusednorm.engine import execute
from fusednorm.engine.execute import GatedNorm
from fusednorm.operations.gate import gate as gated
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd

_rms_norm_gated = Entry(
    "gate", "x z weight eps group_size norm_before_gate activation round_norm between weight_offset out"
).of("rms_norm_gated")


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    round_norm: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """RMS-normalises rows and multiplies them by a function of a gate, as Mamba 2, Qwen3-Next and Kimi do.

    The same bits as :func:`fusednorm.gate` of ``rms_norm(x, weight, eps)`` and the gate; or, with
    ``norm_before_gate=False``, as the norm of :func:`fusednorm.gate` of x and the gate, which is not rounded before.
    docs/spec.md, section 10.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        gate: [..., N], x's shape, any of these dtypes (float64 only if x is float64).
        weight: [N]; None multiplies by nothing.
        eps: added to the mean of squares, unitless.
        group_size: the elements that are normalised together, which divides N; None: the whole row.
        norm_before_gate: whether the norm comes first, and its rows meet the gate; else the gated x is normalised.
        activation: "silu" (also called swish), "sigmoid", "gelu_tanh", "gelu" (z * Phi(z)) or "relu2" (the square
            of a positive z, else 0).
        round_norm: round what is normalised to x's dtype before it meets the weight.
        between: with ``norm_before_gate``, the dtype to which normalised rows are rounded before they meet the gate:
            x's if None, or ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: added to the weight; see :func:`fusednorm.rms_norm`.

    Returns:
        The rows, in x's dtype.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes or devices do not fit; ``group_size`` does not divide N; there is no such activation.
        BackendError: the requested backends cannot take the call.
    """
    how = (eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset)
    return _rows(rms_norm_gated, x, gate, weight, how, None)


def rms_norm_gated_(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    round_norm: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """:func:`rms_norm_gated` in place, with its arguments: the rows land in ``x``.

    Each row of x is contiguous, and rows lie in at most two levels of strides. The gate may be x itself, and else
    shares no memory with it.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_gated`.
    """
    how = (eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset)
    return _rows(rms_norm_gated_, x, gate, weight, how, x)


@exact
def _rows(
    function: Callable[..., Tensor],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    flags: tuple[Any, ...],
    out: Tensor | None,
) -> Tensor:
    """The public function, whose flags are the fields of :class:`GatedNorm`; ``out`` is x if it works in place."""
    if not is_dynamo_compiling():
        found: Tensor | None = _rms_norm_gated(x, gate, weight, *flags, out)
        if found is not None:
            return found
    how = GatedNorm(*flags)
    operands = (x, gate, weight)
    listener = must_be_seen.listener(*operands)
    if listener is Listener.OVERRIDE:
        values = {"x": x, "gate": gate, "weight": weight, **how._asdict()}
        return must_be_seen.handed_over(function, operands, values)
    in_memory = listener is None
    _check(*operands, how, out, in_memory)
    wide = accumulator(x.dtype)
    offset = number("weight_offset", how.weight_offset, wide)
    how = how._replace(eps=number("eps", how.eps, wide), weight_offset=offset)
    records = is_grad_enabled() and requires_grad(*operands)
    if out is not None and records:
        refuse_grad(function.__name__)
    if in_memory:
        if out is not None:
            check_apart({"x": x}, {"gate": gate, "weight": weight})
        found = _in_one_call(*operands, how, out, records)
        if found is not None:
            return found
    return dtensor_bridge.written(out, composed(*operands, how))


def _check(x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNorm, out: Tensor | None, in_memory: bool) -> None:
    """That operands and flags fit each other, but for numbers."""
    if gate is None:
        refuse_type("gate", gate)
    check_operands(x, gate, weight, out, None, in_memory=in_memory, residual_name="gate")
    check_between(how.between, x)
    check_activation(how.activation)
    check_flag("norm_before_gate", how.norm_before_gate)
    check_flag("round_norm", how.round_norm)
    if how.between is not None and not how.norm_before_gate:
        raise TypeError("between is given with norm_before_gate=False, where nothing is rounded between; leave it out")
    check_group_size(how.group_size, x.shape[-1])


def check_group_size(
    group_size: int | None, hidden_size: int, cure: str = "leave it out to normalise whole rows"
) -> None:
    """The elements that belong together; None: all."""
    if group_size is not None and (type(group_size) is not int or group_size < 1 or hidden_size % group_size):
        raise ValueError(
            f"group_size must be an int that divides the {hidden_size} elements of a row, got {group_size!r}; {cure}"
        )


def _in_groups(how: GatedNorm, x: Tensor, *others: Tensor | None) -> list[Any]:
    """[..., N] as [..., N / group_size, group_size], where parts of rows are normalised."""
    size = how.group_size
    if size is None or size == x.shape[-1]:
        return [x, *others]
    groups = x.shape[-1] // size
    return [
        t if t is None else torch.unflatten(dtensor_bridge.parts_of_groups(t, groups), -1, (groups, size))
        for t in (x, *others)
    ]


def composed(x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNorm) -> Tensor:
    """The rows by plain operations one after the other: docs/spec.md, section 10."""
    if must_be_seen.in_one_operator(x, gate, weight):
        return cast(Tensor, torch.ops.fusednorm.rms_norm_gated_inference(x, gate, weight, *how))
    if how.norm_before_gate:
        y = _normed(x, weight, how, how.between)
        return gated(y, gate, activation=how.activation, out_dtype=None if how.between is None else x.dtype)
    wide = accumulator(x.dtype)
    h = gated(x, gate, activation=how.activation, out_dtype=wide)  # not rounded
    if weight is None or x.dtype == wide or not how.round_norm:  # then nothing is rounded before the end
        return _normed(h, weight, how, x.dtype)
    # Rounded to x's dtype, and not to that of h.
    n = _normed(h, None, how._replace(weight_offset=0.0, round_norm=False), wide)
    return cast(
        Tensor,
        steps.AFFINE.with_gradients(
            n=n, weight=weight, bias=None, weight_offset=how.weight_offset, rounded_to=x.dtype, out_dtype=x.dtype
        ),
    )


def _normed(x: Tensor, weight: Tensor | None, how: GatedNorm, dtype: torch.dtype | None) -> Tensor:
    """The norm of rows in ``dtype``; or of each group, which is a head with a weight of its own."""
    groups, weights = _in_groups(how, x, weight)
    flags: dict[str, Any] = {"weight_offset": how.weight_offset, "round_norm": how.round_norm, "out_dtype": dtype}
    y = rms_norm(groups, weights, how.eps, **flags)
    if groups is x:
        return y
    if must_be_seen.listener(y) is None and not y.requires_grad:
        return y.resize_(x.shape)  # torch refuses some writes to views that are made without gradients
    y = y.flatten(-2)
    return dtensor_bridge.as_placed(y, y)  # so its gradient comes in whole groups too


def _in_one_call(
    x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNorm, out: Tensor | None, records: bool
) -> Tensor | None:
    """The rows, new or in ``out``, by a backend that has a norm and a gate in one call; None if there is none."""
    groups, gates, weights, into = _in_groups(how, x, gate, weight, out)
    if records:
        backend = execute.backend_of_gated_gradients(groups, weights, how)
        if backend is None:
            return None
        return cast(Tensor, NormalisedAndGated.apply(x, gate, weight, how, backend))  # type: ignore[no-untyped-call]
    found = execute.norm_gated(groups, gates, weights, how, into)
    return found if found is None or groups is x else out if out is not None else found.resize_(x.shape)  # no view


class NormalisedAndGated(torch.autograd.Function):
    """(x, gate, weight or None, how, the backend of gradients) -> the rows, in one call of a backend.

    The operands and rstd are kept, and nothing that passes between the norm and the gate.
    """

    @staticmethod
    @exact
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """See :func:`composed`."""
        x, gate, weight, ctx.how, ctx.backend = inputs
        groups, gates, weights = _in_groups(ctx.how, x, gate, weight)
        rstd = new_rstd(groups)
        found = execute.norm_gated(groups, gates, weights, ctx.how, None, rstd)
        assert found is not None
        ctx.save_for_backward(x, gate, weight, rstd)
        return found.resize_(x.shape)  # a view could not be changed in place

    @staticmethod
    @exact
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the composition, by the function of the backend that the forward pass had."""
        x, gate, weight, rstd = ctx.saved_tensors
        needs, how = ctx.needs_input_grad[:3], ctx.how
        if must_be_seen.differentiated_again() or must_be_seen.below(d, x, gate, weight):
            dtensor_bridge.check_kept((d,), (x, gate, weight))

            def again(x: Tensor, gate: Tensor, weight: Tensor | None) -> tuple[Tensor]:
                return (composed(x, gate, weight, how),)

            return *composed_again(again, (x, gate, weight), (d,), needs), None, None
        ds, groups, gates, weights = _in_groups(how, d, x, gate, weight)
        found = execute.norm_gated_gradients(ctx.backend, ds, groups, gates, weights, rstd, how, needs)
        if groups is not x:
            pairs = zip(found, (x, gate, weight), strict=True)
            found = tuple([t if t is None else t.view(like.shape) for t, like in pairs])
        return *found, None, None
