"""Computes the constants of the specification's exponential (docs/spec.md, section 10), and prints them.

    python tests/exponential.py

The polynomial has the least greatest relative error (found by Remez' exchange, in decimal numbers of 50 digits), with
its first three coefficients given as 1, 1 and 1/2; the others are rounded to the type after that. ln 2 is the sum of a
number whose product with every k has no more bits than the type, and of the rest. test_activations.py compares all of
it with what the reference and C have.
"""

import math
import struct
from decimal import Decimal, getcontext

getcontext().prec = 50

LN2 = Decimal(2).ln()
#: The greatest |r|: half of ln 2, and a little more, because k is the rounded quotient, which is rounded itself.
REACH = LN2 / 2 * (1 + Decimal(2) ** -12)
#: Where errors are looked at, the greatest first; not at 0, where the error is 0.
POINTS = [REACH * step / 1000 for step in range(1000, -1001, -1) if step]
EXPONENTIAL = {r: r.exp() for r in POINTS}
GIVEN = [Decimal(1), Decimal(1), Decimal("0.5")]


def float32(value):
    """A number rounded to float32, as a float."""
    return struct.unpack("f", struct.pack("f", float(value)))[0]


def solved(rows, values):
    """The unknowns of linear equations, by elimination."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    size = len(table)
    for i in range(size):
        best = max(range(i, size), key=lambda k: abs(table[k][i]))
        table[i], table[best] = table[best], table[i]
        for k in range(i + 1, size):
            factor = table[k][i] / table[i][i]
            table[k] = [a - factor * b for a, b in zip(table[k], table[i], strict=True)]
    unknowns = [Decimal(0)] * size
    for i in reversed(range(size)):
        known = sum(table[i][k] * unknowns[k] for k in range(i + 1, size))
        unknowns[i] = (table[i][size] - known) / table[i][i]
    return unknowns


def relative_error(coefficients, r):
    return sum(c * r**k for k, c in enumerate(coefficients)) / EXPONENTIAL[r] - 1


def minimax(degree):
    """The coefficients of the polynomial of that degree, the constant first."""
    count = degree + 1 - len(GIVEN)
    places = [round((len(POINTS) - 1) * (1 - math.cos(math.pi * i / count)) / 2) for i in range(count + 1)]
    extremes, found = [POINTS[place] for place in places], []
    while True:
        rows = [[r ** (3 + j) / EXPONENTIAL[r] for j in range(count)] + [(-1) ** i] for i, r in enumerate(extremes)]
        found = [*GIVEN, *solved(rows, [-relative_error(GIVEN, r) for r in extremes])[:-1]]
        errors = {r: relative_error(found, r) for r in POINTS}
        next_extremes = []
        for r in POINTS:  # the greatest error between two changes of its sign
            if not next_extremes or (errors[r] > 0) != (errors[next_extremes[-1]] > 0):
                next_extremes.append(r)
            elif abs(errors[r]) > abs(errors[next_extremes[-1]]):
                next_extremes[-1] = r
        while len(next_extremes) > count + 1:
            at = 0 if abs(errors[next_extremes[0]]) < abs(errors[next_extremes[-1]]) else -1
            del next_extremes[at]
        if next_extremes == extremes:
            return found
        extremes = next_extremes


def constants(round_to, degree, high_bits):
    """The constants for one type: those of the polynomial from 1/2 on, log2 e, and both parts of ln 2."""
    coefficients = [round_to(c) for c in minimax(degree)]
    high = Decimal(math.floor(LN2 * 2**high_bits)) / 2**high_bits
    return {
        "coefficients": tuple(coefficients[2:]),
        "log2_e": round_to(1 / LN2),
        "ln2_high": float(high),
        "ln2_low": round_to(LN2 - high),
        "error": float(max(abs(relative_error(map(Decimal, coefficients), r)) for r in POINTS)),
    }


#: How a number is rounded to the type, the polynomial's degree, and the bits of the first part of ln 2: k has 8 or 11.
TYPES = {"float32": (float32, 7, 16), "float64": (float, 13, 42)}


def main():
    for name, how in TYPES.items():
        found = constants(*how)
        print(f"{name}: the polynomial's relative error is at most {found.pop('error'):.2g}")
        for constant, value in found.items():
            for number in value if isinstance(value, tuple) else (value,):
                print(f"    {constant:12} {number.hex():25} {number!r}")


if __name__ == "__main__":
    main()
