"""C launches the CUDA kernels that Python has loaded, for the fast path and for Python; takes emulation/ptx."""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import struct
import threading
from typing import NamedTuple

import pytest
import torch

import fusednorm
from fusednorm import Quantization, engine, rms_norm_add_rms_norm
from fusednorm.backends import cuda
from fusednorm.backends.cuda import choice as cuda_kernels
from fusednorm.backends.cuda import compiler as cuda_compiler
from fusednorm.backends.kernel_keys import blocks_of, kind_of, programs, scratch_of
from fusednorm.calls import c_abi, c_kinds, c_quantizer, fast_path
from fusednorm.calls.c_enums import Share
from fusednorm.calls.call import Backward, Flags, Forward, Quantize, RMSNorm, operation_of
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, call, differing, expected, operands
from fusednorm.engine import run_norms
from fusednorm.reference import norm as reference

from fast_calls import fast_calls
from ptx import machine
from ptx.launch import Config

pytestmark = pytest.mark.skipif(
    "FUSEDNORM_EMULATED_SM" not in os.environ or os.environ["FUSEDNORM_BACKEND"] != "cuda" or not fast_path.OPEN,
    reason="takes tests/machines/emulation/ptx, and DLPack's exchange API, which torch has since 2.10",
)


def flags_of(case):
    """The flags of a norm that rounds a sum, if there is a residual."""
    return case.flags | ({} if case.residual is None else {"round_sum": case.round_sum})


@pytest.fixture(autouse=True)
def launches_that_succeed():
    """The fast path has no result where a launch fails either, and a test would take it for a call that it refuses."""
    before = machine.library().last_fault()
    yield
    assert machine.library().last_fault() == before


@pytest.fixture
def names(monkeypatch):
    """The names of kernels that are loaded from now on."""
    found, load = [], cuda._load
    monkeypatch.setattr(cuda, "_load", lambda variant, device: found.append(variant.kernel) or load(variant, device))
    return found


def nothing_held():
    """Has C forget the kernels that it holds, which stay loaded."""
    cuda._open_launcher.__wrapped__()


def listed(found):
    """Results in a list."""
    return [found] if isinstance(found, torch.Tensor) else list(found)


def same(found, wanted):
    """Whether tensors have the same bits, and those that are None are None in both."""
    pairs = list(zip(listed(found), listed(wanted), strict=True))
    return all((a is None) == (b is None) and (a is None or not differing(a, b).any()) for a, b in pairs)


