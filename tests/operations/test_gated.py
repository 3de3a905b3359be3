"""Gates: the constants, what is refused, who sees a call, and derivatives of derivatives."""

import math
import re
from pathlib import Path

import exponential
import gaussian
import mpmath  # sympy's, which torch asks for
import pytest
import tangent
import torch

import fusednorm
from fusednorm import gate, gate_, silu_and_mul, softcap
from fusednorm.backends import cpu
from fusednorm.calls import fast_path
from fusednorm.calls import function_constants as constants
from fusednorm.calls.c_abi import steps_in_c
from fusednorm.calls.c_kinds import KINDS
from fusednorm.calls.call import ACTIVATIONS, GateSteps
from fusednorm.engine import open_fast_path as of_c
from fusednorm.engine import run_gates
from fusednorm.reference import activations
from fusednorm.torch_ops.steps import GATE_FLAGS

from fast_calls import close_fast_path
from gate_calls import gate_call

ROOT = Path(__file__).parents[2]
BACKENDS = ["reference", *(["cpu"] if not cpu.unavailable() else [])]
Y, Z = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("name", exponential.TYPES)
@pytest.mark.parametrize("script", [exponential, gaussian, tangent])
def test_constants_are_those_of_the_script(script, name):
    """In the table that C and CUDA have printed, and in the specification."""
    found = script.constants(*script.TYPES[name])
    found.pop("error")
    schemes = {exponential: constants.SCHEMES, gaussian: constants.NORMALS, tangent: constants.TANGENTS}
    scheme = schemes[script][getattr(torch, name)]
    assert {key: getattr(scheme, key) for key in found} == found
    wanted = {number for value in found.values() for number in (value if isinstance(value, tuple) else (value,))}
    wanted -= {0.5, 1.0}
    written = re.findall(r"-?\b0x[0-9a-f.]+p[-+]\d+", (ROOT / "docs/spec.md").read_text())
    assert wanted <= set(map(float.fromhex, written))


