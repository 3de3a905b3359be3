"""The machine that executes PTX (machines/ptx): it computes as the PTX ISA says, and sees what a GPU does not forgive.

Then, of each kernel of a GPU backend, mutants of its PTX: what only an execution of it can catch.
"""

import ctypes
import os
import re
import struct

import numpy
import pytest
import torch

import fusednorm
from fusednorm.backends import cuda
from fusednorm.backends.triton import gpu as triton_gpu
from fusednorm.conformance import oracle_quantized
from fusednorm.conformance.cases import BF16, F16, F32, Case, differing, operands
from fusednorm.conformance.test_int8_linear import tensors
from fusednorm.reference import norm as reference

if "FUSEDNORM_EMULATED_SM" not in os.environ:
    pytest.skip("takes tests/machines/emulation/ptx", allow_module_level=True)

from ptx import machine, text
from ptx.launch import Attribute, Config
from ptx.triton import have_context

BACKEND = os.environ["FUSEDNORM_BACKEND"]

#: The start of every snippet: what lane it is, and the addresses of its elements of `a`, `b` and `d`, of 8 bytes each.
BEGIN = """
.visible .entry snippet(.param .u64 a, .param .u64 b, .param .u64 d)
{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<9>;
    .reg .f32 %f<9>;
    .reg .b64 %a, %b, %d, %at, %x, %y, %z;
    .shared .align 8 .b8 memory[512];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %at, %r0, 8;
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %d, [d];
    add.s64 %a, %a, %at;
    add.s64 %b, %b, %at;
    add.s64 %d, %d, %at;
"""


def run(body, a, b=None, threads=None, attributes=(), shared=0):
    """Runs a snippet with a thread per element; returns what it stores at `d`, as integers of 64 bits."""
    address, _ = machine.load(f"{BEGIN}{body}\nret;\n}}", "snippet")
    d = torch.zeros_like(a)
    given = (Attribute * max(len(attributes), 1))(*(Attribute(number, value=value) for number, value in attributes))
    config = Config(1, 1, 1, threads or a.numel(), 1, 1, shared, None, ctypes.addressof(given), len(attributes))
    if any(number == 4 for number, _ in attributes):
        config.grid_x = 2
    pointers = struct.pack("3Q", a.data_ptr(), (a if b is None else b).data_ptr(), d.data_ptr())
    arguments = ctypes.byref(ctypes.c_char_p(pointers))
    library = machine.library()
    have_context()
    if library.launch_kernel_ex(ctypes.byref(config), ctypes.c_void_p(address), arguments, None):
        raise RuntimeError(library.last_fault().decode())
    return d


LOAD = "ld.global.u64 %x, [%a];\nld.global.u64 %y, [%b];\n"
STORE = "st.global.u64 [%d], %z;\n"


def bits(values, dtype, integer):
    """Values as 64-bit integers that hold their bits."""
    return values.to(dtype).view(integer).long() & (2 ** (8 * integer.itemsize) - 1)


def of_bits(found, dtype, integer):
    return found.to(integer).view(dtype)


def in_parts(body, *given):
    """The same for any number of elements, a block's threads at a time."""
    parts = [torch.nn.functional.pad(t, (0, -len(t) % 1024)).split(1024) for t in given]
    return torch.cat([run(body, *part) for part in zip(*parts, strict=True)])[: len(given[0])]


def floats(count):
    """Any bits, and those around what 16 bits can hold."""
    generator = torch.Generator().manual_seed(count)
    anything = torch.randint(0, 2**32, (count,), generator=generator)
    near = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-26, 17, (count,), generator=generator)
    ties = bits(near, F32, torch.int32) & ~0x1FFF | 0x1000
    return torch.cat([anything, bits(near, F32, torch.int32), ties, ties & ~0xFFFF | 0x8000])


def same(found, expected):
    return bool((found.isnan() & expected.isnan() | (found == expected)).all())


