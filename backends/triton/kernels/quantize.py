"""The Triton kernel for GPUs that quantizes rows, which it may normalise before (docs/spec.md, section 9).

A group is what shares a scale. Of the index of an element in its row, the last bits say which element of its group it
is (``tiles.py``). So a tile is seen as [Q, D, R, G, E] here: D * E elements are a group, or, where a row is one,
a segment of the row. R counts the rows and their segments. All arithmetic but a norm's is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.norm import added
from fusednorm.backends.triton.kernels.numbers import (
    narrowed,
    normalised,
    quotient,
    row_of_heads,
    rows_at,
    rstd_of,
    widened,
)
from fusednorm.backends.triton.kernels.scales import (
    applied,
    at_least,
    at_most,
    ends,
    factor_of,
    in_order,
    numbers_of,
    scale_of,
    zero_point_of,
)
from fusednorm.backends.triton.kernels.tiles import (
    centered,
    columns_of_tile,
    gain_at,
    inside_of,
    loaded,
    per_element,
    rows_of_tile,
    stored,
    sums_of_tile,
)


@triton.jit
def greatest(keys, SEGMENTS: tl.constexpr):
    """The greatest whole number of each group: [Q, 1, R, G, 1]; SEGMENTS of R are one group."""
    found = tl.max(tl.max(keys, axis=4, keep_dims=True), axis=1, keep_dims=True)
    if SEGMENTS > 1:
        Q: tl.constexpr = found.shape[0]
        R: tl.constexpr = found.shape[2]
        of_rows = tl.max(tl.reshape(found, (Q, R // SEGMENTS, SEGMENTS)), axis=2, keep_dims=True)
        found = tl.reshape(tl.broadcast_to(of_rows, (Q, R // SEGMENTS, SEGMENTS)), found.shape)
    return found


@triton.jit
def quantize_tile(
    x,
    residual,
    weight,
    out,
    residual_out,
    bias,
    numbers,
    scale,
    zero_point,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    numbers_stride,
    scale_stride,
    scale_group_stride,
    zero_point_stride,
    zero_point_group_stride,
    inner,
    x_jump,
    residual_jump,
    out_jump,
    residual_out_jump,
    numbers_jump,
    scale_jump,
    zero_point_jump,
    rows,
    eps,
    weight_offset,
    weight_stride,
    bias_stride,
    heads,
    x_scale,
    qmin,
    qmax,
    amax_floor,
    amax_limit,
    scale_floor,
    N: tl.constexpr,
    A: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_SUM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    PASSED: tl.constexpr,
    CENTER: tl.constexpr,
    NUMBER: tl.constexpr,
    PER: tl.constexpr,
    GIVEN: tl.constexpr,
    SCALE_BY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    APPLY: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """ROWS whole rows per program, each kept in registers.

    PASSED: the rows pass from a norm to the quantizer as "x"'s type or as "A"; "": they are those of x.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + rows_of_tile(ROWS, SEGMENTS, DEPTH)
    column = columns_of_tile(ROWS, SEGMENTS, DEPTH, WIDTH)
    TILE: tl.constexpr = SEGMENTS * DEPTH * WIDTH
    inside_row = inside_of(row, column, rows, N, 1, TILE)
    inside = inside_of(row, column, rows, N, ROWS, TILE)
    x_rows = rows_at(x, row, x_stride, x_jump, inner)
    if PASSED == "":
        y = loaded(x_rows, column, inside, A)
    else:
        residual_rows = rows_at(residual, row, residual_stride, residual_jump, inner)
        sum_rows = rows_at(residual_out, row, residual_out_stride, residual_out_jump, inner)
        X: tl.constexpr = x.dtype.element_ty
        h = added(x_rows, x_scale, None, None, residual_rows, sum_rows, column, inside, X, ROUND_SUM, ROUND_NORM, A)
        if CENTER:
            h = centered(h, inside, N, A, ROWS, SEGMENTS, VECTOR)
        weight_rows = row_of_heads(weight, row, weight_stride, heads)
        g = gain_at(weight_rows, column, inside_row, weight_offset, OFFSET, A)
        bias_rows = row_of_heads(bias, row, bias_stride, heads)
        b = stored(bias_rows, column, inside_row)
        rstd = rstd_of(sums_of_tile(h * h, ROWS, SEGMENTS, VECTOR), N, eps, A)
        y = normalised(h, per_element(rstd, SEGMENTS, DEPTH), g, b, X, ROUND_NORM, A)
        kept = narrowed(y, A if PASSED == "A" else X)
        if out is not None:
            tl.store(rows_at(out, row, out_stride, out_jump, inner) + column, kept, mask=inside)
        y = widened(kept, A)
    y = y.to(tl.float32)
    numbers_rows = rows_at(numbers, row, numbers_stride, numbers_jump, inner)
    COMPUTED: tl.constexpr = (ZERO_POINT == "before") | (ZERO_POINT == "after")  # each scale has a zero point
    E: tl.constexpr = WIDTH if PER == 0 or PER > WIDTH else PER
    D: tl.constexpr = DEPTH if PER == 0 else (PER // WIDTH if PER > WIDTH else 1)
    Q: tl.constexpr = DEPTH // D
    R: tl.constexpr = ROWS * SEGMENTS
    G: tl.constexpr = WIDTH // E
    v = tl.reshape(y, (Q, D, R, G, E))
    multiplier, zero = None, None
    if GIVEN:
        s = tl.full((1, 1, 1, 1, 1), tl.load(scale), tl.float32)
        if COMPUTED:
            zero = tl.full((1, 1, 1, 1, 1), tl.load(zero_point), tl.int32)
    else:
        bits = v.to(tl.int32, bitcast=True)
        there = None if inside is None else tl.reshape(tl.broadcast_to(inside, y.shape), v.shape)
        OF_ROW: tl.constexpr = SEGMENTS if PER == 0 else 1
        if COMPUTED:
            keys = in_order(bits)
            others = ~keys
            if there is not None:
                keys = tl.where(there, keys, -2147483648)
                others = tl.where(there, others, -2147483648)
            high = in_order(greatest(keys, OF_ROW)).to(tl.float32, bitcast=True)
            low = in_order(~greatest(others, OF_ROW)).to(tl.float32, bitcast=True)
            high, low = ends(high, low)
            span = high - low
            steps = tl.full(span.shape, qmax, tl.float32) - qmin
        else:
            keys = bits & 0x7FFFFFFF
            if there is not None:
                keys = tl.where(there, keys, 0)
            span = greatest(keys, OF_ROW).to(tl.float32, bitcast=True)
            span = at_most(at_least(span, amax_floor), amax_limit)
            steps = tl.full(span.shape, qmax, tl.float32)
        s = scale_of(span, steps, scale_floor, SCALE_BY, POWER_OF_TWO)
        if COMPUTED:
            zero = zero_point_of(low, s, qmin)
        elif APPLY == "ratio":
            multiplier = quotient(tl.full(span.shape, qmax, tl.float32), span, tl.float32)
        scale_row = first + (tl.arange(0, R) // SEGMENTS)[None, None, :, None, None]
        begin = (tl.arange(0, R) % SEGMENTS * (DEPTH * WIDTH))[None, None, :, None, None]
        begin = begin + (tl.arange(0, Q) * (D * WIDTH))[:, None, None, None, None]
        begin = begin + (tl.arange(0, G) * E)[None, None, None, :, None]
        number = begin * 0 if PER == 0 else begin // PER
        mine = (scale_row < rows) & ((begin == 0) if PER == 0 else (begin < N))
        at = rows_at(scale, scale_row, scale_stride, scale_jump, inner) + number * scale_group_stride
        tl.store(at, multiplier if MULTIPLIER else s, mask=mine)
        if COMPUTED:
            at = rows_at(zero_point, scale_row, zero_point_stride, zero_point_jump, inner)
            tl.store(at + number * zero_point_group_stride, zero, mask=mine)
    v = applied(v, s, factor_of(s, multiplier, APPLY), APPLY)
    found = tl.reshape(numbers_of(v, zero, qmin, qmax, NUMBER, ZERO_POINT), y.shape)
    tl.store(numbers_rows + column, found, mask=inside)
