"""Hugging Face models, small and with random weights: patched, they compute what they computed.

Every family runs as transformers builds it from its configuration; nothing is downloaded.
"""

import copy
import importlib
import inspect
import pickle
import sys
import types
import warnings

import pytest
import torch

import fusednorm.transformers
from fusednorm.compat import transformers as gated_norms
from fusednorm.transformers import hub, layers, modules, norms, replacing, rotations
from fusednorm.transformers.reads import LeftAloneError

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

# What transformers deprecates, peft still calls.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

VOCABULARY = 128
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

#: Configuration class, its arguments beside SMALL, norms of the model, and additions fused.
FAMILIES = {
    "Llama": ("LlamaConfig", {}, 7, 3),
    "Mistral": ("MistralConfig", {}, 7, 3),
    "Qwen2": ("Qwen2Config", {}, 7, 3),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}, 13, 3),
    "Gemma": ("GemmaConfig", {"head_dim": 16}, 7, 3),
    "Gemma2": ("Gemma2Config", {"head_dim": 16}, 13, 6),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 16}, 19, 6),
    "Phi3": ("Phi3Config", {}, 7, 3),
    "OLMo2": ("Olmo2Config", {}, 13, 6),  # normalises what it adds
    "GLM4": ("Glm4Config", {"head_dim": 16}, 13, 6),
    "Granite": ("GraniteConfig", {"residual_multiplier": 0.22}, 7, 3),
    "DeepSeek-V3": ("DeepseekV3Config", DEEPSEEK, 13, 3),
}

family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def undone():
    """Undoes what kernels and register_kernels change for the whole process."""
    kernels = pytest.importorskip("kernels", reason="the tox environment `transformers` installs it")
    hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
    token = kernels.layer.globals._KERNEL_MAPPING.set({})
    cached, hub_kernels._KERNEL_MAPPING_CACHE = hub_kernels._KERNEL_MAPPING_CACHE, None
    yield
    kernels.layer.globals._KERNEL_MAPPING.reset(token)
    hub_kernels._KERNEL_MAPPING_CACHE = cached
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            for value in vars(module).values():
                if isinstance(value, torch.nn.Module):  # a function of the model that kernels can replace
                    for key in [key for key in vars(value) if key == "forward" or key.startswith("_fusednorm")]:
                        del value.__dict__[key]
                elif inspect.isclass(value) and vars(value).get("kernel_layer_name") in hub._MLPS.values():
                    del value.kernel_layer_name, value.kernel_condition


