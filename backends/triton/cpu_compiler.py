"""``triton_cpu`` outside its kernels: it compiles one, in the background if it may, and has C call it.

Triton's own launcher is not used. It starts OpenMP's threads without setting their arithmetic, so that a caller that
flushes subnormals would change bits, holds Python's lock while a kernel runs, and has to be compiled for every kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from fusednorm.backends.triton import host
from fusednorm.backends.triton.host import Variant
from fusednorm.calls.process import BackendError, NotYetError

_lib: Any = None
with contextlib.suppress(ImportError):  # the cpu backend says why
    _lib = import_module("fusednorm._cpu").lib

_log = logging.getLogger("fusednorm")

#: ``cpu/run/triton_programs.c`` gives a kernel so many, by the name of its function: pointers, integers, numbers of the
#: accumulator's type, and numbers of float32.
GIVEN = {"forward": (8, 16, 3, 0), "backward": (9, 11, 1, 0), "quantize": (9, 22, 3, 5)}
GIVEN |= {"gate": (3, 8, 0, 0), "gate_backward": (5, 12, 0, 0)}
GIVEN |= dict.fromkeys(("log_prob", "log_prob_backward"), (11, 11, 1, 0))


def processor() -> str:
    """A name for what code compiled here needs, which Triton's cache does not ask for: it knows architectures only."""
    from triton._C import libtriton

    llvm = getattr(libtriton, "llvm", None)
    found = [getattr(llvm, name, str)() for name in ("get_cpu_name", "get_cpu_features")]
    return hashlib.sha256(repr([found[0], sorted(found[1])]).encode()).hexdigest()[:16]


class Program:
    """A kernel, compiled and loaded; calling it runs it."""

    def __init__(self, variant: Variant, only_cached: bool = False) -> None:
        from triton.runtime.driver import driver

        self.variant = variant
        kernel = host.compiled(variant, driver.active.get_current_target(), only_cached)
        self._check(kernel)
        descriptor, path = tempfile.mkstemp(suffix=".so")
        try:
            with open(descriptor, "wb") as file:
                file.write(kernel.asm["so"])
            self._library = ctypes.CDLL(path)
        finally:
            os.unlink(path)
        address = ctypes.cast(getattr(self._library, kernel.metadata.name), ctypes.c_void_p).value
        self.address: int = address or 0

    def _check(self, kernel: Any) -> None:
        """Checks that the kernel takes the arguments that C will give it.

        Raises:
            BackendError: this version of Triton compiles a kernel into a function with other arguments.
        """
        (arguments,) = re.findall(
            rf"^define void @{kernel.metadata.name}\((.*)\) ", kernel.asm["llir"], re.MULTILINE
        ) or [""]
        given = re.findall(r"(\w+)[^,%]*%\d+", re.sub(r"\w+\([^()]*\)", "", arguments))
        real = "double" if self.variant.accumulator == torch.float64 else "float"
        pointers, integers, reals, floats = GIVEN[kernel.metadata.name]
        numbers = ["i64"] * integers + [real] * reals + ["float"] * floats
        if given != ["ptr"] * pointers + numbers + ["i32"] * 6:
            raise BackendError(
                f"the kernels of this version of Triton take other arguments than fusednorm gives them: {given}; "
                + host.CURE_ON_CPUS
            )

    def __call__(self, call: bytes, programs: int) -> None:
        """Runs so many programs of a packed call on torch's threads."""
        if _lib.fn_run_triton(self.address, call, programs):
            raise OverflowError(f"this call would take {programs} programs, and Triton counts them in 32 bits; split x")


class Failure(NamedTuple):
    """Why there is no kernel."""

    reason: str


#: A process that compiles is started with this code: it imports from where this one would.
_CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from fusednorm.backends.triton import cpu_compiler; cpu_compiler.compile_for_parent()"
)


