"""The operations that ``compare`` and ``bench`` measure: fusednorm's calls of each, and its formula in torch.

A call takes x and the residual, both [M, N], or x alone. It returns the outputs, of the shape and the dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusednorm


class Calls(NamedTuple):
    """fusednorm's calls of an operation."""

    new: Callable[..., Any]
    #: Also takes the tensors to write the outputs to.
    out: Callable[..., Any]
    in_place: Callable[..., Any]


class Measured(NamedTuple):
    """An operation. The formula takes the inputs, the weight and eps, and rounds where fusednorm rounds."""

    #: The number of large operands: those that a call takes, and those that it returns.
    inputs: int
    outputs: int
    #: A weight, [N], which all norms of the operation share, and eps -> fusednorm's calls.
    calls: Callable[[Tensor, float], Calls]
    formula: Callable[..., Any]
    #: The intermediate results that are rounded.
    rounds: str
    #: The places among the inputs to which a call in place writes its outputs.
    written: tuple[int, ...]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """One output or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


# The calls are written out, because one line of Python more takes a tenth of the time of a short call.


def _norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm, fusednorm.rms_norm_
    return Calls(
        lambda x: function(x, weight, eps),
        lambda x, y: function(x, weight, eps, out=y),
        lambda x: in_place(x, weight, eps),
    )


def _add_norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.fused_add_rms_norm, fusednorm.fused_add_rms_norm_
    return Calls(
        lambda x, r: function(x, r, weight, eps),
        lambda x, r, y, s: function(x, r, weight, eps, out=y, residual_out=s),
        lambda x, r: in_place(x, r, weight, eps),
    )


def _norm_add(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm_add, fusednorm.rms_norm_add_
    return Calls(
        lambda x, r: function(x, r, weight, eps),
        lambda x, r, s: function(x, r, weight, eps, residual_out=s),
        lambda x, r: in_place(x, r, weight, eps),
    )


def _norm_add_norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm_add_rms_norm, fusednorm.rms_norm_add_rms_norm_
    return Calls(
        lambda x, r: function(x, r, weight, weight, eps),
        lambda x, r, y, s: function(x, r, weight, weight, eps, out=y, residual_out=s),
        lambda x, r: in_place(x, r, weight, weight, eps),
    )


def _formula_of_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _formula_of_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _formula_of_norm(total, weight, eps), total


def _formula_of_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _formula_of_norm(x, weight, eps) + residual


def _formula_of_norm_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _formula_of_add_norm(_formula_of_norm(x, weight, eps), residual, weight, eps)


#: By the name that ``--ops`` takes.
OPERATIONS = {
    "add_norm": Measured(2, 2, _add_norm, _formula_of_add_norm, "sum", (0, 1)),
    "norm": Measured(1, 1, _norm, _formula_of_norm, "nothing", (0,)),
    "norm_add": Measured(2, 1, _norm_add, _formula_of_norm_add, "first norm", (1,)),
    "norm_add_norm": Measured(2, 2, _norm_add_norm, _formula_of_norm_add_norm, "first norm, sum", (0, 1)),
}

#: The gradients of which operation, and the number of large operands that are read and written at least.
GRADIENTS = {"backward": ("add_norm", 4), "norm_add_norm_backward": ("norm_add_norm", 6)}

#: Everything that ``bench`` times.
OPS = (*OPERATIONS, *GRADIENTS)
