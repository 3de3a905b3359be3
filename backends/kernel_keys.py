"""Kinds of calls: they decide which compiled kernel a call takes, and how many programs of it are launched.

For backends that compile kernels: everything counts but the number of rows, strides, and numbers such as ``eps``.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls import c_abi
from fusednorm.calls.c_enums import Limit, Share
from fusednorm.calls.call import (
    AnyCall,
    Backward,
    Call,
    Forward,
    GateSteps,
    Operation,
    Quantize,
    RMSNorm,
    Strides,
    gate_steps,
    with_functions,
)
from fusednorm.calls.gated_norm_calls import norm_of
from fusednorm.reference import norm as reference

_MOST_ALIGNED = Limit.MOST_ALIGNED.value
BLOCKS_IN_LANE = Limit.BLOCKS_IN_LANE.value

#: The names by which these kernels know the functions of gates beside silu.
FUNCTIONS_OF_GATES = with_functions("gate", "gate_backward", "norm_gated")

#: So many rows, at most, have a kernel of their own for products: what tensor cores take at once.
FEW_ROWS = 16

#: Plans of kernels for GPUs say it until our tests have run on one.
UNTRIED = "our tests have not run on a GPU yet"


class Kind(NamedTuple):
    """The parts of a call that decide its kernels: no memory, no number of rows, no numbers that kernels are given.

    ``kind.x`` is the dtype of x, or None if there is no x; ``kind.round_norm`` is that flag.
    """

    #: That of a :class:`Call`; else "norm", "norm_backward", or "quantize", with a norm before it or without.
    name: str
    hidden_size: int
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool
    #: The dtypes, by name, of the operands that decide how a row lies over threads.
    rows: tuple[tuple[str, torch.dtype | None], ...]
    #: Those of the other operands: most have one number for a row.
    others: tuple[tuple[str, torch.dtype | None], ...]
    #: By name. Of a number that kernels are given when they run, whether it is not 0.
    flags: tuple[tuple[str, Any], ...]
    #: Whether it is a :class:`Call` for gradients.
    backward: bool = False

    def __getattr__(self, name: str) -> Any:
        """The dtype of an operand, or a flag, by its name."""
        for found, value in (*self.rows, *self.others, *self.flags):
            if found == name:
                return value
        raise AttributeError(f"the kind of a call of {self.name} has no operand and no flag {name!r}")

    def changed(self, **changes: Any) -> Kind:
        """The kind with other dtypes, flags and fields, by their names."""
        parts = {part: dict(getattr(self, part)) for part in ("rows", "others", "flags")}
        for named in parts.values():
            named |= {name: changes.pop(name) for name in [*changes] if name in named}
        return self._replace(**{part: tuple(named.items()) for part, named in parts.items()} | changes)

    @property
    def accumulator(self) -> torch.dtype:
        """The type that everything is computed in."""
        return torch.float64 if any(getattr(self, name, None) == torch.float64 for name in _DECIDING) else torch.float32

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that decide how a row lies over threads."""
        return [dtype for _, dtype in self.rows if dtype is not None]


#: The operands that have a call computed in float64 where they are float64, as the specification says.
_DECIDING = ("x", "y", "z", "q", "k", "q_out", "k_out", "logits", "rstd")

#: The operands of a :class:`Call` without strides that kernels read or write several numbers of at a time; and those
#: whose rows, if they have any, lie apart.
_VECTORS = frozenset(("weight", "bias", "weight_scale", "q_weight", "k_weight"))
_ALIGNED = _VECTORS | {"q_rstd", "k_rstd"}
_VECTORS_AND_HEADS = _VECTORS | {"q", "k", "q_out", "k_out"}

#: The flags of a :class:`Call` that kernels are given when they run.
_GIVEN = frozenset(("eps", "weight_offset", "softcap", "ignore_index"))

#: The names of the calls of log-probabilities that kernels for GPUs have.
LOG_PROBABILITIES = ("log_softmax", "logsumexp", "selected", "selected_and_entropy")


