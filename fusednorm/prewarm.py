"""Compiling ahead of the first call."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fusednorm.devices import present
from fusednorm.norm_before_add import rms_norm_add, rms_norm_add_rms_norm
from fusednorm.ops import fused_add_rms_norm, rms_norm
from fusednorm.quantizations import Quantization
from fusednorm.quantized import fused_add_rms_norm_quant, quantize, rms_norm_quant
from fusednorm.registry import waiting_for_kernels


def prewarm(
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    weight: bool = True,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    training: bool = False,
    norm_before_add: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Compiles and loads the kernels of a kind of call, so that no later call waits for a compiler.

    Runs the functions on one row of zeros: on an aligned row (to 16 bytes), for which backends have faster kernels,
    and on one that is not aligned. Other numbers of rows, ``eps`` or strides need no other kernels.

    Args:
        hidden_size: N, the elements of a row.
        dtype: of x.
        device: of the tensors; ``"cuda"`` is the current GPU.
        residual_dtype: x's if None.
        weight_dtype: x's if None.
        weight: whether calls have a weight.
        weight_offset: as in the calls; only whether it is 0 matters.
        round_sum: as in the calls.
        round_norm: as in the calls.
        training: also prepare calls whose gradients are needed, and their backward pass.
        norm_before_add: also prepare ``rms_norm_add`` and ``rms_norm_add_rms_norm``.
        quantization: also prepare ``rms_norm_quant``, ``fused_add_rms_norm_quant`` and ``quantize`` with it, without
            ``between`` and ``normed_out``.

    Raises:
        BackendError: no requested backend can take such calls.
        TypeError, ValueError: an argument has another type, or this machine lacks the device; see also
            :func:`fusednorm.fused_add_rms_norm`.
    """
    if not isinstance(hidden_size, int) or hidden_size < 1:
        raise ValueError(f"hidden_size must be an int of at least 1, got {hidden_size!r}")
    for name, kind in (("dtype", dtype), ("residual_dtype", residual_dtype), ("weight_dtype", weight_dtype)):
        if not isinstance(kind, torch.dtype) and (kind is not None or name == "dtype"):
            raise TypeError(f"{name} must be a torch.dtype such as torch.bfloat16, got {kind!r}")
    device = present(device)
    given: dict[str, Any] = {}
    if quantization is not None and quantization.per == "tensor":
        given["scale"] = torch.ones(1, device=device)
        if quantization.computes_zero_point:
            given["zero_point"] = torch.zeros(1, dtype=torch.int32, device=device)
    with waiting_for_kernels():
        for offset, gradients in itertools.product((0, 1), (False, True) if training else (False,)):
            leaves = [
                torch.zeros(hidden_size + offset, dtype=kind or dtype, device=device)[offset:].requires_grad_(gradients)
                for kind in (dtype, residual_dtype, weight_dtype)
            ]
            x, residual, row = leaves[0].unsqueeze(0), leaves[1].unsqueeze(0), leaves[2] if weight else None
            with torch.set_grad_enabled(gradients):
                y = rms_norm(x, row, weight_offset=weight_offset, round_norm=round_norm)
                outputs: tuple[torch.Tensor, ...] = fused_add_rms_norm(
                    x, residual, row, weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm
                )
                if norm_before_add:
                    flags: dict[str, Any] = {"weight_offset": weight_offset, "round_norm": round_norm}
                    total = rms_norm_add(x, residual, row, **flags)
                    both = rms_norm_add_rms_norm(x, residual, row, row, round_sum=round_sum, **flags)
                    outputs = (*outputs, total, *both)
            if gradients:
                of_outputs = [torch.zeros_like(t) for t in (y, *outputs)]
                torch.autograd.grad((y, *outputs), leaves if weight else leaves[:2], of_outputs)
            elif quantization is not None:
                how: dict[str, Any] = {"quantization": quantization, **given, "weight_offset": weight_offset}
                how["round_norm"] = round_norm
                rms_norm_quant(x, row, **how)
                fused_add_rms_norm_quant(x, residual, row, **how, round_sum=round_sum)
                quantize(x, quantization, **given)
