"""A style of torch's tensor parallelism for AddRMSNorm (docs/distributed.md)."""

from fusednorm.torch_ops.sharding import SequenceParallel

__all__ = ["SequenceParallel"]
