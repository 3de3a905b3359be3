"""The products of vLLM's unquantized linear layers and of its head, on CPUs.

vLLM packs an unquantized weight for one processor after it is loaded, removes it, and keeps a function that multiplies
by it at the layer, as ``cpu_linear``. With the plug-in the weight stays as it lies, and the function is a module here.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.operations.linear import linear
from fusednorm.vllm.log import say, warn_left

#: vLLM's methods of layers without quantization. Each has ``process_weights_after_loading`` and ``apply``.
_METHODS = {
    "UnquantizedLinearMethod": "vllm.model_executor.layers.linear",
    "UnquantizedEmbeddingMethod": "vllm.model_executor.layers.vocab_parallel_embedding",
}


class Product(torch.nn.Module):
    """Stands for the function by which one of vLLM's layers multiplies; for ``fusednorm.contract`` it is a module."""

    _fusednorm_within = True

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self._layer = weakref.ref(layer)  # a reference would make the layer a module within itself

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    @property
    def weight(self) -> Any:
        """The layer's weight."""
        layer: Any = self._layer()
        return layer.weight

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: none where processes add up the sums of a part of each row."""
        layer: Any = self._layer()
        whole = getattr(layer, "input_size_per_partition", layer.input_size) == layer.input_size
        return [("linear", {})] if whole else []

    def _fusednorm_names(self, model: torch.nn.Module, place: str) -> list[str]:
        """The names that the step has in the trainer's model: of all layers that vLLM's layer joins.

        An embedding is the head, and a step, in a model without a head of its own.
        """
        from vllm.model_executor.layers import logits_processor, vocab_parallel_embedding

        head, embedding = vocab_parallel_embedding.ParallelLMHead, vocab_parallel_embedding.VocabParallelEmbedding
        layer = self._layer()
        if isinstance(layer, embedding) and not isinstance(layer, head):
            others = list(model.modules())
            with_logits = any(isinstance(one, logits_processor.LogitsProcessor) for one in others)
            return ["lm_head"] if with_logits and not any(isinstance(one, head) for one in others) else []
        *around, last = place.split(".")
        joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        return [".".join((*around, part)) for part in joined.get(last, [last])]


def replace() -> None:
    """Has vLLM's methods without quantization keep their weights, and multiply by :class:`Product`."""
    unexpected = _unexpected()
    if unexpected:
        warn_left(f"vLLM's products as they were: {unexpected}")
        return
    say_once = cache(say)
    for name, module in _METHODS.items():
        method = getattr(importlib.import_module(module), name)
        method.process_weights_after_loading = _processing(method.process_weights_after_loading, say_once)
    say(
        "unquantized linear layers and the head take fusednorm.linear, and their weights are not packed; "
        "FUSEDNORM_VLLM=huggingface,own-products has vLLM keep its own products"
    )


def _processing(theirs: Callable[[Any, Any], None], say: Callable[[str], None]) -> Callable[[Any, Any], None]:
    """Replaces a method's ``process_weights_after_loading``; vLLM also calls it after weights are loaded again."""

    @wraps(theirs)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if _takes(layer, say):
            layer.cpu_linear = Product(layer)
        else:
            theirs(self, layer)

    return process_weights_after_loading


def _takes(layer: Any, say: Callable[[str], None]) -> bool:
    """Whether a layer's product is ours. The weights of convolutions and of experts lie in more than two dimensions."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    weight = layer.weight
    config = get_current_vllm_config_or_none()
    if config is not None and config.lora_config is not None:
        say("vLLM keeps its own products of all layers, because LoRA adds to them")
        return False
    if config is not None and config.quant_config is not None:
        say("quantized layers keep vLLM's products; those without quantization take fusednorm.linear")
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):  # MLA reads this weight, and seldom multiplies by it
        return False
    of_model = getattr(config, "model_config", None)
    if isinstance(layer, VocabParallelEmbedding) and of_model is not None and of_model.head_dtype != weight.dtype:
        say("the head keeps vLLM's product, because vLLM converts its weight (head_dtype)")
        return False
    return weight.dim() == 2 and weight.dtype in NARROW_FLOATS and weight.device.type == "cpu"


def _unexpected() -> str:
    """The first difference between this vLLM's methods and those of the version tested; empty without a difference."""
    x, weight, bias = torch.ones(1, 2), torch.nn.Parameter(torch.ones(3, 2), requires_grad=False), torch.ones(3)
    layer: Any = torch.nn.Module()
    layer.weight, layer.cpu_linear = weight, lambda *operands: operands
    for name, module in _METHODS.items():
        try:
            method = getattr(importlib.import_module(module), name)
            method.process_weights_after_loading  # noqa: B018 - it must be there
            handed = method().apply(layer, x, bias)
        except (ImportError, AttributeError, TypeError) as error:
            return f"{module}.{name} is not as in the version tested ({error})"
        if not (isinstance(handed, tuple) and [id(one) for one in handed] == [id(one) for one in (x, weight, bias)]):
            return f"{module}.{name} does not multiply by the layer's cpu_linear"
    return ""
