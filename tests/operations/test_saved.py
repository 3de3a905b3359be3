"""Modules and a program that fusednorm 0.2.0 and torch 2.13 saved (tests/saved): they load, and have the same bits."""

from pathlib import Path

import torch

import fusednorm

SAVED = Path(__file__).parents[1] / "saved"


def load(name):
    return torch.load(SAVED / name, weights_only=False)


def test_modules():
    found, bits = load("modules.pt"), load("bits.pt")
    x, residual, *_ = bits["given"]
    assert found["quantization"] == fusednorm.quantizations.VLLM_FP8_TOKEN
    for name, wanted in bits["norms"].items():
        operands = (x, residual) if name == "RMSNormGated" else (x,)
        assert found["modules"][name](*operands).equal(wanted)
    norm = found["modules"]["AddRMSNorm"]
    for result, wanted in zip(
        norm(x, residual), fusednorm.fused_add_rms_norm(x, residual, norm.weight, norm.eps or 2**-23), strict=True
    ):
        assert result.equal(wanted)


def test_a_program():
    """Of norms, gates, rotations and quantizers, with any number of rows."""
    program, bits = torch.export.load(SAVED / "program.pt2").module(), load("bits.pt")
    for got, wanted in zip(program(*bits["given"]), bits["wanted"], strict=True):
        assert got.equal(wanted)
    more = [torch.cat((t, t)) for t in bits["given"]]
    for got, wanted in zip(program(*more), bits["wanted"], strict=True):
        assert got.equal(torch.cat((wanted, wanted)))
