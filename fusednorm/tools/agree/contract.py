"""The steps that fusednorm computes in a model, and one digest of them, which two programs can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import dtype

from fusednorm.calls.call import accumulator
from fusednorm.calls.quantization import Quantization
from fusednorm.operations.listed import every
from fusednorm.version import SPEC_VERSION

#: Names that torch's wrappers put between those of the modules.
_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


@dataclass(frozen=True)
class Step:
    """An operation that a module computes.

    Attributes:
        name: the module's, without the names of torch's wrappers.
        operation: the function of fusednorm; of attention and of layers that ``patch`` replaced, whose norms are
            modules of their own, a plain operation of the specification: ``rotate``, ``scale`` or ``add``.
        flags: its arguments that decide the bits: ``eps``, and those that are not the default and change a bit. A
            rotation has ``to_halves`` where pairs that lie side by side come out as halves, attention has ``sinks``
            where heads have one more score each, and what only a call knows is the text of the model's source.
        dtype: of the rows.
    """

    name: str
    operation: str
    flags: Mapping[str, Any]
    dtype: dtype

    def __str__(self) -> str:
        flags = ", ".join(f"{name}={value!r}" for name, value in self.flags.items())
        return f"{self.name}: {self.operation}({flags}), {str(self.dtype)[6:]}"

    def _identity(self) -> list[Any] | None:
        """A list, equal for calls with the same bits; None for an addition that rounds the sum, as all libraries do."""
        if self.operation == "add":
            return None
        fused = self.operation == "fused_add_rms_norm" and "round_sum" in self.flags
        operation = "rms_norm" if self.operation == "fused_add_rms_norm" and not fused else self.operation
        flags = {name: _in_accumulator(value, self.dtype) for name, value in sorted(self.flags.items())}
        return [self.name, operation, flags, str(self.dtype)]


@dataclass(frozen=True, repr=False)
class Contract:
    """The steps that fusednorm computes in a model. ``print`` shows a line for each, and the digest.

    Attributes:
        steps: in the order of the model's modules.
        spec: the number of the specification.
    """

    steps: tuple[Step, ...]
    spec: int

    @property
    def digest(self) -> str:
        """SHA-256 of the number of the specification and of the steps; of additions only if the sum is not rounded."""
        steps = [identity for step in self.steps if (identity := step._identity()) is not None]
        steps.sort(key=json.dumps)  # an engine's model has the same modules in another sequence
        whole = {"specification": self.spec, "steps": steps}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        counted = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        return "\n".join(
            [*map(str, self.steps), f"fusednorm, specification {self.spec}, {counted}: sha256 {self.digest}"]
        )

    __repr__ = __str__  # an interpreter shows a call's result by its repr


def contract(model: torch.nn.Module, dtype: dtype | None = None) -> Contract:
    """Lists the steps that fusednorm computes in a model: those of its own modules, and all that ``patch`` replaced.

    Two models with the same digest compute the same bits in these steps, from the same rows and weights. So the digest
    does not change where the bits do not: with a flag that changes no bit for this dtype, or with an addition that is
    fused with its norm (with ``round_sum=False``, which changes bits, it does). Functions of fusednorm that a model
    calls itself are not listed.

    Args:
        model: any module. Names of torch's wrappers (compiled, sharded, checkpointed) are left out of the names.
        dtype: of the model while it runs, for instance where FSDP casts float32 weights; None: that of each weight, and
            without a weight that of the model's first parameter.

    Returns:
        The contract; its ``digest`` is the line to compare.

    Raises:
        TypeError: the model is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return Contract(tuple(_steps(model, dtype)), SPEC_VERSION)


def _steps(model: torch.nn.Module, given: dtype | None) -> Iterator[Step]:
    of_model = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    for name, module in with_steps(model):
        weight = getattr(module, "weight", None)
        of_rows = given or (of_model if weight is None else weight.dtype)
        length = None if weight is None else weight.numel()
        own = module._fusednorm_steps(of_rows) if hasattr(type(module), "_fusednorm_steps") else []
        for operation, flags in (*own, *_by_name(module)):
            yield Step(name, operation, _that_matter(operation, flags, of_rows, length), of_rows)


def with_steps(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that have steps, by the name of the steps.

    A module of an engine is a step of the module around it, and of several where they share it, as layers a rotation.
    It may have names of its own, which it is asked for: a product is a step of each layer that the engine joins.
    """
    seen: set[torch.nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        within = getattr(type(module), "_fusednorm_within", False)
        has_steps = hasattr(type(module), "_fusednorm_steps") or _by_name(module)
        if has_steps and (within or module not in seen):
            seen.add(module)
            place = ".".join(part for part in path.split(".")[: -1 if within else None] if part not in _WRAPPERS)
            named = getattr(type(module), "_fusednorm_names", None)
            for name in [place] if named is None else named(module, model, place):
                yield name, module


def _by_name(module: Any) -> list[tuple[str, dict[str, Any]]]:
    """The steps of a module of transformers whose configuration names fusednorm's attention, and which is not ours."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "fusednorm":
        return []
    from fusednorm.transformers.attention_function import attention_steps

    return attention_steps(module)


def _that_matter(operation: str, flags: dict[str, Any], of_rows: dtype, length: int | None) -> dict[str, Any]:
    """The eps of a norm, and the flags that change a bit; see section 6 of the specification.

    Args:
        operation: that of the step.
        flags: its arguments.
        of_rows: the dtype of the rows, of the residual, and of the result.
        length: of the weight; None without a weight.
    """
    without_effect = set()
    if accumulator(of_rows) == of_rows:  # nothing is rounded to another dtype
        without_effect |= {"between", "round_norm", "round_products", "round_sum"}
    if length is None:
        # A gate may take rows that are not rounded otherwise.
        without_effect |= {"weight_offset"} | ({"round_norm"} if operation != "rms_norm_gated" else set())
    if flags.get("group_size") == length:
        without_effect.add("group_size")
    if "eps" in flags:
        eps = torch.finfo(accumulator(of_rows)).eps if flags["eps"] is None else flags["eps"]
        flags = {"eps": eps, **{name: value for name, value in sorted(flags.items()) if name != "eps"}}
    listed = every().get(operation)
    known = {"to_halves": False, "sinks": False}  # which no function has as flags
    known |= {} if listed is None else listed.defaults
    without_effect |= {name for name in flags.keys() & known.keys() - {"eps"} if flags[name] == known[name]}
    return {name: value for name, value in flags.items() if name not in without_effect}


def _in_accumulator(value: Any, of_rows: dtype) -> Any:
    """A flag as the computation has it: floats in the accumulator type, where two texts may be one number."""
    if isinstance(value, float):
        return float(torch.tensor(value, dtype=accumulator(of_rows))).hex()
    return str(value) if isinstance(value, dtype | Quantization) else value
