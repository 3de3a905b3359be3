"""transformers' sockets for kernels on a CPU: activations, gated MLPs and rotations, and the folder that kernels loads.

tests/clients/test_transformers.py has those for norms. Models are small, with random weights; nothing is downloaded.
"""

import contextlib
import copy
import importlib
import json
import pkgutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, silu

import fusednorm.transformers
from fusednorm.transformers import hub, mlps, rotations
from fusednorm.transformers.reads import LeftAloneError, Reads

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")
kernels = pytest.importorskip("kernels", reason="the tox environment `transformers` installs it")

import test_transformers  # noqa: E402 - after the lines that skip
from test_transformers import undone  # noqa: E402, F401 - used by all tests here
from transformers import activations  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

SMALL = test_transformers.SMALL | {"vocab_size": 64, "num_hidden_layers": 2}
BF16, F32 = torch.bfloat16, torch.float32


def model_of(config, dtype=BF16, **more):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformers, f"{config}Config")(**SMALL, **more)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)


def use_kernels(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_use_kernels(True)
    return model


def with_kernels(model):
    fusednorm.transformers.register_kernels(model)
    return use_kernels(model)


def replaced(model):
    """How many modules of the model have each layer's forward pass; and the model's functions that have one."""
    found = {}
    functions = {id(f): f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()}
    for module in (*model.modules(), *functions.values()):
        name = getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__qualname__", "").partition(".")[0]
        if hasattr(hub, name):
            found[name] = found.get(name, 0) + 1
    return found


def outputs_and_gradients(model):
    batch = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    output = model(batch, labels=batch)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


#: The layers of a model of two.
FAMILIES = {
    "Llama": ({}, {"RMSNorm": 5, "SwiGLUMLP": 2, "SiLU": 2, "RotaryPosEmb": 1}),
    "Qwen3": ({"head_dim": 16}, {"RMSNorm": 9, "SwiGLUMLP": 2, "SiLU": 2, "RotaryPosEmb": 1}),
    "Gemma2": ({"head_dim": 16}, {"SwiGLUMLP": 2, "SiLU": 2, "RotaryPosEmb": 1}),
    "Phi3": ({}, {"RMSNorm": 5, "SwiGLUMLP": 2, "SiLU": 2}),
    "Cohere": ({}, {"SwiGLUMLP": 2, "SiLU": 2}),
    "Granite": ({}, {"RMSNorm": 5, "SwiGLUMLP": 2, "SiLU": 2, "RotaryPosEmb": 1}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family):
    """In bfloat16, at this seed, no logit changes. A gradient does where a gate's derivative is rounded once.

    torch rounds silu's derivative times the gradient to bfloat16 as fusednorm does, and autograd the product's; only
    the gradients of norms' weights differ more (tests/clients/test_transformers.py says why).
    """
    more, layers = FAMILIES[family]
    logits, gradients = outputs_and_gradients(model_of(family, **more))
    model = with_kernels(model_of(family, **more))
    assert replaced(model) == layers
    found, others = outputs_and_gradients(model)
    assert torch.equal(logits, found)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        if "norm" not in name:
            assert (gradient != others[name]).float().mean() < 0.02, name
    tokens = torch.tensor([[5, 9, 17]])
    # With the cache: one token, and tables of one row.
    assert torch.equal(
        model.generate(tokens, max_new_tokens=8, do_sample=False),
        model_of(family, **more).generate(tokens, max_new_tokens=8, do_sample=False),
    )


def test_without_a_model_no_mlp_is_named():
    model = model_of("Llama")
    fusednorm.transformers.register_kernels()
    assert "SwiGLUMLP" not in replaced(use_kernels(model))
    assert not hasattr(type(model.model.layers[0].mlp), "kernel_layer_name")


def test_mlps_are_named_for_cpus():
    """Liger's kernels, which transformers maps to the same names, stay away from models on a GPU."""
    fusednorm.transformers.register_kernels(model := model_of("Llama"))
    kind = type(model.model.layers[0].mlp)
    assert kind.kernel_layer_name == "SwiGLUMLP"
    assert kind.kernel_condition(model.model.layers[0].mlp)
    assert not kind.kernel_condition(copy.deepcopy(model.model.layers[0].mlp).to("meta"))
    fusednorm.transformers.register_kernels(gemma := model_of("Gemma2", head_dim=16))
    assert type(gemma.model.layers[0].mlp).kernel_layer_name == "GeGLUMLP"


# MLPs


@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3"])
def test_bits_of_mlps(family, dtype):
    """Forward and backward they are those of silu_and_mul or gelu_tanh_and_mul between the MLP's linear layers."""
    module = model_of(family).model.layers[0].mlp.to(dtype)
    x = torch.randn(3, 5, 64).to(dtype).requires_grad_()
    found = hub.SwiGLUMLP.forward(module, x)
    form = mlps.mlp(module)
    z, y = (module.gate_up_proj(x), None) if form.up is None else (module.gate_proj(x), module.up_proj(x))
    function = fusednorm.gelu_tanh_and_mul if family == "Gemma2" else fusednorm.silu_and_mul
    expected = module.down_proj(function(z, y))
    assert torch.equal(found, expected)
    wanted = [x, *module.parameters()]
    d = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(result, wanted, d) for result in (found, expected)), strict=True):
        assert torch.equal(one, other)
    # The model's own code rounds at the same places: 16 bits hide nearly all of what exp's last bits change.
    own = type(module).forward(module, x)
    bound = 4 if dtype in (F32, torch.float64) else 2  # units of the greatest result, seen 1
    assert (found - own).abs().max() <= bound * torch.finfo(dtype).eps * own.abs().max()


