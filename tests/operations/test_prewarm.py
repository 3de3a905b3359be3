"""``prewarm`` makes calls of the kinds that were asked for, with aligned rows and others."""

import sys

import pytest
import torch

import fusednorm
from fusednorm.engine import run
from fusednorm.quantizations import VLLM_INT8_STATIC_AZP_CPU, VLLM_INT8_TOKEN_CPU

NORMS = ("rms_norm", "fused_add_rms_norm")
BEFORE, QUANTIZED = (
    ("rms_norm_add", "rms_norm_add_rms_norm"),
    ("rms_norm_quant", "fused_add_rms_norm_quant", "quantize"),
)


@pytest.fixture
def called(monkeypatch):
    """The calls that prewarm makes from now on: names, the first operand, and the others by position and by name."""
    found = []
    for name in (*NORMS, *BEFORE, *QUANTIZED):

        def spy(x, *given, name=name, **flags):
            found.append((name, x, given, flags))
            return getattr(fusednorm, name)(x, *given, **flags)

        monkeypatch.setattr(sys.modules["fusednorm.operations.prewarm"], name, spy)
    return found


def of(called, names):
    return [(name, x.data_ptr() % 16, x.requires_grad) for name, x, _, _ in called if name in names]


def test_a_norm_before_the_addition(called):
    """With gradients and without."""
    fusednorm.prewarm(64, torch.float32, training=True)
    assert of(called, BEFORE) == []
    fusednorm.prewarm(64, torch.float32, training=True, norm_before_add=True)
    assert of(called, BEFORE) == [(name, at, grad) for at in (0, 4) for grad in (False, True) for name in BEFORE]


@pytest.mark.parametrize("quantization", [VLLM_INT8_TOKEN_CPU, VLLM_INT8_STATIC_AZP_CPU], ids=str)
def test_a_quantizer(called, quantization):
    """Without gradients; a scale is given where there must be one."""
    fusednorm.prewarm(64, torch.float32, training=True, quantization=quantization)
    assert of(called, QUANTIZED) == [(name, at, False) for at in (0, 4) for name in QUANTIZED]


@pytest.mark.parametrize(("heads", "shape"), [(1, (64,)), (5, (2, 64))])
def test_what_is_around_a_norm(called, heads, shape):
    """All operands are aligned, or none."""
    fusednorm.prewarm(64, torch.float32, bias=True, heads=heads, x_scale=0.5, training=True)
    found = []
    for name, x, given, flags in called:
        rows = [x, *given, flags["bias"]]
        shapes = [tuple(t.shape) for t in rows[-2:]]
        found.append((name, {t.data_ptr() % 16 for t in rows}, shapes, flags.get("x_scale"), rows[-1].requires_grad))
    wanted = [
        (at, grad, kind) for at in (0, 4) for grad in (False, True) for kind in zip(NORMS, (None, 0.5), strict=True)
    ]
    assert found == [(name, {at}, [shape, shape], x_scale, grad) for at, grad, (name, x_scale) in wanted]


def test_log_probabilities(monkeypatch):
    """Without a temperature, as calls are that give none."""
    found, forward = [], run.forward

    def spy(plan, operands, *others, **named):
        found.append((plan.kernel.name, operands["logits"].data_ptr() % 16, operands["temperature"]))
        return forward(plan, operands, *others, **named)

    monkeypatch.setattr(run, "forward", spy)
    with fusednorm.use_backend("reference"):  # which has no fast path
        fusednorm.prewarm(64, torch.float32, function=fusednorm.selected_log_prob)
    assert found == [("selected", at, None) for at in (0, 4)]
