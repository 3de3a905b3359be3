"""Numbers that Python and C share: ``python fusednorm/calls/c_enums.py`` prints ``cpu/abi/enums.h``."""

import re
import textwrap
from enum import IntEnum


class Kind(IntEnum):
    """How the elements of an operand are stored.

    NONE: the operand is absent. I32, I64: places of elements, as ids. BYTE: int8.
    """

    NONE = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    F64 = 4
    I32 = 5
    I64 = 6
    BYTE = 7


class Pass(IntEnum):
    """The direction of a call."""

    FORWARD = 0
    BACKWARD = 1


class Flag(IntEnum):
    """SCALE_ONLY: x times `eps`, rounded to out's kind, and nothing else.

    QUANTIZED: a `struct fn_quantizer` follows in memory, which takes the rows of out; QUANTIZE_ONLY: it takes
    the rows of x, and there is nothing else. GATE_AFTER, GATE_BEFORE: a `struct fn_gate` follows, which takes
    the rows of out, or whose rows are taken as x, and rounded, with ROUND_NORM, to out's kind; GATE_ONLY: there
    is nothing else. ROTATION_ONLY, DECLARED_ONLY: a `struct fn_rotation` or `fn_declared` follows, and there is
    nothing else; for GPUs, and declared operations for Triton on CPUs too. CENTER: rows are normalised less their
    means.
    """

    ROUND_SUM = 1
    ROUND_NORM = 2
    SCALE_ONLY = 4
    QUANTIZED = 8
    QUANTIZE_ONLY = 16
    GATE_AFTER = 32
    GATE_BEFORE = 64
    GATE_ONLY = 128
    ROTATION_ONLY = 256
    CENTER = 512
    DECLARED_ONLY = 1024


class ByteKind(IntEnum):
    """The kinds of numbers that a quantizer writes, one byte each."""

    I8 = 0
    U8 = 1
    E4M3 = 2
    E5M2 = 3


class QuantizerFlag(IntEnum):
    """The rest of a `Quantization`; without a flag, the field's default. GIVEN_SCALE: one for all rows."""

    GIVEN_SCALE = 1
    SCALE_BY_RECIPROCAL = 2
    APPLY_RECIPROCAL = 4
    APPLY_RATIO = 8
    RETURNS_MULTIPLIER = 16
    ZERO_POINT_128 = 32
    ZERO_POINT_AFTER = 64
    ZERO_POINT_BEFORE = 128
    SCALE_UP_TO_POWER_OF_TWO = 256


class Activation(IntEnum):
    """The function of a gate; those up to GELU_TANH take a sigmoid. SOFTCAP: of z alone; the limit is its cap."""

    SILU = 0
    SIGMOID = 1
    GELU_TANH = 2
    GELU = 3
    RELU2 = 4
    SOFTCAP = 5


class GateFlag(IntEnum):
    """Flags of a gate. IN_TURNS: elements of z and y take turns in memory, and so do their gradients."""

    CLAMP_AFTER = 1
    ROUND_STEPS = 2
    IN_TURNS = 4


class GateOrder(IntEnum):
    """The fast path's calls with a gate. ALONE: x times the gate. AND_MUL: x is the gate, or both. FUNCTION: of x."""

    ALONE = 0
    AND_MUL = 1
    NORM_FIRST = 2
    GATE_FIRST = 3
    FUNCTION = 4


class DeclaredOf(IntEnum):
    """Declared operations with kernels of C, and gradients with kernels of their own.

    LOGARITHM: of each number, for tests. SUMS: of a row's segments.
    """

    LOG_SOFTMAX = 0
    LOGSUMEXP = 1
    SELECTED = 2
    SELECTED_AND_ENTROPY = 3
    LOGARITHM = 4
    SUMS = 5
    MODULATE = 6
    MODULATE_BACKWARD = 7
    LINEAR = 8
    ATTENTION = 9
    INT8_LINEAR = 10


#: The flags that these kernels know, but those of log-probabilities.
FLAGS_OF = dict.fromkeys((DeclaredOf.MODULATE, DeclaredOf.MODULATE_BACKWARD), ("round_steps",))


class RotationFlag(IntEnum):
    """Flags of a rotation, beside ROUND_NORM."""

    NORMALISED = 1
    INTERLEAVED = 4


class Share(IntEnum):
    """A program of a kernel for GPUs takes this, `per_program` times.

    ROWS: so many rows. COLUMNS_OF_SUMS: so many columns of up to BLOCKS_IN_LANE blocks' sums; half as many of
    up to twice as many blocks, and so on. COLUMNS_OF_BLOCKS: so many columns of one block of rows. BLOCKS: the
    blocks that so many rows hold whole, and at least one. COLUMNS: so many columns of all blocks; no kernel of
    CUDA's. ELEMENTS: so many elements of all rows.
    """

    ROWS = 0
    COLUMNS_OF_SUMS = 1
    COLUMNS_OF_BLOCKS = 2
    BLOCKS = 3
    COLUMNS = 4
    ELEMENTS = 5


class Limit(IntEnum):
    """Limits of kernels, but for the last one for GPUs.

    BLOCKS_IN_LANE: blocks of rows that a thread adds up, of a kernel that takes the more columns the fewer
    blocks there are. MOST_ALIGNED: the largest number of bytes that any kernel wants addresses to be multiples
    of. INT8_LONGEST: the elements of the longest rows whose sums of products int32 holds; 2^14 times so many is
    below 2^31.
    """

    BLOCKS_IN_LANE = 8
    MOST_ALIGNED = 32
    INT8_LONGEST = 131_071


def header() -> str:
    """``cpu/abi/enums.h``."""
    lines = ["/* Printed by fusednorm/calls/c_enums.py, which has the same numbers for Python. */"]
    lines += ["#ifndef FUSEDNORM_ENUMS_H", "#define FUSEDNORM_ENUMS_H", ""]
    of_calls = (Kind, Pass, Flag, ByteKind, QuantizerFlag, Activation, GateFlag, GateOrder, DeclaredOf, RotationFlag)
    for enum in (*of_calls, Share, Limit):
        about = " ".join((enum.__doc__ or "").split())
        name = re.sub("(?<=.)([A-Z])", r"_\1", enum.__name__).lower()
        members = ", ".join(f"FN_{member}={value}" for member, value in enum.__members__.items())
        lines += textwrap.wrap(f"/* {about} */", 120, subsequent_indent=" * ")
        rows = textwrap.wrap(members, 100)
        lines += [f"enum fn_{name} {{", *(f"    {row}".replace("=", " = ") for row in rows), "};", ""]
    names = ", ".join(f'"{one.name.lower()}"' for one in Activation)
    lines += ["/* The names of enum fn_activation, in its order. */", f"#define FN_ACTIVATION_NAMES {names}", ""]
    return "\n".join([*lines, "#endif", ""])


if __name__ == "__main__":
    print(header(), end="")