def same_bytes(found, wanted):
    """Whether numbers and scales have the same bits."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted, strict=True))


def by(backend, function, *given, **more):
    """The result of a call by a backend."""
    with fusednorm.use_backend(backend):
        return function(*given, **more)


def by_both(function, *given, **more):
    """The results of a call by this backend, and by the reference."""
    return [by(backend, function, *given, **more) for backend in ("cuda", "reference")]


class Kind(NamedTuple):
    """A call, and the kernels that it loads; none if they are held."""

    given: dict
    kernels: tuple = ()


def held(kinds):
    """The same calls, whose kernels are held."""
    return [Kind(kind.given) for kind in kinds]


def by_turns(kinds, names, python, fast=None, equal=same, two_levels=False):
    """Calls one after the other: each has its own kernels, and the bits of the reference.

    The fast path refuses a call until its kernels are held, and rows in two levels always. It returns the first results
    alone where Python returns gradients too.
    """
    for given, kernels in kinds:
        assert fast is None or (fast(**given) is None) == (bool(kernels) or two_levels), given
        names.clear()
        first, wanted = map(listed, by_both(python, **given))
        assert names == [*kernels], given
        assert equal(first, wanted), given
        if fast is not None and not two_levels:
            got = listed(fast(**given))
            assert equal(got, wanted[: len(got)]), given


#: Operands of short calls.
X, RESIDUAL, WEIGHT = operands(Case(rows=5, hidden=72).of(BF16))
Q, K = operands(Case(rows=5 * 6, hidden=72).of(BF16))[0].view(5, 6, 72).split((4, 2), 1)
COS, SIN = torch.linspace(0, 6, 5 * 36).view(5, 36).cos(), torch.linspace(0, 6, 5 * 36).view(5, 36).sin()
POSITIONS = torch.tensor([1, 4, 0, 2, 2])


def test_forward():
    """Nothing before; afterwards the same bits, in the same layouts; never what overlaps or begins between elements."""
    take = fast_calls("cuda")

    def fast(case, x, residual, weight, out=None, residual_out=None):
        operands = {"x": x, "residual": residual, "weight": weight, "out": out, "residual_out": residual_out}
        return take("norm", **operands, eps=case.eps, round_sum=case.round_sum, **case.flags)

    for case in (
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=1, hidden=968).of(BF16, residual=F32, weight=None, round_norm=True, eps=1e-3),
        Case(rows=9, hidden=72).of(F16, residual=None, weight_offset=1.0),
        Case(rows=3, hidden=1528).of(F64, weight_offset=0.5, eps=1e-2),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ):
        x, residual, weight = operands(case)
        y, total = expected(case, "cuda")
        assert fast(case, x, residual, weight) is None, case
        by("cuda", call, case, x, residual, weight)
        for _ in range(2):
            got, got_total = fast(case, x, residual, weight)
            assert not differing(got, y).any(), case
            assert residual is None or not differing(got_total, total).any(), case
        given = x.clone()
        got, _ = fast(case, given, residual, weight, given, None if residual is None else residual.clone())
        assert got is given
        assert not differing(given, y).any(), case

    case = Case(rows=5, hidden=968).of(BF16)
    x, residual, weight = operands(case)
    memory = torch.zeros(12, 968, dtype=BF16)
    memory[:5] = x
    for outputs in (
        (memory[1:6], None),  # shares rows with x
        (memory[6:11], memory[6:11]),  # both in one place
        (torch.cat([memory, memory])[:5], memory[4:9]),
    ):
        before = memory.clone()
        assert fast(case, memory[:5], residual, weight, *outputs) is None
        assert torch.equal(memory, before)
    unaligned = torch.zeros(5 * 968 + 1, dtype=BF16)[1:].view(5, 968)
    assert fast(case, unaligned, residual, weight) is None
    assert fast_calls("cpu")("norm", x=x, residual=residual, weight=weight) is None


@pytest.mark.parametrize(
    ("between", "hidden", "round_norm"),
    [(None, 20_008, True), (F32, 2056, False), (None, 140_008, False)],  # a cluster, a block, a row that is read twice
)
def test_a_norm_before_the_addition(between, hidden, round_norm, names):
    """One kernel; the fast path launches it from the second call on, and the kernels of other calls never."""
    x, residual, weight = operands(Case(rows=5, hidden=hidden).of(BF16))
    take = fast_calls("cuda")

    def fast(followed, first_weight=weight):
        operands = {"x": x, "residual": residual, "weight": first_weight, "next_weight": weight if followed else None}
        flags = {"between": between, "round_norm": round_norm, "next_norm": followed}
        return take("two_norms", **operands, eps=1e-6, next_eps=1e-5, **flags)

    def python(followed):
        flags = {"between": between, "round_norm": round_norm}
        if followed:
            return rms_norm_add_rms_norm(x, residual, weight, weight, 1e-6, next_eps=1e-5, **flags)
        return None, fusednorm.rms_norm_add(x, residual, weight, 1e-6, **flags)

    odd, kernel = torch.zeros(hidden + 1, dtype=BF16)[1:], "forward_wide" if hidden == 140_008 else "forward"
    for followed in (True, False):
        nothing_held()
        by("cuda", fusednorm.fused_add_rms_norm, x, residual, weight)
        by_turns([Kind({"followed": followed}, (kernel,))], names, python, fast)
        assert fast(followed, None) is None
        assert fast(followed, odd) is None  # begins where the kernel that is held reads nothing


@pytest.mark.parametrize(
    ("case", "heads", "levels"),
    [
        (Case(rows=12, hidden=72).of(BF16), 3, 1),  # several rows in a warp, each of another head
        (Case(rows=12, hidden=72).of(BF16), 3, 2),
        (Case(rows=6, hidden=128, residual=None).of(F16, round_norm=True), 2, 1),
        pytest.param(
            Case(rows=6, hidden=2056).of(BF16, weight=F32, weight_offset=0.5), 3, 2, marks=pytest.mark.release
        ),
        (Case(rows=4, hidden=20_008).of(F32, residual=BF16, round_sum=False), 2, 1),  # a cluster
        (Case(rows=4, hidden=1528).of(F64, weight_offset=0.5), 2, 2),
        (Case(rows=4, hidden=140_008).of(BF16, round_norm=True), 2, 1),
    ],
    ids=str,
)
def test_what_is_around_a_norm(case, heads, levels, names):
    """One kernel; the fast path launches it from the second call on, and the kernels of other calls never.

    A LayerNorm of the same operands has another one.
    """
    x, residual, weight = operands(case)
    if levels == 2:  # the rows of heads lie beside each other, and those of tokens apart
        x = torch.cat((x.view(-1, heads, case.hidden),) * 2, dim=1)[:, heads:]
    x = x.view(-1, heads, case.hidden)
    residual = None if residual is None else residual.view(x.shape)
    of_heads = torch.stack([weight * (k + 1) for k in range(heads)])
    take = fast_calls("cuda")

    def python(w, b, x_scale, norm="rms_norm"):
        if residual is None:
            return getattr(fusednorm, norm)(x, w, bias=b, **case.flags), None
        scaled = {"x_scale": x_scale} if norm == "rms_norm" else {}
        return getattr(fusednorm, f"fused_add_{norm}")(x, residual, w, bias=b, **scaled, **flags_of(case))

    def fast(w, b, x_scale):
        operands = {"x": x, "residual": residual, "weight": w, "bias": b}
        return take("norm", **operands, x_scale=x_scale, eps=1e-6, round_sum=case.round_sum, **case.flags)

    kernels = ("forward_wide" if case.x == F64 or case.hidden > 131_072 else "forward",)
    of_weight, of_both = {"w": weight, "b": None, "x_scale": 1.0}, {"w": of_heads, "b": of_heads * 2, "x_scale": 0.22}
    changes = [{}, {"b": weight / 3}, {"w": of_heads}, {"b": of_heads}, {"w": None, "b": weight}]
    if residual is not None:
        changes += [{"x_scale": 0.22}, of_both]
    nothing_held()
    by("cuda", fusednorm.quantize, x, QUANTIZED[0])
    kinds = [Kind(of_weight | change, kernels) for change in changes]
    by_turns(kinds, names, python, fast, two_levels=levels == 2)
    centered = [Kind(kind.given | {"norm": "layer_norm"}, kernels) for kind in kinds[:3]]
    by_turns([*centered, *held(kinds[:3] + centered)], names, python)
    odd = torch.zeros(case.hidden + 1, dtype=weight.dtype)[1:]
    assert fast(weight, odd, 1.0) is None  # begins where the kernel that is held reads nothing


#: Each differs from one before it in a field that is compiled into kernels.
QUANTIZED = (
    Quantization(torch.int8),
    Quantization(torch.float8_e4m3fn),
    Quantization(torch.float8_e5m2),
    Quantization(torch.float8_e5m2, per=8),
    Quantization(torch.float8_e5m2, per=8, scale_by="reciprocal"),
    Quantization(torch.float8_e5m2, per=8, apply="reciprocal"),
    Quantization(torch.float8_e5m2, per=8, apply="ratio"),
    Quantization(torch.float8_e5m2, per=8, apply="ratio", returns="multiplier"),
    Quantization(torch.uint8, zero_point=128),
    Quantization(torch.uint8, per="tensor"),
)


def quantized_calls(case, levels=1):
    """The same call by Python, and by the fast path; of rows alone where `between` is None."""
    x, residual, weight = operands(case)
    if levels == 2:  # pairs of rows, with as much again before the next pair
        x = torch.cat((x.view(-1, 2, case.hidden),) * 2, dim=1)[:, 2:]
    residual = residual.view(x.shape)
    take = fast_calls("cuda")
    flags = {"round_norm": case.round_norm, "round_sum": case.round_sum}

    def python(quantization, between=None, **more):
        if between is None:
            return fusednorm.quantize(x, quantization, **more)
        more |= {"quantization": quantization, "between": None if between == x.dtype else between}
        return fusednorm.fused_add_rms_norm_quant(x, residual, weight, **flags, **more)

    def fast(quantization, between=None, scale=None, out=None):
        given = {"x": x, "packed": quantization.packed, "scale": scale, "out": out}
        if between is not None:
            given |= {"residual": residual, "weight": weight, "eps": 1e-6, "normalises": True, **flags}
            given["between"] = None if between == x.dtype else between
        return take("quantizer", **given)

    nothing_held()
    by("cuda", fusednorm.rms_norm, x)
    return python, fast


@pytest.mark.parametrize(
    ("case", "levels"),
    [
        (Case(rows=12, hidden=72).of(BF16), 1),  # several rows in a warp
        (Case(rows=4, hidden=2056).of(BF16, weight=F32, round_norm=True), 2),
        (Case(rows=4, hidden=20_008).of(F32, residual=BF16, round_sum=False), 1),  # a cluster
        (Case(rows=4, hidden=140_008).of(BF16, round_sum=False), 2),
    ],
    ids=str,
)
def test_quantized_rows(case, levels, names):
    """One kernel; the fast path launches it from the second call on."""
    python, fast = quantized_calls(case, levels)
    wide = "_wide" * (case.hidden > 131_072)
    kinds = [
        Kind({"quantization": QUANTIZED[1]}, ("quantize" + wide,)),
        Kind({"quantization": QUANTIZED[1], "between": case.x}, ("forward" + wide,)),
        Kind({"quantization": QUANTIZED[3], "between": F32}, ("forward" + wide,)),
    ]
    last = {"quantization": QUANTIZED[-1], "between": case.x, "scale": torch.tensor([0.037])}
    by_turns([*kinds, Kind(last, ("forward" + wide,))], names, python, fast, same_bytes, levels == 2)
    wanted = by("reference", python, **last)
    odd = torch.empty(case.rows * case.hidden + 1, dtype=torch.uint8)[1:].view(wanted[0].shape)
    assert fast(**last, out=odd) is None  # begins where the kernel that is held writes nothing
    assert same_bytes(by("cuda", python, **last, out=odd), wanted)


def test_quantizers_have_kernels_of_their_own(names):
    """The fast path never launches the kernel of another."""
    python, fast = quantized_calls(Case(rows=5, hidden=72).of(BF16))
    scale = {"scale": torch.tensor([0.037])}
    kinds = [Kind({"quantization": q} | (scale if q.per == "tensor" else {}), ("quantize",)) for q in QUANTIZED]
    by_turns(kinds, names, python, fast, same_bytes)


def test_floors_limits_zeros_and_what_is_no_number():
    """Numbers, floors and limits are arguments: quantizations that differ in them alone have one kernel."""
    x, *_ = operands(Case(rows=6, hidden=40, residual=None).of(F32))
    x = x * torch.tensor([[0.0], [1e-30], [1.0], [1e4], [1.0], [1.0]])
    x[4, 3], x[5, 7] = torch.inf, torch.nan
    limits = ({}, {"amax_floor": 5.0}, {"amax_limit": 0.5}, {"scale_floor": 0.25}, {"qmax": 96.0})
    for dtype, numbers in itertools.product((torch.int8, torch.float8_e4m3fn), limits):
        quantization = Quantization(dtype, **numbers)
        found, wanted = by_both(fusednorm.quantize, x, quantization)
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8)), quantization
        assert not differing(found[1], wanted[1]).any(), quantization


#: Calls of (x, both, weight), by what prewarm is asked for.
PREWARMED = {
    "quantization": lambda x, both, weight: (
        fusednorm.quantize(x, QUANTIZED[1]),
        fusednorm.rms_norm_quant(x, weight, quantization=QUANTIZED[1]),
        fusednorm.fused_add_rms_norm_quant(x, x, weight, quantization=QUANTIZED[1]),
    ),
    "activation": lambda x, both, weight: (
        fusednorm.gate(x, x),
        fusednorm.silu_and_mul(x, x),
        fusednorm.silu_and_mul(both),
        fusednorm.rms_norm_gated(x, x, weight),
    ),
}


@pytest.mark.parametrize(
    ("asked", "value", "kernels", "dtype"),
    [
        ("quantization", QUANTIZED[1], "forward quantize", BF16),
        ("activation", "silu", "forward gate", BF16),
        ("activation", "silu", "forward gate gate_backward", F16),
    ],
    ids=str,
)
def test_prewarm_loads_all_that_calls_will_need(asked, value, kernels, dtype, names):
    training = "backward" in kernels
    with fusednorm.use_backend("cuda"):
        fusednorm.prewarm(136, dtype, training=training, **{asked: value})
        assert set(names) >= set(kernels.split())
        names.clear()
        for offset in (0, 1):
            memory = [torch.zeros(size + offset, dtype=dtype)[offset:] for size in (6 * 136, 6 * 272, 136)]
            x, both, weight = (t.requires_grad_(training) for t in memory)
            results = PREWARMED[asked](x.view(6, -1), both.view(6, -1), weight)
            for found in results if training else ():
                found.backward(torch.zeros_like(found))
    assert names == []


def test_quantized_long_rows_in_place():
    """A row that is read once more for its scale is not changed before."""
    case = Case(rows=2, hidden=140_008).of(BF16, round_sum=False)
    x, residual, weight = operands(case)
    flags = {"quantization": QUANTIZED[1], "round_sum": False}
    wanted = by("reference", fusednorm.fused_add_rms_norm_quant, x, residual, weight, **flags)
    found = by("cuda", fusednorm.fused_add_rms_norm_quant, x, residual, weight, **flags, residual_out=residual)
    assert same_bytes(found, wanted)


def test_quantized_rows_with_what_is_around_a_norm():
    """A call that no public function makes yet: a bias and a weight of heads, a scaled x, and a quantizer."""
    x, residual, weight = operands(Case(rows=6, hidden=264).of(BF16))
    of_heads = torch.stack([weight * (k + 1) for k in range(3)])
    x3, residual3 = x.view(2, 3, -1), residual.view(2, 3, -1)
    with fusednorm.use_backend("reference"):
        y, total = fusednorm.fused_add_rms_norm(x3, residual3, of_heads, bias=weight, x_scale=0.22)
        wanted = fusednorm.quantize(y, QUANTIZED[1])
    operation = operation_of(x3, residual3, of_heads, Flags(), bias=weight, x_scale=0.22)
    found = torch.empty(x.shape, dtype=QUANTIZED[1].dtype), torch.empty(6, 1), torch.empty_like(x)
    strides = ((0, 264), (0, 264), (0, 0), (0, 264))
    norm = Forward(
        x, residual, of_heads, None, found[2], None, operation, 6, 6, strides, 1e-6, 0.0, None, 0.0, weight, 0.22
    )
    rows = (found[0], (0, 264), found[1], (0, 1, 1), None, (0, 0, 0), 264, 6, 6)
    cuda.forward(Quantize(None, (0, 0), norm, QUANTIZED[1], *rows))
    assert same_bytes(found, [t.view(6, -1) for t in (*wanted, total)])


#: Calls of gates, of three forms. Each takes kernels of its own: the numbers of steps are compiled in.
GATES = (
    {"form": "of y and z", "activation": "silu"},
    {"form": "of y and z", "activation": "sigmoid"},
    {"form": "of y and z", "activation": "gelu_tanh"},
    {"form": "and mul"},
    {"form": "of one tensor"},
    {"form": "of one tensor", "limit": 7.0},
    {"form": "of one tensor", "limit": 7.5},
    {"form": "of one tensor", "limit": 7.0, "clamp": "after"},
    {"form": "of one tensor", "alpha": 1.702},
    {"form": "of one tensor", "alpha": 1.5},
    {"form": "of one tensor", "alpha": 1.702, "round_steps": True},
    {"form": "of one tensor", "up_offset": 1.0},
    {"form": "of one tensor", "up_offset": 0.5},
    {"form": "of one tensor", "interleaved": True},
    {"form": "of one tensor", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True},
)


def with_gradients(function, *operands, **flags):
    """What the function returns, and the gradients of its operands."""
    leaves = [t.detach().requires_grad_() for t in operands]
    out = function(*leaves, **flags)
    return out, *torch.autograd.grad(out, leaves, out.detach())


def test_gates_have_kernels_of_their_own(names):
    """One kernel for each pass, loaded once for a kind, whatever the number of rows; the fast path launches it."""
    take = fast_calls("cuda")
    nothing_held()
    by("cuda", fusednorm.rms_norm, X)
    kernels = ("gate", "gate_backward")
    kinds = [Kind(given, kernels) for given in GATES]
    without_rounding = Kind({"form": "and mul", "between": F32})  # is the first gate
    wider = Kind({"form": "of y and z", "activation": "gelu_tanh", "out_dtype": F32}, kernels)
    for rows in (5, 70):
        y, z, _ = operands(Case(rows=rows, hidden=72).of(BF16))
        of_form = {"of y and z": (y, 90 * z), "and mul": (9 * z, y), "of one tensor": (torch.cat((9 * z, y), -1),)}

        def python(form, of_form=of_form, **flags):
            function = fusednorm.gate if form == "of y and z" else fusednorm.silu_and_mul
            return with_gradients(function, *of_form[form], **flags)

        def fast(form, of_form=of_form, **flags):
            x, z = (*of_form[form], None)[:2]
            order = fast_path.ALONE if form == "of y and z" else fast_path.AND_MUL
            return take("gate", x=x, z=z, order=order, **({"activation": "silu"} | flags))

        for of_fast, some in ((fast, [*kinds, without_rounding]), (None, [wider])):
            by_turns(some if rows == 5 else held(some), names, python, of_fast)
        out = torch.empty_like(y)
        assert fast(**GATES[0], out=out) is out
        assert same(out, by("reference", fusednorm.gate, *of_form["of y and z"]))


@pytest.mark.parametrize(
    ("dtype", "hidden"), [(BF16, 1), (BF16, 24), (BF16, 1001), (BF16, 4096), (F32, 600), (F64, 24), (F64, 1001)]
)
def test_where_rows_of_gates_lie(dtype, hidden, names):
    """Side by side, apart, in two levels, and at addresses of their own.

    These have kernels of their own, but one kernel takes gates and ups in turns wherever they lie.
    """
    shape = (6, 5, hidden)
    memory = torch.randn(6, 10, 2 * hidden + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for both in (memory[..., 8:].contiguous(), memory[..., 8:], memory[:, :4, 1 : 1 + 2 * hidden]):
        names.clear()
        assert same(*by_both(with_gradients, fusednorm.silu_and_mul, both, interleaved=True, limit=1.5))
        assert names == ["gate", "gate_backward"] or not names
    z = memory[:, :5, 8 : 8 + hidden]
    for y in (
        torch.randn(shape).to(dtype),
        memory[:, :5, 8 + hidden :],
        memory[:, 5:, :hidden],
        memory[:, 5:, 1 : 1 + hidden],
        torch.randn(30 * hidden + 1).to(dtype)[1:].view(shape),
    ):
        for gate in (z, z.contiguous(), z[:, 0:1].expand(shape)):
            assert same(*by_both(with_gradients, fusednorm.gate, y, gate))


@pytest.mark.parametrize(
    ("case", "levels"),
    [
        (Case(rows=6, hidden=96).of(BF16, round_norm=True), 1),  # several rows in a warp
        (Case(rows=6, hidden=96).of(BF16), 2),
        pytest.param(
            Case(rows=4, hidden=2064).of(F16, residual=F32, weight=F32, weight_offset=0.5), 1, marks=pytest.mark.release
        ),
        (Case(rows=4, hidden=20_016).of(F32, residual=BF16, weight=None), 2),  # a cluster
        (Case(rows=4, hidden=528).of(F64, round_norm=True), 1),
        (Case(rows=2, hidden=140_016).of(BF16, round_norm=True), 1),
    ],
    ids=str,
)
def test_a_norm_with_a_gate(case, levels, names):
    """One kernel; the fast path launches it from the second call on, and the kernels of other calls never."""
    x, z, weight = operands(case)
    if levels == 2:  # pairs of rows, with as much again before the next pair
        x = torch.cat((x.view(-1, 2, case.hidden),) * 2, dim=1)[:, 2:]
        z = z.view(x.shape)
    take = fast_calls("cuda")
    first_kind = {"norm_before_gate": True, "between": None, "activation": "silu", "group_size": None}
    kinds = []
    for change in (
        {},
        {"group_size": case.hidden // 3},
        {"activation": "gelu_tanh"},
        {"between": None if case.x == F64 else F32},
        {"norm_before_gate": False},
        {"norm_before_gate": False, "activation": "sigmoid", "group_size": case.hidden // 6},
    ):
        wide = "_wide" * (case.x == F64 or change.get("group_size", case.hidden) > 131_072)
        is_new = change.get("between") not in (None, case.x) or "between" not in change
        kinds.append(Kind(first_kind | change, (f"forward{wide}",) * is_new))

    def python(**flags):
        return fusednorm.rms_norm_gated(x, z, weight, **flags, **case.flags)

    def fast(**flags):
        return take("gate", x=x, z=z, weight=weight, eps=1e-6, **flags, **case.flags)

    nothing_held()
    by("cuda", fusednorm.rms_norm, x, weight)
    by_turns([*kinds, *held(kinds)], names, python, fast, two_levels=levels == 2)
    for flags, _ in kinds:
        given = x.clone()
        assert by("cuda", fusednorm.rms_norm_gated_, given, z, weight, **flags, **case.flags) is given
        assert same(given, by("reference", python, **flags))


class Heads(NamedTuple):
    """Heads of q, k and v in one tensor, and what is asked for."""

    dtype: torch.dtype
    size: int
    pairs: int
    flags: dict


HEADS = (
    Heads(BF16, 128, 64, {}),
    Heads(BF16, 128, 64, {"between": F32}),
    Heads(BF16, 128, 64, {"round_products": True, "weight_offset": 1.0}),
    Heads(BF16, 128, 64, {"round_norm": True, "interleaved": True}),
    Heads(BF16, 128, 32, {"norm": False}),
    Heads(F16, 80, 20, {"positions": torch.int64}),
    Heads(F32, 33, 7, {"positions": torch.int32, "interleaved": True}),
    Heads(F32, 1024, 512, {}),
)


def operands_of_heads(heads, rows):
    """q, k and v in one tensor; the weight of one head, or None; the tables and flags."""
    generator = torch.Generator().manual_seed(heads.size)
    qkv = torch.randn(*rows, 7, heads.size, generator=generator).to(heads.dtype)
    weight = torch.rand(heads.size, generator=generator).to(heads.dtype) if heads.flags.get("norm", True) else None
    of_rows = torch.rand(*rows, heads.pairs, generator=generator) * 6
    positions = heads.flags.get("positions")
    if positions is not None:
        of_rows = torch.rand(50, heads.pairs, generator=generator) * 6
        positions = torch.randint(0, 50, rows, generator=generator).to(positions)
    return qkv, weight, {**heads.flags, "cos": of_rows.cos(), "sin": of_rows.sin(), "positions": positions}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", [(1,), (2, 5)], ids=str)
def test_heads(heads, rows, monkeypatch, names):
    """One kernel for q and k, views into one tensor; v keeps its bits; kernels of other calls never run.

    The fast path refuses a kind until its kernel is held; then it takes new outputs, given ones, and those in place.
    """
    qkv, weight, flags = operands_of_heads(heads, rows)
    q, k = qkv[..., :4, :], qkv[..., 4:6, :]
    weights = (None, None) if weight is None else (weight, torch.stack((weight, weight / 3)))
    take = fast_calls("cuda")

    def fast(q, k, weights=weights, q_out=None, k_out=None):
        operands = {"q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "q_out": q_out, "k_out": k_out}
        return take("rotation", **operands, **({"eps": 1e-6, "norm": True} | flags))

    launched, launch = [], fast_path.launch_cuda
    nothing_held()
    by("cuda", fusednorm.rms_norm, q)
    assert fast(q, k) is None
    names.clear()
    with monkeypatch.context() as patch:
        patch.setattr(fast_path, "launch_cuda", lambda *given: launched.append(launch(*given)) or launched[-1])
        # A weight that only one of both has is another kernel. Calls like the first one take the fast path.
        for of_weights, launches in ((weights, 1), ((weight, None), 0 if weight is None else 2), (weights, 0)):
            launched.clear()
            found, wanted = by_both(fusednorm.qk_norm_rope, q, k, *of_weights, **flags)
            assert same(found, wanted)
            assert launched.count(0) == launches
    assert set(names) == {"rotate"}
    assert same(fast(q, k), wanted)
    outputs = torch.empty_like(q), torch.empty_like(k)
    assert fast(q, k, q_out=outputs[0], k_out=outputs[1]) == outputs
    assert same(outputs, wanted)
    assert fast(q, k, q_out=k[..., :1, :].expand_as(q), k_out=k) is None  # in the place of another operand
    assert fast(q, k, q_out=qkv[..., 3:7, :], k_out=k) is None
    if weight is not None:
        assert fast(q, k, (weight, None)) is None  # a kernel for each
        assert fast(q, k, (weight, weight.to(F16 if heads.dtype == F32 else F32))) is None
    assert fast(q.double(), k.double()) is None
    before = qkv.clone()
    assert fast(q, k, q_out=q, k_out=k) == (q, k)
    assert same((q, k), wanted)
    assert torch.equal(qkv[..., 6:, :], before[..., 6:, :])
    memory = bytearray(4 * heads.size * heads.dtype.itemsize + 1)
    unaligned = torch.frombuffer(memory, dtype=heads.dtype, offset=1).view(4, -1)
    assert fast(unaligned.expand(*rows, -1, -1), k) is None


def test_positions_on_a_gpu_are_not_looked_at():
    """The fast path reads no memory of a GPU: here a position beyond the table, where there is more of it."""
    take = fast_calls("cuda")
    nothing_held()
    q, table = torch.randn(4, 2, 64).bfloat16(), torch.rand(3, 32)
    positions = torch.tensor([2, 0, 1, 1])
    wanted = by("cuda", fusednorm.rotate, q, table, table, positions=positions)
    fast = lambda: take("rotation", q=q, cos=table, sin=table, positions=positions)  # noqa: E731
    assert not differing(fast()[0], wanted).any()
    whole = torch.rand(1000, 32)
    table, positions[1] = whole[:3], 900
    moved = fast()
    assert moved is not None
    assert not differing(moved[0][1:2], fusednorm.rotate(q[1:2], whole[900:901], whole[900:901])).any()


def test_gradients_of_gates_on_the_fast_path(monkeypatch):
    """Python makes the first call of a kind, and C the next ones; of one gradient, and of a tensor with both halves."""
    taken, take = [], engine.open_fast_path.gate_backward
    monkeypatch.setattr(engine.open_fast_path, "gate_backward", lambda *given: taken.append(take(*given)) or taken[-1])
    nothing_held()
    y, z, _ = (t.requires_grad_() for t in operands(Case(rows=5, hidden=72).of(BF16)))
    both = torch.cat((z, y), -1).detach().requires_grad_()
    calls = [
        (lambda: fusednorm.gate(y, z), (y, z), True),
        (lambda: fusednorm.gate(y, z.detach(), activation="sigmoid"), (y,), True),
        (lambda: fusednorm.gate(y.detach(), z, activation="gelu_tanh"), (z,), True),
        (lambda: fusednorm.silu_and_mul(z, y), (z, y), True),
        (lambda: fusednorm.silu_and_mul(both, between=F32), (both,), True),
    ]
    for call_of, leaves, fast in calls:
        found = []
        for backend in ("reference", "cuda", "cuda"):
            with fusednorm.use_backend(backend):
                output = call_of()
                found.append(torch.autograd.grad(output, leaves, output.detach()))
        assert taken == [False, False, fast]
        taken.clear()
        for other in found[1:]:
            assert same(found[0], other)


def test_gradients_of_heads():
    """Of q, k and both weights, and of a rotation alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, dq, dk = (torch.randn(3, 5, heads, 64, generator=generator).bfloat16() for heads in (4, 2, 4, 2))
    weights = [torch.rand(64, generator=generator).bfloat16() for _ in range(2)]
    angles = torch.rand(3, 5, 32, generator=generator)

    def results():
        leaves = [t.clone().requires_grad_() for t in (q, k, *weights)]
        both = fusednorm.qk_norm_rope(*leaves, angles.cos(), angles.sin())
        alone = fusednorm.rotate(leaves[0], angles.cos(), angles.sin())
        return (*both, alone, *torch.autograd.grad((*both, alone), leaves, (dq, dk, dq)))

    assert same(*by_both(results))


