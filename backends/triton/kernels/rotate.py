"""The Triton kernel that normalises and rotates heads of q and of k: docs/spec.md, section 8.

A program has several heads, and a thread both numbers of each pair that it rotates. FORM says how:

- "halves": the second numbers of pairs follow the first ones. Both are read apart, and together they are all of a head.
- "neighbours": pairs lie side by side. A thread reads whole vectors, and takes them apart.
- "parts": a tile has all numbers of heads, of which the rotation takes a part, or none. The other numbers of pairs are
  read, and normalised, a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.gates import between
from fusednorm.backends.triton.kernels.numbers import gain, narrowed, normalised, rows_at, rstd_of, widened
from fusednorm.backends.triton.kernels.tiles import stored, sums_of_segments


@triton.jit
def of_set(is_k, of_q, of_k):
    """The operand of k, or that of q; None if it is absent."""
    if of_q is None:
        return
    else:
        return tl.where(is_k, of_k, of_q)


@triton.jit
def inside_heads(there, column, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Whether numbers exist: whether their head does, and has so many."""
    if SIZE == WIDTH:
        return there
    else:
        return there & (column < SIZE)


@triton.jit
def pairs_at(
    heads, there, FORM: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr
):
    """Numbers of heads as they are stored, and the numbers that they are rotated with. ``there``: which heads exist."""
    if FORM == "neighbours":
        column = tl.arange(0, 2 * WIDTH)[None, :]
        both = tl.load(heads + column, inside_heads(there, column, SIZE, 2 * WIDTH), 0)
        return tl.split(tl.reshape(both, (both.shape[0], WIDTH, 2)))
    elif FORM == "halves":
        column = tl.arange(0, WIDTH)[None, :]
        inside = inside_heads(there, column, PAIRS, WIDTH)
        return stored(heads, column, inside), stored(heads + PAIRS, column, inside)
    else:
        column = tl.arange(0, WIDTH)[None, :]
        numbers = tl.load(heads + column, inside_heads(there, column, SIZE, WIDTH), 0)
        if PAIRS == 0:
            return numbers, numbers
        else:
            # As many neighbours as a vector has are rotated with neighbours.
            TOGETHER: tl.constexpr = VECTOR if PAIRS % VECTOR == 0 else 1
            other = tl.where(column < PAIRS, column + PAIRS, column - PAIRS)
            other = tl.max_contiguous(tl.multiple_of(other, [1, TOGETHER]), [1, TOGETHER])
            return numbers, tl.load(heads + other, there & (column < 2 * PAIRS), 0)


@triton.jit
def store_pairs(
    heads, first, second, there, FORM: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr
):
    """Stores numbers where :func:`pairs_at` finds them. In "parts" the second ones are the first ones of others."""
    first, second = narrowed(first, heads.dtype.element_ty), narrowed(second, heads.dtype.element_ty)
    if FORM == "neighbours":
        column = tl.arange(0, 2 * WIDTH)[None, :]
        tl.store(heads + column, tl.interleave(first, second), inside_heads(there, column, SIZE, 2 * WIDTH))
    elif FORM == "halves":
        column = tl.arange(0, WIDTH)[None, :]
        inside = inside_heads(there, column, PAIRS, WIDTH)
        tl.store(heads + column, first, inside)
        tl.store(heads + PAIRS + column, second, inside)
    else:
        column = tl.arange(0, WIDTH)[None, :]
        tl.store(heads + column, first, inside_heads(there, column, SIZE, WIDTH))


@triton.jit
def product(value, angle, PRODUCTS: tl.constexpr, A: tl.constexpr):
    """A product, rounded to the type that products are rounded to before two are added."""
    return between(value * angle, PRODUCTS, A)


@triton.jit
def after_norm(
    h,
    rstd,
    weight,
    weight_offset,
    X: tl.constexpr,
    BETWEEN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    A: tl.constexpr,
):
    """Normalised heads, rounded as they are passed to the rotation. A weight is as it is stored, or None."""
    g = None if weight is None else gain(widened(weight, A), weight_offset, OFFSET, A)
    return between(normalised(h, rstd, g, None, X, ROUND_NORM, A), BETWEEN, A)


