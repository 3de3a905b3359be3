"""A second implementation of the specification, in NumPy, written from docs/spec.md alone, to check the reference.

It shares no code or method with ``fusednorm/reference/norm.py``: it rounds by scaling to integers.
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
    bias=None,
    rounded_to=None,
    center=False,
):
    """Returns y, residual_out (None without a residual), both as float64 arrays, and rstd and h in the accumulator.

    ``rounded_to``: the dtype to which ``round_norm`` rounds, where that is not x's. ``center``: h is less its mean.
    """
    acc = accumulator(x)
    h, total = to_numpy(x).astype(acc), None
    if residual is not None:
        h = h + to_numpy(residual).astype(acc)
        total = round_to(h, residual_out_dtype or residual.dtype)
        if round_sum:
            h = total.astype(acc)
    if center:
        h = h - (treesum(h) / acc(h.shape[-1]))[..., None]
    mean = treesum(h * h) / acc(h.shape[-1])
    rstd = acc(1) / np.sqrt(mean + acc(eps))
    y = h * rstd[..., None]
    if round_norm:
        y = round_to(y, rounded_to or x.dtype).astype(acc)
    if weight is not None:
        y = y * gain(weight, weight_offset, acc)
    if bias is not None:
        y = y + to_numpy(bias).astype(acc)
    return round_to(y, out_dtype or x.dtype), total, rstd, h


def gain(weight, weight_offset, acc):
    g = to_numpy(weight).astype(acc)
    return g + acc(weight_offset) if weight_offset != 0 else g


def sum_over_rows(shares, operand):
    """The gradient of a weight or a bias, [N] or [H, N], from that of each row."""
    return round_to(rowsum(shares.reshape(-1, operand.numel())), operand.dtype).reshape(operand.shape)


@np.errstate(all="ignore")
def fused_add_rms_norm(
    leaves,
    incoming,
    eps=1e-6,
    x_scale=1.0,
    weight_offset=0.0,
    round_sum=True,
    round_norm=False,
    out_dtype=None,
    residual_dtype=None,
    center=False,
):
    """Outputs and gradients of the public function, as float64 arrays, as of those below.

    ``leaves``: its operands; ``incoming``: the gradients of its outputs. None where there is none, and in the results.
    """
    x, residual, weight, bias = leaves
    acc = accumulator(x)
    scaled = _rounded(to_numpy(x).astype(acc) * acc(x_scale), x.dtype) if x_scale != 1 else x
    flags = (eps, weight_offset, round_sum, round_norm, out_dtype, residual_dtype)
    y, total, rstd, h = forward(scaled, residual, weight, *flags, bias=bias, center=center)
    d_total, added = (None, None) if residual is None else (incoming[1], residual.dtype)
    dtypes = (x.dtype, added)
    dx, dresidual, dweight = backward(incoming[0], d_total, h, rstd, weight, weight_offset, *dtypes, center)
    if x_scale != 1:
        dx = round_to(dx.astype(acc) * acc(x_scale), x.dtype)
    dbias = None if bias is None else sum_over_rows(to_numpy(incoming[0]).astype(acc), bias)
    return y, total, dx, dresidual, dweight, dbias


def rms_norm(leaves, incoming, eps=1e-6, **flags):
    x, weight, bias = leaves
    y, _, dx, _, dweight, dbias = fused_add_rms_norm((x, None, weight, bias), incoming, eps, **flags)
    return y, dx, dweight, dbias


def l2_norm(leaves, incoming, eps=1e-6, **flags):
    (x,) = leaves
    acc, size = accumulator(x), x.shape[-1]
    weight = torch.from_numpy(np.full(size, 1 / np.sqrt(np.float64(size)), acc))
    return rms_norm((x, weight, None), incoming, eps / size, **flags)[:2]


def fused_add_layer_norm(leaves, incoming, eps=1e-5, **flags):
    return fused_add_rms_norm(leaves, incoming, eps, center=True, **flags)


def layer_norm(leaves, incoming, eps=1e-5, **flags):
    return rms_norm(leaves, incoming, eps, center=True, **flags)


@np.errstate(all="ignore")
def modulate(leaves, incoming, round_steps=False, out_dtype=None):
    y, scale, shift = leaves
    acc = accumulator(y)

    def step(values):
        return round_to(values, y.dtype).astype(acc) if round_steps else values

    def beside(operand):
        rows = to_numpy(operand).astype(acc)
        return rows if operand.dim() == y.dim() else np.broadcast_to(rows[:, None], y.shape)

    def summed(shares, operand):
        if operand.dim() < y.dim():
            shares = np.stack([rowsum(of_sample) for of_sample in shares])
        return round_to(shares, operand.dtype)

    rows, gain, d = to_numpy(y).astype(acc), step(beside(scale) + acc(1)), to_numpy(incoming[0]).astype(acc)
    found = round_to(step(rows * gain) + beside(shift), out_dtype or y.dtype)
    return found, round_to(d * gain, y.dtype), summed(d * rows, scale), summed(d, shift)


def _first_norm(x, weight, eps, between, weight_offset, round_norm):
    """Rows of the norm before an addition, rounded to what passes, and a function: from their gradient to x's."""
    passed = between or x.dtype
    y, _, rstd, h = forward(x, None, weight, eps, weight_offset, True, round_norm, passed)

    def gradients(dy):
        dx, _, dweight = backward(_rounded(dy, passed), None, h, rstd, weight, weight_offset, x.dtype, None)
        return dx, dweight

    return _rounded(y, passed), gradients


