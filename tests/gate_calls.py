"""Calls of gates as backends are given them."""

from fusednorm.calls.call import Call, GateSteps


def gate_call(tensors, strides, hidden_size, rows, inner, activation="silu", between=None, interleaved=False, **steps):
    """A gate, or its gradients where ``d`` is among the tensors; the strides are those of the tensors there are."""
    flags = {"activation": activation, "between": between, "interleaved": interleaved}
    flags |= {**GateSteps._field_defaults, **steps}
    there = [name for name, tensor in tensors.items() if tensor is not None]
    lie = dict(zip(there, strides, strict=True))
    return Call("gate", "d" in tensors, tensors, lie, flags, hidden_size, rows, inner)


def gated_norm_call(x, z, out, strides, rows, inner, activation="silu", norm_first=True, weight_offset=0.0):
    """A norm of an eps of 0.5 and a gate; the strides are those of x, the gate and the results."""
    flags = {"activation": activation, "norm_before_gate": norm_first, "between": None, "round_norm": False}
    flags |= {"eps": 0.5, "weight_offset": weight_offset}
    tensors = {"x": x, "gate": z, "weight": None, "out": out, "rstd": None}
    lie = dict(zip(("x", "gate", "out"), strides, strict=True))
    return Call("norm_gated", False, tensors, lie, flags, x.shape[-1], rows, inner)
