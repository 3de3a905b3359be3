"""The ``triton`` backend: one set of kernels for every GPU that Triton compiles for.

How a row is laid out over a program's threads depends on its length and its types only, never on the number of rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends import reference, triton_host
from fusednorm.backends.gpu_host import UNTRIED, Host, address, ceiling
from fusednorm.backends.triton_host import INTERPRETED, Variant, Way

if TYPE_CHECKING:
    from fusednorm.registry import Signature

#: ROCm's devices are called cuda too. Triton's interpreter takes tensors on the CPU.
DEVICES = ("cuda", "xpu", "cpu") if INTERPRETED else ("cuda", "xpu")

#: Elements that a program keeps in registers at most; longer rows are read twice.
_MOST = 16384

#: Elements of short rows that a program takes together.
_TOGETHER = 4096

#: The longest rows whose gradients and share of the weight's fit the registers together.
_MOST_AT_ONCE = 8192

#: Columns of the blocks' shares that a program adds up.
_ADDED = 32


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    reasons = triton_host.missing()
    if reasons or INTERPRETED:
        return reasons
    target, why = triton_host.active_target()
    if target is None:
        return [f"Triton finds no GPU driver ({why}); `python -m torch.utils.collect_env` shows what torch finds"]
    if target.backend == "cpu":
        return ["Triton's active driver is one for CPUs, which the backend triton_cpu is for"]
    return triton_host.changed()


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call."""
    return triton_host.too_long(signature.hidden_size)


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    dtypes = [dtype for dtype in (signature.x, signature.residual, signature.weight, signature.out) if dtype]
    rows, segments, depth, width, _, warps, tiles = tiling(signature.hidden_size, dtypes, warp_size())
    where = "interpreted" if INTERPRETED else "compiled"
    way = f"{rows} rows per program" if tiles == 1 else f"a row per program, in {tiles} parts"
    tiled = f"{way}, {warps} warps, tiles of {depth} x {rows * segments} x {width}"
    return f"Triton kernels, {where}: {tiled}" + ("" if INTERPRETED else f"; {UNTRIED}")


def warp_size() -> int:
    """Threads in a warp of this machine's GPU."""
    target = None if INTERPRETED else triton_host.active_target()[0]
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


def forward_variant(
    x: torch.dtype,
    residual: torch.dtype | None,
    weight: torch.dtype | None,
    out: torch.dtype,
    rstd: bool,
    hidden_size: int,
    offset: bool,
    round_sum: bool,
    round_norm: bool,
    alignment: int,
    lanes: int | None = None,
) -> Variant:
    """The kernel for a kind of call.

    ``rstd``: whether it is wanted; ``offset``: whether the weight's is not 0; ``alignment``: bytes of which every row
    of every operand begins at a multiple.
    """
    from fusednorm.backends import triton_kernels as kernels

    accumulator = reference.accumulator(x)
    given = [dtype for dtype in (x, residual, weight, out) if dtype is not None]
    rows, segments, depth, width, vector, warps, tiles = tiling(hidden_size, given, lanes or warp_size(), alignment)
    constants: dict[str, Any] = {"N": hidden_size, "OFFSET": offset, "ROUND_SUM": round_sum, "ROUND_NORM": round_norm}
    if tiles == 1:
        constants["ROWS"] = rows
    else:
        constants |= {"KEPT": residual is None or round_sum or residual == accumulator, "TILES": tiles}
    return Variant(
        kernels.forward_tile if tiles == 1 else kernels.forward_wide,
        {
            "x": x,
            "residual": residual,
            "weight": weight,
            "out": out,
            "residual_out": residual,
            "rstd": accumulator if rstd else None,
        },
        accumulator,
        {**constants, "SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector},
        alignment >= 16,
        bits=INTERPRETED,
        warps=warps,
        per_program=rows,
    )


def backward_variants(
    dy: torch.dtype,
    d_total: torch.dtype | None,
    h: torch.dtype,
    weight: torch.dtype | None,
    dx: torch.dtype | None,
    dresidual: torch.dtype | None,
    dweight: torch.dtype | None,
    accumulator: torch.dtype,
    hidden_size: int,
    offset: bool,
    alignment: int,
    lanes: int | None = None,
) -> dict[str, Variant]:
    """The kernels for a kind of backward pass, by what they do.

    ``both``: the gradients of the rows and the blocks'
    shares of the weight's; ``rows`` and ``shares``: the same apart; ``weight``: the shares added up.
    """
    from fusednorm.backends import triton_kernels as kernels

    dtypes = {"dy": dy, "d_total": d_total, "h": h, "rstd": accumulator, "weight": weight, "dx": dx}
    dtypes |= {"dresidual": dresidual, "partial": accumulator, "dweight": dweight}
    given = [dtype for dtype in (dy, d_total, h, weight, dx, dresidual) if dtype is not None]
    rows, segments, depth, width, vector, warps, tiles = tiling(hidden_size, given, lanes or warp_size(), alignment)
    shape = {"SEGMENTS": segments, "DEPTH": depth, "WIDTH": width, "VECTOR": vector}
    row = {"N": hidden_size, "OFFSET": offset}

    def variant(function: Any, constants: dict[str, Any], warps: int, per_program: int = 1) -> Variant:
        divisor = math.gcd(hidden_size, 16)
        return Variant(
            function, dtypes, accumulator, constants, alignment >= 16, divisor, INTERPRETED, warps, per_program
        )

    variants = {}
    gradients = bool(dx or dresidual)
    if dweight and gradients and rows == 1 and hidden_size <= _MOST_AT_ONCE:
        variants["both"] = variant(kernels.backward_blocks, {**row, **shape}, warps)
    else:
        if gradients and tiles == 1:
            variants["rows"] = variant(kernels.backward_tile, {**row, "ROWS": rows, **shape}, warps, rows)
        elif gradients:
            variants["rows"] = variant(kernels.backward_wide, {**row, "TILES": tiles, **shape}, warps)
        if dweight:
            # Rows on their way at a time: as many as registers hold.
            at_once = 8 if vector * (dy.itemsize + h.itemsize) <= 32 else 4
            variants["shares"] = variant(kernels.weight_blocks, {"AT_ONCE": at_once, "TILE": width}, 1, width)
    if dweight:
        constants = {"N": hidden_size, "BLOCKS": reference.ROW_BLOCKS, "TILE": _ADDED}
        variants["weight"] = variant(kernels.add_blocks, constants, 4, _ADDED)
    return variants


_host = Host(forward_variant, backward_variants, Way, Way.pointer if INTERPRETED else address)
forward = _host.forward
backward = _host.backward