def with_random_norms(model):
    """The model, whose vectors, as weights of norms, get random numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def model_of(config_class, arguments, dtype):
    """A model with random weights, also in its norms."""
    config = getattr(transformers, config_class)(**SMALL | arguments)
    torch.manual_seed(0)
    return with_random_norms(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval())


def build(name, dtype=torch.bfloat16):
    config_class, arguments, *_ = FAMILIES[name]
    return model_of(config_class, arguments, dtype)


def tokens(rows=2, length=17):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def patched(model):
    fusednorm.transformers.patch(model)
    return model


def logits(model, **kwargs):
    with torch.no_grad():
        return model(tokens(), **kwargs).logits


@family
def test_families(name):
    """What is replaced, and that in bfloat16, at these seeds, no logit and no token of 64 changes."""
    model = build(name)
    with torch.no_grad():
        before = model(tokens(), output_hidden_states=True)
        generated = model.generate(tokens(), max_new_tokens=64, min_new_tokens=64, do_sample=False)
        report = fusednorm.transformers.patch(model)
        after = model(tokens(), output_hidden_states=True)
        assert torch.equal(model.generate(tokens(), max_new_tokens=64, min_new_tokens=64, do_sample=False), generated)
    assert (report.norms, report.adds) == FAMILIES[name][2:]
    assert all(torch.equal(*states) for states in zip(before.hidden_states, after.hidden_states, strict=True))
    assert torch.equal(before.logits, after.logits)
    fusednorm.transformers.unpatch(model)
    assert torch.equal(logits(model), before.logits)
    assert not any(isinstance(module, replacing.Patched) for module in model.modules())


@family
def test_the_contract_lists_what_is_replaced(name):
    """Each addition, with the factor of Granite's; each norm, gate and rotation (of OLMo 2 by the tables' dtype)."""
    model = build(name)
    report = fusednorm.transformers.patch(model)
    steps = [step.operation for step in fusednorm.contract(model).steps]
    rotations = report.rotations * (2 if name == "OLMo2" else 1)
    assert {operation: steps.count(operation) for operation in ("rms_norm", "add", "scale", "rotate")} == {
        "rms_norm": report.norms,
        "add": report.adds,
        "scale": report.adds if name == "Granite" else 0,
        "rotate": rotations,
    }
    assert sum(operation.endswith("_and_mul") for operation in steps) == report.gates


@family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fusion_changes_nothing(name, dtype, unfused):
    """Logits, loss and all gradients are those of the norms without the additions, bit for bit.

    In bfloat16 only logits and loss: autograd rounds the two gradients that meet at an addition before it adds them,
    the fused backward pass afterwards (docs/spec.md, section 5).
    """
    model = patched(build(name, dtype)).train()
    found = []
    for prepare in (lambda: None, unfused):
        prepare()
        model.zero_grad()
        output = model(tokens(), labels=tokens())
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()] if dtype == torch.float32 else []
        found.append([output.logits, output.loss, *gradients])
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))


@family
def test_additions_are_fused(name, monkeypatch):
    """One call adds and normalises for each addition reported, and no norm is computed twice."""
    calls = {"fused": 0, "norms": 0}

    def count(owner, name, fused, count_of_norms):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            calls["fused"] += fused
            calls["norms"] += 2 * kwargs["norm"] if count_of_norms is None else count_of_norms
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for module in (modules, rotations):  # where C would take the calls before they count
        monkeypatch.setattr(module, "is_dynamo_compiling", lambda: True)
    count(modules, "fused_add_rms_norm", 1, 1)
    count(modules, "rms_norm_add_rms_norm", 1, 2)
    count(modules, "rms_norm_add", 1, 1)
    count(modules, "rms_norm", 0, 1)
    count(rotations, "qk_norm_rope", 0, None)
    logits(patched(build(name)))
    count_of_norms, adds = FAMILIES[name][2:]
    assert calls == {"fused": adds, "norms": count_of_norms}


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_norms_are_as_accurate(name):
    """Each norm beside the one that it replaces, in float32: as derived in docs/spec.md, section 4.

    Both are within (d + 5) units of 2^-24, relative, of the exact result, where d is the depth of the longest chain of
    additions: here at most N = 64 for any order of summation, halved as the root halves it, plus one for an `rsqrt`
    that is off by one more.
    """
    model = build(name, torch.float32)
    fusednorm.transformers.patch(model)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(2)) * 3
    compared = 0
    for module in model.modules():
        if isinstance(module, modules.PatchedNorm):
            before = module._made_of[0].forward(module, x)
            bound = 2 * (64 / 2 + 6) * 2**-24 * before.abs()
            assert ((module(x) - before).abs() <= bound).all()
            compared += 1
    assert compared == FAMILIES[name][2]


def test_each_family_keeps_its_rounding():
    """A norm in bfloat16 with the other rounding differs in many elements, with its own in hardly any."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name in FAMILIES:
        module = next(m for m in patched(build(name)).modules() if isinstance(m, modules.PatchedNorm))
        hidden = x[:, : module.weight.shape[0]].contiguous()
        expected = module._made_of[0].forward(module, hidden)
        form = module._fusednorm.forms[hidden.dtype, module.weight.dtype]

        def differ(round_norm, form=form, hidden=hidden, module=module, expected=expected):
            y = fusednorm.rms_norm(
                hidden, module.weight, form.eps, weight_offset=form.weight_offset, round_norm=round_norm
            )
            return (y != expected).double().mean().item()

        # rstd is off by under 8 * 2^-24, relative, and the limits between bfloat16's numbers are 2^-8 apart: n crosses
        # one in 8 * 2^-16 of all cases on average. Twice that is allowed.
        assert differ(form.round_norm) <= 2 * 8 * 2**-16 < 0.05 < differ(not form.round_norm)


