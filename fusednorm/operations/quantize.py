"""Quantization, alone and after a norm or a gate: compositions (docs/spec.md, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from fusednorm import quantizations as presets
from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags
from fusednorm.calls.checks import (
    check_affine,
    check_apart,
    check_between,
    check_given,
    check_operands,
    check_output,
    check_quantization,
    refuse_grad,
    refuse_type,
    requires_grad,
)
from fusednorm.calls.fast_path import AND_MUL, Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.calls.quantization import Quantization, computed_by, groups_of, is_given, scales_of
from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.engine import run_quantizers as engine
from fusednorm.engine.run import as_new
from fusednorm.operations.composition import Composition
from fusednorm.operations.front_door import Asked
from fusednorm.operations.functions import relu2
from fusednorm.operations.gate import SILU_STEPS, STEPS, checked_products, products_of
from fusednorm.operations.layer_norm import fused_add_layer_norm, layer_norm
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.reference import norm as reference
from fusednorm.reference import quantizer
from fusednorm.torch_ops import dtensor_bridge

_quantize = Entry("quantizer", "x packed scale zero_point out scale_out zero_point_out").open()
_and_mul = Entry("gate", f"x z between {STEPS}", constants={"order": AND_MUL, "activation": "silu"}).open()
#: Of each norm. The last arguments may be left out.
_norm_quant = Entry(
    "quantizer",
    "x weight eps packed scale zero_point between weight_offset round_norm out scale_out zero_point_out normed_out "
    "residual round_sum residual_out residual_dtype bias center",
    constants={"normalises": True},
).open()


def _may_be_fast(quantization: Quantization, scale_out: Tensor | None) -> bool:
    """Whether the fast path may know such a call."""
    if is_dynamo_compiling() or type(quantization) is not Quantization:
        return False
    return quantization.scale_dtype is None and (quantization.layout == "row" or scale_out is not None)


#: The operands of every quantizer; no list of operations passes them.
_GIVEN = tuple(Operand(name, Role.WHICH, optional=True, listed=False) for name in ("scale", "zero_point"))
#: The operands that outputs may be. Scales of groups of one element are not among them: they are written before the
#: numbers, which are then read again.
_OWN = {"normed_out": ("x", "residual"), "residual_out": ("x", "residual")}


class Quantizer(Composition):
    """Rows, or those that other operations make of operands, as numbers of 8 bits with their scales.

    The quantization says how many results there are: numbers, scales that are computed or the one given, and perhaps
    zero points; behind them is the sum, if there is one. Nothing of that has gradients. Here rows are given.

    Args:
        name: the public function's.
        steps: the operations before.
        operands: the operands, but those of all quantizers.
        sample: the quantization of calls that tests make, and other flags.
        flags: the flags, but the quantization.
        outputs: the names of outputs, but numbers, scales and zero points.
    """

    differentiable = False

    def __init__(
        self,
        name: str,
        steps: str,
        operands: Sequence[Operand],
        sample: Mapping[str, Any],
        flags: Mapping[str, Any] = MappingProxyType({}),
        outputs: Sequence[str] = (),
    ) -> None:
        sums = [Result("residual_out", dtype="residual_dtype", like="residual")] if "residual_out" in outputs else []
        declaration = Declaration(
            name,
            operands=(*operands, *_GIVEN),
            results=(Result(), Result("scale_out", Role.NUMBERS), *sums),
            flags={"quantization": None, **flags},
            formula=lambda **arguments: (),
            kernel=None,
            samples=(sample,),
        )
        super().__init__(declaration, steps)
        self._inputs = [operand.name for operand in operands]
        self._returned = tuple([(output, "") for output in ("out", "scale_out", "zero_point_out", *outputs)])

    # Of each family.

    def check_rows(self, asked: Asked) -> tuple[Tensor, Mapping[str, Any]]:
        """Rows of the shape and dtype of those that are quantized; and the flags, numbers rounded."""
        y, name = asked.operands[self._inputs[0]], self._inputs[0]
        check_operands(y, None, None, None, None, in_memory=asked.in_memory, x_name=name)
        return y, asked.flags

    def norm(self, flags: Mapping[str, Any]) -> Flags | None:
        """The flags of a norm that a backend may compute in the same call."""
        return None

    def rows(self, asked: Asked) -> tuple[Tensor, ...]:
        """The rows that are quantized, and the sum, if there is one."""
        return (asked.operands[self._inputs[0]],)

    # Of all.

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded; all is checked that must fit before anything is written."""
        operands, outputs, name, x_name = asked.operands, asked.outputs, self.declaration.name, self._inputs[0]
        x, flags = self.check_rows(asked)
        if is_grad_enabled() and requires_grad(*[operands[one] for one in self._inputs]):
            raise RuntimeError(
                f"{name}(): one of the arguments requires grad, and 8-bit numbers have no gradients; call it under "
                f"torch.no_grad(), pass tensors without gradients, such as {x_name}.detach(), or train without the "
                "quantization"
            )
        if is_grad_enabled() and requires_grad(*outputs.values()):
            refuse_grad(name)
        quantization, scale, zero_point = flags["quantization"], operands["scale"], operands["zero_point"]
        check_quantization(quantization, x)
        check_given(quantization, scale, zero_point, x, x_name, asked.in_memory)
        if outputs:
            self._check_memory_given(x, operands, quantization, outputs)
            # Where a weight has a tangent, the others lie in memory all the same.
            if asked.in_memory or must_be_seen.in_memory(x, scale, zero_point, *outputs.values()):
                check_apart(outputs, operands, _OWN)
        return flags

    def _check_memory_given(
        self, x: Tensor, operands: Mapping[str, Any], quantization: Quantization, given: Mapping[str, Any]
    ) -> None:
        x_name, rows, scales, groups = self._inputs[0], list(x.shape), [1], [1]
        if not is_given(quantization):
            scales, groups = scales_of(quantization, x.shape), groups_of(quantization, x.shape)
        wanted = {"out": (rows, quantization.dtype), "scale_out": (scales, quantization.scale_dtype or torch.float32)}
        wanted |= {"zero_point_out": (groups, torch.int32), "normed_out": (rows, x.dtype)}
        for name, (shape, dtype) in wanted.items():
            check_output(name, given.get(name), shape, dtype, x, x_name)
        if is_given(quantization) and ("scale_out" in given or "zero_point_out" in given):
            raise TypeError(
                "scale_out or zero_point_out is given, and scale is too; leave out what would be a copy of it"
            )
        if "zero_point_out" in given and not quantization.computes_zero_point:
            raise TypeError(f"zero_point_out is given, and {quantization} computes no zero points; leave it out")

    def compute(self, asked: Asked) -> tuple[Tensor, ...]:
        """The results, in one call of a backend that has one."""
        norm, flags, found = self.norm(asked.flags), asked.flags, None
        if norm is not None and (flags["between"] is None or "normed_out" not in asked.outputs):
            rows = asked.operands["x"]
            found = engine.quantized(rows, flags["quantization"], asked.operands, asked.outputs, norm)
        return self._by_steps(asked) if found is None else found

    def into(self, asked: Asked) -> tuple[Tensor, ...]:
        """The results, where a listener must see how they are made."""
        tensors = (*asked.operands.values(), *asked.outputs.values())
        if "normed_out" in asked.outputs or not must_be_seen.in_one_operator(*tensors):
            return self._by_steps(asked)
        given = {**asked.operands, **asked.flags, "quantization": str(asked.flags["quantization"])}
        return self._written(asked, dtensor_bridge.in_one_operator(self.declaration.name, given))

    def results(self, found: Sequence[Tensor], given: Mapping[str, Tensor]) -> Any:
        """They are in the memory that the caller gave already."""
        return tuple(found)

    def _by_steps(self, asked: Asked) -> tuple[Tensor, ...]:
        """The results of the operations before, and then of the quantizer."""
        y, *others = self.rows(asked)
        operands, outputs, quantization = asked.operands, asked.outputs, asked.flags["quantization"]
        scale, zero_point = operands["scale"], operands["zero_point"]
        if "normed_out" in outputs:
            dtensor_bridge.written(outputs["normed_out"], reference.rounded(y, outputs["normed_out"].dtype))
        outputs = {name: outputs[name] for name in ("out", "scale_out", "zero_point_out") if name in outputs}
        found: Sequence[Tensor] | None = None
        if asked.in_memory and _may_be_fast(quantization, outputs.get("scale_out")):
            memory = map(outputs.get, ("out", "scale_out", "zero_point_out"))
            found = _quantize(y, quantization.packed, scale, zero_point, *memory)
        if asked.in_memory and found is None:
            found = engine.quantized(y, quantization, operands, outputs)
        if found is not None:
            return (*found, *others)
        if asked.listener is Listener.DISPATCHER:
            quantize_rows = dtensor_bridge.operations(y, scale, zero_point).quantize
            numbers, *of_groups = quantize_rows(y, str(quantization), scale, zero_point)
            found = numbers, *of_groups[: len(computed_by(quantization))]
        else:
            found = as_new(quantizer.quantized(y, quantization, scale, zero_point), (y,))
        return (*self._written(asked, found, laid_out=False), *others)

    def _written(self, asked: Asked, found: Sequence[Tensor], laid_out: bool = True) -> tuple[Tensor, ...]:
        """The results, in the caller's memory where that is given.

        Args:
            asked: the call.
            found: numbers, scales and zero points that are computed, and perhaps the sum.
            laid_out: whether scales and zero points lie as the quantization's layout asks for.
        """
        (numbers, *others), outputs, quantization = found, asked.outputs, asked.flags["quantization"]
        results = [dtensor_bridge.written(outputs.get("out"), numbers)]
        if is_given(quantization):
            results.append(asked.operands["scale"])
        names = [*("scale_out", "zero_point_out")[: len(computed_by(quantization))], "residual_out"]
        for name, new in zip(names, others, strict=False):
            new = new if laid_out or name in outputs else _laid_out(new, quantization)
            results.append(dtensor_bridge.written(outputs.get(name), new))
        return tuple(results)


