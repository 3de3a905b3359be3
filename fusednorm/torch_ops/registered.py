"""Makes operators of ``torch.ops.fusednorm`` known to torch, which takes long: an import leaves most of it for later.

Torch and C++ find each operator's name, schema and kernels at once. The rest is registered when Python first asks for
the operator, as all of torch does that looks beyond the kernels: tracers, fake tensors, compiled graphs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls import fast_path, must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.checks import check_memory

try:
    from torch._library.autograd import Info, make_autograd_impl
except ImportError:  # not public: without it the operators have gradients, but refuse neither tangents nor writes
    make_autograd_impl = None  # type: ignore[assignment]

# torch keeps the name of the file that calls this, and fails where that name is not UTF-8: here it is always the same.
_LIBRARY = eval(compile('Library("fusednorm", "FRAGMENT")', "fusednorm", "eval"), {"Library": torch.library.Library})

#: The names of each operator's arguments, by its own name, with blanks between: a compiler that reads one text has one
#: value to look at again.
ARGUMENTS: dict[str, str] = {}
#: The name of an argument in a schema.
_ARGUMENT = re.compile(r"(\w+)(?:=[^,]+)?(?:, |\)$)")


def exported() -> list[str]:
    """The names of the operators that are in exported programs: all but those of ``inference.py``."""
    return [name for name in ARGUMENTS if not name.endswith("_inference")]


class DirectOperator(torch._ops.OpOverload):
    """An operator that compiled graphs call past torch's dispatcher, which takes longer than a short call itself."""

    direct: Callable[..., Any]
    fast: Callable[..., Any] | None

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """The results, by a function alone where nobody else must see the call."""
        if self.fast is not None and (found := self.fast(*arguments, **named)) is not None:
            return found
        if fast_path.is_direct(*arguments, *named.values()):
            return self.direct(*arguments, **named)
        return super().__call__(*arguments, **named)

    def ask_first(self, entry: fast_path.Entry) -> None:
        """Has C pass calls to the fast path before Python sees them; the entry has the operator's arguments."""
        if fast_path.OPEN:
            names = [argument.name for argument in self._schema.arguments]
            call = entry.open(arguments=names, otherwise=functools.partial(DirectOperator.__call__, self))
            self.__class__ = type(DirectOperator.__name__, (DirectOperator,), {"__call__": call})


def register(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    fast: Callable[..., Any] | None = None,
    direct: Callable[..., Any] | None = None,
    entry: Callable[[], fast_path.Entry] | None = None,
) -> None:
    """Makes an operator.

    Args:
        name: the operator's.
        schema: as ``torch.library.define`` takes it.
        function: computes the results; its operands lie in memory.
        fake: makes results without values.
        gradients: the backward pass, and what is kept for it; None: there are no gradients.
        fast: the results of a call that the fast path takes, which asks whether anybody else must see it; else None.
        direct: the same as ``function``, where that takes named arguments as they are.
        entry: makes the entry for :meth:`DirectOperator.ask_first`, if there is one.
    """
    function = exact(function)
    if gradients is not None:
        gradients = exact(gradients[0]), gradients[1]
    ARGUMENTS[name] = " ".join(_ARGUMENT.findall(schema[: schema.index(" -> ")]))
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, _in_memory(name, function), "CompositeExplicitAutograd")

    def asked_for() -> None:
        torch.library.register_fake(f"fusednorm::{name}", fake, lib=_LIBRARY)
        del _LATER[name]  # now torch may find the operator
        operator = getattr(torch.ops.fusednorm, name).default
        operator.direct = direct or _by_position(function, operator)
        operator.fast = fast and _by_position(fast, operator)
        operator.__class__ = DirectOperator
        if entry is not None:
            operator.ask_first(entry())

    _LATER[name] = asked_for
    _register_autograd(name, gradients)


#: Registers the rest of each operator for which nobody has asked, by the operator's name.
_LATER: dict[str, Callable[[], None]] = {}
#: Held while the rest is registered, and by a fork, so that its child finds no operator in the middle of that.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


_OPERATORS = vars(torch.ops.fusednorm)


def _ask_for(name: str) -> Any:
    """An operator by its name, of which all is registered before torch makes it; asked where nobody did before."""
    with _LOCK:
        if name in _LATER:
            later: Any = _LATER[name]
            if "torch._dynamo" in sys.modules:
                later = torch.compiler.disable(later)  # type: ignore[no-untyped-call]  # else it traces that
            later()
        if name in _OPERATORS:  # by now, perhaps through another thread
            return _OPERATORS[name]
    raise AttributeError(name)  # which has torch make it, if there is one


# A module's own functions of these names come before its class's.
_OPERATORS.update(__getattr__=_ask_for, __dir__=lambda: [*_OPERATORS, *_LATER])


def _by_position(function: Callable[..., Any], operator: torch._ops.OpOverload[Any, Any]) -> Callable[..., Any]:
    """The function, which takes arguments by position, for calls that name some of an operator's."""
    defaults = [(one.name, one.default_value) for one in operator._schema.arguments]  # which takes long to ask

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if not named:
            return function(*arguments)
        return function(*arguments, *[named.get(name, value) for name, value in defaults[len(arguments) :]])

    return called


def _in_memory(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an operator, which sees that all operands are in memory."""
    names = ARGUMENTS[name].split()

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        if name in _LATER:  # C++ has called it, perhaps with tensors for which torch has another kernel from now on
            return getattr(torch.ops.fusednorm, name)(*arguments)
        for one, argument in zip(names, arguments, strict=False):
            if isinstance(argument, Tensor):
                check_memory(one, argument)
        return function(*arguments)

    return checked


def _register_autograd(name: str, given: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
    """Registers autograd as ``torch.library`` does, but refuses tangents, and gradients of what is written."""
    gradients, setup_context = given or (None, None)
    if make_autograd_impl is None:
        if gradients is not None:
            torch.library.register_autograd(f"fusednorm::{name}", gradients, setup_context=setup_context)
        return

    @functools.cache
    def recorded() -> tuple[torch._ops.OpOverload[Any, Any], Callable[..., Any]]:
        operator = getattr(torch.ops.fusednorm, name).default
        return operator, make_autograd_impl(operator, Info(gradients, setup_context))

    def kernel(keyset: Any, *arguments: Any) -> Any:
        operator, record = recorded()
        operands = [a for a in arguments if isinstance(a, Tensor)]
        if must_be_seen.has_tangent(*operands):
            lost = "an operand has a tangent of forward-mode differentiation"
        elif operator._schema.is_mutable and torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            lost = "an operand requires grad"
        else:
            return record(keyset, *arguments)
        raise NotImplementedError(
            f"torch.ops.fusednorm.{name} does not support this derivative, and {lost}; call the function that "
            "fusednorm has for it, with new outputs"
        )

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
