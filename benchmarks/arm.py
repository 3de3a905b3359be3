"""What the AArch64 kernels cost, without AArch64 hardware: instructions counted, cycles modelled.

    python benchmarks/arm.py [--llvm-mca llvm-mca-19]

First table: instructions per element that an emulated processor executes, for rows of 4096 elements with x, residual,
weight and outputs of one dtype; what a call costs besides its rows is taken off. These figures repeat.

Second table: cycles per element of the two hot loops (the sum with the residual, and the scaling) by llvm-mca's models
of processors, with every access in the first-level cache; after each, the cycles that the loop's loads and stores alone
would take. Models are no measurements: compare the instruction sets within one column. The model of cortex-a76 is that
of cortex-a72. The code is GCC's.

Needs what tests/emulation/aarch64 needs, which compiles and runs it, and for the second table Debian's package llvm-19.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDDEN = 4096
ROWS = (2, 6)  # the difference of two runs is what rows cost
KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

#: For each instruction set an emulated processor, and the processors whose models know it.
ISAS = {
    "scalar": ("cortex-a72", ()),
    "neon": ("cortex-a72", ("cortex-a76", "neoverse-n1", "neoverse-v1", "neoverse-v2", "neoverse-n2", "apple-m1")),
    "sve": ("neoverse-v1", ("neoverse-v1", "neoverse-v2", "neoverse-n2")),
    "neon_bf16": ("neoverse-v1", ("neoverse-v1", "neoverse-v2", "neoverse-n2")),
    "sve_bf16": ("neoverse-v1", ("neoverse-v1", "neoverse-v2", "neoverse-n2")),
}
MODELS = ISAS["neon"][1]
VECTOR_BITS = {"neoverse-v1": 256}  # of SVE; else 128
PAIR = 8  # floats in a unit of NEON
SEGMENT_LOADS = 8  # units in one turn of the sum's loop

DRIVER = r"""
#include <stdlib.h>
#include "fusednorm_cpu.h"
fn_forward_rows FORWARD_ROWS;
int main(int argc, char **argv) {
    static _Alignas(64) char memory[32 * (MOST_ROWS + 2) * HIDDEN];
    if (argc != 3) return 1;
    int kind = atoi(argv[1]), rows = atoi(argv[2]);
    char *next = memory;
    int64_t stride = HIDDEN * (kind == FN_F32 ? 4 : 2);
    struct fn_forward_job job = {kind, kind, kind, kind, FN_ROUND_SUM, .hidden = HIDDEN, .eps = 1e-6,
        .x_stride = stride, .residual_stride = stride, .out_stride = stride, .residual_out_stride = stride};
    job.x = next, next += rows * stride;
    job.residual = next, next += rows * stride;
    job.weight = next, next += stride;
    job.out = next, next += rows * stride;
    job.residual_out = next, next += rows * stride;
    FORWARD_ROWS(&job, 0, rows, memory + (next - memory + 63) / 64 * 64);
}
"""


def output(*command: str, **options) -> str:
    """What a command prints; its errors go to the terminal."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout


def compile_for(isa: str, folder: Path, environment: Path) -> tuple[Path, Path]:
    """A program that runs the kernels of one instruction set, and its object file."""
    driver, kernel, program = folder / "driver.c", folder / f"{isa}.o", folder / isa
    driver.write_text(DRIVER)
    cc = (str(environment / "bin" / "cc"), "-O3", "-std=c11", "-ffp-contract=off", f"-I{ROOT / 'cpu'}")
    output(*cc, "-c", str(ROOT / "cpu" / f"kernel_{isa}.c"), "-o", str(kernel))
    defines = (f"-DFORWARD_ROWS=fn_forward_rows_{isa}", f"-DHIDDEN={HIDDEN}", f"-DMOST_ROWS={max(ROWS)}")
    output(*cc, *defines, str(driver), str(kernel), "-lm", "-o", str(program))
    return program, kernel


def executed(program: Path, cpu: str, kind: int, rows: int, environment: Path) -> int:
    """Instructions of one run, from qemu's log of the blocks it translated and executed."""
    log = program.with_suffix(".log")
    qemu = (str(environment / "qemu-aarch64"), "-L", str(environment / "root"), "-cpu", cpu)
    output(*qemu, "-d", "in_asm,exec,nochain", "-D", str(log), str(program), str(kind), str(rows))
    lengths: dict[int, int] = {}
    count = block = 0
    with log.open() as lines:
        for line in lines:
            if line.startswith("IN:"):
                block = 0
            elif line.startswith("0x"):
                block = block or int(line.split(":")[0], 16)
                lengths[block] = lengths.get(block, 0) + 1 if int(line.split(":")[0], 16) != block else 1
            elif line.startswith("Trace"):
                count += lengths[int(line.split("/")[1], 16)]
    log.unlink()
    return count


