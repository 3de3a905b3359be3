"""Calls of all functions where the flags of norms, and of each declared operation, have one more at their end.

It has a default, and no formula takes it; test_knows.py runs this.
"""

from importlib.machinery import SourceFileLoader

import torch

LAST = "    center: bool = False\n"
REFUSED = "    refused: Sequence[tuple[Mapping[str, Any], type[Exception], str]] = ()\n"
YOUNGER = """
    def __post_init__(self):
        formula, flags = self.formula, {**self.flags, "younger": False}
        object.__setattr__(self, "formula", lambda younger, **given: formula(**given))
        object.__setattr__(self, "flags", flags)
"""
CHANGED = {"calls.call": (LAST, f"{LAST}    younger: bool = False\n")}
CHANGED["declare.declaration"] = (REFUSED, REFUSED + YOUNGER)
of_source = SourceFileLoader.get_code


def get_code(loader, name):
    if name.removeprefix("fusednorm.") not in CHANGED:
        return of_source(loader, name)
    old, new = CHANGED[name.removeprefix("fusednorm.")]
    changed = loader.get_source(name).replace(old, new, 1)
    assert new in changed
    return compile(changed, loader.path, "exec")


SourceFileLoader.get_code = get_code

import every_operation as every  # noqa: E402

import fusednorm  # noqa: E402
from fusednorm.calls.call import Flags, operation_of  # noqa: E402
from fusednorm.operations.modulate import _MODULATE  # noqa: E402
from fusednorm.torch_ops.operator import DECLARED  # noqa: E402

assert Flags._fields[-1] == "younger"
assert all([*operator.declaration.flags][-1] == "younger" for operator in DECLARED.values())


def results(name, function, operands):
    """Those of plain calls, of calls beyond the fast path and through the dispatcher, and of recorded ones."""
    found = [t.clone() for t in every.called(function, every.clones(operands))]
    with every.Seen():
        found += every.called(function, every.clones(operands))
    if name in every.FUNCTIONS:
        given = every.clones(operands)
        spread = [key for key in ("x", "z", "gate", "logits") if key in given]
        found += every.called(function, given | {key: given[key].repeat_interleave(2, -1)[..., ::2] for key in spread})
    if name in every.DIFFERENTIATED:
        given = every.clones(every.without_outputs(operands))
        leaves = [given[key].requires_grad_() for key in every.DIFFERENTIATED[name]]
        found += every.gradients(every.called(function, given), leaves)
    return found


calls = {name: (every.function_of(name), operands) for name, operands in every.FUNCTIONS.items()} | every.MORE
for name, (function, operands) in calls.items():
    if name.endswith("_"):  # their rows must be contiguous
        continue
    with fusednorm.use_backend("cpu"):
        by_cpu = results(name, function, operands)
    with fusednorm.use_backend("reference"):
        assert every.same(by_cpu, results(name, function, operands)), name
x = torch.ones(2, 8)
assert operation_of(x, None, None, Flags()).features == ()
assert operation_of(x, None, None, Flags(younger=True)).features == ("younger",)
flags = {"round_steps": False, "out_dtype": None, "younger": True}
assert _MODULATE.plan.step_of(flags).also == ("modulate.younger",)
