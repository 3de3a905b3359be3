"""Rows on many ranks, in real process groups: the bits of one process, and no more communication than is needed."""

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from every_operation import (
    DIFFERENTIATED,
    FUNCTIONS,
    IN_PLACE,
    MORE,
    OF_KEYS,
    OPERATORS,
    called,
    clones,
    function_of,
    recorded,
    without_outputs,
)
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusednorm.distributed
from fusednorm import (
    Quantization,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_add_rms_norm_,
    gate,
    gate_,
    layer_norm,
    linear,
    log_softmax,
    modulate,
    rms_norm,
    rms_norm_,
    rms_norm_add,
    rms_norm_add_,
    rms_norm_add_rms_norm,
    rms_norm_gated,
    rms_norm_gated_,
    rms_norm_quant,
    rotate,
    selected_log_prob,
    silu_and_mul,
)
from fusednorm.calls.quantization import E8M0
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.engine.run_log_prob import Selecting
from fusednorm.operations.listed import every
from fusednorm.reference.norm import treesum
from fusednorm.torch_ops import parts_of_logits, parts_of_rows

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


def all_same(actual, expected, placements=None):
    for one, wanted in zip(actual, expected, strict=True):
        same(one, wanted.detach(), placements)


def split(full, *rows, where=None, grad=False):
    """x and the residual with their rows there, and the weight on every rank."""
    everywhere = [Replicate()] * len(rows)
    return [placed(t, *(rows if t.ndim > 1 else everywhere), where=where, grad=grad) for t in full]


def of_one_process(call, full, incoming):
    """What the call returns, and its gradients."""
    leaves = [t.clone().requires_grad_() for t in full]
    outputs = call(*leaves)
    given = [t.to(y.dtype) for t, y in zip(incoming, outputs, strict=False)]
    return outputs, torch.autograd.grad(outputs, leaves, given)


def shares(placements):
    """Where a weight's gradient lies, if the rows lie there."""
    return tuple(p if p.is_replicate() else Partial() for p in placements)


def collectives(function):
    """What it returns, and how many collectives of which kind it took."""
    with CommDebugMode() as communication:
        result = function()
    return result, {str(op).rsplit(".", 1)[-1]: count for op, count in communication.get_comm_counts().items()}


class Passes(NamedTuple):
    """A call and its gradients, of one process, and of all ranks with the collectives that both passes took."""

    expected: tuple
    wanted: tuple
    outputs: tuple
    found: tuple
    forward: dict
    backward: dict


def both_passes(call, full, parts, incoming):
    """The call returns a tuple. Incoming gradients lie where its results do."""
    expected, wanted = of_one_process(call, full, incoming)
    outputs, forward = collectives(lambda: call(*parts))
    given = [placed(t.to(y.dtype), *y.placements, where=y.device_mesh) for t, y in zip(incoming, outputs, strict=False)]
    found, backward = collectives(lambda: torch.autograd.grad(outputs, parts, given))
    return Passes(expected, wanted, outputs, found, forward, backward)


class OfRows(NamedTuple):
    """A call with rows, its operands' names, and what is joined where a sequence of heads or samples is sharded."""

    call: Callable
    operands: str
    #: Where the results then lie, and how many tensors each pass gathers.
    joined: tuple = ()
    gathered: tuple = (0, 0)
    #: Parts of rows stay where they are, too.
    of_elements: bool = False
    #: The same in place.
    in_place: Callable | None = None


def of_one(function, **flags):
    """The same function; its result is in a tuple."""
    return lambda *operands: (function(*operands, **flags),)


FLAGS = {"eps": 1e-5, "weight_offset": 0.5, "round_norm": True}
EVERYWHERE = Replicate()
ROWS = {
    "norm": OfRows(of_one(rms_norm, **FLAGS), "x weight", in_place=of_one(rms_norm_, **FLAGS)),
    "add": OfRows(
        functools.partial(fused_add_rms_norm, **FLAGS),
        "x residual weight",
        in_place=functools.partial(fused_add_rms_norm_, **FLAGS),
    ),
    "the row alone": OfRows(lambda *operands: fused_add_rms_norm(*operands, **FLAGS)[:1], "x residual weight"),
    "the sum alone": OfRows(lambda x, r: fused_add_rms_norm(x, r, round_sum=False)[1:], "x residual"),
    "bias": OfRows(
        lambda x, r, w, b: fused_add_rms_norm(x, r, w, bias=b, x_scale=0.5, round_norm=True), "x residual weight bias"
    ),
    "heads": OfRows(
        lambda x, r, w, b: fused_add_rms_norm(x, r, w, bias=b),
        "x residual heads bias",
        joined=(EVERYWHERE, Shard(1)),
        gathered=(1, 1),
    ),
    "sum": OfRows(of_one(rms_norm_add), "x residual weight"),
    "two norms": OfRows(functools.partial(rms_norm_add_rms_norm, between=F32), "x residual weight bias"),
    "layer norm": OfRows(of_one(layer_norm, weight_offset=0.5), "x weight wide"),
    "layer norm of heads": OfRows(of_one(layer_norm), "x heads wide", joined=(EVERYWHERE,), gathered=(1, 1)),
    "added layer norm": OfRows(functools.partial(fused_add_layer_norm, weight_offset=0.5), "x residual weight wide"),
    "added layer norm of heads": OfRows(  # the sum is kept
        fused_add_layer_norm, "x residual heads wide", joined=(EVERYWHERE, EVERYWHERE), gathered=(2, 0)
    ),
    "modulation": OfRows(of_one(modulate), "residual x rows"),
    "of samples": OfRows(of_one(modulate), "x sample other_sample", joined=(EVERYWHERE,), gathered=(1, 1)),
    "of a sample and rows": OfRows(of_one(modulate), "x sample residual", joined=(EVERYWHERE,), gathered=(2, 2)),
    "gate": OfRows(of_one(gate, activation="sigmoid", out_dtype=F16), "x residual", of_elements=True),
    "silu_and_mul": OfRows(of_one(silu_and_mul, between=F32), "x residual", of_elements=True),
    "norm first": OfRows(of_one(rms_norm_gated, between=F32), "x residual weight"),
    "gate first": OfRows(
        of_one(rms_norm_gated, norm_before_gate=False, group_size=10, round_norm=True), "x residual weight"
    ),
}


