"""Many threads, processes, signals and imports at once: the same bits, whole results, and no growth of memory."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from processes import printed_by, python

import fusednorm
from fusednorm.backends import reference
from fusednorm.calls import process

HERE = Path(__file__).parents[1]


OPERANDS = """
import random, threading, torch, fusednorm
def operands(i):
    generator = torch.Generator().manual_seed(i)
    hidden, rows = 64 * (1 + i % 7), (1, 5, 300)[i % 3]
    dtype = (torch.bfloat16, torch.float16, torch.float32)[i % 3]
    return [torch.randn(s, generator=generator).to(dtype) for s in ((rows, hidden), (rows, hidden), (hidden,))]
def results(i):
    x, residual, weight = operands(i)
    y, total = fusednorm.fused_add_rms_norm(x, residual, weight)
    x.requires_grad_(), weight.requires_grad_()
    gradients = torch.autograd.grad(fusednorm.fused_add_rms_norm(x, residual, weight), (x, weight), (y, total))
    x, residual = x.detach(), residual
    fusednorm.fused_add_rms_norm_(x, residual, weight.detach())
    assert torch.equal(x, y) and torch.equal(residual, total)
    return [y, total, *gradients]
"""


def test_64_threads():
    """All begin at once, each with another number of threads below it, which it changes between calls."""
    out = printed_by(
        OPERANDS
        + """
    wanted, wrong, start = [results(i) for i in range(21)], [], threading.Barrier(64)
    def work(thread):
        start.wait()
        for i in range(thread, thread + 21):
            torch.set_num_threads(1 + i % 3)
            if not all(map(torch.equal, results(i % 21), wanted[i % 21])):
                wrong.append(i)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(len(threads), wrong)
    """.replace("\n    ", "\n")
    )
    assert out == "64 []\n"


def test_a_fork_before_the_first_call():
    """Torch has threads by then, the child none; the library is loaded only in the child."""
    if not hasattr(os, "register_at_fork"):
        assert process.forked is False
        return
    out = printed_by("""
    import os, sys, torch, fusednorm
    torch.set_num_threads(2)
    x = torch.ones(512, 1024)
    x + x
    assert "fusednorm._cpu" not in sys.modules
    child = os.fork()
    if child == 0:
        fusednorm.rms_norm(x)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    """)
    assert out == "0\n"


def test_spawned_processes(tmp_path):
    """torch.multiprocessing's: they write to memory that all share."""
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent("""
    import torch, fusednorm
    def work(rank, x, residual):
        fusednorm.fused_add_rms_norm_(x[rank], residual[rank], torch.ones(x.shape[-1]))
    if __name__ == "__main__":
        x, residual = torch.rand(2, 40, 512), torch.rand(2, 40, 512)
        y, total = fusednorm.fused_add_rms_norm(x, residual, torch.ones(512))
        x.share_memory_(), residual.share_memory_()
        torch.multiprocessing.spawn(work, (x, residual), nprocs=2)
        print(torch.equal(x, y), torch.equal(residual, total))
    """)
    )
    done = python(script)
    assert (done.stdout, done.returncode) == ("True True\n", 0), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there are no interval timers")
def test_signals_during_calls():
    """A handler in Python that runs every millisecond changes nothing."""
    out = printed_by(
        OPERANDS
        + """
    import signal, time
    wanted, seen, end = [results(i) for i in range(21)], [], time.monotonic() + 0.5
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    wrong = 0
    while len(seen) < 20 or time.monotonic() < end:
        i = random.randrange(21)
        wrong += not all(map(torch.equal, results(i), wanted[i]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(wrong)
    """.replace("\n    ", "\n")
    )
    assert out == "0\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no interval timers")
@pytest.mark.parametrize("columns", [512, 513], ids=["fast path", "Python"])
def test_an_interrupt_leaves_a_call_made_or_not_made(columns):
    """A hundred times: x and the residual are both as before or both written, and what is written has been counted."""
    out = printed_by(f"""
    import random, signal, torch, fusednorm
    before = torch.rand(700, {columns}), torch.rand(700, {columns})
    after = fusednorm.fused_add_rms_norm(before[0][:, :512], before[1][:, :512])
    fusednorm.fused_add_rms_norm_(before[0][:, :512].clone(), before[1][:, :512].clone())
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    seen, broken = set(), []
    for _ in range(100):
        x, residual = (t.clone()[:, :512] for t in before)
        version = x._version
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 4e-4))
            while True:
                fusednorm.fused_add_rms_norm_(x, residual)
                x, residual = (t.clone()[:, :512] for t in before)
                version = x._version
        except KeyboardInterrupt:
            pass
        state = [torch.equal(x, before[0][:, :512]), torch.equal(residual, before[1][:, :512])]
        state += [torch.equal(x, after[0]), torch.equal(residual, after[1])]
        if state not in ([True, True, False, False], [False, False, True, True]):
            broken.append(state)
        if state[2] and not x._version > version:
            broken.append("not counted")
        seen.add(state[0])
    print(broken)
    """)
    assert out == "[]\n"


def test_what_an_interrupted_call_may_have_written_is_counted(monkeypatch):
    """The interrupt comes as soon as the backend has written, before anything else can happen."""
    x = torch.rand(3, 16)[:, :8]

    def interrupted(call):
        write(call)
        raise KeyboardInterrupt

    with fusednorm.use_backend("reference"):
        write = reference.forward
        monkeypatch.setattr(reference, "forward", interrupted)
        version = x._version
        with pytest.raises(KeyboardInterrupt):
            fusednorm.rms_norm_(x)
    assert x._version > version + 1  # once by torch, in the reference itself


@pytest.mark.parametrize("order", [("numpy", "fusednorm", "torch"), ("fusednorm", "numpy", "torch")], ids="-".join)
def test_import_order(order):
    """NumPy, whose linear algebra has threads of its own, before fusednorm and after."""
    code = f"""
    import {", ".join(order)}
    a = numpy.ones((300, 300)) @ numpy.ones((300, 300))
    torch.set_num_threads(2)
    with fusednorm.use_backend("cpu"):
        y = fusednorm.rms_norm(torch.ones(300, 300))
    with fusednorm.use_backend("reference"):
        print(a[0, 0], torch.equal(y, fusednorm.rms_norm(torch.ones(300, 300))))
    """
    assert printed_by(code, fresh=True) == "300.0 True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_memory_does_not_grow():
    """Two million rows, with refusals and gradients among them; `tox -e soak` takes fifty times as many."""
    done = python(HERE / "soak.py", "--rows", "2e6")
    assert done.returncode == 0, done.stdout + done.stderr
