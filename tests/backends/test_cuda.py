"""The CUDA C++ kernels as machine code for GPUs that need not be here, their cache on disk, and their launch."""

import ctypes
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kept
import kernel_kinds
import pytest
import torch
from kernel_kinds import alone, log_probability, named, norm_backward, of_each_gpu, on, quantized
from processes import printed_by

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cuda
from fusednorm.backends.cuda import choice as cuda_kernels
from fusednorm.backends.cuda import compiler as cuda_compiler
from fusednorm.backends.cuda import products as cuda_products
from fusednorm.backends.kernel_keys import fuses, lacking
from fusednorm.calls import fast_path
from fusednorm.calls.call import Flags, Forward, GateSteps, RMSNorm, operation_of
from fusednorm.conformance import cases
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, operands
from fusednorm.conformance.test_int8_linear import tensors
from fusednorm.engine import choose, requested
from fusednorm.engine import run_norms as front_end
from fusednorm.tools import doctor

from ptx.launch import Attribute, Config

compiles = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="takes NVRTC, which tox -e cuda installs, and no sanitizers",
)

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
TYPES = ((BF16, BF16), (F32, F32), (BF16, F32))
KERNELS = (
    *((BF16, BF16, size) for size in (4096, 128, 7168, 65536)),
    *((F32, F32, size) for size in (128, 16384)),
    (BF16, F32, 4096),
)
MACHINE_CODE = [(capability, *kernel) for capability in ARCHITECTURES for kernel in KERNELS]


norm = partial(kernel_kinds.norm, alignment=32)
gate = partial(kernel_kinds.gate, alignment=32)
rotation = partial(kernel_kinds.rotation, alignment=32)


def variants(x, residual, size, alignment, capability, center=False):
    """All kernels of both passes, by what they do."""
    forward = norm(x, residual, size, alignment=alignment, rstd=True, center=center)
    backward = norm_backward(x, residual, size, alignment, center=center)
    found = {"forward": cuda_kernels.forward_variant(forward, capability)}
    return {**found, **cuda_kernels.backward_variants(backward, capability)}


def tool(name):
    """A program of NVIDIA's wheels."""
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(path for nvidia in folders for path in Path(nvidia).rglob(name) if path.is_file())


