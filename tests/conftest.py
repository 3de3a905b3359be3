"""The kit's plug-in, which pyproject.toml names, serves these tests too: its matrix, its comparisons.

Where no device of Triton's is here, its backends run in Triton's interpreter; there, and where PTX is executed, tests
that would take too long are left out.
"""

import math
import os
import subprocess
import sys
import types
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import fusednorm
from fusednorm.conformance import plugin

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE / name) for name in ("clients", "machines", "operations"))]  # helpers


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Chooses Triton's interpreter, which Triton and fusednorm look for when they are imported: nothing has done so."""
    names = plugin.wanted(config)
    if names in (["triton"], ["triton_cpu"]) and "TRITON_INTERPRET" not in os.environ and not plugin.EMULATED:
        code = "from triton.runtime.driver import driver; print(driver.active.get_current_target().backend)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        if not found or (found == "cpu") != (names == ["triton_cpu"]):
            os.environ["TRITON_INTERPRET"] = "1"
    if plugin.interpreted():
        patch_language_once()
        make_types_once()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test of the C library, or one that asks for the backend `cpu`, where there is none (`tox -e python`)."""
    from fusednorm.calls import fast_path  # not before pytest_configure

    if not fast_path.COMPILED and item.get_closest_marker("compiled"):
        pytest.skip("takes the C library")
    try:
        return (yield)
    except fusednorm.BackendError as error:
        if fast_path.COMPILED or "fusednorm._cpu" not in str(error):
            raise
        pytest.skip("takes the C library: it asks for the backend cpu")


def patch_language_once():
    """Makes Triton's interpreter patch its language once per launch and module, instead of at every call in a kernel.

    Most of its time goes there. Triton 3.9 does it so; with another version the tests are merely slow.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        scope = types.SimpleNamespace(restore=lambda: None) if id(function.__globals__) in patched else patch(function)
        patched.add(id(function.__globals__))
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def make_types_once():
    """Makes Triton's interpreter keep the types and shapes of tensors, instead of making them anew for every operation.

    They are the same for all operands of a program, and took half of the time that is left. Triton 3.9 does it so.
    """
    import triton
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.9."):
        return
    numpy_types, numpy_type = {}, interpreter._get_np_dtype
    block_types = {}

    def numpy_type_once(type):
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    def block_type_once(element, shape):
        if element.is_ptr():  # whose name does not say all
            return core.block_type(element, shape)
        key = (element.name, *shape)
        if key not in block_types:
            block_types[key] = core.block_type(element, shape)
        return block_types[key]

    def set_tensor(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        if not hasattr(type, "of_tensors"):
            shape = type.shape.values if type.is_block() else []
            type.of_tensors = core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))
        tensor.shape, tensor.numel = type.of_tensors

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(semantic, a, b):
        blocks = a.type.is_block() and b.type.is_block()
        return (a, b) if blocks and a.type.shape.values == b.type.shape.values else broadcast(semantic, a, b)

    interpreter._get_np_dtype = numpy_type_once
    interpreter.InterpreterBuilder.get_block_ty = lambda builder, element, shape: block_type_once(element, shape)
    core.block_type.with_element_ty = lambda block, element: block_type_once(element, block.shape.values)
    core.tensor.__init__ = set_tensor
    TritonSemantic.broadcast_impl_value = broadcast_others


def pytest_collection_modifyitems(config, items):
    """Leaves out what would take too long, as marks at the tests say. `--everything` leaves out nothing."""
    if config.getoption("--everything"):
        return
    left_out = [item for item in items if item.get_closest_marker("release")]
    names = plugin.wanted(config)
    if len(names) == 1 and (plugin.EMULATED or plugin.interpreted()):
        here = "triton_ptx" if plugin.EMULATED and names == ["triton"] else names[0]
        left_out += [item for item in items if any(leaves_out(m, item, here) for m in item.iter_markers("left_out"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def leaves_out(mark, item, here):
    """Whether a mark leaves out a test with its parameters."""
    if mark.args and here not in mark.args:
        return False
    parameters = item.callspec.id.partition("-")[2] if hasattr(item, "callspec") else ""  # after the mode
    found = any(fnmatchcase(parameters, pattern) for patterns in mark.kwargs.values() for pattern in patterns)
    return not found if "but" in mark.kwargs else found or not mark.kwargs


@pytest.fixture(params=["C++", "Python"])
def asked_by(request, monkeypatch):
    """The fast path asks torch's C++ in versions of torch that the tests have seen, and Python in others."""
    from fusednorm.calls import (
        fast_path,
        must_be_seen,  # not before pytest_configure
    )

    if request.param == "C++":
        yield
        return
    monkeypatch.setattr(must_be_seen, "_TESTED", ())
    assert must_be_seen.in_cpp(*must_be_seen.IN_CPP) == (0, 0, 0)
    fast_path._open(fast_path._api)
    yield
    monkeypatch.undo()
    fast_path._open(fast_path._api)
