"""Checks of operands, and the errors that say: the argument, what it was, what was expected, the cure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.calls import fast_path, memory
from fusednorm.calls.call import ACTIVATIONS, FLOATS, NARROW_FLOATS, Flags, GateSteps, accumulator
from fusednorm.calls.memory import Memory, lies_in_rows, overlaps_itself, share_memory
from fusednorm.calls.quantization import MOST, Quantization, _fields_of, is_given
from fusednorm.calls.scalars import number

NAMES = ("x", "residual", "weight", "out", "residual_out")
WEIGHT = NAMES.index("weight")
_PLAIN = (Tensor, torch.nn.Parameter)
Named: TypeAlias = Mapping[str, Tensor | None]


def check_operands(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    *,
    in_memory: bool = True,
    x_name: str = "x",
    residual_name: str = "residual",
    weight_name: str = "weight",
) -> None:
    """Types, dtypes, devices and shapes; and that there is memory, if there must be."""
    if not is_dynamo_compiling() and usual((x, residual, weight, out, residual_out), in_memory):
        return
    operands: dict[str, Any] = {x_name: x, residual_name: residual, weight_name: weight}
    operands |= {"out": out, "residual_out": residual_out}
    # Converting or moving an output makes a copy that the caller never sees, so the cure is to allocate it.
    anew = {"out": f"allocate it with torch.empty_like({x_name})"}
    anew["residual_out"] = f"allocate it with torch.empty_like({residual_name})"
    for name, tensor in operands.items():
        if tensor is None and name != x_name:
            continue
        check_floats(name, tensor, x, x_name, anew.get(name))
        if name == x_name:
            if x.dim() == 0 or x.shape[-1] == 0:
                raise ValueError(f"{name} must be [..., N] with N of at least 1, got shape {list(x.shape)}")
        elif name == weight_name:
            _check_row(name, tensor, x, x_name)
        elif tensor.shape != x.shape:
            whose = f"the {name}" if name == "residual" else name
            cure = anew.get(name, f"pass a row of {whose} for each row of {x_name}")
            if name == residual_name and _expands(tensor, x):
                cure = f"expand it with {name}.expand_as({x_name})"
            raise ValueError(f"{name} must have {x_name}'s shape {list(x.shape)}, got {list(tensor.shape)}; {cure}")
        if name in anew:
            check_placed(next(called for called, t in operands.items() if t is tensor), tensor)
    for name, tensor in operands.items():
        if tensor is not None and in_memory:
            check_memory(name, tensor)


def check_floats(name: str, operand: object, x: Tensor, x_name: str, cure: str | None = None) -> None:
    """Checks for a dense tensor of floating point on x's device; ``cure`` takes the place of a cure for each fault."""
    if not isinstance(operand, Tensor):
        refuse_type(name, operand, cure)
    convert = cure or f"convert it, for instance {name}.to(torch.float32)"
    narrow = cure or f"convert {x_name} with {x_name}.double(), or {name} with {name}.float()"
    _check_float(name, operand.dtype, x.dtype, x_name, narrow, f"; {convert}")
    check_dense(name, operand, cure)
    check_device(name, operand, x, x_name, cure)


def _check_float(name: str, dtype: torch.dtype, of_x: torch.dtype, x_name: str, narrow: str, convert: str = "") -> None:
    """A dtype of floating point, float64 for a float64 x only; and the cures of both."""
    if dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {str(dtype)[6:]}{convert}")
    if dtype == torch.float64 and of_x != torch.float64:
        raise TypeError(
            f"{name} is float64 while {x_name} is {str(of_x)[6:]}; float64 is computed in only for a float64 {x_name}: "
            f"{narrow}"
        )


