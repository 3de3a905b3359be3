"""Which backend a call takes, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import Around, Before, Flags, Step, operation_of
from fusednorm.calls.checks import (
    check_affine,
    check_between,
    check_flags,
    check_operands,
    check_quantization,
    number,
)
from fusednorm.calls.quantization import Quantization
from fusednorm.engine.choose import Explanation, choose
from fusednorm.operations.declared import PUBLIC
from fusednorm.operations.gate import gate, gate_, gelu_tanh_and_mul, silu_and_mul
from fusednorm.operations.norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.operations.norm_gated import rms_norm_gated, rms_norm_gated_
from fusednorm.operations.quantize import fused_add_rms_norm_quant, quantize, rms_norm_quant
from fusednorm.operations.rotate import qk_norm_rope, qk_norm_rope_, rotate
from fusednorm.operations.two_norms import (
    rms_norm_add,
    rms_norm_add_,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_,
)

_WITH_RESIDUAL = (fused_add_rms_norm, fused_add_rms_norm_, fused_add_rms_norm_quant)
_NORM_GATED = (rms_norm_gated, rms_norm_gated_)
_GATED = (gate, gate_, silu_and_mul, gelu_tanh_and_mul, *_NORM_GATED)
_ROTATING = (rotate, qk_norm_rope, qk_norm_rope_)
_WITHOUT = (rms_norm, rms_norm_, rms_norm_quant, quantize, *_GATED, *_ROTATING)
_FOLLOWED = (rms_norm_add_rms_norm, rms_norm_add_rms_norm_)
_SCALED = (fused_add_rms_norm, fused_add_rms_norm_)
_AFFINE = (rms_norm, rms_norm_, *_SCALED)
_BEFORE = (rms_norm_add, rms_norm_add_, *_FOLLOWED)


def explain(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    function: Callable[..., Any] | None = None,
    next_weight: Tensor | None = None,
    bias: Tensor | None = None,
    x_scale: float = 1.0,
    between: torch.dtype | None = None,
    quantization: Quantization | None = None,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend a call takes, and why not the others.

    Args:
        x: [..., N], as in the call; of ``silu_and_mul`` and ``gelu_tanh_and_mul`` the gate, of ``qk_norm_rope`` q. The
            gate of other functions, the order of a norm and a gate, k and the tables do not matter.
        residual: [..., N], or None for functions without one.
        weight: [N], [H, N] or None, as in the call.
        function: the function of fusednorm that is called; None: ``fused_add_rms_norm``, or ``rms_norm`` without a
            residual.
        next_weight: [N] or None, of ``rms_norm_add_rms_norm``.
        bias: [N], [H, N] or None, as in the call.
        x_scale: as in the call of ``fused_add_rms_norm``: only whether it is 1 matters.
        between: as in the call.
        quantization: as in the call.
        round_sum: as in the call.
        round_norm: as in the call.
        out: as in the call: only its dtype matters.
        out_dtype: as in the call.
        residual_dtype: as in the call.

    Raises:
        TypeError, ValueError, BackendError: the call would raise them, or it has no such arguments.
    """
    if (operation := PUBLIC.get(function)) is not None:
        check_operands(x, None, None, None, None)
        found = choose(operation_of(x, None, None, Flags()))
        return replace(found, plan=f"{found.plan}; {operation.declaration.name} runs by torch's operations")
    if function is None:
        function = rms_norm if residual is None else fused_add_rms_norm
    before = None
    if function in _BEFORE:
        before = Before(weight, 1e-6, between, function in _FOLLOWED)
        weight = next_weight
    elif function not in (*_WITH_RESIDUAL, *_WITHOUT):
        known = ", ".join(sorted(each.__name__ for each in (*_WITH_RESIDUAL, *_WITHOUT, *_BEFORE)))
        raise TypeError(f"function must be one of {known}, got {getattr(function, '__name__', function)!r}")
    if (residual is None) != (function in _WITHOUT):
        taken = "takes no residual" if function in _WITHOUT else "takes a residual"
        raise TypeError(f"{function.__name__} {taken}; pass the residual and the function that go together")
    x_scale = number("x_scale", x_scale)
    for name, given, functions in (("bias", bias is not None, _AFFINE), ("x_scale", x_scale != 1.0, _SCALED)):
        if given and function not in functions:
            raise TypeError(f"{function.__name__} takes no {name}; leave it out, or pass a function that takes it")
    check_affine(x, before.weight if before is not None else weight, bias, in_memory=False)
    of_heads = bias is not None or (weight is not None and weight.dim() == 2)
    around = Around(bias, x_scale) if of_heads or x_scale != 1.0 else None
    check_operands(x, residual, None if of_heads else weight, out, None)
    check_between(between, x)
    flags = check_flags(Flags(1e-6, 0.0, round_sum, round_norm, out_dtype, residual_dtype), x, residual, out, None)
    if quantization is not None:
        check_quantization(quantization, x, None, None, in_memory=False, given=False)
        flags = flags._replace(out_dtype=between)
    found = choose(operation_of(x, residual, weight, flags, out, before, around))
    by_torch = "by torch's operations"
    if quantization is not None:
        by = "in the same call" if found.takes(Step("quantize", quantization)) else by_torch
        found = replace(found, plan=f"{found.plan}; the rows are quantized {by}")
    if function in _GATED:
        by = "by a call of its own" if found.takes(Step("gate")) else by_torch
        if function in _NORM_GATED and found.takes(Step("norm_gated")):
            by = "in the same call"
        found = replace(found, plan=f"{found.plan}; the rows are gated {by}")
    if function in _ROTATING:
        step, plan, by = Step("rotate", None, (x.dtype,)), found.plan, by_torch
        if found.takes(step):
            plan, by = found.module.plan(found.operation._replace(step=step)), "in the same call"
        found = replace(found, plan=f"{plan}; heads are rotated {by}")
    return found
