"""Functions of each element, without rows to multiply: those of gates (docs/spec.md, section 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import check_cap
from fusednorm.calls.fast_path import FUNCTION, Entry
from fusednorm.declare.declaration import Declaration, Operand, Result
from fusednorm.engine import run_gates
from fusednorm.operations.front_door import Asked, Operation
from fusednorm.reference import activations
from fusednorm.torch_ops.steps import GATE_FLAGS


class _Function(Operation):
    """A function of gates as an operation, and its calls on the fast path."""

    steps = "gate"
    #: The arguments of the public function, and the names by which C knows them.
    names = "z out out_dtype"
    read_by_c = "x out out_dtype"

    def __init__(self, activation: str, gradient: Callable[..., Any], **declared: Any) -> None:
        self.activation, (operand, *_) = activation, self.names.split()
        declaration = Declaration(
            activation,
            operands=(Operand(operand),),
            results=(Result(dtype="out_dtype", overwrites=operand),),
            flags={**declared.pop("flags", {}), "out_dtype": None},
            formula=self._formula,
            gradient=gradient,
            joined=0,
            kernel=None,
            **declared,
        )
        entry = Entry("gate", self.read_by_c, constants={"order": FUNCTION, "activation": activation})
        of_graphs = entry._replace(names=self.read_by_c.replace(" out ", " ")).open()
        super().__init__(declaration, self._by_backend, self._gradient_by_backend, of_graphs)
        self.on_fast_path = self.open(entry, self.names)

    def gating(self, z: Tensor, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of ``torch.ops.fusednorm.gate``; of gradients there is no dtype of the result."""
        return {**GATE_FLAGS, "activation": self.activation, "out_dtype": flags.get("out_dtype") or z.dtype}

    def _formula(self, **arguments: Any) -> tuple[Tensor]:
        z = arguments.pop(self.plan.rows)
        return (activations.gated(None, z, **self.gating(z, arguments)),)

    def compute(self, asked: Asked) -> tuple[Tensor]:
        """See :class:`Operation`."""
        (z,) = asked.operands.values()
        return (run_gates.forward(None, z, self.gating(z, asked.flags), asked.outputs.get("out")),)

    def _by_backend(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor]:
        (z,) = operands.values()
        return (run_gates.forward(None, z, self.gating(z, flags)),)

    def _gradient_by_backend(self, given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        z = given[self.plan.rows]
        return run_gates.backward(given["d"], (None, z), self.gating(z, given), (False, needs[0]))[1:]

    def of(self, z: Tensor, out: Tensor | None, out_dtype: torch.dtype | None, **flags: Any) -> Tensor:
        """The results of the public function."""
        if not is_dynamo_compiling():
            found: Tensor | None = self.on_fast_path(z, *flags.values(), out, out_dtype)
            if found is not None:
                return found
        return self(self.activation, **{self.plan.rows: z, "out": out, "out_dtype": out_dtype, **flags})


class _Softcap(_Function):
    """The function of x with a cap."""

    read_by_c = "x limit round_steps out out_dtype"
    names = "x cap round_steps out out_dtype"

    def gating(self, z: Tensor, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The steps are rounded to ``between``."""
        round_steps = flags["round_steps"]
        between = z.dtype if round_steps and z.dtype != accumulator(z.dtype) else None
        return {**super().gating(z, flags), "between": between, "limit": flags["cap"], "round_steps": round_steps}


def _gradient_of(activation: str) -> Callable[..., tuple[Tensor | None]]:
    def gradient(d: Tensor, z: Tensor, needs: list[bool]) -> tuple[Tensor | None]:
        return activations.gate_gradients(d, None, z, activation, None, needs=(False, needs[0]))[1:]

    return gradient


def _gradient_of_softcap(
    d: Tensor, x: Tensor, cap: float, round_steps: bool, needs: list[bool]
) -> tuple[Tensor | None]:
    flags = _SOFTCAP.gating(x, {"cap": cap, "round_steps": round_steps})
    del flags["out_dtype"]
    return activations.gate_gradients(d, None, x, **flags, needs=(False, needs[0]))[1:]


_GELU, _RELU2 = _Function("gelu", _gradient_of("gelu")), _Function("relu2", _gradient_of("relu2"))
_SOFTCAP = _Softcap(
    "softcap",
    _gradient_of_softcap,
    flags={"cap": 30.0, "round_steps": False},
    check=lambda x, cap, **_: check_cap(cap, x),
    samples=({"cap": 30.0}, {"cap": 0.7, "round_steps": True}),
    refused=(
        ({"cap": "2"}, TypeError, "cap must be a number"),
        ({"cap": 0.0}, ValueError, "cap must be finite and greater than 0"),
    ),
)


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


@_SOFTCAP.public
def softcap(
    x: Tensor,
    cap: float,
    *,
    round_steps: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``cap * tanh(x / cap)``, in float32 (float64 for a float64 ``x``), rounded once.

    As Gemma 2 has it for its logits, and Grok. docs/spec.md, section 10: tanh has the same bits on every backend.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        cap: the bound of the results' magnitude, greater than 0.
        round_steps: rounds the quotient, tanh and the product each to x's dtype, as separate operations on x do.
        out: [..., N] to write to, in its own dtype. May be x itself.
        out_dtype: the dtype of the result; x's if None. With gradients, unlike ``out``.

    Returns:
        The capped numbers, in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and x requires grad.
        ValueError: ``cap`` is not finite and greater than 0, or no normal number of the type of the computation.
        TypeError, ValueError, BackendError: see :func:`fusednorm.gate`.
    """
    return _SOFTCAP.of(x, out, out_dtype, cap=cap, round_steps=round_steps)
