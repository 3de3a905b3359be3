"""Gates in Hugging Face models: norms with a gate, and activations of MLPs; which are recognised, and their values."""

import copy
import dataclasses
import importlib
import pickle

import pytest
import torch

import fusednorm.transformers
from fusednorm.transformers import activations, hub, modules, norms
from fusednorm.transformers.reads import LeftAloneError

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

from test_transformers import build, logits, tokens  # noqa: E402 - after the line that skips
from transformers.activations import ACT2FN  # noqa: E402

F32 = torch.float32

#: Module, class, arguments after the hidden size, and the form in bfloat16.
NORMS = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextRMSNormGated", {}, norms.Form(1e-6, 0.0, True, "silu")),
    "Kimi": ("kimi_linear", "KimiLinearRMSNormGated", {}, norms.Form(1e-6, 0.0, False, "sigmoid", F32)),
    "Mamba 2": ("mamba2", "MambaRMSNormGated", {}, norms.Form(1e-6, 0.0, True, "silu", norm_before_gate=False)),
    "Bamba": ("bamba", "BambaRMSNormGated", {}, norms.Form(1e-6, 0.0, True, "silu", norm_before_gate=False)),
    "Zamba 2": (
        "zamba2",
        "Zamba2RMSNormGated",
        {"group_size": 16},
        norms.Form(1e-6, 0.0, True, "silu", norm_before_gate=False, group_size=16, length=64),
    ),
    "Nemotron-H": (
        "nemotron_h",
        "NemotronHRMSNormGated",
        {"group_size": 32},
        norms.Form(1e-6, 0.0, True, "silu", norm_before_gate=False, group_size=32, length=64),
    ),
    "Falcon-H1, gate first": (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 2, "norm_before_gate": False},
        norms.Form(1e-6, 0.0, False, "silu", norm_before_gate=False, group_size=32, dims=3, length=64),
    ),
    "Falcon-H1, norm first": (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 1},
        norms.Form(1e-6, 0.0, False, "silu", F32, dims=3),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_with_gates(name):
    """The form; one call of ours, compiled and as a kernel too; and values of the model's own code, with torch's exp.

    Bfloat16 has 2^-8 between its numbers, and the float32 results differ by less than 16 units of 2^-24: one rounding
    in 2^12 may fall to the other side, by one number, and the next one once more.
    """
    family, class_name, arguments, form = NORMS[name]
    owner = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), class_name)
    module = owner(64, **arguments).bfloat16()
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(module.weight, generator=generator)
    x, gate = (torch.randn(8, 64, 64, generator=generator).bfloat16() for _ in range(2))
    wanted, model = module(x, gate), torch.nn.Sequential(module)
    kernels = [hub.RMSNormGated.forward(copy.deepcopy(module), x, gate)]
    report = fusednorm.transformers.patch(model)
    assert report.norms == 1
    assert "rms_norm_gated(" in str(report)
    assert module._fusednorm.gated[torch.bfloat16, torch.bfloat16] == form
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x, gate)  # its first call
    y = module(x, gate)
    assert torch.equal(y, fusednorm.rms_norm_gated(x, gate, module.weight, form.eps, **form.of_gate))
    assert torch.equal(kernels[0], y)
    assert torch.equal(compiled, y)
    steps = (y.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert steps.max() <= 2
    assert (steps > 0).float().mean() < 2.0**-9
    (step,) = fusednorm.contract(model).steps
    assert step.operation == "rms_norm_gated"
    own = owner.forward
    for inputs in ((x, gate.float()), (x.double(), gate.double()), (x, gate[:1])):
        for forward in (type(module).forward, hub.RMSNormGated.forward):
            assert torch.equal(forward(module, *inputs), own(module, *inputs))
    if form.norm_before_gate and form.dims is None:
        assert module._fusednorm.gated[torch.bfloat16, F32] == dataclasses.replace(form, between=F32)
    if form.dims == 3:
        assert torch.equal(module(x[0], gate[0]), own(module, x[0], gate[0]))
    fusednorm.transformers.unpatch(model)
    assert type(module) is owner
    assert torch.equal(module(x, gate), wanted)


class Grouped(torch.nn.Module):
    """A norm with a gate to break, one way at a time."""

    def __init__(self, change):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.change = change

    def forward(self, x, gate):
        h = x.float() * (torch.tanh(gate.float()) if self.change == "tanh" else torch.nn.functional.silu(gate.float()))
        if self.change == "twice":
            h = h * torch.nn.functional.silu(gate.float())
        h = h.view(*x.shape[:-1], 4, 4)
        n = h * torch.rsqrt(h.pow(2).mean(-2 if self.change == "across" else -1, keepdim=True) + 1e-5)
        n = n.view(*x.shape[:-1], 1, 16) if self.change == "joined" else n.view(x.shape)
        return self.weight * n.to(x.dtype)


@pytest.mark.parametrize("change", ["tanh", "twice", "across", "joined"])
def test_changed_norms_with_gates_are_left_alone(change):
    assert norms.forms(Grouped(""), gated=True)[torch.bfloat16, torch.bfloat16].group_size == 4
    with pytest.raises(LeftAloneError):
        norms.forms(Grouped(change), gated=True)


class Parts(torch.nn.Module):
    """A norm of parts of rows, without a gate."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16))
        self.size = size

    def forward(self, x):
        h = x.float().reshape(*x.shape[:-1], -1, self.size)
        n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (n.flatten(-2) * (1.0 + self.weight.float())).type_as(x)


def test_norms_of_parts_without_a_gate_are_left_alone():
    """As Qwen4's, unless the part is the whole row."""
    assert norms.forms(Parts(16))[torch.bfloat16, torch.bfloat16] == norms.Form(1e-5, 1.0, False)
    with pytest.raises(LeftAloneError, match="it normalises parts of 4 elements"):
        norms.forms(Parts(4))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", fusednorm.silu_and_mul),
        ("swish", fusednorm.silu_and_mul),
        ("gelu_pytorch_tanh", fusednorm.gelu_tanh_and_mul),
        ("gelu", fusednorm.gelu_and_mul),
        ("relu2", fusednorm.relu2),
        ("gelu_python", None),
        ("gelu_new", None),
        ("relu", None),
        ("quick_gelu", None),
    ],
)
def test_activations_are_recognised_by_what_they_compute(name, function):
    assert activations._FUNCTIONS.get(activations._kind(ACT2FN[name], [])[2]) is function


