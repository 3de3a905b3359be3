"""The Triton kernels for GPUs; ``cpu_norm.py`` has those for CPUs, and ``numbers.py`` what both share.

``tiles.py`` says how rows lie over threads.

Every operation here is rounded once: kernels are compiled with ``enable_fp_fusion=False``, quotients and roots are the
``_rn`` ones, and a sum adds two numbers at a time. ``A`` is the accumulator type, float32 or float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.gates import between, gated
from fusednorm.backends.triton.kernels.numbers import (
    halved,
    halved_first,
    narrowed,
    normalised,
    passed,
    quotient,
    row_of_heads,
    rows_at,
    rstd_of,
    scaled,
    widened,
)
from fusednorm.backends.triton.kernels.tiles import (
    columns_of_tile,
    gain_at,
    loaded,
    per_element,
    rows_of_tile,
    stored,
    sums_of_rows,
    sums_of_segments,
)


@triton.jit
def added(
    x_rows,
    x_scale,
    first_rstd,
    first_g,
    residual_rows,
    residual_out_rows,
    column,
    inside,
    BETWEEN: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    A: tl.constexpr,
):
    """The row that is normalised: x, scaled, or after a norm if BETWEEN asks for one, and the residual if there is one.

    Stores the sum, unless there is nowhere to.
    """
    h = loaded(x_rows + column, inside, A)
    if x_scale is not None:
        h = scaled(h, x_scale, x_rows.dtype.element_ty, A)
    if BETWEEN != "":
        h = passed(h, first_rstd, first_g, x_rows.dtype.element_ty, BETWEEN, ROUND_NORM, A)
    if residual_rows is not None:
        h = h + loaded(residual_rows + column, inside, A)
        if residual_out_rows is not None:
            total = narrowed(h, residual_out_rows.dtype.element_ty)
            tl.store(residual_out_rows + column, total, mask=inside)
            if ROUND_SUM:
                h = widened(total, A)
    return h


@triton.jit
def forward_tile(
    x,
    residual,
    weight,
    out,
    residual_out,
    rstd,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    inner,
    x_jump,
    residual_jump,
    out_jump,
    residual_out_jump,
    rows,
    eps,
    weight_offset,
    first_weight,
    first_eps,
    bias,
    weight_stride,
    bias_stride,
    heads,
    x_scale,
    z,
    z_stride,
    z_jump,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    BETWEEN: tl.constexpr,
    GATED: tl.constexpr,
    PASSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """ROWS whole rows per program, each kept in registers.

    GATED: the gate z comes "before" the norm, or "after" it, with rows rounded to PASSED between (None: they are not).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + rows_of_tile(ROWS, SEGMENTS, DEPTH)
    column = columns_of_tile(ROWS, SEGMENTS, DEPTH, WIDTH)
    inside_row = None if N == SEGMENTS * DEPTH * WIDTH else column < N
    every_row = row < rows if inside_row is None else inside_row & (row < rows)
    inside = inside_row if ROWS == 1 else every_row
    residual_rows = rows_at(residual, row, residual_stride, residual_jump, inner)
    residual_out_rows = rows_at(residual_out, row, residual_out_stride, residual_out_jump, inner)
    x_rows = rows_at(x, row, x_stride, x_jump, inner)
    first_rstd, first_g = None, None
    if BETWEEN != "":
        first_h = loaded(x_rows + column, inside, A)
        if first_weight is not None:
            first_g = gain_at(first_weight, column, inside_row, weight_offset, OFFSET, A)
        sums = sums_of_rows(sums_of_segments(first_h * first_h, ROWS * SEGMENTS, VECTOR), ROWS, SEGMENTS)
        first_rstd = per_element(rstd_of(sums, N, first_eps, A), SEGMENTS, DEPTH)
    h = added(
        x_rows,
        x_scale,
        first_rstd,
        first_g,
        residual_rows,
        residual_out_rows,
        column,
        inside,
        BETWEEN,
        ROUND_SUM,
        ROUND_NORM,
        A,
    )
    z_rows = rows_at(z, row, z_stride, z_jump, inner)
    if GATED == "before":
        h = gated(h, z_rows + column, inside, ACTIVATION, A)
    if out is not None:
        # Now, so that it is there when the sum is.
        weight_rows = row_of_heads(weight, row, weight_stride, heads)
        bias_rows = row_of_heads(bias, row, bias_stride, heads)
        g = None if weight is None else gain_at(weight_rows, column, inside_row, weight_offset, OFFSET, A)
        b = None if bias is None else stored(bias_rows + column, inside_row)
        row_rstd = rstd_of(sums_of_rows(sums_of_segments(h * h, ROWS * SEGMENTS, VECTOR), ROWS, SEGMENTS), N, eps, A)
        if rstd is not None:
            row_of_rstd = first + tl.arange(0, ROWS)
            tl.store(rstd + row_of_rstd, row_rstd, mask=row_of_rstd < rows)
        X: tl.constexpr = A if BETWEEN == "A" else x.dtype.element_ty  # the type of the rows that were added
        y = normalised(h, per_element(row_rstd, SEGMENTS, DEPTH), g, X, ROUND_NORM, A)
        if b is not None:
            y = y + widened(b, A)
        if GATED == "after":
            y = gated(between(y, PASSED, A), z_rows + column, inside, ACTIVATION, A)
        out_rows = rows_at(out, row, out_stride, out_jump, inner)
        tl.store(out_rows + column, narrowed(y, out.dtype.element_ty), mask=inside)


