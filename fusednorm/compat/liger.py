"""Liger Kernel's RMS norms, with their gradients: functions, ``apply``, and modules with the same state_dict.

``casting_mode`` chooses the rounding: "llama" (0) rounds before the multiplication by the weight, "gemma" (1) rounds
only the result. "none" (-1) computes even the mean of squares in X's dtype. No flags reproduce that, so it raises.

``in_place`` and ``row_mode`` do nothing. In Liger the first overwrites the incoming gradient with the gradient of X,
and the second chooses a kernel. With "llama" Liger rounds the normalised row once more in the gradient of W; here
gradients ignore roundings. ``offset`` is added to W in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.checks import check_one_row
from fusednorm.operations import norm

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
    """RMS-normalises the last dimension: :func:`fusednorm.rms_norm`.

    Args:
        X: [..., N].
        W: [N], or None.
        eps: added to the mean of squares.
        offset: added to W.
        casting_mode: "llama" or 0: ``round_norm=True``; "gemma" or 1: ``round_norm=False``.
        in_place: does nothing.

    Returns:
        A new tensor of X's shape and dtype, with a gradient.

    Raises:
        ValueError: another casting mode.
    """
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
    """Adds the residual R, [..., N], then RMS-normalises: :func:`fusednorm.fused_add_rms_norm`.

    The other arguments are those of :func:`liger_rms_norm`.

    Returns:
        The normalised rows, in X's dtype, and the sum, in R's dtype (Liger: X's), both with gradients.
    """
    check_one_row("W", W)
    return norm.fused_add_rms_norm(X, R, W, eps, weight_offset=offset, round_norm=_round_norm(casting_mode))


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
        """:func:`liger_rms_norm`; ``row_mode`` does nothing."""
        return liger_rms_norm(X, W, eps, offset, casting_mode, in_place)


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
        return liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode, in_place)


def _weight(hidden_size: int, init_fn: str) -> torch.nn.Parameter:
    """The initial weight.

    Raises:
        ValueError: ``init_fn`` is neither "ones" nor "zeros".
    """
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be 'ones' or 'zeros', got {init_fn!r}")
    return torch.nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))


class LigerRMSNorm(torch.nn.Module):
    """:func:`liger_rms_norm` with a trainable weight. Gemma: ``offset=1.0, casting_mode="gemma", init_fn="zeros"``.

    Args:
        hidden_size: the length of a row, N.
        eps: added to the mean of squares.
        offset: added to the weight.
        casting_mode: "llama" or "gemma".
        init_fn: "ones" or "zeros", the weight's initial values.
        in_place: does nothing.
        row_mode: does nothing.
        elementwise_affine: whether there is a weight.

    Raises:
        ValueError: another casting mode or ``init_fn``.
    """

    weight: torch.nn.Parameter | None

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
        return liger_rms_norm(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        """The shape and the arguments that determine the result."""
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("rms_norm", _flags(self))]


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
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )

    def extra_repr(self) -> str:
        """The shape and the arguments that determine the result."""
        shape = tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("fused_add_rms_norm", _flags(self))]


def _flags(module: LigerRMSNorm | LigerFusedAddRMSNorm) -> dict[str, Any]:
    flags = {"eps": module.variance_epsilon, "weight_offset": float(module.offset)}
    return {**flags, "round_norm": _round_norm(module.casting_mode)}
