"""The CUDA C++ kernels as machine code for GPUs that need not be here, their cache on disk, and their launch."""

import ctypes
import enum
import importlib.util
import itertools
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cuda
from fusednorm.backends.cuda import choice as cuda_kernels
from fusednorm.backends.cuda import compiler as cuda_compiler
from fusednorm.backends.cuda import products as cuda_products
from fusednorm.backends.kernel_keys import (
    BackwardKind,
    ForwardKind,
    GateKind,
    GateOfNorm,
    LogProbKind,
    QuantizerKind,
    RotationKind,
    fuses,
    lacking,
)
from fusednorm.calls import fast_path
from fusednorm.calls.call import AroundNorm, FirstNorm, Flags, Forward, GateSteps, RMSNorm, operation_of
from fusednorm.conformance import cases
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.conformance.test_int8_linear import tensors
from fusednorm.engine import choose
from fusednorm.engine import run_norms as front_end
from fusednorm.tools import doctor

compiles = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="takes NVRTC, which tox -e cuda installs, and no sanitizers",
)

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
TYPES = ((BF16, BF16), (F32, F32), (BF16, F32))
KERNELS = (
    *((BF16, BF16, size) for size in (128, 4096, 7168, 65536)),
    *((F32, F32, size) for size in (128, 16384)),
    (BF16, F32, 4096),
)
# The code differs most between the oldest GPUs, those with clusters, and those with accesses of 32 bytes.
MACHINE_CODE = [
    (capability, *kernel)
    for capability in ARCHITECTURES
    for kernel in KERNELS
    if capability in (75, 90, 100) or kernel in ((BF16, BF16, 4096), (F32, F32, 16384)) or cases.EVERYTHING
]


def variants(x, residual, size, alignment, capability, center=False):
    """All kernels of both passes, by what they do."""
    accumulator = F64 if x == F64 else F32
    forward = ForwardKind(x, residual, x, x, residual, size, True, False, True, False, alignment, center=center)
    dresidual = None if residual == x else residual
    dtypes = (x, residual, residual, x, x, dresidual, x, accumulator)
    backward = BackwardKind(*dtypes, size, False, alignment, center=center)
    found = {"forward": cuda_kernels.forward_variant(forward, capability)}
    return {**found, **cuda_kernels.backward_variants(backward, capability)}


def tool(name):
    """A program of NVIDIA's wheels."""
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(path for nvidia in folders for path in Path(nvidia).rglob(name) if path.is_file())


def printed(option, code, folder):
    """What cuobjdump says of machine code."""
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    environment = {**os.environ, "PATH": f"{tool('nvdisasm').parent}{os.pathsep}{os.environ['PATH']}"}
    command = [tool("cuobjdump"), option, file]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def resources(code, folder):
    """Registers and bytes of stack of a thread, and bytes of shared memory of a block."""
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", printed("-res-usage", code, folder))
    return tuple(map(int, used.groups()))


def instructions_of(code, folder):
    """The names of the instructions, and where those that store 16 bytes add something to an address, what they add."""
    listing = printed("-sass", code, folder)
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?"
    stores = re.findall(line + r"STG\S*\.128\S* .*\+0x([0-9a-f]+)\]", listing, re.MULTILINE)
    return re.findall(line + r"([A-Z][\w.]+)", listing, re.MULTILINE), [int(offset, 16) for offset in stores]


def without_spills(variant, capability, folder):
    """What :func:`instructions_of` a kernel says; it spills nothing, and takes no more than a block has."""
    code = cuda_compiler.compiled(variant, capability)
    registers, stack, shared = resources(code, folder)
    instructions, offsets = instructions_of(code, folder)
    assert stack == 0, variant
    assert not [i for i in instructions if i.startswith(("LDL", "STL"))], variant
    assert registers * variant.threads <= 65536, variant
    assert shared <= 48 * 1024, variant
    return instructions, offsets


@compiles
@pytest.mark.parametrize(("capability", "x", "residual", "size"), MACHINE_CODE, ids=lambda of: str(of).split(".")[-1])
def test_machine_code(tmp_path, capability, x, residual, size):
    """Accesses of 16 bytes (32 from sm_100 on) to whole sectors, and nothing spilled."""
    for name, variant in variants(x, residual, size, 32, capability).items():
        instructions, offsets = without_spills(variant, capability, tmp_path)
        widest = ".256" if capability >= 100 else ".128"
        loads = [i for i in instructions if i.startswith("LDG")]
        stores = [i for i in instructions if i.startswith("STG")]
        if name == "sums":  # by columns, one per lane
            continue
        assert {i for i in loads if widest in i}, name
        assert {i for i in stores if widest in i}, name
        narrow = [i for i in loads + stores if ".128" not in i and ".256" not in i]
        # A row's root is one number.
        assert len(narrow) <= 17, (name, narrow)
        if x == BF16 and capability >= 80:  # elements are widened and rounded in pairs: no half of a word is moved
            assert sum(i.startswith("PRMT") for i in instructions) <= 4, name
        if name != "forward":  # memory is written in sectors of 32 bytes: no lane stores two halves of one
            assert not [offset for offset in offsets if offset % 32], name


def loads_of(variant, capability, folder):
    """How many loads a kernel has, which spills nothing."""
    return sum(i.startswith("LDG") for i in without_spills(variant, capability, folder)[0])


