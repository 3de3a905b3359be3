"""How long a gate takes on this x86-64 processor at least: the time of its vector operations alone.

    python benchmarks/gate_operations.py [--elements 131072] [--turns 300]

Executes the operations of a silu gate of bfloat16 (docs/spec.md, section 10, as cpu/usual_gates.h has it), and those of
a norm, in a loop in which none waits for another: each reads registers that nothing writes, and none is in memory.
Prints the least time of all turns, in microseconds for so many elements. Needs gcc.
"""

import argparse
import itertools
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter

#: Two vectors of floats become one of bfloat16.
NARROW = {
    "zmm": {"vpermt2w": 2, "vpternlogd": 1, "vpcmpuw": 1, "vpsubw": 1},
    "ymm": {"vpsrld": 3, "vpandd": 2, "vpaddd": 4, "vpblendw": 1},
}
#: The even and the odd elements of a vector of bfloat16 become floats.
WIDEN = {"vpslld": 1, "vpandd": 1}
#: exp(-v) of two vectors, and 1 + exp(-v): 14 of the multiplications and 14 of the additions are the polynomial's.
EXPONENTIAL = {"vmulps": 20, "vaddps": 24, "vpslld": 2, "vpaddd": 2}
#: Whether a gate is low, and no gate is too large; or, for gradients, whether one is too large in magnitude.
LIMITS, MAGNITUDES = {"vpmaxud": 2, "vpminsd": 2}, {"vpandd": 2, "vpmaxsd": 2}

#: The operations for two vectors of floats, which are one vector of bfloat16, and how many vectors are narrowed.
OPERATIONS = {
    "gate": (EXPONENTIAL, LIMITS, WIDEN, WIDEN, {"vdivps": 2, "vmulps": 2}, 1),
    "silu_and_mul": (EXPONENTIAL, LIMITS, WIDEN, WIDEN, WIDEN, {"vdivps": 2, "vmulps": 2}, 2),
    "gate, gradients": (EXPONENTIAL, MAGNITUDES, WIDEN, WIDEN, WIDEN, {"vdivps": 4, "vmulps": 10, "vaddps": 2}, 2),
    "norm": (WIDEN, WIDEN, {"vmulps": 6, "vaddps": 2}, 1),
}
#: The operands of instructions that have others than two sources and a target.
FORMS = {
    "vpslld": "$16, %0, {to}",
    "vpsrld": "$16, %0, {to}",
    "vpternlogd": "$0xf8, %0, %1, {to}",
    "vpblendw": "$0xaa, %0, %1, {to}",
    "vpcmpuw": "$6, %0, %1, %%k1",
}
PROGRAM = """
#include <immintrin.h>
#include <stdio.h>
#include <time.h>
int main(void) {
    const %(type)s a = %(set)s(1.7f), b = %(set)s(1.3f);
    double least = 1e9;
    for (int turn = 0; turn < %(turns)d; turn++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (long i = 0; i < %(loops)d; i++)
            __asm__ volatile(%(body)s : : "%(constraint)s"(a), "%(constraint)s"(b) : %(written)s);
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double us = (end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) * 1e-3;
        if (us < least) least = us;
    }
    printf("%%.1f us", least);
}
"""


def program(operations: Counter[str], register: str, elements: int, turns: int) -> str:
    """C that executes these instructions, each kind spread evenly, for so many elements, and prints the time."""
    order = sorted(((k + 0.5) / count, name) for name, count in operations.items() for k in range(count))
    lines = []
    for (_, name), target in zip(order, itertools.cycle(range(8)), strict=False):
        opcode = "vpand" if name == "vpandd" and register == "ymm" else name
        lines.append(f'"{opcode} {FORMS.get(name, "%0, %1, {to}").format(to=f"%%{register}{target}")}\\n"')
    wide = register == "zmm"
    return PROGRAM % {
        "type": "__m512" if wide else "__m256",
        "set": "_mm512_set1_ps" if wide else "_mm256_set1_ps",
        "constraint": "v" if wide else "x",
        "written": ", ".join(f'"xmm{k}"' for k in range(8)) + (', "k1"' if wide else ""),
        "loops": elements // (32 if wide else 16),
        "body": " ".join(lines),
        "turns": turns,
    }


def time_of(source: str, register: str, folder: pathlib.Path) -> str:
    """Compiles and runs it."""
    file, flags = folder / "operations.c", ("-mavx512bw",) if register == "zmm" else ("-mavx2",)
    file.write_text(source)
    subprocess.run(("gcc", "-O2", *flags, file, "-o", folder / "operations"), check=True)
    return subprocess.run((folder / "operations",), check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Prints a line for each operation, and for registers of 256 and of 512 bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=32 * 4096)
    parser.add_argument("--turns", type=int, default=300)
    asked = parser.parse_args()
    has_avx512 = "avx512bw" in pathlib.Path("/proc/cpuinfo").read_text()
    with tempfile.TemporaryDirectory() as folder:
        for register in ("ymm", "zmm") if has_avx512 else ("ymm",):
            for name, (*parts, narrowed) in OPERATIONS.items():
                counts = sum(map(Counter, [*parts, *[NARROW[register]] * narrowed]), Counter())
                source = program(counts, register, asked.elements, asked.turns)
                needs = f"{counts.total() / 2:.1f} operations for a vector"
                print(f"{register}  {name:16} {needs}  {time_of(source, register, pathlib.Path(folder))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
