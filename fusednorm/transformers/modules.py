"""The modules that replace norms and layers. ``patching.py`` puts them into a model."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.fast_path import Entry, taken_in_c
from fusednorm.calls.must_be_seen import transforms_active
from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated
from fusednorm.operations.norm_operation import NORMS
from fusednorm.operations.two_norms import (
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_on_fast_path,
)
from fusednorm.transformers.layers import Rewritten, evaluated, rewritten
from fusednorm.transformers.norms import Form, Forms, Taken, narrower, taken
from fusednorm.transformers.reads import Reads
from fusednorm.transformers.replacing import Patched, bare


@dataclass
class NormState:
    """The state of a norm: its forms without and with a gate, and the attributes with which they hold.

    C knows the ``usual`` ones of those without a gate.
    """

    forms: Forms
    gated: Forms
    reads: Reads
    usual: dict[tuple[torch.dtype | None, ...], Form] = field(init=False)  # by the dtypes of x, weight and bias

    def __post_init__(self) -> None:
        usual = {pair: form for pair, form in self.forms.items() if form.is_usual}
        self.usual = {(*pair, None): form for pair, form in usual.items()}
        self.usual |= {(*pair, pair[1]): form for pair, form in usual.items() if form.center}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # pickles of older versions have no ``usual``


class PatchedNorm(Patched):
    """A norm that calls fusednorm; comes before the norm's original class."""

    _fusednorm: NormState = NormState({}, {}, Reads())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalises one argument, or gates it by a second one. For other arguments it calls the original class."""
        if len(args) == 1 and not kwargs:
            (x,) = args
            state = self._fusednorm
            if not is_dynamo_compiling():
                norm = taken_in_c(self.__dict__, state.reads.values, state.usual, x)
                if norm is not None:
                    form, weight, bias = norm
                    y = _on_fast_path(x, weight, bias, form.eps, form.weight_offset, form.round_norm, form.center)
                    if y is not None:
                        return y
            if isinstance(x, Tensor) and (norm := taken(state.forms, state.reads, x, self)) is not None:
                form, weight, bias = norm
                if form.center:
                    return layer_norm(x, weight, bias, form.eps, **form.of_norm)
                return rms_norm(x, weight, form.eps, **form.of_norm)
        elif len(args) == 2 and not kwargs:
            x, gate = args
            norm = self._taken_with_gate(x, gate)
            if norm is not None:
                form, weight, _ = norm
                return rms_norm_gated(x, gate, weight, form.eps, **form.of_gate)
        return super().forward(*args, **kwargs)

    def after_addition(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``residual + x``, and the sum, as a layer with this norm computes both."""
        fused = _added(self, x, residual, None, 1.0)
        total = residual + x
        return (self(total), total) if fused is None else fused

    def extra_repr(self) -> str:
        """The arguments as the original class shows them, and "by fusednorm"."""
        return ", ".join(filter(None, [super().extra_repr(), "by fusednorm"]))

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: none where the original class computes rows of this dtype."""
        if not self._fusednorm.reads.hold(self):
            return []
        pair = of_rows, None if getattr(self, "weight", None) is None else of_rows
        if (gated := self._fusednorm.gated.get(pair)) is not None:
            return [("rms_norm_gated", {"eps": gated.eps, **gated.of_gate})]
        form = self._fusednorm.forms.get(pair)
        if form is None:
            return []
        added = {"added_to_weight": form.added} if form.added else {}
        return [("layer_norm" if form.center else "rms_norm", {"eps": form.eps, **form.of_norm, **added})]

    def _taken_with_gate(self, x: Any, gate: Any) -> Taken | None:
        if not (isinstance(x, Tensor) and isinstance(gate, Tensor) and x.shape == gate.shape):
            return None
        norm = taken(self._fusednorm.gated, self._fusednorm.reads, x, self)
        if norm is None:
            return None
        _, weight, _ = norm
        return norm if gate.dtype == narrower(x.dtype, None if weight is None else weight.dtype) else None


class PatchedLayer(Patched):
    """A layer with fused additions; comes before the layer's original class. See ``layers.py``. Its state is True."""

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return {"forward": rewritten_layer(before, norms).forward}

    @property
    def rewritten(self) -> Rewritten:
        """The forward pass."""
        before, _, norms = self._made_of
        return rewritten_layer(before, norms)

    def _add_norm(
        self,
        norm: torch.nn.Module,
        x: Tensor,
        residual: Tensor,
        first: torch.nn.Module | None = None,
        x_scale: Any = 1.0,
    ) -> tuple[Any, Tensor]:
        """``norm(residual + x)``, and the sum; the term is ``first(x)`` with ``first``, and ``x * x_scale``."""
        fused = _added(norm, x, residual, first, x_scale)
        if fused is not None:
            return fused
        if first is None:
            total = residual + (x if type(x_scale) is float and x_scale == 1.0 else x * x_scale)
        else:
            total = self._norm_add(first, x, residual)
        return norm(total), total

    def _norm_add(self, first: torch.nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + first(x)``."""
        norm = taken_beside(first, x, residual)
        if norm is not None:
            form, weight, _ = norm
            if not form.center and _alike(x, residual, weight):
                return rms_norm_add(x, residual, weight, form.eps, **form.of_norm)
        total: Tensor = residual + first(x)
        return total

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: additions. The norms around them are modules of their own."""
        layer = self.rewritten
        steps: list[tuple[str, dict[str, Any]]] = []
        for factor in layer.factors:
            x_scale = 1.0 if factor is None else evaluated(factor, layer.forward, self)
            if type(x_scale) in (float, int, str):  # the model's own code multiplies by others
                x_scale = x_scale if type(x_scale) is str else float(x_scale)
                steps += [("add", {})] if x_scale == 1.0 else [("scale", {"x_scale": x_scale}), ("add", {})]
        return steps


#: A forward pass for each class and its norms.
rewritten_layer = functools.cache(rewritten)


# Between two norms a model reads its weights, which leaves nothing else in the caches: Python around a norm then takes
# longer than the norm. Functions are few therefore, and C, which compares shapes and devices, is asked before they are.


def _record(x: Tensor, *form: Any) -> Any:
    return _record_sum(x, None, 1.0, *form)


def _record_sum(
    x: Tensor,
    residual: Tensor | None,
    x_scale: float,
    weight: Any,
    bias: Any,
    eps: float,
    offset: float,
    rounded: bool,
    center: bool,
) -> Any:
    """The results of a norm where gradients are recorded, or None: other functions make the call."""
    if x_scale != 1.0 or transforms_active():
        return None
    norm = NORMS[residual is not None, center]
    operands = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    flags = {**norm.declaration.defaults, "eps": eps, "weight_offset": offset, "round_norm": rounded}
    return norm.record_new([operands[name] for name in norm.plan.operands], MappingProxyType(flags))


_FORM = "weight bias eps weight_offset round_norm center"
_on_fast_path = Entry("norm", f"x {_FORM}", returned=0).open(recorded=_record)
_added_on_fast_path = Entry("norm", f"x residual x_scale {_FORM}").open(recorded=_record_sum)


def _added(
    norm: torch.nn.Module, x: Tensor, residual: Tensor, first: torch.nn.Module | None, x_scale: Any
) -> tuple[Tensor, Tensor] | None:
    """One call for the addition and the norms around it; None where that would compute something else."""
    after = taken_beside(norm, x, residual)
    if after is None or (first is None and type(x_scale) not in (float, int)):
        return None
    form, weight, bias = after
    eps, offset, rounded, center = form.eps, form.weight_offset, form.round_norm, form.center
    both: tuple[Tensor, Tensor] | None = None
    fast = not is_dynamo_compiling()
    if center and (first is not None or x_scale != 1.0):
        return None
    if first is None:
        if fast:
            both = _added_on_fast_path(x, residual, x_scale, weight, bias, eps, offset, rounded, center)
        if both is None and _alike(x, residual, weight):
            if center:
                return fused_add_layer_norm(x, residual, weight, bias, eps, **form.of_norm)
            return fused_add_rms_norm(x, residual, weight, eps, x_scale=x_scale, **form.of_norm)
        return both
    before = taken_beside(first, x, residual)
    if before is None:
        return None
    first_form, first_weight, _ = before
    if first_form.center or first_form.of_norm != form.of_norm:
        return None
    weights, first_eps = (first_weight, weight), first_form.eps
    if fast:
        both = rms_norm_add_rms_norm_on_fast_path(x, residual, *weights, first_eps, eps, None, offset, True, rounded)
    if both is None and _alike(x, residual, *weights):
        both = rms_norm_add_rms_norm(x, residual, *weights, first_eps, next_eps=eps, **form.of_norm)
    return both


def taken_beside(norm: torch.nn.Module, x: Tensor, residual: Tensor) -> Taken | None:
    """A norm beside an addition of such operands; None where one call for both would be something else.

    A call of ours calls no hooks, and its operands are :func:`_alike`.
    """
    if not isinstance(norm, PatchedNorm):
        return None
    state = norm._fusednorm
    if not is_dynamo_compiling():
        found: Taken | None = taken_in_c(norm.__dict__, state.reads.values, state.usual, x, residual)
        if found is not None:
            return found
    if not (bare(norm) and isinstance(x, Tensor) and isinstance(residual, Tensor)):
        return None
    return taken(state.forms, state.reads, x, norm) if x.dtype == residual.dtype else None


def _alike(x: Tensor, residual: Tensor, *weights: Tensor | None) -> bool:
    """Whether operands are of one shape and on one device: a call of ours broadcasts nothing, and moves nothing."""
    device = x.device
    return x.shape == residual.shape and all(t is None or t.device == device for t in (residual, *weights))
