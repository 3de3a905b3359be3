"""The products of vLLM's linear layers and of its head, and its tables of rotations, in this process."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from vllm_worker import register

import fusednorm
import fusednorm.vllm as plugin
from fusednorm.reference import angles
from fusednorm.vllm.products import Product

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

# vLLM, and what it imports, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("default")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """vLLM's groups of one process."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    folder = tmp_path_factory.mktemp("world")
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        distributed.initialize_model_parallel()
    yield
    distributed.parallel_state.destroy_model_parallel()
    distributed.parallel_state.destroy_distributed_environment()


@pytest.fixture
def config(world, vllms, monkeypatch):
    """The configuration of vLLM, which is afterwards as before."""
    from vllm.config import VllmConfig, set_current_vllm_config

    monkeypatch.setenv("FUSEDNORM_VLLM", "huggingface")
    made = VllmConfig()
    made.compilation_config.custom_ops = ["all"]
    torch.manual_seed(0)
    with set_current_vllm_config(made), torch.inference_mode():
        yield made


def loaded(layer):
    """A layer with random weights, as vLLM has it after it loaded them; and copies of weight and bias."""
    weights = [None if one is None else torch.randn(one.shape).to(one.dtype) for one in (layer.weight, layer.bias)]
    for parameter, values in zip((layer.weight, layer.bias), weights, strict=True):
        if values is not None:
            parameter.data.copy_(values)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, *weights


