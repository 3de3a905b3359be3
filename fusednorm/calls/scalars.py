"""Numbers that are no tensors, rounded once to the type in which a call is computed (docs/spec.md, section 2)."""

from __future__ import annotations

import functools
import math
from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

#: Arguments that callers leave out where other libraries take None, and their defaults.
_LEFT_OUT = {
    "eps": "1e-06; torch's own default is torch.finfo(torch.float32).eps",
    "weight_offset": "0.0",
    "x_scale": "1.0",
    "alpha": "1.0",
    "up_offset": "0.0",
}


def number(name: str, value: object, wide: torch.dtype) -> float:
    """The value rounded once to the type ``A`` of the specification, ``wide``; a compiler's value as it is.

    Raises:
        TypeError: it is no real number.
        ValueError: a float64 does not hold it.
    """
    if type(value) is not float:
        if isinstance(value, torch.SymFloat | torch.SymInt):  # a compiler's, whose value nobody may ask for
            return cast(float, value)
        value = _real(name, value)
    # What a compiler traces is rounded when its operators run.
    return value if wide is torch.float64 or is_dynamo_compiling() else in_float32(value)


def _real(name: str, value: object) -> float:
    if not isinstance(value, Real):
        cure = "pass a float, such as 1e-06"
        if value is None and name in _LEFT_OUT:
            cure = f"leave it out for {_LEFT_OUT[name]}"
        elif isinstance(value, Tensor):
            cure = f"pass {name}.item()"
        raise TypeError(f"{name} must be a number, got {type(value).__name__}; {cure}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float64 holds, got one beyond 1.8e308") from None


def whole(name: str, value: object) -> int:
    """The value as an int of 64 bits, of any type of whole numbers but bool; a compiler's value as it is.

    Raises:
        TypeError: it is no whole number.
        ValueError: an int64 does not hold it.
    """
    if isinstance(value, torch.SymInt):
        return cast(int, value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be int or None, got {value!r}; leave it out for None")
    found = int(value)
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{name} must be a number that an int64 holds, got {found}; leave it out for None")
    return found


def in_float32(value: float) -> float:
    """The float32 nearest to a number, ties to even; in integers, because the thread may flush subnormals."""
    return 0.0 * value if value == 0 else _in_float32(value)  # as keys, 0 and -0 are equal


@functools.lru_cache(maxsize=256)
def _in_float32(value: float) -> float:
    if not math.isfinite(value):
        return value
    fraction, exponent = math.frexp(value)
    bits = min(24, exponent + 149)  # the units of subnormals are 2^-149
    rounded = math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits) if bits >= 0 else 0.0
    return math.copysign(math.inf if abs(rounded) > 3.4028234663852886e38 else rounded, value)
