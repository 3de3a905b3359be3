"""fusednorm among torch's own things: compiled, exported, transformed, in modules, and trained."""

import copy

import pytest
import torch
from processes import printed_by
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm import fused_add_rms_norm, fused_add_rms_norm_, rms_norm, rms_norm_
from fusednorm.conformance.cases import BF16, F32, F64, Case, dtype_name, operands

# What torch's own compiler warns of while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def same(a, b):
    assert len(a) == len(b)
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
def test_compiled_by_inductor(dtype):
    """Functions, in place and not, tensors that are given, one of them an input, and gradients: the eager bits."""
    x, residual, weight = operands(Case(rows=6, hidden=77).of(dtype))

    def every(x, residual, weight):
        y, total = fused_add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
        y, total = y.clone(), total.clone()
        fused_add_rms_norm_(y, total, weight)
        out, moved = torch.empty_like(x), x.clone()
        rms_norm(y, weight, out=y)
        fused_add_rms_norm(y, residual, weight, out=out, residual_out=moved)
        return rms_norm_(total, weight), y, out, *fused_add_rms_norm(moved, x, round_norm=True, residual_out=moved)

    assert same(torch.compile(every, fullgraph=True)(x, residual, weight), every(x, residual, weight))
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]

    def trained(x, residual, weight):
        y, total = fused_add_rms_norm(x, residual, weight, round_sum=False)
        return rms_norm(y, weight), fused_add_rms_norm(y, total)[1]

    compiled = torch.compile(trained, fullgraph=True)
    assert same(*(torch.autograd.grad(function(*leaves), leaves, (x, residual)) for function in (trained, compiled)))


def test_compiled_before_any_other_call():
    """What the first call loads must not be traced."""
    code = """
import torch, fusednorm
x = torch.randn(3, 64)
out = torch.empty_like(x)
torch.compile(lambda x, out: fusednorm.rms_norm(x, out=out), backend="eager", fullgraph=True)(x, out)
print(torch.equal(out, fusednorm.rms_norm(x)))
"""
    assert printed_by(code) == "True\n"


@pytest.mark.parametrize("function", [rms_norm, fused_add_rms_norm, fusednorm.gate, fusednorm.silu_and_mul])
def test_a_transform_of_other_operands(function):
    """It is active while a call records gradients, and none of the call's operands is of it."""
    x = torch.randn(3, 8, requires_grad=True)
    one = function(x) if function is rms_norm else function(x, x)
    one, z = one if isinstance(one, torch.Tensor) else one[0], torch.randn(4, 3, 8)

    def added(t):
        found = function(x) if function is rms_norm else function(x, x)
        return t + (found if isinstance(found, torch.Tensor) else found[0])

    assert torch.equal(torch.vmap(added)(z), z + one)
    assert torch.equal(torch.func.grad(lambda t: (added(t) * one.detach()).sum())(z[0]), one)


def test_a_batch_of_weights():
    """Calls one after the other, and their gradients."""
    x, residual, weight = operands(Case(rows=4, hidden=33).of(BF16))
    batch = [torch.stack([t, t.flip(-1), -t]) for t in (x, residual, weight)]
    for function, count in ((rms_norm, 1), (fused_add_rms_norm, 2)):
        given = [batch[0], batch[2]] if count == 1 else batch

        def loss(*operands, function=function, count=count):
            found = function(*operands)
            return sum(t.double().sin().sum() for t in (found,) * (count == 1) or found)

        gradient = torch.func.grad(loss, argnums=tuple(range(len(given))))
        for call in (function, gradient):
            found, wanted = torch.vmap(call)(*given), [call(*one) for one in zip(*given, strict=True)]
            found, wanted = (found, zip(*wanted, strict=True)) if isinstance(found, tuple) else ([found], [wanted])
            assert same(found, list(map(torch.stack, wanted)))


