"""Makes a backend's call by the specification's formulas, in torch's operations: what every kernel must write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls.call import AnyCall, Backward, Call, Flags, Forward, Quantize, accumulator
from fusednorm.declare import plan as plans
from fusednorm.engine.requested import with_request
from fusednorm.reference import activations, quantizer
from fusednorm.reference import norm as reference
from fusednorm.reference.rotation import rotated


def has(call: AnyCall) -> bool:
    """Whether :func:`run` has a call: not those of parts of rows, nor sums over the rows of a sample."""
    return not isinstance(call, Call) or not (call.sums or any(call.part) or call.name == "sums")


def run(call: AnyCall) -> None:
    """Writes the results of a call that :func:`has` tells of."""
    with with_request("reference"):  # formulas of compositions are made of other operations
        _OF_TYPES[type(call)](call)


def kept_of(call: AnyCall) -> dict[str, Tensor]:
    """The tensors that the forward pass of a call for gradients keeps, by name."""
    if isinstance(call, Backward):
        h = call.h.to(call.rstd.dtype)
        return {"rstd": reference.rstd_of(reference.centered(h) if call.operation.center else h, 1e-6)}
    if not isinstance(call, Call) or not call.backward:
        return {}
    if call.name == "norm_gated":
        return {"rstd": _rstd_of_gated(call, {**call.flags, "eps": 1e-6})}
    plan = plans.OF_CALLS[call.name]
    declaration = plan.declaration
    if not declaration.kept:
        return {}
    flags = {**declaration.defaults, **dict(call.flags)}
    found = declaration.formula(**{name: call.tensors[name] for name in plan.operands}, **flags)
    return {one.name: t for one, t in zip(declaration.results, found, strict=True) if one.kept}


def _gradients_of_norm(call: Backward) -> None:
    weight, needs_bias = call.weight, call.dbias is not None
    if not needs_bias and (weight is None or weight.dim() == 1):
        reference.backward(call)
        return
    of_rows = call.dx is not None or call.dresidual is not None
    n = reference.normalised(call.h, call.rstd, call.operation.center)
    bias = None if call.dbias is None else torch.zeros_like(call.dbias)
    needs = (of_rows, call.dweight is not None, needs_bias)
    dn, dweight, dbias = reference.affine_gradients(call.dy, n, weight, bias, call.weight_offset, needs)
    for output, gradient in ((call.dweight, dweight), (call.dbias, dbias)):
        if output is not None and gradient is not None:
            output.copy_(gradient)
    if dn is not None:
        alone = call._replace(dy=dn, weight=None, dweight=None, dbias=None, weight_offset=0.0)
        reference.backward(alone)


def _quantized(call: Quantize) -> None:
    y: Any = call.y
    if call.norm is not None:
        norm = call.norm
        if norm.out is None:
            norm = norm._replace(out=norm.x.new_empty(norm.x.shape, dtype=call.dtype))
        reference.forward(norm)
        y = norm.out
    given = (call.scale, call.zero_point) if call.quantization.per == "tensor" else (None, None)
    numbers, *others = quantizer.quantized(y, call.quantization, *given)
    call.out.copy_(numbers)
    for output, found in zip((call.scale, call.zero_point), others, strict=False):
        if output is not None:
            output.copy_(found.reshape(output.shape))


def _gate(call: Call) -> None:
    flags = {name: value for name, value in call.flags.items() if name != "interleaved"}
    tensors = call.tensors
    if not call.backward:
        out: Any = tensors["out"]
        out.copy_(activations.gated(tensors.get("y"), call.z, **flags, out_dtype=out.dtype))
        return
    outputs = tensors["dy"], tensors["dz"]
    needs = [one is not None for one in outputs]
    found = activations.gate_gradients(call.d, tensors["y"], call.z, **flags, needs=needs)
    for output, gradient in zip(outputs, found, strict=True):
        if output is not None and gradient is not None:
            output.copy_(gradient)


def _rstd_of_gated(call: Call, flags: Mapping[str, Any]) -> Tensor:
    wide = accumulator(call.x.dtype)
    if flags["norm_before_gate"]:
        return reference.rstd_of(call.x.to(wide), flags["eps"])
    return reference.rstd_of(activations.gated(call.x, call.gate, flags["activation"], None, wide), flags["eps"])


def _norm_gated(call: Call) -> None:
    tensors, flags = call.tensors, call.flags
    if call.backward:
        _gradients_of_gated(call)
        return
    rstd = tensors["rstd"]
    found_rstd = _rstd_of_gated(call, flags)
    formula = plans.OF_CALLS[call.name].declaration.formula
    (found,) = formula(x=call.x, gate=call.gate, weight=tensors["weight"], group_size=None, **flags)
    call.out.copy_(found)
    if rstd is not None:
        rstd.copy_(found_rstd)


def _gradients_of_gated(call: Call) -> None:
    tensors, flags = call.tensors, call.flags
    x, z, d, rstd, weight = call.x, call.gate, call.d_out, call.rstd, tensors["weight"]
    norm_first, activation, offset = flags["norm_before_gate"], flags["activation"], flags["weight_offset"]
    rows = x if norm_first else activations.gated(x, z, activation, None, rstd.dtype)
    n, dz = reference.normalised(rows, rstd, False), None
    if norm_first:
        rounded_to = x.dtype if flags["round_norm"] else None
        y = reference.affine(n, weight, None, offset, rounded_to, flags["between"] or x.dtype)
        d, dz = activations.gate_gradients(d, y, z, activation, None)
    of_weight = tensors["dweight"] is not None
    dn, dweight, _ = reference.affine_gradients(cast(Tensor, d), n, weight, None, offset, (True, of_weight, False))
    given = (cast(Tensor, dn), None, rows, rstd, None, 0.0, rows.dtype, None, (True, False, False))
    dx = reference.gradients(*given)[0]
    if not norm_first:
        dx, dz = activations.gate_gradients(cast(Tensor, dx), x, z, activation, None)
    for name, found in (("dx", dx), ("dgate", dz), ("dweight", dweight)):
        output = tensors[name]
        if output is not None and found is not None:
            output.copy_(found)


def _rotated(call: Call) -> None:
    flags, tensors = call.flags, call.tensors
    tables = [tensors[name] for name in ("cos", "sin", "positions")]
    for name in "qk":
        x, out, weight, rstd = (tensors[name + of] for of in ("", "_out", "_weight", "_rstd"))
        if x is None or out is None or not x.numel():
            continue
        y = x
        if flags["norm"]:
            of_norm = Flags(flags["eps"], flags["weight_offset"], True, flags["round_norm"])
            dtype = out.dtype if tables[0] is None else flags["between"]
            y, _, found_rstd = reference.outputs_of(x, None, weight, None, of_norm, dtype, None)
            if rstd is not None:
                rstd.copy_(found_rstd)
        if tables[0] is not None:
            cos, sin = (_rows_of(table, tables[2], x) for table in tables[:2])
            y = rotated(y, cos, sin, flags["interleaved"], flags["products"], out.dtype)
        out.copy_(y)


def _rows_of(table: Any, positions: Tensor | None, x: Tensor) -> Tensor:
    """The row of a table for each row of heads."""
    rows: Tensor = table if positions is None else table[positions.long()]
    return rows.expand(*x.shape[:-2], rows.shape[-1])


def _declared(call: Call) -> None:
    own = {"gate": _gate, "norm_gated": _norm_gated, "rotate": _rotated}.get(call.name)
    if own is not None:
        own(call)
        return
    plan = plans.OF_CALLS[call.name]
    declaration, tensors = plan.declaration, call.tensors
    if call.backward:
        given = {name: tensors.get(name) for name in declaration.backward_tensors}
        given |= {flag: call.flags[flag] for flag in plan.gradient_flags}
        needs = [tensors.get(f"d{name}") is not None for name in plan.with_gradient]
        gradient: Any = declaration.gradient
        pairs = zip((f"d{name}" for name in plan.with_gradient), gradient(**given, needs=needs), strict=True)
    else:
        flags = {**declaration.defaults, **dict(call.flags)}
        for result in declaration.results:
            written = tensors.get(result.name)
            if result.dtype is not None and written is not None:
                flags[result.dtype] = written.dtype
        found = declaration.formula(**{name: tensors[name] for name in plan.operands}, **flags)
        pairs = zip((result.name for result in declaration.results), found, strict=True)
    for name, value in pairs:
        output = tensors.get(name)
        if output is not None and value is not None:
            output.copy_(value)


_OF_TYPES: dict[type, Callable[[Any], None]] = {
    Forward: reference.forward,
    Backward: _gradients_of_norm,
    Quantize: _quantized,
    Call: _declared,
}