def test_heads_that_the_kernel_does_not_take():
    """Longer ones, and float64: a norm, and torch's operations."""
    for dtype, size in ((F64, 64), (F32, 2048)):
        q = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        angles = torch.linspace(0, 6, 3 * size // 2).view(3, -1)
        assert same(*by_both(fusednorm.qk_norm_rope, q, q, None, None, angles.cos(), angles.sin()))


def log_probabilities(function, given, **flags):
    """Results and the gradient of logits, by the backend and by the reference."""
    found = []
    for backend in ("cuda", "reference"):
        leaf = given["logits"].detach().requires_grad_()
        with fusednorm.use_backend(backend):
            outputs = function(**given | {"logits": leaf}, **flags)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            incoming = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs]
            found.append((*outputs, *torch.autograd.grad(outputs, leaf, incoming)))
    return found


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(BF16, 140_003), (F16, 40), pytest.param(F32, 20_008, marks=pytest.mark.release), (F64, 20_008)],
    ids=str,
)
def test_log_probabilities(dtype, hidden, names):
    """One kernel for each pass, of rows in two levels, of one block or of a cluster; each kind has its own."""
    generator = torch.Generator().manual_seed(hidden)
    logits = torch.randn(2, 3, 2 * hidden, generator=generator).to(dtype)[:, ::2, hidden:] * 4
    logits[0, 0, ::5] = -torch.inf
    ids = torch.randint(hidden, (2, 2, 3), generator=generator)
    ids[1, 0] = ids[1, 0, 0]
    temperature = torch.rand(2, 2, generator=generator) + 0.5
    nothing_held()
    for function, more in (
        (fusednorm.log_softmax, {}),
        (fusednorm.logsumexp, {}),
        (fusednorm.selected_log_prob, {"ids": ids}),
        (fusednorm.selected_log_prob, {"ids": ids[..., 0]}),
        (fusednorm.selected_log_prob, {"ids": ids.int()}),
        (fusednorm.selected_log_prob, {"ids": ids, "temperature": temperature}),
        (fusednorm.selected_log_prob, {"ids": ids, "temperature": temperature.to(dtype)}),
        (fusednorm.selected_log_prob, {"ids": ids, "ignore_index": int(ids[1, 0, 0])}),
        (fusednorm.selected_log_prob, {"ids": ids, "softcap": 3.0}),
        (fusednorm.selected_log_prob, {"ids": ids, "softcap": 0.5}),
        (fusednorm.selected_log_prob_and_entropy, {"ids": ids}),
        (fusednorm.selected_log_prob_and_entropy, {"ids": ids[..., 0], "softcap": 3.0, "temperature": temperature}),
    ):
        assert same(*log_probabilities(function, {"logits": logits}, **more)), (function, more)
    assert set(names) == {"log_prob", "log_prob_backward"}
    assert same(*log_probabilities(fusednorm.log_softmax, {"logits": logits}, out_dtype=F32))
    plain = logits.contiguous()
    assert same(*log_probabilities(fusednorm.log_softmax, {"logits": plain}))
    assert same(*log_probabilities(fusednorm.selected_log_prob, {"logits": plain[0], "ids": ids[0]}))


