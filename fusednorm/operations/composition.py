"""Compositions: operations one after the other, as one function, which a backend may have in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.declare.declaration import Declaration
from fusednorm.operations.front_door import Asked, Operation
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.gradients import composed_again


class Composition(Operation):
    """Its formula calls the operations, which torch sees and records one by one.

    A backend that has all in one call makes it where nobody else must see it, also with gradients. A compiled graph
    without gradients has one operator for all: see ``inference.py``.

    Args:
        declaration: with a kernel, and checks of its own.
        steps: as :attr:`fusednorm.operations.listed.Listed.steps`.
        has_gradients: (operands, flags) -> whether the backend in force has the results in one call, and gradients.
        backward: (incoming gradients, as ``d_out`` of ``out``, or None, operands, what is kept, and flags, by name, and
            whether each operand that may have a gradient needs it) -> a gradient or None for each of these.
        fast: see :class:`fusednorm.torch_ops.operator.Operator`; recorded calls alone ask it.
    """

    has_one_operator = True

    def __init__(
        self,
        declaration: Declaration,
        steps: str,
        has_gradients: Callable[..., bool] = lambda operands, flags: False,
        backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
        fast: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(declaration, run_gradient=backward, fast=fast)
        self.steps, self.has_gradients = steps, has_gradients
        self._results = len(declaration.returned)
        #: The names of incoming gradients, and of all that is kept.
        self._of_backward = [f"d_{result.name}" for result in declaration.returned]
        self._of_backward += [*self.plan.operands, *[result.name for result in declaration.kept]]

    @property
    def differentiable(self) -> bool:
        """Each of its operations has gradients of its own."""
        return True

    def register(self) -> None:
        """Torch knows its operations; its own operator has the arguments of its function."""

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded; all is checked here, because its operations have other names for it."""
        flags = self.plan.check(asked.operands, asked.flags, asked.in_memory)
        if asked.outputs:
            self._check_outputs(asked, flags)
        return flags

    def composed(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The results of its operations, one after the other."""
        return self.declaration.formula(**operands, **flags)

    def dispatched(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """New results, by operators that torch sees: one for all of a compiled graph without gradients."""
        if must_be_seen.in_one_operator(*operands.values()):
            return dtensor_bridge.in_one_operator(self.declaration.name, {**operands, **flags})
        return self.composed(operands, flags)

    def record(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
        """New results with gradients."""
        if must_be_seen.transform(*operands.values()) or not self.has_gradients(operands, flags):
            return self.composed(operands, flags)
        return super().record(operands, flags)

    def record_plain(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> Any:
        """Records a call of plain operands that C has read."""
        named = dict(zip(self.plan.operands, operands, strict=True))
        if self.has_gradients(named, flags):
            return super().record_plain(operands, flags)
        return self.composed(named, flags)

    def gradients(self, ctx: Any, incoming: Sequence[Tensor], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each operand."""
        plan, saved = self.plan, ctx.saved_tensors
        incoming, operands, needs = incoming[: self._results], saved[: self.count], ctx.needs_input_grad
        if not [d for d in incoming if d is not None]:
            return (None,) * self.count
        if must_be_seen.differentiated_again() or must_be_seen.below(*incoming, *operands):
            dtensor_bridge.check_kept(incoming, operands)

            def again(*tensors: Tensor | None) -> tuple[Tensor, ...]:
                return self.composed(dict(zip(plan.operands, tensors, strict=True)), ctx.flags)

            return tuple(composed_again(again, operands, incoming, needs[: self.count]))
        wanted = [needs[place] for place in plan.places]
        named = ctx.flags | dict(zip(self._of_backward, (*incoming, *saved), strict=True))
        found = self.as_requested(ctx, named, wanted)
        if len(found) == self.count:
            return found
        of_operands = dict(zip(plan.places, found, strict=True))
        return tuple([of_operands.get(place) for place in range(self.count)])
