"""What only a GPU has: streams, graphs, kernels that begin early, other devices. The bits stay the reference's."""

import itertools
import threading

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, F32, Case, expected, operands

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU that torch calls cuda")

CASES = (
    Case(rows=1, hidden=4096).of(BF16),
    Case(rows=33, hidden=5120).of(BF16, residual=F32),
    Case(rows=700, hidden=128).of(BF16),
    Case(rows=3, hidden=65536).of(BF16),
)


@pytest.fixture
def gpu_mode(mode):
    """A mode whose kernels run on a GPU that is here."""
    if mode.device == "cpu":
        pytest.skip("this backend runs on the CPU")
    return mode


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_graph_replayed_with_new_data(gpu_mode, agree, case):
    x, residual, weight = operands(case)
    fusednorm.fused_add_rms_norm(x, residual, weight)  # what is compiled now is not compiled while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = fusednorm.fused_add_rms_norm(x, residual, weight)
        again, again_total = fusednorm.fused_add_rms_norm(y.to(case.x), total, weight)  # reads what the first wrote
    for seed in (1, 2, 3):
        other = Case(**{**vars(case), "seed": seed})
        for tensor, values in zip((x, residual, weight), operands(other), strict=True):
            tensor.copy_(values)
        graph.replay()
        wanted, wanted_total = expected(other, gpu_mode.backend)
        agree(y, wanted, f"{case}, replay {seed}")
        agree(total, wanted_total, f"{case}, replay {seed}, the sum")
        with fusednorm.use_backend("reference"):
            wanted, wanted_total = fusednorm.fused_add_rms_norm(wanted, wanted_total, weight.cpu())
        agree(again, wanted, f"{case}, replay {seed}, the second call")
        agree(again_total, wanted_total, f"{case}, replay {seed}, the second call's sum")


def test_a_graph_of_gradients(gpu_mode, agree):
    case = Case(rows=40, hidden=2048).of(BF16)
    x, residual, weight = (tensor.requires_grad_() for tensor in operands(case))
    dy, d_total = (torch.randn_like(x) for _ in range(2))

    def gradients():
        outputs = fusednorm.fused_add_rms_norm(x, residual, weight)
        return torch.autograd.grad(outputs, (x, residual, weight), (dy, d_total))

    wanted = [gradient.cpu() for gradient in gradients()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    graph.replay()
    for name, got, want in zip(["x", "residual", "weight"], captured, wanted, strict=True):
        agree(got, want, f"the gradient of {name}")


def test_streams(gpu_mode, agree):
    """Calls on several streams at once, each after work of its own stream that it must wait for."""
    case = Case(rows=512, hidden=4096).of(BF16)
    x, residual, weight = operands(case)
    y, total = expected(case, gpu_mode.backend)
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream() for _ in range(4)] * 5:
        with torch.cuda.stream(stream):
            late = torch.zeros_like(x)
            torch.cuda._sleep(200_000)
            late.copy_(x)
            results.append(fusednorm.fused_add_rms_norm(late, residual, weight))
    torch.cuda.synchronize()
    for got, got_total in results:
        agree(got, y, "y")
        agree(got_total, total, "the sum")


def test_what_the_kernel_before_wrote_is_read(gpu_mode, agree):
    """Every operand, the weight too: a kernel that begins early must not read before it is written."""
    case = Case(rows=64, hidden=4096).of(BF16)
    given = operands(case)
    y, total = expected(case, gpu_mode.backend)
    for _ in range(200):
        x, residual, weight = (torch.zeros_like(tensor) for tensor in given)
        for tensor, values in zip((x, residual, weight), given, strict=True):
            tensor.copy_(values)
        got, got_total = fusednorm.fused_add_rms_norm(x, residual, weight)
        agree(got, y, "y")
        agree(got_total, total, "the sum")
        weight.copy_(given[2] * 2)
        doubled = fusednorm.rms_norm(got_total, weight)
        weight.copy_(given[2])
        agree(doubled, (2 * y.float()).to(y.dtype), "y of twice the weight")


def test_a_chain_in_place(gpu_mode, agree):
    """Kernels that overlap with the next one, which works on the same memory: 64 layers."""
    case = Case(rows=128, hidden=4096).of(BF16)
    x, residual, weight = operands(case)
    hx, hresidual, hweight = (tensor.cpu() for tensor in (x, residual, weight))
    for _ in range(64):
        fusednorm.fused_add_rms_norm_(x, residual, weight)
        with fusednorm.use_backend("reference"):
            fusednorm.fused_add_rms_norm_(hx, hresidual, hweight)
    agree(x, hx, "y after 64 layers")
    agree(residual, hresidual, "the sum after 64 layers")


def test_a_thread_that_never_used_the_gpu(gpu_mode, agree):
    case = Case(rows=5, hidden=4096).of(BF16)
    x, residual, weight = operands(case)
    results = []

    def work():
        with gpu_mode.active():
            results.append(fusednorm.fused_add_rms_norm_(x, residual, weight))

    y, total = expected(case, gpu_mode.backend)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    agree(results[0][0], y, "y")
    agree(results[0][1], total, "the sum")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_devices(gpu_mode, agree):
    """Tensors on a device that is not the current one; by turns, so that the wrong one's kernels would show."""
    case = Case(rows=5, hidden=4096).of(BF16)
    y, total = expected(case, gpu_mode.backend)
    for device in itertools.islice(itertools.cycle(range(torch.cuda.device_count())), 6):
        x, residual, weight = (tensor.to(f"cuda:{device}") for tensor in operands(case))
        got, got_total = fusednorm.fused_add_rms_norm(x, residual, weight)
        assert got.device.index == device
        agree(got, y, f"device {device}")
        agree(got_total, total, f"device {device}, the sum")
