"""C launches the CUDA kernels that Python has loaded, for the fast path and for Python; takes emulation/ptx."""

import ctypes
import itertools
import os
import re
import struct
import threading

import pytest
import torch

import fusednorm
from fusednorm import Quantization, engine, rms_norm_add_rms_norm
from fusednorm.backends import cuda
from fusednorm.backends.cuda import choice as cuda_kernels
from fusednorm.backends.cuda import compiler as cuda_compiler
from fusednorm.backends.kernel_keys import BackwardKind, ForwardKind, blocks_of, programs, scratch_of
from fusednorm.calls import c_abi, c_kinds, c_quantizer, fast_path
from fusednorm.calls.c_enums import Share
from fusednorm.calls.call import Backward, Flags, Forward, Quantize, RMSNorm, operation_of
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, call, differing, expected, operands
from fusednorm.engine import run_norms
from fusednorm.reference import norm as reference

from fast_calls import fast_calls

pytestmark = pytest.mark.skipif(
    "FUSEDNORM_EMULATED_SM" not in os.environ or os.environ["FUSEDNORM_BACKEND"] != "cuda" or not fast_path.OPEN,
    reason="takes tests/machines/emulation/ptx, and DLPack's exchange API, which torch has since 2.10",
)


def flags_of(case):
    """The flags of a norm."""
    return {name: getattr(case, name) for name in ("eps", "weight_offset", "round_sum", "round_norm")}


@pytest.fixture
def names(monkeypatch):
    """The names of kernels that are loaded from now on."""
    found, load = [], cuda._load
    monkeypatch.setattr(cuda, "_load", lambda variant, device: found.append(variant.kernel) or load(variant, device))
    return found


def test_forward():
    """Nothing before; afterwards the same bits, in the same layouts; never what overlaps or begins between elements."""
    take = fast_calls("cuda")

    def fast(case, x, residual, weight, out=None, residual_out=None):
        operands = {"x": x, "residual": residual, "weight": weight, "out": out, "residual_out": residual_out}
        return take("norm", **operands, **flags_of(case))

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


@pytest.mark.parametrize("between", [None, F32])
def test_a_norm_before_the_addition(between, names):
    """One kernel; the fast path launches it from the second call on, and the kernels of other calls never."""
    x, residual, weight = operands(Case(rows=5, hidden=2056).of(BF16))
    take = fast_calls("cuda")

    def fast(first_weight, next_weight, followed):
        operands = {"x": x, "residual": residual, "weight": first_weight, "next_weight": next_weight}
        return take("two_norms", **operands, eps=1e-6, next_eps=1e-5, between=between, next_norm=followed)

    def both(followed):
        if followed:
            return rms_norm_add_rms_norm(x, residual, weight, weight, 1e-6, next_eps=1e-5, between=between)
        return None, fusednorm.rms_norm_add(x, residual, weight, 1e-6, between=between)

    for followed in (True, False):
        next_weight = weight if followed else None
        nothing_held()
        with fusednorm.use_backend("cuda"):
            fusednorm.fused_add_rms_norm(x, residual, weight)
            assert fast(weight, next_weight, followed) is None
            names.clear()
            both(followed)
            assert names == ["forward"]
        wanted = by("reference", both, followed)
        got = fast(weight, next_weight, followed)
        assert got[0] is None or not differing(got[0], wanted[0]).any()
        assert not differing(got[1], wanted[1]).any()
        assert fast(None, next_weight, followed) is None
        odd = torch.zeros(2057, dtype=BF16)[1:]
        assert fast(odd, next_weight, followed) is None  # begins where the kernel that is held reads nothing


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    ("case", "heads"),
    [
        (Case(rows=12, hidden=72).of(BF16), 3),  # several rows in a warp, each of another head
        (Case(rows=6, hidden=128, residual=None).of(F16, round_norm=True), 2),
        (Case(rows=6, hidden=2056).of(BF16, weight=F32, weight_offset=0.5), 3),
        (Case(rows=4, hidden=20_008).of(F32, residual=BF16, round_sum=False), 2),  # a cluster
        (Case(rows=4, hidden=1528).of(F64, weight_offset=0.5), 2),
        (Case(rows=4, hidden=140_008).of(BF16, round_norm=True), 2),
    ],
    ids=str,
)
def test_what_is_around_a_norm(case, heads, levels, names):
    """One kernel; the fast path launches it from the second call on, and the kernels of other calls never."""
    x, residual, weight = operands(case)
    if levels == 2:  # the rows of heads lie beside each other, and those of tokens apart
        x = torch.cat((x.view(-1, heads, case.hidden),) * 2, dim=1)[:, heads:]
    x = x.view(-1, heads, case.hidden)
    residual = None if residual is None else residual.view(x.shape)
    of_heads = torch.stack([weight * (k + 1) for k in range(heads)])
    take = fast_calls("cuda")
    flags = {"weight_offset": case.weight_offset, "round_norm": case.round_norm}
    if residual is not None:
        flags["round_sum"] = case.round_sum

    def python(w, b, x_scale):
        if residual is None:
            return fusednorm.rms_norm(x, w, bias=b, **flags), None
        return fusednorm.fused_add_rms_norm(x, residual, w, bias=b, x_scale=x_scale, **flags)

    def fast(w, b, x_scale):
        operands = {"x": x, "residual": residual, "weight": w, "bias": b}
        return take("norm", **operands, x_scale=x_scale, **(flags_of(case) | {"eps": 1e-6}))

    kinds = [(weight, weight / 3, 1.0), (of_heads, None, 1.0), (weight, of_heads, 1.0), (None, weight, 1.0)]
    if residual is not None:
        kinds += [(weight, None, 0.22), (of_heads, of_heads * 2, 0.22)]
    nothing_held()
    by("cuda", python, weight, None, 1.0)
    for held, given in enumerate(kinds):
        assert fast(*given) is None, held  # the kernels before are of other kinds
        names.clear()
        first = by("cuda", python, *given)
        assert len(names) == 1
        wanted = by("reference", python, *given)
        got = fast(*given)
        assert (got is None) == (levels == 2)
        for found in (first, *[got] * (levels == 1)):
            assert not differing(found[0], wanted[0]).any(), held
            assert residual is None or not differing(found[1], wanted[1]).any(), held
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