@pytest.mark.parametrize(("dtype", "name"), [(F16, "f16"), (BF16, "bf16")])
def test_conversions(dtype, name):
    """Every number of 16 bits, widened; and floats and doubles, rounded to nearest even once, alone and in pairs."""
    every = torch.arange(65536)
    widened = in_parts(LOAD + f"cvt.u16.u64 %h0, %x; cvt.f32.{name} %f0, %h0; mov.b64 %z, {{%f0, %f0}};" + STORE, every)
    assert same(of_bits(widened & 0xFFFFFFFF, F32, torch.int32), of_bits(every, dtype, torch.int16).float())
    given = floats(4096)
    value = of_bits(given, F32, torch.int32)
    body = f"cvt.u32.u64 %r1, %x; mov.b32 %f0, %r1; cvt.rn.{name}.f32 %h0, %f0; cvt.u64.u16 %z, %h0;"
    assert same(of_bits(in_parts(LOAD + body + STORE, given), dtype, torch.int16), value.to(dtype))
    other = given.flip(0)
    body = "cvt.u32.u64 %r1, %x; mov.b32 %f0, %r1; cvt.u32.u64 %r2, %y; mov.b32 %f1, %r2;"
    pair = in_parts(f"{LOAD}{body} cvt.rn.{name}x2.f32 %r3, %f0, %f1; cvt.u64.u32 %z, %r3;{STORE}", given, other)
    assert same(of_bits(pair >> 16, dtype, torch.int16), value.to(dtype))
    assert same(of_bits(pair & 0xFFFF, dtype, torch.int16), of_bits(other, F32, torch.int32).to(dtype))
    doubles = value.double() * (1 + 2.0**-40)  # beyond a tie by less than a float has
    narrowed = in_parts(f"{LOAD}cvt.rn.{name}.f64 %h0, %x; cvt.u64.u16 %z, %h0;{STORE}", doubles.view(torch.int64))
    assert same(of_bits(narrowed, dtype, torch.int16), reference.rounded(doubles, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_to_8_bits(dtype):
    """Two floats, rounded to nearest even and cut to the range; a NaN stays one, whose code is anyone's choice."""
    table = torch.from_numpy(oracle_quantized.numbers(dtype))
    points = torch.cat(
        (table, (table[1:] + table[:-1]) / 2, torch.tensor([1e-3 * table[1], 1.1 * table[-1], torch.inf]))
    )
    points = points.float()
    near = [points, points.nextafter(points * 2 + 1), points.nextafter(points * 0 - 1)]
    value = torch.cat((*near, *(-p for p in near), torch.tensor([torch.nan, -torch.nan])))
    given = torch.cat((bits(value, F32, torch.int32), floats(4096)))
    value = of_bits(given, F32, torch.int32)
    most = table[-1].item()
    with numpy.errstate(invalid="ignore"):  # there are NaN
        codes = torch.from_numpy(oracle_quantized.float8(value.clamp(-most, most).numpy(), dtype)).long()
    nans = torch.where(value.isnan(), 3 if dtype == torch.float8_e5m2 else 0, 0)  # bits that may differ
    name = str(dtype)[13:17]
    body = "cvt.u32.u64 %r1, %x; mov.b32 %f0, %r1; cvt.u32.u64 %r2, %y; mov.b32 %f1, %r2;"
    body += f"cvt.rn.satfinite.{name}x2.f32 %h0, %f0, %f1; cvt.u64.u16 %z, %h0;"
    pair = in_parts(LOAD + body + STORE, given, given.flip(0))
    for found, code, nan in ((pair >> 8, codes, nans), (pair & 0xFF, codes.flip(0), nans.flip(0))):
        sign = torch.where(code == 0x7F, 0x80, 0)
        assert torch.equal((found | nan) & ~sign, code)
        assert not ((found & 0x7F == 0x7C) & (code == 0x7F)).any()


def test_floats_to_integers():
    """To the nearest, ties to even, and towards 0; what an integer cannot hold becomes the nearest one, and a NaN 0."""
    values = torch.tensor([0.5, 1.5, -2.5, 2.75, -2.75, 2.0**31, -(2.0**31), 3e9, -3e9, -torch.inf, torch.nan])
    for how, expected in (("rni", [0, 2, -2, 3, -3]), ("rzi", [0, 1, -2, 2, -2])):
        body = f"cvt.u32.u64 %r1, %x; mov.b32 %f0, %r1; cvt.{how}.s32.f32 %r2, %f0; cvt.s64.s32 %z, %r2;"
        found = in_parts(LOAD + body + STORE, bits(values, F32, torch.int32)).tolist()
        assert found == [*expected, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), -(2**31), 0], how


@pytest.mark.parametrize(("dtype", "name", "one"), [(F16, "f16", 0x3C003C00), (BF16, "bf16", 0x3F803F80)])
def test_operations_of_16_bits(dtype, name, one):
    """Rounded once: numbers whose sum a double holds exactly, so that it says what is right."""
    a, b = ((torch.randn(20_000) * 2.0 ** torch.randint(-10, 10, (20_000,))).to(dtype) for _ in range(2))
    given = [bits(t, dtype, torch.int16) for t in (a, b)]
    total, difference, product = (reference.rounded(t, dtype) for t in (a.double() + b, a.double() - b, a.double() * b))
    for operation, expected in (
        (f"add.rn.{name}x2 %r3, %r1, %r2;", total),
        (f"mov.b32 %r4, {one}; fma.rn.{name}x2 %r3, %r1, %r4, %r2;", total),
        (f"sub.rn.{name}x2 %r3, %r1, %r2;", difference),
        (f"mul.rn.{name}x2 %r3, %r1, %r2;", product),
        (f"cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; mul.rn.{name} %h3, %h1, %h2; cvt.u32.u16 %r3, %h3;", product),
    ):
        body = f"cvt.u32.u64 %r1, %x; cvt.u32.u64 %r2, %y; {operation} cvt.u64.u32 %z, %r3;"
        assert same(of_bits(in_parts(LOAD + body + STORE, *given) & 0xFFFF, dtype, torch.int16), expected), operation
    body = f"cvt.u16.u64 %h0, %x; cvt.u32.u64 %r2, %y; shl.b32 %r2, %r2, 16; add.rn.f32.{name} %r3, %h0, %r2;"
    if dtype == BF16:
        found = in_parts(f"{LOAD}{body} cvt.u64.u32 %z, %r3;{STORE}", *given)
        assert same(of_bits(found, F32, torch.int32), a.float() + b.float())


@pytest.mark.parametrize(
    ("instruction", "operands", "expected"),
    [
        ("add.s32", (2**31 - 1, 1), -(2**31)),
        ("sub.s16", (-(2**15), 1), 2**15 - 1),
        ("mul.lo.s32", (123_456_789, -987_654_321), 67_153_019),
        ("mul.hi.u32", (2**32 - 1, 2**32 - 1), 2**32 - 2),
        ("mul.wide.s32", (-3, 5), -15),
        ("mul.wide.u32", (2**32 - 3, 5), 5 * (2**32 - 3)),
        ("mad.lo.s32", (-7, 6, 5), -37),
        ("mad.wide.s32", (-7, 6, 2**40), 2**40 - 42),
        ("div.s32", (-7, 2), -3),
        ("rem.s32", (-7, 2), -1),
        ("div.u32", (2**32 - 7, 2), 2**31 - 4),
        ("min.s32", (-1, 1), -1),
        ("min.u32", (-1, 1), 1),
        ("max.s64", (-1, -65), -1),
        ("neg.s32", (5,), -5),
        ("not.b32", (0,), -1),
        ("shl.b32", (1, 31), -(2**31)),
        ("shl.b32", (1, 32), 0),
        ("shr.s32", (-8, 1), -4),
        ("shr.s32", (-8, 40), -1),
        ("shr.u32", (-8, 28), 15),
        ("shr.u32", (-8, 32), 0),
        ("bfe.u32", (0xABCD, 4, 8), 0xBC),
        ("bfe.s32", (0xABCD, 4, 8), 0xBC - 256),
        ("bfe.s32", (0xABCD, 5, 0), 0),
        ("bfi.b32", (0xF, 0, 5, 27), 0xF << 5),
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("prmt.b32", (0x80, 0, 0x8888), -1),
        ("cvt.s64.s32", (2**32 - 5,), -5),
        ("cvt.u64.u32", (-5,), 2**32 - 5),
        ("cvt.u16.u32", (0x12345,), 0x2345),
        ("selp.b32", (3, 4, 1), 3),
    ],
)
def test_integers(instruction, operands, expected):
    """What the PTX ISA says of signs, of shifts by more than there is, of fields of no length."""
    wide = instruction.endswith("64") or ".wide" in instruction or instruction.startswith(("cvt.s64", "cvt.u64"))
    given = [f"{operand}" for operand in operands]
    if instruction.startswith("selp"):
        given[2] = "%p0"
    found = run(f"setp.eq.u32 %p0, 1, 1; {instruction} %z, {', '.join(given)};{STORE}", torch.zeros(32).long())
    assert len(set(found.tolist())) == 1
    mask = 2**64 - 1 if wide else 2 ** int(re.search(r"\d+", instruction.split(".")[-1])[0]) - 1
    mask = 0xFFFF if instruction == "cvt.u16.u32" else mask
    assert found[0].item() & mask == expected & mask


@pytest.mark.parametrize(("dtype", "name"), [(F16, "f16"), (BF16, "bf16")])
def test_comparisons_of_16_bits(dtype, name):
    values = torch.tensor([-80.0, -80.5, 0.0, -0.0, torch.nan, torch.inf], dtype=dtype)
    a, b = values.repeat_interleave(6), values.repeat(6)

    def num(a, b):
        return ~(a.isnan() | b.isnan())

    signs = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "num": num}
    signs["nan"] = lambda a, b: ~num(a, b)
    for sign, function in signs.items():
        for unordered in ("", "u") if sign in ("lt", "le", "gt", "ge") else ("",):  # true where an operand is a NaN
            body = "cvt.u16.u64 %h0, %x; cvt.u16.u64 %h1, %y; mov.u64 %z, 0;"
            body += f"setp.{sign}{unordered}.{name} %p0, %h0, %h1; selp.b64 %z, 1, 0, %p0;"
            found = in_parts(LOAD + body + STORE, *(bits(t, dtype, torch.int16) for t in (a, b))).bool()
            expected = function(a, b) | (a.isnan() | b.isnan() if unordered else False)
            assert torch.equal(found, expected), (sign, unordered)
            body = "cvt.u32.u64 %r1, %x; cvt.u32.u64 %r2, %y; mov.u64 %x, 0; mov.u64 %y, 0;"
            body += f"setp.{sign}{unordered}.{name}x2 %p0|%p1, %r1, %r2; selp.b64 %x, 1, 0, %p0;"
            body += "selp.b64 %y, 2, 0, %p1; or.b64 %z, %x, %y;"
            low, high = (bits(t, dtype, torch.int16) for t in (a, b)), (bits(t, dtype, torch.int16) for t in (b, a))
            both = in_parts(LOAD + body + STORE, *(x | y << 16 for x, y in zip(low, high, strict=True)))
            reverse = function(b, a) | (a.isnan() | b.isnan() if unordered else False)
            assert torch.equal(both, expected.long() + 2 * reverse), (sign, unordered)


