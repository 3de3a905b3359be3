"""Single programs of the greatest launches: each reads and writes at a distance from the first that its number gives.

That takes no memory. Operands lie at addresses that no process has; Triton's interpreter, or the machine that executes
PTX, notes the accesses there and reads zeros. What the programs 0 and P touch says, by a straight line, what
k * P must, also where products pass 2^31: the conformance kit tests the first programs. Loops over long rows are tested
in the same way: the interpreter runs one turn of each, and the machine all turns.
"""

import ctypes
import math
import operator
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fusednorm
from fusednorm import Quantization
from fusednorm.backends import cuda, kernel_keys
from fusednorm.backends.cuda import choice as cuda_kernels
from fusednorm.backends.triton import cpu as triton_cpu
from fusednorm.backends.triton import gpu as triton_gpu
from fusednorm.backends.triton import host as triton_host
from fusednorm.backends.triton.host import INTERPRETED
from fusednorm.calls.call import Backward, Call, RMSNorm
from fusednorm.conformance.cases import BF16, F32
from fusednorm.operations import front_door
from fusednorm.operations import gate as gates
from fusednorm.operations import quantize as quantizers

from gate_calls import gate_call

EXECUTED = "FUSEDNORM_EMULATED_SM" in os.environ
if not EXECUTED and not INTERPRETED:
    pytest.skip("takes tests/machines/emulation/ptx, or Triton's interpreter", allow_module_level=True)

BACKENDS = [os.environ["FUSEDNORM_BACKEND"]] if EXECUTED else ["triton", "triton_cpu"]
MODULES = {"cuda": cuda, "triton": triton_gpu, "triton_cpu": triton_cpu}

#: The most programs of a launch, and a number of a program that stands for the last one.
MOST = LAST = 2**31 - 1

#: From here on no process has addresses.
NOWHERE = 2**48

#: Rows are this far apart: times a number of a row it passes 2^48.
APART = 2**17 + 32

