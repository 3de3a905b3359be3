"""How values become 8-bit numbers and scales; the formulas are in docs/spec.md, section 9."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fusednorm.calls.c_kinds import KINDS
from fusednorm.calls.c_quantizer import pack_quantization
from fusednorm.calls.features import unusual
from fusednorm.calls.scalars import in_float32

#: Bits of the mantissa, and the least exponent of a normal number.
FLOAT8 = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}

#: The least and the greatest zero point, and whole number before a zero point is added: their sum fits 32 bits.
MOST = 2.0**30

#: The dtypes, and the least and the greatest number of each.
RANGES: dict[torch.dtype, tuple[float, float]] = {
    torch.int8: (-128.0, 127.0),
    torch.uint8: (0.0, 255.0),
    torch.float8_e4m3fn: (-448.0, 448.0),
    torch.float8_e5m2: (-57344.0, 57344.0),
}

#: The dtype of a byte of ue8m0.
E8M0 = torch.float8_e8m0fnu

_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(RANGES),
    "zero_point": (None, 128, "after", "before"),
    "scale_by": ("divide", "reciprocal"),
    "apply": ("divide", "reciprocal", "ratio"),
    "floor_dtype": (None, "input"),
    "returns": ("scale", "multiplier"),
    "layout": ("row", "column", "column_padded"),
    "round_scale": (None, "up_to_power_of_two"),
    "scale_dtype": (None, torch.int32, E8M0),
}


#: Fields that exclude each other: the reason, and whether a quantization has them.
_EXCLUDED: dict[str, Callable[[Quantization], bool]] = {
    "zero_point goes with int8 and uint8": lambda q: q.zero_point is not None and q.dtype.is_floating_point,
    "zero_point=128 goes with uint8": lambda q: q.zero_point == 128 and q.dtype != torch.uint8,
    "apply='ratio' has no scale to be given: use per='row' or a group": (
        lambda q: q.apply == "ratio" and (is_given(q) or q.computes_zero_point)
    ),
    "apply='ratio' does not use the scale: leave out scale_floor": (
        lambda q: q.apply == "ratio" and in_float32(q.scale_floor) != 0
    ),
    "apply='ratio' does not use the scale: leave out round_scale": (
        lambda q: q.apply == "ratio" and q.round_scale is not None
    ),
    "round_scale is for scales that are computed, not for per='tensor'": (
        lambda q: q.round_scale is not None and is_given(q)
    ),
    "scale_dtype is for powers of two: use round_scale='up_to_power_of_two'": (
        lambda q: q.scale_dtype is not None and q.round_scale is None
    ),
    "returns='multiplier' goes with apply='ratio'": lambda q: q.returns == "multiplier" and q.apply != "ratio",
    "layout is for scales of groups and rows, not for per='tensor'": lambda q: q.layout != "row" and is_given(q),
    "amax_floor and amax_limit do not go with a computed zero_point, which has no amax": (
        lambda q: q.computes_zero_point and (in_float32(q.amax_floor) != 0 or in_float32(q.amax_limit) != math.inf)
    ),
}


#: The fields that a backend knows which knows quantizers. Kernels never see ``scale_dtype``.
_FIRST_FIELDS = {"dtype", "per", "zero_point", "scale_by", "apply", "amax_floor", "amax_limit", "scale_floor"}
_FIRST_FIELDS |= {"floor_dtype", "returns", "layout", "qmin", "qmax", "scale_dtype"}


@dataclass(frozen=True)
class Quantization:
    """A way to quantize rows to 8 bits. Each field is a part of the formulas in docs/spec.md, section 9.

    Raises:
        TypeError, ValueError: a field has a value that it cannot have, or that does not go with another field.
    """

    #: One of torch.int8, uint8, float8_e4m3fn and float8_e5m2.
    dtype: torch.dtype
    #: The numbers that share a scale. With "tensor" the caller gives one scale, or one for each block; with "row" each
    #: row has one; with a number each group of as many elements of a row.
    per: str | int = "row"
    #: With 128, this is added to what is stored (uint8). With "after" or "before" a zero point is computed from the
    #: least and the greatest value, and added after or before rounding; for per="tensor" the caller gives it.
    zero_point: int | str | None = None
    #: With "divide" the scale is amax / qmax, with "reciprocal" amax * (1 / qmax).
    scale_by: str = "divide"
    #: With "divide" numbers are y / scale, with "reciprocal" y * (1 / scale), with "ratio" y * (qmax / amax).
    apply: str = "divide"
    #: The least amax. Without it and scale_floor, subnormal and zero scales are possible.
    amax_floor: float = 0.0
    #: The greatest amax.
    amax_limit: float = math.inf
    #: The least scale.
    scale_floor: float = 0.0
    #: With "input", amax_floor is first rounded to the dtype of the rows, which is ``between`` after a norm or a gate.
    floor_dtype: str | None = None
    #: With "multiplier", qmax / amax is returned in place of the scale.
    returns: str = "scale"
    #: How scales lie in memory. With "row" they lie by rows, with "column" by columns, with "column_padded" by columns
    #: of rows that are rounded up to 4, or to 16 with scales of one byte: whole 16 bytes.
    layout: str = "row"
    #: The least number, before a zero point of 128 is added; the dtype's if None.
    qmin: float | None = None
    #: The greatest number, before a zero point of 128 is added; the dtype's if None.
    qmax: float | None = None
    #: With "up_to_power_of_two" scales are rounded up to powers of two (ue8m0).
    round_scale: str | None = None
    #: The dtype of scales that are powers of two: float32 if None; with torch.float8_e8m0fnu a byte of ue8m0; with
    #: torch.int32 four such bytes in one number, of four groups that follow each other.
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        whole_group = type(self.per) is int and self.per > 0
        if self.per not in ("tensor", "row") and not whole_group:
            raise ValueError(f"per must be 'tensor', 'row' or the elements of a group, at least 1, got {self.per!r}")
        for name in ("amax_floor", "amax_limit", "scale_floor", "qmin", "qmax"):
            value, is_limit = getattr(self, name), name in ("qmin", "qmax")
            if value is None and is_limit:
                continue
            if type(value) not in (int, float) or value != value:  # a NaN
                raise TypeError(f"{name} must be a number, got {value!r}")
            if value < 0 and not is_limit:
                raise ValueError(f"{name} must not be negative, got {value!r}")
        # Made once: a compiler cannot make text of numbers that it takes for inputs, as those in attributes.
        object.__setattr__(self, "_text", self._named())
        for reason, wrong in _EXCLUDED.items():
            if wrong(self):
                raise ValueError(f"fields of a quantization exclude each other: {reason}; got {self}")
        self._check_range()

    def __hash__(self) -> int:
        return hash((self.dtype, self.per, self.apply))  # each quantized call asks for it, and few are alike in these

    def _named(self) -> str:
        named = [("dtype", str(self.dtype)[6:])]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                named.append((field.name, str(value).removeprefix("torch.")))
        return " ".join(f"{name}={value}" for name, value in named)

    def _check_range(self) -> None:
        (lowest, highest), (least, greatest), dtype = self._of_dtype, self.range, str(self.dtype)[6:]
        if not lowest <= least <= 0 < greatest <= highest:
            within = f"within {lowest:g} and {highest:g}"
            raise ValueError(f"qmin and qmax must lie around 0, {within}, got {least:g} and {greatest:g}")
        if self.dtype.is_floating_point and least == 0:
            raise ValueError(f"qmin of {dtype} must be less than 0, got {least:g}")
        mantissa, least_exponent = FLOAT8.get(self.dtype, (0, 0))
        for number in (least, greatest):
            exponent = max(math.frexp(number)[1] - 1, least_exponent) if mantissa else 0
            if math.ldexp(number, mantissa - exponent) % 1:
                raise ValueError(f"qmin and qmax must be numbers of {dtype}, got {least:g} and {greatest:g}")

    @property
    def _of_dtype(self) -> tuple[float, float]:
        """The least and the greatest number of the dtype, before a zero point of 128 is added."""
        lowest, highest = RANGES[self.dtype]
        return (lowest - 128, highest - 128) if self.zero_point == 128 else (lowest, highest)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest number, before a zero point is added."""
        lowest, highest = self._of_dtype
        if self.dtype.is_floating_point and self.qmax is not None and self.qmin is None:
            lowest = -self.qmax
        return (
            float(lowest if self.qmin is None else self.qmin),
            float(highest if self.qmax is None else self.qmax),
        )

    @property
    def computes_zero_point(self) -> bool:
        """Whether there are zero points, which are results unless they are given."""
        return self.zero_point in ("after", "before")

    @functools.cached_property
    def packed(self) -> tuple[bytes, ...]:
        """The form that the C library takes. The number that C has for the dtype of the rows is the place."""
        return tuple(pack_quantization(self, dtype or torch.float32) for dtype in KINDS)

    @functools.cached_property
    def in_float32(self) -> Quantization:
        """This quantization with float32 scales, which kernels compute."""
        return replace(self, scale_dtype=None)

    @functools.cached_property
    def features(self) -> tuple[str, ...]:
        """The fields that are not at their usual values, but those that each backend knows which knows quantizers."""
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        return unusual(mine, {one.name: one.default for one in fields(self)}, _FIRST_FIELDS)

    def group(self, hidden_size: int) -> int:
        """The elements that share a scale, for rows of this length; all of them for per="tensor"."""
        return self.per if isinstance(self.per, int) else hidden_size

    def __str__(self) -> str:
        """The canonical text: equal text, equal quantization. :meth:`parse` reads it."""
        text: str = self._text  # type: ignore[attr-defined]
        return text

    @classmethod
    def parse(cls, text: str) -> Quantization:
        """The quantization with this canonical text.

        Raises:
            ValueError: there is none.
        """
        try:
            found = cls(**_fields_of(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"quantization must be the text of a fusednorm.Quantization, got {text!r}") from error
        if str(found) != text:
            raise ValueError(
                f"quantization must be the text of a fusednorm.Quantization, such as {found}, got {text!r}"
            )
        return found


Quantization.__module__ = "fusednorm.quantizations"  # where users find it, and what was saved names


def is_given(quantization: Quantization) -> bool:
    """Whether the caller gives the scale, one for all rows, and the zero point if there is one."""
    return quantization.per == "tensor"


def computed_by(quantization: Quantization) -> tuple[torch.dtype, ...]:
    """The dtypes of scales and zero points, as far as they are computed."""
    dtypes = (quantization.scale_dtype or torch.float32, torch.int32)
    return () if is_given(quantization) else dtypes if quantization.computes_zero_point else dtypes[:1]


def groups_of(quantization: Quantization, shape: Sequence[int]) -> list[int]:
    """The shape of zero points that are computed for rows of [..., N], and of float32 scales: [..., groups]."""
    return [*shape[:-1], shape[-1] // quantization.group(shape[-1])]


def scales_of(quantization: Quantization, shape: Sequence[int]) -> list[int]:
    """The shape of scales that are computed for rows of [..., N]: [..., groups], or a fourth of the groups in int32."""
    *rows, groups = groups_of(quantization, shape)
    return [*rows, -(-groups // 4) if quantization.scale_dtype == torch.int32 else groups]


def _fields_of(text: str) -> dict[str, Any]:
    """The fields that a canonical text names, by name."""
    given: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        given[name] = getattr(torch, value, None) if name in ("dtype", "scale_dtype") else _read(value)
    return given


def _read(value: str) -> Any:
    """A number or a word, of a canonical text; without exceptions, which torch's compiler cannot trace."""
    if value.removeprefix("-").isdecimal():
        return int(value)
    return float(value) if value[-1:].isdecimal() or value.removeprefix("-") in ("inf", "nan") else value
