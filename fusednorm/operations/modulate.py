"""Modulation of normalised rows, as diffusion transformers have it (docs/spec.md, section 12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.fast_path import Entry
from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.operations.front_door import Operation
from fusednorm.reference import modulation

#: As C takes a call without an output, of the operator too.
_TAKEN = "y scale shift round_steps out_dtype"


class _Modulate(Operation):
    def fitted(self, operands: Sequence[Any]) -> Sequence[Any]:
        """See :class:`Operation`; of scale and shift also with dimensions of one element."""
        y, scale, shift = operands
        if not (isinstance(y, Tensor) and isinstance(scale, Tensor) and isinstance(shift, Tensor)):
            return operands
        if y.is_nested or scale.is_nested or shift.is_nested or y.shape == scale.shape == shift.shape:
            return operands  # the checks refuse nested ones, which have no shape
        return y, _of_samples(scale, y), _of_samples(shift, y)


_MODULATE = _Modulate(
    Declaration(
        "modulate",
        operands=(Operand("y"), Operand("scale", Role.SAMPLES), Operand("shift", Role.SAMPLES)),
        results=(Result(dtype="out_dtype", overwrites="y"),),
        flags={"round_steps": False, "out_dtype": None},
        formula=modulation.modulated,
        gradient=modulation.modulated_gradients,
        samples=({}, {"round_steps": True}),
        refused=(({"round_steps": 1}, TypeError, "round_steps must be True or False"),),
    ),
    fast=Entry("modulate", _TAKEN).open(),
    fast_gradient=Entry("modulate_backward", "d y scale shift round_steps needs").open(),
)
_on_fast_path = _MODULATE.open(Entry("modulate", f"{_TAKEN} out"))


@_MODULATE.public
def modulate(
    y: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    round_steps: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y * (1 + scale) + shift`` in float32 (float64 for a float64 ``y``), as DiT, SD3 and Flux modulate rows.

    Args:
        y: [..., N], float16, bfloat16, float32 or float64, any strides: what :func:`fusednorm.layer_norm` or
            :func:`fusednorm.rms_norm` returned.
        scale: y's shape, or without dimensions of y before the last one: for y of [B, S, N], [B, N] or [B, 1, N] for
            all rows of a sample. Any of these dtypes, float64 only if y is float64.
        shift: as ``scale``; its shape may be another one.
        round_steps: rounds ``1 + scale`` and the product to y's dtype too, as separate operations on 16 bits do.
        out: [..., N] to write to, of the result's dtype. May be y itself.
        out_dtype: the dtype of the result; y's if None. With gradients, unlike ``out``.

    Returns:
        The modulated rows, in y's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit.
    """
    if not is_dynamo_compiling():
        found: Tensor | None = _on_fast_path(y, scale, shift, round_steps, out_dtype, out)
        if found is not None:
            return found
    return _MODULATE("modulate", y=y, scale=scale, shift=shift, round_steps=round_steps, out=out, out_dtype=out_dtype)


def _of_samples(t: Tensor, y: Tensor) -> Tensor:
    """[B, 1, N] as [B, N]; what does not fit y as it is, for the error."""
    if t.dim() != y.dim() or t.shape == y.shape:
        return t
    kept = t.dim() - 1
    while kept and t.shape[kept - 1] == 1:
        kept -= 1
    shape = (*y.shape[:kept], y.shape[-1])
    return t.reshape(shape) if (*t.shape[:kept], t.shape[-1]) == shape else t
