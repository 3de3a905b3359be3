"""Operands and calls for the tests: every dtype, layout and kind of data, in guarded memory."""

import functools
import heapq
import inspect
import itertools
import struct
from dataclasses import dataclass, replace

import numpy as np
import torch

import fusednorm
from fusednorm.calls.call import accumulator
from fusednorm.conformance import oracle, oracle_attention, oracle_gated, oracle_log_prob, oracle_products
from fusednorm.declare.declaration import CONSTANT, Role
from fusednorm.operations.listed import every
from fusednorm.reference import norm as reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (BF16, F16, F32, F64)

#: The integer type with as many bytes as a number.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: A NaN with all bits of its payload set, in float32 too. Rounding must not carry into the exponent.
PAYLOAD = struct.unpack("d", struct.pack("Q", 0x7FFFFFFFFFFFFFFF))[0]

#: Whether a tensor may begin between two elements, which torch allows on a CPU only.
BETWEEN_ELEMENTS = True

#: Whether tests make every call of a product: ``--everything``.
EVERYTHING = False

#: Whether a product's values need not meet in pairs: where a GPU is emulated, whose kernels are compiled for each call,
#: and where Triton's interpreter runs them.
VALUES_ALONE = False


def covering(*axes, turn=0):
    """Rows of the axes' product: few, but any two values of two axes stand together in one of them.

    Most faults take one value, or two that meet. Tests that differ in ``turn`` take other rows, so that together they
    have more. With :data:`EVERYTHING`, every row; with :data:`VALUES_ALONE`, the first rows that have every value.
    """
    if EVERYTHING:
        return list(itertools.product(*axes))
    rows = pairwise(*axes, turn=turn)
    if not VALUES_ALONE:
        return rows
    columns = zip(zip(*rows, strict=True), axes, strict=True)
    return rows[: 1 + max(column.index(value) for column, axis in columns for value in axis)]


def pairwise(*axes, turn=0):
    """:func:`covering`, whatever :data:`EVERYTHING` says."""
    places = _places(tuple(map(len, axes)), turn)
    return [tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in places]


@functools.cache
def _places(sizes, turn):
    """The rows of :func:`pairwise`, of axes of these sizes: each is the first of those with most missing pairs."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), min(2, len(row))))

    rows = list(itertools.product(*map(range, sizes)))
    rows = rows[turn % len(rows) :] + rows[: turn % len(rows)]
    missing, chosen = set().union(*map(pairs, rows)), []
    # A row never has more missing pairs than when it was last looked at: few rows are looked at again.
    most = [(-len(missing), index) for index in range(len(rows))]
    while missing:
        _, index = heapq.heappop(most)
        count = len(pairs(rows[index]) & missing)
        if most and (-count, index) > most[0]:
            heapq.heappush(most, (-count, index))
        else:
            missing -= pairs(rows[index])
            chosen.append(rows[index])
    return chosen


def dtype_name(dtype):
    return "none" if dtype is None else str(dtype)[6:]


def bits(element):
    """The bits of one element, in hexadecimal."""
    size = element.element_size()
    return f"0x{element.view(INTEGERS[size]).item() % (1 << 8 * size):0{2 * size}x}"


def differing(a, b):
    """A mask of the elements that differ in bits; NaN equals NaN, and +0 equals -0."""
    return ~((a == b) | (a.isnan() & b.isnan()))


@dataclass(frozen=True)
class Case:
    """One call. A dtype of None: the operand is absent (out: x's dtype; residual_out: the residual's)."""

    rows: int = 3
    hidden: int = 1029
    x: torch.dtype = BF16
    residual: torch.dtype | None = BF16
    weight: torch.dtype | None = BF16
    out: torch.dtype | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0
    round_sum: bool = True
    round_norm: bool = False
    data: str = "normal"
    seed: int = 0
    residual_out: torch.dtype | None = None

    def of(self, dtype, **changes):
        """The case with one dtype for all operands, except for the changes."""
        return replace(self, **{"x": dtype, "residual": dtype, "weight": dtype, **changes})

    @property
    def flags(self):
        return {"weight_offset": self.weight_offset, "round_norm": self.round_norm}


def listed(outputs):
    """The outputs of a function that returns one or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def bytes_of(tensors):
    """A list of tensors, those of 8-bit numbers as bytes."""
    return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]


