"""Decoder layers with their additions fused into the norms that follow, by rewriting their own source.

Only adjacent statements are replaced, and only by a call that computes the same::

    hidden_states = residual + x                     hidden_states, residual = self._add_norm(self.norm, x, residual)
    residual = hidden_states                   ->
    hidden_states = self.norm(hidden_states)

    hidden_states = residual + x               ->    hidden_states = self._add_last(x, residual)
    return hidden_states

A forward pass without such statements, or without accessible source, does not change.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


class NotRewrittenError(Exception):
    """A forward pass is not rewritten, for the reason in the message."""


def rewritten(layer_class: type, norms: frozenset[str]) -> tuple[Callable[..., Any], int, bool]:
    """The forward pass of a class with its additions fused.

    Args:
        layer_class: the layer's class.
        norms: the names of its attributes that hold norms.

    Returns:
        The function; the number of additions that it fuses within the layer; whether it ends in ``_add_last``.

    Raises:
        NotRewrittenError: no addition can be fused.
    """
    function, tree = _source(layer_class)
    body: list[ast.stmt] = []
    rest = list(tree.body)
    fused, ends = 0, False
    while rest:
        replaced, used = _fuse(rest, norms)
        if used:
            fused += 1
        elif len(rest) == 2 and (last := _fuse_last(rest)) is not None:
            replaced, used, ends = last, 2, True
        else:
            replaced, used = [rest[0]], 1
        body += replaced
        rest = rest[used:]
    if not (fused or ends):
        raise NotRewrittenError("no addition stands right before a norm or the end of its forward pass")
    tree.body = body
    module = ast.Module([tree], [])
    ast.fix_missing_locations(module)
    names: dict[str, Any] = {}
    exec(compile(module, f"<fusednorm: {layer_class.__qualname__}.forward>", "exec"), function.__globals__, names)
    return names[tree.name], fused, ends


def first_norm(layer_class: type) -> str | None:
    """The attribute of the norm that a layer first applies to its input; None if the layer begins otherwise."""
    try:
        _, tree = _source(layer_class)
    except NotRewrittenError:
        return None
    hidden = tree.args.args[1].arg if len(tree.args.args) > 1 else None
    for statement in tree.body[:2]:
        match statement:
            case ast.Assign(value=ast.Name(id=name)) if name == hidden:
                continue  # residual = hidden_states
            case ast.Assign(value=call) if (norm := _norm_of(call, hidden)) is not None:
                return norm
        return None
    return None


def straight_on(model_class: type, layers: str) -> tuple[bool, str | None]:
    """Whether a model passes each layer's result unchanged to the next layer; and the norm of the last result.

    Args:
        model_class: its forward pass loops over the layers.
        layers: the attribute that holds the layers.
    """
    try:
        _, tree = _source(model_class)
    except NotRewrittenError:
        return False, None
    loops = [
        node for node in ast.walk(tree) if isinstance(node, ast.For) and f"self.{layers}" in ast.unparse(node.iter)
    ]
    if len(loops) != 1:
        return False, None
    (loop,) = loops
    passed = [
        (call.args[0].id, statement)
        for statement in loop.body
        if isinstance(statement, ast.Assign)
        and isinstance(call := statement.value, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in _names(loop.target)
        and call.args
        and isinstance(call.args[0], ast.Name)
        and _target(statement) == call.args[0].id
    ]
    if len(passed) != 1 or loop.orelse:
        return False, None
    hidden, statement = passed[0]
    if any(hidden in _names(other) for other in loop.body if other is not statement):
        return False, None
    if loop not in tree.body:
        return True, None
    for following in tree.body[tree.body.index(loop) + 1 :]:
        if hidden in _names(following):
            return True, _norm_of(following.value, hidden) if isinstance(following, ast.Assign | ast.Return) else None
    return True, None


def _source(owner: type) -> tuple[Any, ast.FunctionDef]:
    """A class's forward function without decorators, and its syntax tree without a docstring."""
    function = inspect.unwrap(owner.forward)  # type: ignore[attr-defined]
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise NotRewrittenError(f"its source cannot be had: {error}") from error
    if not isinstance(tree, ast.FunctionDef) or function.__closure__:
        raise NotRewrittenError("its forward pass is no plain function")
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return function, tree


def _fuse(statements: list[ast.stmt], norms: frozenset[str]) -> tuple[list[ast.stmt], int]:
    """The replacement of an addition and the norm after it, which begin the statements, and their number."""
    added = _addition(statements[0])
    if added is None:
        return [], 0
    total, residual, x = added
    for used in (2, 3):  # the statements, with or without "residual = hidden_states" between
        if len(statements) < used or (used == 3 and not _is_copy(statements[1], total)):
            continue
        kept = total if used == 2 else _target(statements[1])
        norm, y = statements[used - 1], _target(statements[used - 1])
        name = _norm_of(norm.value, total) if isinstance(norm, ast.Assign) else None
        # The sum keeps one name only; the norm's result must overwrite the other name.
        if name not in norms or kept is None or y is None or (used == 2) != (y != total) or y == kept:
            continue
        return _parse(f"{y}, {kept} = self._add_norm(self.{name}, {ast.unparse(x)}, {residual})"), used
    return [], 0


def _fuse_last(statements: list[ast.stmt]) -> list[ast.stmt] | None:
    """The replacement of an addition and the ``return`` of its sum."""
    added, returned = _addition(statements[0]), statements[1]
    if added is None or not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.Name):
        return None
    total, residual, x = added
    if returned.value.id != total:
        return None
    return _parse(f"{total} = self._add_last({ast.unparse(x)}, {residual})\nreturn {total}")


def _addition(statement: ast.stmt) -> tuple[str, str, ast.expr] | None:
    """The parts of ``sum = residual + term``: the names of the sum and of the residual, and the term."""
    target = _target(statement)
    match statement:
        case ast.Assign(value=ast.BinOp(left=ast.Name(id=residual), op=ast.Add(), right=x)) if target:
            return target, residual, x
        case ast.Assign(value=ast.BinOp(left=x, op=ast.Add(), right=ast.Name(id=residual))) if target:
            return target, residual, x
    return None


def _norm_of(expression: ast.expr | None, argument: str | None) -> str | None:
    """NAME in ``self.NAME(argument)``."""
    match expression:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=given)], keywords=[]
        ) if given == argument:
            return name
    return None


def _is_copy(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and statement.value.id == name


def _target(statement: ast.stmt) -> str | None:
    """The name to which a statement assigns, if it is a single name."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _parse(source: str) -> list[ast.stmt]:
    return ast.parse(source).body
