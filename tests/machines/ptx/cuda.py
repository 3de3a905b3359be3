"""Stands in for NVIDIA's driver where there is no GPU: the `cuda` backend launches its PTX in the machine."""

import ctypes
import enum
from types import SimpleNamespace

from ptx import machine


class Status(enum.IntEnum):
    """What a call returns first."""

    SUCCESS = 0
    ERROR_INVALID_VALUE = 1
    ERROR_INVALID_CONTEXT = 201
    ERROR_INVALID_HANDLE = 400
    ERROR_LAUNCH_FAILED = 719


OK = Status.SUCCESS


class Compiler:
    """NVRTC, which is asked for the PTX of a compilation where the backend asks for its machine code."""

    def __init__(self, nvrtc):
        self._nvrtc = nvrtc

    def __getattr__(self, name):
        return getattr(self._nvrtc, name.replace("CUBIN", "PTX"))

    def nvrtcCompileProgram(self, program, number, options):  # noqa: N802
        """Without the assembler, which makes machine code of the same PTX, and takes about half of the time."""
        return self._nvrtc.nvrtcCompileProgram(program, number, [o.replace(b"=sm_", b"=compute_") for o in options])


class Driver:
    """The driver API of two GPUs, as far as backends/cuda/ uses it."""

    CUresult = Status
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self):
        self.library = machine.library()

    def cuDriverGetVersion(self):  # noqa: N802
        return OK, 13000

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        assert attribute == "shared"
        self.library.allow_shared(ctypes.c_void_p(function), value)
        return (OK,)

    def cuCtxGetCurrent(self):  # noqa: N802
        return self.written("ctx_get_current", ctypes.c_void_p)

    def cuCtxGetDevice(self):  # noqa: N802
        return self.written("ctx_get_device", ctypes.c_int)

    def cuCtxSetCurrent(self, context):  # noqa: N802
        return (Status(self.library.ctx_set_current(ctypes.c_void_p(context))),)

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return self.written("device_primary_ctx_retain", ctypes.c_void_p, device or 0)  # the CPU has no number

    def written(self, name, kind, *arguments):
        """What a function of the driver returns, and writes at an address."""
        place = kind()
        status = Status(getattr(self.library, name)(ctypes.byref(place), *arguments))
        return status, place.value or 0

    def cuModuleLoadData(self, code):  # noqa: N802
        return OK, bytes(code).decode().rstrip("\0")

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return OK, machine.load(module, name.decode())[0]

    def cuGetProcAddress(self, name, version, flags):  # noqa: N802
        ours = {
            b"cuLaunchKernelEx": self.library.launch_kernel_ex,
            b"cuCtxGetDevice": self.library.ctx_get_device,
            b"cuCtxPushCurrent": self.library.ctx_push_current,
            b"cuCtxPopCurrent": self.library.ctx_pop_current,
        }
        return OK, ctypes.cast(ours[name], ctypes.c_void_p).value, None

    def exchange_api(self, capsule):
        """DLPack's exchange API, as torch has it, but of tensors on a GPU."""
        python = ctypes.pythonapi
        python.PyCapsule_GetPointer.restype, python.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
        api = python.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dlpack_exchange_api")
        changed = self.library.exchange_api_of_gpu(ctypes.c_void_p(api))
        return python.PyCapsule_New(ctypes.c_void_p(changed), b"dlpack_exchange_api", None)


def install(capability):
    """Has the `cuda` backend launch its kernels in the machine, as on a GPU of this compute capability."""
    from fusednorm.backends.cuda import compiler as cuda_compiler

    _, nvrtc = cuda_compiler.bindings()
    stand_in(Driver(), Compiler(nvrtc), capability)


def stand_in(driver, nvrtc, capability):
    """Has the `cuda` backend take tensors in the CPU's memory, with this driver and this compiler.

    The fast path is opened once more: to it they are on a GPU.
    """
    import torch

    from fusednorm.backends import cuda
    from fusednorm.backends.cuda import compiler as cuda_compiler
    from fusednorm.calls import fast_path
    from fusednorm.engine import open_fast_path

    open_fast_path.type_of_device = lambda d: fast_path.CUDA
    if fast_path.OPEN:
        assert fast_path._open(driver.exchange_api(torch.Tensor.__dlpack_c_exchange_api__))
    cuda_compiler.bindings = lambda: (driver, nvrtc)
    cuda.DEVICES = ("cuda", "cpu")
    cuda.unavailable = list
    cuda.capability = lambda device: capability
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])  # as torch does
    torch.cuda.current_device = lambda: driver.cuCtxGetDevice()[1]
    cuda._stream = lambda device: 0
