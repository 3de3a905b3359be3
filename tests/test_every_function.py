"""What holds for each public function: listeners see it, meta tensors share no memory, inference tensors are kept."""

import pytest
import torch
from test_bad_operands import OPERANDS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm.engine import choose

#: The operands that a function writes; of the other functions the outputs.
IN_PLACE = {
    "fused_add_rms_norm_": ("x", "residual"),
    "gate_": ("y",),
    "qk_norm_rope_": ("q", "k"),
    "rms_norm_": ("x",),
    "rms_norm_add_": ("residual",),
    "rms_norm_add_rms_norm_": ("x", "residual"),
    "rms_norm_gated_": ("x",),
}
functions = pytest.mark.parametrize("name", OPERANDS)


def operands_of(name, convert=torch.clone):
    return {key: convert(t) if isinstance(t, torch.Tensor) else t for key, t in OPERANDS[name].items()}


def written_by(name):
    return IN_PLACE.get(name) or tuple(key for key in OPERANDS[name] if key.endswith("out"))


def call(name, operands):
    """What the function returns, in a tuple."""
    found = getattr(fusednorm, name)(**operands)
    return found if isinstance(found, tuple) else (found,)


def same(a, b):
    return all(torch.equal(p.float(), q.float()) for p, q in zip(a, b, strict=True))


def test_every_function_in_place_is_here():
    assert set(IN_PLACE) == {name for name in OPERANDS if name.endswith("_")}


class Named(TorchFunctionMode):
    """Keeps the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


class Written(TorchDispatchMode):
    """Keeps the tensors that operations write, which it sees."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for argument, given in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.tensors.append(given)
        return operation(*args, **(kwargs or {}))


@functions
def test_a_function_mode_sees_the_function_that_was_called(name):
    """That one alone, also where it calls another one."""
    expected = call(name, operands_of(name))
    operands = operands_of(name)
    with Named() as mode:
        found = call(name, operands)
    assert mode.functions == [getattr(fusednorm, name)]
    assert same(found, expected)


@functions
def test_each_of_two_function_modes_sees_the_function_that_was_called(name):
    operands = operands_of(name)
    with Named() as outer, Named() as inner:
        call(name, operands)
    assert inner.functions[0] is outer.functions[0] is getattr(fusednorm, name)


@functions
def test_a_subclass_sees_the_function_that_was_called(name):
    """Whichever operand it is."""
    public, seen = [getattr(fusednorm, name) for name in OPERANDS], []

    class Function(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in public:  # beside it, attributes that are looked at before
                seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    for key, operand in operands_of(name).items():
        if isinstance(operand, torch.Tensor):
            operands = operands_of(name) | {key: operand.as_subclass(Function)}
            seen.clear()
            call(name, operands)
            assert seen == [getattr(fusednorm, name)], key


@functions
def test_a_dispatch_mode_sees_what_is_written(name):
    expected = call(name, operands_of(name))
    operands = operands_of(name)
    with Written() as mode:
        found = call(name, operands)
    assert {id(operands[key]) for key in written_by(name)} <= set(map(id, mode.tensors))
    read = {id(t) for key, t in operands.items() if key not in written_by(name)}
    assert not read & set(map(id, mode.tensors))
    assert same(found, expected)


@functions
def test_meta_tensors(name):
    """They share no memory, so that shapes and dtypes are those of a call with values."""
    expected = call(name, operands_of(name))
    operands = operands_of(name, lambda t: t.to("meta"))
    with fusednorm.use_backend("reference"):  # whichever backend these tests are for
        found = call(name, operands)
    assert [(t.shape, t.dtype, t.device.type) for t in found] == [(t.shape, t.dtype, "meta") for t in expected]
    returned = [key for key in written_by(name) if key != "normed_out"]
    assert {id(operands[key]) for key in returned} <= set(map(id, found))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@functions
def test_inference_tensors_are_not_written_outside_of_inference_mode(name, backend):
    """As torch does not write them: nothing is written then, and they may be read."""
    for key, operand in operands_of(name).items():
        if not isinstance(operand, torch.Tensor):
            continue
        operands = operands_of(name)
        with torch.inference_mode():
            operands[key] = operand.clone()
        before = {other: t.clone() for other, t in operands.items() if isinstance(t, torch.Tensor)}
        choose.fast_paths.clear()  # a call in Python opens them again
        with fusednorm.use_backend(backend):
            if key not in written_by(name):
                call(name, operands)
                continue
            message = f"^{key} is an inference tensor, and inplace update to inference tensor outside InferenceMode"
            with pytest.raises(RuntimeError, match=message):
                call(name, operands)
            assert all(
                torch.equal(operands[other].view(torch.uint8), t.view(torch.uint8)) for other, t in before.items()
            )
            with torch.inference_mode():
                call(name, operands)
