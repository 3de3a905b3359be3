"""Replaces modules of a model, and restores them (``replacing.py`` does so for one module)."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fusednorm.ops import fused_add_rms_norm, rms_norm
from fusednorm.transformers.attention import PatchedAttention, patch_rotations
from fusednorm.transformers.layers import NotRewrittenError, first_norm, rewritten, straight_on
from fusednorm.transformers.norms import Form, Forms, NotANormError, forms
from fusednorm.transformers.replacing import ATTACHED, Patched, attach, bare, change_class

_logger = logging.getLogger("fusednorm.transformers")


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
    """The state of a norm: its forms, and a result that the previous layer computed for it."""

    forms: Forms
    handed: Handed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without the result, which belongs to one tensor."""
        return {"forms": self.forms, "handed": None}


@dataclass
class LayerState:
    """The state of a layer: the norm of its result, None if that is not certain; and the layer with this norm."""

    following: torch.nn.Module | None = None
    next_layer: torch.nn.Module | None = None


class PatchedNorm(Patched):
    """A norm that calls fusednorm; comes before the norm's original class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalises one argument. For other arguments it calls the original class."""
        x = args[0] if len(args) == 1 and not kwargs else None
        form = self._form(x)
        if form is None or x is None:
            return super().forward(*args, **kwargs)
        state = self._fusednorm
        handed, state.handed = state.handed, None
        if handed is not None and handed.fits(x):
            return handed.y
        weight = getattr(self, "weight", None)
        return rms_norm(x, weight, form.eps, weight_offset=form.weight_offset, round_norm=form.round_norm)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """The norm of ``residual + x``, and the sum; None where the fused call would compute something else."""
        form = self._form(x)
        if form is None or x.dtype != residual.dtype or x.shape != residual.shape or x.device != residual.device:
            return None
        weight = getattr(self, "weight", None)
        if weight is not None and weight.device != x.device:
            return None
        return fused_add_rms_norm(
            x, residual, weight, form.eps, weight_offset=form.weight_offset, round_norm=form.round_norm
        )

    def extra_repr(self) -> str:
        """The arguments as the original class shows them, and "by fusednorm"."""
        return ", ".join(filter(None, [super().extra_repr(), "by fusednorm"]))

    def _fusednorm_step(self, of_rows: torch.dtype) -> tuple[str, dict[str, Any]] | None:
        """For :func:`fusednorm.contract`: None where the original class computes rows of this dtype."""
        weight = None if getattr(self, "weight", None) is None else of_rows
        form: Form | None = self._fusednorm.forms.get((of_rows, weight))
        if form is None:
            return None
        return "rms_norm", {"eps": form.eps, "weight_offset": form.weight_offset, "round_norm": form.round_norm}

    def _form(self, x: Any) -> Form | None:
        if not isinstance(x, Tensor):
            return None
        weight = getattr(self, "weight", None)
        form: Form | None = self._fusednorm.forms.get((x.dtype, None if weight is None else weight.dtype))
        return form


