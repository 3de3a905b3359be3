"""Which CUDA kernel a call takes: how its rows lie over threads, and what is compiled into the kernel.

How a row lies over threads depends on its length and its dtypes only, and decides no bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusednorm.backends.kernel_keys import (
    BLOCKS_IN_LANE,
    LOG_PROBABILITIES,
    Kind,
    ceiling,
    constants_of_quantizer,
    dtypes_of_heads,
    is_capped,
    steps_of_gate,
)
from fusednorm.calls.c_enums import Share
from fusednorm.reference import norm as reference

#: The longest rows: the sums of their segments have to fit 32 KiB of shared memory.
LONGEST = 4096 * reference.SEGMENT

#: Warps of a block, each with a segment of a row in its registers, at most: 128 registers are left for a thread.
_MOST_WARPS = 16

#: Blocks that every GPU with clusters runs together.
_MOST_BLOCKS = 8

#: Bytes of shared memory that a block may have, on GPUs without clusters, by compute capability.
_SHARED = {75: 65536, 80: 166912, 86: 101376, 87: 166912, 88: 101376, 89: 101376}

#: Warps of a block of rows that fit a warp.
_WARPS = 4

#: Segments of the longest rows whose gradients and share of the weight's fit the registers together.
_MOST_AT_ONCE = 8

#: Bytes of shared memory for the extremes of the warps of a block that quantizes a row.
_EXTREMES = 2 * 4 * _MOST_WARPS

_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", None: "none"}


def _types(**dtypes: torch.dtype | None) -> dict[str, str | int]:
    """Constants of the sources: the types of operands."""
    return {f"{name.upper()}_TYPE": _NAMES[dtype] for name, dtype in dtypes.items()}


def _flags(**flags: bool) -> dict[str, str | int]:
    """Constants of the sources that are 0 or 1."""
    return {name: int(flag) for name, flag in flags.items()}


def _bits(number: float, dtype: torch.dtype) -> str:
    """The bits of a number that a type has, as the sources have them; those of +0 for both zeros."""
    form = {torch.float32: ("<f", "<I"), torch.float64: ("<d", "<Q")}[dtype]
    return hex(struct.unpack(form[1], struct.pack(form[0], number + 0.0))[0])


@dataclass(frozen=True)
class Layout:
    """How rows lie over threads; csrc/row.cuh says what each number means there."""

    vector: int
    aligned: int
    row: int
    warps: int
    cluster: int
    blocks_row: bool
    full: bool
    #: Whether rows are too long for registers.
    wide: bool = False

    @classmethod
    def of(
        cls,
        hidden_size: int,
        dtypes: list[torch.dtype],
        alignment: int,
        capability: int,
        most_warps: int = _MOST_WARPS,
    ) -> Layout:
        """The layout for rows of operands of these dtypes that begin at multiples of ``alignment`` bytes."""
        smallest = min(dtype.itemsize for dtype in dtypes)
        at_once = min(alignment, 32 if capability >= 100 else 16)
        vector = math.gcd(max(at_once // smallest, 1), hidden_size)
        aligned = vector * smallest
        segments = -(-hidden_size // reference.SEGMENT)
        whole = hidden_size == segments * reference.SEGMENT
        if torch.float64 in dtypes:  # a segment of it takes all registers that there are
            return cls(vector, aligned, reference.SEGMENT, min(segments, most_warps // 2), 1, True, whole, True)
        if segments == 1:
            row = ceiling(max(hidden_size, 32))
            return cls(vector, aligned, row, _WARPS, 1, False, row == hidden_size)
        cluster = ceiling(-(-segments // most_warps))
        if cluster > (_MOST_BLOCKS if capability >= 90 else 1):
            return cls(vector, aligned, reference.SEGMENT, most_warps, 1, True, whole, True)
        warps = -(-segments // cluster)
        whole = whole and segments == warps * cluster
        return cls(vector, aligned, reference.SEGMENT, warps, cluster, True, whole)

    @property
    def rows(self) -> int:
        """Rows that a block takes at a time."""
        return 1 if self.blocks_row else self.warps * (reference.SEGMENT // self.row)

    def defines(self) -> dict[str, int]:
        """The constants of the sources."""
        names = ("vector", "aligned", "row", "warps", "cluster", "blocks_row", "full")
        return {name.upper(): int(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel."""

    #: The function, and the file in csrc/ that has it.
    kernel: str
    #: Constants of the sources.
    defines: tuple[tuple[str, str | int], ...]
    #: Threads of a block, and blocks of a program.
    threads: int
    cluster: int
    #: The share of a program.
    share: Share
    per_program: int
    #: Bytes of shared memory of a block, beyond what the sources declare.
    shared: int = 0

    def identity(self) -> tuple[Any, ...]:
        """Equal for variants that are compiled alike."""
        return self.kernel, self.defines, self.shared


