"""The folders of the library are rooms whose doors open one way: a module knows only rooms before its own."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: In the order in which one may know the ones before it.
ROOMS = ("calls", "reference", "backends", "engine", "torch_ops", "operations", "clients", "conformance", "tools")
CLIENTS = ("compat", "transformers", "vllm", "onnx", "onnx_operators", "accelerate")

#: Public names that modules outside of all rooms hand on.
HANDED_ON = {
    "call": "calls",
    "layout": "calls",
    "quantizations": "calls",
    "Quantization": "calls",
    "BackendError": "calls",
}
HANDED_ON |= {"registry": "engine", "distributed": "torch_ops", "modules": "operations"}


def room_of(first):
    """The number of the room of a module, by the first part of its name after ``fusednorm``; None outside of all."""
    name = "clients" if first in CLIENTS else HANDED_ON.get(first, first)
    return ROOMS.index(name) if name in ROOMS else None


def imported(path):
    """All modules of fusednorm that a file imports, at its top or in a function, for types or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fusednorm."):
                yield name.removeprefix("fusednorm.")


def test_no_import_goes_up():
    up = []
    for folder in ("fusednorm", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            place = path.relative_to(ROOT if folder == "backends" else ROOT / folder).with_suffix("")
            room = room_of(place.parts[0])
            for name in imported(path) if room is not None else ():
                other = room_of(name.split(".")[0])
                if other is not None and other > room:
                    up.append((".".join(place.parts), name))
    assert up == []


#: Those of cpu/.
C_ROOMS = ("abi", "machine", "kernels", "variants", "run", "python")


def test_no_include_goes_up():
    folder, up = ROOT / "cpu", []
    for path in sorted(folder.rglob("*.[ch]")):
        place, text = path.relative_to(folder), path.read_text(encoding="utf-8")
        for name in re.findall(r'# *include "(.*)"', text):
            if C_ROOMS.index(name.split("/")[0]) > C_ROOMS.index(place.parts[0]):
                up.append((str(place), name))
        assert ("<Python.h>" in text) <= (place.parts[0] == "python"), place
    assert up == []
