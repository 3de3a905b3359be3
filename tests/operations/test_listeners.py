"""Who listens to a call sees the operation: modes, tracers, profilers, transforms. docs/faults.md lists them."""

import copy
import io
import sys
import threading
from functools import partial

import pytest
import torch
from every_operation import Named, Seen
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile as autograd_profile
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.calls import must_be_seen
from fusednorm.operations import norm as norms

pytestmark = [
    pytest.mark.usefixtures("asked_by"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]

X, RESIDUAL, WEIGHT = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16) + 0.5


def norm(x, residual, weight):
    return (rms_norm(x, weight),)


def norm_(x, residual, weight):
    return (rms_norm_(x.clone(), weight),)


def norm_into(x, residual, weight):
    return (rms_norm(x, weight, out=torch.zeros_like(x)),)


def fused(x, residual, weight):
    return fused_add_rms_norm(x, residual, weight)


def fused_(x, residual, weight):
    return fused_add_rms_norm_(x.clone(), residual.clone(), weight)


def fused_into(x, residual, weight):
    return fused_add_rms_norm(x, residual, weight, out=torch.zeros_like(x))


class Block(torch.nn.Module):
    """A norm, and one that adds."""

    def __init__(self):
        super().__init__()
        self.first, self.second = fusednorm.RMSNorm(16, 1e-6), fusednorm.AddRMSNorm(16, 1e-6)
        torch.nn.init.normal_(self.first.weight)
        torch.nn.init.normal_(self.second.weight)

    def forward(self, x, residual):
        y, residual = self.second(self.first(x), residual)
        return y, residual


def test_torchs_cpp_is_asked():
    """Of the torch that the tests take, wherever its libraries name functions as this compiler does."""
    if torch.__version__.startswith(must_be_seen._TESTED) and sys.platform == "linux":
        assert all(must_be_seen.in_cpp(*must_be_seen.IN_CPP))


#: A call, and the operation that it is for torch.
CALLS = {
    "rms_norm": norm,
    "rms_norm_": norm_,
    "into": norm_into,
    "fused_add_rms_norm": fused,
    "fused_add_rms_norm_": fused_,
    "into ": fused_into,
}
calls = pytest.mark.parametrize("name", CALLS)
new_outputs = pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])


def same(a, b):
    assert len(a) == len(b)
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b, strict=True))


def packet(name):
    return getattr(torch.ops.fusednorm, name.strip()).default


@calls
def test_dispatch_modes(name):
    expected = CALLS[name](X, RESIDUAL, WEIGHT)
    with Seen() as seen:
        assert same(CALLS[name](X, RESIDUAL, WEIGHT), expected)
    assert packet(name) in seen.operations


@new_outputs
def test_dispatch_modes_see_gradients_too(name):
    leaves = [t.clone().requires_grad_() for t in (X, RESIDUAL, WEIGHT)]
    used = leaves if name.startswith("fused") else [leaves[0], leaves[2]]
    plain = torch.autograd.grad(sum(t.sum() for t in CALLS[name](*leaves)), used)
    with Seen() as seen:
        total = sum(t.sum() for t in CALLS[name](*leaves))
        assert packet(name) in seen.operations
        assert same(torch.autograd.grad(total, used), plain)
    assert packet("backward") in seen.operations
    total = sum(t.sum() for t in CALLS[name](*leaves))  # heard only while the gradients are computed
    with Seen() as seen:
        assert same(torch.autograd.grad(total, used), plain)
    assert packet("backward") in seen.operations


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@calls
def test_make_fx(name, tracing):
    graph = make_fx(CALLS[name], tracing_mode=tracing)(X, RESIDUAL, WEIGHT)
    x, residual = torch.randn(2, 3, 16).unbind()
    assert same(graph(x, residual, WEIGHT), CALLS[name](x, residual, WEIGHT))


