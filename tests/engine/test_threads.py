"""One OpenMP runtime, which is torch's, and children that never hang."""

import os
import subprocess
import sys
import textwrap

import pytest

from fusednorm.backends import cpu

pytestmark = pytest.mark.skipif(cpu.openmp() == "", reason="torch has no OpenMP runtime here, so there are no threads")


def python(code):
    """Runs a program; one that hangs is killed, which fails the test."""
    program = "import os, sys, torch\n" + textwrap.dedent(code)
    run = [sys.executable, "-P", "-c", program]
    environment = {k: v for k, v in os.environ.items() if k not in ("FUSEDNORM_BACKEND", "OMP_NUM_THREADS")}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
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
