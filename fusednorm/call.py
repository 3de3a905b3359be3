"""Operations and calls, as a backend is given them (``fusednorm.registry.Backend``)."""

from fusednorm.calls.call import (
    AroundNorm,
    Backward,
    BackwardCall,
    Call,
    FirstNorm,
    Forward,
    ForwardCall,
    KindOfCall,
    Operation,
    Quantize,
    RMSNorm,
    Step,
)

#: The names of kinds of calls in version 0.3, which are one now.
DeclaredCall = Gate = GateBackward = NormGated = NormGatedBackward = Rotate = Call

__all__ = [
    "AroundNorm",
    "Backward",
    "BackwardCall",
    "Call",
    "DeclaredCall",
    "FirstNorm",
    "Forward",
    "ForwardCall",
    "Gate",
    "GateBackward",
    "KindOfCall",
    "NormGated",
    "NormGatedBackward",
    "Operation",
    "Quantize",
    "RMSNorm",
    "Rotate",
    "Step",
]
