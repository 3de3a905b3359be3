"""The operations that ``compare`` and ``bench`` measure: fusednorm's calls of each, and its formula in torch.

A call takes x and the residual, both [M, N], or x alone; if the operation has a gate, that takes the residual's place;
if it rotates heads, rows are heads of q, and k takes the residual's place. It returns the outputs, of the shape and the
dtype of x. If the operation quantizes, it returns 8-bit numbers, [M, N], their scales, and the sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm import Quantization, quantizations
from fusednorm.calls.declared import Role
from fusednorm.operations.declared import PUBLIC
from fusednorm.operations.listed import Listed, every, head_size


class Calls(NamedTuple):
    """fusednorm's calls of an operation."""

    new: Callable[..., Any]
    #: Also takes the tensors to write the outputs to. None if there is no such call, as for the next one.
    out: Callable[..., Any] | None
    #: None too where a call after another one would not take rows of the same kind: gates make them smaller each time.
    in_place: Callable[..., Any] | None


class Measured(NamedTuple):
    """An operation. The formula takes the inputs, the weight and eps, and rounds where fusednorm rounds."""

    listed: Listed
    #: None: no peer has it.
    formula: Callable[..., Any] | None
    #: The intermediate results that are rounded.
    rounds: str = "nothing"
    flags: Mapping[str, Any] = {}
    #: Whether a call in place may follow another one.
    repeats: bool = True

    @property
    def inputs(self) -> dict[str, Role]:
        """The operands that a call takes; it knows the others, such as a weight, which all norms share."""
        return {name: role for name, role in self.listed.operands.items() if role not in _CONSTANT}

    @property
    def rows(self) -> int:
        """The number of large results."""
        return sum(result.role is Role.ROWS for result in self.listed.results)

    @property
    def quantization(self) -> Quantization | None:
        """If the first output is quantized."""
        return self.flags.get("quantization")

    @property
    def weighted(self) -> bool:
        """Whether it has a weight."""
        return Role.WEIGHT in self.listed.operands.values()

    @property
    def written(self) -> tuple[int, ...]:
        """The places among the inputs to which a call in place writes its outputs."""
        if self.listed.in_place is None or not self.repeats:
            return ()
        return tuple([*self.inputs].index(str(result.overwrites)) for result in self.listed.results)

    def nbytes(self, rows: int, hidden_size: int, itemsize: int) -> int:
        """The bytes of the operands that a call takes and of those that it returns, without numbers of a row."""
        large = sum(role in (Role.ROWS, Role.SAMPLES) for role in self.inputs.values()) + self.rows
        quantized = self.quantization is not None
        return rows * hidden_size * (itemsize * (large - quantized) + quantized)

    def calls(self, weight: Tensor, eps: float) -> Calls:
        """fusednorm's calls with a weight, [N].

        Each is compiled from its text, as if it were written out, because one line of Python more takes a tenth of the
        time of a short call.
        """
        size = head_size(len(weight))
        heads = Role.TABLE in self.listed.operands.values()
        tables = iter(_tables(size, weight))
        known: dict[str, Any] = {"eps": eps, "shape": (-1, len(weight) // size, size), **self.flags}
        for name, role in self.listed.operands.items():
            if role in _CONSTANT:
                known[name] = next(tables) if role is Role.TABLE else weight[:size] if heads else weight

        def call(function: Callable[..., Any], outputs: tuple[str, ...] = ()) -> Any:
            takes = (*self.inputs, *outputs)
            of_heads = takes if heads else ()
            called = f"function({', '.join(_arguments(function, takes, of_heads, known))})"
            if heads and len(self.listed.results) == 1:
                called += f".view({takes[0]}.shape)"
            elif heads:
                called = f"[y.view({takes[0]}.shape) for y in {called}]"
            return eval(f"lambda {', '.join(takes)}: {called}", {**known, "function": function})

        outputs = tuple(result.name for result in self.listed.results)
        function, in_place = self.listed.function, self.listed.in_place
        return Calls(
            call(function),
            call(function, outputs) if {*outputs} <= self.listed.parameters.keys() else None,
            call(in_place) if in_place is not None and self.repeats else None,
        )


#: The roles of operands that all calls have in common.
_CONSTANT = (Role.WEIGHT, Role.TABLE)


def _arguments(
    function: Callable[..., Any], takes: tuple[str, ...], of_heads: tuple[str, ...], known: Mapping[str, Any]
) -> Iterator[str]:
    """The text of each argument, by position as long as none is left out."""
    by_position = True
    for name, parameter in inspect.signature(function).parameters.items():
        by_position &= parameter.kind is not parameter.KEYWORD_ONLY and name in {*takes, *known}
        if name in takes or name in known:
            text = f"{name}.view(shape)" if name in of_heads else name
            yield text if by_position else f"{name}={text}"


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """One output or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _tables(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [size / 2], of one position for all rows; all dtypes have the same, numbers of bfloat16."""
    angles = 10000.0 ** -(torch.arange(size // 2, device=like.device) / (size // 2))
    return angles.cos().bfloat16().to(like.dtype), angles.sin().bfloat16().to(like.dtype)


def _formula_of_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _formula_of_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _formula_of_norm(total, weight, eps), total


def _formula_of_layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, None, eps)


def _formula_of_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _formula_of_layer_norm(total, weight, eps), total


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


def _formula_of_qk_norm_rope(q: Tensor, k: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As Hugging Face's Qwen 3 has it."""
    size = head_size(len(weight))
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


def _formula_of_declared(function: Callable[..., Any]) -> Callable[..., Any] | None:
    if function not in PUBLIC:
        return None
    declaration = PUBLIC[function].declaration

    def formula(*given: Any) -> tuple[Tensor, ...]:
        *inputs, weight, eps = given
        taken = iter(inputs)
        operands = [weight if operand.role is Role.WEIGHT else next(taken) for operand in declaration.operands]
        flags = {**declaration.defaults, **declaration.samples[0]}
        flags |= {"eps": eps} if "eps" in flags else {}
        return declaration.formula(*operands, *flags.values())[: len(declaration.returned)]

    return formula


def _named(function: str, *more: Any, **others: Any) -> Measured:
    return Measured(every()[function], *more, **others)


def _quantized(quantization: Quantization) -> Measured:
    formula = _formula_of_add_norm_quant(quantization)
    return _named("fused_add_rms_norm_quant", formula, "sum, norm", {"quantization": quantization})


#: By the name that ``--ops`` takes. Operations that are not here have the names of their functions.
OPERATIONS = {
    "add_norm": _named("fused_add_rms_norm", _formula_of_add_norm, "sum"),
    "norm": _named("rms_norm", _formula_of_norm),
    "layer_norm": _named("layer_norm", _formula_of_layer_norm),
    "add_layer_norm": _named("fused_add_layer_norm", _formula_of_add_layer_norm, "sum"),
    "norm_add": _named("rms_norm_add", lambda x, r, *rest: _formula_of_norm(x, *rest) + r, "first norm"),
    "norm_add_norm": _named(
        "rms_norm_add_rms_norm",
        lambda x, r, *rest: _formula_of_add_norm(_formula_of_norm(x, *rest), r, *rest),
        "first norm, sum",
    ),
    "add_norm_int8": _quantized(quantizations.VLLM_INT8_TOKEN_CPU),
    "add_norm_fp8": _quantized(quantizations.VLLM_FP8_TOKEN),
    "add_norm_fp8_block": _quantized(quantizations.VLLM_FP8_BLOCK_FUSED),
    "gate": _named("gate", _formula_of_gate, repeats=False),
    "silu_and_mul": _named("silu_and_mul", lambda gate, up, *_: torch.nn.functional.silu(gate) * up, "silu"),
    "norm_gated": _named(
        "rms_norm_gated",
        lambda x, z, *rest: _formula_of_gate(_formula_of_norm(x, *rest), z, *rest),
        "normed rows",
        repeats=False,
    ),
    "qk_norm_rope": _named(
        "qk_norm_rope",
        _formula_of_qk_norm_rope,
        "norm, products",
        {"round_norm": True, "round_products": True},
    ),
}

#: The gradients of which operation, and the number of large operands that are read and written at least.
GRADIENTS = {
    "backward": ("add_norm", 4),
    "norm_add_norm_backward": ("norm_add_norm", 6),
    "silu_and_mul_backward": ("silu_and_mul", 5),
    "norm_gated_backward": ("norm_gated", 5),
    "qk_norm_rope_backward": ("qk_norm_rope", 6),
}


def every_measured() -> dict[str, Measured]:
    """All that ``bench`` times forward."""
    named = {measured.listed.name for measured in OPERATIONS.values()}
    others = {name: listed for name, listed in every().items() if name not in named}
    return OPERATIONS | {
        name: Measured(listed, _formula_of_declared(listed.function), flags=listed.needed)
        for name, listed in others.items()
    }
