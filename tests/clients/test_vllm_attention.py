"""The attention of vLLM's layers and the log-probabilities of its sampler, in this process."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from vllm_worker import register

import fusednorm
import fusednorm.vllm as plugin
from fusednorm.vllm.attention import Attention, of_sequences

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

# vLLM, and what it imports, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("default")

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 32, 32


@pytest.fixture
def config(vllms, monkeypatch):
    """The configuration of vLLM, with the plug-in as a worker has it; afterwards as before."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention import selector

    monkeypatch.setenv("FUSEDNORM_VLLM", "huggingface")
    made = VllmConfig()
    known = {"dtype": torch.bfloat16, "is_mm_prefix_lm": False, "rswa_window": None}
    made.model_config = SimpleNamespace(**known, get_num_attention_heads=lambda parallel: HEADS)
    selector._cached_get_attn_backend.cache_clear()
    torch.manual_seed(0)
    with set_current_vllm_config(made), torch.inference_mode():
        yield made


def backend():
    """The class that vLLM finds in its registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CPU_ATTN.get_class()


def a_layer(config, name, **options):
    """One of vLLM's layers, with a module of ours as the engine has it before the first batch."""
    from vllm.model_executor.layers.attention import Attention as Layer
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    register()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = Layer(HEADS, SIZE, options.pop("scale", 0.2), KV_HEADS, prefix=name, **options)
    finally:
        torch.set_default_dtype(before)
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)
    layer.attn_backend.get_builder_cls()(spec, [name], config, torch.device("cpu"))
    return layer


def computed(layer, sequences, parts, causal=True):
    """The results of a layer for each sequence, whose tokens come in so many parts; pages lie in any order."""
    pages = torch.randperm(len(sequences) * 8).view(len(sequences), 8).int()
    cache = torch.full((len(sequences) * 8, KV_HEADS, PAGE, 2 * SIZE), float("nan"), dtype=torch.bfloat16)
    found = [[] for _ in sequences]
    for part in range(parts):
        batch = []
        for number, (q, _, _) in enumerate(sequences):
            begin, end = (len(q) * k // parts for k in (part, part + 1))
            batch.append((number, begin, end))
        rows = [torch.cat([sequences[s][i][begin:end] for s, begin, end in batch]) for i in range(3)]
        places = [pages[s, k // PAGE] * PAGE + k % PAGE for s, begin, end in batch for k in range(begin, end)]
        slots = torch.tensor([*places, -1], dtype=torch.long)  # vLLM's last token is no token of a sequence
        q, k, v = (torch.cat((t, t[:1])) for t in rows)
        metadata = SimpleNamespace(
            num_actual_tokens=len(places),
            query_start_loc=torch.tensor([0, *(end - begin for _, begin, end in batch)]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, _, end in batch]).int(),
            block_table=pages,
            causal=False if isinstance(causal, torch.Tensor) else causal,
            dynamic_causal=causal if isinstance(causal, torch.Tensor) else None,
        )
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
        out = torch.full_like(q, 7.0)
        assert layer.impl.forward(layer, q, k, v, cache, metadata, out) is out
        assert (out[-1] == 7).all()
        for s, y in zip(range(len(sequences)), out[:-1].split(metadata.query_start_loc.diff().tolist()), strict=True):
            found[s].append(y)
    written = 2 * KV_HEADS * SIZE * sum(len(q) for q, _, _ in sequences)
    assert cache.isnan().logical_not().sum() == written  # and no place that is none
    return [torch.cat(several) for several in found]


def some_sequences(lengths=(5, 1, 70)):
    return [tuple(torch.randn(n, h, SIZE).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS)) for n in lengths]


def alone(sequence, **flags):
    """Attention of a sequence by itself, [tokens, heads, SIZE]."""
    q, k, v = (t.transpose(0, 1)[None] for t in sequence)
    return fusednorm.attention(q, k, v, **flags)[0].transpose(0, 1)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"per_layer_sliding_window": 9}, {"window": 9}),
        ({"logits_soft_cap": 1.5}, {"softcap": 1.5}),
        ({"sinks": True}, {"sinks": torch.linspace(-1, 2, HEADS).bfloat16()}),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_a_sequence_is_attention_of_it_alone(config, options, flags, parts):
    """In a batch with others, in parts, from pages in any order."""
    given = dict(options)
    if "sinks" in given:
        given["sinks"] = torch.nn.Parameter(flags["sinks"], requires_grad=False)
    layer = a_layer(config, "model.layers.0.self_attn.attn", **given)
    sequences = some_sequences()
    for sequence, found in zip(sequences, computed(layer, sequences, parts), strict=True):
        assert torch.equal(found, alone(sequence, scale=0.2, **flags))


def test_each_sequence_says_whether_it_is_causal(config):
    layer = a_layer(config, "a.attn")
    sequences, causal = some_sequences((5, 9, 3, 40)), torch.tensor([True, True, False, True])
    found = computed(layer, sequences, 1, causal)
    for sequence, one, y in zip(sequences, causal.tolist(), found, strict=True):
        assert torch.equal(y, alone(sequence, scale=0.2, causal=one))