@compiles
@pytest.mark.parametrize(
    ("capability", "x", "residual", "size"),
    [
        (90, BF16, BF16, 1024),
        (90, BF16, BF16, 8192),
        (90, F32, F32, 16384),
        (90, BF16, BF16, 200_000),
        (75, BF16, F32, 4096),
        (100, BF16, BF16, 65536),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_a_norm_before_the_addition(tmp_path, capability, x, residual, size):
    """Nothing spilled, and only x is read once more, where a row is too long for registers."""
    for weight, out in ((x, x), (None, None)):
        kind = ForwardKind(x, residual, weight, out, residual, size, True, False, False, False, 32)
        variant = cuda_kernels.forward_variant(kind._replace(first=FirstNorm(x, x)), capability)
        loads = loads_of(variant, capability, tmp_path)
        bytes_of_lane = 32 * (2 * x.itemsize + residual.itemsize + (0 if weight is None else x.itemsize))
        if variant.kernel == "forward":  # all four operands once, or all three
            assert loads == bytes_of_lane // (32 if capability >= 100 else 16)


@compiles
@pytest.mark.parametrize(
    ("capability", "x", "residual", "size"),
    [
        (90, BF16, BF16, 128),
        (90, BF16, BF16, 8192),
        (90, F32, F32, 16384),
        (90, F64, F64, 16384),
        (90, BF16, BF16, 200_000),
        (75, BF16, F32, 4096),
        (100, F32, F32, 65536),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_what_is_around_a_norm(tmp_path, capability, x, residual, size):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    for around in (AroundNorm(x, False, True), AroundNorm(x, True, True)):
        kind = ForwardKind(x, residual, x, x, residual, size, True, False, False, False, 32, around=around)
        variant = cuda_kernels.forward_variant(kind, capability)
        loads = loads_of(variant, capability, tmp_path)
        if variant.kernel == "forward":  # a lane has 32 elements of x; where half a warp has a row, of 8 columns
            columns = 8 if size == 128 and not around.of_heads else 32
            read = 32 * (x.itemsize + residual.itemsize) + columns * 2 * x.itemsize
            assert loads == read // (32 if capability >= 100 else 16), around


@compiles
@pytest.mark.parametrize(
    ("capability", "x", "residual", "size"),
    [
        (90, BF16, BF16, 128),
        (90, F32, F32, 16384),
        (90, F64, F64, 4096),
        (75, BF16, F32, 4096),
        (100, BF16, BF16, 200_000),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_centered_rows(tmp_path, capability, x, residual, size):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    plain = variants(x, residual, size, 32, capability)
    for name, variant in variants(x, residual, size, 32, capability, center=True).items():
        loads = loads_of(variant, capability, tmp_path)
        if variant.kernel in ("forward", "backward_rows", "backward_blocks"):
            assert loads == loads_of(plain[name], capability, tmp_path)
        if name == "sums":
            assert variant == plain[name]


QUANTIZED = {
    "int8": Quantization(torch.int8, apply="reciprocal"),
    "float8": quantizations.VLLM_FP8_TOKEN,
    "float8 blocks": quantizations.VLLM_FP8_BLOCK_FUSED,
    "single elements": Quantization(torch.float8_e5m2, per=1),
    "zero points": Quantization(torch.uint8, per=64, zero_point="before"),
}


def quantized_kind(x, residual, size, quantization, normalises=True):
    """The kind of a call that quantizes rows, alone or after a norm whose rows nobody else wants."""
    quantizer = QuantizerKind(quantization, normalises, not normalises)
    others = (residual, x, x, residual) if normalises else (None, None, x, None)
    return ForwardKind(x, *others, size, True, False, False, False, 32, quantizer=quantizer)


@compiles
@pytest.mark.parametrize(
    ("capability", "x", "residual", "size", "names"),
    [
        (90, BF16, BF16, 4096, tuple(QUANTIZED)),
        (90, BF16, BF16, 128, ("float8", "zero points")),
        (90, F32, F32, 16384, ("float8 blocks",)),
        (90, F64, F64, 4096, ("zero points",)),
        (90, BF16, BF16, 200_000, ("float8",)),
        (75, BF16, F32, 4096, ("int8", "float8 blocks")),
        (80, BF16, BF16, 65536, ("int8",)),
        (100, BF16, BF16, 65536, ("float8", "float8 blocks")),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_a_quantizer(tmp_path, capability, x, residual, size, names):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    for name, normalises in itertools.product(names, (True, False)):
        kind = quantized_kind(x, residual, size, QUANTIZED[name], normalises)
        variant = cuda_kernels.forward_variant(kind, capability)
        assert variant.kernel.startswith("forward" if normalises else "quantize")
        loads = loads_of(variant, capability, tmp_path)
        if not variant.kernel.endswith("wide"):  # a lane has 32 elements; where half a warp has a row, 8 of the weight
            weight = (8 if size == 128 else 32) * x.itemsize
            read = 32 * (x.itemsize + residual.itemsize) + weight if normalises else 32 * x.itemsize
            assert loads == read // (32 if capability >= 100 else 16)


@compiles
@pytest.mark.parametrize("capability", [75, 86, 89, 90, 100])
def test_the_gpu_rounds_to_8_bits_where_it_can(monkeypatch, capability):
    """From compute capability 8.9 on, two elements at a time, in the rows of a norm and alone."""
    options = cuda_compiler.options

    def as_ptx(*given):
        return [option.replace("=sm_", "=compute_") for option in options(*given)]

    monkeypatch.setattr(cuda_compiler, "options", as_ptx)
    for dtype, normalises in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.int8, False)):
        kind = quantized_kind(BF16, BF16, 4096, Quantization(dtype), normalises)
        variant = cuda_kernels.forward_variant(kind, capability)
        ptx = cuda_compiler.compiled(variant, capability).decode()
        found = re.findall(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", ptx)
        rounds = dtype.is_floating_point and capability >= 89
        assert found == [str(dtype)[13:17]] * (16 * rounds)


def test_int8_and_uint8_share_a_kernel_and_numbers_are_arguments():
    """Floors, limits and ranges load no other kernel, and a group as long as the row is the row."""
    found = {
        cuda_kernels.forward_variant(quantized_kind(BF16, BF16, 4096, quantization), 90)
        for quantization in (
            Quantization(torch.int8),
            Quantization(torch.uint8, scale_floor=1e-3),
            Quantization(torch.int8, per=4096, qmin=-100, amax_limit=5.0),
        )
    }
    assert len(found) == 1


def test_groups_that_are_torchs():
    for group, hidden_size, fused in (
        (1, 96, 1),
        (64, 64, 1),
        (96, 96, 1),
        (96, 192, 0),
        (1024, 4096, 1),
        (2048, 4096, 0),
    ):
        assert fuses(group, hidden_size) == fused


@compiles
@pytest.mark.parametrize(
    ("capability", "dtype", "size"),
    [(75, BF16, 4096), (90, BF16, 128), (90, F32, 4096), (90, BF16, 200_000), (100, BF16, 65536)],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_a_norm_with_a_gate(tmp_path, capability, dtype, size):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    for between in (dtype, None):
        gate = GateOfNorm("silu", dtype, between)
        kind = ForwardKind(dtype, None, dtype, dtype, None, size, True, False, False, False, 32, gate=gate)
        variant = cuda_kernels.forward_variant(kind, capability)
        loads = loads_of(variant, capability, tmp_path)
        if variant.kernel == "forward":  # a lane has 32 elements; where half a warp has a row, 8 of the weight
            read = (32 + 32 + (8 if size == 128 else 32)) * dtype.itemsize
            assert loads == read // (32 if capability >= 100 else 16)


@compiles
@pytest.mark.parametrize(
    ("capability", "dtype", "size", "pairs", "interleaved"),
    [
        (75, F16, 128, 64, False),
        (90, BF16, 128, 64, False),
        (90, BF16, 128, 64, True),
        (90, F32, 256, 128, False),
        (100, BF16, 256, 128, False),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_a_rotation(tmp_path, capability, dtype, size, pairs, interleaved):
    """Nothing spilled, nothing fused, and heads, weights and tables of halves are read in whole vectors."""
    rest = (False, False, False, interleaved, size, pairs, 32)
    kind = RotationKind(dtype, dtype, dtype, None, F32, F32, dtype, None, True, *rest)
    variant = cuda_kernels.rotation_variant(kind, capability)
    loads = loads_of(variant, capability, tmp_path)
    at_once = 32 if capability >= 100 else 16
    of_tables = 2 * 32 if interleaved else 2 * 32 * F32.itemsize // at_once
    assert loads == 2 * 32 * dtype.itemsize // at_once + of_tables
    ptx = cuda_compiler.compiled(variant, capability + 4).decode()
    assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx)


@compiles
@pytest.mark.parametrize("name", ["log_softmax", "selected_and_entropy"])  # whose kernels have the others' steps
@pytest.mark.parametrize(
    ("capability", "dtype", "size"),
    [(75, BF16, 151_936), (90, BF16, 151_936), (90, F32, 151_936), (90, F64, 32_000), (100, BF16, 128_256)],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_log_probabilities(tmp_path, capability, dtype, size, name):
    """Nothing spilled, also of rows that begin anywhere; nothing fused; and rows are read in whole vectors."""
    wide, whole, selects = F64 if dtype == F64 else F32, name == "log_softmax", name.startswith("selected")
    ids, entropy = torch.int64 if selects else None, wide if name == "selected_and_entropy" else None
    capped_or_not = (False, True) if selects else (False,)
    for d, capped, alignment in cases.covering((None, dtype if whole else wide), capped_or_not, (32, dtype.itemsize)):
        of_entropy = None if d is None else entropy
        out = dtype if whole or d is not None else wide
        kind = LogProbKind(name, dtype, out, ids, wide if capped else None, d, of_entropy, capped, size, alignment)
        variant = cuda_kernels.log_prob_variant(kind, capability)
        assert variant.cluster == (8 if capability >= 90 and size > 100_000 else 4 if capability >= 90 else 1)
        instructions, _ = without_spills(variant, capability, tmp_path)
        if alignment == 32:
            whole_vectors = ".256" if capability >= 100 else ".128"
            # Twice, to find the greatest and the sum; once more to write; a gradient reads once, and d twice.
            turns = (2 + whole) if d is None else 1 + 2 * whole
            loads = sum(i.startswith("LDG") and whole_vectors in i for i in instructions)
            wanted = turns * 32 * dtype.itemsize // (32 if capability >= 100 else 16)
            assert loads == wanted or (capability >= 100 and loads > wanted)  # there the compiler unrolls some loops
    ptx = cuda_compiler.compiled(variant, capability + 4).decode()  # NVRTC does not know such a GPU
    assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx)


@compiles
@pytest.mark.parametrize(
    ("capability", "dtype", "activation"),
    [
        (75, BF16, "silu"),
        (80, F16, "sigmoid"),
        (90, BF16, "gelu_tanh"),
        (90, F32, "silu"),
        (90, F64, "gelu_tanh"),
        (100, BF16, "silu"),
    ],
    ids=lambda of: str(of).split(".")[-1],
)
def test_machine_code_of_a_gate(tmp_path, capability, dtype, activation):
    """Nothing spilled, each operand is one access, and an exponential takes few operations, each rounded by itself."""
    vector = (32 if capability >= 100 else 16) // dtype.itemsize
    # Forwards there are two exponentials, of which the second is rarely taken.
    most = (80, 60) if dtype == F64 else (55, 46)
    for d in (None, dtype):
        kind = GateKind(d, dtype, dtype, dtype, d, activation, None, 4096, 32)
        variant = cuda_kernels.gate_variant(kind, capability)
        assert variant.kernel == ("gate" if d is None else "gate_backward")
        loads = loads_of(variant, capability, tmp_path)
        assert loads == (2 if d is None else 3)
        ptx = cuda_compiler.compiled(variant, capability + 4).decode()  # NVRTC does not know such a GPU
        assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx)
        real = "f64" if dtype == F64 else "f32"
        quotients = len(re.findall(rf"(?:div|rcp)\.rn\.{real}", ptx))
        assert quotients == vector * (1 if d is None or activation == "sigmoid" else 2)
        counted = len(re.findall(rf"(?:add|sub|mul)(?:\.rn)?\.{real}", ptx))
        assert counted <= vector * most[d is not None]


@compiles
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=lambda of: str(of).split(".")[-1])
def test_machine_code_of_a_gate_in_steps(tmp_path, dtype):
    """Nothing spilled, whole vectors although z and y take turns, and a few operations more."""
    steps = GateSteps(7.0, 1.702, 1.0)
    for d in (None, dtype):
        kind = GateKind(d, dtype, dtype, dtype, d, "silu", None, 4096, 32, steps=steps, interleaved=True)
        variant = cuda_kernels.gate_variant(kind, 90)
        assert loads_of(variant, 90, tmp_path) == (2 if d is None else 3)
        ptx = cuda_compiler.compiled(variant, 94).decode()  # NVRTC does not know such a GPU
        assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx)
        counted = len(re.findall(r"(?:add|sub|mul)(?:\.rn)?\.f\d\d", ptx))
        assert counted <= 16 // dtype.itemsize * (90 if dtype == F64 else 65)


@compiles
@pytest.mark.parametrize("capability", ARCHITECTURES if cases.EVERYTHING else (75, 90, 100), ids="sm_{}".format)
def test_rows_that_begin_anywhere(tmp_path, capability):
    for x, residual in (*TYPES, (F16, F16), (F64, F64)) if capability == 90 else TYPES:
        for size in (896, 16384) if capability == 90 else (16384,):
            for name, variant in variants(x, residual, size, x.itemsize, capability).items():
                registers, stack, _ = resources(cuda_compiler.compiled(variant, capability), tmp_path)
                assert stack == 0, (x, residual, size, name)
                assert registers * variant.threads <= 65536, (x, residual, size, name)


@compiles
def test_every_operation_is_rounded_by_itself(tmp_path):
    """PTX has no fused multiplication, and machine code has them in division and root alone: ever the same number."""
    counts = set()
    for size in (1024, 4096, 8192, 5120):
        variant = variants(BF16, BF16, size, 16, 90)["forward"]
        ptx = cuda_compiler.compiled(variant, 93).decode()  # NVRTC does not know 9.3
        assert ".target sm_90" in ptx
        assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx)
        assert "sqrt.rn.f32" in ptx
        assert "div.rn.f32" in ptx
        instructions, _ = instructions_of(cuda_compiler.compiled(variant, 90), tmp_path)
        counts.add(sum(i.startswith("FFMA") for i in instructions))
    assert len(counts) == 1
    for variant in variants(F64, F64, 4096, 16, 90).values():
        assert not re.findall(r"\bfma\b|\.approx", cuda_compiler.compiled(variant, 93).decode())


@compiles
def test_the_tree_takes_few_shuffles_and_one_barrier(tmp_path):
    instructions, _ = instructions_of(
        cuda_compiler.compiled(variants(BF16, BF16, 4096, 16, 90)["forward"], 90), tmp_path
    )
    assert sum(i.startswith("SHFL") for i in instructions) == 14
    assert sum(i.startswith("BAR") for i in instructions) == 1


@compiles
def test_what_does_not_compile_raises_with_the_log(monkeypatch):
    variant = variants(BF16, BF16, 4096, 16, 90)["forward"]
    monkeypatch.setattr(cuda_compiler, "_sources", lambda: {"forward.cu": b'#error "no such luck"'})
    with pytest.raises(fusednorm.BackendError, match="no such luck"):
        cuda_compiler.compiled(variant, 90)


def test_a_layout_depends_on_the_row_alone():
    """Not on the number of rows; and the widest access that all operands allow, never beyond a row's end."""
    for capability in ARCHITECTURES:
        for size in (1, 31, 33, 1000, 1029, 4096, 5120, 16384, 16385, 131072, 262144, cuda_kernels.LONGEST):
            for alignment in (2, 4, 8, 16, 32):
                layout = cuda_kernels.Layout.of(size, [BF16, F32], alignment, capability)
                assert size % layout.vector == 0
                assert layout.aligned <= alignment
                assert layout.aligned <= (32 if capability >= 100 else 16)
                assert layout.cluster == 1 or capability >= 90
                covered = layout.row if not layout.blocks_row else layout.cluster * layout.warps * 1024
                assert layout.wide or covered >= size
                assert not layout.full or layout.wide or covered == size


VARIANT = cuda_kernels.forward_variant(
    ForwardKind(BF16, BF16, BF16, BF16, BF16, 4096, True, False, False, False, 16), 90
)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of its own, and a compiler that counts; ``asked()`` is the number of the code that the cache then has."""
    found = SimpleNamespace(folder=tmp_path / "cache" / "cuda", compiled=0, driver=13000, source=b"one")

    def compiled(variant, capability):
        found.compiled += 1
        return b"machine code %d" % found.compiled

    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_compiler, "compiled", compiled)
    monkeypatch.setattr(cuda_compiler, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_compiler, "_sources", lambda: {"forward.cu": found.source})
    driver = SimpleNamespace(cuDriverGetVersion=lambda: (0, found.driver))
    nvrtc = SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [75, 80, 90]))
    monkeypatch.setattr(cuda_compiler, "bindings", lambda: (driver, nvrtc))
    cuda_compiler._warn_once.cache_clear()
    found.asked = lambda: int(cuda_compiler.from_cache(VARIANT, 90).removeprefix(b"machine code "))
    return found


def test_what_was_compiled_is_kept(cache):
    assert cache.asked() == cache.asked() == 1
    (file,) = cache.folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert doctor.report()["cache"] == {"folder": str(cache.folder), "kernels": 1, "problem": None}


def test_another_source_driver_or_gpu_is_compiled_again(cache):
    cache.asked()
    cache.source = b"two"
    cache.asked()
    cache.driver = 13010
    cache.asked()
    cuda_compiler.from_cache(VARIANT, 80)
    assert cache.compiled == 4
    cuda_compiler.from_cache(VARIANT, 80)
    assert cache.compiled == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content[:-1] + b"X",
        lambda content: b"X" + content[1:],
        lambda content: content[:32],
    ],
    ids=["truncated", "shorter than its checksum", "empty", "one byte wrong", "a wrong checksum", "no code"],
)
def test_a_damaged_file_is_compiled_again(cache, spoil):
    cache.asked()
    (file,) = cache.folder.iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    assert cache.asked() == cache.asked() == 2


def test_a_file_that_was_renamed_is_compiled_again(cache):
    """Its checksum is right, and it was written by this user: but for another kernel."""
    cache.asked()
    (file,) = cache.folder.iterdir()
    cuda_compiler.from_cache(VARIANT, 80)
    (other,) = set(cache.folder.iterdir()) - {file}
    os.replace(other, file)
    assert cache.asked() == cache.asked() == 3


owned = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system's files have no owners")


@owned
def test_a_file_that_others_can_write_is_compiled_again(cache):
    cache.asked()
    (file,) = cache.folder.iterdir()
    for count, mode in enumerate((0o666, 0o620), 2):
        file.chmod(mode)
        assert cache.asked() == cache.asked() == count


def given_away(path, monkeypatch):
    """Makes a file or a folder somebody else's: really, where this user may."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@owned
def test_a_file_of_somebody_else_is_not_loaded(cache, monkeypatch):
    cache.asked()
    (file,) = cache.folder.iterdir()
    given_away(file, monkeypatch)
    assert cache.asked() == 2


@owned
@pytest.mark.parametrize("spoil", ["mode", "owner"])
def test_a_folder_that_others_can_write_is_not_used(cache, caplog, monkeypatch, spoil):
    """Nothing is read there, nothing written; one warning says why, and so does the doctor."""
    cache.asked()
    if spoil == "mode":
        cache.folder.chmod(0o777)
    else:
        given_away(cache.folder, monkeypatch)
    for count in (2, 3):
        assert cache.asked() == count
    cuda_compiler.from_cache(VARIANT, 80)
    assert len(list(cache.folder.iterdir())) == 1
    (warning,) = (record.getMessage() for record in caplog.records)
    found = cuda_compiler.cache()
    for text in (warning, found["problem"]):
        assert "others can write to it" in text
        assert str(cache.folder) in text
        assert "FUSEDNORM_CACHE_DIR names a folder" in text
    assert found["kernels"] == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="takes a POSIX system")
def test_what_is_no_file_is_not_loaded(cache, tmp_path):
    """A link, a pipe that nobody writes to, a folder: in place of a compiled kernel."""
    cache.asked()
    (file,) = cache.folder.iterdir()
    os.replace(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert cache.asked() == 2
    assert not file.is_symlink()
    file.unlink()
    os.mkfifo(file)
    assert cache.asked() == 3
    file.unlink()
    file.mkdir()
    assert cache.asked() == 4
    assert [path.name for path in cache.folder.iterdir()] == [file.name]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="links take a privilege on Windows")
def test_a_folder_behind_a_link(cache, tmp_path, caplog):
    """Used if what it leads to is this user's alone; where it leads nowhere, nothing is kept."""
    cache.folder.parent.mkdir()
    cache.folder.symlink_to(tmp_path / "nowhere")
    assert cache.asked() == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "nowhere").mkdir(mode=0o700)
    assert cache.asked() == cache.asked() == 2
    (tmp_path / "nowhere").chmod(0o777)
    assert cache.asked() == 3


def test_on_a_full_disk_nothing_is_left_behind(cache, caplog):
    """A file may be 16 bytes long, and no longer."""
    resource = pytest.importorskip("resource", reason="takes a POSIX system")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        assert [cache.asked(), cache.asked()] == [1, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.folder.iterdir()) == []
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "File too large" in warning
    assert cache.asked() == cache.asked() == 3


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"FUSEDNORM_CACHE_DIR": "kernels"}, "'kernels' is no absolute path"),
        ({"FUSEDNORM_CACHE_DIR": "~no-such-user/kernels"}, "home"),
        ({"FUSEDNORM_CACHE_DIR": "/" + 300 * "x"}, "File name too long"),
        ({"FUSEDNORM_CACHE_DIR": "/dev/null/kernels"}, "Not a directory"),
        ({}, "home|no absolute path"),
        ({"HOME": "here"}, "home|no absolute path"),
        ({"HOME": "/dev/null"}, "Not a directory"),
        ({"XDG_CACHE_HOME": "/dev/null/\udcff"}, "Not a directory"),
    ],
    ids=["relative", "of nobody", "too long", "below a file", "no home", "home relative", "home a file", "no UTF-8"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's variables and words")
def test_rubbish_for_a_cache_folder(cache, caplog, monkeypatch, tmp_path, variables, problem):
    """Calls go on, and nothing is written to the working directory; a warning and the doctor say why."""
    import pwd

    def no_entry(user):
        raise KeyError(user)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("FUSEDNORM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [cache.asked(), cache.asked()] == [1, 2]
    assert list(tmp_path.iterdir()) == []
    (warning,) = (record.getMessage() for record in caplog.records)
    for text in (warning, doctor.report()["cache"]["problem"]):
        assert re.search(problem, text)
        assert "FUSEDNORM_CACHE_DIR names a folder" in text


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_names_no_cache_folder(cache, monkeypatch, tmp_path, value):
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "été 中 (1)"))
    assert cache.asked() == cache.asked() == 1
    assert cuda_compiler.cache() == {
        "folder": str(tmp_path / "été 中 (1)" / "fusednorm" / "cuda"),
        "kernels": 1,
        "problem": None,
    }


