"""Triton's kernels for CPUs: one row per program, in tiles that suit a processor's vector registers.

Rows may have any length: only the number of segments, as a power of two, is compiled in. Accesses have no masks: few
processors have an instruction for a masked access to 16-bit values, and without one LLVM makes a branch for each
element. What follows a row's last whole tile is read and written in pieces, each twice as long as the next.

Every kernel of a pass takes the same arguments, those of its type in ``cpu/run/triton_programs.c``; an operand that is
absent is a null pointer. ``PROCESSOR`` is the key of compiled code, and nothing else. ``cpu_quantize.py`` and
``cpu_gates.py`` have the kernels of quantizers and of gates alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.gates import activated
from fusednorm.backends.triton.kernels.numbers import (
    gain,
    mean_of,
    narrowed,
    normalised,
    row_of_heads,
    rows_at,
    rstd_of,
    scaled,
    widened,
)

#: The operands and steps of a pass, added up: KEEP, for example, stores sums in the first pass, and not in the second.
ADD, KEEP, ROUND_SUM, ROUND_NORM, WEIGHT = (tl.constexpr(1 << bit) for bit in range(5))
D_TOTAL, DX, DRESIDUAL, TWO_LEVELS = (tl.constexpr(1 << bit) for bit in range(5, 9))
BIAS, OF_HEADS, SCALED = (tl.constexpr(1 << bit) for bit in range(9, 12))
#: A gate before the norm or after it; its function, which is silu without a flag; the gradients of a gate alone.
GATE_BEFORE, GATE_AFTER, SIGMOID, GELU_TANH, DY, DZ = (tl.constexpr(1 << bit) for bit in range(12, 18))
#: Rows are rounded to x's type between a norm and what follows it. A quantizer: whether rows are normalised before, and
#: stored too; whether the scale is given, one for all rows.
PASSED, NORMALISES, STORES, GIVEN = (tl.constexpr(1 << bit) for bit in range(18, 22))
#: The fields of a ``Quantization``: float8 formats, zero points, how scales are found and applied, what is returned.
E4M3, E5M2, PLUS_128, AFTER, BEFORE = (tl.constexpr(1 << bit) for bit in range(22, 27))
BY_RECIPROCAL, RECIPROCAL, RATIO, MULTIPLIER = (tl.constexpr(1 << bit) for bit in range(27, 31))
#: More functions of a gate beside a norm.
GELU, RELU2 = (tl.constexpr(1 << bit) for bit in range(31, 33))
#: Of a gate without a norm: z and y take turns in memory; there is no y, but the function's value is the result.
IN_TURNS, NO_ROWS = (tl.constexpr(1 << bit) for bit in range(33, 35))
#: Scales are rounded up to powers of two. Rows are normalised less their means, which a backward pass may KEEP.
POWER_OF_TWO, CENTER = (tl.constexpr(1 << bit) for bit in range(35, 37))
#: The flags of rows whose sums are there.
AGAIN = tl.constexpr(~(ADD.value | SCALED.value))


@triton.jit
def halved_vector(value):
    """Sums [n], n a power of two, by ``v = v[:n/2] + v[n/2:]`` until one is left: [1]."""
    for _ in tl.static_range(20):
        if value.shape[0] > 1:
            value = tl.sum(tl.reshape(value, (2, value.shape[0] // 2)), axis=0)
    return value


@triton.jit
def one_after_the_other(first, second):
    """Two vectors of the same length as one."""
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0)), (2 * first.shape[0],))


@triton.jit
def got(row, at, left, SIZE: tl.constexpr):
    """SIZE elements of a row from ``at`` on; where only ``left`` of them are there, those, and then zeros.

    ``left`` is None where all are there, else less than SIZE. Its bits are the lengths of the pieces, which lie in
    memory with the longest first. They are put together with the shortest first: after each step a vector of twice the
    length holds what ``left`` leaves over when divided by that.
    """
    if left is None:
        return tl.load(row + at + tl.arange(0, SIZE))
    else:
        value = tl.zeros((1,), row.dtype.element_ty)
        for bit in tl.static_range(20):
            if 1 << bit < SIZE:
                piece = tl.zeros_like(value)
                there = left & (1 << bit) != 0
                if there:
                    before = left >> bit + 1 << bit + 1
                    piece = tl.load(row + at + before + tl.arange(0, 1 << bit))
                following = tl.where(there, value, tl.zeros_like(value))
                value = one_after_the_other(tl.where(there, piece, value), following)
        return value


@triton.jit
def put(row, at, left, value, SIZE: tl.constexpr):
    """Stores SIZE elements where :func:`got` finds them."""
    if left is None:
        tl.store(row + at + tl.arange(0, SIZE), value)
    else:
        for level in tl.static_range(20):
            if SIZE >> level + 1 > 0:
                first, second = tl.split(tl.permute(tl.reshape(value, (2, SIZE >> level + 1)), (1, 0)))
                there = left & (SIZE >> level + 1) != 0
                if there:
                    before = left & -(SIZE >> level)
                    tl.store(row + at + before + tl.arange(0, SIZE >> level + 1), first)
                value = tl.where(there, second, first)


@triton.jit
def eight_added(
    term: tl.constexpr, row, at, FLAGS: tl.constexpr, A: tl.constexpr, APART: tl.constexpr, SIZE: tl.constexpr
):
    """The terms of eight vectors that begin APART elements from each other, added up as a segment's are: [SIZE]."""
    s0 = term(row, at, None, FLAGS, A, SIZE)
    s1 = term(row, at + APART, None, FLAGS, A, SIZE)
    s2 = term(row, at + 2 * APART, None, FLAGS, A, SIZE)
    s3 = term(row, at + 3 * APART, None, FLAGS, A, SIZE)
    s0 += term(row, at + 4 * APART, None, FLAGS, A, SIZE)
    s1 += term(row, at + 5 * APART, None, FLAGS, A, SIZE)
    s2 += term(row, at + 6 * APART, None, FLAGS, A, SIZE)
    s3 += term(row, at + 7 * APART, None, FLAGS, A, SIZE)
    return (s0 + s2) + (s1 + s3)


