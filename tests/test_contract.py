"""``contract``: which steps it lists, and that the digest changes with the bits, and only with them."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch

import fusednorm
import fusednorm.conformance
import fusednorm.transformers
from fusednorm import AddRMSNorm, RMSNorm, RMSNormGated
from fusednorm.compat import fla, liger, mamba_ssm, quack
from fusednorm.compat import transformers as hf
from fusednorm.conformance.cases import BF16, F32, F64

NORM = {"eps": 1e-5, "dtype": BF16}


class Llamas(torch.nn.Module):
    """Rounds between the norm and the weight."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def model(*norms):
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(norms), "head": torch.nn.Linear(8, 8, dtype=BF16)})


def only(module, dtype=None):
    (step,) = fusednorm.contract(model(module), dtype).steps
    assert step.name == "layers.0"
    return step


def digest(module, dtype=None):
    return fusednorm.contract(model(module), dtype).digest


@pytest.mark.parametrize(
    ("module", "operation", "flags"),
    [
        (RMSNorm(8, weight_offset=1.0, **NORM), "rms_norm", {"weight_offset": 1.0}),
        (
            AddRMSNorm(8, round_sum=False, round_norm=True, **NORM),
            "fused_add_rms_norm",
            {"round_norm": True, "round_sum": False},
        ),
        (
            RMSNormGated(8, group_size=4, activation="sigmoid", **NORM),
            "rms_norm_gated",
            {"activation": "sigmoid", "group_size": 4},
        ),
        (RMSNormGated(8, norm_before_gate=False, **NORM), "rms_norm_gated", {"norm_before_gate": False}),
        (quack.QuackRMSNorm(8, **NORM), "rms_norm", {}),
        (liger.LigerRMSNorm(8, 1e-5, 1.0, "gemma").bfloat16(), "rms_norm", {"weight_offset": 1.0}),
        (liger.LigerFusedAddRMSNorm(8, 1e-5).bfloat16(), "fused_add_rms_norm", {"round_norm": True}),
        (fla.FusedRMSNormGated(8, activation="swish", dtype=BF16), "rms_norm_gated", {"between": F32}),
        (mamba_ssm.RMSNorm(8, dtype=BF16), "rms_norm_gated", {"between": F32}),
        (
            mamba_ssm.RMSNorm(8, group_size=4, norm_before_gate=False, dtype=BF16),
            "rms_norm_gated",
            {"group_size": 4, "norm_before_gate": False},
        ),
        (hf.Qwen3NextRMSNormGated(8, 1e-5).bfloat16(), "rms_norm_gated", {"round_norm": True}),
        (hf.MambaRMSNormGated(8, 1e-5).bfloat16(), "rms_norm_gated", {"norm_before_gate": False, "round_norm": True}),
    ],
)
def test_modules_of_ours(module, operation, flags):
    step = only(module)
    assert (step.operation, step.flags, step.dtype) == (operation, {"eps": 1e-5, **flags}, BF16)


@pytest.mark.parametrize(
    "module",
    [
        fla.FusedRMSNormGated(8, activation="sigmoid", dtype=BF16),
        mamba_ssm.RMSNorm(8, group_size=4, dtype=BF16),
        mamba_ssm.RMSNorm(8, norm_before_gate=False, dtype=BF16),
        hf.Qwen3NextRMSNormGated(8).bfloat16(),
        hf.Zamba2RMSNormGated(8, 4).bfloat16(),
    ],
)
def test_the_listed_flags_give_the_modules_bits(module):
    x, gate = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)).to(BF16)
    module.weight.data.uniform_(0.5, 1.5)
    step = only(module)
    assert torch.equal(getattr(fusednorm, step.operation)(x, gate, module.weight, **step.flags), module(x, gate))


def test_a_patched_model():
    """The norm that is replaced, in the dtypes in which fusednorm computes it."""
    patched = model(Llamas(8).bfloat16(), torch.nn.LayerNorm(8))
    before = fusednorm.contract(patched)
    assert before.steps == ()
    fusednorm.transformers.patch(patched)
    (step,) = fusednorm.contract(patched).steps
    assert str(step) == "layers.0: rms_norm(eps=1e-05, round_norm=True), bfloat16"
    assert fusednorm.contract(patched).digest == digest(AddRMSNorm(8, round_norm=True, **NORM))
    assert fusednorm.contract(patched, F64).steps == ()  # it computes float64 in float32
    fusednorm.transformers.unpatch(patched)
    assert fusednorm.contract(patched) == before


