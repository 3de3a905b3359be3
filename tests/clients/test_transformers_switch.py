"""``patch(model, rounding="vllm")``, an engine's contract in the trainer, and ``patch(model, steps=...)``."""

import copy

import pytest
import torch

import fusednorm
import fusednorm.transformers
from fusednorm.transformers import patch, unpatch

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 32, "pad_token_id": 0}
IDS = torch.arange(12).view(2, 6)
FLAGS = {"round_sum": False, "round_norm": True}


def made(family, dtype=torch.bfloat16, **more):
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES, **more))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of one would hide where a row is rounded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).eval()


@pytest.fixture
def qwen3():
    return made("Qwen3")


def steps(model):
    return [str(step) for step in fusednorm.contract(model).steps if step.name.startswith("model.layers.1")]


def test_the_engines_contract(qwen3):
    """The first norm of a model and the norms of heads get no sums; additions are one call with the norm after them."""
    report = patch(qwen3, rounding="vllm")
    assert "rms_norm(eps=1e-06, round_sum=False, round_norm=True)" in str(report)
    summed = "fused_add_rms_norm(eps=1e-06, round_norm=True, round_sum=False), bfloat16"
    assert steps(qwen3) == [
        "model.layers.1: add(), bfloat16",
        "model.layers.1: add(), bfloat16",
        "model.layers.1.self_attn: rotate(), bfloat16",
        "model.layers.1.self_attn.q_norm: rms_norm(eps=1e-06, round_norm=True), bfloat16",
        "model.layers.1.self_attn.k_norm: rms_norm(eps=1e-06, round_norm=True), bfloat16",
        "model.layers.1.mlp: silu_and_mul(), bfloat16",
        f"model.layers.1.input_layernorm: {summed}",
        f"model.layers.1.post_attention_layernorm: {summed}",
    ]
    named = {step.name: step.operation for step in fusednorm.contract(qwen3).steps}
    assert named["model.layers.0.input_layernorm"] == "rms_norm"
    assert named["model.norm"] == "fused_add_rms_norm"


def test_its_steps_have_vllms_bits(qwen3):
    """The steps of the replaced modules beside fusednorm's functions with the flags of vLLM."""
    patch(qwen3, rounding="vllm")
    layer, following = qwen3.model.layers
    x, residual = torch.randn(2, 2, 5, 32).bfloat16()
    for norm in (layer.post_attention_layernorm, following.input_layernorm):
        expected = fusednorm.fused_add_rms_norm(x, residual, norm.weight, 1e-6, **FLAGS)
        assert all(map(torch.equal, layer._add_norm(norm, x, residual), expected))
    q, k = torch.randn(2, 1, 5, 2, 16).bfloat16()
    tables = qwen3.model.rotary_emb(x, torch.arange(5)[None])
    attention = layer.self_attn
    weights = attention.q_norm.weight, attention.k_norm.weight
    expected = fusednorm.qk_norm_rope(q, k, *weights, *(table[..., :8] for table in tables), 1e-6, round_norm=True)
    found = attention._rotate(0, type(attention)._sites[0].function, q, k, tables)
    assert all(torch.equal(one.transpose(1, 2), other) for one, other in zip(found, expected, strict=True))


def test_granites_sums_are_rounded():
    """vLLM's Granite multiplies and adds before it calls the norm."""
    model = made("Granite", residual_multiplier=0.22)
    patch(model, rounding="vllm")
    assert {step.operation for step in fusednorm.contract(model).steps} >= {"rms_norm", "scale", "add"}
    assert not any("round_sum" in step.flags for step in fusednorm.contract(model).steps)
    layer = model.model.layers[0]
    x, residual = torch.randn(2, 2, 5, 32).bfloat16()
    norm = layer.post_attention_layernorm
    expected = fusednorm.fused_add_rms_norm(x, residual, norm.weight, 1e-6, x_scale=0.22, round_norm=True)
    assert all(map(torch.equal, layer._add_norm(norm, x, residual, None, 0.22), expected))