OPERATIONS = every()
#: The operands and the outputs of each function. Where it has gradients, each output has one, in the same order.
NAMES = {
    name: (
        (*one.operands, *(more for more, value in one.sample.items() if isinstance(value, Role))),
        tuple(result.name for result in one.results),
    )
    for name, one in OPERATIONS.items()
}
for _name, (_operands, (_out, *_others)) in NAMES.items():
    if "quantization" in OPERATIONS[_name].sample:  # the scale may be given
        NAMES[_name] = (*_operands, "scale", "zero_point"), (_out, "scale", *_others[1:])

#: Operands without gradients, of operations that have some.
TABLES = {
    name for one in OPERATIONS.values() if one.differentiable for name, role in one.operands.items() if role in CONSTANT
}


def _has_exact_gradients(function):
    return OPERATIONS[function].differentiable and OPERATIONS[function].exact_gradients


def recorded(function, operands, incoming, **flags):
    """Outputs and gradients of a public function, by name; without gradients where these are not exact.

    ``operands``: by name, None where one is absent; ``incoming``: the gradients of its outputs.
    """
    given = {name: t for name, t in operands.items() if t is not None}
    records = OPERATIONS[function].differentiable
    leaves = {name: t.detach().requires_grad_(records) for name, t in given.items() if name not in TABLES}
    outputs = listed(getattr(fusednorm, function)(**operands | leaves, **flags))
    found = dict(zip(NAMES[function][1], (output.detach() for output in outputs), strict=True))
    if not _has_exact_gradients(function):
        return found
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), incoming)
    return found | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def of_oracle(function, operands, incoming, **flags):
    """The oracle's outputs and gradients of the same call, as arrays or tensors on the CPU.

    Its numbers are rounded before to the type of the computation, as section 2 of the specification says.
    """
    if next(iter(operands.values())).dtype != F64 and function != "l2_norm":  # which divides eps before
        with np.errstate(over="ignore"):
            flags = {name: float(np.float32(n)) if type(n) is float else n for name, n in flags.items()}
    oracles = vars(oracle) | vars(oracle_gated) | vars(oracle_log_prob) | vars(oracle_products)
    oracles |= vars(oracle_attention)
    found = oracles[function](tuple(operands.values()), incoming, **flags)
    gradients = operands if _has_exact_gradients(function) else ()
    names = (*NAMES[function][1], *(f"d_{name}" for name in gradients if name not in TABLES))
    return {name: array for name, array in zip(names, found, strict=True) if array is not None}


def incoming_of(function, operands, out_dtype=None, residual_dtype=None):
    """Normal numbers as gradients of the outputs of a call."""
    generator = torch.Generator().manual_seed(0)
    first = next(iter(operands.values()))
    like = {"residual_out": (operands.get("residual"), residual_dtype), "k_out": (operands.get("k"), None)}
    results = {result.name: result for result in OPERATIONS[function].results}
    roles = [result.role for result in results.values()]
    found = []
    for name in NAMES[function][1]:
        rows, dtype = like.get(name, (first, out_dtype))
        shapes = {Role.NUMBERS: rows.shape[:-1], Role.OF_CHOSEN: getattr(operands.get("ids"), "shape", None)}
        shapes[Role.PRODUCTS] = (*rows.shape[:-1], len(operands["weight"])) if Role.PRODUCTS in roles else None
        dtype = accumulator(rows.dtype) if results[name].wide else dtype
        shape = shapes.get(results[name].role, rows.shape)
        normal = torch.randn(shape, generator=generator, dtype=F64, device="cpu")
        found.append(reference.rounded(normal, dtype or rows.dtype).to(rows.device))
    return found


def check_call(agree, function, operands, about="", dtypes=None, **flags):
    """Compares outputs and gradients, which it returns by name, with the oracle's.

    Calls with given outputs and in place are compared with the outputs. ``operands``: by name, None where one is
    absent; ``dtypes``: those that are asked of the outputs, which are those of the operands where a call is in place.
    """
    about, dtypes = f"{function} {about}, {flags}, {dtypes}", dtypes or {}
    of_function, incoming = getattr(fusednorm, function), incoming_of(function, operands, **dtypes)
    found = recorded(function, operands, incoming, **flags, **dtypes)
    wanted = of_oracle(function, operands, incoming, **flags, **dtypes)
    assert found.keys() == wanted.keys(), about
    agree(found.values(), wanted.values(), about)
    outputs = [found[name] for name in NAMES[function][1]]
    memory = {name: torch.empty_like(found[name]) for name in NAMES[function][1]}
    if memory.keys() <= inspect.signature(of_function).parameters.keys():
        stored = {name: dtype for name, dtype in dtypes.items() if name != "out_dtype"}
        of_function(**operands, **flags, **stored, **memory)
        agree(memory.values(), outputs, f"{about}, given outputs")
    in_place = getattr(fusednorm, f"{function}_", None)
    if in_place and not any(dtypes.values()):
        agree(listed(in_place(**operands, **flags)), outputs, f"{about}, in place")
    return found


