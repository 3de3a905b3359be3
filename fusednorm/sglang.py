"""A plug-in of SGLang: on CPUs without AMX its norms, gates and rotations call fusednorm. See ``docs/sglang.md``.

SGLang calls :func:`register` in each of its processes (entry-point group ``sglang.srt.plugins``), and has a registry of
hooks around its functions. Without AMX it computes these layers by torch's operations, in ``forward_native``.
"""

from __future__ import annotations

import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.operations import functions, gate, layer_norm, norm, rotate
from fusednorm.version import __version__

__all__ = ["register"]

#: One of SGLang's layers, and the arguments of its ``forward_native`` -> its results; None: SGLang computes the call.
Forward = Callable[..., Any]

_FLOATS = frozenset(NARROW_FLOATS)
_logger = logging.getLogger("sglang.fusednorm")


def _alike(*tensors: Tensor | None) -> bool:
    """Whether all that are given lie on a CPU and have one dtype, of 16 or 32 bits."""
    given = [tensor for tensor in tensors if tensor is not None]
    first = given[0]
    return first.dtype in _FLOATS and all(t.dtype == first.dtype and t.device.type == "cpu" for t in given)


def _rms_norm(
    layer: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Any:
    """SGLang normalises the sum before it is rounded, and rounds the row before it meets the weight if told so."""
    weight, cast = layer.weight.data, layer.cast_x_before_out_mul
    plain = layer.variance_size_override is None and layer.override_orig_dtype is None and not layer.fp32_residual
    if post_residual_addition is not None or not plain or not _alike(x, residual) or x.shape[-1:] != weight.shape:
        return None
    if weight.dtype != x.dtype if cast else weight.dtype not in _FLOATS:
        return None
    if residual is None:
        return norm.rms_norm(x, weight, layer.variance_epsilon, round_norm=cast)
    return norm.fused_add_rms_norm(x, residual, weight, layer.variance_epsilon, round_sum=False, round_norm=cast)


def _with_offset(layer: Any, x: Tensor, residual: Tensor | None, eps: float, offset: float = 1.0) -> Any:
    """Gemma's norm, of the rounded sum."""
    weight = layer.weight.data
    if not _alike(x, residual) or weight.dtype not in _FLOATS:
        return None
    if residual is None:
        return norm.rms_norm(x, weight, eps, weight_offset=offset)
    return norm.fused_add_rms_norm(x, residual, weight, eps, weight_offset=offset)


def _gemma(layer: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None) -> Any:
    return None if post_residual_addition is not None else _with_offset(layer, x, residual, layer.variance_epsilon)


def _gemma3(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    return _with_offset(layer, x, residual, layer.eps)


def _gemma4(layer: Any, x: Tensor) -> Any:
    return _with_offset(layer, x, None, layer.eps, layer.scale_shift) if layer.with_scale else _without_weight(layer, x)


def _without_weight(layer: Any, x: Tensor) -> Any:
    return norm.rms_norm(x, None, layer.eps) if _alike(x) else None


def _layer_norm(layer: Any, x: Tensor) -> Any:
    """SGLang computes in the layer's dtype, and rounds once where that is float32."""
    weight = layer.weight.data if layer.elementwise_affine else None
    bias = layer.bias.data if layer.use_bias else None
    if layer.dtype != torch.float32 or not _alike(x):
        return None
    return layer_norm.layer_norm(x, weight, bias, layer.variance_epsilon)


def _silu_and_mul(layer: Any, x: Tensor) -> Any:
    return gate.silu_and_mul(x) if _alike(x) else None


def _gelu_and_mul(layer: Any, x: Tensor) -> Any:
    if not _alike(x):
        return None
    return gate.gelu_tanh_and_mul(x) if layer.approximate == "tanh" else gate.gelu_and_mul(x)


def _relu2(layer: Any, x: Tensor) -> Any:
    return functions.relu2(x) if _alike(x) else None


def _rotary(
    layer: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    """SGLang rounds each product; tables have the rows' dtype."""
    others = offsets is not None or fused_set_kv_buffer_arg is not None or hasattr(layer, "sin_cos_cache")
    if others or positions.dim() != 1 or not _alike(query, key):
        return None
    table = layer.cos_sin_cache
    cos, sin = (table if table.dtype == query.dtype else table[positions].to(query.dtype)).chunk(2, dim=-1)
    heads = query.shape[0], -1, layer.head_size
    q, k = rotate.qk_norm_rope(
        *(query.view(heads), key.view(heads)),
        cos=cos,
        sin=sin,
        norm=False,
        positions=positions if table.dtype == query.dtype else None,
        interleaved=not layer.is_neox_style,
        round_products=True,
    )
    return q.view(query.shape), k.view(key.shape)


#: By the layer, in ``sglang.srt.layers``.
LAYERS: dict[str, Forward] = {
    "layernorm.RMSNorm": _rms_norm,
    "layernorm.GemmaRMSNorm": _gemma,
    "layernorm.Gemma3RMSNorm": _gemma3,
    "layernorm.Gemma4RMSNorm": _gemma4,
    "layernorm.RMSNormWithoutScale": _without_weight,
    "layernorm.LayerNorm": _layer_norm,
    "activation.SiluAndMul": _silu_and_mul,
    "activation.GeluAndMul": _gelu_and_mul,
    "activation.ReLU2": _relu2,
    "rotary_embedding.base.RotaryEmbedding": _rotary,
}


def register() -> None:
    """Registers a hook around each layer's ``forward_native``, unless the variable FUSEDNORM_SGLANG is ``off``.

    A layer whose class is not there, or takes other arguments than in the version tested, stays SGLang's, and the log
    says so.
    """
    setting = os.environ.get("FUSEDNORM_SGLANG", "").strip().lower()
    if setting == "off":
        _logger.info("fusednorm %s: FUSEDNORM_SGLANG=off, SGLang keeps its layers", __version__)
        return
    if setting:
        said = "fusednorm %s leaves SGLang as it was: FUSEDNORM_SGLANG is %r, it must be off, or not set"
        _logger.warning(said, __version__, setting)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    taken = []
    for name, ours in LAYERS.items():
        path = f"sglang.srt.layers.{name}.forward_native"
        expected = [*inspect.signature(ours).parameters][1:]
        try:
            found = [*inspect.signature(pkgutil.resolve_name(path)).parameters][1:]
        except (ImportError, AttributeError) as error:
            _logger.warning("fusednorm %s leaves %s as it was: %s", __version__, name, error)
            continue
        if found != expected:
            what = f"it takes {', '.join(found)}; the version tested took {', '.join(expected)}"
            _logger.warning("fusednorm %s leaves %s as it was: %s", __version__, name, what)
            continue
        HookRegistry.register(path, partial(_around, ours), HookType.AROUND)
        taken.append(name.rpartition(".")[2])
    _logger.info("fusednorm %s: computes these layers on CPUs: %s", __version__, ", ".join(taken))


def _around(ours: Forward, theirs: Callable[..., Any], layer: Any, *given: Any, **named: Any) -> Any:
    found = ours(layer, *given, **named)
    return theirs(layer, *given, **named) if found is None else found
