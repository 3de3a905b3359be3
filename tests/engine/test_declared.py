"""A call of a declared operation that a backend has in one."""

import itertools

import pytest
import torch
from toys import PICK, SCALED

from fusednorm import linear
from fusednorm.backends import cpu
from fusednorm.calls import c_abi, c_kinds
from fusednorm.calls.call import Call
from fusednorm.declare.declaration import Declaration, Operand, Role
from fusednorm.declare.plan import Plan
from fusednorm.engine import run
from fusednorm.operations.front_door import PUBLIC
from fusednorm.reference import norm as reference

F32, I32, I64 = torch.float32, torch.int32, torch.int64
compiled = pytest.mark.skipif(bool(cpu.unavailable()), reason="takes the C library")


@pytest.fixture
def made(monkeypatch):
    """The calls that a backend is given, and the steps that it was asked for."""
    steps, calls = [], []

    class Backend:
        forward = backward = staticmethod(calls.append)

    monkeypatch.setattr(run, "backend_of", lambda rows, *step: steps.append(step) or Backend)
    return steps, calls


def in_c(call, threads=1, number=40):
    """``struct fn_declared`` of a call, by cffi; and its operands: the kind, the address and the strides of each."""
    names = {call.name: number, f"{call.name}_backward": number + 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_abi, "_DECLARED_OF", names)
        packed = c_abi.pack_declared(call, threads)
    found = cpu._extension.ffi.from_buffer("struct fn_declared *", packed)
    return found, [(o.kind, o.address, (o.outer_stride, o.stride)) for o in found.operand]


@compiled
def test_c_has_room_for_what_python_packs():
    struct = cpu._extension.ffi.new("struct fn_declared *")
    assert (len(struct.flag), len(struct.operand)) == (c_abi._FLAGS_OF_DECLARED, c_abi._OPERANDS_OF_DECLARED)
    tensors, flags = {str(i): torch.ones(1, 1) for i in range(16)}, dict.fromkeys(map(str, range(16)), 0.5)
    found, operands = in_c(Call("toy", False, tensors, {}, flags, 1, 1, 1))
    assert list(operands) == [(c_kinds.KINDS[F32], t.data_ptr(), (1, 1)) for t in tensors.values()]
    assert [flag.number for flag in found.flag] == [0.5] * 16
    for more in ({"tensors": {**tensors, "one": None}}, {"flags": {**flags, "one": 1}}):
        with pytest.raises(AssertionError, match="no room for so many"):
            in_c(Call("toy", False, tensors, {}, flags, 1, 1, 1)._replace(**more))


@compiled
@pytest.mark.parametrize("ids", [torch.zeros(2, 4, dtype=I32).T, torch.zeros(4, 2, dtype=I64)], ids=str)
def test_a_backend_is_given_operands_and_results_by_name(made, ids):
    """The rows in levels of strides; C has all in their order, and one id of each row."""
    x, d = torch.zeros(4, 3, 16)[:, :2, :8], torch.zeros(4, 2)
    plan = PICK.plan
    (out,) = run.forward(plan, {"x": x, "ids": ids}, {})
    (dx,) = run.backward(plan, {"d": d, "x": x, "ids": ids}, [True])
    assert run.backward(plan, {"d": d, "x": x, "ids": ids}, [False]) == (None,)
    steps, (forward, backward) = made
    assert [step.name for (step,) in steps] == ["pick", "pick_backward"]
    kind = c_kinds.KINDS[ids.dtype]
    for call, last, strides in ((forward, {"out": out}, {}), (backward, {"d": d, "dx": dx}, {"dx": (16, 8)})):
        assert call.tensors["ids"].is_contiguous()
        assert [*call.tensors] == ["x", "ids", *last]
        assert all(call.tensors[name] is tensor for name, tensor in last.items())
        assert call.strides == {"x": (48, 16), **strides}
        found, operands = in_c(call, 2)
        assert (getattr(found, "pass"), found.operation, found.wide) == (call.backward, 40 + call.backward, 0)
        assert (found.threads, found.rows, found.inner, found.hidden) == (2, 8, 2, 8)
        assert (found.first, found.size, found.sums, found.given) == (0, 0, 0, 0)
        lies = [call.strides.get(name, (2, 1)) for name in call.tensors]
        kinds = [1, kind, *[1] * len(last)]
        addresses = [t.data_ptr() for t in call.tensors.values()]
        assert operands == [*zip(kinds, addresses, lies, strict=True)] + [(0, 0, (0, 0))] * (16 - len(kinds))


