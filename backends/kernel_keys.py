"""Kinds of calls: they decide which compiled kernel a call takes, and how many programs of it are launched.

For backends that compile kernels: everything counts but the number of rows, strides, and numbers such as ``eps``.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fusednorm.calls import c_abi
from fusednorm.calls.c_enums import Limit, Share
from fusednorm.calls.call import (
    AnyCall,
    AroundNorm,
    Backward,
    Call,
    FirstNorm,
    Forward,
    GateSteps,
    Operation,
    Quantize,
    RMSNorm,
    Strides,
    accumulator,
    gate_steps,
    with_functions,
)
from fusednorm.calls.gated_norm_calls import norm_of
from fusednorm.calls.quantization import Quantization
from fusednorm.calls.rotation_calls import heads_of
from fusednorm.reference import norm as reference

_MOST_ALIGNED = Limit.MOST_ALIGNED.value
BLOCKS_IN_LANE = Limit.BLOCKS_IN_LANE.value

#: The names by which these kernels know the functions of gates beside silu.
FUNCTIONS_OF_GATES = with_functions("gate", "gate_backward", "norm_gated")

#: So many rows, at most, have a kernel of their own for products: what tensor cores take at once.
FEW_ROWS = 16

#: Plans of kernels for GPUs say it until our tests have run on one.
UNTRIED = "our tests have not run on a GPU yet"


class QuantizerKind(NamedTuple):
    """The parts of a quantizer that decide its kernel, beside the rows that it takes."""

    #: Its numbers, floors and limits are arguments of kernels.
    quantization: Quantization
    #: Whether the rows come from a norm, which the same kernel computes.
    normalises: bool
    #: Whether these rows are stored too.
    keeps: bool

    def constants(self, hidden_size: int) -> dict[str, str | int]:
        """The constants that kernels for GPUs have compiled in for it."""
        quantization = self.quantization
        group, zero_point = quantization.group(hidden_size), quantization.zero_point
        return {
            "NUMBER": {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(quantization.dtype, "whole"),
            "PER": 0 if group == hidden_size else group,
            "GIVEN": quantization.per == "tensor",
            "SCALE_BY": quantization.scale_by,
            "POWER_OF_TWO": quantization.round_scale is not None,
            "APPLY": quantization.apply,
            "MULTIPLIER": quantization.returns == "multiplier",
            "ZERO_POINT": "plus_128" if zero_point == 128 else zero_point or "none",
        }


class GateOfNorm(NamedTuple):
    """The parts of a gate that decide the kernel of a norm with it."""

    activation: str
    z: torch.dtype
    #: The dtype to which rows are rounded between both; None where the gate comes first.
    between: torch.dtype | None


class ForwardKind(NamedTuple):
    """The parts of a forward pass that decide its kernel."""

    x: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    out: torch.dtype | None
    residual_out: torch.dtype | None
    hidden_size: int
    round_sum: bool
    round_norm: bool
    #: Whether rstd is wanted.
    rstd: bool
    #: Whether there is a weight offset.
    offset: bool
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool = False
    #: The norm of x before the addition.
    first: FirstNorm | None = None
    #: A bias, rows of heads and a scaled x.
    around: AroundNorm | None = None
    #: The quantizer that takes the rows.
    quantizer: QuantizerKind | None = None
    #: The gate after the norm, or before it.
    gate: GateOfNorm | None = None
    #: Whether rows are normalised less their means.
    center: bool = False

    @classmethod
    def of(cls, call: Forward) -> ForwardKind:
        """The kind of a call."""
        operation = call.operation
        rows = zip((call.x, call.residual, call.out, call.residual_out), call.strides, strict=True)
        of_heads = ((t, (0, 0 if t is None or t.dim() == 1 else t.shape[1])) for t in (call.weight, call.bias))
        return cls(
            *(operation.x, operation.residual, operation.weight, operation.out, operation.residual_out),
            operation.hidden_size,
            operation.round_sum,
            operation.round_norm,
            call.rstd is not None,
            call.weight_offset != 0,
            _alignment((*rows, *of_heads), (call.rstd, call.first_weight)),
            call.inner != call.rows,
            operation.first,
            operation.around,
            center=operation.center,
        )

    @classmethod
    def of_quantizer(cls, call: Quantize) -> ForwardKind:
        """The kind of a call that quantizes rows. Without a norm these are those of x, and of out."""
        if call.norm is not None:
            kind = cls.of(call.norm)
        else:
            assert call.y is not None
            alone = (call.y.dtype, None, None, call.y.dtype, None, call.hidden_size, True, False, False, False)
            kind = cls(*alone, _alignment(((call.y, call.y_strides),), ()), call.inner != call.rows)
        # A vector of numbers has as many elements as one of the operand with the narrowest type.
        begins = call.out.data_ptr() | call.out_strides[0] | call.out_strides[1]
        low = kind.alignment | begins * min(dtype.itemsize for dtype in kind.dtypes())
        keeps = call.norm is None or call.norm.out is not None
        quantizer = QuantizerKind(call.quantization, call.norm is not None, keeps)
        return kind._replace(alignment=low & -low, quantizer=quantizer)

    @classmethod
    def of_gated(cls, call: Call) -> ForwardKind:
        """The kind of a call with a norm and a gate."""
        norm, z = norm_of(call), call.gate
        kind = cls.of(norm)
        low = kind.alignment | _alignment(((z, call.strides["gate"]),), ())
        between = norm.operation.out if call.flags["norm_before_gate"] else None
        gate = GateOfNorm(call.flags["activation"], z.dtype, between)
        return kind._replace(x=call.x.dtype, out=call.out.dtype, alignment=low & -low, gate=gate)

    @classmethod
    def of_operation(cls, operation: RMSNorm, alignment: int = _MOST_ALIGNED) -> ForwardKind:
        """The kind of most calls of an operation."""
        dtypes = (operation.x, operation.residual, operation.weight, operation.out, operation.residual_out)
        flags = (operation.round_sum, operation.round_norm, False, False)
        kind = cls(*dtypes, operation.hidden_size, *flags, alignment)
        return kind._replace(first=operation.first, around=operation.around, center=operation.center)

    @property
    def accumulator(self) -> torch.dtype:
        """The type that everything is computed in."""
        return accumulator(self.x)

    def operands(self) -> dict[str, torch.dtype | None]:
        """The dtypes of the operands, but rstd, by their names in kernels."""
        others = {"first_weight": self.first and self.first.weight, "bias": self.around and self.around.bias}
        return {**dict(zip(self._fields, self[:5], strict=False)), **others, "z": self.gate and self.gate.z}

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that there are, but rstd."""
        return [dtype for dtype in self.operands().values() if dtype is not None]


