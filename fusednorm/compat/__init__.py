"""The functions of other libraries (peers), with their signatures and rounding, so that a port changes one import.

>>> from fusednorm.compat import vllm as ops  # in place of: from vllm import _custom_ops as ops

Each peer has a module of its name; ``functional`` is ``torch.nn.functional``. No peer needs to be installed. Operands
that a peer refuses (other dtypes, strides, no weight) work as in ``fusednorm``, and errors are those of the function of
fusednorm that a docstring names. ``docs/compat.md`` has tables of the imports, the roundings, and the differences.
"""
