"""The classes by which vLLM calls :class:`fusednorm.vllm.attention.Attention`; vLLM imports this module by its name.

Keys and values lie in vLLM's cache as the model computed them: [page, head, key, D], the values after the keys.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention as Layer
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from fusednorm.vllm.attention import Attention
from fusednorm.vllm.log import say

#: The name of the module that computes a layer's calls, in the layer.
NAME = "fusednorm_attention"

say_once = cache(say)


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    """The backend that replaces vLLM's for CPUs. It keeps the name of that, because vLLM asks for it."""

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Builder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Describes each batch as vLLM's does. It knows the layers before a first batch comes, and gives them modules."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Layer, layer_names)
        for layer in layers.values():
            own = layer.impl
            if isinstance(own, Implementation) and own.reason is None:
                setattr(layer, NAME, Attention(own.scale, own.window, own.softcap, own.sinks))


class Implementation(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer: fusednorm's, or vLLM's where there is a reason."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.window: int | None = self.sliding_window if self.sliding_window > 0 else None
        self.softcap: float | None = self.logits_soft_cap or None
        self.reason = self._reason()
        if self.reason is not None:
            say_once(f"vLLM keeps its own attention of some layers: {self.reason}")

    def _reason(self) -> str | None:
        """Why vLLM computes this layer; None if fusednorm does."""
        if self.attn_type != AttentionType.DECODER:
            return f"they are of the kind {self.attn_type}, and fusednorm's are decoders"
        if self.alibi_slopes is not None:
            return "ALiBi adds to their scores"
        if self.is_fp8_kv_cache:
            return "their cache is fp8"
        return None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the keys and values of a batch to their places, which are less than 0 where there is none."""
        if self.reason is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        keys, values = _of_cache(kv_cache)
        slots = slot_mapping[: len(key)]
        if len(slots) and slots.min() < 0:
            there = slots >= 0
            slots, key, value = slots[there], key[: len(slots)][there], value[: len(slots)][there]
        page, place = slots // keys.shape[2], slots % keys.shape[2]
        keys[page, :, place], values[page, :, place] = key[: len(slots)], value[: len(slots)]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the batch's queries to the keys in the cache, written to ``output``."""
        quantized = output_scale is not None or output_block_scale is not None
        if self.reason is not None or attn_metadata is None or quantized:  # which vLLM refuses
            found: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return found
        keys, values = _of_cache(kv_cache)
        compute, batch = getattr(layer, NAME), attn_metadata
        for first, end, causal in _alike(batch):
            starts = batch.query_start_loc[first : end + 1]
            begin, after = (0, batch.num_actual_tokens) if batch.dynamic_causal is None else starts[[0, -1]].tolist()
            compute(
                query[begin:after],
                keys,
                values,
                batch.block_table[first:end],
                starts - begin,
                batch.seq_lens[first:end],
                causal,
                output[begin:after],
            )
        return output


def _of_cache(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values in a cache of [pages, heads, keys, 2 * D]."""
    pages, heads, number, _ = cache.shape
    keys, values = cache.view(pages, heads, 2 * number, -1).chunk(2, dim=2)
    return keys, values


def _alike(batch: Any) -> list[tuple[int, int, bool]]:
    """Ranges of sequences in a batch, and whether their queries see no keys after them."""
    if batch.dynamic_causal is None:
        return [(0, len(batch.seq_lens), bool(batch.causal))]
    each = [bool(causal) for causal in batch.dynamic_causal.tolist()]
    borders = [0, *(i for i in range(1, len(each)) if each[i] != each[i - 1]), len(each)]
    return [(first, end, each[first]) for first, end in pairwise(borders) if first < end]
