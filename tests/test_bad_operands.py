"""Each operand of each public function, of each wrong kind: the error names it, and a cure in the caller's words."""

import inspect
import re

import pytest
import torch

import fusednorm
from fusednorm.quantizations import VLLM_INT8_STATIC_AZP, VLLM_INT8_TOKEN_AZP_CPU

X, WEIGHT = torch.ones(4, 6), torch.ones(6)
Q, TABLE = torch.ones(4, 2, 6), torch.ones(4, 3)
NUMBERS, SCALES = torch.ones(4, 6, dtype=torch.int8), torch.ones(4, 1)
ADDED = {"x": X, "residual": X + 1, "weight": WEIGHT}
AFFINE = {"bias": WEIGHT + 1}
OUT = {"out": torch.empty(4, 6)}
RESIDUAL_OUT = {"residual_out": torch.empty(4, 6)}
QUANTIZED = {"quantization": VLLM_INT8_TOKEN_AZP_CPU, "out": NUMBERS, "scale_out": SCALES}
QUANTIZED |= {"zero_point_out": SCALES.int()}
GIVEN = {"quantization": VLLM_INT8_STATIC_AZP, "scale": torch.ones(1), "zero_point": torch.ones(1).int()}
NORMED = {"normed_out": torch.empty(4, 6)}
TURN = {"cos": TABLE, "sin": TABLE + 1, "positions": torch.arange(4)}
HEADS = {"q": Q, "k": Q + 1, "q_weight": WEIGHT, "k_weight": WEIGHT + 1, **TURN}

OPERANDS = {
    "fused_add_rms_norm": ADDED | AFFINE | OUT | RESIDUAL_OUT,
    "fused_add_rms_norm_": ADDED | AFFINE,
    "fused_add_rms_norm_quant": ADDED | QUANTIZED | NORMED | RESIDUAL_OUT,
    "gate": {"y": X, "z": X + 1} | OUT,
    "gate_": {"y": X, "z": X + 1},
    "gelu_tanh_and_mul": {"gate": X, "up": X + 1} | OUT,
    "l2_norm": {"x": X} | OUT,
    "qk_norm_rope": HEADS | {"q_out": torch.empty(4, 2, 6), "k_out": torch.empty(4, 2, 6)},
    "qk_norm_rope_": HEADS,
    "quantize": {"y": X} | QUANTIZED,
    "rms_norm": {"x": X, "weight": WEIGHT} | AFFINE | OUT,
    "rms_norm_": {"x": X, "weight": WEIGHT} | AFFINE,
    "rms_norm_add": ADDED | RESIDUAL_OUT,
    "rms_norm_add_": ADDED,
    "rms_norm_add_rms_norm": ADDED | {"next_weight": WEIGHT + 1} | OUT | RESIDUAL_OUT,
    "rms_norm_add_rms_norm_": ADDED | {"next_weight": WEIGHT + 1},
    "rms_norm_gated": {"x": X, "gate": X + 1, "weight": WEIGHT},
    "rms_norm_gated_": {"x": X, "gate": X + 1, "weight": WEIGHT},
    "rms_norm_quant": {"x": X, "weight": WEIGHT} | QUANTIZED | NORMED,
    "rotate": {"x": Q} | TURN | {"out": torch.empty(4, 2, 6)},
    "silu_and_mul": {"gate": X, "up": X + 1} | OUT,
    "silu_and_mul_quant": {"gate": X, "up": X + 1} | GIVEN,
}
WRONG = {
    "no tensor": lambda t: 3,
    "an array": lambda t: t.numpy(),
    "a dtype": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "a device": lambda t: t.to("meta"),
    "rows": lambda t: torch.cat((t, t, t)),
    "no dimension": lambda t: t.flatten()[0],
}
#: Right, though another shape: the only operand with rows, one element without a dimension, one position for all.
FITS = {("rms_norm_", "x", "rows")} | {(key, "no dimension") for key in ("scale", "zero_point", "positions")}
#: What is right alone, and then does not fit the others, which are named.
OF_ROWS = {"x", "y", "q", "k", "gate", "residual", "up", "cos", "sin"}


def refused(function, operands):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**operands)
    named = set(re.findall(r"\b(\w+)\.(?:clone|detach|device|double|float|to|to_dense|values)\b", str(caught.value)))
    assert named <= {*inspect.signature(function).parameters, "torch"}, "the cure names arguments of this function"
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", OPERANDS)
def test_a_bad_operand_is_named(name, wrong):
    function, operands = getattr(fusednorm, name), OPERANDS[name]
    function(**{key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in operands.items()})
    tensors = [key for key, t in operands.items() if isinstance(t, torch.Tensor)]
    for key in tensors:
        if FITS & {(name, key, wrong), (key, wrong)}:
            continue
        message = refused(function, operands | {key: WRONG[wrong](operands[key])})
        if not (key in OF_ROWS and wrong in ("a device", "rows")):
            assert re.match(rf"{key} (must|is|has two)\b", message), (key, message)


def test_every_function_with_operands_is_here():
    operations = set(fusednorm.__all__) - {"accelerate_torch", "backends", "contract", "explain", "prewarm"}
    operations -= {"quantizations", "register_backend", "use_backend"}
    assert set(OPERANDS) == {name for name in operations if name[0].islower()}
