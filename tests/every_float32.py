"""Takes every float32, 2^32 numbers, through each 8-bit format and each function of a gate, on each instruction set.

    python tests/every_float32.py [--only int8 float8_e4m3fn exp silu ...] [--variants avx2 ...] [--no-reference]

Results are compared with the reference's, and status 1 says that one differs. Their digest is printed: it is the same
on every machine. Numbers within a format's range are cast twice: with a scale of 1 that is given, and in rows whose
computed scale is 1, because their greatest magnitude is the format's.

The errors of functions are measured against float64 (docs/spec.md, section 10, says why that is enough), in ulp of the
exact result, and where that is subnormal in the smallest number, 2^-149.
"""

import argparse
import dataclasses
import hashlib
import itertools
import math
import sys

import torch

import fusednorm
from fusednorm import Quantization
from fusednorm.backends import activations, cpu, quantizer

FORMATS = {
    "int8": Quantization(torch.int8, per="tensor"),
    "uint8": Quantization(torch.uint8, per="tensor", zero_point=128),
    "float8_e4m3fn": Quantization(torch.float8_e4m3fn, per="tensor"),
    "float8_e5m2": Quantization(torch.float8_e5m2, per="tensor"),
}
ONE = torch.ones(1)
#: Numbers that are taken at once, and of a function.
PART, FEW = 1 << 24, 1 << 17

#: The functions in float64. exp is inside of the others: C has no function for it alone.
EXACT = {
    "exp": torch.exp,
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "gelu_tanh": lambda z: z / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z))),
}
#: Errors are reported for each of these ranges of arguments: from one number up to the next.
RANGES = (-math.inf, -8.0, -4.0, -2.0, -1.0, 0.0, math.inf)


def calls(numbers, quantization):
    """What is quantized, how, and with which given scale."""
    yield numbers, quantization, ONE
    greatest = quantization.range[1]
    within = numbers.abs() <= greatest
    if within.any():
        column = torch.full((len(numbers), 1), greatest)
        rows = torch.cat((torch.where(within, numbers, 0), column), 1)
        yield rows, dataclasses.replace(quantization, per="row"), None


def part_of(index, parts):
    """The numbers of a part."""
    first = index * ((1 << 32) // parts) - (1 << 31)
    return torch.arange(first, first + PART, dtype=torch.int32).view(torch.float32)


def shown(name, digests, wrong):
    """Prints the digest and the differences of each instruction set; returns their number."""
    for variant, digest in digests.items():
        print(f"{name:14} {variant:12} {digest.hexdigest()[:16]} {wrong[variant]} differ", flush=True)
    return sum(wrong.values())


def cast(name, asked):
    """Casts to one format; returns how many bytes differ."""
    quantization, digests = FORMATS[name], {variant: hashlib.sha256() for variant in asked.variants}
    wrong = dict.fromkeys(asked.variants, 0)
    for index in range(asked.parts):
        for given, how, scale in calls(part_of(index, asked.parts).view(-1, 1 << 14), quantization):
            wanted = None
            if not asked.no_reference:
                wanted = quantizer.quantized(given, how, scale)[0].view(torch.uint8)
            for variant in asked.variants:
                with fusednorm.use_backend("cpu"), cpu.use_variant(variant):
                    found = fusednorm.quantize(given, how, scale=scale)[0].view(torch.uint8)
                digests[variant].update(found.numpy())
                wanted = found if wanted is None else wanted
                wrong[variant] += 0 if torch.equal(found, wanted) else int((found != wanted).sum())
    return shown(name, digests, wrong)


class Errors:
    """The greatest error of a function in each range, and for subnormal results; and NaNs in the wrong places."""

    def __init__(self, name):
        self.name, self.worst, self.subnormal, self.nans = name, [(0.0, 0.0)] * (len(RANGES) - 1), (0.0, 0.0), 0

    def look_at(self, z, found):
        exact = EXACT[self.name](z.double())
        nan = z.isnan() if self.name in ("exp", "sigmoid") else z.isnan() | (z == -math.inf)
        self.nans += int((found.isnan() != nan).sum())
        exponent = torch.frexp(exact)[1].clamp_min(-125)
        error = (found.double() - exact).abs() * torch.exp2(24.0 - exponent.double())
        # An infinity is right from half a unit beyond the greatest number on.
        overflows = (exact.abs() >= 2.0**128 - 2.0**103) & (found.double() == exact.sign() * math.inf)
        error = torch.where(nan | overflows, 0.0, error).nan_to_num(nan=math.inf)
        normal = exact.abs() >= 2.0**-126
        self.subnormal = self._greater(self.subnormal, torch.where(normal, 0.0, error), z)
        least, greatest = z.min().item(), z.max().item()
        for index, (low, high) in enumerate(itertools.pairwise(RANGES)):
            if greatest >= low and least < high:
                within = torch.where(normal & (z >= low) & (z < high), error, 0.0)
                self.worst[index] = self._greater(self.worst[index], within, z)

    @staticmethod
    def _greater(before, error, z):
        value, at = error.max(0)
        return max(before, (value.item(), z[at].item()))

    def show(self):
        for (error, at), low, high in zip(self.worst, RANGES, RANGES[1:], strict=False):
            print(f"{self.name:14} from {low:4} to {high:4}: at most {error:.2f} ulp, at {at!r}")
        print(f"{self.name:14} subnormal results: at most {self.subnormal[0]:.2f} * 2^-149, at {self.subnormal[1]!r}")
        if self.nans:
            print(f"{self.name:14} {self.nans} results are NaN and should not be, or the other way round")


def take(name, asked):
    """Takes numbers through a function; returns how many results differ, or are NaN where they should not be."""
    variants = () if name == "exp" else asked.variants
    digests, wrong = {variant: hashlib.sha256() for variant in variants}, dict.fromkeys(variants, 0)
    errors, ones = Errors(name), torch.ones(FEW)
    for index in range(asked.parts):
        for z in part_of(index, asked.parts).split(FEW):
            wanted = None
            if not asked.no_reference:
                wanted = activations.exponential(z) if name == "exp" else activations.activated(z, name)
                errors.look_at(z, wanted)
            for variant in variants:
                with fusednorm.use_backend("cpu"), cpu.use_variant(variant):
                    found = fusednorm.gate(ones, z, activation=name)
                found = torch.where(found.isnan(), math.nan, found + 0.0)  # one NaN, one zero
                digests[variant].update(found.numpy())
                wanted = found if wanted is None else wanted
                wrong[variant] += int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())
    if not asked.no_reference:
        errors.show()
    return shown(name, digests, wrong) + errors.nans


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FORMATS, *EXACT]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="formats and functions")
    parser.add_argument("--variants", nargs="+", choices=cpu.variants(), default=cpu.variants())
    parser.add_argument("--no-reference", action="store_true", help="compare the instruction sets alone")
    parser.add_argument("--parts", type=int, default=(1 << 32) // PART, help="of 2^24 numbers, spread over all")
    asked = parser.parse_args()
    differing = sum((cast if name in FORMATS else take)(name, asked) for name in asked.only)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
