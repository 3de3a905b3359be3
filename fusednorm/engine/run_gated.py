"""Runs gates without torch's dispatcher, by the backend that normalises such rows, if it has gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.c_abi import KINDS
from fusednorm.calls.call import (
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
from fusednorm.calls.checks import check_kept
from fusednorm.calls.fast_path import ALONE, AND_MUL, Entry
from fusednorm.calls.memory import ABSENT, in_levels, overlaps_itself, packed, rows_of
from fusednorm.engine import execute, fast_path
from fusednorm.engine.choose import Chosen
from fusednorm.reference import activations

_alone = Entry("gate", "x z activation", constants={"order": ALONE}).open()
#: The gate and up, or both in one tensor; not where gradients are recorded.
and_mul = Entry("gate", "x z activation between", constants={"order": AND_MUL}).open()
_norm_gated = Entry(
    "gate",
    "x z weight eps norm_before_gate activation round_norm between weight_offset rstd out",
    constants={"ask": False},
).open()


class Gating(NamedTuple):
    """A gate's function and roundings: the flags of ``torch.ops.fusednorm.gate``."""

    #: The function, of :data:`fusednorm.calls.call.ACTIVATIONS`.
    activation: str = "silu"
    #: The dtype that the function's value is rounded to before it is multiplied, or None.
    between: torch.dtype | None = None
    #: The dtype of the result; gradients do not need it.
    out_dtype: torch.dtype | None = None


def backend_of(y: Tensor, step: str) -> Chosen | None:
    """The backend for such rows, if it has gates, or their gradients."""
    return execute.whole_of(operation_of(y, None, None, Flags()), Step(step))


def forward(y: Tensor, z: Tensor, gating: Gating, out: Tensor | None = None) -> Tensor:
    """The result for checked operands, in new memory or in ``out``."""
    if out is None and (found := on_fast_path(y, z, gating)) is not None:
        return found
    backend = backend_of(y, "gate")
    if backend is None or not _can_be_written(out):
        found = activations.gated(y, z, *cast(Any, gating)) if backend is None else forward(y, z, gating)
        return found if out is None else out.copy_(found)
    out, (y_rows, z_rows), inner, (of_out, of_y, of_z) = _laid_out(out, cast(torch.dtype, gating.out_dtype), y, z)
    rows = y.shape[:-1].numel()
    if rows:
        numbers = y.shape[-1], rows, inner, (of_y, of_z, of_out)
        backend.forward(Gate(y_rows, z_rows, out, gating.activation, gating.between, *numbers))
    return out


def _can_be_written(out: Tensor | None) -> bool:
    """Whether rows of an output, if one is given, lie as a kernel can write them."""
    return out is None or (rows_of(out) is not None and not overlaps_itself(out))


def _laid_out(out: Tensor | None, dtype: torch.dtype, *rows: Tensor) -> tuple[Tensor, list[Tensor], int, list[Strides]]:
    """An output that can be written, or a new one; rows that are read; and how all lie, the output first."""
    if out is None:
        out = execute.new_like(rows[0], dtype)
    else:
        increment_version(out)
    layout = in_levels((out,), rows)
    assert layout is not None
    return out, layout.read, layout.inner, layout.strides


def on_fast_path(y: Tensor, z: Tensor, gating: Gating) -> Tensor | None:
    """The result, if the fast path takes the call; a public function has asked it unless gradients are recorded."""
    between, out_dtype = gating.between, gating.out_dtype
    if between is torch.float32:
        return None
    if between is None and out_dtype == y.dtype:
        found: Any = _alone(y, z, gating.activation)
    elif between in (None, z.dtype) and out_dtype == z.dtype:
        found = and_mul(z, y, gating.activation, torch.float32 if between is None else None)
    else:
        return None
    return cast("Tensor | None", found)


def rows_and_gate(operands: Sequence[Any]) -> Any:
    """y and z, of both or of one tensor that holds both: z in its first half."""
    return operands if len(operands) == 2 else operands[0].chunk(2, -1)[::-1]