class _OfNorm(Quantizer):
    """Quantizes the rows of a norm."""

    def __init__(
        self, name: str, norm: Callable[..., Any], sample: Mapping[str, Any], *, added: bool, center: bool
    ) -> None:
        self._norm, self._center = norm, center
        flags = {"eps": 1e-5 if center else 1e-6, "between": None, "weight_offset": 0.0, "round_norm": False}
        operands = [Operand("x"), *[Operand("residual")] * added, Operand("weight", Role.WEIGHT, optional=True)]
        operands += [Operand("bias", Role.WEIGHT, optional=True, listed=False)] * center
        outputs = ["normed_out", *["residual_out"] * added]
        if added:
            flags |= {"round_sum": True, "residual_dtype": None}
        super().__init__(name, "add, norm, quantize" if added else "norm, quantize", operands, sample, flags, outputs)

    def check_rows(self, asked: Asked) -> tuple[Tensor, Mapping[str, Any]]:
        """See :class:`Quantizer`."""
        x, residual, weight, bias = map(cast(Any, asked.operands.get), ("x", "residual", "weight", "bias"))
        of_all, total = None if self._center else weight, asked.outputs.get("residual_out")
        check_operands(x, residual, of_all, None, total, in_memory=asked.in_memory)
        if self._center:
            check_affine(x, weight, bias, in_memory=asked.in_memory)
        check_between(asked.flags["between"], x)
        return x, asked.flags

    def norm(self, flags: Mapping[str, Any]) -> Flags:
        """See :class:`Quantizer`."""
        sums = flags.get("round_sum", True), flags["round_norm"], flags["between"], flags.get("residual_dtype")
        return Flags(flags["eps"], flags["weight_offset"], *sums, center=self._center)

    def rows(self, asked: Asked) -> tuple[Tensor, ...]:
        """See :class:`Quantizer`."""
        flags, taken = asked.flags, {name: asked.operands[name] for name in self._inputs}
        taken |= {name: flags[name] for name in ("eps", "weight_offset", "round_norm")} | {
            "out_dtype": flags["between"]
        }
        if "residual" not in taken:
            return (self._norm(**taken),)
        taken |= {name: flags[name] for name in ("round_sum", "residual_dtype")}
        found: tuple[Tensor, ...] = self._norm(**taken, residual_out=asked.outputs.get("residual_out"))
        return found


