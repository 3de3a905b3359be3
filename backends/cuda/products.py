"""Products of int8 on NVIDIA's GPUs: torch's, where they are right."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusednorm.calls.call import Call
from fusednorm.reference.int8_products import scaled

#: ``torch._int_mm`` takes more rows than this, and whole eights of the other two sizes.
_FEWEST_ROWS, _EIGHTS = 17, 8


@functools.cache
def is_right(device: torch.device) -> bool:
    """Whether ``torch._int_mm`` returns the sums of products on a device: elsewhere it has been wrong."""
    numbers = 127 - 254 * (torch.arange(32 * 64) % 3 % 2).view(32, 64)
    a, b = numbers.to(device, torch.int8), (-numbers).flip(1).to(device, torch.int8)
    return torch.equal(torch._int_mm(a, b.t()).cpu(), -(numbers @ numbers.flip(1).t()).int())


def int8_linear(call: Call) -> None:
    """Writes the scaled sums."""
    if not call.out.numel():
        return
    sums = _sums(call.q.reshape(-1, call.hidden_size), call.weight).reshape(call.out.shape)
    found = scaled(
        sums,
        scale=call.scale,
        weight=call.weight,
        weight_scale=call.weight_scale,
        bias=call.bias,
        zero_point=call.zero_point,
        out_dtype=call.out.dtype,
    )
    call.out.copy_(found)


def _sums(q: Tensor, weight: Tensor) -> Tensor:
    """int32 sums of products, [rows, N]; what has other sizes than torch takes is filled up with zeros."""
    (rows, size), columns = q.shape, len(weight)
    more_rows, more, more_columns = max(_FEWEST_ROWS - rows, 0), -size % _EIGHTS, -columns % _EIGHTS
    q = pad(q, (0, more, 0, more_rows)) if more or more_rows else q.contiguous()
    weight = pad(weight, (0, more, 0, more_columns)) if more or more_columns else weight.contiguous()
    return torch._int_mm(_at_16_bytes(q), _at_16_bytes(weight).t())[:rows, :columns]


def _at_16_bytes(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that begins at a multiple of 16 bytes, as the library under torch's product needs."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
