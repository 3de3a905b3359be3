"""``torch.nn.functional.rms_norm``, with fusednorm's bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.operations import norm
from fusednorm.operations.modules import as_row, as_rows, machine_epsilon


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMS-normalises the last dimensions together, as ``torch.nn.functional.rms_norm``.

    The input is ``[..., *normalized_shape]``, the weight of ``normalized_shape``. As in torch on a CPU, ``eps=None``
    means 2^-23, or 2^-52 for a float64 input.

    Raises:
        RuntimeError: the input does not end in ``normalized_shape``, the weight has another shape, or lies elsewhere;
            where fusednorm's functions raise ValueError, as torch does.
        TypeError: an operand is no tensor, or of a dtype that does not fit, such as a complex one.
        BackendError: see :func:`fusednorm.rms_norm`.
    """
    if not isinstance(normalized_shape, Sequence):
        raise TypeError(f"normalized_shape must be a list or tuple of ints, got {normalized_shape!r}; pass [N]")
    shape = tuple(normalized_shape)
    if isinstance(input, Tensor) and input.is_complex():
        raise TypeError(
            f"input is {str(input.dtype)[6:]}, and fusednorm's specification has no complex numbers; call "
            "torch.nn.functional.rms_norm, which computes them"
        )
    try:
        rows, row = as_rows(input, shape, "input"), as_row(weight, shape)
        y = norm.rms_norm(rows, row, machine_epsilon(input) if eps is None else eps)
    except ValueError as error:
        raise RuntimeError(str(error)) from None  # as torch
    return y if len(shape) == 1 else y.view(input.shape)
