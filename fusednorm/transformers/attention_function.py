"""transformers' attention by :func:`fusednorm.attention`, under the name that its models call it by.

A model's attention modules look up a function by their configuration's ``_attn_implementation``, and its masks are
made by another function of that name. Ours makes every mask, also where it would say what ``is_causal`` says: without
one nothing tells whether queries are the first of the keys, as in an empty static cache, or the last.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.call import FLOATS
from fusednorm.operations.attention import attention
from fusednorm.transformers.layers import evaluated, source
from fusednorm.transformers.reads import LeftAloneError
from fusednorm.transformers.replacing import Outcome

#: The implementation's name.
NAME = "fusednorm"

#: Where an attention module keeps the name of the implementation before.
_BEFORE = "_fusednorm_attention_before"


def register_attention() -> None:
    """Makes ``attn_implementation="fusednorm"`` known to transformers: for ``from_pretrained``, for one.

    Raises:
        ImportError: transformers is not installed, or older than 4.53.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)


def make_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask that transformers makes for torch's attention, [B, 1, Q, L] of bool, but never none.

    Raises:
        ValueError: the model does not call functions by name, so that it would add the mask to its scores.
    """
    from transformers.masking_utils import sdpa_mask

    file = type(kwargs.get("config")).__module__.replace(".configuration_", ".modeling_")
    if file in sys.modules and not hasattr(sys.modules[file], "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f'attn_implementation must not be "{NAME}" for {type(kwargs["config"]).__name__}: this model computes '
            'attention by code of its own; take "eager"'
        )
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **{**kwargs, **skips})


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: of [B, H, Q, D] to [B, Q, H, D], and no weights.

    What :func:`fusednorm.attention` does not compute is left to the model's own attention, with a warning once.

    Raises:
        ValueError: no mask says which of the keys are seen, the model chooses keys in another way, or its own attention
            would have to compute a call and ignores a softcap or sinks.
    """
    if chosen := [name for name in ("indices", "block_indices") if kwargs.get(name) is not None]:
        raise ValueError(
            f'attn_implementation must not be "{NAME}" for {type(module).__name__}, which hands its attention '
            f'{chosen[0]} of the keys that queries see; take "eager"'
        )
    causal = attention_mask is None and _is_causal(module, is_causal) and query.shape[2] > 1
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"attention_mask must be given for {query.shape[2]} queries and {key.shape[2]} keys of a causal module, "
            "got None: nothing says which keys they see; pass one that is True where they do, [B, 1, Q, L]"
        )
    window = kwargs.get("sliding_window")
    if attention_mask is None and window is not None and key.shape[2] > window:
        raise ValueError(
            f"attention_mask must be given for {key.shape[2]} keys and a window of {window}, got None; pass one that "
            "is True for the keys that a query sees, [B, 1, Q, L]"
        )
    reason = _reason(query, key, value, attention_mask, dropout, kwargs)
    if reason is not None:
        for name, flag in (("softcap", softcap), ("s_aux", s_aux)):
            if flag is not None:
                kwargs[name] = flag
        return _of_model(module, reason, query, key, value, attention_mask, dropout, scaling, causal, kwargs)
    y = attention(
        query,
        key,
        value,
        scale=scaling,
        causal=causal,
        softcap=softcap,
        sinks=s_aux,
        mask=attention_mask,
    )
    return y.transpose(1, 2).contiguous(), None


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _reason(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why fusednorm does not compute a call; None if it does."""
    if dropout:
        return "dropout in training is random"
    if kwargs.get("position_bias") is not None:
        return "a position_bias is added to its scores"
    if kwargs.get("output_attentions"):
        return "output_attentions asks for its weights"
    if kwargs.get("head_mask") is not None:
        return "a head_mask weighs its heads"
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        return f"its mask is {str(mask.dtype)[6:]} with {mask.dim()} dimensions, and not bool with 4"
    if mask is not None and mask.shape[-1] != key.shape[2]:
        return f"its mask has {mask.shape[-1]} keys, and there are {key.shape[2]}"
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return "q, k and v have several dtypes"
    if query.dim() != 4 or query.shape[1] % key.shape[1]:
        return "the heads of keys do not divide those of queries"
    return None


def _of_model(
    module: torch.nn.Module,
    reason: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The attention that a patched module had before, if that was torch's, or else the model's eager attention.

    Torch's knows no softcap, sinks, biases and weights. Masks of eager attention are added to scores; a model that has
    none takes torch's.
    """
    name = type(module).__name__
    eager = _eager(module)
    known = inspect.signature(eager).parameters if eager else {}
    # The function of gpt-oss reads the sinks of the module.
    ignored = [flag for flag in ("softcap", "s_aux") if flag in kwargs and flag not in known]
    if [flag for flag in ignored if flag == "softcap" or eager is None or not hasattr(module, "sinks")]:
        raise ValueError(
            f"{name}: {reason}, and its own attention ignores {ignored[0]}; leave out what fusednorm does not compute"
        )
    warnings.warn(f"{name}: {reason}, so such calls are left to the model's own attention", stacklevel=3)
    if causal:
        places = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mask = places[None, None]
    beyond = ("softcap", "s_aux", "position_bias", "head_mask", "output_attentions")
    asked = any(kwargs.get(flag) is not None and kwargs[flag] is not False for flag in beyond)
    of_torch = module.__dict__.get(_BEFORE) == "sdpa" and not asked
    if eager is None or of_torch:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
        )
        return cast("tuple[Tensor, Tensor | None]", found)
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, least)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = eager(module, query, key, value, mask, dropout=dropout, scaling=scale, **kwargs)
    return cast("tuple[Tensor, Tensor | None]", found)


