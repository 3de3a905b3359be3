"""What the public functions accept, refuse, and say."""

import ctypes
import math
import mmap
import re
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from processes import printed_by
from torch import tensor
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_, rms_norm_add_rms_norm
from fusednorm.calls import fast_path

from fast_calls import close_fast_path, fast_calls

X = torch.arange(24.0).reshape(3, 8)
BIG = torch.zeros(3, 16)


def says(*parts):
    return re.compile(".*".join(map(re.escape, parts)), re.DOTALL)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=layout)


def quantised():
    return torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)


@pytest.mark.filterwarnings(  # torch's, of its tensors
    "ignore:torch.quantize_per_tensor",
    "ignore:ComplexHalf",
    "ignore:Sparse CSR",
    "ignore:The PyTorch API of nested tensors",
)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fused_add_rms_norm(X, None, X[0]),
            TypeError,
            says("residual must be a torch.Tensor, got NoneType; without a residual, call rms_norm"),
        ),
        (
            lambda: rms_norm(X, [8], X[0]),
            TypeError,
            says("weight must be a torch.Tensor, got list; ", "torch's", "fusednorm.compat.functional.rms_norm"),
        ),
        (lambda: rms_norm(X, X.shape[-1:]), TypeError, says("weight", "got Size", "fusednorm.compat.functional")),
        (
            lambda: fused_add_rms_norm(X, X, residual_out=X.half()),
            TypeError,
            says("residual_out must have the residual's dtype float32, got float16", "torch.empty_like(residual)"),
        ),
        (
            lambda: rms_norm(X, X[0].to("meta")),
            ValueError,
            says("weight is on meta and x on cpu; a meta tensor holds no values", "load"),
        ),
        (lambda: rms_norm(X.to("meta"), X[0]), ValueError, says("weight is on cpu and x on meta", "weight.to('meta')")),
        (lambda: rms_norm(X, out_dtype=[1]), TypeError, says("out_dtype must be torch.float16", "got [1]")),
        (lambda: fusednorm.rms_norm_add(X, X, between=True), TypeError, says("between must be None", "got True")),
        (lambda: fusednorm.silu_and_mul(X, X, between=True), TypeError, says("between must be None", "got True")),
        (lambda: fusednorm.qk_norm_rope(X, X, between=False), TypeError, says("between must be None", "got False")),
        (lambda: rms_norm(tensor(1.0)), ValueError, says("x must be [..., N] with N of at least 1, got shape []")),
        (lambda: rms_norm(torch.empty(3, 0)), ValueError, says("N of at least 1, got shape [3, 0]")),
        (lambda: rms_norm(X, X[0, :7]), ValueError, says("weight must have shape [8]", "[3, 8]", "got [7]")),
        (
            lambda: rms_norm(X, X[:1]),
            ValueError,
            says("weight has two dimensions, a row for each head", "[3, 8]", "got [1, 8]"),
        ),
        (
            lambda: fused_add_rms_norm(X, X[:1]),
            ValueError,
            says("residual must have x's shape [3, 8], got [1, 8]; expand it with residual.expand_as(x)"),
        ),
        (
            lambda: fused_add_rms_norm(X, X[None]),
            ValueError,
            says("residual must have x's shape [3, 8], got [1, 3, 8]; pass a row"),
        ),
        (
            lambda: rms_norm(X, out=BIG),
            ValueError,
            says("out must have x's shape [3, 8], got [3, 16]; allocate it with torch.empty_like(x)"),
        ),
        (lambda: rms_norm(X, out=BIG[:, ::2]), ValueError, says("out is written in place", "strides [16, 2]")),
        (lambda: rms_norm_(BIG[:, ::2]), ValueError, says("x is written in place", "contiguous", "strides [16, 2]")),
        (lambda: rms_norm(X, out=BIG.as_strided((3, 8), (7, 1))), ValueError, says("without overlap", "[7, 1]")),
        (
            lambda: rms_norm(X, eps=None),
            TypeError,
            says("eps must be a number, got NoneType; leave it out for 1e-06", "torch.finfo(torch.float32).eps"),
        ),
        (
            lambda: rms_norm(X, weight_offset=None),
            TypeError,
            says("weight_offset must be a number, got NoneType; leave it out for 0.0"),
        ),
        (lambda: rms_norm(X, eps=tensor(1.0)), TypeError, says("eps must be a number, got Tensor; pass eps.item()")),
        (
            lambda: fused_add_rms_norm(X, X, round_sum="no"),
            TypeError,
            says("round_sum must be True or False, got 'no'; pass round_sum=True or round_sum=False"),
        ),
        (lambda: rms_norm(quantised()), TypeError, says("x must be float16", "got quint8")),
        (lambda: rms_norm(X, X[0].to_mkldnn()), TypeError, says("weight must be a dense tensor", "to_dense()")),
        (lambda: rms_norm(nested(torch.strided)), TypeError, says("x must be a dense tensor, got a nested one")),
        (lambda: rms_norm(tensor(1.0).expand(2**40), out=None), RuntimeError, says("memory")),
        (lambda: rms_norm(tensor([1.0]).expand(2**40, 1)), RuntimeError, says("memory")),
        (lambda: fusednorm.explain([1.0]), TypeError, says("x must be a torch.Tensor, got list")),
        (lambda: fusednorm.explain(tensor(1.0)), ValueError, says("x must be [..., N]", "got shape []")),
        (lambda: fusednorm.explain(X, X[:, :7]), ValueError, says("residual must have x's shape")),
        (lambda: fusednorm.prewarm(0), ValueError, says("hidden_size must be an int of at least 1, got 0")),
        (lambda: fusednorm.prewarm(8, quantization="int8"), TypeError, says("quantization must be a fusednorm.Quant")),
        (lambda: fusednorm.prewarm("8"), ValueError, says("hidden_size must be an int of at least 1, got '8'")),
        (lambda: fusednorm.prewarm(8, heads=0), ValueError, says("heads must be an int of at least 1, got 0")),
        (lambda: fusednorm.prewarm(8, torch.int8), TypeError, says("x must be float16", "got int8")),
        (
            lambda: fusednorm.prewarm(8, "float32", "cpu"),
            TypeError,
            says("dtype must be a torch.dtype such as torch.bfloat16, got 'float32'"),
        ),
        (lambda: fusednorm.prewarm(8, weight_dtype=float), TypeError, says("weight_dtype must be a torch.dtype")),
        (lambda: fusednorm.prewarm(8, device="npu:7"), ValueError, says("device npu:7 is not here", "finds cpu")),
        (lambda: fusednorm.prewarm(8, device="gpu"), ValueError, says("device gpu is not here", "finds cpu")),
    ],
)
@pytest.mark.parametrize("opened", [False, True], ids=["Python", "fast path"])
def test_bad_input(monkeypatch, call, error, message, opened):
    """On the fast path too, which takes calls like those that Python has taken before."""
    fused_add_rms_norm(X, X, X[0])
    if not opened:
        close_fast_path(monkeypatch)
    before = X.clone(), BIG.clone()
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(X, before[0])  # nothing is half-written
    assert torch.equal(BIG, before[1])