def same_bytes(found, wanted):
    """Whether numbers and scales have the same bits."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted, strict=True))


def same(found, wanted):
    """Whether tensors have the same bits, and those that are None are None in both."""
    pairs = list(zip(found, wanted, strict=True))
    return all((a is None) == (b is None) and (a is None or not differing(a, b).any()) for a, b in pairs)


def by(backend, function, *given, **more):
    """The result of a call by a backend."""
    with fusednorm.use_backend(backend):
        return function(*given, **more)


def by_both(function, *given, **more):
    """The results of a call by this backend, and by the reference."""
    return [by(backend, function, *given, **more) for backend in ("cuda", "reference")]


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


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=12, hidden=72).of(BF16),  # several rows in a warp
        Case(rows=4, hidden=2056).of(BF16, weight=F32, round_norm=True),
        Case(rows=4, hidden=20_008).of(F32, residual=BF16, round_sum=False),  # a cluster
        Case(rows=4, hidden=140_008).of(BF16, round_sum=False),
    ],
    ids=str,
)
def test_quantized_rows(case, levels, names):
    """One kernel; the fast path launches it from the second call on."""
    python, fast = quantized_calls(case, levels)
    wide = "_wide" * (case.hidden > 131_072)
    kinds = [(QUANTIZED[1], None, {}), (QUANTIZED[1], case.x, {}), (QUANTIZED[3], F32, {})]
    for quantization, between, more in (*kinds, (QUANTIZED[-1], case.x, {"scale": torch.tensor([0.037])})):
        names.clear()
        first = by("cuda", python, quantization, between, **more)
        assert names == [("quantize" if between is None else "forward") + wide]
        wanted = by("reference", python, quantization, between, **more)
        got = fast(quantization, between, **more)
        assert (got is None) == (levels == 2)
        for found in (first, *[got] * (levels == 1)):
            assert same_bytes(found, wanted), (quantization, between)
    odd = torch.empty(case.rows * case.hidden + 1, dtype=torch.uint8)[1:].view(first[0].shape)
    assert fast(quantization, between, **more, out=odd) is None  # begins where the kernel that is held writes nothing
    found = by("cuda", python, quantization, between, **more, out=odd)
    assert same_bytes(found, wanted)


def test_quantizers_have_kernels_of_their_own():
    """The fast path never launches the kernel of another."""
    python, fast = quantized_calls(Case(rows=5, hidden=72).of(BF16))
    for quantization in QUANTIZED:
        more = {"scale": torch.tensor([0.037])} if quantization.per == "tensor" else {}
        assert fast(quantization, **more) is None
        by("cuda", python, quantization, **more)
        with fusednorm.use_backend("reference"):
            assert same_bytes(fast(quantization, **more), python(quantization, **more)), quantization


def test_rows_that_are_kept_and_quantized_have_kernels_of_their_own():
    """Calls that differ in nothing else, one after the other."""
    x, residual, weight = operands(Case(rows=5, hidden=72).of(BF16))
    with fusednorm.use_backend("reference"):
        y, total = fusednorm.fused_add_rms_norm(x, residual, weight)
        wanted = fusednorm.quantize(y, QUANTIZED[1])
    for kept in (None, torch.zeros_like(x), None):
        with fusednorm.use_backend("cuda"):
            *found, got_total = fusednorm.fused_add_rms_norm_quant(
                x, residual, weight, quantization=QUANTIZED[1], normed_out=kept
            )
        assert same_bytes([*found, got_total], [*wanted, total])
        assert kept is None or not differing(kept, y).any()


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


def test_prewarm_loads_all_that_quantized_calls_will_need(names):
    with fusednorm.use_backend("cuda"):
        fusednorm.prewarm(128, BF16, quantization=QUANTIZED[1])
        assert {"forward", "quantize"} == set(names)
        names.clear()
        for offset in (0, 1):
            x = torch.zeros(6 * 128 + offset, dtype=BF16)[offset:].view(6, 128)
            fusednorm.quantize(x, QUANTIZED[1])
            fusednorm.rms_norm_quant(x, x[0], quantization=QUANTIZED[1])
            fusednorm.fused_add_rms_norm_quant(x, x, x[0], quantization=QUANTIZED[1])
    assert names == []


@pytest.mark.parametrize(("training", "dtype"), [(False, BF16), (True, F16)])
def test_prewarm_loads_all_that_calls_with_a_gate_will_need(training, dtype, names):
    with fusednorm.use_backend("cuda"):
        fusednorm.prewarm(136, dtype, activation="silu", training=training)
        assert set(names) >= {"forward", "gate", *["gate_backward"] * training}
        names.clear()
        for offset in (0, 1):
            x = torch.zeros(6 * 136 + offset, dtype=dtype)[offset:].view(6, 136).requires_grad_(training)
            both = torch.zeros(12 * 136 + offset, dtype=dtype)[offset:].view(6, 272).requires_grad_(training)
            weight = torch.zeros(136 + offset, dtype=dtype)[offset:].requires_grad_(training)
            for function in (
                lambda: fusednorm.gate(x, x),  # noqa: B023
                lambda: fusednorm.silu_and_mul(x, x),  # noqa: B023
                lambda: fusednorm.silu_and_mul(both),  # noqa: B023
                lambda: fusednorm.rms_norm_gated(x, x, weight),  # noqa: B023
            ):
                found = function()
                if training:
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


def test_a_scale_between_two_numbers_is_refused():
    memory = torch.frombuffer(bytearray(41), dtype=torch.uint8)
    between = torch.frombuffer(memory.numpy(), dtype=F32, offset=1, count=5).view(5, 1)
    with fusednorm.use_backend("cuda"), pytest.raises(ValueError, match=r"^scale begins at an address that is no mult"):
        fusednorm.quantize(torch.ones(5, 64), QUANTIZED[0], scale_out=between)


#: What a gate is asked for; each is of another kind than the one before.
GATES = (
    {"activation": "silu"},
    {"activation": "sigmoid"},
    {"activation": "gelu_tanh"},
    {"activation": "gelu_tanh", "out_dtype": F32},
    {"activation": "gelu_tanh"},
)


def of_gate(function, y, z):
    """The products and both gradients."""
    leaves = y.detach().requires_grad_(), z.detach().requires_grad_()
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, out.detach())


def test_gates_have_kernels_of_their_own(names):
    """One kernel for each pass, loaded once for a kind, whatever the number of rows."""
    nothing_held()
    seen = []
    for rows, flags in itertools.product((5, 70), GATES):
        y, z, _ = operands(Case(rows=rows, hidden=72).of(BF16))
        names.clear()
        assert same(*by_both(of_gate, lambda y, z: fusednorm.gate(y, z, **flags), y, 90 * z)), flags  # noqa: B023
        assert names == ([] if flags in seen else ["gate", "gate_backward"])
        seen.append(flags)
    names.clear()
    between = {"between": None}, {"between": F32}
    for flags in (*between, *between):
        assert same(*by_both(of_gate, lambda y, z: fusednorm.silu_and_mul(z, y, **flags), y, z)), flags  # noqa: B023
    assert len(names) == 2  # without rounding between, these are the first gates


#: Optional steps of a gate; each takes a kernel of its own, for its numbers are compiled in.
STEPS = (
    {"limit": 7.0},
    {"limit": 7.5},
    {"limit": 7.0, "clamp": "after"},
    {"alpha": 1.702},
    {"alpha": 1.5},
    {"alpha": 1.702, "round_steps": True},
    {"up_offset": 1.0},
    {"up_offset": 0.5},
    {"interleaved": True},
    {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True},
)


def of_one_tensor(both, **steps):
    """The products and the gradient."""
    both = both.detach().requires_grad_()
    out = fusednorm.silu_and_mul(both, **steps)
    return out, *torch.autograd.grad(out, both, out.detach())


def test_gates_in_steps_have_kernels_of_their_own(names):
    nothing_held()
    both = 9 * torch.randn(5, 144, generator=torch.Generator().manual_seed(1)).to(BF16)
    for again, steps in itertools.product((False, True), STEPS):
        names.clear()
        assert same(*by_both(of_one_tensor, both, **steps)), steps
        assert names == ([] if again else ["gate", "gate_backward"]), steps


@pytest.mark.parametrize("hidden", [1, 24, 1001])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_where_rows_in_turns_lie(dtype, hidden, names):
    """Side by side, apart, in two levels, and at addresses of their own: one kernel takes them as they are."""
    memory = torch.randn(6, 5, 2 * hidden + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for both in (memory[..., 8:].contiguous(), memory[..., 8:], memory[:, :4, 1 : 1 + 2 * hidden]):
        names.clear()
        assert same(*by_both(of_one_tensor, both, interleaved=True, limit=1.5))
        assert names == ["gate", "gate_backward"] or not names


@pytest.mark.parametrize("hidden", [1, 24, 600, 4096])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_where_rows_of_gates_lie(dtype, hidden):
    """Side by side, apart, in two levels, and at addresses of their own, which have kernels of their own."""
    shape = (6, 5, hidden)
    both = torch.randn(6, 10, 2 * hidden + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    z = both[:, :5, 8 : 8 + hidden]
    for y in (
        torch.randn(shape).to(dtype),
        both[:, :5, 8 + hidden :],
        both[:, 5:, :hidden],
        both[:, 5:, 1 : 1 + hidden],
        torch.randn(30 * hidden + 1).to(dtype)[1:].view(shape),
    ):
        for gate in (z, z.contiguous(), z[:, 0:1].expand(shape)):
            assert same(*by_both(of_gate, fusednorm.gate, y, gate))


@pytest.mark.parametrize(
    ("case", "levels"),
    [
        (Case(rows=6, hidden=96).of(BF16, round_norm=True), 1),  # several rows in a warp
        (Case(rows=6, hidden=96).of(BF16), 2),
        (Case(rows=4, hidden=2064).of(F16, residual=F32, weight=F32, weight_offset=0.5), 1),
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
    nothing_held()
    by("cuda", fusednorm.rms_norm, x, weight)
    seen = []
    for first, between, activation, group in (
        (True, None, "silu", None),
        (True, None, "silu", case.hidden // 3),
        (True, None, "gelu_tanh", None),
        (True, F32, "silu", None),
        (False, None, "silu", None),
        (False, None, "sigmoid", case.hidden // 6),
    ):
        between = None if case.x == F64 else between
        flags = {"norm_before_gate": first, "between": between, "activation": activation, "group_size": group}
        flags |= {"round_norm": case.round_norm, "weight_offset": case.weight_offset}

        def fast(out=None, first=first, between=between, activation=activation, group=group):
            gate = {"z": z, "activation": activation, "norm_before_gate": first, "between": between}
            of_norm = {"eps": 1e-6, "weight_offset": case.weight_offset, "round_norm": case.round_norm}
            return take("gate", x=x, weight=weight, group_size=group, out=out, **gate, **of_norm)

        kind = (first, between or case.x, activation, group)
        assert (fast() is None) == (kind not in seen or levels == 2), flags
        names.clear()
        found = by("cuda", fusednorm.rms_norm_gated, x, z, weight, **flags)
        wide = case.x == F64 or (group or case.hidden) > 131_072
        assert names == ([] if kind in seen else ["forward" + "_wide" * wide]), flags
        seen.append(kind)
        wanted = by("reference", fusednorm.rms_norm_gated, x, z, weight, **flags)
        assert not differing(found, wanted).any(), flags
        got = fast()
        assert (got is None) == (levels == 2)
        assert got is None or not differing(got, wanted).any(), flags
        given = x.clone()
        with fusednorm.use_backend("cuda"):
            assert fusednorm.rms_norm_gated_(given, z, weight, **flags) is given
        assert not differing(given, wanted).any(), flags


def test_gates_on_the_fast_path():
    """Refused until their kernels are held, and then with the same bits."""
    take = fast_calls("cuda")
    nothing_held()
    y, z, _ = operands(Case(rows=5, hidden=72).of(BF16))
    both = torch.cat((z, y), -1)
    calls = [
        (lambda: fusednorm.gate(y, z), (y, z, fast_path.ALONE, None)),
        (lambda: fusednorm.gate(y, z, out=z.clone()), (y, z, fast_path.ALONE, z.clone())),
        (lambda: fusednorm.silu_and_mul(both), (both, None, fast_path.AND_MUL, None)),
        (lambda: fusednorm.silu_and_mul(z, y), (z, y, fast_path.AND_MUL, None)),
    ]
    with fusednorm.use_backend("cuda"):
        fusednorm.rms_norm(y)
        for number, (call_of, (x, gate, how, out)) in enumerate(calls):
            fast = {"x": x, "z": gate, "activation": "silu", "order": how, "out": out}
            assert (take("gate", **fast) is None) == (number != 1)
            wanted = call_of()
            assert not differing(take("gate", **fast), wanted).any()
            assert out is None or not differing(out, wanted).any()


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_gates_in_steps_on_the_fast_path(steps):
    """The same; kernels of other gates are held before."""
    take = fast_calls("cuda")
    nothing_held()
    both = 9 * torch.randn(5, 144, generator=torch.Generator().manual_seed(1)).to(BF16)
    for before in ({}, *STEPS):
        if before != steps:
            by("cuda", fusednorm.silu_and_mul, both, **before)
    fast = {"x": both, "z": None, "activation": "silu", "order": fast_path.AND_MUL, **steps}
    assert take("gate", **fast) is None
    wanted = by("reference", fusednorm.silu_and_mul, both, **steps)
    assert not differing(by("cuda", fusednorm.silu_and_mul, both, **steps), wanted).any()
    assert not differing(take("gate", **fast), wanted).any()


#: Heads of q, k and v in one tensor: the dtype, elements of a head, pairs, and what else is asked for.
ROTATIONS = (
    (BF16, 128, 64, {}),
    (BF16, 128, 64, {"between": F32}),
    (BF16, 128, 64, {"round_products": True, "weight_offset": 1.0}),
    (BF16, 128, 64, {"round_norm": True, "interleaved": True}),
    (BF16, 128, 32, {"norm": False}),
    (F16, 80, 20, {"positions": torch.int64}),
    (F32, 33, 7, {"positions": torch.int32, "interleaved": True}),
    (F32, 1024, 512, {}),
)


@pytest.mark.parametrize(("dtype", "size", "pairs", "flags"), ROTATIONS, ids=str)
def test_heads(dtype, size, pairs, flags, monkeypatch, names):
    """One kernel for q and k, views into one tensor; in place, v keeps its bits; kernels of other calls never run."""
    generator = torch.Generator().manual_seed(size)
    qkv = torch.randn(2, 5, 7, size, generator=generator).to(dtype)
    q, k = qkv[..., :4, :], qkv[..., 4:6, :]
    weights = torch.rand(size, generator=generator).to(dtype), torch.rand(2, size, generator=generator).to(dtype)
    if not flags.get("norm", True):
        weights = None, None
    flags = dict(flags)
    angles = torch.rand(2, 5, pairs, generator=generator)
    if "positions" in flags:
        angles = torch.rand(50, pairs, generator=generator)
        flags["positions"] = torch.randint(0, 50, (2, 5), generator=generator).to(flags["positions"])
    tables = (angles * 6).cos(), (angles * 6).sin()
    launched = []
    launch = fast_path.launch_cuda
    monkeypatch.setattr(fast_path, "launch_cuda", lambda *given: launched.append(launch(*given)) or launched[-1])
    nothing_held()
    wanted: tuple = ()
    for how, of_weights in enumerate((weights, (weights[0], None), weights)):
        wanted = by("reference", fusednorm.qk_norm_rope, q, k, *of_weights, *tables, **flags)
        launched.clear()
        found = by("cuda", fusednorm.qk_norm_rope, q, k, *of_weights, *tables, **flags)
        assert same(found, wanted)
        # A weight that only one of both has is another kernel. Calls like the first one take the fast path.
        apart = how == 1 and weights[0] is not None
        assert launched.count(0) == (2 if apart else 1 if how == 0 else 0)
    assert set(names) <= {"rotate"}
    given = qkv.clone()
    by("cuda", fusednorm.qk_norm_rope_, given[..., :4, :], given[..., 4:6, :], *weights, *tables, **flags)
    whole = torch.cat((*wanted, qkv[..., 6:, :]), -2)
    assert not differing(given, whole).any()


@pytest.mark.parametrize(("dtype", "size", "pairs", "flags"), ROTATIONS, ids=str)
@pytest.mark.parametrize("rows", [(1,), (2, 5)], ids=str)
def test_heads_on_the_fast_path(dtype, size, pairs, flags, rows):
    """Refused until a kernel is held, then with the same bits, in new outputs, given ones and in place."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(*rows, 7, size, generator=generator).to(dtype)
    q, k = qkv[..., :4, :], qkv[..., 4:6, :]
    weight = torch.rand(size, generator=generator).to(dtype) if flags.get("norm", True) else None
    angles = torch.rand(*rows, pairs, generator=generator)
    positions = None
    if "positions" in flags:
        angles = angles.view(-1, pairs)
        positions = torch.randint(0, len(angles), rows, generator=generator).to(flags["positions"])
    tables = angles.cos(), angles.sin()
    given = {**flags, "positions": positions}
    take = fast_calls("cuda")

    def fast(q, k, weights=(weight, weight), q_out=None, k_out=None):
        heads = {"q": q, "k": k, "q_weight": weights[0], "k_weight": weights[1], "q_out": q_out, "k_out": k_out}
        return take("rotation", **heads, cos=tables[0], sin=tables[1], **({"eps": 1e-6, "norm": True} | given))

    nothing_held()
    with fusednorm.use_backend("cuda"):
        fusednorm.rms_norm(q)
        assert fast(q, k) is None
        wanted = fusednorm.qk_norm_rope(q, k, weight, weight, *tables, **given)
    assert same(fast(q, k), wanted)
    outputs = torch.empty_like(q), torch.empty_like(k)
    assert fast(q, k, q_out=outputs[0], k_out=outputs[1]) == outputs
    assert same(outputs, wanted)
    assert fast(q, k, q_out=k[..., :1, :].expand_as(q), k_out=k) is None  # in the place of another operand
    assert fast(q, k, q_out=qkv[..., 3:7, :], k_out=k) is None
    if weight is not None:
        assert fast(q, k, (weight, None)) is None  # of a kernel each
        assert fast(q, k, (weight, weight.to(F16 if dtype == F32 else F32))) is None
    assert fast(q.double(), k.double()) is None
    before = qkv.clone()
    assert fast(q, k, q_out=q, k_out=k) == (q, k)
    assert same((q, k), wanted)
    assert torch.equal(qkv[..., 6:, :], before[..., 6:, :])
    unaligned = torch.frombuffer(bytearray(4 * size * dtype.itemsize + 1), dtype=dtype, offset=1, count=4 * size)
    assert fast(unaligned.view(1, 4, size).expand(*rows, 4, size), k) is None


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


