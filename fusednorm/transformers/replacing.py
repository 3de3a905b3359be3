"""Replaces one module of a model by a module of a subclass, and undoes it.

A replaced module gets a subclass of its class. It stays the same object in the same place, with the same weight and
hooks. fusednorm adds one attribute to it, ``_fusednorm``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.nn.modules.module import _has_any_global_hook

P = ParamSpec("P")
R = TypeVar("R")

#: A module's class, whether it was replaced, and the replacement, or the reason why not.
Outcome = tuple[str, bool, str]

#: Attributes by which other libraries replace the forward pass of one module.
ATTACHED = ("forward", "_old_forward")


class Patched(torch.nn.Module):
    """A module that fusednorm replaced; comes before the module's original class.

    A module that was not replaced runs its own code, also where its class is that of a replaced one: ``_fusednorm`` of
    each class here is such a state.
    """

    _fusednorm: Any = None
    _made_of: tuple[type, type, frozenset[str]]  # the arguments of patched_class

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of the original class, or of a subclass that others made of the replaced one."""
        return cls._made_of[0](*args, **kwargs) if "_made_of" in vars(cls) else super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the module's original class, because that can be imported."""
        return _new, self._made_of, self.__dict__

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        """The attributes of the subclass of a module's original class.

        Args:
            before: the original class.
            norms: the names of its attributes that hold norms.
        """
        return {}

    def restore(self) -> None:
        """Undoes a change of more than the class, before the class is changed back."""


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.assume_constant_result``, which also imports the compiler: a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant  # as torch's compiler takes hooks
def bare(module: torch.nn.Module) -> bool:
    """Whether a call of the module only calls its forward pass."""
    own = module.__dict__  # by which an attribute is found sooner
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or _has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def replaced(module: Any) -> bool:
    """Whether other code has replaced the forward pass of this module, or of a function that ``kernels`` made one.

    That code may also store the class's own forward pass in the module, which replaces nothing.
    """
    attached = [own[name] for name in ATTACHED if name in own] if (own := vars(module)) else []
    return bool(attached) and not any(
        isinstance(method, MethodType) and method.__func__ is type(module).forward for method in attached
    )


def attach(module: torch.nn.Module, mixin: type[Patched], norms: frozenset[str], state: object, what: str) -> Outcome:
    """Patches a module with a replacement that ``what`` names, unless other code has replaced its forward pass."""
    name = type(module).__name__
    if replaced(module):
        return name, False, "something else has replaced its forward pass"
    change_class(module, _patched_class(type(module), mixin, norms))  # type: ignore[arg-type] # classes have a hash
    module.__dict__["_fusednorm"] = state
    return name, True, what


def detach(module: torch.nn.Module) -> None:
    """Undoes :func:`attach`."""
    if isinstance(module, Patched) and "_fusednorm" in module.__dict__:
        module.restore()
    module.__dict__.pop("_fusednorm", None)
    if "_made_of" in vars(type(module)):
        change_class(module, vars(type(module))["_made_of"][0])


def change_class(module: torch.nn.Module, to: type) -> None:
    """Changes the class, also where a wrapper has stored the forward pass (as accelerate's, which moves tensors)."""
    before = type(module).forward
    module.__class__ = to
    for name in ATTACHED:
        method = module.__dict__.get(name)
        if isinstance(method, MethodType) and method.__func__ is before:
            module.__dict__[name] = MethodType(to.forward, module)  # type: ignore[attr-defined]


@functools.cache
def _patched_class(before: type, mixin: type[Patched], norms: frozenset[str]) -> type:
    """A subclass of a module's class, with the same name, because other code looks for that name."""
    members: dict[str, Any] = {"__module__": before.__module__, "__qualname__": before.__qualname__}
    members |= {"_made_of": (before, mixin, norms), **mixin.of_class(before, norms)}
    return type(before.__name__, (mixin, before), members)


def _new(before: type, mixin: type[Patched], norms: frozenset[str]) -> torch.nn.Module:
    """An empty patched module."""
    patched = _patched_class(before, mixin, norms)  # type: ignore[arg-type] # as above
    return cast(torch.nn.Module, object.__new__(patched))
