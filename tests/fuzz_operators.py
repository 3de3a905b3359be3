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
from fusednorm.backends import cpu
from fusednorm.calls.call import ACTIVATIONS
from fusednorm.conformance.cases import differing
from fusednorm.conformance.test_quantized import PRESETS
from fusednorm.declare.declaration import Role
from fusednorm.torch_ops.operator import DECLARED
from fusednorm.torch_ops.registered import exported

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STRANGE = (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)
NUMBERS = (0.0, 1e-6, 1e-5, 1.0, -1.0, 3e38, 1e300, float("inf"), float("nan"))
OPS = torch.ops.fusednorm
NAMES = tuple(exported())
#: By the name of the argument.
TEXTS = {
    "activation": ACTIVATIONS,
    "clamp": ("before", "after"),
    "quantization": [*map(str, PRESETS.values())],
}


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
        if self.name.startswith("affine"):  # between other operations, in the type of the computation
            self.dtype = self.wide
        self.heads, self.pairs = random.choice((1, 2, 5)), random.choice((0, 1, hidden // 2, hidden // 4))
        self.columns = random.choice((0, 1, 5))
        self.given = {}
        for argument in getattr(OPS, self.name).default._schema.arguments:
            self.given[argument.name] = self.argument(argument.name, str(argument.type))
        self.arguments = tuple(self.given.values())

    @property
    def wide(self):
        """The type of the computation."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

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

    def argument(self, name, kind):
        """Of that name, and of that type in a schema."""
        random, strange = self.random, STRANGE if self.wrong else ()
        if "Tensor" in kind:
            return self.tensor(name, 0.3 * kind.startswith("Optional"))
        if kind in ("float", "number"):
            usual = {"limit": (0.0, 0.0, 0.0, 0.5), "alpha": (1.0, 1.0, 1.0, 1.702), "cap": (0.7, 30.0)}.get(name)
            usual = (0.0, 0.0, 0.0, 1.0) if name == "up_offset" else usual
            return random.choice(NUMBERS if usual is None or random.random() < 0.1 else usual)
        if kind == "Optional[float]":
            return random.choice((None, None, 0.7, 30.0, *NUMBERS[:1]))
        if name == "ignore_index":
            return random.choice((None, 0, -100))
        if kind == "bool":
            return random.random() < (0.2 if name == "round_steps" else 0.5)
        if kind == "List[bool]":  # which of so many gradients, or of another number of them
            declared = DECLARED.get(self.name.removesuffix("_backward"))
            count = len(declared.declaration.with_gradient) if declared else 3
            count += self.name == "layer_norm_backward"  # of the residual too, which the forward operator lacks
            count = count if not self.wrong or random.random() < 0.95 else random.choice((0, 1, 4))
            return [random.random() < 0.7 for _ in range(count)]
        if kind == "str":
            return random.choice(TEXTS[name]) if not self.wrong or random.random() < 0.9 else "int8"
        if name == "between":
            return random.choice((None, torch.bfloat16, torch.float16, *strange))
        allowed = (*DTYPES, *strange) if strange else DTYPES[:3]
        if random.random() < (0.95 if name == "x_dtype" else 0.7):
            return None if "Optional" in kind else self.dtype
        return random.choice(allowed)

    def of_keys(self, name):
        """Of attention: two samples of 3 queries and 5 keys; or two sequences in 3 pages of 4."""
        random, size = self.random, self.shape[-1]
        heads, paged = 3 if self.wrong and random.random() < 0.1 else 4, "pages" in self.roles
        shapes = {"q": (5, heads, size), "k": (3, 2, 4, size)} if paged else {"q": (2, heads, 3, size)}
        shapes = {"k": (2, 2, 5, size)} | shapes | {"sinks": (heads,)}
        places = {"pages": [[2, 0], [1, 1]], "starts": [0, 2, 5], "lengths": [5, 3]}
        if name == "mask":
            return None if random.random() < 0.5 else torch.rand(2, 1, 3, 5, generator=self.generator) > 0.3
        if name in places:
            dtype = random.choice((torch.int32, torch.int64, *[torch.int16] * self.wrong))
            return torch.tensor(places[name], dtype=dtype)
        shape = shapes.get(name, shapes["k" if name == "v" else "q"])
        return self.operand(shape, self.dtype, absent=0.5 if name == "sinks" else 0)

    def of_one_dtype(self, name, absent):
        """Of products of int8: numbers of the only dtypes that fit, mostly."""
        random = self.random
        if random.random() < absent:
            return None
        shapes = {"weight": (self.columns, *self.shape[-1:]), "q": self.shape}
        shapes |= dict.fromkeys(("weight_scale", "bias"), (self.columns,))
        dtypes = {"q": torch.int8, "weight": torch.int8, "zero_point": torch.int32, "bias": random.choice(DTYPES[:3])}
        shape, dtype = shapes.get(name, (*self.shape[:-1], 1)), dtypes.get(name, torch.float32)
        t = 40 * torch.randn(shape, generator=self.generator)
        if self.wrong and random.random() < 0.1:
            return self.operand(shape)
        t = t.clamp(-128, 127).to(dtype)
        return laid_out(random, t) if self.wrong else t

    def tensor(self, name, absent):
        if self.name == "int8_linear":
            return self.of_one_dtype(name, absent)
        random, rows = self.random, (*self.shape[:-1], self.heads, self.shape[-1])
        if name == "scale" and self.roles.get(name) is not Role.SAMPLES:
            return self.operand((1,), torch.float32, absent=0.7)
        if name == "zero_point":
            return None if random.random() < 0.8 else torch.ones(1, dtype=torch.int32)
        if name == "residual_out":
            residual = self.given["residual"]
            own = None if residual is None else self.operand(dtype=residual.dtype)
            return own if random.random() < 0.8 else random.choice((*self.given.values(), None))
        if name == "out" and random.random() < 0.2:
            return self.given["x"]
        if Role.KEYS in self.roles.values():
            return self.of_keys(name)
        match self.roles.get(name, Role.ROWS):
            case Role.WEIGHT:
                of_heads = self.name.startswith(("affine", "layer", "fused_add_layer")) and random.random() < 0.4
                return self.operand(self.shape[-2:] if of_heads else self.shape[-1:], absent=absent)
            case Role.NUMBERS | Role.SETTINGS:
                return self.operand(self.shape[:-1], self.wide)
            case Role.MATRIX:
                return self.operand((self.columns, self.shape[-1]))
            case Role.COLUMNS:
                return self.operand((self.columns,), absent=absent)
            case Role.PRODUCTS:
                return self.operand((*self.shape[:-1], self.columns))
            case Role.TABLE:
                width = self.shape[-1] if self.wrong and random.random() < 0.1 else self.pairs
                return self.operand((*self.shape[:-1], width), torch.float32)
            case Role.IDS | Role.CHOSEN:
                shape = (*self.shape[:-1], 3)[: len(self.shape) - (self.pairs % 2)]
                least, most = (-2, self.shape[-1] + 2) if self.wrong else (0, max(1, self.shape[-1]))
                dtype = random.choice((torch.int32, torch.int64))
                return torch.randint(least, most, shape, generator=self.generator, dtype=dtype)
            case Role.OF_CHOSEN:
                ids = (*self.shape[:-1], 3)[: len(self.shape) - (self.pairs % 2)]
                return self.operand(ids, self.wide)
        dtype = self.dtype if name in ("x", "y", "n", "logits") else None
        return self.operand(rows if self.name == "rotate" else None, dtype, absent)

    @property
    def roles(self):
        """Those of its tensors that do not have the shape of rows."""
        declared = DECLARED.get(self.name.removesuffix("_backward"))
        return declared.declaration.roles if declared else _ROLES


#: Of operators without a declaration.
_ROLES = {"weight": Role.WEIGHT, "bias": Role.WEIGHT, "rstd": Role.NUMBERS}


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
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
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
