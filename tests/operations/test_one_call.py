"""Operations that C does in one call: the reference's bits, however rows lie and threads share them.

Whether C reads the tensors itself, or Python hands them over. No plain operations serve these calls.
"""

import itertools

import pytest
import torch
from every_operation import called, function_of, same
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm.backends import cpu
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.conformance.cases import BF16, DTYPES, F32, F64, NAMES, Case, covering
from fusednorm.conformance.test_operations import AXES, of_rows
from fusednorm.engine import open_fast_path
from fusednorm.operations import norm_gated, norm_operation

from fast_calls import note_fast_calls

pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason="needs the C library")

ROWS = ("x", "residual", "gate", "y", "z")
FLAGS = {function: axes for function, axes in AXES.items() if function != "qk_norm_rope"}
FLAGS |= {"gate": {"activation": ACTIVATIONS}}
functions = pytest.mark.parametrize("function", FLAGS)
#: Rows of each kind of kernel; of several blocks, and of so many elements that a weight and a bias need memory.
SHAPES = ((6, 64), (6, 128), (18, 100), (2100, 64), (6, 4096), (12, 4096), (36, 5000), (18, 1029), (6, 40000))
SHAPES += ((12, 2100), (12, 9000))


def contiguous(t):
    return t.clone(), t.new_zeros(0)


def gaps(t):
    """As columns of a wider matrix, which is returned too."""
    whole = torch.nn.functional.pad(t, (4, 5))
    return whole[..., 4:-5], whole


def levels(t):
    """As heads between other heads: one stride leads from head to head, and another from token to token."""
    whole = torch.nn.functional.pad(t if t.dim() > 2 else t.unflatten(0, (-1, 2)), (0, 8, 1, 2))
    return whole[:, 1:-2, :-8], whole


def taken(monkeypatch, way):
    """A list of whether the fast path takes calls from now on, which it refuses if the way is Python's.

    Nothing else takes them but one call of C.
    """
    monkeypatch.setattr(norm_operation.Norm, "_composed", None)
    monkeypatch.setattr(norm_gated, "rms_norm", None)  # the first of plain operations
    fusednorm.rms_norm(torch.ones(1, 2))  # opens the fast path
    return note_fast_calls(monkeypatch, way == "fast path")


@pytest.fixture
def of_threads(request):
    """So many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


threads = pytest.mark.parametrize("of_threads", [1, 3], indirect=True)


def calls(function, shapes):
    """Operands, flags, and a layout of rows: each shape with each dtype, and each pair of two other values."""
    axes = {name: values for name, values in FLAGS[function].items() if name not in ("hidden", "group_size")}
    hows = itertools.cycle(covering((contiguous, gaps, levels), (1, 3), *axes.values()))
    for (shape, dtype), (layout, parts, *values) in zip(covering(shapes, DTYPES), hows, strict=False):
        flags = dict(zip(axes, values, strict=True))
        heads = {name: flags.pop(name) for name in ("weight_heads", "bias_heads") if name in flags}
        if "between" in flags and (dtype == F64 or not flags.get("norm_before_gate", True)):
            flags["between"] = None
        if function == "rms_norm_gated" and shape[1] % parts == 0:
            flags["group_size"] = shape[1] // parts
        heads = {name: of_all and parts for name, of_all in heads.items()}
        yield of_rows(function, Case(*shape).of(dtype), **heads), flags, layout


def laid_out(operands, layout):
    """The operands, rows among them in other memory, and these memories."""
    laid = {key: layout(t) for key, t in operands.items() if key in ROWS}
    return operands | {key: t for key, (t, _) in laid.items()}, list(laid.values())


@threads
@functions
def test_one_call(monkeypatch, function, of_threads):
    """New, of another dtype, and in place, where nothing is written beside the rows."""
    kinds = [({}, (function, f"{function}_")), ({"out_dtype": F32}, (function,))]
    kinds = kinds[: 1 + ("bias" in NAMES[function][0])]
    for (operands, flags, layout), (asked, names) in itertools.product(calls(function, SHAPES), kinds):
        with fusednorm.use_backend("reference"):
            wanted = called(function_of(function), operands | flags | asked)
        for way, name in itertools.product(("fast path", "Python"), names):
            given, memories = laid_out(operands, layout)
            with monkeypatch.context() as patch, fusednorm.use_backend("cpu"):
                took = taken(patch, way)
                found = called(function_of(name), given | flags | asked)
            about = f"{name}, {way}, {wanted[0].shape}, {layout.__name__}, {flags}, {asked}"
            two_levels = layout is levels and wanted[0].shape[-2] > 1
            if cpu.fast_path:
                assert any(took[:1]) == (way == "fast path" and not two_levels), about
            assert same([t.reshape(one.shape) for t, one in zip(found, wanted, strict=True)], wanted), about
            for t, whole in memories:
                t.zero_()
                assert not whole.any(), about


@threads
@functions
def test_gradients_in_one_call(monkeypatch, function, of_threads):
    """By the fast path and by Python, once and again; a mode sees operators. Rows of gradients lie anywhere too."""
    for operands, flags, layout in calls(function, ((6, 512), (18, 512), (258, 24), (900, 100))):
        given, _ = laid_out(operands, layout)
        leaves = {key: t.detach().requires_grad_() for key, t in given.items() if t is not None}

        def gradients(outputs, leaves=leaves, layout=layout, **how):
            incoming = [layout(t.detach().cos())[0].reshape(t.shape) for t in outputs]
            return torch.autograd.grad(outputs, list(leaves.values()), incoming, retain_graph=True, **how)

        with fusednorm.use_backend("reference"):
            wanted = gradients(called(function_of(function), given | leaves | flags))
        with fusednorm.use_backend("cpu"), monkeypatch.context() as patch:
            outputs = called(function_of(function), given | leaves | flags)
            found = [gradients(outputs), gradients(outputs, create_graph=True)]
            with FlopCounterMode(display=False):
                found.append(gradients(outputs))
            for name in ("backward", "gate_backward", "norm_gated_backward"):
                patch.setattr(open_fast_path, name, lambda *_: False)
            found.append(gradients(outputs))
        for way, got in enumerate(found):
            assert same(got, wanted), (way, outputs[0].shape, layout.__name__, flags)


@pytest.mark.parametrize("way", ["fast path", "Python"])
def test_rows_that_are_their_own_gate(monkeypatch, way):
    for name in ("rms_norm_gated", "gate"):
        x = of_rows("gate", Case(7, 96).of(BF16))["y"]
        with fusednorm.use_backend("reference"):
            wanted = function_of(name)(x, x)
        with monkeypatch.context() as patch, fusednorm.use_backend("cpu"):
            taken(patch, way)
            assert function_of(f"{name}_")(x, x).equal(wanted)


def misaligned(t):
    return torch.cat((t.new_zeros(3), t.flatten()))[3:].view(t.shape)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@functions
def test_large_outputs(function, dtype):
    """Outputs that bypass the caches, and rows that are fetched while others are computed; new and in place."""
    operands = of_rows(function, Case(6, 4096).of(dtype))
    flags = [{"norm_before_gate": first} for first in (True, False)] if function == "rms_norm_gated" else [{}]
    for place, how in itertools.product((torch.clone, misaligned), flags):
        with fusednorm.use_backend("reference"):
            wanted = [torch.cat([t] * 172) for t in called(function_of(function), operands | how)]
        for name in (function, f"{function}_"):
            rows = {key: place(torch.cat([t] * 172)) for key, t in operands.items() if key in ROWS}
            assert same(called(function_of(name), operands | rows | how), wanted)
