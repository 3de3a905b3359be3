"""The operations of ``torch.ops.fusednorm`` in ONNX's operators: docs/onnx.md.

An operation is a function with the arguments of its operator, and ``exact``; dtypes are those of ONNX. torch calls it
while it records a graph, to which each operator is added as it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import evaluator
from onnxscript import opset18 as op
from onnxscript import opset23 as op23

from fusednorm.calls.call import Flags, GateSteps
from fusednorm.calls.function_constants import NORMALS, SCHEMES, TANGENTS
from fusednorm.calls.quantization import MOST, Quantization
from fusednorm.onnx_limits import OPSET, UntranslatedError
from fusednorm.reference.activations import INNER, OUTER
from fusednorm.reference.norm import SEGMENT

_F32, _F64, _I32, _I64 = (getattr(ir.DataType, name) for name in ("FLOAT", "DOUBLE", "INT32", "INT64"))
_SHORT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

#: A tensor of the ONNX graph.
Value = Any


def _norm(operands: Sequence[str], center: bool, exact: bool, *given: Any) -> tuple[Value, ...]:
    """y, [..., N], beside a residual the sum, and rstd, [...]: docs/spec.md, sections 2 and 12."""
    named = dict(zip(operands, given, strict=False))
    x, residual, weight, bias = (named.get(name) for name in ("x", "residual", "weight", "bias"))
    flags, wide = Flags(*given[len(operands) :])._replace(center=center), _accumulator(x)
    h = _widened(x, wide)
    if residual is None:
        return _normalised(exact, h, x, weight, bias, flags)
    total_dtype = flags.residual_dtype or residual.dtype
    h = op.Add(h, _widened(residual, wide))
    total = _rounded(exact, h, wide, total_dtype)
    if flags.round_sum:
        h = _cast(total, total_dtype, wide)
    y, rstd = _normalised(exact, h, x, weight, bias, flags)
    return y, total, rstd


rms_norm = partial(_norm, ("x", "weight"), False)
layer_norm = partial(_norm, ("x", "weight", "bias"), True)
fused_add_rms_norm = partial(_norm, ("x", "residual", "weight"), False)
fused_add_layer_norm = partial(_norm, ("x", "residual", "weight", "bias"), True)


def add(exact: bool, x: Value, residual: Value, dtype: Any) -> Value:
    """x + residual, rounded to a dtype: section 8, as the next three."""
    wide = _accumulator(x)
    return _rounded(exact, op.Add(_widened(x, wide), _widened(residual, wide)), wide, dtype)


def scale(exact: bool, x: Value, factor: float) -> Value:
    """x times a number, rounded to x's dtype."""
    wide = _accumulator(x)
    return _cast(op.Mul(_widened(x, wide), _constant(factor, wide)), wide, x.dtype)


def affine(
    exact: bool, n: Value, weight: Value | None, bias: Value | None, offset: float, rounded_to: Any, out_dtype: Any
) -> Value:
    """Normalised rows n times the weight, plus the bias."""
    wide = n.dtype
    y, gain = _rounded_between(exact, n, wide, rounded_to), _gain(weight, offset, wide)
    y = y if gain is None else op.Mul(y, gain)
    y = y if bias is None else op.Add(y, _widened(bias, wide))
    y = _rounded(exact, y, wide, out_dtype)
    return op.Identity(y) if y is n else y  # a result needs a node of its own, for its name


def rotate(exact: bool, x: Value, cos: Value, sin: Value, interleaved: bool, rounded_to: Any, dtype: Any) -> Value:
    """Rotated heads, [..., H, D]."""
    wide, rank, size, angles = _accumulator(x), len(x.shape), _length(x), _length(cos)
    heads = _widened(x, wide)
    # [..., K] for all heads of a row.
    c, s = (op.Unsqueeze(_widened(table, wide), _integers(-2)) for table in (cos, sin))
    if interleaved:
        rotated = op.Reshape(_part(heads, 0, 2 * angles), _integers(*[0] * (rank - 1), angles, 2))
        a, b = (op.Squeeze(_part(rotated, i, i + 1), _integers(-1)) for i in (0, 1))
    else:
        a, b = _part(heads, 0, angles), _part(heads, angles, 2 * angles)

    def product(v: Value, table: Value) -> Value:
        return _rounded_between(exact, op.Mul(v, table), wide, rounded_to)

    first = op.Sub(product(a, c), product(b, s))
    second = op.Add(product(b, c), product(a, s))
    if interleaved:
        pairs = op.Concat(op.Unsqueeze(first, _integers(-1)), op.Unsqueeze(second, _integers(-1)), axis=-1)
        parts = [op.Reshape(pairs, _integers(*[0] * (rank - 1), 2 * angles))]
    else:
        parts = [first, second]
    if 2 * angles < size:
        parts.append(_part(heads, 2 * angles, size))
    return _rounded(exact, op.Concat(*parts, axis=-1), wide, dtype)


