"""Attention with the norms of q and k, and their rotation, in one call of :func:`fusednorm.qk_norm_rope`.

The forward pass is rewritten from its own source, as those of layers are (``layers.py``). Where it computes ::

    query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
    ...
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

and ``apply_rotary_pos_emb`` is a rotation (``rotations.py``), the norms and the transpositions move into the last
statement, which becomes a call of :meth:`PatchedAttention._rotate`. Norms, transpositions, or both may be absent. Where
the function takes q and k one after the other, as Gemma 4's, each such statement becomes a call of ``_rotate_one``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusednorm.operations.rotate import rotate
from fusednorm.transformers.activations import PatchedActivations, Products, products_of
from fusednorm.transformers.layers import _names, _parse, _target, called, compiled, evaluated, source, stored
from fusednorm.transformers.modules import taken_beside
from fusednorm.transformers.reads import LeftAloneError, Reads
from fusednorm.transformers.replacing import Outcome, Patched, attach, bare, replaced
from fusednorm.transformers.rotations import Rotation, Rotations, Tables, rotations, tables_of


@dataclass(frozen=True)
class Site:
    """A call of a function in a forward pass that rotates q and k, with these keyword arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    rotations: Rotations
    norms: tuple[str, ...]  # the attributes of the norms of q and k that moved into the call, or nothing
    transposed: bool  # whether the transposition of tokens and heads moved into it
    conditions: tuple[str, ...]  # the sources of those under which it is reached


class PatchedTables(Patched):
    """The module of the tables; comes before its original class.

    Its state has the class of the tables that it returns, and the attributes with which it does so.
    """

    _fusednorm: Any = (tuple, Reads())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original class's result."""
        return self.known(super().forward(*args, **kwargs))

    def known(self, tables: Any) -> Any:
        """Tables, of their class where that is known."""
        kind, reads, *_ = self._fusednorm
        # Tables of learned numbers may have gradients, which ours have not; a compiler does not show hooks' writes.
        seen = not is_dynamo_compiling() or bare(self)
        fits = kind is not None and type(tables) is tuple and reads.hold(self) and seen and not tables[0].requires_grad
        return kind(tables) if fits else tables


