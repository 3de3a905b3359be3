"""Triton's kernels as compiled code, for GPUs that need not be here, and the host's way to them."""

import itertools
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kernel_kinds
import pytest
import torch
from every_operation import DIFFERENTIATED, FUNCTIONS, MORE, clones, function_of, gradients, recorded
from kernel_kinds import alone, log_probabilities, named, norm_backward, on, product, quantized, rotated_alone
from processes import printed_by

import fusednorm
from fusednorm import Quantization
from fusednorm.backends.kernel_keys import LOG_PROBABILITIES
from fusednorm.backends.triton import cpu as triton_cpu
from fusednorm.backends.triton import gpu as triton_gpu
from fusednorm.backends.triton import host as triton_host
from fusednorm.calls.call import Flags, Forward, GateSteps, operation_of
from fusednorm.calls.scalars import in_float32
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, covering, operands
from fusednorm.conformance.test_int8_linear import tensors
from fusednorm.engine.run_norms import backward as differentiate

pytest.importorskip("triton", reason="Triton is not installed; tox -e triton installs it")
if triton_host.INTERPRETED:
    pytest.skip("the interpreter compiles nothing; the tests that compile run without it", allow_module_level=True)

import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fusednorm.backends.triton.kernels import norm as triton_kernels

NVIDIA = [GPUTarget("cuda", capability, 32) for capability in (75, 80, 90, 100, 120)]
AMD = [GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")]
AMD += [GPUTarget("hip", arch, 32) for arch in ("gfx1100", "gfx1201")]
SIZES = (128, 896, 4096, 7168, 16384, 65536)
#: What PTX does with floating-point numbers beside operations that are rounded once, and memory of threads.
NOT_EXACT = r"fma\.rn\.f(?:32|64)|mad\.f|\.ftz|\.approx|div\.full|\.local"


norm = partial(kernel_kinds.norm, alignment=16)
gate = partial(kernel_kinds.gate, alignment=16)
rotation = partial(kernel_kinds.rotation, alignment=16)


def chosen(kind, lanes):
    """The kernels for a kind of call."""
    found = triton_gpu._CHOOSERS[kind.name](kind, lanes)
    return list(found.values()) if isinstance(found, dict) else [found]


def forward(x, residual, weight, size, lanes, alignment=16):
    return triton_gpu.forward_variant(norm(x, residual, size, weight=weight, alignment=alignment), lanes)


def backward(x, residual, size, lanes):
    return triton_gpu.backward_variants(norm_backward(x, residual, size, alignment=16), lanes)


def variants(x, residual, size, lanes):
    return {"forward": forward(x, residual, x, size, lanes), **backward(x, residual, size, lanes)}


class Code:
    """A kernel compiled for NVIDIA's GPU, which rounds each operation by itself.

    ``spilled``: the most bytes of registers that a thread keeps in memory.
    """

    def __init__(self, variant, capability, spilled=0):
        kernel = triton_host.compiled(variant, GPUTarget("cuda", capability, 32))
        self.ptx, self.machine_code, self.shared = kernel.asm["ptx"], kernel.asm["cubin"], kernel.metadata.shared
        assert not re.findall(NOT_EXACT, self.ptx), variant
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.machine_code)
            file.flush()
            run = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", file.name]
            text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        self.registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
        assert stack <= spilled, variant
        assert self.registers * 32 * variant.warps <= 65536, variant
        self.loads, self.stores = self.accesses("ld"), self.accesses("st")

    def accesses(self, opcode):
        """Of each global load or store in PTX: its bytes."""
        found = re.findall(rf"\b{opcode}\.global\S*?(?:\.v(\d))?\.b(\d+)\b", self.ptx)
        assert len(found) == len(re.findall(rf"\b{opcode}\.global", self.ptx))
        return [int(count or 1) * int(bits) // 8 for count, bits in found]


@pytest.mark.parametrize(
    ("target", "types", "size"), covering(NVIDIA, ((BF16, BF16), (F32, F32), (BF16, F32)), SIZES), ids=named
)
def test_nvidia(target, types, size):
    """Accesses of 16 bytes, nothing spilled, every operation rounded by itself, and little shared memory."""
    for name, variant in variants(*types, size, 32).items():
        code = Code(variant, target.arch)
        assert code.shared <= 48 * 1024, name
        if name in ("shares", "weight"):  # tiles of 128 columns are 8 bytes per thread; columns of blocks go by floats
            assert max(code.loads) >= 8, name
            continue
        # A row's root is one float per row; as many threads load it as need it.
        assert set(code.loads) <= ({16} if name == "forward" else {16, 4}), name
        assert set(code.stores) == {16}, name


#: Norms with a bias and a scaled x, also of heads.
AROUND = {
    75: [norm(F16, F32, 4096)],
    90: [*(norm(BF16, BF16, size) for size in (128, 8192, 65536)), norm(F32, F32, 16384), norm(F64, F64, 4096)],
    100: [norm(BF16, F32, 1024)],
}
#: Layer norms.
CENTERED = {
    75: [norm(F32, F32, 16384, center=True)],
    90: [norm(BF16, BF16, 128, center=True), norm(BF16, F32, 4096, center=True)],
    100: [norm(F64, F64, 1000, center=True)],
}
#: With a gate, after the norm or before it.
GATED = {
    75: [norm(F16, None, 4096)],
    90: [norm(BF16, None, 128), norm(F32, None, 7168)],
    100: [norm(BF16, None, 65536)],
}


def norms_with_more():
    """All of these norms, with their compute capabilities."""
    for (capability, kind), of_heads in itertools.product(on(AROUND), (False, True)):
        yield capability, kind.changed(bias=kind.x, of_heads=of_heads, scaled=True)
    for capability, kind in on(CENTERED):
        yield capability, kind.changed(bias=kind.x)
    for capability, kind in on(GATED):
        for between in (kind.x, F32, None):
            yield capability, kind.changed(name="norm_gated", activation="silu", z=kind.x, between=between)


@pytest.mark.parametrize(("capability", "kind"), [*norms_with_more()], ids=named)
def test_a_norm_with_more(capability, kind):
    """Nothing spilled, every operation rounded by itself, and each operand read once where a row fits the registers."""
    (variant,) = chosen(kind, 32)
    code = Code(variant, capability)
    assert code.shared <= 48 * 1024
    assert set(code.loads) == set(code.stores) == {16}
    if variant.constants["TILES"] == 1:  # a thread has 32 elements
        read = [getattr(kind, name) for name in ("x", "residual", "weight", "bias", "z")]
        assert sum(code.loads) == 32 * sum(dtype.itemsize for dtype in read if dtype is not None)


@pytest.mark.parametrize(("capability", "kind"), on(CENTERED), ids=named)
def test_gradients_of_a_layer_norm(capability, kind):
    """The gradient of a weight alone needs means before."""
    residual, size = kind.residual, kind.hidden_size
    kind = norm_backward(kind.x, residual, size, alignment=16, dresidual=None, center=True)
    variants = triton_gpu.backward_variants(kind, 32)
    assert list(variants) == (["both", "weight"] if 2048 < size <= 8192 else ["rows", "shares", "weight"])
    for variant in variants.values():
        Code(variant, capability)
    of_weight = triton_gpu.backward_variants(kind.changed(dx=None), 32)
    assert list(of_weight) == ["rows", "shares", "weight"]
    loads = Code(of_weight["rows"], capability).loads
    assert sum(loads) <= 32 * residual.itemsize + 32, "more than h is loaded for its mean"


#: Instructions of AMD's that compute with floating-point numbers and round each result to nearest even, or not at all.
#: Those that only quotients and roots consist of are counted by `unlike_the_source` instead.
PLAIN = (
    r"[vs]_(pk_)?(add|sub|subrev|mul)_f(16|32|64)|[vs]_cmpx?_\w+_f(16|32|64)|v_cndmask_b\d+|v_ldexp_f\d\d"
    r"|[vs]_cvt_(f16_f32|f32_f16|f64_f32|f32_f64|f32_u32|u32_f32|pk_f16_f32|pk_bf16_f32)|v_pack_b32_f16"
)


def unlike_the_source(name, x, kernel):
    """What AMD's code of a kernel does beside the operations that are written there, each rounded once: a list.

    An exact quotient takes five fused multiplications and additions, between `v_div_scale` and `v_div_fixup`. An exact
    root takes two of them in float32, and seven in float64. No other may be there.
    """
    found = []
    llvm = kernel.asm["llir"]
    found += re.findall(r"\b(?:contract|fast|afn|arcp|reassoc|nsz|preserve-sign|positive-zero)\b|!fpmath", llvm)
    found += re.findall(r"llvm\.(?:fma|fmuladd|amdgcn\.(?:rcp|rsq|sqrt|fma|fmed|fdiv|fdot|sdot|exp|log)\w*)", llvm)
    assembly = re.sub(r";.*", "", kernel.asm["amdgcn"])
    code = re.findall(r"(?m)(?:^\s+|:: )([vs]_\w+)((?:(?! ::).)*)", assembly)
    code = [
        (re.sub(r"_(e32|e64|dpp|sdwa)\b|_e64_dpp", "", opcode.replace("v_dual_", "v_")), rest) for opcode, rest in code
    ]
    modes = re.findall(r"\.amdhsa_float_(\w+) (\d)", assembly)
    exact = {"round_mode_32": "0", "round_mode_16_64": "0", "denorm_mode_32": "3", "denorm_mode_16_64": "3"}
    found += set(modes) ^ set(exact.items())  # to nearest even; subnormals are taken and made
    found += [opcode for opcode, _ in code if re.match(r"s_setreg|s_round_mode|s_denorm_mode", opcode)]
    found += [opcode + rest for opcode, rest in code if "_f" in opcode and re.search(r"\b(clamp|mul:\d|div:\d)", rest)]
    counts = Counter(opcode.replace("v_s_", "v_") for opcode, _ in code)
    bits = 64 if x == F64 else 32
    quotients, roots = counts[f"v_div_fixup_f{bits}"], counts["v_rsq_f64" if x == F64 else "v_sqrt_f32"]
    fused = sum(n for opcode, n in counts.items() if re.fullmatch(rf"[vs]_(fma|fmac)(ak|mk)?_f{bits}", opcode))
    whole = counts["v_cvt_f32_u32"] + counts["s_cvt_f32_u32"]  # divisions of integers
    parts = {
        "fused": (fused, 5 * quotients + (7 if x == F64 else 2) * roots),
        "scaled": (counts[f"v_div_scale_f{bits}"], 2 * quotients),
        "refined": (counts[f"v_div_fmas_f{bits}"], quotients),
        "reciprocals": (
            counts[f"v_rcp_f{bits}"] + counts["v_rcp_iflag_f32"] + (counts["v_rcp_f32"] if x == F64 else 0),
            quotients + whole,
        ),
        "quotients": (quotients > 0, name in ("forward", "rows", "both")),
        "roots": (2 * roots, quotients if name == "forward" else 0),
    }
    found += [(part, *numbers) for part, numbers in parts.items() if numbers[0] != numbers[1]]
    # A float16 is multiplied or added without being converted first: times 1, or plus -0.
    mixed = [(opcode, rest) for opcode, rest in code if opcode.startswith("v_fma_mix")]
    found += [
        opcode + rest for opcode, rest in mixed if not re.search(r", neg\(0\)(?: op_sel|\s*$)|, 1\.0, \S+ op_sel", rest)
    ]
    known = (
        rf"{PLAIN}|[vs]_(fma|fmac)(ak|mk)?_f{bits}|v_div_(scale|fmas|fixup)_f{bits}|v_rcp_f{bits}|v_rcp(_iflag)?_f32"
    )
    known += r"|v_fma_mix(lo|hi)?_f(16|32)|" + ("v_rsq_f64" if x == F64 else "v_sqrt_f32")
    strange = r"_b?f\d|_bf16|dot|mfma|wmma|rcp|rsq|sqrt|_exp|_log"
    found += {opcode for opcode in counts if re.search(strange, opcode) and not re.fullmatch(known, opcode)}
    return found


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("v_div_fixup_f32", "v_mov_b32", "fused"),  # a quotient without its correction
        ("v_sqrt_f32", "v_rsq_f32", "fused"),
        ("v_pk_mul_f32", "v_pk_fma_f32", "v_pk_fma_f32"),
        ("v_pk_add_f32", "v_dot2_f32_bf16", "v_dot2_f32_bf16"),
        ("float_denorm_mode_32 3", "float_denorm_mode_32 0", ("denorm_mode_32", "0")),
        ("float_round_mode_16_64 0", "float_round_mode_16_64 3", ("round_mode_16_64", "3")),
        ("\ts_endpgm", "\ts_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n\ts_endpgm", "s_setreg_imm32_b32"),
        ("\ts_endpgm", "\tv_mul_f32_e64 v0, v1, v2 mul:2\n\ts_endpgm", "v_mul_f32 v0, v1, v2 mul:2"),
        ("\ts_endpgm", "\tv_fma_mix_f32 v0, v1, v2, v3 op_sel_hi:[1,0,0]\n\ts_endpgm", "fma_mix"),
        ("\ts_endpgm", "\tv_dual_fmac_f32 v0, v1, v2 :: v_dual_mul_f32 v3, v4, v5\n\ts_endpgm", "fused"),
    ],
)
def test_what_is_unlike_the_source_is_found(old, new, found):
    """Changes of AMD's code that would change bits."""
    kernel = triton_host.compiled(forward(F32, F32, F32, 4000, 64), AMD[1])
    assembly = kernel.asm["amdgcn"]
    assert old in assembly
    changed = SimpleNamespace(asm={"llir": kernel.asm["llir"], "amdgcn": assembly.replace(old, new)})
    assert unlike_the_source("forward", F32, kernel) == []
    assert str(found).strip("()") in str(unlike_the_source("forward", F32, changed))
    fused = triton.compile(src=kernel.src, target=AMD[1], options={"num_warps": 2, "enable_fp_fusion": True})
    assert unlike_the_source("forward", F32, fused) == ["v_pk_fma_f32"]


