"""Log-probabilities of parts of rows, by a backend that has them in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.engine.declared import backend_of, gradient, make
from fusednorm.reference.norm import SEGMENT


class Selecting(NamedTuple):
    """The operands of a row beside its logits, and the steps before its softmax."""

    ids: Tensor | None = None
    temperature: Tensor | None = None
    softcap: float | None = None
    ignore_index: int | None = None

    def operands(self, logits: Tensor) -> dict[str, Tensor | None]:
        """All operands by name."""
        return {"logits": logits, "ids": self.ids, "temperature": self.temperature}

    def flags(self) -> dict[str, Any]:
        """The flags by name."""
        return {"softcap": self.softcap, "ignore_index": self.ignore_index}


_NOTHING = Selecting()


def sums_of_segments(logits: Tensor, selecting: Selecting, m: Tensor, entropy: bool) -> tuple[Tensor, ...] | None:
    """The sums of a part of rows that begins with a segment, [..., segments]; with ``entropy`` also those of its terms.

    None: the formula computes them.
    """
    backend = backend_of(logits, "log_prob_parts")
    if backend is None:
        return None
    shape = (*logits.shape[:-1], -(-logits.shape[-1] // SEGMENT))
    names = ("out", "entropy") if entropy else ("out",)
    found = {name: torch.empty(shape, dtype=m.dtype, device=m.device) for name in names}
    make(backend, "sums", {**selecting.operands(logits), "m": m}, found, ("logits",), selecting.flags())
    return tuple(found.values())


def backward(
    name: str,
    d: Tensor,
    d_entropy: Tensor | None,
    logits: Tensor,
    m: Tensor,
    s: Tensor,
    entropy: Tensor | None = None,
    selecting: Selecting = _NOTHING,
    part: tuple[int, int] | None = None,
) -> Tensor | None:
    """The gradient of logits; None: the formula computes it.

    ``name``, ``d_entropy``: see :class:`fusednorm.calls.call.DeclaredCall`. ``part``: of logits that are a part of
    rows, where they begin there, and the length of whole rows.
    """
    step, of_rows = "log_prob_backward" if part is None else "log_prob_parts", ["logits"]
    if name == "log_softmax":
        of_rows.append("d")
    others = {**selecting.operands(logits), "m": m, "s": s, "entropy": entropy}
    incoming = {"d": d, "d_entropy": d_entropy}
    return gradient(step, name, incoming, others, of_rows, selecting.flags(), part or (0, 0))
