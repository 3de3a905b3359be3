"""The ``cuda`` backend: the CUDA C++ kernels in ``csrc/``, compiled by NVRTC when they are first needed.

A kernel is compiled for the types, the alignment and the class of the row's length; the number of rows, strides and
``eps`` are arguments. What was compiled is kept on disk. How a row lies over threads depends on its length and its
types only, and decides no bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusednorm import quick as quick_way
from fusednorm.backends import reference
from fusednorm.backends.gpu_host import IN_LANE, UNTRIED, Host, address, ceiling, lacking
from fusednorm.registry import BackendError

if TYPE_CHECKING:
    from fusednorm.registry import Signature

DEVICES = ("cuda",)

#: The devices whose tensors the quick way takes to this backend.
quick: str | None = "cuda" if quick_way.OPEN else None

#: The CUDA C++ sources, in a checkout and in an install alike.
SOURCES = Path(__file__).parents[1] / "csrc"

#: The oldest GPUs that a kernel is compiled for, by compute capability: Turing.
OLDEST = 75

#: The longest rows: the sums of their segments have to fit 32 KiB of shared memory.
LONGEST = 4096 * reference.SEGMENT

#: Warps of a block, each with a segment of a row in its registers, at most: 128 registers are left for a thread.
_MOST_WARPS = 16

#: Blocks that every GPU with clusters runs together.
_MOST_BLOCKS = 8

#: Bytes of shared memory that a block may have, on GPUs without clusters, by compute capability.
_SHARED = {75: 65536, 80: 166912, 86: 101376, 87: 166912, 88: 101376, 89: 101376}

#: Warps of a block of rows that fit a warp.
_WARPS = 4

#: Segments of the longest rows whose gradients and share of the weight's fit the registers together.
_MOST_AT_ONCE = 8

#: The oldest driver, by the version of CUDA that it is for: it launches clusters, and says where its functions are.
_OLDEST_DRIVER = 12000

#: What is called of NVIDIA's Python bindings of the driver, and of those of NVRTC.
DRIVER: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("cuDriverGetVersion", "cuGetProcAddress", "CUresult"),
        *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain"),
        *("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"),
        "CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    ),
    (),
)
COMPILER: dict[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("nvrtcVersion", "nvrtcGetSupportedArchs"),
        *("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram"),
        *("nvrtcGetProgramLogSize", "nvrtcGetProgramLog"),
        *("nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcGetPTXSize", "nvrtcGetPTX"),
    ),
    (),
)

_CURE = "CUDA builds of torch 2.11 and newer bring both; else `pip install cuda-bindings nvidia-cuda-nvrtc` does"
_ANOTHER = "FUSEDNORM_CACHE_DIR names a folder for them, by its absolute path, which only you can write to"
_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", None: "none"}

#: Bytes of shared memory that a launch may ask for of a function that was not prepared for more: 48 KiB in all.
_SHARED_UNASKED = 16384


@functools.cache
def bindings() -> tuple[Any, Any]:
    """NVIDIA's Python bindings of the driver and of NVRTC."""
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is built without CUDA; pytorch.org has builds with it"]
    if not torch.cuda.is_available():
        return ["torch finds no NVIDIA GPU; `nvidia-smi` shows what the driver finds"]
    try:
        driver, nvrtc = bindings()
        lacked = ", ".join(filter(None, (lacking(driver, DRIVER), lacking(nvrtc, COMPILER))))
        if lacked:
            cure = "update fusednorm, or `pip install 'cuda-bindings>=12.6,<14'`"
            return [f"cuda-bindings {version('cuda-bindings')} lack {lacked}, which fusednorm calls; {cure}"]
        compiler = _compiler_version()
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no such library, or it is damaged
        return [f"NVRTC cannot be used ({error}); {_CURE}"]
    try:
        driver_version = _driver_version()
    except RuntimeError as error:  # likewise; or it lacks the function, or the function fails
        return [f"NVIDIA's driver cannot be used ({error}); `nvidia-smi` shows whether others can use it"]
    needed = max(_OLDEST_DRIVER, compiler[0] * 1000)  # a driver loads what is compiled for its major version of CUDA
    if driver_version < needed:
        code = f"code of NVRTC {compiler[0]}.{compiler[1]} needs one for {_cuda(needed)}"
        cure = "update the driver, or install an older NVRTC and cuda-bindings"
        return [f"the driver is for CUDA {_cuda(driver_version)}, and {code}; {cure}"]
    newest = max(capability(device) for device in range(torch.cuda.device_count()))
    if newest < OLDEST:
        best = f"the newest has {newest / 10}"
        return [f"no GPU here has compute capability {OLDEST / 10} or newer, which the kernels need; {best}"]
    return []


