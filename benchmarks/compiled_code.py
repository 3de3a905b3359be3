"""What NVRTC or Triton makes of the kernels for each GPU or processor, which need not be here, and how long that takes.

    pip install -c constraints.txt . triton cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    python -P benchmarks/compiled_code.py cuda|triton [--targets sm_90,gfx942] [--sizes 128,4096] [--dtypes bfloat16]
    python -P benchmarks/compiled_code.py triton_cpu [--llc llc-22]    # on a machine that has a Triton-CPU

Per kernel: threads or warps of a block; registers and bytes of stack (where registers are spilled to) per thread; bytes
of shared memory per block; the widest and the narrowest access to rows, in bytes; shuffles and barriers per thread;
milliseconds of the compilation. For cuda also FFMA, the fused multiplications that only divisions and roots have, and
all instructions.

For triton_cpu: instructions, branches (a tile has 128 elements: as many branches as that would be one for each), calls,
fused multiplications and additions, and registers that are spilled to the stack. Triton's own LLVM compiles for this
machine only, so `llc`, of the same version, compiles the intermediate language that Triton keeps.
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

from fusednorm.backends.kernel_keys import kind_of
from fusednorm.calls.call import Backward, Flags, Forward, operation_of

COLUMNS = ("registers", "stack", "shared", "access", "shuffles", "barriers")


def usage(program, file, **environment):
    """Registers, stack and shared memory, which cuobjdump prints."""
    run = [program, "-res-usage", file]
    text = subprocess.run(run, capture_output=True, text=True, check=True, **environment).stdout
    return re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text).groups()


def range_of(widths):
    """The widest and the narrowest."""
    return f"{max(widths)}/{min(widths)}"


def kinds(dtype, size, alignment):
    """The kinds of both passes, all operands of one dtype."""
    x, rstd, none = torch.zeros(1, size, dtype=dtype), torch.zeros(1), (0, 0)
    weight, operation = x[0], operation_of(x, x, x[0], Flags())
    forward = Forward(x, x, weight, x, x, None, operation, 1, 1, (none,) * 4, 1e-6, 0.0)
    backward = Backward(x, x, x, rstd, weight, x, None, weight, operation, 1, 1, (none,) * 3, 0.0)
    return tuple(kind_of(call)._replace(alignment=alignment) for call in (forward, backward))


class Cuda:
    """Kernels that NVRTC compiles."""

    targets = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
    sizes = "128,4096,7168,65536"
    columns = ("threads", *COLUMNS, "FFMA", "instructions")

    def kernels(self, dtype, size, target):
        """The kernels of both passes, all operands of one dtype."""
        from fusednorm.backends.cuda import choice as cuda_kernels

        number = int(target.removeprefix("sm_"))
        forward, backward = kinds(dtype, size, 32)
        return {
            "forward": cuda_kernels.forward_variant(forward, number),
            **cuda_kernels.backward_variants(backward, number),
        }

    def compiled(self, variant, target):
        """Machine code."""
        from fusednorm.backends.cuda import compiler as cuda_compiler

        return cuda_compiler.compiled(variant, int(target.removeprefix("sm_")))

    def cells(self, variant, code, target):
        """The columns."""
        nvidia = Path(importlib.util.find_spec("nvidia").submodule_search_locations[0])
        cuobjdump, nvdisasm = (next(nvidia.rglob(f"bin/{name}")) for name in ("cuobjdump", "nvdisasm"))
        environment = {"env": os.environ | {"PATH": f"{nvdisasm.parent}{os.pathsep}{os.environ['PATH']}"}}
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            registers, stack, shared = usage(cuobjdump, file.name, **environment)
            run = [cuobjdump, "-sass", file.name]
            sass = subprocess.run(run, capture_output=True, text=True, check=True, **environment).stdout
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass, re.MULTILINE)
        accesses = [i for i in instructions if i.startswith(("LDG", "STG"))]
        widths = {int(found[1]) // 8 if (found := re.search(r"\.U?(16|64|128|256)\b", i)) else 4 for i in accesses}
        shuffles, barriers, fused = (
            sum(i.startswith(starts) for i in instructions) for starts in ("SHFL", ("BAR", "UCGABAR_WAIT"), "FFMA")
        )
        return variant.threads, registers, stack, shared, range_of(widths), shuffles, barriers, fused, len(instructions)


class Triton:
    """Kernels that Triton compiles."""

    targets = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100")
    sizes = "128,896,4096,7168,16384,65536"
    columns = ("warps", *COLUMNS)

    def target(self, name):
        """As Triton names it."""
        from triton.backends.compiler import GPUTarget

        if name.startswith("sm_"):
            return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)

    def kernels(self, dtype, size, target):
        """The kernels of both passes, all operands of one dtype."""
        from fusednorm.backends.triton import gpu as triton_gpu

        lanes = self.target(target).warp_size
        forward, backward = kinds(dtype, size, 16)
        return {"forward": triton_gpu.forward_variant(forward, lanes), **triton_gpu.backward_variants(backward, lanes)}

    def compiled(self, variant, target):
        """What Triton makes of it."""
        from fusednorm.backends.triton import host as triton_host

        return triton_host.compiled(variant, self.target(target))

    def cells(self, variant, kernel, target):
        """The columns."""
        found = self.nvidia(kernel) if target.startswith("sm_") else self.amd(kernel)
        registers, stack, widths, *rest = found
        widths = [width for width in widths if width > 4] or widths  # a row's rstd is one float
        return variant.warps, registers, stack, kernel.metadata.shared, range_of(widths), *rest

    def nvidia(self, kernel):
        """Registers, stack, widths of accesses, shuffles, barriers."""
        import triton

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            registers, stack, _ = usage(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", file.name)
        ptx = kernel.asm["ptx"]
        found = re.findall(r"\b(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", ptx)
        widths = [int(count or 1) * int(bits) // 8 for count, bits in found]
        return registers, stack, widths, ptx.count("shfl.sync"), ptx.count("bar.sync")

    def amd(self, kernel):
        """The same."""
        assembly = kernel.asm["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly).group(1)
        spilled = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly).group(1))
        sizes = {"dword": 4, "b32": 4, "dwordx2": 8, "b64": 8, "dwordx4": 16, "b128": 16, "ushort": 2, "short": 2}
        widths = [sizes.get(name, 2) for name in re.findall(r"(?:global|buffer)_(?:load|store)_(\w+)", assembly)]
        shuffles = len(re.findall(r"ds_bpermute|ds_swizzle|v_\w+_dpp|v_permlane", assembly))
        return registers, 4 * spilled, widths, shuffles, assembly.count("s_barrier")


#: Of lines of assembly language.
BEGINNINGS = {
    "instructions": r"",
    "branches": r"j[a-z]+\s|b\s|b\.|cbn?z|tbn?z",
    "calls": r"call|bl\s|blr\s",
    "fused": r"vfn?m|fn?m(la|ls|add|sub)|bf(mla|dot)",
    "spills": r".*Spill$",
}


class TritonCpu(Triton):
    """Kernels that Triton-CPU compiles."""

    targets = ("haswell", "skylake-avx512", "cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-v2")
    sizes = "4096"
    columns = tuple(BEGINNINGS)

    def target(self, name):
        """This machine."""
        from triton.runtime.driver import driver

        return driver.active.get_current_target()

    def kernels(self, dtype, size, target):
        """The kernels of both passes, all operands of one dtype."""
        from fusednorm.backends.triton import cpu as triton_cpu

        forward, backward = kinds(dtype, size, 1)
        forward = forward._replace(rstd=True)
        return {"forward": triton_cpu.forward_variant(forward), **triton_cpu.backward_variants(backward)}

    def cells(self, variant, kernel, target):
        """The columns."""
        portable = re.sub(r'target (triple|datalayout) = .*|"target-(cpu|features)"="[^"]*"', "", kernel.asm["llir"])
        architecture = "x86_64" if target in self.targets[:2] else "aarch64"
        machine = (f"-mtriple={architecture}-unknown-linux-gnu", f"-mcpu={target}")
        run = [self.llc, "-O3", *machine, "-fp-contract=off", "-o", "-"]
        assembly = subprocess.run(run, input=portable, capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^\t([a-z]\S*(?:\s.*)?)$", assembly, re.MULTILINE)
        return [sum(bool(re.match(begins, line)) for line in lines) for begins in BEGINNINGS.values()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "triton", "triton_cpu"))
    parser.add_argument("--targets")
    parser.add_argument("--sizes")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--llc", default="llc-22")
    given = parser.parse_args()
    compiler = {"cuda": Cuda, "triton": Triton, "triton_cpu": TritonCpu}[given.backend]()
    compiler.llc = given.llc
    print("| target | dtype | N | kernel |", " | ".join((*compiler.columns, "ms")), "|")
    print("|---|---|---:|---|" + "---:|" * (len(compiler.columns) + 1))
    times = []
    for target in given.targets.split(",") if given.targets else compiler.targets:
        for dtype in given.dtypes.split(","):
            for size in map(int, (given.sizes or compiler.sizes).split(",")):
                for name, variant in compiler.kernels(getattr(torch, dtype), size, target).items():
                    begin = time.perf_counter()
                    code = compiler.compiled(variant, target)
                    times.append(round(1e3 * (time.perf_counter() - begin)))
                    cells = (target, dtype, size, name, *compiler.cells(variant, code, target), times[-1])
                    print("|", " | ".join(map(str, cells)), "|", flush=True)
    print(f"compiled: median {statistics.median(times)} ms")


if __name__ == "__main__":
    main()