class Recorded(torch.nn.Module):
    """A gated MLP whose forward pass is given, and counts."""

    def __init__(self, forward, act=None):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(8, 8, bias=False)
        self.act = act or torch.nn.SiLU()
        self.function, self.calls = forward, 0

    def forward(self, x):
        if not isinstance(x, torch.fx.Proxy):
            self.calls += 1
        return self.function(self, x)


#: Forward passes that are none of fusednorm's, and why not.
OTHERS = {
    "three factors": (lambda m, x: m.down(m.act(m.gate(x)) * m.up(x) * 2), "has no place"),
    "the activation after the product": (lambda m, x: m.down(m.act(m.gate(x) * m.up(x))), "has no place"),
    "no last layer": (lambda m, x: m.act(m.gate(x)) * m.up(x), "not that of a last submodule"),
    "a sum": (lambda m, x: m.down(m.act(m.gate(x)) + m.up(x)), "has no place"),
    "the second half activated": (
        lambda m, x: m.down(m.gate(x).chunk(2, -1)[0] * m.act(m.gate(x).chunk(2, -1)[1])),
        "has no place",
    ),
    "quarters": (lambda m, x: m.down(m.act(m.gate(x).chunk(4, -1)[0]) * m.gate(x).chunk(4, -1)[1]), "has no place"),
    "a way that depends on x": (lambda m, x: m.down(x if x.sum() > 0 else m.up(x)), "cannot be traced"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mlps_run_their_own_code(name):
    function, reason = OTHERS[name]
    module = Recorded(function)
    with pytest.raises(LeftAloneError, match=reason):
        mlps.mlp(module)
    x = torch.randn(3, 8)
    with contextlib.suppress(RuntimeError):  # some are not even possible
        assert torch.equal(hub.SwiGLUMLP.forward(module, x), module.function(module, x))
    assert module.calls == 1


def test_products_in_either_order():
    for function in (lambda m, x: m.down(m.up(x) * m.act(m.gate(x))), lambda m, x: m.down(m.act(m.gate(x)) * m.up(x))):
        assert mlps.mlp(Recorded(function)) == mlps.MLP("gate", "up", "act", "down", "silu")


@pytest.mark.parametrize("act", [torch.nn.GELU(), torch.nn.ReLU(), torch.nn.Sigmoid(), torch.nn.PReLU()], ids=str)
def test_other_activations_run_their_own_code(act):
    module, x = Recorded(lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)), act), torch.randn(3, 8)
    with pytest.raises(LeftAloneError, match="no layer has this gate" if "GELU" in str(act) else "act has no place"):
        hub._mlp(module, Reads())
    assert torch.equal(hub.SwiGLUMLP.forward(module, x), module.function(module, x))
    assert module.calls == 1