@pytest.mark.parametrize("eps", [float("nan"), -1.0, float("inf"), 0, True, Fraction(1, 3), numpy.float32(0.5)])
def test_any_real_eps(eps):
    """The bits of the specification's formula, also where it gives NaN; of a number of any type."""
    x = X / 64
    with fusednorm.use_backend("reference"):
        wanted = rms_norm(x, X[1], float(eps))
    assert torch.equal(rms_norm(x, X[1], eps).nan_to_num(7), wanted.nan_to_num(7))
    assert wanted.isnan().any() == (eps == -1 or math.isnan(eps))


def memory(*shape):
    return torch.arange(400.0)[: torch.Size(shape).numel()].reshape(shape).clone()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: fused_add_rms_norm_(m[:3], m[:3]), "residual shares memory with x,.*pass residual.clone()"),
        (lambda m: fused_add_rms_norm_(a := m[:3], a), "residual shares memory with x,"),
        (lambda m: fused_add_rms_norm(a := m[:3], m[4:7], out=a, residual_out=m[1:4]), "residual_out .* with x,"),
        (lambda m: fused_add_rms_norm_(m[:3], m[1:4]), "shares memory"),
        (lambda m: fused_add_rms_norm_(m[:3, :8], m[:3, 7:15]), "shares memory"),
        (lambda m: fused_add_rms_norm_(m[:3, :8], m[:3, 8:16], m[2, 4:12]), "weight"),
        (lambda m: fused_add_rms_norm(m[:3], m[4:7], out=m[2:5]), "out shares memory with x"),
        (lambda m: fused_add_rms_norm(m[:3], m[4:7], residual_out=m[6:9]), "residual_out shares memory with residual"),
        (lambda m: fused_add_rms_norm(m[:3], m[4:7], out=m[8:11], residual_out=m[8:11]), "residual_out .* with out"),
        (lambda m: rms_norm(m[:3], m[9], out=m[8:11]), "out shares memory with weight"),
        # A row that is written before it is read, as the same tensor and as another one.
        (lambda m: fused_add_rms_norm(m[0], m[1], a := m[2], residual_out=a), "residual_out shares memory with weight"),
        (lambda m: fused_add_rms_norm(m[0], m[1], m[2], residual_out=m[2]), "residual_out shares memory with weight"),
        (lambda m: fused_add_rms_norm_(m[0], a := m[1], a), "residual shares memory with weight"),
        (lambda m: fused_add_rms_norm(m[0], m[1], bias=(a := m[2]), residual_out=a), "residual_out .* with bias"),
        (lambda m: rms_norm(m[:3, :8], out=m.view(-1)[1:].as_strided((3, 8), (16, 1))), "out shares memory with x"),
        (lambda m: rms_norm(m.half()[:3], out=m[:3]), None),
        (lambda m: rms_norm(m.view(torch.float16)[:2, :8], out=m[:2, :8]), "out shares memory with x"),
        (lambda m: rms_norm(m.as_strided((3, 5), (32, 1)), out=m.as_strided((3, 5), (24, 1), 5)), "shares memory"),
        (lambda m: rms_norm(m.as_strided((3, 5), (32, 1)), out=m.as_strided((3, 5), (16, 1), 8)), None),
        (lambda m: fused_add_rms_norm_(m[:3, :8], m[:3, 8:16]), None),
        (lambda m: fused_add_rms_norm_(m[:, 8:16], m[:, :8]), None),
        (lambda m: fused_add_rms_norm(m[:3], m[:3]), None),
        # A kernel reads a copy of a weight whose elements lie apart.
        (lambda m: rms_norm(m[:3], m.view(-1)[144:176:2], out=m[8:11]), None),
        (lambda m: rms_norm(m[:3], bias=m.view(-1)[144:176:2], out=m[8:11]), None),
        (lambda m: rms_norm_add_rms_norm(m[:3], m[4:7], None, m.view(-1)[144:176:2], out=m[8:11]), None),
    ],
)
def test_shared_memory(call, message):
    """What overlaps is refused before anything is written; rows that only interleave are not."""
    for hidden_size in (5, 8, 16):  # opens the fast path, which has a check of its own
        apart = torch.ones(3, hidden_size)
        for weight in (None, apart[0]):
            fused_add_rms_norm(apart, apart, weight)
            rms_norm(apart, weight)
    m = memory(12, 16)
    before = m.clone()
    if message is None:
        call(m)
        return
    with pytest.raises(ValueError, match=message) as raised:
        call(m)
    assert "shares memory" in str(raised.value)
    assert "clone()" in str(raised.value)
    assert torch.equal(m, before)


