"""Compiling ahead of the first call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from fusednorm.calls.checks import check_is_quantization
from fusednorm.calls.devices import present
from fusednorm.calls.process import waiting_for_kernels
from fusednorm.calls.quantization import Quantization, is_given
from fusednorm.declare.declaration import Role
from fusednorm.operations.gate import gate, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from fusednorm.operations.listed import of_function
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated
from fusednorm.operations.quantize import fused_add_rms_norm_quant, quantize, rms_norm_quant
from fusednorm.operations.rotate import qk_norm_rope
from fusednorm.operations.two_norms import rms_norm_add, rms_norm_add_rms_norm


def prewarm(
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    weight: bool = True,
    bias: bool = False,
    heads: int = 1,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    training: bool = False,
    norm_before_add: bool = False,
    quantization: Quantization | None = None,
    activation: str | None = None,
    pairs: int = 0,
    table_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    function: Callable[..., Any] | None = None,
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
        bias: whether calls have a bias, of the weight's dtype.
        heads: H, the rows of the weight and the bias; only whether it is 1 matters.
        x_scale: as in calls of ``fused_add_rms_norm``; only whether it is 1 matters.
        weight_offset: as in the calls; only whether it is 0 matters.
        round_sum: as in the calls.
        round_norm: as in the calls.
        training: also prepare calls whose gradients are needed, and their backward pass.
        norm_before_add: also prepare ``rms_norm_add`` and ``rms_norm_add_rms_norm``.
        quantization: also prepare ``rms_norm_quant``, ``fused_add_rms_norm_quant`` and ``quantize`` with it, without
            ``between`` and ``normed_out``.
        activation: also prepare :func:`fusednorm.gate` with it, ``silu_and_mul``, ``gelu_tanh_and_mul`` or
            ``gelu_and_mul`` (of two tensors, and of one that holds both), and ``rms_norm_gated`` with the norm first,
            all without ``between``.
        pairs: also prepare :func:`fusednorm.qk_norm_rope` for heads of ``hidden_size`` elements, of which so many pairs
            are rotated, with tables per row and by int64 positions, without ``between``.
        table_dtype: of the tables; x's if None.
        interleaved: as in calls of ``qk_norm_rope``.
        round_products: as in calls of ``qk_norm_rope``.
        function: also prepare this function, as of a declared operation, with its default flags.

    Raises:
        BackendError: no requested backend can take such calls.
        TypeError, ValueError: an argument has another type, or this machine lacks the device; see also
            :func:`fusednorm.fused_add_rms_norm`.
    """
    if not isinstance(hidden_size, int) or hidden_size < 1:
        raise ValueError(f"hidden_size must be an int of at least 1, got {hidden_size!r}")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"heads must be an int of at least 1, got {heads!r}")
    if not isinstance(pairs, int) or not 0 <= 2 * pairs <= hidden_size:
        raise ValueError(f"pairs must be an int of 0 to {hidden_size // 2}, half of hidden_size, got {pairs!r}")
    named = {"dtype": dtype, "residual_dtype": residual_dtype, "weight_dtype": weight_dtype, "table_dtype": table_dtype}
    for name, kind in named.items():
        if not isinstance(kind, torch.dtype) and (kind is not None or name == "dtype"):
            raise TypeError(f"{name} must be a torch.dtype such as torch.bfloat16, got {kind!r}")
    device = present(device)
    given: dict[str, Any] = {}
    if quantization is not None:
        check_is_quantization(quantization)
        if is_given(quantization):
            given["scale"] = torch.ones(1, device=device)
            if quantization.computes_zero_point:
                given["zero_point"] = torch.zeros(1, dtype=torch.int32, device=device)
    listed = None if function is None else of_function(function)
    needed = {} if listed is None else listed.needed
    if quantization is not None and "quantization" in needed:
        needed = {"quantization": quantization, **given}
    # Kernels are the same for all numbers of several heads.
    shape = (hidden_size,) if heads == 1 else (2, hidden_size)
    kinds = [dtype, residual_dtype, *[weight_dtype] * weight, *[weight_dtype] * bias]
    flags: dict[str, Any] = {"weight_offset": weight_offset, "round_norm": round_norm}
    with waiting_for_kernels():
        for offset, gradients in itertools.product((0, 1), (False, True) if training else (False,)):
            leaves = [_zeros(shape, kind or dtype, device, offset).requires_grad_(gradients) for kind in kinds]
            x, residual, row = leaves[0].unsqueeze(0), leaves[1].unsqueeze(0), leaves[2] if weight else None
            one = None if row is None else row.view(-1, hidden_size)[0]
            affine: dict[str, Any] = {**flags, "bias": leaves[-1] if bias else None}
            with torch.set_grad_enabled(gradients):
                y = rms_norm(x, row, **affine)
                outputs: tuple[torch.Tensor, ...] = fused_add_rms_norm(
                    x, residual, row, round_sum=round_sum, x_scale=x_scale, **affine
                )
                if norm_before_add:
                    total = rms_norm_add(x, residual, one, **flags)
                    both = rms_norm_add_rms_norm(x, residual, one, one, round_sum=round_sum, **flags)
                    outputs = (*outputs, total, *both)
                if activation is not None:
                    # Two rows of a tensor that holds both: of one, the halves lie as if they were alone.
                    leaves.append(_zeros((2, 2 * hidden_size), dtype, device, offset).requires_grad_(gradients))
                    outputs = (*outputs, *_gated(x, leaves[-1], one, activation, flags))
                if pairs:
                    q, table = x.unsqueeze(0), _zeros((1, pairs), table_dtype or dtype, device, offset)
                    how: dict[str, Any] = {**flags, "interleaved": interleaved, "round_products": round_products}
                    for positions in (None, torch.zeros(1, dtype=torch.int64, device=device)):
                        turned = qk_norm_rope(q, q, one, one, table, table, positions=positions, **how)
                        outputs = (*outputs, *turned)
                if listed is not None and (listed.differentiable or not gradients):
                    given_by_row = [name for name, role in listed.operands.items() if role is Role.SETTINGS]
                    tensors = listed.tensors(x, residual, one) | dict.fromkeys(given_by_row)  # their default is None
                    found = listed.function(**tensors, **needed)
                    outputs = (*outputs, *((found,) if isinstance(found, torch.Tensor) else found))
            if gradients:
                torch.autograd.grad((y, *outputs), leaves, [torch.zeros_like(t) for t in (y, *outputs)])
            elif quantization is not None:
                rms_norm_quant(x, one, quantization=quantization, **given, **flags)
                fused_add_rms_norm_quant(
                    x, residual, one, quantization=quantization, **given, **flags, round_sum=round_sum
                )
                quantize(x, quantization, **given)


def _gated(
    x: torch.Tensor, both: torch.Tensor, weight: torch.Tensor | None, activation: str, flags: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The results of calls with a gate, which is x itself, or is in one tensor with the rows."""
    half = both.shape[-1] // 2
    found = [gate(x, x, activation=activation), gate(both[:, half:], both[:, :half], activation=activation)]
    found.append(rms_norm_gated(x, x, weight, activation=activation, **flags))
    together = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "gelu": gelu_and_mul}.get(activation)
    if together is not None:
        found += [together(x, x), together(both)]
    return tuple(found)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int) -> torch.Tensor:
    """Rows that begin so many elements after an address that is aligned."""
    return torch.zeros(math.prod(shape) + offset, dtype=dtype, device=device)[offset:].view(shape)
