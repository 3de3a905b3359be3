"""The Triton backends outside their kernels: they compile one, and launch it.

Triton's own binder inspects every argument of every call to find the compiled kernel that it needs. Here a kernel is
compiled explicitly for the types, the alignment and the constants of a kind of call, and then launched directly.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.kernel_keys import (
    Kind,
    blocks_of,
    check_addresses,
    is_capped,
    kind_of,
    lacking,
    programs,
    scratch_of,
)
from fusednorm.calls import c_quantizer
from fusednorm.calls.c_enums import Share
from fusednorm.calls.call import (
    AnyCall,
    Backward,
    Call,
    Forward,
    ForwardCall,
    Quantize,
    Strides,
    device_of,
)
from fusednorm.calls.gated_norm_calls import norm_of
from fusednorm.calls.memory import ABSENT
from fusednorm.calls.process import BackendError
from fusednorm.calls.rotation_calls import Heads, heads_of, of_one_weight_dtype

#: Where a Triton with a driver for CPUs comes from.
BUILD = "build a newer one from source, github.com/triton-lang/triton-cpu, of which no wheel is published"

#: Oldest Triton that rounds as the specification says (3.5 flushes subnormal quotients and roots), and newest tried.
OLDEST, NEWEST = (3, 6), (3, 9)

_CURE = "update fusednorm, or `pip install 'triton=={}.{}.*'`".format(*NEWEST)
CURE_ON_CPUS = "update fusednorm, or build the version of triton-cpu that docs/triton.md names"

#: The names of Triton's insides that are called here, and that its documentation lacks, with arguments given by name.
_USED = {
    "compile": ("src", "target", "options"),
    "compiler.ASTSource": ("fn", "signature", "constexprs", "attrs"),
}
_USED_ON_GPUS = {**_USED, "compiler.CompiledKernel.__getitem__": ("grid",)}

#: Whether Triton's interpreter runs the kernels, on the CPU and without compiling. Triton reads it when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")

#: The longest rows: the sums of their segments have to fit a tensor of Triton's.
LONGEST = 2**30

#: The interpreter knows one program at a time.
_INTERPRETER = threading.Lock()

#: Held while Triton compiles for a GPU that computes with pairs of numbers: it reads the environment, twice.
_COMPILING_PAIRS = threading.Lock()

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_NAMES |= {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}

#: The numbers of a quantizer, as :func:`fusednorm.calls.c_quantizer.limits` returns them.
_LIMITS = ("qmin", "qmax", "amax_floor", "amax_limit", "scale_floor")

#: Operands with one number for a group, a row or an id, which begin anywhere.
_OF_GROUPS = (
    *("scale", "zero_point", "positions", "means"),
    *("ids", "temperature", "result", "m", "s", "entropy", "d_result", "d_entropy"),
)


def missing(on_cpus: bool = False) -> list[str]:
    """Why Triton cannot be used, each reason with its cure; empty if it can.

    ``on_cpus``: one with a driver for CPUs is wanted, which no package index has.
    """
    try:
        import triton
        import triton.runtime.driver

        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    except Exception as error:  # a broken package, or a folder of that name, may raise anything
        cure = "`pip install triton`, with --force-reinstall if it is damaged, installs it where there is a wheel"
        cure = BUILD.replace("a newer one", "one for CPUs") if on_cpus else cure
        return [f"Triton cannot be imported ({type(error).__name__}: {error}); {cure}"]
    if version < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        cure = BUILD if on_cpus else f"`pip install 'triton>={wanted}'` (torch 2.10 and newer have it)"
        return [f"Triton {triton.__version__} is too old; {cure}"]
    return []


def changed(on_cpus: bool = False) -> list[str]:
    """Why this version of Triton, which can be imported and has a driver, cannot be called; empty if it can."""
    import triton

    from fusednorm.backends.triton.kernels import norm

    used, cure = (_USED, CURE_ON_CPUS) if on_cpus else (_USED_ON_GPUS, _CURE)
    lacked = lacking(triton, used) or lacking(norm.forward, {"arg_names": ()})
    if lacked:
        return [f"Triton {triton.__version__} lacks {lacked}, which fusednorm calls; {cure}"]
    return []


def active_target() -> tuple[Any | None, str]:
    """Triton's target on this machine (``backend``, ``arch`` and ``warp_size``); or None, and why there is none."""
    from triton.runtime.driver import driver

    try:
        target = driver.active.get_current_target()
    except Exception as error:  # "0 active drivers"; others come from drivers, which are plug-ins, and run compilers
        return None, f"{type(error).__name__}: {error}"
    lacked = lacking(target, {"backend": (), "warp_size": ()})
    return (None, f"its target lacks {lacked}") if lacked else (target, "")


