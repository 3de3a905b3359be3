"""Other implementations of an addition and an RMS norm, for ``compare`` and ``bench``.

Each function of :data:`PEERS` imports one and returns functions that call it, or raises MissingError with the reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusednorm
from fusednorm.tools.measure.workloads import OPERATIONS, Measured, as_tuple, every_measured

#: x and the residual, both [M, N] -> y and the sum. A call in place writes them to x and the residual. For another
#: operation of fusednorm/tools/measure/workloads.py: its inputs -> its outputs.
Call = Callable[..., Any]

#: A weight, [N], and eps -> a call, which is valid for the current number of torch's threads.
Build = Callable[[Tensor, float], Call]

EPS = 1e-6

#: The calls that a user of torch writes; and the peer that compiles it for every shape, which takes seconds.
EAGER, COMPILED = "torch eager", "torch.compile"


class Implementation(NamedTuple):
    """An implementation on this machine, and how to call it."""

    name: str
    version: str
    #: The intermediate results that its source rounds: the "sum", the row before the weight is applied ("norm").
    rounds: str
    build: Build
    #: Whether a call writes y to x, and the sum to the residual; a call that quantizes then overwrites both.
    in_place: bool = False
    #: Whether a call has gradients.
    gradients: bool = False
    #: As ``build``, for operations other than "add_norm".
    others: Mapping[str, Build] = {}

    def of(self, op: str) -> Build | None:
        """The ``build`` of an operation of :data:`.workloads.OPERATIONS`; None if it has no such function."""
        return self.build if op == "add_norm" else self.others.get(op)

    def pure(self, weight: Tensor, eps: float, op: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns a call: x and the residual -> the first output of an operation, which writes to neither."""
        build, operation = self.of(op), OPERATIONS[op]
        assert build is not None
        call = build(weight, eps)

        def on_copies(*given: Tensor) -> Tensor:
            operands = [t.clone() if self.in_place else t for t in given[: len(operation.inputs)]]
            outputs = call(*operands)
            return operands[0] if self.in_place and not operation.quantization else as_tuple(outputs)[0]

        return on_copies


class MissingError(Exception):
    """An implementation is not on this machine, or does not run on the device; the message says why."""


def in_a_line(error: Exception) -> str:
    """An error of another library's code, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def implementations(
    names: Iterable[str], device: torch.device, missing: dict[str, str], op: str | None = None
) -> Iterator[Implementation]:
    """The implementations of :data:`PEERS` that are here, those with an operation; ``missing`` gets others' reasons.

    Each is imported when the one before has been used, because an import may set options: vLLM's sets torch.compile's.
    """
    for name in names:
        try:
            found = [one for one in PEERS[name](device) if op is None or one.of(op) is not None]
            if not found:
                raise MissingError(f"it has no {op}")
        except MissingError as reason:
            missing[name] = str(reason)
        except Exception as error:  # another library's import may raise anything, and must not end the measurement
            missing[name] = in_a_line(error)
        else:
            yield from found


def _imported(module: str, package: str) -> Any:
    """Imports a module, which the package on PyPI has."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingError(f"not installed: pip install {package}")
    return importlib.import_module(module)


def _of(function: Call) -> Build:
    """Builds calls of a function of x, the residual, the weight and eps."""
    return lambda weight, eps: lambda x, residual: function(x, residual, weight, eps)


def ours(device: torch.device) -> list[Implementation]:
    """fusednorm with each setting of its flags, to compare with peers that round at the same places."""
    operand = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
    version = f"{fusednorm.__version__}, backend {fusednorm.explain(operand, operand, operand[0]).backend}"

    def implementation(round_sum: bool, round_norm: bool) -> Implementation:
        function = functools.partial(fusednorm.fused_add_rms_norm, round_sum=round_sum, round_norm=round_norm)
        rounds = ", ".join(["sum"] * round_sum + ["norm"] * round_norm) or "nothing"
        return Implementation("fusednorm", version, rounds, _of(function), others=usual if rounds == "sum" else {})

    def of(op: str) -> Build:
        return lambda weight, eps: OPERATIONS[op].calls(weight, eps).new

    usual = {op: of(op) for op in OPERATIONS}
    return [implementation(*flags) for flags in ((True, False), (True, True), (False, False), (False, True))]