def _check_row(name: str, weight: Tensor, x: Tensor, x_name: str) -> None:
    """Checks that an operand has the elements of one row."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} must have shape [{x.shape[-1]}], the last dimension of {x_name} {list(x.shape)}, "
            f"got {list(weight.shape)}"
        )


def check_placed(name: str, output: Tensor) -> None:
    """Refuses to write a DTensor that is Partial, of which each rank holds a part of the sum."""
    placements = getattr(output, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{name} is written, and its placements are {list(placements)}; expected are Replicate and Shard, because "
            f"a Partial output cannot be written; redistribute {name} before, or take what the call returns"
        )


#: The flags of norms that are True or False, and that functions take.
_BOOLEANS = tuple(name for name, usual in Flags._field_defaults.items() if type(usual) is bool and name != "center")


def check_flags(
    flags: Flags, x: Tensor, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None, x_name: str = "x"
) -> Flags:
    """The flags, numbers rounded to ``A``: their types and values, and that given outputs have the dtypes asked for."""
    flags = rounded_flags(flags, x)
    for name in _BOOLEANS:
        check_flag(name, getattr(flags, name))
    if residual_out is None and flags.out_dtype is None and flags.residual_dtype is None:
        return flags
    if flags.out_dtype is not None:
        check_dtype("out_dtype", flags.out_dtype, x, x_name, f"leave it out for that of {x_name}")
    if flags.residual_dtype is not None:
        check_dtype("residual_dtype", flags.residual_dtype, x, x_name, "leave it out for that of the residual")
    if flags.residual_dtype is not None and residual is None:
        raise TypeError("residual_dtype is given without a residual; leave it out")
    if out is not None and flags.out_dtype not in (None, out.dtype):
        raise TypeError(
            f"out must have the dtype out_dtype {str(flags.out_dtype)[6:]}, got {str(out.dtype)[6:]}; "
            "pass either, not both"
        )
    wanted = None if residual is None else flags.residual_dtype or residual.dtype
    if residual_out is not None and wanted is not None and residual_out.dtype != wanted:
        cure = "allocate it with torch.empty_like(residual), or pass residual_dtype=residual_out.dtype"
        whose = "the residual's dtype" if flags.residual_dtype is None else "the dtype residual_dtype"
        raise TypeError(f"residual_out must have {whose} {str(wanted)[6:]}, got {str(residual_out.dtype)[6:]}; {cure}")
    return flags


def rounded_flags(flags: Flags, x: Tensor) -> Flags:
    """The flags, numbers rounded to the type ``A`` of x."""
    wide = accumulator(x.dtype)
    eps, weight_offset = number("eps", flags.eps, wide), number("weight_offset", flags.weight_offset, wide)
    if eps is flags.eps and weight_offset is flags.weight_offset:
        return flags
    return Flags(eps, weight_offset, *flags[2:])  # ``_replace`` takes twice as long, a twentieth of the call


def check_dtype(name: str, dtype: torch.dtype, x: Tensor | None, x_name: str = "x", cure: str = "") -> None:
    """The dtype of a result, or one that something is rounded to on the way. Without x any of floating point."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(
            f"{name} must be torch.float16, bfloat16, float32 or float64, got {dtype!r}; "
            + (cure or f"pass one of these, such as {x_name}.dtype")
        )
    if x is not None:
        narrow = f"convert {x_name} with {x_name}.double(), or pass {name}=torch.float32"
        _check_float(name, dtype, x.dtype, x_name, narrow)


def check_needs(needs: list[bool], of: tuple[str, ...]) -> None:
    """Which gradients an operator is to compute: one answer for each of these operands."""
    if len(needs) != len(of):
        raise ValueError(f"needs must have {len(of)} elements, one for each of {', '.join(of)}, got {needs}")


def check_flag(name: str, flag: object) -> None:
    """Checks that a flag is True or False, not only something that counts as it."""
    if type(flag) is not bool:
        raise TypeError(f"{name} must be True or False, got {flag!r}; pass {name}=True or {name}=False")


def check_between(between: torch.dtype | None, x: Tensor, name: str = "x") -> None:
    """The dtype of what passes between two operations."""
    if between is None:
        return
    if between is not torch.float32:
        raise TypeError(
            f"between must be None or torch.float32, got {between!r}; leave it out for {name}'s dtype, which separate "
            "calls would pass on"
        )
    if x.dtype == torch.float64:
        raise TypeError(f"between is float32 while {name} is float64, whose rows it would round; leave it out")


