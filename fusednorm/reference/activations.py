"""Gates in plain torch operations: docs/spec.md, section 10. Every backend must return these bits.

Where a docstring says "in the accumulator type", a function takes float32 or float64, and computes in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from fusednorm.calls.call import GateSteps, accumulator
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.calls.function_constants import NORMALS, SCHEMES, TANGENTS
from fusednorm.reference.norm import at_least, before_integers, constant, rounded, widened, within

if TYPE_CHECKING:
    from torch import Tensor

#: From 2 * sqrt(2 / pi) * (z + 0.044715 * z^3), the argument of the sigmoid in gelu_tanh, and from its derivative.
OUTER, INNER, SLOPE = 1.5957691216057308, 0.044715, 0.134145
#: Beyond it a gelu_tanh is z or 0, and its derivative 1 or 0.
FLAT = 64.0


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
    """The function's value and its derivative; both can be differentiated again."""
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
