"""Calls as values: out_dtype and residual_dtype, operations in several kernels, and how C takes a call."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import printed_by

import fusednorm
from fusednorm import BackendError, fused_add_rms_norm, rms_norm
from fusednorm.backends import cpu
from fusednorm.calls import c_abi, c_enums, c_kinds, c_quantizer, function_constants
from fusednorm.calls.call import Backward, Forward, RMSNorm
from fusednorm.conformance.cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    Case,
    call,
    differing,
    dtype_name,
    expected,
    operands,
)
from fusednorm.engine import choose, requested
from fusednorm.reference import norm as reference

from fast_calls import close_fast_path

compiled = pytest.mark.skipif(bool(cpu.unavailable()), reason="takes the C library")
NARROW = (BF16, F16, F32)
FFI, LIB = (None, None) if cpu.unavailable() else (cpu._extension.ffi, cpu._lib)


def same(found, wanted):
    return all(
        a.dtype == b.dtype and a.shape == b.shape and not differing(a, b).any()
        for a, b in zip(found, wanted, strict=True)
    )


# out_dtype and residual_dtype


@compiled
@pytest.mark.parametrize("x", DTYPES, ids=dtype_name)
def test_every_pair_of_dtypes(x):
    """Of the residual and the sum, with each rounding, in rows with ties and in one that overflows float16."""
    dtypes = DTYPES if x == F64 else NARROW
    for residual, residual_out, round_sum, round_norm in itertools.product(dtypes, dtypes, *[(True, False)] * 2):
        for data, out in (("ties", None), ("overflowing", F16), ("normal", F32)):
            case = Case(3, 45, x, residual, x, out, 1e-5, 1.0, round_sum, round_norm, data, residual_out=residual_out)
            with fusednorm.use_backend("cpu"):
                found = call(case, *operands(case))
            assert same(found, expected(case, "reference")), case


@pytest.mark.parametrize("name", [*(["cpu"] if not cpu.unavailable() else []), "reference"])
def test_dtypes_by_argument_are_those_of_outputs_given(name):
    case = Case(5, 40, BF16, F16, F32)
    x, residual, weight = operands(case)
    with fusednorm.use_backend(name):
        found = fused_add_rms_norm(x, residual, weight, out_dtype=F32, residual_dtype=BF16)
        out, total = torch.empty(5, 40), torch.empty(5, 40, dtype=BF16)
        given = fused_add_rms_norm(x, residual, weight, out=out, residual_out=total, residual_dtype=BF16)
        assert given[0] is out
        assert given[1] is total
        assert same(found, given)
        assert same([rms_norm(x, weight, out_dtype=F16)], [rms_norm(x, weight, out=torch.empty(5, 40, dtype=F16))])
        default = fused_add_rms_norm(x, residual, weight, out_dtype=BF16, residual_dtype=F16)
        assert same(default, fused_add_rms_norm(x, residual, weight))


@pytest.mark.parametrize("name", [*(["cpu"] if not cpu.unavailable() else []), "reference"])
def test_fused_equals_unfused(name):
    """The second promise: a sum in its own dtype, then a norm whose accumulator and dtype follow x."""
    x, residual, weight = operands(Case(5, 1030, BF16, F32, BF16))
    with fusednorm.use_backend(name):
        y, total = fused_add_rms_norm(x, residual, weight, residual_dtype=BF16)
        assert same([total], [(x.float() + residual).bfloat16()])
        assert same([y], [rms_norm(total, weight)])


@pytest.mark.parametrize("operator", [False, True], ids=["function", "operator"])
def test_operators_and_compiled_code_take_them(operator):
    """With the same bits in outputs and gradients as a plain call."""
    leaves = [t.requires_grad_() for t in operands(Case(4, 24, BF16, F32, F32))]

    def function(x, residual, weight):
        if operator:
            flags = (1e-6, 0.0, True, False)
            y = torch.ops.fusednorm.rms_norm(x, weight, *flags, F16)[0]
            return *torch.ops.fusednorm.fused_add_rms_norm(x, residual, weight, *flags, F32, F16)[:2], y
        y = rms_norm(x, weight, out_dtype=F16)
        return *fused_add_rms_norm(x, residual, weight, out_dtype=F32, residual_dtype=F16), y

    def results(function):
        outputs = function(*leaves)
        incoming = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in outputs]
        return *outputs, *torch.autograd.grad(outputs, leaves, incoming)

    x, residual, weight = leaves
    wanted = results(lambda *_: (*_plain(x, residual, weight), rms_norm(x, weight, out_dtype=F16)))
    assert [t.dtype for t in wanted] == [F32, F16, F16, BF16, F32, F32]
    assert same(results(function), wanted)
    torch.compiler.reset()
    assert same(results(torch.compile(function, backend="aot_eager", fullgraph=True)), wanted)


def _plain(*leaves):
    return fused_add_rms_norm(*leaves, out_dtype=F32, residual_dtype=F16)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_modes_and_transforms_take_them():
    x, residual, weight = operands(Case(4, 24, BF16, F32, F32))
    wanted = _plain(x, residual, weight)
    found = torch.func.vmap(_plain, in_dims=(0, 0, None))(x, residual, weight)
    assert same(found, wanted)
    with torch.device("meta"):
        empty = [torch.empty(t.shape, dtype=t.dtype) for t in (x, residual, weight)]
    with fusednorm.use_backend("reference"):  # no other takes tensors without memory
        found = _plain(*empty)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in wanted]
    tangent = torch.ones(4, 24, dtype=BF16)
    _, tangents = torch.func.jvp(lambda x: _plain(x, residual, weight), (x,), (tangent,))
    assert [t.dtype for t in tangents] == [F32, F16]


X = torch.rand(2, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: rms_norm(X, out_dtype="float16"), "out_dtype must be torch.float16, .* got 'float16'.* that of x"),
        (lambda: fused_add_rms_norm(X, X, residual_dtype=8), "residual_dtype must be .* got 8.* that of the residual"),
        (lambda: rms_norm(X, out_dtype=F64), "out_dtype is float64 while x is float32; .* or pass out_dtype"),
        (lambda: rms_norm(X, out=X.half(), out_dtype=F32), "out must have the dtype out_dtype float32, got float16"),
        (
            lambda: fused_add_rms_norm(X, X, residual_out=X.clone(), residual_dtype=F16),
            "residual_out must have the dtype residual_dtype float16, got float32",
        ),
        (lambda: fused_add_rms_norm(X, X, residual_out=X.half()), "the residual's dtype float32, got float16"),
        (lambda: fusednorm.explain(X, residual_dtype=F16), "residual_dtype is given without a residual"),
        (
            lambda: torch.ops.fusednorm.rms_norm(X, None, 1e-6, 0.0, True, False, torch.int8),
            "out_dtype must be torch.float16",
        ),
    ],
)
@pytest.mark.parametrize("opened", [False, True], ids=["Python", "fast path"])
def test_dtypes_that_do_not_fit(function, message, opened, monkeypatch):
    if opened:
        fused_add_rms_norm(X, X)
        rms_norm(X)
    else:
        close_fast_path(monkeypatch)
    with pytest.raises(TypeError, match=message):
        function()


# Operations in several kernels


@compiled
@pytest.mark.parametrize(
    ("residual", "stored", "round_sum", "words"),
    [
        (BF16, F32, True, "in two kernels, the first of which converts the residual to float32: C kernels for"),
        (BF16, F32, False, "in two kernels, the first of which converts"),
        (F32, F16, True, "in four kernels, of which one rounds the sum to float16: C kernels for"),
        (F16, BF16, False, "in three kernels, of which one rounds the sum to bfloat16: C kernels for"),
    ],
)
def test_explain_says_how_many_kernels(residual, stored, round_sum, words):
    x = X.bfloat16()
    for names in ("", "cpu"):
        token = requested._request.set(names)
        try:
            explanation = fusednorm.explain(x, X.to(residual), round_sum=round_sum, residual_dtype=stored)
        finally:
            requested._request.reset(token)
        assert explanation.backend == "cpu"
        assert explanation.composed
        assert explanation.plan.startswith(words)
        assert f"residual_out {dtype_name(stored)}" in str(explanation)
    assert "kernels, " not in fusednorm.explain(x, X.to(residual), residual_dtype=residual).plan


@pytest.mark.parametrize("stored", [F32, F16, BF16], ids=dtype_name)
@pytest.mark.parametrize("residual_dtype", NARROW, ids=dtype_name)
def test_what_is_not_an_output_is_unchanged(residual_dtype, stored):
    """And outputs may be x or the residual, whichever kernel writes them."""
    for round_sum in (True, False):
        y, total = expected(
            case := Case(6, 40, BF16, residual_dtype, BF16, round_sum=round_sum, residual_out=stored), "reference"
        )
        for name in ("none", "x", "residual"):
            x, residual, weight = operands(case)
            places = {"none": None, "x": x, "residual": residual}
            flags = {"round_sum": round_sum, "residual_dtype": stored, "out": places[name]}
            if flags["out"] is not None and flags["out"].dtype != BF16:
                continue
            found = fused_add_rms_norm(x, residual, weight, **flags)
            assert same(found, (y, total)), (case, name)
            assert found[0] is (found[0] if name == "none" else places[name])
            for other in {"x", "residual"} - {name}:
                kept = operands(case)[("x", "residual").index(other)]
                assert same([places[other]], [kept]), (case, name, other)
        if stored == BF16:
            x, residual, weight = operands(case)
            found = fused_add_rms_norm(x, residual, weight, round_sum=round_sum, residual_out=x, residual_dtype=stored)
            assert same(found, (y, total))
            assert found[1] is x


@pytest.mark.parametrize("stored", NARROW, ids=dtype_name)
def test_rows_in_two_levels(stored):
    """Heads before tokens and tokens before heads; a residual that one row stands for."""
    x, residual, weight = operands(Case(5 * 9, 40, BF16, BF16, BF16))
    x, residual = x.view(5, 9, 40), residual.view(5, 9, 40)
    for change in (
        lambda t: t[:, 3:6],
        lambda t: t.transpose(0, 1),
        lambda t: t[:, :3].transpose(0, 1),
        lambda t: t[:1, :1].expand(5, 3, 40),
    ):
        for round_sum in (True, False):
            flags = {"round_sum": round_sum, "residual_dtype": stored}
            wanted = fused_add_rms_norm(change(x).contiguous(), change(residual).contiguous(), weight, **flags)
            assert same(fused_add_rms_norm(change(x), change(residual), weight, **flags), wanted)
            total = torch.zeros(9, 5, 80, dtype=stored)[:7:2, :3, 5:45].as_strided(wanted[1].shape, (400, 80, 1), 5)
            found = fused_add_rms_norm(change(x), change(residual), weight, residual_out=total, **flags)
            assert same(found, wanted)


@compiled
def test_gradients_with_every_sum():
    """A composition's backward pass is one pass: of the sum that was returned, or, unrounded, of both terms."""
    for residual, stored, round_sum in itertools.product(NARROW, NARROW, (True, False)):
        case = Case(7, 45, BF16, residual, F32, round_sum=round_sum, residual_out=stored, out=F16)

        def results(name, case=case):
            leaves = [t.requires_grad_() for t in operands(case)]
            with fusednorm.use_backend(name):
                outputs = call(case, *leaves)
                incoming = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in outputs]
                return torch.autograd.grad(outputs, leaves, incoming)

        assert same(results("cpu"), results("reference")), case


