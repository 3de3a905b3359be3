"""A linear layer of int8, whose rows are quantized in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusednorm.calls.call import NARROW_FLOATS
from fusednorm.operations.int8_linear import int8_linear
from fusednorm.operations.modules import check_linear
from fusednorm.operations.quantize import quantize
from fusednorm.quantizations import VLLM_INT8_TOKEN_CPU

#: Of rows: one scale for each, without a zero point.
QUANTIZATION = VLLM_INT8_TOKEN_CPU

#: So many numbers of a weight are rounded at once.
_AT_ONCE = 2**20


class Int8Linear(torch.nn.Module):
    """A linear layer whose weight is int8, with one scale for each of its rows, and whose input is rounded to int8 too.

    A call is ``int8_linear(*quantize(x, quantization=VLLM_INT8_TOKEN_CPU), weight, weight_scale, bias)``. There are no
    gradients. :meth:`from_linear` makes one of a linear layer; ``weight_scale``, [N, 1], stays float32 where the module
    is converted to another dtype.

    Args:
        in_features: K, the length of rows, at most 131,071.
        out_features: N, the length of rows of the result.
        bias: whether there is a bias.
        device: of all tensors.
        dtype: of the bias.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, 1, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear) -> Int8Linear:
        """A module with another one's weight, rounded to int8, and a copy of its bias.

        The scale of a row is a 127th of its greatest magnitude, rounded up to a number of the weight's dtype, so that a
        checkpoint in this dtype keeps it.

        Args:
            module: a ``torch.nn.Linear``, or of a subclass with its forward pass.

        Raises:
            TypeError: it is no such module, or its weight is float64.
            ValueError: its weight has no shape yet, or a number of it is not finite.
        """
        check_linear(module)
        if is_lazy(module.weight):
            raise ValueError("module must have a weight with a shape; run a LazyLinear once")
        numbers, scales = round_weight(module.weight.detach())
        bias = None if module.bias is None else module.bias.detach().clone()
        return cls.from_int8(numbers, scales, bias).train(module.training)

    @classmethod
    def from_int8(cls, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """A module with a weight of int8 and its scales, which it keeps.

        Args:
            weight: [N, K], int8.
            weight_scale: [N] or [N, 1], float32.
            bias: [N], float16, bfloat16 or float32.

        Raises:
            TypeError: a tensor has another dtype.
            ValueError: shapes do not fit.
        """
        no_rows = weight.new_zeros(0, weight.shape[-1])
        int8_linear(no_rows, torch.ones(0, 1, device=weight.device), weight, weight_scale, bias)  # raises the errors
        made = cls(weight.shape[1], weight.shape[0], False, "meta")
        made.weight, made.weight_scale, made.bias = weight, weight_scale.reshape(-1, 1), bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        """The product of x, ``[..., K]``, rounded to int8, and the weight: ``[..., N]``, in x's dtype.

        Raises:
            RuntimeError: x requires grad, while gradients are recorded.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Int8Linear has no gradients, and x requires grad; call it in torch.no_grad(), or train the model "
                "before it is quantized"
            )
        q, scale = quantize(x, quantization=QUANTIZATION)
        return int8_linear(q, scale, self.weight, self.weight_scale, self.bias, out_dtype=x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Moves and converts all tensors but for the dtype of the scales."""
        before = self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight_scale.dtype is not torch.float32:
            self.weight_scale = before.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        """The arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("quantize", {"quantization": QUANTIZATION}), ("int8_linear", {})]


Int8Linear.__module__ = "fusednorm"  # where users find it: saved models have this name


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers of a weight, [N, K], and their scales, [N, 1], as :meth:`Int8Linear.from_linear` says.

    Each of torch's operations here is exact, or IEEE's, so the numbers are the same everywhere.
    """
    if weight.dtype not in NARROW_FLOATS or not weight.shape[1]:
        raise TypeError(
            f"module must have a weight of float16, bfloat16 or float32 with columns, got {str(weight.dtype)[6:]} of "
            f"{list(weight.shape)}; convert it, for instance module.float()"
        )
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    at_once = max(_AT_ONCE // weight.shape[1], 1)
    for rows, its_numbers, scale in zip(*(torch.split(one, at_once) for one in (weight, numbers, scales)), strict=True):
        greatest = rows.abs().amax(-1, keepdim=True).to(torch.float32)
        if not greatest.isfinite().all():
            raise ValueError("module must have a weight of finite numbers, which int8 can hold; got infinity or NaN")
        exact = greatest / 127
        near = exact.to(rows.dtype)
        up = torch.where(near.to(torch.float32) < exact, near.nextafter(near.new_full((), torch.inf)), near)
        scale.copy_(torch.where(up > 0, up.to(torch.float32), 1.0))
        its_numbers.copy_((rows.to(torch.float32) / scale).round_())
    return numbers, scales
