"""Times of log-probabilities on a GPU, beside torch's: 64 rows of 151,936 logits, an id in each.

    python -P benchmarks/gpu_log_prob.py cuda triton

Medians of 20 calls, after 5 others, each between two events, after 256 MB were written, so that logits are in
memory. Backward passes are timed alone. "GB/s": of two reads of the logits forward, of one read and one write backward.
"""

import statistics
import sys

import torch

import fusednorm

ROWS, SIZE = 64, 151_936


def milliseconds(call, *arguments, **more):
    """The median."""
    flush, times = torch.empty(2**26, device="cuda"), []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call(*arguments, **more)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def by_torch(logits, ids):
    """In float32, as trainers that want its precision have it."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def main():
    """Prints a line for each dtype and implementation."""
    torch.manual_seed(0)
    ids = torch.randint(SIZE, (ROWS,), device="cuda")
    ways = {"torch": (by_torch, "cuda"), "torch, compiled": (torch.compile(by_torch), "cuda")}
    ways |= {backend: (fusednorm.selected_log_prob, backend) for backend in sys.argv[1:]}
    print(torch.cuda.get_device_name(), torch.__version__)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(ROWS, SIZE, device="cuda").mul(3).to(dtype).requires_grad_()
        nbytes = 2 * logits.numel() * dtype.itemsize
        for name, (function, backend) in ways.items():
            with fusednorm.use_backend(backend):
                with torch.no_grad():
                    forward = milliseconds(function, logits, ids)
                lp = function(logits, ids)
                backward = milliseconds(torch.autograd.grad, lp, logits, torch.ones_like(lp), retain_graph=True)
            speeds = (f"{time:.3f} ms, {nbytes / time / 1e6:.0f} GB/s" for time in (forward, backward))
            print(f"{str(dtype)[6:]}, {name}: forward {next(speeds)}; backward {next(speeds)}")


if __name__ == "__main__":
    main()
