"""Kinds of calls for tests that compile kernels: everything but the residual has one dtype, if nothing else is said."""

import pytest
import torch

from fusednorm.backends.kernel_keys import LOG_PROBABILITIES, Kind, kind_of_norm
from fusednorm.calls.call import GateSteps, RMSNorm

F32, F64, INT8 = torch.float32, torch.float64, torch.int8


def on(kinds):
    """Pairs of a compute capability and a kind of call, of lists of kinds by compute capability."""
    return [(capability, kind) for capability, of_capability in kinds.items() for kind in of_capability]


def of_each_gpu(cases):
    """Parameters of a test whose first one is a GPU: all of compute capability 9.0, and of each other GPU the first.

    The others are run before a release: their machine code tells of speed, and the bits of three GPUs are executed.
    """
    found, seen = [], {90}
    for capability, *rest in cases:
        marks = [pytest.mark.release] * (capability != 90 and capability in seen)
        found.append(pytest.param(capability, *rest, marks=marks))
        seen.add(capability)
    return found


def named(of):
    """What a parameter of a test is called: a GPU, or a kind of call by the length of its rows."""
    for name in ("arch", "hidden_size"):
        of = getattr(of, name, of)
    return str(of).split(".")[-1]


def accumulator(dtype):
    return F64 if dtype == F64 else F32


def norm(x, residual, size, alignment, rstd=False, **changes):
    """The kind of a forward pass of a norm."""
    operation = RMSNorm(torch.device("cpu"), x, residual, x, x, size, True, False, residual)
    return kind_of_norm(operation, alignment, rstd=accumulator(x) if rstd else None).changed(**changes)


def norm_backward(x, residual, size, alignment, **changes):
    """The kind of its backward pass, with all gradients."""
    other = None if residual == x else residual
    rows = {"dy": x, "d_total": residual, "h": residual, "weight": x, "dx": x, "dresidual": other}
    others, flags = {"dweight": x, "rstd": accumulator(x)}, {"weight_offset": False, "center": False}
    return of("norm_backward", size, alignment, rows, others, flags).changed(**changes)


def of(name, size, alignment, rows, others, flags, backward=False):
    """A kind of these dtypes and flags, of rows in one level."""
    return Kind(name, size, alignment, False, *(tuple(part.items()) for part in (rows, others, flags)), backward)


def quantized(norm, quantization):
    """The kind of a norm and a quantizer, which alone wants the rows of the norm."""
    return norm.changed(name="quantize", quantization=quantization, keeps=False)


def alone(quantized):
    """The kind of the quantizer alone."""
    return quantized.changed(residual=None, weight=None, residual_out=None, normalises=False, keeps=True)


def gate(dtype, activation, alignment, size=4096, **changes):
    """The kind of a gate."""
    flags = {"activation": activation, "between": None, **GateSteps()._asdict(), "interleaved": False, "packed": True}
    rows = dict.fromkeys(("y", "z", "out"), dtype)
    return of("gate", size, alignment, rows, {}, flags).changed(**changes)


def gradients(gate, **changes):
    """The kind of its backward pass."""
    rows = {"d": gate.out, "y": gate.y, "z": gate.z, "dy": gate.y, "dz": gate.z}
    return gate._replace(rows=tuple(rows.items()), backward=True).changed(**changes)


def rotation(x, size, pairs, alignment, interleaved=False, table=F32, products=None):
    """The kind of heads of q that are normalised and rotated."""
    table = table if pairs else None
    rows = {"q": x, "q_out": x, "q_weight": x, "cos": table, "sin": table}
    others = {"q_rstd": None, "k": None, "positions": None, "k_out": None}
    flags = {"norm": True, "round_norm": False, "weight_offset": False, "interleaved": interleaved}
    flags |= {"between": x, "products": products, "pairs": pairs}
    return of("rotate", size, alignment, rows, others, flags)


def rotated_alone(kind):
    """The kind of the same heads that are not normalised."""
    return kind.changed(norm=False, q_weight=None)


def log_probability(name, logits, size, alignment, backward=False, temperature=None, capped=False, of_entropy=True):
    """The kind of log-probabilities, or of their gradient: with ids and entropies where the operation has them."""
    wide, whole, selects = accumulator(logits), name == "log_softmax", "selected" in name
    result = logits if whole else wide
    rows, others = {"logits": logits}, {"ids": torch.int64 if selects else None, "temperature": temperature}
    d_entropy = wide if of_entropy and "entropy" in name else None
    numbers = {"d": result, "d_entropy": d_entropy, "dlogits": logits} if backward else {"out": result}
    for operand, dtype in numbers.items():
        (rows if whole or operand == "dlogits" else others)[operand] = dtype
    return of(name, size, alignment, rows, others, {"softcap": capped}, backward)


def log_probabilities(logits, size, alignment):
    """The kinds of log-probabilities, each with that of its gradient."""
    for name in LOG_PROBABILITIES:
        selects = "selected" in name
        temperature = F32 if selects else None
        yield log_probability(name, logits, size, alignment, False, temperature)
        yield log_probability(name, logits, size, alignment, True, temperature, selects)


def product(out, bias=None, zero_point=False, few=True, size=4096):
    """The kind of products of int8."""
    rows = {"q": INT8, "weight": INT8, "weight_scale": F32, "bias": bias, "out": out}
    others = {"scale": F32, "zero_point": torch.int32 if zero_point else None}
    return of("int8_linear", size, 16, rows, others, {"few": few})