def loop(kernel: Path, function: str) -> list[str]:
    """The longest innermost loop of a function, its last instruction the jump back."""
    text = output("aarch64-linux-gnu-objdump", "-dw", "--no-show-raw-insn", str(kernel))
    body = re.search(rf"<{function}>:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)[1]
    code = [line.strip().split("\t", 1) for line in body.splitlines() if "\t" in line]
    at = {int(address.rstrip(":"), 16): i for i, (address, _) in enumerate(code)}
    lines = [re.sub(r"\s*//.*", "", text) for _, text in code]
    jumps = [i for i, line in enumerate(lines) if re.match(r"(b|bl|b\.\w+|cbn?z|tbn?z|ret)(\t|$)", line)]
    loops = []
    for before, i in zip([-1, *jumps], jumps, strict=False):
        target = re.search(r"\b([0-9a-f]+) <", lines[i])
        begin = at.get(int(target[1], 16), i + 1) if target else i + 1
        if before < begin <= i:
            loops.append([*lines[begin:i], re.sub(r"[0-9a-f]+ <.*", ".Lloop", lines[i])])
    return max(loops, key=len)


def cycles(llvm_mca: str, model: str, lines: list[str]) -> float:
    """Cycles per turn of a loop."""
    command = (llvm_mca, "-mtriple=aarch64", f"-mcpu={model}", "-mattr=+bf16,+sve", "-iterations=500")
    report = output(*command, input=".Lloop:\n" + "\n".join(lines) + "\n")
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / 500


def print_counts(programs: dict[str, Path], environment: Path) -> None:
    """The first table."""
    print("instructions per element" + "".join(f"{kind:>12}" for kind in KINDS))
    for isa, program in programs.items():
        figures = []
        for number in (3, 2, 1):  # enum fn_kind: bfloat16, float16, float32
            few, many = (executed(program, ISAS[isa][0], number, rows, environment) for rows in ROWS)
            figures.append((many - few) / (ROWS[1] - ROWS[0]) / HIDDEN)
        name = f"{isa} ({VECTOR_BITS[ISAS[isa][0]]} bits)" if isa.startswith("sve") else isa
        print(f"  {name:22}" + "".join(f"{figure:12.3f}" for figure in figures), flush=True)


def print_cycles(kernels: dict[str, Path], llvm_mca: str) -> None:
    """The second table."""
    print("\ncycles per element (loads and stores alone)" + "".join(f"{model:>16}" for model in MODELS))
    for dtype, kind in KINDS.items():
        for isa, kernel in kernels.items():
            if not ISAS[isa][1]:
                continue
            loops = {
                SEGMENT_LOADS: loop(kernel, f"sum_{kind}_{kind}_{int(kind != 'F32')}"),
                1: loop(kernel, f"scale_NONE_{kind}_0_{kind}"),
            }
            row = f"  {dtype:10}{isa:31}"
            for model in MODELS:
                if model not in ISAS[isa][1]:
                    row += f"{'-':>16}"
                    continue
                unit = VECTOR_BITS.get(model, 128) // 32 if isa.startswith("sve") else PAIR
                figures = []
                for only in (r"", r"ld|st"):
                    kept = {units: [line for line in lines if re.match(only, line)] for units, lines in loops.items()}
                    figures.append(sum(cycles(llvm_mca, model, x) / units / unit for units, x in kept.items()))
                row += f"{figures[0]:8.2f} ({figures[1]:.2f})"
            print(row, flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llvm-mca", default="llvm-mca-19", help="the program to model processors with")
    arguments = parser.parse_args()
    script = str(ROOT / "tests" / "emulation" / "aarch64")
    environment = Path(output(script, "--", "sh", "-c", "command -v cc").strip()).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        built = {isa: compile_for(isa, Path(folder), environment) for isa in ISAS}
        print_counts({isa: program for isa, (program, _) in built.items()}, environment)
        print_cycles({isa: kernel for isa, (_, kernel) in built.items()}, arguments.llvm_mca)


if __name__ == "__main__":
    sys.exit(main())