@functools.cache
def compilers():
    """The versions of all that makes and lists machine code, and the sources."""
    packages = ("nvidia-cuda-nvrtc", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
    return [*map(importlib.metadata.version, packages), cuda_compiler._sources()]


def of_compiled(what, variant, capability, make):
    """What ``make(code)`` returns of a compiled variant. tox keeps it for the same sources and compilers."""

    def made():
        return make(cuda_compiler.compiled(variant, capability))

    if kept.FOLDER is None:
        return made()
    key = repr((what, variant.kernel, cuda_compiler.options(variant, capability), compilers()))
    file = kept.FOLDER / "cuda-code" / hashlib.sha256(key.encode()).hexdigest()
    return zlib.decompress(kept.made_once(file, lambda: zlib.compress(made())))


@pytest.fixture(scope="session", autouse=True)
def no_old_files():
    if kept.FOLDER is not None:
        kept.forget_old(kept.FOLDER / "cuda-code")


def listed(code, folder):
    """Machine code as text, and what it takes.

    Without dataflow analysis, which `cuobjdump -sass` asks for, the disassembler takes two thirds of the time.
    """
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    commands = ((tool("cuobjdump"), "-res-usage"), (tool("nvdisasm"), "--no-dataflow", "--print-code"))
    return b"".join(subprocess.run((*one, file), capture_output=True, check=True).stdout for one in commands)


class Code:
    """The machine code of a kernel, which spills nothing, and takes no more than a block has."""

    def __init__(self, variant, capability, folder):
        listing = of_compiled("code", variant, capability, lambda code: listed(code, folder)).decode()
        line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?"
        self.instructions = re.findall(line + r"([A-Z][\w.]+)", listing, re.MULTILINE)
        #: Where instructions that store 16 bytes add something to an address: what they add.
        stores = re.findall(line + r"STG\S*\.128\S* .*\+0x([0-9a-f]+)\]", listing, re.MULTILINE)
        self.offsets = [int(offset, 16) for offset in stores]
        used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", listing)
        registers, stack, shared = map(int, used.groups())
        assert stack == 0, variant
        assert self.named("LDL", "STL") == [], variant
        assert registers * variant.threads <= 65536, variant
        assert shared <= 48 * 1024, variant

    def named(self, *names):
        """The instructions whose names begin so."""
        return [instruction for instruction in self.instructions if instruction.startswith(names)]


def exact_ptx(variant, capability):
    """The PTX of a kernel, where nothing is fused, flushed or approximate."""
    ptx = of_compiled("PTX", variant, capability + 4, bytes).decode()  # NVRTC does not know such a GPU
    assert not re.findall(r"\bfma\b|\.ftz|\.approx", ptx), variant
    return ptx


@compiles
@pytest.mark.parametrize(("capability", "x", "residual", "size"), of_each_gpu(MACHINE_CODE), ids=named)
def test_machine_code(tmp_path, capability, x, residual, size):
    """Accesses of 16 bytes (32 from sm_100 on) to whole sectors, and nothing spilled."""
    for name, variant in variants(x, residual, size, 32, capability).items():
        code = Code(variant, capability, tmp_path)
        widest = ".256" if capability >= 100 else ".128"
        loads, stores = code.named("LDG"), code.named("STG")
        if name == "sums":  # by columns, one per lane
            continue
        assert any(widest in i for i in loads), name
        assert any(widest in i for i in stores), name
        narrow = [i for i in loads + stores if ".128" not in i and ".256" not in i]
        # A row's root is one number.
        assert len(narrow) <= 17, (name, narrow)
        if x == BF16 and capability >= 80:  # elements are widened and rounded in pairs: no half of a word is moved
            assert len(code.named("PRMT")) <= 4, name
        if name != "forward":  # memory is written in sectors of 32 bytes: no lane stores two halves of one
            assert not [offset for offset in code.offsets if offset % 32], name


QUANTIZED = {
    "int8": Quantization(torch.int8, apply="reciprocal"),
    "float8": quantizations.VLLM_FP8_TOKEN,
    "float8 blocks": quantizations.VLLM_FP8_BLOCK_FUSED,
    "single elements": Quantization(torch.float8_e5m2, per=1),
    "zero points": Quantization(torch.uint8, per=64, zero_point="before"),
}

#: Norms with one before the addition.
NORM_FIRST = {
    75: [norm(BF16, F32, 4096)],
    90: [norm(BF16, BF16, 1024), norm(BF16, BF16, 8192), norm(F32, F32, 16384), norm(BF16, BF16, 200_000)],
    100: [norm(BF16, BF16, 65536)],
}
#: With a bias and a scaled x, also of heads.
AROUND = {
    75: [norm(BF16, F32, 4096)],
    90: [*(norm(BF16, BF16, size) for size in (128, 8192, 200_000)), norm(F32, F32, 16384), norm(F64, F64, 16384)],
    100: [norm(F32, F32, 65536)],
}
#: With a gate, after the norm or before it.
GATED = {
    75: [norm(BF16, None, 4096)],
    90: [norm(BF16, None, 128), norm(F32, None, 4096), norm(BF16, None, 200_000)],
    100: [norm(BF16, None, 65536)],
}


def norms_with_more():
    """All of these norms, with their compute capabilities."""
    for capability, kind in on(NORM_FIRST):
        kind = kind.changed(norm_before_add=True, between=kind.x, first_weight=kind.x)
        yield from ((capability, kind), (capability, kind.changed(weight=None, out=None)))
    for (capability, kind), of_heads in itertools.product(on(AROUND), (False, True)):
        yield capability, kind.changed(bias=kind.x, of_heads=of_heads, scaled=True)
    for capability, kind, names in (
        (75, norm(BF16, F32, 4096), ("int8", "float8 blocks")),
        (80, norm(BF16, BF16, 65536), ("int8",)),
        (90, norm(BF16, BF16, 4096), tuple(QUANTIZED)),
        (90, norm(BF16, BF16, 128), ("float8", "zero points")),
        (90, norm(F32, F32, 16384), ("float8 blocks",)),
        (90, norm(F64, F64, 4096), ("zero points",)),
        (90, norm(BF16, BF16, 200_000), ("float8",)),
        (100, norm(BF16, BF16, 65536), ("float8", "float8 blocks")),
    ):
        for name in names:
            after_norm = quantized(kind, QUANTIZED[name])
            yield from ((capability, after_norm), (capability, alone(after_norm)))
    for capability, kind in on(GATED):
        gated = kind.changed(name="norm_gated", activation="silu", z=kind.x)
        yield from ((capability, gated.changed(between=between)) for between in (kind.x, None))


@compiles
@pytest.mark.parametrize(("capability", "kind"), of_each_gpu(norms_with_more()), ids=named)
def test_machine_code_of_a_norm_with_more(tmp_path, capability, kind):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    variant = cuda_kernels.forward_variant(kind, capability)
    assert variant.kernel.removesuffix("_wide") == ("forward" if kind.normalises else "quantize")
    loads = Code(variant, capability, tmp_path).named("LDG")
    if not variant.kernel.endswith("_wide"):
        # A lane has 32 elements; where half a warp has a row, 8 of what all rows share.
        shared = 8 if kind.hidden_size == 128 and not kind.of_heads else 32
        elements = {"x": 32, "residual": 32, "z": 32, "weight": shared, "first_weight": shared, "bias": shared}
        types = dict(kind.rows)
        read = sum(count * types[name].itemsize for name, count in elements.items() if types[name] is not None)
        assert len(loads) == read // (32 if capability >= 100 else 16)


CENTERED = {
    75: [norm(BF16, F32, 4096)],
    90: [norm(BF16, BF16, 128), norm(F32, F32, 16384), norm(F64, F64, 4096)],
    100: [norm(BF16, BF16, 200_000)],
}


@compiles
@pytest.mark.parametrize(("capability", "kind"), on(CENTERED), ids=named)
def test_machine_code_of_centered_rows(tmp_path, capability, kind):
    """Nothing spilled, and each operand is read once, where a row fits the registers."""
    given = (kind.x, kind.residual, kind.hidden_size, 32, capability)
    plain = variants(*given)
    for name, variant in variants(*given, center=True).items():
        loads = Code(variant, capability, tmp_path).named("LDG")
        if variant.kernel in ("forward", "backward_rows", "backward_blocks"):
            assert len(loads) == len(Code(plain[name], capability, tmp_path).named("LDG"))
        if name == "sums":
            assert variant == plain[name]


@compiles
@pytest.mark.parametrize("capability", [75, 86, 89, 90, 100])
def test_the_gpu_rounds_to_8_bits_where_it_can(monkeypatch, capability):
    """From compute capability 8.9 on, two elements at a time, in the rows of a norm and alone."""
    options = cuda_compiler.options
    as_ptx = lambda *given: [option.replace("=sm_", "=compute_") for option in options(*given)]  # noqa: E731
    monkeypatch.setattr(cuda_compiler, "options", as_ptx)
    for dtype, normalises in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.int8, False)):
        kind = quantized(norm(BF16, BF16, 4096), Quantization(dtype))
        variant = cuda_kernels.forward_variant(kind if normalises else alone(kind), capability)
        ptx = cuda_compiler.compiled(variant, capability).decode()
        found = re.findall(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", ptx)
        rounds = dtype.is_floating_point and capability >= 89
        assert found == [str(dtype)[13:17]] * (16 * rounds)


def test_int8_and_uint8_share_a_kernel_and_numbers_are_arguments():
    """Floors, limits and ranges load no other kernel, and a group as long as the row is the row."""
    found = {
        cuda_kernels.forward_variant(quantized(norm(BF16, BF16, 4096), quantization), 90)
        for quantization in (
            Quantization(torch.int8),
            Quantization(torch.uint8, scale_floor=1e-3),
            Quantization(torch.int8, per=4096, qmin=-100, amax_limit=5.0),
        )
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("group", "hidden_size", "fused"),
    [(1, 96, 1), (64, 64, 1), (96, 96, 1), (96, 192, 0), (1024, 4096, 1), (2048, 4096, 0)],
)
def test_groups_that_are_torchs(group, hidden_size, fused):
    assert fuses(group, hidden_size) == fused


ROTATIONS = {
    75: [rotation(F16, 128, 64)],
    90: [rotation(BF16, 128, 64), rotation(BF16, 128, 64, interleaved=True), rotation(F32, 256, 128)],
    100: [rotation(BF16, 256, 128)],
}


@compiles
@pytest.mark.parametrize(("capability", "kind"), on(ROTATIONS), ids=named)
def test_machine_code_of_a_rotation(tmp_path, capability, kind):
    """Nothing spilled, nothing fused, and heads, weights and tables of halves are read in whole vectors."""
    variant = cuda_kernels.rotation_variant(kind, capability)
    at_once = 32 if capability >= 100 else 16
    of_tables = 2 * 32 if kind.interleaved else 2 * 32 * F32.itemsize // at_once
    loads = Code(variant, capability, tmp_path).named("LDG")
    assert len(loads) == 2 * 32 * kind.q.itemsize // at_once + of_tables
    exact_ptx(variant, capability)


@compiles
@pytest.mark.parametrize("name", ["log_softmax", "selected_and_entropy"])  # whose kernels have the others' steps
@pytest.mark.parametrize(
    ("capability", "dtype", "size"),
    [
        pytest.param(75, BF16, 151_936, marks=pytest.mark.release),
        (90, F32, 151_936),
        pytest.param(90, F64, 32_000, marks=pytest.mark.release),
        (100, BF16, 128_256),
    ],
    ids=named,
)
def test_machine_code_of_log_probabilities(tmp_path, capability, dtype, size, name):
    """Nothing spilled, also of rows that begin anywhere; nothing fused; and rows are read in whole vectors."""
    wide, whole = F64 if dtype == F64 else F32, name == "log_softmax"
    at_once = 32 if capability >= 100 else 16
    caps = (False,) if whole else (False, True)
    for backward, capped, alignment in cases.covering((False, True), caps, (32, dtype.itemsize)):
        kind = log_probability(name, dtype, size, alignment, backward, wide if capped else None, capped)
        variant = cuda_kernels.log_prob_variant(kind, capability)
        assert variant.cluster == (8 if capability >= 90 and size > 100_000 else 4 if capability >= 90 else 1)
        code = Code(variant, capability, tmp_path)
        if alignment == 32:
            # Twice, to find the greatest and the sum; once more to write; a gradient reads once, and d twice.
            turns = 1 + 2 * whole if backward else 2 + whole
            loads = sum(f".{8 * at_once}" in i for i in code.named("LDG"))
            wanted = turns * 32 * dtype.itemsize // at_once
            assert loads == wanted or (capability >= 100 and loads > wanted)  # there the compiler unrolls some loops
    exact_ptx(variant, capability)


#: With optional steps, and z and y that take turns.
IN_STEPS = {**GateSteps(7.0, 1.702, 1.0)._asdict(), "interleaved": True}
GATES = {
    75: [gate(BF16, "silu")],
    80: [gate(F16, "sigmoid")],
    90: [gate(BF16, "gelu_tanh"), gate(F32, "silu"), gate(F64, "gelu_tanh")],
    100: [gate(BF16, "silu")],
}
GATES[90] += [gate(dtype, "silu", **IN_STEPS) for dtype in (BF16, F32, F64)]
#: Additions and multiplications of an element, at most.
MOST = {
    # Forwards there are two exponentials, of which the second is rarely taken.
    ("gate", F32): 55,
    ("gate", F64): 80,
    ("gate_backward", F32): 46,
    ("gate_backward", F64): 60,
    ("in steps", F32): 65,
    ("in steps", F64): 90,
}


@compiles
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("capability", "kind"), on(GATES), ids=named)
def test_machine_code_of_a_gate(tmp_path, capability, kind, backward):
    """Nothing spilled, and an exponential takes few operations, each rounded by itself.

    Each operand is one access, also where z and y take turns.
    """
    kind = kernel_kinds.gradients(kind) if backward else kind
    variant = cuda_kernels.gate_variant(kind, capability)
    assert variant.kernel == ("gate_backward" if backward else "gate")
    assert len(Code(variant, capability, tmp_path).named("LDG")) == (3 if backward else 2)
    ptx = exact_ptx(variant, capability)
    real, vector = "f64" if kind.z == F64 else "f32", (32 if capability >= 100 else 16) // kind.z.itemsize
    if not kind.interleaved:
        quotients = len(re.findall(rf"(?:div|rcp)\.rn\.{real}", ptx))
        assert quotients == vector * (2 if backward and kind.activation != "sigmoid" else 1)
    counted = len(re.findall(r"(?:add|sub|mul)(?:\.rn)?\.f\d\d", ptx))
    assert counted <= vector * MOST["in steps" if kind.interleaved else variant.kernel, kind.accumulator]


