"""FlagGems' ``rms_norm`` and ``fused_add_rms_norm``, with the rounding of release 5.3.2 and newer.

The two functions round differently: ``rms_norm`` rounds before the multiplication by the weight (release 5.0.2 does
not), ``fused_add_rms_norm`` rounds only the stored results. For N over 4096 FlagGems 5.3.4's fused kernel takes the
mean of squares from the unrounded sum and the result from the rounded sum, which no flags reproduce; here all N round
alike. Rows are ``[..., *normalized_shape]``: these dimensions are normalised together, and the weight has this shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.operations import norm
from fusednorm.operations.modules import as_row, as_rows


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float = 1e-5) -> Tensor:
    """RMS-normalises rows: :func:`fusednorm.rms_norm` with ``round_norm=True``.

    Raises:
        ValueError: x does not end in ``normalized_shape``, or the weight has another shape.
    """
    shape = tuple(normalized_shape)
    y = norm.rms_norm(as_rows(x, shape), as_row(weight, shape), eps, round_norm=True)
    return y if len(shape) == 1 else y.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Adds and normalises in place: :func:`fusednorm.fused_add_rms_norm_` with ``round_sum=False``.

    It returns both: x receives the normalised rows, and the residual, of x's shape, the sum. Where one is not
    contiguous, FlagGems writes to a copy; this function writes to the tensor itself, or raises.

    Raises:
        ValueError: x or the residual does not end in ``normalized_shape``, the weight has another shape, or several
            dimensions are normalised together and x or the residual is not contiguous.
    """
    shape = tuple(normalized_shape)
    rows, total = as_rows(x, shape), as_rows(residual, shape, "residual")
    for name, tensor in (("x", x), ("residual", residual)):
        if len(shape) > 1 and not tensor.is_contiguous():
            raise ValueError(
                f"{name} is written in place and normalised over {len(shape)} dimensions together, so it must be "
                f"contiguous; got shape {list(tensor.shape)} with strides {list(tensor.stride())}; pass "
                f"{name}.contiguous() and keep what is returned"
            )
    norm.fused_add_rms_norm_(rows, total, as_row(weight, shape), eps, round_sum=False)
    return x, residual
