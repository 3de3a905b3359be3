"""A norm before the addition, with another norm after it or none: compositions (docs/spec.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.call import Before, Flags, accumulator
from fusednorm.calls.checks import check_between, check_flags, check_operands, refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.scalars import number
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.declare.plan import Plan
from fusednorm.engine import run_norms
from fusednorm.operations.composition import Composition
from fusednorm.operations.front_door import Asked
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.torch_ops import steps


def _before_and_after(operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Before, Flags]:
    """The first norm, and the flags of the second one, or of the addition."""
    followed = "next_weight" in operands
    after = flags["next_eps"] if followed and flags["next_eps"] is not None else flags["eps"]
    asked = Flags(
        after,
        flags["weight_offset"],
        flags.get("round_sum", True),
        flags["round_norm"],
        flags.get("out_dtype"),
        flags["residual_dtype"],
    )
    return Before(operands["weight"], flags["eps"], flags["between"], followed), asked


def _run(
    plan: Plan, operands: Mapping[str, Any], flags: Mapping[str, Any], outputs: Mapping[str, Tensor], keep: bool
) -> tuple[Tensor, ...]:
    """Two norms by one call of a backend, or by operations that it takes."""
    before, asked = _before_and_after(operands, flags)
    y, total = run_norms.norm_of_checked(
        operands["x"],
        operands["residual"],
        operands.get("next_weight"),
        asked,
        outputs.get("out"),
        outputs.get("residual_out"),
        before=before,
    )
    return (y, total) if before.followed else (total,)


def _normed(x: Tensor, weight: Tensor | None, flags: Mapping[str, Any]) -> Tensor:
    numbers = {name: flags[name] for name in ("eps", "weight_offset", "round_norm")}
    return rms_norm(x, weight, **numbers, out_dtype=flags["between"])


def _added(x: Tensor, residual: Tensor, weight: Tensor | None, **flags: Any) -> tuple[Tensor]:
    dtype = flags["residual_dtype"] or residual.dtype
    return (steps.ADD.with_gradients(x=_normed(x, weight, flags), residual=residual, dtype=dtype),)


def _normed_again(
    x: Tensor, residual: Tensor, weight: Tensor | None, next_weight: Tensor | None, **flags: Any
) -> tuple[Tensor, Tensor]:
    eps = flags["eps"] if flags["next_eps"] is None else flags["next_eps"]
    return fused_add_rms_norm(
        _normed(x, weight, flags),
        residual,
        next_weight,
        eps,
        weight_offset=flags["weight_offset"],
        round_sum=flags["round_sum"],
        round_norm=flags["round_norm"],
        out_dtype=flags["out_dtype"] or x.dtype,
        residual_dtype=flags["residual_dtype"],
    )


class _TwoNorms(Composition):
    """Outputs may be x or the residual, and kernels write in them."""

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded; the dtype of the rows is that of the memory given for them."""
        operands, flags, in_memory = asked.operands, asked.flags, asked.in_memory
        x, residual, weight, next_weight = map(cast(Any, operands.get), ("x", "residual", "weight", "next_weight"))
        out, residual_out = map(asked.outputs.get, ("out", "residual_out"))
        check_operands(x, residual, next_weight, out, residual_out, in_memory=in_memory, weight_name="next_weight")
        check_operands(x, None, weight, None, None, in_memory=in_memory)
        check_between(flags["between"], x)
        if flags.get("next_eps") is not None:
            number("next_eps", flags["next_eps"], torch.float64)  # its name here; it is rounded with the other flags
        found = check_flags(_before_and_after(operands, flags)[1], x, residual, out, residual_out)
        if asked.outputs and in_memory:
            weights = {"weight": weight, "next_weight": next_weight}
            run_norms.check_memory_given(x, residual, out, residual_out, weights)
        flags = {
            **flags,
            "eps": number("eps", flags["eps"], accumulator(x.dtype)),
            "weight_offset": found.weight_offset,
        }
        if "next_eps" in flags:
            flags |= {"next_eps": found.eps, "out_dtype": flags["out_dtype"] if out is None else out.dtype}
        return flags


_OPERANDS = (Operand("x"), Operand("residual"), Operand("weight", Role.WEIGHT, optional=True))
_SUM = Result("residual_out", dtype="residual_dtype", like="residual", overwrites="residual")
_FLAGS = {"eps": 1e-6, "between": None, "weight_offset": 0.0, "round_norm": False, "residual_dtype": None}
_KERNEL = Kernel("norm_before_add", "norm_before_add", run=_run)

_NORM_ADD = _TwoNorms(
    Declaration(
        "rms_norm_add",
        operands=_OPERANDS,
        results=(_SUM,),
        flags=_FLAGS,
        formula=_added,
        kernel=_KERNEL,
    ),
    "norm, add",
)
rms_norm_add_on_fast_path = _NORM_ADD.open(
    Entry(
        "two_norms",
        "x residual weight eps between weight_offset round_norm residual_out residual_dtype",
        returned=1,
        constants={"next_norm": False},
    )
)
_NORM_ADD_NORM = _TwoNorms(
    Declaration(
        "rms_norm_add_rms_norm",
        operands=(*_OPERANDS, Operand("next_weight", Role.WEIGHT, optional=True)),
        results=(Result(dtype="out_dtype", overwrites="x"), _SUM._replace(of=("x", "residual", "weight"))),
        flags={**_FLAGS, "next_eps": float, "round_sum": True, "out_dtype": None},
        formula=_normed_again,
        kernel=_KERNEL,
    ),
    "norm, add, norm",
)
rms_norm_add_rms_norm_on_fast_path = _NORM_ADD_NORM.open(
    Entry(
        "two_norms",
        "x residual weight next_weight eps next_eps between weight_offset round_sum round_norm "
        "out residual_out out_dtype residual_dtype",
    )
)


