"""``fusednorm.transformers.quantize``: layers of a model in int8, and what must not undo it."""

import copy
import json
import logging
import pickle
import time

import pytest
import torch
from small_models import small_model

import fusednorm
import fusednorm.transformers
from fusednorm import Int8Linear
from fusednorm.transformers import quantize, unquantize

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

#: Configuration class, its arguments beside those of small_models.py, linear layers; GPT-2's others are Conv1D.
FAMILIES = {
    "Llama": ("LlamaConfig", {}, 15),
    "Gemma3": ("Gemma3TextConfig", {}, 15),
    "Qwen3": ("Qwen3Config", {"attention_bias": True, "tie_word_embeddings": True}, 15),
    "GPT2": ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64}, 1),
}
TIED = ("Gemma3", "Qwen3", "GPT2")
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


def build(name="Llama", dtype=torch.bfloat16, **arguments):
    config_class, more, _ = FAMILIES[name]
    return small_model(config_class, dtype, **more | arguments)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def same(one, other):
    return one.dtype is other.dtype and torch.equal(one, other)


def by_hand(model):
    """A model whose layers are replaced one by one."""
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, torch.nn.Linear):
            owner, _, last = name.rpartition(".")
            setattr(made.get_submodule(owner), last, Int8Linear.from_linear(module))
    return made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_layer_is_replaced(name, dtype, caplog):
    caplog.set_level(logging.INFO, "fusednorm.transformers")
    model = build(name, dtype)
    before, expected = logits(model), logits(by_hand(model))
    report = quantize(model)
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert report.layers == len(layers) == FAMILIES[name][2]
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert same(logits(model), expected)
    assert not same(expected, before)
    assert (expected - before).abs().max() < 0.1 * before.abs().max() + 0.05
    assert f"Linear {report.layers:4}  Int8Linear" in str(report)
    assert str(report) in caplog.text
    replaced = [one for one in layers if not (name in TIED and one is model.get_output_embeddings())]
    assert report.bytes_before == sum(one.weight.numel() for one in replaced) * dtype.itemsize
    assert report.bytes_after == sum(one.weight.numel() + 4 * one.out_features for one in layers)
    steps = [step.operation for step in fusednorm.contract(model).steps]
    assert steps.count("int8_linear") == report.layers


def test_alone_and_among_others():
    """A token's logits do not depend on the batch, with attention by fusednorm too."""
    model = build("Gemma3")
    fusednorm.transformers.patch(model, attention=True)
    quantize(model)
    whole = logits(model)
    assert all(same(logits(model, IDS[i : i + 1])[0], whole[i]) for i in range(len(IDS)))
    assert same(logits(model, IDS[:, :4]), whole[:, :4])


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3"])
@pytest.mark.parametrize("options", [{}, {"products": True, "attention": True}], ids=["steps", "all"])
def test_patched_before_or_afterwards(name, options):
    before, afterwards = build(name), build(name)
    patched = fusednorm.transformers.patch(before, **options)
    quantize(before)
    quantize(afterwards)
    again = fusednorm.transformers.patch(afterwards, **options)
    assert (patched.norms, patched.gates, patched.rotations) == (again.norms, again.gates, again.rotations)
    assert same(logits(before), logits(afterwards))
    fusednorm.transformers.unpatch(before)
    assert sum(isinstance(module, Int8Linear) for module in before.modules()) == FAMILIES[name][2]
    assert before.resize_token_embeddings(96) is before.get_input_embeddings()


@pytest.mark.parametrize("name", FAMILIES)
def test_undone(name):
    model = build(name)
    fusednorm.transformers.patch(model, products=True)
    before, names, config = logits(model), list(model.state_dict()), model.config.to_dict()
    parameters = dict(model.named_parameters())
    fusednorm.transformers.unpatch(model)
    own = logits(model)
    fusednorm.transformers.patch(model, products=True)
    count = quantize(model, keep_weights=True).layers
    assert unquantize(model) == count
    assert same(logits(model), own) or name == "GPT2"  # norms are patched still, products are not
    assert fusednorm.transformers.patch(model, products=True).products == count
    assert same(logits(model), before)
    assert list(model.state_dict()) == names
    assert model.config.to_dict() == config
    assert all(one is parameters[key] for key, one in model.named_parameters())
    fusednorm.transformers.unpatch(model)
    assert type(model) is type(build(name))
    if name in TIED:
        model.tie_weights()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_not_kept():
    model = build()
    with pytest.raises(ValueError, match="but it has no layer in int8; load the model again"):
        unquantize(model)
    quantize(model)
    expected = logits(model)
    with pytest.raises(ValueError, match=r"15 layers were not kept, as model\.layers\.0"):
        unquantize(model)
    assert same(logits(model), expected)


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head(name):
    """The embedding keeps its weight, and the head its numbers, whatever ties weights."""
    model = build(name)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    embedding = model.get_input_embeddings().weight
    quantize(model)
    expected, head = logits(model), model.get_output_embeddings()
    assert model.get_input_embeddings().weight is embedding
    assert model.dtype is torch.bfloat16
    assert head.weight.shape == embedding.shape
    assert head.weight.device == embedding.device
    model.tie_weights()
    if hasattr(model, "all_tied_weights_keys"):  # transformers 5
        model.tie_weights(recompute_mapping=False)
    assert head is model.get_output_embeddings()
    assert head.weight.dtype is torch.int8
    assert same(logits(model), expected)


