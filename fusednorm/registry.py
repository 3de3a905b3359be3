"""Backends: their protocol, and how they are registered and requested (docs/writing_a_backend.md)."""

from fusednorm.calls.process import BackendError, BackendInfo
from fusednorm.engine.backend import Backend
from fusednorm.engine.choose import Explanation, register_backend, use_backend

__all__ = ["Backend", "BackendError", "BackendInfo", "Explanation", "register_backend", "use_backend"]
