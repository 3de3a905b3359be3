"""Matrix products of a model by :func:`fusednorm.linear`: those of ``torch.nn.Linear`` and of GPT-2's ``Conv1D``.

A module keeps its weight and its bias. Calls with operands of other dtypes than the weight's run the module's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusednorm.calls.call import FLOATS
from fusednorm.operations.linear import linear
from fusednorm.operations.modules import Linear, as_autocast
from fusednorm.transformers.replacing import Outcome, Patched, attach


class PatchedProduct(Patched):
    """A module whose result is one product; comes before the original class. Its state is True."""

    #: Whether the weight is [K, N].
    _turned = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The product of one argument. Other arguments are passed to the original class."""
        if len(args) == 1 and not kwargs and self._fusednorm and isinstance(args[0], Tensor):
            own: Any = self
            x, weight, bias = as_autocast(args[0], own.weight, own.bias)
            if _fit(x, weight, bias, self._turned):
                return linear(x, weight.t() if self._turned else weight, bias)
        return super().forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """The arguments as the original class shows them, and "by fusednorm"."""
        return ", ".join(filter(None, [super().extra_repr(), "by fusednorm"]))

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("linear", {})]


class PatchedConv1D(PatchedProduct):
    """A product by a module whose weight is [K, N], as GPT-2's."""

    _turned = True


def _fit(x: Tensor, weight: Any, bias: Any, turned: bool) -> bool:
    """Whether the product of these operands, whose shapes fit, is fusednorm's.

    Tensors that stand for others, as quantized ones, have products of their own.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2 or x.dim() == 0:
        return False
    k, n = weight.shape if turned else weight.shape[::-1]
    if x.dtype not in FLOATS or x.shape[-1] != k or k == 0:
        return False
    like = x.dtype, x.device
    if (weight.dtype, weight.device) != like or _stands_for_others(weight):
        return False
    return bias is None or ((bias.dtype, bias.device) == like and bias.shape == (n,))


def _stands_for_others(weight: Tensor) -> bool:
    """Whether a weight is of a class whose products are its own; those of a DTensor are fusednorm's."""
    if not is_traceable_wrapper_subclass(weight):
        return False
    from torch.distributed.tensor import DTensor

    return not isinstance(weight, DTensor)


def patch_products(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces modules that compute a product."""
    for module in list(model.modules()):
        if isinstance(module, Patched | Linear):
            continue
        kind = _kind(module)
        if kind is not None and (why := reason(module)):
            yield type(module).__name__, False, why
        elif kind is not None:
            yield attach(module, kind, frozenset(), True, "linear(weight.t())" if kind._turned else "linear")


def _kind(module: torch.nn.Module) -> type[PatchedProduct] | None:
    if isinstance(module, torch.nn.Linear):
        return PatchedProduct
    of_class = type(module)
    turned = (of_class.__module__, of_class.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return PatchedConv1D if turned else None


def reason(module: Any) -> str | None:
    """The reason why a module is left alone; None if it is not."""
    known = torch.nn.Linear.forward, Linear.forward, PatchedProduct.forward
    if isinstance(module, torch.nn.Linear) and type(module).forward not in known:
        return "it computes its product in another way than torch.nn.Linear"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "torch.nn.MultiheadAttention takes its weight, and does not call it"
    if hasattr(module, "parametrizations"):
        return "its weight is computed in each call (torch.nn.utils.parametrize)"
    weight: Any = getattr(module, "weight", None)
    if is_lazy(weight):
        return "its weight has no shape yet"
    if isinstance(weight, Tensor) and _stands_for_others(weight):
        return f"its weight is a {type(weight).__name__}"
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype if isinstance(weight, Tensor) else type(weight).__name__}"
    return None
