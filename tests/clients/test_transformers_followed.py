"""A patched model follows each number that patch read from it, and patch does all or nothing."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fusednorm.transformers
from fusednorm.transformers import patching
from fusednorm.transformers.reads import Reads, traced

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

from test_transformers import build, logits  # noqa: E402 - after the line that skips


def set_all(model, name, value):
    """Assigns an attribute of every module that has it."""
    owners = [module for module in model.modules() if hasattr(module, name) and name not in dir(torch.nn.Module)]
    assert owners
    for module in owners:
        setattr(module, name, value)


def of_activations(model, value):
    for module in model.modules():
        if "act_fn" in module._modules:
            module.act_fn = value()


#: A family, and a number of it that is changed.
CHANGES = {
    "eps": ("Llama", lambda model: set_all(model, "variance_epsilon", 0.3)),
    "eps of one norm": ("Llama", lambda model: setattr(model.model.norm, "variance_epsilon", 0.3)),
    "eps by another name": ("Gemma2", lambda model: set_all(model, "eps", 0.3)),
    "the factor of additions": ("Granite", lambda model: set_all(model, "residual_multiplier", 0.7)),
    "the factor of the tables": ("Llama", lambda model: set_all(model, "attention_scaling", 1.5)),
    "eps of heads": ("Qwen3", lambda model: setattr(model.model.layers[1].self_attn.q_norm, "variance_epsilon", 0.3)),
    "the activation": ("Llama", lambda model: of_activations(model, lambda: torch.nn.GELU(approximate="tanh"))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_number_that_was_read_is_followed(change):
    """In one place in memory, because torch's matrix products differ with alignment."""
    name, assign = CHANGES[change]
    model = build(name)
    fusednorm.transformers.patch(model)
    before, values = logits(model), [(m, dict(vars(m)), dict(m._modules)) for m in model.modules()]
    assign(model)
    found = logits(model)
    assert not torch.equal(found, before)
    for module, attributes, children in values:
        module.__dict__.update({key: value for key, value in attributes.items() if isinstance(value, float)})
        module._modules.update(children)
    assert torch.equal(logits(model), before), "changed back, it is as it was"
    fusednorm.transformers.unpatch(model)
    assign(model)
    assert torch.equal(found, logits(model))


def as_it_was(model):
    return [(type(module), sorted(vars(module))) for module in model.modules()]


@pytest.mark.parametrize("where", ["patch_activations", "patch_rotations", "_patch_layers"])
def test_patch_leaves_a_model_whole_when_it_raises(where, monkeypatch):
    model = build("Qwen3")
    before, expected = as_it_was(model), logits(model)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(patching, where, fails)
    with pytest.raises(KeyboardInterrupt):
        fusednorm.transformers.patch(model)
    assert as_it_was(model) == before
    assert torch.equal(logits(model), expected)


class Layers(torch.nn.Module):
    """As x-transformers has them: no module in some places."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.RMSNorm(8), None, torch.nn.ModuleList([None, torch.nn.RMSNorm(8)])])

    def forward(self, x):
        return self.layers[2][1](self.layers[0](x))


def test_lists_with_none():
    model, x = Layers(), torch.randn(3, 8)
    expected = model(x)
    fusednorm.transformers.patch(model)
    # Two norms of 8 elements, whose sums of squares differ by their order alone: 8 units in the last place each.
    assert ((model(x) - expected).abs() <= 16 * 2.0**-24 * expected.abs()).all()


def test_an_instance_that_was_not_patched_runs_its_own_code():
    model = build("Llama", torch.float32)
    own, x = type(model.model.norm)(32), torch.randn(2, 32)
    expected = own(x)
    fusednorm.transformers.patch(model)
    new = type(model.model.norm)(32)
    assert torch.equal(new(x), expected)
    rotary = type(model.model.rotary_emb)(model.config)
    positions = torch.arange(5)[None]
    ours = model.model.rotary_emb(x, positions)
    assert all(torch.equal(a, b) for a, b in zip(rotary(x, positions), ours, strict=True))


def test_a_layer_norm_without_weight_and_bias_is_left_with_a_reason():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8, elementwise_affine=False)

    report = str(fusednorm.transformers.patch(Model()))
    assert "no attribute" not in report


class PoolNorm(torch.nn.Module):
    """A norm by its name, whose operation refuses rows."""

    def forward(self, x):
        return torch.nn.functional.avg_pool2d(x, 2)


def test_torch_logs_no_fault_of_a_trace(capfd):
    report = fusednorm.transformers.patch(torch.nn.Sequential(PoolNorm()))
    assert "PoolNorm    1  left alone" in str(report)
    assert capfd.readouterr().err == ""


def auto_docstring(function):
    """transformers' decorator of this name reads the file around a function, and since 5.24 wraps it."""
    assert "Documented" in Path(function.__code__.co_filename).read_text()
    return functools.wraps(function)(lambda *args: function(*args))


class Documented(torch.nn.Module):
    """A layer whose forward pass has that decorator."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    @auto_docstring
    def forward(self, x, residual):
        y = self.norm(x + residual)
        return 2 * y


@pytest.mark.parametrize(
    "call",
    [
        lambda x, weight: functional.rms_norm(x, (4,), weight, 1e-6),
        lambda x, weight: functional.layer_norm(x, (4,), weight, None, 1e-6),
        lambda x, weight: (x.float().pow_(2).add_(1).to(x.dtype), weight),
        lambda x, weight: x.chunk(2, -1)[1].detach(),
        lambda x, weight: functional.silu(x) * torch.tensor(2.0),
    ],
)
def test_a_trace_has_the_operations_that_make_fx_finds(call):
    x, weight = torch.randn(2, 4).bfloat16(), torch.ones(4).bfloat16()

    def of(graph):
        nodes = [node for node in graph.nodes if node.users or node.op in ("placeholder", "output")]
        for number, node in enumerate(nodes):
            node.name = f"n{number}"
        # Both ways to copy a constant are none that a formula has.
        targets = [str(node.target).replace("fresh_copy", "fresh") * (node.op == "call_function") for node in nodes]
        return [(target, str(node.args), str(node.kwargs)) for target, node in zip(targets, nodes, strict=True)]

    found = traced(call, *[(tuple(t.shape), t.dtype) for t in (x, weight)])
    with FakeTensorMode() as mode, torch.no_grad():
        expected = make_fx(call)(mode.from_tensor(x), mode.from_tensor(weight)).graph
    assert of(found) == of(expected)


def test_a_decorator_that_documents_is_left_out():
    """A layer of SigLIP's and of many vision towers is fused none the less."""
    module, (x, residual) = Documented(), torch.randn(2, 3, 8)
    unfused = copy.deepcopy(module)
    assert fusednorm.transformers.patch(unfused, steps=["norms"]).norms == 1
    assert fusednorm.transformers.patch(module).adds == 1
    assert torch.equal(module(x, residual), unfused(x, residual))


def test_what_each_norm_reads_is_found_without_a_comparison(monkeypatch):
    """Norms that share a trace have shapes and numbers of their own, which are equal but other objects."""
    model = torch.nn.Sequential(*(torch.nn.LayerNorm(8, eps=float(number)) for number in ("1e-5", "1e-5", "1e-5")))
    assert fusednorm.transformers.patch(model).norms == 3
    monkeypatch.setattr(Reads, "hold", None)
    model(torch.randn(2, 8))