@new_outputs
def test_make_fx_of_gradients(name):
    """The backward pass is traced, whether the forward pass was or not."""

    def both(x, residual, weight):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(CALLS[name](leaf, residual, weight)[0].sum(), leaf)

    x = torch.randn(3, 16)
    assert same(make_fx(both)(X, RESIDUAL, WEIGHT)(x, RESIDUAL, WEIGHT), both(x, RESIDUAL, WEIGHT))
    leaf = X.clone().requires_grad_()
    y = CALLS[name](leaf, RESIDUAL, WEIGHT)[0]

    def only_backward(dy):
        return torch.autograd.grad(y, leaf, dy, retain_graph=True)

    assert same(make_fx(only_backward)(X)(x), only_backward(x))


@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace(grad):
    """Of functions and modules, checked by torch and by other rows, saved and loaded."""
    x, residual = torch.randn(2, 5, 16).unbind()
    block = Block().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        for function in (norm, fused, *(() if grad else (norm_, norm_into, fused_, fused_into))):
            traced = torch.jit.trace(function, (X, RESIDUAL, WEIGHT))
            assert same(traced(x, residual, WEIGHT), function(x, residual, WEIGHT))
        traced = torch.jit.trace(block, (X, RESIDUAL))
        assert same(traced(x, residual), block(x, residual))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert same(torch.jit.load(file)(x, residual), block(x, residual))
        if grad:
            for module in (block, traced):
                module.zero_grad()
                sum(t.square().sum() for t in module(x, residual)).backward()
            expected = [p.grad.clone() for p in block.parameters()]
            block.zero_grad()
            sum(t.square().sum() for t in block(x, residual)).backward()
            assert same([p.grad for p in block.parameters()], expected)


def test_jit_trace_of_normalized_dimensions():
    """Shapes are looked at without torch's warning that they are made constants."""
    module = fusednorm.RMSNorm((4, 4), elementwise_affine=False)
    traced = torch.jit.trace(module, torch.randn(3, 4, 4))
    x = torch.randn(7, 4, 4)
    assert same([traced(x)], [module(x)])


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    block = Block()
    exported = torch.export.export(block, (X, RESIDUAL), strict=strict)
    assert any("fusednorm" in str(node.target) for node in exported.graph.nodes)
    assert same(exported.module()(RESIDUAL, X), block(RESIDUAL, X))


@calls
def test_profilers(name):
    """The operation stands there with its shapes, without a gradient and with one."""
    CALLS[name](X, RESIDUAL, WEIGHT)
    for leaf in (False, True)[: 1 + (name in ("rms_norm", "fused_add_rms_norm"))]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            CALLS[name](X.clone().requires_grad_(leaf), RESIDUAL, WEIGHT)
        found = [e for e in recorded.events() if e.name == f"fusednorm::{name.strip()}"]
        assert [e.input_shapes[0] for e in found] == [[3, 16]]
    with autograd_profile() as recorded:
        CALLS[name](X, RESIDUAL, WEIGHT)
    assert f"fusednorm::{name.strip()}" in [e.key for e in recorded.key_averages()]


def test_flop_counters():
    with FlopCounterMode(display=False) as counter:
        fused(X, RESIDUAL, WEIGHT)
        torch.nn.functional.linear(X, X)
    assert counter.get_total_flops() == 2 * 3 * 3 * 16  # the product's alone


def test_selective_checkpointing():
    """A policy may keep the operation's outputs."""
    asked = []

    def policy(ctx, operation, *args, **kwargs):
        asked.append(operation)
        keep = operation is packet("fused_add_rms_norm")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [t.clone().requires_grad_() for t in (X, RESIDUAL, WEIGHT)]
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y, total = checkpoint(fused, *leaves, use_reentrant=False, context_fn=contexts)
    plain = torch.autograd.grad(sum(t.sum() for t in fused(*leaves)), leaves)
    assert same(torch.autograd.grad((y + total).sum(), leaves), plain)
    assert packet("fused_add_rms_norm") in asked


