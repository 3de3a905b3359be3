"""The promises of each declared operation, by its roles and samples alone: tests run all of :data:`PROMISES`.

The reference here is the operation's own formula. So these tests hold a backend to the formula, and all ways to call to
each other; whether the formula is the specification, the oracle and golden vectors say.
"""

import inspect
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fusednorm
from fusednorm.calls.declared import Role
from fusednorm.conformance.cases import BF16, F16, F32, F64, differing, listed

ROWS, HIDDEN = (3, 4), 40


def operands_of(declaration, dtype=F32, seed=0, rows=ROWS, hidden=HIDDEN):
    """Operands of the declared roles, by name."""
    generator = torch.Generator().manual_seed(seed)

    def of_role(role):
        if role is Role.IDS:
            return torch.randint(hidden, rows, generator=generator)
        shape = {Role.ROWS: (*rows, hidden), Role.WEIGHT: (hidden,)}.get(role, rows)
        return torch.randn(shape, generator=generator).to(dtype)

    return {operand.name: of_role(operand.role) for operand in declaration.operands}


def same(actual, expected):
    for a, b in zip(listed(actual), listed(expected), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert not differing(a, b).any()


def new_functions(operation):
    """The public functions that return new results."""
    return [function for name, function in operation.functions.items() if not name.endswith("_")]


def samples(operation):
    """Each public function with operands and flags of a sample."""
    for function in new_functions(operation):
        for flags in operation.declaration.samples:
            yield function, flags


def formula(operation, operands, flags):
    """The results by the formula."""
    declaration = operation.declaration
    complete = [flags.get(name, default) for name, default in declaration.flags.items()]
    return declaration.formula(*operands.values(), *complete)[: len(declaration.returned)]


def leaves_of(operation, operands):
    """Operands with gradients, by name, as views would be; and those that have them."""
    with_gradient = {operand.name for operand in operation.declaration.with_gradient}
    leaves = {name: t.clone().requires_grad_(name in with_gradient) for name, t in operands.items()}
    return leaves, [t for name, t in leaves.items() if name in with_gradient]


def incoming_of(outputs):
    return [torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype) for y in listed(outputs)]


def gradients(function, operation, operands, flags):
    leaves, wanted = leaves_of(operation, operands)
    outputs = listed(function(**leaves, **flags))
    return torch.autograd.grad(outputs, wanted, incoming_of(outputs))


def has_formulas_bits(operation):
    for function, flags in samples(operation):
        for dtype in (BF16, F16, F32, F64):
            operands = operands_of(operation.declaration, dtype)
            same(function(**operands, **flags), tuple(formula(operation, operands, flags)))


def does_not_depend_on_the_batch(operation):
    roles = operation.declaration.roles()
    for function, flags in samples(operation):
        operands = operands_of(operation.declaration)
        one = {name: t if roles[name] is Role.WEIGHT else t[1:2] for name, t in operands.items()}
        same(function(**one, **flags), tuple(y[1:2] for y in listed(function(**operands, **flags))))


def takes_any_strides(operation):
    for function, flags in samples(operation):
        operands = operands_of(operation.declaration)
        strided = {name: t.mT.contiguous().mT if t.dim() > 1 else t for name, t in operands.items()}
        same(function(**strided, **flags), function(**operands, **flags))


def takes_no_optional_operands(operation):
    for function, flags in samples(operation):
        optional = {operand.name: None for operand in operation.declaration.operands if operand.optional}
        operands = operands_of(operation.declaration) | optional
        same(function(**operands, **flags), tuple(formula(operation, operands, flags)))


