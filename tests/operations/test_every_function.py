"""What holds for each public function: who sees it, what it writes, its derivatives, and calls that were made one."""

import contextlib
import itertools

import pytest
import torch
from every_operation import (
    BF16,
    CALLS,
    DIFFERENTIATED,
    FUNCTIONS,
    IN_PLACE,
    MORE,
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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm.calls import fast_path
from fusednorm.operations.front_door import PUBLIC

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # by torch 2.15

functions = pytest.mark.parametrize("name", FUNCTIONS)
calls = pytest.mark.parametrize("name", CALLS)


def call(name, operands):
    return called(function_of(name), operands)


def test_every_function_in_place_is_here():
    assert set(IN_PLACE) == {name for name in FUNCTIONS if name.endswith("_")}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@functions
def test_inference_tensors_are_not_written_outside_of_inference_mode(name, backend):
    """As torch does not write them: nothing is written then, and they may be read."""
    for key, operand in clones(FUNCTIONS[name]).items():
        if not isinstance(operand, torch.Tensor):
            continue
        operands = clones(FUNCTIONS[name])
        with torch.inference_mode():
            operands[key] = operand.clone()
        before = {other: t.clone() for other, t in operands.items() if isinstance(t, torch.Tensor)}
        fast_path.devices_of.clear()  # a call in Python opens them again
        with fusednorm.use_backend(backend):
            if key not in written_by(name):
                call(name, operands)
                continue
            message = f"^{key} is an inference tensor, and inplace update to inference tensor outside InferenceMode"
            with pytest.raises(RuntimeError, match=message):
                call(name, operands)
            assert all(
                torch.equal(operands[other].view(torch.uint8), t.view(torch.uint8)) for other, t in before.items()
            )
            with torch.inference_mode():
                call(name, operands)


@functions
def test_what_is_written(name):
    """The bits of new tensors, in tensors that are returned; nothing else is written, and autograd notices it."""
    others = FUNCTIONS[name.removesuffix("_")]
    given = clones(without_outputs(others))
    expected = call(name.removesuffix("_"), given)
    memory = [given[key].data_ptr() for key in tensors(given) if key not in ("scale", "zero_point")]
    assert len({*memory, *(t.data_ptr() for t in expected)}) == len(memory) + len(expected)
    for _ in range(2):  # the first call opens the fast path
        operands = clones(FUNCTIONS[name])
        before, versions = clones(operands), {key: operands[key]._version for key in tensors(operands)}
        found = call(name, operands)
        assert same(found, expected)
        for key in tensors(operands):
            if key in written_by(name):
                assert operands[key]._version > versions[key], key
                assert key == "normed_out" or any(operands[key] is t for t in found), key
            else:
                assert operands[key].equal(before[key]), key
        assert not {t.data_ptr() for t in expected} & {
            t.data_ptr() for t in operands.values() if hasattr(t, "data_ptr")
        }


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference", None])  # None: the backend of this run


#: Calls whose results are views: in place, of several dimensions that are normalised together, in columns.
VIEWS = (*IN_PLACE, "offset", "functional", "columns, quantized")


@BACKENDS
@pytest.mark.parametrize("name", [name for name in [*FUNCTIONS, *MORE] if name not in VIEWS])
def test_results_are_no_views(name, backend):
    """torch refuses some writes to views, as of a tensor that requires gradients to a result without any."""
    function, operands = MORE[name] if name in MORE else (function_of(name), without_outputs(FUNCTIONS[name]))
    given = clones(operands)
    with contextlib.nullcontext() if backend is None else fusednorm.use_backend(backend):
        found = called(function, given)
    assert not [t.shape for t in found if t._is_view() and t is not given.get("scale")]


@BACKENDS
@calls
def test_results_may_be_written(name, backend):
    """In place, with the gradients of what was written; but a sum is kept for the gradients, of which torch says so."""

    def called_and_written(place):
        function, leaves = leaves_of(name, torch.float32)
        outputs = called_with(function, leaves)
        if place is not None:
            outputs[place].mul_(2)
        return outputs, leaves

    with contextlib.nullcontext() if backend is None else fusednorm.use_backend(backend):
        wanted, leaves = called_and_written(None)
        for place in range(len(wanted)):
            expected = [t * 2 if i == place else t for i, t in enumerate(wanted)]
            outputs, others = called_and_written(place)
            assert same(outputs, expected), place
            refused = ""
            try:
                found = gradients([t for t in outputs if t.requires_grad], others)
            except RuntimeError as error:
                refused = str(error)
            if refused:
                assert (place, "modified by an inplace operation" in refused) == (1, True)
            else:
                assert same(found, gradients([t for t in expected if t.requires_grad], leaves)), place


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # of each graph of linearize
@pytest.mark.parametrize("name", [*DIFFERENTIATED, *IN_PLACE])
def test_tangents_of_what_is_written(name):
    """Under a transform, whose tensors have no addresses that could be compared; and values are those without it."""
    keys = have_gradients(FUNCTIONS[name])
    operands = tuple(FUNCTIONS[name][key] for key in keys)
    directions = tuple(t.flip(0) for t in operands)

    def of_clones(name, others):
        return lambda *given: tuple(call(name, clones(others) | clones(dict(zip(keys, given, strict=True)))))

    written = of_clones(name, FUNCTIONS[name])
    values, tangents = torch.func.jvp(written, operands, directions)
    assert same(values, call(name, clones(FUNCTIONS[name])))
    if name in DIFFERENTIATED:
        assert same(torch.func.linearize(written, *operands)[1](*directions), tangents)
    new = of_clones(name.removesuffix("_"), without_outputs(FUNCTIONS[name.removesuffix("_")]))
    for a, b in zip((values, tangents), torch.func.jvp(new, operands, directions), strict=True):
        assert same(a, b)


@functions
def test_each_operand_may_need_a_gradient(name):
    """What has a gradient is recorded; what is written, and 8-bit numbers, have none, which is said."""
    call(name, clones(FUNCTIONS[name]))  # opens the fast path
    outputs = [key for key in written_by(name) if FUNCTIONS[name][key].is_floating_point()]
    for key in dict.fromkeys((*have_gradients(FUNCTIONS[name]), *outputs)):
        operands = clones(FUNCTIONS[name])
        operands[key].requires_grad_()
        before = clones(operands, lambda t: t.detach().clone())
        if not written_by(name) and name in DIFFERENTIATED:
            assert any(t.requires_grad for t in call(name, operands)), key
            continue
        named = "rms_norm" if name == "l2_norm" else name
        message = rf"^{named}\(\): (functions with out=|one of the arguments requires grad.*torch.no_grad)"
        with pytest.raises(RuntimeError, match=message):
            call(name, operands)
        assert all(operands[other].equal(before[other]) for other in tensors(operands)), key
        with torch.no_grad():
            call(name, operands)
        if name in DIFFERENTIATED and key not in outputs:
            assert any(t.requires_grad for t in call(name, without_outputs(operands))), key


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@calls
def test_gradients_are_derivatives(name):
    """And theirs are second derivatives, and tangents those of forward mode."""
    if "between" in name:
        pytest.skip("float64 is rounded nowhere")
    function, leaves = leaves_of(name, torch.float64)
    fast = name.startswith("attention")  # in a random direction, because its operands have many elements
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)  # in one, too


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@calls
def test_gradients_of_a_checkpoint(name, backend):
    """It makes the call again, and lets what a call kept be asked for once."""
    function, leaves = leaves_of(name, torch.float32)
    with fusednorm.use_backend(backend):
        wanted = gradients(called_with(function, leaves), leaves)
        found = called_with(lambda *given: checkpoint(function, *given, use_reentrant=False), leaves)
        found = torch.autograd.grad(found, leaves, [t.detach().cos() for t in found])
    assert same(found, wanted)


