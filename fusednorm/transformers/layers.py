"""Decoder layers with their additions fused into the norms around them, by rewriting their own source.

Only adjacent statements are replaced, and only by a call that computes the same::

    hidden_states = residual + x                     hidden_states, residual = self._add_norm(self.norm, x, residual)
    residual = hidden_states                   ->
    hidden_states = self.norm(hidden_states)

    hidden_states = residual + x               ->    hidden_states = self._add_last(x, residual)
    return hidden_states

Where ``x = self.first(x)`` stands right before the addition, the calls take ``first=self.first`` too, and where x is
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
    fused: int  # additions that it fuses with a norm of the layer
    normed: int  # of these, those of a term that a norm right before them returns
    ends: bool  # in ``_add_last``
    last_normed: bool  # whether that addition is one of ``normed``
    factors: tuple[str | None, ...]  # for each of these additions the source of its term's factor, if it has one

    def additions(self, handed: bool) -> int:
        """The number of fused additions, the last one with the norm after the layer if ``handed``.

        An addition right after a norm is fused with that norm in any case.
        """
        return self.fused + (handed and not self.last_normed)


def rewritten(layer_class: type, norms: frozenset[str]) -> Rewritten:
    """The forward pass of a class with its additions fused.

    Args:
        layer_class: the layer's class.
        norms: the names of its attributes that hold norms.

    Raises:
        LeftAloneError: no addition can be fused.
    """
    function, tree = source(layer_class.forward)  # type: ignore[attr-defined]
    tree.body, found = _fused(tree.body, [], norms)
    if not found.changed:
        raise LeftAloneError("no addition stands right before a norm or the end of its forward pass")
    forward = compiled(tree, function, layer_class)
    return Rewritten(forward, found.fused, found.normed, found.ends, found.last_normed, tuple(found.factors))


@dataclass
class _Counts:
    """As :class:`Rewritten` has them, of statements; and whether any of these changed."""

    fused: int = 0
    normed: int = 0
    ends: bool = False
    last_normed: bool = False
    factors: list[str | None] = field(default_factory=list)
    changed: bool = False


def _fused(rest: list[ast.stmt], tail: list[ast.stmt], norms: frozenset[str]) -> tuple[list[ast.stmt], _Counts]:
    """Statements with their additions fused, before those of ``tail``."""
    body: list[ast.stmt] = []
    found = _Counts()
    rest = [made for statement in rest for made in _named(statement)]
    while rest:
        added = _addition(rest, norms)
        after = [] if added is None else rest[added.used :]
        if added is None:
            statement = rest.pop(0)
            if isinstance(statement, ast.If):
                last = [_addition(branch[-1:], norms) for branch in (statement.body, statement.orelse)]
                if any(added is not None and _norm_after(added.total, rest, norms) for added in last):
                    statement, rest = _with_all([statement, *rest], 0), []
                _fuse_branches(statement, rest or tail, norms, found)
            elif (sum_in := _norm_of_a_sum(statement, norms)) is not None:
                statement = sum_in
                found.fused += 1
                found.factors.append(None)
                found.changed = True
            body.append(statement)
            continue
        used = 0
        if (norm := _norm_after(added.total, after, norms)) is not None:
            y, kept, attribute, used = norm
            call = f"self._add_norm(self.{attribute}, {added.arguments()})"
            body += _parse(f"{y} = {call}[0]" if kept is None else f"{y}, {kept} = {call}")
            found.fused += 1
        elif (name := _norm_first_called(added.total, after, norms)) is not None:
            body += _parse(f"_normed, {added.total} = self._add_norm(self.{name}, {added.arguments()})")
            found.fused += 1
        elif after and _may_come_first(after[0], added.total):
            rest = [_with_all(rest, added.used)]
            continue
        elif _returns(after or tail, added.total):
            body += _parse(f"{added.total} = self._add_last({added.arguments()})")
            found.ends, found.last_normed = True, added.first is not None
            found.fused += found.last_normed
        elif added.first is not None:
            call = f"self._norm_add(self.{added.first}, {ast.unparse(added.x)}, {added.residual})"
            body += _parse(f"{added.total} = {call}")
            found.fused += 1
        else:
            body += rest[: added.used]
            rest = after
            continue
        found.changed = True
        found.factors.append(None if added.x_scale is None else ast.unparse(added.x_scale))
        found.normed += added.first is not None
        rest = after[used:]
    return body, found


def _named(statement: ast.stmt) -> list[ast.stmt]:
    """A statement; ``return a + b`` as two, the first of which names the sum."""
    match statement:
        case ast.Return(value=ast.BinOp(op=ast.Add()) as value):
            return _parse(f"_total = {ast.unparse(value)}\nreturn _total")
    return [statement]


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


def _fuse_branches(statement: ast.If, tail: list[ast.stmt], norms: frozenset[str], found: _Counts) -> None:
    """Fuses the additions of the branches of an ``if``, and counts those of the branch that has fewer."""
    statement.body, one = _fused(statement.body, tail, norms)
    statement.orelse, other = _fused(statement.orelse, tail, norms)
    fewer = min(one, other, key=lambda counts: len(counts.factors))
    found.changed |= one.changed or other.changed
    found.fused += fewer.fused
    found.normed += fewer.normed
    found.factors += fewer.factors
    if fewer.ends:
        found.ends, found.last_normed = True, fewer.last_normed


def first_norm(layer_class: type) -> str | None:
    """The attribute of the norm that a layer first applies to its input; None if the layer begins otherwise."""
    try:
        _, tree = source(layer_class.forward)  # type: ignore[attr-defined]
    except LeftAloneError:
        return None
    if len(tree.args.args) < 2:
        return None
    hidden = tree.args.args[1].arg
    # residual = hidden_states
    others = [statement for statement in tree.body[:2] if not re.fullmatch(f".+ = {hidden}", ast.unparse(statement))]
    if not others or not isinstance(others[0], ast.Assign):
        return None
    # Mamba's layers convert their input to the norm's dtype, which mostly returns it.
    [first] = _parse(ast.unparse(others[0]).replace(f"{hidden}.to(dtype=self.norm.weight.dtype)", hidden))
    return _norm_of(_first_called(first), hidden)


def straight_on(model_class: type, layers: str) -> tuple[bool, str | None]:
    """Whether a model passes each layer's result unchanged to the next layer; and the norm of the last result.

    Args:
        model_class: its forward pass loops over the layers.
        layers: the attribute that holds the layers, with dots as the norm has them.
    """
    try:
        _, tree = source(model_class.forward)  # type: ignore[attr-defined]
    except LeftAloneError:
        return False, None
    loops = [
        node for node in ast.walk(tree) if isinstance(node, ast.For) and f"self.{layers}" in ast.unparse(node.iter)
    ]
    if len(loops) != 1:
        return False, None
    (loop,) = loops
    for call in ast.walk(loop):
        match call:
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=layer), args=[ast.Name(id=hidden), *_])):
                if layer in _names(loop.target):
                    break
    else:
        return False, None
    # hidden = layer(hidden), or hidden, weights = layer(hidden), or outputs = layer(hidden) and hidden = outputs[0]
    result = ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)
    own = {ast.unparse(call)} if result == hidden else {f"{hidden} = {result}", f"{hidden} = {result}[0]"}
    for one in loop.body:
        # A call's argument may decide that this is another sum, whose norm the next layer computes itself.
        decided = isinstance(one, ast.If) and (
            call in ast.walk(one) or _names(one.test) - _names(loop.target) - {"self"}
        )
        if hidden in stored(one) and not decided and ast.unparse(one) not in own:
            return False, None
    if loop.orelse or not own & {ast.unparse(node) for node in ast.walk(loop)}:
        return False, None
    if loop not in tree.body:
        return True, None
    for following in tree.body[tree.body.index(loop) + 1 :]:
        if hidden in _names(following):
            found = re.fullmatch(rf"(?:\w+ =|return) self\.([\w.]+)\({hidden}\)", ast.unparse(following))
            return True, found and found[1]
    return True, None


def in_turn(block_class: type, layers: str) -> bool:
    """Whether a block calls its layers by their numbers, as T5's; ``layers`` is the attribute that holds them."""
    try:
        return f"self.{layers}[0](" in ast.unparse(source(block_class.forward)[1])  # type: ignore[attr-defined]
    except LeftAloneError:
        return False


