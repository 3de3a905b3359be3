"""Packs a call as C takes it: ``struct fn_call`` of ``cpu/abi/call.h``."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from fusednorm.calls.c_enums import Activation, DeclaredOf, Flag, GateFlag, RotationFlag
from fusednorm.calls.c_kinds import KINDS
from fusednorm.calls.call import (
    Backward,
    Call,
    Forward,
    GateSteps,
    Quantize,
    Strides,
    device_of,
    gate_steps,
)
from fusednorm.calls.gated_norm_calls import norm_of, operation_of_norm
from fusednorm.calls.rotation_calls import Heads, heads_of

# Integers of this module: an attribute of an enumeration costs 0.1 us, and packing is a tenth of a short call.
_flags = tuple(flag.value for flag in Flag)
ROUND_SUM, ROUND_NORM, SCALE_ONLY, QUANTIZED, QUANTIZE_ONLY = _flags[:5]
GATE_AFTER, GATE_BEFORE, GATE_ONLY, ROTATION_ONLY, CENTER, DECLARED_ONLY = _flags[5:]
NORMALISED, INTERLEAVED = (flag.value for flag in RotationFlag)
CLAMP_AFTER, ROUND_STEPS, IN_TURNS = (flag.value for flag in GateFlag)

# All fields of C's structures have 8 bytes. Each of a call's nine operands has four; the last ones may be left out.
_pack, _pack_seven, _pack_four, _pack_one = (
    struct.Struct(f"=10q2d{4 * operands}q{32 * (9 - operands)}x").pack for operands in (9, 7, 4, 1)
)
_RESULTS = struct.Struct("=12q")
_GATE, _ROTATION = struct.Struct("=9q3d20q"), struct.Struct("=11q2d38q")
_ABSENT: tuple[int, ...] = (0, 0, 0, 0)
_ACTIVATIONS = {activation.name.lower(): activation.value for activation in Activation}


def _operand(tensor: Tensor | None, strides: Strides = (0, 0)) -> tuple[int, ...]:
    return _ABSENT if tensor is None else (KINDS[tensor.dtype], tensor.data_ptr(), *strides)


def _is_gradient_of_gate(call: object) -> bool:
    return isinstance(call, Call) and call.backward and call.name == "gate"


def _only(flag: int, call: Quantize | Call, threads: int, x: tuple[int, ...] = _ABSENT) -> bytes:
    """The header of a call whose operands follow it in memory."""
    numbers = (device_of(call).index or 0, threads, call.rows, call.inner, call.hidden_size)
    return _pack_one(_is_gradient_of_gate(call), flag, *numbers, 0, 0, 1, 0.0, 0.0, *x)


def pack_forward(call: Forward, threads: int = 1, more_flags: int = 0) -> bytes:
    """A forward pass, of two calls where a norm or a scaling comes first. ``threads``: the most that a CPU uses.

    Without ``out`` the rows have no memory of their own: C keeps them.
    """
    x, residual, weight, out, residual_out, rstd, operation, rows, inner, strides, eps, weight_offset = call[:12]
    device, x_type, residual_type, weight_type, out_type, hidden_size, round_sum, round_norm, total_type = operation[:9]
    x_strides, residual_strides, out_strides, total_strides = strides
    flags = round_sum * ROUND_SUM + round_norm * ROUND_NORM
    numbers = (device.index or 0, threads, rows, inner, hidden_size, 0)
    before, first, around, heads, weight_stride, bias = b"", operation.first, operation.around, 1, 0, _ABSENT
    given: tuple[int, ...] = (KINDS[x_type], x.data_ptr(), *x_strides)
    if first is not None:
        passed = _passed(first.between, inner, hidden_size)
        norm = (*given, *_ABSENT, *_operand(call.first_weight), *passed)
        before = _pack_four(0, flags, *numbers, 1, 1, call.first_eps, weight_offset, *norm)
        given = passed
    elif around is not None:
        heads, weight_stride = call.heads, _from_head_to_head(weight)
        bias = _operand(call.bias, (0, _from_head_to_head(call.bias)))
        if around.scaled:
            passed = _passed(x_type, inner, hidden_size)
            before = _pack_four(0, SCALE_ONLY, *numbers, 1, 1, call.x_scale, 0.0, *given, *2 * _ABSENT, *passed)
            given = passed
    if out is not None:
        to: tuple[int, ...] = (KINDS[out_type], out.data_ptr(), *out_strides)
    else:
        to = _ABSENT if out_type is None else _passed(out_type, inner, hidden_size)
    # Written out, because this is a tenth of a short call.
    return before + _pack_seven(
        *(0, flags + more_flags + operation.center * CENTER, *numbers, 0, heads, eps, weight_offset, *given),
        *(_ABSENT if residual is None else (KINDS[residual_type], residual.data_ptr(), *residual_strides)),
        *(_ABSENT if weight is None else (KINDS[weight_type], weight.data_ptr(), 0, weight_stride)),
        *to,
        *(_ABSENT if residual_out is None else (KINDS[total_type], residual_out.data_ptr(), *total_strides)),
        *(_ABSENT if rstd is None else _operand(rstd)),
        *bias,
    )


def _passed(dtype: torch.dtype | None, inner: int, hidden_size: int) -> tuple[int, ...]:
    """Rows without memory of their own: C keeps them."""
    return KINDS[dtype], 0, inner * hidden_size, hidden_size


def _from_head_to_head(weight: Tensor | None) -> int:
    """The stride of a weight, or a bias, with a row for each head; else 0."""
    return 0 if weight is None or weight.dim() == 1 else weight.shape[1]


def pack_backward(call: Backward, threads: int = 1, block: int = 0, partial: Tensor | None = None) -> bytes:
    """A backward pass. ``partial``: scratch of GPU kernels, [blocks, N], where each block has so many rows."""
    dy, d_residual_out, h, rstd, weight, dx, dresidual, dweight, operation, rows, inner, strides = call[:12]
    device, hidden_size, flags = operation.device.index or 0, operation.hidden_size, operation.center * CENTER
    return _pack(
        *(1, flags, device, threads, rows, inner, hidden_size, block, 0, call.heads, 0.0, call.weight_offset),
        *_operand(dy, strides[0]),
        *_operand(d_residual_out, strides[1]),
        *_operand(h, strides[2]),
        *_operand(rstd),
        *_operand(weight),
        *_operand(dx),
        *_operand(dresidual),
        *_operand(call.dbias if partial is None else partial),
        *_operand(dweight),
    )


def pack_quantize(call: Quantize, threads: int = 1) -> bytes:
    """A forward pass, or a call with the rows alone, and the quantizer that takes the rows."""
    if call.norm is not None:
        packed = pack_forward(call.norm, threads, QUANTIZED)
    else:
        packed = _only(QUANTIZE_ONLY, call, threads, _operand(call.y, call.y_strides))
    out, scale, zero_point = call.out, call.scale, call.zero_point
    outer, inner, group = call.scale_strides
    of_scale = scale.data_ptr(), 4 * outer, 4 * inner, 4 * group
    outer, inner, group = call.zero_point_strides
    of_zero_point = 0 if zero_point is None else zero_point.data_ptr(), 4 * outer, 4 * inner, 4 * group
    results = _RESULTS.pack(call.inner, out.data_ptr(), *call.out_strides, *of_scale, *of_zero_point)
    return packed + call.quantization.packed[KINDS[call.dtype]] + results


def steps_in_c(steps: GateSteps, interleaved: bool = False) -> tuple[int, float, float, float]:
    """The flags and the numbers of a gate's optional steps."""
    limit, alpha, up_offset, clamp, round_steps = steps
    flags = CLAMP_AFTER * (clamp == "after") + ROUND_STEPS * round_steps + IN_TURNS * interleaved
    return flags, limit, alpha, up_offset


