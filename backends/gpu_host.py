"""What backends that launch compiled kernels do on the host: hold those of each kind of call, and launch them.

A kind of call is everything but the number of rows, the strides, and numbers such as ``eps``.
"""

from __future__ import annotations

import atexit
import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.layout import new_gradients, rows_of

#: The largest number of bytes that any kernel wants addresses to be multiples of.
_MOST_ALIGNED = 32

#: Blocks of rows that a thread adds up, of a kernel that takes the more columns the fewer blocks there are.
IN_LANE = 8

#: What plans of kernels for GPUs say until our tests have run on one.
UNTRIED = "our tests have not run on a GPU yet"


class Variant(Protocol):
    """One compilation of one kernel."""

    def identity(self) -> tuple[Any, ...]:
        """Equal for variants that are compiled alike."""


class Launch(Protocol):
    """A variant, compiled and loaded on the current device."""

    #: Rows, or columns, that a program takes; see :func:`programs`.
    per_program: int

    def __call__(self, programs: int, device: int, values: dict[str, Any]) -> None:
        """Launches so many programs on torch's current stream of the device, which must be the current one."""


def ceiling(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def address(name: str, tensor: Tensor | None) -> int | None:
    """Where an operand begins; None if it is absent.

    Raises:
        ValueError: between two elements, where a GPU reads nothing.
    """
    if tensor is None:
        return None
    begin = tensor.data_ptr()
    if begin % tensor.itemsize:
        raise ValueError(
            f"{name} begins at an address that is no multiple of {tensor.itemsize}, between two elements, which GPUs "
            f"cannot read; pass {name}.clone()"
        )
    return begin


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _alignment(rows: tuple[tuple[Tensor | None, int], ...], others: tuple[Tensor | None, ...]) -> int:
    """The power of two of bytes that all rows (tensors with their strides in elements) and all others begin at."""
    low = _MOST_ALIGNED
    for tensor, stride in rows:
        if tensor is not None:
            low |= tensor.data_ptr() | stride * tensor.element_size()
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


def programs(name: str, per_program: int, rows: int, hidden_size: int, block: int, blocks: int) -> int:
    """How many programs of a kernel a backward pass launches; ``name``: what the kernel does.

    A program of ``rows`` takes that many rows; of ``weight`` that many columns of all blocks of rows, of ``shares`` of
    one block; of ``both`` the blocks that so many rows hold whole, and at least one; of ``sums`` that many columns of
    up to IN_LANE blocks, half as many of up to twice as many blocks, and so on.
    """
    if name == "rows":
        return -(-rows // per_program)
    if name == "both":
        return -(-blocks // max(per_program // block, 1))
    if name == "sums":
        per_program //= ceiling(-(-blocks // IN_LANE))
    return -(-hidden_size // per_program) * (blocks if name == "shares" else 1)


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
    #: From the arguments of a kind of backward pass to its kernels: ``both``, or ``rows`` and ``shares``; ``weight`` or
    #: ``sums``.
    backward_variants: Callable[..., Mapping[str, Variant]]
    #: Compiles and loads a variant.
    ready: Callable[[Any], Launch]
    #: What a kernel is given for an operand, of this name.
    pointer: Callable[[str, Tensor | None], Any]
    #: Run before the first kernel is compiled.
    before: Callable[[], None] = lambda: None
    #: Writes gradients with the kernels of a kind of pass that it knows; returns whether it did.
    quick: Callable[..., bool] = lambda *_: False
    #: The kernels of each kind of call on each device, by what they do.
    held: dict[tuple[Any, ...], dict[str, Launch]] = field(default_factory=dict)
    #: All kernels: several kinds of calls may share one.
    ways: dict[tuple[Any, ...], Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before Python takes modules apart that the destructors of Triton's kernels still need.
        atexit.register(self.forget)

    def forget(self) -> None:
        """Lets go of all kernels; they are compiled, or found on disk, when they are needed again."""
        self.held.clear()
        self.ways.clear()

    def way(self, variant: Variant, device: int | None) -> Launch:
        """The variant, ready to be launched on the device, which must be the current one."""
        identity = (device, *variant.identity())
        found = self.ways.get(identity)
        if found is None:
            found = self.ways[identity] = self.ready(variant)
        return found

    def _hold(self, key: tuple[Any, ...], variants: Mapping[str, Variant]) -> dict[str, Launch]:
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
            _alignment(with_strides, (weight, rstd)),
        )
        device = x.device
        key = (device.index, *kind)
        pointer = self.pointer
        values = {
            "x": pointer("x", x),
            "residual": pointer("residual", residual),
            "weight": pointer("weight", weight),
            "out": pointer("out", out),
            "residual_out": pointer("residual_out", residual_out),
            "rstd": pointer("rstd", rstd),
            "x_stride": x_stride,
            "residual_stride": residual_stride,
            "out_stride": out_stride,
            "residual_out_stride": residual_out_stride,
            "rows": rows,
            "hidden_size": hidden_size,
            "roots": int(rstd is not None),
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
        if rows == 0 or not any(needs):
            return reference.backward(
                dy, d_residual_out, h, rstd, weight, weight_offset, x_dtype, residual_dtype, needs
            )
        block = -(-rows // min(rows, reference.ROW_BLOCKS))
        blocks = -(-rows // block)
        (dx, dresidual, dweight), gradients = new_gradients(h, weight, x_dtype, residual_dtype, needs)
        partial = None
        if dweight is not None:
            partial = torch.empty((blocks, hidden_size), dtype=rstd.dtype, device=h.device)
        if self.quick(dy, d_residual_out, h, rstd, weight, dx, dresidual, partial, dweight, block, weight_offset):
            return gradients
        dy, dy_stride = rows_of(dy)
        h, h_stride = rows_of(h)
        d_total, d_total_stride = (None, 0) if d_residual_out is None else rows_of(d_residual_out)
        weight = None if weight is None else weight.contiguous()
        rstd = rstd.contiguous()
        device = h.device
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
            _alignment(with_strides, (rstd, weight, dx, dresidual, partial, dweight)),
        )
        key = (device.index, *kind)
        pointer = self.pointer
        values = {
            "dy": pointer("dy", dy),
            "d_total": pointer("d_total", d_total),
            "h": pointer("h", h),
            "rstd": pointer("rstd", rstd),
            "weight": pointer("weight", weight),
            "dx": pointer("dx", dx),
            "dresidual": pointer("dresidual", dresidual),
            "partial": pointer("partial", partial),
            "dweight": pointer("dweight", dweight),
            "dy_stride": dy_stride,
            "d_total_stride": d_total_stride,
            "h_stride": h_stride,
            "rows": rows,
            "block": block,
            "blocks": blocks,
            "hidden_size": hidden_size,
            "weight_offset": weight_offset,
        }
        with _current(device):
            launches = self.held.get(key) or self._hold(key, self.backward_variants(*kind))
            for name, launch in launches.items():
                count = programs(name, launch.per_program, rows, hidden_size, block, blocks)
                launch(count, device.index, values)
        return gradients