def test_fake_tensor_mode_with_plain_tensors():
    """Outputs are fake, and nothing is written to them."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for call in (norm, fused):
            for output in call(X, RESIDUAL, WEIGHT):
                assert type(output) is torch._subclasses.FakeTensor
                assert output.shape == X.shape


PUBLIC = {
    "rms_norm": rms_norm,
    "rms_norm_": rms_norm_,
    "into": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_add_rms_norm_": fused_add_rms_norm_,
    "into ": fused_add_rms_norm,
}


@calls
def test_function_modes(name):
    expected = CALLS[name](X, RESIDUAL, WEIGHT)
    for device in (None, "cpu", "meta"):  # with torch's own mode below, which set_default_device leaves on
        torch.set_default_device(device)
        try:
            with Named() as named:
                assert same(CALLS[name](X, RESIDUAL, WEIGHT), expected)
        finally:
            torch.set_default_device(None)
        assert PUBLIC[name] in named.functions


@calls
def test_a_default_device_takes_the_fast_path(name, monkeypatch):
    """torch's own mode for a default device does not listen."""
    with fusednorm.use_backend("cpu"):
        expected = CALLS[name](X, RESIDUAL, WEIGHT)  # opens the fast path
    monkeypatch.setattr(norms, "beyond_fast_path", None)
    with torch.device("cpu"), fusednorm.use_backend("cpu"):
        assert same(CALLS[name](X, RESIDUAL, WEIGHT), expected)


def test_fx_keeps_modules_as_leaves_and_functions_as_calls():
    block = Block()
    traced = torch.fx.symbolic_trace(block)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["first", "second"]
    assert same(traced(X, RESIDUAL), block(X, RESIDUAL))
    assert same(copy.deepcopy(traced)(X, RESIDUAL), block(X, RESIDUAL))

    def calls(x, residual, weight):
        y, total = fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
        return rms_norm(y, weight, round_norm=True), total

    traced = torch.fx.symbolic_trace(calls)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t in (fused_add_rms_norm, rms_norm)] == [fused_add_rms_norm, rms_norm]
    assert same(traced(X, RESIDUAL, WEIGHT), calls(X, RESIDUAL, WEIGHT))
    for eps in (1e-6, None):  # the root itself is traced into
        norm = fusednorm.AddRMSNorm(16, eps, dtype=torch.float64)
        x, residual = X.double(), RESIDUAL.double()
        assert same(torch.fx.symbolic_trace(norm)(x, residual), norm(x, residual))


def test_listeners_of_one_thread_alone():
    """Modes hear their own thread, whatever another one enters and leaves meanwhile."""
    entered, left = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    expected, others = fused(X, RESIDUAL, WEIGHT), []

    def other():
        for listener in (Seen, Named):
            with listener():
                entered.wait()
                left.wait()  # inside, while the first thread enters its own
                others.append(same(fused(X, RESIDUAL, WEIGHT), expected))
            entered.wait()  # outside, while the first thread is inside
            others.append(same(fused(X, RESIDUAL, WEIGHT), expected))
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    for listener in (Seen, Named):
        entered.wait()
        with listener() as mine:
            left.wait()
            entered.wait()
            assert same(fused(X, RESIDUAL, WEIGHT), expected)
            left.wait()
        heard = packet("fused_add_rms_norm") if listener is Seen else fused_add_rms_norm
        assert heard in (mine.operations if listener is Seen else mine.functions)
    thread.join()
    assert others == 4 * [True]


def test_a_profiler_of_all_threads():
    """It hears a thread other than the one that turned it on."""
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as recorded:
        thread = threading.Thread(target=fused, args=(X, RESIDUAL, WEIGHT))
        thread.start()
        thread.join()
    assert "fusednorm::fused_add_rms_norm" in [e.key for e in recorded.key_averages()]
