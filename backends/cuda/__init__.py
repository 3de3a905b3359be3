"""The ``cuda`` backend: the CUDA C++ kernels in ``csrc/``, compiled by NVRTC when they are first needed.

A kernel is compiled for the types, the alignment and the class of the row's length; the number of rows, strides and
``eps`` are arguments. ``cpu/launch/cuda.c`` launches kernels, for the fast path too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.backends.cuda import compiler, products
from fusednorm.backends.cuda.choice import LONGEST, Layout, Variant, variants_of
from fusednorm.backends.cuda.compiler import checked
from fusednorm.backends.kernel_keys import (
    FUNCTIONS_OF_GATES,
    PACKED,
    UNTRIED,
    blocks_of,
    check_addresses,
    fuses,
    kind_of,
    lacking,
    multiplies_int8,
    scratch_of,
)
from fusednorm.calls import c_abi
from fusednorm.calls import fast_path as path
from fusednorm.calls.call import Call, device_of
from fusednorm.calls.process import BackendError
from fusednorm.calls.rotation_calls import of_one_weight_dtype
from fusednorm.reference import norm as reference

if TYPE_CHECKING:
    from fusednorm.calls.call import AnyCall, Backward, ForwardCall, Operation

DEVICES = ("cuda",)

KNOWS = frozenset(("residual_dtype", "norm_before_add", "affine", "x_scale", "center"))
KNOWS |= {"quantize", "round_scale", "gate", "gate_backward", "gate_steps", "gate_interleaved", "norm_gated", "rotate"}
KNOWS |= {"log_prob", "log_prob_backward", "int8_linear"}
KNOWS |= FUNCTIONS_OF_GATES

#: The type of device whose tensors the fast path takes to this backend; None if there is no fast path.
fast_path: str | None = "cuda" if path.OPEN else None

#: The oldest GPUs that a kernel is compiled for, by compute capability: Turing.
OLDEST = 75

#: The oldest driver, by the version of CUDA that it is for: it launches clusters, and says where its functions are.
_OLDEST_DRIVER = 12000
#: The oldest driver that captures, in a graph, the launch of a kernel which may begin before the one before has ended.
_CAPTURES_EARLY = 12030

#: Bytes of dynamic shared memory that a launch may have without cuFuncSetAttribute: 48 KiB with the static ones.
_SHARED_UNASKED = 16384

#: The names that are called of NVIDIA's Python bindings of the driver, and of those of NVRTC.
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


def unavailable() -> list[str]:
    """Why this machine cannot use the backend."""
    if not path.COMPILED:
        return ["the compiled extension that launches its kernels is missing; the backend cpu says why"]
    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is built without CUDA; pytorch.org has builds with it"]
    if not torch.cuda.is_available():
        return ["torch finds no NVIDIA GPU; `nvidia-smi` shows what the driver finds"]
    try:
        driver, nvrtc = compiler.bindings()
        lacked = ", ".join(filter(None, (lacking(driver, DRIVER), lacking(nvrtc, COMPILER))))
        if lacked:
            cure = "update fusednorm, or `pip install 'cuda-bindings>=12.6,<14'`"
            return [f"cuda-bindings {version('cuda-bindings')} lack {lacked}, which fusednorm calls; {cure}"]
        major, minor = compiler.compiler_version()
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no such library, or it is damaged
        return [f"NVRTC cannot be used ({error}); {_CURE}"]
    try:
        found = compiler.driver_version()
    except RuntimeError as error:  # the library is missing or damaged, or it lacks the function, or the function fails
        return [f"NVIDIA's driver cannot be used ({error}); `nvidia-smi` shows whether others can use it"]
    needed = max(_OLDEST_DRIVER, major * 1000)  # a driver loads what is compiled for its major version of CUDA
    if found < needed:
        code = f"code of NVRTC {major}.{minor} needs one for {_cuda(needed)}"
        cure = "update the driver, or install an older NVRTC and cuda-bindings"
        return [f"the driver is for CUDA {_cuda(found)}, and {code}; {cure}"]
    newest = max(capability(device) for device in range(torch.cuda.device_count()))
    if newest < OLDEST:
        best = f"the newest has {newest / 10}"
        return [f"no GPU here has compute capability {OLDEST / 10} or newer, which the kernels need; {best}"]
    return []


def unsuitable(operation: Operation) -> list[str]:
    """Why the backend cannot take a call."""
    size, step = operation.hidden_size, operation.step
    if multiplies_int8(operation):
        return [] if products.is_right(operation.device) else ["torch._int_mm returns wrong sums of products here"]
    # Gradients of centered rows have two sums of each segment in shared memory, and so have entropies.
    two_sums = operation.center or (step is not None and step.name == "log_prob")
    longest = LONGEST // 2 if two_sums and operation.accumulator == torch.float64 else LONGEST
    if size > longest:
        return [f"rows of {size} elements are longer than {longest}"]
    if step is not None and step.quantization is not None and not fuses(step.quantization.group(size), size):
        return [f"no program has all rows of {size} elements in groups of {step.quantization.per}"]
    if step is not None and step.name == "rotate" and (size > reference.SEGMENT or torch.float64 in step.dtypes):
        return [f"its heads have up to {reference.SEGMENT} elements, and none is float64"]
    found = capability(operation.device.index)
    if found < OLDEST:
        return [f"{operation.device} has compute capability {found / 10}; the kernels need {OLDEST / 10}"]
    if found < (least := _oldest_compiled()):
        cure = "install an older NVRTC and cuda-bindings"
        return [f"{operation.device} has compute capability {found / 10}; NVRTC compiles for {least / 10} on; {cure}"]
    return []


@functools.cache
def _oldest_compiled() -> int:
    """The lowest compute capability for which NVRTC compiles."""
    return min(compiler.supported())


def plan(operation: Operation) -> str:
    """How a call will run, in words."""
    if multiplies_int8(operation):
        return f"torch's products of int8 and its operations on their sums; {UNTRIED}"
    layout = Layout.of(operation.hidden_size, operation.dtypes(), 32, capability(operation.device.index))
    if layout.wide:
        lies = f"a row per block of {layout.warps} warps, read twice"
    elif layout.blocks_row:
        lies = f"a row per {'block' if layout.cluster == 1 else f'cluster of {layout.cluster} blocks'}"
        lies += f" of {layout.warps} warps"
    else:
        lies = f"{reference.SEGMENT // layout.row} rows per warp"
    return f"CUDA C++ kernels: {lies}, {layout.aligned} bytes at a time where rows are aligned; {UNTRIED}"


def capability(device: int | None) -> int:
    """The compute capability of a device, times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def _driver_function(name: str) -> int:
    """The address of a function of the driver."""
    driver, _ = compiler.bindings()
    return int(checked(driver.cuGetProcAddress(name.encode(), _OLDEST_DRIVER, 0), "cuGetProcAddress"))


