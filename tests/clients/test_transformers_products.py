"""``patch(model, products=True)``: linear layers by fusednorm.linear, and tables with the same bits everywhere."""

import copy
import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from small_models import small_model
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
import fusednorm.transformers
from fusednorm.reference.angles import cosine_and_sine, power
from fusednorm.transformers import patching, products, replacing, tables
from fusednorm.transformers.products import PatchedConv1D, PatchedProduct

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in (v|version ):FutureWarning")

aten = torch.ops.aten

#: Configuration class, its arguments beside those of small_models.py, products, tables.
FAMILIES = {
    "Llama": ("LlamaConfig", {}, 15, 1),
    "Gemma3": ("Gemma3TextConfig", {}, 15, 1),
    "Qwen3": ("Qwen3Config", {"attention_bias": True}, 15, 1),
    "GPT2": ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64}, 9, 0),
}
family = pytest.mark.parametrize("name", FAMILIES)
#: Scalings of frequencies, for heads of 16.
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "short_factor": [1.1] * 8,
        "long_factor": [2.3] * 8,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def build(name="Llama", dtype=torch.bfloat16, **arguments):
    config_class, more, *_ = FAMILIES[name]
    return small_model(config_class, dtype, **more | arguments)


def tokens(rows=2, length=9):
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids=None):
    with torch.no_grad():
        return model(tokens() if ids is None else ids).logits


def state(model):
    """All that a patch may change: classes, attributes that are no modules, and tensors with their bits."""
    found = {}
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if key not in ("_modules", "_buffers")}
        buffers = {key: value for key, value in module._buffers.items() if value is not None}
        kept |= {f"bits of {key}": value.clone() for key, value in buffers.items()} | {
            "ids": [*map(id, buffers.values())]
        }
        found[name] = type(module), kept
    return found


def same(one, other):
    """Whether two such states are the same, tensors bit for bit, and everything else as an object."""
    if one.keys() != other.keys():
        return False
    for name, (of_class, values) in one.items():
        its_class, found = other[name]
        if of_class is not its_class or values.keys() != found.keys():
            return False
        for key, value in values.items():
            alike = value.equal(found[key]) if isinstance(value, torch.Tensor) else value == found[key]
            if not alike:
                return False
    return True


@family
def test_every_product_is_linear(name):
    """Each module returns what fusednorm.linear returns, also for a row alone; the report; a second patch."""
    *_, products, of_tables = FAMILIES[name]
    model = build(name)
    keys = list(model.state_dict())
    report = fusednorm.transformers.patch(model, products=True)
    assert (report.products, report.tables) == (products, of_tables)
    assert f"{products} products and {of_tables} tables replaced" in str(report)
    assert any(entry.what.startswith("linear") and entry.replaced for entry in report.entries)
    assert list(model.state_dict()) == keys
    seen = []

    def keep(module, inputs, result):
        seen.append((module, inputs[0], result))

    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, PatchedProduct)]
    with_hooks = logits(model)
    for hook in hooks:
        hook.remove()
    assert len(seen) == products
    for module, x, result in seen:
        weight = module.weight.t() if isinstance(module, PatchedConv1D) else module.weight
        assert result.equal(fusednorm.linear(x, weight, module.bias))
        with torch.no_grad():
            assert module(x[1, 3]).equal(result[1, 3])
    assert with_hooks.equal(logits(model))
    second = fusednorm.transformers.patch(model, products=True)
    assert not second.any
    assert (second.before.products, second.before.tables) == (products, of_tables)
    assert f"{products} products, {of_tables} tables" in str(second)


@family
def test_undone(name):
    model = build(name, **({"rope_theta": 5e5} if name == "Llama" else {}))
    before, own = state(model), logits(model)
    report = fusednorm.transformers.patch(model, products=True)
    logits(model)
    undone = fusednorm.transformers.unpatch(model)
    assert (undone.products, undone.tables) == (report.products, report.tables)
    assert same(state(model), before)
    assert logits(model).equal(own)
    assert not fusednorm.transformers.unpatch(model).any


