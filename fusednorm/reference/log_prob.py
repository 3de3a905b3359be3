"""Log-probabilities in plain torch operations: docs/spec.md, section 11. Every backend must return these bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusednorm.calls.call import accumulator
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.calls.function_constants import LOGARITHMS, SCHEMES
from fusednorm.reference import activations
from fusednorm.reference.activations import polynomial
from fusednorm.reference.norm import before_integers, in_order, rounded, treesum

if TYPE_CHECKING:
    from torch import Tensor


#: Rows are taken in blocks of about so many elements, so that no second tensor of all rows is made.
BLOCK = 1 << 20


def logarithm(x: Tensor) -> Tensor:
    """log(x) in the accumulator type, for x from 1 to 2^31; NaN for NaN."""
    scheme, (root, coefficients) = SCHEMES[x.dtype], LOGARITHMS[x.dtype]
    beyond = before_integers(x, "Log").view(scheme.whole) - root
    k = (beyond >> scheme.mantissa).to(x.dtype)
    f = ((beyond & ((1 << scheme.mantissa) - 1)) + root).view(x.dtype) - 1
    s, half = f / (f + 2), f * f * 0.5
    z = s * s
    rest = polynomial(z, z * z, coefficients) * z
    # x - x is 0, or NaN for a NaN.
    return k * scheme.ln2_high + (f - (half - ((half + rest) * s + k * scheme.ln2_low))) + (x - x)


class Exp(torch.autograd.Function):
    """exp, with derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        """It is of the accumulator type."""
        return activations.exponential(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keeps the output."""
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        """The gradient of t."""
        return d * ctx.saved_tensors[0]  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """The tangent."""
        with outer_levels():
            return tangent * primals(ctx)[0]  # type: ignore[no-any-return]


class Log(torch.autograd.Function):
    """log, with derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """It is of the accumulator type."""
        return logarithm(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keeps the number."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        """The gradient of x."""
        return d / ctx.saved_tensors[0]  # type: ignore[no-any-return]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """The tangent."""
        with outer_levels():
            return tangent / primals(ctx)[0]  # type: ignore[no-any-return]


def arguments(
    logits: Tensor, temperature: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The arguments of [rows, n]: the softmax's logits, the temperature, and the softcap's slope or None."""
    t = logits.to(accumulator(logits.dtype))
    slope = None
    if softcap is not None:
        t, slope = activations.softcap(t, softcap, None)
        t = rounded(t, logits.dtype).to(slope.dtype)
    divisor = None if temperature is None else temperature.to(t.dtype).unsqueeze(-1)
    return t if divisor is None else t / divisor, divisor, slope


class Sums(NamedTuple):
    """The numbers of each row, in the accumulator type, from which all results follow."""

    #: t - m, with the greatest number m of the row.
    below: Tensor
    e: Tensor
    m: Tensor
    s: Tensor

    @property
    def log_s(self) -> Tensor:
        """log(s), [..., 1]."""
        return Log.apply(self.s).unsqueeze(-1)  # type: ignore[no-any-return, no-untyped-call]


def exponentials(t: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """t - m, and its exponential."""
    below = t - m.unsqueeze(-1)
    return below, Exp.apply(below)  # type: ignore[no-untyped-call]


def _sums(t: Tensor) -> Sums:
    # No result changes with m, so it needs no derivative; a NaN wins.
    m = t.detach().amax(-1)
    below, e = exponentials(t, m)
    return Sums(below, e, m, treesum(e))


def by_blocks(
    function: Callable[..., tuple[Tensor, ...]], logits: Tensor, *others: Tensor | None
) -> tuple[Tensor, ...]:
    """The results of a function of [rows, N] and others, [rows, ...], for tensors [..., N] and others."""
    shape = logits.shape[:-1]
    count, block = shape.numel(), max(1, BLOCK // max(1, logits.shape[-1]))

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape((count, *tensor.shape[len(shape) :]))

    operands = [None if t is None else of_rows(t) for t in (logits, *others)]
    parts = [
        function(*(t if t is None else t[begin : begin + block] for t in operands))
        for begin in range(0, max(count, 1), block)
    ]
    whole = parts[0] if len(parts) == 1 else [torch.cat(results) for results in zip(*parts, strict=True)]
    return tuple(t.reshape((*shape, *t.shape[1:])) for t in whole)


def log_softmax(logits: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of all elements, [..., N], and m and s."""

    def of_block(rows: Tensor) -> tuple[Tensor, ...]:
        sums = _sums(arguments(rows, None, None)[0])
        return rounded(sums.below - sums.log_s, out_dtype or rows.dtype), sums.m, sums.s

    y, m, s = by_blocks(of_block, logits)
    return y, m, s


def log_softmax_gradient(d: Tensor, logits: Tensor, m: Tensor, s: Tensor, needs: list[bool]) -> tuple[Tensor | None]:
    """The gradient of the logits, [..., N]."""
    return (log_softmax_gradient_of(d, logits, m, s, None),) if needs[0] else (None,)


def log_softmax_gradient_of(d: Tensor, logits: Tensor, m: Tensor, s: Tensor, total: Tensor | None) -> Tensor:
    """The gradient of ``log_softmax``; ``total``: the sums of whole rows of d, [...], where these are parts of rows."""

    def of_block(rows: Tensor, d: Tensor, m: Tensor, s: Tensor, total: Tensor | None) -> tuple[Tensor]:
        wide = d.to(m.dtype)
        p = exponentials(rows.to(m.dtype), m)[1] / s.unsqueeze(-1)
        total = treesum(wide) if total is None else total
        return (rounded(wide - p * total.unsqueeze(-1), rows.dtype),)

    return by_blocks(of_block, logits, d, m, s, total)[0]


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logarithm of the sum of exponentials of each row, [...], and m and s."""

    def of_block(rows: Tensor) -> tuple[Tensor, ...]:
        sums = _sums(arguments(rows, None, None)[0])
        return logsumexp_of(sums.m, sums.log_s), sums.m, sums.s

    lse, m, s = by_blocks(of_block, logits)
    return lse, m, s


def logsumexp_of(m: Tensor, log_s: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials, [...], by m and by log(s), [..., 1]."""
    return torch.where(m.isinf(), m, m + log_s.squeeze(-1))


def logsumexp_gradient(d: Tensor, logits: Tensor, m: Tensor, s: Tensor, needs: list[bool]) -> tuple[Tensor | None]:
    """The gradient of the logits, [..., N]."""

    def of_block(rows: Tensor, d: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor]:
        p = exponentials(rows.to(m.dtype), m)[1] / s.unsqueeze(-1)
        return (rounded(d.to(m.dtype).unsqueeze(-1) * p, rows.dtype),)

    return by_blocks(of_block, logits, d, m, s) if needs[0] else (None,)  # type: ignore[return-value]


class Chosen(NamedTuple):
    """The ids of a block of rows, [rows, K]."""

    #: Where there is such an element; else 0.
    places: Tensor
    #: Whether there is such an element.
    there: Tensor
    #: Whether the id is one that is not ignored.
    counted: Tensor


def chosen_of(ids: Tensor, size: int, ignore_index: int | None) -> Chosen:
    """The ids of rows of so many elements."""
    ids = ids.to(torch.int64)
    counted = torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
    there = (ids >= 0) & (ids < size)
    return Chosen(torch.where(there, ids, 0), there, counted)


def entropy_terms(below: Tensor, e: Tensor) -> Tensor:
    """``z`` of the specification, by t - m and its exponential."""
    return torch.where(e == 0, 0, e * torch.where(e == 0, 0, below))


def log_prob_of(below: Tensor, log_s: Tensor, chosen: Chosen) -> Tensor:
    """The log-probabilities of ids, by their t - m, [..., K], and log(s), [..., 1]."""
    return torch.where(chosen.counted, torch.where(chosen.there, below - log_s, torch.nan), 0)


def entropy_of(log_s: Tensor, total: Tensor, s: Tensor, chosen: Chosen) -> Tensor:
    """The entropy, [...], by log(s), [..., 1], the sum of z, and s."""
    return torch.where(chosen.counted.any(-1), log_s.squeeze(-1) - total / s, 0)


def selected(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    softcap: float | None,
    ignore_index: int | None,
    *,
    entropy: bool,
) -> tuple[Tensor, ...]:
    """Log-probabilities of ids, with ``entropy`` the entropy, and m and s; see :func:`selected_gradient`."""
    several = ids.dim() == logits.dim()

    def of_block(rows: Tensor, ids: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        chosen = chosen_of(ids, rows.shape[-1], ignore_index)
        sums = _sums(arguments(rows, temperature, softcap)[0])
        lp = log_prob_of(sums.below.gather(-1, chosen.places), sums.log_s, chosen)
        if not entropy:
            return lp, sums.m, sums.s
        total = treesum(entropy_terms(sums.below, sums.e))
        return lp, entropy_of(sums.log_s, total, sums.s, chosen), sums.m, sums.s

    lp, *others = by_blocks(of_block, logits, ids if several else ids.unsqueeze(-1), temperature)
    return lp if several else lp.squeeze(-1), *others


def selected_gradient(
    d: Tensor,
    d_entropy: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    m: Tensor,
    s: Tensor,
    entropy: Tensor | None,
    softcap: float | None,
    ignore_index: int | None,
    part: tuple[int, int] | None = None,
) -> Tensor:
    """The gradient of the logits, [..., N].

    Args:
        d: [...] or [..., K], the gradient of the log-probabilities.
        d_entropy: [...], that of the entropy, or None.
        logits: [..., N].
        ids: of d's shape.
        temperature: [...], or None.
        m: [...], as :func:`selected` returned it.
        s: the same.
        entropy: the same, where there is its gradient.
        softcap: as in :func:`selected`.
        ignore_index: the same.
        part: of logits that are a part of rows, where they begin there, and the length of whole rows.
    """
    if ids.dim() < logits.dim():
        d, ids = d.unsqueeze(-1), ids.unsqueeze(-1)

    def of_block(
        rows: Tensor,
        d: Tensor,
        dh: Tensor | None,
        ids: Tensor,
        temperature: Tensor | None,
        m: Tensor,
        s: Tensor,
        h: Tensor | None,
    ) -> tuple[Tensor]:
        chosen = chosen_of(ids, rows.shape[-1] if part is None else part[1], ignore_index)
        t, divisor, slope = arguments(rows, temperature, softcap)
        below, e = exponentials(t, m)
        p = e / s.unsqueeze(-1)
        wide = torch.where(chosen.counted, torch.where(chosen.there, d.to(m.dtype), torch.nan), 0)
        dt = _of_places(wide, chosen.places, p) if part is None else _of_part(wide, chosen.places - part[0], p)
        if dh is not None and h is not None:
            log_s = Log.apply(s).unsqueeze(-1)  # type: ignore[no-untyped-call]
            surprise = torch.where(p == 0, 0, below) - log_s + h.unsqueeze(-1)
            dt = dt - torch.where(p == 0, 0, dh.to(m.dtype).unsqueeze(-1) * (p * surprise))
        if divisor is not None:
            dt = dt / divisor
        if slope is not None:
            dt = rounded(dt, rows.dtype).to(m.dtype) * slope
        return (rounded(torch.where(chosen.counted.any(-1, keepdim=True), dt, 0), rows.dtype),)

    return by_blocks(of_block, logits, d, d_entropy, ids, temperature, m, s, entropy)[0]


def _of_part(d: Tensor, places: Tensor, p: Tensor) -> Tensor:
    """The gradient of a part of rows: places before it and behind it count as one more element."""
    size = p.shape[-1]
    places = torch.where((places < 0) | (places > size), size, places)
    return _of_places(d, places, torch.nn.functional.pad(p, (0, 1)))[..., :size]


def _of_places(d: Tensor, places: Tensor, p: Tensor) -> Tensor:
    """The gradient of all elements of rows, [rows, N], from those of the log-probabilities of K places.

    To an element that has places go d of these places, in their order, times 1 - p, and d of the others times -p.
    """
    if not d.shape[-1]:
        return torch.zeros_like(p)
    elsewhere = in_order(d.movedim(-1, 0)).unsqueeze(-1) * (0 - p)
    there = p.gather(-1, places)
    same = places.unsqueeze(-1) == places.unsqueeze(-2)  # [rows, K, K]: whether place k and another are one
    own = in_order(torch.where(same, d.unsqueeze(-2), 0).movedim(-1, 0))
    others = in_order(torch.where(same, 0, d.unsqueeze(-2)).movedim(-1, 0))
    # An element that is chosen twice is written once: else a derivative would count it twice.
    once = ~(same & torch.ones_like(same).tril(-1)).any(-1)
    values = torch.where(once, own * (1 - there) + others * (0 - there), 0)
    return elsewhere.scatter(-1, places, 0).scatter_add(-1, places, values)
