"""Around steps that torch's operations compute: the specification's arithmetic, and no threads that a fork has taken.

Kernels see to both themselves. Torch's operations follow the caller's arithmetic, as ``torch.set_flush_denormal`` sets
it, and those with many elements wait for ever for the threads of the process that was forked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import process

_Function = TypeVar("_Function", bound=Callable[..., Any])


@functools.cache
def _library() -> Any:
    """The C library; None where there is none."""
    try:
        return import_module("fusednorm._cpu").lib
    except ImportError:  # the cpu backend says why
        return None


#: Numbers whose sums and products tell how a thread computes.
_LEAST, _LEAST_NORMAL, _HALF, _TIE, _ABOVE = 5e-324, sys.float_info.min, 0.5, 2.0**-53, 1.5 * 2.0**-53


def _is_as_specified() -> bool:
    """Whether this thread keeps subnormals and rounds to nearest even. It loads no library for that."""
    keeps = _LEAST != 0.0 and _LEAST_NORMAL * _HALF != 0.0
    return keeps and 1.0 + _TIE == 1.0 and -1.0 - _TIE == -1.0 and 1.0 + _ABOVE != 1.0


@contextmanager
def _as_specified(library: Any) -> Iterator[None]:
    """Within the block this thread has the specification's arithmetic, and torch's operations run on it alone.

    Torch's other threads may have the arithmetic that the caller had when torch started them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = None if library is None else library.fn_enter_arithmetic()
    try:
        yield
    finally:
        if library is not None:
            library.fn_leave_arithmetic(state)
        torch.set_num_threads(threads)


def exact(function: _Function) -> _Function:
    """The function, which has the specification's arithmetic, also in a forked process."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if is_dynamo_compiling():
            return function(*arguments, **named)
        if _is_as_specified() and not process.forked:
            return function(*arguments, **named)
        with _as_specified(_library()):
            return function(*arguments, **named)

    return cast(_Function, run)