@on_ranks(2, pytest.param(4, marks=pytest.mark.release))
@pytest.mark.parametrize("sharding", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_stay_where_they_are(name, sharding):
    """Forward and backward, without one collective: even, uneven, and fewer rows than ranks. Norms join parts of rows.

    All heads of a row are joined if each has a weight, and all rows of a sample whose numbers have gradients.
    """
    of_rows = ROWS[name]
    for shape in ((4, 6), (5, 7), (3, 1)):
        x, residual, weight = tensors(*shape)
        whole = {"x": x, "residual": residual, "rows": x.cos(), "sample": residual[:, 0], "other_sample": x[:, 0]}
        whole |= {"weight": weight, "bias": weight + 1, "wide": (weight * 3).to(F32)}
        whole["heads"] = torch.stack([weight + k for k in range(shape[1])])
        names = of_rows.operands.split()
        with_rows = [whole[key].ndim == 3 or "sample" in key for key in names]
        lie = [whole[key].ndim == 3 or ("sample" in key and sharding == Shard(0)) for key in names]
        parts = [
            placed(whole[key], sharding if there else EVERYWHERE, grad=True)
            for key, there in zip(names, lie, strict=True)
        ]
        run = both_passes(of_rows.call, [whole[key] for key in names], parts, tensors(*shape, seed=1)[:2])
        joined = of_rows.joined if sharding == Shard(1) else ()
        at = joined or [sharding] * len(run.outputs)
        all_same(run.outputs, run.expected)
        stay = sharding != Shard(2) or of_rows.of_elements
        for found, wanted, of_row in zip(run.found, run.wanted, with_rows, strict=True):
            if of_row:
                same(found, wanted, at[-1:] if stay else None)
                continue
            assert found.to_local().shape == wanted.shape
            assert not stay or found.placements == shares(at[:1])
            if found.placements == (EVERYWHERE,):
                same(found, wanted)
        if stay:
            assert [y.placements for y in run.outputs] == [(p,) for p in at]
            counts = of_rows.gathered if joined else (0, 0)
            assert [run.forward, run.backward] == [{"all_gather_into_tensor": n} if n else {} for n in counts]
        if of_rows.in_place and stay:  # the tensors are the same objects, and their memory is
            parts = [t.detach() for t in parts]
            memory = [t.to_local() for t in parts]
            outputs, moved = collectives(functools.partial(of_rows.in_place, *parts))
            assert moved == {}
            all_same(outputs, run.expected, [sharding])
            for y, part, local in zip(outputs, parts, memory, strict=False):
                assert y is part
                assert torch.equal(y.to_local(), local)


UP = "round_scale=up_to_power_of_two"
IN_WORDS = f"{UP} scale_dtype=int32"


@on_ranks(2)
@pytest.mark.parametrize("sharding", [Shard(0), Shard(1), Replicate()], ids=str)
def test_quantized_groups(sharding):
    """Their scales stay where the rows are, also in words and in bytes; columns of them are laid out on each rank."""
    x, _, weight = tensors(4, 6)
    powers = {"round_scale": "up_to_power_of_two", "scale_dtype": torch.int32}
    columns = {"layout": "column"}, {"layout": "column_padded", **powers}
    for flags in ({}, powers, *(columns if sharding == Shard(0) else ())):
        quantized = functools.partial(rms_norm_quant, quantization=Quantization(torch.int8, per=8, **flags))
        found, moved = collectives(functools.partial(quantized, *split((x, weight), sharding)))
        assert moved == {}
        all_same(found, quantized(x, weight), [sharding])
        if flags in columns:
            assert found[1].to_local().stride() == quantized(x[:2], weight)[1].stride()
    if E8M0 is not None:  # which torch does not gather
        quantization = Quantization(torch.int8, per=8, **powers | {"scale_dtype": E8M0})
        scales = rms_norm_quant(*split((x, weight), sharding), quantization=quantization)[1]
        wanted = rms_norm_quant(x, weight, quantization=quantization)[1].view(torch.uint8)
        assert torch.equal(scales.to_local().view(torch.uint8), placed(wanted, sharding).to_local())


def sharded(name, operands, sharding):
    """Operands whose rows lie there; tables, weights and scales are whole on each rank."""
    others = ("cos", "sin", "weight", "next_weight", "bias", "q_weight", "k_weight")

    def at(key, t):
        rows = t.shape[0] == 4 and key not in others and t.dim() > getattr(sharding, "dim", 0)
        return placed(t.clone(), sharding if rows else Replicate())

    return {key: at(key, t) if isinstance(t, torch.Tensor) else t for key, t in operands.items()}


@on_ranks(2)
@pytest.mark.parametrize("sharding", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS | MORE)
def test_every_function(name, sharding):
    """The bits of one process. Rows, and their numbers, stay where they are; parts of rows are joined.

    So is all that attention takes.
    """
    function, operands = MORE[name] if name in MORE else (function_of(name), FUNCTIONS[name])
    joined = sharding == Shard(1) or name.split()[0] in OF_KEYS
    if sharding == Shard(1):
        if name in IN_PLACE or name == "offset":  # they refuse to move what they write
            return
        operands = without_outputs(operands)
    expected = called(function, clones(operands))
    parts = sharded(name, operands, sharding)
    outputs, moved = collectives(lambda: called(function, parts))
    assert joined or moved == {}
    for found, wanted in zip(outputs, expected, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        own = placed(wanted.float(), *found.placements).to_local()  # gloo gathers no float8
        assert torch.equal(found.to_local().float(), own)
        assert joined or wanted.shape[0] != 4 or found.placements == (sharding,)
    if name in DIFFERENTIATED:
        outputs, leaves = recorded(name)
        wanted = torch.autograd.grad(outputs, leaves, [t.detach().cos() for t in outputs])
        parts = sharded(name, {key: t.detach() for key, t in zip(DIFFERENTIATED[name], leaves, strict=True)}, sharding)
        parts = {key: t.requires_grad_() for key, t in parts.items()}
        results = called(function, sharded(name, without_outputs(operands), sharding) | parts)
        incoming = [placed(t.detach().cos(), *y.placements) for t, y in zip(outputs, results, strict=True)]
        for found, whole in zip(torch.autograd.grad(results, list(parts.values()), incoming), wanted, strict=True):
            assert found.shape == whole.shape
            # Ranks' shares of a weight's gradient are added in their order.
            if whole.shape[0] == 4 and every()[name].exact_gradients:
                same(found, whole)


class Product(NamedTuple):
    """Where operands lie; where products do, and how many gathers that takes; where the gradients lie."""

    x: Placement
    weight: Placement
    bias: Placement
    products: Placement
    gathers: int
    gradients: tuple


WHOLE, ROW, OF_SEQUENCE = Replicate(), Shard(0), Shard(1)
PRODUCTS = {
    "rows": Product(ROW, WHOLE, WHOLE, ROW, 0, (ROW, Partial(), Partial())),
    "rows of the sequence": Product(OF_SEQUENCE, WHOLE, WHOLE, OF_SEQUENCE, 0, (OF_SEQUENCE, Partial(), Partial())),
    "columns": Product(WHOLE, Shard(0), Shard(0), Shard(2), 0, (Partial(), Shard(0), Shard(0))),
    "whole": Product(WHOLE, WHOLE, WHOLE, WHOLE, 0, (WHOLE, WHOLE, WHOLE)),
    "parts of rows": Product(Shard(2), Shard(1), WHOLE, WHOLE, 2, (WHOLE, WHOLE, WHOLE)),
    "rows and columns": Product(ROW, Shard(0), WHOLE, ROW, 1, (ROW, Partial(), Partial())),
}


def whole_numbers(*shapes):
    """Their sums of products are exact, also torch's in gradients, whose order is another one on other ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-8, 9, shape, generator=generator).float() for shape in shapes]


@on_ranks(2, 4)
@pytest.mark.parametrize("columns", [7, 1])
@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case, columns):
    """Rows stay where they are; a matrix in parts makes columns of the products, and parts of rows are joined."""
    about = PRODUCTS[case]
    full = x, weight, bias, d = whole_numbers((4, 5, 12), (columns, 12), (columns,), (4, 5, columns))
    others = [t.cos() for t in full[:3]]
    same(linear(*[placed(t, at) for t, at in zip(others, about, strict=False)]), linear(*others), [about.products])
    leaves = [placed(t, at, grad=True) for t, at in zip(full[:3], about, strict=False)]
    run = both_passes(of_one(linear), full[:3], leaves, [d])
    assert run.forward == ({"all_gather_into_tensor": about.gathers} if about.gathers else {})
    all_same(run.outputs, run.expected, [about.products])
    for gradient, at, wanted in zip(run.found, about.gradients, run.wanted, strict=True):
        same(gradient, wanted, [at])
    [result], incoming = of_one(linear)(*leaves), placed(d, about.products)
    found = torch.autograd.grad(result, leaves, incoming, create_graph=True)
    all_same(found, run.wanted)
    [again] = torch.autograd.grad(found[0].full_tensor().sum(), leaves[1:2])
    same(again, d.sum((0, 1)).unsqueeze(-1).expand(columns, 12))
    out = placed(torch.zeros(4, 5, columns), about.products)
    with torch.no_grad():
        assert linear(*leaves, out=out) is out
    same(out, linear(x, weight, bias), [about.products])


@on_ranks(4)
def test_products_of_rows_and_columns_on_two_dimensions_of_ranks():
    *full, d = whole_numbers((4, 5, 12), (6, 12), (6,), (4, 5, 6))
    lie = (Shard(0), Replicate()), (Replicate(), Shard(0)), (Replicate(), Shard(0))
    leaves = [placed(t, *at, where=mesh(2, 2), grad=True) for t, at in zip(full, lie, strict=True)]
    run = both_passes(of_one(linear), full, leaves, [d])
    assert run.forward == run.backward == {}
    all_same(run.outputs, run.expected, [Shard(0), Shard(2)])
    all_same(run.found, run.wanted)


TO_OTHER_ROWS = {"all_gather_into_tensor": 1}  # and a cut: gloo has no all-to-all, which other backends take here
MOVES = {
    # x, residual, the weight; where the rows meet; what that takes
    "a sum that is pending": (Partial(), Shard(1), Replicate(), Shard(1), {"reduce_scatter_tensor": 1}),
    "pending, rows everywhere": (Partial(), Replicate(), Replicate(), Replicate(), {"all_reduce": 1}),
    "a pending residual": (Shard(0), Partial(), Replicate(), Shard(0), {"reduce_scatter_tensor": 1}),
    "parts of rows": (Shard(2), Replicate(), Replicate(), Replicate(), {"all_gather_into_tensor": 1}),
    "parts of rows, the residual's rows": (Shard(2), Shard(1), Replicate(), Shard(1), TO_OTHER_ROWS),
    "parts of both": (Shard(2), Shard(2), Replicate(), Replicate(), {"all_gather_into_tensor": 2}),
    "batch and sequence": (Shard(0), Shard(1), Replicate(), Shard(0), TO_OTHER_ROWS),
    "one of both": (Replicate(), Shard(1), Replicate(), Shard(1), {}),
    "the other": (Shard(0), Replicate(), Replicate(), Shard(0), {}),
    "parts of the weight": (Shard(0), Shard(0), Shard(0), Shard(0), {"all_gather_into_tensor": 1}),
}


def in_parts(tensor, placement):
    """As `placed`; a pending sum of summands that make the tensor again in any order."""
    if not placement.is_partial():
        return placed(tensor, placement)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = torch.where(torch.arange(tensor.shape[-1]) % ranks == rank, tensor, 0)
    return DTensor.from_local(part, everywhere(), [placement], run_check=False)


@on_ranks(2, 4)
@pytest.mark.parametrize("move", MOVES)
def test_what_cannot_stay_moves_to_the_rows(move):
    *placements, rows, expected_counts = MOVES[move]
    full, (dy, d_total, _) = tensors(8, 8), tensors(8, 8, seed=1)
    expected, expected_gradients = of_one_process(fused_add_rms_norm, full, (dy, d_total))
    parts = [in_parts(t, p).requires_grad_() for t, p in zip(full, placements, strict=True)]
    outputs, counts = collectives(lambda: fused_add_rms_norm(*parts))
    assert counts == expected_counts, counts
    all_same(outputs, expected, [rows])
    if placements[0] == placements[1] == rows:
        written = [t.detach().clone() for t in parts]
        all_same(fused_add_rms_norm_(*written), expected, [rows])
    if placements[1] == Replicate():
        same(rms_norm(parts[0], parts[2]), rms_norm(full[0], full[2]), [rows])

    # Gradients come pending, and by columns, from the matrix products that follow, or on other rows.
    for placements in ((Partial(), Shard(2)), (Shard(0), Shard(1))):
        incoming = [in_parts(t, p) for t, p in zip((dy, d_total), placements, strict=True)]
        found = torch.autograd.grad(outputs, parts, incoming, retain_graph=True)
        where = rows if rows.is_shard() or not placements[0].is_shard() else placements[0]
        all_same(found[:2], expected_gradients[:2], [where])
        assert found[2].placements == shares([where])


@on_ranks(2, 4)
def test_any_parts_of_rows_have_the_sum_of_whole_rows():
    """Wherever they begin, on ranks without any too; terms are of all magnitudes and signs."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    for size in (1, 700, 1024, 3000, 32000):
        for _ in range(6):
            cuts = sorted(torch.randint(0, size + 1, (ranks - 1,), generator=generator).tolist())
            parts = parts_of_rows.Parts((0, *cuts, size))
            terms = torch.randn(2, 3, size, generator=generator).exp() * torch.randn(size, generator=generator)
            pieces = [(terms[..., piece.start : piece.stop], piece) for piece in parts.pieces(rank)]
            own = [terms[..., :0], *[parts_of_rows.numbers_of(*piece) for piece in pieces]]
            found = parts_of_rows.exchanged_sum(torch.cat(own, -1), parts, everywhere(), 0)
            assert torch.equal(found, treesum(terms)), parts


LOG_PROBS = ("log_softmax", "logsumexp", "selected_log_prob", "selected_log_prob_and_entropy")
#: Dtypes of logits, widths, how many ids there are of each row, flags. Boundaries of 64128 on four ranks are the first
#: of 128256 on eight.
OF_VOCABULARIES = (
    (BF16, 64128, None, {}),
    (F16, 151936, 3, {"softcap": 4.0, "temperature": 0.7, "ignore_index": -100}),
    (F32, 9001, None, {"temperature": 1.5}),
    (F64, 10001, 2, {"softcap": 2.0, "ignore_index": 7}),
)


def logits_and_ids(dtype, width, several, ignore_index=None):
    """Rows of [2, 4, width], of which some are masked in part, or wholly, or have no finite sum; ids at boundaries."""
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(2, 4, width, dtype=torch.float64, generator=generator) * 4).to(dtype)
    logits[0, 1, width // 4 : -width // 4] = -torch.inf
    logits[0, 2] = -torch.inf
    logits[0, 3, 5] = torch.nan
    logits[1, 0, -3] = torch.inf
    logits[1, 1, : width // 2] -= 300  # nothing is left of these
    ids = torch.randint(width, (2, 4, several or 1), generator=generator)
    ids[1, 1:, 0] = torch.tensor([-(-width // 2) - 1, -(-width // 4), width - 1])
    ids[1, 2] = ids[1, 2, 0]
    if ignore_index is not None:
        ids[0, :, 0], ids[0, 3] = ignore_index, ignore_index
    return logits, ids if several else ids.squeeze(-1)


def log_probs(name, flags):
    """(logits, ids) -> a tuple of results."""

    def call(logits, ids):
        function = getattr(fusednorm, name)
        found = function(logits, ids, **flags) if name.startswith("selected") else function(logits)
        return found if isinstance(found, tuple) else (found,)

    return call


def same_numbers(found, expected):
    """Bits, where NaN equals NaN."""
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.dtype == expected.dtype
    assert torch.equal(whole.isnan(), expected.isnan())
    assert torch.equal(whole.nan_to_num(1.0), expected.nan_to_num(1.0))


def of_whole_rows(call, logits, ids):
    """What one process returns, incoming gradients, which are the same on every rank, and the gradient."""
    leaf, generator = logits.clone().requires_grad_(), torch.Generator().manual_seed(3)
    expected = call(leaf, ids)
    incoming = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in expected]
    return expected, incoming, *torch.autograd.grad(expected, leaf, incoming)


@on_ranks(2, 4)
@pytest.mark.parametrize("case", range(len(OF_VOCABULARIES)))
@pytest.mark.parametrize("name", LOG_PROBS)
def test_parts_of_vocabularies_stay_where_they_are(name, case):
    """Ranks exchange the greatest numbers and sums of segments, and for gradients a sum or nothing."""
    dtype, width, several, flags = OF_VOCABULARIES[case]
    call = log_probs(name, flags)
    logits, ids = logits_and_ids(dtype, width, several, flags.get("ignore_index"))
    expected, incoming, wanted = of_whole_rows(call, logits, ids)
    part, whole_ids = placed(logits, Shard(2), grad=True), placed(ids, Replicate())
    found, forward = collectives(lambda: call(part, whole_ids))
    assert forward == {"all_gather_into_tensor": 2}
    given = [placed(d, *y.placements) for d, y in zip(incoming, found, strict=True)]
    [gradient], backward = collectives(lambda: torch.autograd.grad(found, part, given))
    assert backward == ({"all_gather_into_tensor": 1} if name == "log_softmax" else {})
    assert found[0].placements == ((Shard(2),) if name == "log_softmax" else (Replicate(),))
    assert gradient.placements == (Shard(2),)
    for one, other in zip((*found, gradient), (*expected, wanted), strict=True):
        same_numbers(one, other.detach())


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", LOG_PROBS)
def test_any_parts_of_a_vocabulary(name, backend):
    """Wherever they begin, on ranks without any too, by sums of a kernel and by the formula."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    vocabulary, empty = (16032, 32064, 112224), (900, 900, 1500)  # boundaries of 128256 on eight ranks
    for width, cuts in ((128256, vocabulary), (5000, empty), (700, (0, 100, 700))):
        logits, ids = logits_and_ids(F32, width, 2)
        expected, incoming, wanted = of_whole_rows(log_probs(name, {}), logits, ids)
        parts = parts_of_rows.Parts((0, *cuts[: ranks - 1], width))
        where = parts_of_rows.Where(everywhere(), (Shard(2),), 0, parts)
        place = slice(parts.bounds[rank], parts.bounds[rank + 1])
        own = logits[..., place]
        selecting = Selecting(ids) if name.startswith("selected") else Selecting()
        with fusednorm.use_backend(backend):
            found = parts_of_logits.results_of(name, own, selecting, where, None)
            local = [incoming[0][..., place]] if name == "log_softmax" else incoming
            kept = found[len(expected) :]
            gradient = parts_of_logits.gradient_of(name, local, own, selecting, kept, where)
        for one, other in zip(found, expected, strict=False):
            same_numbers(one, (other[..., place] if other.shape == logits.shape else other).detach())
        same_numbers(gradient, wanted[..., place])


@on_ranks(4)
@pytest.mark.parametrize("name", LOG_PROBS)
def test_parts_of_vocabularies_on_two_dimensions_of_ranks(name):
    """Rows on one, their parts on the other; ids and temperatures of rows that lie elsewhere move to them."""
    temperature = torch.arange(1, 9).view(2, 4) / 4
    (logits, ids), where = logits_and_ids(BF16, 6000, None), mesh(2, 2)
    call = log_probs(name, {"temperature": temperature})
    expected, incoming, wanted = of_whole_rows(call, logits, ids)
    for data in (Shard(0), Shard(1)):
        part = placed(logits, data, Shard(2), where=where, grad=True)
        elsewhere = [placed(t, Replicate(), Shard(0), where=where) for t in (ids, temperature)]
        found = log_probs(name, {"temperature": elsewhere[1]})(part, elsewhere[0])
        assert found[0].placements == (data, Shard(2) if name == "log_softmax" else Replicate())
        given = [placed(d, Replicate(), Shard(1), where=where) for d in incoming]
        [gradient] = torch.autograd.grad(found, part, given)
        assert gradient.placements == (data, Shard(2))
        for one, other in zip((*found, gradient), (*expected, wanted), strict=True):
            same_numbers(one, other.detach())


@on_ranks(2)
def test_log_probabilities_of_parts_of_rows_as_of_whole_rows():
    """Gradients of one of two results, and those that are differentiated again; refusals; short rows are joined."""
    full = torch.randn(2, 3, 4100, dtype=F64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(6).view(2, 3) * 700
    whole_ids, call = placed(ids, Replicate()), log_probs("selected_log_prob_and_entropy", {})
    for rows, one in itertools.product((Shard(0), Shard(1), Replicate(), Shard(2)), (0, 1)):
        leaf, part = full.clone().requires_grad_(), placed(full, rows, grad=True)
        [wanted] = torch.autograd.grad(call(leaf, ids)[one].sum(), leaf)
        of_rows = Replicate() if rows == Shard(2) else rows
        of_part, ones = placed(ids, of_rows), placed(torch.ones(2, 3, dtype=F64), of_rows)
        same(*torch.autograd.grad(call(part, of_part)[one], part, ones), wanted, [rows])
        again = checkpoint(lambda p, one=one, of_part=of_part: call(p, of_part)[one], part, use_reentrant=False)
        same(*torch.autograd.grad(again, part, ones), wanted, [rows])
    [gradient] = torch.autograd.grad(call(leaf, ids)[1].sum(), leaf, create_graph=True)
    [wanted] = torch.autograd.grad((gradient * gradient).sum(), leaf)
    for rows, joined in ((Shard(2), Replicate()), (Shard(1), Shard(1))):
        sharded_ids = whole_ids if rows == Shard(2) else placed(ids, rows)
        leaf = placed(full, rows, grad=True)
        [gradient] = torch.autograd.grad(call(leaf, sharded_ids)[1].sum(), leaf, create_graph=True)
        assert gradient.placements == (joined,)
        [again] = torch.autograd.grad((gradient * gradient).sum(), leaf)
        same_numbers(again, wanted)
    with pytest.raises(IndexError, match="ids must be from 0 to 4099, the places in a row of logits, got 4100"):
        selected_log_prob(part, placed(torch.full((2, 3), 4100), Replicate()))
    out = placed(torch.empty_like(full), Shard(2))
    assert log_softmax(part.detach(), out=out) is out
    same(out, log_softmax(full))
    few = full[..., :900].contiguous()
    short, moved = collectives(functools.partial(log_softmax, placed(few, Shard(2))))
    assert moved == {"all_gather_into_tensor": 1}
    same(short, log_softmax(few), [Replicate()])


def test_an_exchange_is_taken_where_it_moves_fewer_bytes():
    """Of a row on a rank: sums of segments, and 512 numbers at most of one that is cut, or all elements."""
    parts = parts_of_rows.parts_of(4096, 2)
    assert parts.bounds == (0, 2048, 4096)
    assert parts.numbers == 2
    assert parts.moves_fewer_bytes(1, F32, [BF16])
    assert parts_of_rows.parts_of(5, 4).bounds == (0, 2, 4, 5, 5)
    for bounds, numbers in (
        ((0, 1000, 1500), 512),  # 1000 elements of the first segment
        ((0, 100, 1500), 513),  # 924 elements of the first segment, and the second one
        ((0, 1536, 3072), 513),
        ((0, 600, 600, 1000), 512),
        ((0, 10, 1500, 4096), 988),
    ):
        assert parts_of_rows.Parts(bounds).numbers == numbers, bounds
    half = parts_of_rows.Parts((0, 512, 1024))  # 512 numbers in place of 512 elements
    assert half.moves_fewer_bytes(1, F32, [F32, BF16])
    assert not half.moves_fewer_bytes(1, F32, [F32])
    assert not half.moves_fewer_bytes(2, F32, [F32, BF16])
    assert not half.moves_fewer_bytes(1, F64, [F32, BF16])
    assert not half.moves_fewer_bytes(1, F32, [])


REFUSED = (  # where x and the residual lie, and the name of the one that would have to move
    ((Shard(2), Shard(2)), "x"),
    ((Shard(2), Shard(1)), "x"),
    ((Shard(1), Shard(2)), "residual"),
    ((Shard(0), Shard(1)), "residual"),
    ((Shard(0), Replicate()), "residual"),
    ((Replicate(), Shard(0)), "x"),
    ((Partial(), Shard(0)), "x"),
    ((Shard(0), Partial()), "residual"),
    ((Partial(), Partial()), "x"),
)


@on_ranks(2)
@pytest.mark.parametrize(("placements", "name"), REFUSED, ids=str)
def test_in_place_refuses_to_move_what_it_writes(placements, name):
    *operands, weight = tensors(4, 6)
    weight, parts = placed(weight, Replicate()), [in_parts(t, p) for t, p in zip(operands, placements, strict=True)]
    before = [part.to_local().clone() for part in parts]
    with pytest.raises(RuntimeError, match=f"^{name} is written in place, .* call the function that returns new"):
        fused_add_rms_norm_(*parts, weight)
    assert all(torch.equal(part.to_local(), kept) for part, kept in zip(parts, before, strict=True))
    if placements[0] in (Shard(2), Partial()):
        with pytest.raises(RuntimeError, match=r"^x is written in place, .* call the function"):
            rms_norm_(parts[0], weight)


def pending(tensor, seed):
    """Summands of a sum that is pending, which rounds: another one on each rank."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    part = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return DTensor.from_local(part, everywhere(), [Partial()], run_check=False)


def two_norms(x, residual, weight, **flags):
    return rms_norm_add_rms_norm(x, residual, weight, weight, **flags)


#: Calls of (x, residual, weight), whose gradients meet a dtype that is not the operand's.
WIDENED = {
    "sum that is not rounded": functools.partial(fused_add_rms_norm, round_sum=False),
    "two norms": functools.partial(two_norms, round_sum=False),
    "sum": lambda x, residual, weight: (rms_norm_add(x, residual, weight, residual_dtype=weight.dtype),),
    "heads": lambda x, residual, weight: fused_add_rms_norm(x, residual, weight.expand(6, -1), bias=weight),
    "gate": lambda x, residual, weight: (gate(x, residual) + 0 * weight.sum(),),
    "groups": lambda x, residual, weight: (rms_norm_gated(x, residual, weight, group_size=10),),
}


def pending_and_whole(name, dtypes, rows=None):
    """The call, its operands, pending (but for a residual with rows somewhere), and the same in one process."""
    x, residual, weight = tensors(4, 6, *dtypes)
    residual = placed(residual, rows) if rows else pending(residual, 2)
    operands = [pending(x, 1), residual, placed(weight, Replicate())]
    full = [t.full_tensor().detach().requires_grad_() for t in operands]
    return WIDENED[name], [t.requires_grad_() for t in operands], full


def gradients_of(outputs, kind, again):
    """Gradients of the outputs of one process, pending or by columns, and the same in one process."""
    given = [
        pending(y, 3 + i) if kind == "pending" else placed(y.detach().clone(), Shard(2)) for i, y in enumerate(outputs)
    ]
    return [t.requires_grad_(again) for t in given], [t.full_tensor().detach().requires_grad_(again) for t in given]


@on_ranks(2)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("name", WIDENED)
def test_a_sum_is_taken_before_its_dtype_changes(name, again):
    """Of operands and of incoming gradients; and parts of rows are joined before torch adds their elements."""
    call, parts, full = pending_and_whole(name, (F16, F16, F32))
    outputs, expected = call(*parts), call(*full)
    all_same(outputs, expected)
    for kind in ("pending", "columns"):
        given, alone = gradients_of(expected, kind, again)
        how = {"create_graph": again, "retain_graph": True}
        wanted = torch.autograd.grad(expected, full, alone, **how)
        all_same(torch.autograd.grad(outputs, parts, given, **how), wanted)


@on_ranks(2)
@pytest.mark.parametrize("rows", [None, Shard(1)], ids=str)
@pytest.mark.parametrize("name", WIDENED)
def test_second_derivatives(name, rows):
    """Those of a pending sum, and of parts of rows. The specification does not fix the order of their additions."""
    call, parts, full = pending_and_whole(name, (F64, F64, F64), rows)
    outputs, expected = call(*parts), call(*full)
    for kind in ("pending", "columns"):
        given, alone = gradients_of(expected, kind, True)
        second = []
        for leaves, results, incoming in ((parts, outputs, given), (full, expected, alone)):
            first = torch.autograd.grad(results, leaves, incoming, create_graph=True)
            ones = [torch.ones_like(t) for t in first]
            second.append(torch.autograd.grad(first, (*leaves, *incoming), ones, allow_unused=True, retain_graph=True))
        for found, wanted in zip(*second, strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                # At most 24 * 40 additions of terms below 1000: their order changes less than 1000 * 960^2 / 2^53.
                torch.testing.assert_close(found.full_tensor(), wanted, rtol=0, atol=1.1e-7)


#: Calls of (x, residual, weight) with outputs that are given: the calls, and the names of the outputs.
COMPOSED = {
    "bias": (lambda x, r, w, **o: fused_add_rms_norm(x, r, w, bias=w, **o), ("out", "residual_out")),
    "two norms": (two_norms, ("out", "residual_out")),
    "sum": (rms_norm_add, ("residual_out",)),
    "gate": (lambda x, r, w, **o: gate(x, r, **o), ("out",)),
    "rotate": (lambda x, r, w, **o: rotate(x, w[:4], w[4:8], **o), ("out",)),
    "numbers": (
        lambda x, r, w, **o: rms_norm_quant(x, w, quantization=Quantization(torch.int8, per=8), **o),
        ("out", "scale_out"),
    ),
}
OF_ONE_OPERATOR = {
    "norm": (lambda x, r, w, **o: rms_norm(x, w, **o), ("out",)),
    "add": (fused_add_rms_norm, ("out", "residual_out")),
    "residual": (
        lambda x, r, w, residual_out: fused_add_rms_norm(x, r, w, residual_out=residual_out)[1:],
        ("residual_out",),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", COMPOSED | OF_ONE_OPERATOR)
def test_outputs_lie_where_they_are(name):
    """A result goes to them. One of which each rank has a summand is refused before anything is written.

    So are outputs of one operator that are parts of rows, or that lie in different places.
    """
    call, names = (COMPOSED | OF_ONE_OPERATOR)[name]
    full = tensors(4, 6, BF16, BF16, BF16)
    parts = [pending(full[0], 1), placed(full[1], Shard(1)), placed(full[2], Replicate())]
    whole = [t.full_tensor() for t in parts]
    results = call(*whole, **({"residual_out": full[1].clone()} if name == "residual" else {}))
    expected = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))

    def refused(error, where, words):
        given = {key: in_parts(torch.zeros_like(t), p) for (key, t), p in zip(expected.items(), where, strict=True)}
        with pytest.raises(error, match=words):
            call(*parts, **given)
        assert not any(t.to_local().any() for t in given.values())

    for where in itertools.product((Shard(0), Shard(1), Shard(2), Replicate()), repeat=len(names)):
        if name in OF_ONE_OPERATOR and (Shard(2) in where or len({*where}) > 1):
            refused(RuntimeError, where, "^(out|residual_out) is written in place, .* the same as those of")
            continue
        given = {key: placed(torch.zeros_like(t), p) for (key, t), p in zip(expected.items(), where, strict=True)}
        found = call(*parts, **given)
        for actual, key, p in zip(found if isinstance(found, tuple) else (found,), expected, where, strict=True):
            assert actual is given[key]
            same(actual, expected[key], [p])
    for wrong in names if name in COMPOSED else ():
        where = [Partial() if key == wrong else Replicate() for key in names]
        refused(ValueError, where, rf"^{wrong} is written, and its placements are \[Partial\(sum\)\]")


@on_ranks(4)
def test_outputs_with_fewer_rows_than_ranks():
    """torch does not copy to them what lies elsewhere."""
    x, residual, _ = tensors(2, 3, BF16, BF16, BF16)
    where = mesh(2, 2)
    parts = [placed(x, Shard(0), Replicate(), where=where), placed(residual, Replicate(), Shard(1), where=where)]
    for placements in ((Shard(1), Shard(1)), (Shard(2), Shard(2)), (Shard(1), Shard(0))):
        out = placed(torch.zeros_like(x), *placements, where=where)
        assert gate(*parts, out=out) is out
        same(out, gate(x, residual), placements)


@on_ranks(2)
def test_in_place_refuses_summands_by_name():
    """Where a composition writes x or the residual, they have these names."""
    x, residual, weight = tensors(4, 6, BF16, BF16, BF16)
    weight = placed(weight, Replicate())
    calls = {
        "y": lambda a, b: gate_(a, b),
        "x": lambda a, b: rms_norm_gated_(a, b, weight),
        "residual": lambda a, b: rms_norm_add_(b, a, weight),
    }
    for name, call in calls.items():
        summands, other = in_parts(x, Partial()), placed(residual, Shard(1))
        before = summands.to_local().clone()
        with pytest.raises(ValueError, match=rf"^{name} is written, .* redistribute {name} before"):
            call(summands, other)
        assert torch.equal(summands.to_local(), before)
    for rows in (Shard(0), Shard(2)):
        written = placed(x.clone(), rows)
        assert rms_norm_gated_(written, placed(residual, Shard(1)), weight) is written
        same(written, rms_norm_gated(x, residual, weight.full_tensor()), [rows])


@on_ranks(4)
def test_groups_of_rows_that_two_dimensions_of_ranks_divide():
    """torch cannot divide such rows into groups, nor rows of which a rank has a part of a group."""
    x, z, weight = tensors(4, 6)
    leaves = [t.clone().requires_grad_() for t in (x, z, weight)]
    expected = rms_norm_gated(*leaves, group_size=20)
    gradients = torch.autograd.grad(expected, leaves[:2], x)
    for where, rows in ((mesh(2, 2), [Shard(2), Shard(2)]), (everywhere(), [Shard(2)])):
        of_weight = [Shard(0) if p == Shard(2) else p for p in rows]
        parts = [placed(t, *p, where=where, grad=True) for t, p in ((x, rows), (z, rows), (weight, of_weight))]
        y = rms_norm_gated(*parts, group_size=20)
        same(y, expected.detach())
        given = placed(x, *rows, where=where)
        all_same(torch.autograd.grad(y, parts[:2], given, create_graph=True), gradients)


@on_ranks(2)
def test_dtensors_and_plain_tensors_do_not_mix():
    """In torch's words, which name the cure."""
    x, residual, weight = tensors(4, 6)
    rows = placed(x, Shard(0))
    for arguments in ((rows, residual, placed(weight, Replicate())), (rows, placed(residual, Shard(0)), weight)):
        for function in (fused_add_rms_norm, fused_add_rms_norm_):
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor, need to convert all torch.Tensor"):
                function(*arguments)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor, need to convert all torch.Tensor"):
        rms_norm(rows, placed(weight, Replicate()), out=torch.empty_like(x))


QUANTIZERS = ("dtype=int8", "dtype=uint8", "dtype=int8 per=2", f"dtype=int8 per=2 {UP}", f"dtype=int8 per=2 {IN_WORDS}")
RETURNING = [name for name in OPERATORS if getattr(torch.ops.fusednorm, name).default._schema.returns]


def calls_of_operator(name):
    """Arguments that differ in a dtype, in the gradients that are needed, or in which tensor is absent."""
    arguments = getattr(torch.ops.fusednorm, name).default._schema.arguments
    given = {a.name: OPERATORS[name].get(a.name, a.default_value) for a in arguments}
    if name == "quantize":
        given |= {"quantization": QUANTIZERS[0], "scale": None, "zero_point": None}
    yield given
    for a in arguments:
        value, others = given[a.name], ()
        if isinstance(value, torch.dtype):
            others = BF16, F16
        elif a.name == "needs":
            others = map(list, itertools.product((True, False), repeat=len(value)))
        elif a.name == "quantization":
            others = QUANTIZERS
        elif isinstance(value, torch.Tensor) and a.type.kind() == "OptionalType":
            others = (None,)
        yield from (given | {a.name: other} for other in others)


@on_ranks(2)
@pytest.mark.parametrize("name", RETURNING)
def test_calls_of_one_operator_share_no_decision(name):
    """They differ only in arguments that are no tensors, or in which tensor is absent. Gradients may be, too."""
    operator = getattr(torch.ops.fusednorm, name)
    for given in calls_of_operator(name):
        results = operator(*sharded(name, given, Shard(0)).values()), operator(*given.values())
        found, wanted = (outputs if isinstance(outputs, tuple) else (outputs,) for outputs in results)
        for actual, expected, need in zip(found, wanted, given.get("needs", [True] * len(found)), strict=True):
            # The operator that takes the result chooses, and checks, by the dtype of the specification.
            assert actual.dtype == actual._spec.tensor_meta.dtype == expected.dtype, given
            assert actual.shape == expected.shape, given
            assert need or actual.placements == (Replicate(),), given
            if not any(placement.is_partial() for placement in actual.placements):
                assert torch.equal(actual.full_tensor().float(), expected.float())


def signs(batch, sequence, hidden, seed):
    return torch.randint(0, 2, (batch, sequence, hidden), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


@on_ranks(2, 4)
@pytest.mark.parametrize("sharding", ["batch", "sequence"])
def test_the_weights_gradient_is_the_sum_of_the_ranks(sharding):
    """Each rank rounds its sum to the weight's dtype, then they are added: exact sums have the bits of one process."""
    placements, ranks = [SHARDINGS[sharding]], dist.get_world_size()
    # Rows of +-1 have a mean square of 1, so with eps = 0 xhat is +-1. Multiples of 1/4 below 2 then add exactly.
    x = signs(4, 8, HIDDEN, 0).bfloat16()
    dy = (signs(4, 8, HIDDEN, 1) + signs(4, 8, HIDDEN, 2) / 4).bfloat16()
    weight = torch.ones(HIDDEN, dtype=BF16, requires_grad=True)
    expected = torch.autograd.grad(rms_norm(x, weight, 0.0), weight, dy)[0]
    part = placed(weight.detach(), Replicate(), grad=True)
    found = torch.autograd.grad(rms_norm(placed(x, *placements), part, 0.0), part, placed(dy, *placements))[0]
    same(found, expected, [Partial()])
    found, counts = collectives(lambda: found.redistribute(placements=[Replicate()]))
    assert counts == {"all_reduce": 1}

    if ranks == 2:  # a + b is b + a
        x, _, weight = tensors(4, 8)
        dy, _, _ = tensors(4, 8, seed=1)
        weight.requires_grad_()
        half = [t.chunk(2, placements[0].dim) for t in (x, dy)]
        a, b = (
            torch.autograd.grad(rms_norm(rows, weight), weight, given)[0] for rows, given in zip(*half, strict=True)
        )
        part = placed(weight.detach(), Replicate(), grad=True)
        found = torch.autograd.grad(rms_norm(placed(x, *placements), part), part, placed(dy, *placements))[0]
        same(found, a + b, [Partial()])


TWO_DIMENSIONS = (  # where x, the residual, and the rows lie
    ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (Shard(0), Shard(1))),
    ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Shard(0))),
    ((Shard(1), Replicate()), (Shard(1), Replicate()), (Shard(1), Replicate())),
    ((Shard(0), Shard(2)), (Shard(0), Shard(1)), (Shard(0), Shard(1))),
    ((Shard(0), Shard(2)), (Replicate(), Replicate()), (Shard(0), Replicate())),
)


@on_ranks(4)
@pytest.mark.parametrize(("x", "residual", "rows"), TWO_DIMENSIONS, ids=str)
def test_two_dimensions_of_ranks(x, residual, rows):
    """Batches on one, sequences or pending sums on the other."""
    where, full, incoming = mesh(2, 2), tensors(5, 6), tensors(5, 6, seed=1)[:2]
    given = zip(full, (x, residual, (Replicate(), Replicate())), strict=True)
    parts = [placed(t, *placements, where=where, grad=True) for t, placements in given]
    run = both_passes(fused_add_rms_norm, full, parts, incoming)
    assert (run.forward == {}) == (x == residual), run.forward
    all_same(run.outputs, run.expected, rows)
    all_same(run.found[:2], run.wanted[:2])
    assert run.found[2].placements == shares(rows)


@on_ranks(4)
def test_rows_that_were_flattened():
    """[batch, sequence, N] as [batch * sequence, N]: ranks then hold rows that are not one after the other."""
    full = tensors(4, 6)
    *rows, weight = split(full, Shard(0), Shard(1), where=mesh(2, 2))
    parts = [t.flatten(0, 1) for t in rows]
    outputs, counts = collectives(lambda: fused_add_rms_norm(*parts, weight))
    assert counts == {}, counts
    all_same(outputs, [t.flatten(0, 1) for t in fused_add_rms_norm(*full)], parts[0].placements)


@on_ranks(2)
def test_operands_on_different_ranks_are_refused():
    full, other = tensors(4, 6), init_device_mesh("cpu", (2, 1))
    with pytest.raises(RuntimeError, match="cross-mesh"):
        fused_add_rms_norm(*split(full[:2], Shard(0)), placed(full[2], Replicate(), Replicate(), where=other))


@on_ranks(2, 4)
@pytest.mark.parametrize("style", ["torch's", "ours"])
def test_sequence_parallel_rms_norm(style):
    make = {"torch's": SequenceParallel, "ours": fusednorm.distributed.SequenceParallel}[style]
    x, *_ = tensors(2, 8)
    y = fusednorm.RMSNorm(HIDDEN, dtype=BF16)(x)
    own = x.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    for given, local in itertools.product((own, placed(x, Shard(0))), (True, False)):
        norm = parallelize_module(fusednorm.RMSNorm(HIDDEN, dtype=BF16), everywhere(), make(use_local_output=local))
        actual = norm(given)
        if local:
            assert not isinstance(actual, DTensor)
            actual = DTensor.from_local(actual, everywhere(), [Shard(1)])
        same(actual, y, [Shard(1)])
        actual.sum().backward()
        assert norm.weight.grad.placements == (Partial(),)


@on_ranks(2, 4)
def test_sequence_parallel_add_rms_norm():
    """Local parts of the sequence or DTensors, a residual by position or by name, or none where the stream begins."""
    x, residual, weight = tensors(8, 7)  # the sequence does not divide
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = fusednorm.AddRMSNorm(HIDDEN, dtype=BF16)
    with torch.no_grad():
        plain.weight.copy_(weight)
    for dim, local in ((0, False), (0, True), (1, False)):
        norm = fusednorm.AddRMSNorm(HIDDEN, dtype=BF16)
        with torch.no_grad():
            norm.weight.copy_(weight if rank == 0 else torch.nan)  # all take the first rank's
        style = fusednorm.distributed.SequenceParallel(sequence_dim=dim, use_local_output=local)
        norm = parallelize_module(norm, everywhere(), style)
        a, b = placed(x, Shard(0)), placed(residual, Replicate())
        calls = [norm(a, b), norm(a, residual=b)]
        if dim == 0:
            own, own_residual = (t.chunk(ranks)[rank] for t in (x, residual))
            calls += [norm(own, own_residual), norm(own, residual=own_residual)]
        for outputs in calls:
            for actual, wanted in zip(outputs, plain(x, residual), strict=True):
                assert isinstance(actual, DTensor) == (not local)
                if local:
                    actual = DTensor.from_local(actual, everywhere(), [Shard(dim)])
                same(actual, wanted.detach(), [Shard(dim)])
        y, total = norm(a)
        assert isinstance(y, DTensor) == isinstance(total, DTensor) == (not local)
        if not local:
            same(y, plain(x)[0].detach(), [Shard(dim)])
            same(total, x, [Shard(dim)])
    assert repr(style) == "SequenceParallel(sequence_dim=1, use_local_output=False)"


@on_ranks(2)
def test_torchs_sequence_parallel_may_not_lose_the_residual():
    x, residual, _ = tensors(2, 8)
    norm = parallelize_module(fusednorm.AddRMSNorm(HIDDEN, dtype=BF16), everywhere(), SequenceParallel())
    a, b = placed(x, Shard(1)), placed(residual, Shard(1))
    with pytest.raises(RuntimeError, match=r"the residual is lost; .* use fusednorm.distributed.SequenceParallel"):
        norm(a, b)
    plain = fusednorm.AddRMSNorm(HIDDEN, dtype=BF16)
    same(norm(a)[0], plain(x)[0].detach())
    all_same(norm(a, residual=b), plain(x, residual))
    before = fusednorm.AddRMSNorm(HIDDEN, dtype=BF16)
    before.register_forward_pre_hook(lambda module, inputs: None)
    before.register_forward_pre_hook(lambda module, inputs: inputs)
    before.register_forward_pre_hook(lambda module, args, kwargs: (args[:1], {"residual": args[1]}), with_kwargs=True)
    assert torch.equal(before(x, residual)[0], plain(x, residual)[0])


class Attention(torch.nn.Module):
    """Causal, with heads that share keys and values; as many heads as this rank's columns make."""

    def __init__(self, hidden, heads, shared, **where):
        super().__init__()
        self.size = hidden // heads
        self.q, self.o = (torch.nn.Linear(hidden, hidden, bias=False, **where) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(hidden, shared * self.size, bias=False, **where) for _ in range(2))

    def forward(self, y):
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Module):
    """Llama's, with a gate."""

    def __init__(self, hidden, inner, **where):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False, **where) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False, **where)

    def forward(self, y):
        return self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Layer(torch.nn.Module):
    """A layer of Llama's decoder, without the rotation of positions."""

    def __init__(self, hidden, inner, heads, shared, **where):
        super().__init__()
        self.before_attention, self.before_mlp = (fusednorm.AddRMSNorm(hidden, 1e-5, **where) for _ in range(2))
        self.attention, self.mlp = Attention(hidden, heads, shared, **where), FeedForward(hidden, inner, **where)

    def forward(self, x, residual=None):
        y, residual = self.before_attention(x, residual)
        y, residual = self.before_mlp(self.attention(y), residual)
        return self.mlp(y), residual

    def parallelize(self, where):
        """Tensor parallelism, and the rows between the matrices sharded along the sequence."""
        by_columns = ColwiseParallel()
        by_rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {"before_attention": fusednorm.distributed.SequenceParallel(), "attention": gathered}
        plan |= {"before_mlp": fusednorm.distributed.SequenceParallel(), "mlp": gathered}
        plan |= {f"attention.{name}": by_columns for name in "qkv"} | {"attention.o": by_rows}
        plan |= {"mlp.gate": by_columns, "mlp.up": by_columns, "mlp.down": by_rows}
        parallelize_module(self, where, plan)


class Decoder(torch.nn.Module):
    """Layers between an embedding and a head; the last norm takes no residual."""

    def __init__(self, dtype, hidden=HIDDEN, vocabulary=24, layers=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, hidden, dtype=dtype)
        self.layers = torch.nn.ModuleList(Layer(hidden, 48, 8, 4, dtype=dtype) for _ in range(layers))
        self.last = fusednorm.RMSNorm(hidden, 1e-5, dtype=dtype)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens):
        x, residual = self.embedding(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.head(self.last(x + residual))

    def parallelize(self, where):
        for layer in self.layers:
            layer.parallelize(where)
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "last": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(self, where, plan)

    def shard(self, where, **options):
        for layer in self.layers:
            fully_shard(layer, mesh=where, **options)
        fully_shard(self, mesh=where, **options)

    def norms(self):
        return [module for module in self.modules() if isinstance(module, fusednorm.RMSNorm)]


def decoder(dtype):
    torch.manual_seed(0)
    model = Decoder(dtype)
    for norm in model.norms():
        torch.nn.init.normal_(norm.weight, 1, 0.1)
    return model


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def watch(model):
    """What goes through every norm from now on: its inputs, outputs, and the module."""
    seen = []
    for norm in model.norms():
        norm.register_forward_hook(lambda module, inputs, outputs: seen.append((module, inputs, outputs)))
    return seen


def norms_have_the_bits_of_one_process(seen):
    assert len(seen) == 5
    for norm, inputs, outputs in seen:
        given, weight = [whole(t) for t in inputs if t is not None], whole(norm.weight)
        outputs = [whole(t) for t in (outputs if isinstance(outputs, tuple) else [outputs])]
        if len(given) == 2:
            expected = fused_add_rms_norm(*given, weight, 1e-5)
        else:
            expected = rms_norm(*given, weight, 1e-5), given[0]
        for actual, wanted in zip(outputs, expected, strict=False):
            assert torch.equal(actual, wanted)


@on_ranks(2, 4)
def test_fsdp_trains_with_the_bits_of_one_process():
    """Two ranks: every step, since a + b is b + a and a half is exact. Four: the first, in which nothing was added."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = torch.randint(24, (ranks, 3, 9), generator=torch.Generator().manual_seed(1))
    plain, sharded = decoder(F32), decoder(F32)
    sharded.shard(everywhere())
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (plain, sharded)]
    for _ in range(4 if ranks == 2 else 1):
        seen = watch(sharded)
        loss = loss_of(sharded, tokens[rank])
        outputs = [out for _, _, outs in seen for out in (outs if isinstance(outs, tuple) else [outs])]
        seen = watch(plain)
        losses = [loss_of(plain, batch) for batch in tokens]
        own = seen[rank * len(seen) // ranks :][: len(seen) // ranks]
        expected = [out for _, _, outs in own for out in (outs if isinstance(outs, tuple) else [outs])]
        assert len(outputs) == len(expected) == 9
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert torch.equal(loss, losses[rank])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        gradients = [torch.autograd.grad(loss, list(plain.parameters())) for loss in losses]
        for parameter, *shares_of_it in zip(plain.parameters(), *gradients, strict=True):
            parameter.grad = sum(shares_of_it) / ranks
        for optimizer in optimizers:
            optimizer.step()
        for model in (plain, sharded):
            for norm in model.norms():
                norm._forward_hooks.clear()
    if ranks == 2:
        assert all(torch.equal(whole(a), b) for a, b in zip(sharded.parameters(), plain.parameters(), strict=True))


@on_ranks(2)
def test_fsdp_casts_a_float32_residual_unless_told_not_to():
    """What the documentation warns of."""
    for cast, dtype in ((True, BF16), (False, F32)):
        layer, seen = Layer(HIDDEN, 48, 8, 4), []
        policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast)
        fully_shard(layer, mesh=everywhere(), mp_policy=policy)
        layer.before_mlp.register_forward_hook(lambda module, inputs, outputs, seen=seen: seen.append(outputs))
        layer(torch.ones(2, 3, HIDDEN, dtype=BF16), torch.ones(2, 3, HIDDEN))
        assert [t.dtype for t in seen[0]] == [BF16, dtype]


@on_ranks(2, 4)
@pytest.mark.parametrize("data_ranks", [1, 2])
def test_tensor_parallel_decoder(data_ranks):
    """Sequences on ranks, and batches with FSDP: the norms' bits are those of one process, and it learns the same."""
    ranks = dist.get_world_size() // data_ranks
    where = mesh(data_ranks, ranks, names=("data", "model"))
    data, rank = where["data"], where["data"].get_local_rank()
    tokens = torch.randint(24, (data_ranks, 3, 9), generator=torch.Generator().manual_seed(1))
    for dtype in (F32, F64):
        plain, model = decoder(dtype), decoder(dtype)
        model.parallelize(where["model"])
        if data_ranks > 1:
            model.shard(data)
        seen = watch(model)
        loss = loss_of(model, tokens[rank])
        norms_have_the_bits_of_one_process(seen)
        if dtype == F32:
            continue
        # In float64 the matrix products' other order of sums is 2^-52 of the terms times their number, some thousands,
        # and what the layers make of it: far from 1e-9. A sum that is missing, or made twice, is not.
        expected = torch.stack([loss_of(plain, batch) for batch in tokens])
        torch.testing.assert_close(whole(loss), expected[rank].detach(), rtol=1e-9, atol=0)
        loss.backward()
        expected.mean().backward()
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            scale = wanted.grad.abs().max().item()
            torch.testing.assert_close(whole(found.grad), wanted.grad, rtol=0, atol=1e-9 * scale, msg=name)
        torch.optim.SGD(model.parameters(), 0.5).step()
        torch.optim.SGD(plain.parameters(), 0.5).step()
        for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(found), wanted.detach(), rtol=0, atol=1e-9, msg=name)


