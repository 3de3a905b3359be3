"""The modules by the name of 0.2, which saved models have; they are ``fusednorm.RMSNorm`` and its like."""

from fusednorm.operations.modules import AddRMSNorm, RMSNorm, RMSNormGated

__all__ = ["AddRMSNorm", "RMSNorm", "RMSNormGated"]
