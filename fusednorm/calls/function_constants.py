"""The constants of exp, log, tanh and the normal distribution, of which every backend has these.

``tests/exponential.py``, ``logarithm.py``, ``gaussian.py`` and ``tangent.py`` compute them. ``python
fusednorm/calls/function_constants.py c`` prints ``cpu/kernels/function_constants.h``, and ``cuda`` prints
``csrc/function_constants.cuh``.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Scheme(NamedTuple):
    """The constants of the exponential for one type."""

    whole: torch.dtype
    mantissa: int
    bias: int
    #: From here down exp is 0, and from `greatest` up infinite.
    least: float
    greatest: float
    #: Below it the sigmoid is the exponential itself.
    low: float
    #: Adding it rounds to a whole number, which then stands in the last bits.
    rounder: float
    log2_e: float
    ln2_high: float
    ln2_low: float
    coefficients: tuple[float, ...]


SCHEMES = {
    torch.float32: Scheme(
        *(torch.int32, 23, 127, -110.0, 89.0, -80.0, 1.5 * 2.0**23),
        *(1.4426950216293335, 0.693145751953125, 1.428606765330187e-06),
        (
            *(0.5, 0.16666647791862488, 0.041666481643915176),
            *(0.008337817154824734, 0.0013933278387412429, 0.00017366002430208027),
        ),
    ),
    torch.float64: Scheme(
        *(torch.int64, 52, 1023, -760.0, 710.0, -680.0, 1.5 * 2.0**52),
        *(1.4426950408889634, 0.6931471805598903, 5.497923018708371e-14),
        (
            *(0.5, 0.16666666666666669, 0.04166666666666668, 0.00833333333333214, 0.0013888888888877072),
            *(0.00019841269845288366, 2.4801587341355542e-05, 2.7557313100394887e-06, 2.7557258593055556e-07),
            *(2.5056429617706943e-08, 2.091968294911386e-09, 1.491964640100774e-10),
        ),
    ),
}


class Normal(NamedTuple):
    """The constants of gelu for one type."""

    #: Beyond this magnitude, it is z or 0.
    reach: float
    #: 1 / sqrt(2 pi).
    density: float
    #: Of the quotient of two polynomials of |z|.
    numerator: tuple[float, ...]
    denominator: tuple[float, ...]


NORMALS = {
    torch.float32: Normal(
        *(13.1875, 0.3989422917366028),
        (0.5, 0.4344722628593445, 0.18036708235740662, 0.03965581953525543, 0.003968221601098776),
        (
            *(1.0, 1.6668293476104736, 1.1906683444976807, 0.46188998222351074, 0.09941001981496811),
            0.009946707636117935,
        ),
    ),
    torch.float64: Normal(
        *(37.625, 0.3989422804014327),
        (
            *(0.5, 0.8253616207861859, 0.6755566520260075, 0.3541806732522092, 0.13047609946234864),
            0.03512706308443425,
            *(0.00698927772895675, 0.001016020721246223, 0.00010365061009751435, 6.746471743170718e-06),
            2.1527528524460769e-07,
        ),
        (
            *(1.0, 2.4486078023752373, 2.8048196650286474, 1.9879412721470942, 0.9709254688978015, 0.3440603623654912),
            *(0.09056345433009885, 0.017778255484259146, 0.0025636971645432434, 0.00026035316506638743),
            *(1.691089682546533e-05, 5.396151168232371e-07),
        ),
    ),
}


class Tangent(NamedTuple):
    """The constants of tanh for one type."""

    #: From here on, it is 1.
    flat: float
    #: Of a polynomial of the square, below 3/4.
    tangent: tuple[float, ...]


TANGENTS = {
    torch.float32: Tangent(
        10.0,
        (
            *(-0.3333333134651184, 0.1333317905664444, -0.05393585190176964, 0.021615318953990936),
            *(-0.00793380755931139, 0.0019095024326816201),
        ),
    ),
    torch.float64: Tangent(
        20.0,
        (
            *(-0.3333333333333333, 0.13333333333332661, -0.05396825396758208, 0.021869488509711037),
            *(-0.008863234987439102, 0.0035921213885060418, -0.0014557818253310693, 0.0005897469986953327),
            *(-0.00023809406936979282, 9.42476297649358e-05, -3.449472469998217e-05, 1.0048053928129499e-05),
            -1.6408599646831444e-06,
        ),
    ),
}


class Logarithm(NamedTuple):
    """The constants of the logarithm for one type, beside those of the exponential."""

    #: The bits of the square root of 1/2, from which on a mantissa is taken.
    root: int
    #: Of a polynomial of the square of f / (2 + f).
    coefficients: tuple[float, ...]


LOGARITHMS = {
    torch.float32: Logarithm(0x3F3504F3, (0.6666668653488159, 0.3998878002166748, 0.29579949378967285)),
    torch.float64: Logarithm(
        0x3FE6A09E667F3BCD,
        (
            *(0.666666666666667, 0.39999999999899505, 0.28571428625975487, 0.2222221113479508),
            *(0.18182889125261723, 0.15331721600556042, 0.14616449685043406),
        ),
    ),
}

#: The names of types in C, of both tables.
_TYPES = {"float": torch.float32, "double": torch.float64}


def _number(value: float, suffix: str = "") -> str:
    """A number as C and C++ have it: in decimal if that is short, else in hexadecimal."""
    if len(repr(value)) <= 8:
        return repr(value) + suffix
    digits, exponent = value.hex().split("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}{suffix}"


def _polynomials(dtype: torch.dtype) -> dict[str, Sequence[float]]:
    """The coefficients of each polynomial, from the constant on."""
    return {
        "coefficients": SCHEMES[dtype].coefficients,
        "numerator": NORMALS[dtype].numerator,
        "denominator": NORMALS[dtype].denominator,
        "tangent": TANGENTS[dtype].tangent,
        "logarithm": LOGARITHMS[dtype].coefficients,
    }


def _numbers(dtype: torch.dtype) -> dict[str, float]:
    scheme, normal, tangent = SCHEMES[dtype], NORMALS[dtype], TANGENTS[dtype]
    names = ("least", "low", "rounder", "log2_e", "ln2_high", "ln2_low")
    found = {name: getattr(scheme, name) for name in names}
    return found | {"reach": normal.reach, "density": normal.density, "flat": tangent.flat}


_ABOUT = "Printed by fusednorm/calls/function_constants.py, which has the same numbers for Python and Triton."


def c_header() -> str:
    """``cpu/kernels/function_constants.h``."""
    lines = [f"/* {_ABOUT} */", "#ifndef FUSEDNORM_FUNCTION_CONSTANTS_H", "#define FUSEDNORM_FUNCTION_CONSTANTS_H", ""]
    for kind, dtype in _TYPES.items():
        suffix, whole = ("f", "int32_t") if kind == "float" else ("", "int64_t")
        scheme = SCHEMES[dtype]
        lines.append(f"enum {{ mantissa_{kind} = {scheme.mantissa}, bias_{kind} = {scheme.bias} }};")
        lines.append(f"static const {whole} root_{kind} = {LOGARITHMS[dtype].root:#x};")
        for name, value in _numbers(dtype).items():
            lines.append(f"static const {kind} {name}_{kind} = {_number(value, suffix)};")
        for name, values in _polynomials(dtype).items():
            text = ", ".join(_number(value, suffix) for value in values)
            lines.append(f"static const {kind} {name}_{kind}[] = {{")
            lines += [f"    {row}" for row in textwrap.wrap(text, 116, break_on_hyphens=False)] + ["};"]
        lines.append("")
    return "\n".join([*lines, "#endif", ""])


def cuda_header() -> str:
    """``csrc/function_constants.cuh``."""
    single, double = _TYPES.values()
    lines = [f"// {_ABOUT}", "#pragma once", ""]

    def chosen(kind: str, name: str, narrow: str, wide: str) -> None:
        lines.append(f"constexpr {kind} {name} = IN_F64 ? {wide} : {narrow};")

    chosen("int", "MANTISSA", str(SCHEMES[single].mantissa), str(SCHEMES[double].mantissa))
    chosen("Whole", "BIAS", str(SCHEMES[single].bias), str(SCHEMES[double].bias))
    chosen("Whole", "ROOT", f"{LOGARITHMS[single].root:#x}", f"{LOGARITHMS[double].root:#x}")
    for name, value in _numbers(single).items():
        chosen("A", name.upper(), _number(value), _number(_numbers(double)[name]))
    for dtype, suffix in ((single, "f"), (double, "")):
        for name, values in _polynomials(dtype).items():
            text = ", ".join(_number(value, suffix) for value in values)
            rows = textwrap.wrap(text, 112, break_on_hyphens=False)
            lines.append(f"#define {name.upper()}_{'F32' if suffix else 'F64'} \\")
            lines.append(" \\\n".join(f"    {row}" for row in rows))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print({"c": c_header, "cuda": cuda_header}[sys.argv[1]](), end="")
