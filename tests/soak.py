"""Makes calls of every kind for a long time, and watches the memory of the process.

    python tests/soak.py [--rows 1e8] [--most 16]

Decode and prefill shapes, in place and into new tensors, forward and backward, from this thread, from threads that end,
and from threads that stay; rows are counted. Every tenth of the way it prints the memory that the process holds
(resident, in MiB). Status 1 if it holds more at the end than after the first tenth by more than ``--most`` MiB.
"""

import argparse
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fusednorm


def resident():
    """Bytes of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def once():
    """Some calls of every kind; returns their rows."""
    rows = 0
    for dtype, shape, times in (
        (torch.bfloat16, (1, 512), 200),  # where a call leaks, it is the number of calls that shows it
        (torch.float32, (64, 512), 20),
        (torch.float16, (4096, 64), 8),
    ):
        x, residual = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
        weight = torch.ones(shape[1], dtype=dtype)
        for _ in range(times):
            fusednorm.fused_add_rms_norm_(x, residual, weight)
            fusednorm.rms_norm(x, weight, out=residual)
            fusednorm.fused_add_rms_norm(x, residual, weight)
            rows += 3 * shape[0]
        fusednorm.rms_norm(x.t().contiguous().t(), weight)
        weight.requires_grad_()
        y, total = fusednorm.fused_add_rms_norm(x.requires_grad_(), residual, weight)
        torch.autograd.grad((y, total), (x, weight), (y.detach(), total.detach()))
        try:
            fusednorm.rms_norm(x.detach(), weight.detach()[1:])
        except ValueError:  # a refusal must give back what it took, too
            rows += 3 * shape[0]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--most", type=float, default=16, help="MiB that may be added after the first tenth")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    begin, done, held = time.monotonic(), 0, []
    with ThreadPoolExecutor(2) as pool:
        for tenth in range(1, 11):
            while done < asked.rows * tenth / 10:
                staying = [pool.submit(once) for _ in range(2)]
                done += once() + sum(future.result() for future in staying)
                ending = threading.Thread(target=once)
                ending.start()
                ending.join()
            held.append(resident() / 2**20)
            print(f"{done:.2e} rows, {time.monotonic() - begin:.0f} s: {held[-1]:.1f} MiB", flush=True)
    sys.exit(held[-1] - held[0] > asked.most)


if __name__ == "__main__":
    main()
