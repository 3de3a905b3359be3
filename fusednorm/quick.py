"""The fast path past the front end for plain calls that nobody listens to, in C; see ``cpu/quick.c``.

It needs torch's part of DLPack's C exchange API (torch 2.10 and newer), and what :mod:`fusednorm.listeners` asks.
Without them it stays closed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch

from fusednorm import listeners

if TYPE_CHECKING:
    from fusednorm.registry import Quick

try:
    _quick: Any = import_module("fusednorm._quick")
    _lib: Any = import_module("fusednorm._cpu").lib
    _ffi: Any = import_module("fusednorm._cpu").ffi
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
            listeners.QUESTIONS,
            tuple((vars(module), name, value) for module, name, value in listeners.VARIABLES),
            listeners.FUNCTION_MODES,
            listeners.in_cpp(),
        )
    )


_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

#: Whether there is a fast path.
OPEN = _quick is not None and _api is not None and not listeners.MISSING and _open(_api)


def _refuse(*_: object) -> bool:
    return False


#: Writes the gradients of a pass, if it is a usual one; else returns False. Its arguments are CPU or CUDA, dy, the
#: gradient of residual_out, h, rstd, the weight, dx, dresidual, the blocks' shares of the weight's gradient, dweight,
#: the rows of a block, and the weight's offset.
backward: Callable[..., bool] = _quick.backward if OPEN else _refuse

#: Types of devices, as DLPack numbers them.
CPU, CUDA = 1, 2

#: Options of a kind of call that are held, as in ``cpu/quick_cuda.c``.
ROUND_SUM, ROUND_NORM, OFFSET, WIDE, ROOTS, BACKWARD = 1, 2, 4, 8, 16, 32

#: What a program of a kernel takes, likewise; see :func:`fusednorm.backends.gpu_host.programs`.
OF_ROWS, OF_SUMS, OF_COLUMNS_OF_BLOCKS, OF_BLOCKS = range(4)


def way(devices: set[str]) -> Quick:
    """The fast path for tensors on devices of these types, of those for which it was opened.

    ``triton_cpu`` counts as a type: the CPU, where Triton's kernels are to run.
    """
    return cast("Quick", _quick.way("cpu" in devices, "cuda" in devices, "triton_cpu" in devices))


def open_cpu(forward: int, backward: int) -> None:
    """Lets CPU tensors through, to the C functions ``fn_forward`` and ``fn_backward`` at these addresses."""
    _quick.open_cpu(forward, backward)


def open_programs(longest: int) -> str | None:
    """Lets CPU tensors through to Triton's kernels; returns what :func:`way` calls them, None if there is no fast path.

    ``longest``: the longest rows that the kernels take which :func:`hold_program` is given.
    """
    if not OPEN:
        return None
    _quick.open_programs(int(_ffi.cast("uintptr_t", _ffi.addressof(_lib, "fn_run_forward"))), longest)
    return "triton_cpu"


def hold_program(dtypes: tuple[torch.dtype | None, ...], options: int, kernel: int) -> None:
    """Has CPU calls of a kind run a kernel of Triton's, at this address, from now on.

    ``dtypes``: of x, residual, weight and out.
    """
    _quick.hold_program(tuple(map(_kind, dtypes)), options, kernel)


def open_cuda(launch_kernel: int, current_device: int, push_context: int, pop_context: int) -> None:
    """Lets tensors on NVIDIA GPUs through, and forgets the kernels held before.

    Takes the addresses of the driver's ``cuLaunchKernelEx``, ``cuCtxGetDevice``, ``cuCtxPushCurrent`` and
    ``cuCtxPopCurrent``.
    """
    _quick.open_cuda(launch_kernel, current_device, push_context, pop_context)


def hold(
    device: int,
    context: int,
    dtypes: tuple[torch.dtype | None, ...],
    options: int,
    hidden_size: int,
    alignment: int,
    kernels: tuple[tuple[int, int, int, int, int, bool, int], ...],
) -> None:
    """Has calls of a kind launch CUDA functions from now on.

    ``context``: the address of the device's primary context, in which kernels are launched where another device is
    the current one. ``dtypes``: of x, residual, weight and out; of a backward pass of dy, the gradient of residual_out,
    h, weight, dx, dresidual and dweight. ``alignment``: bytes of which every row of every operand begins at a multiple.
    ``kernels``: the function, threads of a block, rows or columns of a program, bytes of shared memory of a block,
    blocks of a cluster, whether to begin before the kernel before has ended, and what a program takes.
    """
    _quick.hold(device, context, tuple(map(_kind, dtypes)), options, hidden_size, alignment, kernels)


def _kind(dtype: torch.dtype | None) -> int:
    """The number that C has for a dtype."""
    kinds: dict[torch.dtype | None, int] = {
        None: _lib.FN_NONE,
        torch.float32: _lib.FN_F32,
        torch.float16: _lib.FN_F16,
        torch.bfloat16: _lib.FN_BF16,
        torch.float64: _lib.FN_F64,
    }
    return kinds[dtype]