@triton.jit
def sum_of_row(
    term: tl.constexpr,
    row,
    hidden_size,
    FLAGS: tl.constexpr,
    A: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tree's sum of a row's terms, [1]; ``term(row, at, left, FLAGS, A, SIZE)`` gives those of :func:`got`'s.

    Whole segments go in quarters of a tile, so that what is added up stays in registers. The last one, if it is not
    whole, goes tile by tile.
    """
    PART: tl.constexpr = TILE // 4
    index = tl.arange(0, SEGMENTS)
    sums = tl.zeros((SEGMENTS,), A)
    segments = hidden_size // (8 * TILE)
    for segment in range(segments):
        at = segment * (8 * TILE)
        total = eight_added(term, row, at, FLAGS, A, TILE, PART) + eight_added(
            term, row, at + 2 * PART, FLAGS, A, TILE, PART
        )
        other = eight_added(term, row, at + PART, FLAGS, A, TILE, PART) + eight_added(
            term, row, at + 3 * PART, FLAGS, A, TILE, PART
        )
        sums = tl.where(index == segment, halved_vector(total + other), sums)
    if segments * (8 * TILE) < hidden_size:
        s0, s1, s2, s3 = tl.zeros((TILE,), A), tl.zeros((TILE,), A), tl.zeros((TILE,), A), tl.zeros((TILE,), A)
        for half in range(2):
            at = (2 * segments + half) * (4 * TILE)
            if at + TILE <= hidden_size:
                s0 += term(row, at, None, FLAGS, A, TILE)
            if at + 2 * TILE <= hidden_size:
                s1 += term(row, at + TILE, None, FLAGS, A, TILE)
            if at + 3 * TILE <= hidden_size:
                s2 += term(row, at + 2 * TILE, None, FLAGS, A, TILE)
            if at + 4 * TILE <= hidden_size:
                s3 += term(row, at + 3 * TILE, None, FLAGS, A, TILE)
        left = hidden_size % TILE
        if left > 0:
            last = term(row, hidden_size - left, left, FLAGS, A, TILE)
            tile = hidden_size // TILE % 4
            s0 += tl.where(tile == 0, last, 0)
            s1 += tl.where(tile == 1, last, 0)
            s2 += tl.where(tile == 2, last, 0)
            s3 += tl.where(tile == 3, last, 0)
        sums = tl.where(index == segments, halved_vector((s0 + s2) + (s1 + s3)), sums)
    return halved_vector(sums)


@triton.jit
def over_row(write: tl.constexpr, row, more, hidden_size, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """Has ``write(row, more, at, left, FLAGS, A, SIZE)`` write a row, SIZE elements at a time."""
    left = hidden_size % SIZE
    for at in range(0, hidden_size - left, SIZE):
        write(row, more, at, None, FLAGS, A, SIZE)
    if left > 0:
        write(row, more, hidden_size - left, left, FLAGS, A, SIZE)


@triton.jit
def gain_of(weight, at, left, weight_offset, A: tl.constexpr, SIZE: tl.constexpr):
    """The gain of these columns. An offset of 0 is added too, which changes the sign of a zero at most."""
    return gain(widened(got(weight, at, left, SIZE), A), weight_offset, True, A)


@triton.jit
def of_gate(z_row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The function of these elements of a gate."""
    WITHOUT_SIGMOID: tl.constexpr = "gelu" if GELU & FLAGS else ("relu2" if RELU2 & FLAGS else "silu")
    ACTIVATION: tl.constexpr = "sigmoid" if SIGMOID & FLAGS else ("gelu_tanh" if GELU_TANH & FLAGS else WITHOUT_SIGMOID)
    return activated(widened(got(z_row, at, left, SIZE), A), ACTIVATION, A)


@triton.jit
def within(value, left, SIZE: tl.constexpr):
    """Elements of :func:`got`'s, and +0 after the row's, where 0 times an infinite number may be, or the mean."""
    return value if left is None else tl.where(tl.arange(0, SIZE) < left, value, 0)


@triton.jit
def added(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The elements that are normalised: x's, or with ADD the sums, which are stored with KEEP; less CENTER's mean."""
    x_row, residual_row, total_row, x_scale, z_row, mean = row
    h = widened(got(x_row, at, left, SIZE), A)
    if SCALED & FLAGS:
        h = scaled(h, x_scale, x_row.dtype.element_ty, A)
    if ADD & FLAGS:
        h = h + widened(got(residual_row, at, left, SIZE), A)
        if KEEP & FLAGS:
            total = narrowed(h, total_row.dtype.element_ty)
            put(total_row, at, left, total, SIZE)
            if ROUND_SUM & FLAGS:
                h = widened(total, A)
    if GATE_BEFORE & FLAGS:
        h = h * of_gate(z_row, at, left, FLAGS, A, SIZE)
    if CENTER & FLAGS:
        h = h - mean
    return h


@triton.jit
def square(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The squares of what is normalised."""
    h = added(row, at, left, FLAGS, A, SIZE)
    if CENTER & FLAGS:
        h = within(h, left, SIZE)
    return h * h


@triton.jit
def rstd_and_mean(
    row, hidden_size, eps, FLAGS: tl.constexpr, A: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr
):
    """rstd of the row that :func:`added` knows, [1], and its mean, [1]."""
    mean = row[5]
    if CENTER & FLAGS:
        mean = mean_of(sum_of_row(added, row, hidden_size, ~CENTER & FLAGS, A, SEGMENTS, TILE), hidden_size, A)
        row = again(row, mean, FLAGS)
        squares = sum_of_row(square, row, hidden_size, AGAIN & FLAGS if KEEP & FLAGS else FLAGS, A, SEGMENTS, TILE)
    else:
        squares = sum_of_row(square, row, hidden_size, FLAGS, A, SEGMENTS, TILE)
    return rstd_of(squares, hidden_size, eps, A), mean


@triton.jit
def again(row, mean, FLAGS: tl.constexpr):
    """The row as :func:`added` reads it once it has all sums: with KEEP they are there, and AGAIN has the flags."""
    x_row, residual_row, total_row, x_scale, z_row, _ = row
    if KEEP & FLAGS:
        return total_row, total_row, total_row, x_scale, z_row, mean
    else:
        return x_row, residual_row, total_row, x_scale, z_row, mean


@triton.jit
def after_norm(row, of_norm, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The normalised elements of the row that :func:`added` knows."""
    h = added(row, at, left, FLAGS, A, SIZE)
    x, row_rstd, weight_row, weight_offset, bias_row = of_norm
    g = gain_of(weight_row, at, left, weight_offset, A, SIZE) if WEIGHT & FLAGS else None
    b = got(bias_row, at, left, SIZE) if BIAS & FLAGS else None
    y = normalised(h, row_rstd, g, b, x.dtype.element_ty, ROUND_NORM & FLAGS, A)
    if PASSED & FLAGS:
        y = widened(narrowed(y, x.dtype.element_ty), A)
    return y


@triton.jit
def normalise(row, more, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """Writes the elements of :func:`after_norm`, gated with GATE_AFTER."""
    of_norm, out_row, z_row = more
    y = after_norm(row, of_norm, at, left, FLAGS, A, SIZE)
    if GATE_AFTER & FLAGS:
        y = y * of_gate(z_row, at, left, FLAGS, A, SIZE)
    put(out_row, at, left, narrowed(y, out_row.dtype.element_ty), SIZE)


@triton.jit
def forward(
    x,
    residual,
    weight,
    out,
    residual_out,
    rstd,
    bias,
    z,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    z_stride,
    inner,
    x_jump,
    residual_jump,
    out_jump,
    residual_out_jump,
    z_jump,
    hidden_size,
    with_rstd,
    weight_stride,
    bias_stride,
    heads,
    eps,
    weight_offset,
    x_scale,
    A: tl.constexpr,
    FLAGS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """Normalises a row, and stores rstd if ``with_rstd``. With KEEP the second pass finds the sums in residual_out."""
    number = tl.program_id(0).to(tl.int64)
    levels = inner if TWO_LEVELS & FLAGS else None
    x_row = rows_at(x, number, x_stride, x_jump, levels)
    residual_row = rows_at(residual, number, residual_stride, residual_jump, levels)
    out_row = rows_at(out, number, out_stride, out_jump, levels)
    total_row = rows_at(residual_out, number, residual_out_stride, residual_out_jump, levels)
    z_row = rows_at(z, number, z_stride, z_jump, levels)
    row = (x_row, residual_row, total_row, x_scale, z_row, tl.zeros((1,), A))
    row_rstd, mean = rstd_and_mean(row, hidden_size, eps, FLAGS, A, SEGMENTS, TILE)
    row = again(row, mean, FLAGS)
    if with_rstd != 0:
        tl.store(rstd + number + tl.arange(0, 1), row_rstd)
    number_of_heads = heads if OF_HEADS & FLAGS else None
    weight_row = row_of_heads(weight, number, weight_stride, number_of_heads)
    bias_row = row_of_heads(bias, number, bias_stride, number_of_heads)
    more = ((x, row_rstd, weight_row, weight_offset, bias_row), out_row, z_row)
    over_row(normalise, row, more, hidden_size, AGAIN & FLAGS if KEEP & FLAGS else KEEP | FLAGS, A, TILE // 4)


@triton.jit
def weighted(dy_row, weight, at, left, weight_offset, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The gradient of the normalised row, from that of the output."""
    wdy = widened(got(dy_row, at, left, SIZE), A)
    if WEIGHT & FLAGS:
        wdy = wdy * gain_of(weight, at, left, weight_offset, A, SIZE)
    return wdy


@triton.jit
def kept(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The rows that were normalised."""
    return widened(got(row[1], at, left, SIZE), A)


@triton.jit
def xhat_of(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The normalised elements again."""
    h = kept(row, at, left, FLAGS, A, SIZE)
    if CENTER & FLAGS:
        h = h - row[5]
    return h * row[2]


@triton.jit
def incoming(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The gradient of the normalised elements, and +0 after the row's."""
    dy_row, _, _, weight, weight_offset, _ = row
    return within(weighted(dy_row, weight, at, left, weight_offset, FLAGS, A, SIZE), left, SIZE)


@triton.jit
def product(row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """The products whose sum a gradient needs."""
    dy_row, _, _, weight, weight_offset, _ = row
    xhat = xhat_of(row, at, left, FLAGS, A, SIZE)
    return within(weighted(dy_row, weight, at, left, weight_offset, FLAGS, A, SIZE) * xhat, left, SIZE)


@triton.jit
def differentiate(row, more, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """Writes the gradients of these elements."""
    dy_row, _, row_rstd, weight, weight_offset, _ = row
    c, b, d_total_row, dx_row, dresidual_row = more
    wdy = weighted(dy_row, weight, at, left, weight_offset, FLAGS, A, SIZE)
    if CENTER & FLAGS:
        wdy = wdy - b
    d = (wdy - xhat_of(row, at, left, FLAGS, A, SIZE) * c) * row_rstd
    if D_TOTAL & FLAGS:
        d = d + widened(got(d_total_row, at, left, SIZE), A)
    if DX & FLAGS:
        put(dx_row, at, left, narrowed(d, dx_row.dtype.element_ty), SIZE)
    if DRESIDUAL & FLAGS:
        put(dresidual_row, at, left, narrowed(d, dresidual_row.dtype.element_ty), SIZE)


@triton.jit
def share_of_block(
    dy,
    h,
    rstd,
    means,
    begin,
    end,
    dy_stride,
    h_stride,
    levels,
    dy_jump,
    h_jump,
    at,
    left,
    FLAGS: tl.constexpr,
    A: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The share that the rows from ``begin`` to ``end`` add to the weight's gradient."""
    total = tl.zeros((SIZE,), A)
    for number in range(begin, end):
        h_row, dy_row = rows_at(h, number, h_stride, h_jump, levels), rows_at(dy, number, dy_stride, dy_jump, levels)
        h_part = widened(got(h_row, at, left, SIZE), A)
        if CENTER & FLAGS:
            h_part = h_part - tl.load(means + number)
        xhat = h_part * tl.load(rstd + number)
        total += widened(got(dy_row, at, left, SIZE), A) * xhat
    return total


@triton.jit
def add_shares(partial, dweight, blocks, hidden_size, at, left, SIZE: tl.constexpr):
    """Adds up the blocks' shares of these columns by halving, where they lie."""
    half = 1
    while 2 * half < blocks:
        half = 2 * half
    while half > 0:
        for k in range(tl.minimum(half, tl.maximum(blocks - half, 0))):
            to, other = partial + k * hidden_size, partial + (k + half) * hidden_size
            put(to, at, left, got(to, at, left, SIZE) + got(other, at, left, SIZE), SIZE)
        half = half // 2
    put(dweight, at, left, narrowed(got(partial, at, left, SIZE), dweight.dtype.element_ty), SIZE)


@triton.jit
def backward(
    dy,
    d_total,
    h,
    rstd,
    weight,
    dx,
    dresidual,
    partial,
    dweight,
    dy_stride,
    d_total_stride,
    h_stride,
    inner,
    dy_jump,
    d_total_jump,
    h_jump,
    rows,
    block,
    blocks,
    hidden_size,
    weight_offset,
    A: tl.constexpr,
    PART: tl.constexpr,
    FLAGS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """PART "rows": the gradients of a row. "shares": a block's share of the weight's gradient. "weight": all of that.

    The last two take TILE columns per program. Means, which "rows" stores with KEEP, lie after the blocks' shares.
    """
    means = partial + blocks * hidden_size
    if PART == "rows":
        number = tl.program_id(0).to(tl.int64)
        row_rstd = tl.load(rstd + number + tl.arange(0, 1))
        levels = inner if TWO_LEVELS & FLAGS else None
        dy_row, h_row = rows_at(dy, number, dy_stride, dy_jump, levels), rows_at(h, number, h_stride, h_jump, levels)
        b, mean = tl.zeros((1,), A), tl.zeros((1,), A)
        row = (dy_row, h_row, row_rstd, weight, weight_offset, mean)
        if CENTER & FLAGS:
            mean = mean_of(sum_of_row(kept, row, hidden_size, FLAGS, A, SEGMENTS, TILE), hidden_size, A)
            if KEEP & FLAGS:
                tl.store(means + number + tl.arange(0, 1), mean)
            row = (dy_row, h_row, row_rstd, weight, weight_offset, mean)
            b = mean_of(sum_of_row(incoming, row, hidden_size, FLAGS, A, SEGMENTS, TILE), hidden_size, A)
        total = sum_of_row(product, row, hidden_size, FLAGS, A, SEGMENTS, TILE)
        c = mean_of(total, hidden_size, A)
        d_total_row = rows_at(d_total, number, d_total_stride, d_total_jump, levels)
        dx_row, dresidual_row = dx + number * hidden_size, dresidual + number * hidden_size
        over_row(differentiate, row, (c, b, d_total_row, dx_row, dresidual_row), hidden_size, FLAGS, A, TILE // 4)
    elif PART == "shares":
        tiles = tl.cdiv(hidden_size, TILE)
        number = (tl.program_id(0) // tiles).to(tl.int64)
        at = (tl.program_id(0) % tiles) * TILE
        begin, end = number * block, tl.minimum(number * block + block, rows)
        share = partial + number * hidden_size
        levels = inner if TWO_LEVELS & FLAGS else None
        if at + TILE <= hidden_size:
            total = share_of_block(
                dy, h, rstd, means, begin, end, dy_stride, h_stride, levels, dy_jump, h_jump, at, None, FLAGS, A, TILE
            )
            put(share, at, None, total, TILE)
        else:
            left = hidden_size - at
            total = share_of_block(
                dy, h, rstd, means, begin, end, dy_stride, h_stride, levels, dy_jump, h_jump, at, left, FLAGS, A, TILE
            )
            put(share, at, left, total, TILE)
    else:
        at = tl.program_id(0) * TILE
        if at + TILE <= hidden_size:
            add_shares(partial, dweight, blocks, hidden_size, at, None, TILE)
        else:
            add_shares(partial, dweight, blocks, hidden_size, at, hidden_size - at, TILE)
