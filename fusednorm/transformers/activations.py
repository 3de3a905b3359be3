"""MLPs and experts with ``activation(gate) * up`` in one call of :func:`fusednorm.silu_and_mul` or its like.

A method with such a product is rewritten from its own source, as the forward passes of layers are (``layers.py``)::

    self.act_fn(self.gate_proj(x)) * self.up_proj(x)    ->    self._gate("act_fn", self.gate_proj(x), self.up_proj(x))

An activation is recognised by a trace of one call, not by its name.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusednorm.operations.gate import gelu_tanh_and_mul, silu_and_mul
from fusednorm.transformers.layers import called, compiled, source
from fusednorm.transformers.mlps import activation_of
from fusednorm.transformers.reads import LeftAloneError, Reads
from fusednorm.transformers.replacing import Outcome, Patched, attach, bare, replaced

#: By the names of ``mlps.py``.
_FUNCTIONS: dict[str | None, Callable[..., Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class PatchedActivations(Patched):
    """A module whose methods call :meth:`_gate`; comes before the original class.

    Its state has the class of each activation, the attributes that were read of it, and the function, by the names of
    the attributes.
    """

    _fusednorm: Any = {}  # noqa: RUF012 - never changed

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return rewritten(before, norms)

    def _gate(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """``activation(gate) * up``, rounded between both as torch does."""
        activation: Any = self._modules[name]
        of_class, reads, function = self._fusednorm.get(name, _NONE)
        fits = type(activation) is of_class and reads.hold(activation) and bare(activation)
        if fits and gate.dtype == up.dtype and gate.shape == up.shape and gate.device == up.device:
            y: Tensor = function(gate, up)
            return y
        product: Tensor = activation(gate) * up
        return product

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        kinds = [(self._modules[name], reads, function) for name, (_, reads, function) in self._fusednorm.items()]
        followed = {function.__name__ for activation, reads, function in kinds if reads.hold(activation)}
        return [(name, {}) for name in sorted(followed)]


#: The class of an activation, the attributes that were read of it, and the function that multiplies by it.
_Kind = tuple[type, Reads, Callable[..., Tensor] | None]
_NONE: _Kind = (type(None), Reads(), None)


@functools.cache
def rewritten(owner: type, activations: frozenset[str]) -> dict[str, Callable[..., Any]]:
    """The methods of a class that multiply by an activation, rewritten.

    A method that a decorator wraps stays as it is, because the decorator may choose another function.

    Args:
        owner: the class.
        activations: the names of its attributes that hold activations.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        if getattr(torch.nn.Module, name, None) is method or inspect.unwrap(method) is not method:
            continue
        try:
            function, tree = source(method)
            products = _Products(activations)
            changed = products.visit(tree)
            if products.found:
                found[name] = compiled(changed, function, owner)
        except LeftAloneError:
            continue
    return found


class _Products(ast.NodeTransformer):
    """Replaces each ``self.NAME(gate) * up``, and ``up * self.NAME(gate)``, of activations."""

    def __init__(self, activations: frozenset[str]) -> None:
        self.activations = activations
        self.found: set[str] = set()

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        for call, up in ((node.left, node.right), (node.right, node.left)):
            name, gate = called(call)
            if name in self.activations:
                self.found.add(name)
                ours = ast.Attribute(ast.Name("self", ast.Load()), "_gate", ast.Load())
                return ast.Call(ours, [ast.Constant(name), gate, up], [])
        return node


def patch_activations(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces modules that multiply by an activation."""
    for module in list(model.modules()):
        if isinstance(module, Patched):
            continue
        found = {name: _kind(child) for name, child in module.named_children() if _is_bare(child)}
        known = {name: kind for name, kind in found.items() if kind[2] is not None}
        owner: Any = type(module)
        if known and rewritten(owner, frozenset(known)):
            functions = {function.__name__ for *_, function in known.values() if function is not None}
            yield attach(module, PatchedActivations, frozenset(known), known, f"{', '.join(sorted(functions))} fused")
        elif found and rewritten(owner, frozenset(found)):
            yield owner.__name__, False, "its activation is none of fusednorm's"


def _is_bare(module: torch.nn.Module) -> bool:
    """Whether a module has neither children nor tensors."""
    return not any(True for parts in (module.children(), module.parameters(), module.buffers()) for _ in parts)


def _kind(activation: torch.nn.Module) -> _Kind:
    """The kind of an activation; without a function if a trace does not show one."""
    reads = Reads()
    function = None if replaced(activation) else _FUNCTIONS.get(activation_of(activation, reads))
    return type(activation), reads, function
