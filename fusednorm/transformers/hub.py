"""Layers for transformers' own mechanism for other kernels, the mapping of the ``kernels`` package.

``kernels`` takes their forward passes only, so that ``self`` is the module of the model. Each layer recognises by a
trace what that module computes, at its first call, and runs the module's own code where that is something else.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.operations import gate as gates
from fusednorm.operations.norm import rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated
from fusednorm.transformers.mlps import DTYPES, MLP, activation_of, mlp
from fusednorm.transformers.norms import Forms, Taken, forms, taken
from fusednorm.transformers.reads import LeftAloneError, Reads
from fusednorm.transformers.replacing import constant
from fusednorm.transformers.rotations import Halves, Pairs, Rotation, Tables, rotations


class _Layer(torch.nn.Module):
    """A forward pass that replaces a module's own. It has no state, as ``kernels`` requires."""

    can_torch_compile = True


class RMSNorm(_Layer):
    """The forward pass that replaces a norm's own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises hidden_states, [..., N], as the module's class does, or calls that class."""
        norm = _norm(self, hidden_states, forms)
        if norm is None:
            return type(self).forward(self, hidden_states)
        form, weight, _ = norm
        return rms_norm(hidden_states, weight, form.eps, **form.of_norm)


class RMSNormGated(_Layer):
    """The forward pass that replaces that of a norm with a gate after it."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalises hidden_states and gates them, both [..., N], as the module's class does, or calls that class."""
        norm = None
        if gate is not None and gate.dtype == hidden_states.dtype and gate.shape == hidden_states.shape:
            norm = _norm(self, hidden_states, _gated_forms)
        if norm is None or gate is None:
            return type(self).forward(self, hidden_states, gate)
        form, weight, _ = norm
        return rms_norm_gated(hidden_states, gate, weight, form.eps, **form.of_gate)


@constant
def _trace(module: torch.nn.Module, trace: Callable[[torch.nn.Module, Reads], Any]) -> None:
    """Traces a module at its first call."""
    if "_fusednorm_traced" not in module.__dict__:
        reads, found = Reads(), None
        with suppress(LeftAloneError):
            found = trace(module, reads)
        module.__dict__["_fusednorm_traced"] = reads, found


def _found(module: torch.nn.Module, trace: Callable[[torch.nn.Module, Reads], Any]) -> Any:
    """The finding of a module's trace; None if there is none, or if what it read of the module has changed since."""
    _trace(module, trace)
    reads, found = module.__dict__["_fusednorm_traced"]
    return found if reads.hold(module) else None


def _gated_forms(module: torch.nn.Module, reads: Reads) -> Forms:
    return forms(module, reads, gated=True)


def _norm(module: torch.nn.Module, x: Tensor, trace: Callable[[torch.nn.Module, Reads], Forms]) -> Taken | None:
    """A module's form for x, and its weight."""
    _trace(module, trace)
    reads, found = module.__dict__["_fusednorm_traced"]
    norm = None if found is None else taken(found, reads, x, module)
    return None if norm is None or norm[0].center else norm


class SiLU(_Layer):
    """The forward pass that replaces that of an activation, silu or GELU in its tanh form."""

    def forward(self, input: Tensor) -> Tensor:
        """The function of each element of the input, in its dtype, or the class's own code."""
        activation: str | None = _found(self, activation_of)
        if activation is None or input.dtype not in DTYPES or input.dim() == 0:
            return type(self).forward(self, input)
        ones = input.new_ones(input.shape[-1])  # one row for all, by which nothing changes
        return gates.gate(ones.expand_as(input), input, activation=activation)


class GeluTanh(SiLU):
    """The same under another name: a trace shows which function it is."""


def _mlp(module: torch.nn.Module, reads: Reads) -> MLP:
    """The formula of an MLP, if it is one that a layer here has."""
    found = mlp(module, reads)
    if found.flags or found.act is None or found.activation not in _MLPS:
        raise LeftAloneError("no layer has this gate")
    return found


