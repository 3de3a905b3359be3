"""attn_implementation="fusednorm" and patch(model, attention=True): a token's result depends on the tokens it sees."""

import contextlib
import copy

import pytest
import torch

import fusednorm.transformers

transformers = pytest.importorskip("transformers")

#: Both sides in float64, but eager attention rounds its weights to float32: by 2^-25 of them, of which two layers make
#: less than 1e-4. A key too many changes logits by more than 0.1.
CLOSE = 1e-4

# Versions from 5.24 on have other names for the arguments and methods that older ones know.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in (v|version ):FutureWarning")

MODELS = {
    "Qwen3": {},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"sliding_window": 4},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


HEADS = torch.ones(1, 4, 5, 8), torch.ones(1, 2, 16, 8)


def model_of(kind):
    """A decoder of two layers with random weights, by eager attention."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=99,
        max_position_embeddings=512,
        attn_implementation="eager",
        **MODELS[kind],
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # some are not initialised
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


IDS = torch.randint(99, (2, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0  # padding, on the left
POSITIONS = (MASK.cumsum(-1) - 1).clamp_min(0)


def in_parts(model, cache, *ends):
    """Logits of the second row, by calls of a cache that end at these tokens."""
    found, begin = [], 0
    for end in ends:
        places = torch.arange(begin, end)
        found.append(model(IDS[1:, begin:end], past_key_values=cache, cache_position=places).logits[0])
        begin = end
    return torch.cat(found)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_equal_bits(kind):
    """Alone, in a padded batch, token by token, in chunks, in a static cache, and twice in a packed row."""
    model = model_of(kind).bfloat16()
    report = fusednorm.transformers.patch(model, attention=True, products=True)
    assert report.attentions == 2
    whole = model(IDS[1:]).logits[0]
    batch = model(IDS, attention_mask=MASK, position_ids=POSITIONS).logits
    assert torch.equal(batch[1], whole)
    assert torch.equal(batch[0, 5:], model(IDS[:1, 5:]).logits[0])
    dynamic, config = transformers.DynamicCache, model.config
    assert torch.equal(in_parts(model, dynamic(config=config), *range(1, 14)), whole)
    assert torch.equal(in_parts(model, dynamic(config=config), 5, 10, 13), whole)
    assert torch.equal(
        in_parts(model, transformers.StaticCache(config=config, max_cache_len=20), 5, *range(6, 14)), whole
    )
    if kind == "GptOss":  # which makes masks without positions
        return
    packed = torch.cat((IDS[1], IDS[1, :6])).unsqueeze(0), torch.cat((torch.arange(13), torch.arange(6))).unsqueeze(0)
    found = model(packed[0], position_ids=packed[1], use_cache=False).logits[0]
    assert torch.equal(found, torch.cat((whole, whole[:6])))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "GptOss"])  # whose experts depend on numbers
@torch.no_grad()
def test_compiled_and_exported(kind):
    model = model_of(kind).bfloat16()
    fusednorm.transformers.patch(model, attention=True, products=True)
    expected = model(IDS, attention_mask=MASK, position_ids=POSITIONS, use_cache=False).logits
    given = {"input_ids": IDS, "attention_mask": MASK, "position_ids": POSITIONS, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(model, (), given, strict=False).module()
    for run in (compiled, exported):
        assert torch.equal(run(**given).logits[MASK.bool()], expected[MASK.bool()])


@pytest.mark.parametrize("kind", MODELS)
def test_beams(kind):
    """Of a padded batch, which take each other's keys, have the tokens and scores of each prompt alone."""
    model = model_of(kind).bfloat16()
    fusednorm.transformers.patch(model, attention=True, products=True)
    how = {"num_beams": 3, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    how |= {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    both = model.generate(IDS, attention_mask=MASK, **how)
    for row, first in enumerate((5, 0)):
        alone = model.generate(IDS[row : row + 1, first:], attention_mask=MASK[row : row + 1, first:], **how)
        assert torch.equal(both.sequences[row, first:], alone.sequences[0])
        assert torch.equal(both.sequences_scores[row], alone.sequences_scores[0])


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_beside_eager_attention(kind):
    """Each row of a padded batch, beside that row alone by the model's own attention."""
    eager = model_of(kind).double()
    patched = copy.deepcopy(eager)
    assert fusednorm.transformers.patch(patched, attention=True, steps=()).attentions == 2
    found = patched(IDS, attention_mask=MASK, position_ids=POSITIONS).logits
    torch.testing.assert_close(found[1], eager(IDS[1:]).logits[0], atol=CLOSE, rtol=0)
    torch.testing.assert_close(found[0, 5:], eager(IDS[:1, 5:]).logits[0], atol=CLOSE, rtol=0)


@torch.no_grad()
def test_encoders_and_cross_attention():
    of_both = {"vocab_size": 99, "attn_implementation": "eager"}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    bert = transformers.BertConfig(hidden_size=32, **sizes, **of_both)
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    bart = transformers.BartConfig(d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes, **of_both)
    for eager, count in (
        (transformers.BertModel(bert), 2),
        (transformers.BartForConditionalGeneration(bart), 6),  # encoder, decoder, and between them
    ):
        eager.eval().double()
        patched = copy.deepcopy(eager)
        assert fusednorm.transformers.patch(patched, attention=True, steps=()).attentions == count
        more = {"decoder_input_ids": IDS[:, :7]} if count == 6 else {}
        right = MASK.flip(-1)
        for given in (MASK, right, None):
            found, expected = (model(IDS, attention_mask=given, **more)[0] for model in (patched, eager))
            seen = ... if given is None or more else given.bool()
            torch.testing.assert_close(found[seen], expected[seen], atol=CLOSE, rtol=0)


def test_gradients():
    """Those of the model's own attention, with checkpoints or without."""
    eager = model_of("Gemma3Text").double()
    patched = copy.deepcopy(eager)
    fusednorm.transformers.patch(patched, attention=True, steps=())
    found = []
    for model, checkpoints in ((eager, False), (patched, False), (patched, True)):
        model.zero_grad()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()(IDS[1:], labels=IDS[1:], use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, ours, again in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=CLOSE, rtol=CLOSE)
        assert torch.equal(ours, again)


@torch.no_grad()
def test_what_is_left_to_the_model():
    """With a warning, and the results of its own attention."""
    eager = model_of("Qwen3").double()
    patched = copy.deepcopy(eager)
    fusednorm.transformers.patch(patched, attention=True, steps=())
    added = torch.zeros(1, 1, 13, 13, dtype=torch.double).masked_fill(torch.ones(13, 13).triu(1).bool(), -1e9)
    added[..., 3, 1] = 0.5
    with pytest.warns(UserWarning, match="Qwen3Attention: its mask is float64 with 4 dimensions, and not bool with 4"):
        found = patched(IDS[1:], attention_mask=added).logits
    assert torch.equal(found, eager(IDS[1:], attention_mask=added).logits)
    with pytest.warns(UserWarning, match="output_attentions asks for its weights"):
        weights = patched.model.layers[0].self_attn(
            torch.ones(1, 3, 64).double(),
            position_embeddings=(torch.ones(1, 3, 32).double(), torch.zeros(1, 3, 32).double()),
            attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool),
            output_attentions=True,
        )[1]
    assert weights.shape == (1, 4, 3, 3)
    attend, own, q, k = fusednorm.transformers.attention_function.attend, patched.model.layers[0].self_attn, *HEADS
    for given in ({}, {"output_attentions": True}):  # of which nothing says where the queries are
        with pytest.raises(ValueError, match="attention_mask must be given for 5 queries and 16 keys"):
            attend(own, q, k, k, None, **given)
    for queries in (1, 5):
        with pytest.raises(ValueError, match="attention_mask must be given for 5 keys and a window of 2, got None"):
            attend(own, q[:, :, :queries], k[:, :, :5], k[:, :, :5], None, sliding_window=2)
    added = torch.zeros(1, 1, 5, 16)
    for flag, value in (("softcap", 2.0), ("s_aux", torch.ones(4))):
        with pytest.raises(ValueError, match=f"its own attention ignores {flag}"):
            attend(own, q, k, k, added, **{flag: value})
    with pytest.raises(ValueError, match="attention_mask must be given for 5 queries and 16 keys of a causal module"):
        fusednorm.transformers.attention_function.attend(torch.nn.Module(), q, k, k, None)


@torch.no_grad()
def test_what_is_left_to_torchs_attention():
    """Where the model had it before the patch, as most have: the same kernel, on a mask that is added to scores."""
    own = model_of("Qwen3")
    own.set_attn_implementation("sdpa")
    patched = copy.deepcopy(own)
    fusednorm.transformers.patch(patched, attention=True, steps=())
    added = torch.zeros(1, 1, 13, 13).masked_fill(torch.ones(13, 13).triu(1).bool(), -1e9).to(own.dtype)
    added[..., 3, 1] = 0.5
    with pytest.warns(UserWarning, match="and not bool with 4"), counted_sdpa() as calls:
        found = patched(IDS[1:], attention_mask=added).logits
    assert len(calls) == 2
    assert torch.equal(found, own(IDS[1:], attention_mask=added).logits)
    with pytest.warns(UserWarning, match="output_attentions asks for its weights"), counted_sdpa() as calls:
        patched(IDS[1:], output_attentions=True)
    assert not calls


@contextlib.contextmanager
def counted_sdpa():
    """The calls of torch's attention in the block."""
    calls, function = [], torch.nn.functional.scaled_dot_product_attention

    def count(*operands, **more):
        calls.append(operands)
        return function(*operands, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
        yield calls


def test_dropout_is_left_to_the_model():
    model = model_of("Qwen3")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    fusednorm.transformers.patch(model, attention=True, steps=())
    model(IDS)
    with pytest.warns(UserWarning, match="dropout in training is random"):
        model.train()(IDS)


@torch.no_grad()
def test_undone_and_by_name():
    model = model_of("Qwen3")
    expected = model(IDS).logits
    report = fusednorm.transformers.patch(model, attention=True, steps=())
    assert "2 attentions replaced" in str(report)
    again = fusednorm.transformers.patch(model, attention=True, steps=())
    assert (again.attentions, again.before.attentions) == (0, 2)
    found = model(IDS).logits
    assert not torch.equal(found, expected)
    assert fusednorm.transformers.unpatch(model).attentions == 2
    assert torch.equal(model(IDS).logits, expected)
    fusednorm.transformers.register_attention()
    model.set_attn_implementation("fusednorm")
    assert torch.equal(model(IDS).logits, found)


def test_models_that_choose_keys_or_compute_attention_themselves():
    """Other attention would ignore what they hand over, or have a mask of bool added to scores."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.HYV4Config(
        **sizes, num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=32, pad_token_id=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    report = fusednorm.transformers.patch(model, attention=True, steps=())
    assert report.attentions == 0
    assert [entry.what for entry in report.entries] == ["it hands its attention indices"]
    fusednorm.transformers.register_attention()
    bloom = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(bloom, attn_implementation="fusednorm")
    with pytest.raises(ValueError, match="this model computes attention by code of its own"):
        model(IDS)
