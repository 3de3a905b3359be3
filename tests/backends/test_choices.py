"""Calls are computed as was measured to be fast, on processors that this machine is not: choices.c says how.

A difference that is meant: the program's lines, of this commit and of the one before, say which calls are computed in
another way.

    python tests/backends/test_choices.py CHECKOUT > choices.txt
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The choices of each processor, over powers of 2 and what is half way between them, as a digest.
DIGESTS = {"intel": "59fdac2fbe430a59", "zen4": "8b89474f5b21d147", "zen5": "aa69544c217a7248"}


def choices(root, *arguments):
    """The program's lines: of a processor, an instruction set, kinds and an operation, wherever a choice changes."""
    around = (
        "isa",
        "threads",
        "scratch",
        "tuning",
        "run",
        "gate",
        "backward",
        "chain",
        "rotate",
        "declared",
        "attention",
    )
    run = [str(root / f"cpu/run/{name}.c") for name in around]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "choices")
        options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic", f"-I{root}/cpu")
        source = Path(__file__).with_name("choices.c")
        subprocess.run(["cc", *options, source, *run, "-o", program, "-lm", "-ldl"], check=True)
        return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout.splitlines()


has_compiler = pytest.mark.skipif(
    not (shutil.which("cc") and sys.platform == "linux" and platform.machine() == "x86_64"),
    reason="the program needs a C compiler, and has the names of x86-64's kernels",
)


@has_compiler
def test_choices_are_those_that_were_measured():
    by_processor = defaultdict(list)
    for line in choices(ROOT, "8"):
        by_processor[line.partition(" ")[0]].append(line)
    digests = {name: hashlib.sha256("\n".join(of).encode()).hexdigest()[:16] for name, of in by_processor.items()}
    assert digests == DIGESTS
    kernels = {
        line.split("(")[1].split(",")[0] for line in by_processor["zen4"] if line.startswith("zen4 zen4 f16+- norm ")
    }
    assert kernels == {"avx2"}


@has_compiler
@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "zen4"])
def test_a_kernel_file_is_one_unit_without_warnings(isa):
    """CMake compiles its families apart; static.py and two_commits.py do not."""
    options = ("-std=gnu11", "-fsyntax-only", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/cpu")
    subprocess.run(["cc", *options, ROOT / f"cpu/variants/kernel_{isa}.c"], check=True)


if __name__ == "__main__":
    print("\n".join(choices(Path(sys.argv[1]), *sys.argv[2:])))