def layers(dtype):
    """One of each class, with and without bias."""
    from vllm.model_executor.layers import linear

    options = {"params_dtype": dtype, "return_bias": False}
    return [
        linear.ReplicatedLinear(70, 33, bias=True, **options),
        linear.ColumnParallelLinear(70, 33, bias=False, **options),
        linear.MergedColumnParallelLinear(70, [40, 24], bias=True, **options),
        linear.QKVParallelLinear(70, 16, 4, 2, bias=True, **options),
        linear.RowParallelLinear(70, 33, bias=True, **options),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers(config, dtype):
    """All bits are those of `linear`, for rows in a batch and alone, and the weight stays as it was loaded."""
    register()
    x = torch.randn(9, 70).to(dtype)
    for made in layers(dtype):
        layer, weight, bias = loaded(made)
        assert type(layer.cpu_linear) is Product
        assert torch.equal(layer.weight, weight)
        expected = fusednorm.linear(x, weight, bias)
        assert torch.equal(layer(x), expected)
        assert all(torch.equal(layer(x[i : i + 1]), expected[i : i + 1]) for i in range(9))
        again, other, other_bias = loaded(layer)  # as after each step of a trainer
        assert torch.equal(again(x), fusednorm.linear(x, other, other_bias))
        assert not torch.equal(again(x), expected)


def test_layers_that_are_joined(config):
    """The columns of a joined layer are those of its parts."""
    register()
    x = torch.randn(5, 70).bfloat16()
    layer, weight, bias = loaded(layers(torch.bfloat16)[2])
    parts = [fusednorm.linear(x, weight[part], bias[part]) for part in (slice(40), slice(40, None))]
    assert torch.equal(layer(x), torch.cat(parts, -1))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head(config, tied):
    """Logits; vLLM's weight has more rows than the vocabulary. A tied embedding keeps its rows."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    register()
    embedding = VocabParallelEmbedding(100, 64, params_dtype=torch.bfloat16)
    head = ParallelLMHead(100, 64, params_dtype=torch.bfloat16)
    if tied:
        head = head.tie_weights(embedding)
    head, weight, _ = loaded(head)
    embedding.quant_method.process_weights_after_loading(embedding)
    assert (head.weight is embedding.weight) == tied
    x, process = torch.randn(7, 64).bfloat16(), LogitsProcessor(100)
    logits = process(head, x)
    assert torch.equal(logits, fusednorm.linear(x, weight[:100]))
    assert torch.equal(process(head, x[3:4]), logits[3:4])
    if tied:
        assert torch.equal(embedding(torch.tensor([5])), weight[5:6])


def test_compiled(config):
    register()
    layer, _, _ = loaded(layers(torch.bfloat16)[0])
    x = torch.randn(5, 70).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("setting", ["huggingface,own-products", "own-products, huggingface ", "vllm", "default"])
def test_vllm_keeps_its_own_products(config, said, monkeypatch, setting):
    """It packs the weight and removes it."""
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    register()
    layer, weight, bias = loaded(layers(torch.bfloat16)[0])
    assert not isinstance(layer.cpu_linear, Product)
    assert layer.weight.numel() == 0
    x = torch.randn(5, 70).bfloat16()
    # Both are rounded once; before that, 70 products and additions in float32 lose less than a thousandth.
    assert torch.allclose(layer(x).float(), fusednorm.linear(x, weight, bias).float(), rtol=2**-7, atol=1e-3)
    assert ("vLLM keeps its own products of matrices" in said.text) == ("huggingface" in setting)
    assert "fusednorm.linear" not in said.text


def test_the_log_says_it(config, said):
    register()
    assert "unquantized linear layers and the head take fusednorm.linear, and their weights are not packed" in said.text
    assert "FUSEDNORM_VLLM=huggingface,own-products has vLLM keep its own products" in said.text
    assert not [record for record in said.records if record.levelname != "INFO"]


@pytest.mark.parametrize("setting", ["vllm,own-products", "own-products", "off,own-products", "gpu,own-products"])
def test_only_huggingface_has_products(monkeypatch, setting):
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    assert plugin.requested() is None


def test_gpus(config, said, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    monkeypatch.setenv("FUSEDNORM_VLLM", "huggingface,gpu")
    register()
    assert "vLLM keeps its own products of matrices" in said.text
    assert not isinstance(loaded(layers(torch.bfloat16)[0])[0].cpu_linear, Product)


def test_quantized_layers_are_vllms(config, said):
    """Of a model in 8 bits whose head is not quantized."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    register()
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": "channel"}}
    group["input_activations"] = {**numbers, "strategy": "token", "dynamic": True}
    told = {"format": "int-quantized", "quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    config.quant_config = CompressedTensorsConfig.from_config({**told, "config_groups": {"group_0": group}})
    config.quant_config.packed_modules_mapping = {}
    options = {"params_dtype": torch.bfloat16, "quant_config": config.quant_config}
    layer = ColumnParallelLinear(64, 32, bias=False, prefix="model.layers.0.o_proj", **options)
    layer.weight.data.random_(-9, 9)
    layer.weight_scale.data.fill_(0.1)
    layer.quant_method.process_weights_after_loading(layer)
    assert not isinstance(getattr(layer, "cpu_linear", None), Product)
    head, _, _ = loaded(ParallelLMHead(64, 64, prefix="lm_head", **options))
    assert isinstance(head.cpu_linear, Product)
    assert "quantized layers keep vLLM's products" in said.text


def a_head():
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return ParallelLMHead(64, 64, params_dtype=torch.bfloat16)


def a_layer():
    return layers(torch.bfloat16)[0]


def with_a_float32_head(config):
    config.model_config = SimpleNamespace(head_dtype=torch.float32, hf_text_config=None)


def with_lora(config):
    config.lora_config = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "make", "words"),
    [
        (with_lora, a_layer, "vLLM keeps its own products of all layers, because LoRA adds to them"),
        (with_lora, a_head, "vLLM keeps its own products of all layers, because LoRA adds to them"),
        (with_a_float32_head, a_head, "the head keeps vLLM's product, because vLLM converts its weight (head_dtype)"),
    ],
)
def test_configurations_with_products_of_vllm(config, said, change, make, words):
    register()
    layer = make()
    change(config)
    loaded(layer)
    assert not isinstance(layer.cpu_linear, Product)
    assert words in said.text
    assert said.text.count(words) == 1
    layer.quant_method.process_weights_after_loading(make())
    assert said.text.count(words) == 1


def of_convolution(layer):
    layer.weight.data = layer.weight.data.unsqueeze(1)


def of_mla(layer):
    layer._cpu_skip_gemm_dispatch = True


def in_float64(layer):
    layer.weight.data = layer.weight.data.double()


@pytest.mark.parametrize("change", [of_convolution, of_mla, in_float64])
def test_weights_that_vllm_reads_or_packs_otherwise(config, change):
    register()
    layer = a_layer()
    change(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert not isinstance(getattr(layer, "cpu_linear", None), Product)


def test_an_unknown_vllm_is_left_as_it_was(config, said, monkeypatch):
    from vllm.model_executor.layers import linear

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)

    monkeypatch.setattr(linear.UnquantizedLinearMethod, "apply", apply)
    before = linear.UnquantizedLinearMethod.process_weights_after_loading
    register()
    assert linear.UnquantizedLinearMethod.process_weights_after_loading is before
    assert "leaves vLLM's products as they were: vllm.model_executor.layers.linear.UnquantizedLinearMethod" in said.text
    assert "UnquantizedLinearMethod does not multiply by the layer's cpu_linear" in said.text


