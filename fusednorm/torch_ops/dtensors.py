"""Modules that are for DTensors: imported when the first one is met, because that takes seconds."""

from __future__ import annotations

import functools

from fusednorm.torch_ops import dtensor_bridge


@functools.cache
def _loaded() -> dtensor_bridge.OfDTensors:
    """The functions; the import also registers the rules of sharding."""
    from fusednorm.torch_ops import parts_of_logits, sharding

    return dtensor_bridge.OfDTensors(
        on_rows=sharding.on_rows,
        of_parts_of_logits=parts_of_logits.of_parts,
        parts_of_groups=sharding.parts_of_groups,
    )


dtensor_bridge.load_by(_loaded)
