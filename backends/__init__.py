"""The backends of fusednorm; calling this module lists them.

A backend is any object with the attributes of :class:`fusednorm.registry.Backend`; here each is a module.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusednorm.calls.process import BackendInfo

#: The backends of this version, the preferred ones first.
NAMES = ("cpu", "cuda", "triton", "triton_cpu", "reference")

#: The module in this folder that a backend is, where it is not of the backend's name.
MODULES = {"triton": "triton.gpu", "triton_cpu": "triton.cpu"}


class _Backends(ModuleType):
    """Lets ``fusednorm.backends`` be both this package and the public function that lists the backends."""

    #: The engine, which knows how, sets it.
    listed: "Callable[[], list[BackendInfo]]"

    def __call__(self) -> "list[BackendInfo]":
        return self.listed()


sys.modules[__name__].__class__ = _Backends
