"""The plug-in of SGLang: its layers on a CPU with fusednorm's hooks, beside SGLang's own."""

import logging
import os
import sys
from importlib.util import find_spec

import pytest
import torch

import fusednorm
from fusednorm import sglang as plugin

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; `tox -e sglang` installs it", allow_module_level=True)
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# SGLang, and what it imports, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("default")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: The share of 16-bit elements that may differ, by a last bit: sums have another order, and torch's sigmoids lose bits.
SUMS_OTHERWISE, TORCH_LOSES_BITS = 0.01, 0.02
#: Of float32, of the greatest: twice the bound of docs/spec.md, section 4, for rows of 256, which is 9 units of 2^-24.
BOUND = 2 * 9 * 2.0**-24


def made():
    """Objects of SGLang's layers, each with a call."""
    from sglang.srt.layers import activation, layernorm
    from sglang.srt.layers.rotary_embedding import factory, get_rope

    factory._ROPE_DICT.clear()  # of objects that have chosen their code

    def normed(layer, dtype):
        weight = torch.linspace(0.1, 1.2, 256).to(dtype)
        layer.weight.data = weight
        return layer

    for dtype in (BF16, F16, F32):
        generator = torch.Generator().manual_seed(3)
        x, residual = torch.randn(2, 7, 256, generator=generator).to(dtype)
        for cast in (False, True):
            norm = normed(layernorm.RMSNorm(256, 1e-5, cast_x_before_out_mul=cast), dtype)
            yield f"RMSNorm {cast} {dtype}", norm, (x,), SUMS_OTHERWISE
            yield f"RMSNorm {cast} {dtype}, added", norm, (x, residual), SUMS_OTHERWISE
        yield f"RMSNorm float32 {dtype}", normed(layernorm.RMSNorm(256), F32), (x, residual), SUMS_OTHERWISE
        for cls in (layernorm.GemmaRMSNorm, layernorm.Gemma3RMSNorm):
            gemma = normed(cls(256), dtype)
            yield f"{cls.__name__} {dtype}", gemma, (x,), SUMS_OTHERWISE
            yield f"{cls.__name__} {dtype}, added", gemma, (x, residual), SUMS_OTHERWISE
        yield f"Gemma4RMSNorm {dtype}", normed(layernorm.Gemma4RMSNorm(256), dtype), (x,), SUMS_OTHERWISE
        without = layernorm.Gemma4RMSNorm(256, with_scale=False)
        yield f"Gemma4RMSNorm {dtype}, without a weight", without, (x,), SUMS_OTHERWISE
        yield f"RMSNormWithoutScale {dtype}", layernorm.RMSNormWithoutScale(256), (x,), SUMS_OTHERWISE
        yield f"LayerNorm {dtype}", normed(layernorm.LayerNorm(256), F32), (x,), SUMS_OTHERWISE
        yield f"SiluAndMul {dtype}", activation.SiluAndMul(), (x,), TORCH_LOSES_BITS
        for approximate in ("tanh", "none"):
            yield f"GeluAndMul {approximate} {dtype}", activation.GeluAndMul(approximate), (x,), TORCH_LOSES_BITS
        yield f"ReLU2 {dtype}", activation.ReLU2(), (x,), 0.0
        positions = torch.tensor([3, 0, 0, 17, 5, 63, 2])
        for neox in (True, False):
            for part in (64, 32):
                rope = get_rope(64, part, 64, 10000, neox, dtype=dtype)
                yield f"RotaryEmbedding {part} {neox} {dtype}", rope, (positions, x, residual[:, :128]), 0.0


def results(layer, given):
    found = layer.forward(*[t.clone() for t in given])
    return [found] if isinstance(found, torch.Tensor) else [*found]


