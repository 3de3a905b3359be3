"""Models exported to ONNX, in ONNX Runtime: the specification's bits with ``exact=True``, else within its bounds."""

import copy
import functools
import itertools

import pytest
import torch

import fusednorm
import fusednorm.onnx
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.conformance.test_quantized import PRESETS

onnxruntime = pytest.importorskip("onnxruntime", reason="tox installs it")
pytest.importorskip("onnxscript", reason="tox installs it")


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
U = 2.0**-24


@pytest.fixture(scope="module", autouse=True)
def table_of_torch():
    """torch reads its own translations anew for each export, which takes most of the time of a small one."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxscript_apis, "get_torchlib_ops", functools.cache(onnxscript_apis.get_torchlib_ops))
        yield


class Calls(torch.nn.Module):
    """Many calls in one model, because each export takes time. Its inputs are float64, and converted for each call.

    Its outputs are float64 or integers, because NumPy, through which ONNX Runtime passes them, has no bfloat16.
    """

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, *inputs):
        found = []
        for function, dtypes in self.calls:
            results = function(*(x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=False)))
            for result in results if isinstance(results, tuple) else (results,):
                found.append(result.to(F64) if result.is_floating_point() else result)
        return tuple(found)


def run(model, inputs, **options):
    """What ONNX Runtime returns for a model, and the names of the operators in its file."""
    program = fusednorm.onnx.export(model, tuple(inputs), verbose=False, **options)
    level = onnxruntime.SessionOptions()
    level.log_severity_level = 3
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), level)
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(one) for one in found], [node.op_type for node in program.model.graph]


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(0.125), expected.nan_to_num(0.125))


def check_bits(calls, inputs, **options):
    model = Calls(calls)
    found, _ = run(model, inputs, exact=True, **options)
    expected = model(*inputs)
    assert [same(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.fixture
def rows():
    """Rows of all magnitudes, and rows with an infinity, a NaN, and zeros alone: [9, 100]."""
    torch.manual_seed(0)
    x = torch.randn(9, 100, dtype=F64) * torch.logspace(-15, 15, 9, dtype=F64).unsqueeze(-1)
    x[1, 3], x[3, 5], x[5] = torch.inf, torch.nan, 0.0
    return x


def test_bits_of_norms(rows):
    """Every rounding that a flag moves, in the mixes of dtypes that round at different places."""
    calls = []
    mixes = list(itertools.product(((BF16, BF16, BF16), (F16, F32, F16)), (True, False), (True, False)))
    mixes += [((BF16, F32, F32), True, True), ((F32, BF16, F32), True, False), ((F64, F32, F64), False, True)]
    for dtypes, round_sum, round_norm in mixes:
        flags = {"weight_offset": float(round_sum), "round_sum": round_sum, "round_norm": round_norm, "eps": 1e-9}
        calls.append((lambda x, r, w, flags=flags: fusednorm.fused_add_rms_norm(x, r, w, **flags), dtypes))
    calls += [
        (lambda x, r, w: fusednorm.fused_add_rms_norm(x, r, w, residual_dtype=BF16, out_dtype=F16), (F32,) * 3),
        (lambda x, r, w: fusednorm.rms_norm(x, out_dtype=F32, round_norm=True), (BF16,) * 3),
        (lambda x, r, w: fusednorm.fused_add_rms_norm(x, r, w, x_scale=1.000004, bias=w), (F32,) * 3),
        (lambda x, r, w: fusednorm.rms_norm_add_rms_norm(x, r, w, w, between=F32), (BF16,) * 3),
        (lambda x, r, w: fusednorm.rms_norm_add(x, r, w), (F16, F32, F32)),
        (lambda x, r, w: fusednorm.rms_norm(x.unflatten(-1, (4, 25)), w.reshape(4, 25), bias=w[:25]), (BF16,) * 3),
        (fusednorm.l2_norm, (BF16,)),
    ]
    check_bits(calls, [rows, rows.flip(0), torch.randn(100, dtype=F64)])


def test_bits_of_long_rows():
    torch.manual_seed(0)
    calls = [
        (lambda x, size=size: fusednorm.rms_norm(x[:, :size]), (F32,)) for size in (1, 6, 64, 1000, 1024, 1025, 5000)
    ]
    check_bits(calls, [torch.randn(3, 5000, dtype=F64)])


def test_bits_of_gates_and_rotations():
    torch.manual_seed(0)
    z = torch.linspace(-120, 120, 480, dtype=F64).reshape(3, 160)
    z[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    y, cos = torch.randn(3, 160, dtype=F64), torch.randn(3, 8, dtype=F64)
    calls = []
    for activation, dtypes in itertools.product(ACTIVATIONS, ((F32, F32), (BF16, F32))):
        calls.append((lambda y, z, *_, a=activation: fusednorm.gate(y, z, activation=a), dtypes))
    calls += [
        (lambda y, z, *_: fusednorm.gate(y, z * 7, activation="gelu_tanh"), (F64, F64)),
        (lambda y, z, *_: fusednorm.gate(y, z, activation="gelu"), (F64, F64)),
        (lambda y, z, *_: fusednorm.silu_and_mul(z, y), (F16, F16)),
        (lambda y, z, *_: fusednorm.gelu_tanh_and_mul(z, y, between=F32), (BF16, BF16)),
        (lambda y, z, *_: fusednorm.rms_norm_gated(y, z, norm_before_gate=False), (BF16, BF16)),
    ]
    calls += [
        (lambda y, z, *_, f=f, s=s: fusednorm.silu_and_mul(z, y, limit=7.0, up_offset=1.0, **f, **s), dtypes)
        for f in ({"alpha": 1.702}, {"clamp": "after"})
        for s, dtypes in (({}, (BF16, F16)), ({"round_steps": True}, (BF16, BF16)), ({}, (F32, F32)))
    ]
    calls += [(lambda y, z, *_, f=f: f(z), (F32, F32)) for f in (fusednorm.gelu, fusednorm.relu2)]
    calls += [
        (lambda y, z, *_, s=s: fusednorm.softcap(z, 0.7, round_steps=s), (dtype, dtype))
        for s, dtype in itertools.product((False, True), (F32, BF16))
    ]
    for interleaved, dtypes in itertools.product((False, True), ((BF16, F32, F32, F32), (F32,) * 4)):
        flags = {"interleaved": interleaved, "round_products": dtypes[0] == BF16}
        for size in (16, 20):  # of heads: all of them rotated, or the first 16 numbers
            calls.append(
                (
                    lambda y, z, c, s, flags=flags, n=size: fusednorm.rotate(y.reshape(3, -1, n), c, s, **flags),
                    dtypes,
                )
            )
    check_bits(calls, [y, z, cos, cos.sin()])


def presets():
    return {name: value for name, value in PRESETS.items() if value.scale_dtype is None}


def test_bits_of_quantization(rows):
    """Numbers, float32 scales and zero points of every preset: rows alone, because ``exact`` does not matter there."""

    def quantized(y, quantization):
        given = {}
        if quantization.per == "tensor":
            given = {"scale": torch.tensor(0.01)}
            if quantization.zero_point in ("after", "before"):
                given["zero_point"] = torch.tensor(3, dtype=torch.int32)
        found = fusednorm.quantize(y, quantization, **given)
        return tuple(one.float() if one.dtype.itemsize == 1 else one for one in found if one is not given.get("scale"))

    x = torch.randn(9, 256, dtype=F64)
    x[:, :100] = rows
    x[7, 200] = -torch.nan
    calls = [(lambda y, q=q: quantized(y, q), (BF16,)) for q in presets().values()]
    model = Calls(calls)
    found, _ = run(model, [x])
    names = [name for name, q in presets().items() for _ in quantized(x.to(BF16), q)]
    assert [name for name, a, b in zip(names, found, model(x), strict=True) if not same(a, b)] == []
    assert not any(one[one.isnan()].signbit().any() for one in found)  # 0x7F, in place of 0xFF


class Model(torch.nn.Module):
    """A small model with the norms before attention and the MLP, without attention."""

    def __init__(self, size=64):
        super().__init__()
        self.norms = torch.nn.ModuleList(fusednorm.AddRMSNorm(size, eps=1e-6) for _ in range(4))
        self.up, self.gate = (torch.nn.Linear(size, 96, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(96, size, bias=False)
        self.last = fusednorm.RMSNorm(size, eps=1e-6)

    def forward(self, x):
        residual = None
        for norm in self.norms:
            x, residual = norm(x, residual)
            x = self.down(fusednorm.silu_and_mul(self.gate(x), self.up(x)))
        return self.last(x + residual)


def check_error(found, model, x):
    """The error of a runtime, beside that of torch: it has as many roundings, and adds products in another order."""
    with torch.no_grad():
        own, exact = model(x), copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x)
    assert (torch.from_numpy(found) - exact).abs().max() <= 4 * (own - exact).abs().max()


@pytest.mark.parametrize("exact", [False, True])
def test_model(exact, tmp_path):
    """Another number of rows than that of the export; only matrix products and, without ``exact``, norms differ."""
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(7, 64)
    file = tmp_path / "model.onnx"
    rows = ({0: torch.export.Dim.DYNAMIC},)
    program = fusednorm.onnx.export(model, (x[:3],), file, dynamic_shapes=rows, exact=exact, verbose=False)
    operators = [node.op_type for node in program.model.graph]
    assert operators.count("RMSNormalization") == (0 if exact else 5)
    assert ("Sigmoid" in operators) == (not exact)
    (found,) = onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})
    check_error(found, model, x)


class Logits(torch.nn.Module):
    """A causal model's logits of all tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def test_patched_model():
    """Norms, additions, norms of q and k, and rotations of a patched model of Hugging Face."""
    transformers = pytest.importorskip("transformers", reason="tox installs it")
    from fusednorm.transformers import patch

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=F32).eval()
    patch(model)
    ids = torch.randint(3, 64, (2, 7))
    program = fusednorm.onnx.export(Logits(model), (ids,), verbose=False)
    assert [node.op_type for node in program.model.graph].count("RMSNormalization") == 5
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    check_error(session.run(None, {"ids": ids.numpy()})[0], Logits(model), ids)


