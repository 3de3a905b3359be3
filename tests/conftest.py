"""The kit's plug-in, which pyproject.toml names, serves these tests too: its matrix, its comparisons.

Where no device of Triton's is here, its backends run in Triton's interpreter; there, and where PTX is executed, tests
that would take too long are left out.
"""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fusednorm.conformance import plugin

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "clients")]  # helpers beside the tests


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Chooses Triton's interpreter, which Triton and fusednorm look for when they are imported: nothing has done so."""
    names = plugin.wanted(config)
    if names in (["triton"], ["triton_cpu"]) and "TRITON_INTERPRET" not in os.environ and not plugin.EMULATED:
        code = "from triton.runtime.driver import driver; print(driver.active.get_current_target().backend)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        if not found or (found == "cpu") != (names == ["triton_cpu"]):
            os.environ["TRITON_INTERPRET"] = "1"
    if plugin.interpreted():
        patch_language_once()


def patch_language_once():
    """Makes Triton's interpreter patch its language once per launch and module, instead of at every call in a kernel.

    Most of its time goes there. Triton 3.9 does it so; with another version the tests are merely slow.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        scope = types.SimpleNamespace(restore=lambda: None) if id(function.__globals__) in patched else patch(function)
        patched.add(id(function.__globals__))
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


#: Tests of the kit that all such backends leave out: most mixes of dtypes, and most sizes.
MOST = (
    r"test_norm_before_add.py::test_(flags|mixed_dtypes|data|rows_beyond|long_rows\[\w+-float)|"
    # test_cuda_launch.py has more quantizations.
    r"test_quantized.py::test_(every_quant|after_a)\w*\[\w+-(?!VLLM_INT8_TOKEN_CPU|VLLM_FP8_BLOCK_FUSED)|"
    r"test_sizes_of_rows\[\w+-(1|262144)\]|"
    r"test_(separate_calls|each_head_is\w+)\[\w+-(?!bfloat16)|"
    r"test_norm_before_add.py::test_golden_vectors\[\w+-(?!(0|3|6|9|20|23|30)\])|"
    r"test_(dtypes|gradients|fused_equals_unfused)\[\w+-(?!bfloat16-float32|float32-float16|float64-bfloat16)|"
    r"(?<!affine.py::)test_mixed_dtypes\[\w+-(?!bfloat16-float32|float32-none|float16-bfloat16)|"
    r"test_sizes\[\w+-(?!(1|8|33|64|128|768|1024|1025|1029|2048|4097|5120|7168|18432|40999|262144)\])|"
    r"number_of_threads|rows_of_one_type|"
)
#: Where the rotation is torch's, and its norm that of other tests; of `cuda` test_cuda_launch.py has rotations.
ROTATIONS = r"test_rotation.py::test_(flags|tables|data)|"
#: The same where each kernel of a quantizer or of a gate must be compiled: bfloat16 has every flag, and float64.
MOST_COMPILED = MOST + (
    r"test_quantized.py::test_(golden\w*\[\w+-(?!0|7)|separate_calls\[\w+-bfloat16-float32)|"
    r"test_norm_gated.py::test_(flags\[\w+-float(16|32)|many_rows\[\w+-gate)|test_rotation.py::test_memory\[\w+-float16|"
)
#: What else takes too long: in the interpreter many rows and long ones; where PTX is executed many kernels, because
#: each must be compiled. `--everything` leaves out nothing.
LEFT_OUT = {
    # Each function of a gate has one dtype of 16 bits or of 32, beside every number of 16 bits, and float64.
    "cuda": MOST_COMPILED + ROTATIONS + r"test_affine.py::test_(bias|mixed_dtypes|many|long)|"
    r"test_dtypes_and_data\[\w+-(silu-float(16|32)|sigmoid-b?float16|gelu_tanh-(bfloat16|float32))|"
    r"test_rotation.py::test_operator\[\w+-float(16|32)|test_rows_beyond_the_cache|test_any_call|test_dtypes\[\w+-float64|"
    r"test_dtypes_of_(sums|outputs)\[\w+-(?!bfloat16)|test_(gradients|fused_equals_unfused|dtypes)\[\w+-float32|"
    r"two_levels\[\w+-float(16|32)-(31|40|1050|1100|18432)",
    "triton": MOST_COMPILED + r"test_affine.py::test_bias\w+\[\w+-float|"
    r"test_rotation.py::test_(flags|tables\w+)\[\w+-(?!bfloat16)|"
    r"test_any_call|test_a_hundred|test_large_gradients|several_long_rows.*-9000|size_of_the_outputs|"
    r"test_rows_beyond|depend_on_the_batch\[\w+-\w+-(1000|4096)|test_rows\[\w+-896-(257|513)|test_repetition",
    "triton, executed": MOST_COMPILED + r"test_affine.py::test_(bias|many|long|mixed_dtypes\[\w+-float)|"
    r"test_quantized.py::test_after_a_norm\[\w+-VLLM_INT8|"
    r"test_rotation.py::test_(flags\[\w+-(?!bfloat16)|tables\w+\[\w+-(?!float16)|operator\[\w+-(?!bfloat16|float64))|"
    r"test_rows_beyond_the_cache|test_long_rows|test_any_call|test_dtypes|"
    r"test_sizes\[\w+-(8|33|128|768|1024|1025|2048|5120|7168|40999|262144)\]|"
    r"test_(gradients|fused_equals_unfused)\[\w+-float|two_levels\[\w+-float(16|32|64)-(31|40|1050|1100|18432)|"
    r"test_data\[\w+-float(16|64)|test_layouts_of_incoming_gradients\[\w+-float(16|32)",
    "triton_cpu": MOST + ROTATIONS + r"test_affine.py::test_(bias|mixed_dtypes|many|long)|"
    r"gated.py::test_(flags|mixed_dtypes|dtypes|data|and_mul|many|rows_and_layouts)|"
    r"test_quantized.py::test_(separate|sizes_of_rows|after_a_(gate|norm\[\w+-VLLM_FP8))|"
    r"test_rows_and_fusion|test_rows(?!_in_two_levels)|two_levels.*-128|-\d{4,}\]|test_gradients\[|test_a_hundred|"
    r"test_layouts|test_row_counts|test_every_(?!16_bit_gate|boundary)|"
    r"-(large|tiny|outliers|zeros|cancelling|overflowing|inf row)\]|"
    r"test_large_gradients|formula|test_any_call|test_dtypes\[\w+-float64|test_accuracy|"
    r"test_data\[\w+-(float(16|64)-(nan row|subnormal)|(bfloat16|float32|float64)-ties)|"
    r"test_weight_offset\[\w+-(?!-0.3)|test_dtypes_of_sums\[\w+-(?!bfloat16)",
}


def pytest_collection_modifyitems(config, items):
    names = plugin.wanted(config)
    if len(names) != 1 or config.getoption("--everything") or not (plugin.EMULATED or plugin.interpreted()):
        return
    executed = ", executed" if plugin.EMULATED and names == ["triton"] else ""
    left_out = re.compile(LEFT_OUT.get(names[0] + executed, "$^"))
    config.hook.pytest_deselected(items=[item for item in items if left_out.search(item.nodeid)])
    items[:] = [item for item in items if not left_out.search(item.nodeid)]


@pytest.fixture(params=["C++", "Python"])
def asked_by(request, monkeypatch):
    """The fast path asks torch's C++ in versions of torch that the tests have seen, and Python in others."""
    from fusednorm.calls import (
        fast_path,
        listeners,  # not before pytest_configure
    )

    if request.param == "C++":
        yield
        return
    monkeypatch.setattr(listeners, "_TESTED", ())
    assert listeners.in_cpp(*listeners.IN_CPP) == (0, 0, 0)
    fast_path._open(fast_path._api)
    yield
    monkeypatch.undo()
    fast_path._open(fast_path._api)
