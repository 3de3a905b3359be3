"""What the hardware counts while kernels run: ours, Triton's and a naive one, by Nsight Compute.

    python -P benchmarks/gpu_profile.py [--rows 4096] [--hidden-size 4096] [--json results.json]
    python -P benchmarks/gpu_profile.py --dry-run     # reads a table as Nsight Compute prints it: measures nothing

It takes a GPU whose counters can be read, and `ncu` on the PATH. Each kernel runs once after one warm-up, with the
clocks left alone: the columns count and compare, they do not time. The naive kernel is the textbook's: a block per row,
one element at a time, a tree in shared memory, the row read from global memory twice.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import subprocess
import sys
from typing import Any

import torch

import fusednorm

#: Columns, and the counters behind them.
METRICS = {
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sectors loaded": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "sectors stored": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "warps active %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}

NAIVE = r"""
__device__ float wide(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ unsigned short narrow(float value) {
    unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
extern "C" __global__ void naive(const unsigned short* x, unsigned short* residual, const unsigned short* weight,
                                 unsigned short* out, int n, float eps) {
    __shared__ float sums[256];
    x += (long long)blockIdx.x * n, residual += (long long)blockIdx.x * n, out += (long long)blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 256) {
        residual[i] = narrow(wide(x[i]) + wide(residual[i]));
        sum += wide(residual[i]) * wide(residual[i]);
    }
    sums[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    float root = rsqrtf(sums[0] / n + eps);
    for (int i = threadIdx.x; i < n; i += 256) out[i] = narrow(wide(residual[i]) * root * wide(weight[i]));
}
"""

#: What `ncu --csv --page raw` prints: names, units, then a line per kernel.
SAMPLE = "\n".join(
    (
        ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *METRICS.values())),
        ",".join('""' for _ in range(len(METRICS) + 2)),
        '"0","forward","90.5","1,048,576","1,048,576","0","1,703,936","64","88.1"',
        '"1","naive","71.0","4,194,304","2,097,152","12","20,971,520","24","93.0"',
    )
)


def naive_kernel() -> Any:
    """The naive kernel, compiled, as a function of tensors."""
    from cuda.bindings import driver, nvrtc

    _, program = nvrtc.nvrtcCreateProgram(NAIVE.encode(), b"naive.cu", 0, [], [])
    major, minor = torch.cuda.get_device_capability()
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    if status:
        sys.exit(f"the naive kernel does not compile: {status.name}")
    code = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, code)
    module = driver.cuModuleLoadData(bytes(code))[1]
    function = driver.cuModuleGetFunction(module, b"naive")[1]

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, residual, weight, out)]
        values = [*pointers, ctypes.c_int(x.shape[1]), ctypes.c_float(1e-6)]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = torch.cuda.current_stream().cuda_stream
        launch = (x.shape[0], 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(addresses), 0)
        (status,) = driver.cuLaunchKernel(function, *launch)
        if status:
            sys.exit(f"the naive kernel cannot be launched: {status.name}")

    return run


def kernels(rows: int, hidden_size: int) -> None:
    """Runs every kernel twice: once to compile it, once to be counted."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    x, residual, weight = draw(rows, hidden_size), draw(rows, hidden_size), draw(hidden_size)
    out, total = torch.empty_like(x), torch.empty_like(x)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
    naive = naive_kernel()
    for counted in (False, True):
        if counted:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for backend in (b.name for b in fusednorm.backends() if b.available and b.name in ("cuda", "triton")):
            with fusednorm.use_backend(backend):
                fusednorm.fused_add_rms_norm(x, residual, weight, out=out, residual_out=total)
                outputs = fusednorm.fused_add_rms_norm(*leaves)
                torch.autograd.grad(outputs, leaves, [x, residual])
        naive(x, residual.clone(), weight, out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def table(text: str) -> list[dict[str, str]]:
    """The kernels of ours, and the naive one, in what `ncu --csv --page raw` printed."""
    lines = text[text.index('"ID"') :].splitlines()
    found = []
    for line in list(csv.DictReader(lines))[1:]:  # the first has the units
        row = {column: line[metric] for column, metric in METRICS.items()}
        found.append({"kernel": line["Kernel Name"].partition("(")[0], **row})
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--json")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--counted", action="store_true", help="run the kernels; what this program starts ncu on")
    given = parser.parse_args()
    if given.counted:
        kernels(given.rows, given.hidden_size)
        return
    text = SAMPLE
    if not given.dry_run:
        if not torch.cuda.is_available():
            sys.exit("there is no GPU; --dry-run shows how the table is read")
        ncu = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
        # All kernels of torch's are left out: copies, random numbers.
        wanted = "regex:forward|backward|weight|add_blocks|naive"
        mine = [sys.executable, "-P", __file__, "--counted"]
        size = ["--rows", str(given.rows), "--hidden-size", str(given.hidden_size)]
        command = [*ncu, "--kernel-name", wanted, "--metrics", ",".join(METRICS.values()), *mine, *size]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or '"ID"' not in done.stdout:
            sys.exit(f"Nsight Compute failed:\n{done.stdout}{done.stderr}")
        text = done.stdout
    rows = table(text)
    print("a dry run: its figures mean nothing" if given.dry_run else torch.cuda.get_device_name())
    print("| kernel |", " | ".join(METRICS), "|\n|---|" + "---:|" * len(METRICS))
    for row in rows:
        print("|", " | ".join(row.values()), "|")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
