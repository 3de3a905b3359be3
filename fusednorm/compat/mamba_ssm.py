"""``mamba_ssm.ops.triton.layernorm_gated``: everything in float32, rounded once, as its Triton kernels do.

The bits of the gate are those of fusednorm's exponential (docs/spec.md, section 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import refuse_type
from fusednorm.compat import unrounded
from fusednorm.operations.gate import gate
from fusednorm.operations.norm import rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """RMS-normalises rows, or groups of them, and gates: :func:`fusednorm.rms_norm_gated` without a rounding between.

    That is ``norm(x) * silu(z)``, or, without ``norm_before_gate``, ``norm(x * silu(z))``; without z the norm alone.
    ``group_size`` elements are normalised together, or the whole row; the bias, [N], is added after the weight.
    """
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    wide = accumulator(x.dtype)
    if z is not None and bias is None:
        between = unrounded(x) if norm_before_gate else None
        return rms_norm_gated(
            x, z, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate, between=between
        )
    gate_follows = z is not None and norm_before_gate
    h = x if z is None or norm_before_gate else gate(x, z, out_dtype=wide)
    groups = (-1, x.shape[-1] if group_size is None else group_size)
    rows, of_weight, of_bias = (None if t is None else torch.unflatten(t, -1, groups) for t in (h, weight, bias))
    assert rows is not None
    y = rms_norm(rows, of_weight, eps, bias=of_bias, out_dtype=wide if gate_follows else x.dtype).flatten(-2)
    return gate(y, z, out_dtype=x.dtype) if gate_follows and z is not None else y


class RMSNorm(torch.nn.Module):
    """:func:`rmsnorm_fn` with a trainable weight. mamba_ssm's models import it as ``RMSNormGated``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """:func:`rmsnorm_fn` of x, [..., hidden_size], and the gate z."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        between = accumulator(of_rows) if self.norm_before_gate else None
        flags = {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate, "between": between}
        return [("rms_norm_gated", {"eps": self.eps, **flags})]