def _eager(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function of the module's own file."""
    for of_class in type(module).__mro__:
        file = sys.modules.get(of_class.__module__)
        if (found := getattr(file, "eager_attention_forward", None)) is not None:
            return cast("Callable[..., Any]", found)
    return None


def calls_attention(module: torch.nn.Module) -> bool:
    """Whether a module looks up its attention by its configuration."""
    return any("ALL_ATTENTION_FUNCTIONS" in _names(of_class) for of_class in type(module).__mro__)


def _names(of_class: type) -> tuple[str, ...]:
    forward = inspect.unwrap(vars(of_class).get("forward", _names))
    return getattr(getattr(forward, "__code__", None), "co_names", ())


#: Arguments of modules that attention functions take, or need not know.
_KNOWN = {"query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "softcap", "s_aux"}
_KNOWN |= {"sliding_window", "position_ids", "output_attentions", "head_mask", "deterministic"}
_KNOWN |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@functools.cache
def _forward_of(of_class: type) -> tuple[Any, ast.FunctionDef]:
    """A class's forward pass, and its syntax tree, which is not to be changed."""
    return source(cast(Any, of_class).forward)


@functools.cache
def _left_alone(of_class: type) -> str | None:
    """Why a class's attention is not fusednorm's, by the source of its forward pass; None if it is."""
    try:
        _, tree = _forward_of(of_class)
    except LeftAloneError as error:
        return str(error)
    for call in _calls(tree):
        words = _words(call)
        more = [name for name, value in words.items() if name not in _KNOWN and not _is_none(value)]
        if more:
            return f"it hands its attention {', '.join(sorted(more))}"
        mask = call.args[4] if len(call.args) > 4 else words.get("attention_mask")
        if isinstance(mask, ast.Name) and _is_computed(mask.id, tree):
            return f"it computes {mask.id} itself"
    return None


def _calls(tree: ast.AST) -> list[ast.Call]:
    """The calls of the function that a forward pass looks up."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface"]


def _words(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def attention_steps(module: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """For :func:`fusednorm.contract`: the attention of a module whose configuration names fusednorm's.

    Its flags are those that the forward pass says; those that only a call knows are the text of its source.
    """
    named = getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
    if not (named and calls_attention(module)) or _left_alone(of_class := _of_code(module)):
        return []
    function, tree = _forward_of(of_class)
    steps: list[tuple[str, dict[str, Any]]] = []
    for call in _calls(tree):
        words = {name: evaluated(ast.unparse(value), function, module) for name, value in _words(call).items()}
        causal = words.get("is_causal")
        flags = {
            "scale": words.get("scaling"),
            "causal": causal if isinstance(causal, str) else _is_causal(module, causal),
        }
        flags |= {"window": words.get("sliding_window"), "softcap": words.get("softcap")}
        step = "attention", flags | {"sinks": words.get("s_aux") is not None}
        steps += [] if step in steps else [step]
    return steps


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_computed(name: str, tree: ast.AST) -> bool:
    """Whether a name is given another value than a part of another name, or one of two."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name not in [target.id for target in targets if isinstance(target, ast.Name)]:
            continue
        if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Assign) and not _is_plain(node.value)):
            return True
    return False


def _is_plain(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_plain(value.body) and _is_plain(value.orelse)
    if isinstance(value, ast.Subscript):
        return _is_plain(value.value)
    return isinstance(value, ast.Name) or _is_none(value)


def _of_code(module: torch.nn.Module) -> type:
    """The model's own class whose forward pass looks up attention; a rewritten one comes before it."""
    return [of_class for of_class in type(module).__mro__ if "ALL_ATTENTION_FUNCTIONS" in _names(of_class)][-1]


def is_patched(module: torch.nn.Module) -> bool:
    """Whether :func:`patch_attention` has given a module fusednorm's attention."""
    return _BEFORE in module.__dict__


def patch_attention(model: torch.nn.Module) -> Iterator[Outcome]:
    """Gives the modules that look up their attention fusednorm's."""
    found = [module for module in model.modules() if calls_attention(module) and not is_patched(module)]
    if found:
        register_attention()
    # One configuration names the attention of all its modules.
    alone = {id(getattr(module, "config", None)) for module in found if _left_alone(_of_code(module))}
    for module in found:
        reason = _left_alone(_of_code(module))
        if reason is None and id(getattr(module, "config", None)) in alone:
            reason = "other attention of its configuration is left alone"
        if reason is not None:
            yield type(module).__name__, False, reason
            continue
        config: Any = getattr(module, "config", None)
        before = getattr(config, "_attn_implementation", None)
        if before is None:
            yield type(module).__name__, False, "its configuration names no attention"
        else:
            module.__dict__[_BEFORE] = before
            yield type(module).__name__, True, "attention"
    for module in found:
        if is_patched(module):
            cast(Any, module.config)._attn_implementation = NAME


def unpatch_attention(model: torch.nn.Module) -> None:
    """Gives modules the attention back that they had before, but where the user has chosen another one since."""
    for module in model.modules():
        if is_patched(module):
            before, config = module.__dict__.pop(_BEFORE), cast(Any, module.config)
            if config._attn_implementation == NAME:
                config._attn_implementation = before
