"""Modules over the functions, with a weight to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils.hooks import RemovableHandle

from fusednorm.ops import fused_add_rms_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with fusednorm's bits: same arguments, same state_dict.

    Args:
        normalized_shape: N, or the last dimensions of the input, over which it is normalised together.
        eps: added to the mean of squares; None means the machine epsilon of the accumulator type, as torch takes it on
            a CPU: 2^-23, or 2^-52 for a float64 input.
        elementwise_affine: whether there is a weight, of ones at first.
        device: of the weight.
        dtype: of the weight.
        weight_offset: added to the weight; 1.0 gives Gemma's ``1 + weight`` (whose weight begins at zeros).
        round_norm: round the normalised row to the input's dtype before it meets the weight, as Hugging Face's Llama.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_norm: bool = False,
    ) -> None:
        self.weight_offset, self.round_norm = float(weight_offset), round_norm
        shape = normalized_shape if isinstance(normalized_shape, int) else tuple(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to what multiplies by one."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x, [..., *normalized_shape], into its own dtype."""
        single = len(self.normalized_shape) == 1
        rows, weight = (x, self.weight) if single else self._rows(x)
        y = rms_norm(rows, weight, self._eps(x), weight_offset=self.weight_offset, round_norm=self.round_norm)
        return y if single else y.view(x.shape)

    def extra_repr(self) -> str:
        """What torch.nn.RMSNorm shows, and what differs from it."""
        added = [f"weight_offset={self.weight_offset}"] if self.weight_offset else []
        added += ["round_norm=True"] if self.round_norm else []
        return ", ".join([super().extra_repr(), *added])

    def _eps(self, x: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x and the weight with the normalised dimensions in one."""
        shape = tuple(self.normalized_shape)
        if tuple(x.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"x must end in the dimensions {list(shape)}, the module's normalized_shape; got {list(x.shape)}"
            )
        weight = None if self.weight is None else self.weight.view(-1)
        return x.reshape(*x.shape[: -len(shape)], math.prod(shape)), weight


class AddRMSNorm(RMSNorm):
    """Adds the residual, then normalises: ``y, residual = norm(x, residual)``.

    The residual stream stays in its own dtype. The arguments are :class:`RMSNorm`'s, and:

    Args:
        round_sum: normalise the sum as rounded to the residual's dtype, rather than as it was before.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_sum: bool = True,
        round_norm: bool = False,
    ) -> None:
        self.round_sum = round_sum
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device=device,
            dtype=dtype,
            weight_offset=weight_offset,
            round_norm=round_norm,
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The normalised sum, and the sum; of x alone where the stream begins (residual None).

        Args:
            x: [..., *normalized_shape].
            residual: x's shape, or None.
        """
        if residual is None:
            return super().forward(x), x
        single = len(self.normalized_shape) == 1
        rows, weight = (x, self.weight) if single else self._rows(x)
        y, total = fused_add_rms_norm(
            rows,
            residual if single else self._rows(residual)[0],
            weight,
            self._eps(x),
            weight_offset=self.weight_offset,
            round_sum=self.round_sum,
            round_norm=self.round_norm,
        )
        return (y, total) if single else (y.view(x.shape), total.view(x.shape))

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
        """torch's, but a hook that returns fewer inputs than it was given raises: the sum would silently be x alone.

        ``torch.distributed.tensor.parallel.SequenceParallel`` registers such a hook.
        """
        if not options.get("with_kwargs"):
            hook = partial(_with_every_input, hook)
        return super().register_forward_pre_hook(hook, **options)

    def extra_repr(self) -> str:
        """As RMSNorm's."""
        return super().extra_repr() + ("" if self.round_sum else ", round_sum=False")


def _with_every_input(hook: Callable[..., Any], module: AddRMSNorm, inputs: tuple[Any, ...]) -> Any:
    result = hook(module, inputs)
    kept = len(inputs) if result is None else len(result) if isinstance(result, tuple) else 1
    if kept < len(inputs):
        raise RuntimeError(
            f"a forward pre-hook of AddRMSNorm was given {len(inputs)} inputs and returned {kept}, so the residual is "
            "lost; torch's SequenceParallel is such a hook: use fusednorm.distributed.SequenceParallel instead"
        )
    return result