def test_the_lesser_and_the_greater():
    """The number where one of two is a NaN, or with .NaN the canonical NaN; -0 is less than +0."""
    a = torch.tensor([1.5, -1.5, torch.nan, 2.0, torch.nan, -0.0, 0.0, torch.inf])
    b = torch.tensor([2.5, -torch.inf, 3.0, torch.nan, torch.nan, 0.0, -0.0, 4.0])
    lesser = torch.tensor([1.5, -torch.inf, 3.0, 2.0, torch.nan, -0.0, -0.0, 4.0])
    greater = torch.tensor([2.5, -1.5, 3.0, 2.0, torch.nan, 0.0, 0.0, torch.inf])
    neither = a.isnan() | b.isnan()
    kept = (torch.where(neither, torch.nan, t) for t in (lesser, greater))
    named = zip(("min", "max", "min.NaN", "max.NaN"), (lesser, greater, *kept), strict=True)
    for name, expected in named:
        body = "cvt.u32.u64 %r1, %x; mov.b32 %f0, %r1; cvt.u32.u64 %r2, %y; mov.b32 %f1, %r2;"
        body += f"{name}.f32 %f2, %f0, %f1; mov.b32 %r3, %f2; cvt.u64.u32 %z, %r3;"
        found = in_parts(LOAD + body + STORE, bits(a, F32, torch.int32), bits(b, F32, torch.int32))
        found = of_bits(found, F32, torch.int32)
        assert same(found, expected)
        assert (found.signbit() == expected.signbit()).all()
        assert ".NaN" not in name or set(found[neither].view(torch.int32).tolist()) == {0x7FFFFFFF}