#: Programs 0 and P have the same head, and the same place in a cluster and in the inner level of rows.
PERIOD = 48


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """Nothing looks at operands: a test that fails would print them, and some checks make a number for each row."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: f"at {tensor.data_ptr():x}")
    for module in (front_door, gates, quantizers):
        monkeypatch.setattr(module, "check_apart", lambda *_: None)


class Far:
    """Makes operands, each far from the others, where no process has memory."""

    def __init__(self):
        self.made = []

    def __call__(self, dtype, shape, strides=None):
        """An operand; its rows lie ``APART`` unless strides say otherwise."""
        if strides is None:
            apart = max(APART, 2 * shape[-1])
            strides = [1, apart, 3 * apart + 64][: len(shape)][::-1]
        self.made.append(dtype)
        size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
        assert size * dtype.itemsize < 2**56
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(len(self.made) << 56)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def side_by_side(self, dtype, *shape):
        """The same without gaps."""
        return self(dtype, shape, [math.prod(shape[at + 1 :]) for at in range(len(shape))])


if INTERPRETED:
    from fusednorm.backends.triton.kernels import cpu_gates as triton_cpu_gates
    from fusednorm.backends.triton.kernels import cpu_norm as triton_cpu_kernels
    from fusednorm.backends.triton.kernels import cpu_quantize as triton_cpu_quantize
    from fusednorm.backends.triton.kernels import log_prob as triton_log_prob
    from fusednorm.backends.triton.kernels import norm as triton_kernels

    #: The modules of kernels with loops over rows.
    WITH_LOOPS = (triton_kernels, triton_cpu_kernels, triton_cpu_gates, triton_cpu_quantize, triton_log_prob)


# Each makes operands with so many rows of so many elements, and returns what calls the function.


def norm(far, rows, size):
    """Rows of heads in two levels, with a residual, a weight and a bias for each head."""
    shape = rows // 3, 3, size
    x, residual, out, total = (far(F32, shape) for _ in range(4))
    weight, bias = far.side_by_side(F32, 3, size), far.side_by_side(F32, 3, size)
    return lambda: fusednorm.fused_add_rms_norm(x, residual, weight, out=out, residual_out=total, bias=bias)


def norm_in_place(far, rows, size):
    """Rows of 16 bits, in place."""
    x, weight = far(BF16, (rows, size)), far.side_by_side(BF16, size)
    return lambda: fusednorm.rms_norm_(x, weight)


def two_norms(far, rows, size):
    """A norm before the addition, and one after it."""
    x, residual, out, total = (far(BF16, (rows, size)) for _ in range(4))
    weights = [far.side_by_side(BF16, size) for _ in range(2)]
    return lambda: fusednorm.rms_norm_add_rms_norm(x, residual, *weights, out=out, residual_out=total)


def norm_quantized(far, rows, size):
    """A norm whose rows are quantized in groups; the scales of a group lie side by side."""
    x, residual, total = (far(BF16, (rows, size)) for _ in range(3))
    weight = far.side_by_side(BF16, size)
    how, numbers = Quantization(torch.int8, per=128), far(torch.int8, (rows, size))
    scales = far(F32, (rows, size // 128), (1, rows))
    given = {"out": numbers, "scale_out": scales, "residual_out": total}
    return lambda: fusednorm.fused_add_rms_norm_quant(x, residual, weight, quantization=how, **given)


def quantize(far, rows, size):
    """Rows that are quantized in groups, with zero points."""
    x, numbers = far(BF16, (rows, size)), far(torch.uint8, (rows, size))
    how = Quantization(torch.uint8, per=128, zero_point="after")
    scales, zero_points = far(F32, (rows, size // 128)), far(torch.int32, (rows, size // 128))
    return lambda: fusednorm.quantize(x, how, out=numbers, scale_out=scales, zero_point_out=zero_points)


def gate(far, rows, size):
    """Rows in two levels."""
    y, z, out = (far(BF16, (rows // 3, 3, size)) for _ in range(3))
    return lambda: fusednorm.gate(y, z, out=out)


def gate_packed(far, rows, size):
    """Rows side by side."""
    y, z, out = (far.side_by_side(BF16, rows, size) for _ in range(3))
    return lambda: fusednorm.gate(y, z, out=out)


def gated_norm(far, rows, size):
    """A norm, then a gate."""
    (x, z), weight = (far(BF16, (rows, size)) for _ in range(2)), far.side_by_side(BF16, size)
    return lambda: fusednorm.rms_norm_gated_(x, z, weight)


def rotate(far, rows, size):
    """Heads of q and of k, normalised and rotated, with a row of the tables for each."""
    q, k, q_out, k_out = (far(BF16, (rows, heads, size), (8 * APART, APART, 1)) for heads in (4, 2, 4, 2))
    cos, sin = (far(F32, (rows, size // 2)) for _ in range(2))
    weights = [far.side_by_side(BF16, size) for _ in range(2)]
    outs = {"q_out": q_out, "k_out": k_out}
    return lambda: fusednorm.qk_norm_rope(q, k, *weights, cos, sin, **outs)


def gate_backward(far, rows, size):
    """Gradients of a gate."""
    d, y, z, dy, dz = (far(BF16, (rows // 3, 3, size)) for _ in range(5))
    tensors = {"d": d, "y": y, "z": z, "dy": dy, "dz": dz}
    call = gate_call(tensors, (d.stride()[:2],) * 5, size, rows, 3)
    return lambda backend: MODULES[backend].backward(call)


def log_prob(far, rows, size, name="log_softmax"):
    """Log-probabilities of rows in two levels; of two ids of each."""
    whole, shape = name == "log_softmax", (rows // 3, 3, size)
    logits, m, s = far(BF16, shape), far.side_by_side(F32, rows), far.side_by_side(F32, rows)
    ids, entropy = (None, None) if whole else (far.side_by_side(torch.int64, rows, 2), far.side_by_side(F32, rows))
    out = far(BF16, shape) if whole else far.side_by_side(F32, rows, 2)
    tensors = {"logits": logits, "ids": ids, "temperature": None, "out": out, "entropy_out": None}
    tensors |= {"m": m, "s": s, "entropy": entropy}
    strides = {"logits": logits.stride()[:2]} | ({"out": out.stride()[:2]} if whole else {})
    call = Call(name, False, tensors, strides, {}, size, rows, 3)
    return lambda backend: MODULES[backend].forward(call)


def log_prob_backward(far, rows, size, name="log_softmax"):
    """The gradient, whose rows lie side by side."""
    whole = name == "log_softmax"
    logits, dx = far(BF16, (rows // 3, 3, size)), far.side_by_side(BF16, rows, size)
    m, s, entropy, d_entropy = (None if whole and i > 1 else far.side_by_side(F32, rows) for i in range(4))
    ids = None if whole else far.side_by_side(torch.int64, rows, 2)
    d = far(BF16, (rows // 3, 3, size)) if whole else far.side_by_side(F32, rows, 2)
    tensors = {"logits": logits, "ids": ids, "temperature": None, "m": m, "s": s, "entropy": entropy}
    tensors |= {"d": d, "d_entropy": d_entropy, "dlogits": dx}
    strides = {"logits": logits.stride()[:2], "dlogits": (3 * size, size)} | ({"d": d.stride()[:2]} if whole else {})
    call = Call(name, True, tensors, strides, {}, size, rows, 3)
    return lambda backend: MODULES[backend].backward(call)


def selected(far, rows, size):
    """Log-probabilities of ids, and entropies."""
    return log_prob(far, rows, size, "selected_and_entropy")


def selected_backward(far, rows, size):
    """Their gradient."""
    return log_prob_backward(far, rows, size, "selected_and_entropy")


def backward(far, rows, size, of_rows=True, of_weight=False):
    """Gradients of rows, of the weight, or of both."""
    dy, h = far(F32, (rows // 3, 3, size)), far(BF16, (rows // 3, 3, size))
    rstd, weight = far.side_by_side(F32, rows), far.side_by_side(F32, size)
    d_total = far(BF16, (rows // 3, 3, size)) if of_rows else None
    dx = far.side_by_side(F32, rows, size) if of_rows else None
    dresidual = far.side_by_side(BF16, rows, size) if of_rows else None
    dweight = far.side_by_side(F32, size) if of_weight else None
    partial = far.side_by_side(F32, kernel_keys.blocks_of(rows)[1], size) if of_weight else None
    operation = RMSNorm(dy.device, F32, BF16, F32, F32, size, True, False, BF16)
    lie = h.stride()[:2]
    strides = (lie, lie if of_rows else (0, 0), lie)
    call = Backward(
        dy, d_total, h, rstd, weight if of_rows else None, dx, dresidual, dweight, operation, rows, 3, strides, 0.0
    )

    def run(backend):
        with pytest.MonkeyPatch.context() as patch:
            for module in (cuda, triton_host, triton_cpu):
                patch.setattr(module, "scratch_of", lambda call: partial, raising=False)
            MODULES[backend].backward(call)

    return run


def weight_backward(far, rows, size):
    """The weight's gradient alone."""
    return backward(far, rows, size, of_rows=False, of_weight=True)