def test_without_a_place_to_write_calls_go_on(cache, caplog):
    cache.folder.parent.mkdir()
    cache.folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "fusednorm"):
        assert cache.asked() == 1
        assert cache.asked() == 2
    assert len([r for r in caplog.records if "FUSEDNORM_CACHE_DIR" in r.getMessage()]) == 1
    assert "is no folder" in cuda_compiler.cache()["problem"]


def test_the_doctor_knows_a_folder_that_cannot_be_made(cache, monkeypatch):
    """As the system's answer to whether it may be written, because root may write everywhere."""
    assert cuda_compiler.cache() == {"folder": str(cache.folder), "kernels": 0, "problem": None}
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache.folder.parents[1])
    assert f"{str(cache.folder.parents[1])!r} cannot be written" in cuda_compiler.cache()["problem"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="takes a POSIX system")
def test_many_processes_at_once(tmp_path):
    """They write the same file, and read it: every one of them gets all of it or nothing."""
    code = """
    import os, sys
    from pathlib import Path
    from fusednorm.backends.cuda import compiler as cuda_compiler
    path, code = Path(sys.argv[1]) / "kernel.bin", bytes(range(256)) * 4096
    children = []
    for _ in range(4):
        children.append(os.fork())
        if not children[-1]:
            for _ in range(50):
                assert cuda_compiler._read(path) in (None, code)
                cuda_compiler._write(path, code)
            os._exit(cuda_compiler._read(path) != code)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), tmp_path / "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.name for file in (tmp_path / "cuda").iterdir()] == ["kernel.bin"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="takes a POSIX system")
def test_eight_processes_find_an_empty_cache(tmp_path):
    """All of them compile, all keep what they compiled, each gets its kernel; one file is left."""
    code = """
    import os, sys
    from pathlib import Path
    from types import SimpleNamespace
    from fusednorm.backends.cuda import compiler as cuda_compiler
    from fusednorm.backends.cuda.choice import Variant
    code = bytes(range(256)) * 4096
    cuda_compiler.bindings = lambda: (
        SimpleNamespace(cuDriverGetVersion=lambda: (0, 13000)),
        SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [90]), nvrtcVersion=lambda: (0, 13, 0)),
    )
    cuda_compiler.compiled = lambda variant, capability: code
    variants = [Variant("forward", (("NUMBER", number),), 32, 1, 0, 1) for number in range(20)]
    begin, start = os.pipe()
    children = []
    for _ in range(8):
        children.append(os.fork())
        if not children[-1]:
            os.close(start)
            os.read(begin, 1)  # until all are there
            os._exit(not all(cuda_compiler.from_cache(variant, 90) == code for variant in variants for _ in range(2)))
    os.close(start)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    names = sorted(path.name for path in cuda_compiler.cache_directory().iterdir())
    assert names == sorted(cuda_compiler._key(variant, 90, 13000) + ".bin" for variant in variants), names
    """
    environment = {**os.environ, "FUSEDNORM_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


class Status(enum.IntEnum):
    """What a call of the driver returns first."""

    SUCCESS = 0
    INVALID_CONTEXT = 201
    OUT_OF_MEMORY = 2
    INVALID_IMAGE = 200


#: CUlaunchAttributeID, as docs.nvidia.com/cuda/cuda-driver-api has it.
CLUSTER, EARLY = 4, 6


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, as docs.nvidia.com/cuda/cuda-driver-api has it."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig, from the same page."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def forget():
    """Lets go of the kernels that are loaded."""
    cuda._functions.clear()
    for cached in (cuda._driver_function, cuda._primary_context, cuda._open_launcher):
        cached.cache_clear()
    fast_path.open_cuda(0, 0, 0, 0)


@pytest.fixture
def driver(monkeypatch):
    """A driver that only writes down what it is given. Calls are on the GPU 0, which is the current one."""
    found = SimpleNamespace(launches=[], loaded=0, statuses=[], capability=90, context=1000, pushed=[])
    forget()

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def launch(config, function, arguments, extra):
        given = Config.from_address(config)
        attributes = {given.attributes[i].id: given.attributes[i].value[0] for i in range(given.attribute_count)}
        arguments = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value, found.size)
        names = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes", "stream")
        numbers = {name: getattr(given, name) for name in names}
        found.launches.append(SimpleNamespace(function=function, attributes=attributes, arguments=arguments, **numbers))
        return found.statuses.pop(0) if found.statuses else Status.SUCCESS

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def current_device(device):
        device[0] = 0
        return Status.SUCCESS if found.context else Status.INVALID_CONTEXT

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def push(context):
        found.pushed.append(context)
        return Status.SUCCESS

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def pop(context):
        found.pushed.append("popped")
        return Status.SUCCESS

    functions = {"cuLaunchKernelEx": launch, "cuCtxGetDevice": current_device}
    functions |= {"cuCtxPushCurrent": push, "cuCtxPopCurrent": pop}

    def address(name, *_):
        return Status.SUCCESS, ctypes.cast(functions[name.decode()], ctypes.c_void_p).value, None

    def load(code):
        found.loaded += 1
        return Status.SUCCESS, code

    def set_attribute(function, attribute, value):
        setattr(found, attribute, value)
        return (Status.SUCCESS,)

    def set_context(context):
        found.context = context
        return (Status.SUCCESS,)

    api = SimpleNamespace(
        CUresult=Status,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"),
        cuDriverGetVersion=lambda: (Status.SUCCESS, 13000),
        cuFuncSetAttribute=set_attribute,
        cuModuleLoadData=load,
        cuModuleGetFunction=lambda module, name: (Status.SUCCESS, 1234),
        cuGetProcAddress=address,
        cuCtxGetCurrent=lambda: (Status.SUCCESS, found.context),
        cuDevicePrimaryCtxRetain=lambda device: (Status.SUCCESS, 1000 + device),
        cuCtxSetCurrent=set_context,
    )
    monkeypatch.setattr(cuda_compiler, "bindings", lambda: (api, None))
    monkeypatch.setattr(cuda_compiler, "from_cache", lambda variant, capability: b"code")
    monkeypatch.setattr(cuda, "capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_stream", lambda device: 77)
    yield found
    forget()


def forward(x, residual, weight, out, residual_out, eps, weight_offset):
    """A forward pass by the backend, of tensors that lie without gaps."""
    rows, size = x.shape
    operation = operation_of(x, residual, weight, Flags())
    strides = ((0, size),) * 4
    call = Forward(x, residual, weight, out, residual_out, None, operation, rows, rows, strides, eps, weight_offset)
    cuda.forward(call)


def run(found, rows, size, dtype=BF16, offset=0):
    """A forward pass of x, residual and weight; returns what was launched."""
    memory = torch.zeros(2, rows * size + offset, dtype=dtype)[:, offset:]
    x, residual = (m.view(rows, size) for m in memory)
    total, out, weight = torch.empty_like(residual), torch.empty_like(x), torch.zeros(size, dtype=dtype)
    found.size = struct.calcsize("@6Q5qi2f0q")
    forward(x, residual, weight, out, total, 1e-6, 0.5)
    return found.launches[-1], [t.data_ptr() for t in (x, residual, weight, out, total)]


def test_a_launch(driver):
    launch, pointers = run(driver, 5, 4096)
    assert (launch.grid_x, launch.grid_y, launch.grid_z) == (5, 1, 1)
    assert (launch.block_x, launch.block_y, launch.block_z) == (128, 1, 1)
    assert (launch.function, launch.stream, launch.attributes) == (1234, 77, {EARLY: 1})
    given = struct.unpack("@6Q5qi2f0q", launch.arguments)
    assert list(given[:6]) == [*pointers, 0]
    assert given[6:12] == (4096, 4096, 4096, 4096, 5, 4096)
    assert given[12:] == (struct.unpack("f", struct.pack("f", 1e-6))[0], 0.5)
    forward(*(torch.zeros(1, 64),) * 2, None, *(torch.zeros(1, 64),) * 2, 1e300, 0.0)
    assert struct.unpack("@6Q5qi2f0q", driver.launches[-1].arguments)[12] == float("inf")
    launch, _ = run(driver, 33, 128)  # 8 rows per warp, 4 warps per block
    assert (launch.grid_x, launch.block_x) == (2, 128)


def test_rows_too_wide_for_a_block_go_to_a_cluster_where_there_are_any(driver):
    launch, _ = run(driver, 3, 65536)
    assert (launch.grid_x, launch.block_x, launch.attributes) == (12, 512, {CLUSTER: 4, EARLY: 1})
    driver.capability = 80
    forget()
    launch, _ = run(driver, 3, 65536)
    assert (launch.grid_x, launch.block_x, launch.attributes) == (3, 512, {})
    assert launch.shared_bytes == driver.shared == 131_072
    launch, _ = run(driver, 3, 100_000)
    assert launch.shared_bytes == 0  # a block cannot have as much


@pytest.mark.parametrize(
    ("rows", "size", "programs"),
    [
        (1, 128, (1, 1)),
        (256, 128, (4, 4)),
        (257, 128, (5, 4)),  # blocks of 2 rows, 32 of them in the 64 that a program takes together
        (512, 128, (8, 4)),
        (65536, 128, (256, 4)),
        (512, 1024, (64, 32)),
        (8, 4096, (8, 4)),
        (64, 4096, (64, 32)),
        (300, 4096, (150, 128)),
        (8, 16384, (8, 128, 16)),  # the rows, the blocks' shares, and their sums
        (9, 16384, (9, 144, 32)),
    ],
)
def test_programs_of_a_backward_pass_follow_the_rows(driver, rows, size, programs):
    """As many threads as have something to do: several blocks of short rows to a program, the more columns of few."""
    h, rstd, weight = torch.zeros(rows, size, dtype=BF16), torch.zeros(rows), torch.zeros(size, dtype=BF16)
    driver.size = 0
    operation = operation_of(h, h, weight, Flags())
    front_end.backward(cuda, operation, h, None, h, rstd, weight, 0.0, (True, True, True))
    assert tuple(launch.grid_x for launch in driver.launches) == programs


def test_rows_eps_and_strides_never_load_another_kernel(driver):
    for rows in (1, 2, 100):
        run(driver, rows, 4096)
        run(driver, rows, 3000)
        run(driver, rows, 3008)  # of the same class as 3000: three warps, not all of them full
    assert driver.loaded == 2
    run(driver, 2, 4096, offset=1)
    assert driver.loaded == 3


def test_a_thread_without_a_context_gets_one(driver):
    """To load a kernel, and for each launch: one that the driver refuses may end a capture."""
    driver.context = 0
    run(driver, 1, 4096)
    assert driver.context == 1000
    assert driver.pushed == []
    driver.context = 0
    run(driver, 1, 4096)
    assert driver.pushed == [1000, "popped"]
    assert len(driver.launches) == 2


def test_a_kernel_that_the_driver_does_not_load_raises(driver, monkeypatch):
    api, _ = cuda_compiler.bindings()
    monkeypatch.setattr(api, "cuModuleLoadData", lambda code: (Status.INVALID_IMAGE, None))
    with pytest.raises(
        fusednorm.BackendError, match=r"loading the kernel forward \(a driver as new as NVRTC.*INVALID_IMAGE"
    ):
        run(driver, 1, 4096)
    assert driver.launches == []


def test_a_failed_launch_raises(driver):
    driver.statuses = [Status.OUT_OF_MEMORY]
    with pytest.raises(fusednorm.BackendError, match="OUT_OF_MEMORY"):
        run(driver, 1, 4096)


def test_an_operand_between_two_elements_is_refused(driver):
    x, residual, weight = operands(Case(rows=1, hidden=64).of(F16))
    memory = torch.frombuffer(bytearray(130), dtype=torch.uint8)
    between = torch.frombuffer(memory.numpy(), dtype=F16, offset=1, count=64).view(1, 64)
    with pytest.raises(ValueError, match=r"^residual begins at an address that is no multiple of 2"):
        forward(x, between, weight, x, residual, 1e-6, 0.0)
    assert driver.launches == []


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU, to torch; its driver and NVRTC are what a test makes of them."""
    found = SimpleNamespace(driver=SimpleNamespace(), nvrtc=SimpleNamespace(), capabilities=[90])
    for part, names in ((found.driver, cuda.DRIVER), (found.nvrtc, cuda.COMPILER)):
        for outer, _, inner in (name.partition(".") for name in names):
            setattr(part, outer, SimpleNamespace(**{inner: None}))
    found.driver.cuDriverGetVersion = lambda: (Status.SUCCESS, 13000)
    found.nvrtc.nvrtcVersion = lambda: (Status.SUCCESS, 13, 0)
    found.nvrtc.nvrtcGetSupportedArchs = lambda: (Status.SUCCESS, [75, 80, 90, 100])
    monkeypatch.setattr(cuda_compiler, "bindings", lambda: (found.driver, found.nvrtc))
    monkeypatch.setattr(cuda_compiler, "compiler_version", cuda_compiler.compiler_version.__wrapped__)
    monkeypatch.setattr(cuda, "capability", lambda device: found.capabilities[device or 0])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found.capabilities))
    return found


