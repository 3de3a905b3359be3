"""The ``triton_cpu`` backend: Triton's kernels on processors, in small tiles, for a Triton built with a CPU driver.

Written for Arm servers; the kernels know nothing of them. A program takes one row in tiles of 128 elements. Rows of any
length share a compiled kernel, up to the number of their segments as a power of two, and so do calls with and without a
weight offset, or with rstd wanted or not.

While a kernel is compiled in the background, the C kernels of the ``cpu`` backend take its calls: the same bits.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fusednorm import quick as quick_way
from fusednorm import registry
from fusednorm.backends import cpu, reference, triton_host
from fusednorm.backends.gpu_host import Host, ceiling
from fusednorm.backends.triton_cpu_host import Compiler, Failure, NotYetError, Program, processor
from fusednorm.backends.triton_host import INTERPRETED, Interpretation, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from fusednorm.registry import Signature

#: Triton's CPU driver, and its interpreter, take tensors in the processor's memory.
DEVICES = ("cpu",)

#: Elements in a tile. Eight of them are a segment.
TILE = reference.SEGMENT // 8

#: Rows up to 65,536 elements share one kernel.
_FEWEST_SEGMENTS = 64

_MODES = {"background": "background", "wait": "wait", "off": "off", "1": "wait", "0": "off"}
_asked = os.environ.get("FUSEDNORM_PREWARM", "").strip()

#: When kernels are compiled: all in the background, the commonest first; or each before the call that needs it, at the
#: first call also the commonest (``wait``), or no others (``off``).
_MODE = _MODES.get(_asked.lower() or "background")

_prewarmed = False


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    if _MODE is None:
        return [f"FUSEDNORM_PREWARM is {_asked!r}; it must be background, wait (or 1), or off (or 0)"]
    reasons = triton_host.missing(on_cpus=not INTERPRETED)
    if reasons or INTERPRETED:
        return reasons
    target, why = triton_host.active_target()
    if target is None or target.backend != "cpu":
        found = f"no driver ({why})" if target is None else f"a driver for {target.backend}"
        cure = triton_host.BUILD.replace("a newer one", "one for CPUs")
        return [f"Triton has {found} active here, not one for CPUs: {cure}; TRITON_CPU_BACKEND=1 prefers it to a GPU's"]
    return triton_host.changed(on_cpus=True) or [f"C calls its kernels, and {why}" for why in cpu.unavailable()]


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call."""
    return triton_host.too_long(signature.hidden_size)


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    if INTERPRETED:
        return f"Triton kernels, interpreted: a row per program, in tiles of {TILE}"
    compiled = (
        f"Triton kernels, compiled, on up to {torch.get_num_threads()} threads: a row per program, in tiles of {TILE}"
    )
    if not _in_background():
        return compiled
    x, residual, weight, out = signature[1:5]
    variant = forward_variant(
        x, residual, weight, out, False, signature.hidden_size, False, signature.round_sum, signature.round_norm
    )
    found = _compiler.done.get(variant.identity())
    if found is None:
        return f"{compiled}; until they are compiled in the background, the cpu backend's: {cpu.plan(signature)}"
    if isinstance(found, Failure):
        return f"the cpu backend's, {cpu.plan(signature)}, as Triton could not compile its own ({found.reason})"
    return compiled


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
    """The kernel for a kind of call. Flags that change nothing for these dtypes change no kernel."""
    from fusednorm.backends import triton_cpu_kernels as kernels

    accumulator = reference.accumulator(x)
    exact_sum = residual == accumulator
    flags = _flags(
        ADD=residual is not None,
        KEEP=residual is not None and (exact_sum or round_sum),
        ROUND_SUM=residual is not None and round_sum and not exact_sum,
        ROUND_NORM=round_norm and x != accumulator and (weight is not None or out != x),
        WEIGHT=weight is not None,
    )
    return Variant(
        kernels.forward,
        {
            "x": x,
            "residual": residual,
            "weight": weight,
            "out": out,
            "residual_out": residual,
            "rstd": accumulator,
        },
        accumulator,
        {
            "FLAGS": flags,
            "SEGMENTS": _segments(hidden_size),
            **_constants(),
        },
        bits=True,
        null=True,
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
    from fusednorm.backends import triton_cpu_kernels as kernels

    def variant(
        function: Any, constants: dict[str, Any], per_program: int, used: dict[str, torch.dtype | None]
    ) -> Variant:
        names = ("dy", "d_total", "h", "rstd", "weight", "dx", "dresidual", "partial", "dweight")
        dtypes = {name: accumulator if name in ("rstd", "partial") else used.get(name) for name in names}
        constants = {**constants, **_constants()}
        return Variant(function, dtypes, accumulator, constants, bits=True, per_program=per_program, null=True)

    variants = {}
    if dx or dresidual:
        operands = {"d_total": d_total, "weight": weight, "dx": dx, "dresidual": dresidual}
        flags = _flags(**{name.upper(): dtype is not None for name, dtype in operands.items()})
        constants = {"FLAGS": flags, "SEGMENTS": _segments(hidden_size)}
        variants["rows"] = variant(kernels.backward_rows, constants, 1, {"dy": dy, "h": h, **operands})
    if dweight:
        variants["shares"] = variant(kernels.backward_shares, {}, TILE, {"dy": dy, "h": h})
        variants["weight"] = variant(kernels.backward_weight, {}, TILE, {"dweight": dweight})
    return variants


def _flags(**flags: bool) -> int:
    """Flags of the kernels, added up."""
    from fusednorm.backends import triton_cpu_kernels as kernels

    return sum(getattr(kernels, name).value for name, given in flags.items() if given)


def _segments(hidden_size: int) -> int:
    """Segments of a row, as the power of two that is compiled in."""
    return max(_FEWEST_SEGMENTS, ceiling(-(-hidden_size // reference.SEGMENT)))


@functools.cache
def _constants() -> dict[str, Any]:
    """The constants of all kernels. The processor is there because Triton's cache does not ask for it."""
    return {"TILE": TILE, "PROCESSOR": "" if INTERPRETED else processor()}


def commonest() -> Iterator[Variant]:
    """The kernels that most programs need first."""
    for dtype, add in itertools.product((torch.bfloat16, torch.float16, torch.float32), (True, False)):
        yield forward_variant(dtype, dtype if add else None, dtype, dtype, False, 1, False, True, False)


def _in_background() -> bool:
    return _MODE == "background" and not registry.waiting()


class _Host(Host):
    """Has kernels compiled when they may be, and has the fast path run those that are there."""

    def _hold(self, key: tuple[Any, ...], variants: Mapping[str, Any]) -> dict[str, Any]:
        global _prewarmed
        if not INTERPRETED and (_in_background() or _MODE == "wait"):
            more = () if _prewarmed else tuple(commonest())
            _prewarmed = True
            if _MODE == "wait":
                _compiler.ahead(more)
            else:
                _compiler.later(variants.values(), more)
        launches: dict[str, Any] = super()._hold(key, variants)
        if quick is not None and "forward" in launches:
            _, *dtypes, _, hidden_size, _, round_sum, round_norm, _ = key
            if _segments(hidden_size) == _FEWEST_SEGMENTS:
                options = round_sum * quick_way.ROUND_SUM + round_norm * quick_way.ROUND_NORM
                quick_way.hold_program(tuple(dtypes), options, launches["forward"].address)
        return launches


def _address(name: str, tensor: Tensor | None) -> int:
    """Where an operand begins; 0 if it is absent."""
    return 0 if tensor is None else tensor.data_ptr()


def _interpreted(name: str, tensor: Tensor | None) -> Tensor | None:
    """What the interpreter is given for an operand: it takes no null pointers."""
    return Interpretation.pointer(name, torch.empty(1) if tensor is None else tensor)


_compiler = Compiler(Program)

if INTERPRETED:
    _host = _Host(forward_variant, backward_variants, Interpretation, _interpreted)
    quick: str | None = None
else:
    _host = _Host(forward_variant, backward_variants, _compiler.now, _address)
    #: The devices whose tensors the fast path takes to this backend.
    quick = quick_way.open_programs(_FEWEST_SEGMENTS * reference.SEGMENT)


def forward(*operands: Any) -> None:
    """Runs a kernel; see :class:`fusednorm.registry.Backend`."""
    try:
        _host.forward(*operands)
    except NotYetError:
        cpu.forward(*operands)


def backward(*operands: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Runs kernels; see :func:`fusednorm.backends.reference.backward`."""
    try:
        return _host.backward(*operands)
    except NotYetError:
        return cpu.backward(*operands)
