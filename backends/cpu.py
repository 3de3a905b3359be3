"""The C library in ``cpu/``: NEON, SVE, AVX2, AVX-512 and portable kernels, chosen when the program runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends.reference import backward as backward  # exact by definition, and autograd's only need yet
from fusednorm.registry import BackendError

if TYPE_CHECKING:
    from torch import Tensor

    from fusednorm.registry import Signature

DEVICES = ("cpu",)

#: Calls of fewer elements run on one thread: waking a second one costs more than it saves.
PARALLEL_ELEMENTS = 16 * 1024

try:
    _extension: Any = import_module("fusednorm._cpu")
except ImportError as error:
    _cure = "`pip install --force-reinstall --no-binary fusednorm fusednorm` builds it, which takes a C compiler"
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


#: The instruction sets that this processor can run, the best last, each with its index in the library.
_isas: dict[str, int] = {}
if not _missing:
    _isas = {_text(_lib.fn_isa_name(i)).decode(): i for i in range(_lib.fn_isa_count()) if _lib.fn_isa_usable(i)}


def variants() -> tuple[str, ...]:
    """The instruction sets that this processor can run, the best last."""
    return tuple(_isas)


def _best_allowed() -> int:
    """The best instruction set of this processor, or what FUSEDNORM_CPU_ISA caps it to."""
    cap = os.environ.get("FUSEDNORM_CPU_ISA", "").strip() or variants()[-1]
    if cap not in _isas:
        raise BackendError(
            f"FUSEDNORM_CPU_ISA is {cap!r}, which this machine cannot run; it can run {', '.join(variants())}"
        )
    return _isas[cap]


_isa = 0 if _missing else _best_allowed()


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Runs a block with one instruction set, for tests. Holds for the whole process.

    Raises:
        ValueError: this processor cannot run it.
    """
    global _isa
    if name not in _isas:
        raise ValueError(f"name must be one of {', '.join(variants())}, got {name!r}")
    before, _isa = _isa, _isas[name]
    try:
        yield
    finally:
        _isa = before


def variant() -> str:
    """The instruction set in use."""
    return _text(_lib.fn_isa_name(_isa)).decode()


def openmp() -> str:
    """The file of the OpenMP runtime whose threads are used; empty if there is none."""
    return "" if _missing else _text(_lib.fn_openmp_path()).decode()


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    return _missing


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call: never."""
    return []


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    rows = -(-PARALLEL_ELEMENTS // signature.hidden_size)
    threads = f"up to {torch.get_num_threads()} threads from {max(rows, 2)} rows" if openmp() else "one thread"
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
        _isa,
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
        torch.get_num_threads() if rows > 1 and rows * hidden_size >= PARALLEL_ELEMENTS else 1,
    )
    if failed:
        raise MemoryError(f"fusednorm found no memory for rows of {hidden_size} elements")
