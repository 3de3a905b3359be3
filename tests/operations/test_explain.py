"""``explain`` of every function: the backend that it names is the one that the call takes."""

import pytest
import torch

import fusednorm
from fusednorm import Quantization, explain, quantizations
from fusednorm.calls.call import Step
from fusednorm.conformance.cases import BF16, F32, F64, Case, operands

X, RESIDUAL, WEIGHT = operands(Case(4, 64).of(F32))
TOKEN = quantizations.VLLM_INT8_TOKEN_CPU


def test_the_function_is_named():
    """Of the operation; the default is the function with these operands."""
    assert explain(X).operation.name == "rms_norm"
    assert explain(X, RESIDUAL).operation.name == "fused_add_rms_norm"
    for name in ("rms_norm_add", "rms_norm_add_rms_norm"):
        for function in (getattr(fusednorm, name), getattr(fusednorm, name + "_")):
            assert explain(X, RESIDUAL, function=function).operation.name == name


def test_a_norm_before_the_addition():
    operation = explain(
        *(X.bfloat16(), RESIDUAL, WEIGHT),
        function=fusednorm.rms_norm_add_rms_norm,
        next_weight=WEIGHT.bfloat16(),
        between=F32,
    ).operation
    assert (operation.weight, operation.first.weight, operation.first.between, operation.out) == (BF16, F32, F32, BF16)


