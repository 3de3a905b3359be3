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
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends import cpu
from fusednorm.backends.kernel_keys import (
    FUNCTIONS_OF_GATES,
    LOG_PROBABILITIES,
    PACKED,
    Kind,
    blocks_of,
    ceiling,
    kind_of_norm,
    scratch_of,
    steps_of_gate,
)
from fusednorm.backends.triton import host
from fusednorm.backends.triton.cpu_compiler import Compiler, Failure, Program, processor
from fusednorm.backends.triton.host import INTERPRETED, Host, Interpreted, Variant, pointer_or_null
from fusednorm.calls import c_abi, process
from fusednorm.calls import fast_path as path
from fusednorm.calls.c_enums import Share
from fusednorm.calls.call import (
    ACTIVATIONS,
    Backward,
    Call,
    Forward,
    KindOfCall,
    Quantize,
    RMSNorm,
)
from fusednorm.reference import norm as reference

if TYPE_CHECKING:
    from fusednorm.calls.call import AnyCall, ForwardCall, Operation

#: Triton's CPU driver, and its interpreter, take tensors in the processor's memory.
DEVICES = ("cpu",)

#: The cpu backend rotates heads: a head is one tile, so kernels of Triton's have nothing to gain.
KNOWS = frozenset(("residual_dtype", "affine", "x_scale", "center", "quantize", "round_scale", "norm_gated", "rotate"))
KNOWS |= {"gate", "gate_backward", "gate_steps", "gate_interleaved", "log_prob", "log_prob_backward"}
KNOWS |= FUNCTIONS_OF_GATES

#: The backend that takes calls while a kernel is compiled in the background.
MEANWHILE = "cpu"

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
    reasons = host.missing(on_cpus=not INTERPRETED)
    if reasons or INTERPRETED:
        return reasons
    target, why = host.active_target()
    if target is None or target.backend != "cpu":
        found = f"no driver ({why})" if target is None else f"a driver for {target.backend}"
        cure = host.BUILD.replace("a newer one", "one for CPUs")
        return [f"Triton has {found} active here, not one for CPUs: {cure}; TRITON_CPU_BACKEND=1 prefers it to a GPU's"]
    return host.changed(on_cpus=True) or [f"C calls its kernels, and {why}" for why in cpu.unavailable()]


def unsuitable(operation: Operation) -> list[str]:
    """Why the backend cannot take a call."""
    if operation.step is not None and operation.step.name == "rotate":
        return cpu.unavailable()
    return host.too_long(operation.hidden_size)


def plan(operation: Operation) -> str:
    """How a call will run, in words."""
    if operation.step is not None and operation.step.name == "rotate":
        return f"the cpu backend's, {cpu.plan(operation)}"
    if INTERPRETED:
        return f"Triton kernels, interpreted: a row per program, in tiles of {TILE}"
    compiled = (
        f"Triton kernels, compiled, on up to {torch.get_num_threads()} threads: a row per program, in tiles of {TILE}"
    )
    if not _in_background() or isinstance(operation, KindOfCall):
        return compiled
    found = _compiler.done.get(forward_variant(kind_of_norm(operation)).identity())
    if found is None:
        return f"{compiled}; until they are compiled in the background, the cpu backend's: {cpu.plan(operation)}"
    if isinstance(found, Failure):
        return f"the cpu backend's, {cpu.plan(operation)}, as Triton could not compile its own ({found.reason})"
    return compiled


def forward_variant(kind: Kind) -> Variant:
    """The kernel for a kind of call. Flags that change nothing for these dtypes change no kernel."""
    from fusednorm.backends.triton.kernels import cpu_norm as kernels

    flags, out = 0, kind.out
    if kind.activation is not None:
        before, out = kind.between is None, kind.between or kind.out
        functions = {name.upper(): kind.activation == name for name in ACTIVATIONS[1:]}
        flags = _flags(GATE_BEFORE=before, GATE_AFTER=not before, **functions)
        flags += _flags(PASSED=not before and out == kind.x != kind.accumulator)
    constants = {"FLAGS": flags + _norm_flags(kind, out), "SEGMENTS": _segments(kind.hidden_size)}
    return _variant(kind, kernels.forward, {**dict(kind.rows), "rstd": kind.accumulator}, constants)


def _variant(
    kind: Kind,
    function: Any,
    dtypes: dict[str, torch.dtype | None],
    constants: dict[str, Any],
    **more: Any,
) -> Variant:
    """A kernel for calls of a kind."""
    return Variant(function, dtypes, kind.accumulator, {**constants, **_constants()}, bits=True, null=True, **more)


