"""The modules that replace norms and layers. ``patching.py`` puts them into a model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated
from fusednorm.operations.two_norms import rms_norm_add, rms_norm_add_rms_norm
from fusednorm.transformers.layers import Rewritten, evaluated, rewritten
from fusednorm.transformers.norms import Form, Forms, form_of
from fusednorm.transformers.reads import Reads
from fusednorm.transformers.replacing import Patched, bare, parameter


@dataclass(frozen=True)
class Handed:
    """The norm of a layer's result, which the layer computed for the next layer."""

    total: Tensor
    y: Tensor
    version: int | None
    grad_enabled: bool

    def fits(self, x: Tensor) -> bool:
        """Whether this is the norm of x, with the right gradient."""
        return x is self.total and self.version == _version(x) and self.grad_enabled == torch.is_grad_enabled()


@dataclass
class NormState:
    """The state of a norm: its forms without and with a gate, and the attributes with which they hold."""

    forms: Forms
    gated: Forms
    reads: Reads
    handed: Handed | None = None  # a result that the previous layer computed for it

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without the result, which belongs to one tensor."""
        return {**self.__dict__, "handed": None}


@dataclass
class LayerState:
    """The state of a layer: the norm of its result, None if that is not certain; and the layer with this norm."""

    following: torch.nn.Module | None = None
    next_layer: torch.nn.Module | None = None


class PatchedNorm(Patched):
    """A norm that calls fusednorm; comes before the norm's original class."""

    _fusednorm: NormState = NormState({}, {}, Reads())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalises one argument, or gates it by a second one. For other arguments it calls the original class."""
        if len(args) == 1 and not kwargs:
            (x,) = args
            form = self._form(x)
            if form is not None:
                state = self._fusednorm
                handed, state.handed = state.handed, None
                if handed is not None and handed.fits(x):
                    return handed.y
                if form.center:
                    return layer_norm(x, *_affine(self, form), form.eps, **form.of_norm)
                return rms_norm(x, getattr(self, "weight", None), form.eps, **form.of_norm)
        elif len(args) == 2 and not kwargs:
            x, gate = args
            form = self._form_with_gate(x, gate)
            if form is not None:
                return rms_norm_gated(x, gate, getattr(self, "weight", None), form.eps, **form.of_gate)
        return super().forward(*args, **kwargs)

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

    def _form(self, x: Any) -> Form | None:
        return self._form_of(x, self._fusednorm.forms) if isinstance(x, Tensor) else None

    def _form_with_gate(self, x: Any, gate: Any) -> Form | None:
        if not (isinstance(x, Tensor) and isinstance(gate, Tensor) and x.dtype == gate.dtype and x.shape == gate.shape):
            return None
        return self._form_of(x, self._fusednorm.gated)

    def _form_of(self, x: Tensor, forms: Forms) -> Form | None:
        form = form_of(forms, x, self)
        return form if form is not None and self._fusednorm.reads.hold(self) else None


class PatchedLayer(Patched):
    """A layer with fused additions; comes before the layer's original class. See ``layers.py``."""

    _fusednorm = LayerState()

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return {"forward": rewritten_layer(before, norms).forward}

    @property
    def rewritten(self) -> Rewritten:
        """The forward pass."""
        before, _, norms = self._made_of
        return rewritten_layer(before, norms)

    @property
    def hands_over(self) -> bool:
        """Whether it computes the norm of its result, too."""
        return self._fusednorm.following is not None

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
        total = self._sum(x, residual, first, x_scale)
        return norm(total), total

    def _add_last(
        self, x: Tensor, residual: Tensor, first: torch.nn.Module | None = None, x_scale: Any = 1.0
    ) -> Tensor:
        """``residual + x``, whose term is as that of ``_add_norm``. Its norm is kept for the next layer."""
        norm, next_layer = self._fusednorm.following, self._fusednorm.next_layer
        if isinstance(norm, PatchedNorm) and not self._recomputed():
            # Writes are not counted then, and hooks may write.
            uncounted = is_compiling() or torch.is_inference_mode_enabled()
            if not uncounted or all(bare(module) for module in (self, next_layer) if module is not None):
                fused = _added(norm, x, residual, first, x_scale)
                if fused is not None:
                    y, total = fused
                    norm._fusednorm.handed = Handed(total, y, _version(total), torch.is_grad_enabled())
                    return total
        return self._sum(x, residual, first, x_scale)

    def _norm_add(self, first: torch.nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + first(x)``."""
        form = _form_beside(first, x, residual)
        if form is None or form.center:
            total: Tensor = residual + first(x)
            return total
        return rms_norm_add(x, residual, getattr(first, "weight", None), form.eps, **form.of_norm)

    def _sum(self, x: Tensor, residual: Tensor, first: torch.nn.Module | None, x_scale: Any) -> Tensor:
        """``residual + x``, without a norm after it."""
        if first is not None:
            return self._norm_add(first, x, residual)
        return residual + (x if type(x_scale) is float and x_scale == 1.0 else x * x_scale)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: additions. The norms around them are modules of their own."""
        layer = self.rewritten
        steps: list[tuple[str, dict[str, Any]]] = []
        for factor in layer.factors[: layer.additions(self.hands_over)]:
            x_scale = 1.0 if factor is None else evaluated(factor, layer.forward, self)
            if type(x_scale) in (float, int, str):  # the model's own code multiplies by others
                x_scale = x_scale if type(x_scale) is str else float(x_scale)
                steps += [("add", {})] if x_scale == 1.0 else [("scale", {"x_scale": x_scale}), ("add", {})]
        return steps

    def _recomputed(self) -> bool:
        """Whether the backward pass may run this layer again by itself. Then no norm may be kept for the next layer."""
        if torch.compiler.is_exporting() or (self.training and getattr(self, "gradient_checkpointing", False)):
            return True
        return not is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


#: A forward pass for each class and its norms.
rewritten_layer = functools.cache(rewritten)


def _added(
    norm: torch.nn.Module, x: Tensor, residual: Tensor, first: torch.nn.Module | None, x_scale: Any
) -> tuple[Tensor, Tensor] | None:
    """One call for the addition and the norms around it; None where that would compute something else."""
    form, weight = _form_beside(norm, x, residual), parameter(norm, "weight")
    if form is None or (first is None and type(x_scale) not in (float, int)):
        return None
    if form.center:
        if first is not None or x_scale != 1.0:
            return None
        return fused_add_layer_norm(x, residual, *_affine(norm, form), form.eps, **form.of_norm)
    if first is None:
        return fused_add_rms_norm(x, residual, weight, form.eps, x_scale=x_scale, **form.of_norm)
    before = _form_beside(first, x, residual)
    if before is None or before.center or before.of_norm != form.of_norm:
        return None
    weights = getattr(first, "weight", None), weight
    return rms_norm_add_rms_norm(x, residual, *weights, before.eps, next_eps=form.eps, **form.of_norm)


def _affine(norm: torch.nn.Module, form: Form) -> tuple[Any, Any]:
    """The weight and the bias of a LayerNorm."""
    weight = parameter(norm, "weight")
    return (weight + form.added if form.added else weight), parameter(norm, "bias")


def _form_beside(norm: torch.nn.Module, x: Tensor, residual: Tensor) -> Form | None:
    """The form of a norm beside an addition of such operands; None where one call for both would be something else.

    A call of ours broadcasts nothing, moves nothing, and calls no hooks.
    """
    if not (isinstance(norm, PatchedNorm) and bare(norm) and isinstance(x, Tensor) and isinstance(residual, Tensor)):
        return None
    if x.dtype != residual.dtype or x.shape != residual.shape or x.device != residual.device:
        return None
    weight = parameter(norm, "weight")
    return norm._form(x) if weight is None or weight.device == x.device else None


def _version(x: Tensor) -> int | None:
    """The number of writes to x, where torch counts them."""
    return None if is_compiling() or x.is_inference() else x._version
