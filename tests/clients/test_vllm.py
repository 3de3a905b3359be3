"""The plug-in of vLLM: in its engine and its server, and its implementations beside vLLM's own."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusednorm
import fusednorm.vllm as plugin
from fusednorm.vllm import layers
from fusednorm.vllm.providers import BY_CONTRACT, ROUNDINGS, implementations, takes_fused, takes_norm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_serving

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `tox -e vllm` installs it", allow_module_level=True)

# vLLM, and what it imports, warn of their own affairs.
pytestmark = pytest.mark.filterwarnings("default")

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROMPTS = [[random.Random(i).randrange(256) for _ in range(random.Random(-i).randrange(4, 40))] for i in range(100)]

# One process and thread for each engine: it starts in a third of the time.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "FUSEDNORM_"))},
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Llama, of 8 bits too; a Qwen3, which has norms of each head; and others with steps of their own."""
    paths = {}
    for model in ("Llama", "Llama W8A8", "Qwen3", "Qwen3Next", "Gemma2", "Mamba2"):
        architecture, _, int8 = model.partition(" ")
        paths[model] = str(tmp_path_factory.mktemp(model.replace(" ", "")))
        vllm_serving.save_model(paths[model], architecture, vllm_serving.TINY, bool(int8))
    return paths


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory, eagerly):
    """Runs jobs (model, dtype, compiled or eager, further arguments) in one process; its results and what it said.

    All processes share vLLM's cache: what it keeps of a model with the plug-in must not be taken without it.
    """

    def run(jobs, changed=False, **environment):
        folder = tmp_path_factory.mktemp("engine")
        task = {
            "jobs": [
                {"model": models[model], "dtype": dtype, "enforce_eager": way == "eager", **further}
                for model, dtype, way, further in jobs
            ],
            "prompts": PROMPTS,
            "changed": changed,
            "out": str(folder / "out.json"),
        }
        environment = {
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **eagerly,
            "TORCHDYNAMO_DISABLE": str(int(all(way == "eager" for _, _, way, _ in jobs))),
            **environment,
        }
        script = Path(__file__).with_name("vllm_engine.py")
        done = subprocess.run(
            [sys.executable, "-P", script, json.dumps(task)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return json.loads((folder / "out.json").read_text()), said

    return run


EAGER = [("Llama", "bfloat16", "eager", {}), ("Qwen3", "float32", "eager", {})]
#: In a W8A8 Llama vLLM quantizes each normalised row; Qwen3-Next has gated norms, and Gemma's.
OTHERS = [(model, "bfloat16", "eager", {}) for model in ("Llama W8A8", "Qwen3Next")]
COMPILED = [(model, "bfloat16", "compiled", {}) for model in ("Llama", "Qwen3")]


@pytest.fixture(scope="module")
def without(engine):
    """What vLLM does without the plug-in."""
    return engine(EAGER + OTHERS, VLLM_PLUGINS="none")


def bits_kept(results, others):
    """The part of the tokens' log-probabilities that are the same bits in two runs."""
    pairs = [
        (a, b)
        for result, other in zip(results, others, strict=True)
        for rows in zip(result["logprobs"], other["logprobs"], strict=True)
        for a, b in zip(*rows, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_same_tokens(engine, without):
    order = {"ir_op_priority": {"rms_norm": "native", "fused_add_rms_norm": "fusednorm_default"}}
    found, said = engine([*EAGER, *OTHERS, ("Llama", "bfloat16", "eager", order)])
    assert "rms_norm=['fusednorm', 'native'], fused_add_rms_norm=['fusednorm', 'native']" in said
    assert f"fusednorm {fusednorm.__version__}: " not in without[1]
    for result, expected in zip(found, [*without[0], without[0][0]], strict=True):
        assert result["tokens"] == expected["tokens"]
        assert expected["counts"] == {}
        assert expected["priorities"] == {name: ["native"] for name in ("rms_norm", "fused_add_rms_norm")}
    for result, (model, *_) in zip(found, EAGER, strict=False):
        assert result["priorities"] == {name: ["fusednorm", "native"] for name in ("rms_norm", "fused_add_rms_norm")}
        # Two layers: the first norm has no residual, the four others have. Qwen3 norms q and k of both layers.
        steps = result["counts"]["qk_norm_rope_"] // 2
        assert steps > 0
        assert result["counts"] == {
            "rms_norm": steps * (5 if model == "Qwen3" else 1),
            "fused_add_rms_norm_": steps * 4,
            "silu_and_mul": steps * 2,
            "qk_norm_rope_": steps * 2,
        }
    llama, qwen3_next = (result["counts"] for result in found[len(EAGER) : -1])
    assert llama == found[0]["counts"]
    # One layer has a gated norm, one attention with norms of q and k; the five norms of rows are Gemma's.
    steps = qwen3_next["rms_norm_gated"]
    assert steps > 0
    assert qwen3_next == {
        "rms_norm_gated": steps,
        "rms_norm": steps * 3,
        "fused_add_rms_norm": steps * 4,
        "silu_and_mul": steps * 2,
        "qk_norm_rope_": steps,
    }
    # What the user orders comes first.
    assert found[-1]["priorities"]["rms_norm"] == ["native"]
    assert found[-1]["priorities"]["fused_add_rms_norm"][0] == "fusednorm_default"
    assert found[-1]["counts"].keys() == {"fused_add_rms_norm_", "silu_and_mul", "qk_norm_rope_"}
    # Where the two round alike, only the last bit of a reciprocal root differs, in some rows.
    assert bits_kept(found[:1], without[0][:1]) > 0.9


@pytest.mark.slow
def test_compiled(engine, without):
    all_layers = ("Llama", "bfloat16", "compiled", {"compilation_config": {"custom_ops": ["all"]}})
    found, _ = engine([*COMPILED, all_layers, EAGER[0]])
    for result, expected in zip(found[:2], without[0][: len(EAGER) : 2], strict=True):
        assert result["tokens"] == expected["tokens"]
        assert {"fusednorm::fused_add_rms_norm_", "fusednorm::rms_norm"} <= result["counts"].keys()
        assert "fusednorm::gate" not in result["counts"]
    assert "fusednorm::gate" in found[2]["counts"]
    # With all layers, compiled and eager execution have the same bits.
    assert found[2]["tokens"] == found[3]["tokens"]
    assert found[2]["logprobs"] == found[3]["logprobs"]


@pytest.mark.slow
def test_norms_before_additions_and_norms_of_gated_rows(engine):
    """Of Gemma 2, whose gates are GELU, and of Mamba 2."""
    jobs = [(model, "bfloat16", "eager", {}) for model in ("Gemma2", "Mamba2")]
    (gemma, mamba), _ = engine(jobs)
    assert [result["tokens"] for result in (gemma, mamba)] == [
        result["tokens"] for result in engine(jobs, VLLM_PLUGINS="none")[0]
    ]
    steps = gemma["counts"]["gelu_tanh_and_mul"]
    assert gemma["counts"] == {
        "gelu_tanh_and_mul": steps,
        "qk_norm_rope_": steps,
        "rms_norm": steps * 5 // 2,
        "fused_add_rms_norm": steps * 2,
    }
    steps = mamba["counts"]["rms_norm_gated"]
    assert mamba["counts"] == {"rms_norm_gated": steps, "rms_norm": steps // 2, "fused_add_rms_norm_": steps}


@pytest.mark.slow
def test_default_rounding(engine, without):
    found, said = engine(EAGER[:1], FUSEDNORM_VLLM="default")
    assert "rms_norm=['fusednorm_default', 'native']" in said
    assert found[0]["tokens"] == without[0][0]["tokens"]
    assert found[0]["counts"].keys() == {"rms_norm", "fused_add_rms_norm_", "silu_and_mul", "qk_norm_rope_"}
    assert bits_kept(found, without[0][:1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "setting", "words"),
    [
        (True, "vllm", "to take x, weight, epsilon, variance_size, found x, weight, eps, variance_size"),
        (False, "off", ""),
        (False, "vlm", "FUSEDNORM_VLLM is 'vlm', it must be one of vllm, default, huggingface, off; "),
    ],
)
def test_vllm_as_it_was(engine, without, changed, setting, words):
    found, said = engine(EAGER[:1], changed, FUSEDNORM_VLLM=setting)
    assert found == without[0][:1]
    assert words in said
    assert ("leaves vLLM 0." in said) == bool(words)


@pytest.mark.slow
def test_server(models, without, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"""-P -m vllm.entrypoints.openai.api_server --model {models["Llama"]} --host 127.0.0.1 --port {port}
        --skip-tokenizer-init --enforce-eager --dtype bfloat16 --max-model-len 64 --max-num-seqs 32"""
    log = tmp_path / "log"
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path)}
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, *command.split()], stdout=file, stderr=file, env=environment, cwd=tmp_path
        )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        while True:
            assert server.poll() is None, log.read_text()
            try:
                opener.open(f"http://127.0.0.1:{port}/health").close()
                break
            except urllib.error.URLError:  # not there yet
                time.sleep(0.5)
        request = {
            "model": models["Llama"],
            "prompt": PROMPTS,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        with opener.open(
            urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(request).encode(),
                {"Content-Type": "application/json"},
            )
        ) as answer:
            choices = json.load(answer)["choices"]
    finally:
        server.terminate()
        server.wait()
    assert [choice["token_ids"] for choice in choices] == without[0][0]["tokens"]
    said = log.read_text().splitlines()
    # In each process that computes: the engine's core, and the worker.
    for process in ("EngineCore", "Worker"):
        assert any(process in line and "vLLM prefers its provider fusednorm (" in line for line in said)


# The rest is about the plug-in's functions, in this process.


def providers(ops):
    """The implementations of both operations, and the platform's default order."""
    from vllm.platforms import current_platform

    order = current_platform.get_default_ir_op_priority(None)
    return [
        (list(op.impls), getattr(order, name))
        for name, op in (("rms_norm", ops.rms_norm), ("fused_add_rms_norm", ops.fused_add_rms_norm))
    ]


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_gpus_are_for_who_asks(vllms, said, monkeypatch, device):
    """What does not run on a CPU stays as it is, and one line of the log says how to ask; `--ir-op-priority` may."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", device)
    before = providers(vllms)
    plugin.register()
    assert providers(vllms) == [([*impls, *BY_CONTRACT.values()], order) for impls, order in before]
    (line,) = said.messages
    assert f"vLLM keeps its own RMSNorm on {device}" in line
    assert "FUSEDNORM_VLLM=vllm,gpu" in line
    plugin.register()
    assert said.messages == [line]


@pytest.mark.parametrize(
    ("device", "setting", "first"),
    [("cpu", contract, provider) for contract, provider in BY_CONTRACT.items()]
    + [(device, "gpu", "fusednorm") for device in ("cuda", "cpu")]
    + [(device, "vllm,gpu", "fusednorm") for device in ("cuda", "cpu")]
    + [(device, " gpu , default ", "fusednorm_default") for device in ("cuda", "cpu")],
)
def test_register(vllms, said, monkeypatch, device, setting, first):
    """On a CPU; and on a GPU for who asks."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", device)
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    before = providers(vllms)
    plugin.register()
    assert providers(vllms) == [([*impls, *BY_CONTRACT.values()], [first, *order]) for impls, order in before]
    assert f"vLLM prefers its provider {first} (FUSEDNORM_VLLM={setting.strip()})" in said.text
    plugin.register()
    assert providers(vllms)[0][1].count(first) == 1


def test_the_provider_of_a_family(vllms, monkeypatch):
    """Llama's norms round before the weight, gpt-oss's once: fusednorm's default."""
    transformers = pytest.importorskip("transformers")
    from vllm.platforms import current_platform

    monkeypatch.setenv("FUSEDNORM_VLLM", "huggingface")
    plugin.register()
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    for family, provider in (("Llama", "fusednorm_huggingface"), ("GptOss", "fusednorm_default")):
        config = getattr(transformers, f"{family}Config")(vocab_size=8, **sizes)
        serves = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
        order = current_platform.get_default_ir_op_priority(serves)
        assert order.rms_norm[0] == order.fused_add_rms_norm[0] == provider


@pytest.mark.parametrize("setting", ["vlm", "vllm,cuda", "vllm,default", "off,default", "VLLM"])
def test_words_that_mean_nothing(vllms, said, monkeypatch, setting):
    monkeypatch.setenv("FUSEDNORM_VLLM", setting)
    before = providers(vllms)
    plugin.register()
    assert providers(vllms) == before
    assert f"FUSEDNORM_VLLM is '{setting}', it must be one of vllm, default, huggingface, off; " in said.text


def test_what_a_platform_prefers_to_the_native_implementation_stays_before_it(vllms, monkeypatch):
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform),
        "get_default_ir_op_priority",
        lambda *_: IrOpPriorityConfig.with_default(["vllm_c", "native"]),
    )
    plugin.register()
    assert providers(vllms)[0][1] == ["vllm_c", "fusednorm", "native"]


