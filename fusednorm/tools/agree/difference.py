"""The shares of equal bits of two runs of a model, step by step: the command ``fusednorm difference A B``."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fusednorm import transformers
from fusednorm.calls.bits import count_differing
from fusednorm.tools.agree import engine
from fusednorm.tools.agree.contract import contract
from fusednorm.tools.agree.share import Share
from fusednorm.tools.cli import UnusableError

#: A step's values by its name; several where it returns several, or is called several times.
Activations = Mapping[str, Tensor]


def shares(a: Activations, b: Activations) -> list[Share]:
    """Compares the activations of two runs step by step, in the order of the first."""
    found = []
    for name in [*a, *(name for name in b if name not in a)]:
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            found.append(Share(name, reason=f"only in {'A' if other is None else 'B'}"))
        elif one.shape != other.shape or one.dtype != other.dtype:
            found.append(Share(name, reason=f"A has {_described(one)}, B has {_described(other)}"))
        else:
            found.append(Share(name, one.numel(), one.numel() - count_differing(one, other.to(one.device))))
    return found


def in_all_layers(found: Iterable[Share]) -> list[Share]:
    """Adds up the same step of all layers: steps whose names differ in numbers alone. Those not compared stay."""
    sums: dict[str, Share] = {}
    for share in found:
        name = share.name if share.reason else re.sub(r"\b\d+\b", "*", share.name)
        before = sums.get(name)
        if before is None or share.reason:
            sums[name] = replace(share, name=name)
            continue
        alone = None if before.alone is None or share.alone is None else before.alone + share.alone
        sums[name] = Share(name, before.elements + share.elements, before.equal + share.equal, alone)
    return list(sums.values())


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        UnusableError: safetensors is not installed, or the file has another format.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise UnusableError(f"files need safetensors ({error}): pip install 'fusednorm[difference]'") from error
    try:
        found: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UnusableError(f"{file} is no safetensors file that can be read: {error}") from error
    return found


def load(folder: Path, prompt: str) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A causal model, in the dtype of its files, and its inputs for a prompt.

    Raises:
        UnusableError: transformers is not installed, or the folder holds no causal model with a tokenizer.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError as error:
        raise UnusableError(f"models need transformers ({error}): pip install 'fusednorm[transformers]'") from error
    try:
        tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)(prompt, return_tensors="pt")
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto").eval()
    except (OSError, ValueError, KeyError) as error:
        raise UnusableError(f"{folder} holds no causal model that can be loaded: {error}") from error
    return model, {"input_ids": tokens["input_ids"]}


@dataclass
class _Call:
    """A call of a module: what it was given, and the tensors that it returned."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Tensor]


