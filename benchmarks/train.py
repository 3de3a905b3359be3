"""Trains a small mixture-of-experts language model with each norm, and prints tokens per second.

    python benchmarks/train.py [--size 60M] [--minutes 1] [--device cuda] [--threads 2] [--json FILE]

The models have the same initial weights and see the same tokens; only their norms differ: an addition and
``torch.nn.RMSNorm``, Liger's fused norm where it runs, and ``fusednorm.AddRMSNorm``. They take turns of one step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import fusednorm
from fusednorm.tools import console, doctor
from fusednorm.tools.console import measured_on, of_threads, print_markdown
from fusednorm.tools.measure import peers
from fusednorm.tools.measure.bench import WrongBitsError
from fusednorm.tools.measure.clock import Clock

#: The untimed first steps, in which two runs with fusednorm must have the same losses, bit for bit.
WARM_UP = 5
#: The least number of timed steps of each model.
LEAST_STEPS = 3


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of a batch."""

    width: int
    layers: int
    heads: int
    experts: int
    expert_width: int
    chosen: int
    vocabulary: int
    sequences: int
    length: int


#: By the number of parameters.
SIZES = {
    "60M": Size(512, 6, 8, 8, 928, 2, 8192, 16, 1024),
    "4M": Size(192, 4, 4, 4, 352, 2, 2048, 4, 128),
    "40k": Size(32, 2, 2, 4, 48, 2, 128, 2, 32),
}


class Unfused(nn.Module):
    """An addition, then torch's own norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        total = x + residual
        return self.norm(total), total


def norms(device: torch.device) -> tuple[dict[str, Callable[[int], nn.Module]], dict[str, str]]:
    """Functions from the width to a module (x and the residual -> y and the sum), and reasons for missing ones."""
    found: dict[str, Callable[[int], nn.Module]] = {"torch": Unfused}
    missing = {}
    try:
        peers.liger(device)
        from liger_kernel.transformers import LigerFusedAddRMSNorm

        found["Liger"] = functools.partial(LigerFusedAddRMSNorm, eps=1e-6, in_place=False)
    except peers.MissingError as reason:
        missing["Liger"] = str(reason)
    found["fusednorm"] = functools.partial(fusednorm.AddRMSNorm, eps=1e-6)
    return found, missing


class Attention(nn.Module):
    """Causal attention, with one projection for queries, keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, length, width] to the same."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(b, t, d))
        return out


class Experts(nn.Module):
    """Each token goes to the experts with the highest scores."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.chosen = size.chosen
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size.width, size.expert_width, bias=False),
                nn.SiLU(),
                nn.Linear(size.expert_width, size.width, bias=False),
            )
            for _ in range(size.experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, length, width] to the same."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, which = self.router(tokens).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = (which == number).nonzero(as_tuple=True)
            # A token takes an expert at most once, so no element is added to twice.
            out[token] = out[token] + (expert(tokens[token]) * scores[token, rank, None]).to(out.dtype)
        return out.view_as(x)


class Model(nn.Module):
    """A decoder whose norms pass on the residual stream."""

    def __init__(self, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.attention = nn.ModuleList(Attention(size) for _ in range(size.layers))
        self.experts = nn.ModuleList(Experts(size) for _ in range(size.layers))
        self.norms = nn.ModuleList(norm(size.width) for _ in range(2 * size.layers + 1))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, length] token numbers to logits."""
        x = self.embedding(tokens)
        residual = torch.zeros_like(x)
        for attention, experts, before, between in zip(
            self.attention, self.experts, self.norms[:-1:2], self.norms[1::2], strict=True
        ):
            y, residual = before(x, residual)
            y, residual = between(attention(y), residual)
            x = experts(y)
        logits: Tensor = self.head(self.norms[-1](x, residual)[0])
        return logits