def check_group_size(
    group_size: int | None, hidden_size: int, cure: str = "leave it out to normalise whole rows"
) -> None:
    """The elements that belong together; None: all."""
    if group_size is not None and (type(group_size) is not int or group_size < 1 or hidden_size % group_size):
        raise ValueError(
            f"group_size must be an int that divides the {hidden_size} elements of a row, got {group_size!r}; {cure}"
        )


def check_activation(activation: str) -> None:
    """The name of a gate's function."""
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {names}, got {activation!r}; silu is also called swish")


def check_gate_steps(steps: GateSteps, activation: str, wide: torch.dtype) -> dict[str, Any]:
    """The optional steps of a gate, as its operator has them; returns its numbers, rounded to ``wide``."""
    numbers = check_gate_numbers(steps.limit or None, steps.alpha, steps.up_offset, steps.clamp, wide)
    check_flag("round_steps", steps.round_steps)
    if activation != "silu" and steps._replace(**numbers) != GateSteps():
        raise ValueError(f"activation must be 'silu' with limit, alpha, up_offset or round_steps, got {activation!r}")
    return numbers


def check_cap(cap: object, z: Tensor, name: str = "cap", cure: str = "without a cap, leave out the call") -> None:
    """The cap of a softcap: a normal number of the type in which it is computed."""
    wide = accumulator(z.dtype)
    given, bounds = number(name, cap, wide), torch.finfo(wide)
    if isinstance(given, torch.SymFloat | torch.SymInt):
        return
    if not bounds.smallest_normal <= given <= bounds.max:
        raise ValueError(
            f"{name} must be finite and greater than 0, and a normal number of {str(wide)[6:]}, got {cap!r}; {cure}"
        )


def check_ids(size: int, ids: Tensor, ignore_index: int | None) -> None:
    """Checks that each id in a CPU's memory has an element, unless it is ignored; a GPU would have to be waited for."""
    if ids.device.type != "cpu":
        return
    outside = (ids < 0) | (ids >= size)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if outside.any():
        cure = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise IndexError(
            f"ids must be from 0 to {size - 1}, the places in a row of logits{cure}, got {int(ids[outside][0])}; "
            "pass ignore_index for an id that is to be ignored"
        )


def check_temperature(temperature: Tensor | None) -> None:
    """Checks that temperatures in a CPU's memory are greater than 0 and finite; a GPU would have to be waited for."""
    if temperature is None or temperature.device.type != "cpu":
        return
    unfit = _not_positive(temperature)
    if unfit is not None:
        raise ValueError(
            f"temperature must be finite and greater than 0, got {unfit}; pass 1 for a row that is to stay as it is"
        )


def _not_positive(values: Tensor) -> float | None:
    """The first value that is not greater than 0 and finite; None if all are.

    Bits are compared: where the thread flushes subnormals, these are 0 to all arithmetic.
    """
    of_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    bits, infinite = values.resolve_neg().view(of_bits), values.new_full((), math.inf).view(of_bits)
    unfit = (bits <= 0) | (bits >= infinite)
    return values[unfit][0].item() if unfit.any() else None


def check_gate_numbers(
    limit: float | None, alpha: float, up_offset: float, clamp: str, wide: torch.dtype
) -> dict[str, Any]:
    """The numbers of a gate's optional steps, rounded to ``wide``; the limit is 0 where there is none."""
    kind = str(wide)[6:]
    most = 0.0 if limit is None else number("limit", limit, wide)
    if not (most > 0 or limit is None):
        raise ValueError(f"limit must be greater than 0 in {kind}, got {limit!r}; leave it out for none")
    of_z, of_y = number("alpha", alpha, wide), number("up_offset", up_offset, wide)
    if not 1 <= of_z < math.inf:
        raise ValueError(f"alpha must be finite and at least 1 in {kind}, got {alpha!r}; leave it out for silu")
    if not -math.inf < of_y < math.inf:
        raise ValueError(f"up_offset must be finite in {kind}, got {up_offset!r}; leave it out for none")
    if clamp not in ("before", "after"):
        raise ValueError(f"clamp must be 'before' or 'after', got {clamp!r}; leave it out to limit the gate")
    return {"limit": 0.0 if most == math.inf else most, "alpha": of_z, "up_offset": of_y}


