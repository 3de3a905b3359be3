"""Derivatives beyond the gradient: forward mode, and modes of modes, beside torch's formulas in float64."""

import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian as hessian_of
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.functional import gelu, silu

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.calls.call import Flags

# What torch warns of when it loads its forward mode and its compiler, and of each graph that linearize makes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
N = 7


def formula(x, residual, weight, eps=1e-3, weight_offset=0.0):
    """What both functions compute, in torch's operations and without rounding."""
    total = x if residual is None else x + residual
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight + weight_offset)
    return (y,) if residual is None else (y, total)


def ours(x, residual, weight, eps=1e-3, **flags):
    if residual is None:
        return (rms_norm(x, weight, eps, **flags),)
    return fused_add_rms_norm(x, residual, weight, eps, **flags)


def in_place(x, residual, weight, eps=1e-3, **flags):
    if residual is None:
        return (rms_norm_(x.clone(), weight, eps, **flags),)
    return fused_add_rms_norm_(x.clone(), residual.clone(), weight, eps, **flags)


def into(x, residual, weight, eps=1e-3, **flags):
    out = torch.empty_like(x)
    if residual is None:
        return (rms_norm(x, weight, eps, out=out, **flags),)
    return fused_add_rms_norm(x, residual, weight, eps, out=out, residual_out=torch.empty_like(residual), **flags)


def modules(x, residual, weight, eps=1e-3, **flags):
    weights = {} if weight is None else {"weight": weight}
    options = {"eps": eps, "elementwise_affine": weight is not None, "dtype": x.dtype, **flags}
    if residual is None:
        return (functional_call(fusednorm.RMSNorm(N, **options), weights, (x,)),)
    return functional_call(fusednorm.AddRMSNorm(N, **options), weights, (x, residual))


FUNCTIONS = {"ours": ours, "in_place": in_place, "into": into, "modules": modules}
#: Which operands there are.
OPERANDS = {"x": (1, 0, 0), "x, weight": (1, 0, 1), "x, residual": (1, 1, 0), "x, residual, weight": (1, 1, 1)}
operands = pytest.mark.parametrize("given", OPERANDS.values(), ids=OPERANDS.keys())


def tensors(given, dtype=F64, rows=(3,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*rows, N), (*rows, N), (N,))
    return [
        torch.randn(shape, generator=generator, dtype=F64).to(dtype) if is_given else None
        for is_given, shape in zip(given, shapes, strict=True)
    ]


def only(function, all_operands, *flags, **options):
    """The function of those operands that there are, and these."""
    places = [i for i, operand in enumerate(all_operands) if operand is not None]

    def of_given(*given):
        arguments = [None, None, None]
        for place, operand in zip(places, given, strict=True):
            arguments[place] = operand
        return function(*arguments, *flags, **options)

    return of_given, tuple(all_operands[i] for i in places)


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


@pytest.mark.parametrize("name", FUNCTIONS)
@operands
def test_tangents(given, name):
    """Of every public function: jvp, dual tensors, and values that are the call's own bits."""
    values, tangents = tensors(given), tensors(given, seed=1)
    for flags in ({}, {"weight_offset": 1.0}):
        function, inputs = only(FUNCTIONS[name], values, **flags)
        expected, _ = only(formula, values, **flags)
        _, directions = only(formula, tangents)
        y, y_t = jvp(function, inputs, directions)
        close(y_t, jvp(expected, inputs, directions)[1])
        plain = function(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(y, plain, strict=True))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, d) for t, d in zip(inputs, directions, strict=True)]
            outputs = [forward_ad.unpack_dual(t) for t in function(*duals)]
            assert all(torch.equal(a.primal, b) for a, b in zip(outputs, plain, strict=True))
            close([t.tangent for t in outputs], y_t)
        for i in range(len(inputs)):  # one operand alone has a tangent
            zeros = [directions[j] if j == i else torch.zeros_like(directions[j]) for j in range(len(inputs))]
            alone_expected = jvp(expected, inputs, tuple(zeros))[1]
            with forward_ad.dual_level():
                alone = [forward_ad.make_dual(t, directions[j]) if j == i else t for j, t in enumerate(inputs)]
                outputs = [forward_ad.unpack_dual(t).tangent for t in function(*alone)]
            close(
                [torch.zeros_like(p) if t is None else t for t, p in zip(outputs, plain, strict=True)], alone_expected
            )


