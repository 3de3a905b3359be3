"""The golden vectors: bits that may change only together with SPEC_VERSION."""

from dataclasses import replace

import pytest
import torch

from fusednorm.conformance import golden
from fusednorm.conformance.test_quantized import PRESETS

pytestmark = pytest.mark.promise("golden vectors")

VECTORS = golden.read(golden.SPECIFICATION)


@pytest.mark.parametrize("index", range(len(golden.CASES)))
def test_golden_vectors(mode, agree, index):
    """Outputs and gradients of every backend, from stored inputs."""
    golden.compare(VECTORS[index], agree)


def test_every_case_has_a_vector():
    assert len(VECTORS) == len(golden.CASES)


def test_every_preset_has_a_vector():
    wanted = {str(replace(q, layout="row")) for q in PRESETS.values()}
    assert {vector["quantization"] for vector in golden.read(golden.QUANTIZED)} >= wanted


@pytest.mark.parametrize("file", golden.FILES, ids=lambda file: file.stem)
def test_the_oracle_agrees(file):
    for index, vector in enumerate(golden.read(file)):
        assert golden.contradictions(vector) == [], index


def test_encoding_keeps_every_bit():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        bits = torch.randint(-(2**15), 2**15, (3, 16), generator=torch.Generator().manual_seed(0)).to(torch.int16)
        tensor = bits.view(dtype)
        assert torch.equal(golden.decoded(golden.encoded(tensor)).view(torch.int16), bits)
