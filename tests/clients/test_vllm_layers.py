"""The classes that the plug-in of vLLM puts in place of vLLM's layers, beside those, in this process."""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from vllm_worker import register

import fusednorm
from fusednorm.vllm import layers
from fusednorm.vllm.providers import BY_CONTRACT
from fusednorm.vllm.roundings import of

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

# vLLM, and what it imports, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("default")

NAMES = ["SiluAndMul", "GeluAndMul", "RMSNormGated", "GemmaRMSNorm", "Mixer2RMSNormGated", "RotaryEmbedding"]
NAMES += ["SwigluOAIAndMul", "SwigluStepAndMul", "ReLUSquaredActivation", "RMSNorm", "SiluAndMulWithClamp"]
NAMES += ["MulAndSilu", "LayerNorm", "MRotaryEmbedding", "ApplyRotaryEmb"]
BITS_16, F32 = (torch.bfloat16, torch.float16), torch.float32


@pytest.fixture
def vllms(vllms, monkeypatch):
    """The configuration of vLLM, whose operations, tables and platform are afterwards as before."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.mamba import mamba_mixer2

    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_rank", lambda: 0)
    config = VllmConfig()
    config.compilation_config.custom_ops = ["all"]
    with set_current_vllm_config(config), torch.inference_mode():
        yield config


def replaced():
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot


def pairs(make, setting="vllm"):
    """An object of vLLM's class and one of ours, made in the same way."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FUSEDNORM_VLLM", setting)
        theirs = make()
        register()
        ours = make()
    assert type(ours) is replaced()[type(theirs).__name__]
    assert isinstance(ours, type(theirs))
    assert ours._forward_method.__func__ is type(ours).forward_cpu
    return theirs, ours


def differing(a, b):
    """The share of elements whose bits differ; a NaN equals a NaN."""
    return ((a != b) & ~(a.isnan() & b.isnan())).double().mean().item()


def test_replaced(vllms, said):
    register()
    assert set(NAMES) <= replaced().keys()
    assert "Llama3RotaryEmbedding" in replaced()
    # These compute by methods of their own.
    own = {"FourierRotaryEmbedding", "Ernie4_5_VLRotaryEmbedding", "MRotaryEmbeddingInterleaved"}
    assert not replaced().keys() & own
    assert not [record for record in said.records if record.levelno > logging.INFO]
    # The option `custom_ops` knows them by vLLM's names.
    assert {cls.name for name, cls in replaced().items() if "RotaryEmbedding" in name} == {"rotary_embedding"}
    assert [replaced()[name].name for name in NAMES[:2]] == ["silu_and_mul", "gelu_and_mul"]
    before = dict(replaced())
    register()
    assert replaced() == before


def test_processes_that_make_no_model_load_no_layer():
    """The plug-in adds modules of fusednorm alone to the engine's core and to the server, and none of vLLM."""
    code = """if True:
        import sys
        import vllm.config.kernel, vllm.ir.ops, vllm.platforms
        vllm.platforms.current_platform
        before = set(sys.modules)
        from fusednorm.vllm import register
        register()
        print("added", *sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        vllm.platforms.current_platform.import_ir_kernels()
        print("loads the layers", "vllm.model_executor.layers.layernorm" in sys.modules)
    """
    environment = {**os.environ, "FUSEDNORM_VLLM": "vllm"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-2:] == ["added fusednorm", "loads the layers True"], done.stdout + done.stderr


def test_the_log_names_the_layers_that_a_model_has(vllms, said):
    """Once each, and not those that `custom_ops` disables."""
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    register()
    assert "computes" not in said.text
    vllms.compilation_config.custom_ops = ["all", "-gelu_and_mul"]
    made = SiluAndMul(), SiluAndMul(), GeluAndMul()
    lines = [record.getMessage().partition(": ")[2] for record in said.records if "computes" in record.getMessage()]
    assert lines == ["computes vllm.model_executor.layers.activation.SiluAndMul by silu_and_mul"]
    assert made[2]._forward_method != made[2].forward_cpu


