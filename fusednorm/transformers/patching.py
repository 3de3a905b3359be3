"""Replaces modules of a model, and restores them (``replacing.py`` does so for one module)."""

from __future__ import annotations

import inspect
import logging
import operator
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fusednorm.transformers.activations import PatchedActivations, patch_activations
from fusednorm.transformers.attention import PatchedAttention, patch_rotations
from fusednorm.transformers.attention_function import is_patched, patch_attention, unpatch_attention
from fusednorm.transformers.modules import NormState, PatchedLayer, PatchedNorm, rewritten_layer
from fusednorm.transformers.norms import Forms, forms
from fusednorm.transformers.products import PatchedProduct, patch_products
from fusednorm.transformers.reads import LeftAloneError, Reads
from fusednorm.transformers.replacing import Outcome, Patched, attach, detach
from fusednorm.transformers.tables import ExactTables, patch_tables

_logger = logging.getLogger("fusednorm.transformers")

#: The attributes that a module read in its trace, and its forms, without and with a gate, or why it has none.
_Known = tuple[Reads, tuple[Forms, Forms] | str]


@dataclass(frozen=True)
class Entry:
    """Modules of one class that were treated alike: their number, and the replacement, or the reason why not."""

    class_name: str
    count: int
    replaced: bool
    what: str


def in_lines(entries: tuple[Entry, ...]) -> list[str]:
    """A line for each entry of a report."""
    width = max((len(entry.class_name) for entry in entries), default=0)
    return [
        f"{entry.class_name:{width}} {entry.count:4}  {'' if entry.replaced else 'left alone: '}{entry.what}"
        for entry in entries
    ]


@dataclass(frozen=True)
class Counts:
    """The patched parts of a model.

    Attributes:
        norms: number of norms that fusednorm computes.
        adds: number of additions that are fused with a norm of the same module, in the branch of an if with fewer.
        rotations: number of attention modules whose q and k are rotated, and normalised if they are, in one call.
        gates: number of MLPs and experts whose activation and product are one call, and of activations that are one.
        products: number of linear layers that fusednorm computes.
        tables: number of modules that make tables of rotations with the same bits on every processor.
        attentions: number of attention modules whose queries meet their keys in :func:`fusednorm.attention`.
    """

    norms: int
    adds: int
    rotations: int
    gates: int
    products: int = field(default=0, kw_only=True)
    tables: int = field(default=0, kw_only=True)
    attentions: int = field(default=0, kw_only=True)

    @property
    def any(self) -> bool:
        """Whether anything is patched."""
        return any(getattr(self, name) for name in Counts.__dataclass_fields__)

    @property
    def _more(self) -> list[str]:
        """The numbers of products, tables and attentions, which are patched only where that is asked for."""
        more = [f"{self.products} products", f"{self.tables} tables"] if self.products + self.tables else []
        return [*more, *[f"{self.attentions} attentions"] * (self.attentions > 0)]

    def __str__(self) -> str:
        more = "".join(f", {one}" for one in self._more)
        return f"{self.norms} norms, {self.adds} additions, {self.rotations} rotations, {self.gates} gates{more}"


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
        lines = in_lines(self.entries)
        if self.before.any:
            lines.append(f"already patched: {self.before}")
        if self.any:
            undo = "fusednorm.transformers.unpatch(model) undoes it"
            fused = f"{self.adds} additions, {self.rotations} rotations and {self.gates} gates fused"
            *first, last = self._more or [""]
            more = f", {' and '.join(filter(None, [', '.join(first), last]))} replaced" if last else ""
            lines.append(f"{self.norms} norms replaced, {fused}{more}; {undo}")
        elif not self.before.any:
            lines.append("nothing in this model that fusednorm could replace: nothing was changed")
        return "\n".join(lines)

    __repr__ = __str__  # an interpreter shows a call's result by its repr


def _count(model: torch.nn.Module) -> Counts:
    """Counts the patched parts of a model."""
    patched = [module for module in model.modules() if "_fusednorm" in module.__dict__]
    norms, rotations, gates, products, tables = (
        sum(isinstance(module, kind) for module in patched)
        for kind in (PatchedNorm, PatchedAttention, PatchedActivations, PatchedProduct, ExactTables)
    )
    adds = sum(len(module.rewritten.factors) for module in patched if isinstance(module, PatchedLayer))
    attentions = sum(map(is_patched, model.modules()))
    return Counts(norms, adds, rotations, gates, products=products, tables=tables, attentions=attentions)