class PatchedLayer(Patched):
    """A layer with fused additions; comes before the layer's original class. See ``layers.py``."""

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        return {"forward": _rewritten(before, norms)[0]}  # type: ignore[arg-type] # classes have a hash

    def _add_norm(self, norm: torch.nn.Module, x: Tensor, residual: Tensor) -> tuple[Any, Tensor]:
        """``norm(residual + x)``, and the sum."""
        fused = norm.add(x, residual) if isinstance(norm, PatchedNorm) and bare(norm) else None
        if fused is not None:
            return fused
        total = residual + x
        return norm(total), total

    def _add_last(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + x``. Its norm is kept for the next layer."""
        norm, next_layer = self._fusednorm.following, self._fusednorm.next_layer
        if not isinstance(norm, PatchedNorm) or self._recomputed():
            return residual + x
        # Writes are not counted then, and hooks may write.
        uncounted = is_compiling() or torch.is_inference_mode_enabled()
        if uncounted and not all(bare(module) for module in (self, next_layer, norm) if module is not None):
            return residual + x
        fused = norm.add(x, residual)
        if fused is None:
            return residual + x
        y, total = fused
        norm._fusednorm.handed = Handed(total, y, _version(total), torch.is_grad_enabled())
        return total

    def _recomputed(self) -> bool:
        """Whether the backward pass may run this layer again by itself. Then no norm may be kept for the next layer."""
        if torch.compiler.is_exporting() or (self.training and getattr(self, "gradient_checkpointing", False)):
            return True
        return not is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _version(x: Tensor) -> int | None:
    """The number of writes to x, where torch counts them."""
    return None if is_compiling() or x.is_inference() else x._version


@dataclass(frozen=True)
class Entry:
    """Modules of one class that were treated alike."""

    #: The class.
    class_name: str
    #: The number of modules.
    count: int
    #: Whether they were replaced.
    replaced: bool
    #: The replacement, or the reason why not.
    what: str


@dataclass(frozen=True)
class Counts:
    """The patched parts of a model.

    Attributes:
        norms: number of norms that fusednorm computes.
        adds: number of additions that are fused with the norm after them, of which
        across: go from one layer into the next.
        rotations: number of attention modules whose q and k are rotated, and normalised if they are, in one call.
    """

    norms: int
    adds: int
    across: int
    rotations: int

    def __str__(self) -> str:
        return f"{self.norms} norms, {self.adds} additions, {self.rotations} rotations"


@dataclass(frozen=True, repr=False)
class Report(Counts):
    """What :func:`patch` replaced, and why it did not replace the rest. ``print`` shows it as a paragraph.

    Attributes:
        norms: number of norms that were replaced.
        adds: number of additions that were fused with the norm after them, of which
        across: go from one layer into the next.
        rotations: number of attention modules whose rotation of q and k was replaced.
        entries: by class.
        before: parts that had been patched before.
    """

    entries: tuple[Entry, ...]
    before: Counts

    def __str__(self) -> str:
        width = max((len(entry.class_name) for entry in self.entries), default=0)
        lines = [
            f"{entry.class_name:{width}} {entry.count:4}  {'' if entry.replaced else 'left alone: '}{entry.what}"
            for entry in self.entries
        ]
        if self.before.norms or self.before.rotations:
            lines.append(f"already patched: {self.before}")
        if self.norms or self.adds or self.rotations:
            fused = f"{self.adds} additions fused, {self.across} of them across layers"
            undo = "fusednorm.transformers.unpatch(model) undoes it"
            lines.append(f"{self.norms} norms replaced, {fused}, {self.rotations} rotations fused; {undo}")
        elif not self.before.norms:
            lines.append("no RMS norm in this model that fusednorm could replace: nothing was changed")
        return "\n".join(lines)

    __repr__ = __str__  # an interpreter shows a call's result by its repr


def _count(model: torch.nn.Module) -> Counts:
    """Counts the patched parts of a model."""
    norms = adds = across = rotations = 0
    for module in model.modules():
        norms += isinstance(module, PatchedNorm)
        rotations += isinstance(module, PatchedAttention)
        if isinstance(module, PatchedLayer):
            before, _, of_layer = module._made_of
            handed = module._fusednorm.following is not None
            adds, across = adds + _rewritten(before, of_layer)[1] + handed, across + handed
    return Counts(norms, adds, across, rotations)


def _check(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "transformers.AutoModelForCausalLM.from_pretrained(...) makes one of a name"
        )


def patch(model: torch.nn.Module) -> Report:
    """Lets fusednorm compute a model's RMS norms, and the additions right before them, with the model's own rounding.

    A module that does not compute an RMS norm, or rounds where no flag does, does not change. Calls with unexpected
    inputs or arguments run the module's own code. A second patch changes nothing.

    Args:
        model: any module, of Hugging Face's transformers or not.

    Returns:
        A report. The logger ``fusednorm.transformers`` gets it too: at level INFO, or at level WARNING if the model has
        no RMS norm that could be replaced.

    Raises:
        TypeError: the model is no module.
    """
    _check(model)
    before = _count(model)
    outcomes: Counter[tuple[str, bool, str]] = Counter()
    known: dict[Any, Forms | str] = {}
    norms = 0
    for module in model.modules():
        if isinstance(module, Patched) or not _may_be_norm(module):
            continue
        found = known.get(key := _key(module))
        if found is None:
            found = known[key] = _forms_or_reason(module)
        class_name = type(module).__name__
        if isinstance(found, str):
            outcomes[class_name, False, found] += 1
            continue
        reason = attach(module, PatchedNorm, frozenset(), NormState(found))
        norms += reason is None
        outcomes[class_name, reason is None, reason or _describe(found)] += 1
    adds, across = 0, 0
    for owner in list(model.modules()):
        for name, layers in owner.named_children():
            if isinstance(layers, torch.nn.ModuleList):
                for layer_name, fused, handed, reason in _patch_layers(owner, name, layers):
                    adds, across = adds + fused + handed, across + handed
                    what = f"additions fused: {fused} within" + (", 1 with the norm after the layer" if handed else "")
                    outcomes[layer_name, reason is None, reason or what] += 1
    rotations = 0
    for class_name, replaced, what in patch_rotations(model, PatchedNorm):
        rotations += replaced
        outcomes[class_name, replaced, what] += 1
    entries = tuple(Entry(name, count, done, what) for (name, done, what), count in outcomes.items())
    report = Report(norms, adds, across, rotations, entries, before)
    _logger.log(logging.INFO if norms or before.norms else logging.WARNING, "%s", report)
    return report


def unpatch(model: torch.nn.Module) -> Counts:
    """Restores all modules that :func:`patch` replaced.

    Returns:
        The numbers of restored norms and additions. The logger ``fusednorm.transformers`` gets them too, at level INFO.

    Raises:
        TypeError: the model is no module.
        RuntimeError: the class of a patched module was changed afterwards (FSDP does that); nothing is restored.
    """
    _check(model)
    undone = _count(model)
    patched = [module for module in model.modules() if "_fusednorm" in module.__dict__]
    for module in patched:
        if "_made_of" not in vars(type(module)):
            raise RuntimeError(
                f"a {type(module).__name__} was patched and then changed its class, so that it cannot be put back; "
                "undo what came after fusednorm.transformers.patch first"
            )
    for module in patched:
        change_class(module, vars(type(module))["_made_of"][0])
        del module.__dict__["_fusednorm"]
    _logger.info("put back: %s", undone)
    return undone


def _may_be_norm(module: torch.nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    return "norm" in type(module).__name__.lower() or (
        list(parameters) == ["weight"] and parameters["weight"].dim() == 1
    )


def _key(module: torch.nn.Module) -> Any:
    """A key that is equal for modules with the same computation."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else None
    skipped = {*torch.nn.Module().__dict__, *ATTACHED}
    values = {name: value for name, value in module.__dict__.items() if name not in skipped}
    plain = (int, float, bool, str, tuple, type(None))
    return (
        type(module),
        shape,
        tuple((name, v if isinstance(v, plain) else id(v)) for name, v in sorted(values.items())),
    )


def _forms_or_reason(module: torch.nn.Module) -> Forms | str:
    try:
        return forms(module)
    except NotANormError as error:
        return str(error)


def _describe(found: Forms) -> str:
    *_, form = found.values()
    arguments = [f"eps={form.eps}"]
    arguments += [f"weight_offset={form.weight_offset}"] if form.weight_offset else []
    arguments += ["round_norm=True"] if any(form.round_norm for form in found.values()) else []
    return f"rms_norm({', '.join(arguments)})"


def _patch_layers(
    owner: torch.nn.Module, name: str, layers: torch.nn.ModuleList
) -> list[tuple[str, int, bool, str | None]]:
    """For each layer with norms: its class, its fused additions, whether its last one is fused, or a reason."""
    straight, final = straight_on(type(owner), name)
    done: list[tuple[str, int, bool, str | None]] = []
    for index, layer in enumerate(layers):
        norms = frozenset(child for child, module in layer.named_children() if isinstance(module, PatchedNorm))
        if isinstance(layer, Patched) or not norms:
            continue
        class_name = type(layer).__name__
        try:
            _, fused, ends = _rewritten(type(layer), norms)  # type: ignore[arg-type] # classes have a hash
        except NotRewrittenError as error:
            done.append((class_name, 0, False, str(error)))
            continue
        following = next_layer = None
        if ends and straight:
            next_layer = layers[index + 1] if index + 1 < len(layers) else None
            attribute = final if next_layer is None else first_norm(type(next_layer))
            following = (
                None if attribute is None else getattr(owner if next_layer is None else next_layer, attribute, None)
            )
        handed = isinstance(following, PatchedNorm)
        reason: str | None = "no norm follows its additions for certain"
        if fused or handed:
            state = LayerState(following, next_layer) if handed else LayerState()
            reason = attach(layer, PatchedLayer, norms, state)
        done.append((class_name, fused if reason is None else 0, handed and reason is None, reason))
    return done


_rewritten = functools.cache(rewritten)
