"""Rotation of heads by position, alone and after a norm of each head: compositions (docs/spec.md, section 8)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.checks import refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.rotation_checks import check_rotation, rows_for
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.engine import run_heads as engine
from fusednorm.operations.composition import Composition
from fusednorm.operations.norm import rms_norm
from fusednorm.torch_ops.steps import ROTATE


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, round_products: bool, dtype: torch.dtype) -> Tensor:
    """Heads by rows of tables, one for each row of heads."""
    products = x.dtype if round_products else None
    found: Tensor = ROTATE.with_gradients(
        x=x, cos=cos, sin=sin, interleaved=interleaved, rounded_to=products, dtype=dtype
    )
    return found


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, round_products: bool
) -> tuple[Tensor]:
    tables = rows_for(cos, positions, x), rows_for(sin, positions, x)
    return (_turned(x, *tables, interleaved, round_products, x.dtype),)


def _normalised_and_rotated(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    eps: float,
    norm: bool,
    interleaved: bool,
    round_products: bool,
    between: torch.dtype | None,
    weight_offset: float,
    round_norm: bool,
) -> tuple[Tensor, Tensor]:
    # Rows of the tables are the same for q and k.
    tables = None if cos is None or sin is None else (rows_for(cos, positions, q), rows_for(sin, positions, q))
    passed = None if tables is None else between

    def of(x: Tensor, weight: Tensor | None) -> Tensor:
        y = x
        if norm:
            y = rms_norm(x, weight, eps, weight_offset=weight_offset, round_norm=round_norm, out_dtype=passed)
        return y if tables is None else _turned(y, *tables, interleaved, round_products, x.dtype)

    return of(q, q_weight), of(k, k_weight)


_TABLES = (
    Operand("cos", Role.TABLE),
    Operand("sin", Role.TABLE),
    Operand("positions", Role.POSITIONS, optional=True, listed=False),
)
_KERNEL = Kernel("rotate", "rotate", run=engine.forward)

_ROTATE = Composition(
    Declaration(
        "rotate",
        operands=(Operand("x"), *_TABLES),
        results=(Result(may_be=None),),
        flags={"interleaved": False, "round_products": False},
        formula=_rotated,
        checks=check_rotation,
        kernel=_KERNEL,
    ),
    "rotate",
)
_rotate_on_fast_path = _ROTATE.open(
    Entry("rotation", "q cos sin positions interleaved round_products q_out", returned=0),
    "x cos sin positions interleaved round_products out",
)

_QK_NORM_ROPE = Composition(
    Declaration(
        "qk_norm_rope",
        operands=(
            Operand("q"),
            Operand("k", Role.HEADS),
            Operand("q_weight", Role.WEIGHT, optional=True),
            Operand("k_weight", Role.WEIGHT, optional=True),
            *[one._replace(optional=True) for one in _TABLES],
        ),
        results=(
            Result("q_out", overwrites="q", may_be=None, of=("q", "q_weight")),
            Result("k_out", Role.HEADS, like="k", overwrites="k", may_be=None, of=("k", "k_weight")),
            Result("q_rstd", Role.NUMBERS, kept=True),
            Result("k_rstd", Role.NUMBERS, like="k", kept=True),
        ),
        flags={
            "eps": 1e-6,
            "norm": True,
            "interleaved": False,
            "round_products": False,
            "between": None,
            "weight_offset": 0.0,
            "round_norm": False,
        },
        formula=_normalised_and_rotated,
        checks=check_rotation,
        kernel=_KERNEL,
    ),
    "norm, rotate",
    engine.has_gradients,
    engine.backward,
)
qk_norm_rope_on_fast_path = _QK_NORM_ROPE.open(
    Entry(
        "rotation",
        "q k q_weight k_weight cos sin eps norm positions interleaved round_products between weight_offset round_norm "
        "q_out k_out",
    )
)


@_ROTATE.public
def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates pairs of numbers of each head by angles, as rotary position embedding does: docs/spec.md, section 8.

    A pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``. The K angles of a row of heads rotate the first 2K
    numbers of each head; the others stay as they are.

    Args:
        x: [..., H, D], rows of H heads, float16, bfloat16, float32 or float64, any strides.
        cos: [..., K], any of these dtypes: a row for each row of heads, or a shape that expands to that; with
            ``positions`` [P, K]. 2K is at most D. It has no gradient.
        sin: as cos.
        positions: int32 or int64, [...], which row of the tables each row of heads takes. On a GPU its values are not
            looked at.
        interleaved: pairs lie side by side; else the second numbers of all pairs follow the first ones, as halves.
        round_products: round each product to x's dtype before two are added.
        out: [..., H, D] of x's dtype to write to. May be x itself.

    Returns:
        The rotated heads, in x's dtype; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of another dtype.
        ValueError: shapes, devices, positions or memory do not fit.
        RuntimeError: ``out`` is given and x requires grad, or a table requires grad.
    """
    if not is_dynamo_compiling():
        result: Tensor | None = _rotate_on_fast_path(x, cos, sin, positions, interleaved, round_products, out)
        if result is not None:
            return result
    return _ROTATE(
        "rotate", x=x, cos=cos, sin=sin, positions=positions, interleaved=interleaved, round_products=round_products,
        out=out,
    )  # fmt: skip


