"""The ``triton_cpu`` backend: Triton's kernels on processors, in small tiles, for a Triton built with a CPU driver.

Written for Arm servers; the kernels know nothing of them. A program takes one row in tiles of 128 elements, which fit
the vector registers and compile in a tenth of a second; rows of any length share a compiled kernel, up to the number of
their segments as a power of two.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends import reference, triton_host
from fusednorm.backends.gpu_host import Host, ceiling
from fusednorm.backends.triton_host import INTERPRETED, Variant, Way

if TYPE_CHECKING:
    from fusednorm.registry import Signature

#: Triton's CPU driver, and its interpreter, take tensors in the processor's memory.
DEVICES = ("cpu",)

#: Triton runs a kernel on the caller and on OpenMP's threads, and sets the arithmetic of none of them. A thread has the
#: state of the thread that made it, so it is not enough to set the caller's for the time of a call.
FLUSHES_WITH_CALLER = True

#: Elements in a tile. Eight of them are a segment.
TILE = reference.SEGMENT // 8

#: Rows up to 65,536 elements share one kernel.
_FEWEST_SEGMENTS = 64

_asked = os.environ.get("FUSEDNORM_PREWARM", "").strip() or "1"
_PREWARM = _asked == "1"

_prewarmed = False


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    if _asked not in ("0", "1"):
        return [f"FUSEDNORM_PREWARM is {_asked!r}; it must be 1, to compile the commonest kernels first, or 0"]
    reasons = triton_host.missing()
    if reasons or INTERPRETED:
        return reasons
    target, why = triton_host.active_target()
    if target is None or target.backend != "cpu":
        found = f"no driver ({why})" if target is None else f"a driver for {target.backend}"
        cure = "build github.com/triton-lang/triton-cpu from source, as no wheel of it is published"
        return [f"Triton has {found} active here, not one for CPUs: {cure}; TRITON_CPU_BACKEND=1 prefers it to a GPU's"]
    return triton_host.changed()


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call."""
    return triton_host.too_long(signature.hidden_size)


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    where = "interpreted" if INTERPRETED else f"compiled, on up to {torch.get_num_threads()} threads"
    return f"Triton kernels, {where}: a row per program, in tiles of {TILE}"


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
    alignment: int = 1,
) -> Variant:
    """The kernel for a kind of call. ``rstd``: whether it is wanted; ``offset``: whether the weight's is not 0."""
    from fusednorm.backends import triton_kernels as kernels

    accumulator = reference.accumulator(x)
    return Variant(
        kernels.forward_small,
        {
            "x": x,
            "residual": residual,
            "weight": weight,
            "out": out,
            "residual_out": residual,
            "rstd": accumulator if rstd else None,
        },
        accumulator,
        {
            "OFFSET": offset,
            "ROUND_SUM": round_sum,
            "ROUND_NORM": round_norm,
            "KEPT": residual is None or round_sum or residual == accumulator,
            "SEGMENTS": _segments(hidden_size),
            "TILE": TILE,
        },
        bits=True,
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
    alignment: int = 1,
) -> dict[str, Variant]:
    """The kernels for a kind of backward pass; see :func:`fusednorm.backends.triton_gpu.backward_variants`."""
    from fusednorm.backends import triton_kernels as kernels

    dtypes = {"dy": dy, "d_total": d_total, "h": h, "rstd": accumulator, "weight": weight, "dx": dx}
    dtypes |= {"dresidual": dresidual, "partial": accumulator, "dweight": dweight}

    def variant(function: Any, constants: dict[str, Any], per_program: int = 1) -> Variant:
        constants = {**constants, "TILE": TILE}
        return Variant(function, dtypes, accumulator, constants, bits=True, per_program=per_program)

    variants = {}
    if dx or dresidual:
        constants = {"OFFSET": offset, "SEGMENTS": _segments(hidden_size)}
        variants["rows"] = variant(kernels.backward_small, constants)
    if dweight:
        variants["shares"] = variant(kernels.weight_blocks, {"AT_ONCE": 1}, TILE)
        variants["weight"] = variant(kernels.add_blocks_small, {}, TILE)
    return variants


def _segments(hidden_size: int) -> int:
    """Segments of a row, as the power of two that is compiled in."""
    return max(_FEWEST_SEGMENTS, ceiling(-(-hidden_size // reference.SEGMENT)))


def _prewarm() -> None:
    """Compiles the commonest kernels before the first call, so that no later one waits for a compiler."""
    global _prewarmed
    if _prewarmed or INTERPRETED or not _PREWARM:
        return
    _prewarmed = True
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for residual in (dtype, None):
                _host.way(forward_variant(dtype, residual, dtype, dtype, False, 1, False, True, False), None)
    except Exception as error:
        logging.getLogger("fusednorm").warning("fusednorm could not prewarm its Triton kernels: %s", error)


_host = Host(forward_variant, backward_variants, Way, Way.pointer, _prewarm)
forward = _host.forward
backward = _host.backward
