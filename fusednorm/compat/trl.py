"""TRL's ``selective_log_softmax``, of ``trl.trainer.utils``: in the dtype of the logits, as there.

The logarithm and the exponential are fusednorm's (docs/spec.md, section 11). TRL subtracts ``logsumexp`` from wide
logits, where fusednorm subtracts the greatest first, so many of the last bits differ.
"""

from __future__ import annotations

from torch import Tensor

from fusednorm.operations import log_prob


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """The log-probabilities of [...] or [..., K] ids: :func:`fusednorm.selected_log_prob`.

    They are rounded once to the dtype of the logits, to the bits of ``log_softmax(logits).gather(-1, index)``. Call the
    function of fusednorm for those of 16-bit logits in float32.
    """
    return log_prob.selected_log_prob(logits, index).to(logits.dtype)
