"""Operations and calls, as a backend is given them (``fusednorm.registry.Backend``)."""

from fusednorm.calls.call import (
    AroundNorm,
    Backward,
    BackwardCall,
    DeclaredCall,
    FirstNorm,
    Forward,
    ForwardCall,
    Gate,
    GateBackward,
    NormGated,
    NormGatedBackward,
    Operation,
    Quantize,
    RMSNorm,
    Rotate,
    Step,
)

__all__ = [
    "AroundNorm",
    "Backward",
    "BackwardCall",
    "DeclaredCall",
    "FirstNorm",
    "Forward",
    "ForwardCall",
    "Gate",
    "GateBackward",
    "NormGated",
    "NormGatedBackward",
    "Operation",
    "Quantize",
    "RMSNorm",
    "Rotate",
    "Step",
]
