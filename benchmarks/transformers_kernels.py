"""Hugging Face models with fusednorm as their kernels (use_kernels=True), beside the same models without.

Each model has random weights and is built from its configuration: nothing is downloaded. One thread, bfloat16; both
take turns in one process, and the least time of the processor that each took counts.

    python benchmarks/transformers_kernels.py
"""

import time
import warnings

import torch
import transformers
from transformers_models import SHAPE

import fusednorm.transformers

FAMILIES = ("Llama", "Qwen3", "Gemma2", "Phi3", "Granite")
TURNS = 12


def attached(model):
    """The forward passes that kernels attached to modules and functions of the model."""
    functions = [function for m in model.modules() for function in getattr(m, "_kernel_funcs", {}).values()]
    return [(m, m.__dict__["forward"]) for m in (*model.modules(), *functions) if "forward" in m.__dict__]


def seconds(call, times):
    """The least time of several calls."""
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def main():
    """Prints the table of docs/transformers.md."""
    torch.set_num_threads(1)
    print("| Family | Logits, tokens | Decode, ms | Prefill of 128, ms | Training step of 128, ms |")
    print("|---|---|---|---|---|")
    for family in FAMILIES:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SHAPE)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fusednorm.transformers.register_kernels(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.set_use_kernels(True)
        ours = attached(model)
        one, many = torch.randint(3, 500, (1, 1)), torch.randint(3, 500, (1, 128))

        def decode(model=model, one=one):
            with torch.no_grad():
                model(one)

        def prefill(model=model, many=many):
            with torch.no_grad():
                return model(many).logits

        def train(model=model, many=many):
            model.zero_grad()
            model(many, labels=many).loss.backward()

        times, results = {}, {}
        for turn in range(2 * TURNS):
            with_kernels = turn % 2 == 1
            for module, forward in ours:
                module.__dict__.pop("forward", None)
                if with_kernels:
                    module.__dict__["forward"] = forward
            for call, repeated in ((decode, 20), (prefill, 5), (train, 3)):
                times.setdefault((call.__name__, with_kernels), []).append(seconds(call, repeated) * 1e3)
            if turn < 2:
                text = model.generate(many[:, :16], max_new_tokens=32, min_new_tokens=32, do_sample=False)
                results[with_kernels] = prefill(), text
        equal = ["equal" if torch.equal(*both) else "differ" for both in zip(*results.values(), strict=True)]
        row = [", ".join(equal)]
        for name in ("decode", "prefill", "train"):
            before, after = (min(times[name, kernels]) for kernels in (False, True))
            row.append(f"{before:.2f} -> {after:.2f} ({before / after:.2f}x)")
        print("|", " | ".join([family, *row]), "|", flush=True)


if __name__ == "__main__":
    main()
