"""Gates in Triton: their functions as docs/spec.md, section 10, defines them, and the kernels of gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.numbers import narrowed, quotient, rows_at, widened
from fusednorm.backends.triton.kernels.tiles import inside_of, loaded, store
from fusednorm.calls.function_constants import NORMALS, SCHEMES

# Kernels take numbers of modules where these are constants of Triton's.
_F32, _F64 = SCHEMES[torch.float32], SCHEMES[torch.float64]
ROUNDER_F32, ROUNDER_F64 = tl.constexpr(_F32.rounder), tl.constexpr(_F64.rounder)
LOG2_E_F32, LOG2_E_F64 = tl.constexpr(_F32.log2_e), tl.constexpr(_F64.log2_e)
LN2_HIGH_F32, LN2_HIGH_F64 = tl.constexpr(_F32.ln2_high), tl.constexpr(_F64.ln2_high)
LN2_LOW_F32, LN2_LOW_F64 = tl.constexpr(_F32.ln2_low), tl.constexpr(_F64.ln2_low)
EXPONENTIAL_F32, EXPONENTIAL_F64 = tl.constexpr(_F32.coefficients), tl.constexpr(_F64.coefficients)
_F32, _F64 = NORMALS[torch.float32], NORMALS[torch.float64]
REACH_F32, REACH_F64 = tl.constexpr(_F32.reach), tl.constexpr(_F64.reach)
DENSITY_F32, DENSITY_F64 = tl.constexpr(_F32.density), tl.constexpr(_F64.density)
NUMERATOR_F32, NUMERATOR_F64 = tl.constexpr(_F32.numerator), tl.constexpr(_F64.numerator)
DENOMINATOR_F32, DENOMINATOR_F64 = tl.constexpr(_F32.denominator), tl.constexpr(_F64.denominator)


@triton.jit
def constant(like, number: tl.constexpr, A: tl.constexpr):
    """A number for each element of a tensor."""
    return tl.full(like.shape, number, A)


@triton.jit
def no_less(value, least: tl.constexpr, A: tl.constexpr):
    """The greater one; a NaN stays."""
    return tl.where(value < constant(value, least, A), constant(value, least, A), value)


@triton.jit
def no_more(value, most: tl.constexpr, A: tl.constexpr):
    """The smaller one; a NaN stays."""
    return tl.where(value > constant(value, most, A), constant(value, most, A), value)


@triton.jit
def pair(r, even: tl.constexpr, odd: tl.constexpr, A: tl.constexpr):
    """Two terms of the polynomial."""
    return constant(r, odd, A) * r + constant(r, even, A)


@triton.constexpr_function
def many(coefficients):
    """Their number."""
    return len(coefficients)


@triton.constexpr_function
def one(coefficients, place):
    """One of them."""
    return coefficients[place]


@triton.jit
def polynomial(x, square, OF_F32: tl.constexpr, OF_F64: tl.constexpr, A: tl.constexpr):
    """A polynomial of x, its coefficients from the constant on: Horner's rule for pairs of terms."""
    C: tl.constexpr = OF_F64 if A == tl.float64 else OF_F32
    COUNT: tl.constexpr = many(C)
    c = constant(x, one(C, COUNT - 1), A) if COUNT % 2 else pair(x, one(C, COUNT - 2), one(C, COUNT - 1), A)
    for i in tl.static_range(4 - COUNT % 2, COUNT + 1, 2):
        c = c * square + pair(x, one(C, COUNT - i), one(C, COUNT - i + 1), A)
    return c


@triton.jit
def exponential(t, A: tl.constexpr):
    """exp(t) as a number near 1, and the exponent of 2 that it is multiplied with, plus twice the bias of exponents."""
    if A == tl.float64:
        shifted = t * constant(t, LOG2_E_F64, A) + constant(t, ROUNDER_F64, A)
        k = shifted - constant(t, ROUNDER_F64, A)
        r = (t - k * constant(t, LN2_HIGH_F64, A)) - k * constant(t, LN2_LOW_F64, A)
        exponent = shifted.to(tl.int64, bitcast=True) - (0x4338000000000000 - 2046)
    else:
        shifted = t * constant(t, LOG2_E_F32, A) + constant(t, ROUNDER_F32, A)
        k = shifted - constant(t, ROUNDER_F32, A)
        r = (t - k * constant(t, LN2_HIGH_F32, A)) - k * constant(t, LN2_LOW_F32, A)
        exponent = shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 254)
    q = r * r
    c = polynomial(r, q, EXPONENTIAL_F32, EXPONENTIAL_F64, A)
    return c * q + r + constant(t, 1.0, A), exponent


