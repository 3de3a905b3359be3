"""Operations that a backend refuses, served by other operations that it takes: the same bits, in several kernels.

There are three: a norm before the addition; a bias, rows of heads or a scaled x around the norm; and a sum that is
stored in another dtype than the residual's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.calls.call import BackwardCall, Forward, ForwardCall, Quantize, RMSNorm
from fusednorm.calls.memory import new
from fusednorm.calls.process import NotYetError
from fusednorm.engine.checked_backend import FirstCalls
from fusednorm.reference import norm as reference

if TYPE_CHECKING:
    from fusednorm.engine.backend import Backend


def _widens(operation: RMSNorm) -> bool:
    """Whether the residual can be converted to the dtype of residual_out without rounding."""
    assert operation.residual is not None
    assert operation.residual_out is not None
    return torch.promote_types(operation.residual, operation.residual_out) == operation.residual_out


def _first_norm_and_rest(operation: RMSNorm) -> tuple[RMSNorm, RMSNorm | None]:
    """A norm before the addition, and the rest; None if that is the addition alone, which is torch's."""
    assert operation.first is not None
    weight, between = operation.first
    norm = operation._replace(residual=None, weight=weight, out=between, round_sum=True, residual_out=None, first=None)
    return norm, None if operation.out is None else operation._replace(x=between, first=None)


def _is_affine(operation: RMSNorm) -> bool:
    """Whether a bias or rows of heads follow the norm."""
    return "affine" in operation.features


def _within(operation: RMSNorm) -> RMSNorm:
    """The norm that a bias, rows of heads or a scaled x are around."""
    alone = operation._replace(around=None)
    if not _is_affine(operation):
        return alone
    return alone._replace(weight=None, out=operation.accumulator, round_norm=False)


def _taken(operation: RMSNorm, takes: Callable[[RMSNorm], bool]) -> tuple[RMSNorm, ...]:
    """A part of an operation, or the parts that serve it."""
    return (operation,) if takes(operation) else Composition.parts(operation, takes) or (operation,)


