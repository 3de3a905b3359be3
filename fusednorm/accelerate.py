"""torch's own RMS norm, ``torch.nn.functional.rms_norm`` and ``torch.nn.RMSNorm``, by the ``cpu`` backend.

The code of the Python function is exchanged, and not the function: modules that imported it have it, tables of
overrides still find it, and it is pickled by its name. Its own code stays in ``__wrapped__``, where ``inspect`` and
``torch.jit.script`` look for the source.

``docs/torch.md`` says why the operator below it, ``aten::rms_norm``, is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import update_wrapper
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter, functional
from torch.overrides import has_torch_function_variadic

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags
from fusednorm.calls.checks import check_operands
from fusednorm.calls.fast_path import Entry
from fusednorm.engine.choose import use_backend
from fusednorm.operations import norm
from fusednorm.operations.modules import as_row, as_rows

_CPU = use_backend("cpu")
_on_fast_path = Entry("norm", "x weight eps", returned=0).open("cpu")

#: The eps of torch for None, by the dtypes that are taken.
_EPS = {torch.float16: 2.0**-23, torch.bfloat16: 2.0**-23, torch.float32: 2.0**-23, torch.float64: 2.0**-52}

_PLAIN = frozenset((Tensor, Parameter))
_OPERANDS = _PLAIN | {type(None)}
_SHAPES = frozenset((tuple, list, torch.Size))

# Before a shape is looked at: the trace would record that.
_, _is_tracing = must_be_seen.QUESTIONS

#: The name in ``torch.nn.functional`` under which the new code finds :func:`_rms_norm`.
_NAME = "_fusednorm_rms_norm"

_lock = threading.Lock()
_open: set[Acceleration] = set()
_changed: FunctionType
_torchs: Any


def _rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """The norm, by the fast path if that takes the call."""
    if is_dynamo_compiling() or has_torch_function_variadic(input, weight) or _is_tracing():
        return _torchs(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    # C looks at all else: other types, the dtypes, devices, modes, gradients.
    if type(input) is Tensor and type(weight) in _OPERANDS and type(normalized_shape) in _SHAPES:
        row = weight.shape if weight is not None else () if input.is_nested else input.shape[-1:]
        if (
            len(row) == 1
            and (normalized_shape == row or normalized_shape == [*row])
            and type(normalized_shape[0]) is int  # torch refuses 8.0
            and (input.ndim < 4 or input.is_contiguous())  # of four and five, torch may keep channels last
        ):
            number = eps if type(eps) is float else _EPS.get(input.dtype) if eps is None else None
            result: Tensor | None = None if number is None else _on_fast_path(input, weight, number)
            if result is not None:
                return result
    return _beyond_fast_path(input, normalized_shape, weight, eps)


def _beyond_fast_path(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    """The norm by :func:`fusednorm.rms_norm`, or by torch, which then also says why a call is none."""
    if _is_torchs(input, normalized_shape, weight, eps):
        return _torchs(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    shape = tuple(normalized_shape)
    try:
        rows, row = as_rows(input, shape), as_row(weight, shape)
        check_operands(rows, None, row, None, None)
    except (TypeError, ValueError):  # torch has a message of its own for it, or takes it
        return _torchs(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    with _CPU:
        flags = Flags(_EPS[input.dtype] if eps is None else eps)
        y: Tensor = norm.beyond_fast_path(norm.NormCall(norm.rms_norm, rows, None, row, flags, inner=True))
    return y if len(shape) == 1 else y.view(input.shape)


def _is_torchs(input: object, normalized_shape: object, weight: object, eps: object) -> bool:
    """Whether a mode, a transform or a tensor must see torch's operator, or an argument is unusual."""
    if any(ask() for ask in must_be_seen.QUESTIONS) or type(input) not in _PLAIN or type(weight) not in _OPERANDS:
        return True
    if not isinstance(normalized_shape, list | tuple) or any(type(n) is not int for n in normalized_shape):
        return True
    x = cast(Tensor, input)
    return (
        (eps is not None and type(eps) is not float)
        or not x.is_cpu
        or x.is_nested
        or x.dtype not in _EPS
        or (x.layout is torch.strided and x.dim() in (4, 5) and not x.is_contiguous())
        or must_be_seen.transform(x, weight)  # type: ignore[arg-type]
    )