@operands
def test_jacobians(given):
    """jacfwd, jacrev, linearize, vmap of jvp, jvp of vmap."""
    values = tensors(given)
    function, inputs = only(ours, values)
    expected, _ = only(formula, values)
    every = tuple(range(len(inputs)))
    jacobian = jacfwd(expected, argnums=every)(*inputs)
    close(jacfwd(function, argnums=every)(*inputs), jacobian)
    close(jacrev(function, argnums=every)(*inputs), jacobian)
    directions = [torch.randn(4, *t.shape, dtype=F64) for t in inputs]
    y, linear = linearize(function, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(y, function(*inputs), strict=True))
    one = tuple(d[0] for d in directions)
    close(linear(*one), jvp(expected, inputs, one)[1])

    def tangents(of):
        return vmap(lambda *d: jvp(of, inputs, d)[1])(*directions)

    close(tangents(function), tangents(expected))
    batch = [torch.randn(4, *t.shape, dtype=F64) if t.dim() > 1 else t for t in inputs]
    dims = tuple(0 if t.dim() > 2 else None for t in batch)

    def mapped(of):
        return jvp(vmap(of, in_dims=dims), tuple(batch), tuple(torch.ones_like(t) for t in batch))[1]

    close(mapped(function), mapped(expected))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rms_norm(x, torch.arange(1.0, N + 1, dtype=F64), bias=torch.ones(N, dtype=F64)),
        lambda x: fused_add_rms_norm(x, 2 * x, x_scale=0.5),
        lambda x: fusednorm.rms_norm_add_rms_norm(x, 2 * x),
        lambda x: fusednorm.silu_and_mul(x.repeat(1, 2)),
        lambda x: fusednorm.rms_norm_gated(x, x, group_size=1, norm_before_gate=False),
        lambda x: fusednorm.qk_norm_rope(x, 2 * x, None, None, *torch.arange(6.0, dtype=F64).view(2, 3)),
    ],
)
def test_batches_of_gradients(call):
    """torch.autograd's own vectorized derivatives have tensors without memory, and not torch.func's."""
    x, *_ = tensors(OPERANDS["x"])
    for derivative, function in ((jacobian, call), (hessian_of, lambda x: sum(map(torch.sum, call(x))))):
        close(derivative(function, x, vectorize=True), derivative(function, x))


@pytest.mark.parametrize(
    ("call", "depends"),
    [
        (lambda x, r, w: fused_add_rms_norm(x, r, w), ((0, 1, 2), (0, 1))),
        (lambda x, r, w: torch.ops.fusednorm.fused_add_rms_norm(x, r, w, *Flags()), ((0, 1, 2), (0, 1), ())),
        (lambda x, r, w: fused_add_rms_norm(x, r, w, bias=w), ((0, 1, 2), (0, 1))),
        (lambda x, r, w: fused_add_rms_norm(x, r, w, x_scale=0.5), ((0, 1, 2), (0, 1))),
        (lambda x, r, w: fusednorm.rms_norm_add_rms_norm(x, r, None, w), ((0, 1, 2), (0, 1))),
        (lambda x, r, w: fusednorm.qk_norm_rope(x, r, w, None, *torch.ones(2, 3)), ((0, 2), (1,))),
    ],
)
def test_a_result_requires_gradients_as_far_as_it_depends_on_what_does(call, depends):
    """As results of the plain operations do."""
    for place in range(3):
        leaves = tensors((1, 1, 1), F32)
        leaves[place].requires_grad_()
        assert [output.requires_grad for output in call(*leaves)] == [place in of_output for of_output in depends]


@operands
def test_second_derivatives(given):
    """Forward over reverse, reverse over forward, forward over forward, reverse over reverse."""
    values = tensors(given, rows=(2,))

    def scalar(of):
        function, _ = only(of, values)
        return lambda *inputs: sum((t.sin() * (i + 1)).sum() for i, t in enumerate(function(*inputs)))

    _, inputs = only(ours, values)
    every = tuple(range(len(inputs)))
    expected = hessian(scalar(formula), argnums=every)(*inputs)
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            close(outer(inner(scalar(ours), argnums=every), argnums=every)(*inputs), expected)
    directions = tuple(torch.randn_like(t) for t in inputs)

    def product(of):
        return jvp(grad(scalar(of), argnums=every), inputs, directions)[1]

    expected_product = product(formula)
    close(product(ours), expected_product)
    # without torch.func
    leaves = [t.clone().requires_grad_() for t in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(leaves, directions, strict=True)]
        gradients = torch.autograd.grad(scalar(ours)(*duals), duals)
        close([forward_ad.unpack_dual(g).tangent for g in gradients], expected_product)


def normed(x, weight):
    return formula(x, None, weight, 1e-6)[0]


