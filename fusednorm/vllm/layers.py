"""Classes in place of vLLM's layers: gates, gated norms, rotations, and Gemma's norm, on CPUs.

vLLM has no operation of its IR for them. It has a table of classes that it makes objects of in place of its own
(``CustomOp.register_oot``). A class here inherits from vLLM's, and only ``forward_cpu`` differs: vLLM calls it unless
its option ``custom_ops`` disables the layer. Compiled models disable all layers that the option does not enable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm.compat import unrounded
from fusednorm.engine.choose import use_backend
from fusednorm.operations import functions, gate, norm, norm_gated, rotate
from fusednorm.vllm.providers import AS_VLLM, DEFAULT

_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32))

#: One of vLLM's layers, whether to round where it does, and its arguments -> its results; None: vLLM computes the call.
Forward = Callable[..., Any]


def _silu_and_mul(layer: Any, as_vllm: bool, x: Tensor) -> Tensor | None:
    return gate.silu_and_mul(x) if x.dtype in _FLOATS else None


def _gelu_and_mul(layer: Any, as_vllm: bool, x: Tensor) -> Tensor | None:
    if x.dtype not in _FLOATS:
        return None
    return gate.gelu_tanh_and_mul(x) if layer.approximate == "tanh" else gate.gelu_and_mul(x)


def _swiglu_oai(layer: Any, as_vllm: bool, x: Tensor) -> Tensor | None:
    """gpt-oss's gate. vLLM rounds each step; fusednorm by default rounds silu and the product."""
    if x.dtype not in _FLOATS or layer.alpha <= 1:
        return None
    steps = {"alpha": layer.alpha, "up_offset": 1.0, "interleaved": True, "round_steps": as_vllm}
    return gate.silu_and_mul(x, limit=layer.limit, **steps)


def _swiglu_step(layer: Any, as_vllm: bool, x: Tensor) -> Tensor | None:
    """Step 3.7's gate."""
    return gate.silu_and_mul(x, limit=layer.limit, clamp="after") if x.dtype in _FLOATS else None


def _relu2(layer: Any, as_vllm: bool, x: Tensor) -> Tensor | None:
    return functions.relu2(x) if x.dtype in _FLOATS else None


def _rms_norm_gated(layer: Any, as_vllm: bool, x: Tensor, z: Tensor | None = None) -> Tensor | None:
    """vLLM rounds once, at the end; fusednorm by default rounds normalised rows before they meet the gate."""
    if z is None or {x.dtype, z.dtype, layer.weight.dtype} - _FLOATS:
        return None
    return norm_gated.rms_norm_gated(
        *(x, z, layer.weight.data, layer.eps),
        group_size=layer.group_size,
        norm_before_gate=layer.norm_before_gate,
        activation="sigmoid" if layer.activation == "sigmoid" else "silu",
        between=unrounded(x) if as_vllm and layer.norm_before_gate else None,
    )


def _norm_of_gated(layer: Any, as_vllm: bool, x: Tensor, gate: Tensor) -> Tensor | None:
    """Of Mamba 2. vLLM keeps it where several processes share a group, and without a weight."""
    whole_groups = layer.tp_size == 1 or (layer.n_groups > 1 and layer.n_groups % layer.tp_size == 0)
    fits = layer.use_rms_norm and layer.weight.dtype == x.dtype and not {x.dtype, gate.dtype} - _FLOATS
    if not (whole_groups and fits):
        return None
    operands = x, gate, layer.weight.data
    flags = {"group_size": layer.group_size, "norm_before_gate": False, "round_norm": as_vllm}
    return norm_gated.rms_norm_gated(*operands, layer.variance_epsilon, **flags)


def _gemma_rms_norm(vllms: Any, layer: Any, as_vllm: bool, x: Tensor, residual: Tensor | None = None) -> Any:
    """The norm's gain 1 + weight needs no tensor of its own, and a sum no copies of its operands.

    vLLM's class calls operations of the IR, so their order of preference also decides here.
    """
    weight, eps = layer.weight.data, layer.variance_epsilon
    operation = vllms.rms_norm if residual is None else vllms.fused_add_rms_norm
    first = operation.get_priority()[:1]
    alike = residual is None or residual.dtype == x.dtype
    if not alike or {x.dtype, weight.dtype} - _FLOATS or first not in ([AS_VLLM], [DEFAULT]):
        return None
    if residual is None:
        return norm.rms_norm(x, weight, eps, weight_offset=1.0)
    return norm.fused_add_rms_norm(x, residual, weight, eps, weight_offset=1.0, round_sum=first == [DEFAULT])


