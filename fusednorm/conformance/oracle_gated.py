"""A second implementation of gates, in NumPy, written from docs/spec.md alone, to check the reference.

It shares no code with that file: whole numbers are found by np.rint, and powers of two multiplied by np.ldexp.
"""

import functools

import numpy as np
import torch

from fusednorm.conformance.oracle import _first_norm, _rounded, backward, forward, to_numpy

#: least, greatest, lowest, log2_e, ln2_high, ln2_low, and the coefficients from c2 on.
_CONSTANTS = {
    np.float32: (
        *(-110, 89, -80, "0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20"),
        ("0x1p-1", "0x1.55553cp-3", "0x1.5554f2p-5", "0x1.1136aep-7", "0x1.6d40a6p-10", "0x1.6c3104p-13"),
    ),
    np.float64: (
        *(-760, 710, -680, "0x1.71547652b82fep+0", "0x1.62e42fefa38p-1", "0x1.ef35793c7673p-45"),
        (
            *("0x1p-1", "0x1.5555555555556p-3", "0x1.5555555555557p-5", "0x1.1111111110e61p-7"),
            *("0x1.6c16c16c156cdp-10", "0x1.a01a01a183f68p-13", "0x1.a01a01ab4b9c3p-16", "0x1.71de34f283766p-19"),
            *("0x1.27e4d0cd3dd2bp-22", "0x1.ae7757c5bb063p-26", "0x1.1f849744516fbp-29", "0x1.4816247897b6bp-33"),
        ),
    ),
}

#: Of gelu: where it ends, 1 / sqrt(2 pi), and the coefficients of both polynomials, from the constant on.
_NORMAL = {
    np.float32: (
        *("0x1.a6p+3", "0x1.988454p-2"),
        ("0x1p-1", "0x1.bce64cp-2", "0x1.71644cp-3", "0x1.44dc48p-5", "0x1.040fb6p-8"),
        ("0x1p+0", "0x1.aab554p+0", "0x1.30cfa4p+0", "0x1.d8f9bp-2", "0x1.972ef6p-4", "0x1.45ef08p-7"),
    ),
    np.float64: (
        *("0x1.2dp+5", "0x1.9884533d43651p-2"),
        (
            *("0x1p-1", "0x1.a695cc614ce9fp-1", "0x1.59e28fbe180a6p-1", "0x1.6aae56a1f9583p-2"),
            *("0x1.0b370da0cdae9p-3", "0x1.1fc2ca64de9c0p-5", "0x1.ca0c9f44be687p-8", "0x1.0a57ff14494c5p-10"),
            *("0x1.b2bdfec1cf8f9p-14", "0x1.c4bf808326fd9p-18", "0x1.ce4cd6f3470cdp-23"),
        ),
        (
            *("0x1p+0", "0x1.396bfafff74e4p+1", "0x1.670454ae3ce44p+1", "0x1.fce9b81e3d8b3p+0"),
            *("0x1.f11d249f89feep-1", "0x1.60515c10d6ba0p-2", "0x1.72f2aa28f8122p-4", "0x1.23476878a0fbep-6"),
            *("0x1.500766f505f7fp-9", "0x1.1100054519b63p-12", "0x1.1bb7bfb21aaa4p-16", "0x1.21b4230e18e46p-21"),
        ),
    ),
}


#: Of tanh: from where on it is 1, and the coefficients of a polynomial of the square.
_TANGENT = {
    np.float32: (
        10,
        (
            *("-0x1.555554p-2", "0x1.111042p-3", "-0x1.b9d7aep-5", "0x1.622538p-6"),
            *("-0x1.03f99ap-7", "0x1.f4908ap-10"),
        ),
    ),
    np.float64: (
        20,
        (
            *("-0x1.5555555555555p-2", "0x1.111111111101fp-3", "-0x1.ba1ba1ba03fdep-5", "0x1.664f487b7c37ep-6"),
            *("-0x1.226e3434333f1p-7", "0x1.d6d397c6172ccp-9", "-0x1.7d9fdd51d36fap-10", "0x1.353280941795ap-11"),
            *("-0x1.f351c7b8d9d91p-13", "0x1.8b4d9f3447ab6p-14", "-0x1.215cdb73c8b35p-15", "0x1.51282042d0b9ap-17"),
            "-0x1.b87709c583a0fp-20",
        ),
    ),
}