_NO_STEPS = steps_in_c(GateSteps())


_OF_GATE = "", "y", "z", "out", ""
_OF_GATE_BACKWARD = "d", "y", "z", "dy", "dz"


def pack_gate(call: Call, threads: int = 1) -> bytes:
    """A gate, or its gradients, as ``struct fn_gate`` of ``cpu/abi/gate.h``."""
    tensors, strides, flags = call.tensors, call.strides, call.flags
    operands = [
        _ABSENT if (tensor := tensors.get(name)) is None else (KINDS[tensor.dtype], tensor.data_ptr(), *strides[name])
        for name in (_OF_GATE_BACKWARD if call.backward else _OF_GATE)
    ]
    wide = any(t is not None and t.dtype == torch.float64 for t in (tensors.get("y"), tensors["z"]))
    numbers = steps_in_c(gate_steps(flags), flags["interleaved"])
    return _GATE.pack(
        *(call.backward, _ACTIVATIONS[flags["activation"]], KINDS[flags["between"]], wide),
        *(threads, call.rows, call.inner, call.hidden_size, *numbers),
        *itertools.chain(*operands),
    )


def pack_norm_gated(call: Call, threads: int = 1) -> bytes:
    """A norm and the gate that takes its rows or that it takes the rows of; or the gradients of both."""
    return (_pack_norm_gated_backward if call.backward else _pack_norm_gated)(call, threads)