@_NORM_ADD_NORM.public
def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    next_eps: float | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises x, adds the residual, and RMS-normalises the sum, as Gemma 2, Gemma 3 and GLM-4 do.

    The same bits as ``fused_add_rms_norm(rms_norm(x, weight, eps), residual, next_weight, next_eps)``: docs/spec.md,
    section 8.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N], of the norm before the addition; None multiplies by nothing.
        next_weight: [N], of the norm after it; None multiplies by nothing.
        eps: of the norm before the addition: added to the mean of squares, unitless.
        next_eps: of the norm after it; None: ``eps``.
        between: the dtype to which the first norm's rows are rounded before the addition: x's if None, or
            ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: added to both weights; see :func:`fusednorm.fused_add_rms_norm`, also for the rest.
        round_sum: normalise the sum as rounded to the residual's dtype.
        round_norm: round what each norm normalises to the dtype of its input before it meets the weight.
        out: [..., N] to write the normalised sum to. May be x or residual itself.
        residual_out: [..., N] to write the sum to. May be x or residual itself.
        out_dtype: the dtype of the normalised sum; x's if None.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        The normalised sum and the sum, each in its dtype, or ``out`` and ``residual_out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``out`` or ``residual_out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = rms_norm_add_rms_norm_on_fast_path(
            x, residual, weight, next_weight, eps, next_eps, between, weight_offset, round_sum, round_norm, out,
            residual_out, out_dtype, residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    return _NORM_ADD_NORM(
        "rms_norm_add_rms_norm", x=x, residual=residual, weight=weight, next_weight=next_weight, eps=eps,
        next_eps=next_eps, between=between, weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm,
        out=out, residual_out=residual_out, out_dtype=out_dtype, residual_dtype=residual_dtype,
    )  # fmt: skip


@_NORM_ADD_NORM.public
def rms_norm_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    next_eps: float | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_add_rms_norm` in place: the normalised sum lands in ``x``, the sum in ``residual``.

    With its arguments, but outputs; rows lie as for :func:`fusednorm.fused_add_rms_norm_`.

    Returns:
        ``x`` and ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_add_rms_norm`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: tuple[Tensor, Tensor] | None = rms_norm_add_rms_norm_on_fast_path(
            x, residual, weight, next_weight, eps, next_eps, between, weight_offset, round_sum, round_norm, x, residual
        )
        if result is not None:
            return result
    return _NORM_ADD_NORM(
        "rms_norm_add_rms_norm_", x=x, residual=residual, weight=weight, next_weight=next_weight, eps=eps,
        next_eps=next_eps, between=between, weight_offset=weight_offset, round_sum=round_sum, round_norm=round_norm,
    )  # fmt: skip


@_NORM_ADD.public
def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS-normalises x and adds the residual, as OLMo 2 does: the same bits as ``rms_norm(x, weight, eps) + residual``.

    docs/spec.md, section 8.

    Args:
        x: [..., N], float16, bfloat16, float32 or float64, any strides.
        residual: [..., N], x's shape, any of these dtypes (float64 only if x is float64, here and below).
        weight: [N]; None multiplies by nothing.
        eps: added to the mean of squares, unitless.
        between: the dtype to which the normalised rows are rounded before the addition: x's if None, or
            ``torch.float32``, which leaves rows of a 16-bit x unrounded.
        weight_offset: see :func:`fusednorm.rms_norm`, as for ``round_norm``.
        round_norm: see :func:`fusednorm.rms_norm`.
        residual_out: [..., N] to write the sum to. May be x or residual itself.
        residual_dtype: the dtype that the sum is rounded to; the residual's if None.

    Returns:
        The sum, in the residual's dtype or ``residual_dtype``; ``residual_out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit; ``between`` is another dtype.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``residual_out`` is given and an operand requires grad.
        BackendError: the requested backends cannot take the call.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_add_on_fast_path(
            x, residual, weight, eps, between, weight_offset, round_norm, residual_out, residual_dtype
        )
        if result is not None:
            return result
    return _NORM_ADD(
        "rms_norm_add", x=x, residual=residual, weight=weight, eps=eps, between=between, weight_offset=weight_offset,
        round_norm=round_norm, residual_out=residual_out, residual_dtype=residual_dtype,
    )  # fmt: skip


@_NORM_ADD.public
def rms_norm_add_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
) -> Tensor:
    """:func:`rms_norm_add` in place: the sum lands in ``residual``; x is left as it is.

    With its arguments, but outputs. Each row of the residual is contiguous, and its rows lie in at most two levels of
    strides.

    Returns:
        ``residual``.

    Raises:
        RuntimeError: an operand requires grad.
        TypeError, ValueError, BackendError: see :func:`rms_norm_add`.
    """
    if residual is None:
        refuse_type("residual", residual)
    if not is_dynamo_compiling():
        result: Tensor | None = rms_norm_add_on_fast_path(
            x, residual, weight, eps, between, weight_offset, round_norm, residual
        )
        if result is not None:
            return result
    return _NORM_ADD(
        "rms_norm_add_", x=x, residual=residual, weight=weight, eps=eps, between=between,
        weight_offset=weight_offset, round_norm=round_norm,
    )  # fmt: skip
