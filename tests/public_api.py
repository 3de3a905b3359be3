"""Writes what users may rely on, a line for each: names, signatures, operations, commands, variables, entry points.

    python -P tests/public_api.py

writes tests/public_api.txt, which test_public_api.py compares; docs/stability.md says what a change of it means.
"""

import argparse
import inspect
import re
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import torch

import fusednorm
from fusednorm.engine.choose import ENTRY_POINTS
from fusednorm.environment import VARIABLES
from fusednorm.operations.front_door import PUBLIC
from fusednorm.tools.cli import command_line
from fusednorm.torch_ops.registered import exported

RECORD = Path(__file__).with_suffix(".txt")

#: Modules whose names without an underscore in front are public; of the others, only what `fusednorm` itself exports.
MODULES = (
    "fusednorm",
    "fusednorm.registry",
    "fusednorm.call",
    "fusednorm.layout",
    "fusednorm.distributed",
    "fusednorm.onnx",
    "fusednorm.transformers",
    "fusednorm.compat.fla",
    "fusednorm.compat.flag_gems",
    "fusednorm.compat.flashinfer",
    "fusednorm.compat.functional",
    "fusednorm.compat.liger",
    "fusednorm.compat.mamba_ssm",
    "fusednorm.compat.quack",
    "fusednorm.compat.sgl_kernel",
    "fusednorm.compat.transformers",
    "fusednorm.compat.trl",
    "fusednorm.compat.verl",
    "fusednorm.compat.vllm",
)

#: Names that the front end shares with backends and callers, in modules whose other names are its own.
SHARED = {
    "fusednorm.registry": [
        "Backend",
        "BackendError",
        "BackendInfo",
        "Explanation",
        "register_backend",
        "use_backend",
    ],
    "fusednorm.call": ["Operation", "RMSNorm", "Forward", "Backward"],
    "fusednorm.layout": ["in_one_level"],
}


def names(module):
    if module.__name__ in SHARED:
        return SHARED[module.__name__]
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_")


def signature(function):
    """As inspect writes it, but with annotations as the source has them, not as strings."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def of_class(name, value):
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    for attribute in sorted(getattr(value, "__annotations__", ())):
        annotation = value.__annotations__[attribute]
        yield f"{name}.{attribute}: {getattr(annotation, '__forward_arg__', annotation)}"
    for attribute, member in sorted(vars(value).items()):
        member = getattr(member, "__func__", member)  # of static and class methods
        if attribute == "__init__" and not getattr(value, "_is_protocol", False):
            yield f"{name}{signature(member)}"
        elif attribute[0] != "_" and inspect.isfunction(member):
            yield f"{name}.{attribute}{signature(member)}"
        elif attribute[0] != "_" and isinstance(member, property):
            yield f"{name}.{attribute}: property"


def of_module(module):
    for name in names(module):
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(value) and value.__name__ != name:
            yield f"{full} = {value.__name__}"
        elif inspect.isclass(value):
            yield from of_class(full, value)
        elif inspect.isfunction(value):
            yield f"{full}{signature(value)}"
        elif inspect.ismodule(value) and callable(value):
            yield f"{full}{signature(value.__call__)}"
        elif inspect.ismodule(value):
            yield from of_module(value)
        else:
            yield f"{full}: {type(value).__name__}"
    if module is fusednorm:
        yield f"fusednorm.SPEC_VERSION == {fusednorm.SPEC_VERSION}"


def of_commands(parser, prefix="python -m fusednorm"):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{prefix} {name}"
                yield from of_commands(command, f"{prefix} {name}")
        elif not isinstance(action, argparse._HelpAction):
            name = "|".join(action.option_strings) or action.metavar
            yield f"{prefix} {name}{'' if action.nargs == 0 else ' ...'}"


def operators():
    """The names of the library's operators; tests declare others."""
    others = {of.declaration.name for function, of in PUBLIC.items() if not function.__module__.startswith("fusednorm")}
    return [name for name in exported() if name.removesuffix("_backward") not in others]


def lines():
    """The whole record."""
    for name in MODULES:
        yield from of_module(import_module(name))
    for name in sorted(operators()):
        yield f"torch.ops.{getattr(torch.ops.fusednorm, name).default._schema}"
    yield from of_commands(command_line())
    yield from VARIABLES
    for point in sorted(distribution("fusednorm").entry_points):
        yield f"entry point {point.group}: {point.name} = {point.value}"
    yield f"entry-point group {ENTRY_POINTS}"


if __name__ == "__main__":
    RECORD.write_text("\n".join(lines()) + "\n", encoding="utf-8")
