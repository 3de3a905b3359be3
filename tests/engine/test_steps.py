"""Calls on ``cpu`` after a fork, and of a caller that flushes subnormals: steps that are torch's operations too."""

import os
import signal
import subprocess
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
    HEADS,
    IN_PLACE,
    K,
    MORE,
    WEIGHT,
    Q,
    X,
    clones,
    function_of,
    have_gradients,
    partly,
    tensors,
    without_outputs,
)

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cpu

TABLES = {name: HEADS[name] for name in ("cos", "sin")}
TINY = 2.0**-130
PACKED = Quantization(torch.int8, round_scale="up_to_power_of_two", scale_dtype=torch.int32)
STATIC = {"quantization": quantizations.VLLM_FP8_STATIC}
#: Calls with flags that have steps of their own, beside those of every_operation.py.
STEPS = {
    "residual_dtype": (partly(fusednorm.fused_add_rms_norm, residual_dtype=BF16), ADDED),
    "residual_dtype, wider": (
        partly(fusednorm.fused_add_rms_norm, residual_dtype=F32),
        HALF | {"residual": X.to(BF16)},
    ),
    "residual_dtype with a bias": (partly(fusednorm.fused_add_rms_norm, residual_dtype=BF16), ADDED | {"bias": BIAS}),
    "residual_dtype, unrounded": (partly(fusednorm.fused_add_rms_norm, residual_dtype=BF16, round_sum=False), ADDED),
    "residual_dtype, centered": (partly(fusednorm.fused_add_layer_norm, residual_dtype=BF16), ADDED | {"bias": BIAS}),
    "residual_dtype after a norm": (partly(fusednorm.rms_norm_add, residual_dtype=BF16), ADDED),
    "unrounded sum": (partly(fusednorm.fused_add_rms_norm, round_sum=False), HALF | {"residual": X.to(BF16)}),
    "heads of a bias": (fusednorm.rms_norm, {"x": Q, "weight": WEIGHT, "bias": K[1]}),
    "x_scale": (partly(fusednorm.fused_add_rms_norm, x_scale=0.3), ADDED),
    "rotation in pairs": (partly(fusednorm.rotate, interleaved=True), {"x": Q, **TABLES}),
    "given scales of rows": (fusednorm.quantize, STATIC | {"y": X, "scale": torch.ones(4, 1)}),
    "given scales of columns": (fusednorm.rms_norm_quant, STATIC | {"x": X, "scale": torch.ones(1, 6)}),
    "a given scale": (fusednorm.quantize, STATIC | {"y": X, "scale": torch.full((1,), TINY)}),
    "scales of powers of two": (fusednorm.quantize, {"y": X, "quantization": PACKED}),
    "operands that are copied": (fusednorm.rms_norm, {"x": X.mT.contiguous().mT, "weight": WEIGHT}),
    "a sum alone": (lambda **given: fusednorm.fused_add_rms_norm(**given)[1], ADDED),
}


def many(tensor):
    """So many rows that torch's operations use threads; a third of the numbers is subnormal."""
    if not tensor.dim() or tensor.shape[0] != 4:
        return tensor.clone()
    found = tensor.repeat(4096, *[1] * (tensor.dim() - 1))
    if tensor.is_floating_point():
        found[::3] *= TINY
    return found if tensor.is_contiguous() else found.mT.contiguous().mT


def calls():
    """Functions with operands by name; functions in place write copies."""
    for name, (function, operands) in {
        **{n: (function_of(n), o) for n, o in FUNCTIONS.items()},
        **MORE,
        **STEPS,
    }.items():
        yield name, function, clones(without_outputs(operands), many)


def results(function, operands, incoming=None):
    """Those of a call, and the gradients where there are some; the incoming gradients are made if they are not given."""
    found = function(**operands)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    leaves = [t for t in operands.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return found, None
    incoming = incoming or [t.detach().cos() for t in found]
    return found + list(torch.autograd.grad(found, leaves, incoming)), incoming


def main():
    """Prints the names of calls that hang in a forked child, and of those that flushing changes."""
    torch.set_num_threads(2)
    skipped = sys.argv[1:]
    made, changed = [], []
    for name, function, operands in calls():
        if name in skipped:
            continue
        differentiable = not (name in IN_PLACE or name == "offset" or "quant" in name or "quantization" in operands)
        if differentiable:
            for key in have_gradients(operands):
                operands[key].requires_grad_()
        copy = lambda: clones(operands) if not differentiable else operands
        first, incoming = results(function, copy())
        for flush in (True, False):
            torch.set_flush_denormal(flush)
            try:
                try:
                    again, _ = results(function, copy(), incoming)
                except ValueError as error:
                    again = []
            finally:
                torch.set_flush_denormal(False)
            same = len(first) == len(again) and all(
                a.float()
                .view(torch.int32)
                .eq(b.float().view(torch.int32))
                .logical_or(a.float().isnan() & b.float().isnan())
                .all()
                for a, b in zip(first, again, strict=True)
            )
            if not same:
                changed.append(
                    (
                        name,
                        flush,
                        [
                            (a.float() != b.float()).logical_and(~a.float().isnan()).sum().item()
                            for a, b in zip(first, again)
                        ],
                    )
                )
        made.append((name, function, copy(), incoming))
    torch.ones(1 << 20) * 2
    hung, at = [], 0
    while at < len(made):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            for name, function, operands, incoming in made[at:]:
                signal.alarm(5)
                results(function, operands, incoming)
                os.write(write, b".")
            os._exit(0)
        os.close(write)
        done = 0
        while chunk := os.read(read, 100):
            done += len(chunk)
        status = os.waitpid(child, 0)[1]
        if status:
            hung.append((made[at + done][0], status))
        at += done + 1
    for n in hung:
        print("hang", n)
    for n in changed:
        print("flush", n)


if __name__ == "__main__":
    main()