class EnginesModel(torch.nn.Module):
    """Layers of vLLM as a model of it holds them."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012 - as vLLM's models have it

    def __init__(self, with_head):
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        super().__init__()
        rotary = RotaryEmbedding(64, 64, 128, 10000.0, True, torch.bfloat16)
        self.model, self.logits_processor = torch.nn.Module(), LogitsProcessor(100)
        self.model.embed_tokens = VocabParallelEmbedding(100, 70, params_dtype=torch.bfloat16)
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.self_attn = torch.nn.Module()
            *_, layer.self_attn.qkv_proj, layer.self_attn.o_proj = layers(torch.bfloat16)
            layer.self_attn.rotary_emb = rotary
        if with_head:
            self.lm_head = ParallelLMHead(100, 70, params_dtype=torch.bfloat16)
        for module in self.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize("with_head", [True, False])
def test_contract(config, with_head):
    """Steps have the trainer's names: of joined layers, of the head that is an embedding, and of tables."""
    register()
    model = EnginesModel(with_head)
    found = [str(step).removesuffix(", bfloat16") for step in fusednorm.contract(model).steps]
    parts = [f"model.layers.{i}.self_attn.{name}_proj: linear()" for i in range(2) for name in "qkvo"]
    rotations = [f"model.layers.{i}.self_attn: rotate(round_products=True)" for i in range(2)]
    tables = [str(step) for step in fusednorm.contract(model.model).steps if step.operation == "cosine_and_sine"]
    assert tables == ["rotary_emb: cosine_and_sine(), bfloat16"]  # of a part of the model
    assert sorted(found) == sorted([*parts, *rotations, "model.rotary_emb: cosine_and_sine()", "lm_head: linear()"])


def test_contract_of_parts_of_rows(config, monkeypatch):
    """Where processes have a part of each row, vLLM adds up their rounded products: that is no step of fusednorm."""
    from vllm.model_executor.layers import linear

    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 2)
    register()
    options = {"params_dtype": torch.bfloat16, "return_bias": False}
    of_columns = loaded(linear.ColumnParallelLinear(64, 32, bias=False, **options))[0]
    of_rows = loaded(linear.RowParallelLinear(64, 32, bias=False, **options))[0]
    assert (of_columns.weight.shape, of_rows.weight.shape) == ((16, 64), (32, 32))
    model = torch.nn.ModuleDict({"up_proj": of_columns, "down_proj": of_rows})
    assert [str(step) for step in fusednorm.contract(model).steps] == ["up_proj: linear(), bfloat16"]


@pytest.mark.parametrize("setting", ["huggingface", "huggingface,own-products"])
def test_tables_of_rotations(config, monkeypatch, setting):
    """With products tables have fusednorm's cosines and sines, else torch's; these differ in the last bits of a few."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    arguments = 64, 64, 4096, 10000.0, True, torch.float32
    theirs = RotaryEmbedding(*arguments).cos_sin_cache
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    register()
    made = RotaryEmbedding(*arguments)
    frequencies = 1.0 / angles.power(10000.0, torch.arange(0, 64, 2, dtype=torch.float) / 64, torch.float32)
    exact = torch.cat(angles.cosine_and_sine(torch.arange(4096.0)[:, None] * frequencies), -1)
    assert torch.equal(made.cos_sin_cache, exact if setting == "huggingface" else theirs)
    assert 0 < (exact != theirs).double().mean() < 0.5
    assert ("cosine_and_sine" in str(fusednorm.contract(made))) == (setting == "huggingface")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("vllm", "vllm, own products"),
        ("huggingface", "huggingface, products"),
        (" own-products,huggingface", "huggingface, own products"),
    ],
)
def test_vllm_keeps_compiled_code_of_each_setting(config, monkeypatch, setting, key):
    """By a hash of its configuration: code that was compiled with one setting is not taken with another."""
    from vllm.config import VllmConfig

    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    register()
    made = VllmConfig()
    assert made.additional_config == {"fusednorm": key}
    before = made.compute_hash()
    made.additional_config["fusednorm"] = "another"
    assert made.compute_hash() != before