@pytest.mark.parametrize("name", ["Gemma3", "Llama"])
@pytest.mark.parametrize("size", [96, 80, 112])
def test_resized(name, size):
    model = build(name)
    quantize(model)
    before = logits(model, IDS % 80)
    weight, scale = model.get_output_embeddings().weight.clone(), model.get_output_embeddings().weight_scale.clone()
    embedding = model.resize_token_embeddings(size)
    head, kept = model.get_output_embeddings(), min(size, 96)
    assert embedding.weight.shape == head.weight.shape == (size, 48)
    assert isinstance(head, Int8Linear)
    assert model.config.vocab_size == size
    assert same(head.weight[:kept], weight[:kept])
    assert same(head.weight_scale[:kept], scale[:kept])
    assert same(logits(model, IDS % 80)[..., :kept], before[..., :kept])


def test_a_resize_that_fails():
    model = build()
    quantize(model)
    expected, head = logits(model), model.get_output_embeddings()
    with pytest.raises((TypeError, ValueError)):
        model.resize_token_embeddings("many")
    assert model.get_output_embeddings() is head
    assert same(logits(model), expected)


@pytest.mark.parametrize("name", ["Gemma3", "GPT2"])
def test_copies_and_conversions(name, tmp_path):
    model = build(name)
    quantize(model, keep_weights=True)
    expected, copies = logits(model), [copy.deepcopy(model)]
    if name == "GPT2":  # the `kernels` package puts functions into models with rotations that cannot be pickled
        torch.save(model, tmp_path / "model.pt")
        copies.append(pickle.loads(pickle.dumps(model)))
        copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
    for other in copies:
        assert same(logits(other), expected)
        unquantize(other)
        assert not any(isinstance(module, Int8Linear) for module in other.modules())
        quantize(other)
        assert other.resize_token_embeddings(80).weight.shape == (80, 48)
        assert isinstance(other.get_output_embeddings(), Int8Linear)
    assert same(logits(model), expected)
    head, row = model.get_output_embeddings(), torch.randn(48, dtype=torch.bfloat16)
    scales, expected = head.weight_scale.clone(), head(row)
    for convert in (model.half, model.float, model.bfloat16):
        convert()
        assert logits(model).dtype is model.dtype
        assert same(head.weight_scale, scales)
        assert same(head(row), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3"])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_saved_and_loaded(name, dtype, tmp_path):
    """save_pretrained writes a checkpoint of compressed-tensors, of which quantize takes all numbers as they are."""
    pytest.importorskip("compressed_tensors", reason="the tox environment `transformers` installs it")
    model = build(name, dtype)
    quantize(model, skip="layers.1.mlp.down_proj")
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert same(logits(model), expected)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["quantization_config"]["ignore"] == ["model.layers.1.mlp.down_proj"]
    assert written["tie_word_embeddings"] is False
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.dtype is dtype
    report = quantize(loaded, skip="layers.1.mlp.down_proj")
    assert report.layers == 14
    assert not loaded._forward_pre_hooks  # compressed-tensors', which decompresses layers
    assert same(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with pytest.raises(ValueError, match="keep_weights must be False for a checkpoint of compressed-tensors"):
        quantize(again, keep_weights=True)
    assert quantize(again).layers == 15
    assert not same(logits(again), expected)


def test_checkpoints_that_are_left_alone(tmp_path):
    """Layers that were decompressed, or quantized in another way, keep the numbers of their checkpoint."""
    pytest.importorskip("compressed_tensors", reason="the tox environment `transformers` installs it")
    model = build()
    quantize(model, skip="lm_head")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    own = logits(loaded)
    with pytest.raises(ValueError, match=r"compressed-tensors has decompressed it; load the model again.*lm_head: "):
        quantize(loaded)
    assert same(logits(loaded), own)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["int8"]["input_activations"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="compressed-tensors quantized it in another way"):
        quantize(loaded)


def test_peft():
    """Adapters are refused, on either side; merged ones are not."""
    peft = pytest.importorskip("peft", reason="the tox environment `transformers` installs it")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    with_adapters = peft.get_peft_model(build(), config)
    expected = logits(with_adapters)
    with pytest.raises(ValueError, match=r"no adapters of PEFT.*model = model\.merge_and_unload\(\)"):
        quantize(with_adapters)
    assert same(logits(with_adapters), expected)
    assert quantize(with_adapters.merge_and_unload()).layers == 15
    model = build()
    quantize(model)
    with pytest.raises(ValueError, match=r"(?s)Int8Linear\(.*is not supported"):
        peft.get_peft_model(model, config)


class Reader(torch.nn.Module):
    """Its code takes the dtype of a layer's weight, as T5's does."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.wo(self.wi(x).to(self.wo.weight.dtype))


class Unusual(torch.nn.Linear):
    """A layer that computes something else."""

    def forward(self, x):
        return super().forward(x) + 1


def unusual():
    """Modules with a layer of each kind that is left alone, in an order that the reasons below have."""
    hooked = torch.nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    taken = torch.nn.Linear(8, 8)
    taken.forward = lambda x: x
    shared = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    shared[1].weight = shared[0].weight
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        Reader(),
        hooked,
        taken,
        *shared,
        Unusual(8, 8),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)),
        torch.nn.LazyLinear(8),
        torch.nn.Linear(8, 8, dtype=torch.float64),
        torch.nn.Linear(8, 8, device="meta"),
        torch.nn.MultiheadAttention(8, 2),
    )


REASONS = {
    "1.wo": "the code of Reader reads its weight",
    "2": "it has hooks",
    "3": "something else has replaced its forward pass",
    "4": "its weight is that of 1 other modules too",
    "5": "its weight is that of 1 other modules too",
    "6": "it computes its product in another way than torch.nn.Linear",
    "7": "its weight is computed in each call",
    "8": "its weight has no shape yet",
    "9": "its weight is float64",
    "10": "its weight is elsewhere",
    "11.out_proj": "torch.nn.MultiheadAttention takes its weight",
}


def test_layers_that_are_left_alone():
    model = unusual()
    before = dict(model.named_modules())
    report = quantize(model)
    assert report.layers == 2
    assert [name for name, module in model.named_modules() if isinstance(module, Int8Linear)] == ["0", "1.wi"]
    assert all(model.get_submodule(name) is before[name] for name in REASONS)
    for reason in REASONS.values():
        assert f"left alone: {reason}" in str(report)


def test_a_layer_in_two_places():
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.ModuleDict({"a": layer, "b": torch.nn.Sequential(layer)})
    assert quantize(model).layers == 1
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], Int8Linear)


@torch.no_grad()
def test_nothing_half_done():
    model = build()
    model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: .*finite.*leave it alone, with skip="):
        quantize(model)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert getattr(model.config, "quantization_config", None) is None
    report = quantize(model, skip=["layers.1.mlp.down_proj", "lm_head"])
    assert report.layers == 13
    assert "Linear    2  left alone: skip names it" in str(report)


def test_errors():
    model = build()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        quantize("gemma")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        unquantize("gemma")
    with pytest.raises(ValueError, match="skip must have names of linear layers, or their ends, got 'head'"):
        quantize(model, skip=("lm_head", "head"))
    with pytest.raises(ValueError, match="a linear layer that can be replaced, but it has none"):
        quantize(torch.nn.Sequential(torch.nn.ReLU()))
    with pytest.raises(ValueError, match="can be replaced, but 0: its weight is float64"):
        quantize(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64)))
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    quantize(model)
    expected = logits(model)
    with pytest.raises(ValueError, match=r"quantized already, got one with 15 layers of Int8Linear; .*unquantize"):
        quantize(model)
    assert same(logits(model), expected)
    with pytest.raises(RuntimeError, match="Int8Linear has no gradients, and x requires grad"):
        model(IDS)
    other = build()
    other.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quantized by another library, got one of gptq"):
        quantize(other)


def test_progress(capfd, monkeypatch):
    """A model that takes longer than two seconds shows how far it is."""
    from fusednorm.transformers import quantizing

    slow = quantizing._made_of
    monkeypatch.setattr(quantizing, "_made_of", lambda place: (torch.ones(1), slow(place))[1])
    quantize(build())
    assert "Quantizing" not in capfd.readouterr().err
    monkeypatch.setattr(quantizing, "_made_of", lambda place: (time.sleep(0.15), slow(place))[1])
    quantize(build())
    assert "Quantizing" in capfd.readouterr().err


def test_compiled():
    model = build("Qwen3")
    quantize(model)
    expected = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert same(logits(compiled), expected)