def _in_torch(name: str, rounds: str, compile_it: Callable[[Call], Call]) -> list[Implementation]:
    """The calls that a user of torch writes."""

    def of(op: Measured) -> Build:
        return lambda weight, eps: compile_it(op.in_torch(weight, eps))

    others = {name: of(op) for name, op in every_measured().items() if op.text is not None}
    return [Implementation(name, torch.__version__, rounds, others["add_norm"], gradients=True, others=others)]


def eager(device: torch.device) -> list[Implementation]:
    """The call that a user of torch writes, such as ``F.rms_norm(x + residual, ...)``."""
    return _in_torch(EAGER, "sum", lambda call: call)


def compiled(device: torch.device) -> list[Implementation]:
    """A formula under ``torch.compile``, compiled again for each number of threads."""

    def compile_it(call: Call) -> Call:
        torch.compiler.reset()
        found: Call = torch.compile(call)
        return found

    return _in_torch(COMPILED, "as compiled", compile_it)


def transformers(device: torch.device) -> list[Implementation]:
    """An addition, and the norm of Llama models."""
    version = _imported("transformers", "transformers").__version__
    llama = importlib.import_module("transformers.models.llama.modeling_llama")

    def build(weight: Tensor, eps: float) -> Call:
        norm = llama.LlamaRMSNorm(len(weight), eps).to(weight)
        norm.weight.data.copy_(weight)

        def call(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return norm(total), total

        return call

    return [Implementation("transformers Llama", version, "sum, norm", build)]


def liger(device: torch.device) -> list[Implementation]:
    """``LigerFusedAddRMSNormFunction`` with each casting mode except "none"."""
    if device.type == "cpu":
        raise MissingError("its Triton kernels need a GPU; Triton's interpreter would round bfloat16 otherwise")
    functional = _imported("liger_kernel.transformers.functional", "liger-kernel")
    version = importlib.metadata.version("liger-kernel")

    def implementation(casting_mode: str, rounds: str) -> Implementation:
        function = functional.liger_fused_add_rms_norm
        function = functools.partial(function, casting_mode=casting_mode, in_place=False)
        return Implementation(f"Liger {casting_mode}", version, rounds, _of(function), gradients=True)

    return [implementation("llama", "sum, norm"), implementation("gemma", "sum")]


def flashinfer(device: torch.device) -> list[Implementation]:
    """``flashinfer.norm.fused_add_rmsnorm``."""
    if device.type != "cuda":
        raise MissingError("it needs a CUDA GPU")
    module = _imported("flashinfer", "flashinfer-python")
    build = _of(module.norm.fused_add_rmsnorm)
    return [Implementation("FlashInfer", module.__version__, "nothing", build, in_place=True)]


def quack(device: torch.device) -> list[Implementation]:
    """``quack.rmsnorm`` with a residual."""
    if device.type != "cuda":
        raise MissingError("it needs a CUDA GPU")
    module = _imported("quack", "quack-kernels")

    def build(weight: Tensor, eps: float) -> Call:
        return lambda x, residual: module.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)

    return [Implementation("quack", importlib.metadata.version("quack-kernels"), "nothing", build, gradients=True)]


def sglang(device: torch.device) -> list[Implementation]:
    """SGLang's CUDA operator, of its package ``sgl_kernel``; on a CPU the operator that SGL_CPU_OP names.

    SGL_CPU_OP has the path of a library with its CPU kernels and, after a colon, the namespace and the operator.
    """
    if device.type == "cpu":
        library, _, name = os.environ.get("SGL_CPU_OP", "").partition(":")
        if not library:
            raise MissingError(
                "no package has its CPU operator, and SGL_CPU_OP does not name one: LIBRARY:SPACE.OPERATOR"
            )
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        namespace, _, name = name.partition(".")
        operator, version = getattr(getattr(torch.ops, namespace), name).default, os.path.basename(library)
    else:
        module = _imported("sgl_kernel", "sgl-kernel")
        operator, version = module.fused_add_rmsnorm, module.__version__

    return [Implementation("SGLang operator", version, "nothing", _of(operator), in_place=True)]


