"""Runs a call without torch's dispatcher: checks it, allocates its outputs, and passes it to the backend chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import Around, Backward, Before, Flags, Forward, Operation, Step, operation_of
from fusednorm.calls.checks import (
    as_called,
    check_affine,
    check_apart,
    check_between,
    check_flags,
    check_kept,
    check_operands,
    number,
    refuse_layout,
    rows_to_write,
)
from fusednorm.calls.memory import ABSENT, Rows, common_levels, in_levels, packed, rows_of
from fusednorm.engine import fast_path
from fusednorm.engine.checked_backend import FirstCalls
from fusednorm.engine.choose import Chosen, select, selected, serving
from fusednorm.engine.substitutes import Composition

_on_fast_path = path.Entry(
    "norm",
    "x residual weight out residual_out eps weight_offset round_sum round_norm out_dtype residual_dtype rstd bias",
    constants={"ask": False},
).open()


def backend_of(operation: Operation) -> Chosen:
    """The backend for a call. The first call of an operation warns of a slow one, and may open the fast path."""
    backend = selected(operation)
    if backend is None:
        backend, explanation = select(operation)
        explanation.warn()
        fast_path.open_for(explanation)
    return backend


def whole_of(operation: Operation, step: Step) -> Chosen | None:
    """The backend for a call, if it takes the norm and a step in one; None: several calls, or formulas, serve them."""
    return serving(operation, step, backend_of)


def fast_path_first(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd: Tensor | None = None,
    around: Around | None = None,
) -> tuple[Tensor, Any]:
    """As :func:`forward`, by the fast path if that takes the call. The caller knows that no mode must see it."""
    bias = None if around is None else around.bias
    found = _on_fast_path(x, residual, weight, out, residual_out, *flags, rstd, bias)
    if found is not None:
        return cast("tuple[Tensor, Any]", found)
    return forward(x, residual, weight, flags, out, residual_out, rstd, around=around)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd: Tensor | None = None,
    before: Before | None = None,
    around: Around | None = None,
) -> tuple[Any, Any]:
    """Both outputs (the first None if no norm follows the addition, the second None without a residual).

    ``rstd`` ([...] of the accumulator type) receives 1 / sqrt(mean of squares + eps). ``before``: a norm of x before
    the addition; the weight and eps are then of the norm after it. ``around``: a bias, rows of heads and a factor of x.
    """
    name = "weight" if before is None else "next_weight"
    check_operands(x, residual, weight if around is None else None, out, residual_out, weight_name=name)
    first_weight, first_eps, bias, x_scale = None, 0.0, None, 1.0
    if before is not None:
        check_operands(x, None, before.weight, None, None)
        check_between(before.between, x)
        first_weight = None if before.weight is None else packed(before.weight)
        first_eps = number("eps", before.eps)
    flags = check_flags(flags, x, residual, out, residual_out)
    if around is not None:
        check_affine(x, weight, around.bias, in_memory=True)
        weight, bias = of_heads(weight), of_heads(around.bias)
        x_scale = number("x_scale", around.x_scale)
        around = Around(bias, x_scale)
    operation = operation_of(x, residual, weight, flags, out, before, around)
    hidden_size = operation.hidden_size
    rows = x.numel() // hidden_size

    new = Rows(1, rows, 0, hidden_size)
    x, x_rows = _to_read("x", x, new, out, residual_out)
    residual_rows = total_rows = None
    if residual is not None:
        total_rows = new
        residual, residual_rows = _to_read("residual", residual, new, out, residual_out)
    if weight is not None:
        weight = packed(weight)

    out_rows = None if operation.out is None else new
    outputs = {} if out is residual_out is None else as_called(x, residual, out, residual_out)
    for called, tensor in outputs.items():
        if tensor is out:
            out_rows = rows_to_write(called, tensor)
        if tensor is residual_out:
            total_rows = rows_to_write(called, tensor)
    written = list(outputs.values())
    if written:
        weights = {name: weight, "bias": bias} | ({} if first_weight is None else {"weight": first_weight})
        check_apart(outputs, {"x": x, "residual": residual, **weights}, dict.fromkeys(outputs, ("x", "residual")))
    # The levels of what is written come first: inputs can be copied.
    inner, (out_strides, total_strides, x_strides, residual_strides) = common_levels(
        (out_rows, total_rows, x_rows, residual_rows)
    )
    if total_strides is None and residual_out is not None:
        refuse_layout("residual_out", residual_out, "the same two levels of strides as out")
    if x_strides is None:
        x, x_strides = packed(x), (inner * hidden_size, hidden_size)
    if residual_strides is None and residual is not None:
        residual, residual_strides = packed(residual), (inner * hidden_size, hidden_size)

    backend = backend_of(operation)
    if out is None and operation.out is not None:
        out = new_like(x, operation.out)
    if residual is not None and residual_out is None:
        residual_out = new_like(residual, operation.residual_out)
    # Before the write, so that an interrupt cannot leave a write that autograd does not know of.
    for tensor in written:
        increment_version(tensor)
    if rows:
        strides = x_strides, residual_strides or ABSENT, out_strides or ABSENT, total_strides or ABSENT
        call = Forward(
            x,
            residual,
            weight,
            out,
            residual_out,
            rstd,
            operation,
            rows,
            inner,
            strides,
            flags.eps,
            flags.weight_offset,
            first_weight,
            first_eps,
            bias,
            x_scale,
        )
        run = backend.forward_into(written) if isinstance(backend, (FirstCalls, Composition)) else backend.forward
        run(call)
    return out, residual_out


def _to_read(name: str, tensor: Tensor, new: Rows, *written: Tensor | None) -> tuple[Tensor, Rows]:
    """An operand and its rows; of one whose rows lie otherwise than kernels read them a copy, with ``new`` ones."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor, new  # the usual case of :func:`rows_of`, which takes four times as long
    rows = rows_of(tensor)
    if rows is not None:
        return tensor, rows
    if any(tensor is one for one in written):
        refuse_layout(name, tensor)
    return packed(tensor), new