def test_norms_of_the_runtime_are_within_the_bound():
    """|y - exact| is at most the specification's bound (section 4) and the last rounding.

    ONNX fixes no order of additions, so a term passes through up to N - 1 of them in place of d. The operator has fewer
    roundings afterwards than the specification: it divides by the root, in place of a reciprocal and a product.
    """
    torch.manual_seed(0)
    size = 128
    x, r, w = torch.randn(64, size, dtype=F64) ** 3, torch.randn(64, size, dtype=F64), torch.randn(size, dtype=F64)
    cases = [  # dtypes, weight_offset, round_norm
        ((F32, F32, F32), 0.0, False),
        ((F32, F32, F32), 1.0, False),
        ((BF16, BF16, BF16), 0.0, False),
        ((BF16, BF16, BF16), 0.0, True),
        ((F16, F32, F32), 1.0, False),
    ]
    calls = []
    for dtypes, offset, round_norm in cases:
        flags = {"weight_offset": offset, "round_norm": round_norm}
        calls.append((lambda x, r, w, flags=flags: fusednorm.fused_add_rms_norm(x, r, w, **flags)[0], dtypes))
    found, operators = run(Calls(calls), [x, r, w])
    assert operators.count("RMSNormalization") == len(cases)
    for y, (dtypes, offset, round_norm) in zip(found, cases, strict=True):
        a, b, c = (t.to(dtype) for t, dtype in zip((x, r, w), dtypes, strict=True))
        h = (a.float() + b.float()).to(b.dtype).double()
        n = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        gain = c.double() + offset
        relative = ((size - 1 + 1) / 2 + 5 + (offset != 0)) * U
        bound = relative * (n * gain).abs()
        if round_norm:  # the spacing of x's dtype at n, times the gain
            bound += spacing(n, dtypes[0]) * gain.abs()
        bound += spacing(n * gain, dtypes[0]) * (0.5 if dtypes[0] != F32 else 0)
        assert (((y - n * gain).abs() - bound) <= 0).all()


