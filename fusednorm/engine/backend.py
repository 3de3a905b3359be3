"""The functions that a backend has."""

from __future__ import annotations

from typing import Any, Protocol

from fusednorm.calls.call import Operation


class Backend(Protocol):
    """The functions of a backend; a module with these names is one.

    Calls reach it checked: see :class:`fusednorm.call.Forward` and :class:`fusednorm.call.Backward`. An output never
    overlaps another operand unless it is exactly that operand.
    """

    #: Device types the backend runs on (``torch.device.type``), or ``("any",)``.
    #:
    #: A backend whose arithmetic flushes subnormals where ``torch.set_flush_denormal`` has its caller do so also has
    #: ``FLUSHES_WITH_CALLER = True``: the promises then hold for other callers.
    #:
    #: ``KNOWS``, a frozenset, has the names in :attr:`fusednorm.call.RMSNorm.features` that the backend knows: it is
    #: given no call with another one. Without it, a backend knows the plain norm and the fused addition.
    DEVICES: tuple[str, ...]

    def unavailable(self) -> list[str]:
        """Why this machine cannot use the backend, each reason with its cure; empty if it can."""

    def unsuitable(self, operation: Operation) -> list[str]:
        """Why the backend cannot take such a call; empty if it can."""

    def plan(self, operation: Operation) -> str:
        """How such a call would run, in words, for :func:`fusednorm.explain`."""

    def forward(self, call: Any) -> None:
        """Writes the outputs of a :class:`fusednorm.call.Forward`, and of the other calls that the backend knows.

        ``fusednorm.reference.norm.outputs`` has those of the norm.
        """

    def backward(self, call: Any) -> None:
        """Writes gradients: of a :class:`fusednorm.call.Backward` see ``fusednorm.reference.norm.gradients``."""
