"""An operator for each public function, for compiled graphs without gradients: torch's dispatcher sees a call once.

``torch.ops.fusednorm.NAME_inference`` takes what the function takes, but outputs, in the same order. Where a graph
records gradients, a call is the plain operators of its composition, which keep what their gradients need.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from fusednorm.calls import fast_path
from fusednorm.calls.quantization import Quantization
from fusednorm.torch_ops.gradients import composed_again
from fusednorm.torch_ops.registered import register

#: The functions that have such an operator.
FUNCTIONS: list[Callable[..., Any]] = []

#: Types in a schema, by annotation.
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Quantization": "str",
    "torch.dtype | None": "ScalarType?",
    "float": "Scalar",  # a compiler makes a constant of a float, and l2_norm's eps follows the hidden size
    "float | None": "Scalar?",
    "int | None": "int?",
    "bool": "bool",
    "str": "str",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, ...]": "Tensor[]",
}


def _arguments(given: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Arguments but outputs, as a schema has them: with default values, but where one without a default follows."""
    parameters = [p for name, p in given.items() if name != "out" and not name.endswith("_out")]
    last = max(place for place, p in enumerate(parameters) if p.default is p.empty)
    found = {}
    for place, p in enumerate(parameters):
        default = json.dumps(p.default) if isinstance(p.default, str) else p.default
        found[p.name] = f"{_TYPES[p.annotation]} {p.name}" + (f"={default}" if place > last else "")
    return found


_parsed = functools.lru_cache(maxsize=64)(Quantization.parse)


def _without_outputs(
    entry: fast_path.Entry, parameters: Mapping[str, inspect.Parameter], names: list[str]
) -> fast_path.Entry:
    """An entry for an operator with these of the function's arguments."""
    in_c = dict(zip(parameters, entry.names.split(), strict=False))
    defaults = {
        in_c[name]: parameters[name].default
        for name in names
        if parameters[name].default is not inspect.Parameter.empty
    }
    return entry._replace(names=" ".join(in_c[name] for name in names), constants={**entry.constants, **defaults})


def add_operator(function: Callable[..., Any]) -> None:
    """Makes the operator of a public function that returns new tensors."""
    FUNCTIONS.append(function)
    signature = inspect.signature(function)
    parameters = signature.parameters
    arguments_of = _arguments(parameters)
    names = list(arguments_of)
    tensors = [place for place, argument in enumerate(arguments_of.values()) if argument.startswith("Tensor")]
    alone = sum(parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY for name in names)

    def run(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > alone:
            named |= dict(zip(names[alone:], arguments[alone:], strict=False))
        return function(*arguments[:alone], **named)

    def run_quantized(*arguments: Any, **named: Any) -> Any:
        named |= dict(zip(names, arguments, strict=False))
        named["quantization"] = _parsed(named["quantization"])
        given = (named.get("scale"), named.get("zero_point"))  # an operand must not be a result
        return [t for t in function(**named) if all(t is not one for one in given)]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(inputs[place] for place in tensors))
        ctx.inputs = [None if isinstance(one, Tensor) else one for one in inputs]

    def gradients(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        def composed(*operands: Tensor | None) -> tuple[Tensor, ...]:
            arguments = list(ctx.inputs)
            for place, operand in zip(tensors, operands, strict=True):
                arguments[place] = operand
            found = run(*arguments)
            return found if isinstance(found, tuple) else (found,)

        needs = [ctx.needs_input_grad[place] for place in tensors]
        of_tensors = dict(zip(tensors, composed_again(composed, ctx.saved_tensors, incoming, needs), strict=True))
        return tuple(of_tensors.get(place) for place in range(len(names)))

    schema = f"({', '.join(arguments_of.values())}) -> {_TYPES[cast(Any, signature.return_annotation)]}"
    quantizes = "quantization" in names  # so that there are no gradients
    made, differentiated = (run_quantized, None) if quantizes else (run, (gradients, keep))
    entry = fast_path.ENTRIES.get(function.__name__)
    entry_of = None if entry is None else functools.partial(_without_outputs, entry, parameters, names)
    register(f"{function.__name__}_inference", schema, made, made, differentiated, direct=made, entry=entry_of)
