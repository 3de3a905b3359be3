"""The fast path to CUDA's kernels launches what Python has loaded; under tests/emulation/ptx."""

import ctypes
import itertools
import os
import threading

import pytest
import torch

import fusednorm
from fusednorm import quick
from fusednorm.backends import cuda, reference
from fusednorm.backends.gpu_host import programs
from fusednorm.conformance.cases import BF16, F16, F32, F64, Case, call, differing, expected, operands

pytestmark = pytest.mark.skipif(
    "FUSEDNORM_EMULATED_SM" not in os.environ or os.environ["FUSEDNORM_BACKEND"] != "cuda" or not quick.OPEN,
    reason="takes tests/emulation/ptx, and DLPack's exchange API, which torch has since 2.10",
)


def test_forward():
    """Nothing before; afterwards the same bits, in the same layouts; never what overlaps or begins between elements."""
    take = quick.way({"cuda"})

    def way(case, x, residual, weight, out=None, residual_out=None):
        numbers = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
        return take(x, residual, weight, out, residual_out, *numbers, None, True)

    for case in (
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=1, hidden=968).of(BF16, residual=F32, weight=None, round_norm=True, eps=1e-3),
        Case(rows=9, hidden=72).of(F16, residual=None, weight_offset=1.0),
        Case(rows=3, hidden=1528).of(F64, weight_offset=0.5, eps=1e-2),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ):
        x, residual, weight = operands(case)
        y, total = expected(case, "cuda")
        assert way(case, x, residual, weight) is None, case
        with fusednorm.use_backend("cuda"):
            call(case, x, residual, weight)
        for _ in range(2):
            got, got_total = way(case, x, residual, weight)
            assert not differing(got, y).any(), case
            assert residual is None or not differing(got_total, total).any(), case
        given = x.clone()
        got, _ = way(case, given, residual, weight, given, None if residual is None else residual.clone())
        assert got is given
        assert not differing(given, y).any(), case

    case = Case(rows=5, hidden=968).of(BF16)
    x, residual, weight = operands(case)
    memory = torch.zeros(12, 968, dtype=BF16)
    memory[:5] = x
    for outputs in (
        (memory[1:6], None),  # shares rows with x
        (memory[6:11], memory[6:11]),  # both in one place
        (torch.cat([memory, memory])[:5], memory[4:9]),
    ):
        before = memory.clone()
        assert way(case, memory[:5], residual, weight, *outputs) is None
        assert torch.equal(memory, before)
    unaligned = torch.zeros(5 * 968 + 1, dtype=BF16)[1:].view(5, 968)
    assert way(case, unaligned, residual, weight) is None
    assert quick.way({"cpu"})(x, residual, weight, None, None, 1e-6, 0.0, True, False, None, True) is None


@pytest.mark.parametrize("needs", [(True, True, True), (True, True, False), (False, False, True)])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=5, hidden=968).of(BF16),
        Case(rows=300, hidden=72).of(F16, residual=F32, weight_offset=1.0),
        Case(rows=2600, hidden=520).of(BF16),
        Case(rows=3, hidden=1528).of(F64, residual=None, weight_offset=0.5),
        Case(rows=2, hidden=20_008).of(BF16, round_sum=False),
    ],
    ids=str,
)
def test_backward(case, needs, monkeypatch):
    """Nothing before; afterwards the same bits, with gaps between the rows too."""
    x, residual, weight = operands(case)
    h, rstd = x.float() if x.dtype != F64 else x, torch.rand(case.rows, dtype=x.dtype if x.dtype == F64 else F32)
    dy = torch.cat([x, x], dim=1)[:, : case.hidden]
    given = (
        dy,
        None,
        h,
        rstd,
        weight,
        case.weight_offset,
        x.dtype,
        None if residual is None else residual.dtype,
        needs,
    )
    taken = []
    monkeypatch.setattr(cuda._host, "held", {})
    monkeypatch.setattr(cuda._host, "quick", lambda *a: taken.append(quick.backward(quick.CUDA, *a)) or taken[-1])
    expected = cuda.backward(*given)
    got = cuda.backward(*given)
    assert taken == [False, True]
    for one, other, wanted in zip(got, expected, reference.backward(*given), strict=True):
        assert (one is None) == (wanted is None)
        assert one is None or not (differing(one, other) | differing(one, wanted)).any()


