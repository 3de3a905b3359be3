"""The public functions: they check, allocate, choose a backend and call it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function

from fusednorm import listeners
from fusednorm.checks import (
    NAMES,
    check_flags,
    check_operands,
    check_overlap,
    number,
    output_stride,
    refuse_grad,
    refuse_layout,
    refuse_nested,
    refuse_type,
    requires_grad,
)
from fusednorm.contract import FirstCalls
from fusednorm.layout import row_stride
from fusednorm.registry import Signature, order, quick, select

#: eps, weight_offset, round_sum, round_norm.
Flags = tuple[float, float, bool, bool]


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds the residual, then RMS-normalises: the same bits as ``s = x + residual; rms_norm(s, weight, eps)``.

    Sums are taken in float32 (float64 for a float64 ``x``), each operation rounded once, in the order that
    ``docs/spec.md`` fixes: every backend returns the same bits, and a row's bits depend on that row alone.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N], any of these dtypes; None multiplies by nothing.
        eps: added to the mean of squares, unitless.
        weight_offset: added to the weight; 1.0 gives Gemma's ``1 + weight``.
        round_sum: normalise the sum as rounded to the residual's dtype (as an unfused add does), not as it was before.
        round_norm: round the normalised row to x's dtype before it meets the weight (as Hugging Face's Llama does).
        out: [..., N] to write the normalised rows to, in its own dtype. May be x or residual itself.
        residual_out: [..., N] of the residual's dtype, to write the sum to. May be x or residual itself.

    Returns:
        The normalised rows, in x's dtype (``out`` if given), and the sum, in the residual's (``residual_out``).

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``out`` or ``residual_out`` is given and an operand requires grad.
        BackendError: the backends ordered cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    compiling = is_dynamo_compiling()
    if not compiling:
        way = quick.get(order())
        if way is not None:
            result = way(x, residual, weight, out, residual_out, eps, weight_offset, round_sum, round_norm, None, True)
            if result is not None:
                return result
        operands = (x, residual, weight, out, residual_out)
        if listeners.override(*operands):
            return handle_torch_function(
                fused_add_rms_norm,
                operands,
                x,
                residual,
                weight,
                eps,
                weight_offset=weight_offset,
                round_sum=round_sum,
                round_norm=round_norm,
                out=out,
                residual_out=residual_out,
            )
    flags = (eps, weight_offset, round_sum, round_norm)
    return beyond_fast_path("fused_add_rms_norm", compiling, x, residual, weight, out, residual_out, flags)


def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`fused_add_rms_norm` in place: the normalised rows land in ``x``, the sum in ``residual``.

    Args:
        x: [..., N]; each row contiguous, and all rows one stride apart.
        residual: [..., N], likewise; must not share memory with x.
        weight: see :func:`fused_add_rms_norm`, as for the rest.
        eps: see there.
        weight_offset: see there.
        round_sum: see there.
        round_norm: see there.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    compiling = is_dynamo_compiling()
    if not compiling:
        way = quick.get(order())
        if way is not None:
            result = way(x, residual, weight, x, residual, eps, weight_offset, round_sum, round_norm, None, True)
            if result is not None:
                return result
        operands = (x, residual, weight)
        if listeners.override(*operands):
            return handle_torch_function(
                fused_add_rms_norm_,
                operands,
                x,
                residual,
                weight,
                eps,
                weight_offset=weight_offset,
                round_sum=round_sum,
                round_norm=round_norm,
            )
    return beyond_fast_path(
        "fused_add_rms_norm_", compiling, x, residual, weight, x, residual, (eps, weight_offset, round_sum, round_norm)
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """RMS-normalises the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: [..., N]; see :func:`fused_add_rms_norm`, as for the rest.
        weight: [N], or None.
        eps: see there.
        weight_offset: see there.
        round_norm: see there.
        out: [..., N] to write to, in its own dtype. May be x itself.

    Returns:
        The normalised rows, in x's dtype; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    compiling = is_dynamo_compiling()
    if not compiling:
        way = quick.get(order())
        if way is not None:
            result = way(x, None, weight, out, None, eps, weight_offset, True, round_norm, None, True)
            if result is not None:
                return result[0]
        if listeners.override(x, weight, out):
            return handle_torch_function(
                rms_norm, (x, weight, out), x, weight, eps, weight_offset=weight_offset, round_norm=round_norm, out=out
            )
    flags = (eps, weight_offset, True, round_norm)
    return beyond_fast_path("rms_norm", compiling, x, None, weight, out, None, flags)[0]