def writes_outputs(operation):
    for function, flags in samples(operation):
        operands = operands_of(operation.declaration)
        expected = listed(function(**operands, **flags))
        returned = operation.declaration.returned
        if not {result.name for result in returned} <= set(inspect.signature(function).parameters):
            continue
        outputs = {result.name: torch.empty_like(y) for result, y in zip(returned, expected, strict=True)}
        found = listed(function(**operands, **flags, **outputs))
        assert all(a is b for a, b in zip(found, outputs.values(), strict=True))
        same(found, expected)
        for (first, output), (name, operand) in itertools.product(outputs.items(), operands.items()):
            if operand.dtype == output.dtype and operand.numel() >= output.numel():
                begin = operand.numel() - output.numel() + 1  # it begins within the operand, and ends behind it
                memory = torch.empty(operand.numel() + begin, dtype=operand.dtype)
                moved = memory[: operand.numel()].view(operand.shape).copy_(operand)
                shared = outputs | {first: memory[begin : begin + output.numel()].view(output.shape)}
                with pytest.raises(ValueError, match=f"{first} shares memory with {name}"):
                    function(**operands | {name: moved}, **flags, **shared)


def works_in_place(operation):
    for name, twin in operation.functions.items():
        if not name.endswith("_"):
            continue
        for flags in operation.declaration.samples:
            operands = operands_of(operation.declaration)
            expected = operation.functions[name[:-1]](**operands, **flags)
            found = listed(twin(**operands, **flags))
            written = [operands[result.overwrites] for result in operation.declaration.returned]
            assert all(a is b for a, b in zip(found, written, strict=True))
            same(found, expected)
            leaves, _ = leaves_of(operation, operands_of(operation.declaration))
            with pytest.raises(RuntimeError, match=f"{name}.*requires grad"):
                twin(**leaves, **flags)


def differentiates_twice(operation):
    """By torch's own numeric gradients, in float64."""
    if operation.declaration.gradient is None:
        return
    for function, flags in samples(operation):
        leaves, wanted = leaves_of(operation, operands_of(operation.declaration, F64, rows=(3,), hidden=5))
        names = [name for name, t in leaves.items() if t in set(wanted)]

        def call(*given, names=names, leaves=leaves, function=function, flags=flags):
            return function(**leaves | dict(zip(names, given, strict=True)), **flags)

        assert torch.autograd.gradcheck(call, wanted, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(call, wanted)


def maps_over_batches(operation):
    """Over the second dimension; a tracer that sees the mapped call sees the operator."""
    roles = operation.declaration.roles()
    for function, flags in samples(operation):
        operands = operands_of(operation.declaration)
        in_dims = tuple(None if roles[name] is Role.WEIGHT else 1 for name in operands)

        def call(*given, function=function, flags=flags, names=tuple(operands)):
            return function(**dict(zip(names, given, strict=True)), **flags)

        mapped = torch.vmap(call, in_dims, out_dims=1)
        same(mapped(*operands.values()), function(**operands, **flags))
        graph = make_fx(mapped)(*operands.values()).graph
        assert f"fusednorm.{operation.declaration.name}.default" in {str(node.target) for node in graph.nodes}


def compiles(operation):
    """As a whole graph, with another number of rows too, and the gradients."""
    for function, flags in samples(operation):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda operands, function=function, flags=flags: function(**operands, **flags),
            backend="aot_eager",
            fullgraph=True,
            dynamic=True,
        )
        for rows in (ROWS, (5, 2)):
            operands = operands_of(operation.declaration, rows=rows)
            same(compiled(operands), function(**operands, **flags))
            if operation.declaration.gradient is not None:
                found = gradients(lambda compiled=compiled, **given: compiled(given), operation, operands, {})
                same(found, gradients(function, operation, operands, flags))


def exports(operation):
    for function, flags in samples(operation):

        class Module(torch.nn.Module):
            def forward(self, operands):
                return function(**operands, **flags)  # noqa: B023 - exported at once

        operands = operands_of(operation.declaration)
        exported = torch.export.export(Module(), (operands,))
        assert any(f"fusednorm.{operation.declaration.name}" in str(node.target) for node in exported.graph.nodes)
        same(exported.module()(operands), function(**operands, **flags))


