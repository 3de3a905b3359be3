"""Fused equals unfused, and a row is a row: the second and the third promise of docs/spec.md."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import fusednorm
from fusednorm.conformance import cases
from fusednorm.conformance.cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    TABLES,
    Case,
    bytes_of,
    call,
    covering,
    dtype_name,
    listed,
    operands,
)
from fusednorm.declare.declaration import WHOLE
from fusednorm.operations.listed import every

pytestmark = pytest.mark.promise("a row is a row")


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("residual", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", but=["bfloat16-float32", "float32-float16", "float64-bfloat16"])
@pytest.mark.left_out("cuda", but=["bfloat16-float32", "float64-bfloat16"])
@pytest.mark.left_out("triton_ptx", but=["bfloat16-float32"])
def test_fused_equals_unfused(mode, agree, x, residual):
    """Compares with `s = x + residual; rms_norm(s, weight)`, where torch rounds the sum to the residual's dtype."""
    residual = F64 if x == F64 else residual
    turn = DTYPES.index(x) + DTYPES.index(residual)
    sizes, kinds = (1, 33, 128, 1500, 4096), ("normal", "ties", "outliers", "subnormal")
    for hidden, data, (round_norm, offset) in covering(sizes, kinds, ((False, 0.0), (True, 1.0)), turn=turn):
        case = Case(rows=4, hidden=hidden, x=x, residual=residual, weight=x, data=data)
        gx, gresidual, weight = operands(case)
        s = (gx.to(torch.promote_types(F32, x)) + gresidual.to(torch.promote_types(F32, x))).to(residual)
        flags = {"round_norm": round_norm, "weight_offset": offset}
        y, total = fusednorm.fused_add_rms_norm(gx, gresidual, weight, **flags)
        agree(total, s, f"{case}: the sum")
        if round_norm and x != residual:
            continue  # rms_norm(s) would round to the residual's dtype, the fused call to x's
        unfused = fusednorm.rms_norm(s, weight, **flags, out=torch.empty_like(y))
        agree(y, unfused, f"{case}: y")