def operation(device):
    return RMSNorm(torch.device(device), BF16, BF16, BF16, BF16, 4096, True, False, BF16)


def test_one_old_gpu_does_not_disable_the_others(machine):
    """Calls on it are refused, with a reason; those on the others are taken."""
    machine.capabilities = [90, 70, 100]
    assert cuda.unavailable() == []
    reason = "cuda:1 has compute capability 7.0; the kernels need 7.5"
    refused = {device: cuda.unsuitable(operation(device)) for device in ("cuda:0", "cuda:1", "cuda:2", "cuda")}
    assert refused == {"cuda:0": [], "cuda:1": [reason], "cuda:2": [], "cuda": []}
    with fusednorm.use_backend("cuda,reference"):
        chosen = choose.choose(operation("cuda:0"))
        assert chosen.backend == "cuda"
        assert chosen.plan.endswith("our tests have not run on a GPU yet")
        assert choose.choose(operation("cuda:1")).passed_over["cuda"] == [reason]
    with fusednorm.use_backend("cuda"), pytest.raises(fusednorm.BackendError, match=reason):
        choose.choose(operation("cuda:1"))


def test_only_old_gpus(machine):
    machine.capabilities = [61, 70]
    (reason,) = cuda.unavailable()
    assert reason == "no GPU here has compute capability 7.5 or newer, which the kernels need; the newest has 7.0"


