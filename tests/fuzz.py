"""Calls the cpu backend with inputs of every kind, sound and unsound, and compares each call with the reference.

    python tests/fuzz.py [--minutes 60] [--seed 1] [--first 0] [--count 1] [--only gate ...]

An input is a function, dtypes, shapes, strides, byte offsets, data, flags, a number of threads and an instruction set,
with operands that may share memory. Operands lie between pages that nobody may touch. Asserted is: the call returns the
reference's bits and changes no byte but of what it writes; or it raises what the same call raises on copies; or it
refuses to write to a layout or an overlap that is really there, having written nothing. Gradients too are the
reference's, and change no operand.

An input follows from the seed and its number alone. On a failure, and where the process ends, the command that makes
the same input again is printed. Without ``--seed`` every run has another, which is printed too.
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy
import torch

import fusednorm
from fusednorm.backends import cpu
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.calls.quantization import groups_of, scales_of
from fusednorm.conformance.cases import TABLES, differing
from fusednorm.conformance.test_quantized import ALL as QUANTIZATIONS

sys.path.insert(0, str(Path(__file__).parent))  # where Python is told to leave the script's folder out
from guard_pages import PAGE, Guarded

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROOM = 96 * 1024  # bytes that an operand may reach over
NORMAL = torch.randn(2 * ROOM // 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EPS = (0.0, 1e-30, 1e-12, 1e-6, 1e-5, 0.1, 1, 3e38, float("inf"), float("nan"))
OFFSETS = (1.0, 1, -0.3, 1e-30, 1e39)
MEMORIES = 12  # of all operands of a call, with outputs and incoming gradients, and one for an image of another


@dataclass
class Memory:
    """A guarded piece of memory, as bytes."""

    guarded: Guarded = field(default_factory=lambda: Guarded(ROOM))

    def __post_init__(self):
        self.bytes = torch.frombuffer(self.guarded.map, dtype=torch.uint8, offset=PAGE, count=ROOM)

    def tensor(self, dtype, shape, strides, offset):
        """A tensor in it, from that byte on; its strides in elements."""
        count = reach(shape, strides)
        whole = torch.frombuffer(self.guarded.map, dtype=dtype, offset=PAGE + offset, count=count)
        return whole.as_strided(shape, strides)


def reach(shape, strides):
    """Elements from the first to the last of a tensor that has any."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous(shape):
    """The strides of a tensor without gaps."""
    return tuple(numpy.cumprod((1, *shape[:0:-1]))[::-1].tolist()) if shape else ()


