"""``fla.modules``: norms, gates and rotations, in float32, rounded once, as its Triton kernels do.

Its gated norms multiply the row by the gate g, and then by its sigmoid, where fusednorm multiplies it by ``silu(g)``:
the last bit of float32 may differ. The exponential is fusednorm's (docs/spec.md, section 10).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.call import accumulator
from fusednorm.calls.checks import refuse_type
from fusednorm.compat import unrounded
from fusednorm.operations.gate import gate, silu_and_mul
from fusednorm.operations.l2 import l2_norm
from fusednorm.operations.layer_norm import fused_add_layer_norm
from fusednorm.operations.layer_norm import layer_norm as one_layer_norm
from fusednorm.operations.norm import fused_add_rms_norm, rms_norm
from fusednorm.operations.norm_gated import rms_norm_gated as norm_gated
from fusednorm.operations.rotate import qk_norm_rope, rotate

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def _activation(name: str) -> str:
    """The name that fusednorm has for an activation of FLA, or ValueError."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid', got {name!r}")
    return _ACTIVATIONS[name]


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``silu(x) * y`` of ``fla.modules.activations``: :func:`fusednorm.silu_and_mul` with ``between=torch.float32``."""
    return silu_and_mul(x, y, between=unrounded(x))


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` of each row: :func:`fusednorm.l2_norm`, which says how it rounds."""
    return l2_norm(x, eps, out_dtype=output_dtype)


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotates the heads of x, [B, T, H, D], in each row t by row t of the tables, [P, K]: :func:`fusednorm.rotate`.

    ``seqlen_offsets``, for all or of each sequence, is added to t. With ``cu_seqlens`` sequences that begin at these
    rows, the last number being T, lie one after the other. Where offsets are a tensor, what is rotated becomes 0 in
    rows before and behind the tables. ``chunk_indices`` does nothing.

    Raises:
        ValueError: ``seqlen_offsets``, a number, lead before or behind the tables, or ``cu_seqlens`` do not end with T.
    """
    tables = _at_offsets(x, cos, sin, seqlen_offsets, cu_seqlens)
    return rotate(x, **tables, interleaved=interleaved, out=x if inplace else None)


def _at_offsets(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> dict[str, Any]:
    """The tables of :func:`fusednorm.rotate`."""
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    rows = x.shape[1]
    if cu_seqlens is not None:
        starts = (cu_seqlens[:-1] - seqlen_offsets).repeat_interleave(cu_seqlens.diff())
        if len(starts) != rows:
            raise ValueError(f"cu_seqlens must end with x's {rows} rows, got {len(starts)}")
        positions = torch.arange(rows, device=x.device) - starts
    elif isinstance(seqlen_offsets, Tensor):
        positions = torch.arange(rows, device=x.device) + seqlen_offsets[:, None]
    elif not 0 <= seqlen_offsets <= len(cos) - rows:
        raise ValueError(
            f"seqlen_offsets must be 0 to {len(cos) - rows} for {rows} rows and tables of {len(cos)}, got "
            f"{seqlen_offsets}; pass longer tables"
        )
    else:
        return {name: t[seqlen_offsets : seqlen_offsets + rows] for name, t in (("cos", cos), ("sin", sin))}
    outside = (positions < 0) | (positions >= len(cos))
    cos, sin = (torch.nn.functional.pad(table, (0, 0, 0, 1)) for table in (cos, sin))  # with a row of zeros
    return {"cos": cos, "sin": sin, "positions": positions.masked_fill(outside, len(cos) - 1)}


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the residual if there is one, and layer-normalises the unrounded sum: :func:`fusednorm.layer_norm`.

    With ``is_rms_norm`` it is :func:`fusednorm.rms_norm`. ``prenorm`` and ``residual_in_fp32`` are as those of
    :func:`rms_norm_gated`.
    """
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    total = x
    if residual is not None:
        add_norm = fused_add_rms_norm if is_rms_norm else fused_add_layer_norm
        y, total = add_norm(x, residual, weight, bias=bias, eps=eps, round_sum=False)
    else:
        norm = rms_norm if is_rms_norm else one_layer_norm
        y = norm(x, weight, bias=bias, eps=eps)
    return (y, _kept(total, residual, residual_in_fp32)) if prenorm else y


