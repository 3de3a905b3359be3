"""Log-probabilities of DTensors whose rows lie in parts on ranks, as a matrix product leaves a vocabulary.

Ranks exchange the greatest number and the chosen logits of each row, then sums of segments; for gradients nothing, or
one sum. docs/spec.md, section 11, says why the bits are those of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Step
from fusednorm.calls.checks import check_ids
from fusednorm.declare.declaration import Role
from fusednorm.engine import run_log_prob
from fusednorm.engine.run import backend_of, gradient
from fusednorm.engine.run_log_prob import Selecting
from fusednorm.reference import log_prob as reference
from fusednorm.reference.norm import rounded
from fusednorm.torch_ops.operator import Operator
from fusednorm.torch_ops.parts_of_rows import Piece, Where, exchanged_sum, gathered, numbers_of, where_of

_WITH_ENTROPY, _PARTS = "selected_log_prob_and_entropy", "log_prob_parts"


def _pieces(tensor: Tensor, where: Where) -> list[tuple[Piece, Tensor]]:
    """The pieces of this rank's part of rows."""
    start = where.start
    return [(piece, tensor[..., piece.start - start : piece.stop - start]) for piece in where.parts.pieces(where.rank)]


def _greatest(logits: Tensor, temperature: Tensor | None, softcap: float | None) -> Tensor:
    """The greatest number of each row that the softmax takes, [..., 1]."""

    def of_block(rows: Tensor, temperature: Tensor | None) -> tuple[Tensor]:
        return (reference.arguments(rows, temperature, softcap)[0].amax(-1, keepdim=True),)

    keeps_order = temperature is None or (  # a GPU would have to be waited for
        temperature.device.type == "cpu" and bool(((temperature > 0) & (temperature < torch.inf)).all())
    )
    if softcap is None and keeps_order:
        return reference.arguments(logits.amax(-1, keepdim=True), temperature, None)[0]
    return reference.by_blocks(of_block, logits, temperature)[0]


