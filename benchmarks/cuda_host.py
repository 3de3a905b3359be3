"""What a call costs before CUDA's driver is reached, with a driver that does nothing: no GPU is needed.

    python -P benchmarks/cuda_host.py

Microseconds per call of the public functions at 1 x 4096 in bfloat16, in turns with `torch.empty_like` and with one
operation of torch's. Tensors lie in the CPU's memory; DLPack's exchange API and the driver's launch are wrapped by a
few lines of C, which gcc compiles, so that they seem to be on a GPU. "The long way's forward" is what the first call of
a kind takes after the checks; "backward" makes three gradients, in four new tensors, by two launches. The driver's own
time, two to three microseconds a launch on a real machine, comes on top.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import fusednorm
from fusednorm import quick
from fusednorm.autograd import normalise
from fusednorm.backends import cuda

ROUNDS, CALLS = 15, 5000

STUB = """
#include <string.h>
typedef struct {
    unsigned version[2];
    void *other[4];
    int (*tensor_from)(void *, int *), (*stream)(int, int, void **);
} exchange_api;
static exchange_api of_torch, of_gpu;
static int tensor_from(void *object, int *tensor) {
    int failed = of_torch.tensor_from(object, tensor);
    tensor[2] = 2; /* DLDevice.device_type */
    return failed;
}
static int stream(int type, int device, void **stream) { *stream = 0; return 0; }
void *exchange_api_of_gpu(const void *api) {
    memcpy(&of_torch, api, sizeof of_torch);
    of_gpu = of_torch;
    of_gpu.tensor_from = tensor_from;
    of_gpu.stream = stream;
    return &of_gpu;
}
int current_device(int *device) { *device = 0; return 0; }
long launches;
int launch_kernel_ex(const void *config, void *function, void **arguments, void **extra) { launches++; return 0; }
"""


def driver(library: Any) -> SimpleNamespace:
    """The driver API as the backend uses it, which does nothing."""
    functions = {b"cuLaunchKernelEx": library.launch_kernel_ex, b"cuCtxGetDevice": library.current_device}
    # All calls are on the current device: no context is pushed, and none popped.
    address_of = lambda name, *_: (0, ctypes.cast(functions.get(name), ctypes.c_void_p).value or 0)  # noqa: E731
    return SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, 1),
        cuDevicePrimaryCtxRetain=lambda device: (0, 1),
        cuModuleLoadData=lambda code: (0, 1),
        cuModuleGetFunction=lambda module, name: (0, 1),
        cuGetProcAddress=address_of,
    )


def gpu(folder: str) -> Any:
    """Has the backend and the quick way believe that the CPU's tensors are on an H100; returns what counts launches."""
    source, path = Path(folder) / "stub.c", Path(folder) / "stub.so"
    source.write_text(STUB)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", path, source], check=True)
    library = ctypes.CDLL(str(path))
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype, python.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
    library.exchange_api_of_gpu.restype = ctypes.c_void_p
    given = python.PyCapsule_GetPointer(ctypes.py_object(quick._api), b"dlpack_exchange_api")
    changed = ctypes.c_void_p(library.exchange_api_of_gpu(ctypes.c_void_p(given)))
    if not quick._open(python.PyCapsule_New(changed, b"dlpack_exchange_api", None)):
        raise SystemExit("torch's exchange API is not understood")
    bindings = driver(library), None
    cuda.bindings = lambda: bindings
    cuda.kept = lambda variant, capability: b""
    cuda.unavailable = list
    cuda.capability = lambda device: 90
    cuda.DEVICES = ("cpu",)
    torch.cuda.current_device = lambda: 0
    cuda._stream = lambda device: 0
    return library


def main() -> None:
    """Measures and prints."""
    torch.set_grad_enabled(False)
    x, residual, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 4096), (1, 4096), (4096,)))
    wide = torch.zeros(2, 8192, dtype=torch.bfloat16)
    out, total, rstd = torch.empty_like(x), torch.empty_like(residual), torch.zeros(1)
    ways = {
        "fused_add_rms_norm_": lambda: fusednorm.fused_add_rms_norm_(x, residual, weight),
        "fused_add_rms_norm, out=": lambda: fusednorm.fused_add_rms_norm(
            x, residual, weight, out=out, residual_out=total
        ),
        "fused_add_rms_norm": lambda: fusednorm.fused_add_rms_norm(x, residual, weight),
        "rms_norm_": lambda: fusednorm.rms_norm_(x, weight),
        "rms_norm": lambda: fusednorm.rms_norm(x, weight),
        "fused_add_rms_norm_, gaps": lambda: fusednorm.fused_add_rms_norm_(wide[:, :4096], wide[:, 4096:], weight),
        "two slices of columns": lambda: (wide[:, :4096], wide[:, 4096:]),
        "fused_add_rms_norm, and rstd": lambda: normalise(x, residual, weight, 1e-6, 0.0, True, False),
        "the long way's forward": lambda: cuda.forward(
            *(x, residual, weight, out, total, None, 1, 4096, 4096, 4096, 4096, 4096), *(1e-6, 0.0, True, False)
        ),
        "backward": lambda: cuda.backward(x, None, residual, rstd, weight, 0.0, x.dtype, x.dtype, (True, True, True)),
        "torch.empty_like": lambda: torch.empty_like(x),
        "torch.add, out=": lambda: torch.add(x, residual, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder, fusednorm.use_backend("cuda"):
        library = gpu(folder)
        for way in ways.values():
            way()
        before = ctypes.c_long.in_dll(library, "launches").value
        for _ in range(ROUNDS):
            for name, way in ways.items():
                begin = time.perf_counter()
                for _ in range(CALLS):
                    way()
                times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
        launched = ctypes.c_long.in_dll(library, "launches").value - before
    assert launched == 10 * ROUNDS * CALLS, "not every call launched what it should"
    print(f"torch {torch.__version__}, 1 x 4096 bfloat16")
    for name, values in times.items():
        print(f"  {name:34} {statistics.median(values):6.2f} us")


if __name__ == "__main__":
    main()
