"""L2 normalisation: a composition (docs/spec.md, section 8)."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import check_dense, refuse_type
from fusednorm.calls.scalars import number
from fusednorm.operations.norm import rms_norm


def l2_norm(x: Tensor, eps: float = 1e-6, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Divides each row by its length: ``x / sqrt(sum(x^2) + eps)``, as linear attention does with q and k.

    The same bits as ``rms_norm(x, weight, eps / N)``, where each element of the weight is 1 / sqrt(N), rounded to
    float32 (float64 for a float64 ``x``). For N of 4, 16, 64, 256 and so on that is a power of two, so that y is
    ``x * (1 / sqrt(sum(x^2) + eps))`` with one rounding for each operation.

    ``torch.nn.functional.normalize`` has another eps, which limits the length.

    Args:
        x: [..., N]; see :func:`fusednorm.fused_add_rms_norm`.
        eps: added to the sum of squares, in the unit of x squared.
        out: [..., N] to write to, in its own dtype. May be x itself.
        out_dtype: the dtype of y; x's if None. With gradients, unlike ``out``.

    Returns:
        The rows, in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and x requires grad.
        TypeError, ValueError, BackendError: see :func:`fusednorm.rms_norm`.
    """
    compiling = is_dynamo_compiling()
    if not compiling and must_be_seen.override(x, out):
        return must_be_seen.handed_over(l2_norm, (x, out), locals())
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    check_dense("x", x)
    hidden_size = x.shape[-1] if x.dim() else 1
    if isinstance(hidden_size, Tensor):  # of torch.jit.trace, whose programs have eps as a number
        hidden_size = int(hidden_size)
    if type(eps) is not float:
        eps = number("eps", eps, torch.float64)  # the quotient is rounded
    if must_be_seen.overrides_operations(x) and x.layout == torch.strided:  # a DTensor takes a weight that is one
        weight = x.new_full((hidden_size,), _each(hidden_size), dtype=accumulator(x.dtype))
    else:
        # What a mode or a transform makes ends with it.
        new = compiling or x.is_meta or must_be_seen.below(x) or must_be_seen.transform(x)
        weight = (_weight if new else _kept_weight)(hidden_size, accumulator(x.dtype), x.device)
    return rms_norm(x, weight, eps / max(hidden_size, 1), out=out, out_dtype=out_dtype)


def _each(hidden_size: int) -> float:
    return 1 / math.sqrt(max(hidden_size, 1))


def _weight(hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((hidden_size,), _each(hidden_size), dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def _kept_weight(hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept, because filling a new tensor takes as long as a short call."""
    with torch.inference_mode(False):  # autograd takes it later
        return _weight(hidden_size, dtype, device)