@triton.jit
def power(exponent, A: tl.constexpr):
    """2 to an exponent that the bias has been added to."""
    if A == tl.float64:
        return (exponent << 52).to(tl.float64, bitcast=True)
    else:
        return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_by(value, p, exponent, A: tl.constexpr):
    """value * exp(t). The last product alone may be subnormal."""
    half = exponent >> 1
    return value * p * power(half, A) * power(exponent - half, A)


@triton.jit
def gelu(z, A: tl.constexpr):
    """``z * Phi(z)``, and its derivative."""
    a = tl.abs(z)
    square = a * a
    p, exponent = exponential(no_less(square * constant(z, -0.5, A), -708.0 if A == tl.float64 else -87.0, A), A)
    e = p * power(exponent - (1023 if A == tl.float64 else 127), A)  # a normal number
    # Phi(-a) * exp(a^2 / 2) is the quotient of these.
    numerator = polynomial(a, square, NUMERATOR_F32, NUMERATOR_F64, A)
    q = quotient(numerator, polynomial(a, square, DENOMINATOR_F32, DENOMINATOR_F64, A), A)
    zero = constant(z, 0.0, A)
    outside = a > constant(z, REACH_F64 if A == tl.float64 else REACH_F32, A)
    density = constant(z, DENSITY_F64 if A == tl.float64 else DENSITY_F32, A)
    tail = tl.where(outside, zero, (q - a * density) * e)
    slope = tl.where(z < zero, tail, constant(z, 1.0, A) - tail)
    return tl.where(z < zero, z - z, z) - tl.where(outside, zero, a * q * e), slope


@triton.jit
def relu2(z, A: tl.constexpr):
    """The square of z, or 0 for a negative z; and its derivative."""
    r = no_less(z, 0.0, A)
    return r * r, tl.where(z > constant(z, 0.0, A), z + z, constant(z, 0.0, A))


@triton.jit
def argument(z, ACTIVATION: tl.constexpr, A: tl.constexpr, ALPHA: tl.constexpr = None):
    """The number that the function passes to the sigmoid; "swish" passes ``alpha * z``."""
    if ACTIVATION == "swish":
        return z * constant(z, ALPHA, A)
    elif ACTIVATION == "gelu_tanh":
        return (z + z * z * z * constant(z, 0.044715, A)) * constant(z, 1.5957691216057308, A)
    else:
        return z


@triton.jit
def product(z, ACTIVATION: tl.constexpr, A: tl.constexpr, ALPHA: tl.constexpr = None):
    """The function of a gate, whether its argument is low, and exp(-v); exp(v) where the argument v is low."""
    v = argument(z, ACTIVATION, A, ALPHA)
    low = v < constant(v, -680.0 if A == tl.float64 else -80.0, A)
    LEAST: tl.constexpr = -760.0 if A == tl.float64 else -110.0
    p, exponent = exponential(no_less(tl.where(low, v, -v), LEAST, A), A)
    one = constant(v, 1.0, A)
    e = scaled_by(one, p, exponent, A)
    factor = one if ACTIVATION == "sigmoid" else z
    # Not factor * e: where e is subnormal, it has lost bits. factor - factor is 0, or NaN for an infinity.
    of_low = scaled_by(no_less(factor, LEAST, A), p, exponent, A) + (factor - factor)
    return quotient(tl.where(low, of_low, factor), one + e, A), low, e


@triton.jit
def activated(z, ACTIVATION: tl.constexpr, A: tl.constexpr):
    """The function of a gate."""
    if ACTIVATION == "gelu":
        f, _ = gelu(z, A)
    elif ACTIVATION == "relu2":
        f, _ = relu2(z, A)
    else:
        f, _, _ = product(z, ACTIVATION, A)
    return f


@triton.jit
def activated_and_slope(z, ACTIVATION: tl.constexpr, A: tl.constexpr, ALPHA: tl.constexpr = None):
    """The function of a gate, and its derivative."""
    if ACTIVATION == "gelu":
        return gelu(z, A)
    elif ACTIVATION == "relu2":
        return relu2(z, A)
    else:
        return product_and_slope(z, ACTIVATION, A, ALPHA)


@triton.jit
def product_and_slope(z, ACTIVATION: tl.constexpr, A: tl.constexpr, ALPHA: tl.constexpr = None):
    """The same of the functions that multiply by a sigmoid."""
    f, low, e = product(z, ACTIVATION, A, ALPHA)
    one = constant(z, 1.0, A)
    s = quotient(tl.where(low, e, one), one + e, A)
    slope = f * tl.where(low, one, e * s)
    if ACTIVATION == "gelu_tanh":
        # Beyond these numbers the function is z or 0, and the square of the argument would be infinite.
        m = no_less(z, -64.0, A)
        m = tl.where(m > constant(m, 64.0, A), constant(m, 64.0, A), m)
        slope = slope * ((m * m * constant(m, 0.134145, A) + one) * constant(m, 1.5957691216057308, A))
    if ACTIVATION == "swish":
        slope = slope * constant(z, ALPHA, A)
    if ACTIVATION != "sigmoid":
        slope = s + slope
    return f, slope


