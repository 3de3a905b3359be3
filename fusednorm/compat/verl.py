"""verl's ``logprobs_from_logits`` and ``entropy_from_logits``, of ``verl.utils.torch_functional``.

The logarithm and the exponential are fusednorm's (docs/spec.md, section 11). verl subtracts ``logsumexp`` from a logit,
where fusednorm subtracts the greatest first, so many of the last bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.calls.checks import refuse_type
from fusednorm.operations import log_prob


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """The log-probabilities of labels, [...], in float32: :func:`fusednorm.selected_log_prob`.

    verl returns them so where flash-attn is installed, which ignores labels of -100: they have 0 here, too. Without it
    verl rounds to the dtype of the logits. ``inplace_backward`` does nothing: the logits are never written to.
    """
    return log_prob.selected_log_prob(logits, labels, ignore_index=-100)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """The entropy of each row, [...]: that of :func:`fusednorm.selected_log_prob_and_entropy`.

    It is rounded once to the dtype of the logits; verl rounds each step to it, and has NaN where a logit is -inf.
    """
    if not isinstance(logits, Tensor):
        refuse_type("logits", logits)
    ids = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)  # any: their log-probabilities are not returned
    return log_prob.selected_log_prob_and_entropy(logits, ids)[1].to(logits.dtype)