def test_layers_that_know_no_hardware(vllms, said):
    """vLLM has another table for them; the norm is the provider's that vLLM prefers."""
    from vllm.ir import ops
    from vllm.model_executor.hw_agnostic.layers.activation import get_act_and_mul_fn
    from vllm.model_executor.hw_agnostic.layers.layernorm import RMSNorm

    theirs = RMSNorm(256, 1e-5), get_act_and_mul_fn("silu")
    register()
    norm, gate = RMSNorm(256, 1e-5), get_act_and_mul_fn("silu")
    assert isinstance(norm, RMSNorm)
    assert [type(layer).__name__ for layer in (norm, gate)] == ["FusednormRMSNorm", "FusednormSiluAndMul"]
    assert "computes vllm.model_executor.hw_agnostic.layers.layernorm.RMSNorm by the provider" in said.text
    x, residual, weight = torch.randn(5, 256).bfloat16(), torch.randn(5, 256).bfloat16(), torch.rand(256).bfloat16()
    for layer in (norm, theirs[0]):
        layer.weight.data = weight
    with (
        ops.rms_norm.set_priority(["fusednorm", "native"]),
        ops.fused_add_rms_norm.set_priority(["fusednorm", "native"]),
    ):
        assert torch.equal(norm(x), fusednorm.rms_norm(x, weight, 1e-5, round_norm=True))
        wanted = fusednorm.fused_add_rms_norm(x, residual, weight, 1e-5, round_sum=False, round_norm=True)
        given = x.clone(), residual.clone()
        assert all(map(torch.equal, norm(*given), wanted))
        assert all(map(torch.equal, given, (x, residual)))
        assert differing(norm(x), theirs[0](x)) < 0.01
    assert torch.equal(gate(x), fusednorm.silu_and_mul(x))
    assert differing(gate(x), theirs[1](x)) < 0.01


#: What vLLM lets others replace in these modules and fusednorm does not: it has no such function, or vLLM's is as fast.
LEFT = {"gelu", "gelu_fast", "gelu_new", "gelu_tanh", "quick_gelu", "xielu"}
LEFT |= {"fatrelu_and_mul", "gelu_and_mul_sparse", "situ_and_mul", "dual_chunk_rotary_embedding"}
REPLACED = {"silu_and_mul", "mul_and_silu", "gelu_and_mul", "silu_and_mul_with_clamp", "swigluoai_and_mul", "relu2"}
REPLACED |= {
    "swiglustep_and_mul",
    "rms_norm",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm_gated",
    "mixer2_gated_rms_norm",
}
REPLACED |= {"rotary_embedding", "apply_rotary_emb"}


def test_what_vllm_lets_others_replace_is_in_the_table(vllms):
    """docs/vllm.md. A name that vLLM adds is looked at, and one that it moves is not lost."""
    from vllm.ir import ops
    from vllm.model_executor.custom_op import op_registry
    from vllm.model_executor.hw_agnostic.custom_op import op_registry as agnostic

    register()
    modules = tuple({f"{layer.package}.layers.{layer.module}" for layer in layers._layers()})
    found = {name for name, cls in op_registry.items() if cls.__module__.startswith(modules)}
    assert found - {"mamba_mixer2"} - LEFT == {cls.name for cls in replaced().values()} == REPLACED
    assert found > LEFT - {"dual_chunk_rotary_embedding"}
    assert set(agnostic) == {"rms_norm", "silu_and_mul"}
    assert set(ops.__all__) == {"rms_norm", "fused_add_rms_norm", "gelu_and_mul_sparse"}


@pytest.mark.parametrize(("setting", "device"), [("off", "cpu"), ("vllm", "cuda"), ("vllm,gpu", "cuda")])
def test_not_replaced(vllms, monkeypatch, setting, device):
    """vLLM's compiler looks for these layers on GPUs."""
    from vllm.platforms import current_platform

    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    monkeypatch.setattr(type(current_platform), "device_type", device)
    register()
    assert replaced() == {}


def test_what_another_plugin_replaced(vllms, said):
    from vllm.model_executor.layers.activation import SiluAndMul

    SiluAndMul.register_oot(theirs := type("Theirs", (SiluAndMul,), {}))
    register()
    assert replaced()["SiluAndMul"] is theirs
    assert "GeluAndMul" in replaced()
    assert "leaves a layer of vLLM as it was: another plug-in replaces SiluAndMul" in said.text


def test_what_the_user_disables(vllms):
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

    register()
    vllms.compilation_config.custom_ops = ["all", "-silu_and_mul"]
    assert SiluAndMul()._forward_method.__name__ == "forward_native"
    assert GeluAndMul("tanh")._forward_method.__name__ == "forward"


def once(x):
    return fusednorm.silu_and_mul(x, between=torch.float32)


