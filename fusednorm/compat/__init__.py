"""The functions of other libraries (peers), with their signatures and rounding, so that a port changes one import.

>>> from fusednorm.compat import vllm as ops  # in place of: from vllm import _custom_ops as ops

Each peer has a module of its name; ``functional`` is ``torch.nn.functional``. No peer needs to be installed. Operands
that a peer refuses (other dtypes, strides, no weight) work as in ``fusednorm``, and errors are those of the function of
fusednorm that a docstring names. ``docs/compat.md`` has tables of the imports, the roundings, and the differences.

If a docstring says nothing else, rows are [..., N], and the weight is [N]; eps is added to the mean of squares; the
result is a new tensor of the rows' shape and dtype, with a gradient; and where a call writes in place or to an output,
it raises RuntimeError if an operand requires grad while gradients are recorded, which peers ignore.
"""

import torch


def unrounded(x: object) -> torch.dtype | None:
    """The argument ``between`` with which nothing of x is rounded between two steps: float32 for 16 bits."""
    return torch.float32 if getattr(x, "dtype", None) in (torch.float16, torch.bfloat16) else None