class Ways(torch.nn.Module):
    """An MLP that multiplies in several ways, and one method that a decorator may replace."""

    def __init__(self, activation):
        super().__init__()
        self.act = activation

    def forward(self, gate, up):
        """Three products of activations."""
        return self.act(gate) * up, up * self.act(gate), (self.act(gate) * up) * self.other(gate, up), self.act(up)

    def other(self, gate, up):
        return self.act(gate) * up

    @torch.no_grad()
    def decorated(self, gate, up):
        return self.act(gate) * up


def test_products(monkeypatch):
    calls, call = [], fusednorm.silu_and_mul
    monkeypatch.setattr(activations, "is_dynamo_compiling", lambda: True)  # where C would take calls before they count
    monkeypatch.setitem(activations._FUNCTIONS, "silu", lambda *args: calls.append(1) or call(*args))
    gate, up = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = Ways(torch.nn.SiLU())
    wanted = module(gate, up)
    report = fusednorm.transformers.patch(module)
    assert report.gates == 1
    found = module(gate, up)
    assert len(calls) == 4
    one = fusednorm.silu_and_mul(gate, up)
    assert all(map(torch.equal, found, (one, one, one * one, torch.nn.functional.silu(up))))
    for y, expected in zip(found, wanted, strict=True):
        assert (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 4
    module.decorated(gate, up)
    assert len(calls) == 4
    for inputs in ((gate.float(), up), (gate, up[:1])):
        assert all(map(torch.equal, module(*inputs), Ways(torch.nn.SiLU())(*inputs)))
    assert len(calls) == 4
    handle = module.act.register_forward_hook(lambda *_: None)
    module(gate, up)
    assert len(calls) == 4
    handle.remove()
    module.act = torch.nn.Tanh()
    assert torch.equal(module(gate, up)[0], torch.tanh(gate) * up)
    assert fusednorm.transformers.unpatch(module).gates == 1
    assert type(module) is Ways


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_compiled_products(name):
    """They have fusednorm's bits too: a compiler never takes two functions of `functools.partial` for the same."""
    gate, up = torch.randn(2, 6, 400, generator=torch.Generator().manual_seed(0))
    module = Ways(ACT2FN[name])
    fusednorm.transformers.patch(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(gate, up), module(gate, up)))


def test_other_activations_are_left_alone():
    module = torch.nn.Sequential(Ways(torch.nn.ReLU()))
    report = fusednorm.transformers.patch(module)
    assert report.gates == 0
    assert "Ways    1  left alone: its activation is none of fusednorm's" in str(report)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Phi3", "DeepSeek-V3"])
def test_mlps(name):
    """Each MLP, and each set of experts, is one call; in copies and pickles too; ``activations=False`` leaves them."""
    model = build(name)
    wanted = logits(model)
    assert fusednorm.transformers.patch(model, activations=False).gates == 0
    fusednorm.transformers.unpatch(model)
    report = fusednorm.transformers.patch(model)
    assert report.gates == (5 if name == "DeepSeek-V3" else 3)
    assert torch.equal(logits(model), wanted)  # at this seed
    again = copy.deepcopy(model)
    assert sum(isinstance(module, activations.PatchedActivations) for module in again.modules()) == report.gates
    assert torch.equal(logits(again), wanted)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(pickle.loads(pickle.dumps(mlp))(x), mlp(x))
    steps = [step.operation for step in fusednorm.contract(model).steps]
    assert steps.count("gelu_tanh_and_mul" if name == "Gemma2" else "silu_and_mul") == report.gates
    model.train()(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), 2])
def test_factors_of_additions(scale):
    """A number is a factor of the fused call; a tensor multiplies by torch."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.RMSNorm(16)
            self.scale = scale

        def forward(self, hidden_states):
            residual = hidden_states
            hidden_states = residual + hidden_states.sin() * self.scale
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
            return hidden_states, residual

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer()])

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model, x = Model().bfloat16(), torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = x + x.sin() * scale
    assert fusednorm.transformers.patch(model).adds == 1
    y, found = model.layers[0](x)
    assert torch.equal(found, total)
    assert torch.equal(y, model.layers[0].norm(total))
    fused = modules._added(model.layers[0].norm, x, x, None, scale)
    assert (fused is None) == isinstance(scale, torch.Tensor)
