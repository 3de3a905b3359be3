"""Rows on many ranks, in real process groups: the bits of one process, and no more communication than is needed."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_

from cases import BF16, F16, F32, F64, Case, operands
from ranks import on_ranks

HIDDEN = 40
SHARDINGS = {"batch": Shard(0), "sequence": Shard(1), "replicated": Replicate()}


@functools.cache
def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def everywhere():
    return mesh(dist.get_world_size())


def tensors(batch, sequence, x=BF16, residual=F32, weight=BF16, seed=0):
    """x, residual and weight of one process, the same on every rank."""
    case = Case(rows=batch * sequence, hidden=HIDDEN, x=x, residual=residual, weight=weight, seed=seed)
    a, b, c = operands(case)
    return a.view(batch, sequence, HIDDEN), b.view(batch, sequence, HIDDEN), c


def placed(tensor, *placements, where=None, grad=False):
    return distribute_tensor(tensor, where or everywhere(), placements).requires_grad_(grad)


def same(actual, expected, placements=None):
    """Bits, and where they lie."""
    if placements is not None:
        assert actual.placements == tuple(placements), actual.placements
    whole = actual.full_tensor().detach()
    assert whole.dtype == expected.dtype
    assert torch.equal(whole, expected), (whole, expected)


def shares(placements):
    """Where a weight's gradient lies, if the rows lie there."""
    return [p if p.is_replicate() else Partial() for p in placements]


def collectives(function):
    """What it returns, and how many collectives of which kind it took."""
    with CommDebugMode() as communication:
        result = function()
    return result, {str(op).rsplit(".", 1)[-1]: count for op, count in communication.get_comm_counts().items()}


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", [(4, 4), (5, 7), (3, 1)], ids=["even", "uneven", "fewer"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("with_residual", [True, False], ids=["add", "norm"])
def test_rows_stay_where_they_are(shape, sharding, with_residual):
    """Forward and backward, without one collective: even, uneven, and on fewer rows than ranks."""
    placements = [SHARDINGS[sharding]]
    x, residual, weight = tensors(*shape)
    dy, d_total, _ = tensors(*shape, seed=1)

    def call(x, residual, weight):
        flags = {"weight_offset": 0.5, "round_norm": True}
        if with_residual:
            return fused_add_rms_norm(x, residual, weight, 1e-5, **flags)
        return (rms_norm(x, weight, 1e-5, **flags),)

    def gradients(outputs, leaves, incoming):
        return torch.autograd.grad(outputs, leaves, incoming[: len(outputs)])

    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    expected = call(*leaves)
    wanted = [leaves[0], leaves[1], leaves[2]] if with_residual else [leaves[0], leaves[2]]
    expected_gradients = gradients(expected, wanted, (dy, d_total))

    parts = [placed(x, *placements, grad=True), placed(residual, *placements, grad=True)]
    parts.append(placed(weight, Replicate(), grad=True))
    incoming = [placed(t, *placements) for t in (dy, d_total)]
    outputs, counts = collectives(lambda: call(*parts))
    assert counts == {}
    for actual, wanted_output in zip(outputs, expected, strict=True):
        same(actual, wanted_output.detach(), placements)
    inputs = parts if with_residual else [parts[0], parts[2]]
    found, counts = collectives(lambda: gradients(outputs, inputs, incoming))
    assert counts == {}
    for actual, wanted_gradient in zip(found[:-1], expected_gradients[:-1], strict=True):
        same(actual, wanted_gradient, placements)
    assert found[-1].placements == tuple(shares(placements))
    assert found[-1].to_local().shape == weight.shape
    if sharding == "replicated":
        same(found[-1], expected_gradients[-1])
