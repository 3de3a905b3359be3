"""Recognises the gated MLP of a model, and its activation, by their computation, not by name.

The forward pass of an MLP is traced by ``torch.fx``, with its submodules as they are. It is one of ::

    down(act(gate(x)) * up(x))
    down(act(a) * b)                 where a and b are the halves, or the even and odd elements, of both(x)

if ``act`` is silu or GELU: its operations, traced on tensors without contents, are one of ATen's. Limits of ``gate(x)``
and ``up(x)``, or of ``act(gate(x))``, a factor in the sigmoid, and a number that is added to ``up(x)`` are flags of
:func:`fusednorm.silu_and_mul`. The gate of experts, ``_apply_gate(both)``, has neither ``both`` nor ``down``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fusednorm.transformers.reads import LeftAloneError, Reads, in_a_line, traced

aten = torch.ops.aten

#: The dtypes in which ATen's activation and product round where fusednorm does.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_PRODUCTS = (operator.mul, torch.mul)
_SUMS = (operator.add, torch.add)
_SIGMOIDS = (torch.sigmoid, functional.sigmoid, Tensor.sigmoid)
_CLAMPS = (torch.clamp, Tensor.clamp)
_CHUNKS = (torch.chunk, Tensor.chunk)
#: Flags of ``silu_and_mul`` that change nothing.
_USUAL = {"limit": inf, "alpha": 1.0, "up_offset": 0.0, "interleaved": False, "clamp": "before", "round_steps": False}


@dataclass(frozen=True)
class MLP:
    """A gated MLP: the names of its submodules, its activation, and flags of ``silu_and_mul``.

    Without ``up`` the results of ``gate`` hold both, the gate first. ``act`` is the submodule of the activation, if it
    is one. ``gate`` and ``down`` are empty for the gate of experts, which takes results and returns products.
    """

    gate: str
    up: str | None
    act: str | None
    down: str
    activation: str
    flags: dict[str, Any] = field(default_factory=dict)


def activation_of(module: torch.nn.Module, reads: Reads | None = None) -> str | None:
    """The function that a module without parameters applies to each number, by fusednorm's name for it; or None.

    ``reads`` gets the attributes with which it does so.
    """
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    forward = type(module).forward  # another may be attached to the module
    bare = (reads or Reads()).copy_of(module)
    try:
        found = {_function(traced(partial(forward, bare), ((2, 3), dtype))) for dtype in DTYPES}
    except LeftAloneError:
        return None
    return found.pop() if len(found) == 1 else None


def _function(graph: fx.Graph) -> str | None:
    x, *nodes, output = graph.nodes
    if not nodes or output.args != (nodes[-1],):
        return None
    match [(node.target, node.args, node.kwargs) for node in nodes]:
        case [(aten.silu.default, (z,), {})] if z is x:
            return "silu"
        case [(aten.gelu.default, (z,), keywords)] if z is x:
            return "gelu_tanh" if keywords == {"approximate": "tanh"} else None if keywords else "gelu"
        case [(aten.relu.default, (z,), {}), (aten.pow.Tensor_Scalar, (positive, 2), {})]:
            return "relu2" if z is x and positive is nodes[0] else None
    return None


class _Tracer(fx.Tracer):
    """Leaves all submodules as they are."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.traced_func_name = method

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def mlp(module: torch.nn.Module, reads: Reads | None = None, method: str = "forward") -> MLP:
    """The formula of a module. ``reads`` gets the module's attributes with which it does so.

    Raises:
        LeftAloneError: no gated MLP.
    """
    try:
        graph = _Tracer(method).trace((reads or Reads()).copy_of(module))
    except Exception as error:  # the model's code may do anything that a trace does not know
        raise LeftAloneError(f"it cannot be traced: {in_a_line(error)}") from error
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            result = fx.map_arg(node.args[0], lambda returned: found[returned])
            if isinstance(result, MLP) and bool(result.down) == (method == "forward"):
                return result
            raise LeftAloneError("its result is not that of a last submodule")
        if node.op == "placeholder":
            value = None if found else _Rows("")
        else:
            value = _value(module, node, [found[a] if isinstance(a, fx.Node) else a for a in node.args])
        if value is None:
            raise LeftAloneError(f"{node.op} {node.target} has no place in the formula")
        found[node] = value
    raise LeftAloneError("it returns nothing")


@dataclass(frozen=True)
class _Rows:
    """Rows on their way through the formula, and the steps that were made with them, in this order."""

    of: str  # the submodule that returned them; empty for the argument
    half: int | None = None  # 0: the gate, 1: up
    interleaved: bool = False
    low: float = -inf
    high: float = inf
    added: float = 0.0
    factor: float = 1.0
    function: str | None = None
    act: str | None = None
    highest: float = inf  # of the function's values

    @property
    def plain(self) -> bool:
        """Whether no step but a limit was made."""
        return self.function is None and (self.added, self.factor) == (0.0, 1.0)


