"""Classes in place of vLLM's layers: gates, gated norms, rotations, LayerNorm and Gemma's norm, on CPUs.

vLLM has no operation of its IR for them. It has two tables of classes that it makes objects of in place of its own
(``CustomOp.register_oot``): of its layers, and of those that know no hardware (VLLM_USE_HW_AGNOSTIC). A class here
inherits from vLLM's, and only ``forward_cpu`` differs: it is called unless vLLM's option ``custom_ops`` disables the
layer. Compiled models disable all layers that the option does not enable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.engine.choose import use_backend
from fusednorm.operations import functions, gate, layer_norm, norm, norm_gated, rotate
from fusednorm.vllm import tables
from fusednorm.vllm.log import say, warn_left
from fusednorm.vllm.providers import AS_VLLM, ROUNDINGS
from fusednorm.vllm.roundings import VLLM, Roundings, of, of_model

_FLOATS = frozenset(NARROW_FLOATS)

#: The operation that computes one of vLLM's layers, and its flags, where a model has these roundings; None: vLLM does.
Step = Callable[[Any, Roundings], tuple[str, dict[str, Any]] | None]

#: One of vLLM's layers, these flags, and its arguments -> its results; None: vLLM computes the call.
Forward = Callable[..., Any]


def _silu_and_mul_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    return "silu_and_mul", {}


def _silu_and_mul(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    return gate.silu_and_mul(x) if x.dtype in _FLOATS else None


def _mul_and_silu(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    """The gate is the second half."""
    up, gates = x.chunk(2, dim=-1)
    return gate.silu_and_mul(gates, up) if x.dtype in _FLOATS else None


def _gelu_and_mul_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    return "gelu_tanh_and_mul" if layer.approximate == "tanh" else "gelu_and_mul", {}


def _gelu_and_mul(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    if x.dtype not in _FLOATS:
        return None
    return gate.gelu_tanh_and_mul(x) if layer.approximate == "tanh" else gate.gelu_and_mul(x)


def _swiglu_oai_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """gpt-oss's gate."""
    flags = {"limit": layer.limit, "alpha": layer.alpha, "up_offset": 1.0, "interleaved": True}
    return _gate_in_steps(flags, of_model)


def _silu_and_mul_with_clamp_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """MiniMax M3's gate."""
    flags = {"limit": layer.swiglu_limit, "alpha": layer.alpha, "up_offset": layer.beta}
    return _gate_in_steps(flags, of_model)


