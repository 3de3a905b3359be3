"""A call as a value: the operation that it asks for, its operands, and where their rows lie in memory.

The front end makes a :class:`Forward` or a :class:`Backward`, and passes it whole to a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusednorm.calls.c_enums import Activation
from fusednorm.calls.features import unusual

if TYPE_CHECKING:
    from fusednorm.calls.quantization import Quantization

#: How the rows of an operand lie: the stride of the outer level, and the stride of the inner level, in elements.
Strides: TypeAlias = tuple[int, int]

#: The dtypes of operands.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Those of rows that are computed in float32.
NARROW_FLOATS = FLOATS[:3]

#: The names of the functions that a gate goes through.
ACTIVATIONS = tuple(one.name.lower() for one in Activation if one is not Activation.SOFTCAP)


def with_functions(*steps: str) -> frozenset[str]:
    """The words of ``KNOWS`` for steps of gates with each function; silu takes none."""
    return frozenset(f"{step}.{function}" for step in steps for function in ACTIVATIONS[1:])


def accumulator(x_dtype: torch.dtype) -> torch.dtype:
    """The type ``A`` of the specification: float64 for a float64 ``x``, float32 otherwise."""
    return torch.float64 if x_dtype == torch.float64 else torch.float32


class Flags(NamedTuple):
    """The arguments of a public function that are no operands."""

    eps: float = 1e-6
    weight_offset: float = 0.0
    round_sum: bool = True
    round_norm: bool = False
    #: The dtypes of new outputs; None: those of x and of the residual.
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    #: Whether the mean is subtracted first: a LayerNorm. The functions say that, not their arguments.
    center: bool = False


#: The flags of norms, and the steps of gates, that every backend knows which knows norms, or "gate_steps".
_FLAGS_OF_NORMS = ("eps", "weight_offset", "round_sum", "round_norm", "out_dtype", "residual_dtype", "center")
_STEPS_OF_GATES = ("limit", "alpha", "up_offset", "clamp", "round_steps")


class FirstNorm(NamedTuple):
    """A norm of x before the addition, as far as it decides the backend of a call."""

    #: The dtype of its weight, None if there is none.
    weight: torch.dtype | None
    #: The dtype that its rows are rounded to before the addition takes them. It is that of x, or float32.
    between: torch.dtype


class AroundNorm(NamedTuple):
    """A bias, rows of heads and a scaled x, as far as they decide the backend of a call."""

    #: The dtype of the bias, None if there is none.
    bias: torch.dtype | None
    #: Whether the weight or the bias has a row for each of several heads.
    of_heads: bool
    #: Whether x is multiplied by a number before the addition.
    scaled: bool


class Step(NamedTuple):
    """A step beside the norm, in the same call of a backend, or in its place."""

    #: "quantize", "gate", "norm_gated", "rotate", "log_prob" or a declared operation; of gradients "affine_backward",
    #: "gate_backward", "norm_gated_backward", "log_prob_backward", and so on; and "log_prob_parts", both of parts of
    #: rows. A norm of rows is then the operation that decides the backend of those rows.
    name: str
    #: Of "quantize".
    quantization: Quantization | None = None
    #: Of "rotate": the dtypes of heads, products and results.
    dtypes: tuple[torch.dtype, ...] = ()
    #: The flags of the step that are not at their usual values, each by the step's name, a dot and its own. Of gates
    #: their function, as in "gate.gelu"; "gate_steps" for any of :class:`GateSteps`, "gate_interleaved", and "softcap"
    #: for that function.
    also: tuple[str, ...] = ()

    def with_flags(self, *names: str) -> Step:
        """The step with such flags, each of which is not at its usual value."""
        return self._replace(also=(*self.also, *[f"{self.name}.{name}" for name in names])) if names else self


class RMSNorm(NamedTuple):
    """``rms_norm`` or ``layer_norm``, with a residual after an addition, and with a norm of x before the addition.

    It has everything that decides the backend of a call, and never the number of rows: a row's bits do not depend on
    it. A dtype is None where the operand is absent.
    """

    device: torch.device
    x: torch.dtype
    residual: torch.dtype | None
    #: Of the norm after the addition, where there is one before it too.
    weight: torch.dtype | None
    #: None if no norm follows the addition.
    out: torch.dtype | None
    hidden_size: int
    round_sum: bool
    round_norm: bool
    residual_out: torch.dtype | None
    first: FirstNorm | None = None
    #: None if there is nothing of it; never with a norm before the addition.
    around: AroundNorm | None = None
    #: None if the call is a norm alone.
    step: Step | None = None
    #: Whether the mean is subtracted first; never with a norm before the addition.
    center: bool = False
    #: The names of other flags that are not at their usual values.
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the public function."""
        if self.first is not None:
            return "rms_norm_add" if self.out is None else "rms_norm_add_rms_norm"
        kind = "layer_norm" if self.center else "rms_norm"
        return kind if self.residual is None else f"fused_add_{kind}"

    @property
    def accumulator(self) -> torch.dtype:
        """The type ``A`` of the specification: float64 for a float64 x, else float32."""
        return accumulator(self.x)

    @property
    def features(self) -> tuple[str, ...]:
        """The parts of the operation that a backend must know by name, because they may be younger than the backend."""
        has = {
            "residual_dtype": self.residual_out != self.residual,
            "norm_before_add": self.first is not None,
            "affine": self.around is not None and (self.around.bias is not None or self.around.of_heads),
            "x_scale": self.around is not None and self.around.scaled,
            "center": self.center,
        }
        names = (*[name for name in has if has[name]], *self.also)
        if self.step is not None and self.step.quantization is not None:
            names = (*names, *self.step.quantization.features)
        return names if self.step is None else (*names, self.step.name, *self.step.also)

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that there are, but rstd."""
        operands = (self.x, self.residual, self.weight, self.out, self.residual_out, self.first and self.first.weight)
        return [dtype for dtype in (*operands, self.around and self.around.bias) if dtype is not None]

    def __str__(self) -> str:
        types = {"x": self.x, "residual": self.residual, "weight": self.weight, "out": self.out}
        if self.first is not None:
            before = {"x": self.x, "weight": self.first.weight, "between": self.first.between}
            types = {**before, "residual": self.residual, "next_weight": self.weight, "out": self.out}
        if self.residual_out != self.residual:
            types["residual_out"] = self.residual_out
        if self.around is not None:
            types["bias"] = self.around.bias
        named = ", ".join(f"{name} {str(dtype)[6:]}" for name, dtype in types.items() if dtype is not None)
        return f"{named}, hidden size {self.hidden_size}, on {self.device}"


class KindOfCall(NamedTuple):
    """A declared operation, or its gradient, with everything that decides its backend, and never the number of rows."""

    device: torch.device
    #: The dtype of the rows.
    x: torch.dtype
    hidden_size: int
    step: Step
    #: As those of a norm.
    center: bool = False

    @property
    def name(self) -> str:
        """The operation's in ``KNOWS``."""
        return self.step.name

    @property
    def accumulator(self) -> torch.dtype:
        """The type ``A`` of the specification: float64 for a float64 x, else float32."""
        return accumulator(self.x)

    @property
    def features(self) -> tuple[str, ...]:
        """The operation's name in ``KNOWS``, and those of flags that a backend must know beside it."""
        return (self.step.name, *self.step.also)

    def dtypes(self) -> list[torch.dtype]:
        """The dtype of the rows, alone."""
        return [self.x]

    def __str__(self) -> str:
        return f"x {str(self.x)[6:]}, hidden size {self.hidden_size}, on {self.device}"


