"""Calls the steps around the norm on the cpu backend with inputs of every kind, and compares each with the reference.

    python tests/fuzz_steps.py [--minutes 60] [--seed 1] [--first 0] [--count 1] [--only gate ...]

Steps are two norms, gates, quantizers and rotations; ``fuzz.py`` does the same for the norm. Operands have any dtypes,
shapes, strides and offsets, and lie between pages that nobody may touch; results may be written into or beside other
operands. Asserted is: the call returns the reference's bits and changes no byte but of what it writes; or it raises
what the reference raises on copies; or it refuses to write to a layout or an overlap that is really there, having
written nothing. Gradients too are the reference's.
"""

import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

import fusednorm
from fusednorm.backends import cpu
from fusednorm.conformance.test_quantized import ALL as QUANTIZATIONS

sys.path.insert(0, str(Path(__file__).parent))  # where Python is told to leave the script's folder out
import fuzz
from fuzz import DTYPES, NORMAL, ROOM, Memory, contiguous, may_be_refused, outcome, reach, same, with_negatives

EPS = (0.0, 1e-30, 1e-6, 1e-5, 0.1, 3e38, float("inf"))
ACTIVATIONS = ("silu", "sigmoid", "gelu_tanh")
MEMORIES = 10


class Input:
    """One input: a step, its operands by name, its flags, and what it writes."""

    def __init__(self, seed, number, memories, steps):
        self.random = random = Random(f"{seed}/{number}")
        self.memories, self.used, self.layouts = memories, 0, {}
        self.isa, self.threads = random.choice(cpu.variants()), random.choice((1, 1, 2, 3))
        self.generator = torch.Generator().manual_seed(random.getrandbits(60))
        self.dtype = random.choice(DTYPES)
        self.written, self.flags, self.gradients = [], {}, False
        self.operands, self.name = {}, random.choice(steps)
        STEPS[self.name](self)

    def chance(self, probability):
        return self.random.random() < probability

    def flag(self, probability, name, *values):
        """Sets a flag to one of these values, sometimes."""
        if self.chance(probability):
            self.flags[name] = self.random.choice(values)

    def shape(self, multiple=1):
        """Of rows in one to three dimensions."""
        random = self.random
        hidden = random.randint(1, 70) if self.chance(0.4) else random.randint(1, 700)
        hidden = 8 * max(1, hidden // 8) if self.chance(0.5) else hidden
        hidden = max(1, hidden // multiple) * multiple
        room = max(1, ROOM // 24 // hidden)
        rows = [random.randint(1, min(9, room))]
        if self.chance(0.4):
            rows.append(random.randint(1, max(1, min(9, room // rows[0]))))
        if self.chance(0.01):
            rows[random.randrange(len(rows))] = 0
        return (*(rows if self.chance(0.95) else ()), hidden)

    def some_dtype(self):
        """One that fits the first operand's, mostly the same."""
        if self.chance(0.6):
            return self.dtype
        return self.random.choice(DTYPES if self.dtype == torch.float64 else DTYPES[:3])

    def strides(self, shape):
        """Rows without a gap, with one, expanded, permuted, or with gaps between elements."""
        random, strides, kind = self.random, list(contiguous(shape)), self.random.random()
        if kind < 0.3 and len(shape) > 1:
            gap = random.choice((1, 3, 8, 64, random.randint(1, 100)))
            strides[:-1] = (stride // shape[-1] * (shape[-1] + gap) for stride in strides[:-1])
        elif kind < 0.36 and len(shape) > 1:
            strides[random.randrange(len(shape) - 1)] = 0
        elif kind < 0.44 and len(shape) > 2:
            strides[:-1] = (*strides[1:-1], strides[0] * shape[0] // shape[1] if shape[1] else 1)
            strides[0], strides[1] = shape[-1], shape[-1] * shape[0]
            strides[2:] = contiguous(shape)[2:]
        elif kind < 0.48:
            strides = [2 * stride for stride in strides]
        return tuple(strides)

    def operand(self, name, shape, dtype=None, positive=False, below=None):
        """A new operand, in memory of its own, filled with random values, of int64 with numbers below one."""
        dtype = dtype or self.some_dtype()
        strides = self.strides(shape)
        if 0 in shape:
            return self.put(name, torch.empty_strided(shape, strides, dtype=dtype))
        if reach(shape, strides) * dtype.itemsize > ROOM:
            strides = contiguous(shape)
        twins = [key for key, t in self.operands.items() if (t.shape, t.dtype) == (shape, dtype)]
        if twins and below is None and not positive and self.chance(0.03):
            twin = self.random.choice(twins)
            return self.put(name, self.operands[twin], self.layouts[twin][3])
        last = ROOM - reach(shape, strides) * dtype.itemsize
        at = self.random.random()
        offset = last if at < 0.5 else 0 if at < 0.75 else self.random.randint(0, last)
        memory = self.memories[self.used]
        self.used += 1
        begin = self.random.randrange(ROOM // 8)
        if dtype.is_floating_point:
            scale = self.random.choice((1, 1, 1, 1, 1e-3, 30, 1e-6, torch.finfo(dtype).max / 8))
            if self.chance(0.08):
                memory.bytes.view(torch.int64).random_(generator=self.generator)
            else:
                for part in memory.bytes.view(dtype).split(ROOM // 8):
                    part.copy_(NORMAL[begin : begin + len(part)] * scale)
        if below is not None:
            memory.bytes.view(torch.int64).random_(below, generator=self.generator)
            offset = offset // 8 * 8
        tensor = memory.tensor(dtype, shape, strides, offset // dtype.itemsize * dtype.itemsize)
        if positive:
            tensor.copy_(tensor.abs().nan_to_num(1.0, 1.0) + 2.0**-20)
        return self.put(name, tensor, memory)

    def put(self, name, tensor, memory=None):
        """Takes a tensor in that memory as an operand; without a memory it has no elements."""
        offset = None if memory is None else tensor.data_ptr() - memory.bytes.data_ptr()
        self.operands[name] = tensor
        self.layouts[name] = (str(tensor.dtype)[6:], list(tensor.shape), tensor.stride(), memory, offset)
        return tensor

    def output(self, name, shape, dtype):
        """Sometimes an output of the caller's: memory of its own, exactly another operand, or beside one."""
        if self.chance(0.75):
            return
        self.gradients = False
        self.written.append(name)
        others = [key for key, layout in self.layouts.items() if layout[3] is not None]
        if not others or 0 in shape or self.chance(0.5):
            self.operand(name, shape, dtype)
            return
        other = self.random.choice(others)
        tensor, (*_, memory, offset) = self.operands[other], self.layouts[other]
        if (tensor.shape, tensor.dtype) == (shape, dtype) and self.chance(0.7):
            self.put(name, tensor, memory)
            return
        distance = self.random.choice((dtype.itemsize, 64, shape[-1] * dtype.itemsize))
        offset = max(0, offset + self.random.choice((0, 0, 1, -1)) * distance) // dtype.itemsize * dtype.itemsize
        strides = self.strides(shape)
        if offset + reach(shape, strides) * dtype.itemsize > ROOM:
            self.operand(name, shape, dtype)
        else:
            self.put(name, memory.tensor(dtype, shape, strides, offset), memory)

    def __str__(self):
        lines = [f"{self.name}, {self.flags}, {self.isa}, {self.threads} threads, gradients {self.gradients}"]
        lines += [
            f"  {name}: {dtype}{shape}, strides {strides}, byte {offset} of memory {self.number_of(memory)}"
            for name, (dtype, shape, strides, memory, offset) in self.layouts.items()
        ]
        return "\n".join(lines)

    def number_of(self, memory):
        return next((i for i, other in enumerate(self.memories) if other is memory), None)

    def call(self, operands):
        """The public function; its outputs, as a tuple."""
        found = getattr(fusednorm, self.name)(**operands, **self.flags)
        return found if isinstance(found, tuple) else (found,)


def in_place_or_not(given, *written):
    """Takes the function in place, with these operands as its outputs, or asks for gradients, or neither."""
    if given.chance(0.25):
        given.name += "_"
        given.written = list(written)
    else:
        given.gradients = given.chance(0.4)


def two_norms(given):
    shape = given.shape()
    given.operand("x", shape, given.dtype)
    given.operand("residual", shape)
    for name in ("weight", *(("next_weight",) if given.name.endswith("rms_norm") else ())):
        if given.chance(0.8):
            given.operand(name, shape[-1:])
    given.flag(0.6, "eps", *EPS)
    if given.name.endswith("rms_norm"):
        given.flag(0.3, "next_eps", *EPS)
        given.flag(0.4, "round_sum", False)
    given.flag(0.3, "between", torch.float32)
    given.flag(0.2, "weight_offset", 1.0, -0.3)
    given.flag(0.3, "round_norm", True)
    both = given.name.endswith("rms_norm")
    in_place_or_not(given, *(("x", "residual") if both else ("residual",)))
    if given.written:
        return
    total = given.operands["residual"].dtype
    if given.chance(0.15):
        total = given.flags["residual_dtype"] = given.some_dtype()
    given.output("residual_out", shape, total)
    if both:
        out = given.some_dtype()
        if given.chance(0.15):
            given.flags["out_dtype"] = out
        given.output("out", shape, out)


def a_gate(given):
    shape = given.shape()
    given.operand("y", shape, given.dtype)
    given.operand("z", shape)
    given.flag(0.7, "activation", *ACTIVATIONS)
    in_place_or_not(given, "y")
    if not given.written:
        out = given.some_dtype()
        if given.chance(0.15):
            given.flags["out_dtype"] = out
        given.output("out", shape, out)


def and_mul(given):
    shape = given.shape()
    if given.chance(0.5):
        given.operand("gate", (*shape[:-1], 2 * shape[-1]), given.dtype)
    else:
        given.operand("gate", shape, given.dtype)
        given.operand("up", shape)
    given.flag(0.3, "between", torch.float32)
    if given.name != "silu_and_mul_quant":
        given.gradients = given.chance(0.4)
        given.output("out", shape, given.some_dtype())
    return shape


def norm_gated(given):
    shape = given.shape()
    given.operand("x", shape, given.dtype)
    given.operand("gate", shape)
    if given.chance(0.8):
        given.operand("weight", shape[-1:])
    divisors = [n for n in range(1, shape[-1] + 1) if shape[-1] % n == 0]
    given.flag(0.3, "group_size", *divisors)
    given.flag(0.4, "norm_before_gate", False)
    given.flag(0.7, "activation", *ACTIVATIONS)
    given.flag(0.6, "eps", *EPS)
    given.flag(0.3, "round_norm", True)
    given.flag(0.3 if given.flags.get("norm_before_gate", True) else 0.03, "between", torch.float32)
    given.flag(0.2, "weight_offset", 1.0, -0.3)
    in_place_or_not(given, "x")


def quantizer(given):
    random = given.random
    quantization = QUANTIZATIONS[random.choice(list(QUANTIZATIONS))]
    if given.name == "silu_and_mul_quant":
        shape = and_mul(given)
    else:
        groups = isinstance(quantization.per, int) and given.chance(0.95)
        shape = given.shape(quantization.per if groups else 1)
        given.operand("y" if given.name == "quantize" else "x", shape, given.dtype)
        if given.name == "fused_add_rms_norm_quant":
            given.operand("residual", shape)
            given.flag(0.4, "round_sum", False)
        if given.name != "quantize":
            if given.chance(0.8):
                given.operand("weight", shape[-1:])
            given.flag(0.6, "eps", *EPS)
            given.flag(0.3, "between", torch.float32)
            given.flag(0.3, "round_norm", True)
            given.flag(0.2, "weight_offset", 1.0, -0.3)
    if quantization.per == "tensor":
        given.operand("scale", (1,), torch.float32, positive=True)
        if quantization.zero_point and given.chance(0.97):
            given.operand("zero_point", (1,), torch.int32).fill_(random.randint(-200, 200))
    given.flags["quantization"] = quantization
    given.output("out", shape, quantization.dtype)
    if quantization.per != "tensor" and shape[-1] % quantization.group(shape[-1]) == 0:
        groups = torch.Size((*shape[:-1], shape[-1] // quantization.group(shape[-1])))
        given.output("scale_out", groups, torch.float32)
        if quantization.computes_zero_point:
            given.output("zero_point_out", groups, torch.int32)
    if "norm" in given.name:
        given.output("normed_out", shape, given.dtype)
    if "residual" in given.operands:
        total = given.operands["residual"].dtype
        if given.chance(0.15):
            total = given.flags["residual_dtype"] = given.some_dtype()
        given.output("residual_out", shape, total)


def rotation(given):
    random = given.random
    size = 2 * random.randint(1, 70) if given.chance(0.5) else random.choice((64, 128, 256))
    pairs = size // 2 if given.chance(0.7) else random.randint(1, size // 2)
    room = ROOM // 24 // size
    rows = (random.randint(1, max(1, min(7, room // 4))),) if given.chance(0.7) else (2, random.randint(1, 3))
    heads = [random.randint(1, max(1, min(5, room // max(1, rows[0] * rows[-1])))) for _ in range(2)]
    both = given.name == "qk_norm_rope"
    for name, count in zip(("q", "k") if both else ("x",), heads, strict=False):
        given.operand(name, (*rows, count, size), given.dtype if name != "k" or given.chance(0.95) else None)
    rotated = not both or given.chance(0.85)
    if both:
        given.flags["norm"] = not rotated or given.chance(0.8)
        for name in ("q_weight", "k_weight"):
            if given.flags["norm"] and given.chance(0.8):
                given.operand(name, (size,))
        given.flag(0.6, "eps", *EPS)
        given.flag(0.3, "between", torch.float32)
        given.flag(0.3, "round_norm", True)
        given.flag(0.2, "weight_offset", 1.0)
    if rotated:
        by_positions = given.chance(0.4)
        entries = random.randint(1, 20)
        dtype = given.some_dtype()
        for name in ("cos", "sin"):
            given.operand(name, ((entries,) if by_positions else rows) + (pairs,), dtype)
        if by_positions:
            given.operand("positions", rows, torch.int64, below=entries)
        given.flag(0.4, "interleaved", True)
        given.flag(0.4, "round_products", True)
    if both:
        in_place_or_not(given, "q", "k")
    else:
        given.gradients = given.chance(0.4)
    if not given.written:
        for name, out in {"q": "q_out", "k": "k_out"}.items() if both else (("x", "out"),):
            given.output(out, given.operands[name].shape, given.operands[name].dtype)


STEPS = {
    "rms_norm_add_rms_norm": two_norms,
    "rms_norm_add": two_norms,
    "gate": a_gate,
    "silu_and_mul": and_mul,
    "gelu_tanh_and_mul": and_mul,
    "rms_norm_gated": norm_gated,
    "quantize": quantizer,
    "rms_norm_quant": quantizer,
    "fused_add_rms_norm_quant": quantizer,
    "silu_and_mul_quant": quantizer,
    "rotate": rotation,
    "qk_norm_rope": rotation,
}


def as_bytes(tensors):
    """8-bit numbers as whole numbers, which compare."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]


def check_call(given):
    """A call, into new outputs or in place; returns what happened, in a word."""
    given.operands = with_negatives(given.operands, given.written, given.random)
    copies = {name: t.clone(memory_format=torch.contiguous_format) for name, t in given.operands.items()}
    with fusednorm.use_backend("reference"):
        wanted, complaint = outcome(given.call, copies)
    before = [memory.bytes.clone() for memory in given.memories[: given.used]]
    written = {name: given.operands[name] for name in given.written}
    with fusednorm.use_backend("cpu"):
        got, error = outcome(given.call, given.operands)
    if error is None:
        assert complaint is None, f"accepted what the reference refuses: {complaint}"
        assert all(map(same, as_bytes(got), as_bytes(wanted))), "other bits than the reference's"
    elif type(error) is not type(complaint):  # also where a call has an overlap, and another fault that is found later
        assert isinstance(error, ValueError), f"raised {error!r}, and on copies {complaint!r}"
        others = {name: t for name, t in given.operands.items() if name not in written}
        assert written, f"refused what it only reads: {error}"
        assert may_be_refused(others, written, readable=()), f"refused without a reason: {error}"
    for memory, was in zip(given.memories, before, strict=False):
        for tensor in written.values() if error is None else ():
            offset = tensor.data_ptr() - memory.bytes.data_ptr()
            if 0 <= offset < ROOM:  # what was compared above
                place = given.memories[-1]
                place.bytes.copy_(was)
                place.tensor(tensor.dtype, tensor.shape, tensor.stride(), offset).copy_(tensor)
                was.copy_(place.bytes)
        assert torch.equal(memory.bytes, was), "memory was written"
    return "refused" if error else "returned"


def check_gradients(given):
    """The gradients of all operands that have some, through all outputs."""
    given.operands = with_negatives(given.operands, (), given.random)
    names = [name for name, t in given.operands.items() if t.is_floating_point() and name not in ("cos", "sin")]
    state = given.random.getrandbits(60)

    def gradients():
        leaves = {name: t.detach().requires_grad_(name in names) for name, t in given.operands.items()}
        outputs = given.call(leaves)
        generator = torch.Generator().manual_seed(state)
        incoming = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
        return torch.autograd.grad(outputs, [leaves[name] for name in names], incoming)

    before = [memory.bytes.clone() for memory in given.memories[: given.used]]
    with fusednorm.use_backend("reference"):
        wanted, complaint = outcome(gradients)
    with fusednorm.use_backend("cpu"):
        got, error = outcome(gradients)
    assert type(error) is type(complaint), f"raised {error!r}, and the reference {complaint!r}"
    if error is None:
        for name, a, b in zip(names, got, wanted, strict=True):
            assert same(a, b), f"another gradient of {name} than the reference's"
    for memory, was in zip(given.memories, before, strict=False):
        assert torch.equal(memory.bytes, was), "memory was written"
    return "refused" if error else "returned"


def main():
    parser = fuzz.parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="these steps")
    asked = parser.parse_args()
    memories = [Memory() for _ in range(MEMORIES + 1)]
    tried, end = Counter(), time.monotonic() + 60 * asked.minutes
    print(f"seed {asked.seed}", flush=True)
    for number in itertools.count(asked.first):
        if (asked.count is not None and number == asked.first + asked.count) or time.monotonic() > end:
            break
        given = Input(asked.seed, number, memories, asked.only)
        torch.set_num_threads(given.threads)
        try:
            with cpu.use_variant(given.isa):
                what = (check_gradients if given.gradients else check_call)(given)
        except AssertionError as error:
            print(f"{error}\n{given}\nthe same again: --seed {asked.seed} --first {number} --count 1", flush=True)
            return 1
        tried["gradients" if given.gradients else "calls", what] += 1
    parts = ", ".join(f"{count} {kind} {what}" for (kind, what), count in sorted(tried.items()))
    print(f"seed {asked.seed}: {sum(tried.values())} inputs: {parts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