class _Exponential:
    """exp of each element, apart as a number near 1 and a power of two."""

    def __init__(self, t):
        kind = t.dtype.type
        least, greatest, _, *constants, coefficients = _CONSTANTS[kind]
        log2_e, ln2_high, ln2_low = (kind(float.fromhex(text)) for text in constants)
        c = dict(enumerate((kind(float.fromhex(text)) for text in coefficients), 2))
        t = np.minimum(np.maximum(t, kind(least)), kind(greatest))  # which keep a NaN
        k = np.rint(t * log2_e)
        r = (t - k * ln2_high) - k * ln2_low
        q = r * r
        value = None
        for power in range(len(c), 1, -2):
            pair = c[power + 1] * r + c[power]
            value = pair if value is None else value * q + pair
        self.p = value * q + r + kind(1)
        self.power = np.nan_to_num(k).astype(np.int32)

    def times(self, z):
        return np.ldexp(z * self.p, self.power)


def _product(z, v):
    """z * sigmoid(v), sigmoid(v), and 1 - sigmoid(v)."""
    kind = v.dtype.type
    least, _, lowest, *_ = _CONSTANTS[kind]
    low, one = v < lowest, kind(1)
    exponential = _Exponential(np.where(low, v, -v))
    e = exponential.times(one)
    n = np.where(low, exponential.times(np.maximum(z, kind(least))) + (z - z), z)
    s = np.where(low, e, one) / (one + e)
    return n / (one + e), s, np.where(low, one, e * s)


def _horner(texts, a):
    """A polynomial of a by pairs of coefficients, each a multiple of the next even power."""
    c = [a.dtype.type(float.fromhex(text)) for text in texts]
    if len(c) % 2:
        value, rest = c[-1], c[:-1]
    else:
        value, rest = c[-1] * a + c[-2], c[:-2]
    while rest:
        *rest, even, odd = rest
        value = value * (a * a) + (odd * a + even)
    return value


def _gelu(z):
    kind = z.dtype.type
    reach, density, above, below = _NORMAL[kind]
    reach, density = (kind(float.fromhex(text)) for text in (reach, density))
    a = np.abs(z)
    q, e = _horner(above, a) / _horner(below, a), _Exponential(-(a * a * kind(0.5))).times(kind(1))
    tail, slope = (np.where(a > reach, kind(0), value) for value in (a * q * e, (q - a * density) * e))
    return np.where(z < 0, z - z, z) - tail, np.where(z < 0, slope, kind(1) - slope)


@np.errstate(all="ignore")
def activated(z, activation):
    """A function of z and its derivative."""
    kind = z.dtype.type
    if activation == "relu2":
        return np.square(np.where(z < 0, kind(0), z)), np.where(z > 0, z + z, kind(0))
    if activation == "gelu":
        return _gelu(z)
    if activation == "sigmoid":
        f, _, t = _product(np.ones_like(z), z)
        return f, f * t
    if activation == "silu":
        f, s, t = _product(z, z)
        return f, s + f * t
    g0, g1, g2 = kind(1.5957691216057308), kind(0.044715), kind(0.134145)
    f, s, t = _product(z, (z + z * z * z * g1) * g0)
    m = np.minimum(np.maximum(z, kind(-64)), kind(64))
    return f, s + f * t * ((m * m * g2 + kind(1)) * g0)


def _limited(x, limit, dtype):
    """x of a dtype, not above or not below a limit, and the limit, which is rounded to that dtype."""
    number = np.asarray(limit, np.float64 if dtype == torch.float64 else np.float32)
    most = _wide(_rounded(number, dtype), x.dtype.type)
    return np.where(x > most, most, x), np.where(x < -most, -most, x), most


def _swish(g, alpha, between):
    """g * sigmoid(alpha * g) and its derivative; ``between`` rounds each step, unless it is None."""
    kind = g.dtype.type
    alpha = kind(alpha)
    if between is None:
        f, s, t = _product(g, alpha * g)
        return f, s + (f * t) * alpha

    def step(value):
        return _wide(_rounded(value, between), kind)

    s, _ = activated(step(alpha * g), "sigmoid")
    s = step(s)
    f = step(g * s)
    return f, s + (f * (kind(1) - s)) * alpha


def _wide(tensor, kind):
    return to_numpy(tensor).astype(kind)