def check_model(model: object) -> None:
    """Raises TypeError unless a model is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "transformers.AutoModelForCausalLM.from_pretrained(...) makes one of a name"
        )


#: Kinds of steps that :func:`patch` replaces.
_STEPS = ("norms", "additions", "rotations", "gates")


def patch(
    model: torch.nn.Module,
    *,
    activations: bool = True,
    steps: Collection[str] | None = None,
    products: bool = False,
    attention: bool = False,
) -> Report:
    """Lets fusednorm compute the steps between a model's matrix products, with the model's own rounding.

    Those are RMS norms, with gates or without, LayerNorms, additions around them, the rotation of q and k, and the
    activation and product of an MLP or of experts. A module that computes something else, or rounds where no flag does,
    does not change. Calls with unexpected inputs or arguments run the module's own code. A second patch changes
    nothing.

    Args:
        model: any module, of Hugging Face's transformers or not.
        activations: whether also to replace activations of MLPs, whose exponential has other last bits than torch's.
        steps: the kinds of steps to replace, of "norms", "additions" (with the norms around them), "rotations" and
            "gates"; None: all that this version knows, which may be more in the next one.
        products: whether also to replace linear layers, whose sums then have one order on every processor and in every
            batch, and the tables of rotations.
        attention: whether attention modules of transformers also take :func:`fusednorm.attention`, as
            ``attn_implementation="fusednorm"`` says: a token's result depends on the tokens that it sees alone.

    Returns:
        A report. The logger ``fusednorm.transformers`` gets it too: at level INFO, or at level WARNING if nothing of
        the model could be replaced.

    Raises:
        TypeError: the model is no module.
        ValueError: ``steps`` has another value.
        Exception: whatever the model's own code raises; the model is then as it was.
    """
    check_model(model)
    kinds = set(_STEPS if steps is None else [steps] if isinstance(steps, str) else steps)
    if not kinds <= set(_STEPS):
        raise ValueError(f"steps must be some of {', '.join(_STEPS)}, got {', '.join(sorted(kinds - set(_STEPS)))}")
    if not activations:
        kinds.discard("gates")
    untouched = [module for module in model.modules() if not isinstance(module, Patched)]
    before = any(map(is_patched, model.modules()))
    try:
        return _patch(model, kinds, products, attention)
    except BaseException:  # of the model's own code, for one
        for module in untouched:
            detach(module)
        if attention and not before:
            unpatch_attention(model)
        raise


def _patch(model: torch.nn.Module, kinds: set[str], products: bool, attention: bool) -> Report:
    before = _count(model)
    outcomes: Counter[Outcome] = Counter()
    if "norms" in kinds:
        outcomes.update(_patch_norms(model))
    if "additions" in kinds:
        outcomes.update(_patch_layers(model))
    if "rotations" in kinds:
        outcomes.update(patch_rotations(model, PatchedNorm, "gates" in kinds))
    if "gates" in kinds:
        outcomes.update(patch_activations(model))
    if products:
        outcomes.update(patch_products(model))
        outcomes.update(patch_tables(model))
    if attention:
        outcomes.update(patch_attention(model))
    entries = tuple(Entry(name, count, replaced, what) for (name, replaced, what), count in outcomes.items())
    replaced = map(operator.sub, astuple(_count(model)), astuple(before))
    numbers: dict[str, Any] = dict(zip(Counts.__dataclass_fields__, replaced, strict=True))
    report = Report(entries=entries, before=before, **numbers)
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
    check_model(model)
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
    unpatch_attention(model)
    _logger.info("put back: %s", undone)
    return undone


def _may_be_norm(module: torch.nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    if any(is_lazy(one) for one in parameters.values()):
        return False  # it has no shape yet
    return "norm" in type(module).__name__.lower() or (
        list(parameters) in (["weight"], ["weight", "bias"]) and all(one.dim() == 1 for one in parameters.values())
    )


def _key(module: torch.nn.Module) -> Any:
    """A key that is equal for modules whose computations differ by what they read at most."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = tuple((name, None if x is None or is_lazy(x) else x.shape) for name, x in tensors)
    return type(module), shapes, tuple(module._modules)


def _patch_norms(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces norms. Modules of one class that read the same numbers are traced once."""
    traced: dict[Any, list[_Known]] = {}
    for module in model.modules():
        if isinstance(module, Patched) or not _may_be_norm(module):
            continue
        alike = traced.setdefault(_key(module), [])
        known = next((one for one in alike if one[0].hold(module)), None)
        if known is None:
            alike.append(known := _forms_or_reason(module))
        reads, found = known
        if isinstance(found, str):
            yield type(module).__name__, False, found
        else:
            yield attach(module, PatchedNorm, frozenset(), NormState(*found, reads.of(module)), _describe(*found))


def _forms_or_reason(module: torch.nn.Module) -> _Known:
    """The forms of a norm, without and with a gate."""
    reads, found, reasons = Reads(), [Forms(), Forms()], []
    several = len(inspect.signature(module.forward).parameters) > 1
    for gated in (False, True) if several else (False,):
        try:
            found[gated] = forms(module, reads, gated)
        except LeftAloneError as error:
            reasons.append(str(error))
    return reads, (found[0], found[1]) if any(found) else reasons[0]


def _describe(without: Forms, gated: Forms) -> str:
    *_, form = (gated or without).values()
    described = [f"eps={form.eps}"]
    described += [f"weight_offset={form.weight_offset}"] if form.weight_offset else []
    described += ["round_norm=True"] if any(form.round_norm for form in (gated or without).values()) else []
    described += [f"activation={form.activation!r}"] if form.activation not in (None, "silu") else []
    described += [] if form.norm_before_gate else ["norm_before_gate=False"]
    described += [] if form.group_size is None else [f"group_size={form.group_size}"]
    added = {form.added for form in without.values() if form.added}
    described += [f"weight plus {number} in its dtype" for number in added]
    name = "layer_norm" if form.center else "rms_norm" + "_gated" * bool(gated)
    return f"{name}({', '.join(described)})"


def _patch_layers(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces modules that add to a row which a norm of theirs takes, or to one that it returns."""
    for module in list(model.modules()):
        norms = _norms_of(module)
        if isinstance(module, Patched) or not norms:
            continue
        try:
            found = rewritten_layer(type(module), norms)  # type: ignore[arg-type] # classes have a hash
        except LeftAloneError:  # most modules add nothing to what they normalise
            continue
        what = f"additions fused: {len(found.factors) or 'in one branch'}"
        what += f"; {found.normed} with the norm before" if found.normed else ""
        yield attach(module, PatchedLayer, norms, True, what)


def _norms_of(module: torch.nn.Module) -> frozenset[str]:
    """The names of a module's norms that were replaced."""
    return frozenset(name for name, child in module.named_children() if isinstance(child, PatchedNorm))
