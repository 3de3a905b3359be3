"""Calls the C kernels on operands that begin and end exactly where memory begins and ends that nobody may touch.

    python tests/guard_pages.py [--isa avx2] [--verbose]

Every operand and every result, forward and backward, lies against a page without any rights: at its end, and again at
its beginning. A kernel that reads or writes one byte too many kills the process. ``--verbose`` prints each call before
it is made, so that the last line is the one that did it. Neither torch nor fusednorm is imported: the library is loaded
by itself, and runs on one thread. ``tests/backends/test_guard_pages.py`` runs this for every instruction set.

``--heap`` takes memory from calloc instead, for valgrind, which watches its borders as well, and finds scratch that is
used before it is written. Of all calls ``--every 100`` makes one in a hundred.
"""

import argparse
import ctypes
import importlib.util
import itertools
import mmap
import struct
from pathlib import Path
from random import Random

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.calloc.restype, LIBC.calloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
LIBC.free.argtypes = (ctypes.c_void_p,)

BYTES = {"none": 0, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # in the order of enum fn_kind
NAMES = list(BYTES)
NARROW = ("float32", "float16", "bfloat16")

#: Every tail of a unit (up to 32 elements) and of the shortest segments, the borders of segments, and rows so long
#: that their scratch does not fit the stack.
SIZES = (
    *range(1, 68),
    *(95, 96, 97, 127, 128, 129, 130, 255, 256, 257, 258, 511, 512, 513, 1023, 1024, 1025, 1055, 1056, 1057),
    *(1100, 2047, 2048, 2049, 3072, 5125, 12289),
)
#: Rows: of a batch, of a batch and one more; and elements between them.
ROWS, GAPS = (1, 3, 9), (0, 1, 5)


class Guarded:
    """As many bytes as an operand can have, between two pages that nobody may touch."""

    def __init__(self, size):
        size = -(-size // PAGE) * PAGE
        self.map = mmap.mmap(-1, size + 2 * PAGE)
        self._bytes = (ctypes.c_char * len(self.map)).from_buffer(self.map)
        self.begin = ctypes.addressof(self._bytes) + PAGE
        self.end = self.begin + size
        for guard in (self.begin - PAGE, self.end):
            if LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):  # PROT_NONE
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, size, at_end):
        """The address of so many bytes, against one of the two pages."""
        return self.end - size if at_end else self.begin

    def clear(self):
        """Nothing to give back."""


class Heap:
    """The same of calloc's memory, which valgrind guards: each operand has exactly what it needs, zeros."""

    def __init__(self, size):
        self._addresses = []

    def place(self, size, at_end):
        """The address of so many bytes."""
        self._addresses.append(LIBC.calloc(1, size))
        return self._addresses[-1]

    def clear(self):
        """Frees them."""
        for address in self._addresses:
            LIBC.free(address)
        self._addresses.clear()


