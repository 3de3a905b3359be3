"""What is installed, and that a checkout in the working directory does not get in its way."""

import os
import platform
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import fusednorm

ROOT = Path(__file__).parents[2]
INSTALLED = Path(fusednorm.operations.norm.__file__).parents[1]
EDITABLE = INSTALLED == ROOT / "fusednorm"


@pytest.mark.skipif(EDITABLE, reason="an editable install has no files of its own; tox tests the wheel")
def test_the_wheel_contains_the_package_and_nothing_else():
    files = {str(f) for f in distribution("fusednorm").files}
    outside = {f for f in files if not f.startswith(("fusednorm/", "fusednorm-"))}
    assert [Path(f).stem for f in outside] == ["fusednorm"]  # the command
    for name in ("__init__.py", "py.typed", "backends/cpu.py", "backends/reference.py", "csrc/README.md"):
        assert f"fusednorm/{name}" in files
    for name in ("_cpu", "_fast_path"):
        (extension,) = (f for f in files if f.startswith(f"fusednorm/{name}."))
        assert ".abi3." in extension or extension.endswith(".pyd")
    outside_the_kit = {f for f in files if not f.startswith("fusednorm/conformance/")}
    assert not [f for f in outside_the_kit if f.endswith((".c", ".h")) or "test" in f]


def python(*arguments, **options):
    """Runs Python as people do, with the working directory on its path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, **options)


def test_the_install_is_used_from_within_the_checkout():
    """`python -m fusednorm` puts the working directory first, where a source tree of the same name lies."""
    show = "import fusednorm; print(fusednorm.operations.norm.__file__, fusednorm.backends.__file__, sep='\\n')"
    done = python("-c", show, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(INSTALLED / "operations" / "norm.py"), fusednorm.backends.__file__]
    done = python("-m", "fusednorm", "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_checkout_without_an_install_says_so():
    done = python("-S", "-c", "import fusednorm", cwd=ROOT)
    assert done.returncode == 1
    assert "is a source tree and not an install" in done.stderr
    assert "pip install ." in done.stderr


@pytest.mark.parametrize(
    "hide", ["import sys; sys.modules['triton'] = None", "import os; os.environ['PATH'] = '/nonexistent'"]
)
def test_without_triton_and_without_a_compiler(hide):
    """Neither is anybody's concern here."""
    done = python("-P", "-c", f"{hide}; import torch, fusednorm; fusednorm.rms_norm(torch.ones(2, 8))")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        "-ffast-math",
        "-fassociative-math -fno-signed-zeros -fno-trapping-math",
        "-freciprocal-math",
        "-fno-signed-zeros",
        "-ffinite-math-only",
        "-mfpmath=387",
    ],
)
def test_options_that_change_arithmetic_are_refused(options):
    if platform.machine() != "x86_64" and "387" in options:
        pytest.skip("only x86 has an x87")
    compile_one = ["gcc", "-std=c11", "-fsyntax-only", "-I", str(ROOT / "cpu"), str(ROOT / "cpu" / "run" / "gate.c")]
    subprocess.run(compile_one, check=True)
    refused = subprocess.run([*compile_one, *options.split()], capture_output=True, text=True)
    assert refused.returncode
    assert "fusednorm promises bits" in refused.stderr
