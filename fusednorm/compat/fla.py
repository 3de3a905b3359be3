"""``fla.modules.fused_norm_gate``, and ``swiglu``: everything in float32, rounded once, as its Triton kernels do.

They multiply the row by the gate g, and then by its sigmoid, where fusednorm multiplies it by ``silu(g)``: the last
bit of float32 may differ. The exponential is fusednorm's (docs/spec.md, section 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import refuse_type
from fusednorm.compat import unrounded
from fusednorm.operations.gate import gate, silu_and_mul
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated as norm_gated

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def _activation(name: str) -> str:
    """The name that fusednorm has for an activation of FLA, or ValueError."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid', got {name!r}")
    return _ACTIVATIONS[name]


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) * y`` of ``fla.modules.activations``: :func:`fusednorm.silu_and_mul` with ``between=torch.float32``."""
    return silu_and_mul(x, y, between=unrounded(x))


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the residual if there is one, RMS-normalises the unrounded sum, and gates: :func:`fusednorm.rms_norm_gated`.

    The activation of the gate g is "sigmoid", or "swish", also called "silu"; the bias, [N], is added after the weight.
    With ``prenorm`` the sum is returned too, in the residual's dtype; without a residual it is x, in float32 if
    ``residual_in_fp32``.

    Raises:
        ValueError: another activation.
    """
    function = _activation(activation)
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    wide, total = accumulator(x.dtype), x
    if residual is None and bias is None:
        y = norm_gated(x, g, weight, eps, activation=function, between=unrounded(x))
    else:
        if residual is None:
            y = rms_norm(x, weight, eps, bias=bias, out_dtype=wide)
        else:
            y, total = fused_add_rms_norm(x, residual, weight, eps, bias=bias, round_sum=False, out_dtype=wide)
        y = gate(y, g, activation=function, out_dtype=x.dtype)
    if not prenorm:
        return y
    return y, total.to(wide) if residual is None and residual_in_fp32 else total


class FusedRMSNormGated(torch.nn.Module):
    """:func:`rms_norm_gated` of rows of ``hidden_size`` elements, with a trainable weight if ``elementwise_affine``."""

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _activation(activation)  # raises here, not in the first step
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`rms_norm_gated` of x and the gate g."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)

    def extra_repr(self) -> str:
        """The arguments that determine the result."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}, activation={self.activation}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        flags = {"eps": self.eps, "activation": _activation(self.activation), "between": accumulator(of_rows)}
        return [("rms_norm_gated", flags)]
