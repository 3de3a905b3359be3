"""Runs a call without torch's dispatcher: checks it, allocates its outputs, and passes it to the backend chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import Backward, Before, Flags, Forward, ForwardCall, Operation, Step, operation_of
from fusednorm.calls.checks import (
    as_called,
    check_affine,
    check_apart,
    check_between,
    check_flags,
    check_kept,
    check_operands,
    check_rows_to_write,
    number,
    refuse_layout,
)
from fusednorm.calls.memory import Layout, in_levels, lies_in_rows, packed
from fusednorm.engine import fast_path
from fusednorm.engine.checked_backend import FirstCalls
from fusednorm.engine.choose import Chosen, select, selected, serving

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
    bias: Tensor | None = None,
    of_heads: bool = False,
) -> tuple[Tensor, Any]:
    """As :func:`norm`, by the fast path if that takes the call. The caller knows that no mode must see it."""
    found = _on_fast_path(x, residual, weight, out, residual_out, *flags, rstd, bias)
    if found is not None:
        return cast("tuple[Tensor, Any]", found)
    return norm(x, residual, weight, flags, out, residual_out, rstd, bias=bias, of_heads=of_heads)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    rstd: Tensor | None = None,
    before: Before | None = None,
    bias: Tensor | None = None,
    x_scale: float = 1.0,
    of_heads: bool = False,
) -> tuple[Any, Any]:
    """Both outputs (the first None if no norm follows the addition, the second None without a residual).

    ``rstd`` ([...] of the accumulator type) receives 1 / sqrt(mean of squares + eps). ``before``: a norm of x before
    the addition; the weight and eps are then of the norm after it. ``of_heads``: whether the weight may have a row for
    each head, as a bias may.
    """
    affine = of_heads or bias is not None or x_scale != 1.0
    weight_name = "weight" if before is None else "next_weight"
    check_operands(x, residual, None if affine else weight, out, residual_out, weight_name=weight_name)
    first_weight, first_eps = None, 0.0
    if before is not None:
        check_operands(x, None, before.weight, None, None)
        check_between(before.between, x)
        first_weight = None if before.weight is None else packed(before.weight)
        first_eps = number("eps", before.eps)
    flags = check_flags(flags, x, residual, out, residual_out)
    if affine:
        check_affine(x, weight, bias, in_memory=True)
    x_scale = number("x_scale", x_scale) if affine else 1.0
    if weight is not None:
        weight = of_all_heads(weight)
    if bias is not None:
        bias = of_all_heads(bias)
    operation = operation_of(x, residual, weight, flags, out, before, bias, x_scale)
    given = {} if out is residual_out is None else as_called(x, residual, out, residual_out)
    layout = in_levels((out, residual_out), (x, residual))
    if given:
        weights = {weight_name: weight, "bias": bias} | ({} if first_weight is None else {"weight": first_weight})
        _check_given(given, {"x": x, "residual": residual}, weights)
    if layout is None:
        refuse_layout("residual_out", cast(Tensor, residual_out), "the same two levels of strides as out")
    inner, (of_out, of_total, of_x, of_residual), (x, residual) = layout
    new, backend = (inner * operation.hidden_size, operation.hidden_size), backend_of(operation)
    if out is None and operation.out is not None:
        out, of_out = new_like(x, operation.out), new
    if residual_out is None and residual is not None:
        residual_out, of_total = new_like(residual, operation.residual_out), new
    call = Forward(
        x,
        residual,
        weight,
        out,
        residual_out,
        rstd,
        operation,
        x.numel() // operation.hidden_size,
        inner,
        (of_x, of_residual, of_out, of_total),
        flags.eps,
        flags.weight_offset,
        first_weight,
        first_eps,
        bias,
        x_scale,
    )
    _run(backend, call, list(given.values()))
    return out, residual_out


def _check_given(given: dict[str, Tensor], rows: dict[str, Tensor | None], weights: dict[str, Tensor | None]) -> None:
    """That kernels can write the outputs of a norm that the caller gave, and that they lie apart from what is read."""
    for name, tensor in rows.items():
        if tensor is not None and not lies_in_rows(tensor):  # a copy is read, but not of what is written
            if any(tensor is one for one in given.values()):
                refuse_layout(name, tensor)
            rows = rows | {name: None}
    for name, tensor in given.items():
        check_rows_to_write(name, tensor)
    check_apart(given, rows | weights, dict.fromkeys(given, ("x", "residual")))


def _run(backend: Chosen, call: ForwardCall, given: Sequence[Tensor] = ()) -> None:
    """Has the backend write the outputs of a call, of which the caller gave some."""
    # Before the write, so that an interrupt cannot leave a write that autograd does not know of.
    if given:
        increment_version(given)
    if not call.rows:
        return
    if isinstance(backend, FirstCalls) and isinstance(call, Forward):
        backend.forward_into(given)(call)
    else:
        backend.forward(call)


def kept_in_levels(
    incoming: Sequence[Tensor | None], rows: Sequence[Tensor | None], others: Sequence[Tensor | None] = ()
) -> Layout:
    """Incoming gradients, and rows that the forward pass kept, which are in memory still, as all that was kept is."""
    check_kept(incoming, (*rows, *others))
    return cast(Layout, in_levels((), (*incoming, *rows)))


def of_all_heads(weight: Tensor | None) -> Tensor | None:
    """A contiguous weight or bias; one with a single row is [N], that of all rows. Of a contiguous one it is a view."""
    if weight is None:
        return None
    return packed(weight.reshape(-1) if weight.dim() == 2 and weight.shape[0] == 1 else weight)


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
    inner, strides, (dy_rows, total_rows, h_rows) = kept_in_levels((dy, d_residual_out), (h,), (rstd, weight, bias))
    weight, of_weight, of_bias = of_all_heads(weight), of_all_heads(dweight), of_all_heads(dbias)
    backend.backward(
        Backward(
            *(dy_rows, total_rows, h_rows, packed(rstd), weight, dx, dresidual, of_weight, operation, rows, inner),
            (strides[0], strides[1], strides[2]),
            weight_offset,
            of_bias,
        )
    )
    return gradients