@compiles
@pytest.mark.parametrize(
    ("capability", "x", "residual", "size"),
    [
        *((90, BF16, F32, 896), (90, F16, F16, 896)),
        *(pytest.param(one, *types, 16384, marks=pytest.mark.release) for one in (75, 90, 100) for types in TYPES),
        pytest.param(90, F64, F64, 16384, marks=pytest.mark.release),
    ],
    ids=named,
)
def test_rows_that_begin_anywhere(tmp_path, capability, x, residual, size):
    for variant in variants(x, residual, size, x.itemsize, capability).values():
        Code(variant, capability, tmp_path)


@compiles
def test_every_operation_is_rounded_by_itself(tmp_path):
    """PTX has no fused multiplication, and machine code has them in division and root alone: ever the same number."""
    counts = set()
    for size in (1024, 4096, 8192, 5120):
        variant = variants(BF16, BF16, size, 16, 90)["forward"]
        ptx = exact_ptx(variant, 90)
        for text in (".target sm_90", "sqrt.rn.f32", "div.rn.f32"):
            assert text in ptx
        counts.add(len(Code(variant, 90, tmp_path).named("FFMA")))
    assert len(counts) == 1
    for variant in variants(F64, F64, 4096, 16, 90).values():
        exact_ptx(variant, 90)