class Trainer:
    """A model with its optimiser, which trains a step at a time."""

    def __init__(self, size: Size, norm: Callable[[int], nn.Module], device: torch.device) -> None:
        self.size, self.device, self.clock = size, device, Clock(device)
        self.model = Model(size, norm).to(device)
        with torch.no_grad():  # the same weights for every kind of norm, which may draw others
            for name, weight in sorted(self.model.named_parameters()):
                if weight.dim() > 1:
                    generator = torch.Generator().manual_seed(sum(map(ord, name)))
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    def step(self) -> float:
        """Trains on one batch; returns its seconds."""
        shape = (self.size.sequences, self.size.length + 1)
        # These tokens can be learnt: every other one is the previous one plus one.
        tokens = torch.randint(self.size.vocabulary, shape, generator=self.generator)
        tokens[:, 1::2] = (tokens[:, :-1:2] + 1)[:, : tokens[:, 1::2].shape[1]] % self.size.vocabulary
        tokens = tokens.to(self.device)
        self.clock.synchronise()
        begin = time.perf_counter()
        with torch.autocast(self.device.type, self.dtype):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimiser.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.clock.synchronise()
        self.losses.append(loss.item())
        return time.perf_counter() - begin


def train(size: Size, device: torch.device, minutes: float) -> dict[str, Any]:
    """Trains the model with every norm, and measures tokens per second in timed steps for so many minutes.

    Raises:
        WrongBitsError: two runs with fusednorm did not have the same losses.
    """
    kinds, missing = norms(device)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        trainers = {name: Trainer(size, norm, device) for name, norm in kinds.items()}
        again = Trainer(size, kinds["fusednorm"], device)
        for _ in range(WARM_UP):
            for trainer in (*trainers.values(), again):
                trainer.step()
        if trainers["fusednorm"].losses != again.losses:
            raise WrongBitsError(f"two runs differ: losses {trainers['fusednorm'].losses} and {again.losses}")
        parameters = sum(weight.numel() for weight in again.model.parameters())
        del again
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        begin = time.monotonic()
        while time.monotonic() - begin < 60 * minutes or len(seconds["torch"]) < LEAST_STEPS:
            for name, trainer in trainers.items():
                seconds[name].append(trainer.step())
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    tokens = size.sequences * size.length
    return {
        **doctor.facts(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "missing": missing,
        "norms": {
            name: {
                "tokens_per_second": tokens / statistics.median(times),
                "steps": len(times),
                "first_loss": trainers[name].losses[0],
                "last_loss": trainers[name].losses[-1],
            }
            for name, times in seconds.items()
        },
    }


def show(found: dict[str, Any], console: Console) -> None:
    """Prints the results of :func:`train`."""
    name = f"{measured_on(found)}{of_threads(found['threads'])}"
    console.print(f"{name}, torch {found['torch']}")
    console.print(
        f"a mixture of experts with {found['parameters'] / 1e6:.2f} million parameters, "
        f"{found['tokens_per_step']} tokens a step"
    )
    console.print("two runs with fusednorm had the same losses")
    table = Table(box=box.MARKDOWN)
    table.add_column("norm")
    for title in ("tokens/s", "beside torch", "steps", "first loss", "last loss"):
        table.add_column(title, justify="right")
    for name, figures in found["norms"].items():
        table.add_row(
            name,
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['tokens_per_second'] / found['norms']['torch']['tokens_per_second']:.3f}x",
            str(figures["steps"]),
            f"{figures['first_loss']:.4f}",
            f"{figures['last_loss']:.4f}",
        )
    print_markdown(table, console)
    for name, reason in found["missing"].items():
        console.print(f"{name}: [yellow]not measured[/]: {escape(reason)}")


def main() -> None:
    """Reads the command line and does it."""
    parser = argparse.ArgumentParser(description="Trains a mixture of experts with each norm.")
    parser.add_argument("--size", choices=SIZES, help="number of parameters (default 60M, on a CPU 4M)")
    parser.add_argument("--minutes", type=float, default=1.0, metavar="M", help="time steps for M minutes (default 1)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="as torch names it")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's number of threads, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    screen = console.console()
    screen.print(f"steps are timed for {arguments.minutes:g} minutes, after a few untimed ones")
    size = SIZES[arguments.size or ("4M" if arguments.device.type == "cpu" else "60M")]
    found = train(size, arguments.device, arguments.minutes)
    show(found, screen)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