def _rounded(array, dtype):
    return torch.from_numpy(round_to(array, dtype)).to(dtype)


def rms_norm_add_rms_norm(
    leaves,
    incoming,
    eps=1e-6,
    next_eps=None,
    between=None,
    weight_offset=0.0,
    round_sum=True,
    round_norm=False,
    out_dtype=None,
    residual_dtype=None,
):
    x, residual, weight, next_weight = leaves
    rows, gradients = _first_norm(x, weight, eps, between, weight_offset, round_norm)
    next_eps = eps if next_eps is None else next_eps
    flags = (next_eps, weight_offset, round_sum, round_norm, out_dtype or x.dtype, residual_dtype)
    y, total, rstd, h = forward(rows, residual, next_weight, *flags)
    d_rows, dresidual, dnext = backward(*incoming, h, rstd, next_weight, weight_offset, rows.dtype, residual.dtype)
    dx, dweight = gradients(d_rows)
    return y, total, dx, dresidual, dweight, dnext


@np.errstate(all="ignore")
def rms_norm_add(leaves, incoming, eps=1e-6, between=None, weight_offset=0.0, round_norm=False, residual_dtype=None):
    x, residual, weight = leaves
    acc = accumulator(x)
    rows, gradients = _first_norm(x, weight, eps, between, weight_offset, round_norm)
    stored = residual_dtype or residual.dtype
    total = round_to(to_numpy(rows).astype(acc) + to_numpy(residual).astype(acc), stored)
    d_total = to_numpy(incoming[0]).astype(np.float64)
    dx, dweight = gradients(d_total)
    return total, dx, round_to(d_total, residual.dtype), dweight


def _turned(heads, cos, sin, acc, interleaved, rounded_to, dtype):
    """Heads, an array, rotated pair by pair; ``rounded_to``: of products, or None."""
    heads, c, s = heads.astype(acc), to_numpy(cos).astype(acc), to_numpy(sin).astype(acc)
    found, pairs = heads.astype(np.float64), c.shape[-1]

    def product(u, v):
        return u * v if rounded_to is None else round_to(u * v, rounded_to).astype(acc)

    for j in range(pairs):
        one, other = (2 * j, 2 * j + 1) if interleaved else (j, j + pairs)
        a, b = heads[..., one], heads[..., other]
        cj, sj = c[..., None, j], s[..., None, j]
        found[..., one] = product(a, cj) - product(b, sj)
        found[..., other] = product(a, sj) + product(b, cj)
    return round_to(found, dtype)


@np.errstate(all="ignore")
def rotate(leaves, incoming, interleaved=False, round_products=False):
    x, cos, sin = leaves
    how = (accumulator(x), interleaved, x.dtype if round_products else None, x.dtype)
    return _turned(to_numpy(x), cos, sin, *how), _turned(to_numpy(incoming[0]), cos, -sin, *how)


@np.errstate(all="ignore")
def qk_norm_rope(
    leaves,
    incoming,
    eps=1e-6,
    norm=True,
    interleaved=False,
    round_products=False,
    between=None,
    weight_offset=0.0,
    round_norm=False,
):
    *operands, cos, sin = leaves
    outputs, gradients, of_weights = [], [], []
    for x, weight, dy in zip(operands[:2], operands[2:], incoming, strict=True):
        acc = accumulator(x)
        passed = between if between is not None and cos is not None else x.dtype
        rows, norms_gradients = x, None
        if norm:
            rows, norms_gradients = _first_norm(x, weight, eps, passed, weight_offset, round_norm)
        y, d_rows = to_numpy(rows).astype(np.float64), to_numpy(dy).astype(np.float64)
        if cos is not None:
            how = (acc, interleaved, rows.dtype if round_products else None)
            y = _turned(y, cos, sin, *how, x.dtype)
            d_rows = _turned(d_rows, cos, -sin, *how, rows.dtype)
        dx, dweight = norms_gradients(d_rows) if norm else (d_rows, None)
        outputs.append(y)
        gradients.append(dx)
        of_weights.append(dweight)
    return *outputs, *gradients, *of_weights


@np.errstate(all="ignore")
def backward(dy, d_total, h, rstd, weight, weight_offset, x_dtype, residual_dtype, center=False):
    """Returns dx, dresidual, dweight as float64 arrays (None where there is no such operand)."""
    acc = h.dtype.type
    dy, r = to_numpy(dy).astype(acc), rstd[..., None]
    xhat = h * r
    wdy = dy if weight is None else dy * gain(weight, weight_offset, acc)
    c = treesum(wdy * xhat) / acc(h.shape[-1])
    if center:
        wdy = wdy - (treesum(wdy) / acc(h.shape[-1]))[..., None]
    d = (wdy - xhat * c[..., None]) * r
    if d_total is not None:
        d = d + to_numpy(d_total).astype(acc)
    dw = None if weight is None else sum_over_rows(dy * xhat, weight)
    return round_to(d, x_dtype), None if residual_dtype is None else round_to(d, residual_dtype), dw
