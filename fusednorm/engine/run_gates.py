"""Runs gates, and their gradients: by a backend that has them in one call, else by the formula.

Here z and y may take turns in one tensor, which kernels read and write as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import fast_path as path
from fusednorm.calls.c_abi import steps_in_c
from fusednorm.calls.c_kinds import KINDS
from fusednorm.calls.call import Call, GateSteps, gate_steps, step_of_gate
from fusednorm.calls.checks import check_kept
from fusednorm.calls.memory import new_like
from fusednorm.engine import open_fast_path
from fusednorm.engine.choose import Chosen
from fusednorm.engine.run import backend_of, laid_out
from fusednorm.engine.run_norms import are_of_no_rows, launch, new_gradients
from fusednorm.reference import activations

#: The flags of calls: those of ``torch.ops.fusednorm.gate`` but the dtype of the result.
_OF_CALLS = ("activation", "between", *GateSteps._fields)

_alone = path.Entry("gate", "x z activation", constants={"order": path.ALONE}).open()
#: The gate and up, or both in one tensor; not where gradients are recorded.
and_mul = path.Entry("gate", "x z activation between", constants={"order": path.AND_MUL}).open()


def on_fast_path(
    y: Tensor | None,
    z: Tensor,
    activation: str,
    between: torch.dtype | None,
    out_dtype: torch.dtype | None,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    clamp: str = "before",
    round_steps: bool = False,
    *others: Any,
) -> Tensor | None:
    """The result, if the fast path takes the call; a public function has asked it unless gradients are recorded.

    ``others``: flags that C does not know.
    """
    if between is torch.float32 or y is None or (limit, alpha, up_offset, clamp, round_steps) != _NO_STEPS:
        return None
    if any(others):
        return None
    # By identity: a variable of a graph of torch.fx has a dtype too, which cannot be compared.
    if between is None and out_dtype is y.dtype:
        found: Any = _alone(y, z, activation)
    elif (between is None or between is z.dtype) and out_dtype is z.dtype:
        found = and_mul(z, y, activation, torch.float32 if between is None else None)
    else:
        return None
    return cast("Tensor | None", found)


_NO_STEPS = GateSteps()


def backend_for(z: Tensor, step: str, flags: Mapping[str, Any], interleaved: bool = False) -> Chosen | None:
    """The backend for such rows, if it has such gates, or their gradients; None: the formula serves them."""
    return backend_of(z, step_of_gate(step, flags["activation"], gate_steps(flags), interleaved))


def _in_turns(y: Tensor | None, z: Tensor) -> Tensor | None:
    """The tensor in which z and y take turns; None if they lie otherwise."""
    if y is None or z.stride(-1) != 2 or y.stride() != z.stride() or y.dtype != z.dtype or y.is_neg() or z.is_neg():
        return None
    if y.data_ptr() != z.data_ptr() + z.itemsize:
        return None
    *rows, size = z.shape
    end = z.storage_offset() + sum((n - 1) * step for n, step in zip(rows, z.stride(), strict=False)) + 2 * size
    if end * z.itemsize > z.untyped_storage().nbytes():  # y has a storage of its own
        return None
    return z.as_strided((*rows, 2 * size), (*z.stride()[:-1], 1))


def forward(y: Tensor | None, z: Tensor, flags: Mapping[str, Any], out: Tensor | None = None) -> Tensor:
    """Gated rows of checked operands, or without y the function of z, in new memory or in ``out``.

    ``flags``: those of ``torch.ops.fusednorm.gate``, of which ``out_dtype`` does not matter where ``out`` is given.
    """
    first, both = z if y is None else y, _in_turns(y, z)
    backend = backend_for(first, "gate", flags, both is not None)
    if backend is None and both is not None:
        backend, both = backend_for(first, "gate", flags), None
    if backend is None:
        found = activations.gated(y, z, **{name: flags[name] for name in (*_OF_CALLS, "out_dtype")})
        return found if out is None else out.copy_(found)
    read = {"y": y, "z": z} if both is None else {"both": both}
    result = new_like(z, flags["out_dtype"]) if out is None else out
    fresh, given = (("out",), ()) if out is None else ((), ("out",))
    laid = laid_out(read, {"out": result}, [*read], fresh, given)
    if laid is None:  # a kernel cannot write such rows
        return result.copy_(forward(y, z, flags))
    tensors, strides = laid.tensors, laid.strides
    if both is not None:
        _apart(tensors, strides, "both", "y", "z")
    of_call = {**{name: flags[name] for name in _OF_CALLS}, "interleaved": both is not None}
    rows = z.shape[:-1].numel()
    call = Call("gate", False, tensors, strides, of_call, z.shape[-1], rows, laid.inner)
    launch(backend, call, () if out is None else (out,))
    return result


def _apart(tensors: dict[str, Any], strides: dict[str, Any], both: str, y: str, z: str) -> None:
    """Puts y and z in the place of the tensor in which they take turns."""
    rows, lie = tensors.pop(both), strides.pop(both)
    tensors.update({y: rows[..., 1::2], z: rows[..., ::2]})
    strides.update({y: lie, z: lie})


def rows_and_gate(operands: Sequence[Any], interleaved: bool = False) -> Any:
    """y and z, of both or of one tensor that holds both: z in its first half, or in every second element."""
    if len(operands) == 2:
        return operands
    (both,) = operands
    return (both[..., 1::2], both[..., ::2]) if interleaved else both.chunk(2, -1)[::-1]


def backward(
    d: Tensor,
    operands: Sequence[Tensor | None],
    flags: Mapping[str, Any],
    needs: Sequence[bool],
    interleaved: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of y and z, or of one tensor that holds both, as far as they are needed.

    ``interleaved``: they take turns in one tensor, which a backend takes that knows it. Else the formula does.
    """
    found = new_gradients(operands, needs)
    if are_of_no_rows(d):
        return found
    if len(operands) == 1:  # torch would refuse the halves in words of its own
        check_kept((d,), operands)
    y, z = rows_and_gate(operands, interleaved)
    dy, dz = rows_and_gate(found, interleaved)  # their rows lie in one level
    if not interleaved and open_fast_path.gate_backward(
        d, y, z, dy, dz, flags["activation"], KINDS[flags["between"]], *steps_in_c(gate_steps(flags))
    ):
        return found
    check_kept((d,), operands)
    of_call = {name: flags[name] for name in _OF_CALLS}
    backend = backend_for(z if y is None else y, "gate_backward", flags, interleaved)
    if backend is None:
        by_formula = activations.gate_gradients(d, y, z, **of_call, needs=(dy is not None, dz is not None))
        for output, gradient in zip((dy, dz), by_formula, strict=True):
            if output is not None and gradient is not None:
                output.copy_(gradient)
        return found
    read: dict[str, Any] = {"d": d, "y": y, "z": z, "dy": dy, "dz": dz}
    if interleaved:
        read = {"d": d, "both": operands[0], "dboth": found[0]}
    laid = cast(Any, laid_out(read, {}, [*read]))  # gradients are new, so that they are not copied
    if interleaved:
        _apart(laid.tensors, laid.strides, "both", "y", "z")
        _apart(laid.tensors, laid.strides, "dboth", "dy", "dz")
    of_call["interleaved"] = interleaved
    launch(
        backend,
        Call("gate", True, laid.tensors, laid.strides, of_call, d.shape[-1], d.shape[:-1].numel(), laid.inner),
    )
    return found