class SwiGLUMLP(_Layer):
    """The forward pass that replaces that of a gated MLP, with silu or GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        """Between the MLP's own submodules, the activation and the product in one call."""
        found, modules = _found(self, _mlp), cast("dict[str, Any]", self._modules)
        act = None if found is None else modules[found.act]
        if act is None or not _follows_its_class(act) or _found(act, activation_of) != found.activation:
            return type(self).forward(self, x)
        gate, down = modules[found.gate], modules[found.down]
        z = gate(x)
        y = None if found.up is None else modules[found.up](x)
        if z.dtype not in DTYPES or (y is not None and (y.dtype, y.shape) != (z.dtype, z.shape)):
            z, y = z.chunk(2, -1) if y is None else (z, y)
            return cast(Tensor, down(act(z) * y))
        product = gates.silu_and_mul if found.activation == "silu" else gates.gelu_tanh_and_mul
        return cast(Tensor, down(product(z, y)))


class GeGLUMLP(SwiGLUMLP):
    """The same under another name: a trace shows which function it is."""


class RotaryPosEmb(_Layer):
    """The forward pass that replaces a function that rotates q and k."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Rotates heads of q and k, of four dimensions, by tables of [batch, tokens, columns], or calls the function.

        The columns of the tables must repeat as the function takes them. That is looked at once for each table, so that
        the layers of a model share the look.
        """
        operands = (q, k, cos, sin)
        found = None if torch.compiler.is_compiling() else _rotation(self, unsqueeze_dim, *operands)
        if found is None:
            return type(self).forward(self, *operands, unsqueeze_dim)
        rotation, (cos, sin) = found
        if rotation.heads == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        both: tuple[Tensor, Tensor] = rotation.of(q, k, cos, sin)
        return both


@constant
def _follows_its_class(module: torch.nn.Module) -> bool:
    """Whether a call of an activation is its class's forward pass, or that of a layer here, and nothing else."""
    attached = module.__dict__.get("forward")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (attached is None or getattr(attached, "__func__", None) is SiLU.forward) and not any(hooks)


def _rotation(
    function: torch.nn.Module, unsqueeze_dim: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Rotation, tuple[Tensor, Tensor]] | None:
    """The rotation of such operands, from a trace at the function's first call, and the angles of the tables.

    None where the function has to do it itself.
    """
    operands = (q, k, cos, sin)
    if not must_be_seen.plain(*operands) or must_be_seen.transform(*operands):
        return None
    of_dimension = function.__dict__.setdefault("_fusednorm_rotations", {})
    if unsqueeze_dim not in of_dimension:
        try:
            traced = rotations(partial(type(function).forward, function), {"unsqueeze_dim": unsqueeze_dim})
        except LeftAloneError:
            traced = {}
        of_dimension[unsqueeze_dim] = traced
    if q.dim() != 4 or cos.dim() != 3 or (cos.shape, cos.dtype) != (sin.shape, sin.dtype):
        return None
    if k.dim() != 4 or (q.dtype, q.shape[0], q.shape[3]) != (k.dtype, k.shape[0], k.shape[3]):
        return None
    if cos.requires_grad or sin.requires_grad or cos.shape[0] not in (1, q.shape[0]):
        return None
    for kind in (Tables, Halves, Pairs):
        size = cos.shape[2] * (2 if kind is Tables else 1)
        rotation = of_dimension[unsqueeze_dim].get((q.dtype, cos.dtype, kind.columns, q.shape[3] == size, 4))
        if rotation is None or rotation.to_halves or q.shape[3] < size:
            continue
        tokens = 2 if rotation.heads == 1 else 1
        if q.shape[tokens] == k.shape[tokens] == cos.shape[1] and _repeat(function, kind, cos, sin):
            return rotation, (kind.to_angles(cos), kind.to_angles(sin))
    return None


def _repeat(function: torch.nn.Module, kind: type[Tables], cos: Tensor, sin: Tensor) -> bool:
    """Whether the columns of both tables repeat so. The last two that did are not looked at again before a write."""
    last = function.__dict__.get("_fusednorm_tables", (lambda: None, lambda: None))
    counted = not (cos.is_inference() or sin.is_inference())  # others count no writes
    same = counted and last[0]() is cos and last[1]() is sin
    if same and last[2:] == (kind, cos._version, sin._version):
        return True
    found = kind.repeat(cos) and kind.repeat(sin)
    if counted and found:  # without the tensors, whose memory this would keep
        kept = weakref.ref(cos), weakref.ref(sin), kind, cos._version, sin._version
        function.__dict__["_fusednorm_tables"] = kept
    return found