def deprived(name):
    """Takes an attribute from vLLM's platform."""

    def change(ops, monkeypatch):
        from vllm.platforms import current_platform

        for cls in type(current_platform).__mro__[:-1]:
            if name in vars(cls):
                monkeypatch.delattr(cls, name)

    return change


def native(name, make):
    """Puts a function in place of vLLM's own implementation."""
    return lambda ops, m: m.setattr(getattr(ops, name).impls["native"], "impl_fn", make(ops))


def rounded_sum(ops):
    def call(x, x_residual, weight, epsilon, variance_size=None):
        total = x + x_residual
        return ops.rms_norm.impls["native"].impl_fn(total, weight, epsilon), total

    return call


def rounded_once(ops):
    return lambda x, weight, epsilon, variance_size=None: fusednorm.rms_norm(x, weight, epsilon)


ROUNDS = "its native RMSNorm does not round where it did"
#: Changes of vLLM, and the words about them.
CHANGES = (
    (lambda ops, m: m.delattr(type(ops.rms_norm), "register_impl"), "vllm.ir.ops.rms_norm to have register_impl"),
    (lambda ops, m: m.delattr(ops, "fused_add_rms_norm"), "vllm.ir.ops.fused_add_rms_norm to have register_impl"),
    (lambda ops, m: m.setitem(sys.modules, "vllm.ir", None), "expected vllm.ir.ops and"),
    (deprived("get_default_ir_op_priority"), "expected CpuPlatform to have get_default_ir_op_priority"),
    (deprived("device_type"), "expected CpuPlatform to have device_type"),
    (lambda ops, m: m.setattr("vllm.config.kernel.IrOpPriorityConfig", dict), "IrOpPriorityConfig to be a dataclass"),
    (
        native("rms_norm", lambda ops: lambda x, weight, epsilon: None),
        "expected vllm.ir.ops.rms_norm to take x, weight, epsilon, variance_size, found",
    ),
    (native("fused_add_rms_norm", rounded_sum), ROUNDS),
    (native("rms_norm", rounded_once), ROUNDS),
)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_an_unknown_vllm_is_left_as_it_was(vllms, said, monkeypatch, change, words):
    impls = [op.impls for op in (vllms.rms_norm, vllms.fused_add_rms_norm)]
    before = [list(each) for each in impls]
    with monkeypatch.context() as patched:
        change(vllms, patched)
        plugin.register()
    assert words in said.text
    assert "leaves vLLM 0." in said.text
    assert [list(each) for each in impls] == before
    assert providers(vllms)[0][1] == ["native"]


