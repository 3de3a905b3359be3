"""L2 normalisation, which is a composition of the norm."""

import math

import pytest
import torch

import fusednorm
from fusednorm import l2_norm, rms_norm
from fusednorm.backends import cpu

BACKENDS = ["reference", *(["cpu"] if not cpu.unavailable() else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("hidden_size", [4, 64, 256, 1024])
def test_powers_of_four_have_the_bits_of_the_formula(backend, dtype, hidden_size):
    """Squares of small whole numbers have one sum in every order. torch's float32 root is not correctly rounded."""
    x = torch.randint(-8, 9, (7, hidden_size), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    exact = x.to(torch.promote_types(dtype, torch.float32))
    wanted = exact * (1 / ((exact * exact).sum(-1, keepdim=True) + 2.0**-20).double().sqrt().to(exact.dtype))
    with fusednorm.use_backend(backend):
        assert l2_norm(x, 2.0**-20).equal(wanted.to(dtype))
        assert l2_norm(x, 2.0**-20, out_dtype=wanted.dtype).equal(wanted)
        assert l2_norm(x.clone(), 2.0**-20, out=x) is x
    assert x.equal(wanted.to(dtype))


@pytest.mark.parametrize("hidden_size", [1, 3, 96, 128, 1000, 4096])
def test_others_are_near_the_formula(hidden_size):
    """In units u of 2^-24: each square 1, the sum up to 12 levels, halved by the root with the quotient and eps 7.5.

    The root, its reciprocal, the weight and two products have 1 each: 12.5, and second-order terms below 0.5.
    """
    x = torch.randn(50, hidden_size, generator=torch.Generator().manual_seed(1))
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert ((l2_norm(x).double() - exact).abs() <= 13 * 2.0**-24 * exact.abs()).all()
    weight = torch.full((hidden_size,), 1 / math.sqrt(hidden_size))
    assert l2_norm(x).equal(rms_norm(x, weight, 1e-6 / hidden_size))


@pytest.mark.parametrize("size", [101, 103])
def test_the_weight_that_is_kept_belongs_to_no_transform(size):
    """Where the first call of a size is one under torch.func, its tensors end with it."""
    x = torch.randn(3, size)
    transform = torch.func.vmap if size == 101 else torch.func.grad
    transform(lambda rows: l2_norm(rows).sum())(x)
    wanted = rms_norm(x, torch.full((size,), 1 / math.sqrt(size)), 1e-6 / size)
    assert torch.equal(l2_norm(x), wanted)
    assert torch.equal(torch.func.vmap(l2_norm)(x), wanted)


def test_the_weight_that_is_kept_has_no_mode():
    """A tensor that is made while a mode is on belongs to the mode: it must not be kept for later calls."""
    x = torch.randn(2, 20)
    with torch.inference_mode():
        wanted = l2_norm(x)
    l2_norm(x.requires_grad_()).sum().backward()
    assert l2_norm(x).equal(wanted)
    y = torch.randn(2, 28)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = l2_norm(mode.from_tensor(y))
        assert (type(fake).__name__, fake.shape) == ("FakeTensor", y.shape)
    assert type(l2_norm(y)) is torch.Tensor
    with fusednorm.use_backend("reference"):
        assert l2_norm(y.to("meta")).shape == y.shape
    compiled = torch.compile(l2_norm, fullgraph=True, backend="aot_eager")
    assert compiled(y).equal(l2_norm(y))
