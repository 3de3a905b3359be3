"""Add the residual, RMS-normalise: the same bits on every backend.

>>> import torch, fusednorm
>>> x, residual = torch.randn(2, 16, 4096), torch.randn(2, 16, 4096)
>>> y, residual = fusednorm.fused_add_rms_norm(x, residual, torch.ones(4096))

``python -m fusednorm`` shows what this machine has, ``python -m fusednorm check`` proves it.
"""

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec(f"{__name__}.backends") is None:
    # This is a checkout, found through the working directory before the installed package: `python -m` looks there
    # first. Backends and the compiled extension exist only in an install, so all of the package comes from there.
    import os
    import sys

    _checkout = os.path.dirname(os.path.abspath(__file__))
    _elsewhere = [p for p in sys.path if os.path.realpath(p or ".") != os.path.realpath(os.path.dirname(_checkout))]
    _installed = PathFinder.find_spec(__name__, _elsewhere)
    if _installed is None or _installed.submodule_search_locations is None:
        raise ImportError(
            f"fusednorm was imported from {_checkout}, which is a source tree and not an install, and no install "
            "was found; run `pip install .` there (or `pip install -e .` to work on it)"
        )
    __path__ = list(_installed.submodule_search_locations)

from fusednorm.tools import cli as _cli

if _cli.is_running():
    _cli.parsed()  # what it can answer without torch, which takes seconds to import, ends the process here

from fusednorm import environment as _environment  # before torch: see there
from fusednorm import quantizations
from fusednorm.accelerate import accelerate_torch
from fusednorm.calls.quantization import Quantization
from fusednorm.operations import listed as _listed  # noqa: F401 - registers their operators
from fusednorm.operations.attention import attention, paged_attention
from fusednorm.operations.explain import explain
from fusednorm.operations.functions import gelu, relu2, softcap
from fusednorm.operations.gate import gate, gate_, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from fusednorm.operations.int8_linear import int8_linear
from fusednorm.operations.int8_module import Int8Linear
from fusednorm.operations.l2 import l2_norm
from fusednorm.operations.layer_norm import (
    fused_add_layer_norm,
    fused_add_layer_norm_,
    layer_norm,
    layer_norm_,
)
from fusednorm.operations.linear import linear
from fusednorm.operations.log_prob import (
    log_softmax,
    logsumexp,
    selected_log_prob,
    selected_log_prob_and_entropy,
)
from fusednorm.operations.modulate import modulate
from fusednorm.operations.modules import AddLayerNorm, AddRMSNorm, LayerNorm, Linear, RMSNorm, RMSNormGated
from fusednorm.operations.norm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.operations.norm_gated import rms_norm_gated, rms_norm_gated_
from fusednorm.operations.prewarm import prewarm
from fusednorm.operations.quantize import (
    fused_add_layer_norm_quant,
    fused_add_rms_norm_quant,
    layer_norm_quant,
    quantize,
    relu2_quant,
    rms_norm_quant,
    silu_and_mul_quant,
)
from fusednorm.operations.rotate import qk_norm_rope, qk_norm_rope_, rotate
from fusednorm.operations.two_norms import (
    rms_norm_add,
    rms_norm_add_,
    rms_norm_add_rms_norm,
    rms_norm_add_rms_norm_,
)
from fusednorm.registry import BackendError, register_backend, use_backend
from fusednorm.tools.agree.contract import contract
from fusednorm.torch_ops import operators as _operators  # noqa: F401 - registers torch.ops.fusednorm
from fusednorm.version import SPEC_VERSION, __version__

if TYPE_CHECKING:
    from fusednorm.engine.choose import backends
else:
    # A module that can be called: see backends/__init__.py. The others are found without an import of their own.
    from fusednorm import backends, call, layout  # noqa: F401

_environment.warn_of_unread()

__all__ = [
    "SPEC_VERSION",
    "AddLayerNorm",
    "AddRMSNorm",
    "BackendError",
    "Int8Linear",
    "LayerNorm",
    "Linear",
    "Quantization",
    "RMSNorm",
    "RMSNormGated",
    "__version__",
    "accelerate_torch",
    "attention",
    "backends",
    "contract",
    "explain",
    "fused_add_layer_norm",
    "fused_add_layer_norm_",
    "fused_add_layer_norm_quant",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "fused_add_rms_norm_quant",
    "gate",
    "gate_",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "int8_linear",
    "l2_norm",
    "layer_norm",
    "layer_norm_",
    "layer_norm_quant",
    "linear",
    "log_softmax",
    "logsumexp",
    "modulate",
    "paged_attention",
    "prewarm",
    "qk_norm_rope",
    "qk_norm_rope_",
    "quantizations",
    "quantize",
    "register_backend",
    "relu2",
    "relu2_quant",
    "rms_norm",
    "rms_norm_",
    "rms_norm_add",
    "rms_norm_add_",
    "rms_norm_add_rms_norm",
    "rms_norm_add_rms_norm_",
    "rms_norm_gated",
    "rms_norm_gated_",
    "rms_norm_quant",
    "rotate",
    "selected_log_prob",
    "selected_log_prob_and_entropy",
    "silu_and_mul",
    "silu_and_mul_quant",
    "softcap",
    "use_backend",
]