@pytest.mark.parametrize("name", [*cuda.DRIVER, *cuda.COMPILER])
def test_bindings_without_a_name_are_a_reason(machine, monkeypatch, name):
    """No AttributeError in somebody's forward pass."""
    assert cuda.unavailable() == []
    monkeypatch.setattr(cuda, "version", lambda package: "99.0")
    part, (*outer, last) = machine.driver if name in cuda.DRIVER else machine.nvrtc, name.split(".")
    monkeypatch.delattr(getattr(part, *outer) if outer else part, last)
    (reason,) = cuda.unavailable()
    assert re.match(rf"cuda-bindings 99\.0 lack {name}, which fusednorm calls; .*pip install", reason)
    with fusednorm.use_backend("cuda"), pytest.raises(fusednorm.BackendError, match=re.escape(reason)):
        choose.choose(operation("cuda:0"))


def test_every_name_of_the_bindings_that_is_used_is_asked_for():
    """Also those that are put together: of machine code and of PTX."""
    source = Path(cuda.__file__).read_text() + Path(cuda_compiler.__file__).read_text()
    found = set(re.findall(r"\b_?(?:driver|nvrtc)\.(cu\w+|CU\w+(?:\.CU_\w+)?|nvrtc\w+)", source))
    found |= {f"nvrtcGet{kind}{size}" for kind in ("CUBIN", "PTX") for size in ("", "Size")}
    assert found == {*cuda.DRIVER, *cuda.COMPILER}


