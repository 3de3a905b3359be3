"""Log-probabilities by a backend that has them in one call, else by the formula."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusednorm.calls.call import Flags, LogProb, LogProbBackward, Step, accumulator, operation_of
from fusednorm.calls.checks import check_kept
from fusednorm.calls.memory import in_levels, packed
from fusednorm.engine.choose import Chosen
from fusednorm.engine.execute import whole_of
from fusednorm.reference.norm import SEGMENT


class Found(NamedTuple):
    """The results of a backend."""

    out: Tensor
    #: Where the operation has it.
    entropy: Tensor | None
    m: Tensor
    s: Tensor


class Selecting(NamedTuple):
    """The operands of a row beside its logits, and the steps before its softmax."""

    ids: Tensor | None = None
    temperature: Tensor | None = None
    softcap: float | None = None
    ignore_index: int | None = None


NOTHING = Selecting()


def _packed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else packed(tensor)


def _of_call(selecting: Selecting) -> dict[str, Any]:
    """The same as calls have them."""
    ids, temperature, softcap, ignore_index = selecting
    given = {"ids": _packed(ids), "temperature": _packed(temperature)}
    return {**given, "softcap": softcap or 0.0, "ignore_index": ignore_index}


def backend_of(logits: Tensor, step: str) -> Chosen | None:
    """The backend for such rows, if it has such a call."""
    return whole_of(operation_of(logits, None, None, Flags()), Step(step))


def forward(
    name: str, logits: Tensor, selecting: Selecting = NOTHING, out_dtype: torch.dtype | None = None
) -> Found | None:
    """The results and what gradients take; None: the formula computes them.

    ``name``: see :class:`fusednorm.calls.call.LogProb`. ``out_dtype``: of log_softmax.
    """
    backend = backend_of(logits, "log_prob")
    if backend is None:
        return None
    rows, wide = logits.shape[:-1], accumulator(logits.dtype)

    def numbers(shape: torch.Size = rows) -> Tensor:
        return torch.empty(shape, dtype=wide, device=logits.device)

    if name == "log_softmax":
        out = torch.empty(logits.shape, dtype=out_dtype or logits.dtype, device=logits.device)
    else:
        out = numbers(rows if selecting.ids is None else selecting.ids.shape)
    entropy, m, s = numbers() if name == "selected_and_entropy" else None, numbers(), numbers()
    _run(backend, name, logits, selecting, out, m, s, entropy)
    return Found(out, entropy, m, s)


def _run(
    backend: Chosen,
    name: str,
    logits: Tensor,
    selecting: Selecting,
    out: Tensor,
    m: Tensor,
    s: Tensor | None,
    entropy: Tensor | None,
) -> None:
    size, rows = logits.shape[-1], logits.shape[:-1].numel()
    if not rows:
        return
    layout: Any = in_levels((), (logits,))
    inner, (of_logits,), (given,) = layout
    backend.forward(
        LogProb(
            name=name,
            logits=given,
            **_of_call(selecting),
            out=out,
            m=m,
            s=s,
            entropy=entropy,
            hidden_size=size,
            rows=rows,
            inner=inner,
            strides=(of_logits, (inner * size, size)),
        )
    )


def sums_of_segments(logits: Tensor, selecting: Selecting, m: Tensor, entropy: bool) -> tuple[Tensor, ...] | None:
    """The sums of a part of rows that begins with a segment, [..., segments]; with ``entropy`` also those of its terms.

    None: the formula computes them.
    """
    backend = backend_of(logits, "log_prob_parts")
    if backend is None:
        return None
    shape = (*logits.shape[:-1], -(-logits.shape[-1] // SEGMENT))
    found = tuple(torch.empty(shape, dtype=m.dtype, device=m.device) for _ in range(1 + entropy))
    _run(backend, "sums", logits, selecting, found[0], packed(m), None, found[1] if entropy else None)
    return found


def backward(
    name: str,
    d: Tensor,
    d_entropy: Tensor | None,
    logits: Tensor,
    m: Tensor,
    s: Tensor,
    entropy: Tensor | None = None,
    selecting: Selecting = NOTHING,
    part: tuple[int, int] | None = None,
) -> Tensor | None:
    """The gradient of logits; None: the formula computes it.

    ``d_entropy``: see :class:`fusednorm.calls.call.LogProbBackward`. ``part``: of logits that are a part of rows, where
    they begin there, and the length of whole rows.
    """
    backend = backend_of(logits, "log_prob_backward" if part is None else "log_prob_parts")
    if backend is None:
        return None
    check_kept((d, d_entropy), (logits, m, s, entropy, *selecting[:2]))
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    size, rows = logits.shape[-1], logits.shape[:-1].numel()
    if rows and selecting.ids is not None and not selecting.ids.numel():
        return dx.zero_()
    if rows:
        whole = name == "log_softmax"
        layout: Any = in_levels((), (logits, d if whole else None))
        inner, (of_logits, of_d), (given, of_rows) = layout
        backend.backward(
            LogProbBackward(
                name=name,
                logits=given,
                **_of_call(selecting),
                d=of_rows if whole else packed(d),
                d_entropy=_packed(d_entropy),
                m=packed(m),
                s=packed(s),
                entropy=_packed(entropy),
                dx=dx,
                part=part or (0, size),
                hidden_size=size,
                rows=rows,
                inner=inner,
                strides=(of_logits, (inner * size, size), of_d),
            )
        )
    return dx