def test_beside_a_wider_weight_vllm_rounds_nothing():
    """OLMo 2's norm, which takes such a weight, rounds once; vLLM's rounds before a weight of 16 bits alone."""
    model = made("Olmo2")
    patch(model, rounding="vllm")
    forms = model.model.norm._fusednorm.forms
    assert [forms[torch.bfloat16, weight].round_norm for weight in (torch.bfloat16, torch.float32)] == [True, False]


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_fused_or_across_layers(family):
    """Gemma's norms are multiplied by 1 + weight, unrounded; its additions are between two norms."""
    model = made(family)
    own = model(IDS).logits
    patch(model, rounding="vllm")
    found = model(IDS).logits
    norms = [str(step) for step in fusednorm.contract(model).steps if "round_sum=False" in str(step)]
    assert len(norms) == 4
    assert all(("weight_offset=1.0" in line) == (family == "Gemma2") for line in norms)
    assert not torch.equal(found, own)
    assert (found - own).abs().max() < 0.2
    unpatch(model)
    assert torch.equal(model(IDS).logits, own)


def test_float32_is_not_rounded():
    """Nor has it another digest."""
    one, other = made("Qwen3", torch.float32), made("Qwen3", torch.float32)
    patch(one)
    patch(other, rounding="vllm")
    assert torch.equal(one(IDS).logits, other(IDS).logits)
    assert fusednorm.contract(one).digest == fusednorm.contract(other).digest
    assert fusednorm.contract(one, torch.bfloat16).digest != fusednorm.contract(other, torch.bfloat16).digest


def test_a_copy_has_the_same_contract(qwen3):
    patch(qwen3, rounding="vllm")
    copied = copy.deepcopy(qwen3)
    assert fusednorm.contract(copied) == fusednorm.contract(qwen3)
    assert torch.equal(copied(IDS).logits, qwen3(IDS).logits)


@pytest.mark.parametrize("within", [True, False])
def test_a_sum_that_would_be_rounded_is_refused(qwen3, within):
    """The bits would silently be others: hooks of a norm within a layer, and checkpointing across layers."""
    patch(qwen3, rounding="vllm")
    if within:
        qwen3.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: None)
    else:
        qwen3.gradient_checkpointing_enable()
        qwen3.train()
    with pytest.raises(RuntimeError, match="set FUSEDNORM_VLLM=huggingface for the engine"):
        qwen3(IDS)


def test_a_sum_that_would_be_rounded_is_refused_in_16_bits_only():
    model = made("Qwen3", torch.float32)
    patch(model, rounding="vllm")
    model.model.norm.register_forward_hook(lambda *_: None)
    model(IDS)


KINDS = {"norms": {"rms_norm"}, "rotations": {"rotate"}, "gates": {"silu_and_mul"}}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_steps(qwen3, kind):
    patch(qwen3, steps=[kind])
    assert {step.operation for step in fusednorm.contract(qwen3).steps} == KINDS[kind]


def test_more_kinds_of_steps(qwen3):
    """All of them are what the patch takes without a choice, and additions need the norms around them."""
    counts = patch(qwen3, steps=("norms", "additions"))
    assert (counts.norms, counts.adds, counts.rotations, counts.gates) == (9, 4, 0, 0)
    unpatch(qwen3)
    assert not patch(qwen3, steps=()).any
    assert not patch(qwen3, steps="additions").any
    assert not patch(qwen3, steps="gates", activations=False).any
    patch(qwen3, steps=("norms", "additions", "rotations", "gates"))
    other = made("Qwen3")
    patch(other)
    assert fusednorm.contract(qwen3) == fusednorm.contract(other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounding": "huggingface"}, "rounding must be None or 'vllm', got 'huggingface'"),
        ({"steps": ["norms", "gate", "adds"]}, "must be some of norms, additions, rotations, gates, got adds, gate$"),
        ({"steps": "all"}, "got all"),
    ],
)
def test_refusals(qwen3, arguments, words):
    with pytest.raises(ValueError, match=words):
        patch(qwen3, **arguments)
    assert fusednorm.contract(qwen3).steps == ()