@on_ranks(2)
def test_compiled():
    """Functions of DTensors, in place and not, with gradients, in one graph, in which nothing is communicated."""
    full = tensors(4, 6)
    incoming = [placed(t, Shard(1)) for t in tensors(4, 6, seed=1)[:2]]
    called = []

    def compiler(graph, _):
        called.extend(str(node.target).split(".")[0] for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def forward(x, residual, weight):
        y, total = fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
        return rms_norm(y, weight, round_norm=True), total

    def in_place(x, residual, weight):
        x, residual = x.clone(), residual.clone()
        fused_add_rms_norm_(x, residual, weight)
        return rms_norm_(x, weight), residual

    parts = split(full, Shard(1))
    backend = aot_autograd(fw_compiler=compiler)
    for function in (forward, in_place):
        all_same(torch.compile(function, fullgraph=True, backend=backend)(*parts), function(*full), [Shard(1)])
    leaves = [part.requires_grad_() for part in parts]
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    found = [torch.autograd.grad(function(*leaves), leaves, incoming) for function in (forward, compiled)]
    for eager, other in zip(*found, strict=True):
        assert eager.placements == other.placements
        assert torch.equal(eager.to_local(), other.to_local())
    assert called.count("fusednorm") == 6  # in place they are wrapped
    assert "_c10d_functional" not in called
    parts = [placed(t, Shard(2)) for t in full[:2]] + [placed(full[2], Replicate())]
    all_same(torch.compile(forward, fullgraph=True, backend=backend)(*parts), forward(*full), [Replicate()])


def in_a_new_process(code):
    """What it prints. Its default process group has 2 ranks, of which it is the first, and the other is made up."""
    prelude = """
import sys, warnings
import torch, fusednorm
assert not [name for name in sys.modules if "distributed.tensor" in name], "importing fusednorm takes two seconds more"
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
from torch.distributed.tensor import DTensor, Shard
x = DTensor.from_local(torch.rand(2, 3, 8), mesh, [Shard(1)], run_check=False)
assert "fusednorm.torch_ops.sharding" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", prelude + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_call_registers_the_rules():
    """Importing fusednorm does not, because that would import what most programs never use."""
    code = """
import os
calls = {
    "rms_norm": lambda: fusednorm.rms_norm(x),
    "rms_norm_": lambda: fusednorm.rms_norm_(x),
    "fused_add_rms_norm": lambda: fusednorm.fused_add_rms_norm(x, x)[1],
    "fused_add_rms_norm_": lambda: fusednorm.fused_add_rms_norm_(x, x.clone())[1],
    "compiled": lambda: torch.compile(lambda x: fusednorm.rms_norm(x), fullgraph=True, backend="aot_eager")(x),
}
torch.set_num_threads(1)
for name, call in calls.items():
    if not os.fork():  # each is the first
        y = call()
        print(name, y.placements, list(y.shape), "fusednorm.torch_ops.sharding" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""
    names = ["rms_norm", "rms_norm_", "fused_add_rms_norm", "fused_add_rms_norm_", "compiled"]
    assert in_a_new_process(code) == "".join(f"{name} (Shard(dim=1),) [2, 6, 8] True\n" for name in names)


@pytest.mark.parametrize(
    ("removal", "what"),
    [
        ("import torch.distributed.tensor._op_schema as schema; del schema.OpSpec", "OpSpec"),
        pytest.param(
            *("del type(DTensor._op_dispatcher.sharding_propagator).register_op_strategy", "register_op_strategy"),
            marks=pytest.mark.release,
        ),
    ],
)
def test_a_torch_without_what_the_rules_need_is_named(removal, what):
    """Where an operand is a DTensor; other calls go on, also compiled ones."""
    code = f"""
{removal}
plain = x.to_local()
wanted = fusednorm.rms_norm(plain)
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(lambda x: fusednorm.rms_norm(x), fullgraph=True, backend=backend)
    assert torch.equal(compiled(plain), wanted)
compiled = torch.compile(lambda x: fusednorm.rms_norm(x), backend="eager")
for call in (lambda: fusednorm.rms_norm(x), lambda: fusednorm.rms_norm_(x), lambda: compiled(x)):
    try:
        call()
    except ImportError as error:
        print(str(error).splitlines()[0])
"""
    lines = in_a_new_process(code).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.match(
            rf"fusednorm's rules for DTensor need names that torch \S+ does not have \(.*{what}.*\); install torch 2",
            line,
        )


def test_plain_calls_do_not_load_the_rules():
    """Not even where torch's DTensor is loaded, as a model's library may do."""
    code = """
compiled = torch.compile(lambda x, y: fusednorm.fused_add_rms_norm(x, y, out=y), fullgraph=True, backend="aot_eager")
plain = x.to_local()
compiled(plain, torch.empty_like(plain))
with torch._subclasses.FakeTensorMode():
    fusednorm.rms_norm_(torch.empty(2, 8))
print("fusednorm.torch_ops.sharding" in sys.modules)
"""
    assert in_a_new_process(code) == "False\n"


class Local(TorchDispatchMode):
    """Notes what torch.ops.fusednorm is given, and gives, on this rank; DTensor goes first."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if function.namespace == "fusednorm" and FakeTensor not in types:  # by which DTensor infers whole shapes
            shapes = [list(t.shape) for t in (*args, *result) if isinstance(t, torch.Tensor)]
            self.calls.append((function.name().removeprefix("fusednorm::"), shapes))
        return result


@on_ranks(512, backend="fake")
def test_a_layer_of_70_billion_parameters_on_512_ranks():
    """A decoder layer of Llama 70B on the meta device, 64 x 8 ranks: no rank makes a row that is not its own."""
    batch, sequence, hidden = 1, 8192, 8192  # of each of the 64 groups
    where = init_device_mesh("cpu", (64, 8), mesh_dim_names=("data", "model"))
    part, shared = [batch, sequence // 8, hidden], [hidden]
    layer = Layer(hidden, 28672, 64, 8, device="meta", dtype=BF16)
    layer.parallelize(where["model"])

    def run(layer, local):
        x, residual = (
            DTensor.from_local(t, where["model"], [Shard(1)], run_check=False).requires_grad_() for t in local
        )
        outputs, forward = collectives(lambda: layer(x, residual))
        _, backward = collectives(lambda: torch.autograd.backward(outputs, [t.detach() for t in outputs]))
        return x, residual, forward, backward

    with Local() as local:
        stream = [torch.empty(part, device="meta", dtype=dtype) for dtype in (BF16, F32)]
        x, residual, forward, backward = run(layer, stream)
        weights = [norm.weight.grad for norm in (layer.before_attention, layer.before_mlp)]
        assert [t.placements for t in weights] == [(Partial(),)] * 2
        _, weights = collectives(lambda: [t.redistribute(placements=[Replicate()]) for t in weights])
    rstd = part[:2]
    assert (
        local.calls
        == [("fused_add_rms_norm", [part, part, shared, part, part, rstd])] * 2
        + [("backward", [part, part, part, rstd, shared, part, part, shared])] * 2
    )
    assert forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert backward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert weights == {"all_reduce": 2}
    for tensor in (x.grad, residual.grad):
        assert (tensor.placements, list(tensor.to_local().shape)) == ((Shard(1),), part)
    for name, shapes in local.calls:
        print(f"{name:20}", *shapes)
    print(f"layer, forward: {forward}; backward: {backward}; its norms' weights: {weights}")

    # With FSDP too, which takes no parameters without memory: a layer of the same shape, but small.
    layer = Layer(512, 1024, 64, 8)
    layer.parallelize(where["model"])
    fully_shard(layer, mesh=where["data"])
    *_, forward, backward = run(layer, [torch.zeros(1, 4, 512)] * 2)
    assert forward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "_allgather_base_": 1}
    assert backward == {
        "all_gather_into_tensor": 2,
        "reduce_scatter_tensor": 2,
        "_reduce_scatter_base_": 1,
        "all_reduce": 2,
    }
    print(f"with FSDP, forward: {forward}; backward: {backward}")

    # The same rows as one tensor on all 512 ranks.
    rows, everything = [Shard(0), Shard(1)], [Replicate(), Replicate()]
    operands = [torch.empty(part, device="meta", dtype=dtype) for dtype in (BF16, F32, BF16, F32)]
    x, residual, *incoming = (DTensor.from_local(t, where, rows, run_check=False) for t in operands)
    weight = torch.empty(shared, device="meta", dtype=BF16)
    weight = DTensor.from_local(weight, where, everything, run_check=False)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    assert list(x.shape) == [64, sequence, hidden]
    with Local() as local:
        outputs, forward = collectives(lambda: fused_add_rms_norm(*leaves))
        found, backward = collectives(lambda: torch.autograd.grad(outputs, leaves, incoming))
    assert [shapes for _, shapes in local.calls] == [
        [part, part, shared, part, part, rstd],
        [part, part, part, rstd, shared, part, part, shared],
    ]
    assert forward == backward == {}
    assert found[2].placements == (Partial(), Partial())
    print(f"{list(x.shape)} on 512 ranks, forward: {forward}; backward: {backward}")