class PatchedAttention(Patched):
    """Attention whose forward pass calls :meth:`_rotate`; comes before the original class. Its state is True."""

    _sites: tuple[Site, ...]

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        forward, sites = rewritten(before, norms)
        return {"forward": forward, "_sites": sites}

    def _rotate(self, number: int, function: Callable[..., Any], q: Tensor, k: Tensor, tables: Any) -> tuple[Any, Any]:
        """q and k, normalised and rotated as at the site of this number, whose source calls ``function`` now.

        q and k are [batch, tokens, heads, D] if the transposition moved into the site, else as the function takes them;
        the source takes ``tables`` apart into cos and sin.
        """
        site = self._sites[number]
        rotation = self._rotation(site, function, q, tables)
        form = q_weight = k_weight = None
        if site.norms:
            modules: dict[str, Any] = self._modules
            q_norm, k_norm = modules[site.norms[0]], modules[site.norms[1]]
            one, other = (None, None) if rotation is None else (taken_beside(q_norm, q, k), taken_beside(k_norm, k, q))
            if one is None or other is None or not one[0].is_norm_like(other[0]):
                q, k = q_norm(q), k_norm(k)
            else:
                (form, q_weight, _), (_, k_weight, _) = one, other
        if rotation is not None and (angles := tables.angles()) is not None:
            x, y = q, k
            if rotation.heads == 1 and not site.transposed:
                x, y = x.transpose(1, 2), y.transpose(1, 2)
            if rotation.to_halves:
                x, y = _as_halves(x, tables.size), _as_halves(y, tables.size)
            cos, sin = angles
            both: tuple[Any, Any] | None = rotation.of(x, y, cos, sin, form, q_weight, k_weight, tables)
            if both is not None:
                return both
        if form is not None:
            q, k = q_norm(q), k_norm(k)
        if site.transposed:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = tables
        rotated: tuple[Any, Any] = function(q, k, cos, sin, **site.arguments)
        return rotated

    def _rotate_one(self, number: int, function: Callable[..., Any], x: Tensor, tables: Any) -> Any:
        """q or k, rotated as at the site of this number, whose function takes one of them."""
        site = self._sites[number]
        rotation = self._rotation(site, function, x, tables)
        heads = x.transpose(1, 2) if rotation is not None and rotation.heads == 1 else x
        angles = None if rotation is None or rotation.to_halves else tables.angles()
        if rotation is None or angles is None or not tables.fit(heads, heads):
            cos, sin = tables
            return function(x, cos, sin, **site.arguments)
        flags: dict[str, Any] = {"interleaved": rotation.interleaved, "round_products": rotation.round_products}
        y = rotate(heads, *angles, **flags)
        return y.transpose(1, 2) if rotation.heads == 1 else y

    def rotated(self, q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor] | None:
        """q and k, [batch, tokens, heads, D], rotated as at the first site; None where its function has to do it."""
        if not isinstance(tables, Tables):
            return None
        kind = q.dtype, tables.dtype, tables.columns, q.size(-1) == tables.size, q.dim()
        rotation, angles = self._sites[0].rotations.get(kind), tables.angles()
        if rotation is None or angles is None:
            return None
        if rotation.to_halves:
            q, k = _as_halves(q, tables.size), _as_halves(k, tables.size)
        q, k = rotation.of(q, k, *angles)
        return (q.transpose(1, 2), k.transpose(1, 2)) if rotation.heads == 1 else (q, k)

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`: rotations, for each dtype of the tables if they differ by it.

        The norms before them are modules of their own.
        """
        steps: list[tuple[str, dict[str, Any]]] = []
        for site in self._sites:
            if not all(evaluated(condition, type(self).forward, self) for condition in site.conditions):
                continue
            found = [(key[1], one) for key, one in site.rotations.items() if key[0] == of_rows]
            several = len({replace(rotation, heads=0) for _, rotation in found}) > 1
            for tables, rotation in found:
                flags = {name: getattr(rotation, name) for name in ("interleaved", "to_halves", "round_products")}
                step = "rotate", flags | ({"tables": tables} if several else {})
                steps += [] if step in steps else [step]
        return steps

    def _rotation(self, site: Site, function: Callable[..., Any], q: Tensor, tables: Any) -> Rotation | None:
        """The rotation of such a q and of a k that fits; None where the function has to compute it."""
        if not (self._fusednorm and isinstance(tables, Tables)) or function is not site.function or replaced(function):
            return None
        size, dims = q.size(-1), q.dim()
        rotation = site.rotations.get((q.dtype, tables.dtype, tables.columns, size == tables.size, dims))
        if rotation is None or dims != tables.dims + 1 or size < tables.size or (site.transposed and dims != 4):
            return None
        return rotation


class PatchedGatedAttention(PatchedAttention, PatchedActivations):
    """Attention that also multiplies its result by a function of a gate, which is a call of ``_product``."""

    @classmethod
    def of_class(cls, before: type, norms: frozenset[str]) -> dict[str, Any]:
        forward, sites = rewritten(before, norms, gated=True)
        return {"forward": forward, "_sites": sites}

    def _fusednorm_steps(self, of_rows: torch.dtype) -> list[tuple[str, dict[str, Any]]]:
        """For :func:`fusednorm.contract`."""
        products: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(products_of(self._made_of[0]))]
        return [*PatchedAttention._fusednorm_steps(self, of_rows), *products]


def _as_halves(x: Tensor, size: int) -> Tensor:
    """Heads whose first ``size`` numbers are pairs side by side, as halves."""
    whole = x.size(-1) == size
    pairs = (x if whole else x[..., :size]).reshape(*x.shape[:-1], size // 2, 2)
    turned = pairs.transpose(-1, -2).flatten(-2)
    return turned if whole else torch.cat([turned, x[..., size:]], -1)


# Rewriting


@functools.cache
def rewritten(
    attention_class: type, norms: frozenset[str], gated: bool = False
) -> tuple[Callable[..., Any], tuple[Site, ...]]:
    """The forward pass of a class that calls ``_rotate``, and its sites.

    Args:
        attention_class: the class.
        norms: the names of its attributes that hold norms.
        gated: whether it also calls ``_product``.

    Raises:
        LeftAloneError: it has no such site; without a reason if it shows no rotation at all.
    """
    function, tree = source(attention_class.forward)  # type: ignore[attr-defined]
    sites: list[Site] = []
    reason = ""
    for before, block, index, conditions in list(_statements([], tree.body)):
        call = _rotating_call(block[index])
        if call is None:
            continue
        targets, name, (*heads, cos, sin), arguments = call
        tables = _taken_apart(before, cos, sin)
        if tables is None:
            continue
        rotating = function.__globals__.get(name)
        try:
            found = rotations(rotating if len(heads) == 2 else _of_each(rotating), arguments)
        except LeftAloneError as error:
            reason = str(error)
            continue
        if len(heads) == 1:
            (block[index],) = _parse(f"{targets[0]} = self._rotate_one({len(sites)}, {name}, {heads[0]}, {tables})")
            sites.append(Site(rotating, arguments, found, (), False, conditions))
            continue
        q, k = heads
        moved = [_moved(block[:index], x, norms) for x in (q, k)]
        alike = len({(transposed, norm is None) for transposed, norm, _ in moved}) == 1
        counting = {rotation.heads for (*_, dims), rotation in found.items() if dims == 4}
        if not alike or targets != [q, k] or (moved[0][0] and counting != {1}):
            moved = [(False, None, []), (False, None, [])]
        for _, _, left in moved:
            for statement, value in left:
                statement.value = value
        of_norms = tuple(norm for _, norm, _ in moved if norm is not None)
        call_of_ours = f"self._rotate({len(sites)}, {name}, {q}, {k}, {tables})"
        (block[index],) = _parse(f"{', '.join(targets)} = {call_of_ours}")
        sites.append(Site(rotating, arguments, found, of_norms, moved[0][0], conditions))
    if not sites:
        raise LeftAloneError(reason)
    tree = Products(function).visit(tree) if gated else tree
    return compiled(tree, function, attention_class), tuple(sites)


def _of_each(function: Any) -> Any:
    """A function of q and k, which calls one that rotates heads for each; what is no plain function stays as it is."""
    if not inspect.isfunction(function):
        return function

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **arguments: Any) -> tuple[Any, Any]:
        return function(q, cos, sin, **arguments), function(k, cos, sin, **arguments)

    return both


def _statements(
    before: list[ast.stmt], block: list[ast.stmt], conditions: tuple[str, ...] = ()
) -> Iterator[tuple[list[ast.stmt], list[ast.stmt], int, tuple[str, ...]]]:
    """Each statement, by its block and its index there.

    With it come all statements that run before it in any case, and the conditions under which it runs.
    """
    for index, statement in enumerate(block):
        already = [*before, *block[:index]]
        yield already, block, index, conditions
        if isinstance(statement, ast.If):
            condition = ast.unparse(statement.test)
            yield from _statements(already, statement.body, (*conditions, condition))
            yield from _statements(already, statement.orelse, (*conditions, f"not ({condition})"))


def _rotating_call(statement: ast.stmt) -> tuple[list[str], str, list[str], dict[str, Any]] | None:
    """The parts of ``q, k = function(q, k, cos, sin, argument=1)``, where all but the last is a name.

    Or those of ``q = function(q, cos, sin, argument=1)``.
    """
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(), ast.Name()]) | ast.Name() as target],
            value=ast.Call(func=ast.Name(id=name), args=given, keywords=words),
        ):
            targets = [x.id for x in getattr(target, "elts", [target])]
            of_names = [x.id for x in given if isinstance(x, ast.Name)]
            arguments = {
                word.arg: word.value.value for word in words if word.arg and isinstance(word.value, ast.Constant)
            }
            if len(of_names) == len(given) == len(targets) + 2 and len(arguments) == len(words):
                return targets, name, of_names, arguments
    return None


def _taken_apart(statements: list[ast.stmt], cos: str, sin: str) -> str | None:
    """NAME in ``cos, sin = NAME``, if cos and sin are still those of NAME after the statements."""
    for index in reversed(range(len(statements))):
        if found := re.fullmatch(rf"\(?{cos}, {sin}\)? = (\w+)", ast.unparse(statements[index])):
            return None if any(found[1] in stored(later) for later in statements[index:]) else found[1]
        if {cos, sin} & stored(statements[index]):
            return None
    return None


#: Whether the transposition moves; the norm that moves; and what is left of each assignment that loses one of both.
_Moved = tuple[bool, str | None, list[tuple[Any, ast.expr]]]


def _moved(statements: list[ast.stmt], x: str, norms: frozenset[str]) -> _Moved:
    """The part that moves from the statements into one that follows them and takes x."""
    transposed, norm = False, None
    left: list[tuple[Any, ast.expr]] = []
    for statement in reversed(statements):
        if x not in _names(statement):
            continue
        if not isinstance(statement, ast.Assign) or _target(statement) != x:
            break
        value = statement.value
        while True:
            match value:
                case ast.Call(
                    func=ast.Attribute(value=inner, attr="transpose"),
                    args=[ast.Constant(value=1), ast.Constant(value=2)],
                    keywords=[],
                ) if not transposed:
                    value, transposed = inner, True
                case _ if norm is None and called(value)[0] in norms:
                    norm, value = called(value)
                case _:
                    break
        if value is statement.value:
            break
        left.append((statement, value))
        if not (isinstance(value, ast.Name) and value.id == x):
            break
    return transposed, norm, left


# Replacing


def patch_rotations(model: torch.nn.Module, norm: type, gates: bool = False) -> Iterator[Outcome]:
    """Replaces attention that rotates, and the modules of its tables.

    Args:
        model: the model.
        norm: the class of replaced norms.
        gates: whether to replace the gates of such attention, too.
    """
    tables = {module: module._fusednorm for module in model.modules() if isinstance(module, PatchedTables)}
    new = {module: state for module in model.modules() if (state := table_states(module)) is not None}
    kinds = {kind.columns for kind, *_ in (tables | new).values() if kind is not None}
    done = False
    for module in list(model.modules()):
        if isinstance(module, Patched):
            continue
        norms = frozenset(name for name, child in module.named_children() if isinstance(child, norm))
        try:
            _, sites = rewritten(type(module), norms)  # type: ignore[arg-type] # classes have a hash
        except LeftAloneError as error:
            if str(error) and any(isinstance(child, torch.nn.Linear) for child in module.children()):
                yield type(module).__name__, False, str(error)
            continue
        if not any(columns in kinds for site in sites for _, _, columns, *_ in site.rotations):
            yield type(module).__name__, False, "no module of the model has the tables that its rotation takes"
            continue
        fused = "q/k norm and rotation fused" if any(site.norms for site in sites) else "rotation of q and k fused"
        products = products_of(type(module)) if gates else frozenset()  # type: ignore[arg-type] # classes have a hash
        mixin = PatchedGatedAttention if products else PatchedAttention
        outcome = attach(module, mixin, norms, True, ", ".join([fused, *sorted(products)]))
        done |= outcome[1]
        yield outcome
    for module, state in new.items() if done else ():
        attach(module, PatchedTables, frozenset(), state, "tables")


def table_states(module: torch.nn.Module) -> tuple[Any, Reads] | None:
    """The kind of a module's tables, if it may have some: it has no children, but buffers."""
    leaf = next(module.children(), None) is None
    reads = Reads()
    may = leaf and next(module.buffers(), None) is not None and not isinstance(module, Patched)
    kind = tables_of(module, reads) if may else None
    return None if kind is None else (kind, reads)
