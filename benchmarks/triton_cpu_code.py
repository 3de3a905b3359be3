"""What Triton-CPU and LLVM make of the kernels for each kind of processor, on any machine that has a Triton-CPU.

    python -P benchmarks/triton_cpu_code.py [--llc llc-22] [--dtypes bfloat16,float16,float32]

Triton's own LLVM compiles for this machine only, so the code that it gives to the assembler is made again by `llc`, of
the same version as Triton's LLVM, from the intermediate language that Triton keeps. Per kernel: instructions, branches
(a tile has 128 elements: as many branches as that would be one for each), calls, fused multiplications and additions,
and registers that are spilled to the stack.
"""

from __future__ import annotations

import argparse
import re
import subprocess

import torch
from triton.runtime.driver import driver

from fusednorm.backends.kernel_keys import BackwardKind, ForwardKind
from fusednorm.backends.triton import cpu as triton_cpu
from fusednorm.backends.triton import host as triton_host

#: A processor as LLVM calls it, and what it stands for.
PROCESSORS = {
    "haswell": ("x86_64", "AVX2"),
    "skylake-avx512": ("x86_64", "AVX-512"),
    "cortex-a72": ("aarch64", "NEON"),
    "neoverse-n1": ("aarch64", "NEON, float16"),
    "neoverse-v1": ("aarch64", "SVE 256, bfloat16"),
    "neoverse-v2": ("aarch64", "SVE2 128, bfloat16"),
}


def code(llvm: str, processor: str, llc: str) -> list[str]:
    """The instructions that LLVM makes for a processor."""
    architecture, _ = PROCESSORS[processor]
    portable = re.sub(r'target (triple|datalayout) = .*|"target-(cpu|features)"="[^"]*"', "", llvm)
    target = (f"-mtriple={architecture}-unknown-linux-gnu", f"-mcpu={processor}")
    run = [llc, "-O3", *target, "-fp-contract=off", "-o", "-"]
    assembly = subprocess.run(run, input=portable, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\t([a-z]\S*(?:\s.*)?)$", assembly, re.MULTILINE)


def counts(lines: list[str]) -> list[int]:
    """Instructions, branches, calls, fused operations, spilled registers."""
    patterns = (
        r"j[a-z]+\s|b\s|b\.|cbn?z|tbn?z",
        r"call|bl\s|blr\s",
        r"vfn?m|fn?m(la|ls|add|sub)|bf(mla|dot)",
        r".*Spill$",
    )
    return [len(lines), *(sum(bool(re.match(pattern, line)) for line in lines) for pattern in patterns)]


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llc", default="llc-22")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    arguments = parser.parse_args()
    target = driver.active.get_current_target()
    print("| processor | dtype | kernel | instructions | branches | calls | fused | spills |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for dtype in arguments.dtypes.split(","):
        t = getattr(torch, dtype)
        forward = ForwardKind(*[t] * 5, 4096, True, False, True, False, 1)
        backward = BackwardKind(*[t] * 5, None, t, torch.float32, 4096, False, 1)
        variants = {"forward": triton_cpu.forward_variant(forward), **triton_cpu.backward_variants(backward)}
        for kernel, variant in variants.items():
            llvm = triton_host.compiled(variant, target).asm["llir"]
            for processor, (_, what) in PROCESSORS.items():
                found = counts(code(llvm, processor, arguments.llc))
                print(f"| {processor} ({what}) | {dtype} | {kernel} | {' | '.join(map(str, found))} |", flush=True)


if __name__ == "__main__":
    main()