def test_a_request_for_the_whole_process():
    """FUSEDNORM_BACKEND=cpu never falls back; the C kernels serve such a call."""
    if cpu.unavailable():
        pytest.skip("takes the C library")
    code = """
import torch, fusednorm
x = torch.linspace(-2, 2, 24).view(3, 8)
found = fusednorm.fused_add_rms_norm(x, x.half(), residual_dtype=torch.bfloat16)
print(fusednorm.explain(x, x.half(), residual_dtype=torch.bfloat16).backend)
with fusednorm.use_backend("reference"):
    wanted = fusednorm.fused_add_rms_norm(x, x.half(), residual_dtype=torch.bfloat16)
print(all(map(torch.equal, found, wanted)))
"""
    assert printed_by(code, FUSEDNORM_BACKEND="cpu").split() == ["cpu", "True"]


def test_all_is_chosen_before_anything_is_written(monkeypatch):
    """A backend that takes the first kernel's operation and not the second's is passed over."""
    monkeypatch.setattr(choose, "_registered", {})
    monkeypatch.setattr(choose, "_selected", {})
    written = []

    def unsuitable(operation):
        return [] if operation.residual_out == operation.residual == F32 else ["sums in float32 only"]

    def forward(call):
        written.append(call.operation)
        reference.forward(call)

    picky = SimpleNamespace(DEVICES=("cpu",), unavailable=list, unsuitable=unsuitable, plan=lambda operation: "picky")
    picky.forward, picky.backward = forward, reference.backward
    fusednorm.register_backend("picky", picky)
    x = X.bfloat16()
    with fusednorm.use_backend("picky"):
        with pytest.raises(BackendError, match="picky: sums in float32 only"):
            fused_add_rms_norm(x, x, out=(out := torch.zeros_like(x)), residual_dtype=F16)
        assert not out.any()
        assert not written
        found = fused_add_rms_norm(x, x, residual_dtype=F32)
        three = fused_add_rms_norm(x, x, round_sum=False, residual_dtype=F16)
    with fusednorm.use_backend("reference"):
        assert same(found, fused_add_rms_norm(x, x, residual_dtype=F32))
        assert same(three, fused_add_rms_norm(x, x, round_sum=False, residual_dtype=F16))
    assert len(written) == 2
    with fusednorm.use_backend("picky,reference"):
        assert fusednorm.explain(x, x, residual_dtype=F16).passed_over == {
            "picky": ["its kernels have no residual_dtype", "sums in float32 only"]
        }


