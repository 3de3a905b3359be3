"""The quick way past the front end for plain calls, which C code takes; see ``cpu/quick.c``.

It needs torch's part of DLPack's C exchange API (torch 2.10 and newer). Without it every call goes the long way.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from fusednorm.registry import Quick

try:
    _quick: Any = import_module("fusednorm._quick")
    _lib: Any = import_module("fusednorm._cpu").lib
except ImportError:  # the cpu backend says why
    _quick = None


def _open(exchange_api: object) -> bool:
    return bool(
        _quick.open(
            exchange_api,
            torch.Tensor,
            torch.nn.Parameter,
            torch.is_grad_enabled,
            torch.get_num_threads,
            torch.empty_like,
            torch._C._increment_version,
        )
    )


_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

#: Whether there is a quick way.
OPEN = _quick is not None and _api is not None and _open(_api)


def way(devices: set[str]) -> Quick:
    """The quick way for tensors on devices of these types, of those for which it was opened."""
    return cast("Quick", _quick.way("cpu" in devices, "cuda" in devices))


def open_cpu(forward_contiguous: int) -> None:
    """Lets CPU tensors through, to the C function at this address."""
    _quick.open_cpu(forward_contiguous)


def open_cuda(launch_kernel: int) -> None:
    """Lets tensors on NVIDIA GPUs through, to the driver's ``cuLaunchKernelEx``; forgets the kernels held before."""
    _quick.open_cuda(launch_kernel)


def hold(
    device: int,
    dtypes: tuple[torch.dtype | None, ...],
    round_sum: bool,
    round_norm: bool,
    hidden_size: int,
    offset: bool,
    alignment: int,
    function: int,
    launch: tuple[int, int, int, int, bool],
) -> None:
    """Has calls of a kind launch a CUDA function from now on.

    ``dtypes``: of x, residual, weight and out; ``offset``: whether the weight has one; ``alignment``: bytes of which
    every row of every operand begins at a multiple; ``launch``: threads, rows and bytes of shared memory of a
    block, blocks of a cluster, and whether to begin before the kernel before has ended.
    """
    kinds: dict[torch.dtype | None, int] = {
        None: _lib.FN_NONE,
        torch.float32: _lib.FN_F32,
        torch.float16: _lib.FN_F16,
        torch.bfloat16: _lib.FN_BF16,
        torch.float64: _lib.FN_F64,
    }
    flags = round_sum * _lib.FN_ROUND_SUM + round_norm * _lib.FN_ROUND_NORM
    given = tuple(kinds[dtype] for dtype in dtypes)
    _quick.hold(device, given, flags, hidden_size, offset, alignment, function, *launch)
