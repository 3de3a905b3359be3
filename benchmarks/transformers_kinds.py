"""Kinds of models of transformers that can be built tiny: which steps ``patch`` takes, and which it leaves.

All kinds of causal and masked language models, of models from text to text, and of classifiers of images; ``--kinds``
also takes other kinds that transformers knows.

    python -P benchmarks/transformers_kinds.py
    python -P benchmarks/transformers_kinds.py --kinds llama t5 bert

Models have random weights and are built from their configurations: nothing is downloaded. Steps are counted in what the
model executes, before and after the patch, so nothing that the patch says of itself enters the table.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto

import fusednorm.transformers

_ACTIVATIONS = ("silu", "gelu", "sigmoid", "relu", "tanh", "softplus")

#: The names that configurations have for their sizes.
TINY = {
    64: "hidden_size d_model n_embd embed_dim hidden_dim dim width embedding_size decoder_hidden_size model_dim "
    "encoder_hidden_size out_hidden_size attention_hidden_size lm_dim attn_hidden_size lru_width",
    128: "vocab_size vocab_size_per_layer_input intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner "
    "mlp_dim ffn_hidden_size dense_intermediate_size intermediate_size_mlp decoder_ffn_hidden_size",
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth "
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_local_experts n_routed_experts num_experts moe_num_experts index_topk index_n_heads linear_num_key_heads "
    "swa_num_attention_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk n_group n_groups "
    "hc_mult num_blocks swa_num_key_value_heads o_groups",
    1: "first_k_dense_replace topk_group n_shared_experts num_shared_experts",
    16: "head_dim d_kv attention_head_size kv_lora_rank o_lora_rank qk_nope_head_dim v_head_dim ssm_state_size "
    "state_size mamba_d_state chunk_size mamba_chunk_size linear_key_head_dim linear_value_head_dim global_head_dim "
    "index_head_dim mamba_d_head mamba_head_dim hidden_size_per_layer_input conv_dim swa_head_dim swa_v_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "image_size expert_ffn_hidden_size sliding_window share_expert_dim expert_dim "
    "shared_intermediate_size",
    8: "qk_rope_head_dim rotary_dim patch_size mamba_n_heads mamba_num_heads linear_num_value_heads n_mamba_heads",
    256: "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
}
SIZES = {name: size for size, names in TINY.items() for name in names.split()}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

#: The classes that build a model of a kind, the first that knows it.
BUILDERS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": transformers.AutoModelForCausalLM,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": transformers.AutoModelForSeq2SeqLM,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": transformers.AutoModelForMaskedLM,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": transformers.AutoModelForImageClassification,
    "MODEL_MAPPING_NAMES": transformers.AutoModel,
}


#: Changes of these sizes with which some kinds can be built; the first that runs is taken. None: the kind's usual size.
OTHERWISE: tuple[dict[str, int | None], ...] = (
    {},
    {"head_dim": None, "num_key_value_heads": 4},
    {"num_key_value_heads": 4, "num_kv_heads": 4, "qk_rope_head_dim": 16},
    {"head_dim": None},
    {"head_dim": 16},
    {"ssm_state_size": None, "mamba_d_state": None, "mamba_d_head": None, "mamba_n_heads": None, "n_groups": None},
    {"num_heads": 8},
    {"num_kv_shared_layers": 0},
    {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 2},
    {"num_hidden_layers": None, "num_layers": None},
    {"patch_size": None, "image_size": None},
)


def tiny(of: type, changed: dict[str, int | None]) -> Any:
    """A configuration of a class, and of the classes of its parts, with small sizes."""
    usual = vars(of())
    sizes = {name: size for name, size in (SIZES | changed).items() if size is not None}
    values = {
        name: size
        for name, size in sizes.items()
        if type(usual.get(name)) is int or (name in changed and name in usual)
    }
    for name, part in usual.items():
        if isinstance(part, transformers.PretrainedConfig):
            values[name] = tiny(type(part), changed)
    return of(**values)


def built(kind: str, dtype: torch.dtype, changed: dict[str, int | None]) -> Any:
    """A tiny model, whose weights of norms are random, too."""
    builder = next(builder for mapping, builder in BUILDERS.items() if kind in getattr(modeling_auto, mapping))
    config = tiny(type(transformers.AutoConfig.for_model(kind)), changed)
    with torch.device("meta"):
        size = sum(p.numel() for p in builder.from_config(config).parameters())
    if size > 2e7:
        raise MemoryError(f"{size:.0e} parameters")
    torch.manual_seed(0)
    model = builder.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all():
                parameter.normal_(0, 0.02)
            elif parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What the model takes."""
    random = torch.Generator().manual_seed(1)
    names = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 128, (2, 9), generator=random)
    given: dict[str, Any] = {}
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        given["pixel_values"] = torch.randn(2, 3, height, width, generator=random).to(model.dtype)
    elif model.main_input_name != "input_ids":
        bins = getattr(model.config, "num_mel_bins", 80)
        shape = (2, bins, 2 * getattr(model.config, "max_source_positions", 32))
        given[model.main_input_name] = torch.randn(*shape, generator=random).to(model.dtype)
    else:
        given["input_ids"] = ids
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return given | ({"use_cache": False} if "use_cache" in names else {})


