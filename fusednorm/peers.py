"""Other implementations of an addition and an RMS norm, as ``python -m fusednorm compare`` finds and calls them.

Each function here looks for one, imports it, and says how to call it; where it is not there, MissingError says why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusednorm

#: x and the residual, both [M, N] -> y. Neither is written to.
Call = Callable[[Tensor, Tensor], Tensor]


class Implementation(NamedTuple):
    """One that is here, and how to call it."""

    name: str
    version: str
    #: What its source rounds before y itself: the "sum" that is normalised, the row before the weight ("norm").
    rounds: str
    #: A weight, [N], and eps -> a call. What it prepares may depend on torch's number of threads.
    build: Callable[[Tensor, float], Call]


class MissingError(Exception):
    """An implementation is not on this machine, or does not run on the device; the message says why."""


def _imported(module: str, package: str) -> Any:
    """The module, which the package on PyPI brings."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingError(f"not installed: pip install {package}")
    return importlib.import_module(module)


def _in_place(operation: Callable[..., object], weight: Tensor, eps: float) -> Call:
    """Of an operation that writes y to x and the sum to the residual."""

    def call(x: Tensor, residual: Tensor) -> Tensor:
        y = x.clone()
        operation(y, residual.clone(), weight, eps)
        return y

    return call


def ours(device: torch.device) -> list[Implementation]:
    """fusednorm with each setting of its flags, so that it stands beside every peer with the same roundings."""
    operand = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
    version = f"{fusednorm.__version__}, backend {fusednorm.explain(operand, operand, operand[0]).backend}"

    def implementation(round_sum: bool, round_norm: bool) -> Implementation:
        def build(weight: Tensor, eps: float) -> Call:
            return lambda x, residual: fusednorm.fused_add_rms_norm(
                x, residual, weight, eps, round_sum=round_sum, round_norm=round_norm
            )[0]

        rounds = ", ".join(["sum"] * round_sum + ["norm"] * round_norm) or "nothing"
        return Implementation("fusednorm", version, rounds, build)

    return [implementation(*flags) for flags in ((True, False), (True, True), (False, False), (False, True))]


def _unfused(weight: Tensor, eps: float) -> Call:
    return lambda x, residual: torch.nn.functional.rms_norm(x + residual, weight.shape, weight, eps)


def eager(device: torch.device) -> list[Implementation]:
    """``F.rms_norm(x + residual, ...)``."""
    return [Implementation("torch eager", torch.__version__, "sum", _unfused)]


def compiled(device: torch.device) -> list[Implementation]:
    """The same under ``torch.compile`` with its defaults, compiled anew for each number of threads."""

    def build(weight: Tensor, eps: float) -> Call:
        torch.compiler.reset()
        call: Call = torch.compile(_unfused(weight, eps))
        return call

    return [Implementation("torch.compile", torch.__version__, "as compiled", build)]


def transformers(device: torch.device) -> list[Implementation]:
    """An addition, and the norm of Llama models."""
    version = _imported("transformers", "transformers").__version__
    llama = importlib.import_module("transformers.models.llama.modeling_llama")

    def build(weight: Tensor, eps: float) -> Call:
        norm = llama.LlamaRMSNorm(len(weight), eps).to(weight)
        norm.weight.data.copy_(weight)
        return lambda x, residual: norm(x + residual)

    return [Implementation("transformers Llama", version, "sum, norm", build)]


def liger(device: torch.device) -> list[Implementation]:
    """``LigerFusedAddRMSNormFunction`` with each casting mode but "none"."""
    if device.type == "cpu":
        raise MissingError("its Triton kernels need a GPU; Triton's interpreter would round bfloat16 otherwise")
    functional = _imported("liger_kernel.transformers.functional", "liger-kernel")
    version = importlib.metadata.version("liger-kernel")

    def implementation(casting_mode: str, rounds: str) -> Implementation:
        def build(weight: Tensor, eps: float) -> Call:
            return lambda x, residual: functional.liger_fused_add_rms_norm(
                x, residual, weight, eps, casting_mode=casting_mode
            )[0]

        return Implementation(f"Liger {casting_mode}", version, rounds, build)

    return [implementation("llama", "sum, norm"), implementation("gemma", "sum")]