#: Compositions of x, of rows like it and of a weight, and what they compute in torch's operations.
COMPOSITIONS = {
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
def test_derivatives_of_compositions(name, modes):
    """Forward (f) and reverse modes around each other: each has the tangents of those around it."""
    x, z, weight = tensors((1, 1, 1), rows=(1,))

    def derived(call):
        def derivative(v):
            return call(x + v[:N], z + v[N:], weight * v[:N].cos()).sin().sum()

        for mode in reversed(modes):
            derivative = {"f": jacfwd, "r": jacrev}[mode](derivative)
        return derivative(torch.zeros(2 * N, dtype=F64))

    ours, torchs = map(derived, COMPOSITIONS[name])
    close(ours, torchs)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_tangents_of_batches_of_compositions(name):
    x, z, weight = tensors((1, 1, 1))

    def derived(call):
        of_batch = vmap(lambda x, z: call(x, z, weight))
        tangents = jvp(of_batch, (torch.stack((x, z)), torch.stack((z, x))), (torch.ones(2, *x.shape, dtype=F64),) * 2)[
            1
        ]
        return tangents, jvp(lambda x: vmap(lambda w: call(x, z, w))(weight.repeat(2, 1)), (x,), (z,))[1]

    ours, torchs = COMPOSITIONS[name]
    if name in ("norm first", "gate first"):  # one call of the norm has one weight
        close(derived(lambda x, z, w: ours(x, z, weight)), derived(lambda x, z, w: torchs(x, z, weight)))
    else:
        close(derived(ours), derived(torchs))


def test_third_derivatives():
    values = tensors((1, 1, 1), rows=(1,))
    directions = [[torch.randn(t.shape, dtype=F64) for t in values] for _ in range(3)]

    def third(of, first, second):
        def scalar(*inputs):
            return of(*inputs)[0].sin().sum()

        def once(*inputs):
            return jvp(scalar, inputs, tuple(directions[0]))[1]

        def twice(*inputs):
            if first == "forward":
                return jvp(once, inputs, tuple(directions[1]))[1]
            return sum((g * d).sum() for g, d in zip(grad(once, (0, 1, 2))(*inputs), directions[1], strict=True))

        if second == "forward":
            return jvp(twice, tuple(values), tuple(directions[2]))[1]
        return grad(twice, (0, 1, 2))(*values)

    for first in ("forward", "reverse"):
        for second in ("forward", "reverse"):
            close(third(ours, first, second), third(formula, first, second))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_tangents_in_other_dtypes(dtype):
    """They have the outputs' dtypes, and are near float64's."""
    values, tangents = tensors((1, 1, 1), dtype, rows=(5,)), tensors((1, 1, 1), dtype, rows=(5,), seed=1)
    for residual_dtype in {dtype, F32}:
        for flags in ({}, {"round_sum": False}, {"round_norm": True}):
            operands = [values[0], values[1].to(residual_dtype), values[2]]
            directions = [tangents[0], tangents[1].to(residual_dtype), tangents[2]]
            function, inputs = only(ours, operands, **flags)
            outputs, found = jvp(function, inputs, tuple(directions))
            assert [t.dtype for t in found] == [t.dtype for t in outputs] == [dtype, residual_dtype]
            wide = tuple(t.double() for t in inputs)
            expected = jvp(lambda *a: formula(*a), wide, tuple(t.double() for t in directions))[1]
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
        y, total = formula(*wide, 1e-6)
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
    x, residual, weight = tensors((1, 1, 1), F32)
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


def test_out_of_another_dtype_has_no_tangent():
    x, _, weight = tensors((1, 0, 1), F32)

    def call(x):
        return rms_norm(x, weight, out=torch.empty_like(x, dtype=BF16))

    with pytest.raises(NotImplementedError, match="out"):
        jvp(call, (x,), (x,))


def test_a_level_disturbs_no_other_thread():
    x, residual, weight = tensors((1, 1, 1), F32)
    expected = fused_add_rms_norm(x, residual, weight)
    found = []
    with forward_ad.dual_level():
        forward_ad.make_dual(x, torch.ones_like(x))
        thread = threading.Thread(target=lambda: found.extend(fused_add_rms_norm(x, residual, weight)))
        thread.start()
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_tangents_are_right_or_refused():
    """In one graph torch's compiler refuses them; never is the tangent that of a constant."""
    values, tangents = tuple(tensors((1, 1, 1))), tuple(tensors((1, 1, 1), seed=1))
    expected = jvp(formula, values, tangents)[1]
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        close(torch.compile(lambda *a: jvp(ours, a, tangents)[1], backend=backend)(*values), expected)
        close(jvp(torch.compile(ours, backend=backend), values, tangents)[1], expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda *a: jvp(ours, a, tangents)[1], backend=backend, fullgraph=True)(*values)


def test_gradients_of_compiled_calls_under_forward_mode():
    """A gradient that is computed while a level is entered, for tensors without a tangent, is the usual one."""
    x, residual, weight = (t.requires_grad_() for t in tensors((1, 1, 1), F32))
    plain = torch.autograd.grad(fused_add_rms_norm(x, residual, weight)[0].sum(), (x, residual, weight))
    with forward_ad.dual_level():
        inside = torch.autograd.grad(fused_add_rms_norm(x, residual, weight)[0].sum(), (x, residual, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    _, pullback = vjp(fused_add_rms_norm, x.detach(), residual.detach(), weight.detach())
    with forward_ad.dual_level():
        found = pullback((torch.ones(3, N), torch.zeros(3, N)))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
