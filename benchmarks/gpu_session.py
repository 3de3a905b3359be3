"""All that a machine with an NVIDIA GPU is asked, in ten minutes: bits first, then streams and graphs, then times.

    pip wheel --no-deps -w wheels .                                    # where there is a network: our wheel, and
    pip download -d wheels -c constraints.txt cffi platformdirs rich pytest pytest-xdist hypothesis numpy
    python -P benchmarks/gpu_session.py --wheels wheels --out results  # on the machine, in the checkout

It makes an environment in OUT that sees the machine's torch and triton, installs from the wheels alone, and runs the
steps below, each for its seconds at most. Each writes OUT/NAME.txt and prints a line. Exit status 1 if any failed.
`--only NAME` runs some of the steps.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
KIT = "fusednorm.conformance"
TEST = ("python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend")
FEW = (f"{KIT}.test_golden", f"{KIT}.test_gradients::test_data", f"{KIT}.test_operations::test_data")
BENCH = ("python", "-P", "-m", "fusednorm", "bench", "--device", "cuda", "--backends", "cuda", "triton")

#: All that `bench` times, but for `add_norm` and its gradients, which have steps of their own with all shapes.
OPS = """norm layer_norm add_layer_norm norm_add norm_add_norm add_norm_int8 add_norm_fp8 add_norm_fp8_block
    rms_norm_quant layer_norm_quant fused_add_layer_norm_quant silu_and_mul_quant relu2_quant quantize gate
    silu_and_mul gelu_and_mul gelu_tanh_and_mul gelu relu2 softcap norm_gated l2_norm rotate qk_norm_rope
    modulate linear log_softmax logsumexp selected_log_prob selected_log_prob_and_entropy norm_add_norm_backward
    silu_and_mul_backward norm_gated_backward qk_norm_rope_backward"""

#: What is run, for how many seconds at most. Bits come first: without them no time matters.
STEPS = {
    "doctor": (20, ("python", "-P", "-m", "fusednorm", "doctor", "--json")),
    "kit_cuda": (120, (*TEST, "cuda", "-n", "8", "--everything", "--certificate", "OUT/cuda.json", "--pyargs", KIT)),
    "kit_triton": (120, (*TEST, "triton", "-n", "8", "--certificate", "OUT/triton.json", "--pyargs", KIT)),
    "gpu_cuda": (40, (*TEST, "cuda", "tests/backends/test_gpu.py", "tests/backends/test_large.py")),
    "gpu_triton": (40, (*TEST, "triton", "tests/backends/test_gpu.py", "tests/backends/test_large.py")),
    "bench": (60, (*BENCH, "--ops", "add_norm")),
    "bench_backward": (60, (*BENCH, "--ops", "backward")),
    "bench_steps": (90, (*BENCH, "--ops", *OPS.split(), "--peers", "--dtypes", "bfloat16", "--shapes", "2048x4096")),
    "log_prob": (30, ("python", "-P", "benchmarks/gpu_log_prob.py", "cuda", "triton")),
    "host": (30, ("python", "-P", "benchmarks/gpu_host_cost.py", "cuda")),
    "train": (60, ("python", "-P", "benchmarks/train.py", "--device", "cuda", "--minutes", "0.1")),
    **{
        name: (30, ("compute-sanitizer", "--error-exitcode", "9", "--tool", name, *TEST, "cuda", "--pyargs", *FEW))
        for name in ("memcheck", "racecheck", "initcheck", "synccheck")
    },
}


def environment(folder, wheels):
    """Makes an environment that sees the machine's packages; returns where its programs are."""
    subprocess.run((sys.executable, "-m", "venv", "--system-site-packages", folder), check=True)
    programs = folder / "bin"
    install = (programs / "python", *["-m", "pip", "install", "-q", "--no-index", "--find-links"], wheels)
    subprocess.run((*install, "pytest", "pytest-xdist", "hypothesis", "numpy", "fusednorm"), check=True)
    return programs


def run(name, out, programs):
    """Runs a step; returns a line that says how it went, and whether it passed."""
    seconds, command = STEPS[name]
    command = [part.replace("OUT", str(out)) for part in command]
    if shutil.which(command[0], path=f"{programs}{os.pathsep}{os.environ['PATH']}") is None:
        return f"{name}: {command[0]} is not on this machine", False
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "FUSEDNORM_CACHE_DIR": str(out / "cache")}
    begin = time.monotonic()
    with (out / f"{name}.txt").open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **path}, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            )
            how = "passed" if done.returncode == 0 else f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"ended after {seconds} s"
    last = (out / f"{name}.txt").read_text(errors="replace").strip().splitlines()
    return f"{name}: {how}, {time.monotonic() - begin:.0f} s: {last[-1] if last else ''}", how == "passed"


def main():
    """Runs the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="the folder of wheels to install")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--only", action="append", choices=STEPS, help="run only this step; may be repeated")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    programs = environment(out / "environment", given.wheels.resolve())
    results = []
    for name in given.only or STEPS:
        results.append(run(name, out, programs))
        print(results[-1][0], flush=True)
    shutil.rmtree(out / "environment")  # what is left are results
    return int(not all(passed for _, passed in results))


if __name__ == "__main__":
    sys.exit(main())