def _value(module: torch.nn.Module, node: fx.Node, arguments: list[Any]) -> Any:
    """The value of a node from those of its arguments: rows, halves of rows, or an MLP; None for any other."""
    target: Any = node.target
    if node.op == "call_module":
        return None if node.kwargs or "." in target or len(arguments) != 1 else _called(module, target, arguments[0])
    if node.op == "call_method":
        target = getattr(Tensor, target, None)
    match arguments:
        case [_Rows() as rows, *rest] if target in _CHUNKS:
            even = rows == _Rows(rows.of) and (rest, node.kwargs) in (([2], {"dim": -1}), ([2, -1], {}))
            return (rows, False) if even else None
        case [_Rows() as rows, *limits] if target in _CLAMPS:
            return _limited(rows, *limits, **node.kwargs)
        case [_Rows() as rows, (EllipsisType(), slice() as elements)] if target is operator.getitem:
            first = {(None, None, 2): 0, (0, None, 2): 0, (1, None, 2): 1}.get(
                (elements.start, elements.stop, elements.step)
            )
            return replace(rows, half=first, interleaved=True) if rows == _Rows(rows.of) and first is not None else None
        case [(_Rows() as rows, False), (0 | 1) as half] if target is operator.getitem:
            return replace(rows, half=half)
        case [_Rows() as rows] if target is functional.silu and not node.kwargs.get("inplace"):
            return _activated(rows, "silu")
        case [_Rows() as rows] if target in _SIGMOIDS and rows.function is None and rows.factor != 1:
            return replace(rows, function="sigmoid")
        case [_, _] if not node.kwargs and target in (*_PRODUCTS, *_SUMS):
            for one, other in (arguments, arguments[::-1]):
                result = (_product if target in _PRODUCTS else _sum)(one, other)
                if result is not None:
                    return result
    return None


def _called(module: torch.nn.Module, name: str, value: Any) -> Any:
    match value:
        case _Rows(of="", half=None):
            return _Rows(name)
        case _Rows():
            return _activated(value, activation_of(module.get_submodule(name)), name)
        case MLP(down=""):
            return replace(value, down=name)
    return None


def _activated(rows: _Rows, function: str | None, act: str | None = None) -> _Rows | None:
    return replace(rows, function=function, act=act) if rows.plain and function is not None else None


def _limited(rows: _Rows, min: Any = None, max: Any = None) -> _Rows | None:
    low, high = -inf if min is None else min, inf if max is None else max
    if not (isinstance(low, int | float) and isinstance(high, int | float)):
        return None
    if rows.plain and (rows.low, rows.high) == (-inf, inf):
        return replace(rows, low=low, high=high)
    return replace(rows, highest=high) if rows.function == "silu" and (low, rows.highest) == (-inf, inf) else None


def _sum(rows: Any, number: Any) -> _Rows | None:
    fits = isinstance(rows, _Rows) and rows.plain and isinstance(number, int | float)
    return replace(rows, added=number) if fits else None


def _product(one: Any, other: Any) -> Any:
    match one, other:
        case _Rows(), int() | float():
            return replace(one, factor=other) if one.plain else None
        case _Rows(), _Rows(function="sigmoid"):
            gate = replace(other, function=None, factor=1.0)
            return replace(other, function="silu") if one == gate else None
        case _Rows(function=str()), _Rows(function=None, factor=1.0):
            return _gated(one, other)
    return None


def _gated(gate: _Rows, up: _Rows) -> MLP | None:
    """The products, if fusednorm's function has all the steps, in this order and with the model's roundings."""
    apart = gate.half is None is up.half and "" not in (gate.of, up.of)
    halves = (gate.half, up.half) == (0, 1) and (gate.of, gate.interleaved) == (up.of, up.interleaved)
    after, stepwise = gate.highest < inf, gate.factor != 1 or up.added != 0
    limit = gate.highest if after else gate.high
    limited = limit > 0 and (up.low, up.high) == (-limit, limit) and not (after and (gate.high < inf or stepwise))
    if not (apart or halves) or not limited or (gate.low, gate.added) != (-inf, 0.0) or gate.factor < 1:
        return None
    # Numbers of Python's float: the fast path takes no others.
    steps: dict[str, Any] = {"limit": float(limit), "alpha": float(gate.factor), "up_offset": float(up.added)}
    steps |= {"interleaved": gate.interleaved, "clamp": "after" if after else "before", "round_steps": stepwise}
    flags = {name: value for name, value in steps.items() if value != _USUAL[name]}
    if gate.function != "silu" and (flags or gate.function not in ("gelu", "gelu_tanh")):
        return None
    return MLP(gate.of, None if halves else up.of, gate.act, "", gate.function, flags)