def limits_float16(module_class: type) -> bool:
    """Whether a forward pass limits rows of float16, as many encoders do after their last addition."""
    return "torch.float16" in ast.unparse(source(module_class.forward)[1])  # type: ignore[attr-defined]


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
        """Of ``_add_norm`` and ``_add_last``."""
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


def _returns(statements: list[ast.stmt], total: str) -> bool:
    """Whether the statements return the sum, by itself or first in a tuple, and do nothing else with it.

    In float16 they may limit it before, as in many encoders.
    """
    match statements:
        case [ast.If(test=test), *rest] if ast.unparse(test).startswith(f"{total}.dtype == torch.float16"):
            return _returns(rest, total)
        case [ast.Assign(targets=[ast.Name(id=packed)], value=value), *rest] if _first(value) == total:
            # if output_attentions: outputs += (weights,)
            more = bool(rest) and isinstance(rest[0], ast.If) and f"    {packed} += " in ast.unparse(rest[0])
            return _returns(rest[more:], packed)
        case [ast.Return(value=ast.expr() as value)]:
            return total in (ast.unparse(value), _first(value))
    return False


def _first(expression: ast.expr) -> str | None:
    """NAME in ``(NAME, others)``, to which another tuple may be added."""
    match expression:
        case ast.Tuple(elts=[ast.Name(id=name), *_]) | ast.BinOp(left=ast.Tuple(elts=[ast.Name(id=name), *_])):
            return name
    return None


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def stored(node: ast.AST) -> set[str]:
    """The names to which a statement assigns."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def _parse(source: str) -> list[ast.stmt]:
    return ast.parse(source).body