def _norm_flags(kind: Kind, out: torch.dtype | None) -> int:
    """The flags of a norm whose rows are rounded to ``out``."""
    adds, accumulator = kind.residual is not None, kind.accumulator
    affine = kind.weight is not None or kind.bias is not None
    exact_sum = kind.residual_out == accumulator
    return _flags(
        ADD=adds,
        KEEP=adds and (exact_sum or kind.round_sum),
        ROUND_SUM=adds and kind.round_sum and not exact_sum,
        ROUND_NORM=kind.round_norm and kind.x != accumulator and (affine or out != kind.x),
        WEIGHT=kind.weight is not None,
        TWO_LEVELS=kind.two_levels,
        BIAS=kind.bias is not None,
        OF_HEADS=kind.of_heads,
        SCALED=kind.scaled,
        CENTER=kind.center,
    )


def quantizer_variant(kind: Kind) -> Variant:
    """The kernel that quantizes rows, which it may normalise before."""
    from fusednorm.backends.triton.kernels import cpu_quantize as kernels

    quantization = kind.quantization
    flags = _flags(
        GIVEN=quantization.per == "tensor",
        E4M3=quantization.dtype == torch.float8_e4m3fn,
        E5M2=quantization.dtype == torch.float8_e5m2,
        PLUS_128=quantization.zero_point == 128,
        AFTER=quantization.zero_point == "after",
        BEFORE=quantization.zero_point == "before",
        POWER_OF_TWO=quantization.round_scale is not None,
        BY_RECIPROCAL=quantization.scale_by == "reciprocal",
        RECIPROCAL=quantization.apply == "reciprocal",
        RATIO=quantization.apply == "ratio",
        MULTIPLIER=quantization.returns == "multiplier",
        TWO_LEVELS=kind.two_levels and not kind.normalises,
    )
    dtypes = {**dict(kind.rows), "out": kind.out if kind.normalises and kind.keeps else None}
    dtypes |= {"numbers": torch.uint8, "scale": torch.float32, "zero_point": torch.int32}
    if kind.normalises:
        rounded = kind.out == kind.x != kind.accumulator
        flags += _flags(NORMALISES=True, STORES=kind.keeps, PASSED=rounded)
        flags += _norm_flags(kind, kind.out)
    constants = {"FLAGS": flags, "SEGMENTS": _segments(kind.hidden_size)}
    return _variant(kind, kernels.quantize, dtypes, constants)


def gate_variant(kind: Kind) -> Variant:
    """The kernel of a gate, or of its backward pass."""
    from fusednorm.backends.triton.kernels import cpu_gates as kernels

    between = None if kind.between is None else host.type_of(kind.between, bits=True)
    flags = _flags(TWO_LEVELS=kind.two_levels, IN_TURNS=kind.interleaved, NO_ROWS=kind.y is None)
    if kind.backward:
        flags += _flags(DY=kind.dy is not None, DZ=kind.dz is not None)
    constants = {"FLAGS": flags, "ACTIVATION": kind.activation, "BETWEEN": between, "STEPS": steps_of_gate(kind)}
    return _variant(
        kind, kernels.gate_backward if kind.backward else kernels.gate, dict((*kind.rows, *kind.others)), constants
    )


def backward_variants(kind: Kind) -> dict[str, Variant]:
    """The kernels for a kind of backward pass, by what they do, in the order in which they are launched.

    ``rows``: the gradients of the rows; ``shares``: each block's share of the weight's; ``weight``: the shares' sum.
    """
    from fusednorm.backends.triton.kernels import cpu_norm as kernels

    operands = {**dict(kind.rows), "dweight": kind.dweight}

    def variant(part: str, used: tuple[str, ...], flags: int, segments: int, share: Share, per_program: int) -> Variant:
        dtypes = {name: dtype if name in used else None for name, dtype in operands.items()}
        dtypes |= {"rstd": kind.accumulator, "partial": kind.accumulator}
        constants = {"PART": part, "FLAGS": flags, "SEGMENTS": segments}
        return _variant(kind, kernels.backward, dtypes, constants, share=share, per_program=per_program)

    variants = {}
    of_rows = _flags(TWO_LEVELS=kind.two_levels, CENTER=kind.center)
    keep = kind.center and kind.dweight is not None
    if kind.dx or kind.dresidual or keep:
        optional = ("d_total", "weight", "dx", "dresidual")
        flags = of_rows + _flags(KEEP=keep, **{name.upper(): operands[name] is not None for name in optional})
        segments = _segments(kind.hidden_size)
        variants["rows"] = variant("rows", ("dy", "h", *optional), flags, segments, Share.ROWS, 1)
    if kind.dweight:
        variants["shares"] = variant("shares", ("dy", "h"), of_rows, 0, Share.COLUMNS_OF_BLOCKS, TILE)
        variants["weight"] = variant("weight", ("dweight",), 0, 0, Share.COLUMNS, TILE)
    return variants


