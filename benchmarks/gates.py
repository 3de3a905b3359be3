"""Gates of models beside their formulas in torch, eager and compiled, and beside Llama's: docs/performance.md.

    python benchmarks/gates.py

bfloat16, one thread, rows of 4096. Times are the least of 25, in microseconds, of calls in turns. Results are compared
with the formula's first: no number may differ by more than the roundings of a few steps.
"""

import time

import torch
from torch.nn.functional import gelu, relu, silu

import fusednorm

STEPS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}


def gpt_oss(x):
    """The formula of Hugging Face's experts."""
    g, u = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


def limited(x):
    """That of DeepSeek-V4."""
    g, u = x.chunk(2, -1)
    return silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0)


#: The formula, the call, and the elements of an input beside 4096.
CALLS = {
    "gpt-oss": (gpt_oss, lambda x: fusednorm.silu_and_mul(x, **STEPS), 4096),
    "gpt-oss, Hugging Face's roundings": (
        gpt_oss,
        lambda x: fusednorm.silu_and_mul(x, **STEPS, round_steps=True),
        4096,
    ),
    "DeepSeek-V4": (limited, lambda x: fusednorm.silu_and_mul(x, limit=7.0), 4096),
    "relu2": (lambda z: relu(z).square(), fusednorm.relu2, 0),
    "gelu": (gelu, fusednorm.gelu, 0),
}


def best(call, *arguments):
    """The least time of a call, in microseconds."""
    begin = time.perf_counter()
    call(*arguments)
    number = max(1, int(0.004 / (time.perf_counter() - begin)))
    found = []
    for _ in range(25):
        begin = time.perf_counter()
        for _ in range(number):
            call(*arguments)
        found.append((time.perf_counter() - begin) / number)
    return 1e6 * min(found)


def gradient(call):
    """A call, and the gradient of its operand."""

    def both(x, d):
        torch.autograd.grad(call(x), x, d)

    return both


def main():
    """Prints the table."""
    torch.set_num_threads(1)
    print("| | rows | us | beside silu_and_mul | eager | compiled | with gradients: us | eager | compiled |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, (formula, call, more) in CALLS.items():
        for rows in (1, 32, 512):
            torch._dynamo.reset()
            compiled = torch.compile(formula, dynamic=False)
            x = torch.randn(rows, 4096 + more, dtype=torch.bfloat16) * 2
            torch.testing.assert_close(call(x), formula(x), rtol=2**-5, atol=2**-5)
            with torch.no_grad():
                us, usual = best(call, x), best(fusednorm.silu_and_mul, torch.cat((x, x), -1)[:, :8192].contiguous())
                eager, traced = best(formula, x) / us, best(compiled, x) / us
            x, d = x.requires_grad_(), torch.randn(rows, 4096, dtype=torch.bfloat16)
            whole = best(gradient(call), x, d)
            others = [best(gradient(other), x, d) / whole for other in (formula, compiled)]
            numbers = f"{us:.1f} | {us / usual:.2f} | {eager:.1f}x | {traced:.1f}x | {whole:.1f}"
            print(f"| {name} | {rows} | {numbers} | {others[0]:.1f}x | {others[1]:.1f}x |", flush=True)


if __name__ == "__main__":
    main()
