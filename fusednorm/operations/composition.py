"""Compositions: operations one after the other, as one function, which a backend may have in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fusednorm.calls import must_be_seen
from fusednorm.calls.fast_path import ENTRIES, Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.declare.declaration import Declaration
from fusednorm.engine.choose import with_request
from fusednorm.operations.front_door import Operation
from fusednorm.operations.inference import add_operator
from fusednorm.torch_ops import dtensor_bridge
from fusednorm.torch_ops.gradients import composed_again

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
    """

    def __init__(
        self,
        declaration: Declaration,
        steps: str,
        has_gradients: Callable[..., bool] = lambda operands, flags: False,
        backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    ) -> None:
        super().__init__(declaration, run_gradient=backward)
        self.steps, self.has_gradients = steps, has_gradients
        self._incoming = [f"d_{result.name}" for result in declaration.returned]

    @property
    def differentiable(self) -> bool:
        """Each of its operations has gradients of its own."""
        return True

    def open(self, entry: Entry, names: str = "") -> Callable[..., Any]:
        """The fast path of the public function, which its operator takes too."""
        ENTRIES[self.declaration.name] = entry
        return super().open(entry, names)

    def public(self, function: _Function) -> _Function:
        """Adds a function that users call, with an operator."""
        if not function.__name__.endswith("_"):
            add_operator(function)
        return super().public(function)

    def register(self) -> None:
        """Torch knows its operations; its own operator has the arguments of its function."""

    def checked(
        self, operands: Mapping[str, Any], flags: Mapping[str, Any], listener: Listener | None
    ) -> Mapping[str, Any]:
        """The flags, numbers rounded; all is checked here, because its operations have other names for it."""
        return self.plan.check(operands, flags, in_memory=listener is None)

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
        """The same for plain operands that C has read."""
        named = dict(zip(self.plan.operands, operands, strict=True))
        if self.has_gradients(named, flags):
            return super().record_plain(operands, flags)
        return self.composed(named, flags)

    def gradients(self, ctx: Any, incoming: Sequence[Tensor], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each operand."""
        saved, plan, flags = ctx.saved_tensors, self.plan, ctx.flags
        operands = dict(zip(plan.operands, saved, strict=False))
        needs = [ctx.needs_input_grad[place] for place in plan.places]
        given = [d for d in incoming if d is not None]
        gradients: list[Tensor | None] = [None] * self.count
        if not given:
            return tuple(gradients)
        if must_be_seen.differentiated_again() or must_be_seen.below(*given, *operands.values()):
            dtensor_bridge.check_kept(given, [*operands.values()])

            def again(*tensors: Tensor | None) -> tuple[Tensor, ...]:
                return self.composed({**operands, **dict(zip(plan.with_gradient, tensors, strict=True))}, flags)

            wanted = incoming[: len(self._incoming)]
            found: Any = composed_again(again, [operands[name] for name in plan.with_gradient], wanted, needs)
        else:
            kept = dict(zip([one.name for one in self.declaration.kept], saved[self.count :], strict=True))
            by_name = dict(zip(self._incoming, incoming, strict=False))
            with with_request(ctx.request):
                found = self.run_gradient({**by_name, **operands, **kept, **flags}, needs)
        for place, need, gradient in zip(plan.places, needs, found, strict=True):
            gradients[place] = gradient if need else None
        return tuple(gradients)