def unsuitable(signature: Signature) -> list[str]:
    """Why the backend cannot take a call."""
    if signature.hidden_size > LONGEST:
        return [f"rows of {signature.hidden_size} elements are longer than {LONGEST}"]
    found = capability(signature.device.index)
    if found < OLDEST:
        return [f"{signature.device} has compute capability {found / 10}; the kernels need {OLDEST / 10}"]
    return []


def plan(signature: Signature) -> str:
    """How a call will run, in words."""
    dtypes = [dtype for dtype in (signature.x, signature.residual, signature.weight, signature.out) if dtype]
    layout = Layout.of(signature.hidden_size, dtypes, 32, capability(signature.device.index))
    if layout.wide:
        way = f"a row per block of {layout.warps} warps, read twice"
    elif layout.blocks_row:
        way = f"a row per {'block' if layout.cluster == 1 else f'cluster of {layout.cluster} blocks'}"
        way += f" of {layout.warps} warps"
    else:
        way = f"{reference.SEGMENT // layout.row} rows per warp"
    return f"CUDA C++ kernels: {way}, {layout.aligned} bytes at a time where rows are aligned; {UNTRIED}"


def capability(device: int | None) -> int:
    """The compute capability of a device, times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Layout:
    """How rows lie over threads; csrc/row.cuh says what each number means there."""

    vector: int
    aligned: int
    row: int
    warps: int
    cluster: int
    blocks_row: bool
    full: bool
    #: Whether rows are too long for registers.
    wide: bool = False

    @classmethod
    def of(
        cls,
        hidden_size: int,
        dtypes: list[torch.dtype],
        alignment: int,
        capability: int,
        most_warps: int = _MOST_WARPS,
    ) -> Layout:
        """The layout for rows of operands of these dtypes that begin at multiples of ``alignment`` bytes."""
        smallest = min(dtype.itemsize for dtype in dtypes)
        at_once = min(alignment, 32 if capability >= 100 else 16)
        vector = math.gcd(max(at_once // smallest, 1), hidden_size)
        aligned = vector * smallest
        segments = -(-hidden_size // reference.SEGMENT)
        whole = hidden_size == segments * reference.SEGMENT
        if torch.float64 in dtypes:  # a segment of it takes all registers that there are
            return cls(vector, aligned, reference.SEGMENT, min(segments, most_warps // 2), 1, True, whole, True)
        if segments == 1:
            row = ceiling(max(hidden_size, 32))
            return cls(vector, aligned, row, _WARPS, 1, False, row == hidden_size)
        cluster = ceiling(-(-segments // most_warps))
        if cluster > (_MOST_BLOCKS if capability >= 90 else 1):
            return cls(vector, aligned, reference.SEGMENT, most_warps, 1, True, whole, True)
        warps = -(-segments // cluster)
        whole = whole and segments == warps * cluster
        return cls(vector, aligned, reference.SEGMENT, warps, cluster, True, whole)

    @property
    def rows(self) -> int:
        """Rows that a block takes at a time."""
        return 1 if self.blocks_row else self.warps * (reference.SEGMENT // self.row)

    def defines(self) -> dict[str, int]:
        """The constants of the sources."""
        return {
            "VECTOR": self.vector,
            "ALIGNED": self.aligned,
            "ROW": self.row,
            "WARPS": self.warps,
            "CLUSTER": self.cluster,
            "BLOCKS_ROW": int(self.blocks_row),
            "FULL": int(self.full),
        }


@dataclass(frozen=True)
class Variant:
    """One compilation of one kernel."""

    #: The function, and the file in csrc/ that has it.
    kernel: str
    #: Constants of the sources.
    defines: tuple[tuple[str, str | int], ...]
    #: How the arguments are laid out, as :mod:`struct` writes it, and their names.
    packing: str
    arguments: tuple[str, ...]
    #: Threads of a block, and blocks of a program.
    threads: int
    cluster: int = 1
    #: Rows, or columns, that a program takes.
    per_program: int = 1
    #: Bytes of shared memory of a block, beyond what the sources declare.
    shared: int = 0

    def identity(self) -> tuple[Any, ...]:
        """Equal for variants that are compiled alike."""
        return self.kernel, self.defines, self.shared


def forward_variant(
    x: torch.dtype,
    residual: torch.dtype | None,
    weight: torch.dtype | None,
    out: torch.dtype,
    rstd: bool,
    hidden_size: int,
    offset: bool,
    round_sum: bool,
    round_norm: bool,
    alignment: int,
    capability: int | None = None,
) -> Variant:
    """The kernel for a kind of call.

    ``rstd``: whether it is wanted; ``offset``: whether the weight's is not 0; ``alignment``: bytes of which every row
    of every operand begins at a multiple.
    """
    accumulator = reference.accumulator(x)
    given = [dtype for dtype in (x, residual, weight, out) if dtype is not None]
    capability = capability or _capability()
    layout = Layout.of(hidden_size, given, alignment, capability)
    defines: dict[str, str | int] = {
        "ACCUMULATOR": _NAMES[accumulator],
        "X_TYPE": _NAMES[x],
        "RESIDUAL_TYPE": _NAMES[residual],
        "WEIGHT_TYPE": _NAMES[weight],
        "OUT_TYPE": _NAMES[out],
        "RSTD": int(rstd),
        "OFFSET": int(offset),
        "ROUND_SUM": int(round_sum),
        "ROUND_NORM": int(round_norm),
        **layout.defines(),
    }
    shared = 0
    if layout.wide:  # where the second time finds the row: nowhere, in memory, in shared memory
        row = x if residual is None else residual if round_sum else accumulator
        defines["KEPT"] = int(residual is None or row == residual)
        sums = defines["SEGMENTS"] = _padded_segments(hidden_size)
        if hidden_size * row.itemsize + sums * accumulator.itemsize <= _SHARED.get(capability, 0):
            defines["KEPT"], shared = 2, hidden_size * row.itemsize
    return Variant(
        "forward_wide" if layout.wide else "forward",
        tuple(defines.items()),
        f"@6Q5qi2{'f' if accumulator.itemsize == 4 else 'd'}0q",
        (
            *("x", "residual", "weight", "out", "residual_out", "rstd"),
            *("x_stride", "residual_stride", "out_stride", "residual_out_stride", "rows"),
            *("hidden_size", "eps", "weight_offset"),
        ),
        layout.warps * 32,
        layout.cluster,
        layout.rows,
        shared,
    )


def backward_variants(
    dy: torch.dtype,
    d_total: torch.dtype | None,
    h: torch.dtype,
    weight: torch.dtype | None,
    dx: torch.dtype | None,
    dresidual: torch.dtype | None,
    dweight: torch.dtype | None,
    accumulator: torch.dtype,
    hidden_size: int,
    offset: bool,
    alignment: int,
    capability: int | None = None,
) -> dict[str, Variant]:
    """The kernels for a kind of backward pass; see :func:`fusednorm.backends.triton_gpu.backward_variants`."""
    given = [dtype for dtype in (dy, d_total, h, weight, dx, dresidual, accumulator) if dtype is not None]
    capability = capability or _capability()
    layout = Layout.of(hidden_size, given, alignment, capability)
    loaded = sum(dtype.itemsize for dtype in (dy, d_total, h) if dtype is not None)
    small = loaded <= 6 and layout.aligned >= 4  # elements of 2 bytes alone take a register each, as those of 4 do
    if not small:
        layout = Layout.of(hidden_size, given, alignment, capability, _MOST_WARPS // 2)
    types = {
        "ACCUMULATOR": accumulator,
        "DY_TYPE": dy,
        "D_TOTAL_TYPE": d_total,
        "H_TYPE": h,
        "WEIGHT_TYPE": weight,
        "DX_TYPE": dx,
        "DRESIDUAL_TYPE": dresidual,
        "DWEIGHT_TYPE": dweight,
    }

    def variant(kernel: str, used: set[str], warps: int, per_program: int, shared: int = 0, **more: int) -> Variant:
        # Kernels of which a type does not matter are compiled once for all of them.
        names = {name: _NAMES[dtype if name in used else None] for name, dtype in types.items()}
        defines = {**names, "OFFSET": int(offset), **layout.defines(), "WARPS": warps, **more}
        return Variant(
            kernel,
            tuple(defines.items()),
            f"@9Q6qi{'f' if accumulator.itemsize == 4 else 'd'}0q",
            (
                *("dy", "d_total", "h", "rstd", "weight", "dx", "dresidual", "partial", "dweight"),
                *("dy_stride", "d_total_stride", "h_stride", "rows", "block", "blocks"),
                *("hidden_size", "weight_offset"),
            ),
            warps * 32,
            more.get("CLUSTER", layout.cluster),
            per_program,
            shared,
        )

    shares = {"ACCUMULATOR", "DY_TYPE", "H_TYPE"}
    rows = {"ACCUMULATOR", "DY_TYPE", "D_TOTAL_TYPE", "H_TYPE", "WEIGHT_TYPE", "DX_TYPE", "DRESIDUAL_TYPE"}
    variants = {}
    gradients = bool(dx or dresidual)
    if dweight and gradients and accumulator != torch.float64 and hidden_size <= _MOST_AT_ONCE * reference.SEGMENT:
        if not layout.blocks_row:
            layout = replace(layout, warps=2 * _WARPS)
        variants["both"] = variant("backward_blocks", rows, layout.warps, layout.rows, AHEAD=int(small))
    else:
        if gradients:
            kernel = "backward_wide" if layout.wide else "backward_rows"
            more, kept = {}, 0
            if layout.wide:  # the second time finds dy and h in shared memory, if they fit
                more["SEGMENTS"] = sums = _padded_segments(hidden_size)
                kept = hidden_size * (dy.itemsize + h.itemsize)
                kept *= kept + sums * accumulator.itemsize <= _SHARED.get(capability, 0)
                more["KEPT"] = int(kept > 0)
            variants["rows"] = variant(kernel, rows, layout.warps, layout.rows, kept, **more)
        if dweight:
            columns = _WARPS * 32 * layout.vector
            variants["shares"] = variant(
                "weight_blocks", shares, _WARPS, columns, CLUSTER=1, ROW=1024, FULL=0, OFFSET=0
            )
    if dweight:
        warps = reference.ROW_BLOCKS // IN_LANE
        variants["sums"] = variant(
            "weight_sum",
            {"ACCUMULATOR", "DWEIGHT_TYPE"},
            warps,
            warps * 32,
            IN_LANE=IN_LANE,
            VECTOR=1,
            ALIGNED=4,
            ROW=1024,
            CLUSTER=1,
            BLOCKS_ROW=0,
            FULL=0,
            OFFSET=0,
        )
    return variants


def _padded_segments(hidden_size: int) -> int:
    """Segments of a row, as a power of two."""
    return ceiling(-(-hidden_size // reference.SEGMENT))


def _capability() -> int:
    return capability(torch.cuda.current_device())


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the bindings returned after its status; raises if that is an error."""
    status, *values = result
    if status:
        raise BackendError(f"{what} failed: {status.name}")
    return values[0] if values else None