@triton.jit
def forward_wide(
    x,
    residual,
    weight,
    out,
    residual_out,
    rstd,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    inner,
    x_jump,
    residual_jump,
    out_jump,
    residual_out_jump,
    rows,
    eps,
    weight_offset,
    first_weight,
    first_eps,
    bias,
    weight_stride,
    bias_stride,
    heads,
    x_scale,
    z,
    z_stride,
    z_jump,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    BETWEEN: tl.constexpr,
    GATED: tl.constexpr,
    PASSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    KEPT: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row per program, tile by tile, twice; three times where BETWEEN asks for a norm before the addition.

    KEPT: the last pass finds the row in residual_out, or in x.
    """
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    X: tl.constexpr = A if BETWEEN == "A" else x.dtype.element_ty  # the type of the rows that are added
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = rows_at(x, row, x_stride, x_jump, inner), rows_at(out, row, out_stride, out_jump, inner)
    residual_row = rows_at(residual, row, residual_stride, residual_jump, inner)
    residual_out_row = rows_at(residual_out, row, residual_out_stride, residual_out_jump, inner)
    z_row = rows_at(z, row, z_stride, z_jump, inner)
    weight_row = row_of_heads(weight, row, weight_stride, heads)
    bias_row = row_of_heads(bias, row, bias_stride, heads)
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    index = tl.arange(0, TILES)[:, None]
    first_rstd = None
    if BETWEEN != "":
        first_sums = tl.zeros((TILES, SEGMENTS), A)
        for tile in range(tl.cdiv(N, TILE)):
            at = tile * TILE + column
            h = loaded(x_row + at, None if N % TILE == 0 else at < N, A)
            first_sums = tl.where(index == tile, sums_of_segments(h * h, SEGMENTS, VECTOR)[None, :], first_sums)
        first_rstd = rstd_of(halved(tl.reshape(first_sums, (1, TILES * SEGMENTS))), N, first_eps, A)
        first_rstd = tl.reshape(first_rstd, (1, 1))
    sums = tl.zeros((TILES, SEGMENTS), A)
    for tile in range(tl.cdiv(N, TILE)):
        at = tile * TILE + column
        inside = None if N % TILE == 0 else at < N
        g = None if first_weight is None else gain_at(first_weight, at, inside, weight_offset, OFFSET, A)
        stored_to = residual_out_row if KEPT else None
        h = added(x_row, x_scale, first_rstd, g, residual_row, stored_to, at, inside, BETWEEN, ROUND_SUM, ROUND_NORM, A)
        if GATED == "before":
            h = gated(h, z_row + at, inside, ACTIVATION, A)
        if out is not None:
            sums = tl.where(index == tile, sums_of_segments(h * h, SEGMENTS, VECTOR)[None, :], sums)
    if out is not None:
        row_rstd = rstd_of(halved(tl.reshape(sums, (1, TILES * SEGMENTS))), N, eps, A)
        if rstd is not None:
            tl.store(rstd + row + tl.arange(0, 1), row_rstd)
        row_rstd = tl.reshape(row_rstd, (1, 1))
        if KEPT and residual is not None:
            tl.debug_barrier()  # another thread may have stored what this one reads
        for tile in range(tl.cdiv(N, TILE)):
            at = tile * TILE + column
            inside = None if N % TILE == 0 else at < N
            if KEPT:
                h = loaded((x_row if residual is None else residual_out_row) + at, inside, A)
            else:
                g = None if first_weight is None else gain_at(first_weight, at, inside, weight_offset, OFFSET, A)
                h = added(
                    x_row,
                    x_scale,
                    first_rstd,
                    g,
                    residual_row,
                    residual_out_row,
                    at,
                    inside,
                    BETWEEN,
                    ROUND_SUM,
                    ROUND_NORM,
                    A,
                )
            if GATED == "before":
                h = gated(h, z_row + at, inside, ACTIVATION, A)
            g = None if weight is None else gain_at(weight_row, at, inside, weight_offset, OFFSET, A)
            y = normalised(h, row_rstd, g, X, ROUND_NORM, A)
            if bias is not None:
                y = y + loaded(bias_row + at, inside, A)
            if GATED == "after":
                y = gated(between(y, PASSED, A), z_row + at, inside, ACTIVATION, A)
            tl.store(out_row + at, narrowed(y, out.dtype.element_ty), mask=inside)


@triton.jit
def weighted(dy, weight, column, inside, weight_offset, OFFSET: tl.constexpr, A: tl.constexpr):
    """The gradient of the normalised row, from that of the output."""
    if weight is None:
        return dy
    else:
        return dy * gain_at(weight, column, inside, weight_offset, OFFSET, A)


@triton.jit
def products(wdy, xhat, inside):
    """The products whose sum a gradient needs; +0 outside, also where 0 times an infinite rstd is not."""
    product = wdy * xhat
    if inside is not None:
        product = tl.where(inside, product, 0)
    return product


@triton.jit
def stored_gradients(d, dx_rows, dresidual_rows, column, inside):
    """Stores the gradient in the types asked for."""
    if dx_rows is not None:
        tl.store(dx_rows + column, narrowed(d, dx_rows.dtype.element_ty), mask=inside)
    if dresidual_rows is not None:
        tl.store(dresidual_rows + column, narrowed(d, dresidual_rows.dtype.element_ty), mask=inside)


@triton.jit
def backward_tile(
    dy,
    d_total,
    h,
    rstd,
    weight,
    dx,
    dresidual,
    dy_stride,
    d_total_stride,
    h_stride,
    inner,
    dy_jump,
    d_total_jump,
    h_jump,
    rows,
    weight_offset,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradients of ROWS rows per program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + rows_of_tile(ROWS, SEGMENTS, DEPTH)
    column = columns_of_tile(ROWS, SEGMENTS, DEPTH, WIDTH)
    inside_row = None if N == SEGMENTS * DEPTH * WIDTH else column < N
    every_row = row < rows if inside_row is None else inside_row & (row < rows)
    inside = inside_row if ROWS == 1 else every_row
    wdy = weighted(
        loaded(rows_at(dy, row, dy_stride, dy_jump, inner) + column, inside, A),
        weight,
        column,
        inside_row,
        weight_offset,
        OFFSET,
        A,
    )
    row_of_rstd = first + tl.arange(0, ROWS)
    row_rstd = per_element(tl.load(rstd + row_of_rstd, mask=row_of_rstd < rows, other=0), SEGMENTS, DEPTH)
    xhat = loaded(rows_at(h, row, h_stride, h_jump, inner) + column, inside, A) * row_rstd
    # Now, so that it is there when the sum is.
    further = (
        None if d_total is None else stored(rows_at(d_total, row, d_total_stride, d_total_jump, inner) + column, inside)
    )
    sums = sums_of_rows(sums_of_segments(products(wdy, xhat, inside), ROWS * SEGMENTS, VECTOR), ROWS, SEGMENTS)
    c = per_element(quotient(sums, tl.full((ROWS,), N, A), A), SEGMENTS, DEPTH)
    d = (wdy - xhat * c) * row_rstd
    if further is not None:
        d = d + widened(further, A)
    dx_rows = None if dx is None else dx + row * N
    dresidual_rows = None if dresidual is None else dresidual + row * N
    stored_gradients(d, dx_rows, dresidual_rows, column, inside)


@triton.jit
def backward_blocks(
    dy,
    d_total,
    h,
    rstd,
    weight,
    dx,
    dresidual,
    partial,
    dy_stride,
    d_total_stride,
    h_stride,
    inner,
    dy_jump,
    d_total_jump,
    h_jump,
    rows,
    block,
    weight_offset,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradients of a block of rows per program, one row after the other, and the block's share of the weight's."""
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    inside = None if N == SEGMENTS * DEPTH * WIDTH else column < N
    g = None if weight is None else gain_at(weight, column, inside, weight_offset, OFFSET, A)
    total = tl.zeros((DEPTH * SEGMENTS, WIDTH), A)
    begin = tl.program_id(0).to(tl.int64) * block
    end = tl.minimum(begin + block, rows)
    dy_next, h_next = (
        stored(rows_at(dy, begin, dy_stride, dy_jump, inner) + column, inside),
        stored(rows_at(h, begin, h_stride, h_jump, inner) + column, inside),
    )
    rstd_next = tl.load(rstd + begin + tl.arange(0, 1))
    for row in range(begin, end):
        dy_row, h_row, row_rstd = widened(dy_next, A), widened(h_next, A), tl.reshape(rstd_next, (1, 1))
        # A load before the sum overlaps with it. There are registers for 16-bit operands only.
        BITS: tl.constexpr = 0 if d_total is None else dy.dtype.element_ty.primitive_bitwidth
        EARLY: tl.constexpr = BITS == 16 and d_total.dtype.element_ty.primitive_bitwidth == 16
        if EARLY:
            d_row = stored(rows_at(d_total, row, d_total_stride, d_total_jump, inner) + column, inside)
        xhat = h_row * row_rstd
        total = total + dy_row * xhat
        wdy = dy_row if g is None else dy_row * g
        following = row + 1
        there = following + tl.arange(0, 1) < end
        rstd_next = tl.load(rstd + following + tl.arange(0, 1), mask=there, other=0)
        there = tl.reshape(there, (1, 1)) if inside is None else inside & tl.reshape(there, (1, 1))
        dy_next = stored(rows_at(dy, following, dy_stride, dy_jump, inner) + column, there)
        h_next = stored(rows_at(h, following, h_stride, h_jump, inner) + column, there)
        sums = sums_of_rows(sums_of_segments(products(wdy, xhat, inside), SEGMENTS, VECTOR), 1, SEGMENTS)
        c = tl.reshape(quotient(sums, tl.full((1,), N, A), A), (1, 1))
        d = (wdy - xhat * c) * row_rstd
        if EARLY:
            d = d + widened(d_row, A)
        elif d_total is not None:
            d = d + loaded(rows_at(d_total, row, d_total_stride, d_total_jump, inner) + column, inside, A)
        dx_row = None if dx is None else dx + row * N
        dresidual_row = None if dresidual is None else dresidual + row * N
        stored_gradients(d, dx_row, dresidual_row, column, inside)
    # Stored as the compiler has threads store: 16 bytes each, fewer elements than it loads of a narrower type. In this
    # shape a warp stores what it loaded, and exchanges it among its lanes only.
    PARTS: tl.constexpr = VECTOR * A.primitive_bitwidth // 128 if VECTOR > 1 else 1
    parts = tl.permute(tl.reshape(total, (DEPTH, SEGMENTS, PARTS, WIDTH // PARTS)), (0, 2, 1, 3))
    total = tl.reshape(parts, (DEPTH * PARTS * SEGMENTS, WIDTH // PARTS))
    column = columns_of_tile(1, SEGMENTS, DEPTH * PARTS, WIDTH // PARTS)
    inside = None if N == SEGMENTS * DEPTH * WIDTH else column < N
    tl.store(partial + tl.program_id(0).to(tl.int64) * N + column, total, mask=inside)


@triton.jit
def backward_wide(
    dy,
    d_total,
    h,
    rstd,
    weight,
    dx,
    dresidual,
    dy_stride,
    d_total_stride,
    h_stride,
    inner,
    dy_jump,
    d_total_jump,
    h_jump,
    rows,
    weight_offset,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradients of one row per program, tile by tile, twice."""
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    row = tl.program_id(0).to(tl.int64)
    dy_row, h_row = rows_at(dy, row, dy_stride, dy_jump, inner), rows_at(h, row, h_stride, h_jump, inner)
    row_rstd = tl.reshape(tl.load(rstd + row + tl.arange(0, 1)), (1, 1))
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    index = tl.arange(0, TILES)[:, None]
    sums = tl.zeros((TILES, SEGMENTS), A)
    for tile in range(tl.cdiv(N, TILE)):
        at = tile * TILE + column
        inside = None if N % TILE == 0 else at < N
        wdy = weighted(loaded(dy_row + at, inside, A), weight, at, inside, weight_offset, OFFSET, A)
        product = products(wdy, loaded(h_row + at, inside, A) * row_rstd, inside)
        sums = tl.where(index == tile, sums_of_segments(product, SEGMENTS, VECTOR)[None, :], sums)
    total = halved(tl.reshape(sums, (1, TILES * SEGMENTS)))
    c = tl.reshape(quotient(total, tl.full((1,), N, A), A), (1, 1))
    for tile in range(tl.cdiv(N, TILE)):
        at = tile * TILE + column
        inside = None if N % TILE == 0 else at < N
        wdy = weighted(loaded(dy_row + at, inside, A), weight, at, inside, weight_offset, OFFSET, A)
        d = (wdy - (loaded(h_row + at, inside, A) * row_rstd) * c) * row_rstd
        if d_total is not None:
            d = d + loaded(rows_at(d_total, row, d_total_stride, d_total_jump, inner) + at, inside, A)
        dx_row = None if dx is None else dx + row * N
        dresidual_row = None if dresidual is None else dresidual + row * N
        stored_gradients(d, dx_row, dresidual_row, at, inside)


@triton.jit
def share_of_row(dy_row, h_row, rstd_of_row, column, inside, A: tl.constexpr):
    """The share that a row adds to the weight's gradient."""
    xhat = loaded(h_row + column, inside, A) * tl.load(rstd_of_row)
    return loaded(dy_row + column, inside, A) * xhat


@triton.jit
def weight_blocks(
    dy,
    h,
    rstd,
    partial,
    dy_stride,
    h_stride,
    inner,
    dy_jump,
    h_jump,
    rows,
    block,
    hidden_size,
    A: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A block's share of the weight's gradient, TILE columns per program; AT_ONCE rows are loaded at a time."""
    tiles = tl.cdiv(hidden_size.to(tl.int32), TILE)
    begin = (tl.program_id(0) // tiles).to(tl.int64) * block
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = column < hidden_size
    end = tl.minimum(begin + block, rows)
    rest = begin + (end - begin) // AT_ONCE * AT_ONCE
    total = tl.zeros((TILE,), A)
    for first in range(begin, rest, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            dy_row = rows_at(dy, first + k, dy_stride, dy_jump, inner)
            h_row = rows_at(h, first + k, h_stride, h_jump, inner)
            total = total + share_of_row(dy_row, h_row, rstd + (first + k), column, inside, A)
    for row in range(rest, end):
        dy_row = rows_at(dy, row, dy_stride, dy_jump, inner)
        h_row = rows_at(h, row, h_stride, h_jump, inner)
        total = total + share_of_row(dy_row, h_row, rstd + row, column, inside, A)
    at = (tl.program_id(0) // tiles).to(tl.int64) * hidden_size + column
    tl.store(partial + at, total, mask=inside)


@triton.jit
def add_up_to(partial, dweight, blocks, N: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The sums of TILE columns over up to BLOCKS blocks, by halving."""
    first = tl.program_id(0).to(tl.int64) * TILE  # of more programs than are needed, where TILE is longer
    if first < N:
        block = tl.arange(0, BLOCKS)[:, None]
        column = first + tl.arange(0, TILE)
        inside = (block < blocks) & (column < N)[None, :]
        shares = tl.load(partial + block.to(tl.int64) * N + column[None, :], mask=inside, other=0)
        total = tl.reshape(halved_first(shares, 1), (TILE,))
        tl.store(dweight + column, narrowed(total, dweight.dtype.element_ty), mask=column < N)


@triton.jit
def add_blocks(partial, dweight, blocks, N: tl.constexpr, A: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The weight's gradient: the shares of up to BLOCKS blocks, added up by halving.

    A program takes TILE columns; where there are fewer blocks it takes more, and the last programs nothing.
    """
    if blocks > BLOCKS // 4:
        add_up_to(partial, dweight, blocks, N, BLOCKS, TILE)
    elif blocks > BLOCKS // 16:
        add_up_to(partial, dweight, blocks, N, BLOCKS // 4, TILE * 4)
    elif blocks > BLOCKS // 64:
        add_up_to(partial, dweight, blocks, N, BLOCKS // 16, TILE * 16)
    else:
        add_up_to(partial, dweight, blocks, N, BLOCKS // 64, TILE * 16)
