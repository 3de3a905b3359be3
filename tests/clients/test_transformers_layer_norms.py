"""Hugging Face models with LayerNorms, small and with random weights: patched, they compute what they computed.

torch's LayerNorm takes mean and variance in one pass (Welford's), fusednorm's in two, each sum in the order of its
specification: so float32 differs in its last bits, as ``layer_norm_bound`` derives, and 16 bits where such a bit
decides a rounding. Everything else is kept bit for bit: additions, fused or not, and all roundings.
"""

import pytest
import torch

import fusednorm.transformers
from fusednorm.transformers import layers, modules, norms
from fusednorm.transformers.reads import LeftAloneError

from compat_bounds import layer_norm_bound

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

from test_transformers import with_random_norms  # noqa: E402 - after the line that skips

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_STACKS = {
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 1,
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 50}

#: Configuration class, its arguments beside SMALL, norms of the model, and additions fused; and calls beyond those
#: counted: positions that are broadcast are the model's to add, and of the branches of an ``if`` the one with fewer
#: additions counts.
FAMILIES = {
    "BERT": ("BertConfig", {}, 7, 7, -1),
    "RoBERTa": ("RobertaConfig", {}, 7, 7, 0),
    "DistilBERT": ("DistilBertConfig", {"dim": 64, "hidden_dim": 128, "n_layers": 3, "n_heads": 4}, 7, 7, -1),
    "BART": ("BartConfig", TWO_STACKS, 17, 14, 2),
    "ModernBERT": ("ModernBertConfig", {"cls_token_id": 1, "sep_token_id": 2}, 7, 3, 0),
    "Whisper": ("WhisperConfig", TWO_STACKS | WHISPER, 17, 6, 3),
    "ViT": ("ViTConfig", {"image_size": 16, "patch_size": 4}, 7, 3, 0),
    "GPT-NeoX": ("GPTNeoXConfig", {}, 7, 0, 0),
    "GPT-2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}, 7, 3, 0),
    "Cohere": ("CohereConfig", {"num_key_value_heads": 2}, 4, 0, 0),
    "Nemotron": ("NemotronConfig", {"num_key_value_heads": 2, "head_dim": 16}, 7, 3, 0),
}

family = pytest.mark.parametrize("name", FAMILIES)


def build(name, dtype=torch.bfloat16, **arguments):
    config_class, others, *_ = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SMALL | others | arguments)
    return with_random_norms(transformers.AutoModel.from_config(config).to(dtype).eval())


def result(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (2, 17), generator=generator)
    match type(model).__name__:
        case "WhisperModel":
            sound = torch.randn(2, 8, 100, generator=generator).to(model.dtype)
            inputs = {"input_features": sound, "decoder_input_ids": ids}
        case "ViTModel":
            inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)}
        case _:
            inputs = {"input_ids": ids}
    return model(**inputs).last_hidden_state


@family
def test_families(name):
    """What is replaced; in bfloat16 few elements change, at these seeds, and then by few steps."""
    model = build(name)
    with torch.no_grad():
        before = result(model)
        report = fusednorm.transformers.patch(model, activations=False)
        after = result(model)
    assert (report.norms, report.adds) == FAMILIES[name][2:4]
    assert (before != after).double().mean() < 0.01
    assert (before.double() - after.double()).abs().max() <= 2.0**-6 * before.abs().max()
    steps = [step.operation for step in fusednorm.contract(model).steps]
    assert (steps.count("layer_norm"), steps.count("add")) == (report.norms, report.adds)
    fusednorm.transformers.unpatch(model)
    with torch.no_grad():
        assert torch.equal(result(model), before)


@family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fusion_changes_nothing(name, dtype, unfused):
    """Results, and in float32 all gradients, are those of the norms without the additions, bit for bit."""
    model = build(name, dtype)
    fusednorm.transformers.patch(model, activations=False)
    found = []
    for prepare in (lambda: None, unfused):
        prepare()
        model.zero_grad()
        y = result(model)
        y.float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()] if dtype == torch.float32 else []
        found.append([y, *gradients])
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))