def rms_norm_(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> Tensor:
    """:func:`rms_norm` in place: the normalised rows land in ``x``.

    Args:
        x: [..., N]; each row contiguous, and all rows one stride apart.
        weight: see :func:`rms_norm`, as for the rest.
        eps: see there.
        weight_offset: see there.
        round_norm: see there.

    Returns:
        ``x``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`fused_add_rms_norm`.
    """
    compiling = is_dynamo_compiling()
    if not compiling:
        way = quick.get(order())
        if way is not None:
            result = way(x, None, weight, x, None, eps, weight_offset, True, round_norm, None, True)
            if result is not None:
                return result[0]
        if listeners.override(x, weight):
            return handle_torch_function(
                rms_norm_, (x, weight), x, weight, eps, weight_offset=weight_offset, round_norm=round_norm
            )
    flags = (eps, weight_offset, True, round_norm)
    return beyond_fast_path("rms_norm_", compiling, x, None, weight, x, None, flags)[0]


def beyond_fast_path(
    name: str,
    compiling: bool,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs of the public function of that name, by whichever of torch's ways this call must go.

    ``compiling`` says whether ``torch.compile`` traces the call. The flags are eps, weight_offset, round_sum and
    round_norm.
    """
    new = out is None and residual_out is None
    if not new and is_grad_enabled() and requires_grad(x, residual, weight, out, residual_out):
        refuse_grad(name)
    if not compiling and listeners.transform(x, residual, weight, out, residual_out):
        return _transformed(x, residual, weight, out, residual_out, flags)
    if compiling or _heard_below(x, residual, weight, out, residual_out):
        return _dispatched(name, x, residual, weight, out, residual_out, flags)
    if new and is_grad_enabled() and requires_grad(x, residual, weight):
        return _differentiable(x, residual, weight, *flags)
    return run(x, residual, weight, *flags, out, residual_out)


def _heard_below(*operands: Tensor | None) -> bool:
    """Whether the call must go through torch's dispatcher. The operands are those of :data:`NAMES`."""
    if not listeners.plain(*operands):
        for name, tensor in zip(NAMES, operands, strict=True):
            if listeners.overrides_operations(tensor) and cast(Tensor, tensor).is_nested:
                refuse_nested(name)  # it would override our operation, and not know it
    return listeners.below(*operands)


def _transformed(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs under ``torch.func`` or forward-mode differentiation; those that are given take a copy."""
    from fusednorm.autograd import Transformed

    apply: Any = Transformed.apply
    if "torch._dynamo" in sys.modules:  # else it would try to compile what it finds below a call that it left alone
        apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
    y, total, _ = apply(x, residual, weight, *flags)
    for name, given, new in (("out", out, y), ("residual_out", residual_out, total)):
        if given is not None and given.dtype != new.dtype:
            raise NotImplementedError(
                f"{name} must have the dtype {str(new.dtype)[6:]} under torch.func and forward-mode differentiation, "
                f"got {str(given.dtype)[6:]}; call the function without {name} and convert what it returns"
            )
    return y if out is None else out.copy_(y), total if residual_out is None else residual_out.copy_(total)


def _dispatched(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """Both outputs of the public function of that name, by way of torch's dispatcher."""
    if out is None and residual_out is None:
        return dispatched(x, residual, weight, flags)[:2]
    operations = _operations(x, residual, weight, out, residual_out)
    if name == "rms_norm_":
        operations.rms_norm_(x, weight, *flags)
    elif name == "fused_add_rms_norm_":
        operations.fused_add_rms_norm_(x, residual, weight, *flags)
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        if residual is not None and residual_out is None:
            residual_out = torch.empty_like(residual, memory_format=torch.contiguous_format)
        operations.into(x, residual, weight, out, residual_out, *flags)
    return cast(Tensor, out), residual_out


def dispatched(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, flags: Flags
) -> tuple[Tensor, Tensor | None, Tensor]:
    """New outputs and rstd, by way of torch's dispatcher."""
    operations = _operations(x, residual, weight)
    if residual is None:
        y, rstd = operations.rms_norm(x, weight, *flags)
        return y, None, rstd
    return operations.fused_add_rms_norm(x, residual, weight, *flags)  # type: ignore[no-any-return]


def _operations(*operands: Tensor | None) -> Any:
    """``torch.ops.fusednorm``. If an operand is a DTensor, torch knows by then how to shard the operations."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and any(isinstance(operand, tensor.DTensor) for operand in operands):
        import fusednorm.distributed  # noqa: F401 - registers the rules
    return torch.ops.fusednorm


def _differentiable(*arguments: Any) -> tuple[Tensor, Any]:
    """Both outputs, with a gradient to come."""
    from fusednorm.autograd import Normalise

    y, total, _ = Normalise.apply(*arguments)  # type: ignore[no-untyped-call]
    return y, total


def run_quickly(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    rstd: Tensor | None,
    flags: Flags,
) -> tuple[Tensor, Any]:
    """As :func:`run`, by the fast path if that takes the call. The caller has asked who listens."""
    way = quick.get(order())
    found = None if way is None else way(x, residual, weight, out, residual_out, *flags, rstd, False)
    return found or run(x, residual, weight, *flags, out, residual_out, rstd)


def run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_sum: bool,
    round_norm: bool,
    out: Tensor | None,
    residual_out: Tensor | None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Checks the operands, allocates the outputs that are not given, and has a backend write them.

    ``rstd`` ([...] of the accumulator type) receives the reciprocal root mean square. Returns the two outputs (the
    second None without a residual).
    """
    check_operands(x, residual, weight, out, residual_out)
    eps, weight_offset = number("eps", eps), number("weight_offset", weight_offset)
    check_flags(round_sum=round_sum, round_norm=round_norm)
    hidden_size = x.shape[-1]
    rows = x.numel() // hidden_size

    x_stride = row_stride(x)
    if x_stride is None:
        if out is x or residual_out is x:
            refuse_layout("x", x)
        x, x_stride = x.resolve_neg().contiguous(), hidden_size
    residual_stride = None if residual is None else row_stride(residual)
    if residual_stride is None:
        residual_stride = hidden_size
        if residual is not None:
            if out is residual or residual_out is residual:
                refuse_layout("residual", residual)
            residual = residual.resolve_neg().contiguous()
    if weight is not None and row_stride(weight) is None:
        weight = weight.resolve_neg().contiguous()

    written = [tensor for tensor in (out, residual_out) if tensor is not None]
    out_stride = residual_out_stride = hidden_size
    if out is not None:
        out_stride = output_stride("out", out, rows, hidden_size, x, residual)
    if residual_out is not None:
        residual_out_stride = output_stride("residual_out", residual_out, rows, hidden_size, x, residual)
    if rows and (out is not None or residual_out is not None):
        check_overlap(
            {"out": (out, out_stride), "residual_out": (residual_out, residual_out_stride)},
            {"x": (x, x_stride), "residual": (residual, residual_stride)},
            weight,
            rows,
            hidden_size,
        )
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is not None and residual_out is None:
        residual_out = torch.empty_like(residual, memory_format=torch.contiguous_format)

    backend = select(
        Signature(
            x.device,
            x.dtype,
            None if residual is None else residual.dtype,
            None if weight is None else weight.dtype,
            out.dtype,
            hidden_size,
            round_sum,
            round_norm,
        )
    )
    # Before, because an interrupt may come between what follows: what is written must be counted.
    for tensor in written:
        increment_version(tensor)
    if rows:
        forward = backend.forward_into(written) if isinstance(backend, FirstCalls) else backend.forward
        forward(
            x,
            residual,
            weight,
            out,
            residual_out,
            rstd,
            rows,
            hidden_size,
            x_stride,
            residual_stride,
            out_stride,
            residual_out_stride,
            eps,
            weight_offset,
            round_sum,
            round_norm,
        )
    return out, residual_out
