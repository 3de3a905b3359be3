"""Runs gates without torch's dispatcher, by the backend that normalises such rows, if it has gates."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm import run
from fusednorm.backends import activations
from fusednorm.backends.reference import accumulator
from fusednorm.call import Around, Flags, Forward, Gate, GateBackward, NormGated, Strides, operation_of
from fusednorm.checks import check_flags
from fusednorm.fast_path import ALONE, AND_MUL, BETWEEN_IS_F32, NO_NORM
from fusednorm.layout import in_levels, overlaps_itself, packed, rows_of
from fusednorm.registry import fast_paths, request


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
    if out is None and (found := _on_fast_path(y, z, gating)) is not None:
        return found
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


def _on_fast_path(y: Tensor, z: Tensor, gating: Gating) -> Tensor | None:
    """The result by the fast path, for a gate that has not been there, as gradients are recorded of it."""
    activation, between, out_dtype = gating
    take = fast_paths.get(request())
    if take is None:
        return None
    if between is None and out_dtype == y.dtype:
        found: Any = take(y, *NO_NORM, z, activation, ALONE, None, None)
    elif between in (None, z.dtype) and out_dtype == z.dtype:
        found = take(z, *NO_NORM, y, activation, AND_MUL + BETWEEN_IS_F32 * (between is None), None, None)
    else:
        return None
    return cast("Tensor | None", found)


def norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    flags: Flags,
    activation: str,
    norm_first: bool,
    between: torch.dtype | None,
    out: Tensor | None,
) -> Tensor | None:
    """A norm and a gate in one call, for checked operands: the rows, in new memory of x's dtype or in ``out``.

    None if the backend has no function for it. ``weight`` may have a row for each head.
    """
    flags = check_flags(flags, x, None, None, None)
    if weight is not None:
        weight = packed(weight if weight.shape[0] > 1 else weight.reshape(-1))
    asked = flags._replace(out_dtype=between if norm_first and between is not None else x.dtype)
    operation = operation_of(x, None, weight, asked, around=Around(None, 1.0))
    if not norm_first:
        operation = operation._replace(x=accumulator(x.dtype))
    takes = getattr(run.backend_of(operation), "norm_gated", None)
    if takes is None:
        return None
    if out is not None:
        increment_version(out)
        if not _can_be_written(out):
            found = norm_gated(x, z, weight, flags, activation, norm_first, between, None)
            return None if found is None else out.copy_(found)
    written = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    (_, x_rows, z_rows), inner, (out_strides, x_strides, z_strides) = in_levels((written, x, z))
    assert x_rows is not None
    assert z_rows is not None
    rows = x.shape[:-1].numel()
    if rows:
        strides = (x_strides, (0, 0), out_strides, (0, 0))
        norm = Forward(
            *(x_rows, None, weight, written, None, None, operation, rows, inner, strides),
            *(flags.eps, flags.weight_offset),
        )
        takes(NormGated(norm, z_rows, z_strides, activation, norm_first))
    return written


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
    take = getattr(backend, "gate_backward_on_fast_path", None)
    if take is not None and take(d, y, z, dy, dz, *gating[:2]):
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