def with_a_gain(self, x, z=None):
    return self.forward_static(x, z, self.gain)


LAYERS = "vllm.model_executor.layers"
#: Changes of vLLM, and the words about them.
CHANGES = (
    (
        lambda m: m.setattr(f"{LAYERS}.layernorm.RMSNormGated.forward_native", with_a_gain),
        "layernorm.RMSNormGated is not as in the version tested ('RMSNormGated' object has no attribute 'gain')",
    ),
    (
        lambda m: m.setattr(f"{LAYERS}.activation.SiluAndMul.forward_native", staticmethod(once)),
        "activation.SiluAndMul does not round where it did in the version tested",
    ),
    (
        lambda m: m.delattr(f"{LAYERS}.mamba.mamba_mixer2.Mixer2RMSNormGated"),
        "mamba.mamba_mixer2.Mixer2RMSNormGated is not as in the version tested",
    ),
    (
        lambda m: m.setitem(sys.modules, f"{LAYERS}.rotary_embedding", None),
        "rotary_embedding.RotaryEmbedding is not as in the version tested",
    ),
)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_an_unknown_layer_is_left_as_it_was(vllms, said, monkeypatch, change, words):
    with monkeypatch.context() as patched:
        change(patched)
        register()
    assert f"leaves a layer of vLLM as it was: vllm.model_executor.layers.{words}" in said.text
    missing = set(NAMES) - replaced().keys()
    if "RotaryEmbedding" in missing:
        missing -= {"MRotaryEmbedding", "ApplyRotaryEmb"}  # of the same folder
    assert len(missing) == 1
    assert missing.pop() in words


def test_the_calls_tried_tell_roundings_apart():
    """Of each layer: where a rounding is elsewhere, more than a hundredth of the elements differs."""
    by_name = {layer.name: layer for layer in layers._layers()}
    (both,) = by_name["SiluAndMul"].arguments
    x, z = by_name["RMSNormGated"].arguments
    weight = by_name["RMSNormGated"].attributes["weight"]
    positions, q, _ = by_name["RotaryEmbedding"].arguments
    halves = by_name["RotaryEmbedding"].attributes["cos_sin_cache"].chunk(2, -1)
    oai = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}
    for call in (
        lambda once: fusednorm.silu_and_mul(both, between=F32 if once else None),
        lambda once: fusednorm.silu_and_mul(4 * both, **oai, round_steps=once),
        lambda once: fusednorm.gelu_tanh_and_mul(both, between=F32 if once else None),
        lambda once: fusednorm.rms_norm_gated(x, z, weight, between=F32 if once else None),
        lambda once: fusednorm.rms_norm_gated(x, z, weight, norm_before_gate=False, round_norm=not once),
        lambda once: fusednorm.fused_add_rms_norm(x, z, weight, weight_offset=1.0, round_sum=not once)[0],
        lambda once: fusednorm.rotate(q.view(16, 4, 64), *halves, positions=positions, round_products=not once),
    ):
        assert differing(call(True), call(False)) > 0.1


@pytest.mark.parametrize("dtype", BITS_16)
def test_silu_of_every_gate(vllms, dtype):
    """All bits are vLLM's, but where torch's exponential of a bfloat16 overflows before ours: silu is 0 there."""
    from vllm.model_executor.layers.activation import SiluAndMul

    theirs, ours = pairs(SiluAndMul)
    gates = torch.arange(65536).sub(32768).to(torch.int16).view(dtype).view(256, 256)
    ups = torch.linspace(-3, 3, 256).to(dtype).expand(256, 256)
    x = torch.cat((gates, ups), -1)
    overflows = (gates >= -97) & (gates <= -89) if dtype == torch.bfloat16 else torch.zeros_like(gates, dtype=bool)
    assert overflows.sum() == (17 if dtype == torch.bfloat16 else 0)
    a, b = theirs(x), ours(x)
    assert differing(a[~overflows], b[~overflows]) == 0
    assert a[overflows].eq(0).all()
    assert b[overflows].abs().lt(1e-36).all()


@pytest.mark.parametrize("dtype", BITS_16)
def test_silu_of_the_second_half(vllms, dtype):
    """Of Molmo, whose class takes `forward_native` on a CPU, also where it is enabled."""
    from vllm.model_executor.layers.activation import MulAndSilu

    theirs, ours = MulAndSilu(), pairs(MulAndSilu)[1]
    assert theirs._forward_method.__name__ == "forward_native"
    x = torch.randn(64, 2, 256).to(dtype)
    assert differing(theirs(x), ours(x)) == 0
    assert torch.equal(ours(x.double()), theirs(x.double()))
    vllms.compilation_config.custom_ops = ["none"]
    assert MulAndSilu()._forward_method.__name__ == "forward_native"


