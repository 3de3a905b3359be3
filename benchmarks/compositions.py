"""What compositions cost, beside the plain call, torch's formula, and two calls.

    python benchmarks/compositions.py [--backward] [--rows 1 32 512] [--dtypes bfloat16 float16 float32]
    VLLM_CPU_SO=FILE python benchmarks/compositions.py --quantized int8 fp8 fp8_block [--threads 2]

Times are the least processor times of interleaved turns on one thread, in microseconds: with other work on the machine
they vary less than the clock's, whose least times are taken with more threads. The last columns are how many times as
long others took. The formula is eager torch, and the same with torch.compile. Before anything is timed, fusednorm's
results must equal those of the calls that specify the composition, bit for bit.

`--quantized` quantizes each row after the norm, in place but for the numbers and the scales: to int8, or to float8,
with a scale for each row, or for each 128 elements. vLLM's two operators, which know int8, are beside it where it is
installed.

The plain call is `fused_add_rms_norm_` on the same rows. It reads and writes as many bytes of rows as a composition of
two norms does.
"""

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import fusednorm
from fusednorm import peers
from fusednorm.measured import OPERATIONS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Call = Callable[[], object]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as models write it."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def two_norms(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of rms_norm_add_rms_norm."""
    h = norm(x, w) + r
    return norm(h, v), h


def norm_add(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The formula of rms_norm_add."""
    return norm(x, w) + r


def biased(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of fused_add_rms_norm with a bias."""
    h = (x + r).float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w.float() + v.float()).to(x.dtype), x + r


