"""Calls of gates as backends are given them."""

from fusednorm.calls.call import Call, GateSteps


def gate_call(tensors, strides, hidden_size, rows, inner, activation="silu", between=None, interleaved=False, **steps):
    """A gate, or its gradients where ``d`` is among the tensors; the strides are those of the tensors there are."""
    flags = {"activation": activation, "between": between, "interleaved": interleaved}
    flags |= {**GateSteps._field_defaults, **steps}
    there = [name for name, tensor in tensors.items() if tensor is not None]
    lie = dict(zip(there, strides, strict=True))
    return Call("gate", "d" in tensors, tensors, lie, flags, hidden_size, rows, inner)
