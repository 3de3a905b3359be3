"""Calls on ``cpu`` in a forked process, and of a caller that flushes subnormals; also steps by torch's operations."""

import os
import signal
import sys

import pytest
import torch
from every_operation import (
    ADDED,
    BF16,
    BIAS,
    F32,
    FUNCTIONS,
    HALF,
    IN_PLACE,
    MORE,
    TURN,
    WEIGHT,
    WITHOUT_GRADIENT,
    K,
    Q,
    X,
    called,
    clones,
    function_of,
    have_gradients,
    partly,
    without_outputs,
)
from processes import python

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cpu

TABLES = {name: TURN[name] for name in ("cos", "sin")}
TINY = 2.0**-130
POWERS = Quantization(torch.int8, round_scale="up_to_power_of_two", scale_dtype=torch.int32)
STATIC = {"quantization": quantizations.VLLM_FP8_STATIC}


def added(**flags):
    return partly(fusednorm.fused_add_rms_norm, **flags)


#: Calls whose flags or operands have steps of their own, beside those of every_operation.py.
STEPS = {
    "residual_dtype": (added(residual_dtype=BF16), ADDED),
    "residual_dtype, wider": (added(residual_dtype=F32), HALF | {"residual": X.to(BF16)}),
    "residual_dtype with a bias": (added(residual_dtype=BF16), ADDED | {"bias": BIAS}),
    "residual_dtype, unrounded": (added(residual_dtype=BF16, round_sum=False), ADDED),
    "residual_dtype, centered": (partly(fusednorm.fused_add_layer_norm, residual_dtype=BF16), ADDED),
    "residual_dtype after a norm": (partly(fusednorm.rms_norm_add, residual_dtype=BF16), ADDED),
    "a sum that is not rounded": (added(round_sum=False), HALF | {"residual": X.to(BF16)}),
    "a sum alone": (lambda **given: fusednorm.fused_add_rms_norm(**given)[1], ADDED),
    "heads of a bias": (fusednorm.rms_norm, {"x": Q, "weight": WEIGHT, "bias": K[1]}),
    "x_scale": (added(x_scale=0.3), ADDED),
    "pairs side by side": (partly(fusednorm.rotate, interleaved=True), {"x": Q, **TABLES}),
    "samples": (fusednorm.modulate, {"y": X[:, None].repeat(1, 2, 1), "scale": X, "shift": X}),
    "given scales of rows, quantized": (fusednorm.quantize, STATIC | {"y": X, "scale": torch.ones(4, 1)}),
    "given scales of columns, quantized": (fusednorm.rms_norm_quant, STATIC | {"x": X, "scale": torch.ones(1, 6)}),
    "a given scale, quantized": (fusednorm.quantize, STATIC | {"y": X, "scale": torch.full((1,), TINY)}),
    "scales of powers of two, quantized": (fusednorm.quantize, {"y": X, "quantization": POWERS}),
    "columns in memory": (fusednorm.rms_norm, {"x": X.mT.contiguous().mT, "weight": WEIGHT}),
}


def many(tensor):
    """A copy with so many rows that torch's operations use threads; a third of the rows is subnormal."""
    if not tensor.dim() or tensor.shape[0] != 4:
        return tensor.clone()
    found = tensor.repeat(4096, *[1] * (tensor.dim() - 1))
    if tensor.is_floating_point():
        found[::3] *= TINY
    return found if tensor.is_contiguous() else found.mT.contiguous().mT


def calls():
    """Names, functions and operands; those that may have a gradient require it."""
    functions = {name: (function_of(name), operands) for name, operands in FUNCTIONS.items()}
    for name, (function, operands) in {**functions, **MORE, **STEPS}.items():
        given = clones(without_outputs(operands), many)
        if not (name in IN_PLACE or name == "offset" or "quant" in name or name.split()[0] in WITHOUT_GRADIENT):
            for key in have_gradients(given):
                given[key].requires_grad_()
        yield name, function, given


def copied(operands):
    return clones(operands, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def results(function, operands, incoming=None):
    """The results of a call, and the gradients; and the incoming ones, which are made if they are not given."""
    leaves = [t for t in operands.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    found = called(function, operands)
    if not leaves:
        return found, incoming
    incoming = incoming or [t.detach().cos() for t in found]
    return [*found, *torch.autograd.grad(found, leaves, incoming)], incoming


def differ(a, b):
    """Whether one of the numbers differs; a NaN is a NaN."""
    pairs = [(p.double(), q.double()) for p, q in zip(a, b, strict=True)]
    return any(((p != q) & ~(p.isnan() & q.isnan())).any() for p, q in pairs)


def flushed():
    """Prints the names of calls that change where the caller flushes subnormals, or that change what the caller set."""
    for name, function, operands in calls():
        wanted, incoming = results(function, copied(operands))
        flushes = torch.set_flush_denormal(True)
        found, _ = results(function, copied(operands), incoming)
        kept = (torch.ones(1) * TINY).item() == 0 or not flushes
        torch.set_flush_denormal(False)
        if not kept or torch.get_num_threads() != 2 or differ(found, wanted):
            print(name)


def forked():
    """Prints the name of the call that hangs in a forked process, if one does."""
    made = [(name, function, operands, results(function, copied(operands))[1]) for name, function, operands in calls()]
    torch.ones(1 << 20).mul_(2)  # by two threads, which the child has not
    if (child := os.fork()) == 0:
        for name, function, operands, incoming in made:
            print(name, flush=True)
            signal.alarm(20)
            results(function, operands, incoming)
            assert torch.get_num_threads() == 2
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print("all")


@pytest.mark.skipif(bool(cpu.unavailable()), reason="the C library is not there")
class TestSteps:
    """Each in a process of its own, which forks, or whose arithmetic changes."""

    @staticmethod
    def run(what):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FUSEDNORM_BACKEND": "cpu"}
        done = python(__file__, what, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    def test_flushing_changes_no_bit(self):
        assert self.run("flushed") == []

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
    def test_a_forked_child_does_not_hang(self):
        assert self.run("forked")[-1] == "all"


if __name__ == "__main__":
    torch.set_num_threads(2)
    {"flushed": flushed, "forked": forked}[sys.argv[1]]()
