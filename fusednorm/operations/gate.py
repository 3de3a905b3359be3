"""Gates: rows times a function of other rows (docs/spec.md, section 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.call import Flags, accumulator
from fusednorm.calls.checks import (
    check_activation,
    check_apart,
    check_between,
    check_dense,
    check_flag,
    check_flags,
    check_gate_numbers,
    check_memory,
    check_operands,
    refuse_grad,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import ALONE, AND_MUL, Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.engine import gates
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.gradients import composed_again
from fusednorm.torch_ops.steps import GATE, GATE_FLAGS


def _record(y: Tensor, z: Tensor, activation: str, out: Tensor | None = None, _: None = None) -> Any:
    """The result of :func:`gate` for plain operands that C has read, where gradients are recorded; or None."""
    if out is not None or must_be_seen.transforms_active():
        return None
    flags = {**GATE_FLAGS, "activation": activation, "out_dtype": y.dtype}
    return Gated.apply(flags, False, y, z)  # type: ignore[no-untyped-call]


def _record_and_mul(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    interleaved: bool = False,
    round_steps: bool = False,
) -> Any:
    """The same of :func:`silu_and_mul`."""
    if out is not None or must_be_seen.transforms_active():
        return None
    steps: dict[str, Any] = {}
    if limit is not None or alpha != 1.0 or up_offset != 0.0 or round_steps or clamp != "before":
        steps = _checked_steps(gate, limit, alpha, up_offset, clamp, round_steps)
    flags = {**_flags_of_and_mul(activation, between, gate, steps), "out_dtype": gate.dtype}
    return Gated.apply(flags, interleaved, *((gate,) if up is None else (up, gate)))  # type: ignore[no-untyped-call]


def _checked_steps(
    gate: Tensor, limit: float | None, alpha: float, up_offset: float, clamp: str, round_steps: bool
) -> dict[str, Any]:
    """The optional steps by name, whose numbers are checked and rounded."""
    numbers = check_gate_numbers(limit, alpha, up_offset, clamp, accumulator(gate.dtype))
    return {**numbers, "clamp": clamp, "round_steps": round_steps}


def _flags_of_and_mul(
    activation: str, between: torch.dtype | None, gate: Tensor, steps: Mapping[str, Any]
) -> dict[str, Any]:
    passed = between or gate.dtype
    rounded_to = None if passed == accumulator(gate.dtype) else passed
    return {**GATE_FLAGS, **steps, "activation": activation, "between": rounded_to}


#: As C knows the optional steps.
STEPS = "limit alpha up_offset clamp interleaved round_steps"
_gate = Entry("gate", "x z activation out out_dtype", constants={"order": ALONE}).open(recorded=_record)
gate_and_up_on_fast_path = Entry("gate", f"x z activation between out {STEPS}", constants={"order": AND_MUL}).open(
    recorded=_record_and_mul
)


def gate(
    y: Tensor,
    z: Tensor,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies rows by a function of a gate: ``y * silu(z)``, in float32 (float64 for a float64 ``y``), rounded once.

    docs/spec.md, section 10. Its exponential has the same bits on every backend.

    Args:
        y: [..., N], float16, bfloat16, float32 or float64, any strides.
        z: [..., N], y's shape, any of these dtypes (float64 only if y is float64, here and below).
        activation: "silu" (also called swish), "sigmoid", "gelu_tanh", "gelu" (z * Phi(z)) or "relu2" (the square
            of a positive z, else 0).
        out: [..., N] to write to, in its own dtype. May be y or z itself.
        out_dtype: the dtype of the result; y's if None. With gradients, unlike ``out``.

    Returns:
        The products, in y's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit; there is no such activation.
        RuntimeError: ``out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _gate(y, z, activation, out, out_dtype)
        if result is not None:
            return result
    flags = {**GATE_FLAGS, "activation": activation, "out_dtype": out_dtype}
    return _run(gate, {"y": y, "z": z}, y, z, flags, out)


def gate_(y: Tensor, z: Tensor, *, activation: str = "silu") -> Tensor:
    """:func:`gate` in place, with its arguments: the products land in ``y``.

    Returns:
        ``y``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`gate`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _gate(y, z, activation, y)
        if result is not None:
            return result
    return _run(gate_, {"y": y, "z": z}, y, z, {**GATE_FLAGS, "activation": activation}, y)


