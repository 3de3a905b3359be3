"""Numbers of functions are rounded to the type of the computation before anybody asks whether they change anything."""

import inspect
import math

import numpy as np
import pytest
import torch
from every_operation import BF16, DIFFERENTIATED, FUNCTIONS, clones, function_of, tensors, without_outputs

import fusednorm
from fusednorm import Quantization
from fusednorm.calls.scalars import in_float32

#: The number that changes nothing, of each argument that is one; None of those without.
NEUTRAL = {"eps": None, "next_eps": None, "weight_offset": 0.0, "x_scale": 1.0, "limit": math.inf, "alpha": 1.0}
NEUTRAL |= {"up_offset": 0.0, "cap": None, "softcap": None, "temperature": 1.0, "factor": 1.0}
#: What else decides whether a number changes bits.
MORE = {"silu_and_mul": ({}, {"round_steps": True}, {"round_steps": True, "limit": 2.0, "clamp": "after"})}
ULP = 2.0**-23


def values_of(number):
    """Beside the neutral one, and some that round to 0, to infinity, or to a subnormal number."""
    neutral = NEUTRAL[number]
    beside = [1e-12, 1e-60, -1e-60, ULP, -0.0] if neutral == 0 else [1 + 1e-12, 1 + ULP, 1 - ULP / 4, 1 - 1e-12]
    return [*beside, 1e39, 3.4028236e38, 1e-41, 1e-60, 0.1]


def numbers():
    for name in FUNCTIONS:
        if not name.endswith("_"):
            taken = inspect.signature(function_of(name)).parameters
            yield from ((name, number) for number in NEUTRAL if number in taken)


def prepared(name, dtype):
    """Operands of a dtype, with zeros of both signs, subnormal numbers, infinities and NaN among them."""
    operands = clones(without_outputs(FUNCTIONS[name]))
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, math.nan])
    for count, key in enumerate(tensors(operands)):
        t = operands[key]
        if t.is_floating_point() and key not in ("scale", "cos", "sin", "temperature"):
            numbers = t.reshape(-1).clone()
            numbers[count : count + 7] = special[: max(len(numbers) - count, 0)]
            operands[key] = numbers.reshape(t.shape).to(dtype)
    return operands


def outcome(name, operands, strided=False, records=False, **flags):
    """The bytes of results and gradients, or the error."""
    operands = clones(operands)
    for key in tensors(operands):
        if strided and operands[key].is_floating_point() and operands[key].dim() > 1 and key not in ("cos", "sin"):
            operands[key] = operands[key].repeat_interleave(2, -1)[..., ::2]
    leaves = [operands[key].requires_grad_() for key in DIFFERENTIATED.get(name, ()) if records]
    try:
        found = function_of(name)(**operands, **flags)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    if records:
        seen = [t for t in found if t.requires_grad]
        found += torch.autograd.grad(seen, leaves, [t.detach().cos() for t in seen])
    return [bytes_of(t.detach()) for t in found]


def bytes_of(t):
    """Its bytes, with one kind of NaN."""
    if t.is_floating_point() and t.dtype.itemsize > 1:
        t = torch.where(t.isnan(), torch.full_like(t, math.nan), t)
    return t.dtype, t.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "number"), [*numbers()])
def test_a_number_has_the_bits_of_the_rounded_one(name, number, dtype):
    """On the fast path and beyond it, recorded and not, on every backend; or both say the same error."""
    operands = prepared(name, dtype)
    operands.pop(number, None)
    routes = [{}, {"strided": True}] + [{"records": True}, {"records": True, "strided": True}] * (
        name in DIFFERENTIATED
    )
    for more in MORE.get(name, ({},)):
        for value in values_of(number):
            flags = {**more, number: value}
            # The eps of l2_norm is divided first, in float64.
            rounded = {**more, number: value if name == "l2_norm" else in_float32(value)}
            for route in routes:
                with fusednorm.use_backend("reference"):
                    wanted = outcome(name, operands, **route, **rounded)
                if wanted[0] in (TypeError, ValueError):
                    wanted = (wanted[0], wanted[1].replace(repr(in_float32(value)), repr(value)))
                for backend in ("cpu", "reference"):
                    with fusednorm.use_backend(backend):
                        assert outcome(name, operands, **route, **flags) == wanted, (backend, flags, route)


def test_rounding_is_that_of_ieee():
    """Ties to even, subnormal numbers, and beyond the range: in every mode of the thread, which is another one here."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, 2**64, 20_000, dtype=np.uint64).view(np.float64)
    near = generator.integers(0, 0x7F800000, 20_000, dtype=np.uint32).view(np.float32).astype(np.float64)
    steps = np.array([0, 2.0**-25, 2.0**-24, 3 * 2.0**-25, 2.0**-24 + 2.0**-52])
    near = near * (1 + steps[generator.integers(0, 5, near.size)])
    powers = np.ldexp(generator.random(20_000) + 0.5, generator.integers(-160, 140, 20_000))
    with np.errstate(all="ignore"):
        values = np.concatenate((drawn, near, powers, -powers, [0.0, -0.0, math.inf, -math.inf]))
        values = values[~np.isnan(values)]
        wanted = values.astype(np.float32).astype(np.float64)
    try:
        torch.set_flush_denormal(True)
        found = np.array([in_float32(float(value)) for value in values])
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found.view(np.int64), wanted.view(np.int64))


def test_fields_of_a_quantization_are_rounded():
    """Before they are asked whether they exclude each other; the text keeps them as they were given."""
    assert Quantization(torch.int8, apply="ratio", scale_floor=1e-60).packed
    assert Quantization(torch.int8, zero_point="after", amax_floor=1e-60, amax_limit=1e39).packed
    with pytest.raises(ValueError, match="leave out scale_floor"):
        Quantization(torch.int8, apply="ratio", scale_floor=1e-44)
    assert "amax_floor=1e-12" in str(Quantization(torch.int8, amax_floor=1e-12))