def test_the_dtype_is_that_of_the_model_while_it_runs():
    """As if it had been cast; without a weight, that of the model's first parameter."""
    wide = RMSNorm(8, 1e-5, round_norm=True)
    assert only(wide).flags == {"eps": 1e-5}
    assert only(wide, BF16) == only(RMSNorm(8, round_norm=True, **NORM))
    assert only(RMSNorm(8, 1e-5, elementwise_affine=False)).dtype == BF16
    assert [only(RMSNorm(8, dtype=dtype)).flags["eps"] for dtype in (BF16, F32, F64)] == [2**-23, 2**-23, 2**-52]


SAME_BITS = [
    (AddRMSNorm(8, **NORM), RMSNorm(8, **NORM)),  # fused equals unfused
    (RMSNorm(8, 1e-5, round_norm=True), RMSNorm(8, 1e-5)),
    (AddRMSNorm(8, 1e-5, round_sum=False), RMSNorm(8, 1e-5)),
    (RMSNorm(8, float(torch.tensor(1e-5)), dtype=BF16), RMSNorm(8, **NORM)),  # as a config of float32 has it
    (RMSNorm(8, None), RMSNorm(8, 2**-23)),
    (
        RMSNorm(8, elementwise_affine=False, weight_offset=1.0, round_norm=True, **NORM),
        RMSNorm(8, elementwise_affine=False, **NORM),
    ),
    (RMSNormGated(8, group_size=8, **NORM), RMSNormGated(8, **NORM)),
    (RMSNormGated(8, 1e-5, between=F32), RMSNormGated(8, 1e-5)),
    (torch.compile(RMSNorm(8, **NORM), backend="eager"), RMSNorm(8, **NORM)),
]

OTHER_BITS = [
    (RMSNorm(8, 1e-6, dtype=BF16), RMSNorm(8, **NORM)),
    (RMSNorm(8, round_norm=True, **NORM), RMSNorm(8, **NORM)),
    (RMSNorm(8, weight_offset=1.0, **NORM), RMSNorm(8, **NORM)),
    (AddRMSNorm(8, round_sum=False, **NORM), RMSNorm(8, **NORM)),
    (RMSNorm(8, 1e-5), RMSNorm(8, **NORM)),
    (RMSNorm(8, 1e-5, dtype=F64), RMSNorm(8, float(torch.tensor(1e-5, dtype=F32)), dtype=F64)),
    (RMSNormGated(8, **NORM), RMSNorm(8, **NORM)),
    (RMSNormGated(8, between=F32, **NORM), RMSNormGated(8, **NORM)),
    (
        RMSNormGated(8, elementwise_affine=False, between=F32, round_norm=True, **NORM),
        RMSNormGated(8, elementwise_affine=False, between=F32, **NORM),
    ),
    (RMSNorm(8, **NORM), torch.nn.Sequential(RMSNorm(8, **NORM))),  # another place in the model
]


@pytest.mark.parametrize(("one", "other"), SAME_BITS)
def test_the_digest_stays_where_the_bits_do(one, other):
    assert digest(one) == digest(other)


@pytest.mark.parametrize(("one", "other"), OTHER_BITS)
def test_the_digest_changes_with_the_bits(one, other):
    assert digest(one) != digest(other)


def test_the_digest_changes_with_the_golden_vectors(monkeypatch):
    """Those of the operations that the model has; and with the number of the specification."""
    norm, gated = RMSNorm(8, **NORM), RMSNormGated(8, **NORM)
    before = digest(norm), digest(gated)
    module = sys.modules["fusednorm.contract"]  # `fusednorm.contract` is the function
    read = module._digest_of
    folder = Path(fusednorm.conformance.__file__).parent
    assert read("golden-gated.json") == hashlib.sha256((folder / "golden-gated.json").read_bytes()).hexdigest()
    monkeypatch.setattr(module, "_digest_of", lambda file: read(file) + "x" * (file == "golden-gated.json"))
    assert digest(norm) == before[0]
    assert digest(gated) != before[1]
    monkeypatch.setattr(module, "SPEC_VERSION", 2)
    assert digest(norm) != before[0]


def test_it_is_printed():
    """A line for each step, and the line to compare."""
    found = fusednorm.contract(model(RMSNorm(8, **NORM), RMSNormGated(8, between=F32, **NORM)))
    first, second, last = str(found).splitlines()
    assert first == "layers.0: rms_norm(eps=1e-05), bfloat16"
    assert second == "layers.1: rms_norm_gated(eps=1e-05, between=torch.float32), bfloat16"
    assert last == f"fusednorm, specification 1, 2 steps: sha256 {found.digest}"
    assert repr(found) == str(found)
    assert len(found.digest) == 64


def test_what_is_no_model():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        fusednorm.contract("Qwen/Qwen3-0.6B")