#: Everything that decides the backend of a call.
Operation: TypeAlias = RMSNorm | KindOfCall


class Before(NamedTuple):
    """The arguments of a norm of x before the addition; its other flags are those of the norm after the addition."""

    weight: Tensor | None
    eps: float
    between: torch.dtype | None
    #: Whether a norm follows the addition.
    followed: bool


def operation_of(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None = None,
    before: Before | None = None,
    bias: Tensor | None = None,
    x_scale: float = 1.0,
) -> RMSNorm:
    """The operation that a call with these arguments asks for; they have been checked."""
    first, around, out_dtype = None, None, flags.out_dtype or (x.dtype if out is None else out.dtype)
    of_heads = weight is not None and weight.dim() == 2 and weight.shape[0] > 1
    if bias is not None or of_heads or x_scale != 1.0:
        around = AroundNorm(None if bias is None else bias.dtype, _heads_of(weight, bias) > 1, x_scale != 1.0)
    if before is not None:
        first = FirstNorm(None if before.weight is None else before.weight.dtype, before.between or x.dtype)
    return RMSNorm(
        x.device,
        x.dtype,
        None if residual is None else residual.dtype,
        None if weight is None else weight.dtype,
        None if before is not None and not before.followed else out_dtype,
        x.shape[-1],
        flags.round_sum,
        flags.round_norm,
        None if residual is None else flags.residual_dtype or residual.dtype,
        first,
        around,
        center=flags.center,
        also=unusual(flags._asdict(), Flags._field_defaults, _FLAGS_OF_NORMS) if _YOUNGER_FLAGS else (),
    )