@calls
def test_what_is_kept_for_gradients(name):
    """No more rows than there are operands of rows, none of a wider type; all else is smaller than they are."""
    function, leaves = leaves_of(name, BF16)
    saved, size = [], leaves[0].numel()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*leaves)
    rows = [t for t in saved if t.numel() >= size]
    assert len(rows) <= sum(t.numel() >= size for t in leaves)
    assert {t.dtype for t in rows} <= {BF16}


@calls
def test_a_result_requires_gradients_as_far_as_it_depends_on_what_does(name):
    """As results of the plain operations do."""
    function, leaves = leaves_of(name, torch.float64)
    with torch.no_grad():
        wanted = called_with(function, leaves)
        for place, leaf in enumerate(leaves):
            changed = called_with(function, [t.cos() if t is leaf else t for t in leaves])
            depends = [not a.equal(b) for a, b in zip(changed, wanted, strict=True)]
            with torch.enable_grad():
                found = called_with(function, [t.detach().requires_grad_(t is leaf) for t in leaves])
            assert [t.requires_grad for t in found] == depends, place


@calls
def test_the_first_gradient_does_not_depend_on_create_graph(name):
    function, leaves = leaves_of(name, BF16)
    outputs = function(*leaves)
    assert same(gradients(outputs, leaves), gradients(outputs, leaves, create_graph=True))


