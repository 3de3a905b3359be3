"""A program of a user, which mypy checks against the installed package; nobody runs it."""

from typing import assert_type

import torch
from torch import Tensor

import fusednorm
from fusednorm import Quantization
from fusednorm.call import Backward, Forward, Operation
from fusednorm.compat import vllm
from fusednorm.distributed import SequenceParallel
from fusednorm.registry import Backend, BackendInfo, Explanation
from fusednorm.tools.agree.contract import Contract
from fusednorm.transformers import Report, patch


class Block(torch.nn.Module):
    """A layer that carries a residual."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = fusednorm.AddRMSNorm(hidden_size, eps=1e-6, dtype=torch.bfloat16)
        self.last = fusednorm.RMSNorm(hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y, residual = self.norm.forward(x, residual)
        assert_type(residual, Tensor)
        return assert_type(self.last.forward(y), Tensor)


class Mine:
    """A backend."""

    DEVICES: tuple[str, ...] = ("cpu",)

    def unavailable(self) -> list[str]:
        return []

    def unsuitable(self, operation: Operation) -> list[str]:
        return [f"{operation.name} is too wide"] if operation.hidden_size > 8 else []

    def plan(self, operation: Operation) -> str:
        return f"like {operation.x}"

    def forward(self, call: Forward) -> None:
        assert call.out is not None  # it is None in calls of features that the backend does not have
        call.out.copy_(call.x)

    def backward(self, call: Backward) -> None:
        if call.dx is not None:
            call.dx.copy_(call.dy)


mine: Backend = Mine()
fusednorm.register_backend("mine", mine)
x, weight = torch.randn(2, 8), torch.ones(8)
assert_type(fusednorm.fused_add_rms_norm(x, x, weight, 1e-6, round_sum=False), tuple[Tensor, Tensor])
assert_type(fusednorm.fused_add_rms_norm_(x, x.clone(), weight), tuple[Tensor, Tensor])
assert_type(fusednorm.rms_norm(x, out=torch.empty_like(x)), Tensor)
assert_type(fusednorm.rms_norm_(x, weight), Tensor)
assert_type(fusednorm.rms_norm(x, out_dtype=torch.bfloat16), Tensor)
assert_type(fusednorm.fused_add_rms_norm(x, x, residual_dtype=torch.float16), tuple[Tensor, Tensor])
assert_type(fusednorm.rms_norm_add_rms_norm(x, x, weight, weight), tuple[Tensor, Tensor])
assert_type(fusednorm.rms_norm_add(x, x, weight), Tensor)
assert_type(fusednorm.rms_norm_gated(x, x, weight, activation="sigmoid"), Tensor)
assert_type(fusednorm.silu_and_mul(x, x), Tensor)
assert_type(fusednorm.quantize(x, quantization=Quantization(torch.int8, per=4)), tuple[Tensor, ...])
heads, tables = torch.randn(2, 1, 8), torch.ones(2, 4)
assert_type(fusednorm.rotate(heads, tables, tables), Tensor)
assert_type(fusednorm.qk_norm_rope(heads, heads, weight, weight, tables, tables), tuple[Tensor, Tensor])
assert_type(fusednorm.contract(Block(8)), Contract)
with fusednorm.accelerate_torch():
    torch.nn.functional.rms_norm(x, (8,))
assert_type(fusednorm.explain(x, x), Explanation)
assert_type(fusednorm.explain(x, x).operation, Operation)
assert_type(fusednorm.backends(), list[BackendInfo])
assert_type(fusednorm.SPEC_VERSION, int)
assert_type(patch(Block(8)), Report)
vllm.rms_norm(torch.empty_like(x), x, weight, 1e-6)
SequenceParallel(sequence_dim=1)
with fusednorm.use_backend("reference"):
    fusednorm.prewarm(8, torch.float32, "cpu")
fusednorm.rms_norm(x, eps="1e-6")  # type: ignore[arg-type]
fusednorm.fused_add_rms_norm(x)  # type: ignore[call-arg]