INT8, FP8_BLOCKS = Quantization(torch.int8), Quantization(torch.float8_e4m3fn, per=128)
ZERO_POINTS = Quantization(torch.uint8, zero_point="after", apply="reciprocal")
QUANTIZED = {
    75: [quantized(norm(F16, F32, 4096), FP8_BLOCKS)],
    90: [quantized(norm(BF16, BF16, 128), INT8), quantized(norm(BF16, BF16, 16384), FP8_BLOCKS)],
    100: [quantized(norm(F32, BF16, 4096), INT8)],
}
QUANTIZED[90] += [quantized(norm(F32, F32, 16384), ZERO_POINTS)]


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("capability", "kind"), on(QUANTIZED), ids=named)
def test_a_quantizer(capability, kind, normalises):
    """Alone and after a norm: nothing spilled, every operation rounded by itself, and vectors of rows and numbers."""
    kind = kind if normalises else alone(kind)
    (variant,) = chosen(kind, 32)
    code = Code(variant, capability)
    assert set(code.loads) == {16}
    vector = 16 // min(dtype.itemsize for dtype in kind.dtypes())  # of numbers, of one byte each
    scales = code.stores.count(4) - (32 // vector if vector == 4 else 0)
    assert scales > 0
    assert code.stores.count(16) == (32 * kind.residual.itemsize // 16 if normalises else 0)
    assert code.stores.count(vector) - (scales if vector == 4 else 0) == 32 // vector


def in_steps(dtype):
    """Gates with optional steps, of z and y that take turns or not."""
    steps = GateSteps(7.0, 1.702, 1.0, round_steps=dtype == F16)
    return [gate(dtype, "silu", **steps._asdict(), interleaved=interleaved) for interleaved in (False, True)]


GATES = {
    75: [gate(BF16, "silu"), *in_steps(BF16)],
    90: [gate(BF16, "gelu_tanh"), gate(F64, "silu"), *in_steps(F32), *in_steps(F64)],
    100: [gate(F32, "sigmoid"), *in_steps(F16)],
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("capability", "kind"), on(GATES), ids=named)
def test_a_gate(capability, kind, backward):
    """Nothing spilled, every operation rounded by itself, few of them for an exponential, and whole vectors.

    Vectors are whole although z and y take turns, too.
    """
    kind = kernel_kinds.gradients(kind) if backward else kind
    (variant,) = chosen(kind, 32)
    code, dtype = Code(variant, capability), kind.z
    assert set(code.loads) == set(code.stores) == {16}
    assert len(code.loads) == (3 if backward else 2) * dtype.itemsize // 2
    if not kind.limit:
        assert code.registers <= (128 if dtype == F64 else 64)
        real = "f64" if dtype == F64 else "f32"
        counted = len(re.findall(rf"\b(?:add|sub|mul)\.(?:rn\.)?{real}\b", code.ptx))
        assert counted <= 8 * (62 if dtype == F64 else 48), counted / 8


@pytest.mark.parametrize(
    ("capability", "dtype", "size"), [(75, F16, 4096), (90, BF16, 151936), (90, F64, 1000), (100, F32, 128256)], ids=str
)
def test_log_probabilities(capability, dtype, size):
    """Next to nothing spilled, each operation rounded by itself, whole vectors of rows, read as often as is said."""
    for kind in log_probabilities(dtype, size, 16):
        (variant,) = chosen(kind, 32)
        # Exact quotients of 32 numbers take most registers.
        code = Code(variant, capability, spilled=0 if kind.temperature is None else 16)
        assert code.registers <= (255 if dtype == F64 or kind.softcap else 128), kind
        assert code.shared <= 8 * 1024, kind
        # A tile is there twice: all of it, and what is left of a row.
        tile = 2 * variant.constants["SEGMENTS"] * variant.constants["DEPTH"] * variant.constants["WIDTH"]
        vectors = tile * dtype.itemsize // (16 * 32 * variant.warps)
        whole, gradients = kind.name == "log_softmax", kind.backward
        times = 3 if whole else 1 if gradients else 2
        assert code.loads.count(16) == times * vectors, kind
        assert code.stores.count(16) == (vectors if whole or gradients else 0), kind


#: Products of int8: of few rows and of many, with and without what is optional.
PRODUCTS = [
    product(BF16),
    product(F16, bias=F32, zero_point=True, few=False),
    product(F16, bias=BF16, few=False),
]


@pytest.mark.parametrize("target", [NVIDIA[1], NVIDIA[2], NVIDIA[3]], ids=named)
@pytest.mark.parametrize("kind", PRODUCTS, ids=["few", "zero points", "many"])
def test_products_of_int8(target, kind):
    """By tensor cores, of numbers that are copied while others are multiplied; each operation rounded by itself."""
    (variant,) = chosen(kind, 32)
    code = Code(variant, target.arch)
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in code.ptx
    assert "cp.async.cg.shared.global" in code.ptx
    assert not re.findall("wgmma|tcgen05", code.ptx)
    assert code.shared <= 64 * 1024


def test_products_of_int8_on_an_old_gpu(monkeypatch):
    """Triton cannot compile them for Turing: the formula computes them, which the reason says."""
    operation = fusednorm.explain(tensors((3, 8, 64))["q"], function=fusednorm.int8_linear).operation
    for capability, suits in ((75, False), (80, True)):
        target = GPUTarget("cuda", capability, 32), ""
        monkeypatch.setattr(triton_host, "active_target", lambda target=target: target)
        reasons = triton_gpu.unsuitable(operation)
        assert reasons == [] if suits else "compute capability 8.0 and newer" in reasons[0]


@pytest.mark.parametrize(
    ("capability", "heads", "registers"),
    [
        (75, rotation(F16, 128, 64), 64),
        (90, rotation(BF16, 128, 64), 64),
        (90, rotation(BF16, 128, 64, interleaved=True), 64),
        (90, rotation(BF16, 128, 0), 64),
        (90, rotation(F32, 256, 128), 80),
        (90, rotation(F64, 128, 64, table=F64), 160),
        (90, rotation(BF16, 128, 32), 128),
        (75, rotation(F16, 80, 40), 128),
        (100, rotation(BF16, 1024, 512), 80),
    ],
    ids=named,
)
def test_a_rotation(capability, heads, registers):
    """Few registers and none spilled, every operation rounded by itself, and whole vectors of all operands.

    Where all of a head is rotated and its size is a power of two, nothing passes through shared memory, of heads that a
    warp has several of, and each operand is read once.
    """
    for kind in (heads, rotated_alone(heads)) if heads.pairs else (heads,):
        (variant,) = chosen(kind, 32)
        code = Code(variant, capability)
        assert code.registers <= registers
        assert set(code.loads) == set(code.stores) == {16}
        assert sum(code.stores) == 16 * kind.q.itemsize  # a thread has 16 numbers
        barriers = code.ptx.count("bar.sync")
        if variant.constants["FORM"] == "parts":  # all threads have read before one stores, as that may be in place
            assert barriers == (1 if kind.pairs else 0)
        else:
            assert sum(code.loads) == 16 * (kind.q.itemsize * (1 + kind.norm) + kind.cos.itemsize)
            assert kind.hidden_size > 512 or (barriers, code.shared) == (0, 0)


def amd_assembly(variant, kernel, spilled="[vs]gpr"):
    """The assembly of a kernel that spills no registers of these kinds."""
    assembly = kernel.asm["amdgcn"]
    assert set(re.findall(rf"\.{spilled}_spill_count:\s*(\d+)", assembly)) == {"0"}, variant
    return assembly


def stores_are_wide(assembly):
    stores = re.findall(r"(?:global|buffer)_store_(\w+)", assembly)
    return bool(stores) and set(stores) <= {"dwordx4", "b128"}


@pytest.mark.parametrize(
    ("target", "x", "residual"),
    [*covering(AMD, (BF16, F16, F32, F64), (BF16, F16, F32)), (AMD[0], F64, F64)],
    ids=named,
)
def test_amd(target, x, residual):
    """Nothing fused or approximate but in what divides and takes roots, nothing flushed, nothing spilled, wide stores.

    Each pair of types has another length on each GPU. 4000 is no power of two: by those would be multiplied.
    """
    types = (BF16, F16, F32, F64)
    size = (100, 4000, 20000, 896, 7168, 16000)[(AMD.index(target) + types.index(x) + 4 * types.index(residual)) % 6]
    for name, variant in variants(x, residual, size, target.warp_size).items():
        kernel = triton_host.compiled(variant, target)
        assert unlike_the_source(name, x, kernel) == [], name
        assert kernel.metadata.shared <= 64 * 1024, name
        if x != F64:
            assembly = amd_assembly(variant, kernel)
            assert name in ("shares", "weight") or size % 8 != 0 or stores_are_wide(assembly), name


def kinds_on_amd():
    """Kinds of calls beside norms, and what their code has beside the operations of the source."""
    for kind in log_probabilities(BF16, 151936, 16):
        # The greater one of two numbers, and a small whole number as a float: both are exact.
        yield kind, "v_max_f32|v_max3_f32|v_cvt_f32_i32"
    mixed = {"z": F32, "out": F32, "between": BF16}
    taking_turns = {**GateSteps(7.0, 1.702, 1.0)._asdict(), "interleaved": True}
    for kind in (gate(BF16, "gelu_tanh", size=4000, **mixed), gate(BF16, "silu", size=4000, **taking_turns)):
        yield from ((kind, ""), (kernel_kinds.gradients(kind), ""))
    for kind in PRODUCTS:
        # Matrix cores; and whole numbers as floats, which are rounded once.
        yield kind, r".*_i32_\w*i.*|v_cvt_f32_i32"
    for of_heads in (False, True):
        kind = norm(F32, F16, 4000, weight=F16, round_norm=True, bias=F16, of_heads=of_heads, scaled=True)
        # Numbers of heads are divided by way of floating-point numbers.
        yield kind, ".*" if of_heads else ""


@pytest.mark.parametrize("target", [AMD[1], AMD[3]], ids=named)
@pytest.mark.parametrize(("kind", "more"), [*kinds_on_amd()], ids=lambda of: getattr(of, "name", "more"))
def test_more_on_amd(target, kind, more):
    """Nothing fused or approximate but in what divides and takes roots, nothing flushed, nothing spilled to memory."""
    (variant,) = chosen(kind, target.warp_size)
    kernel = triton_host.compiled(variant, target)
    name = {"norm": "forward", "int8_linear": "int8_linear"}.get(kind.name, "rows")
    found = map(str, unlike_the_source(name, F32, kernel))
    assert [one for one in found if not re.fullmatch(more, one)] == []
    # Scalar registers are spilled to vector registers, at most, which takes no memory.
    assembly = amd_assembly(variant, kernel, "vgpr" if kind.name in LOG_PROBABILITIES else "[vs]gpr")
    assert kind.name != "norm" or stores_are_wide(assembly)
    assert kind.name != "int8_linear" or re.search(r"v_mfma_i32_\w*i8|v_wmma_i32_\w*iu8", assembly)


@pytest.mark.parametrize("target", AMD, ids=named)
def test_rotations_on_amd(target):
    """Nothing fused or approximate but in what divides and takes roots, nothing flushed, nothing spilled, wide stores.

    A head's number is divided by the number of heads, in 64 bits and by way of floating-point numbers.
    """
    for kind in (rotation(F16, 96, 48, table=F16, products=F16), rotation(F16, 96, 32, interleaved=True)):
        (variant,) = chosen(kind, target.warp_size)
        kernel = triton_host.compiled(variant, target)
        divided = {"fused": (2, 4), "reciprocals": (-1, -2)}  # once, or once for each of two layouts of threads
        for of in unlike_the_source("forward", F16, kernel):
            if isinstance(of, tuple):
                part, number, wanted = of
                assert number - wanted in divided[part], of
            else:
                assert of in ("v_trunc_f32", "s_trunc_f32", "v_madmk_f32")
        assert stores_are_wide(amd_assembly(variant, kernel))


def in_both_types():
    """Kinds of calls with operands of bfloat16 and of float16."""
    both = (BF16, F16), (F16, BF16)
    for y, z in both:
        kind = gate(F16, "silu", alignment=4, size=1100, y=y, z=z, between=z)
        yield from (kind, kernel_kinds.gradients(kind, d=BF16, dy=F16))
    for x, table in both:
        kind = rotation(x, 64, 32, table=table, products=F16)
        yield from (kind, rotated_alone(kind))
    yield norm(BF16, F16, 1024)
    for hidden in (100, 4096, 70_000):
        for dy, h in both:
            yield norm_backward(dy, h, hidden, 16, weight=None, dresidual=h, dweight=None)


@pytest.mark.parametrize("kind", [*in_both_types()], ids=lambda kind: kind.name)
def test_bfloat16_and_float16_meet_in_float32(kind):
    """LLVM would round bfloat16 numbers to float16 first, which has a smaller range.

    No sum or product of two stored numbers is rounded at once either, although bfloat16 does not go by its bits.
    """
    (variant,) = chosen(kind, 32)
    operations = "mul|fma" if kind.name == "rotate" else "add|sub|mul|fma"  # whose products are rounded
    assert not re.findall(rf"(?:{operations})\.rn\.b?f16", Code(variant, 90).ptx)


def test_numbers_are_given_in_the_type_that_is_computed_in():
    assert forward(F64, F64, F64, 64, 32).arguments()["eps"] == ("fp64", 1)
    assert forward(BF16, F32, F32, 64, 32).arguments()["eps"] == ("fp32", 1)


@pytest.mark.parametrize("target", NVIDIA, ids=named)
def test_float64_divides_and_takes_roots_exactly(target):
    for variant in variants(F64, F64, 4096, 32).values():
        assert not re.findall(NOT_EXACT, triton_host.compiled(variant, target).asm["ptx"]), variant  # it may be spilled
    assert "sqrt.rn.f64" in Code(forward(F64, F64, F64, 64, 32), 90).ptx


@pytest.mark.parametrize(
    ("size", "alignment", "shuffles", "barriers"),
    [(128, 16, 44, 0), (4096, 16, 12, 1), (16384, 16, 12, 1), (4096, 8, 5, 1)],
)
def test_the_tree_takes_few_shuffles_and_one_barrier(size, alignment, shuffles, barriers):
    """With vectors of 8 elements: 4 + 2 + 1 + 1 + 1 + 3 shuffles, per row of a short one's program.

    Rows that begin anywhere are loaded element by element.
    """
    code = Code(forward(BF16, BF16, BF16, size, 32, alignment), 90)
    assert (code.ptx.count("shfl.sync"), code.ptx.count("bar.sync")) == (shuffles, barriers)
    assert code.shared <= 64
    assert set(code.loads) == {16 if alignment == 16 else 2}


def test_a_block_of_rows_loads_no_row_twice():
    """The loads of the following row are conditional; two barriers per row, and none to store the block's share."""
    code = Code(backward(BF16, BF16, 4096, 32)["both"], 90)
    (loop,) = (part for part in code.ptx.split("$L__BB0_") if "bar.sync" in part)  # a block of code at each label
    assert loop.count("bar.sync") == code.ptx.count("bar.sync") == 2
    d_total, following = (re.findall(rf"\n\t{condition}ld\.global", loop) for condition in ("", r"@%p\d+ "))
    assert len(d_total) == 4
    assert len(following) == 4 + 4 + 1
    assert code.shared == 16


def test_few_blocks_are_added_in_few_steps():
    """The sum over blocks has a piece of code for each of four numbers of them, and runs one."""
    ptx = Code(backward(BF16, BF16, 4096, 32)["weight"], 90).ptx
    loads = [part.count("ld.global") for part in re.split(r"\n\$L__BB0_\d+:", ptx)]
    assert [count for count in loads if count] == [16, 16, 16, 4]


def test_a_launch_of_a_quantizer(launches):
    """Limits, floors, strides and other rows never compile again; rows that are too long are not taken."""
    wide = torch.zeros(9, 4096, dtype=BF16)
    for rows in (2, 9):
        fusednorm.quantize(wide[:rows, : rows * 128], INT8)
    assert len(launches.compiled) == 2  # a row length each
    for rows in (2, 9):
        fusednorm.rms_norm_quant(wide[:rows], quantization=INT8)
        limited = replace(INT8, amax_floor=0.5, amax_limit=9.0, scale_floor=1e-3, qmax=100.0)
        fusednorm.rms_norm_quant(wide.repeat(1, 2)[:rows, :4096], quantization=limited)
    assert len(launches.compiled) == 3
    x = wide.view(1, -1)
    fusednorm.rms_norm_quant(x, quantization=INT8)
    assert [variant.function.__name__ for variant in launches.compiled[2:]] == ["quantize_tile", "forward"]
    names = list(launches.compiled[2].arguments())
    call = launches.calls[3]
    assert call[0] == (2, 1, 1)
    given = dict(zip(names, call[1:], strict=False))
    assert (given["qmin"], given["qmax"], given["scale_floor"]) == (-128.0, 100.0, in_float32(1e-3))
    assert (given["x_stride"], given["numbers_stride"], given["scale_stride"]) == (8192, 4096, 1)


def test_a_launch_of_gates(launches):
    """One kernel for each pass and row length; other rows and strides never compile again."""
    wide = torch.zeros(9, 8192, dtype=BF16)
    for rows in (2, 9):
        leaves = [wide[:rows, :4096].clone().requires_grad_() for _ in range(2)]
        out = fusednorm.gate(*leaves)
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        fusednorm.rms_norm_gated(wide[:rows, 4096:], wide[:rows, :4096])
        fusednorm.gate(wide[:rows, 4096:], wide[:rows, :4096])
        fusednorm.gate(wide[:rows, :100].clone(), wide[:rows, :100].clone())
    names = [variant.function.__name__ for variant in launches.compiled]
    assert names == ["gate_tile", "gate_backward_tile", "forward", "gate_tile"]
    assert [call[0] for call in launches.calls[-5:]] == [(36, 1, 1), (36, 1, 1), (9, 1, 1), (36, 1, 1), (2, 1, 1)]


def test_a_launch_of_a_rotation(launches):
    """One kernel for q and k, and for the way back; other rows, heads, strides, eps and angles never compile again."""
    weight, table = torch.zeros(128, dtype=BF16), torch.zeros(50, 64)
    for rows, (heads, of_k) in ((2, (16, 8)), (9, (7, 1))):
        qkv = torch.zeros(rows, heads + 2 * of_k, 128, dtype=BF16)
        q, k = qkv[:, :heads], qkv[:, heads : heads + of_k]
        fusednorm.qk_norm_rope_(q, k, weight, weight, table[:rows], table[:rows], rows * 1e-6)
        fusednorm.qk_norm_rope(q, k, weight, None, table[:1], table[:1])
        fusednorm.rotate(q, table, table, positions=torch.zeros(rows, dtype=torch.int64))
        leaf = q.clone().requires_grad_()
        turned = fusednorm.rotate(leaf, table[:rows], table[:rows])
        torch.autograd.grad(turned, leaf, turned.detach())
    # With weights, without one (k, apart from q), and without a norm: by positions, and not.
    assert len(launches.compiled) == 4
    assert {variant.function.__name__ for variant in launches.compiled} == {"rotate_tile"}
    assert [call[0][0] for call in launches.calls] == [2 + 1, 2, 1, 2, 2, 2, 4 + 1, 4, 1, 4, 4, 4]
    names = list(launches.compiled[0].arguments())
    given = dict(zip(names, launches.calls[6][1:], strict=False))
    lies = {"q_count": 7, "k_count": 1, "q_stride": 9 * 128, "q_out_head": 128, "q_weight_head": 0, "cos_stride": 64}
    assert {name: given[name] for name in lies} == lies
    assert (given["k"], given["k_out"]) == (given["q"] + 7 * 256,) * 2
    assert (given["rows"], given["eps"]) == (9, in_float32(9e-6))


def test_heads_that_the_rotation_does_not_take(launches):
    """Longer ones: a norm, and torch's operations."""
    q, table = torch.zeros(3, 2, 2048), torch.zeros(3, 1024)
    fusednorm.qk_norm_rope(q, q, None, None, table, table)
    assert {variant.function.__name__ for variant in launches.compiled} == {"forward"}


class Kernel:
    """A compiled kernel, which is launched as Triton's documentation has it: ``kernel[grid](...)``."""

    def __init__(self, found):
        self.found = found

    def __getitem__(self, grid):
        return lambda *arguments: self.found.calls.append((grid, *arguments))


@pytest.fixture
def launches(monkeypatch):
    """A driver that takes the CPU's memory, and only writes down what it is given; the kernels "compiled" for it."""
    found = SimpleNamespace(calls=[], compiled=[], backend="cuda")

    def compiled(variant, target):
        found.compiled.append(variant)
        return Kernel(found)

    found.really_compiled = triton_host.compiled
    monkeypatch.setattr(triton_host, "compiled", compiled)
    monkeypatch.setattr(triton_gpu, "DEVICES", ("cpu",))
    target = lambda: GPUTarget(found.backend, 90, 32)  # noqa: E731
    monkeypatch.setattr(type(driver), "active", SimpleNamespace(get_current_target=target))
    monkeypatch.setattr(triton_gpu._host, "held", {})
    monkeypatch.setattr(triton_gpu._host, "launchers", {})
    with fusednorm.use_backend("triton"):
        yield found


def run(backend, x, residual, weight, eps=1e-6, rows=None):
    total, out = torch.empty_like(residual), torch.empty_like(x)
    strides = tuple((0, t.stride(0)) for t in (x, residual, out, total))
    rows = x.shape[0] if rows is None else rows
    operation = operation_of(x, residual, weight, Flags())
    backend.forward(Forward(x, residual, weight, out, total, None, operation, rows, rows, strides, eps, 0.0))
    return out, total


def test_a_launch(launches):
    x, residual, weight = operands(Case(rows=5, hidden=1024).of(BF16))
    out, total = run(triton_gpu, x, residual, weight)
    (call,) = launches.calls
    pointers = [tensor.data_ptr() for tensor in (x, residual, weight, out, total)]
    grid, *arguments = call
    assert grid == (2, 1, 1)  # four rows per program
    assert arguments[:5] == pointers
    assert arguments[5:10] == [None, 1024, 1024, 1024, 1024]
    # After what only rows in two levels need; then what is before the addition or around a norm, and a gate.
    assert arguments[15:29] == [5, 1e-6, 0.0, *[None] * 10, 1024]
    assert len(arguments) == len(launches.compiled[0].function.arg_names)


def test_a_launch_with_what_is_around_a_norm(launches):
    """The factor, the number of heads and the strides are arguments; other heads never compile again."""
    x, _, weight = operands(Case(rows=12, hidden=1024).of(BF16))
    for heads in (3, 4):
        rows, of_heads = (t.unflatten(0, (-1, heads)) for t in (x, x[:heads]))
        fusednorm.fused_add_rms_norm(rows, rows, weight, bias=of_heads[0], x_scale=heads / 2)
        fusednorm.fused_add_rms_norm(rows, rows, of_heads[0], bias=weight, x_scale=1.0)
    fusednorm.rms_norm(x, bias=weight)
    factor, of_weight, *_, alone = (call[20:26] for call in launches.calls)
    assert factor == (None, x.data_ptr(), 0, 1024, 3, 1.5)
    assert of_weight == (None, weight.data_ptr(), 1024, 0, 3, None)
    assert alone == (None, weight.data_ptr(), None, None, None, None)
    assert [call[24] for call in launches.calls] == [3, 3, 4, 4, None]
    assert len(launches.compiled) == 3


def test_rows_eps_and_strides_never_compile_again(launches):
    wide = torch.zeros(40, 4096, dtype=BF16)
    for rows in (1, 7, 40):
        for step in (1, 2, 4):
            x = wide[:rows, : 4096 // step].as_strided((rows, 1024), (4096 // step, 1))
            run(triton_gpu, x, x.clone(), wide[0, :1024], eps=rows * 1e-6)
    assert len(launches.compiled) == 1
    run(triton_gpu, wide[:, 1:1025], wide[:, :1024], wide[0, :1024])
    assert len(launches.compiled) == 2  # rows that begin elsewhere than at multiples of 16 bytes
    run(triton_gpu, wide[:, 3:1027], wide[:, :1024], wide[0, :1024])
    assert len(launches.compiled) == 2
    for rows in (1, 3, 255, 256, 1000):
        x, residual, weight = operands(Case(rows=rows, hidden=64).of(F32))
        needs = (True, True, True)
        operation = operation_of(x, residual, weight, Flags())
        differentiate(triton_gpu, operation, x, residual, x, torch.ones(rows), weight, 0.0, needs)
    assert len(launches.compiled) == 2 + 3  # the rows, the blocks' shares of the weight's gradient, and their sum


def begins_at(offset, *shape, dtype=BF16):
    """Zeros of this shape that begin at so many elements of their memory."""
    return torch.zeros(math.prod(shape) + offset, dtype=dtype)[offset:].view(shape)


def test_prewarm_compiles_all_that_calls_will_need(launches):
    """Compiled for a driver that takes the CPU's memory: afterwards no call of the kind compiles anything."""
    fusednorm.prewarm(1024, BF16, residual_dtype=F32, weight_offset=1.0, training=True)
    compiled = len(launches.compiled)
    assert compiled > 0
    for offset in (0, 3):
        given = begins_at(offset, 6, 1024), begins_at(offset, 6, 1024, dtype=F32), begins_at(offset, 1024)
        leaves = [t.requires_grad_() for t in given]
        fusednorm.rms_norm(leaves[0].detach(), leaves[2].detach(), weight_offset=0.5, eps=1e-3)
        outputs = fusednorm.fused_add_rms_norm(*leaves, weight_offset=0.5)
        torch.autograd.grad(outputs, leaves, [torch.zeros_like(t) for t in outputs])
        fusednorm.fused_add_rms_norm(*(t.detach() for t in leaves), weight_offset=2.0)
    assert len(launches.compiled) == compiled


@pytest.mark.parametrize(
    ("around", "kernels"),
    [
        # With heads, a kernel of either function; of each, one for aligned rows and one for others.
        ({"bias": True, "heads": 7, "x_scale": 0.22}, 4),
        ({"weight": False, "bias": True, "weight_dtype": F32}, 4),
        ({"x_scale": 0.22}, 4),
    ],
)
def test_prewarm_compiles_what_is_around_a_norm(launches, around, kernels):
    heads, x_scale, dtype = around.get("heads", 1), around.get("x_scale", 1.0), around.get("weight_dtype", BF16)
    fusednorm.prewarm(1024, BF16, **around)
    assert len(launches.compiled) == kernels
    for offset in (0, 3):
        x, row = begins_at(offset, 6, heads, 1024), begins_at(offset, heads, 1024, dtype=dtype)
        weight, bias = row if around.get("weight", True) else None, row if "bias" in around else None
        fusednorm.rms_norm(x, weight, bias=bias)
        fusednorm.fused_add_rms_norm(x, x, weight, bias=bias, x_scale=x_scale * 2 if x_scale != 1.0 else 1.0)
    assert len(launches.compiled) == kernels


@pytest.mark.parametrize("interleaved", [False, True])
def test_prewarm_compiles_rotations(launches, interleaved):
    """Of aligned and of other heads, with tables per row and by positions; with gradients, and back."""
    flags = {"weight_offset": 1.0, "interleaved": interleaved, "round_products": True}
    fusednorm.prewarm(128, BF16, pairs=32, table_dtype=F32, training=True, **flags)
    compiled = len(launches.compiled)
    rotations = [variant.function.__name__ for variant in launches.compiled].count("rotate_tile")
    assert rotations == 2 * 2 * 3  # aligned or not, per row or by positions: a norm, with rstd, and back
    for offset in (0, 3):
        q, k, weight = (begins_at(offset, *shape, 128) for shape in ((3, 4), (3, 2), ()))
        table, positions = begins_at(offset, 3, 32, dtype=F32), torch.zeros(3, dtype=torch.int64)
        for of_rows in (None, positions):
            fusednorm.qk_norm_rope_(q, k, weight, weight, table, table, positions=of_rows, **flags)
            leaves = [t.clone().requires_grad_() if offset == 0 else t.requires_grad_() for t in (q, k, weight)]
            turned = fusednorm.qk_norm_rope(*leaves, leaves[2], table, table, positions=of_rows, **flags)
            torch.autograd.grad(turned, leaves, [t.detach() for t in turned])
            q, k, weight = (t.detach() for t in (q, k, weight))
    assert len(launches.compiled) == compiled
    with pytest.raises(ValueError, match="pairs must be an int of 0 to 64, half of hidden_size, got 65"):
        fusednorm.prewarm(128, BF16, pairs=65)


def test_why_not():
    """Here, without a driver for Triton, each backend says what it lacks; and asking for one raises with it."""
    if triton_host.active_target()[0] is not None:
        pytest.skip("Triton has a driver here")
    assert "finds no GPU" in triton_gpu.unavailable()[0]
    assert "github.com/triton-lang/triton-cpu" in triton_cpu.unavailable()[0]
    assert "triton-shared" not in triton_cpu.unavailable()[0]
    with fusednorm.use_backend("triton_cpu"), pytest.raises(fusednorm.BackendError, match="triton-lang/triton-cpu"):
        fusednorm.rms_norm(torch.ones(2, 8))


def test_without_triton():
    """It is not imported where nobody asks for it; where it is missing, the reason says how to get it."""
    code = """
    import sys
    class Hide:
        def find_spec(name, path=None, target=None):
            if name == "triton":
                raise ModuleNotFoundError("No module named 'triton'")
    if sys.argv[1] == "hide":
        sys.meta_path.insert(0, Hide)
    import torch, fusednorm
    fusednorm.rms_norm(torch.ones(2, 8))
    print("triton" in sys.modules)
    print(next(str(info) for info in fusednorm.backends() if info.name == "triton"))
    """

    assert printed_by(code, "show").startswith("False")
    hidden = printed_by(code, "hide").splitlines()
    assert hidden[0] == "False"
    assert "pip install triton" in hidden[1]


def test_too_long_rows_are_refused():
    operation = fusednorm.explain(torch.ones(1, 8)).operation._replace(hidden_size=triton_host.LONGEST + 1)
    for backend in (triton_gpu, triton_cpu):
        assert "longer than" in backend.unsuitable(operation)[0]
        assert backend.unsuitable(operation._replace(hidden_size=triton_host.LONGEST)) == []


def test_old_versions_are_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "pip install 'triton>=3.6'" in triton_gpu.unavailable()[0]
    (reason,) = triton_cpu.unavailable()  # the index has none for CPUs
    assert "pip install" not in reason
    assert "3.5.1 is too old; build a newer one from source, github.com/triton-lang/triton-cpu" in reason


def test_the_oldest_triton_compiles_every_kind_of_kernel(launches, monkeypatch):
    """All kinds of calls of the table, with rows that a program has several of, with a rest or not, one, or a part.

    `tox -e triton` runs this with that version too.
    """
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version == triton_host.NEWEST:
        pytest.skip("tox -e triton runs this with the oldest Triton; the other tests compile with this one")
    assert version == triton_host.OLDEST, "tox.ini names another version"
    kinds, choosers = {}, dict(triton_gpu._host.choosers)
    for name, choose in choosers.items():
        noted = lambda kind, choose=choose: choose(kinds.setdefault(kind, kind))  # noqa: E731
        monkeypatch.setitem(triton_gpu._host.choosers, name, noted)
    for function, given in [*((function_of(name), given) for name, given in FUNCTIONS.items()), *MORE.values()]:
        function(**clones(given))
    for outputs, leaves in map(recorded, DIFFERENTIATED):
        gradients(outputs, leaves)
    targets, sizes = itertools.cycle((NVIDIA[2], NVIDIA[3], AMD[1])), itertools.cycle((96, 128, 4096, 20000))
    compiled = set()
    for kind, target, size in zip(kinds, targets, sizes, strict=False):
        if kind.name == "rotate":
            sized = [kind.changed(hidden_size=128, pairs=kind.pairs and 64)]
        elif kind.name == "norm_backward":
            sized = [kind.changed(hidden_size=size) for size in (96, 4096)]
        elif kind.name == "int8_linear":
            sized = [kind.changed(few=few, hidden_size=4096) for few in (True, False)]
        else:
            most = 1000 if kind.name in LOG_PROBABILITIES else 16384 if kind.name == "quantize" else size
            sized = [kind.changed(hidden_size=min(size, most))]
        for kind in sized:
            chosen = choosers[kind.name](kind._replace(alignment=16), target.warp_size)
            for variant in chosen.values() if isinstance(chosen, dict) else [chosen]:
                kernel = launches.really_compiled(variant, target)
                assert target in AMD or not re.findall(NOT_EXACT, kernel.asm["ptx"]), variant
                compiled.add(variant.function.__name__)
    kernels = "forward backward_rows backward_blocks weight_blocks add_blocks quantize_tile rotate_tile"
    kernels += " gate_tile gate_backward_tile log_prob log_prob_backward int8_linear"
    assert compiled == {*kernels.split()}


class Nothing:
    """A launcher that notes what Triton gives it."""

    given = ()

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        Nothing.given = arguments


def test_tritons_own_code_calls_its_launcher(monkeypatch):
    """A kernel that Triton compiled: its launcher is given what Triton's own binder gives it, whatever that is."""
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 32, 0, 1024),
        unload_module=lambda *_: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 3,
        get_current_stream=lambda device: 100 + device,
        launcher_cls=Nothing,
        utils=utils,
    )
    monkeypatch.setattr(type(driver), "active", stand_in)
    monkeypatch.setattr(triton_gpu._host, "held", {})
    monkeypatch.setattr(triton_gpu._host, "launchers", {})
    x, residual, weight = operands(Case(rows=5, hidden=1024).of(BF16))
    run(triton_gpu, x, residual, weight)
    ours, names = Nothing.given, triton_kernels.forward.arg_names
    variant = forward(BF16, BF16, BF16, 1024, 32)
    # No jumps, because rows lie in one level, no norm before the addition, nothing around a norm, and no gate.
    numbers = (*[1024] * 4, *[None] * 5, 5, 1e-6, 0.0, *[None] * 10)
    total, out = torch.empty_like(residual), torch.empty_like(x)
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    variant.function[(2,)](x, residual, weight, out, total, None, *numbers, **variant.all_constants(), **options)
    theirs = Nothing.given
    assert len(ours) == len(theirs)
    before = len(ours) - len(names)
    assert ours[:4] == theirs[:4] == (2, 1, 1, 103)
    assert ours[before + 5 :] == theirs[before + 5 :]


USED = {
    (triton, "compile"): "compile(src, target, options)",
    (triton.compiler, "ASTSource"): "compiler.ASTSource(fn, signature, constexprs, attrs)",
    (triton.compiler.CompiledKernel, "__getitem__"): "compiler.CompiledKernel.__getitem__(grid)",
}


@pytest.mark.parametrize(
    ("used", "named", "gone"),
    [
        *((used, named, gone) for used, named in USED.items() for gone in (True, False)),
        ((triton_kernels.forward, "arg_names"), "arg_names", True),
    ],
)
def test_another_triton_is_a_reason(launches, monkeypatch, used, named, gone):
    """Names that are not documented and gone, or that take other arguments: refused before anything is compiled."""
    assert triton_gpu.unavailable() == []
    if gone:
        monkeypatch.delattr(*used)
    else:
        monkeypatch.setattr(*used, lambda kernel, /, *arguments: None)
    expected = f"Triton {triton.__version__} lacks {named}, which fusednorm calls; update fusednorm, or `pip install"
    (reason,) = triton_gpu.unavailable()
    assert reason.startswith(expected)
    launches.backend = "cpu"
    on_cpus = triton_cpu.unavailable()
    if "__getitem__" in named:  # C calls what is compiled for CPUs
        assert on_cpus == []
    else:
        assert on_cpus[0].startswith(expected.partition(", or")[0])
        assert "pip install" not in on_cpus[0]
    launches.backend = "cuda"
    with fusednorm.use_backend("triton"), pytest.raises(fusednorm.BackendError, match=re.escape(expected)):
        fusednorm.rms_norm(torch.ones(2, 8))


@pytest.mark.parametrize("metadata", [{}, {"enable_fp_fusion": True}])
def test_options_that_triton_ignores_raise(monkeypatch, metadata):
    """It drops those that it does not know; without this one, multiplications and additions would be fused."""
    monkeypatch.setattr(triton, "compile", lambda **_: SimpleNamespace(metadata=SimpleNamespace(**metadata)))
    with pytest.raises(fusednorm.BackendError, match="ignores the option enable_fp_fusion=False, without which bits"):
        triton_host.compiled(forward(BF16, BF16, BF16, 4096, 32), NVIDIA[0])


@pytest.mark.parametrize(
    ("release", "fuses"), [("12.8", True), ("12.9", True), ("13.0", True), ("13.1", False), ("14.0", False)]
)
def test_a_ptxas_that_fuses_pairs_raises(monkeypatch, release, fuses):
    """Where Triton's LLVM makes pairs also when it is asked not to. A cache may have kept machine code alone."""
    asm = {"ptx": "mul.rn.f32x2 %rd3, %rd1, %rd2;", "cubin": f"release {release}, V{release}.8".encode()}
    kernel = SimpleNamespace(metadata=SimpleNamespace(enable_fp_fusion=False), asm=asm)
    asked = []
    monkeypatch.setattr(triton, "compile", lambda **_: asked.append(os.environ["DISABLE_LLVM_OPT"]) or kernel)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "disable-lsr")
    variant, once = forward(BF16, BF16, BF16, 4096, 32), ["disable-lsr"]
    assert triton_host.compiled(variant, GPUTarget("cuda", 90, 32)) is kernel
    assert asked == once
    for kernel.asm in (asm, {"cubin": asm["cubin"]}):
        asked.clear()
        if fuses:
            with pytest.raises(fusednorm.BackendError, match=r"than 13.1 fuses.*; set TRITON_PTXAS_BLACKWELL_PATH"):
                triton_host.compiled(variant, GPUTarget("cuda", 120, 32))
        else:
            assert triton_host.compiled(variant, GPUTarget("cuda", 120, 32)) is kernel
        assert asked == once + fuses * ["disable-lsr,nvptx-no-f32x2"]
        assert os.environ["DISABLE_LLVM_OPT"] == "disable-lsr"


@pytest.mark.parametrize("arch", [100, 120])
def test_a_ptxas_that_fuses_pairs_is_given_none(monkeypatch, tmp_path, arch):
    """Triton brings an old one too, for older GPUs, which stands in here for that of Triton 3.6."""
    old = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(old))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = Code(triton_gpu.gate_variant(gate(F32, "silu"), 32), arch)
    assert b"release 12.9, V" in code.machine_code
    assert "mul.rn.f32" in code.ptx
    assert "f32x2" not in code.ptx
    assert "DISABLE_LLVM_OPT" not in os.environ


def test_another_triton_driver_is_a_reason(monkeypatch):
    """Other packages may bring drivers: one that has no target, and one whose target has no parts."""
    nameless = SimpleNamespace(get_current_target=lambda: SimpleNamespace(name="H100"))
    for stand_in, reason in ((SimpleNamespace(), "AttributeError"), (nameless, "its target lacks backend, warp_size")):
        monkeypatch.setattr(type(driver), "active", stand_in)
        assert reason in triton_gpu.unavailable()[0]
        assert reason in triton_cpu.unavailable()[0]
