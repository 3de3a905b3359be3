"""Gates: rows times a function of other rows (docs/spec.md, section 10)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, accumulator
from fusednorm.calls.checks import (
    check_activation,
    check_apart,
    check_between,
    check_flags,
    check_memory,
    check_operands,
    refuse_grad,
    refuse_nested,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import ALONE, AND_MUL, BETWEEN_IS_F32, NO_NORM
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.engine import run, run_gated
from fusednorm.engine.choose import fast_paths, request
from fusednorm.engine.run_gated import Gating
from fusednorm.reference import activations
from fusednorm.reference.norm import rounded
from fusednorm.torch_ops import dtensor_bridge


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
        activation: "silu" (also called swish), "sigmoid" or "gelu_tanh".
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
        take = fast_paths.get(request())
        if take is not None and out_dtype is None:
            result: Any = take(y, *NO_NORM, z, activation, ALONE, None, out)
            if result is not None:
                return cast(Tensor, result)
        if must_be_seen.override(y, z, out):
            return must_be_seen.handed_over(gate, (y, z, out), locals())
    return _run("gate", {"y": y, "z": z}, y, z, activation, None, out, out_dtype)


def gate_(y: Tensor, z: Tensor, *, activation: str = "silu") -> Tensor:
    """:func:`gate` in place: the products land in ``y``.

    Args:
        y: [..., N], any strides.
        z: see :func:`gate`.
        activation: see :func:`gate`.

    Returns:
        ``y``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`gate`.
    """
    if not is_dynamo_compiling():
        take = fast_paths.get(request())
        if take is not None:
            result: Any = take(y, *NO_NORM, z, activation, ALONE, None, y)
            if result is not None:
                return cast(Tensor, result)
        if must_be_seen.override(y, z):
            return must_be_seen.handed_over(gate_, (y, z), locals())
    return _run("gate_", {"y": y, "z": z}, y, z, activation, None, y, None)


def silu_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``silu(gate) * up``, as the MLP of Llama and its descendants has it: docs/spec.md, section 10.

    Args:
        gate: [..., N], float16, bfloat16, float32 or float64, any strides. Without ``up`` [..., 2 * N]: the first half
            is the gate, the second half is ``up``.
        up: [..., N], any of these dtypes (float64 only if gate is float64, here and below).
        between: the dtype to which ``silu(gate)`` is rounded before the multiplication: gate's if None, as Hugging
            Face and vLLM do, or ``torch.float32``, which leaves it unrounded, as SGLang does.
        out: [..., N] to write to, in its own dtype. May be gate or up itself, or a half of the gate.

    Returns:
        [..., N] of gate's dtype; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices or memory do not fit, or without ``up`` the last dimension is odd.
        RuntimeError: ``out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if (result := _and_mul_on_fast_path(gate, up, "silu", between, out)) is not None:
        return result
    if not is_dynamo_compiling() and must_be_seen.override(gate, up, out):
        operands = (gate, up, out)
        return must_be_seen.handed_over(silu_and_mul, operands, locals())
    return _and_mul("silu_and_mul", gate, up, "silu", between, out)


def gelu_tanh_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``, as Gemma's MLP has it; otherwise as :func:`silu_and_mul`.

    Args:
        gate: see :func:`silu_and_mul`, as for the rest.
        up: see :func:`silu_and_mul`.
        between: see :func:`silu_and_mul`.
        out: see :func:`silu_and_mul`.

    Returns:
        See :func:`silu_and_mul`.

    Raises:
        TypeError, ValueError, RuntimeError, BackendError: see :func:`silu_and_mul`.
    """
    if (result := _and_mul_on_fast_path(gate, up, "gelu_tanh", between, out)) is not None:
        return result
    if not is_dynamo_compiling() and must_be_seen.override(gate, up, out):
        operands = (gate, up, out)
        return must_be_seen.handed_over(gelu_tanh_and_mul, operands, locals())
    return _and_mul("gelu_tanh_and_mul", gate, up, "gelu_tanh", between, out)


def _and_mul_on_fast_path(
    gate: Tensor, up: Tensor | None, activation: str, between: torch.dtype | None, out: Tensor | None
) -> Tensor | None:
    """:func:`_and_mul` by the fast path, if that takes the call."""
    if is_dynamo_compiling() or not (between is None or between is torch.float32):
        return None
    take = fast_paths.get(request())
    if take is None:
        return None
    how = AND_MUL if between is None else AND_MUL + BETWEEN_IS_F32
    return cast("Tensor | None", take(gate, *NO_NORM, up, activation, how, None, out))


def _and_mul(
    name: str, gate: Tensor, up: Tensor | None, activation: str, between: torch.dtype | None, out: Tensor | None
) -> Tensor:
    """:func:`silu_and_mul` and :func:`gelu_tanh_and_mul`."""
    if not isinstance(gate, Tensor):
        refuse_type("gate", gate)
    check_between(between, gate, "gate")
    passed = between or gate.dtype
    rounded_to = None if passed == accumulator(gate.dtype) else passed
    if up is not None:
        return _run(name, {"gate": gate, "up": up}, up, gate, activation, rounded_to, out, None)
    z, y = halves(gate)
    half = "N" if is_dynamo_compiling() else y.shape[-1]  # a compiler would take the number in a name for a constant
    names = {f"gate[..., :{half}]": z, f"gate[..., {half}:]": y}
    return _run(name, names, y, z, activation, rounded_to, out, None, gate)


