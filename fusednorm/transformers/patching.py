"""Replaces modules of a model, and restores them (``replacing.py`` does so for one module)."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fusednorm.transformers.activations import PatchedActivations, patch_activations
from fusednorm.transformers.attention import PatchedAttention, patch_rotations
from fusednorm.transformers.layers import NotRewrittenError, first_norm, straight_on
from fusednorm.transformers.modules import LayerState, NormState, PatchedLayer, PatchedNorm, rewritten_layer
from fusednorm.transformers.norms import Forms, NotANormError, forms
from fusednorm.transformers.reads import Reads
from fusednorm.transformers.replacing import Patched, attach, detach

_logger = logging.getLogger("fusednorm.transformers")

#: The attributes that a module read in its trace, and its forms, without and with a gate, or why it has none.
_Known = tuple[Reads, tuple[Forms, Forms] | str]


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
        gates: number of MLPs whose activation and product are one call.
    """

    norms: int
    adds: int
    across: int
    rotations: int
    gates: int

    @property
    def any(self) -> bool:
        """Whether anything is patched."""
        return bool(self.norms or self.adds or self.rotations or self.gates)

    def __str__(self) -> str:
        return f"{self.norms} norms, {self.adds} additions, {self.rotations} rotations, {self.gates} gates"


@dataclass(frozen=True, repr=False)
class Report(Counts):
    """The modules that :func:`patch` replaced, and why it did not replace the rest. ``print`` shows it as a paragraph.

    Attributes:
        entries: by class.
        before: parts that had been patched before; the numbers of :class:`Counts` are those of parts replaced now.
    """

    entries: tuple[Entry, ...]
    before: Counts

    def __str__(self) -> str:
        width = max((len(entry.class_name) for entry in self.entries), default=0)
        lines = [
            f"{entry.class_name:{width}} {entry.count:4}  {'' if entry.replaced else 'left alone: '}{entry.what}"
            for entry in self.entries
        ]
        if self.before.any:
            lines.append(f"already patched: {self.before}")
        if self.any:
            fused = f"{self.adds} additions fused, {self.across} of them across layers"
            undo = "fusednorm.transformers.unpatch(model) undoes it"
            others = f"{self.rotations} rotations and {self.gates} gates fused"
            lines.append(f"{self.norms} norms replaced, {fused}, {others}; {undo}")
        elif not self.before.any:
            lines.append("nothing in this model that fusednorm could replace: nothing was changed")
        return "\n".join(lines)

    __repr__ = __str__  # an interpreter shows a call's result by its repr


def _count(model: torch.nn.Module) -> Counts:
    """Counts the patched parts of a model."""
    norms = adds = across = rotations = gates = 0
    for module in model.modules():
        if "_fusednorm" not in module.__dict__:
            continue
        norms += isinstance(module, PatchedNorm)
        rotations += isinstance(module, PatchedAttention)
        gates += isinstance(module, PatchedActivations)
        if isinstance(module, PatchedLayer):
            before, _, of_layer = module._made_of
            handed = module._fusednorm.following is not None
            adds, across = adds + rewritten_layer(before, of_layer).additions(handed), across + handed
    return Counts(norms, adds, across, rotations, gates)


def _check(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "transformers.AutoModelForCausalLM.from_pretrained(...) makes one of a name"
        )


def patch(model: torch.nn.Module, *, activations: bool = True) -> Report:
    """Lets fusednorm compute the steps between a model's matrix products, with the model's own rounding.

    Those are RMS norms, with gates or without, additions around them, the rotation of q and k, and the activation and
    product of an MLP. A module that computes something else, or rounds where no flag does, does not change. Calls with
    unexpected inputs or arguments run the module's own code. A second patch changes nothing.

    Args:
        model: any module, of Hugging Face's transformers or not.
        activations: whether also to replace activations of MLPs, whose exponential has other last bits than torch's.

    Returns:
        A report. The logger ``fusednorm.transformers`` gets it too: at level INFO, or at level WARNING if nothing of
        the model could be replaced.

    Raises:
        TypeError: the model is no module.
        Exception: whatever the model's own code raises; the model is then as it was.
    """
    _check(model)
    untouched = [module for module in model.modules() if not isinstance(module, Patched)]
    try:
        return _patch(model, activations)
    except BaseException:  # of the model's own code, for one
        for module in untouched:
            detach(module)
        raise