def test_layer_by_hand():
    """The very statements that are replaced, and those that must not be."""

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, scale=1.0):
            residual = hidden_states
            hidden_states = self.first(hidden_states)
            hidden_states = residual + self.work(hidden_states) * scale
            residual = hidden_states
            hidden_states = self.second(hidden_states)
            hidden_states = residual + hidden_states
            return hidden_states  # noqa: RET504

    class Kept(torch.nn.Module):
        def forward(self, hidden_states):
            total = hidden_states + self.work(hidden_states)
            hidden_states = self.second(total)
            return hidden_states, total

    class Other(torch.nn.Module):
        def forward(self, hidden_states):
            total = hidden_states + self.work(hidden_states)
            total = total * 2
            return self.second(total)

    class Normed(torch.nn.Module):
        def forward(self, hidden_states):
            residual = hidden_states
            hidden_states = self.work(hidden_states)
            hidden_states = self.first(hidden_states)
            hidden_states = hidden_states + residual
            residual = hidden_states
            hidden_states = self.work(hidden_states)
            hidden_states = self.second(hidden_states)
            hidden_states = residual + hidden_states
            return hidden_states  # noqa: RET504

    class Twice(torch.nn.Module):
        def forward(self, hidden_states):
            residual = hidden_states
            x = self.first(hidden_states)
            hidden_states = residual + x
            hidden_states = self.second(x)
            return self.work(hidden_states + x)

    class Scaled(torch.nn.Module):
        def forward(self, hidden_states):
            residual = self.first(hidden_states)
            hidden_states = residual * self.alpha + self.work(residual) * self.beta
            hidden_states = self.second(hidden_states)
            return hidden_states + 0.5 * self.work(hidden_states)

    class Own(torch.nn.Module):
        def forward(self, x):
            x = self.first(x)
            x = x * self.alpha + x
            return self.work(x)

    names = frozenset({"first", "second"})
    assert layers.rewritten(Layer, names)[1:] == (("scale",), 0)
    assert layers.rewritten(Kept, names)[1:] == ((None,), 0)
    assert layers.rewritten(Normed, names)[1:] == ((None, None), 2)
    assert layers.rewritten(Normed, frozenset({"first"}))[1:] == ((None,), 1)
    assert layers.rewritten(Scaled, names)[1:] == (("self.beta",), 0)
    for kept, of_norms in ((Layer, frozenset({"first"})), (Other, names), (Twice, names), (Own, names)):
        with pytest.raises(LeftAloneError, match="no addition"):
            layers.rewritten(kept, of_norms)


class Sandwich(torch.nn.Module):
    """A model of one layer that normalises before and after an addition."""

    def __init__(self, first, second):
        super().__init__()
        layer = torch.nn.Module.__new__(SandwichLayer)
        torch.nn.Module.__init__(layer)
        layer.first, layer.second = first, second
        self.layers = torch.nn.ModuleList([layer])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SandwichLayer(torch.nn.Module):
    """The layer."""

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.first(hidden_states.sin())
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.second(hidden_states)
        return hidden_states.cos() + residual


@pytest.mark.parametrize("alike", [True, False])
def test_norms_around_an_addition(alike, monkeypatch):
    """One call takes both, each with its own eps, unless they round in other places."""
    calls, call = [], modules.rms_norm_add_rms_norm
    monkeypatch.setattr(modules, "is_dynamo_compiling", lambda: True)  # where C would take the call before it counts
    monkeypatch.setattr(modules, "rms_norm_add_rms_norm", lambda *args, **kw: calls.append(1) or call(*args, **kw))
    other = Llamas() if alike else torch.nn.RMSNorm(16, 1e-5)
    model = Sandwich(Llamas(), other).bfloat16()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.01
    if alike:
        model.layers[0].second.epsilon = 1e-3
    wanted = model(x)
    assert fusednorm.transformers.patch(model).adds == 1
    assert (model(x) != wanted).float().mean() < 0.01  # torch's mean and rsqrt: see test_each_family_keeps_its_rounding
    assert len(calls) == alike


