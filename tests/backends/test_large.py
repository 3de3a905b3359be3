"""Indices beyond 32 bits, where memory allows."""

import mmap
from pathlib import Path

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, DTYPES, Case, dtype_name, expected, operands
from fusednorm.engine import choose

pytestmark = pytest.mark.large

GIB = 1 << 30

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on


def available_memory():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.release
def test_more_elements_than_2_to_the_31(mode, agree):
    """Expanded inputs take no memory; both outputs together 8 GiB."""
    if mode.backend == "reference":
        pytest.skip("the reference keeps several float32 copies of its operands: 40 GiB here")
    if mode.interpreted or mode.emulated:
        pytest.skip("half a million programs would take an interpreter or an emulated GPU a day")
    if mode.variant is not None and mode.variant != choose.load(mode.backend).variants()[-1]:
        pytest.skip("the kernels of one backend share their indexing")
    if available_memory() < 10 * GIB:
        pytest.skip("takes 10 GiB of memory")
    hidden = 4096
    rows = (1 << 31) // hidden + 3
    x, residual, weight = operands(Case(rows=1, hidden=hidden).of(BF16))
    y, total = expected(Case(rows=1, hidden=hidden).of(BF16), mode.backend)
    got, got_total = fusednorm.fused_add_rms_norm(x.expand(rows, hidden), residual.expand(rows, hidden), weight)
    assert got.numel() > 1 << 31
    for row in (0, 1, rows // 2, rows - 4, rows - 3, rows - 2, rows - 1):
        agree(got[row], y[0], f"row {row}")
        agree(got_total[row], total[0], f"row {row}, the sum")


def far_apart(values, stride):
    """Two rows, on the CPU in a mapping of which only their own pages ever exist."""
    if torch.get_default_device().type != "cpu":
        return (
            torch.empty(stride + values.shape[1], dtype=values.dtype)
            .as_strided(values.shape, (stride, 1))
            .copy_(values)
        )
    size = (stride + values.shape[1]) * values.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    tensor = torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, (stride, 1))
    tensor.copy_(values)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_row_strides_beyond_2_to_the_31(mode, agree, dtype):
    if mode.interpreted:
        pytest.skip("Triton's interpreter writes every page of an operand's memory, which is 4 GiB and more here")
    case = Case(rows=2, hidden=1100).of(dtype)
    x, residual, weight = operands(case)
    y, total = expected(case, mode.backend)
    far_x, far_residual = far_apart(x, (1 << 31) + 5), far_apart(residual, (1 << 31) + 1029)
    got, got_total = fusednorm.fused_add_rms_norm(far_x, far_residual, weight)
    agree(got, y, "y")
    agree(got_total, total, "the sum")
    fusednorm.fused_add_rms_norm_(far_x, far_residual, weight)
    agree(far_x, y, "in place")
    agree(far_residual, total, "the sum in place")
