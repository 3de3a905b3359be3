"""Decoder layers with their additions fused into the norms around them, by rewriting their own source.

Only adjacent statements are replaced, and only by a call that computes the same::

    hidden_states = residual + x                     hidden_states, residual = self._add_norm(self.norm, x, residual)
    residual = hidden_states                   ->
    hidden_states = self.norm(hidden_states)

Where ``x = self.first(x)`` stands right before the addition, the call takes ``first=self.first`` too, and where x is
multiplied by a factor, ``x_scale=factor``. An addition after a norm that no norm follows becomes ::

    hidden_states = self._norm_add(self.first, x, residual)

A norm of a sum that is not kept becomes ::

    hidden_states = self._add_norm(self.norm, x, residual)[0]

whether the sum is the norm's argument or has had the same name. Where the norm's result is at once the argument of
another call, ``y = self.mlp(self.norm(sum))``, it has a name first. Both branches of an ``if`` are rewritten.
Where an ``if`` parts an addition from its norm, both branches get all that stands around it.

A forward pass without such statements, or without accessible source, does not change.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from fusednorm.transformers.reads import LeftAloneError, in_a_line


class Rewritten(NamedTuple):
    """A rewritten forward pass of a layer."""

    forward: Callable[..., Any]
    factors: tuple[str | None, ...]  # for each fused addition the source of its term's factor, if it has one
    normed: int  # of these additions, those of a term that a norm right before them returns


def rewritten(layer_class: type, norms: frozenset[str]) -> Rewritten:
    """The forward pass of a class with its additions fused.

    Args:
        layer_class: the layer's class.
        norms: the names of its attributes that hold norms.

    Raises:
        LeftAloneError: no addition can be fused.
    """
    function, tree = source(layer_class.forward)  # type: ignore[attr-defined]
    tree.body, found = _fused(tree.body, norms)
    if not found.changed:
        raise LeftAloneError("no addition stands right before a norm")
    forward = compiled(tree, function, layer_class)
    return Rewritten(forward, tuple(found.factors), found.normed)


@dataclass
class _Counts:
    """The counts of :class:`Rewritten` for some statements, and whether any of these changed."""

    factors: list[str | None] = field(default_factory=list)
    normed: int = 0
    changed: bool = False


def _fused(rest: list[ast.stmt], norms: frozenset[str]) -> tuple[list[ast.stmt], _Counts]:
    """Statements with their additions fused."""
    body: list[ast.stmt] = []
    found = _Counts()
    rest = list(rest)
    while rest:
        added = _addition(rest, norms)
        after = [] if added is None else rest[added.used :]
        if added is None:
            statement = rest.pop(0)
            if isinstance(statement, ast.If):
                last = [_addition(branch[-1:], norms) for branch in (statement.body, statement.orelse)]
                if any(added is not None and _norm_after(added.total, rest, norms) for added in last):
                    statement, rest = _with_all([statement, *rest], 0), []
                _fuse_branches(statement, norms, found)
            elif (sum_in := _norm_of_a_sum(statement, norms)) is not None:
                statement = sum_in
                found.factors.append(None)
                found.changed = True
            body.append(statement)
            continue
        used = 0
        if (norm := _norm_after(added.total, after, norms)) is not None:
            y, kept, attribute, used = norm
            call = f"self._add_norm(self.{attribute}, {added.arguments()})"
            body += _parse(f"{y} = {call}[0]" if kept is None else f"{y}, {kept} = {call}")
        elif (name := _norm_first_called(added.total, after, norms)) is not None:
            body += _parse(f"_normed, {added.total} = self._add_norm(self.{name}, {added.arguments()})")
        elif after and _may_come_first(after[0], added.total):
            rest = [_with_all(rest, added.used)]
            continue
        elif added.first is not None:
            call = f"self._norm_add(self.{added.first}, {ast.unparse(added.x)}, {added.residual})"
            body += _parse(f"{added.total} = {call}")
        else:
            body += rest[: added.used]
            rest = after
            continue
        found.changed = True
        found.factors.append(None if added.x_scale is None else ast.unparse(added.x_scale))
        found.normed += added.first is not None
        rest = after[used:]
    return body, found


def _may_come_first(statement: ast.stmt, total: str) -> bool:
    """Whether a statement is an ``if`` that may decide before the sum ``total`` is made."""
    match statement:
        case ast.If(test=test):
            calls = any(isinstance(node, ast.Call | ast.NamedExpr) for node in ast.walk(test))
            return not calls and total not in _names(test)
    return False


def _with_all(statements: list[ast.stmt], index: int) -> ast.If:
    """The ``if`` of this index with the statements before and after it in both branches."""
    before, chosen, after = statements[:index], cast(ast.If, statements[index]), statements[index + 1 :]
    branches = [copy.deepcopy([*before, *branch, *after]) for branch in (chosen.body, chosen.orelse)]
    return ast.If(chosen.test, *branches)


def _fuse_branches(statement: ast.If, norms: frozenset[str], found: _Counts) -> None:
    """Fuses the additions of the branches of an ``if``, and counts those of the branch that has fewer."""
    statement.body, one = _fused(statement.body, norms)
    statement.orelse, other = _fused(statement.orelse, norms)
    fewer = min(one, other, key=lambda counts: len(counts.factors))
    found.changed |= one.changed or other.changed
    found.factors += fewer.factors
    found.normed += fewer.normed


def source(method: Callable[..., Any]) -> tuple[Any, ast.FunctionDef]:
    """A method without the wrappers of its decorators, and its syntax tree without a docstring."""
    function: Any = inspect.unwrap(method)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise LeftAloneError(f"its source cannot be had: {error}") from error
    if not isinstance(tree, ast.FunctionDef) or function.__closure__:
        raise LeftAloneError("its forward pass is no plain function")
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    if function is method:
        tree.decorator_list = []  # they returned the function itself
    return function, tree


def evaluated(expression: str, function: Callable[..., Any], module: object) -> Any:
    """An expression in the source of a module's method; the source itself if only a call knows its value."""
    try:
        return eval(expression, function.__globals__, {"self": module})
    except NameError:
        return expression


