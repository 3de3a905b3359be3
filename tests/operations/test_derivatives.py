"""Derivatives beyond the gradient: forward mode, and modes of modes, beside torch's formulas in float64."""

import threading
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import gelu, silu

import fusednorm
from fusednorm import fused_add_rms_norm, rms_norm

# What torch warns of when it loads its forward mode and its compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
N = 7


def formula(x, residual, weight, eps=1e-6):
    """A sum and its norm in torch's operations and without rounding."""
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight, total


def tensors(dtype=F64, rows=(3,), seed=0):
    """x, rows like it, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*rows, N), (*rows, N), (N,))
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def close(a, b, most=1e-12):
    """Sums of 7 products of numbers near 1, a few operations deep, in float64: 1e-12 is over 1000 roundings."""
    a, b = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (a, b))
    assert len(a) == len(b)
    for p, q in zip(a, b, strict=True):
        if not isinstance(p, torch.Tensor):
            close(p, q, most)
        else:
            assert p.shape == q.shape
            assert (p - q).abs().max() <= most * q.abs().max().clamp(min=1)


def normed(x, weight):
    return formula(x, 0, weight)[0]


#: Calls of x, of rows like it and of a weight, and what they compute in torch's operations.
COMPOSITIONS = {
    "norm": (lambda x, z, w: rms_norm(x, w), lambda x, z, w: normed(x, w)),
    "add": (lambda x, z, w: torch.cat(fused_add_rms_norm(x, z, w)), lambda x, z, w: torch.cat(formula(x, z, w))),
    "bias": (lambda x, z, w: rms_norm(x, w, bias=w), lambda x, z, w: normed(x, w) + w),
    "heads": (
        lambda x, z, w: rms_norm(torch.stack((x, z), 1), torch.stack((w, -w))),
        lambda x, z, w: normed(torch.stack((x, z), 1), torch.stack((w, -w))),
    ),
    "silu": (lambda x, z, w: fusednorm.gate(x, z), lambda x, z, w: x * silu(z)),
    "sigmoid": (lambda x, z, w: fusednorm.gate(x, z, activation="sigmoid"), lambda x, z, w: x * z.sigmoid()),
    "gelu_tanh": (lambda x, z, w: fusednorm.gelu_tanh_and_mul(z, x), lambda x, z, w: x * gelu(z, approximate="tanh")),
    "norm first": (lambda x, z, w: fusednorm.rms_norm_gated(x, z, w), lambda x, z, w: normed(x, w) * silu(z)),
    "gate first": (
        lambda x, z, w: fusednorm.rms_norm_gated(x, z, w, norm_before_gate=False),
        lambda x, z, w: normed(x * silu(z), w),
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("modes", ["ff", "fr", "rf", "rr", "fff", "ffr", "frf", "rff"])
def test_derivatives_of_derivatives(name, modes):
    """Forward (f) and reverse modes around each other: each has the tangents of those around it."""
    x, z, weight = tensors(rows=(1,))

    def derived(call):
        def derivative(v):
            return call(x + v[:N], z + v[N:], weight * v[:N].cos()).sin().sum()

        for mode in reversed(modes):
            derivative = {"f": jacfwd, "r": jacrev}[mode](derivative)
        return derivative(torch.zeros(2 * N, dtype=F64))

    ours, torchs = map(derived, COMPOSITIONS[name])
    close(ours, torchs)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_tangents_of_batches(name):
    x, z, weight = tensors()

    def derived(call):
        of_batch = vmap(lambda x, z: call(x, z, weight))
        tangents = jvp(of_batch, (torch.stack((x, z)), torch.stack((z, x))), (torch.ones(2, *x.shape, dtype=F64),) * 2)[
            1
        ]
        return tangents, jvp(lambda x: vmap(lambda w: call(x, z, w))(weight.repeat(2, 1)), (x,), (z,))[1]

    ours, torchs = COMPOSITIONS[name]
    close(derived(ours), derived(torchs))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_tangents_in_other_dtypes(dtype):
    """They have the outputs' dtypes, and are near float64's."""
    values, tangents = tensors(dtype, rows=(5,)), tensors(dtype, rows=(5,), seed=1)
    for residual_dtype in {dtype, F32}:
        for flags in ({}, {"round_sum": False}, {"round_norm": True}):
            inputs, directions = (
                (x, residual.to(residual_dtype), weight) for x, residual, weight in (values, tangents)
            )
            outputs, found = jvp(partial(fused_add_rms_norm, **flags), inputs, directions)
            assert [t.dtype for t in found] == [t.dtype for t in outputs] == [dtype, residual_dtype]
            expected = jvp(formula, tuple(t.double() for t in inputs), tuple(t.double() for t in directions))[1]
            # Each of fewer than 40 operations on numbers of a magnitude below 8 rounds once to A, h and the output
            # once to 16 bits.
            close([t.double() for t in found], expected, 40 * 8 * torch.finfo(dtype).eps)


def test_round_to_16_bits_passes_derivatives_straight_through():
    """Also from float64, which is rounded in integers."""
    for dtype in (F16, BF16):
        values = [
            torch.randn(2, N, dtype=F64),
            torch.randn(2, N, dtype=F64).to(dtype),
            torch.rand(N, dtype=F64).to(dtype),
        ]
        leaves = [t.clone().requires_grad_() for t in values]
        y, total = fused_add_rms_norm(*leaves)
        gradients = torch.autograd.grad(y.sin().sum() + total.double().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.double().square().sum() for g in gradients), leaves)
        assert all(t.abs().max() > 0 for t in second)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        y, total = formula(*wide)
        gradients = torch.autograd.grad(y.sin().sum() + total.sum(), wide, create_graph=True)
        expected = torch.autograd.grad(sum(g.square().sum() for g in gradients), wide)
        # The sum, a gradient or two and their gradients are rounded to 16 bits; 64 units of those are far below the
        # magnitude of any second derivative left out.
        close([t.double() for t in second], expected, 64 * torch.finfo(dtype).eps)


OPS, FLAGS = torch.ops.fusednorm, (1e-3, 0.0, True, False)


@pytest.mark.parametrize(
    "name", ["rms_norm", "fused_add_rms_norm", "rms_norm_", "fused_add_rms_norm_", "into", "backward"]
)
def test_raw_operators_lose_no_derivative(name):
    """An operator knows no tangents, and one that writes no gradients: it refuses them instead of losing them."""
    x, residual, weight = tensors(F32)
    rstd = torch.ones(3)
    arguments = {
        "rms_norm": lambda x: (x, weight, *FLAGS),
        "fused_add_rms_norm": lambda x: (residual, x, weight, *FLAGS),
        "rms_norm_": lambda x: (residual.clone(), weight + x.sum(), *FLAGS),
        "fused_add_rms_norm_": lambda x: (residual.clone(), x.clone(), weight, *FLAGS),
        "into": lambda x: (residual, x, weight, residual.clone(), torch.empty_like(residual), *FLAGS),
        "backward": lambda x: (x, None, residual, rstd, weight, 0.0, F32, None, True, False, [True, False, True]),
    }[name]

    def call(x):
        getattr(OPS, name)(*arguments(x))
        return x

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(dual)
        call(x)  # a level alone is no tangent
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(call, (x,), (x,))
    leaf = x.clone().requires_grad_()
    if name in ("rms_norm", "fused_add_rms_norm"):
        call(leaf)
    elif name == "backward":
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            OPS.backward(*arguments(leaf))[0].sum().backward()
    else:
        with pytest.raises(NotImplementedError, match="requires grad"):
            call(leaf)
    with torch.no_grad():
        call(leaf)


def test_out_of_another_dtype_has_its_tangent():
    x, _, weight = tensors(F32)

    def call(x):
        return rms_norm(x, weight, out=torch.empty_like(x, dtype=BF16))

    expected = jvp(lambda x: rms_norm(x, weight, out_dtype=BF16), (x,), (x,))
    assert all(torch.equal(found, one) for found, one in zip(jvp(call, (x,), (x,)), expected, strict=True))


def test_a_level_disturbs_no_other_thread():
    x, residual, weight = tensors(F32)
    expected = fused_add_rms_norm(x, residual, weight)
    found = []
    with forward_ad.dual_level():
        forward_ad.make_dual(x, torch.ones_like(x))
        thread = threading.Thread(target=lambda: found.extend(fused_add_rms_norm(x, residual, weight)))
        thread.start()
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


#: So many of the tensors: x, the residual, the weight.
TAKEN = {"fused_add_rms_norm": 3, "log_softmax": 1, "gate": 2, "rms_norm_add": 3}


@pytest.mark.parametrize("name", TAKEN)
def test_compiled_tangents_are_right_or_refused(name):
    """In one graph torch's compiler refuses them; never is the tangent that of a constant."""
    function, values, tangents = (getattr(fusednorm, name), *[tuple(tensors(seed=s))[: TAKEN[name]] for s in (0, 1)])
    of_formula = formula if name == "fused_add_rms_norm" else function
    expected = jvp(of_formula, values, tangents)[1]
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        close(torch.compile(lambda *a: jvp(function, a, tangents)[1], backend=backend)(*values), expected)
        close(jvp(torch.compile(function, backend=backend), values, tangents)[1], expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda *a: jvp(function, a, tangents)[1], backend=backend, fullgraph=True)(*values)


def test_gradients_of_compiled_calls_under_forward_mode():
    """A gradient that is computed while a level is entered, for tensors without a tangent, is the usual one."""
    x, residual, weight = (t.requires_grad_() for t in tensors(F32))
    plain = torch.autograd.grad(fused_add_rms_norm(x, residual, weight)[0].sum(), (x, residual, weight))
    with forward_ad.dual_level():
        inside = torch.autograd.grad(fused_add_rms_norm(x, residual, weight)[0].sum(), (x, residual, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    _, pullback = vjp(fused_add_rms_norm, x.detach(), residual.detach(), weight.detach())
    with forward_ad.dual_level():
        found = pullback((torch.ones(3, N), torch.zeros(3, N)))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
