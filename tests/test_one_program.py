"""One program of a Triton kernel, near the greatest launches, in the interpreter: it touches its own elements alone.

Operands lie at addresses that no process has: the accesses are noted and go nowhere.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from fusednorm.backends.triton_host import INTERPRETED, LONGEST

if not INTERPRETED:
    pytest.skip("takes Triton's interpreter", allow_module_level=True)

PARTIAL, DWEIGHT = 2**56, 2**57


def touched(kernel, program, pointers, **arguments):
    """The addresses that one program reads and writes."""
    import triton
    from triton import language
    from triton.runtime import interpreter

    def typed(value, kind):
        handle = interpreter.TensorHandle(np.array([value], np.int64), language.str_to_ty(kind, None))
        return language.tensor(handle, handle.dtype)

    read, written = [], []

    def load(addresses, mask, other, dtype):
        read.extend(addresses[mask].ravel().tolist())
        return np.zeros_like(other)

    def store(addresses, value, mask):
        written.extend(addresses[mask].ravel().tolist())

    number = interpreter.TensorHandle(np.array([program], np.int32), language.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", SimpleNamespace(load=load, store=store))
        patch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: number)
        assert isinstance(kernel, interpreter.InterpretedFunction), triton.__version__
        kernel[(1,)](**{name: typed(at, "*fp32") for name, at in pointers.items()}, **arguments)
    return sorted(read), sorted(written)


@pytest.mark.parametrize("hidden_size", [2**27 + 32, 268437504, LONGEST])
@pytest.mark.parametrize("blocks", [1, 5, 17, 65])
def test_shares_of_the_greatest_rows(hidden_size, blocks):
    """A launch has a program for each TILE columns, of which most take nothing where there are few blocks."""
    from triton import language

    from fusednorm.backends import triton_kernels

    tile, constants = 32, {"N": hidden_size, "A": language.float32, "BLOCKS": 256, "TILE": 32}
    columns = tile * (1 if blocks > 64 else 4 if blocks > 16 else 16)
    programs, needed = -(-hidden_size // tile), -(-hidden_size // columns)
    for program in {0, needed - 1, min(needed, programs - 1), 8388607, programs // 2, programs - 1}:
        if program >= programs:
            continue
        read, written = touched(
            triton_kernels.add_blocks, program, {"partial": PARTIAL, "dweight": DWEIGHT}, blocks=blocks, **constants
        )
        mine = range(min(program * columns, hidden_size), min((program + 1) * columns, hidden_size))
        assert written == [DWEIGHT + 4 * column for column in mine], program
        assert read == [PARTIAL + 4 * (block * hidden_size + column) for block in range(blocks) for column in mine]