@triton.jit
def between(value, TYPE: tl.constexpr, A: tl.constexpr):
    """Values rounded to the type that passes between a function and a product; None: not rounded."""
    if TYPE is not None:
        value = widened(narrowed(value, TYPE), A)
    return value


@triton.jit
def activated_in_steps(z, STEPS: tl.constexpr, BETWEEN: tl.constexpr, A: tl.constexpr):
    """The function of a gate with optional steps (``StepsOfGate``), rounded but not limited, and its derivative."""
    if STEPS.clamp == "before":
        z = no_more(z, STEPS.z_limit, A)
    if STEPS.function == "sigmoid":
        alpha = constant(z, STEPS.alpha, A)
        s = between(activated(between(z * alpha, BETWEEN, A), "sigmoid", A), BETWEEN, A)
        f = between(z * s, BETWEEN, A)
        return f, s + f * (constant(z, 1.0, A) - s) * alpha
    else:
        FUNCTION: tl.constexpr = STEPS.function
        f, slope = activated_and_slope(z, FUNCTION, A, STEPS.alpha)
        return between(f, BETWEEN, A), slope


@triton.jit
def value_within(f, STEPS: tl.constexpr, A: tl.constexpr):
    """The function's value within its limit."""
    return no_more(f, STEPS.value_limit, A) if STEPS.clamp == "after" else f


@triton.jit
def limited_and_added(y, STEPS: tl.constexpr, BETWEEN: tl.constexpr, A: tl.constexpr):
    """The rows that are multiplied: y within its limits, plus the offset."""
    if STEPS.clamp != "":
        least = constant(y, STEPS.y_limit, A) * constant(y, -1.0, A)
        y = no_more(y, STEPS.y_limit, A)
        y = tl.where(y < least, least, y)
    if STEPS.up_offset != 0:
        y = y + constant(y, STEPS.up_offset, A)
        if STEPS.round_steps:
            y = between(y, BETWEEN, A)
    return y


@triton.jit
def products_in_steps(y, z, ACTIVATION: tl.constexpr, STEPS: tl.constexpr, BETWEEN: tl.constexpr, A: tl.constexpr):
    """y times the function of z, with optional steps if there are any."""
    if STEPS is None:
        return y * between(activated(z, ACTIVATION, A), BETWEEN, A)
    else:
        f, _ = activated_in_steps(z, STEPS, BETWEEN, A)
        return limited_and_added(y, STEPS, BETWEEN, A) * value_within(f, STEPS, A)


@triton.jit
def gradients_in_steps(d, y, z, ACTIVATION: tl.constexpr, STEPS: tl.constexpr, BETWEEN: tl.constexpr, A: tl.constexpr):
    """The gradients of y and z. Where a value is beyond its limit, or a NaN, it has none: 0."""
    if STEPS is None:
        f, slope = activated_and_slope(z, ACTIVATION, A)
        return d * between(f, BETWEEN, A), between(d * y, BETWEEN, A) * slope
    else:
        f, slope = activated_in_steps(z, STEPS, BETWEEN, A)
        dy = d * value_within(f, STEPS, A)
        dz = between(d * limited_and_added(y, STEPS, BETWEEN, A), BETWEEN, A)
        zero = constant(z, 0.0, A)
        if STEPS.clamp == "after":
            dz = tl.where(f <= constant(z, STEPS.value_limit, A), dz, zero)
        dz = dz * slope
        if STEPS.clamp == "before":
            dz = tl.where(z <= constant(z, STEPS.z_limit, A), dz, zero)
        if STEPS.clamp != "":
            dy = tl.where(tl.abs(y) <= constant(y, STEPS.y_limit, A), dy, zero)
        return dy, dz


@triton.jit
def gated(values, z_rows, column, inside, ACTIVATION: tl.constexpr, A: tl.constexpr):
    """Values times the function of the gates of these columns."""
    return values * activated(loaded(z_rows, column, inside, A), ACTIVATION, A)


