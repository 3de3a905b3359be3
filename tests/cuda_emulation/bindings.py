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
    ERROR_COMPILATION = 6


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
    """The driver API: a module is a shared library, and a launch a call."""

    def __init__(self):
        path = Path(FOLDER.name) / "emulation.so"
        subprocess.run(["g++", *FLAGS, HERE / "emulation.cpp", "-o", path], check=True, env=without_preload())
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.numbers = itertools.count()
        self.launches = 0

    def cuDriverGetVersion(self):  # noqa: N802
        return OK, 13000

    def cuCtxGetCurrent(self):  # noqa: N802
        return OK, 1

    def cuModuleLoadData(self, code):  # noqa: N802
        path = Path(FOLDER.name) / f"module{next(self.numbers)}.so"
        path.write_bytes(code)
        return OK, ctypes.CDLL(str(path))

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return OK, module.call

    def cuLaunchKernelEx(self, config, function, arguments, extra):  # noqa: N802
        cluster = 1
        for attribute in config.attrs[: config.numAttrs]:
            if attribute.id == "cluster":
                cluster = attribute.value.clusterDim.x
        argument = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches += 1  # every other one backwards
        self.library.emulate(
            function,
            ctypes.c_void_p(argument),
            config.gridDimX,
            config.blockDimX,
            cluster,
            self.launches % 2,
        )
        return (OK,)

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early",
    )

    @staticmethod
    def CUlaunchAttribute():  # noqa: N802
        return SimpleNamespace(id=None, value=SimpleNamespace(clusterDim=SimpleNamespace()))


def install(cuda, torch, capability):
    """Has the backend `cuda` take tensors in the CPU's memory, as a GPU of this compute capability would."""
    driver = Driver()
    cuda.bindings = lambda: (driver, nvrtc())
    cuda.DEVICES = ("cuda", "cpu")
    cuda.unavailable = list
    cuda.capability = lambda device: capability
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