def of_heads(weight: Tensor | None) -> Tensor | None:
    """A contiguous weight or bias; one with a single row is [N], that of all rows. Of a contiguous one it is a view."""
    return weight if weight is None else packed(weight if weight.shape[0] != 1 else weight.reshape(-1))


def new_like(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A new contiguous tensor of the same shape."""
    if dtype is like.dtype and like.is_contiguous():
        return torch.empty_like(like)  # which takes half as long as with arguments
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def backward(
    backend: Chosen,
    operation: Operation,
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    needs: Sequence[bool],
    bias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, the residual, the weight and the bias, as far as they are needed; else None.

    ``needs`` has an answer for each, or for all but the bias. Only a backend that knows "affine_backward" is given a
    bias or a weight of [H, N]; where both are there, they have one shape.
    """
    need_x, need_residual = needs[0], needs[1] and operation.residual is not None
    dx = dresidual = None
    if need_x or need_residual:
        dx = new_like(h, operation.x if need_x else operation.residual)
    if need_x and need_residual and operation.residual != operation.x:
        dresidual = new_like(h, operation.residual)
    dweight = new_like(weight, weight.dtype) if needs[2] and weight is not None else None
    dbias = new_like(bias, bias.dtype) if bias is not None and needs[3] else None
    of_residual = (dx if dresidual is None else dresidual) if need_residual else None
    gradients = (dx if need_x else None, of_residual, dweight, dbias)
    rows = h.numel() // operation.hidden_size
    if rows == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
    if rows == 0 or (dx is None and dweight is None and dbias is None):
        return gradients
    if fast_path.backward(backend, dy, d_residual_out, h, rstd, weight, dx, dresidual, dweight, dbias, weight_offset):
        return gradients
    check_kept((dy, d_residual_out), (h, rstd, weight, bias))
    (dy_rows, total_rows, h_rows), inner, strides = in_levels((dy, d_residual_out, h))
    assert dy_rows is not None
    assert h_rows is not None
    weight, of_weight, of_bias = of_heads(weight), of_heads(dweight), of_heads(dbias)
    backend.backward(
        Backward(
            *(dy_rows, total_rows, h_rows, packed(rstd), weight, dx, dresidual, of_weight, operation, rows, inner),
            (strides[0], strides[1], strides[2]),
            weight_offset,
            of_bias,
        )
    )
    return gradients
