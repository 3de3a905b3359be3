"""What gradients cost beside torch.compile's, and which part of that no kernel can save.

    python benchmarks/gradients.py [--calls gated rope norm] [--rows 1 32 512] [--dtypes bfloat16] [--hidden 4096]

Times are the least processor times of interleaved turns on one thread, in microseconds, of `torch.autograd.grad` of all
outputs with respect to all inputs. "compiled" is the formula in torch under torch.compile, and the number after it how
many times as long it takes. "empty" is a function of autograd that has the same inputs and outputs, allocates the same
gradients and computes nothing: with a kernel that takes no time at all the number would be the last one.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from compositions import norm, times, two_norms
from torch import Tensor
from torch.nn.functional import silu

import fusednorm

#: Heads of q and of k, and their length.
HEADS, SIZE = (16, 8), 128


class Empty(torch.autograd.Function):
    """Operands -> new tensors of the shapes of the outputs; its gradients are not computed."""

    @staticmethod
    def forward(ctx, like, *operands):
        """``like``: the outputs."""
        ctx.save_for_backward(*operands)
        return tuple(torch.empty_like(t) for t in like)

    @staticmethod
    def backward(ctx, *_):
        """As large as the right ones."""
        return None, *(torch.empty_like(t) for t in ctx.saved_tensors)


class Call(NamedTuple):
    """A function of fusednorm's, its formula in torch, and the shapes of the operands that both take."""

    ours: Callable[..., object]
    formula: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]


def wide_norm(h: Tensor, weight: Tensor) -> Tensor:
    """Rows of float, normalised and weighted."""
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.float()


def gate_first(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """The formula of rms_norm_gated with norm_before_gate=False."""
    return wide_norm(x.float() * silu(z.float()), w).to(x.dtype)


def fused(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of fused_add_rms_norm."""
    return norm(x + r, w), x + r


def rope(rows: int, dtype: torch.dtype) -> Call:
    """qk_norm_rope with Hugging Face's roundings, and its formula."""
    angles = torch.arange(rows)[:, None] * 10000.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    all_cos, all_sin = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))
    flags = {"round_norm": True, "round_products": True}

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        y = weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        a, b = y.chunk(2, -1)
        return y * all_cos + torch.cat((-b, a), -1) * all_sin

    return Call(
        lambda q, k, w, v: fusednorm.qk_norm_rope(q, k, w, v, cos, sin, **flags),
        lambda q, k, w, v: (turned(q, w), turned(k, v)),
        (*((rows, count, SIZE) for count in HEADS), (SIZE,), (SIZE,)),
    )


def calls(rows: int, hidden: int, dtype: torch.dtype) -> dict[str, Call]:
    """By the name that ``--calls`` takes."""
    row, weight, heads = (rows, hidden), (hidden,), hidden // SIZE
    return {
        "norm": Call(fusednorm.rms_norm, norm, (row, weight)),
        "add_norm": Call(fusednorm.fused_add_rms_norm, fused, (row, row, weight)),
        "two_norms": Call(fusednorm.rms_norm_add_rms_norm, two_norms, (row, row, weight, weight)),
        "bias": Call(
            lambda x, w, b: fusednorm.rms_norm(x, w, bias=b),
            lambda x, w, b: (wide_norm(x.float(), w) + b.float()).to(x.dtype),
            (row, weight, weight),
        ),
        "heads": Call(fusednorm.rms_norm, norm, ((rows, heads, SIZE), (heads, SIZE))),
        "silu_and_mul": Call(fusednorm.silu_and_mul, lambda gate, up: silu(gate) * up, (row, row)),
        "gated": Call(
            fusednorm.rms_norm_gated,
            lambda x, z, w: (norm(x, w).float() * silu(z.float())).to(x.dtype),
            (row, row, weight),
        ),
        "gate_first": Call(
            lambda x, z, w: fusednorm.rms_norm_gated(x, z, w, norm_before_gate=False), gate_first, (row, row, weight)
        ),
        "rope": rope(rows, dtype),
    }


def measure(name: str, rows: int, hidden: int, dtype: torch.dtype, turns: int) -> None:
    """Prints a line."""
    call = calls(rows, hidden, dtype)[name]
    operands = [torch.randn(shape).to(dtype).requires_grad_() for shape in call.shapes]
    torch._dynamo.reset()  # it refuses to compile a function for many shapes
    timed = {}
    for contender, function in (("ours", call.ours), ("compiled", torch.compile(call.formula, dynamic=False))):
        found = function(*operands)
        outputs = (found,) if isinstance(found, Tensor) else found
        incoming = [torch.randn_like(t) for t in outputs]
        timed[contender] = outputs
    timed["empty"] = Empty.apply(outputs, *operands)
    functions = {
        contender: lambda outputs=outputs: torch.autograd.grad(outputs, operands, incoming, retain_graph=True)
        for contender, outputs in timed.items()
    }
    # Many calls for each turn: what others left in the caches must not count.
    least = times(functions, operands[0].numel() // 4, turns)
    others = f"compiled {least['compiled']:8.1f} {least['compiled'] / least['ours']:5.2f}x"
    empty = f"empty {least['empty']:7.1f} {least['compiled'] / least['empty']:5.2f}x"
    print(f"{name:13}{str(dtype)[6:]:9}{rows:5} {least['ours']:8.1f} us   {others}   {empty}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", default=list(calls(1, SIZE, torch.float32)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--hidden", type=int, default=4096, help=f"a multiple of {SIZE}")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in arguments.dtypes:
        for name in arguments.calls:
            for rows in arguments.rows:
                measure(name, rows, arguments.hidden, getattr(torch, dtype), arguments.turns)


if __name__ == "__main__":
    sys.exit(main())
