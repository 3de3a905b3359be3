"""MLPs and experts with ``activation(gate) * up`` in one call of :func:`fusednorm.silu_and_mul` or its like.

A method with such a product is rewritten from its own source, as the forward passes of layers are (``layers.py``)::

    self.act_fn(self.gate_proj(x)) * self.up_proj(x)    ->    self._gate("act_fn", self.gate_proj(x), self.up_proj(x))
    attn_output * torch.sigmoid(gate)                   ->    self._product(torch.sigmoid, gate, attn_output)

An activation is recognised by a trace of one call, not by its name. A gate with limits or with a function that is no
module has a formula in ``mlps.py``, which replaces the forward pass of an MLP, or ``_apply_gate`` of experts: whichever
implementation transformers chooses for experts calls that. The square of a positive number, relu2, is one call by
itself; GELU by itself is not, because torch's is faster.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from fusednorm.operations.functions import relu2
from fusednorm.operations.gate import (
    gate_and_up_on_fast_path,
    gelu_and_mul,
    gelu_tanh_and_mul,
    sigmoid_and_mul,
    silu_and_mul,
)
from fusednorm.transformers.layers import called, compiled, source
from fusednorm.transformers.mlps import DTYPES, MLP, activation_of, mlp
from fusednorm.transformers.reads import LeftAloneError, Reads
from fusednorm.transformers.replacing import Outcome, Patched, attach, bare, replaced

#: By the names of ``mlps.py``; all but relu2 multiply by the activation.
_FUNCTIONS: dict[str | None, Callable[..., Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
    "relu2": relu2,
}
#: Of torch's functions.
_PRODUCTS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.sigmoid: sigmoid_and_mul,
    functional.sigmoid: sigmoid_and_mul,
    functional.silu: silu_and_mul,
}


class PatchedActivations(Patched):
    """A module whose methods call :meth:`_gate`; comes before the original class.

    Its state has the class of each activation, the attributes that were read of it, and its name, by the names of the
    attributes.
    """

    _fusednorm: Any = {}  # noqa: RUF012 - never changed

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return rewritten(before, norms)

    def _gate(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """``activation(gate) * up``, rounded between both as torch does."""
        activation: Any = self._modules[name]
        kind = self._fusednorm.get(name, _NONE)
        if _is(activation, kind) and gate.dtype == up.dtype:
            y: Tensor | None = None if is_dynamo_compiling() else gate_and_up_on_fast_path(gate, up, kind[2])
            if y is None and gate.shape == up.shape and gate.device == up.device:
                y = _FUNCTIONS[kind[2]](gate, up)
            if y is not None:
                return y
        product: Tensor = activation(gate) * up
        return product

    @staticmethod
    def _product(function: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """``function(gate) * up`` of a function of torch's, rounded between both as torch does."""
        ours = _PRODUCTS.get(function)
        alike = isinstance(up, Tensor) and (gate.dtype, gate.shape, gate.device) == (up.dtype, up.shape, up.device)
        return ours(gate, up) if ours is not None and alike and gate.dtype in DTYPES else up * function(gate)

    def of_both(self, both: Tensor) -> Tensor:
        """The products of rows whose first half is the gate, by the module's only activation."""
        (name,) = self._fusednorm
        return self._gate(name, *both.chunk(2, -1))

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        kinds = [(self._modules[name], reads, function) for name, (_, reads, function) in self._fusednorm.items()]
        followed = {_FUNCTIONS[function].__name__ for activation, reads, function in kinds if reads.hold(activation)}
        return [(name, {}) for name in sorted(followed | products_of(self._made_of[0]))]


#: The class of an activation, the attributes that were read of it, and its name in ``_FUNCTIONS``.
_Kind = tuple[type, Reads, str | None]
_NONE: _Kind = (type(None), Reads(), None)


def _is(activation: Any, kind: _Kind) -> bool:
    """Whether a call of the activation is what was traced."""
    of_class: Any = kind[0]
    return type(activation) is of_class and kind[1].hold(activation) and bare(activation)


class PatchedGate(PatchedActivations):
    """A module with a method that is a formula of ``mlps.py``. Its state is a :class:`_Gate`."""

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return {method: _gated(getattr(before, method)) for method in norms}

    def of_both(self, both: Tensor) -> Tensor:
        """The products of rows that hold both, as the module's method computes them."""
        formula: MLP = self._fusednorm.formula
        return _FUNCTIONS[formula.activation](both, None, **formula.flags)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        gate: _Gate = self._fusednorm
        return [(_FUNCTIONS[gate.formula.activation].__name__, gate.formula.flags)] if gate.holds(self) else []


class _Gate(NamedTuple):
    """The formula of a module, the attributes that were read of it, and the kind of its activation."""

    formula: MLP
    reads: Reads
    act: _Kind

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the module computes this now."""
        act = self.formula.act
        return self.reads.hold(module) and (act is None or _is(module._modules[act], self.act))


def _gated(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method of a class whose products are one call."""

    @functools.wraps(own)
    def gated(self: PatchedGate, *arguments: Any, **keywords: Any) -> Tensor:
        gate: _Gate = self._fusednorm
        if not gate or len(arguments) != 1 or keywords or not gate.holds(self):
            return own(self, *arguments, **keywords)
        (x,) = arguments
        formula, modules = gate.formula, cast("dict[str, Any]", self._modules)
        z = modules[formula.gate](x) if formula.gate else x
        y = None if formula.up is None else modules[formula.up](x)
        if z.dtype not in DTYPES or (y is not None and (y.dtype, y.shape, y.device) != (z.dtype, z.shape, z.device)):
            return own(self, x)  # which computes both a second time
        products = _FUNCTIONS[formula.activation](z, y, **formula.flags)
        return cast(Tensor, modules[formula.down](products)) if formula.down else products

    return gated


