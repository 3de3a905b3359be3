"""What the GPU kernels do for a call, counted without a GPU: their PTX is executed on the CPU, every result compared.

    pip install -c constraints.txt . triton cuda-bindings nvidia-cuda-nvrtc
    tests/machines/emulation/ptx cuda --sm 90 -- python -P benchmarks/gpu_counts.py
    tests/machines/emulation/ptx triton --sm 90 -- python -P benchmarks/gpu_counts.py

`--any-order` (cuda) counts kernels that add up rows of more than 1024 elements in whatever order takes fewest
instructions. `--log-prob` counts log-probabilities of an id in each row, and their gradient, in place of norms.

A row of the table is a launch. Per element of x: bytes of global memory that threads load and store, with the least
that the kernel needs in brackets (every operand once; the weight, which caches hold, once per row); instructions of a
thread, of which "float" compute. "sectors": 32-byte sectors that warps touch, over the fewest that the bytes fill. Per
row: shuffles of all warps, barriers of a block, passes over shared memory. The registers of a thread are those of
NVIDIA's assembler, which Triton's wheel has; "run": the part of a processor's threads that can run at once with them.
"""

import argparse
import importlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch

import fusednorm

from ptx import machine

#: Rows, hidden size, dtype, whether gradients are wanted.
CALLS = (
    (1, 4096, torch.bfloat16, False),
    (64, 4096, torch.bfloat16, True),
    (64, 4096, torch.float32, True),
    (64, 8192, torch.bfloat16, True),
    (512, 128, torch.bfloat16, True),
    (8, 16384, torch.bfloat16, True),
    (4, 65536, torch.bfloat16, True),
)
#: The same of log-probabilities of an id in each row.
LOG_PROBS = ((64, 151_936, torch.bfloat16, True), (64, 151_936, torch.float32, True))
COLUMNS = ("shape", "dtype", "kernel", "blocks x threads", "loaded", "stored", "sectors", "instructions", "float")
COLUMNS += ("shuffles", "barriers", "passes", "registers", "run")
FLOATS = ("add", "sub", "mul", "div", "rcp", "sqrt", "fma")
OF_FLOATS = re.compile(r"\.b?f\d+(x2)?$")


def loaded_kernels():
    """The kernels that have been loaded, by their address in the machine: name and PTX. Filled while calls run."""
    found, load = {}, machine.load

    def noted(ptx, name):
        address, kernel = load(ptx, name)
        found[address] = name, ptx, kernel
        return address, kernel

    machine.load = noted
    return found


