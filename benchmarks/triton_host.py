"""What a call costs before Triton's launcher is reached, with a launcher that does nothing: no GPU is needed.

    python -P benchmarks/triton_host.py

Three ways to the same launch of the same kernel, in turns, in microseconds per call: the public function, the backend
alone (which looks the kernel up and lays out its arguments), and Triton's binder, ``function[grid](...)``, given the
same arguments. The launcher's own time, about a microsecond on a real machine, comes on top of each.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import fusednorm
from fusednorm.backends import triton_gpu, triton_host

ROUNDS, CALLS = 15, 2000


class Nothing:
    """Triton's launcher, that launches nothing."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        pass


def stub() -> SimpleNamespace:
    """A driver of an H100 that is not there."""
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 32, 0, 1024),
        unload_module=lambda *_: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Nothing,
        utils=utils,
    )


def main() -> None:
    """Measures and prints."""
    torch.set_grad_enabled(False)
    driver.set_active(stub())
    triton_gpu.DEVICES = ("cpu",)
    x, residual, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 4096), (1, 4096), (4096,)))
    variant = triton_gpu.forward_variant(*[torch.bfloat16] * 4, False, 4096, False, True, False, 16, 32)
    constants = variant.all_constants()

    def ours() -> None:
        fusednorm.fused_add_rms_norm_(x, residual, weight)

    def backend() -> None:
        triton_gpu.forward(x, residual, weight, x, residual, None, 1, 4096, *[4096] * 4, 1e-6, 0.0, True, False)

    def bound() -> None:
        variant.function[(1,)](
            x, residual, weight, x, residual, None, *[4096] * 4, 1, 1e-6, 0.0,
            **constants, num_warps=variant.warps, enable_fp_fusion=False,
        )  # fmt: skip

    with fusednorm.use_backend("triton"):
        ways = {"fused_add_rms_norm_": ours, "the backend alone": backend, "Triton's binder": bound}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                way()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    way()
                times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    print(f"torch {torch.__version__}, Triton {__import__('triton').__version__}, 1 x 4096 bfloat16 in place")
    for name, values in times.items():
        print(f"  {name:22} {statistics.median(values):6.2f} us")
    launches = triton_gpu._host.ways
    assert len(launches) == 1, "the kernel was compiled more than once"
    assert triton_host.INTERPRETED is False


if __name__ == "__main__":
    main()
