"""A linear layer of int8, whose rows are quantized in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusednorm.operations.int8_linear import int8_linear
from fusednorm.operations.modules import check_linear
from fusednorm.operations.quantize import quantize
from fusednorm.quantizations import VLLM_INT8_TOKEN_CPU

#: Of rows, and of the rows of the weight: one scale for each, without a zero point.
QUANTIZATION = VLLM_INT8_TOKEN_CPU


class Int8Linear(torch.nn.Module):
    """A linear layer whose weight is int8, with one scale for each of its rows, and whose input is rounded to int8 too.

    A call is ``int8_linear(*quantize(x, quantization=VLLM_INT8_TOKEN_CPU), weight, weight_scale, bias)``. There are no
    gradients. :meth:`from_linear` makes one of a linear layer; ``weight_scale`` stays float32 where the module is
    converted to another dtype.

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
        self.register_buffer("weight_scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, module: torch.nn.Linear) -> Int8Linear:
        """A module with another one's weight, rounded to int8, and a copy of its bias.

        Args:
            module: a ``torch.nn.Linear``, or of a subclass with its forward pass.

        Raises:
            TypeError: it is no such module, or its weight is float64.
            ValueError: its weight has no shape yet, or a number of it is not finite.
        """
        check_linear(module)
        if is_lazy(module.weight):
            raise ValueError("module must have a weight with a shape; run a LazyLinear once")
        weight = module.weight.detach()
        if not weight.isfinite().all():
            raise ValueError("module must have a weight of finite numbers, which int8 can hold; got infinity or NaN")
        bias = None if module.bias is None else module.bias.detach().clone()
        made = cls(module.in_features, module.out_features, False, weight.device)
        made.weight, scale = quantize(weight, quantization=QUANTIZATION)
        made.weight_scale, made.bias = scale[:, 0].contiguous(), bias
        return made.train(module.training)

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