def test_log_probabilities_take_one_launch_and_no_second_row(monkeypatch):
    """Each pass is a launch, in which all ids of a row share its sums."""
    launched, launch = [], fast_path.launch_cuda
    monkeypatch.setattr(fast_path, "launch_cuda", lambda *given: launched.append(launch(*given)) or launched[-1])
    logits, ids = torch.randn(3, 5000), torch.randint(5000, (3, 4))
    with fusednorm.use_backend("cuda"):
        fusednorm.selected_log_prob_and_entropy(logits, ids)
        launched.clear()
        leaf = logits.requires_grad_()
        lp, entropy = fusednorm.selected_log_prob_and_entropy(leaf, ids)
        assert launched == [0]
        torch.autograd.grad((lp, entropy), leaf, (lp.detach(), entropy.detach()))
    assert launched.count(0) == 2


def test_entropies_of_subnormal_exponentials():
    """All numbers but one are so far below the greatest that nothing else counts."""
    for dtype, below in ((F32, -97), (F64, -735)):
        logits = below + torch.rand(2, 1100, generator=torch.Generator().manual_seed(0), dtype=dtype)
        logits[:, 5] = 0
        found, wanted = log_probabilities(
            fusednorm.selected_log_prob_and_entropy, {"logits": logits}, ids=torch.tensor([5, 7])
        )
        assert same(found, wanted)
        assert (found[1] > 0).all()