@calls
def test_a_tensor_as_two_operands(name):
    """It has the sum of both gradients, also where these may be differentiated again."""
    function, leaves = leaves_of(name, torch.float32)
    for i, j in itertools.combinations(range(len(leaves)), 2):
        if leaves[i].shape == leaves[j].shape:
            apart = [leaves[i].detach().clone().requires_grad_() if k == j else t for k, t in enumerate(leaves)]
            one = [leaves[i] if k == j else t for k, t in enumerate(leaves)]
            wanted = gradients(function(*apart), apart)
            for again in (False, True):
                found = gradients(function(*one), one, create_graph=again)
                assert found[i].equal(wanted[i] + wanted[j]), (i, j, again)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "pages" not in FUNCTIONS[name]])
def test_one_row_and_no_rows(name):
    """One row has the bits that it has among others. Results and gradients of no rows have their shapes."""
    function, operands = function_of(name), clones(FUNCTIONS[name])
    rows = [key for key in tensors(operands) if operands[key].shape[0] == 4 and key not in ("cos", "sin")]
    none = operands | {key: operands[key][:0] for key in rows}
    every = called(function, clones(operands))
    one = called(function, clones(operands | {key: operands[key][2:3] for key in rows}))
    assert same(one, [t[2:3] if t.shape[0] == 4 else t for t in every])
    sizes = [t.shape for t in every]
    found = [t.shape for t in called(function, none)]
    assert found == [(0, *size[1:]) if size[0] == 4 else size for size in sizes]
    if name in DIFFERENTIATED:
        none = without_outputs(none)
        leaves = [none[key].requires_grad_() for key in DIFFERENTIATED[name]]
        found = gradients(called(function, none), leaves)
        assert [(t.shape, bool(t.any())) for t in found] == [(leaf.shape, False) for leaf in leaves]


# By torch 2.15, of functions that are called once for each of a batch.
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("name", [*FUNCTIONS, *MORE])
def test_a_batch_of_calls(name):
    """Has the bits of one call for each entry, whatever the dimension of the batch."""
    function, operands = MORE[name] if name in MORE else (function_of(name), without_outputs(FUNCTIONS[name]))
    alone = ("cos", "sin", "weight", "bias", "mask", "pages")
    keys = [key for key in tensors(operands) if operands[key].dim() > 1 and key not in alone]
    batch = [torch.stack((operands[key], -operands[key], operands[key] + 1), 1) for key in keys]

    def of_rows(*rows):
        given = dict(zip(keys, rows, strict=True))
        return tuple(called(function, clones(operands) | clones(given)))

    one_by_one = [of_rows(*(t[:, i] for t in batch)) for i in range(3)]
    wanted = [torch.stack(outputs) for outputs in zip(*one_by_one, strict=True)]
    assert same(torch.vmap(of_rows, in_dims=1)(*batch), wanted)
    assert same(torch.vmap(of_rows)(*(t.transpose(0, 1).contiguous() for t in batch)), wanted)
    if name not in IN_PLACE and len(operands) == len(without_outputs(operands)):  # one operand alone is a batch
        rows = [operands[key] for key in keys[1:]]
        one_by_one = [of_rows(batch[0][:, i], *rows) for i in range(3)]
        wanted = [torch.stack(outputs) for outputs in zip(*one_by_one, strict=True)]
        assert same(torch.vmap(of_rows, (1, *[None] * len(rows)))(batch[0], *rows), wanted)
    if function in PUBLIC and PUBLIC[function].differentiable:  # others become several operations
        traced = make_fx(torch.vmap(of_rows, in_dims=1))(*batch)
        assert any(str(node.target).startswith("fusednorm.") for node in traced.graph.nodes)
