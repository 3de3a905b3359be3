"""Gates in plain torch operations: docs/spec.md, section 10. Every backend must return these bits.

Where a docstring says "in the accumulator type", a function takes float32 or float64, and computes in it.
``tests/exponential.py``, ``tests/gaussian.py`` and ``tests/tangent.py`` compute the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from fusednorm.calls.call import GateSteps, accumulator
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.reference.norm import at_least, before_integers, constant, rounded, widened, within

if TYPE_CHECKING:
    from torch import Tensor

#: From 2 * sqrt(2 / pi) * (z + 0.044715 * z^3), the argument of the sigmoid in gelu_tanh, and from its derivative.
OUTER, INNER, SLOPE = 1.5957691216057308, 0.044715, 0.134145
#: Beyond it a gelu_tanh is z or 0, and its derivative 1 or 0.
FLAT = 64.0


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


def polynomial(x: Tensor, square: Tensor, coefficients: Sequence[float]) -> Tensor:
    """A polynomial of x, its coefficients from the constant on: Horner's rule for pairs of terms."""
    pairs = [x * odd + even for even, odd in zip(coefficients[::2], coefficients[1::2], strict=False)]
    p: Any = coefficients[-1] if len(coefficients) % 2 else pairs.pop()
    for pair in reversed(pairs):
        p = square * p + pair
    return cast("Tensor", p)