class BackwardKind(NamedTuple):
    """The parts of a backward pass that decide its kernels."""

    dy: torch.dtype
    #: Of the gradient of residual_out.
    d_total: torch.dtype | None
    h: torch.dtype
    weight: torch.dtype | None
    dx: torch.dtype | None
    dresidual: torch.dtype | None
    dweight: torch.dtype | None
    #: The type that everything is computed in, and the dtype of rstd.
    accumulator: torch.dtype
    hidden_size: int
    #: Whether there is a weight offset.
    offset: bool
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool = False
    #: Whether rows were normalised less their means.
    center: bool = False

    @classmethod
    def of(cls, call: Backward, partial: Tensor | None) -> BackwardKind:
        """The kind of a pass with this scratch."""
        rows = zip((call.dy, call.d_residual_out, call.h), call.strides, strict=True)
        others = (call.rstd, call.weight, call.dx, call.dresidual, partial, call.dweight)
        return cls(
            call.dy.dtype,
            _dtype(call.d_residual_out),
            call.h.dtype,
            _dtype(call.weight),
            _dtype(call.dx),
            _dtype(call.dresidual),
            _dtype(call.dweight),
            call.rstd.dtype,
            call.operation.hidden_size,
            call.weight_offset != 0,
            _alignment(tuple(rows), others),
            call.inner != call.rows,
            call.operation.center,
        )

    def operands(self) -> dict[str, torch.dtype | None]:
        """The dtypes of the operands, but rstd and the scratch, by their names in kernels."""
        return dict(zip(self._fields, self[:7], strict=False))

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands with a row for each row of the call, and of the weight."""
        return [dtype for dtype in self[:6] if dtype is not None]


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


class GateKind(NamedTuple):
    """The parts of a gate, or of its backward pass, that decide its kernel."""

    #: The gradient of the products; None in a forward pass.
    d: torch.dtype | None
    #: None where the function of z is not multiplied.
    y: torch.dtype | None
    z: torch.dtype
    #: The products, or the gradient of y.
    out: torch.dtype | None
    #: The gradient of z.
    dz: torch.dtype | None
    activation: str
    between: torch.dtype | None
    hidden_size: int
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool = False
    #: Whether the rows of all operands lie side by side.
    packed: bool = True
    steps: GateSteps = GateSteps()
    #: Whether z and y take turns in memory, and their gradients too.
    interleaved: bool = False

    @classmethod
    def of(cls, call: Call) -> GateKind:
        """The kind of a call."""
        flags = call.flags

        def of_name(name: str) -> tuple[Tensor | None, Strides]:
            tensor = call.tensors.get(name)
            return tensor, (0, 0) if tensor is None else call.strides[name]

        # Where y takes turns with z, a kernel reads it with z, whose address is the one that counts.
        in_turns = flags["interleaved"]
        names = ["d", "y", "z", "dy", "dz"] if call.backward else ["", "y", "z", "out", ""]
        if in_turns:
            names = ["d", "z", "z", "dz", "dz"] if call.backward else ["", "z", "z", "out", ""]
        rows = tuple(map(of_name, names))
        alone = (0,) if call.backward else (0, 3, 4)
        lengths = (call.hidden_size * (2 if in_turns and i not in alone else 1) for i in range(len(rows)))
        d, y_dtype, _, first, second = (_dtype(tensor) for tensor, _ in rows)
        one_level = call.inner == call.rows
        side_by_side = all(
            tensor is None or stride == length for (tensor, (_, stride)), length in zip(rows, lengths, strict=True)
        )
        return cls(
            d=d,
            y=y_dtype,
            z=call.z.dtype,
            out=first,
            dz=second,
            activation=flags["activation"],
            between=flags["between"],
            hidden_size=call.hidden_size,
            alignment=_alignment(rows, ()),
            two_levels=not one_level,
            packed=one_level and side_by_side,
            steps=gate_steps(flags),
            interleaved=in_turns,
        )

    @property
    def accumulator(self) -> torch.dtype:
        """The type that everything is computed in."""
        return accumulator(torch.promote_types(self.y or self.z, self.z))

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that there are."""
        return [dtype for dtype in self[:5] if dtype is not None]

    def compiled_steps(self) -> StepsOfGate | None:
        """The optional steps with their numbers; None if there are none."""
        if self.steps._replace(clamp="before") == GateSteps():
            return None
        wide = self.accumulator

        def rounded(number: float, dtype: torch.dtype = wide) -> float:
            return torch.tensor(number, dtype=torch.float64, device="cpu").to(wide).to(dtype).item()

        limit, alpha, up_offset, clamp, round_steps = self.steps
        return StepsOfGate(
            clamp if limit else "",
            rounded(limit, self.y or wide),
            rounded(limit, self.z),
            rounded(limit, self.between or wide),
            rounded(alpha),
            rounded(up_offset),
            round_steps,
        )