@compiled
@pytest.mark.parametrize(("heads", "lies"), [(None, (0, 0)), (3, (0, 8))])
def test_rows_share_a_weight_and_its_gradient_is_a_sum(made, heads, lies):
    """Of all rows, or of those of a head; and an operand that there is not keeps its place."""
    x, d = torch.zeros(5, 3, 8), torch.zeros(5, 3, 8)
    weight = torch.zeros(8) if heads is None else torch.zeros(heads, 8)
    given = {"d": d, "x": x, "weight": weight, "factor": 0.3, "eps": 1e-6}
    _, dweight = run.backward(SCALED.plan, given, [True, True])
    run.forward(SCALED.plan, {"x": x, "weight": None}, {"factor": 0.5, "eps": 1e-6})
    backward, forward = made[1]
    found, operands = in_c(backward)
    assert [*backward.tensors] == ["x", "weight", "d", "dx", "dweight"]
    assert operands[1][1:] == (weight.data_ptr(), lies)
    assert operands[4][1:] == (dweight.data_ptr(), (15, 1) if heads is None else (5, 3))
    assert (found.sums, found.given) == (1 << 4, 0b11)
    assert [flag.number for flag in found.flag][:3] == [0.3, 1e-6, 0]
    assert in_c(forward)[1][1] == (0, 0, (0, 0))
    assert in_c(forward)[1][2][1] == forward.tensors["out"].data_ptr()


@compiled
def test_a_table_has_a_row_for_each_row_of_heads(made):
    operands = (Operand("x"), Operand("cos", Role.TABLE), Operand("sin", Role.TABLE))
    flags = {"softcap": float, "window": int, "causal": False, "scale": 0.5}
    plan = Plan(Declaration("attended", operands, lambda **_: (), flags=flags))
    x, table = torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 4)
    given = {"softcap": None, "window": -7, "causal": False, "scale": 0.25}
    run.forward(plan, {"x": x, "cos": table, "sin": table}, given)
    [call] = made[1]
    found, lie = in_c(call)
    assert found.inner == 3
    assert [strides for *_, strides in lie[:4]] == [(24, 8), (4, 0), (4, 0), (24, 8)]
    assert found.given == 0b1110
    assert [flag.whole for flag in found.flag][:3] == [0, -7, 0]
    assert found.flag[3].number == 0.25


