"""Who listens to a call sees the operation: modes, tracers, profilers, transforms. docs/faults.md lists them."""

import contextlib
import copy
import io
import sys
import threading
from functools import partial

import pytest
import torch
from every_operation import (
    DIFFERENTIATED,
    FUNCTIONS,
    IN_PLACE,
    Named,
    Seen,
    called,
    clones,
    function_of,
    gradients,
    recorded,
    same,
    tensors,
    without_outputs,
    written_by,
)
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import profile as autograd_profile
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import fused_add_rms_norm, rms_norm
from fusednorm.calls import must_be_seen
from fusednorm.operations import norm as norms

pytestmark = [
    pytest.mark.usefixtures("asked_by"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]

X, RESIDUAL, WEIGHT = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16) + 0.5
functions = pytest.mark.parametrize("name", FUNCTIONS)


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


def call(name, operands):
    return called(function_of(name), operands)


def program(name):
    """A function of the operands that are tensors, which it does not change, and these."""
    operands = FUNCTIONS[name]
    keys = tensors(operands)

    def of_tensors(*given):
        return tuple(call(name, operands | {key: t.clone() for key, t in zip(keys, given, strict=True)}))

    return of_tensors, [operands[key] for key in keys]


def turned(name, given):
    """Other rows; but places in pages stay as they are."""
    return [t.flip(0) if t.is_floating_point() or "pages" not in FUNCTIONS[name] else t for t in given]


def ours(operations):
    return [operation for operation in map(str, operations) if operation.startswith(("fusednorm.", "fusednorm::"))]


def test_torchs_cpp_is_asked():
    """Of the torch that the tests take, wherever its libraries name functions as this compiler does."""
    if torch.__version__.startswith(must_be_seen._TESTED) and sys.platform == "linux":
        assert all(must_be_seen.in_cpp(*must_be_seen.IN_CPP))


@functions
def test_a_function_mode_sees_the_function_that_was_called(name):
    """That one alone, also where it calls another one; and so does a mode around that mode.

    Python looks at attributes of operands, which the mode then sees too.
    """
    public = [function_of(name) for name in FUNCTIONS]
    expected = call(name, clones(FUNCTIONS[name]))
    for device in (None, "cpu", "meta"):  # with torch's own mode below, which set_default_device leaves on
        torch.set_default_device(device)
        try:
            operands = clones(FUNCTIONS[name])
            with Named() as mode:
                found = call(name, operands)
        finally:
            torch.set_default_device(None)
        assert [function for function in mode.functions if function in public] == [function_of(name)]
        assert same(found, expected)
    operands = clones(FUNCTIONS[name])
    with Named() as outer, Named() as inner:
        call(name, operands)
    for mode in (inner, outer):
        assert next(function for function in mode.functions if function in public) is function_of(name)


