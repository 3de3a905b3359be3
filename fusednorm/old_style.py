"""Backends whose ``forward`` and ``backward`` take operands one by one, as before calls were values.

They keep working for one minor version, with a warning; ``docs/stability.md`` says so.
"""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fusednorm.call import Backward, Forward
from fusednorm.first_calls import described
from fusednorm.layout import in_one_level

if TYPE_CHECKING:
    from fusednorm.registry import Backend


def adapted(name: str, backend: Backend) -> Backend:
    """The backend, or what makes one of it if its functions are of the old style."""
    if not any(_takes_operands(function) for function in (backend.forward, backend.backward)):
        return backend
    warnings.warn(
        f"backend {name!r} takes operands one by one; the next minor version passes one call: write "
        "forward(call) and backward(call), see docs/writing_a_backend.md",
        DeprecationWarning,
        stacklevel=4,
    )
    optional = ("FLUSHES_WITH_CALLER", "variants", "use_variant")
    found: Any = SimpleNamespace(
        DEVICES=backend.DEVICES,
        unavailable=backend.unavailable,
        unsuitable=backend.unsuitable,
        plan=backend.plan,
        forward=lambda call: _forward(backend, call),
        backward=lambda call: _backward(name, backend, call),
        **{attribute: getattr(backend, attribute) for attribute in optional if hasattr(backend, attribute)},
    )
    return found  # type: ignore[no-any-return]


def _takes_operands(function: Any) -> bool:
    """Whether a function takes more than one argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C that does not say
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters) > 1


def _forward(backend: Any, call: Forward) -> object:
    with in_one_level(call) as one:
        operation, strides = one.operation, [stride for _, stride in one.strides]
        return backend.forward(
            *(*one[:6], one.rows, operation.hidden_size, *strides),
            *(one.eps, one.weight_offset, operation.round_sum, operation.round_norm),
        )


def _backward(name: str, backend: Any, call: Backward) -> None:
    outputs = call.outputs()
    needs = tuple(output is not None for output in outputs)
    operands = (call.dy, call.d_residual_out, call.h, call.rstd, call.weight, call.weight_offset)
    found = backend.backward(*operands, call.operation.x, call.operation.residual, needs)
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise TypeError(
            f"backend {name!r} returned {described(found)} from backward; it must return three gradients, "
            "of x, the residual and the weight, with None for each that `needs` does not ask for"
        )
    for what, gradient, output in zip(("x", "the residual", "the weight"), found, outputs, strict=True):
        if described(gradient) != described(output):
            raise TypeError(
                f"backend {name!r} returned {described(gradient)} for the gradient of {what}; it must return "
                f"{described(output)}"
            )
        if output is not None:
            output.copy_(gradient)
