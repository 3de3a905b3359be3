"""The ``triton`` backend: one set of kernels for every GPU that Triton compiles for.

How a row is laid out over a program's threads depends on its length and its types only, never on the number of rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends.kernel_keys import (
    FEW_ROWS,
    FUNCTIONS_OF_GATES,
    LOG_PROBABILITIES,
    UNTRIED,
    Kind,
    ceiling,
    constants_of_quantizer,
    dtypes_of_heads,
    fuses,
    multiplies_int8,
    steps_of_gate,
)
from fusednorm.backends.triton import host
from fusednorm.backends.triton.host import INTERPRETED, Host, Variant, launcher
from fusednorm.calls.c_enums import Share
from fusednorm.reference import norm as reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fusednorm.calls.call import Operation

#: ROCm's devices are called cuda too. Triton's interpreter takes tensors on the CPU.
DEVICES = ("cuda", "xpu", "cpu") if INTERPRETED else ("cuda", "xpu")

KNOWS = frozenset(("residual_dtype", "norm_before_add", "affine", "x_scale", "center"))
KNOWS |= {"quantize", "round_scale", "gate", "gate_backward", "gate_steps", "gate_interleaved", "norm_gated", "rotate"}
KNOWS |= {"log_prob", "log_prob_backward", "int8_linear"}
KNOWS |= FUNCTIONS_OF_GATES

#: Elements that a program keeps in registers at most; longer rows are read twice.
_MOST = 16384

#: Elements of short rows that a program takes together.
_TOGETHER = 4096

#: The longest rows whose gradients and share of the weight's fit the registers together.
_MOST_AT_ONCE = 8192

#: Elements of gates that a program takes, eight to a thread.
_OF_GATES = 1024

#: Elements of heads that a program takes, 16 to a thread.
_OF_HEADS = 2048

#: Columns of the blocks' shares that a program adds up.
_ADDED = 32

#: The tile of products of many rows that a program has, and how many numbers of each row it reads at a time. A tile of
#: 64 rows would be another kind of instruction on each generation of NVIDIA's GPUs, which no machine here executes.
_ROWS, _COLUMNS, _DEPTH = 32, 128, 64

#: The oldest of NVIDIA's GPUs whose tensor cores Triton has multiply int8.
_OLDEST_WITH_INT8 = 80


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    reasons = host.missing()
    if reasons or INTERPRETED:
        return reasons
    target, why = host.active_target()
    if target is None:
        return [f"Triton finds no GPU driver ({why}); `python -m torch.utils.collect_env` shows what torch finds"]
    if target.backend == "cpu":
        return ["Triton's active driver is one for CPUs, which the backend triton_cpu is for"]
    return host.changed()


def unsuitable(operation: Operation) -> list[str]:
    """Why the backend cannot take a call."""
    size, step = operation.hidden_size, operation.step
    if multiplies_int8(operation):
        target = None if INTERPRETED else host.active_target()[0]
        if target is not None and target.backend == "cuda" and target.arch < _OLDEST_WITH_INT8:
            return [f"Triton multiplies int8 on GPUs of compute capability {_OLDEST_WITH_INT8 / 10} and newer"]
        return []
    quantization = None if step is None else step.quantization
    if quantization is not None and (size > _MOST or not fuses(quantization.group(size), size)):
        return [f"no program has all rows of {size} elements in groups of {quantization.per}"]
    if step is not None and step.name == "rotate" and size > reference.SEGMENT:
        return [f"its heads have up to {reference.SEGMENT} elements"]
    return host.too_long(size)


def plan(operation: Operation) -> str:
    """How a call will run, in words."""
    where = "interpreted" if INTERPRETED else "compiled"
    if multiplies_int8(operation):
        tiled = f"tiles of {_ROWS} x {_COLUMNS} sums, or of {FEW_ROWS} rows where there are no more"
    else:
        rows, segments, depth, width, _, warps, tiles = tiling(operation.hidden_size, operation.dtypes(), warp_size())
        taken = f"{rows} rows per program" if tiles == 1 else f"a row per program, in {tiles} parts"
        tiled = f"{taken}, {warps} warps, tiles of {depth} x {rows * segments} x {width}"
    return f"Triton kernels, {where}: {tiled}" + ("" if INTERPRETED else f"; {UNTRIED}")


def warp_size() -> int:
    """Threads in a warp of this machine's GPU."""
    target = None if INTERPRETED else host.active_target()[0]
    return target.warp_size if target is not None and target.warp_size else 32


