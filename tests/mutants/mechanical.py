"""Mutants of one Python file of the library that need no entry: each operator, constant, argument and statement.

They are made in a copy of the installed package, so that nothing is built.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

OPPOSITES = [(ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
OPPOSITES += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mult), (ast.BitAnd, ast.BitOr)]
OTHER = {b: a for a, b in OPPOSITES} | dict(OPPOSITES)


def without(values, i):
    return [*values[:i], *values[i + 1 :]]


def faults(node):
    """The nodes that may stand in the place of this one, each with one fault."""
    match node:
        case ast.Compare(left, ops, values):
            for i, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:i], OTHER[type(op)](), *ops[i + 1 :]], values)
        case ast.BoolOp(op, [_, _] as values):
            yield from values
        case ast.BoolOp(op, values):
            yield from (ast.BoolOp(op, without(values, i)) for i in range(len(values)))
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield ast.BinOp(left, OTHER[type(op)](), right)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(function, args, keywords):
            yield from (ast.Call(function, args, without(keywords, i)) for i in range(len(keywords)))
        case ast.Expr(ast.Constant()):
            return  # a docstring
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Return():
            yield ast.Pass()


def mutants(source, first, last):
    """The number of a line, its fault, and the whole text with it, for all faults between two lines."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not first <= getattr(node, "lineno", 0) <= last:
            continue
        before = b"".join([*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]])
        after = b"".join([lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]])
        old = source[len(before) : len(source) - len(after)].decode()
        for fault in faults(node):
            new = ast.unparse(fault)
            text = new if isinstance(fault, ast.stmt) else f"({new})"
            yield node.lineno, f"{old} -> {new}", before + text.encode() + after


def run(place, options):
    """Prints the mutants of FILE or FILE:FIRST-LAST with which pytest does not fail, and returns their number."""
    file, _, part = place.partition(":")
    first, last = map(int, part.split("-")) if part else (1, 10**6)
    survivors, number = 0, 0
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "fusednorm"
        shutil.copytree(Path(find_spec("fusednorm").origin).parent, package)
        path = package / file.removeprefix("fusednorm/")
        source = Path(file).read_bytes()
        path.write_bytes(source)
        search = os.pathsep.join([name, os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}
        command = (sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *options)
        if subprocess.run(command, env=environment).returncode:
            sys.exit("the tests fail without a mutant too")
        for number, (line, fault, text) in enumerate(mutants(source, first, last), 1):  # noqa: B007
            path.write_bytes(text)
            if not subprocess.run(command, env=environment, capture_output=True).returncode:
                survivors += 1
                print(f"SURVIVED: {file}:{line}: {fault}", flush=True)
    print(f"{number - survivors} of {number} mutants caught")
    return survivors
