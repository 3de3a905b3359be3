"""The first calls of each kind, where backends prove themselves: `mutations.py --self-check` shows them its mutants.

A test fails where a backend was found to have other bits than the reference. Without a mutant none may be.
"""

import pytest
import torch
from every_operation import DIFFERENTIATED, FUNCTIONS, MORE, clones, function_of, gradients, recorded

import fusednorm
from fusednorm.conformance.test_quantized import PRESETS
from fusednorm.engine import self_check

pytestmark = pytest.mark.filterwarnings("error:the backend '.*' has other bits than the reference here:RuntimeWarning")

EVERY = {name: (function_of(name), operands) for name, operands in FUNCTIONS.items()} | MORE
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
QUANTIZATIONS = {name: one for name, one in PRESETS.items() if "STATIC" not in name and "TENSOR" not in name}
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "sigmoid")


@pytest.mark.parametrize("name", EVERY)
def test_each_function(name):
    """And in bfloat16, where what passes unrounded shows."""
    function, operands = EVERY[name]
    function(**clones(operands))
    rows = {k: t for k, t in operands.items() if isinstance(t, torch.Tensor) and t.dtype == torch.float32}
    function(**clones(operands | {k: t.bfloat16() for k, t in rows.items() if "scale" not in k}))


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name):
    outputs, leaves = recorded(name)
    gradients(outputs, leaves)


@pytest.mark.parametrize("hidden", [31, 128, 1500, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_rows(dtype, hidden):
    generator = torch.Generator().manual_seed(hidden)
    x, residual = torch.randn(2, 20, hidden, generator=generator).to(dtype)
    weight = x[0].clone()
    fusednorm.rms_norm(x, weight)
    fusednorm.fused_add_rms_norm(x, residual, weight)
    fusednorm.layer_norm(x, weight, weight)
    fusednorm.rms_norm_gated(x, residual, weight)
    fusednorm.log_softmax(x)
    fusednorm.linear(x, weight.expand(9, hidden))
    for activation in ACTIVATIONS:
        fusednorm.gate(x, residual, activation=activation)
    leaf = x.clone().requires_grad_()
    outputs = fusednorm.fused_add_rms_norm(leaf, residual, weight)[0], fusednorm.gate(leaf, residual)
    outputs += tuple(
        fusednorm.rms_norm_gated(leaf, residual, weight, norm_before_gate=first) for first in (True, False)
    )
    outputs += (fusednorm.selected_log_prob(leaf, torch.arange(60).view(20, 3) % hidden),)
    torch.autograd.grad(sum(y.sum() for y in outputs), leaf)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_quantizations(name):
    """Of each library, with a scale for each row or group."""
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(9))
    for dtype in (torch.bfloat16, torch.float32):
        fusednorm.quantize(x.to(dtype), quantization=QUANTIZATIONS[name])
        fusednorm.rms_norm_quant(x.to(dtype), x[0].to(dtype), quantization=QUANTIZATIONS[name])


def test_calls_were_compared():
    assert sum(map(len, self_check.compared.values())) > 100
