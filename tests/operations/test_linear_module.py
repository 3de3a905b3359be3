"""``fusednorm.Linear``: torch.nn.Linear's arguments and state_dict, the bits of fusednorm.linear."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import fusednorm
from fusednorm import Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_torchs_module_with_fusednorms_bits(bias, dtype):
    torch.manual_seed(0)
    module = Linear(20, 6, bias, dtype=dtype)
    torch.manual_seed(0)
    like = torch.nn.Linear(20, 6, bias, dtype=dtype)
    assert repr(module) == repr(like)
    assert all(one.equal(other) for one, other in zip(module.parameters(), like.parameters(), strict=True))
    assert list(module.state_dict()) == list(like.state_dict())
    assert list(inspect.signature(Linear).parameters) == list(inspect.signature(torch.nn.Linear).parameters)
    for shape in ((20,), (3, 20), (2, 0, 20), (2, 3, 20)):
        x = torch.randn(shape).to(dtype)
        y = module(x)
        assert (y.shape, y.dtype) == (like(x).shape, dtype)
        assert y.equal(fusednorm.linear(x, module.weight, module.bias))
    module(torch.randn(3, 20).to(dtype)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_from_linear_shares():
    for bias in (True, False):
        like = torch.nn.Linear(5, 3, bias, dtype=torch.float64).eval()
        like.register_forward_hook(lambda *arguments: pytest.fail("a hook of the other module"))
        like.weight.requires_grad_(False)
        module = Linear.from_linear(like)
        assert type(module) is Linear
        assert module.weight is like.weight
        assert module.bias is like.bias
        assert (module.in_features, module.out_features, module.training) == (5, 3, False)
        x = torch.randn(2, 5, dtype=torch.float64)
        assert module(x).equal(fusednorm.linear(x, like.weight, like.bias))
    assert Linear.from_linear(module).weight is module.weight

    class Other(Linear):
        pass

    assert type(Other.from_linear(like)) is Other


class Scaled(torch.nn.Linear):
    """It computes more than a product."""

    def forward(self, x):
        return super().forward(x) * 2


def test_from_linear_refuses_what_is_more_than_a_product():
    for module in (Scaled(2, 2), torch.nn.Bilinear(2, 2, 2), torch.ones(2, 2), None):
        with pytest.raises(TypeError, match=f"must be a torch.nn.Linear .* got {type(module).__name__}$"):
            Linear.from_linear(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a LazyLinear is new
        lazy = torch.nn.LazyLinear(3)
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    for module in (lazy, normed):
        with pytest.raises(ValueError, match="run a LazyLinear once, and remove parametrizations"):
            Linear.from_linear(module)


def test_autocast_converts_operands_as_torch_does():
    module, double = Linear(7, 4), Linear(7, 4).double()
    x = torch.randn(3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        assert double(x.double()).dtype == torch.float64
        assert module(x.double()).equal(fusednorm.linear(x.double(), module.weight, module.bias))
        with torch.autocast("cpu", enabled=False):
            assert module(x).equal(fusednorm.linear(x, module.weight, module.bias))
        y.float().sum().backward()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert compiled(x).equal(y)
    assert y.equal(fusednorm.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16()))
    assert module.weight.grad.dtype == torch.float32


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        Linear(2, 2)(None)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        Linear(2, 2)([1.0, 2.0])


def test_traces_copies_and_pickles():
    module = torch.nn.Sequential(Linear(6, 6), torch.nn.ReLU())
    x = torch.randn(2, 6)
    graph = torch.fx.symbolic_trace(module)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    for one in (
        graph,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.export.export(module, (x,)).module(),
    ):
        assert one(x).equal(module(x))
    assert b"fusednorm\nLinear" in pickle.dumps(module, 0)
    other = torch.nn.Sequential(torch.nn.Linear(6, 6))
    other.load_state_dict(module.state_dict())
    assert other[0].weight.equal(module[0].weight)


def test_the_contract_lists_it():
    contract = fusednorm.contract(torch.nn.Sequential(Linear(6, 6, dtype=torch.bfloat16), torch.nn.Linear(6, 6)))
    assert [str(step) for step in contract.steps] == ["0: linear(), bfloat16"]
