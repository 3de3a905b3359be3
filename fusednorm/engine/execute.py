"""Runs a call without torch's dispatcher: checks it, allocates its outputs, and passes it to the backend chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import (
    Backward,
    Before,
    Flags,
    Forward,
    ForwardCall,
    NormCall,
    NormGated,
    NormGatedBackward,
    Operation,
    Quantize,
    RMSNorm,
    Step,
    Strides,
    accumulator,
    operation_of,
    step_of_gate,
)
from fusednorm.calls.checks import (
    as_called,
    check_affine,
    check_apart,
    check_between,
    check_flags,
    check_kept,
    check_operands,
    check_rows_to_write,
    refuse_layout,
)
from fusednorm.calls.memory import ABSENT, Layout, in_levels, lies_in_rows, new_like, packed
from fusednorm.calls.quantization import Quantization, groups_of, is_given
from fusednorm.calls.scalars import number
from fusednorm.engine import fast_path
from fusednorm.engine.checked_backend import FirstCalls
from fusednorm.engine.choose import Chosen, select, selected, serving
from fusednorm.reference import quantizer

_on_fast_path = path.Entry(
    "norm",
    f"x residual weight out residual_out {' '.join(Flags._fields)} rstd bias",
    constants={"ask": False},
).open()


_norm_gated = path.Entry(
    "gate",
    "x z weight eps norm_before_gate activation round_norm between weight_offset rstd out",
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
        fast_path.open_for(explanation)
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

    ``rstd`` ([...] of the accumulator type) receives that of the rows. ``before``: a norm of x before
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
        first_eps = number("eps", before.eps, accumulator(x.dtype))
    flags = check_flags(flags, x, residual, out, residual_out)
    if affine:
        check_affine(x, weight, bias, in_memory=True)
    x_scale = number("x_scale", x_scale, accumulator(x.dtype)) if affine else 1.0
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


def _given(output: Tensor | None) -> list[Tensor]:
    """The output, if the caller gave it."""
    return [] if output is None else [output]


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
    if fast_path.backward(
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


class GatedNorm(NamedTuple):
    """The arguments of ``rms_norm_gated`` that are no operands, in its order; ``group_size`` is of rows in memory."""

    eps: float
    group_size: int | None
    norm_before_gate: bool
    activation: str
    round_norm: bool
    between: torch.dtype | None
    weight_offset: float

    def operation(self, x: Tensor, weight: Tensor | None) -> RMSNorm:
        """The norm, as it decides the backend: of the gated rows, if the gate comes first."""
        flags = Flags(round_norm=self.round_norm, out_dtype=self.between or x.dtype)
        found = operation_of(x, None, weight, flags)
        return found if self.norm_before_gate else found._replace(x=accumulator(x.dtype))


def backend_of_gated_gradients(x: Tensor, weight: Tensor | None, how: GatedNorm) -> Chosen | None:
    """The backend of such rows, if it has the gradients of a norm and a gate in one call."""
    return whole_of(how.operation(x, of_all_heads(weight)), step_of_gate("norm_gated_backward", how.activation))


def norm_gated(
    x: Tensor, z: Tensor, weight: Tensor | None, how: GatedNorm, out: Tensor | None, rstd: Tensor | None = None
) -> Tensor | None:
    """A norm and a gate in one call, for checked operands and flags: the rows, in new memory or in ``out``.

    None if the backend has no function for it. ``weight`` may have a row for each head. ``rstd``, [...] of the
    accumulator type, receives that of the rows which are normalised.
    """
    if rstd is not None:  # else the fast path has refused the call already
        eps, _, *flags = how
        taken = _norm_gated(x, z, weight, eps, *flags, rstd, out)
        if taken is not None:
            return cast(Tensor, taken)
    weight = of_all_heads(weight)
    operation = how.operation(x, weight)
    backend = whole_of(operation, step_of_gate("norm_gated", how.activation))
    if backend is None:
        return None
    layout = in_levels((out,), (x, z))
    if layout is None:  # a kernel cannot write such rows
        return cast(Tensor, out).copy_(cast(Tensor, norm_gated(x, z, weight, how, None)))
    inner, (of_out, of_x, of_z), (x, z) = layout
    size, rows, given = x.shape[-1], x.shape[:-1].numel(), _given(out)
    if out is None:
        out, of_out = new_like(x, x.dtype), (inner * size, size)
    strides = (of_x, ABSENT, of_out, ABSENT)
    norm = Forward(x, None, weight, out, None, rstd, operation, rows, inner, strides, how.eps, how.weight_offset)
    _run(backend, NormGated(norm, z, of_z, how.activation, how.norm_before_gate), given)
    return out


def norm_gated_gradients(
    backend: Chosen,
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    how: GatedNorm,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, the gate and the weight, new tensors, as far as they are needed; else None."""
    dx, dz, dweight = found = new_gradients((x, z, weight), needs)
    flags = (how.activation, how.norm_before_gate, how.between, how.round_norm, how.weight_offset)
    if are_of_no_rows(d, dweight) or fast_path.norm_gated_backward(
        backend, d, x, z, rstd, weight, dx, dz, dweight, *flags
    ):
        return found
    inner, strides, (d, x, z) = kept_in_levels((d,), (x, z), (rstd, weight))
    weight = of_all_heads(weight)
    call = NormGatedBackward(
        d,
        x,
        z,
        packed(rstd),
        weight,
        dx,
        dz,
        dweight,
        how.operation(x, weight),
        how.activation,
        how.norm_before_gate,
        d.shape[:-1].numel(),
        inner,
        cast(Any, tuple(strides)),
        how.weight_offset,
    )
    backend.backward(call)
    return found


