"""The parts of the reference, on the examples of docs/spec.md and where torch alone would be wrong."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from fusednorm.conformance import oracle
from fusednorm.conformance.cases import BF16, F16, F32, F64, differing
from fusednorm.reference import activations, log_prob
from fusednorm.reference import norm as reference


def test_treesum_examples():
    h = torch.tensor([4096.0, 1, 1, 1, 1, 1])
    assert reference.treesum(h * h).item() == 16777220.0
    total = 0.0
    for value in (h * h).numpy():
        total = np.float32(total + value)
    assert total == 16777216.0  # in order, each 1 is lost


@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1024, 1025, 5000])
def test_treesum_against_a_loop_over_indices(n):
    """v[:n/2] + v[n/2:], written element by element."""
    v = torch.rand(n, generator=torch.Generator().manual_seed(n))
    sums = []
    for begin in range(0, n, 1024):
        segment = [np.float32(x) for x in v[begin : begin + 1024].tolist()]
        segment += [np.float32(0)] * (1024 - len(segment))
        while len(segment) > 1:
            half = len(segment) // 2
            segment = [segment[i] + segment[i + half] for i in range(half)]
        sums.append(segment[0])
    while len(sums) & (len(sums) - 1):
        sums.append(np.float32(0))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    assert reference.treesum(v).item() == sums[0]


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 257, 600, 1025])
def test_rowsum_against_a_loop_over_rows(rows):
    v = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
    block = -(-rows // min(rows, 256)) if rows else 1
    sums = []
    for begin in range(0, rows, block):
        total = v[begin].numpy()
        for row in v[begin + 1 : begin + block].numpy():
            total = total + row
        sums.append(total)
    while len(sums) & (len(sums) - 1) or not sums:
        sums.append(np.zeros(3, np.float32))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    assert reference.rowsum(v).tolist() == sums[0].tolist()


def test_float64_is_rounded_once():
    """1 + 2^-11 is a tie in float16, and 2^-40 more decides it; by way of float32 that is lost."""
    value = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=F64)
    assert reference.rounded(value, F16).item() == 1 + 2.0**-10
    assert value.to(F16).item() == 1.0, "torch rounds once by now: reference.rounded may become value.to(dtype)"


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_rounding_against_the_oracle(dtype):
    generator = torch.Generator().manual_seed(0)
    mantissa = torch.randn(200_000, generator=generator, dtype=F64)
    exponent = torch.randint(-160, 130, mantissa.shape, generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.999, 65520.0, 3.4e38, 3.5e38, 5e-324])
    value = torch.cat((torch.ldexp(mantissa, exponent), special.double(), -special.double()))
    expected = torch.from_numpy(oracle.round_to(value.numpy(), dtype))
    assert not differing(reference.rounded(value, dtype).double(), expected).any()


def test_square_roots_are_correctly_rounded():
    value = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 100
    for v in (value, value.double() + 1e-9):
        assert reference.square_root(v).tolist() == np.sqrt(v.numpy()).tolist()
    special = torch.tensor([0.0, torch.inf, -1.0, torch.nan])
    for v in (special, special.double()):
        root = reference.square_root(v)
        assert root[:2].tolist() == [0.0, torch.inf]
        assert root[2:].isnan().all()


def test_rstd_can_be_differentiated_twice():
    h = torch.tensor([[1.5, -2.0, 0.25], [3.0, 0.5, -1.0]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: reference.rstd_of(h, 1e-3), h)
    assert torch.autograd.gradgradcheck(lambda h: reference.rstd_of(h, 1e-3), h)


#: Functions that compute in integers, and what an error names in their place.
IN_INTEGERS = [
    (reference.square_root, "rstd_of"),
    (activations.exponential, "activated_and_slope, softcap or Exp"),
    (log_prob.logarithm, "Log"),
]
for activation in ("silu", "sigmoid", "gelu", "gelu_tanh"):
    IN_INTEGERS.append((partial(activations.activated, activation=activation), "activated_and_slope"))


@pytest.mark.parametrize(("function", "instead"), IN_INTEGERS)
def test_functions_of_bits_refuse_what_they_cannot_differentiate(function, instead):
    """A formula that calls one of them would have a wrong derivative."""
    x = torch.tensor([1.5, 2.0], dtype=F64, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"have no derivative: call {instead}"):
        function(x)
    with torch.no_grad():
        assert function(x).equal(function(x.detach()))


def test_every_float64_has_the_root_of_ieee():
    """Bits of all kinds; whole numbers near squares, and near the squares of middles, where one off decides."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7FF0 << 48, (300_000,), generator=generator)
    subnormal = torch.randint(1, 1 << 52, (20_000,), generator=generator)
    root = torch.randint(1 << 52, 1 << 53, (100_000,), generator=generator)
    square = (root.double() * root.double()).view(torch.int64)
    middle = ((root.double() * (root + 1).double()) * 4.0 ** torch.randint(-560, 400, root.shape)).view(torch.int64)
    near = [whole + step for whole in (square, middle) for step in range(-2, 3)]
    ends = torch.tensor([0.0, -0.0, torch.inf, 5e-324, 2.0**-1022, torch.finfo(F64).max, 1 - 2.0**-53, 4 - 2.0**-51])
    small = [torch.arange(1 << 16), torch.arange((1 << 52) - 999, (1 << 52) + 999)]
    value = torch.cat([torch.cat([bits, subnormal, *near, *small]).view(F64), ends])
    expected = torch.tensor([*map(math.sqrt, value.tolist())], dtype=F64)
    assert reference.square_root(value).view(torch.int64).equal(expected.view(torch.int64))