def _kept(total: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> Tensor:
    """The sum, or x, that a call with ``prenorm`` returns."""
    return total.to(accumulator(total.dtype)) if residual is None and residual_in_fp32 else total


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds the residual if there is one, RMS-normalises the unrounded sum, and gates: :func:`fusednorm.rms_norm_gated`.

    The activation of the gate g is "sigmoid", or "swish", also called "silu"; the bias, [N], is added after the weight.
    With ``prenorm`` the sum is returned too, in the residual's dtype; without a residual it is x, in float32 if
    ``residual_in_fp32``.

    Raises:
        ValueError: another activation.
    """
    function = _activation(activation)
    if not isinstance(x, Tensor):
        refuse_type("x", x)
    wide, total = accumulator(x.dtype), x
    if residual is None and bias is None:
        y = norm_gated(x, g, weight, eps, activation=function, between=unrounded(x))
    else:
        if residual is None:
            y = rms_norm(x, weight, eps, bias=bias, out_dtype=wide)
        else:
            y, total = fused_add_rms_norm(x, residual, weight, eps, bias=bias, round_sum=False, out_dtype=wide)
        y = gate(y, g, activation=function, out_dtype=x.dtype)
    return (y, _kept(total, residual, residual_in_fp32)) if prenorm else y


class FusedRMSNormGated(torch.nn.Module):
    """:func:`rms_norm_gated` of rows of ``hidden_size`` elements, with a trainable weight if ``elementwise_affine``."""

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _activation(activation)  # raises here, not in the first step
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`rms_norm_gated` of x and the gate g."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)

    def extra_repr(self) -> str:
        """The arguments that determine the result."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}, activation={self.activation}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        flags = {"eps": self.eps, "activation": _activation(self.activation), "between": accumulator(of_rows)}
        return [("rms_norm_gated", flags)]


class RotaryEmbedding(torch.nn.Module):
    """Rotates heads by :func:`rotary_embedding`, with tables of cosines and sines in q's dtype that torch computes.

    Raises:
        ValueError: an odd ``dim``, or ``scale_base``, xPos, whose tables depend on calls before.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim must be even, got {dim}")
        if scale_base is not None:
            raise ValueError("scale_base is not supported; leave it out, or call fla's own for it")
        self.dim, self.base, self.interleaved, self.pos_idx_in_fp32 = dim, float(base), interleaved, pos_idx_in_fp32
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotates q and k, [B, T, H, D]; ``max_seqlen`` is the length of the tables, which offsets tell otherwise."""
        if max_seqlen is None:
            length: Any = q.shape[1] if cu_seqlens is None else cu_seqlens.diff()
            length = length + seqlen_offset
            max_seqlen = int(length.max()) if isinstance(length, Tensor) else length
        tables = _at_offsets(q, *self._of_length(max(max_seqlen, 1), q), seqlen_offset, cu_seqlens)
        return qk_norm_rope(q, k, **tables, norm=False, interleaved=self.interleaved)

    def _frequencies(self, device: torch.device | None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)

    def _of_length(self, length: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """The tables, of so many rows at least."""
        kept = self._tables
        if kept is not None and len(kept[0]) >= length and (kept[0].device, kept[0].dtype) == (q.device, q.dtype):
            return kept
        with torch.inference_mode(False):  # gradients take them later
            frequencies = self.inv_freq.to(q.device)
            if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:
                frequencies = self._frequencies(q.device)
            angles = torch.outer(torch.arange(length, dtype=frequencies.dtype, device=q.device), frequencies)
            self._tables = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return self._tables

    def extra_repr(self) -> str:
        """The arguments that determine the result."""
        flags = f"interleaved={self.interleaved}, pos_idx_in_fp32={self.pos_idx_in_fp32}"
        return f"dim={self.dim}, base={self.base}, {flags}"

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        return [("rotate", {"interleaved": self.interleaved})]
