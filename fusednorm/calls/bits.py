"""Whether two tensors have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor


def count_differing(actual: Tensor, expected: Tensor) -> int:
    """The number of elements that differ in bits; NaN equals NaN, and +0 equals -0, but not in 8 bits."""
    if actual.dtype.itemsize == 1:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    if torch.equal(actual, expected):  # nearly always true, and faster than the count
        return 0
    return int((~((actual == expected) | (actual.isnan() & expected.isnan()))).sum())
