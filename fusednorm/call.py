"""An operation and its passes, as a backend is given them (``fusednorm.registry.Backend``)."""

from fusednorm.calls.call import Backward, Forward, Operation, RMSNorm

__all__ = ["Backward", "Forward", "Operation", "RMSNorm"]
