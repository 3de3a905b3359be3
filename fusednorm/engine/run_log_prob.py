"""Log-probabilities of parts of rows, by a backend that has them in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import Step
from fusednorm.engine.run import backend_of, make
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


def sums_of_segments(logits: Tensor, selecting: Selecting, m: Tensor, entropy: bool) -> tuple[Tensor, ...] | None:
    """The sums of a part of rows that begins with a segment, [..., segments]; with ``entropy`` also those of its terms.

    None: the formula computes them.
    """
    backend = backend_of(logits, Step("log_prob_parts"))
    if backend is None:
        return None
    shape = (*logits.shape[:-1], -(-logits.shape[-1] // SEGMENT))
    names = ("out", "entropy") if entropy else ("out",)
    found = {name: torch.empty(shape, dtype=m.dtype, device=m.device) for name in names}
    make(backend, "sums", {**selecting.operands(logits), "m": m}, found, ("logits",), selecting.flags())
    return tuple(found.values())