def both_backward(far, rows, size):
    """The gradients of rows and of the weight."""
    return backward(far, rows, size, of_weight=True)


OF_ROWS = [norm, norm_in_place, two_norms, norm_quantized, quantize, gate, gated_norm, rotate, gate_backward, backward]
OF_ROWS += [log_prob, log_prob_backward, selected, selected_backward]


class OneProgram:
    """Runs one program of each launch that a call makes, and notes its accesses."""

    def __init__(self, backend, call):
        self.backend, self.call = backend, call

    def run(self, number, turn=None):
        """Of each launch: programs, the one that ran, and its accesses as [n, 3]: address, bytes, whether it writes.

        The number ``LAST`` stands for the last one. ``turn``: the one that loops take; None: all.
        """
        launches = []
        with fusednorm.use_backend(self.backend):
            if EXECUTED:
                from ptx import machine

                with machine.only(number) as launches:
                    self.perform()
                # Warps take turns as it comes.
                return [(*launch, accesses[np.lexsort(accesses.T[::-1])]) for *launch, accesses in launches]
            with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
                interpret(patch, number, turn, launches)
                self.perform()
        return launches

    def perform(self):
        """Calls."""
        if self.call.__code__.co_argcount:
            self.call(self.backend)
        else:
            self.call()


def interpret(patch, number, turn, launches):
    """Has Triton's interpreter run one program of each launch, and one turn of each loop."""
    from triton import language
    from triton.runtime import interpreter

    def typed(kind, value):
        """A value of the type that a compiled kernel takes."""
        if kind == "constexpr" or kind.startswith("fp"):
            return value
        value = value.data_ptr() if isinstance(value, torch.Tensor) else value or 0
        stored = np.array([value], np.uint64 if kind.startswith("*") else np.int64)
        handle = interpreter.TensorHandle(stored, language.str_to_ty(kind, None))
        return language.tensor(handle, handle.dtype)

    def one_turn(*arguments):
        found = range(*map(operator.index, arguments))
        return found[min(turn, len(found) - 1) :][:1] if len(found) > 2 else found

    original, accesses, at = interpreter._interpreter, [], {}

    def noted(addresses, mask, item, writes):
        found = addresses[mask].ravel().astype(np.int64)
        accesses.append(np.stack((found, np.full_like(found, item), np.full_like(found, writes)), axis=-1))
        return mask & (addresses < NOWHERE)

    def load(addresses, mask, other, dtype):
        there = noted(addresses, mask, other.itemsize, False)
        return original.load(addresses, there, np.where(mask, np.zeros_like(other), other), dtype)

    def store(addresses, value, mask):
        original.store(addresses, value, noted(addresses, mask, value.itemsize, True))

    def program_id(axis):
        return interpreter.TensorHandle(np.array([at["program"]], np.int32), language.int32)

    def launch(self, programs, values):
        given = {name: typed(kind, values.get(name)) for name, (kind, _) in self.variant.arguments().items()}
        at["program"] = min(number, programs - 1)
        accesses.clear()
        for module in WITH_LOOPS if turn is not None else ():
            patch.setattr(module, "range", one_turn, raising=False)
        self._function[(1,)](**given, **self._constants)
        launches.append((programs, at["program"], np.concatenate(accesses) if accesses else np.empty((0, 3), np.int64)))

    patch.setattr(interpreter, "_interpreter", SimpleNamespace(load=load, store=store))
    patch.setattr(interpreter.interpreter_builder, "create_get_program_id", program_id)
    patch.setattr(triton_host.Interpreted, "__call__", launch)


