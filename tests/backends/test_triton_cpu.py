"""The ``triton_cpu`` backend: how C calls its kernels, when they are compiled, and what they are compiled to.

The first tests take kernels that are not Triton's; the last ones, which are skipped where there is none, a real
Triton-CPU, wherever it is installed.
"""

import ctypes
import logging
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import kernel_kinds
import pytest
import torch
from kernel_kinds import log_probabilities
from processes import printed_by

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cpu
from fusednorm.backends.triton import cpu as triton_cpu
from fusednorm.backends.triton import cpu_compiler as triton_cpu_host
from fusednorm.backends.triton import host as triton_host
from fusednorm.calls import c_abi, fast_path, process
from fusednorm.calls.call import (
    AroundNorm,
    Call,
    Flags,
    Forward,
    Quantize,
    operation_of,
)
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, dtype_name, operands
from fusednorm.engine.run_norms import backward as differentiate
from fusednorm.engine.substitutes import Meanwhile
from fusednorm.reference import norm as reference

from fast_calls import fast_calls
from gate_calls import gate_call, gated_norm_call

pytest.importorskip("triton", reason="Triton is not installed; tox -e triton_cpu installs it")
if triton_host.INTERPRETED:
    pytest.skip("the interpreter compiles nothing; the tests that compile run without it", allow_module_level=True)
