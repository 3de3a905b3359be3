"""Calls of all functions where the flags of norms have one field more, which has a default; test_knows.py runs this."""

from importlib.machinery import SourceFileLoader

import torch

LAST = "    center: bool = False\n"
of_source = SourceFileLoader.get_code


def get_code(loader, name):
    if name != "fusednorm.calls.call":
        return of_source(loader, name)
    changed = loader.get_source(name).replace(LAST, f"{LAST}    younger: bool = False\n", 1)
    return compile(changed, loader.path, "exec")


SourceFileLoader.get_code = get_code

import every_operation as every  # noqa: E402

import fusednorm  # noqa: E402
from fusednorm.calls.call import Flags, operation_of  # noqa: E402

assert Flags._fields[-1] == "younger"


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