class _OfSilu(Quantizer):
    """Quantizes the products of a gate."""

    def check_rows(self, asked: Asked) -> tuple[Tensor, Mapping[str, Any]]:
        """See :class:`Quantizer`."""
        flags, named = checked_products(asked.operands, asked.flags)
        z, y = named.values()
        check_operands(z, y, None, None, None, in_memory=asked.in_memory, x_name="gate", residual_name="up")
        return z, flags

    def rows(self, asked: Asked) -> tuple[Tensor, ...]:
        """See :class:`Quantizer`."""
        return (products_of(asked.operands, asked.flags, asked.in_memory),)


class _OfRelu2(Quantizer):
    """Quantizes the squares of positive numbers."""

    def check_rows(self, asked: Asked) -> tuple[Tensor, Mapping[str, Any]]:
        """See :class:`Quantizer`."""
        z, flags = super().check_rows(asked)
        check_between(flags["between"], z, "z")
        return z, flags

    def rows(self, asked: Asked) -> tuple[Tensor, ...]:
        """See :class:`Quantizer`."""
        return (relu2(asked.operands["z"], out_dtype=asked.flags["between"]),)


_FP8, _BLOCKS = {"quantization": presets.VLLM_FP8_TOKEN}, {"quantization": presets.VLLM_FP8_BLOCK_FUSED}
_INT8, _BIAS = {"quantization": presets.VLLM_INT8_TOKEN_CPU}, {"bias": Role.WEIGHT}
_QUANTIZE = Quantizer("quantize", "quantize", [Operand("y")], {"quantization": presets.VLLM_INT8_TOKEN_AZP_CPU})
_NORM = _OfNorm("rms_norm_quant", rms_norm, _BLOCKS, added=False, center=False)
_ADD_NORM = _OfNorm("fused_add_rms_norm_quant", fused_add_rms_norm, _INT8, added=True, center=False)
_LAYER_NORM = _OfNorm("layer_norm_quant", layer_norm, _BLOCKS | _BIAS, added=False, center=True)
_ADD_LAYER_NORM = _OfNorm("fused_add_layer_norm_quant", fused_add_layer_norm, _INT8 | _BIAS, added=True, center=True)
_SILU = _OfSilu(
    "silu_and_mul_quant",
    "gate, quantize",
    [Operand("gate"), Operand("up", optional=True)],
    _FP8,
    {"between": None, **SILU_STEPS},
)
_RELU2 = _OfRelu2("relu2_quant", "gate, quantize", [Operand("z")], _FP8, {"between": None})


