"""Takes every float32, 2^32 numbers, through each 8-bit format and each function of a gate, on each instruction set.

    python tests/every_float32.py [--only int8 float8_e4m3fn exp silu ...] [--variants avx2 ...] [--no-reference]
    python tests/every_float32.py --every 61 ...       a sample: each 61st number, and all near a boundary of rounding

Results are compared with the reference's, and status 1 says that one differs. The digest of the reference's results is
printed: it is the same on every machine. log is taken for numbers from 1 to 2^31.

Numbers within a format's range are cast twice: with a scale of 1 that is given, and in rows whose computed scale is 1,
because their greatest magnitude is the format's.

Of a gate's function the value and the derivative are computed. From 2^-30 to 128 and -2^-30 to -128 this is done twice:
C has loops with fewer operations for tiles of 512 gates none of which is low, so numbers pass once in their order, and
once in rows that each end with infinities, which makes every tile take the loops for all numbers. The results of other
numbers need no exponential. They are compared with these known results, and so is the reference at each 64th row.

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
from fusednorm.backends import cpu
from fusednorm.calls import c_abi
from fusednorm.calls.call import Call
from fusednorm.conformance.oracle_quantized import numbers
from fusednorm.engine import run_gates
from fusednorm.reference import activations, log_prob, quantizer
from fusednorm.torch_ops.steps import GATE_FLAGS

FORMATS = {
    "int8": Quantization(torch.int8, per="tensor"),
    "uint8": Quantization(torch.uint8, per="tensor", zero_point=128),
    "float8_e4m3fn": Quantization(torch.float8_e4m3fn, per="tensor"),
    "float8_e5m2": Quantization(torch.float8_e5m2, per="tensor"),
}
ONE = torch.ones(1)
#: Numbers that are taken at once, and of a function.
PART, FEW = 1 << 22, 1 << 17
#: Below this magnitude a function is 1, 1/2 or z / 2, and from that one on 0, 1, z or infinity.
LEAST, MOST = 2.0**-30, 128.0
#: Half of a tile of C: a row of as many numbers and two infinities is shorter than a tile.
ROW = 256

#: The functions in float64. exp is inside of the others: C has no function for it alone.
EXACT = {
    "exp": torch.exp,
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "gelu": lambda z: z * (torch.special.erfc(z * -math.sqrt(0.5)) / 2),
    "relu2": lambda z: torch.where(z > 0, z, 0 * z).square(),
    "gelu_tanh": lambda z: z / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z))),
    "tanh": torch.tanh,
}
#: Errors are reported for each of these ranges of arguments: from one number up to the next.
RANGES = (-math.inf, -8.0, -4.0, -2.0, -1.0, 0.0, math.inf)


def calls(rows, quantization):
    """What is quantized, how, and with which given scale."""
    yield rows, quantization, ONE
    greatest = quantization.range[1]
    within = rows.abs() <= greatest
    if within.any():
        column = torch.full((len(rows), 1), greatest)
        yield torch.cat((torch.where(within, rows, 0), column), 1), dataclasses.replace(quantization, per="row"), None


def parts(every, boundaries):
    """All float32 numbers in the order of their bits; or each so-manieth, and then the boundaries."""
    for first in range(-(1 << 31), 1 << 31, PART * every):
        yield torch.arange(first, min(first + PART * every, 1 << 31), every).int().view(torch.float32)
    if every > 1:
        yield boundaries


def rows_of(part, length):
    """The numbers in rows, and zeros at the end of the last one."""
    return torch.nn.functional.pad(part, (0, -len(part) % length)).view(-1, length)


def near_boundaries(dtype):
    """The 64 float32 numbers before and after each number of a format and each middle between two, of both signs."""
    table = torch.arange(257.0).double() if dtype in (torch.int8, torch.uint8) else torch.from_numpy(numbers(dtype))
    points = torch.cat((table, (table[1:] + table[:-1]) / 2)).float().view(torch.int32)
    near = (points[:, None] + torch.arange(-64, 65)).clamp_min(0).int().view(torch.float32).flatten()
    return torch.cat((near, -near))


def differ(found, wanted):
    """How many results differ; a NaN equals any NaN, and both zeros are equal."""
    if found.view(-1).view(torch.int64).equal(wanted.view(-1).view(torch.int64)):  # an eighth of the time
        return 0
    return int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())


def shown(name, digest, wrong):
    """Prints the digest and the differences of each instruction set; returns their number."""
    print(
        f"{name:14} digest {digest.hexdigest()[:16]}",
        *(f"{n} differ on {v}" for v, n in wrong.items()),
        sep=", ",
        flush=True,
    )
    return sum(wrong.values())


def cast(name, asked):
    """Casts to one format; returns how many bytes differ."""
    quantization, digest, wrong = FORMATS[name], hashlib.sha256(), dict.fromkeys(asked.variants, 0)
    for part in parts(asked.every, near_boundaries(quantization.dtype)):
        for given, how, scale in calls(rows_of(part, 1 << 14), quantization):
            wanted = None
            if not asked.no_reference:
                wanted = quantizer.quantized(given, how, scale)[0].view(torch.uint8)
            for variant in asked.variants:
                with fusednorm.use_backend("cpu"), cpu.use_variant(variant):
                    found = fusednorm.quantize(given, how, scale=scale)[0].view(torch.uint8)
                wanted = found if wanted is None else wanted
                wrong[variant] += 0 if found.equal(wanted) else int((found != wanted).sum())
            digest.update(wanted.numpy())
    return shown(name, digest, wrong)


class Errors:
    """The greatest error of a function in each range, and for subnormal results; and NaNs in the wrong places."""

    def __init__(self, name):
        self.name, self.worst, self.subnormal, self.nans = name, [(0.0, 0.0)] * (len(RANGES) - 1), (0.0, 0.0), 0

    def look_at(self, z, found):
        exact = EXACT[self.name](z.double())
        nan = z.isnan() if self.name in ("exp", "sigmoid", "relu2", "tanh") else z.isnan() | (z == -math.inf)
        self.nans += int((found.isnan() != nan).sum())
        magnitude = exact.abs()
        # The spacing of float32 at the exact number is 2^(exponent - 23), and 2^-149 where that is subnormal.
        exponent = (magnitude.view(torch.int64) >> 52).clamp_min(1023 - 126)
        per_spacing = ((2 * 1023 + 23 - exponent) << 52).view(torch.float64)
        error = (found.double() - exact).abs() * per_spacing
        # An infinity is right from half a unit beyond the greatest number on.
        overflows = (magnitude >= 2.0**128 - 2.0**103) & found.isinf()
        error = torch.where(nan | overflows, 0.0, error).nan_to_num(nan=math.inf)
        normal = magnitude >= 2.0**-126
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


def functions(z, name, variant):
    """A function of each number, twice, and its derivative, by C: those of 1 times the gate z, for an incoming 1.

    tanh is softcap with a cap of 1: a quotient and a product that change nothing. Its value is computed once.
    """
    one = torch.ones_like(z)
    with fusednorm.use_backend("cpu"), cpu.use_variant(variant):
        if name == "tanh":
            flags = {**GATE_FLAGS, "activation": "softcap", "limit": 1.0}
            return fusednorm.softcap(z, 1.0), run_gates.backward(one, (None, z), flags, (False, True))[1]
        value, slope = run_gates.backward(one, (one, z), {**GATE_FLAGS, "activation": name}, (True, True))
        return fusednorm.gate(one, z, activation=name), value, slope


def reference(z, name):
    """The same by the reference; of exp the value alone."""
    if name == "exp":
        return (activations.exponential(z),)
    if name == "tanh":
        return activations.softcap(z, 1.0, None)
    value, slope = activations.activated_and_slope(z, name)
    return value, value, slope


def beyond(z, name):
    """The same where no exponential is needed: for magnitudes below LEAST or from MOST on, and NaN."""
    tiny, above = z.abs() < LEAST, (z > 0).float()
    if name == "exp":
        return (torch.where(z.isnan(), z, torch.where(tiny, 1, above / (1 - above))),)  # 1, 0 or infinity
    if name == "sigmoid":
        value = torch.where(z.isnan(), z, torch.where(tiny, 0.5, above))
        return value, value, torch.where(z.isnan(), z, torch.where(tiny, 0.25, 0))
    if name == "relu2":
        value = torch.where(z < 0, 0, z) ** 2
        return value, value, torch.where(z > 0, 2 * z, 0)
    if name == "tanh":
        value = torch.where(z.isnan() | tiny, z, above - (z < 0).float())
        return value, torch.where(z.isnan(), z, tiny.float())
    value = torch.where(tiny, z / 2, z * above)  # NaN for -infinity
    if name == "gelu":
        value = torch.where(tiny & (z > 0), z - z / 2, value)  # half of the smallest number is rounded
        return value, value, torch.where(z.isnan(), z, torch.where(tiny, 0.5, above))
    return value, value, torch.where(tiny, 0.5, above) + z * 0


def take(name, asked):
    """Takes numbers through a function; returns how many results differ, or are NaN where they should not be."""
    digest, errors = hashlib.sha256(), Errors(name)
    wrong = dict.fromkeys(() if name == "exp" else asked.variants, 0)
    apart = 0
    for z in itertools.chain.from_iterable(part.split(FEW) for part in parts(asked.every, ONE)):
        rows = rows_of(z, ROW)
        ends = torch.nn.functional.pad(rows, (0, 2), value=-math.inf)
        magnitude = z.abs()
        if ((magnitude < LEAST) | ~(magnitude < MOST)).all():
            wanted = beyond(rows, name)
            loops = [(rows, wanted)]
            if not asked.no_reference:
                apart += sum(map(differ, reference(rows[::64], name), [t[::64].contiguous() for t in wanted]))
        else:
            wanted = functions(ends, name, asked.variants[0]) if asked.no_reference else reference(ends, name)
            within = [t[:, :ROW].contiguous() for t in wanted]
            loops = [(ends, wanted), (rows, within)]
            if not asked.no_reference:
                errors.look_at(z, within[0].flatten()[: len(z)])
                for result in within[-2:]:
                    digest.update(torch.where(result.isnan(), math.nan, result + 0.0).numpy())  # one NaN, one zero
        for (given, expected), variant in itertools.product(loops, wrong):
            wrong[variant] += sum(map(differ, functions(given, name, variant), expected))
    if not asked.no_reference:
        errors.show()
        wrong["the reference, beyond"] = apart
    return shown(name, digest, wrong) + errors.nans


def take_logarithm(asked):
    """Takes numbers from 1 to 2^31 through the logarithm; returns how many differ, or 1 for an error above one ulp."""
    digest, worst, wrong = hashlib.sha256(), (0.0, 1.0), dict.fromkeys(asked.variants, 0)
    first, last = (torch.tensor(number).view(torch.int32).item() for number in (1.0, 2.0**31))
    for begin in range(first, last + 1, PART * asked.every):
        x = torch.arange(begin, min(begin + PART * asked.every, last + 1), asked.every).int().view(torch.float32)
        found, exact, in_c = log_prob.logarithm(x), x.double().log(), torch.empty_like(x)
        tensors = {"logits": x, "ids": None, "temperature": None, "out": in_c}
        call = Call("logarithm", False, tensors, {}, {}, x.numel(), 1, 1)
        for variant in asked.variants:
            with cpu.use_variant(variant):
                cpu._lib.fn_run_declared(c_abi.pack_declared(call))
            wrong[variant] += int((in_c != found).sum())
        spacing = torch.ldexp(torch.ones_like(exact), exact.clamp(min=2.0**-126).log2().floor().int() - 23)
        error = (found.double() - exact).abs() / spacing
        worst = Errors._greater(worst, error, x)
        digest.update(found.numpy())
    print(f"log            from 1 to 2^31: at most {worst[0]:.3f} ulp, at {worst[1]!r}")
    return shown("log", digest, wrong) + (worst[0] > 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FORMATS, *EXACT, "log"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="formats and functions")
    parser.add_argument("--variants", nargs="+", choices=cpu.variants(), default=cpu.variants())
    parser.add_argument("--no-reference", action="store_true", help="compare the instruction sets alone")
    parser.add_argument(
        "--every", type=int, default=1, help="take each so-manieth number, and the boundaries of formats"
    )
    asked = parser.parse_args()
    names = [name for name in asked.only if name != "exp" or not asked.no_reference]
    functions = [name for name in names if name != "log"]
    differing = sum((cast if name in FORMATS else take)(name, asked) for name in functions)
    if "log" in names:
        differing += take_logarithm(asked)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
