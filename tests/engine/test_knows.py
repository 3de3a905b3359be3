"""Backends say what they know, and are given nothing else; one as of version 0.2 knows two operations."""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from every_operation import (
    DIFFERENTIATED,
    FUNCTIONS,
    called,
    clones,
    function_of,
    gradients,
    same,
    without_outputs,
)
from processes import python

import fusednorm
from fusednorm.backends import cpu, reference
from fusednorm.calls.call import ACTIVATIONS, Backward, Call, Forward
from fusednorm.engine import choose

from fast_calls import close_fast_path

#: The folders of ``every_operation`` and of what it imports.
TESTS = os.pathsep.join(str(Path(__file__).parents[1] / folder) for folder in (".", "operations"))
#: Arguments of functions that are no operands, with values that are not the default.
FLAGS = {
    "bias": torch.ones(6),
    "x_scale": 0.3,
    "weight_offset": 1.0,
    "round_sum": False,
    "round_norm": True,
    "norm": False,
}
FLAGS |= {"between": torch.float32, "out_dtype": torch.float16, "residual_dtype": torch.float16, "interleaved": True}
FLAGS |= {"round_products": True, "activation": "sigmoid", "norm_before_gate": False, "group_size": 3, "next_eps": 1e-2}
FLAGS["norm"] = False


@pytest.fixture
def old(monkeypatch):
    """A backend as of 0.2, which reads the fields of that version; the kinds of calls that it was given."""
    monkeypatch.setattr(choose, "_registered", {})
    monkeypatch.setattr(choose, "_selected", {})
    close_fast_path(monkeypatch)
    given = []

    def forward(call):
        given.append(type(call))
        operation = call.operation
        flags = (
            call.eps,
            call.weight_offset,
            operation.round_sum,
            operation.round_norm,
            operation.out,
            operation.residual,
        )
        y, total, rstd = reference.outputs(call.x, call.residual, call.weight, *flags)
        call.out.copy_(y)
        for output, value in ((call.residual_out, total), (call.rstd, rstd)):
            if output is not None:
                output.copy_(value)

    def backward(call):
        given.append(type(call))
        reference.backward(call)

    name = SimpleNamespace(DEVICES=("cpu",), unavailable=list, unsuitable=lambda _: [], plan=lambda _: "old")
    name.forward, name.backward = forward, backward
    fusednorm.register_backend("old", name)
    return given


def calls(name):
    """The function's operands alone, and with each flag."""
    operands = without_outputs(FUNCTIONS[name])
    yield operands
    for flag in inspect.signature(function_of(name)).parameters:
        if flag in FLAGS and not (flag == "between" and operands.get("norm_before_gate") is False):
            yield operands | {flag: FLAGS[flag]}
        if flag == "activation":
            yield from (operands | {flag: activation} for activation in ACTIVATIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backend_of_an_older_version(name, old):
    """Every operation with every flag: the reference's bits, and only calls that version 0.2 had; or a refusal."""
    compared = 0
    for operands in calls(name):
        try:
            with fusednorm.use_backend("reference"):
                wanted = called(function_of(name), clones(operands))
        except (TypeError, ValueError):  # a flag that these operands cannot have
            continue
        compared += 1
        with fusednorm.use_backend("old"):
            if "layer_norm" in name:
                with pytest.raises(fusednorm.BackendError, match="old: its kernels have no center"):
                    called(function_of(name), clones(operands))
                continue
            found = called(function_of(name), clones(operands))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, wanted, strict=True)), operands
    assert compared > 0
    assert set(old) <= {Forward, Backward}


#: All names that version 0.3 had.
KNOWN_IN_0_3 = {"residual_dtype", "norm_before_add", "affine", "x_scale", "center", "quantize", "round_scale", "gate"}
KNOWN_IN_0_3 |= {"gate_backward", "gate_steps", "gate_interleaved", "softcap", "norm_gated", "norm_gated_backward"}
KNOWN_IN_0_3 |= {"rotate", "affine_backward", "log_prob", "log_prob_backward", "log_prob_parts"}


@pytest.mark.compiled
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_backend_of_version_0_3(name, old):
    """Every operation with every flag and function of gates: the reference's bits, and no function but silu."""
    backend, functions = choose.load("old"), []
    backend.KNOWS = frozenset(KNOWN_IN_0_3 - {"residual_dtype"})  # of norms the C library lacks it

    def forward(call):
        functions.extend([call.activation] if hasattr(call, "activation") else [])
        cpu.forward(call)

    def backward(call):
        functions.extend([call.activation] if hasattr(call, "activation") else [])
        cpu.backward(call)

    backend.forward, backend.backward = forward, backward
    for operands in calls(name):
        found = []
        for request in ("reference", "old"):
            given = clones(operands)
            leaves = [given[key].requires_grad_() for key in DIFFERENTIATED.get(name, ())]
            try:
                with fusednorm.use_backend(request):
                    results = called(function_of(name), given)
                    found.append([*results, *(gradients(results, leaves) if leaves else [])])
            except (TypeError, ValueError):  # a flag that these operands cannot have
                continue
        assert len(found) != 1, operands
        assert not found or same(*found), operands
    assert set(functions) <= {"silu", "softcap"}


