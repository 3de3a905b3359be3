"""Builds the C extension under a sanitizer and runs a command with it.

    python tests/sanitizers.py address|undefined|thread -- python -m pytest ARGUMENT...

The build lies in ``build/<sanitizer>`` and is found before what is installed. It takes clang with its runtime libraries
(Debian: clang-19, libclang-rt-19-dev, and for ``thread`` libomp-19-dev), and scikit-build-core, cffi, cmake and ninja
beside this Python. ``CC`` names another clang. What a sanitizer finds ends the process, and so fails tests.

``thread``: GCC's OpenMP runtime, which torch brings, waits in ways that ThreadSanitizer does not see, so that it takes
every parallel region for a race. LLVM's runtime stands in for it (it has the same entry points), and LLVM's Archer
tells the sanitizer where its threads wait for each other. Nothing is suppressed in fusednorm's own code.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CC = os.environ.get("CC", "clang-19")

#: GCC takes many minutes for this, and so does clang where the checks of every access are not functions.
FLAGS = {
    "address": "-fsanitize=address -mllvm -asan-instrumentation-with-call-threshold=0",
    "undefined": "-fsanitize=undefined -fno-sanitize-recover=undefined",
    "thread": "-fsanitize=thread",
}
RUNTIMES = {"address": "asan", "undefined": "ubsan_standalone", "thread": "tsan"}


def library(name):
    """The full path of one of clang's libraries."""
    found = subprocess.run([CC, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_file():
        sys.exit(f"{CC} has no {name}; Debian's packages are clang-19, libclang-rt-19-dev and libomp-19-dev")
    return found


def build(sanitizer, folder):
    """Installs the library below the folder."""
    flags = f"{FLAGS[sanitizer]} -shared-libsan -fno-omit-frame-pointer -gline-tables-only -O1"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--upgrade"]
    command += [
        "--target",
        str(folder),
        f"--config-settings=build-dir={folder}/cmake",
        "--config-settings=install.strip=false",
        str(ROOT),
    ]
    subprocess.run(command, env=os.environ | {"CC": CC, "CFLAGS": flags}, check=True)


def environment(sanitizer, folder):
    """What the command needs to find the build and the sanitizer's runtime."""
    preload = [library(f"libclang_rt.{RUNTIMES[sanitizer]}-x86_64.so")]
    options = {
        # Python never frees some of its memory, and torch loads libraries that define the same names.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    if sanitizer == "thread":
        preload.append(library("libomp.so"))
        options["OMP_TOOL_LIBRARIES"] = library("libarcher.so")
        # Python and torch are not built with it: what they do among themselves would not be seen whole.
        options["TSAN_OPTIONS"] = "halt_on_error=1:ignore_noninstrumented_modules=1"
    return os.environ | options | {"LD_PRELOAD": " ".join(preload), "PYTHONPATH": str(folder)}


def main():
    if len(sys.argv) < 4 or sys.argv[1] not in FLAGS or sys.argv[2] != "--":
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(FLAGS)} -- command")
    sanitizer, command = sys.argv[1], sys.argv[3:]
    folder = ROOT / "build" / sanitizer
    build(sanitizer, folder)
    if sanitizer == "thread":  # its runtime wants memory where the kernel would put other things
        command = ["setarch", "--addr-no-randomize", *command]
    sys.exit(subprocess.run(command, env=environment(sanitizer, folder)).returncode)


if __name__ == "__main__":
    main()
