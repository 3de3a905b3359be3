"""The attention of vLLM's decoders, on CPUs.

vLLM looks up the class of its attention in a registry, where the plug-in names one of its own
(``attention_backend.py``). There each layer gets an :class:`Attention`, which computes its calls.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusednorm.operations.attention import paged_attention
from fusednorm.vllm.log import say, warn_left

#: The parameters that vLLM hands to methods of its class, by their names; the plug-in's class takes the same.
_PARAMETERS = {
    "__init__": "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
    "attn_type kv_sharing_target_layer_name sinks",
    "forward": "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    "do_kv_cache_update": "layer key value kv_cache slot_mapping",
}
_FIELDS = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table", "causal", "dynamic_causal"}


class Attention(torch.nn.Module):
    """The attention of one of vLLM's layers; ``fusednorm.contract`` lists it, as the attention of the trainer's layer.

    Args:
        scale: what products of queries and keys are multiplied by.
        window: how far a query sees; None: as far as there are keys.
        softcap: the bound of scaled products; None: none.
        sinks: [Hq], or None.
    """

    _fusednorm_within = True

    def __init__(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
        super().__init__()
        self.flags: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        self._of_layer = (sinks,)  # which holds the parameter

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: Tensor,
        starts: Tensor,
        lengths: Tensor,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        return paged_attention(
            q, k, v, pages, starts, lengths, causal=causal, **self.flags, sinks=self._of_layer[0], out=out
        )

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("attention", self.flags | {"sinks": self._of_layer[0] is not None})]

    def _fusednorm_names(self, model: torch.nn.Module, place: str) -> list[str]:
        """The name of the module around vLLM's layer, which computes the step in the trainer's model."""
        return [place.rpartition(".")[0]]


def replace() -> None:
    """Has vLLM take the plug-in's class for its attention on CPUs."""
    unexpected = _unexpected()
    if unexpected:
        warn_left(f"vLLM's attention as it was: {unexpected}")
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.attention_backend.Backend")
    say(
        "attention of decoders is fusednorm.paged_attention, and keys are not packed; "
        "FUSEDNORM_VLLM=huggingface,own-attention has vLLM keep its own attention"
    )


def _unexpected() -> str:
    """The first difference between this vLLM's attention and that of the version tested; empty without a difference."""
    module = "vllm.v1.attention.backends.cpu_attn"
    try:
        from vllm.v1.attention.backends import cpu_attn, registry

        if registry.AttentionBackendEnum.CPU_ATTN.is_overridden():
            return "another plug-in replaces it"
        implementation = cpu_attn.CPUAttentionBackendImpl
        for name, expected in _PARAMETERS.items():
            found = [*inspect.signature(getattr(implementation, name)).parameters][1:]
            if found != expected.split():
                return f"expected {module}.CPUAttentionBackendImpl.{name} to take {expected}, got {' '.join(found)}"
        fields = {field.name for field in dataclasses.fields(cpu_attn.CPUAttentionMetadata)}
        if not fields >= _FIELDS:
            return f"expected {module}.CPUAttentionMetadata to have {', '.join(sorted(_FIELDS - fields))}"
        if cpu_attn.CPUAttentionBackend.forward_includes_kv_cache_update:
            return f"expected {module}.CPUAttentionBackend to write to the cache before attention is computed"
    except (ImportError, AttributeError, TypeError) as error:
        return f"{module} is not as in the version tested ({error})"
    return ""


def of_sequences(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, starts: Tensor, lengths: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Copies of the queries, keys and values of each sequence, [1, H, rows, D]."""
    for s, length in enumerate(lengths.tolist()):
        queries = q[starts[s] : starts[s + 1]].transpose(0, 1).unsqueeze(0)
        used = pages[s, : -(-length // k.shape[2])].long()
        keys, values = (t[used].transpose(0, 1).flatten(1, 2)[:, :length].unsqueeze(0) for t in (k, v))
        yield queries.clone(), keys, values