def test_contract(config):
    """By the names of the trainer's modules, with all that decides bits."""
    model = torch.nn.Module()
    model.self_attn = torch.nn.Module()
    model.self_attn.attn = a_layer(config, "self_attn.attn", per_layer_sliding_window=9, logits_soft_cap=2.0)
    expected = "self_attn: attention(scale=0.2, window=9, softcap=2.0), float32"
    assert [str(step) for step in fusednorm.contract(model).steps] == [expected]


def test_of_sequences():
    """The queries, keys and values of each sequence, out of its pages."""
    k, v = torch.randn(2, 6, KV_HEADS, 3, 4)
    q, pages, starts = torch.randn(5, HEADS, 4), torch.tensor([[5, 1], [2, 9]]), torch.tensor([0, 4, 5])
    (first, keys, values), (second, other, _) = of_sequences(q, k, v, pages, starts, torch.tensor([5, 2]))
    assert torch.equal(first[0], q[:4].transpose(0, 1))
    assert torch.equal(second[0], q[4:].transpose(0, 1))
    assert torch.equal(keys[0], torch.cat((k[5], k[1, :, :2]), 1))
    assert torch.equal(values[0], torch.cat((v[5], v[1, :, :2]), 1))
    assert torch.equal(other[0], k[2, :, :2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi adds to their scores"),
        ({"attn_type": "encoder_only"}, "they are of the kind encoder_only, and fusednorm's are decoders"),
    ],
)
def test_layers_that_vllm_computes(config, said, options, words):
    layer = a_layer(config, "b.attn", **options)
    assert not [module for module in layer.modules() if isinstance(module, Attention)]
    assert f"vLLM keeps its own attention of some layers: {words}" in said.text


def test_fp8_caches_are_vllms(config, said):
    register()
    made = backend().get_impl_cls()(HEADS, SIZE, 0.2, KV_HEADS, None, None, "fp8")
    assert made.reason == "their cache is fp8"
    assert "some layers: their cache is fp8" in said.text


SETTINGS = ("huggingface,own-attention", "own-products,own-attention,huggingface", "vllm", "default")


@pytest.mark.parametrize("setting", SETTINGS)
def test_vllm_keeps_its_own_attention(config, said, monkeypatch, setting):
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    register()
    assert backend().__module__ == "vllm.v1.attention.backends.cpu_attn"
    assert ("vLLM keeps its own attention" in said.text) == ("huggingface" in setting)
    assert ("vLLM keeps its own products of matrices" in said.text) == ("own-products" in setting)


@pytest.mark.parametrize("setting", ["vllm,own-attention", "own-attention", "off,own-attention", "gpu,own-attention"])
def test_only_huggingface_has_attention(monkeypatch, setting):
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    assert plugin.requested() is None


def rename_a_parameter(monkeypatch, cpu_attn):
    def do_kv_cache_update(self, layer, key, value, cache, slot_mapping):
        raise NotImplementedError

    monkeypatch.setattr(cpu_attn.CPUAttentionBackendImpl, "do_kv_cache_update", do_kv_cache_update)
    return "do_kv_cache_update to take layer key value kv_cache slot_mapping, got layer key value cache slot_mapping"


def write_within_attention(monkeypatch, cpu_attn):
    monkeypatch.setattr(cpu_attn.CPUAttentionBackend, "forward_includes_kv_cache_update", True)
    return "to write to the cache before attention is computed"


def replace_it(monkeypatch, cpu_attn):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "collections.Counter")
    return "another plug-in replaces it"


@pytest.mark.parametrize("change", [rename_a_parameter, write_within_attention, replace_it])
def test_an_unknown_attention_is_left_as_it_was(config, said, monkeypatch, change):
    from vllm.v1.attention.backends import cpu_attn

    words = change(monkeypatch, cpu_attn)
    before = backend()
    register()
    assert backend() is before
    assert "leaves vLLM's attention as it was: " in said.text
    assert words in said.text


def sample(mode, logits):
    """vLLM's sampler, of random tokens among the 5 most likely: all log-probabilities that it returns."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    rows = len(logits)
    metadata = SamplingMetadata(
        temperature=torch.full((rows,), 0.7),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=torch.full((rows,), 5),
        generators={},
        max_num_logprobs=-1,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler(mode)
    several = [sampler(logits.clone(), metadata).logprobs_tensors.logprobs for _ in range(2)]
    assert torch.equal(*several)
    return several[0]


def test_log_probabilities(config):
    """Of the logits, and of those that are processed: divided by the temperature, and without all but five."""
    logits = torch.randn(9, 1000).mul(5).bfloat16()
    theirs = sample("raw_logprobs", logits)
    register()
    found = sample("raw_logprobs", logits)
    assert torch.equal(found, fusednorm.log_softmax(logits, out_dtype=torch.float32))
    assert not torch.equal(found, theirs)
    processed = sample("processed_logprobs", logits)
    assert torch.equal(processed, fusednorm.log_softmax(sample("processed_logits", logits)))
    assert (processed.isfinite().sum(-1) == 5).all()


def test_an_unknown_sampler_is_left_as_it_was(config, said, monkeypatch):
    from vllm.v1.sample.sampler import Sampler

    monkeypatch.setattr(Sampler, "compute_logprobs", lambda self, logits: logits)
    register()
    assert "leaves vLLM's log-probabilities as they were: expected vllm.v1.sample.sampler.Sampler" in said.text
