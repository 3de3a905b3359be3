"""The C library in ``cpu/``: NEON, SVE, AVX2, AVX-512 and portable kernels, chosen when the program runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from zipimport import zipimporter

import torch

from fusednorm.calls import c_abi, process
from fusednorm.calls import fast_path as path
from fusednorm.calls.c_enums import FLAGS_OF, DeclaredOf
from fusednorm.calls.call import Call, with_functions

if TYPE_CHECKING:
    from fusednorm.calls.call import AnyCall, Operation

DEVICES = ("cpu",)

KNOWS = frozenset(("norm_before_add", "affine", "x_scale", "quantize", "round_scale", "gate", "norm_gated", "rotate"))
KNOWS |= {"gate_steps", "gate_interleaved", "softcap", "affine_backward", "gate_backward", "norm_gated_backward"}
KNOWS |= {"center", "log_prob", "log_prob_backward", "log_prob_parts"}
KNOWS |= {of.name.lower() for of in DeclaredOf if of > DeclaredOf.SUMS}  # those before are log-probabilities
KNOWS |= {f"{of.name.lower()}.{flag}" for of, flags in FLAGS_OF.items() for flag in flags}
KNOWS |= {"paged_attention"}
KNOWS |= with_functions("gate", "gate_backward", "norm_gated", "norm_gated_backward")

#: The type of device whose tensors the fast path takes to this backend; None if there is no fast path.
fast_path: str | None = None

#: The instruction sets of each architecture, the best last, whether this library was compiled for them or not.
LADDERS = (
    ("scalar", "avx2", "avx512", "avx512_fp16", "zen4"),
    ("neon", "sve", "neon_bf16", "sve_bf16"),
)


def best(usable: Sequence[str], cap: str) -> str:
    """The best of the usable instruction sets that is not above the cap; one of another architecture caps nothing."""
    ladder = next(ladder for ladder in LADDERS if set(usable) <= set(ladder))
    allowed = ladder[: ladder.index(cap) + 1] if cap in ladder else ladder
    return [name for name in usable if name in allowed][-1]


def _cure(error: ImportError) -> str:
    """How the extension comes here: that depends on what is missing."""
    if error.name == "_cffi_backend":
        return "`pip install cffi` brings the package that it needs"
    if isinstance(getattr(__spec__, "loader", None), zipimporter):
        return "Python imports none from a zip archive: install fusednorm with pip, or unpack the archive"
    return "`pip install --force-reinstall --no-deps .` in the checkout builds it, which takes a C compiler"


try:
    _extension: Any = import_module("fusednorm._cpu")
except ImportError as error:
    _missing = [f"its compiled extension cannot be imported ({error}); {_cure(error)}"]
else:
    _missing = []
    _lib = _extension.lib
    _text = _extension.ffi.string

    _names: list[str] = [_text(_lib.fn_isa_name(isa)).decode() for isa in range(_lib.fn_isa_count())]
    _usable = {name: isa for isa, name in enumerate(_names) if _lib.fn_isa_usable(isa)}
    _cap = os.environ.get("FUSEDNORM_CPU_ISA", "").strip().lower()
    _known = dict.fromkeys(name for ladder in LADDERS for name in ladder)
    if _cap and _cap not in _known:
        _missing = [f"FUSEDNORM_CPU_ISA is {_cap!r}, which is no instruction set; they are {', '.join(_known)}"]
    _lib.fn_use_isa(_usable[best(list(_usable), _cap)])
    if not _missing:
        fast_path = path.open_cpu()
    _openmp: str = _text(_lib.fn_openmp_path()).decode()  # now: from here on the library notices when the process forks
    if process.forked:  # before it was loaded
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


def unsuitable(operation: Operation) -> list[str]:
    """Why the backend cannot take a call: never."""
    return []


def plan(operation: Operation) -> str:
    """How a call will run, in words."""
    rows = -(-_lib.FN_PARALLEL_ELEMENTS // operation.hidden_size)
    threads = "one thread"
    if process.forked:
        threads += ", because this process was forked after fusednorm was imported"
    elif openmp() and torch.get_num_threads() > 1:
        threads = f"up to {torch.get_num_threads()} threads from {max(rows, 2)} rows"
    return f"C kernels for {variant()}, {threads}"


#: The function of the library that runs a declared operation, where it is not ``fn_run_declared``.
_FUNCTIONS = {"gate": "fn_run_gate", "norm_gated": "fn_run", "rotate": "fn_run_rotation"}


def forward(call: AnyCall) -> None:
    """Runs the kernels of any call; see :class:`fusednorm.registry.Backend`.

    Raises:
        MemoryError: no memory for the rows' buffers.
    """
    name = _FUNCTIONS.get(call.name, "fn_run_declared") if isinstance(call, Call) else "fn_run"
    function = getattr(_lib, name)
    for packed in _packed(call, torch.get_num_threads()):
        if function(packed):
            raise MemoryError(f"fusednorm found no memory for rows of {call.hidden_size} elements")


def _packed(call: AnyCall, threads: int) -> Iterator[bytes]:
    """The call as C takes it, a long one in parts of half a second on one thread: an interrupt is seen between them."""
    if isinstance(call, Call) and call.name in c_abi.PRODUCTS:
        for part in _parts_of_products(call):
            yield c_abi.pack_declared(part, threads)
    elif isinstance(call, Call) and call.name in ("attention", "paged_attention"):
        q, k, v, pages = call.q, call.k, call.v, call.tensors.get("pages")
        keys, queries = (k.shape[2], q.shape[2]) if pages is None else (pages.shape[1] * k.shape[2], q.shape[0])
        of_a_query = q.numel() // max(q.shape[-1] * queries, 1) * keys * (q.shape[-1] + v.shape[-1])
        count = max(_lib.FN_ATTENTION_OF_A_CALL // max(of_a_query, 1), 1)
        for first in range(0, queries, count):
            yield c_abi.pack_attention(call, threads, first, min(first + count, queries))
    else:
        yield c_abi.PACKED[type(call)](call, threads)


def note_checked(call: AnyCall) -> None:
    """Lets the fast path make calls like this one, which the self-check has seen to be right."""
    _lib.fn_note_checked(c_abi.pack_alone(call) if isinstance(call, Call) else c_abi.PACKED[type(call)](call))


_OF_COLUMNS = ("weight", "weight_scale", "bias")


def _parts_of_products(call: Call) -> Iterator[Call]:
    """Calls of columns of the products."""
    weight, out = call.weight, call.out
    columns = max(96, _lib.FN_PRODUCT_OF_A_CALL // (call.rows * call.hidden_size))
    if columns >= weight.shape[0]:  # nearly always
        yield call
        return
    for first in range(0, weight.shape[0], columns):
        of = slice(first, first + columns)
        tensors = {name: t[of] if name in _OF_COLUMNS and t is not None else t for name, t in call.tensors.items()}
        yield call._replace(tensors={**tensors, "out": out[..., of]})


backward = forward
