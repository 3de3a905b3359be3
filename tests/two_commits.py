"""Holds two commits beside each other: a refactoring is proved by what does not change.

    python tests/two_commits.py BEFORE AFTER [objects] [ptx] [triton] [calls] [bench] [--changed PATTERN]

`objects`: the assembly of each kernel_*.c, by GCC for this machine and for AArch64 where its compiler is. `ptx`: the
PTX that NVRTC makes of csrc/ for a range of calls. `triton`: Triton's own representation of its kernels, and their
code for two kinds of GPU. Comments, names and the order of functions do not count. No GPU is needed. `calls`: the
results and the errors of inputs, forward and backward, bit by bit and word by word; those that differ are counted by
what they were and are, numbers left out. BEFORE's tests/fuzz.py makes the inputs, because another one may use
arguments that BEFORE lacks; `--inputs COMMIT` names another commit. `bench`: the time of calls of the cpu backend, of
every operation, in two processes in turn; a ratio above 1.05 in each of three runs is a difference. All are compared
unless some are named. `calls` and `bench` compile both commits, which takes cmake and ninja.

Differences are printed, one a line. Status 1 if there is one that no `--changed` names (a pattern with * and ?).
"""

import argparse
import fnmatch
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = ["-std=gnu11", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"]  # CMake's, for a release
SIZES = (96, 128, 896, 1000, 4096, 7168, 16384, 65536)
KINDS = (  # x, residual, weight
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", None, "float16"),
    ("float32", "float32", None),
    ("float64", "bfloat16", "float64"),
)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def renamed(text, names):
    """The text with each name that matches the pattern replaced by the number of its first appearance."""
    found = {}
    return re.sub(names, lambda match: f"@{found.setdefault(match[0], len(found))}", text)


class Commit:
    """A commit's files, and folders from which Python imports its package: uncompiled, and installed."""

    def __init__(self, name, folder):
        self.name, self.source, self.package = name, folder / "source", folder / "package"
        archive = subprocess.run(["git", "-C", ROOT, "archive", name], capture_output=True, check=True).stdout
        self.source.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", self.source], input=archive, check=True)
        information = self.package / "fusednorm-0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fusednorm\nVersion: 0\n")
        for part in ("fusednorm", "backends", "csrc"):
            shutil.copytree(self.source / part, self.package / "fusednorm" / part.replace("fusednorm", ""))

    @functools.cached_property
    def installed(self):
        """A folder."""
        folder = self.package.with_name("installed")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            folder,
        ]
        subprocess.run([*command, self.source], check=True)
        return folder

    def started(self, package, *what):
        """This file, run with the commit's package."""
        environment = os.environ | {"PYTHONPATH": str(package), "TRITON_DISABLE_LINE_INFO": "1"}
        command = [sys.executable, "-P", __file__, "--answer", *map(str, what)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def asked(self, package, *what):
        """What it answers: a dictionary."""
        with self.started(package, *what) as process:
            answer = process.communicate()[0]
        if process.returncode:
            sys.exit(f"{self.name}: {what} ends with status {process.returncode}")
        return json.loads(answer)


def compilers():
    """By architecture: a C compiler that finds its headers."""
    emulation = Path.home() / ".cache" / "fusednorm-emulation"
    found = {}
    for name, choices in {
        "": [os.environ.get("CC", "gcc")],
        "aarch64 ": ["aarch64-linux-gnu-gcc", *emulation.glob("aarch64-*/bin/aarch64-linux-gnu-gcc")],
    }.items():
        for choice in choices:
            command = [choice, "-fsyntax-only", "-xc", "-include", "math.h", os.devnull]
            try:
                works = subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
            except FileNotFoundError:
                works = False
            if works:
                found[name] = choice
    print("compilers:", ", ".join(map(str, found.values())), flush=True)
    return found


def symbols(assembly):
    """By name: the lines of each function and each constant."""
    found, current, names, code = {}, None, set(), True
    data = re.compile(r"\.(?:byte|[248]byte|value|hword|short|word|long|xword|quad|zero|string|ascii)\b")
    for line in assembly.splitlines():
        line = re.sub(r"\s*(?://.*|#(?=\s|APP|NO_APP).*)$", "", line).strip()
        if label := re.fullmatch(r"([\w.$]+):", line):
            if code and label[1].startswith(".L"):
                current.append(line)
            else:
                names = {label[1]}
                current = found[label[1]] = []
        elif alias := re.fullmatch(r"\.set\s+([\w.$]+),\s*(\S+)", line):
            found[alias[1]] = [f"alias {alias[2]}"]
        elif line.startswith((".text", ".section", ".data", ".bss")):
            code = line.startswith(".text") or ".text" in line
        elif line.startswith(".size") and code:
            current = []
        elif line and names and (not line.startswith(".") or data.match(line)):
            current.append(line)
    return {name: lines for name, lines in found.items() if lines}


def functions(assembly):
    """By name: what each function says by itself, and what each exported one says with all that it refers to."""
    found = symbols(assembly)
    within = {
        label: name for name, lines in found.items() for label in re.findall(r"(?m)^(\.L\w+):$", "\n".join(lines))
    }
    word, known = re.compile(r"[A-Za-z_.$][\w.$]*"), {}

    def text(name, deep):
        def told(match):
            word = match[0]
            if word in within and within[word] == name:
                return word
            target = within.get(word, word)
            return (whole(target) if deep else "local") if target in found else word

        return renamed(word.sub(told, "\n".join(found[name])), r"\.L\w+")

    def whole(name):
        if name not in known:
            known[name] = "recursion"
            known[name] = digest(text(name, True))
        return known[name]

    exported = set(re.findall(r"(?m)^\s*\.globa?l\s+(\S+)", assembly))
    alone = {name: digest(text(name, False)) for name in found if not name.startswith(".L")}
    return alone, {name: whole(name) for name in sorted(exported & set(found))}


def objects(before, after, asked):
    """Differences between the kernels of the cpu backend."""
    jobs, differences = [], []
    for name, compiler in compilers().items():
        for commit in (before, after):
            exact = re.findall(r"(?<!\w)-f[\w-]+(?:=\w+)?", (commit.source / "cpu/CMakeLists.txt").read_text())
            more = ["-fno-section-anchors"] if name else []  # else constants have no names
            for file in sorted((commit.source / "cpu").rglob("kernel_*.c")):
                command = [compiler, *RELEASE, *exact, *more, f"-I{commit.source}/cpu", file]
                jobs.append(((commit, f"{name}{file.stem}"), command))

    def output(command, *more):
        return subprocess.run([*command, *more, "-o-"], stdout=subprocess.PIPE, text=True, check=True).stdout

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = pool.map(lambda job: digest(output(job[1], "-E", "-P")), jobs)
        files = {(*key, source): command for (key, command), source in zip(jobs, sources, strict=True)}
        # Most commits change few files: what is the same after the preprocessor is compiled once.
        once = {(file, source): command for (_, file, source), command in files.items()}
        compiled = dict(
            zip(once, pool.map(lambda command: functions(output(command, "-S")), once.values()), strict=True)
        )
    results = {(commit, file): compiled[file, source] for commit, file, source in files}
    empty = {}, {}
    for file in sorted({file for _, file in results}):
        (old, old_exported), (new, new_exported) = (results.get((commit, file), empty) for commit in (before, after))
        if new:
            print(f"{file}: {len(new)} functions and tables", flush=True)
        gone, come = Counter(old.values()), Counter(new.values())
        differences += [f"{file}: {name} (before)" for name in old if old[name] in gone - come]
        differences += [f"{file}: {name} (after)" for name in new if new[name] in come - gone]
        differences += [
            f"{file}: all of {name}"
            for name in sorted(old_exported.keys() | new_exported.keys())
            if old_exported.get(name) != new_exported.get(name)
        ]
    return differences


def compared(what, package):
    """A function: differences between the answers of two commits."""

    def differences(before, after, asked):
        packages = [getattr(commit, package) for commit in (before, after)]
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(lambda c, p: c.asked(p, what, asked.seed, asked.calls), (before, after), packages)
        print(f"{what}: {len(new)} compared", flush=True)
        return [f"{what}: {label}" for label in sorted(old.keys() | new.keys()) if old.get(label) != new.get(label)]

    return differences


def calls(before, after, asked):
    """Kinds of differences between the outcomes of calls."""
    with tempfile.TemporaryDirectory() as folder:
        return _calls(before, after, asked, Commit(asked.inputs or asked.before, Path(folder)).source / "tests")


def _calls(before, after, asked, tests):
    what = "calls", asked.seed, asked.calls, tests
    found, first, count = Counter(), {}, 0

    def kind(text):
        return "returned" if text.startswith("returned") else re.sub(r"[\[\d\], ]*\d[\[\d\], ]*", "#", text.strip())

    with before.started(before.installed, *what) as old, after.started(after.installed, *what) as new:
        for was, now in zip(old.stdout, new.stdout, strict=True):
            if was != now:
                pair = kind(was), kind(now)
                found[pair] += 1
                first.setdefault(pair, count)
            count += 1
            if count % 100_000 == 0:
                print(f"calls: {count} compared, {sum(found.values())} differ", flush=True)
    assert count == asked.calls
    print(f"calls: {count} compared", flush=True)
    return [
        f"calls: {number} times, first input {first[pair]}: {pair[0]!r}, now {pair[1]!r}"
        for pair, number in found.most_common()
    ]


def bench(before, after, asked):
    """Cells of which the times differ by more than 5 % in each of three runs: the least of each commit's."""
    chosen, ratios = None, {}
    for _ in range(3):
        times = timed(before, after, asked, chosen)
        ratios = {cell: min(new) / min(old) for cell, (old, new) in times.items()}
        for cell, ratio in ratios.items():
            print(f"{ratio:6.3f}  {min(times[cell][0]) * 1e6:10.2f} us  {cell}", flush=True)
        chosen = [cell for cell, ratio in ratios.items() if ratio > 1.05]
    return [f"bench: {cell}: {ratios[cell]:.3f}" for cell in chosen]


def timed(before, after, asked, chosen):
    """By cell: the times of one run, by the commit before and by that after; of all cells, or of those chosen."""
    with before.started(before.installed, "bench") as old, after.started(after.installed, "bench") as new:
        cells = json.loads(old.stdout.readline())
        assert cells == json.loads(new.stdout.readline())
        times = {cell: ([], []) for cell in cells if chosen is None or cell in chosen}
        for turn in range(asked.turns):
            for cell, of_both in times.items():
                for number, process in ((0, old), (1, new))[:: 1 if turn % 2 else -1]:
                    print(cell, file=process.stdin)
                    of_both[number].append(float(process.stdout.readline()))
        old.stdin.close()
        new.stdin.close()
    return times


def module(now, before):
    """A module of the backends, by its name and by the one that it had."""
    try:
        return importlib.import_module(f"fusednorm.backends.{now}")
    except ModuleNotFoundError:
        return importlib.import_module(f"fusednorm.backends.{before}")


def calls_of(backend):
    """A commit's own functions that choose the kernel of a forward pass and those of a backward pass."""
    chooser = module("cuda.choice", "cuda_kernels") if backend.__name__.endswith("cuda") else backend
    try:
        from fusednorm.backends.kernel_keys import BackwardKind, ForwardKind
    except ImportError:  # a newer commit: one type for kinds of calls
        return of_one_kind(chooser)

    def forward(x, residual, weight, out, rstd, size, offset, round_sum, round_norm, alignment, machine):
        kind = ForwardKind(x, residual, weight, out, residual, size, round_sum, round_norm, rstd, offset, alignment)
        return chooser.forward_variant(kind, machine)

    return forward, lambda *kind: chooser.backward_variants(BackwardKind(*kind[:-1]), kind[-1])


def of_one_kind(chooser):
    """The functions of a commit that has one type for kinds of calls."""
    sys.path.insert(0, str(Path(__file__).parent))
    import kernel_kinds

    def forward(x, residual, weight, out, rstd, size, offset, round_sum, round_norm, alignment, machine):
        flags = {"rstd": rstd, "weight_offset": offset, "round_sum": round_sum, "round_norm": round_norm}
        return chooser.forward_variant(
            kernel_kinds.norm(x, residual, size, alignment, weight=weight, out=out, **flags), machine
        )

    def backward(dy, d_total, h, weight, dx, dresidual, dweight, wide, size, offset, alignment, machine):
        dtypes = {"d_total": d_total, "h": h, "weight": weight, "dx": dx, "dresidual": dresidual, "dweight": dweight}
        kind = kernel_kinds.norm_backward(dy, d_total, size, alignment, rstd=wide, weight_offset=offset, **dtypes)
        return chooser.backward_variants(kind, machine)

    return forward, backward


def kernels(backend, machine, sizes=SIZES):
    """The kernels that a range of calls takes, by the call; ``machine``: a compute capability, or threads of a warp."""
    import torch

    forward, backward = calls_of(backend)
    for number, size in enumerate(sizes):
        for kind in KINDS:
            x, residual, weight = (name and getattr(torch, name) for name in kind)
            h, accumulator = residual or x, torch.float64 if x == torch.float64 else torch.float32
            alignment, odd = 32 if number % 2 else x.itemsize, number % 3 == 1
            label = f"{kind} x {size}, aligned to {alignment}"
            yield label, forward(x, residual, weight, x, number % 2 == 0, size, odd, not odd, odd, alignment, machine)
            rest = accumulator, size, odd, alignment, machine
            other = None if residual == x else residual
            for variant in backward(x, residual, h, weight, x, other, weight, *rest).values():
                yield f"{label}, all gradients", variant
            for variant in backward(x, None, h, weight, x, None, None, *rest).values():
                yield f"{label}, gradient of x", variant


def answer_ptx(*_):
    """By kernel and call: the PTX."""
    from cuda.bindings import nvrtc

    import fusednorm
    from fusednorm.backends import cuda

    exact = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]
    files = {path.name: path.read_bytes() for path in (Path(fusednorm.__file__).parent / "csrc").glob("*.cu*")}
    headers = [name for name in files if name.endswith(".cuh")]
    contents, names = [files[name] for name in headers], [name.encode() for name in headers]

    @functools.cache
    def compiled(kernel, defines, capability):
        _, program = nvrtc.nvrtcCreateProgram(files[f"{kernel}.cu"], b"kernel.cu", len(headers), contents, names)
        options = [f"-arch=compute_{capability}", *exact, *(f"-D{name}={value}" for name, value in defines)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        assert status == 0, (kernel, defines)
        text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
        nvrtc.nvrtcGetPTX(program, text)
        ptx = re.sub(r"(?m)^\s*//.*\n|\s*//.*$", "", text.decode().rstrip("\0"))
        ptx = re.sub(r"(?m)^\.global .* \w+ = .*;\n", "", ptx)  # named constants, which code has as numbers
        return digest(renamed(ptx, rf"\b_Z\w+|\b{kernel}\w*|\$L\w+"))

    return {
        f"{variant.kernel} sm_{capability}: {label}": compiled(variant.kernel, variant.defines, capability)
        for capability in (75, 80, 90, 100)
        for label, variant in kernels(cuda, capability)
    }


def answer_triton(*_):
    """By kernel and constants: Triton's representation, PTX, and AMD's assembly."""
    cache = tempfile.TemporaryDirectory()
    os.environ["TRITON_CACHE_DIR"] = cache.name
    from triton.backends.compiler import GPUTarget

    triton_gpu, triton_host = module("triton.gpu", "triton_gpu"), module("triton.host", "triton_host")
    found = {}
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        for label, variant in kernels(triton_gpu, target.warp_size, SIZES[1::2]):
            texts = triton_host.compiled(variant, target).asm
            ttir = re.sub(r"(?m)^#loc.*\n|\s*loc\((?:[^()]|\([^()]*\))*\)", "", texts["ttir"])
            code = texts["ptx"] if target.backend == "cuda" else texts["amdgcn"]
            code = re.sub(r"(?m)^\s*(//|;|\.loc|\.file).*\n", "", code)
            found[f"{variant.function.__name__} {target.arch}: {label}"] = digest(renamed(ttir, r"%\w+")) + digest(code)
    return found


def answer_calls(seed, count, tests):
    """Prints, for each input of the folder's fuzz.py, what it returns, as a digest, or raises."""
    sys.path.append(tests)
    import fuzz
    import torch

    import fusednorm
    from fusednorm.backends import cpu

    def told(given):
        function = given.backward() if given.gradients else lambda: given.call(given.operands)
        try:
            results = fuzz.as_bytes(function() if function else ())
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("\n", " ")
        parts = hashlib.sha256()
        for result in results:
            values = result.detach()
            if values.is_floating_point():  # as_bytes has made 8-bit numbers whole
                values = values.masked_fill(values.isnan(), torch.nan)  # NaN is NaN
            image = values.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
            parts.update(str((values.dtype, values.shape)).encode() + image.numpy().tobytes())
        return f"returned {parts.hexdigest()[:16]}"

    memories = [fuzz.Memory() for _ in range(fuzz.MEMORIES)]
    fusednorm.rms_norm(torch.ones(1, 2))  # opens the fast path
    for number in range(int(count)):
        given = fuzz.Input(int(seed), number, memories, list(fuzz.OPERATIONS))
        torch.set_num_threads(given.threads)
        with cpu.use_variant(given.isa):
            print(told(given), flush=number % 1000 == 0)


def bench_cells():
    """By name: functions that make a call to be timed, for every operation."""
    import torch

    from fusednorm.declare.declaration import Role
    from fusednorm.operations.listed import every

    def cell(listed, dtype, rows, hidden, odd, backward):
        x, other = (torch.randn(rows, hidden * (1 + odd)).to(dtype)[:, :: 1 + odd] for _ in range(2))
        given = listed.of_sample(x, other, torch.randn(hidden).to(dtype))
        if not backward:
            return lambda: listed.function(**given)
        leaves = {
            name: t.detach().requires_grad_()
            for name, t in given.items()
            if isinstance(t, torch.Tensor) and t.is_floating_point() and listed.operands.get(name) is not Role.TABLE
        }
        results = listed.function(**given | leaves)
        results = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
        return functools.partial(
            torch.autograd.grad,
            results,
            list(leaves.values()),
            [torch.randn(y.shape).to(y.dtype) for y in results],
            retain_graph=True,
            allow_unused=True,
        )

    norm = "fused_add_rms_norm"  # whose other path, other dtype and rows beyond the caches are timed too
    return {
        f"{name}{', gradients' * backward}{', slow path' * odd}, {rows} x {hidden} {dtype}": functools.partial(
            cell, listed, getattr(torch, dtype), rows, hidden, odd, backward
        )
        for name, listed in every().items()
        for backward in range(1 + (listed.differentiable and listed.exact_gradients))  # others are torch's products
        for odd in range(1 + (name == norm))
        for dtype in ("bfloat16", "float16", "float32", *["float64"] * (name == norm))
        for rows, hidden in ((1, 4096), (256, 4096), (2048, 128), *[(2048, 4096)] * (name == norm))
    }


def answer_bench():
    """Prints the names of the cells, then times each one that is asked for: seconds per call."""
    import torch

    torch.set_num_threads(1)
    # Both commits' processes on one processor: on two, they differ by up to a quarter.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    cells = bench_cells()
    print(json.dumps(list(cells)), flush=True)
    for line in sys.stdin:
        torch.manual_seed(1)
        timer = timeit.Timer(cells[line.strip()]())
        number = max(1, int(2e-3 / (first := timer.timeit(1))))
        print(min(timer.repeat(5 if first < 2e-2 else 1, number)) / number, flush=True)


PARTS = {
    "objects": objects,
    "ptx": compared("ptx", "package"),
    "triton": compared("triton", "package"),
    "calls": calls,
    "bench": bench,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all of them unless some are named")
    parser.add_argument("--changed", action="append", default=[], help="a difference that is meant")
    parser.add_argument("--calls", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--inputs", help="the commit whose tests/fuzz.py makes the inputs; BEFORE unless named")
    parser.add_argument("--seed", type=int, default=1, help="which inputs")
    parser.add_argument("--turns", type=int, default=15, help="how often each call is timed in each process")
    asked = parser.parse_args()
    unnamed = 0
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Commit(getattr(asked, name), Path(folder) / name) for name in ("before", "after"))
        for part in asked.parts or PARTS:
            for difference in PARTS[part](before, after, asked):
                meant = any(fnmatch.fnmatch(difference, f"*{pattern}*") for pattern in asked.changed)
                unnamed += not meant
                print(f"{'meant' if meant else 'DIFFERS'}: {difference}", flush=True)
    print("nothing else differs" if not unnamed else f"{unnamed} differences")
    sys.exit(unnamed > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--answer":
        sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]  # no editable installs
        answer = globals()[f"answer_{sys.argv[2]}"](*sys.argv[3:])
        if answer is not None:
            json.dump(answer, sys.stdout)
    else:
        main()