def of_heads(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of fused_add_rms_norm with a weight for each head."""
    h = x + r
    return norm(h, w), h


def two_calls(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> object:
    """The composition of two calls of fusednorm's."""
    return fusednorm.fused_add_rms_norm_(fusednorm.rms_norm(x, w, out=x), r, v)


def same(ours: object, expected: object) -> None:
    """Raises if results differ."""
    if isinstance(ours, Tensor):
        ours, expected = (ours,), (expected,)
    for a, b in zip(ours, expected, strict=True):
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            raise AssertionError("other bits than those of the specification")


def times(calls: dict[str, Call], elements: int, turns: int) -> dict[str, float]:
    """The least time of each call, in us. A call before each turn brings back what others pushed out of the caches."""
    least = dict.fromkeys(calls, float("inf"))
    repeat = max(1, min(200, 1_000_000 // elements))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(turns):
        for name, call in calls.items():
            call()
            begin = clock()
            for _ in range(repeat):
                call()
            least[name] = min(least[name], (clock() - begin) / repeat * 1e6)
    return least


def forward(rows: int, hidden: int, dtype: torch.dtype, turns: int) -> None:
    """Prints a line for each composition."""
    x, r, w, v = (torch.randn(shape).to(dtype) for shape in ((rows, hidden), (rows, hidden), hidden, hidden))
    heads = hidden // 128
    xh, rh, wh = x.view(rows, heads, 128), r.view(rows, heads, 128), w.view(heads, 128)
    same(
        fusednorm.rms_norm_add_rms_norm_(x.clone(), r.clone(), w, v),
        fusednorm.fused_add_rms_norm(fusednorm.rms_norm(x, w), r, v),
    )
    same(fusednorm.rms_norm_add_(x.clone(), r.clone(), w), fusednorm.rms_norm(x, w) + r)
    torch._dynamo.reset()
    for name, ours, formula, operands, plain in (
        ("two norms", lambda: fusednorm.rms_norm_add_rms_norm_(x, r, w, v), two_norms, (x, r, w, v), w),
        ("norm, add", lambda: fusednorm.rms_norm_add_(x, r, w), norm_add, (x, r, w, v), w),
        ("bias", lambda: fusednorm.fused_add_rms_norm_(x, r, w, bias=v), biased, (x, r, w, v), w),
        ("heads", lambda: fusednorm.fused_add_rms_norm_(xh, rh, wh), of_heads, (xh, rh, wh, v), w[:128]),
    ):
        one, other = operands[0], operands[1]
        compiled = torch.compile(formula, dynamic=False)
        calls: dict[str, Call] = {
            "ours": ours,
            "plain": lambda one=one, other=other, plain=plain: fusednorm.fused_add_rms_norm_(one, other, plain),
            "eager": lambda formula=formula, operands=operands: formula(*operands),
            "compiled": lambda compiled=compiled, operands=operands: compiled(*operands),
        }
        if formula is two_norms:
            calls["two calls"] = lambda operands=operands: two_calls(*operands)
        least = times(calls, rows * hidden, turns)
        others = "".join(f"  {k} {t / least['ours']:.2f}x" for k, t in least.items() if k not in ("ours", "plain"))
        label = f"{name:10}{str(dtype)[6:]:9}{rows:5} x {hidden}"
        print(f"{label} {least['ours']:10.1f} us  {least['ours'] / least['plain']:.2f} plain calls{others}", flush=True)


def backward(rows: int, hidden: int, dtype: torch.dtype, turns: int) -> None:
    """Prints a line: gradients of both outputs with respect to x, the residual and both weights."""
    shapes = ((rows, hidden), (rows, hidden), hidden, hidden)
    operands = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    torch._dynamo.reset()  # it refuses to compile a function for many shapes
    gradients = [torch.randn(rows, hidden).to(dtype) for _ in range(2)]
    functions = {
        "ours": fusednorm.rms_norm_add_rms_norm,
        "plain": lambda x, r, w, v: fusednorm.fused_add_rms_norm(x, r, w),
        "eager": two_norms,
        "compiled": torch.compile(two_norms, dynamic=False),
    }
    y, h = fusednorm.rms_norm_add_rms_norm(*operands)
    one, total = fusednorm.fused_add_rms_norm(fusednorm.rms_norm(operands[0], operands[2]), operands[1], operands[3])
    same(
        torch.autograd.grad((y, h), operands, gradients, retain_graph=True),
        torch.autograd.grad((one, total), operands, gradients),
    )
    calls: dict[str, Call] = {}
    for name, function in functions.items():
        outputs, inputs = function(*operands), operands[:3] if name == "plain" else operands
        calls[name] = lambda outputs=outputs, inputs=inputs: torch.autograd.grad(
            outputs, inputs, gradients, retain_graph=True
        )
    least = times(calls, 4 * rows * hidden, turns)
    others = "".join(f"  {k} {t / least['ours']:.2f}x" for k, t in least.items() if k not in ("ours", "plain"))
    label = f"backward  {str(dtype)[6:]:9}{rows:5} x {hidden}"
    print(f"{label} {least['ours']:10.1f} us  {least['ours'] / least['plain']:.2f} plain calls{others}", flush=True)


def quantized(to: str, rows: int, hidden: int, dtype: torch.dtype, turns: int) -> None:
    """Prints a line: numbers of 8 bits and scales, after an addition and a norm."""
    x, r, w = (torch.randn(shape).to(dtype) for shape in ((rows, hidden), (rows, hidden), hidden))
    name = f"add_norm_{to}"
    operation = OPERATIONS[name]
    y, total = fusednorm.fused_add_rms_norm(x, r, w)
    expected = fusednorm.quantize(y, operation.quantization)
    numbers, scale = map(torch.empty_like, expected)
    memory = {"out": numbers, "scale_out": scale, "residual_out": r}

    def ours() -> object:
        return fusednorm.fused_add_rms_norm_quant(x, r, w, quantization=operation.quantization, **memory)

    same(ours(), (*expected, total))
    torch._dynamo.reset()
    compiled = torch.compile(operation.formula, dynamic=False)
    calls: dict[str, Call] = {
        "ours": ours,
        "plain": lambda: fusednorm.fused_add_rms_norm_(x, r, w),
        "eager": lambda: operation.formula(x, r, w, 1e-6),
        "compiled": lambda: compiled(x, r, w, 1e-6),
    }
    if to == "int8" and importlib.util.find_spec("vllm"):
        (vllm,) = peers.vllm_ops(torch.device("cpu"))
        chain = vllm.others[name](w, 1e-6)
        calls["vLLM"] = lambda: chain(x, r)
    least = times(calls, rows * hidden, turns)
    others = "".join(f"  {k} {t / least['ours']:.2f}x" for k, t in least.items() if k not in ("ours", "plain"))
    label = f"{to:10}{str(dtype)[6:]:9}{rows:5} x {hidden}"
    print(f"{label} {least['ours']:10.1f} us  {least['ours'] / least['plain']:.2f} plain calls{others}", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--dtypes", nargs="+", default=[str(dtype)[6:] for dtype in DTYPES])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--quantized", nargs="+", choices=("int8", "fp8", "fp8_block"), default=())
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    measures = [functools.partial(quantized, to) for to in arguments.quantized]
    if not measures:
        measures = [backward if arguments.backward else forward]
    for measure in measures:
        for dtype in arguments.dtypes:
            for rows in arguments.rows:
                measure(rows, arguments.hidden, getattr(torch, dtype), arguments.turns)


if __name__ == "__main__":
    sys.exit(main())
