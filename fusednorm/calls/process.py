"""Shared by backends and the engine: an error, a line of their list, whether the process was forked or waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class BackendError(RuntimeError):
    """No backend can take the call, or the requested backend does not exist."""


BackendError.__module__ = "fusednorm"  # where users find it


class NotYetError(Exception):
    """A kernel is still being compiled, and nothing was written: another backend may take the call."""


@dataclass(frozen=True)
class BackendInfo:
    """One line of :func:`fusednorm.backends`."""

    #: Its name in ``FUSEDNORM_BACKEND`` and for :class:`fusednorm.use_backend`.
    name: str
    #: Whether this machine can use it.
    available: bool
    #: Why not; empty if it can.
    reasons: list[str]
    #: The device types it runs on, or ``("any",)``.
    devices: tuple[str, ...]

    def __str__(self) -> str:
        state = f"on {', '.join(self.devices)}" if self.available else "no: " + "; ".join(self.reasons)
        return f"{self.name}: {state}"


#: Whether this process was forked after it had imported fusednorm. It then has none of its parent's threads.
forked = False


def _after_fork() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)

_waiting: ContextVar[bool] = ContextVar("fusednorm.waiting_for_kernels", default=False)

#: Whether a backend must not have another one take a call while it compiles in the background.
waiting = _waiting.get


@contextmanager
def waiting_for_kernels() -> Iterator[None]:
    """Within the block, in this thread or task, a call waits until the backend that it goes to has compiled its kernel.

    Comparisons, measurements and ``prewarm`` use it.
    """
    token = _waiting.set(True)
    try:
        yield
    finally:
        _waiting.reset(token)
