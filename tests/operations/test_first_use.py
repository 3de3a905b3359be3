"""An import makes names, schemas and kernels of operators; their first use, from any side, finds all else."""

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

HERE = Path(__file__).parents[1]
#: The functions that take long, and what each was called for.
COSTLY = {"torch._library.autograd.make_autograd_impl": [], "torch.library.register_fake": []}
WAYS = {}


def way(function):
    """Adds the first use of operators in a process of its own."""
    WAYS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def found():
    """What was wrong with each way; nothing is empty."""
    from processes import python  # here: the program, which this file is too, has no such module

    done = python(__file__)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def called(function, operands):
    """What an operator returns, and the operands, which it may write."""
    results = function(**operands)
    return [*(results if isinstance(results, tuple) else (results,)), *operands.values()]


def first_calls(convert=torch.clone):
    """Calls of each operator that C++ makes, by name, and of torch.ops: both with operands that are converted."""
    for name, operands in OPERATORS.items():
        in_cpp, _ = torch._C._jit_get_operation(f"fusednorm::{name}")
        first = called(in_cpp, clones(operands, convert))
        again = called(getattr(torch.ops.fusednorm, name).default, clones(operands, convert))
        real = called(getattr(torch.ops.fusednorm, name).default, clones(operands))
        yield name, [[t for t in results if isinstance(t, torch.Tensor)] for results in (first, again, real)]


@way
def an_import_and_plain_calls():
    """They register nothing that takes long, and no operator."""
    fusednorm.rms_norm(X, WEIGHT)
    fusednorm.rms_norm(X.clone().requires_grad_(), WEIGHT).sum().backward()
    assert not any(COSTLY.values())
    assert not set(ARGUMENTS) & set(vars(torch.ops.fusednorm))


@way
def names():
    """C++ finds each operator, and Python lists it."""
    assert len(ARGUMENTS) > 40
    assert set(ARGUMENTS) <= set(dir(torch.ops.fusednorm))
    for name in ARGUMENTS:
        torch._C._dispatch_find_schema_or_throw(f"fusednorm::{name}", "")
        names = [argument.name for argument in torch._C._get_schema(f"fusednorm::{name}", "").arguments]
        assert ARGUMENTS[name].split() == names
    for name in ARGUMENTS:
        operator = getattr(torch.ops.fusednorm, name).default
        assert isinstance(operator, DirectOperator)
        assert operator is getattr(torch.ops.fusednorm, name).default
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusednorm::{name}", "Meta")
    assert len(COSTLY["torch.library.register_fake"]) == len(ARGUMENTS)
    assert not hasattr(torch.ops.fusednorm, "no_operator")


@way
def calls_of_cpp():
    """And the same in inference mode, in which nothing goes through autograd."""
    for name, (first, again, _) in first_calls():
        assert all(map(torch.equal, first, again)), name


@way
def inference_mode():
    with torch.inference_mode():
        calls_of_cpp()


@way
def meta_tensors():
    """For which torch has other kernels, in inference mode, where the operator's own is the first that is called."""
    with torch.inference_mode():
        for name, (first, _, real) in first_calls(lambda t: t.to("meta")):
            assert all(t.is_meta for t in first), name
            assert [(t.shape, t.dtype) for t in first] == [(t.shape, t.dtype) for t in real], name


@way
def fake_tensors():
    """C++ asks Python for the operator then."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, (first, _, real) in first_calls(mode.from_tensor):
            assert all(isinstance(t, FakeTensor) for t in first), name
            assert [(t.shape, t.dtype) for t in first] == [(t.shape, t.dtype) for t in real], name


@way
def gradients():
    """Those of the operators that have some are the same at first and later."""

    def backward(operator, name):
        operands = clones(OPERATORS[name])
        leaves = [operands[key].requires_grad_() for key in have_gradients(operands)]
        results = [t for t in called(operator, operands)[: -len(operands)] if t.requires_grad]
        found = torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)
        return [t for t in found if t is not None]

    names = [name for name in OPERATORS if not name.endswith(("_", "backward")) and name not in WITHOUT_GRADIENT]
    for name in names:
        first = backward(torch._C._jit_get_operation(f"fusednorm::{name}")[0], name)
        again = backward(getattr(torch.ops.fusednorm, name).default, name)
        assert first
        assert all(map(torch.equal, first, again)), name


@way
def tangents():
    """Are refused."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X.clone(), Z)
        with pytest.raises(NotImplementedError, match="tangent"):
            torch.ops.fusednorm.scale(dual, 2.0)