class PatchedRelu2(PatchedActivations):
    """An activation that squares positive numbers. Its state has the attributes that were read of it."""

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        own: Any = before.forward  # type: ignore[attr-defined]

        @functools.wraps(own)
        def forward(self: PatchedRelu2, z: Tensor) -> Tensor:
            fits = self._fusednorm and self._fusednorm.hold(self) and z.dtype in DTYPES and z.dim() > 0
            return relu2(z) if fits else cast(Tensor, own(self, z))

        return {"forward": forward}

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("relu2", {})] if self._fusednorm.hold(self) else []


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
            products = Products(function, activations)
            changed = products.visit(tree)
            if products.found or (products.functions and name == "forward"):
                found[name] = compiled(changed, function, owner)
        except LeftAloneError:
            continue
    return found


@functools.cache
def products_of(owner: type) -> frozenset[str]:
    """The names of fusednorm's functions for the products of a class's forward pass with one of torch's functions."""
    try:
        function, tree = source(owner.forward)  # type: ignore[attr-defined]
    except LeftAloneError:
        return frozenset()
    products = Products(function)
    products.visit(tree)
    return frozenset(products.functions)


class Products(ast.NodeTransformer):
    """Replaces ``self.NAME(gate) * up`` of activations, and ``function(gate) * up`` of torch's functions.

    Either factor may be the first one.
    """

    def __init__(self, method: Any, activations: frozenset[str] = frozenset()) -> None:
        self.names = method.__globals__
        self.activations = activations
        self.found: set[str] = set()
        self.functions: set[str] = set()

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
            match call:
                case ast.Call(func=ast.Attribute() as function, args=[gate], keywords=[]) if _rows(gate) and _rows(up):
                    if (product := _PRODUCTS.get(self._value(function))) is not None:
                        self.functions.add(product.__name__)
                        ours = ast.Attribute(ast.Name("self", ast.Load()), "_product", ast.Load())
                        return ast.Call(ours, [function, gate, up], [])
        return node

    def _value(self, node: ast.expr) -> Any:
        """The present value of a name of the method's module, or of an attribute of it; None for another expression."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=owner, attr=name):
                module = self._value(owner)
                return getattr(module, name, None) if isinstance(module, ModuleType) else None
        return None


def _rows(factor: ast.expr) -> bool:
    """Whether this may be rows in their own dtype: no number, no attribute, and nothing that is converted."""
    match factor:
        case ast.Constant() | ast.Attribute() | ast.Call(func=ast.Attribute(attr="float" | "to")):
            return False
    return True


def patch_activations(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces modules that multiply by an activation, and relu2."""
    kinds: list[_Kind] = []
    for module in list(model.modules()):
        if isinstance(module, Patched):
            continue
        if (gate := _gate_of(module, kinds)) is not None:
            function, flags = _FUNCTIONS[gate.formula.activation].__name__, gate.formula.flags
            arguments = ", ".join(f"{name}={value!r}" for name, value in flags.items())
            what = f"{function}({arguments})" if flags else function
            method = "forward" if gate.formula.down else "_apply_gate"
            yield attach(module, PatchedGate, frozenset((method,)), gate, f"{what} fused")
            continue
        found = {name: _kind(child, kinds) for name, child in module.named_children() if _is_bare(child)}
        known = {name: kind for name, kind in found.items() if kind[2] not in (None, "relu2")}
        owner: Any = type(module)
        # A gate of one number for each row, as of shared experts, is no row.
        gated = module._modules and not any(getattr(child, "out_features", 0) == 1 for child in module.children())
        functions = products_of(owner) if gated else frozenset()
        if (known or functions) and rewritten(owner, frozenset(known)):
            functions |= {_FUNCTIONS[function].__name__ for *_, function in known.values()}
            yield attach(module, PatchedActivations, frozenset(known), known, f"{', '.join(sorted(functions))} fused")
        elif (others := frozenset(found) - {name for name, kind in found.items() if kind[2]}) and rewritten(
            owner, others
        ):
            yield owner.__name__, False, "its activation is none of fusednorm's"
        elif _is_bare(module) and (kind := _kind(module, kinds))[2] == "relu2":
            yield attach(module, PatchedRelu2, frozenset(), kind[1], "relu2 fused")


def _gate_of(module: torch.nn.Module, kinds: list[_Kind]) -> _Gate | None:
    """The gate of a module, if it is more than a product that rewriting finds; or None.

    The forward pass of a module is traced only if its children have no children: others are no MLPs.
    """
    children = list(module.children())
    method = "_apply_gate" if hasattr(type(module), "_apply_gate") else "forward"
    if method == "forward" and (len(children) < 2 or any(child._modules for child in children)):
        return None
    reads = Reads()
    try:
        formula = mlp(module, reads, method)
    except LeftAloneError:
        return None
    if formula.act is None:
        return _Gate(formula, reads, _NONE)
    act = _kind(module.get_submodule(formula.act), kinds)
    return None if act[2] is None or not reads.values else _Gate(formula, reads, act)


def _is_bare(module: torch.nn.Module) -> bool:
    """Whether a module has neither children nor tensors."""
    return not any(True for parts in (module.children(), module.parameters(), module.buffers()) for _ in parts)


def _kind(activation: torch.nn.Module, kinds: list[_Kind]) -> _Kind:
    """The kind of an activation, one of ``kinds``, or a new one there; without a function if a trace shows none."""
    if replaced(activation):
        return type(activation), Reads(), None
    for kind in kinds:
        if kind[0] is type(activation) and kind[1].hold(activation):
            return kind
    reads = Reads()
    kinds.append((type(activation), reads, activation_of(activation, reads)))
    return kinds[-1]