class Wrapper(torch.Tensor):
    """A tensor subclass that has another tensor's properties, and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def test_tensors_without_memory():
    """Refused, on the fast path too, which an earlier call of the same types opens."""
    for _ in range(2):
        fused_add_rms_norm(X, X, X[0])
        fused_add_rms_norm_(X.clone(), X.clone(), X[0])
    wrapped = Wrapper(X)
    with torch.no_grad():
        for name, call in {
            "x": lambda: fused_add_rms_norm(wrapped, X, X[0], out=torch.empty_like(X)),
            "residual": lambda: fused_add_rms_norm(X, wrapped, X[0], residual_out=torch.empty_like(X)),
            "weight": lambda: fused_add_rms_norm(X, X, Wrapper(X[0])),
            "out": lambda: fused_add_rms_norm(X, X, X[0], out=wrapped),
        }.items():
            with pytest.raises(TypeError, match=f"{name} is a Wrapper without memory for all its elements.*to_local"):
                call()


@pytest.mark.compiled
def test_the_fast_path_takes_what_is_usual_and_nothing_else():
    """Where torch has DLPack's exchange API. What it does not take, it leaves untouched."""
    from fusednorm.backends import cpu

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        assert cpu.fast_path is None
        return
    take = fast_calls("cpu")
    x, grad = torch.ones(3, 8), torch.ones(3, 8, requires_grad=True)

    def run(
        x,
        residual=None,
        weight=None,
        out=None,
        residual_out=None,
        eps=1e-6,
        offset=0.0,
        rstd=None,
        ask=True,
        bias=None,
        x_scale=1.0,
        out_dtype=None,
    ):
        operands = {"x": x, "residual": residual, "weight": weight, "bias": bias, "rstd": rstd}
        outputs = {"out": out, "residual_out": residual_out, "out_dtype": out_dtype}
        return take("norm", **operands, **outputs, eps=eps, weight_offset=offset, x_scale=x_scale, ask=ask)

    matrix = torch.ones(4, 24)

    usual = {
        "norm": run(x),
        "fused": run(x, x, x[0]),
        "parameter": run(x, x.half(), torch.nn.Parameter(x[0], requires_grad=False)),
        "in place": run(x.clone(), x, x[0], x.clone(), x.clone()),
        "float64": run(x.double(), x, x[0].bfloat16()),
        "detached": run(grad.detach()),
        "gaps": run(matrix[:, :8], matrix[:, 8:16], None, matrix[:, 16:]),
        "gaps in place": run(matrix[:, :8], matrix[:, 8:16], None, matrix[:, :8], matrix[:, 8:16]),
        "expanded": run(x[:1].expand(3, 8), x),
        "rstd": run(x, x, rstd=torch.empty(3)),
        "bias": run(x, x, bias=x[0]),
        "heads": run(x, x, x.bfloat16(), bias=x),
        "scaled": run(x, x, x_scale=0.5),
        "of another type": run(x, x, out_dtype=torch.float16),
    }
    with torch.no_grad():
        usual["no_grad"] = run(grad, x)
    for name, outputs in usual.items():
        assert outputs is not None, name
        assert (outputs[1] is None) == (name in ("norm", "detached")), name
    unusual = {
        "rows that are not one stride apart": lambda out: run(torch.ones(2, 3, 8)[:, :2]),
        "weight of two dimensions": lambda out: run(x, None, torch.ones(1, 8), out=out),
        "no rows": lambda out: run(x[:0], out=out[:0]),
        "eps of another type": lambda out: run(x, eps=1, out=out),
        "offset of another type": lambda out: run(x, offset=torch.ones(()), out=out),
        "overlap": lambda out: run(out[:2], out=out[1:]),
        "overlap of columns": lambda out: run(out[:, :5], out=out[:, 4:]),
        "bias of other heads": lambda out: run(x, None, x, out, bias=torch.ones(2, 8)),
        "scale of another type": lambda out: run(x, x, out=out, x_scale=1),
        "rstd of another type": lambda out: run(x, rstd=torch.empty(3).double(), out=out),
        "rstd of another size": lambda out: run(x, rstd=torch.empty(2), out=out),
        "rstd with gaps": lambda out: run(x, rstd=torch.empty(3, 2)[:, 0], out=out),
        "residual_out without residual": lambda out: run(x, None, None, out, out),
        "an output and its type": lambda out: run(x, out=out, out_dtype=torch.float32),
        "float64 of float32": lambda out: run(x, out_dtype=torch.float64),
        "no type of rows": lambda out: run(x, out_dtype=torch.int8),
        "no type": lambda out: run(x, out_dtype="float16"),
    }
    for name, call in unusual.items():
        out = torch.full((3, 8), 7.0)
        assert call(out) is None, name
        assert out.eq(7).all(), name
        assert out._version == 0, name
    with FlopCounterMode(display=False):
        assert run(x) is None
        assert run(x, ask=False) is not None  # the caller has asked
    with torch.device("cpu"):
        assert run(x) is not None
    for stranger in (None, 12345, x):  # what an add-on to another version of torch may have set instead
        assert fast_path._open(stranger) is False
    assert run(x) is not None
    assert fast_calls("cuda")("norm", x=x) is None
    unknown = fast_path.Entry("norm", "x unknown", constants={"unknown": False}).open("tests ('cpu',)")
    assert (unknown(x, None), unknown(x, False)[1]) == (None, None)
    assert fast_path.Entry("norm", "x").open("tests ('cpu',)")(x, None) is None  # an argument too many
    assert fast_path.Entry("norm", "x").open("no request")(x) is None
    with pytest.raises(ValueError, match="no entry for calls of kind nothing with 0 arguments"):
        fast_path._fast_path.entry("nothing", (), (), (), (), -1, None, None, None)


