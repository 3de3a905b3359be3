"""Liger Kernel's norms and gates, with gradients: functions, ``apply``, and modules with the same state_dict.

``casting_mode`` chooses the rounding: "llama" (0) rounds before the multiplication by the weight, "gemma" (1) rounds
only the result. "none" (-1) computes even the mean of squares in X's dtype. No flags reproduce that, so it raises
ValueError, as any other does; modules raise it when they are made.

``in_place`` and ``row_mode`` do nothing. In Liger the first overwrites the incoming gradient with the gradient of X,
and the second chooses a kernel. With "llama" Liger rounds the normalised row once more in the gradient of W; here
gradients ignore roundings. ``offset`` is added to W in float32. Gates, ``silu(a)`` and GELU in its tanh form, are
rounded before the multiplication by b, as in Liger's newer releases; they take none of its multipliers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.checks import check_one_row
from fusednorm.operations import gate, norm
from fusednorm.operations.layer_norm import layer_norm

_ROUND_NORM: dict[str | int, bool] = {"llama": True, "gemma": False, 0: True, 1: False}


def _round_norm(casting_mode: str | int) -> bool:
    """Whether a casting mode of Liger rounds the normalised row before it is multiplied by the weight."""
    if casting_mode in _ROUND_NORM:
        return _ROUND_NORM[casting_mode]
    if casting_mode in ("none", -1):
        raise ValueError(
            f"casting_mode {casting_mode!r} takes the mean of squares in X's dtype, which no flags of fusednorm "
            "reproduce; pass 'llama' or 'gemma', which are also more accurate"
        )
    raise ValueError(f"casting_mode must be 'llama' or 'gemma' (0 or 1), got {casting_mode!r}")


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> Tensor:
    """RMS-normalises the last dimension: :func:`fusednorm.rms_norm`; ``round_norm=True`` for "llama"."""
    check_one_row("W", W)
    return norm.rms_norm(X, W, eps, weight_offset=offset, round_norm=_round_norm(casting_mode))


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`liger_rms_norm` of X + R, and the sum, in R's dtype (Liger: X's): :func:`fusednorm.fused_add_rms_norm`."""
    check_one_row("W", W)
    return norm.fused_add_rms_norm(X, R, W, eps, weight_offset=offset, round_norm=_round_norm(casting_mode))


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Layer-normalises the last dimension: :func:`fusednorm.layer_norm`."""
    check_one_row("W", W)
    return layer_norm(X, W, B, eps)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``: :func:`fusednorm.silu_and_mul`."""
    return gate.silu_and_mul(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a, approximate="tanh") * b``: :func:`fusednorm.gelu_tanh_and_mul`."""
    return gate.gelu_tanh_and_mul(a, b)


class LigerLayerNormFunction:
    """Has Liger's ``apply``, but is no ``torch.autograd.Function``: fusednorm has its own."""

    apply = staticmethod(liger_layer_norm)


class LigerSiLUMulFunction:
    """Has Liger's ``apply``, but is no ``torch.autograd.Function``: fusednorm has its own."""

    apply = staticmethod(liger_swiglu)


class LigerGELUMulFunction:
    """Has Liger's ``apply``, but is no ``torch.autograd.Function``: fusednorm has its own."""

    apply = staticmethod(liger_geglu)


class LigerRMSNormFunction:
    """Has Liger's ``apply``, but is no ``torch.autograd.Function``: fusednorm has its own."""

    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        """:func:`liger_rms_norm`."""
        return liger_rms_norm(X, W, eps, offset, casting_mode)


class LigerFusedAddRMSNormFunction:
    """Has Liger's ``apply``, but is no ``torch.autograd.Function``: fusednorm has its own."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:func:`liger_fused_add_rms_norm`."""
        return liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def _weight(hidden_size: int, init_fn: str) -> torch.nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return torch.nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))


class LigerRMSNorm(torch.nn.Module):
    """:func:`liger_rms_norm` with a trainable weight. Gemma: ``offset=1.0, casting_mode="gemma", init_fn="zeros"``.

    ``init_fn``, "ones" or "zeros", names the weight's initial values; with ``elementwise_affine=False`` there is none.
    """

    weight: torch.nn.Parameter | None
    _function = "rms_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        _round_norm(casting_mode)  # raises here, not in the first step
        self.register_parameter("weight", _weight(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalises hidden_states, [..., hidden_size]; the result has their dtype."""
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        """The shape and the arguments that determine the result."""
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        flags = {"eps": self.variance_epsilon, "weight_offset": float(self.offset)}
        return [(self._function, {**flags, "round_norm": _round_norm(self.casting_mode)})]


class LigerFusedAddRMSNorm(torch.nn.Module):
    """:func:`liger_fused_add_rms_norm` with a trainable weight; the arguments are those of :class:`LigerRMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        _round_norm(casting_mode)  # raises here, not in the first step
        self.weight = _weight(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normalised sum, and the sum; all are [..., hidden_size]."""
        eps, offset, casting_mode = self.variance_epsilon, self.offset, self.casting_mode
        return liger_fused_add_rms_norm(hidden_states, residual, self.weight, eps, offset, casting_mode)

    # Liger's module inherits nothing from the other one.
    extra_repr = LigerRMSNorm.extra_repr
    _fusednorm_steps, _function = LigerRMSNorm._fusednorm_steps, "fused_add_rms_norm"
