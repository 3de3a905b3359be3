"""Tokens per second of a mixture-of-experts model of 60 million parameters, trained in float16 mixed precision.

    python -P benchmarks/train_moe.py [--minutes 4] [--json results.json]
    python -P benchmarks/train_moe.py --dry-run      # a tiny model on the CPU: shows that it runs, measures nothing

The same model with three kinds of norms, in turns: torch's (an addition, then `torch.nn.RMSNorm`), Liger's fused one
where it is installed, and ours (`fusednorm.AddRMSNorm`). All begin with the same weights and see the same tokens. Two
runs of ours must give the same losses, bit for bit; otherwise nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import fusednorm

#: Takes the width. The module takes x and the residual stream (None at first); it returns the sum's norm and the sum.
Norm = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Size:
    """The model, and a batch."""

    width: int = 512
    layers: int = 6
    heads: int = 8
    experts: int = 8
    expert_width: int = 928
    chosen: int = 2
    vocabulary: int = 8192
    sequences: int = 16
    length: int = 1024


TINY = Size(64, 2, 2, 4, 96, 2, 128, 2, 32)


class TorchNorm(nn.Module):
    """An addition, then torch's own norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        total = x if residual is None else x + residual
        return self.norm(total), total


class Ours(nn.Module):
    """One call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = fusednorm.AddRMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        residual = torch.zeros_like(x) if residual is None else residual
        y, total = self.norm(x, residual)
        return y, total


def liger() -> Norm | None:
    """Liger's fused norm, if it is installed."""
    try:
        from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
    except ImportError as error:
        print(f"without Liger: {error}")
        return None

    class Liger(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = LigerFusedAddRMSNorm(width, eps=1e-6)

        def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            residual = torch.zeros_like(x) if residual is None else residual
            y, total = self.norm(x, residual)
            return y, total

    return Liger


class Attention(nn.Module):
    """Causal, with one projection for queries, keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, length, width] to the same."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )


class Experts(nn.Module):
    """Each token goes to the experts with the highest scores. All experts see as many tokens as chose them."""

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
            # Every token takes an expert at most once, so that no two additions meet.
            out[token] = out[token] + (expert(tokens[token]) * scores[token, rank, None]).to(out.dtype)
        return out.view_as(x)


class Model(nn.Module):
    """A decoder whose residual stream goes from norm to norm."""

    def __init__(self, size: Size, norm: Norm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.attention = nn.ModuleList(Attention(size) for _ in range(size.layers))
        self.experts = nn.ModuleList(Experts(size) for _ in range(size.layers))
        self.norms = nn.ModuleList(norm(size.width) for _ in range(2 * size.layers + 1))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, length] token numbers to logits."""
        x, residual = self.embedding(tokens), None
        for attention, experts, before, between in zip(
            self.attention, self.experts, self.norms[:-1:2], self.norms[1::2], strict=True
        ):
            y, residual = before(x, residual)
            y, residual = between(attention(y), residual)
            x = experts(y)
        return self.head(self.norms[-1](x, residual)[0])


class Run:
    """A model with its optimiser, which trains a step at a time."""

    def __init__(self, size: Size, norm: Norm, device: str) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.model = Model(size, norm).to(device)
        with torch.no_grad():  # the same weights, whatever the norm's module draws or orders
            for name, weight in sorted(self.model.named_parameters()):
                if weight.dim() > 1:
                    generator = torch.Generator().manual_seed(sum(map(ord, name)))
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler(device, enabled=device != "cpu")
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    def step(self) -> float:
        """Trains on one batch; returns its seconds."""
        shape = (self.size.sequences, self.size.length + 1)
        # Tokens that can be learnt: each is often the one before plus one.
        tokens = torch.randint(self.size.vocabulary, shape, generator=self.generator)
        tokens[:, 1::2] = (tokens[:, :-1:2] + 1)[:, : tokens[:, 1::2].shape[1]] % self.size.vocabulary
        tokens = tokens.to(self.device)
        self.synchronise()
        begin = time.perf_counter()
        with torch.autocast(self.device, torch.float16 if self.device != "cpu" else torch.bfloat16):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimiser.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.synchronise()
        self.losses.append(loss.item())
        return time.perf_counter() - begin

    def synchronise(self) -> None:
        """Waits for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--json")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        sys.exit("there is no GPU; --dry-run shows that the script runs")
    size, device = (TINY, "cpu") if given.dry_run else (Size(), "cuda")
    kinds: dict[str, Norm | None] = {"torch": TorchNorm, "Liger": liger(), "fusednorm": Ours}
    torch.use_deterministic_algorithms(True, warn_only=True)

    runs = {name: Run(size, norm, device) for name, norm in kinds.items() if norm is not None}
    again = Run(size, Ours, device)
    for _ in range(5):
        for run in (*runs.values(), again):
            run.step()
    if runs["fusednorm"].losses != again.losses:
        sys.exit(f"two runs differ: {runs['fusednorm'].losses} and {again.losses}")
    parameters = sum(weight.numel() for weight in again.model.parameters())
    del again
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + (1 if given.dry_run else 60 * given.minutes)
    while time.monotonic() < end:
        for name, run in runs.items():
            seconds[name].append(run.step())

    tokens = size.sequences * size.length
    results = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    name = torch.cuda.get_device_name() if device == "cuda" else "a dry run: its figures mean nothing"
    print(f"{name}; {parameters / 1e6:.1f} million parameters, {tokens} tokens per step")
    for kind, rate in results.items():
        loss = f"loss {runs[kind].losses[0]:.3f} to {runs[kind].losses[-1]:.3f}"
        print(f"  {kind:10} {rate:12,.0f} tokens/s  {rate / results['torch']:.3f}x  {loss}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "parameters": parameters, "tokens_per_second": results}, file, indent=1)


if __name__ == "__main__":
    main()