if cpu.unavailable():
    pytest.skip("C calls the kernels, and the compiled extension is not here", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_target, _ = triton_host.active_target()
real = pytest.mark.skipif(
    _target is None or _target.backend != "cpu", reason="no Triton with a driver for CPUs is installed here"
)

LIB = triton_cpu_host._lib


def forward_variant(x, residual, size, **changes):
    """The kernel for a norm whose rows begin anywhere."""
    return triton_cpu.forward_variant(kernel_kinds.norm(x, residual, size, 1, **changes))


POINTER, LONG, WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


def kernel(name, number, calls):
    """A function with a kernel's arguments that notes them, and what becomes of a subnormal number in its thread."""
    operands, numbers, reals, floats = triton_cpu_host.GIVEN[name]
    real = [number] * reals + [ctypes.c_float] * floats
    kind = ctypes.CFUNCTYPE(None, *[POINTER] * operands, *[LONG] * numbers, *real, *[WORD] * 6)
    return kind(lambda *given: calls.append((given, sys.float_info.min / 2 * 1.0)))


def packed(addresses, strides, rows, hidden, *, block=0, real=F32, eps=0.0, weight_offset=0.0, threads=1):
    """A call as C takes it, with numbers for addresses: of a forward pass if it has six operands."""
    of_rows = (0, 1, 3, 4) if len(addresses) == 6 else (0, 1, 2)
    stride = dict(zip(of_rows, strides, strict=True))
    kind = c_abi.KINDS[real]
    numbers = [len(addresses) != 6, 0, 0, threads, rows, rows, hidden, block, 0, 1, eps, weight_offset]
    for i, address in enumerate(addresses):
        numbers += [kind if address else 0, address, 0, stride.get(i, 0)]
    return c_abi._pack(*numbers, *[0] * (c_abi._pack.__self__.size // 8 - len(numbers)))


def given(name, packed, programs, dtype=F32):
    """What C gives a kernel for each of the programs of a call."""
    calls = []
    function = kernel(name, ctypes.c_double if dtype == F64 else ctypes.c_float, calls)
    assert LIB.fn_run_triton(ctypes.cast(function, POINTER).value, packed, programs) == 0
    return [call for call, _ in calls]


def addresses(*tensors):
    return tuple(t.data_ptr() for t in tensors)


@pytest.mark.parametrize("dtype", [F32, F64], ids=dtype_name)
def test_c_gives_a_kernel_its_arguments(dtype):
    call = packed([1, 2, 0, 4, 5, 6], range(10, 14), 2, 14, real=dtype, eps=0.1, weight_offset=1.5)
    eps = torch.tensor(0.1, dtype=dtype).item()
    same = (1, 2, None, 4, 5, 6, None, None, *range(10, 14), 0, 2, *[0] * 5, 14, 1, 0, 0, 1, eps, 1.5, 1)
    assert given("forward", call, 2, dtype) == [(*same, 0, 0, 0, 2, 1, 1), (*same, 1, 0, 0, 2, 1, 1)]
    call = packed(range(1, 10), (10, 11, 12), 13, 16, block=3, real=dtype, weight_offset=0.1)
    numbers = (*range(10, 13), 13, 0, 0, 0, 13, 3, 5, 16, eps)
    assert given("backward", call, 1, dtype) == [(*range(1, 10), *numbers, 0, 0, 0, 1, 1, 1)]


def test_c_gives_a_kernel_the_jumps_of_the_outer_level():
    numbers = [0, 0, 0, 1, 6, 3, 8, 0, 0, 1, 0.0, 0.0]
    for address in (1000, 0, 2000, 3000, 0, 4000):
        level = (500, 8) if address in (1000, 3000) else (0, 0)
        numbers += [c_abi.KINDS[F32] if address else 0, address, *level]
    call = c_abi._pack(*numbers, *[0] * (c_abi._pack.__self__.size // 8 - len(numbers)))
    calls = given("forward", call, 6)
    assert [call[8:21] for call in calls] == [(8, 0, 8, 0, 0, 3, 476, 0, 476, 0, 0, 8, 1)] * 6
    assert [call[27] for call in calls] == list(range(6))


@pytest.mark.parametrize("x_scale", [1.0, 0.25])
def test_c_gives_a_kernel_what_is_around_a_norm(x_scale):
    """Also where the call is a chain, whose first part scales x."""
    x, residual, bias = operands(Case(rows=6, hidden=8).of(F32))
    weight = x[:3]
    operation = operation_of(x, residual, weight, Flags(), bias=bias, x_scale=x_scale)
    lies = (6, 6, ((0, 8),) * 4, 0.5, 1.5)
    call = Forward(x, residual, weight, x, residual, None, operation, *lies, bias=bias, x_scale=x_scale)
    (found,) = given("forward", c_abi.pack_forward(call), 1)
    assert found[:7] == (*addresses(x, residual, weight, x, residual), None, bias.data_ptr())
    assert found[7:19] == (None, 8, 8, 8, 8, 0, 6, 0, 0, 0, 0, 0)
    assert found[19:27] == (8, 0, 8, 0, 3, 0.5, 1.5, x_scale)


def forward_call(x, residual, weight, out, total, inner, strides):
    """A forward pass of rows in two levels."""
    operation = operation_of(x, residual, weight, Flags())
    return Forward(x, residual, weight, out, total, None, operation, x.shape[0], inner, strides, 0.5, 1.5)


@pytest.mark.parametrize("dtype", [F32, F64], ids=dtype_name)
@pytest.mark.parametrize("normalises", [True, False])
def test_c_gives_a_kernel_what_a_quantizer_takes(dtype, normalises):
    x, residual, weight = operands(Case(rows=6, hidden=8).of(dtype))
    quantization = Quantization(torch.uint8, per=4, zero_point="after", scale_floor=0.25, qmax=254)
    numbers, scale, zero_point = torch.zeros(6, 8, dtype=torch.uint8), torch.zeros(6, 2), torch.zeros(6, 2).int()
    norm = forward_call(x, residual, weight, x, residual, 3, ((500, 8), (501, 9), (502, 10), (503, 11)))
    rows = (None, (0, 0), norm) if normalises else (x, (500, 8), None)
    lies = ((600, 12), scale, (601, 13, 14), zero_point, (602, 15, 16), 8, 6, 3)
    calls = given("quantize", c_abi.pack_quantize(Quantize(*rows, quantization, numbers, *lies)), 6, dtype)
    assert len(calls) == 6
    norms = addresses(residual, weight, x, residual) if normalises else (None,) * 4
    strides, jumps = ((9, 10, 11), (474, 472, 470)) if normalises else ((0, 0, 0), (0, 0, 0))
    assert calls[2] == (
        *(x.data_ptr(), *norms, None, *addresses(numbers, scale, zero_point)),
        *(8, *strides, 12, 13, 14, 15, 16, 3),
        *(476, *jumps, 564, 562, 557),
        *(8, 4, 0, 0, 1),
        *((0.5, 1.5, 1) if normalises else (0, 0, 1)),
        *(0, 254, 0, torch.inf, 0.25),
        *(2, 0, 0, 6, 1, 1),
    )


def test_c_gives_a_kernel_a_gate():
    y, z, out, d, dz = (torch.zeros(6, 8) for _ in range(5))
    numbers = [11, 8, 9, 10, 12, 3, 470, 476, 474, 472, 468, 8]
    strides = ((500, 8), (501, 9), (502, 10))
    packed = c_abi.pack_alone(gate_call({"y": y, "z": z, "out": out}, strides, 8, 6, 3))
    same = (*addresses(y, z, out), *numbers[1:4], 3, *numbers[7:10], 8)
    assert given("gate", packed, 6)[1] == (*same, 1, 0, 0, 6, 1, 1)
    strides = ((503, 11), *strides, (504, 12))
    packed = c_abi.pack_alone(gate_call({"d": d, "y": y, "z": z, "dy": out, "dz": dz}, strides, 8, 6, 3))
    assert given("gate_backward", packed, 6)[1] == (*addresses(d, y, z, out, dz), *numbers, 1, 0, 0, 6, 1, 1)


@pytest.mark.parametrize("norm_first", [True, False])
def test_c_gives_a_kernel_a_norm_with_a_gate(norm_first):
    """Its rows are those of both together."""
    x, z, out = (torch.zeros(6, 8) for _ in range(3))
    strides = ((500, 8), (503, 11), (502, 10))
    call = gated_norm_call(x, z, out, strides, 6, 3, norm_first=norm_first, weight_offset=1.5)
    found = given("forward", c_abi.pack_alone(call), 6)[4]
    assert found[:8] == (x.data_ptr(), None, None, out.data_ptr(), None, None, None, z.data_ptr())
    assert found[8:21] == (8, 0, 10, 0, 11, 3, 476, 0, 472, 0, 470, 8, 0)
    assert found[24:28] == (0.5, 1.5, 1, 4)


@pytest.mark.parametrize("dtype", [F32, F64], ids=dtype_name)
def test_c_gives_a_kernel_log_probabilities(dtype):
    """Rows and numbers in their place have the same address, of which a kernel takes one."""
    logits, out, d, dx = (torch.zeros(6, 8, dtype=dtype) for _ in range(4))
    ids, (temperature, m, s, entropy, dh) = torch.zeros(6, 2).int(), torch.zeros(5, 6, dtype=dtype)
    read, kept = {"logits": logits, "ids": ids, "temperature": temperature}, {"m": m, "s": s, "entropy": entropy}
    strides, flags = {"logits": (500, 8), "out": (501, 9)}, {"softcap": 0.5, "ignore_index": -100}
    forward = Call("selected", False, {**read, "out": out, "entropy_out": None, **kept}, strides, flags, 8, 6, 3)
    gradients = {**read, **kept, "d": d, "d_entropy": dh, "dlogits": dx}
    strides = {"logits": (500, 8), "dlogits": (501, 9)}
    backward = forward._replace(backward=True, tensors=gradients, strides=strides)
    before, kept, numbers = addresses(*read.values()), addresses(*kept.values()), (8, 2, -100, 1, 0.5)
    pointers, lies = (*before, *addresses(out, out), *kept, *[None] * 3), (8, 9, 0, 3, 476, 474, 0)
    found = given("log_prob", c_abi.pack_alone(forward), 6, dtype)[2]
    assert found == (*pointers, *lies, *numbers, 2, 0, 0, 6, 1, 1)
    pointers, lies = (*before, *addresses(dx, dx), *kept, *addresses(d, d, dh)), (8, 9, 8, 3, 476, 474, 0)
    found = given("log_prob_backward", c_abi.pack_alone(backward), 6, dtype)[3]
    assert found == (*pointers, *lies, *numbers, 3, 0, 0, 6, 1, 1)
    plain = forward._replace(inner=6, flags={"softcap": 0.5})
    assert given("log_prob", c_abi.pack_alone(plain), 6, dtype)[-1][14:22] == (6, 0, 0, 0, 8, 2, 0, 0)


#: Optional steps of a gate, each of which takes a kernel of its own.
STEPS = {
    "limit": {"limit": 7.0},
    "another limit": {"limit": 7.5},
    "limit after": {"limit": 7.0, "clamp": "after"},
    "alpha": {"alpha": 1.5},
    "rounded": {"alpha": 1.5, "round_steps": True},
    "offset": {"up_offset": 1.0},
}

#: Functions whose addresses C keeps.
HELD = []


@pytest.mark.skipif(not fast_path.OPEN, reason="no fast path: compiled, with torch 2.10 or newer")
def test_the_fast_path_takes_calls_whose_kernels_are_held():
    """Each kind of call has its own kernel, and none is run for another kind."""
    take = fast_calls("triton_cpu")
    x, z = torch.zeros(3, 12, dtype=F64), torch.zeros(3, 12, dtype=F16)
    rows, alone = ((0, 12),) * 3, {"y": x, "z": z, "out": x}
    operation = operation_of(x, None, None, Flags())
    norm = Forward(x, None, None, x, None, None, operation, 3, 3, ((0, 12), (0, 0), (0, 12), (0, 0)), 0.5, 0.0)
    numbers, scale, lies = torch.zeros(3, 12).char(), torch.zeros(3, 2), ((0, 12), (0, 2, 1), (0, 0, 0))

    def quantizing(y, norm, **fields):
        results = (numbers, lies[0], scale, lies[1], None, lies[2], 12, 3, 3)
        return Quantize(y, (0, 12), norm, Quantization(torch.int8, per=6, **fields), *results)

    def gated(norm_first, activation="silu"):
        return gated_norm_call(x, z, x, rows, 3, 3, activation, norm_first)

    groups = gated_norm_call(x.view(9, 4), z.view(9, 4), x.view(9, 4), ((0, 4),) * 3, 9, 9, "gelu_tanh")
    packed = [Quantization(torch.int8, per=6, apply=apply).packed for apply in ("divide", "reciprocal")]
    passed = quantizing(None, norm._replace(out=None))
    around, centered = AroundNorm(F64, False, False), norm._replace(operation=operation._replace(center=True))
    kinds = {
        "plain": (norm, {"eps": 0.5}),
        "bias": (norm._replace(operation=operation._replace(around=around), bias=x[0]), {"eps": 0.5, "bias": x[0]}),
        "centered": (centered, {"eps": 0.5, "center": True}),
        "quantizer after it": (
            quantizing(None, centered._replace(out=None)),
            {"packed": packed[0], "normalises": True, "eps": 0.5, "center": True},
        ),
        "quantizer": (quantizing(x, None), {"packed": packed[0]}),
        "another": (quantizing(x, None, apply="reciprocal"), {"packed": packed[1]}),
        "after a norm": (passed, {"packed": packed[0], "normalises": True, "eps": 0.5}),
        "gate": (gate_call(alone, rows, 12, 3, 3), {"activation": "silu", "order": fast_path.ALONE}),
        "sigmoid": (
            gate_call(alone, rows, 12, 3, 3, "sigmoid"),
            {"activation": "sigmoid", "order": fast_path.ALONE},
        ),
        "norm first": (gated(True), {"activation": "silu", "norm_before_gate": True, "eps": 0.5}),
        "its sigmoid": (gated(True, "sigmoid"), {"activation": "sigmoid", "norm_before_gate": True, "eps": 0.5}),
        "gate first": (gated(False), {"activation": "silu", "norm_before_gate": False, "eps": 0.5}),
        "groups": (groups, {"activation": "gelu_tanh", "norm_before_gate": True, "group_size": 4, "eps": 0.5}),
    }

    for name, steps in STEPS.items():
        gate = gate_call({"y": z, "z": x, "out": x}, rows, 12, 3, 3, **steps)
        kinds[name] = gate, {"activation": "silu", "order": fast_path.AND_MUL, **steps}

    def made(given):
        kind = "quantizer" if "packed" in given else "gate" if "activation" in given else "norm"
        return take(kind, x=x, **given, **({"z": z} if kind == "gate" else {}))

    noted = {kind: [] for kind in kinds}
    for kind, (call, given) in kinds.items():
        assert made(given) is None
        alone = isinstance(call, Call) and call.name == "gate"
        name = "quantize" if isinstance(call, Quantize) else "gate" if alone else "forward"
        HELD.append(kernel(name, ctypes.c_double, noted[kind]))
        fast_path.hold_triton(triton_cpu._packed_for_fast_path(call), ctypes.cast(HELD[-1], POINTER).value)
    for kind, (_, given) in kinds.items():
        found = made(given)
        assert [other for other, calls in noted.items() if calls] == [kind]
        assert len(noted[kind]) == (9 if kind == "groups" else 3)
        pointers = noted[kind][0][0]
        assert pointers[1 if kind in STEPS else 0] == x.data_ptr()
        outputs = found if isinstance(found, tuple) else (found,)
        assert {t.data_ptr() for t in outputs if t is not None} < set(pointers)
        noted[kind].clear()
    long = torch.zeros(1, 65_537, dtype=F64)
    assert take("gate", x=long, z=long, activation="silu", order=fast_path.ALONE) is None
    assert triton_cpu._packed_for_fast_path(gate_call({"y": long, "z": long, "out": long}, rows, 65_537, 1, 1)) is None


def test_threads_share_the_programs_and_none_flushes_subnormals():
    """Also those that were started while the caller flushed them; and the caller's own setting stays."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        calls = []
        forward = kernel("forward", ctypes.c_float, calls)
        address = ctypes.cast(forward, POINTER).value
        call = packed([4] * 6, [0] * 4, 11, LIB.FN_PARALLEL_ELEMENTS, threads=4)
        assert LIB.fn_run_triton(address, call, 11) == 0
        assert sys.float_info.min / 2 * float(torch.ones(())) == 0
    finally:
        torch.set_flush_denormal(False)
    assert sorted(call[27] for call, _ in calls) == list(range(11))
    assert all(subnormal > 0 for _, subnormal in calls)


def test_more_programs_than_triton_counts_are_refused():
    program = object.__new__(triton_cpu_host.Program)
    program.address = 0
    with pytest.raises(OverflowError, match="Triton counts them in 32 bits"):
        program(packed([4] * 6, [0] * 4, 2**31, 8), 2**31)


def quantizer_variant(x, residual, quantization, normalises=True, **changes):
    """The kernel of a quantizer, after a norm or alone, whose rows are stored too."""
    changes |= {"keeps": True, "weight": residual, "two_levels": True}
    kind = kernel_kinds.quantized(kernel_kinds.norm(x, residual, 1000, 1, **changes), quantization)
    return triton_cpu.quantizer_variant(kind.changed(keeps=True) if normalises else kernel_kinds.alone(kind))


def gate_variant(y, z, activation="silu", backward=False, **changes):
    """The kernel of a gate, or of its gradients."""
    kind = kernel_kinds.gate(y, activation, alignment=1, size=1000, z=z, two_levels=True, **changes)
    return triton_cpu.gate_variant(kernel_kinds.gradients(kind) if backward else kind)


def backward_variants(x, residual, size, **changes):
    """The kernels of a norm's gradients."""
    return triton_cpu.backward_variants(kernel_kinds.norm_backward(x, residual, size, 1, **changes)).values()


def log_prob_variants(logits):
    """The kernels of log-probabilities, and of their gradients."""
    for kind in log_probabilities(logits, 1000, 1):
        selects = kind.ids is not None
        kind = kind.changed(temperature=logits if selects else None, softcap=selects, two_levels=True)
        yield triton_cpu.log_prob_variant(kind)


#: What `cpu/run/triton_programs.c` gives a kernel, in this order.
ARGUMENTS = {
    "forward": "x residual weight out residual_out rstd bias z x_stride residual_stride out_stride residual_out_stride "
    "z_stride inner x_jump residual_jump out_jump residual_out_jump z_jump hidden_size with_rstd weight_stride "
    "bias_stride heads eps weight_offset x_scale",
    "quantize": "x residual weight out residual_out bias numbers scale zero_point x_stride residual_stride out_stride "
    "residual_out_stride numbers_stride scale_stride scale_group_stride zero_point_stride zero_point_group_stride "
    "inner x_jump residual_jump out_jump residual_out_jump numbers_jump scale_jump zero_point_jump hidden_size group "
    "weight_stride bias_stride heads eps weight_offset x_scale qmin qmax amax_floor amax_limit scale_floor",
    "gate": "y z out y_stride z_stride out_stride inner y_jump z_jump out_jump hidden_size",
    "gate_backward": "d y z dy dz d_stride y_stride z_stride dy_stride dz_stride inner d_jump y_jump z_jump dy_jump "
    "dz_jump hidden_size",
    "backward": "dy d_total h rstd weight dx dresidual partial dweight dy_stride d_total_stride h_stride inner dy_jump "
    "d_total_jump h_jump rows block blocks hidden_size weight_offset",
} | dict.fromkeys(
    ("log_prob", "log_prob_backward"),
    "logits ids temperature out result m s entropy d d_result d_entropy logits_stride out_stride d_stride inner "
    "logits_jump out_jump d_jump hidden_size count ignore_index ignores softcap",
)


@pytest.mark.parametrize(
    "variant",
    [
        forward_variant(BF16, None, 64, weight=None),
        forward_variant(F64, F64, 64, rstd=True),
        quantizer_variant(BF16, F32, quantizations.VLLM_FP8_BLOCK_FUSED),
        quantizer_variant(F64, F64, quantizations.VLLM_INT8_TOKEN_AZP_CPU, normalises=False),
        gate_variant(BF16, F32),
        gate_variant(F64, F64, backward=True),
        gate_variant(BF16, BF16, limit=7.0, interleaved=True),
        gate_variant(BF16, F32, backward=True, limit=7.0, alpha=1.702, up_offset=1.0),
        *backward_variants(F32, F32, 64, dresidual=F32),
        *log_prob_variants(F64),
    ],
    ids=lambda variant: variant.function.__name__,
)
def test_c_and_the_kernels_agree_on_the_arguments(variant):
    """Triton's own front end says what a kernel takes; another order in either place would be silent nonsense."""
    name = variant.function.__name__
    pointers, integers, reals, floats = triton_cpu_host.GIVEN[name]
    assert ARGUMENTS[name].split() == list(variant.arguments())
    kinds = [kind for kind, _ in variant.arguments().values()]
    assert [kind.startswith("*") for kind in kinds] == [True] * pointers + [False] * (integers + reals + floats)
    real = "fp64" if variant.accumulator == F64 else "fp32"
    assert kinds[pointers:] == ["i64"] * integers + [real] * reals + ["fp32"] * floats


TYPES = ["ptr"] * 8 + ["i64"] * 16 + ["double"] * 3 + ["i32"] * 6
OF_DOUBLES = f"define void @forward({', '.join(f'{kind} %{i}' for i, kind in enumerate(TYPES))}) #0 {{"


@pytest.mark.parametrize(
    "definition", ["define void @forward(ptr %0, i64 %1) #0 {", "define void @forward() #0 {", "nothing", OF_DOUBLES]
)
def test_a_kernel_that_takes_something_else_is_refused(definition):
    found = SimpleNamespace(metadata=SimpleNamespace(name="forward"), asm={"llir": definition})
    program = object.__new__(triton_cpu_host.Program)
    program.variant = SimpleNamespace(accumulator=F32)
    with pytest.raises(fusednorm.BackendError, match="take other arguments than fusednorm gives them"):
        program._check(found)
    program.variant = SimpleNamespace(accumulator=F64)
    if definition == OF_DOUBLES:
        found.asm["llir"] = definition.replace("ptr %0", "ptr readonly captures(address, none) %0")
        program._check(found)


def test_no_access_has_a_mask():
    """A mask is a branch for each element where the processor has no masked access: AVX2 in 16 bits, NEON at all."""
    variants = [
        forward_variant(BF16, BF16, 64, rstd=True, weight_offset=True),
        forward_variant(BF16, BF16, 64, rstd=True, weight_offset=True, round_sum=False, round_norm=True),
        *backward_variants(F16, F16, 64, dresidual=F16, weight_offset=True),
        quantizer_variant(BF16, BF16, quantizations.VLLM_FP8_TOKEN),
        gate_variant(BF16, BF16, backward=True),
        gate_variant(BF16, BF16, backward=True, limit=7.0, interleaved=True),
        *log_prob_variants(BF16),
    ]
    for variant in variants:
        ttir = front_end(variant)
        accesses = re.findall(r"tt\.(?:load|store) (.*?) : ", ttir)
        assert len(accesses) >= 4
        operands = [len(re.findall(r"%\w+", re.sub(r"\{.*?\}", "", access))) for access in accesses]
        loads = [
            n for n, access in zip(operands, re.findall(r"tt\.(load|store) ", ttir), strict=True) if access == "load"
        ]
        assert set(loads) == {1}, variant
        assert max(operands) == 2, variant


def test_a_function_alone_reads_its_rows_only():
    """An operand that is absent is a null pointer, which no kernel may read."""
    for backward in (False, True):
        reads = []
        for y in (None, F32):
            kind = kernel_kinds.gate(F32, "silu", alignment=1, size=1000, y=y, z=BF16)
            kind = kernel_kinds.gradients(kind, dy=None, dz=F32) if backward else kind
            reads.append(len(re.findall(r"tt\.call @\S*got", front_end(triton_cpu.gate_variant(kind)))))
        assert reads == ([4, 6] if backward else [2, 4])  # whole tiles, and a row's end


def front_end(variant):
    """The intermediate language that Triton's front end makes of a kernel; it needs no driver."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    arguments, constants = variant.arguments(), variant.all_constants()
    names = variant.function.arg_names
    signature = {name: arguments[name][0] if name in arguments else "constexpr" for name in names}
    known = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = ASTSource(fn=variant.function, signature=signature, constexprs=known)
    target = _target or GPUTarget("cuda", 80, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"enable_fp_fusion": False})
    given = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    return str(source.make_ir(target, *given))


def test_kinds_of_calls_that_need_the_same_code_share_it():
    def identity(dtype, size, **changes):
        return forward_variant(dtype, dtype, size, **changes).identity()

    one = identity(BF16, 1000)
    assert identity(BF16, 65536, rstd=True, weight_offset=True) == one
    assert identity(BF16, 65537) != one
    assert identity(BF16, 1000, round_sum=False) != one
    assert identity(BF16, 1000, residual_out=F32) != one
    assert identity(F32, 1, round_sum=False, round_norm=True) == identity(F32, 1)
    assert len({variant.identity() for variant in triton_cpu.commonest()}) == 6


@pytest.fixture
def fake(monkeypatch):
    """A driver for CPUs, and kernels that are the cpu backend's; ``compiling`` holds them back."""
    found = SimpleNamespace(loaded=[], calls=[], compiling=threading.Event(), loading=False, fails=False)
    found.compiling.set()

    class Loaded:
        address = 0

        def __init__(self, variant):
            self.variant = variant

        def __call__(self, call, programs):
            found.calls.append((self.variant, call))

    def load(variant, only_cached=False):
        if only_cached:
            raise triton_host.NotCachedError
        found.loading = True
        assert found.compiling.wait(60)
        if found.fails:
            raise RuntimeError("this compiler is broken")
        found.loaded.append(variant)
        return Loaded(variant)

    monkeypatch.setattr(
        type(driver), "active", SimpleNamespace(get_current_target=lambda: GPUTarget("cpu", "x86_64", 0))
    )
    compiler = triton_cpu_host.Compiler(load)
    monkeypatch.setattr(compiler, "_by_child", lambda variant: None)
    monkeypatch.setattr(triton_cpu, "_compiler", compiler)
    monkeypatch.setattr(triton_cpu._host, "load", compiler.now)
    monkeypatch.setattr(triton_cpu._host, "held", {})
    monkeypatch.setattr(triton_cpu._host, "launchers", {})
    monkeypatch.setattr(triton_cpu, "_prewarmed", False)
    monkeypatch.setattr(triton_cpu, "_MODE", "background")
    monkeypatch.setattr(triton_cpu, "fast_path", None)
    with fusednorm.use_backend("triton_cpu"):
        yield found
    found.compiling.set()
    until(lambda: compiler._thread is None or not compiler._thread.is_alive())


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it takes for ever"
        time.sleep(0.001)


#: As the engine chooses it.
BACKEND = Meanwhile(triton_cpu, cpu, lambda operation: set(operation.features) <= cpu.KNOWS)


def run(dtype, rows=3, hidden=1000, residual_out=None):
    x, residual, weight = operands(Case(rows=rows, hidden=hidden).of(dtype))
    total = torch.empty_like(residual, dtype=residual_out)
    operation = operation_of(x, residual, weight, Flags(residual_dtype=residual_out))
    strides = ((0, hidden),) * 4
    call = Forward(x, residual, weight, torch.empty_like(x), total, None, operation, rows, rows, strides, 1e-6, 0.0)
    BACKEND.forward(call)
    out, expected_total, _ = reference.outputs(x, residual, weight, 1e-6, 0.0, True, False, dtype, total.dtype)
    return torch.equal(call.out, out) and torch.equal(total, expected_total)


def plan(dtype):
    x = torch.zeros(2, 1000, dtype=dtype)
    return fusednorm.explain(x, x, x[0]).plan


def test_the_cpu_backend_takes_calls_until_the_kernel_is_compiled(fake):
    fake.compiling.clear()
    assert "until they are compiled in the background, the cpu backend's: C kernels" in plan(BF16)
    for _ in range(3):
        assert run(BF16)
    assert fake.loaded == fake.calls == []
    fake.compiling.set()
    until(lambda: len(fake.loaded) == 6)
    assert fake.loaded[0].dtypes["x"] == BF16  # what was called comes first
    assert fake.loaded[0].dtypes["residual"] == BF16
    assert (
        plan(BF16)
        == f"Triton kernels, compiled, on up to {torch.get_num_threads()} threads: a row per program, in tiles of 128"
    )
    run(BF16)
    assert len(fake.calls) == 1
    fake.compiling.clear()
    assert run(F64)  # none of the commonest: in the background too
    fake.compiling.set()
    until(lambda: len(fake.loaded) == 7)
    run(F64)
    assert len(fake.calls) == 2
    run(BF16, hidden=40_000)
    assert len(fake.loaded) == 7
    assert len(fake.calls) == 3
    fake.compiling.clear()
    assert run(BF16, residual_out=F32)  # for which the cpu backend needs two kernels
    fake.compiling.set()


def test_the_cpu_backend_takes_all_of_a_call_until_the_kernel_is_compiled(fake, monkeypatch):
    """With what is around a norm, one call of C."""
    fake.compiling.clear()
    taken = []
    c_forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda call: taken.append(call.operation.features) or c_forward(call))
    x, residual, weight = operands(Case(rows=6, hidden=100).of(BF16))
    got = fusednorm.fused_add_rms_norm(x, residual, weight, bias=weight, x_scale=0.5)
    assert taken == [("affine", "x_scale")]
    with fusednorm.use_backend("reference"):
        wanted = fusednorm.fused_add_rms_norm(x, residual, weight, bias=weight, x_scale=0.5)
    assert all(map(torch.equal, got, wanted))


def test_the_cpu_backend_takes_gradients_until_their_kernels_are_compiled(fake):
    fake.compiling.clear()
    x, _, weight = operands(Case(rows=5, hidden=100).of(F32))
    operation = operation_of(x, None, weight, Flags())
    given, needs = (x, None, x, torch.ones(5), weight, 0.0), (True, False, True)
    got = differentiate(BACKEND, operation, *given, needs)
    for mine, theirs in zip(got[:3], reference.gradients(*given, F32, None, needs), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)
    assert fake.calls == []
    fake.compiling.set()
    until(lambda: len(fake.loaded) == 9)
    differentiate(BACKEND, operation, *given, needs)
    assert [variant.constants["PART"] for variant, _ in fake.calls] == ["rows", "shares", "weight"]


def calls_of_every_kind():
    """Results of quantizers and gates, by the kernel that they need first."""
    x, residual, weight = operands(Case(rows=6, hidden=96).of(BF16))
    leaves = [t.clone().requires_grad_() for t in (x, residual)]
    quantization = quantizations.VLLM_INT8_TOKEN_CPU
    into = {"residual_dtype": F32, "quantization": quantization}
    return {
        "alone": fusednorm.quantize(x, quantization),
        "normalised": fusednorm.rms_norm_quant(x, weight, quantization=quantization),
        "a sum of another dtype": fusednorm.fused_add_rms_norm_quant(x, residual, weight, **into),
        "rows that are kept": fusednorm.fused_add_rms_norm_quant(
            x, residual, weight, normed_out=torch.empty_like(x), **into
        ),
        "gate": (fusednorm.gate(x, residual),),
        "gradients": torch.autograd.grad(fusednorm.gate(*leaves, activation="sigmoid"), leaves, x),
        "norm first": (fusednorm.rms_norm_gated(x, residual, weight),),
        "gate first": (fusednorm.rms_norm_gated(x, residual, weight, norm_before_gate=False),),
    }


def test_the_cpu_backend_quantizes_and_gates_until_the_kernels_are_compiled(fake):
    fake.compiling.clear()
    found = calls_of_every_kind()
    with fusednorm.use_backend("reference"):
        wanted = calls_of_every_kind()
    for name, results in wanted.items():
        assert all(map(torch.equal, found[name], results)), name
    assert fake.calls == []
    fake.compiling.set()
    until(lambda: len(fake.loaded) == 6 + len(found) + 1)  # a gate, and its gradients, of the sigmoid
    calls_of_every_kind()
    kernels = [variant.function.__name__ for variant, _ in fake.calls]
    assert kernels == [*["quantize"] * 4, "gate", "gate", "gate_backward", "forward", "forward"]


def test_the_cpu_backend_rotates(fake, monkeypatch):
    q, k, angle = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 8)
    calls = []
    monkeypatch.setattr(cpu, "forward", calls.append)
    explained = fusednorm.explain(q, function=fusednorm.qk_norm_rope)
    fusednorm.qk_norm_rope(q, k, None, None, angle.cos(), angle.sin())
    assert explained.plan.startswith("the cpu backend's, C kernels")
    assert explained.plan.endswith("; heads are rotated in the same call")
    assert [call.tensors[name].shape for call in calls for name in "qk"] == [q.shape, k.shape]


def test_comparisons_and_measurements_wait_for_the_kernel(fake):
    with process.waiting_for_kernels():
        run(F16)
        assert "until" not in plan(F16)
    assert len(fake.loaded) == len(fake.calls) == 1
    fusednorm.prewarm(64, F32, training=True)
    assert len(fake.loaded) > 4
    before = len(fake.loaded)
    fusednorm.prewarm(64, F32, quantization=quantizations.VLLM_FP8_TOKEN, activation="silu")
    names = [variant.function.__name__ for variant in fake.loaded[before:]]
    assert sorted(set(names)) == ["forward", "gate", "quantize"]


@pytest.mark.parametrize(("how", "compiled"), [("wait", 6), ("off", 1)])
def test_other_modes_compile_before_the_call(fake, monkeypatch, how, compiled):
    monkeypatch.setattr(triton_cpu, "_MODE", how)
    run(F32)
    assert (len(fake.loaded), len(fake.calls)) == (compiled, 1)
    assert "until" not in plan(F32)


def test_a_failure_is_logged_once_and_explained(fake, caplog, monkeypatch):
    fake.fails = True
    with caplog.at_level(logging.WARNING, "fusednorm"):
        assert run(BF16)
        until(lambda: len(triton_cpu._compiler.done) == 6)
    (record,) = caplog.records
    assert "could not prewarm its Triton kernels: RuntimeError: this compiler is broken" in record.message
    assert run(BF16)
    assert "as Triton could not compile its own (RuntimeError: this compiler is broken)" in plan(BF16)
    with process.waiting_for_kernels(), pytest.raises(RuntimeError, match="compiler is broken"):
        run(BF16)
    monkeypatch.setattr(triton_cpu, "_MODE", "wait")
    with pytest.raises(RuntimeError, match="compiler is broken"):
        run(BF16)


def test_a_fork_waits_until_nothing_is_loaded_and_the_child_goes_on(fake):
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    fake.compiling.clear()
    assert run(BF16)
    until(lambda: fake.loading)
    threading.Timer(0.2, fake.compiling.set).start()
    child = os.fork()
    if child == 0:
        try:
            waited = len(fake.loaded) > 0
            run(BF16)
            until(lambda: len(fake.loaded) == 6)
            os._exit(0 if waited and len(fake.calls) == 1 else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: len(fake.loaded) == 6)


def test_the_end_of_the_process_waits_for_one_kernel_at_most():
    code = """
    import sys, time, torch
    from fusednorm.backends.triton import cpu as triton_cpu
    from fusednorm.backends.triton import cpu_compiler as triton_cpu_host
    def load(variant, only_cached=False):
        print("loads", flush=True)
        time.sleep(0.5)
        print("loaded", flush=True)
    compiler = triton_cpu_host.Compiler(load)
    try:
        compiler.later(triton_cpu.commonest())
    except triton_cpu_host.NotYetError:
        pass
    while not compiler._queue: pass
    time.sleep(0.1)
    """
    assert printed_by(code, timeout=60).split() == ["loads", "loaded"]


def test_a_process_compiles_for_this_one(monkeypatch):
    """Here, without a driver, what it answers is why not; with one, that the kernel is in the cache."""
    child = triton_cpu_host._Child()
    try:
        variant = next(triton_cpu.commonest())
        answers = [child.compile(variant) for variant in (variant, variant, gate_variant(BF16, BF16, between=BF16))]
        child.process.kill()
        child.process.wait()
        assert child.compile(variant) is None
    finally:
        child.end()
    if _target is None:
        assert all("active drivers" in answer for answer in answers)
    elif _target.backend == "cpu":
        assert answers == ["", "", ""]
    monkeypatch.setattr(sys, "executable", "")
    assert triton_cpu_host.Compiler(None)._by_child(variant) is None


# With a real Triton-CPU, wherever it is installed.

MIXED = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F64, F64)]


def real_variants(x, residual):
    around = {"bias": residual, "of_heads": True, "scaled": True}
    yield forward_variant(x, residual, 1000, weight=residual, rstd=True, weight_offset=True)
    yield forward_variant(x, None, 1000, weight=residual, round_norm=True)
    yield forward_variant(x, residual, 1000, weight=residual, rstd=True, **around)
    yield from backward_variants(x, residual, 1000, weight=residual, dresidual=residual, weight_offset=True)
    for quantization in (quantizations.VLLM_FP8_BLOCK_FUSED, quantizations.VLLM_INT8_TOKEN_AZP_UNFUSED):
        yield quantizer_variant(x, residual, quantization, **around)
        yield quantizer_variant(x, None, quantization, normalises=False)
    for activation in ("silu", "gelu_tanh"):
        yield gate_variant(x, residual, activation, between=residual)
        yield gate_variant(x, residual, activation, backward=True, between=residual)
        for between in (x, None):
            gated = {"activation": activation, "z": residual, "between": between, "of_heads": True}
            yield forward_variant(x, None, 1000, weight=residual, rstd=True, **gated)
    yield from log_prob_variants(x)


@real
@pytest.mark.parametrize(("x", "residual"), MIXED, ids=dtype_name)
def test_code(x, residual):
    """No fused operation, no call, and branches for loops and pieces only: none for each of a tile's 128 elements."""
    for variant in real_variants(x, residual):
        assembly = triton_host.compiled(variant, _target).asm["asm"]
        lines = re.findall(r"^\t([a-z]\S*)(.*)$", assembly, re.MULTILINE)
        operations = [name for name, _ in lines]
        assert not [name for name in operations if re.match(r"vfn?m|fn?m(la|ls|add|sub)|bf(mla|dot)|call|blr?$", name)]
        branches = [name for name in operations if re.match(r"j|b$|b\.|cbn?z|tbn?z", name)]
        most = 256 if variant.function.__name__ == "quantize" else 128  # it reads a row three times
        assert len(branches) < most, (variant.function, len(branches))
        llvm = triton_host.compiled(variant, _target).asm["llir"]
        assert "masked" not in llvm
        assert not re.findall(r"\b(?:contract|fast|afn|reassoc)\b|llvm\.fma|llvm\.fmuladd", llvm)


REAL = """
import os, sys, time, torch, fusednorm
from fusednorm.backends.triton import cpu as triton_cpu
torch.set_num_threads(1)  # a child has none of the others
x = torch.randn(40, 1000).bfloat16()
with fusednorm.use_backend("reference"):
    expected = fusednorm.fused_add_rms_norm(x, x, x[0])
def good():
    with fusednorm.use_backend("triton_cpu"):
        got = fusednorm.fused_add_rms_norm(x, x, x[0])
    return all(map(torch.equal, got, expected))
assert good()
assert "until" in str(triton_cpu.plan(fusednorm.explain(x, x, x[0]).operation))
child = os.fork() if "fork" in sys.argv else None
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if "end" not in sys.argv:
    while len(triton_cpu._compiler.done) < 6:
        assert good()
        time.sleep(0.01)
    assert all(isinstance(found, triton_cpu.Program) for found in triton_cpu._compiler.done.values())
    assert good()
    assert "until" not in str(triton_cpu.plan(fusednorm.explain(x, x, x[0]).operation))
print("good")
"""


@real
@pytest.mark.parametrize("then", ["end", "wait", "fork"])
def test_in_the_background(then, tmp_path):
    """From an empty cache: the same bits before and after; an end at once, and a fork, disturb nothing."""
    assert printed_by(REAL, then, timeout=300, TRITON_CACHE_DIR=str(tmp_path), FUSEDNORM_PREWARM="") == "good\n"


@real
def test_the_command_fills_a_cache(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "fusednorm", "prewarm", "--backend", "triton_cpu", "--dtypes", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert re.fullmatch(r"triton_cpu: float32, rows of 4096: \d+\.\d\d s\n", done.stdout)
    assert len(list(tmp_path.rglob("*.so"))) == 2  # with the residual and without