@pytest.mark.parametrize("dtype", BITS_16)
@pytest.mark.parametrize(("form", "most"), [("tanh", 0.01), ("none", 0.02)])
def test_gelu_of_every_gate(vllms, dtype, form, most):
    """torch takes 1 + tanh or 1 + erf, which loses bits of a negative argument; so some results differ."""
    from vllm.model_executor.layers.activation import GeluAndMul

    theirs, ours = pairs(lambda: GeluAndMul(form))
    gates = torch.arange(65536).sub(32768).to(torch.int16).view(dtype)
    gates = gates[gates.abs() < 16].unsqueeze(-1)
    x = torch.cat((gates, torch.ones_like(gates)), -1)
    assert 0 < differing(theirs(x), ours(x)) < most


@pytest.mark.parametrize("dtype", BITS_16)
@pytest.mark.parametrize(
    ("name", "layout", "arguments"),
    [("SwigluOAIAndMul", -1, ()), ("SwigluStepAndMul", -2, ()), ("SiluAndMulWithClamp", -2, (5.0, 1.5, 0.5))],
)
def test_gates_with_limits_of_every_gate(vllms, dtype, name, layout, arguments):
    """All bits are vLLM's, but where torch's sigmoid or silu is 0 before ours."""
    from vllm.model_executor.layers import activation

    gates = torch.arange(65536).sub(32768).to(torch.int16).view(dtype).view(256, 256)
    ups = torch.linspace(-9, 9, 256).to(dtype).expand(256, 256)
    fits = (gates > -52) | gates.isnan()
    theirs, ours = pairs(lambda: getattr(activation, name)(*arguments))
    x = torch.stack((gates, ups), layout).flatten(-2)
    assert differing(theirs(x)[fits], ours(x)[fits]) == 0


def test_a_gate_with_a_limit_and_silu_is_vllms(vllms):
    """vLLM rounds the sigmoid in it; fusednorm's silu is one step."""
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    theirs, ours = pairs(lambda: SiluAndMulWithClamp(2.0))
    x = torch.randn(64, 256).bfloat16() * 3
    assert torch.equal(theirs(x), ours(x))
    assert ours._fusednorm_steps(torch.bfloat16) == []


