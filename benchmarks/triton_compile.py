"""What Triton makes of the kernels for each GPU, on a machine without any: registers, memory, and the code's shape.

    python -P benchmarks/triton_compile.py [--targets sm_90,gfx942] [--sizes 128,4096] [--dtypes bfloat16,float32]

Per kernel: warps per program; registers and bytes of stack (where registers are spilled to) per thread; bytes of shared
memory per program; the widest and the narrowest access to rows, in bytes; shuffles and barriers per thread.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from fusednorm.backends import triton_gpu, triton_host

TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (75, 80, 90, 100, 120)}
TARGETS |= {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx1100": GPUTarget("hip", "gfx1100", 32)}


def variants(dtype: torch.dtype, size: int, lanes: int) -> dict[str, triton_host.Variant]:
    """The kernels of both passes, all operands of one dtype."""
    forward = triton_gpu.forward_variant(dtype, dtype, dtype, dtype, False, size, False, True, False, 16, lanes)
    kind = (dtype, dtype, dtype, dtype, dtype, None, dtype, torch.float32, size, False, 16)
    return {"forward": forward, **triton_gpu.backward_variants(*kind, lanes)}


def nvidia(kernel) -> list[object]:
    """Registers, stack, widths of accesses, shuffles, barriers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    ptx = kernel.asm["ptx"]
    found = re.findall(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    widths = [int(count or 1) * int(bits) // 8 for count, bits in found]
    widths = [width for width in widths if width > 4] or widths  # a row's root is one float
    return [registers, stack, f"{max(widths)}/{min(widths)}", ptx.count("shfl.sync"), ptx.count("bar.sync")]


def amd(kernel) -> list[object]:
    """The same."""
    assembly = kernel.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly).group(1)
    spilled = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly).group(1))
    sizes = {"dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx4": 16, "b128": 16, "ushort": 2, "short": 2}
    found = re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", assembly)
    widths = [sizes.get(name, 2) for name in found]
    widths = [width for width in widths if width > 4] or widths
    shuffles = len(re.findall(r"ds_bpermute|ds_swizzle|v_\w+_dpp|v_permlane", assembly))
    return [registers, 4 * spilled, f"{max(widths)}/{min(widths)}", shuffles, assembly.count("s_barrier")]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--sizes", default="128,896,4096,7168,16384,65536")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    chosen = parser.parse_args()
    print("| target | dtype | N | kernel | warps | registers | stack | shared | access | shuffles | barriers |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in chosen.targets.split(","):
        target = TARGETS[name]
        for dtype in chosen.dtypes.split(","):
            for size in map(int, chosen.sizes.split(",")):
                for what, variant in variants(getattr(torch, dtype), size, target.warp_size).items():
                    kernel = triton_host.compiled(variant, target)
                    registers, stack, widths, *rest = (nvidia if target.backend == "cuda" else amd)(kernel)
                    cells = (name, dtype, size, what, variant.warps, registers, stack, kernel.metadata.shared, widths)
                    print("|", " | ".join(map(str, (*cells, *rest))), "|", flush=True)


if __name__ == "__main__":
    main()