@triton.jit
def place_of_tile(N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The rows and the columns that a program takes: TILE columns of ROWS rows."""
    TILES: tl.constexpr = (N + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)[None, :]


@triton.jit
def y_and_z_in_turns(
    z, z_stride, z_jump, inner, rows, N: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """A tile of y and of z, whose elements take turns in memory, z's before y's."""
    row, column = place_of_tile(2 * N, ROWS, 2 * TILE)
    inside = inside_of(row, column, rows, 2 * N, ROWS, 2 * TILE)
    pairs = loaded(rows_at(z, row, z_stride, z_jump, inner), column, inside, A)
    of_z, of_y = tl.split(tl.reshape(pairs, (ROWS, TILE, 2)))
    return of_y, of_z


@triton.jit
def store_in_turns(
    of_y, of_z, dz, dz_stride, dz_jump, inner, rows, N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Stores a tile of two gradients so."""
    row, column = place_of_tile(2 * N, ROWS, 2 * TILE)
    inside = inside_of(row, column, rows, 2 * N, ROWS, 2 * TILE)
    pairs = tl.reshape(tl.join(of_z, of_y), (ROWS, 2 * TILE))
    store(pairs, rows_at(dz, row, dz_stride, dz_jump, inner), column, inside)


@triton.jit
def gate_tile(
    y,
    z,
    out,
    y_stride,
    z_stride,
    out_stride,
    inner,
    y_jump,
    z_jump,
    out_jump,
    rows,
    N: tl.constexpr,
    A: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    IN_TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows times a function of other rows; where y is None, the function alone, or y takes turns with z."""
    row, column = place_of_tile(N, ROWS, TILE)
    inside = inside_of(row, column, rows, N, ROWS, TILE)
    if IN_TURNS:
        factors, gates = y_and_z_in_turns(z, z_stride, z_jump, inner, rows, N, A, ROWS, TILE)
        values = products_in_steps(factors, gates, ACTIVATION, STEPS, BETWEEN, A)
    else:
        gates = loaded(rows_at(z, row, z_stride, z_jump, inner), column, inside, A)
        if STEPS is not None:
            factors = loaded(rows_at(y, row, y_stride, y_jump, inner), column, inside, A)
            values = products_in_steps(factors, gates, ACTIVATION, STEPS, BETWEEN, A)
        else:
            values = between(activated(gates, ACTIVATION, A), BETWEEN, A)
            if y is not None:
                values = loaded(rows_at(y, row, y_stride, y_jump, inner), column, inside, A) * values
    store(values, rows_at(out, row, out_stride, out_jump, inner), column, inside)


@triton.jit
def gate_backward_tile(
    d,
    y,
    z,
    dy,
    dz,
    d_stride,
    y_stride,
    z_stride,
    dy_stride,
    dz_stride,
    inner,
    d_jump,
    y_jump,
    z_jump,
    dy_jump,
    dz_jump,
    rows,
    N: tl.constexpr,
    A: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    IN_TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The gradients of rows times a function of other rows; y and dy are None where they take turns with z and dz."""
    row, column = place_of_tile(N, ROWS, TILE)
    inside = inside_of(row, column, rows, N, ROWS, TILE)
    if IN_TURNS:
        incoming = loaded(rows_at(d, row, d_stride, d_jump, inner), column, inside, A)
        factors, gates = y_and_z_in_turns(z, z_stride, z_jump, inner, rows, N, A, ROWS, TILE)
        of_y, of_z = gradients_in_steps(incoming, factors, gates, ACTIVATION, STEPS, BETWEEN, A)
        store_in_turns(of_y, of_z, dz, dz_stride, dz_jump, inner, rows, N, ROWS, TILE)
    else:
        gates = loaded(rows_at(z, row, z_stride, z_jump, inner), column, inside, A)
        incoming = loaded(rows_at(d, row, d_stride, d_jump, inner), column, inside, A)
        if STEPS is not None:
            factors = loaded(rows_at(y, row, y_stride, y_jump, inner), column, inside, A)
            of_y, of_z = gradients_in_steps(incoming, factors, gates, ACTIVATION, STEPS, BETWEEN, A)
            store(of_z, rows_at(dz, row, dz_stride, dz_jump, inner), column, inside)
            store(of_y, rows_at(dy, row, dy_stride, dy_jump, inner), column, inside)
        else:
            f, slope = activated_and_slope(gates, ACTIVATION, A)
            if dz is not None:
                of_f = incoming
                if y is not None:
                    of_f = incoming * loaded(rows_at(y, row, y_stride, y_jump, inner), column, inside, A)
                found = narrowed(between(of_f, BETWEEN, A) * slope, dz.dtype.element_ty)
                tl.store(rows_at(dz, row, dz_stride, dz_jump, inner) + column, found, mask=inside)
            if dy is not None:
                found = narrowed(incoming * between(f, BETWEEN, A), dy.dtype.element_ty)
                tl.store(rows_at(dy, row, dy_stride, dy_jump, inner) + column, found, mask=inside)
