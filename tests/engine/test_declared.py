"""A call of a declared operation that a backend has in one."""

import struct

import torch
from toys import PICK

from fusednorm.calls import c_abi
from fusednorm.engine import run


def test_a_backend_is_given_operands_and_results_by_name(monkeypatch):
    """The rows in levels of strides; C has all in their order."""
    steps, calls = [], []

    class Backend:
        forward = backward = staticmethod(calls.append)

    monkeypatch.setattr(run, "backend_of", lambda rows, step: steps.append(step.name) or Backend)
    monkeypatch.setattr(c_abi, "_DECLARED_OF", {"pick": 40, "pick_backward": 41})
    x, ids, d = torch.zeros(4, 3, 16)[:, :2, :8], torch.zeros(2, 4, dtype=torch.int32).T, torch.zeros(4, 2)
    (out,) = run.forward(PICK.plan, {"x": x, "ids": ids}, {})
    (dx,) = run.backward(PICK.plan, {"d": d, "x": x, "ids": ids}, [True])
    assert run.backward(PICK.plan, {"d": d, "x": x, "ids": ids}, [False]) == (None,)
    assert steps == ["pick", "pick_backward"]
    forward, backward = calls
    for call, last, strides in ((forward, {"out": out}, {}), (backward, {"d": d, "out": dx}, {"out": (16, 8)})):
        assert call.name == "pick"
        assert call.tensors["ids"].is_contiguous()
        assert [*call.tensors] == ["x", "ids", *last]
        assert all(call.tensors[name] is tensor for name, tensor in last.items())
        assert call.strides == {"x": (48, 16), **strides}
        number, wide, threads, rows, hidden, id_size, count = 40 + call.backward, 0, 2, 8, 8, 4, 1
        fields = struct.unpack("=13q2d36q", c_abi.pack_declared(call, threads))
        numbers, operands = fields[:15], fields[15:]
        assert numbers[:7] == (call.backward, number, wide, threads, rows, 2, hidden)
        assert numbers[7:] == (id_size, count, *[0] * 6)
        addresses = [t.data_ptr() for t in call.tensors.values()]
        assert list(operands[1::4]) == addresses + [0] * (9 - len(addresses))
        assert operands[2:4] == (48, 16)


def test_without_a_backend_the_formula_serves(monkeypatch):
    monkeypatch.setattr(run, "backend_of", lambda rows, step: None)
    x, ids, d = torch.rand(3, 8), torch.tensor([1, 7, 0]), torch.rand(3)
    plan, declaration = PICK.plan, PICK.declaration
    assert torch.equal(run.forward(plan, {"x": x, "ids": ids}, {})[0], declaration.formula(x, ids)[0])
    (found,) = run.backward(plan, {"d": d, "x": x, "ids": ids}, [True])
    assert torch.equal(found, declaration.gradient(d, x, ids, [True])[0])
