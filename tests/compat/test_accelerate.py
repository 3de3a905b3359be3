"""fusednorm.accelerate_torch: the calls of torch's norms that it takes, those that torch keeps, and its end."""

import copy
import functools
import inspect
import pickle
import platform
import re
import threading
import warnings
from types import FunctionType

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.functional import rms_norm as imported_before
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import accelerate
from fusednorm.compat import functional as compat
from fusednorm.reference import norm as reference

from compat_bounds import torchs_tests
from fast_calls import close_fast_path

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TORCHS = functional.rms_norm.__code__
LAYER_NORMS = functional.layer_norm.__code__
EPSILON = {dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).eps for dtype in DTYPES}


@pytest.fixture
def calls(monkeypatch):
    """Lets each call of torch's own code be counted."""
    found = []

    def counted(own):
        def count(*arguments):
            found.append(arguments)
            return own(*arguments)

        return count

    with fusednorm.accelerate_torch():
        for norm in accelerate._NORMS:
            monkeypatch.setattr(norm, "_by_torch", counted(norm._by_torch))
        yield found
        monkeypatch.undo()
    assert functional.rms_norm.__code__ is TORCHS
    assert functional.layer_norm.__code__ is LAYER_NORMS


def torchs(*arguments, **named):
    """The norm by torch's own code."""
    return FunctionType(TORCHS, vars(functional), "rms_norm", (None, None))(*arguments, **named)


def torchs_layer_norm(*arguments, **named):
    """The LayerNorm by torch's own code."""
    return FunctionType(LAYER_NORMS, vars(functional), "layer_norm", (None, None, 1e-5))(*arguments, **named)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.stride() == b.stride()
    assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_samples(dtype, calls):
    """Operands, results and gradients of torch's own tests: the bits of fusednorm, close to torch's.

    Both norms round to the dtype once, and to the accumulator type some ten times for such short rows: the difference
    is one step of the dtype, or, of the accumulator type, 20 units. Gradients add no more than the values of one row of
    at most 12 elements (those up to 1000 cancel: the bound is relative to the greatest).
    """
    for sample in torchs_tests("rms_norm").sample_inputs("cpu", dtype, requires_grad=True):
        del calls[:]
        x, (shape, *weight) = sample.input, sample.args
        y = functional.rms_norm(x, shape, *weight, **sample.kwargs)
        assert not calls
        eps = sample.kwargs.get("eps", EPSILON[dtype])
        rows, row = x.flatten(-len(shape)), weight[0].reshape(-1) if weight else None
        with fusednorm.use_backend("cpu"):
            same(y, fusednorm.rms_norm(rows, row, eps).view(x.shape))
        expected = torchs(x, shape, *weight, **sample.kwargs)
        step = torch.finfo(dtype).eps + 20 * EPSILON[dtype]
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=step, atol=0, equal_nan=True)
        if not x.numel():
            continue
        for mine, its in zip(
            torch.autograd.grad(y.sum(), (x, *weight)), torch.autograd.grad(expected.sum(), (x, *weight)), strict=True
        ):
            greatest = 1.0 if mine is None else its.abs().nan_to_num().max().item()
            torch.testing.assert_close(mine, its, rtol=0, atol=step * max(greatest, 1.0), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_samples_of_layer_norm(dtype, calls):
    """The bits of fusednorm; ``test_compat.py`` says how far from torch's."""
    for sample in torchs_tests("layer_norm").sample_inputs("cpu", dtype, requires_grad=False):
        x, (shape, *affine) = sample.input, sample.args
        y = functional.layer_norm(x, shape, *affine, **sample.kwargs)
        if x.numel():
            assert not calls
            with fusednorm.use_backend("cpu"):
                same(y, compat.layer_norm(x, shape, *affine, **sample.kwargs))
    with torch.no_grad():
        functional.layer_norm(x.requires_grad_(), shape)
    assert len(calls) == 0
    expected = torchs_layer_norm(x, shape)
    same(functional.layer_norm(x, shape), expected)  # whose gradient is recorded
    assert len(calls) == 1


def test_torchs_errors(calls):
    errors = list(torchs_tests("rms_norm").error_inputs("cpu"))
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex) as found:
            functional.rms_norm(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises(error.error_type) as expected:
            torchs(sample.input, *sample.args, **sample.kwargs)
        assert str(found.value) == str(expected.value)
    assert len(calls) == len(errors)


X, W = numbers(3, 8), numbers(8, seed=1)


def channels_last():
    return numbers(2, 3, 4, 8).to(memory_format=torch.channels_last)


def without_warnings(make):
    @functools.wraps(make)
    def made(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its tensors
            return make(*arguments)

    return made


@without_warnings
def nested(*shape):
    """A nested tensor that is no subclass."""
    return torch.nested.nested_tensor([numbers(2, *shape, 8), numbers(3, *shape, 8)], layout=torch.strided)


@without_warnings
def quantized():
    return torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1.0], (8,)),
        (X, 8),
        (X, (8.0,), W),
        (X, [True], None),
        (X, (9,), W),
        (X, (), W),
        (X, (8,), 1.0),
        (X, (8,), W, "small"),
        (X, (8,), W[:4]),
        (X, (8,), W.expand(3, 8)),
        (X, torch.tensor([8]), W),
        (X.to_sparse(), (8,), W),
        (X.to_sparse(), (8,)),
        (channels_last().to_sparse(), (8,), W),
        (nested(), (8,)),
        (nested(), (8,), W),
        (nested(4, 5), (8,)),
        (quantized(), (8,)),
        (X.int(), (8,), W),
        (X, (8,), W.to("meta")),
        (torch.tensor(1.0), (), None),
        (X, None),
    ],
)
def test_other_errors(arguments, calls):
    """Where torch raises, its error; where it does not, its result."""
    results = []
    for norm in (torchs, functional.rms_norm):
        try:
            results.append(type(norm(*arguments)))
        except (TypeError, RuntimeError) as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*[Mm]ixed dtype")
