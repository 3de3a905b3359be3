"""The golden vectors: bits that may change only together with SPEC_VERSION."""

import pytest
import torch

from fusednorm.conformance import golden
from fusednorm.conformance.cases import OPERATIONS
from fusednorm.conformance.test_quantized import PRESETS

pytestmark = pytest.mark.promise("golden vectors")

#: All vectors, by the names of their files and places there.
VECTORS = {
    (file.stem.removeprefix("golden-"), index): vector
    for file in golden.FILES
    for index, vector in enumerate(golden.read(file))
}
FEW = [f"compositions-{index}" for index in (0, 3, 6, 9, 20, 23, 30, 54, 58)]
FEW_QUANTIZED = [f"quantized-{index}" for index in (0, 7, 24, 28, 29, 30, 41)]
FEW_LOG_PROB = "log-prob-2?"


@pytest.mark.parametrize(("name", "index"), VECTORS)
@pytest.mark.left_out(but=["spec-*", "gated-*", "quantized-*", "products-*", FEW_LOG_PROB, *FEW])
@pytest.mark.left_out(
    *("cuda", "triton_ptx", "triton"),
    but=["spec-*", "gated-*", "compositions-*", FEW_LOG_PROB, *FEW_QUANTIZED],
)
@pytest.mark.left_out("triton_ptx", of=["*[1235679]"])
@pytest.mark.left_out("cuda", of=["gated-*[236]"])
def test_golden_vectors(mode, agree, name, index):
    """Outputs and gradients of every backend, from stored inputs. The interpreter of Triton has all."""
    golden.compare(VECTORS[name, index], agree)


def test_every_case_has_a_vector():
    assert len(golden.read(golden.SPECIFICATION)) == len(golden.CASES)


def test_every_operation_has_a_vector():
    """Those of the library: tests declare others."""
    written = {golden.function_of(vector) for vector in VECTORS.values()}
    missing = [name for name, one in OPERATIONS.items() if one.function.__module__.startswith("fusednorm.")]
    missing = [name for name in missing if name not in written]
    assert not missing, f"{missing}: add cases to golden.py, then run `python -P -m {golden.__name__}`"


def test_every_preset_has_a_vector():
    texts = {vector["quantization"].partition(" scale_dtype=")[0] for vector in golden.read(golden.QUANTIZED)}
    missing = [name for name, q in PRESETS.items() if str(q).partition(" scale_dtype=")[0] not in texts]
    assert not missing, f"{missing}: add a line to PRESETS of golden.py, then run `python -P -m {golden.__name__}`"


def test_the_oracle_agrees():
    for at, vector in VECTORS.items():
        assert golden.contradictions(vector) == [], at


def test_encoding_keeps_every_bit():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        bits = torch.randint(-(2**15), 2**15, (3, 16), generator=torch.Generator().manual_seed(0)).to(torch.int16)
        tensor = bits.view(dtype)
        assert torch.equal(golden.decoded(golden.encoded(tensor)).view(torch.int16), bits)