# Row counts on both sides of every threshold of the backends: threads, and rows per thread.
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("hidden", [64, 100, 1000, 1024, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
@pytest.mark.left_out("triton", of=["*-1000", "*-4096"])
@pytest.mark.left_out("cuda", "triton_ptx", of=["float16-*", "float32-1000", "float64-1000"])
@pytest.mark.left_out("triton_ptx", of=["float64-*", "float32-100"])
def test_rows_do_not_depend_on_the_batch(mode, agree, dtype, hidden):
    """The same rows alone, in batches of many sizes, and at several positions."""
    x, residual, weight = operands(Case(rows=257, hidden=hidden).of(dtype))
    whole, whole_total = fusednorm.fused_add_rms_norm(x, residual, weight)
    for rows in ROW_COUNTS:
        for begin in {0, 1, 257 - rows} - {258 - rows}:
            part = slice(begin, begin + rows)
            found = fusednorm.fused_add_rms_norm(x[part], residual[part], weight)
            agree(found, (whole[part], whole_total[part]), f"{rows} rows from {begin}")


# Sizes at which new outputs bypass the cache on x86: in whole vectors, in tails, and several rows at once.
LARGE = (
    Case(hidden=4096).of(BF16),
    Case(hidden=4096, round_sum=False, round_norm=True).of(BF16, weight=F32),
    Case(hidden=1040).of(F32),
    Case(hidden=64).of(F32),
    Case(hidden=2048, round_norm=True).of(F16, residual=None),
    Case(hidden=1600, weight_offset=1.0).of(F16, residual=F32),
    Case(hidden=480, residual=F16, round_sum=False, out=F32).of(BF16),
)


@pytest.mark.large
@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.left_out("triton", "triton_cpu")
@pytest.mark.left_out("cuda", "triton_ptx", but=["*hidden=480*"])
def test_rows_do_not_depend_on_the_size_of_the_outputs(mode, agree, case):
    """Large new outputs, aligned to cache lines or not, in one call and in several."""
    out, residual_bytes = case.out or case.x, case.residual.itemsize if case.residual else 0
    rows = (8 << 20) // (case.hidden * (out.itemsize + residual_bytes)) + 11
    x, residual, weight = operands(replace(case, rows=rows))

    def write(part, y, total):
        if residual is None:
            call(case, x[part], None, weight, out=y)
        else:
            call(case, x[part], residual[part], weight, out=y, residual_out=total)

    def outputs(offset=0):
        new = [torch.zeros(rows * case.hidden + offset, dtype=dtype) for dtype in (out, case.residual or out)]
        return [tensor[offset:].view(rows, case.hidden) for tensor in new]

    pieces = outputs()
    for part in (slice(begin, begin + rows // 7) for begin in range(0, rows, rows // 7)):
        write(part, *(tensor[part] for tensor in pieces))
    for offset in (0, 64, 1):
        whole = outputs(offset)
        write(slice(None), *whole)
        agree(whole, pieces, f"{offset} elements off")


def results(operation, given, incoming=None, wanted=None, **how):
    """Outputs, 8 bits as bytes, and exact gradients by name, if any; without incoming ones, from those of outputs.

    ``wanted``: the names of the operands whose gradients are wanted; None: all.
    """
    leaves = {name: t.detach() for name, t in given.items() if isinstance(t, torch.Tensor) and name not in TABLES}
    leaves = {name: t for name, t in leaves.items() if wanted is None or name in wanted}
    for t in leaves.values():
        t.requires_grad_(operation.differentiable)
    outputs = listed(operation.function(**given | leaves))
    values = bytes_of(t.detach() for t in outputs)
    if not (operation.differentiable and operation.exact_gradients):
        return values, {}
    pairs = [pair for pair in zip(outputs, incoming or values, strict=True) if pair[0].requires_grad]
    found = torch.autograd.grad([t for t, _ in pairs], tuple(leaves.values()), [d for _, d in pairs], **how)
    return values, dict(zip(leaves, found, strict=True))


def apart(t):
    """The same rows between other elements, which are sevens."""
    whole = torch.full((*t.shape[:-1], t.shape[-1] + 3), 7.0).to(t.dtype)
    return whole[..., :-3].copy_(t)


def in_two_levels(t):
    """The same rows in threes, between other rows, whose elements are sevens."""
    threes = t.unflatten(0, (-1, 3))
    whole = torch.full((len(threes), 6, *t.shape[1:]), 7.0).to(t.dtype)
    return whole[:, 1:4].copy_(threes)


#: The same rows elsewhere in memory.
ELSEWHERE = {
    "rows apart": apart,
    "two levels": in_two_levels,
    "two levels, turned": lambda t: in_two_levels(t).transpose(0, 1),
    "elements apart": lambda t: torch.stack((t, t), -1)[..., 0],
    "columns": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "a sign that is not applied": lambda t: torch._neg_view(-t),
    "one row for all": lambda t: t[:1].expand_as(t),
}


#: Each operation, and some with flags that a backend need not know; test_attention.py has those whose rows meet keys.
OPERATIONS = {
    name: operation._replace(sample=operation.needed) for name, operation in every().items() if not operation.of_keys
}
OPERATIONS |= {f"{name} with a bias": every()[name] for name in ("rms_norm", "fused_add_rms_norm")}
OPERATIONS["gate first"] = every()["rms_norm_gated"]._replace(sample={"norm_before_gate": False, "group_size": 32})
#: The same, each with the number of rows, and their length.
SAMPLES = {name: (operation, 12, 256) for name, operation in OPERATIONS.items()}
for shape in ((12, 31), (600, 128), (12, 1050), (6, 18_432)):
    SAMPLES |= {f"{name} of {shape}": (OPERATIONS[name], *shape) for name in ("rms_norm", "fused_add_rms_norm")}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.left_out("triton_cpu", but=["fused_add_rms_norm of (12, 31)-bfloat16"])
@pytest.mark.left_out("triton", but=["gate-*", "*-bfloat16"])
@pytest.mark.left_out(
    "cuda",
    but=[
        *("gate-bfloat16", "gate first-bfloat16", "qk_norm_rope-bfloat16"),
        *("rms_norm_add_rms_norm-bfloat16", "fused_add_rms_norm_quant-bfloat16"),
        *("log_softmax-bfloat16", "selected_log_prob_and_entropy-bfloat16", "fused_add_layer_norm-bfloat16"),
        "fused_add_rms_norm of (600, 128)-bfloat16",
        *("fused_add_rms_norm of (12, 1050)-bfloat16", "fused_add_rms_norm with a bias-bfloat16"),
    ],
)
@pytest.mark.left_out("triton_ptx", but=["fused_add_rms_norm of (6, 18432)-bfloat16", "rotate-bfloat16"])
def test_each_operation(mode, agree, name, dtype):
    """Rows alone, and elsewhere in memory; outputs in given memory, and in place, which is all that is written.

    Gradients have the same bits where only some of them are wanted, and where they are differentiated again.
    """
    operation, count, hidden = SAMPLES[name]
    given = operation.of_sample(*operands(Case(count, hidden).of(dtype)))
    of_rows = {key for key in given if operation.operands.get(key) not in WHOLE}
    rows = {key: t for key, t in given.items() if key in of_rows and isinstance(t, torch.Tensor) and len(t) == count}
    outputs, gradients = results(operation, given)
    for few in (*itertools.combinations(gradients, 1), *itertools.combinations(gradients, 2)):
        found, of_found = results(operation, given, outputs, few)
        agree((*found, *of_found.values()), (*outputs, *(gradients[key] for key in few)), f"{name}, gradients of {few}")
    if gradients:
        _, again = results(operation, given, [t.clone().requires_grad_() for t in outputs], create_graph=True)
        assert all(t.requires_grad for t in again.values())
        agree(again.values(), gradients.values(), f"{name}, gradients that are differentiated")
    for row in (0, count // 2, count - 1):
        found, _ = results(operation, given | {key: t[row] for key, t in rows.items()})
        agree(found, [t[row] for t in outputs], f"{name}, row {row}")
    for place, move in ELSEWHERE.items():
        moved = {
            key: move(t) for key, t in given.items() if key in rows or (place == "elements apart" and key in gradients)
        }
        wanted = [move(t) for t in outputs]
        found, of_found = results(operation, given | moved, wanted)
        agree(found, wanted, f"{name}, {place}")
        for key, t in gradients.items():
            if key in rows:
                agree(of_found[key], move(t), f"{name}, {place}, gradient of {key}")
            elif place not in ("one row for all", "two levels, turned"):  # there the sum over rows is another
                agree(of_found[key], t, f"{name}, {place}, gradient of {key}")
    new = listed(operation.function(**given))
    for move in (apart, in_two_levels):
        laid = {key: move(t) for key, t in rows.items()}
        of_results = zip(operation.results, new, strict=False)
        memory = {result.name: laid.get(result.overwrites, move(t)) for result, t in of_results}
        if memory.keys() <= operation.parameters.keys():
            found = listed(operation.function(**given | laid, **memory))
            agree(bytes_of(found), [move(t) for t in outputs], f"{name}, given memory")
            assert all(t is memory[result.name] for t, result in zip(found, operation.results, strict=False))
        if operation.in_place is not None:
            laid = {key: move(t) for key, t in rows.items()}
            agree(listed(operation.in_place(**given | laid)), [move(t) for t in outputs], f"{name}, in place")
        for t in (*memory.values(), *laid.values()):
            t.fill_(7)
            assert (t._base.float() == 7).all(), "memory around the rows was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.left_out
def test_rows_do_not_depend_on_the_number_of_threads(mode, agree, threads, name, dtype):
    """Each shape with each number of threads, in every second dtype unless every call is asked for."""
    for place, (rows, hidden) in enumerate(((3, 20_096), (69, 896), (600, 128))):
        given = OPERATIONS[name].of_sample(*operands(Case(rows, hidden).of(dtype)))
        if "bias" in OPERATIONS[name].sample:  # a weight and a bias for each of three heads
            tensors = {key: t for key, t in given.items() if isinstance(t, torch.Tensor)}
            given |= {key: t.unflatten(0, (-1, 3)) if len(t) == rows else t * t[:3, None] for key, t in tensors.items()}
        threads(1)
        alone, gradients = results(OPERATIONS[name], given)
        counts = (2, 3, 8)
        for count in counts if cases.EVERYTHING else counts[(place + DTYPES.index(dtype)) % 2 :: 2]:
            threads(count)
            found, of_found = results(OPERATIONS[name], given)
            agree((*found, *of_found.values()), (*alone, *gradients.values()), f"{rows} rows, {count} threads")


def test_outputs_in_the_place_of_other_operands(mode, agree):
    """q's results where k was, and k's where q was; products in their gates, alone and beside the other rows."""
    q, k, weight = operands(Case(24, 64).of(BF16))
    z = k.clone()
    agree(fusednorm.gate(q, z, out=z), fusednorm.gate(q, k), "gate")
    both = torch.cat((k, q), -1)
    agree(fusednorm.silu_and_mul(both, out=both[:, :64]), fusednorm.silu_and_mul(k, q), "silu_and_mul")
    q, k, (cos, sin, _) = q.view(6, 4, 64), k.view(6, 4, 64), operands(Case(6, 32, seed=3).of(F32))
    wanted = fusednorm.qk_norm_rope(q, k, weight, weight, cos, sin)
    agree(fusednorm.qk_norm_rope(q, k, weight, weight, cos, sin, q_out=k, k_out=q), wanted, "qk_norm_rope")


@pytest.mark.left_out("triton_cpu")
def test_rows_do_not_depend_on_the_calling_thread(mode, agree):
    """Eight Python threads at once, each with other data, each call compared with the same call made alone."""
    x, residual, weight = operands(Case(rows=64, hidden=1024).of(BF16))
    alone = [fusednorm.fused_add_rms_norm(x.roll(k, 0), residual, weight) for k in range(8)]

    def work(k):
        with mode.active():
            return [fusednorm.fused_add_rms_norm(x.roll(k, 0), residual, weight) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        for k, results in enumerate(pool.map(work, range(8))):
            for found in results:
                agree(found, alone[k], f"thread {k}")


@pytest.mark.left_out("triton", "triton_cpu")
def test_repetition(mode, agree):
    x, residual, weight = operands(Case(rows=40, hidden=1500).of(F16))
    first, _ = fusednorm.fused_add_rms_norm(x, residual, weight)
    for _ in range(100):
        agree(fusednorm.fused_add_rms_norm(x, residual, weight)[0], first, "again")


FLUSH = """
import sys, torch, fusednorm
from fusednorm.conformance.plugin import Mode
torch.set_num_threads(2)  # several sums of blocks of rows, added by the caller
x, weight = torch.full((64, 1024), 2.0**-130), torch.ones(1024, requires_grad=True)
ones, dy = torch.ones_like(x), torch.full_like(x, 2.0**-135)
if not torch.set_flush_denormal(True):
    sys.exit("this processor cannot flush subnormals: nothing was tested")
with Mode(*sys.argv[1:]).active():
    _, total = fusednorm.fused_add_rms_norm(x, x, eps=0.0, residual_out=torch.empty_like(x))
    (dweight,) = torch.autograd.grad(fusednorm.rms_norm(ones, weight, 0.0), weight, dy)
flushes = (x[0] + 0.0).view(torch.int32).eq(0).all().item()  # the caller's setting is as it was
print(flushes, *(t.view(torch.int32).unique().tolist() for t in (total, dweight)))
"""


@pytest.mark.left_out("triton_cpu")
def test_subnormals_survive_a_caller_that_flushes_them(mode):
    if mode.flushes_with_caller:
        pytest.skip("NumPy's operations follow torch's setting, as do torch's without the C library (docs/spec.md)")
    if mode.on_gpu:
        pytest.skip("a GPU does not see its caller's setting")
    run = [sys.executable, "-P", "-c", FLUSH, mode.backend, *([mode.variant] if mode.variant else [])]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout == f"True [{1 << 20}] [{1 << 20}]\n"  # 2^-129, and 64 times 2^-135
