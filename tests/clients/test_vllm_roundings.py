"""The contract ``huggingface`` of the plug-in of vLLM: where the families of transformers round. Without vLLM."""

import logging
from types import SimpleNamespace

import pytest
import torch

from fusednorm.vllm import roundings

transformers = pytest.importorskip("transformers", reason="its models are traced")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 8, "pad_token_id": 0}
LLAMAS = roundings.of("huggingface")
IN_FLOAT32 = {"round_products": False}
ONCE = {"norm": {"round_sum": True, "round_norm": False}}


def of_family(config):
    return roundings.of_model("huggingface", SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config)))


@pytest.mark.parametrize(
    ("family", "more", "otherwise"),
    [
        ("Llama", {}, {}),
        ("Qwen3", {}, {}),
        ("Gemma2", {}, {}),  # whose norms have a row of their own
        ("GptOss", {"num_local_experts": 4}, ONCE),
        ("Cohere2", {"eos_token_id": 0}, {"rotation": IN_FLOAT32, "rotation in steps": IN_FLOAT32}),
        ("Mamba2", {"num_heads": 4, "n_groups": 1, "state_size": 8}, {}),
    ],
)
def test_a_family_rounds_as_its_model_does(family, more, otherwise, caplog):
    """Gates and rotations too; the log names the family and its flags."""
    caplog.set_level(logging.INFO, "vllm.fusednorm")
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    assert of_family(config) == {**LLAMAS, **otherwise}
    (line,) = caplog.messages
    assert f"FUSEDNORM_VLLM=huggingface rounds as transformers' {family}ForCausalLM: " in line
    assert ("rotation: round_products=" in line) == (family != "Mamba2")
    assert of_family(config) == {**LLAMAS, **otherwise}
    assert len(caplog.messages) == 1  # a model is traced once


def test_steps_of_one_kind_that_round_at_several_places(caplog):
    """OLMo 2's rotation rounds products where its tables have 16 bits, and not where they are float32."""
    assert of_family(transformers.Olmo2Config(**SIZES)) == {**LLAMAS, **ONCE}
    assert "Olmo2ForCausalLM has steps of the kind 'rotation' that round at other places" in caplog.text


def test_a_family_that_transformers_does_not_know_rounds_as_llama(caplog):
    assert of_family(transformers.ViTConfig()) == LLAMAS
    (line,) = caplog.messages
    assert "vit rounds as Llama, because it cannot be traced: Unrecognized configuration class" in line


def test_other_contracts_are_columns_of_the_table():
    """Of any model, and of none."""
    assert roundings.of_model("vllm", None) == roundings.of("vllm")
    assert roundings.of_model("huggingface", None) == LLAMAS
    columns = [roundings.of(contract) for contract in roundings.CONTRACTS]
    for kind, flags in columns[1].items():
        usual = {"round_sum": True, "between": None}
        assert flags == {flag: usual.get(flag, False) for flag in flags}
        assert columns[0][kind] != flags or columns[2][kind] != flags, kind
    assert columns[0]["norm, then gate"]["between"] is torch.float32
