"""``mamba_ssm.ops.triton.layernorm_gated``: everything in float32, rounded once, as its Triton kernels do.

``layer_norm_fn`` and ``rms_norm_fn`` are those of ``mamba_ssm.ops.triton.layer_norm``, with the same roundings.

The bits of the gate are those of fusednorm's exponential (docs/spec.md, section 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import refuse_type
from fusednorm.compat import quack, unrounded
from fusednorm.operations.gate import gate
from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
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
    return _gated_norm(x, weight, bias, z, eps, group_size, norm_before_gate, center=False)


def _gated_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    *,
    center: bool,
) -> Tensor:
    """:func:`rmsnorm_fn`; ``center``: rows, or groups of them, lose their mean first."""
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    wide = accumulator(x.dtype)
    if z is not None and bias is None and not center:
        between = unrounded(x) if norm_before_gate else None
        return rms_norm_gated(
            x, z, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate, between=between
        )
    gate_follows = z is not None and norm_before_gate
    h = x if z is None or norm_before_gate else gate(x, z, out_dtype=wide)
    groups = (-1, x.shape[-1] if group_size is None else group_size)
    rows, of_weight, of_bias = (None if t is None else torch.unflatten(t, -1, groups) for t in (h, weight, bias))
    assert rows is not None
    norm = layer_norm if center else rms_norm
    y = norm(rows, of_weight, eps=eps, bias=of_bias, out_dtype=wide if gate_follows else x.dtype).flatten(-2)
    return gate(y, z, out_dtype=x.dtype) if gate_follows and z is not None else y


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """:func:`rmsnorm_fn`, but without ``is_rms_norm`` of rows, or groups of them, less their means: a LayerNorm."""
    return _gated_norm(x, weight, bias, z, eps, group_size, norm_before_gate, center=not is_rms_norm)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the residual if there is one, and RMS-normalises the unrounded sum: :func:`fusednorm.fused_add_rms_norm`.

    With ``prenorm`` the sum is returned too, in the residual's dtype; without a residual it is x, in float32 if
    ``residual_in_fp32``.

    Raises:
        ValueError: ``dropout_p``, ``return_dropout_mask``, ``rowscale``, or a second x, weight or bias is given.
    """
    more = {"x1": x1, "weight1": weight1, "bias1": bias1, "rowscale": rowscale, "dropout_p": dropout_p}
    residual_dtype = _residual_dtype(x, residual, residual_in_fp32, more, return_dropout_mask)
    return quack.rmsnorm(x, weight, bias, residual, None, residual_dtype, eps, prenorm)


def _residual_dtype(
    x: Tensor, residual: Tensor | None, in_fp32: bool, more: dict[str, Any], return_dropout_mask: bool
) -> torch.dtype | None:
    """The dtype of the sum, where it is not that of the residual or of x; refuses ``more`` arguments that are given."""
    for name, value in {**more, "return_dropout_mask": return_dropout_mask}.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{name} is not supported; leave it out, or call mamba_ssm's own for it")
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    return accumulator(x.dtype) if residual is None and in_fp32 else None


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`rms_norm_fn`, but without ``is_rms_norm`` a LayerNorm: :func:`fusednorm.fused_add_layer_norm`.

    Raises:
        ValueError: as there.
    """
    if is_rms_norm:
        return rms_norm_fn(
            *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32),
            return_dropout_mask,
        )
    more = {"x1": x1, "weight1": weight1, "bias1": bias1, "rowscale": rowscale, "dropout_p": dropout_p}
    dtype = _residual_dtype(x, residual, residual_in_fp32, more, return_dropout_mask)
    if residual is None:
        y, total = layer_norm(x, weight, bias, eps), x if dtype is None else x.to(dtype)
    else:
        y, total = fused_add_layer_norm(x, residual, weight, bias, eps, round_sum=False)
    return (y, total) if prenorm else y


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