def check_affine(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    in_memory: bool,
    x_name: str = "x",
    weight_name: str = "weight",
) -> None:
    """A weight and a bias: [N], or [H, N] for x of [..., H, N]; and that there is memory, if there must be."""
    for name, operand in ((weight_name, weight), ("bias", bias)):
        if operand is None:
            continue
        of_heads = isinstance(operand, Tensor) and operand.dim() == 2
        if of_heads:
            check_dense(name, operand)
            if operand.shape != x.shape[-2:]:
                raise ValueError(
                    f"{name} has two dimensions, a row for each head, so it must have the shape of {x_name}'s last two "
                    f"{list(x.shape[-2:])}, got {list(operand.shape)}; pass [{x.shape[-1]}] for one row for all heads"
                )
        check_floats(name, operand, x, x_name)
        if not of_heads:
            _check_row(name, operand, x, x_name)
        if in_memory:
            check_memory(name, operand)


def check_samples(name: str, operand: Tensor, x: Tensor, x_name: str, *, in_memory: bool) -> None:
    """Checks the shape of samples: [..., N] as x, or without dimensions before the last one; and their memory."""
    check_floats(name, operand, x, x_name)
    kept = operand.dim() - 1
    if not 0 <= kept < x.dim() or operand.shape != (*x.shape[:kept], x.shape[-1]):
        samples = f", or {[x.shape[0], x.shape[-1]]} for all rows of a sample" if x.dim() > 2 else ""
        raise ValueError(
            f"{name} must have the shape of {x_name} {list(x.shape)}{samples}, got {list(operand.shape)}; pass a row "
            "for each row or for each sample"
        )
    if in_memory:
        check_memory(name, operand)


def check_products(
    name: str, operand: Tensor, shape: list[int], whose: str | None, x: Tensor, x_name: str, *, in_memory: bool
) -> None:
    """A number for each row of ``whose``, or a matrix, whose rows have the shape; and memory, if there must be."""
    check_floats(name, operand, x, x_name)
    if whose is None:
        if operand.dim() != 2 or list(operand.shape[1:]) != shape:
            turned = operand.dim() == 2 and list(operand.shape[:1]) == shape
            row = f"a row as long as those of {x_name} for each element of a result"
            raise ValueError(
                f"{name} must have shape [N, {shape[0]}], where the last dimension of {x_name} {list(x.shape)} is "
                f"{shape[0]}, got {list(operand.shape)}; pass {f'{name}.t()' if turned else row}"
            )
    elif list(operand.shape) != shape:
        raise ValueError(
            f"{name} must have shape {shape}, a number for each row of {whose}, got {list(operand.shape)}; pass one "
            "for each"
        )
    if in_memory:
        check_memory(name, operand)


def check_incoming(name: str, d: Tensor, shape: list[int], x: Tensor, x_name: str, *, in_memory: bool) -> None:
    """The gradient of a result of this shape; and memory, if there must be."""
    check_floats(name, d, x, x_name)
    if list(d.shape) != shape:
        raise ValueError(f"{name} must have the result's shape {shape}, got {list(d.shape)}; pass its gradient")
    if in_memory:
        check_memory(name, d)


def check_one_row(name: str, weight: Tensor | None) -> None:
    """Checks that a weight has no rows for heads, for the port of a library that would read the first one alone."""
    if getattr(weight, "ndim", 1) > 1:
        raise ValueError(
            f"{name} must have one dimension, [N], got shape {list(cast(Tensor, weight).shape)}; fusednorm's own "
            "function takes a weight with a row for each head"
        )


def check_quantization(quantization: Quantization, x: Tensor) -> None:
    """Checks for a quantization whose groups divide the rows of x."""
    check_is_quantization(quantization)
    hidden_size = x.shape[-1]
    if hidden_size % quantization.group(hidden_size):
        raise ValueError(
            f"quantization has groups of {quantization.per} elements, which do not divide rows of {hidden_size}; pass "
            "a quantization with another per, or pad the rows"
        )


