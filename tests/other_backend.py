"""A backend of others, for tests of which operations it is given."""

from types import SimpleNamespace

import fusednorm
from fusednorm.engine import choose
from fusednorm.reference import norm as reference


def registered(monkeypatch, features):
    """Registers the backend "other" with these features; returns a list, of the operations that it will have taken."""
    monkeypatch.setattr(choose, "_registered", {})
    monkeypatch.setattr(choose, "_selected", {})
    taken = []

    def forward(call):
        taken.append(call.operation)
        reference.forward(call)

    other = SimpleNamespace(DEVICES=("cpu",), unavailable=list, unsuitable=lambda operation: [], plan=lambda _: "other")
    other.forward, other.backward, other.KNOWS = forward, reference.backward, frozenset(features)
    fusednorm.register_backend("other", other)
    return taken
