"""What a call costs before a GPU's driver is reached, with a driver that does nothing: no GPU is needed.

    python -P benchmarks/gpu_host_cost.py cuda|triton

Microseconds per call at 1 x 4096 in bfloat16, the medians of rounds in which the calls take turns. Tensors lie in the
CPU's memory. The driver's own time, one to three microseconds a launch on a real machine, comes on top.

cuda: the public functions, beside `torch.empty_like` and one operation of torch's. A few lines of C, which gcc
compiles, replace DLPack's exchange API and the driver's launch, so that tensors seem to be on a GPU. "the backend's
forward" is what the first call of a kind takes after the checks; "backward" makes three gradients, in four new tensors,
by two launches; "gradients of a gate" makes two by one. "qk_norm_rope_" takes the heads of one
token, 16 of q and 8 of k of 128 elements, and tables of float32.

triton: the public function, the backend alone (which finds the kernel and lays out its arguments), and Triton's binder,
``function[grid](...)``, which launch the same kernel with the same arguments.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

os.environ["FUSEDNORM_SELF_CHECK"] = "off"  # a driver that does nothing leaves wrong bits

import fusednorm
from fusednorm.backends.kernel_keys import kind_of_norm
from fusednorm.calls.call import Flags, Forward, operation_of
from fusednorm.engine import run_gates, run_norms
from fusednorm.torch_ops.steps import GATE_FLAGS

ROUNDS = 15
Calls = dict[str, Callable[[], object]]

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


def library() -> Any:
    """The lines of C above, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "stub.c", Path(folder) / "stub.so"
        source.write_text(STUB)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", path, source], check=True)
        return ctypes.CDLL(str(path))


class Driver:
    """The driver API as the `cuda` backend uses it, which does nothing."""

    def __init__(self) -> None:
        self.library = library()
        self.functions = {
            b"cuLaunchKernelEx": self.library.launch_kernel_ex,
            b"cuCtxGetDevice": self.library.current_device,
        }

    def __getattr__(self, name: str) -> Callable[..., tuple[int, int]]:
        return lambda *_: (0, 1)  # any other function succeeds

    def cuCtxGetDevice(self) -> tuple[int, int]:  # noqa: N802
        """The first."""
        return 0, 0

    def cuGetProcAddress(self, name: bytes, *_: object) -> tuple[int, int]:  # noqa: N802
        """All calls are on the current device, so that no context is pushed or popped: those functions have none."""
        return 0, ctypes.cast(self.functions.get(name), ctypes.c_void_p).value or 0

    def exchange_api(self, capsule: object) -> Any:
        """DLPack's exchange API, as torch has it, but of tensors on a GPU."""
        python = ctypes.pythonapi
        python.PyCapsule_GetPointer.restype, python.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
        self.library.exchange_api_of_gpu.restype = ctypes.c_void_p
        given = python.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dlpack_exchange_api")
        changed = ctypes.c_void_p(self.library.exchange_api_of_gpu(ctypes.c_void_p(given)))
        return python.PyCapsule_New(changed, b"dlpack_exchange_api", None)