def test_the_exponential_in_float64():
    """Within 1.25 ulp of the exact value, as docs/spec.md derives, and half a unit for the rounding of torch's exp."""
    t = torch.linspace(-745, 709.7, 200_001, dtype=torch.float64)
    exact, found = torch.exp(t), activations.exponential(t)
    unit = torch.exp2((torch.frexp(exact)[1] - 53).clamp_min(-1074).double())
    assert ((found - exact).abs() <= 2.25 * unit).all()
    ends = torch.tensor([-math.inf, -800, 720, math.inf, math.nan], dtype=torch.float64)
    found = activations.exponential(ends)
    assert found[:4].tolist() == [0, 0, math.inf, math.inf]
    assert found[4].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_errors_are_within_the_bounds_that_the_specification_derives(dtype):
    """Relative to the exact value, in half the spacing at 1, wherever that value is a normal number."""
    reach = 85.0 if dtype == torch.float32 else 700.0
    of_quotient = 19 if dtype == torch.float32 else 37
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(400, dtype=dtype, generator=generator) * 4
    far = (torch.rand(400, dtype=dtype, generator=generator) * 2 - 1) * reach
    z = torch.cat((near, far, torch.tensor([-1e-3, 1e-9, -5.86, -3.23, -9.5], dtype=dtype)))
    least, half = torch.finfo(dtype).tiny, torch.finfo(dtype).eps / 2
    with mpmath.workdps(40):
        exact = [mpmath.mpf(number) for number in z.tolist()]
        root, factor = mpmath.sqrt(2 / mpmath.pi), mpmath.mpf("0.044715")
        inner = [2 * root * (number + factor * number**3) for number in exact]
        rows = (
            ("exp", [mpmath.exp(number) for number in exact], lambda v: 1.8),
            ("sigmoid", [1 / (1 + mpmath.exp(-number)) for number in exact], lambda v: 3.8),
            ("silu", [number / (1 + mpmath.exp(-number)) for number in exact], lambda v: 3.8),
            (
                "gelu_tanh",
                [number / (1 + mpmath.exp(-v)) for number, v in zip(exact, inner, strict=True)],
                lambda v: 6 if v > 0 else 7 * abs(v) + 3.8,
            ),
            (
                "gelu",
                [number * mpmath.erfc(-number / mpmath.sqrt(2)) / 2 for number in exact],
                lambda v: of_quotient + 1 if v > 0 else of_quotient + z[i].item() ** 2 / 2,
            ),
        )
        for name, wanted, bound in rows:
            found = activations.exponential(z) if name == "exp" else activations.activated(z, name)
            normal = [i for i, number in enumerate(wanted) if abs(number) >= least]
            assert len(normal) > 500
            for i in normal:
                error = abs(mpmath.mpf(found[i].item()) / wanted[i] - 1) / half
                assert error <= bound(inner[i]), (name, z[i].item())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gate(Y, Z[:1]), ValueError, r"expand it with z.expand_as\(y\)"),
        (lambda: gate(Y, Z, out=Y.view(-1)), ValueError, r"allocate it with torch.empty_like\(y\)"),
        (lambda: gate_(Y[:1].expand(4, 6), Z), ValueError, r"^y has elements .* y.clone\(\) and take the results"),
        (lambda: silu_and_mul(Y[:, :5]), ValueError, r"gate must be \[..., 2 \* N\] where up is not given"),
        (lambda: silu_and_mul(Y, out=Y), ValueError, r"torch.empty_like\(gate\[..., :3\]\)"),
        (
            lambda: silu_and_mul(Y.double(), between=torch.float32),
            TypeError,
            "between is float32 while gate is float64",
        ),
        (
            lambda: torch.ops.fusednorm.gate(Y, Z, "silu", torch.float32, torch.float32),
            TypeError,
            "between must be None, torch.float16 or torch.bfloat16",
        ),
        (
            lambda: torch.ops.fusednorm.gate(Y.double(), Z.double(), "silu", torch.float16, torch.float64),
            TypeError,
            "and None where an operand is float64, got torch.float16",
        ),
    ],
)
def test_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_outputs_of_other_dtypes_without_the_fast_path(monkeypatch):
    z, y = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    wanted = [
        f(*given, out=torch.empty(3, 8, dtype=torch.bfloat16)) for f, given in ((silu_and_mul, (z, y)), (gate, (y, z)))
    ]
    close_fast_path(monkeypatch)
    assert torch.equal(silu_and_mul(z, y, out=torch.empty(3, 8, dtype=torch.bfloat16)), wanted[0])
    assert torch.equal(gate(y, z, out=torch.empty(3, 8, dtype=torch.bfloat16)), wanted[1])