@pytest.mark.compiled
def test_a_younger_flag_is_asked_about_and_breaks_nothing():
    """A field with a default at the end of the flags of norms; in a process of its own, whose module has it."""
    program = Path(__file__).with_name("younger_flag.py")
    done = python(program, env=os.environ | {"PYTHONPATH": TESTS})
    assert done.returncode == 0, done.stderr


def test_a_backend_that_knows_gates_is_given_them(old):
    backend = choose.load("old")
    taken = []

    def forward(call):
        taken.append(call.name)
        call.out.copy_(call.y * torch.sigmoid(call.z))

    backend.KNOWS, backend.forward = frozenset(("gate", "gate.sigmoid")), forward
    y, z = torch.randn(2, 3, 8)
    with fusednorm.use_backend("old"):
        found = fusednorm.gate(y, z, activation="sigmoid")
        assert fusednorm.explain(y, function=fusednorm.gate).plan == "old; the rows are gated by a call of its own"
    assert torch.equal(found, y * torch.sigmoid(z))
    assert taken == ["gate"]


def test_elements_that_take_turns_for_a_backend_without_them(old):
    """It is given rows apart; their gradients are the formula's, in one tensor."""
    backend, taken = choose.load("old"), []
    backend.KNOWS = frozenset(("gate", "gate_backward"))

    def forward(call):
        taken.append(call.interleaved)
        call.out.copy_(call.y * call.z * torch.sigmoid(call.z))

    backend.forward = forward
    both, d = torch.randn(2, 16, requires_grad=True), torch.randn(2, 8)
    with fusednorm.use_backend("old"):
        (found,) = torch.autograd.grad(fusednorm.silu_and_mul(both, interleaved=True), both, d)
    with fusednorm.use_backend("reference"):
        (wanted,) = torch.autograd.grad(fusednorm.silu_and_mul(both, interleaved=True), both, d)
    assert torch.equal(found, wanted)
    assert taken == [False]
    assert old == []


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_in_one_tensor_by_a_backend_of_others(old, interleaved):
    """The halves, or every second element, are outputs that lie apart."""
    backend, both = choose.load("old"), torch.randn(4, 32, requires_grad=True)
    backend.KNOWS, backend.forward, backend.backward = cpu.KNOWS, cpu.forward, cpu.backward
    found = []
    for request in ("old", "reference"):
        with fusednorm.use_backend(request):
            y = fusednorm.silu_and_mul(both, interleaved=interleaved)
            found += torch.autograd.grad(y, both, torch.ones_like(y))
    assert torch.equal(*found)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["modulate", "qk_norm_rope", "selected_log_prob"])
def test_gradients_are_those_of_the_backend_of_the_results(old, name):
    """The backward pass may begin where another backend is in force, or none."""
    backend, taken = choose.load("old"), []
    backend.KNOWS = cpu.KNOWS

    def run(call):
        taken.append((call.name if isinstance(call, Call) else "norm", isinstance(call, Backward) or call.backward))
        cpu.forward(call)

    backend.forward = backend.backward = run
    operands = clones(without_outputs(FUNCTIONS[name]))
    leaves = [operands[key].requires_grad_() for key in DIFFERENTIATED[name]]
    with fusednorm.use_backend("old"):
        results = called(function_of(name), operands)
    assert [backward for _, backward in taken] == [False]
    taken.clear()
    gradients(results, leaves)
    assert taken == {"modulate": [("modulate", True)], "selected_log_prob": [("selected", True)]}.get(
        name, [("rotate", False), ("norm", True), ("norm", True)]
    )


def test_a_backend_is_asked_about_the_whole_operation(old):
    """A quantizer that it refuses is torch's, after the norm that it takes."""
    backend, asked = choose.load("old"), []
    backend.KNOWS = frozenset(("quantize",))

    def unsuitable(operation):
        asked.append(operation.step)
        return [] if operation.step is None else ["no groups"]

    backend.unsuitable = unsuitable
    quantization = fusednorm.quantizations.VLLM_INT8_TOKEN_CPU
    x = torch.randn(2, 8)
    with fusednorm.use_backend("reference"):
        wanted = fusednorm.rms_norm_quant(x, quantization=quantization)
    with fusednorm.use_backend("old"):
        found = fusednorm.rms_norm_quant(x, quantization=quantization)
    assert all(map(torch.equal, found, wanted))
    assert set(old) == {Forward}
    assert [step.quantization for step in asked if step is not None] == [quantization]