def longest(backend):
    """Elements of the longest rows that a backend takes."""
    return cuda_kernels.LONGEST if backend == "cuda" else triton_host.LONGEST


def check_line(one, begin, end, launch=0, period=PERIOD):
    """That programs of a launch lie on a line, from the first one to the last one before an end."""
    turns = (end - begin) // period - 1
    on_one_line([one.run(begin + at * period)[launch][2] for at in (0, 1, turns)], turns)


def on_one_line(found, at, all_differ=True):
    """That accesses at the places 0, 1 and ``at`` lie on a line, and that other ones are written."""
    first, second, far = found
    assert len(first) == len(second) == len(far) > 0
    assert at > 1
    assert (first[:, 1:] == far[:, 1:]).all()
    assert (far[:, 0] - first[:, 0] == at * (second[:, 0] - first[:, 0])).all()
    differ = (second[:, 0] != first[:, 0])[first[:, 2] == 1]
    assert differ.all() if all_differ else differ.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", OF_ROWS)
@pytest.mark.parametrize("size", [128, 1024])
@pytest.mark.left_out("triton_ptx", but=["128-*"])
def test_many_rows(backend, make, size):
    """As many rows as programs can be counted for; of programs that take whole rows, or several of them."""
    if backend == "triton_cpu" and make in (rotate, two_norms):
        pytest.skip("other kernels compute it: those of the cpu backend, or two of this one")
    rows = 3 * 2**20
    most = max(programs for programs, *_ in OneProgram(backend, make(Far(), rows, size)).run(LAST))
    one = OneProgram(backend, make(Far(), rows * (MOST // most), size))
    for launch, (programs, *_) in enumerate(one.run(LAST)):
        assert MOST // 4 < programs <= MOST
        # Of rotations the first two thirds take heads of q, and the others those of k.
        of_q = programs * 2 // 3 if make is rotate else programs
        check_line(one, 0, of_q, launch)
        if make is rotate:
            check_line(one, of_q + 1, programs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_gates(backend):
    """Elements of rows that lie side by side are shared among programs."""
    rows, size = 3 * 2**20, 48
    ((programs, _, _),) = OneProgram(backend, gate_packed(Far(), rows, size)).run(LAST)
    one = OneProgram(backend, gate_packed(Far(), rows * (MOST // programs), size))
    check_line(one, 0, one.run(LAST)[0][0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [30, 300, 3000])
def test_columns_of_the_weights_gradient(backend, rows):
    """The longest rows, whose columns are shared among programs, with few blocks, some and many."""
    size, blocks = longest(backend), kernel_keys.blocks_of(rows)[1]
    one = OneProgram(backend, weight_backward(Far(), rows, size))
    (shares, *_), (sums, *_) = one.run(LAST)
    if backend != "triton_cpu":
        check_line(one, 0, shares // blocks)
        check_line(one, 0, shares, period=3 * (shares // blocks))
    # More programs may be launched than take columns.
    _, _, first = one.run(0)[1]
    written = first[first[:, 2] == 1]
    columns = written[written[:, 0] >> 56 == min(written[:, 0] >> 56), 1].sum() // 4  # of dweight
    end = -(-size // columns)
    check_line(one, 0, min(end, sums), launch=1)
    for idle in {at for product in (2**31, 2**32) for at in (product // columns - 1, product // columns)} | {sums - 1}:
        if end <= idle < sums:
            assert len(one.run(idle)[1][2]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_rows(backend):
    """The gradients of blocks of rows with the block's share of the weight's, far from one another."""
    one = OneProgram(backend, both_backward(Far(), 300, 1024))
    (programs, *_), *_ = one.run(LAST)
    check_line(one, 0, programs, period=3)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton_cpu"])
@pytest.mark.parametrize("make", [gate, gate_backward])
def test_columns_of_gates(backend, make):
    """Columns of the longest rows are shared among programs."""
    one = OneProgram(backend, make(Far(), 3, longest(backend)))
    ((programs, *_),) = one.run(LAST)
    check_line(one, 0, programs // 3)


#: What one program takes rows of any length of, in a loop.
LOOPS = [("triton", make) for make in (norm, norm_in_place, two_norms, gated_norm, backward)]
LOOPS += [("triton_cpu", make) for make in (norm, norm_in_place, gate, gated_norm, gate_backward, backward)]
LOOPS += [(name, make) for name in ("triton", "triton_cpu") for make in (log_prob, log_prob_backward)]


@pytest.mark.skipif(EXECUTED, reason="the machine cannot leave out turns of loops")
@pytest.mark.parametrize(("backend", "make"), LOOPS)
def test_one_turn_of_loops(backend, make):
    """Loops over the longest rows."""
    one, far = OneProgram(backend, make(Far(), 3, triton_host.LONGEST)), 2**16 + 1
    runs = [one.run(2, turn) for turn in (0, 1, far)]
    for launches in zip(*runs, strict=True):
        on_one_line([accesses for *_, accesses in launches], far, all_differ=False)


@pytest.mark.skipif(BACKENDS != ["cuda"], reason="Triton's longest rows take too long")
@pytest.mark.parametrize(("make", "part"), [(norm, 1), (norm_in_place, 16), (two_norms, 16), (backward, 16)])
def test_all_turns_of_loops(make, part):
    """A program that takes the longest row whole, or one that is a part of it, reads and writes each element of it."""
    far, size = Far(), cuda_kernels.LONGEST // part
    ((_, block, accesses),) = OneProgram("cuda", make(far, 3, size)).run(2)
    assert block == 2
    for number, dtype in enumerate(far.made, 1):
        touched = accesses[accesses[:, 0] >> 56 == number]
        begins = np.unique(touched[:, 0])
        (width,) = np.unique(touched[:, 1])
        of_row = range(begins[0], begins[0] + size * dtype.itemsize, width)
        assert begins.tolist() in ([begins[0]], list(of_row))
        assert begins.tolist() == list(of_row) or width == F32.itemsize  # or rstd, one for a row
