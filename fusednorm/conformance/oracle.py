"""A second implementation of the specification, in NumPy, written from docs/spec.md alone, to check the reference.

It shares no code or method with ``backends/reference.py``: it rounds by scaling to integers.
"""

import numpy as np
import torch

# Significant bits, and the exponent of the smallest normal number.
FORMATS = {torch.float16: (11, -14), torch.bfloat16: (8, -126), torch.float32: (24, -126), torch.float64: (53, -1022)}


def to_numpy(tensor):
    """A tensor's values, exactly, in the narrowest NumPy type that holds them."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return (tensor.contiguous().view(torch.int16).numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.contiguous().numpy()


def round_to(values, dtype):
    """Rounds to nearest even to a torch dtype, as float64 (which holds every value of the narrower types)."""
    values = np.asarray(values, dtype=np.float64)
    if dtype == torch.float64:
        return values
    bits, smallest = FORMATS[dtype]
    exponent = np.maximum(np.frexp(values)[1] - 1, smallest)
    unit = np.ldexp(1.0, exponent - (bits - 1))
    rounded = np.rint(values / unit) * unit
    largest = np.ldexp(2.0 - np.ldexp(1.0, 1 - bits), -smallest + 1)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)
    return np.where(np.isfinite(values), rounded, values)


def halved(values):
    size = 1
    while size < values.shape[-1]:
        size *= 2
    padded = np.zeros((*values.shape[:-1], size), values.dtype)
    padded[..., : values.shape[-1]] = values
    while size > 1:
        size //= 2
        padded = padded[..., :size] + padded[..., size : 2 * size]
    return padded[..., 0]


def treesum(values):
    segments = []
    for begin in range(0, values.shape[-1], 1024):
        segment = np.zeros((*values.shape[:-1], 1024), values.dtype)
        part = values[..., begin : begin + 1024]
        segment[..., : part.shape[-1]] = part
        segments.append(halved(segment))
    return halved(np.stack(segments, axis=-1))


def rowsum(values):
    rows = len(values)
    block = -(-rows // min(rows, 256))
    sums = []
    for begin in range(0, rows, block):
        total = values[begin]
        for row in range(begin + 1, min(begin + block, rows)):
            total = total + values[row]
        sums.append(total)
    return halved(np.stack(sums, axis=-1))


def accumulator(x):
    return np.float64 if x.dtype == torch.float64 else np.float32


@np.errstate(all="ignore")
def forward(
    x,
    residual,
    weight,
    eps=1e-6,
    weight_offset=0.0,
    round_sum=True,
    round_norm=False,
    out_dtype=None,
    residual_out_dtype=None,
):
    """Returns y, residual_out (None without a residual), both as float64 arrays, and rstd and h in the accumulator."""
    acc = accumulator(x)
    h, total = to_numpy(x).astype(acc), None
    if residual is not None:
        h = h + to_numpy(residual).astype(acc)
        total = round_to(h, residual_out_dtype or residual.dtype)
        if round_sum:
            h = total.astype(acc)
    mean = treesum(h * h) / acc(h.shape[-1])
    rstd = acc(1) / np.sqrt(mean + acc(eps))
    y = h * rstd[..., None]
    if round_norm:
        y = round_to(y, x.dtype).astype(acc)
    if weight is not None:
        g = to_numpy(weight).astype(acc)
        y = y * (g + acc(weight_offset) if weight_offset != 0 else g)
    return round_to(y, out_dtype or x.dtype), total, rstd, h


def two_norms(
    leaves, incoming, eps, next_eps, between, weight_offset, round_sum, round_norm, out_dtype=None, residual_dtype=None
):
    """Outputs and gradients of ``rms_norm_add_rms_norm``, as float64 arrays (None where there is no such operand).

    ``leaves``: x, the residual, both weights. ``incoming``: the gradients of both outputs.
    """
    x, residual, weight, next_weight = leaves
    passed = between or x.dtype
    y1, _, rstd1, h1 = forward(x, None, weight, eps, weight_offset, round_sum, round_norm, passed)
    rows = torch.from_numpy(y1).to(passed)
    flags = (next_eps, weight_offset, round_sum, round_norm, out_dtype or x.dtype, residual_dtype)
    y, total, rstd2, h2 = forward(rows, residual, next_weight, *flags)
    d1, dresidual, dnext = backward(*incoming, h2, rstd2, next_weight, weight_offset, passed, residual.dtype)
    dx, _, dweight = backward(torch.from_numpy(d1).to(passed), None, h1, rstd1, weight, weight_offset, x.dtype, None)
    return y, total, dx, dresidual, dweight, dnext


@np.errstate(all="ignore")
def backward(dy, d_total, h, rstd, weight, weight_offset, x_dtype, residual_dtype):
    """Returns dx, dresidual, dweight as float64 arrays (None where there is no such operand)."""
    acc = h.dtype.type
    dy, r = to_numpy(dy).astype(acc), rstd[..., None]
    xhat = h * r
    wdy = dy
    if weight is not None:
        g = to_numpy(weight).astype(acc)
        wdy = dy * (g + acc(weight_offset) if weight_offset != 0 else g)
    c = treesum(wdy * xhat) / acc(h.shape[-1])
    d = (wdy - xhat * c[..., None]) * r
    if d_total is not None:
        d = d + to_numpy(d_total).astype(acc)
    dw = None if weight is None else round_to(rowsum((dy * xhat).reshape(-1, h.shape[-1])), weight.dtype)
    return round_to(d, x_dtype), None if residual_dtype is None else round_to(d, residual_dtype), dw