@compiles
def test_the_bindings_have_every_name_that_is_used():
    driver, nvrtc = cuda_compiler.bindings()
    assert lacking(driver, cuda.DRIVER) == lacking(nvrtc, cuda.COMPILER) == ""


def raising(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    ("part", "function", "reason"),
    [
        ("driver", lambda: (Status.SUCCESS, 12080), "the driver is for CUDA 12.8, and code of NVRTC 13.0 needs"),
        ("driver", lambda: (Status.INVALID_CONTEXT, 0), "driver cannot be used .*INVALID_CONTEXT.*`nvidia-smi`"),
        ("driver", raising(RuntimeError("Failed to dlopen")), "driver cannot be used .*Failed to dlopen"),
        ("nvrtc", raising(RuntimeError("No such file")), "NVRTC cannot be used .*No such file.*pip install"),
        ("nvrtc", raising(ModuleNotFoundError("No module named 'cuda'")), "NVRTC cannot be used .*'cuda'"),
        ("nvrtc", lambda: (Status.OUT_OF_MEMORY, 0, 0), "NVRTC cannot be used .*OUT_OF_MEMORY"),
    ],
    ids=["older driver", "driver fails", "no driver", "no NVRTC", "no bindings", "NVRTC fails"],
)
def test_a_driver_or_compiler_that_cannot_be_used(machine, monkeypatch, part, function, reason):
    """Passed over with a reason where no backend was requested; an error with that reason where it was."""
    assert cuda.unavailable() == []
    name = {"driver": "cuDriverGetVersion", "nvrtc": "nvrtcVersion"}[part]
    monkeypatch.setattr(getattr(machine, part), name, function)
    (found,) = cuda.unavailable()
    assert re.search(reason, found)
    bf16 = operation("cuda")
    token = choose._request.set("")
    try:
        assert choose.choose(bf16).passed_over["cuda"] == [found]
    finally:
        choose._request.reset(token)
    with fusednorm.use_backend("cuda"), pytest.raises(fusednorm.BackendError, match=re.escape(found)):
        choose.choose(bf16)


