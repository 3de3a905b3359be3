"""Layers for transformers' own mechanism for other kernels, the mapping of the ``kernels`` package.

``kernels`` takes their forward passes only, so that ``self`` is the module of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.norm_gated import rms_norm_gated
from fusednorm.ops import rms_norm
from fusednorm.transformers.norms import Form, NotANormError, forms


class RMSNorm(torch.nn.Module):
    """The forward pass that replaces a norm's own. It has no state, as ``kernels`` requires."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises hidden_states, [..., N], as the module's class does, or calls that class."""
        weight = getattr(self, "weight", None)
        form = _form(self, hidden_states.dtype, None if weight is None else weight.dtype)
        if form is None:
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, weight, form.eps, weight_offset=form.weight_offset, round_norm=form.round_norm)


class RMSNormGated(torch.nn.Module):
    """The forward pass that replaces that of a norm with a gate after it."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalises hidden_states and gates them, both [..., N], as the module's class does, or calls that class."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        fits = gate is not None and gate.dtype == hidden_states.dtype and gate.shape == hidden_states.shape
        form = _form(self, hidden_states.dtype, weight.dtype, gated=True) if fits else None
        if form is None or gate is None or not form.takes(gate):
            return type(self).forward(self, hidden_states, gate)
        return rms_norm_gated(hidden_states, gate, weight, form.eps, **form.of_gate)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _form(
    module: torch.nn.Module, x_dtype: torch.dtype, weight_dtype: torch.dtype | None, gated: bool = False
) -> Form | None:
    """A module's form, from a trace at its first call."""
    found = module.__dict__.get("_fusednorm_forms")
    if found is None:
        try:
            found = forms(module, gated)
        except NotANormError:
            found = {}
        module.__dict__["_fusednorm_forms"] = found
    form: Form | None = found.get((x_dtype, weight_dtype))
    return form


class _Repository:
    """The object from which ``kernels`` loads a layer."""

    def __init__(self, layer: type[torch.nn.Module]) -> None:
        self.layer, self.layer_name = layer, layer.__name__

    def load(self) -> type[torch.nn.Module]:
        return self.layer


#: transformers' names of layers, their forward passes, and the kinds of devices on which these replace others.
_LAYERS: dict[str, tuple[type[torch.nn.Module], tuple[str, ...]]] = {
    "RMSNorm": (RMSNorm, ("cpu", "cuda")),
    "RMSNormGated": (RMSNormGated, ("cpu",)),
}


def register_kernels() -> None:
    """Makes fusednorm the kernel of layers of transformers.

    Those are ``RMSNorm`` on CPUs and NVIDIA's GPUs, and ``RMSNormGated`` on CPUs. Afterwards
    ``model.set_use_kernels(True)`` and ``from_pretrained(..., use_kernels=True)`` use it, with the rounding of each
    model's own layers. Call it before the first model uses kernels.

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
    from kernels import Mode

    mapping: dict[str, dict[str, Any]] = hub_kernels.get_kernel_mapping_transformers()
    for name, (layer, devices) in _LAYERS.items():
        modes = dict.fromkeys((Mode.INFERENCE, Mode.TRAINING), _Repository(layer))
        mapping.setdefault(name, {}).update(dict.fromkeys(devices, modes))
