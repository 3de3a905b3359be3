"""A norm of rows or of groups of them, and a gate before or after it: compositions (docs/spec.md, section 10)."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, accumulator
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
from fusednorm.calls.fast_path import BETWEEN_IS_F32, GATE_FIRST, NORM_FIRST
from fusednorm.engine import run_gated
from fusednorm.engine.choose import fast_paths, request
from fusednorm.engine.run_gated import NormAndGate
from fusednorm.operations.gate import gate as gated
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd


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
        activation: "silu" (also called swish), "sigmoid" or "gelu_tanh".
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
    found = _on_fast_path(
        x, gate, weight, eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset, None
    )
    if found is not None:
        return found
    operands = (x, gate, weight)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(rms_norm_gated, operands, locals())
    _check(*operands, group_size, norm_before_gate, activation, between)
    how = GatedNormFlags(eps, weight_offset, round_norm, group_size, norm_before_gate, activation, between)
    found = _in_one_call(*operands, how, None, is_grad_enabled() and requires_grad(*operands))
    return composed(*operands, how) if found is None else found


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
    """:func:`rms_norm_gated` in place: the rows land in ``x``.

    Args:
        x: [..., N]; each row contiguous, in at most two levels of strides.
        gate: see :func:`rms_norm_gated`, as for the rest; may be x itself, and else shares no memory with it.
        weight: see :func:`rms_norm_gated`.
        eps: see :func:`rms_norm_gated`.
        group_size: see :func:`rms_norm_gated`.
        norm_before_gate: see :func:`rms_norm_gated`.
        activation: see :func:`rms_norm_gated`.
        round_norm: see :func:`rms_norm_gated`.
        between: see :func:`rms_norm_gated`.
        weight_offset: see :func:`rms_norm_gated`.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_gated`.
    """
    found = _on_fast_path(
        x, gate, weight, eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset, x
    )
    if found is not None:
        return found
    operands = (x, gate, weight)
    if must_be_seen.override(*operands):
        return must_be_seen.handed_over(rms_norm_gated_, operands, locals())
    _check(*operands, group_size, norm_before_gate, activation, between, x)
    if is_grad_enabled() and requires_grad(*operands):
        refuse_grad("rms_norm_gated_")
    if not (must_be_seen.transformed(*operands) or must_be_seen.seen(*operands)):
        check_apart({"x": x}, {"gate": gate, "weight": weight})
    how = GatedNormFlags(eps, weight_offset, round_norm, group_size, norm_before_gate, activation, between)
    return dtensor_bridge.written(x, composed(*operands, how)) if _in_one_call(*operands, how, x, False) is None else x


def _on_fast_path(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    round_norm: bool,
    between: torch.dtype | None,
    weight_offset: float,
    out: Tensor | None,
) -> Tensor | None:
    """The rows by the fast path, if that takes the call."""
    if is_dynamo_compiling() or type(norm_before_gate) is not bool:
        return None
    if between is not None and not (norm_before_gate and between is torch.float32):
        return None
    take = fast_paths.get(request())
    if take is None:
        return None
    how = NORM_FIRST if norm_before_gate else GATE_FIRST
    found: Any = take(
        *(x, None, weight, None, None, eps, weight_offset, True, round_norm, None, True, None, 1.0),
        *(gate, activation, how if between is None else how + BETWEEN_IS_F32, group_size, out),
    )
    return cast("Tensor | None", found)


def _in_one_call(
    x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNormFlags, out: Tensor | None, records: bool
) -> Tensor | None:
    """The rows, by a backend that has a norm and a gate in one call; None if torch must see both, or there is none."""
    if must_be_seen.seen(x, gate, weight) or must_be_seen.transformed(x, gate, weight):
        return None
    groups, gates, weights, into = how.in_groups(x, gate, weight, out)
    assert groups is not None
    assert gates is not None
    if records:
        asked, backend = run_gated.gradients_of(groups, weights, how.norm_and_gate)
        if backend is None:
            return None
        return cast(Tensor, NormalisedAndGated.apply(x, gate, weight, how, asked, backend))  # type: ignore[no-untyped-call]
    found = run_gated.norm_gated(groups, gates, weights, how.norm_and_gate, into)
    return found if found is None or how.whole(x) else found.flatten(-2)


def _check(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    group_size: int | None,
    norm_before_gate: bool,
    activation: str,
    between: torch.dtype | None,
    out: Tensor | None = None,
) -> None:
    """That operands and flags fit each other."""
    if gate is None:
        refuse_type("gate", gate)
    check_operands(x, gate, weight, out, None, in_memory=must_be_seen.in_memory(x, gate, weight), residual_name="gate")
    check_between(between, x)
    check_activation(activation)
    check_flag("norm_before_gate", norm_before_gate)
    if between is not None and not norm_before_gate:
        raise TypeError("between is given with norm_before_gate=False, where nothing is rounded between; leave it out")
    check_group_size(group_size, x.shape[-1])


def check_group_size(
    group_size: int | None, hidden_size: int, cure: str = "leave it out to normalise whole rows"
) -> None:
    """The elements that belong together; None: all."""
    if group_size is not None and (type(group_size) is not int or group_size < 1 or hidden_size % group_size):
        raise ValueError(
            f"group_size must be an int that divides the {hidden_size} elements of a row, got {group_size!r}; {cure}"
        )


class GatedNormFlags(NamedTuple):
    """The arguments of ``rms_norm_gated`` that are no operands; they have been checked."""

    eps: float
    weight_offset: float
    round_norm: bool
    #: The elements of a part of a row that is normalised; None: whole rows.
    group_size: int | None
    norm_first: bool
    activation: str
    between: torch.dtype | None

    @property
    def norm_and_gate(self) -> NormAndGate:
        """The same, of rows or of groups, as a backend is asked for it."""
        flags = Flags(self.eps, self.weight_offset, round_norm=self.round_norm)
        return NormAndGate(flags, self.activation, self.norm_first, self.between)

    def in_groups(self, *rows: Tensor | None) -> list[Tensor | None]:
        """[..., N] as [..., N / group_size, group_size], where parts of rows are normalised."""
        return [t if t is None or self.whole(t) else in_groups(t, cast(int, self.group_size)) for t in rows]

    def whole(self, rows: Tensor) -> bool:
        """Whether whole rows are normalised."""
        return self.group_size is None or self.group_size == rows.shape[-1]


def in_groups(rows: Tensor, group_size: int) -> Tensor:
    """[..., N] as [..., N / group_size, group_size]."""
    groups = rows.shape[-1] // group_size
    return torch.unflatten(dtensor_bridge.parts_of_groups(rows, groups), -1, (groups, group_size))


def composed(x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNormFlags) -> Tensor:
    """The rows by plain operations one after the other: docs/spec.md, section 10."""
    if must_be_seen.in_one_operator(x, gate, weight):
        numbers = (how.eps, how.group_size, how.norm_first, how.activation, how.round_norm, how.between)
        return cast(Tensor, torch.ops.fusednorm.rms_norm_gated_inference(x, gate, weight, *numbers, how.weight_offset))
    if how.norm_first:
        y = _normed(x, weight, how, how.between)
        return gated(y, gate, activation=how.activation, out_dtype=None if how.between is None else x.dtype)
    wide = accumulator(x.dtype)
    h = gated(x, gate, activation=how.activation, out_dtype=wide)  # not rounded
    if weight is None or x.dtype == wide or not how.round_norm:  # then nothing is rounded before the end
        return _normed(h, weight, how, x.dtype)
    # Rounded to x's dtype, and not to that of h.
    n = _normed(h, None, how._replace(weight_offset=0.0, round_norm=False), wide)
    return steps.affine(n, weight, None, how.weight_offset, x.dtype, x.dtype)


def _normed(x: Tensor, weight: Tensor | None, how: GatedNormFlags, dtype: torch.dtype | None) -> Tensor:
    """The norm of rows in ``dtype``; or of each group, which is a head with a weight of its own."""
    flags: dict[str, Any] = {"weight_offset": how.weight_offset, "round_norm": how.round_norm}
    if how.whole(x):
        return rms_norm(x, weight, how.eps, out_dtype=dtype, **flags)
    groups, weights = how.in_groups(x, weight)
    assert groups is not None
    y = rms_norm(groups, weights, how.eps, out_dtype=dtype, **flags).flatten(-2)
    return dtensor_bridge.as_placed(y, y)  # so its gradient comes in whole groups too


class NormalisedAndGated(torch.autograd.Function):
    """The operands of :func:`composed`, and how a backend is asked, and the backend -> the rows, in one call of it.

    The operands and rstd are kept, and nothing that passes between the norm and the gate.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """See :func:`composed`."""
        x, gate, weight, ctx.how, ctx.asked, ctx.backend = inputs
        groups, gates, weights = inputs[:3] if ctx.how.whole(x) else ctx.how.in_groups(x, gate, weight)
        rstd = new_rstd(groups)
        found = run_gated.norm_gated(groups, gates, weights, ctx.asked, None, rstd)
        assert found is not None
        ctx.save_for_backward(x, gate, weight, rstd)
        return found.resize_(x.shape)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the composition, by the function of the backend that the forward pass had."""
        x, gate, weight, rstd = ctx.saved_tensors
        needs, how = ctx.needs_input_grad[:3], ctx.how
        if must_be_seen.differentiated_again() or must_be_seen.below(d, x, gate, weight):
            dtensor_bridge.check_kept((d,), (x, gate, weight))

            def rows(x: Tensor, gate: Tensor, weight: Tensor | None) -> tuple[Tensor]:
                return (composed(x, gate, weight, how),)

            return *composed_again(rows, (x, gate, weight), (d,), needs), None, None, None
        if how.whole(x):
            return (
                *run_gated.norm_gated_backward(ctx.backend, d, x, gate, rstd, weight, ctx.asked, needs),
                None,
                None,
                None,
            )
        groups, gates, weights, ds = how.in_groups(x, gate, weight, d)
        found = run_gated.norm_gated_backward(ctx.backend, ds, groups, gates, rstd, weights, ctx.asked, needs)
        in_rows = [t if t is None else t.view(like.shape) for t, like in zip(found, (x, gate, weight), strict=True)]
        return *in_rows, None, None, None