@pytest.fixture
def hooked(monkeypatch, caplog):
    """Registers the plug-in as SGLang does; afterwards SGLang is as it was."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {}
    for name in plugin.LAYERS:
        module, _, cls = f"sglang.srt.layers.{name}".rpartition(".")
        __import__(module)
        before[name] = getattr(sys.modules[module], cls), getattr(sys.modules[module], cls).forward_native
    HookRegistry.reset()

    def register(setting=""):
        monkeypatch.setenv("FUSEDNORM_SGLANG", setting)
        with caplog.at_level(logging.INFO, logger="sglang.fusednorm"):
            plugin.register()
        HookRegistry.apply_hooks()
        return [record.getMessage() for record in caplog.records if record.name == "sglang.fusednorm"]

    yield register
    HookRegistry.reset()
    for cls, method in before.values():
        cls.forward_native = method


def test_each_layer_rounds_as_sglangs_own(hooked, monkeypatch):
    wanted = {name: results(layer, given) for name, layer, given, _ in made()}
    taken, around = [], plugin._around

    def noted(ours, theirs, *given, **named):
        taken.extend(name for name, one in plugin.LAYERS.items() if one is ours)
        return around(ours, lambda *_, **__: pytest.fail(f"{ours} leaves a call to SGLang"), *given, **named)

    monkeypatch.setattr(plugin, "_around", noted)
    (line,) = hooked()
    assert line.endswith(f"on CPUs: {', '.join(name.rpartition('.')[2] for name in plugin.LAYERS)}")
    for name, layer, given, share in made():
        found = results(layer, given)
        for one, other in zip(found, wanted[name], strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            if one.dtype == F32 and share:
                assert (one - other).abs().max() <= BOUND * other.abs().max(), name
            else:
                assert (one != other).double().mean() <= share, name
    assert set(taken) == set(plugin.LAYERS)


def test_bits_are_fusednorms(hooked):
    from sglang.srt.layers.layernorm import RMSNorm

    x, residual = torch.randn(2, 300, 256).bfloat16()
    hooked()
    layer = RMSNorm(256, 1e-5).bfloat16()  # a layer chooses its code at its first call
    found = results(layer, (x, residual))
    wanted = fusednorm.fused_add_rms_norm(x, residual, layer.weight, 1e-5, round_sum=False)
    assert all(map(torch.equal, found, wanted))
    row = results(layer, (x[7:8], residual[7:8]))
    assert all(torch.equal(one, of_batch[7:8]) for one, of_batch in zip(row, found, strict=True))


def test_calls_that_stay_sglangs(hooked):
    from sglang.srt.layers.layernorm import RMSNorm

    hooked()
    x = torch.randn(3, 256).double()
    assert RMSNorm(256).forward(x).dtype == torch.float64
    padded = RMSNorm(256, var_hidden_size=128)
    assert plugin._rms_norm(padded, x.float()) is None
    assert plugin._rms_norm(RMSNorm(256), x.float(), x.float(), x.float()) is None


def test_off(hooked):
    from sglang.srt.layers.activation import SiluAndMul

    before = SiluAndMul.forward_native
    assert hooked("off") == [f"fusednorm {fusednorm.__version__}: FUSEDNORM_SGLANG=off, SGLang keeps its layers"]
    assert "FUSEDNORM_SGLANG is 'of', it must be off, or not set" in hooked("of")[-1]
    assert SiluAndMul.forward_native is before


def test_another_signature_is_left_alone(hooked, monkeypatch):
    from sglang.srt.layers.activation import SiluAndMul

    monkeypatch.setattr(SiluAndMul, "forward_native", lambda self, x, more=None: "theirs")
    lines = hooked()
    assert "leaves activation.SiluAndMul as it was: it takes x, more; the version tested took x" in lines[0]
    assert SiluAndMul().forward(torch.ones(1, 4)) == "theirs"


def test_sglang_finds_the_plugin():
    from importlib.metadata import entry_points

    (found,) = [one for one in entry_points(group="sglang.srt.plugins") if one.name == "fusednorm"]
    assert found.load() is plugin.register
