"""Tangents that have tangents: forward-mode differentiation of what is being differentiated so."""

from __future__ import annotations

from typing import Any

from torch.autograd import forward_ad


def outer_levels() -> Any:
    """A context for the ``jvp`` of a function: torch has turned off the levels around the one that it serves."""
    return forward_ad._set_fwd_grad_enabled(True)


def primals(ctx: Any) -> list[Any]:
    """What a function kept for its ``jvp``: without tangents of this level, with those of the levels around it."""
    return [t if t is None else forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]  # type: ignore[no-untyped-call]
