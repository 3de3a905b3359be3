"""A declared operation as torch knows it: an operator, an operator for its gradients, and a function of autograd."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.arithmetic import exact
from fusednorm.calls.fast_path import nothing
from fusednorm.calls.forward_mode import outer_levels, primals
from fusednorm.declare.declaration import WHOLE, Declaration, Role
from fusednorm.declare.plan import Flags, New, Operands, Plan
from fusednorm.engine import run as engine
from fusednorm.engine.requested import request, with_request
from fusednorm.engine.run import as_new
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.registered import register

#: All declared operations, by name.
DECLARED: dict[str, Operator] = {}


class Operator:
    """A declared operation in ``torch.ops.fusednorm``, and its gradients there.

    Args:
        declaration: the operation.
        run: (operands, flags) -> the results for checked operands in memory, as new tensors, as the formula makes them;
            by default a backend that has the operation in one call, or the formula.
        run_gradient: (the gradient's arguments but needs, by name, and needs) -> the gradients, in the same way.
        fast: the results of a call that the fast path takes, else None; without checks. It takes an operator's
            arguments.
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
        self.declaration, self.plan = declaration, Plan(declaration)
        self.run = run or self._run
        self.run_gradient = run_gradient or self._run_gradient
        self.fast, self.fast_gradient = fast or nothing, fast_gradient or nothing
        #: The number of operands.
        self.count = len(declaration.operands)
        #: The operands that gradients take.
        self.taken = self.plan.operands[0 if declaration.transposed is None else 1 :]
        #: The places of results that do not depend on all operands, with the places of those on which they do.
        self._of_some = [
            (place, [self.plan.operands.index(name) for name in result.of])
            for place, result in enumerate(declaration.returned)
            if result.of
        ]
        self.register()

    def register(self) -> None:
        """Makes the operators."""
        declaration, name, gradients = self.declaration, self.declaration.name, None
        if self.differentiable:
            gradients = (self._gradients_of_operator, self._keep_of_operator)
        if declaration.gradient is not None:
            backward = (self.plan.backward_schema, self._backward, self._fake_backward)
            register(f"{name}_backward", *backward, fast=_given(self.fast_gradient))
        register(name, self.plan.schema, self._forward, self._fake, gradients, _given(self.fast))
        DECLARED[name] = self
        if (sharding := sys.modules.get("fusednorm.torch_ops.sharding")) is not None:
            sharding.register_declared(self.plan)

    @functools.cached_property
    def recorded(self) -> type[torch.autograd.Function]:
        """(*operands, flags) -> results, with gradients, tangents and batches; it takes long to make."""
        return _recorded(self)

    @functools.cached_property
    def apply_plain(self) -> Callable[..., Any]:
        """``apply``, for plain operands alone. That binds names first, which takes as long as a short call."""
        return cast(Any, super(torch.autograd.Function, self.recorded)).apply  # type: ignore[no-any-return]

    @property
    def differentiable(self) -> bool:
        """Whether it has gradients."""
        return self.declaration.gradient is not None or self.declaration.transposed is not None

    def _run(self, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
        return engine.forward(self.plan, operands, flags)

    def _run_gradient(self, given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        return engine.backward(self.plan, given, needs)

    def dispatched(self, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
        """The results as new tensors, through torch's dispatcher."""
        operator = getattr(dtensor_bridge.operations(*operands.values()), self.declaration.name)
        found = operator(*self.plan.arguments(operands, flags))
        return found if isinstance(found, tuple) else (found,)

    def record(self, operands: Operands, flags: Flags) -> Any:
        """The results, one or a tuple, for checked operands, whose gradients are recorded."""
        return cast(Any, self.recorded).apply(*operands.values(), MappingProxyType(flags))

    def record_plain(self, operands: Sequence[Any], flags: Flags) -> Any:
        """Records a call of plain operands that C has read, and flags of a type that torch does not look into."""
        return self.apply_plain(*operands, flags)

    def with_gradients(self, **arguments: Any) -> Any:
        """The results, one or a tuple, for operands that have been checked: through torch's dispatcher if it must."""
        operands = {name: arguments[name] for name in self.plan.operands}
        flags = {flag: arguments.get(flag, default) for flag, default in self.declaration.defaults.items()}
        if must_be_seen.seen(*operands.values()):
            return _one_or_more(self.dispatched(operands, flags))
        return self.record(operands, flags)

    # The operators. Torch calls these with positions.

    def _forward(self, *arguments: Any) -> Any:
        operands, given = self.plan.bound(arguments)
        return _one_or_more(self.run(operands, self.plan.check(operands, given, in_memory=True)))

    def _fake(self, *arguments: Any) -> Any:
        operands, given = self.plan.bound(arguments)
        flags = self.plan.check(operands, given, in_memory=False)
        return _one_or_more(_zeros(operands[self.plan.rows], self.plan.results(operands, flags)))

    def _backward(self, *arguments: Any) -> Any:
        given, needs = self.plan.bound_backward(arguments)
        operands, given = self.plan.check_backward(given, needs, in_memory=True)
        found = self.run_gradient(given, needs)
        nothing = operands[self.plan.rows].new_empty
        tensors = [given[name] for name in self.declaration.backward_tensors]
        return _one_or_more(as_new(tuple(nothing(0) if t is None else t for t in found), tensors))

    def _fake_backward(self, *arguments: Any) -> Any:
        given, needs = self.plan.bound_backward(arguments)
        operands, _ = self.plan.check_backward(given, needs, in_memory=False)
        pairs = zip([operands[name] for name in self.plan.with_gradient], needs, strict=True)
        found = [(t, t.shape) if need and t is not None else (operands[self.plan.rows], [0]) for t, need in pairs]
        return _one_or_more(tuple(like.new_empty(shape) for like, shape in found))

    def _keep_of_operator(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operands, flags = self.plan.bound(inputs)
        self.keep(ctx, operands, flags, _several(output))

    def _gradients_of_operator(self, ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
        found = self.gradients(ctx, incoming, through_dispatcher=True)
        return *found, *[None] * len(self.plan.flags_of_operator)

    # Gradients.

    def keep(
        self, ctx: Any, operands: Operands, flags: Flags, results: Sequence[Any], through_dispatcher: bool = True
    ) -> None:
        """Keeps operands, and the results that are kept."""
        kept = results[len(self.declaration.returned) :]
        ctx.save_for_backward(*[operands[name] for name in self.taken], *kept)
        ctx.flags, ctx.dtype = flags, cast(Any, operands[self.plan.rows]).dtype
        if not through_dispatcher:
            ctx.request = request()  # in the backward pass another may be in force
        needs = ctx.needs_input_grad if self._of_some else ()
        constant = [results[place] for place, of in self._of_some if not [one for one in of if needs[one]]]
        ctx.mark_non_differentiable(*constant, *kept)
        ctx.set_materialize_grads(False)  # torch would make plain zeros for a DTensor

    def gradients(self, ctx: Any, incoming: Sequence[Tensor], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each operand."""
        declaration, plan = self.declaration, self.plan
        incoming, saved = incoming[: len(declaration.returned)], ctx.saved_tensors  # a checkpoint lets it be asked once
        flags, again = ctx.flags, must_be_seen.differentiated_again()
        if declaration.transposed is not None:
            none = (None,) * (self.count - 1)
            if incoming[0] is None:
                return None, *none
            dtensor_bridge.check_kept(incoming, saved)
            others, flags = declaration.transposed(ctx.dtype, dict(zip(self.taken, saved, strict=True)), flags)
            taken = {plan.rows: incoming[0], **others}
            found = self.dispatched(taken, flags)[0] if through_dispatcher else self.with_gradients(**taken, **flags)
            return found, *none
        if [d for d in incoming if d is None]:  # ``in`` would compare tensors
            incoming = self.every(incoming, dict(zip(plan.operands, saved, strict=False)), flags)
        needs = [ctx.needs_input_grad[place] for place in plan.places]
        asked = [flags[flag] for flag in plan.gradient_flags]
        one = None if again else self.fast_gradient(*incoming, *saved, *asked, needs)
        if one is not None:
            found = _several(one)
        elif again:
            operands = saved[: self.count]
            dtensor_bridge.check_kept(incoming, operands)
            found = self._again(incoming, dict(zip(plan.operands, operands, strict=True)), flags, needs)
        elif through_dispatcher or must_be_seen.below(*incoming, *saved[: self.count]):
            ops = dtensor_bridge.operations(*incoming, *saved[: self.count])
            found = _several(getattr(ops, f"{declaration.name}_backward")(*incoming, *saved, *asked, needs))
        else:
            dtensor_bridge.check_kept(incoming, saved)
            found = self.as_requested(ctx, dict(zip(plan.of_backward, (*incoming, *saved, *asked), strict=True)), needs)
        gradients: list[Tensor | None] = [None] * self.count
        for place, need, gradient in zip(plan.places, needs, found, strict=True):
            gradients[place] = gradient if need else None
        return tuple(gradients)

    def as_requested(self, ctx: Any, given: Mapping[str, Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The gradients, by the backends that were requested in the forward pass."""
        if ctx.request == request():
            return self.run_gradient(given, needs)
        with with_request(ctx.request):
            return self.run_gradient(given, needs)

    def every(self, incoming: Sequence[Tensor | None], operands: Operands, flags: Flags) -> list[Tensor]:
        """The incoming gradients of the results that are returned, with zeros where there are none."""
        given = incoming[: len(self.declaration.returned)]
        if all(d is not None for d in given):
            return [*cast(Any, given)]
        zeros = self.zeros(operands, flags)
        return [zero if d is None else d for d, zero in zip(given, zeros, strict=True)]

    def zeros(self, operands: Operands, flags: Flags) -> tuple[Tensor, ...]:
        """Tensors like the results that are returned."""
        results = self.plan.results(operands, flags)[: len(self.declaration.returned)]
        return _zeros(cast(Tensor, operands[self.plan.rows]), results)

    def _again(
        self, incoming: Sequence[Tensor], operands: Operands, flags: Flags, needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients by the formula, which can be differentiated; kept results are made again with derivatives."""
        declaration, plan = self.declaration, self.plan
        names, first = (*declaration.incoming, *operands), len(incoming)

        def formula(*tensors: Any) -> tuple[Tensor | None, ...]:
            return self.by_formula(dict(zip(names, tensors, strict=True)), flags, needs)

        roles = [operand.role for operand in declaration.operands]
        whole = [first + place for place, role in enumerate(roles) if role in WHOLE]
        sums = {result: first + place for result, place in enumerate(plan.places)}
        tensors = (*incoming, *operands.values())
        return dtensor_bridge.on_rows(formula, tensors, whole, sums, plan.joined_of(operands))

    def by_formula(self, tensors: Mapping[str, Any], flags: Flags, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """The gradients for incoming gradients and operands; kept results are made again, with derivatives."""
        declaration = self.declaration
        operands, kept = {name: tensors[name] for name in self.plan.operands}, dict[str, Any]()
        if declaration.kept:
            made = declaration.formula(**operands, **flags)[len(declaration.returned) :]
            kept = dict(zip([result.name for result in declaration.kept], made, strict=True))
        asked = {flag: flags[flag] for flag in self.plan.gradient_flags}
        return cast(Any, declaration.gradient)(**tensors, **kept, **asked, needs=needs)  # type: ignore[no-any-return]


def _recorded(operator: Operator) -> type[torch.autograd.Function]:
    """(*operands, flags) -> results, with gradients, tangents and batches.

    The flags are no dictionary, of whose values torch would make arguments, but a ``MappingProxyType``.
    """
    declaration, names = operator.declaration, operator.plan.operands

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *tensors, flags = inputs
            operands = dict(zip(names, tensors, strict=True))
            operator.keep(ctx, operands, flags, _several(output), through_dispatcher=False)
            if must_be_seen.level_entered():
                ctx.save_for_forward(*[operands[name] for name in operator.taken])

        @staticmethod
        @exact
        def backward(ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
            return *operator.gradients(ctx, incoming, through_dispatcher=False), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            with outer_levels():
                operands = dict(zip(operator.taken, primals(ctx), strict=True))
                if declaration.transposed is not None:
                    return operator.with_gradients(**{names[0]: tangents[0], **operands, **ctx.flags})
                given = dict(zip(names, tangents, strict=False))
                return _one_or_more(_tangents(operator, operands, ctx.flags, given))

    class OfFormula(Differentiable):
        """A call by the formula, which torch maps over batches of weights."""

        generate_vmap_rule = True

        @staticmethod
        @exact
        def forward(*arguments: Any) -> Any:
            *operands, flags = arguments
            found = declaration.formula(**dict(zip(names, operands, strict=True)), **flags)
            return _one_or_more(as_new(found, operands))

    class Recorded(Differentiable):
        """The function of autograd, where gradients are recorded or a transform of ``torch.func`` is active."""

        @staticmethod
        @exact
        def forward(*arguments: Any) -> Any:
            *tensors, flags = arguments
            if (found := operator.fast(*tensors, *flags.values())) is not None:
                return found
            operands = dict(zip(names, tensors, strict=True))
            if must_be_seen.below(*tensors):
                return _one_or_more(operator.dispatched(operands, flags))
            return _one_or_more(operator.run(operands, flags))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            *tensors, flags = arguments
            roles = [operand.role for operand in declaration.operands]
            if Role.KEYS in roles:  # whose operands have no rows in common
                given = [*zip(tensors, in_dims, strict=False)]
                one_by_one = [
                    cast(Any, Recorded).apply(*[t if dim is None else t.select(dim, place) for t, dim in given], flags)
                    for place in range(info.batch_size)
                ]
                found = torch.stack(one_by_one)
            elif any(role in WHOLE and dim is not None for role, dim in zip(roles, in_dims, strict=False)):
                found = torch.vmap(OfFormula.apply, (*in_dims[:-1], None))(*arguments)
            else:  # a batch of calls is one call with a dimension more
                rows = [
                    t
                    if t is None or role in WHOLE
                    else t.movedim(dim, 0)
                    if dim is not None
                    else t.expand(info.batch_size, *t.shape)
                    for t, role, dim in zip(tensors, roles, in_dims, strict=False)
                ]
                found = Recorded.apply(*rows, flags)  # type: ignore[no-untyped-call]
            return found, (0,) * len(found) if isinstance(found, tuple) else 0

    for function in (Recorded, OfFormula):
        function.__name__ = function.__qualname__ = declaration.name
    return Recorded


def _tangents(
    operator: Operator, operands: Operands, flags: Flags, tangents: Mapping[str, Any]
) -> tuple[Tensor | None, ...]:
    """Tangents of the results; by default the transpose of the gradient, which is linear in the incoming gradients."""
    declaration = operator.declaration
    if declaration.tangent is not None:
        found = declaration.tangent(operands, flags, tangents)
        return *found, *[None] * len(declaration.kept)
    needs = [tangents[name] is not None for name in operator.plan.with_gradient]

    def gradient(*incoming: Tensor) -> tuple[Tensor, ...]:
        of_results = dict(zip(declaration.incoming, incoming, strict=True))
        found = operator.by_formula({**of_results, **operands}, flags, needs)
        return tuple(cast(Tensor, g) for g, need in zip(found, needs, strict=True) if need)

    _, transpose = cast(Any, torch.func.vjp)(gradient, *operator.zeros(operands, flags))
    found = transpose(tuple(t for t in (tangents[name] for name in operator.plan.with_gradient) if t is not None))
    return *found, *[None] * len(declaration.kept)


def _zeros(like: Tensor, results: Sequence[New]) -> tuple[Tensor, ...]:
    return tuple([like.new_zeros(shape, dtype=dtype) for _, shape, dtype in results])


def _given(function: Callable[..., Any]) -> Callable[..., Any] | None:
    return None if function is nothing else function


def _several(found: Any) -> tuple[Any, ...]:
    """The results of an operator, which torch has as a tensor alone, or several."""
    return found if isinstance(found, tuple) else (found,)


def _one_or_more(found: tuple[Any, ...]) -> Any:
    """A tensor alone, as torch has it, or several."""
    return found[0] if len(found) == 1 else found