def test_rotations_have_kernels_of_their_own():
    """Calls that differ in one thing, one after the other."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 5, heads, 64, generator=generator).bfloat16() for heads in (4, 2))
    weight, positions = torch.rand(64, generator=generator).bfloat16(), torch.randint(0, 3, (3, 5), generator=generator)
    angles = torch.rand(3, 5, 32, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    nothing_held()
    for weights, tables, flags in (
        ((weight, weight), (cos, sin), {}),
        ((weight.float(), weight.float()), (cos, sin), {}),
        ((None, None), (cos, sin), {}),
        ((None, None), (cos, sin), {"norm": False}),
        ((weight, weight), (cos, sin), {"between": F32}),
        ((weight, weight), (cos, sin), {"round_products": True}),
        ((weight, weight), (cos, sin), {"round_norm": True}),
        ((weight, weight), (cos, sin), {"interleaved": True}),
        ((weight, weight), (cos, sin), {"weight_offset": 0.5}),
        ((weight, weight), (cos.bfloat16(), sin), {}),
        ((weight, weight), (cos, sin.half()), {}),
        ((weight, weight), (cos[..., :16], sin[..., :16]), {}),
        ((weight, weight), (cos[0], sin[0]), {"positions": positions}),
        ((weight, weight), (cos[0], sin[0]), {"positions": positions.int()}),
        ((weight, weight), (None, None), {}),
    ):
        assert same(*by_both(fusednorm.qk_norm_rope, q, k, *weights, *tables, **flags)), flags


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
    ("dtype", "hidden"), [(BF16, 140_003), (BF16, 1000), (F16, 40), (F32, 20_008), (F64, 20_008)], ids=str
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


def test_ids_between_two_numbers_are_refused():
    ids = torch.frombuffer(bytearray(28), dtype=torch.int64, offset=4, count=3)
    with (
        fusednorm.use_backend("cuda"),
        pytest.raises(ValueError, match=r"^ids begins at an address that is no multiple"),
    ):
        fusednorm.selected_log_prob(torch.ones(3, 8), ids)


def test_rows_of_logits_that_are_too_long():
    """In float64 two sums of each segment take twice the memory, so half as long ones are the longest."""
    longest = cuda_kernels.LONGEST // 2
    for size in (longest, longest + 1):
        plan = fusednorm.explain(torch.empty(1, size, dtype=F64), function=fusednorm.logsumexp).plan
        assert plan.endswith("log-probabilities are computed by a call of its own") == (size == longest), plan


def test_a_gate_between_two_numbers_is_refused():
    memory = torch.frombuffer(bytearray(130), dtype=torch.uint8)
    between = torch.frombuffer(memory.numpy(), dtype=F16, offset=1, count=64).view(1, 64)
    y = torch.ones(1, 64, dtype=F16)
    with fusednorm.use_backend("cuda"), pytest.raises(ValueError, match=r"^z begins at an address that is no multiple"):
        fusednorm.gate(y, between)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (Case(rows=37, hidden=72).of(F16, residual=F32, round_norm=True), "forward"),
        (Case(rows=5, hidden=5000).of(BF16, weight_offset=1.0), "forward"),
        (Case(rows=2, hidden=20_008).of(BF16, residual=None), "forward"),
        (Case(rows=3, hidden=1528).of(F64), "forward_wide"),
        (Case(rows=2, hidden=140_008).of(BF16, round_sum=False), "forward_wide"),
    ],
    ids=str,
)
def test_centered_rows_have_kernels_of_their_own(case, kernel, names):
    """A LayerNorm after an RMSNorm of the same operands, and both again."""
    x, residual, weight = operands(case)
    nothing_held()
    flags = {"weight_offset": case.weight_offset, "round_norm": case.round_norm}
    if residual is not None:
        flags["round_sum"] = case.round_sum

    def results(kind):
        if residual is None:
            return [getattr(fusednorm, kind)(x, weight, **flags)]
        return getattr(fusednorm, f"fused_add_{kind}")(x, residual, weight, **flags)

    for kind in ("rms_norm", "layer_norm") * 2:
        for got, wanted in zip(by("cuda", results, kind), by("reference", results, kind), strict=True):
            assert not differing(got, wanted).any(), kind
    assert names.count(kernel) == 2


def test_sums_of_another_dtype_have_kernels_of_their_own():
    """Calls that differ in nothing else, one after the other."""
    for stored in (BF16, F32, F16, BF16):
        case = Case(rows=5, hidden=72, residual_out=stored).of(BF16)
        y, total = expected(case, "cuda")
        got, got_total = by("cuda", call, case, *operands(case))
        assert not differing(got, y).any(), stored
        assert not differing(got_total, total).any(), stored


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


def nothing_held():
    """Has C forget the kernels that it holds, which stay loaded."""
    cuda._open_launcher.__wrapped__()


class Config(ctypes.Structure):
    """The beginning of CUlaunchConfig (docs.nvidia.com/cuda/cuda-driver-api)."""

    _fields_ = (("grid_x", ctypes.c_uint),)


def backward_call(dy, h, rstd, weight, dx, dweight):
    """A backward pass whose rows all lie without gaps."""
    rows, hidden = h.shape
    operation = RMSNorm(h.device, h.dtype, None, weight.dtype, dy.dtype, hidden, True, False, None)
    strides = ((0, hidden), (0, 0), (0, hidden))
    return Backward(dy, None, h, rstd, weight, dx, None, dweight, operation, rows, rows, strides, 0.0)


@pytest.mark.parametrize("rows", [1, 8, 9, 255, 257, 300, 515, 4097, 16_640, 70_000])
def test_as_many_programs_as_through_python(rows, monkeypatch):
    """Of each kind of kernel; the driver only writes down what it is given."""
    found = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, function, arguments, extra):
        found.append(Config.from_address(config).grid_x)
        return 0

    names = ("cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    fast_path.open_cuda(ctypes.cast(launch, ctypes.c_void_p).value, *map(cuda._driver_function, names))
    try:
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
    finally:
        nothing_held()


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
        variant = cuda_kernels.forward_variant(ForwardKind.of(call), cuda.capability(device))
        cuda._hold(c_abi.pack_forward(on_gpu(call, device)), device, [variant])

    yield (
        python_forward,
        lambda: take("norm", x=x, residual=residual, weight=weight, **flags_of(case)),
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
        variants = cuda_kernels.backward_variants(BackwardKind.of(back, partial), cuda.capability(device))
        cuda._hold(c_abi.pack_backward(on_gpu(back, device), 1, 1, partial), device, variants.values())

    wanted = reference.gradients(x, None, residual, rstd, weight, 0.0, BF16, None, (True, False, True))
    yield python_backward, fast_backward, (wanted[0], wanted[2]), hold_backward


@pytest.mark.parametrize("passes", [0, 1], ids=["forward", "backward"])
def test_a_gpu_that_is_not_the_current_one(gpus, passes):
    """Each launch is in a context of the tensors' GPU, none is refused, and the caller's context is as it was."""
    python, fast, wanted, hold = list(both_passes(1032))[passes]
    python()
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


def test_a_gpu_for_which_nothing_is_held(gpus):
    """Nothing is launched, nowhere."""
    python, fast, _, _ = next(both_passes(1048))
    python()
    gpus.put_tensors_on(1)
    assert fast() is None
    assert (gpus.refused, gpus.pushed) == (0, 0)


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
    packed = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, function, arguments, extra):
        packed.append(ctypes.string_at(ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0], 304))
        return 0

    names = ("cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    fast_path.open_cuda(ctypes.cast(launch, ctypes.c_void_p).value, *map(cuda._driver_function, names))
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

    try:
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
        fast_path.hold_cuda(call, 0, ((0, 32, 64, 0, 1, False, Share.ROWS),))
        assert fast_path.launch_cuda(call, 0) == 0
    finally:
        nothing_held()
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
