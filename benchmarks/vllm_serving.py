"""Requests per second of vLLM with the plug-in and without it, on the CPU.

    python -P benchmarks/vllm_serving.py [--rounds 5] [--threads 1]
    python -P benchmarks/vllm_serving.py --streams 8    # two servers, and so many HTTP requests at a time
    python -P benchmarks/vllm_serving.py --settings huggingface,own-attention huggingface
    python -P benchmarks/vllm_serving.py --dry-run      # a tiny model: shows that it runs, measures nothing

Two engines, each in a process of its own, answer the same requests in turns: one with ``FUSEDNORM_VLLM=off``, the other
with ``vllm``, or with the two values of ``--settings``. First, which is not timed, their greedy tokens are compared; if
any differs, nothing is printed but that. With ``--streams`` they are servers with their own processes, and each request
is a stream of tokens over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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

#: A model (W8A8 means that matrices and their inputs have 8 bits), the dtype, and whether it runs without compilation.
CASES = (
    ("Llama", "bfloat16", True),
    ("Llama", "bfloat16", False),
    ("Llama", "float32", True),
    ("Llama W8A8", "bfloat16", True),
    ("Qwen3", "bfloat16", True),
    ("Gemma2", "bfloat16", True),
    ("Qwen3Next", "bfloat16", True),
    ("Mamba2", "bfloat16", True),
)


def configuration(architecture: str, sizes: dict[str, int]) -> Any:
    """The configuration of a model of that kind; sizes that its kind does not have are left out."""
    import transformers

    hidden, head = sizes["hidden_size"], sizes["hidden_size"] // sizes["num_attention_heads"]
    further: dict[str, Any] = {"head_dim": head, "max_position_embeddings": 256}
    if architecture == "Gemma2":
        further |= {"query_pre_attn_scalar": head, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    if architecture == "Qwen3Next":  # vLLM takes one only if a layer has experts
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 4}
        dense = list(range(sizes["num_hidden_layers"] - 1))
        further |= experts | {"mlp_only_layers": dense, "shared_expert_intermediate_size": hidden // 4}
        further |= {"layer_types": [f"{('linear', 'full')[i % 2]}_attention" for i in range(len(dense) + 1)]}
        further |= {"linear_num_key_heads": hidden // 128, "linear_num_value_heads": hidden // 64}
        further |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    if architecture == "Mamba2":  # of the sizes it has three
        sizes = {name: sizes[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
        further = {"head_dim": 64, "num_heads": hidden // 32, "state_size": 64, "n_groups": 1}
        further |= {"tie_word_embeddings": False}
    return getattr(transformers, f"{architecture}Config")(**sizes, **further)


def save_model(folder: str, architecture: str, sizes: dict[str, int], int8: bool = False) -> None:
    """Saves a model that is sure of each next token, a permutation of the last one, though nobody trained it.

    In a model of random weights the two best tokens are often as near as the last bit of bfloat16: any other order of a
    sum changes tokens there. Here the output matrix is the permuted embedding (Gemma 2 has one matrix for both, so its
    next token is the last one). Layers add as much as the embedding to the residual stream, and norms have weights, so
    that it matters what they compute.

    Args:
        folder: where to.
        architecture: Llama; Qwen3 (which has norms of each head of q and k, too); Gemma2 (a norm before and after each
            half of a layer, and GELU); Qwen3Next (gated norms in every other layer, and experts in the last); Mamba2
            (norms of gated rows).
        sizes: of the configuration.
        int8: with weights of 8 bits, and quantized inputs of each matrix but the last (W8A8).
    """
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(configuration(architecture, sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide where a row is rounded
                parameter.uniform_(0.5, 1.5)
                if architecture == "Gemma2":  # adds 1, and adds normalised rows, which would hide the embedding
                    parameter -= 1
            elif "layers" in name and parameter.dim() > 1:  # a product as large as the row that is multiplied
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        embedding = model.get_input_embeddings().weight.normal_()
        if model.lm_head.weight is embedding:
            embedding *= sizes["hidden_size"] ** -0.5
        else:
            model.lm_head.weight[torch.randperm(sizes["vocab_size"])] = embedding * sizes["hidden_size"] ** -0.5
    model.save_pretrained(folder)
    if int8:
        quantize_saved(folder)


def quantize_saved(folder: str) -> None:
    """Quantizes the matrices of a saved model as compressed-tensors does: a scale for each row of a matrix."""
    import safetensors.torch

    path, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    tensors = safetensors.torch.load_file(path)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantization}))


def prompts_of(sizes: dict[str, int], requests: int) -> list[list[int]]:
    """The ids of the requests' prompts, from 8 to 63 each."""
    generator = random.Random(0)
    return [
        [generator.randrange(sizes["vocab_size"]) for _ in range(generator.randrange(8, 64))] for _ in range(requests)
    ]


def environment(mode: str, threads: int) -> dict[str, str]:
    """Of an engine's processes, with the plug-in's mode."""
    return {
        **os.environ,
        "FUSEDNORM_VLLM": mode,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


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
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(sizes, requests)]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for _ in sys.stdin:
        start = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        seconds, of_processor = time.perf_counter() - start[0], time.process_time() - start[1]
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answer = {"seconds": seconds, "of_processor": of_processor, "tokens": tokens}
        print("ANSWER", json.dumps(answer), flush=True)


