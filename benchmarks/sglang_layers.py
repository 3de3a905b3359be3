"""Times SGLang's layers on a CPU without the plug-in and with it, in turns, after their results were compared.

    SGLANG_USE_CPU_ENGINE=1 python -P benchmarks/sglang_layers.py --threads 1

It takes SGLang and the torch that it asks for; docs/sglang.md says how to install them. A figure is the median of the
rounds' ratios: SGLang's own time over the one with the plug-in.
"""

import argparse
import statistics
import sys
import time

import torch
from sglang.srt.layers import activation, layernorm
from sglang.srt.layers.rotary_embedding import factory, get_rope
from sglang.srt.plugins.hook_registry import HookRegistry

from fusednorm import sglang as plugin

HIDDEN, SIZE = 4096, 128


def layers(rows):
    """Each layer, new, with the operands of a call."""
    x, residual = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).bfloat16()
    factory._ROPE_DICT.clear()
    rope = get_rope(SIZE, SIZE, 4096, 10000, True, dtype=torch.bfloat16)
    yield "RMSNorm, added", layernorm.RMSNorm(HIDDEN).bfloat16(), (x, residual)
    yield "GemmaRMSNorm, added", layernorm.GemmaRMSNorm(HIDDEN).bfloat16(), (x, residual)
    yield "SiluAndMul", activation.SiluAndMul(), (torch.cat((x, residual), -1),)
    yield "GeluAndMul", activation.GeluAndMul(), (torch.cat((x, residual), -1),)
    yield "RotaryEmbedding", rope, (torch.arange(rows) % 4096, x, residual[:, : 8 * SIZE])


def seconds(layer, given):
    """The time of a call, of as many as take 20 ms."""
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.02:
        layer(*given)
        calls += 1
    return (time.perf_counter() - begin) / calls


@torch.inference_mode()
def main():
    """Prints a line for each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    theirs = {rows: list(layers(rows)) for rows in given.rows}
    first = {rows: [layer(*operands) for _, layer, operands in theirs[rows]] for rows in given.rows}
    plugin.register()
    HookRegistry.apply_hooks()
    for rows in given.rows:
        ours = list(layers(rows))
        for (name, own, operands), (_, layer, _), wanted in zip(theirs[rows], ours, first[rows], strict=True):
            found = layer(*operands)
            pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
            differing = max((one != other).double().mean().item() for one, other in pairs)
            if differing > 0.02:
                sys.exit(f"{name}: {differing:.1%} of the elements differ: it computes something else")
            times = [(seconds(own, operands), seconds(layer, operands)) for _ in range(given.rounds)]
            ratio = statistics.median(one / other for one, other in times)
            least = min(other for _, other in times)
            print(f"{rows} x {HIDDEN} {name}: {ratio:.2f} ({least * 1e6:.1f} us with the plug-in)", flush=True)


if __name__ == "__main__":
    main()