@family
def test_additions_are_fused(name, monkeypatch):
    """One call adds and normalises for each addition reported, and no norm is computed twice."""
    calls = {"fused_add_layer_norm": 0, "layer_norm": 0}

    def counted(function):
        def call(*args, **kwargs):
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(modules, "is_dynamo_compiling", lambda: True)  # where C would take the calls before they count
    for function in calls:
        monkeypatch.setattr(modules, function, counted(getattr(modules, function)))
    model = build(name)
    fusednorm.transformers.patch(model, activations=False)
    with torch.no_grad():
        result(model)
    _, _, count, adds, beyond = FAMILIES[name]
    assert calls == {"fused_add_layer_norm": adds + beyond, "layer_norm": count - adds - beyond}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["BERT", "Cohere", "Nemotron"])
def test_norms_are_as_accurate(name, dtype):
    """Each norm beside the one that it replaces."""
    model = build(name, dtype)
    fusednorm.transformers.patch(model)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(2)).to(dtype) * 3 + 1
    compared = 0
    for module in model.modules():
        if isinstance(module, modules.PatchedNorm):
            before, form = module._made_of[0].forward(module, x), module._fusednorm.forms[x.dtype, module.weight.dtype]
            weight = module.weight.double() + form.weight_offset + form.added
            bound = layer_norm_bound(x, weight, getattr(module, "bias", None), form.eps, before)
            assert ((module(x).double() - before.double()).abs() <= bound).all()
            compared += 1
    assert compared == FAMILIES[name][2]


def test_nemotron_adds_one_in_the_weights_dtype():
    model = build("Nemotron")
    fusednorm.transformers.patch(model)
    norm, x = model.norm, torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = type(norm)._made_of[0].forward(norm, x)
    other = fusednorm.layer_norm(x, norm.weight, norm.bias, norm.eps, weight_offset=1.0)
    assert (norm(x) != expected).double().mean() < 0.01
    assert (other != expected).double().mean() > 0.05


def test_autocast_runs_the_models_own_code():
    """torch converts the operands of some LayerNorms then, and Nemotron's own code those of its."""
    model = build("Nemotron", torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = result(model)
        fusednorm.transformers.patch(model)
        assert torch.equal(result(model), expected)


class Norm(torch.nn.Module):
    """A LayerNorm to break, one way at a time."""

    def __init__(self, change=""):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.rand(16)) for _ in range(2))
        if change in ("of squares", "by mean"):
            self.bias = None
        self.change = change

    def forward(self, x):
        weight, bias, row = self.weight, self.bias, (16,)
        match self.change:
            case "no bias":
                bias = None
            case "no weight":
                weight = bias = None
            case "swapped":
                weight, bias = bias, weight
            case "shape":
                x, row = x.unflatten(-1, (1, 16)), (1, 16)
                weight, bias = weight[None], bias[None]
            case "twice":
                x = torch.nn.functional.layer_norm(x, row)
            case "mean":
                return torch.native_layer_norm(x, row, weight, bias, 1e-5)[1].expand_as(x)
            case "of squares":
                d = x.float() - x.float().mean(-1, keepdim=True)
                rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
                return (d * rstd * weight.float()).to(x.dtype)
            case "by mean":
                h = x.float()
                return ((h - h.square().mean(-1, keepdim=True)) * weight.float()).to(x.dtype)
        y = torch.nn.functional.layer_norm(x, row, weight, bias)
        return y.flatten(-2) if self.change == "shape" else y


def test_changed_norms_are_left_alone():
    assert norms.forms(Norm())[torch.float32, torch.float32] == norms.Form(1e-5, 0.0, False, center=True)
    for change in ("no bias", "no weight", "swapped", "shape", "twice", "mean", "of squares", "by mean"):
        with pytest.raises(LeftAloneError):
            norms.forms(Norm(change))


