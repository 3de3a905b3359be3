"""Sections 13 and 16 of the specification, in NumPy, written from docs/spec.md alone.

It shares no method with the reference: a fused multiply-add is rounded to odd first.
"""

import numpy as np
import torch

from fusednorm.conformance.oracle import accumulator, round_to, to_numpy

NARROW = (torch.float16, torch.bfloat16)


def fused(a, b, s):
    """``a * b + s`` rounded to float32 once, for 16-bit numbers a and b, and s of float32, all in float64."""
    product = a * b  # exact
    total = s + product
    part = total - s
    lost = (s - (total - part)) + (product - part)
    even = total.view(np.int64) % 2 == 0
    towards = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return round_to(np.where(np.isfinite(total) & (lost != 0) & even, towards, total), torch.float32)


@np.errstate(all="ignore")
def linear(leaves, _incoming, out_dtype=None):
    """The products alone, whose gradients the specification does not have."""
    x, weight, bias = leaves
    acc = accumulator(x)
    is_fused = x.dtype in NARROW and weight.dtype in NARROW
    exact = np.float64 if is_fused else acc
    rows, columns = to_numpy(x).astype(exact)[..., None, :], to_numpy(weight).astype(exact)
    sums = np.zeros((*x.shape[:-1], len(columns), 16), exact)
    for k in range(0, x.shape[-1], 16):
        a, b = rows[..., k : k + 16], columns[:, k : k + 16]
        before = sums[..., : b.shape[-1]]
        sums[..., : b.shape[-1]] = fused(a, b, before) if is_fused else before + a * b
    sums = sums.astype(acc)
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    y = sums[..., 0]
    if bias is not None:
        y = y + to_numpy(bias).astype(acc)
    return (round_to(y, out_dtype or x.dtype),)


@np.errstate(all="ignore")
def int8_linear(operands, _incoming, out_dtype=None):
    """Section 16: whole numbers of Python's, and each operation of float32 by itself."""
    q, scale, weight, weight_scale, bias, zero_point = operands
    rows, columns = q.reshape(-1, q.shape[-1]).cpu().tolist(), weight.cpu().tolist()
    zeros = [0] * len(rows) if zero_point is None else zero_point.reshape(-1).tolist()
    sums = [
        [sum((a - zero) * b for a, b in zip(row, column, strict=True)) for column in columns]
        for row, zero in zip(rows, zeros, strict=True)
    ]
    y = np.array(sums, np.int64).astype(np.float32).reshape(*q.shape[:-1], len(columns))
    y = y * to_numpy(weight_scale).astype(np.float32) * to_numpy(scale).astype(np.float32)
    if bias is not None:
        y = y + to_numpy(bias).astype(np.float32)
    return (round_to(y, out_dtype or torch.float32),)
