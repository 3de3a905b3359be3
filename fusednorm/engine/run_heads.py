"""Runs rotations of heads, alone and after a norm of each head, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusednorm.calls import fast_path as path
from fusednorm.calls.call import Call, Step, Strides, accumulator, operation_of
from fusednorm.calls.call import Flags as NormFlags
from fusednorm.calls.checks import check_kept
from fusednorm.calls.memory import new, new_like, packed, two_levels
from fusednorm.declare.plan import Flags, Operands, Plan
from fusednorm.engine import run_norms
from fusednorm.engine.choose import Chosen
from fusednorm.engine.run import as_new, backend_of

_on_fast_path = path.Entry("rotation", "q k cos sin positions interleaved round_products").open()
_READ_BY_C = (
    "q k q_weight k_weight cos sin positions eps norm interleaved round_products between weight_offset round_norm"
)
_with_rstd = path.Entry("rotation", f"{_READ_BY_C} q_rstd k_rstd").open()
_READ = _READ_BY_C.split()

_TABLES = ("cos", "sin", "positions")
#: The tensors of calls.
_OF_CALLS = tuple(f"{name}{of}" for name in "qk" for of in ("", "_weight", "_out", "_rstd")) + _TABLES


class Set(NamedTuple):
    """Heads of q or of k, and what goes with them."""

    #: [..., H, D].
    x: Tensor
    #: [D], [H, D] or None.
    weight: Tensor | None = None
    #: [..., H, D], which receives the results if a kernel can write there; None: new memory.
    out: Tensor | None = None
    #: [..., H] of the accumulator type, contiguous, which receives ``1 / sqrt(mean(x^2) + eps)``; or None.
    rstd: Tensor | None = None


def rotated_on_fast_path(sets: Sequence[Tensor], operands: Operands, flags: Flags) -> Any:
    """Rotated heads in new memory, without a norm, if the fast path takes the call; a tuple for q and for k.

    ``flags``: those of calls.
    """
    if flags["products"] is not None and flags["products"] is not sets[0].dtype:
        return None
    q, k = (*sets, None)[:2]
    tables = [operands.get(name) for name in _TABLES]
    return _on_fast_path(q, k, *tables, flags["interleaved"], flags["products"] is not None)


def flags_of_calls(x: Tensor, operands: Operands, flags: Flags) -> dict[str, Any]:
    """The flags of a call of "rotate", for those of each operation that is one."""
    norm = flags.get("norm", False)
    between = (flags["between"] if norm and operands["cos"] is not None else None) or x.dtype
    numbers = {"eps": flags["eps"], "weight_offset": flags["weight_offset"]} if norm else _NO_NUMBERS
    products = flags.get("rounded_to") or (between if flags.get("round_products") else None)
    of_norm = {"norm": norm, **numbers, "round_norm": norm and flags["round_norm"]}
    return {**of_norm, "interleaved": flags["interleaved"], "between": between, "products": products}


_NO_NUMBERS = {"eps": 0.0, "weight_offset": 0.0}


def backend_for(sets: Sequence[Set], flags: Flags, dtype: torch.dtype | None = None) -> Chosen | None:
    """The backend that normalises and rotates all these heads in one call; None if there is none.

    ``flags``: those of calls. ``dtype``: of the results, where it may be another one than that of the heads.
    """
    x = sets[0].x
    if sets[-1].x.dtype != x.dtype:
        return None
    dtypes = [dtype for dtype in (x.dtype, flags["products"], dtype) if dtype is not None]
    of_heads = [one for one in sets if one.weight is not None and one.weight.dim() == 2 and one.weight.shape[0] > 1]
    return backend_of(x, step(dtypes, bool(of_heads)))


def step(dtypes: Sequence[torch.dtype], of_heads: bool = False) -> Step:
    """A rotation, as it decides the backend of a call; ``of_heads``: whether each head has a weight of its own."""
    return Step("rotate", None, tuple(dtypes), ("affine",) if of_heads else ())


def forward(
    plan: Plan, operands: Operands, flags: Flags, outputs: Mapping[str, Tensor], keep: bool
) -> tuple[Tensor, ...]:
    """The results of a call of heads, as :func:`fusednorm.engine.run.forward` has those of other operations."""
    names = [name for name in ("x", "q", "k") if name in operands]
    heads = [cast(Tensor, operands[name]) for name in names]
    kept = [new(x.shape[:-1], accumulator(x.dtype), x.device) for x in heads] if keep and plan.declaration.kept else []
    if kept and len(operands) + len(flags) == len(_READ):  # C knows no other flags
        given = {**operands, **flags}
        if (taken := _with_rstd(*[given[name] for name in _READ], *kept)) is not None:
            return (*taken, *kept)
    of_call, dtype = flags_of_calls(heads[0], operands, flags), flags.get("dtype")
    sets = [
        Set(x, operands.get(f"{name}_weight"), outputs.get(result.name), rstd)
        for name, x, result, rstd in zip_longest(names, heads, plan.declaration.returned, kept)
    ]
    backend = backend_for(sets, of_call, dtype)
    if backend is None:
        return as_new(plan.declaration.formula(**operands, **flags), operands.values())
    return (*rotated(backend, sets, operands, of_call, dtype), *kept)


def rotated(
    backend: Chosen, sets: Sequence[Set], operands: Operands, flags: Flags, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The results for checked operands, new ones where a kernel cannot write in ``out``.

    Args:
        backend: that of :func:`backend_for`.
        sets: heads of q, or of q and of k.
        operands: those of the declared operation, among them tables.
        flags: those of calls.
        dtype: of new results; that of the heads if None.
    """
    tables = [operands.get(name) for name in _TABLES]
    (cos, sin, positions), rows = tables, sets[0].x.shape[:-2]
    inputs, weights = [one.x for one in sets], [one.weight for one in sets]
    read = [t.data_ptr() for t in (*inputs, *weights, *tables) if t is not None]
    found: list[Tensor] = []
    for x, _, out, _ in sets:
        # A kernel can write where no operand begins but the heads that it replaces.
        if out is None or _dense(out) is not out or read.count(out.data_ptr()) > (out.data_ptr() == x.data_ptr()):
            out = new_like(x, dtype or x.dtype)
        found.append(out)
    inputs = [_dense(x) for x in inputs]
    in_rows = [t.stride()[:-2] for t in (*inputs, *found)]
    of_tables = [(0,) * len(rows)] * 3
    if cos is not None and sin is not None:
        cos, sin = _dense(cos), _dense(sin)
        if positions is not None:
            positions = positions.resolve_neg().expand(rows)
            of_tables[2] = positions.stride()
        else:
            cos, sin = cos.expand(*rows, cos.shape[-1]), sin.expand(*rows, sin.shape[-1])
            of_tables[:2] = cos.stride()[:-1], sin.stride()[:-1]
    levels = two_levels(rows, (*of_tables, *in_rows))
    if levels is None:  # what is only read can be copied, and what is written can be written afterwards
        alone = [one._replace(x=packed(one.x), out=None) for one in sets]
        copies = {name: t if t is None else packed(t) for name, t in zip(_TABLES, (cos, sin, positions), strict=True)}
        return rotated(backend, alone, copies, flags, dtype)
    inner, (of_cos, of_sin, of_positions, *of_sets) = levels
    if positions is not None and cos is not None and sin is not None:
        of_cos, of_sin = (0, cos.stride(0)), (0, sin.stride(0))
    tensors: dict[str, Tensor | None] = dict.fromkeys(_OF_CALLS)
    strides: dict[str, Strides] = {"cos": of_cos, "sin": of_sin, "positions": of_positions}
    for at, (name, one) in enumerate(zip("qk", sets, strict=False)):
        tensors |= {name: inputs[at], f"{name}_out": found[at], f"{name}_rstd": one.rstd}
        tensors[f"{name}_weight"] = run_norms.of_all_heads(one.weight)
        strides |= {name: of_sets[at], f"{name}_out": of_sets[at + len(sets)]}
    tensors |= {"cos": cos, "sin": sin, "positions": positions}
    exist, size = [x for x in inputs if x.numel()], inputs[0].shape[-1]
    call = Call("rotate", False, tensors, strides, flags, size, rows.numel() if exist else 0, inner)
    run_norms.launch(backend, call, [out for out, one in zip(found, sets, strict=True) if out is one.out])
    return found


