"""All that a machine with an NVIDIA GPU is asked, in less than ten minutes: what decides, all bits, then more times.

    pip wheel --no-deps -w wheels .                                    # where there is a network: our wheel, and
    pip download -d wheels -c constraints.txt cffi platformdirs rich pytest pytest-xdist hypothesis numpy
    pip download -d wheels --no-deps liger-kernel                      # and peers, which are timed beside fusednorm
    python -P benchmarks/gpu_session.py --wheels wheels --out results  # on the machine, in the checkout

It installs the wheels into OUT, beside the machine's torch and triton, and runs the steps below, each for its seconds
at most. Each writes OUT/NAME.txt and prints the same lines as they come, so that nothing is lost where the session is
ended. Exit status 1 if any step failed. `--only NAME` runs some of the steps.
`--device cpu --seconds 280` tries the session on a machine without a GPU: steps that need one are left out.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The seconds of a session, with the installation; those of steps are for this many, and fewer for a shorter one.
SECONDS, INSTALLATION = 560, 30
#: Where the wheels are installed, in OUT.
PACKAGES = "packages"

KIT = "fusednorm.conformance"
PYTHON = (sys.executable, "-P")
TEST = (*PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend")
FEW = (f"{KIT}.test_golden", f"{KIT}.test_gradients::test_data", f"{KIT}.test_operations::test_data")
BENCH = (*PYTHON, "-m", "fusednorm", "bench", "--device", "DEVICE", "--backends", "BACKENDS", "--minutes", "MINUTES")

#: All that `bench` times, but for the five of the first step.
OPS = """norm layer_norm add_layer_norm norm_add norm_add_norm add_norm_int8 add_norm_fp8 add_norm_fp8_block
    rms_norm_quant layer_norm_quant fused_add_layer_norm_quant silu_and_mul_quant relu2_quant quantize gate
    gelu_and_mul gelu_tanh_and_mul gelu relu2 softcap norm_gated l2_norm rotate
    modulate linear log_softmax logsumexp selected_log_prob_and_entropy norm_add_norm_backward
    silu_and_mul_backward norm_gated_backward qk_norm_rope_backward"""
FIRST = "add_norm backward silu_and_mul qk_norm_rope selected_log_prob"
#: Decoding, a prompt, and rows of heads.
SIZES = "1x4096 64x4096 16384x4096 64x16384 65536x128 1x8192 512x8192 4096x16384"


class Step(NamedTuple):
    """A command, and for how many seconds it may run."""

    seconds: int
    #: OUT, DEVICE, NAMES of backends, BACKENDS and MINUTES (a little less than its seconds) are replaced.
    command: tuple[str, ...]
    needs_gpu: bool = True


def kit(seconds, backend):
    """The step of the conformance kit, in eight processes."""
    return Step(seconds, (*TEST, backend, "-n", "8", "--certificate", f"OUT/{backend}.json", "--pyargs", KIT))


def on_gpu(backend):
    """The step of the tests that take a GPU: streams, graphs, more than 2^31 elements."""
    return Step(25, (*TEST, backend, "tests/backends/test_gpu.py", "tests/backends/test_large.py"))


def timed(seconds, file, *arguments):
    """A step of `bench`."""
    return Step(seconds, (*BENCH, "--json", f"OUT/{file}.json", "--dtypes", "bfloat16", *arguments), needs_gpu=False)


def sanitized(tool):
    """The step that runs a few tests of each kernel under a tool of NVIDIA's compute-sanitizer."""
    return Step(22, ("compute-sanitizer", "--error-exitcode", "9", "--tool", tool, *TEST, "cuda", "--pyargs", *FEW))


CHECK = (*PYTHON, "-m", "fusednorm", "check", "--backend", "NAMES", "--report", "OUT/report.json")
TRAIN = (*PYTHON, "benchmarks/train.py", "--device", "DEVICE", "--minutes", "0.1")

#: In this order. `bench` compares bits before it times, so the first times are those of right results.
STEPS = {
    "doctor": Step(10, (*PYTHON, "-m", "fusednorm", "doctor", "--json"), needs_gpu=False),
    "first": timed(60, "first", "--ops", *FIRST.split(), "--shapes", "2048x4096"),
    "kit_cuda": kit(90, "cuda"),
    "memcheck": sanitized("memcheck"),
    "racecheck": sanitized("racecheck"),
    "kit_triton": kit(80, "triton"),
    "gpu_cuda": on_gpu("cuda"),
    "gpu_triton": on_gpu("triton"),
    "check": Step(20, CHECK, needs_gpu=False),
    "steps": timed(50, "steps", "--ops", *OPS.split(), "--shapes", "2048x4096", "--peers", "eager"),
    "host": Step(15, (*PYTHON, "benchmarks/gpu_host_cost.py", "cuda")),
    "log_prob": Step(20, (*PYTHON, "benchmarks/gpu_log_prob.py", "cuda", "triton")),
    "train": Step(25, TRAIN, needs_gpu=False),
    "sizes": timed(22, "sizes", "--ops", "add_norm", "--shapes", *SIZES.split()),
    "initcheck": sanitized("initcheck"),
    "synccheck": sanitized("synccheck"),
}


def install(folder, wheels):
    """Installs all wheels into a folder; the machine's own torch and triton are used as they are."""
    command = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder)
    subprocess.run((*command, *sorted(wheels.glob("*.whl"))), check=True)


def run(name, command, seconds, out):
    """Runs a step; prints its lines and, at its end, one that says how it went. Returns whether it passed."""
    if shutil.which(command[0]) is None:
        print(f"{name}: {command[0]} is not on this machine", flush=True)
        return False
    of_step = {"PYTHONPATH": PACKAGES, "FUSEDNORM_CACHE_DIR": "cache"}
    env = {**os.environ, **{key: str(out / value) for key, value in of_step.items()}, "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with (
        (out / f"{name}.txt").open("w") as file,
        subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams) as process,
    ):
        # Its workers too: they would hold the GPU, and the pipe.
        end = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        for line in process.stdout:
            file.write(line)
            print(f"  {line}", end="", flush=True)
        process.wait()
        end.cancel()
    took = time.monotonic() - begin
    if took >= seconds and process.returncode == -signal.SIGKILL:
        how = f"ended after {seconds:.0f} s"
    else:
        how = "passed" if process.returncode == 0 else f"status {process.returncode}"
    print(f"{name}: {how}, {took:.0f} s", flush=True)
    return how == "passed"


def main():
    """Runs the steps."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="the folder of wheels to install")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--only", action="append", choices=STEPS, help="run only this step; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: leave out what needs a GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of the whole session (default: {SECONDS})")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    install(out / PACKAGES, given.wheels.resolve())
    backends = ("cuda", "triton") if given.device == "cuda" else ("cpu",)
    passed = True
    for name in given.only or STEPS:
        step = STEPS[name]
        if step.needs_gpu and given.device == "cpu":
            continue
        left = given.seconds - (time.monotonic() - begin)
        seconds = min(step.seconds * given.seconds / SECONDS, left)
        if seconds < 1:
            print(f"{name}: no time is left", flush=True)
            passed = False
            continue
        minutes = max(seconds - 10, seconds / 2) / 60  # a last measurement takes seconds, and so do the tables
        words = {"OUT": str(out), "DEVICE": given.device, "MINUTES": f"{minutes:.3f}", "NAMES": ",".join(backends)}
        command = []
        for part in step.command:
            for word, value in words.items():
                part = part.replace(word, value)
            command += backends if part == "BACKENDS" else (part,)
        passed &= run(name, command, seconds, out)
    shutil.rmtree(out / PACKAGES)  # what is left are results
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