@pytest.mark.skipif(not fast_path.OPEN, reason="no fast path: compiled, with torch 2.10 or newer")
def test_gradients_on_the_fast_path(monkeypatch):
    """What is usual, with the bits of the other way into C; what is refused leaves the gradients as they were."""
    rows = torch.randn(3, 5, 260, generator=torch.Generator().manual_seed(4))
    d, y, z = (t[:, :128] for t in rows)
    half, same = torch.bfloat16, torch.Tensor.equal

    def gradients(d, y, z, *how):
        flags = {**GATE_FLAGS, "activation": how[0], "between": how[1]}
        with fusednorm.use_backend("cpu"):
            return run_gates.backward(d, (y, z), flags, (True, True))

    def by_c(tensors, function, between):
        with fusednorm.use_backend("cpu"):
            fusednorm.gate(Y, Z)  # opens the fast path
            return of_c.gate_backward(*tensors, function, KINDS[between], *steps_in_c(GateSteps()))

    for operands in ((d, y, z), (d.bfloat16(), y.bfloat16(), z), (d, y.double(), z), (d, y.half(), z.bfloat16())):
        for how in (("silu", None), ("sigmoid", half), ("gelu_tanh", None)):
            new = [torch.empty_like(t) for t in operands[1:]]
            assert by_c((*operands, *new), *how)
            with monkeypatch.context() as patch:
                patch.setattr(of_c, "gate_backward", lambda *_: False)
                wanted = gradients(*operands, *how)
            assert all(map(same, new, wanted))
            assert all(map(same, gradients(*operands, *how), wanted))
            alone = torch.zeros_like(new[1])
            assert by_c((*operands, None, alone), *how)
            assert alone.equal(wanted[1])
    for operands, how in (
        ((d[:3], y, z), ("silu", None)),
        ((d, y, z[:, :64]), ("silu", None)),
        ((d, y.t().contiguous().t(), z), ("silu", None)),
        ((d, y, z.int()), ("silu", None)),
        ((d, y, z), ("relu", None)),
    ):
        new = [torch.full_like(t, 7) for t in operands[1:]]
        assert not by_c((*operands, *new), *how)
        assert all(t.eq(7).all() for t in new)
    with pytest.raises(TypeError, match="gate_backward takes 12 arguments, got 1"):
        fast_path.gate_backward(d)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(backend, activation):
    """Of results and of gradients, forwards too, where the gate is low, near 0 and large."""
    z = torch.tensor([[-700.0, -90.0, -8.0, -1.3], [-0.2, 0.4, 3.0, 40.0]], dtype=torch.float64)
    y = torch.linspace(-2, 1, 8, dtype=torch.float64).view(2, 4)
    leaves = [t.clone().requires_grad_() for t in (y, z)]
    with fusednorm.use_backend(backend):
        assert torch.autograd.gradcheck(lambda y, z: gate(y, z, activation=activation), leaves, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda y, z: gate(y, z, activation=activation), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype):
    """As of torch's silu and its multiplication on a CPU: dtypes and bits are those without it, gradients too."""
    functions = {
        "gate": gate,
        "silu_and_mul": silu_and_mul,
        "unrounded": lambda y, z: silu_and_mul(z, y, between=torch.float32 if z.dtype != torch.float64 else None),
        "norm first": fusednorm.rms_norm_gated,
        "gate first": lambda y, z: fusednorm.rms_norm_gated(y, z, norm_before_gate=False, round_norm=True),
        "module": fusednorm.RMSNormGated(6),
        "torch": lambda y, z: torch.nn.functional.silu(z) * y,
    }
    for kinds in ((torch.float32, torch.float32), (dtype, dtype), (torch.float32, dtype), (torch.float64,) * 2):
        leaves = [t.clone().to(kind).requires_grad_() for t, kind in zip((Y, Z), kinds, strict=True)]
        for name, function in functions.items():
            found = []
            for enabled in (True, False):
                with torch.autocast("cpu", dtype, enabled=enabled):
                    out = function(*leaves)
                    found.append([out, *torch.autograd.grad(out.sum(), leaves)])
            for inside, outside in zip(*found, strict=True):
                assert inside.dtype == outside.dtype, name
                assert inside.equal(outside), name
    preset = fusednorm.quantizations.VLLM_INT8_TOKEN_FUSED
    with torch.autocast("cpu", dtype):
        inside = fusednorm.silu_and_mul_quant(Y, Z, quantization=preset)
    for found, wanted in zip(inside, fusednorm.silu_and_mul_quant(Y, Z, quantization=preset), strict=True):
        assert found.equal(wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tangents_of_gradients(activation):
    """Forwards over backwards, as ``torch.func.hessian`` goes: the same second derivatives as backwards twice."""
    z = torch.linspace(-6, 6, 9, dtype=torch.float64)

    def call(z):
        return gate(torch.ones_like(z), z, activation=activation).sum()

    found, wanted = torch.func.hessian(call)(z), torch.func.jacrev(torch.func.jacrev(call))(z)
    # Either way takes fewer than 32 operations on numbers below 2^8, each with an error of at most 2^-53 of them.
    assert torch.allclose(found, wanted, rtol=0, atol=2 * 32 * 2.0**8 * 2.0**-53)


def sigmoid(z):
    return gate(torch.ones_like(z), z, activation="sigmoid")


def silu(z):
    return gate(torch.ones_like(z), z)


def of_gpt_oss(g, u):
    g, u = g.clamp(max=7.0), u.clamp(min=-7.0, max=7.0)
    return (u + 1) * (g * sigmoid(g * 1.702))


#: Models' formulas in torch's operations, with the specification's sigmoid and silu; and calls that have their bits.
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "round_steps": True}
CONTRACTS = {
    "gpt-oss": (lambda both: of_gpt_oss(both[..., ::2], both[..., 1::2]), GPT_OSS | {"interleaved": True}),
    "MiniMax-M3": (lambda both: of_gpt_oss(*both.chunk(2, -1)), GPT_OSS),
    "DeepSeek-V4": (
        lambda both: silu(both.chunk(2, -1)[0].clamp(max=7.0)) * both.chunk(2, -1)[1].clamp(-7.0, 7.0),
        {"limit": 7.0},
    ),
    "Step 3.7": (
        lambda both: silu(both.chunk(2, -1)[0]).clamp(max=7.0) * both.chunk(2, -1)[1].clamp(-7.0, 7.0),
        {"limit": 7.0, "clamp": "after"},
    ),
}


