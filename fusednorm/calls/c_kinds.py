"""The dtypes of tensors, as C knows them."""

from __future__ import annotations

import torch

from fusednorm.calls.c_enums import Kind

#: The numbers that C has for dtypes.
KINDS: dict[torch.dtype | None, int] = {
    None: Kind.NONE.value,
    torch.float32: Kind.F32.value,
    torch.float16: Kind.F16.value,
    torch.bfloat16: Kind.BF16.value,
    torch.float64: Kind.F64.value,
    torch.int32: Kind.I32.value,
    torch.int64: Kind.I64.value,
    torch.int8: Kind.BYTE.value,
}
