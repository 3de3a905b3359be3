"""Reinforcement learning: the trainer's norms and the inference engine's return the same bits for the same rows.

    python -P docs/examples/rl_promise.py [--steps 8]

REINFORCE trains a small decoder. vLLM samples with the same weights, one token at a time, with a KV cache; the trainer
computes whole sequences, with gradients. Both sides record the inputs and outputs of each norm. The script does this
twice, in separate processes: with fusednorm on both sides, and with torch's norms in the trainer and vLLM's own in the
engine. See docs/rl.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import fusednorm

WIDTH, LAYERS, HEADS, HEAD, VOCABULARY, EPS = 256, 4, 4, 64, 128, 1e-6
PROMPTS, SAMPLES, PROMPT, GENERATED = 8, 8, 8, 24
KINDS = {"fusednorm": "fusednorm on both sides", "torch": "torch's norms and vLLM's own"}


class TorchNorm(nn.Module):
    """An addition, then torch's norm, as in a trainer without fusednorm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual):
        total = x if residual is None else x + residual
        return functional.rms_norm(total, (WIDTH,), self.weight, EPS), total


def fused_norm():
    """fusednorm's module, which rounds at vLLM's places."""
    return fusednorm.AddRMSNorm(WIDTH, EPS, round_sum=False, round_norm=True)


def rotated(x):
    """Rotary position embedding of [sequences, heads, length, HEAD], as in Llama."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """Attention and MLP, each after an addition and a norm; names as in a Llama checkpoint."""

    def __init__(self, norm):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.self_attn, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.mlp.gate_proj, self.mlp.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.mlp.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, residual):
        x, residual = self.input_layernorm(x, residual)
        attention, shape = self.self_attn, (*x.shape[:2], HEADS, HEAD)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x, residual = self.post_attention_layernorm(attention.o_proj(mixed.transpose(1, 2).flatten(2)), residual)
        return self.mlp.down_proj(functional.silu(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)), residual


class Decoder(nn.Module):
    """The trainer's Llama."""

    def __init__(self, norm):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.model.norm = norm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" in name:  # ones would hide where a row is rounded
                nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens):
        x, residual = self.model.embed_tokens(tokens), None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return self.lm_head(self.model.norm(x, residual)[0])

    def norms(self):
        """The norms, in the sequence of their calls."""
        pairs = ((layer.input_layernorm, layer.post_attention_layernorm) for layer in self.model.layers)
        return [*(norm for pair in pairs for norm in pair), self.model.norm]

    def save(self, folder):
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
        save_file(self.state_dict(), Path(folder) / "model.safetensors", {"format": "pt"})


class Record:
    """The calls of each norm: lists of (x, residual or None, y), all [rows, WIDTH]."""

    def __init__(self):
        self.calls = [[] for _ in range(2 * LAYERS + 1)]
        self.next = 0  # the norm that is called next

    def add(self, *operands):
        self.calls[self.next].append([None if t is None else t.detach().reshape(-1, WIDTH) for t in operands])
        self.next = (self.next + 1) % len(self.calls)

    def rows(self, norm):
        """All rows of a norm."""
        return [None if part[0] is None else torch.cat(part) for part in zip(*self.calls[norm], strict=True)]


class Server:
    """vLLM's engine in this process. It records the calls of its norms."""

    def __init__(self, folder, provider):
        from vllm import LLM
        from vllm.ir import ops

        self.llm = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=PROMPTS * SAMPLES // 2,  # batches then differ from the trainer's, and from each other
            enable_prefix_caching=False,
        )
        for operation in (ops.rms_norm, ops.fused_add_rms_norm):
            assert operation.get_priority()[0] == provider, operation.get_priority()
            implementation = operation.impls[provider]
            implementation.impl_fn = self.recorded(implementation.impl_fn)

    def recorded(self, function):
        """A provider's function that records its operands and results."""

        def call(x, *arguments):
            before = x.clone(), arguments[0].clone() if len(arguments) == 4 else None
            result = function(x, *arguments)
            self.record.add(*before, (result if before[1] is None else result[0]).clone())
            return result

        return call

    def sample(self, weights, prompts, step):
        """SAMPLES continuations of each prompt, [sequences, GENERATED], and the logarithms of their probabilities."""
        from vllm import SamplingParams

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        self.record = Record()
        how = SamplingParams(n=SAMPLES, seed=step, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0)
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        found = [o for request in self.llm.generate(requests, how, use_tqdm=False) for o in request.outputs]
        logprobs = [[d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)] for o in found]
        return torch.tensor([list(o.token_ids) for o in found]), torch.tensor(logprobs)