class Steps(TorchDispatchMode):
    """Counts norms, additions, rotated tensors and gates, as they are executed by torch and by fusednorm."""

    def __init__(self) -> None:
        super().__init__()
        self.left: Counter[str] = Counter()
        self._made: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it if it is a step."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fusednorm":
            return result
        operands = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        made_by = {self._made[id(x)][1] for x in operands if id(x) in self._made}
        if step := self._step(func._opname, args, operands, made_by):
            self.left[step] += 1
        kind = func._opname
        if func.is_view or kind in ("_to_copy", "clone"):
            kind = next(iter(made_by), "")
        if isinstance(result, torch.Tensor):
            self._made[id(result)] = result, "activated" if kind in _ACTIVATIONS else kind
        return result

    def _step(self, name: str, args: Any, operands: list[torch.Tensor], made_by: set[str]) -> str:
        """The name of a step that ends with an operation; an empty one for another operation."""
        if name in ("rsqrt", "native_layer_norm", "_fused_rms_norm") or (name == "pow" and args[1] == -0.5):
            return "norms"
        if name in ("cat", "stack"):
            return "rotations" if {"neg", "sub"} & made_by and operands[0].is_floating_point() else ""
        if len(operands) != 2 or operands[0].shape != operands[1].shape:
            return ""
        if name == "mul":
            return "gates" if "activated" in made_by else ""
        of_rows = operands[0].shape[-1] == SIZES["hidden_size"] and operands[0].dim() == 3
        return "additions" if name in ("add", "add_") and of_rows else ""


def run(model: Any) -> tuple[torch.Tensor, Steps]:
    """The first floating-point result, and the steps."""
    with torch.no_grad(), Steps() as steps:
        found = model(**inputs(model))
    results = [x for x in torch.utils._pytree.tree_leaves(found.to_tuple()) if isinstance(x, torch.Tensor)]
    return next(x for x in results if x.is_floating_point() and x.dim() > 1), steps


class Result(NamedTuple):
    """What the patch takes of a model, and leaves of it."""

    kind: str
    left: Counter[str]
    all: Counter[str]
    off: float  # the greatest distance of two results
    reasons: list[str]

    def __str__(self) -> str:
        counts = " ".join(f"{self.left[step]}/{self.all[step]}" for step in self.steps)
        off = f" off by {self.off:.1g}" if self.off else ""
        return f"{self.kind} {counts}{off}".strip()

    @property
    def steps(self) -> list[str]:
        """The kinds of steps of which some are left."""
        return [step for step in ("norms", "additions", "rotations", "gates") if self.left[step]]


def result(kind: str) -> Result:
    """A kind's result, with the first sizes with which it can be built and run."""
    reasons: list[Exception] = []
    for changed in OTHERWISE:
        try:
            model = built(kind, torch.bfloat16, changed)
            before, own = run(model)
            break
        except TimeoutError:
            raise
        except Exception as error:  # of any model's code for sizes that it was not made for
            reasons.append(error)
    else:
        raise reasons[0]
    report = fusednorm.transformers.patch(model)
    after, steps = run(model)
    differ = (before != after) & ~(before.isnan() & after.isnan())
    off = (before.float() - after.float())[differ].abs().max().item() if differ.any() else 0.0
    left = [f"{entry.class_name}: {entry.what}" for entry in report.entries if not entry.replaced]
    return Result(kind, steps.left, own.left, off, left)


def table(results: list[Result]) -> str:
    """Markdown: the kinds of which the same kinds of steps are left."""
    lines = ["| Left | Kinds: how many are left of how many |", "|---|---|"]
    groups: dict[str, list[Result]] = {}
    for one in results:
        groups.setdefault(" ".join(one.steps) or "nothing", []).append(one)
    for steps, group in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {steps} | {', '.join(map(str, group))} |")
    return "\n".join(lines)


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = dict.fromkeys(kind for mapping in list(BUILDERS)[:-1] for kind in getattr(modeling_auto, mapping))
    parser.add_argument("--kinds", nargs="+", default=list(every))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    def too_long(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    results: list[Result] = []
    not_built: dict[str, str] = {}
    for kind in arguments.kinds:
        signal.alarm(60)
        try:
            results.append(one := result(kind))
            print(one, *one.reasons, sep="; ", flush=True)
        except Exception as error:  # see above
            not_built[kind] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            print(f"{kind}: not built this small: {not_built[kind]}", flush=True)
        finally:
            signal.alarm(0)
    total, left = Counter[str](), Counter[str]()
    for one in results:
        total.update(one.all)
        left.update(one.left)
    print(f"\ntransformers {transformers.__version__}: {len(results)} kinds, not built {len(not_built)}")
    print(
        ", ".join(f"{count - left[step]} of {count} {step}" for step, count in total.items()), "taken; bits differ in"
    )
    print(", ".join(one.kind for one in results if one.off) or "none", end="\n\n")
    print(table(results))


if __name__ == "__main__":
    main()
