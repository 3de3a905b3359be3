"""Each operand and flag of each public function, of each wrong kind: the error names it, and a cure in its words."""

import inspect
import math
import re

import pytest
import torch
from every_operation import FUNCTIONS, MORE, RIGHT, clones, function_of, tensors, without_outputs, written_by

from fusednorm.operations.front_door import PUBLIC
from fusednorm.operations.listed import every

WRONG = {
    "no tensor": lambda t: 3,
    "nothing": lambda t: None,
    "an integer": lambda t: t.to(torch.int16),
    "an array": lambda t: t.numpy(),
    "a dtype": lambda t: t.to(torch.complex64),
    "wider": lambda t: t.double(),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "a device": lambda t: t.to("meta"),
    "rows": lambda t: torch.cat((t, t, t)),
    "columns": lambda t: t[..., :-1].contiguous(),
    "one row of memory": lambda t: t[:1].expand(t.shape),
    "no dimension": lambda t: t.flatten()[0],
}
#: Words of the error of some kinds where the operand is read: what was given, and its cure.
SAID = {
    "no tensor": "must be a torch.Tensor.*, got int",
    "an array": r"must be a torch.Tensor.*, got ndarray; .*(torch\.as_tensor|pass |leave it out)",
    "an integer": "got int16",
    "sparse": r"must be a dense tensor, got.*sparse.*(\.to_dense\(\)|pass )",
    "nested": r"must be a dense tensor, got a nested one.*values\(\)",
}
#: Right, though another shape: the only operand with rows, one element without a dimension, one position for all.
FITS = {(name, "x", "rows") for name in ("rms_norm_", "layer_norm_")}
FITS |= {(key, "no dimension") for key in ("scale", "zero_point", "positions", "temperature")}
#: The operand that decides the dtype of the computation, if no output is given, and tables, of any dtype.
FITS |= {(name, key, "wider") for name in FUNCTIONS for key in ("cos", "sin", next(iter(FUNCTIONS[name])))}
FITS -= {("int8_linear", "q", "wider")}
FITS |= {("qk_norm_rope_", "k", "wider"), ("temperature", "no tensor")}
FITS |= RIGHT
#: What is right alone, and then does not fit the others, which are named.
OF_ROWS = {"x", "y", "z", "q", "k", "gate", "residual", "up", "cos", "sin", "ids", "logits"}
ALONE = {(name, key, wrong) for name in FUNCTIONS for key in OF_ROWS for wrong in ("a device", "rows", "columns")}
ALONE |= {(name, "weight", "rows") for name in ("linear", "int8_linear")}
ALONE |= {("paged_attention", "lengths", wrong) for wrong in ("rows", "columns")}
#: Wrong values of arguments that are no operands.
FLAGS = dict.fromkeys(("eps", "weight_offset", "x_scale"), ("1", None, 1j, torch.ones(1), 10**400))
FLAGS |= dict.fromkeys(("round_sum", "round_norm", "norm", "interleaved", "round_products"), (2, None, "no"))
FLAGS |= {"norm_before_gate": (2, None), "group_size": (0, 4, 2.0), "activation": ("swish", None)}
FLAGS |= {"next_eps": ("1", 1j), "quantization": ("int8", None)}
FLAGS |= {"out_dtype": (torch.int8, "float32", torch.float64), "residual_dtype": (torch.int8, torch.float64)}
FLAGS |= {"between": (torch.float16, torch.float64, "float32")}
FLAGS |= {"limit": ("1", 0, -1.0, math.nan), "alpha": ("1", None, 0.5, math.inf), "up_offset": ("1", None, math.inf)}
FLAGS |= {"clamp": ("no", None), "round_steps": (2, None)}
for operation in PUBLIC.values():
    for flags, *_ in operation.declaration.refused:
        FLAGS |= {flag: (*FLAGS.get(flag, ()), value) for flag, value in flags.items()}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def refused(function, operands):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**operands)
    named = set(re.findall(r"\b(\w+)\.(?:clone|detach|device|double|float|to|to_dense|values)\b", str(caught.value)))
    assert named <= {*inspect.signature(function).parameters, "torch"}, "the cure names arguments of this function"
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG)
@functions
def test_a_bad_operand_is_named(name, wrong):
    """And nothing is written, also where a call before opened the fast path."""
    function, operands = function_of(name), clones(FUNCTIONS[name])
    function(**clones(operands))
    before = clones(operands)
    required = [key for key, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    for key in {"nothing": required, "one row of memory": written_by(name)}.get(wrong, tensors(operands)):
        if FITS & {(name, key, wrong), (key, wrong)}:
            continue
        message = refused(function, operands | {key: WRONG[wrong](operands[key])})
        if (name, key, wrong) not in ALONE:
            named = "k_out" if (name, key, wrong) == ("qk_norm_rope", "k", "wider") else key  # of k's dtype
            assert re.match(rf"{named} (must|is|has two|has elements)\b", message), (key, message)
            assert key.endswith("out") or re.search(SAID.get(wrong, ""), message), (key, message)
    assert all(operands[key].equal(before[key]) for key in tensors(operands))


LAYOUTS = {
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "coordinates": lambda t: t.to_sparse(),
    "compressed": lambda t: t.to_sparse_csr() if t.dim() == 2 else t.to_sparse(),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR):UserWarning")  # torch's, that they are beta
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*FUNCTIONS, *MORE])
def test_each_layout_but_the_dense_one_is_refused(name, layout):
    """Before anything else asks for the shape or the memory of such an operand."""
    function, operands = MORE[name] if name in MORE else (function_of(name), FUNCTIONS[name])
    for key in tensors(operands)[: 1 if name == "functional" else None]:  # its weight's shape is an argument
        given = operands if key.endswith("out") else without_outputs(operands)
        said = "input" if (name, key) == ("functional", "x") else key
        message = rf"^{said} must be a dense tensor, got .*(\.values\(\)|\.to_dense\(\)|allocate|pass )"
        with pytest.raises(TypeError, match=message):
            function(**clones(given) | {key: LAYOUTS[layout](operands[key])})