@functools.cache
def _compiler_version() -> tuple[int, int]:
    _, nvrtc = bindings()
    status, major, minor = nvrtc.nvrtcVersion()
    _checked((status,), "nvrtcVersion")
    return major, minor


def _driver_version() -> int:
    """The version of CUDA that the driver is for: 1000 times the major, 10 times the minor."""
    driver, _ = bindings()
    version: int = _checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    return version


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh")}


def options(variant: Variant, capability: int) -> list[str]:
    """NVRTC's options for a variant and a compute capability, one that it knows or, as PTX, the newest before."""
    _, nvrtc = bindings()
    known = _checked(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    architecture = f"sm_{capability}" if capability in known else f"compute_{max(a for a in known if a <= capability)}"
    # The contract: every operation is rounded by itself, and subnormals are kept.
    exact = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    defines = [f"-D{name}={value}" for name, value in variant.defines]
    return [f"--gpu-architecture={architecture}", "--std=c++17", *exact, *defines]


def compiled(variant: Variant, capability: int) -> bytes:
    """The variant as machine code for GPUs of a compute capability; as PTX where NVRTC does not know it.

    Raises:
        BackendError: NVRTC found an error; the message has its log.
    """
    _, nvrtc = bindings()
    sources, name = _sources(), f"{variant.kernel}.cu"
    headers = [file for file in sources if file.endswith(".cuh")]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            sources[name], name.encode(), len(headers), [sources[h] for h in headers], [h.encode() for h in headers]
        ),
        "nvrtcCreateProgram",
    )
    try:
        arguments = options(variant, capability)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [o.encode() for o in arguments])
        if status:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.decode(errors="replace").strip("\0 \n")
            raise BackendError(f"NVRTC cannot compile {name} ({' '.join(arguments)}): {status.name}\n{text}")
        kind = "PTX" if "compute_" in arguments[0] else "CUBIN"
        code = bytearray(_checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program), f"nvrtcGet{kind}Size"))
        _checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, code), f"nvrtcGet{kind}")
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``FUSEDNORM_CACHE_DIR``, or the user's folder for caches.

    Raises:
        RuntimeError: the variable names no absolute path, or the user has no home.
    """
    chosen = os.environ.get("FUSEDNORM_CACHE_DIR", "").strip()
    if chosen:
        folder = Path(chosen).expanduser()
    else:
        from platformdirs import user_cache_path

        folder = user_cache_path("fusednorm", appauthor=False)
    if not folder.is_absolute():  # it would be another one after a chdir
        raise RuntimeError(f"{chosen or str(folder)!r} is no absolute path")
    return folder / "cuda"


def cache() -> dict[str, Any]:
    """The folder of compiled kernels, how many it has, and why none are kept there; None where that does not apply."""
    folder, kernels, problem = None, 0, None
    try:
        folder = cache_directory()
        with contextlib.suppress(FileNotFoundError):  # the first kernel makes it
            _check_folder(folder)
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"{str(nearest)!r} cannot be written")
        kernels = sum(1 for path in folder.glob("*.bin"))
    except (OSError, RuntimeError) as error:
        problem = f"{error}; {_ANOTHER}"
    return {"folder": folder and str(folder), "kernels": kernels, "problem": problem}


def _key(variant: Variant, capability: int, driver_version: int) -> str:
    """What a compilation depends on, as a name for its file."""
    parts = [*options(variant, capability), str(_compiler_version()), str(driver_version), variant.kernel]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name, source in _sources().items():
        digest.update(f"\0{name}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user (or root) can have written a file or a folder."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _check_folder(folder: Path) -> None:
    """Raises OSError where somebody else can write to the folder, or where it is none."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{str(folder)!r} is no folder")
    if not _is_ours(found):
        who, mode = found.st_uid, stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{str(folder)!r} belongs to user {who} with mode {mode:o}, so that others can write to it"
        )


