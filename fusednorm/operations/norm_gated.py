"""A norm of rows or of groups of them, and a gate before or after it: compositions (docs/spec.md, section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import (
    check_activation,
    check_between,
    check_flag,
    check_group_size,
    check_operands,
    refuse_type,
)
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.scalars import number
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.engine import run_gated_norms as engine
from fusednorm.operations.composition import Composition
from fusednorm.operations.gate import gate as gated
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops import dtensor_bridge, steps


def _check(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Mapping[str, Any]:
    """Checks that operands and flags fit each other; returns the flags, numbers rounded."""
    x, gate, weight = operands.values()
    if gate is None:
        refuse_type("gate", gate)
    check_operands(x, gate, weight, None, None, in_memory=in_memory, residual_name="gate")
    check_between(flags["between"], x)
    check_activation(flags["activation"])
    check_flag("norm_before_gate", flags["norm_before_gate"])
    check_flag("round_norm", flags["round_norm"])
    if flags["between"] is not None and not flags["norm_before_gate"]:
        raise TypeError("between is given with norm_before_gate=False, where nothing is rounded between; leave it out")
    check_group_size(flags["group_size"], x.shape[-1])
    wide = accumulator(x.dtype)
    offset, eps = number("weight_offset", flags["weight_offset"], wide), number("eps", flags["eps"], wide)
    return {**flags, "weight_offset": offset, "eps": eps}


def _composed(
    x: Tensor, gate: Tensor, weight: Tensor | None, norm_before_gate: bool, activation: str, **flags: Any
) -> tuple[Tensor]:
    """The rows by plain operations one after the other: docs/spec.md, section 10."""
    between, wide = flags.pop("between"), accumulator(x.dtype)
    if norm_before_gate:
        y = _normed(x, weight, out_dtype=between, **flags)
        return (gated(y, gate, activation=activation, out_dtype=None if between is None else x.dtype),)
    h = gated(x, gate, activation=activation, out_dtype=wide)  # not rounded
    if weight is None or x.dtype == wide or not flags["round_norm"]:  # then nothing is rounded before the end
        return (_normed(h, weight, out_dtype=x.dtype, **flags),)
    # Rounded to x's dtype, and not to that of h.
    offset = flags["weight_offset"]
    n = _normed(h, None, out_dtype=wide, **{**flags, "weight_offset": 0.0, "round_norm": False})
    of_affine = {"weight_offset": offset, "rounded_to": x.dtype, "out_dtype": x.dtype}
    return (steps.AFFINE.with_gradients(n=n, weight=weight, bias=None, **of_affine),)


def _normed(x: Tensor, weight: Tensor | None, *, eps: float, group_size: int | None, **flags: Any) -> Tensor:
    """The norm of rows; or of each group, which is a head with a weight of its own."""
    if group_size is not None and group_size != x.shape[-1]:
        groups = x.shape[-1] // group_size
        x = dtensor_bridge.parts_of_groups(x, groups)
        weight = weight if weight is None else dtensor_bridge.parts_of_groups(weight, groups)
    rows, weights = engine.in_groups({"group_size": group_size}, x, weight)
    y = rms_norm(rows, weights, eps, **flags)
    if rows is x:
        return y
    if must_be_seen.listener(y) is None and not y.requires_grad:
        return y.resize_(x.shape)  # torch refuses some writes to views that are made without gradients
    y = y.flatten(-2)
    return dtensor_bridge.as_placed(y, y)  # so its gradient comes in whole groups too


_NORM_GATED = Composition(
    Declaration(
        "rms_norm_gated",
        operands=(Operand("x"), Operand("gate"), Operand("weight", Role.WEIGHT, optional=True)),
        results=(Result(overwrites="x", may_be=None), Result("rstd", Role.NUMBERS, kept=True)),
        flags={
            "eps": 1e-6,
            "group_size": int,
            "norm_before_gate": True,
            "activation": "silu",
            "round_norm": False,
            "between": None,
            "weight_offset": 0.0,
        },
        formula=_composed,
        checks=_check,
        kernel=Kernel("norm_gated", "norm_gated", run=engine.forward),
    ),
    "norm, gate",
    engine.has_gradients,
    engine.backward,
)
_on_fast_path = _NORM_GATED.open(
    Entry("gate", "x z weight eps group_size norm_before_gate activation round_norm between weight_offset out"),
    "x gate weight eps group_size norm_before_gate activation round_norm between weight_offset out",
)


@_NORM_GATED.public
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    round_norm: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """RMS-normalises rows and multiplies them by a function of a gate, as Mamba 2, Qwen3-Next and Kimi do.

    The same bits as :func:`fusednorm.gate` of ``rms_norm(x, weight, eps)`` and the gate; or, with
    ``norm_before_gate=False``, as the norm of :func:`fusednorm.gate` of x and the gate, which is not rounded before.
    docs/spec.md, section 10.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        gate: [..., N], x's shape, any of these dtypes (float64 only if x is float64).
        weight: [N]; None multiplies by nothing.
        eps: added to the mean of squares, unitless.
        group_size: the elements that are normalised together, which divides N; None: the whole row.
        norm_before_gate: whether the norm comes first, and its rows meet the gate; else the gated x is normalised.
        activation: "silu" (also called swish), "sigmoid", "gelu_tanh", "gelu" (z * Phi(z)) or "relu2" (the square
            of a positive z, else 0).
        round_norm: round what is normalised to x's dtype before it meets the weight.
        between: with ``norm_before_gate``, the dtype to which normalised rows are rounded before they meet the gate:
            x's if None, or ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: added to the weight; see :func:`fusednorm.rms_norm`.

    Returns:
        The rows, in x's dtype.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes or devices do not fit; ``group_size`` does not divide N; there is no such activation.
        BackendError: the requested backends cannot take the call.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _on_fast_path(
            x, gate, weight, eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset
        )
        if result is not None:
            return result
    return _NORM_GATED(
        "rms_norm_gated", x=x, gate=gate, weight=weight, eps=eps, group_size=group_size,
        norm_before_gate=norm_before_gate, activation=activation, round_norm=round_norm, between=between,
        weight_offset=weight_offset,
    )  # fmt: skip


@_NORM_GATED.public
def rms_norm_gated_(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    round_norm: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """:func:`rms_norm_gated` in place, with its arguments: the rows land in ``x``.

    Each row of x is contiguous, and rows lie in at most two levels of strides. The gate may be x itself, and else
    shares no memory with it.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_gated`.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _on_fast_path(
            x, gate, weight, eps, group_size, norm_before_gate, activation, round_norm, between, weight_offset, x
        )
        if result is not None:
            return result
    return _NORM_GATED(
        "rms_norm_gated_", x=x, gate=gate, weight=weight, eps=eps, group_size=group_size,
        norm_before_gate=norm_before_gate, activation=activation, round_norm=round_norm, between=between,
        weight_offset=weight_offset,
    )  # fmt: skip
