"""Products in C: where its blocks end, several threads, long rows, and calls that are interrupted; also of int8."""

import ctypes
import itertools
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from surroundings import interrupted, takes_interrupts, threads

import fusednorm
from fusednorm.backends import cpu
from fusednorm.conformance.cases import differing
from fusednorm.reference import products

#: Around a sum, the elements that stay in the first cache, short rows, and the shortest rows with six columns at once;
#: and rows and columns around tiles and blocks.
SIZES = (1, 15, 16, 17, 639, 640, 641, 656, 1281, 2048, 2049, 8193)
ROWS = (1, 2, 3, 4, 5, 63, 64, 65, 130)
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 47, 48, 49, 97)


def operands(rows, columns, size, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(rows + columns + size)
    x, weight = (torch.randn(count, size, generator=generator) for count in (rows, columns))
    return x.to(dtype), weight.to(weight_dtype), torch.randn(columns, generator=generator).to(dtype)


def shapes(turn):
    """Each size with some rows and columns, and rows with columns of a short one; other ones in another turn."""
    few = [(rows, columns) for rows, columns in itertools.product(ROWS, COLUMNS) if rows * columns < 700]
    for place, size in enumerate(SIZES):
        for rows, columns in few[(place + turn) % 12 :: 12]:
            if rows * columns * size < 1 << 18:
                yield rows, columns, size
    for rows, columns in [*itertools.product(ROWS, COLUMNS)][turn :: len(PAIRS)]:
        yield rows, columns, 33
    yield ((1, 13, 40_000), (2, 3, 40_000), (5, 7, 40_000))[turn % 3]


PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
)


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: " ".join(str(dtype)[6:] for dtype in pair))
def test_blocks(dtypes):
    """On one thread or two, with a bias or without."""
    for place, shape in enumerate(shapes(PAIRS.index(dtypes))):
        x, weight, bias = operands(*shape, *dtypes)
        given, count = (bias, None)[place % 2], 1 + place // 2 % 2
        (expected,) = products.linear(x, weight, given, None)
        for isa in cpu.variants():
            with cpu.use_variant(isa), threads(count):
                found = fusednorm.linear(x, weight, given)
            assert not differing(found, expected).any(), (isa, count, shape, given is None)


@pytest.mark.parametrize("isa", cpu.variants())
def test_products_that_float_does_not_hold(isa):
    """Portable kernels have no fused multiply-add: they take another way where a product is subnormal, or too large."""
    generator = torch.Generator().manual_seed(0)
    with cpu.use_variant(isa):
        for exponents in ((-70, -60), (-140, -120), (60, 68), (-140, 127)):
            powers = [2.0 ** torch.randint(*exponents, (count, 50), generator=generator).double() for count in (5, 8)]
            x, weight = ((torch.randn(p.shape, generator=generator) * p).bfloat16() for p in powers)
            x[1, 3], weight[2, 7], x[2, 5], weight[4, 9] = float("nan"), float("inf"), 0.0, 0.0
            (expected,) = products.linear(x, weight, None, torch.float32)
            for rows in (1, 2, 5):
                found = fusednorm.linear(x[:rows], weight, out_dtype=torch.float32)
                assert not differing(found, expected[:rows]).any(), (exponents, rows)