class Engine:
    """A process that serves, with the plug-in's mode given."""

    def __init__(self, mode: str, threads: int, arguments: list[Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", json.dumps(arguments)],
            env={**environment(mode, threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
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


class Server:
    """A server of vLLM, which answers streams over HTTP, some at the same time; the plug-in's mode is given."""

    def __init__(self, mode: str, threads: int, arguments: list[Any], streams: int) -> None:
        self.model, dtype, eager, sizes, requests, self.tokens = arguments
        self.prompts, self.streams = prompts_of(sizes, requests), streams
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        command = f"""-P -m vllm.entrypoints.openai.api_server --model {self.model} --host 127.0.0.1 --port {port}
            --skip-tokenizer-init --dtype {dtype} --max-model-len 256 --max-num-seqs 32 --no-enable-prefix-caching"""
        self.process = subprocess.Popen(
            [sys.executable, *command.split(), *["--enforce-eager"] * eager],
            env=environment(mode, threads),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        """One round of all requests, once the server listens."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"a server ended with exit status {self.process.returncode}")
            try:
                self.opener.open(f"{self.address}/health").close()
                break
            except urllib.error.URLError:  # not there yet
                time.sleep(0.5)
        start = time.perf_counter(), self.of_processor()
        with ThreadPoolExecutor(self.streams) as pool:
            tokens = list(pool.map(self.stream, self.prompts))
        seconds, of_processor = time.perf_counter() - start[0], self.of_processor() - start[1]
        return {"seconds": seconds, "of_processor": of_processor, "tokens": tokens}

    def stream(self, prompt: list[int]) -> list[int]:
        """The tokens of a request, as they come."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        request |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        headers = {"Content-Type": "application/json"}
        posted = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(request).encode(), headers)
        tokens: list[int] = []
        with self.opener.open(posted) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    tokens += json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
        return tokens

    def of_processor(self) -> float:
        """Seconds of processor time of the server's processes so far."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self.process.pid:  # its session
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the server's processes."""
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


def compare(
    arguments: list[Any],
    requests: int,
    rounds: int,
    threads: int,
    streams: int | None = None,
    settings: tuple[str, str] = ("off", "vllm"),
) -> dict[str, Any] | str:
    """The rounds' requests per second and ratios, by the clock and by processor time; or what is wrong.

    Other programs on the machine disturb the processor time of an engine less than the clock.
    """
    engines: dict[str, Engine | Server] = {
        mode: Server(mode, threads, arguments, streams) if streams else Engine(mode, threads, arguments)
        for mode in settings
    }
    off, on = settings
    try:
        first = {mode: engine.answer()["tokens"] for mode, engine in engines.items()}
        if first[off] != first[on]:
            different = sum(a != b for a, b in zip(first[off], first[on], strict=True))
            return f"tokens differ in {different} of {requests} requests"
        answers: dict[str, list[dict[str, Any]]] = {mode: [] for mode in engines}
        for index in range(rounds):
            for mode in list(engines)[:: 1 if index % 2 else -1]:
                answers[mode].append(engines[mode].answer())
    finally:
        for engine in engines.values():
            engine.close()
    found: dict[str, Any] = {}
    for seconds, name in (("seconds", "by_time"), ("of_processor", "by_processor_time")):
        per_second = {mode: [requests / answer[seconds] for answer in each] for mode, each in answers.items()}
        ratios = [b / a for a, b in zip(per_second[off], per_second[on], strict=True)]
        found[name] = {"requests_per_second": per_second, "ratios": ratios}
    return found


def main() -> None:
    """Parses the command line, measures, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, help="serve over HTTP, so many requests at a time")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and one round")
    parser.add_argument("--only", nargs="*", help="measure these models alone, such as Llama or 'Llama W8A8'")
    parser.add_argument(
        "--settings", nargs=2, default=("off", "vllm"), help="values of FUSEDNORM_VLLM, without and with"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*json.loads(options.serve))
        return
    sizes, rounds = (TINY, 1) if options.dry_run else (SIZES, options.rounds)
    print("| model | dtype | | by | without | with | ratio, median | lowest | highest |\n" + "|---" * 9 + "|")
    for model, dtype, eager in CASES:
        if options.only and model not in options.only:
            continue
        architecture, _, int8 = model.partition(" ")
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, architecture, sizes, bool(int8))
            arguments = [folder, dtype, eager, sizes, options.requests, options.tokens]
            found = compare(arguments, options.requests, rounds, options.threads, options.streams, options.settings)
        way = "eager" if eager else "compiled"
        if isinstance(found, str):
            sys.exit(f"{model}, {dtype}, {way}: {found}")
        for name, of in (("by_time", "clock"), ("by_processor_time", "processor time")):
            off, on = (statistics.median(found[name]["requests_per_second"][mode]) for mode in options.settings)
            ratios = found[name]["ratios"]
            print(
                f"| {model} | {dtype} | {way} | {of} | {off:.2f} | {on:.2f} | {statistics.median(ratios):.3f} "
                f"| {min(ratios):.3f} | {max(ratios):.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