def tanh(x):
    """The specification's, rounded to x's dtype."""
    return softcap(x, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cap", [30.0, 50.0, 0.3])
def test_softcap_of_gemma_2(cap, dtype, backend):
    """The bits of the model's formula, with the specification's tanh; and its derivative, of the rounded tanh."""
    x = (torch.randn(3, 1030, generator=torch.Generator().manual_seed(3)) * 2 * cap).to(dtype)
    x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    x.requires_grad_()
    with fusednorm.use_backend(backend):
        found = softcap(x, cap, round_steps=True)
        assert bits(found) == bits(tanh(x / cap) * cap)
        (gradient,) = torch.autograd.grad(found.float().sum(), x)
        th = tanh(x / cap).detach().to(activations.accumulator(dtype))
    assert bits(gradient) == bits(((1 - th) * (1 + th)).to(dtype))
    ends = torch.tensor([7.0, cap, -cap], dtype=torch.float64).to(dtype)
    assert bits(found[0, :3].nan_to_num(7.0)) == bits(ends)


def bits(tensor):
    return tensor.detach().nan_to_num(12345.0, math.inf, -math.inf).view(torch.uint8).tolist()


def test_errors_of_tanh():
    """At most 1.06 ulp in float32, at samples of each binade and near 3/4, and 1 ulp in float64."""
    z = torch.arange(0x38000000, 0x41300000, 997, dtype=torch.int32)
    z = torch.cat((z, torch.arange(0x3F400000 - 5000, 0x3F400000 + 400_000, 3, dtype=torch.int32))).view(torch.float32)
    exact = torch.tanh(z.double())
    assert ((tanh(z).double() - exact).abs() <= 1.06 * torch.exp2((torch.frexp(exact)[1] - 24).double())).all()
    z = torch.cat((torch.linspace(1e-3, 2, 1501), torch.linspace(2, 24, 301))).double()
    for number, found in zip(z.tolist(), tanh(z).tolist(), strict=True):
        with mpmath.workdps(40):
            exact = mpmath.tanh(mpmath.mpf(number))
            assert abs(found - exact) <= mpmath.mpf(2) ** (mpmath.frexp(exact)[1] - 53), number
    for ends in (torch.tensor([0.0, -0.0, 1e-40, 3e38, math.inf]), torch.tensor([5e-324, 1e308]).double()):
        assert bits(tanh(ends)) == bits(ends.clamp(max=1.0))
        assert bits(tanh(-ends)) == bits(-ends.clamp(max=1.0))
    assert tanh(torch.tensor([math.nan])).isnan()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("round_steps", [False, True])
def test_derivatives_of_softcap(round_steps):
    x = torch.linspace(-6, 6, 9, dtype=torch.float64, requires_grad=True)

    def call(x):
        return softcap(x, 2.0, round_steps=round_steps)

    assert torch.autograd.gradcheck(call, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, x)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0.0,), ValueError, "cap must be finite and greater than 0"),
        ((-1,), ValueError, "cap must be finite and greater than 0"),
        ((math.inf,), ValueError, "cap must be finite and greater than 0"),
        ((math.nan,), ValueError, "cap must be finite and greater than 0"),
        ((1e-40,), ValueError, "a normal number of float32, got 1e-40"),
        ((None,), TypeError, "cap must be a number, got NoneType; pass a float"),
        (("2",), TypeError, "cap must be a number, got str"),
        ((2.0,), TypeError, "round_steps must be True or False"),
    ],
)
def test_refused_caps(arguments, error, words):
    flags = {"round_steps": 1} if "round_steps" in words else {}
    with pytest.raises(error, match=words):
        softcap(Z, *arguments, **flags)