def _checksum(path: Path, code: bytes) -> bytes:
    """Also of the name: a file that was renamed is not what its name says."""
    return hashlib.sha256(path.name.encode() + code).digest()


def _open_file(path: str, flags: int) -> int:
    """Opens a file, not what a link points to, and without waiting for whoever writes to a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _read(path: Path) -> bytes | None:
    """What :func:`_write` wrote; None if the file is missing, damaged, or may be somebody else's."""
    try:
        _check_folder(path.parent)
        with open(path, "rb", opener=_open_file) as file:
            found = os.fstat(file.fileno())  # of what was opened: the name may stand for another file by now
            if not (_is_ours(found) and stat.S_ISREG(found.st_mode)):
                return None
            content = file.read()
    except OSError:
        return None
    checksum, code = content[:32], content[32:]
    return code if code and _checksum(path, code) == checksum else None


def _write(path: Path, code: bytes) -> None:
    """Keeps compiled code, all of it or nothing, for this user alone; does without where that cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(_checksum(path, code) + code)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        _warn_once(f"fusednorm cannot keep compiled kernels in {str(path.parent)!r} ({error}); {_ANOTHER}")


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("fusednorm").warning(message)


def kept(variant: Variant, capability: int) -> bytes:
    """The compiled variant, from the cache on disk if it is there, else compiled and put there."""
    try:
        folder = cache_directory()
    except RuntimeError as error:
        _warn_once(f"fusednorm keeps no compiled kernels ({error}); {_ANOTHER}")
        return compiled(variant, capability)
    path = folder / f"{_key(variant, capability, _driver_version())}.bin"
    code = _read(path)
    if code is None:
        code = compiled(variant, capability)
        _write(path, code)
    return code


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute (docs.nvidia.com/cuda/cuda-driver-api), as far as it is used here."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig, likewise."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_LaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


@functools.cache
def _driver_function(name: str) -> int:
    """The address of a function of the driver."""
    driver, _ = bindings()
    return int(_checked(driver.cuGetProcAddress(name.encode(), _OLDEST_DRIVER, 0), "cuGetProcAddress"))


@functools.cache
def _primary_context(device: int) -> Any:
    """The context of a device that torch uses; kept for as long as there are kernels, which is for ever."""
    driver, _ = bindings()
    return _checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")


def _have_context(device: int) -> None:
    """Has a thread that has used no GPU yet use this one, as torch does."""
    driver, _ = bindings()
    if not int(_checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):
        _checked(driver.cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")


def _stream(device: int) -> int:
    """The address of torch's current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