def test_shuffles():
    lanes = torch.arange(32)
    for how, by, clamp, expected in (
        ("bfly", 5, 31, lanes ^ 5),
        ("idx", 9, 31, torch.full((32,), 9)),
        ("up", 3, 0, torch.where(lanes < 3, lanes, lanes - 3)),
        ("down", 3, 31, torch.where(lanes > 28, lanes, lanes + 3)),
        ("idx", 9, 0x1807, torch.tensor([lane & 24 | 1 for lane in range(32)])),  # segments of 8 lanes
    ):
        body = f"shfl.sync.{how}.b32 %r1|%p1, %r0, {by}, {clamp}, -1; cvt.u64.u32 %z, %r1;"
        assert run(body + STORE, lanes).tolist() == expected.tolist(), how


def test_the_sum_and_the_greatest_of_lanes():
    """As signed numbers, of the lanes of a mask."""
    values = (torch.arange(32) * 37 + 5) % 32 - 20
    body = "cvt.u32.u64 %r1, %x; redux.sync.max.s32 %r2, %r1, -1; cvt.s64.s32 %z, %r2;"
    assert run(LOAD + body + STORE, values).tolist() == [11] * 32
    halves = "setp.gt.u32 %p0, %r0, 15; selp.b32 %r3, 4294901760, 65535, %p0; "
    body = body.replace("-1;", "%r3;")
    expected = [values[:16].max().item()] * 16 + [values[16:].max().item()] * 16
    assert run(LOAD + halves + body + STORE, values - 20).tolist() == [value - 20 for value in expected]
    sums = run(LOAD + halves + body.replace("max", "add") + STORE, values)
    assert sums.tolist() == [values[:16].sum().item()] * 16 + [values[16:].sum().item()] * 16


MMA = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"