def _patch(model: torch.nn.Module, activations: bool) -> Report:
    before = _count(model)
    outcomes: Counter[tuple[str, bool, str]] = Counter()
    traced: dict[Any, list[_Known]] = {}
    done: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, Patched) or not _may_be_norm(module):
            continue
        alike = traced.setdefault(_key(module), [])
        known = next((one for one in alike if one[0].hold(module)), None)
        if known is None:
            alike.append(known := _forms_or_reason(module))
        reads, found = known
        class_name = type(module).__name__
        if isinstance(found, str):
            outcomes[class_name, False, found] += 1
            continue
        reason = attach(module, PatchedNorm, frozenset(), NormState(*found, reads))
        done["norms"] += reason is None
        outcomes[class_name, reason is None, reason or _describe(*found)] += 1
    for owner in list(model.modules()):
        for name, layers in owner.named_children():
            if isinstance(layers, torch.nn.ModuleList):
                for class_name, fused, handed, what, replaced in _patch_layers(owner, name, layers):
                    done.update(adds=fused, across=handed)
                    outcomes[class_name, replaced, what] += 1
    gates = patch_activations(model) if activations else ()
    for name, patched in (("rotations", patch_rotations(model, PatchedNorm)), ("gates", gates)):
        for class_name, replaced, what in patched:
            done[name] += replaced
            outcomes[class_name, replaced, what] += 1
    entries = tuple(Entry(name, count, replaced, what) for (name, replaced, what), count in outcomes.items())
    counts = (done["norms"], done["adds"], done["across"], done["rotations"], done["gates"])
    report = Report(*counts, entries, before)
    _logger.log(logging.INFO if report.any or before.any else logging.WARNING, "%s", report)
    return report


def unpatch(model: torch.nn.Module) -> Counts:
    """Restores all modules that :func:`patch` replaced.

    Returns:
        The numbers of restored parts. The logger ``fusednorm.transformers`` gets them too, at level INFO.

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
        detach(module)
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
    """A key that is equal for modules whose computations differ by what they read at most."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if x is None or is_lazy(x) else x.shape) for name, x in tensors)
    return type(module), shapes, tuple(module._modules)


def _forms_or_reason(module: torch.nn.Module) -> _Known:
    """The forms of a norm, without and with a gate."""
    reads = Reads()
    found: list[Forms] = []
    reasons = []
    several = len(inspect.signature(module.forward).parameters) > 1
    for gated in (False, True) if several else (False,):
        try:
            found.append(forms(module, gated, reads))
        except NotANormError as error:
            found.append({})
            reasons.append(str(error))
    if not any(found):
        return reads, reasons[0]
    return reads, (found[0], found[1] if several else {})


def _describe(without: Forms, gated: Forms) -> str:
    *_, form = (gated or without).values()
    described = [f"eps={form.eps}"]
    described += [f"weight_offset={form.weight_offset}"] if form.weight_offset else []
    described += ["round_norm=True"] if any(form.round_norm for form in (gated or without).values()) else []
    described += [f"activation={form.activation!r}"] if form.activation not in (None, "silu") else []
    described += [] if form.norm_before_gate else ["norm_before_gate=False"]
    described += [] if form.group_size is None else [f"group_size={form.group_size}"]
    return f"rms_norm{'_gated' * bool(gated)}({', '.join(described)})"


def _patch_layers(
    owner: torch.nn.Module, name: str, layers: torch.nn.ModuleList
) -> list[tuple[str, int, bool, str, bool]]:
    """Patches layers.

    Returns:
        For each layer with norms: its class; the number of its fused additions; whether the last of them is fused with
        the norm after the layer; what is fused, or the reason why nothing is; and whether something is.
    """
    straight, final = straight_on(type(owner), name)
    done: list[tuple[str, int, bool, str, bool]] = []
    for index, layer in enumerate(layers):
        if layer is None:
            continue
        norms = frozenset(child for child, module in layer.named_children() if isinstance(module, PatchedNorm))
        if isinstance(layer, Patched) or not norms:
            continue
        class_name = type(layer).__name__
        try:
            found = rewritten_layer(type(layer), norms)  # type: ignore[arg-type] # classes have a hash
        except NotRewrittenError as error:
            done.append((class_name, 0, False, str(error), False))
            continue
        following: Any = None
        next_layer = None
        if found.ends and straight:
            last = index + 1 == len(layers)
            next_layer = None if last else layers[index + 1]
            attribute = final if last else None if next_layer is None else first_norm(type(next_layer))
            following = None if attribute is None else getattr(owner if last else next_layer, attribute, None)
        handed = isinstance(following, PatchedNorm)
        reason: str | None = "no norm follows its additions for certain"
        if found.fused or handed:
            state = LayerState(following, next_layer) if handed else LayerState()
            reason = attach(layer, PatchedLayer, norms, state)
        if reason is not None:
            done.append((class_name, 0, False, reason, False))
            continue
        adds = found.additions(handed)
        what = f"additions fused: {adds - handed} within" + (", 1 with the norm after the layer" if handed else "")
        what += f"; {found.normed} with the norm before" if found.normed else ""
        done.append((class_name, adds, handed, what, True))
    return done
