"""Declared operations have the bits of their formulas, and each operation, declared or not, is in all tools."""

import inspect
import itertools
import json
import sys

import pytest
import torch
from every_operation import FUNCTIONS, Named, called

import fusednorm
from fusednorm.__main__ import main
from fusednorm.conformance.cases import DTYPES
from fusednorm.declare.declaration import Role
from fusednorm.operations.front_door import PUBLIC
from fusednorm.operations.listed import every
from fusednorm.tools import check
from fusednorm.tools.measure import bench, clock, workloads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [one for one in PUBLIC if not one.__name__.endswith(("_", "quant", "quantize"))])
def test_results_are_those_of_the_formula(function, dtype):
    """With the flags of all samples, and without optional operands."""
    declaration = PUBLIC[function].declaration
    given = {operand.name: FUNCTIONS[function.__name__][operand.name] for operand in declaration.operands}
    fixed = {operand.name for operand in declaration.operands if operand.dtype is not None}
    if fixed and dtype is torch.float64:  # which then goes with no operand
        return
    given = {name: t.to(dtype) if t.is_floating_point() and name not in fixed else t for name, t in given.items()}
    optional = {operand.name: None for operand in declaration.operands if operand.optional}
    eps = {"eps": declaration.defaults["eps"]} if "eps" in declaration.flags else {}  # of layer_norm it is another one
    for sample, operands in itertools.product(declaration.samples, (given, given | optional)):
        flags = eps | sample
        wanted = declaration.formula(**operands, **(declaration.defaults | flags))
        for result, expected in zip(called(function, operands | flags), wanted, strict=False):
            assert result.dtype == expected.dtype
            assert result.equal(expected)


def test_every_operation_is_listed():
    functions = {name for name in fusednorm.__all__ if inspect.isroutine(getattr(fusednorm, name))}
    tools = {"accelerate_torch", "backends", "contract", "explain", "prewarm", "register_backend"}
    names = {name.rstrip("_") for name in functions - tools} | {function.__name__.rstrip("_") for function in PUBLIC}
    assert names == every().keys() > {"pick", "rms_norm_scaled", "divided_by_squares"}


@pytest.fixture(params=every().values(), ids=lambda listed: listed.name)
def listed(request):
    return request.param


def test_explain_names_it(listed):
    residual = torch.zeros(2, 128) if "residual" in listed.operands else None
    for function in filter(None, (listed.function, listed.in_place)):
        x = torch.zeros(2, 128, dtype=torch.int8 if listed.name == "int8_linear" else None)
        text = str(fusednorm.explain(x, residual, function=function))
        own = listed.name in ("linear", "int8_linear", "modulate", "attention", "paged_attention") and "cpu:" in text
        by = "a call of its own" if own else "torch's operations"
        assert listed.steps or f"{listed.name} runs by {by}" in text


def test_prewarm_makes_its_calls(listed):
    with Named() as named:
        fusednorm.prewarm(128, torch.float32, training=True, function=listed.function)
    seen = named.functions.count(listed.function)
    named.functions.clear()
    with named:
        fusednorm.prewarm(128, torch.float32, training=True)
    assert seen - named.functions.count(listed.function) == (4 if listed.differentiable else 2)


def test_contract_lists_its_flags(listed):
    """Those that are not the default, and eps; so does the digest."""

    class Module(torch.nn.Module):
        def __init__(self, **flags):
            super().__init__()
            self.flags = flags

        def _fusednorm_steps(self, of_rows):
            return [(listed.name, self.flags)]

    flags = {name: value for name, value in listed.sample.items() if not isinstance(value, Role)}
    plain, some = fusednorm.contract(Module(**listed.defaults)), fusednorm.contract(Module(**listed.defaults | flags))
    of_eps = {name: value for name, value in listed.defaults.items() if name == "eps"}
    assert plain.steps[0].flags == of_eps
    assert some.steps[0].flags == of_eps | flags
    assert (plain.digest == some.digest) == (not flags)


def test_check_compares_it(listed, monkeypatch):
    assert check.every()[listed.name] == listed
    monkeypatch.setattr(check, "every", lambda: {listed.name: listed})
    monkeypatch.setattr(check, "OPERATIONS_SHAPE", (3, 256))
    found = list(check.operations(check.subjects(["reference"])))
    assert [(one.dtype, one.differing) for one in found] == [(dtype, {listed.name: 0}) for dtype in check.DTYPES]


def test_bench_times_it(listed, monkeypatch, tmp_path):
    if listed.of_keys or listed.dtypes:
        assert listed.name not in workloads.every_measured()
        return
    monkeypatch.setattr(clock, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(clock, "ROUNDS", 2)
    monkeypatch.setattr(bench.Bench, "copy_bandwidth", lambda self: 1e9)
    names = [name for name, one in workloads.every_measured().items() if one.listed == listed]
    options = ["--ops", *names, "--shapes", "3x128", "--dtypes", "float32", "--peers", "eager"]
    monkeypatch.setattr(sys, "argv", ["fusednorm", "bench", *options, "--json", str(tmp_path / "found.json")])
    assert main() == 0
    cells = json.loads((tmp_path / "found.json").read_text())["cells"]
    assert [cell["op"] for cell in cells] == names != []
    for cell in cells:
        expected = {"fusednorm", "copy"}
        expected |= {"fusednorm out="} if listed.results[0].name in listed.parameters else set()
        expected |= {"torch eager"} if workloads.every_measured()[cell["op"]].text else set()
        assert cell["contenders"].keys() - {"fusednorm in place"} == expected
        assert all("error" not in times for times in cell["contenders"].values())


def lies(t, layout):
    """The same numbers in other memory: rows in columns, rows of wider ones, or in two levels."""
    if layout == "columns":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "wider":
        return torch.cat((t, t), -1)[..., : t.shape[-1]]
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", ["columns", "wider", "two levels"])
def test_samples_beyond_the_fast_path(layout):
    """Of samples, of rows, and of both; in new memory, and in memory of the caller, of which autograd is told."""
    y, full = torch.randn(2, 3, 4, 20, generator=torch.Generator().manual_seed(1))
    one = full[:, 0]
    for scale, shift in ((one, one), (one, full), (full, one), (full, full), (one[:, None], one)):
        with fusednorm.use_backend("reference"):
            wanted = fusednorm.modulate(y, scale, shift)
        with fusednorm.use_backend("cpu"):
            for operands in ((lies(y, layout), scale, shift), (y, lies(scale, "wider"), shift)):
                assert torch.equal(fusednorm.modulate(*operands), wanted)
                out = lies(torch.empty_like(y), layout)
                before = out._version
                assert fusednorm.modulate(*operands, out=out) is out
                assert torch.equal(out, wanted)
                assert out._version == before + 1
