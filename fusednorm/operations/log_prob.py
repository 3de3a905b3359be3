"""Log-probabilities: the last step of a language model (docs/spec.md, section 11)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls.c_enums import DeclaredOf
from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import check_cap, check_dense, check_ids, check_temperature, refuse_type
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.scalars import number
from fusednorm.declare.declaration import Declaration, Kernel, Operand, Result, Role
from fusednorm.operations.front_door import Operation, Results
from fusednorm.reference import log_prob as reference
from fusednorm.torch_ops import dtensor_bridge

#: The greatest number and the sum of exponentials of each row, which gradients take.
_SUMS = (Result("m", Role.NUMBERS, kept=True), Result("s", Role.NUMBERS, kept=True))
_LOG_PROB = Result("out", Role.OF_CHOSEN, wide=True)
_SELECTING: dict[str, Any] = {
    "operands": (
        Operand("logits"),
        Operand("ids", Role.CHOSEN),
        Operand("temperature", Role.SETTINGS, optional=True),
    ),
    "flags": {"softcap": float, "ignore_index": int},
    "samples": ({}, {"softcap": 2.5, "ignore_index": 1}),
    "refused": (
        ({"softcap": "2"}, TypeError, "softcap must be a number"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and greater than 0"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be int or None"),
    ),
}


def _check_softcap(logits: Tensor, *_: Any, softcap: float | None, **__: Any) -> None:
    if softcap is not None:
        check_cap(softcap, logits, "softcap", "leave it out for none")


def _check_values(logits: Tensor, ids: Tensor, temperature: Tensor | None, ignore_index: int | None, **_: Any) -> None:
    check_ids(logits.shape[-1], ids, ignore_index)
    check_temperature(temperature)


_SELECTING |= {"check": _check_softcap, "check_values": _check_values}


def _selected(**arguments: Any) -> tuple[Tensor, ...]:
    return reference.selected(**arguments, entropy=False)


def _selected_gradient(
    d: Tensor,
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    m: Tensor,
    s: Tensor,
    softcap: float | None,
    ignore_index: int | None,
    needs: list[bool],
) -> tuple[Tensor | None]:
    how = (softcap, ignore_index)
    return (reference.selected_gradient(d, None, logits, ids, temperature, m, s, None, *how) if needs[0] else None,)


def _with_entropy(**arguments: Any) -> tuple[Tensor, ...]:
    lp, entropy, m, s = reference.selected(**arguments, entropy=True)
    return lp, entropy, m, s, entropy


def _with_entropy_gradient(
    d: Tensor,
    d_entropy: Tensor,
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    m: Tensor,
    s: Tensor,
    entropy: Tensor,
    softcap: float | None,
    ignore_index: int | None,
    needs: list[bool],
) -> tuple[Tensor | None]:
    given, how = (d, d_entropy, logits, ids, temperature, m, s, entropy), (softcap, ignore_index)
    return (reference.selected_gradient(*given, *how) if needs[0] else None,)


def _kernel(of: DeclaredOf, like: Declaration | None = None) -> Kernel:
    return Kernel(of.name.lower(), "log_prob", known=("softcap", "ignore_index"), like=like)


#: It has all operands and results that any of these operations has.
_EVERY = Declaration(
    "selected_log_prob_and_entropy",
    results=(
        _LOG_PROB,
        Result("entropy_out", Role.NUMBERS, wide=True, copy_of="entropy"),
        *_SUMS,
        Result("entropy", Role.NUMBERS, kept=True),
    ),
    formula=_with_entropy,
    gradient=_with_entropy_gradient,
    kernel=_kernel(DeclaredOf.SELECTED_AND_ENTROPY),
    **_SELECTING,
)


class _Operation(Operation):
    """An operation with log-probabilities, and its calls on the fast path."""

    steps = "log_prob"

    def __init__(self, of: DeclaredOf, declaration: Declaration) -> None:
        names = " ".join([operand.name for operand in declaration.operands] + [*declaration.flags])
        entry = Entry("log_prob", names, constants={"operation": of.value, "kept": True})
        taken = " ".join((*declaration.backward_tensors, *declaration.gradient_flags, "needs"))
        gradient = Entry("log_prob_backward", taken, constants={"operation": of.value})
        super().__init__(declaration, fast=entry.open(), fast_gradient=gradient.open())
        public = Entry("log_prob", f"{names} out", constants={"operation": of.value, "kept": False})
        self._on_fast_path = self.open(public)

    def __call__(self, name: str, **arguments: Any) -> Results:  # type: ignore[type-var]
        """See :class:`Operation`."""
        if not is_dynamo_compiling():
            found: Results | None = self._on_fast_path(**arguments)
            if found is not None:
                return found
        return super().__call__(name, **arguments)

    def fitted(self, operands: Sequence[Any]) -> Sequence[Any]:
        """See :class:`Operation`; of a temperature that is a number."""
        if len(operands) == 1:
            return operands
        logits, ids, temperature = operands
        return logits, ids, _of_rows(logits, temperature)

    def of_parts(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """The results of rows in parts, by an exchange of sums."""
        return dtensor_bridge.of_parts_of_logits(self, operands, flags)


_LOG_SOFTMAX = _Operation(
    DeclaredOf.LOG_SOFTMAX,
    Declaration(
        "log_softmax",
        operands=(Operand("logits"),),
        results=(Result(dtype="out_dtype", overwrites="logits"), *_SUMS),
        flags={"out_dtype": None},
        formula=reference.log_softmax,
        gradient=reference.log_softmax_gradient,
        kernel=_kernel(DeclaredOf.LOG_SOFTMAX, _EVERY),
    ),
)
_LOGSUMEXP = _Operation(
    DeclaredOf.LOGSUMEXP,
    Declaration(
        "logsumexp",
        operands=(Operand("logits"),),
        results=(Result(role=Role.NUMBERS, wide=True), *_SUMS),
        formula=reference.logsumexp,
        gradient=reference.logsumexp_gradient,
        kernel=_kernel(DeclaredOf.LOGSUMEXP, _EVERY),
    ),
)
_SELECTED = _Operation(
    DeclaredOf.SELECTED,
    Declaration(
        "selected_log_prob",
        results=(_LOG_PROB, *_SUMS),
        formula=_selected,
        gradient=_selected_gradient,
        kernel=_kernel(DeclaredOf.SELECTED, _EVERY),
        **_SELECTING,
    ),
)
_WITH_ENTROPY = _Operation(DeclaredOf.SELECTED_AND_ENTROPY, _EVERY)


def _of_rows(logits: Tensor, temperature: float | Tensor | None) -> Tensor | None:
    """A temperature for each row of logits."""
    one = isinstance(temperature, Tensor) and temperature.dim() == 0
    if not (one or isinstance(temperature, Real | torch.SymFloat | torch.SymInt)):
        return cast("Tensor | None", temperature)  # what it is, is checked with the operands
    if not isinstance(logits, Tensor):
        refuse_type("logits", logits)
    check_dense("logits", logits)
    if isinstance(temperature, Tensor):
        return temperature.expand(logits.shape[:-1])
    wide = accumulator(logits.dtype)
    value = number("temperature", temperature, wide)
    if isinstance(value, float) and not 0 < value < math.inf:
        kind = str(wide)[6:]
        raise ValueError(
            f"temperature must be finite and greater than 0 in {kind}, got {temperature!r}; leave it out for 1"
        )
    return logits.new_full(logits.shape[:-1], value, dtype=wide)


@_LOG_SOFTMAX.public
def log_softmax(logits: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """The logarithm of the softmax of each row, in float32 (float64 for float64 logits), rounded once.

    docs/spec.md, section 11: sums in the order of the norms, with an exponential and a logarithm that have the same
    bits on every backend.

    Args:
        logits: [..., N], float16, bfloat16, float32 or float64, any strides.
        out: [..., N] to write to, in its own dtype. May be logits itself.
        out_dtype: the dtype of the result; that of logits if None. With gradients, unlike ``out``.

    Returns:
        [..., N], in the dtype of logits or ``out_dtype``; ``out`` if given.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices or memory do not fit.
        RuntimeError: ``out`` is given and logits requires grad.
    """
    return _LOG_SOFTMAX("log_softmax", logits=logits, out=out, out_dtype=out_dtype)


@_LOGSUMEXP.public
def logsumexp(logits: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row; otherwise as :func:`log_softmax`.

    Returns:
        [...], float32, or float64 for float64 logits.
    """
    return _LOGSUMEXP("logsumexp", logits=logits)