def load():
    """The extension, without the package around it."""
    folders = importlib.util.find_spec("fusednorm").submodule_search_locations  # two of an editable install
    (file,) = [f for folder in folders for f in Path(folder).glob("_cpu.*") if f.suffix in (".so", ".pyd")]
    spec = importlib.util.spec_from_file_location("fusednorm._cpu", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def isas(lib, text):
    """The names of the instruction sets that this processor runs, with their numbers."""
    return {text(lib.fn_isa_name(isa)).decode(): isa for isa in range(lib.fn_isa_count()) if lib.fn_isa_usable(isa)}


class Calls:
    """Makes calls whose operands lie in such memory. ``forward`` and ``backward`` say in words what they did."""

    def __init__(self, extension, memory, largest):
        self._extension = extension
        self.memory = {name: memory(largest) for name in FORWARD + BACKWARD + ROTATED + PRODUCT + ATTENTION}
        self._say = lambda call: None
        self.made = 0

    def verbose(self):
        self._say = lambda call: print(call, flush=True)

    def _place(self, operands, rows, hidden, gap, at_end):
        """Addresses of operands of these dtypes; 0 for those that are absent."""
        found = []
        for name, dtype in operands.items():
            count = {"weight": hidden, "dweight": hidden, "rstd": rows}.get(name, (rows - 1) * (hidden + gap) + hidden)
            found.append(self.memory[name].place(count * BYTES[dtype], at_end) if BYTES[dtype] else 0)
        return found

    def _run(self, operands, strides, **fields):
        """fn_run; ``operands``: dtypes and addresses, in the order of ``struct fn_call``; strides of the first ones."""
        call = self._extension.ffi.new("struct fn_call *", {"inner": fields["rows"], "heads": 1, **fields})
        for i, (dtype, address) in enumerate(operands):
            operand = call.operand[i]
            operand.kind, operand.address = NAMES.index(dtype), address
            operand.stride = strides if address else 0
        if self._extension.lib.fn_run(call):
            raise MemoryError
        self.made += 1
        for memory in self.memory.values():
            memory.clear()

    def forward(self, dtypes, rows, hidden, gap, flags, offset, in_place, at_end, threads=1):
        """A forward pass; ``dtypes``: of x, residual, weight and out."""
        x, residual, weight, out = dtypes
        accumulator = "float64" if x == "float64" else "float32"
        operands = dict(zip(FORWARD, (x, residual, weight, out, residual, accumulator), strict=True))
        self._say(f"forward {operands} {rows=} {hidden=} {gap=} {flags=} {offset=} {in_place=} {at_end=}")
        found = self._place(operands, rows, hidden, gap, at_end)
        if in_place:
            found[3] = found[0] if out == x else found[3]
            found[4] = found[1]
        fields = {"flags": flags, "eps": 1e-6, "weight_offset": offset, "threads": threads}
        self._run(zip(operands.values(), found, strict=True), hidden + gap, rows=rows, hidden=hidden, **fields)

    def backward(self, dtypes, wants_weight, rows, hidden, gap, offset, at_end, threads=1):
        """A backward pass; ``dtypes``: of dy, d_total, h, weight, dx and dresidual. The results' rows have no gaps."""
        dy, d_total, h, weight, dx, dresidual = dtypes
        wide = "float64" in dtypes
        dweight = weight if wants_weight else "none"
        given = {"dy": dy, "d_total": d_total, "h": h}
        made = {"rstd": "float64" if wide else "float32", "weight": weight}
        made |= {"dx": dx, "dresidual": dresidual, "dweight": dweight}
        self._say(f"backward {given | made} {rows=} {hidden=} {gap=} {offset=} {at_end=}")
        found = self._place(given, rows, hidden, gap, at_end) + self._place(made, rows, hidden, 0, at_end)
        operands = list(zip([*given.values(), *made.values()], found, strict=True))
        operands.insert(-1, ("none", 0))  # scratch of GPU kernels
        fields = {"pass": BACKWARD_PASS, "weight_offset": offset, "threads": threads}
        self._run(operands, hidden + gap, rows=rows, hidden=hidden, **fields)

    def rotated(self, dtypes, pairs, size, counts, rows, flags, products, at_end, in_place):
        """Heads of q and k; ``dtypes``: of q and k, of what is rotated, of their weights, and of the tables."""
        x, between, weight, table = dtypes
        about = f"{pairs=} {size=} {counts=} {rows=} {flags=} {products=} {at_end=} {in_place=}"
        self._say(f"rotated {dtypes} {about}")

        def place(name, elements, dtype):
            return self.memory[name].place(elements * BYTES[dtype], at_end) if BYTES[dtype] and elements else 0

        heads = []
        for name, count in zip("qk", counts, strict=True):
            lying = 0, count * size, size
            given = place(name, rows * count * size, x)
            out = given if in_place else place(f"{name}_out", rows * count * size, x)
            of_weight = (NAMES.index(weight), place(f"{name}_weight", size, weight), 0)
            rstd = place(f"{name}_rstd", rows * count, "float64" if x == "float64" else "float32")
            heads += [count, given, *lying, out, *lying, *of_weight, rstd]
        tables = [(NAMES.index(table), place(name, rows * pairs, table), 0, pairs) for name in ("cos", "sin")]
        call = struct.pack(
            "=11q2d38q",
            *(flags, NAMES.index(x), NAMES.index(x), NAMES.index(between), NAMES.index(products)),
            *(1, rows, rows, size, pairs, len(counts), 1e-6, 0.0, *itertools.chain(*tables), *(0,) * 4, *heads),
        )
        if self._extension.lib.fn_run_rotation(call):
            raise MemoryError
        self.made += 1
        for memory in self.memory.values():
            memory.clear()

    def product(self, dtypes, rows, columns, size, gap, at_end):
        """Rows times a weight; ``dtypes``: of x, weight, bias and out. Rows of x and out may have gaps."""
        self._say(f"product {dtypes} {rows=} {columns=} {size=} {gap=} {at_end=}")
        counts = (rows - 1) * (size + gap) + size, columns * size, columns, (rows - 1) * (columns + gap) + columns
        strides, operands = (size + gap, size, 0, columns + gap), []
        for name, dtype, count, stride in zip(PRODUCT, dtypes, counts, strides, strict=True):
            address = self.memory[name].place(count * BYTES[dtype], at_end) if BYTES[dtype] else 0
            operands += (NAMES.index(dtype), address, rows * stride, stride)
        numbers = 0, LINEAR, dtypes[0] == "float64", 1, rows, rows, size, 0, 0, 0, 0, columns
        if self._extension.lib.fn_run_declared(struct.pack("=12q128x16q384x", *numbers, *operands)):
            raise MemoryError
        self.made += 1
        for memory in self.memory.values():
            memory.clear()

    def attention(self, dtype, heads, queries, keys, size, size_of_values, holes, at_end):
        """Attention of one sequence, whose heads share one head of keys, with a mask."""
        self._say(f"attention {dtype} {heads=} {queries=} {keys=} {size=} {size_of_values=} {holes=} {at_end=}")
        counts = heads * queries * size, keys * size, keys * size_of_values, heads * queries * size_of_values
        rows, lengths = (queries, keys, keys, queries), (size, size, size_of_values, size_of_values)
        operands = []
        for name, count, in_head, length in zip(ATTENTION, counts, rows, lengths, strict=False):
            address = self.memory[name].place(count * BYTES[dtype], at_end)
            operands += (address, 0, in_head * length * BYTES[dtype], length * BYTES[dtype])
        mask = self.memory["mask"].place(queries * keys, at_end)
        ctypes.memset(mask, 1, queries * keys)
        if holes:
            ctypes.memset(mask, 0, queries * keys // 2)
        numbers = (
            0,
            ATTENDED,
            0,
            1,
            NAMES.index(dtype),
            1,
            heads,
            1,
            size,
            size_of_values,
            queries,
            keys,
            0,
            queries,
            1,
            0,
        )
        packed = struct.pack("=16q2d31q", *numbers, 1.0, 0.0, *operands, mask, 0, 0, keys, 1, *(0,) * 10)
        if self._extension.lib.fn_run_declared(packed):
            raise MemoryError
        self.made += 1
        for memory in self.memory.values():
            memory.clear()


BACKWARD_PASS = 1  # FN_BACKWARD
LINEAR, ATTENDED = 8, 9  # FN_LINEAR, FN_ATTENTION
FORWARD = ("x", "residual", "weight", "out", "residual_out", "rstd")
PRODUCT = ("product_x", "product_weight", "product_bias", "product_out")
ATTENTION = ("q", "keys", "values", "sums", "mask")
BACKWARD = ("dy", "d_total", "h", "rstd", "weight", "dx", "dresidual", "dweight")
ROTATED = (*(f"{name}{what}" for name in "qk" for what in ("", "_out", "_weight", "_rstd")), "cos", "sin")


def every_product(calls, every):
    """Rows and columns of whole tiles and of others, of each size."""
    random = Random(0)
    turn = itertools.count()
    wide = [("float64", *rest) for rest in itertools.product(NAMES[1:], NAMES, NAMES[1:])]
    for size in SIZES:
        for dtypes in [*itertools.product(NARROW, NARROW, ("none", *NARROW), NARROW), *random.sample(wide, 4)]:
            for at_end in (True, False):
                rows, columns = random.choice((1, 2, 3, 4, 5, 9, 70)), random.choice((1, 2, 3, 5, 6, 7, 49))
                shape = rows, columns, size, random.choice(GAPS)
                if next(turn) % every == 0:
                    calls.product(dtypes, *shape, at_end)


def every_attention(calls, every):
    """One query and several, around units and blocks."""
    random = Random(0)
    for turn, (size, dtype, at_end) in enumerate(
        itertools.product((1, 5, 33, 64, 80, 128, 256), NARROW, (True, False))
    ):
        heads, queries, keys = random.choice((1, 2, 3)), random.choice((1, 2, 9, 40)), random.choice((1, 7, 129, 300))
        if turn % every == 0:
            calls.attention(dtype, heads, queries, keys, size, random.choice((size, 1, 33, 100)), turn % 3 == 0, at_end)


def every_call(calls, every):
    """All of them for one instruction set."""
    random = Random(0)
    turn = itertools.count()
    forward = list(itertools.product(NARROW, ("none", *NARROW), ("none", *NARROW), NARROW))
    forward += [("float64", *rest) for rest in itertools.product(NAMES, NAMES, NAMES[1:])]
    given = (NARROW, ("none", *NARROW), NARROW, ("none", *NARROW), ("none", *NARROW), ("none", *NARROW))
    backward = list(itertools.product(*given))
    backward_f64 = list(itertools.product(*(["float64" if "none" not in g else "none", *NARROW] for g in given)))
    # Rows of one dtype take other code than mixed ones: each with every size.
    alike = [(t, total, t, weight, t, "none") for t in NAMES[1:] for total in ("none", t) for weight in ("none", t)]
    for hidden in SIZES:
        for dtypes in forward:
            for at_end in (True, False):
                shape = random.choice(ROWS), hidden, random.choice(GAPS)
                flags, offset, in_place = random.randrange(4), random.choice((0.0, 1.0)), random.random() < 0.3
                if next(turn) % every == 0:
                    calls.forward(dtypes, *shape, flags, offset, in_place, at_end)
        mixed = random.sample(backward, 60) + random.sample(backward_f64, 20)
        for dtypes in alike + mixed:
            for at_end in (True, False):
                shape = random.choice(ROWS), hidden, random.choice(GAPS)
                wants_weight, offset = random.random() < 0.5, random.choice((0.0, 1.0))
                if next(turn) % every == 0:
                    calls.backward(dtypes, wants_weight, *shape, offset, at_end)


def every_rotation(calls, every):
    """Heads of each size that is not too long for one, rotated in part and as a whole."""
    random = Random(0)
    turn = itertools.count()
    for size in (n for n in SIZES if 2 <= n <= 512):
        for x, table in itertools.product(NAMES[1:], NAMES[1:]):
            for normalised, interleaved, at_end in itertools.product((0, 1), (0, 4), (True, False)):
                between = random.choice((x, "float32")) if normalised and x != "float64" else x
                weight = random.choice(("none", x, "float32")) if normalised else "none"
                counts, rows = (random.choice((1, 3)), random.choice((1, 2))), random.choice((1, 5))
                products, in_place = random.choice(("none", between)), random.random() < 0.5
                pairs = random.choice((size // 2, random.randrange(1, size // 2 + 1)))
                given = (x, between, weight, table), pairs, size, counts, rows, normalised | interleaved
                if next(turn) % every == 0:
                    calls.rotated(*given, products, at_end, in_place)


def large_calls(calls):
    """Results of 8 MiB and more, which go past the caches where their rows are whole cache lines."""
    for dtype in NARROW:
        hidden = 1040  # tails of half a unit and less
        rows = (8 << 20) // (hidden * BYTES[dtype]) + 3
        for at_end in (True, False):
            for residual in ("none", dtype):
                calls.forward((dtype, residual, dtype, dtype), rows, hidden, 0, 1, 0.0, False, at_end)
            calls.backward((dtype, dtype, dtype, dtype, dtype, "none"), True, rows, hidden, 0, 0.0, at_end)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", help="one instruction set; default: all that this processor runs")
    parser.add_argument("--every", type=int, default=1, help="make one call in so many")
    parser.add_argument("--heap", action="store_true", help="memory from calloc, for valgrind")
    parser.add_argument("--verbose", action="store_true", help="print each call before it is made")
    arguments = parser.parse_args()
    extension = load()
    usable = isas(extension.lib, extension.ffi.string)
    largest = 9 * 1024 * 1024 + PAGE
    calls = Calls(extension, Heap if arguments.heap else Guarded, largest)
    if arguments.verbose:
        calls.verbose()
    for name in [arguments.isa] if arguments.isa else usable:
        extension.lib.fn_use_isa(usable[name])
        every_call(calls, arguments.every)
        every_rotation(calls, arguments.every)
        every_product(calls, arguments.every)
        every_attention(calls, arguments.every)
        if not arguments.heap:
            large_calls(calls)
    print(f"{calls.made} calls")


if __name__ == "__main__":
    main()