def too_long(hidden_size: int) -> list[str]:
    """Why rows of this length cannot be taken; empty if they can."""
    return [f"rows of {hidden_size} elements are longer than {LONGEST}"] if hidden_size > LONGEST else []


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel."""

    #: The ``triton.jit`` function. What it is given goes by its arguments' names.
    function: Any
    #: The dtype of each operand, None if it is absent.
    dtypes: dict[str, torch.dtype | None]
    #: The type that everything is computed in: also that of ``eps`` and ``weight_offset``.
    accumulator: torch.dtype
    #: The kernel's constants, but for ``A``.
    constants: dict[str, Any]
    #: Whether every row of every operand begins at a multiple of 16 bytes.
    aligned: bool = False
    #: A number that divides the hidden size, where a kernel takes it when it runs.
    divisor: int = 1
    #: Whether bfloat16 goes by its bits, and is rounded in integers.
    bits: bool = False
    warps: int = 1
    #: The share of a program.
    share: Share = Share.ROWS
    per_program: int = 1
    #: Whether operands that are absent are null pointers, which kernels with and without them take alike.
    null: bool = False
    #: Whether rows lie in two levels.
    two_levels: bool = False
    #: The names of numbers in whose place the kernel is given None when it is compiled.
    absent: tuple[str, ...] = ()

    def programs(self, rows: int, hidden_size: int, block: int, blocks: int) -> int:
        """How many programs are launched."""
        return programs(self.share, self.per_program, rows, hidden_size, block, blocks)

    def all_constants(self) -> dict[str, Any]:
        """The kernel's constants."""
        import triton.language as tl

        return {"A": getattr(tl, str(self.accumulator)[6:]), **self.constants}

    def pointer(self, dtype: torch.dtype) -> str:
        """A pointer as Triton writes it."""
        return "*u16" if self.bits and dtype == torch.bfloat16 else "*" + _NAMES[dtype]

    def identity(self) -> tuple[Any, ...]:
        """Equal for variants that are compiled alike."""
        return (self.function, *self.arguments().items(), *self.constants.items(), self.warps)

    def arguments(self) -> dict[str, tuple[str, int]]:
        """The arguments that the kernel takes when it runs: of each its type, and what is known to divide it."""
        found: dict[str, tuple[str, int]] = {}
        constants = self.all_constants()
        for name in self.function.arg_names:
            rows_of = name.removesuffix("_stride").removesuffix("_jump").removesuffix("_head")
            operand = self.dtypes.get(rows_of)
            # A vector of numbers has as many elements as one of the operand with the narrowest type.
            divisor = 1 if rows_of in _OF_GROUPS or not self.aligned or operand is None else 16 // operand.itemsize
            if rows_of == "numbers" and self.aligned:
                divisor = constants["VECTOR"]
            if name in constants:
                continue
            if name in self.dtypes and self.null:
                found[name] = (self.pointer(operand or self.accumulator), 1)
            elif name in self.dtypes:
                aligned = divisor * operand.itemsize if operand is not None and divisor > 1 else 1
                found[name] = ("constexpr" if operand is None else self.pointer(operand), aligned)
            elif name in self.absent:
                found[name] = ("constexpr", 1)
            elif name in _LIMITS:
                found[name] = ("fp32", 1)
            elif name in ("eps", "weight_offset", "first_eps", "x_scale", "softcap"):
                found[name] = (_NAMES[self.accumulator], 1)
            elif (name.endswith("_jump") or name == "inner") and not (self.two_levels or self.null):
                found[name] = ("constexpr", 1)
            elif name.endswith(("_stride", "_jump", "_head")) and operand is not None:
                found[name] = ("i64", divisor)
            else:
                found[name] = ("i64", self.divisor if name == "hidden_size" else 1)
        return found