@_SELECTED.public
def selected_log_prob(
    logits: Tensor,
    ids: Tensor,
    *,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """The log-probability of an id in each row: the bits of ``log_softmax(logits.float()).gather(-1, ids)``.

    docs/spec.md, section 11. Nothing of the size of logits is made, but their gradient. ``gather - logsumexp``, as some
    libraries have it, has other bits.

    Args:
        logits: [..., N], float16, bfloat16, float32 or float64, any strides.
        ids: [...], or [..., K] for several of each row, int32 or int64, from 0 to N - 1.
        softcap: logits are first replaced by :func:`softcap` of them, of their dtype, with this cap, unless it is None.
        temperature: logits are then divided by it: a number greater than 0, or a tensor of such, of one number or of
            [...] with one for each row, of any of the dtypes (float64 only for float64 logits). It has no gradient.
        ignore_index: rows with this id have 0, whatever their logits are, and pass back 0; None: there is no such id.

    Returns:
        The shape of ids, float32, or float64 for float64 logits.

    Raises:
        IndexError: an id has no element, on a CPU; on a GPU its log-probability is NaN.
        TypeError: an operand is no tensor, or of a dtype that does not fit.
        ValueError: shapes, devices, memory or numbers do not fit; a tensor's temperatures are looked at on a CPU.
    """
    return _SELECTED(
        "selected_log_prob",
        logits=logits,
        ids=ids,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
    )


@_WITH_ENTROPY.public
def selected_log_prob_and_entropy(
    logits: Tensor,
    ids: Tensor,
    *,
    softcap: float | None = None,
    temperature: float | Tensor | None = None,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`selected_log_prob`, with its arguments, and the entropy of the softmax of each row.

    Returns:
        The log-probabilities, and [...], the entropies, which are 0 in rows all of whose ids are ignored, and
        where there are none, as for ids of [..., 0]. Both are float32, or float64 for float64 logits.
    """
    return _WITH_ENTROPY(
        "selected_log_prob_and_entropy",
        logits=logits,
        ids=ids,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
    )