@functions
def test_a_subclass_sees_the_function_that_was_called(name):
    """Whichever operand it is; results are of the subclass, unless they are tensors that were given."""
    public, seen = [function_of(name) for name in FUNCTIONS], []

    class Function(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in public:  # beside it, attributes that are looked at before
                seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    for key, operand in clones(FUNCTIONS[name]).items():
        if isinstance(operand, torch.Tensor):
            operands = clones(FUNCTIONS[name]) | {key: operand.as_subclass(Function)}
            seen.clear()
            found = call(name, operands)
            assert seen == [function_of(name)], key
            assert {type(t) for t in found} <= {Function} | {type(operands[key]) for key in written_by(name)}, key


@functions
def test_a_dispatch_mode_sees_the_operator_and_what_is_written(name):
    expected = call(name, clones(FUNCTIONS[name]))
    operands = clones(FUNCTIONS[name])
    with Seen() as mode:
        found = call(name, operands)
    assert {id(operands[key]) for key in written_by(name)} <= set(map(id, mode.written))
    read = {id(t) for key, t in operands.items() if key not in written_by(name)}
    assert not read & set(map(id, mode.written))
    assert ours(mode.operations)
    assert same(found, expected)


@pytest.mark.parametrize("while_called", [True, False])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_dispatch_mode_sees_gradients(name, while_called):
    """Whether it saw the call too, or not."""
    plain = gradients(*recorded(name))
    with Seen() if while_called else contextlib.nullcontext():
        outputs, leaves = recorded(name)
    with Seen() as mode:
        assert same(gradients(outputs, leaves), plain)
    assert ours(mode.operations)


@functions
def test_a_dispatch_subclass_sees_the_operator(name):
    """A tensor that holds another one. Of tables and outputs it may see a copy alone."""
    seen = []

    class Logging(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            wrapper.inner = inner
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    expected = call(name, clones(FUNCTIONS[name]))
    for key in tensors(FUNCTIONS[name]):
        operands = clones(FUNCTIONS[name])
        operands[key] = Logging(operands[key])
        seen.clear()
        with torch.no_grad():
            found = call(name, operands)
        assert ours(seen) if key == next(iter(operands)) else seen, key
        assert same([t.inner if isinstance(t, Logging) else t for t in found], expected), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@functions
def test_meta_tensors(name, dtype):
    """They share no memory, so that shapes and dtypes are those of a call with values; and of gradients."""
    fixed = "quantization" in FUNCTIONS[name] or name == "int8_linear"
    own = ("scale", "scale_out", "weight_scale", "bias", "out") if fixed else ()  # their dtype is not that of rows
    given = {
        key: t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and key not in own else t
        for key, t in FUNCTIONS[name].items()
    }
    expected = call(name, clones(given))
    operands = clones(given, lambda t: t.to("meta"))
    with fusednorm.use_backend("reference"):  # whichever backend these tests are for
        found = call(name, operands)
        assert [(t.shape, t.dtype, t.device.type) for t in found] == [(t.shape, t.dtype, "meta") for t in expected]
        returned = [key for key in written_by(name) if key != "normed_out"]
        assert {id(operands[key]) for key in returned} <= set(map(id, found))
        if name in DIFFERENTIATED:
            leaves = [operands[key].requires_grad_() for key in DIFFERENTIATED[name]]
            of = gradients(call(name, without_outputs(operands)), leaves, create_graph=True)
            assert [(t.shape, t.dtype) for t in of] == [(t.shape, t.dtype) for t in leaves]


@functions
def test_fake_tensors(name):
    """Of fake tensors, and of plain ones in a mode that takes them: results are fake, nothing is written."""
    expected = call(name, clones(FUNCTIONS[name]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        calls = [clones(FUNCTIONS[name], mode.from_tensor)]
        if name not in IN_PLACE:
            calls.append(without_outputs(FUNCTIONS[name]))
        for operands in calls:
            found = call(name, operands)
            assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
            given = [t for t in operands.values() if isinstance(t, torch.Tensor)]
            assert all(type(t) is FakeTensor or any(t is one for one in given) for t in found)


@pytest.mark.parametrize("tracing", ["real", pytest.param("fake", marks=pytest.mark.release), "symbolic"])
@functions
def test_make_fx(name, tracing):
    function, given = program(name)
    others = turned(name, given)
    assert same(make_fx(function, tracing_mode=tracing)(*given)(*others), function(*others))


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_make_fx_of_gradients(name):
    """The backward pass is traced, whether the forward pass was or not."""
    outputs, leaves = recorded(name)

    def only_backward(*incoming):
        return torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)

    def both(*given):
        operands = clones(without_outputs(FUNCTIONS[name]))
        leaves = [t.detach().requires_grad_() for t in given]
        return gradients(call(name, operands | dict(zip(DIFFERENTIATED[name], leaves, strict=True))), leaves)

    for function, given in ((only_backward, outputs), (both, leaves)):
        given = [t.detach() for t in given]
        others = [t.flip(0) for t in given]
        assert same(make_fx(function)(*given)(*others), function(*others))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that shapes become constants
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jit_trace(name):
    """Checked by torch, and by other rows."""
    function, given = program(name)
    others = turned(name, given)
    assert same(torch.jit.trace(function, tuple(given))(*others), function(*others))


@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_of_modules(grad):
    """Saved, loaded, and trained."""
    x, residual = torch.randn(2, 5, 16).unbind()
    block = Block().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(block, (X, RESIDUAL))
        assert same(traced(x, residual), block(x, residual))
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert same(torch.jit.load(file)(x, residual), block(x, residual))
        if grad:
            found = [sum(t.square().sum() for t in module(x, residual)) for module in (traced, block)]
            assert same(*(torch.autograd.grad(loss, list(block.parameters())) for loss in found))


def test_jit_trace_of_normalized_dimensions():
    """Shapes are looked at without torch's warning that they are made constants."""
    module = fusednorm.RMSNorm((4, 4), elementwise_affine=False)
    traced = torch.jit.trace(module, torch.randn(3, 4, 4))
    x = torch.randn(7, 4, 4)
    assert same([traced(x)], [module(x)])


@functions
def test_profilers(name):
    """An operation stands there with its shapes, without a gradient and with one."""
    call(name, clones(FUNCTIONS[name]))
    for with_gradients in (False, True)[: 1 + (name in DIFFERENTIATED)]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            recorded(name) if with_gradients else call(name, clones(FUNCTIONS[name]))
        shapes = [e.input_shapes[0] for e in found.events() if ours([e.name])]
        assert list(next(iter(FUNCTIONS[name].values())).shape) in shapes
    with autograd_profile() as found:
        call(name, clones(FUNCTIONS[name]))
    assert ours(e.key for e in found.key_averages())


def test_flop_counters():
    with FlopCounterMode(display=False) as counter:
        fused_add_rms_norm(X, RESIDUAL, WEIGHT)
        torch.nn.functional.linear(X, X)
    assert counter.get_total_flops() == 2 * 3 * 3 * 16  # the product's alone


def test_selective_checkpointing():
    """A policy may keep the operation's outputs."""
    asked = []

    def policy(ctx, operation, *args, **kwargs):
        asked.append(operation)
        keep = operation is torch.ops.fusednorm.fused_add_rms_norm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [t.clone().requires_grad_() for t in (X, RESIDUAL, WEIGHT)]
    contexts = partial(create_selective_checkpoint_contexts, policy)
    y, total = checkpoint(fused_add_rms_norm, *leaves, use_reentrant=False, context_fn=contexts)
    plain = torch.autograd.grad(sum(t.sum() for t in fused_add_rms_norm(*leaves)), leaves)
    assert same(torch.autograd.grad((y + total).sum(), leaves), plain)
    assert torch.ops.fusednorm.fused_add_rms_norm.default in asked


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_", "fused_add_rms_norm", "fused_add_rms_norm_"])
def test_a_default_device_takes_the_fast_path(name, monkeypatch):
    """torch's own mode for a default device does not listen."""
    with fusednorm.use_backend("cpu"):
        expected = call(name, clones(FUNCTIONS[name]))  # opens the fast path
    monkeypatch.setattr(norms._RMS_NORM, "_called", None)
    with torch.device("cpu"), fusednorm.use_backend("cpu"):
        assert same(call(name, clones(FUNCTIONS[name])), expected)


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
    expected, others = fused_add_rms_norm(X, RESIDUAL, WEIGHT), []

    def other():
        for listener in (Seen, Named):
            with listener():
                entered.wait()
                left.wait()  # inside, while the first thread enters its own
                others.append(same(fused_add_rms_norm(X, RESIDUAL, WEIGHT), expected))
            entered.wait()  # outside, while the first thread is inside
            others.append(same(fused_add_rms_norm(X, RESIDUAL, WEIGHT), expected))
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    for listener in (Seen, Named):
        entered.wait()
        with listener() as mine:
            left.wait()
            entered.wait()
            assert same(fused_add_rms_norm(X, RESIDUAL, WEIGHT), expected)
            left.wait()
        heard = torch.ops.fusednorm.fused_add_rms_norm.default if listener is Seen else fused_add_rms_norm
        assert heard in (mine.operations if listener is Seen else mine.functions)
    thread.join()
    assert others == 4 * [True]


def test_a_profiler_of_all_threads():
    """It hears a thread other than the one that turned it on."""
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as recorded:
        thread = threading.Thread(target=fused_add_rms_norm, args=(X, RESIDUAL, WEIGHT))
        thread.start()
        thread.join()
    assert "fusednorm::fused_add_rms_norm" in [e.key for e in recorded.key_averages()]
