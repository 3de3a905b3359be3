"""Gates: every 16-bit number, and all layouts."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import (
    BF16,
    F16,
    F32,
    F64,
    Case,
    Guarded,
    check_call,
    dtype_name,
    incoming_of,
    of_oracle,
    operands,
    recorded,
)


@pytest.mark.promise("same bits")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=dtype_name)
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu_tanh", "gelu", "relu2"])
def test_every_16_bit_gate(mode, agree, activation, dtype):
    """The 65,536 numbers: the function's value in float32, as it is rounded, and its derivative."""
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype).view(64, 1024)
    for between in (F32, dtype):
        given = {"y": torch.ones(z.shape, dtype=between), "z": z.to(torch.get_default_device())}
        found = recorded("gate", given, [given["y"]], activation=activation)
        wanted = of_oracle("gate", given, [given["y"]], activation=activation)
        about = f"{activation} of {dtype_name(dtype)}, in {dtype_name(between)}"
        agree((found["out"], found["d_z"]), (wanted["out"], wanted["d_z"]), about)


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
    (d,) = incoming_of("gate", {"y": y})
    found = recorded("gate", {"y": y, "z": z}, [d]).values()
    of_heads = recorded("gate", {"y": heads[0], "z": heads[1]}, [d.view(4, 3, 515)[:, 1:]]).values()
    agree(of_heads, [whole.view(4, 3, 515)[:, 1:] for whole in found], "gradients of heads")
    both = torch.cat((z, y), -1)
    agree(fusednorm.silu_and_mul(both, out=both[:, :515]), fusednorm.silu_and_mul(z, y), "into a half")


@pytest.mark.promise("same bits")
@pytest.mark.left_out("triton_cpu")
def test_many_elements(mode, agree):
    """More than one thread's share, in rows that are no multiple of a tile."""
    y, z, _ = operands(Case(35, 2000).of(BF16))
    check_call(agree, "gate", {"y": y, "z": z}, "many")