def test_products_are_opt_in_and_come_later():
    """A model whose norms are patched gets products and tables by a second call; the result is that of one call."""
    model, at_once, alone = build(), build(), build()
    own = logits(model)
    report = fusednorm.transformers.patch(model)
    assert (report.products, report.tables) == (0, 0)
    assert "products" not in str(report)
    later = fusednorm.transformers.patch(model, products=True)
    assert (later.norms, later.products, later.tables) == (0, 15, 1)
    assert later.before.rotations == 2
    fusednorm.transformers.patch(at_once, products=True)
    assert logits(model).equal(logits(at_once))
    fusednorm.transformers.patch(alone, steps=(), products=True)
    turned = fusednorm.transformers.patch(alone)
    assert (turned.norms, turned.rotations, turned.gates, turned.products) == (5, 2, 2, 0)
    assert logits(alone).equal(logits(at_once))
    for one in (model, alone):
        fusednorm.transformers.unpatch(one)
        assert logits(one).equal(own)


def test_a_row_is_a_row():
    """Norms, MLPs and the head return a token's bits alone, in another batch, and among others."""
    model = build("Gemma3")
    fusednorm.transformers.patch(model, products=True)
    layer, h = model.model.layers[0], torch.randn(3, 7, 48).bfloat16()

    def of(rows):
        with torch.no_grad():
            return model.lm_head(model.model.norm(rows + layer.mlp(layer.pre_feedforward_layernorm(rows))))

    whole = of(h)
    assert torch.cat([of(h[:, i : i + 1]) for i in range(7)], 1).equal(whole)
    assert of(h.flip(0)[1:]).equal(whole.flip(0)[1:])


def of_one_query(module, query, key, value, attention_mask, scaling=None, **flags):
    """Attention whose bits depend on a query and its keys alone: torch's, of one query of one sequence at a time."""
    before = key.shape[2] - query.shape[2]
    rows = [
        torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(
                    query[b : b + 1, :, i : i + 1],
                    *(t[b : b + 1, :, : before + i + 1].contiguous() for t in (key, value)),
                    scale=scaling,
                    enable_gqa=True,
                )
                for i in range(query.shape[2])
            ],
            2,
        )
        for b in range(query.shape[0])
    ]
    return torch.cat(rows).transpose(1, 2), None


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3"])
def test_one_digest_of_a_whole_model(name):
    """With an attention that computes each query alone: of a prompt, token by token, and of a sequence in a batch."""
    transformers.AttentionInterface.register("of_one_query", of_one_query)
    model = build(name)
    model.set_attn_implementation("of_one_query")
    fusednorm.transformers.patch(model, products=True)
    ids = tokens(3, 8)
    whole = logits(model, ids)
    assert logits(model, ids[1:2]).equal(whole[1:2])
    assert logits(model, ids[:, :5]).equal(whole[:, :5])
    past, one_by_one = None, []
    with torch.no_grad():
        for i in range(8):
            output = model(ids[:, i : i + 1], past_key_values=past, use_cache=True)
            past = output.past_key_values
            one_by_one.append(output.logits)
    assert torch.cat(one_by_one, 1).equal(whole)


def test_a_tied_head_stays_tied():
    model = build("Gemma3", tie_word_embeddings=True)
    weight = model.model.embed_tokens.weight
    assert model.lm_head.weight is weight
    fusednorm.transformers.patch(model, products=True)
    assert isinstance(model.lm_head, PatchedProduct)
    assert model.lm_head.weight is weight
    with torch.no_grad():
        weight += 0.5
    x = torch.randn(2, 48).bfloat16()
    assert model.lm_head(x).equal(fusednorm.linear(x, model.model.embed_tokens.weight))
    model.tie_weights()
    assert model.get_output_embeddings().weight is weight


class Scaled(torch.nn.Linear):
    """It computes more than a product."""

    def forward(self, x):
        return super().forward(x) * 2


class Named(torch.nn.Linear):
    """It has torch's forward pass."""


class Twice(torch.nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def test_what_is_left_alone():
    parametrized = torch.nn.Linear(4, 4)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "weight", Twice())
    whole = torch.nn.Linear(4, 4)
    whole.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    replaced = torch.nn.Linear(4, 4)
    replaced.forward = lambda x: x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a LazyLinear is new
        lazy = torch.nn.LazyLinear(4)
    parts = [Scaled(4, 4), Named(4, 4), torch.nn.MultiheadAttention(4, 1), parametrized, whole, lazy, replaced]
    model = torch.nn.ModuleList([*parts, fusednorm.Linear(4, 4), torch.nn.Bilinear(4, 4, 4)])
    report = fusednorm.transformers.patch(model, products=True)
    assert report.products == 1
    assert {(entry.class_name, entry.replaced, entry.what) for entry in report.entries} == {
        ("Scaled", False, "it computes its product in another way than torch.nn.Linear"),
        ("Named", True, "linear"),
        (
            "NonDynamicallyQuantizableLinear",
            False,
            "torch.nn.MultiheadAttention takes its weight, and does not call it",
        ),
        ("ParametrizedLinear", False, "its weight is computed in each call (torch.nn.utils.parametrize)"),
        ("Linear", False, "its weight is torch.int8"),
        ("LazyLinear", False, "its weight has no shape yet"),
        ("Linear", False, "something else has replaced its forward pass"),
    }
    fusednorm.transformers.unpatch(model)
    assert type(parts[1]) is Named


