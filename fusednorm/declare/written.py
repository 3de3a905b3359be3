"""Functions that are written for a declaration, as dataclasses write ``__init__``.

They put the arguments of a public function where all others look for them: by name, operands, flags and outputs apart.
Written out, that takes a quarter of the time of a loop over the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: The file that they are in, as frames have it.
FILE = "<fusednorm>"


def sorted_arguments(
    call: Callable[..., Any],
    function: str,
    operands: Sequence[str],
    defaults: Mapping[str, Any],
    outputs: Mapping[str, str | None],
) -> Callable[..., Any]:
    """(arguments by name) -> ``call(function, operands, flags, outputs)``, by name; of outputs those that there are.

    Args:
        call: what takes them.
        function: the name of the public function.
        operands: the names of operands, all of which are passed.
        defaults: those of flags.
        outputs: the names of outputs; with an operand, that is the output.
    """
    given = [name for name, operand in outputs.items() if operand is None]
    parameters = [*operands, *[f"{flag}=_defaults[{flag!r}]" for flag in defaults], *[f"{name}=None" for name in given]]
    found = "".join(
        f"    if {operand or name} is not None:\n        outputs[{name!r}] = {operand or name}\n"
        for name, operand in outputs.items()
    )
    text = (
        f"def sort(*, {', '.join(parameters)}):\n    outputs = {{}}\n{found}"
        f"    return _call({function!r}, {_named(operands)}, {_named(defaults)}, outputs)\n"
    )
    return _function(text, "sort", _call=call, _defaults=defaults)


def sorted_positions(
    call: Callable[..., Any],
    taken: Sequence[str],
    operands: Sequence[str],
    defaults: Mapping[str, Any],
    outputs: Sequence[str],
) -> Callable[..., Any]:
    """(arguments by position or name) -> ``call(operands, flags)``: a list, and by name; None where there are outputs.

    Args:
        call: what takes them.
        taken: the names of the arguments, in order; those that are no operand, flag or output are left out.
        operands: the names of operands. One that is not taken is None.
        defaults: those of flags.
        outputs: the names of outputs.
    """
    parameters = [f"{name}=_defaults[{name!r}]" if name in defaults else f"{name}=None" for name in taken]
    nothing = " is ".join([*[name for name in outputs if name in taken], "None"])
    values = [name if name in taken else "None" for name in operands]
    flags = [f"{flag!r}: {flag if flag in taken else f'_defaults[{flag!r}]'}" for flag in defaults]
    text = (
        f"def sort({', '.join(parameters)}):\n    if {nothing}:\n"
        f"        return _call([{', '.join(values)}], {{{', '.join(flags)}}})\n"
    )
    return _function(text, "sort", _call=call, _defaults=defaults)


def made_of(record: type[tuple[Any, ...]], names: Sequence[str], others: Mapping[str, Any]) -> Callable[..., Any]:
    """(values of these names) -> a record whose fields are these, or else the others."""
    fields = [f"given[{name!r}]" if name in names else f"_others[{name!r}]" for name in record._fields]  # type: ignore[attr-defined]
    return _function(
        f"def make(given):\n    return _record({', '.join(fields)})\n", "make", _record=record, _others=others
    )


def _named(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def _function(text: str, name: str, **names: Any) -> Callable[..., Any]:
    exec(compile(text, FILE, "exec"), names)
    return names[name]  # type: ignore[no-any-return]