def test_m_that_a_caller_made_up():
    """Below numbers of the row, where exponentials are large; the gradient is that of the formula."""
    logits = torch.tensor([[0.0, 60, 88, 88.5, 95, -100, -95, -torch.inf]])
    m, s, ids = torch.zeros(1), torch.ones(1), torch.tensor([3])
    backward = torch.ops.fusednorm.selected_log_prob_backward
    assert same(*by_both(backward, torch.ones(1), logits, ids, None, m, s, None, None, [True]))


def test_rows_of_logits_that_are_too_long():
    """In float64 two sums of each segment take twice the memory, so half as long ones are the longest."""
    longest = cuda_kernels.LONGEST // 2
    for size in (longest, longest + 1):
        plan = fusednorm.explain(torch.empty(1, size, dtype=F64), function=fusednorm.logsumexp).plan
        assert plan.endswith("log-probabilities are computed by a call of its own") == (size == longest), plan


@pytest.mark.parametrize(
    ("name", "dtype", "call_of"),
    [
        ("scale", F32, lambda t: fusednorm.quantize(torch.ones(1, 64), QUANTIZED[0], scale_out=t[:1].view(1, 1))),
        ("ids", torch.int64, lambda t: fusednorm.selected_log_prob(torch.ones(64, 8), t)),
        ("z", F16, lambda t: fusednorm.gate(torch.ones(64, dtype=F16), t)),
    ],
)
def test_an_address_between_two_numbers_is_refused(name, dtype, call_of):
    half = dtype.itemsize // 2
    between = torch.frombuffer(bytearray(64 * dtype.itemsize + half), dtype=dtype, offset=half)
    with (
        fusednorm.use_backend("cuda"),
        pytest.raises(ValueError, match=f"^{name} begins at an address that is no mult"),
    ):
        call_of(between)