def test_other_inputs_run_the_modules_own_code():
    """Their errors are torch's; no dtype is converted but by autocast, as torch converts it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4).bfloat16(), torch.nn.Linear(8, 4, bias=False).bfloat16())
    linear, plain = model
    others = [torch.randn(2, 8), torch.randn(2, 7).bfloat16(), torch.ones(2, 8, dtype=torch.int64)]
    calls = [(module, copy.deepcopy(module), x) for module in model for x in others]
    fusednorm.transformers.patch(model, products=True)
    assert "by fusednorm" in repr(linear)
    for module, own, x in calls:
        messages = []
        for one in (own, module):
            with pytest.raises(RuntimeError) as error:
                one(x)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    eight = copy.deepcopy(plain).to(torch.float8_e4m3fn)
    x = torch.ones(2, 8).to(eight.weight.dtype)
    assert eight(x).float().equal(torch.nn.functional.linear(x, eight.weight).float())
    with pytest.raises(TypeError):
        linear(torch.randn(2, 8).bfloat16(), 1)
    x = torch.randn(3, 8)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert linear(x.double()[0, :8].bfloat16()).dtype == torch.bfloat16
    operands = x, linear.weight, linear.bias
    assert y.equal(fusednorm.linear(*(tensor.bfloat16() for tensor in operands)))
    assert linear(input=x).equal(torch.nn.functional.linear(*operands))  # a name is not the fast form
    assert linear(x.flatten()[:8]).equal(fusednorm.linear(x[0], *operands[1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to initialise
        empty = torch.nn.ModuleList([torch.nn.Linear(0, 3)])
    fusednorm.transformers.patch(empty, products=True)
    assert empty[0](torch.empty(2, 0)).equal(empty[0].bias.expand(2, 3))


def test_a_failing_patch_restores(monkeypatch):
    model = build(rope_theta=5e5)
    before = state(model)

    def fails(model):
        yield from tables.patch_tables(model)
        raise KeyError("as the model's own code")

    monkeypatch.setattr(patching, "patch_tables", fails)
    with pytest.raises(KeyError):
        fusednorm.transformers.patch(model, products=True)
    assert same(state(model), before)


# Tables


def of_rotary(model, length=24):
    """cos and sin of all kinds of layers, up to a length."""
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    positions = torch.arange(length)[None]
    layers = [(name,) for name in getattr(rotary, "layer_types", ())] or [()]
    with torch.no_grad():
        return [table for layer in layers for table in rotary(torch.ones(1, dtype=torch.float32), positions, *layer)]


def with_scaling(scaling, theta=5e5):
    return build(
        "Llama", torch.float32, rope_parameters={"rope_type": scaling, "rope_theta": theta, **SCALINGS[scaling]}
    )


def test_tables_are_the_specifications():
    for theta in (1e4, 1.5e5, 1e6):
        model = build(dtype=torch.float32, num_hidden_layers=1, head_dim=128, rope_theta=theta)
        fusednorm.transformers.patch(model, steps=(), products=True)
        frequencies = 1.0 / power(theta, torch.arange(0, 128, 2).float() / 128, torch.float32)
        assert model.model.rotary_emb.inv_freq.equal(frequencies)
        angles = torch.arange(24).float()[:, None] * frequencies
        for found, wanted in zip(of_rotary(model), cosine_and_sine(angles), strict=True):
            assert found[0].equal(torch.cat((wanted, wanted), -1))


class NoneOfTorch(TorchDispatchMode):
    """Refuses torch's own functions with other bits on other processors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (aten.cos, aten.sin, aten.pow, aten.exp, aten.log, aten.mm, aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scalings(scaling):
    """All powers, cosines and sines are exact, also of frequencies that a call computes; copies; all is undone.

    Of 9 tokens, of 80, which is more than the model has positions, and of 9 again.
    """
    model = with_scaling(scaling)
    short, long = tokens(1, 9), tokens(1, 80)
    before = state(model)
    fusednorm.transformers.patch(model, steps=(), products=True)
    logits(model, long)
    fusednorm.transformers.unpatch(model)
    assert same(state(model), before)  # no call has been made without the patch
    own = logits(model, short)
    before = state(model)
    report = fusednorm.transformers.patch(model, steps=(), products=True)
    assert [entry.what for entry in report.entries if "Rotary" in entry.class_name] == ["cos and sin in one order"]

    assert not any(name.endswith("long_inv_freq") for name in vars(model.model.rotary_emb))
    with NoneOfTorch():
        first = [of_rotary(model, length) for length in (9, 80, 9)]
    assert all(one.equal(other) for one, other in zip(first[0], first[2], strict=True))
    assert logits(model, long).isfinite().all()
    patched = logits(model, short)
    duplicate = copy.deepcopy(model)
    assert logits(duplicate, short).equal(patched)
    for one in (model, duplicate):
        fusednorm.transformers.unpatch(one)
        assert one is duplicate or same(state(one), before)
        assert logits(one, short).equal(own)


