"""What the Triton backends do outside their kernels: compile one for each kind of call, hold it, and launch it.

Triton's own binder inspects every argument of every call to find the compiled kernel that it needs. Here a kernel is
compiled explicitly for the types, the alignment and the constants of a kind of call, and then launched directly.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.layout import rows_of

#: Oldest Triton whose compiler takes what :func:`compiled` gives it.
OLDEST = (3, 4)

#: Whether Triton's interpreter runs the kernels, on the CPU and without compiling. Triton reads it when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").strip().lower() in ("1", "true", "on", "yes", "y")

#: The longest rows: the sums of their segments have to fit a tensor of Triton's.
LONGEST = 2**30

#: The interpreter knows one program at a time.
_INTERPRETER = threading.Lock()

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def missing() -> list[str]:
    """Why Triton cannot be used, each reason with its cure; empty if it can."""
    try:
        import triton
    except ImportError as error:
        return [f"Triton cannot be imported ({error}); `pip install triton` installs it where there is a wheel"]
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return [
            f"Triton {triton.__version__} is too old; `pip install 'triton>={wanted}'` (torch 2.8 and newer have it)"
        ]
    return []


def active_target() -> Any | None:
    """Triton's target on this machine (``backend``, ``arch`` and ``warp_size``); None where it has no driver."""
    from triton.runtime.driver import driver

    try:
        return driver.active.get_current_target()
    except RuntimeError:  # "0 active drivers"
        return None


def too_long(hidden_size: int) -> list[str]:
    """Why rows of this length cannot be taken; empty if they can."""
    return [f"rows of {hidden_size} elements are longer than {LONGEST}"] if hidden_size > LONGEST else []