@_QK_NORM_ROPE.public
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: bool = True,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises each head of q and k and rotates it, as Qwen3, Gemma 3 and others do before attention.

    The same bits as ``rotate(rms_norm(q, q_weight, eps), cos, sin)``, and the same for k: docs/spec.md, section 8.
    q and k may be views into one tensor that also holds v.

    Args:
        q: [..., Hq, D], rows of heads, float16, bfloat16, float32 or float64, any strides.
        k: [..., Hk, D]; q's rows, of another number of heads or the same.
        q_weight: [D] or [Hq, D]; None multiplies by nothing.
        k_weight: [D] or [Hk, D]; None multiplies by nothing.
        cos: see :func:`rotate`; None with ``sin``: no rotation.
        sin: see :func:`rotate`.
        eps: added to the mean of squares, unitless.
        norm: whether heads are normalised; without a norm, weights are None.
        positions: see :func:`rotate`, as for the next two.
        interleaved: pairs lie side by side.
        round_products: round products to the dtype of what is rotated.
        between: the dtype to which normalised heads are rounded before they are rotated: q's and k's own if None, or
            ``torch.float32``, which leaves heads of 16 bits unrounded.
        weight_offset: see :func:`fusednorm.rms_norm`, as for ``round_norm``.
        round_norm: round what is normalised to its dtype before it meets the weight.
        q_out: [..., Hq, D] of q's dtype to write to. May be q itself.
        k_out: [..., Hk, D] of k's dtype to write to. May be k itself.

    Returns:
        q and k, in their dtypes; ``q_out`` and ``k_out`` if given.

    Raises:
        TypeError, ValueError, BackendError: see :func:`rotate` and :func:`fusednorm.rms_norm`.
        RuntimeError: an output is given and an operand requires grad, or a table requires grad.
    """
    if k is None:
        refuse_type("k", k)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = qk_norm_rope_on_fast_path(
            q, k, q_weight, k_weight, cos, sin, eps, norm, positions, interleaved, round_products, between,
            weight_offset, round_norm, q_out, k_out,
        )  # fmt: skip
        if result is not None:
            return result
    return _QK_NORM_ROPE(
        "qk_norm_rope", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, positions=positions,
        eps=eps, norm=norm, interleaved=interleaved, round_products=round_products, between=between,
        weight_offset=weight_offset, round_norm=round_norm, q_out=q_out, k_out=k_out,
    )  # fmt: skip


@_QK_NORM_ROPE.public
def qk_norm_rope_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: bool = True,
    positions: Tensor | None = None,
    interleaved: bool = False,
    round_products: bool = False,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`qk_norm_rope` in place: the results land in ``q`` and ``k``.

    With its arguments, but outputs. q and k share no memory.

    Returns:
        ``q`` and ``k``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`qk_norm_rope`.
    """
    if k is None:
        refuse_type("k", k)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = qk_norm_rope_on_fast_path(
            q, k, q_weight, k_weight, cos, sin, eps, norm, positions, interleaved, round_products, between,
            weight_offset, round_norm, q, k,
        )  # fmt: skip
        if result is not None:
            return result
    return _QK_NORM_ROPE(
        "qk_norm_rope_", q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, positions=positions,
        eps=eps, norm=norm, interleaved=interleaved, round_products=round_products, between=between,
        weight_offset=weight_offset, round_norm=round_norm,
    )  # fmt: skip
