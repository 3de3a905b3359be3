"""``contract``: which steps it lists, and that the digest changes with the bits, and only with them."""

import pytest
import torch

import fusednorm
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
    patched = model(Llamas(8).bfloat16(), torch.nn.GroupNorm(2, 8))
    before = fusednorm.contract(patched)
    assert before.steps == ()
    fusednorm.transformers.patch(patched)
    (step,) = fusednorm.contract(patched).steps
    assert str(step) == "layers.0: rms_norm(eps=1e-05, round_norm=True), bfloat16"
    assert fusednorm.contract(patched).digest == digest(AddRMSNorm(8, round_norm=True, **NORM))
    assert fusednorm.contract(patched, F64).steps == ()  # it computes float64 in float32
    fusednorm.transformers.unpatch(patched)
    assert fusednorm.contract(patched) == before


class Layer(torch.nn.Module):
    """A norm, and an addition before it whose term has a factor."""

    def __init__(self, factor):
        super().__init__()
        self.norm = torch.nn.RMSNorm(8, 2**-20, dtype=BF16)
        self.factor = factor

    def forward(self, x, residual):
        h = residual + x * self.factor
        y = self.norm(h)
        return y, h


def apply_rotary_pos_emb(q, k, cos, sin):
    """Rounds each product."""

    def turn(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return turn(q), turn(k)


def rotated_in_float32(q, k, cos, sin):
    """Rounds once."""
    turned = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


class Attention(torch.nn.Module):
    """Rotates with rounded products."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(8, 8, dtype=BF16)

    def forward(self, q, k, tables):
        cos, sin = tables
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Either(Attention):
    """Rounds products, or does not."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds

    def forward(self, q, k, tables):
        cos, sin = tables
        if self.rounds:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        else:
            q, k = rotated_in_float32(q, k, cos, sin)
        return q, k


class Tables(torch.nn.Module):
    """Those of the rotations: each column twice, as halves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4))

    def forward(self, x, positions):
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def of_patched(part):
    whole = model(part, Tables())
    fusednorm.transformers.patch(whole)
    return fusednorm.contract(whole)


def test_additions_of_a_patched_layer():
    """An addition is listed and changes no digest; a factor changes it. It is read as the layer has it now."""
    plain, one, some = of_patched(Layer(1.0)), of_patched(Layer(1)), of_patched(Layer(0.22))
    assert [str(step) for step in plain.steps] == [
        "layers.0: add(), bfloat16",
        "layers.0.norm: rms_norm(eps=9.5367431640625e-07), bfloat16",
    ]
    assert str(some.steps[0]) == "layers.0: scale(x_scale=0.22), bfloat16"
    assert plain.digest == one.digest
    assert len({plain.digest, some.digest, of_patched(Layer(0.3)).digest, of_patched(Layer(2)).digest}) == 4
    assert of_patched(Layer(2)).digest == of_patched(Layer(2.0)).digest
    assert [step.operation for step in of_patched(Layer(torch.tensor(0.5))).steps] == ["rms_norm"]  # torch computes it
    layer = Layer(0.22)
    assert of_patched(layer).digest == some.digest
    layer.factor = 0.3
    assert fusednorm.contract(layer).steps[0].flags == {"x_scale": 0.3}


def test_rotations_of_patched_attention():
    """Those with other roundings have other digests, but not where nothing is rounded."""
    rounded, unrounded = of_patched(Attention()), of_patched(Either(rounds=False))
    assert [str(step) for step in rounded.steps] == ["layers.0: rotate(round_products=True), bfloat16"]
    assert [str(step) for step in unrounded.steps] == ["layers.0: rotate(), bfloat16"]
    assert rounded.digest != unrounded.digest
    assert rounded == of_patched(Either(rounds=True))
    assert [str(step) for step in of_patched(Attention().float()).steps] == ["layers.0: rotate(), float32"]


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


def test_the_sequence_of_modules_does_not_matter():
    """An engine's model may hold them in another one."""
    names, norms = ("first", "second"), (RMSNorm(8, **NORM), RMSNorm(8, 1e-6, dtype=BF16))
    one, other = (torch.nn.ModuleDict(dict(list(zip(names, norms, strict=True))[::step])) for step in (1, -1))
    assert [step.name for step in fusednorm.contract(other).steps] == ["second", "first"]
    assert fusednorm.contract(one).digest == fusednorm.contract(other).digest


def test_the_digest_is_that_of_the_specification_and_the_steps(monkeypatch):
    """Of no file: golden vectors may be added, and written in another way, while no bit changes."""
    one = RMSNorm(8, **NORM)
    monkeypatch.setattr("pathlib.Path.open", None)
    monkeypatch.setattr("builtins.open", None)
    before = digest(one)
    monkeypatch.setattr("fusednorm.tools.agree.contract.SPEC_VERSION", 2)
    assert digest(one) != before


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