STUBS = {
    "no function": "int nothing;",
    "an error": "int cuDriverGetVersion(int *version) { return 999; }",
    "older": "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }",
    "good": "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }",
}


@compiles
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="takes Linux and a C compiler")
def test_libraries_that_are_no_driver(tmp_path):
    """NVIDIA's own bindings, with libraries of a driver's name."""
    for name, source in STUBS.items():
        where = """
        #include <string.h>
        int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
            *found = strcmp(name, "cuDriverGetVersion") == 0 ? (void *)cuDriverGetVersion : 0;
            return *found ? 0 : 500;
        }
        """
        file = tmp_path / f"{name}.c"
        file.write_text(source + where * (name != "no function"))
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", file, "-o", tmp_path / name]
        subprocess.run(command, check=True)
    code = """
    import ctypes, os, sys, torch
    from fusednorm.backends import cuda, reference
    torch.version.cuda, torch.cuda.is_available, torch.cuda.device_count = "13.0", lambda: True, lambda: 1
    cuda.capability = lambda device: 90
    for stub in sys.argv[1:]:
        if not (child := os.fork()):
            ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)
            print(os.path.basename(stub), *cuda.unavailable(), sep=": ", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code), *(tmp_path / name for name in STUBS)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(STUBS)
    assert lines[0].startswith('no function: NVIDIA\'s driver cannot be used (Function "cuDriverGetVersion" not found)')
    assert lines[1].startswith(
        "an error: NVIDIA's driver cannot be used (cuDriverGetVersion failed: CUDA_ERROR_UNKNOWN"
    )
    assert lines[2].startswith("older: the driver is for CUDA 12.4, and code of NVRTC 13.0 needs one for 13.0")
    assert lines[3] == "good"


def test_why_not(monkeypatch):
    if torch.version.cuda is None:
        assert "built without CUDA" in cuda.unavailable()[0]
    monkeypatch.setattr(cuda, "capability", lambda device: 90)
    signature = fusednorm.explain(torch.ones(1, 8)).operation._replace(hidden_size=cuda_kernels.LONGEST + 1)
    assert "longer than" in cuda.unsuitable(signature)[0]
    fits = signature._replace(hidden_size=cuda_kernels.LONGEST)
    assert cuda.unsuitable(fits) == []
    cuda._oldest_compiled.cache_clear()
    with monkeypatch.context() as newer:  # versions of NVRTC drop old architectures
        newer.setattr(cuda_compiler, "supported", lambda: [100, 120])
        assert "has compute capability 9.0; NVRTC compiles for 10.0 on; install an older" in cuda.unsuitable(fits)[0]
    cuda._oldest_compiled.cache_clear()


def torchs_product(right=True):
    """``torch._int_mm`` as it is on a GPU: it takes some sizes only, at addresses that are multiples of 16."""

    def multiply(a, b):
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        pairs = ((a[..., None].long() + 128) * b.long()).unflatten(1, (-1, 2)).sum(2)
        return ((pairs if right else pairs.clamp(-(2**15), 2**15 - 1)).sum(1) - 128 * b.long().sum(0)).int()

    return multiply


def test_products_of_int8_of_any_size(monkeypatch):
    """Sizes that torch's product does not take are filled up, and what begins elsewhere is copied."""
    monkeypatch.setattr(torch, "_int_mm", torchs_product())
    for rows, columns, size in ((1, 5, 130), (17, 8, 64), (16, 9, 63), (40, 1, 1), (18, 16, 8)):
        for offset in (0, 1):
            numbers = torch.randint(-128, 128, (rows * size + columns * size + 2,)).to(torch.int8)
            q = numbers[offset : offset + rows * size].view(rows, size)
            weight = numbers[-columns * size - offset :][: columns * size].view(columns, size)
            assert torch.equal(cuda_products._sums(q, weight), (q.long() @ weight.long().t()).int())


