"""What NVRTC makes of the CUDA kernels, for GPUs that need not be here, and how long that takes.

    pip install -c constraints.txt . cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    python -P benchmarks/cuda_compile.py [--targets 75,80,90] [--sizes 128,4096]

"ms" is the compilation; "stack" what registers would be spilled to, in bytes per thread; "access" the widest and the
narrowest access to rows, in bytes; FFMA fused multiplications, which only divisions and roots have.
"""

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from fusednorm.backends import cuda

SIZES = "128,4096,7168,65536"
TARGETS = "75,80,86,89,90,100,120"


def tool(name):
    """A program of NVIDIA's wheels."""
    (nvidia,) = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(path for path in Path(nvidia).rglob(name) if path.is_file())


def printed(option, file):
    """What cuobjdump says of a file."""
    environment = {**os.environ, "PATH": f"{tool('nvdisasm').parent}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run([tool("cuobjdump"), option, file], env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def kernels(dtype, size, target):
    """The kernels of both passes, by what they do."""
    forward = cuda.forward_variant(dtype, dtype, dtype, dtype, False, size, False, True, False, 32, target)
    kind = (dtype, dtype, dtype, dtype, dtype, None, dtype, torch.float32, size, False, 32)
    return {"forward": forward, **cuda.backward_variants(*kind, target)}


def row(variant, target):
    """The cells of the table for one kernel."""
    begin = time.perf_counter()
    code = cuda.compiled(variant, target)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        registers, stack, shared = re.search(
            r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", printed("-res-usage", file.name)
        ).groups()
        sass = printed("-sass", file.name)
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass, re.MULTILINE)
    accesses = [i for i in instructions if i.startswith(("LDG", "STG"))]
    widths = {int(found[1]) // 8 if (found := re.search(r"\.U?(16|64|128|256)\b", i)) else 4 for i in accesses}
    count = lambda *starts: sum(i.startswith(starts) for i in instructions)  # noqa: E731
    return (
        variant.threads,
        registers,
        stack,
        shared,
        f"{max(widths)}/{min(widths)}",
        count("SHFL"),
        count("BAR", "UCGABAR_WAIT"),
        count("FFMA"),
        len(instructions),
        round(milliseconds),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--sizes", default=SIZES)
    given = parser.parse_args()
    print("NVRTC", ".".join(map(str, cuda._compiler_version())))
    names = ["threads", "registers", "stack", "shared", "access", "shuffles", "barriers", "FFMA", "instructions", "ms"]
    print("| target | dtype | N | kernel |", " | ".join(names), "|\n|---|---|---:|---|" + "---:|" * len(names))
    times = []
    for target in map(int, given.targets.split(",")):
        for dtype in (torch.bfloat16, torch.float32):
            for size in map(int, given.sizes.split(",")):
                for name, variant in kernels(dtype, size, target).items():
                    cells = row(variant, target)
                    times.append(cells[-1])
                    start = (f"sm_{target}", str(dtype)[6:], size, name)
                    print("|", " | ".join(map(str, (*start, *cells))), "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.bin"
        cuda._write(path, code := cuda.compiled(kernels(torch.bfloat16, 4096, 90)["forward"], 90))
        begin = time.perf_counter()
        for _ in range(100):
            assert cuda._read(path) == code
        read = (time.perf_counter() - begin) / 100
    print(f"compiled: median {statistics.median(times)} ms; read from the cache and verified: {1e3 * read:.2f} ms")


if __name__ == "__main__":
    main()
