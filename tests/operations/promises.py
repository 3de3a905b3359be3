"""Promises of declared operations that take their roles and samples: bits of the formula, and shards.

The reference is the operation's own formula. So these tests hold a backend to the formula; whether the formula is the
specification, the oracle and golden vectors say. All other promises are those of every function: every_operation.py.
"""

import torch

from fusednorm.calls.declared import Role
from fusednorm.conformance.cases import BF16, F16, F32, F64, differing, listed

ROWS, HIDDEN = (3, 4), 40


def operands_of(declaration, dtype=F32):
    """Operands of the declared roles, by name."""
    generator = torch.Generator().manual_seed(0)

    def of_role(role):
        if role is Role.IDS:
            return torch.randint(HIDDEN, ROWS, generator=generator)
        shape = {Role.ROWS: (*ROWS, HIDDEN), Role.WEIGHT: (HIDDEN,)}.get(role, ROWS)
        return torch.randn(shape, generator=generator).to(dtype)

    return {operand.name: of_role(operand.role) for operand in declaration.operands}


def same(actual, expected):
    for a, b in zip(listed(actual), listed(expected), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert not differing(a, b).any()


def samples(operation):
    """Each public function with operands and flags of a sample."""
    for name, function in operation.functions.items():
        for flags in operation.declaration.samples:
            if not name.endswith("_"):
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
    """For all dtypes and strides, without optional operands, and of a part of the rows alone."""
    declaration = operation.declaration
    roles = declaration.roles()
    optional = {operand.name: None for operand in declaration.operands if operand.optional}
    for function, flags in samples(operation):
        for dtype in (BF16, F16, F32, F64):
            operands = operands_of(declaration, dtype)
            wanted = tuple(formula(operation, operands, flags))
            same(function(**operands, **flags), wanted)
            same(function(**operands | optional, **flags), tuple(formula(operation, operands | optional, flags)))
            strided = {name: t.mT.contiguous().mT if t.dim() > 1 else t for name, t in operands.items()}
            same(function(**strided, **flags), wanted)
            one = {name: t if roles[name] is Role.WEIGHT else t[1:2] for name, t in operands.items()}
            same(function(**one, **flags), tuple(y[1:2] for y in wanted))


def is_sharded(operation, mesh):
    """On ranks of a mesh with one dimension: the bits of one process, and no more communication than gradients take."""
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