@functions
def test_a_bad_flag_is_named(name):
    """And nothing is written."""
    function, operands = function_of(name), clones(FUNCTIONS[name])
    before = clones(operands)
    for flag in set(inspect.signature(function).parameters) & set(FLAGS):
        for value in FLAGS[flag]:
            assert re.match(rf"{flag} (must|is)\b", refused(function, operands | {flag: value})), (flag, value)
    assert all(operands[key].equal(before[key]) for key in tensors(operands))


@functions
def test_memory_that_is_shared_with_what_is_written_is_refused(name):
    """Of operands that begin a few bytes after it, or there, if they are written too or have another size."""
    function = function_of(name)
    for key in written_by(name):
        for other in tensors(FUNCTIONS[name]):
            if other == key:
                continue
            sizes = {FUNCTIONS[name][role].nbytes for role in (key, other)}
            for start in (8, 8, 0)[: 2 + (other in written_by(name) or len(sizes) > 1)]:
                operands, memory = clones(FUNCTIONS[name]), torch.zeros(1000, dtype=torch.uint8)
                for role, begin in ((key, 0), (other, start)):
                    t = operands[role]
                    operands[role] = memory[begin : begin + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
                before = memory.clone()
                with pytest.raises(ValueError, match=rf"\b({key}|{other}) shares memory with ({key}|{other})\b"):
                    function(**operands)
                assert memory.equal(before), (key, other)
                function(**clones(FUNCTIONS[name]))  # opens the fast path


def test_every_function_with_operands_is_here():
    operations = {name for one in every().values() for name in (one.name, one.in_place and one.in_place.__name__)}
    assert set(FUNCTIONS) == operations - {None}
    arguments = {key for name in FUNCTIONS for key in inspect.signature(function_of(name)).parameters}
    assert arguments == {*FLAGS, *(key for name in FUNCTIONS for key in tensors(FUNCTIONS[name]))}