def log_prob_parts(kind: Kind) -> tuple[Any, dict[str, torch.dtype | None], dict[str, Any]]:
    """The kernel of log-probabilities, the dtypes of its operands, and the constants that say what it computes."""
    from fusednorm.backends.triton.kernels import log_prob as kernels

    wide, whole = kind.accumulator, kind.name == "log_softmax"
    function, name = kernels.log_prob, kind.name
    dtypes = dict.fromkeys(("out", "result", "entropy", "d", "d_result", "d_entropy"))
    dtypes |= {"logits": kind.logits, "ids": kind.ids, "temperature": kind.temperature, "m": wide, "s": wide}
    if kind.backward:
        function = kernels.log_prob_backward
        dtypes |= {"out": kind.dlogits, "d" if whole else "d_result": kind.d}
        if name == "selected_and_entropy" and kind.d_entropy is None:
            name = "selected"
    else:
        dtypes["out" if whole else "result"] = kind.out
    if name == "selected_and_entropy":
        dtypes |= {"entropy": wide, "d_entropy": kind.d_entropy if kind.backward else None}
    return function, dtypes, {"OPERATION": name, "CAPPED": is_capped(kind), "DIVIDES": kind.temperature is not None}


def type_of(dtype: torch.dtype, bits: bool = INTERPRETED) -> Any:
    """Triton's type of stored values; ``bits``: whether bfloat16 goes by its bits."""
    import triton.language as tl

    return tl.uint16 if bits and dtype == torch.bfloat16 else getattr(tl, str(dtype)[6:])


#: In place of the names of arguments that are absent.
_ABSENT = ""


class NotCachedError(Exception):
    """A variant is not in Triton's cache."""


def compiled(variant: Variant, target: Any, only_cached: bool = False) -> Any:
    """The variant compiled for a target, from Triton's cache on disk if it is there.

    Raises:
        NotCachedError: it is not, and nothing is to be compiled.
        BackendError: this version of Triton ignores an option on which bits depend, or its ptxas fuses operations.
    """
    import triton
    from triton.compiler import ASTSource

    arguments, constants = variant.arguments(), variant.all_constants()
    names = variant.function.arg_names
    signature = {name: arguments[name][0] if name in arguments else "constexpr" for name in names}
    known = {(i,): constants.get(name) for i, name in enumerate(names) if signature[name] == "constexpr"}
    divisors = {(i,): arguments[name][1] for i, name in enumerate(names) if signature[name] != "constexpr"}
    attributes = {at: [["tt.divisibility", divisor]] for at, divisor in divisors.items() if divisor > 1}
    exact = {"enable_fp_fusion": False}
    if target.backend == "cpu":
        exact["enable_fast_math"] = False
    options = exact if target.backend == "cpu" else {**exact, "num_warps": variant.warps}

    class Cached(ASTSource):  # type: ignore[misc]
        """A source whose compilation ends as it begins."""

        def make_ir(self, *_: Any, **__: Any) -> Any:
            raise NotCachedError

    source = (Cached if only_cached else ASTSource)(
        fn=variant.function, signature=signature, constexprs=known, attrs=attributes
    )
    compile_kernel = partial(triton.compile, src=source, target=target, options=options)
    pairs = target.backend == "cuda" and target.arch >= 100
    kernel = _compiled_without_fusing(compile_kernel) if pairs else compile_kernel()
    for name, value in exact.items():
        if getattr(kernel.metadata, name, None) != value:  # which has what became of all options
            what = f"the option {name}={value}, without which bits may differ"
            cure = CURE_ON_CPUS if target.backend == "cpu" else _CURE
            raise BackendError(f"Triton {triton.__version__} ignores {what}; {cure}")
    return kernel