def forward_variant(kind: Kind, capability: int) -> Variant:
    """The kernel for a kind of call on GPUs of a compute capability (times ten)."""
    layout = Layout.of(kind.hidden_size, kind.dtypes(), kind.alignment, capability)
    quantizes, gated = kind.quantization is not None, kind.activation is not None
    around = kind.bias is not None or kind.of_heads or kind.scaled
    defines: dict[str, str | int] = {
        "ACCUMULATOR": _NAMES[kind.accumulator],
        **_types(**dict(kind.rows), between=kind.between),
        "GATED": 0 if not gated else 2 if kind.between is None else 1,
        **_flags(
            NORM_BEFORE_ADD=kind.norm_before_add,
            CENTER=kind.center,
            AROUND=around or quantizes or gated,
            QUANTIZED=quantizes,
            KEEPS=kind.keeps,
        ),
        **_flags(OF_HEADS=kind.of_heads, SCALED=kind.scaled, RSTD=kind.rstd is not None, OFFSET=kind.weight_offset),
        **_flags(ROUND_SUM=kind.round_sum, ROUND_NORM=kind.round_norm, TWO_LEVELS=kind.two_levels),
        **layout.defines(),
    }
    if gated:
        defines["ACTIVATION"] = kind.activation.upper()
    if quantizes:
        constants = constants_of_quantizer(kind)
        defines |= {name: value.upper() if isinstance(value, str) else int(value) for name, value in constants.items()}
    shared = 0
    if layout.wide:  # KEPT: the second pass recomputes the row (0), or reads it from memory (1) or shared memory (2)
        row, gate_first = kind.x, gated and kind.between is None
        if kind.residual_out is not None:
            row = kind.residual_out if kind.round_sum or kind.out is None else kind.accumulator
        if gate_first:
            row = kind.accumulator
        defines["KEPT"] = int(not gate_first and (kind.residual_out is None or row == kind.residual_out))
        sums = defines["SEGMENTS"] = _padded_segments(kind.hidden_size)
        needed = kind.hidden_size * row.itemsize + sums * kind.accumulator.itemsize
        needed += _EXTREMES if quantizes else 0
        if kind.out is not None and kind.normalises and needed <= _SHARED.get(capability, 0):
            defines["KEPT"], shared = 2, kind.hidden_size * row.itemsize
    kernel = "forward" if kind.normalises else "quantize"
    if layout.wide:
        kernel += "_wide"
    launch = (layout.warps * 32, layout.cluster, Share.ROWS, layout.rows, shared)
    return Variant(kernel, tuple(defines.items()), *launch)


#: The types that each kernel of the backward pass knows. It is compiled once for all others.
_OF_SHARES = ("dy", "h")
_OF_ROWS = (*_OF_SHARES, "d_total", "weight", "dx", "dresidual")
_OF_SUMS = ("dweight",)


