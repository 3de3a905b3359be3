"""The machine that executes PTX (machine.cpp and its neighbours), compiled here, and kernels in it."""

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import subprocess
import tempfile
import zlib
from pathlib import Path

import numpy as np
from kept import made_once

from ptx import text

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-ffp-contract=off", "-fno-math-errno"]
PARTS = ["driver.cpp", "machine.cpp", "memory.cpp", "instructions.cpp"]


def build(folder):
    """Compiles the machine, and the fences that Python is to be started with."""
    folder.mkdir(exist_ok=True)
    objects = [folder / f"{part}.o" for part in PARTS]
    pairs = zip(PARTS, objects, strict=True)
    compilers = [subprocess.Popen(["g++", *FLAGS, "-c", HERE / part, "-o", made]) for part, made in pairs]
    statuses = [compiler.wait() for compiler in compilers]
    if any(statuses):
        raise RuntimeError("g++ cannot compile the machine that executes PTX; its messages are above")
    subprocess.run(["g++", "-shared", *objects, "-o", folder / "machine.so"], check=True)
    fences = [HERE / "fences.c", "-o", folder / "fences.so"]
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-fno-builtin", *fences], check=True)


def kept(folder):
    """A folder below this one with the machine, which is compiled unless it is there.

    The folder's name depends on the sources, the compiler and what the compiler finds out about this processor.
    """
    asked = (["--version"], ["-march=native", "-Q", "--help=target"])
    answers = [subprocess.run(["g++", *options], capture_output=True, check=True).stdout for options in asked]
    sources = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".c", ".cpp", ".h", ".py")]
    name = hashlib.sha256(b"\0".join(answers + sources)).hexdigest()[:16]
    found = folder / f"machine-{name}"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=folder) as new:
            build(Path(new) / "machine")
            try:
                (Path(new) / "machine").rename(found)
            except OSError:  # another process was first
                if not found.exists():
                    raise
    return found


@functools.cache
def library():
    """The machine; PTX_MACHINE names the folder where it is compiled."""
    if "PTX_MACHINE" in os.environ:
        found = ctypes.CDLL(str(Path(os.environ["PTX_MACHINE"]) / "machine.so"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder))
            found = ctypes.CDLL(str(Path(folder) / "machine.so"))
    for name in ("new_kernel", "exchange_api_of_gpu", "another_context"):
        getattr(found, name).restype = ctypes.c_void_p
    found.executed.restype = found.last_fault.restype = ctypes.c_char_p
    found.noted.restype = ctypes.c_longlong
    found.run_only.argtypes = [ctypes.c_longlong]
    return found


def read(ptx, name):
    """The kernel of this name. Beside the machine is kept what was read, which takes longer than to execute it."""
    if "PTX_MACHINE" not in os.environ:
        return text.read(ptx, name)
    file = Path(os.environ["PTX_MACHINE"], "read", hashlib.sha256(f"{name}\0{ptx}".encode()).hexdigest())
    return pickle.loads(zlib.decompress(made_once(file, lambda: zlib.compress(pickle.dumps(text.read(ptx, name)), 1))))


def load(ptx, name):
    """A kernel in the machine: its address, and what was read.

    Raises:
        text.RefusedError: the machine does not know an instruction, or a GPU's assembler might fuse it with another.
    """
    kernel, machine = read(ptx, name), library()
    shape = kernel.registers, kernel.shared, kernel.parameters, kernel.threads
    address = ctypes.c_void_p(machine.new_kernel(name.encode(), *shape, "griddepcontrol.wait" in kernel.names))
    for register, preset, value in kernel.constants:
        machine.add_constant(address, register, preset, ctypes.c_ulonglong(value))
    names = (ctypes.c_char_p * len(kernel.names))(*map(str.encode, kernel.names))
    code = (ctypes.c_longlong * len(kernel.code)).from_buffer_copy(kernel.code)
    unknown = machine.add_instructions(address, names, code, len(code))
    if unknown >= 0:
        raise text.RefusedError(f"{name}: the machine does not know {kernel.names[unknown]} with so many operands")
    return address.value, kernel


def executed(address):
    """What was executed of a kernel since last asked: (instruction, by warps, by lanes, sectors or passes)."""
    counts = (ctypes.c_ulonglong * 3)()
    number = 0
    while name := library().executed(ctypes.c_void_p(address), number, counts):
        yield name.decode(), *counts
        number += 1


class Access(ctypes.Structure):
    """An access to global memory, as in machine.h."""

    _fields_ = (("address", ctypes.c_ulonglong), ("bytes", ctypes.c_int), ("writes", ctypes.c_int))


@contextlib.contextmanager
def only(number):
    """Has launches run one block alone, or the last one if there are fewer, with its cluster.

    Yields a list, which afterwards has of each launch its blocks, the one that ran, and its accesses to global memory
    as [n, 3]: address, bytes, whether it writes. Those to addresses that no process has go nowhere, and read zeros.
    """
    launches, blocks, block, accesses = [], ctypes.c_int(), ctypes.c_int(), ctypes.POINTER(Access)()
    library().run_only(number)
    try:
        yield launches
        given = [ctypes.byref(place) for place in (blocks, block, accesses)]
        while (count := library().noted(len(launches), *given)) >= 0:
            found = np.ctypeslib.as_array(accesses, (count,)) if count else np.empty(0, Access)
            fields = [found[name].astype(np.int64) for name in ("address", "bytes", "writes")]
            launches.append((blocks.value, block.value, np.stack(fields, axis=-1)))
    finally:
        library().run_only(-1)


def last_launch(address):
    """Blocks and threads of a block of a kernel's last launch, and the bytes of shared memory that a block had."""
    shape = (ctypes.c_int * 3)()
    library().last_launch(ctypes.c_void_p(address), shape)
    return tuple(shape)
