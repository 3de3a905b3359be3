"""One digest of a model's logits, whatever computes them.

    python -P docs/examples/one_digest.py                        # a Gemma 3 with random weights: under a minute
    python -P docs/examples/one_digest.py path/to/model          # your model, in bfloat16
    python -P docs/examples/one_digest.py --threads 1 --tokens 4 # few, on a slow machine

A text of some tokens is read whole, in two chunks, token by token from the cache, and in a batch of four with padding
on the left: by transformers alone, with fusednorm's products and attention, and with int8 in place of these. Each
instruction set of this processor does so, on one thread and on two, in processes of their own, where torch uses this
instruction set too. One digest of all logits is printed where all of these have the same bits, and else how many there
are. Compare it with that of another machine. It needs transformers.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec

import torch

import fusednorm
import fusednorm.transformers
from fusednorm.backends import cpu

#: How many tokens the other texts of the batch have more or fewer.
OTHERS = (-2, 0, 3)
#: torch's instruction set for each of ours; without one torch chooses.
OF_TORCH = {"scalar": "default", "avx2": "avx2"}

KINDS = ("transformers", "linear", "int8")


def made():
    """A Gemma 3 of transformers, in bfloat16, whose weights are made of whole numbers: the same on any machine."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=8,
        max_position_embeddings=256,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for at, parameter in enumerate(model.parameters()):
        whole = torch.randint(-(2**15), 2**15, parameter.shape, generator=torch.Generator().manual_seed(at))
        parameter.data = (whole * 2.0**-19).bfloat16()
    return model


def model_of(folder, kind):
    """The model, as a kind computes it."""
    import transformers

    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.bfloat16) if folder else made()
    if kind == "int8":
        fusednorm.transformers.quantize(model)
    if kind != "transformers":
        fusednorm.transformers.patch(model, products=True, attention=True)
    return model.eval()


def whole(model, ids):
    """The logits of a text, [tokens, vocabulary], read at once."""
    return model(ids[None], use_cache=False).logits[0]


def in_parts(model, ids, length):
    """The same, read in parts of this length, of which each finds those before it in the cache."""
    found, cache = [], None
    for part in ids.split(length):
        result = model(part[None], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        found.append(result.logits[0])
    return torch.cat(found)


def in_a_batch(model, ids):
    """The same, in a batch with three other texts, all with padding on the left."""
    texts = [ids, *(((ids + 1) % 1000).repeat(2)[: max(len(ids) + more, 1)] for more in OTHERS)]
    longest = max(map(len, texts))
    rows, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        rows[row, longest - len(text) :], mask[row, longest - len(text) :] = text, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[0, longest - len(ids) :]


WAYS = {
    "whole": whole,
    "two chunks": lambda model, ids: in_parts(model, ids, -(-len(ids) // 2)),
    "token by token": lambda model, ids: in_parts(model, ids, 1),
    "padded batch of 4": in_a_batch,
}


def digest(logits):
    """Of the bits of bfloat16 numbers."""
    return hashlib.sha256(logits.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()[:12]


@torch.no_grad()
def measure(folder, tokens):
    """Prints the digests of each kind and way, in this process."""
    ids = 3 + torch.arange(tokens) * 37 % 900
    for kind in KINDS:
        model = model_of(folder, kind)
        for name, way in WAYS.items():
            print("digest", kind, digest(way(model, ids)), name)


def run(arguments, isa, threads):
    """The digests of each kind, in a process of this instruction set and with so many threads: a list for each."""
    environment = {**os.environ, "FUSEDNORM_CPU_ISA": isa, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if isa in OF_TORCH:
        environment["ATEN_CPU_CAPABILITY"] = OF_TORCH[isa]
    command = [sys.executable, "-P", __file__, *filter(None, [arguments.folder]), "--tokens", str(arguments.tokens)]
    done = subprocess.run([*command, "--here"], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{isa}, {threads} threads:\n{done.stderr}")
    found = {kind: [] for kind in KINDS}
    for line in done.stdout.splitlines():
        if line.startswith("digest "):
            _, kind, of_logits, _ = line.split(" ", 3)
            found[kind].append(of_logits)
    return found


def in_words(digests):
    """The one digest of a list, or how many there are."""
    different = set(digests)
    return digests[0] if len(different) == 1 else f"{len(different)} different"


def main():
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of a model that transformers loads")
    parser.add_argument("--tokens", type=int, default=12, help="the length of the text")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=cpu.variants(), help="instruction sets, of: %(default)s")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: pip install transformers")
    if arguments.here:
        measure(arguments.folder, arguments.tokens)
        return
    print(f"| Instruction set | Threads | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 2)}")
    all_found = {kind: [] for kind in KINDS}
    for isa in arguments.isa:
        for threads in arguments.threads:
            found = run(arguments, isa, threads)
            print(f"| {isa} | {threads} | {' | '.join(map(in_words, found.values()))} |", flush=True)
            for kind, digests in found.items():
                all_found[kind] += digests
    print(f"| all | | {' | '.join(map(in_words, all_found.values()))} |")
    sys.exit(any(len(set(all_found[kind])) > 1 for kind in KINDS[1:]))


if __name__ == "__main__":
    main()
