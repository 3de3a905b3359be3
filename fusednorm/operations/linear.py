"""Products of rows and a matrix, in one order everywhere (docs/spec.md, section 13)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.operations.front_door import Operation
from fusednorm.reference import products

_LINEAR = Operation(
    Declaration(
        "linear",
        operands=(
            Operand("x"),
            Operand("weight", Role.MATRIX),
            Operand("bias", Role.COLUMNS, optional=True),
        ),
        results=(Result(role=Role.PRODUCTS, dtype="out_dtype"),),
        flags={"out_dtype": None},
        formula=products.linear,
        gradient=products.linear_gradients,
        exact_gradients=False,
        tangent=products.linear_tangent,
    ),
)


@_LINEAR.public
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``, with sums in one order, whatever the number of rows.

    A row has the same bits alone, among others, and on every backend. Products are added up in float32 (float64 for a
    float64 ``x``) in 16 sums, whose order ``docs/spec.md`` states.

    The gradients are torch's products, ``d @ weight`` and ``d.T @ x``, and the sum of ``d``. The specification says
    nothing of their bits.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64, any strides; K is at least 1.
        weight: [N, K], any of these dtypes, float64 only if x is float64.
        bias: [N], as ``weight``; None: nothing is added.
        out_dtype: the dtype of the result; x's if None. With gradients, unlike ``out``.
        out: [..., N] to write to, of the result's dtype. It shares no memory with an operand.

    Returns:
        [..., N] in x's dtype or ``out_dtype``; ``out`` if given.

    Raises:
        RuntimeError: ``out`` is given and an operand requires grad.
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit.
    """
    return _LINEAR("linear", x=x, weight=weight, bias=bias, out_dtype=out_dtype, out=out)
