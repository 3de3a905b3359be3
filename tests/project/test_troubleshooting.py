"""docs/troubleshooting.md against the source: its headings are messages that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What stands for a value in a message.
VARIES = "…"

#: Calls whose first argument a user reads.
SPEAKING = {"warn", "warning", "error", "_warn_once", "_decline"}

#: Functions that return reasons, which the registry puts into an error, a warning or the doctor's table.
REASONING = {"unavailable", "unsuitable", "missing", "changed", "too_long", "_unusable", "_unknown"}

#: Caught where they are raised: `patch` and `compare` show them in a report, beside the name of what was left out, and
#: layers of `kernels` run the model's own code.
REPORTED = {
    "NotANormError",
    "NotARotationError",
    "NotAnMLPError",
    "NotFollowedError",
    "NotRewrittenError",
    "NotSymbolicError",
    "MissingError",
}


def text(node):
    """A message as it is written, with one sign for each value in it."""
    match node:
        case ast.Constant(value=str(value)):
            return value.replace("%s", VARIES)
        case ast.JoinedStr(values=values):
            return "".join(map(text, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
    return VARIES


def spoken(node):
    """The messages in a piece of the source that a user may come to read."""
    match node:
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[message, *_])):
            if name not in REPORTED:
                yield message
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[message, *_]) if name in SPEAKING:
            if not isinstance(message, ast.Name):  # which was looked at where it was made
                yield message
        case ast.Call(func=ast.Name(id="print"), args=[message], keywords=[_]):  # to stderr
            if not isinstance(message, ast.Name):
                yield message
        case ast.Call(func=ast.Name(id="BackendInfo"), args=[_, _, ast.List(elts=reasons), *_]):
            yield from reasons
        case ast.Assign(targets=[ast.Name(id="_missing")], value=ast.List(elts=reasons)):
            yield from reasons
        case ast.FunctionDef(name=name) if name in REASONING:
            for statement in ast.walk(node):
                match statement:
                    case ast.Return(value=ast.List(elts=reasons) | ast.IfExp(body=ast.List(elts=reasons))):
                        yield from reasons


def messages(*patterns):
    """What the files may say, with the place."""
    found = {}
    for file in (file for pattern in patterns for file in sorted(ROOT.glob(pattern))):
        for node in ast.walk(ast.parse(file.read_text())):
            found |= {text(message): f"{file.relative_to(ROOT)}:{node.lineno}" for message in spoken(node)}
    found.pop(VARIES, None)  # what hands on another's message
    return found


MESSAGES = messages("fusednorm/**/*.py", "backends/**/*.py")
HEADINGS = re.findall("^### `+(.*?)`+$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)


def test_every_heading_begins_a_message():
    assert [heading for heading in HEADINGS if not any(m.startswith(heading) for m in MESSAGES)] == []
    assert len(set(HEADINGS)) == len(HEADINGS)
