"""Stands in for NVIDIA's bindings where there is no GPU: NVRTC is the C++ compiler, and the driver runs its code.

Only what backends/cuda.py uses is here. `install` puts it in place; tests/emulation/cuda starts Python for it.
"""

import ctypes
import enum
import itertools
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent

#: As in tests/emulation/cuda, which has Python load the sanitizers first. What they find ends the process.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

#: No optimisation that takes time, no fused multiplication, and memory read as any type, as on a GPU.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w", *SANITIZERS]


class Status(enum.IntEnum):
    """What a call returns first."""

    SUCCESS = 0
    ERROR_INVALID_VALUE = 1
    ERROR_COMPILATION = 6
    ERROR_INVALID_CONTEXT = 201
    ERROR_INVALID_HANDLE = 400


OK = Status.SUCCESS
FOLDER = tempfile.TemporaryDirectory(prefix="fusednorm-emulation-")


class Program:
    """A program of NVRTC's."""

    def __init__(self, source, name, headers):
        self.source, self.name, self.headers = source, name, headers
        self.log = self.code = b""

    def compile(self, options):
        """Compiles with the emulation's machine.cuh, and adds a function that takes the arguments by their address."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.headers.items():
                if name != "machine.cuh":
                    (Path(folder) / name).write_bytes(text)
            kernel = self.name.removesuffix(".cu")
            call = f'\nextern "C" void call(const void* arguments) {{ {kernel}(*(const Arguments*)arguments); }}\n'
            (Path(folder) / self.name).write_bytes(self.source + call.encode())
            defines = [option for option in options if option.startswith("-D")]
            command = ["g++", *FLAGS, *defines, "-I", folder, "-I", HERE, "-x", "c++", Path(folder) / self.name]
            result = subprocess.run([*command, "-o", Path(folder) / "code"], capture_output=True, env=without_preload())
            self.log = result.stderr
            if result.returncode != 0:
                return Status.ERROR_COMPILATION
            self.code = (Path(folder) / "code").read_bytes()
            return OK


def without_preload():
    """The environment for programs that are not to run under the sanitizers."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def filled(size_of, text_of):
    """NVRTC's way to return bytes: their number, and then into a buffer."""

    def fill(program, buffer):
        buffer[:] = text_of(program)
        return (OK,)

    return (lambda program: (OK, size_of(program))), fill


def nvrtc():
    log_size, log = filled(lambda program: len(program.log) + 1, lambda program: program.log + b"\0")
    code_size, code = filled(lambda program: len(program.code), lambda program: program.code)
    return SimpleNamespace(
        nvrtcVersion=lambda: (OK, 13, 0),
        nvrtcGetSupportedArchs=lambda: (OK, [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]),
        nvrtcCreateProgram=lambda source, name, count, headers, names: (
            OK,
            Program(source, name.decode(), {n.decode(): h for n, h in zip(names, headers, strict=True)}),
        ),
        nvrtcCompileProgram=lambda program, count, options: (program.compile([o.decode() for o in options]),),
        nvrtcGetProgramLogSize=log_size,
        nvrtcGetProgramLog=log,
        nvrtcGetCUBINSize=code_size,
        nvrtcGetCUBIN=code,
        nvrtcDestroyProgram=lambda program: (OK,),
    )


class Driver:
    """The driver API of two GPUs: a module is a shared library, and a launch a call."""

    def __init__(self):
        path = Path(FOLDER.name) / "emulation.so"
        subprocess.run(["g++", *FLAGS, HERE / "emulation.cpp", "-o", path], check=True, env=without_preload())
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.numbers = itertools.count()

    def cuDriverGetVersion(self):  # noqa: N802
        return OK, 13000

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        assert attribute == "shared"
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
        """What a function of the emulation returns, and writes at an address."""
        place = kind()
        status = Status(getattr(self.library, name)(ctypes.byref(place), *arguments))
        return status, place.value or 0

    def cuModuleLoadData(self, code):  # noqa: N802
        path = Path(FOLDER.name) / f"module{next(self.numbers)}.so"
        path.write_bytes(code)
        return OK, ctypes.CDLL(str(path))

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        function = ctypes.cast(module.call, ctypes.c_void_p)
        self.library.module_loaded(function)
        return OK, function.value

    def cuGetProcAddress(self, name, version, flags):  # noqa: N802
        ours = {
            b"cuLaunchKernelEx": self.library.launch_kernel_ex,
            b"cuCtxGetDevice": self.library.ctx_get_device,
            b"cuCtxPushCurrent": self.library.ctx_push_current,
            b"cuCtxPopCurrent": self.library.ctx_pop_current,
        }
        return OK, ctypes.cast(ours[name], ctypes.c_void_p).value, None

    CUresult = Status
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def exchange_api(self, capsule):
        """DLPack's exchange API, as torch has it, but of tensors on a GPU."""
        python = ctypes.pythonapi
        python.PyCapsule_GetPointer.restype, python.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
        api = python.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dlpack_exchange_api")
        self.library.exchange_api_of_gpu.restype = ctypes.c_void_p
        changed = self.library.exchange_api_of_gpu(ctypes.c_void_p(api))
        return python.PyCapsule_New(ctypes.c_void_p(changed), b"dlpack_exchange_api", None)


def install(cuda, quick, torch, capability):
    """Has the backend `cuda` take tensors in the CPU's memory, as a GPU of this compute capability would.

    The quick way is opened once more: to it they are on a GPU.
    """
    driver = Driver()
    if quick.OPEN:
        assert quick._open(driver.exchange_api(torch.Tensor.__dlpack_c_exchange_api__))
    cuda.bindings = lambda: (driver, nvrtc())
    cuda.DEVICES = ("cuda", "cpu")
    cuda.unavailable = list
    cuda.capability = lambda device: capability
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])  # as torch does
    torch.cuda.current_device = lambda: driver.cuCtxGetDevice()[1]
    cuda._stream = lambda device: 0
