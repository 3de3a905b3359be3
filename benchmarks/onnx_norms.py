"""Times norms and gates in ONNX Runtime on a CPU, exported in both ways, and counts elements with other bits.

    python -P benchmarks/onnx_norms.py

One thread; the sessions take turns. Each time is the least of 60 turns.
"""

import time

import onnxruntime
import torch

import fusednorm
import fusednorm.onnx

TURNS = 60


class Model(torch.nn.Module):
    """A function as a model, whose weight is no input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def session(model, inputs, exact):
    """ONNX Runtime with a model, on one thread."""
    program = fusednorm.onnx.export(model, inputs, exact=exact, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)


def compare(name, function, inputs):
    """Prints a row of the table of docs/onnx.md."""
    model = Model(function)
    sessions = [session(model, inputs, exact) for exact in (False, True)]
    feeds = [{i.name: x.numpy() for i, x in zip(s.get_inputs(), inputs, strict=True)} for s in sessions]
    expected, best = model(*inputs), [1e9, 1e9]
    for _ in range(TURNS):
        for i, (one, feed) in enumerate(zip(sessions, feeds, strict=True)):
            begin = time.perf_counter()
            one.run(None, feed)
            best[i] = min(best[i], time.perf_counter() - begin)
    equal = []
    for one, feed in zip(sessions, feeds, strict=True):
        found = torch.from_numpy(one.run(None, feed)[0])
        ulp = (found - expected).abs() / expected.abs().clamp(1e-30) / 2**-23
        equal.append(f"{(found == expected).float().mean().item():.1%} ({ulp.max().item():.1f})")
    print(f"| {name} | {best[0] * 1e6:.0f} | {best[1] * 1e6:.0f} | {equal[0]} | {equal[1]} |")


def main():
    """Prints the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| float32, one thread | Time, us | `exact=True`, us | Equal (greatest difference in ulp) | `exact=True` |")
    print("|---|---|---|---|---|")
    for rows, size in ((1, 4096), (32, 4096), (512, 4096)):
        x, r, weight = torch.randn(rows, size), torch.randn(rows, size), torch.rand(size) + 0.5
        compare(f"`rms_norm`, {rows} x {size}", lambda x, w=weight: fusednorm.rms_norm(x, w), (x,))
        added = lambda x, r, w=weight: fusednorm.fused_add_rms_norm(x, r, w)[0]  # noqa: E731
        compare(f"`fused_add_rms_norm`, {rows} x {size}", added, (x, r))
        compare(f"`silu_and_mul`, {rows} x {size}", fusednorm.silu_and_mul, (x, r))


if __name__ == "__main__":
    main()
