"""Backends of others are held to what :class:`fusednorm.registry.Backend` asks of them. Ours are held by the tests.

Each is looked at in its first forward and its first backward pass of a kind; a kind is what
:func:`fusednorm.registry.select` remembers a backend by. Later passes go to the backend itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fusednorm.registry import Backend

#: New outputs are filled with the bits of a signalling NaN, as integers of the dtype's size. Arithmetic and conversions
#: return quiet NaNs only, so an element that still has these bits was not written.
_UNWRITTEN = {
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7CA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}

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
    """A backend of others in the calls of one kind: its first passes are looked at, the later ones are its own."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name, self._backend = name, backend
        self._forward: Callable[..., None] | None = None
        self.backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]] = self._first_backward

    def forward_into(self, given: Sequence[Tensor]) -> Callable[..., None]:
        """The function for a forward pass to which the caller gave these outputs; only the others may be filled."""
        return self._forward or partial(self._first_forward, given)

    def _first_forward(self, given: Sequence[Tensor], *arguments: Any) -> None:
        outputs = zip(("out", "residual_out", "rstd"), arguments[3:6], strict=True)
        filled = {name: _filled(output) for name, output in outputs if _may_be_filled(output, given)}
        with raised_by(self._name, "forward"):
            found: object = self._backend.forward(*arguments)  # type: ignore[func-returns-value]
        if found is not None:
            raise TypeError(
                f"backend {self._name!r} returned {_described(found)} from forward; it must write out, residual_out "
                "and rstd, which it is given, and return None"
            )
        for name, (bits, unwritten) in filled.items():
            parts = (bits[i : i + _AT_ONCE] for i in range(0, bits.numel(), _AT_ONCE))
            missing = sum(int((part == unwritten).sum()) for part in parts)
            if missing:
                raise RuntimeError(
                    f"backend {self._name!r} did not write {missing} of the {bits.numel()} elements of {name} in "
                    "forward; it must write all of out, and of residual_out and rstd where they are not None"
                )
        self._forward = self._backend.forward

    def _first_backward(
        self,
        dy: Tensor,
        d_residual_out: Tensor | None,
        h: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        weight_offset: float,
        x_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        with raised_by(self._name, "backward"):
            found: object = self._backend.backward(
                dy, d_residual_out, h, rstd, weight, weight_offset, x_dtype, residual_dtype, needs
            )
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise TypeError(
                f"backend {self._name!r} returned {_described(found)} from backward; it must return three gradients, "
                "of x, the residual and the weight, with None for each that `needs` does not ask for"
            )
        dx, dresidual, dweight = found
        self._hold("x", dx, needs[0], h, x_dtype)
        self._hold("the residual", dresidual, needs[1], h, residual_dtype)
        self._hold("the weight", dweight, needs[2], weight, None if weight is None else weight.dtype)
        self.backward = self._backend.backward
        return dx, dresidual, dweight

    def _hold(self, name: str, found: object, need: bool, like: Tensor | None, dtype: torch.dtype | None) -> None:
        """Raises where a gradient is not what was asked for: of another tensor's shape and device, and of a dtype."""
        wanted = "None" if like is None or dtype is None or not need else _tensor(dtype, like.shape, like.device)
        returned = _described(found)
        if returned != wanted:
            raise TypeError(
                f"backend {self._name!r} returned {returned} for the gradient of {name}; it must return {wanted}"
            )


def _may_be_filled(output: Tensor | None, given: Sequence[Tensor]) -> bool:
    """Whether an output is new, has memory, and may be read afterwards, which cannot be while a graph is captured."""
    if output is None or output.is_meta or any(output is tensor for tensor in given):
        return False
    return not (output.is_cuda and torch.cuda.is_current_stream_capturing())


def _filled(output: Tensor) -> tuple[Tensor, int]:
    """Fills an output that no backend has written yet; returns its bits, [elements], and what each of them now is."""
    integers, unwritten = _UNWRITTEN[output.dtype]
    return output.view(integers).fill_(unwritten).flatten(), unwritten


def _tensor(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{str(dtype)[6:]} {list(shape)} on {device}"


def _described(found: object) -> str:
    """What a backend returned, in words."""
    if found is None:
        return "None"
    if isinstance(found, Tensor):
        return _tensor(found.dtype, found.shape, found.device)
    return f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
