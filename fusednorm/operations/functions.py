"""Functions of each element, without rows to multiply: those of gates (docs/spec.md, section 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, GateSteps
from fusednorm.calls.checks import check_flags, check_operands
from fusednorm.calls.declared import Declaration, Operand, Result
from fusednorm.calls.fast_path import FUNCTION, Entry
from fusednorm.engine import execute
from fusednorm.engine.execute import Gating
from fusednorm.operations.declared import Operation
from fusednorm.operations.gate import Gated
from fusednorm.reference import activations


class _Function(Operation):
    """A function of gates as an operation, and its calls on the fast path."""

    steps = "gate"

    def __init__(self, activation: str) -> None:
        def formula(z: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor]:
            return (activations.gated(None, z, activation, None, out_dtype or z.dtype),)

        def run(z: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor]:
            return (execute.gate(None, z, Gating(activation, None, out_dtype or z.dtype)),)

        def gradient(d: Tensor, z: Tensor, needs: list[bool]) -> tuple[Tensor | None]:
            return activations.gate_gradients(d, None, z, activation, None, *GateSteps(), (False, needs[0]))[1:]

        def run_gradient(d: Tensor, z: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
            gating = Gating(activation)
            backend = execute.backend_of_gates(z, "gate_backward", gating)
            return execute.gate_gradients(backend, d, (None, z), gating, (False, needs[0]))[1:]

        declaration = Declaration(
            activation,
            operands=(Operand("z"),),
            results=(Result(dtype="out_dtype", overwrites="z"),),
            flags={"out_dtype": None},
            formula=formula,
            gradient=gradient,
            joined=0,
            samples=({},),
        )
        super().__init__(declaration, run, run_gradient)
        constants = {"order": FUNCTION, "activation": activation}
        self.on_fast_path = Entry("gate", "x out out_dtype", constants=constants).of(activation, self._record)

    def _record(self, z: Tensor, out: Tensor | None = None, _: None = None) -> Any:
        """The result for a plain operand that C has read, where gradients are recorded; or None."""
        if out is not None or must_be_seen.transforms_active():
            return None
        return Gated.apply(Gating(self.declaration.name, None, z.dtype), False, None, z)  # type: ignore[no-untyped-call]

    def of(self, z: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """The results of the public function."""
        if not is_dynamo_compiling():
            found: Tensor | None = self.on_fast_path(z, out, out_dtype)
            if found is not None:
                return found
        if out is not None:
            check_operands(z, None, None, out, None, in_memory=False, x_name="z")
            check_flags(Flags(out_dtype=out_dtype), z, None, out, None, x_name="z")
            out_dtype = out.dtype
        result: Tensor = self(self.declaration.name, z=z, out=out, out_dtype=out_dtype)
        return result


_GELU, _RELU2 = _Function("gelu"), _Function("relu2")


@_GELU.public
def gelu(z: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """GELU, ``z * Phi(z)`` of the normal distribution, in float32 (float64 for a float64 ``z``), rounded once.

    docs/spec.md, section 10. ``torch.nn.functional.gelu`` has other bits, and in float32 none that are right below -5.

    Args:
        z: [..., N], float16, bfloat16, float32 or float64, any strides.
        out: [..., N] to write to, in its own dtype. May be z itself.
        out_dtype: the dtype of the result; z's if None. With gradients, unlike ``out``.

    Returns:
        The function's values, in z's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and z requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.gate`.
    """
    return _GELU.of(z, out, out_dtype)


@_RELU2.public
def relu2(z: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The square of a positive z, else 0, as the MLP of Nemotron-H has it; otherwise as :func:`gelu`."""
    return _RELU2.of(z, out, out_dtype)