def test_a_product_of_int8_that_is_wrong(monkeypatch):
    """Pairs of products of 0 to 255 and int8 that end where 16 bits end, as oneDNN has them: the formula serves."""
    cpu = torch.device("cpu")
    operation = fusednorm.explain(tensors((3, 8, 64))["q"], function=fusednorm.int8_linear).operation
    for right in (True, False):
        cuda_products.is_right.cache_clear()
        monkeypatch.setattr(torch, "_int_mm", torchs_product(right))
        assert cuda_products.is_right(cpu) is right
        reasons = cuda.unsuitable(operation)
        assert reasons == [] if right else reasons == ["torch._int_mm returns wrong sums of products here"]
    cuda_products.is_right.cache_clear()


@pytest.mark.parametrize("most", ["AVX2", "AVX512_CORE"])
def test_products_of_int8_where_those_of_torch_may_be_wrong(most):
    """oneDNN's are wrong without VNNI. The reference and C never call them."""
    code = """
    import torch, fusednorm
    q, weight = (torch.randint(-128, 128, (n, 640), dtype=torch.int8) for n in (40, 96))
    exact = (q.double() @ weight.double().t()).float()
    for name in ("reference", "cpu"):
        with fusednorm.use_backend(name):
            assert torch.equal(fusednorm.int8_linear(q, torch.ones(40, 1), weight, torch.ones(96)), exact), name
    from fusednorm.backends.cuda import products
    print(torch.equal(torch._int_mm(q, weight.t()), exact.int()), products.is_right(torch.device("cpu")))
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": most}
    environment.pop("FUSEDNORM_BACKEND", None)
    run = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    found = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert found[0] == found[1], "the check says of torch's product what it is"


@pytest.mark.parametrize(
    ("capability", "driver", "early"), [(80, 13000, False), (90, 12020, False), (90, 12030, True), (120, 13000, True)]
)
def test_kernels_begin_early_where_a_graph_captures_that(monkeypatch, capability, driver, early):
    """Drivers for CUDA 12.0 to 12.2 refuse to capture such a launch."""
    held = []
    monkeypatch.setattr(cuda, "_open_launcher", lambda: None)
    monkeypatch.setattr(cuda, "_load", lambda variant, device: 0)
    monkeypatch.setattr(cuda, "_primary_context", lambda device: 0)
    monkeypatch.setattr(cuda, "capability", lambda device: capability)
    monkeypatch.setattr(cuda_compiler, "driver_version", lambda: driver)
    monkeypatch.setattr(fast_path, "hold_cuda", lambda call, context, kernels: held.extend(kernels))
    shape = SimpleNamespace(threads=32, per_program=1, shared=0, cluster=1, share=0)
    cuda._hold(b"", 0, [shape])
    assert [kernel[5] for kernel in held] == [early]