@functools.cache
def _primary_context(device: int) -> Any:
    """The context of a device that torch uses; kept for as long as there are kernels, which is for ever."""
    driver, _ = compiler.bindings()
    return checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")


def _stream(device: int) -> int:
    """The address of torch's current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _open_launcher() -> None:
    """Gives C the driver's functions."""
    names = ("cuLaunchKernelEx", "cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    path.open_cuda(*map(_driver_function, names))


#: The functions of all variants that were loaded on a device: several kinds of calls may share one.
_functions: dict[tuple[Any, ...], int] = {}


def _load(variant: Variant, device: int) -> int:
    """The address of a variant's function, compiled and loaded on a device."""
    identity = (device, *variant.identity())
    found = _functions.get(identity)
    if found is not None:
        return found
    driver, _ = compiler.bindings()
    with nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device):
        if not int(checked(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")):  # a thread that has used no GPU yet
            checked(driver.cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")
        module = checked(
            driver.cuModuleLoadData(compiler.from_cache(variant, capability(device))),
            f"loading the kernel {variant.kernel} (a driver as new as NVRTC, which compiled it, can)",
        )
        function = checked(driver.cuModuleGetFunction(module, variant.kernel.encode()), "cuModuleGetFunction")
        if variant.shared > _SHARED_UNASKED:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, limit, variant.shared), "cuFuncSetAttribute")
    _functions[identity] = int(function)
    return int(function)


def _hold(packed: bytes, device: int, variants: Iterable[Variant]) -> None:
    """Compiles and loads the kernels of a kind of call, and has C launch them from now on."""
    _open_launcher()
    # A kernel waits by itself, and may begin before the one before has ended.
    early = capability(device) >= 90 and compiler.driver_version() >= _CAPTURES_EARLY
    kernels = tuple(
        (_load(v, device), v.threads, v.per_program, v.shared, v.cluster, early, int(v.share)) for v in variants
    )
    path.hold_cuda(packed, int(_primary_context(device)), kernels)


def _launch(packed: bytes, call: AnyCall) -> None:
    """Launches the kernels of a packed call, which are compiled first if they are not held yet."""
    device = device_of(call).index or 0
    stream = _stream(device)
    status = path.launch_cuda(packed, stream)
    if status == path.NOT_HELD:
        check_addresses(call)
        _hold(packed, device, variants_of(kind_of(call), capability(device)))
        status = path.launch_cuda(packed, stream)
    if status:
        driver, _ = compiler.bindings()
        raise BackendError(f"the launch of a CUDA kernel failed: {driver.CUresult(status).name}")


def forward(call: ForwardCall) -> None:
    """Launches a kernel; see :class:`fusednorm.registry.Backend`."""
    if isinstance(call, Call) and call.name == "int8_linear":
        products.int8_linear(call)
        return
    parts: Sequence[ForwardCall] = (call,)
    if isinstance(call, Call) and call.name == "rotate":
        parts = of_one_weight_dtype(call)
    for part in parts:
        _launch(PACKED[type(part)](part), part)


def backward(call: Backward | Call) -> None:
    """Launches kernels; see :class:`fusednorm.registry.Backend`."""
    if isinstance(call, Call):
        _launch(PACKED[Call](call), call)
        return
    partial = scratch_of(call)  # held until the launch, which its address is given
    _launch(c_abi.pack_backward(call, 1, blocks_of(call.rows)[0], partial), call)