def test_the_roundings_looked_at_differ():
    """Else the plug-in could not tell them apart."""
    x = torch.arange(1024, 2048).half() / 1024
    found = [
        fusednorm.fused_add_rms_norm(x, x.flip(0) / 64, x.roll(500), 2.0**30, round_sum=s, round_norm=n)[0]
        for s, n in itertools.product((False, True), repeat=2)
    ]
    found += [fusednorm.rms_norm(x, x.roll(500), 2.0**30, round_norm=n) for n in (False, True)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def operands(dtypes, shape=(256, 512)):
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype) for dtype in dtypes[:2])
    return x, residual, None if dtypes[2] is None else torch.randn(shape[-1]).to(dtypes[2])


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES, (*DTYPES, None))), ids=str)
def test_rounds_where_vllm_rounds(vllms, dtypes):
    """In rows whose reciprocal roots are the same bits in both, so is everything else; where they differ, little is."""
    x, residual, weight = operands(dtypes)
    fits = weight is None or weight.dtype in (x.dtype, torch.float32)
    assert takes_norm(x, weight, EPS) == fits
    assert takes_fused(x, residual, weight, EPS) == (fits and x.dtype == residual.dtype)
    if not takes_fused(x, residual, weight, EPS):
        return
    norm, fused = implementations(**ROUNDINGS["fusednorm"])
    for h, theirs, ours in (
        (x, [vllms.rms_norm.impls["native"].impl_fn(x, weight, EPS)], [norm(x, weight, EPS)]),
        (
            x.float() + residual.float(),
            vllms.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS),
            fused(x.clone(), residual.clone(), weight, EPS),
        ),
    ):
        rstd = torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + EPS)
        our_rstd = torch.ops.fusednorm.rms_norm(h.float(), None, EPS, 0.0, True, False)[1].view_as(rstd)
        same = (rstd == our_rstd).flatten()
        assert same.double().mean() > 0.2
        assert [a.dtype for a in theirs] == [a.dtype for a in ours] == [x.dtype] * len(theirs)
        assert all(torch.equal(a[same], b[same]) for a, b in zip(theirs, ours, strict=True))
        assert all(map(torch.equal, theirs[1:], ours[1:]))
        if x.dtype != torch.float32:
            # A rounding to b bits differs where a boundary lies between the two values, of which there are at most 2^b
            # per unit of relative distance; so this many are expected. Twice as many, and 20, leave room for chance.
            bits = {torch.bfloat16: 8, torch.float16: 11}[x.dtype]
            distance = (((rstd - our_rstd) / rstd).abs() + 2.0**-24 * (rstd != our_rstd)).sum().item()
            expected = distance * x.shape[-1] * 2**bits
            assert (theirs[0] != ours[0]).sum() <= 2 * expected + 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_flags_round_elsewhere(vllms, dtype):
    x, residual, weight = operands((dtype,) * 3)
    theirs = vllms.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)[0]
    different = {
        (s, n): (fusednorm.fused_add_rms_norm(x, residual, weight, EPS, round_sum=s, round_norm=n)[0] != theirs)
        .double()
        .mean()
        .item()
        for s, n in itertools.product((False, True), repeat=2)
    }
    assert different.pop((False, True)) < 1e-3
    assert min(different.values()) > 0.1