class _Child:
    """A process that compiles into Triton's cache. In a thread the compiler would hold Python's lock for seconds."""

    def __init__(self) -> None:
        code = _CHILD.format(path=sys.path)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def compile(self, variant: Variant) -> str | None:
        """Why the variant cannot be compiled; empty if it is in the cache, None if the process has ended."""
        function = variant.function
        named = dataclasses.replace(variant, function=(function.__module__, function.__name__))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(pickle.dumps(named).hex() + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else None

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.communicate()


def compile_for_parent() -> None:
    """The work of the process: it takes variants line by line, and answers what :meth:`_Child.compile` returns."""
    from triton.runtime.driver import driver

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers may print
    for line in sys.stdin:
        named = pickle.loads(bytes.fromhex(line))
        reason = ""
        try:
            module, name = named.function
            variant = dataclasses.replace(named, function=getattr(import_module(module), name))
            host.compiled(variant, driver.active.get_current_target())
        except Exception as error:  # a compiler's may be anything
            reason = f"{type(error).__name__}: {error}"
        print(json.dumps(reason), file=answers, flush=True)


class Compiler:
    """Compiles kernels, one at a time: here and now, or in the background.

    In the background a process compiles them, and a thread loads what it finds in Triton's cache. Meanwhile no fork may
    happen, as the child would have the loader's locks without the thread that holds them; nor may the process end,
    which would take Python away from under the thread.
    """

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._lock = threading.RLock()
        self._queue: deque[Variant] = deque()
        self._asked: set[tuple[Any, ...]] = set()
        self._thread: threading.Thread | None = None
        self._child: _Child | None = None
        self._logged = self._ended = False
        #: The results of compilations, by the identity of variants: kernels, or failures.
        self.done: dict[tuple[Any, ...], Any] = {}
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._in_child
            )

    def now(self, variant: Variant) -> Any:
        """The kernel, compiled by the caller if it has to be."""
        with self._lock:
            found = self.done.get(variant.identity())
            if found is None or isinstance(found, Failure):
                found = self.done[variant.identity()] = self._load(variant)
            return found

    def ahead(self, variants: Iterable[Variant]) -> None:
        """Compiles variants that no call wants yet."""
        for variant in variants:
            self._try(variant)

    def later(self, wanted: Iterable[Variant], more: Iterable[Variant] = ()) -> None:
        """Has variants compiled in the background: those that a call wants, then more.

        Raises:
            NotYetError: not all that are wanted are there.
        """
        wanted = list(wanted)
        for variant in (*wanted, *more):
            identity = variant.identity()
            if identity not in self.done and identity not in self._asked:
                self._asked.add(identity)
                self._queue.append(variant)
        if self._queue and not self._ended and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, name="fusednorm compiles", daemon=True)
            self._thread.start()
        if any(isinstance(self.done.get(variant.identity(), Failure("")), Failure) for variant in wanted):
            raise NotYetError

    def _work(self) -> None:
        while self._queue and not self._ended:
            variant = self._queue[0]
            try:
                self._try(variant, only_cached=True)
            except host.NotCachedError:
                self._try(variant, self._by_child(variant))
            self._queue.popleft()
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _by_child(self, variant: Variant) -> str | None:
        """The answer of :meth:`_Child.compile`."""
        try:
            self._child = self._child or _Child()
        except OSError:  # there is no Python to start, as in a program that has it inside
            return None
        return self._child.compile(variant)

    def _try(self, variant: Variant, reason: str | None = None, only_cached: bool = False) -> None:
        """Loads a variant, and compiles it if it is in no cache; not at all if there is a reason why not."""
        with self._lock:
            if self._ended or variant.identity() in self.done:
                return
            try:
                if reason:
                    raise BackendError(reason)
                self.done[variant.identity()] = self._load(variant, only_cached)
            except host.NotCachedError:
                raise
            except Exception as error:  # a compiler's may be anything
                failure = Failure(reason or f"{type(error).__name__}: {error}")
                self.done[variant.identity()] = failure
                if not self._logged:
                    _log.warning("fusednorm could not prewarm its Triton kernels: %s", failure.reason)
                self._logged = True

    def _end(self) -> None:
        self._ended = True
        if self._child is not None:
            self._child.process.kill()
        with self._lock:
            pass

    def _in_child(self) -> None:
        self._thread = self._child = None
        self._lock.release()