def measured(calls: Calls, number: int) -> None:
    """Prints the medians of microseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(number):
                call()
            times[name].append((time.perf_counter() - begin) / number * 1e6)
    print(f"torch {torch.__version__}, 1 x 4096 bfloat16")
    for name, values in times.items():
        print(f"  {name:34} {statistics.median(values):6.2f} us")


def call_of(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, total: torch.Tensor
) -> Forward:
    """A forward pass of one row, as the front end passes it to a backend."""
    operation = operation_of(x, residual, weight, Flags())
    return Forward(x, residual, weight, out, total, None, operation, 1, 1, ((0, 4096),) * 4, 1e-6, 0.0)


def with_cuda(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """The table for `cuda`."""
    from fusednorm.backends import cuda
    from fusednorm.backends.cuda import compiler as cuda_compiler

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "machines"))
    from ptx.cuda import stand_in

    wide = torch.zeros(2, 8192, dtype=torch.bfloat16)
    out, total, rstd = torch.empty_like(x), torch.empty_like(residual), torch.zeros(1)
    q, k, _ = torch.zeros(1, 32, 128, dtype=torch.bfloat16).split((16, 8, 8), 1)
    head_weight, cos, sin = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(1, 64), torch.zeros(1, 64)
    call = call_of(x, residual, weight, out, total)
    leaf = x.clone().requires_grad_()

    def recorded() -> None:
        with torch.enable_grad():
            fusednorm.fused_add_rms_norm(leaf, residual, weight)

    launching: Calls = {
        "fused_add_rms_norm_": lambda: fusednorm.fused_add_rms_norm_(x, residual, weight),
        "fused_add_rms_norm, out=": lambda: fusednorm.fused_add_rms_norm(
            x, residual, weight, out=out, residual_out=total
        ),
        "fused_add_rms_norm": lambda: fusednorm.fused_add_rms_norm(x, residual, weight),
        "rms_norm_": lambda: fusednorm.rms_norm_(x, weight),
        "rms_norm": lambda: fusednorm.rms_norm(x, weight),
        "fused_add_rms_norm_, gaps": lambda: fusednorm.fused_add_rms_norm_(wide[:, :4096], wide[:, 4096:], weight),
        "fused_add_rms_norm, recorded": recorded,
        "qk_norm_rope_": lambda: fusednorm.qk_norm_rope_(q, k, head_weight, head_weight, cos, sin),
        "gradients of a gate": lambda: run_gates.backward(x, (residual, x), GATE_FLAGS, (True, True)),
        "the backend's forward": lambda: cuda.forward(call),
        "backward": lambda: run_norms.backward(
            cuda, call.operation, x, None, residual, rstd, weight, 0.0, (True, True, True)
        ),
    }
    others: Calls = {
        "two slices of columns": lambda: (wide[:, :4096], wide[:, 4096:]),
        "torch.empty_like": lambda: torch.empty_like(x),
        "torch.add, out=": lambda: torch.add(x, residual, out=out),
    }
    driver = Driver()
    stand_in(driver, SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [90])), 90)
    cuda_compiler.from_cache = lambda variant, capability: b""
    for function in launching.values():
        function()
    launches = ctypes.c_long.in_dll(driver.library, "launches")
    before, number = launches.value, 5000
    measured(launching | others, number)
    wanted = (len(launching) + 1) * ROUNDS * number  # a backward pass takes two
    assert launches.value - before == wanted, "not every call launched what it should"


def with_triton(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """The table for `triton`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from fusednorm.backends.triton import gpu as triton_gpu

    class Nothing:
        """Triton's launcher, which launches nothing."""

        def __init__(self, source: object, metadata: object) -> None:
            pass

        def __call__(self, *arguments: object) -> None:
            pass

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 32, 0, 1024),
        unload_module=lambda *_: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )
    h100 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Nothing,
        utils=utils,
    )
    driver.set_active(h100)
    triton_gpu.DEVICES = ("cpu",)
    call = call_of(x, residual, weight, x, residual)
    variant = triton_gpu.forward_variant(kind_of_norm(call.operation, alignment=16), 32)
    constants = variant.all_constants()

    def bound() -> None:
        variant.function[(1,)](
            x, residual, weight, x, residual, None, *[4096] * 4, *[None] * 5, 1, 1e-6, 0.0, *[None] * 10,
            **constants, num_warps=variant.warps, enable_fp_fusion=False,
        )  # fmt: skip

    calls: Calls = {
        "fused_add_rms_norm_": lambda: fusednorm.fused_add_rms_norm_(x, residual, weight),
        "the backend's forward": lambda: triton_gpu.forward(call),
        "Triton's binder": bound,
    }
    for function in calls.values():
        function()
    measured(calls, 2000)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "triton"))
    backend = parser.parse_args().backend
    torch.set_grad_enabled(False)
    operands = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 4096), (1, 4096), (4096,))]
    with fusednorm.use_backend(backend):
        {"cuda": with_cuda, "triton": with_triton}[backend](*operands)


if __name__ == "__main__":
    main()