@pytest.mark.skipif(not fast_path.OPEN, reason="takes DLPack's exchange API, which torch has since 2.10")
def test_the_fast_path_of_gradients_takes_what_is_usual_and_nothing_else():
    """What it does not take, it leaves untouched. Its bits are compared by the tests of gradients."""
    h, dy, rstd, weight = torch.rand(3, 8), torch.rand(3, 8), torch.rand(3), torch.rand(8)

    def run(device=fast_path.CPU, dy=dy, total=None, h=h, rstd=rstd, weight=weight, dx=None, dweight=None, offset=0.0):
        return fast_path.backward(device, dy, total, h, rstd, weight, dx, None, None, dweight, 1, offset, False)

    wide = torch.cat([dy, h], dim=1)
    assert run(dx=torch.empty(3, 8)) is True
    expected, got = torch.empty(2, 3, 8)
    assert run(dx=expected, dweight=torch.empty(8)) is True
    assert run(dx=got, dy=wide[:, :8], h=wide[:, 8:]) is True
    assert torch.equal(got, expected)
    assert run(dx=got, dy=dy[:1].expand(3, 8), total=wide[:, :8], weight=torch.nn.Parameter(weight)) is True
    for name, given in {
        "another device": {"device": fast_path.CUDA},
        "no gradient": {"dy": None},
        "no tensor": {"dy": [1.0]},
        "transposed": {"dy": torch.rand(8, 3).t()},
        "another shape": {"dy": torch.rand(3, 1, 8)},
        "rstd of another size": {"rstd": torch.rand(2)},
        "rstd with gaps": {"rstd": torch.rand(3, 2)[:, 0]},
        "weight of another size": {"weight": torch.rand(7)},
        "weight with gaps": {"weight": torch.rand(8, 2)[:, 0]},
        "gradient of the weight of another size": {"dweight": torch.empty(7)},
        "meta": {"h": h.to("meta")},
        "integers": {"h": h.int()},
        "no rows": {"h": h[:0], "dy": dy[:0], "rstd": rstd[:0]},
        "scalar": {"h": h[0, 0], "dy": dy[0, 0]},
        "single elements": {"h": h[:, :1], "dy": dy[:, :1], "weight": weight[:1]},
    }.items():
        dx = torch.full((3, 8), 7.0)
        assert run(dx=dx, **given) is False, name
        assert dx.eq(7).all(), name
    with pytest.raises(TypeError, match="takes 13 arguments, got 1"):
        fast_path.backward(h)
    with pytest.raises(TypeError, match="real number"):
        run(offset="1")


