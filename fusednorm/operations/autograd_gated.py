"""A norm and a gate, one after the other, with gradients: as a composition, and in one call of a backend."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, accumulator
from fusednorm.engine import run_gated
from fusednorm.engine.run_gated import NormAndGate
from fusednorm.operations.gate import gate as gated
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd


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
