"""What calls cost on AArch64, without AArch64 hardware: instructions counted, cycles modelled.

    python benchmarks/arm.py [--calls add_norm int8 ...] [--isas neon ...] [--dtypes ...] [--llvm-mca llvm-mca-19]

First table: instructions per element that an emulated processor executes, for rows of 4096 elements (heads have 128)
with operands of one dtype; what a call costs besides its rows is taken off. These figures repeat.

Second table: cycles per element by models of processors, llvm-mca's, with every access in the first-level cache; after
each, the cycles that loads and stores alone would take. All blocks of instructions count that one instruction after the
other runs through equally often, and that are a thousandth of all at least. Models are no measurements: compare the
instruction sets within one column. The model of cortex-a76 is that of cortex-a72. The code is GCC's.

The calls are made here, by the installed fusednorm, and carried to the emulated processor as bytes, with their memory.
Needs what tests/machines/emulation/aarch64 needs, which compiles, and for the second table Debian's package llvm-19.
"""

import argparse
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import fusednorm
from fusednorm import Quantization
from fusednorm.backends import cpu
from fusednorm.calls import fast_path

ROOT = Path(__file__).parents[1]
HIDDEN = 4096
HEAD = 128
ROWS = (8, 16)  # the difference of two runs is what rows cost
DTYPES = ("bfloat16", "float16", "float32")

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

#: The C library without its interfaces to Python and to Triton.
SOURCES = ("dispatch", "backward", "gate", "rotate", "cpu_features", "threads", *(f"kernel_{isa}" for isa in ISAS))

#: Reads the memory of a call and the call, moves the addresses that point into the memory, and makes the call.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "fusednorm_cpu.h"
#include "gate.h"
#include "rotation.h"
int main(int argc, char **argv) {
    FILE *file = argc == 3 ? fopen(argv[2], "rb") : NULL;
    int64_t head[4]; /* the address and the size of the memory, the bytes of the call, the function */
    if (!file || fread(head, sizeof head, 1, file) != 1) return 1;
    char *memory = aligned_alloc(4096, (size_t)(head[1] + 4095) / 4096 * 4096);
    uint64_t *call = malloc((size_t)head[2]);
    if (fread(memory, (size_t)head[1], 1, file) != 1 || fread(call, (size_t)head[2], 1, file) != 1) return 1;
    for (int64_t i = 0; i < head[2] / 8; i++)
        if (call[i] - (uint64_t)head[0] < (uint64_t)head[1]) call[i] += (uint64_t)(uintptr_t)memory - (uint64_t)head[0];
    for (int isa = 0; isa < fn_isa_count(); isa++)
        if (!strcmp(fn_isa_name(isa), argv[1])) fn_use_isa(isa);
    if (strcmp(fn_isa_name(fn_isa()), argv[1])) return 1;
    if (head[3] == 1) fn_run_gate((const void *)call);
    return head[3] == 0 ? fn_run((const void *)call) : head[3] == 2 ? fn_run_rotation(call) : 0;
}
"""


class Memory:
    """The memory of one call's operands."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(16 << 20, dtype=torch.uint8)
        self.used = -self.bytes.data_ptr() % 4096

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in it, which begins with a cache line."""
        size = torch.Size(shape).numel() * dtype.itemsize
        begin, self.used = self.used, self.used + -(-size // 64) * 64
        return self.bytes[begin : begin + size].view(dtype).view(shape)

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of normal numbers in it."""
        return self.empty(shape, dtype).copy_(torch.randn(shape))


def quantized(dtype: torch.dtype, per: str | int) -> Callable[[Memory, int, torch.dtype], object]:
    """fused_add_rms_norm_quant with the sum in place."""

    def call(memory: Memory, rows: int, of: torch.dtype) -> object:
        x, r, w = (memory.filled(shape, of) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,)))
        scales = (rows, 1 if per == "row" else HIDDEN // int(per))
        into = {"out": memory.empty((rows, HIDDEN), dtype), "scale_out": memory.empty(scales, torch.float32)}
        quantization = Quantization(dtype, per=per)
        return fusednorm.fused_add_rms_norm_quant(x, r, w, quantization=quantization, residual_out=r, **into)

    return call


def in_place(function: Callable[..., object], *shapes: tuple[int, ...], heads: bool = False, bias: bool = False):
    """A function in place, of operands with rows, and then of operands with these shapes."""

    def call(memory: Memory, rows: int, dtype: torch.dtype) -> object:
        of_rows = (rows, HIDDEN // HEAD, HEAD) if heads else (rows, HIDDEN)
        operands = [memory.filled(shape, dtype) for shape in (of_rows, of_rows, *shapes)]
        return function(*operands[:-1], bias=operands[-1]) if bias else function(*operands)

    return call


def gate(memory: Memory, rows: int, dtype: torch.dtype) -> object:
    """silu_and_mul of two tensors."""
    y, z, out = (memory.filled((rows, HIDDEN), dtype) for _ in range(3))
    return fusednorm.silu_and_mul(z, y, out=out)


def norm_gated(memory: Memory, rows: int, dtype: torch.dtype) -> object:
    """rms_norm_gated_, the norm first."""
    x, z, w = (memory.filled(shape, dtype) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,)))
    return fusednorm.rms_norm_gated_(x, z, w)