def _compiled_without_fusing(compile_kernel: Callable[[], Any]) -> Any:
    """A kernel for a GPU of compute capability 10.0 or newer, in which ptxas fuses nothing.

    If an old one may have fused, the kernel is compiled again without pairs; Triton's cache tells such kernels apart.
    """
    with _COMPILING_PAIRS:
        kernel = compile_kernel()
        if not _fuses_pairs(kernel):
            return kernel
        before = os.environ.get("DISABLE_LLVM_OPT")
        os.environ["DISABLE_LLVM_OPT"] = ",".join(filter(None, (before, "nvptx-no-f32x2")))
        try:
            kernel = compile_kernel()
        finally:
            if before is None:
                del os.environ["DISABLE_LLVM_OPT"]
            else:
                os.environ["DISABLE_LLVM_OPT"] = before
    if _fuses_pairs(kernel):
        what = "Triton multiplies and adds pairs of numbers, which a ptxas older than 13.1 fuses: bits may differ"
        cure = "set TRITON_PTXAS_BLACKWELL_PATH to a newer ptxas, as `pip install nvidia-cuda-nvcc` brings it"
        raise BackendError(f"{what}; {cure}")
    return kernel


def _fuses_pairs(kernel: Any) -> bool:
    """Whether ptxas may have fused a multiplication and an addition of pairs, though ``--fmad=false`` forbids that."""
    if "f32x2" not in kernel.asm.get("ptx", "f32x2"):  # a cache that keeps machine code only has no PTX
        return False
    release = re.search(rb"release (\d+)\.(\d+), V", kernel.asm["cubin"])  # ptxas notes its version there
    return release is not None and tuple(map(int, release.groups())) < (13, 1)


class Compiled:
    """A launcher: it has a variant, compiled and loaded on the current device, and launches so many programs of it."""

    def __init__(self, variant: Variant) -> None:
        from triton.runtime.driver import driver

        self._kernel = compiled(variant, driver.active.get_current_target())
        self._kernel[1, 1, 1]  # loads it
        self.variant = variant
        names = (_ABSENT if kind == "constexpr" else name for name, (kind, _) in variant.arguments().items())
        self._arguments = itemgetter(*names)
        self._constants = tuple(
            variant.all_constants()[name] for name in variant.function.arg_names[-len(variant.all_constants()) :]
        )

    def __call__(self, programs: int, values: dict[str, Any]) -> None:
        """Launches on torch's current stream of the current device."""
        values[_ABSENT] = None
        self._kernel[programs, 1, 1](*self._arguments(values), *self._constants)


