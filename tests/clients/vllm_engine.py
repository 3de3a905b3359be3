"""Runs vLLM's engine on models, in this process, and writes what came out; see test_vllm.py.

Its argument is a JSON object: ``jobs``, each with a ``model`` (a path) and further arguments of ``vllm.LLM``;
``prompts``, lists of token ids; ``changed``, whether to rename a parameter of vLLM's RMSNorm, as a newer vLLM might;
``out``, a path.
"""

import gc
import importlib
import json
import sys
from contextlib import nullcontext

import torch

#: The functions that the plug-in calls, and their modules in fusednorm.operations.
CALLED = {
    "rms_norm": "norm",
    "fused_add_rms_norm": "norm",
    "fused_add_rms_norm_": "norm",
    "silu_and_mul": "gate",
    "gelu_tanh_and_mul": "gate",
    "rms_norm_gated": "norm_gated",
    "qk_norm_rope_": "rotate",
}


def count(counts, name):
    """Counts plain calls of one of fusednorm's functions."""
    module = importlib.import_module(f"fusednorm.operations.{CALLED[name]}")
    function = getattr(module, name)

    def counted(*arguments, **keywords):
        counts[name] = counts.get(name, 0) + 1
        return function(*arguments, **keywords)

    setattr(module, name, counted)
    return lambda: setattr(module, name, function)


def run(job, prompts):
    """A job's greedy tokens, their log-probabilities, the providers in vLLM's order, and calls of fusednorm."""
    from vllm import LLM, SamplingParams
    from vllm.ir import ops
    from vllm.model_executor.models import registry

    # vLLM looks at a kind of models in a process that imports it again, for 7 s, because a look may touch a GPU.
    registry._run_in_subprocess = lambda look: look()
    llm = LLM(**job, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=32, seed=0)
    counts = {}  # from here on: the plug-in has tried vLLM's roundings and layers
    # Plain calls do not go through torch. Compiled code does: it calls operations that the profiler sees.
    eager = job["enforce_eager"]
    undo = [count(counts, name) for name in CALLED] if eager else []
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    with nullcontext() if eager else torch.profiler.profile() as profile:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    for event in () if eager else profile.key_averages():
        if event.key.startswith("fusednorm::"):
            counts[event.key] = event.count
    priorities = {name: getattr(ops, name).get_priority() for name in ("rms_norm", "fused_add_rms_norm")}
    for function in undo:
        function()
    llm.llm_engine.engine_core.shutdown()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [[next(iter(d.values())).logprob for d in output.outputs[0].logprobs] for output in outputs]
    return {"tokens": tokens, "logprobs": logprobs, "priorities": priorities, "counts": counts}


def rename_a_parameter():
    """vLLM's RMSNorm as it is, but for the name of a parameter."""
    from vllm.ir import ops

    implementation = ops.rms_norm.impls["native"]
    native = implementation.impl_fn
    implementation.impl_fn = lambda x, weight, eps, variance_size=None: native(x, weight, eps, variance_size)


def main():
    task = json.loads(sys.argv[1])
    if task["changed"]:
        rename_a_parameter()
    results = []
    for job in task["jobs"]:
        results.append(run(job, task["prompts"]))
        gc.collect()
    with open(task["out"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