def test_what_hangs_on_the_activation_is_called():
    """A hook, and a forward pass of others: the MLP runs its own code. A layer of ours there changes nothing."""
    module, x = Recorded(lambda m, x: m.down(m.act(m.gate(x)) * m.up(x))), torch.randn(3, 8)
    hub.SwiGLUMLP.forward(module, x)
    module.act.forward = hub.SiLU.forward.__get__(module.act)
    hub.SwiGLUMLP.forward(module, x)
    assert module.calls == 0
    seen = []
    hook = module.act.register_forward_hook(lambda *_: seen.append(1))
    hub.SwiGLUMLP.forward(module, x)
    hook.remove()
    assert (module.calls, seen) == (1, [1])
    module.act.forward = torch.relu
    assert torch.equal(hub.SwiGLUMLP.forward(module, x), module.down(torch.relu(module.gate(x)) * module.up(x)))
    assert module.calls == 2


def test_submodules_of_several_dtypes():
    """A gate of bfloat16 and rows of float32: torch multiplies them in float32, after the activation is rounded."""
    module = Recorded(lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)))

    class Halved(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).bfloat16()

    module.gate, x = Halved(8, 8), torch.randn(3, 8)
    assert torch.equal(hub.SwiGLUMLP.forward(module, x), module.function(module, x))
    assert module.calls == 0


# Activations


@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32, torch.float64], ids=str)
def test_activations(dtype):
    """fusednorm's bits, forward and backward; torch's rounding places, so that 16 bits differ in few elements."""
    for made, name, own in (
        (activations.ACT2FN["silu"], "silu", silu),
        (activations.ACT2FN["gelu_pytorch_tanh"], "gelu_tanh", lambda z: gelu(z, approximate="tanh")),
    ):
        z = (torch.randn(7, 33) * 4).to(dtype).requires_grad_()
        found = hub.SiLU.forward(made, z)
        expected = fusednorm.gate(torch.ones_like(z), z, activation=name)
        assert torch.equal(found, expected)
        d = torch.randn_like(z)
        assert torch.equal(*(torch.autograd.grad(y, z, d)[0] for y in (found, expected)))
        # torch's tanh and exp have an error of some 2^-24, which the sum with 1 keeps where the result is small.
        bound = torch.finfo(dtype).eps * own(z).abs() + z.abs() * (2.0**-50 if dtype == torch.float64 else 2.0**-22)
        assert ((found - own(z)).abs() <= bound).all()


def test_activations_that_run_their_own_code():
    python = activations.GELUTanh(use_gelu_tanh_python=True)
    z = torch.randn(5, 8)
    assert torch.equal(hub.GeluTanh.forward(python, z), python(z))
    made = activations.ACT2FN["silu"]
    for other in (torch.randn(()), torch.randn(3).to(torch.complex64)):
        assert torch.equal(hub.SiLU.forward(made, other), silu(other))
    assert hub.SiLU.forward(made, torch.empty(0, 4)).shape == (0, 4)
    assert mlps.activation_of(torch.nn.Linear(3, 3)) is None


# Rotations


def rotating_functions():
    """The functions of transformers with that socket, each source once; by the name of a module that has it."""
    by_source = {}
    for one in pkgutil.iter_modules(importlib.import_module("transformers.models").__path__):
        path = f"transformers.models.{one.name}.modeling_{one.name}"
        spec = importlib.util.find_spec(path) if one.ispkg else None
        text = "" if spec is None else Path(spec.origin).read_text(encoding="utf-8")
        if '@use_kernel_forward_from_hub("rotary_pos_emb")' in text:
            parts = [part.partition("\n\n\n")[0] for part in text.split("\ndef ")[1:]]
            wanted = ("apply_rotary_pos_emb(", "rotate_half(")
            source = "".join(part for part in parts if part.startswith(wanted))
            by_source.setdefault("".join(source.split()), path)
    return sorted(by_source.values())


