"""Peers' functions, with their signatures and their rounding, so that a port is one import.

>>> from fusednorm.compat import vllm as ops  # instead of: from vllm import _custom_ops as ops

One module per peer, named after it; ``functional`` is ``torch.nn.functional``. No peer has to be installed. What a peer
does not take (other dtypes, strides, no weight) works as it does in ``fusednorm``, and errors are fusednorm's.
``docs/compat.md`` has the table: what to import instead of what, how each peer rounds, and what differs.
"""
