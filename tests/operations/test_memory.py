"""Each tensor of each public function and operator, of each kind of memory: the reference's bits, or an error.

Never a crash, never an operand left out. Calls are made three times: the first may open the fast path to the next ones.
"""

import contextlib
import itertools
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from every_operation import (
    CALLS,
    DIFFERENTIATED,
    FUNCTIONS,
    OPERATORS,
    WITHOUT_GRADIENT,
    Seen,
    called,
    called_with,
    clones,
    function_of,
    gradients,
    have_gradients,
    leaves_of,
    same,
    tensors,
    without_outputs,
    written_by,
)
from processes import python

import fusednorm


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t):
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)
    return t


def zero(t):
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def negative(t):
    return torch._neg_view(-t) if t.dtype not in (torch.int8, torch.bool) else t.clone()


def imaginary(t):
    """A part of a conjugated tensor, whose elements are adjacent: a view with its negative bit set."""
    if not t.is_floating_point():
        return t.clone()
    whole = torch.complex(t.double(), -t.double()).to(torch.complex64).conj()
    view = whole.imag.as_strided(t.shape, t.contiguous().stride(), whole.imag.storage_offset())
    return view.copy_(t)


def inference(t):
    with torch.inference_mode():
        return t.clone()


def expanded(t):
    return t.clone().unsqueeze(0).expand(3, *t.shape)[1]


def misaligned(t):
    memory = bytearray(t.numel() * t.itemsize + 1)
    return torch.frombuffer(memory, dtype=t.dtype, offset=1, count=t.numel()).view(t.shape).copy_(t)


def turned(t):
    return t.mT.contiguous().mT if t.dim() > 1 else t.clone()


def every_other(t):
    return torch.stack((t, t), -1)[..., 0]


def read_only(t):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it will write there all the same
        return torch.frombuffer(t.contiguous().numpy().tobytes(), dtype=t.dtype).view(t.shape)


def copied_later(t):
    return torch._lazy_clone(t.clone())


def fake(t):
    with torch._subclasses.FakeTensorMode() as mode:
        return mode.from_tensor(t)


MISSING = (freed, shrunk, zero)
READ = (negative, imaginary, inference, expanded, misaligned, turned, every_other, read_only, copied_later)
ELSEWHERE = (lambda t: t.to("meta"), fake, lambda t: t.to(torch.complex64).conj())


def public(name):
    """A function that takes operands by name, its operands, and the names of those that it writes."""
    return function_of(name), FUNCTIONS[name], written_by(name)


def operator(name):
    """The same of an operator."""
    packet = getattr(torch.ops.fusednorm, name)
    return packet, OPERATORS[name], [a.name for a in packet.default._schema.arguments if a.alias_info is not None]


EVERY = [pytest.param(public, name, id=name) for name in FUNCTIONS]
EVERY += [pytest.param(operator, name, id=f"ops.{name}") for name in OPERATORS]


def results(function, operands, outputs):
    """All that a call returns and writes, as bytes without lazy bits."""
    found = function(**operands)
    found = [] if found is None else [found] if isinstance(found, torch.Tensor) else list(found)
    found += [operands[key] for key in outputs]
    return [as_bytes(t) for t in found]


def as_bytes(t):
    return t.resolve_neg().clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten().tolist()


def fresh(operands, key=None, kind=None):
    return clones(operands) if key is None else clones(operands) | {key: kind(operands[key])}


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize(("table", "name"), EVERY)
def test_an_operand_without_memory_is_named(table, name, kind):
    function, operands, outputs = table(name)
    for key in tensors(operands):
        zeros = {key: torch.zeros_like(operands[key])} if isinstance(operands[key], torch.Tensor) else {}
        for _ in range(3):
            if kind is zero and table is operator:  # torch's dispatcher makes zeros of it, or refuses the write
                if key in outputs or (key == "temperature" and not name.endswith("backward")):
                    error, words = (RuntimeError, "ZeroTensor") if key in outputs else (ValueError, "^temperature must")
                    with pytest.raises(error, match=words):
                        function(**fresh(operands, key, kind))
                else:
                    expected = results(function, fresh(operands | zeros), outputs)
                    assert results(function, fresh(operands, key, kind), outputs) == expected
                continue
            with pytest.raises(TypeError, match=rf"^{re.escape(key)}\b.* memory"):
                function(**fresh(operands, key, kind))
            function(**fresh(operands))


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize(("table", "name"), EVERY)
def test_an_operand_is_read_wherever_it_lies(table, name):
    function, operands, outputs = table(name)
    expected = results(function, fresh(operands), outputs)
    for kind, key in itertools.product(READ, [key for key in tensors(operands) if key not in outputs]):
        for _ in range(3):
            assert results(function, fresh(operands, key, kind), outputs) == expected, (kind, key)


