"""Runs attention, whose queries, keys and values each have strides of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from fusednorm.calls.call import Call
from fusednorm.calls.memory import new, packed
from fusednorm.declare.declaration import Role
from fusednorm.declare.plan import Flags, Operands, Plan
from fusednorm.engine.run import as_new, backend_of
from fusednorm.engine.run_norms import launch
from fusednorm.reference.attention import scale_of

#: The longest rows that backends take.
LONGEST = 1024


def forward(
    plan: Plan, operands: Operands, flags: Flags, outputs: Mapping[str, Tensor], keep: bool
) -> tuple[Tensor, ...]:
    """The results of attention, as :func:`fusednorm.engine.run.forward` has those of other operations."""
    q, v = cast(Tensor, operands[plan.rows]), cast(Tensor, operands[plan.values])
    flags = {**flags, "scale": scale_of(flags["scale"], q)}
    ((made, _, shape, dtype),) = plan.written
    if q.is_meta:  # the formula looks at values
        return (new(shape(operands), dtype(operands, flags), q.device),)
    backend = None
    if q.dtype is not torch.float64 and max(q.shape[-1], v.shape[-1]) <= LONGEST:
        backend = backend_of(q, plan.step_of(flags))
    if backend is None or plan.kernel is None:
        return as_new(plan.declaration.formula(**operands, **flags), operands.values())
    roles = plan.declaration.roles
    tensors = {
        name: t if t is None else _adjacent(t) if roles[name] in _WITH_LENGTH else _which(t, q)
        for name, t in operands.items()
    }
    out = outputs.get(made)
    if out is None or not _is_adjacent(out):
        outputs, out = {}, new(shape(operands), dtype(operands, flags), q.device)
    if not v.numel():
        out.zero_()
        return (out,)
    size = q.shape[-1]
    rows = q.numel() // size if out.numel() else 0
    call = Call(plan.kernel.name, False, {**tensors, made: out}, {}, flags, size, rows, rows)
    launch(backend, call, (*outputs.values(),))
    return (out,)


_WITH_LENGTH = (Role.ROWS, Role.KEYS, Role.VALUES)


def _is_adjacent(t: Tensor) -> bool:
    """Whether the elements of each row lie side by side."""
    return (t.stride(-1) == 1 or t.shape[-1] == 1) and not t.is_neg()


def _adjacent(t: Tensor) -> Tensor:
    return t if _is_adjacent(t) else packed(t)


def _which(t: Tensor, q: Tensor) -> Tensor:
    """A mask with all dimensions, a table whose rows may lie apart, or a contiguous tensor."""
    if t.dtype is torch.bool:
        return t[(None,) * (q.dim() - t.dim())]
    return t if t.dim() > 1 and _is_adjacent(t) else packed(t)