class RotationKind(NamedTuple):
    """The parts of a rotation that decide its kernel."""

    x: torch.dtype
    out: torch.dtype
    between: torch.dtype
    products: torch.dtype | None
    cos: torch.dtype | None
    sin: torch.dtype | None
    weight: torch.dtype | None
    #: Of positions, if there are any.
    position: torch.dtype | None
    normalised: bool
    round_norm: bool
    offset: bool
    rstd: bool
    interleaved: bool
    size: int
    #: Pairs of a head that are rotated.
    pairs: int
    #: Bytes of which every head and every row of a table begins at a multiple.
    alignment: int
    two_levels: bool = False

    @classmethod
    def of(cls, call: Call) -> RotationKind:
        """The kind of a call, whose weights have one dtype."""
        sets, flags = heads_of(call), call.flags
        first, cos, sin, positions = sets[0], *map(call.tensors.__getitem__, ("cos", "sin", "positions"))
        low = _MOST_ALIGNED
        for heads in sets:
            pairs = ((heads.x, heads.x_strides), (heads.out, heads.out_strides))
            rows = tuple((tensor, (outer | stride, of_heads)) for tensor, (outer, stride, of_heads) in pairs)
            low |= _alignment((*rows, (heads.weight, (0, heads.weight_stride))), (heads.rstd,))
        low |= _alignment(
            tuple((t, call.strides[name]) for name, t in (("cos", cos), ("sin", sin)) if t is not None), ()
        )
        return cls(
            x=first.x.dtype,
            out=first.out.dtype,
            between=flags["between"],
            products=flags["products"],
            cos=_dtype(cos),
            sin=_dtype(sin),
            weight=_dtype(first.weight),
            position=_dtype(positions),
            normalised=flags["norm"],
            round_norm=flags["norm"] and flags["round_norm"],
            offset=flags["norm"] and flags["weight_offset"] != 0,
            rstd=first.rstd is not None,
            interleaved=flags["interleaved"],
            size=call.hidden_size,
            pairs=0 if cos is None else cos.shape[-1],
            alignment=low & -low,
            two_levels=call.inner != call.rows,
        )

    @property
    def accumulator(self) -> torch.dtype:
        """The type that everything is computed in."""
        return accumulator(torch.promote_types(self.x, self.out))

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that there are, but positions and rstd."""
        return [dtype for dtype in (self.x, self.out, self.cos, self.sin, self.weight) if dtype is not None]


class LogProbKind(NamedTuple):
    """The parts of log-probabilities, or of their gradient, that decide their kernel."""

    name: str
    logits: torch.dtype
    #: Of the results, or of the gradient of logits.
    out: torch.dtype
    ids: torch.dtype | None
    temperature: torch.dtype | None
    #: The gradient of the results; None in a forward pass.
    d: torch.dtype | None
    d_entropy: torch.dtype | None
    #: Whether there is a softcap.
    capped: bool
    hidden_size: int
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool = False

    @classmethod
    def of(cls, call: Call) -> LogProbKind:
        """The kind of a call."""
        given = call.tensors
        out = given["dlogits" if call.backward else "out"]
        assert out is not None
        return cls(
            name=call.name,
            logits=call.x.dtype,
            out=out.dtype,
            ids=_dtype(given.get("ids")),
            temperature=_dtype(given.get("temperature")),
            d=_dtype(given.get("d")),
            d_entropy=_dtype(given.get("d_entropy")),
            capped=bool(call.flags.get("softcap")),
            hidden_size=call.hidden_size,
            alignment=_alignment(tuple((given[name], lies) for name, lies in call.strides.items()), ()),
            two_levels=call.inner != call.rows,
        )

    @property
    def accumulator(self) -> torch.dtype:
        """The type that everything is computed in."""
        return accumulator(self.logits)

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that have rows."""
        whole = self.name == "log_softmax"
        rows = (self.logits, self.out if whole or self.d is not None else None, self.d if whole else None)
        return [dtype for dtype in rows if dtype is not None]


