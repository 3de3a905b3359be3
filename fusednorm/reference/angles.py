"""Cosine, sine and power in plain torch operations: docs/spec.md, section 14. They make the tables of rotations.

Torch's own have other last bits on other processors. All is computed in float64, in a fixed order, and rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fusednorm.calls.arithmetic import exact
from fusednorm.reference.activations import SCHEMES, exponential, polynomial
from fusednorm.reference.log_prob import logarithm
from fusednorm.reference.norm import before_integers, constant, rounded

if TYPE_CHECKING:
    from torch import Tensor

#: pi / 2 is the sum of these. The first two have 26 bits, so that their products with k are exact.
QUARTERS = (1.5707963109016418, 1.5893254712295857e-08, 6.123233995736766e-17)
#: 2 / pi.
PER_QUARTER = 0.6366197723675814
#: Angles of a greater magnitude have no cosine and no sine here: k has 27 bits at most.
GREATEST = 2.0**27
#: The coefficients of r^3, r^5, ..., r^17, and of r^4, r^6, ..., r^18: Taylor's, each rounded once.
SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(1, 9))
COSINE = tuple((-1) ** n / math.factorial(2 * n) for n in range(2, 10))


@exact
def cosine_and_sine(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of angles in radians, of any shape and floating-point dtype, which is that of the results.

    NaN for a NaN, and for angles beyond 2^27, infinities among them.
    """
    rounder = SCHEMES[torch.float64].rounder
    x = before_integers(angle, "torch.cos or torch.sin").to(torch.float64)
    x = torch.where(x.abs() <= GREATEST, x, torch.nan)
    shifted = x * PER_QUARTER + rounder
    k = shifted - rounder
    for part in QUARTERS:
        x = x - k * part
    z = x * x
    square = z * z
    s = polynomial(z, square, SINE) * z * x + x
    c = polynomial(z, square, COSINE) * square + (1 - z * 0.5)
    quarter = shifted.view(torch.int64)  # of which the last two bits are those of k
    odd = (quarter & 1).bool()
    cos, sin = torch.where(odd, s, c), torch.where(odd, c, s)
    cos = torch.where(((quarter + 1) & 2).bool(), -cos, cos)
    sin = torch.where((quarter & 2).bool(), -sin, sin)
    return rounded(cos, angle.dtype), rounded(sin, angle.dtype)


@exact
def power(base: Tensor | float, exponent: Tensor | float, dtype: torch.dtype) -> Tensor:
    """base ** exponent, of a dtype to which numbers that are no tensor are rounded first; one of both is a tensor.

    NaN where the base is not positive, finite and normal, or the exponent is not finite.
    """
    like = base if isinstance(base, torch.Tensor) else exponent
    x, y = (
        (one if isinstance(one, torch.Tensor) else constant(one, like.new_empty((), dtype=dtype))).to(torch.float64)  # type: ignore[union-attr]
        for one in (base, exponent)
    )
    x = torch.where((x >= torch.finfo(torch.float64).tiny) & (x < torch.inf), x, torch.nan)
    return rounded(exponential((y + (y - y)) * logarithm(x)), dtype)