@compiles
def test_the_tree_takes_few_shuffles_and_one_barrier(tmp_path):
    code = Code(variants(BF16, BF16, 4096, 16, 90)["forward"], 90, tmp_path)
    assert (len(code.named("SHFL")), len(code.named("BAR"))) == (14, 1)


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


VARIANT = cuda_kernels.forward_variant(norm(BF16, BF16, 4096, alignment=16), 90)


def raising(error):
    def function(*_):
        raise error

    return function


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


owned = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system's files have no owners")


def rewritten(change):
    """Changes the content of a file."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(rewritten(lambda content: content[:-1]), id="truncated"),
        pytest.param(rewritten(lambda content: content[:20]), id="shorter than its checksum"),
        pytest.param(rewritten(lambda content: b""), id="empty"),
        pytest.param(rewritten(lambda content: content[:-1] + b"X"), id="one byte wrong"),
        pytest.param(rewritten(lambda content: b"X" + content[1:]), id="a wrong checksum"),
        pytest.param(rewritten(lambda content: content[:32]), id="no code"),
        pytest.param(lambda file: file.chmod(0o666), id="others can write it", marks=owned),
        pytest.param(lambda file: file.chmod(0o620), id="a group can write it", marks=owned),
    ],
)
def test_a_file_that_is_damaged_or_not_safe_is_compiled_again(cache, spoil):
    cache.asked()
    (file,) = cache.folder.iterdir()
    spoil(file)
    assert cache.asked() == cache.asked() == 2


def test_a_file_that_was_renamed_is_compiled_again(cache):
    """Its checksum is right, and it was written by this user: but for another kernel."""
    cache.asked()
    (file,) = cache.folder.iterdir()
    cuda_compiler.from_cache(VARIANT, 80)
    (other,) = set(cache.folder.iterdir()) - {file}
    os.replace(other, file)
    assert cache.asked() == cache.asked() == 3


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pwd.getpwuid", raising(KeyError("nobody")))
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
    assert [cache.asked(), cache.asked()] == [1, 2]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "FUSEDNORM_CACHE_DIR" in warning
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
    printed_by(code, tmp_path / "cuda", timeout=120)
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
    printed_by(code, timeout=120, FUSEDNORM_CACHE_DIR=str(tmp_path))


class Status(enum.IntEnum):
    """What a call of the driver returns first."""

    SUCCESS = 0
    INVALID_CONTEXT = 201
    OUT_OF_MEMORY = 2
    INVALID_IMAGE = 200


#: CUlaunchAttributeID, as docs.nvidia.com/cuda/cuda-driver-api has it.
CLUSTER, EARLY = 4, 6


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
        attributes = (Attribute * given.attribute_count).from_address(given.attributes or 0)
        attributes = {attribute.id: attribute.value[0] for attribute in attributes}
        arguments = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value, found.size)
        numbers = {name: getattr(given, name) for name, _ in Config._fields_[:8]}
        found.launches.append(SimpleNamespace(function=function, attributes=attributes, arguments=arguments, **numbers))
        return found.statuses.pop(0) if found.statuses else Status.SUCCESS

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def current_device(device):
        device[0] = 0
        return Status.SUCCESS if found.context else Status.INVALID_CONTEXT

    of_context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    functions = {
        "cuLaunchKernelEx": launch,
        "cuCtxGetDevice": current_device,
        "cuCtxPushCurrent": of_context(lambda context: found.pushed.append(context) or Status.SUCCESS),
        "cuCtxPopCurrent": of_context(lambda context: found.pushed.append("popped") or Status.SUCCESS),
    }

    def address(name, *_):
        return Status.SUCCESS, ctypes.cast(functions[name.decode()], ctypes.c_void_p).value, None

    def load(code):
        found.loaded += 1
        return Status.SUCCESS, code

    def noted(name, value):
        setattr(found, name, value)
        return (Status.SUCCESS,)

    api = SimpleNamespace(
        CUresult=Status,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"),
        cuDriverGetVersion=lambda: (Status.SUCCESS, 13000),
        cuFuncSetAttribute=lambda function, name, value: noted(name, value),
        cuModuleLoadData=load,
        cuModuleGetFunction=lambda module, name: (Status.SUCCESS, 1234),
        cuGetProcAddress=address,
        cuCtxGetCurrent=lambda: (Status.SUCCESS, found.context),
        cuDevicePrimaryCtxRetain=lambda device: (Status.SUCCESS, 1000 + device),
        cuCtxSetCurrent=lambda context: noted("context", context),
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
    reason = r"loading the kernel forward \(a driver as new as NVRTC.*INVALID_IMAGE"
    with pytest.raises(fusednorm.BackendError, match=reason):
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
    token = requested._request.set("")
    try:
        assert choose.choose(bf16).passed_over["cuda"] == [found]
    finally:
        requested._request.reset(token)
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
    lines = printed_by(code, *(tmp_path / name for name in STUBS)).splitlines()
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
    found = printed_by(code, ONEDNN_MAX_CPU_ISA=most, FUSEDNORM_BACKEND="").split()
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