def compared(server, trainer, norms):
    """For each norm: the server's rows, those that also came to the trainer's norm, and the differences."""
    found = []
    for index, norm in enumerate(norms):
        operands = [server.rows(index), trainer.rows(index)]
        keys = [
            [row.numpy().tobytes() for row in torch.cat([t for t in (x, r) if t is not None], 1).view(torch.int16)]
            for x, r, _ in operands
        ]
        theirs = dict(zip(keys[1], operands[1][2], strict=True))
        x, residual, y = operands[0]
        pairs = [(row, theirs[key]) for key, row in zip(keys[0], y, strict=True) if key in theirs]
        again = norm(x, residual)[0]  # the trainer's module, with gradients, on all of the server's rows at once
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


def train(kind, steps):
    """REINFORCE for tokens of the lower half of the vocabulary. Returns the findings of each step."""
    torch.manual_seed(0)
    decoder = Decoder(fused_norm if kind == "fusednorm" else TorchNorm).bfloat16()
    parameters = list(decoder.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, 2e-3)
    with tempfile.TemporaryDirectory() as folder:
        decoder.save(folder)
        server = Server(folder, "fusednorm" if kind == "fusednorm" else "native")
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT))
    found = []
    for step in range(steps):
        weights = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
        sampled, logprobs = server.sample(weights, prompts, step)
        tokens, record = torch.cat((prompts.repeat_interleave(SAMPLES, 0), sampled), 1), Record()
        hooks = [
            norm.register_forward_hook(lambda _, given, result, record=record: record.add(*given, result[0]))
            for norm in decoder.norms()
        ]
        logits = decoder(tokens[:, :-1])
        for hook in hooks:
            hook.remove()
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
                "norms": compared(server.record, record, decoder.norms()),
            }
        )
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return found


def run(kind, steps):
    """Calls :func:`train` in another process, where the environment decides whether vLLM uses the plug-in."""
    environment = {
        **os.environ,
        "FUSEDNORM_VLLM": "vllm" if kind == "fusednorm" else "off",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-P", __file__, "--norms", kind, "--steps", str(steps), "--json", str(out)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        return json.loads(out.read_text())


def show(results):
    """Prints three tables: the differences over all steps, in each norm, and in each step."""

    def table(head, *lines):
        for line in (head, ["---"] * len(head), *lines):
            print(f"| {' | '.join(line)} |")

    def answers(steps):
        total = {key: sum(norm[key] for step in steps for norm in step["norms"]) for key in steps[0]["norms"][0]}
        mean = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0] if key != "norms"}
        return {
            "rows that the server normalised": f"{total['rows']:,}",
            "the same rows through the trainer's norms: rows that differ": f"{total['rows_differ']:,}",
            "elements that differ": f"{total['elements_differ'] / total['rows'] / WIDTH:.2%}",
            "rows that came to the trainer's norms by themselves, bit for bit": f"{total['seen_by_both']:,}",
            "of these, rows whose norms are equal": f"{total['seen_by_both_outputs_equal']:,}",
            "log-probabilities that are equal": f"{mean['logprobs_equal']:.1%}",
            "their mean difference": f"{mean['logprobs_mean_difference']:.1e}",
            "their largest difference": f"{max(step['logprobs_largest_difference'] for step in steps):.1e}",
            "reward, first step and last": f"{steps[0]['reward']:.2f}, {steps[-1]['reward']:.2f}",
        }

    def share(norm):
        return f"{sum(n['elements_differ'] for n in norm) / sum(n['rows'] for n in norm) / WIDTH:.1%}"

    columns = [answers(steps) for steps in results.values()]
    table(["", *results], *([question, *(c[question] for c in columns)] for question in columns[0]))
    print()
    by_norm = {name: list(zip(*(step["norms"] for step in steps), strict=True)) for name, steps in results.items()}
    numbers = [str(norm + 1) for norm in range(2 * LAYERS + 1)]
    table(["elements that differ in norm", *numbers], *([k, *map(share, norms)] for k, norms in by_norm.items()))
    print()
    found = {name: [f"{step['logprobs_mean_difference']:.1e}" for step in steps] for name, steps in results.items()}
    steps = [str(step + 1) for step in range(len(next(iter(found.values()))))]
    table(["mean difference in step", *steps], *([name, *values] for name, values in found.items()))


def main():
    """Trains with both kinds of norms, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="write the findings of each step to this file")
    parser.add_argument("--norms", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.norms:
        results = train(options.norms, options.steps)
    else:
        results = {words: run(kind, options.steps) for kind, words in KINDS.items()}
        show(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
