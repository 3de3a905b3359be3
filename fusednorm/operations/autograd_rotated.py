"""Heads that are normalised and rotated, with gradients: as a composition, and in one call of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, HeadsNorm, operation_of
from fusednorm.calls.checks import check_kept
from fusednorm.calls.rotation_checks import rows_for
from fusednorm.engine import run, run_rotated
from fusednorm.engine.choose import Chosen, fast_paths, request
from fusednorm.engine.run_rotated import Head, Turn
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd


class RotationFlags(NamedTuple):
    """The arguments of ``qk_norm_rope`` that are no operands; they have been checked."""

    norm: HeadsNorm | None
    #: The dtype that normalised heads are rounded to, None if that is theirs.
    between: torch.dtype | None
    interleaved: bool
    round_products: bool

    def turn(self, q: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None) -> Turn:
        """How q is rotated."""
        products = (self.between or q.dtype) if self.round_products else None
        return Turn(cos, sin, positions, self.interleaved, products)


def composed(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    how: RotationFlags,
) -> tuple[Tensor, Tensor]:
    """q and k by plain operations one after the other: docs/spec.md, section 8."""
    # Rows of the tables are the same for q and k.
    tables = None if cos is None or sin is None else (rows_for(cos, positions, q), rows_for(sin, positions, q))
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x
        if how.norm is not None:
            eps, weight_offset, round_norm = how.norm
            out_dtype = None if tables is None else how.between
            y = rms_norm(x, weight, eps, weight_offset=weight_offset, round_norm=round_norm, out_dtype=out_dtype)
        if tables is not None:
            y = steps.rotate(y, *tables, how.interleaved, y.dtype if how.round_products else None, x.dtype)
        found.append(y)
    return found[0], found[1]


def rotator_with_gradients(operands: tuple[Tensor | None, ...], how: RotationFlags) -> Chosen | None:
    """The backend by which :class:`NormalisedAndRotated` takes the operands of :func:`composed`, or None."""
    q, k, q_weight, k_weight, cos, *_ = operands
    if how.norm is None or cos is None or q is None or k is None:
        return None
    if any(weight is not None and weight.dim() == 2 for weight in (q_weight, k_weight)):
        return None
    return run_rotated.rotator_of((Head(q, q_weight), Head(k, k_weight)), how.norm, how.between)


class NormalisedAndRotated(torch.autograd.Function):
    """The operands of :func:`composed`, and a backend -> q and k, in one call of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """See :func:`composed`."""
        q, k, q_weight, k_weight, cos, sin, positions, how, ctx.rotates = inputs
        rstds = new_rstd(q), new_rstd(k)
        heads = Head(q, q_weight, None, rstds[0]), Head(k, k_weight, None, rstds[1])
        found = run_rotated.forward(heads, how.norm, how.between, how.turn(q, cos, sin, positions), None, ctx.rotates)
        assert found is not None
        ctx.save_for_backward(*inputs[:-2], *rstds)
        ctx.set_materialize_grads(False)
        ctx.how = how
        flags = Flags(how.norm.eps, how.norm.weight_offset, True, how.norm.round_norm, how.between)
        ctx.operations = [operation_of(x, None, weight, flags) for x, weight, *_ in heads]
        ctx.backend = run.backend_of(ctx.operations[0])
        needs = ctx.needs_input_grad
        ctx.mark_non_differentiable(*(found[set_] for set_ in (0, 1) if not (needs[set_] or needs[2 + set_])))
        return found[0], found[1]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        """The transpose of the rotation, then the gradients of the norms."""
        q, k, q_weight, k_weight, cos, sin, positions, *rstds = ctx.saved_tensors
        operands = (q, k, q_weight, k_weight, cos, sin, positions)
        needs, how = ctx.needs_input_grad[:4], ctx.how
        here = [set_ for set_ in (0, 1) if incoming[set_] is not None and (needs[set_] or needs[2 + set_])]
        found: list[Tensor | None] = [None] * (len(operands) + 2)
        if not here:
            return tuple(found)
        given = [d for d in (incoming[set_] for set_ in here) if d is not None]
        if must_be_seen.differentiated_again() or must_be_seen.below(*given, *operands):
            dtensor_bridge.check_kept(given, operands)

            def rotated(
                q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None
            ) -> tuple[Tensor, Tensor]:
                return composed(q, k, q_weight, k_weight, cos, sin, positions, how)

            wanted = [d if set_ in here else None for set_, d in enumerate(incoming)]
            found[:4] = composed_again(rotated, operands[:4], wanted, needs)
            return tuple(found)
        check_kept(given, (cos, sin, positions))
        turned = _transposed(given, how, how.turn(q, cos, -sin, positions), ctx.rotates)
        for set_, d in zip(here, turned, strict=True):
            found[set_], _, found[2 + set_], _ = run.backward(
                *(ctx.backend, ctx.operations[set_], d, None, operands[set_], rstds[set_]),
                *(operands[2 + set_], how.norm.weight_offset, (needs[set_], False, needs[2 + set_])),
            )
        return tuple(found)


def _transposed(given: Sequence[Tensor], how: RotationFlags, turn: Turn, backend: Chosen) -> Sequence[Tensor]:
    """Gradients of the results, or of one of them, rotated back; by the fast path if that takes the call."""
    take = fast_paths.get(request()) if how.between is None else None
    if take is not None:
        both, absent = (*given, None)[:2], (None, None)
        flags = (0.0, 0.0, False, how.interleaved, how.round_products, False, False)
        found: Any = take(*both, *absent, *turn[:3], *absent, *flags)
        if found is not None:
            return cast("Sequence[Tensor]", found)[: len(given)]
    turned = run_rotated.forward([Head(d) for d in given], None, None, turn, how.between, backend)
    assert turned is not None
    return turned