def passes_torchs_checks(operation):
    """``torch.library.opcheck`` of both operators."""
    declaration = operation.declaration
    for flags in declaration.samples:
        complete = [flags.get(name, default) for name, default in declaration.flags.items()]
        leaves, _ = leaves_of(operation, operands_of(declaration))
        operator = getattr(torch.ops.fusednorm, declaration.name).default
        torch.library.opcheck(operator, (*leaves.values(), *complete))
        if declaration.gradient is not None:
            outputs = listed(operator(*(t.detach() for t in leaves.values()), *complete))
            returned = len(declaration.returned)
            arguments = (*incoming_of(outputs[:returned]), *(t.detach() for t in leaves.values()), *outputs[returned:])
            needs = [True] * len(declaration.with_gradient)
            backward = getattr(torch.ops.fusednorm, f"{declaration.name}_backward").default
            torch.library.opcheck(backward, (*arguments, *complete, needs))


def is_seen_by_modes(operation):
    """A function mode sees the public function that was called."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for function, flags in samples(operation):
        seen, operands = [], operands_of(operation.declaration)
        expected = function(**operands, **flags)
        with Mode():
            found = function(**operands, **flags)
        assert seen == [function]
        same(found, expected)


def refuses(operation):
    """Operands that are no tensors, of another dtype, layout, shape or device, or without memory; declared flags."""
    for function in new_functions(operation):
        good = operands_of(operation.declaration)
        for place, (name, tensor) in enumerate(good.items()):
            freed = tensor.clone()
            freed.untyped_storage().resize_(0)
            wrong = [3, tensor.to(torch.complex64), tensor.to_sparse(), freed]
            wrong += [tensor.new_zeros(7), tensor.to("meta")] if place else []
            for bad in wrong:
                with pytest.raises((TypeError, ValueError), match=name):
                    function(**good | {name: bad})
        for flags, error, words in operation.declaration.refused:
            with pytest.raises(error, match=words):
                function(**good, **flags)


def is_sharded(operation, mesh):
    """On ranks of a mesh with one dimension: the bits of one process, and no more communication than gradients take.

    This promise takes a process group, so it is not one of :data:`PROMISES`.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    roles = operation.declaration.roles()
    for function, flags in samples(operation):
        operands = operands_of(operation.declaration, BF16)
        expected = listed(function(**operands, **flags))
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            placed = {
                name: distribute_tensor(
                    t, mesh, [Replicate() if roles[name] is Role.WEIGHT or placement == Shard(t.dim()) else placement]
                )
                for name, t in operands.items()
            }
            same(tuple(y.full_tensor() for y in listed(function(**placed, **flags))), expected)
            if operation.declaration.gradient is None:
                continue
            wanted = gradients(function, operation, operands, flags)
            leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in placed.items()}
            outputs = listed(function(**leaves, **flags))
            incoming = [
                distribute_tensor(d, mesh, y.placements) for d, y in zip(incoming_of(expected), outputs, strict=True)
            ]
            found = torch.autograd.grad(outputs, [t for t in leaves.values() if t.requires_grad], incoming)
            for operand, gradient, whole in zip(operation.declaration.with_gradient, found, wanted, strict=True):
                if operand.role is not Role.WEIGHT:  # ranks' shares of a weight's gradient are added in their order
                    same(gradient.full_tensor(), whole)
                assert gradient.shape == whole.shape


def is_explained(operation):
    for function in operation.functions.values():
        first = operation.declaration.operands[0].name
        text = str(fusednorm.explain(operands_of(operation.declaration)[first], function=function))
        assert operation.declaration.name in text


#: The tests of each declared operation.
PROMISES = (
    has_formulas_bits,
    does_not_depend_on_the_batch,
    takes_any_strides,
    takes_no_optional_operands,
    writes_outputs,
    works_in_place,
    differentiates_twice,
    maps_over_batches,
    compiles,
    exports,
    passes_torchs_checks,
    is_seen_by_modes,
    refuses,
    is_explained,
)
