"""An operator runs past torch's dispatcher where nobody else must see the call, and nowhere else."""

import pytest
import torch
from every_operation import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm.calls import fast_path
from fusednorm.torch_ops.registered import ARGUMENTS

pytestmark = pytest.mark.skipif(not fast_path.OPEN, reason="without the fast path each operator goes to the dispatcher")


class Seen(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        return function(*arguments, **(named or {}))


class Subclass(torch.Tensor):
    """A tensor that may override anything."""


@pytest.fixture
def norm(monkeypatch):
    """The operator of ``rms_norm``, and how often it ran directly."""
    operator, ran = torch.ops.fusednorm.rms_norm.default, []
    direct = operator.direct
    monkeypatch.setattr(operator, "direct", lambda *a, **named: ran.append(named) or direct(*a, **named))
    return operator, ran


X, WEIGHT = torch.randn(2, 16), torch.randn(16)
FLAGS = (1e-6, 0.0, True, False)
NAMES = ("eps", "weight_offset", "round_sum", "round_norm")


def test_every_operator_is_one():
    """So that a graph may call any of them directly."""
    for name in ARGUMENTS:
        assert callable(getattr(torch.ops.fusednorm, name).default.direct)


def test_plain_tensors_run_directly(norm):
    """By position and by name, with the bits of the public function; beside a gradient that nobody records too."""
    operator, ran = norm
    expected = fusednorm.rms_norm(X, WEIGHT)
    assert torch.equal(operator(X, WEIGHT, *FLAGS)[0], expected)
    assert torch.equal(operator(X, weight=WEIGHT, **dict(zip(NAMES, FLAGS, strict=True)))[0], expected)
    with torch.no_grad():
        operator(X.clone().requires_grad_(), WEIGHT, *FLAGS)
    assert len(ran) == 3


@pytest.mark.parametrize("x", [X.clone().requires_grad_(), X.as_subclass(Subclass), X.to("meta"), X[:0]])
def test_other_tensors_go_to_the_dispatcher(norm, x):
    """Those with a gradient, of another type, without memory, and without elements."""
    operator, ran = norm
    operator(x, WEIGHT.to(x.device), *FLAGS)
    assert ran == []


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_of_torch_fx_is_traced(name):
    """With variables in place of tensors, which have torch call functions of their own."""
    operator, operands = getattr(torch.ops.fusednorm, name).default, OPERATORS[name]
    arguments = [operands.get(argument.name, argument.default_value) for argument in operator._schema.arguments]
    for place in [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]:
        graph = torch.fx.Graph()
        given = [*arguments]
        given[place] = torch.fx.Proxy(graph.placeholder("t"))
        operator(*given)
        assert operator in [node.target for node in graph.nodes]


def test_a_listener_sees_the_operator(norm):
    """A profiler, forward-mode differentiation, and a dispatch mode, below which it runs directly."""
    operator, ran = norm
    with torch.profiler.profile():
        operator(X, WEIGHT, *FLAGS)
    with torch.autograd.forward_ad.dual_level():
        operator(X, WEIGHT, *FLAGS)
    assert ran == []
    with Seen() as seen:
        operator(X, WEIGHT, *FLAGS)
    assert seen.count == 1


def test_new_outputs_lie_as_torch_would_lay_them():
    """The fast path makes outputs past torch's dispatcher, with the strides and of the kind of ``torch.empty_like``."""
    whole = torch.randn(4, 3, 16)
    rows = [whole, whole[:1], whole[:, :1].transpose(0, 1)[0], whole[:0], whole.bfloat16()]
    for inference in (False, True):
        with torch.inference_mode(inference):
            for x in rows:
                y, like = fusednorm.rms_norm(x), torch.empty_like(x)
                assert (y.stride(), y.dtype, y.is_inference()) == (like.stride(), like.dtype, like.is_inference())
                assert fusednorm.rms_norm(x, out_dtype=torch.float16).stride() == like.stride()
