"""The fast path in C: which requests it is open for, and gradients by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusednorm.backends.kernel_keys import blocks_of, scratch_size
from fusednorm.calls import fast_path as path
from fusednorm.engine.requested import request

if TYPE_CHECKING:
    from fusednorm.engine.choose import Chosen, Explanation


def open_for(explanation: Explanation) -> None:
    """Opens the fast path of a request to the backend that takes a call, if every call on the device goes there.

    A backend of ours has the type of its device in ``fast_path`` once the fast path may lead to it.
    """
    device = getattr(explanation.module, "fast_path", None)
    if device is None or device in path.CLOSED or explanation.depends_on_operation():
        return
    request = explanation.request
    path.devices_of[request] = path.devices_of.get(request, 0) | path.DEVICES[device]


def backward(
    backend: Chosen,
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    weight_offset: float,
    center: bool = False,
) -> bool:
    """Writes the gradients of a norm, and of a bias after it; returns whether it did."""
    where = getattr(backend, "fast_path", None)
    if where in path.CLOSED or where not in ("cpu", "cuda"):
        return False
    device, block, partial = path.CPU, 0, dbias
    if where == "cuda":
        rows = h.numel() // h.shape[-1]
        device, (block, _) = path.CUDA, blocks_of(rows)
        partial = None
        if dweight is not None:
            partial = torch.empty(scratch_size(rows, h.shape[-1], center), dtype=rstd.dtype, device=h.device)
    return path.backward(
        device, dy, d_residual_out, h, rstd, weight, dx, dresidual, partial, dweight, block, weight_offset, center
    )


def gate_backward(d: Tensor, *arguments: Any) -> bool:
    """Writes the gradients of a gate: see ``calls/fast_path.py``; returns whether it did."""
    where = _where(d)
    return where is not None and path.gate_backward(where, d, *arguments)


def norm_gated_backward(d: Tensor, *arguments: Any) -> bool:
    """Writes the gradients of a norm with a gate: see ``calls/fast_path.py``; returns whether it did."""
    return _where(d) == path.CPU and path.norm_gated_backward(d, *arguments)


def _where(d: Tensor) -> int | None:
    """The type of the device of a gradient, whose backend takes the fast path where that is open for the request."""
    device = type_of_device(d)
    return device if device and path.devices_of.get(request(), 0) >> device & 1 else None


def type_of_device(d: Tensor) -> int | None:
    """C's number of a type of device; None of a device that the fast path does not know."""
    return path.CPU if d.is_cpu else path.CUDA if d.is_cuda else None
