"""Patched layers that fuse nothing, and vLLM as it was, for tests of the plug-in in this process."""

import logging
import os

import pytest


@pytest.fixture
def unfused(monkeypatch):
    """Call it, and from then on patched layers add and normalise one after the other."""
    from fusednorm.transformers import modules

    return lambda: monkeypatch.setattr(modules, "_added", lambda *_: None)


@pytest.fixture(scope="session")
def eagerly(tmp_path_factory):
    """Variables for engines whose models run eagerly, and which share a cache: both save 7 s of an engine.

    vLLM's sampler is compiled all the same, unless torch compiles nothing. And vLLM starts a process to look at a kind
    of models, and keeps what it found.
    """
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return {"TORCHDYNAMO_DISABLE": "1", "VLLM_CACHE_ROOT": str(shared / "vllm")}


@pytest.fixture
def vllms(monkeypatch):
    """vLLM's operations, and its platform, as they were before and are to be after."""
    import vllm.kernels  # noqa: F401 - adds vLLM's own providers
    from vllm.ir import ops
    from vllm.model_executor import custom_op
    from vllm.model_executor.hw_agnostic import custom_op as agnostic
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import registry
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    from fusednorm.vllm import layers

    monkeypatch.delenv("FUSEDNORM_VLLM", raising=False)
    for of_layers in (custom_op, agnostic):
        monkeypatch.setattr(of_layers, "op_registry_oot", {})
    layers._say_once.cache_clear()
    platform = type(current_platform)
    # Also says that there is nothing of ours yet.
    for name in ("get_default_ir_op_priority", "import_ir_kernels"):
        monkeypatch.setattr(platform, name, getattr(platform, name))
    for method in (linear.UnquantizedLinearMethod, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
        monkeypatch.setattr(method, "process_weights_after_loading", method.process_weights_after_loading)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(Sampler, "compute_logprobs", staticmethod(Sampler.compute_logprobs))
    for name in ("forward_native", "forward_cpu"):
        monkeypatch.setattr(TopKTopPSampler, name, getattr(TopKTopPSampler, name))
    for op in (ops.rms_norm, ops.fused_add_rms_norm):
        assert "fusednorm" not in op.impls
        monkeypatch.setattr(op, "impls", dict(op.impls))
    return ops


@pytest.fixture
def said(caplog, monkeypatch):
    """What the plug-in logs; vLLM's loggers may be cut off from those above."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.fusednorm")
    return caplog