MAMBA = {"head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1]}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "use_mamba_kernels": False,
}


@pytest.mark.parametrize(("name", "arguments", "adds"), [("Bamba", MAMBA, 3), ("NemotronH", NEMOTRON, 0)])
def test_layers_of_states(name, arguments, adds):
    """Bamba's layers return a sum and weights; Nemotron-H's end with their only addition."""
    model = model_of(f"{name}Config", arguments, torch.bfloat16)
    fusednorm.transformers.patch(model, steps="norms")
    with torch.no_grad():
        wanted = model(tokens(), use_cache=False).logits
        fusednorm.transformers.unpatch(model)
        report = fusednorm.transformers.patch(model, steps=("norms", "additions"))
        assert report.adds == adds
        assert torch.equal(model(tokens(), use_cache=False).logits, wanted)


class Block(torch.nn.Module):
    """A layer as litgpt's: it returns a sum, and its residual has a factor."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.RMSNorm(16, 1e-5), torch.nn.RMSNorm(16, 1e-5)
        self.work, self.alpha, self.beta = torch.nn.Linear(16, 16), 1.5, 0.3

    def forward(self, x, mask=None):
        y = self.work(self.norm_1(x))
        x = x * self.alpha + y * self.beta
        y = self.norm_2(x)
        return self.work(y) + x


class GPT(torch.nn.Module):
    """A model as nanoGPT and litgpt have it, with its layers in a dictionary."""

    def __init__(self):
        super().__init__()
        parts = {"h": torch.nn.ModuleList(Block() for _ in range(3)), "ln_f": torch.nn.RMSNorm(16, 1e-5)}
        self.transformer = torch.nn.ModuleDict(parts)

    def forward(self, x):
        for i, block in enumerate(self.transformer.h):
            if i == 1:  # noqa: SIM108 - as litgpt has it
                x = block(x)
            else:
                x = block(x, None)
        x = self.transformer.ln_f(x)
        return x * 2


def test_layers_in_a_dictionary(unfused):
    torch.manual_seed(0)
    model, x = GPT().bfloat16(), torch.randn(2, 5, 16).bfloat16()
    wanted = model(x)
    report = fusednorm.transformers.patch(model)
    assert (report.norms, report.adds) == (7, 3)
    y = model(x)
    assert (y != wanted).float().mean() < 0.01
    unfused()
    assert torch.equal(model(x), y)
    fusednorm.transformers.unpatch(model)
    assert torch.equal(model(x), wanted)


def t5(kind, dtype):
    """A T5, whose blocks are lists of layers; with three layers in each stack."""
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 1}
    sizes |= {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
    config = getattr(transformers, f"{kind}Config")(**SMALL | sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_layers_in_blocks(kind):
    """Each ends with its only addition, so norms alone are replaced."""
    model = t5(kind, torch.bfloat16)
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(), "use_cache": False}
    with torch.no_grad():
        wanted = model(**inputs).logits
        report = fusednorm.transformers.patch(model, activations=False)
        assert (report.norms, report.adds) == (17, 0)
        assert torch.equal(model(**inputs).logits, wanted)


class Llamas(torch.nn.Module):
    """A norm to break, one way at a time."""

    def __init__(self, change=""):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.change = change
        self.epsilon = 1e-5

    def forward(self, x):
        h = x.to(torch.float32)
        if self.change == "mean":
            h = h - h.mean(0, keepdim=True)
        power = 4 if self.change == "power" else 2
        squares = h.pow(power).mean(0 if self.change == "rows" else -1, keepdim=True)
        root = torch.rsqrt(squares) if self.change == "eps" else torch.rsqrt(squares + self.epsilon)
        n = (h * root).to(torch.float16 if self.change == "half" else x.dtype)
        if self.change == "training" and self.training:
            return n
        return n + self.weight if self.change == "plus" else self.weight * n


@pytest.mark.parametrize("change", ["mean", "power", "rows", "eps", "half", "training", "plus"])
def test_changed_norms_are_left_alone(change):
    model = torch.nn.Sequential(Llamas(change))
    report = fusednorm.transformers.patch(model)
    if change == "half":  # differs in bfloat16 and float32 only
        assert set(model[0]._fusednorm.forms) == {(torch.float16, torch.float16)}
        x = torch.randn(4, 16).bfloat16()
        assert torch.equal(model.bfloat16()(x), Llamas(change).bfloat16()(x))
    else:
        assert (report.norms, type(model[0])) == (0, Llamas)
        assert "left alone" in str(report)


def test_recognised_by_structure():
    model = torch.nn.Sequential(Llamas())
    assert fusednorm.transformers.patch(model).norms == 1
    assert norms.forms(Llamas())[torch.float32, torch.float32] == norms.Form(1e-5, 0.0, False)


def test_report_is_returned_and_logged(caplog, capfd):
    """What was done and undone, the first time and again."""
    caplog.set_level("INFO", "fusednorm.transformers")
    model = build("Llama")
    reports = [fusednorm.transformers.patch(model), fusednorm.transformers.patch(model)]
    reports += [fusednorm.transformers.unpatch(model), fusednorm.transformers.unpatch(model)]
    first, second, undone, nothing = reports
    assert "LlamaRMSNorm" in str(first)
    assert "7 norms replaced, 3 additions, 3 rotations and 3 gates fused" in str(first)
    assert "fusednorm.transformers.unpatch(model)" in str(first)
    assert repr(first) == str(first)
    assert str(second) == "already patched: 7 norms, 3 additions, 3 rotations, 3 gates"
    assert (second.norms, second.adds, second.before) == (0, 0, undone)
    assert (undone.norms, undone.adds) == (7, 3)
    assert (nothing.norms, nothing.adds) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        str(first),
        str(second),
        "put back: 7 norms, 3 additions, 3 rotations, 3 gates",
        "put back: 0 norms, 0 additions, 0 rotations, 0 gates",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert capfd.readouterr().out == ""


def test_a_model_without_a_norm_that_can_be_replaced(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    caplog.clear()
    report = fusednorm.transformers.patch(model)
    assert str(report).endswith("nothing in this model that fusednorm could replace: nothing was changed")
    assert "BatchNorm1d    1  left alone: it has more than a weight and a bias: weight, bias, run" in str(report)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", str(report))


@pytest.mark.parametrize("function", [fusednorm.transformers.patch, fusednorm.transformers.unpatch])
def test_what_is_no_model(function):
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str; .*from_pretrained"):
        function("llama")


def test_torchs_norm_is_probed_without_warnings():
    """Of a weight of another dtype than the input, for one."""
    assert fusednorm.transformers.patch(torch.nn.Sequential(torch.nn.RMSNorm(16))).norms == 1


def test_kernels_without_transformers(monkeypatch):
    for name in ("transformers", "transformers.integrations"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"register_kernels needs transformers .*pip install transformers kernels"):
        fusednorm.transformers.register_kernels()


def test_save_and_load(tmp_path):
    model = patched(build("Llama"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_copies_and_pickles():
    model = patched(build("Llama"))
    expected = logits(model)
    duplicate = copy.deepcopy(model)
    assert sum(isinstance(module, modules.PatchedNorm) for module in duplicate.modules()) == 7
    assert torch.equal(logits(duplicate), expected)
    # The `kernels` package puts functions into the model that cannot be pickled, but not into its norms.
    norm = pickle.loads(pickle.dumps(model.model.norm))
    assert isinstance(norm, modules.PatchedNorm)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(norm(x), model.model.norm(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", ["transformers", "hand"])
def test_gradient_checkpointing(reentrant, by):
    """By transformers, or by somebody who wraps the layers, which do not know of it; in float32, see above."""

    def wrap(layer):
        forward = layer.forward

        def checkpointed(hidden_states, **kwargs):
            return torch.utils.checkpoint.checkpoint(
                lambda h: forward(h, **kwargs), hidden_states, use_reentrant=reentrant
            )

        layer.forward = checkpointed

    found = []
    for checkpointing in (False, True):
        model = patched(build("Llama", torch.float32)).train()
        model.enable_input_require_grads()
        if checkpointing and by == "transformers":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        elif checkpointing:
            for layer in model.model.layers:
                wrap(layer)
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_hooks(grad_mode):
    """Hooks on norms and layers are called, and may change what goes through, in place or not."""

    def run(model, change):
        called = []

        def hook(module, inputs, output):
            called.append(module)
            return change(output)

        handles = [
            model.model.layers[1].register_forward_hook(hook),
            model.model.layers[0].post_attention_layernorm.register_forward_hook(hook),
        ]
        with grad_mode():
            result = model(tokens(), use_cache=False).logits
        for handle in handles:
            handle.remove()
        assert len(called) == 2
        return result

    model = build("Llama")
    changes = [lambda output: output * 2, lambda output: None]
    if grad_mode is not torch.enable_grad:
        changes.append(lambda output: output.mul_(2))
    expected = [run(model, change) for change in changes]
    patched(model)
    for change, result in zip(changes, expected, strict=True):
        assert torch.equal(run(model, change), result)


def test_compiled_training():
    found = []
    for compile_it in (False, True):
        model = patched(build("Llama", torch.float32)).train()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        run(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_exported():
    model = patched(build("Llama")).model
    ids = tokens()
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False})
        assert torch.equal(program.module()(ids, use_cache=False)[0], model(ids, use_cache=False)[0])
    assert any("fusednorm" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("patch_first", [False, True])
def test_device_map(patch_first):
    """accelerate wraps forward passes to move what goes in; it may come before or after."""
    accelerate = pytest.importorskip("accelerate", reason="the tox environment `transformers` installs it")
    model = build("Llama")
    expected = logits(model)

    def dispatch():
        device_map = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        accelerate.hooks.attach_align_device_hook_on_blocks(
            model, execution_device=dict.fromkeys(device_map, "cpu"), offload=dict.fromkeys(device_map, False)
        )
        for module in model.modules():
            if not hasattr(module, "_hf_hook"):
                accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())

    if not patch_first:
        dispatch()
    report = fusednorm.transformers.patch(model)
    if patch_first:
        dispatch()
    assert report.norms == 7
    assert torch.equal(logits(model), expected)
    fusednorm.transformers.unpatch(model)
    assert torch.equal(logits(model), expected)


def test_offloaded(tmp_path):
    """Weights of two layers are on the disk until they are called, and without memory for the layer before them."""
    pytest.importorskip("accelerate", reason="the tox environment `transformers` installs it")
    model = build("Llama")
    model.save_pretrained(tmp_path / "model")
    here = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"], "cpu")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.bfloat16,
        device_map=here | {"model.layers.1": "disk", "model.layers.2": "disk"},
        offload_folder=tmp_path / "disk",
    ).eval()
    assert loaded.model.layers[1].input_layernorm.weight.is_meta
    assert fusednorm.transformers.patch(loaded).norms == 7
    assert torch.equal(logits(loaded), logits(model))


def test_replaced_forward_is_left_alone():
    model = build("Llama")
    model.model.norm.forward = lambda hidden_states: hidden_states
    expected = logits(model)
    report = fusednorm.transformers.patch(model)
    assert report.norms == 6
    assert "something else has replaced its forward pass" in str(report)
    assert torch.equal(logits(model), expected)


def test_lora():
    peft = pytest.importorskip("peft", reason="the tox environment `transformers` installs it")
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], modules_to_save=["input_layernorm"], init_lora_weights=False
    )
    found = []
    for patch in (False, True):
        torch.manual_seed(3)
        model = peft.get_peft_model(build("Llama"), config)
        if patch:
            report = fusednorm.transformers.patch(model)
            assert (report.norms, report.adds) == (10, 3)  # the wrapped norms twice
        found.append(logits(model))
    assert torch.equal(*found)
    model(tokens(), labels=tokens()).loss.backward()
    assert model.base_model.model.model.layers[0].input_layernorm.modules_to_save["default"].weight.grad is not None


def test_kernels():
    """``use_kernels``: transformers' own mapping, on the CPU, for norms that round differently."""
    for name in ("Llama", "OLMo2"):
        model = build(name)
        expected = logits(model)
        with_kernels(model)
        assert model.model.norm.forward.__func__ is hub.RMSNorm.forward
        assert torch.equal(logits(model), expected)
        form, *_ = hub._norm(model.model.norm, torch.ones(1, 64, dtype=torch.bfloat16), hub.forms)
        assert form.round_norm == (name == "Llama")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(tokens(), use_cache=False).logits, expected)


