"""Rows of DTensors that lie in parts on ranks, which exchange sums of segments in place of whole rows.

docs/spec.md, section 3, says why the sums have the bits of those of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusednorm.calls.call import accumulator
from fusednorm.reference import norm as reference
from fusednorm.reference.norm import SEGMENT
from fusednorm.torch_ops.sharding import common_rows, of_ranks

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


def gathered(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The tensors of all ranks of a dimension of the mesh, [ranks, ...], which have one shape."""
    collectives, group = torch.ops._c10d_functional, mesh.get_group(dim).group_name
    found = collectives.all_gather_into_tensor(own.unsqueeze(0).contiguous(), mesh.size(dim), group)
    return collectives.wait_tensor(found)  # type: ignore[no-any-return]


def exchanged_sum(own: Tensor, parts: Parts, mesh: DeviceMesh, dim: int) -> Tensor:
    """``treesum`` of whole rows, of which each rank has a part.

    Ranks exchange the sums of whole segments. Of a segment that is cut they exchange what the first level of its tree
    makes of each part: 512 sums of two terms, of which one rank has both, or two ranks have one each. An addition of
    both is then the one that the tree has, and one of +0 changes no number.

    Args:
        own: [..., numbers], those of this rank's pieces, one after the other: see :func:`numbers_of`.
        parts: the parts of all ranks of ``dim``.
        mesh: the ranks.
        dim: the dimension of the mesh.

    Returns:
        [...], the same on each of these ranks.
    """
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
    """How rows are divided among ranks."""

    mesh: DeviceMesh
    #: The placements of rows.
    rows: tuple[Any, ...]
    #: The dimension of the mesh that has the parts.
    dim: int
    parts: Parts

    @property
    def rank(self) -> int:
        """The number of this rank among those of the parts."""
        return self.mesh.get_local_rank(self.dim)

    @property
    def start(self) -> int:
        """The first element of this rank's part."""
        return self.parts.bounds[self.rank]

    def local_rows(self, rows: Any) -> Any:
        """The part of [..., N] that this rank has, or None."""
        return None if rows is None else rows.redistribute(self.mesh, self.rows).to_local()

    def of_rows(self, local: Tensor | None, like: DTensor) -> Any:
        """The DTensor of all ranks' rows."""
        return None if local is None else of_ranks(local.contiguous(), self.mesh, self.rows, like.shape)

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


def where_of(rows: DTensor, sums: int, others: int = 0) -> Where | None:
    """How rows are divided among ranks; None if they are whole, or if it moves fewer bytes to join them.

    ``sums``, ``others``: see :meth:`Parts.moves_fewer_bytes`.
    """
    mesh, last = rows.device_mesh, rows.ndim - 1
    joined, apart = common_rows(rows._spec).placements, common_rows(rows._spec, whole=0).placements
    dims = [dim for dim, placement in enumerate(apart) if placement.is_shard(last) and joined[dim].is_replicate()]
    if len(dims) != 1 or type(apart[dims[0]]) is not Shard:  # another kind of placement has other parts
        return None
    (dim,) = dims
    parts = parts_of(rows.shape[-1], mesh.size(dim))
    moved = [rows.dtype] if rows.placements[dim].is_shard() else []
    if not parts.moves_fewer_bytes(sums, accumulator(rows.dtype), moved, others):
        return None
    return Where(mesh, tuple(apart[i] if i == dim else p for i, p in enumerate(joined)), dim, parts)