def qk_norm_rope(memory: Memory, rows: int, dtype: torch.dtype) -> object:
    """qk_norm_rope_ with the roundings of Hugging Face's models; an element is one of q or of k."""
    heads = HIDDEN // HEAD // 2
    shapes = ((rows, heads, HEAD), (rows, heads, HEAD), (HEAD,), (HEAD,), (rows, HEAD // 2), (rows, HEAD // 2))
    operands = [memory.filled(shape, dtype) for shape in shapes]
    return fusednorm.qk_norm_rope_(*operands, round_norm=True, round_products=True)


WEIGHT, OF_HEADS = (HIDDEN,), (HIDDEN // HEAD, HEAD)
CALLS: dict[str, Callable[[Memory, int, torch.dtype], object]] = {
    "add_norm": in_place(fusednorm.fused_add_rms_norm_, WEIGHT),
    "two_norms": in_place(fusednorm.rms_norm_add_rms_norm_, WEIGHT, WEIGHT),
    "bias": in_place(fusednorm.fused_add_rms_norm_, WEIGHT, WEIGHT, bias=True),
    "heads": in_place(fusednorm.fused_add_rms_norm_, OF_HEADS, heads=True),
    "int8": quantized(torch.int8, "row"),
    "int8_block": quantized(torch.int8, 128),
    "fp8": quantized(torch.float8_e4m3fn, "row"),
    "fp8_block": quantized(torch.float8_e4m3fn, 128),
    "silu_and_mul": gate,
    "norm_gated": norm_gated,
    "qk_norm_rope": qk_norm_rope,
}


class Recorder:
    """Stands in for the C library, and keeps the call that it is given."""

    def __init__(self, library: object) -> None:
        self.library, self.function, self.call = library, 0, b""

    def __getattr__(self, name: str) -> object:
        return getattr(self.library, name)

    def fn_run(self, call: bytes) -> int:
        """A call of rows."""
        self.function, self.call = 0, call
        return 0

    def fn_run_gate(self, call: bytes) -> None:
        """A gate."""
        self.function, self.call = 1, call

    def fn_run_rotation(self, call: bytes) -> int:
        """Heads of q and k."""
        self.function, self.call = 2, call
        return 0


def record(name: str, rows: int, dtype: str, file: Path) -> None:
    """Writes a call and its memory to a file."""
    library = cpu._lib
    memory, recorder = Memory(), Recorder(library)
    cpu._lib = recorder
    try:
        with fusednorm.use_backend("cpu"):
            CALLS[name](memory, rows, getattr(torch, dtype))
    finally:
        cpu._lib = library
    begin = -memory.bytes.data_ptr() % 4096
    image = memory.bytes[begin : memory.used].numpy().tobytes()
    head = (memory.bytes.data_ptr() + begin, len(image), len(recorder.call), recorder.function)
    file.write_bytes(struct.pack("=4q", *head) + image + recorder.call)


def output(*command: str, **options) -> str:
    """What a command prints; its errors go to the terminal."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout


def compiled(folder: Path, environment: Path) -> Path:
    """The program that makes calls."""
    driver, program = folder / "driver.c", folder / "program"
    driver.write_text(DRIVER)
    cc = (str(environment / "bin" / "cc"), "-O3", "-DNDEBUG", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno")
    files = (str(driver), *(str(ROOT / "cpu" / f"{name}.c") for name in SOURCES))
    output(*cc, f"-I{ROOT / 'cpu'}", "-no-pie", *files, "-lm", "-ldl", "-o", str(program))  # runs where objdump says
    return program


def executions(program: Path, isa: str, call: Path, environment: Path) -> Counter[int]:
    """How often one run executes each instruction, from qemu's log of the blocks it translated and executed."""
    log = program.with_suffix(".log")
    qemu = (str(environment / "qemu-aarch64"), "-L", str(environment / "root"), "-cpu", ISAS[isa][0])
    output(*qemu, "-d", "in_asm,exec,nochain", "-D", str(log), str(program), isa, str(call))
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


def executions_of_rows(program: Path, name: str, isa: str, dtype: str, environment: Path) -> Counter[int]:
    """How often each instruction is executed for ROWS[1] - ROWS[0] rows, and nothing else."""
    runs = []
    for rows in ROWS:
        call = program.with_name(f"{rows}_rows")
        record(name, rows, dtype, call)
        runs.append(executions(program, isa, call, environment))
    few, many = runs
    many.subtract(few)  # unlike -, keeps what is negative: a loader that lies elsewhere in the other run
    return many


def instructions(program: Path) -> dict[int, str]:
    """By address: each instruction, in the assembler's words."""
    text = output("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(program))
    found = re.findall(r"^ *([0-9a-f]+):\t(.*)$", text, re.MULTILINE)
    return {int(a, 16): re.sub(r"\s*//.*", "", re.sub(r"[0-9a-f]+ <.*", ".Lloop", line)) for a, line in found}


def hot_blocks(code: dict[int, str], counts: Counter[int]) -> list[tuple[list[str], int]]:
    """Blocks of instructions that follow each other and run equally often, each with how often that is."""
    blocks: list[tuple[list[int], int]] = []
    for before, address in pairwise([0, *sorted(address for address in code if counts[address] > 0)]):
        if blocks and address == before + 4 and counts[address] == blocks[-1][1]:
            blocks[-1][0].append(address)
        else:
            blocks.append(([address], counts[address]))
    least = sum(len(block) * turns for block, turns in blocks) / 1000
    return [([code[a] for a in block], turns) for block, turns in blocks if len(block) * turns >= least]


def cycles(llvm_mca: str, model: str, lines: list[str]) -> float:
    """Cycles per turn of a block, calls and returns left out: models take 100 for each."""
    lines = [line for line in lines if not re.match(r"blr?\b|ret\b", line)]
    if not lines:
        return 0.0
    command = (llvm_mca, "-mtriple=aarch64", f"-mcpu={model}", "-mattr=+bf16,+sve", "-iterations=300")
    report = output(*command, input=".Lloop:\n" + "\n".join(lines) + "\n")
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / 300


def cycles_per_element(llvm_mca: str, model: str, isa: str, blocks: list[tuple[list[str], int]]) -> str:
    """One figure of the second table. Elements per turn are those of the processor that was emulated."""
    wider = VECTOR_BITS.get(model, 128) / VECTOR_BITS[ISAS[isa][0]] if isa.startswith("sve") else 1
    figures = []
    for only in (r"", r"ld|st"):
        kept = [([line for line in lines if re.match(only, line)], turns) for lines, turns in blocks]
        figures.append(sum(cycles(llvm_mca, model, lines) * turns for lines, turns in kept))
    figures = [figure / wider / (ROWS[1] - ROWS[0]) / HIDDEN for figure in figures]
    return f"{figures[0]:8.2f} ({figures[1]:.2f})"


def title(isa: str) -> str:
    """An instruction set with the length of its vectors in the first table."""
    return f"{isa} ({VECTOR_BITS[ISAS[isa][0]]} bits)" if isa.startswith("sve") else isa


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["add_norm"])
    parser.add_argument("--isas", nargs="+", choices=ISAS, default=[*ISAS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--llvm-mca", default="llvm-mca-19", help="the program to model processors with")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fast_path.open_to = lambda *_: None  # no call passes by the recorder
    script = str(ROOT / "tests" / "machines" / "emulation" / "aarch64")
    environment = Path(output(script, "--", "sh", "-c", "command -v cc").strip()).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), environment)
        code = instructions(program)
        counts = {
            (name, isa, dtype): executions_of_rows(program, name, isa, dtype, environment)
            for name in asked.calls
            for isa in asked.isas
            for dtype in asked.dtypes
        }
        print(f"{'instructions per element':36}" + "".join(f"{dtype:>12}" for dtype in asked.dtypes))
        for name in asked.calls:
            for isa in asked.isas:
                totals = (counts[name, isa, dtype].total() for dtype in asked.dtypes)
                figures = "".join(f"{total / (ROWS[1] - ROWS[0]) / HIDDEN:12.3f}" for total in totals)
                print(f"  {name:14}{title(isa):20}{figures}")
        print(f"\n{'cycles per element (loads and stores alone)':46}" + "".join(f"{model:>16}" for model in MODELS))
        for (name, isa, dtype), found in counts.items():
            if not ISAS[isa][1]:
                continue
            blocks = hot_blocks(code, found)
            row = f"  {name:14}{dtype:10}{isa:20}"
            for model in MODELS:
                known = model in ISAS[isa][1]
                row += cycles_per_element(asked.llvm_mca, model, isa, blocks) if known else f"{'-':>16}"
            print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