@functools.lru_cache(maxsize=512)
def kind_of_norm(
    operation: RMSNorm,
    alignment: int = _MOST_ALIGNED,
    two_levels: bool = False,
    rstd: torch.dtype | None = None,
    weight_offset: bool = False,
    **changes: Any,
) -> Kind:
    """The kind of calls of an operation: of most of them, where nothing more is said.

    ``changes``: as :meth:`Kind.changed` takes them.
    """
    first, around = operation.first, operation.around
    kind = Kind(
        name="norm",
        hidden_size=operation.hidden_size,
        alignment=alignment,
        two_levels=two_levels,
        rows=(
            ("x", operation.x),
            ("residual", operation.residual),
            ("weight", operation.weight),
            ("out", operation.out),
            ("residual_out", operation.residual_out),
            ("first_weight", first and first.weight),
            ("bias", around and around.bias),
            ("z", None),
        ),
        others=(("rstd", rstd),),
        flags=(
            ("round_sum", operation.round_sum),
            ("round_norm", operation.round_norm),
            ("weight_offset", weight_offset),
            ("center", operation.center),
            ("norm_before_add", first is not None),
            # The dtype of what passes between two steps: to the addition, or to the gate after the norm.
            ("between", first and first.between),
            ("of_heads", around is not None and around.of_heads),
            ("scaled", around is not None and around.scaled),
            # The function of a gate, and the quantizer that takes the rows; None if there is none.
            ("activation", None),
            ("quantization", None),
            # Whether the quantizer takes the rows of a norm, and whether these are stored too.
            ("normalises", True),
            ("keeps", True),
        ),
    )
    return kind.changed(**changes)


def _of_forward(call: Forward, begins: int = 0, **changes: Any) -> Kind:
    """``begins``: a number whose lowest bit limits the alignment, as addresses do."""
    rows = zip((call.x, call.residual, call.out, call.residual_out), call.strides, strict=True)
    of_heads = ((t, (0, 0 if t is None or t.dim() == 1 else t.shape[1])) for t in (call.weight, call.bias))
    low = begins | _alignment((*rows, *of_heads), (call.rstd, call.first_weight))
    two_levels, rstd, offset = call.inner != call.rows, _dtype(call.rstd), call.weight_offset != 0
    return kind_of_norm(call.operation, low & -low, two_levels, rstd, offset, **changes)


def _of_quantize(call: Quantize) -> Kind:
    """Without a norm the rows are those of x, and of out."""
    changes = {"name": "quantize", "quantization": call.quantization}
    begins = call.out.data_ptr() | call.out_strides[0] | call.out_strides[1]
    # A vector of numbers has as many elements as one of the operand with the narrowest type.
    if call.norm is not None:
        begins *= min(dtype.itemsize for dtype in call.norm.operation.dtypes())
        return _of_forward(call.norm, begins, keeps=call.norm.out is not None, **changes)
    y: Any = call.y
    alone = RMSNorm(y.device, y.dtype, None, None, y.dtype, call.hidden_size, True, False, None)
    low = begins * y.itemsize | _alignment(((y, call.y_strides),), ())
    return kind_of_norm(alone, low & -low, call.inner != call.rows, normalises=False, **changes)


def _of_backward(call: Backward) -> Kind:
    rows = zip((call.dy, call.d_residual_out, call.h), call.strides, strict=True)
    return Kind(
        name="norm_backward",
        hidden_size=call.hidden_size,
        alignment=_alignment(tuple(rows), (call.rstd, call.weight, call.dx, call.dresidual, call.dweight)),
        two_levels=call.inner != call.rows,
        rows=(
            ("dy", call.dy.dtype),
            ("d_total", _dtype(call.d_residual_out)),
            ("h", call.h.dtype),
            ("weight", _dtype(call.weight)),
            ("dx", _dtype(call.dx)),
            ("dresidual", _dtype(call.dresidual)),
        ),
        others=(("dweight", _dtype(call.dweight)), ("rstd", call.rstd.dtype)),
        flags=(("weight_offset", call.weight_offset != 0), ("center", call.operation.center)),
    )


def _of_norm_gated(call: Call) -> Kind:
    norm, z = norm_of(call), call.gate
    return _of_forward(
        norm,
        begins=_alignment(((z, call.strides["gate"]),), ()),
        name="norm_gated",
        activation=call.flags["activation"],
        between=norm.operation.out if call.flags["norm_before_gate"] else None,
        x=call.x.dtype,
        out=call.out.dtype,
        z=z.dtype,
    )


