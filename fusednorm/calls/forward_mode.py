"""Tangents that have tangents: forward-mode differentiation of what is being differentiated so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch


def outer_levels() -> Any:
    """A context for the ``jvp`` of a function: torch has turned off the levels around the one that it serves."""
    return forward_ad._set_fwd_grad_enabled(True)


def primals(ctx: Any) -> list[Any]:
    """The tensors kept for a ``jvp``: without tangents of this level, with those of the levels around it."""
    return [t if t is None else _primal(t) for t in ctx.saved_tensors]


def _primal(tensor: Tensor) -> Tensor:
    """A tensor without its tangent. ``vmap`` cannot take that away from a batch, but from the tensor that holds it."""
    if not _functorch.is_batchedtensor(tensor):
        return forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call, no-any-return]
    dimension, level = _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor)
    inside = _primal(_functorch.get_unwrapped(tensor))
    return _functorch._add_batch_dim(inside, dimension, level)  # type: ignore[no-any-return]
