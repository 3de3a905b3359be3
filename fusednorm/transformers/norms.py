"""Recognises a module's norm, with or without a gate after it, by its computation, not by its name or its source.

The module's forward pass is traced into ATen operations, on tensors with shapes but without contents. If the operations
are the specification's RMS norm or LayerNorm for some flags, the result is these flags; otherwise it is the reason why
not. A LayerNorm is written out, or torch's own operator, which rounds where the specification does.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, dtype, fx

from fusednorm.operations.modules import any_autocast
from fusednorm.transformers.reads import LeftAloneError, Reads, traced

aten = torch.ops.aten

_A = torch.float32  # the accumulator type
#: Rows and weights of one dtype, or one of both in float32, as the rows of Mamba 2's states are.
_PAIRS = [*(pair for x in (torch.float16, torch.bfloat16) for pair in ((x, x), (x, _A), (_A, x))), (_A, _A)]


@dataclass(frozen=True)
class Form:
    """The arguments with which :func:`fusednorm.rms_norm` rounds at the module's places.

    With an activation they are those of :func:`fusednorm.rms_norm_gated`, and with ``center`` those of
    :func:`fusednorm.layer_norm`, whose weight is the module's plus ``added``, in its own dtype. They hold for inputs of
    ``dims`` dimensions and rows of ``length`` elements (None: any).
    """

    eps: float
    weight_offset: float
    round_norm: bool
    activation: str | None = None
    between: dtype | None = None
    norm_before_gate: bool = True
    group_size: int | None = None
    dims: int | None = None
    length: int | None = None
    center: bool = False
    added: float = 0.0

    @property
    def is_usual(self) -> bool:
        """Whether it holds for all rows, with the module's weight as it is."""
        return self.dims is None and self.length is None and not self.added

    @property
    def of_norm(self) -> dict[str, Any]:
        """The arguments of :func:`fusednorm.rms_norm` after eps."""
        return {"weight_offset": self.weight_offset, "round_norm": self.round_norm}

    @property
    def of_gate(self) -> dict[str, Any]:
        """The arguments of :func:`fusednorm.rms_norm_gated` after eps."""
        before = {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return {**self.of_norm, **before, "activation": self.activation, "between": self.between}

    def is_norm_like(self, other: Form) -> bool:
        """Whether both are RMS norms with the same arguments."""
        same = self.eps == other.eps and self.weight_offset == other.weight_offset
        return same and self.round_norm == other.round_norm and not (self.center or other.center)


#: By the dtypes of the input and of the weight (None without a weight); a bias has the weight's.
Forms = dict[tuple[dtype, dtype | None], Form]


#: The form of a module, and the weight and the bias that its call takes; the bias of a LayerNorm.
Taken = tuple[Form, Any, Any]


def taken(found: Forms, reads: Reads, x: Tensor, module: torch.nn.Module) -> Taken | None:
    """The form of a module that holds for such an input, while its attributes are as they were read."""
    own = module.__dict__
    parameters, bias = own["_parameters"], None  # which the module's attributes find only after a search of all else
    weight: Any = parameters["weight"] if "weight" in parameters else getattr(module, "weight", None)
    form = found.get((x.dtype, None if weight is None else weight.dtype))
    if form is None or (form.dims is not None and form.dims != x.dim()):
        return None
    if form.center:
        if any_autocast() and torch.is_autocast_enabled(x.device.type):  # torch's LayerNorm may convert its operands
            return None
        bias = parameters["bias"] if "bias" in parameters else getattr(module, "bias", None)
        if bias is not None and (weight is None or bias.dtype != weight.dtype):
            return None
    if form.length is not None and x.shape[-1:] != (form.length,):
        return None
    for name, value in reads.values.items():
        if own.get(name, ...) is not value and not reads.hold(module):
            return None
    return form, weight + form.added if form.added else weight, bias


def narrower(x: dtype, weight: dtype | None) -> dtype:
    """The dtype of the gate of such rows and such a weight: that of the model's matrix products."""
    return x if weight is None or x.itemsize < weight.itemsize else weight


def forms(module: torch.nn.Module, reads: Reads | None = None, gated: bool = False) -> Forms:
    """A module's forms, by the dtypes of input and weight.

    With ``gated`` the module takes a gate after its input, of its shape. A pair of dtypes is missing if the module
    returns another dtype than its input's, or rounds where no flag does. ``reads`` gets the attributes with which the
    forms hold.

    Raises:
        LeftAloneError: the module has no form.
    """
    reads = reads or Reads()
    others = [name for name, _ in [*module.named_parameters(), *module.named_buffers(), *module.named_children()]]
    if [name for name in others if name not in ("weight", "bias")]:
        raise LeftAloneError(f"it has more than a weight and a bias: {', '.join(others)}")
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is not None and not (isinstance(weight, Tensor) and weight.dim() == 1):
        dims = f"has {weight.dim()} dimensions" if isinstance(weight, Tensor) else f"is a {type(weight).__name__}"
        raise LeftAloneError(f"its weight {dims}")
    if bias is not None and not (weight is not None and isinstance(bias, Tensor) and bias.shape == weight.shape):
        raise LeftAloneError("its bias has no weight, or another shape")
    length = _length(module) if weight is None else weight.shape[0]
    found: Forms = {}
    for x_dtype, weight_dtype in _PAIRS:
        pair = x_dtype, None if weight is None else weight_dtype
        try:
            found[pair] = _form(reads, module, length, *pair, (2, 3), gated, training=False)
        except LeftAloneError as error:
            reason = error
    if not found:
        raise reason
    pair, form = next(iter(found.items()))
    # Gates of rows of any dimensions, or of three, as the first ones were; and rows of any length, or of this one.
    shapes = [((5,), None), ((1, 5), 3)] if gated else [((5,), None)]
    lengths = [(2 * length, None), (length, length)] if weight is None else [(length, form.group_size and length)]
    for (leading, rank), (of_row, only) in itertools.product(shapes, lengths):
        try:
            if form == _form(reads, module, of_row, *pair, leading, gated, training=True):
                reads.values.pop("training", None)  # both ways were traced
                return {of_pair: replace(one, dims=rank, length=only) for of_pair, one in found.items()}
        except LeftAloneError:
            continue
    raise LeftAloneError("it computes something else in training, or for inputs of other dimensions")


def _length(module: torch.nn.Module) -> int:
    """The length of rows that a module without a weight takes, by the name that torch's norms give it; 8 if any."""
    match getattr(module, "normalized_shape", None):
        case [*_, int(length)] | int(length):
            return length
    return 8


def _form(
    reads: Reads,
    module: torch.nn.Module,
    length: int,
    x_dtype: dtype,
    weight_dtype: dtype | None,
    leading: tuple[int, ...],
    gated: bool,
    training: bool,
) -> Form:
    """The form for x and a gate, both [*leading, length], and a weight, with these dtypes."""
    bare = reads.copy_of(module)
    bare.training = training

    def call(x: Tensor, weight: Tensor | None, bias: Tensor | None, *gate: Tensor) -> Any:
        for name, of_row in (("weight", weight), ("bias", bias)):
            if of_row is not None:
                bare._parameters[name] = of_row  # type: ignore[assignment]
        return type(bare).forward(bare, x, *gate)

    x, weight = ((*leading, length), x_dtype), None if weight_dtype is None else ((length,), weight_dtype)
    bias = None if getattr(module, "bias", None) is None else weight
    gate = (*leading, length), narrower(x_dtype, weight_dtype)
    return _read(traced(call, x, weight, bias, *([gate] if gated else [])), x_dtype, gated)


@dataclass(frozen=True)
class _Term:
    """The result of one operation of a graph, named as in the specification.

    ``kind`` is x, weight, bias, g, square, mean, mean+eps, sqrt, rstd, n or y; mean of x; or gate, activated or gated.
    x is also the input times the activated gate, if the gate comes first, and, with ``center``, the input less its
    mean. ``split`` says whether rows are split into groups here, ``added`` what was added to the weight in its own
    dtype.
    """

    kind: str
    dtype: dtype
    eps: float = 0.0
    offset: float = 0.0
    rounded: bool = False
    activation: str | None = None
    between: torch.dtype | None = None
    gate_first: bool = False
    group_size: int | None = None
    split: bool = False
    center: bool = False
    biased: bool = False
    added: float = 0.0


def _read(graph: fx.Graph, x_dtype: dtype, gated: bool) -> Form:
    """The form of the computation of a graph."""
    terms: dict[fx.Node, _Term] = {}
    inputs = iter(("x", "weight", "bias", "gate"))
    shape: torch.Size | None = None
    for node in graph.nodes:
        if node.op == "output":
            (result,) = node.args
            y = terms.get(result)
            weightless = y is not None and y.kind == "n" and all(term.kind != "weight" for term in terms.values())
            normed = y is not None and (y.kind == "y" or weightless)
            if gated and (y is None or not (y.kind == "gated" or (normed and y.gate_first))):
                raise LeftAloneError("its result is not a norm and a function of the gate")
            if y is None or not (gated or normed):
                raise LeftAloneError("its result is not the row times rstd times the weight")
            if y.dtype != x_dtype:
                raise LeftAloneError(f"it returns {str(y.dtype)[6:]} for an input of {str(x_dtype)[6:]}")
            if y.biased != any(term.kind == "bias" for term in terms.values()):
                raise LeftAloneError("it does not add its bias")
            if shape is None or result.meta["val"].shape != shape:
                raise LeftAloneError("its result has another shape than its input")
            rounded = y.rounded and not weightless and x_dtype != _A
            groups = None if y.group_size == shape[-1] else y.group_size
            if groups is not None and not gated:
                raise LeftAloneError(f"it normalises parts of {groups} elements")
            if y.center and (gated or groups is not None):
                raise LeftAloneError("it is a LayerNorm with a gate, or of groups")
            gate = y.activation, y.between, not y.gate_first, groups
            return Form(y.eps, y.offset, rounded, *gate, center=y.center, added=y.added)
        value = node.meta.get("val")
        if node.op == "placeholder":
            kind = next(inputs)
            if isinstance(value, Tensor):
                terms[node] = _Term(kind, value.dtype)
                shape = value.shape if kind == "x" else shape
            continue
        rule = _RULES.get(node.target)
        arguments = [terms.get(argument, argument) for argument in node.args]
        value = value[0] if node.target is aten.native_layer_norm.default else value
        term = rule(arguments, value, x_dtype) if rule is not None and isinstance(value, Tensor) else None
        if term is None:
            kinds = ", ".join(term.kind if isinstance(term, _Term) else str(term) for term in arguments)
            raise LeftAloneError(f"{node.target}({kinds}) has no place in the formula")
        terms[node] = term
    raise LeftAloneError("it returns nothing")


def _cast(arguments: list[Any], value: Tensor, x_dtype: dtype) -> _Term | None:
    term: _Term = arguments[0]
    to = value.dtype
    if to == term.dtype or (term.kind in ("x", "weight", "bias", "g", "n", "gate") and to == _A):
        return replace(term, dtype=to)
    if term.kind == "n" and to == x_dtype:
        return replace(term, dtype=to, rounded=True)
    if term.kind in ("y", "gated") and term.dtype == _A and to == x_dtype:
        return replace(term, dtype=to)
    return None


def _view(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    """Rows, or the weight, that are split into groups, and what becomes of them, as rows again."""
    term: _Term = arguments[0]
    if term.kind in ("x", "weight", "g") and not term.split:
        return replace(term, split=True, group_size=value.shape[-1])
    # If the groups were put together otherwise than as they were, the result's shape would not be x's.
    return replace(term, split=False) if term.kind in ("n", "y") and term.split else None


def _power(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    term: _Term = arguments[0]
    exponent = arguments[1]
    if term.kind == "x" and exponent == 2 and value.dtype == _A:
        return _square(term)
    if term.kind == "mean+eps" and exponent == -0.5:
        return replace(term, kind="rstd")
    return None


def _square(x: _Term) -> _Term:
    return _Term("square", _A, group_size=x.group_size, split=x.split, center=x.center)


def _mean(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    term: _Term = arguments[0]
    dims, *keep = arguments[1:]
    if dims not in ([-1], [value.dim() - 1]) or keep != [True]:
        return None
    if term.kind == "square":
        return replace(term, kind="mean")
    return replace(term, kind="mean of x") if term.kind == "x" and not term.center and value.dtype == _A else None


def _minus(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    x, mean = arguments
    if not (isinstance(x, _Term) and isinstance(mean, _Term)) or value.dtype != _A or x.gate_first or x.split:
        return None
    return replace(x, dtype=_A, center=True) if (x.kind, x.center, mean.kind) == ("x", False, "mean of x") else None


def _torchs(arguments: list[Any], value: Tensor, x_dtype: dtype) -> _Term | None:
    """torch's own LayerNorm, whose operands are of one dtype, or, beside rows of 16 bits, float32."""
    x, shape, weight, bias, eps = arguments
    if not isinstance(x, _Term) or (x.kind, x.center, x.gate_first, x.split) != ("x", False, False, False):
        return None
    if shape != [value.shape[-1]] or (weight is None and bias is not None):
        return None
    of_row = [(term, kinds) for term, kinds in ((weight, ("weight", "g")), (bias, ("bias",))) if term is not None]
    if any(term.kind not in kinds or term.dtype != of_row[0][0].dtype for term, kinds in of_row):
        return None
    if weight is not None and weight.dtype not in (x.dtype, _A):
        return None
    normed = _Term("n", value.dtype, float(eps), rounded=value.dtype != _A, center=True)
    if weight is None:
        return normed
    return replace(normed, kind="y", rounded=False, offset=weight.offset, biased=bias is not None, added=weight.added)


def _part(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    """The rows that torch's LayerNorm returns, or its mean or rstd, of which nothing may be made."""
    norm, number = arguments
    return replace(norm, kind="mean or rstd") if number else norm  # type: ignore[no-any-return]


def _plus(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
    term, number = arguments if isinstance(arguments[0], _Term) else arguments[::-1]
    if not isinstance(term, _Term) or not isinstance(number, int | float):
        return None
    if term.kind == "weight" and value.dtype == term.dtype != _A and not term.added:
        return replace(term, added=float(number))
    if value.dtype != _A or term.added:
        return None
    if term.kind == "mean":
        return replace(term, kind="mean+eps", eps=float(number))
    if term.kind == "weight":
        return replace(term, kind="g", offset=float(number), dtype=_A)
    return None


def _times(arguments: list[Any], value: Tensor, x_dtype: dtype) -> _Term | None:
    a, b = arguments
    if not (isinstance(a, _Term) and isinstance(b, _Term)) or a.split != b.split:
        return None
    by_kind = {a.kind: a, b.kind: b}
    if a == b and a.kind == "x" and value.dtype == _A:
        return _square(a)
    if by_kind.keys() == {"x", "activated"} and value.dtype == _A and not by_kind["x"].gate_first:
        return replace(by_kind["x"], dtype=_A, gate_first=True, activation=by_kind["activated"].activation)
    if by_kind.keys() == {"x", "rstd"} and value.dtype == _A and a.center == b.center:
        x = by_kind["x"]
        return replace(by_kind["rstd"], kind="n", gate_first=x.gate_first, activation=x.activation)
    if "n" in by_kind and by_kind.keys() & {"weight", "g"} and value.dtype in (x_dtype, _A):
        g = by_kind.get("g") or by_kind["weight"]
        return replace(by_kind["n"], kind="y", dtype=value.dtype, offset=g.offset, added=g.added)
    if by_kind.keys() == {"y", "activated"} and value.dtype == _A and not by_kind["y"].gate_first:
        y = by_kind["y"]
        between = None if y.dtype == x_dtype else y.dtype
        return replace(y, kind="gated", dtype=_A, activation=by_kind["activated"].activation, between=between)
    return None


def _becomes(before: str, after: str, activation: str | None = None) -> Callable[..., _Term | None]:
    def rule(arguments: list[Any], value: Tensor, _: dtype) -> _Term | None:
        term: _Term = arguments[0]
        fits = term.kind == before and value.dtype == _A
        return replace(term, kind=after, activation=activation or term.activation) if fits else None

    return rule


_RULES: dict[Any, Callable[..., _Term | None]] = {
    aten._to_copy.default: _cast,
    aten.pow.Tensor_Scalar: _power,
    aten.mean.dim: _mean,
    aten.sub.Tensor: _minus,
    aten.native_layer_norm.default: _torchs,
    operator.getitem: _part,
    aten.add.Tensor: _plus,
    aten.add_.Scalar: _plus,  # in F.rms_norm
    aten.mul.Tensor: _times,
    aten.view.default: _view,
    aten.rsqrt.default: _becomes("mean+eps", "rstd"),
    aten.sqrt.default: _becomes("mean+eps", "sqrt"),
    aten.reciprocal.default: _becomes("sqrt", "rstd"),
    aten.silu.default: _becomes("gate", "activated", "silu"),
    aten.sigmoid.default: _becomes("gate", "activated", "sigmoid"),
}
