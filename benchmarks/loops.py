"""The innermost loops of compiled kernels, and what a processor's model says of them.

    pip wheel --no-deps -w /tmp .
    python benchmarks/loops.py build/*/CMakeFiles/*/variants/kernel_avx2.c.o -f activate_usual

Prints for each loop its instructions, its divisions, its accesses of the stack (where registers do not suffice), the
cycles of the busiest port, and those of an iteration, in which operations also wait for each other and for room in
queues. Needs objdump and llvm-mca, whose version 19 has Zen 4's numbers for Zen 5. For Arm, with objects of a cross
compiler: --objdump aarch64-linux-gnu-objdump --triple aarch64 --cpu neoverse-v1
"""

import argparse
import re
import shutil
import subprocess

#: A jump to an address in the same function.
JUMP = re.compile(r"(?:j\w+|b(?:\.\w+)?|cbn?z\s+\w+,|tbn?z\s+\w+, #\d+,)\s+([0-9a-f]+)")


def functions(objdump, file):
    """The name of each function of an object file, and its instructions by address."""
    command = (objdump, "-d", "--no-show-raw-insn", file)
    for text in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n\n"):
        if name := re.search(r"<(\S+)>:\n", text):
            lines = re.findall(r"^\s+([0-9a-f]+):\t(.+?)(?:\s+(?:# |//|<).*)?$", text, re.MULTILINE)
            yield name[1], {int(address, 16): code.strip() for address, code in lines}


def innermost(code):
    """The instructions of each loop that has no loop and no call in it."""
    jumps = [(int(to[1], 16), at) for at, line in code.items() if (to := JUMP.match(line)) and int(to[1], 16) <= at]
    for first, last in jumps:
        if not any(first <= start and end < last for start, end in jumps):
            loop = [line for at, line in code.items() if first <= at <= last]
            if not any(line.startswith(("call", "bl ")) for line in loop):
                yield loop


def cycles(loop, options):
    """The cycles of the busiest port in an iteration, and those of the iteration."""
    body = "\n".join(line for line in loop if not JUMP.match(line))
    command = (shutil.which("llvm-mca-19") or "llvm-mca", "-iterations=500", *options)
    found = subprocess.run(command, input=body, check=True, capture_output=True, text=True).stdout
    ports = re.search(r"Resource pressure per iteration:\n.*\n(.*)\n", found)[1]
    return max(float(port) for port in ports.split() if port != "-"), int(re.search(r"Cycles:\s+(\d+)", found)[1]) / 500


def main():
    """Prints a line for each loop of the functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+")
    parser.add_argument("-f", "--function", required=True, help="or how its name begins")
    parser.add_argument("--cpu", default="znver4")
    parser.add_argument("--triple", default="x86_64")
    parser.add_argument("--objdump", default="objdump")
    asked = parser.parse_args()
    for file in asked.objects:
        for name, code in functions(asked.objdump, file):
            for loop in innermost(code) if name.startswith(asked.function) else ():
                divisions, stack = (sum(bool(re.search(of, line)) for line in loop) for of in ("div", r"\(%rsp|\[sp"))
                port, iteration = cycles(loop, (f"-mtriple={asked.triple}", f"-mcpu={asked.cpu}"))
                print(f"{name}: {len(loop)} instructions, {divisions} divisions, {stack} of the stack; ", end="")
                print(f"busiest port {port:.1f} cycles, iteration {iteration:.1f}", flush=True)


if __name__ == "__main__":
    main()