class Launch:
    """A variant, compiled and loaded on the current device; calling it launches it."""

    def __init__(self, variant: Variant) -> None:
        self._driver, _ = bindings()
        self._device = torch.cuda.current_device()
        found = capability(self._device)
        self.per_program = variant.per_program
        self._cluster = variant.cluster
        self._threads = variant.threads
        self._pack = struct.Struct(variant.packing).pack
        self._arguments = variant.arguments
        _have_context(self._device)
        self._module = _checked(
            self._driver.cuModuleLoadData(kept(variant, found)),
            f"loading the kernel {variant.kernel} (a driver as new as NVRTC, which compiled it, can)",
        )
        function = _checked(
            self._driver.cuModuleGetFunction(self._module, variant.kernel.encode()), "cuModuleGetFunction"
        )
        self._function = int(function)
        self._shared = variant.shared
        if self._shared > _SHARED_UNASKED:
            limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(self._driver.cuFuncSetAttribute(function, limit, self._shared), "cuFuncSetAttribute")
        self._early = found >= 90
        self._launch = _LaunchKernelEx(_driver_function("cuLaunchKernelEx"))
        self._attributes = self._launch_attributes()  # the structure below has only their address
        self._config = _Config(
            *(0, 1, 1, self._threads, 1, 1, self._shared, None, self._attributes, len(self._attributes))
        )

    def _launch_attributes(self) -> ctypes.Array[_Attribute]:
        """Blocks per cluster; and that the kernel, which waits by itself, may begin before the one before has ended."""
        attributes = []
        if self._cluster > 1:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, value=(self._cluster, 1, 1)))
        if self._early:
            attributes.append(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,)))
        return (_Attribute * len(attributes))(*attributes)

    def quick(self) -> tuple[int, int, int, int, int, bool]:
        """The function and its launch, as :func:`fusednorm.quick.hold` wants them."""
        return self._function, self._threads, self.per_program, self._shared, self._cluster, self._early

    def __call__(self, programs: int, device: int, values: dict[str, Any]) -> None:
        """Launches on torch's current stream of the device, which must be the current one. Pointers are integers."""
        packed = self._pack(*[values[name] or 0 for name in self._arguments])
        arguments = ctypes.byref(ctypes.c_char_p(packed))  # an array of one address
        config = _Config.from_buffer_copy(self._config)
        config.grid_x = programs * self._cluster
        config.stream = _stream(device)
        _have_context(device)
        status = self._launch(ctypes.byref(config), self._function, arguments, None)
        if status:
            name = self._driver.CUresult(status).name
            raise BackendError(f"the launch of {programs} programs failed: {name}")