def test_after_a_move_and_in_other_dtypes():
    """Buffers follow the model, and are put back where the model is then."""
    model = build(rope_theta=5e5)
    rotary = model.model.rotary_emb
    own = rotary.inv_freq.clone()
    fusednorm.transformers.patch(model, steps=(), products=True)
    exact = rotary.inv_freq.clone()
    model.double()
    assert rotary.inv_freq.equal(exact.double())
    logits(model)
    model.float()
    x = torch.randn(3, 48)
    assert model.lm_head(x).equal(fusednorm.linear(x, model.lm_head.weight))
    model.to(torch.float16)
    fusednorm.transformers.unpatch(model)
    assert rotary.inv_freq.equal(own.to(torch.float16))
    model = build()
    fusednorm.transformers.patch(model, steps=(), products=True)
    model.to("meta")
    assert model(tokens().to("meta")).logits.shape == (2, 9, 96)
    fusednorm.transformers.unpatch(model)
    assert model.model.rotary_emb.inv_freq.is_meta


def test_frequencies_of_others_stay():
    """A module that has others than its configuration gives, or no configuration; its cosines and sines are exact."""
    model = build()
    rotary = model.model.rotary_emb
    rotary.inv_freq *= 1.5
    own = rotary.inv_freq.clone()
    report = fusednorm.transformers.patch(model, steps=(), products=True)
    (what,) = [entry.what for entry in report.entries if "Rotary" in entry.class_name]
    assert "its buffers stay" in what
    assert "a new LlamaRotaryEmbedding has another inv_freq" in what
    assert rotary.inv_freq.equal(own)
    assert of_rotary(model)[0][0, :, :8].equal(cosine_and_sine(torch.arange(24).float()[:, None] * own)[0])
    fusednorm.transformers.unpatch(model)
    del rotary.config
    report = fusednorm.transformers.patch(model, steps=(), products=True)
    assert any("it keeps no configuration" in entry.what for entry in report.entries)