def gate(exact: bool, y: Value, z: Value, activation: str, between: Any, out_dtype: Any, *steps: Any) -> Value:
    """y times a function of z: section 10."""
    limit, alpha, up_offset, clamp, round_steps = GateSteps(*steps)
    wide = _F64 if _F64 in (y.dtype, z.dtype) else _F32
    g, u, rounds = _widened(z, wide), _widened(y, wide), between if round_steps else None
    if limit and clamp == "before":
        g = _no_more(g, _limit(limit, z.dtype, wide))
    if alpha == 1:
        a = _activated(exact, g, activation, wide)
    else:
        v = _rounded_between(exact, op.Mul(g, _constant(alpha, wide)), wide, rounds)
        if exact and not round_steps:
            a = _product(g, v, wide)
        else:
            a = op.Mul(g, _rounded_between(exact, _activated(exact, v, "sigmoid", wide), wide, rounds))
    a = _rounded_between(exact, a, wide, between)
    if limit and clamp == "after":
        a = _no_more(a, _limit(limit, between or wide, wide))
    if limit:
        most = _limit(limit, y.dtype, wide)
        u = op.Neg(_no_more(op.Neg(_no_more(u, most)), most))
    if up_offset:
        u = _rounded_between(exact, op.Add(u, _constant(up_offset, wide)), wide, rounds)
    return _rounded(exact, op.Mul(u, a), wide, out_dtype)


def gelu(exact: bool, z: Value, out_dtype: Any = None, activation: str = "gelu") -> Value:
    """A function of z alone."""
    wide = _accumulator(z)
    return _rounded(exact, _activated(exact, _widened(z, wide), activation, wide), wide, out_dtype or z.dtype)


relu2 = partial(gelu, activation="relu2")


def softcap(exact: bool, x: Value, cap: float = 30.0, round_steps: bool = False, out_dtype: Any = None) -> Value:
    """A number with a cap: section 10."""
    wide = _accumulator(x)
    c, rounds = _constant(cap, wide), x.dtype if round_steps else None
    v = _rounded_between(exact, op.Div(_widened(x, wide), c), wide, rounds)
    th = _rounded_between(exact, _tanh(v, wide) if exact else op.Tanh(v), wide, rounds)
    y = _rounded_between(exact, op.Mul(th, c), wide, rounds)
    return _rounded(exact, y, wide, out_dtype or x.dtype)


def _limit(limit: float, dtype: Any, wide: Any) -> Value:
    """A limit as numbers of a dtype have it."""
    start = _F64 if dtype == _F64 else _F32
    return _cast(_cast(_constant(limit, start), start, dtype), dtype, wide)


def _no_more(v: Value, most: Value) -> Value:
    return op.Where(op.Greater(v, most), most, v)


def _activated(exact: bool, gate: Value, activation: str, wide: Any) -> Value:
    """The function of a gate."""
    if activation == "relu2":
        r = op.Where(op.Less(gate, _constant(0.0, wide)), _constant(0.0, wide), gate)
        return op.Mul(r, r)
    if activation == "gelu":
        if exact:
            return _gelu(gate, wide)
        phi = op.Add(op.Erf(op.Mul(gate, _constant(0.5**0.5, wide))), _constant(1.0, wide))
        return op.Mul(op.Mul(gate, _constant(0.5, wide)), phi)
    argument = gate
    if activation == "gelu_tanh":
        cubic = op.Mul(op.Mul(op.Mul(gate, gate), gate), _constant(INNER, wide))
        argument = op.Mul(op.Add(gate, cubic), _constant(OUTER, wide))
    if exact:
        return _product(_constant(1.0, wide) if activation == "sigmoid" else gate, argument, wide)
    a = op.Sigmoid(argument)
    return a if activation == "sigmoid" else op.Mul(gate, a)


