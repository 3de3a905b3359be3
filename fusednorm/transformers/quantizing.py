"""Linear layers of a model by :class:`fusednorm.Int8Linear`, and back.

A layer is replaced in its place. The weight of a head that is tied to the embedding stays in the embedding alone. A
model's configuration then says of its layers what compressed-tensors says, so that a saved one can be loaded.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusednorm.calls.c_enums import Limit
from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.operations.int8_module import Int8Linear, round_weight
from fusednorm.transformers.patching import Entry, check_model, in_lines
from fusednorm.transformers.products import reason as reason_of_product
from fusednorm.transformers.replacing import Patched, attach, detach, replaced

_logger = logging.getLogger("fusednorm.transformers")

#: The scheme of layers of :class:`fusednorm.Int8Linear`, in the words of compressed-tensors.
_OF_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_OF_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_GROUP = {"targets": ["Linear"], "weights": _OF_WEIGHTS, "input_activations": _OF_ROWS}
_FORMAT = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}

#: Hooks of a module, which a layer in its place would not call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, repr=False)
class Quantized:
    """The layers that :func:`quantize` replaced, and why it did not replace the rest. ``print`` shows it.

    Attributes:
        layers: number of linear layers in int8.
        bytes_before: of their weights, but for one that the embedding keeps.
        bytes_after: of their weights and scales.
        entries: by class.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        sizes = f"{self.layers} layers in int8: {after:.1f} MB in place of {before:.1f} MB of weights"
        return "\n".join([*in_lines(self.entries), sizes])

    __repr__ = __str__  # an interpreter shows a call's result by its repr


class QuantizedModel(Patched):
    """A model of transformers with layers in int8; comes before the original class. Its state is True."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Does so to a head in int8 too: rows that stay keep their bits."""
        own: Any = self
        head = own.get_output_embeddings()
        if not isinstance(head, Int8Linear):
            return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        own.set_output_embeddings(_as_linear(head, own.dtype))
        try:
            embedding = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
            resized = Int8Linear.from_linear(own.get_output_embeddings())
        except BaseException:
            own.set_output_embeddings(head)
            raise
        kept = min(head.out_features, resized.out_features)
        resized.weight[:kept], resized.weight_scale[:kept] = head.weight[:kept], head.weight_scale[:kept]
        own.set_output_embeddings(resized)
        return embedding


@dataclass(frozen=True)
class _Place:
    """A module, the modules that have it, and the name under which each does."""

    name: str
    module: torch.nn.Module
    owners: tuple[tuple[torch.nn.Module, str], ...]


def quantize(model: torch.nn.Module, *, skip: Collection[str] = (), keep_weights: bool = False) -> Quantized:
    """Replaces a model's linear layers, its head too, by :class:`fusednorm.Int8Linear`.

    A weight that is int8 already, of a checkpoint of compressed-tensors (``int-quantized``, a scale for each channel or
    one for all, rows quantized in each call), is taken as it is. Layers whose owner's code reads their weight, as to
    convert their input to its dtype, are left alone, as are layers with hooks. ``save_pretrained`` then writes a
    checkpoint of compressed-tensors; ``quantize`` takes it when it was loaded again.

    The model has no gradients through these layers. It may be patched before or afterwards.

    Args:
        model: any module, of Hugging Face's transformers or not.
        skip: names of layers to leave alone, or their ends: ``"lm_head"``, ``"mlp.gate"``.
        keep_weights: whether to keep the layers that were replaced, in memory, for :func:`unquantize`.

    Returns:
        A report. The logger ``fusednorm.transformers`` gets it too, at level INFO.

    Raises:
        TypeError: the model is no module.
        ValueError: a layer is in int8 already; adapters of PEFT are in the model; ``skip`` names no layer; a weight has
            numbers that are not finite; or no layer can be replaced. The model is then as it was.
    """
    check_model(model)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    places = list(_places(model))
    _check(model, [place.name for place in places], skip, keep_weights)
    having = _having_weights(model)
    reasons = {place.name: _reason(model, place, skip, having) for place in places}
    if any(reasons[place.name] and _is_compressed(place.module) for place in places):
        left = "layers of its checkpoint stay as compressed-tensors quantized them"
        reasons |= {place.name: left for place in places if not (reasons[place.name] or _is_compressed(place.module))}
    taken = [place for place in places if reasons[place.name] is None]
    if not taken:
        first: dict[str | None, str] = {}
        for name, reason in reasons.items():
            first.setdefault(reason, name)
        why = "; ".join(f"{name}: {reason}" for reason, name in first.items()) or "it has none"
        raise ValueError(f"model must have a linear layer that can be replaced, but {why}")
    made = [_made_of(place) for place in _with_progress(taken)]
    outcomes = Counter((type(place.module).__name__, reasons[place.name] or "Int8Linear") for place in places)
    shared = [len(having[id(place.module.weight)]) > 1 for place in taken]
    own = [place.module.weight for place, is_shared in zip(taken, shared, strict=True) if not is_shared]
    report = Quantized(
        layers=len(made),
        bytes_before=sum(map(_bytes, own)),  # type: ignore[arg-type]
        bytes_after=sum(_bytes(one.weight) + _bytes(one.weight_scale) for one in made),
        entries=tuple(Entry(name, count, what == "Int8Linear", what) for (name, what), count in outcomes.items()),
    )
    for place, one in zip(taken, made, strict=True):
        _put(place, one, keep_weights)
    left_alone = [place.name for place in places if reasons[place.name]]
    for name, top in _of_transformers(model):
        _configure(top, [one.removeprefix(name) for one in left_alone if one.startswith(name)], any(shared))
    _logger.info("%s", report)
    return report


