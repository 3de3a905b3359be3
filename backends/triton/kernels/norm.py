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
    halved_first,
    mean_of,
    narrowed,
    normalised,
    row_of_heads,
    rows_at,
    rstd_of,
    scaled,
    widened,
)
from fusednorm.backends.triton.kernels.tiles import (
    centered,
    columns_of_tile,
    gain_at,
    inside_of,
    loaded,
    per_element,
    rows_of_tile,
    store,
    stored,
    sums_of_tile,
    total_of,
    with_sums,
    within,
)


@triton.jit
def added(
    x_rows,
    x_scale,
    first_rstd,
    first_g,
    residual_rows,
    sum_rows,
    column,
    inside,
    X: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    A: tl.constexpr,
):
    """The row that is normalised: x, scaled, or after a norm if there is its rstd, and the residual if there is one.

    X: the type in which rows pass from that norm to the addition. Beyond the end of a row they are 0, or NaN, but then
    all of the row is infinite or NaN. Stores the sum, unless there is nowhere to.
    """
    h = loaded(x_rows, column, inside, A)
    if x_scale is not None:
        h = scaled(h, x_scale, x_rows.dtype.element_ty, A)
    if first_rstd is not None:
        h = normalised(h, first_rstd, first_g, None, x_rows.dtype.element_ty, ROUND_NORM, A)
        h = widened(narrowed(h, X), A)
    if residual_rows is not None:
        h = h + loaded(residual_rows, column, inside, A)
        if sum_rows is not None:
            total = narrowed(h, sum_rows.dtype.element_ty)
            tl.store(sum_rows + column, total, mask=inside)
            if ROUND_SUM:
                h = widened(total, A)
    return h


