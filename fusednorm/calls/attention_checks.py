"""Queries, keys, values and what goes with them: what they must be for attention (docs/spec.md, section 15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import (
    check_cap,
    check_dense,
    check_device,
    check_flag,
    check_floats,
    check_memory,
    check_operands,
    refuse_type,
)
from fusednorm.calls.scalars import number, whole

#: The names of dimensions, in errors.
_OF_ATTENTION = {"q": "[B, Hq, Q, D]", "k": "[B, Hkv, L, D]", "v": "[B, Hkv, L, Dv]"}
_OF_PAGES = {"q": "[T, Hq, D]", "k": "[P, Hkv, N, D]", "v": "[P, Hkv, N, Dv]"}


def check_attention(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Mapping[str, Any]:
    """Checks all of a call but its output; returns the flags, numbers rounded to the accumulator type."""
    q, k, mask = operands["q"], operands["k"], operands["mask"]
    _check_heads(operands, _OF_ATTENTION, in_memory)
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k must have q's batch of {q.shape[0]}, got shape {list(k.shape)}; expand it, for instance "
            f"k.expand({q.shape[0]}, -1, -1, -1)"
        )
    if mask is not None:
        _check_mask(mask, [*q.shape[:3], k.shape[2]], q, in_memory)
    return check_attention_flags(operands, flags)


def check_paged_attention(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Mapping[str, Any]:
    """Checks a call whose keys lie in pages; the values of pages, starts and lengths are not looked at."""
    q, k, lengths = operands["q"], operands["k"], operands["lengths"]
    _check_heads(operands, _OF_PAGES, in_memory)
    if k.shape[2] == 0:
        raise ValueError(f"k must be [P, Hkv, N, D] with pages of at least one key, got shape {list(k.shape)}")
    for name, dimensions in (("pages", 2), ("starts", 1), ("lengths", 1)):
        tensor = operands[name]
        if not isinstance(tensor, Tensor):
            refuse_type(name, tensor)
        check_dense(name, tensor)
        check_device(name, tensor, q, "q")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {str(tensor.dtype)[6:]}; convert it")
        if tensor.dim() != dimensions:
            form = {"pages": "[S, M]", "starts": "[S + 1]", "lengths": "[S]"}[name]
            raise ValueError(f"{name} must be {form} for S sequences, got shape {list(tensor.shape)}")
        if in_memory:
            check_memory(name, tensor)
    sequences = lengths.shape[0]
    for name, size in (("pages", sequences), ("starts", sequences + 1)):
        if operands[name].shape[0] != size:
            what = "a row for each sequence" if name == "pages" else "where each sequence begins, and the end"
            raise ValueError(
                f"{name} must have {size} elements in its first dimension, {what}, for lengths of shape "
                f"{list(lengths.shape)}, got shape {list(operands[name].shape)}"
            )
    return check_attention_flags(operands, flags)


def _check_heads(operands: Mapping[str, Any], forms: Mapping[str, str], in_memory: bool) -> None:
    """Queries, keys, values and sinks, which fit each other."""
    q, k, v, sinks = (operands[name] for name in ("q", "k", "v", "sinks"))
    for name, form in forms.items():
        tensor = operands[name]
        if name == "q":
            check_operands(q, None, None, None, None, in_memory=in_memory, x_name="q")
        else:
            check_floats(name, tensor, q, "q")
            if tensor.dtype != q.dtype:
                raise TypeError(
                    f"{name} must have q's dtype {str(q.dtype)[6:]}, got {str(tensor.dtype)[6:]}; convert one of both"
                )
            if in_memory:
                check_memory(name, tensor)
        if tensor.dim() != form.count(",") + 1:
            raise ValueError(f"{name} must be {form}, got shape {list(tensor.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k must have q's head size {q.shape[-1]} as its last dimension, got shape {list(k.shape)}; pass the keys "
            "of these queries"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have k's shape {list(k.shape)} but for the last dimension, a row for each key, got {list(v.shape)}"
        )
    heads, of_keys = q.shape[1], k.shape[1]
    if of_keys == 0 or heads % of_keys:
        raise ValueError(
            f"k must have a number of heads that divides q's {heads}, got {of_keys}; each head of k and v serves "
            "equally many neighbouring heads of q"
        )
    if sinks is not None:
        check_floats("sinks", sinks, q, "q")
        if list(sinks.shape) != [heads]:
            raise ValueError(f"sinks must have shape [{heads}], a number for each head of q, got {list(sinks.shape)}")
        if in_memory:
            check_memory("sinks", sinks)


def _check_mask(mask: Any, shape: Sequence[int], q: Tensor, in_memory: bool) -> None:
    if not isinstance(mask, Tensor):
        refuse_type("mask", mask)
    check_dense("mask", mask)
    check_device("mask", mask, q, "q")
    if mask.dtype != torch.bool:
        cure = "of a mask that is added, pass mask == 0" if mask.dtype.is_floating_point else "convert it"
        raise TypeError(f"mask must be bool, True where a query sees a key, got {str(mask.dtype)[6:]}; {cure}")
    sizes = [*zip(reversed(mask.shape), reversed(shape), strict=False)]
    if mask.dim() > 4 or any(size != wanted and size != 1 for size, wanted in sizes):
        raise ValueError(
            f"mask must have a shape that expands to {list(shape)}, a value for each query and key, got "
            f"{list(mask.shape)}"
        )
    if in_memory:
        check_memory("mask", mask)


def check_attention_flags(operands: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flags, numbers rounded to the accumulator type."""
    q = operands["q"]
    wide = accumulator(q.dtype)
    scale, window, softcap = flags["scale"], flags["window"], flags["softcap"]
    check_flag("causal", flags["causal"])
    if window is not None:
        window = whole("window", window)
        if not isinstance(window, torch.SymInt) and window < 1:
            raise ValueError(f"window must be at least 1, the query's own key, got {window}; leave it out for none")
    if softcap is not None:
        check_cap(softcap, q, "softcap", "leave it out for none")
        softcap = number("softcap", softcap, wide)
    if scale is not None:
        scale = number("scale", scale, wide)
    return {**flags, "scale": scale, "window": window, "softcap": softcap}


def check_pages(q: Tensor, k: Tensor, pages: Tensor, starts: Tensor, lengths: Tensor, **others: Any) -> None:
    """Checks that pages, starts and lengths in a CPU's memory fit; a GPU would have to be waited for."""
    if q.device.type != "cpu" or not lengths.numel():
        return
    least, greatest, most = int(starts.min()), int(starts.max()), pages.shape[1] * k.shape[2]
    if least < 0 or greatest > len(q) or bool((starts.diff() < 0).any()):
        raise ValueError(
            f"starts must not descend and lie between 0 and {len(q)}, the rows of q, got {starts.tolist()[:8]}; they "
            "are the sums of the numbers of queries before each sequence"
        )
    shortest, longest = (int(length) for length in lengths.aminmax())
    if shortest < 0 or longest > most:
        raise ValueError(
            f"lengths must be 0 to {most}, the keys of {pages.shape[1]} pages of {k.shape[2]}, got {shortest} to "
            f"{longest}; give each sequence a row of pages that holds its keys"
        )
    used = torch.arange(pages.shape[1], device=pages.device) * k.shape[2] < lengths.unsqueeze(-1)
    outside = used & ((pages < 0) | (pages >= len(k)))
    if outside.any():
        raise ValueError(
            f"pages must be 0 to {len(k) - 1}, the pages of k, as far as a sequence has keys, got "
            f"{int(pages[outside][0])}"
        )