class Quantizing(NamedTuple):
    """A quantizer with the caller's operands and memory for results; None where there is none."""

    quantization: Quantization
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    out: Tensor | None = None
    scale_out: Tensor | None = None
    zero_point_out: Tensor | None = None
    #: Of a norm before the quantizer: its rows, and the sum.
    normed_out: Tensor | None = None
    residual_out: Tensor | None = None


def quantize(x: Tensor, quantizing: Quantizing, norm: NormCall | None = None) -> tuple[Tensor, ...] | None:
    """The results of the public functions, for checked operands: of the rows of x, or of a norm of them.

    None if several calls must serve them: the backend has no such call, or operands lie otherwise than it can write.
    """
    scale: Any
    quantization, scale, zero_point, out, scale_out, zero_point_out, *_ = quantizing
    if quantization.scale_dtype is not None:
        found = quantize(x, quantizing._replace(quantization=quantization.in_float32, scale_out=None), norm)
        return found and _with_scales(found, quantizing)
    of_all = is_given(quantization)
    residual = weight = bias = normed_out = residual_out = None
    flags = Flags()
    if norm is not None:
        residual, weight, bias = norm.residual, norm.weight, norm.bias
        *_, normed_out, residual_out = quantizing
        flags = check_flags(norm.flags, x, residual, None, residual_out)
    operation = operation_of(x, residual, weight, flags, bias=bias)
    backend = whole_of(operation, Step("quantize", quantization))
    if backend is None or (of_all and scale.numel() != 1):  # kernels take one scale
        return None
    given = [t for t in (out, scale_out, zero_point_out, normed_out, residual_out) if t is not None]
    scale_rows = zero_point_rows = None
    if not of_all:
        groups = groups_of(quantization, x.shape)
        scale = laid_out(groups, torch.float32, x, quantization) if scale_out is None else scale_out
        zero_point = zero_point_out
        if zero_point is None and quantization.computes_zero_point:
            zero_point = laid_out(groups, torch.int32, x, quantization)
        scale_rows, zero_point_rows = _rows_of_groups(scale), _rows_of_groups(zero_point)
    layout = in_levels((out, normed_out, residual_out, scale_rows, zero_point_rows), (x, residual))
    if layout is None:
        return None
    inner, (of_out, of_normed, of_total, of_scale, of_zero_point, of_x, of_residual), (x, residual) = layout
    size, rows = operation.hidden_size, x.numel() // operation.hidden_size
    new: Strides = (inner * size, size)
    if out is None:
        out, of_out = new_like(x, quantization.dtype), new
    if residual_out is None and residual is not None:
        residual_out, of_total = new_like(residual, operation.residual_out), new
    results = [out, scale]
    if zero_point is not None and not of_all:
        results.append(zero_point)
    if residual_out is not None:
        results.append(residual_out)
    before = None
    if norm is not None:
        numbers = (rows, inner, (of_x, of_residual, of_normed, of_total), flags.eps, flags.weight_offset)
        before = Forward(x, residual, of_all_heads(weight), normed_out, residual_out, None, operation, *numbers)
        if bias is not None:
            before = before._replace(bias=of_all_heads(bias))
    if of_all:
        scale, zero_point = packed(scale), None if zero_point is None else packed(zero_point)
    call = Quantize(
        x if norm is None else None,
        of_x if norm is None else ABSENT,
        before,
        quantization,
        out,
        of_out,
        scale,
        (*of_scale, _group_stride(scale)),
        zero_point,
        (*of_zero_point, _group_stride(zero_point)),
        size,
        rows,
        inner,
    )
    _run(backend, call, given)
    return tuple(results)


def _with_scales(found: tuple[Tensor, ...], quantizing: Quantizing) -> tuple[Tensor, ...]:
    """Results with float32 scales, and the quantization's scales in their place."""
    numbers, computed, *others = found
    quantization, scale = quantizing.quantization, quantizing.scale_out
    computed = quantizer.in_dtype(computed, quantization.scale_dtype)
    if scale is None:
        scale = laid_out(computed.shape, computed.dtype, computed, quantization)
    return numbers, scale.copy_(computed), *others


def laid_out(shape: Sequence[int], dtype: torch.dtype, like: Tensor, quantization: Quantization) -> Tensor:
    """Memory for scales or zero points, [..., groups], as the layout asks for it."""
    if quantization.layout == "row":
        return like.new_empty(shape, dtype=dtype)
    rows = math.prod(shape[:-1])
    whole = 16 // dtype.itemsize
    padded = -(-rows // whole) * whole if quantization.layout == "column_padded" else rows
    return torch.zeros((shape[-1], padded), dtype=dtype, device=like.device)[:, :rows].mT.reshape(shape)


def _rows_of_groups(of_groups: Tensor | None) -> Tensor | None:
    """Scales or zero points, [..., groups], as an operand whose rows tell where those of a row begin."""
    return of_groups if of_groups is None or of_groups.is_contiguous() else of_groups[..., :1]


def _group_stride(of_groups: Tensor | None) -> int:
    """Elements from one group's scale or zero point to that of the row's next group; 0 for one of all rows."""
    return 0 if of_groups is None or not of_groups.dim() else of_groups.stride(-1)
