"""Calls of "norm_gated": a norm and a gate, one after the other; what passes between them has no memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from fusednorm.calls.call import Call, Flags, Forward, RMSNorm, accumulator, operation_of
from fusednorm.calls.memory import ABSENT


def operation_of_norm(x: Tensor, weight: Tensor | None, flags: Mapping[str, Any]) -> RMSNorm:
    """The norm, which decides the backend.

    Where it comes first, its ``out`` is the dtype that passes; else its ``x`` is, and ``round_norm`` rounds to the
    dtype of ``out``.
    """
    asked = Flags(round_norm=flags["round_norm"], out_dtype=flags["between"] or x.dtype)
    found = operation_of(x, None, weight, asked)
    return found if flags["norm_before_gate"] else found._replace(x=accumulator(x.dtype))


def norm_of(call: Call) -> Forward:
    """The norm of a forward pass. Its ``x`` and ``out`` are those of both steps together."""
    tensors, flags = call.tensors, call.flags
    return Forward(
        x=call.x,
        residual=None,
        weight=tensors["weight"],
        out=cast(Tensor, tensors["out"]),
        residual_out=None,
        rstd=tensors["rstd"],
        operation=operation_of_norm(call.x, tensors["weight"], flags),
        rows=call.rows,
        inner=call.inner,
        strides=(call.strides["x"], ABSENT, call.strides["out"], ABSENT),
        eps=flags["eps"],
        weight_offset=flags["weight_offset"],
    )
