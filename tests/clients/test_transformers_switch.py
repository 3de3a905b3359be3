"""``patch(model, steps=...)``: some kinds of steps."""

import pytest

import fusednorm
import fusednorm.transformers
from fusednorm.transformers import patch, unpatch

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 32, "pad_token_id": 0}


@pytest.fixture
def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).bfloat16().eval()


KINDS = {"norms": {"rms_norm"}, "rotations": {"rotate"}, "gates": {"silu_and_mul"}}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_steps(qwen3, kind):
    patch(qwen3, steps=[kind])
    assert {step.operation for step in fusednorm.contract(qwen3).steps} == KINDS[kind]


def test_more_kinds_of_steps(qwen3):
    """All of them are what the patch takes without a choice, and additions need the norms around them."""
    counts = patch(qwen3, steps=("norms", "additions"))
    assert (counts.norms, counts.adds, counts.rotations, counts.gates) == (9, 2, 0, 0)
    unpatch(qwen3)
    assert not patch(qwen3, steps=()).any
    assert not patch(qwen3, steps="additions").any
    assert not patch(qwen3, steps="gates", activations=False).any
    patch(qwen3, steps=("norms", "additions", "rotations", "gates"))
    other = transformers.Qwen3ForCausalLM(qwen3.config).bfloat16()
    patch(other)
    assert fusednorm.contract(qwen3) == fusednorm.contract(other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": ["norms", "gate", "adds"]}, "must be some of norms, additions, rotations, gates, got adds, gate$"),
        ({"steps": "all"}, "got all"),
    ],
)
def test_refusals(qwen3, arguments, words):
    with pytest.raises(ValueError, match=words):
        patch(qwen3, **arguments)
    assert fusednorm.contract(qwen3).steps == ()