def _of_call(call: Call) -> Kind:
    """The kind of any other operation: its operands and its flags, by the names of the call."""
    if call.name == "norm_gated" and not call.backward:
        return _of_norm_gated(call)
    name, flags = call.name, [(flag, bool(value) if flag in _GIVEN else value) for flag, value in call.flags.items()]
    absent: Container[str] = ()  # a call has them, and no kernel reads them
    passed: Container[str] = ()  # their addresses do not count
    apart = _VECTORS
    if name == "gate":
        flags.append(("packed", _side_by_side(call)))
        if call.flags["interleaved"]:  # a kernel reads y with z
            passed = ("y", "dy")
    elif name == "rotate":
        flags.append(("pairs", 0 if call.cos is None else call.cos.shape[-1]))
        absent, apart = _without_heads(call), _VECTORS_AND_HEADS
    elif name == "int8_linear":
        flags.append(("few", call.rows <= FEW_ROWS))
    rows, others, low = list[Any](), list[Any](), _MOST_ALIGNED
    for operand, tensor in call.tensors.items():
        strides = call.strides.get(operand)
        if tensor is None or operand in absent:
            others.append((operand, None))
        elif operand == "positions" or (strides is None and operand not in _ALIGNED):
            others.append((operand, tensor.dtype))
        else:
            rows.append((operand, tensor.dtype))
            if operand not in passed:
                low |= tensor.data_ptr()
                if strides is not None:
                    low |= (strides[0] | strides[1]) * tensor.itemsize
                if operand in apart and tensor.dim() > 1:
                    low |= tensor.stride(-2) * tensor.itemsize
    two_levels = call.inner != call.rows
    return Kind(name, call.hidden_size, low & -low, two_levels, (*rows,), (*others,), (*flags,), call.backward)


def _without_heads(call: Call) -> list[str]:
    """The names of what belongs to q, or to k, where that has no heads."""
    none = [name for name in "qk" if call.tensors[name] is None or not call.tensors[name].numel()]  # type: ignore[union-attr]
    return [name for name in call.tensors if name[0] in none]


def _side_by_side(call: Call) -> bool:
    """Whether the rows of all operands of a gate lie side by side."""
    size, in_turns = call.hidden_size, call.flags["interleaved"]
    lengths = {name: size * (2 if in_turns and name in ("y", "z", "dy", "dz") else 1) for name in call.strides}
    given = [name for name in call.strides if call.tensors[name] is not None]
    return call.inner == call.rows and all(call.strides[name][1] == lengths[name] for name in given)


#: How the kind of each kind of call is found.
_KINDS: dict[type, Callable[[Any], Kind]] = {
    Forward: _of_forward,
    Quantize: _of_quantize,
    Backward: _of_backward,
    Call: _of_call,
}


def kind_of(call: AnyCall) -> Kind:
    """The kind of a call."""
    return _KINDS[type(call)](call)


def dtypes_of_heads(kind: Kind) -> dict[str, torch.dtype | None]:
    """The dtypes of the heads of a rotation, which q and k share: "x", "out", "weight" and "rstd"."""
    of = "q" if kind.q is not None else "k"
    return {"x": getattr(kind, of), **{name: getattr(kind, f"{of}_{name}") for name in ("out", "weight", "rstd")}}


def is_capped(kind: Kind) -> bool:
    """Whether log-probabilities have a softcap, which not each of their calls may have."""
    return bool(dict(kind.flags).get("softcap"))


