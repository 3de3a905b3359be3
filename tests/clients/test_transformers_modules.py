"""A patched module reads its own weights, and keeps nothing for another one.

So hooks, FSDP, copies and other sequences of layers are as without the patch. The models are small and have random
weights; most are compared with the same model whose norms alone are replaced, which fusing must not change by a bit.
"""

import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import ModuleList
from torch.utils._pytree import tree_leaves

import fusednorm.transformers
from fusednorm.calls import fast_path
from fusednorm.transformers import rotations
from fusednorm.transformers.modules import PatchedNorm
from fusednorm.transformers.norms import taken

transformers = pytest.importorskip("transformers", reason="the tox environment `transformers` installs it")

from ranks import on_ranks  # noqa: E402 - after the line that skips

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTATED = {"num_key_value_heads": 1, "head_dim": 16}

#: The configuration's arguments beside SIZES, and the lists of layers.
FAMILIES = {
    "Llama": (ROTATED, ["layers"]),
    "Qwen3": (ROTATED, ["layers"]),
    "Gemma2": (ROTATED, ["layers"]),
    "GPT2": ({"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 32}, ["h"]),
    "GPTNeoX": ({}, ["layers"]),
    "T5": (
        {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        | {"feed_forward_proj": "gated-gelu"},
        ["encoder.block", "decoder.block"],
    ),
    "ViT": ({"image_size": 8, "patch_size": 2}, ["layers"]),
    "Bert": ({}, ["encoder.layer"]),
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout_prob", "hidden_dropout")
DROPOUTS += ("attention_probs_dropout_prob",)
STEPS = ("norms", "additions", "rotations")

family = pytest.mark.parametrize("name", FAMILIES)
#: An encoder with a decoder, norms before and after each step, and layers in the oldest form; the others for a release.
some = pytest.mark.parametrize(
    "name",
    [name if name in ("T5", "Gemma2", "GPT2") else pytest.param(name, marks=pytest.mark.release) for name in FAMILIES],
)


@functools.cache
def once(name, steps, dtype=torch.float32, **more):
    """A model without dropout, with random weights, also in its norms, and patched."""
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES.get(name, (ROTATED,))[0] | more)
    for dropout in DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    fusednorm.transformers.patch(model, steps=steps)
    return model.eval()


def build(name, steps=STEPS, **more):
    """A copy of it."""
    return copy.deepcopy(once(name, steps, **more))


def rows(model, seed=1):
    """The last hidden state of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (2, 7), generator=generator)
    match name_of(model):
        case "T5":
            inputs = {"input_ids": ids, "decoder_input_ids": ids}
        case "ViT":
            inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).to(model.dtype)}
        case _:
            inputs = {"input_ids": ids}
    return model(**inputs, **({} if "pixel_values" in inputs else {"use_cache": False})).last_hidden_state


def trained(model, seed=1):
    """The rows, and the gradients of all parameters that have one."""
    model.train()
    model.zero_grad()
    y = rows(model, seed)
    y.float().square().mean().backward()
    return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def same(one, other):
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def layers_of(model):
    return [layer for path in FAMILIES[name_of(model)][1] for layer in at(model, path)]


def name_of(model):
    return type(model).__name__.removeprefix("FSDP").removesuffix("Model")


def at(model, path):
    return model.get_submodule(path)


# Hooks


def after(module, inputs, output):
    """Writes to the results, and returns nothing, so that no object is another one."""
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(0.75)


def before(module, arguments, keywords):
    """Writes to the operands, also to tables of a rotation."""
    after(module, None, (arguments, keywords))


def hooked(model, kind, place):
    """Hooks on all modules of a class, by its name."""
    for module in model.modules():
        if type(module).__name__ == kind and place == "after":
            module.register_forward_hook(after)
        elif type(module).__name__ == kind:
            module.register_forward_pre_hook(before, with_kwargs=True)


def kinds(model):
    return sorted({type(module).__name__ for module in model.modules() if not isinstance(module, ModuleList)})


def without_hooks(model):
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


#: GPT-NeoX's own rotation concatenates, and SDPA's result, to which this hook writes, has the layout of q.
RAISES = ("GPTNeoX", "Linear", "before")


@family
def test_hooks_that_write(name):
    """After and before each kind of module: the rows, and where the model alone trains with the hook, gradients."""
    alone, norms, fused = build(name, ()), build(name, "norms"), build(name)
    compared = 0
    for kind in kinds(alone):
        for place in ("after", "before"):
            for model in (alone, norms, fused):
                hooked(model, kind, place)
            with torch.inference_mode():
                same([rows(fused)], [rows(norms)])
            try:
                trained(alone)
            except RuntimeError:  # the hook writes to a tensor that torch keeps for the backward pass
                pass
            else:
                if (name, kind, place) != RAISES:
                    same(trained(fused), trained(norms))
                compared += 1
            for model in (alone, norms, fused):
                without_hooks(model)
    assert compared > len(kinds(alone))


def test_hooks_that_write_in_compiled_code():
    """On norms, layers, and the module of the tables, which lie before and after each step of ours."""
    model = build("Gemma2", num_hidden_layers=2)
    for kind in kinds(model):
        if "Norm" in kind or "DecoderLayer" in kind or "Rotary" in kind:
            hooked(model, kind, "after")
    with torch.no_grad():
        wanted = rows(model)
        same([rows(compiled(model))], [wanted])


class Add(torch.nn.Module):
    """A layer that adds before its norm, and at its end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.RMSNorm(16, 1e-5), torch.nn.RMSNorm(16, 1e-5)

    def forward(self, x):
        y = self.first(x)
        x = x + y
        y = self.second(x)
        x = x + y
        return x  # noqa: RET504 - as models have it


class Adds(torch.nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = ModuleList([Add(), Add()]), torch.nn.RMSNorm(16, 1e-5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_hooks_that_write_in_inductors_code():
    """It computes these additions and products as eager code."""
    model, x = Adds(), torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    assert fusednorm.transformers.patch(model).adds == 2
    hooked(model, "Add", "after")
    hooked(model, "RMSNorm", "after")
    with torch.no_grad():
        wanted = model(x.clone())
        same([compiled(model, "inductor")(x)], [wanted])


class Writer(torch.nn.Module):
    """Stands around a layer and writes to its result, as a model's own loop may."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["layer"], name)

    def forward(self, *args, **kwargs):
        output = self.layer(*args, **kwargs)
        h = output[0] if isinstance(output, tuple) else output
        h += 1
        return output


def with_writers(model):
    for path in FAMILIES[name_of(model)][1]:
        owner, _, name = path.rpartition(".")
        setattr(at(model, owner), name, ModuleList(map(Writer, at(model, path))))
    return model


@family
def test_a_write_between_layers(name):
    """By a module around each layer, that comes before the patch or after it; also in inference mode, and compiled."""
    wanted = with_writers(build(name, "norms"))
    patched_later = with_writers(build(name, ()))
    fusednorm.transformers.patch(patched_later, steps=STEPS)
    for model in (with_writers(build(name)), patched_later):
        same(trained(model), trained(wanted))
        with torch.inference_mode():
            same([rows(model)], [rows(wanted)])
    if name == "GPT2":
        with torch.no_grad():
            same([rows(compiled(model))], [rows(wanted)])


# Copies, and other sequences of layers


def test_a_deep_model_is_copied():
    sizes = {"num_hidden_layers": 200, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    model = once("Llama", STEPS, **sizes)
    copied = copy.deepcopy(model)
    assert sum(isinstance(module, PatchedNorm) for module in copied.modules()) == 401
    with torch.no_grad():
        same([rows(copied)], [rows(model)])


@pytest.mark.parametrize("name", ["GPT2", "T5", "ViT"])
def test_a_layer_is_pickled_alone(name):
    """Its pickle does not grow with the layers after it, but for the numbers of the configuration."""
    few, many = (pickle.dumps(layers_of(once(name, STEPS, num_hidden_layers=number))[0]) for number in (2, 9))
    assert abs(len(few) - len(many)) < 64
    assert any(isinstance(module, PatchedNorm) for module in pickle.loads(few).modules())


def edited(model, change):
    for path in FAMILIES[name_of(model)][1]:
        layers = at(model, path)
        if change == "reordered":
            layers[0], layers[1] = layers[1], layers[0]
        elif change == "replaced":
            layers[1] = copy.deepcopy(layers[0])
        else:
            del layers[1]
    return model


@some
def test_layers_in_another_sequence(name):
    """Between patch and call; and nothing keeps a layer that is gone."""
    for change in ("deleted", "reordered", "replaced"):
        model, wanted = build(name), build(name, "norms")
        gone = weakref.ref(layers_of(model)[1])
        edited(model, change)
        gc.collect()
        assert (gone() is None) == (change != "reordered")
        with torch.no_grad():
            same([rows(model)], [rows(edited(wanted, change))])


class OfAnotherType(torch.Tensor):
    """A tensor that C does not know."""


def elsewhere(norm):
    """Has the weight be an attribute, as FSDP does."""
    weight = norm.weight.detach()
    del norm.weight
    norm.weight = weight


def autocast():
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


of_modules = torch.nn.modules.module

#: Changes of a norm of bfloat16 after which a call of ours may compute something else, or must look elsewhere. They
#: return nothing, or a function that undoes them.
CHANGES = {
    "eps": lambda norm: setattr(norm, "eps", 0.5),
    "no eps": lambda norm: delattr(norm, "eps"),
    "forward": lambda norm: setattr(norm, "forward", print),
    "a hook": lambda norm: norm.register_forward_hook(print).remove,
    "a hook before": lambda norm: norm.register_forward_pre_hook(print).remove,
    "a hook of gradients": lambda norm: norm.register_full_backward_hook(print).remove,
    "a hook before gradients": lambda norm: norm.register_full_backward_pre_hook(print).remove,
    "a hook of all": lambda norm: of_modules.register_module_forward_hook(print).remove,
    "a hook of all before": lambda norm: of_modules.register_module_forward_pre_hook(print).remove,
    "a hook of all gradients": lambda norm: of_modules.register_module_full_backward_hook(print).remove,
    "a hook before all gradients": lambda norm: of_modules.register_module_full_backward_pre_hook(print).remove,
    "a weight of another dtype": lambda norm: setattr(norm, "weight", torch.nn.Parameter(norm.weight.double())),
    "a weight of another type": lambda norm: norm._parameters.update(weight=torch.ones(8).as_subclass(OfAnotherType)),
    "a weight elsewhere": elsewhere,
    "no weight": lambda norm: setattr(norm, "weight", None),
    "a bias of another dtype": lambda norm: norm.register_parameter("bias", torch.nn.Parameter(torch.ones(8))),
    "autocast": lambda norm: autocast(),
}


@pytest.mark.skipif(not fast_path.OPEN, reason="without the fast path Python looks at all calls")
@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_c_takes_a_norm_as_python_does(kind):
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    norm = kind(8, eps=1e-3).bfloat16()
    fusednorm.transformers.patch(torch.nn.Sequential(norm))
    state = norm._fusednorm

    def of_c(norm, *operands):
        return fast_path.taken_in_c(norm.__dict__, state.reads.values, state.usual, *operands)

    expected = taken(state.forms, state.reads, x, norm)
    for operands in ((x,), (x, x)):
        found = of_c(norm, *operands)
        assert list(map(id, found)) == list(map(id, expected))
    other = x.as_subclass(OfAnotherType)
    for operands in ((x, x.float()), (x, None), (x, other), (x.double(),), (other,), (None,), (1, x)):
        assert of_c(norm, *operands) is None
    for name, change in CHANGES.items():
        changed = copy.deepcopy(norm)
        undo = change(changed)
        found = of_c(changed, x, x)
        if undo is not None:
            undo()
        assert found is None, name
        if "eps" in name:  # which C and Python read of a module; the rest they look at in each call
            assert taken(changed._fusednorm.forms, changed._fusednorm.reads, x, changed) is None, name


class StopError(Exception):
    """Ends a forward pass."""


@family
def test_nothing_is_kept_where_the_next_call_does_not_come(name):
    """After a layer that was called alone no tensor lives that a module took or returned."""
    model, seen = build(name), []

    def note(module, inputs, output):
        seen.extend(weakref.ref(tensor) for tensor in (*inputs, *tree_leaves(output)) if torch.is_tensor(tensor))

    def stop(module, inputs, output):
        raise StopError

    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(note)
    layers_of(model)[1].register_forward_hook(stop)
    with pytest.raises(StopError) as raised:
        rows(model)
    del raised
    gc.collect()
    assert len(seen) > 20
    assert [one for one in seen if one() is not None] == []


# Tables


@pytest.mark.parametrize(("name", "columns"), [("Llama", "halves"), ("Cohere", "pairs")])
@pytest.mark.parametrize("written", ["all", "some"])
def test_tables_that_change_in_place(name, columns, written):
    """After their module: by a hook, and by code that is none, also where torch counts no writes, and compiled."""

    def write(tables):
        size = tables[0].shape[-1] // 2
        table, part = {"halves": (0, slice(size, None)), "pairs": (1, slice(1, None, 2))}[columns]
        tables[table][..., slice(None) if written == "all" else part].mul_(0.5)

    class Writing(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            tables = self.module(*args, **kwargs)
            write(tables)
            return tables

    for by in ("hook", "module"):
        found = []
        for steps in ((), "rotations"):
            model = build(name, steps, dtype=torch.bfloat16, num_hidden_layers=1)
            if by == "hook":
                model.rotary_emb.register_forward_hook(lambda module, inputs, output: write(output))
            else:
                model.rotary_emb = Writing(model.rotary_emb)
            with torch.inference_mode():
                found.append([rows(model)])
            with torch.no_grad():
                found[-1].append(rows(model))
                if by == "hook" or written == "all":  # a compiler shows no writes of others
                    found[-1].append(rows(compiled(model) if steps else model))
        same(*found)


def test_tables_that_nothing_changed_are_not_compared(monkeypatch):
    """Without a write one call rotates; and after one of whole tables too."""
    made, call = [], rotations.qk_norm_rope_on_fast_path
    monkeypatch.setattr(rotations, "qk_norm_rope_on_fast_path", lambda *args: made.append(1) or call(*args))
    model = build("Cohere", ("norms", "rotations"))
    compared, repeat = [], rotations.Pairs.repeat
    monkeypatch.setattr(rotations.Pairs, "repeat", staticmethod(lambda table: compared.append(1) or repeat(table)))
    with torch.no_grad():
        rows(model)
        assert (len(made), len(compared)) == (3, 0)
        model.rotary_emb.register_forward_hook(after)
        rows(model)
        assert (len(made), len(compared)) == (6, 2)


# Weights that are elsewhere between calls


@family
@pytest.mark.parametrize("patch_first", [True, False])
def test_weights_without_memory_between_calls(name, patch_first):
    """As DeepSpeed's ZeRO-3 has them: of [0] elements but while their module runs."""
    model, empty, kept = build(name, STEPS if patch_first else ()), torch.empty(0), {}

    def fill(module, inputs):
        for parameter in module.parameters(recurse=False):
            parameter.data = kept[parameter]

    def free(module, inputs, output):
        for parameter in module.parameters(recurse=False):
            parameter.data = empty

    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            kept.setdefault(parameter, parameter.data)
        module.register_forward_pre_hook(fill)
        module.register_forward_hook(free)
    for parameter in kept:
        parameter.data = empty
    if not patch_first:  # which cannot trace a LayerNorm without its weight, and says so
        patch_first = fusednorm.transformers.patch(model, steps=STEPS).norms > 0
    with torch.no_grad():
        same([rows(model)], [rows(build(name, "norms" if patch_first else ()))])


# On two ranks


class Headed(torch.nn.Module):
    """A model and a head, each of which may be a unit of FSDP, with one sequence of rows per rank."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = body, torch.nn.Linear(32, 8)

    def forward(self, seed):
        return self.head(rows(self.body, seed))


def step(model, seed):
    """Its rows without gradients, in evaluation, and with them, by calls of the whole, as FSDP wants."""
    with torch.no_grad():
        alone = model.eval()(seed)
    y = model.train()(seed)
    y.float().square().mean().backward()
    return [alone, y.detach()]


@functools.cache
def of_one_process(name):
    """The rows of each rank, and the means of all gradients: halves are exact."""
    ys, gradients = [], []
    for seed in range(2):
        model = Headed(build(name))
        ys.append(step(model, seed))
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    return ys, {key: (gradients[0][key] + gradients[1][key]) / 2 for key in gradients[0]}


def same_gradients(found, gradients):
    assert found.keys() == gradients.keys()
    differing = [key for key in found if not torch.equal(found[key], gradients[key])]
    assert not differing, differing


def units(model, of_norms):
    """Layers, and the head; and each norm by itself, before the layers that have it."""
    norms = [m for m in model.modules() if "Norm" in type(m).__name__] if of_norms else []
    return [*norms, *layers_of(model.body), model.head]


@on_ranks(2)
@some
def test_fully_sharded(name):
    """Before the patch and after it, with and without norms as units: rows and gradients are those of one process.

    The gradient of what T5's decoder takes of its encoder is a sum, which FSDP makes in another sequence.
    """
    ys, gradients = of_one_process(name)
    for of_norms in (False, True):
        for steps in ("norms", STEPS, ()):
            model = Headed(build(name, steps))
            for unit in units(model, of_norms):
                fully_shard(unit)
            fully_shard(model)
            if not steps:
                assert fusednorm.transformers.patch(model, steps=STEPS).norms
            same(step(model, dist.get_rank()), ys[dist.get_rank()])
            found = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}
            if name == "T5" and steps == "norms":
                gradients = found
            same_gradients(found, gradients)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2", "Bert"])
def test_fully_sharded_with_a_policy(name):
    """Beside norms alone, which only read their own weights."""
    for of_norms in (False, True):
        found = []
        for steps in ("norms", STEPS):
            model = Headed(build(name, steps))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for unit in units(model, of_norms):
                fully_shard(unit, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mp_policy=policy)
            found.append(step(model, dist.get_rank()))
        same(*found)


@on_ranks(2)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_fsdp1(original):
    """The first FSDP, of layers and the head, in all strategies: rows, and gradients where parameters have them."""
    for name, strategy in itertools.product(("Gemma2", "T5"), ShardingStrategy):
        ys, gradients = of_one_process(name)
        model, rank = Headed(build(name)), dist.get_rank()
        hybrid = {"device_mesh": init_device_mesh("cpu", (1, 2))} if "HYBRID" in strategy.name else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
            sharded = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({type(unit) for unit in units(model, False)}),
                sharding_strategy=strategy,
                use_orig_params=original,
                device_id=torch.device("cpu"),
                **hybrid,
            )
        same(step(sharded, rank), ys[rank])
        if original:
            with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
                same_gradients({key: p.grad for key, p in clean(sharded) if p.grad is not None}, gradients)


def clean(sharded):
    """Parameters by the names that they have without FSDP's modules."""
    return ((key.replace("_fsdp_wrapped_module.", ""), one) for key, one in sharded.named_parameters())
