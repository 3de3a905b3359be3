"""Rotation of heads in plain torch operations: docs/spec.md, section 8. Every backend must return these bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusednorm.reference.norm import rounded

if TYPE_CHECKING:
    from torch import Tensor


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounded_to: torch.dtype | None, dtype: torch.dtype
) -> Tensor:
    """The plain rotation of the specification. Its gradient is the rotation of the gradient by ``cos`` and ``-sin``.

    Args:
        x: [..., H, D], the heads.
        cos: [..., K], with x's dimensions before the heads; 2 * K is at most D.
        sin: [..., K].
        interleaved: whether pairs lie side by side; else the second numbers of all pairs follow the first ones.
        rounded_to: the dtype that products are rounded to before they are added, or None.
        dtype: of the result.
    """
    wide = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    c, s = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    pairs = cos.shape[-1]
    turning = x[..., : 2 * pairs].to(wide)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else torch.split(turning, pairs, -1)

    def product(u: Tensor, v: Tensor) -> Tensor:
        return u * v if rounded_to is None else rounded(u * v, rounded_to).to(wide)

    first, second = product(a, c) - product(b, s), product(b, c) + product(a, s)
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((rounded(turned, dtype), rounded(x[..., 2 * pairs :], dtype)), -1)
