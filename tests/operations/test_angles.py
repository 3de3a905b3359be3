"""Cosine, sine and power of rotary tables: within their bounds, with the same bits on every processor."""

import hashlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import mpmath  # sympy's, which torch asks for
import pytest
import torch

from fusednorm.reference import angles
from fusednorm.reference.angles import cosine_and_sine, power

ROOT = Path(__file__).parents[2]
U = 2.0**-53
#: SHA-256 of the bits of `digest`, which change only together with SPEC_VERSION.
GOLDEN = "6e674feeb17e1ca403bc8e44b88c3e6fa128bf4b23254fe5ef3d9e77454252ac"


def samples(dtype):
    """Angles of all magnitudes up to 2^27, those next to multiples of pi / 2, and zeros."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(400, generator=generator, dtype=torch.float64)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    quarters = torch.cat((torch.arange(1, 40), (torch.rand(60, generator=generator) * 85_000_000).to(torch.int64)))
    near = quarters.to(torch.float64) * (math.pi / 2)
    edges = torch.tensor([0.0, 2.0**27, 252.89820861816406, 1.5707963705062866, math.pi / 4], dtype=torch.float64)
    x = torch.cat((some, some * torch.exp2(-60 * uniform), uniform * 1e5, uniform * 2.0**27, near, edges))
    return torch.cat((x, -x)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cosine_and_sine_are_within_their_bound(dtype):
    """The bound of the specification; a float32 result is also within half a unit and 2^-26 of it."""
    x = samples(dtype)
    wide = cosine_and_sine(x.to(torch.float64))
    results = cosine_and_sine(x)
    with mpmath.workdps(60):
        for function, found, result in zip((mpmath.cos, mpmath.sin), wide, results, strict=True):
            exact = [function(mpmath.mpf(a)) for a in x.tolist()]
            for angle, one, e in zip(x.tolist(), found.tolist(), exact, strict=True):
                assert abs(mpmath.mpf(one) - e) <= 3 * U * abs(e) + mpmath.mpf(2) ** -79, angle
            if dtype == torch.float32:
                assert result.tolist() == torch.tensor([float(e) for e in exact], dtype=torch.float64).float().tolist()
                assert result.equal(found.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    """No neighbour of a result is nearer to the float64 one."""
    x = samples(torch.float64).clamp(-60000, 60000).to(dtype)
    for result, wide in zip(cosine_and_sine(x), cosine_and_sine(x.to(torch.float64)), strict=True):
        assert result.dtype == dtype
        distance = (result.to(torch.float64) - wide).abs()
        for step in (-1, 1):
            neighbour = (result.view(torch.int16) + step).view(dtype).to(torch.float64)
            assert (distance <= (neighbour - wide).abs())[result != 0].all()


def test_power_is_within_its_bound():
    generator = torch.Generator().manual_seed(2)
    base = torch.exp2(torch.rand(300, generator=generator, dtype=torch.float64) * 60 - 30)
    base = torch.cat((base, 1 + torch.randn(100, generator=generator, dtype=torch.float64) * 1e-3))
    base = torch.cat((base, torch.tensor([1e4, 5e5, 1e6, 5e-310 * 2**60, 1.7e308], dtype=torch.float64)))
    exponent = torch.randn(len(base), generator=generator, dtype=torch.float64) * 2
    exponent = torch.where((base.log() * exponent).abs() > 600, exponent / 8, exponent)
    found = power(base, exponent, torch.float64)
    with mpmath.workdps(60):
        for x, y, one in zip(base.tolist(), exponent.tolist(), found.tolist(), strict=True):
            t = mpmath.mpf(y) * mpmath.log(mpmath.mpf(x))
            e = mpmath.exp(t)
            assert abs(mpmath.mpf(one) - e) <= (4 * abs(t) + 2) * U * e, (x, y)


@pytest.mark.parametrize("theta", [1e4, 1.5e5, 5e5, 1e6, 5e6])
def test_frequencies_are_correctly_rounded(theta):
    """Those of a float32 power, for the thetas that models have."""
    exponents = torch.arange(0, 256, 2).float() / 256
    with mpmath.workdps(60):
        exact = [float(mpmath.mpf(theta) ** mpmath.mpf(y)) for y in exponents.tolist()]
    assert power(theta, exponents, torch.float32).equal(torch.tensor(exact, dtype=torch.float64).float())


def test_what_has_no_result():
    inf, nan = math.inf, math.nan
    beyond = torch.nextafter(torch.tensor(2.0**27), torch.tensor(inf))
    for table in cosine_and_sine(torch.tensor([inf, -inf, nan, beyond, -beyond, 2.0**100, 3.4e38])):
        assert table.isnan().all()
    assert [table.tolist() for table in cosine_and_sine(torch.tensor([0.0, -0.0]))] == [[1, 1], [0, 0]]
    assert power(torch.tensor([-1.0, 0.0, inf, nan]), 0.5, torch.float32).isnan().all()
    assert power(torch.tensor([5e-324], dtype=torch.float64), 0.5, torch.float64).isnan().all()
    assert power(2.0, torch.tensor([inf, -inf, nan]), torch.float32).isnan().all()
    assert power(2.0, torch.tensor([0.0, 200.0, -200.0]), torch.float32).tolist() == [1, inf, 0]
    assert power(torch.tensor([1.0, 1e-40]), 0.5, torch.float32)[0] == 1
    assert cosine_and_sine(torch.empty(0, 3))[0].shape == (0, 3)
    assert cosine_and_sine(torch.tensor(1.0))[1].shape == ()


def test_a_number_is_rounded_first():
    """0.1 and 10000.1 are other numbers in float32."""
    exponents = torch.tensor([0.3, 0.7])
    base = torch.tensor(10000.1)
    assert power(10000.1, exponents, torch.float32).equal(power(base.expand(2), exponents, torch.float32))
    assert power(exponents, 0.1, torch.float32).equal(power(exponents, torch.tensor(0.1), torch.float32))


def test_blocks_change_nothing(monkeypatch):
    x = samples(torch.float32)[: 7 * 40].view(7, 40)
    before = cosine_and_sine(x.t())
    monkeypatch.setattr(angles, "BLOCK", 64)
    assert all(one.equal(other) for one, other in zip(before, cosine_and_sine(x.t()), strict=True))


def test_derivatives_are_refused():
    with pytest.raises(RuntimeError, match=r"call torch\.cos"):
        cosine_and_sine(torch.ones(3, requires_grad=True))


def test_constants_are_those_of_the_specification():
    page = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    written = re.search(r"\| q1, q2, q3 \| (.*):", page)[1].split(", ")
    assert [float.fromhex(number) for number in written] == [*angles.QUARTERS]
    assert angles.PER_QUARTER.hex() in page
    with mpmath.workdps(60):
        assert abs(sum(map(mpmath.mpf, angles.QUARTERS)) - mpmath.pi / 2) < mpmath.mpf(2) ** -108
    assert [angles.SINE[0], angles.COSINE[-1]] == [-1 / 6, 1 / -math.factorial(18)]
    for part in angles.QUARTERS[:2]:
        mantissa = part.as_integer_ratio()[0]
        assert (mantissa // (mantissa & -mantissa)).bit_length() <= 26


def digest():
    """The bits of tables, of a range of angles, and of powers."""
    steps = torch.arange(-4000, 4000)
    tables = [*cosine_and_sine(steps.float() * 0.37), *cosine_and_sine(steps.double() * 12345.678)]
    tables += [power(theta, torch.arange(0, 512).float() / 512, torch.float32) for theta in (1e4, 5e5, 1e6)]
    tables.append(power(steps.double().abs() + 0.5, steps.double() / 1000, torch.float64))
    return hashlib.sha256(b"".join(table.numpy().tobytes() for table in tables)).hexdigest()


def test_bits_are_golden():
    assert digest() == GOLDEN


def test_every_instruction_set_has_the_same_bits():
    """torch takes its own functions for each; a processor without one takes the next lower one."""
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; sys.path.insert(0, '.'); import test_angles as of; print(of.digest())",
    ]
    where = {"stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parent}
    runs = [
        subprocess.Popen(command, env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, **where)
        for capability in ("default", "avx2")
    ]
    assert [run.communicate()[0].strip() for run in runs] == [GOLDEN, GOLDEN]
