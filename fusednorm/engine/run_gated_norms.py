"""Runs a norm and a gate, one after the other, and their gradients; rows may be normalised in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import Call, RMSNorm, accumulator, step_of_gate
from fusednorm.calls.gated_norm_calls import operation_of_norm
from fusednorm.calls.memory import in_levels, new, new_like, packed
from fusednorm.declare.plan import Flags, Operands, Plan
from fusednorm.engine import open_fast_path, run_norms
from fusednorm.engine.choose import Chosen

_READ_BY_C = "eps norm_before_gate activation round_norm between weight_offset"
_on_fast_path = path.Entry("gate", f"x z weight rstd out {_READ_BY_C}", constants={"ask": False}).open()
_READ = _READ_BY_C.split()
_OF_GRADIENTS = "activation", "norm_before_gate", "between", "round_norm", "weight_offset"


def in_groups(flags: Flags, x: Any, *others: Any) -> list[Any]:
    """[..., N] as [..., N / group_size, group_size], where parts of rows are normalised: heads with weights each."""
    size = flags["group_size"]
    if size is None or size == x.shape[-1]:
        return [x, *others]
    return [t if t is None else t.unflatten(-1, (x.shape[-1] // size, size)) for t in (x, *others)]


def _backend_for(name: str, operation: RMSNorm, flags: Flags) -> Chosen | None:
    """The backend of such rows, if it has a norm and a gate, or their gradients, in one call."""
    return run_norms.whole_of(operation, step_of_gate(name, flags["activation"]))


def has_gradients(operands: Operands, flags: Flags) -> bool:
    """Whether a backend has the gradients in one call."""
    x, weight = in_groups(flags, operands["x"], operands["weight"])
    return _backend_for("norm_gated_backward", operation_of_norm(x, weight, flags), flags) is not None


def forward(
    plan: Plan, operands: Operands, flags: Flags, outputs: Mapping[str, Tensor], keep: bool
) -> tuple[Tensor, ...]:
    """The results of a gated norm, as :func:`fusednorm.engine.run.forward` has those of other operations."""
    whole = cast(Tensor, operands["x"])
    x, z, weight, out = in_groups(flags, whole, operands["gate"], operands["weight"], outputs.get("out"))
    rstd = new(x.shape[:-1], accumulator(x.dtype), x.device) if keep else None
    found = None
    # Without gradients the fast path has refused the call already; it knows these flags, and groups that were made.
    if keep and len(flags) == len(_READ) + 1:
        found = _on_fast_path(x, z, weight, rstd, out, *[flags[name] for name in _READ])
    if found is None:
        weight = run_norms.of_all_heads(weight)
        backend = _backend_for("norm_gated", operation_of_norm(x, weight, flags), flags)
        if backend is None:
            return plan.declaration.formula(**operands, **flags)
        found = _run(backend, x, z, weight, flags, out, rstd)
    if x is not whole:
        found = found.resize_(whole.shape) if out is None else outputs["out"]  # no view
    return (found,) if rstd is None else (found, rstd)


def _run(
    backend: Chosen,
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    flags: Flags,
    out: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    """The rows, in new memory or in ``out``."""
    layout = in_levels((out,), (x, z))
    if layout is None:  # a kernel cannot write such rows
        return cast(Tensor, out).copy_(_run(backend, x, z, weight, flags, None, rstd))
    given = [] if out is None else [out]
    inner, (of_out, of_x, of_z), (x, z) = layout
    size, rows = x.shape[-1], x.shape[:-1].numel()
    if out is None:
        out, of_out = new_like(x, x.dtype), (inner * size, size)
    call = Call(
        name="norm_gated",
        backward=False,
        tensors={"x": x, "gate": z, "weight": weight, "out": out, "rstd": rstd},
        strides={"x": of_x, "gate": of_z, "out": of_out},
        flags={name: flags[name] for name in _READ},
        hidden_size=size,
        rows=rows,
        inner=inner,
    )
    run_norms.launch(backend, call, given)
    return out


def backward(given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of x, the gate and the weight, new tensors, as far as they are needed; else None.

    ``given``: by name, the incoming gradient, operands, rstd, and flags.
    """
    d, x, z, weight, rstd = whole = [given[name] for name in ("d_out", "x", "gate", "weight", "rstd")]
    if given["group_size"] is not None:
        d, x, z, weight = in_groups(given, *whole[:4])
    dx, dz, dweight = found = run_norms.new_gradients((x, z, weight), needs)
    flags = {name: given[name] for name in _OF_GRADIENTS}
    if not run_norms.are_of_no_rows(d, dweight) and not open_fast_path.norm_gated_backward(
        d, x, z, rstd, weight, dx, dz, dweight, *flags.values()
    ):
        inner, (of_d, of_x, of_z), (d, x_rows, z_rows) = run_norms.kept_in_levels((d,), (x, z), (rstd, weight))
        weight = run_norms.of_all_heads(weight)
        read = {"x": x_rows, "gate": z_rows, "weight": weight, "rstd": packed(rstd), "d_out": d}
        call = Call(
            name="norm_gated",
            backward=True,
            tensors={**read, "dx": dx, "dgate": dz, "dweight": dweight},
            strides={"x": of_x, "gate": of_z, "d_out": of_d},
            flags=flags,
            hidden_size=x.shape[-1],
            rows=d.shape[:-1].numel(),
            inner=inner,
        )
        operation = operation_of_norm(x, weight, given)
        cast(Chosen, _backend_for("norm_gated_backward", operation, given)).backward(call)
    if x is whole[1]:
        return found
    return tuple([t if t is None else t.view(like.shape) for t, like in zip(found, whole[1:4], strict=True)])
