"""Tables of rotations with the same bits on every processor, as a patched model with ``products=True`` has them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class Tables(torch.nn.Module):
    """A part of one of vLLM's rotations, by which ``fusednorm.contract`` knows that its table is exact."""

    _fusednorm_within = True

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("cosine_and_sine", {})]

    def _fusednorm_names(self, model: torch.nn.Module, place: str) -> list[str]:
        """The name that the step has in the trainer's model, which makes tables once for all layers."""
        name = _of_trainer(place)
        places = (path.rpartition(".")[0] for path, one in model.named_modules() if isinstance(one, Tables))
        return [name] if place == next(one for one in places if _of_trainer(one) == name) else []


def _of_trainer(place: str) -> str:
    around, layers, within = f".{place}".partition(".layers.")
    return f"{around}.{within.rpartition('.')[2]}".removeprefix(".") if layers else place


def exact() -> AbstractContextManager[Any]:
    """While it is active, cosines, sines and powers have the same bits on every processor."""
    from fusednorm.transformers.tables import Exact  # which the server and the engine's core do not need

    return Exact()