def _pack_norm_gated(call: Call, threads: int) -> bytes:
    norm, flags = norm_of(call), call.flags
    (x_strides, _, out_strides, _), operation, inner, size = norm.strides, norm.operation, call.inner, call.hidden_size
    if flags["norm_before_gate"]:
        flag, alone = GATE_AFTER, norm._replace(out=None)
        y, out = _passed(operation.out, inner, size), _operand(norm.out, out_strides)
    else:
        flag, alone = GATE_BEFORE, norm._replace(strides=((inner * size, size), *norm.strides[1:]))
        y, out = _operand(norm.x, x_strides), _passed(operation.x, inner, size)
    z = _operand(call.tensors["gate"], call.strides["gate"])
    return pack_forward(alone, threads, flag) + _gate_of_norm(call, threads, (_ABSENT, y, z, out, _ABSENT))


def _pack_norm_gated_backward(call: Call, threads: int) -> bytes:
    """The gradients of the gate come before those of the norm, or after them if the gate comes before the norm."""
    tensors, strides, flags, inner, size = call.tensors, call.strides, call.flags, call.inner, call.hidden_size
    weight, operation = tensors["weight"], operation_of_norm(call.x, tensors["weight"], flags)
    d, x, z = (_operand(tensors[name], strides[name]) for name in ("d_out", "x", "gate"))
    dx, dz = (_operand(tensors[name], (inner * size, size)) for name in ("dx", "dgate"))
    heads = 1 if weight is None or weight.dim() == 1 else weight.shape[0]
    if flags["norm_before_gate"]:
        flag, passed = GATE_AFTER, _passed(operation.out, inner, size)
        of_norm, of_gate = (passed, x, dx), (d, passed, z, passed, dz)
    else:
        flag, passed = GATE_BEFORE, _passed(operation.x, inner, size)
        d_passed = _ABSENT if tensors["dx"] is None and tensors["dgate"] is None else passed
        of_norm, of_gate = (d, passed, d_passed), (passed, x, z, dx, dz)
    of_call, device = flag + flags["round_norm"] * ROUND_NORM, operation.device.index or 0
    return _pack(
        *(1, of_call, device, threads, call.rows, inner, size, 0, 0, heads, 0.0, flags["weight_offset"]),
        *(*of_norm[0], *_ABSENT, *of_norm[1], *_operand(tensors["rstd"]), *_operand(weight)),
        *(*of_norm[2], *_ABSENT, *_ABSENT, *_operand(tensors["dweight"])),
    ) + _gate_of_norm(call, threads, of_gate)


