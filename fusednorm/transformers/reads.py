"""Traces of a model's code, and the attributes that the code reads meanwhile.

A trace shows what the code computes with the numbers that the module has then. Other numbers may be assigned later, so
each call asks :meth:`Reads.hold` first, and runs the module's own code where they have changed.
"""

from __future__ import annotations

import copy
import logging
import operator
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import EllipsisType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fusednorm.transformers.replacing import ATTACHED

_torchs_log = logging.getLogger("torch._subclasses.fake_tensor")
_OF_TORCH = {*dir(torch.nn.Module), *vars(torch.nn.Module())} - {"training"}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_VALUES = (int, float, complex, str, bytes, torch.dtype, torch.device, MethodType)
_COMPARED = (*_CONTAINERS, *_VALUES)  # all others are the same only if they are the same object
_KEPT = (*_COMPARED, type(None), EllipsisType, Enum, ModuleType)


class LeftAloneError(Exception):
    """A model's code is left as it is, for the reason in the message."""


def traced(call: Callable[..., Any], *inputs: tuple[tuple[int, ...], torch.dtype] | None) -> fx.Graph:
    """The ATen operations of a call, on tensors of these shapes and dtypes, without contents.

    Raises:
        LeftAloneError: it cannot be traced.
    """
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern dtypes that the model may not use
        made = [None if one is None else torch.empty(one[0], dtype=one[1]) for one in inputs]
        before, _torchs_log.disabled = _torchs_log.disabled, True  # it shows operations that fail as its own faults
        try:
            return _Operations(made).of(call)
        except Exception as error:  # the code may raise anything for a tensor that it does not expect
            raise LeftAloneError(f"it cannot be traced: {in_a_line(error)}") from error
        finally:
            _torchs_log.disabled = before


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that a call has torch's dispatcher run.

    ``make_fx`` does so too, in twice the time: it changes a method of all modules before each trace, and after it.
    """

    def __init__(self, inputs: list[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs, self.graph = inputs, fx.Graph()
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        for place, one in enumerate(inputs):
            self._noted(one, self.graph.placeholder(f"input_{place}"))

    def of(self, call: Callable[..., Any]) -> fx.Graph:
        """The operations of a call on the inputs, of which its result is made."""
        with self:
            result = call(*self.inputs)
        self.graph.output(tree_map_only(Tensor, self._node, result))
        self.graph.eliminate_dead_code()
        return self.graph

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, self._node, (args, kwargs or {}))
        result = operation(*args, **(kwargs or {}))
        node = self.graph.call_function(operation, *given)
        self._noted(result, node)
        if isinstance(result, tuple | list):
            for place, part in enumerate(result):
                self._noted(part, self.graph.call_function(operator.getitem, (node, place)))
        return result

    def _noted(self, value: Any, node: fx.Node) -> None:
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._nodes[id(value)] = value, node  # held, so that no other tensor has its number

    def _node(self, tensor: Tensor) -> fx.Node:
        """The operation that returned a tensor. Others, which the call found somewhere, are constants."""
        found = self._nodes.get(id(tensor))
        return self.graph.create_node("get_attr", "a constant") if found is None else found[1]


def in_a_line(error: Exception) -> str:
    """An error of a model's own code: its type, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class NotFollowedError(Exception):
    """A module reads numbers that are not followed."""


class Reads:
    """The attributes of a module, or of another object, that code read.

    Attributes:
        values: by name. ``...`` stands for an attribute that was missing, and an object's own reads stand for it.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def of(self, owner: object) -> Reads:
        """The reads for one object, with its own values, so that each call finds the same objects.

        Of what two objects share, a compiler asks at each call whether they still do.
        """
        its_own = Reads()
        for name, value in self.values.items():
            its_own.values[name] = value if type(value) is Reads else copy.deepcopy(getattr(owner, name, ...))
        return its_own

    def hold(self, owner: object) -> bool:
        """Whether the attributes of a module, or of another object, are these."""
        for name, value in self.values.items():
            found = getattr(owner, name, ...)
            if found is value:
                continue
            if type(value) is Reads:
                if not value.hold(found):
                    return False
            elif isinstance(value, partial) and isinstance(found, partial):  # which a compiler never takes for the same
                if (found.func, found.args, found.keywords) != (value.func, value.args, value.keywords):
                    return False
            elif type(found) is not type(value) or not isinstance(value, _COMPARED) or found != value:
                return False
        return True

    def copy_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module with the same attributes and children, without hooks and tensors. What its code reads is noted."""
        before: Any = type(module)

        def read(copied: Any, name: str) -> Any:
            try:
                value = before.__getattribute__(copied, name)
            except AttributeError:
                try:
                    value = before.__getattr__(copied, name)
                except AttributeError:
                    self._noted(name, ...)
                    raise
            method = isinstance(value, MethodType) and value.__self__ is copied
            return value if method or name in _OF_TORCH or name.startswith("__") else self._noted(name, value)

        reading = type(before.__name__, (before,), {"__getattribute__": read, "__module__": before.__module__})
        copied: torch.nn.Module = torch.nn.Module.__new__(reading)
        torch.nn.Module.__init__(copied)
        skipped = {*copied.__dict__, *ATTACHED} - {"training"}
        copied.__dict__.update({name: value for name, value in module.__dict__.items() if name not in skipped})
        copied._parameters, copied._buffers = dict.fromkeys(module._parameters), dict.fromkeys(module._buffers)
        copied._modules = dict(module._modules)
        return copied

    def _noted(self, name: str, value: Any) -> Any:
        """The value of an attribute that is read now."""
        if isinstance(value, Tensor | torch.nn.Module):
            return value  # a trace shows what these do
        if isinstance(value, _CONTAINERS):
            if not all(_is_kept(part) for part in tree_leaves(value)):
                raise NotFollowedError(f"the numbers in its {name} are not followed")
            self.values[name] = copy.deepcopy(value)  # its content may change
        elif _is_kept(value):
            self.values[name] = value
        else:
            return _Object(self.values.setdefault(name, Reads()), value)
        return value


class _Object:
    """Stands for an object while its attributes are read."""

    def __init__(self, reads: Reads, of: object) -> None:
        object.__setattr__(self, "_read", (reads, of))

    def __getattribute__(self, name: str) -> Any:
        reads, of = object.__getattribute__(self, "_read")
        if name == "__class__":
            return type(of)
        value = getattr(of, name, ...)
        if name.startswith("__") or (isinstance(value, MethodType) and value.__self__ is of):
            raise NotFollowedError(f"what the {name} of a {type(of).__name__} reads is not followed")
        noted = reads._noted(name, value)
        if value is ...:
            raise AttributeError(name)
        return noted


def _is_kept(value: object) -> bool:
    return isinstance(value, _KEPT) or (callable(value) and not isinstance(value, Tensor | torch.nn.Module))
