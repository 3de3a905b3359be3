"""The gated norms of Hugging Face's transformers: modules with their arguments, state_dict and roundings.

The exponential is fusednorm's (docs/spec.md, section 10). Models of the same blocks have copies of these modules under
other names: ``Qwen3_5RMSNormGated`` is ``Qwen3NextRMSNormGated``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.operations.norm import rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated


class Qwen3NextRMSNormGated(torch.nn.Module):
    """A norm whose rows are rounded before and after the weight, and then gated. ``kwargs`` are ignored, as there."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalises hidden_states, [..., hidden_size], and multiplies them by ``silu(gate)``; of their dtype."""
        product = torch.promote_types(hidden_states.dtype, self.weight.dtype)  # which torch rounds the product to
        return rms_norm_gated(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            round_norm=True,
            between=None if product == hidden_states.dtype else torch.float32,
        )

    def extra_repr(self) -> str:
        """The length of a row, and the eps."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("rms_norm_gated", {"eps": self.variance_epsilon, "round_norm": True})]


class Zamba2RMSNormGated(torch.nn.Module):
    """A gate, and then a norm of groups whose rows are rounded before the weight."""

    def __init__(self, hidden_size: int, group_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.group_size = eps, group_size

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalises ``hidden_states * silu(gate)``, or without a gate hidden_states, [..., hidden_size].

        The result has the wider of the dtypes of hidden_states and the weight.
        """
        x, weight, eps = hidden_states, self.weight, self.variance_epsilon
        if gate is None:
            return weight * rms_norm(torch.unflatten(x, -1, (-1, self.group_size)), None, eps).flatten(-2)
        flags: dict[str, Any] = {"group_size": self.group_size, "norm_before_gate": False}
        if torch.promote_types(x.dtype, weight.dtype) != x.dtype:
            return weight * rms_norm_gated(x, gate, None, eps, **flags)
        return rms_norm_gated(x, gate, weight, eps, round_norm=True, **flags)

    def extra_repr(self) -> str:
        """The length of a row and of a group, and the eps."""
        return f"{self.weight.shape[0]}, group_size={self.group_size}, eps={self.variance_epsilon}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        flags = {"group_size": self.group_size, "norm_before_gate": False, "round_norm": True}
        return [("rms_norm_gated", {"eps": self.variance_epsilon, **flags})]


class MambaRMSNormGated(Zamba2RMSNormGated):
    """A gate, and then a norm whose rows are rounded before the weight, as Mamba 2 has it."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, hidden_size, eps)