def call(case, x, residual, weight, **outputs):
    """Calls the public function; returns y and the sum (None without a residual)."""
    if "out" not in outputs:
        outputs["out_dtype"] = case.out
    if residual is None:
        return fusednorm.rms_norm(x, weight, case.eps, **case.flags, **outputs), None
    flags = {"round_sum": case.round_sum, "residual_dtype": case.residual_out, **case.flags}
    return fusednorm.fused_add_rms_norm(x, residual, weight, case.eps, **flags, **outputs)


def differentiable(case):
    """The operands of the case, whose gradients are recorded."""
    return [None if leaf is None else leaf.requires_grad_() for leaf in operands(case)]


def gradients(case, dy, d_total, leaves):
    """The gradients of the case's operands, through the outputs of which there is one."""
    through = [pair for pair in zip(call(case, *leaves), (dy, d_total), strict=True) if pair[1] is not None]
    outputs, given = zip(*through, strict=True)
    return torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], given)


def incoming(case):
    """The incoming gradients of y and of the sum."""
    dtypes = {"x": case.out or case.x, "residual": case.residual_out or case.residual}
    dy, d_total, _ = operands(replace(case, seed=1, data="normal", **dtypes))
    return dy, d_total


def expected_gradients(case, leaves, dy, d_total):
    """The oracle's gradients, on the CPU, which :func:`gradients` must return."""
    with torch.no_grad():
        flags = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
        _, _, rstd, h = oracle.forward(*leaves, *flags, residual_out_dtype=case.residual_out)
        found = oracle.backward(dy, d_total, h, rstd, leaves[2], case.weight_offset, case.x, case.residual)
    present = [(array, leaf) for array, leaf in zip(found, leaves, strict=True) if leaf is not None]
    return [torch.from_numpy(array).to(leaf.dtype) for array, leaf in present]


def reproducer(case, mode, output, at):
    """A script that prints the value of one element and the expected value.

    ``output`` is "y" or "total" for a result of :func:`call`, or the position of one of :func:`gradients`.
    """
    backend, _, variant = mode.partition("-")
    before = f"import os\nos.environ['FUSEDNORM_CPU_ISA'] = {variant!r}\n" if variant else ""
    if isinstance(output, int):
        lines = f"""leaves = [None if t is None else t.requires_grad_() for t in operands(case)]
with fusednorm.use_backend({backend!r}):
    got = gradients(case, *incoming(case), leaves)[{output}]
wanted = expected_gradients(case, leaves, *incoming(case))[{output}]"""
        names = "Case, bits, expected_gradients, gradients, incoming, operands"
    else:
        lines = f"""with fusednorm.use_backend({backend!r}):
    got = call(case, *operands(case))[{("y", "total").index(output)}]
wanted = expected(case, {backend!r})[{("y", "total").index(output)}]"""
        names = "Case, bits, call, expected, operands"
    return f"""{before}import torch, fusednorm
from fusednorm.conformance.cases import {names}

case = {case!r}
{lines}
at = {at}
print(got[at].item(), bits(got[at].detach().cpu()), "instead of", wanted[at].item(), bits(wanted[at]))"""


