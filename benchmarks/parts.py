"""Times log-probabilities of a vocabulary in parts on two processes, exchanging sums and gathering rows.

    python -P benchmarks/parts.py

Prints, for each dtype and operation, the least times of forward, and of both ways, in ms.
"""

import tempfile
import time

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusednorm
from fusednorm.engine import run_log_prob
from fusednorm.torch_ops import parts_of_logits

ROWS, VOCABULARY, TIMES = 64, 151936, 9
NAMES = ("log_softmax", "logsumexp", "selected_log_prob", "selected_log_prob_and_entropy")


def nothing(*_, **__):
    """In place of a function whose results are computed in another way where it has none."""


#: Of each way, the functions that it lacks.
WAYS = {
    "gathering": [(parts_of_logits, "where_of")],
    "exchange, torch's operations": [(run_log_prob, "sums_of_segments"), (parts_of_logits, "gradient")],
    "exchange": [],
}


def least(call):
    """The least time of this rank, in ms; ranks begin together."""
    times = []
    for _ in range(TIMES):
        dist.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def on_rank(rank, ranks, store):
    """Measures on one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    ids = distribute_tensor(torch.arange(ROWS) * (VOCABULARY // ROWS), mesh, [Replicate()])
    for dtype in (torch.bfloat16, torch.float32):
        logits = distribute_tensor(torch.randn(ROWS, VOCABULARY).to(dtype), mesh, [Shard(1)]).requires_grad_()
        for name in NAMES:

            def forward(name=name, logits=logits):
                found = getattr(fusednorm, name)(*((logits, ids) if name.startswith("selected") else (logits,)))
                return found if isinstance(found, tuple) else (found,)

            def both(forward=forward, logits=logits):
                results = forward()
                torch.autograd.grad(results, logits, [torch.ones_like(t) for t in results])

            for way, lacks in WAYS.items():
                kept = [(module, key, getattr(module, key)) for module, key in lacks]
                for module, key in lacks:
                    setattr(module, key, nothing)
                with torch.no_grad():
                    times = least(forward)
                times = times, least(both)
                for module, key, function in kept:
                    setattr(module, key, function)
                if rank == 0:
                    print(f"{str(dtype)[6:]:10}{name:32}{way:30}{times[0]:9.1f}{times[1]:9.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(on_rank, (2, f"{tempfile.mkdtemp()}/store"), nprocs=2)
