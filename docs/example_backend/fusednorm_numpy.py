"""A backend of fusednorm in NumPy: the attributes of fusednorm.registry.Backend, computed as docs/spec.md says."""

import numpy as np
import torch

DEVICES = ("cpu",)
FLUSHES_WITH_CALLER = True  # NumPy's arithmetic follows torch.set_flush_denormal


def unavailable():
    return []


def unsuitable(operation):
    return ["it computes in float32 only"] if operation.x == torch.float64 else []


def plan(operation):
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


def gain(call):
    weight = widened(call.weight)
    return weight + np.float32(call.weight_offset) if call.weight_offset else weight


@np.errstate(all="ignore")
def forward(call):
    operation, h = call.operation, widened(call.x)
    if call.residual is not None:
        h = h + widened(call.residual)
        total = rounded(h, operation.residual_out)
        h = widened(total) if operation.round_sum else h
    r = np.float32(1) / np.sqrt(treesum(h * h) / np.float32(operation.hidden_size) + np.float32(call.eps))
    n = h * r[..., None]
    n = widened(rounded(n, operation.x)) if operation.round_norm else n
    if call.residual is not None:
        call.residual_out.copy_(total)
    call.out.copy_(rounded(n if call.weight is None else n * gain(call), operation.out))
    if call.rstd is not None:
        call.rstd.copy_(torch.from_numpy(np.asarray(r)))


@np.errstate(all="ignore")
def backward(call):
    d, r = widened(call.dy), widened(call.rstd)[..., None]
    xhat = widened(call.h) * r
    wdy = d if call.weight is None else d * gain(call)
    dh = (wdy - xhat * (treesum(wdy * xhat) / np.float32(call.operation.hidden_size))[..., None]) * r
    dh = dh if call.d_residual_out is None else dh + widened(call.d_residual_out)
    for output in (call.dx, call.dresidual):
        if output is not None:
            output.copy_(rounded(dh, output.dtype))
    if call.dweight is not None:
        dw = rowsum((d * xhat).reshape(-1, call.operation.hidden_size))
        call.dweight.copy_(rounded(dw, call.dweight.dtype))