def spacing(v, dtype):
    """That of a dtype's numbers around v; at its upper end, where an error may carry a value into the next binade."""
    return torch.exp2(torch.floor(torch.log2(v.abs().clamp(torch.finfo(dtype).tiny))) + 1) * torch.finfo(dtype).eps


def test_gates_of_the_runtime_are_within_the_bound():
    """One rounding for each product (docs/spec.md, section 10), and the error of the runtime's own Sigmoid.

    That error is not specified: it is taken from the runtime, for these inputs.
    """
    torch.manual_seed(0)
    z, y = torch.linspace(-20, 20, 4001), torch.randn(4001)
    calls = [
        (lambda y, z: torch.sigmoid(z), (F32, F32)),
        (lambda y, z: fusednorm.gate(y, z), (F32, F32)),
        (lambda y, z: fusednorm.silu_and_mul(z, y), (F32, F32)),
    ]
    (sigmoid, *found), operators = run(Calls(calls), [y.double(), z.double()])
    assert operators.count("Sigmoid") == 1  # of one gate, which torch's optimizer computes once
    exact = z.double().sigmoid()
    error = ((sigmoid - exact) / exact).abs()
    for result in found:
        silu = y.double() * z.double() * exact
        assert ((result - silu).abs() <= (error * (1 + 3 * U) + 2 * U) * 1.000001 * silu.abs()).all()


