"""vLLM's log-probabilities, on CPUs: of prompts, of sampled tokens and of rejected ones.

vLLM computes them in a static method of its sampler, and those of logits that are processed in another class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fusednorm.compat.vllm import compute_logprobs
from fusednorm.vllm.log import say, warn_left

#: The mode in which vLLM's sampler returns log-probabilities of processed logits, and that in which it returns these.
_LOG_PROBS, _LOGITS = "processed_logprobs", "processed_logits"


def replace() -> None:
    """Has vLLM's sampler compute log-probabilities by :func:`fusednorm.log_softmax`."""
    unexpected = _unexpected()
    if unexpected:
        warn_left(f"vLLM's log-probabilities as they were: {unexpected}")
        return
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    Sampler.compute_logprobs = staticmethod(compute_logprobs)
    for name in ("forward_native", "forward_cpu"):
        setattr(TopKTopPSampler, name, _of_logits(getattr(TopKTopPSampler, name)))
    say("log-probabilities are fusednorm.log_softmax")


def _of_logits(theirs: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Replaces a method that samples, and returns what the sampler's mode asks for."""

    @wraps(theirs)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        if self.logprobs_mode != _LOG_PROBS:
            return theirs(self, *arguments, **keywords)
        self.logprobs_mode = _LOGITS
        try:
            sampled, logits = theirs(self, *arguments, **keywords)
        finally:
            self.logprobs_mode = _LOG_PROBS
        return sampled, None if logits is None else compute_logprobs(logits)

    return forward


def _unexpected() -> str:
    """The first difference between this vLLM's sampler and that of the version tested; empty without a difference."""
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
        from vllm.v1.sample.sampler import Sampler

        if not isinstance(inspect.getattr_static(Sampler, "compute_logprobs"), staticmethod):
            return "expected vllm.v1.sample.sampler.Sampler.compute_logprobs to be a static method"
        for name in ("forward_native", "forward_cpu"):
            words = inspect.getsource(getattr(TopKTopPSampler, name))
            if not all(f'self.logprobs_mode == "{mode}"' in words for mode in (_LOG_PROBS, _LOGITS)):
                return f"expected TopKTopPSampler.{name} to return what logprobs_mode asks for"
    except (ImportError, AttributeError, OSError) as error:
        return f"vllm.v1.sample is not as in the version tested ({error})"
    return ""