def test_what_is_left_to_vllm():
    x, residual, weight = operands((torch.bfloat16,) * 3)
    assert takes_fused(x, residual, weight, EPS)
    assert not takes_norm(x, weight, EPS, 256)
    assert not takes_norm(x.double(), weight.double(), EPS)
    assert not takes_norm(x, weight[:1], EPS)
    assert takes_norm(x.t(), None, EPS)
    assert not takes_fused(x.t(), residual.t(), None, EPS)
    assert not takes_fused(x[:, ::2], residual[:, :256].contiguous(), None, EPS)
    assert not takes_fused(x[:, :256].contiguous(), residual[:, ::2], None, EPS)


def test_dispatch(vllms):
    """As vLLM calls them: a copy where it must keep its operands, else in place; what we leave goes to vLLM's own."""
    plugin.register()
    x, residual, weight = operands((torch.bfloat16,) * 3)
    y, total = fusednorm.fused_add_rms_norm(x, residual, weight, EPS, round_sum=False, round_norm=True)
    before = x.clone(), residual.clone()
    with layers._first(vllms, "fusednorm"):
        assert torch.equal(vllms.rms_norm(x, weight, EPS), fusednorm.rms_norm(x, weight, EPS, round_norm=True))
        assert vllms.rms_norm.dispatch(x, weight, EPS, 256).provider == "native"
        found = vllms.fused_add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(found[0], y)
        assert torch.equal(found[1], total)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])
        with vllms.fused_add_rms_norm.set_priority(["fusednorm_default", "native"]):
            found = vllms.fused_add_rms_norm(x, residual, weight, EPS)
        assert all(map(torch.equal, found, fusednorm.fused_add_rms_norm(x, residual, weight, EPS)))
        vllms.fused_add_rms_norm.maybe_inplace(x, residual, weight, EPS)
        assert torch.equal(x, y)
        assert torch.equal(residual, total)