#: Whether there are flags of norms that a backend is asked about by name.
_YOUNGER_FLAGS = set(Flags._fields) - set(_FLAGS_OF_NORMS)


def _heads_of(*rows: Tensor | None) -> int:
    """The rows of a weight and a bias, of which all that have more than one have equally many."""
    return max((t.shape[0] for t in rows if t is not None and t.dim() == 2), default=1)


class Forward(NamedTuple):
    """A forward pass. All tensors are on one device, and there is at least one row.

    Row ``i`` of an operand begins at ``(i // inner) * outer stride + i % inner * inner stride`` elements from its first
    element. Where the rows of all operands are one stride apart, ``inner`` is the number of rows.
    """

    #: [..., N].
    x: Tensor
    #: [..., N]; None for the plain ``rms_norm``.
    residual: Tensor | None
    #: [N], contiguous, or None; or [H, N], as the bias.
    weight: Tensor | None
    #: [..., N], receives the normalised rows, rounded to its dtype. It may be x or the residual itself. None if no norm
    #: follows the addition, or if only a quantizer takes the rows.
    out: Tensor | None
    #: [..., N], receives the sum, rounded to its dtype; None without a residual. It may be x or the residual itself.
    residual_out: Tensor | None
    #: [...] of the accumulator type, contiguous, receives ``1 / sqrt(mean(h^2) + eps)``, of h less its mean where the
    #: operation centers; or None.
    rstd: Tensor | None
    operation: RMSNorm
    rows: int
    inner: int
    #: Of x, the residual, out and residual_out; (0, 0) of an operand that is absent.
    strides: tuple[Strides, Strides, Strides, Strides]
    eps: float
    weight_offset: float
    #: [N], contiguous, or None. It is the weight of the norm of x before the addition, if the operation has one.
    first_weight: Tensor | None = None
    #: The eps of that norm.
    first_eps: float = 0.0
    #: [N], or [H, N] where row ``i`` takes row ``i % H``; contiguous, or None. It is added after the weight.
    bias: Tensor | None = None
    #: x is multiplied by it, and rounded to its dtype, before the addition.
    x_scale: float = 1.0

    @property
    def heads(self) -> int:
        """The rows of the weight and the bias; 1 where one row is for all."""
        return _heads_of(self.weight, self.bias)

    @property
    def hidden_size(self) -> int:
        """N, the elements of a row."""
        return self.operation.hidden_size


