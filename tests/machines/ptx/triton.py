"""Stands in for Triton's driver where there is no GPU: what Triton compiles to PTX is launched in the machine."""

import ctypes
import struct
from types import SimpleNamespace

from ptx import machine
from ptx.launch import Config

PACKED = {"i64": "q", "i32": "i", "fp32": "f", "fp64": "d"}


def have_context():
    """Has a thread that has used no GPU yet use the first, as Triton's launcher does."""
    library, context = machine.library(), ctypes.c_void_p()
    library.ctx_get_current(ctypes.byref(context))
    if not context.value:
        library.device_primary_ctx_retain(ctypes.byref(context), 0)
        library.ctx_set_current(context)


class Utilities:
    """What Triton asks a driver for besides launches."""

    @staticmethod
    def get_device_properties(device):
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    @staticmethod
    def load_binary(name, ptx, shared, device):
        have_context()
        address, kernel = machine.load(ptx.decode(), name)
        machine.library().allow_shared(ctypes.c_void_p(address), shared)
        return address, (address, kernel, shared), 0, 0, 1024

    @staticmethod
    def unload_module(module):
        pass


class Launcher:
    """Packs arguments as Triton's own: constants are left out, and two pointers to scratch memory follow."""

    def __init__(self, source, metadata):
        self.types = list(source.signature.values())
        assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
        assert metadata.num_ctas == 1
        self.threads = metadata.num_warps * 32

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        address, kernel, shared = function
        packed = b""
        for kind, value in zip(self.types, arguments, strict=True):
            if kind == "constexpr":
                continue
            one = struct.pack("Q", value or 0) if kind.startswith("*") else struct.pack(PACKED[kind], value)
            packed += b"\0" * (-len(packed) % len(one)) + one
        packed += b"\0" * (-len(packed) % 8) + b"\0" * 16
        assert len(packed) == kernel.parameters, (len(packed), kernel.parameters)
        have_context()
        config = Config(x, y, z, self.threads, 1, 1, shared)
        given = ctypes.byref(ctypes.c_char_p(packed))
        status = machine.library().launch_kernel_ex(ctypes.byref(config), ctypes.c_void_p(address), given, None)
        if status:
            raise RuntimeError(f"the launch failed with status {status}: {machine.library().last_fault().decode()}")


def install(capability):
    """Has the `triton` backend take tensors in the CPU's memory, as a GPU of this compute capability would."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from fusednorm.backends.triton import gpu as triton_gpu

    def stages_to_ptx(compiler=None, stages=None, *rest):
        if stages is not None:
            stages["cubin"] = lambda ptx, metadata: ptx.encode()
        return "PTX", "PTX"  # of Triton's cache

    knobs.runtime.add_stages_inspection_hook = stages_to_ptx
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            launcher_cls=Launcher,
            utils=Utilities,
        )
    )
    triton_gpu.DEVICES = ("cuda", "cpu")
    triton_gpu.unavailable = list
