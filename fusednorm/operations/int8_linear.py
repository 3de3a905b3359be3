"""Products of rows and a matrix of int8, which have no order (docs/spec.md, section 16)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.checks import requires_grad
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.int8_checks import check_int8_linear
from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.operations.front_door import Operation
from fusednorm.reference import int8_products

#: As C takes a call without an output, of the operator too.
_TAKEN = "q scale weight weight_scale bias zero_point out_dtype"

_INT8_LINEAR = Operation(
    Declaration(
        "int8_linear",
        operands=(
            Operand("q", dtype=torch.int8),
            Operand("scale", Role.SCALES, dtype=torch.float32),
            Operand("weight", Role.MATRIX, dtype=torch.int8),
            Operand("weight_scale", Role.COLUMNS, dtype=torch.float32),
            Operand("bias", Role.COLUMNS, optional=True),
            Operand("zero_point", Role.SCALES, optional=True, dtype=torch.int32),
        ),
        results=(Result(role=Role.PRODUCTS, dtype="out_dtype", like="scale"),),
        flags={"out_dtype": None},
        formula=int8_products.int8_linear,
        checks=check_int8_linear,
        samples=({"out_dtype": torch.bfloat16}, {}),
        refused=(({"out_dtype": torch.float64}, TypeError, "out_dtype must be float16, bfloat16 or float32"),),
    ),
    fast=Entry("int8_linear", _TAKEN).open(),
)
_on_fast_path = _INT8_LINEAR.open(Entry("int8_linear", f"{_TAKEN} out"))


@_INT8_LINEAR.public
def int8_linear(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    zero_point: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``((q - zero_point) * scale) @ (weight * weight_scale[:, None]).T + bias``, by products of int8.

    Sums of whole numbers have no order, so each is exact, whatever computes it: the same bits on every device, in any
    batch. They are then converted to float32, multiplied by ``weight_scale`` and by ``scale``, and the bias is added;
    each of these is rounded once.

    There are no gradients: rounding to int8 has none.

    Args:
        q: [..., K], int8, any strides, as :func:`fusednorm.quantize` returns rows. K is 1 to 131,071.
        scale: [..., 1], float32, of each row, as it returns them.
        weight: [N, K], int8.
        weight_scale: [N] or [N, 1], float32, of each row of the weight, as ``quantize`` returns it.
        bias: [N], float16, bfloat16 or float32; None: nothing is added.
        zero_point: [..., 1], int32, of each row: what the numbers of a row lie above; None: 0.
        out_dtype: float16, bfloat16 or float32, which is the default.
        out: [..., N] to write to, of one of these dtypes. It shares no memory with an operand.

    Returns:
        [..., N]; ``out`` if given.

    Raises:
        RuntimeError: an operand requires grad, while gradients are recorded.
        TypeError: an operand is no tensor, or of another dtype.
        ValueError: shapes, devices or memory do not fit.
    """
    if not is_dynamo_compiling():
        found: Tensor | None = _on_fast_path(q, scale, weight, weight_scale, bias, zero_point, out_dtype, out)
        if found is not None:
            return found
    if torch.is_grad_enabled() and requires_grad(scale, weight_scale, bias):
        raise RuntimeError(
            "int8_linear(): one of the arguments requires grad, and products of int8 have no gradients; wrap the call "
            "in torch.no_grad(), or train with fusednorm.linear"
        )
    if isinstance(weight_scale, Tensor) and not weight_scale.is_nested and weight_scale.shape[1:] == (1,):
        weight_scale = weight_scale[:, 0]
    operands = {"q": q, "scale": scale, "weight": weight, "weight_scale": weight_scale, "bias": bias}
    return _INT8_LINEAR("int8_linear", **operands, zero_point=zero_point, out_dtype=out_dtype, out=out)