def test_several_threads_of_python():
    calls = [
        operands(rows, 300, size, torch.bfloat16, torch.bfloat16) for rows, size in ((1, 700), (3, 640), (70, 100))
    ]
    expected = [fusednorm.linear(*call) for call in calls]
    wrong = []

    def make(place):
        for _ in range(20):
            found = fusednorm.linear(*calls[place])
            if differing(found, expected[place]).any():
                wrong.append(place)

    running = [threading.Thread(target=make, args=(place,)) for place in (0, 1, 2, 0)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_memory_is_given_back():
    """A weight that is freed while no call runs is not read again: results do not refer to operands."""
    x, weight, bias = operands(2, 50, 64, torch.float32, torch.float32)
    expected = products.linear(x, weight, bias, None)[0]
    found = fusednorm.linear(x, weight, bias)
    weight.fill_(float("nan"))
    del weight
    assert not differing(found, expected).any()


@takes_interrupts
def test_a_long_product_is_interrupted():
    """It is made in parts, of columns: those after the interrupt are not computed."""
    x, weight = torch.ones(2048, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bfloat16)
    out = torch.full((2048, 6000), -1.0, dtype=torch.bfloat16)
    with interrupted(after=0.02):
        fusednorm.linear(x, weight.expand(6000, 4096), out=out)
    assert (out[:, -1] == -1).all()


@takes_interrupts
def test_a_long_product_of_int8_is_interrupted():
    """The same."""
    q, weight = torch.ones(2048, 8192, dtype=torch.int8), torch.ones(1, 8192, dtype=torch.int8).expand(3000, 8192)
    out = torch.full((2048, 3000), -1.0)
    with interrupted(after=0.02):
        fusednorm.int8_linear(q, torch.ones(2048, 1), weight, torch.ones(3000), out=out)
    assert (out[:, -1] == -1).all()


class Dots(ctypes.Structure):
    """fn_int8_dots."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("take_row", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)),
        (
            "dots",
            ctypes.CFUNCTYPE(
                *(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p),
                *(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
            ),
        ),
        ("offset", ctypes.c_int64),
    )


CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    not (CPUINFO.exists() and "avx512_vnni" in CPUINFO.read_text() and shutil.which("cc")),
    reason="takes a C compiler, and a processor that has AVX-VNNI's instruction, perhaps in AVX-512's encoding",
)
def test_sums_of_avx_vnni(tmp_path):
    """The code for AVX-VNNI, whose instruction is encoded as AVX-512's, which is the same: few processors have both."""
    cpu_folder, assembly, library = Path(__file__).parents[2] / "cpu", tmp_path / "dots.s", tmp_path / "dots.so"
    compile_it = ("cc", "-std=gnu11", "-O2", "-fPIC", f"-I{cpu_folder}")
    subprocess.run([*compile_it, "-S", cpu_folder / "variants/int8_dots.c", "-o", assembly], check=True)
    text = assembly.read_text()
    assert "{vex} vpdpbusd" in text
    assembly.write_text(text.replace("{vex} vpdpbusd", "vpdpbusd"))
    features = tmp_path / "features.c"
    features.write_text("int fn_has_avx_vnni(void) { return 1; }\nint fn_has_avx512_vnni(void) { return 1; }\n")
    subprocess.run([*compile_it, "-shared", assembly, features, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fn_int8_dots_of.restype = ctypes.POINTER(Dots)
    dots = loaded.fn_int8_dots_of(b"avx2").contents
    assert (dots.size, dots.offset) == (1, 128)
    generator = torch.Generator().manual_seed(0)
    for rows, columns, size in ((1, 1, 1), (1, 5, 31), (2, 4, 32), (3, 7, 65), (5, 9, 640), (4, 6, 4100)):
        x, weight = (torch.randint(-128, 128, (n, size), generator=generator).to(torch.int8) for n in (rows, columns))
        x[0], weight[0] = -128, 127
        room, sums = (
            torch.full((rows, -(-size // 64) * 64), 77).to(torch.int8),
            torch.zeros(rows, columns, dtype=torch.int32),
        )
        for row, place in zip(x, room, strict=True):
            dots.take_row(row.data_ptr(), size, place.data_ptr())
        dots.dots(
            rows, room.data_ptr(), room.stride(0), columns, weight.data_ptr(), size, size, sums.data_ptr(), columns
        )
        expected = x.double() @ weight.double().t() + 128 * x.double().sum(-1, keepdim=True)
        assert torch.equal(sums.double(), expected), (rows, columns, size)


def test_int8_products_in_several_threads():
    """And of several callers at once, each with rows of its own."""
    q = torch.randint(-128, 128, (4, 70, 300), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weight = torch.randint(-128, 128, (500, 300), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scale, weight_scale = torch.rand(70, 1), torch.rand(500)
    exact = [(rows.double() @ weight.double().t()).float() * weight_scale * scale for rows in q]
    for isa in cpu.variants():
        for count in (1, 2, 5):
            with cpu.use_variant(isa), threads(count):
                assert fusednorm.int8_linear(q[0], scale, weight, weight_scale).equal(exact[0]), (isa, count)
        found = [None] * len(q)

        def work(i, found=found):
            found[i] = [fusednorm.int8_linear(q[i], scale, weight, weight_scale) for _ in range(20)]

        with cpu.use_variant(isa):
            workers = [threading.Thread(target=work, args=(i,)) for i in range(len(q))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert all(y.equal(wanted) for several, wanted in zip(found, exact, strict=True) for y in several), isa
