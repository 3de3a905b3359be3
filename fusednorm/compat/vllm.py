"""``vllm._custom_ops``, with the rounding of vLLM's CUDA kernels up to v0.19 and since PR 42379.

From v0.20 to that PR the kernels did not round before the multiplication by the weight. vLLM's CPU kernels round
differently: the plain one rounds only the result; the fused one takes the mean of squares from the unrounded sum and
the result from the rounded sum. No flags reproduce the latter (``round_norm=False`` comes close).
"""

from __future__ import annotations

from torch import Tensor

from fusednorm import ops


def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """RMS-normalises ``input`` into ``out``: :func:`fusednorm.rms_norm` with ``round_norm=True``.

    Args:
        out: [..., N], written.
        input: [..., N].
        weight: [N], or None.
        epsilon: added to the mean of squares.

    Raises:
        RuntimeError: an operand requires grad while gradients are recorded, which vLLM ignores.
        TypeError, ValueError, BackendError: see :func:`fusednorm.rms_norm`.
    """
    ops.rms_norm(input, weight, epsilon, round_norm=True, out=out)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """In place, :func:`fusednorm.fused_add_rms_norm_` with ``round_norm=True``.

    Args:
        input: [..., N], receives the normalised rows.
        residual: [..., N], receives the sum.
        weight: [N], or None.
        epsilon: added to the mean of squares.

    Raises:
        RuntimeError: an operand requires grad while gradients are recorded, which vLLM ignores.
        TypeError, ValueError, BackendError: see :func:`fusednorm.fused_add_rms_norm_`.
    """
    ops.fused_add_rms_norm_(input, residual, weight, epsilon, round_norm=True)
