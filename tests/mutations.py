"""Breaks the library on purpose, one way at a time, and demands that the tests notice.

    tox -e mutations

Each mutant is a copy of the repository with one text replaced, installed over this environment's fusednorm; the tests
must then fail. Exit status 1 if a mutant survives, or if a test that notices a mutant fails without one too. `--only
TEXT` runs the mutants whose description contains the text; it may be given several times.

    tox -e mutations -- --self-check --only TEXT

shows mutants of kernels to the first calls of a process alone, where backends prove themselves (tests/first_calls.py).
Survivors are no failure: some show in other rows, in parts of rows or in many threads only.

    tox -e mutations -- --python fusednorm/calls/checks.py:40-90 -- tests/operations/test_bad_operands.py

makes mechanical mutants of one Python file, or of some of its lines, and shows them to the tests that are given.
Survivors are to be looked at: some change nothing. Only faults that no such mutant has are in tests/mutants.
"""

import argparse
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # where Python is told to leave the script's folder out
from mutants import MUTANTS, mechanical

ROOT = Path(__file__).parents[1]
FOLDERS = ("fusednorm", "backends", "csrc", "cpu", "tests", "docs", ".github")
FILES = ("pyproject.toml", "tox.ini", "README.md", "LICENSE")


#: A mutant whose description begins with the name of a file of tests (Onnx: test_onnx.py) is run against the files of
#: that name alone, of the tests and of the kit, and against those of all operations if it is one of these.
OF_OPERATIONS = ("Norm_before_add", "Affine", "Gated", "Norm_gated", "Quantized", "Rotation", "Log_prob")
#: Tests of these files take vLLM.
OF_VLLM = ("Vllm_attention", "Vllm_layers", "Vllm_products")
#: Files of kernels.
KERNELS = ("backends/triton/kernels/", "cpu/kernels/", "cpu/machine/", "csrc/")


def misplaced(mutants=MUTANTS):
    """Why mutants cannot be made: their text is not found exactly once."""
    found = []
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            found.append(f"{mutant.fault}: {mutant.file} has {mutant.old!r} {count} times, and must have it once")
    return found


def copy_if_changed(source, target):
    """Only a file that differs gets a new time: ninja then compiles that file alone, and a mutant's file again."""
    if not (os.path.exists(target) and filecmp.cmp(source, target, shallow=False)):
        shutil.copy(source, target)


def build(mutant, folder):
    """Copies the repository with the mutant's change and installs it."""
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True, ignore=ignore, copy_function=copy_if_changed)
    for name in FILES:
        copy_if_changed(ROOT / name, folder / name)
    if mutant is not None:
        path = folder / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    install = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall", str(folder))
    subprocess.run((sys.executable, "-m", *install), check=True)


class Run(NamedTuple):
    """Tests that run until one fails."""

    tests: tuple[str, ...]
    backend: str = ""
    #: Of the GPU that the CPU stands in for; none: C, or Triton's interpreter.
    capability: str = ""


