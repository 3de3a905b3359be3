"""Requests per second of vLLM with the plug-in and without it, on the CPU.

    python -P benchmarks/vllm_serving.py [--rounds 5] [--threads 1] [--json results.json]
    python -P benchmarks/vllm_serving.py --dry-run      # a tiny model: shows that it runs, measures nothing

Two engines, each in a process of its own, answer the same requests in turns: one with ``FUSEDNORM_VLLM=off``, the other
with ``vllm``. First, which is not timed, their greedy tokens are compared; if any differs, nothing is printed but that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def save_model(folder: str, architecture: str, sizes: dict[str, int]) -> None:
    """Saves a model that is sure of each next token, a permutation of the last one, though nobody trained it.

    In a model of random weights the two best tokens are often as near as the last bit of bfloat16: any other order of a
    sum changes tokens there. Here the output matrix is the permuted embedding. Layers add as much as the embedding to
    the residual stream, and norms have weights, so that it matters what they compute.

    Args:
        folder: where to.
        architecture: Llama, or Qwen3 (which has norms of each head of q and k, too).
        sizes: of the configuration.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(
        **sizes, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"], max_position_embeddings=256
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide where a row is rounded
                parameter.uniform_(0.5, 1.5)
            elif "layers" in name:  # a product as large as the row that is multiplied
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        embedding = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[torch.randperm(sizes["vocab_size"])] = embedding * sizes["hidden_size"] ** -0.5
    model.save_pretrained(folder)


def serve(model: str, dtype: str, eager: bool, sizes: dict[str, int], requests: int, tokens: int) -> None:
    """Loads an engine; for every line read, answers all requests, and writes the tokens and the seconds."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    generator = random.Random(0)
    prompts = [
        {"prompt_token_ids": [generator.randrange(sizes["vocab_size"]) for _ in range(generator.randrange(8, 64))]}
        for _ in range(requests)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for _ in sys.stdin:
        start = time.perf_counter()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}
        print("ANSWER", json.dumps(answer), flush=True)


class Engine:
    """A process that serves, with the plug-in's mode given."""

    def __init__(self, mode: str, threads: int, arguments: list[Any]) -> None:
        environment = {
            **os.environ,
            "FUSEDNORM_VLLM": mode,
            "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", json.dumps(arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """One round of all requests."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("ANSWER"):
                found: dict[str, Any] = json.loads(line.removeprefix("ANSWER"))
                return found
        raise RuntimeError(f"an engine ended with exit status {self.process.wait()}; run --serve by hand to see why")

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(arguments: list[Any], requests: int, rounds: int, threads: int) -> dict[str, Any] | str:
    """The rounds' requests per second and ratios; or what is wrong."""
    engines = {mode: Engine(mode, threads, arguments) for mode in ("off", "vllm")}
    try:
        first = {mode: engine.answer()["tokens"] for mode, engine in engines.items()}
        if first["off"] != first["vllm"]:
            different = sum(a != b for a, b in zip(first["off"], first["vllm"], strict=True))
            return f"tokens differ in {different} of {requests} requests"
        per_second: dict[str, list[float]] = {mode: [] for mode in engines}
        for index in range(rounds):
            for mode in list(engines)[:: 1 if index % 2 else -1]:
                per_second[mode].append(requests / engines[mode].answer()["seconds"])
    finally:
        for engine in engines.values():
            engine.close()
    ratios = [on / off for on, off in zip(per_second["vllm"], per_second["off"], strict=True)]
    return {"requests_per_second": per_second, "ratios": ratios}


def main() -> None:
    """Parses the command line, measures, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and one round")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*json.loads(options.serve))
        return
    sizes, rounds = (TINY, 1) if options.dry_run else (SIZES, options.rounds)
    results = []
    print("| model | dtype | | without | with | ratio, median | lowest | highest |\n|---|---|---|---|---|---|---|---|")
    for architecture, dtype, eager in (
        ("Llama", "bfloat16", True),
        ("Llama", "bfloat16", False),
        ("Qwen3", "bfloat16", True),
        ("Llama", "float32", True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, architecture, sizes)
            arguments = [folder, dtype, eager, sizes, options.requests, options.tokens]
            found = compare(arguments, options.requests, rounds, options.threads)
        way = "eager" if eager else "compiled"
        if isinstance(found, str):
            sys.exit(f"{architecture}, {dtype}, {way}: {found}")
        off, on = (statistics.median(found["requests_per_second"][mode]) for mode in ("off", "vllm"))
        ratios = found["ratios"]
        print(
            f"| {architecture} | {dtype} | {way} | {off:.2f} | {on:.2f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} | {max(ratios):.3f} |",
            flush=True,
        )
        results.append({"model": architecture, "dtype": dtype, "way": way, **found})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"sizes": sizes, "options": vars(options), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
