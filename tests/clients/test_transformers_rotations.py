"""Rotations of q and k in Hugging Face models: which are recognised, which are left alone, and that no bit changes."""

import ast

import pytest
import torch

import fusednorm.transformers
from fusednorm.transformers import attention, rotations

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

from test_transformers import DEEPSEEK, model_of, tokens  # noqa: E402 - after the line that skips

#: Configuration class, arguments beside those of the other tests, and what the report says of its attention.
KINDS = {
    "Llama": ({}, "rotation of q and k fused"),
    "Qwen2": ({}, "rotation of q and k fused"),
    "Qwen3": ({"head_dim": 16}, "q/k norm and rotation fused"),
    "Gemma2": ({"head_dim": 16}, "rotation of q and k fused"),
    "Gemma3Text": ({"head_dim": 16}, "q/k norm and rotation fused"),
    "Phi3": ({"partial_rotary_factor": 0.5}, "rotation of q and k fused"),
    "Olmo2": ({}, "rotation of q and k fused"),  # its norms are of whole rows of q and k
    "Glm4": ({"head_dim": 16, "partial_rotary_factor": 0.5}, "rotation of q and k fused"),  # pairs side by side
    "Cohere2": ({"head_dim": 16}, "rotation of q and k fused"),
    "Ernie4_5": ({}, "rotation of q and k fused"),
    # Its tables are written column by column, from positions in text, height and width.
    "Qwen3_5Text": (
        {"head_dim": 32, "layer_types": ["full_attention"] * 3},
        "q/k norm and rotation fused, sigmoid_and_mul",
    ),
    "DeepseekV3": (DEEPSEEK | {"first_k_dense_replace": 3}, "rotation of q and k fused"),
}


def build(kind, dtype=torch.bfloat16):
    return model_of(f"{kind}Config", KINDS[kind][0], dtype)


def answers(model):
    """Logits of two texts of other lengths, the first of which is padded, and of a token after them."""
    mask = torch.ones(2, 17, dtype=torch.int64)
    mask[0, :5] = 0
    with torch.no_grad():
        first = model(tokens(), attention_mask=mask, use_cache=True)
        mask = torch.cat((mask, mask[:, :1] | 1), 1)
        name = "cache" if "cache" in first else "past_key_values"  # before transformers 5.24
        then = model(tokens(2, 1), attention_mask=mask, **{name: first[name]})
    return first.logits, then.logits


@pytest.fixture
def calls(monkeypatch):
    """The calls of ``qk_norm_rope``: whether each has a norm."""
    made, call = [], rotations.qk_norm_rope

    def counted(*args, **kwargs):
        made.append(kwargs["norm"])
        return call(*args, **kwargs)

    monkeypatch.setattr(rotations, "is_dynamo_compiling", lambda: True)  # where C would take calls before they count
    monkeypatch.setattr(rotations, "qk_norm_rope", counted)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.release), torch.bfloat16], ids=str)
def test_kinds(kind, dtype, calls, monkeypatch):
    """One call for each layer. Beside the same patched norms, no logit and no loss changes, also when it trains."""
    model = build(kind, dtype)
    with monkeypatch.context() as without:
        without.setattr("fusednorm.transformers.patching.patch_rotations", lambda *_: iter(()))
        fusednorm.transformers.patch(model)
    before, loss = answers(model), model(tokens(), labels=tokens()).loss
    fusednorm.transformers.unpatch(model)
    report = fusednorm.transformers.patch(model)
    entries = [entry for entry in report.entries if "Attention" in entry.class_name and entry.replaced]
    assert [(entry.count, entry.what) for entry in entries] == [(3, KINDS[kind][1])], report
    assert report.rotations == 3
    assert not calls
    assert all(map(torch.equal, answers(model), before))
    assert calls == [KINDS[kind][1].startswith("q/k")] * 6
    found = model.train()(tokens(), labels=tokens()).loss
    found.backward()
    assert torch.equal(found, loss)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert fusednorm.transformers.unpatch(model).rotations == 3
    assert not any(type(module).__module__.startswith("fusednorm") for module in model.modules())


def test_gradients():
    """Of all parameters, beside transformers' own formula, whose sums over tokens have another order."""
    found = []
    for patched in (False, True):
        model = build("Qwen3", torch.float32)
        if patched:
            fusednorm.transformers.patch(model)
        model(tokens(), labels=tokens()).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        # Rows of 64 numbers and 34 tokens are added in another order: 2^-18 is 64 units of 2^-24.
        assert (found[1][name] - gradient).norm() <= 2.0**-18 * gradient.norm(), name


def turned(x, cos, sin):
    return x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin


def with_unsqueezed(q, k, cos, sin):
    return tuple(turned(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


def of_another_sign(q, k, cos, sin):
    return with_unsqueezed(q, k, cos, -sin)


def of_k_alone(q, k, cos, sin):
    return q, with_unsqueezed(q, k, cos, sin)[1]


def in_float32(q, k, cos, sin):
    return tuple(y.to(q.dtype) for y in with_unsqueezed(q.float(), k.float(), cos.float(), sin.float()))


def doubled(q, k, cos, sin):
    return with_unsqueezed(2 * q, k, cos, sin)


def test_rotations_are_recognised_by_what_they_compute():
    found = rotations.rotations(with_unsqueezed, {})
    half = found[torch.bfloat16, torch.bfloat16, "halves", True, 4]
    assert half == rotations.Rotation(heads=1, interleaved=False, to_halves=False, round_products=True)
    wide = rotations.rotations(in_float32, {})[torch.bfloat16, torch.bfloat16, "halves", True, 4]
    assert wide == rotations.Rotation(heads=1, interleaved=False, to_halves=False, round_products=False)


@pytest.mark.parametrize("function", [of_another_sign, of_k_alone, doubled], ids=lambda function: function.__name__)
def test_other_functions_are_left_alone(function, monkeypatch):
    """Before the patch; and one that takes its place afterwards computes what it computes."""
    modeling = transformers.models.llama.modeling_llama
    model = build("Llama")
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", function)
    attention.rewritten.cache_clear()
    wanted = answers(model)
    report = fusednorm.transformers.patch(model)
    assert report.rotations == 0
    assert "LlamaAttention       3  left alone: its rotation computes something else" in str(report)
    assert all(map(torch.equal, answers(model), wanted))
    fusednorm.transformers.unpatch(model)
    monkeypatch.undo()
    attention.rewritten.cache_clear()
    assert fusednorm.transformers.patch(model).rotations == 3
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", function)
    assert all(map(torch.equal, answers(model), wanted))
    monkeypatch.undo()
    assert not torch.equal(answers(model)[0], wanted[0])


@pytest.mark.parametrize(
    ("source", "tables"),
    [
        ("cos, sin = tables", "tables"),
        ("cos, sin = tables; y = cos", "tables"),
        ("cos, sin = tables; cos = 2 * cos", None),
        ("cos, sin = tables; tables = other", None),
        ("sin, cos = tables", None),
        ("cos, sin = f(tables)", None),
        ("y = x", None),
    ],
)
def test_tables_are_those_that_the_source_takes_apart(source, tables):
    assert attention._taken_apart(ast.parse(source).body, "cos", "sin") == tables


def test_tables_of_three_rows_of_positions(calls):
    """Those of text, height and width, which differ where there is an image, are rotated by in one call too."""
    model = build("Qwen3_5Text")
    positions = torch.arange(3 * 2 * 17).reshape(3, 2, 17) % 13
    with torch.no_grad():
        wanted = model(tokens(), position_ids=positions).logits
        fusednorm.transformers.patch(model, steps="rotations")
        assert torch.equal(model(tokens(), position_ids=positions).logits, wanted)
    assert len(calls) == 3


def test_tables_with_learned_numbers(calls):
    """As Mistral Large 4's. Where their gradients are recorded the model's own code rotates."""
    model = build("Llama")
    tables = model.model.rotary_emb

    class Learned(type(tables)):
        def forward(self, x, position_ids):
            angles = position_ids[..., None].float() * self.inv_freq * self.alpha.exp()
            both = torch.cat((angles, angles), -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

    tables.__class__, tables.alpha = Learned, torch.nn.Parameter(torch.rand(tables.inv_freq.shape))
    before, loss = answers(model), model(tokens(), labels=tokens()).loss
    loss.backward()
    wanted, tables.alpha.grad = tables.alpha.grad, None
    assert fusednorm.transformers.patch(model, steps="rotations").rotations == 3
    assert all(map(torch.equal, answers(model), before))
    assert len(calls) == 6
    model(tokens(), labels=tokens()).loss.backward()
    assert torch.equal(tables.alpha.grad, wanted)
    assert len(calls) == 6


def test_q_and_k_one_after_the_other(monkeypatch):
    """Gemma 4's function takes one of them; a layer that shares its keys with another one rotates q alone."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    arguments = {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 4, **layers}
    made, function = [], attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda x, *a, **k: made.append(x.shape) or function(x, *a, **k))
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of("Gemma4UnifiedTextConfig", arguments, dtype)
        wanted = answers(model)
        assert fusednorm.transformers.patch(model, steps="rotations").rotations == 4
        made.clear()
        assert all(map(torch.equal, answers(model), wanted))
        assert [x[1:] for x in made[:6]] == [(17, heads, 16) for heads in (4, 2, 4, 2, 4, 4)]
        assert len(made) == 12


def test_rows_of_images(calls):
    """Parts of images have two coordinates, and q and k no batch: [parts, heads, numbers]."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    config = transformers.models.qwen3_5.Qwen3_5VisionConfig(hidden_size=32, intermediate_size=64, depth=2, num_heads=4)
    torch.manual_seed(0)
    pixels = torch.randn(16, config.in_channels * config.temporal_patch_size * config.patch_size**2)
    for dtype in (torch.float32, torch.bfloat16):
        model = Qwen3_5VisionModel(config).to(dtype).eval()
        with torch.no_grad():
            wanted = model(pixels.to(dtype), torch.tensor([[1, 4, 4]])).last_hidden_state
            assert fusednorm.transformers.patch(model, steps="rotations").rotations == 2
            calls.clear()
            assert torch.equal(model(pixels.to(dtype), torch.tensor([[1, 4, 4]])).last_hidden_state, wanted)
        assert calls == [False] * 2


def test_hooks_of_norms_are_called(calls):
    model = build("Qwen3")
    fusednorm.transformers.patch(model)
    wanted, seen = answers(model), []
    handle = model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda *args: seen.append(args))
    calls.clear()
    assert all(map(torch.equal, answers(model), wanted))
    assert len(seen) == 2
    assert sum(calls) == 4  # the other two layers
    handle.remove()
    assert all(map(torch.equal, answers(model), wanted))


def test_compiled():
    model = build("Qwen3")
    fusednorm.transformers.patch(model)
    with torch.no_grad():
        wanted = model(tokens(), use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(tokens(), use_cache=False).logits, wanted)