def _gate_in_steps(flags: dict[str, Any], of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """vLLM rounds each step; fusednorm by default rounds silu and the product.

    vLLM keeps a gate whose ``alpha`` is 1: it rounds the sigmoid, and fusednorm's silu is one step.
    """
    return ("silu_and_mul", {**flags, **of_model["gate in steps"]}) if flags["alpha"] > 1 else None


def _swiglu_step_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    """Step 3.7's gate."""
    return "silu_and_mul", {"limit": layer.limit, "clamp": "after"}


def _with_flags(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    return gate.silu_and_mul(x, **flags) if x.dtype in _FLOATS else None


def _relu2_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    return "relu2", {}


def _relu2(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    return functions.relu2(x) if x.dtype in _FLOATS else None


def _rms_norm_gated_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    """vLLM rounds once, at the end; fusednorm by default rounds normalised rows before they meet the gate."""
    return "rms_norm_gated", {
        "eps": layer.eps,
        "group_size": layer.group_size,
        "norm_before_gate": layer.norm_before_gate,
        "activation": "sigmoid" if layer.activation == "sigmoid" else "silu",
        **(of_model["norm, then gate"] if layer.norm_before_gate else {}),
    }


def _rms_norm_gated(layer: Any, flags: dict[str, Any], x: Tensor, z: Tensor | None = None) -> Tensor | None:
    if z is None or {x.dtype, z.dtype, layer.weight.dtype} - _FLOATS:
        return None
    return norm_gated.rms_norm_gated(x, z, layer.weight.data, **flags)


def _norm_of_gated_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """The gated norm of Mamba 2. vLLM keeps its own where several processes share a group, and without a weight."""
    whole_groups = layer.tp_size == 1 or (layer.n_groups > 1 and layer.n_groups % layer.tp_size == 0)
    if not (whole_groups and layer.use_rms_norm):
        return None
    flags = {"eps": layer.variance_epsilon, "group_size": layer.group_size, "norm_before_gate": False}
    return "rms_norm_gated", {**flags, **of_model["gate, then norm"]}


def _norm_of_gated(layer: Any, flags: dict[str, Any], x: Tensor, gate: Tensor) -> Tensor | None:
    if layer.weight.dtype != x.dtype or {x.dtype, gate.dtype} - _FLOATS:
        return None
    return norm_gated.rms_norm_gated(x, gate, layer.weight.data, **flags)


def _layer_norm_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    return "layer_norm", {"eps": layer.eps}


def _layer_norm(layer: Any, flags: dict[str, Any], x: Tensor) -> Tensor | None:
    """vLLM computes in the wider dtype of the rows and the weight, and rounds once."""
    weight, bias = layer.weight, layer.bias
    alike = weight is None or weight.dtype in (x.dtype, torch.float32)
    return layer_norm.layer_norm(x, weight, bias, **flags) if alike and x.dtype in _FLOATS else None


def _rms_norm_step(vllms: Any, layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """vLLM calls its provider, so its order of preference decides."""
    (first, *_) = vllms.rms_norm.get_priority() or [None]
    flags = ROUNDINGS.get(first)
    if flags is None or layer.variance_size_override is not None:
        return None
    return _norm_or_sum(layer, flags, round_norm=flags["round_norm"] and layer.has_weight)


def _norm_or_sum(layer: Any, roundings: Mapping[str, Any], **flags: Any) -> tuple[str, dict[str, Any]]:
    """The step of a norm, or of a norm of sums where these are not rounded, which only a call shows."""
    flags = {"eps": layer.variance_epsilon, **flags}
    if roundings["round_sum"] or layer._fusednorm_summed is False:
        return "rms_norm", flags
    return "fused_add_rms_norm", {**flags, "round_sum": False}


def _rms_norm(layer: Any, flags: dict[str, Any], x: Tensor, residual: Tensor | None = None) -> None:
    """Notes whether the norm is one of sums, and lets vLLM's provider compute it."""
    if not torch.compiler.is_compiling():
        layer.__dict__["_fusednorm_summed"] = residual is not None


def _agnostic_rms_norm(vllms: Any, layer: Any, flags: dict[str, Any], x: Tensor, residual: Tensor | None = None) -> Any:
    """The layer that knows no hardware, by the operations of the IR, so that their order of preference decides."""
    _rms_norm(layer, flags, x, residual)
    given = layer.weight.data if layer.has_weight else None, layer.variance_epsilon, layer.variance_size_override
    return vllms.rms_norm(x, *given) if residual is None else vllms.fused_add_rms_norm(x, residual, *given)


def _gemma_rms_norm_step(vllms: Any, layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """vLLM's class calls operations of the IR, so their order of preference also decides here."""
    (first, *_) = vllms.rms_norm.get_priority() or [None]
    if first not in ROUNDINGS:
        return None
    return _norm_or_sum(layer, ROUNDINGS[first], weight_offset=1.0)


def _gemma_rms_norm(vllms: Any, layer: Any, flags: dict[str, Any], x: Tensor, residual: Tensor | None = None) -> Any:
    """The norm's gain 1 + weight needs no tensor of its own, and a sum no copies of its operands."""
    _rms_norm(layer, flags, x, residual)
    weight, eps = layer.weight.data, layer.variance_epsilon
    operation = vllms.rms_norm if residual is None else vllms.fused_add_rms_norm
    (first, *_) = operation.get_priority() or [None]
    alike = residual is None or residual.dtype == x.dtype
    if not alike or {x.dtype, weight.dtype} - _FLOATS or first not in ROUNDINGS:
        return None
    if residual is None:
        return norm.rms_norm(x, weight, eps, weight_offset=1.0)
    return norm.fused_add_rms_norm(x, residual, weight, eps, weight_offset=1.0, round_sum=ROUNDINGS[first]["round_sum"])


def _rotary_embedding_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    return "rotate", {"interleaved": not layer.is_neox_style, **of_model["rotation"]}


def _rotary_embedding(
    layer: Any, flags: dict[str, Any], positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Rotates q and k in place, as vLLM's own kernel for CPUs."""
    alike = query.dtype in _FLOATS and (key is None or key.dtype == query.dtype)
    if not alike or positions.dim() != 1:
        return None
    cos, sin = _halves(layer, layer._match_cos_sin_cache_dtype(query))
    return _rotated(layer, flags, query, key, cos, sin, positions)


def _rotated(
    layer: Any,
    flags: dict[str, Any],
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Rotates in place, by the rows of ``cos`` and ``sin`` that ``positions`` names, or by one for each token."""
    shape = query.shape[0], -1, layer.head_size
    q = query.view(shape)
    if key is None:
        rotate.rotate(q, cos, sin, positions=positions, out=q, **flags)
    else:
        rotate.qk_norm_rope_(q, key.view(shape), cos=cos, sin=sin, norm=False, positions=positions, **flags)
    return query, key


def _mrope_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]]:
    """vLLM rotates in plain torch operations, which round each product."""
    return "rotate", {"interleaved": not layer.is_neox_style, **of_model["rotation in steps"]}


def _mrope(
    layer: Any, flags: dict[str, Any], positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Rotates in place, as vLLM does on GPUs. A token of an image has three positions, each for some of the pairs."""
    if positions.dim() == 1:
        return _rotary_embedding(layer, flags, positions, query, key)
    if query.dtype not in _FLOATS or key.dtype != query.dtype:
        return None
    part = torch.tensor(2 * _parts(layer.mrope_section, layer.mrope_interleaved))  # of the cosines, and of the sines
    first, second, third = layer._match_cos_sin_cache_dtype(query)[positions]
    cos, sin = third.where(part == 2, second.where(part == 1, first)).chunk(2, dim=-1)
    return _rotated(layer, flags, query, key, cos, sin, None)


def _parts(sizes: list[int], interleaved: bool) -> list[int]:
    """Which of the three positions each pair of numbers takes."""
    if interleaved:
        return [pair % 3 if pair < 3 * sizes[pair % 3] else 0 for pair in range(sum(sizes))]
    return [part for part, size in enumerate(sizes) for _ in range(size)]


def _apply_rotary_emb_step(layer: Any, of_model: Roundings) -> tuple[str, dict[str, Any]] | None:
    """The step of vision towers, which always enable it; a rotation of text holds one that it never calls."""
    if not layer._enforce_enable:
        return None
    in_float32 = {"round_products": False}
    rounded = in_float32 if layer.enable_fp32_compute else of_model["rotation in steps"]
    return "rotate", {"interleaved": not layer.is_neox_style, **rounded}


def _apply_rotary_emb(layer: Any, flags: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """The heads of x, ``[..., S, H, D]``, by the rows of ``cos`` and ``sin``, ``[S, D / 2]``."""
    if x.dtype not in _FLOATS or cos.shape != (x.shape[-3], x.shape[-1] // 2):
        return None
    if not layer.enable_fp32_compute:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rows = (*x.shape[:-2], cos.shape[-1])
    return rotate.rotate(x, cos.expand(rows), sin.expand(rows), **flags)


def _halves(layer: Any, table: Tensor) -> tuple[Tensor, Tensor]:
    """A table's cosines and sines. They are kept, because to split the table takes as long as to rotate one row."""
    kept = layer.__dict__.get("_fusednorm_tables")
    if kept is None or kept[0] is not table:
        kept = (table, *table.chunk(2, dim=-1))
        if not torch.compiler.is_compiling():
            layer.__dict__["_fusednorm_tables"] = kept
    return kept[1], kept[2]


@dataclass(frozen=True)
class Layer:
    """One of vLLM's layers.

    ``attributes`` of an object, and ``arguments`` of its ``forward_cpu``, are those of a call to try both on.
    """

    module: str
    name: str
    step: Step
    forward: Forward
    attributes: dict[str, Any]
    arguments: tuple[Tensor, ...]
    #: Whether classes that inherit from it, and compute alike, are replaced too.
    heirs: bool = False
    #: Whether the step is that of the module around it, as a model of transformers has it.
    within: bool = False
    #: Whether fusednorm also computes it where vLLM calls the class's own code: that calls an operation of the IR.
    by_provider: bool = False
    #: Whether it makes a table of cosines and sines when it is made.
    tables: bool = False
    #: The package of vLLM that has its module and, beside them, the table of classes.
    package: str = "vllm.model_executor"


def _layers() -> list[Layer]:
    """The layers, each with a call of a few rows in bfloat16."""
    from vllm.ir import ops as vllms

    rows = torch.arange(16 * 256, device="cpu").view(16, 256)
    x, z, weight = ((rows * step).sin().mul(size).bfloat16() for step, size in ((0.7, 1.0), (1.1, 2.0), (0.3, 0.2)))
    of_row = weight[0] + 1
    gated_norm = {"weight": of_row, "eps": 1e-6, "group_size": None, "norm_before_gate": True, "activation": "swish"}
    groups = {"tp_size": 1, "n_groups": 2, "group_size": 128, "use_rms_norm": True, "variance_epsilon": 1e-6}
    table = (rows[:, :64] / 9).sin().bfloat16()
    rotary = {
        "head_size": 64,
        "is_neox_style": True,
        "cos_sin_cache": table,
        "_match_cos_sin_cache_dtype": lambda query: table,
    }
    operation = {"variance_size_override": None, "has_weight": True, "pass_weight": True, "pass_weight_add": True}
    plain = {"weight": of_row, "variance_epsilon": 1e-6, **operation}
    of_layer_norm = {"weight": of_row, "bias": weight[1], "eps": 1e-5, "normalized_shape": (256,)}
    gemma, positions = {"weight": weight[0], "variance_epsilon": 1e-6}, torch.arange(16, device="cpu")
    of_rms_norm = partial(_rms_norm_step, vllms), _rms_norm
    agnostic = "vllm.model_executor.hw_agnostic"
    of_agnostic_norm = partial(_rms_norm_step, vllms), partial(_agnostic_rms_norm, vllms)
    of_gemma = partial(_gemma_rms_norm_step, vllms), partial(_gemma_rms_norm, vllms)
    oai = {"alpha": 1.702, "limit": 7.0}
    mixer = "mamba.mamba_mixer2", "Mixer2RMSNormGated"
    rotation = _rotary_embedding_step, _rotary_embedding
    parts = {"rotary_dim": 64, "mrope_section": [12, 12, 8], "mrope_interleaved": True}
    parts["apply_rotary_emb"] = SimpleNamespace(forward_native=_vllms_rotation)
    of_image = positions * torch.tensor([[1], [2], [3]], device="cpu") % 16
    return [
        Layer("activation", "SiluAndMul", _silu_and_mul_step, _silu_and_mul, {}, (z,), within=True),
        Layer("activation", "MulAndSilu", _silu_and_mul_step, _mul_and_silu, {}, (z,), within=True),
        Layer(
            *("activation", "GeluAndMul", _gelu_and_mul_step, _gelu_and_mul), {"approximate": "tanh"}, (z,), within=True
        ),
        Layer("activation", "SwigluOAIAndMul", _swiglu_oai_step, _with_flags, oai, (4 * z,), within=True),
        Layer(
            "activation",
            "SiluAndMulWithClamp",
            _silu_and_mul_with_clamp_step,
            _with_flags,
            attributes={"swiglu_limit": 7.0, "alpha": 1.702, "beta": 1.0},
            arguments=(4 * z,),
            within=True,
        ),
        Layer("activation", "SwigluStepAndMul", _swiglu_step_step, _with_flags, {"limit": 1.0}, (4 * z,), within=True),
        Layer("activation", "ReLUSquaredActivation", _relu2_step, _relu2, {}, (z,)),
        Layer("layernorm", "RMSNorm", *of_rms_norm, plain, (x, z), by_provider=True),
        Layer("layernorm", "LayerNorm", _layer_norm_step, _layer_norm, of_layer_norm, (x,)),
        Layer("layernorm", "RMSNormGated", _rms_norm_gated_step, _rms_norm_gated, gated_norm, (x, z)),
        Layer("layernorm", "GemmaRMSNorm", *of_gemma, gemma, (x, z), by_provider=True),
        Layer("layernorm", "RMSNorm", *of_agnostic_norm, plain, (x, z), by_provider=True, package=agnostic),
        Layer("activation", "SiluAndMul", _silu_and_mul_step, _silu_and_mul, {}, (z,), within=True, package=agnostic),
        Layer(*mixer, _norm_of_gated_step, _norm_of_gated, {"weight": of_row, **groups}, (x, z)),
        Layer(
            *("rotary_embedding", "RotaryEmbedding", *rotation, rotary, (positions, x, z)),
            heirs=True,
            within=True,
            tables=True,
        ),
        Layer(
            "rotary_embedding",
            "MRotaryEmbedding",
            _mrope_step,
            _mrope,
            attributes={**rotary, **parts},
            arguments=(of_image, x, z),
            heirs=True,
            within=True,
            tables=True,
        ),
        Layer(
            "rotary_embedding.common",
            "ApplyRotaryEmb",
            _apply_rotary_emb_step,
            _apply_rotary_emb,
            attributes={"_enforce_enable": True, "is_neox_style": True, "enable_fp32_compute": False},
            arguments=(x.view(16, 4, 64), *table.float().chunk(2, -1)),
            within=True,
        ),
    ]


def _vllms_rotation(*arguments: Any) -> Tensor:
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    rotated: Tensor = ApplyRotaryEmb.forward_static(*arguments)
    return rotated


def replace_in_workers(platform: Any, replace: Callable[[], None]) -> None:
    """Has ``replace`` called once in each of the processes that make a model, and there only.

    Each imports the platform's kernels before. vLLM's other processes load none of its layers, so the plug-in does not
    either: they take a second.
    """
    platforms_own, once = platform.import_ir_kernels, cache(replace)

    def import_ir_kernels(cls: Any) -> None:
        platforms_own()
        once()

    platform.import_ir_kernels = classmethod(import_ir_kernels)


def replace(contract: str, exact: bool) -> None:
    """Registers classes in place of vLLM's layers. The log names each when the model makes the first one.

    Args:
        contract: whose roundings the layers have.
        exact: whether tables of rotations have the same bits on every processor, as products have.
    """
    for layer in _layers():
        found, reason = _found(layer)
        if reason:
            warn_left(f"a layer of vLLM as it was: {reason}")
            continue
        custom_op = importlib.import_module(f"{layer.package}.custom_op")
        for cls in (found, *(_heirs(found) if layer.heirs else ())):
            if cls.__name__ in custom_op.op_registry_oot:
                warn_left(f"a layer of vLLM as it was: another plug-in replaces {cls.__name__}")
                continue
            custom_op.CustomOp.register_oot(name=cls.__name__)(ours := _class(cls, layer, contract, exact))
            ours.name = cls.name  # by which the option `custom_ops` knows it


def _forward_of(layer: Any) -> Any:
    """The function by which a class or an object of vLLM computes on a CPU."""
    return getattr(layer, "forward_cpu", layer.forward_native)


#: Says what a layer is computed by, once.
_say_once = cache(say)


def _class(cls: Any, layer: Layer, contract: str, exact: bool = False) -> Any:
    theirs = _forward_of(cls)

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        from vllm.config import get_current_vllm_config

        with tables.exact() if exact and layer.tables else nullcontext():
            cls.__init__(self, *arguments, **keywords)
        if exact and layer.tables:
            self.fusednorm_tables = tables.Tables()
        if self._enforce_enable or self.enabled():
            self._forward_method = self.forward_cpu  # some of vLLM's classes put their `forward_native` here
        self._fusednorm_prepare(of_model(contract, get_current_vllm_config()))
        if (step := self._fusednorm_step) is not None and self._forward_method == self.forward_cpu:
            _say_once(f"computes {cls.__module__}.{cls.__name__} by {step[0] or 'the provider'}")

    def prepare(self: Any, roundings: Roundings) -> None:
        """Keeps the step. A provider's depends on vLLM's order of preference, which may change."""
        self._fusednorm_roundings = roundings
        self._fusednorm_step = ("", {}) if layer.by_provider else layer.step(self, roundings)

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        step = self._fusednorm_step
        found = None if step is None else layer.forward(self, step[1], *arguments, **keywords)
        return theirs(self, *arguments, **keywords) if found is None else found

    def steps(self: Any, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: none where vLLM computes the layer, as in compiled execution by default."""
        step = layer.step(self, self._fusednorm_roundings)
        if step is not None and "round_sum" in step[1] and self._fusednorm_summed is None:
            raise RuntimeError(
                "the engine normalises sums that are not rounded, and which norms get sums shows in their first eager "
                "call: have it answer a request with enforce_eager=True, or set FUSEDNORM_VLLM=huggingface"
            )
        method = getattr(self._forward_method, "__func__", None)  # a function where the layer is disabled
        ours = layer.by_provider or method is type(self).forward_cpu
        return [step] if step is not None and ours and of_rows in _FLOATS else []

    members: dict[str, Any] = {"__init__": init, "forward_cpu": forward, "_fusednorm_steps": steps}
    members |= {"_fusednorm_prepare": prepare, "_fusednorm_within": layer.within, "_fusednorm_summed": None}
    return type(f"Fusednorm{cls.__name__}", (cls,), members)


def _heirs(cls: Any) -> Iterator[Any]:
    """The classes of vLLM that inherit from cls and compute by its methods, in any number of steps."""
    for heir in cls.__subclasses__():
        if heir.__module__.startswith("vllm."):
            if all(getattr(heir, name) is getattr(cls, name) for name in ("forward", "forward_cpu", "forward_native")):
                yield heir
            yield from _heirs(heir)


def _found(layer: Layer) -> tuple[Any, str]:
    """vLLM's class; and if it is not as known, the reason.

    It is as known if 99 of 100 elements of a call are equal. Where vLLM rounded at other places, a tenth would differ.
    """
    from vllm.ir import ops as vllms

    module = f"{layer.package}.layers.{layer.module}"
    name = f"{module}.{layer.name}"
    try:
        cls = getattr(importlib.import_module(module), layer.name)
        with _first(vllms, "native"):
            theirs = _called(cls, layer)
        with _first(vllms, AS_VLLM), use_backend("reference"):  # the user's request may exclude CPU tensors
            ours = _called(_class(cls, layer, VLLM), layer)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        return None, f"{name} is not as in the version tested ({error})"
    equal = torch.cat([(a == b).flatten() for a, b in zip(theirs, ours, strict=True)])
    if equal.double().mean() < 0.99:
        return None, f"{name} does not round where it did in the version tested"
    return cls, ""


def _called(cls: Any, layer: Layer) -> tuple[Tensor, ...]:
    """The results of the layer's call by an object of cls, which vLLM's configuration does not make yet."""
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    vars(made).update(layer.attributes)
    if hasattr(cls, "_fusednorm_prepare"):
        made._fusednorm_prepare(of(VLLM))
    results = _forward_of(made)(*(t.clone() for t in layer.arguments))
    return results if isinstance(results, tuple) else (results,)


@contextmanager
def _first(vllms: Any, provider: str) -> Iterator[None]:
    """Has vLLM's operations prefer a provider."""
    order = [provider, "native"]
    with vllms.rms_norm.set_priority(order), vllms.fused_add_rms_norm.set_priority(order):
        yield
