"""Gates of models beside their formulas in torch, eager and compiled, and beside Llama's: docs/performance.md.

    python benchmarks/gates.py [layer_norm | log_prob]

``layer_norm``: LayerNorms in the place of gates, beside the RMS norm with a bias and torch's. ``log_prob``: the
log-probability of an id of each row, beside torch's formulas, eager and compiled.

One thread; bfloat16 and rows of 4096, but for what the tables name. Times are the least of 25, in microseconds, of
calls in turns. Results of gates are compared with the formula's first: no number may differ by more than the roundings
of a few steps.
"""

import sys
import time
from functools import partial

import torch
from torch.nn.functional import gelu, layer_norm, relu, silu

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


def best(call, *arguments, turns=25):
    """The least time of a call, in microseconds."""
    begin = time.perf_counter()
    call(*arguments)
    number = max(1, int(0.004 / (time.perf_counter() - begin)))
    found = []
    for _ in range(turns):
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


def in_turns(*calls):
    """The least times of calls without arguments, in microseconds, in turns."""
    return [min(times) for times in zip(*([best(call, turns=3) for call in calls] for _ in range(12)), strict=True)]


def added_and_normalised(x, residual, weight, bias):
    """torch's addition and LayerNorm."""
    return layer_norm(x + residual, (4096,), weight, bias)


def layer_norms():
    """Prints the table of LayerNorms: of each call our time, that beside the RMS norm's, and how many times torch's."""
    print("| dtype | rows | layer_norm | | | fused_add_layer_norm | | | compiled | gradients | | |")
    print("|---|---:|" + "---:|" * 10)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight, bias = (torch.randn(4096).to(dtype).requires_grad_() for _ in range(2))
        for rows in (1, 32, 512, 16384):  # the last ones from memory
            torch._dynamo.reset()
            compiled = torch.compile(added_and_normalised, dynamic=False)
            x, residual, d = torch.randn(3, rows, 4096).to(dtype)
            cells = [str(dtype)[6:], str(rows)]
            with torch.no_grad():
                alone = in_turns(
                    partial(fusednorm.layer_norm, x, weight, bias),
                    partial(fusednorm.rms_norm, x, weight, bias=bias),
                    partial(layer_norm, x, (4096,), weight, bias),
                )
                added = in_turns(
                    partial(fusednorm.fused_add_layer_norm, x, residual, weight, bias),
                    partial(fusednorm.fused_add_rms_norm, x, residual, weight, bias=bias),
                    partial(added_and_normalised, x, residual, weight, bias),
                    partial(compiled, x, residual, weight, bias),
                )
            x.requires_grad_()
            results = (
                fusednorm.layer_norm(x, weight, bias),
                fusednorm.rms_norm(x, weight, bias=bias),
                layer_norm(x, (4096,), weight, bias),
            )
            gradient_of = partial(torch.autograd.grad, inputs=(x, weight, bias), grad_outputs=d, retain_graph=True)
            gradients = in_turns(*(partial(gradient_of, result) for result in results))
            for us, rms, *others in (alone, added, gradients):
                cells += [f"{us:.1f}", f"{us / rms:.2f}", *(f"{other / us:.1f}x" for other in others)]
            print(f"| {' | '.join(cells)} |", flush=True)


def of_softmax(x, ids):
    """torch's log-probabilities of ids, which it rounds to the dtype of x."""
    return x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def of_sums(x, ids):
    """The same without a second tensor of x's size."""
    return x.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - x.logsumexp(-1)


def log_probs():
    """Prints the table of log-probabilities: our times, and how many times as long torch's formulas take."""
    print("| dtype | rows | of | us | softmax, gather | compiled | gather - logsumexp | compiled |", end="")
    print(" with the entropy | gradients: us | softmax, gather | compiled |")
    print("|---|---:|---:|" + "---:|" * 9)
    for dtype in (torch.bfloat16, torch.float32):
        for size in (4096, 32768, 151936):
            for rows in (1, 8, 64):
                torch._dynamo.reset()
                x, ids = (torch.randn(rows, size) * 4).to(dtype), torch.randint(size, (rows,))
                compiled = [torch.compile(formula, dynamic=False) for formula in (of_softmax, of_sums)]
                both = fusednorm.selected_log_prob_and_entropy
                calls = (fusednorm.selected_log_prob, of_softmax, compiled[0], of_sums, compiled[1], both)
                with torch.no_grad():
                    us, *others, entropy = in_turns(*(partial(call, x, ids) for call in calls))
                d, leaf = torch.randn(rows), x.requires_grad_()
                of_gradients = (fusednorm.selected_log_prob, of_softmax, compiled[0])
                results = [call(leaf, ids) for call in of_gradients]
                gradients = [
                    partial(torch.autograd.grad, result, leaf, d.to(result.dtype), retain_graph=True)
                    for result in results
                ]
                ours, *backward = in_turns(*gradients)
                cells = [str(dtype)[6:], str(rows), str(size), f"{us:.1f}", *(f"{t / us:.1f}x" for t in others)]
                cells += [f"{entropy / us:.2f}", f"{ours:.1f}", *(f"{t / ours:.1f}x" for t in backward)]
                print(f"| {' | '.join(cells)} |", flush=True)


def main():
    """Prints a table."""
    torch.set_num_threads(1)
    if "log_prob" in sys.argv[1:]:
        log_probs()
        return
    if "layer_norm" in sys.argv[1:]:
        layer_norms()
        return
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