@pytest.mark.parametrize("x", DTYPES, ids=str)
@pytest.mark.parametrize("w", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("b", [None, *DTYPES], ids=str)
def test_layer_norms_dtypes(x, w, b, calls):
    """torch takes few mixtures, and raises for the others; with its errors here too."""
    row, weight, bias = X.to(x), None if w is None else W.to(w), None if b is None else W.to(b)
    try:
        expected = torchs_layer_norm(row, (8,), weight, bias)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            functional.layer_norm(row, (8,), weight, bias)
        assert calls
        return
    y = functional.layer_norm(row, (8,), weight, bias)
    assert (y.dtype, y.shape, calls) == (expected.dtype, expected.shape, [])
    with fusednorm.use_backend("cpu"):
        same(y, fusednorm.layer_norm(row, weight, bias))


@pytest.mark.parametrize(
    "arguments",
    [
        (X, 8),
        (X, (8,), W, W[:4]),
        (X, (8,), W, numbers(3, 8)),
        (X, (8,), W, 1.0),
        (X, (8,), None, None, None),
        (X, (8,), None, None, 1),
        (channels_last(), (8,)),
        (X.to(torch.complex64), (8,)),
        (X.to("meta"), (8,)),
    ],
)
def test_layer_norms_left_to_torch(arguments, calls):
    results = []
    for norm in (torchs_layer_norm, functional.layer_norm):
        try:
            results.append(norm(*arguments))
        except (TypeError, RuntimeError) as error:
            results.append(error)
    assert type(results[0]) is type(results[1])
    assert calls
    if not isinstance(results[0], Exception):
        assert (results[0].dtype, results[0].stride()) == (results[1].dtype, results[1].stride())
    else:
        assert str(results[0]) == str(results[1])


@pytest.mark.parametrize("x", [X, numbers(8, 3).t(), numbers(2, 3, 8).permute(1, 0, 2), numbers(0, 8), numbers(8)])
def test_layer_norms_taken_over(x, calls):
    """In memory as torch lays it out; and by torch's module."""
    module = torch.nn.LayerNorm(8)
    with torch.no_grad():
        y = module(x)
    with fusednorm.use_backend("cpu"), torch.no_grad():
        assert torch.equal(y, fusednorm.layer_norm(x, module.weight, module.bias))
    assert y.stride() == torchs_layer_norm(x, (8,)).stride()
    assert torch.equal(y, functional.layer_norm(x, [8]))
    assert not calls


class Wrapper(torch.Tensor):
    """A subclass with the memory of a plain tensor."""


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Mismatch dtype", "ignore:Sparse", "ignore:ComplexHalf"
)
@pytest.mark.parametrize(
    "arguments",
    [
        (X.to("meta"), (8,), W.to("meta")),
        (X.to(torch.complex64), (8,)),
        (X, (8,), W.double()),
        (X, (8,), W.int()),
        (X, (8,), W, 1),
        (numbers(3, 0), (0,)),
        (channels_last(), (8,)),
        (channels_last(), (4, 8)),
        (numbers(2, 1, 4, 16).to(memory_format=torch.channels_last)[..., :8], (8,)),
        (X.as_subclass(Wrapper), (8,), W),
        (X, (8,), W.as_subclass(Wrapper)),
        (X, torch.Size([8]), W.as_subclass(Wrapper)),
        (torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged), (8,), W),
    ],
    ids=lambda arguments: f"{type(arguments[0]).__name__}-{arguments[1:]!r:.60}",
)
def test_left_to_torch(arguments, calls):
    y, expected = functional.rms_norm(*arguments), torchs(*arguments)
    assert calls
    assert type(y) is type(expected)
    if y.is_nested:
        y, expected = y.values(), expected.values()
    if y.is_complex():
        y, expected = torch.view_as_real(y), torch.view_as_real(expected)
    if y.is_meta:
        assert (y.shape, y.dtype, y.stride()) == (expected.shape, expected.dtype, expected.stride())
    else:
        same(y, expected)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    "x",
    [
        X,
        numbers(5, 1, 3, 8)[:, 0],
        numbers(8, 3).t(),
        numbers(3, 16)[:, ::2],
        numbers(2, 3, 4, 8),
        numbers(2, 3, 8).permute(1, 0, 2),
        numbers(8)[None].expand(4, 8),
        numbers(0, 8),
        numbers(8),
        numbers(1, 3, 8)._neg_view(),
        torch.nn.Parameter(numbers(3, 8)),
    ],
    ids=lambda x: f"{tuple(x.shape)}, {x.stride()}",
)
@pytest.mark.parametrize("weight", [None, W, torch.nn.Parameter(W), W.bfloat16(), numbers(16)[::2]], ids=str)
def test_taken_over(x, weight, calls):
    """The bits of fusednorm in memory as torch lays it out; a list, a tuple and a size say the shape."""
    y = functional.rms_norm(x, (8,), weight, 1e-5)
    assert not calls
    with fusednorm.use_backend("cpu"):
        assert torch.equal(y, fusednorm.rms_norm(x, weight, 1e-5))
    assert y.stride() == torchs(x, (8,), weight, 1e-5).stride()
    assert y.requires_grad == (x.requires_grad or getattr(weight, "requires_grad", False))
    for shape in ([8], torch.Size([8])):
        assert torch.equal(functional.rms_norm(x, shape, weight=weight, eps=1e-5), y)


