"""How rows lie over the threads of a GPU in Triton's kernels, and the halving sums of rows that lie so.

A tile has the shape [DEPTH * ROWS * SEGMENTS, WIDTH]. Where its first number is (d, row, s), d being the slowest, and
its second w, it has element 1024 * s + WIDTH * d + w of the row. So a warp's load is contiguous, a warp has segments
of its own, and most of the tree joins elements of one thread. Segments have DEPTH * WIDTH elements: 1024 unless the
row is shorter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.numbers import gain, halved, halved_first, mean_of, narrowed, widened


@triton.jit
def columns_of_tile(ROWS: tl.constexpr, SEGMENTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """Where in its row each element of a tile lies."""
    part = tl.arange(0, DEPTH * ROWS * SEGMENTS)[:, None]
    first = part % SEGMENTS * (DEPTH * WIDTH) + part // (ROWS * SEGMENTS) * WIDTH
    return first + tl.arange(0, WIDTH)[None, :]


@triton.jit
def rows_of_tile(ROWS: tl.constexpr, SEGMENTS: tl.constexpr, DEPTH: tl.constexpr):
    """The row of each element of a tile, among its own."""
    return (tl.arange(0, DEPTH * ROWS * SEGMENTS) % (ROWS * SEGMENTS) // SEGMENTS)[:, None]


@triton.jit
def inside_of(row, column, rows, N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Whether elements of ROWS rows exist; None where all do. One row always exists."""
    if ROWS == 1 and N % TILE == 0:
        return
    elif ROWS == 1:
        return column < N
    elif N == TILE:
        return row < rows
    else:
        return (column < N) & (row < rows)


@triton.jit
def exchanged(value):
    """A tensor with the two halves of its second dimension, which has length 2, in each other's place.

    The sum of two integers minus the one is the other, also where the sum wraps. The compiler sees that, and makes a
    single shuffle of it.
    """
    BITS: tl.constexpr = tl.uint64 if value.dtype == tl.float64 else tl.uint32
    bits = value.to(BITS, bitcast=True)
    both = tl.sum(bits, axis=1, keep_dims=True).to(tl.uint64)  # whose type the interpreter gets wrong without
    return (both - bits.to(tl.uint64)).to(BITS).to(value.dtype, bitcast=True)


@triton.jit
def sums_of_segments(tile, SUMS: tl.constexpr, VECTOR: tl.constexpr):
    """The halving sum of each segment of a tile: [SUMS]. A thread has VECTOR neighbours of a tile's width.

    Two lanes that add their VECTOR values to each other's share the work: each keeps one half of its values, gives the
    other half away, and adds what it gets. So every level takes half as many shuffles and additions as the one before.
    Which half a lane keeps is the highest bit of an element's number in its vector. These bits are halved last, and
    until then they lie in the first dimension.
    """
    value = tl.reshape(halved_first(tile, SUMS), (SUMS, tile.shape[1] // VECTOR, VECTOR))
    for _ in tl.static_range(3):
        if value.shape[1] > 1 and value.shape[2] > 1:
            halves = tl.reshape(value, (value.shape[0], 2, value.shape[1] // 2, 2, value.shape[2] // 2))
            first, second = tl.split(tl.permute(halves, (0, 1, 2, 4, 3)))
            upper = tl.arange(0, 2)[None, :, None, None] == 1
            halves = tl.where(upper, second, first) + exchanged(tl.where(upper, first, second))
            value = tl.reshape(halves, (value.shape[0] * 2, value.shape[1] // 2, value.shape[2] // 2))
    for _ in tl.static_range(20):
        if value.shape[1] > 1:
            value = tl.sum(tl.reshape(value, (value.shape[0], 2, value.shape[1] // 2, value.shape[2])), axis=1)
    return halved(tl.reshape(value, (SUMS, VECTOR)))


@triton.jit
def sums_of_rows(sums, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The halving sums of rows, from those of their segments: [ROWS * SEGMENTS] to [ROWS].

    By ``tl.split``, which gives every thread all sums of its row at once: one barrier. With ``tl.sum`` the warps would
    wait for each other at every level.
    """
    sums = tl.reshape(tl.permute(tl.reshape(sums, (ROWS, SEGMENTS)), (1, 0)), (SEGMENTS * ROWS, 1))
    return tl.reshape(halved_first(sums, ROWS), (ROWS,))


@triton.jit
def sums_of_tile(tile, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, VECTOR: tl.constexpr):
    """The halving sums of the rows of a tile: [ROWS]."""
    return sums_of_rows(sums_of_segments(tile, ROWS * SEGMENTS, VECTOR), ROWS, SEGMENTS)


@triton.jit
def with_sums(sums, here, tile, VECTOR: tl.constexpr):
    """The sums of the segments of a row, [TILES, SEGMENTS], with those of a tile where it is ``here``."""
    return tl.where(here, sums_of_segments(tile, sums.shape[1], VECTOR)[None, :], sums)


@triton.jit
def total_of(sums):
    """The halving sum of a row, [1], from those of the segments of its tiles."""
    return halved(tl.reshape(sums, (1, sums.shape[0] * sums.shape[1])))


@triton.jit
def per_element(value, SEGMENTS: tl.constexpr, DEPTH: tl.constexpr):
    """One value per row, [ROWS], for the elements of a tile."""
    value = tl.broadcast_to(value[None, :, None], (DEPTH, value.shape[0], SEGMENTS))
    return tl.reshape(value, (DEPTH * value.shape[1] * SEGMENTS, 1))


@triton.jit
def within(value, inside):
    """Values, and +0 outside: where a sum has no terms, 0 times an infinite number may be there, or the mean."""
    if inside is not None:
        value = tl.where(inside, value, 0)
    return value


@triton.jit
def centered(
    tile, inside, N: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, VECTOR: tl.constexpr
):
    """The rows of a tile less their means; they are +0 outside, before and after."""
    DEPTH: tl.constexpr = tile.shape[0] // (ROWS * SEGMENTS)
    mean = mean_of(sums_of_tile(tile, ROWS, SEGMENTS, VECTOR), N, A)
    return within(tile - per_element(mean, SEGMENTS, DEPTH), inside)


@triton.jit
def stored(rows, column, inside):
    """The values of these columns, and 0 outside; None if the operand is absent. ``inside``: None if all are inside."""
    if rows is None:
        return
    elif inside is None:
        return tl.load(rows + column)
    else:
        return tl.load(rows + column, mask=inside, other=0)


@triton.jit
def loaded(rows, column, inside, A: tl.constexpr):
    """The values of these columns, as ``A``."""
    return widened(stored(rows, column, inside), A)


@triton.jit
def store(values, rows, column, inside):
    """Stores values, rounded to the type of the rows; nothing if the operand is absent."""
    if rows is not None:
        tl.store(rows + column, narrowed(values, rows.dtype.element_ty), mask=inside)


@triton.jit
def gain_at(weight, column, inside, weight_offset, OFFSET: tl.constexpr, A: tl.constexpr):
    """The gain of these columns; None without a weight."""
    if weight is None:
        return
    else:
        return gain(loaded(weight, column, inside, A), weight_offset, OFFSET, A)
