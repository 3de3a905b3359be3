"""Computes the constants of the specification's tanh (docs/spec.md, section 10), and prints them.

    python tests/tangent.py

tanh(a) = (c * t) * a + a below 3/4, with t = a^2 and a polynomial c of t. It agrees with the exact function at
Chebyshev's points, which comes close to the least greatest error; the coefficients are rounded to the type after that.
test_gated.py compares them with what the reference, C and the specification have.
"""

import mpmath
from exponential import float32

#: From here on tanh is a quotient with exp.
END = mpmath.mpf(3) / 4


def exact(t):
    """The polynomial's value: (tanh(a) / a - 1) / t."""
    a = mpmath.sqrt(t)
    return (mpmath.tanh(a) / a - 1) / t


def constants(round_to, count):
    """The coefficients for one type, the constant first, and the greatest relative error of tanh."""
    with mpmath.workdps(60):
        points = [END**2 * (1 + mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count))) / 2 for i in range(count)]
        found = mpmath.lu_solve(mpmath.matrix([[t**j for j in range(count)] for t in points]), [*map(exact, points)])
        coefficients = tuple(map(round_to, found))
        samples = ((END * i / 400) ** 2 for i in range(1, 401))
        errors = [(1 + mpmath.polyval(coefficients[::-1], t) * t) / (1 + exact(t) * t) - 1 for t in samples]
        return {"tangent": coefficients, "error": float(max(map(abs, errors)))}


#: How a number is rounded to the type, and how many coefficients.
TYPES = {"float32": (float32, 6), "float64": (float, 13)}


def main():
    for name, how in TYPES.items():
        found = constants(*how)
        print(f"{name}: the polynomial's relative error is at most {found['error']:.2g}")
        for number in found["tangent"]:
            print(f"    {number.hex():25} {number!r}")


if __name__ == "__main__":
    main()
