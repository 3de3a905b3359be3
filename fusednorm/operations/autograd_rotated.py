"""Heads that are normalised and rotated, with gradients: as a composition, and in one call of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import operation_of
from fusednorm.calls.checks import check_kept
from fusednorm.calls.rotation_checks import rows_for
from fusednorm.engine import execute
from fusednorm.engine.execute import Head, Rotation, Tables
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import composed_again, new_rstd


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
            y = steps.ROTATE.with_gradients(y, *rows, how.interleaved, products, x.dtype)
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