def test_a_product_of_matrices():
    """16 x 32 and 32 x 8 numbers of int8 from the registers that the PTX ISA names; sums end where int32 ends."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, shape, generator=generator) for shape in ((16, 32), (32, 8)))
    c = torch.randint(-(2**31), 2**31, (16, 8), generator=generator)
    c[0], c[9] = 2**31 - 1, -(2**31)
    group, within = torch.arange(32) // 4, torch.arange(32) % 4
    bytes_of = torch.arange(4)

    def word(matrix, row, column):
        return ((matrix[row, column] & 0xFF) << 8 * bytes_of).sum(-1)

    def pair(low, high):
        return (low & 0xFFFFFFFF) | (high << 32)

    at = 4 * within[:, None] + bytes_of
    of_a = [word(a, group[:, None] + 8 * (r % 2), at + 16 * (r // 2)) for r in range(4)]
    of_b = [word(b, at + 16 * r, group[:, None]) for r in range(2)]
    of_c = [c[group + 8 * (r // 2), 2 * within + r % 2] for r in range(4)]
    first = torch.cat([pair(*of_a[:2]), pair(*of_a[2:]), pair(*of_b)])
    second = torch.cat([pair(*of_c[:2]), pair(*of_c[2:]), torch.zeros(32).long()])
    names = [f"%m{n}" for n in range(10)]
    body = ".reg .b32 " + ", ".join(names) + ";\n"
    for n, place in enumerate(("%a", "%a+256", "%a+512", "%b", "%b+256")):
        body += f"ld.global.u64 %x, [{place}];\nmov.b64 {{%m{2 * n}, %m{2 * n + 1}}}, %x;\n"
    a_words, b_words, c_words = ("{" + ", ".join(names[of]) + "}" for of in (slice(4), slice(4, 6), slice(6, 10)))
    body += f"{MMA} {c_words}, {a_words}, {b_words}, {c_words};\n"
    body += "mov.b64 %x, {%m6, %m7};\nmov.b64 %y, {%m8, %m9};\nst.global.u64 [%d], %x;\nst.global.u64 [%d+256], %y;\n"
    found = run(body, first, second, threads=32)
    expected = (c + a @ b).clamp(-(2**31), 2**31 - 1)
    for r, of_register in enumerate((found[:32], found[:32] >> 32, found[32:64], found[32:64] >> 32)):
        mine = expected[group + 8 * (r // 2), 2 * within + r % 2]
        assert torch.equal(of_register.to(torch.int32).long(), mine), r
    with pytest.raises(RuntimeError, match="a part of a warp"):
        run(body.replace(MMA, f"setp.gt.u32 %p0, %r0, 3;\n@%p0 {MMA}"), first, second, threads=32)


BEGIN_COPY = """
    mov.u32 %r1, memory;
    mul.lo.u32 %r2, %r0, 8;
    add.u32 %r1, %r1, %r2;
    setp.lt.u32 %p0, %r0, 20;
    selp.b32 %r3, 8, 0, %p0;
    cp.async.ca.shared.global [ %r1 + 0 ], [ %a + 0 ], 0x8, %r3;
    cp.async.commit_group;
