"""One switch for a trainer and an engine: a model of transformers beside vLLM, by the command that users have."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
PROMPT = " ".join(f"w{i}" for i in range(1, 20))


def save(folder, family):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of one would hide where a row is rounded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.bfloat16().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{f"w{i}": i for i in range(1, 64)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)


def difference(folder, setting, eagerly):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FUSEDNORM_"))}
    environment |= {
        "FUSEDNORM_VLLM": setting,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment |= {**eagerly, "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "150"}
    command = [sys.executable, "-P", "-m", "fusednorm", "difference", folder, "vllm", "--prompt", PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    shown = [line.split() for line in done.stdout.splitlines()]
    digests = [words[2] for words in shown if words[1:2] == ["sha256"]]
    shares = {words[0]: words[2] for words in shown if len(words) == 3 and words[0].startswith(("model.", "lm_head"))}
    return done.returncode, digests, shares, done.stdout + done.stderr


def steps(family):
    norms = {"input_layernorm", "post_attention_layernorm"}
    norms |= {"self_attn.q_norm", "self_attn.k_norm"} if family == "Qwen3" else set()
    norms |= {"pre_feedforward_layernorm", "post_feedforward_layernorm"} if family == "Gemma2" else set()
    return {"model.norm", *(f"model.layers.*.{name}" for name in (*norms, "self_attn", "mlp"))}


def products():
    """Of both families. The engine joins three and two of them."""
    projections = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    return {"lm_head", *(f"model.layers.*.{part}.{name}" for part, names in projections.items() for name in names)}


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_both_sides_agree(tmp_path, eagerly, family):
    """Equal digests, and equal bits in all steps and products; the log says which contract is in force."""
    save(tmp_path, family)
    status, digests, shares, said = difference(tmp_path, "huggingface", eagerly)
    assert status == 0, said
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert shares == dict.fromkeys(steps(family) | products(), "100%")
    assert "rows again, from the engine's inputs" in said
    assert f"rounds as transformers' {family}ForCausalLM: norm" in said


@pytest.mark.slow
def test_both_sides_differ(tmp_path, eagerly):
    """vLLM's own rounding beside the model's own: norms of sums and rotations, and no other step."""
    save(tmp_path, "Qwen3")
    status, digests, shares, said = difference(tmp_path, "vllm", eagerly)
    assert status == 1, said
    assert digests[0] != digests[1]
    differing = {"input_layernorm", "post_attention_layernorm", "self_attn"}
    expected = {"model.norm", *(f"model.layers.*.{name}" for name in differing)}
    assert {name for name, share in shares.items() if share != "100%"} == expected
    assert "the first step that differs: model.layers.0.self_attn" in said