def backward_variants(kind: Kind, capability: int) -> dict[str, Variant]:
    """The kernels for a kind of backward pass, by what they do, in the order in which they are launched.

    ``both``: the gradients of the rows and the blocks' shares of the weight's; ``rows`` and ``shares``: the same apart;
    ``sums``: the shares added up. ``rows`` also has the means that ``shares`` needs of rows that are centered.
    """
    dtypes = [*kind.dtypes(), kind.accumulator]
    layout = Layout.of(kind.hidden_size, dtypes, kind.alignment, capability)
    loaded = sum(dtype.itemsize for dtype in (kind.dy, kind.d_total, kind.h) if dtype is not None)
    small = loaded <= 6 and layout.aligned >= 4  # elements of 2 bytes alone take a register each, as those of 4 do
    if not small:
        layout = Layout.of(kind.hidden_size, dtypes, kind.alignment, capability, _MOST_WARPS // 2)
    operands = dict(kind.rows) | {"dweight": kind.dweight}

    def variant(
        kernel: str,
        used: tuple[str, ...],
        warps: int,
        share: Share,
        per_program: int,
        more: dict[str, int],
        shared: int = 0,
    ) -> Variant:
        types = _types(**{name: dtype if name in used else None for name, dtype in operands.items()})
        numbers = {"OFFSET": int(kind.weight_offset), "TWO_LEVELS": int(kind.two_levels), "CENTER": int(kind.center)}
        numbers |= {**layout.defines(), "WARPS": warps}
        numbers |= more
        defines: tuple[tuple[str, str | int], ...] = (
            ("ACCUMULATOR", _NAMES[kind.accumulator]),
            *types.items(),
            *numbers.items(),
        )
        return Variant(kernel, defines, warps * 32, numbers["CLUSTER"], share, per_program, shared)

    variants = {}
    gradients = bool(kind.dx or kind.dresidual)
    in_registers = kind.accumulator != torch.float64 and kind.hidden_size <= _MOST_AT_ONCE * reference.SEGMENT
    if kind.dweight and gradients and in_registers:
        if not layout.blocks_row:
            layout = replace(layout, warps=2 * _WARPS)
        launch = (layout.warps, Share.BLOCKS, layout.rows)
        variants["both"] = variant("backward_blocks", _OF_ROWS, *launch, {"AHEAD": int(small)})
    else:
        launch = (layout.warps, Share.ROWS, layout.rows)
        if (gradients or kind.center) and layout.wide:  # the second pass finds dy and h in shared memory, if they fit
            sums = _padded_segments(kind.hidden_size)
            row = kind.hidden_size * (kind.dy.itemsize + kind.h.itemsize)
            fits = row + (1 + kind.center) * sums * kind.accumulator.itemsize <= _SHARED.get(capability, 0)
            more = {"SEGMENTS": sums, "KEPT": int(fits)}
            variants["rows"] = variant("backward_wide", _OF_ROWS, *launch, more, row if fits else 0)
        elif gradients or kind.center:
            variants["rows"] = variant("backward_rows", _OF_ROWS, *launch, {})
        if kind.dweight:
            launch = (_WARPS, Share.COLUMNS_OF_BLOCKS, _WARPS * 32 * layout.vector)
            more = {"CLUSTER": 1, "ROW": 1024, "FULL": 0, "OFFSET": 0}
            variants["shares"] = variant("weight_blocks", _OF_SHARES, *launch, more)
    if kind.dweight:
        warps = reference.ROW_BLOCKS // BLOCKS_IN_LANE
        more = {"IN_LANE": BLOCKS_IN_LANE, "VECTOR": 1, "ALIGNED": 4, "ROW": 1024}
        more |= {"CLUSTER": 1, "BLOCKS_ROW": 0, "FULL": 0, "OFFSET": 0, "CENTER": 0}
        variants["sums"] = variant("weight_sum", _OF_SUMS, warps, Share.COLUMNS_OF_SUMS, warps * 32, more)
    return variants


def gate_variant(kind: Kind, capability: int) -> Variant:
    """The kernel of a gate, or of its backward pass."""
    d, out, dz = (kind.d, kind.dy, kind.dz) if kind.backward else (None, kind.out, None)
    layout = Layout.of(kind.hidden_size, kind.dtypes(), kind.alignment, capability)
    defines: dict[str, str | int] = {
        "ACCUMULATOR": _NAMES[kind.accumulator],
        **_types(d=d, y=kind.y, z=kind.z, out=out, dz=dz, between=kind.between),
        "ACTIVATION": kind.activation.upper(),
        **_flags(TWO_LEVELS=kind.two_levels, PACKED=kind.packed),
        "VECTOR": layout.vector,
        "ALIGNED": layout.aligned,
        "WARPS": _WARPS,
    }
    if kind.interleaved:
        defines["IN_TURNS"] = 1
    steps = steps_of_gate(kind)
    if steps is not None:
        numbers = {"Y_LIMIT": steps.y_limit, "Z_LIMIT": steps.z_limit, "VALUE_LIMIT": steps.value_limit}
        numbers |= {"ALPHA": steps.alpha, "UP_OFFSET": steps.up_offset}
        defines |= {"STEPS": 1, "ACTIVATION": steps.function.upper(), "CLAMP": (steps.clamp or "nothing").upper()}
        defines |= {name: _bits(number, kind.accumulator) for name, number in numbers.items()}
        defines |= _flags(ROUND_OFFSET=steps.round_steps and steps.up_offset != 0)
    threads = _WARPS * 32
    kernel = "gate_backward" if kind.backward else "gate"
    return Variant(kernel, tuple(defines.items()), threads, 1, Share.ELEMENTS, threads * layout.vector)


def rotation_variant(kind: Kind, capability: int) -> Variant:
    """The kernel that normalises and rotates heads, which fit a warp."""
    # Tables alone may be float64.
    narrow = [dtype for dtype in kind.dtypes() if dtype != torch.float64]
    layout = Layout.of(kind.hidden_size, narrow, kind.alignment, capability)
    vector = math.gcd(layout.vector, kind.pairs * (2 if kind.interleaved else 1))
    layout = replace(layout, vector=vector, aligned=layout.aligned // layout.vector * vector)
    position = {torch.int32: "int", torch.int64: "long long", None: "none"}[kind.positions]
    heads = dtypes_of_heads(kind)
    defines: dict[str, str | int] = {
        "ACCUMULATOR": _NAMES[torch.float32],
        **_types(x=heads["x"], out=heads["out"], weight=heads["weight"], between=kind.between, products=kind.products),
        **_types(cos=kind.cos, sin=kind.sin),
        "POSITION_TYPE": position,
        **_flags(NORMALISED=kind.norm, ROUND_NORM=kind.norm and kind.round_norm),
        **_flags(OFFSET=kind.norm and kind.weight_offset, RSTD=heads["rstd"] is not None),
        **_flags(INTERLEAVED=kind.interleaved, TWO_LEVELS=kind.two_levels),
        "SIZE": kind.hidden_size,
        "PAIRS": kind.pairs,
        **layout.defines(),
    }
    return Variant("rotate", tuple(defines.items()), layout.warps * 32, 1, Share.ROWS, layout.rows)


def log_prob_variant(kind: Kind, capability: int) -> Variant:
    """The kernel of log-probabilities, or of their gradient: rows of any length are read segment by segment."""
    layout = Layout.of(kind.hidden_size, kind.dtypes(), kind.alignment, capability)
    segments = -(-kind.hidden_size // reference.SEGMENT)
    most = _MOST_WARPS // 2 if kind.accumulator == torch.float64 else _MOST_WARPS
    blocks = min(ceiling(-(-segments // most)), _MOST_BLOCKS if capability >= 90 else 1)
    # As few warps as take no more turns than the most would, which then have nearly the same number of segments.
    turns = -(-segments // (most * blocks))
    warps = -(-segments // (turns * blocks))
    whole = kind.hidden_size == segments * reference.SEGMENT
    layout = replace(layout, row=reference.SEGMENT, warps=warps, cluster=blocks, blocks_row=True, full=whole)
    out, d, d_entropy = (kind.dlogits, kind.d, kind.d_entropy) if kind.backward else (kind.out, None, None)
    identifier = {torch.int32: "int", torch.int64: "long long", None: "none"}[kind.ids]
    defines: dict[str, str | int] = {
        "ACCUMULATOR": _NAMES[kind.accumulator],
        **_types(x=kind.logits, out=out, d=d, entropy_d=d_entropy, temperature=kind.temperature),
        "ID_TYPE": identifier,
        **_flags(WHOLE=kind.name == "log_softmax", SELECTS=kind.ids is not None),
        **_flags(ENTROPY=kind.name == "selected_and_entropy", CAPPED=is_capped(kind), TWO_LEVELS=kind.two_levels),
        "SEGMENTS": _padded_segments(kind.hidden_size),
        **layout.defines(),
    }
    kernel = "log_prob_backward" if kind.backward else "log_prob"
    return Variant(kernel, tuple(defines.items()), warps * 32, blocks, Share.ROWS, 1)


#: The functions that choose the kernel of a kind of call, or its kernels, by the kind's name.
_CHOOSERS: dict[str, Callable[[Kind, int], Any]] = {
    **dict.fromkeys(("norm", "norm_gated", "quantize"), forward_variant),
    "norm_backward": backward_variants,
    "gate": gate_variant,
    "rotate": rotation_variant,
    **dict.fromkeys(LOG_PROBABILITIES, log_prob_variant),
}


def variants_of(kind: Kind, capability: int) -> tuple[Variant, ...]:
    """The kernels of a kind of call, in the order in which they are launched."""
    found = _CHOOSERS[kind.name](kind, capability)
    return (found,) if isinstance(found, Variant) else tuple(found.values())


def _padded_segments(hidden_size: int) -> int:
    """Segments of a row, as a power of two."""
    return ceiling(-(-hidden_size // reference.SEGMENT))
