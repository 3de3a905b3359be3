"""Runs a quantizer without torch's dispatcher, by the backend that normalises such rows, if it has a quantizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusednorm.calls.call import Forward, Quantize, Strides
from fusednorm.calls.memory import Rows, common_levels, packed, rows_of
from fusednorm.calls.quantization import Quantization

if TYPE_CHECKING:
    from fusednorm.engine.choose import Chosen

#: The strides of zero points where there are none.
NO_ZERO_POINTS = (0, 0, 0)


class Results:
    """Where the results of a quantizer go, for rows of this shape; new memory where the caller gave none.

    Args:
        shape: [..., N].
        device: of the rows.
        quantization: how.
        out: [..., N], or None.
        scale: for ``per="tensor"`` the scale; else [..., groups] to write to, or None.
        zero_point: the same for zero points.
    """

    def __init__(
        self,
        shape: torch.Size,
        device: torch.device,
        quantization: Quantization,
        out: Tensor | None,
        scale: Tensor | None,
        zero_point: Tensor | None,
    ) -> None:
        self.quantization = quantization
        self.hidden_size = shape[-1]
        self.rows = shape[:-1].numel()
        given = quantization.per == "tensor"
        self._written = [t for t in (out, *(() if given else (scale, zero_point))) if t is not None]
        groups = (*shape[:-1], self.hidden_size // quantization.group(self.hidden_size))
        self.out = torch.empty(shape, dtype=quantization.dtype, device=device) if out is None else out
        self.scale = laid_out(groups, torch.float32, device, quantization) if scale is None else scale
        self.zero_point = zero_point
        if zero_point is None and quantization.computes_zero_point:
            self.zero_point = laid_out(groups, torch.int32, device, quantization)
        #: Whether they have been written.
        self.done = False

    @property
    def levels(self) -> tuple[Rows | None, ...]:
        """How the rows of the numbers, the scales and the zero points lie; see :func:`fits`."""
        one_for_all = Rows(1, self.rows, 0, 0)
        given = self.quantization.per == "tensor"
        scales = [
            None if t is None else one_for_all if given else rows_of(t[..., :1]) for t in (self.scale, self.zero_point)
        ]
        return rows_of(self.out), *scales

    def fits(self, strides: tuple[Strides | None, ...]) -> bool:
        """Whether a kernel can write to them: their strides in the levels of a call, as :attr:`levels` are ordered."""
        return (
            strides[0] is not None
            and strides[1] is not None
            and (strides[2] is not None) == (self.zero_point is not None)
        )

    def call(
        self,
        y: Tensor | None,
        y_strides: Strides,
        norm: Forward | None,
        inner: int,
        strides: tuple[Strides | None, ...],
    ) -> Quantize:
        """The call that writes them."""
        out_strides, scale_strides, zero_point_strides = strides
        assert out_strides is not None
        assert scale_strides is not None
        for tensor in self._written:
            increment_version(tensor)
        self.done = True
        scale, zero_point = self.scale, self.zero_point
        if self.quantization.per == "tensor":
            scale, zero_point = packed(scale), None if zero_point is None else packed(zero_point)
        return Quantize(
            *(y, y_strides, norm, self.quantization, self.out, out_strides),
            *(scale, (*scale_strides, _group_stride(scale))),
            zero_point,
            NO_ZERO_POINTS if zero_point_strides is None else (*zero_point_strides, _group_stride(zero_point)),
            *(self.hidden_size, self.rows, inner),
        )


def _group_stride(of_groups: Tensor | None) -> int:
    """Elements from one group's scale or zero point to that of the row's next group; 0 for one of all rows."""
    return 0 if of_groups is None or not of_groups.dim() else of_groups.stride(-1)


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, quantization: Quantization) -> Tensor:
    """Memory for scales or zero points, [..., groups], as the layout asks for it."""
    *sizes, groups = shape
    if quantization.layout == "row":
        return torch.empty(shape, dtype=dtype, device=device)
    rows = math.prod(sizes)
    padded = -(-rows // 4) * 4 if quantization.layout == "column_padded" else rows
    return torch.zeros((groups, padded), dtype=dtype, device=device)[:, :rows].mT.reshape(shape)


def quantize(y: Tensor, results: Results, backend: Chosen | None) -> bool:
    """Quantizes the rows of y; returns whether the backend could do so."""
    if backend is None or results.rows == 0:
        return False
    y_rows = rows_of(y)
    if y_rows is None:
        y, y_rows = packed(y), Rows(1, results.rows, 0, results.hidden_size)
    inner, (*strides, y_strides) = common_levels((*results.levels, y_rows))
    if not results.fits(tuple(strides)):
        return False
    if y_strides is None:
        y, y_strides = packed(y), (inner * results.hidden_size, results.hidden_size)
    backend.forward(results.call(y, y_strides, None, inner, tuple(strides)))
    return True
