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
from torch import Tensor

from fusednorm.calls.checks import refuse_type
from fusednorm.operations.rotate import qk_norm_rope_, rotate


def unrounded(x: object) -> torch.dtype | None:
    """The argument ``between`` with which nothing of x is rounded between two steps: float32 for 16 bits."""
    return torch.float32 if getattr(x, "dtype", None) in (torch.float16, torch.bfloat16) else None


def cos_and_sin(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of a cache whose rows hold the cosines of a position, and then its sines."""
    if not isinstance(cache, Tensor):
        refuse_type("cos_sin_cache", cache)
    cos, sin = cache.chunk(2, -1)
    return cos, sin


def heads(name: str, x: Tensor, head_size: int, positions: Tensor) -> Tensor:
    """The heads of rows of [..., H * D] or [..., H, D], which have a position each."""
    if not isinstance(x, Tensor):
        refuse_type(name, x)
    flat = x.dim() == positions.dim() + 1
    whole = x.shape[-1] if x.dim() else 0
    if head_size < 1 or (whole % head_size if flat else whole != head_size):
        raise ValueError(f"{name} must have rows of heads of {head_size}, got shape {list(x.shape)}")
    return torch.unflatten(x, -1, (-1, head_size)) if flat else x


def rotate_in_place(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates the heads of both by their positions' rows of the cache, as vLLM's, FlashInfer's and SGLang's kernels do.

    All numbers are float32, and each is rounded once.
    """
    if not isinstance(positions, Tensor):
        refuse_type("positions", positions)
    cos, sin = cos_and_sin(cos_sin_cache)
    sin = -sin if inverse else sin
    q = heads("query", query, head_size, positions)[..., rope_dim_offset:]
    if key is None:
        rotate(q, cos, sin, positions=positions, interleaved=not is_neox, out=q)
    else:
        k = heads("key", key, head_size, positions)[..., rope_dim_offset:]
        qk_norm_rope_(q, k, cos=cos, sin=sin, norm=False, positions=positions, interleaved=not is_neox)