def compiled(tree: ast.FunctionDef, function: Any, owner: type) -> Callable[..., Any]:
    """The function of a class, of a syntax tree that :func:`source` has made of ``function``, and that was changed.

    Raises:
        LeftAloneError: a decorator does not take the new function.
    """
    decorators, tree.decorator_list = tree.decorator_list, []
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [default and ast.Constant(None) for default in tree.args.kw_defaults]
    module = ast.Module([tree], [])
    ast.fix_missing_locations(module)
    names: dict[str, Any] = {}
    exec(compile(module, f"<fusednorm: {owner.__qualname__}.{tree.name}>", "exec"), function.__globals__, names)
    made = names[tree.name]
    # Their values, which the same expressions may not have here and now.
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    try:
        for decorator in reversed(decorators):
            decorate = eval(compile(ast.Expression(decorator), "<fusednorm>", "eval"), function.__globals__)
            # transformers writes a docstring from the class that stands around the source.
            made = made if "auto_docstring" in getattr(decorate, "__qualname__", "") else decorate(made)
    except Exception as error:  # code of others, which may look for the class or the file of a function
        raise LeftAloneError(f"its decorators do not take it: {in_a_line(error)}") from error
    return cast("Callable[..., Any]", made)


@dataclass(frozen=True)
class _Addition:
    """``total = residual + x``, and the statement before it if that is ``x = self.first(...)``."""

    total: str
    residual: str
    x: ast.expr  # the term, or the argument of the norm ``first``, without its factor
    first: str | None
    x_scale: ast.expr | None  # the factor of the term
    used: int  # statements

    def arguments(self) -> str:
        """The arguments of ``_add_norm``."""
        words = [] if self.first is None else [f"first=self.{self.first}"]
        words += [] if self.x_scale is None else [f"x_scale={ast.unparse(self.x_scale)}"]
        return ", ".join([ast.unparse(self.x), self.residual, *words])


def _addition(statements: list[ast.stmt], norms: frozenset[str]) -> _Addition | None:
    """The addition with which the statements begin."""
    if not statements:
        return None
    for total, residual, x in _sums(statements[0]):
        match x:
            case ast.BinOp(left=ast.Constant() | ast.Attribute() as factor, op=ast.Mult(), right=term):
                return _Addition(total, residual, term, None, factor, 1)
            case ast.BinOp(left=term, op=ast.Mult(), right=factor):
                return _Addition(total, residual, term, None, factor, 1)
        return _Addition(total, residual, x, None, None, 1)
    h, (name, x) = _target(statements[0]), called(getattr(statements[0], "value", None))
    if name in norms and len(statements) > 1:
        for total, residual, term in _sums(statements[1]):
            # The sum must overwrite the norm's result, which keeps no name.
            if isinstance(term, ast.Name) and term.id == h == total and total not in re.findall(r"\w+", residual):
                return _Addition(total, residual, x, name, None, 2)
    return None