@torch.no_grad()
def record(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, list[_Call]]:
    """The calls of each module without children, by its name, in the order of the first calls."""
    calls: dict[str, list[_Call]] = {}
    # A module may write to its arguments: they are copied before it runs.
    before: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def hooks(name: str, module: torch.nn.Module) -> list[RemovableHandle]:
        def pre(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            before.setdefault(name, []).append(copy.deepcopy((arguments, options)))

        def post(_: torch.nn.Module, arguments: Any, result: Any) -> None:
            given = before[name].pop()
            calls.setdefault(name, []).append(_Call(*given, _tensors(result)))

        return [module.register_forward_pre_hook(pre, with_kwargs=True), module.register_forward_hook(post)]

    handles = [
        handle
        for name, module in model.named_modules()
        if next(module.children(), None) is None
        for handle in hooks(name, module)
    ]
    try:
        model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _tensors(result: Any) -> list[Tensor]:
    """Copies of the tensors that a module returned, which later modules may write to."""
    several = result if isinstance(result, tuple | list) else (result,)
    return [tensor.detach().clone() for tensor in several if isinstance(tensor, Tensor)]


def _named(calls: Mapping[str, list[_Call]]) -> dict[str, Tensor]:
    """The results by the module's name; with the number of the result where there are several."""
    found: dict[str, Tensor] = {}
    for name, of_module in calls.items():
        results = [tensor for call in of_module for tensor in call.results]
        found |= {name if len(results) == 1 else f"{name}[{i}]": tensor for i, tensor in enumerate(results)}
    return found


@torch.no_grad()
def shares_of_models(a: torch.nn.Module, b: torch.nn.Module, inputs: Mapping[str, Tensor]) -> list[Share]:
    """Compares two models on the same inputs: in the whole run, and each step alone, from the first model's inputs.

    A step is a module without children. A difference passes on to the steps after it, so only the second number says
    which steps differ by themselves. The modules of both causal models of transformers have the same names.
    """
    calls_of_a = record(a, inputs)
    modules = dict(b.named_modules())
    repeated = {
        name: [_Call((), {}, _tensors(modules[name](*call.arguments, **call.options))) for call in calls]
        for name, calls in copy.deepcopy(calls_of_a).items()
        if name in modules
    }
    of_a = _named(calls_of_a)
    alone = {share.name: share.equal for share in shares(of_a, _named(repeated)) if not share.reason}
    return [replace(share, alone=alone.get(share.name)) for share in shares(of_a, _named(record(b, inputs)))]


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compares, prints, writes. Returns 1 if a bit differs, or if a step could not be compared.

    Raises:
        UnusableError: the arguments are not two files or two models, or they have no step.
    """
    a, b = arguments.a, arguments.b
    if str(b) == "vllm" and not b.exists():
        return _beside_the_engine(arguments, console)
    for path in (a, b):
        if not path.exists():
            raise UnusableError(f"{path} does not exist")
    if a.is_dir() != b.is_dir():
        raise UnusableError("A and B must be two files or two folders, not one of each")
    if a.is_dir():
        if not arguments.prompt:
            raise UnusableError("folders of models need --prompt TEXT, on which the models run")
        (model_a, inputs), (model_b, _) = load(a, arguments.prompt), load(b, arguments.prompt)
        for name, model in (("A", model_a), ("B", model_b)):
            if arguments.patch in (name, "both"):
                console.print(f"{name}: {transformers.patch(model)}", markup=False)
        found = shares_of_models(model_a, model_b, inputs)
    else:
        if arguments.prompt or arguments.patch:
            raise UnusableError("--prompt and --patch are for folders of models; leave them out with files")
        found = shares(read(a), read(b))
    if not found:
        raise UnusableError("there is nothing to compare: A and B have no tensors")
    return _reported(found, arguments, console)


def _reported(found: list[Share], arguments: argparse.Namespace, console: Console) -> int:
    """Prints and writes shares. Returns 1 if a bit differs, or if a step could not be compared."""
    show(found if arguments.all else in_all_layers(found), console)
    if arguments.json_file:
        Path(arguments.json_file).write_text(json.dumps([asdict(share) for share in found], indent=1), encoding="utf-8")
    return int(any(share.reason or share.equal < share.elements for share in found))


def _beside_the_engine(arguments: argparse.Namespace, console: Console) -> int:
    """Compares a folder's model, patched, with vLLM's engine of the same folder, under FUSEDNORM_VLLM as it is set.

    Raises:
        UnusableError: the arguments are not a folder of a model and a prompt, or no row could be compared.
    """
    if not arguments.a.is_dir() or not arguments.prompt or arguments.patch:
        raise UnusableError("beside vllm, A must be a model's folder, --prompt TEXT is needed, and --patch is not")
    trainer, inputs = load(arguments.a, arguments.prompt)
    dtype = next(trainer.parameters()).dtype
    with contextlib.redirect_stdout(sys.stderr):  # to which vLLM logs: the output is the comparison's alone
        calls, of_engine = engine.answered(arguments.a, inputs["input_ids"][0].tolist(), dtype)
    computed = {step.operation for step in of_engine.steps}
    transformers.patch(trainer, products="linear" in computed, attention="attention" in computed)
    of_trainer = contract(trainer)
    for side, digest in (("trainer", of_trainer.digest), ("engine", of_engine.digest)):
        console.print(f"{side}: sha256 {digest}", markup=False, soft_wrap=True)
    found, rows = engine.replayed(trainer, calls)
    if not rows:
        raise UnusableError(
            "no row was compared: fusednorm computes no step of this model in both, the trainer and vLLM"
        )
    status = _reported(found, arguments, console)
    console.print(f"the trainer computed {rows} rows again, from the engine's inputs", markup=False)
    first = next((share.name for share in found if share.reason or share.equal < share.elements), None)
    if first is not None:
        console.print(f"the first step that differs: {first}", markup=False, soft_wrap=True)
    return int(status or of_trainer.digest != of_engine.digest)


def show(found: Iterable[Share], console: Console) -> None:
    """Prints a line for each step."""
    found = list(found)
    alone = any(share.alone is not None for share in found)
    table = Table("step", box=box.SIMPLE_HEAD, show_edge=False)
    for title in ("elements", "equal bits", *(["from A's inputs"] if alone else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for share in found:
        if share.reason:
            table.add_row(escape(share.name), f"[yellow]{escape(share.reason)}[/]")
            continue
        of_step = [] if share.alone is None else [_percent(share.alone, share.elements)]
        table.add_row(escape(share.name), str(share.elements), _percent(share.equal, share.elements), *of_step)
    console.print(table)


def _percent(equal: int, elements: int) -> str:
    """Two decimals, rounded down: 100% means all."""
    if equal == elements:
        return "[green]100%[/]"
    return f"{10_000 * equal // elements / 100:.2f}%"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