def _rotary_embedding(
    layer: Any, as_vllm: bool, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """In place, as vLLM's own kernel for CPUs; each product unrounded, as there."""
    alike = query.dtype in _FLOATS and (key is None or key.dtype == query.dtype)
    if not alike or positions.dim() != 1:
        return None
    cos, sin = _halves(layer, layer._match_cos_sin_cache_dtype(query))
    shape, pairs = (positions.shape[0], -1, layer.head_size), not layer.is_neox_style
    q = query.view(shape)
    if key is None:
        rotate.rotate(q, cos, sin, positions=positions, interleaved=pairs, out=q)
    else:
        k = key.view(shape)
        rotate.qk_norm_rope_(q, k, cos=cos, sin=sin, norm=False, positions=positions, interleaved=pairs)
    return query, key


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
    forward: Forward
    attributes: dict[str, Any]
    arguments: tuple[Tensor, ...]
    #: Whether classes that inherit from it, and compute alike, are replaced too.
    heirs: bool = False


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
    gemma, positions = {"weight": weight[0], "variance_epsilon": 1e-6}, torch.arange(16, device="cpu")
    return [
        Layer("activation", "SiluAndMul", _silu_and_mul, {}, (z,)),
        Layer("activation", "GeluAndMul", _gelu_and_mul, {"approximate": "tanh"}, (z,)),
        Layer("activation", "SwigluOAIAndMul", _swiglu_oai, {"alpha": 1.702, "limit": 7.0}, (4 * z,)),
        Layer("activation", "SwigluStepAndMul", _swiglu_step, {"limit": 1.0}, (4 * z,)),
        Layer("activation", "ReLUSquaredActivation", _relu2, {}, (z,)),
        Layer("layernorm", "RMSNormGated", _rms_norm_gated, gated_norm, (x, z)),
        Layer("layernorm", "GemmaRMSNorm", partial(_gemma_rms_norm, vllms), gemma, (x, z)),
        Layer("mamba.mamba_mixer2", "Mixer2RMSNormGated", _norm_of_gated, {"weight": of_row, **groups}, (x, z)),
        Layer("rotary_embedding", "RotaryEmbedding", _rotary_embedding, rotary, (positions, x, z), heirs=True),
    ]


def replace(as_vllm: bool) -> tuple[list[str], list[str]]:
    """Registers a class for each of vLLM's layers that is as known.

    Args:
        as_vllm: round at the places of vLLM's layers. Otherwise round as fusednorm does by default.

    Returns:
        The names of the classes that are replaced, and for each of the others the reason.
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    replaced, left = [], []
    for layer in _layers():
        found, reason = _found(layer)
        if reason:
            left.append(reason)
            continue
        for cls in (found, *(_heirs(found) if layer.heirs else ())):
            if cls.__name__ in op_registry_oot:
                left.append(f"another plug-in replaces {cls.__name__}")
                continue
            CustomOp.register_oot(name=cls.__name__)(ours := _class(cls, layer.forward, as_vllm))
            ours.name = cls.name  # by which the option `custom_ops` knows it
            replaced.append(cls.__name__)
    return replaced, left


def _class(cls: Any, ours: Forward, as_vllm: bool) -> Any:
    theirs = cls.forward_cpu

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = ours(self, as_vllm, *arguments, **keywords)
        return theirs(self, *arguments, **keywords) if found is None else found

    return type(f"Fusednorm{cls.__name__}", (cls,), {"forward_cpu": forward})


def _heirs(cls: Any) -> Iterator[Any]:
    """The classes of vLLM that inherit from cls and compute by its methods, in any number of steps."""
    for heir in cls.__subclasses__():
        if heir.__module__.startswith("vllm."):
            if all(getattr(heir, name) is getattr(cls, name) for name in ("forward_cpu", "forward_native")):
                yield heir
            yield from _heirs(heir)


def _found(layer: Layer) -> tuple[Any, str]:
    """vLLM's class; and if it is not as known, the reason.

    It is as known if 99 of 100 elements of a call are equal. Where vLLM rounded at other places, a tenth would differ.
    """
    from vllm.ir import ops as vllms

    module = f"vllm.model_executor.layers.{layer.module}"
    name = f"{module}.{layer.name}"
    try:
        cls = getattr(importlib.import_module(module), layer.name)
        with _first(vllms, "native"):
            theirs = _called(cls, layer)
        with _first(vllms, AS_VLLM), use_backend("reference"):  # the user's request may exclude CPU tensors
            ours = _called(_class(cls, layer.forward, as_vllm=True), layer)
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
    results = made.forward_cpu(*(t.clone() for t in layer.arguments))
    return results if isinstance(results, tuple) else (results,)


@contextmanager
def _first(vllms: Any, provider: str) -> Iterator[None]:
    """Has vLLM's operations prefer a provider."""
    order = [provider, "native"]
    with vllms.rms_norm.set_priority(order), vllms.fused_add_rms_norm.set_priority(order):
        yield