def run_tests(folder, run, **environment):
    """Runs tests; those of a backend that has a name are those that its environment of tox leaves."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_") and k != "TOX_WORK_DIR"}
    # pytest finds a failed test again by its name only if the test lies in the root folder, and the kit is installed.
    options = ("pytest", "-q", "-x", "--no-header", "--tb=no", "--rootdir=/", "-p", "no:cacheprovider", "--pyargs")
    command = (sys.executable, "-P", "-m", *options, *run.tests)
    if run.backend:
        clean |= {"FUSEDNORM_BACKEND": run.backend, "PYTHONPATH": str(folder / "tests")}
        if not any("/tests/" in test for test in run.tests):
            command += ("-p", "conftest")  # for the kit alone: it knows what is left out
        if run.backend.startswith("triton") and not run.capability:
            clean["TRITON_INTERPRET"] = "1"
    if run.capability:  # -s: the last words of a process that dies are not lost
        # The machine, and kernels of the same sources, are compiled once for all mutants but the compiler's.
        compiler = hashlib.sha256((folder / "backends/cuda/compiler.py").read_bytes()).hexdigest()[:8]
        clean |= {"TOX_WORK_DIR": str(folder), "XDG_CACHE_HOME": str(folder / f"kept-{compiler}")}
        emulation = (folder / "tests/machines/emulation/ptx", run.backend, "--sm", run.capability, "--")
        command = (*emulation, *command, "-s")
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True)


def of_tests(name, folder=ROOT):
    """The files of tests that a description names."""
    return list(folder.glob(f"tests/**/test_{name.lower()}.py")) if name[0].isupper() else []


def in_first_calls(folder, mutant):
    """The first call in which a backend does not prove itself; None if there is none."""
    backend = mutant.backend or ("triton" if "triton" in mutant.file else "cpu")
    run = Run((str(folder / "tests/first_calls.py"),), backend)
    return failure(run_tests(folder, run, FUSEDNORM_SELF_CHECK="first")), run


def first_failure(folder, mutant):
    """A test that fails, or how the tests end, and its run; None if all pass."""
    for run in runs(folder, mutant):
        if found := failure(run_tests(folder, run)):
            return found, run
    return None, None


def runs(folder, mutant):
    """The runs of which one must notice a mutant. The kit goes first: it guards the kernels."""
    kit = "fusednorm.conformance.test_"
    if mutant.backend:
        files = (("quantizer", "quantized"), ("gate", "operations"), ("rotation", "rotation"))
        about = [name for word, name in files if word in mutant.fault]
        names = ("golden", "gradients", "forward", "rows_and_fusion", "quantized", "rotation")
        first = [kit + name for name in (*((mutant.kit,) if mutant.kit else (*about, *names)), "operations")]
        if mutant.backend == "cuda":
            first.insert(len(about), str(folder / "tests/backends/test_cuda_launch.py"))
        tests, golden = tuple(dict.fromkeys(first)), f"{kit}golden"
        if mutant.backend == "cuda":  # older GPUs round to 8 bits in integers
            return Run(tests, "cuda", "90"), Run((golden,), "cuda", "80")
        if mutant.backend == "triton":
            tox = ConfigParser(interpolation=None)
            tox.read(folder / "tox.ini")
            few = (golden, f"{kit}operations", f"{kit}log_prob", "-k", tox["interpreted"]["few"])
            return Run(few, "triton"), Run(tests, "triton", "90")
        return (Run(tests, mutant.backend),)
    first = [kit + name for name in ("forward", "rows_and_fusion", "golden", "gradients")]
    never = ("test_install.py", "test_mutations.py")  # the second would notice the change of the text itself
    others = [path for path in sorted(folder.glob("tests/*/test_*.py")) if path.name not in never]
    others = [path for path in others if path.parent.name != "clients"]
    name = mutant.fault.partition(":")[0]
    if found := of_tests(name, folder):
        first, others = found, []
        if name in OF_OPERATIONS:
            tables = ("one_call", "every_function", "bad_operands", "operators")
            first += [kit + "operations", *(folder / f"tests/operations/test_{table}.py" for table in tables)]
        if (folder / "fusednorm" / "conformance" / found[0].name).exists():
            first.append(kit + name.lower())
    return (Run(tuple(dict.fromkeys(map(str, [*first, *others])))),)


def failure(done):
    """The test that failed, or how the tests ended; None if all passed."""
    if done.returncode == 0 and " passed" in done.stdout:
        return None
    found = [line for line in done.stderr.splitlines() if line.startswith("executed PTX:")]
    if found:
        return found[0]
    if done.returncode < 0 or done.returncode > 128:
        return f"the tests die of signal {max(-done.returncode, done.returncode - 128)}"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed:
        sys.exit(f"the tests did not run:\n{done.stdout}{done.stderr}")
    return failed[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--self-check", action="store_true")
    parser.add_argument("--python", metavar="FILE[:FIRST-LAST]")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    if options.python:
        return int(mechanical.run(options.python, options.tests) > 0)
    only = options.only or [""]
    chosen = [m for m in MUTANTS if any(text in m.fault for text in only)]
    if options.self_check:
        chosen = [mutant for mutant in chosen if mutant.file.startswith(KERNELS)]
    if find_spec("vllm") is None and (left := [m for m in chosen if m.fault.startswith(OF_VLLM)]):
        print(f"{len(left)} mutants take vLLM: tox -e mutations-vllm")
        chosen = [mutant for mutant in chosen if mutant not in left]
    survivors, killers = 0, set()
    if wrong := misplaced(chosen):  # before the first is built, which takes a while
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mutant in chosen:
            build(mutant, folder)
            killer, run = (in_first_calls if options.self_check else first_failure)(folder, mutant)
            survivors += killer is None
            if killer and "::" in killer:
                killers.add(run._replace(tests=(killer.partition("[")[0],)))
            how = "SURVIVED" if killer is None else "caught"
            print(f"{how}: {mutant.promise}: {mutant.fault}: {(killer or '').split('/')[-1]}", flush=True)
        build(None, folder)
        broken = [run for run in sorted(killers) if run_tests(folder, run).returncode]
    for run in broken:
        print(f"{run.tests[0]} fails without a mutant too, and shows nothing")
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return int(bool(broken or (survivors and not options.self_check)))


if __name__ == "__main__":
    sys.exit(main())
