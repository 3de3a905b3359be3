"""Functions of each element, without rows to multiply: those of gates (docs/spec.md, section 10)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import check_cap
from fusednorm.calls.fast_path import FUNCTION, Entry
from fusednorm.declare.declaration import Declaration, Operand, Result
from fusednorm.engine import execute
from fusednorm.engine.execute import Gating
from fusednorm.operations.front_door import Operation, dtype_of
from fusednorm.operations.gate import Gated
from fusednorm.reference import activations


class _Function(Operation):
    """A function of gates as an operation, and its calls on the fast path."""

    steps = "gate"
    #: The operand's name.
    operand = "z"
    #: The arguments of :meth:`of`, as the fast path knows them.
    read_by_c = "x out out_dtype"

    def __init__(self, activation: str, **declared: Any) -> None:
        self.activation = activation
        declaration = Declaration(
            activation,
            operands=(Operand(self.operand),),
            results=(Result(dtype="out_dtype", overwrites=self.operand),),
            flags={**declared.pop("flags", {}), "out_dtype": None},
            formula=self._formula,
            gradient=self._gradient,
            joined=0,
            **declared,
        )
        entry = Entry("gate", self.read_by_c, constants={"order": FUNCTION, "activation": activation})
        self.on_fast_path = entry.open(recorded=self._record)
        of_graphs = entry._replace(names=self.read_by_c.replace(" out ", " ")).open()
        super().__init__(declaration, self._run, self._run_gradient, of_graphs)

    def gating(self, z: Tensor, out_dtype: torch.dtype | None = None) -> Gating:
        """The function and its flags, of which gradients have no dtype of the result."""
        return Gating(self.activation, None, out_dtype or z.dtype)

    def _formula(self, z: Tensor, *flags: Any) -> tuple[Tensor]:
        return (activations.gated(None, z, *cast(Any, self.gating(z, *flags))),)

    def _run(self, z: Tensor, *flags: Any) -> tuple[Tensor]:
        return (execute.gate(None, z, self.gating(z, *flags)),)

    def _gradient(self, d: Tensor, *others: Any) -> tuple[Tensor | None]:
        z, *flags, needs = others
        how = self.gating(z, *flags)
        found = activations.gate_gradients(d, None, z, how.activation, how.between, *how.steps, (False, needs[0]))
        return found[1:]

    def _run_gradient(self, d: Tensor, z: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        *flags, needs = others
        gating = self.gating(z, *flags)
        backend = execute.backend_of_gates(z, "gate_backward", gating)
        return execute.gate_gradients(backend, d, (None, z), gating, (False, needs[0]))[1:]

    def _record(self, z: Tensor, *others: Any) -> Any:
        """The result for a plain operand that C has read, where gradients are recorded; or None."""
        *flags, out, _ = others
        if out is not None or must_be_seen.transforms_active():
            return None
        gating = self.gating(z, *self.declaration.rounded((z,), (*flags, None)))
        return Gated.apply(gating, False, None, z)  # type: ignore[no-untyped-call]

    def again(self, z: Tensor, gating: Gating) -> Any:
        """The results once more, of which gradients can be differentiated."""
        return cast(Any, self.recorded).apply(z, gating.out_dtype)

    def of(self, z: Tensor, out: Tensor | None, out_dtype: torch.dtype | None, **flags: Any) -> Tensor:
        """The results of the public function."""
        if not is_dynamo_compiling():
            found: Tensor | None = self.on_fast_path(z, *flags.values(), out, out_dtype)
            if found is not None:
                return found
        out_dtype = dtype_of(out, out_dtype, z, self.operand)
        arguments = {self.operand: z, "out": out, "out_dtype": out_dtype, **flags}
        return self(self.activation, **arguments)


class _Softcap(_Function):
    """The function of x with a cap."""

    operand = "x"
    read_by_c = "x limit round_steps out out_dtype"

    def gating(  # type: ignore[override]
        self, z: Tensor, cap: float, round_steps: bool, out_dtype: torch.dtype | None = None
    ) -> Gating:
        """The steps are rounded to ``between``."""
        between = z.dtype if round_steps and z.dtype != accumulator(z.dtype) else None
        return Gating(self.activation, between, out_dtype or z.dtype, cap, round_steps=round_steps)

    def again(self, z: Tensor, gating: Gating) -> Any:
        """The same, with the flags."""
        return cast(Any, self.recorded).apply(z, gating.limit, gating.round_steps, gating.out_dtype)


_GELU, _RELU2 = _Function("gelu"), _Function("relu2")
_SOFTCAP = _Softcap(
    "softcap",
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
