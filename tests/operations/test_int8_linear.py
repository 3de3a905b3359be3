"""Products of int8: errors, long calls, and the module."""

import copy
import io
import pickle

import pytest
import torch

import fusednorm
from fusednorm import Int8Linear
from fusednorm.quantizations import VLLM_INT8_TOKEN_CPU

Q, WEIGHT = (
    torch.randint(-128, 128, (n, 40), generator=torch.Generator().manual_seed(n)).to(torch.int8) for n in (3, 5)
)
GIVEN = {"q": Q, "scale": torch.ones(3, 1), "weight": WEIGHT, "weight_scale": torch.ones(5)}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": Q.float()}, TypeError, r"q must be int8, got float32; fusednorm\.quantize makes it"),
        (
            {"scale": torch.ones(3)},
            ValueError,
            r"scale must have shape \[3, 1\].*got \[3\]; pass scale\.unsqueeze\(-1\)",
        ),
        ({"scale": torch.ones(3, 1).double()}, TypeError, "scale must be float32, got float64"),
        ({"weight": WEIGHT.t()}, ValueError, r"weight must be \[N, 40\].*got shape \[40, 5\]; pass weight\.t\(\)"),
        ({"weight_scale": torch.ones(4)}, ValueError, r"weight_scale must have shape \[5\]"),
        ({"bias": torch.ones(5).double()}, TypeError, "bias must be float16 or bfloat16 or float32, got float64"),
        ({"zero_point": torch.ones(3, 1)}, TypeError, "zero_point must be int32, got float32"),
        ({"q": Q[:, :0], "weight": WEIGHT[:, :0]}, ValueError, r"q must be \[\.\.\., K\] with K of 1 to 131071"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype must be float16, bfloat16 or float32, got int8"),
        ({"out": torch.zeros(3, 5).double()}, TypeError, "out must be float32, got float64"),
        ({"out": torch.zeros(3, 4)}, ValueError, r"out must have.*\[3, 5\]"),
        ({"weight_scale": torch.ones(5, requires_grad=True)}, RuntimeError, "products of int8 have no gradients"),
    ],
)
def test_errors(changes, error, words):
    with pytest.raises(error, match=words):
        fusednorm.int8_linear(**GIVEN | changes)


def test_too_long_rows():
    q = torch.zeros(1, 131_072, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"so that int32 holds each sum.*add up products of parts of K"):
        fusednorm.int8_linear(q, torch.ones(1, 1), q, torch.ones(1))


def test_no_rows_and_no_columns():
    for rows, columns in ((0, 5), (3, 0)):
        given = GIVEN | {"q": Q[:rows], "scale": torch.ones(rows, 1)}
        given |= {"weight": WEIGHT[:columns], "weight_scale": torch.ones(columns)}
        assert fusednorm.int8_linear(**given).shape == (rows, columns)


def linear(bias=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Linear(40, 5, bias, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@torch.no_grad()
def test_a_call(bias, dtype):
    like = linear(bias, dtype).eval()
    module, x = Int8Linear.from_linear(like), torch.randn(2, 3, 40).to(dtype)
    weight, scale = module.weight, module.weight_scale
    expected = (like.weight.double() / scale).round()
    assert torch.equal(weight, expected)
    greatest = like.weight.double().abs().amax(-1, keepdim=True)
    before = scale.to(dtype).nextafter(torch.zeros(1, dtype=dtype))
    assert torch.equal(scale.to(dtype), scale)
    assert (scale.double() * 127 >= greatest * (1 - 2**-24)).all()  # the division is rounded
    assert (before.double() * 127 < greatest).all()
    assert not module.training
    q, of_rows = fusednorm.quantize(x, quantization=VLLM_INT8_TOKEN_CPU)
    expected = fusednorm.int8_linear(q, of_rows, weight, scale, like.bias, out_dtype=dtype)
    assert torch.equal(module(x), expected)
    assert (module(x) - like(x)).abs().max() < 0.1
    assert repr(module) == f"Int8Linear(in_features=40, out_features=5, bias={bias})"
    assert [step.operation for step in fusednorm.contract(module).steps] == ["quantize", "int8_linear"]


@torch.no_grad()
def test_conversions():
    """Scales stay float32, and their bits too, whatever the module is converted to; copies are alike."""
    module = Int8Linear.from_linear(linear())
    scales, x = module.weight_scale.clone(), torch.randn(3, 40)
    for convert in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.float32),
        lambda m: m.double().float(),
    ):
        convert(module)
        assert torch.equal(module.weight_scale, scales)
        assert module.weight.dtype is torch.int8
    expected = module(x)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded = Int8Linear(40, 5)
    loaded.load_state_dict(torch.load(buffer))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x), expected)
    assert list(module.state_dict()) == ["weight", "weight_scale", "bias"]
    assert b"fusednorm.operations" not in pickle.dumps(module)  # a saved model has the public name
    assert module.to("meta").weight_scale.is_meta


def test_modules_that_are_refused():
    with pytest.raises(RuntimeError, match="Int8Linear has no gradients, and x requires grad"):
        Int8Linear.from_linear(linear())(torch.randn(3, 40, dtype=torch.bfloat16, requires_grad=True))
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Linear.*got Embedding"):
        Int8Linear.from_linear(torch.nn.Embedding(4, 4))
    with pytest.raises(ValueError, match="a weight with a shape"):
        Int8Linear.from_linear(torch.nn.LazyLinear(4))
    for given, error in (((Q.float(), torch.ones(3)), TypeError), ((Q, torch.ones(4)), ValueError)):
        with pytest.raises(error):
            Int8Linear.from_int8(*given)
    wrong = linear()
    wrong.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="a weight of finite numbers"):
        Int8Linear.from_linear(wrong)
