"""Adapters of trainers' and engines' log-probabilities: fusednorm's bits, and the values of the peers' formulas.

A formula and fusednorm round numbers of the sizes that are added, so they are at most a few steps of these sizes apart,
and in the accumulator's type a step for each of the N additions: :func:`near`.
"""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fusednorm import log_softmax, logsumexp, selected_log_prob, selected_log_prob_and_entropy
from fusednorm.compat import trl, verl, vllm
from fusednorm.conformance.cases import BF16, F16, F32, F64, dtype_name

from compat_bounds import same

SIZE = 300
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=dtype_name)
of_engines = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)


def of(dtype, *shape):
    """Logits of [2, 8, SIZE], ids of [2, 8, *shape], and two tensors of numbers of the ids' shape and of [2, 8]."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 8, SIZE, generator=generator) * 3).to(dtype).requires_grad_()
    ids = torch.randint(SIZE, (2, 8, *shape), generator=generator)
    return logits, ids, torch.randn(ids.shape, generator=generator).to(dtype)


def near(found, wanted, *sizes):
    """That two results whose terms have these sizes are four roundings apart, and those of the sum."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    step = torch.finfo(found.dtype)
    per_term = step.eps if found.dtype in (F32, F64) else torch.finfo(F32).eps
    size = sum(size.detach().double().abs() for size in (found, wanted, *sizes)) + step.smallest_normal
    assert ((found.double() - wanted.double()).abs() <= (2 * step.eps + SIZE * per_term) * size).all()


def gradient_of(result, d, logits):
    [found] = torch.autograd.grad(result, logits, d.to(result.dtype))
    return found


def trls(logits, index):
    """By ``logsumexp`` in float32 and float64, else by ``log_softmax``."""
    at = index if index.dim() == logits.dim() else index.unsqueeze(-1)
    if logits.dtype in (F32, F64):
        found = logits.gather(-1, at) - logits.logsumexp(-1, keepdim=True)
    else:
        found = logits.log_softmax(-1).gather(-1, at)
    return found.view(index.shape)


@dtypes
@pytest.mark.parametrize("ids", [(), (1,), (3,)], ids=["[...]", "[..., 1]", "[..., 3]"])
def test_trl(dtype, ids):
    logits, index, d = of(dtype, *ids)
    found, wanted = trl.selective_log_softmax(logits, index), trls(logits, index)
    at = index.view(2, 8, -1)
    same(found, log_softmax(logits).gather(-1, at).view(index.shape))
    near(found, wanted, logits.gather(-1, at).view(index.shape), logits.logsumexp(-1).view(2, 8, *[1] * len(ids)))
    p = logits.double().softmax(-1)  # in 16 bits torch's gradient has it from the rounded logarithm
    sizes = d.double().view(2, 8, -1).abs().sum(-1, keepdim=True) * p * (1 - p.log())
    near(gradient_of(found, d, logits), gradient_of(wanted, d, logits), sizes)


@dtypes
def test_verls_log_probabilities(dtype):
    """Those of flash-attn's cross entropy, in float32, which ignores labels of -100; logits are not overwritten."""
    logits, labels, d = of(dtype)
    labels[0, 3] = -100
    before = logits.detach().clone()
    wide = logits if dtype == F64 else logits.float()
    loss = cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    found, wanted = verl.logprobs_from_logits(logits, labels), -loss.view(2, 8)
    same(found, selected_log_prob(logits, labels, ignore_index=-100))
    assert found[0, 3] == 0
    near(found, wanted, *wide.aminmax(dim=-1))
    of_found, of_wanted = gradient_of(found, d, logits), gradient_of(wanted, d, logits)
    near(of_found, of_wanted, d.unsqueeze(-1) * wide.softmax(-1))
    assert not of_found[0, 3].any()
    same(verl.logprobs_from_logits(logits, labels, inplace_backward=False), found)
    same(logits, before)


@dtypes
def test_verls_entropy(dtype):
    logits, _, d = of(dtype)
    found, pd = verl.entropy_from_logits(logits), logits.softmax(-1)
    wanted = logits.logsumexp(-1) - (pd * logits).sum(-1)
    same(found, selected_log_prob_and_entropy(logits, torch.full((2, 8), 5))[1].to(dtype))
    terms = (pd * logits).double().abs().sum(-1)
    near(found, wanted, logits.logsumexp(-1), terms)
    of_pd = d.double().abs().unsqueeze(-1) * (2 + logits.double().abs() + terms.unsqueeze(-1))
    sizes = of_pd * pd.clamp(torch.finfo(dtype).smallest_normal)
    near(gradient_of(found, d, logits), gradient_of(wanted, d, logits), sizes)


def test_entropy_of_masked_logits():
    """Is that of the others; the formula has 0 * -inf."""
    logits, _, d = of(F32)
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[..., 200:] = True
    masked = logits.masked_fill(mask, -math.inf)
    entropy = verl.entropy_from_logits(masked)
    near(entropy, verl.entropy_from_logits(logits[..., :200]))
    assert (masked.softmax(-1) * masked).sum(-1).isnan().all()
    assert gradient_of(entropy, d, logits).isfinite().all()


@of_engines
def test_vllm(dtype):
    """The trainers' results are its elements: bit for bit where they are float32, else rounded."""
    logits, ids, _ = of(dtype)
    found, wanted = vllm.compute_logprobs(logits), logits.log_softmax(-1, dtype=F32)
    near(found, wanted, *logits.float().aminmax(dim=-1, keepdim=True))
    d = torch.randn(found.shape)
    sizes = d, d.abs().sum(-1, keepdim=True) * wanted.exp()
    near(gradient_of(found, d, logits), gradient_of(wanted, d, logits), *sizes)
    chosen = found.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    same(chosen, verl.logprobs_from_logits(logits, ids))
    same(chosen.to(dtype), trl.selective_log_softmax(logits, ids))


def test_the_other_order_has_other_bits():
    """TRL's and verl's, with the same logarithm: in a fifth of the rows for unlikely ids, in most for likely ones."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, SIZE, generator=generator) * 3
    for ids, least, most in (
        (torch.randint(SIZE, (400,), generator=generator), 0.15, 0.4),
        (logits.argmax(-1), 0.8, 1.0),
    ):
        other = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logsumexp(logits)
        for found in (trl.selective_log_softmax(logits, ids), verl.logprobs_from_logits(logits, ids)):
            assert least < (found != other).double().mean() < most


@pytest.mark.parametrize("call", [verl.entropy_from_logits, vllm.compute_logprobs])
def test_what_is_refused_is_named(call):
    for logits, error in (
        (None, TypeError),
        (torch.ones(3, dtype=torch.int32), TypeError),
        (torch.ones(()), ValueError),
    ):
        with pytest.raises(error, match="logits must be"):
            call(logits)
