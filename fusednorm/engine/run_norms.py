"""Runs a call without torch's dispatcher: checks it, allocates its outputs, and passes it to the backend chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import (
    Backward,
    Before,
    Call,
    Flags,
    Forward,
    ForwardCall,
    Operation,
    RMSNorm,
    Step,
    accumulator,
    operation_of,
)
from fusednorm.calls.checks import (
    as_called,
    check_affine,
    check_apart,
    check_flags,
    check_kept,
    check_operands,
    check_rows_to_write,
    refuse_layout,
)
from fusednorm.calls.memory import Layout, in_levels, lies_in_rows, new_like, packed
from fusednorm.calls.scalars import number
from fusednorm.engine import open_fast_path
from fusednorm.engine.checked_backend import FirstCalls
from fusednorm.engine.choose import Chosen, select, selected, serving

_on_fast_path = path.Entry(
    "norm",
    f"x residual weight out residual_out {' '.join(Flags._fields)} rstd bias",
    constants={"ask": False},
).open()


def backend_of(operation: RMSNorm) -> Chosen:
    """The backend for a norm."""
    return cast(Chosen, chosen_for(operation))


def chosen_for(operation: Operation) -> Chosen | None:
    """The backend for a call, None if the formula serves it.

    The first call of an operation warns of a slow backend, and may open the fast path.
    """
    try:
        return selected(operation)
    except KeyError:
        backend, explanation = select(operation)
        explanation.warn()
        open_fast_path.open_for(explanation)
        return backend


def whole_of(operation: RMSNorm, step: Step) -> Chosen | None:
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
    """The norm, by the fast path if that takes the call. The caller knows that no mode must see it."""
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
    bias: Tensor | None = None,
    x_scale: float = 1.0,
    of_heads: bool = False,
) -> tuple[Any, Any]:
    """Both outputs, the second None without a residual, after all checks.

    ``rstd`` ([...] of the accumulator type) receives that of the rows. ``of_heads``: whether the weight may have a row
    for each head, as a bias may.
    """
    affine = of_heads or bias is not None or x_scale != 1.0
    flags, x_scale = checked(x, residual, weight, flags, out, residual_out, bias, x_scale, affine)
    return norm_of_checked(x, residual, weight, flags, out, residual_out, rstd, bias=bias, x_scale=x_scale)


def checked(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None,
    residual_out: Tensor | None,
    bias: Tensor | None,
    x_scale: float,
    affine: bool,
    in_memory: bool = True,
) -> tuple[Flags, float]:
    """The flags and ``x_scale``, numbers rounded, after all checks.

    ``affine``: whether there is a bias or a scaled x, or the weight may have a row for each head.
    """
    check_operands(x, residual, None if affine else weight, out, residual_out, in_memory=in_memory)
    flags = check_flags(flags, x, residual, out, residual_out)
    if affine:
        check_affine(x, weight, bias, in_memory=in_memory)
        x_scale = number("x_scale", x_scale, accumulator(x.dtype))
    else:
        x_scale = 1.0
    if in_memory and (out is not None or residual_out is not None):
        check_memory_given(x, residual, out, residual_out, {"weight": weight, "bias": bias})
    return flags, x_scale


def norm_of_checked(
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
) -> tuple[Any, Any]:
    """Both outputs, the first None if no norm follows the addition.

    ``before``: a norm of x before the addition; the weight and eps are then of the norm after it.
    """
    first_weight, first_eps = None, 0.0
    if before is not None:
        first_weight, first_eps = None if before.weight is None else packed(before.weight), before.eps
    if weight is not None:
        weight = of_all_heads(weight)
    if bias is not None:
        bias = of_all_heads(bias)
    operation = operation_of(x, residual, weight, flags, out, before, bias, x_scale)
    given = [t for t in (out, residual_out) if t is not None]
    layout = in_levels((out, residual_out), (x, residual))
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
    launch(backend, call, given)
    return out, residual_out


def check_memory_given(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    weights: dict[str, Tensor | None],
) -> None:
    """Checks that kernels can write the outputs that the caller gave, and that these lie apart from what is read."""
    given, rows = as_called(x, residual, out, residual_out), {"x": x, "residual": residual}
    for name, tensor in rows.items():
        if tensor is not None and not lies_in_rows(tensor):  # a copy is read, but not of what is written
            if any(tensor is one for one in given.values()):
                refuse_layout(name, tensor)
            rows = rows | {name: None}
    read = rows | {name: t for name, t in weights.items() if t is not None and packed(t) is t}  # else a copy
    for name, tensor in given.items():
        check_rows_to_write(name, tensor)
    check_apart(given, read, dict.fromkeys(given, ("x", "residual")))


def launch(backend: Chosen, call: ForwardCall, given: Sequence[Tensor] = ()) -> None:
    """Has a backend make a call. ``given``: the results whose memory the caller gave."""
    if given:  # before the write, so that an interrupt cannot leave one that autograd does not know of
        increment_version(given)
    if not call.rows:
        return
    if isinstance(call, Forward) and isinstance(backend, FirstCalls):
        backend.forward_into(given)(call)
    elif isinstance(call, Call) and call.backward:
        backend.backward(call)
    else:
        backend.forward(call)


def kept_in_levels(
    incoming: Sequence[Tensor | None], rows: Sequence[Tensor | None], others: Sequence[Tensor | None] = ()
) -> Layout:
    """Incoming gradients, and rows that the forward pass kept, which are in memory still, as all that was kept is."""
    check_kept(incoming, (*rows, *others))
    return cast(Layout, in_levels((), (*incoming, *rows)))


def new_gradients(operands: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """New memory for the gradients of operands, as far as they are needed; else None."""
    return tuple(
        [new_like(t, t.dtype) if need and t is not None else None for t, need in zip(operands, needs, strict=True)]
    )


def are_of_no_rows(d: Tensor, *of_weights: Tensor | None) -> bool:
    """Whether there are no rows, which is all that gradients of weights need: they are zeros then."""
    if d.numel():
        return False
    for gradient in of_weights:
        if gradient is not None:
            gradient.zero_()
    return True


def of_all_heads(weight: Tensor | None) -> Tensor | None:
    """A contiguous weight or bias; one with a single row is [N], that of all rows. Of a contiguous one it is a view."""
    if weight is None:
        return None
    return packed(weight.reshape(-1) if weight.dim() == 2 and weight.shape[0] == 1 else weight)


def backward(
    backend: Chosen,
    operation: RMSNorm,
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
    if are_of_no_rows(h, dweight, dbias) or (dx is None and dweight is None and dbias is None):
        return gradients
    center = operation.center
    if open_fast_path.backward(
        backend, dy, d_residual_out, h, rstd, weight, dx, dresidual, dweight, dbias, weight_offset, center
    ):
        return gradients
    inner, strides, (dy_rows, total_rows, h_rows) = kept_in_levels((dy, d_residual_out), (h,), (rstd, weight, bias))
    weight, of_weight, of_bias = of_all_heads(weight), of_all_heads(dweight), of_all_heads(dbias)
    call = Backward(
        dy_rows,
        total_rows,
        h_rows,
        packed(rstd),
        weight,
        dx,
        dresidual,
        of_weight,
        operation,
        h.numel() // operation.hidden_size,
        inner,
        cast(Any, tuple(strides)),
        weight_offset,
        of_bias,
    )
    backend.backward(call)
    return gradients