def _exponential(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three factors of exp(t), which are multiplied from left to right."""
    scheme = SCHEMES[t.dtype]
    t = before_integers(t, "activated_and_slope, softcap or Exp")
    t = within(t, scheme.least, scheme.greatest)
    shifted = t * scheme.log2_e + scheme.rounder
    k = shifted - scheme.rounder
    r = (t - k * scheme.ln2_high) - k * scheme.ln2_low
    square = r * r
    p = polynomial(r, square, scheme.coefficients) * square + r + 1
    whole = shifted.view(scheme.whole) - torch.full_like(shifted, scheme.rounder).view(scheme.whole) + 2 * scheme.bias
    half = whole >> 1
    first, second = ((part << scheme.mantissa).view(t.dtype) for part in (half, whole - half))
    return p, first, second


def exponential(t: Tensor) -> Tensor:
    """exp(t) in the accumulator type."""
    p, first, second = _exponential(t)
    return p * first * second


def _product(z: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z * sigmoid(v), whether v is low, and exp(-v); exp(v) where v is low."""
    scheme = SCHEMES[v.dtype]
    low = v < scheme.low
    p, first, second = _exponential(torch.where(low, v, -v))
    e = p * first * second
    # Not z * e: where e is subnormal, it has lost bits. z - z is 0, or NaN for an infinity.
    n = torch.where(low, at_least(z, scheme.least) * p * first * second + (z - z), z)
    return n / (1 + e), low, e


class Product(torch.autograd.Function):
    """(z, v) -> (z * sigmoid(v), sigmoid(v), 1 - sigmoid(v)), of which every derivative consists."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both are of the accumulator type, and of one shape."""
        f, low, e = _product(z, v)
        s = torch.where(low, e, 1) / (1 + e)
        return f, s, torch.where(low, 1, e * s)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keeps the outputs."""
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, df: Tensor, ds: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of z and v."""
        f, s, c = ctx.saved_tensors
        return df * s, df * f * c + (ds - dc) * s * c

    @staticmethod
    def jvp(ctx: Any, z_tangent: Tensor, v_tangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tangents."""
        with outer_levels():
            f, s, c = primals(ctx)
            slope = s * c * v_tangent
            return z_tangent * s + f * c * v_tangent, slope, -slope


def _argument(z: Tensor) -> Tensor:
    """The number that gelu_tanh passes to the sigmoid."""
    return (z + z * z * z * INNER) * OUTER


def _gelu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z * Phi(z), its derivative, and the density of the normal distribution at z."""
    normal, a = NORMALS[z.dtype], z.abs()
    square = a * a
    outside, e = a > normal.reach, exponential(square * -0.5)
    # Phi(-a) / e
    q = polynomial(a, square, normal.numerator) / polynomial(a, square, normal.denominator)
    tail = torch.where(outside, 0, a * q * e)
    slope = torch.where(outside, 0, (q - a * normal.density) * e)
    below = z < 0
    return torch.where(below, z - z, z) - tail, torch.where(below, slope, 1 - slope), normal.density * e


class Gelu(torch.autograd.Function):
    """z -> (gelu(z), its derivative, the density at z), of which every derivative consists."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """It is of the accumulator type."""
        return _gelu(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keeps z and what derivatives need."""
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, df: Tensor, ds: Tensor, dp: Tensor) -> Tensor:
        """The gradient of z."""
        z, slope, density = ctx.saved_tensors
        gradient: Tensor = df * slope + (ds * (2 - z * z) - dp * z) * density
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tangents."""
        with outer_levels():
            z, slope, density = primals(ctx)
            d = density * tangent
            return slope * tangent, (2 - z * z) * d, -z * d


def _tanh(x: Tensor) -> Tensor:
    """tanh(x) in the accumulator type."""
    scheme, a = TANGENTS[x.dtype], x.abs()
    t = a * a
    low = polynomial(t, t * t, scheme.tangent) * t * a + a
    high = 1 - 2 / (exponential(2 * within(a, 0, scheme.flat)) + 1)
    return torch.copysign(torch.where(a < 0.75, low, high), x)


class Tanh(torch.autograd.Function):
    """tanh, of which every derivative consists."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """It is of the accumulator type."""
        return _tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keeps the output."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        """The gradient of x."""
        (th,) = ctx.saved_tensors
        return d * _slope_of_tanh(th)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """The tangent."""
        with outer_levels():
            (th,) = primals(ctx)
            return tangent * _slope_of_tanh(th)


def _slope_of_tanh(th: Tensor) -> Tensor:
    return (1 - th) * (1 + th)


def softcap(z: Tensor, cap: float, between: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """cap * tanh(z / cap) in the accumulator type, and its derivative; both can be differentiated again.

    ``between``: the dtype that the quotient, the hyperbolic tangent and the product are rounded to, or None.
    """
    c = constant(cap, z)
    th = _rounded_step(Tanh.apply(_rounded_step(z / c, between)), between)  # type: ignore[no-untyped-call]
    return _rounded_step(c * th, between), _slope_of_tanh(th)


def activated(z: Tensor, activation: str) -> Tensor:
    """A gate through its function, in the accumulator type."""
    if activation == "gelu":
        return _gelu(z)[0]
    if activation == "relu2":
        r = torch.where(z < 0, 0, z)
        return r * r
    if activation == "sigmoid":
        return _product(torch.ones_like(z), z)[0]
    return _product(z, z if activation == "silu" else _argument(z))[0]


def activated_and_slope(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The same, and the function's derivative there; both can be differentiated again."""
    if activation == "gelu":
        f, slope, _ = Gelu.apply(z)  # type: ignore[no-untyped-call]
        return f, slope
    if activation == "relu2":
        return activated(z, "relu2"), torch.where(z > 0, z + z, 0)
    if activation == "sigmoid":
        f, _, c = Product.apply(torch.ones_like(z), z)  # type: ignore[no-untyped-call]
        return f, f * c
    f, s, c = Product.apply(z, z if activation == "silu" else _argument(z))  # type: ignore[no-untyped-call]
    if activation == "silu":
        return f, s + f * c
    inner = within(z, -FLAT, FLAT)
    return f, s + f * c * ((inner * inner * SLOPE + 1) * OUTER)


def _no_more(value: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """Values, and a limit that a dtype has, in place of those above it."""
    most = constant(limit, value).to(dtype).to(value.dtype)
    return torch.where(value > most, most, value)


def _rounded_step(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None else rounded(value, dtype).to(value.dtype)


def _swish(g: Tensor, alpha: float, between: torch.dtype | None, round_steps: bool) -> tuple[Tensor, Tensor]:
    """g * sigmoid(alpha * g), and its derivative; both can be differentiated again."""
    if not round_steps:
        f, s, c = Product.apply(g, g * alpha)  # type: ignore[no-untyped-call]
        return f, s + f * c * alpha
    s = _rounded_step(activated_and_slope(_rounded_step(g * alpha, between), "sigmoid")[0], between)
    f = _rounded_step(g * s, between)
    return f, s + f * (1 - s) * alpha


class _Factors(NamedTuple):
    """The factors of a gate's product, in the accumulator type."""

    #: None where the function's value is the result.
    u: Tensor | None
    a: Tensor
    #: The derivative of the function's value; None where it is not asked for.
    slope: Tensor | None
    #: Whether y, z and the function's value are within their limits; None: they have none.
    u_inside: Tensor | None
    z_inside: Tensor | None
    a_inside: Tensor | None


def _factors(
    y: Tensor | None, z: Tensor, activation: str, between: torch.dtype | None, steps: GateSteps, derived: bool
) -> _Factors:
    """``derived``: whether the derivative is asked for."""
    limit = steps.limit
    wide = accumulator(z.dtype if y is None else torch.promote_types(y.dtype, z.dtype))
    g, u = widened(z, wide), None if y is None else widened(y, wide)
    if activation == "softcap":
        return _Factors(None, *softcap(g, limit, between), None, None, None)
    slope = u_inside = z_inside = a_inside = None
    if limit and steps.clamp == "before":
        limited = _no_more(g, limit, z.dtype)
        g, z_inside = limited, g <= limited
    if steps.alpha != 1:
        a, slope = _swish(g, steps.alpha, between, steps.round_steps)
    elif derived:
        a, slope = activated_and_slope(g, activation)
    else:
        a = activated(g, activation)
    a = _rounded_step(a, between)
    if limit and steps.clamp == "after":
        limited = _no_more(a, limit, between or wide)
        a, a_inside = limited, a <= limited
    if u is not None and y is not None and limit:
        limited = -_no_more(-_no_more(u, limit, y.dtype), limit, y.dtype)
        u, u_inside = limited, u == limited
    if u is not None and steps.up_offset:
        u = _rounded_step(u + steps.up_offset, between if steps.round_steps else None)
    return _Factors(u, a, slope, u_inside, z_inside, a_inside)


def gated(
    y: Tensor | None,
    z: Tensor,
    activation: str,
    between: torch.dtype | None,
    out_dtype: torch.dtype,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    round_steps: bool = False,
) -> Tensor:
    """y times the gate z, [..., N], as the specification writes it; without y, the function of z.

    Args:
        y: [..., N], float16, bfloat16, float32 or float64; or None.
        z: [..., N], any of these dtypes.
        activation: the gate's function, of :data:`ACTIVATIONS`; or without y "softcap".
        between: the dtype that the gate is rounded to before it is multiplied, or None.
        out_dtype: the dtype of the result.
        limit: as in :class:`fusednorm.calls.call.GateSteps`.
        alpha: the same.
        up_offset: the same.
        clamp: the same.
        round_steps: the same.
    """
    steps = GateSteps(limit, alpha, up_offset, clamp, round_steps)
    of = _factors(y, z, activation, between, steps, derived=False)
    return rounded(of.a if of.u is None else of.u * of.a, out_dtype)


def gate_gradients(
    d: Tensor,
    y: Tensor | None,
    z: Tensor,
    activation: str,
    between: torch.dtype | None,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    round_steps: bool = False,
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of y and z of :func:`gated`, as far as they are needed; d is the result's."""
    steps = GateSteps(limit, alpha, up_offset, clamp, round_steps)
    of = _factors(y, z, activation, between, steps, derived=True)
    d = da = d.to(of.a.dtype)
    dy = dz = None
    if y is not None and of.u is not None:
        da = _rounded_step(d * of.u, between)
        dy = rounded(_inside(d * of.a, of.u_inside), y.dtype) if needs[0] else None
    if needs[1]:
        dz = rounded(_inside(_inside(da, of.a_inside) * cast("Tensor", of.slope), of.z_inside), z.dtype)
    return dy, dz


def _inside(gradient: Tensor, inside: Tensor | None) -> Tensor:
    return gradient if inside is None else torch.where(inside, gradient, 0)