# What C takes


def codes(c_type):
    """The fields of one of C's types, as the module `struct` writes them."""
    if c_type.kind == "array":
        return codes(c_type.item) * c_type.length
    if c_type.kind == "struct":
        return "".join(codes(field.type) for _, field in c_type.fields)
    return {"int64_t": "q", "uintptr_t": "q", "double": "d"}[c_type.cname]


@compiled
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("call", [c_abi._pack.__self__.format]),
        ("quantizer", [c_quantizer._QUANTIZATION.format, c_abi._RESULTS.format]),
        ("gate", [c_abi._GATE.format]),
        ("rotation", [c_abi._ROTATION.format]),
    ],
)
def test_c_has_the_fields_that_python_packs(name, formats):
    """In that order and without gaps, by cffi."""
    c_type = FFI.typeof(f"struct fn_{name}")
    packed = [int(count or 1) * code for part in formats for count, code in re.findall(r"(\d*)([qd])", part)]
    assert "".join(packed) == codes(c_type)
    assert FFI.sizeof(c_type) == 8 * len(codes(c_type))


def test_c_has_the_numbers_of_python():
    """Fails where a header was not printed again."""
    printed = {"cpu/abi/enums.h": c_enums.header()}
    printed["cpu/kernels/function_constants.h"] = function_constants.c_header()
    printed["csrc/function_constants.cuh"] = function_constants.cuda_header()
    for header, text in printed.items():
        assert (Path(__file__).parents[2] / header).read_text(encoding="utf-8") == text, header


