"""One OpenMP runtime, which is torch's, and children that never hang."""

import os
import textwrap
from pathlib import Path

import processes
import pytest

from fusednorm.backends import cpu

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(cpu.openmp() == "", reason="torch has no OpenMP runtime here, so there are no threads")


def python(code):
    """Runs a program; one that hangs is killed, which fails the test."""
    program = "import os, sys, torch\n" + textwrap.dedent(code)
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSEDNORM_BACKEND", "OMP_NUM_THREADS")}
    done = processes.python("-c", program, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", ["torch", "fusednorm.backends.cpu"])
def test_one_runtime(first):
    """Whichever is imported first."""
    out = python(f"""
    import {first}, fusednorm
    from fusednorm.backends import cpu
    x = torch.randn(512, 1024)
    fusednorm.rms_norm(x)
    maps = {{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}}
    print(len(maps), os.path.realpath(cpu.openmp()) in map(os.path.realpath, maps))
    """)
    assert out == "1 True\n"


def test_the_team_follows_torch():
    """Counted as the threads that the process has: none is added at 1 thread, two are at 3."""
    out = python("""
    import fusednorm
    torch.set_num_threads(1)
    x, y = torch.zeros(512, 1024), torch.zeros(512, 1024)
    threads = lambda: len(os.listdir("/proc/self/task"))
    before = threads()
    fusednorm.rms_norm(x, out=y)
    alone = threads() - before
    torch.set_num_threads(3)
    fusednorm.rms_norm(x[:1].expand(512, 1024), out=y)
    many = threads() - before
    fusednorm.rms_norm(x[:8], out=y[:8])
    print(alone, many)
    """)
    assert out == "0 2\n"


FORKED = """
    import fusednorm
    from fusednorm.backends import cpu
    torch.set_num_threads(2)
    x = torch.randn(512, 1024)
    {before}
    child = os.fork()
    if child == 0:
        assert torch.get_num_threads() == 2
        fusednorm.rms_norm(x)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    fusednorm.rms_norm(x)
"""


@pytest.mark.parametrize("before", ["fusednorm.rms_norm(x)", "x + x", "x + x; fusednorm.rms_norm(x)"])
def test_a_forked_child_does_not_hang(before):
    """After threads of ours, of torch's, of both: the child has none of them."""
    assert python(FORKED.format(before=before)) == "0\n"


def test_data_loader_workers_do_not_hang():
    out = python("""
    import fusednorm
    torch.set_num_threads(2)
    class Rows(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return fusednorm.rms_norm(torch.full((64, 1024), i + 1.0))
    fusednorm.rms_norm(torch.randn(512, 1024))
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    print(sum(batch.sum().item() > 0 for batch in loader))
    """)
    assert out == "4\n"


def test_one_row_is_divided_among_threads():
    """Gates, log-probabilities and their gradients: each call may use one thread more than the one before."""
    out = python("""
    import fusednorm as f
    torch.set_num_threads(1)
    x, ids = torch.randn(1, 40_000), torch.tensor([3])
    logits = x.clone().requires_grad_()
    recorded = [f.log_softmax(logits), f.logsumexp(logits), f.selected_log_prob(logits, ids)]
    calls = [lambda: f.gelu(x), lambda: f.silu_and_mul(x, x), lambda: f.softcap(x, 30.0), lambda: f.log_softmax(x)]
    calls += [lambda: f.logsumexp(x), lambda: f.selected_log_prob_and_entropy(x, ids)]
    calls += [lambda y=y: y.backward(torch.ones_like(y)) for y in recorded]
    threads, before = lambda: len(os.listdir("/proc/self/task")), []
    for count, call in enumerate(calls, start=2):
        torch.set_num_threads(count)
        before.append(threads())
        call()
    print([after - before[0] for after in [*before, threads()]])
    """)
    assert out == f"{list(range(10))}\n"


def test_threads_with_small_stacks():
    """64 KiB, as Python may be asked to give them: every function, with optional steps, in float32 and in float64."""
    python(f"""
    import threading
    sys.path[:0] = {[str(TESTS), str(TESTS / "operations")]!r}
    import every_operation as every
    from every_operation import called, clones, function_of, without_outputs
    calls = [(function_of(name), without_outputs(operands)) for name, operands in every.FUNCTIONS.items()]
    calls += every.MORE.values()
    wide = lambda t: t.double() if t.is_floating_point() else t.clone()
    every_type = [(call, [clones(given), clones(given, wide)]) for call, given in calls]
    torch.set_num_threads(1)
    def run():
        for call, operands in every_type:
            for given in operands:
                for _ in range(2):  # the first call opens the fast path
                    try:
                        called(call, given)
                    except (TypeError, ValueError):  # no such call in float64
                        break
    threading.stack_size(64 * 1024)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    """)
