"""Listeners: code that must see the operation itself, not only the memory that kernels write.

torch has listeners in two places. Above autograd: function modes, subclasses that override functions,
``torch.func`` and forward-mode derivatives. Below it, in the dispatcher: dispatch modes (``make_fx``, fake tensors,
flop counters, selective checkpointing), ``torch.jit.trace``, profilers, and subclasses that override operations.

The fast path looks for the same listeners in C.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import DeviceContext

_Result = TypeVar("_Result")

#: Names that this torch lacks. If there is one, no call takes the fast path, and a listener that cannot be looked for
#: is assumed to be there: calls are slower, and right.
MISSING: list[str] = []


def _torchs(name: str) -> Callable[..., Any]:
    """A private function of torch; where this torch lacks it, a function that always returns True."""
    found = getattr(torch._C, name, None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    MISSING.append(name)
    return lambda *_: True


#: Each function tells whether this thread has a listener below autograd: a dispatch mode, ``torch.jit.trace``.
QUESTIONS = (_torchs("_len_torch_dispatch_stack"), _torchs("_is_tracing"))

#: Variables of torch's modules, with the value of each without a listener. They hold for all threads, because a process
#: has one profiler and one level of forward-mode differentiation.
VARIABLES = ((profiler, "_is_profiler_enabled", False), (forward_ad, "_current_level", -1))

#: The number of function modes, and the mode at an index. The lowest may be torch's own, for a default device.
FUNCTION_MODES = (_torchs("_len_torch_function_stack"), _torchs("_get_function_stack_at"), DeviceContext)

#: The C++ functions of torch behind these: the numbers of dispatch modes and function modes, and the state of a trace.
#: The fast path calls them directly where it can, because a call through Python takes several times as long.
IN_CPP = (
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
    "_ZN5torch3jit6tracer15getTracingStateEv",
)

#: C++ names do not say what a function returns, so they are used only in versions of torch on which the tests ran.
_TESTED = ("2.13.", "2.14.", "2.15.")

_PLAIN = (Tensor, torch.nn.Parameter, type(None))

#: Whether torch.autograd differentiates in batches, as ``torch.autograd.functional.jacobian(vectorize=True)`` does: its
#: batches of gradients are plain tensors, but without memory.
_in_batches = partial(_torchs("_dispatch_tls_is_dispatch_key_included"), torch._C._dispatch_key_parse("VmapMode"))

#: Whether a transform of ``torch.func`` is active.
transforms_active = _torchs("_are_functorch_transforms_active")
_tangents_enabled = _torchs("_is_fwd_grad_enabled")

MISSING += [name for module, name, _ in VARIABLES if not hasattr(module, name)]


def in_cpp(*names: str) -> tuple[int, ...]:
    """The addresses of C++ functions of torch; zeros in untested versions of torch, and if a name is missing."""
    if torch.__version__.startswith(_TESTED):
        library = ctypes.CDLL(torch._C.__file__)  # loaded already
        if all(hasattr(library, name) for name in names):
            return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    return (0,) * len(names)


class Listener(Enum):
    """The kinds of listeners, in the order in which they see a call."""

    #: See :func:`override`, :func:`seen` and :func:`transform`.
    OVERRIDE, DISPATCHER, TRANSFORM = range(3)


def listener(*operands: Tensor | None) -> Listener | None:
    """The first listener that must see a call of these operands; None in the usual case, where there is none."""
    elsewhere = is_dynamo_compiling() or MISSING or FUNCTION_MODES[0]() or transforms_active() or level_entered()
    if not (elsewhere or _in_batches() or listening()) and plain(*operands):
        return None
    if override(*operands):
        return Listener.OVERRIDE
    if seen(*operands):
        return Listener.DISPATCHER
    return Listener.TRANSFORM if transform(*operands) else None


def override(*operands: Tensor | None) -> bool:
    """Whether a function mode, or an operand that overrides functions (such as fx's proxies), must see the call."""
    count, mode_at, default_device = FUNCTION_MODES
    modes = int(count())
    if MISSING or modes > 1 or (modes == 1 and type(mode_at(0)) is not default_device):
        return has_torch_function(operands)
    if plain(*operands):
        return False
    others = [t for t in operands if type(t) not in _PLAIN]
    if any(isinstance(t, Tensor) and t.is_nested for t in others):
        return False  # it would handle our functions as torch's of the same names; the checks refuse it
    return has_torch_function(others)


def handed_over(function: Callable[..., _Result], operands: Sequence[Tensor | None], values: dict[str, Any]) -> _Result:
    """The result of whatever overrides a function, which is called with the arguments that it was called with.

    Args:
        function: the public function.
        operands: all tensors that it takes.
        values: its arguments by name, such as its ``locals()``.
    """
    given = inspect.signature(function).parameters.values()
    alone = [values[parameter.name] for parameter in given if parameter.kind is not parameter.KEYWORD_ONLY]
    named = {parameter.name: values[parameter.name] for parameter in given if parameter.kind is parameter.KEYWORD_ONLY}
    return handle_torch_function(function, operands, *alone, **named)


def transform(*operands: Tensor | None) -> bool:
    """Whether a transform of ``torch.func`` is active, or an operand has a tangent of forward-mode differentiation."""
    if is_dynamo_compiling():  # which sees transforms itself, but not tangents
        return level_entered()
    return bool(transforms_active()) or (level_entered() and has_tangent(*operands))


def seen(*operands: Tensor | None) -> bool:
    """Whether the dispatcher must see a call. Transforms of ``torch.func`` see the functions of autograd instead."""
    if is_dynamo_compiling():
        return not level_entered()
    return below(*operands) and not transform(*operands)


def in_one_operator(*operands: Tensor | None) -> bool:
    """Whether ``torch.compile`` traces a call whose gradients nobody records: one operator then stands for all of it.

    ``torch.export`` has the plain operators of a composition instead, which other programs know.
    """
    if not is_dynamo_compiling() or is_exporting() or not plain(*operands):
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands))


