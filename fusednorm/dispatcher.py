"""Calls that go through torch's dispatcher, because a mode, a tracer or a tensor must see them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fusednorm.call import Flags


def operations(*operands: Tensor | None) -> Any:
    """``torch.ops.fusednorm``. If an operand is a DTensor, torch knows by then how to shard the operations."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and any(isinstance(operand, tensor.DTensor) for operand in operands):
        import fusednorm.distributed  # noqa: F401 - registers the rules
    return torch.ops.fusednorm


def new_outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, flags: Flags
) -> tuple[Tensor, Tensor | None, Tensor]:
    """New outputs and rstd."""
    if residual is None:
        y, rstd = operations(x, weight).rms_norm(x, weight, *flags[:5])
        return y, None, rstd
    return operations(x, residual, weight).fused_add_rms_norm(x, residual, weight, *flags)  # type: ignore[no-any-return]


def write(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
    flags: Flags,
) -> None:
    """The outputs of the public function of that name, into memory that is given."""
    ops = operations(x, residual, weight, out, residual_out)
    if name == "rms_norm_":
        ops.rms_norm_(x, weight, *flags[:4])
    elif name == "fused_add_rms_norm_":
        ops.fused_add_rms_norm_(x, residual, weight, *flags[:4])
    else:
        ops.into(x, residual, weight, out, residual_out, *flags[:4])
