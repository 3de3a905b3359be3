"""Reinforcement learning: the trainer's norms and the inference engine's return the same bits for the same rows.

    python -P docs/examples/rl_promise.py [--steps 8]

A small decoder is trained with REINFORCE. vLLM samples with the same weights, one token at a time, from a KV cache; the
trainer computes whole sequences, with gradients. Both sides record what goes into each norm and what comes out. This is
done twice, in processes of their own: with fusednorm on both sides, and with torch's norms in the trainer and vLLM's
own in the engine. See docs/rl.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fusednorm

WIDTH, LAYERS, HEADS, HEAD, VOCABULARY, EPS = 256, 4, 4, 64, 128, 1e-6
PROMPTS, SAMPLES, PROMPT, GENERATED = 8, 8, 8, 24


class TorchNorm(nn.Module):
    """An addition, then torch's norm, as a trainer without fusednorm has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum, [..., WIDTH]."""
        total = x if residual is None else x + residual
        return functional.rms_norm(total, (WIDTH,), self.weight, EPS), total


def fused_norm(width: int) -> nn.Module:
    """fusednorm's, rounding where vLLM does."""
    return fusednorm.AddRMSNorm(width, EPS, round_sum=False, round_norm=True)


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [sequences, heads, length, HEAD]."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # as Llama does
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """Attention and MLP, each after an addition and a norm; names as in a Llama checkpoint."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(WIDTH), norm(WIDTH)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.self_attn, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.mlp.gate_proj, self.mlp.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.mlp.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """[sequences, length, WIDTH], what is to be added to the residual stream next, and that stream."""
        x, residual = self.input_layernorm(x, residual)
        attention, shape = self.self_attn, (*x.shape[:2], HEADS, HEAD)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x, residual = self.post_attention_layernorm(attention.o_proj(mixed.transpose(1, 2).flatten(2)), residual)
        return self.mlp.down_proj(functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)), residual


class Decoder(nn.Module):
    """A Llama, as the trainer has it."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.model.norm = norm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" in name:  # ones would hide where a row is rounded
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of [sequences, length]."""
        x, residual = self.model.embed_tokens(tokens), None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return self.lm_head(self.model.norm(x, residual)[0])

    def norms(self) -> list[nn.Module]:
        """In the order in which they are called."""
        layers = [
            norm for layer in self.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        return [*layers, self.model.norm]


class Record:
    """Rows that went into each norm, and what came out: per norm a list of (x, residual or None, y)."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Tensor, Tensor | None, Tensor]]] = [[] for _ in range(2 * LAYERS + 1)]
        self.next = 0

    def add(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        """Of the norm whose turn it is."""
        rows = (None if tensor is None else tensor.detach().reshape(-1, WIDTH) for tensor in (x, residual, y))
        self.calls[self.next].append(tuple(rows))  # type: ignore[arg-type]
        self.next = (self.next + 1) % len(self.calls)

    def rows(self, norm: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """All rows of a norm."""
        x, residual, y = zip(*self.calls[norm], strict=True)
        return torch.cat(x), None if residual[0] is None else torch.cat(residual), torch.cat(y)


class Server:
    """vLLM's engine in this process, with the norms of its requests recorded."""

    def __init__(self, folder: str, provider: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=PROMPTS * SAMPLES // 2,  # so that batches differ from the trainer's, and from each other
            enable_prefix_caching=False,
        )
        self.record = Record()
        from vllm.ir import ops

        for name in ("rms_norm", "fused_add_rms_norm"):
            implementation = getattr(ops, name).impls[provider]
            assert getattr(ops, name).get_priority()[0] == provider, getattr(ops, name).get_priority()
            implementation.impl_fn = self.recorded(implementation.impl_fn)

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A provider's function, whose operands and results are kept."""

        def call(x: Tensor, *arguments: Any) -> Any:
            x_before = x.clone()
            residual = arguments[0].clone() if len(arguments) == 4 else None
            result = function(x, *arguments)
            y = result if residual is None else result[0]
            self.record.add(x_before, residual, y.clone())
            return result

        return call

    def load(self, weights: dict[str, Tensor]) -> None:
        """Takes the trainer's weights."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})

    def sample(self, prompts: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """SAMPLES continuations of each prompt, [sequences, GENERATED], and the logs of their probabilities."""
        from vllm import SamplingParams

        self.record = Record()
        how = SamplingParams(n=SAMPLES, seed=step, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0)
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        found = [o for request in self.llm.generate(requests, how, use_tqdm=False) for o in request.outputs]
        logprobs = [[d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)] for o in found]
        return torch.tensor([list(o.token_ids) for o in found]), torch.tensor(logprobs)


def same_rows(server: Record, trainer: Record, modules: list[nn.Module]) -> list[dict[str, int]]:
    """For each norm: how many of the server's rows the trainer saw too, bit for bit, and what differs given them."""
    found = []
    for index, module in enumerate(modules):
        x, residual, y = server.rows(index)
        theirs_x, theirs_residual, theirs_y = trainer.rows(index)

        def keys(a: Tensor, b: Tensor | None) -> list[bytes]:
            joined = a if b is None else torch.cat((a, b), 1)
            return [row.numpy().tobytes() for row in joined.view(torch.int16)]

        outputs = dict(zip(keys(theirs_x, theirs_residual), theirs_y, strict=True))
        pairs = [(row, outputs[key]) for key, row in zip(keys(x, residual), y, strict=True) if key in outputs]
        # The trainer's module, with gradients, on all of the server's rows at once.
        with torch.enable_grad():
            again = module(x, residual)[0]
        found.append(
            {
                "rows": len(y),
                "seen_by_both": len(pairs),
                "seen_by_both_outputs_equal": sum(torch.equal(a, b) for a, b in pairs),
                "rows_differ": (again != y).any(1).sum().item(),
                "elements_differ": (again != y).sum().item(),
            }
        )
    return found


def logits_and_rows(decoder: Decoder, tokens: Tensor) -> tuple[Tensor, Record]:
    """The logits of whole sequences, with a gradient to come, and what the norms saw."""
    record = Record()
    hooks = [
        module.register_forward_hook(lambda _, given, result: record.add(*given, result[0]))
        for module in decoder.norms()
    ]
    logits = decoder(tokens)
    for hook in hooks:
        hook.remove()
    return logits, record


def save(decoder: Decoder, folder: str) -> None:
    """Writes a checkpoint that vLLM can load."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        rms_norm_eps=EPS,
        max_position_embeddings=64,
    ).save_pretrained(folder)
    save_file(decoder.state_dict(), Path(folder) / "model.safetensors", {"format": "pt"})


def train(norms: str, steps: int) -> list[dict[str, Any]]:
    """REINFORCE for tokens of the lower half of the vocabulary; what each step found."""
    torch.manual_seed(0)
    norm, provider = (fused_norm, "fusednorm") if norms == "fusednorm" else (TorchNorm, "native")
    decoder = Decoder(norm).bfloat16()
    parameters = list(decoder.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, 2e-3)
    with tempfile.TemporaryDirectory() as folder:
        save(decoder, folder)
        server = Server(folder, provider)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT))
    found = []
    for step in range(steps):
        server.load({name: tensor.detach() for name, tensor in decoder.state_dict().items()})
        sampled, logprobs = server.sample(prompts, step)
        tokens = torch.cat((prompts.repeat_interleave(SAMPLES, 0), sampled), 1)
        logits, record = logits_and_rows(decoder, tokens[:, :-1])
        ours = logits[:, PROMPT - 1 :].float().log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        rewards = (sampled < VOCABULARY // 2).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        (-(advantages[:, None] * ours).mean()).backward()
        difference = (ours.detach() - logprobs).abs()
        found.append(
            {
                "reward": rewards.mean().item(),
                "logprobs_equal": (difference == 0).double().mean().item(),
                "logprobs_mean_difference": difference.mean().item(),
                "logprobs_largest_difference": difference.max().item(),
                "norms": same_rows(server.record, record, decoder.norms()),
            }
        )
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return found


def run(norms: str, steps: int) -> list[dict[str, Any]]:
    """:func:`train` in a process of its own, in which vLLM takes the plug-in or not."""
    environment = {
        **os.environ,
        "FUSEDNORM_VLLM": "vllm" if norms == "fusednorm" else "off",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-P", __file__, "--norms", norms, "--steps", str(steps), "--json", str(out)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """What differed, over all steps: a line for each question, a column for each kind of norms."""

    def norms(steps: list[dict[str, Any]], key: str) -> int:
        return sum(norm[key] for step in steps for norm in step["norms"])

    def mean(steps: list[dict[str, Any]], key: str) -> float:
        return sum(step[key] for step in steps) / len(steps)

    questions: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "rows that the server normalised": lambda steps: f"{norms(steps, 'rows'):,}",
        "the same rows through the trainer's norms: rows that differ": lambda steps: f"{norms(steps, 'rows_differ'):,}",
        "elements that differ": lambda steps: f"{norms(steps, 'elements_differ') / norms(steps, 'rows') / WIDTH:.2%}",
        "rows that came to the trainer's norms by themselves, bit for bit": lambda steps: (
            f"{norms(steps, 'seen_by_both'):,}"
        ),
        "of these, rows whose norms are equal": lambda steps: f"{norms(steps, 'seen_by_both_outputs_equal'):,}",
        "log-probabilities that are equal": lambda steps: f"{mean(steps, 'logprobs_equal'):.1%}",
        "their mean difference": lambda steps: f"{mean(steps, 'logprobs_mean_difference'):.1e}",
        "their largest difference": lambda steps: f"{max(step['logprobs_largest_difference'] for step in steps):.1e}",
        "reward, first step and last": lambda steps: f"{steps[0]['reward']:.2f}, {steps[-1]['reward']:.2f}",
    }
    lines = [["", *results], ["---"] * (len(results) + 1)]
    lines += [[question, *map(answer, results.values())] for question, answer in questions.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def series(results: dict[str, list[dict[str, Any]]]) -> str:
    """Two tables: elements that differ in each norm, and differences of log-probabilities in each step."""
    norms, logprobs = {}, {}
    for name, steps in results.items():
        by_norm = zip(*(step["norms"] for step in steps), strict=True)
        shares = [sum(n["elements_differ"] for n in norm) / sum(n["rows"] for n in norm) / WIDTH for norm in by_norm]
        norms[name] = [f"{share:.1%}" for share in shares]
        logprobs[name] = [f"{step['logprobs_mean_difference']:.1e}" for step in steps]
    lines = []
    for words, rows in (("elements that differ in norm", norms), ("mean difference in step", logprobs)):
        counts = [str(count + 1) for count in range(len(next(iter(rows.values()))))]
        table = [[words, *counts], ["---"] * (len(counts) + 1), *([name, *row] for name, row in rows.items())]
        lines += ["", *(f"| {' | '.join(line)} |" for line in table)]
    return "\n".join(lines)


KINDS = {"fusednorm": "fusednorm on both sides", "torch": "torch's norms and vLLM's own"}


def main() -> None:
    """Trains with both kinds of norms, prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="write what every step found to this file")
    parser.add_argument("--norms", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    results: Any
    if options.norms:
        results = train(options.norms, options.steps)
    else:
        results = {words: run(norms, options.steps) for norms, words in KINDS.items()}
        print(table(results))
        print(series(results))
    if options.json:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
