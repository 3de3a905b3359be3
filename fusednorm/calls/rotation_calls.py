"""Calls of "rotate": heads of q, or of q and of k, that are normalised, rotated, or both (docs/spec.md, section 8)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fusednorm.calls.call import Call


class Heads(NamedTuple):
    """Heads of q or of k, each of adjacent numbers. The strides: of rows in two levels, and from head to head."""

    #: [..., H, D].
    x: Tensor
    #: [..., H, D], receives the heads, rounded to its dtype. It may be x itself.
    out: Tensor
    #: [D], or [H, D] with a row for each head; contiguous, or None.
    weight: Tensor | None
    x_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    #: [..., H] of the accumulator type, contiguous, receives ``1 / sqrt(mean(x^2) + eps)``; or None.
    rstd: Tensor | None

    @property
    def number(self) -> int:
        """H, the number of heads of a row."""
        return self.x.shape[-2]

    @property
    def weight_stride(self) -> int:
        """From a head's weight to that of the next head; 0 where all heads share one."""
        return 0 if self.weight is None or self.weight.dim() == 1 else self.weight.shape[1]


def heads_of(call: Call) -> list[Heads]:
    """The heads of q and of k, as far as there are any."""
    tensors, strides, found = call.tensors, call.strides, []
    for name in "qk":
        x, out = tensors[name], tensors[f"{name}_out"]
        if x is not None and out is not None and x.numel():
            in_x, in_out = (*strides[name], x.stride(-2)), (*strides[f"{name}_out"], out.stride(-2))
            found.append(Heads(x, out, tensors[f"{name}_weight"], in_x, in_out, tensors[f"{name}_rstd"]))
    return found


def of_one_weight_dtype(call: Call) -> list[Call]:
    """The call, or one for q and one for k if their weights have two dtypes, of which a kernel for GPUs knows one."""
    if len({heads.weight is not None and heads.weight.dtype for heads in heads_of(call)}) == 1:
        return [call]
    return [call._replace(tensors=call.tensors | {of: None}) for of in ("k", "q")]  # type: ignore[operator]
