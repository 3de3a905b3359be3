"""The conformance kit: the example of a backend is certified, and with one wrong bit it is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import printed_by, python

import fusednorm
from fusednorm.conformance import golden, plugin
from fusednorm.conformance.cases import F32

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_backend"
SOME = "golden or (equals_unfused and float16) or (sizes and (-33 or -1025)) or (test_data and float16)"


def install(source, folder):
    """Installs a package into a folder, with its entry points."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", folder, source], check=True)


def certify(folder, certificate, *arguments):
    """`python -m fusednorm conformance` where that folder's packages are installed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FUSEDNORM_", "PYTEST_", "TRITON_"))}
    command = ("-m", "fusednorm", "conformance", "--certificate", certificate, *arguments)
    done = python(*command, cwd=folder, env=clean | {"PYTHONPATH": str(folder)})
    return done, json.loads(certificate.read_text()) if certificate.exists() else None


def test_the_example_is_certified(tmp_path):
    source, packages = tmp_path / "source", tmp_path / "packages"
    shutil.copytree(EXAMPLE, source)
    install(source, packages)
    done, found = certify(packages, tmp_path / "certificate", "--backend", "numpy", "-k", SOME)
    assert done.returncode == 0, done.stdout
    assert found["backends"] == ["numpy"]
    for promise in ("same bits", "golden vectors", "fused equals unfused", "same gradients"):
        held = found["promises"][promise]
        assert held["float16"] == "holds"
        assert "FAILS" not in held.values()
        assert held["failed_tests"] == 0
    assert found["promises"]["same bits"]["float64"] == "-"
    assert "partial: 4 of 5 promises tested: " in done.stdout
    assert "tests were skipped: their reasons are below" in done.stdout
    assert "it computes in float32 only" in done.stdout
    assert found["first_difference"] is None


def test_one_wrong_bit_is_caught_and_named(tmp_path):
    """In the last element of rows of 1025, in bfloat16 only. The script that is printed shows it."""
    source, packages = tmp_path / "source", tmp_path / "packages"
    shutil.copytree(EXAMPLE, source)
    module = source / "fusednorm_numpy.py"
    right = "    if call.rstd is not None:\n        call.rstd.copy_"
    wrong = (
        "    if operation.hidden_size == 1025 and operation.out == torch.bfloat16:\n"
        "        call.out.view(torch.int16)[..., -1] ^= 1\n"
    )
    assert module.read_text().count(right) == 1
    module.write_text(module.read_text().replace(right, wrong + right))
    install(source, packages)
    done, found = certify(packages, tmp_path / "certificate", "--backend", "numpy", "-k", "sizes and (-33 or -1025)")
    assert done.returncode == 1
    assert found["promises"]["same bits"]["bfloat16"] == "FAILS"
    assert found["promises"]["same bits"]["float16"] == "holds"
    first = found["first_difference"]
    assert "1025" in first["message"]
    assert "[0, 1024]" in first["message"]
    assert first["script"] in done.stdout
    shown = printed_by(first["script"], PYTHONPATH=str(packages))
    got, _, _, wanted = [word for word in shown.split() if word.startswith("0x") or word in ("instead", "of")]
    assert int(got, 16) ^ int(wanted, 16) == 1


def test_names_of_backends_in_any_case():
    config = SimpleNamespace(getoption=lambda *_: "CPU, Nonsense")
    assert plugin.wanted(config) == ["cpu", "Nonsense"]


def test_a_backend_that_is_not_there(tmp_path):
    done, _ = certify(tmp_path, tmp_path / "certificate", "--backend", "nonsense")
    assert done.returncode == 4
    assert "there is no backend 'nonsense'; there are cpu" in done.stderr


def test_golden_vectors_are_those_that_their_script_writes(tmp_path):
    """On a machine of the same kind: the inputs are torch's random numbers."""
    golden.main(tmp_path)
    for file in golden.FILES:
        for name in (file.name, file.with_suffix(".bits").name):
            assert (tmp_path / name).read_bytes() == (file.parent / name).read_bytes(), name


def gated_cases(monkeypatch, *cases):
    """Puts cases before those of the gated file."""
    there = list(golden._stepped_cases())
    monkeypatch.setattr(golden, "_stepped_cases", lambda: [*cases, *there])
    monkeypatch.setattr(golden, "FILES", {golden.GATED: golden.FILES[golden.GATED]})


def test_a_case_leaves_the_others_alone(tmp_path, monkeypatch):
    """Wherever it is put: all lines that a file has stay as they are, and so do the numbers of its vectors."""
    gated_cases(monkeypatch, ("gelu", F32, None, {"out_dtype": None}))
    golden.main(tmp_path)
    before, after = (folder / golden.GATED.name for folder in (golden.GATED.parent, tmp_path))
    assert after.read_text().startswith(before.read_text().removesuffix("\n]\n") + ",\n")
    assert [golden.function_of(vector) for vector in golden.read(after)[-2:]] == ["gelu_and_mul", "gelu"]


def test_a_preset_leaves_the_others_alone(monkeypatch):
    """Numbers of presets, not their sequence, decide the rows."""
    there = golden.read(golden.QUANTIZED)
    monkeypatch.setattr(golden, "PRESETS", {"VLLM_FP8_TENSOR": 99} | dict(reversed(golden.PRESETS.items())))
    with fusednorm.use_backend("reference"):
        made = list(golden.vectors_of_quantized())
    assert len(golden.in_lines("quantized", there, made)) == len(there) + 1


def test_a_vector_that_is_there_does_not_change(tmp_path, monkeypatch):
    gated_cases(monkeypatch)
    (first, *others) = golden._gate_cases()
    monkeypatch.setattr(golden, "_gate_cases", lambda: [(*first[:3], 3, first[4]), *others])
    with pytest.raises(SystemExit, match=r"golden-gated.json: no case .* of line 2 any more, nor of 0 others"):
        golden.main(tmp_path)
    assert list(tmp_path.iterdir()) == []