_SHARES = {
    "forward": quick_way.OF_ROWS,
    "rows": quick_way.OF_ROWS,
    "both": quick_way.OF_BLOCKS,
    "shares": quick_way.OF_COLUMNS_OF_BLOCKS,
    "sums": quick_way.OF_SUMS,
}


class _Host(Host):
    """Also has the quick way launch what the long way has loaded."""

    def _hold(self, key: tuple[Any, ...], variants: Mapping[str, Any]) -> dict[str, Any]:
        launches: dict[str, Any] = super()._hold(key, variants)
        if quick is not None:
            if "forward" in launches:
                device, *dtypes, rstd, hidden_size, offset, round_sum, round_norm, alignment = key
                options = round_sum * quick_way.ROUND_SUM + round_norm * quick_way.ROUND_NORM + rstd * quick_way.ROOTS
            else:
                device, *dtypes, accumulator, hidden_size, offset, alignment = key
                options = quick_way.BACKWARD + (accumulator == torch.float64) * quick_way.WIDE
            options += offset * quick_way.OFFSET
            kernels = tuple((*launch.quick(), _SHARES[name]) for name, launch in launches.items())
            _open_quick_way()
            context = int(_primary_context(device or 0))
            quick_way.hold(device or 0, context, tuple(dtypes), options, hidden_size, alignment, kernels)
        return launches


@functools.cache
def _open_quick_way() -> None:
    names = ("cuLaunchKernelEx", "cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    quick_way.open_cuda(*map(_driver_function, names))


_host = _Host(
    forward_variant, backward_variants, Launch, address, quick=functools.partial(quick_way.backward, quick_way.CUDA)
)
forward = _host.forward
backward = _host.backward
