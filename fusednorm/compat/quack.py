"""quack's norms, with gradients: ``quack.rmsnorm``, and ``QuackRMSNorm`` and ``layernorm_fwd`` of ``quack.rmsnorm``.

quack normalises the sum as it was before it is rounded for the caller: ``round_sum=False``. Its rstd
comes from ``rsqrt.approx``, whose bits no other device has: fusednorm has the bits of its own specification.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.operations import norm
from fusednorm.operations.layer_norm import layer_norm

__all__ = ["QuackRMSNorm", "layernorm_fwd", "rmsnorm"]


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    weight_offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS-normalises x, or the sum of x and the residual: :func:`fusednorm.fused_add_rms_norm`.

    A weight or a bias of [H, N] has a row for each head of x, [..., H, N]. With ``prenorm`` the sum is returned too, in
    ``residual_dtype`` or else the residual's dtype, or x where there is no residual.
    """
    flags: dict[str, Any] = {"bias": bias, "weight_offset": weight_offset, "out_dtype": out_dtype}
    if residual is None:
        y, total = norm.rms_norm(x, weight, eps, **flags), x
        if prenorm and residual_dtype is not None:
            total = x.to(residual_dtype)
    else:
        flags |= {"round_sum": False, "residual_dtype": residual_dtype}
        y, total = norm.fused_add_rms_norm(x, residual, weight, eps, **flags)
    return (y, total) if prenorm else y


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    return_rstd: bool = False,
    return_mean: bool = False,
) -> Tensor:
    """Layer-normalises x: :func:`fusednorm.layer_norm`.

    Raises:
        ValueError: ``return_rstd`` or ``return_mean``, which fusednorm's functions do not return.
    """
    if return_rstd or return_mean:
        raise ValueError(
            "return_rstd and return_mean must be False: fusednorm keeps them for its gradients; compute them by "
            "torch.var_mean(x, -1, correction=0)"
        )
    return layer_norm(x, weight, bias, eps)


class QuackRMSNorm(torch.nn.RMSNorm):
    """quack's module: ``torch.nn.RMSNorm`` with :func:`rmsnorm`, and with 1e-6 as the default of ``eps``."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, eps, elementwise_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] in x's dtype."""
        return norm.rms_norm(x, self.weight, cast(float, self.eps))

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("rms_norm", {"eps": self.eps})]