def halves(gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gate, and the rows that it multiplies, in one tensor of [..., 2 * N].

    Raises:
        TypeError, ValueError: it is no such tensor.
    """
    if not isinstance(gate, Tensor):
        refuse_type("gate", gate)
    if gate.is_nested:
        refuse_nested("gate")
    if must_be_seen.in_memory(gate):
        check_memory("gate", gate)  # torch would refuse the halves in words of its own
    if gate.dim() == 0 or gate.shape[-1] == 0 or gate.shape[-1] % 2:
        raise ValueError(
            f"gate must be [..., 2 * N] where up is not given, got shape {list(gate.shape)}; pass gate and up, both of "
            "[..., N]"
        )
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _run(
    name: str,
    operands: dict[str, Tensor],
    y: Tensor,
    z: Tensor,
    activation: str,
    between: torch.dtype | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    both: Tensor | None = None,
) -> Tensor:
    """The public function of that name.

    ``operands``: y and z as the caller calls them; the first one decides dtypes. ``both``: the tensor whose halves are
    z and y.
    """
    (first_name, first), (second_name, second) = operands.items()
    if second is None:
        refuse_type(second_name, second)
    seen = must_be_seen.seen(y, z, out)
    transformed = not seen and must_be_seen.transform(y, z, out)
    if not (is_dynamo_compiling() or transformed):  # the batches of a transform have no memory
        names = {"x_name": first_name, "residual_name": second_name}
        check_operands(first, second, None, out, None, in_memory=not seen, **names)
    check_activation(activation)
    check_flags(Flags(out_dtype=out_dtype), first, None, out, None, x_name=first_name)
    records = is_grad_enabled() and requires_grad(y, z, None)
    if out is not None and (records or out.requires_grad):
        refuse_grad(name)
    gating = Gating(activation, between, out.dtype if out is not None else out_dtype or first.dtype)
    if seen:
        found = dtensor_bridge.operations(y, z, out).gate(y, z, *gating)
        return dtensor_bridge.written(out, found)
    if out is not None and not transformed:
        check_apart({first_name if name == "gate_" else "out": out}, operands)
    if records or transformed:
        found = Gated.apply(*((y, z) if both is None else (None, both)), *gating)  # type: ignore[no-untyped-call]
        return dtensor_bridge.written(out, found)
    return run_gated.forward(y, z, gating, out)


class Gated(torch.autograd.Function):
    """(y, z, *gating) -> y times a function of z; or (None, [..., 2 * N] of z and then y, *gating)."""

    @staticmethod
    def forward(y: Tensor | None, z: Tensor, *gating: Any) -> Tensor:
        """See :func:`gate`."""
        y, z = _rows_and_gate(y, z)
        first, second = (z, y) if z.dtype == torch.float64 else (y, z)
        check_operands(first, second, None, None, None, x_name="y", residual_name="z", in_memory=False)
        if must_be_seen.below(y, z):
            return cast(Tensor, dtensor_bridge.operations(y, z).gate(y, z, *gating))
        return run_gated.forward(y, z, Gating(*gating))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the operands, and the backend that the backward pass takes: the one in force now."""
        y, z, *gating = inputs
        ctx.save_for_backward(y, z)
        ctx.save_for_forward(y, z)
        ctx.gating = Gating(*gating)
        ctx.backend = run_gated.backend_of(_rows_and_gate(y, z)[0], "gate_backward")

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        """See :func:`fusednorm.reference.activations.gate_gradients`."""
        first, second = ctx.saved_tensors
        y, z = _rows_and_gate(first, second)
        needs, nothing = (ctx.needs_input_grad[:2] if first is not None else (True, True)), (None,) * len(ctx.gating)
        activation, between, _ = ctx.gating
        found: Any
        if must_be_seen.differentiated_again():  # the gradients may be differentiated again
            dtensor_bridge.check_kept((d,), (y, z))
            found = activations.gate_gradients(d, y, z, activation, between, needs)
        elif must_be_seen.below(d, y, z):
            operations = dtensor_bridge.operations(d, y, z)
            found = operations.gate_backward(d, y, z, activation, between, list(needs))
            found = tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))
        elif first is not None:
            found = tuple(run.new_like(t, t.dtype) if need else None for t, need in zip((y, z), needs, strict=True))
            run_gated.backward(ctx.backend, d, y, z, ctx.gating, found)
        else:
            gradient = run.new_like(second, second.dtype)
            run_gated.backward(ctx.backend, d, y, z, ctx.gating, _rows_and_gate(None, gradient))
            return None, gradient, *nothing
        return *(found if first is not None else (None, torch.cat(found[::-1], -1))), *nothing

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The tangent; roundings are passed straight through."""
        with outer_levels():
            first, second = primals(ctx)
            y, z = _rows_and_gate(first, second)
            y_tangent, z_tangent = tangents[:2] if first is not None else _rows_and_gate(None, tangents[1])
            wide = accumulator(torch.promote_types(y.dtype, z.dtype))
            a, slope = activations.activated_and_slope(z.to(wide), ctx.gating.activation)
            terms = [] if y_tangent is None else [y_tangent.to(wide) * a]
            terms += [] if z_tangent is None else [y.to(wide) * slope * z_tangent.to(wide)]
            return rounded(sum(terms[1:], start=terms[0]), ctx.gating.out_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """A batch of calls is one call with one dimension more."""
        y, z = (
            t if t is None else t.movedim(dim, 0) if dim is not None else t.expand(info.batch_size, *t.shape)
            for t, dim in zip(inputs[:2], in_dims[:2], strict=True)
        )
        return Gated.apply(y, z, *inputs[2:]), 0  # type: ignore[no-untyped-call]


def _rows_and_gate(y: Tensor | None, z: Tensor) -> tuple[Tensor, Tensor]:
    """y and z, where z may hold both: itself in its first half."""
    if y is not None:
        return y, z
    half = z.shape[-1] // 2
    return z[..., half:], z[..., :half]