def unquantize(model: torch.nn.Module) -> int:
    """Puts back the layers that :func:`quantize` replaced with ``keep_weights=True``.

    Returns:
        Their number.

    Raises:
        TypeError: the model is no module.
        ValueError: the layers were not kept, or there are none; nothing is put back.
    """
    check_model(model)
    places = [place for place in _places(model) if isinstance(place.module, Int8Linear)]
    lost = [place.name for place in places if "_fusednorm_before" not in place.module.__dict__]
    if lost or not places:
        what = f"{len(lost)} layers were not kept, as {lost[0]}" if lost else "it has no layer in int8"
        raise ValueError(
            f"model must have layers that quantize(model, keep_weights=True) replaced, but {what}; load the model again"
        )
    for place in places:
        before = place.module.__dict__["_fusednorm_before"].to(place.module.weight.device)
        for owner, name in place.owners:
            setattr(owner, name, before.train(place.module.training))
    for _, top in _of_transformers(model):
        for there, name, value in top.__dict__.pop("_fusednorm_undo", ()):
            if value is None:
                delattr(there, name)
            else:
                setattr(there, name, value)
        if isinstance(top, QuantizedModel):
            detach(top)
    _logger.info("put back: %s layers", len(places))
    return len(places)


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    """Linear layers, in int8 too, each once, with all modules that have it."""
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in model.modules():
        for name, child in owner._modules.items():
            if child is not None:
                owners.setdefault(id(child), []).append((owner, name))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Int8Linear) and id(module) in owners:
            yield _Place(name, module, tuple(owners[id(module)]))


def _named(name: str, skip: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in skip)


def _check(model: torch.nn.Module, names: list[str], skip: Collection[str], keep_weights: bool) -> None:
    count = sum(isinstance(module, Int8Linear) for module in model.modules())
    if count:
        raise ValueError(
            f"model must not be quantized already, got one with {count} layers of Int8Linear; "
            "fusednorm.transformers.unquantize(model) puts back layers that were kept"
        )
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            "model must have no adapters of PEFT, whose layers read the weights under them, got some; "
            "merge them first: model = model.merge_and_unload()"
        )
    for _, top in _of_transformers(model):
        method = _method_of(top)
        if method not in (None, "compressed-tensors"):
            raise ValueError(f"model must not be quantized by another library, got one of {method}; load its weights")
        if method and keep_weights:
            raise ValueError(
                "keep_weights must be False for a checkpoint of compressed-tensors, which has the same numbers; load "
                "it again in place of unquantize(model)"
            )
    for end in skip:
        if not any(_named(name, (end,)) for name in names):
            raise ValueError(
                f"skip must have names of linear layers, or their ends, got {end!r}; the model's first ones: "
                f"{', '.join(names[:3]) or 'none'}"
            )