class Quantize(NamedTuple):
    """Rows to quantize: those of a tensor, or those that a forward pass makes.

    ``inner`` and the strides say where rows lie, as in :class:`Forward`; those of scales and zero points also say how
    far apart the groups of a row are.
    """

    #: [..., N], or None if a forward pass makes the rows.
    y: Tensor | None
    y_strides: Strides
    #: Its ``out`` is None if nobody else wants the rows, which have the dtype of its operation's ``out``.
    norm: Forward | None
    quantization: Quantization
    #: [..., N], receives the numbers.
    out: Tensor
    out_strides: Strides
    #: float32 [..., groups], receives the scales; for ``per="tensor"`` one element, which is read.
    scale: Tensor
    scale_strides: tuple[int, int, int]
    #: int32, the same for zero points; or None.
    zero_point: Tensor | None
    zero_point_strides: tuple[int, int, int]
    hidden_size: int
    rows: int
    inner: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that are quantized."""
        norm: Any = self.norm
        found: torch.dtype = norm.operation.out if self.y is None else self.y.dtype
        return found


class Backward(NamedTuple):
    """A backward pass: the gradients of a forward pass, of which one is wanted at least.

    ``inner`` and ``strides`` say where rows lie, as in :class:`Forward`. The outputs are new and contiguous.
    """

    #: [..., N], the gradient of the normalised rows.
    dy: Tensor
    #: [..., N], the gradient of residual_out, or None.
    d_residual_out: Tensor | None
    #: [..., N], the rows that were normalised, that is residual_out, or x where there was no residual.
    h: Tensor
    #: [...] of the accumulator type, contiguous, from the forward pass.
    rstd: Tensor
    #: [N], contiguous, or None; or [H, N], where row ``i`` takes row ``i % H``.
    weight: Tensor | None
    #: [..., N], receives the gradient of the sum, rounded to its dtype. That is x's dtype, and then also the residual's
    #: gradient if both have one dtype; or the residual's, if x needs no gradient.
    dx: Tensor | None
    #: [..., N], receives the same, rounded to the residual's dtype, if both gradients are wanted and differ; or None.
    dresidual: Tensor | None
    #: [N] or [H, N] of the weight's dtype, receives its gradient, or None.
    dweight: Tensor | None
    #: The operation of the forward pass.
    operation: RMSNorm
    rows: int
    inner: int
    #: Of dy, d_residual_out and h; (0, 0) where it is absent.
    strides: tuple[Strides, Strides, Strides]
    weight_offset: float
    #: [N], or [H, N] as the weight, receives the gradient of a bias, or None.
    dbias: Tensor | None = None

    @property
    def heads(self) -> int:
        """The rows of the weight and the bias; 1 where one row is for all."""
        return _heads_of(self.weight, self.dbias)

    @property
    def hidden_size(self) -> int:
        """N, the elements of a row."""
        return self.operation.hidden_size

    def outputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The memory for the gradients of x, the residual and the weight; None for one that needs none of its own."""
        if self.dx is not None and self.dx.dtype != self.operation.x:
            return None, self.dx, self.dweight
        return self.dx, self.dresidual, self.dweight


class GateSteps(NamedTuple):
    """The optional steps of a gate whose function is silu: docs/spec.md, section 10."""

    #: y is limited to [-limit, limit], and z, or the function's value, to at most limit; 0: they are not. Of the
    #: function "softcap" it is the cap.
    limit: float = 0.0
    #: The function is ``z * sigmoid(alpha * z)``.
    alpha: float = 1.0
    #: Is added to y, after the limit.
    up_offset: float = 0.0
    #: "before": z is limited; "after": the function's value, rounded to ``between``.
    clamp: str = "before"
    #: Whether each product, sum and sigmoid is rounded to ``between``.
    round_steps: bool = False


def gate_steps(flags: Mapping[str, Any]) -> GateSteps:
    """The optional steps among the flags of a gate."""
    return GateSteps(*[flags[name] for name in GateSteps._fields])


@functools.lru_cache(maxsize=128)
def step_of_gate(name: str, activation: str, steps: GateSteps | None = None, interleaved: bool = False) -> Step:
    """A step of this name, of gates, with all that decides whether a backend has it."""
    if activation == "softcap":
        return Step(name, also=("softcap",))
    changed = () if steps is None else unusual(steps._asdict(), GateSteps._field_defaults)
    also = ("gate_steps",) * bool(changed) + ("gate_interleaved",) * interleaved
    younger = [step for step in changed if step not in _STEPS_OF_GATES]
    return Step(name, also=also).with_flags(*(() if activation == "silu" else (activation,)), *younger)


