"""The operations that ``compare`` and ``bench`` measure: fusednorm's calls of each, and its formula in torch.

A call takes x and the residual, both [M, N], or x alone; if the operation has a gate, that takes the residual's place;
if it rotates heads, rows are heads of q, and k takes the residual's place. It returns the outputs, of the shape and the
dtype of x. If the operation quantizes, it returns 8-bit numbers, [M, N], their scales, and the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusednorm
from fusednorm import Quantization, quantizations


class Calls(NamedTuple):
    """fusednorm's calls of an operation."""

    new: Callable[..., Any]
    #: Also takes the tensors to write the outputs to. None if there is no such call, as for the next one.
    out: Callable[..., Any] | None
    #: None too where a call after another one would not take rows of the same kind: gates make them smaller each time.
    in_place: Callable[..., Any] | None


class Measured(NamedTuple):
    """An operation. The formula takes the inputs, the weight and eps, and rounds where fusednorm rounds."""

    #: The number of large operands: those that a call takes, and those that it returns.
    inputs: int
    outputs: int
    #: A weight, [N], which all norms of the operation share, and eps -> fusednorm's calls.
    calls: Callable[[Tensor, float], Calls]
    formula: Callable[..., Any]
    #: The intermediate results that are rounded.
    rounds: str
    #: The places among the inputs to which a call in place writes its outputs.
    written: tuple[int, ...]
    #: If the first output is quantized.
    quantization: Quantization | None = None
    #: Whether it has a weight.
    weighted: bool = True

    @property
    def returned(self) -> int:
        """The number of tensors that a call returns."""
        return self.outputs + (self.quantization is not None)

    def empty_outputs(self, x: Tensor) -> list[Tensor]:
        """Tensors for the outputs, uninitialised."""
        q = self.quantization
        if q is None:
            return [torch.empty_like(x) for _ in range(self.outputs)]
        rows, hidden_size = x.shape
        scales = x.new_empty((rows, hidden_size // q.group(hidden_size)), dtype=torch.float32)
        return [torch.empty_like(x, dtype=q.dtype), scales, *(torch.empty_like(x) for _ in range(self.outputs - 1))]

    def nbytes(self, elements: int, itemsize: int) -> int:
        """The bytes of the large operands, for an x of so many elements of this size."""
        quantized = self.quantization is not None
        return elements * (itemsize * (self.inputs + self.outputs - quantized) + quantized)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """One output or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


# The calls are written out, because one line of Python more takes a tenth of the time of a short call.


def _norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm, fusednorm.rms_norm_
    return Calls(
        lambda x: function(x, weight, eps),
        lambda x, y: function(x, weight, eps, out=y),
        lambda x: in_place(x, weight, eps),
    )


def _add_norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.fused_add_rms_norm, fusednorm.fused_add_rms_norm_
    return Calls(
        lambda x, r: function(x, r, weight, eps),
        lambda x, r, y, s: function(x, r, weight, eps, out=y, residual_out=s),
        lambda x, r: in_place(x, r, weight, eps),
    )


def _norm_add(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm_add, fusednorm.rms_norm_add_
    return Calls(
        lambda x, r: function(x, r, weight, eps),
        lambda x, r, s: function(x, r, weight, eps, residual_out=s),
        lambda x, r: in_place(x, r, weight, eps),
    )


def _norm_add_norm(weight: Tensor, eps: float) -> Calls:
    function, in_place = fusednorm.rms_norm_add_rms_norm, fusednorm.rms_norm_add_rms_norm_
    return Calls(
        lambda x, r: function(x, r, weight, weight, eps),
        lambda x, r, y, s: function(x, r, weight, weight, eps, out=y, residual_out=s),
        lambda x, r: in_place(x, r, weight, weight, eps),
    )


def _add_norm_quant(quantization: Quantization) -> Callable[[Tensor, float], Calls]:
    function = fusednorm.fused_add_rms_norm_quant
    return lambda weight, eps: Calls(
        lambda x, r: function(x, r, weight, eps, quantization=quantization),
        lambda x, r, y, z, s: function(
            x, r, weight, eps, quantization=quantization, out=y, scale_out=z, residual_out=s
        ),
        None,
    )


def _gate(weight: Tensor, eps: float) -> Calls:
    function = fusednorm.gate
    return Calls(lambda y, z: function(y, z), lambda y, z, out: function(y, z, out=out), None)


def _silu_and_mul(weight: Tensor, eps: float) -> Calls:
    function = fusednorm.silu_and_mul
    return Calls(lambda gate, up: function(gate, up), lambda gate, up, out: function(gate, up, out=out), None)


def _norm_gated(weight: Tensor, eps: float) -> Calls:
    function = fusednorm.rms_norm_gated
    return Calls(lambda x, z: function(x, z, weight, eps), None, None)


#: The length of heads; of rows that have no whole number of them, the whole row is one.
HEAD = 128


def _head_size(weight: Tensor) -> int:
    """The length of heads in rows of the weight's length."""
    return HEAD if len(weight) % HEAD == 0 else len(weight)


def _tables(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [size / 2], of one position for all rows; all dtypes have the same, numbers of bfloat16."""
    angles = 10000.0 ** -(torch.arange(size // 2, device=like.device) / (size // 2))
    return angles.cos().bfloat16().to(like.dtype), angles.sin().bfloat16().to(like.dtype)


def _qk_norm_rope(weight: Tensor, eps: float) -> Calls:
    function, in_place, size = fusednorm.qk_norm_rope, fusednorm.qk_norm_rope_, _head_size(weight)
    shape, of_head, tables = (-1, len(weight) // size, size), weight[:size], _tables(size, weight)
    others: Any = (of_head, of_head, *tables, eps)
    flags: Any = {"round_norm": True, "round_products": True}

    def new(q: Tensor, k: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs: Any = (None, None) if y is None or z is None else (y.view(shape), z.view(shape))
        found = function(q.view(shape), k.view(shape), *others, **flags, q_out=outputs[0], k_out=outputs[1])
        return found[0].view(q.shape), found[1].view(k.shape)

    return Calls(new, new, lambda q, k: in_place(q.view(shape), k.view(shape), *others, **flags))


def _formula_of_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _formula_of_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _formula_of_norm(total, weight, eps), total


def _formula_of_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _formula_of_norm(x, weight, eps) + residual


def _formula_of_norm_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _formula_of_add_norm(_formula_of_norm(x, weight, eps), residual, weight, eps)


def _formula_of_add_norm_quant(quantization: Quantization) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Of a symmetric quantization, as programs write it."""
    least, greatest = quantization.range

    def formula(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        y, total = _formula_of_add_norm(x, residual, weight, eps)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        y = y.reshape(*y.shape[:-1], -1, quantization.group(y.shape[-1]))
        scale = (y.abs().amax(-1, keepdim=True) / greatest).clamp(min=quantization.scale_floor)
        numbers = y * (1 / scale) if quantization.apply == "reciprocal" else y / scale
        if not quantization.dtype.is_floating_point:
            numbers = numbers.round()
        return numbers.clamp(least, greatest).to(quantization.dtype).flatten(-2), scale.squeeze(-1), total

    return formula


def _formula_of_gate(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * torch.nn.functional.silu(z.to(wide))).to(y.dtype)


def _formula_of_silu_and_mul(gate: Tensor, up: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _formula_of_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _formula_of_gate(_formula_of_norm(x, weight, eps), z, weight, eps)


def _formula_of_qk_norm_rope(q: Tensor, k: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As Hugging Face's Qwen 3 has it."""
    size = _head_size(weight)
    shape = (-1, len(weight) // size, size)
    cos, sin = (torch.cat((t, t)) for t in _tables(size, weight))

    def turned(x: Tensor) -> Tensor:
        heads = x.view(shape)
        wide = heads.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = weight[:size] * normed.to(x.dtype)
        a, b = y.chunk(2, -1)
        found: Tensor = y * cos + torch.cat((-b, a), -1) * sin
        return found.view(x.shape)

    return turned(q), turned(k)


def _quantized(quantization: Quantization) -> Measured:
    formula = _formula_of_add_norm_quant(quantization)
    return Measured(2, 2, _add_norm_quant(quantization), formula, "sum, norm", (), quantization)


#: By the name that ``--ops`` takes.
OPERATIONS = {
    "add_norm": Measured(2, 2, _add_norm, _formula_of_add_norm, "sum", (0, 1)),
    "norm": Measured(1, 1, _norm, _formula_of_norm, "nothing", (0,)),
    "norm_add": Measured(2, 1, _norm_add, _formula_of_norm_add, "first norm", (1,)),
    "norm_add_norm": Measured(2, 2, _norm_add_norm, _formula_of_norm_add_norm, "first norm, sum", (0, 1)),
    "add_norm_int8": _quantized(quantizations.VLLM_INT8_TOKEN_CPU),
    "add_norm_fp8": _quantized(quantizations.VLLM_FP8_TOKEN),
    "add_norm_fp8_block": _quantized(quantizations.VLLM_FP8_BLOCK_FUSED),
    "gate": Measured(2, 1, _gate, _formula_of_gate, "nothing", (), weighted=False),
    "silu_and_mul": Measured(2, 1, _silu_and_mul, _formula_of_silu_and_mul, "silu", (), weighted=False),
    "norm_gated": Measured(2, 1, _norm_gated, _formula_of_norm_gated, "normed rows", ()),
    "qk_norm_rope": Measured(2, 2, _qk_norm_rope, _formula_of_qk_norm_rope, "norm, products", (0, 1)),
}

#: The gradients of which operation, and the number of large operands that are read and written at least.
GRADIENTS = {
    "backward": ("add_norm", 4),
    "norm_add_norm_backward": ("norm_add_norm", 6),
    "silu_and_mul_backward": ("silu_and_mul", 5),
    "norm_gated_backward": ("norm_gated", 5),
    "qk_norm_rope_backward": ("qk_norm_rope", 6),
}

#: Everything that ``bench`` times.
OPS = (*OPERATIONS, *GRADIENTS)
