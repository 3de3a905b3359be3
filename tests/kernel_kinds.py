"""Kinds of calls for tests that compile kernels: everything but the residual has one dtype."""

import torch

from fusednorm.backends.kernel_keys import BackwardKind, ForwardKind, GateKind, LogProbKind, QuantizerKind, RotationKind


def on(kinds):
    """Pairs of a compute capability and a kind of call, of lists of kinds by compute capability."""
    return [(capability, kind) for capability, of_capability in kinds.items() for kind in of_capability]


def named(of):
    """What a parameter of a test is called: a GPU, or a kind of call by the length of its rows."""
    for name in ("arch", "hidden_size", "size"):
        of = getattr(of, name, of)
    return str(of).split(".")[-1]


def norm(x, residual, size, alignment, **more):
    """The kind of a forward pass of a norm."""
    kind = ForwardKind(x, residual, x, x, residual, size, True, False, False, False, alignment)
    return kind._replace(**more)


def norm_backward(x, residual, size, alignment, **more):
    """The kind of its backward pass, with all gradients."""
    accumulator = torch.float64 if x == torch.float64 else torch.float32
    dtypes = (x, residual, residual, x, x, None if residual == x else residual, x, accumulator)
    return BackwardKind(*dtypes, size, False, alignment)._replace(**more)


def quantized(norm, quantization):
    """The kind of a norm and a quantizer, which alone wants the rows of the norm."""
    return norm._replace(quantizer=QuantizerKind(quantization, normalises=True, keeps=False))


def alone(quantized):
    """The kind of the quantizer alone."""
    quantizer = quantized.quantizer._replace(normalises=False, keeps=True)
    return quantized._replace(residual=None, weight=None, residual_out=None, quantizer=quantizer)


def gate(dtype, activation, alignment, backward=False, **more):
    """The kind of a gate, or of its backward pass."""
    d = dtype if backward else None
    return GateKind(d, dtype, dtype, dtype, d, activation, None, 4096, alignment, **more)


def rotation(x, size, pairs, alignment, interleaved=False, table=torch.float32, products=None):
    """The kind of heads that are normalised and rotated."""
    cos = table if pairs else None
    about = (True, False, False, False, interleaved, size, pairs, alignment)
    return RotationKind(x, x, x, products, cos, cos, x, None, *about)


def rotated_alone(kind):
    """The kind of the same heads that are not normalised."""
    return kind._replace(normalised=False, weight=None)


def log_probabilities(logits, size, alignment):
    """The kinds of log-probabilities, each with that of its gradient."""
    wide = torch.float64 if logits == torch.float64 else torch.float32
    for name in ("log_softmax", "logsumexp", "selected", "selected_and_entropy"):
        ids, temperature = (torch.int64, torch.float32) if "selected" in name else (None, None)
        result, entropy = logits if name == "log_softmax" else wide, wide if "entropy" in name else None
        yield LogProbKind(name, logits, result, ids, temperature, None, None, False, size, alignment)
        capped = ids is not None
        yield LogProbKind(name, logits, logits, ids, temperature, result, entropy, capped, size, alignment)