class ExchangeApi(ctypes.Structure):
    """DLPack's, of which the fast path calls one function."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("version", "a", "b", "c", "d", "tensor_from", "current_stream")]


@pytest.mark.skipif(not fast_path.OPEN, reason="takes DLPack's exchange API, which torch has since 2.10")
@pytest.mark.parametrize(("function", "raised"), [("PyList_Append", SystemError), ("PyObject_IsTrue", None)])
def test_errors_that_the_fast_path_hands_on(function, raised):
    """A RuntimeError of DLPack's is Python's to report; what is not about the tensor is raised as it is."""
    failing = ctypes.cast(
        getattr(ctypes.pythonapi, function), ctypes.c_void_p
    )  # a tensor is no list, nor true or false
    api = ExchangeApi(version=1, tensor_from=failing)  # the major version is in the low half
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    gradients = (fast_path.CPU, X, None, X, X[:, 0], None, torch.empty_like(X), None, None, None, 1, 0.0, False)
    take = fast_calls("cpu")
    try:
        assert fast_path._open(capsule(ctypes.addressof(api), b"dlpack_exchange_api", None))
        if raised:
            with pytest.raises(raised):
                take("norm", x=X)
            with pytest.raises(raised):
                fast_path.backward(*gradients)
        else:
            assert take("norm", x=X) is None
            assert fast_path.backward(*gradients) is False
    finally:
        assert fast_path._open(fast_path._api)
    assert take("norm", x=X) is not None


def _flags(tensor):
    """What Linux knows of the memory that the middle of a tensor lies in."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, dash, end = line.split()[0].partition("-")
        if dash:
            inside = int(begin, 16) <= middle < int(end, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="takes Linux with huge pages")
