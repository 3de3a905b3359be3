"""The fast path past the front end, in C, for plain calls that no mode or transform must see: ``cpu/python``.

It needs torch's part of DLPack's C exchange API, and what :mod:`fusednorm.calls.must_be_seen`
asks. Without them it stays closed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch

from fusednorm.calls import memory, must_be_seen, self_check
from fusednorm.calls.c_enums import GateOrder
from fusednorm.calls.call import FLOATS, Flags

try:
    # As graphs of torch's compiler call it; it is not public.
    from torch._C._dynamo.guards import _empty_strided_cpu as _empty_on_cpu  # type: ignore[attr-defined]
except ImportError:
    _empty_on_cpu = None
try:
    _fast_path: Any = import_module("fusednorm._fast_path")
except ImportError:  # the cpu backend says why
    _fast_path = None


#: The C++ functions of torch that tell whether a tensor's negative bit is set, whether it was made in inference mode,
#: and the bytes of its storage and the elements before its first one there.
_IN_CPP = (
    "_ZN2at6native6is_negERKNS_6TensorE",
    "_ZN2at6native12is_inferenceERKNS_6TensorE",
    "aoti_torch_get_storage_size",
    "aoti_torch_get_storage_offset",
)


#: The dtypes of a quantizer's numbers, in the order that C knows them, of its scales and of its zero points.
_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int32)


def _place_of_tensor() -> int:
    """Bytes before the pointer to torch's tensor in a Python object; 0 where C++ functions cannot be asked."""
    tensor = torch.empty(0)
    places = range(object.__basicsize__, torch.Tensor.__basicsize__ - 7, 8)
    pointers = (ctypes.c_void_p.from_address(id(tensor) + place).value for place in places)
    found = [place for place, pointer in zip(places, pointers, strict=True) if pointer == tensor._cdata]
    return found[0] if found and all(must_be_seen.in_cpp(*_IN_CPP)) else 0


def _in_memory_as_is(tensor: torch.Tensor) -> bool:
    """Whether memory holds all elements as they are, where C++ cannot be asked. No listener must see this."""
    heard = any(ask() for ask in must_be_seen.QUESTIONS) or must_be_seen.override()
    return not heard and memory.all_in_memory(tensor) and not tensor.is_neg()


def _open(exchange_api: object) -> bool:
    return bool(
        _fast_path.open(
            exchange_api,
            torch.Tensor,
            torch.nn.Parameter,
            torch.is_grad_enabled,
            torch.get_num_threads,
            torch.empty_like,
            torch.Tensor.new_empty,
            _empty_on_cpu,
            torch._C._increment_version,
            torch.is_inference_mode_enabled,
            must_be_seen.QUESTIONS,
            tuple((vars(module), name, value) for module, name, value in must_be_seen.VARIABLES),
            must_be_seen.FUNCTION_MODES,
            must_be_seen.in_cpp(*must_be_seen.IN_CPP),
            (_place_of_tensor(), must_be_seen.in_cpp(*_IN_CPP), _in_memory_as_is, torch.Tensor.is_inference),
            tuple({"dtype": dtype} for dtype in _DTYPES),
            {dtype: {"dtype": dtype} for dtype in FLOATS},
        )
    )


_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

#: A gate's order without a norm: x times it; where x is the gate, or both; and its function alone.
ALONE, AND_MUL, FUNCTION = GateOrder.ALONE.value, GateOrder.AND_MUL.value, GateOrder.FUNCTION.value

#: Whether its extension can be imported.
COMPILED = _fast_path is not None

#: Whether there is a fast path.
OPEN = COMPILED and _api is not None and not must_be_seen.MISSING and _open(_api)


def why_closed() -> str:
    """Why there is no fast path, so that each call takes 8 to 15 us more; empty if there is one."""
    if OPEN:
        return ""
    if not COMPILED:
        return "its C extension was not built"
    if _api is None:
        return f"torch {torch.__version__} is older than 2.10, which fusednorm needs"
    lacked = ", ".join(must_be_seen.MISSING) or "a function in C++"
    return f"torch {torch.__version__} lacks {lacked}, which fusednorm asks"


