"""Hugging Face models with fusednorm.transformers.patch, beside the same models without.

Each model has random weights and is built from its configuration: nothing is downloaded. First the answers: logits,
hidden states and 64 greedy tokens with and without the patch, and one training step; then times, alternating in one
process. ``--profile`` says where the time of one token goes, and how long it would take if the patch took none.
``--encoders`` takes models with LayerNorms, and also leaves out what takes most of their time. ``--training`` measures
the memory and the time of a step of training, and needs peft. ``--sizes`` takes models with the configurations of
published ones and measures times alone; with ``--products`` the patch takes products too, and with ``--int8`` layers
are int8. ``--contexts`` measures one token after many, by torch's attention and products and by fusednorm's.

    python -P benchmarks/transformers_models.py
    python -P benchmarks/transformers_models.py --profile
    python -P benchmarks/transformers_models.py --encoders
    python -P benchmarks/transformers_models.py --training
    python -P benchmarks/transformers_models.py --sizes
    python -P benchmarks/transformers_models.py --sizes --products
    python -P benchmarks/transformers_models.py --sizes --int8
    python -P benchmarks/transformers_models.py --contexts 64 1024 4096
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

import fusednorm.transformers
from fusednorm.transformers import activations, modules, rotations
from fusednorm.transformers.replacing import Patched

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "pad_token_id": 0,
}
#: The configurations of published models: the kind, and the sizes of it.
PUBLISHED = {
    "Qwen3 0.6B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 3.2 1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
}
#: The methods that are fused steps of patched modules, beside a norm's forward pass.
STEPS = ("_add_norm", "_norm_add", "_rotate", "_rotate_one", "_gate")
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "deepseek_v3"]


def configuration(kind: str, shape: dict[str, Any]) -> Any:
    """The kind's own configuration, with those of its sizes changed that it has."""
    config = type(transformers.AutoConfig.for_model(kind))()
    for name, value in (EXPERTS | shape).items():
        if hasattr(config, name):
            setattr(config, name, value)
    if kind == "deepseek_v3":
        config.num_key_value_heads, config.head_dim = config.num_attention_heads, config.qk_rope_head_dim
        config._experts_implementation = "eager"  # which also runs in float64
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def build(kind: str, shape: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model whose weights, also those of its norms, are random."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(kind, shape), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tokens(rows: int, length: int) -> torch.Tensor:
    """Ids, the same each time."""
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The greatest distance of two elements."""
    return (one.double() - other.double()).abs().max().item()


def answers(kind: str) -> dict[str, Any]:
    """What the patch replaces and what it changes, in bfloat16 and float32."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = build(kind, SHAPE, dtype)
        ids = tokens(2, 32)

        def run(model: Any = model, ids: torch.Tensor = ids) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
            with torch.no_grad():
                logits = model(ids).logits
                text = model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
            model.train()
            model.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            model.eval()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            return logits, text, loss.item(), gradients

        before = run()
        report = fusednorm.transformers.patch(model)
        after = run()
        exact = model.double()
        fusednorm.transformers.unpatch(exact)
        with torch.no_grad():
            own = difference(before[0], exact(ids).logits)
        found |= {"norms": report.norms, "adds": report.adds}
        found |= {"rotations": report.rotations, "gates": report.gates}
        found[str(dtype)[6:]] = {
            "logits": difference(before[0], after[0]),
            "own_error": own,
            "tokens_equal": torch.equal(before[1], after[1]),
            "loss_equal": before[2] == after[2],
            "gradients": (after[3].double() - before[3].double()).norm().item() / before[3].double().norm().item(),
        }
    return found


def change(model: Any, products: bool, int8: bool) -> None:
    """Patches a model, whose layers become int8 before."""
    if int8:
        fusednorm.transformers.quantize(model, keep_weights=True)
    fusednorm.transformers.patch(model, products=products)


def undo(model: Any) -> None:
    """Puts back all that was changed."""
    if any(isinstance(module, fusednorm.Int8Linear) for module in model.modules()):
        fusednorm.transformers.unquantize(model)
    fusednorm.transformers.unpatch(model)


def times(
    kind: str,
    rounds: int,
    shape: dict[str, Any] = SHAPE,
    clock: Callable[[], float] = time.perf_counter,
    products: bool = False,
    int8: bool = False,
) -> dict[str, tuple[float, float]]:
    """Milliseconds without and with the patch: 128 tokens at once, and one token after them.

    Medians over the turns; of each turn the best of its calls, because other programs may run beside it.
    """
    model = build(kind, shape, torch.bfloat16)

    def prefill() -> Any:
        return model(tokens(1, 128), use_cache=True).past_key_values

    measured: dict[str, tuple[list[float], list[float]]] = {"prefill": ([], []), "decode": ([], [])}
    with torch.no_grad():
        for turn in range(2 * rounds + 2):
            if turn % 2:
                change(model, products, int8)
            else:
                undo(model)
            cache = prefill()

            def decode(cache: Any = cache) -> Any:
                return model(tokens(1, 1), past_key_values=cache, use_cache=True)

            for name, call, count in (("prefill", prefill, 5), ("decode", decode, 20)):
                took = []
                for _ in range(count):
                    begin = clock()
                    call()
                    took.append((clock() - begin) * 1e3)
                if turn >= 2:
                    measured[name][turn % 2].append(min(took))
    return {name: (statistics.median(without), statistics.median(with_)) for name, (without, with_) in measured.items()}


class Replay:
    """The results of calls of one function after the other in a decoded token, and those of C within each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Callable[[], Any]]]] = []
        self.of_c: list[Callable[[], Any]] = []
        self.inside = False
        self.following = iter(self.calls)

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose outermost calls are noted."""

        def call(*arguments: Any, **named: Any) -> Any:
            if self.inside:
                return function(*arguments, **named)
            self.inside, self.of_c = True, []
            result = function(*arguments, **named)
            self.inside = False
            self.calls.append((result, self.of_c))
            return result

        return call

    def noting_c(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which calls C; its calls belong to the outermost call."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.of_c.append(functools.partial(function, *arguments, **named))
            return function(*arguments, **named)

        return call

    def result(self, *_: Any, **__: Any) -> Any:
        """What the next call returned, which takes no time."""
        return next(self.following)[0]

    def result_by_c(self, *_: Any, **__: Any) -> Any:
        """The same, after C has computed it again."""
        result, of_c = next(self.following)
        for call in of_c:
            call()
        return result


def with_steps(model: Any, step: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Changes the fused steps of a patched model."""
    kinds: dict[type, type] = {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, Patched) and kind not in kinds:
            names = ["forward"] if isinstance(module, modules.PatchedNorm) else [n for n in STEPS if hasattr(kind, n)]
            kinds[kind] = type(kind.__name__, (kind,), {name: step(getattr(kind, name)) for name in names})
        module.__class__ = kinds.get(kind, kind)


def profile(kind: str, count: int) -> list[float]:
    """Milliseconds of one token after 128, in medians of so many calls in turns; models share their weights.

    Without the patch, with it, with C alone of what the patch calls, with nothing of it, then also without matrix
    products, and without attention.
    """
    kind, shape = PUBLISHED.get(kind, (kind, SHAPE))
    model = build(kind, shape, torch.bfloat16)
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    models = [model, *(copy.deepcopy(model, dict(kept)) for _ in range(3))]
    for one in models[1:]:
        fusednorm.transformers.patch(one)

    def token(one: Any) -> Callable[[], float]:
        cache = one(tokens(1, 128), use_cache=True).past_key_values

        def call() -> float:
            begin = time.thread_time()
            one(tokens(1, 1), past_key_values=cache, use_cache=True)
            took = time.thread_time() - begin
            cache.crop(-1)
            return took * 1e3

        return call

    calls, replay = [token(one) for one in models], Replay()
    in_c = {
        (place, name): function
        for place in (modules, rotations, activations)
        for name, function in vars(place).items()
        if name.endswith("_on_fast_path") or name == "rms_norm_add"
    }
    for (place, name), function in in_c.items():
        setattr(place, name, replay.noting_c(function))
    with_steps(models[3], replay.noting)
    calls[3]()
    for (place, name), function in in_c.items():
        setattr(place, name, function)
    with_steps(models[2], lambda _: replay.result_by_c)
    with_steps(models[3], lambda _: replay.result)

    def medians(calls: list[Callable[[], float]], *others: Replay) -> list[float]:
        took: list[list[float]] = [[] for _ in calls]
        for _ in range(count):
            for call, times_of_call in zip(calls, took, strict=True):
                for one in (replay, *others):
                    one.following = iter(one.calls)
                times_of_call.append(call())
        return [statistics.median(times_of_call) for times_of_call in took]

    found = medians(calls)
    names = ("linear", "scaled_dot_product_attention")
    for without in (names[:1], names):
        functions, other = {name: getattr(torch.nn.functional, name) for name in without}, Replay()
        vars(torch.nn.functional).update({name: other.noting(function) for name, function in functions.items()})
        replay.following = iter(replay.calls)
        calls[3]()
        vars(torch.nn.functional).update(dict.fromkeys(without, other.result))
        found += medians(calls[3:], other)
        vars(torch.nn.functional).update(functions)
    return found


def encoder(kind: str, dtype: torch.dtype, rows: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of that many tokens without and with the patch: of the model, and without products and attention.

    These are then results of before, which leaves additions, norms, activations, and the time of Python.
    """
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(configuration(kind, ENCODER), dtype=dtype).eval()
    kept: dict[Any, torch.Tensor] = {}

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        key = *x.shape[:-1], weight.shape[0]
        return kept[key] if key in kept else kept.setdefault(key, torch.randn(key).to(dtype))

    own = {name: getattr(torch.nn.functional, name) for name in ("linear", "scaled_dot_product_attention")}
    without = {"linear": linear, "scaled_dot_product_attention": lambda q, k, v, **_: v}
    least = {"all": [math.inf, math.inf], "without products": [math.inf, math.inf]}
    with torch.no_grad():
        for turn in range(2 * rounds):
            if turn % 2:
                fusednorm.transformers.patch(model, activations=False)
            else:
                fusednorm.transformers.unpatch(model)
            for name, functions in (("all", own), ("without products", without)):
                vars(torch.nn.functional).update(functions)
                for _ in range(8):
                    begin = time.perf_counter()
                    model(tokens(1, rows))
                    least[name][turn % 2] = min(least[name][turn % 2], (time.perf_counter() - begin) * 1e3)
    vars(torch.nn.functional).update(own)
    return least


def memory(model: Any, step: Callable[[], None]) -> tuple[float, float]:
    """MiB of a step of training: of all tensors that autograd keeps but parameters, and the most allocated at once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    sizes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(kept.values()) / 2**20, max(itertools.accumulate(sizes)) / 2**20


def training(kind: str, rounds: int) -> None:
    """Prints memory and time of a step of 1024 tokens, without and with the patch: of all weights, and with LoRA."""
    try:
        import peft
    except ModuleNotFoundError as error:
        sys.exit(f"--training trains with LoRA too, which needs {error.name}: pip install peft")
    ids = tokens(2, 512)
    for name in ("all weights", "LoRA"):
        model = build(kind, SHAPE | {"num_hidden_layers": 8}, torch.bfloat16).train()
        if name == "LoRA":
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))

        def step(model: Any = model) -> None:
            for parameter in model.parameters():
                parameter.grad = None
            model(ids, labels=ids).loss.backward()

        found: tuple[list[Any], list[Any]] = ([], [])
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(2 * rounds + 2):
            (fusednorm.transformers.patch if turn % 2 else fusednorm.transformers.unpatch)(model)
            if turn < 2:
                found[turn].extend(memory(model, step))
                continue
            begin = time.process_time()  # which other programs do not lengthen
            step()
            seconds[turn % 2].append(time.process_time() - begin)
        both = [f"{before:.0f} -> {after:.0f} MiB" for before, after in zip(*found, strict=True)]
        medians = [statistics.median(took) * 1e3 for took in seconds]
        print(
            f"| {name} | {' | '.join(both)} | {medians[0]:.0f} -> {medians[1]:.0f} ({medians[0] / medians[1]:.2f}x) |"
        )


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    head = (
        "| Family | Norms | Additions | Rotations | Gates | bf16: logits | 64 tokens | loss "
        "| f32: logits (own error) | gradients | Decode, ms | Prefill of 128, ms |"
    )
    lines = [head, "|---" * 12 + "|"]
    for kind, result in results.items():
        half, single, took = result["bfloat16"], result["float32"], result["times"]
        lines.append(
            f"| {kind} | {result['norms']} | {result['adds']} | "
            f"{result['rotations']} | {result['gates']} | {half['logits']:.2g} | "
            f"{'equal' if half['tokens_equal'] and single['tokens_equal'] else 'DIFFER'} | "
            f"{'equal' if half['loss_equal'] else 'differs'} | {single['logits']:.1e} ({single['own_error']:.1e}) | "
            f"{single['gradients']:.1e} | "
            + " | ".join(f"{a:.2f} -> {b:.2f} ({a / b:.2f}x)" for a, b in (took["decode"], took["prefill"]))
            + " |"
        )
    return "\n".join(lines)


def sizes(rounds: int, products: bool, int8: bool) -> None:
    """Prints a line for each published configuration, with times on the processor: a large model is slow to repeat."""
    print(
        "| Configuration | Parameters | Logits with the same bits | Decode, ms | Prefill of 128, ms |\n"
        + "|---" * 5
        + "|"
    )
    for name, (kind, shape) in PUBLISHED.items():
        model = build(kind, shape, torch.bfloat16)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        with torch.no_grad():
            before = model(tokens(1, 32)).logits
            change(model, products, int8)
            equal = (model(tokens(1, 32)).logits == before).double().mean().item()
        del model
        took = times(kind, rounds, shape, time.process_time, products, int8)
        cells = (f"{a:.0f} -> {b:.0f} ({a / b:.2f}x)" for a, b in (took["decode"], took["prefill"]))
        print(f"| {name} | {parameters / 1e9:.2f}e9 | {equal:.1%} | {' | '.join(cells)} |", flush=True)


def contexts(keys: list[int], rounds: int) -> None:
    """Prints a line for each number of keys in the cache: one token of Qwen3 0.6B by each kind of patch."""
    kinds = {
        "transformers": None,
        "patched": {},
        "attention": {"attention": True},
        "products": {"products": True},
        "attention and products": {"attention": True, "products": True},
    }
    model = build(*PUBLISHED["Qwen3 0.6B"], torch.bfloat16)
    print(f"| Keys | {' | '.join(f'{name}, ms' for name in kinds)} |\n|{'---|' * (len(kinds) + 1)}")
    for count in keys:
        took: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, options in kinds.items():
                fusednorm.transformers.unpatch(model)
                if options is not None:
                    fusednorm.transformers.patch(model, **options)
                took[name].append(token_after(model, count))
        of_kind = {name: statistics.median(one) for name, one in took.items()}
        cells = (f"{one:.0f} ({of_kind['transformers'] / one:.2f}x)" for one in of_kind.values())
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def token_after(model: Any, count: int, calls: int = 5) -> float:
    """Milliseconds of the processor for one token after so many, the best of a few calls."""
    cache, took = transformers.DynamicCache(config=model.config), []
    for layer in range(model.config.num_hidden_layers):
        cache.update(
            *torch.randn(2, 1, model.config.num_key_value_heads, count, model.config.head_dim).bfloat16(), layer
        )
    for _ in range(calls + 1):
        begin = time.process_time()
        model(tokens(1, 1), past_key_values=cache, use_cache=True)
        took.append((time.process_time() - begin) * 1e3)
        cache.crop(-1)
    return min(took[1:])


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--encoders", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="KEYS")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if arguments.sizes:
        sizes(arguments.rounds, arguments.products, arguments.int8)
        return
    if arguments.contexts:
        contexts(arguments.contexts, arguments.rounds)
        return
    if arguments.training:
        print("| Trained | Kept for the backward pass | Most at once | Step, ms |\n" + "|---" * 4 + "|")
        training("qwen3", arguments.rounds)
        return
    if arguments.encoders:
        print("| Model | Dtype | Tokens | Call, ms | Without products and attention |\n" + "|---" * 5 + "|")
        for kind, dtype in itertools.product(("bert", "modernbert"), (torch.float32, torch.bfloat16)):
            for rows in (1, 16, 128):
                found = encoder(kind, dtype, rows, arguments.rounds).values()
                both = (f"{before:.2f} -> {after:.2f} ({before / after:.2f}x)" for before, after in found)
                print(f"| {kind} | {str(dtype)[6:]} | {rows} | {' | '.join(both)} |", flush=True)
        return
    if arguments.profile:
        print("| Family | Token, ms | C alone | Nothing of ours | Matrix products | Attention | All else |")
        print("|---" * 7 + "|")
        with torch.no_grad():
            for kind in arguments.families:
                before, after, c, nothing, no_products, rest = profile(kind, arguments.rounds)
                ratios = (f"{took:.2f} ({before / took:.2f}x)" for took in (after, c, nothing))
                print(f"| {kind} | {before:.2f} -> {' | '.join(ratios)} ", end="")
                print(f"| {nothing - no_products:.2f} | {no_products - rest:.2f} | {rest:.2f} |", flush=True)
        return
    results = {}
    for kind in arguments.families:
        results[kind] = answers(kind) | {"times": times(kind, arguments.rounds)}
        print(table({kind: results[kind]}).splitlines()[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
