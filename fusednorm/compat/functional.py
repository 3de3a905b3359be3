"""``torch.nn.functional.rms_norm`` and ``layer_norm``, with fusednorm's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fusednorm.operations.layer_norm import layer_norm as _layer_norm
from fusednorm.operations.modules import as_row, as_rows, machine_epsilon
from fusednorm.operations.norm import rms_norm as _rms_norm


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

    def of_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return _rms_norm(rows, as_row(weight, shape), machine_epsilon(input) if eps is None else eps)

    return _normalised("rms_norm", input, normalized_shape, of_rows)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer-normalises the last dimensions together, as ``torch.nn.functional.layer_norm``.

    The input is ``[..., *normalized_shape]``, the weight and the bias of ``normalized_shape``.

    Raises:
        RuntimeError: see :func:`rms_norm`, as the other errors.
    """

    def of_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return _layer_norm(rows, as_row(weight, shape), as_row(bias, shape, "bias"), eps)

    return _normalised("layer_norm", input, normalized_shape, of_rows)


def _normalised(
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    of_rows: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> Tensor:
    """The norm of that name, by a function of the input as rows and of its shape."""
    if not isinstance(normalized_shape, Sequence):
        raise TypeError(f"normalized_shape must be a list or tuple of ints, got {normalized_shape!r}; pass [N]")
    shape = tuple(normalized_shape)
    if isinstance(input, Tensor) and input.is_complex():
        raise TypeError(
            f"input is {str(input.dtype)[6:]}, and fusednorm's specification has no complex numbers; call "
            f"torch.nn.functional.{name}, which computes them"
        )
    try:
        y = of_rows(as_rows(input, shape, "input"), shape)
    except ValueError as error:
        raise RuntimeError(str(error)) from None  # as torch
    return y if len(shape) == 1 else y.view(input.shape)