def ceiling(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


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
    #: What is known to divide the hidden size, where a kernel takes it when it runs.
    divisor: int = 1
    #: Whether bfloat16 goes by its bits, and is rounded in integers.
    bits: bool = False
    warps: int = 1
    #: Rows, or columns, that a program takes.
    per_program: int = 1

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
        """Of each argument that the kernel takes when it runs: its type, and what is known to divide it."""
        found: dict[str, tuple[str, int]] = {}
        constants = self.all_constants()
        for name in self.function.arg_names:
            operand = self.dtypes.get(name.removesuffix("_stride"))
            if name in constants:
                continue
            if name in self.dtypes:
                found[name] = ("constexpr" if operand is None else self.pointer(operand), 16 if self.aligned else 1)
            elif name in ("eps", "weight_offset"):
                found[name] = (_NAMES[self.accumulator], 1)
            elif name.endswith("_stride") and operand is not None:
                found[name] = ("i64", 16 // operand.itemsize if self.aligned else 1)
            else:
                found[name] = ("i64", self.divisor if name == "hidden_size" else 1)
        return found


def compiled(variant: Variant, target: Any) -> Any:
    """The variant compiled for a target, from Triton's cache on disk if it is there."""
    import triton
    from triton.compiler import ASTSource

    arguments, constants = variant.arguments(), variant.all_constants()
    names = variant.function.arg_names
    signature = {name: arguments[name][0] if name in arguments else "constexpr" for name in names}
    known = {(i,): constants.get(name) for i, name in enumerate(names) if signature[name] == "constexpr"}
    divisors = {(i,): arguments[name][1] for i, name in enumerate(names) if signature[name] != "constexpr"}
    attributes = {at: [["tt.divisibility", divisor]] for at, divisor in divisors.items() if divisor > 1}
    options: dict[str, Any] = {"enable_fp_fusion": False}
    if target.backend == "cpu":
        options["enable_fast_math"] = False
    else:
        options["num_warps"] = variant.warps
    return triton.compile(ASTSource(variant.function, signature, known, attributes), target=target, options=options)


class Launch:
    """A variant, compiled and loaded on the current device; calling it launches it."""

    def __init__(self, variant: Variant) -> None:
        from triton.runtime.driver import driver

        kernel = compiled(variant, driver.active.get_current_target())
        self.per_program = variant.per_program
        self._arguments = itemgetter(*variant.arguments())
        self._constants = tuple(
            variant.all_constants()[name] for name in variant.function.arg_names[-len(variant.all_constants()) :]
        )
        self._run = kernel.run  # loads it
        self._function = kernel.function
        self._metadata = kernel.packed_metadata
        self._stream = driver.active.get_current_stream

    def __call__(self, programs: int, device: int, values: dict[str, Any]) -> None:
        """Launches on torch's current stream of the device, which must be the current one. Pointers are integers."""
        arguments = self._arguments(values)
        stream = self._stream(device)
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments, *self._constants
        )

    @staticmethod
    def pointer(tensor: Tensor | None) -> int | None:
        """What a kernel is given for an operand."""
        return None if tensor is None else tensor.data_ptr()


class Interpretation:
    """A variant run by Triton's interpreter, with the same interface."""

    def __init__(self, variant: Variant) -> None:
        self.per_program = variant.per_program
        self._function = variant.function
        self._names = list(variant.arguments())
        self._constants = variant.all_constants()

    def __call__(self, programs: int, device: int, values: dict[str, Any]) -> None:
        import numpy

        with _INTERPRETER, numpy.errstate(all="ignore"):  # overflow and NaN are results here, not mishaps
            self._function[(programs,)](**{name: values[name] for name in self._names}, **self._constants)

    @staticmethod
    def pointer(tensor: Tensor | None) -> Tensor | None:
        return tensor.view(torch.uint16) if tensor is not None and tensor.dtype == torch.bfloat16 else tensor


Way = Interpretation if INTERPRETED else Launch


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _aligned(rows: tuple[tuple[Tensor | None, int], ...], others: tuple[Tensor | None, ...]) -> bool:
    """Whether all rows (tensors with their strides in elements) and all others begin at multiples of 16 bytes."""
    low = 0
    for tensor, stride in rows:
        if tensor is not None:
            low |= tensor.data_ptr() | stride * tensor.element_size()
    for tensor in others:
        if tensor is not None:
            low |= tensor.data_ptr()
    return low % 16 == 0


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one for a block: kernels are loaded and launched there."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device.index)


@dataclass
class Host:
    """The ``forward`` and ``backward`` of a backend, over its choice of kernels."""

    #: From the arguments of a kind of call to its kernel.
    forward_variant: Callable[..., Variant]
    #: From the arguments of a kind of backward pass to its kernels: ``both``, or ``rows`` and ``shares``; ``weight``.
    backward_variants: Callable[..., dict[str, Variant]]
    #: Run before the first kernel is compiled.
    before: Callable[[], None] = lambda: None
    #: The kernels of each kind of call on each device, by what they do.
    held: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    #: All kernels: several kinds of calls may share one.
    ways: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def way(self, variant: Variant, device: int | None) -> Any:
        """The variant, ready to be launched on the device, which must be the current one."""
        identity = (device, *variant.identity())
        found = self.ways.get(identity)
        if found is None:
            found = self.ways[identity] = Way(variant)
        return found

    def _hold(self, key: tuple[Any, ...], variants: dict[str, Variant]) -> dict[str, Any]:
        self.before()
        launches = self.held[key] = {name: self.way(variant, key[0]) for name, variant in variants.items()}
        return launches

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        residual_out: Tensor | None,
        rstd: Tensor | None,
        rows: int,
        hidden_size: int,
        x_stride: int,
        residual_stride: int,
        out_stride: int,
        residual_out_stride: int,
        eps: float,
        weight_offset: float,
        round_sum: bool,
        round_norm: bool,
    ) -> None:
        """Runs a kernel; see :class:`fusednorm.registry.Backend`."""
        with_strides = (
            (x, x_stride),
            (residual, residual_stride),
            (out, out_stride),
            (residual_out, residual_out_stride),
        )
        kind = (
            x.dtype,
            _dtype(residual),
            _dtype(weight),
            out.dtype,
            rstd is not None,
            hidden_size,
            weight_offset != 0,
            round_sum,
            round_norm,
            _aligned(with_strides, (weight, rstd)),
        )
        device = x.device
        key = (device.index, *kind)
        pointer = Way.pointer
        values = {
            "x": pointer(x),
            "residual": pointer(residual),
            "weight": pointer(weight),
            "out": pointer(out),
            "residual_out": pointer(residual_out),
            "rstd": pointer(rstd),
            "x_stride": x_stride,
            "residual_stride": residual_stride,
            "out_stride": out_stride,
            "residual_out_stride": residual_out_stride,
            "rows": rows,
            "hidden_size": hidden_size,
            "eps": eps,
            "weight_offset": weight_offset,
        }
        with _current(device):
            launch = (self.held.get(key) or self._hold(key, {"forward": self.forward_variant(*kind)}))["forward"]
            launch(-(-rows // launch.per_program), device.index, values)

    def backward(
        self,
        dy: Tensor,
        d_residual_out: Tensor | None,
        h: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        weight_offset: float,
        x_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Runs the kernels; see :func:`fusednorm.backends.reference.backward`."""
        hidden_size = h.shape[-1]
        rows = h.numel() // hidden_size
        need_x, need_residual, need_weight = needs
        need_residual, need_weight = need_residual and residual_dtype is not None, need_weight and weight is not None
        if rows == 0 or not (need_x or need_residual or need_weight):
            return reference.backward(
                dy, d_residual_out, h, rstd, weight, weight_offset, x_dtype, residual_dtype, needs
            )
        dy, dy_stride = rows_of(dy)
        h, h_stride = rows_of(h)
        d_total, d_total_stride = (None, 0) if d_residual_out is None else rows_of(d_residual_out)
        weight = None if weight is None else weight.contiguous()
        rstd = rstd.contiguous()
        device = h.device
        # Of one dtype they are one tensor.
        first = x_dtype if need_x else residual_dtype
        dx = torch.empty(h.shape, dtype=first, device=device) if need_x or need_residual else None
        apart = need_x and need_residual and residual_dtype != x_dtype
        dresidual = torch.empty(h.shape, dtype=residual_dtype, device=device) if apart else None
        block = -(-rows // min(rows, reference.ROW_BLOCKS))
        blocks = -(-rows // block)
        dweight = partial = None
        if need_weight and weight is not None:
            dweight = torch.empty_like(weight)
            partial = torch.empty((blocks, hidden_size), dtype=rstd.dtype, device=device)
        with_strides = ((dy, dy_stride), (h, h_stride), (d_total, d_total_stride))
        kind = (
            dy.dtype,
            _dtype(d_total),
            h.dtype,
            _dtype(weight),
            _dtype(dx),
            _dtype(dresidual),
            _dtype(dweight),
            rstd.dtype,
            hidden_size,
            weight_offset != 0,
            _aligned(with_strides, (rstd, weight, dx, dresidual, partial, dweight)),
        )
        key = (device.index, *kind)
        pointer = Way.pointer
        values = {
            "dy": pointer(dy),
            "d_total": pointer(d_total),
            "h": pointer(h),
            "rstd": pointer(rstd),
            "weight": pointer(weight),
            "dx": pointer(dx),
            "dresidual": pointer(dresidual),
            "partial": pointer(partial),
            "dweight": pointer(dweight),
            "dy_stride": dy_stride,
            "d_total_stride": d_total_stride,
            "h_stride": h_stride,
            "rows": rows,
            "block": block,
            "blocks": blocks,
            "half": ceiling(blocks) // 2,
            "hidden_size": hidden_size,
            "weight_offset": weight_offset,
        }
        with _current(device):
            launches = self.held.get(key) or self._hold(key, self.backward_variants(*kind))
            for name, launch in launches.items():
                shares = -(-(rows if name == "rows" else hidden_size) // launch.per_program)
                launch({"both": blocks, "shares": blocks * shares}.get(name, shares), device.index, values)
        return dx if need_x else None, (dresidual if apart else dx) if need_residual else None, dweight