def check_given(
    quantization: Quantization,
    scale: Tensor | None,
    zero_point: Tensor | None,
    x: Tensor,
    x_name: str,
    in_memory: bool,
) -> None:
    """The scale and zero point that a quantization has the caller give; their values too, in a CPU's memory."""
    if scale is zero_point is None and not is_given(quantization):
        return
    for name, tensor, dtype in (("scale", scale, torch.float32), ("zero_point", zero_point, torch.int32)):
        if not is_given(quantization) or (name == "zero_point" and not quantization.computes_zero_point):
            if tensor is not None:
                raise TypeError(f"{name} is given, and {quantization} has none to be given; leave it out")
            continue
        cure = f"pass torch.tensor([value], dtype={dtype}, device={x_name}.device)"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor for per='tensor', got {type(tensor).__name__}; {cure}")
        _check_kind(name, tensor, dtype, cure)
        if tensor.numel() != 1 and (name == "zero_point" or quantization.computes_zero_point):
            raise ValueError(f"{name} must have one element, got shape {list(tensor.shape)}; {cure}")
        if tensor.numel() != 1 and not _of_blocks(tensor.shape, x.shape):
            raise ValueError(
                f"{name} must have one element, or a size for each dimension of {x_name} that divides it, "
                f"{list(x.shape)}, got shape {list(tensor.shape)}; {cure}, or a scale for each of equal blocks"
            )
        check_device(name, tensor, x, x_name, cure)
        if in_memory:
            check_memory(name, tensor)
    if in_memory and scale is not None and scale.device.type == "cpu":
        unfit = _not_positive(scale)
        if unfit is not None:
            raise ValueError(f"scale must be greater than 0 and finite, got {unfit}; it is the quantization step size")
    if in_memory and zero_point is not None and zero_point.device.type == "cpu" and abs(zero_point.item()) >= MOST:
        raise ValueError(
            f"zero_point must lie between -2^30 and 2^30, got {zero_point.item()}; it is the quantized value of 0.0"
        )


def _of_blocks(scales: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether scales of this shape are those of equal blocks of a tensor of that one."""
    if len(scales) != len(shape):
        return False
    return all(whole == size or (size > 0 and whole % size == 0) for size, whole in zip(scales, shape, strict=True))


def replaced(quantization: Quantization, names: dict[str, str], **changes: Any) -> Quantization:
    """``dataclasses.replace``; errors call fields as a port's caller does: ``names``, by field."""
    try:
        return Quantization(**_fields_of(str(quantization)) | changes)  # of its text: numbers in attributes may vary
    except (TypeError, ValueError) as error:
        said = re.sub("|".join(rf"\b{field}\b" for field in names), lambda found: names[found[0]], str(error))
        raise type(error)(said) from None


def check_is_quantization(quantization: object) -> None:
    """Checks for a quantization."""
    if not isinstance(quantization, Quantization):
        raise TypeError(
            f"quantization must be a fusednorm.Quantization, got {type(quantization).__name__}; "
            "fusednorm.quantizations has presets"
        )


def check_output(
    name: str, tensor: Tensor | None, shape: list[int], dtype: torch.dtype, x: Tensor, x_name: str
) -> None:
    """A tensor that is written whole, with the shape and the dtype of what is written."""
    if tensor is None:
        return
    fits = type(tensor) in _PLAIN and not tensor.is_nested and tensor.layout == torch.strided
    if fits and tensor.dtype is dtype and tensor.device == x.device and list(tensor.shape) == shape:
        return  # the usual case, for which no cure is put into words
    cure = f"allocate it with torch.empty({shape}, dtype={dtype}, device={x_name}.device), or leave it out"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; {cure}")
    _check_kind(name, tensor, dtype, cure)
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}; {cure}")
    check_device(name, tensor, x, x_name, cure)
    check_placed(name, tensor)