@way
def batches():
    found = torch.vmap(lambda x: torch.ops.fusednorm.scale(x, 2.0))(X)
    assert torch.equal(found, fusednorm.torch_ops.steps.SCALE.run({"x": X}, {"factor": 2.0})[0])
    found = torch.vmap(lambda x: fusednorm.rms_norm(x, WEIGHT))(X)
    assert torch.equal(found, fusednorm.rms_norm(X, WEIGHT))


@way
def graphs():
    """Traced, exported and compiled ones."""
    from torch.fx.experimental.proxy_tensor import make_fx

    function = lambda x: torch.ops.fusednorm.scale(x, 2.0)  # noqa: E731
    assert "fusednorm.scale" in make_fx(function, tracing_mode="symbolic")(X).code
    leaf = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: fusednorm.l2_norm(fusednorm.gelu(x)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(leaf), fusednorm.l2_norm(fusednorm.gelu(leaf)))
    module = torch.nn.Module()
    module.forward = lambda x: fusednorm.softcap(x, 2.0)
    assert torch.equal(torch.export.export(module, (X,)).module()(X), fusednorm.softcap(X, 2.0))


@way
def saved_graphs():
    """An exported program, a graph of torch.fx and a program of TorchScript that other processes saved."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{name}" for name in ("graph", "script")]
        if not os.fork():
            graph = torch.fx.Graph()
            graph.output(graph.call_function(torch.ops.fusednorm.scale.default, (graph.placeholder("x"), 2.0)))
            Path(files[0]).write_bytes(pickle.dumps(torch.fx.GraphModule({}, graph)))
            traced = torch.jit.trace(lambda x: torch.ops.fusednorm.add(x, x, torch.float32), X)
            torch.jit.save(traced, files[1])
            os._exit(0)
        os.wait()
        script = torch.jit.load(files[1])
        assert torch.equal(script(X), X + X)
        assert torch.equal(pickle.loads(Path(files[0]).read_bytes())(X), X + X)
    bits = torch.load(HERE / "saved" / "bits.pt", weights_only=False)
    program = torch.export.load(HERE / "saved" / "program.pt2").module()
    assert all(map(torch.equal, program(*bits["given"]), bits["wanted"]))


@way
def threads():
    """Several that ask for all operators at once find the same ones, and each is registered once."""
    sys.setswitchinterval(1e-6)
    together, asked = threading.Barrier(4), []

    def ask():
        together.wait()
        found = []
        for name in ARGUMENTS:
            found.append(getattr(torch.ops.fusednorm, name))
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusednorm::{name}", "Meta")
        asked.append(found)

    those = [threading.Thread(target=ask) for _ in range(4)]
    for thread in those:
        thread.start()
    for thread in those:
        thread.join()
    assert asked == [asked[0]] * 4
    assert len(COSTLY["torch.library.register_fake"]) == len(ARGUMENTS)


@way
def a_fork_meanwhile():
    """Another thread is in the middle of it: the child has the whole operator, and waits for no thread."""
    begun, forked, register_fake = threading.Event(), threading.Event(), torch.library.register_fake

    def slow(*arguments, **named):
        if not begun.is_set():
            begun.set()
            forked.wait(0.2)  # if the fork waits for this, in vain
        register_fake(*arguments, **named)

    torch.library.register_fake = slow
    thread = threading.Thread(target=lambda: torch.ops.fusednorm.scale)
    thread.start()
    assert begun.wait(20)
    child = os.fork()
    forked.set()
    if not child:
        signal.alarm(20)
        those = [torch.ops.fusednorm.add.default, torch.ops.fusednorm.scale.default]
        os._exit(not all(isinstance(one, DirectOperator) for one in those))
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each way is the first in a fork of a process with torch")
@pytest.mark.parametrize("name", WAYS)
def test_the_first_use(found, name):
    assert found[name] == ""


def counted(name):
    """Has a function of torch count its calls."""
    module, _, attribute = name.rpartition(".")
    function = getattr(sys.modules[module], attribute)

    def count(*arguments, **named):
        COSTLY[name].append(arguments)
        return function(*arguments, **named)

    setattr(sys.modules[module], attribute, count)


def outcome(function):
    """What was wrong with a way, in a fork of this process."""
    reader, writer = os.pipe()
    if not os.fork():
        text = ""
        try:
            function()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text[-4000:].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as read:
        text = read.read().decode()
    os.wait()
    return text


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _name in COSTLY:
        counted(_name)
    sys.path[:0] = [str(HERE), str(HERE / "operations")]
    from every_operation import OPERATORS, WEIGHT, WITHOUT_GRADIENT, X, Z, clones, have_gradients

    import fusednorm
    from fusednorm.torch_ops.registered import ARGUMENTS, DirectOperator

    print(json.dumps({name: outcome(function) for name, function in WAYS.items()}))