class _Repository:
    """The object from which ``kernels`` loads a layer."""

    def __init__(self, layer: type[torch.nn.Module]) -> None:
        self.layer, self.layer_name = layer, layer.__name__

    def load(self) -> type[torch.nn.Module]:
        return self.layer


#: transformers' names of layers and functions, their forward passes, and the kinds of devices on which these replace
#: others.
_LAYERS: dict[str, tuple[type[torch.nn.Module], tuple[str, ...]]] = {
    "RMSNorm": (RMSNorm, ("cpu", "cuda")),
    "RMSNormZeroCentered": (RMSNorm, ("cpu",)),
    "RMSNormGated": (RMSNormGated, ("cpu",)),
    "SiLU": (SiLU, ("cpu",)),
    "GeluTanh": (GeluTanh, ("cpu",)),
    "SwiGLUMLP": (SwiGLUMLP, ("cpu",)),
    "GeGLUMLP": (GeGLUMLP, ("cpu",)),
    "rotary_pos_emb": (RotaryPosEmb, ("cpu",)),
}

#: transformers' names of gated MLPs, by the activation.
_MLPS = {"silu": "SwiGLUMLP", "gelu_tanh": "GeGLUMLP"}


def register_kernels(model: torch.nn.Module | None = None) -> None:
    """Makes fusednorm the kernel of layers of transformers.

    Those are norms on CPUs and NVIDIA's GPUs, and on CPUs norms with a gate, activations, gated MLPs and the rotation
    of q and k. Afterwards ``model.set_use_kernels(True)`` and ``from_pretrained(..., use_kernels=True)`` use it, with
    the rounding of each model's own layers. Call it before the first model uses kernels.

    Args:
        model: a model whose gated MLPs get the names of such layers, which transformers gives to none. It names their
            classes, so that it holds for all models of these classes whose parameters are on a CPU.

    Raises:
        ImportError: transformers is not installed, or not with a version of ``kernels`` that it can use.
    """
    try:
        from transformers.integrations import hub_kernels
    except ModuleNotFoundError as error:
        raise ImportError(f"register_kernels needs transformers ({error}): pip install transformers kernels") from error
    if not hub_kernels.is_kernels_available():
        raise ImportError(
            "transformers finds no version of the `kernels` package that it can use; "
            "`pip install transformers[kernels]` installs one"
        )
    from kernels import Mode, replace_kernel_forward_from_hub

    mapping: dict[str, dict[str, Any]] = hub_kernels.get_kernel_mapping_transformers()
    for name, (layer, devices) in _LAYERS.items():
        modes = dict.fromkeys((Mode.INFERENCE, Mode.TRAINING), _Repository(layer))
        mapping.setdefault(name, {}).update(dict.fromkeys(devices, modes))
    for module in () if model is None else model.modules():
        kind = type(module)
        if (
            len(module._modules) > 1
            and not hasattr(kind, "kernel_layer_name")
            and (found := _found(module, _mlp)) is not None
        ):
            replace_kernel_forward_from_hub(kind, _MLPS[found.activation], _on_cpu)


def _on_cpu(module: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def write_kernel(folder: str | Path) -> Path:
    """Writes the layers as a kernel in the layout of Hugging Face's hub, which ``kernels`` loads from a local folder.

    The folder then has ``build/torch-universal`` with the kernel's description, and code that takes the layers from the
    installed fusednorm. ``kernels.LocalLayerRepository(folder, layer_name="RMSNorm")`` loads one of them: ``RMSNorm``,
    ``RMSNormGated``, ``SiLU``, ``GeluTanh``, ``SwiGLUMLP``, ``GeGLUMLP`` and ``RotaryPosEmb``.

    Args:
        folder: where to write; it is made if it does not exist.

    Returns:
        The folder.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(folder)
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True, exist_ok=True)
    (variant / "metadata.json").write_text(json.dumps(_METADATA, indent=2) + "\n", encoding="utf-8")
    (variant / "__init__.py").write_text(_CODE, encoding="utf-8")
    return folder


#: The facts of a kernel that ``kernels`` must know. There is one version of the folder's content.
_METADATA = {
    "name": "fusednorm",
    "id": "fusednorm_universal_1",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}

_CODE = '''"""The layers of the installed fusednorm."""

from fusednorm.transformers import hub as layers

__all__ = ["layers"]
'''