def _refuse(*_: object) -> bool:
    return False


#: Writes the gradients of a pass, and returns whether it did. Its arguments are CPU or CUDA, dy, the gradient of
#: residual_out, h, rstd, the weight, dx, dresidual, the blocks' shares of the weight's gradient (on a CPU the gradient
#: of a bias), dweight, the rows of a block, the weight's offset, and whether the rows lost
#: their mean.
backward: Callable[..., bool] = _fast_path.backward if OPEN else _refuse

#: The same for a gate. Its arguments are CPU or CUDA, d, y, z, where the gradients of y and z go, the name of the
#: function, the number that C has for the dtype between, and what ``steps_in_c`` returns.
gate_backward: Callable[..., bool] = _fast_path.gate_backward if OPEN else _refuse

#: The same for a norm with a gate. Its arguments are d, x, z, rstd, the weight, where the gradients of x, z and the
#: weight go, the name of the function, whether the norm is before the gate, ``between``, whether normalised rows are
#: rounded before they meet the weight, and the weight's offset.
norm_gated_backward: Callable[..., bool] = _fast_path.norm_gated_backward if OPEN else _refuse

#: Whether an operator with these arguments may run past torch's dispatcher: its tensors are plain and in memory, and
#: neither a listener nor autograd must see it.
is_direct: Callable[..., bool] = _fast_path.is_direct if OPEN else _refuse

#: The dictionaries in which a module has hooks; those of all modules have "_global" before.
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")


def _open_modules() -> bool:
    of_all = tuple(vars(torch.nn.modules.module).get(f"_global{name}") for name in _HOOKS)
    autocast = getattr(torch._C, "_is_any_autocast_enabled", None)
    known = autocast is not None and all(isinstance(hooks, dict) for hooks in of_all)
    return known and bool(_fast_path.open_modules(of_all, _HOOKS, autocast))


#: The form of a module's norm, its weight and its bias, as ``transformers/norms.py`` tells; None: Python must look. Its
#: arguments are the module's attributes, the values of those that its code read, the forms by the dtypes of x, weight
#: and bias, x, and maybe a tensor beside x, which must be of x's dtype; then the module must call no hooks.
taken_in_c: Callable[..., Any] = _fast_path.taken if OPEN and _open_modules() else lambda *_: None

#: Types of devices, as DLPack numbers them.
CPU, CUDA = 1, 2

#: By the request: the types of devices whose tensors its fast path takes, as bits.
devices_of: dict[str, int] = {}

#: The bits of devices; ``triton_cpu`` is the CPU where Triton's kernels are to run.
DEVICES = {"triton_cpu": 1, "cpu": 1 << CPU, "cuda": 1 << CUDA}

#: The devices for which it stays closed: a kernel there has returned other bits than the reference.
CLOSED: set[str] = set()

#: Arguments of C for which some functions have none.
_CONSTANTS: dict[str, Any] = {
    "ask": True,  # whether a listener may have to see the call
    "eps": 0.0,
    "weight_offset": 0.0,
    "x_scale": 1.0,
    "round_sum": True,
    "next_norm": True,
    "alpha": 1.0,
    "up_offset": 0.0,
    "clamp": "before",
} | dict.fromkeys(("round_norm", "center", "normalises", "norm", "interleaved", "round_products", "round_steps"), False)


#: Of public functions, by name: an operator of the same name, but without outputs, has the same.
ENTRIES: dict[str, Entry] = {}