class Call(NamedTuple):
    """A call of a declared operation, or of its gradient. ``inner`` is as in :class:`Forward`.

    Log-probabilities are such operations: docs/spec.md, section 11. Their operands and results are ``logits``, ``ids``,
    ``temperature``, ``out``, ``m``, ``s`` (the greatest number and the sum of exponentials of each row) and
    ``entropy``, all of which each call names. Of a part of a row, "sums" is given ``m``, and writes the sums of
    exponentials of each segment, and as ``entropy`` those that the entropy takes.

    "rotate" has heads of q, or of q and of k: ``q``, ``q_weight``, ``q_out``, ``q_rstd`` (that of each head, or None),
    and the same for k, all of one dtype; ``cos``, ``sin`` and ``positions``. Rows are rows of heads. Its flags are
    ``norm``, ``eps``, ``weight_offset``, ``round_norm`` and ``interleaved``; ``between``, the dtype of the heads that
    are rotated; and ``products``, the dtype that products are rounded to before two are added, or None.

    "norm_gated" has ``x``, ``gate``, ``weight``, ``out`` and ``rstd``, which is wanted or None; of gradients ``d_out``
    instead of ``out``, and ``dx``, ``dgate`` and ``dweight``. With ``norm_before_gate`` the normalised rows are rounded
    to ``between``, or to x's dtype if that is None, before they are multiplied by the function ``activation`` of the
    gate; else nothing is rounded before the norm takes the products, and ``round_norm`` rounds to x's dtype.
    """

    #: The operation's; of log-probabilities "log_softmax", "logsumexp", "selected", "selected_and_entropy" or "sums".
    name: str
    #: Whether these are its gradients: ``dy`` receives that of ``y``, of its dtype, and so on, or it is None. The
    #: results that are kept are then read. Incoming gradients are ``d`` and ``d_entropy``: that of the entropy, or
    #: None; of "log_softmax" of parts of rows, the sums of whole rows of ``d``.
    backward: bool
    #: By the names of the declaration: operands, the rows first, and results; of gradients operands, kept results,
    #: incoming gradients, and those of operands. One that there is not is None. A tensor without strides is contiguous.
    tensors: Mapping[str, Tensor | None]
    #: Of the tensors that have rows: [..., N], and weights, tables and those of samples with a row for each of these.
    strides: Mapping[str, Strides]
    #: But for the dtypes of results.
    flags: Mapping[str, Any]
    hidden_size: int
    rows: int
    inner: int
    #: Where the rows begin in rows of which they may be a part, and the length of those, to which ids belong; or zeros.
    part: tuple[int, int] = (0, 0)
    #: Of gradients whose rows are sums over rows: how many, and how far they are apart, as those of a head are.
    sums: Mapping[str, tuple[int, int]] = MappingProxyType({})

    @property
    def x(self) -> Tensor:
        """The rows, [..., N]: the first tensor that there is."""
        return next(tensor for tensor in self.tensors.values() if tensor is not None)

    def __getattr__(self, name: str) -> Any:
        """A tensor or a flag, by its name."""
        for named in (self.tensors, self.flags):
            if name in named:
                return named[name]
        raise AttributeError(f"the call of {self.name} has no tensor and no flag {name!r}")


#: A backend's ``forward`` takes those of them that it knows, and its ``backward``.
ForwardCall: TypeAlias = Forward | Quantize | Call
BackwardCall: TypeAlias = Backward | Call
AnyCall: TypeAlias = ForwardCall | BackwardCall


def device_of(call: AnyCall) -> torch.device:
    """The device of a call's operands."""
    if isinstance(call, Call):
        return call.x.device
    return call.out.device if isinstance(call, Quantize) else call.operation.device