def test_softcap_is_no_activation():
    names = ", ".join(map(repr, ACTIVATIONS))
    with pytest.raises(ValueError, match=f"activation must be one of {names}, got"):
        gate(Y, Z, activation="softcap")
    with pytest.raises(ValueError, match="activation must be one of"):
        fusednorm.rms_norm_gated(Y, Z, activation="softcap")


def near(limit, dtype):
    """Numbers at a limit and one unit in the last place beside it, ends, and others, as pairs in all combinations."""
    at = torch.tensor([limit, -limit, 0.0], dtype=dtype)
    beside = [torch.nextafter(at, torch.full_like(at, end)) for end in (math.inf, -math.inf)]
    ends = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e30, -1e30, -300, 6.9, -1.3, 0.7], dtype=torch.float64)
    numbers = torch.cat((at, *beside, ends.to(dtype)))
    return torch.cartesian_prod(numbers, numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONTRACTS)
def test_contracts_of_models(name, dtype):
    """The bits of models' formulas, with limits that are hit, and missed by one unit in the last place."""
    formula, flags = CONTRACTS[name]
    g, u = near(7.0, dtype).unbind(1)
    both = torch.stack((g, u), -1).flatten() if flags.get("interleaved") else torch.cat((g, u))
    others = {key: value for key, value in flags.items() if key != "interleaved"}
    for found in (silu_and_mul(both, **flags), silu_and_mul(g, u, **others)):
        assert torch.equal(found.isnan(), formula(both).isnan())
        assert torch.equal(found.nan_to_num(1.0), formula(both).nan_to_num(1.0))


@pytest.mark.parametrize("name", CONTRACTS)
def test_gradients_at_limits(name):
    """As torch's clamp passes them: at the limit and below, and where a NaN is, nothing."""
    formula, flags = CONTRACTS[name]
    flags = {key: value for key, value in flags.items() if key != "round_steps"}
    g, u = near(7.0, torch.float64).unbind(1)
    both = torch.stack((g, u), -1).flatten() if flags.get("interleaved") else torch.cat((g, u))
    both.requires_grad_()
    (found,) = torch.autograd.grad(silu_and_mul(both, **flags).sum(), both)
    (wanted,) = torch.autograd.grad(formula(both).sum(), both)
    assert torch.equal(found == 0, wanted == 0)
    # Fewer than 32 operations on numbers below 2^8, each with an error of at most 2^-53 of them, where they are finite.
    finite = wanted.isfinite() & (wanted.abs() < 2**8)
    assert finite.sum() > 100
    assert (found - wanted)[finite].abs().max() <= 32 * 2.0**8 * 2.0**-53


@pytest.mark.skipif(cpu.unavailable() != [], reason="no C library")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_without_rows_to_multiply(activation, dtype):
    """Kernels return the function's value, as of rows of ones, and its derivative times the incoming gradient."""
    rows, size = 3, 517
    z, d = (torch.randn(2, rows, size, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    strides = (rows * size, size)
    for out_dtype in {dtype, torch.float32}:
        ones, out, dz = torch.ones_like(z), torch.empty(rows, size, dtype=out_dtype), torch.empty_like(z)
        how = (size, rows, rows, activation)
        cpu.forward(gate_call({"z": z, "out": out}, (strides, strides), *how))
        assert torch.equal(out, activations.gated(ones, z, activation, None, out_dtype))
        cpu.backward(gate_call({"d": d, "z": z, "dz": dz}, (strides,) * 3, *how))
        assert torch.equal(dz, activations.gate_gradients(d, ones, z, activation, None, needs=(False, True))[1])


def test_pairs_in_storages_of_their_own():
    """Elements that take turns in memory, of which the gate's storage ends before the last one of up."""
    whole = torch.arange(12.0).numpy()
    gate_, up = torch.from_numpy(whole[:-1])[::2], torch.from_numpy(whole[1:])[::2]
    assert torch.equal(silu_and_mul(gate_, up), silu_and_mul(gate_.clone(), up.clone()))
