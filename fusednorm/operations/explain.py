"""Which backend a call takes, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.call import (
    ACTIVATIONS,
    Before,
    Flags,
    KindOfCall,
    RMSNorm,
    Step,
    accumulator,
    operation_of,
    step_of_gate,
)
from fusednorm.calls.checks import (
    check_affine,
    check_between,
    check_flags,
    check_operands,
    check_quantization,
    refuse_type,
)
from fusednorm.calls.quantization import Quantization, is_given
from fusednorm.calls.scalars import number
from fusednorm.engine.choose import Explanation, choose
from fusednorm.operations.front_door import PUBLIC
from fusednorm.operations.l2 import l2_norm
from fusednorm.operations.listed import of_function
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm


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
    scale: Tensor | None = None,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend a call takes, and why not the others.

    The arguments are those of a call of ``function``; None is ``fused_add_rms_norm``, or ``rms_norm`` without a
    residual. ``x`` is the gate of ``silu_and_mul`` and its like, and q of ``qk_norm_rope``. The gate of other
    functions, the order of a norm and a gate, k and the tables do not matter. Of some arguments little matters: whether
    ``x_scale`` is 1, whether ``scale`` has one element, and the dtype of ``out``.

    Raises:
        TypeError, ValueError, BackendError: the call would raise them, or it has no such arguments.
    """
    operands = {"residual": residual, "weight": weight, "next_weight": next_weight, "bias": bias, "scale": scale}
    for name, operand in {"x": x, **{name: t for name, t in operands.items() if t is not None}}.items():
        if not isinstance(operand, Tensor):
            named = getattr(operand, "__name__", None)
            refuse_type(name, operand, named and f"pass a function by name: explain(x, function={named})")
    if function is None:
        function = rms_norm if residual is None else fused_add_rms_norm
    listed = of_function(function)
    if not listed.steps:
        first = PUBLIC[function].declaration.operands[0]
        if first.dtype is None:
            check_operands(x, None, None, None, None)
        elif x.dtype is not first.dtype:
            cure = f"pass {first.name} of {function.__name__} as x"
            raise TypeError(f"{first.name} must be {str(first.dtype)[6:]}, got {str(x.dtype)[6:]}; {cure}")
        return _of_kind(x, Step(listed.name), f"{listed.name} runs by")
    if (residual is None) == ("residual" in listed.operands):
        taken = "takes no residual" if residual is not None else "takes a residual"
        raise TypeError(f"{function.__name__} {taken}; pass the residual and the function that go together")
    before = None
    if listed.steps.startswith("norm, add"):
        before = Before(weight, 1e-6, between, "next_weight" in listed.operands)
        weight = next_weight
    x_scale = number("x_scale", x_scale, accumulator(x.dtype))
    for name, given in (("bias", bias is not None), ("x_scale", x_scale != 1.0)):
        if given and name not in listed.parameters:
            raise TypeError(f"{function.__name__} takes no {name}; leave it out, or pass a function that takes it")
    check_affine(x, before.weight if before is not None else weight, bias, in_memory=False)
    of_heads = bias is not None or (weight is not None and weight.dim() == 2)
    check_operands(x, residual, None if of_heads else weight, out, None)
    check_between(between, x)
    flags = check_flags(Flags(1e-6, 0.0, round_sum, round_norm, out_dtype, residual_dtype), x, residual, out, None)
    if scale is not None and (quantization is None or not is_given(quantization)):
        raise TypeError("scale is given, and the call takes none; leave it out, or pass its quantization per='tensor'")
    if quantization is not None:
        check_quantization(quantization, x)
        flags = flags._replace(out_dtype=between)
    if listed.steps == "gate":
        done = f"{listed.name} is computed" if len(listed.operands) == 1 else "the rows are gated"
        return _of_kind(x, step_of_gate("gate", _activation_of(listed.name)), f"{done} by")
    if listed.steps == "log_prob":
        return _of_kind(x, Step("log_prob"), "log-probabilities are computed by")
    if function is l2_norm:  # its weight is made in the call
        weight = x.new_empty(x.shape[-1:], dtype=accumulator(x.dtype))
    found = choose(operation_of(x, residual, weight, flags, out, before, bias, x_scale))
    by_torch, own = "by torch's operations", "by a call of its own"
    if found.backend != "reference" and listed.differentiable:
        found = replace(found, by_torch=_steps_of_gradients(found, listed.steps, weight, bias))
    if quantization is not None:
        by = own if listed.steps == "gate, quantize" else "in the same call"
        one_scale = scale is None or scale.numel() == 1
        by = by if one_scale and found.takes(Step("quantize", quantization)) else by_torch
        if by is not by_torch and quantization.scale_dtype is not None:
            by = f"{by}, their scales are converted to {str(quantization.scale_dtype)[6:]} {by_torch}"
        found = replace(found, plan=f"{found.plan}; the rows are quantized {by}")
    if "gate" in listed.steps:
        by = own if found.takes(step_of_gate("gate", _activation_of(listed.name))) else by_torch
        if listed.steps == "norm, gate" and found.takes(step_of_gate("norm_gated", "silu")):
            by = "in the same call"
        found = replace(found, plan=f"{found.plan}; the rows are gated {by}")
    if "rotate" in listed.steps:
        step, plan, by = Step("rotate", None, (x.dtype,)), found.plan, by_torch
        if found.takes(step):
            plan, by = found.module.plan(found.operation._replace(step=step)), "in the same call"
        found = replace(found, plan=f"{plan}; heads are rotated {by}")
    return found


def _of_kind(x: Tensor, step: Step, done_by: str) -> Explanation:
    """The backend of a declared operation of such rows."""
    found = choose(KindOfCall(x.device, x.dtype, x.shape[-1], step))
    by = "torch's operations" if found.by_formula else "a call of its own"
    return replace(found, plan=f"{found.plan}; {done_by} {by}")


def _activation_of(name: str) -> str:
    """The function of the gate that a public function of this name has; "silu" where its caller names one."""
    own = name.removesuffix("_quant").removesuffix("_and_mul")
    return own if own in (*ACTIVATIONS, "softcap") else "silu"


def _steps_of_gradients(found: Explanation, steps: str, weight: Tensor | None, bias: Tensor | None) -> tuple[str, ...]:
    """The steps that torch's operations compute where gradients are recorded: docs/faults.md has the table."""
    operation = cast(RMSNorm, found.operation)
    of_one_shape = weight is None or bias is None or weight.shape == bias.shape
    sums = "affine" in operation.features and not (of_one_shape and found.takes(Step("affine_backward")))
    words = {
        "scale x": "x_scale" in operation.features,
        "add the residual": steps == "norm, add",
        "round the sum to residual_dtype": operation.residual_out != operation.residual,
        "negate sin": "rotate" in steps,
        "add up the gradients of the weight and the bias": sums,
    }
    return tuple(step for step, is_made in words.items() if is_made)