def assembled(ptx):
    """Registers of a thread; "-" where there is no assembler."""
    try:
        import triton
    except ImportError:
        return "-"
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = next((folder / name for name in ("ptxas-blackwell", "ptxas") if (folder / name).exists()), None)
    target = re.search(r"\.target\s+(\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "kernel.ptx").write_text(ptx)
        command = [assembler, "-v", f"-arch={target}", "kernel.ptx", "-o", "kernel.cubin"]
        said = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores" in said, said
    return int(re.search(r"Used (\d+) registers", said)[1])


def at_once(registers, threads, shared):
    """The part of a processor's 2048 threads that can run at once, by registers and 164 KiB of shared memory."""
    if registers == "-":
        return "-"
    of_block = -(-registers // 8) * 8 * threads
    blocks = min(65536 // of_block, 2048 // threads, 164 * 1024 // (shared + 1024))
    return f"{min(blocks * threads / 2048, 1):.0%}"


def needed(name, rows, hidden, dtype, gradients):
    """The least bytes per element that a kernel can load and store, by what it is for."""
    size, blocks = dtype.itemsize, min(rows, 256)
    partial = 4 * blocks / rows
    weight = size
    if name.startswith("log_prob"):
        return (size, size) if "backward" in name else (size, 12 / hidden)
    if name.startswith("forward"):
        return 2 * size + weight, 2 * size + 4 * gradients / hidden
    if name in ("weight_sum", "add_blocks"):
        return partial, size / rows
    if name == "weight_blocks":
        return 2 * size + 4 / hidden, partial
    return 3 * size + weight + 4 / hidden, size + partial * (name == "backward_blocks")


def counts(address):
    """Of one launch: bytes, sectors, instructions and the like, in all."""
    found = Counter()
    for name, warps, lanes, units in machine.executed(address):
        operation = name.split(".")[0]
        found["instructions"] += warps * 32
        found["float"] += warps * 32 * (operation in FLOATS and OF_FLOATS.search(name) is not None)
        found["shuffles"] += warps * (operation == "shfl")
        found["barriers"] += warps * (operation in ("bar", "barrier") and "arrive" not in name)
        if re.match(r"(ld|st)\.(global|shared)|(ld|st)matrix", name):
            vector = int((re.search(r"\.v(\d)", name) or [0, 1])[1])
            bits = int(re.search(r"\d+$", name)[0])
            kind = "passes" if "shared" in name else "loaded" if operation == "ld" else "stored"
            if kind == "passes":
                found["passes"] += units
            else:
                found[kind] += lanes * vector * bits // 8
                found["sectors"] += units
    return found


def row(call, name, ptx, found, launch):
    """The cells of the table for one launch."""
    rows, hidden, dtype, _ = call
    elements, (blocks, threads, shared) = rows * hidden, launch
    loaded, stored = needed(name, *call)
    registers = assembled(ptx)
    warps = threads // 32
    touched = found["sectors"] * 32 / (found["loaded"] + found["stored"])
    return [
        f"{rows} x {hidden}",
        str(dtype)[6:],
        name,
        f"{blocks} x {threads}",
        f"{found['loaded'] / elements:.2f} ({loaded:.2f})",
        f"{found['stored'] / elements:.2f} ({stored:.2f})",
        f"{touched:.2f}",
        f"{found['instructions'] / elements:.1f}",
        f"{found['float'] / elements:.1f}",
        f"{found['shuffles'] / rows:.1f}",
        f"{found['barriers'] / warps / rows:.2f}",
        f"{found['passes'] / rows:.1f}",
        str(registers),
        at_once(registers, threads, shared),
    ]


ANY_ORDER = """
    if constexpr (ROWS_IN_LANE == 1) {
        A sum = sums[0];
        for (int i = 1; i < COUNT; i++) sum += sums[i];
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum += exchanged(sum, distance);
        return sum;
    }
"""


def add_in_any_order():
    """Has the cuda backend compile kernels whose sums are not the specification's."""
    from fusednorm.backends.cuda import compiler as cuda_compiler

    sources, tree = cuda_compiler._sources(), "    add_lanes<COUNT, LANES_PER_ROW / 2>(sums);"
    row_header = sources["row.cuh"].decode()
    assert row_header.count(tree) == 1
    changed = {**sources, "row.cuh": row_header.replace(tree, ANY_ORDER + tree).encode()}
    cuda_compiler._sources = lambda: changed


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--any-order", action="store_true")
    parser.add_argument("--log-prob", action="store_true")
    arguments = parser.parse_args()
    any_order = arguments.any_order
    backend, target = os.environ["FUSEDNORM_BACKEND"], int(os.environ["FUSEDNORM_EMULATED_SM"])
    importlib.import_module(f"ptx.{backend}").install(target)
    machine.library().count_sectors(1)
    if any_order:
        add_in_any_order()
    kernels = loaded_kernels()
    torch.manual_seed(0)
    print(f"{backend}, sm_{target}, torch {torch.__version__}\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|---|---|" + "---:|" * 10)
    for call in LOG_PROBS if arguments.log_prob else CALLS:
        rows, hidden, dtype, gradients = call
        given = [torch.randn(rows, hidden, dtype=dtype) for _ in range(2)] + [torch.randn(hidden, dtype=dtype)]
        ids = torch.randint(hidden, (rows,))
        results = {}
        for name in (backend, "reference"):
            leaves = [tensor.detach().requires_grad_(gradients) for tensor in given]
            with fusednorm.use_backend(name):
                if arguments.log_prob:
                    leaves = leaves[:1]
                    outputs: tuple = (fusednorm.selected_log_prob(*leaves, ids),)
                else:
                    outputs = fusednorm.fused_add_rms_norm(*leaves)
                more = torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs]) if gradients else ()
            results[name] = [*outputs, *more]
        assert any_order or all(
            torch.equal(one, two) for one, two in zip(results[backend], results["reference"], strict=True)
        )
        for address, (name, ptx, _) in kernels.items():
            found = counts(address)
            if found["instructions"]:
                print("| " + " | ".join(row(call, name, ptx, found, machine.last_launch(address))) + " |")


if __name__ == "__main__":
    main()