def test_lowered(vllms):
    """As vLLM compiles for GPUs: a pass of its own puts implementations into Inductor's graph."""
    from torch._inductor import config as inductor
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
    from vllm.config import VllmConfig

    plugin.register()
    x, residual, weight = operands((torch.bfloat16,) * 3)
    lower = VllmIRLoweringPass(VllmConfig())

    def two_layers(x, residual):
        total = x * 2
        y = vllms.rms_norm(total, weight, EPS)
        y, total = vllms.fused_add_rms_norm(y + 1, residual, weight, EPS)
        return y * 3, total, residual

    def expected(x, residual):
        y = fusednorm.rms_norm(x * 2, weight, EPS, round_norm=True)
        y, total = fusednorm.fused_add_rms_norm(y + 1, residual, weight, EPS, round_sum=False, round_norm=True)
        return y * 3, total, residual

    with (
        torch.inference_mode(),
        layers._first(vllms, "fusednorm"),
        inductor.patch(post_grad_custom_post_pass=lower, fx_graph_cache=False),
    ):
        found = torch.compile(two_layers, fullgraph=True)(x, residual)
        assert all(map(torch.equal, found, expected(x, residual)))
    assert {name: set(chosen.values()) for name, chosen in lower.selected_impls.items()} == {
        "rms_norm": {"fusednorm"},
        "fused_add_rms_norm": {"fusednorm"},
    }
