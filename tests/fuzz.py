"""Calls the cpu backend with inputs of every kind, sound and unsound, and compares each call with the reference.

    python tests/fuzz.py [--minutes 60] [--seed 1] [--first 0] [--count 1]

An input is a function, dtypes, shapes, strides, byte offsets, data, flags, a number of threads and an instruction set,
with operands that may share memory. Operands lie between pages that nobody may touch. Asserted is: the call returns the
reference's bits and changes no other byte; or it raises what the same call raises on copies; or it refuses a layout or
an overlap that is really there, having written nothing. Gradients too are the reference's, and change no operand.

An input follows from the seed and its number alone. On a failure, and where the process ends, the command that makes
the same input again is printed. Without ``--seed`` every run has another, which is printed too.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy
import torch

import fusednorm
from fusednorm.backends import cpu
from fusednorm.conformance.cases import differing

sys.path.insert(0, str(Path(__file__).parent))  # where Python is told to leave the script's folder out
from guard_pages import PAGE, Guarded

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROOM = 96 * 1024  # bytes that an operand may reach over
OUTPUTS = ("out", "residual_out")
NAMES = ("x", "residual", "weight", "bias", *OUTPUTS, "dy", "d_total")
NORMAL = torch.randn(2 * ROOM // 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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
    """One input: what is called, on what."""

    def __init__(self, seed, number, memories):
        self.random = random = Random(f"{seed}/{number}")
        self.memories = memories
        self.placed = {}  # by name: memory, offset in bytes, dtype, strides
        self.tensors = {}
        self.gradient = random.random() < 0.3
        self.x = random.choice(DTYPES)
        self.isa = random.choice(cpu.variants())
        self.threads = random.choice((1, 1, 2, 3))
        self.flags = {
            "eps": random.choice((0.0, 1e-30, 1e-12, 1e-6, 1e-5, 1e-5, 0.1, 1, 3e38, float("inf"), float("nan"))),
            "weight_offset": random.choice((0.0, 0.0, 0.0, 1.0, 1, -0.3, 1e-30, 1e39)),
            "round_norm": random.random() < 0.4,
        }
        self.fused = random.random() < 0.7
        if self.fused:
            self.flags["round_sum"] = random.random() < 0.6
            self.flags["x_scale"] = random.choice((*5 * (1.0,), 0.22, -1e-3, 3e38, 1))
        self.in_place = not self.gradient and random.random() < 0.2
        self.dtypes = {}  # of new outputs
        for name in ("out_dtype", *(("residual_dtype",) if self.fused else ())):
            if not self.in_place and random.random() < 0.15:
                self.dtypes[name] = self.some_dtype()
        self.shape = self.some_shape()
        others = [name for name in NAMES if name not in ("x", *(() if self.fused else ("residual", "residual_out")))]
        self.place("x", self.x, self.shape)
        for name in others:
            self.some_operand(name)

    def some_shape(self):
        """0 to 4 dimensions, few of them empty."""
        random = self.random
        dims = random.choice((0, 1, 2, 2, 2, 3, 3, 4)) if random.random() < 0.1 else random.choice((1, 2, 2, 3))
        kind = random.random()
        hidden = (
            random.randint(1, 70)
            if kind < 0.4
            else random.randint(1, 1100)
            if kind < 0.8
            else 8 * random.randint(1, 512)
        )
        if random.random() < 0.02:
            hidden = 0
        shape, rows = [hidden], 1
        for _ in range(dims - 1):
            most = max(1, min(300, ROOM // 16 // max(1, hidden * rows)))  # complex64, and shapes that are too large
            size = random.randint(1, most if random.random() < 0.2 else min(most, 9))
            shape.insert(0, 0 if random.random() < 0.02 else size)
            rows *= max(1, size)
        return tuple(shape) if dims else ()

    def some_dtype(self):
        """One that fits x, or, rarely, one that does not."""
        if self.random.random() < 0.03:
            return self.random.choice((*DTYPES, torch.int32, torch.complex64))
        if self.random.random() < 0.5:
            return self.x
        return self.random.choice(DTYPES if self.x == torch.float64 else DTYPES[:3])

    def some_operand(self, name):
        """An operand of that name, or none."""
        random, shape = self.random, self.shape
        if name in ("dy", "d_total"):
            if not self.gradient:
                return
            dtype = self.dtypes.get("out_dtype", self.x)
            if name == "d_total":
                dtype = self.dtypes.get("residual_dtype", self.placed["residual"][2]) if self.fused else None
            if dtype is not None and random.random() < 0.9:
                self.place(name, dtype, shape)
            return
        if name in OUTPUTS and (self.gradient or self.in_place or random.random() < 0.4):
            return
        if name in ("weight", "bias"):
            if random.random() < (0.2 if name == "weight" else 0.75):
                return
            shape = shape[-2:] if random.random() < 0.2 else shape[-1:]
        dtype = self.some_dtype()
        if name == "out" and random.random() < 0.97:
            dtype = self.dtypes.get("out_dtype", dtype)
        if name == "residual_out" and random.random() < 0.97:
            dtype = self.dtypes.get("residual_dtype", self.placed["residual"][2])
        if random.random() < 0.01:
            shape = random.choice(((), (*shape, 1), shape[1:], (*shape[:-1], sum(shape[-1:]) + 1)))
        sharing = random.random()
        if sharing < 0.12 or (name in OUTPUTS and sharing < 0.5):
            self.place_beside(name, dtype, shape)
        else:
            self.place(name, dtype, shape)

    def some_strides(self, shape):
        """Mostly such as rows one stride apart have; also expanded, permuted, and any."""
        random, strides = self.random, list(contiguous(shape))
        kind = random.random()
        if kind < 0.2 and len(shape) > 1:
            gap = random.choice((1, 3, 8, 64, random.randint(1, 100)))
            strides[:-1] = (gap_stride // max(1, shape[-1]) * (shape[-1] + gap) for gap_stride in strides[:-1])
        elif kind < 0.25 and len(shape) > 1:
            strides[random.randrange(len(shape) - 1)] = 0
        elif kind < 0.3 and len(shape) > 2:
            strides[0], strides[1] = shape[-1], shape[-1] * shape[0]
        elif kind < 0.34:
            strides = [2 * stride for stride in strides]
        elif kind < 0.38:
            strides = [random.randint(0, 2 * stride + 1) for stride in strides]
        for i, size in enumerate(shape):  # where there is one, torch takes any
            if size == 1 and random.random() < 0.2:
                strides[i] = random.randint(0, 50)
        return tuple(strides)

    def place(self, name, dtype, shape):
        """In memory of its own: at its end, its beginning, or anywhere."""
        strides = self.some_strides(shape)
        if 0 not in shape and reach(shape, strides) * dtype.itemsize > ROOM:
            strides = contiguous(shape)
            if reach(shape, strides) * dtype.itemsize > ROOM:  # made longer, so that it does not fit x
                shape = strides = ()
        last = ROOM - reach(shape, strides) * dtype.itemsize if 0 not in shape else ROOM - 64
        kind = self.random.random()
        offset = last if kind < 0.5 else 0 if kind < 0.7 else self.random.randint(0, last)
        if kind < 0.9:
            offset = offset // dtype.itemsize * dtype.itemsize
        self.put(name, name, offset, dtype, shape, strides)

    def place_beside(self, name, dtype, shape):
        """In another operand's memory: exactly there, a few elements or rows off, or with other strides."""
        random = self.random
        memory, offset, other_dtype, strides, other_shape = self.placed[random.choice(list(self.placed))]
        if random.random() < 0.7:
            dtype = other_dtype
        if len(other_shape) != len(shape) or random.random() < 0.3:
            strides = self.some_strides(shape)
        if random.random() < 0.6:
            row = dtype.itemsize * (shape[-1] if shape else 1)
            offset += random.choice((1, -1)) * random.choice((1, dtype.itemsize, row, row - 1, 7 * row))
        if offset < 0 or 0 in shape or offset + reach(shape, strides) * dtype.itemsize > ROOM:
            self.place(name, dtype, shape)
        else:
            self.put(name, memory, offset, dtype, shape, strides)

    def put(self, name, memory, offset, dtype, shape, strides):
        self.placed[name] = memory, offset, dtype, strides, shape
        if 0 in shape:
            self.tensors[name] = torch.empty_strided(shape, strides, dtype=dtype)
        else:
            self.tensors[name] = self.memories[memory].tensor(dtype, shape, strides, offset)

    def fill(self):
        """Values of one kind for each memory, as far as an operand reaches."""
        random = self.random
        generator = torch.Generator().manual_seed(random.getrandbits(60))
        first, end = {}, {}
        for memory, offset, dtype, strides, shape in self.placed.values():
            last = 0 if 0 in shape else reach(shape, strides) * dtype.itemsize
            first[memory] = min(first.get(memory, ROOM), offset)
            end[memory] = max(end.get(memory, 0), offset + last)
        for memory, _, dtype, *_ in self.placed.values():
            begin = first[memory] // 8 * 8
            whole = self.memories[memory].bytes[begin : max(begin, -(-end[memory] // 8) * 8)]
            kind = random.random()
            if kind < 0.1 or not dtype.is_floating_point:
                whole.view(torch.int64).random_(generator=generator)
            elif kind < 0.15:
                whole.zero_()
            else:
                scale = random.choice((1, 1, 1, 1e-3, 1e3, 1e-6, torch.finfo(dtype).tiny, torch.finfo(dtype).max / 8))
                begin = random.randrange(ROOM // 8)
                for part in whole.view(dtype).split(ROOM // 8):
                    part.copy_(NORMAL[begin : begin + len(part)] * scale)

    def __str__(self):
        name = ("fused_add_rms_norm" if self.fused else "rms_norm") + ("_" if self.in_place else "")
        flags, gradients = self.flags | self.dtypes, ", gradients" if self.gradient else ""
        lines = [f"{name}, {flags}, {self.isa}, {self.threads} threads{gradients}"]
        lines += [
            f"  {name}: {str(dtype)[6:]}{list(shape)}, strides {list(strides)}, byte {offset} of the memory of {memory}"
            for name, (memory, offset, dtype, strides, shape) in self.placed.items()
        ]
        return "\n".join(lines)

    def call(self, tensors, in_place=False):
        """The public function, on these operands; the outputs."""
        outputs = {name: tensors[name] for name in OUTPUTS if name in tensors}
        function = "fused_add_rms_norm" if self.fused else "rms_norm"
        given = [tensors["x"], *([tensors["residual"]] if self.fused else []), tensors.get("weight")]
        options = {**self.flags, **self.dtypes, **outputs, "bias": tensors.get("bias")}
        found = getattr(fusednorm, function + ("_" if in_place else ""))(*given, **options)
        return found if self.fused else (found,)

    def gradients(self):
        """A function that returns the gradients of some operands, through the outputs that have gradients; or None."""
        leaves = ("x", "residual", "weight", "bias")
        needed = [name for name in leaves if name in self.tensors and self.random.random() < 0.8]
        names = [name for name in ("dy", "d_total") if name in self.tensors]
        floating = all(tensor.is_floating_point() for tensor in self.tensors.values())

        def gradients():
            operands = {
                name: tensor.detach().requires_grad_(name in needed and floating)
                for name, tensor in self.tensors.items()
            }
            outputs = dict(zip(("dy", "d_total"), self.call(operands), strict=False))
            incoming = [operands[name].detach() for name in names]
            return torch.autograd.grad([outputs[name] for name in names], [operands[n] for n in needed], incoming)

        return gradients if needed and names else None


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


def may_be_refused(given, written, readable=("x", "residual")):
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


def check_call(given):
    """Forward, into new outputs, given ones, or in place; returns what happened, in a word."""
    in_place = ("x", "residual") if given.in_place else ()
    tensors = with_negatives(given.tensors, (*OUTPUTS, *in_place), given.random)
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with fusednorm.use_backend("reference"):
        wanted, complaint = outcome(given.call, copies)
    before = {name: given.memories[placed[0]].bytes.clone() for name, placed in given.placed.items()}
    if given.in_place:
        written = {"x": tensors["x"]} | ({"residual": tensors["residual"]} if given.fused else {})
    else:
        written = {name: tensors[name] for name in OUTPUTS if name in tensors}
    inputs = {name: tensor for name, tensor in tensors.items() if name not in OUTPUTS}
    versions = {name: tensor._version for name, tensor in written.items()}
    with fusednorm.use_backend("cpu"):
        got, error = outcome(given.call, tensors, given.in_place)
    if error is None:
        assert complaint is None, f"accepted what the reference refuses: {complaint}"
        assert all(map(same, got, wanted)), "other bits than the reference's"
        assert all(tensor._version > versions[name] for name, tensor in written.items()), "the write was not counted"
    elif complaint is not None:
        assert type(error) is type(complaint), f"raised {error!r}, and on copies {complaint!r}"
    else:
        assert isinstance(error, ValueError), f"raised {error!r}"
        assert may_be_refused(inputs, written), f"refused without a reason: {error}"
    for name, placed in given.placed.items():
        now = given.memories[placed[0]].bytes
        expected = before[name]
        for tensor in written.values() if error is None else ():
            offset = tensor.data_ptr() - now.data_ptr()
            if 0 <= offset < ROOM and tensor.numel():  # what was compared above
                image = given.memories["image"]
                image.bytes.copy_(expected)
                image.tensor(tensor.dtype, tensor.shape, tensor.stride(), offset).copy_(tensor)
                expected = image.bytes.clone()
        assert torch.equal(now, expected), f"memory around {name} was written"
    return "returned" if error is None else "refused"


def check_gradient(given):
    """Backward, through one output or both, to all operands or some."""
    given.tensors = with_negatives(given.tensors, (), given.random)
    before = {name: given.memories[placed[0]].bytes.clone() for name, placed in given.placed.items()}

    gradients = given.gradients()
    if gradients is None:
        return "returned"
    found = {}
    for backend in ("reference", "cpu"):
        with fusednorm.use_backend(backend):
            found[backend] = outcome(gradients)
    (wanted, complaint), (got, error) = found["reference"], found["cpu"]
    assert type(error) is type(complaint), f"raised {error!r}, and the reference {complaint!r}"
    assert error is not None or all(map(same, got, wanted)), "other gradients than the reference's"
    for name, placed in given.placed.items():
        assert torch.equal(given.memories[placed[0]].bytes, before[name]), f"the memory of {name} was written"
    return "refused" if error else "returned"


def fuzz(seed, first, count, seconds, progress):
    """Tries inputs; the number of the current one is always in the file `progress`."""
    memories = {name: Memory() for name in (*NAMES, "image")}
    tried, end = Counter(), time.monotonic() + seconds
    with fusednorm.use_backend("cpu"):
        fusednorm.rms_norm(torch.ones(1, 2))  # opens the fast path, which every input then meets open
    for number in itertools.count(first):
        if (count is not None and number == first + count) or time.monotonic() > end:
            break
        os.pwrite(progress, b"%d" % number, 0)
        given = Input(seed, number, memories)
        given.fill()
        with ExitStack() as stack:
            stack.enter_context(cpu.use_variant(given.isa))
            torch.set_num_threads(given.threads)
            try:
                what = (check_gradient if given.gradient else check_call)(given)
            except AssertionError as error:
                print(f"{error}\n{given}", flush=True)
                return 1
        tried["gradients" if given.gradient else "calls", what] += 1
    total = sum(tried.values())
    parts = ", ".join(f"{count} {kind} {what}" for (kind, what), count in sorted(tried.items()))
    print(f"seed {seed}: {total} inputs: {parts}", flush=True)
    return 0


def parser_of(description):
    """The options that say how many inputs there are, and which."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1, help="how long")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--count", type=int, help="no more inputs than this")
    return parser


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--progress", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.progress is not None:
        sys.exit(fuzz(asked.seed, asked.first, asked.count, 60 * asked.minutes, asked.progress))
    # In a process of its own, because a wrong access ends it.
    with tempfile.TemporaryFile() as progress:
        command = [sys.executable, "-P", __file__, "--minutes", str(asked.minutes), "--seed", str(asked.seed)]
        command += ["--first", str(asked.first), "--progress", str(progress.fileno())]
        command += [] if asked.count is None else ["--count", str(asked.count)]
        print(f"seed {asked.seed}", flush=True)
        environment = os.environ | {"PYTHONFAULTHANDLER": "1", "OMP_WAIT_POLICY": "passive"}
        status = subprocess.run(command, env=environment, pass_fds=(progress.fileno(),)).returncode
        if status:
            progress.seek(0)
            number = progress.read().decode()
            print(f"status {status}; the same again: python {__file__} --seed {asked.seed} --first {number} --count 1")
    sys.exit(1 if status else 0)


if __name__ == "__main__":
    main()