def exported(function, **options):
    return fusednorm.onnx.export(Calls([(function, (F32, F32))]), (torch.ones(2, 8, dtype=F64),), **options)


def test_calls_without_a_translation():
    with pytest.raises(NotImplementedError, match=r"fusednorm\.rms_norm_ has no .* it writes .* call rms_norm, which"):
        exported(lambda x: fusednorm.rms_norm_(x.clone()))
    with pytest.raises(NotImplementedError, match=r"fusednorm\.into has no .* call the function without `out`"):
        exported(lambda x: fusednorm.rms_norm(x, out=torch.empty_like(x)))
    with pytest.raises(NotImplementedError, match=r"gate_backward has no .* it computes gradients"):
        exported(
            lambda x: torch.ops.fusednorm.gate_backward(
                x, x, x, "silu", None, 0.0, 1.0, 0.0, "before", False, [True, True]
            )
        )
    with pytest.raises(NotImplementedError, match="rounded to 16 bits, which runtimes round twice"):
        exported(lambda x: fusednorm.rms_norm(x.double(), out_dtype=BF16), exact=True)
    with pytest.raises(NotImplementedError, match="opset 23 and later, and the export is to opset 20"):
        exported(fusednorm.rms_norm, opset_version=20)
    for quantization, scale, words in (
        (fusednorm.quantizations.DEEPGEMM_FP8_BLOCK_PACKED, None, "a scale_dtype has no program of ONNX; leave it out"),
        (fusednorm.quantizations.VLLM_FP8_STATIC, torch.ones(2, 1), "a scale for each block has no program of ONNX"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            exported(lambda x, q=quantization, scale=scale: fusednorm.quantize(x.tile(16), q, scale=scale)[0])
    any_length = (((None, torch.export.Dim.DYNAMIC),),)
    with pytest.raises(NotImplementedError, match="last dimension must have a fixed length"):
        exported(fusednorm.rms_norm, exact=True, dynamic_shapes=any_length)
    with pytest.raises(torch.onnx.OnnxExporterError, match="bessel"):  # an operation of torch's
        exported(torch.special.bessel_j0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_operations_that_torch_converts_already():
    """A program in which torch has replaced operations that write, as it does before an export."""
    program = torch.export.export(Calls([(lambda x: fusednorm.rms_norm_(x.clone()), (F32,))]), (torch.ones(2, 8),))
    with pytest.raises(NotImplementedError, match=r"fusednorm\.rms_norm_ has no"):
        fusednorm.onnx.export(program.run_decompositions({}))


def test_every_operation_has_an_entry():
    table = fusednorm.onnx.translations()
    assert {operation._opname for operation in table} == set(fusednorm.torch_ops.registered.exported())
    forward = {"log_softmax", "logsumexp", "selected_log_prob", "selected_log_prob_and_entropy", "modulate", "linear"}
    forward |= {"attention", "paged_attention", "int8_linear"}
    reasons = {}
    for operation, function in table.items():
        name = operation._opname
        if name in forward or name.endswith("backward"):
            with pytest.raises(NotImplementedError, match=rf"fusednorm\.{name} has no translation") as caught:
                function()
            reasons[name] = str(caught.value)
    assert forward == {name for name, reason in reasons.items() if "none has been written; in the model" in reason}
    assert all("it computes gradients" in reason for name, reason in reasons.items() if name not in forward)


def test_other_translations_come_first():
    from onnxscript import opset23

    table = {torch.ops.fusednorm.rms_norm.default: lambda x, *_: (opset23.Neg(x), opset23.Abs(x))}
    program = exported(fusednorm.rms_norm, custom_translation_table=table, verbose=False)
    assert "Neg" in [node.op_type for node in program.model.graph]