class OwnRotaryEmbedding(torch.nn.Module):
    """Complex numbers, as Llama 4's; with a base that is a tensor, and a product of one term."""

    def __init__(self, config=(5e5, 16)):
        super().__init__()
        self.config = config
        theta, size = config
        self.register_buffer("inv_freq", torch.tensor(theta) ** -(torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, None].float() @ self.inv_freq[None].float()
        return torch.polar(torch.ones_like(angles), angles), torch.pow(angles + 0.5, 0.3), angles**2, (-angles) ** 3


def test_a_module_whose_tables_are_not_known():
    model = torch.nn.ModuleList([OwnRotaryEmbedding()])
    report = fusednorm.transformers.patch(model, steps=(), products=True)
    assert report.tables == 1
    found = model[0](torch.ones(1), torch.arange(40))
    angles = torch.arange(40.0)[:, None] * model[0].inv_freq
    assert found[0].equal(torch.complex(*cosine_and_sine(angles)))
    assert found[1].equal(power(angles + 0.5, 0.3, torch.float32))
    assert found[2].equal(angles * angles)
    assert found[3].equal((-angles) ** 3)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_one_token_has_the_tables_of_its_position(name, monkeypatch):
    """In any sequence of positions, after writes to results and to frequencies, and with a new scaling or dtype."""
    model = build(name, torch.float32)
    fusednorm.transformers.patch(model, steps=(), products=True)
    rotary = model.model.rotary_emb
    x, layers = torch.ones(1, 1, 48), [(layer,) for layer in getattr(rotary, "layer_types", ())] or [()]

    def check(x=x):
        whole = [rotary(x, torch.arange(200)[None], *layer) for layer in layers]
        for position in (0, 0, 1, 63, 64, 130, 65, 0):
            for layer, tables_of_all in zip(layers, whole, strict=True):
                found = rotary(x, torch.tensor([[position]]), *layer)
                named = rotary(x, *layer, position_ids=torch.tensor([[position]])) if not layer else found
                assert type(found) is type(tables_of_all)
                for table, other, rows in zip(found, named, tables_of_all, strict=True):
                    assert table.equal(rows[:, position : position + 1])
                    assert table.equal(other)
                    assert table.dtype == x.dtype
                    table += 1

    with torch.no_grad():
        check()
        assert [*tables._blocks[rotary]] == layers
        with monkeypatch.context() as context:  # the positions of a block are made once
            context.setattr(tables.ExactTables, "exact", lambda *arguments: pytest.fail("made again"))
            for layer in layers * 2:
                rotary(x, torch.tensor([[5]]), *layer)
        for buffer in rotary.buffers():
            buffer *= 1.1
        check()
        for _ in range(2):  # the second time neither has been written to
            for key, buffer in [*rotary.named_buffers()]:
                rotary._buffers[key] = buffer * 1.1
            check()
        check(x.bfloat16())
        check()
        if name == "Llama":
            rotary.attention_scaling = 2.0
            check()
    with torch.inference_mode():
        inferred = rotary(x, torch.tensor([[3]]), *layers[0])
    leaf = torch.ones(1, requires_grad=True)
    (leaf * rotary(x, torch.tensor([[4]]), *layers[0])[0]).sum().backward()
    assert inferred[0].is_inference()
    assert rotary(x, torch.tensor([[-3]]), *layers[0])[0].equal(rotary(x, torch.tensor([[3]]), *layers[0])[0])


def test_a_scaling_that_was_assigned_stays():
    """Before a patch, while the model is patched, and between two patches of a module that keeps its frequencies."""
    model = build(dtype=torch.float32)
    rotary, x, positions = model.model.rotary_emb, torch.ones(1, 1, 48), torch.tensor([[7]])
    rotary.inv_freq *= 1.5
    for scaling in (2.0, 3.0):
        rotary.attention_scaling = scaling
        fusednorm.transformers.patch(model, steps=(), products=True)
        cos = cosine_and_sine(7 * rotary.inv_freq)[0]
        assert rotary(x, positions)[0][0, 0, :8].equal(scaling * cos)
        rotary.attention_scaling = scaling + 0.5
        fusednorm.transformers.unpatch(model)
        assert rotary.attention_scaling == scaling + 0.5


class OfRowsRotaryEmbedding(OwnRotaryEmbedding):
    """It takes no positions."""

    def forward(self, x):
        return (x * self.inv_freq).cos()


def test_a_module_without_positions():
    model = torch.nn.ModuleList([OfRowsRotaryEmbedding()])
    assert fusednorm.transformers.patch(model, products=True).tables == 1
    x = torch.randn(3, 8)
    assert model[0](x).equal(cosine_and_sine(x * model[0].inv_freq)[0])
    assert model[0](x=x).equal(model[0](x))


def test_growing_frequencies_are_not_made_ahead():
    for scaling in ("dynamic", "longrope"):
        model = with_scaling(scaling)
        fusednorm.transformers.patch(model, steps=(), products=True)
        rotary, x = model.model.rotary_emb, torch.ones(1, 1, 48)
        first, grown, after = (rotary(x, torch.tensor(positions))[0][:, :1] for positions in ([[9]], [[9, 100]], [[9]]))
        assert not first.equal(grown)
        assert first.equal(after)
        assert rotary not in tables._blocks


def test_the_mode():
    """A write between cosine and sine, two tensors in turns, torch's gradients, inference, and products of one term."""
    start = torch.rand(5)
    with tables.Exact():
        angle = start.clone()
        other, cos = 3 * start, angle.cos()
        assert other.sin().equal(cosine_and_sine(3 * start)[1])
        assert angle.sin().equal(cosine_and_sine(start)[1])
        angle += 1
        sin = angle.sin()
        recorded = torch.rand(5, requires_grad=True)
        recorded.cos().sum().backward()
        with torch.inference_mode():
            inferred = torch.ones(3) * 0.3
            both = inferred.cos(), inferred.sin()
        with NoneOfTorch():
            column, row = start[:, None], start[None]
            for product in (column @ row, torch.matmul(column, row), column.matmul(row)):
                assert product.equal(column * row)
        assert (row @ column).shape == (1, 1)
    assert cos.equal(cosine_and_sine(start)[0])
    assert sin.equal(cosine_and_sine(start + 1)[1])
    assert recorded.grad.equal(-recorded.detach().sin())
    assert all(one.equal(other) for one, other in zip(both, cosine_and_sine(torch.full((3,), 0.3)), strict=True))


def digests():
    """Of the results of a module without and with the patch."""
    found = []
    for patched in (False, True):
        model = torch.nn.ModuleList([OwnRotaryEmbedding((theta, size)) for theta in (1e4, 1e6) for size in (128, 256)])
        if patched:
            fusednorm.transformers.patch(model, steps=(), products=True)
        results = [result for module in model for result in module(torch.ones(1), torch.arange(300))]
        found.append(hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest())
    return found


def test_tables_have_the_same_bits_on_every_instruction_set():
    """torch's own have not."""
    code = "import sys; sys.path.insert(0, '.'); import test_transformers_products as of; print(*of.digests())"
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        cwd=Path(__file__).parent,
    )
    (torchs, ours), (others, others_ours) = digests(), run.stdout.split()
    assert ours == others_ours
    assert (torchs != others) == (torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX"))


# With others


def test_compiled():
    model = build("Llama", num_hidden_layers=1, rope_theta=5e5)
    fusednorm.transformers.patch(model, products=True)
    expected = logits(model)
    torch.compiler.reset()
    assert logits(torch.compile(model, fullgraph=True, backend="aot_eager")).equal(expected)


class OfIds(torch.nn.Module):
    """The logits of a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def test_exported():
    """The program calls the operators, and none of torch's for what they compute."""
    model = build(num_hidden_layers=1)
    fusednorm.transformers.patch(model, products=True)
    with torch.no_grad():
        program = torch.export.export(OfIds(model), (tokens(),), strict=False)
        called = {str(node.target).rpartition(".")[0] for node in program.graph.nodes if node.op == "call_function"}
        assert called >= {"fusednorm.linear", "fusednorm_transformers.cosine_and_sine"}
        assert not called & {"aten.linear", "aten.cos", "aten.sin", "aten.mm"}
        assert program.module()(tokens()).equal(logits(model))


def test_lora():
    """LoRA's two matrices and the base layer are products; merging and removing LoRA work as without the patch."""
    peft = pytest.importorskip("peft", reason="the tox environment `transformers` installs it")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(build(dtype=torch.float32), config).eval()
    own = logits(model)
    report = fusednorm.transformers.patch(model, products=True)
    assert report.products == 15 + 2 * 4
    logits(model)
    merged = copy.deepcopy(model).merge_and_unload()
    fusednorm.transformers.unpatch(merged)
    fusednorm.transformers.unpatch(model)
    assert logits(model).equal(own)
    assert logits(merged).equal(logits(model.merge_and_unload()))


def test_the_contract_lists_products():
    model = build(num_hidden_layers=1)
    fusednorm.transformers.patch(model)
    without = fusednorm.contract(model)
    report = fusednorm.transformers.patch(model, products=True)
    contract = fusednorm.contract(model)
    assert contract.digest != without.digest
    assert [step.operation for step in contract.steps].count("linear") == report.products
    assert "lm_head: linear(), bfloat16" in str(contract)
    assert [step.name for step in contract.steps if step.operation == "cosine_and_sine"] == ["model.rotary_emb"]


def test_saved_and_loaded(tmp_path):
    model = build()
    fusednorm.transformers.patch(model, products=True)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert not any(isinstance(module, replacing.Patched) for module in loaded.modules())
    fusednorm.transformers.patch(loaded, products=True)
    assert logits(loaded).equal(logits(model))


def test_gradients_are_recorded():
    """Of every weight, in training; the tables have none."""
    model = build(dtype=torch.float32).train()
    fusednorm.transformers.patch(model, products=True)
    model(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_weight_that_stands_for_others_has_products_of_its_own(monkeypatch):
    """As one that another library quantizes after the patch."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 3))
    assert fusednorm.transformers.patch(model, products=True).products == 1
    x, weight = torch.randn(2, 8), model[0].weight.detach()
    monkeypatch.setattr(products, "linear", None)
    with pytest.raises(TypeError, match="not callable"):
        model(x)
    model[0].weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    assert isinstance(model(x), TwoTensor)