def _norm_after(
    total: str, statements: list[ast.stmt], norms: frozenset[str]
) -> tuple[str, str | None, str, int] | None:
    """The norm of a sum with which the statements begin: ``y = self.norm(total)``, maybe after ``kept = total``.

    Returns:
        The names of its result and of the sum after it (None: it has none); the attribute of the norm; and the number
        of statements.
    """
    text = "\n".join(map(ast.unparse, statements[:2]))
    found = re.match(rf"(?:(\w+) = {total}\n)?(\w+) = self\.(\w+)\({total}\)$", text, re.MULTILINE)
    if found is None:
        return None
    copied, y, name = found.groups()
    # The sum keeps one name at most; the norm's result must overwrite the other name.
    if name not in norms or (copied is not None and not copied != y == total):
        return None
    return y, copied or (None if y == total else total), name, 1 if copied is None else 2


def _norm_of_a_sum(statement: ast.stmt, norms: frozenset[str]) -> ast.stmt | None:
    """``y = self.norm(residual + x)``, fused; None for another statement."""
    target, (name, argument) = _target(statement), called(getattr(statement, "value", None))
    if target is None or name not in norms:
        return None
    for residual, x in _terms(argument):
        [made] = _parse(f"{target} = self._add_norm(self.{name}, {ast.unparse(x)}, {residual})[0]")
        return made
    return None


def _norm_first_called(total: str, statements: list[ast.stmt], norms: frozenset[str]) -> str | None:
    """The norm of a sum which the first statement calls before all else; the name ``_normed`` takes its place there."""
    if not statements or not isinstance(statements[0], ast.Assign | ast.Return):
        return None
    call = _first_called(statements[0])
    name = _norm_of(call, total)
    if name not in norms:
        return None

    class _Named(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return ast.Name("_normed", ast.Load()) if node is call else self.generic_visit(node)

    _Named().visit(statements[0])
    return name


def _first_called(node: ast.AST) -> ast.Call | None:
    """The call that is made first, if nothing decides whether it is made."""
    if not isinstance(node, ast.stmt | ast.Call | ast.BinOp | ast.Attribute | ast.Tuple | ast.keyword):
        return None
    for part in ast.iter_child_nodes(node):
        if any(isinstance(inner, ast.Call) for inner in ast.walk(part)):
            return _first_called(part)
    return node if isinstance(node, ast.Call) else None


def _sums(statement: ast.stmt) -> Iterator[tuple[str, str, ast.expr]]:
    """The parts of ``sum = residual + term``: the name of the sum, the residual, and the term."""
    target = _target(statement)
    if target is not None:
        for residual, x in _terms(cast(ast.Assign, statement).value):
            yield target, residual, x


def _terms(expression: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The residual and the term of ``residual + term``. Of two names either may be the residual."""
    match expression:
        case ast.BinOp(left=one, op=ast.Add(), right=other):
            for residual, x in sorted(((one, other), (other, one)), key=lambda pair: not isinstance(pair[0], ast.Name)):
                match residual:
                    # residual * self.alpha, as MiniMax has it, is as little work as it was
                    case ast.Name() | ast.BinOp(left=ast.Name(), op=ast.Mult(), right=ast.Attribute()):
                        if not _is_tuple(x):
                            yield ast.unparse(residual), x


def _is_tuple(expression: ast.expr) -> bool:
    """Whether this is a tuple, or a part of one, whose sums have an order."""
    return isinstance(expression, ast.Tuple) or isinstance(getattr(expression, "slice", None), ast.Slice)


def _norm_of(expression: ast.expr | None, argument: str) -> str | None:
    """NAME in ``self.NAME(argument)``."""
    name, x = called(expression)
    return name if name and ast.unparse(x) == argument else None


def called(expression: ast.expr | None) -> tuple[str, ast.expr]:
    """NAME and the argument of ``self.NAME(argument)``; an empty name for another expression."""
    match expression:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[argument], keywords=[]):
            return name, argument
    return "", ast.Constant(None)


def _target(statement: ast.stmt) -> str | None:
    """The name to which a statement assigns, if it is a single name."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def stored(node: ast.AST) -> set[str]:
    """The names to which a statement assigns."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def _parse(source: str) -> list[ast.stmt]:
    return ast.parse(source).body
