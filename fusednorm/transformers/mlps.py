"""Recognises the gated MLP of a model, and its activation, by their computation, not by name.

The forward pass of an MLP is traced by ``torch.fx``, with its submodules as they are. It is one of ::

    down(act(gate(x)) * up(x))
    down(act(a) * b)                 where a and b are the halves of both(x), in this order

if ``act`` is silu or the tanh form of GELU: its operations, traced on tensors without contents, are one of ATen's.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fusednorm.transformers.reads import LeftAloneError, Reads, in_a_line, traced

aten = torch.ops.aten

#: The dtypes in which ATen's activation and product round where fusednorm does.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_PRODUCTS = (operator.mul, torch.mul)


@dataclass(frozen=True)
class MLP:
    """A gated MLP: the names of its submodules, and its activation.

    Without ``up`` the results of ``gate`` hold both, the gate first. ``act`` is the submodule of the activation.
    """

    gate: str
    up: str | None
    act: str
    down: str
    activation: str


def activation_of(module: torch.nn.Module, reads: Reads | None = None) -> str | None:
    """The function that a module without parameters applies to each number: "silu" or "gelu_tanh", or None.

    ``reads`` gets the attributes with which it does so.
    """
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    forward = type(module).forward  # another may be attached to the module
    bare = (reads or Reads()).copy_of(module)
    try:
        found = {_only_operation(traced(partial(forward, bare), ((2, 3), dtype))) for dtype in DTYPES}
    except LeftAloneError:
        return None
    return found.pop() if len(found) == 1 else None


def _only_operation(graph: fx.Graph) -> str | None:
    x, *nodes, output = graph.nodes
    if len(nodes) != 1 or output.args != (nodes[0],) or nodes[0].args[:1] != (x,):
        return None
    (node,) = nodes
    if node.target is aten.silu.default:
        return "silu"
    return "gelu_tanh" if node.target is aten.gelu.default and node.kwargs == {"approximate": "tanh"} else None


class _Tracer(fx.Tracer):
    """Leaves all submodules as they are."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def mlp(module: torch.nn.Module, reads: Reads | None = None) -> MLP:
    """The formula of a module. ``reads`` gets the module's attributes with which it does so.

    Raises:
        LeftAloneError: no gated MLP.
    """
    try:
        graph = _Tracer().trace((reads or Reads()).copy_of(module))
    except Exception as error:  # the model's code may do anything that a trace does not know
        raise LeftAloneError(f"it cannot be traced: {in_a_line(error)}") from error
    return _read(module, graph)


def _read(module: torch.nn.Module, graph: fx.Graph) -> MLP:
    """The MLP of a graph: each node has a kind, which begins with what it is, and names submodules."""
    kinds: dict[Any, tuple[Any, ...]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            kind: tuple[Any, ...] | None = ("x",) if not kinds else None
        elif node.op == "output":
            match kinds.get(node.args[0]):
                case ("down", MLP() as found):
                    return found
            raise LeftAloneError("its result is not that of a last submodule")
        else:
            kind = _kind(module, node, [kinds.get(argument, argument) for argument in node.args])
        if kind is None:
            raise LeftAloneError(f"{node.op} {node.target} has no place in the formula")
        kinds[node] = kind
    raise LeftAloneError("it returns nothing")


def _kind(module: torch.nn.Module, node: fx.Node, arguments: list[Any]) -> tuple[Any, ...] | None:
    """The kind of a node from those of its arguments; None if it has no place in the formula."""
    name = str(node.target)
    if node.op == "call_module" and "." in name:
        return None
    match node.op, arguments:
        case "call_module", [("x",)] if not node.kwargs:
            return "linear", name, None
        case "call_module", [("linear", gate, half)] if not node.kwargs:
            activation = activation_of(module.get_submodule(name))
            return None if activation is None else ("activated", gate, half, name, activation)
        case "call_module", [("product", MLP() as found)] if not node.kwargs:
            return "down", MLP(found.gate, found.up, found.act, name, found.activation)
        case "call_method", [("linear", both, None), *rest] if node.target == "chunk":
            return ("halves", both) if (rest, node.kwargs) in (([2], {"dim": -1}), ([2, -1], {})) else None
        case "call_function", [("halves", both), (0 | 1) as half] if node.target is operator.getitem:
            return "linear", both, half
        case "call_function", [_, _] if node.target in _PRODUCTS and not node.kwargs:
            for one, other in (arguments, arguments[::-1]):
                match one, other:
                    case ("activated", gate, None, act, activation), ("linear", up, None):
                        return "product", MLP(gate, up, act, "", activation)
                    case ("activated", both, 0, act, activation), ("linear", again, 1) if both == again:
                        return "product", MLP(both, None, act, "", activation)
    return None