def values(case, generator):
    """x, residual and weight in float64, before they are rounded to their dtypes."""
    shape = (case.rows, case.hidden)
    normal = functools.partial(torch.randn, generator=generator, dtype=F64, device="cpu")
    x, residual, weight = normal(shape), 2 * normal(shape), 1 + 0.2 * normal(case.hidden)
    smallest = torch.finfo(case.x).smallest_normal
    if case.data == "large":
        x, residual = x * 1e4, residual * 1e4
    elif case.data == "tiny":
        x, residual = x / (2 * case.hidden), residual / (2 * case.hidden)
    elif case.data == "outliers":
        x[:, ::512] *= 40
        residual[:, 7::512] *= 40
    elif case.data == "zeros":
        x, residual = torch.zeros_like(x), torch.zeros_like(residual)
    elif case.data == "cancelling":
        residual = -x
    elif case.data == "subnormal":
        x, residual = x * smallest / 8, residual * smallest / 8
    elif case.data == "overflowing":  # the sum overflows float16; in bfloat16 the squares overflow float32
        x = torch.where(x > 1, torch.finfo(case.x).max * 0.75, x)
        residual = torch.where(residual > 2, torch.finfo(case.residual or case.x).max * 0.75, residual)
    elif case.data == "nan row":
        x[case.rows // 2, case.hidden // 2] = torch.nan
    elif case.data == "inf row":
        x[case.rows // 2, case.hidden // 2] = torch.inf
        residual[case.rows // 3, 0] = -torch.inf
    elif case.data == "ties":  # sums half way between two values of the residual's dtype
        unit = torch.finfo(case.residual or case.x).eps
        residual = 1 + unit * torch.randint(0, 64, shape, generator=generator, device="cpu")
        x = (unit / 2) * torch.randint(0, 4, shape, generator=generator, device="cpu")
    else:
        assert case.data == "normal", case.data
    return x, residual, weight


DATA = ("large", "tiny", "outliers", "zeros", "cancelling", "subnormal", "overflowing", "nan row", "inf row", "ties")


def operands(case):
    """x, residual and weight of the case: new contiguous tensors on the mode's device, None where absent."""
    device = torch.get_default_device()
    return tuple(None if tensor is None else tensor.clone().to(device) for tensor in _operands(case))


def weights_of(case, heads, seed):
    """A weight or a bias; ``heads``: so many rows, or 0 for one that is for all heads. None where either is None."""
    if case.weight is None or heads is None:
        return None
    rows = [operands(replace(case, seed=seed + k))[2] for k in range(heads or 1)]
    return torch.stack(rows) if heads else rows[0]


@functools.lru_cache(maxsize=512)
def _operands(case):
    generator = torch.Generator().manual_seed(case.seed * 7919 + case.hidden * 31 + case.rows)
    dtypes = (case.x, case.residual, case.weight)
    return tuple(
        None if dtype is None else reference.rounded(value, dtype)
        for value, dtype in zip(values(case, generator), dtypes, strict=True)
    )


@functools.lru_cache(maxsize=512)
def expected(case, by):
    """The expected y, and the sum or None, on the CPU. `by` is the backend under test.

    The reference is compared with the oracle, and every other backend with the reference.
    """
    flags = (case.eps, case.weight_offset, case.round_sum, case.round_norm)
    dtypes = (case.out or case.x, case.residual_out or case.residual)
    if by == "reference":
        y, total, *_ = oracle.forward(*_operands(case), *flags, *dtypes)
        return torch.from_numpy(y).to(dtypes[0]), None if total is None else torch.from_numpy(total).to(dtypes[1])
    return reference.outputs(*_operands(case), *flags, *dtypes)[:2]


class Guarded:
    """A [rows, hidden] tensor in larger memory, whose other bytes must not change."""

    def __init__(self, rows, hidden, dtype, stride=None, offset=64, misaligned=0):
        """`stride` and `offset` in elements; `misaligned` in bytes."""
        stride = hidden if stride is None else stride
        elements = offset + max(rows - 1, 0) * stride + hidden + 64
        if not BETWEEN_ELEMENTS or torch.get_default_device().type != "cpu":
            misaligned = 0
        memory = torch.full((elements * dtype.itemsize + misaligned,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
        if misaligned:
            self._memory = bytearray(memory.numpy())
            memory = torch.frombuffer(self._memory, dtype=torch.uint8)
            whole = torch.frombuffer(self._memory, dtype=dtype, offset=misaligned)
        else:
            whole = memory.view(dtype)
        self.tensor = whole.as_strided((rows, hidden), (stride, 1), offset)
        self._holes = torch.ones(elements, dtype=torch.bool)
        self._holes.as_strided((rows, hidden), (stride, 1), offset).zero_()
        self._bytes = memory[misaligned:].view(-1, dtype.itemsize)

    def filled(self, values):
        if values is not None:
            self.tensor.copy_(values)
        return self

    def check(self):
        assert (self._bytes[self._holes] == 0xFF).all(), "memory around the rows was written"
