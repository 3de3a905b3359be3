"""Runs a gate without torch's dispatcher, by the backend that normalises such rows, if it has gates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm import run
from fusednorm.backends import activations
from fusednorm.call import Flags, Gate, GateBackward, Strides, operation_of
from fusednorm.layout import in_levels, overlaps_itself, rows_of


class Gating(NamedTuple):
    """What a gate does."""

    #: The function, of :data:`fusednorm.backends.activations.ACTIVATIONS`.
    activation: str
    #: The dtype that the function's value is rounded to before it is multiplied, or None.
    between: torch.dtype | None
    #: The dtype of the result.
    out_dtype: torch.dtype


def backend_of(y: Tensor) -> run.Chosen:
    """The backend for such rows."""
    return run.backend_of(operation_of(y, None, None, Flags()))


def forward(y: Tensor, z: Tensor, gating: Gating, out: Tensor | None = None) -> Tensor:
    """The result for checked operands, in new memory or in ``out``."""
    gate = getattr(backend_of(y), "gate", None)
    rows = y.shape[:-1].numel()
    if out is not None:
        increment_version(out)
        if gate is None or not _can_be_written(out):
            return out.copy_(forward(y, z, gating))
    if gate is None:
        return activations.gated(y, z, *gating)
    if out is None:
        out = torch.empty(y.shape, dtype=gating.out_dtype, device=y.device)
    (written, y_rows, z_rows), inner, strides = in_levels((out, y, z))
    assert written is out  # the first operand's levels are everyone's
    assert y_rows is not None
    assert z_rows is not None
    if rows:
        gate(Gate(y_rows, z_rows, out, *gating[:2], y.shape[-1], rows, inner, (strides[1], strides[2], strides[0])))
    return out


def _can_be_written(out: Tensor) -> bool:
    """Whether rows of an output lie as a kernel can write them."""
    rows = rows_of(out)
    return rows is not None and not overlaps_itself(rows, out.shape[-1])


def _in_levels_of(written: Tensor, inner: int) -> Strides:
    """The strides of a tensor whose rows lie in one level."""
    rows = rows_of(written)
    strides = None if rows is None else rows.in_levels_of(inner)
    assert strides is not None
    return strides


def backward(
    backend: run.Chosen, d: Tensor, y: Tensor, z: Tensor, gating: Gating, into: tuple[Tensor | None, Tensor | None]
) -> None:
    """Writes the gradients of y and z, new tensors whose rows lie in one level; None for one that is not needed."""
    dy, dz = into
    if not d.numel():
        return
    gate_backward = getattr(backend, "gate_backward", None)
    if gate_backward is None:
        found = activations.gate_gradients(d, y, z, *gating[:2], (dy is not None, dz is not None))
        for output, gradient in zip(into, found, strict=True):
            if output is not None and gradient is not None:
                output.copy_(gradient)
        return
    rows, hidden_size = d.shape[:-1].numel(), d.shape[-1]
    (d_rows, y_rows, z_rows), inner, (d_strides, y_strides, z_strides) = in_levels((d, y, z))
    assert d_rows is not None
    assert y_rows is not None
    assert z_rows is not None
    dy_strides, dz_strides = ((0, 0) if t is None else _in_levels_of(t, inner) for t in into)
    gate_backward(
        GateBackward(
            *(d_rows, y_rows, z_rows, dy, dz, *gating[:2], hidden_size, rows, inner),
            (d_strides, y_strides, z_strides, dy_strides, dz_strides),
        )
    )