def _gate_of_norm(call: Call, threads: int, operands: Sequence[tuple[int, ...]]) -> bytes:
    """The gate beside a norm, which has no optional steps."""
    return _GATE.pack(
        *(call.backward, _ACTIVATIONS[call.flags["activation"]], 0, call.x.dtype == torch.float64),
        *(threads, call.rows, call.inner, call.hidden_size, *_NO_STEPS, *itertools.chain(*operands)),
    )


_NO_HEADS = (0,) * 13


def _heads(heads: Heads) -> tuple[int, ...]:
    x, out, weight, x_strides, out_strides, rstd = heads
    of_weight = 0, 0, 0
    if weight is not None:
        of_weight = KINDS[weight.dtype], weight.data_ptr(), heads.weight_stride
    of_rstd = 0 if rstd is None else rstd.data_ptr()
    return heads.number, x.data_ptr(), *x_strides, out.data_ptr(), *out_strides, *of_weight, of_rstd


def pack_rotate(call: Call, threads: int = 1) -> bytes:
    """Heads that are normalised and rotated, as ``struct fn_rotation`` of ``cpu/abi/rotation.h``."""
    given, sets = call.flags, heads_of(call)
    (first, *_), cos, sin, positions = sets, *map(call.tensors.__getitem__, ("cos", "sin", "positions"))
    flags = NORMALISED + ROUND_NORM * given["round_norm"] if given["norm"] else 0
    of_positions = 0, 0, 0, 0
    if positions is not None:
        of_positions = positions.element_size(), positions.data_ptr(), *call.strides["positions"]
    return _ROTATION.pack(
        *(flags + INTERLEAVED * given["interleaved"], KINDS[first.x.dtype], KINDS[first.out.dtype]),
        *(KINDS[given["between"]], KINDS[given["products"]], threads, call.rows, call.inner, call.hidden_size),
        *(0 if cos is None else cos.shape[-1], len(sets), given["eps"], given["weight_offset"]),
        *(_ABSENT if cos is None else _operand(cos, call.strides["cos"])),
        *(_ABSENT if sin is None else _operand(sin, call.strides["sin"])),
        *of_positions,
        *itertools.chain(*map(_heads, sets)),
        *(_NO_HEADS if len(sets) == 1 else ()),
    )


#: The operations that multiply rows by those of a weight, and so have results of another length.
PRODUCTS = frozenset(("linear", "int8_linear"))

_DECLARED_OF = {of.name.lower(): of.value for of in DeclaredOf}
_OPERANDS_OF_DECLARED, _FLAGS_OF_DECLARED = 16, 16


@functools.cache
def _declared(flags: str, operands: int) -> Callable[..., bytes]:
    """Packs so many operands, and flags each of which is a double or a whole number, as ``d`` and ``q`` say."""
    flags_left, operands_left = _FLAGS_OF_DECLARED - len(flags), _OPERANDS_OF_DECLARED - operands
    assert min(flags_left, operands_left) >= 0, "struct fn_declared has no room for so many operands or flags"
    return struct.Struct(f"=12q{flags}{8 * flags_left}x{4 * operands}q{32 * operands_left}x").pack


def pack_declared(call: Call, threads: int = 1) -> bytes:
    """A declared operation, or its gradient, as ``struct fn_declared`` of ``cpu/abi/declared.h``."""
    name, backward, tensors, strides, flags, hidden_size, rows, inner, part, sums = call
    number = _DECLARED_OF[name]
    if backward:
        number = _DECLARED_OF.get(f"{name}_backward", number)
    operands: list[int] = []
    of_sums, given, types = 0, 0, ""
    columns = call.out.shape[-1] if name in PRODUCTS else 0
    for place, (operand, tensor) in enumerate(tensors.items()):
        if tensor is None:
            operands += _ABSENT
            continue
        if operand in strides:
            lies = strides[operand]
        elif operand in sums:
            lies = sums[operand]
            of_sums |= 1 << place
        else:
            each = tensor.shape[-1] if columns else tensor.numel() // rows
            lies = inner * each, each
        operands += (KINDS[tensor.dtype], tensor.data_ptr(), *lies)
    for place, flag in enumerate(flags.values()):
        given |= (flag is not None) << place
        types += "d" if type(flag) is float else "q"
    return _declared(types, len(tensors))(
        *(
            backward,
            number,
            call.x.dtype == torch.float64,
            threads,
            rows,
            inner,
            hidden_size,
            *part,
            of_sums,
            given,
            columns,
        ),
        *[flag or 0 for flag in flags.values()],
        *operands,
    )


