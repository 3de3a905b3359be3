"""Declared operations as torch knows them: an operator, an operator for its gradients, and a function of autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.c_enums import DeclaredOf
from fusednorm.calls.checks import check_needs
from fusednorm.calls.fast_path import nothing
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.declare.declaration import Declaration, Result, Role
from fusednorm.engine.run import Kernel
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.registered import register

#: All declared operations, by name.
DECLARED: dict[str, Operator] = {}


class Operator:
    """A declared operation in ``torch.ops.fusednorm``, and its gradients there.

    Args:
        declaration: the operation.
        run: computes the results for checked operands in memory, as the formula does; by default a backend that has the
            operation in one call, or the formula.
        run_gradient: the same for its gradient.
        fast: the results of a call that the fast path takes, else None; without checks.
        fast_gradient: the same for its gradient.
    """

    def __init__(
        self,
        declaration: Declaration,
        run: Callable[..., tuple[Tensor, ...]] | None = None,
        run_gradient: Callable[..., tuple[Tensor | None, ...]] | None = None,
        fast: Callable[..., Any] | None = None,
        fast_gradient: Callable[..., Any] | None = None,
    ) -> None:
        self.declaration, kernel, name = declaration, Kernel(declaration), declaration.name
        kernels = [of.name.lower() for of in DeclaredOf]
        self.run = run or (kernel.run if name in kernels else declaration.formula)
        self.run_gradient = run_gradient or (
            kernel.run_gradient if f"{name}_backward" in kernels else declaration.gradient
        )
        self.gradient_flags = [] if declaration.gradient is None else declaration.gradient_flags
        #: The number of operands; the arguments after them are flags.
        self.count = len(declaration.operands)
        #: The operands that gradients take.
        self.taken = slice(0 if declaration.transposed is None else 1, self.count)
        self.fast, self.fast_gradient = fast or nothing, fast_gradient or nothing
        self.recorded = _recorded(self)
        gradients = None
        if self.differentiable:
            gradients = (lambda ctx, *incoming: self.gradients(ctx, incoming, through_dispatcher=True), self.keep)
        if declaration.gradient is not None:
            backward = (declaration.backward_schema, self._backward, self._fake_backward)
            register(f"{name}_backward", *backward, fast=fast_gradient)
        register(name, declaration.schema, self._forward, self._fake, gradients, fast)
        DECLARED[name] = self
        if (sharding := sys.modules.get("fusednorm.torch_ops.sharding")) is not None:
            sharding.register_declared(declaration)

    @property
    def differentiable(self) -> bool:
        """Whether it has gradients."""
        return self.declaration.gradient is not None or self.declaration.transposed is not None

    def dispatched(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The results as new tensors, through torch's dispatcher."""
        found = getattr(dtensor_bridge.operations(*arguments[: self.count]), self.declaration.name)(*arguments)
        return found if isinstance(found, tuple) else (found,)

    def with_gradients(self, *arguments: Any) -> Any:
        """The results, one or a tuple, for operands that have been checked: through torch's dispatcher if it must."""
        if must_be_seen.seen(*arguments[: self.count]):
            return _one_or_more(self.dispatched(*arguments))
        return cast(Any, self.recorded).apply(*arguments)

    def _forward(self, *arguments: Any) -> Any:
        operands = arguments[: self.count]
        flags = self.declaration.checked(operands, arguments[self.count :], in_memory=True)
        return _one_or_more(as_new(self.run(*operands, *flags), operands))

    def _fake(self, *arguments: Any) -> Any:
        declaration, operands = self.declaration, arguments[: self.count]
        flags = declaration.checked(operands, arguments[self.count :], in_memory=False)
        return _one_or_more(tuple(_zeros(declaration, declaration.results, operands, flags)))

    def _split(self, arguments: Sequence[Any], in_memory: bool) -> tuple[list[Any], list[Any], Sequence[Any]]:
        """The operands, the flags and the needs of the gradients' operator, which are checked."""
        declaration, needs = self.declaration, arguments[-1]
        tensors = dict(zip(declaration.backward_tensors, arguments, strict=False))
        operands = {operand.name: tensors[operand.name] for operand in declaration.operands}
        check_needs(needs, tuple(operand.name for operand in declaration.with_gradient))
        declaration.check_tensors({**operands, **tensors}, in_memory)
        given = dict(zip(declaration.gradient_flags, arguments[len(declaration.backward_tensors) : -1], strict=True))
        flags = declaration.checked_flags([*operands.values()], given)
        return [*operands.values()], [*flags], needs

    def _backward(self, *arguments: Any) -> Any:
        operands, flags, needs = self._split(arguments, in_memory=True)
        given = arguments[: len(self.declaration.backward_tensors)]
        found = cast(Any, self.run_gradient)(*given, *flags, needs)
        nothing = operands[0].new_empty
        return _one_or_more(as_new(tuple(nothing(0) if t is None else t for t in found), given))

    def _fake_backward(self, *arguments: Any) -> Any:
        operands, _, needs = self._split(arguments, in_memory=False)
        those = [operands[place] for place in self.declaration.places]
        pairs = zip(those, needs, strict=True)
        found = [(t, t.shape) if need and t is not None else (operands[0], [0]) for t, need in pairs]
        return _one_or_more(tuple(like.new_empty(shape) for like, shape in found))

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any, through_dispatcher: bool = True) -> None:
        """Keeps operands, and the results that are kept."""
        results = output if isinstance(output, tuple) else (output,)
        kept = results[len(self.declaration.returned) :]
        ctx.save_for_backward(*inputs[self.taken], *kept)
        ctx.flags, ctx.dtype = inputs[self.count :], inputs[0].dtype
        asked = self.declaration.named(ctx.flags)
        ctx.gradient_flags = [asked[flag] for flag in self.gradient_flags]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # torch would make plain zeros for a DTensor

    def gradients(self, ctx: Any, incoming: Sequence[Tensor], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each argument."""
        declaration = self.declaration
        incoming, saved = incoming[: len(declaration.returned)], ctx.saved_tensors  # a checkpoint lets it be asked once
        if declaration.transposed is not None:
            if incoming[0] is None:
                return (None,) * (self.count + len(ctx.flags))
            dtensor_bridge.check_kept(incoming, saved)
            arguments = (*incoming, *declaration.transposed(ctx.dtype, *saved, *ctx.flags))
            found = self.dispatched(*arguments)[0] if through_dispatcher else self.with_gradients(*arguments)
            return found, *[None] * (len(arguments) - 1)
        operands, kept = saved[: self.count], saved[self.count :]
        incoming = self.every(incoming, operands, ctx.flags)
        needs = [ctx.needs_input_grad[place] for place in declaration.places]
        flags = ctx.gradient_flags
        if must_be_seen.differentiated_again():
            dtensor_bridge.check_kept(incoming, operands)
            found = self._again(incoming, operands, ctx.flags, flags, needs)
        elif (one := self.fast_gradient(*incoming, *operands, *kept, *flags, needs)) is not None:
            found = one if isinstance(one, tuple) else (one,)
        elif through_dispatcher or must_be_seen.below(*incoming, *operands):
            ops = dtensor_bridge.operations(*incoming, *operands)
            found = getattr(ops, f"{declaration.name}_backward")(*incoming, *operands, *kept, *flags, needs)
            found = found if isinstance(found, tuple) else (found,)
        else:
            dtensor_bridge.check_kept(incoming, (*operands, *kept))
            found = cast(Any, self.run_gradient)(*incoming, *operands, *kept, *flags, needs)
        gradients: list[Tensor | None] = [None] * (self.count + len(ctx.flags))
        for place, need, gradient in zip(declaration.places, needs, found, strict=True):
            gradients[place] = gradient if need else None
        return tuple(gradients)

    def every(
        self, incoming: Sequence[Tensor | None], operands: Sequence[Tensor | None], flags: Sequence[Any]
    ) -> list[Tensor]:
        """The incoming gradients of the results that are returned, with zeros where there are none."""
        returned = self.declaration.returned
        given = incoming[: len(returned)]
        if all(d is not None for d in given):
            return [*cast(Any, given)]
        zeros = _zeros(self.declaration, returned, operands, flags)
        return [zero if d is None else d for d, zero in zip(given, zeros, strict=True)]

    def _again(
        self,
        incoming: Sequence[Tensor],
        operands: Sequence[Tensor | None],
        flags: Sequence[Any],
        gradient_flags: Sequence[Any],
        needs: list[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients by the formula, which can be differentiated; kept results are made again with derivatives."""
        declaration, first = self.declaration, len(incoming)

        def formula(*given: Any) -> tuple[Tensor | None, ...]:
            again = given[first:]
            kept = declaration.formula(*again, *flags)[len(declaration.returned) :] if declaration.kept else ()
            return cast(Any, declaration.gradient)(*given[:first], *again, *kept, *gradient_flags, needs)  # type: ignore[no-any-return]

        roles = [operand.role for operand in declaration.operands]
        whole = [first + place for place, role in enumerate(roles) if role is Role.WEIGHT]
        sums = {result: first + place for result, place in enumerate(declaration.places)}
        return dtensor_bridge.on_rows(formula, (*incoming, *operands), whole, sums, declaration.joined_of(operands))


def _recorded(operator: Operator) -> type[torch.autograd.Function]:
    """(*operands, *flags) -> results, with gradients, tangents and batches."""
    declaration = operator.declaration

    class Differentiable(torch.autograd.Function):
        @classmethod
        def record(cls, *arguments: Any) -> Any:
            """``apply``, for plain operands alone. That binds names first, which takes as long as a short call."""
            return cast(Any, super(torch.autograd.Function, cls)).apply(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            operator.keep(ctx, inputs, output, through_dispatcher=False)
            ctx.save_for_forward(*inputs[operator.taken])
            ctx.arguments = inputs[operator.count :]

        @staticmethod
        @exact
        def backward(ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
            return operator.gradients(ctx, incoming, through_dispatcher=False)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            with outer_levels():
                if declaration.transposed is not None:
                    return operator.with_gradients(tangents[0], *primals(ctx), *ctx.arguments)
                return _one_or_more(_tangents(operator, primals(ctx), ctx.arguments, tangents))

    class OfFormula(Differentiable):
        """By the formula, which torch maps over batches of weights."""

        generate_vmap_rule = True

        @staticmethod
        @exact
        def forward(*arguments: Any) -> Any:
            return _one_or_more(as_new(declaration.formula(*arguments), arguments[: operator.count]))

    class Recorded(Differentiable):
        """Where gradients are recorded or a transform of ``torch.func`` is active."""

        @staticmethod
        @exact
        def forward(*arguments: Any) -> Any:
            if (found := operator.fast(*arguments)) is not None:
                return found
            operands = arguments[: operator.count]
            if must_be_seen.below(*operands):
                return _one_or_more(operator.dispatched(*arguments))
            return _one_or_more(as_new(operator.run(*arguments), operands))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            roles = [operand.role for operand in declaration.operands]
            if any(role is Role.WEIGHT and dim is not None for role, dim in zip(roles, in_dims, strict=False)):
                found = torch.vmap(OfFormula.apply, in_dims)(*arguments)
            else:  # a batch of calls is one call with a dimension more
                rows = [
                    t
                    if t is None or role is Role.WEIGHT
                    else t.movedim(dim, 0)
                    if dim is not None
                    else t.expand(info.batch_size, *t.shape)
                    for t, role, dim in zip(arguments, roles, in_dims, strict=False)
                ]
                found = Recorded.apply(*rows, *arguments[operator.count :])  # type: ignore[no-untyped-call]
            return found, (0,) * len(found) if isinstance(found, tuple) else 0

    for function in (Recorded, OfFormula):
        function.__name__ = function.__qualname__ = declaration.name
    return Recorded


def _tangents(
    operator: Operator, operands: Sequence[Any], flags: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Tangents of the results; by default the transpose of the gradient, which is linear in the incoming gradients."""
    declaration = operator.declaration
    if declaration.tangent is not None:
        found = declaration.tangent(operands, flags, tangents)
        return *found, *[None] * len(declaration.kept)
    places, asked = declaration.places, declaration.named(flags)
    gradient_flags = [asked[flag] for flag in operator.gradient_flags]
    needs = [tangents[place] is not None for place in places]
    kept = declaration.formula(*operands, *flags)[len(declaration.returned) :] if declaration.kept else ()

    def gradient(*incoming: Tensor) -> tuple[Tensor, ...]:
        found = cast(Any, declaration.gradient)(*incoming, *operands, *kept, *gradient_flags, needs)
        return tuple(g for g, need in zip(found, needs, strict=True) if need)

    _, transpose = cast(Any, torch.func.vjp)(gradient, *_zeros(declaration, declaration.returned, operands, flags))
    found = transpose(tuple(t for t in (tangents[place] for place in places) if t is not None))
    return *found, *[None] * len(declaration.kept)


def _zeros(
    declaration: Declaration, results: Sequence[Result], operands: Sequence[Any], flags: Sequence[Any]
) -> list[Tensor]:
    """Tensors like the results."""
    rows, shape, dtype = operands[0], declaration.shape, declaration.dtype
    return [rows.new_zeros(shape(result.role, operands), dtype=dtype(result, operands, flags)) for result in results]


def as_new(found: Sequence[Tensor], operands: Sequence[Any]) -> tuple[Tensor, ...]:
    """Contiguous results, none of which is an operand, another result or a view, to which torch refuses some writes."""
    before = [id(t) for t in operands]
    new = []
    for tensor in found:
        result = tensor.contiguous()
        new.append(result.clone() if id(result) in before or result._is_view() else result)
        before.append(id(new[-1]))
    return tuple(new)


def _one_or_more(found: tuple[Any, ...]) -> Any:
    """A tensor alone, as torch has it, or several."""
    return found[0] if len(found) == 1 else found