@triton.jit
def rotate_tile(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    q_rstd,
    k_rstd,
    cos,
    sin,
    positions,
    q_stride,
    k_stride,
    q_out_stride,
    k_out_stride,
    cos_stride,
    sin_stride,
    positions_stride,
    inner,
    q_jump,
    k_jump,
    q_out_jump,
    k_out_jump,
    cos_jump,
    sin_jump,
    positions_jump,
    q_head,
    k_head,
    q_out_head,
    k_out_head,
    q_weight_head,
    k_weight_head,
    q_count,
    k_count,
    rows,
    eps,
    weight_offset,
    SIZE: tl.constexpr,
    A: tl.constexpr,
    PAIRS: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    BETWEEN: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """ROWS heads of q or of k per program; those of q come first.

    A tile has WIDTH pairs, and in "parts" WIDTH numbers. There PAIRS may be 0: then nothing is rotated.
    """
    of_q = tl.cdiv(rows * q_count, ROWS)
    program = tl.program_id(0).to(tl.int64)
    is_k = program >= of_q
    first = tl.where(is_k, program - of_q, program) * ROWS
    count = tl.where(is_k, k_count, q_count)
    number = first + tl.arange(0, ROWS)[:, None]
    there = number < rows * count
    row = number // count
    head = number - row * count
    x, out = of_set(is_k, q, k), of_set(is_k, q_out, k_out)
    x_stride, out_stride = tl.where(is_k, k_stride, q_stride), tl.where(is_k, k_out_stride, q_out_stride)
    x_jump = of_set(is_k, q_jump, k_jump)
    out_jump = of_set(is_k, q_out_jump, k_out_jump)
    x_heads = rows_at(x, row, x_stride, x_jump, inner) + head * tl.where(is_k, k_head, q_head)
    out_heads = rows_at(out, row, out_stride, out_jump, inner) + head * tl.where(is_k, k_out_head, q_out_head)
    weight = of_set(is_k, q_weight, k_weight)
    # All is read before anything is added up, so that it is there when the sum is.
    a, b = pairs_at(x_heads, there, FORM, SIZE, PAIRS, WIDTH, VECTOR)
    a, b = widened(a, A), widened(b, A)
    weight_a, weight_b = None, None
    if weight is not None:
        weight_heads = weight + head * tl.where(is_k, k_weight_head, q_weight_head)
        weight_a, weight_b = pairs_at(weight_heads, there, FORM, SIZE, PAIRS, WIDTH, VECTOR)
    column = tl.arange(0, WIDTH)[None, :]
    # The columns of a tile that have an angle.
    ANGLES: tl.constexpr = 2 * PAIRS if FORM == "parts" else PAIRS
    if PAIRS > 0:
        angle = column % PAIRS if FORM == "parts" else column
        turning = inside_heads(there, column, ANGLES, WIDTH)
        if positions is None:
            cos_rows = rows_at(cos, row, cos_stride, cos_jump, inner)
            sin_rows = rows_at(sin, row, sin_stride, sin_jump, inner)
        else:
            position_rows = rows_at(positions, row, positions_stride, positions_jump, inner)
            position = tl.load(position_rows, mask=there, other=0).to(tl.int64)
            cos_rows, sin_rows = cos + position * cos_stride, sin + position * sin_stride
        c, s = stored(cos_rows, angle, turning), stored(sin_rows, angle, turning)
    if NORMALISED:
        if FORM == "neighbours":
            # The halving sum adds up the numbers with even indices, and those with odd ones, and both sums last.
            HALF: tl.constexpr = VECTOR // 2 if VECTOR > 1 else 1
            sums = sums_of_segments(a * a, ROWS, HALF) + sums_of_segments(b * b, ROWS, HALF)
        elif FORM == "halves":
            sums = sums_of_segments(a * a + b * b, ROWS, VECTOR)
        else:
            sums = sums_of_segments(a * a, ROWS, VECTOR)
        rstd = rstd_of(sums, SIZE, eps, A)
        rstds = of_set(is_k, q_rstd, k_rstd)
        if rstds is not None:
            of_rstd = first + tl.arange(0, ROWS)
            tl.store(rstds + of_rstd, rstd, mask=of_rstd < rows * count)
        rstd = rstd[:, None]
        X: tl.constexpr = q.dtype.element_ty
        a = after_norm(a, rstd, weight_a, weight_offset, X, BETWEEN, OFFSET, ROUND_NORM, A)
        b = after_norm(b, rstd, weight_b, weight_offset, X, BETWEEN, OFFSET, ROUND_NORM, A)
    if PAIRS > 0:
        c, s = widened(c, A), widened(s, A)
        own, other = product(a, c, PRODUCTS, A), product(b, s, PRODUCTS, A)
        if FORM == "parts":
            first_half, second_half = own - other, own + other
            turned = tl.where(column < PAIRS, first_half, second_half)
            a = tl.where(column < ANGLES, turned, a)
            tl.debug_barrier()  # another thread may store what this one reads
        else:
            turned_b = product(b, c, PRODUCTS, A) + product(a, s, PRODUCTS, A)
            a = own - other if 2 * ANGLES == SIZE else tl.where(column < ANGLES, own - other, a)
            b = turned_b if 2 * ANGLES == SIZE else tl.where(column < ANGLES, turned_b, b)
    store_pairs(out_heads, a, b, there, FORM, SIZE, PAIRS, WIDTH)