@pytest.mark.parametrize("dtype", BITS_16)
def test_relu2_of_every_number(vllms, dtype):
    from vllm.model_executor.layers.activation import ReLUSquaredActivation

    theirs, ours = pairs(ReLUSquaredActivation)
    z = torch.arange(65536).sub(32768).to(torch.int16).view(dtype).view(256, 256)
    assert differing(theirs(z), ours(z)) == 0


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head", "turned"), [(64, 64), (128, 32)])
def test_rotation(vllms, dtype, neox, head, turned):
    """In place, in views of one tensor. In 16 bits all bits are those of vLLM's kernel for CPUs."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    theirs, ours = pairs(lambda: RotaryEmbedding(head, turned, 128, 10000.0, neox, dtype))
    torch.manual_seed(0)
    qkv, positions = torch.randn(40, 8 * head).to(dtype), torch.randint(0, 128, (40,))
    found = []
    for layer in (theirs, ours):
        copy = qkv.clone()
        q, k, _ = copy.split([5 * head, 2 * head, head], -1)
        a, b = layer(positions, q, k)
        assert (a.data_ptr(), b.data_ptr(), a.shape) == (q.data_ptr(), k.data_ptr(), q.shape)
        layer(positions, q, None)
        found.append(copy)
    if dtype == torch.float32 and neox:
        # vLLM's compiler contracts a product and a sum there, which leaves out the rounding of one product: less than
        # 2^-22 for numbers below 8. The rounded sums then differ by at most a unit more, 2^-21. q is rotated twice.
        assert found[0].abs().max() < 8
        assert (found[0] - found[1]).abs().max() <= 2 * (2.0**-22 + 2.0**-21)
    else:
        assert torch.equal(*found)
    assert not torch.equal(found[0], qkv)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16  # which changes the table
    copies = [qkv[:, :head].to(other) for _ in range(2)]
    assert torch.equal(*(layer(positions, q, q.clone())[0] for layer, q in zip((theirs, ours), copies, strict=True)))
    batches = [qkv[:, : 5 * head].reshape(8, 5, -1) for _ in range(2)]  # vLLM's kernel takes these
    results = [layer(positions.view(8, 5), q, q.clone())[0] for layer, q in zip((theirs, ours), batches, strict=True)]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32])
@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("neox", [True, False])
def test_rotation_of_a_vision_tower(vllms, dtype, in_float32, neox):
    """All bits; tables of float32 are rounded to the dtype of the heads, unless these are converted to float32."""
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    options = {"enforce_enable": True, "enable_fp32_compute": in_float32}
    torch.manual_seed(0)
    qkv, angles = torch.randn(2, 40, 3, 4, 64).to(dtype), torch.randn(40, 32)
    theirs, ours = pairs(lambda: ApplyRotaryEmb(is_neox_style=neox, **options))
    for x in (qkv[:, :, 0], qkv[0, :, 1]):
        assert torch.equal(theirs(x, angles.cos(), angles.sin()), ours(x, angles.cos(), angles.sin()))
    expected = "rotate", {"interleaved": not neox, "round_products": not in_float32}
    assert ours._fusednorm_steps(torch.bfloat16) == [expected]


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sections", [[12, 10, 10], [24, 4, 4], [8, 12, 4]])
def test_rotation_by_three_positions(vllms, dtype, interleaved, sections):
    """All bits, of tokens of images and of text; in place, as vLLM's kernel for GPUs."""
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    options = {"mrope_section": sections, "mrope_interleaved": interleaved}
    theirs, ours = pairs(lambda: MRotaryEmbedding(96, 2 * sum(sections), 128, 10000.0, True, dtype, **options))
    torch.manual_seed(0)
    qkv = torch.randn(40, 8 * 96).to(dtype)
    for positions in (torch.randint(0, 512, (3, 40)), torch.randint(0, 512, (40,))):
        copy = qkv.clone()
        q, k, _ = copy.split([5 * 96, 2 * 96, 96], -1)
        expected = theirs(positions, q, k)
        found = ours(positions, q, k)
        assert all(map(torch.equal, expected, found))
        assert found[0].data_ptr() == q.data_ptr()
        mixed = theirs(positions, qkv[:, :96].double(), qkv[:, :96].double())
        assert all(map(torch.equal, mixed, ours(positions, qkv[:, :96].double(), qkv[:, :96].double())))


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_layer_norm(vllms, dtype, wide, affine):
    """As torch's LayerNorm, but for last bits of rstd."""
    from vllm.model_executor.layers.layernorm import LayerNorm

    options = {"elementwise_affine": affine != "none", "bias": affine == "both"}
    theirs, ours = pairs(lambda: LayerNorm(256, dtype=torch.float32 if wide else dtype, **options))
    torch.manual_seed(0)
    for layer in (theirs, ours):
        torch.manual_seed(1)
        for parameter in layer.parameters():
            parameter.data.uniform_(0.5, 1.5)
    x = torch.randn(64, 3, 256).to(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    else:
        assert differing(theirs(x), ours(x)) < 1e-3
    assert torch.equal(ours(x), fusednorm.layer_norm(x, ours.weight, ours.bias, 1e-5))
    assert torch.equal(ours.double()(x.double()), theirs.double()(x.double()))
    assert ours._fusednorm_steps(torch.bfloat16) == [("layer_norm", {"eps": 1e-5})]


@pytest.mark.parametrize("dtype", BITS_16)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("group", [None, 32])
def test_gated_norm(vllms, dtype, first, activation, group):
    from vllm.model_executor.layers.layernorm import RMSNormGated

    options = {"norm_before_gate": first, "activation": activation, "group_size": group, "dtype": dtype}
    theirs, ours = pairs(lambda: RMSNormGated(128, **options))
    torch.manual_seed(0)
    weight, x, z = torch.rand(128) + 0.5, torch.randn(64, 3, 128).to(dtype), torch.randn(64, 3, 128).to(dtype)
    for layer in (theirs, ours):
        layer.weight.data.copy_(weight)
    assert differing(theirs(x, z), ours(x, z)) < 1e-3
    assert torch.equal(ours(x), theirs(x))  # without a gate it is vLLM's
    assert torch.equal(ours(x.double(), z.double()), theirs(x.double(), z.double()))


def test_gated_norm_by_default(vllms):
    from vllm.model_executor.layers.layernorm import RMSNormGated

    theirs, ours = pairs(lambda: RMSNormGated(128, norm_before_gate=True, dtype=torch.bfloat16), "default")
    x, z = torch.randn(2, 64, 128).bfloat16()
    assert torch.equal(ours(x, z), fusednorm.rms_norm_gated(x, z, ours.weight, 1e-5))
    assert differing(theirs(x, z), ours(x, z)) > 0.1


def of_family(vllms, config):
    """Has vLLM serve a model with this configuration of transformers."""
    vllms.model_config = SimpleNamespace(hf_text_config=config)


def test_layers_round_as_a_family_of_transformers(vllms):
    """Rotations, gated norms and gates: of Llama's kind, or of the family that vLLM serves."""
    transformers = pytest.importorskip("transformers")
    from vllm.model_executor.layers import activation, layernorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    of_family(vllms, transformers.LlamaConfig(vocab_size=8, hidden_size=64, num_attention_heads=1, num_hidden_layers=1))
    theirs, ours = pairs(lambda: RotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16), "huggingface")
    positions, q = torch.arange(40), torch.randn(40, 256).bfloat16()
    cos, sin = ours.cos_sin_cache.bfloat16().chunk(2, -1)
    rotated = fusednorm.rotate(q.view(40, 4, 64), cos, sin, positions=positions, round_products=True)
    assert torch.equal(ours(positions, q.clone(), None)[0], rotated.view(40, 256))
    assert differing(theirs(positions, q.clone(), None)[0], rotated.view(40, 256)) > 0.1
    gated = layernorm.RMSNormGated(256, norm_before_gate=True, dtype=torch.bfloat16)
    gated.weight.data.uniform_(0.5, 1.5)
    expected = fusednorm.rms_norm_gated(q, q, gated.weight, 1e-5, round_norm=True)
    assert torch.equal(gated(q, q), expected)
    oai = fusednorm.silu_and_mul(q, limit=7.0, alpha=1.702, up_offset=1.0, interleaved=True, round_steps=True)
    assert torch.equal(activation.SwigluOAIAndMul()(q), oai)


