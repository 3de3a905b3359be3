"""An operation and its passes, as a backend is given them (``fusednorm.registry.Backend``)."""

from fusednorm.calls.call import AroundNorm, Backward, FirstNorm, Forward, Operation, Quantize, RMSNorm

__all__ = ["AroundNorm", "Backward", "FirstNorm", "Forward", "Operation", "Quantize", "RMSNorm"]