@compiled
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float64], ids=str)
def test_sums_over_rows_have_the_order_of_rowsum(dtype):
    """Of all rows, of those of a head, and of those of a sample; one thread takes a sum, or several do."""
    rows, size = 771, 100
    y, scale, shift, d = torch.rand(4, rows, size, generator=torch.Generator().manual_seed(1)).to(dtype) - 0.5
    wide = reference.accumulator(dtype)
    of_shift, of_scale = d.to(wide), d.to(wide) * y.to(wide)
    parts = {(771, 1): lambda t: [t], (257, 1): lambda t: t.split(257), (257, 3): lambda t: [t[k::3] for k in range(3)]}
    sums = {
        lies: [torch.stack([*map(reference.rowsum, of(t))]).to(dtype) for t in (of_scale, of_shift)]
        for lies, of in parts.items()
    }
    for lies, others, threads in itertools.product(sums, sums, (1, 2, 7)):
        read, wanted = {"y": y, "scale": scale, "shift": shift, "d": d}, (sums[lies][0], sums[others][1])
        dy, (dscale, dshift) = torch.empty_like(y), map(torch.empty_like, wanted)
        tensors = {**read, "dy": dy, "dscale": dscale, "dshift": dshift}
        call = Call("modulate", True, tensors, {}, {"round_steps": False}, size, rows, rows)
        call = call._replace(sums={"dscale": lies, "dshift": others})
        for variant in cpu.variants():
            for t in (dy, dscale, dshift):
                t.fill_(torch.nan)
            with cpu.use_variant(variant):
                assert not cpu._lib.fn_run_declared(c_abi.pack_declared(call, threads))
            assert dscale.equal(wanted[0]), (lies, others, threads, variant)
            assert dshift.equal(wanted[1]), (lies, others, threads, variant)
            assert dy.equal((d.to(wide) * (scale.to(wide) + 1)).to(dtype))


def test_a_matrix_is_given_whole(made):
    """Packed, and not once for each row, beside rows of another length in new memory or in the caller's."""
    plan = PUBLIC[linear].plan
    x, bias = torch.zeros(4, 3, 16)[:, :2, :8], torch.zeros(5, 2)[:, 0]
    operands, flags = {"x": x, "weight": torch.zeros(8, 5).t(), "bias": bias}, {"out_dtype": torch.bfloat16}
    (new,) = run.forward(plan, operands, flags)
    wide = torch.zeros(4, 2, 9, dtype=torch.bfloat16)[..., :5]
    assert linear(x, operands["weight"], out=wide) is wide
    steps, calls = made
    assert [step.name for (step,) in steps] == ["linear"] * 2
    assert (new.shape, new.dtype) == ((4, 2, 5), torch.bfloat16)
    for call, out, lies in zip(calls, (new, wide), ((10, 5), (18, 9)), strict=True):
        assert [*call.tensors] == ["x", "weight", "bias", "out"]
        assert call.tensors["x"] is x
        assert call.tensors["out"] is out
        assert (call.tensors["weight"].shape, call.tensors["weight"].stride()) == ((5, 8), (8, 1))
        assert call.strides == {"x": (48, 16), "out": lies}
        assert (call.hidden_size, call.rows, call.inner, call.flags) == (8, 8, 2, {})
    assert calls[0].tensors["bias"].is_contiguous()
    assert calls[1].tensors["bias"] is None
    for fewer in ({"x": x[:0]}, {"weight": torch.zeros(0, 8), "bias": None}):
        (none,) = run.forward(plan, operands | fewer, flags)
        assert none.numel() == 0
    assert len(calls) == 2


def test_without_a_backend_the_formula_serves(monkeypatch):
    monkeypatch.setattr(run, "backend_of", lambda rows, step: None)
    x, ids, d = torch.rand(3, 8), torch.tensor([1, 7, 0]), torch.rand(3)
    plan, declaration = PICK.plan, PICK.declaration
    assert torch.equal(run.forward(plan, {"x": x, "ids": ids}, {})[0], declaration.formula(x, ids)[0])
    (found,) = run.backward(plan, {"d": d, "x": x, "ids": ids}, [True])
    assert torch.equal(found, declaration.gradient(d, x, ids, [True])[0])


def test_a_gradient_without_a_flag_of_its_operation(made):
    """A backend is asked about the flags that the gradient takes."""

    def gradient(d, x, scale, needs):
        return (d * scale,)

    flags = {"rounded": False, "scale": 1.0}
    plan = Plan(Declaration("scaled", (Operand("x"),), lambda **_: (), flags=flags, gradient=gradient))
    run.backward(plan, {"d": torch.ones(2, 8), "x": torch.ones(2, 8), "scale": 0.5}, [True])
    assert [step.also for (step,) in made[0]] == [("scaled_backward.scale",)]
