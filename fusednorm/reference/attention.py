"""Attention in plain torch operations: docs/spec.md, section 15.

Tensors lie here as [groups, rows, ...]: a group has the query heads of one sample that share keys, and a row is one
query of one of these heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from fusednorm.calls.call import accumulator
from fusednorm.calls.scalars import number
from fusednorm.reference.activations import softcap as softcap_of
from fusednorm.reference.log_prob import exponentials
from fusednorm.reference.norm import SEGMENT, halved, in_order, rounded, treesum, widened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

#: Keys whose values are added up in one chain.
BLOCK = 128

#: No tensor of more numbers is made at once, unless one row of scores has more.
AT_ONCE = 1 << 22

#: The most keys. A row of scores takes about 40 bytes for each: these 5 GiB.
MOST_KEYS = 1 << 27


class Part(NamedTuple):
    """Some rows of some groups."""

    groups: slice
    rows: slice


def parts_of(groups: int, rows: int, each: int) -> Iterator[Part]:
    """The rows in parts, in order: as many rows at once as have :data:`AT_ONCE` numbers, of ``each`` a row."""
    at_once = max(AT_ONCE // max(each, 1), 1)
    several, of_rows = max(at_once // max(rows, 1), 1), min(at_once, max(rows, 1))
    for group in range(0, groups, several):
        for row in range(0, rows, of_rows):
            yield Part(slice(group, min(group + several, groups)), slice(row, min(row + of_rows, rows)))


class Visible:
    """Which keys the rows of [B, Hq, Q, L] scores see."""

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> None:
        self.heads, self.queries, self.keys = q.shape[1], q.shape[2], k.shape[2]
        self.kv_heads = k.shape[1]
        self.causal, self.window, self.device = causal, window, q.device
        self.mask = None
        if mask is not None:
            whole = mask.expand(q.shape[0], self.heads, self.queries, self.keys)
            self.mask = torch.unflatten(whole, 1, (self.kv_heads, self.heads // self.kv_heads))

    def of(self, part: Part) -> Tensor:
        """[groups, rows, L] of a part; one group stands for all where they do not differ."""
        rows = torch.arange(part.rows.start, part.rows.stop, device=self.device)
        queries = rows % self.queries
        keys = torch.arange(self.keys, device=self.device)
        beyond = keys - (self.keys - self.queries + queries).unsqueeze(-1)  # how far a key is behind a query's place
        seen = torch.ones_like(beyond, dtype=torch.bool)
        if self.causal:
            seen = seen & (beyond <= 0)
        if self.window is not None:
            seen = seen & (beyond > -self.window) & (beyond < self.window)
        seen = seen.unsqueeze(0)
        if self.mask is None:
            return seen
        groups = torch.arange(part.groups.start, part.groups.stop, device=self.device).unsqueeze(-1)
        batch, kv_head = groups.div(self.kv_heads, rounding_mode="floor"), groups % self.kv_heads
        head = rows.div(self.queries, rounding_mode="floor")
        return torch.logical_and(seen, self.mask[batch, kv_head, head, queries])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor]:
    """The sums of values that queries weigh by their keys: [B, Hq, Q, Dv]."""
    batch, heads, queries, size = q.shape
    kv_heads, keys, size_of_values = k.shape[1], k.shape[2], v.shape[3]
    shape = (batch, heads, queries, size_of_values)
    if keys > MOST_KEYS:
        raise ValueError(
            f"k has {keys} keys, and torch's operations would take more than 5 GiB for the scores of one query; they "
            f"compute attention of at most {MOST_KEYS} keys: pass parts of the keys, or take a backend that has "
            "attention in a call of its own"
        )
    if 0 in shape or not keys:
        return (q.new_zeros(shape),)
    groups, rows = batch * kv_heads, heads // kv_heads * queries
    of_queries = q.reshape(groups, rows, size)
    of_keys, of_values = (t.reshape(groups, keys, t.shape[3]) for t in (k, v))
    of_sinks, scale = _of_rows(sinks, q, kv_heads), scale_of(scale, q)
    visible = Visible(q, k, mask, causal, window)
    y = q.new_empty((groups, rows, size_of_values))
    blocks = -(-keys // BLOCK)
    for part in parts_of(groups, rows, max(keys, blocks * size_of_values, size)):
        y[part.groups, part.rows] = _rows(
            of_queries[part.groups, part.rows],
            of_keys[part.groups],
            of_values[part.groups],
            None if of_sinks is None else of_sinks[part.groups, part.rows],
            visible.of(part),
            scale,
            softcap,
        )
    return (y.reshape(shape),)


def _of_rows(sinks: Tensor | None, q: Tensor, kv_heads: int) -> Tensor | None:
    """[groups, rows]: the sink of each row, widened."""
    if sinks is None:
        return None
    batch, heads, queries = q.shape[:3]
    of_heads = widened(sinks, accumulator(q.dtype)).reshape(1, heads, 1)
    return of_heads.expand(batch, heads, queries).reshape(batch * kv_heads, -1)


def scale_of(scale: float | None, q: Tensor) -> float:
    """The scale, rounded to the accumulator type; by default that of heads of q's size."""
    return number("scale", q.shape[-1] ** -0.5 if scale is None else scale, accumulator(q.dtype))


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor]:
    """Attention of each sequence alone, with the keys of its pages: [T, Hq, Dv]."""
    y = q.new_zeros((*q.shape[:2], v.shape[-1]))
    begins, per_page = starts.tolist(), k.shape[2]
    pages = pages.resolve_neg()  # torch takes the memory of an index as it is
    for sequence, length in enumerate(lengths.tolist()):
        rows = slice(begins[sequence], begins[sequence + 1])
        of = pages[sequence, : -(-length // per_page)]
        keys, values = (t[of].movedim(1, 0).flatten(1, 2)[:, :length].unsqueeze(0) for t in (k, v))
        queries = q[rows].movedim(0, 1).unsqueeze(0)
        (found,) = attention(queries, keys, values, sinks, None, scale, causal, window, softcap)
        y[rows] = found[0].movedim(0, 1)
    return (y,)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """The results [groups, rows, Dv] of few rows, rounded."""
    wide = accumulator(q.dtype)
    t = _scores(q.to(wide), k, scale)
    if softcap is not None:
        t, _ = softcap_of(t, softcap, None)
    keys = t.shape[-1]
    places = torch.arange(keys, device=t.device)
    count = visible.sum(-1, keepdim=True)
    there = places < count
    order = None
    if not torch.equal(visible, there):  # the visible keys to the front, in their order
        order = visible.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).expand(t.shape)
        t = t.gather(-1, order)
    m = torch.where(there, t, -torch.inf).amax(-1)
    if sinks is not None:
        m = torch.maximum(m, sinks)
    e = torch.where(there, exponentials(t, m)[1], 0)
    s = treesum(e)
    if sinks is not None:
        s = s + exponentials(sinks.unsqueeze(-1), m)[1].squeeze(-1)
    y = _weighed(e, there, v, order) / s.unsqueeze(-1)
    return rounded(torch.where(count > 0, y, 0), q.dtype)


def attention_gradients(
    d: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the sinks, as far as they are needed; else None. The products are torch's.

    Keys that no row sees, and rows that see none, are replaced by zeros: 0 times a NaN of theirs would be NaN.
    """
    batch, heads, queries = q.shape[:3]
    kv_heads, keys = k.shape[1:3]
    if 0 in (batch, queries, keys, v.shape[3]):
        operands = (q, k, v, sinks)
        return tuple(
            torch.zeros_like(t, memory_format=torch.contiguous_format) if t is not None and need else None
            for t, need in zip(operands, needs, strict=True)
        )
    wide, groups, rows = accumulator(q.dtype), batch * kv_heads, heads // kv_heads * queries
    of_rows, of_d = (widened(t, wide).reshape(groups, rows, t.shape[3]) for t in (q, d))
    of_keys, of_values = (widened(t, wide).reshape(groups, keys, t.shape[3]) for t in (k, v))
    of_sinks, scale = _of_rows(sinks, q, kv_heads), scale_of(scale, q)
    visible = Visible(q, k, mask, causal, window)
    found: dict[int, list[list[Tensor]]] = {}
    for part in parts_of(groups, rows, keys):
        if part.rows.start == 0:
            found[part.groups.start] = []
        at = (part.groups, part.rows)
        found[part.groups.start].append(
            _gradients_of_rows(
                of_d[at],
                of_rows[at],
                of_keys[part.groups],
                of_values[part.groups],
                None if of_sinks is None else of_sinks[at],
                visible.of(part),
                scale,
                softcap,
            )
        )
    # Of rows one after the other, and of keys sums over parts of rows.
    dq, dk, dv, dsinks = (
        torch.cat([torch.cat(parts, 1) if place in (0, 3) else in_order(torch.stack(parts)) for parts in one])
        for place, one in enumerate(zip(*[zip(*parts, strict=True) for parts in found.values()], strict=True))
    )
    return (
        rounded(dq.reshape(q.shape), q.dtype) if needs[0] else None,
        rounded(dk.reshape(k.shape), k.dtype) if needs[1] else None,
        rounded(dv.reshape(v.shape), v.dtype) if needs[2] else None,
        rounded(dsinks.reshape(batch, heads, queries).sum((0, 2)), sinks.dtype)
        if sinks is not None and needs[3]
        else None,
    )


def _gradients_of_rows(
    d: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible: Tensor,
    scale: float,
    softcap: float | None,
) -> list[Tensor]:
    """The gradients of few widened rows, of the keys and values that they meet, and of a sink for each."""
    visible = visible.expand(len(q), -1, -1)
    sees, seen = visible.any(-1, keepdim=True), visible.any(-2).unsqueeze(-1)
    d, q, k, v = torch.where(sees, d, 0), torch.where(sees, q, 0), torch.where(seen, k, 0), torch.where(seen, v, 0)
    t = torch.where(visible, q @ k.transpose(-1, -2) * q.new_full((), scale), 0)
    slope = None
    if softcap is not None:
        t, slope = softcap_of(t, softcap, None)
    m = torch.where(visible, t, -torch.inf).amax(-1, keepdim=True)
    if sinks is not None:
        m = torch.maximum(m, sinks.unsqueeze(-1))
    m = torch.where(sees, m, 0).detach()
    e = torch.where(visible, torch.where(visible, t - m, 0).exp(), 0)
    s = e.sum(-1, keepdim=True)
    of_sink = None
    if sinks is not None:
        of_sink = torch.where(sees, torch.where(sees, sinks.unsqueeze(-1) - m, 0).exp(), 0)
        s = s + of_sink
    s = torch.where(sees, s, 1)
    p = e / s
    dp = torch.where(visible, d @ v.transpose(-1, -2), 0)
    total = (p * dp).sum(-1, keepdim=True)
    dt = p * (dp - total)
    if slope is not None:
        dt = dt * slope
    dt = torch.where(visible, dt, 0) * q.new_full((), scale)
    of_sinks = d.new_zeros(d.shape[:2]) if of_sink is None else -(of_sink / s * total).squeeze(-1)
    return [dt @ k, dt.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d, of_sinks]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The scaled products [groups, rows, L] of widened rows and keys."""
    groups, rows, size = q.shape
    at_once = max(AT_ONCE // (groups * rows * size), 1)
    # Of at most a segment, halves of a power of two have the sums of halves of the segment: +0 changes none but -0.
    total = halved if size <= SEGMENT else treesum
    products = [total(q.unsqueeze(2) * some.to(q.dtype).unsqueeze(1)) for some in torch.split(k, at_once, 1)]
    return torch.cat(products, -1) * q.new_full((), scale)


def _weighed(e: Tensor, there: Tensor, v: Tensor, order: Tensor | None) -> Tensor:
    """The sums [groups, rows, Dv] of e * v: in blocks, each in order, and then the blocks in order."""
    groups, keys = v.shape[:2]
    blocks = -(-keys // BLOCK)
    spare = (0, blocks * BLOCK - keys)
    e, there = (torch.unflatten(pad(t, spare), -1, (blocks, BLOCK)) for t in (e, there))
    if order is not None:
        order = torch.unflatten(pad(order, spare), -1, (blocks, BLOCK))
        group = torch.arange(groups, device=v.device).view(-1, 1, 1)
    else:
        v = torch.unflatten(pad(v, (0, 0, *spare)), 1, (blocks, BLOCK)).unsqueeze(1)
    total = e.new_zeros(())
    for r in range(min(BLOCK, keys)):
        values = v[:, :, :, r] if order is None else v[group, order[..., r]]
        product = e[..., r].unsqueeze(-1) * values.to(e.dtype)
        # A sum that began with +0 is never -0, so that +0 changes none.
        total = total + torch.where(there[..., r].unsqueeze(-1), product, 0)
    return in_order(total.movedim(2, 0))