def results_of(
    name: str, logits: Tensor, selecting: Selecting, where: Where, out_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """The results for this rank's part of rows, and what is kept for the gradient, as the operator of that name."""
    ids, temperature, softcap, ignore_index = selecting
    start, stop, size = where.start, where.start + logits.shape[-1], where.parts.bounds[-1]
    some = logits if logits.shape[-1] else torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
    own, chosen = _greatest(some, temperature, softcap), None
    if ids is not None:
        check_ids(size, ids, ignore_index)
        chosen = reference.chosen_of(ids if ids.ndim == logits.ndim else ids.unsqueeze(-1), size, ignore_index)
        here = (chosen.places >= start) & (chosen.places < stop)
        of_ids = some.gather(-1, torch.where(here, chosen.places - start, 0))
        t = reference.arguments(of_ids, temperature, softcap)[0]
        own = torch.cat((own, torch.where(here, t, -torch.inf)), -1)
    # A chosen logit is on one rank, and not below the -inf of the others; a NaN wins.
    most = gathered(own, where.mesh, where.dim).amax(0)
    m, of_chosen = most[..., 0].contiguous(), most[..., 1:]
    entropy = name == _WITH_ENTROPY

    def of_piece(piece: Piece, rows: Tensor, temperature: Tensor | None, m: Tensor) -> tuple[Tensor, ...]:
        below, e = reference.exponentials(reference.arguments(rows, temperature, softcap)[0], m)
        terms = (e, reference.entropy_terms(below, e)) if entropy else (e,)
        return tuple(numbers_of(t, piece) for t in terms)

    given = [m.new_empty(*m.shape, 1 + entropy, 0)]
    for piece, rows in _pieces(logits, where):
        found = run_log_prob.sums_of_segments(rows, selecting, m, entropy) if piece.whole else None
        if found is None:
            found = reference.by_blocks(partial(of_piece, piece), rows, temperature, m)
        given.append(torch.stack(found, -2))
    sums = exchanged_sum(torch.cat(given, -1), where.parts, where.mesh, where.dim)
    s = sums[..., 0].contiguous()
    log_s = reference.logarithm(s).unsqueeze(-1)
    if name == "log_softmax":

        def of_block(rows: Tensor, m: Tensor, log_s: Tensor) -> tuple[Tensor]:
            below = rows.to(m.dtype) - m.unsqueeze(-1)
            return (rounded(below - log_s, out_dtype or rows.dtype),)

        return *reference.by_blocks(of_block, logits, m, log_s), m, s
    if chosen is None or ids is None:
        return reference.logsumexp_of(m, log_s), m, s
    lp = reference.log_prob_of(of_chosen - m.unsqueeze(-1), log_s, chosen).reshape(ids.shape)
    if not entropy:
        return lp, m, s
    h = reference.entropy_of(log_s, sums[..., 1], s, chosen)
    return lp, h, m, s, h.clone()


def gradient_of(
    name: str, incoming: Sequence[Tensor], logits: Tensor, selecting: Selecting, kept: Sequence[Tensor], where: Where
) -> Tensor:
    """The gradient of this rank's part of rows."""
    d, (m, s, *entropy) = incoming[0], kept
    h, part = entropy[0] if entropy else None, (where.start, where.parts.bounds[-1])
    given = {**selecting.operands(logits), "m": m, "s": s, "entropy": h}
    if name == "log_softmax":

        def of_piece(piece: Piece, rows: Tensor) -> tuple[Tensor]:
            return (numbers_of(rows.to(m.dtype), piece),)

        pieces = [reference.by_blocks(partial(of_piece, piece), rows)[0] for piece, rows in _pieces(d, where)]
        own = torch.cat([m.new_empty(*m.shape, 0), *pieces], -1)
        total = exchanged_sum(own, where.parts, where.mesh, where.dim)
        by_backend = None
        if logits.shape[-1]:
            by_backend = gradient(
                backend_of(logits, Step(_PARTS)), name, {"d": d, "d_entropy": total}, given, ("logits", "d"), {}, part
            )
        return reference.log_softmax_gradient_of(d, logits, m, s, total) if by_backend is None else by_backend
    if not logits.shape[-1]:
        return torch.empty_like(logits)
    d_entropy = incoming[1] if name == _WITH_ENTROPY else None
    of_results = {"d": d, "d_entropy": d_entropy}
    if name == "logsumexp":
        by_backend = gradient(backend_of(logits, Step("log_prob_backward")), name, of_results, given, ("logits",), {})
        return reference.logsumexp_gradient(d, logits, m, s, [True])[0] if by_backend is None else by_backend  # type: ignore[return-value]
    by_backend = gradient(
        backend_of(logits, Step(_PARTS)), "selected", of_results, given, ("logits",), selecting.flags(), part
    )
    if by_backend is not None:
        return by_backend
    ids, temperature, softcap, ignore_index = selecting
    assert ids is not None
    return reference.selected_gradient(d, d_entropy, logits, ids, temperature, m, s, h, softcap, ignore_index, part)


class _LogProbOfParts(torch.autograd.Function):
    """(*operands, flags, the operator, where) -> all results of the operator."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[DTensor, ...]:
        """The results by the formula, or by a backend's sums of segments."""
        *tensors, flags, operator, where = given
        operands = dict(zip(operator.plan.operands, tensors, strict=True))
        declaration, logits = operator.declaration, operands["logits"]
        own, selecting = _own(operands, flags, where)
        found = results_of(declaration.name, own, selecting, where, flags.get("out_dtype"))
        results = tuple(
            where.of_rows(t, logits) if result.role is Role.ROWS else where.of_numbers(t, logits)
            for t, result in zip(found, declaration.results, strict=True)
        )
        operator.keep(ctx, operands, flags, results)
        ctx.operator, ctx.where = operator, where
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
        """The gradients of logits; one that is differentiated again is computed with whole rows."""
        operator, where = ctx.operator, ctx.where
        if must_be_seen.differentiated_again():
            return *operator.gradients(ctx, incoming, through_dispatcher=True), None, None, None
        declaration, saved = operator.declaration, ctx.saved_tensors  # a checkpoint lets it be asked once
        operands = dict(zip(operator.plan.operands, saved, strict=False))
        own, selecting = _own(operands, ctx.flags, where)
        own_kept = [t.to_local() for t in saved[operator.count :]]
        local = [
            where.local_rows(d) if result.role is Role.ROWS else where.local_numbers(d)
            for d, result in zip(operator.every(incoming, operands, ctx.flags), declaration.returned, strict=True)
        ]
        found = gradient_of(declaration.name, local, own, selecting, own_kept, where)
        return where.of_rows(found, operands["logits"]), *[None] * (len(ctx.needs_input_grad) - 1)


def _own(operands: Mapping[str, Any], flags: Mapping[str, Any], where: Where) -> tuple[Tensor, Selecting]:
    """The part of rows that this rank has, and their operands and steps before the softmax."""
    return where.local_rows(operands["logits"]), Selecting(
        ids=where.local_numbers(operands.get("ids")),
        temperature=where.local_numbers(operands.get("temperature")),
        softcap=flags.get("softcap"),
        ignore_index=flags.get("ignore_index"),
    )


def of_parts(operator: Operator, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[DTensor, ...] | None:
    """See ``dtensor_bridge.of_parts_of_logits``."""
    logits, ids = operands["logits"], operands.get("ids")
    if any(t is not None and t.device_mesh != logits.device_mesh for t in operands.values()):
        return None
    chosen = 0 if ids is None else ids.shape[-1] if ids.ndim == logits.ndim else 1
    where = where_of(logits, 1 + (operator.declaration.name == _WITH_ENTROPY), others=1 + chosen)
    if where is None:
        return None
    return _LogProbOfParts.apply(*operands.values(), flags, operator, where)  # type: ignore[no-any-return, no-untyped-call]