def silu_and_mul(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    interleaved: bool = False,
    round_steps: bool = False,
) -> Tensor:
    """``silu(gate) * up``, as the MLP of Llama and its descendants has it: docs/spec.md, section 10.

    With ``limit=7.0, alpha=1.702, up_offset=1.0, interleaved=True`` it is the gate of gpt-oss (``round_steps=True`` as
    Hugging Face rounds it), with a limit alone that of DeepSeek-V4, and with ``clamp="after"`` too that of Step 3.7.

    Args:
        gate: [..., N], float16, bfloat16, float32 or float64, any strides. Without ``up`` [..., 2 * N]: the first half
            is the gate, the second half is ``up``.
        up: [..., N], any of these dtypes (float64 only if gate is float64, here and below).
        between: the dtype to which ``silu(gate)`` is rounded before the multiplication: gate's if None, as Hugging
            Face and vLLM do, or ``torch.float32``, which leaves it unrounded, as SGLang does.
        out: [..., N] to write to, in its own dtype. May be gate or up itself, or a half of the gate.
        limit: up is limited to [-limit, limit], and the gate to at most ``limit``; a NaN stays. Greater than 0, rounded
            to the dtype of what is limited. None, as infinity, is no limit.
        alpha: the function is ``gate * sigmoid(alpha * gate)``. At least 1, and finite.
        up_offset: is added to up after the limit.
        clamp: "before": the gate is limited; "after": ``silu(gate)``, rounded to ``between``, is.
        interleaved: without ``up``, the even elements are the gate and the odd ones ``up``, in place of the halves.
        round_steps: each product, sum and sigmoid is rounded to gate's dtype, as a model in plain torch operations has
            it; silu is one operation where ``alpha`` is 1. Not with ``between``.

    Returns:
        [..., N] of gate's dtype; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices, memory or numbers do not fit, or without ``up`` the last dimension is odd;
            ``interleaved`` is given with ``up``, or ``round_steps`` with ``between``.
        RuntimeError: ``out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(
            gate, up, "silu", between, out, limit, alpha, up_offset, clamp, interleaved, round_steps
        )
        if result is not None:
            return result
    steps = {"limit": limit, "alpha": alpha, "up_offset": up_offset, "clamp": clamp}
    flags = {"interleaved": interleaved, "round_steps": round_steps}
    return _and_mul(silu_and_mul, "silu", gate, up, between, out, steps | flags)


def gelu_tanh_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``, as Gemma's MLP has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "gelu_tanh", between, out)
        if result is not None:
            return result
    return _and_mul(gelu_tanh_and_mul, "gelu_tanh", gate, up, between, out)


def gelu_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``gelu(gate) * up``, GELU as z * Phi(z), as ModernBERT's MLP has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "gelu", between, out)
        if result is not None:
            return result
    return _and_mul(gelu_and_mul, "gelu", gate, up, between, out)


def sigmoid_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``sigmoid(gate) * up``, as the gate of attention in Qwen3.5 has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "sigmoid", between, out)
        if result is not None:
            return result
    return _and_mul(sigmoid_and_mul, "sigmoid", gate, up, between, out)


def _and_mul(
    function: Callable[..., Any],
    activation: str,
    gate: Tensor,
    up: Tensor | None,
    between: torch.dtype | None,
    out: Tensor | None,
    steps: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """The public function, whose gate has this activation and these optional steps, and which the fast path refused."""
    if not is_dynamo_compiling() and must_be_seen.override(gate, up, out):
        values = {"gate": gate, "up": up, "between": between, "out": out, **steps}
        return cast(Tensor, must_be_seen.handed_over(function, (gate, up, out), values))
    operands = checked_operands(gate, up, between, **steps)
    flags = _flags_of_and_mul(activation, between, gate, operands.steps)
    return _run(function, operands.names, operands.y, operands.z, flags, out, operands.both, operands.interleaved)


def silu_and_mul_checked(operands: Operands, between: torch.dtype | None, in_memory: bool) -> Tensor:
    """The products of :func:`silu_and_mul`, of operands that have been checked; in float32 if ``between`` is that."""
    y, z = operands.y, operands.z
    flags = {**_flags_of_and_mul("silu", between, z, operands.steps), "out_dtype": between or z.dtype}
    if not in_memory:
        return _run(gate, {"y": y, "z": z}, y, z, flags, None)
    found = gates.on_fast_path(y, z, **flags)
    return gates.forward(y, z, flags) if found is None else found


class Operands(NamedTuple):
    """The operands and the optional steps of :func:`silu_and_mul`."""

    y: Tensor
    z: Tensor
    #: As the caller calls them; the first one decides dtypes.
    names: dict[str, Tensor]
    #: The tensor that has both; or None.
    both: Tensor | None
    interleaved: bool
    #: By the names of :class:`fusednorm.calls.call.GateSteps`.
    steps: dict[str, Any]


def checked_operands(
    gate: Tensor,
    up: Tensor | None,
    between: torch.dtype | None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    interleaved: bool = False,
    round_steps: bool = False,
) -> Operands:
    """The operands of :func:`silu_and_mul`, and its flags, which are checked."""
    if not isinstance(gate, Tensor):
        refuse_type("gate", gate)
    check_between(between, gate, "gate")
    steps = _checked_steps(gate, limit, alpha, up_offset, clamp, round_steps)
    check_flag("interleaved", interleaved)
    check_flag("round_steps", round_steps)
    if round_steps and between is not None:
        raise ValueError("round_steps=True rounds to gate's dtype, and between is given; leave out one of them")
    if up is not None:
        if interleaved:
            raise ValueError("interleaved=True goes with one tensor that has gate and up; leave it out, or up")
        return Operands(up, gate, {"gate": gate, "up": up}, None, False, steps)
    z, y = halves(gate, interleaved)
    half = "N" if is_dynamo_compiling() else y.shape[-1]  # a compiler would take the number in a name for a constant
    names = ("gate[..., ::2]", "gate[..., 1::2]") if interleaved else (f"gate[..., :{half}]", f"gate[..., {half}:]")
    return Operands(y, z, dict(zip(names, (z, y), strict=True)), gate, interleaved, steps)


def halves(gate: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The gate, and the rows that it multiplies, in one tensor of [..., 2 * N].

    Raises:
        TypeError, ValueError: it is no such tensor.
    """
    if not isinstance(gate, Tensor):
        refuse_type("gate", gate)
    check_dense("gate", gate)
    if must_be_seen.in_memory(gate):
        check_memory("gate", gate)  # torch would refuse the halves in words of its own
    if gate.dim() == 0 or gate.shape[-1] == 0 or gate.shape[-1] % 2:
        raise ValueError(
            f"gate must be [..., 2 * N] where up is not given, got shape {list(gate.shape)}; pass gate and up, both of "
            "[..., N]"
        )
    if interleaved:
        return gate[..., ::2], gate[..., 1::2]
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