def test_checkpointing_hooks_and_modes(mode):
    x, residual, weight = (t.requires_grad_() for t in operands(Case(rows=4, hidden=100).of(BF16)))

    def gradients(call):
        return torch.autograd.grad(sum(t.float().sum() for t in call(x, residual, weight)), (x, residual, weight))

    plain = gradients(fused_add_rms_norm)
    assert same(plain, gradients(lambda *a: checkpoint(fused_add_rms_norm, *a, use_reentrant=False)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        assert same(plain, gradients(fused_add_rms_norm))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        fused_add_rms_norm(x, residual, weight)
    assert sorted(saved) == [(4,), (4, 100), (100,)]  # rstd, residual_out, the weight
    torch.use_deterministic_algorithms(True)
    try:
        assert same(plain, gradients(fused_add_rms_norm))
    finally:
        torch.use_deterministic_algorithms(False)
    expected = [t.detach() for t in fused_add_rms_norm(x, residual, weight)]
    with torch.inference_mode():
        assert same(fused_add_rms_norm(x, residual, weight), expected)
    with torch.autocast("cpu", dtype=BF16):  # as F.rms_norm's on a CPU: left alone
        assert rms_norm(x.detach().float(), weight.detach()).dtype == F32


@pytest.mark.parametrize("shape", [16, (16,), [4, 4], torch.Size((2, 2, 4))], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=dtype_name)
def test_rms_norm_module_is_torchs(shape, dtype):
    """Arguments, state_dict, repr, and the values: torch's, but for the order of its sums."""
    for arguments in ({}, {"eps": 1e-3}, {"elementwise_affine": False}):
        ours, theirs = (m(shape, **arguments, dtype=dtype) for m in (fusednorm.RMSNorm, torch.nn.RMSNorm))
        assert repr(ours) == repr(theirs)
        if ours.weight is not None:
            theirs.load_state_dict({"weight": torch.rand_like(ours.weight)})
        ours.load_state_dict(theirs.state_dict())
        assert isinstance(copy.deepcopy(ours), torch.nn.RMSNorm)
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        x = torch.rand(3, 5, *size, dtype=dtype) * 1e-3  # so that eps matters
        # 16 squares, a mean, a root, a reciprocal and two products: 40 roundings at the most.
        assert torch.allclose(ours(x), theirs(x), rtol=40 * torch.finfo(dtype).eps, atol=0)
    for affine in (True, False):
        with pytest.raises(ValueError, match="x must end in the dimensions"):
            fusednorm.RMSNorm(shape, elementwise_affine=affine)(torch.ones(3, 7))
    with pytest.raises(ValueError, match="residual must end in the dimensions"):
        fusednorm.AddRMSNorm(shape)(torch.ones(3, *size), torch.ones(3, 7))


def test_add_rms_norm_module():
    for shape in (16, (4, 4)):
        norm = fusednorm.AddRMSNorm(shape, 1e-5, weight_offset=1.0, round_norm=True, round_sum=False)
        assert norm.weight.eq(0).all()
        torch.nn.init.normal_(norm.weight)
        assert repr(norm).endswith("weight_offset=1.0, round_norm=True, round_sum=False)")
        size = (shape,) if isinstance(shape, int) else shape
        x, residual = torch.rand(3, *size).half(), torch.rand(3, *size)
        y, total = norm(x, residual)
        flags = {"weight_offset": 1.0, "round_norm": True}
        flat = [t.view(3, 16) for t in (x, residual)]
        expected = fused_add_rms_norm(*flat, norm.weight.view(-1), 1e-5, round_sum=False, **flags)
        assert same([t.view(3, 16) for t in (y, total)], expected)
        y, total = norm(x)
        assert total is x
        assert same([y.view(3, 16)], [rms_norm(flat[0], norm.weight.view(-1), 1e-5, **flags)])


class Decoder(torch.nn.Module):
    """Two layers of attention-free decoder: embedding, mixing over the past, an MLP, norms between."""

    def __init__(self, hidden=32, vocabulary=17, layers=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, hidden)
        self.norms = torch.nn.ModuleList(fusednorm.AddRMSNorm(hidden, 1e-6) for _ in range(2 * layers))
        self.mixes = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.mlps = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(hidden, 2 * hidden), torch.nn.SiLU(), torch.nn.Linear(2 * hidden, hidden)
            )
            for _ in range(layers)
        )
        self.last = fusednorm.AddRMSNorm(hidden, 1e-6)

    def forward(self, tokens):
        x, residual = self.embedding(tokens), None
        past = torch.arange(1, tokens.shape[-1] + 1).view(-1, 1)
        for first, second, mix, mlp in zip(self.norms[::2], self.norms[1::2], self.mixes, self.mlps, strict=True):
            x, residual = first(x, residual)
            x, residual = second(mix(x).cumsum(-2) / past, residual)
            x = mlp(x)
        return self.last(x, residual)[0] @ self.embedding.weight.T


def losses(compiled, threads, steps=200):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        model, tokens = Decoder(), torch.randint(17, (8, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if compiled:
            for norm in (*model.norms, model.last):
                norm.compile(fullgraph=True)
        history = []
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history
    finally:
        torch.set_num_threads(before)


def test_training_repeats_bit_for_bit():
    """A small decoder, trained twice: on one thread and on two, with the norms eager and compiled."""
    for threads in (1, 2):
        first = losses(False, threads)
        assert first[-1] < first[0]
        assert losses(False, threads) == first
        assert losses(True, threads) == first


def test_a_decoder_layer_compiles_in_one_graph():
    model, tokens = Decoder(), torch.randint(17, (2, 8))
    explained = torch._dynamo.explain(model)(tokens)
    assert explained.graph_break_count == 0
    assert torch.compile(model, fullgraph=True)(tokens).shape == (2, 8, 17)
