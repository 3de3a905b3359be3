"""Tables of rotations with the same bits on every processor: the modules that make them call exact functions.

A model's code computes frequencies by ``torch.pow``, and tables by ``torch.cos`` and ``torch.sin``, whose last bits
depend on the processor's instructions. While such a module runs, a mode of torch passes these calls to
``reference/angles.py``; so it does while a new module is made, whose frequencies replace those of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from fusednorm.reference import angles
from fusednorm.transformers.attention import PatchedTables, table_states
from fusednorm.transformers.reads import Reads
from fusednorm.transformers.replacing import Outcome, Patched, attach, detach, replaced
from fusednorm.transformers.rotations import writes


@torch.library.custom_op("fusednorm_transformers::cosine_and_sine", mutates_args=())
def _operator(angle: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as one step of compiled code, each in memory of its own."""
    cos, sin = angles.cosine_and_sine(angle)
    return cos.clone(), sin.clone()


@_operator.register_fake
def _(angle: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angle), torch.empty_like(angle)


class Exact(TorchFunctionMode):
    """A mode in which cosines, sines and powers have the same bits everywhere."""

    def __init__(self) -> None:
        super().__init__()
        #: The last angles, their writes, and both functions of them: cos and sin are asked for one after the other.
        self.last: tuple[Tensor, list[int], tuple[Tensor, Tensor]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of the exact function, or of torch's."""
        ours = None if kwargs else _FUNCTIONS.get(func)
        found = None if ours is None else ours(self, *args)
        return func(*args, **(kwargs or {})) if found is None else found

    def both(self, angle: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of angles; None where fusednorm has none, or a gradient is recorded."""
        if not (isinstance(angle, Tensor) and angle.is_floating_point()) or angle.device.type == "mps":
            return None
        if angle.requires_grad and torch.is_grad_enabled():
            return None
        if is_dynamo_compiling() or type(angle) not in (Tensor, torch.nn.Buffer, torch.nn.Parameter):
            return _operator(angle)  # type: ignore[no-any-return]
        written = writes((angle,))
        if self.last is not None and self.last[0] is angle and self.last[1] == written:
            return self.last[2]
        found = angles.cosine_and_sine(angle.detach())
        self.last = None if written is None else (angle, written, found)
        return found


def _cos(mode: Exact, angle: Any) -> Tensor | None:
    both = mode.both(angle)
    return None if both is None else both[0]


def _sin(mode: Exact, angle: Any) -> Tensor | None:
    both = mode.both(angle)
    return None if both is None else both[1]


def _polar(mode: Exact, length: Any, angle: Any) -> Tensor | None:
    both = mode.both(angle)
    return None if both is None else torch.complex(length * both[0], length * both[1])


def _power(mode: Exact, base: Any, exponent: Any) -> Tensor | None:
    """A power with a base that may be any positive number. Whole exponents stay torch's, which multiplies then."""
    if isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer()):
        return None
    if not isinstance(base, Tensor) and not (isinstance(base, int | float) and base > 0):
        return None
    dtype = torch.result_type(base, exponent)
    tensors = [one for one in (base, exponent) if isinstance(one, Tensor)]
    if not dtype.is_floating_point or any(one.device.type == "mps" for one in tensors):
        return None
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return None
    return angles.power(base, exponent, dtype)


def _turned_power(mode: Exact, exponent: Any, base: Any) -> Tensor | None:
    return _power(mode, base, exponent)


def _outer(mode: Exact, a: Any, b: Any) -> Tensor | None:
    """A matrix product of one term for each element, which some settings would compute in fewer bits."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or min(a.dim(), b.dim()) < 2:
        return None
    return a * b if a.shape[-1] == b.shape[-2] == 1 else None


#: By torch's functions, which a mode sees in place of the operators of Python.
_FUNCTIONS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.cos, Tensor.cos), _cos),
    **dict.fromkeys((torch.sin, Tensor.sin), _sin),
    torch.polar: _polar,
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _power),
    Tensor.__rpow__: _turned_power,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _outer),
}


@dataclass
class _Own:
    """Buffers of a module by name, and the attributes that depend on them."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


class _State(NamedTuple):
    """The state of a module of tables."""

    #: The class of its tables, and the attributes with which it returns them.
    kind: Any
    reads: Reads
    own: _Own


class ExactTables(PatchedTables):
    """A module whose tables have the same bits everywhere; comes before its original class. Its state is a _State."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original class's result, of exact functions."""
        if not self._fusednorm:
            return super(PatchedTables, self).forward(*args, **kwargs)
        ahead = None
        if len(args) == 1 and [*kwargs] == ["position_ids"]:
            ahead = _of_one(self, args[0], kwargs["position_ids"])
        elif len(args) in (2, 3) and not kwargs:
            ahead = _of_one(self, *args)
        return self.known(self.exact(*args, **kwargs) if ahead is None else ahead)

    def exact(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the original class's code with exact functions."""
        with Exact():
            return super(PatchedTables, self).forward(*args, **kwargs)

    def restore(self) -> None:
        """Puts the frequencies back that the module had."""
        _blocks.pop(self, None)
        _put(self, self._fusednorm.own)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        return [("cosine_and_sine", {})]


#: Positions whose tables are made at once.
_AHEAD = 64
#: Modules whose frequencies are the same for all positions, by this attribute or its values.
_STEADY = {"default", "linear", "llama3", "yarn", "proportional"}


class _Block(NamedTuple):
    """The tables of positions in a row, from a multiple of their number on."""

    #: The first position, the dtype and the device of the tables, and the writes to the buffers, by their ids.
    key: Any
    #: Kept, so that no other tensor gets their ids.
    buffers: list[Tensor]
    #: cos and sin, [1, _AHEAD, columns]; None where they are not those of single positions.
    tables: tuple[Tensor, Tensor] | None


#: The last block of each module, which is not a part of it: copies and pickles have none.
_blocks: WeakKeyDictionary[torch.nn.Module, dict[Any, _Block]] = WeakKeyDictionary()


def _of_one(module: ExactTables, x: Any, position_ids: Any, *layer: Any) -> tuple[Tensor, Tensor] | None:
    """The tables of one token, as decoding asks for, from those of a block of positions; None where there are none.

    A call of the module's own code with exact functions takes longer than a step of decoding should wait.
    """
    if is_dynamo_compiling() or type(position_ids) is not Tensor or not isinstance(x, Tensor):
        return None
    of_one = position_ids.shape == (1, 1) and position_ids.dtype == torch.int64 and position_ids.device.type == "cpu"
    own = module._fusednorm
    steady = getattr(module, "rope_type", None)
    steady = set(steady.values()) if isinstance(steady, dict) else {steady}
    if not of_one or own.kind is None or not steady <= _STEADY:
        return None
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None  # a trace would have the tables of this position for all
    buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
    written = writes(buffers)
    position = int(position_ids)
    if written is None or not own.reads.hold(module):
        return None
    first = position // _AHEAD * _AHEAD
    key = first, x.dtype, x.device, written, [*map(id, buffers)]
    of_module = _blocks.setdefault(module, {})
    block = of_module.get(layer)
    if block is None or block.key != key:
        block = of_module[layer] = _Block(key, buffers, _made(module, x, position_ids, first, layer))
    if block.tables is None:
        return None
    row = slice(position - first, position - first + 1)
    return block.tables[0][:, row].clone(), block.tables[1][:, row].clone()


def _made(module: ExactTables, x: Tensor, one: Tensor, first: int, layer: Any) -> tuple[Tensor, Tensor] | None:
    """The tables of a block, if the row of one position is its table."""
    block = module.exact(x, torch.arange(first, first + _AHEAD, device="cpu")[None], *layer)
    alone = module.exact(x, one, *layer)
    at = int(one) - first
    if not all(type(tables) is tuple and len(tables) == 2 for tables in (block, alone)):
        return None
    fit = all(table[:, at : at + 1].equal(row) for table, row in zip(block, alone, strict=True))
    return block if fit else None


#: The attributes of a module that go with its frequencies, as transformers' modules have them.
_DEPEND = ("long_inv_freq", "original_inv_freq", "max_seq_len_cached")


def _put(module: torch.nn.Module, own: _Own) -> None:
    """Gives a module buffers and attributes; buffers lie where those lie that it has now, in their dtype."""
    for name, buffer in own.buffers.items():
        now = module._buffers.get(name)
        module._buffers[name] = buffer if now is None else buffer.to(now)
    for name in [name for name in vars(module) if name.endswith(_DEPEND)]:
        del module.__dict__[name]
    module.__dict__.update(own.attributes)


def patch_tables(model: torch.nn.Module) -> Iterator[Outcome]:
    """Replaces modules that make tables of rotations, and their frequencies."""
    found = [(module, *made) for module in model.modules() if (made := _exact(module)) is not None]
    for module, state, new, what in found:
        if isinstance(module, PatchedTables) and not replaced(module):
            detach(module)
        outcome = attach(module, ExactTables, frozenset(), state, what)
        if outcome[1]:
            _put(module, new)
        yield outcome


def _exact(module: Any) -> tuple[_State, _Own, str] | None:
    """The new state of a module, its frequencies, and a line about it; None if it makes no tables, or exact ones."""
    if isinstance(module, Patched) and (not isinstance(module, PatchedTables) or isinstance(module, ExactTables)):
        return None
    kind, reads = module._fusednorm if isinstance(module, PatchedTables) else table_states(module) or (None, Reads())
    leaf = next(module.children(), None) is None and next(module.parameters(), None) is None
    if kind is None and not (leaf and module._buffers and "rotaryembedding" in type(module).__name__.lower()):
        return None
    attributes = {name: value for name, value in vars(module).items() if name.endswith(_DEPEND)}
    own = _Own({name: value for name, value in module._buffers.items() if value is not None}, attributes)
    what = "cos and sin in one order"
    if replaced(module):
        return _State(kind, reads, own), own, what
    try:
        new = _frequencies(module, own)
    except Exception as error:  # a class may take other arguments, and its code may raise anything
        return _State(kind, reads, own), own, f"{what}; its buffers stay: {type(error).__name__}: {error}"
    return _State(kind, reads, own), new, what


class _OthersError(Exception):
    """A module has numbers that a new one has not."""


def _frequencies(module: torch.nn.Module, own: _Own) -> _Own:
    """The buffers and attributes of a new module of the same configuration, of exact functions.

    Raises:
        _OthersError: the module has others by more than the last bits, as where they were assigned.
        Exception: the class's own.
    """
    of_class: Any = type(module)._made_of[0] if isinstance(module, Patched) else type(module)
    if not hasattr(module, "config"):
        raise _OthersError("it keeps no configuration")
    with torch.device("cpu"), torch.no_grad(), Exact():
        made = of_class(module.config)
    attributes = {name: vars(made)[name] for name in own.attributes if name in vars(made)}  # not what a call left there
    new = _Own(dict(own.buffers), attributes)
    for name, before in own.buffers.items():
        after = made._buffers.get(name)
        if not before.is_floating_point():
            continue
        if after is None or after.shape != before.shape or before.is_meta:
            raise _OthersError(f"a new {type(module).__name__} has no such {name}")
        near = after.to(before)
        # torch's pow, and each of the few operations after it, is off by an ulp or two: others were assigned
        if not torch.allclose(near, before, rtol=8 * torch.finfo(before.dtype).eps, atol=0):
            raise _OthersError(f"a new {type(module).__name__} has another {name}")
        new.buffers[name] = near
    return new