class ProductKind(NamedTuple):
    """The parts of products of int8 that decide their kernel."""

    bias: torch.dtype | None
    #: Whether there are zero points.
    zero_point: bool
    out: torch.dtype
    #: Whether one tile has all rows.
    few: bool
    #: A number that divides the hidden size.
    divisor: int
    #: Bytes of which every row of every operand begins at a multiple.
    alignment: int
    #: Whether rows lie in two levels.
    two_levels: bool = False

    @classmethod
    def of(cls, call: Call) -> ProductKind:
        """The kind of a call."""
        given = call.tensors
        rows = [(given[name], call.strides[name]) for name in ("q", "out")]
        others = given["bias"], given["weight_scale"]
        return cls(
            bias=_dtype(given["bias"]),
            zero_point=given["zero_point"] is not None,
            out=call.out.dtype,
            few=call.rows <= FEW_ROWS,
            divisor=math.gcd(call.hidden_size, 16),
            alignment=_alignment((*rows, (given["weight"], (0, call.weight.stride(0)))), others),
            two_levels=call.inner != call.rows,
        )

    @property
    def accumulator(self) -> torch.dtype:
        """The type that sums are scaled in."""
        return torch.float32

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the operands that are no whole numbers and no scales."""
        return [dtype for dtype in (self.out, self.bias) if dtype is not None]


def multiplies_int8(operation: Operation) -> bool:
    """Whether products of int8 are asked for, which no layout of rows over threads is for."""
    return operation.step is not None and operation.step.name == "int8_linear"


AnyKind: TypeAlias = ForwardKind | GateKind | RotationKind | LogProbKind | ProductKind

#: The kinds of declared operations, by their names; those of others are log-probabilities.
_OF_NAMES: dict[str, Callable[[Call], AnyKind]] = {
    "gate": GateKind.of,
    "norm_gated": ForwardKind.of_gated,
    "rotate": RotationKind.of,
    "int8_linear": ProductKind.of,
}

#: The kinds of calls that one kernel runs.
_KINDS: dict[type, Callable[..., AnyKind]] = {
    Forward: ForwardKind.of,
    Quantize: ForwardKind.of_quantizer,
    Call: lambda call: _OF_NAMES.get(call.name, LogProbKind.of)(call),
}

#: How launchers take calls: some after one that says on which GPU the operands are.
PACKED: dict[type, Callable[..., bytes]] = c_abi.PACKED | {Call: c_abi.pack_alone}


def kind_of(call: AnyCall) -> AnyKind:
    """The kind of a call that one kernel runs."""
    return _KINDS[type(call)](call)


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