@pytest.fixture
def calls(monkeypatch):
    """The rotations that fusednorm computes: whether each rounds products."""
    seen, rotate = [], rotations.qk_norm_rope
    monkeypatch.setattr(rotations, "is_dynamo_compiling", lambda: True)  # where C would take calls before they count
    monkeypatch.setattr(rotations, "qk_norm_rope", lambda *a, **k: seen.append(k["round_products"]) or rotate(*a, **k))
    return seen


#: Those whose trace shows something else.
NOT_OURS = {"nanochat"}


@pytest.mark.parametrize("path", rotating_functions())
def test_bits_of_rotations(path, calls):
    """Of q and k, and of their gradients: the function's own, for every function of transformers with this socket.

    Where a function of heads of 16 bits computes in float32, autograd may still round the gradient of each product, and
    their sum; fusednorm rounds once.
    """
    function = importlib.import_module(path).apply_rotary_pos_emb
    own = type(function).forward
    for dtype, table in ((BF16, BF16), (F32, F32), (torch.float16, torch.float16), (BF16, F32)):
        for dim, size, columns in ((1, 16, 2), (2, 16, 2), (1, 12, 2), (1, 16, 0), (1, 16, 1)):
            torch.manual_seed(0)
            shapes = ((2, 4, 5, 16), (2, 2, 5, 16)) if dim == 1 else ((2, 5, 4, 16), (2, 5, 2, 16))
            q, k = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
            angles = [torch.randn(1, 5, size // 2).to(table) for _ in range(2)]
            cos, sin = ((t.repeat_interleave(2, -1), t, torch.cat([t, t], -1))[columns] for t in angles)
            try:
                expected = own(function, q, k, cos, sin, unsqueeze_dim=dim)
            except (RuntimeError, IndexError):  # not all take tables that are narrower than heads
                with pytest.raises((RuntimeError, IndexError)):
                    hub.RotaryPosEmb.forward(function, q, k, cos, sin, dim)
                continue
            found = hub.RotaryPosEmb.forward(function, q, k, cos, sin, dim)
            assert [torch.equal(*both) for both in zip(found, expected, strict=True)] == [True, True]
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            d = [torch.randn_like(x) for x in expected]
            gradients = (torch.autograd.grad(results, (q, k), d) for results in (found, expected))
            for one, other in zip(*gradients, strict=True):
                if dtype == F32 or (calls and calls[-1]):
                    assert torch.equal(one, other)
                else:  # a rounding of each product, of the sum, and ours: half a unit of values below 16 each
                    assert (one - other).abs().max() <= 4 / 2 * 2.0**-4
    assert (len(calls) >= 3) == (path.rpartition("_")[2] not in NOT_OURS)


@pytest.fixture
def llama():
    return importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb


def heads_and_tables(batch=2):
    cos, sin = (torch.cat([t, t], -1) for t in torch.randn(2, 1, 5, 8))
    return torch.randn(batch, 4, 5, 16), torch.randn(batch, 2, 5, 16), cos, sin


def check_rotation(function, operands, calls, *, taken):
    before = len(calls)
    found = hub.RotaryPosEmb.forward(function, *operands)
    expected = type(function).forward(function, *operands)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    assert len(calls) - before == taken


def test_tables_are_looked_at_once(llama, calls, monkeypatch):
    """And again after a write, and in inference mode, which counts no writes."""
    q, k, cos, sin = heads_and_tables()
    hub.RotaryPosEmb.forward(llama, q, k, cos.clone(), sin)  # the trace of the function
    looks, equal = [], torch.equal
    with monkeypatch.context() as context:
        context.setattr(torch, "equal", lambda *both: looks.append(1) or equal(*both))
        for _ in range(3):
            hub.RotaryPosEmb.forward(llama, q, k, cos, sin)
    assert (len(looks), len(calls)) == (2, 4)  # of cos and of sin
    cos[0, 0, 0] += 1.0  # the halves differ now
    check_rotation(llama, (q, k, cos, sin), calls, taken=0)
    check_rotation(llama, (q, k, cos, sin), calls, taken=0)
    cos[0, 0, 0] -= 1.0
    check_rotation(llama, (q, k, cos, sin), calls, taken=1)
    with torch.inference_mode():
        q, k, cos, sin = heads_and_tables()
        check_rotation(llama, (q, k, cos, sin), calls, taken=1)
        sin[0, 0, 0] += 1.0
        check_rotation(llama, (q, k, cos, sin), calls, taken=0)


def test_calls_that_run_the_function(llama, calls):
    q, k, cos, sin = heads_and_tables()
    check_rotation(llama, (q, k, cos.expand(2, 5, 16), sin.expand(2, 5, 16)), calls, taken=1)
    check_rotation(llama, (q, k[..., :1, :], cos[:, :1], sin[:, :1]), calls, taken=0)  # which torch broadcasts
    check_rotation(llama, (q[0], k[0], cos[0], sin[0], 0), calls, taken=0)
    check_rotation(llama, (q, k, cos.double(), sin.double()), calls, taken=0)
    check_rotation(llama, (q, k.bfloat16(), cos, sin), calls, taken=0)
    check_rotation(llama, (q, k, cos.clone().requires_grad_(), sin), calls, taken=0)
    both = torch.func.vmap(lambda q: hub.RotaryPosEmb.forward(llama, q, k, cos, sin)[0])(torch.stack([q, q]))
    assert torch.equal(both[1], type(llama).forward(llama, q, k, cos, sin)[0])


def test_layers_compile():
    """In one graph, with the bits of eager calls; the rotation is the model's own code there."""
    model = with_kernels(model_of("Llama"))
    batch = torch.randint(3, 64, (1, 4))
    with torch.no_grad():
        expected = model(batch, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(batch, use_cache=False).logits, expected)


# The folder


LAYERS = {
    "RMSNorm": "RMSNorm",
    "SiLU": "SiLU",
    "SwiGLUMLP": "SwiGLUMLP",
    "rotary_pos_emb": "RotaryPosEmb",
}


def test_folder(tmp_path):
    """kernels loads the folder, without a network; a model takes the layers from there."""
    folder = fusednorm.transformers.write_kernel(tmp_path / "kernel")
    assert fusednorm.transformers.write_kernel(str(folder)) == folder
    loaded = kernels.get_local_kernel(folder, backend="cpu")
    names = ("RMSNorm", "RMSNormGated", "SiLU", "GeluTanh", "SwiGLUMLP", "GeGLUMLP", "RotaryPosEmb")
    assert all(getattr(loaded.layers, name) is getattr(hub, name) for name in names)
    metadata = json.loads((folder / "build" / "torch-universal" / "metadata.json").read_text())
    assert (metadata["name"], metadata["license"]) == ("fusednorm", "Apache-2.0")

    expected, _ = outputs_and_gradients(with_kernels(model_of("Llama")))
    hub_kernels._KERNEL_MAPPING_CACHE = None  # without register_kernels; the MLP keeps its name
    kernels.layer.globals._KERNEL_MAPPING.set({})
    mapping = {name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=layer)} for name, layer in LAYERS.items()}
    with kernels.use_kernel_mapping(mapping):
        model = use_kernels(model_of("Llama"))
    assert replaced(model) == FAMILIES["Llama"][1]
    assert torch.equal(outputs_and_gradients(model)[0], expected)


def test_every_layer_is_one_that_kernels_takes():
    """kernels takes layers without state, whose forward passes have the arguments of those that they replace."""
    originals = {
        "SiLU": activations.SiLUActivation,
        "GeluTanh": activations.GELUTanh,
        "SwiGLUMLP": type(model_of("Llama").model.layers[0].mlp),
        "GeGLUMLP": type(model_of("Gemma2", head_dim=16).model.layers[0].mlp),
        "rotary_pos_emb": type(
            importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
        ),
    }
    for name, original in originals.items():
        layer = hub._LAYERS[name][0]
        kernels.layer.layer._validate_layer(check_cls=original, cls=layer, repo=hub._Repository(layer))
        assert layer.can_torch_compile
