"""Three small operations that are declared here alone: the tables of tests have them beside those of the library."""

import torch
from torch import Tensor

from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.operations.front_door import Operation
from fusednorm.reference import norm as reference


def scaled_norm(x, weight, factor, eps):
    a = reference.accumulator(x.dtype)
    y = x.to(a) * reference.rstd_of(x.to(a), eps).unsqueeze(-1) * reference.constant(factor, x.new_empty((), dtype=a))
    return (reference.rounded(y if weight is None else y * weight.to(a), x.dtype),)


def scaled_norm_gradient(d, x, weight, factor, eps, needs):
    a = reference.accumulator(x.dtype)
    h, d = x.to(a), d.to(a) * reference.constant(factor, x.new_empty((), dtype=a))
    rstd = (reference.treesum(h * h).unsqueeze(-1) / x.shape[-1] + eps).rsqrt()
    n = h * rstd
    dn = d if weight is None else d * weight.to(a)
    mean = reference.treesum(dn * n).unsqueeze(-1) / x.shape[-1]
    dx = reference.rounded((dn - n * mean) * rstd, x.dtype) if needs[0] else None
    if weight is None or not needs[1]:
        return dx, None
    return dx, reference.rounded(reference.rowsum((d * n).reshape(-1, x.shape[-1])), weight.dtype)


SCALED = Operation(
    Declaration(
        "rms_norm_scaled",
        operands=(Operand("x"), Operand("weight", Role.WEIGHT, optional=True)),
        results=(Result(overwrites="x"),),
        flags={"factor": 1.0, "eps": 1e-6},
        formula=scaled_norm,
        gradient=scaled_norm_gradient,
        samples=({}, {"factor": 0.3, "eps": 1e-2}),
        refused=(({"factor": "2"}, TypeError, "factor must be a number"),),
    )
)


@SCALED.public
def rms_norm_scaled(
    x: Tensor, weight: Tensor | None = None, factor: float = 1.0, *, eps: float = 1e-6, out: Tensor | None = None
) -> Tensor:
    """A norm times a factor."""
    return SCALED("rms_norm_scaled", x=x, weight=weight, factor=factor, eps=eps, out=out)


@SCALED.public
def rms_norm_scaled_(x: Tensor, weight: Tensor | None = None, factor: float = 1.0, *, eps: float = 1e-6) -> Tensor:
    """The same in place."""
    return SCALED("rms_norm_scaled_", x=x, weight=weight, factor=factor, eps=eps)


def picked(x, ids):
    return (x.gather(-1, ids.to(torch.int64).unsqueeze(-1)).squeeze(-1),)


def picked_gradient(d, x, ids, needs):
    here = torch.arange(x.shape[-1], device=x.device) == ids.unsqueeze(-1)
    return (torch.where(here, d.unsqueeze(-1), 0.0),)


PICK = Operation(
    Declaration(
        "pick",
        operands=(Operand("x"), Operand("ids", Role.IDS)),
        results=(Result(role=Role.NUMBERS),),
        formula=picked,
        gradient=picked_gradient,
    )
)


@PICK.public
def pick(x: Tensor, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """One element of each row."""
    return PICK("pick", x=x, ids=ids, out=out)


def divided(x):
    wide = x.to(reference.accumulator(x.dtype))
    s = reference.treesum(wide * wide)
    return reference.rounded(wide / s.unsqueeze(-1), x.dtype), s


def divided_gradient(d, x, s, needs):
    wide, d, s = x.to(s.dtype), d.to(s.dtype), s.unsqueeze(-1)
    return (reference.rounded(d / s - 2 * wide * reference.treesum(d * wide).unsqueeze(-1) / (s * s), x.dtype),)


#: Its gradient takes a result that callers do not see.
DIVIDED = Operation(
    Declaration(
        "divided_by_squares",
        operands=(Operand("x"),),
        results=(Result(), Result("s", Role.NUMBERS, kept=True)),
        formula=divided,
        gradient=divided_gradient,
    )
)


@DIVIDED.public
def divided_by_squares(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows divided by the sum of their squares."""
    return DIVIDED("divided_by_squares", x=x, out=out)
