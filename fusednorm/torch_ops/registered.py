"""Makes an operator of ``torch.ops.fusednorm`` known to torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.checks import check_memory

try:
    from torch._library.autograd import Info, make_autograd_impl
except ImportError:  # not public: without it the operators have gradients, but refuse neither tangents nor writes
    make_autograd_impl = None  # type: ignore[assignment]

# torch keeps the name of the file that calls this, and fails where that name is not UTF-8: here it is always the same.
_LIBRARY = eval(compile('Library("fusednorm", "FRAGMENT")', "fusednorm", "eval"), {"Library": torch.library.Library})

#: The answer of what has written the outputs that it was given.
WRITTEN = object()

#: The schema of each operator, by name.
SCHEMAS: dict[str, str] = {}


def register(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    fast: Callable[..., Any] | None = None,
) -> None:
    """Makes an operator.

    Args:
        name: the operator's.
        schema: as ``torch.library.define`` takes it.
        function: computes the results; its operands lie in memory.
        fake: makes results without values.
        gradients: the backward pass, and what is kept for it; None: there are no gradients.
        fast: the same results for plain tensors in memory, whose gradients nobody records; or None, and ``function``
            makes them. It is asked first, because a compiled graph waits for torch's dispatcher at each operator. Of an
            operator without results it returns :data:`WRITTEN`.
    """
    SCHEMAS[name] = schema
    torch.library.define(f"fusednorm::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    names = [argument.name for argument in getattr(torch.ops.fusednorm, name).default._schema.arguments]
    torch.library.impl(f"fusednorm::{name}", "CompositeExplicitAutograd", _of_memory(function, names, fast))
    torch.library.register_fake(f"fusednorm::{name}", fake)
    _register_autograd(name, gradients, fast)


def where_plain(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``fast`` of an operator whose function checks everything, memory too; it has operands at these places."""

    def fast(*arguments: Any) -> Any:
        operands = [arguments[place] for place in places if place < len(arguments)]
        if not must_be_seen.plain(*operands):
            return None
        records = torch.is_grad_enabled()
        for operand in operands:
            if operand is None:
                continue
            # Of a meta tensor torch calls the fake function, and of a ZeroTensor it makes zeros on the way here.
            if operand.is_meta or operand._is_zerotensor() or (records and operand.requires_grad):
                return None
        return None if must_be_seen.below() or must_be_seen.level_entered() else function(*arguments)

    return fast


def _of_memory(function: Callable[..., Any], names: list[str], fast: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function of an operator, which sees that all operands of these names are in memory."""

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        if fast is not None and (found := fast(*arguments)) is not None:
            return None if found is WRITTEN else found
        for name, argument in zip(names, arguments, strict=False):
            if isinstance(argument, Tensor):
                check_memory(name, argument)
        return function(*arguments)

    return checked


def _register_autograd(
    name: str, given: tuple[Callable[..., Any], Callable[..., Any]] | None, fast: Callable[..., Any] | None
) -> None:
    """As ``torch.library.register_autograd``, but tangents, and gradients of what is written, are refused, not lost."""
    operation = getattr(torch.ops.fusednorm, name).default
    gradients, setup_context = given or (None, None)
    if make_autograd_impl is None:
        if gradients is not None:
            torch.library.register_autograd(f"fusednorm::{name}", gradients, setup_context=setup_context)
        return
    recorded = make_autograd_impl(operation, Info(gradients, setup_context))

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if fast is not None and not must_be_seen.transforms_active() and (found := fast(*arguments)) is not None:
            return None if found is WRITTEN else found
        operands = [a for a in arguments if isinstance(a, Tensor)]
        if must_be_seen.has_tangent(*operands):
            lost = "an operand has a tangent of forward-mode differentiation"
        elif operation._schema.is_mutable and torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            lost = "an operand requires grad"
        else:
            return recorded(keyset, *arguments)
        raise NotImplementedError(
            f"torch.ops.fusednorm.{name} cannot be differentiated so, and {lost}; call the function that fusednorm has "
            "for it, with new outputs"
        )

    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