"""


def test_copies_that_go_on_beside_the_program():
    """They are there after a wait, with zeros where nothing is read; before, what is there is undefined."""
    values = torch.arange(32) * 2**33 + 7
    of_others = "xor.b32 %r2, %r1, 8;\nld.shared.u64 %z, [%r2];\n"
    expected = torch.where(torch.arange(32) < 20, values, 0)
    body = BEGIN_COPY + "cp.async.wait_group 0;\nbar.sync 0;\n" + of_others + STORE
    assert run(body, values).tolist() == expected[torch.arange(32) ^ 1].tolist()
    early = run(BEGIN_COPY + "cp.async.wait_group 1;\nld.shared.u64 %z, [%r1];\n" + STORE, values)
    assert set(early.tolist()) == {-1}
    with pytest.raises(RuntimeError, match="reads what another writes"):
        run(BEGIN_COPY + "cp.async.wait_group 0;\n" + of_others + STORE, values)
    with pytest.raises(RuntimeError, match="a copy of a part"):
        run(BEGIN_COPY.replace("selp.b32 %r3, 8,", "selp.b32 %r3, 4,") + STORE, values)


def test_turned_matrices():
    """What is stored turned and loaded as it lies has rows in place of columns."""
    values = torch.arange(32) * 2 * 0x10001 + 0x10000  # a register has the elements 2 l and 2 l + 1 of a matrix
    body = "mov.u32 %r1, memory;\nmul.lo.u32 %r2, %r0, 16;\nadd.u32 %r1, %r1, %r2;\ncvt.u32.u64 %r3, %x;\n"
    body += "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r1], {%r3};\nbar.sync 0;\n"
    body += "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r1];\ncvt.u64.u32 %z, %r4;\n"
    found = run(LOAD + body + STORE, values)
    turned = torch.arange(64).view(8, 8).t().reshape(32, 2)
    assert torch.equal(found, turned[:, 0] | turned[:, 1] << 16)
    again = run(LOAD + body.replace("x1.shared", "x1.trans.shared") + STORE, values)
    assert torch.equal(again, values)


def test_lanes_that_part_meet_again():
    """Some take another way, some a loop of their own length, some end; those that are left exchange values."""
    body = """
        setp.gt.u32 %p0, %r0, 7;
        @%p0 bra OTHER;
        mov.u32 %r1, 0;
    AGAIN:
        add.s32 %r1, %r1, 3;
        setp.le.u32 %p1, %r1, %r0;
        @%p1 bra AGAIN;
        bra.uni MEET;
    OTHER:
        { .reg .b32 %r1x; add.s32 %r1x, %r0, 100; mov.b32 %r1, %r1x; }
    MEET:
        shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;
        setp.gt.u32 %p2, %r0, 15;
        @%p2 ret;
        shfl.sync.bfly.b32 %r2, %r2, 1, 31, 65535;
        cvt.u64.u32 %z, %r2;
    """
    first = [lane // 3 * 3 + 3 if lane < 8 else lane + 100 for lane in range(32)]
    expected = [first[lane ^ 9] if lane < 16 else 0 for lane in range(32)]
    assert run(body + STORE, torch.zeros(32).long()).tolist() == expected


def test_lanes_wait_for_those_that_come_from_behind():
    """Some lanes' way to a barrier, and to a shuffle, goes through instructions that stand behind it."""
    body = """
        mov.u32 %r1, 5;
        setp.gt.u32 %p0, %r0, 7;
        @%p0 bra FAR;
    MEET:
        bar.sync 0;
        shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;
        cvt.u64.u32 %z, %r2;
        st.global.u64 [%d], %z;
        ret;
    FAR:
        mov.u32 %r1, 9;
        bra.uni MEET;
    """
    expected = [5 if (lane ^ 8) < 8 else 9 for lane in range(32)]
    assert run(body, torch.zeros(32).long()).tolist() == expected


OWN = "mov.u64 %x, memory; add.s64 %x, %x, %at;\n"
OTHERS = "mov.u64 %y, memory; xor.b32 %r1, %r0, {}; mul.wide.u32 %z, %r1, 8; add.s64 %y, %y, %z;\n"

