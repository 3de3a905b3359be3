"""Triton's kernels for CPUs of gates alone, forward and backward; ``cpu_norm.py`` says how rows are taken."""

from __future__ import annotations

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.cpu_norm import DY, DZ, IN_TURNS, NO_ROWS, TWO_LEVELS, got, put
from fusednorm.backends.triton.kernels.gates import (
    activated,
    activated_and_slope,
    between,
    gradients_in_steps,
    products_in_steps,
)
from fusednorm.backends.triton.kernels.numbers import narrowed, rows_at, widened


@triton.jit
def y_and_z(y_row, z_row, at, left, FLAGS: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr):
    """These elements of y and z, which may take turns in memory, z's before y's."""
    if IN_TURNS & FLAGS:
        z, y = tl.split(tl.reshape(got(z_row, 2 * at, twice(left), 2 * SIZE), (SIZE, 2)))
        return widened(y, A), widened(z, A)
    else:
        return widened(got(y_row, at, left, SIZE), A), widened(got(z_row, at, left, SIZE), A)


@triton.jit
def twice(left):
    """None if all elements are there."""
    if left is None:
        return
    else:
        return 2 * left


@triton.jit
def multiply(
    y_row,
    z_row,
    out_row,
    at,
    left,
    FLAGS: tl.constexpr,
    A: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the products of these elements."""
    if IN_TURNS & FLAGS or STEPS is not None:
        y, z = y_and_z(y_row, z_row, at, left, FLAGS, A, SIZE)
        y = products_in_steps(y, z, ACTIVATION, STEPS, BETWEEN, A)
    else:
        y = between(activated(widened(got(z_row, at, left, SIZE), A), ACTIVATION, A), BETWEEN, A)
        if not NO_ROWS & FLAGS:
            y = widened(got(y_row, at, left, SIZE), A) * y
    put(out_row, at, left, narrowed(y, out_row.dtype.element_ty), SIZE)


@triton.jit
def gate(
    y,
    z,
    out,
    y_stride,
    z_stride,
    out_stride,
    inner,
    y_jump,
    z_jump,
    out_jump,
    hidden_size,
    A: tl.constexpr,
    FLAGS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """A row times a function of another row; with NO_ROWS the function alone."""
    SIZE: tl.constexpr = TILE // 4
    number = tl.program_id(0).to(tl.int64)
    levels = inner if TWO_LEVELS & FLAGS else None
    y_row, z_row = rows_at(y, number, y_stride, y_jump, levels), rows_at(z, number, z_stride, z_jump, levels)
    out_row = rows_at(out, number, out_stride, out_jump, levels)
    left = hidden_size % SIZE
    for at in range(0, hidden_size - left, SIZE):
        multiply(y_row, z_row, out_row, at, None, FLAGS, A, ACTIVATION, BETWEEN, STEPS, SIZE)
    if left > 0:
        multiply(y_row, z_row, out_row, hidden_size - left, left, FLAGS, A, ACTIVATION, BETWEEN, STEPS, SIZE)


@triton.jit
def differentiate(
    rows,
    at,
    left,
    FLAGS: tl.constexpr,
    A: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the gradients of these elements."""
    d_row, y_row, z_row, dy_row, dz_row = rows
    incoming = widened(got(d_row, at, left, SIZE), A)
    if IN_TURNS & FLAGS or STEPS is not None:
        y, z = y_and_z(y_row, z_row, at, left, FLAGS, A, SIZE)
        dy, dz = gradients_in_steps(incoming, y, z, ACTIVATION, STEPS, BETWEEN, A)
        if IN_TURNS & FLAGS:
            pairs = narrowed(tl.reshape(tl.join(dz, dy), (2 * SIZE,)), dz_row.dtype.element_ty)
            put(dz_row, 2 * at, twice(left), pairs, 2 * SIZE)
        else:
            if DZ & FLAGS:
                put(dz_row, at, left, narrowed(dz, dz_row.dtype.element_ty), SIZE)
            if DY & FLAGS:
                put(dy_row, at, left, narrowed(dy, dy_row.dtype.element_ty), SIZE)
    else:
        f, slope = activated_and_slope(widened(got(z_row, at, left, SIZE), A), ACTIVATION, A)
        if DZ & FLAGS:
            of_f = incoming
            if not NO_ROWS & FLAGS:
                of_f = incoming * widened(got(y_row, at, left, SIZE), A)
            put(dz_row, at, left, narrowed(between(of_f, BETWEEN, A) * slope, dz_row.dtype.element_ty), SIZE)
        if DY & FLAGS:
            put(dy_row, at, left, narrowed(incoming * between(f, BETWEEN, A), dy_row.dtype.element_ty), SIZE)


@triton.jit
def gate_backward(
    d,
    y,
    z,
    dy,
    dz,
    d_stride,
    y_stride,
    z_stride,
    dy_stride,
    dz_stride,
    inner,
    d_jump,
    y_jump,
    z_jump,
    dy_jump,
    dz_jump,
    hidden_size,
    A: tl.constexpr,
    FLAGS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BETWEEN: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    PROCESSOR: tl.constexpr,
):
    """The gradients of a row times a function of another row."""
    SIZE: tl.constexpr = TILE // 4
    number = tl.program_id(0).to(tl.int64)
    levels = inner if TWO_LEVELS & FLAGS else None
    d_row, y_row = rows_at(d, number, d_stride, d_jump, levels), rows_at(y, number, y_stride, y_jump, levels)
    z_row = rows_at(z, number, z_stride, z_jump, levels)
    dy_row, dz_row = rows_at(dy, number, dy_stride, dy_jump, levels), rows_at(dz, number, dz_stride, dz_jump, levels)
    rows = (d_row, y_row, z_row, dy_row, dz_row)
    left = hidden_size % SIZE
    for at in range(0, hidden_size - left, SIZE):
        differentiate(rows, at, None, FLAGS, A, ACTIVATION, BETWEEN, STEPS, SIZE)
    if left > 0:
        differentiate(rows, hidden_size - left, left, FLAGS, A, ACTIVATION, BETWEEN, STEPS, SIZE)