def test_who_rotates(monkeypatch):
    heads = X.view(-1, 2, X.shape[-1] // 2)
    for function in (fusednorm.rotate, fusednorm.qk_norm_rope, fusednorm.qk_norm_rope_):
        assert explain(heads, function=function).plan.endswith("; heads are rotated in the same call")
        with fusednorm.use_backend("reference"):
            plan = explain(heads, function=function).plan
        assert plan == "plain torch operations; heads are rotated by torch's operations"
    asked = []
    monkeypatch.setattr(
        fusednorm.engine.choose.load("cpu"), "unsuitable", lambda of: asked.append(of.step) or ["no"] * bool(of.step)
    )
    assert explain(heads, function=fusednorm.rotate).plan.endswith("; heads are rotated by torch's operations")
    assert asked == [None, Step("rotate", None, (heads.dtype,))]


def test_who_multiplies_int8():
    q = torch.zeros(3, 8, dtype=torch.int8)
    plan = explain(q, function=fusednorm.int8_linear).plan
    assert plan.startswith("C kernels for")
    assert plan.endswith("; int8_linear runs by a call of its own")
    with pytest.raises(TypeError, match="q must be int8, got float32; pass q of int8_linear as x"):
        explain(q.float(), function=fusednorm.int8_linear)


def test_who_quantizes():
    assert explain(X, quantization=TOKEN).plan.endswith("; the rows are quantized in the same call")
    with fusednorm.use_backend("reference"):
        plan = explain(X, RESIDUAL, function=fusednorm.fused_add_rms_norm_quant, quantization=TOKEN).plan
    assert plan == "plain torch operations; the rows are quantized by torch's operations"


@pytest.mark.parametrize("function", [fusednorm.quantize, fusednorm.rms_norm_quant, fusednorm.silu_and_mul_quant])
def test_who_quantizes_with_scales_that_no_kernel_has(function):
    """Given scales of rows, columns and blocks; scales in another dtype."""
    static, own = quantizations.VLLM_FP8_STATIC, function is fusednorm.silu_and_mul_quant
    here = "by a call of its own" if own else "in the same call"
    packed = Quantization(torch.int8, round_scale="up_to_power_of_two", scale_dtype=torch.int32)
    for quantization, scale, wanted in (
        (static, None, here),
        (static, torch.ones(1), here),
        (static, torch.ones(4, 1), "by torch's operations"),
        (static, torch.ones(2, 2), "by torch's operations"),
        (packed, None, f"{here}, their scales are converted to int32 by torch's operations"),
    ):
        plan = explain(X, function=function, quantization=quantization, scale=scale).plan
        assert f"{plan};".count(f"; the rows are quantized {wanted};") == 1
    with fusednorm.use_backend("reference"):
        plan = explain(X, function=function, quantization=packed).plan
    assert plan.startswith("plain torch operations; the rows are quantized by torch's operations")
    assert "converted" not in plan


def test_who_gates():
    """A backend that has neither leaves both to torch; one without the chain makes two calls."""
    gated = (fusednorm.rms_norm_gated, fusednorm.rms_norm_gated_)
    alone = (fusednorm.gate, fusednorm.gate_, fusednorm.silu_and_mul, fusednorm.gelu_tanh_and_mul)
    for function in (*gated, *alone):
        by = "in the same call" if function in gated else "by a call of its own"
        assert explain(X, function=function).plan.endswith(f"; the rows are gated {by}")
        with fusednorm.use_backend("reference"):
            assert explain(X, function=function).plan.endswith("; the rows are gated by torch's operations")


def test_who_computes_a_function(monkeypatch):
    """A backend of gates may not know softcap."""
    functions = fusednorm.gelu, fusednorm.relu2, fusednorm.softcap
    for function in functions:
        name = function.__name__
        assert explain(X, function=function).plan.endswith(f"; {name} is computed by a call of its own")
        with fusednorm.use_backend("reference"):
            plan = explain(X, function=function).plan
        assert plan == f"plain torch operations; {name} is computed by torch's operations"
    cpu = fusednorm.engine.choose.load("cpu")
    monkeypatch.setattr(cpu, "KNOWS", cpu.KNOWS - {"softcap"})
    plans = [explain(X, function=function).plan for function in functions]
    assert [plan.endswith("by torch's operations") for plan in plans] == [False, False, True]


def test_who_multiplies_by_the_weights_of_heads():
    """One call of C; test_affine.py has a backend that knows no heads."""
    heads = torch.stack([WEIGHT] * 4)
    for operands_of_rows in ({"weight": heads}, {"bias": WEIGHT}, {"weight": heads, "bias": heads}):
        found = explain(X, **operands_of_rows)
        assert found.operation.features == ("affine",)
        assert not found.composed
    assert explain(X[:1], None, heads[:1]).operation == explain(X[:1], None, WEIGHT).operation  # one head has no others


def test_who_scales_x():
    scaled = explain(X, RESIDUAL, x_scale=0.22)
    assert scaled.operation.features == ("x_scale",)
    assert scaled.operation == explain(X, RESIDUAL, x_scale=3, function=fusednorm.fused_add_rms_norm_).operation
    assert not scaled.composed
    assert explain(X, RESIDUAL, bias=WEIGHT, x_scale=0.22).operation.features == ("affine", "x_scale")
    assert explain(X, RESIDUAL, x_scale=1).operation == explain(X, RESIDUAL).operation


def test_steps_of_torch_where_gradients_are_recorded():
    """As docs/faults.md lists them for the C kernels."""
    heads, q = torch.stack([WEIGHT] * 4), X.view(-1, 2, X.shape[-1] // 2)
    for arguments, words in (
        ({"x": X, "residual": RESIDUAL}, ()),
        ({"x": X, "weight": heads, "bias": heads}, ()),
        ({"x": X, "weight": heads, "bias": WEIGHT}, ("add up the gradients of the weight and the bias",)),
        ({"x": X, "residual": RESIDUAL, "x_scale": 0.5}, ("scale x",)),
        ({"x": X, "residual": RESIDUAL, "residual_dtype": BF16}, ("round the sum to residual_dtype",)),
        ({"x": X, "residual": RESIDUAL, "function": fusednorm.rms_norm_add}, ("add the residual",)),
        ({"x": q, "function": fusednorm.qk_norm_rope}, ("negate sin",)),
        ({"x": X, "quantization": TOKEN, "function": fusednorm.quantize}, ()),
    ):
        found = explain(**arguments)
        assert found.by_torch == words
        assert str(found).count("with gradients, torch's operations") == len(words)
        with fusednorm.use_backend("reference"):
            assert explain(**arguments).by_torch == ()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"function": torch.add}, TypeError, "function must be one of .*fused_add_rms_norm, .*, got 'add'"),
        ({"residual": "x"}, TypeError, "residual must be a torch.Tensor, got str"),
        (
            {"residual": RESIDUAL, "function": fusednorm.rms_norm_add_rms_norm, "next_weight": 3},
            TypeError,
            "next_weight must be a torch.Tensor, got int",
        ),
        (
            {"scale": 3, "quantization": Quantization(torch.int8, per="tensor")},
            TypeError,
            "scale must be a torch.Tensor, got int",
        ),
        ({"function": 3}, TypeError, "function must be one of .*silu_and_mul_quant, softcap, got 3"),
        ({"function": fusednorm.fused_add_rms_norm}, TypeError, "fused_add_rms_norm takes a residual"),
        ({"function": fusednorm.rms_norm_add}, TypeError, "rms_norm_add takes a residual"),
        ({"residual": RESIDUAL, "function": fusednorm.rms_norm_}, TypeError, "rms_norm_ takes no residual"),
        ({"weight": WEIGHT[:3]}, ValueError, r"weight must have shape \[64\]"),
        ({"bias": WEIGHT.to(F64)}, TypeError, "bias is float64 while x is float32"),
        ({"x_scale": 0.5}, TypeError, "rms_norm takes no x_scale; leave it out, or pass a function"),
        (
            {"residual": RESIDUAL, "bias": WEIGHT, "function": fusednorm.rms_norm_add},
            TypeError,
            "rms_norm_add takes no bias; leave it out",
        ),
        ({"residual": RESIDUAL, "x_scale": "2"}, TypeError, "x_scale must be a number, got str"),
        ({"between": BF16}, TypeError, "between must be None or torch.float32"),
        ({"scale": X}, TypeError, "scale is given, and the call takes none; leave it out"),
        ({"scale": X, "quantization": TOKEN}, TypeError, "or pass its quantization per='tensor'"),
        ({"quantization": "int8"}, TypeError, "quantization must be a fusednorm.Quantization, got str"),
        ({"quantization": quantizations.VLLM_FP8_BLOCK_FUSED}, ValueError, "groups of 128 elements, which do not"),
    ],
)
def test_what_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        explain(X, **arguments)


def test_the_function_goes_by_name():
    with pytest.raises(
        TypeError, match=r"x must be a torch.Tensor, got function; .* explain\(x, function=silu_and_mul\)"
    ):
        explain(fusednorm.silu_and_mul, X, X)