def test_unpatching_in_the_wrong_order():
    model = patched(build("Llama"))
    norm = model.model.norm
    norm.__class__ = type("Changed", (type(norm),), {})
    with pytest.raises(RuntimeError, match="undo what came after"):
        fusednorm.transformers.unpatch(model)
    assert isinstance(model.model.layers[0].input_layernorm, modules.PatchedNorm)


# Models with gates

GATED = {"Qwen3NextRMSNormGated": "qwen3_next", "MambaRMSNormGated": "mamba2", "Zamba2RMSNormGated": "zamba2"}


def theirs(name):
    return getattr(importlib.import_module(f"transformers.models.{GATED[name]}.modeling_{GATED[name]}"), name)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norms_are_theirs(name, dtype):
    """Arguments, state_dict, and values in bfloat16.

    torch's silu, mean and rsqrt have other last bits in float32, so few numbers round to a neighbour, and one that does
    so before a product is off by half a unit more after it. compat/test_compat_gated.py compares the formulas exactly.
    """
    ours = getattr(gated_norms, name)
    for function in ("__init__", "forward"):
        described = [
            [(p.name, p.default, p.kind) for p in inspect.signature(getattr(owner, function)).parameters.values()]
            for owner in (ours, theirs(name))
        ]
        assert described[0] == described[1]
    arguments = (64, 16) if name.startswith("Zamba") else (64,)
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(512, 64, generator=generator).bfloat16() for _ in range(2))
    modules = [owner(*arguments).to(dtype) for owner in (ours, theirs(name))]
    modules[1].load_state_dict(modules[0].state_dict())
    for inputs in ((x, gate), *(((x,),) if "gate=None" in str(inspect.signature(ours.forward)) else ())):
        found, wanted = (module(*inputs).detach() for module in modules)
        assert found.dtype == wanted.dtype
        found, wanted = found.bfloat16(), wanted.bfloat16()
        steps = (found.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
        assert steps.max() <= 2
        assert (steps > 0).float().mean() < 0.002


def test_a_gated_norm_of_float32_rows():
    """Mamba 2's states are in float32, its gate and weight in 16 bits; other dtypes run the module's own code."""
    norm = theirs("MambaRMSNormGated")(64).bfloat16()
    with torch.no_grad():
        norm.weight += 0.1 * torch.randn(64)
    model = torch.nn.Sequential(norm)
    x, gate = (torch.randn(512, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    wanted = norm(x, gate.bfloat16()), norm(x, gate)
    assert fusednorm.transformers.patch(model).norms == 1
    found = norm(x, gate.bfloat16())
    assert found.dtype == torch.float32
    assert not torch.equal(found, wanted[0])
    # All is products, but for a sum of 64 squares, of whose error the root takes half: 32 units of 2^-24 at most in any
    # order. 8 units are enough for the other operations, of which each rounds once, and exp and rsqrt of torch twice.
    torch.testing.assert_close(found, wanted[0], rtol=2 * (32 + 8) * 2.0**-24, atol=0.0)
    assert torch.equal(norm(x, gate), wanted[1])
    flags = {"eps": norm.variance_epsilon, "norm_before_gate": False}
    assert torch.equal(found, fusednorm.rms_norm_gated(x, gate.bfloat16(), norm.weight, **flags))


def test_a_weight_that_gets_one_in_its_own_dtype():
    """As Muse Spark's and litgpt's Gemma: 1 + weight is rounded to 16 bits, and then the row is multiplied by it."""

    class Centered(Llamas):
        def forward(self, x):
            h = x.float()
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.epsilon)
            return (h * (1.0 + self.weight).float()).to(x.dtype)

    norm = Centered().bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16))
    model, x = torch.nn.Sequential(norm), torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted, by_kernels = model(x), hub.RMSNorm.forward(copy.deepcopy(norm), x)
    assert fusednorm.transformers.patch(model).norms == 1
    found = model(x)
    assert torch.equal(found, fusednorm.rms_norm(x, norm.weight + 1.0, norm.epsilon))
    assert torch.equal(found, by_kernels)
    assert (found != wanted).float().mean() < 8 / 65536
    assert (fusednorm.rms_norm(x, norm.weight, norm.epsilon, weight_offset=1.0) != wanted).float().mean() > 0.05


