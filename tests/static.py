"""Analyses the C code: clang-tidy with the checks of cpu/.clang-tidy, and GCC's -fanalyzer. Status 1 on any warning.

python tests/static.py
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

CPU = Path(__file__).parents[1] / "cpu"

GCC = [
    "-fanalyzer",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fopenmp-simd",  # or it warns of the word before loops that become vectors
    # It does not follow the loop that fills `columns` in forward_passes.h a unit at a time. clang's analyser and
    # valgrind look for the same, and do.
    "-Wno-analyzer-use-of-uninitialized-value",
]


def main():
    include = sysconfig.get_paths()["include"]
    flags = ["-std=c11", f"-I{CPU}", "-isystem", include, "-DPy_LIMITED_API=0x030b0000", "-ffp-contract=off"]
    failed = []
    for file in sorted(CPU.rglob("*.c")):
        for command in (
            ["clang-tidy", "--quiet", str(file), "--", *flags],
            ["gcc", *GCC, "-O1", *flags, "-c", str(file), "-o", "/dev/null"],
        ):
            print(command[0], file.name, flush=True)
            if subprocess.run(command).returncode:
                failed.append(f"{command[0]} {file.name}")
    if failed:
        sys.exit(f"warnings: {', '.join(failed)}")


if __name__ == "__main__":
    main()