def _check_kind(name: str, tensor: Tensor, dtype: torch.dtype, cure: str) -> None:
    """Checks for a dense tensor of this dtype."""
    check_dense(name, tensor, cure)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {str(dtype)[6:]}, got {str(tensor.dtype)[6:]}; {cure}")


def check_apart(outputs: Named, inputs: Named, own: Mapping[str, tuple[str, ...]] | None = None) -> None:
    """Outputs have memory, and share none with each other, or with an input that they are not. Either may be absent.

    Inputs have been checked. An output with the name of an input is that input, which the call overwrites. ``own``: by
    output, the inputs that it may be; an output without an entry may be none. None: each may be any.
    """
    for name, tensor in outputs.items():
        if tensor is not None:
            check_memory(name, tensor)
    check_may_be_written(outputs)
    if _clearly_apart(outputs, inputs, own):
        return
    inputs = {name: t for name, t in inputs.items() if name not in outputs}
    may_be = {name: inputs if own is None else own.get(name, ()) for name in outputs}
    # A meta tensor has no memory: its address is 0.
    present = {name: t for name, t in {**inputs, **outputs}.items() if t is not None and t.numel() and not t.is_meta}
    memories = {name: Memory.of(tensor) for name, tensor in present.items()}
    names = list(present)
    for name in [name for name in outputs if name in present]:
        instead = f"pass {name}.clone() and take the results that the call returns"
        if memories[name].overlaps_itself():
            raise ValueError(f"{name} has elements that share memory, so it cannot be written; {instead}")
        for other in names[: names.index(name)]:
            one = other in inputs and other in may_be[name] and _same_elements(present[name], present[other])
            if not one and share_memory(memories[name], memories[other]):
                raise ValueError(
                    f"{name} shares memory with {other}, and writing the one would change the other; only exactly the "
                    "same rows may serve as input and output; "
                    + (f"pass {other}.clone()" if other in inputs else instead)
                )


def _clearly_apart(outputs: Named, inputs: Named, own: Mapping[str, tuple[str, ...]] | None) -> bool:
    """Whether all outputs are contiguous, and other tensors end before each or begin behind it: the usual case."""
    spans: list[tuple[int, int, str, Tensor]] = []
    for named in (outputs, inputs):
        for name, tensor in named.items():
            if tensor is None or (named is inputs and name in outputs):
                continue
            begin, size = tensor.data_ptr(), tensor.nbytes
            if not begin or not size:  # an address of 0 is that of a meta tensor
                continue
            if tensor.is_contiguous():
                end = begin + size
            elif named is outputs:
                return False
            else:
                end = Memory.of(tensor).end
            for other_begin, other_end, other, written in spans:
                if begin < other_end and other_begin < end:
                    may_be = named is inputs and (own is None or name in own.get(other, ()))
                    if not may_be or tensor is not written:
                        return False
            if named is outputs:
                spans.append((begin, end, name, tensor))
    return True


def _same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if a is b:
        return True
    if (a.data_ptr(), a.shape, a.dtype) != (b.data_ptr(), b.shape, b.dtype):
        return False
    strides = [[step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (a, b)]
    return strides[0] == strides[1]


def usual(operands: tuple[Tensor | None, ...], in_memory: bool = True) -> bool:
    """Whether all of this fits, as it nearly always does; then nothing else has to be looked at."""
    x = operands[0]
    if x is None or not are_dense(operands, in_memory):
        return False
    shape, device, of_x = x.shape, x.device, x.dtype
    for i, tensor in enumerate(operands):
        if tensor is None or (i and tensor is x and i != WEIGHT):
            continue
        dtype = tensor.dtype
        if dtype not in FLOATS or (dtype is torch.float64 and of_x is not dtype):
            return False
        if i and (tensor.device != device or tensor.shape != (shape[-1:] if i == WEIGHT else shape)):
            return False
    return len(shape) > 0


def are_dense(operands: tuple[Tensor | None, ...], in_memory: bool) -> bool:
    """Whether operands are plain dense tensors with elements, in memory if they must be."""
    for tensor in operands:
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    # C tells sooner that tensors are dense and in memory.
    return (in_memory and fast_path.is_direct(*operands)) or _dense(operands, in_memory)


def _dense(operands: tuple[Tensor | None, ...], in_memory: bool) -> bool:
    for tensor in operands:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or tensor.is_nested or tensor.layout is not torch.strided:
            return False
        if not tensor.numel() or (in_memory and not memory.all_in_memory(tensor)):
            return False
    return True


def check_dense(name: str, tensor: Tensor, cure: str | None = None) -> None:
    """Refuses nested and sparse tensors."""
    if tensor.is_nested:
        refuse_nested(name)
    if tensor.layout != torch.strided:
        cure = cure or f"{name}.to_dense() makes one"
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}; {cure}")


