"""Gates: every 16-bit number, all dtypes and layouts, gradients, and golden vectors."""

import pytest
import torch

import fusednorm
from fusednorm.conformance import golden, oracle_gated
from fusednorm.conformance.cases import BF16, DATA, DTYPES, F16, F32, F64, Case, Guarded, covering, dtype_name, operands

ACTIVATIONS = ("silu", "sigmoid", "gelu_tanh")
AND_MUL = {"silu": fusednorm.silu_and_mul, "gelu_tanh": fusednorm.gelu_tanh_and_mul}


def differentiated(function, leaves, d=None):
    """The result and the gradients of the leaves for an incoming gradient; without one, of normal numbers."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    if d is None:
        generator = torch.Generator().manual_seed(3)
        d = torch.randn(out.shape, generator=generator, device="cpu").to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, d)], d


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=dtype_name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_16_bit_gate(mode, agree, activation, dtype):
    """The 65,536 numbers: the function's value in float32, as it is rounded, and its derivative."""
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype).view(64, 1024)
    for between in (F32, dtype):
        y = torch.ones_like(z, dtype=between)
        (value, slope), _ = differentiated(
            lambda leaf, y=y: fusednorm.gate(y.to(leaf.device), leaf, activation=activation),
            [z.to(torch.get_default_device())],
            y.to(torch.get_default_device()),
        )
        wanted = oracle_gated.gated(y, z, activation, None, between, y)
        agree((value, slope), wanted[::2], f"{activation} of {dtype_name(dtype)}, in {dtype_name(between)}")


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("y_dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.left_out("triton_ptx", "triton_cpu")
@pytest.mark.left_out("cuda", but=["silu-bfloat16", "sigmoid-float32", "gelu_tanh-float16", "*-float64"])
def test_dtypes_and_data(mode, agree, activation, y_dtype):
    """Gates of every size, with numbers near the ends of each dtype's range among them."""
    axes = (DTYPES, (None, *DTYPES), ("normal", *DATA), (1, 33, 1030), (1.0, 30.0, 800.0))
    for z_dtype, out, data, hidden, factor in covering(*axes, turn=DTYPES.index(y_dtype)):
        if y_dtype != F64 and F64 in (z_dtype, out):
            continue
        y, z, _ = operands(Case(4, hidden, y_dtype, z_dtype, data=data))
        z = z * factor
        found, d = differentiated(
            lambda y, z, out=out: fusednorm.gate(y, z, activation=activation, out_dtype=out), [y, z]
        )
        wanted = oracle_gated.gated(y, z, activation, None, out or y_dtype, d)
        agree(found, wanted, f"{activation}, {y_dtype}, {z_dtype}, {out}, {data}, {hidden}, {factor}")


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("activation", AND_MUL)
@pytest.mark.parametrize("gate", DTYPES, ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
def test_and_mul(mode, agree, gate, activation):
    """Two tensors, and one that holds both; each with what passes between rounded or not."""
    function = AND_MUL[activation]
    for up, between, hidden, data in covering(DTYPES, (None, F32), (16, 1100), ("normal", "overflowing", "nan row")):
        if (between is not None) if gate == F64 else (up == F64):
            continue
        g, u, _ = operands(Case(5, hidden, gate, up, data=data))
        g = g * 5
        passed = None if between or gate in (F32, F64) else gate
        found, d = differentiated(lambda g, u, between=between: function(g, u, between=between), [g, u])
        out, du, dg = oracle_gated.gated(u, g, activation, passed, gate, d)
        about = f"{activation}: {gate}, {up}, {between}, {hidden}, {data}"
        agree(found, (out, dg, du), about)
        if up != gate:
            continue
        both = torch.cat((g, u), -1)
        of_both, _ = differentiated(lambda x, between=between: function(x, between=between), [both], d)
        agree(of_both, (out, torch.cat((dg, du), -1)), f"one tensor, {about}")


@pytest.mark.promise("fused equals unfused")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
@pytest.mark.left_out(but=["bfloat16"])
def test_separate_calls(mode, agree, dtype):
    """``silu_and_mul`` is silu, rounded, and a multiplication."""
    g, u, _ = operands(Case(6, 300).of(dtype))
    silu = fusednorm.gate(torch.ones_like(g), g)
    agree(fusednorm.silu_and_mul(g, u), silu * u, "rounded between")
    unrounded = fusednorm.gate(torch.ones_like(g), g, out_dtype=F32) * u.float()
    agree(fusednorm.silu_and_mul(g, u, between=F32), unrounded.to(dtype), "not rounded between")
    agree(fusednorm.gate(u, g), unrounded.to(dtype), "gate")


@pytest.mark.promise("a row is a row")
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=dtype_name)
@pytest.mark.left_out("triton_cpu")
def test_rows_and_layouts(mode, agree, dtype):
    """Rows alone, in a larger matrix, in heads, in place, and into given memory, which is all that is written."""
    y, z, _ = operands(Case(12, 515).of(dtype))
    wanted = fusednorm.gate(y, z)
    for row in range(0, 12, 5):
        agree(fusednorm.gate(y[row], z[row]), wanted[row], f"row {row}")
    apart = [Guarded(12, 515, dtype, stride=stride).filled(t) for t, stride in ((y, 600), (z, 515), (z, 519))]
    given, gate, out = (guarded.tensor for guarded in apart)
    assert fusednorm.gate(given, gate, out=out) is out
    agree(out, wanted, "given memory")
    assert fusednorm.gate_(given, gate) is given
    agree(given, wanted, "in place")
    agree(fusednorm.gate(y, gate, out=gate), wanted, "into the gate")
    for guarded in apart:
        guarded.check()
    heads = [t.view(4, 3, 515)[:, 1:] for t in (y, z, wanted)]
    agree(fusednorm.gate(*heads[:2]), heads[2], "heads")
    turned = [t.view(4, 3, 515).transpose(0, 2) for t in (y, z, wanted)]
    agree(fusednorm.gate(*turned[:2]), turned[2], "elements that are not adjacent")
    into = torch.empty_like(turned[0])
    agree(fusednorm.gate(*turned[:2], out=into), turned[2], "into elements that are not adjacent")
    found, d = differentiated(fusednorm.gate, [y, z])
    of_heads, _ = differentiated(fusednorm.gate, heads[:2], d.view(4, 3, 515)[:, 1:])
    agree(of_heads, [whole.view(4, 3, 515)[:, 1:] for whole in found], "gradients of heads")
    both = torch.cat((z, y), -1)
    agree(fusednorm.silu_and_mul(both, out=both[:, :515]), fusednorm.silu_and_mul(z, y), "into a half")


@pytest.mark.promise("same bits")
@pytest.mark.left_out("triton_cpu")
def test_many_elements(mode, agree):
    """More than one thread's share, in rows that are no multiple of a tile."""
    y, z, _ = operands(Case(35, 2000).of(BF16))
    found, d = differentiated(fusednorm.gate, [y, z])
    agree(found, oracle_gated.gated(y, z, "silu", None, BF16, d), "many")


VECTORS = golden.read(golden.GATED)


@pytest.mark.promise("golden vectors")
@pytest.mark.parametrize("index", range(len(VECTORS)))
def test_golden_vectors(mode, agree, index):
    golden.compare(VECTORS[index], agree)