def constants_of_quantizer(kind: Kind) -> dict[str, str | int]:
    """The constants that kernels for GPUs have compiled in for a quantizer; its limits are arguments of kernels."""
    quantization = kind.quantization
    group, zero_point = quantization.group(kind.hidden_size), quantization.zero_point
    return {
        "NUMBER": {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(quantization.dtype, "whole"),
        "PER": 0 if group == kind.hidden_size else group,
        "GIVEN": quantization.per == "tensor",
        "SCALE_BY": quantization.scale_by,
        "POWER_OF_TWO": quantization.round_scale is not None,
        "APPLY": quantization.apply,
        "MULTIPLIER": quantization.returns == "multiplier",
        "ZERO_POINT": "plus_128" if zero_point == 128 else zero_point or "none",
    }


@dataclass(frozen=True)
class StepsOfGate:
    """The optional steps of a gate as its kernel has them: its numbers are compiled in."""

    #: "before": z is limited, "after": the function's value is; either limits y too. "": there is no limit.
    clamp: str
    #: The limits, as the dtypes of these rows have them, and numbers of the type of the computation.
    y_limit: float
    z_limit: float
    value_limit: float
    alpha: float
    up_offset: float
    round_steps: bool

    @property
    def function(self) -> str:
        """The one that the kernel has: "sigmoid" where that is rounded before z is multiplied."""
        if self.alpha == 1:
            return "silu"
        return "sigmoid" if self.round_steps else "swish"


def steps_of_gate(kind: Kind) -> StepsOfGate | None:
    """The optional steps of a gate with their numbers; None if there are none."""
    steps, wide = gate_steps(dict(kind.flags)), kind.accumulator
    if steps._replace(clamp="before") == GateSteps():
        return None

    def rounded(number: float, dtype: torch.dtype = wide) -> float:
        return torch.tensor(number, dtype=torch.float64, device="cpu").to(wide).to(dtype).item()

    limit, alpha, up_offset, clamp, round_steps = steps
    return StepsOfGate(
        clamp if limit else "",
        rounded(limit, kind.y or wide),
        rounded(limit, kind.z),
        rounded(limit, kind.between or wide),
        rounded(alpha),
        rounded(up_offset),
        round_steps,
    )


def multiplies_int8(operation: Operation) -> bool:
    """Whether products of int8 are asked for, which no layout of rows over threads is for."""
    return operation.step is not None and operation.step.name == "int8_linear"


#: How launchers take calls: some after one that says on which GPU the operands are.
PACKED: dict[type, Callable[..., bytes]] = c_abi.PACKED | {Call: c_abi.pack_alone}


def programs(share: Share, per_program: int, rows: int, hidden_size: int, block: int, blocks: int) -> int:
    """How many programs of a kernel are launched; the last two numbers are of a backward pass."""
    if share == Share.ROWS:
        return -(-rows // per_program)
    if share == Share.ELEMENTS:
        return -(-rows * hidden_size // per_program)
    if share == Share.BLOCKS:
        return -(-blocks // max(per_program // block, 1))
    if share == Share.COLUMNS_OF_SUMS:
        per_program //= ceiling(-(-blocks // BLOCKS_IN_LANE))
    return -(-hidden_size // per_program) * (blocks if share == Share.COLUMNS_OF_BLOCKS else 1)


def blocks_of(rows: int) -> tuple[int, int]:
    """Rows of a block, and blocks, of the specification's ``rowsum``."""
    block = -(-rows // min(rows, reference.ROW_BLOCKS))
    return block, -(-rows // block)


def scratch_size(rows: int, hidden_size: int, center: bool) -> int:
    """Numbers of the blocks' shares of the weight's gradient, and after them of the means of rows that are centered."""
    return blocks_of(rows)[1] * hidden_size + (rows if center else 0)


def scratch_of(call: Backward) -> Tensor | None:
    """Room for so many numbers; None where the weight's gradient is not wanted."""
    if call.dweight is None:
        return None
    size = scratch_size(call.rows, call.operation.hidden_size, call.operation.center)
    return torch.empty(size, dtype=call.rstd.dtype, device=call.h.device)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def ceiling(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def fuses(group: int, hidden_size: int) -> bool:
    """Whether kernels for GPUs quantize groups of this length: powers of two within a segment, and whole rows."""
    return group == hidden_size or (group == ceiling(group) and group <= reference.SEGMENT)


def check_addresses(call: AnyCall) -> None:
    """Raises where an operand begins between two elements, where a GPU reads nothing.

    Raises:
        ValueError: it names the operand.
    """
    if isinstance(call, Quantize) and call.norm is not None:
        check_addresses(call.norm)
    named = list(zip(call._fields, call, strict=True))
    if isinstance(call, Call):
        named += call.tensors.items()
    for name, tensor in named:
        if isinstance(tensor, Tensor) and tensor.data_ptr() % tensor.itemsize:
            raise ValueError(
                f"{name} begins at an address that is no multiple of {tensor.itemsize}, between two elements, which "
                f"GPUs cannot read; pass {name}.clone()"
            )


def _alignment(rows: tuple[tuple[Tensor | None, Strides], ...], others: tuple[Tensor | None, ...]) -> int:
    """The power of two of bytes that all rows (tensors with their strides in elements) and all others begin at."""
    low = _MOST_ALIGNED
    for tensor, (outer_stride, stride) in rows:
        if tensor is not None:
            low |= tensor.data_ptr() | (outer_stride | stride) * tensor.element_size()
    for tensor in others:
        if tensor is not None:
            low |= tensor.data_ptr()
    return low & -low


def lacking(package: object, used: Mapping[str, tuple[str, ...]]) -> str:
    """Which of these attributes a package does not have, in words; empty if it has them all.

    ``used``: the attributes' names, with dots, and the names of the arguments that they must take. Whoever calls a name
    that its package does not document asks for it here before the first call: a new version without it is then a
    reason against the backend, and no error in the middle of a user's program.
    """

    def there(name: str, arguments: tuple[str, ...]) -> bool:
        try:
            found = operator.attrgetter(name)(package)
            return not arguments or set(arguments) <= set(inspect.signature(found).parameters)
        except (AttributeError, TypeError, ValueError):  # missing; not callable; callable, but does not say with what
            return False

    missing = {name: arguments for name, arguments in used.items() if not there(name, arguments)}
    return ", ".join(name + (f"({', '.join(given)})" if given else "") for name, given in missing.items())
