"""A second implementation of log-probabilities, in NumPy, written from docs/spec.md alone, to check the reference.

It shares no code with that file: powers of two are taken apart by np.frexp, and each place of an id has a loop.
"""

import numpy as np

from fusednorm.conformance.oracle import accumulator, round_to, to_numpy, treesum
from fusednorm.conformance.oracle_gated import _CONSTANTS, _Exponential, _horner, _tanh

#: The coefficients of the logarithm, and the square root of 1/2.
_LOGARITHM = {
    np.float32: ("0x1.6a09e6p-1", ("0x1.55555cp-1", "0x1.997c30p-2", "0x1.2ee610p-2")),
    np.float64: (
        "0x1.6a09e667f3bcdp-1",
        (
            *("0x1.5555555555558p-1", "0x1.99999999952e2p-2", "0x1.2492492df148dp-2", "0x1.c71c62e5800a1p-3"),
            *("0x1.7462b4ab2ef6bp-3", "0x1.39fe606542ddep-3", "0x1.2b584aae78a57p-3"),
        ),
    ),
}


def logarithm(x):
    """log of each element, from 1 to 2^31."""
    kind = x.dtype.type
    root, texts = _LOGARITHM[kind]
    high, low = (kind(float.fromhex(text)) for text in _CONSTANTS[kind][4:6])
    part, power = np.frexp(x)
    small = part < kind(float.fromhex(root))
    part, k = np.where(small, part * kind(2), part), np.where(small, power - 1, power).astype(kind)
    f = part - kind(1)
    s, half = f / (kind(2) + f), (f * f) * kind(0.5)
    z = s * s
    # A polynomial of z by pairs, as the exponential's.
    rest = _horner(texts, z) * z
    return np.where(np.isnan(x), x, k * high + (f - (half - ((half + rest) * s + k * low))))


class _Rows:
    """Logits as the softmax takes them, and its numbers of each row."""

    def __init__(self, logits, temperature=None, softcap=None):
        self.dtype, self.kind = logits.dtype, accumulator(logits)
        t = to_numpy(logits).astype(self.kind)
        self.slope = self.temperature = None
        if softcap is not None:
            c, one = self.kind(softcap), self.kind(1)
            th = _tanh(t / c)
            self.slope, t = (one - th) * (one + th), self.rounded(c * th)
        if temperature is not None:
            self.temperature = to_numpy(temperature).astype(self.kind)[..., None]
            t = t / self.temperature
        self.m = np.max(t, -1)  # a NaN wins
        self.below = t - self.m[..., None]
        self.e = _Exponential(self.below).times(self.kind(1))
        self.s = treesum(self.e)
        self.log_s = logarithm(self.s)
        self.p = self.e / self.s[..., None]

    def rounded(self, values):
        return round_to(values, self.dtype).astype(self.kind)

    def gradient(self, dt):
        """The gradient of the logits from that of t."""
        if self.temperature is not None:
            dt = dt / self.temperature
        if self.slope is not None:
            dt = self.rounded(dt) * self.slope
        return round_to(dt, self.dtype)


def _wide(tensor, kind):
    return to_numpy(tensor).astype(kind)


@np.errstate(all="ignore")
def log_softmax(leaves, incoming, out_dtype=None):
    (logits,), (d,) = leaves, incoming
    rows = _Rows(logits)
    d = _wide(d, rows.kind)
    y = round_to(rows.below - rows.log_s[..., None], out_dtype or logits.dtype)
    return y, rows.gradient(d - rows.p * treesum(d)[..., None])


@np.errstate(all="ignore")
def logsumexp(leaves, incoming):
    (logits,), (d,) = leaves, incoming
    rows = _Rows(logits)
    lse = np.where(np.isinf(rows.m), rows.m, rows.m + rows.log_s)
    return lse, rows.gradient(_wide(d, rows.kind)[..., None] * rows.p)


@np.errstate(all="ignore")
def _selected(leaves, incoming, softcap, ignore_index):
    """Log-probabilities, entropies, and the gradient."""
    logits, ids, temperature = leaves
    rows, size = _Rows(logits, temperature, softcap), logits.shape[-1]
    zero, one, several = rows.kind(0), rows.kind(1), ids.dim() == logits.dim()
    count = ids.shape[-1] if several else 1
    flat = [t.reshape(-1, size) for t in (rows.below, rows.e, rows.p)]
    numbers = [t.reshape(-1) for t in (rows.log_s, rows.s)]
    places = to_numpy(ids).reshape(-1, count)
    d = _wide(incoming[0], rows.kind).reshape(-1, count)
    dh = None if len(incoming) == 1 else _wide(incoming[1], rows.kind).reshape(-1)
    lp, h, dt = np.zeros(d.shape, rows.kind), np.zeros(len(d), rows.kind), np.zeros((len(d), size), rows.kind)
    for i, (below, e, p, log_s, s) in enumerate(zip(*flat, *numbers, strict=True)):
        counted = [k for k in range(count) if places[i, k] != ignore_index]
        if not counted:
            continue
        lp[i, counted] = below[places[i, counted]] - log_s
        h[i] = log_s - treesum(np.where(e == 0, zero, e * below)) / s
        own, others = np.zeros(size, rows.kind), np.zeros(size, rows.kind)
        for k in range(count):
            share = d[i, k] if k in counted else zero
            here = np.arange(size) == (places[i, k] if k in counted else -1)
            own, others = own + np.where(here, share, zero), others + np.where(here, zero, share)
        a = own * (one - p) + others * (zero - p)
        b = zero if dh is None else np.where(p == 0, zero, dh[i] * (p * ((below - log_s) + h[i])))
        dt[i] = a - b
    ignored = (places == ignore_index).all(-1).reshape(*logits.shape[:-1], 1)
    gradient = np.where(ignored, 0, rows.gradient(dt.reshape(logits.shape)))
    return lp.reshape(ids.shape), h.reshape(logits.shape[:-1]), gradient


def selected_log_prob(leaves, incoming, softcap=None, ignore_index=None):
    lp, _, gradient = _selected(leaves, incoming, softcap, ignore_index)
    return lp, gradient


def selected_log_prob_and_entropy(leaves, incoming, softcap=None, ignore_index=None):
    return _selected(leaves, incoming, softcap, ignore_index)
