"""Section 15 of the specification, in NumPy, written from docs/spec.md alone: one query of one head after the other."""

import numpy as np

from fusednorm.conformance.oracle import accumulator, round_to, to_numpy, treesum
from fusednorm.conformance.oracle_gated import _Exponential, _tanh


def _of_query(q, k, v, sink, scale, softcap):
    """The sums of one query, q of [D], over its visible keys, [n, D], and their values, [n, Dv]."""
    kind = q.dtype.type
    if not len(k):
        return np.zeros(v.shape[-1], kind)
    t = treesum(q * k) * kind(scale)
    if softcap is not None:
        t = kind(softcap) * _tanh(t / kind(softcap))
    scores = t if sink is None else np.append(t, sink)
    m = scores.max()  # a NaN wins
    e = _Exponential(t - m).times(kind(1))
    s = treesum(e)
    if sink is not None:
        s = s + _Exponential(np.array([sink - m])).times(kind(1))[0]
    blocks = []
    for begin in range(0, len(k), 128):
        block = np.zeros(v.shape[-1], kind)
        for weight, values in zip(e[begin : begin + 128], v[begin : begin + 128], strict=True):
            block = block + weight * values
        blocks.append(block)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total / s


@np.errstate(all="ignore")
def attention(leaves, _incoming, scale=None, causal=True, window=None, softcap=None):
    """The results alone, whose gradients the specification does not have."""
    q, k, v, sinks, mask = leaves
    kind = accumulator(q)
    wide = [to_numpy(t).astype(kind) for t in (q, k, v)]
    batch, heads, queries, size = q.shape
    keys, share = k.shape[2], heads // k.shape[1]
    seen = np.ones((batch, heads, queries, keys), bool)
    if mask is not None:
        seen &= mask.cpu().numpy()
    place = keys - queries + np.arange(queries)[:, None]
    j = np.arange(keys)
    if causal:
        seen &= j <= place
    if window is not None:
        seen &= (j > place - window) & (j < place + window)
    scale = size**-0.5 if scale is None else scale
    y = np.zeros((batch, heads, queries, v.shape[-1]), kind)
    for b, h, i in np.ndindex(batch, heads, queries):
        visible, of = seen[b, h, i], h // share
        sink = None if sinks is None else kind(to_numpy(sinks)[h])
        given = wide[0][b, h, i], wide[1][b, of][visible], wide[2][b, of][visible]
        y[b, h, i] = _of_query(*given, sink, scale, softcap)
    return (round_to(y, q.dtype),)


def paged_attention(leaves, _incoming, **flags):
    """Attention of each sequence alone, with the keys of its pages."""
    q, k, v, pages, starts, lengths, sinks = leaves
    y = np.zeros((*q.shape[:2], v.shape[-1]))
    for s, length in enumerate(lengths.tolist()):
        rows, per_page = slice(int(starts[s]), int(starts[s + 1])), k.shape[2]
        at = [(int(pages[s, j // per_page]), j % per_page) for j in range(length)]
        keys, values = (t[[p for p, _ in at], :, [r for _, r in at]].movedim(0, 1)[None] for t in (k, v))
        found = attention((q[rows].movedim(0, 1)[None], keys, values, sinks, None), (), **flags)[0]
        y[rows] = np.moveaxis(found[0], 0, 1)
    return (y,)
