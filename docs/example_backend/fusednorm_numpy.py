"""A backend of fusednorm in NumPy: the attributes of fusednorm.registry.Backend, computed as docs/spec.md says."""

import numpy as np
import torch

DEVICES = ("cpu",)
FLUSHES_WITH_CALLER = True  # NumPy's arithmetic follows torch.set_flush_denormal


def unavailable():
    return []


def unsuitable(signature):
    return ["it computes in float32 only"] if signature.x == torch.float64 else []


def plan(signature):
    return "NumPy, one operation after the other"


def widened(tensor):
    return tensor.detach().to(torch.float32).numpy()


def rounded(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def halved(v):
    size = 1 << (v.shape[-1] - 1).bit_length()
    v = np.concatenate([v, np.zeros((*v.shape[:-1], size - v.shape[-1]), v.dtype)], -1)
    while (size := v.shape[-1] // 2) > 0:
        v = v[..., :size] + v[..., size:]
    return v[..., 0]


def treesum(v):
    v = np.concatenate([v, np.zeros((*v.shape[:-1], -v.shape[-1] % 1024), v.dtype)], -1)
    return halved(halved(v.reshape(*v.shape[:-1], -1, 1024)))


def rowsum(v):
    block = -(-len(v) // min(len(v), 256))
    return halved(np.stack([np.add.accumulate(v[i : i + block], 0)[-1] for i in range(0, len(v), block)], -1))


@np.errstate(all="ignore")
def forward(x, residual, weight, out, residual_out, rstd, rows, hidden_size, *arguments):
    *_strides, eps, weight_offset, round_sum, round_norm = arguments
    h = widened(x)
    if residual is not None:
        h = h + widened(residual)
        total = rounded(h, residual.dtype)
        h = widened(total) if round_sum else h
    r = np.float32(1) / np.sqrt(treesum(h * h) / np.float32(hidden_size) + np.float32(eps))
    n = h * r[..., None]
    n = widened(rounded(n, x.dtype)) if round_norm else n
    if residual is not None:
        residual_out.copy_(total)
    out.copy_(rounded(n if weight is None else n * gain(weight, weight_offset), out.dtype))
    if rstd is not None:
        rstd.copy_(torch.from_numpy(np.asarray(r)))


def gain(weight, weight_offset):
    return widened(weight) + np.float32(weight_offset) if weight_offset else widened(weight)


@np.errstate(all="ignore")
def backward(dy, d_residual_out, h, rstd, weight, weight_offset, x_dtype, residual_dtype, needs):
    d, r = widened(dy), widened(rstd)[..., None]
    xhat = widened(h) * r
    wdy = d if weight is None else d * gain(weight, weight_offset)
    dh = (wdy - xhat * (treesum(wdy * xhat) / np.float32(h.shape[-1]))[..., None]) * r
    dh = dh if d_residual_out is None else dh + widened(d_residual_out)
    dw = rowsum((d * xhat).reshape(-1, h.shape[-1])) if needs[2] else None
    dtypes = (x_dtype, residual_dtype, weight.dtype if needs[2] else None)
    return tuple(rounded(g, t) if need else None for g, t, need in zip((dh, dh, dw), dtypes, needs, strict=True))