def tiling(
    hidden_size: int, dtypes: list[torch.dtype], lanes: int, alignment: int = 16
) -> tuple[int, int, int, int, int, int, int]:
    """Rows per program, segments per row or part of it, depth, width, elements per vector, warps, and parts of a row.

    A warp's threads take a vector of 16 bytes each, side by side, or one element where rows begin anywhere; and 32
    elements each in all: with fewer, sums would have to cross from warp to warp, with more, they would have to be added
    up in more steps.
    """
    segment = min(reference.SEGMENT, ceiling(max(hidden_size, 16)))
    vector = 16 // min(dtype.itemsize for dtype in dtypes) if alignment >= 16 else 1
    width = min(segment, lanes * vector)
    most = _MOST if torch.float64 not in dtypes else _MOST // 2
    segments = ceiling(-(-hidden_size // segment))
    tiles = 1
    if segment * segments > most:
        segments = most // 2 // segment
        tiles = ceiling(-(-hidden_size // (segments * segment)))
    rows = max(1, _TOGETHER // (segment * segments)) if hidden_size <= _TOGETHER // 2 else 1
    warps = min(max(rows * segments * segment // (lanes * 32), 1), 1024 // lanes)
    return rows, segments, segment // width, width, vector, warps, tiles


def _by_bits(dtypes: Sequence[torch.dtype | None]) -> bool:
    """Whether kernels take bfloat16 by its bits, and round to it in integers.

    Of two bfloat16 numbers, or one and a float16 number, whose sum or product becomes float16, LLVM makes float16
    numbers first, which have a smaller range. It does not know bits to be numbers.
    """
    return INTERPRETED or {torch.bfloat16, torch.float16} <= set(dtypes)


def _variant(
    kind: Kind,
    function: Any,
    dtypes: dict[str, torch.dtype | None],
    constants: dict[str, Any],
    warps: int,
    per_program: int,
    **more: Any,
) -> Variant:
    """A kernel for calls of a kind."""
    more = {"bits": _by_bits(kind.dtypes()), "two_levels": kind.two_levels} | more
    aligned = kind.alignment >= 16
    return Variant(function, dtypes, kind.accumulator, constants, aligned, warps=warps, per_program=per_program, **more)


def forward_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel for a kind of call, on GPUs with so many threads in a warp; on this one if None."""
    from fusednorm.backends.triton.kernels import norm as kernels

    lanes, gated = lanes or warp_size(), kind.activation is not None
    rows, segments, depth, width, vector, warps, tiles = tiling(kind.hidden_size, kind.dtypes(), lanes, kind.alignment)
    constants: dict[str, Any] = {
        "N": kind.hidden_size,
        "OFFSET": kind.weight_offset,
        "ROUND_SUM": kind.round_sum,
        "ROUND_NORM": kind.round_norm,
        "BETWEEN": "" if not kind.norm_before_add else "x" if kind.between == kind.x else "A",
        "GATED": "" if not gated else "before" if kind.between is None else "after",
        "PASSED": None,
        "ACTIVATION": kind.activation,
        "CENTER": kind.center,
    }
    if gated and kind.between not in (None, kind.accumulator):
        constants["PASSED"] = host.type_of(kind.between)
    kept = kind.residual is None or kind.round_sum or kind.residual_out == kind.accumulator or kind.out is None
    constants |= {"KEPT": kept, "ROWS": rows, "TILES": tiles}
    absent = _absent(kind) + ("first_eps",) * (not kind.norm_before_add) + ("z_stride", "z_jump") * (not gated)
    dtypes = {**dict(kind.rows), "rstd": kind.rstd}
    constants |= {"SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector}
    return _variant(kind, kernels.forward, dtypes, constants, warps, rows, absent=absent)


def _absent(kind: Kind) -> tuple[str, ...]:
    """The names of numbers that a kernel does not take where x is not scaled, or one row is for all heads."""
    return ("x_scale",) * (not kind.scaled) + ("heads", "weight_stride", "bias_stride") * (not kind.of_heads)


def quantizer_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel that quantizes rows, which it may normalise before, on GPUs as :func:`forward_variant` says."""
    from fusednorm.backends.triton.kernels.quantize import quantize_tile

    lanes = lanes or warp_size()
    rows, segments, depth, width, vector, warps, _ = tiling(kind.hidden_size, kind.dtypes(), lanes, kind.alignment)
    dtypes = {**dict(kind.rows), "out": kind.out if kind.normalises and kind.keeps else None}
    dtypes |= {"numbers": torch.uint8, "scale": torch.float32}
    dtypes["zero_point"] = torch.int32 if kind.quantization.computes_zero_point else None
    constants = {
        "N": kind.hidden_size,
        "OFFSET": kind.weight_offset,
        "ROUND_SUM": kind.round_sum,
        "ROUND_NORM": kind.round_norm,
        "PASSED": "" if not kind.normalises else "x" if kind.out == kind.x else "A",
        "CENTER": kind.center,
        **constants_of_quantizer(kind),
    }
    constants |= {"ROWS": rows, "SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector}
    return _variant(kind, quantize_tile, dtypes, constants, warps, rows, absent=_absent(kind))


def backward_variants(kind: Kind, lanes: int | None = None) -> dict[str, Variant]:
    """The kernels for a kind of backward pass, by what they do, in the order in which they are launched.

    ``both``: the gradients of the rows and the blocks' shares of the weight's; ``rows`` and ``shares``: the same apart;
    ``weight``: the shares added up. ``rows`` also has the means that ``shares`` needs of rows that are centered.
    """
    from fusednorm.backends.triton.kernels import norm as kernels

    dtypes = {**dict(kind.rows), "dweight": kind.dweight, "rstd": kind.accumulator, "partial": kind.accumulator}
    dtypes["means"] = kind.accumulator if kind.center and kind.dweight else None
    lanes = lanes or warp_size()
    rows, segments, depth, width, vector, warps, tiles = tiling(kind.hidden_size, kind.dtypes(), lanes, kind.alignment)
    shape = {"SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector}
    row = {"N": kind.hidden_size, "OFFSET": kind.weight_offset, "CENTER": kind.center}
    more = {"divisor": math.gcd(kind.hidden_size, 16), "bits": INTERPRETED}

    def variant(function: Any, constants: dict[str, Any], warps: int, per_program: int, share: Share) -> Variant:
        return _variant(kind, function, dtypes, constants, warps, per_program, share=share, **more)

    variants = {}
    gradients = bool(kind.dx or kind.dresidual)
    if kind.dweight and gradients and rows == 1 and kind.hidden_size <= _MOST_AT_ONCE:
        variants["both"] = variant(kernels.backward_blocks, {**row, **shape}, warps, 1, Share.BLOCKS)
    else:
        if gradients or kind.center:
            constants = {**row, "ROWS": rows, "TILES": tiles, **shape}
            variants["rows"] = variant(kernels.backward_rows, constants, warps, rows, Share.ROWS)
        if kind.dweight:
            # Rows that are loaded at a time: as many as registers hold.
            constants = {"AT_ONCE": 8 if vector * (kind.dy.itemsize + kind.h.itemsize) <= 32 else 4, "TILE": width}
            variants["shares"] = variant(kernels.weight_blocks, constants, 1, width, Share.COLUMNS_OF_BLOCKS)
    if kind.dweight:
        constants = {"N": kind.hidden_size, "BLOCKS": reference.ROW_BLOCKS, "TILE": _ADDED}
        variants["weight"] = variant(kernels.add_blocks, constants, 4, _ADDED, Share.COLUMNS)
    return variants


def gate_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel of a gate, or of its backward pass, on GPUs with so many threads in a warp; on this one if None."""
    from fusednorm.backends.triton.kernels import gates as kernels

    tile = min(_OF_GATES, ceiling(max(kind.hidden_size, 16)))
    rows = _OF_GATES // tile
    share, per_program = (Share.ROWS, rows) if kind.hidden_size <= tile else (Share.COLUMNS_OF_BLOCKS, tile)
    function = kernels.gate_backward_tile if kind.backward else kernels.gate_tile
    dtypes = dict((*kind.rows, *kind.others))
    if kind.interleaved:  # the kernel finds them with z and its gradient
        dtypes |= {name: None for name in ("y", "dy") if name in dtypes}
    bits = _by_bits([*kind.dtypes(), kind.between])
    between = None if kind.between is None else host.type_of(kind.between, bits)
    constants = {"N": kind.hidden_size, "ACTIVATION": kind.activation, "BETWEEN": between, "ROWS": rows, "TILE": tile}
    constants |= {"STEPS": steps_of_gate(kind), "IN_TURNS": kind.interleaved}
    warps = _OF_GATES // (8 * (lanes or warp_size()))
    return _variant(kind, function, dtypes, constants, warps, per_program, bits=bits, share=share)


def rotation_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel that normalises and rotates heads, on GPUs with so many threads in a warp; on this one if None."""
    from fusednorm.backends.triton.kernels.rotate import rotate_tile

    size, pairs = ceiling(max(kind.hidden_size, 16)), kind.pairs
    # The halving sum of all of a head is that of squares of halves, added up pair by pair, if it is not filled up.
    halves = 2 * pairs == kind.hidden_size and (not kind.norm or kind.hidden_size == ceiling(kind.hidden_size))
    if kind.interleaved and pairs:
        form, width = "neighbours", max(size // 2, 16)
    elif halves:
        form, width = "halves", ceiling(max(pairs, 16))
    else:
        form, width = "parts", size
    bits = _by_bits([*kind.dtypes(), kind.between, kind.products])
    passed = None if kind.between == kind.accumulator else host.type_of(kind.between, bits)
    products = None if kind.products is None else host.type_of(kind.products, bits)
    rows = max(1, _OF_HEADS // size)
    constants = {
        "SIZE": kind.hidden_size,
        "PAIRS": pairs,
        "NORMALISED": kind.norm,
        "ROUND_NORM": kind.norm and kind.round_norm,
        "OFFSET": kind.norm and kind.weight_offset,
        "BETWEEN": passed,
        "PRODUCTS": products,
        "ROWS": rows,
        "FORM": form,
        "WIDTH": width,
        "VECTOR": 16 // min(dtype.itemsize for dtype in kind.dtypes()) if kind.alignment >= 16 else 1,
    }
    dtypes: dict[str, torch.dtype | None] = {}
    for name, dtype in dtypes_of_heads(kind).items():
        dtypes |= dict.fromkeys(("q", "k") if name == "x" else (f"q_{name}", f"k_{name}"), dtype)
    dtypes |= {"cos": kind.cos, "sin": kind.sin, "positions": kind.positions}
    warps = _OF_HEADS // (16 * (lanes or warp_size()))
    return _variant(kind, rotate_tile, dtypes, constants, warps, rows, bits=bits)


def log_prob_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel of log-probabilities, or of their gradient, on GPUs with so many threads in a warp.

    On this one if None. A program takes a row, in tiles as norms have them, of 32 elements to a thread; fewer where
    registers would not suffice: of gradients that take no sum of a row, and in float64.
    """
    lanes = lanes or warp_size()
    _, segments, depth, width, vector, *_ = tiling(kind.hidden_size, kind.dtypes(), lanes, kind.alignment)
    of_thread = 16 if kind.backward and kind.name != "log_softmax" else 32
    if kind.accumulator == torch.float64:
        of_thread //= 2
    segments = min(segments, of_thread // 4)
    tiles = ceiling(-(-kind.hidden_size // (segments * depth * width)))
    function, dtypes, constants = host.log_prob_parts(kind)
    constants |= {"TILES": tiles, "SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector}
    constants["PROCESSOR"] = None
    warps = max(segments * depth * width // (lanes * of_thread), 1)
    return _variant(kind, function, dtypes, constants, warps, 1, divisor=math.gcd(kind.hidden_size, 16))


def product_variant(kind: Kind, lanes: int | None = None) -> Variant:
    """The kernel of products of int8, on GPUs with so many threads in a warp; on this one if None."""
    from fusednorm.backends.triton.kernels.int8_products import int8_linear

    constants = {"ROWS": FEW_ROWS if kind.few else _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH}
    warps = 128 // (lanes or warp_size())
    dtypes, divisor = dict((*kind.rows, *kind.others)), math.gcd(kind.hidden_size, 16)
    return _variant(kind, int8_linear, dtypes, constants, warps, 1, divisor=divisor)


_CHOOSERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("norm", "norm_gated"), forward_variant),
    "norm_backward": backward_variants,
    "quantize": quantizer_variant,
    "gate": gate_variant,
    "rotate": rotation_variant,
    "int8_linear": product_variant,
    **dict.fromkeys(LOG_PROBABILITIES, log_prob_variant),
}
_host = Host(_CHOOSERS, launcher)
forward = backward = _host.run
