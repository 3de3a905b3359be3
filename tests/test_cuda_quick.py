"""The quick way to CUDA's kernels launches what the long way has loaded; on the emulation, tests/emulation/cuda."""

import os

import pytest
import torch

import fusednorm
from fusednorm import quick
from fusednorm.backends import cuda, reference
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, call, differing, expected, operands

pytestmark = pytest.mark.skipif(
    "FUSEDNORM_EMULATED_SM" not in os.environ or not quick.OPEN,
    reason="takes tests/emulation/cuda, and DLPack's exchange API, which torch has since 2.10",
)


def test_forward():
    """Nothing before; afterwards the same bits, in the same layouts; never what overlaps or begins between elements."""
    take = quick.way({"cuda"})

    def way(case, x, residual, weight, out=None, residual_out=None):
        numbers = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
        return take(x, residual, weight, out, residual_out, *numbers, None, True)

    for case in (
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=1, hidden=968).of(BF16, residual=F32, weight=None, round_norm=True, eps=1e-3),
        Case(rows=9, hidden=72).of(F16, residual=None, weight_offset=1.0),
        Case(rows=3, hidden=1528).of(F64, weight_offset=0.5, eps=1e-2),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ):
        x, residual, weight = operands(case)
        y, total = expected(case, "cuda")
        assert way(case, x, residual, weight) is None, case
        with fusednorm.use_backend("cuda"):
            call(case, x, residual, weight)
        for _ in range(2):
            got, got_total = way(case, x, residual, weight)
            assert not differing(got, y).any(), case
            assert residual is None or not differing(got_total, total).any(), case
        given = x.clone()
        got, _ = way(case, given, residual, weight, given, None if residual is None else residual.clone())
        assert got is given
        assert not differing(given, y).any(), case

    case = Case(rows=5, hidden=968).of(BF16)
    x, residual, weight = operands(case)
    memory = torch.zeros(12, 968, dtype=BF16)
    memory[:5] = x
    for outputs in (
        (memory[1:6], None),  # shares rows with x
        (memory[6:11], memory[6:11]),  # both in one place
        (torch.cat([memory, memory])[:5], memory[4:9]),
    ):
        before = memory.clone()
        assert way(case, memory[:5], residual, weight, *outputs) is None
        assert torch.equal(memory, before)
    unaligned = torch.zeros(5 * 968 + 1, dtype=BF16)[1:].view(5, 968)
    assert way(case, unaligned, residual, weight) is None
    assert quick.way({"cpu"})(x, residual, weight, None, None, 1e-6, 0.0, True, False, None, True) is None


@pytest.mark.parametrize("needs", [(True, True, True), (True, True, False), (False, False, True)])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=300, hidden=72).of(F16, residual=F32, weight_offset=1.0),
        Case(rows=3, hidden=1528).of(F64, residual=None, weight_offset=0.5),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ],
    ids=str,
)
def test_backward(case, needs, monkeypatch):
    """Nothing before; afterwards the same bits, with gaps between the rows too."""
    x, residual, weight = operands(case)
    h, rstd = x.float() if x.dtype != F64 else x, torch.rand(case.rows, dtype=x.dtype if x.dtype == F64 else F32)
    dy = torch.cat([x, x], dim=1)[:, : case.hidden]
    given = (
        dy,
        None,
        h,
        rstd,
        weight,
        case.weight_offset,
        x.dtype,
        None if residual is None else residual.dtype,
        needs,
    )
    taken = []
    monkeypatch.setattr(cuda._host, "held", {})
    monkeypatch.setattr(cuda._host, "quick", lambda *a: taken.append(quick.backward(quick.CUDA, *a)) or taken[-1])
    expected = cuda.backward(*given)
    got = cuda.backward(*given)
    assert taken == [False, True]
    for one, other, wanted in zip(got, expected, reference.backward(*given), strict=True):
        assert (one is None) == (wanted is None)
        assert one is None or not (differing(one, other) | differing(one, wanted)).any()
