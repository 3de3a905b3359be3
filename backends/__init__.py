"""The backends of fusednorm, one file each; calling this module lists them.

A backend is any object with the attributes of :class:`fusednorm.registry.Backend`; here each is a module.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusednorm.registry import BackendInfo

#: The backends of this version, each the module of that name in this folder, the preferred ones first.
NAMES = ("cpu", "reference")

#: Names kept for backends of fusednorm that this version does not contain, and what each will be.
RESERVED = {
    "cuda": "CUDA C++ kernels for NVIDIA GPUs",
    "triton": "Triton kernels for GPUs",
    "triton_cpu": "Triton kernels for CPUs",
}


class _Backends(ModuleType):
    """Lets ``fusednorm.backends`` be both this package and the public function that lists the backends."""

    def __call__(self) -> "list[BackendInfo]":
        from fusednorm.registry import backends

        return backends()


sys.modules[__name__].__class__ = _Backends
