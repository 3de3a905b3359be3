"""Norms of DTensors whose rows lie in parts on ranks: these exchange sums of segments in place of whole rows.

A sharding rule can only move operands, so this is a function of autograd above DTensor's dispatcher. docs/spec.md,
section 3, says why the bits are those of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, accumulator
from fusednorm.reference import norm as reference
from fusednorm.reference.norm import SEGMENT
from fusednorm.torch_ops import gradients
from fusednorm.torch_ops.sharding import common_rows, of_ranks, shares_of

#: The elements of a segment after the first level of its tree.
HALF = SEGMENT // 2


class Piece(NamedTuple):
    """Consecutive elements of a row that one rank has: those of whole segments, or a part of one segment."""

    start: int
    stop: int
    whole: bool

    @property
    def length(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def numbers(self) -> int:
        """How many numbers other ranks need of it."""
        return -(-self.length // SEGMENT) if self.whole else min(self.length, HALF)


class Parts(NamedTuple):
    """Contiguous parts of rows, one on each rank of one dimension of a mesh."""

    #: Where the part of each rank begins, and the end of the last one.
    bounds: tuple[int, ...]

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces of a rank, in their order."""
        start, stop, size = self.bounds[rank], self.bounds[rank + 1], self.bounds[-1]
        first = min(-(-start // SEGMENT) * SEGMENT, stop)
        last = stop if stop == size else max(stop // SEGMENT * SEGMENT, first)
        three = Piece(start, first, False), Piece(first, last, True), Piece(last, stop, False)
        return [piece for piece in three if piece.length]

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(len(self.bounds) - 1)

    @property
    def numbers(self) -> int:
        """How many numbers a rank gives at most."""
        return max(sum(piece.numbers for piece in self.pieces(rank)) for rank in self.ranks)

    def moves_fewer_bytes(self, sums: int, wide: torch.dtype, gathered: Sequence[torch.dtype], others: int = 0) -> bool:
        """Whether exchanges for so many sums of the type ``wide`` move fewer bytes than rows of these dtypes, gathered.

        Counted for one row, and for one rank: of each rank an all-gather takes as much as of the one that has most.
        ``others``: so many more numbers are exchanged.
        """
        longest = max(self.bounds[rank + 1] - self.bounds[rank] for rank in self.ranks)
        return (sums * self.numbers + others) * wide.itemsize < longest * sum(dtype.itemsize for dtype in gathered)


def parts_of(size: int, ranks: int) -> Parts:
    """The parts of rows of so many elements that torch gives to ranks."""
    longest = -(-size // ranks)
    return Parts(tuple(min(rank * longest, size) for rank in range(ranks + 1)))


def exchanged_treesum(terms: Tensor, parts: Parts, mesh: DeviceMesh, dim: int) -> Tensor:
    """``treesum`` of whole rows, of which each rank has a part.

    Ranks exchange the sums of whole segments. Of a segment that is cut they exchange what the first level of its tree
    makes of each part: 512 sums of two terms, of which one rank has both, or two ranks have one each. An addition of
    both is then the one that the tree has, and one of +0 changes no number.

    Args:
        terms: [..., n], this rank's part.
        parts: the parts of all ranks of ``dim``.
        mesh: the ranks.
        dim: the dimension of the mesh.

    Returns:
        [...], the same on each of these ranks.
    """
    rank = mesh.get_local_rank(dim)
    start = parts.bounds[rank]
    own = [numbers_of(terms[..., piece.start - start : piece.stop - start], piece) for piece in parts.pieces(rank)]
    return exchanged_sum(torch.cat(own, -1) if own else terms, parts, mesh, dim)


def gathered(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The tensors of all ranks of a dimension of the mesh, [ranks, ...], which have one shape."""
    collectives, group = torch.ops._c10d_functional, mesh.get_group(dim).group_name
    found = collectives.all_gather_into_tensor(own.unsqueeze(0).contiguous(), mesh.size(dim), group)
    return collectives.wait_tensor(found)  # type: ignore[no-any-return]


def exchanged_sum(own: Tensor, parts: Parts, mesh: DeviceMesh, dim: int) -> Tensor:
    """:func:`exchanged_treesum`, by the numbers of this rank's pieces, one after the other."""
    own = torch.nn.functional.pad(own, (0, parts.numbers - own.shape[-1]))
    sums: dict[int, Tensor] = {}
    for of_rank, numbers in zip(parts.ranks, gathered(own, mesh, dim), strict=True):
        place = 0
        for piece in parts.pieces(of_rank):
            taken, segment = numbers[..., place : place + piece.numbers], piece.start // SEGMENT
            place += piece.numbers
            if not piece.whole:
                taken = torch.nn.functional.pad(taken, (0, HALF - piece.numbers)).roll(piece.start % HALF, -1)
                taken = sums[segment] + taken if segment in sums else taken
            sums[segment] = taken
    cut = {piece.start // SEGMENT for rank in parts.ranks for piece in parts.pieces(rank) if not piece.whole}
    in_order = [
        reference.halved(sums[segment]).unsqueeze(-1) if segment in cut else sums[segment] for segment in sorted(sums)
    ]
    return reference.halved(torch.cat(in_order, -1))


def numbers_of(terms: Tensor, piece: Piece) -> Tensor:
    """The numbers that other ranks need of a piece with these terms."""
    if piece.whole:
        terms = torch.nn.functional.pad(terms, (0, piece.numbers * SEGMENT - piece.length))
        return reference.halved(terms.reshape(*terms.shape[:-1], piece.numbers, SEGMENT))
    both = piece.length - HALF  # so many sums have both terms here
    if both <= 0:
        return terms
    return torch.cat((terms[..., :both] + terms[..., HALF:], terms[..., both:HALF]), -1)


class Where(NamedTuple):
    """Where rows lie in parts."""

    mesh: DeviceMesh
    #: The placements of rows, and of the weight's gradient on the dimensions that have no parts.
    rows: tuple[Any, ...]
    shares: tuple[Any, ...]
    #: The dimension of the mesh that has the parts.
    dim: int
    parts: Parts

    @property
    def rank(self) -> int:
        """This rank, among those of the parts."""
        return self.mesh.get_local_rank(self.dim)

    @property
    def start(self) -> int:
        """Where this rank's part begins."""
        return self.parts.bounds[self.rank]

    def mean_of(self, value: Tensor) -> Tensor:
        """The means of whole rows, by this rank's part of them."""
        sums = exchanged_treesum(value, self.parts, self.mesh, self.dim)
        return reference.divided(sums, self.parts.bounds[-1])

    def local_rows(self, rows: Any) -> Any:
        """This rank's part of [..., N], or None."""
        return None if rows is None else rows.redistribute(self.mesh, self.rows).to_local()

    def local_weight(self, weight: Any) -> Any:
        """This rank's part of [N] or [H, N], or None."""
        if weight is None:
            return None
        return weight.redistribute(self.mesh, self._with_parts([Replicate()] * self.mesh.ndim, weight)).to_local()

    def _with_parts(self, placements: Sequence[Any], weight: DTensor) -> list[Any]:
        return [Shard(weight.ndim - 1) if dim == self.dim else other for dim, other in enumerate(placements)]

    def of_rows(self, local: Tensor | None, like: DTensor) -> Any:
        """The DTensor of all ranks' rows."""
        return None if local is None else of_ranks(local.contiguous(), self.mesh, self.rows, like.shape)

    def of_weight(self, local: Tensor | None, weight: DTensor | None) -> DTensor | None:
        """The DTensor of all ranks' gradients of a weight, which has the weight's own placement where parts lie."""
        if local is None or weight is None:
            return None
        found = of_ranks(local, self.mesh, self._with_parts(self.shares, weight), weight.shape)
        own = weight.placements[self.dim]
        kept = [(Replicate() if own.is_partial() else own) if i == self.dim else p for i, p in enumerate(self.shares)]
        return found.redistribute(self.mesh, kept)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The placements of numbers of rows."""
        return tuple(Replicate() if dim == self.dim else p for dim, p in enumerate(self.rows))

    def local_numbers(self, numbers: Any) -> Any:
        """[...], or [..., K], of this rank's rows, or None."""
        return None if numbers is None else numbers.redistribute(self.mesh, self.numbers).to_local()

    def of_numbers(self, local: Tensor, rows: DTensor) -> DTensor:
        """The DTensor of a number, or of K, for each row."""
        last = rows.ndim - 1
        return of_ranks(local, self.mesh, self.numbers, torch.Size((*rows.shape[:last], *local.shape[last:])))


def where_of(operands: Sequence[DTensor], weights: Sequence[DTensor], sums: int, others: int = 0) -> Where | None:
    """Where rows lie in parts; None where they do not, or where it moves fewer bytes to join them.

    ``sums``, ``others``: see :meth:`Parts.moves_fewer_bytes`.
    """
    mesh, last = operands[0].device_mesh, operands[0].ndim - 1
    if any(t.device_mesh != mesh for t in (*operands, *weights)) or any(t.ndim != last + 1 for t in operands):
        return None
    joined = common_rows(*(t._spec for t in operands)).placements
    apart = common_rows(*(t._spec for t in operands), whole=0).placements
    dims = [dim for dim, placement in enumerate(apart) if placement.is_shard(last) and joined[dim].is_replicate()]
    if len(dims) != 1 or type(apart[dims[0]]) is not Shard:  # another kind of placement has other parts
        return None
    if any(weight.ndim == 2 for weight in weights) and any(p.is_shard(last - 1) for p in joined):
        return None  # heads are not whole
    (dim,) = dims
    parts = parts_of(operands[0].shape[-1], mesh.size(dim))
    moved = [t.dtype for t in operands if t.placements[dim].is_shard()]
    if not parts.moves_fewer_bytes(sums, accumulator(operands[0].dtype), moved, others):
        return None
    rows = tuple(apart[i] if i == dim else placement for i, placement in enumerate(joined))
    shares = shares_of(common_rows(*(t._spec for t in operands))).placements
    return Where(mesh, rows, shares, dim, parts)


class _NormOfParts(torch.autograd.Function):
    """(x, residual or None, weight or None, bias or None, where, flags) -> (y, residual_out or None)."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, bias: Any, where: Where, flags: Flags) -> Any:
        """By the reference's formula, with the means of whole rows."""
        own_x, own_residual = where.local_rows(x), where.local_rows(residual)
        total_dtype = None if residual is None else flags.residual_dtype or residual.dtype
        h, own_total = reference.row_and_sum(own_x, own_residual, flags.round_sum, total_dtype)
        ctx.mean = where.mean_of(h).unsqueeze(-1) if flags.center else None
        if ctx.mean is not None:
            h = h - ctx.mean
        own_rstd = reference.rstd_of(h, flags.eps, where.mean_of)
        rounded_to = x.dtype if flags.round_norm else None
        n, own_weight, own_bias = h * own_rstd.unsqueeze(-1), where.local_weight(weight), where.local_weight(bias)
        own_y = reference.affine(n, own_weight, own_bias, flags.weight_offset, rounded_to, flags.out_dtype or x.dtype)
        y, total = where.of_rows(own_y, x), where.of_rows(own_total, x)
        gradients.keep(ctx, x, residual, weight, flags, (y, total, where.of_numbers(own_rstd, x)), bias)
        ctx.where = where
        if total is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Any, d_total: Any) -> tuple[Any, ...]:
        """The same; gradients that are differentiated again are computed with whole rows."""
        needs = ctx.needs_input_grad[:4]
        if must_be_seen.differentiated_again() or (dy is None and d_total is None):
            return *gradients.gradients(ctx, dy, d_total, needs), None, None
        where, operation = ctx.where, ctx.operation
        rstd, weight, bias, *terms = ctx.saved_tensors
        own_rstd = rstd.to_local()
        first, *others = [where.local_rows(t).to(rstd.dtype) for t in terms]
        h = first + others[0] if others else first
        xhat = (h if ctx.mean is None else h - ctx.mean) * own_rstd.unsqueeze(-1)
        own_dy = torch.zeros_like(xhat) if dy is None else where.local_rows(dy)
        of_rows = needs[0] or needs[1]
        wdy, of_weight, of_bias = reference.affine_gradients(
            own_dy,
            xhat,
            where.local_weight(weight),
            where.local_weight(bias),
            ctx.weight_offset,
            (of_rows, needs[2], needs[3]),
        )
        d_weight, d_bias = where.of_weight(of_weight, weight), where.of_weight(of_bias, bias)
        if wdy is None:
            return None, None, d_weight, d_bias, None, None
        own_d_total = where.local_rows(d_total)
        d = reference.gradient_of_row(wdy, own_d_total, xhat, own_rstd, operation.center, where.mean_of)
        dx, d_residual = (
            where.of_rows(reference.rounded(d, dtype), terms[0]) if need else None
            for dtype, need in ((operation.x, needs[0]), (operation.residual, needs[1]))
        )
        return dx, d_residual, d_weight, d_bias, None, None


def of_parts(x: DTensor, residual: Any, weight: Any, bias: Any, flags: Flags) -> Any:
    """See ``dtensor_bridge.of_parts``."""
    rows, weights = ([t for t in pair if t is not None] for pair in ((x, residual), (weight, bias)))
    where = where_of(rows, weights, 1 + flags.center)
    return None if where is None else partial(_NormOfParts.apply, x, residual, weight, bias, where)
