"""Products of rows and a matrix of int8 in Triton (docs/spec.md, section 16), for GPUs."""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.numbers import narrowed, rows_at, widened


@triton.jit
def int8_linear(
    q,
    scale,
    weight,
    weight_scale,
    bias,
    zero_point,
    out,
    rows,
    columns,
    hidden_size,
    inner,
    q_stride,
    q_jump,
    weight_stride,
    out_stride,
    out_jump,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A program has a tile of the result, ROWS rows and COLUMNS columns. Of each it reads DEPTH numbers at a time.

    Programs of the same columns follow each other, so that the weight's rows come from the cache.
    """
    tiles = tl.cdiv(rows, ROWS).to(tl.int32)
    program = tl.program_id(0)
    row = (program % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside_rows, inside_columns = row < rows, column < columns
    depth = tl.arange(0, DEPTH)
    of_q = rows_at(q, row, q_stride, q_jump, inner)[:, None] + depth[None, :]
    of_weight = (weight + column * weight_stride)[None, :] + depth[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    of_columns = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, hidden_size, DEPTH):
        left = hidden_size - first
        numbers = tl.load(of_q + first, (inside_rows[:, None]) & (depth < left)[None, :], 0)
        matrix = tl.load(of_weight + first, (depth < left)[:, None] & inside_columns[None, :], 0)
        sums = tl.dot(numbers, matrix, sums, out_dtype=tl.int32)
        if zero_point is not None:
            of_columns += tl.sum(matrix.to(tl.int32), axis=0)
    if zero_point is not None:
        zeros = tl.load(zero_point + row, inside_rows, 0).to(tl.int64)
        y = (sums.to(tl.int64) - zeros[:, None] * of_columns.to(tl.int64)[None, :]).to(A)
    else:
        y = sums.to(A)
    y = y * tl.load(weight_scale + column, inside_columns, 0)[None, :]
    y = y * tl.load(scale + row, inside_rows, 0)[:, None]
    if bias is not None:
        y = y + widened(tl.load(bias + column, inside_columns, 0), A)[None, :]
    place = rows_at(out, row, out_stride, out_jump, inner)[:, None] + column[None, :]
    tl.store(place, narrowed(y, out.dtype.element_ty), inside_rows[:, None] & inside_columns[None, :])
