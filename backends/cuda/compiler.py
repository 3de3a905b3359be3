"""Compiles CUDA kernels by NVRTC, and keeps on disk what was compiled."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from fusednorm.backends.cuda.choice import Variant
from fusednorm.calls.process import BackendError

#: The CUDA C++ sources, in a checkout and in an install alike.
SOURCES = Path(__file__).parents[2] / "csrc"

_ANOTHER = "FUSEDNORM_CACHE_DIR names a folder for them, by its absolute path, which only you can write to"


@functools.cache
def bindings() -> tuple[Any, Any]:
    """NVIDIA's Python bindings of the driver and of NVRTC."""
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The result of a call of the bindings, after its status; raises if that is an error."""
    status, *values = result
    if status:
        raise BackendError(f"{what} failed: {status.name}")
    return values[0] if values else None


@functools.cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version: major, minor."""
    _, nvrtc = bindings()
    status, major, minor = nvrtc.nvrtcVersion()
    checked((status,), "nvrtcVersion")
    return major, minor


def driver_version() -> int:
    """The version of CUDA that the driver is for: 1000 times the major, 10 times the minor."""
    driver, _ = bindings()
    found: int = checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
    return found


@functools.cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh")}


def supported() -> list[int]:
    """The compute capabilities for which NVRTC compiles: 90 stands for 9.0. New versions drop old ones."""
    _, nvrtc = bindings()
    found: list[int] = checked(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    return found


def options(variant: Variant, capability: int) -> list[str]:
    """NVRTC's options for a variant and a compute capability, one that it knows or, as PTX, the newest before."""
    known = supported()
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
    program = checked(
        nvrtc.nvrtcCreateProgram(
            sources[name], name.encode(), len(headers), [sources[h] for h in headers], [h.encode() for h in headers]
        ),
        "nvrtcCreateProgram",
    )
    try:
        arguments = options(variant, capability)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [o.encode() for o in arguments])
        if status:
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize"))
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.decode(errors="replace").strip("\0 \n")
            raise BackendError(f"NVRTC cannot compile {name} ({' '.join(arguments)}): {status.name}\n{text}")
        kind = "PTX" if "compute_" in arguments[0] else "CUBIN"
        code = bytearray(checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program), f"nvrtcGet{kind}Size"))
        checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, code), f"nvrtcGet{kind}")
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_directory() -> Path:
    """The folder of compiled kernels: ``FUSEDNORM_CACHE_DIR``, or the user's folder for caches.

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
    """A name for the file of a compilation, of all that it depends on."""
    parts = [*options(variant, capability), str(compiler_version()), str(driver_version), variant.kernel]
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
    """Raises OSError if other users can write to the folder, or if it is no folder."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{str(folder)!r} is no folder")
    if not _is_ours(found):
        who, mode = found.st_uid, stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{str(folder)!r} belongs to user {who} with mode {mode:o}, so that others can write to it"
        )


def _checksum(path: Path, code: bytes) -> bytes:
    """A checksum of the code and the file's name: a file that was renamed is not what its name says."""
    return hashlib.sha256(path.name.encode() + code).digest()


def _open_file(path: str, flags: int) -> int:
    """Opens a file. It follows no link, and does not wait for a writer at the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _read(path: Path) -> bytes | None:
    """The code that :func:`_write` wrote; None if the file is missing or damaged, or if others may have written it."""
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


def from_cache(variant: Variant, capability: int) -> bytes:
    """The compiled variant, from the cache on disk if it is there, else compiled and put there."""
    try:
        folder = cache_directory()
    except RuntimeError as error:
        _warn_once(f"fusednorm keeps no compiled kernels ({error}); {_ANOTHER}")
        return compiled(variant, capability)
    path = folder / f"{_key(variant, capability, driver_version())}.bin"
    code = _read(path)
    if code is None:
        code = compiled(variant, capability)
        _write(path, code)
    return code
