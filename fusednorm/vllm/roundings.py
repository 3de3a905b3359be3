"""The table of where the steps of a model round: a row for each kind of step, with the flags of each contract.

``vllm`` is vLLM's own code, ``default`` fusednorm's functions without flags, and ``huggingface`` Llama and most
families of transformers. Where another family rounds is read from a patched model of that family without contents.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from fusednorm.vllm.log import say, warn

#: The flags of each kind of step.
Roundings = Mapping[str, Mapping[str, Any]]

#: The contracts, in the sequence of the columns below.
VLLM, DEFAULT, HUGGINGFACE = CONTRACTS = ("vllm", "default", "huggingface")

#: For each kind of step: its flags, and their values in each contract.
_TABLE: dict[str, dict[str, tuple[Any, Any, Any]]] = {
    "norm": {"round_sum": (False, True, True), "round_norm": (True, False, True)},
    "norm with an offset": {"round_sum": (False, True, True), "round_norm": (False, False, False)},
    "norm, then gate": {"between": (torch.float32, None, None), "round_norm": (False, False, True)},
    "gate, then norm": {"round_norm": (True, False, True)},
    "rotation": {"round_products": (False, False, True)},
    "rotation in steps": {"round_products": (True, False, True)},
    "gate in steps": {"round_steps": (True, False, True)},
}

#: The roundings of a family, by the text of a model's configuration.
_FAMILIES: dict[str, Roundings] = {}


def of(contract: str) -> Roundings:
    """A contract's column of the table."""
    column = CONTRACTS.index(contract)
    return {kind: {flag: values[column] for flag, values in row.items()} for kind, row in _TABLE.items()}


def kind_of(operation: str, flags: Mapping[str, Any]) -> str | None:
    """The row of the table that has the roundings of such a step; None where all contracts round alike."""
    match operation:
        case "rms_norm":
            return "norm with an offset" if flags.get("weight_offset") else "norm"
        case "rms_norm_gated":
            return "norm, then gate" if flags.get("norm_before_gate", True) else "gate, then norm"
        case "rotate":
            return "rotation"
        case "silu_and_mul" if flags.get("alpha", 1.0) != 1.0:
            return "gate in steps"
    return None


def of_model(contract: str, vllm_config: Any) -> Roundings:
    """A contract's roundings for the model that vLLM serves; ``huggingface`` has those of the model's family."""
    model_config = getattr(vllm_config, "model_config", None)
    if contract != HUGGINGFACE or model_config is None:
        return of(contract)
    config = model_config.hf_text_config
    text = config.to_json_string()
    if text not in _FAMILIES:
        _FAMILIES[text] = _of_family(config)
    return _FAMILIES[text]


def _of_family(config: Any) -> Roundings:
    """Llama's roundings, but for those that a model of transformers with this configuration has elsewhere."""
    from transformers import AutoModelForCausalLM

    from fusednorm.transformers import patch

    roundings = of(HUGGINGFACE)
    found: dict[str, list[Mapping[str, Any]]] = {}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
        patch(model)
    except Exception as error:  # code of the model's family
        family = getattr(config, "model_type", "this model")
        warn(f"{family} rounds as Llama, because it cannot be traced: {error}")
        return roundings
    for module in model.modules():
        described = getattr(module, "_fusednorm_steps", None)
        for operation, flags in described(torch.bfloat16) if described else ():
            kind = kind_of(operation, flags)
            if kind is not None:
                row = {flag: flags.get(flag, usual) for flag, usual in of(DEFAULT)[kind].items()}
                found.setdefault(kind, []).append(row)
    for kind, rows in found.items():
        if all(row == rows[0] for row in rows):
            roundings = {**roundings, kind: rows[0]}
        else:
            warn(
                f"{type(model).__name__} has steps of the kind '{kind}' that round at other places than others of that "
                "kind; all round as Llama's here"
            )
    roundings = {**roundings, "rotation in steps": roundings["rotation"]}
    listed = "; ".join(f"{kind}: {_arguments(roundings[kind])}" for kind in sorted(found))
    say(f"FUSEDNORM_VLLM=huggingface rounds as transformers' {type(model).__name__}: {listed}")
    return roundings


def _arguments(flags: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in flags.items())
