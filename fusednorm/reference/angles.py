"""Cosine, sine and power in plain torch operations: docs/spec.md, section 14. They make the tables of rotations.

Torch's own have other last bits on other processors. All is computed in float64, in a fixed order, and rounded once.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from fusednorm.calls.arithmetic import exact
from fusednorm.calls.function_constants import SCHEMES
from fusednorm.reference.activations import exponential
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


#: Angles are taken in blocks of so many.
BLOCK = 1 << 14


@functools.cache
def _pairs(device: torch.device) -> tuple[Tensor, Tensor]:
    """The coefficients of odd and of even powers of z, [4, 2, 1]: of sine and cosine, from the lowest power on."""
    both = torch.tensor([SINE, COSINE], dtype=torch.float64, device=device).t().unsqueeze(-1)
    return both[1::2].contiguous(), both[::2].contiguous()


@exact
def cosine_and_sine(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of angles in radians, of any shape and floating-point dtype, which is that of the results.

    NaN for a NaN, and for angles beyond 2^27, infinities among them.
    """
    angles = before_integers(angle, "torch.cos or torch.sin").reshape(-1)
    parts = [_sine_and_cosine(part) for part in torch.split(angles, BLOCK)]
    sin, cos = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).unbind()
    return cos.view(angle.shape), sin.view(angle.shape)


def _sine_and_cosine(angle: Tensor) -> Tensor:
    """[N] -> [2, N]. Operations are few, because one token has few angles."""
    x = angle.to(torch.float64)
    x = x.masked_fill(x.abs() > GREATEST, torch.nan)
    shifted = x * PER_QUARTER + SCHEMES[torch.float64].rounder
    k = shifted - SCHEMES[torch.float64].rounder
    for part in QUARTERS:
        x = x - k * part
    z = x * x
    square = z * z
    odd, even = _pairs(angle.device)
    *pairs, p = (z * odd + even).unbind()
    for pair in reversed(pairs):
        p = square * p + pair
    of_sine, of_cosine = p.unbind()
    s, c = of_sine * z * x + x, of_cosine * square + (1 - z * 0.5)
    quarter = shifted.view(torch.int64)  # of which the last two bits are those of k
    quarter = torch.stack((quarter, quarter + 1))  # a cosine is the sine of a quarter more
    found = torch.where((quarter & 1).bool(), c, s)
    return rounded(torch.where((quarter & 2).bool(), -found, found), angle.dtype)


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
