"""The specification, in plain torch operations: what every other backend must return, bit for bit.

Slow and obvious. It runs on any device that torch knows, and is exact wherever that device has float64.
``docs/spec.md`` states the same contract in prose, with its reasons.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.calls.call import accumulator
from fusednorm.calls.forward_mode import outer_levels, primals

if TYPE_CHECKING:
    from torch import Tensor

    from fusednorm.calls.call import Backward, Flags, Forward

#: Elements in one segment of the summation tree.
SEGMENT = 1024

#: At most so many blocks of rows are summed before the halving tree takes over in :func:`rowsum`.
ROW_BLOCKS = 256


def before_integers(value: Tensor, instead: str) -> Tensor:
    """``value``, whose bits the caller takes as integers: torch would silently find a wrong derivative there.

    Raises:
        RuntimeError: a gradient is recorded; ``instead`` computes the same bits, and has derivatives.
    """
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"these bits are computed as integers, which have no derivative: call {instead} here")
    return value


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` rounded to nearest even to ``dtype``, once. Derivatives are passed straight through."""
    if value.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return value.to(dtype)
    return Converted.apply(value, dtype)  # type: ignore[no-any-return, no-untyped-call]


def widened(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` converted to a dtype that holds all its values. Its derivative is rounded once."""
    if dtype != torch.float64 or value.dtype not in (torch.float16, torch.bfloat16):
        return value.to(dtype)
    return Converted.apply(value, dtype)  # type: ignore[no-any-return, no-untyped-call]


class Converted(torch.autograd.Function):
    """(value, dtype) -> float64 as 16 bits, or 16 bits as float64; derivatives are passed straight through.

    torch converts float64 to float16 and bfloat16 through float32, which rounds twice. The first rounding here is to
    odd (the last bit is set where anything was lost): then the second one gives what rounding once would give.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, dtype: torch.dtype) -> Tensor:
        """``value`` is of any shape."""
        if dtype == torch.float64:
            return value.to(dtype)
        nearest = value.to(torch.float32)
        back = nearest.to(torch.float64)
        bits = nearest.view(torch.int32)
        bits = torch.where(back.abs() > value.abs(), bits - 1, bits)
        bits = torch.where(back == value, bits, bits | 1)
        return torch.where(value.isnan(), nearest, bits.view(torch.float32)).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        """Keeps both dtypes."""
        ctx.before, ctx.after = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient, rounded once to the dtype of the value."""
        return rounded(gradient, ctx.before), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """The tangent, in the dtype of the result."""
        return tangent.to(ctx.after)


def at_least(value: Tensor, least: float | Tensor) -> Tensor:
    """The value, or ``least`` if that is greater; a NaN stays."""
    return torch.where(value < least, least, value)


def within(value: Tensor, least: float | Tensor, greatest: float | Tensor) -> Tensor:
    """The value cut to a range; a NaN stays."""
    value = at_least(value, least)
    return torch.where(value > greatest, greatest, value)


def halved(value: Tensor) -> Tensor:
    """Sums the last dimension, padded with +0 to a power of two, by ``v = v[:n/2] + v[n/2:]`` until one is left."""
    n = 1
    while n < value.shape[-1]:
        n *= 2
    value = torch.nn.functional.pad(value, (0, n - value.shape[-1]))
    while n > 1:
        n //= 2
        value = value[..., :n] + value[..., n:]
    return value[..., 0]


def treesum(value: Tensor) -> Tensor:
    """Sums the last dimension: segments of 1024 elements by halving, then the segment sums by halving."""
    segments = -(-value.shape[-1] // SEGMENT)
    value = torch.nn.functional.pad(value, (0, segments * SEGMENT - value.shape[-1]))
    return halved(halved(value.reshape(*value.shape[:-1], segments, SEGMENT)))


def rowsum(value: Tensor) -> Tensor:
    """Sums the first of two dimensions: blocks of ceil(M / min(M, 256)) rows in row order, then halving."""
    rows = value.shape[0]
    if rows == 0:
        return value.sum(0)
    block = -(-rows // min(rows, ROW_BLOCKS))
    whole = rows // block * block
    sums = in_order(value[:whole].reshape(-1, block, value.shape[1]).movedim(1, 0))
    if whole < rows:
        sums = torch.cat((sums, in_order(value[whole:]).unsqueeze(0)))
    return halved(sums.movedim(0, -1))


def in_order(values: Tensor) -> Tensor:
    """Sums the first dimension, one after the other."""
    return sum(values[1:], start=values[0])


def square_root(value: Tensor) -> Tensor:
    """The correctly rounded square root of each element.

    ``torch.sqrt`` on a CPU is not correctly rounded in float32. Rounding a float64 root to float32 is: the root of a
    float32 number is never close enough to the middle between two of them for a few ulp of float64 to matter.
    """
    if value.dtype == torch.float64:
        return _root_of_float64(before_integers(value, "rstd_of"))
    if value.device.type == "mps":
        return value.sqrt()
    return value.to(torch.float64).sqrt().to(value.dtype)


def _root_of_float64(value: Tensor) -> Tensor:
    """``torch.sqrt`` on a CPU may be one off here too, so that it is looked at again in whole numbers.

    value = w * 2^(2k - 52), with w from 2^52 to 2^54, whose root is that of w * 2^52, times 2^(k - 52). Of the whole
    number s that is nearest to it, rest = w * 2^52 - s^2 is in (-s, s]: (s + 1/2)^2 is no whole number. Where s is one
    off, rest is beyond that. s is cut in two, so that nothing here is above 2^58.
    """
    usual = (value > 0) & (value < math.inf)
    mantissa, exponent = torch.frexp(torch.where(usual, value, 1.0))
    odd = exponent & 1
    part = mantissa * (4 - 2 * odd)  # from 1 to 4
    w, s = (part * 2.0**52).to(torch.int64), (part.sqrt() * 2.0**52).to(torch.int64)
    high, low = s >> 26, s & (1 << 26) - 1
    rest = (((w - high * high << 25) - high * low) << 27) - low * low
    s = s + (rest > s).to(torch.int64) - (rest <= -s).to(torch.int64)
    power = ((exponent + odd) // 2).to(torch.int64) + (1023 - 1 - 52) << 52  # the bits of 2^(k - 52)
    return torch.where(usual, s.to(value.dtype) * power.view(value.dtype), value.sqrt())


def constant(number: float, like: Tensor) -> Tensor:
    """A number rounded to the dtype of ``like``, in its shape; to infinity where the dtype ends before."""
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    return torch.full_like(like, number, dtype=wide).to(like.dtype)


def divided(value: Tensor, divisor: float) -> Tensor:
    """``value / divisor``. By a tensor: CUDA multiplies by the reciprocal of a scalar, which rounds twice."""
    return value / torch.full_like(value, divisor)


def mean_of(value: Tensor) -> Tensor:
    """The mean of each row."""
    return divided(treesum(value), value.shape[-1])


def rstd_of(h: Tensor, eps: float) -> Tensor:
    """``rstd`` of the specification, ``1 / sqrt(mean(h^2) + eps)``, for the rows of h.

    Its derivatives are operations that can be differentiated again.
    """
    return Rstd.apply(h, eps)  # type: ignore[no-any-return, no-untyped-call]


def centered(h: Tensor) -> Tensor:
    """The rows of h less their means, of which none is -0: the sum of a row of -0 is, but for padding."""
    return h - (mean_of(h) + 0.0).unsqueeze(-1)


class Rstd(torch.autograd.Function):
    """(h, eps) -> 1 / sqrt(mean(h^2) + eps)."""

    @staticmethod
    def forward(h: Tensor, eps: float) -> Tensor:
        """``h`` is [..., N] of the accumulator type; the result is [...]."""
        mean = mean_of(h * h)
        r = square_root(mean + constant(eps, mean))
        return torch.ones_like(r) / r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps both."""
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, d_rstd: Tensor) -> tuple[Tensor, None]:
        """``-rstd^3 * h / N``."""
        h, rstd = ctx.saved_tensors
        return (d_rstd * -(rstd**3) / h.shape[-1]).unsqueeze(-1) * h, None

    @staticmethod
    def jvp(ctx: Any, h_tangent: Tensor, _: None) -> Tensor:
        """``-rstd^3 * mean(h * h_tangent)``."""
        with outer_levels():
            h, rstd = primals(ctx)
            return -(rstd**3) * (h * h_tangent).mean(-1)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], h: Tensor, eps: float) -> tuple[Tensor, int]:
        """A batch of rows is rows."""
        return rstd_of(h.movedim(in_dims[0], 0), eps), 0


def gain(weight: Tensor | None, weight_offset: float, dtype: torch.dtype) -> Tensor | None:
    """``g`` of the specification: the weight plus its offset, in the accumulator type."""
    if weight is None:
        return None
    g = weight.to(dtype)
    return g + constant(weight_offset, g) if weight_offset != 0 else g


def row_and_sum(
    x: Tensor, residual: Tensor | None, round_sum: bool, residual_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The row that is normalised, in the accumulator type, and the sum (None without a residual) of :func:`outputs`."""
    dtype = accumulator(x.dtype)
    h, total = x.to(dtype), None
    if residual is not None and residual_dtype is not None:
        h = h + residual.to(dtype)
        total = rounded(h, residual_dtype)
        if round_sum:
            h = total.to(dtype)
    return h, total


def outputs(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_sum: bool,
    round_norm: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    center: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The normalised rows, the sum (None without a residual), and rstd, as the specification writes them.

    Args:
        x: [..., N], the input. Its dtype decides the accumulator type.
        residual: [..., N], or None for the plain ``rms_norm``.
        weight: [N], or None.
        eps: added to the mean of squares.
        weight_offset: added to the weight.
        round_sum: normalise the sum as it is rounded for the caller, rather than before.
        round_norm: round the normalised row to x's dtype before multiplying by the weight.
        out_dtype: the dtype that the normalised rows are rounded to.
        residual_dtype: the dtype that the sum is rounded to; None without a residual.
        center: subtract the mean first, for a LayerNorm.

    Returns:
        [..., N], [..., N] or None, and [...] of the accumulator type: ``1 / sqrt(mean(h^2) + eps)``.
    """
    dtype = accumulator(x.dtype)
    h, total = row_and_sum(x, residual, round_sum, residual_dtype)
    if center:
        h = centered(h)
    r = rstd_of(h, eps)
    n = h * r.unsqueeze(-1)
    if round_norm:
        n = rounded(n, x.dtype).to(dtype)
    g = gain(weight, weight_offset, dtype)
    return rounded(n if g is None else n * g, out_dtype), total, r


def outputs_of(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    flags: Flags,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """:func:`outputs`, with derivatives, of a norm that may have a bias and a row of both for each head."""
    numbers, center = (flags.eps, flags.weight_offset, flags.round_sum, flags.round_norm), flags.center
    if bias is None and getattr(weight, "ndim", 1) != 2:
        return outputs(x, residual, weight, *numbers, out_dtype, residual_dtype, center)
    alone = (flags.eps, 0.0, flags.round_sum, False, accumulator(x.dtype))
    n, total, r = outputs(x, residual, None, *alone, residual_dtype, center)
    rounded_to = x.dtype if flags.round_norm else None
    return affine(n, weight, bias, flags.weight_offset, rounded_to, out_dtype), total, r


def added(x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain addition of the specification's compositions, [..., N]: in the accumulator type, rounded once.

    Gradients are rounded once to the operands' dtypes.
    """
    if x.dtype == residual.dtype == dtype:
        return x + residual
    wide = accumulator(x.dtype)
    return rounded(widened(x, wide) + widened(residual, wide), dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    """The plain scaling of the specification, [..., N]: in the accumulator type, rounded to x's dtype."""
    wide = x.to(accumulator(x.dtype))
    return rounded(wide * constant(factor, wide.new_empty(())), x.dtype)  # autograd keeps one number, not one for each


def affine(
    n: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    rounded_to: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The weight and the bias of normalised rows, as the specification's compositions write them.

    Args:
        n: [..., N] or [..., H, N] of the accumulator type.
        weight: [N] or [H, N], or None.
        bias: [N] or [H, N], or None.
        weight_offset: added to the weight.
        rounded_to: the dtype that n is rounded to before it meets the weight, or None.
        out_dtype: the dtype of the result.
    """
    y = n if rounded_to is None else rounded(n, rounded_to).to(n.dtype)
    g = gain(weight, weight_offset, n.dtype)
    y = y if g is None else y * g
    return rounded(y if bias is None else y + bias.to(n.dtype), out_dtype)


def affine_gradients(
    dy: Tensor,
    n: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of n, the weight and the bias of :func:`affine`; of a head's, over the rows of that head."""

    def summed(gradient: Tensor, like: Tensor) -> Tensor:
        if like.numel() == 0:  # of no heads; -1 would then be no certain number of rows
            return torch.zeros_like(like)
        return rounded(rowsum(gradient.reshape(-1, like.numel())).reshape(like.shape), like.dtype)

    d, g = dy.to(n.dtype), gain(weight, weight_offset, n.dtype)
    dn = None if not needs[0] else d if g is None else d * g
    dweight = summed(d * n, weight) if needs[1] and weight is not None else None
    dbias = summed(d, bias) if needs[2] and bias is not None else None
    return dn, dweight, dbias


def forward(call: Forward) -> None:
    """Writes :func:`outputs`."""
    operation, x = call.operation, call.x
    rounding = (operation.round_sum, operation.round_norm)
    if operation.first is not None:
        alone = (None, call.first_weight, call.first_eps, call.weight_offset, *rounding)
        x = outputs(x, *alone, operation.first.between, None)[0]
    if operation.out is None:
        assert call.residual is not None
        assert call.residual_out is not None
        call.residual_out.copy_(added(x, call.residual, call.residual_out.dtype))
        return
    around = operation.around
    if around is not None and around.scaled:
        x = scaled(x, call.x_scale)
    if around is not None and (around.bias is not None or around.of_heads):
        flags = (call.eps, 0.0, operation.round_sum, False)
        dtypes = (operation.accumulator, operation.residual_out)
        n, total, r = outputs(x, call.residual, None, *flags, *dtypes, center=operation.center)
        rounded_to = x.dtype if operation.round_norm else None
        y = affine(n, call.weight, call.bias, call.weight_offset, rounded_to, operation.out)
    else:
        flags = (call.eps, call.weight_offset, *rounding)
        dtypes = (operation.out, operation.residual_out)
        y, total, r = outputs(x, call.residual, call.weight, *flags, *dtypes, center=operation.center)
    # Only now, because an output may be the memory of an input.
    if call.residual_out is not None and total is not None:
        call.residual_out.copy_(total)
    assert call.out is not None
    call.out.copy_(y)
    if call.rstd is not None:
        call.rstd.copy_(r)


def normalised(h: Tensor, rstd: Tensor, center: bool) -> Tensor:
    """Normalised rows again, [..., N] of the accumulator type, from what the forward pass kept."""
    h = h.to(rstd.dtype)
    return (centered(h) if center else h) * rstd.unsqueeze(-1)


def gradients(
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    needs: tuple[bool, bool, bool],
    center: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, the residual and the weight, as the specification writes them.

    Args:
        dy: [..., N], the gradient of the normalised rows.
        d_residual_out: [..., N], the gradient of the sum, or None.
        h: [..., N], the rows that were normalised (``residual_out``; ``x`` where there was no residual).
        rstd: [...] of the accumulator type, as :func:`outputs` returned it.
        weight: [N], or None.
        weight_offset: as in :func:`outputs`.
        x_dtype: dtype of x, which the accumulator type follows.
        residual_dtype: dtype of the residual, or None.
        needs: which of the three gradients to compute; the others are None.
        center: as in :func:`outputs`.
    """
    dtype = accumulator(x_dtype)
    hidden = h.shape[-1]
    d, g = dy.to(dtype), gain(weight, weight_offset, dtype)
    xhat = normalised(h, rstd, center)
    dx = dresidual = dweight = None
    if needs[0] or needs[1]:
        wdy = d if g is None else d * g
        c = mean_of(wdy * xhat).unsqueeze(-1)
        dh = ((centered(wdy) if center else wdy) - xhat * c) * rstd.unsqueeze(-1)
        if d_residual_out is not None:
            dh = dh + d_residual_out.to(dtype)
        dx = rounded(dh, x_dtype) if needs[0] else None
        dresidual = rounded(dh, residual_dtype) if needs[1] and residual_dtype is not None else None
    if needs[2] and weight is not None:
        dweight = rounded(rowsum((d * xhat).reshape(-1, hidden)), weight.dtype)
    return dx, dresidual, dweight


def backward(call: Backward) -> None:
    """Writes :func:`gradients`."""
    outputs = call.outputs()
    dx, dresidual, dweight = (output is not None for output in outputs)
    found = gradients(
        *(call.dy, call.d_residual_out, call.h, call.rstd, call.weight, call.weight_offset),
        call.operation.x,
        call.operation.residual,
        (dx, dresidual, dweight),
        call.operation.center,
    )
    for output, gradient in zip(outputs, found, strict=True):
        if output is not None and gradient is not None:
            output.copy_(gradient)