def test_rows_that_are_kept_and_quantized_have_kernels_of_their_own(names):
    def python(kept):
        out = torch.zeros_like(X) if kept else None
        flags = {"quantization": QUANTIZED[1], "normed_out": out}
        return *fusednorm.fused_add_rms_norm_quant(X, RESIDUAL, WEIGHT, **flags), *[out] * kept

    nothing_held()
    kinds = [Kind({"kept": kept}, ("forward",)) for kept in (False, True)]
    by_turns([*kinds, *held(kinds)], names, python, equal=same_bytes)


def test_sums_of_another_dtype_have_kernels_of_their_own(names):
    nothing_held()
    kinds = [Kind({"residual_dtype": stored}, ("forward",)) for stored in (BF16, F32, F16)]
    function = functools.partial(fusednorm.fused_add_rms_norm, X, RESIDUAL, WEIGHT)
    by_turns([*kinds, *held(kinds)], names, function)


def test_rotations_have_kernels_of_their_own(names):
    def python(weight=WEIGHT, cos=COS, sin=SIN, **flags):
        return fusednorm.qk_norm_rope(Q, K, weight, weight, cos, sin, **flags)

    differences = (
        {},
        {"weight": WEIGHT.float()},
        {"weight": None},
        {"weight": None, "norm": False},
        {"between": F32},
        {"round_products": True},
        {"round_norm": True},
        {"interleaved": True},
        {"weight_offset": 0.5},
        {"cos": COS.bfloat16()},
        {"sin": SIN.half()},
        {"cos": COS[:, :16], "sin": SIN[:, :16]},
        {"positions": POSITIONS},
        {"positions": POSITIONS.int()},
        {"cos": None, "sin": None},
    )
    nothing_held()
    kinds = [Kind(given, ("rotate",)) for given in differences]
    by_turns([*kinds, *held(kinds)], names, python)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (True, True, False), (False, False, True)])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=300, hidden=72).of(F16, residual=F32, weight_offset=1.0),
        Case(rows=2600, hidden=520).of(BF16),
        Case(rows=3, hidden=1528).of(F64, residual=None, weight_offset=0.5),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ],
    ids=str,
)
def test_backward(case, needs, center, monkeypatch):
    """Nothing before; afterwards the same bits, with gaps between the rows too."""
    x, residual, weight = operands(case)
    h, rstd = x.float() if x.dtype != F64 else x, torch.rand(case.rows, dtype=x.dtype if x.dtype == F64 else F32)
    dy = torch.cat([x, x], dim=1)[:, : case.hidden]
    operation = RMSNorm(
        *(x.device, x.dtype, None if residual is None else residual.dtype, None if weight is None else weight.dtype),
        *(x.dtype, case.hidden, case.round_sum, case.round_norm, None if residual is None else residual.dtype),
        center=center,
    )
    given = (dy, None, h, rstd, weight, case.weight_offset)
    taken, take = [], engine.open_fast_path.backward
    nothing_held()
    monkeypatch.setattr(engine.open_fast_path, "backward", lambda *operands: taken.append(take(*operands)) or taken[-1])
    expected = run_norms.backward(cuda, operation, *given, needs)
    got = run_norms.backward(cuda, operation, *given, needs)
    assert taken == [False, True]
    wanted = reference.gradients(*given, operation.x, operation.residual, needs, center)
    for one, other, third in zip(got[:3], expected[:3], wanted, strict=True):
        assert (one is None) == (third is None)
        assert one is None or not (differing(one, other) | differing(one, third)).any()


def backward_call(dy, h, rstd, weight, dx, dweight):
    """A backward pass whose rows all lie without gaps."""
    rows, hidden = h.shape
    operation = RMSNorm(h.device, h.dtype, None, weight.dtype, dy.dtype, hidden, True, False, None)
    strides = ((0, hidden), (0, 0), (0, hidden))
    return Backward(dy, None, h, rstd, weight, dx, None, dweight, operation, rows, rows, strides, 0.0)


