"""A layer for transformers' own mechanism for other kernels, the mapping of the ``kernels`` package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _form(module: torch.nn.Module, x_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Form | None:
    """A module's form, from a trace at its first call."""
    found = module.__dict__.get("_fusednorm_forms")
    if found is None:
        try:
            found = forms(module)
        except NotANormError:
            found = {}
        module.__dict__["_fusednorm_forms"] = found
    form: Form | None = found.get((x_dtype, weight_dtype))
    return form


class _Repository:
    """The object from which ``kernels`` loads a layer."""

    layer_name = "RMSNorm"

    def load(self) -> type[torch.nn.Module]:
        return RMSNorm


def register_kernels() -> None:
    """Makes fusednorm the kernel of transformers' ``RMSNorm`` layers on CPUs and NVIDIA's GPUs.

    Afterwards ``model.set_use_kernels(True)`` and ``from_pretrained(..., use_kernels=True)`` use it, with the rounding
    of each model's own norms. Call it before the first model uses kernels.

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

    repository = _Repository()
    modes = dict.fromkeys((Mode.INFERENCE, Mode.TRAINING), repository)
    mapping: dict[str, dict[str, Any]] = hub_kernels.get_kernel_mapping_transformers()
    mapping.setdefault("RMSNorm", {}).update({"cpu": modes, "cuda": modes})