@triton.jit
def forward(
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
    CENTER: tl.constexpr,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """ROWS whole rows per program, each kept in registers; or one row of several TILES, tile by tile, twice.

    It is three times where BETWEEN asks for a norm before the addition, or where CENTER subtracts the mean. KEPT: the
    last pass, and that for squares less the mean, find the row in residual_out, or in x.

    GATED: the gate z comes "before" the norm, or "after" it, with rows rounded to PASSED between (None: they are not).
    """
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    X: tl.constexpr = A if BETWEEN == "A" else x.dtype.element_ty  # the type of the rows that are added
    first = tl.program_id(0).to(tl.int64) * ROWS
    first_rstd = None
    if TILES == 1:
        row = first + rows_of_tile(ROWS, SEGMENTS, DEPTH)
        column = columns_of_tile(ROWS, SEGMENTS, DEPTH, WIDTH)
        inside_row = inside_of(row, column, rows, N, 1, TILE)
        inside = inside_of(row, column, rows, N, ROWS, TILE)
        residual_rows = rows_at(residual, row, residual_stride, residual_jump, inner)
        sum_rows = rows_at(residual_out, row, residual_out_stride, residual_out_jump, inner)
        x_rows = rows_at(x, row, x_stride, x_jump, inner)
        g = None
        if BETWEEN != "":
            first_h = loaded(x_rows, column, inside, A)
            g = gain_at(first_weight, column, inside_row, weight_offset, OFFSET, A)
            first_sums = sums_of_tile(first_h * first_h, ROWS, SEGMENTS, VECTOR)
            first_rstd = per_element(rstd_of(first_sums, N, first_eps, A), SEGMENTS, DEPTH)
        h = added(x_rows, x_scale, first_rstd, g, residual_rows, sum_rows, column, inside, X, ROUND_SUM, ROUND_NORM, A)
        z_rows = rows_at(z, row, z_stride, z_jump, inner)
        if GATED == "before":
            h = gated(h, z_rows, column, inside, ACTIVATION, A)
        if CENTER:
            h = centered(h, inside, N, A, ROWS, SEGMENTS, VECTOR)
        if out is not None:
            # Now, so that they are there when the sum is.
            weight_rows = row_of_heads(weight, row, weight_stride, heads)
            bias_rows = row_of_heads(bias, row, bias_stride, heads)
            g = gain_at(weight_rows, column, inside_row, weight_offset, OFFSET, A)
            b = stored(bias_rows, column, inside_row)
            row_rstd = rstd_of(sums_of_tile(h * h, ROWS, SEGMENTS, VECTOR), N, eps, A)
            if rstd is not None:
                row_of_rstd = first + tl.arange(0, ROWS)
                tl.store(rstd + row_of_rstd, row_rstd, mask=row_of_rstd < rows)
            y = normalised(h, per_element(row_rstd, SEGMENTS, DEPTH), g, b, X, ROUND_NORM, A)
            if GATED == "after":
                y = gated(between(y, PASSED, A), z_rows, column, inside, ACTIVATION, A)
            store(y, rows_at(out, row, out_stride, out_jump, inner), column, inside)
    else:
        x_row = rows_at(x, first, x_stride, x_jump, inner)
        out_row = rows_at(out, first, out_stride, out_jump, inner)
        residual_row = rows_at(residual, first, residual_stride, residual_jump, inner)
        sum_row = rows_at(residual_out, first, residual_out_stride, residual_out_jump, inner)
        z_row = rows_at(z, first, z_stride, z_jump, inner)
        weight_row = row_of_heads(weight, first, weight_stride, heads)
        bias_row = row_of_heads(bias, first, bias_stride, heads)
        column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
        index = tl.arange(0, TILES)[:, None]
        if BETWEEN != "":
            first_sums = tl.zeros((TILES, SEGMENTS), A)
            for tile in range(tl.cdiv(N, TILE)):
                at = tile * TILE + column
                h = loaded(x_row, at, inside_of(first, at, rows, N, 1, TILE), A)
                first_sums = with_sums(first_sums, index == tile, h * h, VECTOR)
            first_rstd = tl.reshape(rstd_of(total_of(first_sums), N, first_eps, A), (1, 1))
        sums = tl.zeros((TILES, SEGMENTS), A)
        for tile in range(tl.cdiv(N, TILE)):
            at = tile * TILE + column
            inside = inside_of(first, at, rows, N, 1, TILE)
            g = gain_at(first_weight, at, inside, weight_offset, OFFSET, A)
            kept_row = sum_row if KEPT else None
            h = added(x_row, x_scale, first_rstd, g, residual_row, kept_row, at, inside, X, ROUND_SUM, ROUND_NORM, A)
            if GATED == "before":
                h = gated(h, z_row, at, inside, ACTIVATION, A)
            if out is not None:
                sums = with_sums(sums, index == tile, h if CENTER else h * h, VECTOR)
        if out is not None:
            if CENTER:
                mean = tl.reshape(mean_of(total_of(sums), N, A), (1, 1))
                if KEPT and residual is not None:
                    tl.debug_barrier()  # another thread may have stored what this one reads
                for tile in range(tl.cdiv(N, TILE)):
                    at = tile * TILE + column
                    inside = inside_of(first, at, rows, N, 1, TILE)
                    if KEPT:
                        h = loaded(x_row if residual is None else sum_row, at, inside, A)
                    else:
                        h = added(
                            x_row, x_scale, None, None, residual_row, None, at, inside, X, ROUND_SUM, ROUND_NORM, A
                        )
                    d = within(h - mean, inside)
                    sums = with_sums(sums, index == tile, d * d, VECTOR)
            row_rstd = rstd_of(total_of(sums), N, eps, A)
            if rstd is not None:
                tl.store(rstd + first + tl.arange(0, 1), row_rstd)
            row_rstd = tl.reshape(row_rstd, (1, 1))
            if KEPT and residual is not None and not CENTER:
                tl.debug_barrier()  # another thread may have stored what this one reads
            for tile in range(tl.cdiv(N, TILE)):
                at = tile * TILE + column
                inside = inside_of(first, at, rows, N, 1, TILE)
                if KEPT:
                    h = loaded(x_row if residual is None else sum_row, at, inside, A)
                else:
                    g = gain_at(first_weight, at, inside, weight_offset, OFFSET, A)
                    h = added(
                        x_row, x_scale, first_rstd, g, residual_row, sum_row, at, inside, X, ROUND_SUM, ROUND_NORM, A
                    )
                if GATED == "before":
                    h = gated(h, z_row, at, inside, ACTIVATION, A)
                if CENTER:
                    h = h - mean
                g = gain_at(weight_row, at, inside, weight_offset, OFFSET, A)
                y = normalised(h, row_rstd, g, None, X, ROUND_NORM, A)
                if bias is not None:
                    y = y + loaded(bias_row, at, inside, A)
                if GATED == "after":
                    y = gated(between(y, PASSED, A), z_row, at, inside, ACTIVATION, A)
                store(y, out_row, at, inside)


@triton.jit
def weighted(dy, g):
    """The gradient of the normalised row, from that of the output."""
    if g is None:
        return dy
    else:
        return dy * g


@triton.jit
def xhat_of(h_rows, column, inside, mean, rstd, A: tl.constexpr):
    """The normalised row again; the mean is None where it was not subtracted."""
    h = loaded(h_rows, column, inside, A)
    if mean is not None:
        h = h - mean
    return h * rstd


@triton.jit
def store_gradients(d, further, dx, dresidual, row, column, inside, N: tl.constexpr, A: tl.constexpr):
    """Stores the gradient, with a further one added if there is one, in the types asked for."""
    if further is not None:
        d = d + widened(further, A)
    dx_rows = rows_at(dx, row, N, None, None)
    dresidual_rows = rows_at(dresidual, row, N, None, None)
    store(d, dx_rows, column, inside)
    store(d, dresidual_rows, column, inside)


@triton.jit
def backward_rows(
    dy,
    d_total,
    h,
    rstd,
    weight,
    dx,
    dresidual,
    means,
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
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradients of ROWS rows per program; or of one of several TILES, tile by tile, twice.

    CENTER: rows lose their means, which are stored if there is room for them; of several TILES, in a pass before.
    """
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    first = tl.program_id(0).to(tl.int64) * ROWS
    if TILES == 1:
        row = first + rows_of_tile(ROWS, SEGMENTS, DEPTH)
        column = columns_of_tile(ROWS, SEGMENTS, DEPTH, WIDTH)
        inside_row = inside_of(row, column, rows, N, 1, TILE)
        inside = inside_of(row, column, rows, N, ROWS, TILE)
        wdy = loaded(rows_at(dy, row, dy_stride, dy_jump, inner), column, inside, A)
        wdy = weighted(wdy, gain_at(weight, column, inside_row, weight_offset, OFFSET, A))
        row_of_rstd = first + tl.arange(0, ROWS)
        row_rstd = per_element(tl.load(rstd + row_of_rstd, mask=row_of_rstd < rows, other=0), SEGMENTS, DEPTH)
        h_rows = loaded(rows_at(h, row, h_stride, h_jump, inner), column, inside, A)
        if CENTER:
            mean = mean_of(sums_of_tile(h_rows, ROWS, SEGMENTS, VECTOR), N, A)
            if means is not None:
                tl.store(means + row_of_rstd, mean, mask=row_of_rstd < rows)
            h_rows = h_rows - per_element(mean, SEGMENTS, DEPTH)
        xhat = h_rows * row_rstd
        further_rows = rows_at(d_total, row, d_total_stride, d_total_jump, inner)
        if not CENTER:  # now, so that it is there when the sum is; two sums leave no registers for it
            further = stored(further_rows, column, inside)
        sums = sums_of_tile(within(wdy * xhat, inside), ROWS, SEGMENTS, VECTOR)
        if CENTER:
            wdy = centered(within(wdy, inside), None, N, A, ROWS, SEGMENTS, VECTOR)
            further = stored(further_rows, column, inside)
        d = (wdy - xhat * per_element(mean_of(sums, N, A), SEGMENTS, DEPTH)) * row_rstd
        store_gradients(d, further, dx, dresidual, row, column, inside, N, A)
    else:
        dy_row, h_row = rows_at(dy, first, dy_stride, dy_jump, inner), rows_at(h, first, h_stride, h_jump, inner)
        row_rstd = tl.reshape(tl.load(rstd + first + tl.arange(0, 1)), (1, 1))
        column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
        index = tl.arange(0, TILES)[:, None]
        mean, sums = None, tl.zeros((TILES, SEGMENTS), A)
        if CENTER:
            for tile in range(tl.cdiv(N, TILE)):
                at = tile * TILE + column
                h_tile = loaded(h_row, at, inside_of(first, at, rows, N, 1, TILE), A)
                sums = with_sums(sums, index == tile, h_tile, VECTOR)
            mean = mean_of(total_of(sums), N, A)
            if means is not None:
                tl.store(means + first + tl.arange(0, 1), mean)
            mean = tl.reshape(mean, (1, 1))
        wdy_sums = tl.zeros((TILES, SEGMENTS), A)
        for tile in range(tl.cdiv(N, TILE)):
            at = tile * TILE + column
            inside = inside_of(first, at, rows, N, 1, TILE)
            wdy = weighted(loaded(dy_row, at, inside, A), gain_at(weight, at, inside, weight_offset, OFFSET, A))
            product = within(wdy * xhat_of(h_row, at, inside, mean, row_rstd, A), inside)
            sums = with_sums(sums, index == tile, product, VECTOR)
            if CENTER:
                wdy_sums = with_sums(wdy_sums, index == tile, within(wdy, inside), VECTOR)
        c = tl.reshape(mean_of(total_of(sums), N, A), (1, 1))
        b = tl.reshape(mean_of(total_of(wdy_sums), N, A), (1, 1))
        for tile in range(tl.cdiv(N, TILE)):
            at = tile * TILE + column
            inside = inside_of(first, at, rows, N, 1, TILE)
            wdy = weighted(loaded(dy_row, at, inside, A), gain_at(weight, at, inside, weight_offset, OFFSET, A))
            if CENTER:
                wdy = wdy - b
            d = (wdy - xhat_of(h_row, at, inside, mean, row_rstd, A) * c) * row_rstd
            further = stored(rows_at(d_total, first, d_total_stride, d_total_jump, inner), at, inside)
            store_gradients(d, further, dx, dresidual, first, at, inside, N, A)


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
    CENTER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The gradients of a block of rows per program, one row after the other, and the block's share of the weight's."""
    column = columns_of_tile(1, SEGMENTS, DEPTH, WIDTH)
    inside = inside_of(None, column, None, N, 1, SEGMENTS * DEPTH * WIDTH)
    g = gain_at(weight, column, inside, weight_offset, OFFSET, A)
    total = tl.zeros((DEPTH * SEGMENTS, WIDTH), A)
    begin = tl.program_id(0).to(tl.int64) * block
    end = tl.minimum(begin + block, rows)
    dy_next = stored(rows_at(dy, begin, dy_stride, dy_jump, inner), column, inside)
    h_next = stored(rows_at(h, begin, h_stride, h_jump, inner), column, inside)
    rstd_next = tl.load(rstd + begin + tl.arange(0, 1))
    for row in range(begin, end):
        dy_row, h_row, row_rstd = widened(dy_next, A), widened(h_next, A), tl.reshape(rstd_next, (1, 1))
        # A load before the sum overlaps with it. There are registers for 16-bit operands only.
        BITS: tl.constexpr = 0 if d_total is None else dy.dtype.element_ty.primitive_bitwidth
        EARLY: tl.constexpr = BITS == 16 and d_total.dtype.element_ty.primitive_bitwidth == 16
        if EARLY:
            further = stored(rows_at(d_total, row, d_total_stride, d_total_jump, inner), column, inside)
        if CENTER:
            h_row = centered(h_row, None, N, A, 1, SEGMENTS, VECTOR)
        xhat = h_row * row_rstd
        total = total + dy_row * xhat
        wdy = weighted(dy_row, g)
        following = row + 1
        there = following + tl.arange(0, 1) < end
        rstd_next = tl.load(rstd + following + tl.arange(0, 1), mask=there, other=0)
        there = tl.reshape(there, (1, 1)) if inside is None else inside & tl.reshape(there, (1, 1))
        dy_next = stored(rows_at(dy, following, dy_stride, dy_jump, inner), column, there)
        h_next = stored(rows_at(h, following, h_stride, h_jump, inner), column, there)
        c = tl.reshape(mean_of(sums_of_tile(within(wdy * xhat, inside), 1, SEGMENTS, VECTOR), N, A), (1, 1))
        if CENTER:
            wdy = centered(within(wdy, inside), None, N, A, 1, SEGMENTS, VECTOR)
        d = (wdy - xhat * c) * row_rstd
        if not EARLY:
            further = stored(rows_at(d_total, row, d_total_stride, d_total_jump, inner), column, inside)
        store_gradients(d, further, dx, dresidual, row, column, inside, N, A)
    # Stored as the compiler has threads store: 16 bytes each, fewer elements than it loads of a narrower type. In this
    # shape a warp stores what it loaded, and exchanges it among its lanes only.
    PARTS: tl.constexpr = VECTOR * A.primitive_bitwidth // 128 if VECTOR > 1 else 1
    parts = tl.permute(tl.reshape(total, (DEPTH, SEGMENTS, PARTS, WIDTH // PARTS)), (0, 2, 1, 3))
    total = tl.reshape(parts, (DEPTH * PARTS * SEGMENTS, WIDTH // PARTS))
    column = columns_of_tile(1, SEGMENTS, DEPTH * PARTS, WIDTH // PARTS)
    inside = inside_of(None, column, None, N, 1, SEGMENTS * DEPTH * WIDTH)
    tl.store(partial + tl.program_id(0).to(tl.int64) * N + column, total, mask=inside)


@triton.jit
def share_of_row(dy_row, h_row, rstd_of_row, means, row, column, inside, A: tl.constexpr):
    """The share that a row adds to the weight's gradient."""
    h = loaded(h_row, column, inside, A)
    if means is not None:
        h = h - tl.load(means + row)
    xhat = h * tl.load(rstd_of_row)
    return loaded(dy_row, column, inside, A) * xhat


@triton.jit
def weight_blocks(
    dy,
    h,
    rstd,
    means,
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
    """A block's share of the weight's gradient, TILE columns per program; AT_ONCE rows are loaded at a time.

    ``means``: of the rows; None where they were not subtracted.
    """
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
            total = total + share_of_row(dy_row, h_row, rstd + (first + k), means, first + k, column, inside, A)
    for row in range(rest, end):
        dy_row = rows_at(dy, row, dy_stride, dy_jump, inner)
        h_row = rows_at(h, row, h_stride, h_jump, inner)
        total = total + share_of_row(dy_row, h_row, rstd + row, means, row, column, inside, A)
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