def check_device(name: str, tensor: Tensor, x: Tensor, x_name: str, cure: str | None = None) -> None:
    """Checks that an operand is on x's device."""
    if tensor.device == x.device:
        return
    if cure is None:
        cure = f"{name}.to({str(x.device)!r}) moves it"
        if tensor.is_meta:
            cure = f"a meta tensor holds no values: load {name} on {x.device}, or allocate it there and fill it"
    raise ValueError(f"{name} is on {tensor.device} and {x_name} on {x.device}; {cure}")


def check_memory(name: str, tensor: Tensor) -> None:
    """Checks that all elements of an operand are in memory."""
    if fast_path.is_direct(tensor) or memory.all_in_memory(tensor):
        return
    if type(tensor) not in _PLAIN:
        cure = "pass the tensor that it wraps (of a DTensor, its to_local())"
    elif tensor._is_zerotensor():
        cure = f"{name}.clone() has one" if name.isidentifier() else "clone() has one"
    else:
        cure = "its storage was freed or made shorter: pass a tensor that still holds its elements"
    raise TypeError(f"{name} is a {type(tensor).__name__} without memory for all its elements; {cure}")


def check_may_be_written(outputs: Named) -> None:
    """Refuses an output that is an inference tensor outside of inference mode: torch would miss the write."""
    for name, tensor in outputs.items():
        if tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{name} is an inference tensor, and inplace update to inference tensor outside InferenceMode is not "
                f"allowed; call the function within torch.inference_mode(), or pass {name}.clone()"
            )


def check_kept(incoming: Sequence[Tensor | None], kept: Sequence[Tensor | None]) -> None:
    """Checks that incoming gradients, and the tensors that the forward pass kept, are in memory still."""
    names = ("an incoming gradient", incoming), ("a tensor that was kept for the backward pass", kept)
    for name, tensors in names:
        for tensor in tensors:
            if tensor is not None:
                check_memory(name, tensor)


def check_gradients(
    dy: Tensor,
    d_residual_out: Tensor | None,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    asked: tuple[torch.dtype, torch.dtype | None, torch.dtype | None, torch.dtype | None],
    needs: list[bool],
    *,
    in_memory: bool = True,
) -> None:
    """Checks that the operands of a backward pass fit: kernels follow their shapes and dtypes without looking.

    ``asked``: the dtypes of x, the residual, out and residual_out, None where there is none or it is the default.
    """
    x_dtype = asked[0]
    narrow = all(dtype is None or dtype in NARROW_FLOATS for dtype in (h.dtype, *asked))
    fit = narrow and in_memory and len(needs) == 3 and usual((h, dy, weight, d_residual_out)) and _dense((rstd,), True)
    if fit and (rstd.shape, rstd.dtype, rstd.device) == (h.shape[:-1], torch.float32, h.device):
        return
    given = {"h": h, "dy": dy, "d_residual_out": d_residual_out, "rstd": rstd, "weight": weight}
    operands = {name: operand for name, operand in given.items() if operand is not None}
    names = ("x_dtype", "residual_dtype", "out_dtype", "residual_out_dtype")
    dtypes = {name: dtype for name, dtype in zip(names, asked, strict=True) if dtype is not None}
    dtypes |= {name: operand.dtype for name, operand in operands.items()}
    cure = "pass the forward pass's operands and their dtypes"
    for name, dtype in dtypes.items():
        _check_float(name, dtype, x_dtype, "x", cure)
    if rstd.dtype != accumulator(x_dtype):
        raise TypeError(
            f"rstd must be {str(accumulator(x_dtype))[6:]}, the forward pass's where x_dtype is {str(x_dtype)[6:]}, "
            f"got {str(rstd.dtype)[6:]}; {cure}"
        )
    check_needs(needs, ("x", "residual", "weight"))
    if h.dim() == 0 or h.shape[-1] == 0:
        raise ValueError(f"h must be [..., N] with N of at least 1, got shape {list(h.shape)}")
    shapes = {"rstd": h.shape[:-1], "weight": h.shape[-1:]}  # the others have that of h
    reasons = {"rstd": "a number for each row of h", "weight": "the last dimension of h"}
    for name, operand in operands.items():
        check_dense(name, operand)
        check_device(name, operand, h, "h")
        shape = shapes.get(name, h.shape)
        if operand.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)}, {reasons.get(name, 'that of h')}, got {list(operand.shape)}; "
                "pass the operands of one forward pass"
            )
        if in_memory:
            check_memory(name, operand)


