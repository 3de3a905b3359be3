"""How rows lie in memory: one row stride per operand, and which operands share memory."""

from __future__ import annotations

import torch
from torch import Tensor


def row_stride(tensor: Tensor) -> int | None:
    """The stride, in elements, that leads from each row of a [..., N] tensor to the next; None if there is none.

    The rows are those of ``tensor.reshape(-1, N)``, and each must itself be contiguous.
    """
    if tensor.is_neg():  # its memory holds the negatives
        return None
    if tensor.is_contiguous():
        return tensor.shape[-1]
    *leading, hidden = tensor.shape
    *steps, inner = tensor.stride()
    if inner != 1 and hidden != 1:
        return None
    stride = following = None
    for size, step in zip(reversed(leading), reversed(steps), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != following:
            return None
        following = step * size
    return hidden if stride is None else stride


def rows_of(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor, or a copy of it, whose rows are one stride apart; and that stride."""
    stride = row_stride(tensor)
    return (tensor.resolve_neg().contiguous(), tensor.shape[-1]) if stride is None else (tensor, stride)


def new_gradients(
    h: Tensor,
    weight: Tensor | None,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    needs: tuple[bool, bool, bool],
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Memory for the gradients of x, the residual and the weight, as far as they are needed and there is such operand.

    Returns what a kernel writes (dx, dresidual, dweight; no dresidual where x and the residual share a dtype, and so a
    gradient), and the three gradients.
    """
    need_x, need_residual, need_weight = needs
    need_residual = need_residual and residual_dtype is not None
    first = x_dtype if need_x else residual_dtype
    dx = torch.empty(h.shape, dtype=first, device=h.device) if need_x or need_residual else None
    dresidual = None
    if need_x and need_residual and residual_dtype != x_dtype:
        dresidual = torch.empty(h.shape, dtype=residual_dtype, device=h.device)
    dweight = torch.empty_like(weight) if need_weight and weight is not None else None
    of_residual = (dx if dresidual is None else dresidual) if need_residual else None
    return (dx, dresidual, dweight), (dx if need_x else None, of_residual, dweight)


def share_memory(
    a: Tensor, a_stride: int, a_rows: int, b: Tensor, b_stride: int, b_rows: int, hidden_size: int
) -> bool:
    """Whether any element of one operand lies in the memory of another; rows have ``hidden_size`` elements.

    Exact also for rows that interleave, such as two slices of the columns of one matrix.
    """
    a_begin, b_begin = a.data_ptr(), b.data_ptr()
    a_row, b_row = hidden_size * a.element_size(), hidden_size * b.element_size()
    a_step, b_step = a_stride * a.element_size(), b_stride * b.element_size()
    if a_begin + (a_rows - 1) * a_step + a_row <= b_begin or b_begin + (b_rows - 1) * b_step + b_row <= a_begin:
        return False
    if a_step < b_step:  # so that each row of b can meet only rows near one of a
        a_begin, b_begin, a_row, b_row, a_step, b_step = b_begin, a_begin, b_row, a_row, b_step, a_step
        a_rows, b_rows = b_rows, a_rows
    if a_step == 0:
        return True
    if a_step == b_step and a_row <= (b_begin - a_begin) % a_step <= a_step - b_row:
        return False  # columns of one matrix: no need to look at every row
    # Of the rows of `a` that begin before a row of b ends, the last one reaches furthest.
    begins = b_begin - a_begin + torch.arange(b_rows) * b_step
    last = (begins + b_row - 1).div(a_step, rounding_mode="floor").clamp(max=a_rows - 1)
    return bool(((last >= 0) & (last * a_step + a_row > begins)).any())


def overlaps_itself(stride: int, rows: int, hidden: int) -> bool:
    """Whether two rows of one operand share an element."""
    return rows > 1 and stride < hidden
