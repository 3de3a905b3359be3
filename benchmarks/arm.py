"""What the AArch64 kernels cost, without AArch64 hardware: instructions counted, cycles modelled.

    python benchmarks/arm.py [--llvm-mca llvm-mca-19]

First table: instructions per element that an emulated processor executes, for rows of 4096 elements with x, residual,
weight and outputs of one dtype; what a call costs besides its rows is taken off. These figures repeat.

Second table: cycles per element of the two hot loops (the sum with the residual, squared, and the scaling) by models of
processors, llvm-mca's, with every access in the first-level cache; after each, the cycles that the loops' loads and
stores alone would take. Models are no measurements: compare the instruction sets within one column. The model of
cortex-a76 is that of cortex-a72. The code is GCC's.

Needs what tests/emulation/aarch64 needs, which compiles and runs it, and for the second table Debian's package llvm-19.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDDEN = 4096
SEGMENT = 1024  # FN_SEGMENT
ROWS = (4, 8)  # as many as are taken together, ALIKE_ROWS; the difference of two runs is what rows cost
KINDS = {"bfloat16": 3, "float16": 2, "float32": 1}  # enum fn_kind

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

#: How names of functions with a hot loop begin, and for how many elements of a row it runs. It adds one segment,
#: squares the one before it, and scales one of the row before; to add the first and square the last there are others.
LOOPS = {"overlap_": HIDDEN - SEGMENT}

DRIVER = r"""
#include <stdlib.h>
#include "fusednorm_cpu.h"
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
    KERNELS.forward_rows(&job, 0, rows, memory + (next - memory + 63) / 64 * 64);
}
"""


def output(*command: str, **options) -> str:
    """What a command prints; its errors go to the terminal."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout


def compile_for(isa: str, folder: Path, environment: Path) -> Path:
    """A program that runs the kernels of one instruction set."""
    driver, kernel, program = folder / "driver.c", folder / f"{isa}.o", folder / isa
    driver.write_text(DRIVER)
    cc = (str(environment / "bin" / "cc"), "-O3", "-std=c11", "-ffp-contract=off", f"-I{ROOT / 'cpu'}")
    output(*cc, "-c", str(ROOT / "cpu" / f"kernel_{isa}.c"), "-o", str(kernel))
    defines = (f"-DKERNELS=fn_kernels_{isa}", f"-DHIDDEN={HIDDEN}", f"-DMOST_ROWS={max(ROWS)}")
    output(*cc, *defines, "-no-pie", str(driver), str(kernel), "-lm", "-o", str(program))  # runs where objdump says
    return program


def executions(program: Path, cpu: str, kind: int, rows: int, environment: Path) -> Counter[int]:
    """How often one run executes each instruction, from qemu's log of the blocks it translated and executed."""
    log = program.with_suffix(".log")
    qemu = (str(environment / "qemu-aarch64"), "-L", str(environment / "root"), "-cpu", cpu)
    output(*qemu, "-d", "in_asm,exec,nochain", "-D", str(log), str(program), str(kind), str(rows))
    blocks: dict[int, list[int]] = {}
    block: list[int] = []
    runs: Counter[int] = Counter()
    with log.open() as lines:
        for line in lines:
            if line.startswith("IN:"):
                block = []
            elif line.startswith("0x"):
                block.append(int(line.split(":")[0], 16))
                blocks[block[0]] = block
            elif line.startswith("Trace"):
                runs[int(line.split("/")[1], 16)] += 1
    log.unlink()
    counts: Counter[int] = Counter()
    for begin, times in runs.items():
        for address in blocks[begin]:
            counts[address] += times
    return counts


def executions_of_rows(program: Path, cpu: str, kind: int, environment: Path) -> Counter[int]:
    """How often each instruction is executed for ROWS[1] - ROWS[0] rows, and nothing else."""
    few, many = (executions(program, cpu, kind, rows, environment) for rows in ROWS)
    many.subtract(few)  # unlike -, keeps what is negative: a loader that lies elsewhere in the other run
    return many