@np.errstate(all="ignore")
def gated(
    y,
    z,
    activation,
    between,
    out_dtype,
    d=None,
    *,
    limit=None,
    alpha=1.0,
    up_offset=0.0,
    clamp="before",
    round_steps=False,
):
    """The products, and with their gradient ``d`` also those of y and z, as tensors on the CPU.

    ``between``: the dtype that the function's value is rounded to, or None.
    """
    kind = np.float64 if torch.float64 in (y.dtype, z.dtype) else np.float32
    between = between or (torch.float64 if kind == np.float64 else torch.float32)
    limit = None if limit is None or np.isinf(limit) else limit
    g, u = _wide(z, kind), _wide(y, kind)
    z_passes = a_passes = y_passes = np.True_
    if limit is not None and clamp == "before":
        limited, _, most = _limited(g, limit, z.dtype)
        g, z_passes = limited, g <= most
    if alpha == 1:
        a, slope = activated(g, activation)
    else:
        a, slope = _swish(g, alpha, between if round_steps else None)
    a = _wide(_rounded(a, between), kind)
    if limit is not None and clamp == "after":
        limited, _, most = _limited(a, limit, between)
        a, a_passes = limited, a <= most
    if limit is not None:
        below, above, most = _limited(u, limit, y.dtype)
        u, y_passes = np.where(u > most, below, above), (u >= -most) & (u <= most)
    if up_offset:
        u = u + kind(up_offset)
        u = _wide(_rounded(u, between), kind) if round_steps else u
    out = _rounded(u * a, out_dtype)
    if d is None:
        return (out,)
    d = _wide(d, kind)
    da = np.where(a_passes, _wide(_rounded(d * u, between), kind), kind(0))
    dy, dz = np.where(y_passes, d * a, kind(0)), np.where(z_passes, da * slope, kind(0))
    return out, _rounded(dy, y.dtype), _rounded(dz, z.dtype)


def gate(leaves, incoming, activation="silu", out_dtype=None):
    """Outputs and gradients of the public function, as those of ``oracle.py``, but as tensors on the CPU."""
    y, z = leaves
    return gated(y, z, activation, None, out_dtype or y.dtype, *incoming)


def _and_mul(activation, leaves, incoming, between=None, **steps):
    z, up = leaves
    out, dup, dz = gated(up, z, activation, between or z.dtype, z.dtype, *incoming, **steps)
    return out, dz, dup


def _function(activation, leaves, incoming, out_dtype=None):
    (z,), (d,) = leaves, incoming
    kind = np.float64 if z.dtype == torch.float64 else np.float32
    f, slope = activated(_wide(z, kind), activation)
    with np.errstate(all="ignore"):
        return _rounded(f, out_dtype or z.dtype), _rounded(_wide(d, kind) * slope, z.dtype)


def _tanh(x):
    flat, texts = _TANGENT[x.dtype.type]
    one, two, a = x.dtype.type(1), x.dtype.type(2), np.abs(x)
    t = a * a
    low = (_horner(texts, t) * t) * a + a
    high = one - two / (_Exponential(two * np.minimum(a, x.dtype.type(flat))).times(one) + one)
    return np.copysign(np.where(a < 0.75, low, high), x)


@np.errstate(all="ignore")
def softcap(leaves, incoming, cap, round_steps=False, out_dtype=None):
    (x,), (d,) = leaves, incoming
    kind = np.float64 if x.dtype == torch.float64 else np.float32

    def step(value):
        return _wide(_rounded(value, x.dtype), kind) if round_steps else value

    c = kind(cap)
    th = step(_tanh(step(_wide(x, kind) / c)))
    slope = (kind(1) - th) * (kind(1) + th)
    return _rounded(step(c * th), out_dtype or x.dtype), _rounded(_wide(d, kind) * slope, x.dtype)


gelu, relu2 = (functools.partial(_function, activation) for activation in ("gelu", "relu2"))


silu_and_mul, gelu_tanh_and_mul, gelu_and_mul = (
    functools.partial(_and_mul, activation) for activation in ("silu", "gelu_tanh", "gelu")
)


@np.errstate(all="ignore")
def rms_norm_gated(
    leaves,
    incoming,
    eps=1e-6,
    group_size=None,
    norm_before_gate=True,
    activation="silu",
    round_norm=False,
    between=None,
    weight_offset=0.0,
):
    (x, z, weight), (d,) = leaves, incoming
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = x.shape if group_size is None else (*x.shape[:-1], x.shape[-1] // group_size, group_size)
    weights = weight if weight is None or group_size is None else weight.view(parts[-2:])
    if norm_before_gate:
        y, gradients = _first_norm(x.reshape(parts), weights, eps, between, weight_offset, round_norm)
        out, dy, dz = gated(y.view(x.shape), z, activation, None, x.dtype, d)
        dx, dweight = gradients(to_numpy(dy.view(parts)))
    else:
        (rows,) = gated(x, z, activation, None, wide)
        flags = (eps, weight_offset, True, round_norm, x.dtype)
        out, _, rstd, h = forward(rows.view(parts), None, weights, *flags, rounded_to=x.dtype)
        dh, _, dweight = backward(d.reshape(parts), None, h, rstd, weights, weight_offset, wide, None)
        _, dx, dz = gated(x, z, activation, None, wide, _rounded(dh, wide).view(x.shape))
    return out.reshape(x.shape), dx.reshape(x.shape), dz, None if weight is None else dweight.reshape(weight.shape)