#: Configuration class, its arguments, and the modules that have a gate of ours.
GATES = {
    "Mamba 2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 2, "state_size": 16, "chunk_size": 8},
        2,
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "layer_types": ["linear_attention", "full_attention"],
        },
        3,
    ),
}


FEW = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
FEW |= {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def with_our_gates(model):
    """Replaces gated norms, and silu and its multiplication in MLPs; returns how many."""
    replaced = 0
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind in GATED:
            norm = getattr(gated_norms, kind)(module.weight.shape[0], module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
        elif kind == "Qwen3NextMLP":
            module.forward = types.MethodType(
                lambda self, x: self.down_proj(fusednorm.silu_and_mul(self.gate_proj(x), self.up_proj(x))), module
            )
        else:
            continue
        replaced += 1
    return replaced


def with_kernels(model):
    """The model with transformers' kernels; their warnings concern other layers of the mapping."""
    pytest.importorskip("kernels", reason="the tox environment `transformers` installs it")
    fusednorm.transformers.register_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_use_kernels(True)
    return model


def gated_model(name, dtype):
    """A model of two layers; the kernel of Qwen3-Next's gated norm is in the first."""
    config_class, arguments, _ = GATES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**FEW, **arguments)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def logits_and_gradients(model):
    batch = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    output = model(batch, labels=batch, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [False, True])
def test_kernels_with_gates(training):
    """In bfloat16, at this seed, no logit changes, and hardly a gradient, but for that of the gated norm's weight.

    transformers rounds each row's part of that one before it adds them, fusednorm rounds the sum. All gradients are
    those of fusednorm.compat's module, bit for bit.
    """
    name = "model.layers.0.linear_attn.norm"
    before, expected = logits_and_gradients(gated_model("Qwen3-Next", torch.bfloat16).train(training))
    model = with_kernels(gated_model("Qwen3-Next", torch.bfloat16).train(training))
    assert model.get_submodule(name).forward.__func__ is hub.RMSNormGated.forward
    after, found = logits_and_gradients(model)
    assert torch.equal(before, after)
    differ = {key: int((found[key] != expected[key]).sum()) for key in found if key != f"{name}.weight"}
    assert sum(differ.values()) <= 0.002 * sum(expected[key].numel() for key in differ), differ
    model = gated_model("Qwen3-Next", torch.bfloat16)
    norm = model.get_submodule(name)
    model.set_submodule(name, gated_norms.Qwen3NextRMSNormGated(norm.weight.shape[0], norm.variance_epsilon).bfloat16())
    expected = logits_and_gradients(model)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_norms_that_forget_their_gate_are_no_kernels():
    with pytest.raises(LeftAloneError, match="its result is not a norm and a function of the gate"):
        norms.forms(Ungated(), gated=True)


class Ungated(Llamas):
    """A norm that takes a gate and forgets it."""

    def forward(self, x, gate):
        return super().forward(x)


def losses_with_gates(name, dtype, ours, steps=50):
    """The losses of so many steps of AdamW on one batch of random tokens."""
    model = gated_model(name, dtype)
    assert not ours or with_our_gates(model) == GATES[name][2]
    tokens, history = torch.randint(3, 64, (4, 24)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_training_with_gates(name, dtype):
    """Two layers, 50 steps: ours twice the same bits, and, at this seed, transformers' first loss."""
    before, found, again = (losses_with_gates(name, dtype, ours) for ours in (False, True, True))
    for step in (1, 25, 50):
        print(f"| {name}, {str(dtype)[6:]} | {step} | {before[step - 1]:.6f} | {found[step - 1]:.6f} |")
    assert found == again
    assert found[0] == before[0]
    assert found[-1] < 0.2 * found[0]
