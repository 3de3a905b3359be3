"""The operations that ``compare`` and ``bench`` measure: fusednorm's calls of each, and a torch user's.

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
from fusednorm.declare.declaration import WHOLE, WITH_ROWS, Role
from fusednorm.operations.gate import gate
from fusednorm.operations.listed import Listed, every, head_size
from fusednorm.operations.norm_gated import rms_norm_gated


class Calls(NamedTuple):
    """fusednorm's calls of an operation."""

    new: Callable[..., Any]
    #: Also takes the tensors to write the outputs to. None if there is no such call, as for the next one.
    out: Callable[..., Any] | None
    #: None too where a call after another one would not take rows of the same kind: gates make them smaller each time.
    in_place: Callable[..., Any] | None


class Measured(NamedTuple):
    """An operation."""

    listed: Listed
    #: The intermediate results that fusednorm rounds.
    rounds: str = "nothing"
    flags: Mapping[str, Any] = {}

    @property
    def repeats(self) -> bool:
        """Whether a call in place may follow another one."""
        return self.listed.function not in (gate, rms_norm_gated)

    @property
    def inputs(self) -> dict[str, Role]:
        """The operands that a call takes; it knows the others, such as a weight, and has no settings of rows."""
        return {name: role for name, role in self.listed.operands.items() if role not in (*_CONSTANT, Role.SETTINGS)}

    @property
    def rows(self) -> int:
        """The number of large results."""
        return sum(result.role in WITH_ROWS for result in self.listed.results)

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
        large = sum(role is Role.ROWS for role in self.inputs.values()) + self.rows
        quantized = self.quantization is not None
        of_matrix = hidden_size**2 * itemsize * (Role.MATRIX in self.listed.operands.values())
        return rows * hidden_size * (itemsize * (large - quantized) + quantized) + of_matrix

    def calls(self, weight: Tensor, eps: float) -> Calls:
        """fusednorm's calls with a weight, [N].

        Each is compiled from its text, as if it were written out, because one line of Python more takes a tenth of the
        time of a short call.
        """
        heads = Role.TABLE in self.listed.operands.values()
        known = self._known(weight, eps)

        def call(function: Callable[..., Any], outputs: tuple[str, ...] = ()) -> Any:
            takes = (*self.inputs, *outputs)
            of_heads = takes if heads else ()
            called = f"function({', '.join(_arguments(function, takes, of_heads, known))})"
            if heads and len(self.listed.results) == 1:
                called += f".view({takes[0]}.shape)"
            elif heads:
                called = f"[y.view({takes[0]}.shape) for y in {called}]"
            return _compiled(takes, called, {**known, "function": function})

        outputs = tuple(result.name for result in self.listed.results)
        function, in_place = self.listed.function, self.listed.in_place
        return Calls(
            call(function),
            call(function, outputs) if {*outputs} <= self.listed.parameters.keys() else None,
            call(in_place) if in_place is not None and self.repeats else None,
        )

    @property
    def text(self) -> str | None:
        """The text of :data:`IN_TORCH`; None: torch has no such operation."""
        return IN_TORCH.get(self.listed.name)

    def in_torch(self, weight: Tensor, eps: float) -> Callable[..., Any]:
        """The call that a user of torch writes, of :attr:`text`, with a weight, [N]."""
        assert self.text is not None
        size = head_size(len(weight))
        known = {"torch": torch, "F": torch.nn.functional, **self._known(weight, eps)}
        known["rotated"] = _rotated(*_tables(size, weight))
        if self.quantization is not None:
            known["quantized"] = _quantized(self.quantization)
        return _compiled(tuple(self.inputs), self.text, known)

    def _known(self, weight: Tensor, eps: float) -> dict[str, Any]:
        """The names of a call that are no inputs: weights, tables, flags, and the shape of heads."""
        size = head_size(len(weight))
        heads = Role.TABLE in self.listed.operands.values()
        tables = iter(_tables(size, weight))
        known: dict[str, Any] = {"eps": eps, "shape": (-1, len(weight) // size, size), **self.flags}
        for name, role in self.listed.operands.items():
            if role in _CONSTANT:
                known[name] = weight[:size] if heads else weight
                if role is Role.TABLE:
                    known[name] = next(tables)
                elif role is Role.MATRIX:
                    known[name] = _matrix(weight)
        return known


#: The roles of operands that all calls have in common.
_CONSTANT = (*WHOLE, Role.TABLE)


def _matrix(like: Tensor) -> Tensor:
    """A matrix with as many rows as a row has elements; all dtypes and devices have the same numbers."""
    at = torch.arange(len(like), device=like.device)
    return (((at.unsqueeze(-1) * 7 + at * 13) % 61 - 30) / 32).to(like.dtype)


def _compiled(takes: tuple[str, ...], text: str, known: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of these names, as if its text were written out."""
    found: Callable[..., Any] = eval(f"lambda {', '.join(takes)}: ({text})", {"__name__": __name__, **known})
    return found


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


#: The text that a user of torch writes in place of each function, by its name: an expression of the operands, of the
#: flags, and of the names of :meth:`Measured.in_torch`.
IN_TORCH = {
    "rms_norm": "F.rms_norm(x, weight.shape, weight, eps)",
    "fused_add_rms_norm": "F.rms_norm(h := x + residual, weight.shape, weight, eps), h",
    "rms_norm_add": "F.rms_norm(x, weight.shape, weight, eps) + residual",
    "rms_norm_add_rms_norm": "F.rms_norm("
    "h := F.rms_norm(x, weight.shape, weight, eps) + residual, weight.shape, next_weight, eps), h",
    "l2_norm": "F.normalize(x, dim=-1)",  # has another eps, which rows of ordinary numbers do not show
    "layer_norm": "F.layer_norm(x, weight.shape, weight, None, eps)",
    "fused_add_layer_norm": "F.layer_norm(h := x + residual, weight.shape, weight, None, eps), h",
    "gate": "y * F.silu(z)",
    "silu_and_mul": "F.silu(gate) * up",
    "gelu_tanh_and_mul": "F.gelu(gate, approximate='tanh') * up",
    "gelu_and_mul": "F.gelu(gate) * up",
    "rms_norm_gated": "F.rms_norm(x, weight.shape, weight, eps) * F.silu(gate)",
    "rotate": "rotated(x.view(shape)).view(x.shape)",
    "qk_norm_rope": "rotated(F.rms_norm(q.view(shape), q_weight.shape, q_weight, eps)).view(q.shape), "
    "rotated(F.rms_norm(k.view(shape), k_weight.shape, k_weight, eps)).view(k.shape)",
    "quantize": "quantized(y)",
    "rms_norm_quant": "quantized(F.rms_norm(x, weight.shape, weight, eps))",
    "fused_add_rms_norm_quant": "*quantized(F.rms_norm(h := x + residual, weight.shape, weight, eps)), h",
    "layer_norm_quant": "quantized(F.layer_norm(x, weight.shape, weight, None, eps))",
    "fused_add_layer_norm_quant": "*quantized(F.layer_norm(h := x + residual, weight.shape, weight, None, eps)), h",
    "silu_and_mul_quant": "quantized(F.silu(gate) * up)",
    "relu2_quant": "quantized(F.relu(z).square())",
    "gelu": "F.gelu(z)",
    "relu2": "F.relu(z).square()",
    "softcap": "cap * torch.tanh(x / cap)",
    "linear": "F.linear(x, weight, bias)",
    "log_softmax": "F.log_softmax(logits, -1)",
    "logsumexp": "torch.logsumexp(logits, -1)",
    "selected_log_prob": "F.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)",
    "selected_log_prob_and_entropy": "(h := F.log_softmax(logits, -1)).gather(-1, ids.unsqueeze(-1)).squeeze(-1), "
    "-(h.exp() * h).sum(-1)",
    "modulate": "y * (1 + scale) + shift",
}


def _rotated(cos: Tensor, sin: Tensor) -> Callable[[Tensor], Tensor]:
    """The rotation of heads, [..., size], by tables of a half, as models of transformers write it."""
    cos, sin = torch.cat((cos, cos)), torch.cat((sin, sin))

    def rotated(heads: Tensor) -> Tensor:
        a, b = heads.chunk(2, -1)
        return heads * cos + torch.cat((-b, a), -1) * sin

    return rotated


def _quantized(quantization: Quantization) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A symmetric quantization of rows, as programs write it."""
    least, greatest = quantization.range

    def quantized(y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        y = y.reshape(*y.shape[:-1], -1, quantization.group(y.shape[-1]))
        scale = (y.abs().amax(-1, keepdim=True) / greatest).clamp(min=quantization.scale_floor)
        numbers = y * (1 / scale) if quantization.apply == "reciprocal" else y / scale
        if not quantization.dtype.is_floating_point:
            numbers = numbers.round()
        return numbers.clamp(least, greatest).to(quantization.dtype).flatten(-2), scale.squeeze(-1)

    return quantized


def _named(function: str, rounds: str = "nothing", **flags: Any) -> Measured:
    return Measured(every()[function], rounds, flags)


#: By the name that ``--ops`` takes. Operations that are not here have the names of their functions.
OPERATIONS = {
    "add_norm": _named("fused_add_rms_norm", "sum"),
    "norm": _named("rms_norm"),
    "layer_norm": _named("layer_norm"),
    "add_layer_norm": _named("fused_add_layer_norm", "sum"),
    "norm_add": _named("rms_norm_add", "first norm"),
    "norm_add_norm": _named("rms_norm_add_rms_norm", "first norm, sum"),
    "add_norm_int8": _named("fused_add_rms_norm_quant", "sum, norm", quantization=quantizations.VLLM_INT8_TOKEN_CPU),
    "add_norm_fp8": _named("fused_add_rms_norm_quant", "sum, norm", quantization=quantizations.VLLM_FP8_TOKEN),
    "add_norm_fp8_block": _named(
        "fused_add_rms_norm_quant", "sum, norm", quantization=quantizations.VLLM_FP8_BLOCK_FUSED
    ),
    "gate": _named("gate"),
    "silu_and_mul": _named("silu_and_mul", "silu"),
    "norm_gated": _named("rms_norm_gated", "normed rows"),
    "qk_norm_rope": _named("qk_norm_rope", "norm, products", round_norm=True, round_products=True),
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
    """The operations that ``bench`` times forward: those of rows, as shapes name no number of keys."""
    named = {measured.listed.name for measured in OPERATIONS.values()}
    others = {
        name: listed for name, listed in every().items() if name not in named and not (listed.of_keys or listed.dtypes)
    }
    # A symmetric quantization, which every program writes alike.
    symmetric = {"quantize": {"quantization": quantizations.VLLM_INT8_TOKEN_CPU}}
    return OPERATIONS | {
        name: Measured(listed, flags=symmetric.get(name, listed.needed)) for name, listed in others.items()
    }