@pytest.mark.parametrize("rows", [1, 8, 9, 255, 257, 300, 515, 4097, 16_640, 70_000])
def test_as_many_programs_as_through_python(rows, monkeypatch):
    """Of each kind of kernel; the driver only writes down what it is given."""
    found = []

    @cuda._LaunchKernelEx
    def launch(config, function, arguments, extra):
        found.append(cuda._Config.from_address(config).grid_x)
        return 0

    names = ("cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent")
    quick.open_cuda(ctypes.cast(launch, ctypes.c_void_p).value, *map(cuda._driver_function, names))
    try:
        for size in (16, 48, 1040):
            block = -(-rows // min(rows, reference.ROW_BLOCKS))
            blocks = -(-rows // block)
            h, rstd, weight = torch.zeros(rows, size, dtype=BF16), torch.zeros(rows), torch.zeros(size, dtype=BF16)
            given = (h, None, h, rstd, weight, torch.empty_like(h), None, torch.empty(blocks, size))
            for name, per_program in itertools.product(("rows", "both", "shares", "sums"), (64, 1024)):
                kernel = (0, 32, per_program, 0, 1, False, cuda._SHARES[name])
                quick.hold(0, 0, (BF16, None, BF16, BF16, BF16, None, BF16), quick.BACKWARD, size, 32, (kernel,))
                assert quick.backward(quick.CUDA, *given, torch.empty_like(weight), block, 0.0)
                assert found.pop() == programs(name, per_program, rows, size, block, blocks), (name, per_program)
    finally:
        cuda._open_quick_way.cache_clear()
        cuda._open_quick_way()


@pytest.fixture
def gpus(monkeypatch):
    """The stand-in's two GPUs; the first is the current one before and after a test, and has the tensors."""
    driver, _ = cuda.bindings()
    contexts = [driver.cuDevicePrimaryCtxRetain(device)[1] for device in range(2)]
    numbers = {name: ctypes.c_int.in_dll(driver.library, name) for name in ("refused", "pushed", "tensors_on")}
    for number in numbers.values():
        number.value = 0
    assert driver.cuCtxGetCurrent() == (0, contexts[0])

    class Gpus:
        current = staticmethod(driver.cuCtxSetCurrent)

        def another_context(self, device):
            driver.library.another_context.restype = ctypes.c_void_p
            return driver.library.another_context(device)

        def context(self):
            return driver.cuCtxGetCurrent()[1]

        def __getattr__(self, name):
            return numbers[name].value

        def put_tensors_on(self, device):
            numbers["tensors_on"].value = device

    found = Gpus()
    found.contexts = contexts
    monkeypatch.setattr(cuda._host, "held", {})
    yield found
    found.put_tensors_on(0)
    driver.cuCtxSetCurrent(contexts[0])


def load_on_both(gpus, call):
    """Runs a call through Python, and has what it loads on the first GPU also loaded and held on the second."""
    call()
    (key,) = cuda._host.held
    variants = {"forward": cuda.forward_variant(*key[1:])} if "forward" in cuda._host.held[key] else None
    gpus.current(gpus.contexts[1])
    cuda._host._hold((1, *key[1:]), variants or cuda.backward_variants(*key[1:]))
    gpus.current(gpus.contexts[0])


def both_passes(hidden):
    """A forward and a backward pass through Python, the same by the fast path, and what both should return."""
    case = Case(rows=5, hidden=hidden).of(BF16)
    x, residual, weight = operands(case)
    rstd = torch.rand(case.rows)
    numbers = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
    take = quick.way({"cuda"})

    def python_forward():
        outputs = torch.empty_like(x), torch.empty_like(x)
        cuda.forward(x, residual, weight, *outputs, None, case.rows, hidden, *[hidden] * 4, *numbers)
        return outputs

    gradient_operands = (x, None, residual, rstd, weight, 0.0, BF16, BF16, (True, True, True))
    yield python_forward, lambda: take(x, residual, weight, None, None, *numbers, None, True), expected(case, "cuda")
    partial = torch.empty(case.rows, hidden)

    def fast_backward():
        gradients = torch.empty_like(x), torch.empty_like(weight)
        given = (x, None, residual, rstd, weight, gradients[0], None, partial, gradients[1], 1, 0.0)
        return gradients if quick.backward(quick.CUDA, *given) else None

    wanted = reference.backward(*gradient_operands)
    yield lambda: cuda.backward(*gradient_operands), fast_backward, (wanted[0], wanted[2])


@pytest.mark.parametrize("passes", [0, 1], ids=["forward", "backward"])
def test_a_gpu_that_is_not_the_current_one(gpus, passes, monkeypatch):
    """Each launch is in a context of the tensors' GPU, none is refused, and the caller's context is as it was."""
    python_path, fast_path, wanted = list(both_passes(1032))[passes]
    with monkeypatch.context() as patched:
        patched.setattr(cuda._host, "quick", lambda *_: False)
        load_on_both(gpus, python_path)
    assert (gpus.refused, gpus.pushed) == (0, 0)

    def check(gpu, context, pushed):
        before = gpus.pushed
        gpus.put_tensors_on(gpu)
        gpus.current(context)
        got = fast_path()
        assert got is not None
        assert not any(differing(one, other).any() for one, other in zip(got, wanted, strict=True))
        assert gpus.context() == (context or 0)
        assert gpus.pushed - before == pushed
        assert gpus.refused == 0

    first, second = gpus.contexts
    for gpu, context, pushed in ((0, first, 0), (1, first, 1), (1, second, 0), (0, second, 1), (1, first, 1)):
        check(gpu, context, pushed)
    check(1, gpus.another_context(1), 0)  # as of a part of its processors, which torch makes current with its stream
    check(0, None, 1)  # a thread that has used no GPU yet
    gpus.current(first)


def test_a_thread_that_has_used_no_gpu(gpus):
    """Through Python a launch makes the tensors' GPU the thread's current one, as torch does, and is not refused."""
    python_path, _, wanted = next(both_passes(1040))
    python_path()
    found = []

    def work():
        found.append(gpus.context())
        found.append(python_path())
        found.append(gpus.context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[::2] == [0, gpus.contexts[0]]
    assert gpus.refused == 0
    assert not any(differing(one, other).any() for one, other in zip(found[1], wanted, strict=True))


def test_a_gpu_for_which_nothing_is_held(gpus):
    """Nothing is launched, nowhere."""
    python_path, fast_path, _ = next(both_passes(1048))
    python_path()
    gpus.put_tensors_on(1)
    assert fast_path() is None
    assert (gpus.refused, gpus.pushed) == (0, 0)


def test_any_number_of_kinds_of_calls_is_held(gpus):
    """Thousands: the first and the last are launched, and none of them instead of another."""
    first, last = (next(both_passes(hidden)) for hidden in (1056, 1064))
    first[0]()
    kernel = (0, 32, 1, 0, 1, False, quick.OF_ROWS)  # is never launched
    for hidden, options in itertools.product(range(10**6, 10**6 + 3000), range(2)):
        quick.hold(0, 0, (F32, None, None, F32), options, hidden, 16, (kernel,))
    last[0]()
    for _, fast_path, wanted in (first, last):
        got = fast_path()
        assert got is not None
        assert not any(differing(one, other).any() for one, other in zip(got, wanted, strict=True))