def in_memory(*operands: Tensor | None) -> bool:
    """Whether the operands lie in memory, so that their addresses and contents can be checked, also with a listener."""
    if is_dynamo_compiling() or transform(*operands):
        return False
    return plain(*operands) or not any(overrides_operations(t) for t in operands)


def level_entered() -> bool:
    """Whether a level of forward-mode differentiation is active, in any thread."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def differentiated_again() -> bool:
    """Whether gradients that are being computed may be differentiated: ``create_graph=True``, or a tangent may come."""
    return torch.is_grad_enabled() or level_entered()


def has_tangent(*operands: Tensor | None) -> bool:
    """Whether an operand has a tangent, which an operator would ignore."""
    return (
        level_entered()
        and _tangents_enabled()
        and any(
            isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]
            for t in operands
        )
    )


def below(*operands: Tensor | None) -> bool:
    """Whether the dispatcher has a listener: a mode, a tracer, a profiler, a tensor that overrides operations."""
    seen = listening() or bool(_in_batches())
    return seen or (not plain(*operands) and any(overrides_operations(t) for t in operands))


def listening() -> bool:
    """Whether the dispatcher has a listener that is no operand."""
    for ask in QUESTIONS:
        if ask():
            return True
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def plain(*operands: Tensor | None) -> bool:
    """Whether no operand's type overrides anything, which is the usual case."""
    for operand in operands:  # noqa: SIM110  (all() takes twice as long)
        if operand is not None and type(operand) not in _PLAIN:
            return False
    return True


def overrides_operations(operand: object) -> bool:
    """Whether an operand is a tensor that overrides torch's operations: a fake, functional or distributed one."""
    return isinstance(operand, Tensor) and type(operand).__torch_dispatch__ is not Tensor.__torch_dispatch__