class Interpreted:
    """A kernel that Triton's interpreter runs."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._function = variant.function
        self._names = list(variant.arguments())
        self._constants = variant.all_constants()

    def __call__(self, programs: int, values: dict[str, Any]) -> None:
        import numpy

        with _INTERPRETER, numpy.errstate(all="ignore"):  # overflow and NaN are results here, not mishaps
            self._function[(programs,)](**{name: values.get(name) for name in self._names}, **self._constants)


def pointer(tensor: Tensor | None) -> Any:
    """The value that a kernel is given for an operand; None if it is absent."""
    if tensor is None or not INTERPRETED:
        return None if tensor is None else tensor.data_ptr()
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def pointer_or_null(tensor: Tensor | None) -> Any:
    """The pointer of an operand, or null where it is absent. The interpreter knows no null pointer."""
    if INTERPRETED:
        return pointer(torch.empty(1) if tensor is None else tensor)
    return 0 if tensor is None else tensor.data_ptr()


#: The names of the strides and jumps of a forward pass's operands, and of a backward pass's.
_OF_FORWARD = tuple((f"{name}_stride", f"{name}_jump") for name in ("x", "residual", "out", "residual_out"))
_OF_GATES = ("z_stride", "z_jump")
_OF_GATE, _OF_GATE_BACKWARD = ("y", "z", "out"), ("d", "y", "z", "dy", "dz")
_OF_QUANTIZER = tuple((f"{name}_stride", f"{name}_jump") for name in ("x", "numbers", "scale", "zero_point"))
_OF_TABLES = tuple((f"{name}_stride", f"{name}_jump") for name in ("cos", "sin", "positions"))
_OF_LOG_PROB = ("logits", "ids", "temperature", "m", "s", "entropy", "d", "d_entropy")
_OF_BACKWARD = tuple((f"{name}_stride", f"{name}_jump") for name in ("dy", "d_total", "h"))

#: The numbers that only a norm before a quantizer has.
_NUMBERS = ("eps", "weight_offset", *(name for names in _OF_FORWARD[1:] for name in names))


def _places(
    call: Forward | Backward | Quantize | Call,
    names: Iterable[tuple[str, str]],
    strides: Iterable[Strides],
) -> dict[str, Any]:
    """The places of rows, as ``rows_at`` in ``numbers.py`` takes it."""
    inner = None if call.inner == call.rows else call.inner
    places: dict[str, Any] = {"inner": inner}
    for (stride_name, jump_name), (outer_stride, stride) in zip(names, strides, strict=True):
        places[stride_name] = stride
        places[jump_name] = None if inner is None else outer_stride - inner * stride
    return places


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one for a block: kernels are loaded and launched there."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device.index)


@dataclass
class Host:
    """The ``forward`` and ``backward`` of a backend: it holds the launchers of each kind of call, and calls them."""

    #: By the name of a kind: the function that chooses its kernel, or its kernels in the order of their launches.
    choosers: Mapping[str, Callable[[Kind], Variant | Mapping[str, Variant]]]
    #: Compiles and loads a variant: a launcher.
    load: Callable[[Variant], Any]
    pointer: Callable[[Tensor | None], Any] = pointer
    #: Whether kernels read operands that begin between two elements.
    unaligned: bool = False
    #: The launchers of each kind of call on each device.
    held: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    #: All launchers: several kinds of calls may share one.
    launchers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before Python takes modules apart that the destructors of Triton's kernels still need.
        atexit.register(self.forget)

    def forget(self) -> None:
        """Lets go of all launchers; kernels are compiled, or found on disk, when they are needed again."""
        self.held.clear()
        self.launchers.clear()

    def _hold(self, key: tuple[Any, ...], variants: Iterable[Variant], call: AnyCall) -> list[Any]:
        if not self.unaligned:
            check_addresses(call)
        found = []
        for variant in variants:
            identity = (key[0], *variant.identity())
            if identity not in self.launchers:
                self.launchers[identity] = self.load(variant)
            found.append(self.launchers[identity])
        self.held[key] = found
        return found

    def held_for(self, call: AnyCall) -> list[Any]:
        """The launchers of the kernels of a call."""
        kind = kind_of(call)
        key = (device_of(call).index, kind)
        found = self.held.get(key)
        if found is None:
            chosen = self.choosers[kind.name](kind)
            found = self._hold(key, (chosen,) if isinstance(chosen, Variant) else chosen.values(), call)
        return found

    def _given(self, call: AnyCall) -> dict[str, Any]:
        """The values that a kernel is given for the operands and the numbers of a call, by their names."""
        values = call._asdict()
        for name in _TENSORS[type(call)]:
            values[name] = self.pointer(values[name])
        return values

    def _operands(self, call: Forward) -> dict[str, Any]:
        """The values that a kernel is given for a forward pass."""
        values = self._given(call)
        values |= _places(call, _OF_FORWARD, call.strides)
        values["hidden_size"] = call.operation.hidden_size
        values["with_rstd"] = int(call.rstd is not None)
        if call.operation.around is not None:
            strides = (0 if t is None or t.dim() == 1 else t.shape[1] for t in (call.weight, call.bias))
            values |= zip(("weight_stride", "bias_stride"), strides, strict=True)
            values["heads"] = call.heads
        return values

    def run(self, call: AnyCall) -> None:
        """Launches the kernels of any call; see :class:`fusednorm.registry.Backend`."""
        getattr(self, _METHODS[type(call)])(call)

    def forward(self, call: Forward) -> None:
        """Launches a kernel; see :class:`fusednorm.registry.Backend`."""
        self._launch(call, call.rows, self._operands(call))

    def _launch(self, call: ForwardCall, rows: int, values: dict[str, Any]) -> None:
        """Launches the one kernel of a call."""
        with _current(device_of(call)):
            (launch,) = self.held_for(call)
            launch(launch.variant.programs(rows, call.hidden_size, 1, rows), values)

    def quantize(self, call: Quantize) -> None:
        """Launches the kernel that quantizes rows, which it may normalise before; see :class:`Quantize`."""
        strides = call.y_strides, call.out_strides, call.scale_strides[:2], call.zero_point_strides[:2]
        values = dict.fromkeys(_NUMBERS, 0) | _places(call, _OF_QUANTIZER, strides)
        values |= {"x": self.pointer(call.y), "rows": call.rows, "hidden_size": call.hidden_size}
        values["group"] = call.quantization.group(call.hidden_size)
        if call.norm is not None:
            values |= self._operands(call.norm)
        values |= {"numbers": self.pointer(call.out.view(torch.uint8)), "scale": self.pointer(call.scale)}
        values |= {"scale_group_stride": call.scale_strides[2], "zero_point": self.pointer(call.zero_point)}
        values |= {"zero_point_group_stride": call.zero_point_strides[2]}
        values |= zip(_LIMITS, c_quantizer.limits(call.quantization, call.dtype), strict=True)
        self._launch(call, call.rows, values)

    def declared(self, call: Call) -> None:
        """Launches the kernel of a declared operation, or of its gradient."""
        own = {"gate": self.gate, "norm_gated": self.norm_gated, "rotate": self.rotate, "int8_linear": self.int8_linear}
        own.get(call.name, self.log_prob)(call)

    def int8_linear(self, call: Call) -> None:
        """Launches the kernel of products of int8."""
        values: dict[str, Any] = {name: self.pointer(tensor) for name, tensor in call.tensors.items()}
        values |= {"rows": call.rows, "columns": len(call.weight), "hidden_size": call.hidden_size}
        values |= {"weight_stride": call.weight.stride(0)}
        places = [(f"{name}_stride", f"{name}_jump") for name in ("q", "out")]
        values |= _places(call, places, [call.strides["q"], call.strides["out"]])
        with _current(device_of(call)):
            (launch,) = self.held_for(call)
            tile = launch.variant.constants
            launch(-(-call.rows // tile["ROWS"]) * -(-len(call.weight) // tile["COLUMNS"]), values)

    def gate(self, call: Call) -> None:
        """Launches the kernel of a gate, or of its backward pass."""
        names = _OF_GATE_BACKWARD if call.backward else _OF_GATE
        values: dict[str, Any] = {name: self.pointer(call.tensors.get(name)) for name in names}
        values |= {"rows": call.rows, "hidden_size": call.hidden_size}
        places = [(f"{name}_stride", f"{name}_jump") for name in names]
        values |= _places(call, places, [call.strides.get(name, ABSENT) for name in names])
        self._launch(call, call.rows, values)

    def norm_gated(self, call: Call) -> None:
        """Launches the kernel that normalises rows and gates them, in the order that the call says."""
        values = self._operands(norm_of(call)) | _places(call, (_OF_GATES,), (call.strides["gate"],))
        values["z"] = self.pointer(call.gate)
        self._launch(call, call.rows, values)

    def rotate(self, call: Call) -> None:
        """Launches the kernel that normalises and rotates the heads of q, or those of q and of k."""
        tables = ("cos", "sin", "positions")
        values = _places(call, _OF_TABLES, [call.strides.get(name, ABSENT) for name in tables])
        values |= {name: self.pointer(call.tensors[name]) for name in tables}
        values |= {"rows": call.rows, "eps": call.flags["eps"], "weight_offset": call.flags["weight_offset"]}
        for part in of_one_weight_dtype(call):
            sets = heads_of(part)
            # Without k the kernel is given q in its place, and no program of it.
            for name, heads in zip("qk", (sets[0], sets[-1]), strict=True):
                values |= self._heads(call, name, heads)
            with _current(device_of(part)):
                (launch,) = self.held_for(part)
                per_program = launch.variant.per_program
                launch(sum(-(-call.rows * heads.number // per_program) for heads in sets), values)

    def _heads(self, call: Call, name: str, heads: Heads) -> dict[str, Any]:
        """The values that a kernel is given for the heads of q or of k."""
        values: dict[str, Any] = {f"{name}_count": heads.number, f"{name}_weight_head": heads.weight_stride}
        for place, (outer_stride, stride, of_heads) in ((name, heads.x_strides), (f"{name}_out", heads.out_strides)):
            values |= _places(call, ((f"{place}_stride", f"{place}_jump"),), ((outer_stride, stride),))
            values[f"{place}_head"] = of_heads
        operands = {"": heads.x, "_out": heads.out, "_weight": heads.weight, "_rstd": heads.rstd}
        return values | {name + of: self.pointer(tensor) for of, tensor in operands.items()}

    def log_prob(self, call: Call) -> None:
        """Launches the kernel of log-probabilities, or of their gradient."""
        values: dict[str, Any] = {name: self.pointer(call.tensors.get(name)) for name in _OF_LOG_PROB}
        out = "dlogits" if call.backward else "out"
        values |= dict.fromkeys(("out", "result"), self.pointer(call.tensors[out]))
        values |= {"d_result": values["d"], "hidden_size": call.hidden_size}
        names = [(f"{name}_stride", f"{name}_jump") for name in ("logits", "out", "d")]
        values |= _places(call, names, [call.strides.get(name, ABSENT) for name in ("logits", out, "d")])
        ids, ignored = call.tensors.get("ids"), call.flags.get("ignore_index")
        values["count"] = 0 if ids is None else ids.numel() // call.rows
        values |= {"ignores": int(ignored is not None), "ignore_index": ignored or 0}
        values["softcap"] = call.flags.get("softcap") or 0.0
        self._launch(call, call.rows, values)

    def backward(self, call: Backward) -> None:
        """Launches kernels; see :class:`fusednorm.registry.Backend`."""
        partial = scratch_of(call)
        block, blocks = blocks_of(call.rows)
        with _current(call.operation.device):
            values = self._given(call) | _places(call, _OF_BACKWARD, call.strides)
            values |= {"d_total": values["d_residual_out"], "partial": self.pointer(partial)}
            means = partial[blocks * call.hidden_size :] if partial is not None and call.operation.center else None
            values["means"] = self.pointer(means)
            values |= {"block": block, "blocks": blocks, "hidden_size": call.hidden_size}
            for launch in self.held_for(call):
                launch(launch.variant.programs(call.rows, call.hidden_size, block, blocks), values)


_METHODS = {
    Forward: "forward",
    Quantize: "quantize",
    Call: "declared",
    Backward: "backward",
}

#: The names of the operands of each call.
_TENSORS = {
    call: [name for name, annotation in call.__annotations__.items() if "Tensor" in str(annotation)]
    for call in _METHODS
}

#: How this process launches kernels.
launcher = Interpreted if INTERPRETED else Compiled
