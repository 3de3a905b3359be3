"""Modulation of normalised rows in plain torch operations: docs/spec.md, section 12."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.reference.norm import rounded, rowsum


def _beside(t: Tensor, y: Tensor) -> Tensor:
    """A tensor of samples or rows in the accumulator type of y, with dimensions of one element for rows of a sample."""
    return t.to(accumulator(y.dtype)).reshape(*t.shape[:-1], *[1] * (y.dim() - t.dim()), t.shape[-1])


def _gain(y: Tensor, scale: Tensor, round_steps: bool) -> Tensor:
    return _step(_beside(scale, y) + 1, y, round_steps)


def _step(value: Tensor, y: Tensor, round_steps: bool) -> Tensor:
    return rounded(value, y.dtype).to(value.dtype) if round_steps else value


def modulated(
    y: Tensor, scale: Tensor, shift: Tensor, round_steps: bool, out_dtype: torch.dtype | None
) -> tuple[Tensor]:
    """``y * (1 + scale) + shift`` for y of [..., N]; the others may lack dimensions before the last one."""
    product = _step(y.to(accumulator(y.dtype)) * _gain(y, scale, round_steps), y, round_steps)
    return (rounded(product + _beside(shift, y), out_dtype or y.dtype),)


def modulated_gradients(
    d: Tensor, y: Tensor, scale: Tensor, shift: Tensor, round_steps: bool, needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of y, scale and shift, as far as they are needed; else None."""
    wide = accumulator(y.dtype)
    d = d.to(wide)

    def summed(gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient of what like has for each row, or for each sample."""
        samples = math.prod(like.shape[:-1])
        if like.dim() < y.dim() and samples:
            rows = gradient.reshape(samples, -1, like.shape[-1]).movedim(1, 0)
            gradient = rowsum(rows.reshape(-1, like.numel())).reshape(like.shape)
        return rounded(gradient, like.dtype) if samples else torch.zeros_like(like)

    return (
        rounded(d * _gain(y, scale, round_steps), y.dtype) if needs[0] else None,
        summed(d * y.to(wide), scale) if needs[1] else None,
        summed(d, shift) if needs[2] else None,
    )
