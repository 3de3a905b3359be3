"""Calls the operators of ``torch.ops.fusednorm`` with operands that fit and that do not, and looks at what comes back.

    python tests/fuzz_operators.py [--calls 100000] [--seed 1] [--first 0]

Half of the calls fit. In the others operands may have a wrong shape, dtype, device, layout or stride, or be empty or
absent. Asserted is: an operator returns and writes the bits of the reference, or raises what the reference raises. A
crash ends the process; the last line on standard error then says how to repeat it. A call follows from the seed and its
number alone.
"""

import argparse
import itertools
import math
import sys
from collections import Counter
from random import Random

import torch

import fusednorm
from fusednorm import Quantization, quantizations
from fusednorm.backends import cpu
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.calls.declared import Role
from fusednorm.conformance.cases import differing
from fusednorm.torch_ops.declared import DECLARED
from fusednorm.torch_ops.operators import SCHEMAS

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STRANGE = (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
NUMBERS = (0.0, 1e-6, 1e-5, 1.0, -1.0, 3e38, 1e300, float("inf"), float("nan"))
OPS = torch.ops.fusednorm
NAMES = tuple(SCHEMAS)
QUANTIZATIONS = [str(q) for q in vars(quantizations).values() if isinstance(q, Quantization)]


def laid_out(random, tensor):
    """The same values in some layout."""
    kind = random.random()
    if kind < 0.6 or tensor.dim() == 0:
        return tensor
    if kind < 0.7:  # gaps between rows, and a begin that is not aligned
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    if kind < 0.78:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind < 0.84:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind < 0.9 and tensor.shape[0] > 0:
        return tensor[:1].expand(tensor.shape)
    if kind < 0.94 and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return torch._neg_view(tensor)
    if kind < 0.96:
        return tensor.to("meta")
    if kind < 0.98 and tensor.dtype.itemsize > 1:
        return tensor.to_sparse()
    return tensor.as_subclass(torch.nn.Parameter) if random.random() < 0.5 else tensor.unsqueeze(0)


class Call:
    """A call that follows from the seed and a number."""

    def __init__(self, seed, number):
        self.random = random = Random(f"{seed}/{number}")
        self.name = random.choice(NAMES)
        rows = tuple(random.choice((0, 1, 2, 3, 5, 33)) for _ in range(random.choice((0, 1, 1, 1, 2))))
        hidden = random.choice((0, 1, 2, 7, 8, 64, 65, 128, 1000, 1024, 1025)) if random.random() < 0.9 else 3000
        self.shape = (*rows, hidden)
        self.dtype = random.choice(DTYPES)
        self.wrong = random.random() < 0.5  # else nearly all fits
        self.generator = torch.Generator().manual_seed(number)
        of_name = getattr(self, f"of_{self.name}", None)
        self.arguments = of_name() if of_name else self.of_declared(DECLARED[self.name.removesuffix("_backward")])

    def operand(self, shape=None, dtype=None, absent=0.0):
        """A tensor of that shape and dtype, or not quite; None where it may be absent."""
        random = self.random
        shape = self.shape if shape is None else shape
        if random.random() < absent:
            return None
        if dtype is None:
            allowed = DTYPES if self.dtype == torch.float64 else DTYPES[:3]
            dtype = self.dtype if random.random() < 0.5 else random.choice(allowed)
        if not self.wrong:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)
        if random.random() < 0.1:
            dtype = random.choice((*DTYPES, *STRANGE))
        if random.random() < 0.15:
            n = shape[-1] if shape else 3
            longer, shorter = (*shape[:-1], n + 1), (*shape[:-1], max(n - 1, 0))
            shape = random.choice(((), (0,), (n,), (*shape, 1), shape[1:], longer, shorter, (2, *shape)))
            if math.prod(shape[:-1]) > 40_000:  # the reference pads each row to a segment: gigabytes
                shape = (n,)
        return laid_out(random, torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype))

    def flags(self):
        random = self.random
        return random.choice(NUMBERS), random.choice(NUMBERS), random.random() < 0.5, random.random() < 0.5

    def dtypes(self, count):
        """Of so many outputs; often none."""
        allowed = (*DTYPES, *STRANGE) if self.wrong else DTYPES[:3]
        return [None if self.random.random() < 0.7 else self.random.choice(allowed) for _ in range(count)]

    def of_rms_norm(self):
        x, weight = self.operand(dtype=self.dtype), self.operand(self.shape[-1:], absent=0.2)
        return x, weight, *self.flags(), *self.dtypes(1)

    def of_fused_add_rms_norm(self):
        return (
            self.operand(dtype=self.dtype),
            self.operand(),
            self.operand(self.shape[-1:], absent=0.2),
            *self.flags(),
            *self.dtypes(2),
        )

    def of_rms_norm_(self):
        return self.of_rms_norm()[:-1]  # in place no dtype is asked for

    def of_fused_add_rms_norm_(self):
        return self.of_fused_add_rms_norm()[:-2]

    def of_into(self):
        random = self.random
        x, residual = self.operand(dtype=self.dtype), self.operand(absent=0.3)
        out = x if random.random() < 0.2 else self.operand()
        total = None if residual is None else self.operand(dtype=residual.dtype)
        if random.random() < 0.2:
            total = random.choice((x, residual, out, None))
        return x, residual, self.operand(self.shape[-1:], absent=0.2), out, total, *self.flags()

    def of_backward(self):
        random = self.random
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        residual = None if random.random() < 0.3 else self.operand().dtype
        some = (*DTYPES, *STRANGE) if self.wrong and random.random() < 0.1 else (self.dtype,)
        return (
            self.operand(),
            self.operand(absent=0.4),
            self.operand(),
            self.operand(self.shape[:-1], dtype=wide),
            self.operand(self.shape[-1:], absent=0.2),
            random.choice(NUMBERS),
            random.choice(some),
            residual,
            random.random() < 0.5,
            random.random() < 0.5,
            self.needs(3),
        )

    def of_add(self):
        return self.operand(dtype=self.dtype), self.operand(), self.dtype_of_result()

    def of_scale(self):
        return self.operand(), self.random.choice(NUMBERS)

    def dtype_of_result(self):
        """Of x, or not quite."""
        return next((dtype for dtype in self.dtypes(1) if dtype is not None), self.dtype)

    def affine_operands(self):
        """Rows of the accumulator type, a weight and a bias, some of them of heads."""
        self.dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        rows = [self.shape[-1:] if self.random.random() < 0.6 else self.shape[-2:] for _ in range(2)]
        return self.operand(dtype=self.dtype), *(self.operand(row, absent=0.3) for row in rows)

    def of_affine(self):
        operands = self.affine_operands()
        return *operands, self.random.choice(NUMBERS), *self.dtypes(1), self.dtype_of_result()

    def needs(self, count):
        """Which of so many gradients, or of another number of them."""
        count = count if not self.wrong or self.random.random() < 0.95 else self.random.choice((0, 1, 4))
        return [self.random.random() < 0.7 for _ in range(count)]

    def of_affine_backward(self):
        operands = self.affine_operands()
        return self.operand(), *operands, self.random.choice(NUMBERS), self.needs(3)

    def of_rotate(self):
        random = self.random
        heads = (*self.shape[:-1], random.choice((1, 2, 5)), self.shape[-1])
        tables = (*self.shape[:-1], random.choice((0, 1, self.shape[-1] // 2, self.shape[-1] // 4)))
        tables = tables if not self.wrong or random.random() < 0.9 else (*tables[:-1], self.shape[-1])
        x, (cos, sin) = self.operand(heads, self.dtype), (self.operand(tables, torch.float32) for _ in range(2))
        return x, cos, sin, random.random() < 0.5, *self.dtypes(1), self.dtype_of_result()

    def gating(self):
        random = self.random
        between = random.choice((None, torch.bfloat16, torch.float16, *(STRANGE if self.wrong else ())))
        return random.choice((*ACTIVATIONS, *(["tanh"] if self.wrong else []))), between

    def of_gate(self):
        return self.operand(dtype=self.dtype), self.operand(), *self.gating(), self.dtype_of_result()

    def of_gate_backward(self):
        return self.operand(), self.operand(dtype=self.dtype), self.operand(), *self.gating(), self.needs(2)

    def of_quantize(self):
        random = self.random
        text = random.choice(QUANTIZATIONS) if not self.wrong or random.random() < 0.9 else "int8"
        scale = self.operand((1,), torch.float32, absent=0.7)
        return self.operand(), text, scale, None if random.random() < 0.8 else torch.ones(1, dtype=torch.int32)

    def of_declared(self, operator):
        """A declared operation, or the gradients of one."""
        declaration, backward = operator.declaration, self.name.endswith("_backward")
        names = declaration.backward_tensors if backward else [one.name for one in declaration.operands]
        optional = {one.name for one in declaration.operands if one.optional}
        taken = declaration.gradient_flags if backward else declaration.flags
        flags = {name: declaration.flags[name] for name in taken}
        flags |= {name: value for name, value in self.random.choice(declaration.samples).items() if name in flags}
        tensors = [self.of_role(declaration.roles()[name], 0.3 * (name in optional)) for name in names]
        return *tensors, *flags.values(), *([self.needs(len(declaration.with_gradient))] if backward else [])

    def of_role(self, role, absent):
        shapes = {Role.ROWS: self.shape, Role.WEIGHT: self.shape[-1:]}
        shape = shapes.get(role, self.shape[:-1])
        if role is Role.IDS and not (self.wrong and self.random.random() < 0.2):
            return torch.zeros(shape, dtype=torch.int64)
        return self.operand(shape, absent=absent)


def copied(arguments):
    """The arguments with tensors of their own, of the same layout, shared where they were."""
    copies = {}

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            base = value._base if value._base is not None and not value.is_neg() else None
            if base is not None and base.device.type == "cpu" and base.layout == torch.strided:
                copies[id(value)] = base.clone().as_strided(value.shape, value.stride(), value.storage_offset())
            else:
                copies[id(value)] = value.clone()
        return copies[id(value)]

    return tuple(map(copy, arguments))


def outcome(call, backend):
    """What the call returns and writes on a backend, or the type of what it raises."""
    arguments = copied(call.arguments)
    try:
        with fusednorm.use_backend(backend), torch.no_grad():
            returned = getattr(OPS, call.name)(*arguments)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return type(error), str(error)
    tensors = list(returned) if isinstance(returned, tuple) else [] if returned is None else [returned]
    written = arguments if call.name in ("rms_norm_", "fused_add_rms_norm_", "into") else ()
    tensors += [a for a in written if isinstance(a, torch.Tensor)]
    return [t.resolve_neg() for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]


def compare(call, describe):
    """Ends the process where the cpu backend's outcome is not the reference's."""
    got, expected = outcome(call, "cpu"), outcome(call, "reference")
    if isinstance(got, tuple) or isinstance(expected, tuple):
        same = got == expected
    else:
        same = len(got) == len(expected) and all(
            a.dtype == b.dtype and a.shape == b.shape and not (a.numel() and bool(differing(a, b).any()))
            for a, b in zip(got, expected, strict=True)
        )
    if not same:
        sys.exit(f"{describe}\n  {call.name}{call.arguments}\n  cpu: {got}\n  reference: {expected}")
    return isinstance(got, tuple)


def main():
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    variants, refused, made = itertools.cycle(cpu.variants()), Counter(), Counter()
    for number in range(options.first, options.first + options.calls):
        if number % 100 == 0:
            print(f"python tests/fuzz_operators.py --seed {options.seed} --first {number} --calls 100", file=sys.stderr)
        with cpu.use_variant(next(variants)):
            call = Call(options.seed, number)
            made[call.name] += 1
            refused[call.name] += compare(call, f"seed {options.seed}, call {number}")
    for name in NAMES:
        print(f"{name}: {refused[name]} raised, {made[name] - refused[name]} returned")
    raised = refused.total()
    print(f"{options.calls} calls: {raised} raised, {options.calls - raised} returned the reference's bits")


if __name__ == "__main__":
    main()