def _expands(tensor: Tensor, to: Tensor) -> bool:
    """Whether ``tensor.expand_as(to)`` works."""
    sizes = zip(reversed(tensor.shape), reversed(to.shape), strict=False)
    return tensor.dim() <= to.dim() and all(size == 1 or size == wanted for size, wanted in sizes)


def refuse_type(name: str, operand: object, cure: str | None = None) -> NoReturn:
    """The error for an operand that is no tensor."""
    if cure is None:
        cure = "torch.as_tensor makes one"
        if name == "residual" and operand is None:
            cure = "without a residual, call rms_norm, or rms_norm_ in place"
        elif name == "weight" and isinstance(operand, int | list | tuple):
            cure = "with torch's arguments (x, normalized_shape, weight, eps) call fusednorm.compat.functional.rms_norm"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}; {cure}")


def as_called(x: Tensor, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None) -> dict[str, Tensor]:
    """The outputs that are given, by the caller's names: x or residual for one that is that tensor, as in place."""
    name = "x" if out is x else "residual" if out is residual else "out"
    name_of_total = "residual" if residual_out is residual else "x" if residual_out is x else "residual_out"
    if name == name_of_total:  # both are one input
        name, name_of_total = "out", "residual_out"
    outputs = ((name, out), (name_of_total, residual_out))
    return {called: output for called, output in outputs if output is not None}


def check_rows_to_write(name: str, tensor: Tensor) -> None:
    """Checks that kernels can write the rows of an operand, for which no copy can stand in."""
    if not lies_in_rows(tensor) or overlaps_itself(tensor):
        refuse_layout(name, tensor)


def refuse_nested(name: str) -> NoReturn:
    """The error for a nested tensor."""
    raise TypeError(f"{name} must be a dense tensor, got a nested one; pass its rows, {name}.values()")


def refuse_layout(name: str, tensor: Tensor, levels: str = "at most two levels of strides without overlap") -> NoReturn:
    """The error for an operand that is written and whose rows lie otherwise than kernels can write them."""
    raise ValueError(
        f"{name} is written in place, so its last dimension must be contiguous and its rows must lie in {levels}; "
        f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}; pass "
        "a contiguous tensor, or call the function that returns new ones"
    )


def requires_grad(*operands: Tensor | None) -> bool:
    """Whether an operand requires grad."""
    try:
        for operand in operands:
            if operand is not None and operand.requires_grad:
                return True
    except AttributeError:  # not a tensor, which the checks to come report
        pass
    return False


def refuse_grad(name: str) -> NoReturn:
    """Raises torch's own sentence, because people search for it."""
    if name.endswith("_"):
        raise RuntimeError(
            f"{name}(): one of the arguments requires grad, and an in-place operation would overwrite what its "
            f"gradient needs; call {name.rstrip('_')}, or wrap the call in torch.no_grad()."
        )
    raise RuntimeError(
        f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
        "arguments requires grad."
    )