@_QUANTIZE.public
def quantize(
    y: Tensor,
    quantization: Quantization,
    *,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantizes rows to 8 bits: docs/spec.md, section 9.

    Args:
        y: [..., N], float16, bfloat16, float32 or float64, any strides. float64 is rounded to float32 first.
        quantization: how; :mod:`fusednorm.quantizations` has presets. Its groups must divide N.
        scale: float32, greater than 0, for ``per="tensor"``; else None. One element; or one for each block of y, as
            [rows, 1] for rows, [1, N] for columns, [rows, N / 128] or [rows / 128, N / 128]: as many dimensions as y
            has, and each size divides y's. On a GPU its value is not looked at, because that would wait for the GPU.
        zero_point: int32, one element, between -2^30 and 2^30, for ``per="tensor"`` with ``zero_point`` "after" or
            "before"; else None. Its value too is not looked at on a GPU.
        out: [..., N] of the quantization's dtype, to write the numbers to.
        scale_out: float32 or the quantization's ``scale_dtype``, to write the scales to; shaped as they are. On a CPU
            torch 2.13 does not compile programs that write to memory of float8_e8m0fnu.
        zero_point_out: int32, to write the zero points to; shaped as they are.

    Returns:
        The numbers, [..., N], and their scales: float32 [..., 1] for rows, [..., N / group] for groups, and ``scale``
        itself for ``per="tensor"``. If zero points are computed, a third tensor has them: int32, shaped as the scales.
        With ``scale_dtype`` scales have that dtype; of int32 each number has the scales of four groups, and there are
        [..., N / group / 4, rounded up].

    Raises:
        TypeError: an operand is no tensor, has another dtype, or is missing.
        ValueError: shapes, devices, groups, memory or the value of ``scale`` do not fit.
        RuntimeError: y requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _quantize(
            y, quantization.packed, scale, zero_point, out, scale_out, zero_point_out
        )
        if result is not None:
            return result
    return _QUANTIZE(
        "quantize", y=y, quantization=quantization, scale=scale, zero_point=zero_point, out=out, scale_out=scale_out,
        zero_point_out=zero_point_out,
    )  # fmt: skip


@_NORM.public
def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """RMS-normalises rows and quantizes them: the same bits as ``quantize(rms_norm(x, weight, eps), quantization)``.

    The arguments are those of :func:`fusednorm.rms_norm` and of :func:`quantize`, and two more. ``between``: the dtype
    to which the normalised rows are rounded before they are quantized: x's if None, or ``torch.float32``, which leaves
    rows of a 16-bit x unrounded. ``normed_out``, [..., N] of x's dtype, receives the normalised rows too, rounded to
    that dtype.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out,
        )  # fmt: skip
        if result is not None:
            return result
    return _NORM(
        "rms_norm_quant", x=x, weight=weight, eps=eps, quantization=quantization, scale=scale, zero_point=zero_point,
        between=between, weight_offset=weight_offset, round_norm=round_norm, out=out, scale_out=scale_out,
        zero_point_out=zero_point_out, normed_out=normed_out,
    )  # fmt: skip


@_ADD_NORM.public
def fused_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Adds the residual, RMS-normalises the sum and quantizes it.

    The same bits as ``y, total = fused_add_rms_norm(x, residual, weight, eps)``, then ``quantize(y, quantization)``.

    The arguments are those of :func:`fusednorm.fused_add_rms_norm` and of :func:`rms_norm_quant`.

    Returns:
        What :func:`quantize` returns, and the sum.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.fused_add_rms_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if residual is None:
        refuse_type("residual", residual)
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, residual, round_sum, residual_out, residual_dtype,
        )  # fmt: skip
        if result is not None:
            return result
    return _ADD_NORM(
        "fused_add_rms_norm_quant", x=x, residual=residual, weight=weight, eps=eps, quantization=quantization,
        scale=scale, zero_point=zero_point, between=between, weight_offset=weight_offset, round_sum=round_sum,
        round_norm=round_norm, out=out, scale_out=scale_out, zero_point_out=zero_point_out, normed_out=normed_out,
        residual_out=residual_out, residual_dtype=residual_dtype,
    )  # fmt: skip


@_LAYER_NORM.public
def layer_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Layer-normalises and quantizes: the same bits as ``quantize(layer_norm(x, weight, bias, eps), quantization)``.

    The arguments are those of :func:`fusednorm.layer_norm` and of :func:`rms_norm_quant`.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.layer_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, None, True, None, None, bias, True,
        )  # fmt: skip
        if result is not None:
            return result
    return _LAYER_NORM(
        "layer_norm_quant", x=x, weight=weight, bias=bias, eps=eps, quantization=quantization, scale=scale,
        zero_point=zero_point, between=between, weight_offset=weight_offset, round_norm=round_norm, out=out,
        scale_out=scale_out, zero_point_out=zero_point_out, normed_out=normed_out,
    )  # fmt: skip


@_ADD_LAYER_NORM.public
def fused_add_layer_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    round_norm: bool = False,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    normed_out: Tensor | None = None,
    residual_out: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Adds the residual, layer-normalises the sum and quantizes it.

    The same bits as ``y, total = fused_add_layer_norm(x, residual, weight, bias, eps)``, then ``quantize(y, ...)``.

    The arguments are those of :func:`fusednorm.fused_add_layer_norm` and of :func:`rms_norm_quant`.

    Returns:
        What :func:`quantize` returns, and the sum.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.fused_add_layer_norm`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    if residual is None:
        refuse_type("residual", residual)
    if _may_be_fast(quantization, scale_out):
        result: tuple[Tensor, ...] | None = _norm_quant(
            x, weight, eps, quantization.packed, scale, zero_point, between, weight_offset, round_norm, out,
            scale_out, zero_point_out, normed_out, residual, round_sum, residual_out, residual_dtype, bias, True,
        )  # fmt: skip
        if result is not None:
            return result
    return _ADD_LAYER_NORM(
        "fused_add_layer_norm_quant", x=x, residual=residual, weight=weight, bias=bias, eps=eps,
        quantization=quantization, scale=scale, zero_point=zero_point, between=between, weight_offset=weight_offset,
        round_sum=round_sum, round_norm=round_norm, out=out, scale_out=scale_out, zero_point_out=zero_point_out,
        normed_out=normed_out, residual_out=residual_out, residual_dtype=residual_dtype,
    )  # fmt: skip


@_SILU.public
def silu_and_mul_quant(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    interleaved: bool = False,
    round_steps: bool = False,
) -> tuple[Tensor, ...]:
    """``silu(gate) * up``, quantized: the same bits as ``quantize(silu_and_mul(gate, up), quantization)``.

    The arguments are those of :func:`fusednorm.silu_and_mul` and of :func:`quantize`. ``between`` is also the dtype to
    which the product is rounded before it is quantized: ``torch.float32`` leaves both of a 16-bit gate unrounded.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.silu_and_mul`.
        RuntimeError: an operand requires grad while gradients are recorded: what is quantized has none.
    """
    new = between is None and out is None and scale_out is None and zero_point_out is None
    rows: Tensor | None = None
    if new and _may_be_fast(quantization, None):
        rows = _and_mul(gate, up, None, limit, alpha, up_offset, clamp, interleaved, round_steps)
        result: tuple[Tensor, ...] | None = None
        if rows is not None:
            result = _quantize(rows, quantization.packed, scale, zero_point)
        if result is not None:
            return result
    return _SILU(
        "silu_and_mul_quant", gate=gate, up=up, quantization=quantization, scale=scale, zero_point=zero_point,
        between=between, out=out, scale_out=scale_out, zero_point_out=zero_point_out, limit=limit, alpha=alpha,
        up_offset=up_offset, clamp=clamp, interleaved=interleaved, round_steps=round_steps,
    )  # fmt: skip


@_RELU2.public
def relu2_quant(
    z: Tensor,
    *,
    quantization: Quantization,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    between: torch.dtype | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    zero_point_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``relu2(z)``, quantized: the same bits as ``quantize(relu2(z, out_dtype=between), quantization)``.

    The arguments are those of :func:`fusednorm.relu2` and of :func:`quantize`. ``between``: ``torch.float32`` leaves a
    16-bit function's values unrounded before they are quantized.

    Returns:
        See :func:`quantize`.

    Raises:
        TypeError, ValueError, BackendError: see :func:`quantize` and :func:`fusednorm.relu2`.
        RuntimeError: z requires grad while gradients are recorded: what is quantized has none.
    """
    return _RELU2(
        "relu2_quant", z=z, quantization=quantization, scale=scale, zero_point=zero_point, between=between, out=out,
        scale_out=scale_out, zero_point_out=zero_point_out,
    )  # fmt: skip


def _laid_out(of_groups: Tensor, quantization: Quantization) -> Tensor:
    """Scales or zero points, [..., groups], where the layout asks for them.

    A transform of ``torch.func`` lays its batches out itself.
    """
    if quantization.layout == "row" or (not is_dynamo_compiling() and must_be_seen.transform(of_groups)):
        return of_groups

    def formula(found: Tensor) -> tuple[Tensor]:
        return (engine.laid_out(found.shape, found.dtype, found, quantization).copy_(found),)

    return cast(Tensor, dtensor_bridge.on_rows(formula, (of_groups,))[0])