def _method_of(model: Any) -> str | None:
    """The method by which a model was quantized, as its configuration calls it."""
    given = getattr(model.config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return None if method is None else str(_plain(method))


def _reason(
    model: torch.nn.Module, place: _Place, skip: Collection[str], having: dict[int, list[torch.nn.Module]]
) -> str | None:
    """Why a layer is left alone; None if it is not. ``having``: the modules that have a parameter, by its id."""
    module: Any = place.module
    if _named(place.name, skip):
        return "skip names it"
    if _is_compressed(module):
        return _reason_of_compressed(module)
    if why := _reason_of_weight(module):
        return why
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks"
    if replaced(module):
        return "something else has replaced its forward pass"
    others = [other for other in having[id(module.weight)] if other is not module]
    if len(others) > 1 or not all(isinstance(other, torch.nn.Embedding) for other in others):
        return f"its weight is that of {len(others)} other modules too"
    *path, name = place.name.split(".")
    for end in range(len(path) + 1):
        of_class: Any = type(model.get_submodule(".".join(path[:end])))
        if re.search(rf"\bself\.(\w+\.)*{re.escape(name)}\.(weight|bias)\b", _source(of_class)):
            return f"the code of {of_class.__name__} reads its weight"
    return None


def _having_weights(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """The modules that have a parameter, by its id."""
    found: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for one in module._parameters.values():
            found.setdefault(id(one), []).append(module)
    return found


def _reason_of_weight(module: Any) -> str | None:
    if why := reason_of_product(module):
        return why
    weight: Tensor = module.weight
    if is_traceable_wrapper_subclass(weight):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype not in NARROW_FLOATS:
        return f"its weight is {str(weight.dtype)[6:]}"
    if weight.is_meta:
        return "its weight is elsewhere (on the meta device)"
    if not 0 < weight.shape[1] <= Limit.INT8_LONGEST.value:
        return f"its rows have {weight.shape[1]} elements, which is not 1 to {Limit.INT8_LONGEST.value}"
    return None


def _is_compressed(module: Any) -> bool:
    """Whether compressed-tensors quantized a layer."""
    return getattr(module, "quantization_scheme", None) is not None


def _reason_of_compressed(module: Any) -> str | None:
    """Why a layer that compressed-tensors loaded is left alone; None if it is not."""
    scheme = module.quantization_scheme
    weights, rows = scheme.weights, scheme.input_activations
    alike = (
        weights is not None
        and rows is not None
        and all(_plain(getattr(weights, name)) == value for name, value in _OF_WEIGHTS.items() if name != "strategy")
        and _plain(weights.strategy) in ("channel", "tensor")
        and all(_plain(getattr(rows, name)) == value for name, value in _OF_ROWS.items())
    )
    if not alike or scheme.output_activations is not None:
        return "compressed-tensors quantized it in another way than weights by channel and rows in each call to int8"
    if getattr(module, "weight", None) is None or module.weight.dtype is not torch.int8:
        return "compressed-tensors has decompressed it; load the model again, and quantize it before its first call"
    return None


def _plain(value: Any) -> Any:
    """A value of an enumeration as a checkpoint has it."""
    return getattr(value, "value", value)


@functools.cache
def _source(of_class: type) -> str:
    of_class = vars(of_class)["_made_of"][0] if "_made_of" in vars(of_class) else of_class
    try:
        return inspect.getsource(of_class)
    except (OSError, TypeError):  # classes made by code, or in an interpreter
        return ""


def _with_progress(taken: list[_Place]) -> Iterator[_Place]:
    """The modules one by one; a bar shows if they take over two seconds, unless transformers' are turned off."""
    try:
        from transformers.utils.logging import tqdm
    except ModuleNotFoundError:
        return iter(taken)
    bar: Iterator[_Place] = tqdm(taken, desc="Quantizing", delay=2)
    return bar


def _made_of(place: _Place) -> Int8Linear:
    """The layer in the place of another one."""
    module: Any = place.module
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    if _is_compressed(module):
        scale = module.weight_scale.detach().to(torch.float32).reshape(-1, 1).expand(len(weight), 1).contiguous()
    else:
        try:
            weight, scale = round_weight(weight)
        except ValueError as error:
            raise ValueError(f"{place.name}: {error}; or leave it alone, with skip={place.name!r}") from None
    return Int8Linear.from_int8(weight, scale, bias).train(module.training)


def _put(place: _Place, made: Int8Linear, keep_weights: bool) -> None:
    before = place.module
    if isinstance(before, Patched):
        detach(before)
    if keep_weights:
        made.__dict__["_fusednorm_before"] = before  # not as a child, which a checkpoint would have
    for owner, name in place.owners:
        setattr(owner, name, made)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _as_linear(module: Int8Linear, dtype: torch.dtype) -> torch.nn.Linear:
    """A layer with the weight that int8 stands for."""
    with torch.device("meta"):
        made = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None)
    weight = (module.weight * module.weight_scale).to(dtype)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        made.bias = torch.nn.Parameter(module.bias.to(dtype), requires_grad=False)
    return made.train(module.training)


def _of_transformers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Models of transformers that are in no other one, with what their modules' names begin with here."""
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(before) for before, _ in found):
            continue
        if hasattr(module, "config") and hasattr(module, "resize_token_embeddings"):
            found.append((f"{name}." if name else "", module))
    return found


def _configure(model: Any, left_alone: list[str], tied: bool) -> None:
    """Lets a model's configuration say what is in int8, and that its head is no longer tied."""
    undo: list[tuple[Any, str, Any]] = []

    def change(there: Any, name: str, value: Any) -> None:
        undo.append((there, name, getattr(there, name, None)))
        setattr(there, name, value)

    compressed = any(map(_is_compressed, model.modules()))
    if not compressed:
        change(model.config, "quantization_config", _FORMAT | {"ignore": left_alone, "config_groups": {"int8": _GROUP}})
        if hook := model.__dict__.pop("ct_decompress_hook", None):  # by which compressed-tensors decompresses layers
            hook.remove()
    for module in model.modules() if tied else ():
        config: Any = getattr(module, "config", None)
        for one in (config, config.get_text_config()) if hasattr(config, "get_text_config") else ():
            if getattr(one, "tie_word_embeddings", False):
                change(one, "tie_word_embeddings", False)
        if getattr(module, "all_tied_weights_keys", None):
            change(module, "all_tied_weights_keys", {})
    model.__dict__["_fusednorm_undo"] = undo
    if not isinstance(model, Patched):
        attach(model, QuantizedModel, frozenset(), True, "")
