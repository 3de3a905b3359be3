"""The plain operations beside the norm, out of which compositions are made: docs/spec.md, section 8.

Each goes through torch's dispatcher if a tracer, a mode or a tensor must see it: a compiler that saw torch's own
operations would leave out roundings between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.call import GateSteps, gate_steps
from fusednorm.calls.checks import check_activation, check_dtype, check_gate_steps, check_operands
from fusednorm.calls.rotation_checks import check_heads, check_tables
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.declare.plan import Flags, Operands
from fusednorm.engine import run_gates, run_heads
from fusednorm.reference import activations, rotation
from fusednorm.reference import norm as reference
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.operator import Operator

AFFINE = Operator(
    Declaration(
        "affine",
        operands=(Operand("n"), Operand("weight", Role.WEIGHT, True), Operand("bias", Role.WEIGHT, True)),
        results=(Result(dtype="out_dtype"),),
        flags={"weight_offset": 0.0, "rounded_to": None, "out_dtype": torch.dtype},
        formula=lambda **arguments: (reference.affine(**arguments),),
        gradient=reference.affine_gradients,
        kernel=None,
    )
)


def _run_gate(operands: Operands, flags: Flags) -> tuple[Tensor]:
    y, z = cast("tuple[Tensor, Tensor]", operands.values())
    first, second = (z, y) if z.dtype == torch.float64 else (y, z)  # of a transform's batches, which nobody has checked
    check_operands(first, second, None, None, None, x_name="y", residual_name="z", in_memory=False)
    return (run_gates.forward(y, z, flags),)


def _run_gate_backward(given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return run_gates.backward(given["d"], (given["y"], given["z"]), given, needs)


def _check_gate(y: Tensor, z: Tensor, activation: str, between: torch.dtype | None, **flags: Any) -> Mapping[str, Any]:
    check_activation(activation)
    wide = torch.float64 if torch.float64 in (y.dtype, z.dtype) else torch.float32
    numbers = check_gate_steps(gate_steps(flags), activation, wide)
    if between is not None and (between not in (torch.float16, torch.bfloat16) or wide is torch.float64):
        raise TypeError(
            "between must be None, torch.float16 or torch.bfloat16, and None where an operand is float64, got "
            f"{between!r}; pass None"
        )
    return numbers


#: The flags of a gate, by name. ``activation`` is the function, or without y "softcap"; ``between`` is the dtype that
#: the function's value is rounded to before it is multiplied, or None.
GATE_FLAGS: dict[str, Any] = {"activation": "silu", "between": None, "out_dtype": None, **GateSteps()._asdict()}

GATE = Operator(
    Declaration(
        "gate",
        operands=(Operand("y"), Operand("z")),
        results=(Result(dtype="out_dtype"),),
        flags=GATE_FLAGS | {"out_dtype": torch.dtype},
        formula=lambda **arguments: (activations.gated(**arguments),),
        gradient=activations.gate_gradients,
        joined=0,
        any_decides=True,
        check=_check_gate,
        kernel=None,
    ),
    _run_gate,
    _run_gate_backward,
    run_gates.on_fast_path,
)


def _rotate_on_fast_path(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounded_to: Any, dtype: Any, *others: Any
) -> Tensor | None:
    if any(others) or dtype is not x.dtype:  # flags that C does not know; by identity, see run_gates.on_fast_path
        return None
    flags = {"interleaved": interleaved, "products": rounded_to}
    found = run_heads.rotated_on_fast_path([x], {"cos": cos, "sin": sin}, flags)
    return None if found is None else cast(Tensor, found[0])


def _check_rotate(x: Tensor, cos: Tensor, sin: Tensor, rounded_to: Any, **_: Any) -> None:
    check_heads("x", x, False)
    check_tables(cos, sin, None, x, in_memory=False)
    if rounded_to is not None:
        check_dtype("rounded_to", rounded_to, None)


ROTATE = Operator(
    Declaration(
        "rotate",
        operands=(Operand("x"), Operand("cos", Role.TABLE), Operand("sin", Role.TABLE)),
        results=(Result(dtype="dtype"),),
        flags={"interleaved": False, "rounded_to": None, "dtype": torch.dtype},
        formula=lambda **arguments: (rotation.rotated(**arguments),),
        transposed=lambda dtype, tables, flags: ({**tables, "sin": -tables["sin"]}, {**flags, "dtype": dtype}),
        check=_check_rotate,
        kernel=Kernel("rotate", "rotate", run=run_heads.forward),
    ),
    fast=_rotate_on_fast_path,
)


SCALE = Operator(
    Declaration(
        "scale",
        operands=(Operand("x"),),
        flags={"factor": 1.0},
        formula=lambda x, factor: (reference.scaled(x, factor),),
        transposed=lambda dtype, others, flags: (others, flags),
        kernel=None,
    )
)


class _Add(Operator):
    """Its gradients take no values of operands, which are not kept therefore."""

    differentiable = True

    def keep(
        self, ctx: Any, operands: Operands, flags: Flags, results: Sequence[Any], through_dispatcher: bool = True
    ) -> None:
        """Keeps the dtypes."""
        ctx.flags, ctx.dtypes = flags, [cast(Tensor, t).dtype for t in operands.values()]
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, incoming: Sequence[Any], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """The gradient, rounded once to the dtype of each operand."""

        def formula(d: Tensor) -> tuple[Tensor | None, ...]:
            needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
            return tuple(reference.rounded(d, dtype) if need else None for dtype, need in needed)

        return (None, None) if incoming[0] is None else dtensor_bridge.on_rows(formula, incoming, joined=0)


def _tangent_of_sum(operands: Operands, flags: Flags, tangents: Mapping[str, Any]) -> tuple[Tensor]:
    x, *others = [t for t in tangents.values() if t is not None]
    return (reference.added(x, others[0], flags["dtype"]) if others else reference.rounded(x, flags["dtype"]),)


ADD = _Add(
    Declaration(
        "add",
        operands=(Operand("x"), Operand("residual")),
        results=(Result(dtype="dtype"),),
        flags={"dtype": torch.dtype},
        formula=lambda **arguments: (reference.added(**arguments),),
        tangent=_tangent_of_sum,
        kernel=None,
    )
)
