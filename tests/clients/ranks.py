"""Tests that run on every rank of a process group, in processes that are started once and serve many tests."""

import atexit
import functools
import importlib
import inspect
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

SECONDS = 120  # that a rank may take over one test, on a machine that is busy


def serve(rank, world, backend, store, pipe):
    """Runs what the pipe asks for until it ends, and answers with None or with the traceback."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            getattr(importlib.import_module(module), name).on_each_rank(**arguments)
            pipe.send(None)
        except BaseException:  # whatever a test raises goes to the process that reports it
            pipe.send(traceback.format_exc())


class Group:
    """The processes of one group; with the "fake" backend only the first rank is one."""

    def __init__(self, world, backend):
        store = Path(tempfile.mkdtemp()) / "store"
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(1 if backend == "fake" else world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, *request):
        """The tracebacks of the ranks that failed."""
        for pipe in self._pipes:
            pipe.send(request)
        answers = [pipe.recv() if pipe.poll(SECONDS) else f"no answer in {SECONDS} s" for pipe in self._pipes]
        return [f"rank {rank}:\n{answer}" for rank, answer in enumerate(answers) if answer is not None]

    def stop(self):
        for process in self._processes:
            process.kill()


GROUPS = {}


@atexit.register
def stop():
    while GROUPS:
        GROUPS.popitem()[1].stop()


def on_ranks(*worlds, backend="gloo"):
    """Makes a function a test that runs on every rank of groups of these sizes."""

    def decorate(function):
        @pytest.mark.parametrize("world", worlds)
        @functools.wraps(function)
        def test(world, **arguments):
            group = GROUPS.get((world, backend)) or GROUPS.setdefault((world, backend), Group(world, backend))
            failures = group.run(Path(function.__code__.co_filename).stem, function.__name__, arguments)
            if failures:
                GROUPS.pop((world, backend)).stop()  # ranks that wait for one that failed serve no other test
                pytest.fail("\n".join(failures), pytrace=False)

        signature = inspect.signature(function)
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[world, *signature.parameters.values()])
        test.on_each_rank = function
        return test

    return decorate