FAULTS = {
    "a barrier": (OWN + OTHERS.format(1) + "st.shared.u64 [%x], %at; ld.shared.u64 %z, [%y];", "no barrier between"),
    "a barrier before a second write": (
        OWN + OTHERS.format(1) + "st.shared.u64 [%x], %at; bar.sync 0; ld.shared.u64 %z, [%y]; st.shared.u64 [%x], 0;",
        "writes what another reads with no barrier",
    ),
    "two threads write": ("mov.u64 %x, memory; st.shared.u64 [%x], %at;", "two threads write to the same place"),
    "unwritten": (OWN + "ld.shared.u64 %z, [%x];", "shared memory is read that nobody wrote"),
    "outside": (OWN + "st.shared.u64 [%x+512], %at;", "outside of shared memory"),
    "misaligned": (OWN + "st.shared.u64 [%x+4], %at;", "no multiple of 8"),
    "a global race": ("ld.param.u64 %x, [d]; st.global.u64 [%x], %at;", "two threads write to the same place"),
    "a global write of what others read": (
        "ld.param.u64 %x, [a]; ld.global.u64 %z, [%x]; st.global.u64 [%a], %at;",
        "writes what another reads",
    ),
    "before its tensor": ("ld.param.u64 %x, [a]; ld.global.u64 %z, [%x+-8];", "outside of its tensor's memory"),
    "behind its tensor": ("ld.global.u64 %z, [%a+8];", "outside of its tensor's memory"),
    "misaligned global": ("ld.global.u64 %z, [%a+4];", "no multiple of 8"),
    "a parameter": ("ld.param.u64 %z, [d+8];", "a parameter that there is not"),
    "a lane's mask": ("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 65535;", "a lane is not in its own mask"),
    "lanes elsewhere": (
        "setp.gt.u32 %p0, %r0, 7; @%p0 bra OVER; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; OVER:",
        "lanes of the mask are missing",
    ),
    "a value of a lane elsewhere": (
        "setp.gt.u32 %p0, %r0, 7; @%p0 bra OVER; shfl.sync.idx.b32 %r1, %r0, 8, 31, 255; OVER:",
        "a lane that is not in the mask",
    ),
    "a barrier of some lanes": (
        "setp.gt.u32 %p0, %r0, 7; @%p0 bra OVER; bar.sync 0; OVER:",
        "a part of a warp is at a barrier",
    ),
    "a barrier of some warps": (
        "setp.gt.u32 %p0, %r0, 31; @%p0 ret; bar.sync 0;",
        "wait for others that have ended",
    ),
    "a barrier of the cluster twice": (
        "barrier.cluster.arrive.release.aligned; barrier.cluster.arrive.release.aligned;",
        "arrives twice",
    ),
    "no arrival": ("barrier.cluster.wait.acquire.aligned;", "has not arrived"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, capfd):
    body, message = FAULTS[fault]
    with pytest.raises(RuntimeError, match=message):
        run(body, torch.zeros(64).long())
    assert message in capfd.readouterr().err


def test_barriers_order():
    """What the faults above lack: the same accesses, of two warps, in order."""
    body = OWN + OTHERS.format(33) + "st.shared.u64 [%x], %at; bar.sync 0; ld.shared.u64 %z, [%y]; bar.sync 0;"
    found = run(body + "st.shared.u64 [%x], 0;" + STORE, torch.zeros(64).long())
    assert found.tolist() == [8 * (thread ^ 33) for thread in range(64)]


CLUSTER, EARLY = 4, 6


def test_clusters():
    """A block writes into the other's memory; without the second barrier that is a race."""
    body = """
        mov.u32 %r1, %cluster_ctarank;
        xor.b32 %r2, %r1, 1;
        mov.u64 %x, memory;
        add.s64 %x, %x, %at;
        cvt.u32.u64 %r3, %x;
        mapa.shared::cluster.u32 %r4, %r3, %r2;
        add.s32 %r5, %r1, 7;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        st.shared::cluster.u32 [%r4], %r5;
        barrier.cluster.arrive.release.aligned;
        {}
        ld.shared.u32 %r6, [%x];
        setp.eq.u32 %p0, %r1, 0;
        cvt.u64.u32 %z, %r6;
        @%p0 st.global.u64 [%d], %z;
        {}
    """
    wait = "barrier.cluster.wait.acquire.aligned;"
    found = run(body.format(wait, ""), torch.zeros(32).long(), attributes=[(CLUSTER, (2, 1, 1))])
    assert set(found.tolist()) == {8}
    with pytest.raises(RuntimeError, match=r"no barrier between|nobody wrote"):
        run(body.format("", wait), torch.zeros(32).long(), attributes=[(CLUSTER, (2, 1, 1))])


def test_a_kernel_that_begins_early_waits():
    early = [(EARLY, (1,))]
    with pytest.raises(RuntimeError, match="does not wait"):
        run(STORE, torch.zeros(32).long(), attributes=early)
    with pytest.raises(RuntimeError, match=r"before griddepcontrol\.wait"):
        run("ld.global.u64 %z, [%a]; griddepcontrol.wait;" + STORE, torch.zeros(32).long(), attributes=early)
    run("griddepcontrol.wait; ld.global.u64 %z, [%a];" + STORE, torch.zeros(32).long(), attributes=early)


def test_shared_memory_that_nobody_asked_for():
    with pytest.raises(RuntimeError, match="more shared memory than 48 KiB"):
        run(STORE, torch.zeros(32).long(), shared=48 * 1024)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("mul.f32 %f0, %f1, %f2;", "may fuse it"),
        ("add.f32 %f0, %f1, %f2;", "may fuse it"),
        ("fma.rn.f32 %f0, %f1, %f2, %f3;", "fuses a multiplication"),
        ("fma.rn.f64 %x, %x, %y, %z;", "fuses a multiplication"),
        ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", "fuses a multiplication"),
        ("mul.rn.ftz.f32 %f0, %f1, %f2;", "not exact"),
        ("rsqrt.approx.f32 %f0, %f1;", "not exact"),
        ("div.full.f32 %f0, %f1, %f2;", "not exact"),
        ("atom.global.add.u64 %x, [%d], %y;", "does not know|the operand"),
        ("bar.sync 1;", "another barrier"),
        ("ld.global.nc.u64 %z, [%a];", "does not know"),
    ],
)
def test_what_is_refused(instruction, message):
    with pytest.raises(text.RefusedError, match=message):
        run(instruction, torch.zeros(32).long())