def _code(input, normalized_shape, weight=None, eps=None):  # type: ignore[no-untyped-def]
    return _fusednorm_rms_norm(input, normalized_shape, weight, eps)  # type: ignore[name-defined]  # noqa: F821


class Acceleration:
    """The result of :func:`fusednorm.accelerate_torch`: ``with`` it a block of code, or call :meth:`close`."""

    def __repr__(self) -> str:
        return f"<torch's rms_norm by fusednorm: {'in effect' if self in _open else 'closed'}>"

    def close(self) -> None:
        """Undoes this call of :func:`fusednorm.accelerate_torch`; with the last of them torch's own code is back."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    _undo()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def accelerate_torch() -> Acceleration:
    """Has the ``cpu`` backend compute ``torch.nn.functional.rms_norm`` and ``torch.nn.RMSNorm``, until it is undone.

    >>> fusednorm.accelerate_torch()
    >>> with fusednorm.accelerate_torch():  # for a block of code
    ...     model(x)

    Results are those of :func:`fusednorm.rms_norm` with its default flags, which round where torch rounds: once, from
    float32. Only the order in which squares are added is another one, so few elements of 16 bits differ, by one unit
    in the last place (``docs/torch.md``). Gradients are those of :func:`fusednorm.rms_norm` too.

    It holds for the whole process: other threads get the new bits too, so do not call it while they compute. Calls of
    it may be nested or repeated; the last one that is closed undoes it.

    torch itself still computes, with its own bits and errors, whatever is not eager work on plain CPU tensors:
    ``torch.compile``, ``torch.export``, ``torch.jit``, ``torch.func`` (``vmap``, ``grad``, ``jvp``), forward-mode
    differentiation, dispatch modes, subclasses of tensors, other devices (meta tensors among them), sparse, nested and
    complex tensors, channels last, a float64 weight of a narrower input, an eps that is no float, and every call that
    raises. The profiler shows ``fusednorm::rms_norm``.

    ``torch.rms_norm`` and ``torch.ops.aten.rms_norm``, called directly or from C++, stay torch's.

    Returns:
        An object that undoes it, by ``close()`` or at the end of a ``with`` block.

    Raises:
        BackendError: the ``cpu`` backend cannot be used here, and why.
        RuntimeError: another library has replaced ``torch.nn.functional.rms_norm``.
    """
    with _CPU:
        norm.rms_norm(torch.zeros(1, 1))  # opens the fast path, or raises
    acceleration = Acceleration()
    with _lock:
        if not _open:
            _exchange()
        _open.add(acceleration)
    return acceleration


def _exchange() -> None:
    global _changed, _torchs
    found = functional.rms_norm
    if (
        not isinstance(found, FunctionType)
        or found.__globals__ is not vars(functional)
        or found.__code__.co_varnames[: found.__code__.co_argcount] != _code.__code__.co_varnames
        or found.__code__.co_freevars
    ):
        raise RuntimeError(
            f"torch.nn.functional.rms_norm must be torch's own, got {found!r}; undo the change of the library that "
            "replaced it first"
        )
    _changed = found
    _torchs = FunctionType(found.__code__, found.__globals__, found.__name__, found.__defaults__)
    update_wrapper(_torchs, found)
    setattr(functional, _NAME, _rms_norm)
    del _torchs.__wrapped__
    found.__wrapped__ = _torchs  # type: ignore[attr-defined]
    found.__code__ = _code.__code__


def _undo() -> None:
    _changed.__code__ = _torchs.__code__
    del _changed.__wrapped__  # type: ignore[attr-defined]
    delattr(functional, _NAME)