def flashinfer(device: torch.device) -> list[Implementation]:
    """``flashinfer.norm.fused_add_rmsnorm``."""
    if device.type != "cuda":
        raise MissingError("it needs a CUDA GPU")
    module = _imported("flashinfer", "flashinfer-python")

    def build(weight: Tensor, eps: float) -> Call:
        return _in_place(module.norm.fused_add_rmsnorm, weight, eps)

    return [Implementation("FlashInfer", module.__version__, "nothing", build)]


def vllm_ir(device: torch.device) -> list[Implementation]:
    """The native implementation of vLLM's operation ``fused_add_rms_norm``, which is plain torch."""
    version = _imported("vllm", "vllm").__version__
    native = importlib.import_module("vllm.ir.ops").fused_add_rms_norm.impls["native"].impl_fn

    def build(weight: Tensor, eps: float) -> Call:
        return lambda x, residual: native(x, residual, weight, eps)[0]

    return [Implementation("vLLM IR native", version, "norm", build)]


def vllm_ops(device: torch.device) -> list[Implementation]:
    """vLLM's C++ or CUDA operator, of its package; on a CPU from the library that VLLM_CPU_SO names, if it does."""
    library = os.environ.get("VLLM_CPU_SO") if device.type == "cpu" else None
    if library:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        operator, version = torch.ops._C.fused_add_rms_norm, os.path.basename(library)
    else:
        version = _imported("vllm", "vllm").__version__
        operator = importlib.import_module("vllm._custom_ops").fused_add_rms_norm

    def build(weight: Tensor, eps: float) -> Call:
        return _in_place(operator, weight, eps)

    # On a CPU the mean of squares is of the sum before it is rounded, y of the rounded one.
    rounds = "sum, for y" if device.type == "cpu" else "sum, norm"
    return [Implementation("vLLM operator", version, rounds, build)]


def onnxruntime(device: torch.device) -> list[Implementation]:
    """A graph of one node, ``com.microsoft.SkipSimplifiedLayerNormalization``, in a session per number of threads."""
    if device.type != "cpu":
        raise MissingError("it is compared on a CPU only")
    runtime, onnx = _imported("onnxruntime", "onnxruntime"), _imported("onnx", "onnx")
    types = {
        torch.float32: onnx.TensorProto.FLOAT,
        torch.float16: onnx.TensorProto.FLOAT16,
        torch.bfloat16: onnx.TensorProto.BFLOAT16,
    }

    def build(weight: Tensor, eps: float) -> Call:
        def value(name: str, *shape: int | str) -> Any:
            return onnx.helper.make_tensor_value_info(name, types[weight.dtype], shape)

        size = len(weight)
        node = onnx.helper.make_node(
            "SkipSimplifiedLayerNormalization", ["x", "skip", "gamma"], ["y"], domain="com.microsoft", epsilon=eps
        )
        inputs = [value("x", "rows", size), value("skip", "rows", size), value("gamma", size)]
        graph = onnx.helper.make_graph([node], "fused_add_rms_norm", inputs, [value("y", "rows", size)])
        imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

        def call(x: Tensor, residual: Tensor) -> Tensor:
            given = {"x": x, "skip": residual, "gamma": weight}
            values = {name: runtime.OrtValue.from_dlpack(tensor) for name, tensor in given.items()}
            return torch.utils.dlpack.from_dlpack(session.run_with_ort_values(None, values)[0])

        return call

    return [Implementation("ONNX Runtime skip-norm", runtime.__version__, "nothing", build)]


#: As ``--peers`` names them, and in the order in which they are shown.
PEERS: dict[str, Callable[[torch.device], list[Implementation]]] = {
    "fusednorm": ours,
    "eager": eager,
    "compile": compiled,
    "transformers": transformers,
    "liger": liger,
    "flashinfer": flashinfer,
    "vllm-ir": vllm_ir,
    "vllm-ops": vllm_ops,
    "onnxruntime": onnxruntime,
}