def vllm_ir(device: torch.device) -> list[Implementation]:
    """The native implementation of vLLM's operation ``fused_add_rms_norm``, which is plain torch."""
    version = _imported("vllm", "vllm").__version__
    native = importlib.import_module("vllm.ir.ops").fused_add_rms_norm.impls["native"].impl_fn
    return [Implementation("vLLM IR native", version, "norm", _of(native))]


def vllm_ops(device: torch.device) -> list[Implementation]:
    """vLLM's C++ or CUDA operator, from its package, or on a CPU from the library that VLLM_CPU_SO names."""
    library = os.environ.get("VLLM_CPU_SO") if device.type == "cpu" else None
    if library:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        operator, version = torch.ops._C.fused_add_rms_norm.default, os.path.basename(library)
    else:
        version = _imported("vllm", "vllm").__version__
        operator = importlib.import_module("vllm._custom_ops").fused_add_rms_norm

    def to_int8(weight: Tensor, eps: float) -> Call:
        quantize = torch.ops._C.dynamic_scaled_int8_quant.default

        def call(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            operator(x, residual, weight, eps)
            numbers, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty((len(x), 1), dtype=torch.float32)
            quantize(numbers, x, scales, None)
            return numbers, scales, residual

        return call

    # On a CPU it takes the mean of squares from the unrounded sum, and y from the rounded sum.
    rounds = "sum, for y" if device.type == "cpu" else "sum, norm"
    others = {"add_norm_int8": to_int8} if device.type == "cpu" else {}
    return [Implementation("vLLM operator", version, rounds, _of(operator), in_place=True, others=others)]


def onnxruntime(device: torch.device) -> list[Implementation]:
    """The node ``com.microsoft.SkipSimplifiedLayerNormalization``, in a new session for each number of threads."""
    if device.type != "cpu":
        raise MissingError("it is compared on a CPU only")
    runtime, _ = _imported("onnxruntime", "onnxruntime"), _imported("onnx", "onnx")
    parser = importlib.import_module("onnx.parser")

    def build(weight: Tensor, eps: float) -> Call:
        kind = str(weight.dtype).removeprefix("torch.").replace("float32", "float")
        rows, row = f"{kind}[rows, {len(weight)}]", f"{kind}[{len(weight)}]"
        model = parser.parse_model(f"""
            <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
            fused_add_rms_norm ({rows} x, {rows} skip, {row} gamma) => ({rows} y, {rows} sum) {{
                y, "", "", sum = com.microsoft.SkipSimplifiedLayerNormalization <epsilon: float = {eps!r}>
                    (x, skip, gamma)
            }}""")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

        def call(x: Tensor, residual: Tensor) -> list[Tensor]:
            given = {"x": x, "skip": residual, "gamma": weight}
            values = {name: runtime.OrtValue.from_dlpack(tensor) for name, tensor in given.items()}
            return [torch.utils.dlpack.from_dlpack(value) for value in session.run_with_ort_values(None, values)]

        return call

    return [Implementation("ONNX Runtime skip-norm", runtime.__version__, "nothing", build)]


#: By the name that ``--peers`` takes, in the order of the tables.
PEERS: dict[str, Callable[[torch.device], list[Implementation]]] = {
    "fusednorm": ours,
    "eager": eager,
    "compile": compiled,
    "transformers": transformers,
    "liger": liger,
    "flashinfer": flashinfer,
    "quack": quack,
    "sglang": sglang,
    "vllm-ir": vllm_ir,
    "vllm-ops": vllm_ops,
    "onnxruntime": onnxruntime,
}