@pytest.mark.parametrize("dtype", BITS_16)
@pytest.mark.parametrize("groups", [1, 4])
def test_norm_of_gated_rows(vllms, dtype, groups):
    from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated

    theirs, ours = pairs(lambda: Mixer2RMSNormGated(256, groups).to(dtype))
    torch.manual_seed(0)
    weight, x, z = torch.rand(256) + 0.5, torch.randn(64, 256).to(dtype), torch.randn(64, 256).to(dtype)
    for layer in (theirs, ours):
        layer.weight.data.copy_(weight)
    assert differing(theirs(x, z), ours(x, z)) < 1e-3
    for layer in (theirs, ours):  # vLLM multiplies in the wider dtype, and so does not round there
        layer.float()
    assert torch.equal(ours(x, z), theirs(x, z))
    ours.to(dtype).tp_size, ours.n_groups = 3, 4  # groups that processes share
    ours._fusednorm_prepare(of("vllm"))
    with pytest.raises(AssertionError):
        ours(x, z)


@pytest.mark.parametrize("dtype", [*BITS_16, torch.float32])
def test_norm_of_gemma(vllms, dtype):
    from vllm.ir import ops
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    theirs, ours = pairs(lambda: GemmaRMSNorm(256).to(dtype))
    torch.manual_seed(0)
    weight, x, residual = torch.randn(256) / 4, torch.randn(64, 256).to(dtype), torch.randn(64, 256).to(dtype)
    for layer in (theirs, ours):
        layer.weight.data.copy_(weight)
    kept = x.clone(), residual.clone()
    for provider in (*BY_CONTRACT.values(), "native"):
        with layers._first(ops, provider):
            # All bits of the provider that vLLM prefers, whichever that is.
            assert torch.equal(ours(x), theirs(x))
            assert all(map(torch.equal, ours(x, residual), theirs(x, residual)))
            assert all(map(torch.equal, ours(x, residual.float()), theirs(x, residual.float())))
    assert all(map(torch.equal, kept, (x, residual)))