def test_a_float32_norm_of_16_bits_rounds_once():
    """As models have it that convert rows themselves."""

    class Wide(torch.nn.LayerNorm):
        def forward(self, x):
            y = torch.nn.functional.layer_norm(x.float(), (16,), self.weight.float(), self.bias.float(), self.eps)
            return y.type_as(x)

    model = torch.nn.Sequential(Wide(16)).bfloat16()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = model(x)
    assert fusednorm.transformers.patch(model).norms == 1
    assert (model(x) != expected).double().mean() < 0.01


def test_layers_by_hand():
    """Norms of sums, norms that another call takes at once, and branches: the statements that are replaced."""

    class Post(torch.nn.Module):
        def forward(self, x, residual):
            x = self.first(x + residual)
            residual = x
            x = self.work(x)
            x = residual + x
            x = self.second(x)
            return x  # noqa: RET504

    class Nested(torch.nn.Module):
        def forward(self, x):
            y = self.work(self.first(x))
            x = x + y
            x = x + self.work(self.second(x), scale=self.work(x))
            return x  # noqa: RET504

    class Later(torch.nn.Module):
        def forward(self, x):
            x = x + self.work(x)
            return self.work(x) + self.second(x)

    class Maybe(torch.nn.Module):
        def forward(self, x):
            x = x + self.work(x)
            return self.work(self.second(x) if self.training else x)

    class Branches(torch.nn.Module):
        def forward(self, x):
            if self.parallel:
                y = self.work(self.first(x))
                x = self.work(x) + y + x
            else:
                x = x + self.work(x)
                x = x + self.work(self.second(x))
            return x

    class Before(torch.nn.Module):
        def forward(self, x, states):
            x = x + self.work(x)
            if states is not None:
                y = self.first(x)
                x = x + self.work(y)
            return x + self.work(self.second(x))

    class Limited(torch.nn.Module):
        def forward(self, x, weights):
            x = x + self.work(x)
            if x.dtype == torch.float16:
                x = x.clamp(-60000, 60000)
            outputs = (x,)
            if weights is not None:
                outputs += (weights,)
            return outputs

    class Decided(torch.nn.Module):
        def forward(self, x):
            x = x + self.work(x)
            if x.sum() > 0:
                x = self.first(x)
            return x

    class Ends(torch.nn.Module):
        def forward(self, x):
            if self.training:
                y = self.work(x)
                x = self.work(y)
            else:
                x = x + self.work(x)
            x = self.first(x)
            return self.work(x)

    class Tuples(torch.nn.Module):
        def forward(self, x, others):
            others = (x,) + others  # noqa: RUF005 - as models have it
            return others  # noqa: RET504

    names = frozenset({"first", "second"})
    assert layers.rewritten(Before, names)[1:] == ((None,), 0)
    assert layers.rewritten(Post, names)[1:] == ((None, None), 0)
    assert layers.rewritten(Nested, names)[1:] == ((None,), 0)
    assert layers.rewritten(Branches, names)[1:] == layers.rewritten(Ends, names)[1:] == ((), 0)
    for kept in (Later, Maybe, Limited, Decided, Tuples):
        with pytest.raises(LeftAloneError, match="no addition"):
            layers.rewritten(kept, names)


@pytest.mark.parametrize("parallel", [True, False])
def test_both_branches(parallel, unfused):
    """GPT-NeoX adds in one branch or in the other."""
    model = build("GPT-NeoX", torch.float32, use_parallel_residual=parallel)
    fusednorm.transformers.patch(model, activations=False)
    with torch.no_grad():
        y = result(model)
        unfused()
        assert torch.equal(result(model), y)


def test_layers_compile_in_one_graph():
    model = build("BERT", torch.float32)
    fusednorm.transformers.patch(model, activations=False)
    with torch.no_grad():
        expected = result(model)
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
        assert torch.equal(result(model), expected)