def packed_operands(found):
    """Kind, address and strides of each operand that there is."""
    operands = [(o.kind, o.address, o.outer_stride, o.stride) for o in found.operand]
    return [o for o in operands if o != (LIB.FN_NONE, 0, 0, 0)]


def described(tensor, strides=(0, 0)):
    return c_kinds.KINDS[tensor.dtype], tensor.data_ptr(), *strides


@compiled
def test_a_call_as_c_reads_it():
    """Every field of a forward and of a backward pass, in rows of two levels."""
    q, k, v, out = torch.rand(5, 8, 8, dtype=F16).split(2, dim=1)
    weight, rstd, levels = torch.rand(8), torch.rand(5, 2), (64, 8)
    operation = RMSNorm(torch.device("cpu"), F16, F16, F32, F16, 8, False, True, F16)
    call = Forward(q, k, weight, out, v, rstd, operation, 10, 2, (levels,) * 4, 1e-5, 0.5)
    found = FFI.from_buffer("struct fn_call *", c_abi.pack_forward(call, 3))
    assert (getattr(found, "pass"), found.flags) == (LIB.FN_FORWARD, LIB.FN_ROUND_NORM)
    assert (found.device, found.threads, found.block) == (0, 3, 0)
    assert (found.rows, found.inner, found.hidden, found.eps, found.weight_offset) == (10, 2, 8, 1e-5, 0.5)
    rows = [described(t, levels) for t in (q, k, out, v)]
    assert packed_operands(found) == [*rows[:2], described(weight), *rows[2:], described(rstd)]

    dx, dresidual, dweight, partial = torch.empty(10, 8), torch.empty(10, 8), torch.empty(8), torch.empty(2, 8)
    call = Backward(
        *(q, k, v, rstd, weight, dx, dresidual, dweight, operation, 10, 2), (levels, (64, 16), (128, 8)), 0.25
    )
    found = FFI.from_buffer("struct fn_call *", c_abi.pack_backward(call, 3, 7, partial))
    assert (getattr(found, "pass"), found.flags, found.threads, found.block) == (LIB.FN_BACKWARD, 0, 3, 7)
    assert (found.rows, found.inner, found.hidden, found.eps, found.weight_offset) == (10, 2, 8, 0.0, 0.25)
    rows = [described(q, levels), described(k, (64, 16)), described(v, (128, 8))]
    others = (rstd, weight, dx, dresidual, partial, dweight)
    assert packed_operands(found) == [*rows, *map(described, others)]


@pytest.mark.parametrize("name", ["out_dtype", "residual_out_dtype"])
def test_the_backward_operator_looks_at_the_dtypes_of_the_outputs(name):
    x = torch.ones(2, 8)
    arguments = (x, None, x, torch.ones(2), None, 0.0, F32, F32, True, False, [True, False, False])
    for dtype, words in ((torch.int8, "must be float16, bfloat16, float32 or float64, got int8"), (F64, "is float64")):
        for device in ("cpu", "meta"):
            with pytest.raises(TypeError, match=f"{name} {words}"):
                torch.ops.fusednorm.backward(
                    *(a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments), **{name: dtype}
                )
