"""Computes the constants of the specification's logarithm (docs/spec.md, section 12), and prints them.

    python tests/logarithm.py

log(1 + f) = 2 * s + s * R with s = f / (2 + f) and R = z * p, a polynomial p of z = s^2. It agrees with the exact
function at Chebyshev's points, which comes close to the least greatest error; the coefficients are rounded to the type
after that.
test_log_prob.py compares them with what the reference and the specification have.
"""

import mpmath
from exponential import float32


def exact(z):
    """The polynomial's value: (log((1 + s) / (1 - s)) / s - 2) / z."""
    s = mpmath.sqrt(z)
    return (mpmath.log((1 + s) / (1 - s)) / s - 2) / z


def constants(round_to, count):
    """The coefficients for one type, the constant first, and the greatest relative error of log(1 + f)."""
    with mpmath.workdps(60):
        end = ((mpmath.sqrt(2) - 1) / (mpmath.sqrt(2) + 1)) ** 2
        points = [end * (1 + mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count))) / 2 for i in range(count)]
        found = mpmath.lu_solve(mpmath.matrix([[z**j for j in range(count)] for z in points]), [*map(exact, points)])
        coefficients = tuple(map(round_to, found))
        samples = [end * (mpmath.mpf(i) / 400) ** 2 for i in range(1, 401)]
        errors = [(2 + mpmath.polyval(coefficients[::-1], z) * z) / (2 + exact(z) * z) - 1 for z in samples]
        return {"logarithm": coefficients, "error": float(max(map(abs, errors)))}


#: How a number is rounded to the type, and how many coefficients.
TYPES = {"float32": (float32, 3), "float64": (float, 7)}


def main():
    for name, how in TYPES.items():
        found = constants(*how)
        print(f"{name}: the polynomial's relative error is at most {found['error']:.2g}")
        for number in found["logarithm"]:
            print(f"    {number.hex():25} {number!r}")


if __name__ == "__main__":
    main()