def quantize(
    exact: bool, y: Value, text: str, scale: Value | None, zero_point: Value | None
) -> tuple[Value, Value, Value]:
    """Numbers, scales and zero points of rows: section 9. Nothing of it depends on ``exact``."""
    quantization = Quantization.parse(text)
    if quantization.scale_dtype is not None:
        raise UntranslatedError("a scale_dtype has no program of ONNX; leave it out: scales are float32 then")
    size, rank = _length(y), len(y.shape)
    group = quantization.group(size)
    # [..., groups, group]
    v = op.Reshape(_widened(y, _F32), _integers(*[0] * (rank - 1), size // group, group))
    number, (qmin, qmax) = partial(_constant, dtype=_F32), quantization.range
    zero = shift = multiplier = None
    if scale is not None:
        if any(isinstance(size, int) and size > 1 for size in scale.shape):
            raise UntranslatedError("a scale for each block has no program of ONNX; pass a scale of one element")
        s = op.Reshape(scale, _integers(1))
        if zero_point is not None:
            shift = _cast(op.Reshape(zero_point, _integers(1)), _I32, _F32)
    elif quantization.computes_zero_point:
        low, high = (_or_nan(v, reduced(v, _integers(-1), keepdims=1)) for reduced in (op.ReduceMin, op.ReduceMax))
        s = _scale_of(op.Sub(high, low), quantization, qmax - qmin)
        shift = op.Round(op.Sub(number(qmin), op.Div(low, s)))
        nothing = op.Or(op.Equal(s, number(0.0)), op.IsNaN(shift))
        shift = op.Where(nothing, number(0.0), _clamped(shift, number(-MOST), number(MOST)))
        zero = op.Cast(shift, to=_I32)
    else:
        amax = _or_nan(v, op.ReduceMax(op.Abs(v), _integers(-1), keepdims=1))
        floor = number(quantization.amax_floor)
        if quantization.floor_dtype == "input":
            floor = _cast(_cast(floor, _F32, y.dtype), y.dtype, _F32)
        amax = _clamped(amax, floor, number(quantization.amax_limit))
        s = _scale_of(amax, quantization, qmax)
        multiplier = op.Div(number(qmax), amax)
    if quantization.apply == "divide":
        v = op.Div(v, s)
    else:
        ratio = quantization.apply == "ratio" and multiplier is not None
        v = op.Mul(v, multiplier if ratio else _reciprocal(s, _F32))
    v = op.Where(op.Equal(s, number(0.0)), number(0.0), v)
    values = op.Reshape(_stored(v, quantization, shift), op.Shape(y))
    if quantization.returns == "multiplier" and multiplier is not None:
        s = multiplier
    computed = scale is None
    return (
        values,
        op.Squeeze(s, _integers(-1)) if computed else _constant([], _F32),
        _constant([], _I32) if zero is None else op.Squeeze(zero, _integers(-1)),
    )


# Parts of these operations. Where nothing else is said, values are of the accumulator type, which ``wide`` names.


def _normalised(
    exact: bool, h: Value, x: Value, weight: Value | None, bias: Value | None, flags: Flags
) -> tuple[Value, Value]:
    """The norm of h, [..., N], rounded to ``out_dtype`` or x's, and rstd, [...]; x gives the length of rows too."""
    wide = _accumulator(x)
    gain = _gain(weight, flags.weight_offset, wide)
    rounds = flags.round_norm and x.dtype != wide

    def mean(v: Value) -> Value:
        if exact:
            return op.Div(_treesum(v, _length(x), len(x.shape)), _constant(_length(x), wide))
        return op.ReduceMean(v, _integers(-1), keepdims=1)

    rows = h
    if flags.center:
        h = op.Sub(h, mean(h))
    rstd = _reciprocal(_root(op.Add(mean(op.Mul(h, h)), _constant(flags.eps, wide)), wide), wide)
    if exact or wide == _F64:
        y = op.Mul(h, rstd)
    else:
        ones = op.ConstantOfShape(op.Shape(h, start=-1), value=ir.tensor([1.0], dtype=wide))
        scale = ones if gain is None or rounds else gain
        if flags.center:
            y = op.LayerNormalization(rows, scale, epsilon=flags.eps)[0]
        else:
            _check_opset()
            y = op23.RMSNormalization(h, scale, epsilon=flags.eps)
    y = _rounded_between(exact, y, wide, x.dtype if rounds else None)
    if gain is not None and (rounds or exact or wide == _F64):
        y = op.Mul(y, gain)
    y = y if bias is None else op.Add(y, _widened(bias, wide))
    return _rounded(exact, y, wide, flags.out_dtype or x.dtype), op.Squeeze(rstd, _integers(-1))


def _check_opset() -> None:
    """Refuses operators of a version in which there is no RMSNormalization."""
    version = getattr(getattr(evaluator.default(), "opset", None), "version", OPSET)
    if version < OPSET:
        raise UntranslatedError(
            f"RMSNormalization is an operator of opset 23 and later, and the export is to opset {version}; pass "
            "opset_version=23 to torch.onnx.export, or exact=True to fusednorm.onnx.translations"
        )


def _treesum(v: Value, size: int, rank: int) -> Value:
    """The specification's sum of the last dimension, which keeps it: [..., 1]."""
    if size > SEGMENT:
        segments = -(-size // SEGMENT)
        v = op.Reshape(_padded(v, size, segments * SEGMENT), _integers(*[0] * (rank - 1), segments, SEGMENT))
        v, size = op.Squeeze(_halved(v, SEGMENT), _integers(-1)), segments
    return _halved(v, size)


def _halved(v: Value, size: int) -> Value:
    """Padded with +0 to a power of two, and ``v = v[:n/2] + v[n/2:]`` until one is left: [..., 1]."""
    n = 1 << (size - 1).bit_length()
    v = _padded(v, size, n)
    while n > 1:
        v, n = op.Add(*op.Split(v, axis=-1, num_outputs=2)), n // 2
    return v


def _padded(v: Value, size: int, to: int) -> Value:
    return v if size == to else op.Pad(v, _integers(0, to - size), None, _integers(-1))


def _root(v: Value, wide: Any) -> Value:
    """The correctly rounded root: a runtime's root of float64, rounded to float32, is (docs/spec.md, section 7)."""
    return _cast(op.Sqrt(_cast(v, wide, _F64)), _F64, wide)


def _reciprocal(v: Value, wide: Any) -> Value:
    """1 / v. ONNX Runtime makes one quotient of the product with ``1 / v``, which rounds once; not of ``-1 / -v``."""
    return op.Div(_constant(-1.0, wide), op.Neg(v))


def _gain(weight: Value | None, offset: float, wide: Any) -> Value | None:
    if weight is None:
        return None
    gain = _widened(weight, wide)
    return gain if offset == 0 else op.Add(gain, _constant(offset, wide))


def _product(z: Value, v: Value, wide: Any) -> Value:
    """z * sigmoid(v), by the exponential of the specification, section 10."""
    scheme, number = SCHEMES[torch.float64 if wide == _F64 else torch.float32], partial(_constant, dtype=wide)
    low = op.Less(v, number(scheme.low))
    p, first, second = _exponential(op.Where(low, v, op.Neg(v)), wide)
    at_least = _clamped(z, number(scheme.least))
    tiny = op.Add(op.Mul(op.Mul(op.Mul(at_least, p), first), second), op.Sub(z, z))
    e = op.Mul(op.Mul(p, first), second)
    return op.Div(op.Where(low, tiny, z), op.Add(number(1.0), e))


def _gelu(z: Value, wide: Any) -> Value:
    """z * Phi(z), as the specification has it."""
    normal, number = NORMALS[torch.float64 if wide == _F64 else torch.float32], partial(_constant, dtype=wide)
    a = op.Abs(z)
    square = op.Mul(a, a)
    p, first, second = _exponential(op.Mul(square, number(-0.5)), wide)
    e = op.Mul(op.Mul(p, first), second)
    above, below = (_polynomial(a, square, c, wide) for c in (normal.numerator, normal.denominator))
    tail = op.Mul(op.Mul(a, op.Div(above, below)), e)
    tail = op.Where(op.Greater(a, number(normal.reach)), number(0.0), tail)
    return op.Sub(op.Where(op.Less(z, number(0.0)), op.Sub(z, z), z), tail)


def _tanh(x: Value, wide: Any) -> Value:
    """tanh, as the specification has it."""
    scheme, number = TANGENTS[torch.float64 if wide == _F64 else torch.float32], partial(_constant, dtype=wide)
    a = op.Abs(x)
    t = op.Mul(a, a)
    low = op.Add(op.Mul(op.Mul(_polynomial(t, op.Mul(t, t), scheme.tangent, wide), t), a), a)
    p, first, second = _exponential(op.Mul(_no_more(a, number(scheme.flat)), number(2.0)), wide)
    e = op.Mul(op.Mul(p, first), second)
    high = op.Sub(number(1.0), op.Div(number(2.0), op.Add(e, number(1.0))))
    th = op.Where(op.Less(a, number(0.75)), low, high)
    # 0 is left out: a product with it, or a choice, would lose the sign of -0.
    return op.Where(op.Equal(a, number(0.0)), x, op.Mul(th, op.Sign(x)))


def _polynomial(x: Value, square: Value, coefficients: Sequence[float], wide: Any) -> Value:
    """A polynomial of x, as the reference adds it up."""
    c = [_constant(value, wide) for value in coefficients]
    pairs = [op.Add(op.Mul(x, odd), even) for even, odd in zip(c[::2], c[1::2], strict=False)]
    p = c[-1] if len(c) % 2 else pairs.pop()
    for pair in reversed(pairs):
        p = op.Add(op.Mul(p, square), pair)
    return p


def _exponential(t: Value, wide: Any) -> tuple[Value, Value, Value]:
    """Three factors of exp(t), which are multiplied from left to right."""
    scheme, number = SCHEMES[torch.float64 if wide == _F64 else torch.float32], partial(_constant, dtype=wide)
    t = _clamped(t, number(scheme.least), number(scheme.greatest))
    k = op.Sub(op.Add(op.Mul(t, number(scheme.log2_e)), number(scheme.rounder)), number(scheme.rounder))
    r = op.Sub(op.Sub(t, op.Mul(k, number(scheme.ln2_high))), op.Mul(k, number(scheme.ln2_low)))
    square = op.Mul(r, r)
    p = _polynomial(r, square, scheme.coefficients, wide)
    p = op.Add(op.Add(op.Mul(p, square), r), number(1.0))
    half = op.Floor(op.Mul(k, number(0.5)))
    least, greatest = (round(end * scheme.log2_e) // 2 for end in (scheme.least, scheme.greatest + 1))
    powers = np.exp2(np.arange(least, greatest + 1, dtype=np.float64))
    table, known = _constant(powers, wide), op.Not(op.IsNaN(k))  # of a NaN no power is taken: p is NaN

    def power(exponent: Value) -> Value:
        index = op.Where(known, op.Sub(exponent, number(least)), number(0.0))
        return op.Gather(table, op.Cast(index, to=_I64))

    return p, power(half), power(op.Sub(k, half))


def _scale_of(span: Value, quantization: Quantization, steps: float) -> Value:
    """A span of values divided into steps."""
    if quantization.scale_by == "reciprocal":
        scale = op.Mul(span, _constant(np.float32(1) / np.float32(steps), _F32))
    else:
        scale = op.Div(span, _constant(steps, _F32))
    scale = _clamped(scale, _constant(quantization.scale_floor, _F32))
    return scale if quantization.round_scale is None else _up_to_power_of_two(scale)


def _up_to_power_of_two(scale: Value) -> Value:
    """Scales rounded up to a power of two; a NaN stays."""
    powers = np.ldexp(np.float32(1), np.arange(-127, 128)).astype(np.float32)
    # The powers below a scale, but for 2^-127, which is that of 0 alone: the place of the power that it is rounded to.
    below = op.Cast(op.Less(_constant(powers[1:-1], _F32), op.Unsqueeze(scale, _integers(-1))), to=_I64)
    place = op.ReduceSum(below, _integers(-1), keepdims=0)
    place = op.Add(place, op.Cast(op.Greater(scale, _constant(0.0, _F32)), to=_I64))
    return op.Where(op.IsNaN(scale), scale, op.Gather(_constant(powers, _F32), place))


def _stored(v: Value, quantization: Quantization, shift: Value | None) -> Value:
    """The numbers stored for quotients, [..., groups, group]; ``shift``: a zero point for each group, or None."""
    number, to = partial(_constant, dtype=_F32), _of_torch(quantization.dtype)
    qmin, qmax = map(number, quantization.range)
    if quantization.dtype.is_floating_point:
        v = op.Where(op.IsNaN(v), number(np.nan), v)  # whose sign is that of no other NaN
        return op.Cast(_clamped(v, qmin, qmax), to=to)
    if shift is not None and quantization.zero_point == "after":
        v = _clamped(op.Round(v), number(-MOST), number(MOST))
        whole = op.Add(op.Cast(op.Where(op.IsNaN(v), number(0.0), v), to=_I64), op.Cast(shift, to=_I64))
        least, greatest = (_constant(end, _I64) for end in quantization.range)
        return op.Cast(op.Max(least, op.Min(greatest, whole)), to=to)
    if shift is not None:
        v = op.Add(v, shift)
    v = op.Round(_clamped(v, qmin, qmax))
    v = op.Where(op.IsNaN(v), number(0.0), v)
    if quantization.zero_point == 128:
        v = op.Add(v, number(128.0))
    return op.Cast(v, to=to)


def _clamped(v: Value, least: Value, greatest: Value | None = None) -> Value:
    """v within two numbers, or at least one; a NaN stays."""
    v = op.Where(op.Less(v, least), least, v)
    return v if greatest is None else op.Where(op.Greater(v, greatest), greatest, v)


def _or_nan(v: Value, reduced: Value) -> Value:
    """The number to which the last dimension of v was reduced, or NaN where it has one: there ONNX says nothing."""
    counted = op.ReduceMax(op.Cast(op.IsNaN(v), to=_I32), _integers(-1), keepdims=1)
    return op.Where(op.Cast(counted, to=ir.DataType.BOOL), _constant(np.nan, _F32), reduced)


def _rounded(exact: bool, v: Value, wide: Any, dtype: Any) -> Value:
    """v rounded once. ONNX does not say how float64 becomes 16 bits, and runtimes round to float32 first."""
    if exact and wide == _F64 and dtype in _SHORT:
        raise UntranslatedError(
            "exact=True has no translation of float64 rows that are rounded to 16 bits, which runtimes round twice; "
            "convert the rows to float32 in the model, or pass exact=False"
        )
    return _cast(v, wide, dtype)


def _rounded_between(exact: bool, v: Value, wide: Any, dtype: Any) -> Value:
    """v rounded to a dtype between two operations of the accumulator type; not rounded with None."""
    return v if dtype is None else _cast(_rounded(exact, v, wide, dtype), dtype, wide)


def _cast(v: Value, before: Any, after: Any) -> Value:
    return v if before == after else op.Cast(v, to=after)


def _widened(operand: Value, wide: Any) -> Value:
    """An operand in the accumulator type; results of operators have no dtype yet."""
    return _cast(operand, operand.dtype, wide)


def _constant(number: Any, dtype: Any) -> Value:
    """A number of shape [1], or the numbers of a list, rounded once to a dtype.

    It is no scalar, because onnxscript's optimizer takes a scalar within 1e-8 of 0 for 0, and within 1e-5 of 1 for 1.
    """
    with np.errstate(over="ignore"):  # to infinity where the dtype ends before
        return op.Constant(value=ir.tensor(np.atleast_1d(np.asarray(number, dtype=np.float64)).astype(dtype.numpy())))


def _integers(*numbers: int) -> Value:
    """A shape, or a list of dimensions."""
    return op.Constant(value=ir.tensor(list(numbers), dtype=_I64))


def _part(v: Value, begin: int, end: int) -> Value:
    """Elements of the last dimension."""
    return op.Slice(v, _integers(begin), _integers(end), _integers(-1))


def _length(x: Value) -> int:
    """The elements of the last dimension."""
    size = x.shape[-1]
    if not isinstance(size, int):
        raise UntranslatedError(
            f"the last dimension must have a fixed length in ONNX, got {size}; leave it out of dynamic_shapes"
        )
    return size


def _of_torch(dtype: torch.dtype) -> Any:
    return getattr(
        ir.DataType, {"int8": "INT8", "uint8": "UINT8"}.get(name := str(dtype)[6:], name.upper().replace("_", ""))
    )


def _accumulator(x: Value) -> Any:
    return _F64 if x.dtype == _F64 else _F32
