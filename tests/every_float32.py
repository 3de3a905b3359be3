"""Casts every float32, 2^32 numbers, to each 8-bit format on each instruction set of this machine.

    python tests/every_float32.py [--formats int8 float8_e4m3fn ...] [--variants avx2 ...] [--no-reference]

The bytes are compared with those of the reference, which casts in integers. Their digest is printed, which is the same
on every machine. Status 1 if a byte differs. Numbers within a format's range are cast twice: with a scale of 1 that is
given, and in rows whose computed scale is 1, because their greatest magnitude is the format's.
"""

import argparse
import dataclasses
import hashlib
import sys

import torch

import fusednorm
from fusednorm import Quantization
from fusednorm.backends import cpu, quantizer

FORMATS = {
    "int8": Quantization(torch.int8, per="tensor"),
    "uint8": Quantization(torch.uint8, per="tensor", zero_point=128),
    "float8_e4m3fn": Quantization(torch.float8_e4m3fn, per="tensor"),
    "float8_e5m2": Quantization(torch.float8_e5m2, per="tensor"),
}
ONE = torch.ones(1)
#: Numbers that are cast at once.
PART = 1 << 24


def calls(numbers, quantization):
    """What is quantized, how, and with which given scale."""
    yield numbers, quantization, ONE
    greatest = quantization.range[1]
    within = numbers.abs() <= greatest
    if within.any():
        column = torch.full((len(numbers), 1), greatest)
        rows = torch.cat((torch.where(within, numbers, 0), column), 1)
        yield rows, dataclasses.replace(quantization, per="row"), None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--variants", nargs="+", choices=cpu.variants(), default=cpu.variants())
    parser.add_argument("--no-reference", action="store_true", help="compare the instruction sets alone")
    parser.add_argument("--parts", type=int, default=(1 << 32) // PART, help="of 2^24 numbers, spread over all")
    asked = parser.parse_args()
    differing = 0
    for name in asked.formats:
        quantization, digests = FORMATS[name], {variant: hashlib.sha256() for variant in asked.variants}
        wrong = dict.fromkeys(asked.variants, 0)
        for part in range(asked.parts):
            first = part * ((1 << 32) // asked.parts) - (1 << 31)
            numbers = torch.arange(first, first + PART, dtype=torch.int32).view(torch.float32).view(-1, 1 << 14)
            for given, how, scale in calls(numbers, quantization):
                wanted = None
                if not asked.no_reference:
                    wanted = quantizer.quantized(given, how, scale)[0].view(torch.uint8)
                for variant in asked.variants:
                    with fusednorm.use_backend("cpu"), cpu.use_variant(variant):
                        found = fusednorm.quantize(given, how, scale=scale)[0].view(torch.uint8)
                    digests[variant].update(found.numpy())
                    wanted = found if wanted is None else wanted
                    wrong[variant] += 0 if torch.equal(found, wanted) else int((found != wanted).sum())
        for variant in asked.variants:
            print(
                f"{name:14} {variant:12} {digests[variant].hexdigest()[:16]} {wrong[variant]} bytes differ", flush=True
            )
            differing += wrong[variant]
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
