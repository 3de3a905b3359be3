"""Computes the constants of the specification's gelu (docs/spec.md, section 10), and prints them.

    python tests/gaussian.py

Phi(-a) * exp(a^2 / 2), with Phi of the normal distribution, is a quotient of two polynomials of a. It agrees with the
exact function at Chebyshev's points, which comes close to the least greatest error; the coefficients are rounded to the
type after that. test_gated.py compares them with what the reference, C, CUDA and Triton have.
"""

import mpmath
from exponential import float32


def exact(a):
    return mpmath.erfc(a / mpmath.sqrt(2)) / 2 * mpmath.exp(a * a / 2)


def points(reach, count, shift):
    """Chebyshev's points in 1 / (a + shift), which are denser for a small a."""
    low, high = 1 / mpmath.mpf(shift), 1 / (reach + mpmath.mpf(shift))
    for i in range(count):
        yield 2 / (low + high + (low - high) * mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count))) - shift


def quotient(reach, numerator, denominator, shift):
    """The coefficients of both polynomials, so many, the constants first; the denominator's constant is 1."""
    rows, values = [], []
    for a in points(reach, numerator + denominator - 1, shift):
        value = exact(a)
        rows.append([*(a**j for j in range(numerator)), *(-value * a**j for j in range(1, denominator))])
        values.append(value)
    found = list(mpmath.lu_solve(mpmath.matrix(rows), mpmath.matrix(values)))
    return found[:numerator], [mpmath.mpf(1), *found[numerator:]]


def constants(round_to, *how):
    """The constants for one type: of the polynomials, and 1 / sqrt(2 pi)."""
    with mpmath.workdps(60):
        above, below = (tuple(map(round_to, part)) for part in quotient(*how))
        reach = how[0]
        samples = (reach * (mpmath.mpf(i) / 400) ** 2 for i in range(401))
        errors = [mpmath.polyval(above[::-1], a) / mpmath.polyval(below[::-1], a) / exact(a) - 1 for a in samples]
        density = round_to(1 / mpmath.sqrt(2 * mpmath.pi))
        return {"numerator": above, "denominator": below, "density": density, "error": float(max(map(abs, errors)))}


#: How a number is rounded to the type; where the quotient ends; how many coefficients; what places the points.
TYPES = {"float32": (float32, 13.1875, 5, 6, 3), "float64": (float, 37.625, 11, 12, 4)}


def main():
    for name, how in TYPES.items():
        found = constants(*how)
        print(f"{name}: the quotient's relative error is at most {found.pop('error'):.2g}")
        for constant, value in found.items():
            for number in value if isinstance(value, tuple) else (value,):
                print(f"    {constant:12} {number.hex():25} {number!r}")


if __name__ == "__main__":
    main()