def gradients(
    backend: Chosen | None, d: Tensor, operands: Sequence[Tensor], gating: Gating, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of y and z, or of one tensor that holds both, as far as they are needed."""
    found = tuple(execute.new_like(t, t.dtype) if need else None for t, need in zip(operands, needs, strict=True))
    if not d.numel():
        return found
    y, z = rows_and_gate(operands)
    dy, dz = rows_and_gate(found)  # their rows lie in one level
    activation, between = gating.activation, gating.between
    if backend is not None and fast_path.gate_backward(backend, d, y, z, dy, dz, activation, KINDS[between]):
        return found
    check_kept((d,), (y, z))
    if backend is None:
        by_formula = activations.gate_gradients(d, y, z, activation, between, (dy is not None, dz is not None))
        for output, gradient in zip((dy, dz), by_formula, strict=True):
            if output is not None and gradient is not None:
                output.copy_(gradient)
        return found
    inner, strides, lying = execute.kept_in_levels((d,), (y, z, dy, dz))
    rest = (activation, between, d.shape[-1], d.shape[:-1].numel(), inner, tuple(strides))
    backend.backward(GateBackward(*cast(Any, lying), *cast(Any, rest)))
    return found


class GatedNorm(NamedTuple):
    """The arguments of ``rms_norm_gated`` that are no operands, in its order; ``group_size`` is of rows in memory."""

    eps: float
    group_size: int | None
    norm_before_gate: bool
    activation: str
    round_norm: bool
    between: torch.dtype | None
    weight_offset: float

    def operation(self, x: Tensor, weight: Tensor | None) -> RMSNorm:
        """The norm, as it decides the backend: of the gated rows, if the gate comes first."""
        flags = Flags(round_norm=self.round_norm, out_dtype=self.between or x.dtype)
        found = operation_of(x, None, weight, flags)
        return found if self.norm_before_gate else found._replace(x=accumulator(x.dtype))


def backend_of_gradients(x: Tensor, weight: Tensor | None, how: GatedNorm) -> Chosen | None:
    """The backend of such rows, if it has the gradients of a norm and a gate in one call."""
    return execute.whole_of(how.operation(x, execute.of_all_heads(weight)), Step("norm_gated_backward"))


def norm_gated(
    x: Tensor, z: Tensor, weight: Tensor | None, how: GatedNorm, out: Tensor | None, rstd: Tensor | None = None
) -> Tensor | None:
    """A norm and a gate in one call, for checked operands and flags: the rows, in new memory or in ``out``.

    None if the backend has no function for it. ``weight`` may have a row for each head. ``rstd``, [...] of the
    accumulator type, receives that of the rows which are normalised.
    """
    if rstd is not None:  # else the fast path has refused the call already
        taken = _norm_gated(
            *(x, z, weight, how.eps, how.norm_before_gate, how.activation, how.round_norm, how.between),
            *(how.weight_offset, rstd, out),
        )
        if taken is not None:
            return cast(Tensor, taken)
    weight = execute.of_all_heads(weight)
    operation = how.operation(x, weight)
    backend = execute.whole_of(operation, Step("norm_gated"))
    if backend is None:
        return None
    if not _can_be_written(out):
        return cast(Tensor, out).copy_(cast(Tensor, norm_gated(x, z, weight, how, None)))
    out, (x_rows, z_rows), inner, (of_out, of_x, of_z) = _laid_out(out, x.dtype, x, z)
    rows = x.shape[:-1].numel()
    if rows:
        strides = (of_x, ABSENT, of_out, ABSENT)
        call = Forward(
            *(x_rows, None, weight, out, None, rstd, operation, rows, inner, strides, how.eps, how.weight_offset)
        )
        backend.forward(NormGated(call, z_rows, of_z, how.activation, how.norm_before_gate))
    return out


def norm_gated_backward(
    backend: Chosen,
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    how: GatedNorm,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, the gate and the weight, new tensors, as far as they are needed; else None."""
    dx, dz, dweight = found = [
        execute.new_like(t, t.dtype) if need and t is not None else None
        for t, need in zip((x, z, weight), needs, strict=True)
    ]
    rows = x.shape[:-1].numel()
    if rows == 0 and dweight is not None:
        dweight.zero_()
    flags = (how.activation, how.norm_before_gate, how.between, how.round_norm, how.weight_offset)
    if rows == 0 or fast_path.norm_gated_backward(backend, d, x, z, rstd, weight, *found, *flags):
        return found
    inner, strides, (d, x, z) = execute.kept_in_levels((d,), (x, z), (rstd, weight))
    weight = execute.of_all_heads(weight)
    numbers: Any = (how.activation, how.norm_before_gate, rows, inner, tuple(strides), how.weight_offset)
    operation = how.operation(x, weight)
    backend.backward(NormGatedBackward(d, x, z, packed(rstd), weight, dx, dz, dweight, operation, *numbers))
    return found
