"""The C library in ``cpu/``: NEON, SVE, AVX2, AVX-512 and portable kernels, chosen when the program runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from fusednorm import quick as quick_way
from fusednorm import registry
from fusednorm.backends import reference
from fusednorm.layout import new_gradients, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from fusednorm.registry import Signature

DEVICES = ("cpu",)

#: The devices whose tensors the quick way takes to this backend.
quick: str | None = None

#: The instruction sets of each architecture, the best last, whether this library was compiled for them or not.
LADDERS = (
    ("scalar", "avx2", "avx512", "avx512_fp16", "zen4"),
    ("scalar", "neon", "sve", "neon_bf16", "sve_bf16"),
)


def best(usable: Sequence[str], cap: str) -> str:
    """The best of the usable instruction sets that is not above the cap; one of another architecture caps nothing."""
    ladder = next(ladder for ladder in LADDERS if set(usable) <= set(ladder))
    allowed = ladder[: ladder.index(cap) + 1] if cap in ladder else ladder
    return [name for name in usable if name in allowed][-1]


try:
    _extension: Any = import_module("fusednorm._cpu")
except ImportError as error:
    _cure = "`pip install --force-reinstall --no-deps .` in the checkout builds it, which takes a C compiler"
    _missing = [f"its compiled extension cannot be imported ({error}); {_cure}"]
else:
    _missing = []
    _lib = _extension.lib
    _text = _extension.ffi.string
    _kinds = {
        None: _lib.FN_NONE,
        torch.float32: _lib.FN_F32,
        torch.float16: _lib.FN_F16,
        torch.bfloat16: _lib.FN_BF16,
        torch.float64: _lib.FN_F64,
    }

    _names: list[str] = [_text(_lib.fn_isa_name(isa)).decode() for isa in range(_lib.fn_isa_count())]
    _usable = {name: isa for isa, name in enumerate(_names) if _lib.fn_isa_usable(isa)}
    _cap = os.environ.get("FUSEDNORM_CPU_ISA", "").strip().lower()
    _known = dict.fromkeys(name for ladder in LADDERS for name in ladder)
    if _cap and _cap not in _known:
        _missing = [f"FUSEDNORM_CPU_ISA is {_cap!r}, which is no instruction set; they are {', '.join(_known)}"]
    _lib.fn_use_isa(_usable[best(list(_usable), _cap)])
    if quick_way.OPEN and not _missing:
        _addresses = (_extension.ffi.addressof(_lib, name) for name in ("fn_forward", "fn_backward"))
        quick_way.open_cpu(*(int(_extension.ffi.cast("uintptr_t", address)) for address in _addresses))
        quick = "cpu"
    _openmp: str = _text(_lib.fn_openmp_path()).decode()  # now: from here on the library notices when the process forks
    if registry.forked:  # before it was loaded
        _lib.fn_after_fork()


def variants() -> tuple[str, ...]:
    """The instruction sets that this processor can run, the best last."""
    return () if _missing else tuple(_usable)


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Runs a block with one instruction set, for tests. Holds for the whole process.

    Raises:
        ValueError: this processor cannot run it.
    """
    if name not in _usable:
        raise ValueError(f"name must be one of {', '.join(_usable)}, got {name!r}")
    before = _lib.fn_isa()
    _lib.fn_use_isa(_usable[name])
    try:
        yield
    finally:
        _lib.fn_use_isa(before)


def variant() -> str:
    """The instruction set in use."""
    isa: int = _lib.fn_isa()
    return _names[isa]


def openmp() -> str:
    """The file of the OpenMP runtime whose threads are used; empty if there is none."""
    return "" if _missing else _openmp


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    return _missing


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call: never."""
    return []


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    rows = -(-_lib.FN_PARALLEL_ELEMENTS // signature.hidden_size)
    threads = "one thread"
    if registry.forked:
        threads += ", because this process was forked after fusednorm was imported"
    elif openmp() and torch.get_num_threads() > 1:
        threads = f"up to {torch.get_num_threads()} threads from {max(rows, 2)} rows"
    return f"C kernels for {variant()}, {threads}"


def forward(
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
    """Runs the kernels; see :class:`fusednorm.registry.Backend`.

    Raises:
        MemoryError: no memory for the rows' buffers.
    """
    failed = _lib.fn_forward(
        _kinds[x.dtype],
        0 if residual is None else _kinds[residual.dtype],
        0 if weight is None else _kinds[weight.dtype],
        _kinds[out.dtype],
        round_sum + 2 * round_norm,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        0 if residual_out is None else residual_out.data_ptr(),
        0 if rstd is None else rstd.data_ptr(),
        rows,
        hidden_size,
        x_stride,
        residual_stride,
        out_stride,
        residual_out_stride,
        eps,
        weight_offset,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"fusednorm found no memory for rows of {hidden_size} elements")


def backward(
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
    """Runs the kernels; see :func:`fusednorm.backends.reference.backward`.

    Raises:
        MemoryError: no memory for the rows' buffers.
    """
    hidden_size = h.shape[-1]
    rows = h.numel() // hidden_size
    if rows == 0 or not any(needs):
        return reference.backward(dy, d_residual_out, h, rstd, weight, weight_offset, x_dtype, residual_dtype, needs)
    (dx, dresidual, dweight), gradients = new_gradients(h, weight, x_dtype, residual_dtype, needs)
    written = (dx, dresidual, None, dweight)
    if quick_way.backward(quick_way.CPU, dy, d_residual_out, h, rstd, weight, *written, 0, weight_offset):
        return gradients
    dy, dy_stride = rows_of(dy)
    h, h_stride = rows_of(h)
    d_total, d_total_stride = (None, 0) if d_residual_out is None else rows_of(d_residual_out)
    if weight is not None:
        weight = weight.contiguous()
    rstd = rstd.contiguous()
    failed = _lib.fn_backward(
        rstd.dtype == torch.float64,
        *(_kinds[None if tensor is None else tensor.dtype] for tensor in (dy, d_total, h, weight, dx, dresidual)),
        *(0 if t is None else t.data_ptr() for t in (dy, d_total, h, rstd, weight, dx, dresidual, dweight)),
        rows,
        hidden_size,
        dy_stride,
        d_total_stride,
        h_stride,
        weight_offset,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"fusednorm found no memory for gradients of {hidden_size} elements")
    return gradients