@pytest.mark.usefixtures("asked_by")
@pytest.mark.parametrize(("table", "name"), EVERY)
def test_an_output_is_written_wherever_it_lies_or_refused(table, name):
    function, operands, outputs = table(name)
    expected = results(function, fresh(operands), outputs)
    for kind, key in itertools.product(READ, outputs):
        for _ in range(3):
            given = fresh(operands, key, kind)
            before = as_bytes(given[key])
            try:
                found = results(function, given, outputs)
            except (ValueError, RuntimeError):
                assert as_bytes(given[key]) == before, (kind, key)
                assert kind not in (expanded, misaligned, read_only, copied_later), (kind, key)
            else:
                assert found == expected, (kind, key)
                assert kind is not inference, key


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_with_gaps(name):
    """Norms and additions refuse them, and others write them; see docs/faults.md."""
    function, operands, outputs = public(name)
    expected = results(function, fresh(operands), outputs)
    refuses = name.startswith(("rms_norm", "fused_add", "layer_norm", "l2_norm"))
    refuses = refuses and not {"gated", "scaled"} & {*name.split("_")}  # the latter is a toy
    for key in outputs:
        given = fresh(operands, key, every_other)
        if refuses and (key == "residual_out" or not name.endswith("quant")):
            with pytest.raises(ValueError, match=f"^{key} is written in place, so its last dimension must be contig"):
                results(function, given, outputs)
        else:
            assert results(function, given, outputs) == expected, key


