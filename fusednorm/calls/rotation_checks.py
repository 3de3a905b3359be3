"""Heads and the tables that rotate them: what both must be, and the rows of a table for given positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import FLOATS, Flags
from fusednorm.calls.checks import (
    check_affine,
    check_between,
    check_dense,
    check_device,
    check_flag,
    check_flags,
    check_memory,
    check_operands,
    usual,
)


def check_rotation(operands: Mapping[str, Any], flags: Mapping[str, Any], in_memory: bool) -> Mapping[str, Any]:
    """Heads of x, or of q and k, their weights and the tables; returns the flags, numbers rounded."""
    for flag in ("norm", "interleaved", "round_products"):
        if flag in flags:
            check_flag(flag, flags[flag])
    names = [name for name in ("x", "q", "k") if name in operands]
    norm, between = flags.get("norm", False), flags.get("between")
    _check_heads_and_tables(names, operands, norm, in_memory)
    if between is not None:
        for name in names:
            check_between(between, operands[name], name)
    if not norm:
        return flags
    asked = Flags(flags["eps"], flags["weight_offset"], True, flags["round_norm"], between)
    found = check_flags(asked, operands[names[0]], None, None, None)
    return {**flags, "eps": found.eps, "weight_offset": found.weight_offset}


def _check_heads_and_tables(names: list[str], operands: Mapping[str, Any], norm: bool, in_memory: bool) -> None:
    unusual = []  # whose weight is to be looked at by itself
    for name in names:
        x, weight = operands[name], operands.get(f"{name}_weight")
        if not in_memory or not usual((x, None, weight, None, None)) or x.dim() < 2:
            check_heads(name, x, in_memory)
            unusual.append(name)
    x, y = operands[names[0]], operands[names[-1]]
    if x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"k must have q's shape {list(x.shape)} but for the number of heads, got {list(y.shape)}; pass both as "
            "[..., H, D]"
        )
    for name in names:
        weight = operands.get(f"{name}_weight")
        if weight is not None and not norm:
            raise TypeError(f"{name}_weight is given, and with norm=False there is no norm that takes it; pass None")
        if name in unusual:
            check_affine(operands[name], weight, None, in_memory=in_memory, x_name=name, weight_name=f"{name}_weight")
    cos, sin, positions = operands["cos"], operands["sin"], operands["positions"]
    if cos is not None or sin is not None or names == ["x"]:
        check_tables(cos, sin, positions, x, in_memory=in_memory, x_name=names[0])
    elif positions is not None:
        raise TypeError("positions are given without tables; pass cos and sin, or leave out positions")
    elif not norm:
        raise TypeError("norm is False and cos and sin are None, so there is nothing to do; pass tables, or norm=True")


def check_heads(name: str, x: Tensor, in_memory: bool) -> None:
    """Heads, [..., H, D]; and that there is memory, if there must be."""
    check_operands(x, None, None, None, None, in_memory=in_memory, x_name=name)
    if x.dim() < 2:
        raise ValueError(f"{name} must be [..., H, D], rows of heads, got shape {list(x.shape)}")


def check_tables(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, x: Tensor, *, in_memory: bool, x_name: str = "x"
) -> None:
    """Tables to rotate heads by, and where in them; the values of positions too, if they are in a CPU's memory."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(table).__name__}; cos and sin go together: pass both"
            )
        if table.dtype not in FLOATS:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {str(table.dtype)[6:]}; convert it, for "
                f"instance {name}.to(torch.float32)"
            )
        check_dense(name, table, f"{name}.to_dense() makes one")
        check_device(name, table, x, x_name)
        if in_memory:
            check_memory(name, table)
        if torch.is_grad_enabled() and table.requires_grad:
            raise RuntimeError(f"{name} requires grad, and tables have no gradients; pass {name}.detach()")
    assert cos is not None
    assert sin is not None
    pairs, size = cos.shape[-1] if cos.dim() else 0, x.shape[-1]
    if size < 2:
        raise ValueError(
            f"{x_name} must have heads of at least 2 numbers, which make a pair, got shape {list(x.shape)}; leave such "
            "heads as they are"
        )
    if not 1 <= pairs <= size // 2:
        raise ValueError(
            f"cos must have 1 to {size // 2} columns, one for each pair of a head of {size}, got shape "
            f"{list(cos.shape)}; of a table with the angles twice, pass the first half: cos[..., : cos.shape[-1] // 2]"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos's shape {list(cos.shape)}, got {list(sin.shape)}; pass a pair of tables")
    rows = list(x.shape[:-2])
    if positions is None:
        _check_expands("cos", cos.shape[:-1], rows, "pass a row for each row of heads, or positions")
        return
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a torch.Tensor, got {type(positions).__name__}; leave it out for none")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {str(positions.dtype)[6:]}; convert it")
    check_dense("positions", positions, "positions.to_dense() makes one")
    check_device("positions", positions, x, x_name)
    if in_memory:
        check_memory("positions", positions)
    _check_expands("positions", positions.shape, rows, "pass a position for each row of heads")
    if cos.dim() != 2:
        raise ValueError(f"cos must be [P, K], a row for each position, got shape {list(cos.shape)}")
    if in_memory and positions.numel() and positions.device.type == "cpu":
        least, greatest = positions.aminmax()
        if least < 0 or greatest >= len(cos):
            raise ValueError(
                f"positions must be 0 to {len(cos) - 1}, the rows of cos, got {int(least)} to {int(greatest)}; pass a "
                "longer table, or other positions"
            )


def _check_expands(name: str, shape: torch.Size, rows: list[int], cure: str) -> None:
    """Checks that a shape expands to that of rows of heads."""
    if list(shape) == rows:
        return
    missing = len(rows) - len(shape)
    if missing < 0 or any(size != row and size != 1 for size, row in zip(shape, rows[missing:], strict=True)):
        raise ValueError(f"{name} must have rows of shape {rows}, or one that expands to it, got {list(shape)}; {cure}")


def rows_for(table: Tensor, positions: Tensor | None, x: Tensor) -> Tensor:
    """A row of the table for each row of heads, [..., K]."""
    if positions is not None:
        table = table.index_select(0, positions.reshape(-1)).reshape(*positions.shape, table.shape[-1])
    return table.expand(*x.shape[:-2], table.shape[-1])