def test_norm_and_vllms_quantization(vllms):
    """What vLLM's W8A8 layers get from a norm of the plug-in: one call of fusednorm has the bits of both steps."""
    from vllm import _custom_ops
    from vllm.ir import ops

    register()
    torch.manual_seed(0)
    x, residual, weight = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16(), torch.rand(256).bfloat16()
    flags = {"round_sum": False, "round_norm": True}
    ours = fusednorm.fused_add_rms_norm_quant(
        x, residual, weight, 1e-6, quantization=fusednorm.quantizations.VLLM_INT8_TOKEN_CPU, **flags
    )
    with ops.fused_add_rms_norm.set_priority(["fusednorm", "native"]):
        y, total = ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    values, scale, _ = _custom_ops.onednn_scaled_int8_quant(y)
    assert all(map(torch.equal, ours, (values, scale, total)))


def test_compiled(vllms):
    """Where `custom_ops` enables them, compiled layers have the bits of eager ones."""
    from vllm.ir import ops
    from vllm.model_executor.layers.activation import MulAndSilu, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNormGated
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    register()
    gate, gated = SiluAndMul(), RMSNormGated(64, dtype=torch.bfloat16)
    norm, rotary = GemmaRMSNorm(64).bfloat16(), RotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16)
    of_image = MRotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16, mrope_section=[8, 12, 12])
    of_tower, centred, second = ApplyRotaryEmb(enforce_enable=True), LayerNorm(64, dtype=torch.bfloat16), MulAndSilu()
    positions, qkv, three = torch.arange(40), torch.randn(40, 256).bfloat16(), torch.randint(0, 128, (3, 40))
    cos, sin = torch.randn(2, 40, 32)

    def step(qkv):
        qkv = qkv + 1
        q, k = rotary(positions, qkv[:, :128], qkv[:, 128:192])
        y, total = norm(gate(q), k)
        q, k = of_image(three, second(qkv[:, 128:]), total)
        heads = of_tower(qkv.view(40, 4, 64), cos, sin)
        return gated(y, total), centred(q), k, heads

    with layers._first(ops, "fusednorm"):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, compiled(qkv), step(qkv)))


def engines_model():
    """Layers of vLLM as a model of it holds them: a gate and a rotation within others."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary = RotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16)
    layers = [torch.nn.Module() for _ in range(2)]
    for layer in layers:
        layer.rotary_emb, layer.act_fn = rotary, SiluAndMul()
    norms = {"norm": RMSNorm(64, dtype=torch.bfloat16), "gemma": GemmaRMSNorm(64).bfloat16()}
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers), **norms})


def contract_of(model):
    from vllm.ir import ops

    order = {"vllm": "fusednorm", "huggingface": "fusednorm_huggingface", "off": "native"}
    with layers._first(ops, order[model.contract]):
        return [str(step).removesuffix(", bfloat16") for step in fusednorm.contract(model, torch.bfloat16).steps]


def test_contract_of_the_familys_rounding(vllms, monkeypatch):
    """A rotation that layers share is a step of each. Norms are listed where vLLM prefers a provider of fusednorm's."""
    monkeypatch.setenv("FUSEDNORM_VLLM", "huggingface,own-products")
    register()
    model = engines_model()
    within = [f"layers.{i}: {step}" for i in range(2) for step in ("rotate(round_products=True)", "silu_and_mul()")]
    norms = ["norm: rms_norm(eps=1e-06, round_norm=True)", "gemma: rms_norm(eps=1e-06, weight_offset=1.0)"]
    model.contract = "huggingface"
    assert contract_of(model) == within + norms
    model.contract = "off"
    assert contract_of(model) == within
    vllms.compilation_config.custom_ops = ["none"]
    model = engines_model()
    model.contract = "huggingface"
    assert contract_of(model) == norms


def test_contract_of_vllms_rounding(vllms):
    """Which norms get sums shows in their calls, and is no guess before."""
    register()
    model = engines_model()
    model.contract = "vllm"
    x = torch.randn(4, 64).bfloat16()
    with pytest.raises(RuntimeError, match="have it answer a request with enforce_eager=True, or set"):
        contract_of(model)
    for residual, words in ((x, "fused_add_rms_norm"), (None, "rms_norm")):
        for norm in (model["norm"], model["gemma"]):
            norm(x.clone(), None if residual is None else residual.clone())
        summed = ", round_sum=False" * (residual is not None)
        assert contract_of(model)[-2:] == [
            f"norm: {words}(eps=1e-06, round_norm=True{summed})",
            f"gemma: {words}(eps=1e-06{summed}, weight_offset=1.0)",
        ]