_ATTENTION = struct.Struct("=16q2d31q")


def pack_attention(call: Call, threads: int = 1, first: int = 0, last: int | None = None) -> bytes:
    """Attention as ``struct fn_attention`` of ``cpu/abi/attention.h``: of queries [first, last), or from first on."""
    tensors, flags = call.tensors, call.flags
    q, k, v, out = (cast(Tensor, tensors[name]) for name in ("q", "k", "v", "out"))
    mask, sinks = tensors.get("mask"), tensors["sinks"]
    if call.name == "attention":
        sequences, heads, queries, size = q.shape
        of_q, of_out, of_pages = _rows_in_heads(q), _rows_in_heads(out), (0,) * 8
    else:
        pages, starts, lengths = (cast(Tensor, tensors[name]) for name in ("pages", "starts", "lengths"))
        (queries, heads, size), sequences = q.shape, lengths.shape[0]
        # A stride of 0 from one sequence to the next: they follow each other.
        of_q, of_out = (_rows_in_heads(t.transpose(0, 1).expand(2, -1, -1, -1)) for t in (q, out))
        of_starts = KINDS[starts.dtype], starts.data_ptr(), KINDS[lengths.dtype], lengths.data_ptr()
        of_pages = KINDS[pages.dtype], pages.data_ptr(), pages.stride(0), k.shape[2], *of_starts
    shape = sequences, heads, k.shape[1], size, v.shape[-1], queries, k.shape[2]
    which = first, queries if last is None else last, flags["causal"], flags["window"] or 0
    of_mask: tuple[int, ...] = (0,) * 5
    if mask is not None:
        whole = mask.expand(sequences, heads, queries, k.shape[2])
        of_mask = mask.data_ptr(), *whole.stride()
    return _ATTENTION.pack(
        *(0, DeclaredOf.ATTENTION.value, 0, threads, KINDS[q.dtype], *shape, *which),
        *(flags["scale"], flags["softcap"] or 0.0),
        *(*of_q, *_rows_in_heads(k), *_rows_in_heads(v), *of_out, *of_mask),
        *((0, 0) if sinks is None else (KINDS[sinks.dtype], sinks.data_ptr())),
        *of_pages,
    )


def _rows_in_heads(tensor: Tensor) -> tuple[int, int, int, int]:
    """The address of [B, H, L, D], and its first strides in bytes."""
    size, (batch, head, row, _) = tensor.element_size(), tensor.stride()
    return tensor.data_ptr(), size * batch, size * head, size * row


def pack_call(call: Call, threads: int = 1) -> bytes:
    """A declared operation, or its gradient; some have structures of their own."""
    return _PACKED_BY_NAME.get(call.name, pack_declared)(call, threads)


_PACKED_BY_NAME = {
    "gate": pack_gate,
    "norm_gated": pack_norm_gated,
    "rotate": pack_rotate,
    "attention": pack_attention,
    "paged_attention": pack_attention,
}


#: How C takes each call.
PACKED: dict[type, Callable[..., bytes]] = {
    Forward: pack_forward,
    Quantize: pack_quantize,
    Call: pack_call,
    Backward: pack_backward,
}


def pack_alone(call: Call, threads: int = 1) -> bytes:
    """A call that is no norm, which GPUs and Triton on CPUs take after a call that says where it runs."""
    if call.name == "norm_gated":  # whose norm says that
        return pack_norm_gated(call, threads)
    return _only(_ALONE.get(call.name, DECLARED_ONLY), call, threads) + pack_call(call)


_ALONE = {"gate": GATE_ONLY, "rotate": ROTATION_ONLY}