class Input:
    """One input: a function, its operands by name, its flags, and what it writes."""

    def __init__(self, seed, number, memories, operations):
        self.random = random = Random(f"{seed}/{number}")
        self.memories, self.used, self.layouts = memories, 0, {}
        self.isa, self.threads = random.choice(cpu.variants()), random.choice((1, 1, 2, 3))
        self.generator = torch.Generator().manual_seed(random.getrandbits(60))
        self.dtype = random.choice(DTYPES)
        self.written, self.flags, self.gradients = [], {}, False
        #: Operands that an output may be exactly.
        self.readable = ()
        self.operands, self.name = {}, random.choice(operations)
        OPERATIONS[self.name](self)

    def chance(self, probability):
        return self.random.random() < probability

    def flag(self, probability, name, *values):
        """Sets a flag to one of these values, sometimes."""
        if self.chance(probability):
            self.flags[name] = self.random.choice(values)

    def shape(self, multiple=1):
        """Of rows, mostly in one to three dimensions; few are empty."""
        random, unit = self.random, self.random.choice((1, 1, 1, 1, 8))
        hidden = unit * random.randint(1, random.choice((70, 1100)) if unit == 1 else 512)
        hidden = 0 if self.chance(0.02) else max(1, hidden // multiple) * multiple
        dims = random.choice((0, 1, 2, 2, 2, 3, 3, 4)) if self.chance(0.1) else random.choice((1, 2, 2, 3))
        shape, room = [hidden], max(1, ROOM // 24 // max(1, hidden))
        for _ in range(dims - 1):
            most = min(300, room)
            size = random.randint(1, most if self.chance(0.2) else min(most, 9))
            shape.insert(0, 0 if self.chance(0.02) else size)
            room = max(1, room // size)
        return tuple(shape) if dims else ()

    def some_dtype(self):
        """One that fits the first operand's, mostly the same; rarely one that does not."""
        if self.chance(0.02):
            return self.random.choice((*DTYPES, torch.int32, torch.complex64))
        if self.chance(0.55):
            return self.dtype
        return self.random.choice(DTYPES if self.dtype == torch.float64 else DTYPES[:3])

    def strides(self, shape):
        """Mostly such as rows one stride apart have; also expanded, permuted, with gaps in rows, and any."""
        random, strides, kind = self.random, list(contiguous(shape)), self.random.random()
        if kind < 0.25 and len(shape) > 1:
            gap = random.choice((1, 3, 8, 64, random.randint(1, 100)))
            strides[:-1] = (stride // max(1, shape[-1]) * (shape[-1] + gap) for stride in strides[:-1])
        elif kind < 0.31 and len(shape) > 1:
            strides[random.randrange(len(shape) - 1)] = 0
        elif kind < 0.37 and len(shape) > 2:
            strides[0], strides[1] = shape[-1], shape[-1] * shape[0]
        elif kind < 0.41:
            strides = [2 * stride for stride in strides]
        elif kind < 0.45:
            strides = [random.randint(0, 2 * stride + 1) for stride in strides]
        for i, size in enumerate(shape):  # where there is one, torch takes any
            if size == 1 and self.chance(0.2):
                strides[i] = random.randint(0, 50)
        return tuple(strides)

    def operand(self, name, shape, dtype=None):
        """An operand, mostly in memory of its own; rarely it has a wrong shape, or is another operand."""
        dtype = dtype or self.some_dtype()
        if self.chance(0.01):
            shape = self.random.choice(((), (*shape, 1), shape[1:], (*shape[:-1], sum(shape[-1:]) + 1)))
        twins = [key for key, t in self.operands.items() if (t.shape, t.dtype) == (shape, dtype)]
        if twins and self.chance(0.03):
            twin = self.random.choice(twins)
            return self.put(name, self.operands[twin], self.layouts[twin][3])
        return self.beside(name, shape, dtype) if self.chance(0.08) else self.place(name, shape, dtype)

    def place(self, name, shape, dtype, below=None):
        """Random values in memory of its own: at its end, its beginning, or anywhere; of int64, numbers below one."""
        strides = self.strides(shape)
        if 0 in shape:
            return self.put(name, torch.empty_strided(shape, strides, dtype=dtype))
        if reach(shape, strides) * dtype.itemsize > ROOM:
            strides = contiguous(shape)
            if reach(shape, strides) * dtype.itemsize > ROOM:  # made longer, so that it does not fit
                shape = strides = ()
        last = ROOM - reach(shape, strides) * dtype.itemsize
        kind = self.random.random()
        offset = last if kind < 0.5 else 0 if kind < 0.7 else self.random.randint(0, last)
        if kind < 0.9 or below is not None:
            offset = offset // dtype.itemsize * dtype.itemsize
        memory = self.memories[self.used]
        self.used += 1
        whole = memory.bytes[offset // 8 * 8 : -(-(offset + reach(shape, strides) * dtype.itemsize) // 8) * 8]
        if below is None:
            self.fill(whole, dtype)
        else:
            whole.view(torch.int64).random_(below, generator=self.generator)
        return self.put(name, memory.tensor(dtype, shape, strides, offset), memory)

    def fill(self, whole, dtype):
        """Values of one kind: any bits, zeros, or normal numbers of one size."""
        kind = self.random.random()
        if kind < 0.08 or not dtype.is_floating_point:
            whole.view(torch.int64).random_(generator=self.generator)
        elif kind < 0.13 or dtype.itemsize == 1:
            whole.zero_()
        else:
            of_dtype = torch.finfo(dtype)
            scale = self.random.choice((1, 1, 1, 1, 1e-3, 30, 1e3, 1e-6, of_dtype.tiny, of_dtype.max / 8))
            begin = self.random.randrange(ROOM // 8)
            for part in whole.view(dtype).split(ROOM // 8):
                part.copy_(NORMAL[begin : begin + len(part)] * scale)

    def beside(self, name, shape, dtype):
        """In another operand's memory: exactly there, some bytes, elements or rows off, or with other strides."""
        random, others = self.random, [key for key, layout in self.layouts.items() if layout[3] is not None]
        if not others or 0 in shape:
            return self.place(name, shape, dtype)
        other = random.choice(others)
        tensor, (*_, memory, offset) = self.operands[other], self.layouts[other]
        if (tensor.shape, tensor.dtype) == (shape, dtype) and self.chance(0.5):
            return self.put(name, tensor, memory)
        strides = tensor.stride() if tensor.dim() == len(shape) and self.chance(0.7) else self.strides(shape)
        if self.chance(0.6):
            row = dtype.itemsize * (shape[-1] if shape else 1)
            offset += random.choice((1, -1)) * random.choice((1, dtype.itemsize, 64, row, row - 1, 7 * row))
        if offset < 0 or offset + reach(shape, strides) * dtype.itemsize > ROOM:
            return self.place(name, shape, dtype)
        return self.put(name, memory.tensor(dtype, shape, strides, offset), memory)

    def put(self, name, tensor, memory=None):
        """Takes a tensor in that memory as an operand; without a memory it has no elements."""
        offset = None if memory is None else tensor.data_ptr() - memory.bytes.data_ptr()
        self.operands[name] = tensor
        self.layouts[name] = (str(tensor.dtype)[6:], list(tensor.shape), tensor.stride(), memory, offset)
        return tensor

    def weights(self, hidden, *names, heads=()):
        """Weights that may be absent; some have a row for each head."""
        for name in names:
            if self.chance(0.25 if name == "bias" else 0.8):
                self.operand(name, (*heads, *hidden) if self.chance(0.2) else hidden)

    def output(self, name, shape, dtype):
        """Sometimes an output of the caller's: memory of its own, exactly another operand, or beside one."""
        if self.chance(0.7):
            return
        self.gradients = False
        self.written.append(name)
        dtype = self.some_dtype() if dtype.itemsize > 1 and self.chance(0.03) else dtype
        (self.beside if self.chance(0.5) else self.operand)(name, shape, dtype)

    def rows_and_sum(self, shape, rows=True):
        """Outputs of rows, and of the sum where there is a residual, of any dtypes."""
        if "residual" in self.operands:
            total = self.operands["residual"].dtype
            if self.chance(0.15):
                total = self.flags["residual_dtype"] = self.some_dtype()
            self.output("residual_out", shape, total)
        if rows:
            out = self.some_dtype()
            if self.chance(0.15):
                self.flags["out_dtype"] = out
            self.output("out", shape, out)

    def in_place_or_not(self, *written):
        """Takes the function in place, with these operands as its outputs, or asks for gradients, or neither."""
        if self.chance(0.2):
            self.name += "_"
            self.written = list(written)
        else:
            self.gradients = self.chance(0.5)
        return not self.written

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

    def backward(self):
        """A function that returns gradients of some operands, through some outputs, from any memory; None without."""
        functions = [name for name, t in self.operands.items() if t.is_floating_point() and name not in TABLES]
        needed = [name for name in functions if self.chance(0.8)]
        operands = dict(self.operands)
        with fusednorm.use_backend("reference"), torch.no_grad():
            outputs, _ = outcome(self.call, operands)
        shapes = {f"d_{i}": (tuple(y.shape), y.dtype) for i, y in enumerate(outputs or ()) if self.chance(0.9)}
        incoming = {name: self.place(name, *how) for name, how in shapes.items()}
        if not needed or (outputs is not None and not incoming):
            return None

        def gradients():
            leaves = {name: t.detach().requires_grad_(name in needed) for name, t in operands.items()}
            found = {f"d_{i}": y for i, y in enumerate(self.call(leaves))}
            return torch.autograd.grad(
                [found[name] for name in incoming], [leaves[name] for name in needed], list(incoming.values())
            )

        return gradients


def norm(given):
    """With a weight and a bias, of all heads or of each."""
    shape, fused = given.shape(), given.name.startswith("fused")
    given.readable = ("x", "residual")
    given.operand("x", shape, given.dtype)
    if fused:
        given.operand("residual", shape)
        given.flag(0.4, "round_sum", False)
        if "rms" in given.name:
            given.flag(0.4, "x_scale", 0.22, -1e-3, 3e38, 1)
    given.weights(shape[-1:], "weight", "bias", heads=shape[-2:-1])
    given.flag(0.9, "eps", *EPS)
    given.flag(0.5, "weight_offset", *OFFSETS)
    given.flag(0.4, "round_norm", True)
    if given.in_place_or_not(*("x", "residual")[: 1 + fused]):
        given.rows_and_sum(shape)


def two_norms(given):
    shape, both = given.shape(), given.name.endswith("rms_norm")
    given.operand("x", shape, given.dtype)
    given.operand("residual", shape)
    given.weights(shape[-1:], "weight", *(["next_weight"] if both else []))
    given.flag(0.6, "eps", *EPS)
    if both:
        given.flag(0.3, "next_eps", *EPS)
        given.flag(0.4, "round_sum", False)
    given.flag(0.3, "between", torch.float32)
    given.flag(0.2, "weight_offset", *OFFSETS)
    given.flag(0.3, "round_norm", True)
    if given.in_place_or_not(*(("x", "residual") if both else ("residual",))):
        given.rows_and_sum(shape, both)


def a_gate(given):
    shape = given.shape()
    given.operand("y", shape, given.dtype)
    given.operand("z", shape)
    given.flag(0.7, "activation", *ACTIVATIONS)
    if given.in_place_or_not("y"):
        given.rows_and_sum(shape)


def function_alone(given):
    shape = given.shape()
    given.operand("z", shape, given.dtype)
    given.flag(0.2, "out_dtype", given.some_dtype())
    given.gradients = given.chance(0.4)
    given.output("out", shape, given.some_dtype() if given.chance(0.1) else given.dtype)


def softcap(given):
    shape = given.shape()
    given.operand("x", shape, given.dtype)
    given.flag(1.0, "cap", 30.0, 0.3, 50, *([math.nan] * given.chance(0.03)))
    given.flag(0.4, "round_steps", True)
    given.flag(0.2, "out_dtype", given.some_dtype())
    given.gradients = given.chance(0.4)
    given.output("out", shape, given.some_dtype() if given.chance(0.1) else given.dtype)


def modulate(given):
    """With numbers for each row, and for all rows of a sample."""
    shape = given.shape()
    given.operand("y", shape, given.dtype)
    for name in ("scale", "shift"):
        kept = len(shape) - 1 if given.chance(0.5) else given.random.randint(0, max(0, len(shape) - 1))
        given.operand(name, (*shape[:kept], *shape[-1:]))
    given.flag(0.4, "round_steps", True)
    given.flag(0.2, "out_dtype", given.some_dtype())
    given.gradients = given.chance(0.4)
    given.output("out", shape, given.some_dtype() if given.chance(0.1) else given.dtype)


def products(given):
    shape = given.shape()
    room = max(1, ROOM // 24 // max((1, *shape[-1:])))
    columns = 0 if given.chance(0.02) else given.random.randint(1, min(room, given.random.choice((3, 20, 70))))
    given.operand("x", shape, given.dtype)
    given.operand("weight", (columns, *shape[-1:]))
    if given.chance(0.6):
        given.operand("bias", (columns,))
    given.flag(0.2, "out_dtype", given.some_dtype())
    given.gradients = given.chance(0.2)
    given.output("out", (*shape[:-1], columns), given.some_dtype() if given.chance(0.1) else given.dtype)


def products_of_int8(given):
    given.dtype = given.random.choice(DTYPES[:3])
    shape = given.shape()
    room = max(1, ROOM // 24 // max((1, *shape[-1:])))
    columns = 0 if given.chance(0.02) else given.random.randint(1, min(room, given.random.choice((3, 20, 70))))
    given.operand("q", shape, torch.int8)
    given.operand("scale", (*shape[:-1], 1), torch.float32)
    given.operand("weight", (columns, *shape[-1:]), torch.int8)
    given.operand("weight_scale", (columns,), torch.float32)
    if given.chance(0.5):
        given.operand("bias", (columns,), given.dtype)
    if given.chance(0.3):
        given.place("zero_point", (*shape[:-1], 1), torch.int32, below=2**30)
    given.flag(0.4, "out_dtype", given.dtype)
    given.output("out", (*shape[:-1], columns), given.dtype)


def attention(given):
    """Of a batch, or of sequences whose keys lie in pages."""
    random, paged = given.random, given.name.startswith("paged")
    size, size_of_values = (random.choice((1, 5, 16, 24, 64, 128, random.randint(1, 300))) for _ in range(2))
    kv_heads, group = random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 3, 4))
    room = max(1, ROOM // 10 // max(size, size_of_values) // kv_heads)
    keys = random.randint(0 if given.chance(0.05) else 1, min(room, random.choice((5, 40, 300))))
    queries = random.randint(
        0 if given.chance(0.05) else 1, min(max(1, room // group), random.choice((1, 1, 3, 20, 90)))
    )
    heads = kv_heads * group
    count = 0 if given.chance(0.01) else random.randint(1, max(1, min(3, room // max(keys, queries * group, 1))))
    q = (queries, heads, size) if paged else (count, heads, queries, size)
    given.operand("q", q, given.dtype)
    for name, length in (("k", size), ("v", size_of_values)):
        given.operand(name, (count, kv_heads, keys, length), given.dtype if given.chance(0.98) else None)
    if given.chance(0.3):
        given.operand("sinks", (heads,))
    if paged:
        pages_of_each = random.randint(1, 4)
        sequences = 0 if given.chance(0.03) else random.randint(1, 4)
        starts = sorted(random.randint(0, queries) for _ in range(sequences + 1))
        lengths = [random.randint(0, pages_of_each * keys + given.chance(0.02)) for _ in range(sequences)]
        pages = [[random.randrange(max(1, count)) for _ in range(pages_of_each)] for _ in range(sequences)]
        for name, numbers in (("pages", pages), ("starts", starts), ("lengths", lengths)):
            whole = torch.tensor(numbers, dtype=random.choice((torch.int32, torch.int64)))
            given.put(name, whole.reshape(sequences, pages_of_each) if name == "pages" else whole)
    elif given.chance(0.4):
        shape = [n if given.chance(0.6) else 1 for n in (count, heads, queries, keys)]
        given.operand("mask", tuple(shape[random.choice((0, 0, 1, 2)) :]), torch.bool)
        if (memory := given.layouts["mask"][3]) is not None:
            memory.bytes.bitwise_and_(1)  # a bool has no other bits
    given.flag(0.3, "scale", 0.3, -1, 1e30, *([math.nan] * given.chance(0.1)))
    given.flag(0.4, "causal", False)
    given.flag(0.3, "window", 1, 3, 40)
    given.flag(0.3, "softcap", 1.5, 50.0)
    given.output("out", (*q[:-1], size_of_values), given.dtype)


def log_probabilities(given):
    """Of whole rows, or of ids, with steps before the softmax."""
    shape = given.shape()
    given.operand("logits", shape, given.dtype)
    given.gradients = given.chance(0.4)
    if given.name == "log_softmax":
        given.flag(0.2, "out_dtype", given.some_dtype())
        given.output("out", shape, given.some_dtype() if given.chance(0.1) else given.dtype)
    elif given.name != "logsumexp":
        several = (given.random.randint(1, 3),) if given.chance(0.4) else ()
        given.place("ids", (*shape[:-1], *several), torch.int64, below=max(1, *shape[-1:], 1))
        if given.chance(0.4):
            given.operand("temperature", shape[:-1])
        given.flag(0.3, "softcap", 30.0, 0.3)
        given.flag(0.4, "ignore_index", 0, -100)


def and_mul(given):
    shape = given.shape()
    if given.chance(0.5):
        given.operand("gate", (*shape[:-1], 2 * sum(shape[-1:])), given.dtype)
    else:
        given.operand("gate", shape, given.dtype)
        given.operand("up", shape)
    given.flag(0.3, "between", torch.float32)
    if given.name.startswith("silu") and given.chance(0.5):
        given.flag(0.7, "limit", 0.5, 7.0, 1e30, *([math.nan] * given.chance(0.03)))
        given.flag(0.5, "alpha", 1.0, 1.702)
        given.flag(0.5, "up_offset", 1.0, -0.3)
        given.flag(0.3, "clamp", "after")
        given.flag(0.2 if "between" not in given.flags else 0.02, "round_steps", True)
        given.flag(0.5 if "up" not in given.operands else 0.02, "interleaved", True)
    if given.name != "silu_and_mul_quant":
        given.gradients = given.chance(0.4)
        given.output("out", shape, given.some_dtype())
    return shape


def norm_gated(given):
    shape = given.shape()
    given.operand("x", shape, given.dtype)
    given.operand("gate", shape)
    given.weights(shape[-1:], "weight")
    divisors = [n for n in range(1, 1 + sum(shape[-1:])) if shape[-1] % n == 0]
    given.flag(0.3, "group_size", 1, *divisors)
    given.flag(0.4, "norm_before_gate", False)
    given.flag(0.7, "activation", *ACTIVATIONS)
    given.flag(0.6, "eps", *EPS)
    given.flag(0.3, "round_norm", True)
    given.flag(0.3 if given.flags.get("norm_before_gate", True) else 0.03, "between", torch.float32)
    given.flag(0.2, "weight_offset", *OFFSETS)
    given.in_place_or_not("x")


def quantizer(given):
    random = given.random
    quantization = QUANTIZATIONS[random.choice(list(QUANTIZATIONS))]
    if given.name == "silu_and_mul_quant":
        shape = and_mul(given)
    elif given.name == "relu2_quant":
        shape = given.shape()
        given.operand("z", shape, given.dtype)
        given.flag(0.3, "between", torch.float32)
    else:
        groups = isinstance(quantization.per, int) and given.chance(0.95)
        shape = given.shape(quantization.per if groups else 1)
        given.operand("y" if given.name == "quantize" else "x", shape, given.dtype)
        if given.name.startswith("fused"):
            given.operand("residual", shape)
            given.flag(0.4, "round_sum", False)
        if "rms" in given.name:
            given.weights(shape[-1:], "weight")
        if "layer" in given.name:
            given.weights(shape[-1:], "weight", "bias", heads=shape[-2:-1])
        if given.name != "quantize":
            given.flag(0.6, "eps", *EPS)
            given.flag(0.3, "between", torch.float32)
            given.flag(0.3, "round_norm", True)
            given.flag(0.2, "weight_offset", *OFFSETS)
    if quantization.per == "tensor":
        scale = given.place("scale", (1,), torch.float32)
        scale.copy_(scale.abs().nan_to_num(1.0, 1.0) + 2.0**-20)
        if quantization.zero_point and given.chance(0.97):
            given.place("zero_point", (1,), torch.int32).fill_(random.randint(-200, 200))
    given.flags["quantization"] = quantization
    given.output("out", shape, quantization.dtype)
    hidden = sum(shape[-1:])
    if quantization.per != "tensor" and hidden and hidden % quantization.group(hidden) == 0:
        groups = torch.Size(groups_of(quantization, shape))
        scales = torch.Size(scales_of(quantization, shape))
        given.output("scale_out", scales, quantization.scale_dtype or torch.float32)
        if quantization.computes_zero_point:
            given.output("zero_point_out", groups, torch.int32)
    if "norm" in given.name:
        given.output("normed_out", shape, given.dtype)
        given.rows_and_sum(shape, rows=False)


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
        if given.flags["norm"]:
            given.weights((size,), "q_weight", "k_weight")
        given.flag(0.6, "eps", *EPS)
        given.flag(0.3, "between", torch.float32)
        given.flag(0.3, "round_norm", True)
        given.flag(0.2, "weight_offset", *OFFSETS)
    if rotated:
        by_positions = given.chance(0.4)
        entries = random.randint(1, 20)
        dtype = given.some_dtype()
        for name in ("cos", "sin"):
            given.operand(name, ((entries,) if by_positions else rows) + (pairs,), dtype)
        if by_positions:
            given.place("positions", rows, torch.int64, below=entries)
        given.flag(0.4, "interleaved", True)
        given.flag(0.4, "round_products", True)
    results = (("q", "q_out"), ("k", "k_out")) if both else (("x", "out"),)
    if not both:
        given.gradients = given.chance(0.4)
    elif not given.in_place_or_not("q", "k"):
        return
    for name, out in results:
        given.output(out, given.operands[name].shape, given.operands[name].dtype)


OPERATIONS = {
    "rms_norm": norm,
    "fused_add_rms_norm": norm,
    "layer_norm": norm,
    "fused_add_layer_norm": norm,
    "modulate": modulate,
    "linear": products,
    "int8_linear": products_of_int8,
    "attention": attention,
    "paged_attention": attention,
    "rms_norm_add_rms_norm": two_norms,
    "rms_norm_add": two_norms,
    "gate": a_gate,
    "silu_and_mul": and_mul,
    "gelu_tanh_and_mul": and_mul,
    "gelu_and_mul": and_mul,
    "gelu": function_alone,
    "relu2": function_alone,
    "softcap": softcap,
    **dict.fromkeys(
        ("log_softmax", "logsumexp", "selected_log_prob", "selected_log_prob_and_entropy"), log_probabilities
    ),
    "relu2_quant": quantizer,
    "rms_norm_gated": norm_gated,
    "quantize": quantizer,
    "rms_norm_quant": quantizer,
    "fused_add_rms_norm_quant": quantizer,
    "layer_norm_quant": quantizer,
    "fused_add_layer_norm_quant": quantizer,
    "silu_and_mul_quant": quantizer,
    "rotate": rotation,
    "qk_norm_rope": rotation,
}


def same(got, wanted):
    """Whether two tensors, or nothing, have the same bits, NaN being NaN and +0 being -0."""
    if got is None or wanted is None:
        return got is wanted
    return got.dtype == wanted.dtype and got.shape == wanted.shape and not differing(got, wanted).any()


def addresses(tensor):
    """Of all bytes of all elements."""
    elements = numpy.zeros(1, dtype=numpy.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements = (elements[:, None] + numpy.arange(size) * stride).ravel()
    return tensor.data_ptr() + (elements[:, None] * tensor.itemsize + numpy.arange(tensor.itemsize)).ravel()


def meet(a, b):
    """Whether any address is in both."""
    low, high = min(a.min(), b.min()), max(a.max(), b.max())
    if high - low > 2 * ROOM:  # two memories
        return False
    taken = numpy.zeros(high - low + 1, dtype=bool)
    taken[a - low] = True
    return taken[b - low].any()


def rows(tensor):
    """Where each row begins, or None if a row has gaps."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    return addresses(tensor[..., :1])[:: tensor.itemsize]


def may_be_written(tensor):
    """Whether its rows have no gaps, lie in at most two levels of strides, and share nothing."""
    every = addresses(tensor)
    if rows(tensor) is None or not len(every):
        return rows(tensor) is not None
    return numpy.bincount(every - every.min()).max() == 1 and inner(tensor) is not None


def inner(tensor):
    """How many rows lie one stride apart before another stride comes; None if there are more than two strides."""
    begins = rows(tensor)
    steps = numpy.diff(begins)
    other = numpy.flatnonzero(steps != steps[:1])
    found = other[0] + 1 if len(other) else len(begins)
    if len(begins) % found:
        return None
    levels = begins.reshape(-1, found)
    once = len(set(numpy.diff(levels[:, 0]).tolist())) < 2
    return found if once and (levels - levels[:, :1] == levels[0] - levels[0, 0]).all() else None


def exactly(output, operand):
    """Whether they are the same rows in the same memory."""
    a, b = rows(output), rows(operand)
    return output.dtype == operand.dtype and a is not None and b is not None and numpy.array_equal(a, b)


def may_be_refused(given, written, readable):
    """Whether a layout or an overlap is a reason to refuse the call. An output may be exactly a readable operand."""
    if not all(may_be_written(tensor) for tensor in written.values()):
        return True
    given, written = ({name: t for name, t in tensors.items() if t.numel()} for tensors in (given, written))
    if len({inner(tensor) for tensor in written.values()} - {len(rows(tensor)) for tensor in written.values()}) > 1:
        return True  # in levels that differ
    readable = set(readable) - set(written)
    for name, output in written.items():
        for other_name, other in {**given, **written}.items():
            if other_name == name or (other_name in readable and exactly(output, other)):
                continue
            if meet(addresses(output), addresses(other)):
                return True
    return False


def with_negatives(operands, written, random):
    """The operands, some of those that are only read as views of the same memory whose lazy negative bit is set."""
    return {
        name: torch._neg_view(t)
        if name not in written and t.is_floating_point() and t.itemsize > 1 and random.random() < 0.05
        else t
        for name, t in operands.items()
    }


def outcome(function, *arguments, **options):
    """What a call returns, or the type of what it raises."""
    try:
        return function(*arguments, **options), None
    except (TypeError, ValueError, RuntimeError) as error:
        return None, error


def as_bytes(tensors):
    """8-bit numbers as whole numbers, which compare."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]


def check_call(given):
    """A call, into new outputs, given ones, or in place; returns what happened, in a word."""
    given.operands = with_negatives(given.operands, given.written, given.random)
    copies = {name: t.clone(memory_format=torch.contiguous_format) for name, t in given.operands.items()}
    with fusednorm.use_backend("reference"):
        wanted, complaint = outcome(given.call, copies)
    before = [memory.bytes.clone() for memory in given.memories[: given.used]]
    written = {name: given.operands[name] for name in given.written}
    versions = {name: tensor._version for name, tensor in written.items()}
    with fusednorm.use_backend("cpu"):
        got, error = outcome(given.call, given.operands)
    if error is None:
        assert complaint is None, f"accepted what the reference refuses: {complaint}"
        assert all(map(same, as_bytes(got), as_bytes(wanted))), "other bits than the reference's"
        assert all(tensor._version > versions[name] for name, tensor in written.items()), "the write was not counted"
    elif type(error) is not type(complaint):  # also where a call has an overlap, and another fault that is found later
        assert isinstance(error, ValueError), f"raised {error!r}, and on copies {complaint!r}"
        assert complaint is None or not given.readable, f"raised {error!r}, and on copies {complaint!r}"
        others = {name: t for name, t in given.operands.items() if name not in written}
        assert written, f"refused what it only reads: {error}"
        assert may_be_refused(others, written, given.readable), f"refused without a reason: {error}"
    for memory, was in zip(given.memories, before, strict=False):
        for tensor in written.values() if error is None else ():
            offset = tensor.data_ptr() - memory.bytes.data_ptr()
            if 0 <= offset < ROOM and tensor.numel():  # what was compared above
                image = given.memories[-1]
                image.bytes.copy_(was)
                image.tensor(tensor.dtype, tensor.shape, tensor.stride(), offset).copy_(tensor)
                was.copy_(image.bytes)
        assert torch.equal(memory.bytes, was), "memory was written"
    return "refused" if error else "returned"


def check_gradients(given):
    """Backward, through one output or more, to all operands or some."""
    given.operands = with_negatives(given.operands, (), given.random)
    gradients = given.backward()
    if gradients is None:
        return "returned"
    before = [memory.bytes.clone() for memory in given.memories[: given.used]]
    with fusednorm.use_backend("reference"):
        wanted, complaint = outcome(gradients)
    with fusednorm.use_backend("cpu"):
        got, error = outcome(gradients)
    assert type(error) is type(complaint), f"raised {error!r}, and the reference {complaint!r}"
    assert error is not None or all(map(same, got, wanted)), "other gradients than the reference's"
    for memory, was in zip(given.memories, before, strict=False):
        assert torch.equal(memory.bytes, was), "memory was written"
    return "refused" if error else "returned"


def fuzz(asked):
    """Tries inputs; the number of the current one is always in the file of ``--progress``."""
    memories = [Memory() for _ in range(MEMORIES)]
    tried, end = Counter(), time.monotonic() + 60 * asked.minutes
    with fusednorm.use_backend("cpu"):
        fusednorm.rms_norm(torch.ones(1, 2))  # opens the fast path, which every input then meets open
    for number in itertools.count(asked.first):
        if (asked.count is not None and number == asked.first + asked.count) or time.monotonic() > end:
            break
        os.pwrite(asked.progress, b"%d" % number, 0)
        given = Input(asked.seed, number, memories, asked.only)
        torch.set_num_threads(given.threads)
        try:
            with cpu.use_variant(given.isa):
                what = (check_gradients if given.gradients else check_call)(given)
        except AssertionError as error:
            print(f"{error}\n{given}", flush=True)
            return 1
        tried["gradients" if given.gradients else "calls", what] += 1
    parts = ", ".join(f"{count} {kind} {what}" for (kind, what), count in sorted(tried.items()))
    print(f"seed {asked.seed}: {sum(tried.values())} inputs: {parts}", flush=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1, help="how long")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--count", type=int, help="no more inputs than this")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="these operations")
    parser.add_argument("--progress", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.progress is not None:
        sys.exit(fuzz(asked))
    # In a process of its own, because a wrong access ends it.
    with tempfile.TemporaryFile() as progress:
        command = [sys.executable, "-P", __file__, "--minutes", str(asked.minutes), "--seed", str(asked.seed)]
        command += ["--first", str(asked.first), "--progress", str(progress.fileno()), "--only", *asked.only]
        command += [] if asked.count is None else ["--count", str(asked.count)]
        print(f"seed {asked.seed}", flush=True)
        environment = os.environ | {"PYTHONFAULTHANDLER": "1", "OMP_WAIT_POLICY": "passive"}
        status = subprocess.run(command, env=environment, pass_fds=(progress.fileno(),)).returncode
        if status:
            progress.seek(0)
            again = f"--seed {asked.seed} --first {progress.read().decode()} --count 1 --only {' '.join(asked.only)}"
            print(f"status {status}; the same again: python {__file__} {again}")
    sys.exit(1 if status else 0)


if __name__ == "__main__":
    main()