def _dense(tensor: Tensor) -> Tensor:
    """The tensor if the numbers of its last dimension are adjacent, else a copy."""
    adjacent = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if adjacent and not tensor.is_neg() else packed(tensor)


def has_gradients(operands: Operands, flags: Flags) -> bool:
    """Whether a backend has normalised and rotated heads in one call, of which :func:`backward` has the gradients."""
    q, k, *weights = (operands[name] for name in ("q", "k", "q_weight", "k_weight"))
    if not flags["norm"] or operands["cos"] is None or [t for t in weights if t is not None and t.dim() == 2]:
        return False
    of_call = flags_of_calls(cast(Tensor, q), operands, flags)
    return backend_for([Set(cast(Tensor, x)) for x in (q, k)], of_call) is not None


def backward(given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and their weights: the rotation back, and then the gradients of the norms.

    ``given``: by name, incoming gradients, of which either may be None, operands, what is kept, and flags.
    """
    of_call, needed = flags_of_calls(given["q"], given, given), dict(zip(_WITH_GRADIENTS, needs, strict=True))
    passed = of_call["between"]
    here = [x for x in "qk" if given[f"d_{x}_out"] is not None and (needed[x] or needed[f"{x}_weight"])]
    if not here:
        return (None,) * 4
    incoming = [given[f"d_{x}_out"] for x in here]
    check_kept(incoming, [given[name] for name in _TABLES])
    tables = {"cos": given["cos"], "sin": -given["sin"], "positions": given["positions"]}
    back = {**of_call, "norm": False, **_NO_NUMBERS, "round_norm": False, "between": incoming[0].dtype}
    turned = rotated_on_fast_path(incoming, tables, back) if passed is incoming[0].dtype else None
    if turned is None:
        sets = [Set(d) for d in incoming]
        turned = rotated(cast(Chosen, backend_for(sets, back, passed)), sets, tables, back, passed)
    found: dict[str, Tensor | None] = {}
    flags = NormFlags(of_call["eps"], of_call["weight_offset"], True, of_call["round_norm"], passed)
    for name, d in zip(here, turned, strict=False):  # the fast path's are always two
        x, weight = given[name], given[f"{name}_weight"]
        operation = operation_of(x, None, weight, flags)
        of_rows = (needed[name], False, needed[f"{name}_weight"])
        found[name], _, found[f"{name}_weight"], _ = run_norms.backward(
            *(run_norms.backend_of(operation), operation, d, None, x, given[f"{name}_rstd"], weight),
            *(flags.weight_offset, of_rows),
        )
    return tuple(found.get(name) for name in _WITH_GRADIENTS)


_WITH_GRADIENTS = ("q", "k", "q_weight", "k_weight")
