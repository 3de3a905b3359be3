"""Gates: rows times a function of other rows (docs/spec.md, section 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
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
    refuse_type,
)
from fusednorm.calls.fast_path import ALONE, AND_MUL, Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result
from fusednorm.declare.plan import Plan
from fusednorm.engine import run_gates
from fusednorm.operations.composition import Composition
from fusednorm.operations.front_door import Asked
from fusednorm.torch_ops.steps import GATE, GATE_FLAGS


class _Rows(NamedTuple):
    """The operands of a gate: y and z, by the names of the function's operands, or one tensor that holds both."""

    operands: dict[str, Any]
    #: Whether they take turns there.
    interleaved: bool = False

    def apart(self) -> Any:
        """y and z."""
        return run_gates.rows_and_gate([*self.operands.values()], self.interleaved)


class Gate(Composition):
    """``torch.ops.fusednorm.gate``, by the names of a public function. Here it is of y and z."""

    has_one_operator = False  # of its function: it is one operator in each graph

    def __init__(self, name: str, operands: Sequence[str], flags: Mapping[str, Any], **declared: Any) -> None:
        declaration = Declaration(
            name,
            operands=tuple([Operand(one, optional=one == "up") for one in operands]),
            flags={**flags, "out_dtype": None},
            formula=self._by_operator,
            kernel=Kernel("gate", "gate", run=self._run_in_memory),
            **declared,
        )
        super().__init__(declaration, "gate", lambda operands, flags: True, self._gradients, self.read_by_c)

    def read_by_c(self, y: Tensor, z: Any, activation: Any, out_dtype: Any, *others: Any) -> Tensor | None:
        """The products of a recorded call, if the fast path takes it, which knows no other flags."""
        return None if any(others) else run_gates.on_fast_path(y, z, activation, None, out_dtype)

    def dispatched(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The operator of gates."""
        return self.composed(operands, flags)

    def rows(self, given: Mapping[str, Any]) -> _Rows:
        """The operands, among all that is given."""
        return _Rows({"y": given["y"], "z": given["z"]})

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """y and z as the caller calls them; the first one decides dtypes."""
        return {"y": given["y"], "z": given["z"]}

    def gating(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of the operator."""
        return {**GATE_FLAGS, "activation": given["activation"], "out_dtype": given.get("out_dtype")}

    def check_flags(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
        """The flags, all but dtypes of results checked, and numbers rounded."""
        check_activation(flags["activation"])
        return flags

    def _by_operator(self, **given: Any) -> tuple[Tensor, ...]:
        y, z = self.rows(given).apart()
        return (GATE.with_gradients(y=y, z=z, **self.gating(given)),)

    def _run_in_memory(
        self,
        plan: Plan,
        operands: Mapping[str, Any],
        flags: Mapping[str, Any],
        outputs: Mapping[str, Tensor],
        keep: bool,
    ) -> tuple[Tensor, ...]:
        given = {**operands, **flags}
        y, z = self.rows(given).apart()
        return (run_gates.forward(y, z, self.gating(given), outputs.get("out")),)

    def _gradients(self, given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The gradients; where one tensor holds gate and up, each is written to its place in that."""
        of, flags, names = self.rows(given), self.gating(given), self.plan.operands
        needed = [needs[names.index(name)] for name in of.operands]
        found = run_gates.backward(given["d_out"], [*of.operands.values()], flags, needed, of.interleaved)
        by_name = dict(zip(of.operands, found, strict=True))
        return tuple([by_name.get(name) for name in names])

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded, with the dtype of the result.

        A transform shows operands without a dimension, and a compiler's graph has the operator's checks.
        """
        flags, out = self.check_flags(asked.operands, asked.flags), asked.outputs.get("out")
        named = self.named({**asked.operands, **flags})
        (first_name, first), (second_name, second) = named.items()
        if second is None:
            refuse_type(second_name, second)
        if not (is_dynamo_compiling() or asked.listener is Listener.TRANSFORM):
            names = {"x_name": first_name, "residual_name": second_name}
            check_operands(first, second, None, out, None, in_memory=asked.in_memory, **names)
        check_flags(Flags(out_dtype=flags["out_dtype"]), first, None, out, None, x_name=first_name)
        if out is not None and asked.in_memory:
            check_apart({first_name if asked.in_place else "out": out}, named)
        return {**flags, "out_dtype": (flags["out_dtype"] if out is None else out.dtype) or first.dtype}


class AndMul(Gate):
    """An activation of a gate times up; both may lie in one tensor."""

    def __init__(self, name: str, activation: str, **flags: Any) -> None:
        self._activation = activation
        super().__init__(name, ("gate", "up"), {"between": None, **flags}, results=(Result(dtype="out_dtype"),))
        #: The flags of usual calls that are recorded.
        self.usual = MappingProxyType(self.declaration.defaults)
        self._usual_steps = (*self.usual.values(),)[1:]

    def read_by_c(self, gate: Tensor, up: Any, between: Any, *steps: Any) -> Tensor | None:
        """The products of a recorded call, if the fast path takes it."""
        if steps != self._usual_steps:
            return None
        found: Tensor | None = run_gates.and_mul(gate, up, self._activation, between)
        return found

    def rows(self, given: Mapping[str, Any]) -> _Rows:
        """The operands, among all that is given."""
        if given["up"] is None:
            return _Rows({"gate": given["gate"]}, given.get("interleaved", False))
        return _Rows({"up": given["up"], "gate": given["gate"]})

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The gate and up as the caller calls them."""
        if given["up"] is not None:
            return {"gate": given["gate"], "up": given["up"]}
        interleaved = given.get("interleaved", False)
        z, y = halves(given["gate"], interleaved)
        half = "N" if is_dynamo_compiling() else y.shape[-1]  # a compiler would take the number for a constant
        names = ("gate[..., ::2]", "gate[..., 1::2]") if interleaved else (f"gate[..., :{half}]", f"gate[..., {half}:]")
        return dict(zip(names, (z, y), strict=True))

    def gating(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of the operator; by default what passes between has the gate's dtype."""
        dtype = given["gate"].dtype
        passed = given["between"] or dtype
        asked = {
            **GATE_FLAGS,
            "activation": self._activation,
            "between": None if passed == accumulator(dtype) else passed,
            "out_dtype": given.get("out_dtype") or dtype,
        }
        if "limit" in given:
            asked |= {name: given[name] for name in ("alpha", "up_offset", "clamp", "round_steps")}
            asked["limit"] = given["limit"] or 0.0
        return asked

    def check_flags(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
        """The flags, all but dtypes of results checked, and numbers rounded."""
        gate, between = operands["gate"], flags["between"]
        if not isinstance(gate, Tensor):
            refuse_type("gate", gate)
        check_between(between, gate, "gate")
        if "limit" not in flags:
            return flags
        numbers = check_gate_numbers(
            flags["limit"], flags["alpha"], flags["up_offset"], flags["clamp"], accumulator(gate.dtype)
        )
        flags = {**flags, **numbers, "limit": numbers["limit"] or None}
        check_flag("interleaved", flags["interleaved"])
        check_flag("round_steps", flags["round_steps"])
        if flags["round_steps"] and between is not None:
            raise ValueError("round_steps=True rounds to gate's dtype, and between is given; leave out one of them")
        if operands["up"] is not None and flags["interleaved"]:
            raise ValueError("interleaved=True goes with one tensor that has gate and up; leave it out, or up")
        return flags


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


#: The flags of optional steps.
SILU_STEPS: dict[str, Any] = {"limit": float, "alpha": 1.0, "up_offset": 0.0, "clamp": "before"}
SILU_STEPS |= {"interleaved": False, "round_steps": False}

_GATE = Gate(
    "gate",
    ("y", "z"),
    {"activation": "silu"},
    results=(Result(dtype="out_dtype", overwrites="y"),),
    samples=({"activation": "sigmoid"},),
)
_SILU, _GELU = AndMul("silu_and_mul", "silu", **SILU_STEPS), AndMul("gelu_and_mul", "gelu")
_GELU_TANH, _SIGMOID = AndMul("gelu_tanh_and_mul", "gelu_tanh"), AndMul("sigmoid_and_mul", "sigmoid")
_AND_MUL = {"silu": _SILU, "gelu": _GELU, "gelu_tanh": _GELU_TANH, "sigmoid": _SIGMOID}


def _record(y: Tensor, z: Tensor, activation: str, out: Tensor | None = None, _: None = None) -> Any:
    """The result of :func:`gate` for plain operands that C has read, where gradients are recorded; or None."""
    if out is not None or must_be_seen.transforms_active():
        return None
    flags = MappingProxyType({"activation": activation, "out_dtype": y.dtype})
    return _GATE.apply_plain(y, z, flags)


def _record_and_mul(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    *steps: Any,
) -> Any:
    """Records a call of :func:`silu_and_mul`."""
    operation = _AND_MUL.get(activation)
    if operation is None or out is not None or must_be_seen.transforms_active():
        return None
    operands = {"gate": gate, "up": up}
    flags: Mapping[str, Any] = operation.usual
    if steps and steps != _USUAL_STEPS:
        flags = MappingProxyType(
            {**operation.check_flags(operands, {**flags, **dict(zip(SILU_STEPS, steps, strict=True))})}
        )
    if between is not None:
        flags = MappingProxyType({**flags, "between": between})
    return operation.apply_plain(gate, up, flags)


_USUAL_STEPS = (None, *[*SILU_STEPS.values()][1:])
#: As C knows the optional steps.
STEPS = " ".join(SILU_STEPS)
_gate = Entry("gate", "x z activation out out_dtype", constants={"order": ALONE}).open(recorded=_record)
gate_and_up_on_fast_path = Entry("gate", f"x z activation between out {STEPS}", constants={"order": AND_MUL}).open(
    recorded=_record_and_mul
)


@_GATE.public
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
    return _GATE("gate", y=y, z=z, activation=activation, out=out, out_dtype=out_dtype)


@_GATE.public
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
    return _GATE("gate_", y=y, z=z, activation=activation)


@_SILU.public
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
    return _SILU(
        "silu_and_mul", gate=gate, up=up, between=between, out=out, limit=limit, alpha=alpha, up_offset=up_offset,
        clamp=clamp, interleaved=interleaved, round_steps=round_steps,
    )  # fmt: skip


@_GELU_TANH.public
def gelu_tanh_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``, as Gemma's MLP has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "gelu_tanh", between, out)
        if result is not None:
            return result
    return _GELU_TANH("gelu_tanh_and_mul", gate=gate, up=up, between=between, out=out)


@_GELU.public
def gelu_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``gelu(gate) * up``, GELU as z * Phi(z), as ModernBERT's MLP has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "gelu", between, out)
        if result is not None:
            return result
    return _GELU("gelu_and_mul", gate=gate, up=up, between=between, out=out)


def sigmoid_and_mul(
    gate: Tensor, up: Tensor | None = None, *, between: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``sigmoid(gate) * up``, as the gate of attention in Qwen3.5 has it; otherwise as :func:`silu_and_mul`."""
    if not is_dynamo_compiling():
        result: Tensor | None = gate_and_up_on_fast_path(gate, up, "sigmoid", between, out)
        if result is not None:
            return result
    return _SIGMOID("sigmoid_and_mul", gate=gate, up=up, between=between, out=out)


_SIGMOID.functions["sigmoid_and_mul"] = sigmoid_and_mul  # which is no name of the package


def products_of(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Tensor:
    """The products of :func:`silu_and_mul`, of all that has been checked; in float32 if ``between`` is that."""
    given = {**operands, **flags}
    (y, z), asked = _SILU.rows(given).apart(), _SILU.gating({**given, "out_dtype": given["between"]})
    if not in_memory:
        found: Tensor = GATE.with_gradients(y=y, z=z, **asked)
        return found
    taken = run_gates.on_fast_path(y, z, **asked)
    return run_gates.forward(y, z, asked) if taken is None else taken


def checked_products(operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The flags of :func:`silu_and_mul`, numbers rounded; and the gate and up by the names that they have here."""
    flags = _SILU.check_flags(operands, flags)
    return flags, _SILU.named({**operands, **flags})