class Entry(NamedTuple):
    """How a function's calls go to the fast path."""

    #: ``cpu/python/fast_path_forward.c`` has the kinds of calls, and the names of their arguments.
    kind: str
    #: Those names in the order of the function's arguments, with blanks between. What has another name must be its
    #: constant, or None.
    names: str
    #: The only result that the function returns; -1: all of them, in a tuple.
    returned: int = -1
    #: Other arguments of the kind, which are else None.
    constants: Mapping[str, Any] = {}

    def open(
        self,
        request: str | None = None,
        arguments: Sequence[str] = (),
        recorded: Callable[..., Any] | None = None,
        otherwise: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        """A function that makes such a call, unchecked; it returns None if it did nothing, and Python must make it.

        Args:
            request: whose devices are taken; None: of the request in force.
            arguments: their names, where some may be passed by name.
            recorded: what makes the call where only autograd must see it; it too may return None.
            otherwise: what makes the call if the fast path does nothing.
        """
        if not OPEN:
            return otherwise or nothing
        names, taken = self.names.split(), _fast_path.kinds[self.kind].split()
        places = {name: place for place, name in enumerate(taken)}  # a later one of the same name is meant
        constants = {**Flags._field_defaults, **_CONSTANTS, **self.constants}
        found = _fast_path.entry(
            self.kind,
            tuple(arguments or names),
            tuple(places.get(name, -1) for name in names),
            tuple(constants.get(name) for name in names),
            tuple(constants.get(name) for name in taken),
            self.returned,
            request,
            recorded,
            otherwise,
        )
        return cast("Callable[..., Any]", found)


def nothing(*_: object, **__: object) -> None:
    """An entry where there is no fast path."""


def follow(request: Callable[[], str]) -> None:
    """Has calls take the devices of the request that this function tells."""
    if OPEN:
        _fast_path.follow(request, devices_of)


def close(device: str | None) -> None:
    """Closes it for tensors on such a device, for good: each call is Python's to make."""
    if device is not None:
        CLOSED.add(device)
        for requested in devices_of:
            devices_of[requested] &= ~DEVICES[device]


def open_cpu() -> str | None:
    """Lets CPU tensors through to the C library; returns their type of device, None if there is no fast path.

    Where the library must prove itself, it refuses calls of kinds that it has not been seen to make right.
    """
    address = _address("fn_run_if_checked" if self_check.wanted("cpu") else "fn_run")
    if address is None:
        return None
    _fast_path.open_cpu(address)
    return "cpu"


def open_triton_cpu(longest: int) -> str | None:
    """Lets CPU tensors through to Triton's kernels; returns their name in :data:`DEVICES`, or None.

    ``longest``: the longest rows that the kernels take which :func:`hold_triton` is given.
    """
    address = _address("fn_run_triton")
    if address is None:
        return None
    _fast_path.open_triton(address, longest)
    return "triton_cpu"


def _address(function: str) -> int | None:
    """The address of a function of the C library; None if there is no fast path or no library."""
    if not OPEN:
        return None
    try:
        library = import_module("fusednorm._cpu")  # now: a call on a GPU needs none of it
    except ImportError:  # the cpu backend says why
        return None
    return int(library.ffi.cast("uintptr_t", library.ffi.addressof(library.lib, function)))


def hold_triton(call: bytes, kernel: int) -> None:
    """Has CPU calls of a packed call's kind run a kernel of Triton's, at this address, from now on."""
    _fast_path.hold_triton(call, kernel)


def open_cuda(launch_kernel: int, current_device: int, push_context: int, pop_context: int) -> None:
    """Has C launch CUDA kernels, and forgets the kernels held before.

    Takes the addresses of the driver's ``cuLaunchKernelEx``, ``cuCtxGetDevice``, ``cuCtxPushCurrent`` and
    ``cuCtxPopCurrent``.
    """
    _fast_path.open_cuda(launch_kernel, current_device, push_context, pop_context)


def hold_cuda(call: bytes, context: int, kernels: tuple[tuple[int, int, int, int, int, bool, int], ...]) -> None:
    """Has calls of a packed call's kind launch CUDA functions from now on.

    ``context``: the address of the device's primary context, in which kernels are launched where another device is
    the current one. ``kernels``: the function, threads of a block, rows or columns of a program, bytes of shared memory
    of a block, blocks of a cluster, whether to begin before the kernel before has ended, and its ``Share``.
    """
    _fast_path.hold_cuda(call, context, kernels)


def launch_cuda(call: bytes, stream: int) -> int:
    """Launches the kernels that are held for a packed call; returns 0, NOT_HELD, or the driver's status."""
    return cast(int, _fast_path.launch_cuda(call, stream))


#: :func:`launch_cuda` returns it where no kernels are held for such a call.
NOT_HELD = -1