@pytest.mark.skipif(not fast_path.OPEN, reason="takes DLPack's exchange API, which torch has since 2.10")
def test_large_new_outputs_ask_for_huge_pages():
    """Not what the caller passes: how its memory is managed is the caller's business."""
    shape = (2048, 1024)
    x, residual = torch.ones(shape), torch.ones(shape)
    with fusednorm.use_backend("cpu"):
        fused_add_rms_norm(x[:2], residual[:2])
        for output in fused_add_rms_norm(x, residual):
            assert "hg" in _flags(output)
        gradient, *_ = torch.autograd.grad(rms_norm(x.requires_grad_()), x, residual)
        assert "hg" in _flags(gradient)
        memory = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        out = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        rms_norm(x.detach(), out=out)
        assert torch.equal(out, rms_norm(x.detach()))
        assert "hg" not in _flags(out)


def test_import_is_fast_and_light():
    """Neither Triton nor the doctor's tables nor plug-ins are imported by importing fusednorm."""
    code = "import torch, sys; before = set(sys.modules); import fusednorm; print(*sorted(set(sys.modules) - before))"
    new = printed_by(code).split()
    assert "fusednorm.operations.norm" in new
    assert not {"triton", "rich", "cffi", "numpy", "fusednorm._cpu", "fusednorm.backends.cpu"} & set(new)


def test_commands_and_patches_import_no_compiler():
    """Of torch's, which takes a second; and what marks a constant for it is what it marks itself."""
    code = """
    import sys, fusednorm.tools.commands, fusednorm.transformers
    print("torch._dynamo" in sys.modules)
    from fusednorm.transformers.replacing import constant
    import torch
    def one(): pass
    def other(): pass
    print(vars(constant(one)) == vars(torch.compiler.assume_constant_result(other)) != {})
    """
    assert printed_by(code) == "False\nTrue\n"


def test_public_names():
    assert set(fusednorm.__all__) <= set(dir(fusednorm))
    assert fusednorm.SPEC_VERSION == 1
