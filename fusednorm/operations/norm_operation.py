"""Norms of rows, with and without a residual, as operations: what RMS norms and LayerNorms have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import must_be_seen
from fusednorm.calls.call import Flags, accumulator
from fusednorm.calls.checks import check_affine, check_flags, check_operands, refuse_nested, rounded_flags
from fusednorm.calls.fast_path import Entry
from fusednorm.calls.must_be_seen import Listener
from fusednorm.calls.scalars import number
from fusednorm.declare.declaration import Declaration, Operand, Result, Role
from fusednorm.declare.written import made_of
from fusednorm.engine import run_norms
from fusednorm.operations.front_door import Asked, Operation
from fusednorm.reference import norm as reference
from fusednorm.torch_ops import dtensor_bridge, steps
from fusednorm.torch_ops.gradients import backend_of, gradients, keep, new_rstd
from fusednorm.torch_ops.operators import NUMBERS_OF_NORMS, into
from fusednorm.torch_ops.registered import register

#: By whether a residual is added, and whether rows lose their mean.
NORMS: dict[tuple[bool, bool], Norm] = {}

_OPERANDS = ("x", "residual", "weight", "bias")
#: The flags of the operators that write.
_NUMBERS = ("eps", "weight_offset", "round_sum", "round_norm")
_RESULTS = (
    Result(dtype="out_dtype", overwrites="x"),
    Result("residual_out", dtype="residual_dtype", like="residual", overwrites="residual"),
    Result("rstd", Role.NUMBERS, kept=True),
)


class Norm(Operation):
    """A norm, its operator, and its operator in place.

    The operator of an RMS norm has no bias, no weights of heads and no ``x_scale``. Where torch must see a call with
    them, it sees plain operators, one after the other: docs/spec.md, section 8.

    What is kept for the gradients is the row that was normalised, and not the operands.
    """

    differentiable = True
    has_one_operator = True

    def __init__(self, name: str, *, added: bool, center: bool) -> None:
        self._added, self._center, scaled = added, center, added and not center
        self.steps = "add, norm" if added else "norm"
        NORMS[added, center] = self
        weights = (Operand("weight", Role.WEIGHT, True), Operand("bias", Role.WEIGHT, True, listed=False))
        more: dict[str, Any] = {"x_scale": 0.22} if scaled else {}
        defaults = {**Flags._field_defaults, "center": center}
        flags = [name for name in defaults if name != "center" and (added or name != "residual_dtype")]
        declaration = Declaration(
            name,
            operands=(Operand("x"), *[Operand("residual")] * added, *weights),
            results=_RESULTS if added else (_RESULTS[0], _RESULTS[2]),
            flags={**dict.fromkeys(more, 1.0), **{flag: defaults[flag] for flag in flags}},
            not_of_operator=() if center else ("bias", *more),
            formula=self._formula,
            tangent=self._tangent,
            checks=self._check,
            kernel=None,
            samples=(more,),
        )
        #: (the declared flags) -> those of all norms.
        self._flags = made_of(Flags, flags, defaults)
        names = " ".join((*[operand.name for operand in declaration.operands], *declaration.flags))
        fast = Entry("norm", names, constants={"center": center, "rstd": True}).open()
        super().__init__(declaration, self._computed, fast=fast)

    def register(self) -> None:
        """Makes the operators."""
        super().register()
        in_place = ", ".join(["Tensor(a!) x", "Tensor(b!) residual"][: 1 + self._added])
        rest = f"Tensor? weight, {'Tensor? bias, ' * self._center}{NUMBERS_OF_NORMS}"
        schema = f"({in_place}, {rest}) -> ()"
        register(f"{self.declaration.name}_", schema, self._in_place(True), self._in_place(False))

    def _in_place(self, in_memory: bool) -> Callable[..., None]:
        def written(*arguments: Any) -> None:
            operands, flags = self.plan.bound(arguments)
            x, residual = operands["x"], operands.get("residual")
            numbers = {name: flags[name] for name in _NUMBERS}
            into(
                in_memory,
                x,
                residual,
                operands["weight"],
                x,
                residual,
                **numbers,
                center=self._center,
                bias=operands["bias"],
            )

        return written

    # Arguments and results as other functions have them, which know all norms.

    def _of_results(self, y: Any, total: Any, *others: Any) -> tuple[Any, ...]:
        return (y, total, *others) if self._added else (y, *others)

    # The operator.

    def _formula(self, x: Tensor, residual: Any = None, weight: Any = None, bias: Any = None, **given: Any) -> Any:
        flags = self._flags(given)
        if given.get("x_scale", 1.0) != 1.0:
            x = reference.scaled(x, given["x_scale"])
        total_dtype = None if residual is None else flags.residual_dtype or residual.dtype
        found = reference.outputs_of(x, residual, weight, bias, flags, flags.out_dtype or x.dtype, total_dtype)
        return self._of_results(*found)

    def _tangent(
        self, operands: Mapping[str, Any], flags: Mapping[str, Any], tangents: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        """Tangents of y and of the sum, whose bits nothing promises; roundings are passed straight through."""
        x, residual, weight = operands["x"], operands.get("residual"), operands["weight"]
        of_weight, of_bias = tangents["weight"], tangents.get("bias")
        asked, wide = self._flags(flags), accumulator(x.dtype)
        h, total_dtype = x.to(wide), wide
        if residual is not None:
            total_dtype = asked.residual_dtype or residual.dtype
            h = h + residual.to(wide)
            h = h.to(total_dtype).to(wide) if asked.round_sum else h
        of_terms = (tangents["x"], tangents.get("residual"))
        of_h = of_total = sum((t.to(wide) for t in of_terms if t is not None), start=torch.zeros_like(h))
        if asked.center:
            h, of_h = h - h.mean(-1, keepdim=True), of_h - of_h.mean(-1, keepdim=True)
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + asked.eps)
        xhat = h * rstd
        of_y = rstd * (of_h - xhat * (xhat * of_h).mean(-1, keepdim=True))
        if weight is not None:
            of_y = of_y * (weight.to(wide) + asked.weight_offset)
        if of_weight is not None:
            of_y = of_y + xhat * of_weight.to(wide)
        if of_bias is not None:
            of_y = of_y + of_bias.to(wide)
        return self._of_results(of_y.to(asked.out_dtype or x.dtype), of_total.to(total_dtype))

    def _check(self, operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> dict[str, Any]:
        """Makes all checks of the operator."""
        x, residual, weight = operands["x"], operands.get("residual"), operands["weight"]
        check_operands(x, residual, None if self._center else weight, None, None, in_memory=in_memory)
        if self._center:
            check_affine(x, weight, operands["bias"], in_memory=in_memory)
        return {**flags, **self._named(check_flags(self._flags(flags), x, residual, None, None))}

    def _named(self, flags: Flags) -> dict[str, Any]:
        return {name: getattr(flags, name) for name in self.declaration.flags if name != "x_scale"}

    def _computed(
        self,
        operands: Mapping[str, Any],
        given: Mapping[str, Any],
        compute: Callable[..., tuple[Any, Any]] = run_norms.norm,
        of_heads: bool = True,
    ) -> Any:
        """The results, after all checks."""
        x, weight, rstd = operands["x"], operands["weight"], new_rstd(operands["x"])
        found = compute(
            x,
            operands.get("residual"),
            weight,
            self._flags(given),
            rstd=rstd,
            bias=operands["bias"],
            of_heads=of_heads and getattr(weight, "ndim", 1) == 2,
        )
        return self._of_results(*found, rstd)

    def _forward(self, *arguments: Any) -> Any:
        return self._computed(*self.plan.bound(arguments), run_norms.fast_path_first, self._center)

    # Calls of public functions.

    def checked(self, asked: Asked) -> Mapping[str, Any]:
        """The flags, numbers rounded; outputs say their dtypes."""
        operands, flags = asked.operands, dict(asked.flags)
        x, residual, weight, bias = map(cast(Any, operands.get), _OPERANDS)
        if asked.listener is Listener.DISPATCHER and not self._is_composed(operands, flags):
            self._refuse_nested({**operands, **asked.outputs})
            return flags  # the operators check the rest
        out, residual_out = map(asked.outputs.get, ("out", "residual_out"))
        found, x_scale = self._flags(flags), flags.get("x_scale", 1.0)
        if asked.listener is Listener.TRANSFORM:
            found, x_scale = rounded_flags(found, x), number("x_scale", x_scale, accumulator(x.dtype))
        else:
            affine, outputs = not self._is_alone(operands, flags), (out, residual_out)
            found, x_scale = run_norms.checked(
                x, residual, weight, found, *outputs, bias, x_scale, affine, asked.in_memory
            )
        flags |= self._named(found)
        if "x_scale" in flags:
            flags["x_scale"] = x_scale
        if out is not None:
            flags["out_dtype"] = out.dtype
        return flags

    def _refuse_nested(self, tensors: Mapping[str, Any]) -> None:
        """Refuses nested tensors, which would override an operator, and not know it."""
        for name, tensor in tensors.items() if not is_dynamo_compiling() else ():
            if isinstance(tensor, Tensor) and tensor.is_nested:
                refuse_nested(name)

    def _is_alone(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
        """Whether it has nothing that a norm need not know."""
        alone = operands["bias"] is None and getattr(operands["weight"], "ndim", 1) != 2
        return alone and flags.get("x_scale", 1.0) == 1.0

    def _is_composed(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
        """Whether plain operators serve it where torch must see it."""
        return not (self._center or self._is_alone(operands, flags))

    def direct(
        self, operands: dict[str, Any], flags: Mapping[str, Any], outputs: dict[str, Any], in_place: bool
    ) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        x, weight, bias = operands["x"], operands["weight"], operands["bias"]
        residual, out, residual_out = operands.get("residual"), outputs.get("out"), outputs.get("residual_out")
        of_heads, x_scale = getattr(weight, "ndim", 1) == 2, flags.get("x_scale", 1.0)
        return run_norms.norm(x, residual, weight, self._flags(flags), out, residual_out, None, bias, x_scale, of_heads)

    def compute(self, asked: Asked) -> tuple[Tensor, ...]:
        """See :class:`Operation`."""
        return self.direct(asked.operands, asked.flags, asked.outputs, asked.in_place)

    def into(self, asked: Asked) -> tuple[Tensor, ...]:
        """See :class:`Operation`: by the operators that write, which a norm alone has."""
        operands, flags, outputs = asked.operands, asked.flags, asked.outputs
        if not outputs or self._is_composed(operands, flags):
            return self.dispatched(operands, flags)
        x, residual, weight, bias = map(cast(Any, operands.get), _OPERANDS)
        out, total = map(cast(Any, outputs.get), ("out", "residual_out"))
        check_flags(self._flags(flags), x, residual, out, total)
        if out is None:
            dtype = flags["out_dtype"] or x.dtype
            out = torch.empty_like(total, dtype=dtype, memory_format=torch.contiguous_format)
        if residual is not None and total is None:
            dtype = flags["residual_dtype"] or residual.dtype
            total = torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
        ops = dtensor_bridge.operations(x, residual, weight, out, total)
        numbers = [flags[name] for name in _NUMBERS]
        if asked.in_place:
            given = [x, *[residual] * self._added, weight, *[bias] * self._center]
            getattr(ops, f"{self.declaration.name}_")(*given, *numbers)
        else:
            ops.into(x, residual, weight, out, total, *numbers, *((True, bias) if self._center else ()))
        return self._of_results(out, total)

    def dispatched(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """New results, by operators that torch sees."""
        if must_be_seen.in_one_operator(*operands.values()):
            return dtensor_bridge.in_one_operator(self.declaration.name, {**operands, **flags})
        composed = self._is_composed(operands, flags)
        return self._composed(operands, flags) if composed else super().dispatched(operands, flags)

    def record(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
        """New results with gradients."""
        of_scaled = flags.get("x_scale", 1.0) != 1.0
        if of_scaled or (self._is_composed(operands, flags) and must_be_seen.transform(*operands.values())):
            return self._composed(operands, flags)
        return super().record(operands, flags)

    def flags_of_recorded(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> MappingProxyType[str, Any]:
        """The flags as they are: they are checked, and their numbers rounded, where they are used."""
        return MappingProxyType(flags)

    def record_plain(self, operands: Sequence[Any], flags: Mapping[str, Any]) -> Any:
        """Records a call of plain operands that C has read."""
        if flags.get("x_scale", 1.0) != 1.0:
            return self._composed(dict(zip(self.plan.operands, operands, strict=True)), flags)
        return super().record_plain(operands, flags)

    def _composed(self, operands: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """New results by plain operators, one after the other."""
        x, weight, bias = operands["x"], operands["weight"], operands["bias"]
        name = self.declaration.name
        if flags.get("x_scale", 1.0) != 1.0:
            scaled = {**operands, "x": steps.SCALE.with_gradients(x=x, factor=flags["x_scale"])}
            return cast("tuple[Tensor, Tensor]", self._called(name, scaled, {**flags, "x_scale": 1.0}, {}))
        alone = {"weight_offset": 0.0, "round_norm": False, "out_dtype": accumulator(x.dtype)}
        found = self._called(name, {**operands, "weight": None, "bias": None}, {**flags, **alone}, {})
        rows, *total = found if self._added else (found,)
        y: Tensor = steps.AFFINE.with_gradients(
            n=rows,
            weight=weight,
            bias=bias,
            weight_offset=flags["weight_offset"],
            rounded_to=x.dtype if flags["round_norm"] else None,
            out_dtype=flags["out_dtype"] or x.dtype,
        )
        return y, *total

    # Gradients.

    def keep(
        self,
        ctx: Any,
        operands: Mapping[str, Any],
        flags: Mapping[str, Any],
        results: Sequence[Any],
        through_dispatcher: bool = True,
    ) -> None:
        """Keeps the row and rstd; outside of the dispatcher also the backend in force."""
        _, *others, rstd = results
        total, residual = (others[0], operands["residual"]) if others else (None, None)
        keep(ctx, operands["x"], residual, operands["weight"], operands["bias"], self._flags(flags), total, rstd)
        ctx.flags = flags
        if total is None or any(ctx.needs_input_grad[:2]) or (not through_dispatcher and _may_have_tangents()):
            ctx.mark_non_differentiable(rstd)
        else:
            ctx.mark_non_differentiable(total, rstd)  # the sum has no gradient, and no tangent
        if not through_dispatcher:
            ctx.backend = backend_of(ctx.operation, operands["weight"], operands["bias"])  # as requested now

    def gradients(self, ctx: Any, incoming: Sequence[Any], through_dispatcher: bool) -> tuple[Tensor | None, ...]:
        """A gradient or None for each operand."""
        needs, backend = ctx.needs_input_grad, None if through_dispatcher else ctx.backend
        if self._added:
            found = gradients(ctx, incoming[0], incoming[1], needs[:4], backend)
        else:
            dx, _, *of_weights = gradients(ctx, incoming[0], None, (needs[0], False, *needs[1:3]), backend)
            found = (dx, *of_weights)
        return found[: len(self.plan.operands_of_operator)] if through_dispatcher else found


def _may_have_tangents() -> bool:
    """Whether operands may have tangents, of which a context of autograd does not know."""
    return must_be_seen.level_entered() or bool(must_be_seen.transforms_active())