@exact
def _run(
    function: Callable[..., Tensor],
    operands: dict[str, Tensor],
    y: Tensor,
    z: Tensor,
    flags: Mapping[str, Any],
    out: Tensor | None,
    both: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """The results of the public function.

    ``operands``: y and z as the caller calls them; the first one decides dtypes. ``both``: the tensor whose halves, or
    even and odd elements, are z and y.
    """
    listener = must_be_seen.listener(y, z, out)
    if listener is Listener.OVERRIDE:
        return must_be_seen.handed_over(function, (y, z, out), {**operands, **flags, "out": out})
    (first_name, first), (second_name, second) = operands.items()
    if second is None:
        refuse_type(second_name, second)
    if not (
        is_dynamo_compiling() or listener is Listener.TRANSFORM
    ):  # the batches of a transform have no memory, and lack a dimension
        names = {"x_name": first_name, "residual_name": second_name}
        check_operands(first, second, None, out, None, in_memory=listener is None, **names)
    check_activation(flags["activation"])
    check_flags(Flags(out_dtype=flags["out_dtype"]), first, None, out, None, x_name=first_name)
    records = is_grad_enabled() and requires_grad(y, z, out)
    if out is not None and records:
        refuse_grad(function.__name__)
    if out is not None or flags["out_dtype"] is None:
        flags = {**flags, "out_dtype": first.dtype if out is None else out.dtype}
    if listener is not None:
        return dtensor_bridge.written(out, GATE.with_gradients(y=y, z=z, **flags))
    if out is not None:
        check_apart({first_name if function is gate_ else "out": out}, operands)
    if records:
        given = (y, z) if both is None else (both,)
        return cast(Tensor, Gated.apply(flags, interleaved, *given))  # type: ignore[no-untyped-call]
    return gates.forward(y, z, flags, out)


class Gated(torch.autograd.Function):
    """(flags, False, y, z), or (flags, interleaved, [..., 2 * N] of z and y), -> y times a function of z.

    For calls that nothing but autograd must see: the gradient of a tensor that holds both is written where it belongs.
    """

    @staticmethod
    @exact
    def forward(ctx: Any, flags: Mapping[str, Any], interleaved: bool, *operands: Tensor) -> Tensor:
        """Keeps the operands, and the backend that the backward pass takes: the one in force now."""
        y, z = gates.rows_and_gate(operands, interleaved)
        ctx.save_for_backward(*operands)
        ctx.flags, ctx.interleaved = flags, interleaved
        ctx.backend = gates.backend_for(y, "gate_backward", flags, interleaved)
        found = gates.on_fast_path(y, z, **flags)
        return gates.forward(y, z, flags) if found is None else found

    @staticmethod
    @exact
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """See :func:`fusednorm.reference.activations.gate_gradients`."""
        operands, flags, interleaved = ctx.saved_tensors, ctx.flags, ctx.interleaved
        needs = ctx.needs_input_grad[2:]
        if not (must_be_seen.differentiated_again() or must_be_seen.below(d, *operands)):
            return None, None, *gates.backward(ctx.backend, d, operands, flags, needs, interleaved)
        dtensor_bridge.check_kept((d,), operands)

        def again(*operands: Tensor) -> tuple[Tensor]:
            y, z = gates.rows_and_gate(operands, interleaved)
            return (GATE.record({"y": y, "z": z}, flags),)

        return None, None, *composed_again(again, operands, (d,), needs)