def test_several_dimensions(calls):
    """As rows of all of them, in one row's order; their gradients too."""
    x, w = numbers(3, 5, 4, 6).requires_grad_(), numbers(4, 6, seed=1).requires_grad_()
    y = functional.rms_norm(x, (4, 6), w)
    expected = fusednorm.rms_norm(x.flatten(-2), w.flatten(), 2.0**-23).view(x.shape)
    same(y, expected)
    dy = numbers(3, 5, 4, 6, seed=2)
    for mine, its in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True):
        same(mine, its)
    crossed = numbers(4, 6, 3).permute(2, 0, 1)
    same(functional.rms_norm(crossed, (4, 6)), fusednorm.rms_norm(crossed.flatten(-2), eps=2.0**-23).view(3, 4, 6))
    assert not calls


@pytest.mark.parametrize("eps", [None, 0.0, -1.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps(dtype, eps, calls):
    x = numbers(2, 8, dtype=dtype)
    expected = torchs(x, (8,), None, eps)
    # Both round to the dtype once: the difference is a step, of bfloat16 at most 2^-7 of the number.
    torch.testing.assert_close(functional.rms_norm(x, (8,), None, eps), expected, rtol=2.0**-7, atol=0, equal_nan=True)
    same(functional.rms_norm(x, (8,), None, eps), fusednorm.rms_norm(x, eps=EPSILON[dtype] if eps is None else eps))
    assert not calls


def formula(x, weight, eps):
    """torch's formula, with the order of the sum alone changed to fusednorm's."""
    wide = x.float()
    mean = (reference.treesum(wide.pow(2)) / x.shape[-1]).unsqueeze(-1)
    return wide.mul(torch.rsqrt(mean.add(eps))).mul(weight).type_as(x)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch's root was read for x86-64 alone")
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_only_the_order_of_the_sum_differs(dtype, calls):
    """On x86-64, where torch's ``rsqrt`` is one over the root."""
    x, w = numbers(64, 4096, dtype=dtype), numbers(4096, dtype=dtype, seed=1)
    y = functional.rms_norm(x, (4096,), w, 1e-6)
    assert torch.equal(y, formula(x, w, 1e-6))
    differ = (y != torchs(x, (4096,), w, 1e-6)).double().mean().item()
    assert differ < (1.0 if dtype == torch.float32 else 0.01)
    assert not calls


def test_modules(calls):
    """torch's module, in bfloat16 with gradients: the gradients of fusednorm's."""
    ours, theirs = fusednorm.RMSNorm(64, 1e-5), torch.nn.RMSNorm(64, 1e-5)
    for norm in (ours, theirs):
        norm.bfloat16().load_state_dict({"weight": numbers(64, dtype=torch.bfloat16)})
        x = numbers(7, 64, dtype=torch.bfloat16, seed=1).requires_grad_()
        y = norm(x)
        y.backward(numbers(7, 64, dtype=torch.bfloat16, seed=2))
        norm.found = y, x.grad, norm.weight.grad
    for mine, its in zip(ours.found, theirs.found, strict=True):
        same(mine, its)
    del theirs.found
    again = pickle.loads(pickle.dumps(copy.deepcopy(theirs)))
    same(again(x), theirs(x))
    assert not calls


def test_gradients_of_gradients(calls):
    x, w = numbers(2, 8).double().requires_grad_(), W.double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, w: functional.rms_norm(x, (8,), w, 1e-3), (x, w))
    recomputed = checkpoint(functional.rms_norm, x, (8,), w, 1e-3, use_reentrant=False)
    same(
        torch.autograd.grad(recomputed.sum(), w)[0],
        torch.autograd.grad(functional.rms_norm(x, (8,), w, 1e-3).sum(), w)[0],
    )
    assert not calls


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch says it once
def test_autocast_inference_and_writes(calls):
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.rms_norm(X, (8,), W).dtype == torchs(X, (8,), W).dtype == torch.float32
        assert functional.rms_norm(X.bfloat16(), (8,), W).dtype == torchs(X.bfloat16(), (8,), W).dtype == torch.bfloat16
    with torch.inference_mode():
        assert functional.rms_norm(X, (8,), W).is_inference()
    x = X.clone().requires_grad_() * 1
    y = functional.rms_norm(x, (8,))
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert not calls


def test_profiler_and_default_device(calls):
    """Both must see a call, and change no bits."""
    with torch.profiler.profile() as profile:
        y = functional.rms_norm(X, (8,), W)
    assert "fusednorm::rms_norm" in {event.key for event in profile.key_averages()}
    same(y, functional.rms_norm(X, (8,), W))
    with torch.device("cpu"):
        same(y, functional.rms_norm(X, (8,), W))
    assert {id(arguments[0]) for arguments in calls} <= {id(X)}  # torch's code calls the function again, below the mode
    same(y, functional.rms_norm(X, (8,), W))


class Seen(torch.overrides.TorchFunctionMode):
    """Keeps the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, arguments=(), named=None):
        self.seen.append(function)
        return function(*arguments, **named or {})


def test_modes(calls):
    """A function mode sees the function that it knows; a dispatch mode torch's operators."""
    with Seen() as mode:
        y = functional.rms_norm(X, (8,), W)
    assert mode.seen[0] is imported_before
    same(y, functional.rms_norm(X, (8,), W))
    del calls[:]
    with FlopCounterMode(display=False):
        same(functional.rms_norm(X, (8,), W), torchs(X, (8,), W))
    assert calls


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:torch.jit", "ignore::DeprecationWarning")
def test_transforms_and_graphs():
    """torch's own operators, with torch's bits: under torch.func, with tangents, and in every kind of graph."""
    with fusednorm.accelerate_torch():
        transforms_and_graphs()
        graphs = []
        norm = torch.compile(torch.nn.LayerNorm(8), backend=lambda graph, _: graphs.append(graph) or graph.forward)
        same(norm(X), torchs_layer_norm(X, (8,), torch.ones(8), torch.zeros(8)))
        assert "layer_norm" in str(graphs[0].graph)
        same(torch.vmap(lambda x: functional.layer_norm(x, (8,)))(X), torchs_layer_norm(X, (8,)))


def transforms_and_graphs():
    def norm(x, w=W):
        return functional.rms_norm(x, (8,), w, 1e-5)

    expected = torchs(X, (8,), W, 1e-5)
    same(torch.vmap(norm)(X, W.expand(3, 8)), expected)
    tangent = torch.func.jvp(norm, (X,), (X,))
    same(tangent[0], expected)
    same(torch.func.grad(lambda x: norm(x).sum())(X), torch.func.grad(lambda x: torchs(x, (8,), W, 1e-5).sum())(X))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(norm(forward_ad.make_dual(X, X)))
    same(dual.primal, expected)
    same(dual.tangent, tangent[1])
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    same(torch.compile(norm, backend=keep, fullgraph=True)(X), expected)
    module = torch.nn.RMSNorm(8, 1e-5)
    same(torch.compile(module, backend=keep, fullgraph=True)(X), torchs(X, (8,), module.weight, 1e-5))
    exported = [torch.export.export(module, (X,), strict=strict).graph for strict in (False, True)]
    for graph in (*(graph.graph for graph in graphs), *exported):
        [target] = {node.target for node in graph.nodes if node.op == "call_function"}
        assert target in (torch.rms_norm, torch.ops.aten.rms_norm.default)
    assert len(graphs) == 2
    assert "aten::rms_norm" in str(torch.jit.script(module).inlined_graph)
    traced = torch.jit.trace(module, X)
    same(traced(X), torchs(X, (8,), module.weight, 1e-5))
    assert "rms_norm" in str(traced.inlined_graph)
    traced = torch.fx.symbolic_trace(lambda x: functional.rms_norm(x, (8,)))
    [node] = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert node.target is imported_before


def test_nested_and_repeated():
    """The last one that is closed undoes it, in any order; and errors leave the block as its end does."""
    assert functional.rms_norm.__code__ is TORCHS
    before = dict(vars(functional))
    signature = inspect.signature(functional.rms_norm)
    first = fusednorm.accelerate_torch()
    try:
        with fusednorm.accelerate_torch() as second:
            assert "in effect" in repr(second)
            first.close()
            first.close()
            assert "closed" in repr(first)
            assert functional.rms_norm.__code__ is not TORCHS
            assert functional.rms_norm is imported_before
            assert pickle.loads(pickle.dumps(imported_before)) is imported_before
            assert inspect.signature(functional.rms_norm) == signature
            assert functional.rms_norm.__wrapped__.__code__ is TORCHS
            raise KeyError
    except KeyError:
        pass
    assert functional.rms_norm.__code__ is TORCHS
    assert vars(functional) == before
    assert not hasattr(functional.rms_norm, "__wrapped__")
    with first:  # a closed one does nothing
        assert functional.rms_norm.__code__ is TORCHS


def test_other_threads(calls):
    """It holds for the whole process, whatever backend is requested."""
    found = []
    with fusednorm.use_backend("reference"):
        thread = threading.Thread(target=lambda: found.append(functional.rms_norm(X, (8,), W)))
        thread.start()
        thread.join()
        same(found[0], functional.rms_norm(X, (8,), W))
        backend, _ = functional.rms_norm(X, (8,), torch.nn.Parameter(W)).grad_fn.backend
    assert backend is fusednorm.engine.choose.load("cpu")
    assert not calls


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_another_library_was_first(name, monkeypatch):
    monkeypatch.setattr(functional, name, lambda input, normalized_shape, weight=None, eps=None: input)
    with pytest.raises(RuntimeError, match=name + r" must be torch's own, got <function .*undo the change"):
        fusednorm.accelerate_torch()
    monkeypatch.undo()
    assert functional.rms_norm.__code__ is TORCHS
    assert functional.layer_norm.__code__ is LAYER_NORMS
    assert not accelerate._open


def test_without_the_cpu_backend(monkeypatch):
    monkeypatch.setattr(fusednorm.engine.choose, "_selected", {})
    close_fast_path(monkeypatch)
    monkeypatch.setattr("fusednorm.backends.cpu.unavailable", lambda: ["no library was built"])
    with pytest.raises(fusednorm.BackendError, match="no library was built"):
        fusednorm.accelerate_torch()
    assert functional.rms_norm.__code__ is TORCHS
