"""Each argument of each operator of ``torch.ops.fusednorm``, of each wrong kind: the error names it."""

import re

import pytest
import torch
from every_operation import BF16, F32, OPERATORS, RIGHT, WEIGHT, WITHOUT_GRADIENT, clones, have_gradients

from fusednorm.quantizations import VLLM_INT8_TOKEN_CPU
from fusednorm.torch_ops.registered import exported

#: Wrong tensors. Nested ones are missing: these refuse all operators, in torch's words.
TENSORS = {
    "no number": lambda t: t.to(torch.complex64),
    "an integer": lambda t: t.to(torch.int16),
    "wider": lambda t: t.double(),
    "rows": lambda t: torch.cat((t, t, t)),
    "columns": lambda t: torch.cat((t, t, t), -1),
    "no dimension": lambda t: t.flatten()[0],
    "one dimension more": lambda t: t.expand(4, *t.shape).contiguous(),
    "sparse": lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device, layout=torch.sparse_coo),
    "a device": lambda t: torch.ones_like(t, device="cpu" if t.is_meta else "meta"),
}
OTHERS = {
    torch.dtype: [torch.int8, torch.complex64, torch.float64],
    type(None): [torch.int8, torch.float32],  # `between` of a gate: only what rounds
    list: [[], [True], [True] * 5],
    str: ["relu"],
}
#: The only operand with rows, a weight with a row for each head, the operand that decides dtypes, rows of any length.
FITS = {("rms_norm", "x", "rows"), ("rms_norm_", "x", "rows"), ("affine", "n", "rows")}
FITS |= {(name, "x", kind) for name in ("rms_norm", "rms_norm_") for kind in ("wider", "one dimension more")}
FITS |= {
    (name, "x", kind) for name in ("layer_norm", "layer_norm_") for kind in ("rows", "wider", "one dimension more")
}
FITS |= {(name, "x", "wider") for name in ("fused_add_rms_norm", "fused_add_rms_norm_", "into", "add")}
_LAYER_NORMS = ("fused_add_layer_norm", "fused_add_layer_norm_")
FITS |= {(name, "x", "wider") for name in _LAYER_NORMS}
_LAYER_NORMS += ("layer_norm", "layer_norm_", "into", "layer_norm_backward")
FITS |= {(name, key, "one dimension more") for name in _LAYER_NORMS for key in ("weight", "bias")}
FITS |= RIGHT
FITS |= {("affine", "n", "one dimension more"), ("affine", "n", "wider"), ("affine_backward", "n", "wider")}
FITS |= {(name, key, "one dimension more") for name in ("affine", "affine_backward") for key in ("weight", "bias")}
FITS |= {("rotate", "x", kind) for kind in ("wider", "columns", "one dimension more")}
FITS |= {("rotate", key, "wider") for key in ("cos", "sin")}
FITS |= {(name, key, "wider") for name in ("gate", "gate_backward") for key in ("y", "z")}
FITS |= {("quantize", "y", kind) for kind in ("wider", "rows", "columns", "one dimension more")}
FITS |= {("quantize", key, "no dimension") for key in ("scale", "zero_point")}


#: Right alone: the error names what then does not fit it.
NAMED = {("rotate", "x", "rows"): "cos"}
NAMED |= {("attention_backward", "v", "columns"): "d"}
for name in ("attention", "attention_backward", "paged_attention"):
    NAMED |= {(name, "q", kind): "k" for kind in ("rows", "columns", "wider")}


def wrong(name, key, value):
    """Wrong values of an argument, by what is wrong with them."""
    if isinstance(value, torch.Tensor):
        return {kind: make(value) for kind, make in TENSORS.items() if (name, key, kind) not in FITS}
    others = {repr(other): other for other in OTHERS.get(type(value), []) if other != value}
    if name == "rotate":  # its gradient has the dtype of what was rotated, which may be float64
        others.pop("torch.float64", None)
    return others


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_argument_is_named(name, device):
    """By the function, and by the one that tells shapes and dtypes alone."""
    operator = getattr(torch.ops.fusednorm, name)
    arguments = clones(OPERATORS[name], lambda t: t.to(device))
    operator(**clones(arguments))
    for key, value in arguments.items():
        for kind, other in wrong(name, key, value).items():
            with pytest.raises((TypeError, ValueError)) as caught:
                operator(**arguments | {key: other})
            named = NAMED.get((name, key, kind), key)
            assert re.search(rf"\b{named}\b", str(caught.value)), (key, kind, str(caught.value))


@pytest.mark.parametrize("name", OPERATORS)
def test_right_arguments_fit(name):
    """What the test above leaves out as right."""
    operator = getattr(torch.ops.fusednorm, name)
    for _, key, kind in {fits for fits in FITS if fits[0] == name}:
        arguments = clones(OPERATORS[name])
        if kind != "a device":
            operator(**arguments | {key: TENSORS[kind](arguments[key])})


#: What a call without optional tensors has in their place, where that is not None alone.
WITHOUT = {"quantize": {"quantization": str(VLLM_INT8_TOKEN_CPU)}, "affine": {"weight": WEIGHT}}


def narrow(operands):
    """In bfloat16, but for what an operator has in the type of the computation, and for its results."""
    others = {
        key: value
        for key, value in operands.items()
        if key not in ("rstd", "n", "m", "s", "entropy", "scale", "weight_scale")
    }
    return operands | {key: t.bfloat16() for key, t in others.items() if getattr(t, "dtype", None) is F32}


def narrow_results(operands):
    """Results in bfloat16."""
    return operands | {key: BF16 for key, value in operands.items() if value is F32}


CHECKS = {"test_aot_dispatch_dynamic", "test_autograd_registration", "test_faketensor", "test_schema"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.14
@pytest.mark.parametrize("name", OPERATORS)
def test_torchs_checks(name):
    """Of schemas, autograd, fake tensors and tracing: with several dtypes, and without optional tensors."""
    operator, whole = getattr(torch.ops.fusednorm, name).default, OPERATORS[name]
    absent = {a.name: None for a in operator._schema.arguments if str(a.type) == "Optional[Tensor]"}
    if "needs" in whole:
        absent["needs"] = [True] + [False] * (len(whole["needs"]) - 1)
    recorded = not (operator._schema.is_mutable or "backward" in name or name in WITHOUT_GRADIENT)
    for given in (whole, narrow(whole), narrow_results(whole), whole | absent | WITHOUT.get(name, {})):
        for with_gradients in (False, True)[: 1 + recorded]:
            operands = clones(given)
            for key in have_gradients(given) if with_gradients else ():
                operands[key].requires_grad_()
            # What is traced with gradients is traced without them, too.
            left_out = {"test_aot_dispatch_dynamic"} if recorded and not with_gradients else set()
            torch.library.opcheck(operator, (), operands, test_utils=sorted(CHECKS - left_out))


def test_every_operator_is_here():
    assert set(OPERATORS) == set(exported())
    for name, arguments in OPERATORS.items():
        schema = getattr(torch.ops.fusednorm, name).default._schema
        assert set(arguments) == {argument.name for argument in schema.arguments}