def hot_loop(program: Path, name: str, counts: Counter[int]) -> tuple[list[str], int]:
    """The instructions executed most often in functions whose names begin so, and how often; they are one loop."""
    text = output("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(program))
    code = {}
    for body in re.findall(rf"<{name}[^>]*>:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL):
        for address, line in re.findall(r"^ *([0-9a-f]+):\t(.*)$", body, re.MULTILINE):
            code[int(address, 16)] = re.sub(r"\s*//.*", "", re.sub(r"[0-9a-f]+ <.*", ".Lloop", line))
    turns = max(counts[address] for address in code)
    return [line for address, line in code.items() if counts[address] == turns], turns


def cycles(llvm_mca: str, model: str, lines: list[str]) -> float:
    """Cycles per turn of a loop."""
    command = (llvm_mca, "-mtriple=aarch64", f"-mcpu={model}", "-mattr=+bf16,+sve", "-iterations=500")
    report = output(*command, input=".Lloop:\n" + "\n".join(lines) + "\n")
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / 500


def print_counts(counts: dict[str, dict[str, Counter[int]]]) -> None:
    """The first table."""
    print("instructions per element" + "".join(f"{dtype:>12}" for dtype in KINDS))
    for isa, by_dtype in counts.items():
        figures = [by_dtype[dtype].total() / (ROWS[1] - ROWS[0]) / HIDDEN for dtype in KINDS]
        name = f"{isa} ({VECTOR_BITS[ISAS[isa][0]]} bits)" if isa.startswith("sve") else isa
        print(f"  {name:22}" + "".join(f"{figure:12.3f}" for figure in figures))


def cycles_per_element(llvm_mca: str, model: str, isa: str, loops: list[tuple[list[str], float]]) -> str:
    """One figure of the second table. Elements per turn are those of the processor that was emulated."""
    wider = VECTOR_BITS.get(model, 128) / VECTOR_BITS[ISAS[isa][0]] if isa.startswith("sve") else 1
    figures = []
    for only in (r"", r"ld|st"):
        kept = [([line for line in lines if re.match(only, line)], elements) for lines, elements in loops]
        figures.append(sum(cycles(llvm_mca, model, lines) / elements / wider for lines, elements in kept))
    return f"{figures[0]:8.2f} ({figures[1]:.2f})"


def print_cycles(programs: dict[str, Path], counts: dict[str, dict[str, Counter[int]]], llvm_mca: str) -> None:
    """The second table."""
    print("\ncycles per element (loads and stores alone)" + "".join(f"{model:>16}" for model in MODELS))
    for dtype in KINDS:
        for isa, program in programs.items():
            if not ISAS[isa][1]:
                continue
            loops = []
            for name, elements in LOOPS.items():
                lines, turns = hot_loop(program, name, counts[isa][dtype])
                loops.append((lines, elements * (ROWS[1] - ROWS[0]) / turns))
            row = f"  {dtype:10}{isa:31}"
            for model in MODELS:
                known = model in ISAS[isa][1]
                row += cycles_per_element(llvm_mca, model, isa, loops) if known else f"{'-':>16}"
            print(row, flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llvm-mca", default="llvm-mca-19", help="the program to model processors with")
    arguments = parser.parse_args()
    script = str(ROOT / "tests" / "emulation" / "aarch64")
    environment = Path(output(script, "--", "sh", "-c", "command -v cc").strip()).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        programs = {isa: compile_for(isa, Path(folder), environment) for isa in ISAS}
        counts = {
            isa: {dtype: executions_of_rows(program, ISAS[isa][0], kind, environment) for dtype, kind in KINDS.items()}
            for isa, program in programs.items()
        }
        print_counts(counts)
        print_cycles(programs, counts, arguments.llvm_mca)


if __name__ == "__main__":
    sys.exit(main())
