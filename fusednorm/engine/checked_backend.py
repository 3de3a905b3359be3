"""Backends of others are held to what :class:`fusednorm.registry.Backend` asks of them. Ours are held by the tests.

The first forward and the first backward pass of each operation are checked. Later ones go to the backend itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from fusednorm.calls.call import AnyCall, BackwardCall, Call, Forward, ForwardCall

if TYPE_CHECKING:
    from fusednorm.engine.backend import Backend

#: New outputs are filled with the bits of a signalling NaN, as integers of the dtype's size. Arithmetic and conversions
#: return quiet NaNs only, so an element that still has these bits was not written.
_UNWRITTEN = {
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7CA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}


def _gradients_of(call: BackwardCall) -> Sequence[str]:
    """The names of the outputs of a backward pass; ``dy`` is an input of that of a norm."""
    if isinstance(call, Call):
        return [name for name in call.tensors if name[:1] == "d" and name[1:] in call.tensors]
    return "dx", "dresidual", "dweight", "dbias"


#: So many elements are compared at once, because a comparison takes memory too.
_AT_ONCE = 2**24


@contextmanager
def raised_by(name: str, function: str) -> Iterator[None]:
    """Adds the names of a backend and of its function to what that function raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"raised in {function} of the backend {name!r}; fusednorm.registry.Backend says what it is given"
        )
        raise


class FirstCalls:
    """A backend of others in the calls of one operation: its first passes are checked."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name, self._backend = name, backend
        self._forward: Callable[[Forward], None] | None = None
        self.backward: Callable[[BackwardCall], None] = self._first_backward

    def forward_into(self, given: Sequence[Tensor]) -> Callable[[Forward], None]:
        """The function for a forward pass to which the caller gave these outputs; only the others may be filled."""
        return self._forward or partial(self._first_forward, given)

    def forward(self, call: ForwardCall) -> None:
        """A forward pass all of whose outputs the caller gave; or a call with another step, which is not checked."""
        if isinstance(call, Forward):
            self.forward_into([t for t in (call.out, call.residual_out, call.rstd) if t is not None])(call)
        else:
            self._run("forward", call, ())

    def _first_forward(self, given: Sequence[Tensor], call: Forward) -> None:
        self._run("forward", call, ("out", "residual_out", "rstd"), given)
        self._forward = self._backend.forward

    def _first_backward(self, call: BackwardCall) -> None:
        self._run("backward", call, _gradients_of(call))
        self.backward = self._backend.backward

    def _run(self, function: str, call: AnyCall, outputs: Sequence[str], given: Sequence[Tensor] = ()) -> None:
        """Runs a pass, and raises where it returned something, or left elements of a new output unwritten."""
        tensors = {name: getattr(call, name, None) for name in outputs}
        filled = {name: _filled(output) for name, output in tensors.items() if _may_be_filled(output, given)}
        with raised_by(self._name, function):
            found: object = getattr(self._backend, function)(call)
        if found is not None:
            raise TypeError(
                f"backend {self._name!r} returned {described(found)} from {function}; it must write the outputs that "
                "the call has, and return None"
            )
        for name, (bits, unwritten) in filled.items():
            bits = bits.flatten()  # now: of rows that lie apart it is a copy
            parts = (bits[i : i + _AT_ONCE] for i in range(0, bits.numel(), _AT_ONCE))
            missing = sum(int((part == unwritten).sum()) for part in parts)
            if missing:
                raise RuntimeError(
                    f"backend {self._name!r} did not write {missing} of the {bits.numel()} elements of {name} in "
                    f"{function}; it must write every output that is not None"
                )


def _may_be_filled(output: Tensor | None, given: Sequence[Tensor]) -> TypeGuard[Tensor]:
    """Whether an output is new, has memory, and may be read afterwards, which cannot be while a graph is captured."""
    if output is None or output.is_meta or any(output is tensor for tensor in given):
        return False
    return not (output.is_cuda and torch.cuda.is_current_stream_capturing())


def _filled(output: Tensor) -> tuple[Tensor, int]:
    """Fills an output that no backend has written yet; returns its bits, and the number that each of them now is."""
    integers, unwritten = _UNWRITTEN[output.dtype]
    return output.view(integers).fill_(unwritten), unwritten


def described(found: object) -> str:
    """A value that a backend returned, in words."""
    if found is None:
        return "None"
    if isinstance(found, Tensor):
        return f"{str(found.dtype)[6:]} {list(found.shape)} on {found.device}"
    return f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