class Composition:
    """A backend in the calls of one operation, which it serves by :meth:`parts`."""

    def __init__(self, backend: Backend | FirstCalls | Meanwhile, parts: tuple[RMSNorm, ...]) -> None:
        self._backend, self._parts = backend, parts

    @staticmethod
    def parts(operation: RMSNorm, takes: Callable[[RMSNorm], bool]) -> tuple[RMSNorm, ...]:
        """The operations that serve this one; none if it cannot be served by others.

        ``takes`` says whether the backend takes an operation.
        """
        if operation.first is not None:
            norm, rest = _first_norm_and_rest(operation)
            return (norm,) if rest is None else (norm, *_taken(rest, takes))
        if operation.around is not None:
            return _taken(_within(operation), takes)
        if operation.residual_out == operation.residual:
            return ()
        stored = operation.residual_out
        if _widens(operation):
            return (operation._replace(residual=stored),)
        exact = operation._replace(residual=operation.accumulator, residual_out=operation.accumulator)
        return (exact, operation._replace(residual=stored)) if operation.round_sum else (exact,)

    @staticmethod
    def in_words(operation: RMSNorm, parts: tuple[RMSNorm, ...]) -> str:
        """How its :meth:`parts` serve an operation."""
        if operation.first is not None:
            _, rest = _first_norm_and_rest(operation)
            then = "torch's addition" if rest is None else "the addition with its norm"
            if rest is not None and parts[1:] != (rest,):
                return f"the first norm apart, and then {Composition.in_words(rest, parts[1:])}"
            return f"in two kernels, the first norm and then {then}"
        if operation.around is not None:
            norm, rows = _within(operation), "torch's operations multiply by the weight and add the bias"
            done = [*["torch scales x"] * operation.around.scaled, *[rows] * _is_affine(operation)]
            if parts != (norm,):
                done.append(f"the norm runs {Composition.in_words(norm, parts)}")
            return ", and ".join(done)
        stored = str(operation.residual_out)[6:]
        if _widens(operation):
            return f"in two kernels, the first of which converts the residual to {stored}"
        number = "four" if operation.round_sum else "three"
        return f"in {number} kernels, of which one rounds the sum to {stored}"

    def forward(self, call: ForwardCall) -> None:
        """Writes the outputs of a norm."""
        assert isinstance(call, Forward)
        if call.operation.first is not None:
            self._forward_apart(call)
            return
        if call.operation.around is not None:
            self._forward_within(call)
            return
        assert call.residual is not None
        assert call.residual_out is not None
        operation, run = call.operation, self._backend.forward
        packed = (call.inner * operation.hidden_size, operation.hidden_size)
        x_strides, _, out_strides, total_strides = call.strides
        part, *later = self._parts
        if _widens(operation):
            residual = call.residual.to(operation.residual_out, memory_format=torch.contiguous_format)
            strides = (x_strides, packed, out_strides, total_strides)
            run(call._replace(operation=part, residual=residual, strides=strides))
            return
        # The exact sum, in place of the residual, and the row that it gives if it is not to be rounded.
        total = call.residual.to(operation.accumulator, copy=True, memory_format=torch.contiguous_format)
        strides = (x_strides, packed, out_strides, packed)
        run(call._replace(operation=part, residual=total, residual_out=total, strides=strides))
        call.residual_out.copy_(reference.rounded(total, call.residual_out.dtype))
        for part in later:
            # -0 + s is s for every s, a zero of either sign too. One row of -0 stands for all.
            nothing = torch.full((operation.hidden_size,), -0.0, dtype=operation.x, device=operation.device)
            strides = ((0, 0), total_strides, out_strides, total_strides)
            x = nothing.expand(call.x.shape)
            run(call._replace(operation=part, x=x, residual=call.residual_out, strides=strides))

    def _forward_apart(self, call: Forward) -> None:
        """Writes the outputs of an addition after a norm, whose rows it keeps."""
        norm, rest = _first_norm_and_rest(call.operation)
        assert call.residual is not None
        assert call.residual_out is not None
        rows = new(call.x.shape, norm.out, norm.device)
        packed = (call.inner * norm.hidden_size, norm.hidden_size)
        first = Forward(
            *(call.x, None, call.first_weight, rows, None, None, norm, call.rows, call.inner),
            (call.strides[0], (0, 0), packed, (0, 0)),
            call.first_eps,
            call.weight_offset,
        )
        self._backend.forward(first)
        if rest is None:
            call.residual_out.copy_(reference.added(rows, call.residual, call.residual_out.dtype))
            return
        self._serving(rest, self._parts[1:]).forward(
            call._replace(x=rows, operation=rest, strides=(packed, *call.strides[1:]), first_weight=None, first_eps=0.0)
        )

    def _forward_within(self, call: Forward) -> None:
        """Writes the outputs of a norm between torch's operations."""
        operation, norm = call.operation, _within(call.operation)
        serving = self._serving(norm, self._parts)
        packed = (call.inner * norm.hidden_size, norm.hidden_size)
        inner = call._replace(operation=norm, bias=None, x_scale=1.0)
        if operation.around is not None and operation.around.scaled:
            x = reference.scaled(call.x, call.x_scale).contiguous()
            inner = inner._replace(x=x, strides=(packed, *call.strides[1:]))
        if not _is_affine(operation):
            serving.forward(inner)
            return
        rows = new(call.x.shape, norm.out, norm.device)
        strides = (*inner.strides[:2], packed, call.strides[3])
        serving.forward(inner._replace(weight=None, out=rows, weight_offset=0.0, strides=strides))
        assert call.out is not None
        assert operation.out is not None
        rounded_to = operation.x if operation.round_norm else None
        y = reference.affine(rows, call.weight, call.bias, call.weight_offset, rounded_to, operation.out)
        call.out.copy_(y)

    def _serving(self, operation: RMSNorm, parts: tuple[RMSNorm, ...]) -> Any:
        """The backend for an operation that is a part of this one, or has parts of its own."""
        return self._backend if parts == (operation,) else Composition(self._backend, parts)

    def backward(self, call: BackwardCall) -> None:
        """The gradients take operands of any dtypes."""
        self._backend.backward(call)


class Meanwhile:
    """A backend that may still be compiling a kernel, and another one that takes the call then: the same bits."""

    def __init__(self, backend: Backend, other: Backend, takes: Callable[[RMSNorm], bool]) -> None:
        self._backend, self._other, self._takes = backend, other, takes
        self.fast_path = getattr(backend, "fast_path", None)

    def forward(self, call: ForwardCall) -> None:
        """Writes the outputs."""
        try:
            self._backend.forward(call)
        except NotYetError:
            self._by_the_other(call)

    def backward(self, call: BackwardCall) -> None:
        """Writes the gradients."""
        try:
            self._backend.backward(call)
        except NotYetError:
            self._other.backward(call)

    def _by_the_other(self, call: ForwardCall) -> None:
        """Has the other backend take a call, in several if it has to."""
        if isinstance(call, Quantize) and call.norm is not None and not self._takes(call.norm.operation):
            norm = call.norm
            if norm.out is None:
                rows = new(norm.x.shape, norm.operation.out, norm.x.device)
                packed = (norm.inner * call.hidden_size, call.hidden_size)
                norm = norm._replace(out=rows, strides=(*norm.strides[:2], packed, norm.strides[3]))
            self._by_the_other(norm)
            call = call._replace(y=norm.out, y_strides=norm.strides[2], norm=None)
        if isinstance(call, Forward) and not self._takes(call.operation):
            Composition(self._other, Composition.parts(call.operation, self._takes)).forward(call)
        else:
            self._other.forward(call)