def log_prob_variant(kind: Kind) -> Variant:
    """The kernel of log-probabilities, or of their gradient; a tile is a segment."""
    function, dtypes, constants = host.log_prob_parts(kind)
    constants |= {"TILES": _segments(kind.hidden_size), "SEGMENTS": 1, "DEPTH": 1, "WIDTH": reference.SEGMENT}
    constants |= {"VECTOR": 1, "PROCESSOR": _constants()["PROCESSOR"]}
    return Variant(function, dtypes, kind.accumulator, constants, bits=True, null=True)


def _flags(**flags: bool) -> int:
    """Flags of the kernels, added up."""
    from fusednorm.backends.triton.kernels import cpu_norm as kernels

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
        residual = dtype if add else None
        operation = RMSNorm(torch.device("cpu"), dtype, residual, dtype, dtype, 1, True, False, residual)
        yield forward_variant(kind_of_norm(operation))


def _in_background() -> bool:
    return _MODE == "background" and not process.waiting()


class _Host(Host):
    """Has kernels compiled when they may be, and has the fast path run those that are there."""

    def _hold(self, key: tuple[Any, ...], variants: Iterable[Variant], call: AnyCall) -> list[Any]:
        global _prewarmed
        if not INTERPRETED and (_in_background() or _MODE == "wait"):
            more = () if _prewarmed else tuple(commonest())
            _prewarmed = True
            if _MODE == "wait":
                _compiler.ahead(more)
            else:
                _compiler.later(variants, more)
        held = super()._hold(key, variants, call)
        if fast_path is not None and (packed := _packed_for_fast_path(call)) is not None:
            path.hold_triton(packed, held[0].address)
        return held


def _packed_for_fast_path(call: AnyCall) -> bytes | None:
    """A call as the fast path may see it, packed; None for a call that it does not take.

    It knows one dtype for the residual and the sum, one level of rows of a norm alone, and x as it is.
    """
    if isinstance(call, Forward):
        taken = {"affine", "center"}.issuperset(call.operation.features) and call.inner == call.rows
    else:
        of_gates = isinstance(call, Call) and call.name in ("gate", "norm_gated") and not call.backward
        taken = of_gates or isinstance(call, Quantize)
    return PACKED[type(call)](call) if taken and _segments(call.hidden_size) == _FEWEST_SEGMENTS else None


class _CompiledHost(_Host):
    """Has C run compiled kernels, which it gives a packed call."""

    def run(self, call: AnyCall) -> None:
        """Runs the kernels of any call; see :class:`fusednorm.registry.Backend`."""
        threads = torch.get_num_threads()
        if isinstance(call, Backward):
            partial = scratch_of(call)
            block, blocks = blocks_of(call.rows)
            packed = c_abi.pack_backward(call, threads, block, partial)
            for program in self.held_for(call):
                program(packed, program.variant.programs(call.rows, call.hidden_size, block, blocks))
        else:
            (program,) = self.held_for(call)
            program(PACKED[type(call)](call, threads), call.rows)


_compiler = Compiler(Program)

_CHOOSERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("norm", "norm_gated"), forward_variant),
    "norm_backward": backward_variants,
    "quantize": quantizer_variant,
    "gate": gate_variant,
    **dict.fromkeys(LOG_PROBABILITIES, log_prob_variant),
}

if INTERPRETED:
    _host: Host = _Host(_CHOOSERS, Interpreted, pointer_or_null, unaligned=True)
    fast_path: str | None = None
else:
    _host = _CompiledHost(_CHOOSERS, _compiler.now, unaligned=True)
    #: The type of device whose tensors the fast path takes to this backend; None if there is no fast path.
    fast_path = path.open_triton_cpu(_FEWEST_SEGMENTS * reference.SEGMENT)


def forward(call: ForwardCall) -> None:
    """Runs a kernel; see :class:`fusednorm.registry.Backend`.

    Raises:
        NotYetError: it is still being compiled, or cannot be.
    """
    if isinstance(call, Call) and call.name == "rotate":
        cpu.forward(call)
    else:
        _host.run(call)


def backward(call: Backward | Call) -> None:
    """Runs kernels; see :class:`fusednorm.registry.Backend`, and :func:`forward`."""
    _host.run(call)