@contextlib.contextmanager
def noted(note):
    """What `note` makes of the configuration and the arguments of each launch: a driver that only writes it down."""
    found = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, function, arguments, extra):
        found.append(note(config, arguments))
        return 0

    names = ("cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    fast_path.open_cuda(ctypes.cast(launch, ctypes.c_void_p).value, *map(cuda._driver_function, names))
    try:
        yield found
    finally:
        nothing_held()


@pytest.mark.parametrize("rows", [1, 8, 9, 255, 257, 300, 515, 4097, 16_640, 70_000])
def test_as_many_programs_as_through_python(rows):
    """Of each kind of kernel."""
    with noted(lambda config, _: Config.from_address(config).grid_x) as found:
        for size in (16, 48, 1040):
            block, blocks = blocks_of(rows)
            h, weight = torch.zeros(rows, size, dtype=BF16), torch.zeros(size, dtype=BF16)
            call = backward_call(h, h, torch.zeros(rows), weight, torch.empty_like(h), torch.empty_like(weight))
            packed = c_abi.pack_backward(call, 1, block, scratch_of(call))
            shares = (Share.ROWS, Share.BLOCKS, Share.COLUMNS_OF_BLOCKS, Share.COLUMNS_OF_SUMS)
            for share, per_program in itertools.product(shares, (64, 1024)):
                fast_path.hold_cuda(packed, 0, ((0, 32, per_program, 0, 1, False, share),))
                assert fast_path.launch_cuda(packed, 0) == 0
                assert found.pop() == programs(share, per_program, rows, size, block, blocks), (share, per_program)


@pytest.fixture
def gpus():
    """The stand-in's two GPUs; the first is the current one before and after a test, and has the tensors."""
    driver, _ = cuda_compiler.bindings()
    contexts = [driver.cuDevicePrimaryCtxRetain(device)[1] for device in range(2)]
    numbers = {name: ctypes.c_int.in_dll(driver.library, name) for name in ("refused", "pushed", "tensors_on")}
    for number in numbers.values():
        number.value = 0
    assert driver.cuCtxGetCurrent() == (0, contexts[0])

    class Gpus:
        current = staticmethod(driver.cuCtxSetCurrent)

        def another_context(self, device):
            driver.library.another_context.restype = ctypes.c_void_p
            return driver.library.another_context(device)

        def context(self):
            return driver.cuCtxGetCurrent()[1]

        def __getattr__(self, name):
            return numbers[name].value

        def put_tensors_on(self, device):
            numbers["tensors_on"].value = device

    found = Gpus()
    found.contexts = contexts
    nothing_held()
    yield found
    found.put_tensors_on(0)
    driver.cuCtxSetCurrent(contexts[0])


def on_gpu(call, device):
    """The same call for another GPU."""
    return call._replace(operation=call.operation._replace(device=torch.device("cuda", device)))


def both_passes(hidden):
    """For each pass: Python's path, the fast path, their outputs, and a function that holds kernels for a GPU."""
    case = Case(rows=5, hidden=hidden).of(BF16)
    x, residual, weight = operands(case)
    rstd = torch.rand(case.rows)
    numbers = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
    take = fast_calls("cuda")
    operation = operation_of(x, residual, weight, Flags(*numbers))
    one_level = ((0, hidden),) * 4
    call = Forward(x, residual, weight, x, residual, None, operation, 5, 5, one_level, case.eps, case.weight_offset)

    def python_forward():
        outputs = torch.empty_like(x), torch.empty_like(x)
        cuda.forward(call._replace(out=outputs[0], residual_out=outputs[1]))
        return outputs

    def hold_forward(device):
        variant = cuda_kernels.forward_variant(kind_of(call), cuda.capability(device))
        cuda._hold(c_abi.pack_forward(on_gpu(call, device)), device, [variant])

    yield (
        python_forward,
        lambda: take("norm", x=x, residual=residual, weight=weight, eps=case.eps, **flags_of(case)),
        expected(case, "cuda"),
        hold_forward,
    )

    gradients = torch.empty_like(x), torch.empty_like(weight)
    back = backward_call(x, residual, rstd, weight, *gradients)
    partial = scratch_of(back)

    def python_backward():
        cuda.backward(back)
        return gradients

    def fast_backward():
        given = (x, None, residual, rstd, weight, gradients[0], None, partial, gradients[1], 1, 0.0, False)
        return gradients if fast_path.backward(fast_path.CUDA, *given) else None

    def hold_backward(device):
        variants = cuda_kernels.backward_variants(kind_of(back), cuda.capability(device))
        cuda._hold(c_abi.pack_backward(on_gpu(back, device), 1, 1, partial), device, variants.values())

    wanted = reference.gradients(x, None, residual, rstd, weight, 0.0, BF16, None, (True, False, True))
    yield python_backward, fast_backward, (wanted[0], wanted[2]), hold_backward


@pytest.mark.parametrize("passes", [0, 1], ids=["forward", "backward"])
def test_a_gpu_that_is_not_the_current_one(gpus, passes):
    """Each launch is in a context of the tensors' GPU, none is refused, and the caller's context is as it was."""
    python, fast, wanted, hold = list(both_passes(1032))[passes]
    python()
    gpus.put_tensors_on(1)
    assert fast() is None  # nothing is held for that GPU, and nothing is launched, nowhere
    gpus.put_tensors_on(0)
    gpus.current(gpus.contexts[1])
    hold(1)
    gpus.current(gpus.contexts[0])
    assert (gpus.refused, gpus.pushed) == (0, 0)

    def check(gpu, context, pushed):
        before = gpus.pushed
        gpus.put_tensors_on(gpu)
        gpus.current(context)
        got = fast()
        assert got is not None
        assert same(got, wanted)
        assert gpus.context() == (context or 0)
        assert gpus.pushed - before == pushed
        assert gpus.refused == 0

    first, second = gpus.contexts
    for gpu, context, pushed in ((0, first, 0), (1, first, 1), (1, second, 0), (0, second, 1), (1, first, 1)):
        check(gpu, context, pushed)
    check(1, gpus.another_context(1), 0)  # as of a part of its processors, which torch makes current with its stream
    check(0, None, 1)  # a thread that has used no GPU yet
    gpus.current(first)


def test_a_thread_that_has_used_no_gpu(gpus):
    """Through Python a launch is in the tensors' GPU's context, is not refused, and leaves the thread without one."""
    python, _, wanted, _ = next(both_passes(1040))
    python()
    found = []

    def work():
        found.append(gpus.context())
        found.append(python())
        found.append(gpus.context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[::2] == [0, 0]
    assert gpus.refused == 0
    assert same(found[1], wanted)


def test_any_number_of_kinds_of_calls_is_held(gpus):
    """Thousands: the first and the last are launched, and none of them instead of another."""
    first, last = (next(both_passes(hidden)) for hidden in (1056, 1064))
    first[0]()
    kernel = (0, 32, 1, 0, 1, False, Share.ROWS)  # is never launched
    x = torch.zeros(1, 1)
    for hidden, round_norm in itertools.product(range(10**6, 10**6 + 3000), (False, True)):
        operation = RMSNorm(x.device, F32, None, None, F32, hidden, True, round_norm, None)
        call = Forward(x, None, None, x, None, None, operation, 1, 1, ((0, hidden),) * 4, 1e-6, 0.0)
        fast_path.hold_cuda(c_abi.pack_forward(call), 0, (kernel,))
    last[0]()
    for _, fast, wanted, _ in (first, last):
        got = fast()
        assert got is not None
        assert same(got, wanted)


FIELDS = {
    "forward": "x residual weight out residual_out rstd x_stride residual_stride out_stride residual_out_stride "
    "rows hidden_size eps weight_offset",
    "chain": "first_weight first_eps",
    "around": "bias heads weight_stride bias_stride x_scale",
    "quantizer": "numbers scale zero_point numbers_stride scale_stride zero_point_stride scale_group_stride "
    "zero_point_group_stride qmin qmax amax_floor amax_limit scale_floor",
    "backward": "dy d_total h rstd weight dx dresidual partial dweight dy_stride d_total_stride h_stride "
    "rows block blocks hidden_size weight_offset",
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("real", [F32, F64], ids=["float", "double"])
@pytest.mark.parametrize("passes", ["forward", "chain", "around", "quantizer", "backward"])
def test_arguments_lie_as_in_the_sources(passes, real, levels):
    """Every field that C packs is where a compiler puts it in `Arguments` of csrc/forward.cuh and csrc/backward.cuh."""
    # Numbers that all differ: kinds, addresses and strides of operands, then the call's own.
    more, passes = passes, passes if passes == "backward" else "forward"
    chain, quantizer = more == "chain", more == "quantizer"
    around = quantizer or more == "around"
    fields = FIELDS[passes].split() + FIELDS["around"].split() * around + FIELDS[more].split() * (chain or quantizer)
    of_call = FIELDS[passes].split()
    strided = [name.removesuffix("_stride") for name in of_call if name.endswith("_stride")]
    operands = fields[: fields.index(f"{strided[0]}_stride")]
    value = {name: 1000 + 64 * i for i, name in enumerate(fields)}
    value |= {"rows": 77 * 3, "block": 3, "blocks": 77, "eps": 1.5, "weight_offset": 2.5, "inner": 77 * 3 // levels}
    value |= {"first_eps": 3.5, "x_scale": 4.5}
    value |= {name: 5.5 + i for i, name in enumerate(FIELDS["quantizer"].split()[8:])}
    flat = [passes == "backward", 0, 0, 1, value["rows"], value["inner"], value["hidden_size"], value.get("block", 0)]
    flat += [0, value["heads"] if around else 1, value.get("eps", 0.0), value["weight_offset"]]
    for name in operands:
        stride = value[f"{name}_stride"] if name in strided else 0
        flat += [c_kinds.KINDS[real], value[name] * 8, 7 + 200 * stride if stride else 0, stride]
        value[name] *= 8
        if stride and levels == 2:
            value[f"{name}_jump"] = 7 + 200 * stride - value["inner"] * stride

    def padded(numbers):
        return c_abi._pack(*numbers, *[0] * (c_abi._pack.__self__.size // 8 - len(numbers)))

    if around:  # strides of the weight and of the bias, and the bias after all other operands
        flat[12 + 4 * operands.index("weight") + 3] = value["weight_stride"]
        value["bias"] *= 8
        flat += [c_kinds.KINDS[real], value["bias"], 0, value["bias_stride"]]
    call = padded(flat)
    if around:  # its first call scales x
        numbers, x, others = flat[:12], flat[12:16], flat[16:]
        first = [0, c_abi.SCALE_ONLY, *numbers[2:8], 1, 1, 4.5, 0.0, *x, *[0] * 8, c_kinds.KINDS[real], 0, 0, 0]
        numbers[1] = c_abi.QUANTIZED * quantizer
        call = padded(first) + padded([*numbers, c_kinds.KINDS[real], 0, 0, 0, *others])
    if quantizer:  # follows the calls, with strides in bytes
        results = [value["inner"]]
        for name, item in (("numbers", 1), ("scale", 4), ("zero_point", 4)):
            stride = value[f"{name}_stride"]
            results += [value[name] * 8, (7 + 200 * stride) * item, stride * item]
            results += [value[f"{name}_group_stride"] * item] if item > 1 else []
            value[name] *= 8
            value[f"{name}_jump"] = 7 + 200 * stride - value["inner"] * stride
        reals = [value[name] for name in FIELDS["quantizer"].split()[8:]]
        call += c_quantizer._QUANTIZATION.pack(0, 0, 0, *reals) + c_abi._RESULTS.pack(*results)
        strided += ["numbers", "scale", "zero_point"]
    if chain:  # its first call has the x and the first norm's weight, and its second one rows without memory
        value["first_weight"] *= 8
        numbers, x, others = flat[:12], flat[12:16], flat[16:]
        weight = [c_kinds.KINDS[real], value["first_weight"], 0, 0]
        first = [*numbers[:8], 1, 1, 3.5, 2.5, *x, 0, 0, 0, 0, *weight, c_kinds.KINDS[real], 0, 0, 0]
        call = padded(first) + padded([*numbers, c_kinds.KINDS[real], 0, 0, 0, *others])
    with noted(lambda _, arguments: ctypes.string_at(ctypes.c_void_p.from_address(arguments).value, 304)) as packed:
        fast_path.hold_cuda(call, 0, ((0, 32, 64, 0, 1, False, Share.ROWS),))
        assert fast_path.launch_cuda(call, 0) == 0
    kinds = {
        "hidden_size": "i",
        **dict.fromkeys(("eps", "weight_offset", "first_eps", "x_scale"), "f" if real == F32 else "d"),
        **dict.fromkeys(FIELDS["quantizer"].split()[8:], "f"),
    }
    if levels == 2:
        fields += ["inner", *(f"{name}_jump" for name in strided)]
    lie = {f"{name}_{which}": f"{name}_strides.{which}" for name in strided for which in ("stride", "jump")}
    members = [lie.get(name, name) for name in fields]
    offsets = ", ".join(f"(unsigned char)(__INTADDR__(&((Arguments*)0)->{name}) / 4)" for name in members)
    source = f'#include "{passes}.cuh"\n__device__ unsigned char offsets[] = {{{offsets}}};\n'
    _, nvrtc = cuda_compiler.bindings()
    types = {"F32": "f32", "F64": "f64"}[str(real)[6:].replace("float", "F")]
    named = "X RESIDUAL RESIDUAL_OUT WEIGHT OUT FIRST_WEIGHT BETWEEN BIAS Z DY D_TOTAL H DX DRESIDUAL DWEIGHT"
    defines = [f"-D{name}_TYPE={types}" for name in named.split()]
    shape = {"RSTD": 1, "OFFSET": 1, "ROUND_SUM": 1, "ROUND_NORM": 0, "VECTOR": 1, "ALIGNED": 4, "ROW": 1024}
    shape |= {"WARPS": 4, "CLUSTER": 1, "BLOCKS_ROW": 0, "FULL": 0, "TWO_LEVELS": levels - 1, "GATED": 0}
    shape |= {"NORM_BEFORE_ADD": int(chain), "QUANTIZED": int(quantizer)}
    shape |= dict.fromkeys(("AROUND", "OF_HEADS", "SCALED"), int(around))
    defines += [f"-D{name}={number}" for name, number in shape.items()]
    headers = {name: text for name, text in cuda_compiler._sources().items() if name.endswith(".cuh")}
    given = (len(headers), list(headers.values()), [name.encode() for name in headers])
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"offsets.cu", *given)
    arguments = ["--gpu-architecture=compute_90", "--std=c++17", f"-DACCUMULATOR={types}", *defines]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not status, log.decode(errors="replace")
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    (found,) = re.findall(r"offsets\[\d+\] = \{(.*)\}", ptx.decode(errors="replace"))
    for name, offset in zip(fields, map(int, found.split(",")), strict=True):
        assert struct.unpack_from(kinds.get(name, "q"), packed[0], 4 * offset) == (value[name],), name
