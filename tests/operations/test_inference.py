"""Compiled graphs without gradients, in which one operator is a whole call: ``fusednorm/operations/inference.py``."""

import pytest
import torch
from every_operation import FUNCTIONS, function_of, without_outputs

import fusednorm
from fusednorm.operations import inference

NAMES = [function.__name__ for function in inference.FUNCTIONS]


def halves(operands):
    """In bfloat16 no compiler leaves out a rounding unseen."""
    like = {key: t for key, t in operands.items() if "scale" not in key}
    halved = {key: t.bfloat16() for key, t in like.items() if getattr(t, "dtype", None) is torch.float32}
    return {key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in (operands | halved).items()}


def asked(operands):
    """The arguments of the operator: it has no default values before its quantization, which is a text."""
    if "quantization" not in operands:
        return operands
    return operands | {"quantization": str(operands["quantization"])} | ({"eps": 1e-6} if "x" in operands else {})


def equal(a, b):
    return a is b if not isinstance(a, torch.Tensor) else a.dtype == b.dtype and a.equal(b)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_the_function(name):
    """Results, and gradients, which a graph has where somebody asks later; torch's own check of an operator."""
    function, operands = function_of(name), halves(without_outputs(FUNCTIONS[name]))
    operator = getattr(torch.ops.fusednorm, f"{name}_inference")
    wanted, found = function(**operands), operator(**asked(operands))
    wanted, found = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (wanted, found))
    assert all(map(equal, found, [t for t in wanted if t is not operands.get("scale")]))
    torch.library.opcheck(operator.default, (), asked(operands))
    if "quantization" in operands:  # 8-bit numbers have no gradients
        return
    leaves = [t.requires_grad_() for key, t in operands.items() if t.is_floating_point() and key not in ("cos", "sin")]
    results = [function(**operands), operator(**operands)]
    both = [[t] if isinstance(t, torch.Tensor) else list(t) for t in results]
    of_function, of_operator = (torch.autograd.grad(found, leaves, both[0]) for found in both)
    assert all(map(equal, of_operator, of_function))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_operand_is_named(name):
    """By the function, whose checks the operator has."""
    operands = asked(without_outputs(FUNCTIONS[name]))
    first = next(iter(operands))
    with pytest.raises(TypeError, match=f"^{first} must be float16"):
        getattr(torch.ops.fusednorm, f"{name}_inference")(**operands | {first: operands[first].int()})


def test_a_graph_with_gradients_has_the_plain_operators():
    """They keep what the backward pass needs, so it does not make the forward pass again."""
    x = torch.ones(4, 6, requires_grad=True)
    seen = set()

    def backend(graph, inputs):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(fusednorm.rms_norm, backend=backend)(x, torch.ones(6))
    torch._dynamo.reset()
    assert "fusednorm.rms_norm" in seen


def test_an_exported_program_has_the_plain_operators():
    """Other programs know them, such as the ONNX exporter; strict, which has Dynamo trace it."""

    class Program(torch.nn.Module):
        def forward(self, x):
            return fusednorm.rms_norm_add(x, x)

    graph = torch.export.export(Program(), (torch.ones(4, 6),), strict=True).graph
    assert not [node for node in graph.nodes if str(node.target).endswith("_inference.default")]