@pytest.mark.parametrize(("table", "name"), EVERY)
def test_an_operand_elsewhere_is_refused_or_handed_to_torch(table, name):
    function, operands, _outputs = table(name)
    for kind, key in itertools.product(ELSEWHERE, tensors(operands)):
        for _ in range(2):
            given = fresh(operands, key, kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(TypeError, ValueError, RuntimeError, AssertionError):  # the last is torch's
                    function(**given)


def recorded(name):
    """The outputs with gradients of a function, and its operands, of which those in DIFFERENTIATED require grad."""
    operands = clones(without_outputs(FUNCTIONS[name]))
    for key in DIFFERENTIATED[name]:
        operands[key].requires_grad_()
    return called(function_of(name), operands), operands


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_without_memory_are_refused(name, kind, again):
    for place in range(len(recorded(name)[0])):
        outputs, operands = recorded(name)
        incoming = [torch.ones_like(t) for t in outputs]
        incoming[place] = kind(incoming[place])
        wanted = [operands[key] for key in DIFFERENTIATED[name]]
        with pytest.raises(TypeError, match=" memory"):
            torch.autograd.grad(outputs, wanted, incoming, create_graph=again)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_incoming_gradients_are_read_wherever_they_lie(name):
    outputs, operands = recorded(name)
    wanted = [operands[key] for key in DIFFERENTIATED[name]]
    plain = [torch.randn_like(t) for t in outputs]
    expected = torch.autograd.grad(outputs, wanted, plain, retain_graph=True)
    for kind, place in itertools.product([kind for kind in READ if kind is not inference], range(len(outputs))):
        for _ in range(2):
            incoming = [kind(t) if i == place else t for i, t in enumerate(plain)]
            found = torch.autograd.grad(outputs, wanted, incoming, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (kind, place)


def function_with_gradients(name):
    """A function of its operands with gradients, and these."""
    return leaves_of(name, torch.float32)


def operator_with_gradients(name):
    """The same of an operator, through torch's dispatcher."""
    keys = have_gradients(OPERATORS[name])
    rest = clones(OPERATORS[name])
    packet = getattr(torch.ops.fusednorm, name)
    return lambda *leaves: packet(**rest | dict(zip(keys, leaves, strict=True))), [
        rest[key].clone().requires_grad_() for key in keys
    ]


WITH_GRADIENTS = [pytest.param(function_with_gradients, name, id=name) for name in CALLS]
WITH_GRADIENTS += [
    pytest.param(operator_with_gradients, name, id=f"ops.{name}")
    for name in OPERATORS
    if not name.endswith(("_", "backward")) and name not in WITHOUT_GRADIENT
]


@pytest.mark.parametrize("listener", [contextlib.nullcontext, Seen])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "name"), WITH_GRADIENTS)
def test_what_was_kept_and_then_freed_is_refused(kind, name, backend, again, listener):
    """FSDP frees storages between the passes, and fills them again before the second one."""

    def recorded():
        """Outputs, leaves, and the tensors that were kept for the backward pass."""
        function, leaves = kind(name)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            outputs = called_with(function, leaves)
        return [t for t in outputs if t.requires_grad], leaves

    kept = []
    message = r"(a tensor that was kept for the backward pass|\w+) is a .* its storage was freed .*: pass a tensor that"
    with fusednorm.use_backend(backend):
        outputs, leaves = recorded()
        expected, count, refusals = gradients(outputs, leaves), len(kept), []
        for place in range(count):
            kept.clear()
            outputs, leaves = recorded()
            incoming = [t.detach().cos() for t in outputs]
            storage, numbers = kept[place].untyped_storage(), kept[place].untyped_storage().clone()
            storage.resize_(0)
            try:
                with listener():
                    found = torch.autograd.grad(outputs, leaves, incoming, create_graph=again)
            except TypeError as error:
                refusals.append(str(error))
            else:  # the backward pass does not read it
                assert same(found, expected), place
            storage.resize_(numbers.nbytes())
            storage.copy_(numbers)  # some are kept for all calls
    assert all(re.match(message, refusal) for refusal in refusals), refusals
    assert refusals or not count


HUGE = """
import re, sys
sys.path[:0] = {paths!r}
import torch
from every_operation import DIFFERENTIATED, FUNCTIONS, called, clones, function_of, gradients, without_outputs
LARGE = 4 << 20
def grown(t):
    size = next((d for d in range(t.dim()) if t.shape[d] == 4), None)
    return t.clone() if size is None else t.repeat_interleave(50_000, size)
def advised(t):
    lines = open("/proc/self/smaps").read().splitlines()
    inside, middle = False, t.data_ptr() + t.nbytes // 2
    for line in lines:
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
for name in {names}:
    operands = clones(without_outputs(FUNCTIONS[name]), grown)
    plain = called(function_of(name), operands)
    leaves = [operands[key].requires_grad_() for key in DIFFERENTIATED[name]]
    outputs = called(function_of(name), operands)
    found = {{"plain": plain, "recorded": outputs}}
    found["gradients"] = gradients(outputs, leaves)
    wrong = [kind for kind, those in found.items() for t in those if t.nbytes >= LARGE and not advised(t)]
    if wrong: print(name, *wrong)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux may have no huge pages")
def test_large_results_are_written_to_huge_pages():
    """Results, also those that are recorded, and gradients, each in a mapping of its own whose flags Linux tells.

    But for what torch's own operations compute: an addition of rows, formulas that no kernel serves, and gradients of
    products.
    """
    of_torch = {"rms_norm_add", "modulate", "linear", "attention"}
    names = [name for name in DIFFERENTIATED if name in fusednorm.__all__ and name not in of_torch]
    tests = Path(__file__).parents[1]
    program = HUGE.format(paths=[str(tests), str(tests / "operations")], names=names)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "FUSEDNORM_BACKEND": "cpu"}
    done = python("-c", program, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
