"""Runs gates without torch's dispatcher, by the backend that normalises such rows, if it has gates."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.call import (
    Around,
    Flags,
    Forward,
    Gate,
    GateBackward,
    NormGated,
    NormGatedBackward,
    RMSNorm,
    Step,
    Strides,
    accumulator,
    operation_of,
)
from fusednorm.calls.checks import check_flags, check_kept
from fusednorm.calls.fast_path import ALONE, AND_MUL, BETWEEN_IS_F32, GATE_FIRST, NO_NORM, NORM_FIRST
from fusednorm.calls.memory import in_levels, overlaps_itself, packed, rows_of
from fusednorm.engine import fast_path, run
from fusednorm.engine.choose import Chosen, fast_paths, request
from fusednorm.reference import activations


class Gating(NamedTuple):
    """A gate's function and roundings."""

    #: The function, of :data:`fusednorm.calls.call.ACTIVATIONS`.
    activation: str
    #: The dtype that the function's value is rounded to before it is multiplied, or None.
    between: torch.dtype | None
    #: The dtype of the result.
    out_dtype: torch.dtype


def backend_of(y: Tensor, step: str) -> Chosen | None:
    """The backend for such rows, if it has gates, or their gradients."""
    return run.whole_of(operation_of(y, None, None, Flags()), Step(step))


def forward(y: Tensor, z: Tensor, gating: Gating, out: Tensor | None = None) -> Tensor:
    """The result for checked operands, in new memory or in ``out``."""
    if out is None and (found := on_fast_path(y, z, *gating)) is not None:
        return found
    backend = backend_of(y, "gate")
    rows = y.shape[:-1].numel()
    if out is not None:
        increment_version(out)
        if backend is None or not _can_be_written(out):
            return out.copy_(forward(y, z, gating))
    if backend is None:
        return activations.gated(y, z, *gating)
    if out is None:
        out = torch.empty(y.shape, dtype=gating.out_dtype, device=y.device)
    (written, y_rows, z_rows), inner, strides = in_levels((out, y, z))
    assert written is out  # the first operand's levels are everyone's
    assert y_rows is not None
    assert z_rows is not None
    if rows:
        lie = (strides[1], strides[2], strides[0])
        backend.forward(Gate(y_rows, z_rows, out, *gating[:2], y.shape[-1], rows, inner, lie))
    return out


def on_fast_path(
    y: Tensor, z: Tensor, activation: str, between: torch.dtype | None, out_dtype: torch.dtype
) -> Tensor | None:
    """The result, if the fast path takes the call; a public function has asked it unless gradients are recorded."""
    take = fast_paths.get(request())
    if take is None or between is torch.float32:
        return None
    if between is None and out_dtype == y.dtype:
        found: Any = take(y, *NO_NORM, z, activation, ALONE, None, None)
    elif between in (None, z.dtype) and out_dtype == z.dtype:
        found = take(z, *NO_NORM, y, activation, AND_MUL + BETWEEN_IS_F32 * (between is None), None, None)
    else:
        return None
    return cast("Tensor | None", found)


class NormAndGate(NamedTuple):
    """The arguments of a norm and a gate, one after the other."""

    #: eps, the weight's offset and ``round_norm``.
    flags: Flags
    activation: str
    norm_first: bool
    #: With the norm first: the dtype that normalised rows are rounded to, None if that is x's.
    between: torch.dtype | None

    @property
    def order(self) -> int:
        """Which comes first, and whether float32 passes between, as the fast path takes it."""
        return (NORM_FIRST if self.norm_first else GATE_FIRST) + BETWEEN_IS_F32 * (self.between is not None)

    def operation(self, x: Tensor, weight: Tensor | None) -> RMSNorm:
        """The norm, as it decides the backend: of the gated rows, if the gate comes first."""
        out = self.between if self.norm_first and self.between is not None else x.dtype
        found = operation_of(x, None, weight, self.flags._replace(out_dtype=out), around=Around(None, 1.0))
        return found if self.norm_first else found._replace(x=accumulator(x.dtype))


def _of_heads(weight: Tensor | None) -> Tensor | None:
    """A contiguous weight; one with a single row is [N], the weight of all rows."""
    return weight if weight is None else packed(weight if weight.shape[0] > 1 else weight.reshape(-1))


def norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    asked: NormAndGate,
    out: Tensor | None,
    rstd: Tensor | None = None,
) -> Tensor | None:
    """A norm and a gate in one call, for checked operands: the rows, in new memory of x's dtype or in ``out``.

    None if the backend has no function for it. ``weight`` may have a row for each head. ``rstd``, [...] of the
    accumulator type, receives that of the rows which are normalised.
    """
    if rstd is not None and (take := fast_paths.get(request())) is not None:  # else it has refused the call already
        eps, offset, _, rounds, *_ = asked.flags
        how = (z, asked.activation, asked.order, None, out)
        found: Any = take(x, None, weight, None, None, eps, offset, True, rounds, rstd, False, None, 1.0, *how)
        if found is not None:
            return cast(Tensor, found)
    asked = asked._replace(flags=check_flags(asked.flags, x, None, None, None))
    weight = _of_heads(weight)
    operation = asked.operation(x, weight)
    backend = run.whole_of(operation, Step("norm_gated"))
    if backend is None:
        return None
    if out is not None:
        increment_version(out)
        if not _can_be_written(out):
            found = norm_gated(x, z, weight, asked, None)
            return None if found is None else out.copy_(found)
    written = run.new_like(x, x.dtype) if out is None else out
    (_, x_rows, z_rows), inner, (out_strides, x_strides, z_strides) = in_levels((written, x, z))
    assert x_rows is not None
    assert z_rows is not None
    rows = x.shape[:-1].numel()
    if rows:
        strides = (x_strides, (0, 0), out_strides, (0, 0))
        norm = Forward(
            *(x_rows, None, weight, written, None, rstd, operation, rows, inner, strides),
            *(asked.flags.eps, asked.flags.weight_offset),
        )
        backend.forward(NormGated(norm, z_rows, z_strides, asked.activation, asked.norm_first))
    return written


def gradients_of(x: Tensor, weight: Tensor | None, asked: NormAndGate) -> tuple[NormAndGate, Chosen | None]:
    """The same with checked flags, and the backend of such rows, if it has the gradients of both in one call."""
    asked = asked._replace(flags=check_flags(asked.flags, x, None, None, None))
    return asked, run.whole_of(asked.operation(x, _of_heads(weight)), Step("norm_gated_backward"))


def norm_gated_backward(
    backend: Chosen,
    d: Tensor,
    x: Tensor,
    z: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    asked: NormAndGate,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, the gate and the weight, new tensors, as far as they are needed; else None."""
    dx, dz, dweight = (
        run.new_like(t, t.dtype) if need and t is not None else None
        for t, need in zip((x, z, weight), needs, strict=True)
    )
    rows = x.shape[:-1].numel()
    if rows == 0:
        return dx, dz, None if dweight is None else dweight.zero_()
    offset = asked.flags.weight_offset
    how = (asked.activation, asked.order, asked.flags.round_norm, offset)
    if fast_path.norm_gated_backward(backend, d, x, z, rstd, weight, dx, dz, dweight, *how):
        return dx, dz, dweight
    check_kept((d,), (x, z, rstd, weight))
    (d_rows, x_rows, z_rows), inner, (d_strides, x_strides, z_strides) = in_levels((d, x, z))
    assert d_rows is not None
    assert x_rows is not None
    assert z_rows is not None
    weight = _of_heads(weight)
    backend.backward(
        NormGatedBackward(
            *(d_rows, x_rows, z_rows, packed(rstd), weight, dx, dz, dweight, asked.operation(x, weight)),
            *(asked.activation, asked.norm_first, rows, inner, (d_strides, x_strides, z_strides), offset),
        )
    )
    return dx, dz, dweight


def _can_be_written(out: Tensor) -> bool:
    """Whether rows of an output lie as a kernel can write them."""
    return rows_of(out) is not None and not overlaps_itself(out)


def _in_levels_of(written: Tensor, inner: int) -> Strides:
    """The strides of a tensor whose rows lie in one level."""
    rows = rows_of(written)
    strides = None if rows is None else rows.in_levels_of(inner)
    assert strides is not None
    return strides


def backward(
    backend: Chosen | None, d: Tensor, y: Tensor, z: Tensor, gating: Gating, into: tuple[Tensor | None, Tensor | None]
) -> None:
    """Writes the gradients of y and z, new tensors whose rows lie in one level; None for one that is not needed."""
    dy, dz = into
    if not d.numel():
        return
    if backend is not None and fast_path.gate_backward(backend, d, y, z, dy, dz, *gating[:2]):
        return
    check_kept((d,), (y, z))
    if backend is None:
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
    backend.backward(
        GateBackward(
            *(d_rows, y_rows, z_rows, dy, dz, *gating[:2], hidden_size, rows, inner),
            (d_strides, y_strides, z_strides, dy_strides, dz_strides),
        )
    )