#: Changes of a kernel's PTX, everywhere.
MUTANTS = {
    "a contraction": (r"\b(mul|add)\.rn\.(f32)", r"\1.\2"),
    "no barriers": (r"\bbar\.sync\s+0;", ""),
    "half of the lanes": (r"(shfl\.sync\.\w+\.b32[^;]*,)[^,;]+;", r"\1 65535;"),
    "the lane itself": (r"(shfl\.sync\.bfly\.b32[^;,]*,[^;,]*,)[^,;]+,", r"\1 0,"),
    "no wait for the cluster": (r"barrier\.cluster\.wait\.acquire\.aligned;(?!.*barrier\.cluster\.wait)", ""),
    "no wait for copies": (r"cp\.async\.wait_group\s+\d+;", ""),
}

CONTRACTION, BARRIER, MASK, LANE, OF_CLUSTER, COPIES = MUTANTS

#: Of each kernel a call that launches it: rows, hidden size, whether gradients are wanted; and the mutants that it has.
KERNELS = {
    "cuda": [
        ("forward", 3, 4096, False, [CONTRACTION, BARRIER, MASK, LANE]),
        ("forward", 3, 40_999, False, [CONTRACTION, MASK, LANE, OF_CLUSTER]),
        ("forward_wide", 2, 140_000, False, [CONTRACTION, BARRIER, MASK, LANE]),
        ("backward_blocks", 3, 4096, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("backward_blocks", 520, 128, True, [BARRIER, MASK, LANE]),
        ("backward_rows", 3, 20_000, True, [CONTRACTION, MASK, LANE]),
        ("backward_wide", 2, 140_000, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("weight_blocks", 3, 20_000, True, [CONTRACTION]),
        ("weight_sum", 520, 2100, True, [CONTRACTION, BARRIER]),
        ("log_prob", 3, 5000, False, [CONTRACTION, BARRIER, MASK, LANE]),
        ("log_prob", 2, 40_999, False, [OF_CLUSTER]),
        ("log_prob_backward", 3, 5000, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("log_prob_backward", 2, 40_999, True, [OF_CLUSTER]),
    ],
    "triton": [
        ("forward", 3, 4096, False, [CONTRACTION, BARRIER, MASK, LANE]),
        ("forward", 2, 20_000, False, [CONTRACTION, BARRIER, MASK, LANE]),
        ("backward_blocks", 520, 2100, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("backward_rows", 3, 16_384, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("backward_rows", 2, 20_000, True, [CONTRACTION, BARRIER, MASK, LANE]),
        ("weight_blocks", 3, 16_384, True, [CONTRACTION]),
        ("add_blocks", 520, 2100, True, [CONTRACTION, BARRIER]),
        ("int8_linear", 20, 256, False, [CONTRACTION, BARRIER, COPIES]),
        ("int8_linear", 3, 256, False, [BARRIER, COPIES]),
    ],
}[BACKEND]


def forget():
    """Lets go of the kernels that the backend has loaded."""
    if BACKEND == "cuda":
        cuda._functions.clear()
        cuda._open_launcher.__wrapped__()
    else:
        triton_gpu._host.forget()


def results(case, gradients, kernel):
    """What a call with this kernel returns, and its gradients."""
    if kernel == "int8_linear":
        given = tensors((case.rows, 144, case.hidden), F32)
        return (fusednorm.int8_linear(**given),)
    given = [tensor.requires_grad_(gradients) for tensor in operands(case)]
    if kernel.startswith("log_prob"):
        given = given[:1]
        outputs = (fusednorm.log_softmax(*given),)
    else:
        outputs = fusednorm.fused_add_rms_norm(*given)
    if not gradients:
        return outputs
    return [*outputs, *torch.autograd.grad(outputs, given, [torch.ones_like(t) for t in outputs])]


@pytest.mark.parametrize(
    ("kernel", "rows", "hidden", "gradients", "mutant"),
    [(*call, mutant) for *call, mutants in KERNELS for mutant in mutants],
)
def test_mutants_of_the_kernels(kernel, rows, hidden, gradients, mutant, monkeypatch):
    """Each is refused, does what a GPU does not promise, or gives other bits."""
    place, other = MUTANTS[mutant]
    original, changed = machine.load, []

    def load(ptx, name):
        if name == kernel:
            assert re.search(place, ptx, re.DOTALL), f"{kernel} has no place for {mutant}"
            ptx = re.sub(place, other, ptx, flags=re.DOTALL)
            changed.append(name)
        return original(ptx, name)

    forget()
    monkeypatch.setattr(machine, "load", load)
    case = Case(rows=rows, hidden=hidden).of(F32)
    try:
        found = results(case, gradients, kernel)
    except (text.RefusedError, RuntimeError):
        assert changed == [kernel]
        return
    finally:
        forget()
    assert changed == [kernel]
    with fusednorm.use_backend("reference"):
        expected = results(case, gradients, kernel)
    assert any(differing(one, two).any() for one, two in zip(found, expected, strict=True))
